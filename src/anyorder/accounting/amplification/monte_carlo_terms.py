"""Samples for balls in bins: bounded, unbiased terms of delta(epsilon) in both directions, by importance sampling.

Means are over sigma, so that noise is standard. L = dP/dQ = sum_j w_j exp(<m_j, y> - G_jj / 2), w_j = 1/b.

**P against Q.** For a whole t >= 2, L^t Q is, but for its total mass, a mixture of Gaussians: with copies j_1, .., j_t,

    L^t dQ = sum over (j_1, .., j_t) of  w_j1 .. w_jt exp(sum_{i < l} G[j_i, j_l])  N(m_j1 + .. + m_jt, I)

Call the weight of copies p(j), their counts n, s = G n. Any law q of copies will do: with W = p / q and
y = m_j1 + .. + m_jt + normals, E [W (L - e^eps)_+ L^-t] = E_Q (L - e^eps)_+ = delta(eps). The law is half of each of:

- *one after another*: copy i is j with probability w_j exp(s_j) / z_i, with s of the copies before it and
  z_i = sum_j w_j exp(s_j). So p / q = z_1 .. z_t; z_i is convex in n, so largest where all copies before lie on one j:
  z_i <= max_j sum_l w_l exp((i - 1) G[j, l]).
- *around a centre*: c with probability prop. to zeta_c^t, zeta_c = sum_l w_l exp(t G[c, l] / 2 - G_ll / 2), and all
  copies with probability w_l exp(t G[c, l] / 2 - G_ll / 2) / zeta_c. So p / q = sum_c zeta_c^t exp(<n, s> / 2) /
  sum_c exp(t s_c / 2), at most sum_c zeta_c^t: the largest s_c is not below <n, s> / t, their mean under n.

The first is near p where copies spread, the second where they gather. W is at most twice the smaller of both bounds,
and the largest (L - e^eps) L^-t over L is e^{(1-t) eps} (1 - 1/t)^{t-1} / t.

**Q against P.** y from N(-s m, I), m = sum_j w_j m_j, s >= 0: term (1 - e^eps L)_+ exp(s <m, y> + s^2 |m|^2 / 2).
By Jensen's inequality log L >= <m, y> - g / 2 with g = sum_j w_j G_jj, so that where the term is not 0, <m, y> is at
most g / 2 - eps, and the term at most exp(s (g / 2 - eps) + s^2 |m|^2 / 2); and it falls with eps.
"""

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from anyorder.noise import NoiseSource

__all__ = ["Bins", "Terms", "gram_root", "log_peak"]

Floats = NDArray[np.float64]
Progress = Callable[[int], None]

_ELEMENTS = 1 << 19  # entries of a chunk: 4 MiB
_MOST_COPIES = 64


class Terms(NamedTuple):
    """Of each sample: log L, the log of its weight, and the log of what no weight is above.

    Attributes:
        loss: (samples,) log L.
        weight: (samples,) of P against Q log W; of Q against P what (1 - e^eps L)_+ is multiplied by.
        power: t of P against Q, s of Q against P.
        cap: P against Q: log of the largest W. Q against P: s g / 2 + s^2 |m|^2 / 2; less s eps it bounds every term.
        remove: whether they are P against Q.
    """

    loss: Floats
    weight: Floats
    power: float
    cap: float
    remove: bool


class Bins:
    """Samples of one Gram matrix.

    Args:
        G: (b, b) Gram matrix over sigma^2, entries not negative.
    """

    def __init__(self, G: Floats) -> None:
        self._G = G
        self._b = len(G)
        self._half = G.diagonal() / 2
        self._root = gram_root(G)
        largest = [_log_mean(i * G).max() for i in range(_MOST_COPIES)]
        self._caps = np.cumsum(largest)  # entry t - 1: log of the largest p / q of t copies, one after another

    def power(self, source: NoiseSource, samples: int, log_delta: float | None, epsilon: float) -> int:
        """The t whose Renyi bound of epsilon at this delta, or of delta at epsilon, is smallest: a rough choice."""
        best, chosen = math.inf, 2
        for t, weight, _, _ in self._one_after_another(source, 0, samples, _MOST_COPIES):
            if t < 2:
                continue
            together = _log_mean(t * (t - 1) * self._half) - (t - 1) * math.log(self._b)  # all copies on one j
            found = max(float(_log_mean(weight)), float(together)) + log_peak(t)
            found = found - (t - 1) * epsilon if log_delta is None else (found - log_delta) / (t - 1)
            if found < best:
                best, chosen = found, t
            elif found > best + 0.02 * abs(best) + 1e-3:
                break
        return chosen

    def remove(self, source: NoiseSource, samples: int, t: int, progress: Progress) -> Terms:
        """P against Q: `samples` terms of power t.

        Cost: O(samples b (b + t)).
        """
        loss, weight = np.empty(samples), np.empty(samples)
        centres = _Centres(self._G, t)
        for start, stop in _chunks(samples, self._b):
            *_, (_, first, s, square) = self._one_after_another(source, start, stop, t, centres)
            second = centres.log_total + square / 2 - _log_sum(t / 2 * s)
            weight[start:stop] = -np.logaddexp(-first - math.log(2), -second - math.log(2))
            loss[start:stop] = self._loss(s + self._normals(source, start, stop))
            progress(stop - start)
        cap = math.log(2) + min(float(self._caps[t - 1]), centres.log_total)
        return Terms(loss, weight, t, cap, True)

    def tilt(self, epsilon: float) -> float:
        """The s whose bound of the terms at epsilon is smallest."""
        mean = self._G.mean()
        return max(0.0, (epsilon - self._half.mean()) / mean) if mean > 0 else 0.0

    def add(self, source: NoiseSource, samples: int, s: float, progress: Progress) -> Terms:
        """Q against P: `samples` terms of tilt s.

        Cost: O(samples b^2).
        """
        loss, weight = np.empty(samples), np.empty(samples)
        shift, square = s * self._G.mean(axis=0), s * s * self._G.mean()
        for start, stop in _chunks(samples, self._b):
            u = self._normals(source, start, stop) - shift
            loss[start:stop] = self._loss(u)
            weight[start:stop] = s * u.mean(axis=1) + square / 2
            progress(stop - start)
        return Terms(loss, weight, s, float(s * self._half.mean() + square / 2), False)

    def _one_after_another(
        self, source: NoiseSource, start: int, stop: int, t: int, centres: "_Centres | None" = None
    ) -> Iterator[tuple[int, Floats, Floats, Floats]]:
        """After each copy: their number, log(z_1 .. z_i), s, <n, s>; half of the samples around centres, if given."""
        rows = np.arange(stop - start)
        s, weight, square = np.zeros((stop - start, self._b)), np.zeros(stop - start), np.zeros(stop - start)
        gathered = np.zeros(stop - start, bool)
        if centres is not None:
            gathered = (start + rows) % 2 == 1
            laws = centres.laws[centres.choose(uniforms(source, 0, start, stop)[gathered])]
        for i in range(t):
            top = s.max(axis=1)
            cumulated = np.exp(s - top[:, None]).cumsum(axis=1)
            weight = weight + top + np.log(cumulated[:, -1] / self._b)
            if centres is not None:
                cumulated[gathered] = laws
            limit = uniforms(source, i + 1, start, stop) * cumulated[:, -1]
            chosen = np.minimum((cumulated <= limit[:, None]).sum(axis=1), self._b - 1)
            square = square + 2 * s[rows, chosen] + 2 * self._half[chosen]
            s = s + self._G[chosen]
            yield i + 1, weight, s, square

    def _normals(self, source: NoiseSource, start: int, stop: int) -> Floats:
        z = source.normal(0, start * self._b, stop * self._b).astype(np.float64)
        return np.asarray(z.reshape(-1, self._b) @ self._root.T)

    def _loss(self, u: Floats) -> Floats:
        return _log_mean(u - self._half)


class _Centres:
    """The second law of copies."""

    def __init__(self, G: Floats, t: int) -> None:
        exponents = t / 2 * G - G.diagonal() / 2
        zeta = t * _log_mean(exponents)
        self.log_total = float(_log_sum(zeta))
        self.laws = np.exp(exponents - exponents.max(axis=1)[:, None]).cumsum(axis=1)
        self._chances = np.exp(zeta - zeta.max()).cumsum()

    def choose(self, where: Floats) -> NDArray[np.intp]:
        """The centre of each uniform number."""
        found = np.searchsorted(self._chances, where * self._chances[-1], side="right")
        return np.asarray(np.minimum(found, len(self._chances) - 1))


def gram_root(G: Floats) -> Floats:
    """A with A A^T = G, for a semi-definite G."""
    values, vectors = np.linalg.eigh((G + G.T) / 2)
    return np.asarray(vectors * np.sqrt(np.maximum(values, 0.0)))


def log_peak(t: float) -> float:
    """Log of the largest (1 - 1/l) l^{1-t} over l >= 1: -log t + (t - 1) log(1 - 1/t)."""
    return -math.log(t) + ((t - 1) * math.log1p(-1 / t) if t > 1 else 0.0)


def _log_sum(a: Floats) -> Floats:
    """Log of the sum of exponentials over the last axis."""
    top = a.max(axis=-1)
    return np.asarray(top + np.log(np.exp(a - top[..., None]).sum(axis=-1)))


def _log_mean(a: Floats) -> Floats:
    return np.asarray(_log_sum(a) - math.log(a.shape[-1]))


def uniforms(source: NoiseSource, row: int, start: int, stop: int) -> Floats:
    """(stop - start,) uniform in [0, 1), of 53 bits, two words each."""
    words = source.words(row, 2 * start, 2 * stop).reshape(-1, 2)
    high, low = words[:, 0] >> np.uint32(5), words[:, 1] >> np.uint32(6)
    return np.asarray((high * 67108864.0 + low) / 9007199254740992.0)


def _chunks(samples: int, width: int) -> Iterator[tuple[int, int]]:
    size = max(1, _ELEMENTS // width)
    return ((start, min(start + size, samples)) for start in range(0, samples, size))
