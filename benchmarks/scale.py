"""What a step costs for each parameter, unit and rank: measured here, and reckoned for a large run.

    python -m benchmarks.scale             measure on one thread, a minute; print the tables of docs/scale.md
    python -m benchmarks.scale --write     and put them on the page
    python -m benchmarks.scale --quick     small vectors

Seconds of the processor, the least of some runs. Noise: nanoseconds for each number of the gradient and step, and bytes
of state for each number. Units: those of a step, recorded in the ledger, and of a certificate, whose root is over all.
The reckoned table has these numbers times 10^9 parameters, of which each of 64 ranks owns a 64th.
"""

import argparse
import time
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch

import anyorder as ao
from anyorder.ledger import Ledger
from anyorder.noise import NoiseSource, NoiseStream
from anyorder.participation import MinSeparation
from anyorder.strategy import BLT, BandedInverse, Independent, Strategy, ToeplitzBanded, Tree
from benchmarks.wides.page import put

PAGE = Path(__file__).resolve().parents[1] / "docs" / "scale.md"
STEPS = 1 << 17
STRATEGIES: dict[str, Strategy] = {
    "independent": Independent(STEPS),
    "BLT, 4 buffers": BLT([0.99, 0.9, 0.6, 0.2], [0.02, 0.05, 0.1, 0.1], STEPS),
    "banded, 16 bands": ToeplitzBanded(0.8 ** np.arange(16), STEPS),
    "banded inverse, 4 bands": BandedInverse([1.0, -0.5, -0.2, -0.1], STEPS),
    "tree, 2^17 steps": Tree(STEPS),
}
PARAMETERS, RANKS = 10**9, 64
BANDWIDTH = 2e12  # bytes a second of an accelerator's memory: reckoned with, not measured


def main() -> None:
    """Measure, reckon, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="small vectors")
    parser.add_argument("--write", action="store_true", help="put the tables on docs/scale.md")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    noise = {name: _noise(one, 10**6 if chosen.quick else 10**7) for name, one in STRATEGIES.items()}
    tables = {
        "measured": list(_measured(noise, 10**4 if chosen.quick else 10**5)),
        "reckoned": list(_reckoned(noise)),
    }
    for mark, lines in tables.items():
        print("\n".join(lines), end="\n\n")
        if chosen.write:
            put(mark, lines, PAGE)


def _noise(strategy: Strategy, size: int) -> tuple[float, int]:
    """Nanoseconds for each number and step, in the mean over steps, and bytes that are kept for each."""
    stream, gradient = NoiseStream(strategy, NoiseSource(bytes(32)), 1.0, size), [torch.zeros(size)]
    for _ in range(20):  # until a banded stream is full
        stream.add_to(gradient)
    took = _least(lambda: [stream.add_to(gradient) for _ in range(16)], 5) / 16
    return 1e9 * took / size, 4 * strategy.state_rows


def _measured(noise: dict[str, tuple[float, int]], units: int) -> Iterator[str]:
    yield "| measured here, one thread | time | memory |"
    yield "|---|---|---|"
    for name, (ns, kept) in noise.items():
        yield f"| noise, {name} | {ns:.2f} ns for each number and step | {kept} bytes for each number |"
    for words, took, kept in (_record(units), _certificate(units)):
        yield f"| {words} | {1e6 * took / units:.2f} us for each unit | {kept / units:.0f} bytes for each unit |"


def _record(units: int) -> tuple[str, float, float]:
    """A step of so many units in a ledger that has seen none."""
    ids = np.random.default_rng(0).permutation(units)
    ledger = _with_memory(lambda: _ledger(ids))
    return "ledger, a step's units", _least(lambda: _ledger(ids), 3), ledger


def _ledger(ids: "np.ndarray[tuple[int], np.dtype[np.int64]]") -> Ledger:
    ledger = Ledger(MinSeparation(1, 1))
    ledger.record(0, ids)
    return ledger


def _certificate(units: int) -> tuple[str, float, float]:
    plan = ao.plan(order=MinSeparation(1, 1), batch_size=units, epsilon=8, delta=1e-9, mechanism="independent")

    def made() -> ao.Certificate:
        with ao.Release(plan, 1) as release:
            release.step(range(units), np.zeros(1, np.float32))
            return release.certificate()

    kept = _with_memory(made)
    return "certificate, at the end", _least(made, 2), kept


def _with_memory(work: Callable[[], object]) -> float:
    tracemalloc.start()
    kept = work()
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    del kept
    return most


def _least(work: Callable[[], object], repeats: int) -> float:
    times = []
    for _ in range(repeats):
        start = time.process_time()
        work()
        times.append(time.process_time() - start)
    return min(times)


def _reckoned(noise: dict[str, tuple[float, int]]) -> Iterator[str]:
    own = PARAMETERS / RANKS
    yield "| noise of a rank | one thread of the processor, ms | an accelerator's memory, ms at least | state, GB |"
    yield "|---|---|---|---|"
    for name, (ns, kept) in noise.items():
        moved = 8 + kept  # the gradient is read and written, the state read; and written: all buffers, one band
        moved += kept if name.startswith("BLT") else 4 if kept else 0
        yield f"| {name} | {1e-6 * ns * own:.0f} | {1e3 * moved * own / BANDWIDTH:.2f} | {kept * own / 1e9:.2f} |"


if __name__ == "__main__":
    main()
