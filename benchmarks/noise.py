"""Noise added to a gradient: nanoseconds per element and step, ours beside others, measured in the same run.

    python -m benchmarks.noise                       every part, in torch's number of threads (OMP_NUM_THREADS)
    python -m benchmarks.noise --quick               small vectors
    python -m benchmarks.noise --only statistics     10^9 normals: moments, tails, correlations, in standard deviations

Parts: `torch` (eager torch, and the tree as published with DP-FTRL), `peers` (jax_privacy, opake, in environments of
their own, made on first use), `small` (a step over ten coordinates: all that is not arithmetic; and over 10^4), `step`
(`optimizer.step()` of an engine), `release` (`Release.step`), `bandwidth` (beside adding one vector to another, bands
together and one by one), `memory` (what a process of 10^9 coordinates holds), `statistics`.
Where ours is measured beside a peer, both have the same matrix and number of threads.
With one thread (OMP_NUM_THREADS=1) times are those of the processor, which other work disturbs less; else they are
those of the clock. Targets are least ratios.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

import anyorder as ao
from anyorder.noise import NoiseSource, NoiseStream
from anyorder.noise.compiled import kernel
from anyorder.noise.discrete import GridStream
from anyorder.strategy import BLT, BandedInverse, Independent, Strategy, ToeplitzBanded, Tree
from anyorder.workload import prefix_sum
from benchmarks._peers import JAX_PRIVACY, OPAKE, interpreter
from benchmarks._report import Row, judged, options, show
from benchmarks.noise_statistics import statistics
from benchmarks.peers import torch_noise

DECAYS, SCALES = [0.99, 0.9, 0.6, 0.2], [0.02, 0.05, 0.1, 0.1]
N = 1 << 20  # steps of a plan: more than are run
WARM = 66  # steps before a banded stream is full


def main() -> None:
    """Measure and print."""
    chosen = options(__doc__ or "", only=PARTS)
    for part in chosen.only or PARTS:
        show(PARTS[part](chosen.quick), chosen.json)


def beside_torch(quick: bool) -> Iterator[Row]:
    """Eager torch, one vector; a model of many parameters for the published tree."""
    for size in (10**6,) if quick else (10**7, 10**8):
        gradient = torch.zeros(size)
        cases = [("independent", Independent(N), torch_noise.Independent(size, 1.0), 8.0 if _wide() else 3.0)]
        if size <= 10**7:
            cases += [
                ("BLT, 4 buffers", BLT(DECAYS, SCALES, N), torch_noise.BLT(DECAYS, SCALES, size, 1.0), 6.0),
                ("banded, 16", banded(16), torch_noise.Banded(banded(16).coefficients.tolist(), size, 1.0), 2.0),
            ]
        for name, strategy, peer, target in cases:
            label = f"{name}, {size:.0e}, beside torch"
            yield _with(target, race(label, _ours(strategy, [gradient]), partial(peer.add_to, gradient), size))
    shapes = [torch.Size(s) for s in [(64, 27), (64,)] + 60 * [(128, 128, 3), (128,)] + [(1000, 512), (1000,)]]
    gradients = [torch.zeros(shape) for shape in shapes]
    size = sum(g.numel() for g in gradients)
    tree = torch_noise.PublishedTree(shapes, 1.0)
    label = f"tree, {size:.0e}, beside the published"
    yield _with(8.0, race(label, _ours(Tree(N), gradients), partial(tree.add_to, gradients), size, steps=64))
    for rounds in (12, 20):
        gradient = torch.zeros(10**6 if quick else 10**7)
        work = _ours(Independent(N), [gradient], rounds)
        yield Row(f"independent, ChaCha{rounds}", _time(work, len(gradient)), None, None, "ns/element")


def beside_peers(quick: bool) -> Iterator[Row]:
    """The same matrices in jax_privacy and opake."""
    size, steps = (10**6, 3) if quick else (10**7, 3)
    found = peer_times(JAX_PRIVACY, "jax_privacy", "jax_privacy_noise.py", size, steps)
    strategies: dict[str, Strategy] = {
        "independent": Independent(N),
        "BLT, 4 buffers": BLT(DECAYS, SCALES, N),
        "banded, 16": banded(16),
        "banded, 64": banded(64),
    }
    times = {}
    for name, strategy in strategies.items():
        times[name] = _time(_ours(strategy, [torch.zeros(size)], warm=WARM), size)
        yield _with(20.0, _row(f"{name}, {size:.0e}, beside jax_privacy", times[name], found[name]))
    for name, peer in peer_times(OPAKE, "opake", "opake_noise.py", size, steps, torch.get_num_threads()).items():
        yield _with(4.0, _row(f"{name}, {size:.0e}, beside opake", times[name], peer))


def bandwidth(quick: bool) -> Iterator[Row]:
    """Independent noise beside adding a vector that is there; rows kept against rows made again; exact integers."""
    size = 10**6 if quick else 10**8
    gradient, other = torch.zeros(size), torch.ones(size)
    work = _ours(Independent(N), [gradient])
    yield _with(0.5, race(f"independent, {size:.0e}, beside axpy", work, lambda: gradient.add_(other, alpha=0.5), size))
    size //= 10
    inverse = inverse_of(16)
    for name, memory in (("rows made again", None), ("rows kept", 4 * 17 * (size + 512))):
        made = NoiseStream(inverse, NoiseSource.random(), 1.0, size, memory=memory)
        work = partial(made.add_to, [gradient[:size]])
        for _ in range(20):
            work()
        yield Row(f"banded inverse, 16, {size:.0e}, {name}", _time(work, size), None, None, "ns/element")
    for p in (16, 32):
        alone = NoiseStream(banded(p), NoiseSource.random(), 1.0, size, memory=4 * (p - 1) * (size + 512))
        one, together = partial(alone.add_to, [gradient[:size]]), _ours(banded(p), [gradient[:size]], warm=WARM)
        for _ in range(WARM):
            one()
        yield race(f"banded, {p}, {size:.0e}, steps made together, beside one by one", together, one, size, p // 4)
    size = 10**5 if quick else 10**6
    for name, strategy in (("independent", Independent(N)), ("tree", Tree(1024)), ("banded inverse, 4", inverse_of(4))):
        exact = GridStream(strategy, NoiseSource.random(), 1.0, 2.0**-20, size)
        yield Row(f"{name}, {size:.0e}, exact integers", _time(exact.next, size, 8), None, None, "ns/element")


def small(quick: bool) -> Iterator[Row]:
    """A step over two tensors of ten coordinates in all."""
    tensors, repeats = [torch.zeros(3), torch.zeros(7)], 5 if quick else 15
    strategies = (Independent(N), BLT(DECAYS, SCALES, N), banded(16), inverse_of(16), Tree(N, "online"))
    names = ("independent", "BLT, 4 buffers", "banded, 16", "banded inverse, 16", "tree, online")
    for name, strategy in zip(names, strategies, strict=True):
        took = _time(_ours(strategy, tensors, warm=WARM), 1, 50, repeats) / 1000
        yield Row(f"{name}, a step over 10", took, None, None, "us")
    for name, strategy in zip(names[:3], strategies[:3], strict=True):
        gradient = [torch.zeros(10**4)]
        took = _time(_ours(strategy, gradient, warm=WARM), 1, 48, repeats) / 1000
        yield Row(f"{name}, a step over 1e+04", took, None, None, "us")


def release(quick: bool) -> Iterator[Row]:
    """`Release.step` of one large total, checked and copied, beside its noise alone, added in place."""
    size, rounds = 10**6 if quick else 10**8, 40
    total, gradient = torch.zeros(size), torch.zeros(size)
    plan = ao.plan(dataset_size=rounds, batch_size=1, epochs=1, epsilon=8.0, delta=1e-5, mechanism="independent")
    made, unit = ao.Release(plan, size), iter(range(rounds))
    name = f"Release.step, {size:.0e}, beside its noise alone"
    yield race(name, lambda: made.step([next(unit)], total), _ours(Independent(N), [gradient]), size)


def inverse_of(bands: int) -> BandedInverse:
    """The banded inverse square root of 1024 prefix sums."""
    return BandedInverse.from_square_root(prefix_sum(1024), bands)


def memory(quick: bool) -> Iterator[Row]:
    """Bytes that a process holds at most beyond what it held before, over those of the gradient."""
    size = 10**7 if quick else 10**9
    makes = {"tree": "Tree(64)", "banded inverse, 32": "BandedInverse.from_square_root(prefix_sum(64), 32)"}
    for name, make in makes.items():
        code = _MEMORY.format(make=make, size=size)
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        held = float(done.stdout)
        yield Row(f"{name}, {size:.0e}: memory, gradient included", held / 1e9, size * 4e-9, size * 4 / held, "GB")


_MEMORY = """
import resource, torch
from anyorder.noise import NoiseSource, NoiseStream; from anyorder.noise.discrete import GridStream
from anyorder.strategy import BandedInverse, Tree
from anyorder.workload import prefix_sum

def peak(size):
    gradient = torch.zeros(size)
    stream = NoiseStream({make}, NoiseSource.random(), 1.0, size)
    for _ in range(3):
        stream.add_to([gradient])
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

print(-peak(10) + peak({size}))
"""


def race(name: str, ours: Callable[[], object], peer: Callable[[], object], size: int, steps: int = 1) -> Row:
    """Both in turn, so that what disturbs the machine disturbs both."""
    pairs = [(_time(ours, size, steps, 1), _time(peer, size, steps, 1)) for _ in range(5)]
    return _row(name, min(a for a, _ in pairs), min(b for _, b in pairs))


def peer_times(packages: tuple[str, ...], module: str, script: str, *arguments: int) -> dict[str, float]:
    """What a peer's script prints: nanoseconds per element and step."""
    one = {"XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false"} if torch.get_num_threads() == 1 else {}
    done = subprocess.run(
        [interpreter(*packages, module=module), Path(__file__).parent / "peers" / script, *map(str, arguments)],
        capture_output=True, text=True, check=True, env=os.environ | one,
    )  # fmt: skip
    return {name: float(found) for name, found in json.loads(done.stdout).items()}


def banded(p: int) -> ToeplitzBanded:
    """The first p bands of the square root of the prefix sum."""
    return ToeplitzBanded(ToeplitzBanded.from_square_root(prefix_sum(1024), p).coefficients, N)


def _ours(strategy: Strategy, tensors: list[torch.Tensor], rounds: int = 8, warm: int = 18) -> Callable[[], None]:
    stream = NoiseStream(strategy, NoiseSource.random(rounds), 1.0, sum(x.numel() for x in tensors))
    for _ in range(warm):
        stream.add_to(tensors)
    return partial(stream.add_to, tensors)


def _time(work: Callable[[], object], size: int, steps: int = 1, repeats: int = 3) -> float:
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    work()
    times = []
    for _ in range(repeats):
        start = clock()
        for _ in range(steps):
            work()
        times.append(clock() - start)
    return min(times) / (size * steps) * 1e9


def _with(target: float, row: Row) -> Row:
    """The row, and whether it meets its target."""
    assert row.ratio is not None
    return replace(row, name=judged(row.name, target, row.ratio))


def _wide() -> bool:
    """Whether the kernel has registers of 512 bits."""
    found = kernel()
    return found is not None and found.name == "avx512"


def _row(name: str, ours: float, peer: float) -> Row:
    return Row(name, ours, peer, peer / ours, "ns/element")


def whole_step(quick: bool) -> Iterator[Row]:
    """`optimizer.step()` of an engine beside noise alone plus optimizer alone: at most 1.5 times these."""
    size, rounds = 10**6 if quick else 10**7, 12
    for count in (1, 10, 100):
        model, plain = (torch_noise.Sums(size, count) for _ in range(2))
        data = TensorDataset(torch.ones(2 * rounds, 1))
        plan = ao.plan(dataset_size=len(data), batch_size=2, epochs=1, epsilon=8.0, delta=1e-5, mechanism="independent")
        optimizer, loader = torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(data, batch_size=2, shuffle=True)
        times = list(_step_times(*ao.PrivacyEngine(plan).make_private(model, optimizer, loader)))
        gradients = [torch.zeros_like(p) for p in plain.parameters()]
        for p, gradient in zip(plain.parameters(), gradients, strict=True):
            p.grad = gradient
        parts = _time(_ours(Independent(N), gradients), size, repeats=rounds)
        parts += _time(torch.optim.SGD(plain.parameters(), lr=0.1).step, size, repeats=rounds)
        name = f"optimizer.step(), {size:.0e} in {count}, beside noise + SGD"
        yield _with(1 / 1.5, _row(name, min(times) / size * 1e9, parts))


def _step_times(model: torch.nn.Module, optimizer: torch.optim.Optimizer, loader: Any) -> Iterator[float]:
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    for (x,) in loader:
        optimizer.zero_grad()
        model(x).mean().backward()
        start = clock()
        optimizer.step()
        yield clock() - start


PARTS: dict[str, Callable[[bool], Iterator[Row]]] = {
    "torch": beside_torch,
    "peers": beside_peers,
    "small": small,
    "step": whole_step,
    "release": release,
    "bandwidth": bandwidth,
    "memory": memory,
    "statistics": statistics,
}

if __name__ == "__main__":
    main()
