"""sens(C, participation): how much one unit can move C G, at clip norm 1.

    sens^2 = max over allowed steps pi of one unit, and vectors of norm <= 1, of || C sum_t e_t u_t^T ||_F^2
           = max over pi, and Gram matrices Y >= 0 with Y_ii <= 1, of <X_pi,pi, Y>,     X = C^T C

Every structure of a strategy has one case in `_rule`; one that allows more than the dense route has a module here with
two functions, `bound` and `units`.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, assert_never

import numpy as np
from numpy.typing import NDArray

from anyorder.errors import ArgumentError, PlanError
from anyorder.patterns import Listed, Participation, Pattern, check_order
from anyorder.strategy import banded, blt, gram, independent, rescaled, restarted, toeplitz, tree
from anyorder.strategy.base import Strategy
from anyorder.strategy.bound import Bound
from anyorder.strategy.gram import refined
from anyorder.strategy.registry import Structure, check_kind, kind_of

__all__ = ["Bound", "known_sensitivity", "sensitivity", "unit_sensitivities"]


class _Rule(NamedTuple):
    bound: Callable[[Any, Pattern], Bound]
    units: Callable[[Any, Listed], NDArray[np.float64]]


def _rule(strategy: Strategy) -> _Rule:
    """By what is proven of its kind."""
    structure = kind_of(strategy).structure
    match structure:
        case Structure.IDENTITY:
            return _Rule(independent.bound, independent.units)
        case Structure.TOEPLITZ | Structure.TOEPLITZ_BANDED:
            return _Rule(toeplitz.bound, toeplitz.units)
        case Structure.BUFFERED:
            return _Rule(blt.bound, blt.units)
        case Structure.BANDED:
            return _Rule(banded.bound, banded.units)
        case Structure.DENSE | Structure.LOW_RANK:
            return _Rule(gram.matrix_bound, gram.matrix_units)
        case Structure.RESTARTED:
            return _Rule(restarted.bound, restarted.units)
        case Structure.RESCALED:
            return _Rule(rescaled.bound, rescaled.units)
        case Structure.TREE:
            return _Rule(tree.bound, tree.units)
        case _:
            assert_never(structure)


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
    return refined(strategy, pattern, _rule(strategy).bound(strategy, pattern))


def known_sensitivity(strategy: Strategy, participation: Participation) -> Bound:
    """sens(C, pattern) of an order by secret coins, for those who know the coins: what is left of its claim then.

    Args:
        strategy: C.
        participation: drawn by secret coins, with the strategy's n.
    Raises: PlanError for another n, and for orders without coins, whose sensitivity is `sensitivity`.
    """
    _check_steps(strategy, participation)
    if not participation.secret:
        raise PlanError(f"participation must be drawn by secret coins, got {participation.describe()}")
    pattern = participation.pattern
    return refined(strategy, pattern, _rule(strategy).bound(strategy, pattern))


def unit_sensitivities(strategy: Strategy, order: Participation) -> NDArray[np.float64]:
    """(units,) the sensitivity for each unit's own steps, in the order of `order.units`; never below the true ones."""
    pattern = order.pattern if isinstance(order, Participation) else None
    if not isinstance(pattern, Listed) or pattern.given is None:
        raise ArgumentError(f"order must be a KnownOrder, got {order!r}; other participations do not name their units")
    _check_fit(strategy, order)
    values = _rule(strategy).units(strategy, pattern)
    return np.minimum(values, refined(strategy, pattern, Bound(float(values.max()), exact=False)).value)


def _check_fit(strategy: Strategy, participation: Participation) -> None:
    check_order(participation)
    if participation.secret:
        raise PlanError(
            f"{type(participation).__name__} has no useful sensitivity, since a unit may be in every step; its privacy "
            "comes from the secret coins: use accounting.poisson_epsilon, or a participation that says how often a "
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
