"""The cycle of cyclic Poisson sampling: how many groups take turns."""

import math
from functools import cache as cached

import numpy as np

from anyorder.accounting import gdp_mu
from anyorder.accounting.poisson import rough_poisson
from anyorder.optimize import cache
from anyorder.optimize.objectives import squared_error
from anyorder.optimize.toeplitz import Problem, fits_toeplitz
from anyorder.participation import SingleEpoch
from anyorder.workload import Workload

__all__ = ["best_cycle"]

_CYCLES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)


def best_cycle(
    workload: Workload, share: float, epsilon: float, delta: float, objective: str = "mean", *, most: float = math.inf
) -> int:
    """The cycle of cyclic Poisson sampling with the least error at a claim, for banded Toeplitz C of as many bands.

    Longer cycles allow more bands, and amplify less: a unit of a step's group is drawn with probability share * cycle.
    It is looked for where the central limit [Bu et al. 2020] puts it, and from there by loss distributions.

    Args:
        workload: A; Toeplitz, or of at most 4096 steps.
        share: expected batch size over the number of units.
        epsilon, delta: of the claim.
        objective: "mean", "max" or "last" error.
        most: the longest cycle that is allowed; by itself 128.
    Cost: some seconds; kept on disk.
    """
    n = workload.n
    limit = min(most, n, int(1 / share * (1 + 1e-12)))
    cycles = [cycle for cycle in _CYCLES if cycle <= limit] or [1]

    def answer() -> int:
        fits = fits_toeplitz(Problem(workload, SingleEpoch(n), objective), cycles)
        errors = [math.sqrt(one.column_norms_squared().max() * squared_error(one, workload, objective)) for one in fits]
        rough = [
            error * _central(share * c, -(-n // c), epsilon, delta) for c, error in zip(cycles, errors, strict=True)
        ]

        @cached
        def loss(i: int) -> float:
            sigma = rough_poisson(epsilon, delta, min(1.0, share * cycles[i]), -(-n // cycles[i]))
            return errors[i] * sigma

        place = int(np.argmin(rough))
        for step in (-1, 1):
            while 0 <= place + step < len(cycles) and loss(place + step) < loss(place):
                place += step
        return cycles[place]

    question = {
        "kind": "cycle", "workload": workload.to_dict(), "share": share, "objective": objective, "cycles": cycles,
        "claim": [epsilon, delta],
    }  # fmt: skip
    return cache.remember(question, answer, encode=int, decode=int)


def _central(q: float, steps: int, epsilon: float, delta: float) -> float:
    """Sigma by the central limit: mu = q sqrt(steps (e^(1 / sigma^2) - 1))."""
    return 1 / math.sqrt(math.log1p((gdp_mu(epsilon, delta) / q) ** 2 / steps))
