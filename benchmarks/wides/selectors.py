"""Selectors beside the same selection over all V rows, in NumPy: 200 touched rows, about 100 chosen.

counts ..     milliseconds to choose the rows whose count with Gaussian noise reaches a threshold
top ..        milliseconds to choose the 100 largest scores with Gumbel noise

The peer is what a dense mechanism does, float64, one core: V normals, added and compared; or V Gumbels, added and
partitioned. Both choose by the same law. The ratio is dense / ours.
"""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtri

from anyorder.noise import NoiseSource
from anyorder.sparse.select import select_counts, select_top
from benchmarks._report import Row, seconds

TOUCHED, CHOSEN, STEPS = 200, 100, 50


def rows(quick: bool) -> Iterator[Row]:
    """Both selectors at each size of the table."""
    for num_rows in (10**5,) if quick else (10**5, 10**7):
        yield from _at(num_rows)


def _at(num_rows: int) -> Iterator[Row]:
    rng = np.random.default_rng(0)
    source = NoiseSource(bytes(32))
    ids = rng.choice(num_rows, size=TOUCHED, replace=False)
    values = rng.uniform(0, 4, size=TOUCHED)
    threshold = -float(ndtri(CHOSEN / num_rows))  # 100 false positives
    full = np.zeros(num_rows)
    full[ids] = values

    def counts() -> None:
        for step in range(STEPS):
            select_counts((ids, values), threshold, 1.0, num_rows=num_rows, source=source, step=step)

    def top() -> None:
        for step in range(STEPS):
            select_top((ids, values), CHOSEN, 1.0, num_rows=num_rows, source=source, step=step)

    def dense_counts() -> NDArray[np.intp]:
        return np.flatnonzero(full + rng.standard_normal(num_rows) >= threshold)

    def dense_top() -> NDArray[np.intp]:
        return np.argpartition(-full - rng.gumbel(size=num_rows), CHOSEN - 1)[:CHOSEN]

    repeats = 10 if num_rows <= 10**5 else 3
    for name, sparse, dense in (("counts", counts, dense_counts), ("top", top, dense_top)):
        ours = seconds(sparse, 5) / STEPS * 1e3
        peer = seconds(dense, repeats) * 1e3
        yield Row(f"{name}: {TOUCHED} touched of {num_rows} rows, dense beside it", ours, peer, peer / ours, "ms")
