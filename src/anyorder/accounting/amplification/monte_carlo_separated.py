"""Samples for sampling with separation: bounded, unbiased terms of delta(epsilon), in both directions.

Means are over sigma. Columns that are b steps apart or more do not overlap, so that with G_ij = <c_i, c_j>,
u_i = <c_i, y> and r_i = u_i - G_ii / 2, log L = log sum_S w_S exp(sum over i in S of r_i) is a backward recursion:

    V_i = (1 - p) V_{i+1} + p e^{r_i} V_{i+b},   V_i = 1 for i >= n,   L = sum over first waits w of chance_w V_w

and the same recursion with other exponents h_i is E exp(sum over i in S of h_i), and draws S of the law so tilted:
who may come comes at i with probability p e^{h_i} V_{i+b} / V_i.

**P against Q.** As for balls in bins: L^t Q is, but for its mass, a mixture over t copies, of weights
p = prod w_S exp(sum_{i < l} <m_i, m_l>). Copy i is drawn with weight w_S exp(sum over j in S of (s_j + phi_i)), s_j
being <c_j, sum of the copies before>, and z_i is its total. So W = p / q = prod_i z_i exp(-phi_i |S_i|), and

    log W <= sum_i kappa_i,    kappa_i = log E exp(phi_i |S|),    where phi_l = sum_{i > l} rho_i / (i - 1)   (*)

and rho_i is such that log z_i - kappa_i <= rho_i / (i - 1) times the number of steps of all copies before. *Such a
rho_i.* z_i / e^{kappa_i} = E exp(sum over j in S of s_j) for the S tilted by phi_i. S comes at j with a probability of
at most p_i, given the past: it lies in a set of independent coins, and so log z_i - kappa_i <= p_i sum_j (e^{s_j} - 1),
convex in the copies before: let all be one, R, with tau = i - 1, so that s_j = tau sum over a in R of G_ja. At most two
a lie within b of j: at d after the one, and b - d or more before the other. With g(d) the largest G_{j,j+d}, h(d) the
largest g from d on, and e^{x+y} - 1 = (e^x - 1) + (e^y - 1) + their product, one may take

    rho = p_i (sum_{|d| < b} (e^{tau g(|d|)} - 1) + sum_{0 < d < b} (e^{tau g(d)} - 1) (e^{tau h(b-d)} - 1))

or, as two steps of S at most lie within b of one of R, rho = tau max(g(0), max_{0 < d < b} g(d) + h(b-d)).   QED

Half of the samples come from Z^-1 sum_S w_S exp(tau sum of r_i) Q instead, mixtures of means tau m_S, for a few tau:
few steps that stand out are as likely as many. The terms, and what bounds them, are those of balls in bins.

**Q against P.** As there, along the mean m = sum_S w_S m_S, of which the part of step i is its chance.
"""

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import cholesky_banded

from anyorder.accounting.amplification.mixture import absolute_columns, reach
from anyorder.accounting.amplification.monte_carlo_terms import Progress, Shape, Terms, log_peak, uniforms
from anyorder.noise import NoiseSource
from anyorder.participation.sampled import MinSeparationSampling
from anyorder.strategy import Strategy

__all__ = ["Separated", "separated_band"]

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

_ELEMENTS = 1 << 20  # of a chunk, steps times samples: 8 MiB
_ROUNDING = 1e-10  # added to the diagonal, so that its root exists: a larger Gram matrix never lowers delta


def separated_band(strategy: Strategy, rule: MinSeparationSampling) -> Floats:
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


class Separated:
    """Samples of one C under one rule.

    Args:
        band: as `separated_band` gives it, over sigma^2.
        rule: its p and b, and whether it starts warm.
    """

    def __init__(self, band: Floats, rule: MinSeparationSampling) -> None:
        self._n, self._b, self._p = rule.n, rule.b, rule.sampling_probability
        self.pilot = max(2048, min(16384, (1 << 24) // rule.n))
        late = rule.marginal if rule.warm_start else 0.0
        self._start = np.array([1 - (self._b - 1) * late, *([late] * (self._b - 1 if rule.warm_start else 0))])
        band = band.copy()
        band[0] += _ROUNDING * band[0].max()
        self._diagonal = band[0]
        self._largest = np.zeros(self._b)
        self._largest[: len(band)] = band.max(axis=1)
        self._gram, self._root = _Band(band, True), _Band(cholesky_banded(band, lower=True), False)
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

    def remove(self, source: NoiseSource, samples: int, shape: Shape, progress: Progress) -> Terms:
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
        return Terms(loss, weight, t - 1, largest - math.log(share) + log_peak(t), True)

    def log_z(self, source: NoiseSource, samples: int, t: int) -> float:
        """Log of the mean W, roughly: the constant z is free."""
        found = self._copies(source, np.arange(min(samples, 256)), self._tilts(t)[0])[0]
        return float(f"{float(found.max() + np.log(np.exp(found - found.max()).mean())):.3g}")

    def tilt(self, epsilon: float) -> float:
        """The s whose bound of the terms at epsilon is smallest."""
        return max(0.0, (epsilon - self._half) / self._square) if self._square > 0 else 0.0

    def add(self, source: NoiseSource, samples: int, s: float, progress: Progress) -> Terms:
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
        return Terms(loss, weight, s, float(s * self._half + square / 2), False)

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
        coins = chance * (rises[0] + 2 * rises[1:].sum() + (rises[1:] * others).sum())
        pairs = tau * max(g[0], float((g[1:] + later).max()) if len(later) else 0.0)
        return float(min(coins, pairs))

    def _copies(self, source: NoiseSource, numbers: NDArray[np.int64], phi: list[float]) -> tuple[Floats, Floats]:
        """Log W and s = <c_j, sum of the copies' means>, (m,) and (n, m)."""
        s, log_w = np.zeros((self._n, len(numbers))), np.zeros(len(numbers))
        for i, tilt in enumerate(phi):
            law = self._tilted(s + tilt if i else np.full((self._n, 1), tilt))
            taken = self._draw(law, self._coins(source, i + 1, numbers))
            log_w += law.log_total - tilt * taken.sum(axis=0)
            s += self._gram @ taken
        return log_w, s

    def _apart(self, source: NoiseSource, row: int, numbers: NDArray[np.int64], single: tuple[float, ...]) -> Floats:
        """Means of samples that are scaled, (n, m)."""
        s = np.empty((self._n, len(numbers)))
        coins = self._coins(source, row, numbers)
        which = numbers % len(single)
        for i, tau in enumerate(single):
            law = self._tilted((tau * (tau - 1) / 2 * self._diagonal)[:, None])
            taken = self._draw(law, coins[:, which == i])
            s[:, which == i] = tau * (self._gram @ taken)
        return s

    def _log_mass(self, tau: float) -> float:
        """Log of E exp((tau^2 - tau) |m_S|^2 / 2)."""
        return float(self._log_total((tau * (tau - 1) / 2 * self._diagonal)[:, None])[0])

    def _draw(self, law: _Tilted, coins: Floats) -> Floats:
        """Which steps are in S, (n, m), of uniform numbers (n + 1, m)."""
        taken = np.zeros((self._n, coins.shape[1]))
        free = (law.waits <= coins[-1] * law.waits[-1]).sum(axis=0)
        free = np.minimum(free, len(self._start) - 1)
        heads = coins[:-1] < law.chances
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

    def _coins(self, source: NoiseSource, row: int, numbers: NDArray[np.int64]) -> Floats:
        """(n + 1, m) uniform numbers, of consecutive samples."""
        if len(numbers) == 0:
            return np.empty((self._n + 1, 0))
        start, stop, size = int(numbers[0]), int(numbers[-1]) + 1, self._n + 1
        return np.ascontiguousarray(uniforms(source, row, start * size, stop * size).reshape(-1, size).T)

    def _chunks(self, samples: int) -> list[tuple[int, int]]:
        size = 4 * max(1, _ELEMENTS // (4 * self._n))
        return [(start, min(start + size, samples)) for start in range(0, samples, size)]
