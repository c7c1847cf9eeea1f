"""Certificates of chance: epsilon and delta of secret sampling by samples that anybody can draw again.

delta(eps) is the mean of terms X(eps) in [0, B(eps)], independent, unbiased, none of which rises with eps: see
`monte_carlo_terms` and `monte_carlo_separated`. What is claimed is an upper confidence limit of it, by a bet that is
fixed before the samples:

**Theorem.** Let m > 0 and l > 0 be fixed, and K(eps) = prod_i (1 + l (m - X_i(eps))), 0 where a factor is below 0. Let
E be the smallest eps at or above a fixed floor with K(eps) >= 1 / f; the floor has l (B(floor) - m) <= 1. Then

    P( delta(E) > m ) <= f

*Proof.* Let e be the largest eps with delta(eps) >= m; delta is continuous, so delta(e) = m. If delta(E) > m, then
floor <= E < e; no factor at e is below 0, and as factors rise with eps, K(e) >= K(E) >= 1 / f. But E K(e) <= 1 (terms
may be of two laws, in equal numbers), so that Markov's inequality gives at most f.  QED   The limit of delta at a given
eps is that of the same K, in m.

The larger of both directions is wrong only if the direction whose true epsilon is larger is: no union bound. With
m = delta - failure, the claim is (E, m) but for chance `failure`, so (E, delta) of the sampling and the run together.

**No choice of seeds.** The key is a hash of all that the number depends on: strategy, rule, sigma, delta, samples,
failure, salt. A search for sigma looks at many keys, and whoever moves the last bit of sigma sees another: so K must
reach TRIES / failure, TRIES = 256: the claim holds at `failure` even if the best of 256 keys were taken. A verifier may
ask for another salt: fresh samples.

The bet l, the tilts and the number of samples of Q against P come from a pilot, whose key is another.
"""

import dataclasses
import hashlib
import json
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol

import numpy as np
import scipy
from numpy.typing import NDArray

from anyorder import checks
from anyorder._numerics import bisect
from anyorder.accounting.amplification.methods import MonteCarlo
from anyorder.accounting.amplification.mixture import absolute_columns, reach
from anyorder.accounting.amplification.secret_order import AmplifiedOrder
from anyorder.errors import ArgumentError, PlanError
from anyorder.noise import NoiseSource
from anyorder.patterns import Participation
from anyorder.strategy import Strategy

# ----------------------------------------------------------------------------------------------------
# Samples for balls in bins: bounded, unbiased terms of delta(epsilon) in both directions, by importance sampling.
#
# Means are over sigma, so that noise is standard. L = dP/dQ = sum_j w_j exp(<m_j, y> - G_jj / 2), w_j = 1/b.
#
# **P against Q.** For a whole t >= 2, L^t Q is, but for its total mass, a mixture of Gaussians: with copies j_1, ..,
# j_t,
#
#     L^t dQ = sum over (j_1, .., j_t) of  w_j1 .. w_jt exp(sum_{i < l} G[j_i, j_l])  N(m_j1 + .. + m_jt, I)
#
# Call the weight of copies p(j), their counts n, s = G n. With copies of any law q, W = p / q, and y = m_j1 + .. +
# m_jt + normals, E [W f(y) L^-t] = E_Q f for every f. The law is the first, or half of each of:
#
# - *one after another*: copy i is j with probability w_j exp(s_j) / z_i, with s of the copies before it and
#   z_i = sum_j w_j exp(s_j). So p / q = z_1 .. z_t; z_i is convex in n, so largest where all copies before lie on one
#   j:
#   z_i <= max_j sum_l w_l exp((i - 1) G[j, l]).
# - *around a centre*: c with probability prop. to zeta_c^t, zeta_c = sum_l w_l exp(t G[c, l] / 2 - G_ll / 2), and all
#   copies with probability w_l exp(t G[c, l] / 2 - G_ll / 2) / zeta_c. So p / q = sum_c zeta_c^t exp(<n, s> / 2) /
#   sum_c exp(t s_c / 2), at most sum_c zeta_c^t: the largest s_c is not below <n, s> / t, their mean under n.
#
# Half of the samples come from R instead: few bins that stand out are as likely as many, and no single t finds both.
# With r = sum_j w_j exp(tau <m_j, y> - tau^2 G_jj / 2), both r Q and r^2 Q over its total mass, the mean of exp(tau^2
# G_ij), are mixtures of Gaussians, of means tau m_j and tau (m_i + m_j); R is the mean of them for a few tau. With D =
# L^t / 2z + dR/dQ / 2 and a constant z, the terms are
#
#     (W / z) (L - e^eps)_+ / D   of samples by copies,     (L - e^eps)_+ / D   of samples of R
#
# whose mean is delta(eps) = E_Q (L - e^eps)_+, as the parts of D share it. With z at most the largest W, no term is
# above 2 max W e^{(1-t) eps} (1 - 1/t)^{t-1} / t, the largest (L - e^eps) L^-t over L. None rises with eps.
#
# **Q against P.** y from N(-s m, I), m = sum_j w_j m_j, s >= 0: term (1 - e^eps L)_+ exp(s <m, y> + s^2 |m|^2 / 2). By
# Jensen's inequality log L >= <m, y> - g / 2 with g = sum_j w_j G_jj, so that where the term is not 0, <m, y> is at
# most g / 2 - eps, and the term at most exp(s (g / 2 - eps) + s^2 |m|^2 / 2); and it falls with eps.


Floats = NDArray[np.float64]
ChunkProgress = Callable[[int], None]

_TERM_ELEMENTS = 1 << 19  # entries of a chunk: 4 MiB
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


class BinsTerms(NamedTuple):
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

    def remove(self, source: NoiseSource, samples: int, shape: Shape, progress: ChunkProgress) -> BinsTerms:
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
        return BinsTerms(loss, weight, t - 1, largest - math.log(share) + log_peak(t), True)

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

    def add(self, source: NoiseSource, samples: int, s: float, progress: ChunkProgress) -> BinsTerms:
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
        return BinsTerms(loss, weight, s, float(s * self._half.mean() + square / 2), False)

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
    size = max(1, _TERM_ELEMENTS // width)
    return ((start, min(start + size, samples)) for start in range(0, samples, size))


# ----------------------------------------------------------------------------------------------------
# Samples for sampling with separation: bounded, unbiased terms of delta(epsilon), in both directions.
#
# Means are over sigma. Columns that are b steps apart or more do not overlap, so that with G_ij = <c_i, c_j>, u_i =
# <c_i, y> and r_i = u_i - G_ii / 2, log L = log sum_S w_S exp(sum over i in S of r_i) is a backward recursion:
#
#     V_i = (1 - p) V_{i+1} + p e^{r_i} V_{i+b},   V_i = 1 for i >= n,   L = sum over first waits w of chance_w V_w
#
# and the same recursion with other exponents h_i is E exp(sum over i in S of h_i), and draws S of the law so tilted:
# who may come comes at i with probability p e^{h_i} V_{i+b} / V_i.
#
# **P against Q.** As for balls in bins: L^t Q is, but for its mass, a mixture over t copies, of weights p = prod w_S
# exp(sum_{i < l} <m_i, m_l>). Copy i is drawn with weight w_S exp(sum over j in S of (s_j + phi_i)), s_j being <c_j,
# sum of the copies before>, and z_i is its total. So W = p / q = prod_i z_i exp(-phi_i |S_i|), and
#
#     log W <= sum_i kappa_i,    kappa_i = log E exp(phi_i |S|),    where phi_l = sum_{i > l} rho_i / (i - 1)   (*)
#
# and rho_i is such that log z_i - kappa_i <= rho_i / (i - 1) times the number of steps of all copies before. *Such a
# rho_i.* z_i / e^{kappa_i} = E exp(sum over j in S of s_j) for the S tilted by phi_i. S comes at j with a probability
# of at most p_i, given the past: it lies in a set of independent draws, and so log z_i - kappa_i <= p_i sum_j (e^{s_j}
# - 1), convex in the copies before: let all be one, R, with tau = i - 1, so that s_j = tau sum over a in R of G_ja. At
# most two a lie within b of j: at d after the one, and b - d or more before the other. With g(d) the largest
# G_{j,j+d}, h(d) the largest g from d on, and e^{x+y} - 1 = (e^x - 1) + (e^y - 1) + their product, one may take
#
#     rho = p_i (sum_{|d| < b} (e^{tau g(|d|)} - 1) + sum_{0 < d < b} (e^{tau g(d)} - 1) (e^{tau h(b-d)} - 1))
#
# or, as two steps of S at most lie within b of one of R, rho = tau max(g(0), max_{0 < d < b} g(d) + h(b-d)).   QED
#
# Half of the samples come from Z^-1 sum_S w_S exp(tau sum of r_i) Q instead, mixtures of means tau m_S, for a few tau:
# few steps that stand out are as likely as many. The terms, and what bounds them, are those of balls in bins.
#
# **Q against P.** As there, along the mean m = sum_S w_S m_S, of which the part of step i is its chance.


Bools = NDArray[np.bool_]

_SEPARATED_ELEMENTS = 1 << 20  # of a chunk, steps times samples: 8 MiB
_ROUNDING = 1e-10  # added to the diagonal, so that its root exists: a larger Gram matrix never lowers delta


class SeparatedDraws(Protocol):
    """Each unit that was in none of the last b - 1 of n steps is drawn with a probability; see `SeparatedTerms`."""

    @property
    def n(self) -> int: ...
    @property
    def b(self) -> int: ...
    @property
    def sampling_probability(self) -> float: ...
    @property
    def warm_start(self) -> bool: ...

    @property
    def marginal(self) -> float: ...


def separated_band(strategy: Strategy, rule: SeparatedDraws) -> Floats:
    """(d, n) the diagonals of the Gram matrix of |C|: entry [d, i] is <c_i, c_{i+d}>, 0 past the end.

    Cost: that of all columns, and O(n rows d).
    """
    n, width = rule.n, reach(strategy)
    band = np.zeros((width, n))
    size = max(64, width)
    for start in range(0, n, size):
        columns = absolute_columns(strategy, np.arange(start, min(start + size + width - 1, n)))
        gram = columns.T @ columns
        for i in range(min(size, n - start)):
            row = gram[i, i : i + width]
            band[: len(row), start + i] = row
    return band


class _Band:
    """A banded matrix that is applied to many vectors, block by block.

    Args:
        below: (d, n), entry [k, i] is that of row i + k, column i.
        symmetric: whether the diagonals above are those below; else they are 0.
    """

    def __init__(self, below: Floats, symmetric: bool) -> None:
        width, n = below.shape
        size = max(16, width)
        self._n, self._parts = n, []
        for start in range(0, n, size):
            stop = min(start + size, n)
            first, last = max(start - width + 1, 0), min(stop + width - 1, n) if symmetric else stop
            block = np.zeros((stop - start, last - first))
            for row in range(start, stop):
                for column in range(max(row - width + 1, 0), min(row + width, last) if symmetric else row + 1):
                    block[row - start, column - first] = below[abs(row - column), min(row, column)]
            self._parts.append((slice(start, stop), slice(first, last), block))

    def __matmul__(self, x: Floats) -> Floats:
        result = np.empty((self._n, x.shape[1]))
        for rows, columns, block in self._parts:
            np.matmul(block, x[columns], out=result[rows])
        return result


class _Tilted(NamedTuple):
    """The law of S with weights w_S exp(sum over i in S of h_i), for each of m samples.

    Attributes:
        log_total: (m,) log of its mass.
        chances: (n, m) of who may come at step i.
        waits: (b or 1, m) cumulated, of the first wait.
    """

    log_total: Floats
    chances: Floats
    waits: Floats


class SeparatedTerms:
    """Samples of one C under one rule.

    Args:
        band: as `separated_band` gives it, over sigma^2.
        rule: its p and b, and whether it starts warm.
    """

    def __init__(self, band: Floats, rule: SeparatedDraws) -> None:
        self._n, self._b, self._p = rule.n, rule.b, rule.sampling_probability
        self.pilot = max(2048, min(16384, (1 << 24) // rule.n))
        late = rule.marginal if rule.warm_start else 0.0
        self._start = np.array([1 - (self._b - 1) * late, *([late] * (self._b - 1 if rule.warm_start else 0))])
        band = band.copy()
        band[0] += _ROUNDING * band[0].max()
        self._diagonal = band[0]
        self._largest = np.zeros(self._b)
        self._largest[: len(band)] = band.max(axis=1)
        self._gram, self._root = _Band(band, True), _Band(scipy.linalg.cholesky_banded(band, lower=True), False)
        self._chances = self._marginals()
        self._mean = (self._gram @ self._chances[:, None])[:, 0]
        self._square = float(self._chances @ self._mean)
        self._half = float(self._chances @ self._diagonal) / 2

    def single(self, epsilon: float) -> tuple[float, ...]:
        """Tau at which samples of the scaled means make losses of about epsilon."""
        taus = np.geomspace(1.05, 64.0, 40)
        exponents = [self._log_mass(tau) - (tau - 1) * epsilon for tau in taus]
        most = float(taus[int(np.argmin(exponents))])
        return tuple(float(f"{1 + part * (most - 1):.3g}") for part in (0.5, 1.0))

    def remove(self, source: NoiseSource, samples: int, shape: Shape, progress: ChunkProgress) -> BinsTerms:
        """P against Q: `samples` terms.

        Cost: O(samples n (t + reach)).
        """
        t, single = shape.t, shape.single
        phi, largest = self._tilts(t)
        log_z = min(shape.log_z, largest)
        share = 0.5 if single else 1.0
        loss, weight = np.empty(samples), np.empty(samples)
        for start, stop in self._chunks(samples):
            number = np.arange(start, stop)
            apart = number % 2 == 1 if single else np.zeros(len(number), bool)
            log_w, s = np.full(len(number), log_z), np.empty((self._n, len(number)))
            index = number[~apart] // (2 if single else 1)
            log_w[~apart], s[:, ~apart] = self._copies(source, index, phi)
            if single:
                s[:, apart] = self._apart(source, t + 1, number[apart] // 2, single)
            u = s + self._root @ self._normals(source, start, stop)
            r = u - self._diagonal[:, None] / 2
            found = self._log_total(r)
            log_d = math.log(share) - log_z + t * found
            for tau in single:
                part = self._log_total(tau * r) - self._log_mass(tau)
                log_d = np.logaddexp(log_d, part + math.log((1 - share) / len(single)))
            loss[start:stop], weight[start:stop] = found, log_w - log_z + found - log_d
            progress(stop - start)
        return BinsTerms(loss, weight, t - 1, largest - math.log(share) + log_peak(t), True)

    def log_z(self, source: NoiseSource, samples: int, t: int) -> float:
        """Log of the mean W, roughly: the constant z is free."""
        found = self._copies(source, np.arange(min(samples, 256)), self._tilts(t)[0])[0]
        return float(f"{float(found.max() + np.log(np.exp(found - found.max()).mean())):.3g}")

    def tilt(self, epsilon: float) -> float:
        """The s whose bound of the terms at epsilon is smallest."""
        return max(0.0, (epsilon - self._half) / self._square) if self._square > 0 else 0.0

    def add(self, source: NoiseSource, samples: int, s: float, progress: ChunkProgress) -> BinsTerms:
        """Q against P: `samples` terms of tilt s.

        Cost: O(samples n reach).
        """
        loss, weight = np.empty(samples), np.empty(samples)
        square = s * s * self._square
        for start, stop in self._chunks(samples):
            u = self._root @ self._normals(source, start, stop) - s * self._mean[:, None]
            loss[start:stop] = self._log_total(u - self._diagonal[:, None] / 2)
            weight[start:stop] = s * (self._chances @ u) + square / 2
            progress(stop - start)
        return BinsTerms(loss, weight, s, float(s * self._half + square / 2), False)

    def _tilts(self, t: int) -> tuple[list[float], float]:
        """The phi of (*) for copies 1 to t, and the log of the bound of W."""
        phi, per_step, total = [0.0] * t, 0.0, 0.0
        for i in range(t, 0, -1):
            phi[i - 1] = per_step
            law = self._tilted(np.full((self._n, 1), per_step))
            total += float(law.log_total[0])
            if i > 1:
                per_step += self._rho(float(law.chances.max()), i - 1) / (i - 1)
        return phi, total

    def _rho(self, chance: float, tau: int) -> float:
        g = self._largest
        later = np.maximum.accumulate(g[:0:-1])  # entry d - 1: the largest from b - d on
        rises, others = np.expm1(np.minimum(tau * g, 300.0)), np.expm1(np.minimum(tau * later, 300.0))
        singles = chance * (rises[0] + 2 * rises[1:].sum() + (rises[1:] * others).sum())
        pairs = tau * max(g[0], float((g[1:] + later).max()) if len(later) else 0.0)
        return float(min(singles, pairs))

    def _copies(self, source: NoiseSource, numbers: NDArray[np.int64], phi: list[float]) -> tuple[Floats, Floats]:
        """Log W and s = <c_j, sum of the copies' means>, (m,) and (n, m)."""
        s, log_w = np.zeros((self._n, len(numbers))), np.zeros(len(numbers))
        for i, tilt in enumerate(phi):
            law = self._tilted(s + tilt if i else np.full((self._n, 1), tilt))
            taken = self._draw(law, self._uniforms(source, i + 1, numbers))
            log_w += law.log_total - tilt * taken.sum(axis=0)
            s += self._gram @ taken
        return log_w, s

    def _apart(self, source: NoiseSource, row: int, numbers: NDArray[np.int64], single: tuple[float, ...]) -> Floats:
        """Means of samples that are scaled, (n, m)."""
        s = np.empty((self._n, len(numbers)))
        uniform = self._uniforms(source, row, numbers)
        which = numbers % len(single)
        for i, tau in enumerate(single):
            law = self._tilted((tau * (tau - 1) / 2 * self._diagonal)[:, None])
            taken = self._draw(law, uniform[:, which == i])
            s[:, which == i] = tau * (self._gram @ taken)
        return s

    def _log_mass(self, tau: float) -> float:
        """Log of E exp((tau^2 - tau) |m_S|^2 / 2)."""
        return float(self._log_total((tau * (tau - 1) / 2 * self._diagonal)[:, None])[0])

    def _draw(self, law: _Tilted, uniform: Floats) -> Floats:
        """Which steps are in S, (n, m), of uniform numbers (n + 1, m)."""
        taken = np.zeros((self._n, uniform.shape[1]))
        free = (law.waits <= uniform[-1] * law.waits[-1]).sum(axis=0)
        free = np.minimum(free, len(self._start) - 1)
        heads = uniform[:-1] < law.chances
        for i in range(self._n):
            here = heads[i] & (free <= i)
            taken[i] = here
            free[here] = i + self._b
        return taken

    def _tilted(self, h: Floats) -> _Tilted:
        V, logs = self._recursion(h)
        n, b = self._n, self._b
        with np.errstate(divide="ignore"):
            log_p, log_start = math.log(self._p), np.log(self._start)[:, None]
        waits = V[: len(self._start)]
        if logs:
            chances = np.exp(log_p + h + V[b : n + b] - V[:n])
            waits = np.exp(waits - waits.max(axis=0) + log_start)
        else:
            chances = self._p * np.exp(h) * V[b : n + b] / V[:n]
            waits = waits * self._start[:, None]
        return _Tilted(self._mixed(V, logs), chances, waits.cumsum(axis=0))

    def _log_total(self, h: Floats) -> Floats:
        return self._mixed(*self._recursion(h))

    def _mixed(self, V: Floats, logs: bool) -> Floats:
        first = V[: len(self._start)]
        if not logs:
            return np.asarray(np.log(self._start @ first))
        top = first.max(axis=0)
        return np.asarray(top + np.log(self._start @ np.exp(first - top)))

    def _recursion(self, h: Floats) -> tuple[Floats, bool]:
        """(n + b, m) the V of exponents (n, m), and whether these are logarithms, where V is too large or small."""
        n, b, p = self._n, self._b, self._p
        V = np.ones((n + b, h.shape[1]))
        with np.errstate(all="ignore"):
            taken = p * np.exp(h)
            for i in range(n - 1, -1, -1):
                np.multiply(taken[i], V[i + b], out=taken[i])
                np.multiply(1 - p, V[i + 1], out=V[i])
                V[i] += taken[i]
        if V.min() > 1e-150 and V.max() < 1e150:
            return V, False
        V = np.zeros((n + b, h.shape[1]))
        with np.errstate(divide="ignore"):
            log_p, log_stay = math.log(p), np.log(1 - p)
        for i in range(n - 1, -1, -1):
            V[i] = np.logaddexp(log_stay + V[i + 1], log_p + h[i] + V[i + b])
        return V, True

    def _marginals(self) -> Floats:
        """The chance of each step to be in S."""
        n, b = self._n, self._b
        joins = np.zeros(n + b)
        joins[: len(self._start)] = self._start
        free, result = 0.0, np.empty(n)
        for i in range(n):
            free += joins[i]
            result[i] = self._p * free
            joins[i + b] += result[i]
            free -= result[i]
        return result

    def _normals(self, source: NoiseSource, start: int, stop: int) -> Floats:
        z = source.normal(0, start * self._n, stop * self._n)
        return np.ascontiguousarray(z.reshape(-1, self._n).T, dtype=np.float64)

    def _uniforms(self, source: NoiseSource, row: int, numbers: NDArray[np.int64]) -> Floats:
        """(n + 1, m) uniform numbers, of consecutive samples."""
        if len(numbers) == 0:
            return np.empty((self._n + 1, 0))
        start, stop, size = int(numbers[0]), int(numbers[-1]) + 1, self._n + 1
        return np.ascontiguousarray(uniforms(source, row, start * size, stop * size).reshape(-1, size).T)

    def _chunks(self, samples: int) -> list[tuple[int, int]]:
        size = 4 * max(1, _SEPARATED_ELEMENTS // (4 * self._n))
        return [(start, min(start + size, samples)) for start in range(0, samples, size)]


Progress = Callable[[int, int], None]

TRIES = 256
REPLAY = 1e-5
"""Results are raised by 2 to 3 times this, relative: a claim at least the recomputed value times 1 - REPLAY holds."""

_MOST = 32  # times `samples` for Q against P


class SampledInterval(NamedTuple):
    """A two-sided interval, each end wrong with probability at most the failure given.

    Attributes:
        lower: not above the true value.
        upper: not below it.
    """

    lower: float
    upper: float


def mc_epsilon(
    strategy: Strategy,
    rule: Participation,
    sigma: float,
    delta: float,
    settings: MonteCarlo | None = None,
    progress: Progress | None = None,
) -> float:
    """Epsilon at delta, add-or-remove or zero-out, from samples: never below the true one, but for chance `failure`.

    Args:
        strategy: C, of any signs; |C| counts.
        rule: BallsInBins, or MinSeparationSampling with a C whose columns do not overlap b steps apart or more.
        sigma: noise standard deviation over the clip norm.
        delta: strictly between 0 and 1; the failure probability is inside it.
        settings: number of samples, failure.
        progress: called with terms done and terms in all, as far as known.
    Returns: epsilon, rounded up so that another machine's last bits do not matter: see REPLAY.
    Cost: O(samples b (b + t)) time, t a few to 64; some 100 MB.
    Raises: ArgumentError for other arguments, and where the samples are too few for delta; PlanError for another rule.
    """
    settings = MonteCarlo() if settings is None else settings
    sigma, delta = checks.positive("sigma", sigma), checks.probability("delta", delta)
    failure = _failure(settings, delta)
    found = _started(strategy, rule, sigma, ["delta", delta.hex()], settings, progress)
    return _outward(found.least_epsilon(delta - failure, math.log(TRIES / failure)))


def mc_delta(
    strategy: Strategy,
    rule: Participation,
    sigma: float,
    epsilon: float,
    settings: MonteCarlo | None = None,
    progress: Progress | None = None,
) -> float:
    """Delta at epsilon, from samples: the limit plus the failure probability, which is inside it.

    Args, Cost, Raises: as `mc_epsilon`; epsilon is not negative. A failure of None is 1/100 of what a pilot finds.
    Returns: delta, rounded up, at most 1.
    """
    settings = MonteCarlo() if settings is None else settings
    sigma, epsilon = checks.positive("sigma", sigma), checks.real("epsilon", epsilon, low=0.0)
    found = _started(strategy, rule, sigma, ["epsilon", epsilon.hex()], settings, progress)
    return min(1.0, _outward(found.least_delta(epsilon, settings.failure)))


def mc_interval(
    strategy: Strategy,
    rule: Participation,
    sigma: float,
    delta: float,
    settings: MonteCarlo | None = None,
    progress: Progress | None = None,
) -> SampledInterval:
    """Lower and upper limit of epsilon at delta, for comparisons: `failure` (or 1e-3) each, and not inside delta.

    Args, Cost, Raises: as `mc_epsilon`.
    """
    settings = MonteCarlo() if settings is None else settings
    sigma, delta = checks.positive("sigma", sigma), checks.probability("delta", delta)
    found = _started(strategy, rule, sigma, ["interval", delta.hex()], settings, progress)
    return found.interval(delta, 1e-3 if settings.failure is None else settings.failure)


class _EpsilonSearch:
    """Both directions of one sampler."""

    def __init__(
        self, sampler: Bins | SeparatedTerms, source: NoiseSource, samples: int, progress: Progress | None
    ) -> None:
        samples = 4 * -(-samples // 4)  # terms of two laws in equal numbers
        self._sampler, self._source, self._samples, self._pilot = sampler, source, samples, sampler.pilot
        self._report, self._done, self._total = progress, 0, 2 * samples

    def least_epsilon(self, m: float, stake: float) -> float:
        """The limit of epsilon at m, both directions; the wealth must reach e^stake."""
        terms, bet = self._remove(m, stake)
        first = _upper_epsilon(terms, m, stake, bet)
        terms, bet = self._add(first, m, stake)
        return max(first, _upper_epsilon(terms, m, stake, bet))

    def interval(self, delta: float, failure: float) -> SampledInterval:
        """Both limits of epsilon at delta."""
        stake = math.log(1 / failure)
        terms, bet = self._remove(delta, stake)
        first = _upper_epsilon(terms, delta, stake, bet)
        lower = _lower_epsilon(terms, delta, stake + math.log(2), bet)
        terms, bet = self._add(first, delta, stake)
        upper = max(first, _upper_epsilon(terms, delta, stake, bet))
        return SampledInterval(max(lower, _lower_epsilon(terms, delta, stake + math.log(2), bet)), upper)

    def least_delta(self, epsilon: float, failure: float | None) -> float:
        """The limit of delta at epsilon, and the failure."""
        shape, first = self._pilots(lambda pilot: _log_cap(pilot, epsilon), lambda _: epsilon)
        guess = float(np.exp(_log_terms(first, epsilon)).mean())
        failure = float(f"{max(1e-2 * guess, 1e-300):.2g}") if failure is None else failure
        stake = math.log(TRIES / failure)
        terms = self._sampler.remove(self._source.derive(b"remove"), self._samples, shape, self._progress)
        found = _upper_delta(first, terms, epsilon, stake)
        s = float(f"{self._sampler.tilt(epsilon):.3g}")
        pilot = self._sampler.add(self._source.derive(b"pilot add"), self._pilot, s, _silent)
        cap = math.exp(min(0.0, pilot.cap - s * epsilon))
        count = int(min(_MOST * self._samples, max(self._samples, 4 * stake * cap / max(found, 1e-300))))
        self._total = self._done + count
        terms = self._sampler.add(self._source.derive(b"add"), count, s, self._progress)
        return max(found, _upper_delta(pilot, terms, epsilon, stake)) + failure

    def _remove(self, m: float, stake: float) -> tuple[BinsTerms, "_Bet"]:
        """Terms of P against Q, of the power whose bet looks best, and the bet."""
        shape, pilot = self._pilots(lambda pilot: _Bet.upper(pilot, m, stake, self._samples, 0.0).at, lambda best: best)
        bet = _Bet.upper(pilot, m, stake, self._samples, 0.0)
        return self._sampler.remove(self._source.derive(b"remove"), self._samples, shape, self._progress), bet

    def _pilots(
        self, value: Callable[[BinsTerms], float], epsilon: Callable[[float], float]
    ) -> tuple[Shape, BinsTerms]:
        """The shape of the smallest value, and its pilot; powers rise until two in turn are worse."""
        key = self._source.derive(b"pilot remove")
        best, chosen = math.inf, Shape(2)
        for alone in (True, False):  # copies alone say about where epsilon is
            single = () if alone else self._sampler.single(epsilon(best))
            if not (alone or single):
                break
            worse, here, best = 0, math.inf, math.inf  # a pilot may miss the tails of copies alone: not compared
            for t in POWERS:
                shape = Shape(t, single, self._sampler.log_z(key, 1024, t))
                found = value(self._sampler.remove(key, self._pilot // 2, shape, _silent))
                worse, here = (0, found) if found < here else (worse + 1, here)
                best, chosen = (found, shape) if found < best else (best, chosen)
                if worse == 2:
                    break
        return chosen, self._sampler.remove(key, self._pilot, chosen, _silent)

    def _add(self, target: float, m: float, stake: float) -> tuple[BinsTerms, "_Bet"]:
        """Terms of Q against P, as many as it takes to show that its epsilon is not above the target, if it is not."""
        most = _MOST * self._samples
        at = target
        while True:  # where the bound of the terms is small enough for so many samples
            s = float(f"{self._sampler.tilt(at):.3g}")
            pilot = self._sampler.add(self._source.derive(b"pilot add"), self._pilot, s, _silent)
            if 1.5 * stake / math.log1p(0.9 * m / _cap(pilot, at)) <= most:
                break
            at = 1.02 * at + 0.01
            if at > 1e4:
                raise ArgumentError(f"samples must be more for so small a delta, got {self._samples}")
        bet = _Bet.upper(pilot, m, stake, most, at)
        growth = _growth(np.exp(_log_terms(pilot, bet.at)), m, bet.size)
        count = min(most, 1024 * math.ceil(max(0.1 * self._samples, 1.3 * stake / growth) / 1024))
        bet = _Bet.upper(pilot, m, stake, count, at)
        self._total = self._done + count
        return self._sampler.add(self._source.derive(b"add"), count, s, self._progress), bet

    def _progress(self, count: int) -> None:
        self._done += count
        if self._report is not None:
            self._report(self._done, self._total)


class _Bet(NamedTuple):
    """The bet l, and the epsilon that it was chosen for."""

    size: float
    at: float

    @classmethod
    def upper(cls, pilot: BinsTerms, m: float, stake: float, samples: int, low: float) -> "_Bet":
        """The bet that a pilot finds best: of the smallest epsilon, from `low` on, at which the stake is reached."""

        def reached(epsilon: float) -> bool:
            X = np.exp(_log_terms(pilot, epsilon))
            return samples * _growth(X, m, _best(X, m, _cap(pilot, epsilon))) >= 1.05 * stake

        at = low if reached(low) else _smallest(reached, low, 1e-4)
        size = _best(np.exp(_log_terms(pilot, at)), m, _cap(pilot, at))
        return cls(float(f"{size:.3g}"), at)


def _best(X: Floats, m: float, cap: float) -> float:
    """The bet of the largest growth, of those that a term of the cap cannot ruin."""
    high = math.log(0.9 / cap)
    found = scipy.optimize.minimize_scalar(
        lambda x: -_growth(X, m, math.exp(x)), bounds=(high - 30, high), method="bounded"
    )
    return math.exp(float(found.x))


def _growth(X: Floats, m: float, bet: float) -> float:
    return float(np.log1p(bet * (m - X)).mean())


def _cap(terms: BinsTerms, epsilon: float) -> float:
    """What no term at epsilon is above: B(eps)."""
    return math.exp(min(600.0, max(-600.0, _log_cap(terms, epsilon))))


def _log_cap(terms: BinsTerms, epsilon: float) -> float:
    return terms.cap - terms.slope * epsilon


def _log_terms(terms: BinsTerms, epsilon: float) -> Floats:
    """Log X(eps), -infinity for 0."""
    excess = terms.loss - epsilon if terms.remove else -terms.loss - epsilon  # how far the loss is above epsilon
    result = np.full(len(excess), -math.inf)
    (some,) = np.nonzero(excess > 0)
    result[some] = terms.weight[some] + np.log(-np.expm1(-excess[some]))
    return result


def _wealth(X: Floats, m: float, bet: float) -> float:
    """Log K; -infinity where a factor is not above 0."""
    changes = bet * (m - X)
    return float(np.log1p(changes).sum()) if changes.min() > -1 else -math.inf


def _upper_epsilon(terms: BinsTerms, m: float, stake: float, bet: _Bet) -> float:
    """E of the theorem."""
    log_most = math.log(m + 1 / bet.size)  # what a term may be
    slope, here = terms.slope, terms.cap
    if slope <= 0 and here > log_most:
        raise AssertionError("a bet that a term could ruin")
    floor = max(0.0, (here - log_most) / slope) if slope > 0 else 0.0

    def reached(epsilon: float) -> bool:
        return _wealth(np.exp(_log_terms(terms, epsilon)), m, bet.size) >= stake

    return floor if reached(floor) else _smallest(reached, floor, 1e-10)


def _lower_epsilon(terms: BinsTerms, m: float, stake: float, bet: _Bet) -> float:
    """The largest epsilon at which the bet that delta is above m, of the same size, wins."""
    size = min(bet.size, 0.5 / m)

    def lost(epsilon: float) -> bool:
        return _wealth(np.exp(_log_terms(terms, epsilon)), m, -size) < stake

    return 0.0 if lost(0.0) else _smallest(lost, 0.0, 1e-10) * (1 - 1e-9)


def _delta_bet(pilot: BinsTerms, epsilon: float, stake: float, samples: int) -> float:
    spread = max(float(np.exp(_log_terms(pilot, epsilon)).var()), 1e-300)
    return float(f"{min(0.9 / _cap(pilot, epsilon), math.sqrt(2 * stake / (samples * spread))):.3g}")


def _upper_delta(pilot: BinsTerms, terms: BinsTerms, epsilon: float, stake: float) -> float:
    """The smallest m with K >= e^stake."""
    size = _delta_bet(pilot, epsilon, stake, len(terms.loss))
    X = np.exp(_log_terms(terms, epsilon))
    high = float(X.max()) + math.expm1(stake / len(X)) / size
    return bisect(lambda m: _wealth(X, m, size) >= stake, inside=high, outside=0.0, relative=1e-11)


def _smallest(reached: Callable[[float], bool], low: float, precision: float) -> float:
    """The smallest epsilon above `low` at which it is, from above."""
    step = 1.0
    while not reached(low + step):
        step *= 2
        if step > 1e6:
            raise ArgumentError("samples must be more for so small a delta: no epsilon could be shown")
    return bisect(reached, inside=low + step, outside=low, relative=precision, floor=1e-3)


def _started(
    strategy: Strategy,
    rule: Participation,
    sigma: float,
    goal: list[str],
    settings: MonteCarlo,
    progress: Progress | None,
) -> "_EpsilonSearch":
    if not isinstance(rule, AmplifiedOrder):
        raise PlanError(f"samples are drawn for balls in bins and for sampling with separation, got {rule!r}")
    sampler = rule.terms(strategy, sigma)
    return _EpsilonSearch(sampler, _source(strategy, rule, sigma, goal, settings), settings.samples, progress)


def _source(
    strategy: Strategy,
    rule: Any,  # a dataclass, whose fields are hashed
    sigma: float,
    goal: list[str],
    settings: MonteCarlo,
) -> NoiseSource:
    fields = {one.name: getattr(rule, one.name) for one in dataclasses.fields(rule)}
    failure = None if settings.failure is None else settings.failure.hex()
    text = {
        "what": "anyorder amplification by samples, 1",
        "strategy": strategy.to_dict(),
        "rule": [rule.kind, fields],
        "sigma": sigma.hex(),
        "goal": goal,
        "settings": [settings.samples, failure, settings.salt],
    }
    packed = json.dumps(text, sort_keys=True, allow_nan=False).encode()
    return NoiseSource(hashlib.blake2b(packed, digest_size=32).digest())


def _failure(settings: MonteCarlo, delta: float) -> float:
    failure = delta / 100 if settings.failure is None else settings.failure
    if failure >= delta:
        raise ArgumentError(f"failure must be below delta={delta:g}, which it is inside of, got {failure:g}")
    return failure


def _outward(value: float) -> float:
    """Up by 2 REPLAY, and to the next of a grid of six digits: last bits hardly ever move it."""
    if value <= 0:
        return 0.0
    raised = value * (1 + 2 * REPLAY)
    digits = 5 - math.floor(math.log10(raised))
    scale = 10.0**digits
    return math.ceil(raised * scale) / scale if digits >= 0 else raised


def _silent(count: int) -> None:
    """Nobody looks."""
