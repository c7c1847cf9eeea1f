"""Learning-rate schedules: (n,) rates whose largest is 1."""

import math

import numpy as np
from numpy.typing import NDArray

from anyorder import checks
from anyorder.errors import ArgumentError

__all__ = ["cosine", "linear_cooldown", "step_decay", "warmup_stable_decay"]

Floats = NDArray[np.float64]


def step_decay(n: int, every: int, factor: float) -> Floats:
    """factor^floor(t / every): a drop after every `every` steps, as torch's `StepLR`."""
    every = checks.integer("every", every, low=1)
    factor = checks.probability("factor", factor)
    return np.array([factor ** (t // every) for t in range(checks.integer("n", n, low=1))])


def cosine(n: int, final: float = 0.0) -> Floats:
    """(1 + cos(pi t / n)) / 2, from 1 down to `final`, as torch's `CosineAnnealingLR` with T_max = n."""
    final = checks.real("final", final, low=0.0, high=1.0)
    return final + (1 - final) * (1 + _cosines(np.arange(checks.integer("n", n, low=1)) / n)) / 2


def _cosines(turns: Floats) -> Floats:
    """cos(pi x) for x in [0, 1], by its series: the cosine of a library of C has other last digits on some machines."""
    squares = np.square(math.pi * np.minimum(turns, 1 - turns))
    total = np.zeros_like(turns)
    for i in reversed(range(12)):
        total = total * squares + (-1) ** i / math.factorial(2 * i)
    return np.where(turns > 0.5, -total, total)


def linear_cooldown(n: int, start: float = 0.75, final: float = 0.05) -> Floats:
    """1 for the first floor(start n) steps, then in equal steps from 1 down to `final`."""
    n = checks.integer("n", n, low=1)
    flat = int(checks.real("start", start, low=0.0, high=1.0) * n)
    return np.concatenate([np.ones(flat), np.linspace(1.0, checks.real("final", final, low=0.0, high=1.0), n - flat)])


def warmup_stable_decay(n: int, warmup: float = 0.1, decay: float = 0.2, final: float = 0.0) -> Floats:
    """Linear rise over the first floor(warmup n) steps, then 1, then linear fall to `final` after step n.

    Args: n: steps. warmup, decay: fractions of n, warmup + decay <= 1. final: rate at the (unused) step n.
    """
    n = checks.integer("n", n, low=1)
    rise = int(checks.real("warmup", warmup, low=0.0, high=1.0) * n)
    fall = int(checks.real("decay", decay, low=0.0, high=1.0) * n)
    if rise + fall > n:
        raise ArgumentError(f"warmup + decay must be at most 1, got {warmup} + {decay}")
    final = checks.real("final", final, low=0.0, high=1.0)
    up = np.arange(1, rise + 1) / (rise + 1)
    down = 1 - (1 - final) * np.arange(fall) / max(fall, 1)
    return np.concatenate([up, np.ones(n - rise - fall), down])
