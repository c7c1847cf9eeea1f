"""How much noise the claim of a secret order needs, quickly and roughly: what fits descend by, and nothing claims.

Balls in bins depends on the Gram matrix G of the means m_j alone (`accounting.amplification.mixture`). With the largest
c for which H = G - c 1 1^T is positive semidefinite, c = 1 / (1^T G^-1 1), the pair is a Gaussian of mu = sqrt(c) /
sigma beside the mixture with H, exactly, so that

    delta(eps) = E delta_mu(eps - L),   L the loss of the mixture with H,

delta_mu that of the Gaussian in closed form. The expectation is over a few thousand points, fixed once for all, that
lie where losses are large: y = a m_j + noise for several a >= 1, weighted by their densities. It is smooth in sigma,
and as all strategies are judged by the same points, ranks them better than it knows them: some per cent of delta, some
tenths of a per cent of sigma.

Its derivative says what to make small. By Kahane's formula, with r the posterior over bins at y,

    d delta / d G_ij  ~  E[ r_i r_j  at  L = eps ]  >= 0,   and sigma^2 is homogeneous in G:  sigma^2 = <W, G>

so C of least error^2 <W(C), G(C)> is a stationary point of error sigma. Few bins near each other share a posterior at
large epsilon (W falls off quickly), all of them at small epsilon (W is nearly flat).
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.special import log_ndtr, ndtr

from anyorder.accounting.gaussian import calibrate_gaussian

__all__ = ["Guess", "Noise", "composed"]

Floats = NDArray[np.float64]

_POINTS = (500, 3000)  # fewest and most
_TABLE = 1_000_000  # points times bins
_TILTS = 5
_WIDTH = 0.15  # of losses that count as at the threshold, at least
_QUIET = 0.02  # a mu below which the Gaussian beside the mixture is left out
_RIDGE = 1e-9
_STEP = 0.5  # of log sigma
_CELL, _CELLS = 0.01, 1 << 14  # of the grid of losses


class Noise(NamedTuple):
    """The noise multiplier, and (bins,) the weights of pairs of bins by distance, w_0 = 1."""

    sigma: float
    weights: Floats


class Guess:
    """The points for so many bins and one (epsilon, delta).

    Args:
        bins: whose Gram matrix is given.
        among: how many bins there are; those whose Gram matrix is not given count for what they are on average, 1.
        epsilon, delta: of the claim.
    """

    def __init__(self, bins: int, among: int, epsilon: float, delta: float) -> None:
        self.bins, self.share, self.epsilon, self.delta = bins, bins / among, epsilon, delta
        points = int(np.clip(_TABLE // bins, *_POINTS))
        self.normals = np.random.default_rng(0).standard_normal((points, bins))
        places = np.arange(points)
        self.bin, self.tilt = (places // _TILTS) * 7919 % bins, places % _TILTS
        self.most = calibrate_gaussian(epsilon, delta)

    def __call__(self, G: Floats) -> Noise:
        """The least sigma at which the curve is at delta.

        Args: G: (bins, bins).
        """
        if self.bins == 1:
            return Noise(self.most * math.sqrt(G[0, 0]), np.ones(1))
        spread = _Spread(self, G)
        sigma = self.solve(spread.delta, float(G.max()))
        return Noise(sigma, spread.weights(sigma))

    def solve(self, delta: Callable[[float], float], largest: float) -> float:
        """The sigma at which the curve is at delta, not above that of known bins of the largest squared mean."""
        from scipy.optimize import brentq  # slow to load

        def excess(log_sigma: float) -> float:
            return math.log(max(delta(math.exp(log_sigma)), 1e-300) / self.delta)

        high = math.log(self.most * math.sqrt(largest) * 1.01)
        if excess(high) >= 0:
            return math.exp(high)
        low = high - _STEP
        while excess(low) < 0:
            high, low = low, low - _STEP
        return math.exp(brentq(excess, low, high, xtol=1e-4))


class _Spread:
    """The points of one Gram matrix."""

    def __init__(self, guess: Guess, G: Floats) -> None:
        self.guess, bins = guess, guess.bins
        ridge = _RIDGE * float(G.max()) * np.eye(bins)
        self.common = 0.999 / float(np.linalg.solve(G + ridge, np.ones(bins)).sum())
        self.H = G - self.common
        self.spread = guess.normals @ np.linalg.cholesky(self.H + 1e3 * ridge).T

    def losses(self, sigma: float) -> tuple[float, Floats, Floats, Floats]:
        """Mu of what all bins share, the losses of the rest, their weights, and the exponents of bins."""
        guess, H = self.guess, self.H / sigma**2
        half, log_bins = np.diag(H) / 2, math.log(guess.bins / guess.share)
        farthest = max(1.5, 0.5 + (guess.epsilon + log_bins) / float(2 * half.mean()))
        tilts = np.linspace(1.0, farthest, _TILTS)
        U = self.spread / sigma + tilts[guess.tilt][:, None] * H[guess.bin]
        loss = _log_mean(U - half)
        proposals = np.array([_log_mean(a * U - a * a * half) for a in tilts])
        weights = np.exp(loss - _log_mean(proposals.T))
        whole = np.log(guess.share * np.exp(loss) + (1 - guess.share)) if guess.share < 1 else loss
        return math.sqrt(self.common) / sigma, whole, weights, U - half

    def delta(self, sigma: float) -> float:
        """Of one draw."""
        mu, loss, weights, _ = self.losses(sigma)
        left = self.guess.epsilon - loss
        return float((weights * _gaussian_delta(mu, left)).mean())

    def weights(self, sigma: float) -> Floats:
        """(bins,) the mean of r_i r_j over pairs of each distance, at the threshold."""
        mu, loss, weights, exponents = self.losses(sigma)
        width = max(mu, _WIDTH)
        off = (self.guess.epsilon - loss - mu * mu / 2) / width
        near = weights * np.exp(-off * off / 2)
        posterior = np.exp(exponents - loss[:, None]) / self.guess.bins
        W = (posterior * near[:, None]).T @ posterior
        by_distance = np.array([np.trace(W, d) / (len(W) - d) for d in range(len(W))])
        return by_distance / by_distance[0] if by_distance[0] > 0 else np.ones(len(W))


def composed(guess: Guess, grams: Sequence[Floats]) -> Noise:
    """The noise of draws anew, one for each Gram matrix: their losses add up, by a grid and Fourier transforms."""
    if guess.bins == 1:
        return Noise(guess.most * math.sqrt(sum(float(G[0, 0]) for G in grams)), np.ones(1))
    spreads = [_Spread(guess, G) for G in grams]

    def delta(sigma: float) -> float:
        parts = [spread.losses(sigma) for spread in spreads]
        spectrum = np.ones(_CELLS // 2 + 1, dtype=complex)
        for _, loss, weights, _ in parts:
            place = np.clip(loss / _CELL, -_CELLS // 2 + 1, _CELLS // 2 - 2)
            below = np.floor(place).astype(int)
            share = weights * (place - below)
            cells = np.zeros(_CELLS)
            np.add.at(cells, below % _CELLS, weights - share)
            np.add.at(cells, (below + 1) % _CELLS, share)
            spectrum *= np.fft.rfft(cells / cells.sum())
        law: Floats = np.fft.irfft(spectrum, _CELLS)
        losses: Floats = _CELL * np.fft.fftfreq(_CELLS, 1 / _CELLS).astype(np.float64)
        mu = math.sqrt(sum(part[0] ** 2 for part in parts))
        return float(np.maximum(law, 0.0) @ _gaussian_delta(mu, guess.epsilon - losses))

    sigma = guess.solve(delta, sum(float(G.max()) for G in grams))
    return Noise(sigma, spreads[0].weights(sigma))


def _gaussian_delta(mu: float, epsilon: Floats) -> Floats:
    """Delta of N(mu, 1) against N(0, 1), at epsilons of any sign."""
    if mu < _QUIET:
        return np.asarray(np.maximum(0.0, -np.expm1(epsilon)))
    above = ndtr(mu / 2 - epsilon / mu)
    return np.asarray(above - np.exp(np.minimum(epsilon + log_ndtr(-mu / 2 - epsilon / mu), 0.0)))


def _log_mean(x: Floats) -> Floats:
    """Log of the mean of exp over the last axis."""
    top = x.max(axis=1)
    return np.asarray(top + np.log(np.exp(x - top[:, None]).mean(axis=1)))
