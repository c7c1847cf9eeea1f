"""What `Strategy.step` says, on whole vectors, by NumPy alone: the oracle of every executor of its program."""

import numpy as np


def steps(strategy, source, size, start=0, std=1.5, count=None):
    """The noise of the first steps, and the state after the last."""
    state, made = strategy.init(size), []
    for t in range(strategy.n if count is None else count):
        noise, state = strategy.step(t, state, lambda row: source.normal(row, start, start + size))
        made.append(noise * np.float32(std))
    return made, state
