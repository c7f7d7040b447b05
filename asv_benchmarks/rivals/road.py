"""What a road is: sessions go in, a window of token IDs comes out."""

from __future__ import annotations

import numpy as np

from rivals.measure import by_stage, no_lap


class MissingRival(Exception):
    """A package or a program that a road needs is not installed."""


def installed(*makers):
    """Make the roads whose packages are there, and say which are not."""
    roads = []
    for make in makers:
        try:
            roads.append(make())
        except MissingRival as error:
            print(f"  ({error} is not installed: a row is left out)", flush=True)
    return roads


class Road:
    """One way from a session's name to the newest whole turns that fit the budget.

    Attributes
    ----------
    name : str
        As in the results.
    group : str
        "text", "framework", "ids" or "kalos".
    note : str
        What a reader must know about how it was set up; one sentence, or empty.
    """

    name = group = note = ""

    def fill(self, chat):
        """Store a session."""

    def ready(self):
        """Do what comes behind the last `fill`."""

    def window(self, session, lap=no_lap):
        """Return the token IDs, int32; `lap` is called with a stage's name at its end."""
        raise NotImplementedError

    def answer(self, session):
        """Return a window that stays valid."""
        return np.array(self.window(session))

    def stages(self, session, seconds):
        """p50 and p99 of each stage."""
        return by_stage(lambda lap: self.window(session, lap), seconds)

    def append(self, session, message, ids):
        """Store one turn more."""
        raise NotImplementedError

    def close(self):
        """Stop what was started."""
