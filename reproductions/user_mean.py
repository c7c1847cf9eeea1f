"""The mean estimator of the user-level variant of Huang et al. 2023 (NSSGD), from Levy et al. 2021, and its condition.

Per coordinate, after a random rotation: an interval of width 4 tau that most values are near, drawn by the exponential
mechanism; the mean of the values cut to it, plus Laplace noise.

    range(x; eps, tau, B):   cells of width 2 tau on [-B, B]; each x_i goes to its cell's middle; a middle s is drawn
                             with probability ~ exp(-eps c(s) / 2), c(s) = max(#{x_i < s}, #{x_i > s});
                             [s - 2 tau, s + 2 tau]
    mean_1d(x; eps, tau, B): [a, b] = range(x; eps / 2, ..);  mean(clip(x, a, b)) + Lap(8 tau / (n eps))
    mean(X; eps, delta, tau, B):  U = d^(-1/2) Hadamard diag(signs);  each coordinate of U x_i by mean_1d with
                             eps' = eps / sqrt(8 d log(1/delta)), tau' = 10 tau sqrt(log(d n / gamma) / d),
                             B' = sqrt(d) B;  then U^-1

It is useful where the range is found: where n eps' / 2 is well above the log of the number of cells. As printed,

    beta = 2 gamma + d^2 B sqrt(log(d n / gamma)) / tau * exp(-n eps / (24 sqrt(d log(1/delta))))

must be small; with the paper's network (d = 30 496, eps 1, delta 1e-4) that asks for hundreds of thousands of users at
*each owner*, who has 2500 at most. NSSGD moreover gives the whole (eps, delta) to each of its steps. So no epsilon is
claimed here; eps and delta are inputs of one call. What may be used for users instead is one clipped message each: the
last lines show the noise that it takes, beside that of record-level noise made larger by group privacy.
"""

import math
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import hadamard

from anyorder.accounting.poisson import calibrate_poisson
from reproductions._show import Finding, main

Floats = NDArray[np.float64]
GAMMA = 0.01


def private_range(x: Floats, eps: float, tau: float, bound: float, rng: np.random.Generator) -> tuple[float, float]:
    """An interval of width 4 tau, drawn by the exponential mechanism over cells of width 2 tau."""
    middles = -bound + tau + 2 * tau * np.arange(max(1, math.ceil(bound / tau)))
    cells = np.clip(np.floor((x + bound) / (2 * tau)), 0, len(middles) - 1).astype(int)
    counts = np.bincount(cells, minlength=len(middles))
    below = np.cumsum(counts) - counts
    cost = np.maximum(below, len(x) - below - counts)
    weights = np.exp(-eps / 2 * (cost - cost.min()))
    s = middles[rng.choice(len(middles), p=weights / weights.sum())]
    return s - 2 * tau, s + 2 * tau


def mean_1d(x: Floats, eps: float, tau: float, bound: float, rng: np.random.Generator) -> float:
    """WinsorizedMean1D."""
    low, high = private_range(x, eps / 2, tau, bound, rng)
    return float(np.clip(x, low, high).mean() + rng.laplace(scale=8 * tau / (len(x) * eps)))


def mean(rows: Floats, eps: float, delta: float, tau: float, bound: float, rng: np.random.Generator) -> Floats:
    """WinsorizedMeanHighD of (n, d), d a power of 2."""
    n, d = rows.shape
    rotation = hadamard(d) / math.sqrt(d) * rng.choice([-1.0, 1.0], size=d)
    turned = rows @ rotation.T
    inner = eps / math.sqrt(8 * d * math.log(1 / delta))
    width = 10 * tau * math.sqrt(math.log(d * n / GAMMA) / d)
    found = [mean_1d(turned[:, i], inner, width, math.sqrt(d) * bound, rng) for i in range(d)]
    return rotation.T @ np.array(found)


def beta(n: int, d: int, eps: float, delta: float, tau: float, bound: float) -> float:
    """As printed: how far the estimate is from an unbiased one, in total variation."""
    cells = d**2 * bound * math.sqrt(math.log(d * n / GAMMA)) / tau
    return min(1.0, 2 * GAMMA + cells * math.exp(-n * eps / (24 * math.sqrt(d * math.log(1 / delta)))))


def users_needed(d: int, eps: float, delta: float, tau: float, bound: float) -> int:
    """The least n for which the printed beta is at most 3 gamma."""
    low, high = 1, 2
    while beta(high, d, eps, delta, tau, bound) > 3 * GAMMA:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if beta(middle, d, eps, delta, tau, bound) <= 3 * GAMMA else (middle, high)
    return high


def _error(n: int, d: int, rng: np.random.Generator) -> float:
    """||estimate - mean|| / ||mean|| for n users around a point of norm 1, each tau = 0.1 away from it."""
    centre = rng.standard_normal(d)
    centre /= np.linalg.norm(centre)
    away = rng.standard_normal((n, d))
    rows = centre + 0.1 * away / np.linalg.norm(away, axis=1, keepdims=True)
    return float(np.linalg.norm(mean(rows, 1.0, 1e-4, 0.1, 2.0, rng) - rows.mean(0)) / np.linalg.norm(rows.mean(0)))


def run(quick: bool) -> Iterator[Finding]:
    """The condition, errors on both sides of it, and the two ways to protect a user."""
    rng = np.random.default_rng(0)
    for d, few in ((4, 40), (64, 160)) if quick else ((4, 40), (64, 160), (1024, 2500)):
        enough = users_needed(d, 1.0, 1e-4, 0.1, 2.0)
        yield Finding(f"d = {d}: users that the printed condition asks for", enough)
        if d <= 64:
            error = _error(enough, d, rng)
            yield Finding(f"d = {d}: relative error with so many", error, "< 0.5", error < 0.5)
        error = float(np.median([_error(few, d, rng) for _ in range(5)]))
        name = f"d = {d}: relative error with {few} users, beta {beta(few, d, 1, 1e-4, 0.1, 2):.2g}"
        yield Finding(name, error, "> 1", error > 1)
    enough = users_needed(30_496, 1.0, 1e-4, 0.1, 2.0)
    yield Finding("d = 30 496, the paper's network: users that each owner needs", enough, "> 2500", enough > 2500)
    yield from _two_ways((1, 2) if quick else (1, 2, 5, 10, 20), quick)


def _two_ways(sizes: tuple[int, ...], quick: bool) -> Iterator[Finding]:
    """Noise multipliers for users of k records each, epsilon 1 and delta 1e-4, coins of 0.05, 200 steps.

    By groups: record-level noise for epsilon 1 / k, and for delta (e^(1/k) - 1) / (e - 1), as a group of k then has
    epsilon 1 and delta. Sampled users: a coin
    for each user, one clipped message: the noise does not depend on k, only what it is compared with, a sum over users.
    """
    user = calibrate_poisson(1.0, 1e-4, 0.05, 200)
    for k in sizes:
        group = user if k == 1 else calibrate_poisson(1 / k, 1e-4 * math.expm1(1 / k) / math.expm1(1), 0.05, 200)
        yield Finding(f"{k} records a user: noise multiplier by group privacy", group)
        if not quick:
            yield Finding(f"{k} records a user: by the loss distribution of k coins", _mixed(k))
        yield Finding(f"{k} records a user: one clipped message a user", user, "not more", user <= group)


def _mixed(k: int) -> float:
    """The noise multiplier where each of k records has its own coin: Binomial(k, q) gradients of one user a step."""
    from dp_accounting.pld import privacy_loss_distribution as pld
    from scipy.optimize import brentq
    from scipy.stats import binom

    def excess(sigma: float) -> float:
        counts = np.arange(k + 1)
        one = pld.from_mixture_gaussian_mechanism(
            sigma, counts.astype(float), binom.pmf(counts, k, 0.05), value_discretization_interval=1e-3
        )
        return one.self_compose(200).get_epsilon_for_delta(1e-4) - 1.0

    return float(brentq(excess, 1.5 * math.sqrt(k), 3.5 * k, xtol=0.01))


if __name__ == "__main__":
    main(__doc__ or "", run)
