"""Is the noise of a stream what the accountant was told? For any strategy."""

import numpy as np
from scipy import linalg, stats

from anyorder.noise import NoiseSource, NoiseStream
from anyorder.strategy import Strategy

KEY = b"whitening: a fixed key, 32 bytes"


def assert_white(strategy: Strategy, *, std: float = 0.7, size: int = 32_768, source: NoiseSource | None = None):
    """The streamed noise X (n, size) has covariance std^2 K K^T between steps, and none between coordinates.

    With L L^T = std^2 K K^T, the entries of W = L^-1 X are independent N(0, 1). Tested: all second moments of W, means,
    fourth moment, and correlations between coordinates. A strategy whose K K^T is too ill-conditioned for float32 has
    no place here; 1e8 is fine.
    """
    stream = NoiseStream(strategy, source or NoiseSource(KEY), std, size)
    noise = np.stack([stream.next() for _ in range(strategy.n)]).astype(np.float64)
    n = strategy.n
    K = strategy.noising_matrix()
    W = linalg.solve_triangular(linalg.cholesky(std**2 * K @ K.T, lower=True), noise, lower=True)

    second = (W @ W.T / size - np.eye(n)) * np.sqrt(size / (1 + np.eye(n)))
    scores = second[np.tril_indices(n)]
    assert np.abs(scores).max() < 6.5, "a variance or covariance between steps is not std^2 K K^T"
    assert stats.chi2.sf(np.square(scores).sum(), scores.size) > 1e-7, "the covariance is not std^2 K K^T"
    assert stats.chi2.sf(np.square(W.mean(axis=1)).sum() * size, n) > 1e-7, "the noise has a mean"
    assert abs(np.mean(W**4) - 3) < 6 * np.sqrt(96 / W.size), "the noise is not Gaussian"
    for lag in (1, 8, 16, size // 2):
        score = np.sum(W[:, :-lag] * W[:, lag:]) / np.sqrt(n * (size - lag))
        assert abs(score) < 6, f"coordinates at distance {lag} share noise"
