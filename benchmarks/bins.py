"""Deterministic bounds for balls in bins beside certified intervals, over random strategies, bins, epochs and noise.

    python -m benchmarks.factorize --only bounds            what is missing of intervals and bounds
    python -m benchmarks.bins intervals                     the intervals alone, which no change of the bounds touches
    python -m benchmarks.bins table                         rows of the page's first table that are missing: minutes
    python -m benchmarks.bins write                         both tables of docs/compared.md from the files

An interval is wrong with probability at most 1e-6 at either end. With 4000 samples it is some per cent wide, most where
bins are independent or bands are few; of every tenth setting there is one of 40 000 samples too.
"""

import hashlib
import json
import math
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from anyorder import workload as W
from anyorder.accounting.amplification.bins import bins_epsilon
from anyorder.accounting.amplification.bound import calibrate_amplified
from anyorder.accounting.amplification.methods import Deterministic
from anyorder.accounting.amplification.mixture import bins_gram
from anyorder.accounting.amplification.monte_carlo import Bins, MonteCarlo, SampledInterval, _EpsilonSearch
from anyorder.noise import NoiseSource
from anyorder.optimize import fit
from anyorder.participation import BallsInBins, FixedOrder
from anyorder.strategy import Independent, Strategy, Tree
from benchmarks._report import Row

ROOT = Path(__file__).resolve().parent.parent
INTERVALS = ROOT / "benchmarks" / "results" / "bins.jsonl"
BOUNDS = ROOT / "benchmarks" / "results" / "bins_bounds.jsonl"
TABLE = ROOT / "benchmarks" / "results" / "bins_table.jsonl"
PAGE = ROOT / "docs" / "compared.md"
DELTA = 1e-5
CLOSE = 1.05
SMALL = 0.02  # an epsilon below which nobody asks for per cent
FAMILIES = ("independent", "banded", "blt", "tree")
CASES, QUICK = 1000, 8
FEW, MANY, EVERY = 4000, 40_000, 40  # samples; of the first four of each so many cases there are many

SHAPE = (10, 100)  # epochs and bins of long runs
LONG = ((1, 2.0), (8, 1.0), (8, 8.0), (16, 1.0), (16, 4.0), (32, 1.0), (32, 4.0), (100, 1.0), (100, 8.0), (None, 2.0))

Floats = NDArray[np.float64]


def bins_interval(G: Floats, sigma: float, delta: float, settings: MonteCarlo) -> SampledInterval:
    """A two-sided interval of epsilon at delta, from samples, of balls in bins whose Gram matrix is G (b, b)."""
    text = ["gram", G.tobytes().hex(), sigma.hex(), delta.hex(), settings.samples, settings.salt]
    source = NoiseSource(hashlib.blake2b(json.dumps(text).encode(), digest_size=32).digest())
    search = _EpsilonSearch(Bins(G / sigma**2), source, settings.samples, None)
    return search.interval(delta, 1e-3 if settings.failure is None else settings.failure)


def rows(quick: bool) -> Iterator[Row]:
    """How many bounds are below the interval (none may be), the share within 5 % of it, and the time of the largest."""
    cases = QUICK if quick else CASES
    intervals(cases, many=not quick)
    bounds(cases)
    found = _together(range(cases))
    below = sum(case["bound"] < case["lower"] for case in found)
    yield Row("balls in bins: bounds below the interval", float(below), 0.0, None, "settings")
    for family in FAMILIES:
        some = [case for case in found if case["family"] == family and case["upper"] > SMALL]
        for end in ("upper", "lower"):
            ratios = np.array([case["bound"] / max(case[end], SMALL) for case in some])
            share = float(np.mean(ratios <= CLOSE))
            yield Row(f"balls in bins, {family}: within 5 % of the interval's {end} end", share, None, None, "share")
            yield Row(
                f"balls in bins, {family}: median of bound / {end}", float(np.median(ratios)), None, None, "ratio"
            )
    b, k = (25, 4) if quick else (100, 10)
    G = bins_gram(fit("toeplitz", W.prefix_sum(b * k), FixedOrder(b * k, k, b), bands=16), BallsInBins(k, b))
    start = time.process_time()
    bins_epsilon(G, math.sqrt(G.max()), DELTA)
    yield Row(f"balls in bins, b={b}, k={k}: time", time.process_time() - start, 60.0, None, "s")


def intervals(cases: int, *, many: bool) -> None:
    """Certified intervals of what has none yet: of few samples first, then of many."""
    held = {(line["case"], line["samples"]) for line in _read(INTERVALS)}
    wanted = [(case, FEW) for case in range(cases)]
    wanted += [(case, MANY) for case in range(cases) if many and case % EVERY < len(FAMILIES)]
    for case, samples in wanted:
        if (case, samples) in held:
            continue
        setting, G = _setting(case)
        lower, upper = bins_interval(G, setting["sigma"], DELTA, MonteCarlo(samples=samples, failure=1e-6))
        _append(INTERVALS, {**setting, "samples": samples, "lower": lower, "upper": upper})


def bounds(cases: int) -> None:
    """Bounds of what has none yet."""
    held = {line["case"] for line in _read(BOUNDS)}
    for case in range(cases):
        if case in held:
            continue
        setting, G = _setting(case)
        start = time.process_time()
        bound = bins_epsilon(G, setting["sigma"], DELTA)
        _append(BOUNDS, {"case": case, "largest": setting["largest"], "bound": bound, "s": time.process_time() - start})


def table() -> None:
    """Long runs: the noise whose bound is an epsilon, and a certified interval at that noise."""
    held = {(line["bands"], line["epsilon"]) for line in _read(TABLE)}
    for bands, epsilon in LONG:
        if (bands, epsilon) in held:
            continue
        strategy, order = _long(bands), BallsInBins(*SHAPE)
        start = time.process_time()
        sigma = calibrate_amplified(strategy, order, epsilon, DELTA, Deterministic())
        took = time.process_time() - start
        gram = bins_gram(strategy, order)
        bound = bins_epsilon(gram, sigma, DELTA)
        lower, upper = bins_interval(gram, sigma, DELTA, MonteCarlo(samples=MANY, failure=1e-6))
        line = {"bands": bands, "epsilon": epsilon, "sigma": sigma, "bound": bound, "lower": lower, "upper": upper}
        _append(TABLE, line | {"s": took})


def _long(bands: int | None) -> Strategy:
    k, b = SHAPE
    order, work = FixedOrder(k * b, k, b), W.prefix_sum(k * b)
    if bands is None:
        return fit("blt", work, order, buffers=2)
    return Independent(k * b) if bands == 1 else fit("toeplitz", work, order, bands=bands)


def write() -> None:
    """Both tables, on the page."""
    for name, lines in tables().items():
        _put_between(name, lines)


def tables() -> dict[str, list[str]]:
    """Both tables of the page, from the files."""
    long = ["| C | epsilon | bound | interval | above its lower end | calibrated in |", "|---|---|---|---|---|---|"]
    for line in sorted(_read(TABLE), key=lambda line: LONG.index((line["bands"], line["epsilon"]))):
        name = {None: "BLT, 2 buffers", 1: "independent"}.get(line["bands"], f"{line['bands']} bands")
        long.append(
            f"| {name} | {line['epsilon']:g} | {line['bound']:.3f} | {line['lower']:.3f} to {line['upper']:.3f} | "
            f"{line['bound'] / line['lower'] - 1:.1%} | {line['s']:.0f} s |"
        )
    found = _together(range(CASES))
    lines = ["| C | settings | below | within 5 % of the upper end | of the lower | median, worst over the lower |"]
    lines += ["|---|---|---|---|---|---|"]
    for family in FAMILIES:
        for samples in (FEW, MANY):
            some = [c for c in found if c["family"] == family and c["samples"] == samples and c["upper"] > SMALL]
            if not some:
                continue
            upper, lower = (np.array([c["bound"] / max(c[end], SMALL) for c in some]) for end in ("upper", "lower"))
            below = sum(c["bound"] < c["lower"] for c in some)
            lines.append(
                f"| {family}, {samples} samples | {len(some)} | {below} | {np.mean(upper <= CLOSE):.0%} | "
                f"{np.mean(lower <= CLOSE):.0%} | {np.median(lower) - 1:.1%}, {lower.max() - 1:.1%} |"
            )
    return {"long runs": long if len(long) > 2 else ["Not measured yet."], "settings": lines}


def _put_between(name: str, lines: list[str]) -> None:
    """The lines in their place on the page."""
    text = PAGE.read_text(encoding="utf-8")
    mark = rf"(<!-- {name} -->\n).*?(\n<!-- end of {name} -->)"
    assert re.search(mark, text, re.DOTALL), f"the page has no place for {name}"
    put = "\n" + "\n".join(lines) + "\n"
    PAGE.write_text(re.sub(mark, lambda m: m[1] + put + m[2], text, flags=re.DOTALL), encoding="utf-8")


def _together(cases: range) -> list[dict[str, Any]]:
    held = {line["case"]: line for line in _read(BOUNDS)}
    found = []
    for line in _read(INTERVALS):
        bound = held.get(line["case"])
        if line["case"] in cases and bound is not None:
            assert math.isclose(bound["largest"], line["largest"], rel_tol=1e-6), f"another C in case {line['case']}"
            found.append({**line, **bound})
    return found


def _setting(case: int) -> tuple[dict[str, Any], Floats]:
    rng = np.random.default_rng([20261122, case])
    family = FAMILIES[case % len(FAMILIES)]
    b, k = int(rng.integers(4, 41)), int(rng.integers(1, 11))
    bands = int(rng.integers(2, b + 1))
    G = bins_gram(_strategy(family, b, k, bands), BallsInBins(k, b))
    largest = float(G.max())
    sigma = math.sqrt(largest) * math.exp(rng.uniform(math.log(0.4), math.log(5.0)))
    named = {"case": case, "family": family, "b": b, "k": k, "bands": bands if family == "banded" else None}
    return {**named, "sigma": sigma, "largest": largest}, G


def _strategy(family: str, b: int, k: int, bands: int) -> Strategy:
    n = b * k
    match family:
        case "independent":
            return Independent(n)
        case "banded":
            return fit("toeplitz", W.prefix_sum(n), FixedOrder(n, k, b), bands=bands)
        case "blt":
            return fit("blt", W.prefix_sum(n), FixedOrder(n, k, b), buffers=2)
        case "tree":
            return Tree(n)
        case _:
            raise ValueError(f"unknown family {family!r}")


def _read(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def _append(path: Path, line: dict[str, Any]) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    {"intervals": lambda: intervals(CASES, many=True), "bounds": lambda: bounds(CASES), "table": table, "write": write}[
        sys.argv[1]
    ]()
