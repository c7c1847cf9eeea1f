"""Factorisations: how good, how long, beside what others reach.

    python -m benchmarks.factorize            certified optima, targets, jax_privacy's dense optimizer, all references
    python -m benchmarks.factorize --quick    small sizes
    python -m benchmarks.factorize --only references    every reference value beside ours, into docs/references.md
    python -m benchmarks.factorize --only amplified     secret orders: hours; with --write, into docs/compared.md
    python -m benchmarks.factorize --only fits          fits to amplified claims; with --write, into docs/compared.md
    python -m benchmarks.factorize --only bounds        bounds for balls in bins beside certified intervals
    python -m benchmarks.factorize --only planner       answers of the planner's page after the first, beside a second

Errors are root mean square (or root maximum), sensitivity included; times are of one run after one to warm up, nothing
read from disk. jax_privacy runs in an environment of its own, made on first use.
"""

import argparse
import functools
import json
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from anyorder import workload as W
from anyorder.app.planner_page.answers import PlanQuestion, answer
from anyorder.optimize import choose, fit, lower_bound
from anyorder.participation import EpochShuffle, FixedOrder, MinSeparation, SingleEpoch
from anyorder.patterns import Participation
from anyorder.strategy import BLT, Banded, BandedInverse, SquareRoot, Strategy, ToeplitzBanded, Tree, registry
from anyorder.strategy.dense import fit_dense
from benchmarks import amplified, bins, fits, references
from benchmarks._peers import interpreter
from benchmarks._report import Row, add_options, seconds, show

PACKAGE = "jax-privacy==2.0.0"
SAME = 1e-5  # relative gap of squared losses to which both sides of the race go


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser, PARTS)
    parser.add_argument(
        "--write", action="store_true", help="of amplified, and of fits: the tables of docs/compared.md"
    )
    chosen = parser.parse_args()
    os.environ["ANYORDER_CACHE"] = "off"
    parts = chosen.only or [part for part in PARTS if part not in ("amplified", "bounds", "fits")]
    show(rows(parts, quick=chosen.quick), chosen.json)
    for write in [WRITES[part] for part in parts if part in WRITES] if chosen.write else []:
        write()


def rows(parts: list[str], *, quick: bool) -> Iterator[Row]:
    """The measurements of the named parts."""
    for part in parts:
        yield from PARTS[part](quick)


def optima(quick: bool) -> Iterator[Row]:
    """Certified dense optima: the relative gap of squared losses, and the time to it. The peer is the target."""
    for n, limit in ((256, 10.0),) if quick else ((1024, 10.0), (2048, 90.0)):
        yield from _certified(f"prefix n={n}", W.prefix_sum(n), SingleEpoch(n), limit)
    n = 256 if quick else 1024
    cooled = W.momentum(n, 0.95, W.linear_cooldown(n))
    yield from _certified(f"momentum 0.95, cooldown n={n}", cooled, SingleEpoch(n), 30.0)
    n, k = (200, 5) if quick else (1000, 10)
    yield from _certified(f"prefix n={n}, {k} epochs", W.prefix_sum(n), FixedOrder(n, k, n // k), None)


def _certified(name: str, A: W.Workload, participation: Participation, limit: float | None) -> Iterator[Row]:
    start = time.perf_counter()
    found = fit_dense(A, participation)
    took = time.perf_counter() - start
    yield Row(f"{name}: gap", found.gap, 1e-6, 1e-6 / found.gap, "relative")
    yield Row(f"{name}: time", took, limit, None if limit is None else limit / took, "s")


def targets(quick: bool) -> Iterator[Row]:
    """Errors of structured fits beside the published ones."""
    k10, k20, k6 = MinSeparation(1000, 100, 10), MinSeparation(2000, 100, 20), MinSeparation(2052, 342, 6)
    cases: list[tuple[str, Participation, float, dict[str, int]]] = [
        ("blt", k10, 12.46, {"buffers": 1}),
        ("blt", k10, 12.20, {"buffers": 2}),
        ("toeplitz", k10, 11.58, {"bands": 100}),
        ("banded_inverse", k10, 12.24, {"bands": 16}),
        ("blt", k20, 21.38, {"buffers": 2}),
        ("blt", k6, 9.19, {"buffers": 2}),
    ]
    if not quick:
        cases += [("dense", FixedOrder(1000, 10, 100), 10.55, {}), ("banded", k10, 11.35, {"bands": 100})]
    for kind, participation, target, size in cases:
        n, k = participation.n, participation.max_participations
        label = f"{kind} {' '.join(map(str, size.values()))}, n={n}, k={k}"
        yield from _fitted(
            label, W.prefix_sum(n), participation, target, lambda a, p, s=size, c=kind: fit(c, a, p, **s)
        )
    momentum = W.momentum(1000, 0.9)
    fixed = FixedOrder(1000, 10, 100)
    yield from _fitted("blt 2, momentum 0.9", momentum, fixed, 92.1, functools.partial(fit, "blt", buffers=2))
    yield from _against_the_root(1000, (1.180, 1.018, 1.002, 1.0005))
    if not quick:
        yield from _against_the_root(2000, (1.236, 1.027, 1.004, 1.001))
        million = W.prefix_sum(1_000_000)
        took = seconds(functools.partial(fit, "blt", million, SingleEpoch(million.n), buffers=4), 1)
        yield Row("blt 4, n=1000000: time", took, 60.0, 60.0 / took, "s")
        long, far = BLT([0.99999, 0.9], [0.01, 0.1], 10_000_000), MinSeparation(10_000_000, 1000, 100)
        took = seconds(lambda: registry.rmse(long, W.prefix_sum(long.n), far), 1)
        yield Row("blt 2, n=10000000: error and sensitivity, time", took, None, None, "s")


def _fitted(
    label: str, A: W.Workload, participation: Participation, target: float, make: Callable[..., Strategy]
) -> Iterator[Row]:
    start = time.perf_counter()
    strategy = make(A, participation)
    took = time.perf_counter() - start
    loss = registry.rmse(strategy, A, participation)
    yield Row(f"{label} ({took:.2f} s)", loss, target, target / loss, "rmse")


def _against_the_root(n: int, limits: tuple[float, ...]) -> Iterator[Row]:
    A, participation = W.prefix_sum(n), SingleEpoch(n)
    best = registry.max_error(SquareRoot(n), A, participation)
    for buffers, limit in enumerate(limits, start=1):
        ratio = registry.max_error(fit("blt", A, participation, "max", buffers=buffers), A, participation) / best
        yield Row(f"blt {buffers} over the square root, n={n}", ratio, limit, limit / ratio, "max error")


def choices(quick: bool) -> Iterator[Row]:
    """What `choose` finds for 5 epochs, its ratio to the lower bound, and its time."""
    n = 400 if quick else 1200
    shuffled = EpochShuffle(5, n // 5)
    prefix = [FixedOrder(n, 5, n // 5), shuffled, MinSeparation(n, n // 6, 5)]
    if not quick:
        prefix += [FixedOrder(100_000, 5, 20_000)]
    cases: list[tuple[str, W.Workload, Participation]] = [("prefix", W.prefix_sum(order.n), order) for order in prefix]
    cases += [("momentum 0.9", W.momentum(n, 0.9), shuffled)]
    for what, A, order in cases:
        start = time.perf_counter()
        best = choose(A, order)[0]
        took = time.perf_counter() - start
        bound = lower_bound(A, order, resolution=512 if quick else 1536)
        name = f"choose, {what}, {type(order).__name__} n={order.n}: {best.name} ({took:.1f} s)"
        yield Row(name, best.loss, bound, bound / best.loss, "rmse; peer: bound")
        if order is shuffled:  # the best of all C that start anew in every epoch
            dense = registry.rmse(fit("dense", A, order), A, order)
            yield Row(f"{best.name} beside the dense restarted C, {what}", best.loss, dense, dense / best.loss, "rmse")


def chosen(quick: bool) -> Iterator[Row]:
    """Ratio to the lower bound of what `choose` takes first; the peer is what it took before low ranks were tried."""
    cases: list[tuple[str, W.Workload, Participation, float, float]] = [
        ("prefix", W.prefix_sum(256), SingleEpoch(256), 32.0, 1.0173),
        ("momentum 0.9", W.momentum(256, 0.9), SingleEpoch(256), 32.0, 1.0185),
        ("prefix", W.prefix_sum(256), FixedOrder(256, 4, 64), 32.0, 1.0746),
        ("prefix, cost 96", W.prefix_sum(256), FixedOrder(256, 4, 64), 96.0, 1.0746),
    ]
    for what, A, order, cost, before in cases:
        best = choose(A, order, max_cost=cost)[0]
        k = order.max_participations
        name = f"chosen, {what}, n=256, k={k}: {best.name} ({best.state_rows} vectors)"
        yield Row(name, best.ratio, before, before / best.ratio, "of the bound")
    yield from _choice_times(quick)


def _choice_times(quick: bool) -> Iterator[Row]:
    """Processor time of `choose`, nothing read from disk; the peer is the target."""
    for n, limit in ((1000, 2.0),) if quick else ((1000, 2.0), (10_000, 5.0)):
        for A in (W.prefix_sum(n), W.momentum(n, 0.9)):
            for order in (FixedOrder(n, 10, n // 10), EpochShuffle(10, n // 10), MinSeparation(n, n // 10, 10)):
                start = time.process_time()
                choose(A, order)
                took = time.process_time() - start
                name = f"choose, n={n}, momentum {A.momentum:g}, {type(order).__name__}: processor time"
                yield Row(name, took, limit, limit / took, "s")


def errors(quick: bool) -> Iterator[Row]:
    """Processor time of `ao.rmse`, sensitivity included, over many steps; the peer is the target."""
    n = 6000 if quick else 100_000
    series = SquareRoot(n).toeplitz_coefficients(64)
    bands = series[:, None] * (1 + 0.1 * np.cos(np.arange(n)))  # of one's own in every column
    bands[np.add.outer(np.arange(64), np.arange(n)) >= n] = 0.0
    strategies: dict[str, Strategy] = {
        "BLT, 4 buffers": BLT([0.999, 0.9, 0.5, 0.1], [0.01, 0.05, 0.1, 0.1], n),
        "banded Toeplitz, 64 bands": ToeplitzBanded(series, n),
        "banded, 64 bands": Banded(bands),
        "banded inverse, 64 bands": BandedInverse.from_square_root(W.prefix_sum(n), 64),
        "tree": Tree(n, "full"),
    }
    workloads = {
        "prefix": W.prefix_sum(n),
        "momentum": W.momentum(n, 0.9),
        "cosine": W.Workload(n, momentum=0.9, weight_decay=1e-4, learning_rates=W.cosine(n)),
    }
    orders = (FixedOrder(n, 10, n // 10), EpochShuffle(10, n // 10), MinSeparation(n, n // 10, 10))
    for name, strategy in strategies.items():
        for what, A in workloads.items():
            worst = 0.0
            for order in orders:
                start = time.process_time()
                registry.rmse(strategy, A, order)
                worst = max(worst, time.process_time() - start)
            yield Row(f"rmse, n={n}, {what}, {name}: the slowest order", worst, 1.0, 1.0 / worst, "s")


def race(quick: bool) -> Iterator[Row]:
    """Time to the same error for momentum 0.95 with a cooldown, one participation, ours to a certified optimum."""
    n, limit_s = (128, 60) if quick else (512, 600)
    A = W.momentum(n, 0.95, W.linear_cooldown(n))
    start = time.perf_counter()
    found = fit_dense(A, SingleEpoch(n), tolerance=SAME)
    ours = time.perf_counter() - start
    script = Path(__file__).parent / "peers" / "jax_privacy_dense.py"
    done = subprocess.run(
        [interpreter(PACKAGE, module="jax_privacy"), script, str(n), str(found.upper**2), str(limit_s)],
        capture_output=True,
        text=True,
        check=True,
    )
    peer = json.loads(done.stdout)
    name = f"dense, momentum n={n}, beside {PACKAGE}"
    if not peer["reached"]:
        name += f" (stopped {peer['error'] / found.upper**2 - 1:.0e} above)"
    yield Row(name, ours, peer["seconds"], peer["seconds"] / ours, "s")


def planner(quick: bool) -> Iterator[Row]:
    """Seconds for answers of the planner's page to another epsilon, the mechanisms of an order being known."""
    budgets = (0.5, 2.0, 8.0) if quick else (0.5, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0)
    sizes = {"dataset_size": 60_000, "batch_size": 2000 if quick else 500, "epochs": 10, "delta": 1e-5}
    for order in ("shuffled", "fixed", "poisson"):
        list(answer(PlanQuestion(**sizes, epsilon=5.0, order=order)))  # the first
        for epsilon in budgets:
            asked = PlanQuestion(**sizes, epsilon=epsilon, order=order)
            start = time.perf_counter()
            list(answer(asked))
            took = time.perf_counter() - start
            yield Row(f"planner's answer, {order}, epsilon {epsilon:g}", took, 1.0, 1 / took, "s")


PARTS: dict[str, Callable[[bool], Iterator[Row]]] = {
    "optima": optima,
    "targets": targets,
    "choices": choices,
    "chosen": chosen,
    "errors": errors,
    "race": race,
    "references": references.rows,
    "amplified": amplified.rows,
    "bounds": bins.rows,
    "fits": fits.rows,
    "planner": planner,
}
WRITES: dict[str, Callable[[], None]] = {"amplified": amplified.write, "fits": fits.write}


if __name__ == "__main__":
    main()
