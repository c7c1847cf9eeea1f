"""Tables of a release: what it asks of them, and of their part of a step.

A table's coordinates lie behind those of the release's dense vector, in the order in which tables are attached,
row-major. A step of a release with tables has one part for each of them; it is refused without. In `Release.take`:

    parts are checked; what a guest adds is added; the journal gets a digest of the dense total and of `part.parts()`;
    then the dense total is noised, and every part settled: `table.settle(part, ..)`, after which the step counts.

So nothing noised exists of a step that the journal does not have, and a settle that is broken off leaves a release that
refuses to go on: its table's `check` says so, or the ledger lacks the step.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from anyorder.checks import final
from anyorder.errors import ArgumentError, CheckpointError, PlanError, TrainingError
from anyorder.plan.plan import Plan
from anyorder.release.files import RunFiles


class Attached(Protocol):
    """A table, or several under one selection, that a release has the noise of.

    Attributes:
        size: number of coordinates.
        selects: whether it releases rows that are chosen privately, at every step, and keeps nothing; else it is a
            `Lazy` one: noised as the dense run is, all of it at every step, and released by `Release.flush` alone.
    """

    @property
    def size(self) -> int: ...
    @property
    def selects(self) -> bool: ...

    def settle(self, part: Any, step: int, divisor: float) -> Any:
        """Noise and update, after the commit: a part of this table, of vectors of the planned norm.

        Returns: what is released of the table at this step; None where nothing is.
        """


class Lazy(Attached, Protocol):
    """A table that is brought up to date where it is read; see `anyorder.sparse.LazyTable`.

    Attributes:
        by_value: whether its noise is that of the dense run by value, and not in law alone.
        flushed: whether it is shown; its rows are up to date then.
    """

    flushed: bool

    @property
    def by_value(self) -> bool: ...

    def begin(self, first: int, saved: dict[str, Any] | None) -> None:
        """Take the first coordinate, and go on from what `state_dict` gave; CheckpointError if it is another's."""

    def check(self, step: int) -> None:
        """Raise TrainingError unless all steps before this one are settled, wholly."""

    def is_current(self) -> bool:
        """Whether every row has the noise of all steps that were taken."""

    def bring_up(self) -> Tensor:
        """Give all rows the noise that they lack. Returns: the table, which is not shown yet."""

    def show(self) -> None:
        """Let everybody read the table, whose rows are up to date, and of which the journal knows."""

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint: of the same size whatever rows were touched."""


# What a table gets in a step: sums of some of its rows. Values, not written by those who have them. A part says what
# the journal is told, contiguous: a head of int64 with every length in it, then rows and values (`parts`); its sums
# times a factor, where the clip norm moves (`scaled`); and for an audit the sums of all coordinates, as a dense run
# would have them (`whole`), and the part of such a dense total, of which `settle` returns all coordinates, dense
# (`of_whole`).


@final
@dataclass(frozen=True, eq=False)
class LazyRows:
    """A lazy table's part of a step: `anyorder.sparse.LazyTable.rows`.

    Attributes:
        table: whose rows.
        rows: (k,) int64, distinct.
        values: (k, width) sums.
        is_whole: whether they are all rows, of an audited run.
    """

    table: Any
    rows: NDArray[np.int64]
    values: Tensor
    is_whole: bool = False

    @property
    def is_zero(self) -> bool:
        """Whether nobody has added anything."""
        return not bool(self.values.any())

    def parts(self) -> list[Tensor]:
        """What a journal is told: other rows, another width or type are other data."""
        head = np.concatenate([[-2, self.values.element_size(), *self.values.shape], self.rows])
        return [torch.from_numpy(head), self.values]

    def scaled(self, factor: float) -> "LazyRows":
        """The sums times a factor."""
        return replace(self, values=self.values * factor)

    def whole(self) -> Tensor:
        """(size,) the sums of all coordinates."""
        total = self.values.new_zeros(self.table.num_rows, self.table.width)
        total[torch.from_numpy(self.rows).to(total.device)] = self.values
        return total.view(-1)

    def of_whole(self, total: Tensor) -> "LazyRows":
        """The part of a dense total, with all rows in it."""
        if self.table.lr == 0:
            raise ArgumentError("lr must be above 0 in an audited run: what is released is seen by what it moves")
        return LazyRows(self.table, np.arange(self.table.num_rows), total.view(-1, self.table.width), is_whole=True)


@final
@dataclass(frozen=True, eq=False)
class SelectedRows:
    """The sums and counts of one step of tables that select rows, before rows are chosen; of `SelectedTables.part`.

    Attributes:
        table: whose part it is.
        sums, counts: of each table, coalesced sparse (V_i, D_i) and (V_i,).
        everything: release all rows, for an audit.
    """

    table: Any
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

    def scaled(self, factor: float) -> "SelectedRows":
        """The sums times a factor; counts have a norm of their own."""
        return replace(self, sums=tuple(coalesced(x.indices(), x.values() * factor, tuple(x.shape)) for x in self.sums))

    def whole(self) -> Tensor:
        """(size,) the sums of all coordinates."""
        return torch.cat([x.to_dense().reshape(-1) for x in self.sums])

    def of_whole(self, total: Tensor) -> "SelectedRows":
        """The part of a dense total, of which every row is released."""
        return replace(self, sums=tuple(self.table.cut(total)), everything=True)


Part = LazyRows | SelectedRows
"""Closed: what another kind of part would tell the journal, and release, no proof knows."""


def coalesced(place: Tensor, values: Tensor, shape: tuple[int, ...]) -> Tensor:
    """A sparse tensor of rows that are distinct and ascending."""
    return torch.sparse_coo_tensor(place.to(values.device), values, shape, is_coalesced=True, check_invariants=False)


def in_order(attached: Sequence[Any], parts: Sequence[Part]) -> list[Part]:
    """The parts of a step, in the order of their tables. Raises: ArgumentError unless there is one for each."""
    for part in parts:
        if type(part) is not LazyRows and type(part) is not SelectedRows:
            raise ArgumentError(f"tables must be what LazyTable.rows gives, got a {type(part).__name__}")
    ordered = [part for table in attached for part in parts if part.table is table]
    if len(parts) != len(attached) or len({id(part.table) for part in ordered}) != len(attached):
        raise ArgumentError(
            f"tables must have one part for each of the {len(attached)} tables that are attached (of no rows "
            f"where a step touches none), got {len(parts)} part(s), {len(ordered)} of them of these tables"
        )
    return ordered


class AttachedTables:
    """The tables that are attached to a release.

    Attributes:
        attached: in their order.

    Args:
        size: coordinates before them.
        ranks: processes of the run.
        files: of the run, whose journal knows of flushes; None for a run that keeps nothing.
        saved: what `state` gave, where the run is resumed; None for a new one.
    """

    def __init__(self, plan: Plan, size: int, ranks: int, files: RunFiles | None, saved: list[Any] | None) -> None:
        self._plan, self._first, self._ranks = plan, size, ranks
        self._files, self._saved = files, saved
        self.attached: list[Any] = []
        self._broken = False  # while a flush is under way

    @property
    def size(self) -> int:
        """Coordinates of all tables together."""
        return sum(int(table.size) for table in self.attached)

    @property
    def _lazy(self) -> list[Lazy]:
        return [table for table in self.attached if not table.selects]

    def attach(self, table: Attached, step: int, begun: bool) -> int:
        """Take a table in, and let it go on from its state. Returns: its first coordinate.

        Args:
            step: the next one.
            begun: whether this object has taken steps.
        """
        selection = self._plan.selection is not None
        if self._ranks > 1:
            raise PlanError(f"tables are trained by one process, and this run has {self._ranks} ranks")
        if self._plan.grid is not None:
            raise PlanError("tables have no exact integers: plan without ao.mechanism(secure=True)")
        if table.selects != selection:
            raise PlanError(
                "the plan has a selection of rows, and a lazy table releases all of them: plan without "
                "ao.mechanism(selection=..)"
                if selection
                else "the plan has no selection of rows, and the table chooses some: plan with "
                "ao.mechanism(selection=..)"
            )
        place = len(self.attached)
        if place and selection:
            raise PlanError("rows are selected among those of all tables together: attach them as one")
        if begun or (place >= len(self._saved) if self._saved is not None else step > 0):
            raise TrainingError(
                "a table is attached before the first step, and on a resume in the order of the run: the steps that "
                "were taken knew nothing of this one"
            )
        entry = None if self._saved is None else self._saved[place]
        if entry is not None and entry["size"] != table.size:
            raise CheckpointError(
                f"table {place} of the checkpoint has {entry['size']} coordinates, and this one {table.size}: resume "
                "with the model of the run"
            )
        first = self._first + self.size
        if not table.selects:
            lazy: Any = table
            lazy.begin(first, None if entry is None else entry["state"])
            self._check_renewals(lazy, step)
        self.attached.append(table)
        if entry is not None:
            entry["state"] = None  # the table has it, and goes on in a copy
        if self._saved is not None and len(self.attached) == len(self._saved):
            self.flush_again(step)
        return first

    def _check_renewals(self, table: Lazy, step: int) -> None:
        """Refuse where the noise of a copied run cannot be drawn again.

        The other copy may go on, and both may show the table. A row's jump over the step of the renewal would be drawn
        twice, and how much two tables then differ in a row tells when it was touched last: no composition of two runs
        covers that. With all rows up to date at that step, what both have in common does not depend on the data. After
        the last step, too: noise that rows lack is drawn by the flush.
        """
        for since in self._files.renewed_since() if self._files is not None else ():
            current = table.by_value or since < step or (since == step and table.is_current())
            if not current and not self._has_flush(since):
                raise CheckpointError(
                    f"the noise of lazy tables cannot be drawn again from step {since} on: rows lack noise of the "
                    f"steps "
                    "before, and if another copy of this run goes on, the two tables would tell which rows were "
                    "touched. Resume from the files that the run itself wrote; before a run is copied or moved, call "
                    "flush() and save(), in this order"
                )

    def check(self, step: int) -> None:
        """Raise unless the next step may be taken."""
        self.check_settled(step)
        if self._plan.selection is not None and not self.attached:
            raise PlanError(
                "the plan has a selection of rows: it needs a table, as make_private has it for nn.Embedding("
                "sparse=True); for a sum without tables plan without ao.mechanism(selection=..)"
            )
        if not self.attached and not self._first:
            raise TrainingError("a release of size 0 has tables alone: attach one before its first step")

    def check_settled(self, step: int) -> None:
        """`check_whole`, and that no flush was broken off: rows would then be up to date that were not in the run."""
        self.check_whole(step)
        if self._broken:
            raise TrainingError("a flush of the tables was broken off: flush again, or resume from the last checkpoint")

    def check_whole(self, step: int) -> None:
        """Raise unless all tables of the run are there, and have settled the steps before this one."""
        if self._saved is not None and len(self.attached) < len(self._saved):
            raise TrainingError(
                f"the run has {len(self._saved)} table(s), and {len(self.attached)} are attached: attach the others"
            )
        for table in self._lazy:
            table.check(step)

    def flush(self, step: int) -> None:
        """Bring all rows of all lazy tables up to date, write that to the journal, and show the tables.

        Raises: CheckpointError if another table was shown at this step before, or later steps were taken without.
        """
        tables = self._lazy
        if all(table.flushed for table in tables):
            self._broken = False  # at this step, as the next one takes them away
            return
        if self._files is not None:
            self._files.check_flush(step)
        self._broken = True
        brought = [table.bring_up() for table in tables]
        if self._files is not None:
            self._files.commit_flush(step, brought)
        for table in tables:
            table.show()
        self._broken = False

    def flush_again(self, step: int) -> None:
        """Flush where the journal has it: a process that was lost has shown the tables at this step.

        Tables that are shown are not flushed again: their values may have been changed since.
        """
        if self._has_flush(step) and any(not table.flushed for table in self._lazy):
            self.flush(step)

    def _has_flush(self, step: int) -> bool:
        return self._files is not None and self._files.has_flush(step)

    def state(self) -> dict[str, Any]:
        """For a checkpoint: an entry, or nothing where there are no tables."""
        if not self.attached:
            return {}
        states = [None if table.selects else table.state_dict() for table in self.attached]
        return {"tables": [{"size": t.size, "state": s} for t, s in zip(self.attached, states, strict=True)]}
