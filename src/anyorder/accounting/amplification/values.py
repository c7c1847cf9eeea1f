"""Epsilon and delta of a secret order by each method, for the pair with one unit and without it."""

from collections.abc import Callable
from math import inf
from typing import assert_never

from anyorder.accounting.amplification.methods import Deterministic, Method, MonteCarlo, Pld
from anyorder.accounting.amplification.mixture import reach
from anyorder.accounting.amplification.monte_carlo import mc_delta, mc_epsilon
from anyorder.errors import PlanError
from anyorder.participation.sampled import BallsInBins, MinSeparationSampling, RandomAllocation, TruncatedPoisson
from anyorder.strategy import Strategy

__all__ = ["Secret", "check_method_fits", "default_method", "pair_delta", "pair_epsilon"]

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
        case (Pld(), TruncatedPoisson()) | (Deterministic() | MonteCarlo(), BallsInBins() | RandomAllocation()):
            return
        case Pld(), BallsInBins() | RandomAllocation():
            if reach(strategy) > 1:
                raise PlanError(
                    f"method 'pld' is for a C whose columns do not overlap, such as independent noise, got "
                    f"{strategy!r}: take 'bound' or 'monte_carlo'"
                )
        case MonteCarlo(), MinSeparationSampling():
            return
        case Deterministic(), MinSeparationSampling():  # that of known batches
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
        case Pld() | Deterministic():
            return inf
        case MonteCarlo():
            return mc_epsilon(strategy, participation, sigma, delta, method, progress)
        case _:
            assert_never(method)


def pair_delta(
    strategy: Strategy, participation: Secret, sigma: float, epsilon: float, method: Method, progress: Progress | None
) -> float:
    """Delta at epsilon, the larger of both directions, at or above the true one; 1 where the method has none."""
    match method:
        case Pld() | Deterministic():
            return 1.0
        case MonteCarlo():
            return mc_delta(strategy, participation, sigma, epsilon, method, progress)
        case _:
            assert_never(method)
