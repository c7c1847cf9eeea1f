"""The distribution of 10^9 normals: every row a score in standard deviations, and the limit that it should keep."""

from collections.abc import Iterator

import numpy as np
from scipy import stats

from anyorder.noise import NoiseSource
from benchmarks._report import Row

LIMIT = 4.5  # of about 90 scores; 7e-6 each by chance
KEY = b"a fixed key, 32 bytes, for tests"
PIECE = 1 << 22
TAILS = (1, 2, 3, 4, 5, 5.5, 6)
LAGS = (1, 2, 7, 8, 9, 15, 16, 17, 255, 256)


def statistics(quick: bool) -> Iterator[Row]:
    """Moments, tails to 6 sigma, correlations between neighbours, places of a block, rows and keys."""
    total = 10**7 if quick else 10**9
    pieces = -(-total // PIECE)
    source, other = NoiseSource(KEY), NoiseSource(KEY[::-1])
    sums, tails, lags = np.zeros(6), np.zeros((len(TAILS), 2)), np.zeros((2, len(LAGS)))
    places, rows = np.zeros((16, 16)), np.zeros(3)
    largest = 0.0
    for piece in range(pieces):
        start = piece * PIECE
        z = source.normal(piece % 7, start, start + PIECE)
        wide = z.astype(np.float64)
        square = wide * wide
        fourth = square * square
        sums += [wide.sum(), square.sum(), wide @ square, fourth.sum(), fourth @ wide, fourth @ square]
        size = np.sort(np.abs(z))
        largest = max(largest, float(size[-1]))
        tails[:, 0] += PIECE - np.searchsorted(size, np.float32(TAILS))
        tails[:, 1] += [(z > bound).sum() for bound in TAILS]
        for kind, x in enumerate((wide, (square - 1) / np.sqrt(2))):
            lags[kind] += [x[:-lag] @ x[lag:] for lag in LAGS]
        blocks = wide.reshape(-1, 16)
        places += blocks.T @ blocks
        rows += [
            wide @ source.normal(piece % 7 + 7, start, start + PIECE),
            wide @ other.normal(piece % 7, start, start + PIECE),
            wide @ source.normal(piece % 7, start + 2**40, start + 2**40 + PIECE),
        ]
    count = pieces * PIECE
    names = ("mean", "variance", "third moment", "fourth moment", "fifth moment", "sixth moment")
    expected, variances = np.array([0, 1, 0, 3, 0, 15]), np.array([1, 2, 15, 96, 945, 10170])
    for name, score in zip(names, (sums / count - expected) * np.sqrt(count / variances), strict=True):
        yield _row(f"{name} of {count:.2e}", score)
    for bound, (both, right) in zip(TAILS, tails, strict=True):
        for name, found, share in (("|z|", both, 2), ("z", right, 1)):
            mean = share * count * stats.norm.sf(bound)
            yield _row(f"{name} > {bound}: {found:.0f} of {mean:.6g} expected", (found - mean) / np.sqrt(mean))
    spans = count - pieces * np.array(LAGS)
    for kind, name in enumerate(("neighbours", "squares of neighbours")):
        scores = lags[kind] / np.sqrt(spans)
        yield _row(f"{name}, lags {LAGS[0]} to {LAGS[-1]}: largest", scores[np.abs(scores).argmax()])
    scores = (places / (count / 16) - np.eye(16)) * np.sqrt(count / 16 / (1 + np.eye(16)))
    yield _row("second moments of places in a block: largest", scores.flat[np.abs(scores).argmax()])
    for name, score in zip(("rows", "keys", "elements 2^40 apart"), rows / np.sqrt(count), strict=True):
        yield _row(f"correlation of {name}", score)
    yield Row("largest of all", largest, 5.77, largest / 5.77, "peer: end of 24 bits")


def _row(name: str, score: float) -> Row:
    return Row(name, abs(float(score)), LIMIT, LIMIT / max(abs(float(score)), 1e-9), "std. deviations; peer: limit")
