"""Correlated noise that is added late: what a coordinate has missed is added in one jump, with the very same law.

A coordinate theta that gets no gradient for some steps still gets noise in each of them. Noise, momentum and rate make
a linear system of a few numbers s = (x, v, theta), x the state of the strategy's recurrence (`Strategy.recurrences`):

    y = h x + g z,      x <- F x + G z,      u = (gradient + std y) / divisor
    v <- momentum v + u,      theta <- theta - rate v          (with Nesterov: theta - rate (u + momentum v))

z a fresh normal. So s_{t2} = Phi s_{t1} + R xi with xi of at most D fresh normals for D numbers, whatever t2 - t1 is.
docs/lazy.md proves that tables made so have the law of the dense run, whatever is touched, and when.
"""

from bisect import bisect_right
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple, assert_never

import numpy as np
from numpy.typing import ArrayLike, NDArray

from anyorder import _check
from anyorder.error.blocks import joined
from anyorder.errors import ArgumentError, CheckpointError, PlanError
from anyorder.noise.lazy_maps import ByLength, BySteps, Maps
from anyorder.noise.lazy_tree import Prefixes, check_recurrence, check_value, recurrences
from anyorder.strategy import BandedInverse, Recurrence, Rescaled, Strategy, Tree
from anyorder.strategy.kinds import Structure, in_words, kind_of
from anyorder.workload import Workload

__all__ = ["Jump", "Jumps"]

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]

_MOST = 64  # numbers of a coordinate
_MAX_ROW = 2**63 - 1
_RECENT = 16  # steps


class Jump(NamedTuple):
    """From each start to one stop: s <- Phi s + R Z[rows], for all coordinates of a row of a table.

    Z is the run's own where the jumps are `by_value`, else one that serves these jumps alone.

    Attributes:
        Phi: (u, D, D) float64, one for each distinct start; theta is last.
        R: (u, D, w); w is at most `Jumps.width`, and at most the number of steps where these are few.
        rows: (u, w) int64 row ids of Z: never the same for two intervals, but by value.
        which: (k,) the distinct start of each one that was asked for.
    """

    Phi: Floats
    R: Floats
    rows: Integers
    which: NDArray[np.intp]


class Jumps:
    """Jumps over steps that a row of a table has missed, for a strategy, SGD with momentum, and public rates.

    Args:
        strategy: of the run.
        momentum: of `torch.optim.SGD`, in [0, 1), without dampening.
        nesterov: as there.
        by_value: of a tree without momentum, vanilla or full: jumps have the nodes of the run's own Z, so that the
            noise is that of the dense run by value, and nothing is kept beside theta. Z must be renewed as the run's
            is. A change of the rate or scale within a jump costs the nodes of one more prefix.
    Raises: PlanError for a strategy without a recurrence of few numbers.
    `size` is D, the numbers of a coordinate: the strategy's state, a velocity where momentum > 0, theta last. `width`
    is the most normals that a coordinate takes in a jump.

    Cost: in a run of constant rate and scale, with a strategy that is the same at every step, maps are kept by length,
        32 MB of them; otherwise O(log n) QR factorisations of D x 2D for each start, and 32 n D^2 bytes.
    """

    def __init__(
        self, strategy: Strategy, *, momentum: float = 0.0, nesterov: bool = False, by_value: bool = False
    ) -> None:
        if not isinstance(nesterov, bool):
            raise ArgumentError(f"nesterov must be a bool, got {nesterov!r}")
        if nesterov and not momentum:
            raise ArgumentError("nesterov needs a momentum above 0, got 0")
        self._optimizer = Workload(1, momentum=momentum, nesterov=nesterov)
        self.n: int = strategy.n
        if not isinstance(by_value, bool):
            raise ArgumentError(f"by_value must be a bool, got {by_value!r}")
        self._prefixes: Prefixes | None = None
        state = 0
        if by_value:
            self._prefixes = Prefixes(_valued(strategy, self._optimizer.momentum))
        else:
            self._steady, self._recurrences = _way(strategy)
            state = self._recurrences(np.zeros(1, np.int64)).h.shape[1]
        self.size: int = state + 1 + (self._optimizer.momentum > 0)
        self.width: int = self.size
        if self.size > _MOST:
            raise PlanError(
                f"a lazy table keeps {self.size - 1} further tables for {in_words(strategy)}, and {_MOST - 1} are the "
                "most: choose fewer bands or buffers, as ao.plan(mechanism='blt', memory=4) does"
            )
        if not self.by_value and self.first_row(self.n) > _MAX_ROW:
            raise PlanError(f"jumps need row ids below 2^63: n={self.n} steps with {self.width} normals are too many")
        self._rates: list[tuple[float, float]] = []
        self._changes: list[int] = []  # steps whose rate or scale is not that of the step before
        self._moving = BySteps(self._single, self.size)
        self._constant: tuple[int, ByLength] | None = None
        self._into: tuple[float, Floats] | None = None  # a rate, and `input` with it
        self._recent: dict[int, Maps] = {}  # of the last steps that were asked for one by one

    @property
    def kept(self) -> int:
        """Arrays of the size of the table that are kept beside it."""
        return self.size - 1

    @property
    def by_value(self) -> bool:
        """Whether the rows of a jump are those of the run's own Z, and the noise that of the dense run by value.

        Elements are then the coordinates of the run. Else rows are of a Z that serves jumps alone.
        """
        return self._prefixes is not None

    @property
    def recorded(self) -> int:
        """Steps whose rate and scale are known."""
        return len(self._rates)

    def record(self, t: int, lr: float, scale: float) -> None:
        """Say what step t is done with: public numbers, of steps in their order.

        Args:
            t: step; the one after the last that was recorded.
            lr: learning rate, not negative.
            scale: noise std over divisor, in force at step t.
        """
        _check.integer("t", t, low=0, high=self.n - 1)
        if t != self.recorded:
            raise ArgumentError(f"steps must be recorded in their order: t must be {self.recorded}, got {t}")
        pair = _check.real("lr", lr, low=0.0), _check.real("scale", scale, low=0.0)
        if not self._rates or pair != self._rates[-1]:
            self._changes.append(t)
        self._rates.append(pair)

    def input(self, t: int) -> Floats:
        """(D,) what a private mean of 1 in step t adds: s <- Phi s + R xi + input gradient, over (t, t + 1)."""
        t = _check.integer("t", t, low=0, high=self.recorded - 1)
        lr = self._rates[t][0]
        if self._into is None or self._into[0] != lr:
            result = np.zeros(self.size)
            into = self._optimizer.recurrence([-lr])[1][0]  # velocity and theta
            result[-1 - (self._optimizer.momentum > 0) :] = into if self._optimizer.momentum else into[1:]
            self._into = lr, result
        return self._into[1].copy()

    def over(self, starts: ArrayLike, stop: int) -> Jump:
        """Jumps from each start to the stop: what the steps start .. stop - 1 add where there is no gradient.

        Args:
            starts: (k,) integers, 0 <= start <= stop, in any order; a start of `stop` is no jump.
            stop: at most `recorded`.
        """
        stop = _check.integer("stop", stop, low=0, high=self.recorded)
        given = np.asarray(starts)
        integers = given.ndim == 1 and (given.dtype.kind in "iu" or not given.size)
        low, high = (int(given.min()), int(given.max())) if integers and given.size else (0, 0)
        if not integers or not 0 <= low <= high <= stop:
            raise ArgumentError(f"starts must be a list of steps from 0 to stop={stop}")
        distinct, which = _distinct(given, low, high)
        if self._prefixes is not None:
            first, last = (bisect_right(self._changes, t) for t in (distinct.min(initial=stop), stop - 1))
            since = self._changes[max(0, first - 1) : last]  # of these steps on c is the same up to the next one
            values = np.array([lr * scale for lr, scale in (self._rates[t] for t in since)])
            rows, factors = self._prefixes.over(
                distinct, stop, self._changes[first:last], lambda t: values[np.searchsorted(since, t, "right") - 1]
            )
            return Jump(np.ones((len(distinct), 1, 1)), factors[:, None], rows, which)
        maps, width = self._maps(distinct, stop)
        ids = (stop * (self.n + 1) + distinct)[:, None] * self.width + np.arange(width)
        return Jump(maps.Phi, maps.R[:, :, :width], ids, which)

    def first_row(self, t: int) -> int:
        """The r for which jumps over step t or later ones have rows from r on, and those that end before have not.

        Not of jumps by value, which have the run's rows.
        """
        if self._prefixes is not None:
            raise PlanError("jumps by value have the rows of the run itself: they are renewed with the run's noise")
        return (t + 1) * (self.n + 1) * self.width

    def state_dict(self) -> dict[str, Any]:
        """The recorded rates and scales, public numbers."""
        return {"rates": np.array(self._rates, dtype=np.float64).reshape(-1, 2)}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Know the steps that were recorded when `state_dict` was taken; jumps then have the same bits as there.

        Raises: CheckpointError if it is malformed; nothing changes.
        """
        rates = saved.get("rates")
        pairs: NDArray[Any] = rates if isinstance(rates, np.ndarray) and rates.dtype == np.float64 else np.empty(0)
        if pairs.shape[1:] != (2,) or len(pairs) > self.n or not (np.isfinite(pairs) & (pairs >= 0)).all():
            raise CheckpointError(
                f"the rates of a saved table must be {self.n} pairs of finite numbers at most, none < 0"
            )
        self._rates = [(lr, scale) for lr, scale in pairs.tolist()]
        new = np.ones(len(pairs), bool)
        new[1:] = (pairs[1:] != pairs[:-1]).any(axis=1)
        self._changes = np.flatnonzero(new).tolist()
        self._moving = BySteps(self._single, self.size)
        self._constant = None
        self._recent = {}

    def _maps(self, starts: Integers, stop: int) -> tuple[Maps, int]:
        """From distinct, ascending starts; columns of R beyond the number that is told are 0."""
        longest = int(stop - starts[0]) if starts.size else 0
        since = self._changes[bisect_right(self._changes, stop - 1) - 1] if self._steady and stop else stop
        if longest and starts[-1] < stop:  # as always, where nothing is special
            if since <= starts[0] and stop - since > 1:
                return self._since(since).over(stop - starts), min(longest, self.width)
            if longest == 1:
                return self._single(starts), min(longest, self.width)
        result = Maps.identity(len(starts), self.size)
        if longest:
            if stop - since < 2:
                since = stop
            here, far = (since <= starts) & (starts < stop), starts < since
            if here.any():
                result.put(here, self._since(since).over(stop - starts[here]))
            if far.any():
                result.put(far, self._moving.over(starts[far], stop))
                return result, self.width
        return result, min(longest, self.width)

    def _since(self, step: int) -> ByLength:
        """Of the steps from one on whose rate and scale are all alike."""
        if self._constant is None or self._constant[0] != step:
            one = self._single(np.array([step]))
            self._constant = step, ByLength(one.Phi[0], one.R[0, :, 0])
        return self._constant[1]

    def _single(self, steps: Integers) -> Maps:
        """The maps of single steps; of R the first column alone is not 0. One step is asked for again and again."""
        if len(steps) != 1:
            return self._made(steps)
        step = int(steps[0])
        if step not in self._recent:
            if len(self._recent) >= _RECENT:
                self._recent.clear()
            self._recent[step] = self._made(steps)
        return self._recent[step].at([0])

    def _made(self, steps: Integers) -> Maps:
        lr, scale = np.array([self._rates[t] for t in steps.tolist()]).reshape(-1, 2).T
        M, N = self._optimizer.recurrence(-lr)
        Phi, gamma = joined(self._recurrences(steps), M, N * scale[:, None])
        R = np.zeros((len(steps), self.size, self.size))
        R[:, :, 0] = self._without_idle(gamma)
        return Maps(self._without_idle(self._without_idle(Phi).transpose(0, 2, 1)).transpose(0, 2, 1).copy(), R)

    def _without_idle(self, values: Floats) -> Floats:
        """(k, .., D) without the velocity, which without momentum is nothing that is kept."""
        if self._optimizer.momentum:
            return values
        return np.delete(values, values.shape[1] - 2, axis=1)


def _distinct(given: NDArray[Any], low: int, high: int) -> tuple[Integers, NDArray[np.intp]]:
    """As `np.unique` with `return_inverse`, of integers from low to high: without sorting, where they are dense."""
    if low == high and given.size:
        return np.array([low]), np.zeros(len(given), np.intp)
    if high - low > 8 * len(given):
        return np.unique(given.astype(np.int64), return_inverse=True)
    places = given.astype(np.int64) - low
    there = np.zeros(high - low + 1, bool)
    there[places] = True
    found = np.flatnonzero(there)
    numbers = np.empty(len(there), np.intp)
    numbers[found] = np.arange(len(found))
    return found + low, numbers[places]


def _way(strategy: Strategy) -> tuple[bool, Callable[[Integers], Recurrence]]:
    """Whether the recurrence is the same at every step, and the recurrence.

    Raises: PlanError where noise cannot be added late.
    """
    structure = kind_of(strategy).structure
    match structure:
        case Structure.IDENTITY | Structure.BUFFERED | Structure.TOEPLITZ_BANDED:
            return True, strategy.recurrences
        case Structure.BANDED | Structure.RESTARTED | Structure.LOW_RANK:
            return False, strategy.recurrences
        case Structure.RESCALED:
            assert isinstance(strategy, Rescaled)
            if not isinstance(strategy.strategy, Tree):
                _way(strategy.strategy)
                return False, strategy.recurrences
        case Structure.TOEPLITZ:
            if type(strategy) is BandedInverse:
                return True, strategy.recurrences
        case Structure.TREE:
            assert isinstance(strategy, Tree)
            check_recurrence(strategy)
            return False, partial(recurrences, strategy)
        case Structure.DENSE:
            pass
        case _:
            assert_never(structure)
    raise PlanError(
        f"noise of {in_words(strategy)} cannot be added late: it has no recurrence of a few numbers, so that a row "
        "would need the noise of every step that it missed; Independent, BLT, RestartedBLT, Banded, ToeplitzBanded, "
        "BandedInverse, BandedLowRank and Tree can jump. Plan with mechanism='blt' (and memory=4, say, for the most "
        "arrays of the table's size that are kept)"
    )


def _valued(strategy: Strategy, momentum: float) -> Tree:
    """A tree whose missed noise is a short combination of nodes. PlanError for what is none."""
    kind_of(strategy)
    if not isinstance(strategy, Tree) or momentum:
        raise PlanError(
            f"by_value=True needs a tree and momentum 0, got {in_words(strategy)} and momentum {momentum:g}: in no "
            "other case is the noise of many steps a combination of a few rows of Z; take by_value=False"
        )
    check_value(strategy)
    return strategy
