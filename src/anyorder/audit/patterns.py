"""Steps for canaries: the worst that a plan's rule allows, or random ones; never steps that it does not allow."""

from collections.abc import Iterator
from itertools import chain, combinations, islice
from typing import assert_never

import numpy as np
from numpy.typing import NDArray

from anyorder import _check
from anyorder.audit.scores import visible
from anyorder.errors import ArgumentError
from anyorder.noise import NoiseSource
from anyorder.participation import Participation
from anyorder.participation.patterns import Listed, Pattern, PerEpoch, Separated
from anyorder.strategy import Strategy
from anyorder.strategy.kinds import kind_of
from anyorder.strategy.toeplitz import Toeplitz

__all__ = ["random_steps", "worst_steps"]

Steps = tuple[int, ...]
Floats = NDArray[np.float64]

_ALL = 1 << 14  # sets of steps that are gone through one by one
_BLOCK = 512  # patterns whose norms are made together
_GRAM = 2048  # steps up to which C^T C is made


def worst_steps(strategy: Strategy, participation: Participation) -> Steps:
    """The allowed steps of which a release shows most: the largest || C pi || that was found.

    The true maximum over all allowed sets of steps where C^T C has no negative entry and the patterns are listed, or
    where they are few, or single steps, or `Separated` under a Toeplitz C whose first column neither rises nor goes
    below zero: then 0, b, 2b, .. Elsewhere the best of regular patterns, improved step by step. Under secret sampling:
    of the steps that the coins can give, as if they were known.

    Args:
        strategy: C.
        participation: the plan's.
    Returns: ascending steps.
    Cost: for listed patterns a stream over each different one; else O(n^2) memory up to n = 2048.
    """
    kind_of(strategy)
    pattern = participation.pattern
    if pattern.max_participations == 1 and type(pattern) is not Listed:
        return (int(np.argmax(strategy.column_norms_squared())),)
    if type(pattern) is Separated and _falls(strategy):
        return tuple(pattern.worst().tolist())
    if strategy.n > _GRAM:
        return _best(strategy, _candidates(pattern))
    C = strategy.matrix()
    return _improved(C.T @ C, pattern)


def random_steps(participation: Participation, count: int, source: NoiseSource) -> list[Steps]:
    """Allowed steps for each of `count` canaries, as many as a unit may take, independent of each other.

    Listed patterns are drawn evenly; in shuffled epochs each step of an epoch is as likely as any other; separated
    steps are drawn evenly among all sets of the largest size. Under secret sampling they are of what the coins can
    give, and not drawn by their law: `plant` does that.

    Args:
        participation: the plan's.
        count: number of canaries.
        source: where the draws come from; `NoiseSource.random()`, or one derived from a key.
    """
    count = _check.integer("count", count, low=1)
    if not isinstance(source, NoiseSource):
        raise ArgumentError(f"source must be an anyorder NoiseSource, got {type(source).__name__}")
    pattern = participation.pattern
    match pattern:
        case Listed():
            chosen = _numbers(source, 0, count, pattern.num_units).tolist()
            listed = [*pattern.enumerate()]
            return [listed[i] for i in chosen]
        case Separated(n=n, b=b):
            k = pattern.max_participations
            free = n - (k - 1) * (b - 1)  # a set of k of these, spread out, is a set of separated steps
            spread = (b - 1) * np.arange(k)
            order = (np.argsort(source.words(c, 0, free), kind="stable")[:k] for c in range(count))
            return [tuple((np.sort(picked) + spread).tolist()) for picked in order]
        case PerEpoch(k=k, steps_per_epoch=s):
            places = np.stack([_numbers(source, e, count, s) + e * s for e in range(k)], axis=1)
            return [tuple(steps) for steps in places.tolist()]
        case _:
            assert_never(pattern)


def _numbers(source: NoiseSource, row: int, count: int, below: int) -> NDArray[np.int64]:
    """(count,) integers from 0 to below - 1."""
    words = source.words(row, 0, 2 * count).view(np.uint64)
    return (words % np.uint64(below)).astype(np.int64)


def _falls(strategy: Strategy) -> bool:
    """Whether C is Toeplitz with c_0 >= c_1 >= .. >= 0: steps that are early and close show most."""
    if not isinstance(strategy, Toeplitz):
        return False
    c = strategy.toeplitz_coefficients()
    return bool((c >= 0).all() and (np.diff(c) <= 0).all())


def _best(strategy: Strategy, patterns: Iterator[Steps]) -> Steps:
    """The pattern of largest || C pi ||, by streams over blocks of patterns."""
    best: Steps = ()
    most = -1.0
    different = iter(dict.fromkeys(patterns))
    while block := [*islice(different, _BLOCK)]:
        norms = visible(strategy, block, len(block))
        if norms.max() > most:
            best, most = block[int(norms.argmax())], float(norms.max())
    return best


def _candidates(pattern: Pattern) -> Iterator[Steps]:
    """All listed patterns; of the others the guess of the worst, and regular ones."""
    match pattern:
        case Listed():
            return pattern.enumerate()
        case Separated(n=n) | PerEpoch(n=n):
            regular = (tuple(part.tolist()) for group in pattern.disjoint() for part in group)
            last = (tuple(range(n - 1 - i, -1, -pattern.spread))[: pattern.max_participations] for i in range(8))
            ends = (tuple(sorted(steps)) for steps in last if steps and pattern.allows(steps))
            return chain([tuple(pattern.worst().tolist())], ends, islice(regular, _BLOCK))
        case _:
            assert_never(pattern)


def _improved(X: Floats, pattern: Pattern) -> Steps:
    """The best of all sets of steps where they are few; else of the candidates, each improved one step at a time."""
    listed = type(pattern) is Listed
    if pattern.count(_ALL) <= _ALL or listed:
        maximal = dict.fromkeys(pattern.enumerate())
        if (X < 0).any() and sum(2 ** min(len(steps), 15) for steps in maximal) <= _ALL:
            subsets = (s for p in maximal for size in range(1, len(p) + 1) for s in combinations(p, size))
            return max(dict.fromkeys(subsets), key=lambda steps: _square(X, steps))
        best = max(maximal, key=lambda steps: _square(X, steps))
        return _climbed(X, pattern, best) if (X < 0).any() else best
    starts = sorted(dict.fromkeys(_candidates(pattern)), key=lambda steps: -_square(X, steps))[:8]
    return max((_climbed(X, pattern, steps) for steps in starts), key=lambda steps: _square(X, steps))


def _square(X: Floats, steps: Steps) -> float:
    return float(X[np.ix_(steps, steps)].sum())


def _climbed(X: Floats, pattern: Pattern, steps: Steps) -> Steps:
    """Moves of one step, or without it, while || C pi ||^2 grows."""
    best, most = steps, _square(X, steps)
    moved = True
    while moved:
        moved = False
        for t in best:
            rest = tuple(s for s in best if s != t)
            gain = np.diag(X) + 2 * X[list(rest)].sum(axis=0)
            gain[~_open(pattern, rest, len(X))] = -np.inf
            s = int(gain.argmax())
            if rest and gain[s] < 0 and _square(X, rest) > most * (1 + 1e-12):
                best, most, moved = rest, _square(X, rest), True
            elif np.isfinite(gain[s]) and _square(X, rest) + gain[s] > most * (1 + 1e-12):
                best = tuple(sorted((*rest, s)))
                most, moved = _square(X, best), True
            if moved:
                break
    return best


def _open(pattern: Pattern, rest: Steps, n: int) -> NDArray[np.bool_]:
    """(n,) which single steps may join these."""
    match pattern:
        case Listed():
            return np.zeros(n, np.bool_)  # the patterns were all gone through
        case Separated(b=b):
            free = np.ones(n, np.bool_)
            for t in rest:
                free[max(0, t - b + 1) : t + b] = False
            return free
        case PerEpoch(steps_per_epoch=s):
            return np.asarray(~np.isin(np.arange(n) // s, [t // s for t in rest]))
        case _:
            assert_never(pattern)
