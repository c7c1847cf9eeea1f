"""Samples for balls in bins: bounded, unbiased terms of delta(epsilon) in both directions, by importance sampling.

Means are over sigma, so that noise is standard. L = dP/dQ = sum_j w_j exp(<m_j, y> - G_jj / 2), w_j = 1/b.

**P against Q.** For a whole t >= 2, L^t Q is, but for its total mass, a mixture of Gaussians: with copies j_1, .., j_t,

    L^t dQ = sum over (j_1, .., j_t) of  w_j1 .. w_jt exp(sum_{i < l} G[j_i, j_l])  N(m_j1 + .. + m_jt, I)

Call the weight of copies p(j), their counts n, s = G n. With copies of any law q, W = p / q, and
y = m_j1 + .. + m_jt + normals, E [W f(y) L^-t] = E_Q f for every f. The law is the first, or half of each of:

- *one after another*: copy i is j with probability w_j exp(s_j) / z_i, with s of the copies before it and
  z_i = sum_j w_j exp(s_j). So p / q = z_1 .. z_t; z_i is convex in n, so largest where all copies before lie on one j:
  z_i <= max_j sum_l w_l exp((i - 1) G[j, l]).
- *around a centre*: c with probability prop. to zeta_c^t, zeta_c = sum_l w_l exp(t G[c, l] / 2 - G_ll / 2), and all
  copies with probability w_l exp(t G[c, l] / 2 - G_ll / 2) / zeta_c. So p / q = sum_c zeta_c^t exp(<n, s> / 2) /
  sum_c exp(t s_c / 2), at most sum_c zeta_c^t: the largest s_c is not below <n, s> / t, their mean under n.

Half of the samples come from R instead: few bins that stand out are as likely as many, and no single t finds both.
With r = sum_j w_j exp(tau <m_j, y> - tau^2 G_jj / 2), both r Q and r^2 Q over its total mass, the mean of
exp(tau^2 G_ij), are mixtures of Gaussians, of means tau m_j and tau (m_i + m_j); R is the mean of them for a few tau.
With D = L^t / 2z + dR/dQ / 2 and a constant z, the terms are

    (W / z) (L - e^eps)_+ / D   of samples by copies,     (L - e^eps)_+ / D   of samples of R

whose mean is delta(eps) = E_Q (L - e^eps)_+, as the parts of D share it. With z at most the largest W, no term is above
2 max W e^{(1-t) eps} (1 - 1/t)^{t-1} / t, the largest (L - e^eps) L^-t over L. None rises with eps.

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

__all__ = ["POWERS", "Bins", "Shape", "Terms", "gram_root", "log_peak", "uniforms"]

Floats = NDArray[np.float64]
Progress = Callable[[int], None]

_ELEMENTS = 1 << 19  # entries of a chunk: 4 MiB
POWERS = (2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 32, 48, 64)
"""The t that are tried."""


class Shape(NamedTuple):
    """How P against Q is sampled.

    Attributes:
        t: the power.
        single: the tau of R; none for copies alone.
        log_z: of the constant z.
    """

    t: int
    single: tuple[float, ...] = ()
    log_z: float = 0.0


class Terms(NamedTuple):
    """Of each sample: log L, the log of its weight, and the log of what bounds them.

    Attributes:
        loss: (samples,) log L.
        weight: (samples,) log of what multiplies 1 - e^eps / L (P against Q) or 1 - e^eps L (Q against P), if above 0.
        slope: no term is above exp(cap - slope eps).
        cap: see slope.
        remove: whether they are P against Q.
    """

    loss: Floats
    weight: Floats
    slope: float
    cap: float
    remove: bool


class Bins:
    """Samples of one Gram matrix.

    Args:
        G: (b, b) Gram matrix over sigma^2, entries not negative.
    """

    pilot = 16384

    def __init__(self, G: Floats) -> None:
        self._G = G
        self._b = len(G)
        self._half = G.diagonal() / 2
        self._root = gram_root(G)
        largest = [_log_mean(i * G).max() for i in range(POWERS[-1])]
        self._caps = np.cumsum(largest)  # entry t - 1: log of the largest p / q of t copies, one after another

    def single(self, epsilon: float) -> tuple[float, ...]:
        """Tau at which a bin that stands out alone makes a loss of about epsilon."""
        away = math.log(self._b) + math.log(math.expm1(min(max(epsilon, 0.01), 500.0)))
        middle = 0.5 + max(away, 0.0) / max(2 * float(self._half.mean()), 1e-12)
        return tuple(float(f"{part * middle:.3g}") for part in (0.5, 0.7, 1.0, 1.4)) if self._b > 1 else ()

    def remove(self, source: NoiseSource, samples: int, shape: Shape, progress: Progress) -> Terms:
        """P against Q: `samples` terms.

        Cost: O(samples b (b + t)).
        """
        t, single = shape.t, shape.single
        centres = _Centres(self._G, t)
        gather = math.log(2) + centres.log_total < self._caps[t - 1]
        largest = math.log(2) + centres.log_total if gather else float(self._caps[t - 1])
        log_z = min(shape.log_z, largest)
        pairs = [_Pairs.of(self._G, tau) for tau in single]
        share = 0.5 if single else 1.0
        loss, weight = np.empty(samples), np.empty(samples)
        for start, stop in _chunks(samples, self._b):
            number = np.arange(start, stop)
            apart = number % 4 >= 2 if single else np.zeros(len(number), bool)
            log_w, u = self._copies(source, start, stop, t, centres, gather)
            if single:
                log_w[apart], u[apart] = log_z, self._apart(source, t + 1, number[apart], pairs)
            u += self._normals(source, start, stop)
            found = _log_mean(u - self._half)
            log_d = math.log(share) - log_z + t * found
            for one in pairs:
                part = _log_mean(one.tau * u - one.tau**2 * self._half)
                part = np.logaddexp(part, 2 * part - one.log_mass)
                log_d = np.logaddexp(log_d, part + math.log((1 - share) / (2 * len(pairs))))
            loss[start:stop], weight[start:stop] = found, log_w - log_z + found - log_d
            progress(stop - start)
        return Terms(loss, weight, t - 1, largest - math.log(share) + log_peak(t), True)

    def _apart(self, source: NoiseSource, row: int, numbers: NDArray[np.int64], pairs: list["_Pairs"]) -> Floats:
        """Means of samples of R, (samples, b)."""
        start, stop = int(numbers[0]), int(numbers[-1]) + 1
        kind, first, second = (uniforms(source, row + i, start, stop)[numbers - start] for i in range(3))
        result = np.empty((len(numbers), self._b))
        which = np.minimum((kind * 2 * len(pairs)).astype(int), 2 * len(pairs) - 1)
        for i, one in enumerate(pairs):
            alone = which == 2 * i
            result[alone] = one.tau * self._G[(first[alone] * self._b).astype(int)]
            both = which == 2 * i + 1
            a = _pick(one.rows, first[both])
            table = one.laws[a]
            b = np.minimum((table <= second[both][:, None] * table[:, -1:]).sum(axis=1), self._b - 1)
            result[both] = one.tau * (self._G[a] + self._G[b])
        return result

    def log_z(self, source: NoiseSource, samples: int, t: int) -> float:
        """Log of the mean W, roughly: the constant z is free."""
        centres = _Centres(self._G, t)
        gather = math.log(2) + centres.log_total < self._caps[t - 1]
        return float(f"{float(_log_mean(self._copies(source, 0, samples, t, centres, gather)[0])):.3g}")

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

    def _copies(
        self, source: NoiseSource, start: int, stop: int, t: int, centres: "_Centres", gather: bool
    ) -> tuple[Floats, Floats]:
        """Log W and s = <m_j, sum of the copies' means>, (samples,) and (samples, b)."""
        rows = np.arange(stop - start)
        s, first, square = np.zeros((stop - start, self._b)), np.zeros(stop - start), np.zeros(stop - start)
        gathered = ((start + rows) % 2 == 1) & gather
        laws = centres.laws[centres.choose(uniforms(source, 0, start, stop)[gathered])]
        for i in range(t):
            top = s.max(axis=1)
            cumulated = np.exp(s - top[:, None]).cumsum(axis=1)
            first += top + np.log(cumulated[:, -1] / self._b)
            cumulated[gathered] = laws
            limit = uniforms(source, i + 1, start, stop) * cumulated[:, -1]
            chosen = np.minimum((cumulated <= limit[:, None]).sum(axis=1), self._b - 1)
            square += 2 * s[rows, chosen] + 2 * self._half[chosen]
            s += self._G[chosen]
        if not gather:
            return first, s
        second = centres.log_total + square / 2 - _log_sum(t / 2 * s)
        return -np.logaddexp(-first, -second) + math.log(2), s

    def _normals(self, source: NoiseSource, start: int, stop: int) -> Floats:
        z = source.normal(0, start * self._b, stop * self._b).astype(np.float64)
        return np.asarray(z.reshape(-1, self._b) @ self._root.T)

    def _loss(self, u: Floats) -> Floats:
        return _log_mean(u - self._half)


class _Pairs(NamedTuple):
    """r^2 of one tau: the log of its mass, and the laws of the first bin, and of the second given it, cumulated."""

    tau: float
    log_mass: float
    rows: Floats
    laws: Floats

    @classmethod
    def of(cls, G: Floats, tau: float) -> "_Pairs":
        exponents = tau * tau * G
        weights = np.exp(exponents - exponents.max())
        return cls(tau, float(_log_mean(_log_mean(exponents))), weights.sum(axis=1).cumsum(), weights.cumsum(axis=1))


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
        return _pick(self._chances, where)


def _pick(cumulated: Floats, where: Floats) -> NDArray[np.intp]:
    found = np.searchsorted(cumulated, where * cumulated[-1], side="right")
    return np.asarray(np.minimum(found, len(cumulated) - 1))


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
