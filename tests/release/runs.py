"""A small plan, its units and totals, and what a release of it must give."""

import numpy as np

from anyorder.noise import NoiseSource, NoiseStream
from anyorder.participation import FixedOrder
from plans import flat_plan

KEY = bytes(range(32))
N, SIZE = 8, 12
RULE = FixedOrder(N, k=2, b=4)


def planned(mechanism="tree", **changes):
    settings = {"participation": RULE, "batch_size": 4, "epsilon": 4, "delta": 1e-5, "mechanism": mechanism}
    return flat_plan(**{**settings, **changes})


def units(t):
    return [2 * (t % 4), 2 * (t % 4) + 1]


def total(t, shape=(SIZE,), dtype=np.float32):
    return np.random.default_rng(t).normal(size=shape).astype(dtype)


def taken(release, steps, **how):
    return [release.step(units(t), total(t, **how)) for t in range(release.steps_taken, steps)]


def expected(plan, dtype=np.float32):
    stream = NoiseStream(plan.strategy, NoiseSource(KEY).derive(plan.digest.encode()), plan.noise_std, SIZE)
    rows = []
    for t in range(plan.n):
        row = total(t).astype(dtype)
        stream.add_to([row], 1 / plan.batch_size)
        rows.append(row)
    return rows


def state(release):
    """All that a step may change."""
    return release._noise.state_dict()["t"], release.ledger.to_bytes(), release.clip_norm


def copied(journal):
    """Puts a copy in the place of a file, as a backup that is brought back would be."""
    data = journal.read_bytes()
    journal.unlink()
    journal.write_bytes(data)
