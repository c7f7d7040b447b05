"""The planner alone, on flat arrays."""

from __future__ import annotations

import numpy as np

from kalos_ctx._planner import FlatHistory, WalkState

from . import once


class Plan:
    """The boundary of a history of n turns for 8,192 tokens."""

    params = ((100, 1_000, 100_000), ("stable", "stable_resumed", "sliding"))
    param_names = ("turns", "policy")
    number = 500
    repeat = (1, 10, 2.0)

    @once
    def setup(self, turns, policy):
        rng = np.random.default_rng(1)
        self.history = FlatHistory(rng.integers(5, 120, turns).tolist(), [2, 3] * (turns // 2))
        self.options = {"stable": policy != "sliding"}
        if policy == "stable_resumed":
            self.options["resume"] = WalkState()
            self.history.plan(8192, **self.options)

    def time_plan(self, *_):
        self.history.plan(8192, **self.options)
