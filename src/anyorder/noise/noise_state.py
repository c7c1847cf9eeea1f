"""What a stream holds between steps, wherever that is: its step, the state, rows of Z, arrays that are free."""

from collections.abc import Callable
from typing import Any, Generic, TypeVar

from anyorder.errors import StepsExhaustedError, TrainingError
from anyorder.noise.program import Compiled, compile_step, trace
from anyorder.strategy import Strategy

A = TypeVar("A")


class NoiseState(Generic[A]):
    """The step that comes next, the arrays before it in one place, and the program of the step on them.

    Args:
        strategy: whose steps they are.
        t: step that comes next.
        state: before it.
        most: number of arrays to hold at most; what the state leaves of it holds rows of Z that the next step uses too.
        new: makes an array.
    """

    def __init__(self, strategy: Strategy, t: int, state: list[A], most: int, new: Callable[[], A]) -> None:
        self._strategy, self._most, self._new = strategy, most, new
        self.t, self.state = t, state
        self.rows: dict[int, A] = {}
        self.free: list[A] = []
        self.broken = False

    def check_next(self) -> None:
        """Raise StepsExhaustedError where no step is left, TrainingError where one was broken off."""
        n = self._strategy.n
        if self.t >= n:
            raise StepsExhaustedError(
                f"the plan has noise for {n} steps and all are made; a further step would have no guarantee: "
                f"plan more steps before training starts"
            )
        self.check_whole()

    def check_whole(self) -> None:
        """Raise TrainingError where the arrays are of no one step."""
        if self.broken:
            raise TrainingError(
                f"step {self.t} of this noise stream was broken off half way: its state is of two steps at once; "
                "load a saved state and go on from there"
            )

    def unsafe(self, harmless: tuple[type[Exception], ...] = ()) -> "_Unsafe":
        """Around what must not be left half done. The harmless errors come before anything is done."""
        return _Unsafe(self, harmless)

    def prepare(self) -> tuple[Compiled, list[A]]:
        """The program of the next step and the arrays that it runs on, new ones among them; nothing changes.

        Raises: ArgumentError for a step that cannot be made a program.
        """
        traced = trace(self._strategy, self.t, len(self.state))
        given = [*self.state, *self.rows.values(), *self.free]
        stored = {row: len(self.state) + i for i, row in enumerate(self.rows)}
        keep = self._rows_to_keep(traced.rows, len(traced.state))
        free = range(len(self.state) + len(stored), len(given))
        made = compile_step(traced, len(self.state), stored, free, keep, max(self._most - len(given), 0))
        return made, given + [self._new() for _ in range(made.num_arrays - len(given))]

    def settle(self, made: Compiled, arrays: list[A]) -> None:
        """Take over the arrays after the step. Those that hold nothing any more are kept, as many as memory allows."""
        self.state = [arrays[i] for i in made.state]
        self.rows = {row: arrays[i] for row, i in made.rows.items()}
        used = {*made.state, *made.rows.values()}
        most = max(self._most, self._strategy.state_rows) - len(used)
        self.free = [array for i, array in enumerate(arrays) if i not in used][: max(most, 0)]
        self.t += 1

    def _rows_to_keep(self, rows: tuple[int, ...], num_state: int) -> set[int]:
        """Rows of Z at hand in this step that the next one uses too, as many as there is memory for."""
        room = self._most - num_state
        if room <= 0 or self.t + 1 >= self._strategy.n:
            return set()
        following = trace(self._strategy, self.t + 1, num_state).rows
        shared = [row for row in following if row in rows or row in self.rows]
        return set(sorted(shared, key=lambda row: row not in self.rows)[:room])


class _Unsafe:
    """Leaves what is held broken, if it is left by an error that is not harmless."""

    __slots__ = ("harmless", "held")

    def __init__(self, held: NoiseState[Any], harmless: tuple[type[Exception], ...]) -> None:
        self.held, self.harmless = held, harmless

    def __enter__(self) -> None:
        self.held.broken = True

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.held.broken = kind is not None and not issubclass(kind, self.harmless)
