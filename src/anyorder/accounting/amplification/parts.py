"""Secret orders as parts of a composition: their pessimistic loss distributions, on the grid of all parts."""

from functools import reduce
from math import ceil, sqrt
from typing import Any, assert_never

import numpy as np
from numpy.typing import NDArray

from anyorder.accounting.amplification.bins import bins_losses
from anyorder.accounting.amplification.curve import Amplified
from anyorder.accounting.amplification.exact import diagonal_kinds, diagonal_losses, group_sizes, truncated_losses
from anyorder.accounting.amplification.lognormals import LARGEST
from anyorder.accounting.amplification.methods import Deterministic, MonteCarlo, Pld
from anyorder.accounting.amplification.mixture import bins_gram
from anyorder.accounting.amplification.values import epoch_grams
from anyorder.errors import ArgumentError
from anyorder.participation.sampled import BallsInBins, MinSeparationSampling, RandomAllocation, TruncatedPoisson
from anyorder.strategy import Strategy

__all__ = ["curve_losses", "transforms_of", "variants_of"]

_LOUDEST = 60.0  # mu^2 of a bin, above which nothing is won by bins
_FINE = 100.0  # points of the grid of bins in the mu of a bin: each takes a sum over the law


def variants_of(curve: Amplified) -> tuple[int, ...]:
    """The cases of which the worst counts: the sizes of groups of truncated sampling; else a single one, 0."""
    match curve.participation:
        case TruncatedPoisson():
            return tuple(sorted(group_sizes(curve.participation)))
        case BallsInBins() | RandomAllocation() | MinSeparationSampling():
            return (0,)
        case _:
            assert_never(curve.participation)


def transforms_of(curve: Amplified) -> int:
    """Mechanisms that its own loss distribution is composed of, beyond one."""
    match curve.participation:
        case TruncatedPoisson():
            return 2 * -(-curve.participation.n // curve.participation.cycle)
        case RandomAllocation():
            return 64 * curve.participation.k
        case BallsInBins() | MinSeparationSampling():
            return 0
        case _:
            assert_never(curve.participation)


def curve_losses(curve: Amplified, size: int, pld: Any, h: float) -> Any:
    """The loss distribution of dp-accounting, both directions, at or above the true one in every delta.

    Bins are put on every so many points of the grid, which is no less pessimistic.

    Args:
        size: of `variants_of`.
        pld: the module dp_accounting.pld.privacy_loss_distribution.
        h: interval of the grid.
    Returns: None where there is none, and known batches say as much: sampling with separation, "replace-one", whose
        two steps of a unit have another curve, and noise that is too little for bins to hide anything.
    """
    strategy, order, sigma = curve.strategy, curve.participation, curve.noise_multiplier
    if curve.neighbours == "replace-one":
        return None
    match curve.method, order:
        case Pld(), TruncatedPoisson():
            return truncated_losses(pld, strategy, order, sigma, size, h)
        case Pld(), BallsInBins() | RandomAllocation():
            kinds = diagonal_kinds(strategy, order)
            if not all(0 < max(kind) / sigma**2 <= LARGEST for kind, _ in kinds):
                return None
            return _joined([diagonal_losses(pld, kind, sigma, h).self_compose(count) for kind, count in kinds])
        case Deterministic(), BallsInBins() | RandomAllocation():
            grams = _grams(strategy, order)
            mu = sqrt(max(float(gram.max()) for gram, _ in grams)) / sigma
            if not 1e-6 < mu * mu < _LOUDEST:
                return None
            every = max(1, ceil(min(mu / _FINE, 0.1) / h))
            return _joined([bins_losses(pld, gram, sigma, h, every).self_compose(count) for gram, count in grams])
        case Deterministic(), MinSeparationSampling():
            return None
        case MonteCarlo(), _:
            raise ArgumentError("samples hold for one delta of one release, and have no loss distribution")
        case _:
            raise ArgumentError(f"no loss distribution is known of {order.describe()} by {curve.method!r}")


def _grams(strategy: Strategy, order: BallsInBins | RandomAllocation) -> list[tuple[NDArray[np.float64], int]]:
    """(Gram matrix of a draw of bins, draws that have it)."""
    match order:
        case BallsInBins():
            return [(bins_gram(strategy, order), 1)]
        case RandomAllocation():
            return epoch_grams(strategy, order)
        case _:
            assert_never(order)


def _joined(found: list[Any]) -> Any:
    return reduce(lambda one, other: one.compose(other), found)
