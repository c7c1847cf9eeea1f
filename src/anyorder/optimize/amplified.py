"""Fits for secret orders: the least error at the amplified claim, and not at a sensitivity that nobody claims.

    minimise   error(C) sigma(C; epsilon, delta)

sigma the least noise multiplier that keeps the claim, clip norm 1. Where a unit's steps do not overlap under C (cyclic
and truncated Poisson sampling) it is the largest column norm times a number that C has no part in: the fits are those
for one participation. For balls in bins it is a function of a Gram matrix, guessed by `amplified_noise`: fits go round
between the weights of that matrix and the C of least error^2 <W, G>, the logarithms of the weights moved half the way,
which is steady after some rounds. Sampling with separation is fitted as balls in bins of as many steps between visits.
What is found is a strategy; the noise of a plan is calibrated by a bound that holds, and asks nothing of the guess.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property, partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from anyorder import checks
from anyorder._orders import known_order
from anyorder.accounting import calibrate_poisson
from anyorder.accounting.amplification.mixture import absolute_columns
from anyorder.errors import ArgumentError, PlanError
from anyorder.optimize.amplified_loss import Weighted
from anyorder.optimize.amplified_noise import Guess, Noise, composed
from anyorder.optimize.banded import fit_banded
from anyorder.optimize.blt import blt_of, grown, series_loss
from anyorder.optimize.objectives import squared_error
from anyorder.optimize.patterns import check_optimisable
from anyorder.optimize.rescale import normalised
from anyorder.optimize.restarted import fits_restarted
from anyorder.optimize.toeplitz import (
    DENSE_STEPS,
    Problem,
    Valued,
    descend,
    fit_toeplitz,
    fits_banded_inverse,
    fits_toeplitz,
    reciprocal,
    square_root_start,
)
from anyorder.optimize.tree import fit_tree
from anyorder.participation import (
    BallsInBins,
    CyclicPoisson,
    EpochShuffle,
    FixedOrder,
    MinSeparationSampling,
    PoissonSampling,
    RandomAllocation,
    SingleEpoch,
    TruncatedPoisson,
)
from anyorder.patterns import Participation
from anyorder.strategy import BandedInverse, Independent, Strategy, ToeplitzBanded
from anyorder.strategy.kinds import kind_of
from anyorder.workload import Workload

__all__ = ["Judge", "amplified_fits", "check_claim", "fit_amplified", "known_bins", "reach_of"]

Floats = NDArray[np.float64]
Series = Callable[[Weighted, Floats], Valued]

_MOST_BINS = 1024  # whose Gram matrix is looked at; of more, those in the middle
_ROUNDS = 8
_GAIN, _STEADY = 1e-4, 0.1  # of a round, and what its weights may move: less of both, and the search is over
_LEAST_WEIGHT = 1e-6
_START = 0.5  # of the weights of other bins, beside a bin's own 1
_BANDS = (2, 4, 8, 16, 32, 64, 128)
_BUFFERS = 3
_BANDED_STEPS = 512


class Judged(NamedTuple):
    """error sigma at clip norm 1, and the noise that it is made of."""

    loss: float
    noise: Noise


class Judge:
    """What strategies are worth for one workload, secret order and claim: an estimate, for fits.

    Args:
        workload: A.
        rule: the order.
        objective: "mean", "max" or "last" error.
        epsilon, delta: of the claim.
    """

    def __init__(self, workload: Workload, rule: Participation, objective: str, epsilon: float, delta: float) -> None:
        self.workload, self.rule, self.objective = workload, rule, objective
        self.epsilon, self.delta = epsilon, delta
        self.bins = bins_of(rule)
        bins = self.bins
        self.guess = None if bins is None else Guess(min(bins, _MOST_BINS), bins, epsilon, delta)

    @cached_property
    def _alone(self) -> float:
        return _alone(self.rule, self.epsilon, self.delta)

    def __call__(self, strategy: Strategy) -> Judged:
        """Its loss."""
        noise = self.noise(strategy)
        return Judged(noise.sigma * math.sqrt(squared_error(strategy, self.workload, self.objective)), noise)

    def noise(self, strategy: Strategy) -> Noise:
        """The noise multiplier that its claim needs."""
        if self.guess is None or self.bins is None:
            return Noise(self._alone * math.sqrt(float(strategy.column_norms_squared().max())), np.ones(1))
        if type(self.rule) is RandomAllocation:
            return composed(self.guess, [self._gram(strategy, [start]) for start in range(0, strategy.n, self.bins)])
        return self.guess(self._gram(strategy, range(0, strategy.n, self.bins)))

    def _gram(self, strategy: Strategy, epochs: Iterable[int]) -> Floats:
        """The Gram matrix of the means of the bins, or those in the middle, over the epochs that start there."""
        assert self.guess is not None
        assert self.bins is not None
        first = (self.bins - self.guess.bins) // 2
        starts = np.array(list(epochs))
        bins = range(first, first + self.guess.bins)
        steps = [(starts + j)[starts + j < strategy.n] for j in bins]
        means = np.array([absolute_columns(strategy, own).sum(axis=-1) for own in steps])
        return np.asarray(means @ means.T)


def check_claim(rule: Participation, epsilon: float | None, delta: float | None) -> tuple[float, float] | None:
    """The claim that an order's fits need: both numbers for a secret order, None for others.

    Raises: ArgumentError; PlanError for PoissonSampling, whose noise is independent.
    """
    if type(rule) is PoissonSampling:
        check_optimisable(rule)
    if not rule.secret:
        if epsilon is not None or delta is not None:
            raise ArgumentError(
                "epsilon and delta must not be given for an order without secret coins, under which one strategy is "
                f"best at every epsilon, got epsilon={epsilon!r}, delta={delta!r} for {rule.describe()}"
            )
        return None
    if epsilon is None or delta is None:
        raise ArgumentError(
            "epsilon and delta must be given for an order that is drawn by secret coins: which strategy is best "
            f"depends on them, got epsilon={epsilon!r}, delta={delta!r} for {rule.describe()}"
        )
    return checks.positive("epsilon", epsilon), checks.probability("delta", delta)


def bins_of(rule: Participation) -> int | None:
    """The bins that a unit's visits are like; None where no two of its steps share anything under a C that fits."""
    match rule:
        case BallsInBins() | RandomAllocation():
            return rule.b
        case MinSeparationSampling():
            return min(rule.n, max(rule.b, round(1 / rule.marginal)))
        case _:
            return None


def reach_of(rule: Participation) -> int:
    """The most bands of a C that fits the order."""
    match rule:
        case CyclicPoisson() | TruncatedPoisson():
            return min(rule.cycle, rule.n)
        case MinSeparationSampling() | RandomAllocation():
            return min(rule.b, rule.n)
        case _:
            return rule.n


def _alone(rule: Participation, epsilon: float, delta: float) -> float:
    """Sigma for columns of norm 1. Of truncated batches that of Poisson sampling, which is near."""
    match rule:
        case CyclicPoisson() | TruncatedPoisson():
            return calibrate_poisson(epsilon, delta, rule.sampling_probability, -(-rule.n // rule.cycle))
        case _:
            raise PlanError(f"fits by a claim are for orders that are drawn by secret coins, got {rule.describe()}")


# -- one kind --------------------------------------------------------------------------------------------------------


def fit_amplified(kind: str, judge: Judge, sizes: dict[str, int]) -> Strategy:
    """`anyorder.optimize.fit` for secret orders, arguments checked.

    Raises: PlanError for kinds that the order has no fit of.
    """
    workload, rule, objective = judge.workload, judge.rule, judge.objective
    bands, reach = sizes.get("bands", 1), reach_of(rule)
    if kind in ("toeplitz", "banded") and bands > reach:
        raise PlanError(
            f"kind {kind!r} must have at most {reach} bands for {rule.describe()}, whose claim needs columns that do "
            f"not overlap so far apart, got bands={bands}"
        )
    if bins_of(rule) is None:
        if kind == "toeplitz":
            return fit_toeplitz(Problem(workload, SingleEpoch(rule.n), objective), bands)
        if kind == "banded" and objective == "mean":
            return fit_banded(workload, SingleEpoch(rule.n), bands)
        raise _no_fit(kind, rule, objective)
    if type(rule) is RandomAllocation:
        found = [one for one in _restarted(judge) if kind_of(one).words.replace(" ", "_") == kind]
    elif kind == "tree" and type(rule) is BallsInBins:
        found = _trees(judge)
    elif kind == "toeplitz":
        found = _toeplitzes(judge, [bands])
    elif kind == "banded_inverse" and type(rule) is BallsInBins:
        found = _inverses(judge, [bands])
    elif kind == "blt" and type(rule) is BallsInBins:
        found = _blts(judge, sizes["buffers"])[-1:]
    else:
        found = []
    if not found:
        raise _no_fit(kind, rule, objective)
    return min(found, key=lambda one: judge(one).loss)


class NoAmplifiedFitError(PlanError):
    """A kind of strategy that a secret order has no fit of; one for its steps without coins may do."""


def _no_fit(kind: str, rule: Participation, objective: str) -> NoAmplifiedFitError:
    return NoAmplifiedFitError(
        f"kind {kind!r} has no fit for {rule.describe()} and the {objective!r} error: balls in bins have 'toeplitz', "
        "'banded_inverse', 'blt' and 'tree'; cyclic and truncated Poisson sampling 'toeplitz' and, for the mean error, "
        "'banded'; sampling with separation 'toeplitz'; random allocation 'restarted_blt' and 'tree'"
    )


# -- all kinds -------------------------------------------------------------------------------------------------------


def amplified_fits(judge: Judge, max_state: float, max_cost: float) -> Iterator[Strategy]:
    """The candidates for a secret order within a budget of vectors, independent noise first."""
    rule, workload = judge.rule, judge.workload
    n, reach = rule.n, reach_of(rule)
    yield Independent(n)
    widest = int(min(reach, bins_of(rule) or n, max_state + 1, max_cost))
    bands = [p for p in _BANDS if p <= widest]
    if 1 < widest < _BANDS[-1]:
        bands = sorted({*bands, widest})
    known = n <= DENSE_STEPS or workload.is_toeplitz
    match rule:
        case CyclicPoisson() | TruncatedPoisson():
            if known:
                yield from _normalised(fits_toeplitz(Problem(workload, SingleEpoch(n), judge.objective), bands))
            if n <= _BANDED_STEPS and bands and judge.objective == "mean":
                yield fit_banded(workload, SingleEpoch(n), bands[-1])
        case MinSeparationSampling():
            if known and bands:
                yield from _toeplitzes(judge, bands)
        case RandomAllocation():
            yield from _restarted(judge)
        case BallsInBins():
            yield from _trees(judge)
            if known:
                yield from _toeplitzes(judge, bands)
                yield from _inverses(judge, [p for p in _BANDS if p <= n and p <= max_cost])
                buffers = int(min(_BUFFERS, max_state, max_cost - 1))
                yield from _blts(judge, buffers) if buffers > 0 else []
        case _:
            raise ArgumentError(f"participation must be drawn by secret coins, got {rule.describe()}")


def _normalised(found: Sequence[Strategy]) -> Iterator[Strategy]:
    """Each, and with columns of norm 1: the last ones, whose bands leave the matrix, are smaller."""
    for one in found:
        yield one
        if one.n <= DENSE_STEPS:
            yield normalised(one)


def _trees(judge: Judge) -> list[Strategy]:
    """The best tree in a fixed order, and as it is with each step known once."""
    rule = judge.rule
    assert type(rule) is BallsInBins
    if rule.n > DENSE_STEPS:
        return []
    orders = (FixedOrder(rule.n, rule.k, rule.b), SingleEpoch(rule.n))
    return [fit_tree(judge.workload, order, objective=judge.objective) for order in orders]


def _restarted(judge: Judge) -> list[Strategy]:
    """Those that start anew in each epoch."""
    rule = judge.rule
    assert type(rule) is RandomAllocation
    if rule.k == 1 or rule.n > DENSE_STEPS:
        return []
    order = EpochShuffle(rule.k, rule.b)
    found: list[Strategy] = list(fits_restarted(judge.workload, order, 2, judge.objective))
    return [*found, fit_tree(judge.workload, order, objective=judge.objective, restart_every=1, completion="off")]


def _toeplitzes(judge: Judge, sizes: Sequence[int]) -> list[Strategy]:
    search = _Search(judge, _toeplitz_loss, lambda x: ToeplitzBanded(np.concatenate([[1.0], x]), judge.rule.n), 0.0)
    order = known_bins(judge.rule)
    found: list[Strategy] = []
    for bands in sizes:
        starts = [square_root_start(judge.workload, bands)]
        if order is not None and bands <= order.min_separation:
            starts.append(fit_toeplitz(Problem(judge.workload, order, judge.objective), bands).coefficients)
        found.append(search([start[1:] / start[0] for start in starts]))
    return found


def _inverses(judge: Judge, sizes: Sequence[int]) -> list[Strategy]:
    search = _Search(judge, _inverse_loss, lambda x: BandedInverse(np.concatenate([[1.0], x]), judge.rule.n))
    order = known_bins(judge.rule)
    if order is None:
        return []
    fitted = fits_banded_inverse(Problem(judge.workload, order, judge.objective), sizes)
    return [search([one.coefficients[1:] / one.coefficients[0]]) for one in fitted]


def _blts(judge: Judge, buffers: int) -> list[Strategy]:
    search = _Search(judge, series_loss, lambda x: blt_of(x, judge.rule.n))
    return [search([x]) for x in grown(partial(series_loss, search.problem), judge.rule.n, buffers)]


def known_bins(rule: Participation) -> Participation | None:
    """The order of balls in bins whose bins are known; None for other orders."""
    return known_order(rule) if type(rule) is BallsInBins else None


class _Search:
    """Rounds of weights and fits, for strategies of one kind; one size's weights start the next one's search.

    Args:
        judge: of what is found.
        loss: of parameters, by a problem.
        make: the strategy of parameters.
        lowest: below which no parameter goes.
    """

    def __init__(
        self, judge: Judge, loss: Series, make: Callable[[Floats], Strategy], lowest: float | None = None
    ) -> None:
        assert judge.bins is not None
        self.judge, self.loss, self.make, self.lowest = judge, loss, make, lowest
        self.logs = np.log(np.concatenate([[1.0], np.full(min(judge.bins, _MOST_BINS) - 1, _START)]))
        self.problem = Weighted(judge.workload, judge.bins, np.exp(self.logs), judge.objective)

    def __call__(self, starts: Sequence[Floats]) -> Strategy:
        """The best that is seen on the way, the starts among it."""
        tried = [(self.judge(self.make(x)), x) for x in starts]
        best, x = min(tried, key=lambda one: one[0].loss)
        found = self.make(x)
        for _ in range(_ROUNDS):
            self.problem.reweigh(np.exp(self.logs))
            x, _value = descend(partial(self.loss, self.problem), x, max_iterations=200, restarts=2, gain=1e-8,
                                lowest=self.lowest)  # fmt: skip
            strategy = self.make(x)
            judged = self.judge(strategy)
            gain = best.loss / judged.loss - 1
            if gain > 0:
                best, found = judged, strategy
            moved = np.log(np.maximum(judged.noise.weights, _LEAST_WEIGHT)) - self.logs
            self.logs = self.logs + moved / 2
            if gain < _GAIN and np.abs(np.expm1(moved / 2)).max() < _STEADY:
                break
        return found


def _toeplitz_loss(problem: Weighted, x: Floats) -> Valued:
    c = np.concatenate([[1.0], x])
    error, g_error = reciprocal(c, problem.n, problem.error)
    sens, g_sens = problem.sens(c)
    return error * sens, (g_error * sens + error * g_sens)[1:]


def _inverse_loss(problem: Weighted, x: Floats) -> Valued:
    d = np.concatenate([[1.0], x])
    sens, g_sens = reciprocal(d, problem.n, problem.sens)
    error, g_error = problem.error(d)
    return error * sens, (g_error * sens + error * g_sens)[1:]
