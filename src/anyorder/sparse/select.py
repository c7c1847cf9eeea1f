"""What a threshold on noisy counts chooses, from public numbers: to be known before a run."""

import warnings
from collections.abc import Sequence
from math import sqrt
from typing import Any, NamedTuple, assert_never

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from scipy.special import ndtr, ndtri
from torch import Tensor

from anyorder import checks
from anyorder.accounting.selection import Counts, Top, Uniform
from anyorder.errors import ArgumentError, PlanError, SelectionWarning
from anyorder.noise import NoiseSource
from anyorder.plan.plan import Plan
from anyorder.release.attached_tables import SelectedRows, coalesced
from anyorder.release.release import Release


class Chances(NamedTuple):
    """How likely rows are to be chosen in a step.

    Attributes:
        untouched: probability of a row that nobody touches.
        rows_by_chance: mean number of rows of the tables that come so, were none touched.
        touched: probability of a row that the given units touch.
    """

    untouched: float
    rows_by_chance: float
    touched: float


def chances(plan: Plan, *, num_rows: int, units: float, rows_of_unit: int) -> Chances:
    """Return what a step of a plan with `Counts` chooses.

        untouched = Phi(-threshold / s),    rows_by_chance = untouched num_rows,    s = plan.selection_std
        touched = Phi((units min(1, count_norm / sqrt(rows_of_unit)) - threshold) / s)

    It spends no privacy: it looks at no data. Give it numbers that are public, or guesses.

    Args:
        num_rows: of all tables of the model together.
        units: of one batch that touch the row.
        rows_of_unit: distinct rows, of all tables, that each of them touches in a step.
    Raises: ArgumentError; PlanError for a plan without `Counts`.

    Example:
        >>> counts = ao.sparse.Counts(threshold=8.0, sigma=2.0)
        >>> plan = ao.plan(dataset_size=40, batch_size=4, epochs=1, noise_multiplier=1, delta=1e-5,
        ...                mechanism=ao.mechanism(selection=counts))
        >>> found = ao.sparse.chances(plan, num_rows=5000, units=25, rows_of_unit=6)
        >>> f"{found.rows_by_chance:.2f} rows come by chance, such a row with probability {found.touched:.2f}"
        '0.16 rows come by chance, such a row with probability 0.87'
    """
    rule, std = _counted(plan)
    rows = checks.integer("num_rows", num_rows, low=1)
    count = checks.real("units", units, low=0.0) * min(
        1.0, rule.count_norm / sqrt(checks.integer("rows_of_unit", rows_of_unit, low=1))
    )
    p = float(ndtr(-rule.threshold / std))
    return Chances(p, p * rows, float(ndtr((count - rule.threshold) / std)))


def threshold_for(plan: Plan, *, num_rows: int, rows_by_chance: float) -> float:
    """The threshold at which about so many rows that nobody touched are chosen in a step.

        threshold = -s Phi^-1(rows_by_chance / num_rows),    s = plan.selection_std

    Neither the noise nor epsilon depends on the threshold, so a plan may be made with any, and given this one:
    `replace(plan, selection=replace(plan.selection, threshold=..))`, with `dataclasses.replace`.

    Args:
        plan: with `Counts`; its threshold does not matter.
        num_rows: of all tables of the model together.
        rows_by_chance: mean number of them, between 0 and num_rows.
    Raises: ArgumentError; PlanError for a plan without `Counts`.

    Example:
        >>> counts = ao.sparse.Counts(threshold=0.0, sigma=2.0)
        >>> plan = ao.plan(dataset_size=40, batch_size=4, epochs=1, noise_multiplier=1, delta=1e-5,
        ...                mechanism=ao.mechanism(selection=counts))
        >>> round(ao.sparse.threshold_for(plan, num_rows=10**6, rows_by_chance=30), 3)
        8.026
    """
    _, std = _counted(plan)
    rows = checks.integer("num_rows", num_rows, low=1)
    wanted = checks.real("rows_by_chance", rows_by_chance)
    if not 0 < wanted < rows:
        raise ArgumentError(f"rows_by_chance must lie strictly between 0 and num_rows={rows}, got {rows_by_chance!r}")
    return float(-std * ndtri(wanted / rows))


def warn_of_chances(plan: Plan) -> None:
    """Warn (`SelectionWarning`) of a threshold that cannot tell touched rows from others, by public numbers alone."""
    if type(plan.selection) is not Counts:
        return
    rule, std = _counted(plan)
    share, most = float(ndtr(-rule.threshold / std)), plan.batch_size * min(1.0, rule.count_norm)
    advice = "; see ao.sparse.threshold_for and ao.sparse.chances"
    if share > 0.5:
        warnings.warn(
            f"threshold={rule.threshold:g} with noise of std {std:.3g} chooses {share:.0%} of all rows by chance at "
            f"every step: take one above 0, a few std{advice}",
            SelectionWarning,
            stacklevel=2,
        )
    elif rule.threshold > most:
        warnings.warn(
            f"threshold={rule.threshold:g} is more than a batch of {plan.batch_size} can count on a row, which is "
            f"{most:g} if every unit touches that row and no other: what is chosen comes by the noise alone, if any "
            f"does. Take a lower threshold, or larger batches{advice}",
            SelectionWarning,
            stacklevel=2,
        )


def _counted(plan: Plan) -> tuple[Counts, float]:
    rule, std = plan.selection, plan.selection_std
    if type(rule) is not Counts or std is None:
        raise PlanError(f"chances of rows need a plan with ao.mechanism(selection=ao.sparse.Counts(..)), got {rule!r}")
    return rule, std


# ----------------------------------------------------------------------------------------------------
# Which rows of a wide table get noise: chosen privately, at the cost of the rows that are touched or chosen.
#
# A dense mechanism looks at all V rows. Nearly all are untouched, have the same number 0 and so the same law: how many
# of them are chosen is one draw, and, given how many, all sets of so many are equally likely. That is exact, whatever
# rows are touched, so the sparse mechanism has the dense one's privacy. docs/tables.md has the proofs.
#
# Draws are compared with probabilities in float64, never noisy counts in float32: far thresholds keep their tails.


Ids = NDArray[np.int64]
Floats = NDArray[np.float64]
Words = NDArray[np.uint64]

MAX_ROWS = 2**62
_BITS = 62  # of the integer weights that a binomial is drawn by
_TAIL = 45.1  # more than 65 ln 2: what lies beyond a window has probability below 2^-64


def select_counts(
    counts: ArrayLike | tuple[ArrayLike, ArrayLike],
    threshold: float,
    std: float,
    *,
    num_rows: int | None = None,
    source: NoiseSource,
    step: int,
) -> Ids:
    """The rows whose count with noise reaches a threshold, { r : count_r + N(0, std^2) >= threshold }, ascending.

        touched rows:    r is chosen with probability Phi((count_r - threshold) / std), by a draw of its own
        the others:      Binomial(V - touched, Phi(-threshold / std)) of them, a uniform set of so many

    This is the law of noise on all V counts (AdaFEST, [Ghazi et al. 2023]), at the cost
    of the rows that are touched or chosen.

    Args:
        counts: (ids, values) of the touched rows, ids distinct and in any order, or all V counts. A count of 0 is the
            same, given or left out.
        threshold: in units of counts.
        std: of the noise on a count, above 0.
        num_rows: V; may be left out where all counts are given.
        source: of the run. One source and step serve one call: what several tables share is one table here.
        step: number of the training step. The same source, step and counts give the same rows.
    Returns: (chosen,) int64.
    Privacy: as the Gaussian mechanism on the vector of counts; mu = (sensitivity of the vector, in L2 norm) / std.
    Guarantee: the law is within 2^-52 (1 + touched + (4 + x^2) sqrt(f)) of the exact one in total variation, with
        x = threshold / std and f the expected number of untouched rows that are chosen: 4e-13 for 1000 touched rows and
        f = 1000 at x = 4.
    Cost: O(touched log touched + chosen log chosen) time and memory.
    Raises: ArgumentError; no message has an id or a count.
    """
    ids, values, total = _touched("counts", counts, num_rows)
    threshold, std = checks.real("threshold", threshold), checks.positive("std", std)
    words = _Words(source, b"select counts", step)
    with np.errstate(over="ignore"):
        distance = (values - threshold) / std
    likely = distance > 0
    unlikely = words.take(len(ids)) < (ndtr(-np.abs(distance)) * 2.0**64).astype(np.uint64)  # at most 1/2
    rest = total - len(ids)
    false = _binomial(rest, float(ndtr(-threshold / std)), float(ndtr(threshold / std)), words)
    return np.sort(np.concatenate([ids[likely ^ unlikely], _among_others(ids, rest, false, words)]))


def select_top(
    scores: ArrayLike | tuple[ArrayLike, ArrayLike],
    k: int,
    scale: float,
    *,
    num_rows: int | None = None,
    source: NoiseSource,
    step: int,
) -> Ids:
    """The k rows of the largest score / scale + Gumbel noise, ascending.

    Equal in law to k draws of the exponential mechanism without replacement, each with weights exp(score / scale) among
    the rows that are left (which are the same, drawn one after the other: the order is not told). A row's Gumbel is the
    logarithm of an exponential waiting time E: the k first of E exp(-score / scale) are chosen. Untouched rows have
    score 0; the first of N waiting times come at e_1 / N, then e_2 / (N - 1) later, .. (Renyi), at uniform places.

    Args:
        scores: (ids, values) of the touched rows, or all V scores; any sign. A score of 0 may be left out.
        k: rows to choose, at most V.
        scale: above 0, in units of scores.
        num_rows, source, step: as in `select_counts`.
    Returns: (k,) int64.
    Privacy: k adaptive draws of bounded range e0 = (largest - least change of a row's score between neighbours) /
        scale, which is 2 S0 / scale for scores clipped to [0, S0].
    Guarantee: within k 2^-49 (1 + log V + max |score / scale|) of the exact law in total variation.
    Cost: O(touched log touched + k log k) time and memory.
    Raises: ArgumentError; no message has an id or a score.
    """
    ids, values, total = _touched("scores", scores, num_rows)
    k = checks.integer("k", k, low=1, high=total)
    scale = checks.positive("scale", scale)
    with np.errstate(over="ignore"):
        quotients = values / scale
    if not np.isfinite(quotients).all():
        raise ArgumentError(f"scores / scale must be finite; scores must be clipped, and scale above 0, got {scale!r}")
    words = _Words(source, b"select top", step)
    rest = total - len(ids)
    own = np.log(_waiting_times(words.take(len(ids)))) - quotients
    others = np.log(_first_of(rest, _waiting_times(words.take(min(k, rest)))))
    first = np.argpartition(np.concatenate([own, others]), k - 1)[:k]
    chosen = ids[first[first < len(ids)]]
    return np.sort(np.concatenate([chosen, _among_others(ids, rest, k - len(chosen), words)]))


def select_uniform(k: int, *, num_rows: int, source: NoiseSource, step: int) -> Ids:
    """A uniform set of k of the V rows, ascending; the data say nothing in it.

    Args:
        k: at most V.
        num_rows: V.
        source, step: as in `select_counts`.
    Returns: (k,) int64.
    Privacy: none is spent.
    Guarantee: exact, as far as the keystream is uniform.
    Cost: O(k log k) time and memory.
    """
    num_rows = checks.integer("num_rows", num_rows, low=1, high=MAX_ROWS)
    k = checks.integer("k", k, low=0, high=num_rows)
    return _subset(num_rows, k, _Words(source, b"select uniform", step))


class _Words:
    """64-bit words of one step for one purpose, one after the other."""

    def __init__(self, source: NoiseSource, purpose: bytes, step: int) -> None:
        self._step = checks.integer("step", step, low=0, high=2**63 - 1)
        self._source = source.derive(purpose)
        self._used = 0

    def take(self, count: int) -> Words:
        """The next so many."""
        halves = self._source.words(self._step, 2 * self._used, 2 * (self._used + count)).astype(np.uint64)
        self._used += count
        return halves[0::2] | halves[1::2] << np.uint64(32)


class _Touched(NamedTuple):
    """Ids in ascending order, their values, none of them 0, and the number of all rows."""

    ids: Ids
    values: Floats
    total: int


def _touched(name: str, given: Any, num_rows: int | None) -> _Touched:
    """What both forms say."""
    if num_rows is not None:
        num_rows = checks.integer("num_rows", num_rows, low=1, high=MAX_ROWS)
    if not isinstance(given, tuple):
        values = checks.array(name, checks.plain(given), ndim=1)
        if num_rows is not None and num_rows != len(values):
            raise ArgumentError(f"{name} of all rows must be num_rows = {num_rows}, got {len(values)}")
        ids = np.flatnonzero(values)
        return _Touched(ids, values[ids], len(values))
    if num_rows is None:
        raise ArgumentError(f"num_rows must be given where {name} are (ids, values) of touched rows, got None")
    if len(given) != 2:
        raise ArgumentError(f"{name} must be (ids, values) or a vector of all rows, got a tuple of {len(given)}")
    rows, values = (np.asarray(checks.plain(one)) for one in given)
    if rows.ndim != 1 or values.shape != rows.shape:
        raise ArgumentError(f"ids and values of {name} must be vectors of one length")
    if not rows.size:
        return _Touched(np.empty(0, np.int64), np.empty(0), num_rows)
    if rows.dtype.kind not in "iu" or rows.min() < 0 or rows.max() >= num_rows:
        raise ArgumentError(f"ids of {name} must be integers from 0 to num_rows - 1 = {num_rows - 1}")
    order = np.argsort(rows)
    ids, values = rows[order].astype(np.int64), checks.array(f"values of {name}", values, ndim=1)[order]
    if (ids[1:] == ids[:-1]).any():
        raise ArgumentError(f"ids of {name} must be distinct: add the values of equal ids first")
    kept = values != 0
    return _Touched(ids[kept], values[kept], num_rows)


def _among_others(ids: Ids, rest: int, count: int, words: _Words) -> Ids:
    """A uniform set of so many of the rows that are not in `ids` (ascending), of which there are `rest`."""
    ranks = _subset(rest, count, words)
    return ranks + np.searchsorted(ids - np.arange(len(ids)), ranks, side="right")  # ids below the row of this rank


def _subset(n: int, k: int, words: _Words) -> Ids:
    """A uniform set of k of 0 .. n - 1, ascending: draws are repeated until they are new."""
    if k == 0:
        return np.empty(0, np.int64)
    if 2 * k > n:  # the answer is as long as a mark for each
        marks = np.ones(n, bool)
        marks[_subset(n, n - k, words)] = False
        return np.flatnonzero(marks)
    last = np.uint64(2**64 - 2**64 % n - 1)  # the words up to here name each place equally often
    found = np.empty(0, np.int64)
    while len(found) < k:  # a round never draws more than are missing, so that no draw is left out
        drawn = words.take(k - len(found))
        found = np.union1d(found, (drawn[drawn <= last] % np.uint64(n)).astype(np.int64))
    return found


def _binomial(n: int, p: float, q: float, words: _Words) -> int:
    """Binomial(n, p) by inversion; q = 1 - p, given so that the smaller of the two has all its digits."""
    word = int(words.take(1)[0])
    if n == 0 or min(p, q) == 0.0:
        return n if q == 0.0 else 0
    if p > q:
        return n - _inverted(n, q, p, word)
    return _inverted(n, p, q, word)


def _inverted(n: int, p: float, q: float, word: int) -> int:
    first, cumulative = _weights(n, p, q)
    return first + int(np.searchsorted(cumulative, word >> (64 - _BITS), side="right"))


def _weights(n: int, p: float, q: float) -> tuple[int, NDArray[np.int64]]:
    """The least value of a window around the mode, and the sums of weights / 2^62 up to each value there, in integers.

    The weights come from one another by the ratio P(b + 1) / P(b) = (n - b) p / ((b + 1) q), from the mode outwards:
    five roundings a step, and none in their sums. What rounding leaves over goes to the mode. Outside the window of +-w
    lies less than 2^-64, by Bernstein's inequality, P(|X - n p| >= w) <= 2 exp(-w^2 / (2 (n p q + w / 3))).
    """
    mode = min(int((n + 1) * p), n)
    width = 2 + int(_TAIL / 3 + np.sqrt((_TAIL / 3) ** 2 + 2 * _TAIL * n * p * q))
    up = np.arange(mode, min(n, mode + width))
    down = np.arange(mode, max(0, mode - width), -1)
    above = np.cumprod((n - up) / (up + 1) * (p / q))
    below = np.cumprod(down / (n - down + 1) * (q / p))
    weights = np.concatenate([below[::-1], [1.0], above])
    whole = np.rint(weights / weights.sum() * 2.0**_BITS).astype(np.int64)
    whole[len(below)] += 2**_BITS - int(whole.sum())
    return mode - len(below), np.cumsum(whole)


def _waiting_times(words: Words) -> Floats:
    """Standard exponentials -ln(1 - u), u = (word + 1/2) / 2^64: all digits for small and for large ones."""
    late = words >> np.uint64(63) != 0
    u = (np.where(late, ~words, words).astype(np.float64) + 0.5) * 2.0**-64  # 1 - u where it is late: at most 1/2
    return np.where(late, -np.log(u), -np.log1p(-u))


def _first_of(n: int, times: Floats) -> Floats:
    """The first of n independent exponential waiting times, in their order, from as many standard ones."""
    gaps = times / (n - np.arange(len(times)))
    sums: Floats = np.cumsum(gaps)
    before = np.concatenate([[0.0], sums[:-1]])
    kept = sums - before
    lost = (before - (sums - kept)) + (gaps - kept)  # of each addition, exactly: else k of them would add up
    result: Floats = sums + np.cumsum(lost)
    return result


# ----------------------------------------------------------------------------------------------------
# Tables of which a few rows are chosen privately at every step, and released with noise on these rows alone.


_UNCUT = 2.0**40  # the scores of `Top` move by at most one a row and unit, however many rows a unit touches


class SelectedTables:
    """The tables of a run under a plan with a selection: (V_i, D_i) each, one behind the other.

    Row r of table i is row V_0 + .. + V_{i-1} + r of all tables together, of which a step chooses some, by the plan's
    `selection`; for each chosen row, and for no other, it releases

        ( sum of the row over the units + noise_std * (K Z)[t] there ) / plan.batch_size

    Rows that a unit touched and that were not chosen are left out, which can only shorten its vector; chosen rows that
    nobody touched are released as noise. A table's coordinates lie behind those of `release.size`, row-major.

    Guarantee: the plan's, which counts the choice and the release together. Neighbours, unit: the plan's.

    Args:
        release: of a plan with a selection, before its first step; the tables are attached to it.
        shapes: (V_i, D_i) of each table.

    Attributes:
        size: coordinates of all tables.
    Raises: PlanError for a plan without a selection.
    """

    selects = True

    def __init__(self, release: Release, shapes: Sequence[tuple[int, int]]) -> None:
        plan = release.plan
        if plan.selection is None:
            raise PlanError(
                "the plan has no selection of rows: make it with "
                "ao.plan(.., mechanism=ao.mechanism(selection=ao.sparse.Counts(..)))"
            )
        self._rule, self._std, self._scale = plan.selection, plan.selection_std, plan.selection_scale
        self._shapes = [(int(rows), int(width)) for rows, width in shapes]
        self._first = np.cumsum([0, *(rows for rows, _ in self._shapes)])  # of each table's rows among all
        sizes = [rows * width for rows, width in self._shapes]
        self._offsets = [int(start) for start in np.cumsum([0, *sizes[:-1]])]
        self.size = sum(sizes)
        self._noise = release.table_noise(release.attach(self), self.size)
        self._draws = release.by_step(b"selection")

    @property
    def count_norm(self) -> float | None:
        """The norm of what one unit adds to the counts of rows; None where rows are chosen without any."""
        match self._rule:
            case Counts():
                return self._rule.count_norm
            case Top():
                return _UNCUT
            case Uniform():
                return None
            case _:
                assert_never(self._rule)

    def part(self, sums: Sequence[Tensor], counts: Sequence[Tensor]) -> SelectedRows:
        """These sums as a part of a step.

        Args:
            sums: of each table, coalesced sparse (V_i, D_i), the clipped sum over units; they are read only.
            counts: of each table, coalesced sparse (V_i,), the clipped counts; empty where `count_norm` is None.
        """
        return SelectedRows(self, tuple(sums), tuple(counts))

    def choose(self, step: int, counts: Sequence[Tensor]) -> NDArray[np.int64]:
        """The rows of a step among those of all tables, ascending."""
        rule, total = self._rule, int(self._first[-1])
        match rule:
            case Counts():
                assert self._std is not None
                return select_counts(
                    self._touched(counts), rule.threshold, self._std,
                    num_rows=total, source=self._draws, step=step,
                )  # fmt: skip
            case Top():
                assert self._scale is not None
                rows, numbers = self._touched(counts)
                return select_top(
                    (rows, numbers * rule.score_norm), min(rule.rows, total), self._scale,
                    num_rows=total, source=self._draws, step=step,
                )  # fmt: skip
            case Uniform():
                return select_uniform(min(rule.rows, total), num_rows=total, source=self._draws, step=step)
            case _:
                assert_never(rule)

    def _touched(self, counts: Sequence[Tensor]) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """The rows with a count, ascending over all tables, and the counts."""
        ids = [x.indices()[0].cpu().numpy() + first for x, first in zip(counts, self._first[:-1], strict=True)]
        return np.concatenate(ids), np.concatenate([x.values().double().cpu().numpy() for x in counts])

    def released(self, step: int, sums: Sequence[Tensor], rows: NDArray[np.int64], divisor: float) -> list[Tensor]:
        """The chosen rows of each table, noised: coalesced sparse tensors."""
        made = []
        for i, (height, width) in enumerate(self._shapes):
            low, high = np.searchsorted(rows, self._first[i : i + 2])
            own = rows[low:high] - self._first[i]
            values = _rows_of(sums[i], own)
            private = self._noise.add_to_rows(step, self._offsets[i], own, values, divisor)
            place = torch.from_numpy(own)[None].to(private.device)
            made.append(coalesced(place, private, (height, width)))
        return made

    def settle(self, part: SelectedRows, step: int, divisor: float) -> Any:
        """Choose the rows of a step that the journal has, and release them.

        Returns: of each table the chosen rows, private, coalesced sparse (V_i, D_i); of a whole total (size,).
        Cost: the touched and the chosen rows.
        """
        rows = np.arange(self._first[-1]) if part.everything else self.choose(step, part.counts)
        made = self.released(step, part.sums, rows, divisor)
        return torch.cat([x.values().reshape(-1) for x in made]) if part.everything else made

    def cut(self, total: Tensor) -> list[Tensor]:
        """A vector of all coordinates as sparse tensors that have every row."""
        sizes = [rows * width for rows, width in self._shapes]
        pairs = zip(torch.split(total, sizes), self._shapes, strict=True)
        return [coalesced(torch.arange(shape[0], device=x.device)[None], x.view(shape), shape) for x, shape in pairs]

    def each(self, released: Sequence[Any]) -> list[Tensor]:
        """What each table got in a step, of `Release.of_tables`: coalesced sparse (V_i, D_i)."""
        (made,) = released
        return self.cut(made) if isinstance(made, Tensor) else list(made)


def _rows_of(sums: Tensor, rows: NDArray[np.int64]) -> Tensor:
    """(k, D): the rows of a coalesced sparse (V, D), both ascending; zero where there is none."""
    touched, values = sums.indices()[0], sums.values()
    asked = torch.from_numpy(rows).to(values.device)
    result = values.new_zeros(len(asked), values.shape[1])
    if len(touched):
        place = torch.searchsorted(touched, asked).clamp_(max=len(touched) - 1)
        there = touched[place] == asked
        result[there] = values[place[there]]
    return result
