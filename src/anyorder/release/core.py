"""A plan carried out, whatever made the sums: the one place where a sum becomes a release."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from anyorder import checks
from anyorder.errors import ArgumentError, CheckpointError, PlanError, StepsExhaustedError, TrainingError
from anyorder.ledger import Units
from anyorder.plan.plan import Plan
from anyorder.release.coins import Coins
from anyorder.release.observers import Guest, Observer, check_guest, joined, tell_each
from anyorder.release.ranks import Coordinates, OneProcess
from anyorder.release.run import Run
from anyorder.release.schedules import Fixed, Schedule
from anyorder.release.tables import Attached, Part, with_guest
from anyorder.release.totals import Rows, like, piece_of

__all__ = ["Release"]

_OWN = {"plan", "key", "stream", "clip_norm", "ledger", "extra", "ranks", "renewals", "machine", "coins", "tables"}


class Release(Run):
    """Carries one plan out: you bring the sum of each step, and get it back private.

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

    `anyorder.bounded_sum(vectors, units, clip_norm)` makes totals that keep the first two, and
    `anyorder.sparse.bounded_parts` those of steps with tables: the norm is over all that a step sums. Two releases on
    the same units are two mechanisms: their curves compose.

    A total with NaN or infinities breaks the promises, and nothing that could then be done is private: to pass it on
    shows where they are; zero in their place, of the coordinate or of all, would let one unit take away what all
    others add, which no noise here covers. So it is refused, with nothing changed. That error tells of the data, one
    bit of it, and no noise covers it: it is a fault of the program that made the total, to be mended and not shown.

    With `checkpoint`, the key is in that file before the first step, and every step is written to a journal beside it
    before it is released: no step is ever released twice with different noise, whenever the process dies. One that
    resumes from an older checkpoint must give the steps that were lost the same units and the same totals, bit for
    bit; another total, or other units, for a step whose noise was used are refused. Under secret sampling (a plan for
    `PoissonSampling`) the batches are those that `sample` draws, and no others: an amplified claim does not hold for
    batches that somebody chose.

    Args:
        plan: what to run.
        size: elements of a total; 0 where tables alone are released (`attach`).
        key: 32 bytes for reproducible tests. In use, leave it out: the key then comes from the operating system, and
            a release whose key is known has no privacy.
        checkpoint: file for `save`; where it exists, the release goes on from there. Its folder must exist.
        ledger_on_disk: keep the record in `<checkpoint>.ledger`, which grows by each step, and not in the checkpoint,
            which then stays small however long the run; for many units over many steps. See `anyorder.ledger`.

    Attributes:
        plan, size: as given.
        of_tables: what the step before released of tables that select rows; none of lazy ones.
        ledger: who took part in which step; `ledger.step` is the next step.
        extra: what the checkpoint's `save(extra=..)` was given; empty for a new release.
        unreturned: (step, private) of a step that was taken, and whose observer raised; else None.

    Raises: ArgumentError, PlanError; CheckpointError if the file is of another plan, key or program, or in use.

    Example:
        >>> plan = ao.plan(dataset_size=4, batch_size=2, epochs=1, epsilon=1, delta=1e-6)
        >>> release = ao.Release(plan, 3)
        >>> release.step([0, 1], ao.bounded_sum(np.eye(3)[:2], [0, 1], plan.clip_norm)).shape
        (3,)
    """

    _guest: Guest | None = None

    def __init__(
        self, plan: Plan, size: int, *, key: bytes | None = None, checkpoint: str | Path | None = None,
        ledger_on_disk: bool = False,
    ) -> None:  # fmt: skip
        coordinates = OneProcess(checks.integer("size", size, low=0))
        self._begin(
            plan, coordinates, Fixed(), key=key, checkpoint=checkpoint, place="Release", ledger_on_disk=ledger_on_disk
        )
        try:
            self._coins = Coins.of(plan, self.coins())
            self._go_on(self.resumed)
        except BaseException:
            self._files.close()
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
        if self._coins is not None:
            self._coins.load_state_dict(state["coins"])

    @classmethod
    def of_ranks(cls, plan: Plan, coordinates: Coordinates, schedule: Schedule, **files: Any) -> Self:
        """For front ends in this package: several ranks, a clip norm that may move, totals in pieces (`take`).

        Args:
            coordinates: the vector and this rank's part of it; its group is who carries the plan out together.
            schedule: of clip norms.
            files: key, checkpoint, ledger_on_disk; and place, what the ranks are doing, for messages.
        """
        release = cls.__new__(cls)
        release._begin(plan, coordinates, schedule, **files)
        return release

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
        Cost: the noise of a step, a copy of the total; with a checkpoint a hash of it and a write to the disk.
        """
        with self._one_at_a_time():
            piece = piece_of(total, self.size, self.plan.grid)
            return self._step(units, [piece], lambda made: like(made[0], total), tables)

    def step_rows(self, units: Iterable[Any] | None, rows: ArrayLike, values: Any) -> Any:
        """The next step of a (num_rows, width) table of which only some rows are released, at the cost of these rows.

        `size` is num_rows * width. Rows that are not named are not released in this step; what `step` would have
        returned for the others is what comes back, bit for bit.

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
            asked = Rows.of(rows, values, self.size, self.plan)
            return self._step(units, asked, lambda made: like(made[0], values))

    def sample(self, num_units: int) -> NDArray[np.int64]:
        """The units of the next step under secret sampling, ascending numbers below `num_units`, perhaps none.

        Each unit is drawn by a coin of its own, which comes from the key and the step; asked again, the answer is the
        same. `step` then takes these units and no others. Keep them secret: the claim rests on it.

        Args:
            num_units: size of the population, the same in all steps: one that follows the coins would undo them.
        Raises: PlanError where the plan is not one for secret sampling; ArgumentError for another population.
        """
        self.check(None)
        if self._coins is None:
            raise PlanError(
                f"sample() draws secret coins, and the plan is for {self.plan.participation.describe()}: give step() "
                "the units as they come"
            )
        return self._coins.draw(self.ledger.step, num_units)

    def _step(
        self,
        units: Iterable[Any] | None,
        own: list[Tensor] | Rows,
        give: Callable[[list[Tensor]], Any],
        tables: Sequence[Part] = (),
    ) -> Any:
        unnamed = "record" in self.plan.on_device
        if units is None and not unnamed:
            raise ArgumentError("units must name whose parts are in the total, got None; a step of nobody has []")
        ids = self.check([] if units is None else units)
        pieces = [own.values] if isinstance(own, Rows) else own
        parts = self._tables.in_order(tables)
        somebody = any(bool(piece.any()) for piece in pieces) or not all(part.is_zero for part in parts)
        if not len(ids) and not unnamed and somebody:
            raise ArgumentError("a total of nobody must be zero: name all units whose parts are in it")
        t = self.ledger.step
        private = give(self.take(ids, own, tables=parts))
        self.tell(t, lambda: private)
        return private

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
        self._tables.check(step)
        self.clip.check_step(step)
        if units is None:
            return []
        ids = self._checked(step, units)
        if self._coins is not None:
            self._coins.check(step, ids)
        return ids

    def _checked(self, step: int, units: Iterable[Any]) -> Units:
        ids = self.ledger.check(step, units)
        if len(ids) and "record" in self.plan.on_device:
            raise ArgumentError(
                "units must be None or empty: the plan leaves the record to the users' devices, so that ids are not "
                "learnt here, and got some. Leave them out, or plan without on_device='record' and let the ledger guard"
            )
        return ids

    def take(
        self,
        units: Iterable[Any],
        own: list[Tensor] | Rows,
        place: str = "Release.step",
        tables: Sequence[Part] = (),
    ) -> list[Tensor]:
        """The step itself, after `check`: journal, noise, constant, ledger.

        A ledger on disk has the step written before the journal commits it, where it does not count: so nothing that
        comes after the commit can fail for want of room. See `anyorder.ledger` for what a crash leaves.

        Args:
            units: what `check` returned.
            own: this rank's part of the total in pieces, which are overwritten.
            tables: the parts of the attached tables; see `anyorder.release.tables`.
        Returns: the private pieces: `own` itself, or new ones on a grid. What tables release is in `of_tables`.
        """
        if self.needs_save:
            self.save(self.extra)  # before anything else: from here on a restart finds the key
        step = self.ledger.step
        self._tables.flush_again(step)  # where an interrupt came between the step before and its flush
        population = b"" if self._coins is None else self._coins.population
        ids = self._checked(step, units)
        parts = self._tables.in_order(tables)
        if isinstance(own, Rows) and self._guest is not None:
            raise TrainingError("canaries are added to whole totals: an audited run takes step(), not step_rows()")
        self.ledger.prepare(step, ids)
        self._begun = True
        if isinstance(own, Rows):
            self._files.commit(place, step, ids, own.parts(), population)
            private = [self._noise.add_to_rows(own.rows, own.values, self.clip.divisor)]
        else:
            own, parts = self.clip.planned(own), [part.planned(self.clip) for part in parts]
            if self._guest is not None:
                own, parts = with_guest(self._guest, step, own, parts, self.clip.divisor)
            told = [tensor for part in parts for tensor in part.parts()]
            self._files.commit(place, step, ids, [*own, *told], population)
            private = self._noise.add_to(own, self.clip.divisor)
            settled = [part.settle(step, self.clip) for part in parts]
            self.of_tables = [released for released in settled if released is not None]
        self.ledger.record(step, ids)
        self._tables.flush_again(step + 1)
        return private

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
        return self._tables.attach(table, self.ledger.step, self._begun)

    @property
    def whole_size(self) -> int:
        """Number of coordinates, with those of the tables."""
        return self.size + self._tables.size

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
        check_guest(self.ledger.step, self._guest, self._group.size, self._path is not None)
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
            released = joined([released, *self.of_tables]) if self._guest is not None else (released, *self.of_tables)
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
