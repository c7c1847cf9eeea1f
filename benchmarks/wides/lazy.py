"""Lazy noise against dense noise: the same mechanism, so the same loss curves; what a flush costs; a resume.

Curves: a table of 2000 x 16, 200 steps of 64 pairs with 8 negatives, epsilon 8, under 12 keys each way. The loss of a
step's batch is looked at before the step, in four windows of 50 steps; a row is the largest difference of the means of
lazy and dense training over the windows, in standard errors (Welch): below 3.5 where both have one distribution, in 99
of 100 such measurements. The loss after all steps and the flush is compared likewise, and the deviation between keys
by the logarithm of its ratio. A fault is planted besides: lazy training with 0.7 times the noise, which the same
statistic must tell.

Flush: the seconds of bringing every row of a table of 100 000 x 100 up to date, beside one step of dense noise.
Resume: a run of 40 steps, and one that is saved, dropped and gone on with in its midst: the largest difference.
"""

import hashlib
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

import anyorder as ao
from benchmarks._report import Row
from benchmarks.peers.wide_model import Batches, Pairs, losses
from benchmarks.peers.wide_task import IDS

ROWS, WIDTH, BATCH, STEPS, WINDOWS, KEYS = 2000, 16, 64, 200, 4, 12
LR, LIMIT = 20.0, 3.5
MECHANISMS = ("independent", "blt, 2 buffers", "banded inverse, 4 bands", "tree")
Floats = NDArray[np.float64]


def rows(quick: bool) -> Iterator[Row]:
    """Curves of each mechanism, the planted fault, flush, resume."""
    for mechanism in MECHANISMS[1:2] if quick else MECHANISMS:
        yield from _curves(mechanism, keys=4 if quick else KEYS)
    yield from _flush(10_000 if quick else 100_000)
    yield from _resume()


# -- curves ----------------------------------------------------------------------------------------------------------


def _curves(mechanism: str, keys: int) -> Iterator[Row]:
    dense, lazy, other = (
        np.array([_curve(mechanism, sparse, noise, key) for key in range(keys)])
        for sparse, noise in ((False, 1.0), (True, 1.0), (True, 0.7))
    )
    name = f"lazy against dense, {mechanism}"
    ours, peer = float(lazy[:, -1].mean()), float(dense[:, -1].mean())
    yield Row(f"{name}: loss after the flush", ours, peer, peer / ours, "loss")
    found = apart(lazy, dense)
    yield Row(f"{name}: difference ({'met' if found < LIMIT else 'MISSED'}: below)", found, LIMIT, None, "st. errors")
    planted = apart(other, dense)
    told = "met" if planted > LIMIT else "MISSED"
    yield Row(f"{name}: with the planted fault ({told}: above)", planted, LIMIT, None, "st. errors")


def apart(one: Floats, other: Floats) -> float:
    """Of (keys, windows + 1) each the largest difference, of means or of the last deviations, in standard errors."""
    error = np.sqrt(one.var(0, ddof=1) / len(one) + other.var(0, ddof=1) / len(other))
    means = np.abs(one.mean(0) - other.mean(0)) / error
    spread = abs(np.log(one[:, -1].std(ddof=1) / other[:, -1].std(ddof=1)))
    return float(max(means.max(), spread / np.sqrt(0.5 / (len(one) - 1) + 0.5 / (len(other) - 1))))


def _curve(mechanism: str, sparse: bool, noise: float, key: int) -> list[float]:
    """Mean loss in each window, and at the end over the batches of the last one."""
    engine, model, optimizer, loader = _private(mechanism, sparse, noise, f"{sparse} {noise} {key}")
    seen = [_step(model, optimizer, ids) for ids in loader]
    if sparse:
        engine.flush()
    model.eval()
    with torch.no_grad():
        last = [float(losses(model(ids)).mean()) for ids in list(_data())[-STEPS // WINDOWS :]]
    return [*np.array(seen).reshape(WINDOWS, -1).mean(1).tolist(), float(np.mean(last))]


def _data() -> Batches:
    """Neighbours are near in number: there is something to learn."""
    random = np.random.default_rng(0)
    ids = random.integers(0, ROWS, (STEPS, BATCH, IDS))
    ids[..., 1] = (ids[..., 0] // 20 * 20 + random.integers(0, 20, (STEPS, BATCH))) % ROWS
    return Batches(ids)


def _private(mechanism: str, sparse: bool, noise: float, name: str, path: Path | None = None) -> Any:
    model: Any = Pairs(ROWS, WIDTH, sparse=sparse)
    plan = ao.plan(
        dataset_size=BATCH * STEPS, batch_size=BATCH, epochs=1, epsilon=8, delta=1e-5, mechanism=mechanism
    )  # fmt: skip
    plan = replace(plan, sigma=noise * plan.sigma)
    engine = ao.PrivacyEngine(plan, checkpoint=path, key=hashlib.sha256(name.encode()).digest())  # no secrets here
    return engine, *engine.make_private(model, torch.optim.SGD(model.parameters(), lr=LR), _data().loader())


def _step(model: Any, optimizer: Any, ids: torch.Tensor) -> float:
    optimizer.zero_grad()
    loss = losses(model(ids)).mean()
    loss.backward()
    optimizer.step()
    return float(loss.detach())


# -- flush and resume ------------------------------------------------------------------------------------------------


def _flush(size: int) -> Iterator[Row]:
    """After 30 steps, which leave most rows behind."""
    steps, batch = 30, 64
    ids = np.random.default_rng(0).integers(0, size, (steps, batch, IDS))
    for mechanism in ("independent", "blt, 2 buffers", "tree"):
        spent: list[float] = []
        for sparse in (True, False):
            model: Any = Pairs(size, 100, sparse=sparse)
            optimizer: Any = torch.optim.SGD(model.parameters(), lr=1.0)
            plan = ao.plan(
                dataset_size=batch * steps, batch_size=batch, epochs=1, epsilon=8, delta=1e-5, mechanism=mechanism
            )  # fmt: skip
            engine = ao.PrivacyEngine(plan)
            model, optimizer, loader = engine.make_private(model, optimizer, Batches(ids).loader())
            start = time.process_time()
            for given in loader:
                start = start if sparse else time.process_time()
                _step(model, optimizer, given)
            if sparse:
                start = time.process_time()
                engine.flush()
            spent.append(1000 * (time.process_time() - start))
        title = f"flush of {size} x 100, {mechanism}; peer: one dense step"
        yield Row(title, spent[0], spent[1], spent[1] / spent[0], "CPU ms")


def _resume() -> Iterator[Row]:
    for mechanism in ("blt, 2 buffers", "tree"):
        whole, parted = (_trained(mechanism, stops) for stops in ((40,), (13, 40)))
        yield Row(f"resume, {mechanism}: largest difference", float((whole - parted).abs().max()), 0.0, None, "")


def _trained(mechanism: str, stops: tuple[int, ...]) -> torch.Tensor:
    """The table after the last stop; at each the run is saved, and another one goes on from the file."""
    with tempfile.TemporaryDirectory() as folder:
        for stop in stops:
            path = Path(folder) / "run.pt"
            engine, model, optimizer, loader = _private(mechanism, True, 1.0, "resume", path)
            for ids in loader:
                _step(model, optimizer, ids)
                if engine.step == stop:
                    break
            engine.save()
            table = model.table if stop == stops[-1] else None
            if table is not None:
                engine.flush()
                return table.weight.detach().clone()
            engine.close()
    raise AssertionError("there is a last stop")
