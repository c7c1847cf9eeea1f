"""Tables of which a few rows are chosen privately at every step, and released with noise on these rows alone."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, assert_never

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from anyorder.accounting.selection import Counts, Top, Uniform
from anyorder.errors import PlanError
from anyorder.release import Release
from anyorder.release.clip_norm import ClipNorm
from anyorder.sparse.select import select_counts, select_top, select_uniform

__all__ = ["SelectedTables", "Selection"]

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
        self._coins = release.by_step(b"selection")

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

    def part(self, sums: Sequence[Tensor], counts: Sequence[Tensor]) -> "Selection":
        """These sums as a part of a step.

        Args:
            sums: of each table, coalesced sparse (V_i, D_i), the clipped sum over units; they are read only.
            counts: of each table, coalesced sparse (V_i,), the clipped counts; empty where `count_norm` is None.
        """
        return Selection(self, tuple(sums), tuple(counts))

    def choose(self, step: int, counts: Sequence[Tensor]) -> NDArray[np.int64]:
        """The rows of a step among those of all tables, ascending."""
        rule, total = self._rule, int(self._first[-1])
        match rule:
            case Counts():
                assert self._std is not None
                return select_counts(
                    self._touched(counts), rule.threshold, self._std,
                    num_rows=total, source=self._coins, step=step,
                )  # fmt: skip
            case Top():
                assert self._scale is not None
                rows, numbers = self._touched(counts)
                return select_top(
                    (rows, numbers * rule.score_norm), min(rule.rows, total), self._scale,
                    num_rows=total, source=self._coins, step=step,
                )  # fmt: skip
            case Uniform():
                return select_uniform(min(rule.rows, total), num_rows=total, source=self._coins, step=step)
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
            made.append(_sparse(place, private, (height, width)))
        return made

    def all_rows(self) -> NDArray[np.int64]:
        """Every row of every table."""
        return np.arange(self._first[-1])

    def cut(self, total: Tensor) -> list[Tensor]:
        """A vector of all coordinates as sparse tensors that have every row."""
        sizes = [rows * width for rows, width in self._shapes]
        pairs = zip(torch.split(total, sizes), self._shapes, strict=True)
        return [_sparse(torch.arange(shape[0], device=x.device)[None], x.view(shape), shape) for x, shape in pairs]

    def each(self, released: Sequence[Any]) -> list[Tensor]:
        """What each table got in a step, of `Release.of_tables`: coalesced sparse (V_i, D_i)."""
        (made,) = released
        return self.cut(made) if isinstance(made, Tensor) else list(made)


@dataclass(frozen=True)
class Selection:
    """The sums and counts of one step, before its rows are chosen; see `SelectedTables.part`.

    Attributes:
        table: whose part it is.
        everything: release all rows, for an audit.
    """

    table: SelectedTables
    sums: tuple[Tensor, ...]
    counts: tuple[Tensor, ...]
    everything: bool = False

    @property
    def is_zero(self) -> bool:
        """Whether nobody has added anything."""
        return not any(bool(x.values().any()) for x in (*self.sums, *self.counts))

    def parts(self) -> list[Tensor]:
        """What a journal is told, before anything is chosen: other rows, sums or counts are other data."""
        every = (*self.sums, *self.counts)
        head = torch.tensor([-2, len(self.sums), *(n for x in every for n in (*x.shape, len(x.values())))])
        return [head, *(piece.contiguous() for x in every for piece in (x.indices()[0], x.values()))]

    def planned(self, clip: ClipNorm) -> "Selection":
        """The sums as those of vectors of the planned norm; counts have a norm of their own."""
        values = clip.planned([x.values() for x in self.sums])
        pairs = zip(self.sums, values, strict=True)
        return replace(self, sums=tuple(_sparse(x.indices(), own, tuple(x.shape)) for x, own in pairs))

    def whole(self) -> Tensor:
        """(size,) the sums of all coordinates."""
        return torch.cat([x.to_dense().reshape(-1) for x in self.sums])

    def of_whole(self, total: Tensor) -> "Selection":
        """The part of a dense total, of which every row is released."""
        return replace(self, sums=tuple(self.table.cut(total)), everything=True)

    def settle(self, step: int, clip: ClipNorm) -> Any:
        """Choose the rows of a step that the journal has, and release them.

        Returns: of each table the chosen rows, private, coalesced sparse (V_i, D_i); of a whole total (size,).
        Cost: the touched and the chosen rows.
        """
        rows = self.table.all_rows() if self.everything else self.table.choose(step, self.counts)
        made = self.table.released(step, self.sums, rows, clip.divisor)
        return torch.cat([x.values().reshape(-1) for x in made]) if self.everything else made


def _sparse(place: Tensor, values: Tensor, shape: tuple[int, ...]) -> Tensor:
    return torch.sparse_coo_tensor(place, values, shape, is_coalesced=True, check_invariants=False)


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
