"""No bound above a claim that is true: 1000 attacks on tight claims, and 10^4 random mechanisms.

level ..         share of runs whose p-value of the true, tight claim is at most 0.05: ours, beside the nominal 0.05.
Only where the test is exact are they equal
above at ..      share of bounds above the true epsilon, over random mechanisms, beside 1 - confidence
least p ..       the least p-value of a true claim among them, beside what the least of as many uniforms would be
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from anyorder.accounting import Gaussian, gdp_delta, gdp_epsilon
from anyorder.accounting.curves import Curve
from anyorder.audit import epsilon_lower_bound, p_value
from benchmarks._report import Row

LEVELS = (0.95, 1 - 1e-7)
METHODS = ("one_run", "f_dp", "gaussian", "clopper_pearson")
_FAR = 40.0  # no epsilon above is asked for


@dataclass(frozen=True)
class Attack:
    """One run of a mechanism: what was scored, its true and tight privacy, and which methods' assumptions hold.

    Attributes:
        epsilon: the least epsilon at a delta.
        claims: true claims, tight where they can be said.
        bounds: methods whose bound of epsilon must hold.
        tests: methods whose p-values of the claims must hold.
    """

    scores: NDArray[np.float64]
    coins: NDArray[np.bool_]
    epsilon: Callable[[float], float]
    claims: tuple[Curve | tuple[float, float], ...]
    bounds: tuple[str, ...]
    tests: tuple[str, ...]


Mechanism = Callable[[np.random.Generator, int, float], Attack]
"""(generator, canaries, a delta that matters to it) -> one run."""


def normal(rng: np.random.Generator, m: int, delta: float) -> Attack:
    """Scores mu coin + N(0, 1), in some units: what every method assumes."""
    mu, coins = _mu(rng), _coins(rng, m)
    scores = 10 ** rng.uniform(-3, 3) * (mu * coins + rng.standard_normal(m)) + rng.normal()
    return _gaussian(scores, coins, mu, ("one_run", "f_dp", "gaussian", "clopper_pearson"))


def rounded(rng: np.random.Generator, m: int, delta: float) -> Attack:
    """The same in few values: on a grid, clipped, or the side of a threshold."""
    mu, coins = _mu(rng), _coins(rng, m)
    scores = np.clip(np.round((mu * coins + rng.standard_normal(m)) * rng.choice([0.5, 1, 3])), -2, 3)
    return _gaussian(scores, coins, mu, ("one_run", "f_dp", "clopper_pearson"))


def ranked(rng: np.random.Generator, m: int, delta: float) -> Attack:
    """The same after a look at all of them: ranks, or distances from a quantile, the sign turned where that is odd."""
    mu, coins = _mu(rng), _coins(rng, m)
    scores = mu * coins + rng.standard_normal(m)
    if rng.random() < 0.5:
        scores = np.argsort(np.argsort(scores)).astype(float)
    else:
        scores = np.abs(scores - np.quantile(scores, rng.uniform(0, 0.3)))
    return _gaussian(scores, coins, mu, ("one_run", "f_dp"))


def correlated(rng: np.random.Generator, m: int, delta: float) -> Attack:
    """Noise with one part shared by all canaries: with the coins of the others known, that part is half known too."""
    share, strength, coins = rng.uniform(0, 0.95), _mu(rng), _coins(rng, m)
    noise = math.sqrt(1 - share) * rng.standard_normal(m) + math.sqrt(share) * rng.standard_normal()
    precision = (1 - share / (1 - share + m * share)) / (1 - share)  # a diagonal entry of the inverse covariance
    return _gaussian(strength * coins + noise, coins, strength * math.sqrt(precision), ("one_run", "f_dp"))


def overlapping(rng: np.random.Generator, m: int, delta: float) -> Attack:
    """Canaries that are not orthogonal: sum of coin_c g_c + noise, dot products."""
    mu, coins = _mu(rng), _coins(rng, m)
    vectors = rng.standard_normal((m, rng.integers(1, 2 * m + 1))) + rng.choice([0.0, 1.0])
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    released = mu * coins @ vectors + rng.standard_normal(vectors.shape[1])
    return _gaussian(vectors @ released, coins, mu, ("one_run", "f_dp"))


def unequal(rng: np.random.Generator, m: int, delta: float) -> Attack:
    """Each canary has a mu of its own; the claim is the largest."""
    mus, coins = rng.uniform(0, 1, m) * _mu(rng), _coins(rng, m)
    return _gaussian(mus * coins + rng.standard_normal(m), coins, float(mus.max()), ("one_run", "f_dp"))


def response(rng: np.random.Generator, m: int, delta: float) -> Attack:
    """Randomised response of each coin, which is told outright with probability delta: tight at that delta."""
    epsilon, coins = rng.exponential(2), _coins(rng, m)
    told = rng.random(m) < delta
    flipped = rng.random(m) < 1 / (1 + math.exp(epsilon))
    scores = np.where(told, np.where(coins, 2.0, -2.0), np.where(coins ^ flipped, 1.0, -1.0))
    return _pair(scores, coins, epsilon, delta, ("one_run", "clopper_pearson"))


def catastrophe(rng: np.random.Generator, m: int, delta: float) -> Attack:
    """With probability delta all coins are told at once, else randomised response."""
    epsilon, coins = rng.exponential(2), _coins(rng, m)
    flipped = rng.random(m) < 1 / (1 + math.exp(epsilon))
    scores = np.where(coins ^ (flipped & (rng.random() >= delta)), 1.0, -1.0)
    return _pair(scores, coins, epsilon, delta, ("one_run",))


def magnets(rng: np.random.Generator, m: int, delta: float) -> Attack:
    """Flips that follow each other: P[flips] ~ exp(sum of -h f_c + J f_c f_{c+1}), f = +-1; epsilon = 2 h + 4 J."""
    h, coupling, coins = rng.exponential(0.7), rng.exponential(0.5), _coins(rng, m)
    spins = _chain(rng, m, h, coupling)
    neighbours = min(2, m - 1)
    scores = np.where(coins ^ (spins > 0), 1.0, -1.0)
    return _pair(scores, coins, 2 * h + 2 * neighbours * coupling, 0.0, ("one_run",))


def worst(rng: np.random.Generator, m: int, delta: float) -> Attack:
    """Guesses of which N are right, with the largest P[N >= v] that (epsilon, delta) allows: see `one_run`."""
    epsilon, coins = rng.exponential(1.5), _coins(rng, m)
    log_right = -math.log1p(math.exp(-epsilon))
    k = np.arange(m + 1)
    log_pmf = np.array([math.lgamma(m + 1) - math.lgamma(i + 1) - math.lgamma(m - i + 1) for i in k])
    b = np.exp(log_pmf + k * log_right + (m - k) * (log_right - epsilon))
    v = int(rng.integers(1, m + 1))
    above = float(b[v:].sum())
    moved = min(m * delta * above / (v * b[v]), 1.0) if b[v] > 1e-290 else 0.0  # p[0] is not negative
    p = np.where(k >= v, b * (1 + moved * (1 - above) / max(above, 1e-290)), b * (1 - moved))
    right = int(rng.choice(m + 1, p=p / p.sum()))
    wrong = np.ones(m, dtype=bool)
    wrong[rng.choice(m, right, replace=False)] = False
    return _pair(np.where(coins ^ wrong, 1.0, -1.0), coins, epsilon, delta, ("one_run",))


def sampled(rng: np.random.Generator, m: int, delta: float) -> Attack:
    """A canary that is in takes part with probability q only."""
    mu, q, coins = _mu(rng), rng.uniform(0.05, 1), _coins(rng, m)
    scores = mu * (coins & (rng.random(m) < q)) + rng.standard_normal(m)
    return _curve(scores, coins, lambda epsilon: sampled_delta(mu, q, epsilon), ("one_run", "clopper_pearson"))


def sampled_delta(mu: float, q: float, epsilon: float) -> float:
    """The delta of (1 - q) N(0, 1) + q N(mu, 1) beside N(0, 1), in both directions."""
    ratio = math.exp(epsilon)
    found = q * gdp_delta(mu, math.log1p((ratio - 1) / q))  # in against out
    left = 1 - ratio * (1 - q)  # out against in
    return max(found, left * gdp_delta(mu, max(0.0, math.log(ratio * q / left))) if left > 0 else 0.0)


def mixed(rng: np.random.Generator, m: int, delta: float) -> Attack:
    """The noise is small or large for all canaries at once, and tells which."""
    mus, share, coins = (_mu(rng), _mu(rng)), rng.uniform(), _coins(rng, m)
    mu = mus[int(rng.random() < share)]
    scores = mu * coins + rng.standard_normal(m)
    weights = (1 - share, share)
    return _curve(scores, coins, lambda e: sum(w * gdp_delta(u, e) for w, u in zip(weights, mus, strict=True)))


MECHANISMS: tuple[Mechanism, ...] = (
    normal, rounded, ranked, correlated, overlapping, unequal,
    response, catastrophe, magnets, worst, sampled, mixed,
)  # fmt: skip


def _mu(rng: np.random.Generator) -> float:
    return float(rng.exponential(1.5)) + 0.01


def _coins(rng: np.random.Generator, m: int) -> NDArray[np.bool_]:
    return rng.random(m) < 0.5


def _gaussian(scores: NDArray[np.float64], coins: NDArray[np.bool_], mu: float, methods: tuple[str, ...]) -> Attack:
    return Attack(scores, coins, lambda delta: gdp_epsilon(mu, delta), (Gaussian(mu),), methods, methods)


def _pair(
    scores: NDArray[np.float64], coins: NDArray[np.bool_], epsilon: float, delta: float, methods: tuple[str, ...]
) -> Attack:
    def least(at: float) -> float:
        return epsilon if at >= delta else math.inf

    return Attack(scores, coins, least, ((epsilon, delta),), methods, (*methods, "f_dp"))


def _curve(
    scores: NDArray[np.float64],
    coins: NDArray[np.bool_],
    curve: Callable[[float], float],
    methods: tuple[str, ...] = ("one_run",),
) -> Attack:
    def least(delta: float) -> float:
        low, high = 0.0, _FAR
        if curve(low) <= delta or curve(high) > delta:
            return 0.0 if curve(low) <= delta else math.inf
        while high - low > 1e-9:
            middle = (low + high) / 2
            low, high = (middle, high) if curve(middle) > delta else (low, middle)
        return high

    claims = tuple((epsilon, curve(epsilon)) for epsilon in (0.1, 1.0, 4.0))
    return Attack(scores, coins, least, claims, methods, (*methods, "f_dp"))


def _chain(rng: np.random.Generator, m: int, h: float, coupling: float) -> NDArray[np.float64]:
    """Spins +-1 with P ~ exp(sum -h f_c + J f_c f_{c+1}), drawn exactly: sums from the end, then from the start."""
    values = np.array([-1.0, 1.0])
    weights, pairs = np.exp(-h * values), np.exp(coupling * np.outer(values, values))
    rest = np.ones((m, 2))
    for place in range(m - 2, -1, -1):
        rest[place] = pairs @ (weights * rest[place + 1])
        rest[place] /= rest[place].sum()
    spins, chances = np.empty(m), weights * rest[0]
    for place in range(m):
        spins[place] = values[int(rng.random() * chances.sum() > chances[0])]
        if place + 1 < m:
            chances = pairs[int(spins[place] > 0)] * weights * rest[place + 1]
    return spins


@dataclass
class Tally:
    """What a number of attacks on true claims found."""

    bounds: int = 0
    above: int = 0  # at confidence 0.95
    far_above: int = 0  # at confidence 1 - 1e-7
    p_values: int = 0
    small: int = 0  # at most 0.05
    least: float = 1.0


def attacked(seed: int, tallies: dict[str, Tally]) -> None:
    """One random mechanism, by every method whose assumptions hold for it; told by `seed` alone."""
    rng = np.random.default_rng([seed, 2026])
    mechanism = MECHANISMS[seed % len(MECHANISMS)]
    m = int(rng.choice([2, 3, 5, 10, 30, 100, 300]))
    delta = float(rng.choice([1e-9, 1e-5, 1e-3, 0.02, 0.2]))
    attack = mechanism(rng, m, delta)
    guesses = None if rng.random() < 0.5 else int(rng.integers(1, m + 1))
    threshold = None if rng.random() < 0.5 else float(rng.choice([-0.5, 0.5, 1.5, 3.0]))
    claim = attack.claims[int(rng.integers(len(attack.claims)))]
    both = 0 < attack.coins.sum() < m and m > 2
    for method in METHODS:
        options = {"one_run": {"guesses": guesses}, "f_dp": {"guesses": guesses}}.get(method, {})
        options = {"threshold": threshold} if method == "clopper_pearson" else options
        if method == "gaussian" and not both:
            continue
        tally = tallies.setdefault(method, Tally())
        if method in attack.bounds:
            true = attack.epsilon(delta)
            found = (epsilon_lower_bound(attack.scores, attack.coins, delta, c, method, **options) for c in LEVELS)
            above, far_above = (bound > true for bound in found)
            tally.bounds += 1
            tally.above += above
            tally.far_above += far_above
        if method in attack.tests:
            p = p_value(attack.scores, attack.coins, claim, method, **options)
            tally.p_values += 1
            tally.small += p <= 0.05
            tally.least = min(tally.least, p)


def nulls(method: str, runs: int, mechanism: Mechanism = normal, m: int = 200) -> int:
    """How many of some runs with a true, tight claim have a p-value of at most 0.05."""
    found = 0
    for run in range(runs):
        attack = mechanism(np.random.default_rng([run, 7]), m, 1e-3)
        found += p_value(attack.scores, attack.coins, attack.claims[0], method) <= 0.05
    return found


def exact_level(runs: int, m: int = 200) -> tuple[int, float]:
    """(how often p is at most 0.05, what that should be) for `one_run` and the mechanism that it is sharp for.

    Randomised response with epsilon 1; half of the coins are guessed, so that each guess is what was released; the
    number of right ones is binomial, and its levels are few.
    """
    right, found = 1 / (1 + math.exp(-1.0)), 0
    for run in range(runs):
        rng = np.random.default_rng([run, 19])
        coins = _coins(rng, m)
        scores = np.where(coins ^ (rng.random(m) > right), 1.0, -1.0)
        found += p_value(scores, coins, (1.0, 0.0), "one_run", guesses=m // 2) <= 0.05
    pmf = [math.comb(m // 2, k) * right**k * (1 - right) ** (m // 2 - k) for k in range(m // 2 + 1)]
    return found, max(tail for v in range(len(pmf)) if (tail := math.fsum(pmf[v:])) <= 0.05)


def rows(quick: bool) -> Iterator[Row]:
    """Levels under true claims, then random mechanisms."""
    runs, mechanisms = (100, 300) if quick else (1000, 10_000)
    for mechanism, methods in ((normal, METHODS), (response, ("one_run", "f_dp", "clopper_pearson"))):
        for method in methods:
            yield _row(f"level of {method}: {mechanism.__name__}, {runs} runs", nulls(method, runs, mechanism), runs)
    found, nominal = exact_level(runs)
    yield _row(f"level of one_run: randomised response, half guessed, {runs} runs", found, runs, nominal)
    tallies: dict[str, Tally] = {}
    for seed in range(mechanisms):
        attacked(seed, tallies)
    for method, tally in tallies.items():
        of = f"{method}, {tally.bounds} mechanisms"
        yield _row(f"above at 0.95: {of}", tally.above, tally.bounds)
        yield _row(f"above at 1 - 1e-7: {of}", tally.far_above, tally.bounds, 1e-7)
        yield _row(f"level of {method}: {tally.p_values} mechanisms", tally.small, tally.p_values)
        yield Row(f"least p of {method}: {tally.p_values} mechanisms", tally.least, 1 / tally.p_values, None, "p-value")


def _row(name: str, count: int, runs: int, nominal: float = 0.05) -> Row:
    return Row(name, count / runs, nominal, nominal * runs / count if count else None, "share of runs")
