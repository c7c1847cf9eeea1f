"""Choose a strategy: fit every kind that the budget allows, and rank them by error."""

import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache as cached
from functools import partial
from typing import Any, assert_never

import numpy as np
from numpy.typing import NDArray

from anyorder import checks
from anyorder.errors import ArgumentError, PlanError
from anyorder.optimize.amplified import Judge, amplified_fits, fit_amplified, known_bins
from anyorder.patterns import Listed, Participation, Pattern, PerEpoch, Separated
from anyorder.strategy import registry
from anyorder.strategy.banded_inverse import fits_banded_inverse
from anyorder.strategy.base import DENSE_STEPS, Combination, Strategy
from anyorder.strategy.blt import fit_blt, fit_blts
from anyorder.strategy.dense import Dense, Optimum, solve_dense
from anyorder.strategy.fitting import OBJECTIVES, check_optimisable, describes_all, question_of, remember, shuffled
from anyorder.strategy.independent import Independent
from anyorder.strategy.low_rank import BandedLowRank
from anyorder.strategy.lower_bounds import lower_bound
from anyorder.strategy.registry import (
    ALL_SIZES,
    KINDS,
    Fit,
    Kind,
    Structure,
    from_dict,
    has_variances,
    in_words,
    kind_of,
    rounding,
    sensitivity,
    sized,
    squared_error,
)
from anyorder.strategy.rescaled import Rescaled, normalised, rescale
from anyorder.strategy.restarted_blt import fits_restarted, restartable
from anyorder.strategy.toeplitz import Problem, fits_toeplitz
from anyorder.strategy.tree import fit_tree
from anyorder.workload import GivenWorkload, Workload, custom

MAX_COST = 32.0
_BUFFERS = 4
_RESTARTED = 2  # buffers of BLTs that start again in every epoch
_BANDS = (2, 4, 8, 16, 32, 64, 128)
_LOW_RANK = ((2, 2), (4, 4), (8, 8), (8, 12), (8, 16), (8, 24), (8, 32), (16, 48))  # bands and rank
_GAIN = 1.002  # of a larger rank, or it is not worth its memory
_SWEEPS = 20
_DENSE = 1536  # steps up to which the dense optimum is solved for the lower bound
_EASY = 512  # and to `_TOLERANCE`; beyond, that of the mean is 0.1 % low, and the ratios as much too high
_BANDED = 768  # and column-by-column bands are fitted
_RESCALED = 2048
_TOLERANCE = 1e-3  # relative gap of the dense optimum here
_LEAST_MOVE = 3e-3  # of a step, beside the step that moves most, where the dense optimum is solved
_AS_GOOD = 1.01  # times the least error
_SAME = 1e-9  # a relative difference of losses that is one of rounding
_KNOWN = 3  # of the order without draws, beside those that are fitted to a secret claim


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
    """All strategies within the budget: those within 1 % of the least error, simplest first; then the rest, by error.

    Simpler is what fewer numbers describe (none for independent noise and trees, two for a buffer, one for a band of a
    Toeplitz matrix, n for scales), then what keeps fewer vectors, then what has less error. Which one is first, and its
    coefficients, are the same on every processor, see `anyorder.strategy.fitting`.

    Independent noise, the best tree, BLTs, banded inverses, banded Toeplitz; for orders shuffled every epoch BLTs that
    start again; time rescaling where it is known which steps one unit takes, columns of norm 1 where they are only far
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
        epsilon, delta: the claim, for orders that are drawn in secret, and for no others, see `fit`.
    Cost: seconds for 1000 steps, hardly more for many; results are kept on disk, see `cache`.
    """
    checks.choice("objective", objective, OBJECTIVES)
    if workload.n != participation.n:
        raise PlanError(f"workload and participation must have the same n, got {workload.n} and {participation.n}")
    budget = _budget(max_state, max_cost)
    claim = _claim_needed(participation, epsilon, delta)
    if claim is not None:
        return _ranked(_amplified(Judge(workload, participation, objective, *claim), budget))
    optimum = cached(partial(_optimum, workload, participation, objective))
    bound = _bound(workload, participation, objective, optimum)
    fits = _fits(workload, participation, objective, budget, optimum)
    return _ranked(_open(fits, workload, participation, objective, budget, bound))


def _budget(max_state: int | None, max_cost: float | None) -> _Budget:
    return _Budget(
        math.inf if max_state is None else checks.integer("max_state", max_state, low=0),
        math.inf if max_cost is None else checks.real("max_cost", max_cost, low=1.0),
    )


def _open(
    fits: Iterable[Strategy], workload: Workload, participation: Participation, objective: str, budget: _Budget,
    bound: float | None = None,
) -> Iterator[Candidate]:  # fmt: skip
    """The candidates among the fits for an order without secrets."""
    for strategy in fits:
        cost = rows_touched(strategy)
        allowed = budget.allows(strategy.state_rows, cost) and has_variances(strategy, workload)
        if allowed and _can_be_made(strategy, participation):
            sens = sensitivity(strategy, participation)
            loss = sens.value * math.sqrt(squared_error(strategy, workload, objective))
            ratio = None if bound is None else max(1.0, loss / bound)
            name = in_words(strategy)
            yield Candidate(strategy, name, loss, ratio, strategy.state_rows, cost, sens.value, sens.exact)


def _ranked(found: Iterable[Candidate]) -> list[Candidate]:
    """Those that are as good as the best, the simplest first; then the others by error."""
    by_loss = sorted(found, key=lambda c: c.loss)
    near = sum(c.loss <= by_loss[0].loss * _AS_GOOD for c in by_loss)
    return sorted(by_loss[:near], key=lambda c: (_numbers(c.strategy), c.state_rows, c.loss)) + by_loss[near:]


def _numbers(strategy: Strategy) -> int:
    """How many a strategy is described by: none for independent noise and trees, 2 for a buffer, n for scales."""
    if isinstance(strategy, Rescaled):
        return strategy.n + _numbers(strategy.strategy)
    if isinstance(strategy, Dense):
        return strategy.n**2
    return sum(value.size for name, value in vars(strategy).items() if name[0] != "_" and isinstance(value, np.ndarray))


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
    optimum = cached(partial(_optimum, judge.workload, order, judge.objective))
    fits = _fits(judge.workload, order, judge.objective, budget, optimum)
    known = _ranked(_open(fits, judge.workload, order, judge.objective, budget))[:_KNOWN]
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
        if _shortened(workload, participation, objective) and _steady(workload) is workload:
            return optimum().lower  # which is needed in any case
        return lower_bound(workload, participation, objective, **options)

    return remember(
        question_of("bound", workload, participation, objective) | options,
        answer,
        encode=float,
        decode=float,
    )


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
        yield Dense(_rounded(optimum()))


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
    best, least = Dense(_rounded(optimum())), math.inf
    found: list[Strategy] = []
    for bands, rank in _LOW_RANK:
        if bands + rank >= workload.n or not budget.allows(rank, bands + rank + 1.0):
            break
        short = BandedLowRank.approximate(best, num_bands=bands, rank=rank, sweeps=_SWEEPS)
        scaled = rescale(short, workload, participation)
        loss = registry.rmse(scaled, workload, participation)
        if loss * _GAIN > least:
            break
        least = loss
        found.append(scaled)
    return found


def _optimum(workload: Workload, participation: Participation, objective: str) -> Optimum:
    """The dense optimum from which candidates are made; `lower` is of `_steady`."""
    return solve_dense(_steady(workload), participation, objective, tolerance=_TOLERANCE)


def _steady(workload: Workload) -> Workload:
    """Steps that move less than a hundredth of what others do, at the end of a schedule, move a hundredth.

    What they move beside the others drowns in rounding, and then each processor finds another C.
    """
    A = workload.matrix()
    moves = np.sqrt(np.square(A).sum(axis=0))
    least = _LEAST_MOVE * moves.max()
    weak = (moves > 0) & (moves < least)
    return custom(A * np.where(weak, least / np.where(weak, moves, 1.0), 1.0)) if weak.any() else workload


def _rounded(optimum: Optimum) -> NDArray[np.float64]:
    """C in so few digits that all machines have the same, and no more error that matters: to 2^-16 of its largest."""
    unit = 2.0**-16 * 2.0 ** math.frexp(1.37 * float(np.abs(optimum.C).max()))[1]  # it is often 1, but for rounding
    C = np.asarray(np.rint(optimum.C / unit) * unit + 0.0)  # of -0, 0
    np.fill_diagonal(C, np.maximum(np.diag(C), unit))  # of steps that hardly count, a diagonal that is not 0
    return C


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
    yield from _blts(workload, participation, objective, budget)
    if not (small or workload.is_toeplitz):
        return
    problem = Problem(workload, participation, objective)
    inverse = [p for p in _BANDS if p <= n and budget.allows(0, p)]
    found = _kept("banded_inverses", inverse, partial(fits_banded_inverse, problem, inverse), **question)
    yield from _different(found)
    banded = [p for p in _BANDS if p <= min(n, b) and budget.allows(p - 1, p)]
    found = _kept("toeplitzes", banded, partial(fits_toeplitz, problem, banded), **question)
    yield from _different(found)


def _blts(workload: Workload, participation: Participation, objective: str, budget: _Budget) -> Iterator[Strategy]:
    buffers = int(min(_BUFFERS, budget.state, budget.cost - 1))
    if buffers and (workload.n <= DENSE_STEPS or not isinstance(workload, GivenWorkload)):
        fits = partial(fit_blts, workload, participation, buffers, objective)
        question = {"workload": workload, "participation": participation, "objective": objective}
        yield from _kept("blts", buffers, fits, **question)


def _different(found: Sequence[Strategy]) -> Iterator[Strategy]:
    """One of each size; where more bands gained nothing, fewer stand for them."""
    yield from {in_words(one): one for one in found}.values()


def _kept(kind: str, sizes: Any, answer: Callable[[], Sequence[Strategy]], **question: Any) -> Sequence[Strategy]:
    """The strategies of several sizes of one kind, from the cache or the fits."""
    return remember(
        question_of(kind, **question) | {"sizes": sizes},
        answer,
        encode=lambda found: [strategy.to_dict() for strategy in found],
        decode=lambda values: [from_dict(value) for value in values],
    )


def _best_of_each(series: list[Strategy], workload: Workload, participation: Participation) -> list[Strategy]:
    """The one of least mean error of each class."""
    best: dict[type, tuple[float, Strategy]] = {}
    for strategy in series:
        loss = registry.rmse(strategy, workload, participation)
        if type(strategy) not in best or loss < best[type(strategy)][0] * (1 - _SAME):
            best[type(strategy)] = (loss, strategy)
    return [strategy for _, strategy in best.values()]


# -- one kind --------------------------------------------------------------------------------------------------------


_FITTED: dict[str, tuple[Kind, Fit]] = {kind.fit.name: (kind, kind.fit) for kind in KINDS if kind.fit is not None}


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
            likely worst pattern; `ao.sensitivity` says what it is really worth.
        objective: "mean", "max" or "last" error.
        bands, buffers, rank: the sizes that the kind needs, and no others.
        epsilon, delta: the claim, for an order that is drawn in secret, and for no other: the fit is of least
            error times the noise multiplier that the *amplified* claim needs (an estimate; a plan's own is calibrated
            by a bound), see `anyorder.optimize.amplified`. Under the others one C is best at every epsilon.
    Raises: ArgumentError for a wrong kind or size, and for a claim with an order that asks for none; PlanError where n
        is too large for the kind, and where a secret order has no fit of it.
    """
    row, fitting = _FITTED[checks.choice("kind", kind, _FITTED)]
    checks.choice("objective", objective, OBJECTIVES)
    given = {"bands": bands, "buffers": buffers, "rank": rank}
    sizes = {name: value for name, value in given.items() if value is not None}
    needed = [size.argument for size in row.sizes]
    if set(sizes) != set(needed):
        raise ArgumentError(f"kind {kind!r} needs the sizes {needed}, got {sorted(sizes)}")
    if workload.n != participation.n:
        raise PlanError(f"workload and participation must have the same n, got {workload.n} and {participation.n}")
    claim = _claim_needed(participation, epsilon, delta)
    question = question_of(kind, workload, participation, objective) | {"size": sizes}
    if claim is not None:
        question["claim"] = claim

    def answer() -> Strategy:
        if claim is not None:
            return fit_amplified(kind, Judge(workload, participation, objective, *claim), sizes)
        return fitting.function(workload, participation, objective=objective, **sizes)

    return remember(question, answer, encode=lambda found: found.to_dict(), decode=from_dict)


# -- words -----------------------------------------------------------------------------------------------------------


_SIZE_WORDS = re.compile(r"^([0-9]+) ([a-z]+)$")
_ARGUMENTS = {word: size.argument for size in ALL_SIZES for word in (size.word, size.argument)}
_BY_WORDS = {kind.words: (kind, one.name) for kind, one in _FITTED.values()}
_NAMES = sorted({"independent", "tree"} | _BY_WORDS.keys())
_BLTS = next((kind, one.name) for kind, one in _FITTED.values() if one.function is fit_blt)


def fit_named(
    words: str,
    workload: Workload,
    participation: Participation,
    *,
    objective: str = "mean",
    max_state: int | None = None,
    max_cost: float | None = MAX_COST,
    at_most: bool = False,
    epsilon: float | None = None,
    delta: float | None = None,
    **tree: Any,
) -> Strategy:
    """The strategy that the words name, fitted.

    | words | what |
    |---|---|
    | "auto" | the one of least error, `choose(..)[0]` |
    | "independent" | independent noise |
    | "tree" | the best tree, or the one of the tree's options |
    | "blt", "banded toeplitz", .. | the best of its kind among the candidates of `choose` |
    | "blt, 2 buffers, rescaled" | the candidate of that name |
    | "dense", "banded, 64 bands", "banded low rank, 16 bands, 8 rank" | a kind at its sizes, see `fit` |

    Args:
        words: see the table; sizes may be singular or plural.
        workload: A.
        participation: any but PoissonSampling, which has independent noise.
        objective: "mean", "max" or "last" error.
        max_state, max_cost: the budget of `choose`, for words without sizes.
        at_most: take less than the size in the words where the fit goes no further, and do not refuse.
        epsilon, delta: the claim, for secret orders, see `fit`.
        tree: `estimator`, `restart_every` and `completion` of `fit_tree`, with the words "tree" alone.
    Raises: ArgumentError for words that name nothing here; PlanError for a size that the fit cannot use.
    """
    claim: dict[str, Any] = {"epsilon": epsilon, "delta": delta}
    if words == "tree" and not participation.secret:
        return fit_tree(workload, participation, objective=objective, **tree)
    if tree and words == "tree":
        raise ArgumentError(
            f"{', '.join(sorted(tree))} must not be given for an order that is drawn in secret, whose best tree "
            f"is chosen by its claim, got {tree}"
        )
    if tree:
        raise ArgumentError(f"{', '.join(sorted(tree))} must come with mechanism 'tree' only, got {words!r}")
    if words == "independent":
        return Independent(workload.n)
    kind, *rest = words.split(", ")
    sizes = _sizes(kind, rest)
    if sizes is not None:
        row, name = _BY_WORDS[kind]
        found = fit(name, workload, participation, objective, **sizes, **claim)
        return found if at_most else _of_size(found, row, sizes)
    if _BY_WORDS.get(words) == _BLTS and workload.n > _RESCALED and not participation.secret:
        budget = _budget(max_state, max_cost)  # without fits of the other kinds
        found_blts = _blts(workload, participation, objective, budget)
        if alone := _ranked(_open(found_blts, workload, participation, objective, budget)):
            return alone[0].strategy
    is_name = words == "auto" or (kind in _NAMES and all(one == "rescaled" or _size(one) for one in rest))
    known = choose(workload, participation, max_state, objective, max_cost=max_cost, **claim) if is_name else []
    for candidate in known:
        if words in ("auto", candidate.name, kind_in(candidate.name)):
            return candidate.strategy
    if words in _BY_WORDS:
        example = ", ".join([words, *(sized(16, size.word) for size in _BY_WORDS[words][0].sizes)])
        raise ArgumentError(
            f"mechanism {words!r} is not among the candidates for this order and workload, of which {known[0].name!r} "
            f"has least error; with its size, such as {example!r}, it is fitted all the same"
        )
    raise ArgumentError(
        f"mechanism must be one of auto, poisson, {', '.join(_NAMES)}, a name from a comparison, or a kind "
        f"and its size ('dense', 'banded, 64 bands', 'banded low rank, 16 bands, 8 rank'), got {words!r}; what is not "
        "fitted is given as a Strategy, such as SquareRoot(n)"
    )


def kind_in(name: str) -> str:
    """The kind in a name such as "blt, 2 buffers"."""
    return name.split(",")[0]


def _sizes(kind: str, words: Sequence[str]) -> dict[str, int] | None:
    """By argument: all that the words say, if it is sizes of that kind; None if it is something else."""
    if kind not in _BY_WORDS or (_BY_WORDS[kind][0].sizes and not words):
        return None
    sizes = dict(one for one in map(_size, words) if one is not None)
    return sizes if len(sizes) == len(words) else None


def _size(word: str) -> tuple[str, int] | None:
    """(argument, number) of a word such as "4 bands"."""
    found = _SIZE_WORDS.match(word)
    return (_ARGUMENTS[found[2]], int(found[1])) if found and found[2] in _ARGUMENTS else None


def _of_size(found: Strategy, kind: Kind, asked: dict[str, int]) -> Strategy:
    """The strategy, if it has the sizes that were asked for. A fit goes no further than it knows how to."""
    if any(getattr(found, size.attribute) != asked[size.argument] for size in kind.sizes):
        raise PlanError(
            f"mechanism must have a size that its fit can use, got {asked}; for this order and optimizer the fit of "
            f"this kind goes no further than '{in_words(found)}': ask for that, or for 'auto', which compares the kinds"
        )
    return found


def _claim_needed(rule: Participation, epsilon: float | None, delta: float | None) -> tuple[float, float] | None:
    """The claim that an order's fits need: both numbers for a secret order, None for others.

    Raises: ArgumentError; PlanError for PoissonSampling, whose noise is independent.
    """
    if rule.draw_probability is not None:
        check_optimisable(rule)
    if not rule.secret:
        if epsilon is not None or delta is not None:
            raise ArgumentError(
                "epsilon and delta must not be given for an order without secret draws, under which one strategy is "
                f"best at every epsilon, got epsilon={epsilon!r}, delta={delta!r} for {rule.describe()}"
            )
        return None
    if epsilon is None or delta is None:
        raise ArgumentError(
            "epsilon and delta must be given for an order that is drawn in secret: which strategy is best "
            f"depends on them, got epsilon={epsilon!r}, delta={delta!r} for {rule.describe()}"
        )
    return checks.positive("epsilon", epsilon), checks.probability("delta", delta)
