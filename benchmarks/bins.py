"""Deterministic bounds for balls in bins beside certified intervals, over random strategies, bins, epochs and noise."""

import math
import time
from collections.abc import Iterator

import numpy as np

from anyorder import workload as W
from anyorder.accounting.amplification.bins import bins_epsilon
from anyorder.accounting.amplification.mixture import bins_gram
from anyorder.accounting.amplification.monte_carlo import MonteCarlo, bins_interval
from anyorder.optimize import fit
from anyorder.participation import BallsInBins, FixedOrder
from anyorder.strategy import Independent, Strategy, Tree
from benchmarks._report import Row

DELTA = 1e-5
CLOSE = 1.05
FAMILIES = ("independent", "banded", "blt", "tree")


def rows(quick: bool) -> Iterator[Row]:
    """How many bounds are below the interval (none may be), the share within 5 % of it, and the time of the largest."""
    rng = np.random.default_rng(20261122)
    settings = MonteCarlo(samples=4000 if quick else 40_000, failure=1e-6)
    below = 0
    ratios: dict[str, list[float]] = {family: [] for family in FAMILIES}
    for case in range(8 if quick else 1000):
        family = FAMILIES[case % len(FAMILIES)]
        b, k = int(rng.integers(4, 17 if quick else 101)), int(rng.integers(1, 11))
        G = bins_gram(_strategy(family, b, k, rng), BallsInBins(k, b))
        sigma = math.sqrt(G.max()) * math.exp(rng.uniform(math.log(0.4), math.log(5.0)))
        bound = bins_epsilon(G, sigma, DELTA)
        interval = bins_interval(G, sigma, DELTA, settings)
        below += bound < interval.lower
        ratios[family].append(bound / interval.upper)
    yield Row("balls in bins: bounds below the interval", float(below), 0.0, None, "settings")
    for family, found in ratios.items():
        share = float(np.mean(np.array(found) <= CLOSE))
        yield Row(f"balls in bins, {family}: share within 5 %", share, None, None, "of settings")
        yield Row(f"balls in bins, {family}: median of bound / interval", float(np.median(found)), None, None, "ratio")
    b, k = (25, 4) if quick else (100, 10)
    G = bins_gram(fit("toeplitz", W.prefix_sum(b * k), FixedOrder(b * k, k, b), bands=16), BallsInBins(k, b))
    start = time.perf_counter()
    bins_epsilon(G, math.sqrt(G.max()), DELTA)
    yield Row(f"balls in bins, b={b}, k={k}: time", time.perf_counter() - start, 60.0, None, "s")


def _strategy(family: str, b: int, k: int, rng: np.random.Generator) -> Strategy:
    n = b * k
    match family:
        case "independent":
            return Independent(n)
        case "banded":
            return fit("toeplitz", W.prefix_sum(n), FixedOrder(n, k, b), bands=int(rng.integers(2, b + 1)))
        case "blt":
            return fit("blt", W.prefix_sum(n), FixedOrder(n, k, b), buffers=2)
        case "tree":
            return Tree(n)
        case _:
            raise ValueError(f"unknown family {family!r}")
