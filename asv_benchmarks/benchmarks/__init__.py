"""Benchmarks that asv runs; rivals stand outside, since asv imports every module here."""

import functools


def once(setup):
    """Let a `setup` work at its first call only.

    asv calls it in front of every timed call, even inside a sample, and a store or a history that
    was just made answers cold. Each set of parameters has a process of its own, in a working
    folder that asv makes and removes, so nothing is left to tear down.
    """

    @functools.wraps(setup)
    def first(self, *params):
        if not self.__dict__.get("is_set_up"):
            setup(self, *params)
            self.is_set_up = True

    return first
