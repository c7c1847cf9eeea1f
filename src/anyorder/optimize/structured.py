"""Fit one kind of strategy to a workload and a participation."""

import math
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple, assert_never

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import block_diag, solve_triangular

from anyorder import checks
from anyorder.errors import ArgumentError, PlanError
from anyorder.optimize import cache, dense
from anyorder.optimize.amplified import Judge, check_claim, fit_amplified
from anyorder.optimize.banded import epoch_factors, epoch_shares, fit_banded
from anyorder.optimize.blt import fit_blt
from anyorder.optimize.bounds import OBJECTIVES
from anyorder.optimize.objectives import by_rows, mostly_last
from anyorder.optimize.patterns import disjoint
from anyorder.optimize.restarted import fit_restarted
from anyorder.optimize.toeplitz import Problem, fit_banded_inverse, fit_toeplitz
from anyorder.optimize.tree import fit_tree
from anyorder.patterns import Listed, Participation, PerEpoch, Separated, grouped
from anyorder.strategy import (
    BLT,
    Banded,
    BandedInverse,
    BandedLowRank,
    Dense,
    RestartedBLT,
    Strategy,
    ToeplitzBanded,
    Tree,
    from_dict,
)
from anyorder.strategy.kinds import KINDS, Kind, Size
from anyorder.workload import Workload

__all__ = ["FITS", "Fit", "fit", "fit_dense", "solve_dense"]

Floats = NDArray[np.float64]

_MAX_STEPS = 4096


class Fit(NamedTuple):
    """How the strategies of one class are fitted.

    Attributes:
        name: what `fit` calls the kind.
        cls: the class, with a row in `anyorder.strategy.kinds.KINDS`, which says the sizes and the words.
        function: from workload, participation, objective, and the sizes by name.
    """

    name: str
    cls: type[Strategy]
    function: Callable[..., Strategy]

    @property
    def kind(self) -> Kind:
        """The row of the class."""
        found = [kind for kind in KINDS if kind.cls is self.cls]
        if not found:
            raise PlanError(f"{self.cls.__name__} has a fit, and no row among the kinds of strategies")
        return found[0]

    @property
    def sizes(self) -> tuple[Size, ...]:
        """The sizes that the function takes."""
        return self.kind.sizes


def fit(
    kind: str,
    workload: Workload,
    participation: Participation,
    objective: str = "mean",
    *,
    bands: int | None = None,
    buffers: int | None = None,
    rank: int | None = None,
    epsilon: float | None = None,
    delta: float | None = None,
) -> Strategy:
    """The strategy of one kind with the least error found, sensitivity included.

    | kind | size | what |
    |---|---|---|
    | "dense" | | the optimum over all C; n <= 4096 |
    | "banded" | bands | banded C, every column its own; n <= 2048 |
    | "toeplitz" | bands | banded Toeplitz C |
    | "blt" | buffers | buffered linear Toeplitz; any n |
    | "restarted_blt" | buffers | a BLT and a noisy total for each shuffled epoch; epochs of at most 2048 steps |
    | "banded_inverse" | bands | Toeplitz C with banded inverse |
    | "banded_low_rank" | bands, rank | the dense optimum made short [Denisov et al. 2022, App. H] |
    | "tree" | | the best binary tree |

    Results are kept on disk, see `cache`. Some are local optima, none is worse than its well-known start.

    Args:
        kind: see the table.
        workload: A.
        participation: any but PoissonSampling. For a KnownOrder whose units mix, and for EpochShuffle, the fit uses a
            likely worst pattern; `anyorder.sensitivity` says what it is really worth.
        objective: "mean", "max" or "last" error.
        bands, buffers, rank: the sizes that the kind needs, and no others.
        epsilon, delta: the claim, for an order that is drawn by secret coins, and for no other: the fit is of least
            error times the noise multiplier that the *amplified* claim needs (an estimate; a plan's own is calibrated
            by a bound), see `anyorder.optimize.amplified`. Under the others one C is best at every epsilon.
    Raises: ArgumentError for a wrong kind or size, and for a claim with an order that asks for none; PlanError where n
        is too large for the kind, and where a secret order has no fit of it.
    """
    found = _BY_NAME[checks.choice("kind", kind, _BY_NAME)]
    checks.choice("objective", objective, OBJECTIVES)
    given = {"bands": bands, "buffers": buffers, "rank": rank}
    sizes = {name: value for name, value in given.items() if value is not None}
    needed = [size.argument for size in found.sizes]
    if set(sizes) != set(needed):
        raise ArgumentError(f"kind {kind!r} needs the sizes {needed}, got {sorted(sizes)}")
    if workload.n != participation.n:
        raise PlanError(f"workload and participation must have the same n, got {workload.n} and {participation.n}")
    claim = check_claim(participation, epsilon, delta)
    question = {
        "kind": kind, "workload": workload.to_dict(), "participation": participation.to_dict(),
        "objective": objective, "size": sizes,
    } | ({} if claim is None else {"claim": claim})  # fmt: skip

    def answer() -> Strategy:
        if claim is not None:
            return fit_amplified(kind, Judge(workload, participation, objective, *claim), sizes)
        return found.function(workload, participation, objective, **sizes)

    return cache.remember(question, answer, encode=lambda found: found.to_dict(), decode=from_dict)


def fit_dense(
    workload: Workload, participation: Participation, objective: str = "mean", *, tolerance: float | None = None
) -> dense.Optimum:
    """The dense optimum and its certificate.

    - SingleEpoch, FixedOrder, a KnownOrder whose units do not mix: over all C, to `tolerance`, a relative gap of the
      squared losses: 1e-6 by default, 1e-3 for "max". A warning says so where 300 iterations end above it, as they may
      for "max" with momentum; `gap` is true all the same.
    - EpochShuffle: over all C that start anew in every epoch, X = 0 between epochs. `lower` is a bound for all C.
    - MinSeparation: over all C with X_st = 0 at distances b and more, unit columns: the banded fit with b bands.

    Attributes of the result refer to the objective; for "last" the other iterates count a thousandth.
    """
    if tolerance is None:
        tolerance = 1e-3 if objective == "max" else 1e-6
    found = solve_dense(workload, participation, objective, tolerance=tolerance)
    if found.gap > tolerance and _over_all(participation):
        warnings.warn(
            f"the dense optimum is found to a gap of {found.gap:.1e} in the squared loss, not to the tolerance "
            f"{tolerance:.1e}: no C is better by more than that; a larger tolerance says so beforehand",
            stacklevel=2,
        )
    return found


def _over_all(participation: Participation) -> bool:
    """Whether the dense optimum is over all C, and not over some that the participation makes good."""
    pattern = participation.pattern
    match pattern:
        case Listed():
            return True
        case Separated() | PerEpoch():
            return pattern.max_participations == 1
        case _:
            assert_never(pattern)


def solve_dense(workload: Workload, participation: Participation, objective: str, *, tolerance: float) -> dense.Optimum:
    """`fit_dense` for callers that look at the gap themselves."""
    if workload.n > _MAX_STEPS:
        raise PlanError(f"dense strategies are fitted for at most {_MAX_STEPS} steps, got {workload.n}")
    groups = disjoint(participation)
    if objective == "last":
        workload, objective = mostly_last(workload), "mean"
    options: dict[str, Any] = {"objective": objective, "tolerance": tolerance}
    if _over_all(participation):
        return dense.optimum(workload.matrix(), groups, **options)
    found = dense.optimum(workload.matrix(), groups, **{**options, "tolerance": max(tolerance, 1e-3)})

    def inner(weighting: Workload) -> Dense:
        pattern = participation.pattern
        match pattern:
            case PerEpoch(steps_per_epoch=s):
                return Dense(_epochs(weighting, s))
            case Separated():
                return Dense(_separated(weighting, participation))
            case Listed():
                raise AssertionError("lists of patterns are solved over all C")
            case _:
                assert_never(pattern)

    C = (inner(workload) if objective == "mean" else by_rows(inner, workload)).matrix()
    errors = _errors(workload, C)
    upper = math.sqrt(errors.max() if objective == "max" else errors.mean())
    return dense.Optimum(C, found.lower, upper, found.iterations)


def _epochs(workload: Workload, s: int) -> Floats:
    singles = grouped(list(np.arange(s)[:, None]), s)
    found = [dense.optimum(R, singles) for R in epoch_factors(workload.matrix(), s)]
    shares = epoch_shares([part.upper**2 for part in found])
    return np.asarray(block_diag(*(share * part.C for share, part in zip(shares, found, strict=True))))


def _separated(workload: Workload, participation: Participation) -> Floats:
    found = fit_banded(workload, participation, workload.n)
    return found.matrix() / math.sqrt(participation.max_participations)


def _errors(workload: Workload, C: Floats) -> Floats:
    """(n,) squared norms of the rows of A C^-1."""
    K = solve_triangular(C, np.eye(len(C)), lower=True)
    return np.asarray(np.square(workload.apply(K)).sum(axis=1))


def _fit_dense(workload: Workload, participation: Participation, objective: str) -> Strategy:
    return Dense(fit_dense(workload, participation, objective).C)


def _fit_banded(workload: Workload, participation: Participation, objective: str, bands: int) -> Strategy:
    if objective == "max":
        return by_rows(lambda weighting: fit_banded(weighting, participation, bands), workload)
    return fit_banded(mostly_last(workload) if objective == "last" else workload, participation, bands)


def _fit_blt(workload: Workload, participation: Participation, objective: str, buffers: int) -> Strategy:
    return fit_blt(workload, participation, buffers, objective)


def _fit_restarted(workload: Workload, participation: Participation, objective: str, buffers: int) -> Strategy:
    return fit_restarted(workload, participation, buffers, objective)


def _fit_toeplitz(workload: Workload, participation: Participation, objective: str, bands: int) -> Strategy:
    return fit_toeplitz(Problem(workload, participation, objective), bands)


def _fit_banded_inverse(workload: Workload, participation: Participation, objective: str, bands: int) -> Strategy:
    return fit_banded_inverse(Problem(workload, participation, objective), bands)


def _fit_low_rank(workload: Workload, participation: Participation, objective: str, bands: int, rank: int) -> Strategy:
    optimum = fit("dense", workload, participation, objective)
    return BandedLowRank.approximate(optimum, num_bands=bands, rank=rank)


def _fit_tree(workload: Workload, participation: Participation, objective: str) -> Strategy:
    return fit_tree(workload, participation, objective=objective)


FITS: tuple[Fit, ...] = (
    Fit("banded", Banded, _fit_banded),
    Fit("banded_inverse", BandedInverse, _fit_banded_inverse),
    Fit("banded_low_rank", BandedLowRank, _fit_low_rank),
    Fit("blt", BLT, _fit_blt),
    Fit("dense", Dense, _fit_dense),
    Fit("toeplitz", ToeplitzBanded, _fit_toeplitz),
    Fit("restarted_blt", RestartedBLT, _fit_restarted),
    Fit("tree", Tree, _fit_tree),
)
_BY_NAME = {one.name: one for one in FITS}
