"""A step of a strategy as a program: a value that every path runs, with the same roundings.

Operands are tiles (numbers from 0: vectors that live for the step) and arrays (below zero: ~operand is the number of an
array that stays between steps). All are float32; each product, sum and quotient is rounded by itself.

    GAUSS    dst = [a +] Z[row] * c
    LINEAR   dst = [a +] x_0 * c_0 + x_1 * c_1 + ..      from left to right; zeros if there is nothing
    LEAK     dst = a + (b + a * c)
    DIVIDE   dst = a / c
    WORDS    dst = raw words of the row, as bits; of the compiled kernel alone, for rows that are asked for

An operation may write what it reads. `trace` and `compile_step` make a program of `Strategy.step`; `execute` says in
thirty lines what a program does, on NumPy arrays and on torch tensors alike; `compiled` is the path of the C++ kernel,
`torch_path` that of torch. `NoiseState` is what stays between the steps.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from anyorder.errors import ArgumentError, TrainingError
from anyorder.strategy import Independent, Strategy

NONE = 2**31 - 1  # no operand
RAW = 1 << 30  # of raw words, in the high word of the counter

# As in _kernel.h. `count` is the number of terms of a LINEAR, `row` then the place of its first term.
OP = np.dtype([("kind", "i4"), ("dst", "i4"), ("a", "i4"), ("b", "i4"), ("c", "f4"), ("count", "i4"), ("row", "u8")])
TERM = np.dtype([("x", "i4"), ("c", "f4")])


class Operation:
    """Operations of a program."""

    GAUSS, LINEAR, LEAK, DIVIDE, WORDS = range(5)


@dataclass(frozen=True)
class Program:
    """One step as operations on tiles and arrays.

    Args:
        ops: (num_ops,) of OP.
        terms: of TERM, for all LINEARs.
        num_tiles: tiles are 0 .. num_tiles - 1.
        result: operand that holds the noise, before std, when all is done.
    """

    ops: NDArray[Any]
    terms: NDArray[Any]
    num_tiles: int
    result: int

    @classmethod
    def of_row(cls, row: int, *, raw: bool = False) -> "Program":
        """A row of Z, or of raw words."""
        ops = np.array([(Operation.WORDS if raw else Operation.GAUSS, 0, NONE, NONE, 1.0, RAW if raw else 0, row)], OP)
        return cls(ops, np.empty(0, TERM), 1, 0)

    def rows(self) -> list[int]:
        """Rows of Z that it makes."""
        rows: list[int] = self.ops["row"][self.ops["kind"] == Operation.GAUSS].tolist()
        return rows


def execute(
    program: Program,
    row: Callable[[int], Any],
    arrays: Sequence[Any],
    zeros: Callable[[], Any],
    number: Callable[[float], Any],
) -> Any:
    """What a program means: its result over the coordinates in hand; the arrays are written.

    Args:
        program: of any operations but WORDS.
        row: gives Z[r], a fresh vector.
        arrays: of the program, float32 vectors: NumPy's or torch's. In-place writes reach them.
        zeros: makes a vector.
        number: makes a float32 of no dimensions. (Python's, in a quotient, torch makes its reciprocal on CUDA.)
    Returns: a vector, which may be one of the arrays.
    """
    tiles: list[Any] = [None] * program.num_tiles
    terms = program.terms.tolist()

    def read(operand: int) -> Any:
        return tiles[operand] if operand >= 0 else arrays[~operand]

    for kind, dst, a, b, c, count, at in program.ops.tolist():
        if kind == Operation.GAUSS:
            value = row(at) if c == 1 else row(at) * c
            value = value if a == NONE else read(a) + value
        elif kind == Operation.LINEAR:
            value = None if a == NONE else read(a)
            for x, factor in terms[at : at + count]:
                part = read(x) * factor
                value = part if value is None else value + part
            value = zeros() if value is None else value if count else value + number(-0.0)  # x + -0 is x, and fresh
        elif kind == Operation.LEAK:
            value = read(a) + (read(b) + read(a) * c)
        elif kind == Operation.DIVIDE:
            value = read(a) / number(c)
        else:
            raise AssertionError(kind)
        if dst >= 0:
            tiles[dst] = value
        else:
            arrays[~dst][:] = value
    return read(program.result)


# ----------------------------------------------------------------------------------------------------
# A strategy's step, followed once with symbols.
#
# `Strategy.step` stays the only statement of what a step is. Here it runs on `KernelTracer`s, which record the sums,
# differences, products and quotients by numbers instead of doing them; `compile_step` makes a program of the record.


class Entry(NamedTuple):
    """A vector of a step: how it comes from those before it, by their places in the record.

    The kinds: "row" (`number` of those asked for), "array" (`number` of the state), "zeros", "sum" (left + right),
    "difference" (left - right), "product" (left * number), "quotient" (left / number). Factors are the bytes of a
    float32, which tell -0 from 0.
    """

    kind: str
    number: Any = None
    left: int | None = None
    right: int | None = None


Fields = tuple[str, Any, int | None, int | None]


class Trace(NamedTuple):
    """One step. Steps that are equal but for `rows` have equal programs but for the rows.

    Args:
        tape: what was done, in that order: fields of `Entry`.
        noise: place of the noise.
        state: places of the state after the step.
        rows: rows of Z that the step asks for.
    """

    tape: tuple[Fields, ...]
    noise: int
    state: tuple[int, ...]
    rows: tuple[int, ...]


class KernelTracer:
    """What stands for a float32 vector while a step is followed."""

    __slots__ = ("at", "tape")
    __array_ufunc__ = None  # NumPy's numbers and arrays leave the operation to us
    size = 1  # for a strategy that makes a fresh state; its zeros come back to us as an array of one

    def __init__(
        self, tape: list[Fields], kind: str, number: Any = None, left: int | None = None, right: int | None = None
    ) -> None:
        self.tape, self.at = tape, len(tape)
        tape.append((kind, number, left, right))

    def copy(self) -> "KernelTracer":
        """Nothing is ever written, so the vector itself."""
        return self

    def __add__(self, other: Any) -> Any:
        other = _vector(self.tape, other)
        return NotImplemented if other is None else KernelTracer(self.tape, "sum", None, self.at, other.at)

    __radd__ = __add__

    def __sub__(self, other: Any) -> Any:
        other = _vector(self.tape, other)
        return NotImplemented if other is None else KernelTracer(self.tape, "difference", None, self.at, other.at)

    def __rsub__(self, other: Any) -> Any:
        other = _vector(self.tape, other)
        return NotImplemented if other is None else KernelTracer(self.tape, "difference", None, other.at, self.at)

    def __neg__(self) -> "KernelTracer":
        return KernelTracer(self.tape, "product", _MINUS_ONE, self.at)

    def __mul__(self, other: Any) -> Any:
        return self._times("product", other)

    __rmul__ = __mul__

    def __truediv__(self, other: Any) -> Any:
        return self._times("quotient", other)

    def _times(self, kind: str, other: Any) -> Any:
        if type(other) not in _NUMBERS:
            return NotImplemented
        number = np.float32(other).tobytes()
        return self if number == _ONE else KernelTracer(self.tape, kind, number, self.at)

    def __array_function__(self, function: Any, types: Any, args: Any, kwargs: Any) -> Any:
        return KernelTracer(self.tape, "zeros") if function is np.zeros_like else NotImplemented


_NUMBERS = {np.float32, float, int, bool, np.bool_}  # with another factor NumPy would go on in float64
_ONE, _MINUS_ONE = np.float32(1).tobytes(), np.float32(-1).tobytes()


def _vector(tape: list[Fields], value: Any) -> KernelTracer | None:
    if type(value) is KernelTracer:
        return value
    fresh = isinstance(value, np.ndarray) and value.dtype == np.float32 and value.shape == (1,) and not value.any()
    return KernelTracer(tape, "zeros") if fresh else None


def trace(strategy: Strategy, t: int, num_arrays: int, steps: int = 1) -> Trace:
    """Step t from a state of so many arrays, and perhaps the next ones with it.

    The outputs of those next ones, the last one first, then stand before the state after step t.

    Raises: ArgumentError for a step that does what `KernelTracer` cannot follow: no path could make its noise.
    """
    tape: list[Fields] = []
    rows: dict[int, KernelTracer] = {}

    def row(r: int) -> Any:
        if r not in rows:
            rows[r] = KernelTracer(tape, "row", len(rows))
        return rows[r]

    state: Any = tuple(KernelTracer(tape, "array", i) for i in range(num_arrays))
    try:
        noise, after = strategy.step(t, state, row)
        outputs: list[Any] = []
        later = after
        for u in range(t + 1, t + steps):
            output, later = strategy.step(u, later, row)
            outputs.insert(0, output)
        made = [_vector(tape, vector) for vector in (noise, *outputs, *after)]
    except (TypeError, AttributeError) as error:
        raise _refusal(strategy, t, str(error)) from error
    places = [vector.at for vector in made if vector is not None]
    if len(places) < len(made):
        raise _refusal(strategy, t, "it returns what is no vector")
    state = []
    for at in places[1:]:  # each in an array of its own
        state.append(at if at not in state else KernelTracer(tape, "product", _ONE, at).at)
    return Trace(tuple(tape), places[0], tuple(state), tuple(rows))


def _refusal(strategy: Strategy, t: int, reason: str) -> ArgumentError:
    return ArgumentError(
        f"step {t} of {type(strategy).__name__} cannot be made a program ({reason}): a step may use, on rows and "
        "state, copy, sums, differences, products and quotients by float32 or Python numbers, and numpy.zeros_like"
    )


# ----------------------------------------------------------------------------------------------------
# The program of a step that was followed: operations are joined, and memory is used again, where nothing is lost.


_MAX_TERMS = 16  # of one operation, as in the compiled kernel
_MOST_COMPILED = 64
_LONGEST_KEPT = 1024  # vectors; the steps of a dense strategy are longer, and each has another shape


class Compiled(NamedTuple):
    """A program, and where the arrays are after it. Arrays are numbered: those given, then new ones."""

    program: Program
    state: list[int]
    rows: dict[int, int]
    num_arrays: int


def compile_step(
    traced: Trace, num_state: int, stored: dict[int, int], free: Iterable[int], keep: Collection[int], allowance: int
) -> Compiled:
    """The program of a step, which writes the new state over the old one where nothing reads it any more.

    Args:
        traced: the step.
        num_state: number of arrays of the state, which are arrays 0, 1, ...
        stored: rows of Z that are in arrays, and in which.
        free: arrays that may be written.
        keep: rows of Z to have in arrays afterwards, as far as arrays are there for them.
        allowance: number of new arrays that rows may take. The state takes what it needs.
    """
    free = tuple(free)
    if stored or keep or len(traced.tape) > _LONGEST_KEPT:
        return _Compiler(traced, num_state, stored, free, keep, allowance).run()
    # Most steps differ from the one before in the numbers of their rows alone.
    shape = (traced.tape, traced.noise, traced.state, num_state, free, allowance)
    kept = _COMPILED.get(shape)
    if kept is None:
        made = _Compiler(traced, num_state, {}, free, (), allowance).run()
        normal = np.flatnonzero(made.program.ops["kind"] == Operation.GAUSS)
        kept = made, normal, [traced.rows.index(row) for row in made.program.rows()]
        if len(_COMPILED) >= _MOST_COMPILED:
            _COMPILED.clear()
        _COMPILED[shape] = kept
    made, normal, order = kept
    ops = made.program.ops.copy()
    ops["row"][normal] = [traced.rows[i] for i in order]
    return made._replace(program=Program(ops, made.program.terms, made.program.num_tiles, made.program.result))


_COMPILED: dict[Any, tuple[Compiled, Any, list[int]]] = {}


class _Compiler:
    """Puts operations out in the order of the tape; a product, or a row used once, goes into the sum that uses it.

    Vectors are named by their places in the tape.
    """

    def __init__(
        self, traced: Trace, num_state: int, stored: dict[int, int], free: Iterable[int], keep: Collection[int],
        allowance: int,
    ) -> None:  # fmt: skip
        self._traced, self._stored, self._allowance = traced, stored, allowance
        self._tape = [Entry(*fields) for fields in traced.tape]
        self._free = list(free)
        self._num_arrays = num_state + len(stored) + len(self._free)
        self._uses = _count_uses(traced)
        self._place: dict[int, int] = {}  # vector -> operand that holds it
        self._ops: list[list[Any]] = []
        self._terms: list[list[tuple[int, Any]]] = []
        self._tiles = 0
        self._free_tiles: list[int] = []
        self._state = set(traced.state)
        rows = {i: traced.rows[entry.number] for i, entry in enumerate(self._tape) if entry.kind == "row"}
        self._row = rows
        self._wanted = {i for i, row in rows.items() if row in keep and i not in self._state}
        taken = {rows[i] for i in traced.state if i in rows}  # an array of the state may be written later
        self._rows = {r: array for r, array in stored.items() if r in keep and r not in taken}
        self._reads: dict[int, int] = {}  # array that the step gives up -> times it is still to be read
        for i, entry in enumerate(self._tape):
            array = entry.number if entry.kind == "array" else stored.get(rows.get(i, -1))
            if array is not None:
                self._place[i] = ~array
                if i not in self._state and (entry.kind == "array" or rows[i] not in self._rows):
                    self._reads[array] = self._uses.get(i, 0)
        asked = set(traced.rows)
        self._free += [array for r, array in stored.items() if r not in self._rows and r not in asked]

    def run(self) -> Compiled:
        for vector in range(len(self._tape)):
            if self._uses.get(vector) and vector not in self._place and not self._is_part(vector):
                self._put(vector)
        state = [~self._place[vector] for vector in self._traced.state]
        ops = np.zeros(len(self._ops), OP)
        terms: list[tuple[int, Any]] = []
        for i, (kind, dst, a, b, c, row) in enumerate(self._ops):
            count = len(self._terms[i])
            ops[i] = (kind, dst, a, b, c, count, len(terms) if kind == Operation.LINEAR else row)
            terms += self._terms[i]
        result = self._place[self._traced.noise]
        return Compiled(
            Program(ops, np.array(terms, TERM), max(self._tiles, 1), result), state, self._rows, self._num_arrays
        )

    # -- vectors into operands ---------------------------------------------------------------------------------------

    def _is_part(self, vector: int) -> bool:
        """Whether it goes into the one operation that uses it, and needs no place of its own."""
        if self._uses[vector] > 1 or self._is_kept(vector) or vector == self._traced.noise:
            return False
        return self._tape[vector].kind in ("product", "row")

    def _is_kept(self, vector: int) -> bool:
        return vector in self._state or vector in self._wanted

    def _put(self, vector: int) -> int:
        """Emit what makes the vector; returns where it is."""
        if vector in self._place:
            return self._place[vector]
        entry = self._tape[vector]
        if entry.kind in ("sum", "difference"):
            self._put_sum(vector, entry)
        elif entry.kind == "row":
            self._emit(Operation.GAUSS, vector, row=self._row[vector])
        elif entry.kind == "product" and self._is_bare_row(_known(entry.left)):
            self._emit(Operation.GAUSS, vector, c=_factor(entry), row=self._row[_known(entry.left)])
        elif entry.kind == "product":
            self._emit(Operation.LINEAR, vector, terms=[(_known(entry.left), _factor(entry))])
        elif entry.kind == "quotient":
            self._emit(Operation.DIVIDE, vector, a=entry.left, c=_factor(entry))
        else:
            self._emit(Operation.LINEAR, vector)
        return self._place[vector]

    def _is_bare_row(self, vector: int) -> bool:
        return self._tape[vector].kind == "row" and self._is_open(vector)

    def _put_sum(self, vector: int, entry: Entry) -> None:
        base, part = _known(entry.left), _known(entry.right)
        c = np.float32(1 if entry.kind == "sum" else -1)  # x - c y and x + (-c) y round alike
        if entry.kind == "sum" and self._is_open(base) and not self._is_open(part):
            base, part = part, base
        if self._tape[part].kind == "product" and self._is_open(part):
            part, c = _known(self._tape[part].left), c * _factor(self._tape[part])
        if self._is_bare_row(part):
            self._emit(Operation.GAUSS, vector, a=base, c=c, row=self._row[part])
        else:
            self._emit(Operation.LINEAR, vector, a=base, terms=[(part, c)])

    def _is_open(self, vector: int) -> bool:
        return vector not in self._place and self._is_part(vector)

    def _emit(
        self, kind: int, vector: int, *, a: int | None = None, c: Any = 1.0, row: int = 0,
        terms: Sequence[tuple[int, Any]] = (),
    ) -> None:  # fmt: skip
        base = NONE if a is None else self._put(a)
        places = [(self._put(x), number) for x, number in terms]
        for operand in ([] if a is None else [a]) + [x for x, _ in terms]:
            self._release(operand)
        joined = self._join(kind, base, a, places, terms)
        dst = self._destination(vector)
        if joined:
            self._ops[-1][1] = dst
        else:
            self._ops.append([kind, dst, base, NONE, c, row])
            self._terms.append(places)
        self._place[vector] = dst

    def _join(self, kind: int, base: int, a: int | None, places: list[Any], terms: Any) -> bool:
        """Let the last operation do this one too, if its result goes nowhere else: it stays in a register."""
        if kind != Operation.LINEAR or not self._ops or self._ops[-1][0] != Operation.LINEAR:
            return False
        last, done = self._ops[-1], self._terms[-1]
        dst = last[1]
        room = 0 < len(done) <= _MAX_TERMS - len(places)  # zeros are not joined: 0 + x is not x where x is -0
        room = room and all(place != dst for place, _ in places)
        if a is not None and base == dst >= 0 and self._uses[a] == 0 and room:
            done += places
            return True
        if a is None or not places or places[0][1] != 1:
            return False
        # a + (b + a c), in either order of the outer sum
        other, inner = (base, places[0][0]) if places[0][0] == dst else (places[0][0], base)
        vector = terms[0][0] if places[0][0] == dst else a
        fits = len(done) == 1 and last[2] != NONE and inner == dst >= 0 and done[0][0] == other != dst
        if fits and self._uses[vector] == 0:
            last[0], last[2], last[3], last[4] = Operation.LEAK, other, last[2], done[0][1]
            self._terms[-1] = []
            return True
        return False

    # -- memory ------------------------------------------------------------------------------------------------------

    def _release(self, vector: int) -> None:
        """One use less; a tile or an array that nobody will read again may be written."""
        self._uses[vector] -= 1
        place = self._place[vector]
        if place >= 0:
            if self._uses[vector] == 0:
                self._free_tiles.append(place)
        elif ~place in self._reads:
            self._reads[~place] -= 1

    def _destination(self, vector: int) -> int:
        if self._is_kept(vector):
            array = self._take_array(new=vector in self._state)
            if array is not None:
                if vector in self._wanted:
                    self._rows[self._row[vector]] = array
                return ~array
        if self._free_tiles:
            return self._free_tiles.pop()
        self._tiles += 1
        return self._tiles - 1

    def _take_array(self, *, new: bool) -> int | None:
        done = [array for array, reads in self._reads.items() if reads == 0]
        if done:
            del self._reads[done[-1]]
            return done[-1]
        if self._free:
            return self._free.pop()
        if not new and self._allowance == 0:
            return None
        self._allowance -= not new
        self._num_arrays += 1
        return self._num_arrays - 1


def _factor(entry: Entry) -> np.float32:
    found: np.float32 = np.frombuffer(entry.number, np.float32)[0]
    return found


def _known(vector: int | None) -> int:
    assert vector is not None
    return vector


def _count_uses(traced: Trace) -> dict[int, int]:
    """How often each vector is read on the way to the results; results count once more."""
    uses: dict[int, int] = {}
    for vector in (traced.noise, *traced.state):
        uses[vector] = uses.get(vector, 0) + 1
    for vector in reversed(range(len(traced.tape))):
        if vector in uses:
            for operand in traced.tape[vector][2:]:
                if operand is not None:
                    uses[operand] = uses.get(operand, 0) + 1
    return uses


# ----------------------------------------------------------------------------------------------------
# The steps of a strategy, one after the other: the arrays between them, wherever they are.


A = TypeVar("A")


class NoiseState(Generic[A]):
    """The step that comes next, the arrays before it in one place, and the program of the step on them.

    Args:
        strategy: whose steps they are.
        t: step that comes next.
        arrays: the strategy's state before it.
        most: number of arrays to hold at most; what the state leaves of it holds rows of Z that the next step uses too.
        new: makes an array.
        together: steps that are made at once, of a strategy whose state is its last outputs. Those that are not due yet
            are kept beside the state, which is then read once for all of them; the state between two steps is the same.

    Attributes:
        is_rows: whether noise is independent: step t adds row t of Z and keeps nothing; there is nothing to trace.
        broken: a path sets it before a step writes anything, and clears it when all is done: so whatever ends a step in
            between leaves it set.
    """

    def __init__(
        self, strategy: Strategy, t: int, arrays: list[A], most: int, new: Callable[[], A], together: int = 1
    ) -> None:
        self._strategy, self._most, self._new = strategy, most, new
        self._kept = max(most, strategy.state_rows + together - 1)  # arrays between two steps
        self._together = together
        self._alike = strategy._steps_alike and most <= strategy.state_rows  # their program is made once
        self._like: tuple[tuple[int, int, int], int, Compiled] | None = None
        self._due: list[A] = []  # outputs of the next steps, the last one first
        self.t, self.arrays = t, arrays
        self.rows: dict[int, A] = {}
        self.free: list[A] = []
        self._row = Program.of_row(t)
        self.is_rows = type(strategy) is Independent and not most
        self.broken = False

    def check_whole(self) -> None:
        """Raise TrainingError where the arrays are of no one step."""
        if self.broken:
            raise TrainingError(
                f"step {self.t} of this noise stream was broken off half way: its state is of two steps at once; "
                "load a saved state and go on from there"
            )

    def prepare(self) -> tuple[Compiled, list[A]]:
        """The program of the next step and the arrays that it runs on, new ones among them; nothing changes.

        Raises: ArgumentError for a step that cannot be made a program.
        """
        count = len(self.arrays)
        if self.is_rows:
            self._row.ops["row"] = self.t
            return Compiled(self._row, [], {}, 0), []
        if self._due:
            shown = Program(np.empty(0, OP), np.empty(0, TERM), 1, ~count)
            return Compiled(shown, [count, *range(count - 1)], {}, 0), [*self.arrays, self._due[-1], *self.free]
        steps = min(self._together, self._strategy.n - self.t) if count == self._strategy.state_rows else 1
        given = [*self.arrays, *self.rows.values(), *self.free]
        shape = count, len(given), steps
        if self._like is not None and self._like[0] == shape:
            _, before, made = self._like
            ops = made.program.ops.copy()
            ops["row"][ops["kind"] == Operation.GAUSS] += self.t - before
            return made._replace(program=replace(made.program, ops=ops)), given
        traced = trace(self._strategy, self.t, count, steps)
        stored = dict(zip(self.rows, range(count, len(given)), strict=False))
        keep = self._rows_to_keep(traced) if steps == 1 and self._most > len(traced.state) else ()
        free = range(count + len(stored), len(given))
        made = compile_step(traced, count, stored, free, keep, max(self._most - len(given), 0))
        self._like = (shape, self.t, made) if self._alike and made.num_arrays == len(given) else None
        while len(given) < made.num_arrays:
            given.append(self._new())
        return made, given

    def advance(self, made: Compiled, arrays: list[A]) -> None:
        """Take over the arrays after the step. Those that hold nothing any more are kept, as many as memory allows."""
        after = [arrays[i] for i in made.state]
        early = len(after) - self._strategy.state_rows if self._together > 1 else 0
        self._due, self.arrays = (after[:early], after[early:]) if early > 0 else (self._due[:-1], after)
        self.rows = {row: arrays[i] for row, i in made.rows.items()}
        used = {*made.state, *made.rows.values()}
        unused = [array for i, array in enumerate(arrays) if i not in used]
        self.free = unused[: max(self._kept - len(used), 0)]
        self.t += 1

    def _rows_to_keep(self, traced: Trace) -> set[int]:
        """Rows of Z at hand in this step that the next one uses too, as many as there is memory for."""
        if self.t + 1 >= self._strategy.n:
            return set()
        following = trace(self._strategy, self.t + 1, len(traced.state)).rows
        shared = [row for row in following if row in traced.rows or row in self.rows]
        return set(sorted(shared, key=lambda row: row not in self.rows)[: self._most - len(traced.state)])
