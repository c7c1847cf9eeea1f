"""Certificates of chance: epsilon and delta of secret sampling by samples that anybody can draw again.

delta(eps) is the mean of terms X(eps) in [0, B(eps)], independent, unbiased, none of which rises with eps: see
`monte_carlo_terms` and `monte_carlo_separated`. What is claimed is an upper confidence limit of it, by a bet that is
fixed before the samples:

**Theorem.** Let m > 0 and l > 0 be fixed, and K(eps) = prod_i (1 + l (m - X_i(eps))), 0 where a factor is below 0. Let
E be the smallest eps at or above a fixed floor with K(eps) >= 1 / f; the floor has l (B(floor) - m) <= 1. Then

    P( delta(E) > m ) <= f

*Proof.* Let e be the largest eps with delta(eps) >= m; delta is continuous, so delta(e) = m. If delta(E) > m, then
floor <= E < e; no factor at e is below 0, and as factors rise with eps, K(e) >= K(E) >= 1 / f. But E K(e) <= 1 (terms
may be of two laws, in equal numbers), so that Markov's inequality gives at most f.  QED   The limit of delta at a given
eps is that of the same K, in m.

The larger of both directions is wrong only if the direction whose true epsilon is larger is: no union bound. With
m = delta - failure, the claim is (E, m) but for chance `failure`, so (E, delta) of the sampling and the run together.

**No choice of seeds.** The key is a hash of all that the number depends on: strategy, rule, sigma, delta, samples,
failure, salt. A search for sigma looks at many keys, and whoever moves the last bit of sigma sees another: so K must
reach TRIES / failure, TRIES = 256: the claim holds at `failure` even if the best of 256 keys were taken. A verifier may
ask for another salt: fresh samples.

The bet l, the tilts and the number of samples of Q against P come from a pilot, whose key is another.
"""

import dataclasses
import hashlib
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from anyorder import _check
from anyorder._closed import final
from anyorder.accounting.amplification.mixture import bins_gram, check_fits
from anyorder.accounting.amplification.monte_carlo_separated import Separated, separated_band
from anyorder.accounting.amplification.monte_carlo_terms import POWERS, Bins, Shape, Terms
from anyorder.errors import ArgumentError, PlanError
from anyorder.noise import NoiseSource
from anyorder.participation.base import Participation
from anyorder.participation.sampled import BallsInBins, MinSeparationSampling, RandomAllocation
from anyorder.strategy import Strategy

__all__ = ["REPLAY", "TRIES", "Interval", "MonteCarlo", "bins_interval", "mc_delta", "mc_epsilon", "mc_interval"]

Floats = NDArray[np.float64]
Progress = Callable[[int, int], None]

TRIES = 256
REPLAY = 1e-5
"""Results are raised by 2 to 3 times this, relative: a claim at least the recomputed value times 1 - REPLAY holds."""

_MOST = 32  # times `samples` for Q against P


@final
@dataclass(frozen=True)
class MonteCarlo:
    """How a certificate of chance is made; its seed is not among it.

    Args:
        samples: terms of P against Q, at least 1000; Q against P takes up to 32 times as many.
        failure: probability that the claim is too small, which is taken off delta; None for delta / 100.
        salt: any other number gives fresh samples: for those who verify.
    """

    samples: int = 200_000
    failure: float | None = None
    salt: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "samples", _check.integer("samples", self.samples, low=1000, high=10**9))
        if self.failure is not None:
            object.__setattr__(self, "failure", _check.probability("failure", self.failure))
        object.__setattr__(self, "salt", _check.integer("salt", self.salt, low=0, high=2**63 - 1))


class Interval(NamedTuple):
    """A two-sided interval, each end wrong with probability at most the failure given.

    Attributes:
        lower: not above the true value.
        upper: not below it.
    """

    lower: float
    upper: float


def mc_epsilon(
    strategy: Strategy,
    rule: Participation,
    sigma: float,
    delta: float,
    settings: MonteCarlo | None = None,
    progress: Progress | None = None,
) -> float:
    """Epsilon at delta, add-or-remove or zero-out, from samples: never below the true one, but for chance `failure`.

    Args:
        strategy: C, of any signs; |C| counts.
        rule: BallsInBins, or MinSeparationSampling with a C whose columns do not overlap b steps apart or more.
        sigma: noise standard deviation over the clip norm.
        delta: strictly between 0 and 1; the failure probability is inside it.
        settings: number of samples, failure.
        progress: called with terms done and terms in all, as far as known.
    Returns: epsilon, rounded up so that another machine's last bits do not matter: see REPLAY.
    Cost: O(samples b (b + t)) time, t a few to 64; some 100 MB.
    Raises: ArgumentError for other arguments, and where the samples are too few for delta; PlanError for another rule.
    """
    settings = MonteCarlo() if settings is None else settings
    sigma, delta = _check.positive("sigma", sigma), _check.probability("delta", delta)
    failure = _failure(settings, delta)
    found = _started(strategy, rule, sigma, ["delta", delta.hex()], settings, progress)
    return _outward(found.least_epsilon(delta - failure, math.log(TRIES / failure)))


def mc_delta(
    strategy: Strategy,
    rule: Participation,
    sigma: float,
    epsilon: float,
    settings: MonteCarlo | None = None,
    progress: Progress | None = None,
) -> float:
    """Delta at epsilon, from samples: the limit plus the failure probability, which is inside it.

    Args, Cost, Raises: as `mc_epsilon`; epsilon is not negative. A failure of None is 1/100 of what a pilot finds.
    Returns: delta, rounded up, at most 1.
    """
    settings = MonteCarlo() if settings is None else settings
    sigma, epsilon = _check.positive("sigma", sigma), _check.real("epsilon", epsilon, low=0.0)
    found = _started(strategy, rule, sigma, ["epsilon", epsilon.hex()], settings, progress)
    return min(1.0, _outward(found.least_delta(epsilon, settings.failure)))


def mc_interval(
    strategy: Strategy,
    rule: Participation,
    sigma: float,
    delta: float,
    settings: MonteCarlo | None = None,
    progress: Progress | None = None,
) -> Interval:
    """Lower and upper limit of epsilon at delta, for comparisons: `failure` (or 1e-3) each, and not inside delta.

    Args, Cost, Raises: as `mc_epsilon`.
    """
    settings = MonteCarlo() if settings is None else settings
    sigma, delta = _check.positive("sigma", sigma), _check.probability("delta", delta)
    found = _started(strategy, rule, sigma, ["interval", delta.hex()], settings, progress)
    return found.interval(delta, 1e-3 if settings.failure is None else settings.failure)


def bins_interval(G: ArrayLike, sigma: float, delta: float, settings: MonteCarlo | None = None) -> Interval:
    """`mc_interval` of the Gram matrix of balls in bins.

    Args:
        G: (b, b), as `bins_gram` gives it.
        sigma, delta, settings: as `mc_interval`.
    """
    settings = MonteCarlo() if settings is None else settings
    sigma, delta = _check.positive("sigma", sigma), _check.probability("delta", delta)
    gram = _check.array("G", G, ndim=2)
    if gram.shape[0] != gram.shape[1] or gram.min() < 0 or not np.allclose(gram, gram.T, rtol=1e-9, atol=0):
        raise ArgumentError(f"G must be a square, symmetric matrix without negative entries, got shape {gram.shape}")
    text = ["gram", gram.tobytes().hex(), sigma.hex(), delta.hex(), settings.samples, settings.salt]
    source = NoiseSource(hashlib.blake2b(json.dumps(text).encode(), digest_size=32).digest())
    found = _Search(Bins(gram / sigma**2), source, settings.samples, None)
    return found.interval(delta, 1e-3 if settings.failure is None else settings.failure)


class _Search:
    """Both directions of one sampler."""

    def __init__(self, sampler: Bins | Separated, source: NoiseSource, samples: int, progress: Progress | None) -> None:
        samples = 4 * -(-samples // 4)  # terms of two laws in equal numbers
        self._sampler, self._source, self._samples, self._pilot = sampler, source, samples, sampler.pilot
        self._report, self._done, self._total = progress, 0, 2 * samples

    def least_epsilon(self, m: float, stake: float) -> float:
        """The limit of epsilon at m, both directions; the wealth must reach e^stake."""
        terms, bet = self._remove(m, stake)
        first = _upper_epsilon(terms, m, stake, bet)
        terms, bet = self._add(first, m, stake)
        return max(first, _upper_epsilon(terms, m, stake, bet))

    def interval(self, delta: float, failure: float) -> Interval:
        """Both limits of epsilon at delta."""
        stake = math.log(1 / failure)
        terms, bet = self._remove(delta, stake)
        first = _upper_epsilon(terms, delta, stake, bet)
        lower = _lower_epsilon(terms, delta, stake + math.log(2), bet)
        terms, bet = self._add(first, delta, stake)
        upper = max(first, _upper_epsilon(terms, delta, stake, bet))
        return Interval(max(lower, _lower_epsilon(terms, delta, stake + math.log(2), bet)), upper)

    def least_delta(self, epsilon: float, failure: float | None) -> float:
        """The limit of delta at epsilon, and the failure."""
        shape, first = self._pilots(lambda pilot: _log_cap(pilot, epsilon), lambda _: epsilon)
        guess = float(np.exp(_log_terms(first, epsilon)).mean())
        failure = float(f"{max(1e-2 * guess, 1e-300):.2g}") if failure is None else failure
        stake = math.log(TRIES / failure)
        terms = self._sampler.remove(self._source.derive(b"remove"), self._samples, shape, self._progress)
        found = _upper_delta(first, terms, epsilon, stake)
        s = float(f"{self._sampler.tilt(epsilon):.3g}")
        pilot = self._sampler.add(self._source.derive(b"pilot add"), self._pilot, s, _silent)
        cap = math.exp(min(0.0, pilot.cap - s * epsilon))
        count = int(min(_MOST * self._samples, max(self._samples, 4 * stake * cap / max(found, 1e-300))))
        self._total = self._done + count
        terms = self._sampler.add(self._source.derive(b"add"), count, s, self._progress)
        return max(found, _upper_delta(pilot, terms, epsilon, stake)) + failure

    def _remove(self, m: float, stake: float) -> tuple[Terms, "_Bet"]:
        """Terms of P against Q, of the power whose bet looks best, and the bet."""
        shape, pilot = self._pilots(lambda pilot: _Bet.upper(pilot, m, stake, self._samples, 0.0).at, lambda best: best)
        bet = _Bet.upper(pilot, m, stake, self._samples, 0.0)
        return self._sampler.remove(self._source.derive(b"remove"), self._samples, shape, self._progress), bet

    def _pilots(self, value: Callable[[Terms], float], epsilon: Callable[[float], float]) -> tuple[Shape, Terms]:
        """The shape of the smallest value, and its pilot; powers rise until two in turn are worse."""
        key = self._source.derive(b"pilot remove")
        best, chosen = math.inf, Shape(2)
        for alone in (True, False):  # copies alone say about where epsilon is
            single = () if alone else self._sampler.single(epsilon(best))
            if not (alone or single):
                break
            worse, here, best = 0, math.inf, math.inf  # a pilot may miss the tails of copies alone: not compared
            for t in POWERS:
                shape = Shape(t, single, self._sampler.log_z(key, 1024, t))
                found = value(self._sampler.remove(key, self._pilot // 2, shape, _silent))
                worse, here = (0, found) if found < here else (worse + 1, here)
                best, chosen = (found, shape) if found < best else (best, chosen)
                if worse == 2:
                    break
        return chosen, self._sampler.remove(key, self._pilot, chosen, _silent)

    def _add(self, target: float, m: float, stake: float) -> tuple[Terms, "_Bet"]:
        """Terms of Q against P, as many as it takes to show that its epsilon is not above the target, if it is not."""
        most = _MOST * self._samples
        at = target
        while True:  # where the bound of the terms is small enough for so many samples
            s = float(f"{self._sampler.tilt(at):.3g}")
            pilot = self._sampler.add(self._source.derive(b"pilot add"), self._pilot, s, _silent)
            if 1.5 * stake / math.log1p(0.9 * m / _cap(pilot, at)) <= most:
                break
            at = 1.02 * at + 0.01
            if at > 1e4:
                raise ArgumentError(f"samples must be more for so small a delta, got {self._samples}")
        bet = _Bet.upper(pilot, m, stake, most, at)
        growth = _growth(np.exp(_log_terms(pilot, bet.at)), m, bet.size)
        count = min(most, 1024 * math.ceil(max(0.1 * self._samples, 1.3 * stake / growth) / 1024))
        bet = _Bet.upper(pilot, m, stake, count, at)
        self._total = self._done + count
        return self._sampler.add(self._source.derive(b"add"), count, s, self._progress), bet

    def _progress(self, count: int) -> None:
        self._done += count
        if self._report is not None:
            self._report(self._done, self._total)


class _Bet(NamedTuple):
    """The bet l, and the epsilon that it was chosen for."""

    size: float
    at: float

    @classmethod
    def upper(cls, pilot: Terms, m: float, stake: float, samples: int, low: float) -> "_Bet":
        """The bet that a pilot finds best: of the smallest epsilon, from `low` on, at which the stake is reached."""

        def reached(epsilon: float) -> bool:
            X = np.exp(_log_terms(pilot, epsilon))
            return samples * _growth(X, m, _best(X, m, _cap(pilot, epsilon))) >= 1.05 * stake

        at = low if reached(low) else _smallest(reached, low, 1e-4)
        size = _best(np.exp(_log_terms(pilot, at)), m, _cap(pilot, at))
        return cls(float(f"{size:.3g}"), at)


def _best(X: Floats, m: float, cap: float) -> float:
    """The bet of the largest growth, of those that a term of the cap cannot ruin."""
    high = math.log(0.9 / cap)
    from scipy.optimize import minimize_scalar  # slow to load

    found = minimize_scalar(lambda x: -_growth(X, m, math.exp(x)), bounds=(high - 30, high), method="bounded")
    return math.exp(float(found.x))


def _growth(X: Floats, m: float, bet: float) -> float:
    return float(np.log1p(bet * (m - X)).mean())


def _cap(terms: Terms, epsilon: float) -> float:
    """What no term at epsilon is above: B(eps)."""
    return math.exp(min(600.0, max(-600.0, _log_cap(terms, epsilon))))


def _log_cap(terms: Terms, epsilon: float) -> float:
    return terms.cap - terms.slope * epsilon


def _log_terms(terms: Terms, epsilon: float) -> Floats:
    """Log X(eps), -infinity for 0."""
    excess = terms.loss - epsilon if terms.remove else -terms.loss - epsilon  # how far the loss is above epsilon
    result = np.full(len(excess), -math.inf)
    (some,) = np.nonzero(excess > 0)
    result[some] = terms.weight[some] + np.log(-np.expm1(-excess[some]))
    return result


def _wealth(X: Floats, m: float, bet: float) -> float:
    """Log K; -infinity where a factor is not above 0."""
    changes = bet * (m - X)
    return float(np.log1p(changes).sum()) if changes.min() > -1 else -math.inf


def _upper_epsilon(terms: Terms, m: float, stake: float, bet: _Bet) -> float:
    """E of the theorem."""
    log_most = math.log(m + 1 / bet.size)  # what a term may be
    slope, here = terms.slope, terms.cap
    if slope <= 0 and here > log_most:
        raise AssertionError("a bet that a term could ruin")
    floor = max(0.0, (here - log_most) / slope) if slope > 0 else 0.0

    def reached(epsilon: float) -> bool:
        return _wealth(np.exp(_log_terms(terms, epsilon)), m, bet.size) >= stake

    return floor if reached(floor) else _smallest(reached, floor, 1e-10)


def _lower_epsilon(terms: Terms, m: float, stake: float, bet: _Bet) -> float:
    """The largest epsilon at which the bet that delta is above m, of the same size, wins."""
    size = min(bet.size, 0.5 / m)

    def lost(epsilon: float) -> bool:
        return _wealth(np.exp(_log_terms(terms, epsilon)), m, -size) < stake

    return 0.0 if lost(0.0) else _smallest(lost, 0.0, 1e-10) * (1 - 1e-9)


def _delta_bet(pilot: Terms, epsilon: float, stake: float, samples: int) -> float:
    spread = max(float(np.exp(_log_terms(pilot, epsilon)).var()), 1e-300)
    return float(f"{min(0.9 / _cap(pilot, epsilon), math.sqrt(2 * stake / (samples * spread))):.3g}")


def _upper_delta(pilot: Terms, terms: Terms, epsilon: float, stake: float) -> float:
    """The smallest m with K >= e^stake."""
    size = _delta_bet(pilot, epsilon, stake, len(terms.loss))
    X = np.exp(_log_terms(terms, epsilon))
    low, high = 0.0, float(X.max()) + math.expm1(stake / len(X)) / size
    while high - low > 1e-11 * high:
        middle = (low + high) / 2
        low, high = (low, middle) if _wealth(X, middle, size) >= stake else (middle, high)
    return high


def _smallest(reached: Callable[[float], bool], low: float, precision: float) -> float:
    """The smallest epsilon above `low` at which it is, from above."""
    step = 1.0
    while not reached(low + step):
        step *= 2
        if step > 1e6:
            raise ArgumentError("samples must be more for so small a delta: no epsilon could be shown")
    high = low + step
    while high - low > precision * (1e-3 + high):
        middle = (low + high) / 2
        low, high = (low, middle) if reached(middle) else (middle, high)
    return high


def _started(
    strategy: Strategy,
    rule: Participation,
    sigma: float,
    goal: list[str],
    settings: MonteCarlo,
    progress: Progress | None,
) -> "_Search":
    sampler: Bins | Separated
    match rule:
        case BallsInBins():
            sampler = Bins(bins_gram(strategy, rule) / sigma**2)
        case MinSeparationSampling():
            check_fits(strategy, rule)
            sampler = Separated(separated_band(strategy, rule) / sigma**2, rule)
        case RandomAllocation():
            raise PlanError(
                "RandomAllocation is accounted without samples: its epochs are k mechanisms beside each other, whose "
                "bounds compose; take method 'bound'"
            )
        case _:
            raise PlanError(f"samples are drawn for balls in bins and for sampling with separation, got {rule!r}")
    return _Search(sampler, _source(strategy, rule, sigma, goal, settings), settings.samples, progress)


def _source(
    strategy: Strategy,
    rule: BallsInBins | MinSeparationSampling,
    sigma: float,
    goal: list[str],
    settings: MonteCarlo,
) -> NoiseSource:
    fields = {one.name: getattr(rule, one.name) for one in dataclasses.fields(rule)}
    failure = None if settings.failure is None else settings.failure.hex()
    text = {
        "what": "anyorder amplification by samples, 1",
        "strategy": strategy.to_dict(),
        "rule": [rule.kind, fields],
        "sigma": sigma.hex(),
        "goal": goal,
        "settings": [settings.samples, failure, settings.salt],
    }
    packed = json.dumps(text, sort_keys=True, allow_nan=False).encode()
    return NoiseSource(hashlib.blake2b(packed, digest_size=32).digest())


def _failure(settings: MonteCarlo, delta: float) -> float:
    failure = delta / 100 if settings.failure is None else settings.failure
    if failure >= delta:
        raise ArgumentError(f"failure must be below delta={delta:g}, which it is inside of, got {failure:g}")
    return failure


def _outward(value: float) -> float:
    """Up by 2 REPLAY, and to the next of a grid of six digits: last bits hardly ever move it."""
    if value <= 0:
        return 0.0
    raised = value * (1 + 2 * REPLAY)
    digits = 5 - math.floor(math.log10(raised))
    scale = 10.0**digits
    return math.ceil(raised * scale) / scale if digits >= 0 else raised


def _silent(count: int) -> None:
    """Nobody looks."""
