"""sens(C, participation): how much one unit can move C G, at clip norm 1.

    sens^2 = max over allowed steps pi of one unit, and vectors of norm <= 1, of || C sum_t e_t u_t^T ||_F^2
           = max over pi, and Gram matrices Y >= 0 with Y_ii <= 1, of <X_pi,pi, Y>,     X = C^T C

The row of a kind in `registry` says its `bound` and `units`, which stand in the file of the kind; what allows no
more than X itself takes those of `gram`.

`rounding` is by how much more a unit can move it with the float32 numbers that noise is made with; the proof stands in
`bound`, what a kind adds to it in the file of the kind.
"""

import math

import numpy as np
from numpy.typing import NDArray

from anyorder.errors import ArgumentError, PlanError
from anyorder.patterns import Listed, Participation, check_order
from anyorder.strategy.base import Strategy
from anyorder.strategy.bound import MOST, Bound, Change
from anyorder.strategy.gram import refined
from anyorder.strategy.registry import check_kind, kind_of

__all__ = ["Bound", "known_sensitivity", "sensitivity", "unit_sensitivities"]


def sensitivity(strategy: Strategy, participation: Participation) -> Bound:
    """The L2 sensitivity of C G under the participation, root scale, for clip norm 1.

    Args:
        strategy: C.
        participation: with the strategy's n.
    Returns: a bound that is never below the true value; `exact` where it is proven equal.
    Guarantee: the release C G + std Z is mu-Gaussian-DP with mu = clip_norm * value / std, for zero-out neighbours,
        also when gradients depend on earlier outputs.
    Cost: by structure; the generic route takes n up to 4096.
    Raises: PlanError for a participation of another n, or PoissonSampling.
    """
    _check_fit(strategy, participation)
    pattern = participation.pattern
    return refined(strategy, pattern, kind_of(strategy).worst.bound(strategy, pattern))


def known_sensitivity(strategy: Strategy, participation: Participation) -> Bound:
    """sens(C, pattern) of an order by secret draws, for those who know the draws: what is left of its claim then.

    Args:
        strategy: C.
        participation: drawn in secret, with the strategy's n.
    Raises: PlanError for another n, and for orders without secret draws, whose sensitivity is `sensitivity`.
    """
    _check_steps(strategy, participation)
    if not participation.secret:
        raise PlanError(f"participation must be drawn in secret, got {participation.describe()}")
    pattern = participation.pattern
    return refined(strategy, pattern, kind_of(strategy).worst.bound(strategy, pattern))


def unit_sensitivities(strategy: Strategy, order: Participation) -> NDArray[np.float64]:
    """(units,) the sensitivity for each unit's own steps, in the order of `order.units`; never below the true ones."""
    pattern = order.pattern if isinstance(order, Participation) else None
    if not isinstance(pattern, Listed) or pattern.given is None:
        raise ArgumentError(f"order must be a KnownOrder, got {order!r}; other participations do not name their units")
    _check_fit(strategy, order)
    values = kind_of(strategy).worst.units(strategy, pattern)
    return np.minimum(values, refined(strategy, pattern, Bound(float(values.max()), exact=False)).value)


def _check_fit(strategy: Strategy, participation: Participation) -> None:
    check_order(participation)
    if participation.secret:
        raise PlanError(
            f"{type(participation).__name__} has no useful sensitivity, since a unit may be in every step; its privacy "
            "comes from the secret draws: use accounting.Sampled, or a participation that says how often a "
            "unit takes part"
        )
    _check_steps(strategy, participation)


def _check_steps(strategy: Strategy, participation: Participation) -> None:
    check_kind(strategy)
    check_order(participation)
    if participation.n != strategy.n:
        raise PlanError(
            f"participation and strategy must have the same number of steps, got {participation.n} and {strategy.n}"
        )


def rounding(strategy: Strategy, participation: Participation) -> float:
    """By how much, relatively, the sensitivity of the noise in float32 coefficients may exceed sens(C).

    Returns: 0 where every coefficient is a float32 (independent noise, vanilla trees); else about 1e-7, times the root
        of the number of participations, and for regenerated trees 5e-7 times the root of n log n.
    Guarantee: sens(C~, participation) <= sens(C, participation) (1 + rounding); and where the participation is drawn by
        secret draws, its delta with C~ and std (1 + rounding) is at most that with C and std.
    Cost: O(n) for Toeplitz C, O(n^3) for Dense and BandedLowRank, else about that of one pass over the parameters; for
        secret draws also O(n^2) for RestartedBLT and trees.
    Raises: PlanError where coefficients leave the range of float32, or C is so ill-conditioned that they matter.
    """
    row = kind_of(strategy).rounding
    with np.errstate(all="ignore"):
        try:
            change = row.change(strategy)
            hidden = row.under_coins(strategy, change) if participation.secret else 0.0
        except ArgumentError:  # what is left of a parameter, 0 or infinity, is none
            change, hidden = Change(math.inf), math.inf
    result = (1 + change.whole) * (1 + change.columns * math.sqrt(participation.max_participations)) - 1
    result = max(result, hidden)  # the first is for those who know the draws
    if not result <= MOST:
        raise PlanError(
            f"the noise of {strategy!r} cannot be made in float32: rounding its coefficients could change the "
            f"sensitivity by {result:.1e}, at most {MOST} is allowed; use parameters of ordinary size, or a C that is "
            "better conditioned"
        )
    return result * (1 + 1e-6) + 1e-15 if result else 0.0
