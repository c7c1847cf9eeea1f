"""Strategies that exist in tests alone, for what is made of any step."""

import numpy as np

from anyorder.strategy import Strategy


class MadeUp(Strategy):
    """Independent noise under a step of the test's own."""

    def __init__(self, n):
        self._n = n

    n = property(lambda self: self._n)
    state_rows = property(lambda self: 0)

    def matrix(self):
        return np.eye(self.n)

    def noising_matrix(self):
        return np.eye(self.n)

    def init(self, size):
        return ()

    def step(self, t, state, row):
        return row(t).copy(), state

    def to_dict(self):
        return {"kind": "made up", "object": id(self)}
