"""What fits for a secret order make small: error^2 times <W, G>, for Toeplitz C, with exact gradients.

With p = the sum of c moved by 0, b, 2b, .. (a unit of the first bin), m_j is p moved by j, and for weights by distance

    <W, G> = sum_ij w_|i-j| sum_t p_{t-i} p_{t-j} = sum_rs w_|r-s| min(b - |r-s|, n - max(r, s))_+ p_r p_s

a Toeplitz form in p, but for its last b entries.
"""

import numpy as np
from numpy.typing import NDArray

from anyorder._filters import fftconvolve
from anyorder.optimize.toeplitz import Problem, Valued
from anyorder.participation import SingleEpoch
from anyorder.workload import Workload

__all__ = ["Weighted"]

Floats = NDArray[np.float64]


class Weighted(Problem):
    """The loss of Toeplitz strategies for bins that share their posteriors.

    Args:
        workload: Toeplitz, or of at most 4096 steps.
        bins: b; a unit of bin j is in the steps j, j + b, ..
        weights: (m,) w by distance of bins, m <= bins; distances beyond have the last one.
        objective: "mean", "max" or "last".
    """

    def __init__(self, workload: Workload, bins: int, weights: Floats, objective: str = "mean") -> None:
        super().__init__(workload, SingleEpoch(workload.n), objective)
        self.bins = min(bins, workload.n)
        self.reweigh(weights)

    def reweigh(self, weights: Floats) -> None:
        """Other weights."""
        b = self.bins
        w = np.concatenate([weights, np.full(max(b - len(weights), 0), weights[-1])])[:b] / b
        self.kernel = w * (b - np.arange(b))
        places = np.arange(b)
        apart = np.abs(np.subtract.outer(places, places))
        # of the last b entries of p: pairs of bins that would meet after the last step
        self.ends = w[apart] * np.maximum(np.maximum.outer(places, places) - apart, 0)

    def sens(self, c: Floats, stiffness: float = np.inf) -> Valued:
        """<W, G(|c|)>, and its gradient; c is (m,) with m <= n."""
        n, b = self.n, self.bins
        p = np.zeros(n)
        for start in range(0, n, b):
            length = min(len(c), n - start)
            p[start : start + length] += np.abs(c[:length])
        both = np.concatenate([self.kernel[:0:-1], self.kernel])
        moved = fftconvolve(p, both)[b - 1 : b - 1 + n]
        moved[n - b :] -= self.ends @ p[n - b :]
        gradient = np.zeros(len(c))
        for start in range(0, n, b):
            length = min(len(c), n - start)
            gradient[:length] += moved[start : start + length]
        return float(p @ moved), 2 * gradient * np.where(c < 0, -1.0, 1.0)
