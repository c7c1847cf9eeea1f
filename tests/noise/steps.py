"""What `Strategy.step` says, on whole vectors, by NumPy alone: the oracle of every path. And the paths, one by one."""

import numpy as np

from anyorder.noise.program import NoiseState


def steps(strategy, source, size, start=0, std=1.5, count=None):
    """The noise of the first steps, and the state after the last."""
    state, made = strategy.init(size), []
    for t in range(strategy.n if count is None else count):
        noise, state = strategy.step(t, state, lambda row: source.normal(row, start, start + size))
        made.append(noise * np.float32(std))
    return made, state


class Steps:
    """A strategy's steps by one path, which a stream would choose by its tensors."""

    def __init__(self, path, strategy, size, most=None):
        self.path, self.strategy = path, strategy
        self.most = strategy.state_rows if most is None else most
        self.load(0, strategy.init(size))

    def load(self, t, state):
        self.state = NoiseState(self.strategy, t, self.path.load(state), self.most, self.path.new)

    def save(self):
        return self.path.save(self.state.arrays)

    def next(self):
        return self.path.next(self.state)

    def add(self, targets, scale=1.0):
        self.path.add(self.state, targets, scale)
