"""Choose a strategy: fit every kind that the budget allows, and rank them by error."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache as cached
from functools import partial
from typing import Any, assert_never

import numpy as np
from numpy.typing import NDArray

from anyorder import checks, error
from anyorder.error.variance import has_variances
from anyorder.errors import PlanError
from anyorder.optimize import cache
from anyorder.optimize.amplified import Judge, amplified_fits, check_claim, known_bins
from anyorder.optimize.blt import fit_blts
from anyorder.optimize.bounds import OBJECTIVES, lower_bound
from anyorder.optimize.dense import Optimum
from anyorder.optimize.objectives import squared_error
from anyorder.optimize.patterns import describes_all, shuffled
from anyorder.optimize.rescale import normalised, rescale
from anyorder.optimize.restarted import fits_restarted, restartable
from anyorder.optimize.structured import fit, solve_dense
from anyorder.optimize.toeplitz import DENSE_STEPS, Problem, fits_banded_inverse, fits_toeplitz
from anyorder.patterns import Listed, Participation, Pattern, PerEpoch, Separated
from anyorder.sensitivity import sensitivity
from anyorder.sensitivity.rounding import rounding
from anyorder.strategy import BandedLowRank, Combination, Dense, Independent, Rescaled, Strategy, from_dict
from anyorder.strategy.kinds import Structure, in_words, kind_of
from anyorder.workload import Workload
from anyorder.workload.given import GivenWorkload

__all__ = ["Candidate", "choose", "rows_touched"]

Floats = NDArray[np.float64]

MAX_COST = 32.0
_BUFFERS = 4
_RESTARTED = 2  # buffers of BLTs that start anew in every epoch
_BANDS = (2, 4, 8, 16, 32, 64, 128)
_LOW_RANK = ((2, 2), (4, 4), (8, 8), (8, 12), (8, 16), (8, 24), (8, 32), (16, 48))  # bands and rank
_GAIN = 1.002  # of a larger rank, or it is not worth its memory
_SWEEPS = 20
_DENSE = 1536  # steps up to which the dense optimum is solved for the lower bound
_EASY = 512  # and to `_TOLERANCE`; beyond, that of the mean is 0.1 % low, and the ratios as much too high
_BANDED = 768  # and column-by-column bands are fitted
_RESCALED = 2048
_TOLERANCE = 1e-3  # relative gap of the dense optimum here
_TIE = 1e-6
_KNOWN = 3  # of the order without coins, beside those that are fitted to a secret claim


@dataclass(frozen=True)
class Candidate:
    """A strategy and what it is worth for one workload, participation and objective.

    Attributes:
        strategy: the strategy.
        name: kind and size.
        loss: error at clip norm 1 and sigma 1, root scale, sensitivity included; for secret orders at clip norm 1 and
            the noise that the claim needs, as it is estimated.
        ratio: loss over the certified lower bound of all strategies, at least 1; None for secret orders, for which no
            such bound is known.
        state_rows: vectors of the size of the model that it keeps.
        cost: vectors of that size that a step reads or makes, on average.
        sensitivity: of the strategy, clip norm 1; for secret orders that noise, over the clip norm.
        exact: whether that sensitivity is proven attained.
    """

    strategy: Strategy
    name: str
    loss: float
    ratio: float | None
    state_rows: int
    cost: float
    sensitivity: float
    exact: bool


@dataclass(frozen=True)
class _Budget:
    state: float
    cost: float

    def allows(self, state: float, cost: float) -> bool:
        return state <= self.state and cost <= self.cost


def choose(
    workload: Workload,
    participation: Participation,
    max_state: int | None = None,
    objective: str = "mean",
    *,
    max_cost: float | None = MAX_COST,
    epsilon: float | None = None,
    delta: float | None = None,
) -> list[Candidate]:
    """All strategies within the budget, the one of least error first; of equal ones the cheapest.

    Independent noise, the best tree, BLTs, banded inverses, banded Toeplitz; for orders shuffled every epoch BLTs that
    start anew; time rescaling where it is known which steps one unit takes, columns of norm 1 where they are only far
    apart; for small n also bands with columns of their own, the dense optimum, and what is left of it in few bands and
    a low rank, whose rank grows as long as that gains 0.2 %. What is too long for a kind is left out: beyond 4096
    steps bands where A is not Toeplitz. So is what is too ill-conditioned for noise with float32 coefficients.

    Args:
        workload: A.
        participation: any but PoissonSampling, for which only independent noise is accounted.
        max_state: vectors of the size of the model that may be kept between steps; None for any number.
        objective: "mean", "max" or "last" error.
        max_cost: vectors of that size that a step may read or make, on average; None for any number. The dense optimum
            needs n / 2.
        epsilon, delta: the claim, for orders that are drawn by secret coins, and for no others, see `fit`.
    Cost: seconds for 1000 steps, hardly more for many; results are kept on disk, see `cache`.
    """
    checks.choice("objective", objective, OBJECTIVES)
    if workload.n != participation.n:
        raise PlanError(f"workload and participation must have the same n, got {workload.n} and {participation.n}")
    budget = _Budget(
        math.inf if max_state is None else checks.integer("max_state", max_state, low=0),
        math.inf if max_cost is None else checks.real("max_cost", max_cost, low=1.0),
    )
    claim = check_claim(participation, epsilon, delta)
    if claim is not None:
        return _ranked(_amplified(Judge(workload, participation, objective, *claim), budget))
    optimum = cached(partial(solve_dense, workload, participation, objective, tolerance=_TOLERANCE))
    bound = _bound(workload, participation, objective, optimum)
    return _ranked(_open(workload, participation, objective, budget, optimum, bound))


def _open(
    workload: Workload, participation: Participation, objective: str, budget: _Budget, optimum: Callable[[], Optimum],
    bound: float | None,
) -> Iterator[Candidate]:  # fmt: skip
    """The candidates for an order without secrets."""
    for strategy in _fits(workload, participation, objective, budget, optimum):
        cost = rows_touched(strategy)
        allowed = budget.allows(strategy.state_rows, cost) and has_variances(strategy, workload)
        if allowed and _can_be_made(strategy, participation):
            sens = sensitivity(strategy, participation)
            loss = sens.value * math.sqrt(squared_error(strategy, workload, objective))
            ratio = None if bound is None else max(1.0, loss / bound)
            name = in_words(strategy)
            yield Candidate(strategy, name, loss, ratio, strategy.state_rows, cost, sens.value, sens.exact)


def _ranked(found: Iterable[Candidate]) -> list[Candidate]:
    return sorted(found, key=lambda c: (round(math.log(c.loss) / _TIE), c.state_rows, c.cost))


def _amplified(judge: Judge, budget: _Budget) -> Iterator[Candidate]:
    """The candidates for a secret order."""
    limits = {"state": min(budget.state, judge.rule.n), "cost": min(budget.cost, judge.rule.n)}
    question = {"workload": judge.workload, "participation": judge.rule, "objective": judge.objective}
    fits = partial(amplified_fits, judge, limits["state"], limits["cost"])
    claim = {"epsilon": judge.epsilon, "delta": judge.delta}
    own = _kept("amplified", limits | claim, lambda: list(fits()), **question)
    for strategy in (*own, *_of_known_bins(judge, budget)):
        cost = rows_touched(strategy)
        if budget.allows(strategy.state_rows, cost) and has_variances(strategy, judge.workload):
            judged = judge(strategy)
            sigma, name = judged.noise.sigma, in_words(strategy)
            yield Candidate(strategy, name, judged.loss, None, strategy.state_rows, cost, sigma, exact=False)


def _of_known_bins(judge: Judge, budget: _Budget) -> list[Strategy]:
    """The best for the same bins where everybody knows them: some are of kinds without a fit for a secret claim."""
    order = known_bins(judge.rule)
    if order is None:
        return []
    optimum = cached(partial(solve_dense, judge.workload, order, judge.objective, tolerance=_TOLERANCE))
    known = _ranked(_open(judge.workload, order, judge.objective, budget, optimum, None))[:_KNOWN]
    return [one.strategy for one in known if _can_be_made(one.strategy, judge.rule)]


def _can_be_made(strategy: Strategy, participation: Participation) -> bool:
    """Whether float32 coefficients are near enough to those of its noise: a plan of it would be refused otherwise."""
    try:
        rounding(strategy, participation)
    except PlanError:
        return False
    return True


def rows_touched(strategy: Strategy) -> float:
    """Rows of Z made and vectors of state read in a step, on average over the run."""
    if isinstance(strategy, Rescaled):
        return rows_touched(strategy.strategy)
    if kind_of(strategy).structure is Structure.LOW_RANK:
        return 1.0 + sum(int(getattr(strategy, size.attribute)) for size in kind_of(strategy).sizes)
    if isinstance(strategy, Combination) and strategy.state_rows == 0:
        steps = np.unique(np.linspace(0, strategy.n - 1, 64).astype(int))
        return float(np.mean([len(strategy.terms(int(t)).rows) for t in steps]))
    return 1.0 + strategy.state_rows


def _bound(workload: Workload, participation: Participation, objective: str, optimum: Callable[[], Optimum]) -> float:
    iterations = 2 if workload.n > _EASY and objective == "mean" else 60
    options: dict[str, Any] = {"resolution": _DENSE, "tolerance": _TOLERANCE, "max_iterations": iterations}

    def answer() -> float:
        if _shortened(workload, participation, objective):
            return optimum().lower  # which is needed in any case
        return lower_bound(workload, participation, objective, **options)

    return cache.remember(
        _question("bound", workload, participation, objective) | options,
        answer,
        encode=float,
        decode=float,
    )


def _question(kind: str, workload: Workload, participation: Participation, objective: str) -> dict[str, Any]:
    return {
        "kind": kind, "workload": workload.to_dict(), "participation": participation.to_dict(), "objective": objective,
    }  # fmt: skip


def _fits(
    workload: Workload,
    participation: Participation,
    objective: str,
    budget: _Budget,
    optimum: Callable[[], Optimum],
) -> Iterator[Strategy]:
    """The candidates, without those whose size is known to be over the budget."""
    n, epochs = workload.n, shuffled(participation.pattern)
    yield Independent(n)
    if participation.min_separation == 1 and participation.max_participations == n:
        return  # a unit may be in every step: columns of C must be orthogonal, nothing correlated helps
    if n <= DENSE_STEPS or not isinstance(workload, GivenWorkload):
        yield fit("tree", workload, participation, objective)
    if epochs is not None and restartable(workload, epochs):
        yield from _restarted(workload, participation, objective, budget)
    series = list(_series(workload, participation, objective, budget))
    yield from series
    if n <= _RESCALED and objective == "mean":
        known = describes_all(participation)
        free = not known and _may_lie_anywhere(participation.pattern)
        for strategy in _best_of_each(series, workload, participation) if known or free else ():
            yield normalised(strategy) if free else rescale(strategy, workload, participation)
    apart = participation.min_separation if epochs is None else epochs.steps_per_epoch
    bands = int(min(apart, n, _BANDS[-1], budget.cost, budget.state + 1))
    if n <= _BANDED and bands > 1 and objective == "mean":
        yield fit("banded", workload, participation, objective, bands=bands)
    if _shortened(workload, participation, objective):
        fits = partial(_low_rank, workload, participation, budget, optimum)
        limits = [min(budget.state, n), min(budget.cost, n)]
        question = {"workload": workload, "participation": participation, "objective": "mean"}
        yield from _kept("low_ranks", limits, fits, **question)
    if n <= _DENSE and budget.allows(0, n / 2):
        yield Dense(optimum().C)


def _may_lie_anywhere(pattern: Pattern) -> bool:
    """Whether any steps that are far enough apart may be one unit's."""
    match pattern:
        case Separated():
            return True
        case Listed() | PerEpoch():
            return False
        case _:
            assert_never(pattern)


def _shortened(workload: Workload, participation: Participation, objective: str) -> bool:
    """Whether the dense optimum is solved to be made short."""
    return workload.n <= _EASY and describes_all(participation) and objective == "mean"


def _low_rank(
    workload: Workload, participation: Participation, budget: _Budget, optimum: Callable[[], Optimum]
) -> list[Strategy]:
    """The dense optimum made short, and rescaled: ranks as long as the next one gains."""
    best, least = Dense(optimum().C), math.inf
    found: list[Strategy] = []
    for bands, rank in _LOW_RANK:
        if bands + rank >= workload.n or not budget.allows(rank, bands + rank + 1.0):
            break
        short = BandedLowRank.approximate(best, num_bands=bands, rank=rank, sweeps=_SWEEPS)
        scaled = rescale(short, workload, participation)
        loss = error.rmse(scaled, workload, participation)
        if loss * _GAIN > least:
            break
        least = loss
        found.append(scaled)
    return found


def _restarted(workload: Workload, participation: Participation, objective: str, budget: _Budget) -> Iterator[Strategy]:
    buffers = int(min(_RESTARTED, budget.state - 1, budget.cost - 2))
    if buffers < 1:
        return
    fits = partial(fits_restarted, workload, participation, buffers, objective)
    question = {"workload": workload, "participation": participation, "objective": objective}
    yield from _kept("restarted_blts", buffers, fits, **question)


def _series(workload: Workload, participation: Participation, objective: str, budget: _Budget) -> Iterator[Strategy]:
    """The Toeplitz kinds."""
    n, b = workload.n, participation.min_separation
    small = n <= DENSE_STEPS
    question = {"workload": workload, "participation": participation, "objective": objective}
    buffers = int(min(_BUFFERS, budget.state, budget.cost - 1))
    if buffers and (small or not isinstance(workload, GivenWorkload)):
        fits = partial(fit_blts, workload, participation, buffers, objective)
        yield from _kept("blts", buffers, fits, **question)
    if not (small or workload.is_toeplitz):
        return
    problem = Problem(workload, participation, objective)
    inverse = [p for p in _BANDS if p <= n and budget.allows(0, p)]
    found = _kept("banded_inverses", inverse, partial(fits_banded_inverse, problem, inverse), **question)
    yield from _different(found)
    banded = [p for p in _BANDS if p <= min(n, b) and budget.allows(p - 1, p)]
    found = _kept("toeplitzes", banded, partial(fits_toeplitz, problem, banded), **question)
    yield from _different(found)


def _different(found: Sequence[Strategy]) -> Iterator[Strategy]:
    """One of each size; where more bands gained nothing, fewer stand for them."""
    yield from {in_words(one): one for one in found}.values()


def _kept(kind: str, sizes: Any, answer: Callable[[], Sequence[Strategy]], **question: Any) -> Sequence[Strategy]:
    """The strategies of several sizes of one kind, from the cache or the fits."""
    return cache.remember(
        _question(kind, **question) | {"sizes": sizes},
        answer,
        encode=lambda found: [strategy.to_dict() for strategy in found],
        decode=lambda values: [from_dict(value) for value in values],
    )


def _best_of_each(series: list[Strategy], workload: Workload, participation: Participation) -> list[Strategy]:
    """The one of least mean error of each class."""
    best: dict[type, tuple[float, Strategy]] = {}
    for strategy in series:
        loss = error.rmse(strategy, workload, participation)
        if type(strategy) not in best or loss < best[type(strategy)][0]:
            best[type(strategy)] = (loss, strategy)
    return [strategy for _, strategy in best.values()]
