"""The kinds of strategies, one row each and no other place that lists them; and what is asked of any strategy.

A claim rests on what a strategy's class does, so the set is closed: a row is found by the exact type, a type without a
row is refused. What is asked of any strategy (`sensitivity`, `rounding`, `row_variances`, `rmse`) the row answers, by
functions of the kind's file; what noise and renewals take for granted of it is decided by `match` over `Structure`, of
which the type checker sees that no case is missing. See docs/extend_package.md for how to add one.
"""

import math
from collections.abc import Callable
from enum import Enum
from typing import Any, NamedTuple

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from anyorder import checks
from anyorder.errors import ArgumentError, PlanError
from anyorder.formatting import counted
from anyorder.patterns import Listed, Participation, Pattern, check_order
from anyorder.strategy import (
    banded,
    banded_inverse,
    blt,
    dense,
    independent,
    low_rank,
    rescaled,
    restarted_blt,
    toeplitz,
    tree,
)
from anyorder.strategy.banded import Banded
from anyorder.strategy.banded_inverse import BandedInverse
from anyorder.strategy.base import DENSE_STEPS, Strategy
from anyorder.strategy.blt import BLT
from anyorder.strategy.dense import Dense
from anyorder.strategy.fitting import of_objective
from anyorder.strategy.independent import Independent
from anyorder.strategy.low_rank import BandedLowRank
from anyorder.strategy.rescaled import Rescaled
from anyorder.strategy.restarted_blt import RestartedBLT
from anyorder.strategy.sensitivity import MOST, Bound, Change, matrix_bound, matrix_units, refined, under_coins
from anyorder.strategy.toeplitz import SquareRoot, Toeplitz, ToeplitzBanded
from anyorder.strategy.tree import Tree
from anyorder.strategy.variances import Way, by_columns, of_iterates
from anyorder.workload import GivenWorkload, Workload


class Structure(Enum):
    """What is proven of a kind: the form of C, and which float32 numbers its noise is made with.

    Noise, renewals and costs are decided by it. With all but RESCALED and TREE, C is square, lower
    triangular, with a positive diagonal.
    """

    IDENTITY = "C is the identity"
    TOEPLITZ = "C is Toeplitz; step t adds rows t, t - 1, .. of Z times `noising_coefficients`, rounded"
    TOEPLITZ_BANDED = "C is Toeplitz with few bands; a step takes off the last outputs times `coefficients`, rounded"
    BUFFERED = "C is Toeplitz, c_t sums powers; a step goes through buffers, `1 - decays` and `scales` rounded"
    BANDED = "C has few bands; a step takes off the last outputs times `bands`, rounded"
    DENSE = "C has no structure; step t adds rows 0 .. t of Z times a row of `noising_matrix()`, rounded"
    LOW_RANK = "C^-1 is banded plus low rank; `bands`, `left`, `right` rounded"
    RESTARTED = "C has a block for each epoch; `decays`, `scales` and `tables()` rounded"
    RESCALED = "C of another strategy, every column over a scale; `scales` rounded"
    TREE = "C has a row for each node of binary trees"


class Size(NamedTuple):
    """A size in words: "2 buffers", the argument `buffers` of a fit, the attribute `num_buffers`."""

    word: str
    argument: str
    attribute: str


class Worst(NamedTuple):
    """How much one unit can move C G, for strategies of a kind; see `sensitivity`.

    Attributes:
        bound: over all units of a pattern family, never below the true value.
        units: (units,) of each unit in a list.
    """

    bound: Callable[[Any, Pattern], Bound]
    units: Callable[[Any, Listed], NDArray[np.float64]]


class Variances(NamedTuple):
    """The noise in the iterates, for strategies of a kind; see `row_variances`.

    Attributes:
        way: the variances from a workload's recurrence; None for those that are made from K, column by column.
        closed: whether `prefix_variance` is a closed form.
    """

    way: Callable[[Any], Way | None]
    closed: bool = False


class Rounding(NamedTuple):
    """What float32 does to the strategies of a kind; see `anyorder.strategy.sensitivity`.

    Attributes:
        change: of C.
        under_coins: given that change, (1 + e) (1 + w) - 1.
    """

    change: Callable[[Any], Change]
    under_coins: Callable[[Any, Change], float]


class Fit(NamedTuple):
    """How the strategies of a kind are fitted.

    Attributes:
        name: what `anyorder.optimize.fit` calls the kind.
        function: the strategy, from workload, participation, and by name the objective and the sizes.
    """

    name: str
    function: Callable[..., Strategy]


_OF_TOEPLITZ = Worst(toeplitz.bound, toeplitz.units)
_OF_MATRIX = Worst(matrix_bound, matrix_units)  # of any C, for n up to 4096
_BY_COLUMNS = Variances(lambda strategy: None)  # of any C, likewise
_OF_SERIES = Rounding(toeplitz.change, toeplitz.under_coins)

Example = Callable[[int], Strategy]


class Kind(NamedTuple):
    """All that the package has to know of one kind of strategy, beside its class.

    Attributes:
        cls: the class, final.
        name: "kind" in JSON.
        words: its name for people.
        make: the strategy from the other values in JSON.
        structure: what is proven of it.
        worst: its sensitivity.
        variances: the noise in the iterates.
        rounding: what float32 does to it.
        examples: by name, strategies for any n >= 1 on which every law is tested: odd ones, not the nicest.
        fit: how it is fitted; None, which the row says, where there is nothing to fit.
        sizes: in the order in which they are said.
    """

    cls: type[Strategy]
    name: str
    words: str
    make: Callable[..., Strategy]
    structure: Structure
    worst: Worst
    variances: Variances
    rounding: Rounding
    examples: dict[str, Example]
    fit: Fit | None
    sizes: tuple[Size, ...] = ()


_BANDS = Size("band", "bands", "num_bands")
_BUFFERS = Size("buffer", "buffers", "num_buffers")
_RANK = Size("rank", "rank", "rank")
ALL_SIZES = (_BANDS, _BUFFERS, _RANK)


def _mixed(n: int) -> NDArray[np.float64]:
    """Lower triangular, well conditioned, with entries of both signs."""
    i, j = np.indices((n, n))
    return np.asarray(np.cos(1 + i + 2 * j) / (1 + abs(i - j)) * (i >= j) + 2 * np.eye(n))


def _three_bands(n: int) -> Banded:
    i, j = np.indices((n, n))
    return Banded(np.tril(_mixed(n)) * (i - j < 3))


def _low_rank(n: int) -> BandedLowRank:
    bands = np.array([[1.0, 0.0 if t == 0 else -0.4] for t in range(n)])[:, : min(n, 2)]
    column = np.linspace(0.5, 1, n)[:, None]
    return BandedLowRank(bands, 0.1 * column, column[::-1])


def _restarted(n: int, epochs: int = 3) -> RestartedBLT:
    """Epochs of their own parameters, the last one shorter where they do not divide n."""
    s = -(-n // epochs)
    k = np.arange(-(-n // s))
    decays, scales = [0.95, 0.5] - 0.1 * k[:, None], [0.2, 0.3] + 0.1 * k[:, None]
    return RestartedBLT(decays, scales, 0.8 - 0.4 * k, 1 - 0.2 * k, n, s)


def _four_bands(n: int) -> BandedInverse:
    k = np.arange(1, min(n, 4))
    return BandedInverse(np.cumprod(np.append(1.0, 1 - 1.5 / k)), n)


def _restarts(n: int) -> tuple[int, ...]:
    return tuple(r for r in (n // 3, n // 3 + 1, 2 * n // 3 + 1) if 0 < r < n)


_TREES: dict[str, Example] = {
    "tree": Tree,
    "tree online": lambda n: Tree(n, "online"),
    "tree full": lambda n: Tree(n, "full"),
    "tree online regenerated": lambda n: Tree(n, "online", regenerate=True),
    "tree full regenerated": lambda n: Tree(n, "full", regenerate=True),
    "tree restarts": lambda n: Tree(n, restarts=_restarts(n)),
    "tree completed": lambda n: Tree(n, restarts=_restarts(n), completion=True),
    "tree online completed": lambda n: Tree(n, "online", _restarts(n), completion=True),
    "tree online completed regenerated": lambda n: Tree(n, "online", _restarts(n), completion=True, regenerate=True),
    "tree full completed": lambda n: Tree(n, "full", _restarts(n), completion=True),
    "tree full completed regenerated": lambda n: Tree(n, "full", _restarts(n), completion=True, regenerate=True),
}


def _change_of_rescaled(strategy: Rescaled) -> Change:
    return rescaled.change(strategy, kind_of(strategy.strategy).rounding.change(strategy.strategy))


def _rescaled_under_coins(strategy: Rescaled, change: Change) -> float:
    del change
    inner = kind_of(strategy.strategy).rounding
    return rescaled.under_coins(strategy, inner.under_coins(strategy.strategy, inner.change(strategy.strategy)))


KINDS: tuple[Kind, ...] = (
    Kind(
        Independent, "independent", "independent", Independent, Structure.IDENTITY,
        worst=Worst(independent.bound, independent.units),
        variances=Variances(independent.way, closed=True),
        rounding=Rounding(independent.change, independent.under_coins),
        fit=None,
        examples={"independent": Independent},
    ),
    Kind(
        Dense, "dense", "dense", Dense._from_dict, Structure.DENSE,
        worst=_OF_MATRIX,
        variances=_BY_COLUMNS,
        rounding=Rounding(dense.change, under_coins),
        fit=Fit("dense", dense.fit),
        examples={"dense": lambda n: Dense(_mixed(n))},
    ),
    Kind(
        Banded, "banded", "banded", Banded._from_dict, Structure.BANDED,
        worst=Worst(banded.bound, banded.units),
        variances=Variances(banded.way),
        rounding=Rounding(banded.change, banded.under_coins),
        fit=Fit("banded", banded.fit),
        sizes=(_BANDS,),
        examples={"banded": _three_bands},
    ),
    Kind(
        ToeplitzBanded, "toeplitz_banded", "banded toeplitz", ToeplitzBanded, Structure.TOEPLITZ_BANDED,
        worst=_OF_TOEPLITZ,
        variances=Variances(toeplitz.way_of_banded),
        rounding=Rounding(toeplitz.change_of_banded, toeplitz.under_coins_of_banded),
        fit=Fit("toeplitz", toeplitz.fit),
        sizes=(_BANDS,),
        examples={
            "toeplitz banded": lambda n: ToeplitzBanded([1.0, 0.5, 0.25][:n], n),
            "toeplitz banded mixed": lambda n: ToeplitzBanded([1.0, -0.4, 0.0, 0.7][:n], n),
            "toeplitz banded rising": lambda n: ToeplitzBanded([1.0, 1.3, -0.09, -0.405][:n], n),
        },
    ),
    Kind(
        SquareRoot, "square_root", "square root", SquareRoot, Structure.TOEPLITZ,
        worst=_OF_TOEPLITZ,
        variances=Variances(toeplitz.way),
        rounding=_OF_SERIES,
        fit=None,
        examples={"square root": SquareRoot},
    ),
    Kind(
        BandedInverse, "banded_inverse", "banded inverse", BandedInverse, Structure.TOEPLITZ,
        worst=_OF_TOEPLITZ,
        variances=Variances(toeplitz.way),
        rounding=_OF_SERIES,
        fit=Fit("banded_inverse", banded_inverse.fit),
        sizes=(_BANDS,),
        examples={
            "banded inverse": _four_bands,
            "banded inverse mixed": lambda n: BandedInverse([0.8, 0.3, -0.5][:n], n),
            "banded inverse rising": lambda n: BandedInverse([0.8, -1.0, 0.5][:n], n),
        },
    ),
    Kind(
        BLT, "blt", "blt", BLT, Structure.BUFFERED,
        worst=Worst(blt.bound, blt.units),
        variances=Variances(blt.way),
        rounding=Rounding(blt.change, toeplitz.under_coins),
        fit=Fit("blt", blt.fit_blt),
        sizes=(_BUFFERS,),
        examples={
            "blt": lambda n: BLT([0.9, 0.4], [0.2, 0.1], n),
            "blt mixed": lambda n: BLT([0.9, -0.7], [0.3, -0.8], n),
            "blt rising": lambda n: BLT([-0.7, -0.2], [-0.2, 1.3], n),
        },
    ),
    Kind(
        BandedLowRank, "banded_low_rank", "banded low rank", BandedLowRank._from_dict, Structure.LOW_RANK,
        worst=_OF_MATRIX,
        variances=_BY_COLUMNS,
        rounding=Rounding(low_rank.change, under_coins),
        fit=Fit("banded_low_rank", low_rank.fit),
        sizes=(_BANDS, _RANK),
        examples={"low rank": _low_rank},
    ),
    Kind(
        Rescaled, "rescaled", "rescaled", lambda strategy, scales: Rescaled(from_dict(strategy), scales),
        Structure.RESCALED,
        worst=Worst(rescaled.bound, rescaled.units),
        variances=_BY_COLUMNS,  # scales are taken off before
        rounding=Rounding(_change_of_rescaled, _rescaled_under_coins),
        fit=None,
        examples={"rescaled": lambda n: Rescaled(SquareRoot(n), np.linspace(1, 2, n))},
    ),
    Kind(
        RestartedBLT, "restarted_blt", "restarted blt", RestartedBLT, Structure.RESTARTED,
        worst=Worst(restarted_blt.bound, restarted_blt.units),
        variances=Variances(restarted_blt.way),
        rounding=Rounding(restarted_blt.change, restarted_blt.under_coins),
        fit=Fit("restarted_blt", restarted_blt.fit_restarted),
        sizes=(_BUFFERS,),
        examples={"restarted": _restarted, "restarted twice": lambda n: _restarted(n, 2)},
    ),
    Kind(
        Tree, "tree", "tree", Tree, Structure.TREE,
        worst=Worst(tree.bound, tree.units),
        variances=Variances(tree.way, closed=True),
        rounding=Rounding(tree.change, under_coins),
        fit=Fit("tree", tree.fit_tree),
        examples=_TREES,
    ),
)  # fmt: skip

_BY_CLASS = {kind.cls: kind for kind in KINDS}
_BY_NAME = {kind.name: kind for kind in KINDS}


def kind_of(strategy: Strategy) -> Kind:
    """The row of a strategy's exact type. PlanError if it has none, or is made of one that has none."""
    kind = _BY_CLASS.get(type(strategy))
    if kind is None:
        raise PlanError(
            f"strategy must be one of {', '.join(kind.cls.__name__ for kind in KINDS)}, got {type(strategy).__name__}: "
            "sensitivities are proven for these alone; give the matrix C of another to Dense"
        )
    if isinstance(strategy, Rescaled):
        kind_of(strategy.strategy)
    return kind


def check_kind(strategy: object) -> None:
    """Raise PlanError unless it is one of the kinds of this package itself, all the way in."""
    kind_of(strategy)  # type: ignore[arg-type]


def from_dict(data: dict[str, Any]) -> Strategy:
    """The strategy that `Strategy.to_dict` described."""
    name = checks.choice("strategy kind", data.get("kind", ""), _BY_NAME)
    return _BY_NAME[name].make(**{key: value for key, value in data.items() if key != "kind"})


def in_words(strategy: Strategy) -> str:
    """Kind and sizes: "blt, 2 buffers", "banded low rank, 4 bands, 2 rank, rescaled"."""
    if isinstance(strategy, Rescaled):
        return f"{in_words(strategy.strategy)}, rescaled"
    kind = kind_of(strategy)
    return ", ".join([kind.words, *(sized(getattr(strategy, size.attribute), size.word) for size in kind.sizes)])


def sized(count: int, what: str) -> str:
    """A size in words: "1 buffer", "2 buffers"; a rank has no plural."""
    return f"{count} {what}" if what == "rank" else counted(count, what)


# -- sensitivity -----------------------------------------------------------------------------------------------------

# sens(C, participation): how much one unit can move C G, at clip norm 1.
#
#     sens^2 = max over allowed steps pi of one unit, and vectors of norm <= 1, of || C sum_t e_t u_t^T ||_F^2
#            = max over pi, and Gram matrices Y >= 0 with Y_ii <= 1, of <X_pi,pi, Y>,     X = C^T C
#
# `rounding` is by how much more a unit can move it with the float32 numbers that noise is made with; the proof stands
# in `sensitivity.py`, what a kind adds to it in the file of the kind.


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
    return _worst(strategy, participation.pattern)


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
    return _worst(strategy, participation.pattern)


def unit_sensitivities(strategy: Strategy, order: Participation) -> NDArray[np.float64]:
    """(units,) the sensitivity for each unit's own steps, in the order of `order.units`; never below the true ones."""
    pattern = order.pattern if isinstance(order, Participation) else None
    if not isinstance(pattern, Listed) or pattern.given is None:
        raise ArgumentError(f"order must be a KnownOrder, got {order!r}; other participations do not name their units")
    _check_fit(strategy, order)
    values = kind_of(strategy).worst.units(strategy, pattern)
    return np.minimum(values, refined(strategy, pattern, Bound(float(values.max()), exact=False)).value)


def _worst(strategy: Strategy, pattern: Pattern) -> Bound:
    found = kind_of(strategy).worst.bound(strategy, pattern)
    return found if found.exact else refined(strategy, pattern, found)


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


# -- error -----------------------------------------------------------------------------------------------------------

# The variance of every iterate's noise, for any strategy and workload, at any n that has a way in good time.
#
# The iterate p is the second number of a state w = (velocity, p) that moves with the noise eta_t of each step,
#
#     w <- M_t w + N_t s_t eta_t,      eta = K Z,
#
# M_t and N_t of the workload (`Workload.recurrence`), s_t a factor of `Rescaled`. What eta is to w decides the way,
# which the row of a kind says and its file holds:
#
# - Toeplitz C and A: the rows of A K are those of one series, its cumulative energy (O(n) after the coefficients).
# - a state of few numbers: its covariance with w, many blocks of steps side by side (`variances`).
# - bands: a block of steps is a small dense map of the last p - 1 outputs or rows of Z (`variances`).
# - trees: subtrees of a size side by side, from the leaves up (`tree`). Else K itself, column by column.

Floats = NDArray[np.float64]
COLUMN_STEPS = 16384  # up to which the columns of K are made one after the other


def has_variances(strategy: Strategy, workload: Workload) -> bool:
    """Whether `row_variances` knows a way that n allows."""
    if workload.n <= DENSE_STEPS:
        return True
    inner, scales = _unscaled(strategy)
    series = isinstance(inner, Toeplitz)
    if series and scales is None and workload.is_toeplitz:
        return True
    if isinstance(workload, GivenWorkload):
        return series and workload.n <= COLUMN_STEPS
    return kind_of(inner).variances.way(inner) is not None or (series and workload.n <= COLUMN_STEPS)


def row_variances(strategy: Strategy, workload: Workload) -> Floats:
    """(n,) || (A K)[t] ||^2: the variance of each iterate's noise for rows of Z of variance 1, no sensitivity.

    Cost: O(n log n) for Toeplitz C and A, O(n m^3) for m buffers, O(n p^2) for p bands, O(n log n) for trees, all in
        less than a second for n = 10^5; O(n^3) for Dense and BandedLowRank; O(n^2) for SquareRoot and a schedule.
    Raises: PlanError where the workload has another number of steps, or n is too large, see `has_variances`.
    """
    n = strategy.n
    if workload.n != n:
        raise PlanError(f"workload and strategy must have the same number of steps, got {workload.n} and {n}")
    if not has_variances(strategy, workload):
        most = COLUMN_STEPS if isinstance(_unscaled(strategy)[0], Toeplitz) else DENSE_STEPS
        raise PlanError(
            f"the error of {strategy!r} for {workload!r} must be made from the matrix C^-1, for at most {most} steps, "
            f"got {n}; a strategy with a small state (BLT, Banded, BandedInverse, Tree) has no such limit"
        )
    if workload.is_prefix_sum and kind_of(strategy).variances.closed:
        return strategy.prefix_variance()
    inner, scales = _unscaled(strategy)
    if isinstance(inner, Toeplitz) and scales is None and workload.is_toeplitz:
        return np.asarray(np.cumsum(np.square(workload.apply(inner.noising_coefficients()))))
    way = None if isinstance(workload, GivenWorkload) else kind_of(inner).variances.way(inner)
    if way is None:
        return _by_columns(inner, scales, workload)
    return of_iterates(inner, workload, way, scales)


def _unscaled(strategy: Strategy) -> tuple[Strategy, Floats | None]:
    """The strategy without scales, and their product."""
    scales = None
    while isinstance(strategy, Rescaled):
        scales = strategy.scales if scales is None else scales * strategy.scales
        strategy = strategy.strategy
    return strategy, scales


def _by_columns(strategy: Strategy, scales: Floats | None, workload: Workload) -> Floats:
    """From K itself, which a long Toeplitz one is a view of."""
    n = strategy.n
    if not isinstance(strategy, Toeplitz) or n <= DENSE_STEPS:
        return by_columns(strategy.noising_matrix(), workload, scales)
    padded = np.concatenate([np.zeros(n), strategy.noising_coefficients()])
    return by_columns(sliding_window_view(padded, n)[::-1].T[:, :n], workload, scales)  # [t, s] = g_{t-s}


# -- measures --------------------------------------------------------------------------------------------------------

# Root mean square errors of the iterates.
#
# All are at clip norm 1 and sigma 1 (std = sens): multiply by sigma * clip_norm for the noise of one coordinate of the
# iterate, in units of the learning rate.


def rmse(strategy: Strategy, workload: Workload, participation: Participation) -> float:
    """The root mean square error over the weights during training: sens * || A K ||_F / sqrt(n).  [Denisov et al.
    2022, Eq. 2]
    """
    return sensitivity(strategy, participation).value * math.sqrt(row_variances(strategy, workload).mean())


def max_error(strategy: Strategy, workload: Workload, participation: Participation) -> float:
    """The root mean square error of the worst iterate: sens * max_t || (A K)[t] ||."""
    return sensitivity(strategy, participation).value * math.sqrt(row_variances(strategy, workload).max())


def last_error(strategy: Strategy, workload: Workload, participation: Participation) -> float:
    """The root mean square error of the last iterate: sens * || (A K)[n - 1] ||."""
    return sensitivity(strategy, participation).value * math.sqrt(row_variances(strategy, workload)[-1])


def squared_error(strategy: Strategy, workload: Workload, objective: str) -> float:
    """The squared error of the objective, for rows of Z of variance 1."""
    return of_objective(row_variances(strategy, workload), objective)
