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
from functools import cache as cached
from functools import cached_property, partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.special import log_ndtr, ndtr

from anyorder._numerics import complex_product, crossing, fftconvolve
from anyorder.accounting import gdp_mu
from anyorder.accounting.amplification.mixture import absolute_columns
from anyorder.accounting.amplification.secret_order import SecretOrder
from anyorder.accounting.gaussian import calibrate_gaussian
from anyorder.accounting.poisson import rough_poisson
from anyorder.errors import ArgumentError, PlanError
from anyorder.participation import FixedOrder, SingleEpoch
from anyorder.patterns import Listed, Participation, PerEpoch
from anyorder.strategy.banded import fit_banded
from anyorder.strategy.banded_inverse import BandedInverse, fits_banded_inverse
from anyorder.strategy.base import DENSE_STEPS, Strategy
from anyorder.strategy.blt import blt_of, grown, series_loss
from anyorder.strategy.fitting import Valued, coarse, descend, dot, exps, remember, times
from anyorder.strategy.independent import Independent
from anyorder.strategy.registry import kind_of, squared_error
from anyorder.strategy.rescaled import normalised
from anyorder.strategy.restarted_blt import fits_restarted
from anyorder.strategy.sensitivity import rounded
from anyorder.strategy.toeplitz import (
    Problem,
    ToeplitzBanded,
    fit_toeplitz,
    fits_toeplitz,
    reciprocal,
    square_root_start,
)
from anyorder.strategy.tree import fit_tree
from anyorder.workload import Workload

Floats = NDArray[np.float64]


# -- the noise that a claim needs ------------------------------------------------------------------------------------

# How much noise the claim of a secret order needs, quickly and roughly: what fits descend by, and nothing claims.
#
# Balls in bins depends on the Gram matrix G of the means m_j alone (`accounting.amplification.mixture`). With the
# largest c for which H = G - c 1 1^T is positive semidefinite, c = 1 / (1^T G^-1 1), the pair is a Gaussian of mu =
# sqrt(c) / sigma beside the mixture with H, exactly, so that
#
#     delta(eps) = E delta_mu(eps - L),   L the loss of the mixture with H,
#
# delta_mu that of the Gaussian in closed form. The expectation is over a few thousand points, fixed once for all, that
# lie where losses are large: y = a m_j + noise for several a >= 1, weighted by their densities. It is smooth in sigma,
# and as all strategies are judged by the same points, ranks them better than it knows them: some per cent of delta,
# some tenths of a per cent of sigma.
#
# Its derivative says what to make small. By Kahane's formula, with r the posterior over bins at y,
#
#     d delta / d G_ij  ~  E[ r_i r_j  at  L = eps ]  >= 0,   and sigma^2 is homogeneous in G:  sigma^2 = <W, G>
#
# so C of least error^2 <W(C), G(C)> is a stationary point of error sigma. Few bins near each other share a posterior
# at large epsilon (W falls off quickly), all of them at small epsilon (W is nearly flat).


_POINTS = (500, 3000)  # fewest and most
_TABLE = 1_000_000  # points times bins
_TILTS = 5
_WIDTH = 0.15  # of losses that count as at the threshold, at least
_QUIET = 0.02  # a mu below which the Gaussian beside the mixture is left out
_RIDGE = 1e-9
_STEP = 0.5  # of log sigma
_WEIGHT_BITS = 14  # that fits go by: the last ones are of the library that factored the Gram matrix
_CELL, _CELLS = 0.01, 1 << 14  # of the grid of losses


class Noise(NamedTuple):
    """The noise multiplier, and (bins,) the weights of pairs of bins by distance, w_0 = 1."""

    sigma: float
    weights: Floats


class Guess:
    """The points for so many bins and one (epsilon, delta).

    Args:
        bins: whose Gram matrix is given.
        among: how many bins there are; those whose Gram matrix is not given count for what they are on average, 1.
        epsilon, delta: of the claim.
    """

    def __init__(self, bins: int, among: int, epsilon: float, delta: float) -> None:
        self.bins, self.share, self.epsilon, self.delta = bins, bins / among, epsilon, delta
        points = int(np.clip(_TABLE // bins, *_POINTS))
        self.normals = np.random.default_rng(0).standard_normal((points, bins))
        places = np.arange(points)
        self.bin, self.tilt = (places // _TILTS) * 7919 % bins, places % _TILTS
        self.most = calibrate_gaussian(epsilon, delta)

    def __call__(self, G: Floats) -> Noise:
        """The least sigma at which the curve is at delta.

        Args: G: (bins, bins).
        """
        if self.bins == 1:
            return Noise(self.most * math.sqrt(G[0, 0]), np.ones(1))
        spread = _Spread(self, G)
        sigma = self.solve(spread.delta, float(G.max()))
        return Noise(sigma, coarse(spread.weights(sigma), _WEIGHT_BITS))

    def solve(self, delta: Callable[[float], float], largest: float) -> float:
        """The sigma at which the curve is at delta, not above that of known bins of the largest squared mean."""

        def excess(log_sigma: float) -> float:
            return math.log(max(delta(math.exp(log_sigma)), 1e-300) / self.delta)

        high = math.log(self.most * math.sqrt(largest) * 1.01)
        if excess(high) >= 0:
            return math.exp(high)
        low = high - _STEP
        while excess(low) < 0:
            high, low = low, low - _STEP
        return math.exp(crossing(excess, low, high, absolute=1e-4))


class _Spread:
    """The points of one Gram matrix."""

    def __init__(self, guess: Guess, G: Floats) -> None:
        self.guess, bins = guess, guess.bins
        ridge = _RIDGE * float(G.max()) * np.eye(bins)
        self.common = 0.999 / float(np.linalg.solve(G + ridge, np.ones(bins)).sum())
        self.H = G - self.common
        self.spread = guess.normals @ np.linalg.cholesky(self.H + 1e3 * ridge).T

    def losses(self, sigma: float) -> tuple[float, Floats, Floats, Floats]:
        """Mu of what all bins share, the losses of the rest, their weights, and the exponents of bins."""
        guess, H = self.guess, self.H / sigma**2
        half, log_bins = np.diag(H) / 2, math.log(guess.bins / guess.share)
        farthest = max(1.5, 0.5 + (guess.epsilon + log_bins) / float(2 * half.mean()))
        tilts = np.linspace(1.0, farthest, _TILTS)
        U = self.spread / sigma + tilts[guess.tilt][:, None] * H[guess.bin]
        loss = _log_mean(U - half)
        proposals = np.array([_log_mean(a * U - a * a * half) for a in tilts])
        weights = np.exp(loss - _log_mean(proposals.T))
        whole = np.log(guess.share * np.exp(loss) + (1 - guess.share)) if guess.share < 1 else loss
        return math.sqrt(self.common) / sigma, whole, weights, U - half

    def delta(self, sigma: float) -> float:
        """Of one draw."""
        mu, loss, weights, _ = self.losses(sigma)
        left = self.guess.epsilon - loss
        return float((weights * _gaussian_delta(mu, left)).mean())

    def weights(self, sigma: float) -> Floats:
        """(bins,) the mean of r_i r_j over pairs of each distance, at the threshold."""
        mu, loss, weights, exponents = self.losses(sigma)
        width = max(mu, _WIDTH)
        off = (self.guess.epsilon - loss - mu * mu / 2) / width
        near = weights * np.exp(-off * off / 2)
        posterior = np.exp(exponents - loss[:, None]) / self.guess.bins
        W = (posterior * near[:, None]).T @ posterior
        by_distance = np.array([np.trace(W, d) / (len(W) - d) for d in range(len(W))])
        return by_distance / by_distance[0] if by_distance[0] > 0 else np.ones(len(W))


def composed(guess: Guess, grams: Sequence[Floats]) -> Noise:
    """The noise of draws anew, one for each Gram matrix: their losses add up, by a grid and Fourier transforms."""
    if guess.bins == 1:
        return Noise(guess.most * math.sqrt(sum(float(G[0, 0]) for G in grams)), np.ones(1))
    spreads = [_Spread(guess, G) for G in grams]

    def delta(sigma: float) -> float:
        parts = [spread.losses(sigma) for spread in spreads]
        spectrum = np.ones(_CELLS // 2 + 1, dtype=complex)
        for _, loss, weights, _ in parts:
            place = np.clip(loss / _CELL, -_CELLS // 2 + 1, _CELLS // 2 - 2)
            below = np.floor(place).astype(int)
            share = weights * (place - below)
            cells = np.zeros(_CELLS)
            np.add.at(cells, below % _CELLS, weights - share)
            np.add.at(cells, (below + 1) % _CELLS, share)
            spectrum = complex_product(spectrum, np.fft.rfft(cells / cells.sum()))
        law: Floats = np.fft.irfft(spectrum, _CELLS)
        losses: Floats = _CELL * np.fft.fftfreq(_CELLS, 1 / _CELLS).astype(np.float64)
        mu = math.sqrt(sum(part[0] ** 2 for part in parts))
        return float(np.maximum(law, 0.0) @ _gaussian_delta(mu, guess.epsilon - losses))

    sigma = guess.solve(delta, sum(float(G.max()) for G in grams))
    return Noise(sigma, coarse(spreads[0].weights(sigma), _WEIGHT_BITS))


def _gaussian_delta(mu: float, epsilon: Floats) -> Floats:
    """Delta of N(mu, 1) against N(0, 1), at epsilons of any sign."""
    if mu < _QUIET:
        return np.asarray(np.maximum(0.0, -np.expm1(epsilon)))
    above = ndtr(mu / 2 - epsilon / mu)
    return np.asarray(above - np.exp(np.minimum(epsilon + log_ndtr(-mu / 2 - epsilon / mu), 0.0)))


def _log_mean(x: Floats) -> Floats:
    """Log of the mean of exp over the last axis."""
    top = x.max(axis=1)
    return np.asarray(top + np.log(np.exp(x - top[:, None]).mean(axis=1)))


# -- what fits make small --------------------------------------------------------------------------------------------

# What fits for a secret order make small: error^2 times <W, G>, for Toeplitz C, with exact gradients.
#
# With p = the sum of c moved by 0, b, 2b, .. (a unit of the first bin), m_j is p moved by j, and for weights by
# distance
#
#     <W, G> = sum_ij w_|i-j| sum_t p_{t-i} p_{t-j} = sum_rs w_|r-s| min(b - |r-s|, n - max(r, s))_+ p_r p_s
#
# a Toeplitz form in p, but for its last b entries.


class Weighted(Problem):
    """The loss of Toeplitz strategies for bins that share their posteriors.

    Args:
        workload: Toeplitz, or of at most 4096 steps.
        bins: b; a unit of bin j is in the steps j, j + b, ..
        weights: (m,) w by distance of bins, m <= bins; distances beyond have the last one.
        objective: "mean", "max" or "last".
    """

    def __init__(self, workload: Workload, bins: int, weights: Floats, objective: str = "mean") -> None:
        super().__init__(workload, SingleEpoch(workload.n), objective)
        self.bins = min(bins, workload.n)
        self.reweigh(weights)

    def reweigh(self, weights: Floats) -> None:
        """Other weights."""
        b = self.bins
        w = np.concatenate([weights, np.full(max(b - len(weights), 0), weights[-1])])[:b] / b
        self.kernel = w * (b - np.arange(b))
        places = np.arange(b)
        apart = np.abs(np.subtract.outer(places, places))
        # of the last b entries of p: pairs of bins that would meet after the last step
        self.ends = w[apart] * np.maximum(np.maximum.outer(places, places) - apart, 0)

    def sens(self, c: Floats, stiffness: float = np.inf) -> Valued:
        """<W, G(|c|)>, and its gradient; c is (m,) with m <= n."""
        n, b = self.n, self.bins
        p = np.zeros(n)
        for start in range(0, n, b):
            length = min(len(c), n - start)
            p[start : start + length] += np.abs(c[:length])
        both = np.concatenate([self.kernel[:0:-1], self.kernel])
        moved = fftconvolve(p, both)[b - 1 : b - 1 + n]
        moved[n - b :] -= times(self.ends, p[n - b :])
        gradient = np.zeros(len(c))
        for start in range(0, n, b):
            length = min(len(c), n - start)
            gradient[:length] += moved[start : start + length]
        return dot(p, moved), 2 * gradient * np.where(c < 0, -1.0, 1.0)


# -- the judge ------------------------------------------------------------------------------------------------------

Series = Callable[[Weighted, Floats], Valued]

_MOST_BINS = 1024  # whose Gram matrix is looked at; of more, those in the middle
_ROUNDS = 8
_SAME = 1e-9  # a relative difference of losses that is one of rounding
_GAIN, _STEADY = 1e-4, 0.1  # of a round, and what its weights may move: less of both, and the search is over
_LEAST_WEIGHT = 1e-6
_DIGITS = 6  # after the point, of the logarithms of weights
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
        if not isinstance(rule, SecretOrder):
            raise ArgumentError(f"participation must be drawn in secret, got {rule.describe()}")
        self.workload, self.rule, self.objective = workload, rule, objective
        self.epsilon, self.delta = epsilon, delta
        bins = self.bins = rule.bins
        self.guess = None if bins is None else Guess(min(bins, _MOST_BINS), bins, epsilon, delta)

    @cached_property
    def _alone(self) -> float:
        return self.rule.noise_alone(self.epsilon, self.delta)

    def __call__(self, strategy: Strategy) -> Judged:
        """Its loss."""
        noise = self.noise(strategy)
        return Judged(noise.sigma * math.sqrt(squared_error(strategy, self.workload, self.objective)), noise)

    def noise(self, strategy: Strategy) -> Noise:
        """The noise multiplier that its claim needs."""
        if self.guess is None or self.bins is None:
            return Noise(self._alone * math.sqrt(float(strategy.column_norms_squared().max())), np.ones(1))
        if isinstance(self.rule.pattern, PerEpoch):
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


# -- one kind --------------------------------------------------------------------------------------------------------


def fit_amplified(kind: str, judge: Judge, sizes: dict[str, int]) -> Strategy:
    """`anyorder.optimize.fit` for secret orders, arguments checked.

    Raises: PlanError for kinds that the order has no fit of.
    """
    workload, rule, objective = judge.workload, judge.rule, judge.objective
    bands, reach = sizes.get("bands", 1), rule.most_bands
    if kind in ("toeplitz", "banded") and bands > reach:
        raise PlanError(
            f"kind {kind!r} must have at most {reach} bands for {rule.describe()}, whose claim needs columns that do "
            f"not overlap so far apart, got bands={bands}"
        )
    if rule.bins is None:
        if kind == "toeplitz":
            return fit_toeplitz(Problem(workload, SingleEpoch(rule.n), objective), bands)
        if kind == "banded" and objective == "mean":
            return fit_banded(workload, SingleEpoch(rule.n), bands)
        raise _no_fit(kind, rule, objective)
    found: list[Strategy] = []
    if kind not in rule.fitted_kinds:
        pass
    elif isinstance(rule.pattern, PerEpoch):
        found = [one for one in _restarted(judge) if kind_of(one).words.replace(" ", "_") == kind]
    elif kind == "tree":
        found = _trees(judge)
    elif kind == "toeplitz":
        found = _toeplitzes(judge, [bands])
    elif kind == "banded_inverse":
        found = _inverses(judge, [bands])
    elif kind == "blt":
        found = _blts(judge, sizes["buffers"])[-1:]
    if not found:
        raise _no_fit(kind, rule, objective)
    return min(found, key=lambda one: judge(one).loss)


class NoAmplifiedFitError(PlanError):
    """A kind of strategy that a secret order has no fit of; one for its steps without draws may do."""


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
    n, kinds = rule.n, rule.fitted_kinds
    yield Independent(n)
    widest = int(min(rule.most_bands, rule.bins or n, max_state + 1, max_cost))
    bands = [p for p in _BANDS if p <= widest]
    if 1 < widest < _BANDS[-1]:
        bands = sorted({*bands, widest})
    known = n <= DENSE_STEPS or workload.is_toeplitz
    if rule.bins is None:  # a unit's steps share nothing: fits are those for one step
        if known:
            yield from _normalised(fits_toeplitz(Problem(workload, SingleEpoch(n), judge.objective), bands))
        if n <= _BANDED_STEPS and bands and judge.objective == "mean":
            yield fit_banded(workload, SingleEpoch(n), bands[-1])
        return
    if isinstance(rule.pattern, PerEpoch):
        yield from _restarted(judge)
        return
    if "tree" in kinds:
        yield from _trees(judge)
    if known and bands and "toeplitz" in kinds:
        yield from _toeplitzes(judge, bands)
    if known and "banded_inverse" in kinds:
        yield from _inverses(judge, [p for p in _BANDS if p <= n and p <= max_cost])
    buffers = int(min(_BUFFERS, max_state, max_cost - 1))
    if known and "blt" in kinds and buffers > 0:
        yield from _blts(judge, buffers)


def _normalised(found: Sequence[Strategy]) -> Iterator[Strategy]:
    """Each, and with columns of norm 1: the last ones, whose bands leave the matrix, are smaller."""
    for one in found:
        yield one
        if one.n <= DENSE_STEPS:
            yield normalised(one)


def _trees(judge: Judge) -> list[Strategy]:
    """The best tree in a fixed order, and as it is with each step known once."""
    rule, pattern = judge.rule, judge.rule.pattern
    if rule.n > DENSE_STEPS:
        return []
    assert isinstance(pattern, Listed)
    assert pattern.stride is not None
    orders = (FixedOrder(rule.n, pattern.max_participations, pattern.stride), SingleEpoch(rule.n))
    return [fit_tree(judge.workload, order, objective=judge.objective) for order in orders]


def _restarted(judge: Judge) -> list[Strategy]:
    """Those that start anew in each epoch."""
    rule = judge.rule
    if rule.max_participations == 1 or rule.n > DENSE_STEPS:
        return []
    order = rule.without_draws()
    found: list[Strategy] = list(fits_restarted(judge.workload, order, 2, judge.objective))
    return [*found, fit_tree(judge.workload, order, objective=judge.objective, restart_every=1, completion="off")]


def _toeplitzes(judge: Judge, sizes: Sequence[int]) -> list[Strategy]:
    search = _Search(judge, _toeplitz_loss, lambda x: ToeplitzBanded(_series(x), judge.rule.n), 0.0)
    order = known_bins(judge.rule)
    found: list[Strategy] = []
    for bands in sizes:
        starts = [square_root_start(judge.workload, bands)]
        if order is not None and bands <= order.min_separation:
            starts.append(fit_toeplitz(Problem(judge.workload, order, judge.objective), bands).coefficients)
        found.append(search([start[1:] / start[0] for start in starts]))
    return found


def _inverses(judge: Judge, sizes: Sequence[int]) -> list[Strategy]:
    search = _Search(judge, _inverse_loss, lambda x: BandedInverse(_series(x), judge.rule.n))
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
    stays = isinstance(rule, SecretOrder) and rule.bins is not None and isinstance(rule.pattern, Listed)
    return rule.without_draws() if stays else None


class _Search:
    """Rounds of weights and fits, for strategies of one kind; one size's weights start the next one's search.

    Args:
        judge: of what is found.
        loss: of parameters, by a problem.
        make: the strategy of parameters.
        lowest: below which no parameter goes.
    """

    def __init__(
        self, judge: Judge, loss: Series, make: Callable[[Floats], Strategy], lowest: float = -math.inf
    ) -> None:
        assert judge.bins is not None
        self.judge, self.loss, self.make, self.lowest = judge, loss, make, lowest
        self.logs = np.round(np.log(np.concatenate([[1.0], np.full(min(judge.bins, _MOST_BINS) - 1, _START)])), _DIGITS)
        self.problem = Weighted(judge.workload, judge.bins, exps(self.logs), judge.objective)

    def __call__(self, starts: Sequence[Floats]) -> Strategy:
        """The best that is seen on the way, the starts among it."""
        tried = [(self.judge(self.make(x)), x) for x in starts]
        best, x = min(tried, key=lambda one: one[0].loss)
        found = self.make(x)
        for _ in range(_ROUNDS):
            self.problem.reweigh(exps(self.logs))
            x, _value = descend(partial(self.loss, self.problem), x, max_iterations=200, restarts=2, gain=1e-8,
                                lowest=self.lowest)  # fmt: skip
            strategy = self.make(x)
            judged = self.judge(strategy)
            gain = best.loss / judged.loss - 1
            if gain > _SAME:
                best, found = judged, strategy
            weights = np.maximum(judged.noise.weights, _LEAST_WEIGHT)
            moved = np.round(np.log(weights), _DIGITS) - self.logs
            self.logs = self.logs + moved / 2
            if gain < _GAIN and np.abs(np.expm1(moved / 2)).max() < _STEADY:
                break
        return found


def _series(x: Floats) -> Floats:
    return rounded(np.concatenate([[1.0], x]))


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


# -- the cycle -------------------------------------------------------------------------------------------------------

# The cycle of cyclic Poisson sampling: how many groups take turns.


_CYCLES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)


def best_cycle(
    workload: Workload, share: float, epsilon: float, delta: float, objective: str = "mean", *, most: float = math.inf
) -> int:
    """The cycle of cyclic Poisson sampling with the least error at a claim, for banded Toeplitz C of as many bands.

    Longer cycles allow more bands, and amplify less: a unit of a step's group is drawn with probability share * cycle.
    It is looked for where the central limit [Bu et al. 2020] puts it, and from there by loss distributions.

    Args:
        workload: A; Toeplitz, or of at most 4096 steps.
        share: expected batch size over the number of units.
        epsilon, delta: of the claim.
        objective: "mean", "max" or "last" error.
        most: the longest cycle that is allowed; by itself 128.
    Cost: some seconds; kept on disk.
    """
    n = workload.n
    limit = min(most, n, int(1 / share * (1 + 1e-12)))
    cycles = [cycle for cycle in _CYCLES if cycle <= limit] or [1]

    def answer() -> int:
        fits = fits_toeplitz(Problem(workload, SingleEpoch(n), objective), cycles)
        errors = [math.sqrt(one.column_norms_squared().max() * squared_error(one, workload, objective)) for one in fits]
        rough = [
            error * _central(share * c, -(-n // c), epsilon, delta) for c, error in zip(cycles, errors, strict=True)
        ]

        @cached
        def loss(i: int) -> float:
            sigma = rough_poisson(epsilon, delta, min(1.0, share * cycles[i]), -(-n // cycles[i]))
            return errors[i] * sigma

        place = int(np.argmin(rough))
        for step in (-1, 1):
            while 0 <= place + step < len(cycles) and loss(place + step) < loss(place):
                place += step
        return cycles[place]

    question = {
        "kind": "cycle", "workload": workload.to_dict(), "share": share, "objective": objective, "cycles": cycles,
        "claim": [epsilon, delta],
    }  # fmt: skip
    return remember(question, answer, encode=int, decode=int)


def _central(q: float, steps: int, epsilon: float, delta: float) -> float:
    """Sigma by the central limit: mu = q sqrt(steps (e^(1 / sigma^2) - 1))."""
    return 1 / math.sqrt(math.log1p((gdp_mu(epsilon, delta) / q) ** 2 / steps))
