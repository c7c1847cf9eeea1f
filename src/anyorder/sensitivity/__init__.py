"""sens(C, participation): how much one unit can move C G, at clip norm 1.

    sens^2 = max over allowed steps pi of one unit, and vectors of norm <= 1, of || C sum_t e_t u_t^T ||_F^2
           = max over pi, and Gram matrices Y >= 0 with Y_ii <= 1, of <X_pi,pi, Y>,     X = C^T C

Every kind of strategy has one line in `_RULES`; one whose structure allows more than the dense route has a module here
with two functions, `bound` and `units`.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from anyorder import participation as participations
from anyorder.errors import ArgumentError, PlanError
from anyorder.participation import KnownOrder, Participation, PoissonSampling
from anyorder.sensitivity import banded, blt, dense, independent, rescaled, restarted, toeplitz, tree
from anyorder.sensitivity.bound import Bound
from anyorder.sensitivity.program import refined
from anyorder.strategy import (
    BLT,
    Banded,
    BandedInverse,
    BandedLowRank,
    Dense,
    Independent,
    Rescaled,
    RestartedBLT,
    SquareRoot,
    Strategy,
    ToeplitzBanded,
    Tree,
    check_kind,
)

__all__ = ["Bound", "sensitivity", "unit_sensitivities"]


class _Rule(NamedTuple):
    bound: Callable[[Any, Participation], Bound]
    units: Callable[[Any, KnownOrder], NDArray[np.float64]]


_RULES: dict[type[Strategy], _Rule] = {
    BLT: _Rule(blt.bound, blt.units),
    Banded: _Rule(banded.bound, banded.units),
    BandedInverse: _Rule(toeplitz.bound, toeplitz.units),
    BandedLowRank: _Rule(dense.bound, dense.units),
    Dense: _Rule(dense.bound, dense.units),
    Independent: _Rule(independent.bound, independent.units),
    Rescaled: _Rule(rescaled.bound, rescaled.units),
    RestartedBLT: _Rule(restarted.bound, restarted.units),
    SquareRoot: _Rule(toeplitz.bound, toeplitz.units),
    ToeplitzBanded: _Rule(toeplitz.bound, toeplitz.units),
    Tree: _Rule(tree.bound, tree.units),
}  # by exact type: what a subclass does is not known


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
    return refined(strategy, participation, _RULES[type(strategy)].bound(strategy, participation))


def unit_sensitivities(strategy: Strategy, order: KnownOrder) -> NDArray[np.float64]:
    """(units,) the sensitivity for each unit's own steps, in the order of `order.units`; never below the true ones."""
    if type(order) is not KnownOrder:
        raise ArgumentError(f"order must be a KnownOrder, got {order!r}; other participations do not name their units")
    _check_fit(strategy, order)
    values = _RULES[type(strategy)].units(strategy, order)
    return np.minimum(values, refined(strategy, order, Bound(float(values.max()), exact=False)).value)


def _check_fit(strategy: Strategy, participation: Participation) -> None:
    check_kind(strategy)
    participations.check_kind(participation)
    if type(participation) is PoissonSampling:
        raise PlanError(
            "PoissonSampling has no useful sensitivity, since a unit may be in every step; its privacy comes from the "
            "secret coins: use accounting.poisson_epsilon, or a participation that says how often a unit takes part"
        )
    if participation.n != strategy.n:
        raise PlanError(
            f"participation and strategy must have the same number of steps, got {participation.n} and {strategy.n}"
        )
