"""A plan carried out, whatever made the sums: the one place where a sum becomes a release.

A step is a chain of stages, in `Release.take`, on one page:

    units        whom the sum is of: the ledger lets them in, or nothing happens
    bound        the sum is of vectors of the planned norm (a norm that moves: `schedules`)
    join         the parts of tables beside the dense sum (`tables`); what a guest of an audit adds
    record       the journal has it, on the disk, before anything noised exists
    noise        the row of the mechanism is added, and divided by the plan's batch size
    hand back    the ledger counts the step; observers see what was released

What a run does not use is not there: no journal without a checkpoint, no tables where none is attached.
"""

import json
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from anyorder import checks
from anyorder._draws import Draws, check_size
from anyorder.accounting.amplification.methods import MonteCarlo
from anyorder.errors import ArgumentError, CheckpointError, PlanError, StepsExhaustedError, TrainingError
from anyorder.ledger import Ledger, Units
from anyorder.noise import NoiseSource, NoiseStream
from anyorder.noise.discrete import GridStream
from anyorder.noise.stream import round_up
from anyorder.patterns import Participation
from anyorder.plan.certificate import Certificate, Evidence
from anyorder.plan.plan import Plan
from anyorder.release.attached_tables import Attached, AttachedTables, Part, in_order
from anyorder.release.files import RunFiles
from anyorder.release.ranks import Coordinates, OneProcess
from anyorder.release.schedules import Adaptive, FixedNorm, MovingNorm, Schedule, check_schedule
from anyorder.strategy import Strategy

_OWN = {
    "plan", "key", "stream", "clip_norm", "ledger", "extra", "ranks", "renewals", "machine", "coins", "tables",
    "earlier",
}  # fmt: skip

Observer = Callable[[int, Any], object]

Guest = Callable[[int, list[Tensor], float], list[Tensor]]
"""(step, a total in pieces, what the noised total will be divided by) -> new pieces, with what it adds."""


class Release:
    """Carries out one plan without a model: you give the sum of each step, and get it back with noise.

    Step t, given the units in it and the sum of what they add, returns

        ( total + noise_std * (K Z)[t] ) / plan.batch_size

    It keeps the ledger, the journal, the noise, the checkpoint and the certificate. What it refuses changes nothing:
    the same call with what it asks for goes on as if the refused one had not been.

    Guarantee: the sequence of what `step` returns is (plan.epsilon, plan.delta)-DP for one unit under the plan's
    neighbouring relation, each total a function of what was returned before and of nothing else that is secret,
    provided that **you** keep three promises (with `plan.on_device`, your users' devices some of them):

    - every unit's part of `total` is one vector of L2 norm at most `clip_norm`, whatever the other units are, and
      `total` is the sum of the parts of the units that you name: all of them, each named;
    - a part that is not finite is replaced by zero (which is in the ball) before it is added, and nothing tells of it;
    - what else you show, store or decide by is a function of what was returned, or does not depend on the units.

    `anyorder.bounded_sum(vectors, units, clip_norm)` makes sums that keep the first two, and
    `anyorder.sparse.bounded_parts` those of steps with tables: the norm is over all that a step sums. Two releases on
    the same units are two mechanisms: their curves compose.

    A sum with NaN or infinities breaks the promises, and nothing that could then be done is private: to pass it on
    shows where they are; zero in their place, of the coordinate or of all, would let one unit take away what all
    others add, which no noise here covers. So it is refused, with nothing changed. That error tells of the data, one
    bit of it, and no noise covers it: it is a fault of the program that made the sum, to be mended and not shown.

    With `checkpoint`, the key is in that file before the first step, and every step is written to a journal next to it
    before it is released: no step is ever released twice with different noise, whenever the process dies. One that
    resumes from an older checkpoint must give the steps that were lost the same units and the same sums, bit for
    bit; another total, or other units, for a step whose noise was used are refused. Under secret sampling (a plan for
    `PoissonSampling`) the batches are those that `sample` draws, and no others: an amplified claim does not apply to
    batches that somebody chose.

    Args:
        plan: what to run.
        size: elements of a sum; 0 where tables alone are released (`attach`).
        key: 32 bytes for reproducible tests. In use, leave it out: the key then comes from the operating system, and
            a release whose key is known has no privacy.
        checkpoint: file for `save`; where it exists, the release goes on from there. Its folder must exist.
        ledger_on_disk: keep the record in `<checkpoint>.ledger`, which grows by each step, and not in the checkpoint,
            which then stays small however long the run; for many units over many steps. See `anyorder.ledger`.
        start_over: where a run with this checkpoint file took steps, move its files aside (`.NAME.1`, ..) and begin
            again with a new key, for files that are lost, damaged or cannot be replayed. The plan must be the same. The
            certificate counts what was released before: each earlier start as a whole run. Where none took a step, the
            run goes on as without it. Leave it out of programs that are started by themselves: each start counts.

    Attributes:
        plan, size: as given.
        of_tables: what the step before released of tables that select rows; none of lazy ones.
        ledger: who took part in which step; `ledger.step` is the next step.
        earlier: (fingerprint of the key, steps) of each start before this one, with `start_over`.
        extra: what the checkpoint's `save(extra=..)` was given; empty for a new release.
        unreturned: (step, private) of a step that was taken, and whose observer raised; else None.

    Raises: ArgumentError, PlanError; CheckpointError if the file is of another plan, key or program, or in use.

    Example:
        >>> plan = ao.plan(dataset_size=4, batch_size=2, epochs=1, epsilon=1, delta=1e-6)
        >>> release = ao.Release(plan, 3)
        >>> release.step([0, 1], ao.bounded_sum(np.eye(3)[:2], [0, 1], plan.clip_norm)).shape
        (3,)
    """

    resumed: dict[str, Any] | None  # for a front end, whose half of the state is in it
    _draws: "SecretDraws | None"
    _is_drawn_elsewhere = False

    def __init__(
        self, plan: Plan, size: int, *, key: bytes | None = None, checkpoint: str | Path | None = None,
        ledger_on_disk: bool = False, start_over: bool = False,
    ) -> None:  # fmt: skip
        coordinates = OneProcess(checks.integer("size", size, low=0))
        self._begin(
            plan,
            coordinates,
            FixedNorm(),
            key=key,
            checkpoint=checkpoint,
            place="Release",
            ledger_on_disk=ledger_on_disk,
            start_over=start_over,
        )
        try:
            if plan.participation.secret:
                self._draws = SecretDraws(plan.participation, self.draw_source())
            self._go_on(self.resumed)
        except BaseException:
            self._let_go()
            raise
        self.resumed = None

    def _go_on(self, state: dict[str, Any] | None) -> None:
        """Take over what no front end has in its checkpoint."""
        if state is None:
            return
        if not state.keys() <= _OWN:
            raise CheckpointError(
                f"{self._path} is the checkpoint of another front end, which has more in it than a Release would keep; "
                "resume with that one, or choose another file"
            )
        if self._draws is not None:
            self._draws.load_state_dict(state["coins"])

    @classmethod
    def of_ranks(cls, plan: Plan, coordinates: Coordinates, schedule: Schedule, **files: Any) -> Self:
        """For front ends in this package: several ranks, a clip norm that may move, sums in pieces (`take`).

        Args:
            coordinates: the vector and this rank's part of it; its group is who carries the plan out together.
            schedule: of clip norms.
            files: key, checkpoint, ledger_on_disk, start_over; and place, what the ranks are doing, for messages.
        """
        release = cls.__new__(cls)
        release._begin(plan, coordinates, schedule, **files)
        release._is_drawn_elsewhere = plan.participation.secret
        return release

    def _begin(
        self,
        plan: Plan,
        coordinates: Coordinates,
        schedule: Schedule,
        *,
        key: bytes | None,
        checkpoint: str | Path | None,
        place: str,
        ledger_on_disk: bool = False,
        start_over: bool = False,
    ) -> None:
        if type(plan) is not Plan:
            raise ArgumentError(f"plan must be an anyorder Plan (see anyorder.plan), got {type(plan).__name__}")
        if start_over and type(plan.method) is MonteCarlo:
            raise PlanError(
                "start_over=True needs a plan whose starts can be added up. This claim is by samples, which hold "
                "for one release alone: plan with ao.order(.., method='bound')"
            )
        given = None if key is None else NoiseSource(key).key
        self.plan, self.size, self._n = plan, coordinates.size, plan.n
        self._unnamed = "record" in plan.on_device  # who is in a step is on devices, and not learnt here
        self._ranks, self._process = coordinates.group, os.getpid()
        self._norm = MovingNorm(plan, schedule) if type(schedule) is Adaptive else None
        self._path = None if checkpoint is None else Path(checkpoint)
        has_files = self._path is not None or ledger_on_disk or start_over
        self._files = RunFiles(self._path, self._ranks, ledger_on_disk, start_over) if has_files else None
        state = None if self._files is None else self._files.load(place, plan, given)
        if state is not None:
            check_schedule(self._norm, state["clip_norm"])
        fresh = given or NoiseSource.random().key
        self._key = self._ranks.from_first(fresh) if state is None else state["key"]
        # A key is bound to its plan: under another plan the same 32 bytes give unrelated noise.
        self._source = NoiseSource(self._key).derive(plan.digest.encode())
        if self._files is not None:
            self._source = self._files.begin(place, self._source, plan, state)
        try:
            self._noise = SharedNoise(plan.strategy, self._source, plan.noise_std, coordinates, plan.grid)
            self.ledger = (
                Ledger(plan.participation) if self._files is None else self._files.ledger(plan.participation, state)
            )
            if state is not None:
                self._noise.load_state_dict({
                    **state["stream"], "state": [values.numpy() for values in state["stream"]["state"]]
                })  # fmt: skip
            if state is not None and self._norm is not None:
                self._norm.load_state_dict(state["clip_norm"])
        except BaseException:
            self._let_go()
            raise
        saved = None if state is None else state.get("tables", [])
        needs_tables = plan.selection is not None or not self.size or saved
        self._saved_tables = saved
        self._tables = self._made_tables() if needs_tables else None
        self.resumed = state
        self.extra: dict[str, Any] = {} if state is None else state["extra"]
        record = self._source.derive(b"record").key
        self.earlier = () if self._files is None else tuple(self._files.earlier)
        self._evidence = Evidence(plan, self.ledger, self._source.fingerprint(), record, earlier=self.earlier)
        self._draws = None
        self._guest: Guest | None = None
        self._observers: list[Observer] = []
        self.of_tables: list[Any] = []
        self._begun = False
        self.unreturned: tuple[int, Any] | None = None
        self._closed = False
        self._free_now = threading.Lock()

    # -- one step ----------------------------------------------------------------------------------------------------

    def step(self, units: Iterable[Any] | None, total: Any, tables: Sequence[Part] = ()) -> Any:
        """The private mean of the next step.

        Args:
            units: ids of all units whose parts are in `total`, integers or strings, in any order. A unit may be named
                twice, and is one unit. A step of nobody is a step. Where the plan's record is on devices, None.
            total: the un-noised sum: a NumPy array or a torch tensor of `size` elements in any shape, float32 or
                float64; it is not written. For a plan with a grid int64, in grid steps.
            tables: of each attached table its part, such as `LazyTable.rows` gives: a unit's vector is its part of
                `total` and of these together, of norm at most `clip_norm`.
        Returns: like `total`, a fresh array; for a plan with a grid float64.
        Raises: ParticipationError, StepsExhaustedError, ArgumentError, TrainingError, CheckpointError; with nothing
            changed. What an observer raises comes after the step: see `on_release`.
        Cost: the noise of a step, a copy of the sum; with a checkpoint a hash of it and a write to the disk.
        """
        with self._one_at_a_time():
            if self._is_drawn_elsewhere:
                raise self._drawn_elsewhere()
            own = [piece_of(total, self.size, self.plan.grid)]
            ids, step = self._named(units, own, tables), self.ledger.step
            private = like(self.take(ids, own, tables=tables)[0], total)
            self.tell(step, lambda: private)
            return private

    def step_rows(self, units: Iterable[Any] | None, rows: ArrayLike, values: Any) -> Any:
        """The next step of a (num_rows, width) table of which only some rows are released, at the cost of these rows.

        `size` is num_rows * width. Rows that are not named are not released in this step; what `step` would have
        returned for the others is what is returned, bit for bit.

        Privacy: **which rows are named must not depend on the units**: the same for neighbours, as a fixed part of the
        table, or chosen by what was returned before. The rows that a batch touches are not: they tell of it. What a
        unit has in other rows must be left out, which can only shorten its vector.

        Args:
            units, Returns, Raises: as for `step`.
            rows: (k,) distinct row numbers.
            values: (k, width) sums, float32 or float64.
        Raises: ArgumentError for a strategy with a state (its noise in a row needs all steps before, in that row) or a
            plan with a grid.
        """
        with self._one_at_a_time():
            if self._is_drawn_elsewhere:
                raise self._drawn_elsewhere()
            asked = Rows.of(rows, values, self.size, self.plan)
            ids, step = self._named(units, [asked.values], ()), self.ledger.step
            private = like(self._take_rows(ids, asked), values)
            self.tell(step, lambda: private)
            return private

    def _named(self, units: Iterable[Any] | None, own: list[Tensor], tables: Sequence[Part]) -> Units:
        """Raise unless these units may take the next step with this total. Changes nothing."""
        if units is None and not self._unnamed:
            raise ArgumentError("units must name whose parts are in the sum, got None; a step of nobody has []")
        ids = self.check([] if units is None else units)
        parts = self._in_order(tables)
        if len(ids) or self._unnamed:
            return ids
        if any(bool(piece.any()) for piece in own) or not all(part.is_zero for part in parts):
            raise ArgumentError("the sum of nobody must be zero: name all units whose parts are in it")
        return ids

    def check(self, units: Iterable[Any] | None) -> Units:
        """Raise unless these units may take the next step. Changes nothing.

        Args:
            units: None where they are not known yet.
        Returns: the units, distinct and sorted.
        """
        self.check_usable()
        step = self.ledger.step
        if step >= self._n:
            raise StepsExhaustedError(f"all {self._n} planned steps are used; a longer run needs its own plan")
        self._noise.check(step)
        if self._tables is not None:
            self._tables.check(step)
        if self._norm is not None:
            self._norm.check_step(step)
        if units is None:
            return []
        ids = self.ledger.check(step, units)
        if self._unnamed:
            self._check_unnamed(ids)
        if self._draws is not None:
            self._draws.check(step, ids)
        return ids

    def _drawn_elsewhere(self) -> PlanError:
        """Under a secret order a batch is what was drawn for its step: here, or by the front end that calls `take`."""
        return PlanError(
            f"the batches of {self.plan.participation.describe()} are drawn by the loader of this run, and its "
            "steps are taken by optimizer.step(); for totals of your own make an ao.Release of a plan of their own"
        )

    def _check_unnamed(self, ids: Units) -> None:
        if len(ids):
            raise ArgumentError(
                "units must be None or empty: the plan leaves the record to the users' devices, so that ids are not "
                "learnt here, and got some. Leave them out, or plan without "
                "ao.mechanism(on_device=('record',)) and let the ledger guard"
            )

    def take(
        self, units: Units | list[Any], own: list[Tensor], place: str = "Release.step", tables: Sequence[Part] = ()
    ) -> list[Tensor]:
        """The step itself, after `check`: its stages, in their order.

        A ledger on disk has the step written before the journal commits it, where it does not count: so nothing that
        comes after the commit can fail for want of room. See `anyorder.ledger` for what a crash leaves.

        Args:
            units: that were checked for this step; they are checked again.
            own: this rank's part of the sum in pieces, which are overwritten.
            tables: the parts of the attached tables; see `anyorder.release.attached_tables`.
        Returns: the private pieces: `own` itself, or new ones on a grid. What tables release is in `of_tables`.
        """
        if self.needs_save:
            self.save(self.extra)  # before anything else: from here on a restart finds the key
        step, divisor = self.ledger.step, self.divisor
        if self._tables is not None:
            self._tables.flush_again(step)  # where an interrupt came between the step before and its flush
        parts = self._in_order(tables) if tables or self._tables is not None else ()
        if self._unnamed:
            self._check_unnamed(units)
        # units: those of the step, which the ledger lets in, and writes where they do not count yet
        ids = self.ledger.prepare(step, units)
        self._begun = True
        # bound: sums of vectors of the norm in force become sums of vectors of the planned norm
        if self._norm is not None:
            factor = self._norm.factor
            own, parts = [x * factor for x in own], [part.scaled(factor) for part in parts]
        # join: who is planted for an audit
        if self._guest is not None:
            own, parts = _with_guest(self._guest, step, own, parts, divisor)
        # record: what the noise of this step is used on, before anything noised exists
        if self._files is not None:
            told = [tensor for part in parts for tensor in part.parts()] if parts else []
            self._files.commit(place, step, ids, [*own, *told], self._population)
        # noise, in the place of `own`; where this is broken off, `SharedNoise.check` sees streams that are a step ahead
        private = self._noise.add_to(own, divisor)
        if parts:
            settled = [part.table.settle(part, step, divisor) for part in parts]
            self.of_tables = [released for released in settled if released is not None]
        # hand back
        self.ledger.record(step, ids)
        if self._tables is not None:
            self._tables.flush_again(step + 1)
        return private

    def _take_rows(self, ids: Units, asked: "Rows") -> Tensor:
        """`take` for some rows of the total alone."""
        step = self.ledger.step
        if self._guest is not None:
            raise TrainingError("canaries are added to whole totals: an audited run takes step(), not step_rows()")
        if self.needs_save:
            self.save(self.extra)
        ids = self.ledger.prepare(step, ids)
        self._begun = True
        if self._files is not None:
            self._files.commit("Release.step", step, ids, asked.parts(), self._population)
        private = self._noise.add_to_rows(asked.rows, asked.values, self.divisor)
        self.ledger.record(step, ids)
        return private

    def sample(self, num_units: int) -> NDArray[np.int64]:
        """The units of the next step under secret sampling, ascending numbers below `num_units`, perhaps none.

        Each unit is drawn by a draw of its own, which comes from the key and the step; asked again, the answer is the
        same. `step` then takes these units and no others. Keep them secret: the claim rests on it.

        Args:
            num_units: size of the population, the same in all steps: one that follows the draws would undo them.
        Raises: PlanError where the plan is not one for secret sampling; ArgumentError for another population.
        """
        self.check(None)
        if self._draws is None:
            raise PlanError(
                f"sample() draws in secret, and the plan is for {self.plan.participation.describe()}: give step() "
                "the units as they come"
            )
        return self._draws.draw(self.ledger.step, num_units)

    @property
    def _population(self) -> bytes:
        """For whom draws were made, as the journal has it."""
        return b"" if self._draws is None else self._draws.population

    @property
    def clip_norm(self) -> float:
        """The norm that a unit's part of the next total may have. It is public."""
        return self.plan.clip_norm if self._norm is None else self._norm.current

    @property
    def norm_moves(self) -> bool:
        """True if the clip norm follows what was released, under `Adaptive`."""
        return self._norm is not None

    @property
    def divisor(self) -> float:
        """The divisor of a noised sum: the batch size; if the norm moves, with the way back to its own units."""
        return self.plan.batch_size if self._norm is None else self._norm.divisor

    def record_count(self, step: int, count: float) -> None:
        """Take the released count of a step under `Adaptive`: the clip norm of the next period follows from it."""
        assert self._norm is not None
        self._norm.record(step, count, self._ranks)

    # -- tables ------------------------------------------------------------------------------------------------------

    def attach(self, table: Attached) -> int:
        """Take in a table, before the first step; for those of `anyorder.sparse`, which call it themselves.

        Its coordinates lie behind those of the release and of the tables before it. On a resume the run's tables are
        attached in their order, and go on from the checkpoint.

        Returns: its first coordinate.
        Raises: PlanError among several ranks, for a plan with a grid, or for a selection where the table has none, and
            the other way round; TrainingError after the first step; CheckpointError for another table than the run's.
        """
        self.check_usable()
        if self._guest is not None:
            raise TrainingError("tables are attached before canaries are planted, which lie in them too")
        if self._tables is None:
            self._tables = self._made_tables()
        return self._tables.attach(table, self.ledger.step, self._begun)

    def _made_tables(self) -> AttachedTables:
        return AttachedTables(self.plan, self.size, self._ranks.size, self._files, self._saved_tables)

    def _in_order(self, tables: Sequence[Part]) -> Sequence[Part]:
        """The parts of a step, one for each attached table, in their order."""
        return in_order([] if self._tables is None else self._tables.attached, tables)

    @property
    def whole_size(self) -> int:
        """Number of coordinates, with those of the tables."""
        return self.size if self._tables is None else self.size + self._tables.size

    def flush(self) -> None:
        """Bring all rows of all lazy tables up to date, and show the tables: `LazyTable.flush`.

        A table may be shown only so: which rows lack noise tells which rows were touched. The journal has it first, so
        that a process that resumes from an older checkpoint shows the same tables at the same step, and no others.

        Raises: CheckpointError while lost steps are repeated, where the lost process did not flush; TrainingError where
            a step was broken off. Nothing is shown then.
        Cost: the noise of all rows that lack some, and with a checkpoint a hash of the tables.
        """
        with self._one_at_a_time():
            self.check_usable()
            self._noise.check(self.ledger.step)
            if self._tables is not None:
                self._tables.check_whole(self.ledger.step)
                if self.needs_save:
                    self.save(self.extra)
                self._tables.flush(self.ledger.step)

    # -- who looks on ------------------------------------------------------------------------------------------------

    def admit(self, guest: Guest) -> None:
        """Let a guest add to every total before it is noised: for `anyorder.audit.plant`, which says what it may add.

        It sees whole tables behind the dense total, and observers see all of them at every step.

        Raises: TrainingError after the first step, for a second guest, among several ranks, or with a checkpoint: what
            the guest adds would have to be the same, bit for bit, after a resume.
        """
        self.check(None)
        problem = None
        if self.ledger.step:
            problem = "after its first step: what was released before knows nothing of them"
        elif self._guest is not None:
            problem = "a second time"
        elif self._ranks.size > 1:
            problem = "among several ranks, each of which has a part of the total: audit in one process"
        elif self._path is not None:
            problem = "with a checkpoint: a resumed run would have to add the same ones; audit without checkpoint="
        if problem is not None:
            raise TrainingError(f"canaries cannot be planted in a run {problem}")
        self._guest = guest

    def on_release(self, callback: Observer) -> Callable[[], None]:
        """Call `callback(step, private)` after every step from now on: for audits and logs.

        It sees what is released and nothing else: a copy of what `step` returns (of an engine: all private gradients
        one behind the other, of this rank's coordinates where there are several). One that raises changes nothing: the
        step was taken before and is in the ledger, all other observers are called, the error goes up to the caller of
        `step`, and `unreturned` has what `step` would have returned. With tables that select rows it is the pair
        (private, [a sparse tensor for each of them]); of a lazy table nothing is released at a step.

        Returns: a function that ends it.
        """
        if not callable(callback):
            raise ArgumentError(f"callback must be a function of (step, private), got {type(callback).__name__}")
        self._observers.append(callback)
        return lambda: self._observers.remove(callback)

    def tell(self, step: int, private: Callable[[], Any]) -> None:
        """Tell the observers of a step that was taken."""
        self.unreturned = None
        if not self._observers:
            return
        released = private()
        if self.of_tables:
            pieces = (released, *self.of_tables)
            whole = [torch.as_tensor(piece).reshape(-1) for piece in pieces] if self._guest is not None else None
            released = pieces if whole is None else torch.cat(whole)
        self.unreturned = step, released
        tell_each(self._observers, step, released)
        self.unreturned = None

    @contextmanager
    def _one_at_a_time(self) -> Iterator[None]:
        if not self._free_now.acquire(blocking=False):
            raise TrainingError(
                "a step is being taken already, by another thread or around this observer: one at a time"
            )
        try:
            yield
        finally:
            self._free_now.release()

    def check_usable(self) -> None:
        """Raise where this object does not stand for the run (any more)."""
        if os.getpid() != self._process or self._closed:
            self._check_process()
            raise TrainingError("this release was closed: another process may have resumed its run")
        if self._files is not None:
            self._files.check_open()

    def _check_process(self) -> None:
        """Refuse in a forked child: it would go on with the parent's key and steps, on data of its own."""
        if os.getpid() != self._process:
            raise TrainingError(
                "this process was forked from the one that began this run, which goes on with the same noise: go on in "
                "that one, or begin a run of its own here"
            )

    # -- what is shown and kept --------------------------------------------------------------------------------------

    @property
    def steps_taken(self) -> int:
        """Number of steps taken."""
        return self.ledger.step

    @property
    def repeats(self) -> bool:
        """True if the next step was released before, by a process that went on from this checkpoint or an older one."""
        return self._files is not None and self._files.has(self.ledger.step)

    @property
    def may_have_committed(self) -> bool:
        """True if the journal may have the next step: then its noise is for the sum that it was committed with alone.

        Also after a commit that was broken off, of which nobody knows how far it came, and where the run has gone on
        in another object.
        """
        return self._files is not None and self._files.may_have(self.ledger.step)

    def derived(self, label: bytes) -> NoiseSource:
        """A source of the run's own for another purpose, such as the order of examples. Renewals do not touch it."""
        return self._source.own.derive(label)

    def draw_source(self) -> NoiseSource:
        """The source of secret draws."""
        return self.by_step(b"sampling")

    def by_step(self, label: bytes) -> NoiseSource:
        """`derived`, for what is drawn in every step: rows are steps, and renewed where steps are."""
        return self._renewed(self.derived(label))

    def _renewed(self, source: NoiseSource, first_row: Callable[[int], int] = int) -> NoiseSource:
        return source if self._files is None else self._files.by_step(source, first_row)

    def lazy_source(self, first_row: Callable[[int], int]) -> NoiseSource:
        """The source of the jumps of lazy tables; elements are coordinates.

        Args:
            first_row: step -> the first row that jumps over it or later steps have: renewed where the step is, as
                `anyorder.noise.lazy.Jumps.first_row` gives it.
        """
        return self._renewed(self.derived(b"lazy tables"), first_row)

    def noise_rows(self) -> NoiseSource:
        """The rows of Z of the run's own noise, for lazy tables that make it by value; elements are coordinates."""
        return self._source

    @property
    def std(self) -> float:
        """Standard deviation of the noise as it is made: the plan's, rounded up to float32."""
        return self._noise.std

    @property
    def is_closed(self) -> bool:
        """True if another process may have resumed the run."""
        return self._closed

    def table_noise(self, first: int, size: int) -> "TableNoise":
        """The noise of the run itself at these coordinates, step by step, for rows of them."""
        return TableNoise(self.plan.strategy, self._source, self.plan.noise_std, first, size)

    def certificate(self, *, public_stop: bool = False) -> Certificate:
        """The claim of this run, for everybody: `save` it, and check it with `anyorder verify`. It names nobody.

        With what was `realised` after all steps: how often units appeared at most, how far apart, the epsilon of that.

        Args:
            public_stop: you state that a run which ended before its last planned step did so for a reason that was not
                read off what it released (a date, a budget of hours). Then the certificate has what was realised, and
                says that you stated it. A stop because the model is good enough is not of this kind: the planned
                epsilon applies to it.
        """
        return self._evidence.shown(public_stop=public_stop)

    def evidence(self) -> Evidence:
        """Return the record that backs the certificate: who took part in which step. It is as secret as the data."""
        return self._evidence

    def save(self, extra: dict[str, Any] | None = None) -> None:
        """Write the checkpoint: one file, replaced atomically.

        The file holds the noise key: anyone who has it can remove the noise. Steps after the last save are repeated
        when the run is resumed, and must come out bit for bit as they were: save often.

        Args:
            extra: arrays, tensors and plain values of your own, found in `extra` after a resume; arrays as tensors.
        Raises: CheckpointError; the file of the last save is intact.
        """
        self.save_all("Release.save()", {}, extra)

    def save_all(self, place: str, front_end: dict[str, Any], extra: dict[str, Any] | None) -> None:
        """`save`, with what a front end adds. All ranks call it, and the first one writes."""
        self.check_save()
        assert self._files is not None
        state = {
            "plan": json.dumps(self.plan.to_dict()),
            "key": self._key,
            "stream": self._noise.state_dict(),
            "clip_norm": None if self._norm is None else self._norm.state_dict(),
            "ledger": self._files.kept(self.ledger),
            "extra": extra or {},
        }
        if self._draws is not None:
            state["coins"] = self._draws.state_dict()
        if self._tables is not None:
            state |= self._tables.state()
        self._files.save(place, {**state, **front_end})

    @property
    def needs_save(self) -> bool:
        """True if the first checkpoint is still to be written: it must be before any noise is used."""
        return self._files is not None and self._files.needs_save

    def check_save(self) -> None:
        """Raise CheckpointError where nothing can be saved."""
        self._check_process()
        if self._files is None:
            raise CheckpointError("this run has no file: give checkpoint=")
        if self._closed:
            raise CheckpointError("this run was closed: another process may have resumed it")
        self._files.check_open()
        self._noise.check(self.ledger.step)
        if self._tables is not None:
            self._tables.check_settled(self.ledger.step)

    def close(self) -> None:
        """Let another process resume this run. The end of the process does the same."""
        self._check_process()
        self.ledger.close()
        self._let_go()
        self._closed = True

    def _let_go(self) -> None:
        if self._files is not None:
            self._files.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *problem: object) -> None:
        self.close()


# ----------------------------------------------------------------------------------------------------
# The noise of a run, added to sums: each rank makes the part over its own coordinates.


class SharedNoise:
    """A noise stream over all coordinates, of which each rank makes and keeps the part over its own.

    The ranks' parts are together, bit for bit, the noise of one `NoiseStream` over everything; making them needs no
    communication. A saved state is that one stream's, whatever the number of ranks.

    Args:
        strategy, source, std: as for `NoiseStream`.
        shards: whose coordinates `add_to` covers, and in which order.
        grid: None, or as for `GridStream`, which then takes the place of `NoiseStream`.

    Attributes:
        std: as it is made, rounded up to float32.
    """

    def __init__(
        self, strategy: Strategy, source: NoiseSource, std: float, shards: Coordinates, grid: float | None = None
    ) -> None:
        self._group = shards.group
        self._size = shards.size
        self.std = float(round_up(std))
        self._grid, self._ranges = grid, shards.ranges
        self._streams: list[Any] = [
            NoiseStream(strategy, source, std, j - i, start=i)
            if grid is None
            else GridStream(strategy, source, std, grid, j - i, start=i)
            for i, j in shards.ranges
        ]

    def check(self, step: int) -> None:
        """Refuse to go on where noise was drawn for a step that the ledger does not have, after an interrupt perhaps.

        The noise would be ahead of the gradients: a row of C^-1 Z that is left out is one that no guarantee knows of.
        """
        for stream in self._streams:
            if stream.t != step:
                raise TrainingError(
                    f"the noise of step {step} was drawn, but the step was broken off half way: nothing more may be "
                    "released; resume from the last checkpoint in a new engine"
                )

    def add_to(self, own: list[Tensor], divisor: float) -> list[Tensor]:
        """(own + noise of the next step) / divisor on the rank's own coordinates.

        Args:
            own: the rank's vector in pieces, which are overwritten: float32; on a grid int64, in grid steps.
            divisor: the batch size, perhaps times a change of units.
        Returns: `own`; on a grid as many float64 tensors.
        Raises: StepsExhaustedError after n steps. TrainingError if a step was broken off between the rank's streams.
        """
        if self._grid is not None:
            noise = np.concatenate([np.empty(0, np.int64), *(stream.next() for stream in self._streams)])
            parts = torch.split(torch.from_numpy(noise), [len(x) for x in own])
            # In place: torch refuses a sum of floats here.
            totals = [part.to(x.device).add_(x) for part, x in zip(parts, own, strict=True)]
            return [total.double().mul_(self._grid).div_(divisor) for total in totals]
        if not self._size:  # tables alone: their noise is made with them
            for stream in self._streams:
                stream.skip()
            return own
        if len(self._streams) == 1:  # the rounding of 1 / divisor comes behind the noise
            self._streams[0].add_to(own, 1 / divisor)
            return own
        (vector,) = own
        start = 0
        for stream, (i, j) in zip(self._streams, self._ranges, strict=True):
            stream.add_to([vector[start : start + j - i]], 1 / divisor)
            start += j - i
        return own

    def add_to_rows(self, rows: NDArray[np.int64], values: Tensor, divisor: float) -> Tensor:
        """(values + noise of the next step) / divisor on some rows of a table, bit for bit as `add_to` has it there.

        Args:
            rows: (k,) row numbers.
            values: (k, width), float32 or float64.
        Raises: ArgumentError for a strategy with a state; nothing changes.
        """
        (stream,) = self._streams
        saved = stream.state_dict()
        made = _noised(values, stream.rows(stream.t, rows, values.shape[1]), divisor)
        stream.load_state_dict({**saved, "t": saved["t"] + 1})  # without a state, that is a step
        return made

    def state_dict(self) -> dict[str, Any] | None:
        """The state over all coordinates, on the first rank; None elsewhere. All ranks must call it."""
        told = self._group.to_first([stream.state_dict() for stream in self._streams])
        if told is None:
            return None
        parts = sorted((part for of_rank in told for part in of_rank), key=lambda part: part["start"])
        states = zip(*(part["state"] for part in parts), strict=True)
        state = [np.concatenate(arrays, axis=-1) for arrays in states]
        return {**parts[0], "start": 0, "size": self._size, "state": state}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was taken, on this rank's coordinates.

        Raises: CheckpointError if it is of another stream.
        """
        for stream in self._streams:
            own = stream.state_dict()
            start, size = own["start"], own["size"]
            cut = {"start": start, "size": size} if saved["size"] == self._size and saved["start"] == 0 else {}
            state = [array[..., start : start + size] for array in saved["state"]]
            stream.load_state_dict({**saved, **cut, "state": state})


class TableNoise:
    """The noise of a run in rows of tables, whose coordinates lie behind the dense ones; nothing is kept.

    Args:
        strategy, source, std: as for `NoiseStream`; a strategy without a state.
        start, size: first coordinate of the tables, and how many they have.
    """

    def __init__(self, strategy: Strategy, source: NoiseSource, std: float, start: int, size: int) -> None:
        self._stream = NoiseStream(strategy, source, std, size, start=start)

    def add_to_rows(self, step: int, offset: int, rows: NDArray[np.int64], values: Tensor, divisor: float) -> Tensor:
        """(values + noise of the step) / divisor on some rows of a table, bit for bit as a whole step has it there.

        Args:
            step: the release takes each once; asked for again, it is that noise again.
            offset: place of the table among the coordinates of all tables.
            rows: (k,) row numbers.
            values: (k, width), float32 or float64; they are not written.
        """
        return _noised(values, self._stream.rows(step, rows, values.shape[1], offset=offset), divisor)


def _noised(values: Tensor, noise: NDArray[np.float32], divisor: float) -> Tensor:
    scale = 1 / divisor
    made = values + torch.from_numpy(noise).to(values.device)
    return made.mul_(scale if values.dtype == torch.float64 else float(np.float32(scale)))


# ----------------------------------------------------------------------------------------------------
# Secret draws: who is in a step where the claim rests on chance that nobody else knows.


class SecretDraws:
    """The batches of a secret order over units 0, .., size - 1: those of `Draws`.

    Args:
        rule: the order.
        source: where the draws come from; rows are steps.
    """

    def __init__(self, rule: Participation, source: NoiseSource) -> None:
        self._rule, self._source = rule, source
        self._size: int | None = None
        self._draws: Draws | None = None
        self._drawn: tuple[int, NDArray[np.int64]] | None = None  # step, units

    def draw(self, step: int, size: int) -> NDArray[np.int64]:
        """The units of a step, ascending."""
        size = check_size(self._rule, size)
        if self._size is not None and size != self._size:
            raise ArgumentError(f"num_units must be {self._size} as in the steps before, got {size}")
        if self._draws is None:
            self._draws = Draws(self._rule, size, self._source)
        drawn = self._draws.step(step)
        self._size, self._drawn = size, (step, drawn)
        return drawn.copy()

    @property
    def population(self) -> bytes:
        """Its size, for the journal: another one would make the same draws for others."""
        return b"population %d," % (self._size or 0)

    def check(self, step: int, ids: Units) -> None:
        """Raise TrainingError unless the units are those that were drawn for the step."""
        if self._drawn is None or self._drawn[0] != step:
            raise TrainingError(
                "the plan's claim rests on secret draws: take the units of each step from sample(num_units), which "
                "draws them. For batches that come as they come, plan for another order"
            )
        if isinstance(ids, list) or not np.array_equal(ids, self._drawn[1]):
            raise TrainingError(
                "units must be those that sample() drew for this step, all of them: the plan's claim does not apply to "
                "batches that somebody chose"
            )

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint."""
        return {"size": self._size}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Go on where `state_dict` was taken."""
        self._size = saved["size"]


# ----------------------------------------------------------------------------------------------------
# Totals as they come and go: whole vectors, or rows of a table.


_FLOATS = (torch.float32, torch.float64)
_NUMPY = {torch.float32: np.float32, torch.float64: np.float64}
_LARGE = 1 << 20  # elements, from which NumPy asks for large pages: fresh memory of torch's takes three times as long


def piece_of(total: Any, size: int, grid: float | None) -> Tensor:
    """A flat copy of a total. Raises: ArgumentError if it does not fit or is not finite; see `Release`."""
    tensor = _tensor("total", total)
    kinds = _FLOATS if grid is None else (torch.int64,)
    if tensor.dtype not in kinds:
        raise ArgumentError(
            f"total must be float32 or float64, got {total.dtype}"
            if grid is None
            else f"total must be int64, in steps of the plan's grid {grid:g} (bounded_sum(.., grid=) gives that), got "
            f"{total.dtype}"
        )
    if tensor.numel() != size:
        raise ArgumentError(f"total must have {size} elements, in any shape, got shape {tuple(tensor.shape)}")
    _check_finite("total", tensor)
    return tensor.view(-1)


def like(piece: Tensor, total: Any) -> Any:
    """A private piece in the shape and kind of the total."""
    shaped = piece.view(tuple(total.shape))
    return shaped if isinstance(total, Tensor) else shaped.numpy()


@dataclass(frozen=True)
class Rows:
    """Some rows of a (num_rows, width) table.

    Attributes:
        rows: (k,) int64, distinct.
        values: (k, width), a copy of the sums, float32 or float64.
    """

    rows: NDArray[np.int64]
    values: Tensor

    @classmethod
    def of(cls, rows: ArrayLike, values: Any, size: int, plan: Plan) -> "Rows":
        """Raises: ArgumentError if they do not fit the table, or the plan has no noise for rows alone."""
        if plan.grid is not None:
            raise ArgumentError(
                "rows alone have no exact noise: give the whole table to step(), or plan without "
                "ao.mechanism(secure=True)"
            )
        if plan.strategy.state_rows:
            raise ArgumentError(
                f"rows alone need noise without a state, and that of {plan.strategy.describe()} comes from all steps "
                "before: plan with a tree of regenerate=True, a banded inverse or independent noise, or give the whole "
                "table to step()"
            )
        tensor = _values(values)
        width = tensor.shape[1]
        if not width or size % width:
            raise ArgumentError(f"values must be as wide as the table, whose {size} elements are no rows of {width}")
        return cls._checked(rows, tensor, size // width)

    @classmethod
    def fitting(cls, rows: ArrayLike, values: Any, num_rows: int, width: int) -> "Rows":
        """Raises: ArgumentError if they do not fit the table."""
        tensor = _values(values)
        if tensor.shape[1] != width:
            raise ArgumentError(f"values must be as wide as the table, (k, {width}), got {tuple(tensor.shape)}")
        return cls._checked(rows, tensor, num_rows)

    @classmethod
    def _checked(cls, rows: ArrayLike, tensor: Tensor, num_rows: int) -> "Rows":
        asked = rows.detach().cpu().numpy() if isinstance(rows, Tensor) else np.asarray(rows)
        if asked.ndim != 1 or (asked.size and asked.dtype.kind not in "iu") or len(asked) != len(tensor):
            raise ArgumentError(
                f"rows must be a list of {len(tensor)} integers, one for each row of values, got {asked.dtype} of "
                f"shape {asked.shape}"
            )
        if asked.size and not 0 <= asked.min() <= asked.max() < num_rows:
            raise ArgumentError(f"rows must lie in 0 .. {num_rows - 1}, the rows of the table, and some do not")
        ascending = bool((asked[1:] > asked[:-1]).all())
        if not ascending and len(np.unique(asked)) != len(asked):
            raise ArgumentError("rows must be distinct: one that is named twice would be released twice; add them up")
        _check_finite("values", tensor)
        return cls(asked.astype(np.int64), tensor)

    def parts(self) -> list[Tensor]:
        """What a journal is told: other rows, another width, or no rows, are other data."""
        head = np.concatenate([[-1, *self.values.shape], self.rows])
        return [torch.from_numpy(head), self.values]


def _values(values: Any) -> Tensor:
    tensor = _tensor("values", values)
    if tensor.dtype not in _FLOATS or tensor.dim() != 2:
        raise ArgumentError(
            f"values must be (k, width) in float32 or float64, got {values.dtype} of shape {tuple(values.shape)}"
        )
    return tensor


def _tensor(name: str, values: Any) -> Tensor:
    """A copy of the values as a tensor in row-major order."""
    if isinstance(values, Tensor):
        if values.layout != torch.strided or values.device.type == "meta":
            raise ArgumentError(f"{name} must be a dense tensor with memory, got {values.layout} on {values.device}")
        if values.device.type == "cpu" and values.dtype in _NUMPY and values.numel() >= _LARGE:
            return torch.from_numpy(np.empty(values.shape, _NUMPY[values.dtype])).copy_(values.detach())
        return values.detach().clone(memory_format=torch.contiguous_format)
    if not isinstance(values, np.ndarray) or isinstance(values, np.ma.MaskedArray):
        raise ArgumentError(f"{name} must be a NumPy array or a torch tensor, got {type(values).__name__}")
    if values.dtype.kind not in "fi" or not values.dtype.isnative or values.dtype.itemsize > 8:
        raise ArgumentError(f"{name} must be of native float32, float64 or int64, got {values.dtype}")
    return torch.from_numpy(np.array(values, order="C", subok=False))


def _check_finite(name: str, values: Tensor) -> None:
    # NaN and infinities survive a sum, so that a finite sum, one cheap pass, settles it.
    if not values.is_floating_point() or values.sum().isfinite() or values.isfinite().all():
        return
    raise ArgumentError(
        f"{name} must be finite: a unit's part that is not must be zero before it is added, as bounded_sum does. "
        "Nothing was released or changed; but this error tells of the data, and no noise covers it"
    )


# ----------------------------------------------------------------------------------------------------
# Who looks on: observers, who see what was released, and a guest, who adds to totals for an audit.


def tell_each(observers: Sequence[Observer], step: int, released: Any) -> None:
    """Call every observer with a copy; what they raise is raised when all were called."""
    problems = []
    for observer in tuple(observers):
        try:
            observer(step, copy_of(released))
        except Exception as problem:
            problem.add_note(f"(an observer's; step {step} was taken, and `unreturned` has its result)")
            problems.append(problem)
    if len(problems) > 1:
        raise ExceptionGroup(f"{len(problems)} observers of step {step} failed", problems)
    if problems:
        raise problems[0]


def copy_of(released: Any) -> Any:
    """A copy for observers: of an array one that cannot be written."""
    if isinstance(released, tuple | list):
        return type(released)(copy_of(part) for part in released)
    if isinstance(released, Tensor):
        return released.clone()
    copy = released.copy()
    copy.flags.writeable = False
    return copy


def _with_guest(
    guest: Guest, step: int, own: list[Tensor], parts: Sequence[Part], divisor: float
) -> tuple[list[Tensor], list[Part]]:
    """A step's total and parts with what a guest adds, who sees the whole tables behind the dense total."""
    pieces = guest(step, [*own, *(part.whole() for part in parts)], divisor)
    return pieces[: len(own)], [part.of_whole(x) for part, x in zip(parts, pieces[len(own) :], strict=True)]
