"""Scores of canaries: how much of each is in what was released, whitened by the mechanism that released it."""

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from anyorder import _check
from anyorder.audit.canaries import Canaries
from anyorder.audit.whiten import forward
from anyorder.errors import ArgumentError, TrainingError
from anyorder.strategy import Strategy

__all__ = ["Patterns", "SampledScorer", "Scorer", "sampled_scores", "scores", "visible"]

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]


def scores(
    released: Iterable[Any],
    strategy: Strategy | None,
    participations: Sequence[Any] | NDArray[Any],
    canaries: Canaries,
    *,
    whiten: bool = True,
) -> Floats:
    """How strongly each canary shows in the rows that were released, in the units of the rows.

    Of canary g_c with the 0/1 vector pi_c of its steps, and with Ghat the released rows,

        s_c = (C pi_c)^T (C Ghat) g_c / || C pi_c ||

    For rows Ghat = G + s K Z (C K = 1), and canaries that are added with norm `clip`,

        s_c ~ N(included_c clip || C pi_c ||, s^2)   plus what everybody else adds in the direction of g_c:

    the score sees the whole mu_c = clip || C pi_c || / s that the mechanism gives to a unit in these steps; no other
    function of the rows sees more. Orthogonal canaries have independent scores. Of rows divided by a constant, all is
    divided by it.

    The estimators "vanilla" and "online" of a tree release less than C G + s Z (C K is not symmetric): for them the
    noise in the score is above s, and `anyorder.audit.as_released(strategy)` in the place of the strategy gives the
    best score, with noise s again.

    Args:
        released: the n rows, (n, size) or any iterable of n rows of `size` numbers in any shape, NumPy or torch; each
            is looked at once, in order.
        strategy: C; None for independent noise.
        participations: the steps where each canary is, or would be had its coin come up: one list for each canary, or
            one list for all; or bools over steps, (count, n) or (n,).
        canaries: the directions.
        whiten: False for the plain sum over its steps, sum_t pi_c[t] <row_t, g_c> / sqrt(|pi_c|), which knows nothing
            of C: it sees less, and never more.
    Returns: (count,).
    Raises: ArgumentError if something does not fit together, a row is not finite, or rows are missing.
    Cost: the inner products (`Canaries.dot`) and the memory of the strategy's state for each canary, O(count) numbers
        times a few; never all rows.

    Example:
        >>> canaries = Canaries(size=4, count=2, dimension=4, seed=0)
        >>> rows = np.array([canaries.vector(1), canaries.vector(1)])
        >>> np.round(scores(rows, None, [0, 1], canaries), 6).tolist()
        [0.0, 1.414214]
    """
    scorer = Scorer(strategy, participations, canaries, whiten=whiten)
    for row in released:
        scorer.add(row)
    scorer.check_complete()
    return scorer.scores()


def sampled_scores(
    released: Iterable[Any],
    canaries: Canaries,
    *,
    sampling_probability: float,
    clip_norm: float,
    noise_std: float,
) -> Floats:
    """The log likelihood ratio of each canary under Poisson sampling with independent noise.

    An included canary is in every step by a coin of its own, with probability q; nobody knows when. With
    y_t = <row_t, g_c> / clip_norm and sigma = noise_std / clip_norm

        s_c = sum_t log( 1 - q + q exp( y_t / sigma^2 - 1 / (2 sigma^2) ) )

    which is the best test there is [Neyman and Pearson]; it has no mu.

    Args:
        released: as for `scores`; not divided, or with clip_norm and noise_std divided as well.
        canaries: the directions.
        sampling_probability: q.
        clip_norm: the norm with which canaries were added.
        noise_std: of every coordinate.
    Returns: (count,).
    """
    scorer = SampledScorer(canaries, sampling_probability, clip_norm, noise_std)
    for row in released:
        scorer.add(row)
    return scorer.scores()


def visible(strategy: Strategy, participations: Sequence[Any] | NDArray[Any], count: int = 1) -> Floats:
    """(count,) || C pi_c || for the steps of each canary: its mean score for clip norm 1; mu is this over the noise.

    Args:
        strategy: C.
        participations: as for `scores`.
        count: number of canaries.
    """
    patterns = Patterns(participations, count, strategy.n)
    stream, total = forward(strategy), np.zeros(patterns.distinct)
    for t in range(strategy.n):
        for row in stream.push(patterns.at(t)):
            total += np.square(row)
    return np.asarray(np.sqrt(total)[patterns.of])


class Patterns:
    """The steps of every canary, equal ones once.

    Attributes:
        distinct: number of different patterns.
        of: (count,) the pattern of each canary.
        last: the last step of any.
    """

    def __init__(self, participations: Sequence[Any] | NDArray[Any], count: int, n: int | None) -> None:
        numbers: dict[tuple[int, ...], int] = {}
        given = [_steps(steps, n) for steps in _each(participations, count)]
        for steps in given:
            numbers.setdefault(steps, len(numbers))
        self.steps = tuple(numbers)
        self.of: Integers = np.array([numbers[steps] for steps in given])
        self.distinct = len(numbers)
        self.sizes: Floats = np.array([len(steps) for steps in numbers], np.float64)
        self.last = max(steps[-1] for steps in numbers)
        order = np.concatenate([np.array(steps) for steps in numbers])
        by_step = np.argsort(order, kind="stable")
        who = np.repeat(np.arange(self.distinct), self.sizes.astype(np.int64))[by_step]
        edges = np.searchsorted(order[by_step], np.arange(self.last + 2))
        self._there = [who[i:j] for i, j in pairwise(edges.tolist())]

    def at(self, t: int) -> Floats:
        """(distinct,) 1 for the patterns that have step t."""
        result = np.zeros(self.distinct)
        if t <= self.last:
            result[self._there[t]] = 1.0
        return result


class Scorer:
    """`scores` as rows come: `add` each row in turn, then ask; before the last row, of what was released so far.

    Args: as for `scores`.
    """

    def __init__(
        self,
        strategy: Strategy | None,
        participations: Sequence[Any] | NDArray[Any],
        canaries: Canaries,
        *,
        whiten: bool = True,
    ) -> None:
        if not isinstance(canaries, Canaries):
            raise ArgumentError(f"canaries must be anyorder.audit.Canaries, got {type(canaries).__name__}")
        self._canaries = canaries
        self._n = None if strategy is None else strategy.n
        self.patterns = Patterns(participations, canaries.count, self._n)
        self._stream = None if strategy is None or not whiten else forward(strategy)
        self._sums = np.zeros(canaries.count)
        self._squares = np.zeros(self.patterns.distinct)
        self._t = 0

    def add(self, row: Any) -> None:
        """Take the next released row."""
        if self._t == self._n:
            raise ArgumentError(f"released must have n={self._n} rows, one for each step of the strategy, and has more")
        y, pi = self._canaries.dot(row), self.patterns.at(self._t)
        count = len(y)
        for z in [np.concatenate([y, pi])] if self._stream is None else self._stream.push(np.concatenate([y, pi])):
            self._sums += z[:count] * z[count:][self.patterns.of]
            self._squares += np.square(z[count:])
        self._t += 1

    def check_complete(self) -> None:
        """Raise ArgumentError unless the rows of all steps came."""
        if self._t <= self.patterns.last or (self._n is not None and self._t < self._n):
            needed = self.patterns.last + 1 if self._n is None else self._n
            raise ArgumentError(f"released must have a row for each of {needed} steps, got {self._t}")

    @property
    def norms(self) -> Floats:
        """(count,) || C pi_c || as far as rows came."""
        return np.asarray(np.sqrt(self._squares)[self.patterns.of])

    def scores(self) -> Floats:
        """(count,) scores. Raises: TrainingError if nothing that was released shows one of them yet."""
        norms = self.norms
        if (norms == 0).any():
            raise TrainingError(
                f"nothing shows of {np.count_nonzero(norms == 0)} of {len(norms)} canaries in the steps so far: ask "
                "later"
            )
        return np.asarray(self._sums / norms)


class SampledScorer:
    """`sampled_scores` as rows come."""

    def __init__(self, canaries: Canaries, sampling_probability: float, clip_norm: float, noise_std: float) -> None:
        self._canaries = canaries
        q = _check.real("sampling_probability", sampling_probability, low=0.0, high=1.0)
        self._q = _check.positive("sampling_probability", q)
        self._clip_norm = _check.positive("clip_norm", clip_norm)
        self._sigma = _check.positive("noise_std", noise_std) / self._clip_norm
        self._sums = np.zeros(canaries.count)

    def add(self, row: Any) -> None:
        """Take the next released row."""
        ratio = (self._canaries.dot(row) / self._clip_norm - 0.5) / self._sigma**2
        rest = np.log1p(-self._q) if self._q < 1 else -np.inf
        self._sums += np.logaddexp(rest, np.log(self._q) + ratio)

    def scores(self) -> Floats:
        """(count,) scores so far."""
        return self._sums.copy()


def _each(participations: Sequence[Any] | NDArray[Any], count: int) -> list[Any]:
    """One set of steps for each canary."""
    try:
        first = participations[0]
    except (IndexError, KeyError, TypeError) as problem:
        raise ArgumentError(
            "participations must name at least one step, or one list of steps for each canary"
        ) from problem
    if np.ndim(first) == 0:
        return [participations] * count
    if len(participations) != count:
        raise ArgumentError(
            f"participations must be one list of steps for each of {count} canaries, got {len(participations)}"
        )
    return [*participations]


def _steps(given: ArrayLike, n: int | None) -> tuple[int, ...]:
    """The steps of one canary, ascending."""
    steps = np.asarray(given)
    if steps.dtype == np.bool_ and steps.ndim == 1:
        if n is not None and len(steps) != n:
            raise ArgumentError(f"participations in bools must have one for each of n={n} steps, got {len(steps)}")
        steps = np.flatnonzero(steps)
    if steps.ndim != 1 or not steps.size or steps.dtype.kind not in "iu":
        raise ArgumentError(
            "participations must be lists of one or more steps, integers from 0 on, or bools over steps; a canary that "
            "is nowhere has no score"
        )
    result = tuple(sorted(steps.tolist()))
    if result[0] < 0 or (n is not None and result[-1] >= n):
        raise ArgumentError(f"steps in participations must lie in 0 .. {'n' if n is None else n} - 1, and some do not")
    if len(set(result)) < len(result):
        raise ArgumentError("steps of a canary must be distinct; for 0/1 vectors over all steps give bools")
    return result
