"""The epsilon of any mechanism in any secret order, in one call."""

from typing import Any, NamedTuple

from anyorder import _check
from anyorder.accounting.amplification.curve import Amplified
from anyorder.accounting.amplification.methods import Deterministic, Method, MonteCarlo, Pld
from anyorder.accounting.amplification.mixture import check_fits
from anyorder.accounting.amplification.values import Progress, default_method
from anyorder.accounting.curves import sampled_curve
from anyorder.accounting.gaussian import NEIGHBOURS
from anyorder.errors import ArgumentError, PlanError
from anyorder.participation import Participation
from anyorder.participation.sampled import (
    BallsInBins,
    CyclicPoisson,
    MinSeparationSampling,
    PoissonSampling,
    RandomAllocation,
    TruncatedPoisson,
)
from anyorder.strategy import Strategy

__all__ = ["AmplifiedBound", "amplified_epsilon", "method_named"]

_WORDS = {"auto", "pld", "bound", "monte_carlo"}


class AmplifiedBound(NamedTuple):
    """An epsilon, and how sure it is.

    Attributes:
        value: epsilon, at or above the true one.
        method: "pld", "bound" or "monte_carlo".
        confidence: 1.0 where no chance is in it; else 1 - failure. The failure is inside delta already, so that (value,
            delta) is differential privacy of the samples and the run together.
    """

    value: float
    method: str
    confidence: float


def amplified_epsilon(
    strategy: Strategy,
    participation: Participation,
    noise_multiplier: float,
    delta: float,
    method: str | Method = "auto",
    *,
    samples: int | None = None,
    failure: float | None = None,
    neighbours: str = "zero-out",
    progress: Progress | None = None,
) -> AmplifiedBound:
    """The epsilon of C G + noise where the steps of each unit are drawn by secret coins, at or above the true one.

        P = sum over S of w_S N(m_S, sigma^2 I),  Q = N(0, sigma^2 I),   m_S = sum over t in S of |C| e_t

    See `anyorder.accounting.amplification.mixture` for the proof, for any C and for gradients that depend on what was
    released. "auto" takes the loss distribution of this pair where it is known ("pld": Poisson, cyclic and truncated
    Poisson sampling; bins whose columns of C do not overlap, as those of independent noise), else the deterministic
    bound; "monte_carlo" where there is no better ("bound" for sampling with separation is that of known batches), or
    where it is asked for. None is above the epsilon of those who know all batches.

    Args:
        strategy: C; which fits which order, `check_fits` there says.
        participation: an order by secret coins.
        noise_multiplier: sigma, noise std over clip norm, above 0. A plan's also covers that coefficients are float32.
        delta: strictly between 0 and 1.
        method: "auto", "pld", "bound" or "monte_carlo"; or a `Method`.
        samples: of "monte_carlo", 200 000 by default.
        failure: of "monte_carlo", the probability of too small an epsilon; a hundredth of delta by default.
        neighbours: "zero-out", or "add-or-remove", the same number where a unit's absence moves no other; or
            "replace-one", by two such steps, without chance.
        progress: called with what is done and what is to be done, by "monte_carlo".
    Returns: AmplifiedBound(value, method, confidence).
    Cost: by method; seconds to a minute for b = 100, n = 1000.
    Raises: ArgumentError; PlanError for a C, method or relation that the order is not accounted with;
        MissingDependencyError without dp-accounting, where a loss distribution is composed.

    Example:
        >>> from anyorder.participation import BallsInBins
        >>> from anyorder.strategy import Independent
        >>> amplified_epsilon(Independent(40), BallsInBins(2, 20), 1.0, 1e-5).confidence
        1.0
    """
    delta = _check.probability("delta", delta)
    _check.choice("neighbours", neighbours, NEIGHBOURS)
    match participation:
        case PoissonSampling() | CyclicPoisson():
            check_fits(strategy, participation)
            if method not in ("auto", "pld") and type(method) is not Pld:
                raise PlanError(
                    f"{type(participation).__name__} is accounted by its loss distribution: take method 'pld', got "
                    f"{method!r}"
                )
            if neighbours == "replace-one":
                raise PlanError(f"{type(participation).__name__} is not accounted for replace-one neighbours")
            if neighbours == "add-or-remove" and participation.absence_moves_others:
                raise PlanError(
                    "CyclicPoisson is accounted for zero-out neighbours: its groups go by a unit's number, so that "
                    "without one unit all later ones would be of other groups; got 'add-or-remove'"
                )
            sampled = sampled_curve(strategy, participation, noise_multiplier)
            return AmplifiedBound(sampled.epsilon(delta), "pld", 1.0)
        case TruncatedPoisson() | BallsInBins() | RandomAllocation() | MinSeparationSampling():
            check_fits(strategy, participation)
            chosen = method_named(method, strategy, participation, samples, failure)
            curve = Amplified(strategy, participation, noise_multiplier, chosen, neighbours=neighbours)
            value = curve.epsilon(delta, progress)
            match chosen:
                case Pld():
                    return AmplifiedBound(value, "pld", 1.0)
                case Deterministic():
                    return AmplifiedBound(value, "bound", 1.0)
                case MonteCarlo():
                    return AmplifiedBound(
                        value, "monte_carlo", 1 - (delta / 100 if chosen.failure is None else chosen.failure)
                    )
        case _:
            raise ArgumentError(f"participation must be drawn by secret coins, got {participation!r}")


def method_named(
    method: Any, strategy: Strategy, participation: Any, samples: int | None = None, failure: float | None = None
) -> Method:
    """The method of these words. Raises: ArgumentError."""
    if type(method) in (Pld, Deterministic, MonteCarlo):
        if samples is not None or failure is not None:
            raise ArgumentError("samples and failure must be in the MonteCarlo that is given, not beside a method")
        found: Method = method
        return found
    _check.choice("method", method, _WORDS)
    own = default_method(strategy, participation) if method == "auto" else None
    if method != "monte_carlo" and type(own) is not MonteCarlo and (samples is not None or failure is not None):
        raise ArgumentError(f"samples and failure must come with method 'monte_carlo', got method={method!r}")
    if method == "pld":
        return Pld()
    if method == "bound":
        return Deterministic()
    if own is not None and type(own) is not MonteCarlo:
        return own
    return MonteCarlo(failure=failure) if samples is None else MonteCarlo(samples, failure)
