"""Epsilon and delta of a secret order by each method, for the pair with one unit and without it."""

from collections.abc import Callable
from functools import lru_cache, reduce
from math import inf, sqrt
from typing import Any, assert_never

import numpy as np
from numpy.typing import NDArray

from anyorder import _check
from anyorder.accounting.amplification.bins import bins_delta, bins_epsilon, bins_losses
from anyorder.accounting.amplification.exact import pld_delta, pld_epsilon
from anyorder.accounting.amplification.methods import Deterministic, Method, MonteCarlo, Pld
from anyorder.accounting.amplification.mixture import absolute_columns, bins_gram, reach
from anyorder.accounting.amplification.monte_carlo import mc_delta, mc_epsilon
from anyorder.errors import PlanError
from anyorder.participation.sampled import BallsInBins, MinSeparationSampling, RandomAllocation, TruncatedPoisson
from anyorder.strategy import Strategy

__all__ = ["Secret", "check_method_fits", "default_method", "epoch_grams", "pair_delta", "pair_epsilon"]

Floats = NDArray[np.float64]
Progress = Callable[[int, int], None]

Secret = TruncatedPoisson | BallsInBins | RandomAllocation | MinSeparationSampling
"""The orders with a curve of this kind; Poisson and cyclic Poisson sampling have `Sampled`."""


def default_method(strategy: Strategy, participation: Secret) -> Method:
    """The method of a plan that names none, that is "auto".

    The loss distribution itself where it is known: truncated Poisson sampling, and bins whose columns do not overlap;
    else the deterministic bound; and, for
    sampling with separation, that of known batches.
    """
    match participation:
        case TruncatedPoisson():
            return Pld()
        case BallsInBins() | RandomAllocation():
            return Pld() if reach(strategy) == 1 else Deterministic()
        case MinSeparationSampling():
            return Deterministic()
        case _:
            assert_never(participation)


def check_method_fits(method: Method, strategy: Strategy, participation: Secret) -> None:
    """Raise PlanError where the order is not accounted by this method."""
    match method, participation:
        case (Pld(), TruncatedPoisson()) | (Deterministic() | MonteCarlo(), BallsInBins()):
            return
        case Deterministic(), RandomAllocation():
            return
        case Pld(), BallsInBins() | RandomAllocation():
            if reach(strategy) > 1:
                raise PlanError(
                    f"method 'pld' is for a C whose columns do not overlap, such as independent noise, got "
                    f"{strategy!r}: take 'bound' or 'monte_carlo'"
                )
        case MonteCarlo(), RandomAllocation():
            raise PlanError(
                "no samples are drawn for RandomAllocation, whose epochs are mechanisms beside each other, with bounds "
                "that compose: take method 'bound'"
            )
        case Deterministic() | MonteCarlo(), MinSeparationSampling():  # the bound is that of known batches
            return
        case Pld(), MinSeparationSampling():
            raise PlanError("no loss distribution is known of MinSeparationSampling: take method 'monte_carlo'")
        case Deterministic() | MonteCarlo(), TruncatedPoisson():
            raise PlanError("TruncatedPoisson is accounted by its loss distribution: take method 'pld'")
        case _:
            raise PlanError(f"{type(participation).__name__} is not accounted by {type(method).__name__}")


def pair_epsilon(
    strategy: Strategy, participation: Secret, sigma: float, delta: float, method: Method, progress: Progress | None
) -> float:
    """Epsilon at delta, the larger of both directions, at or above the true one; infinite where the method has none."""
    match method:
        case Pld():
            return pld_epsilon(strategy, _known(participation), sigma, delta)
        case Deterministic():
            return _bound_epsilon(strategy, participation, sigma, delta)
        case MonteCarlo():
            return mc_epsilon(strategy, participation, sigma, delta, method, progress)
        case _:
            assert_never(method)


def pair_delta(
    strategy: Strategy, participation: Secret, sigma: float, epsilon: float, method: Method, progress: Progress | None
) -> float:
    """Delta at epsilon, the larger of both directions, at or above the true one; 1 where the method has none."""
    match method:
        case Pld():
            return pld_delta(strategy, _known(participation), sigma, epsilon)
        case Deterministic():
            return _bound_delta(strategy, participation, sigma, epsilon)
        case MonteCarlo():
            return mc_delta(strategy, participation, sigma, epsilon, method, progress)
        case _:
            assert_never(method)


def _known(participation: Secret) -> TruncatedPoisson | BallsInBins | RandomAllocation:
    """An order whose loss distribution is known, as `check_method_fits` saw to."""
    if type(participation) is MinSeparationSampling:
        raise PlanError("no loss distribution is known of MinSeparationSampling")
    return participation


def _bound_epsilon(strategy: Strategy, participation: Secret, sigma: float, delta: float) -> float:
    """Infinite where nothing is known but what known batches give."""
    match participation:
        case BallsInBins():
            return bins_epsilon(bins_gram(strategy, participation), sigma, delta)
        case RandomAllocation():
            losses, lost = _epoch_losses(strategy, participation, sigma)
            return inf if delta <= 2 * lost else float(losses.get_epsilon_for_delta(delta - lost)) * _UP
        case MinSeparationSampling() | TruncatedPoisson():
            return inf
        case _:
            assert_never(participation)


def _bound_delta(strategy: Strategy, participation: Secret, sigma: float, epsilon: float) -> float:
    """1 where nothing is known but what known batches give."""
    match participation:
        case BallsInBins():
            return bins_delta(bins_gram(strategy, participation), sigma, epsilon)
        case RandomAllocation():
            losses, lost = _epoch_losses(strategy, participation, sigma)
            return min(1.0, max(0.0, float(losses.get_delta_for_epsilon(epsilon))) * _UP + lost)
        case MinSeparationSampling() | TruncatedPoisson():
            return 1.0
        case _:
            assert_never(participation)


@lru_cache(maxsize=2)
def _epoch_losses(strategy: Strategy, participation: RandomAllocation, sigma: float) -> tuple[Any, float]:
    """The loss distribution of all epochs, which do not overlap, composed; and what transforms may take from delta."""
    pld = _check.optional(
        "dp_accounting.pld.privacy_loss_distribution", extra="amplified", purpose="accounting for epochs of bins"
    )
    grams = epoch_grams(strategy, participation)
    largest = max(float(gram.max()) for gram, _ in grams)
    interval = min(max(sqrt(largest) / sigma / 400, 1e-4), 0.1)  # pessimistic, however coarse
    parts = [bins_losses(pld, gram, sigma, interval).self_compose(times) for gram, times in grams]
    return reduce(lambda one, other: one.compose(other), parts), 64 * participation.k * 2.0**-53


def epoch_grams(strategy: Strategy, participation: RandomAllocation) -> list[tuple[Floats, int]]:
    """(Gram matrix of an epoch's columns of |C|, epochs that have it)."""
    k, b = participation.k, participation.b
    grams: dict[bytes, tuple[Floats, int]] = {}
    for epoch in range(k):
        columns = absolute_columns(strategy, np.arange(epoch * b, (epoch + 1) * b))
        gram = columns.T @ columns
        known, times = grams.get(gram.tobytes(), (gram, 0))
        grams[gram.tobytes()] = known, times + 1
    return list(grams.values())


_UP = 1 + 2e-10
