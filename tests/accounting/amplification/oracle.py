"""Brute force for secret sampling: the two hockey sticks of a mixture of Gaussians, by quadrature, for every scheme.

    remove(eps) = E_Q (L - e^eps)_+,  add(eps) = E_Q (1 - e^eps L)_+,   L = sum_S w_S exp(<m_S, y> - |m_S|^2 / 2)

with Q = N(0, I) and means in units of sigma. Along one line L is a sum of exponentials: convex, so it is below a level
on one interval, and the Gaussian integral over the line is closed. Across the others: the trapezoid rule (rank <= 4,
to about 1e-8, halved to tell), else scrambled Sobol points of the law that the integral is over.

Nothing of the package's own accounting is used here, and no bound: every set of steps is summed.
"""

import itertools
from typing import NamedTuple

import numpy as np
from scipy.special import logsumexp, ndtr, ndtri
from scipy.stats import qmc

from anyorder.participation import BallsInBins, CyclicPoisson, MinSeparationSampling, PoissonSampling, RandomAllocation

REACH = 9.0  # deviations on either side of every mean: what lies beyond has mass 1e-19


class Deltas(NamedTuple):
    """Of the run with the unit against that without it, and the other way round."""

    remove: float
    add: float

    @property
    def worst(self):
        return max(self)


def mixture_deltas(gram, weights, sigma, epsilon, step=0.125):
    """Both hockey sticks of a mixture with a Gram matrix of any signs; the rank decides the method."""
    means = _rotated(np.asarray(gram, dtype=float) / sigma**2)
    weights = np.asarray(weights, dtype=float)
    if means.shape[1] <= 4:
        return _trapezoid(means, weights, epsilon, step)
    return _sobol(means, weights, epsilon)


def mixture_worst(gram, weights, sigma, epsilon, step=0.125):
    """The larger of both."""
    return mixture_deltas(gram, weights, sigma, epsilon, step).worst


def _rotated(gram):
    """(sets, rank) vectors with this Gram matrix; the first axis has every mean above 0 where the Gram matrix has."""
    values, vectors = np.linalg.eigh(gram)
    kept = values > 1e-12 * max(values.max(), 1e-300)
    means = vectors[:, kept] * np.sqrt(values[kept])
    if means.shape[1] == 0:
        return np.zeros((len(gram), 1))
    total = means.sum(axis=0)
    if np.linalg.norm(total) < 1e-9:
        return means[:, ::-1]
    frame, _ = np.linalg.qr(np.column_stack([total, np.eye(len(total))]))
    return means @ (frame * np.sign(frame[:, 0] @ total))


def _line(log_terms, slopes, log_level):
    """(left, right) of the interval on which sum_i exp(log_terms_i + slopes_i t) is below a level; none: left >= right.

    Newton on the logarithm, which is convex, from outside the interval: it never steps over an end.
    """
    ends = []
    for sign in (-1.0, 1.0):
        s = sign * slopes
        out = s > 1e-13
        if not out.any():
            flat = logsumexp(log_terms, axis=-1) if not (np.abs(slopes) > 1e-13).any() else None
            end = np.full(log_terms.shape[:-1], np.inf)
            ends.append(end if flat is None else np.where(flat < log_level, end, -end))
            continue
        t = ((log_level - log_terms[..., out]) / s[out]).min(axis=-1)
        never = np.zeros(t.shape, dtype=bool)  # the level is not crossed on this side
        for _ in range(80):
            exponents = log_terms + s * t[..., None]
            top = exponents.max(axis=-1, keepdims=True)
            parts = np.exp(exponents - top)
            total = parts.sum(axis=-1)
            slope = (parts * s).sum(axis=-1) / total
            excess = np.where(never, 0.0, top[..., 0] + np.log(total) - log_level)
            never |= (excess > 0) & (slope * 1e4 < excess)
            t = t - np.where(never | (excess <= 0), 0.0, excess / np.where(slope > 0, slope, 1.0))
            if (excess < 1e-13).all():
                break
        t = np.where(never, -np.inf, t)
        ends.append(t)
    return -ends[0], ends[1]


def _inner(means, weights, log_level, y, over):
    """Integral along the first axis, at y on the others, of (L - e^level)_+ if `over`, else of (e^level - L)_+."""
    slopes, rest = means[:, 0], means[:, 1:]
    log_side = np.log(weights) + y @ rest.T - (rest**2).sum(axis=1) / 2  # of the other coordinates alone
    left, right = _line(log_side - slopes**2 / 2, slopes, log_level)
    level, side = np.exp(log_level), np.exp(log_side)
    empty = left >= right
    left, right = np.where(empty, 0.0, left)[..., None], np.where(empty, 0.0, right)[..., None]
    if over:
        inside = side * (ndtr(slopes - right) + ndtr(left - slopes))
        return np.maximum(inside.sum(axis=-1) - level * (ndtr(-right) + ndtr(left))[..., 0], 0.0)
    inside = side * (ndtr(right - slopes) - ndtr(left - slopes))
    return np.maximum(level * (ndtr(right) - ndtr(left))[..., 0] - inside.sum(axis=-1), 0.0)


def _trapezoid(means, weights, epsilon, step):
    rest = means[:, 1:]
    remove = add = 0.0
    axes = [np.arange(min(0, m.min()) - REACH, max(0, m.max()) + REACH + step, step) for m in rest.T]
    for first in axes[0] if axes else [None]:
        grid = np.stack(np.meshgrid([first], *axes[1:], indexing="ij"), axis=-1) if axes else np.zeros((1, 0))
        y = grid.reshape(-1, rest.shape[1]) if axes else grid
        near = (y**2).sum(axis=1) / 2
        closest = np.minimum(near, ((y[:, None, :] - rest) ** 2).sum(axis=-1).min(axis=1) / 2)
        y, near = y[closest < REACH**2 / 2 + 2], near[closest < REACH**2 / 2 + 2]
        density = np.exp(-near) * (step / np.sqrt(2 * np.pi)) ** rest.shape[1]
        if len(y):
            remove += density @ _inner(means, weights, epsilon, y, over=True)
            add += np.exp(epsilon) * (density @ _inner(means, weights, -epsilon, y, over=False))
    return Deltas(float(remove), float(add))


def _sobol(means, weights, epsilon, logs=13, scrambles=4):
    """About 1e-4 of a delta that is not tiny: for the integral with the unit, points come from the mixture."""
    rest, dimension = means[:, 1:], means.shape[1] - 1
    remove, add = [], []
    for seed in range(scrambles):
        u = qmc.Sobol(dimension + 1, seed=seed).random_base2(logs)
        z = ndtri(np.clip(u[:, 1:], 1e-15, 1 - 1e-15))
        which = np.minimum(np.searchsorted(np.cumsum(weights), u[:, 0]), len(weights) - 1)
        for part in np.array_split(np.arange(len(u)), max(1, len(u) * len(weights) // 2**18)):
            y = z[part] + rest[which[part]]
            log_ratio = logsumexp(np.log(weights) + y @ rest.T - (rest**2).sum(axis=1) / 2, axis=-1)
            remove.append(_inner(means, weights, epsilon, y, over=True) * np.exp(-log_ratio))
            add.append(np.exp(epsilon) * _inner(means, weights, -epsilon, z[part], over=False))
    return Deltas(float(np.concatenate(remove).mean()), float(np.concatenate(add).mean()))


def laws(rule):
    """For each kind of unit: [(probability, steps), ..], every set of steps that its coins may give."""
    if type(rule) is PoissonSampling:
        return [_coins(range(rule.n), rule.sampling_probability)]
    if type(rule) is CyclicPoisson:
        groups = min(rule.cycle, rule.n)
        return [_coins(range(j, rule.n, rule.cycle), rule.sampling_probability) for j in range(groups)]
    if type(rule) is BallsInBins:
        return [[(1 / rule.b, tuple(range(j, rule.n, rule.b))) for j in range(rule.b)]]
    if type(rule) is RandomAllocation:
        picks = itertools.product(range(rule.b), repeat=rule.k)
        return [[(rule.b**-rule.k, tuple(e * rule.b + j for e, j in enumerate(pick))) for pick in picks]]
    if type(rule) is MinSeparationSampling:
        p, b = rule.sampling_probability, rule.b
        late = p / (1 + (b - 1) * p) if rule.warm_start else 0.0
        starts = [(1 - (b - 1) * late, 0), *((late, w) for w in range(1, b) if late)]
        found = {}
        for weight, start in starts:
            for more, steps in _separated(start, rule.n, b, p):
                found[steps] = found.get(steps, 0.0) + weight * more
        return [[(weight, steps) for steps, weight in found.items() if weight > 0]]
    raise TypeError(f"no law of {rule!r}: what other units do matters there")


def _coins(steps, q):
    steps = list(steps)
    chosen = itertools.chain.from_iterable(itertools.combinations(steps, r) for r in range(len(steps) + 1))
    return [(q ** len(s) * (1 - q) ** (len(steps) - len(s)), s) for s in chosen if q < 1 or len(s) == len(steps)]


def _separated(t, n, b, p):
    if t >= n:
        return [(1.0, ())]
    found = [(p * weight, (t, *rest)) for weight, rest in _separated(t + b, n, b, p)]
    return found + ([((1 - p) * weight, rest) for weight, rest in _separated(t + 1, n, b, p)] if p < 1 else [])


def scheme_deltas(matrix, rule, sigma, epsilon, step=0.125):
    """Both hockey sticks of the dominating pair of a scheme with a dense C, the worst kind of unit for each."""
    found = []
    for law in laws(rule):
        weights, means = merged(np.abs(np.asarray(matrix, dtype=float)), law)
        found.append(mixture_deltas(means @ means.T, weights, sigma, epsilon, step))
    return Deltas(max(d.remove for d in found), max(d.add for d in found))


def merged(matrix, law):
    """(weights, means) of a law under a matrix, equal means as one."""
    means = np.array([matrix[:, list(steps)].sum(axis=1) for _, steps in law])
    _, first, which = np.unique(np.round(means, 12), axis=0, return_index=True, return_inverse=True)
    return np.bincount(which.ravel(), [weight for weight, _ in law]), means[first]


def truncated_deltas(rule, own, others, sigma, epsilon, points=200_001):
    """One step of truncated Poisson sampling with numbers for gradients: every batch, its law by enumeration.

    Args:
        own: the unit's number; 0 in its place without it (zero-out).
        others: numbers of the rest of the data set.
    """
    count = len(others)
    q, most = rule.sampling_probability, rule.batch_size
    atoms = []  # (probability, sum of others, unit in it)
    for drawn, weight in _masks(count + 1, q):
        kept = list(itertools.combinations(drawn, min(most, len(drawn))))
        atoms += [(weight / len(kept), sum(others[i] for i in batch if i < count), count in batch) for batch in kept]
    with_unit = [(w, s + own * inside) for w, s, inside in atoms]
    without = [(w, s) for w, s, _ in atoms]
    sums = np.array([s for _, s in with_unit + without])
    y = np.linspace(sums.min() - REACH * sigma, sums.max() + REACH * sigma, points)
    p, r = (sum(w * np.exp(-((y - s) ** 2) / (2 * sigma**2)) for w, s in law) for law in (with_unit, without))
    scale = (y[1] - y[0]) / (sigma * np.sqrt(2 * np.pi))
    level = np.exp(epsilon)
    return Deltas(float(np.maximum(p - level * r, 0).sum() * scale), float(np.maximum(r - level * p, 0).sum() * scale))


def _masks(count, q):
    for size in range(count + 1):
        for drawn in itertools.combinations(range(count), size):
            yield drawn, q**size * (1 - q) ** (count - size)
