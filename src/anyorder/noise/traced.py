"""A strategy's step, followed once with symbols and made into a program for the kernel.

`Strategy.step` stays the only statement of what a step is. Here it runs on `Vector`s, which record the sums,
differences, products and quotients by numbers instead of doing them; the kernel then does the same operations, with the
same roundings, for a tile of coordinates at a time.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from anyorder.noise.native import NONE, OP, TERM, Kind, Program
from anyorder.strategy import Strategy

__all__ = ["Compiled", "Trace", "compile_step", "trace"]

_MAX_TERMS = 16  # of one operation, as in the kernel


class Vector:
    """What stands for a float32 vector: a row of Z, an array of the state, zeros, or an operation on such."""

    __slots__ = ("kind", "left", "number", "right", "tape")
    __array_ufunc__ = None  # NumPy's numbers and arrays leave the operation to us
    size = 1  # for a strategy that makes a fresh state; its zeros come back to us as an array of one

    def __init__(
        self, tape: list["Vector"], kind: str, number: Any = None, left: Any = None, right: Any = None
    ) -> None:
        self.tape, self.kind, self.number, self.left, self.right = tape, kind, number, left, right
        tape.append(self)

    def copy(self) -> "Vector":
        """Nothing is ever written, so the vector itself."""
        return self

    def __add__(self, other: Any) -> Any:
        other = _vector(self.tape, other)
        return NotImplemented if other is None else Vector(self.tape, "sum", None, self, other)

    __radd__ = __add__

    def __sub__(self, other: Any) -> Any:
        other = _vector(self.tape, other)
        return NotImplemented if other is None else Vector(self.tape, "sum", None, self, _negated(other))

    def __rsub__(self, other: Any) -> Any:
        other = _vector(self.tape, other)
        return NotImplemented if other is None else Vector(self.tape, "sum", None, other, _negated(self))

    def __neg__(self) -> "Vector":
        return _negated(self)

    def __mul__(self, other: Any) -> Any:
        number = _number(other)
        if number is None:
            return NotImplemented
        return self if number == 1 else Vector(self.tape, "product", number, self)

    __rmul__ = __mul__

    def __truediv__(self, other: Any) -> Any:
        number = _number(other)
        if number is None:
            return NotImplemented
        return self if number == 1 else Vector(self.tape, "quotient", number, self)

    def __array_function__(self, function: Any, types: Any, args: Any, kwargs: Any) -> Any:
        return Vector(self.tape, "zeros") if function is np.zeros_like else NotImplemented


def _vector(tape: list[Vector], value: Any) -> Vector | None:
    if isinstance(value, Vector):
        return value
    fresh = isinstance(value, np.ndarray) and value.dtype == np.float32 and value.shape == (1,) and not value.any()
    return Vector(tape, "zeros") if fresh else None


def _number(value: Any) -> np.float32 | None:
    """A factor as float32; None for one with which NumPy would go on in float64."""
    return np.float32(value) if type(value) in (np.float32, float, int, bool, np.bool_) else None


def _negated(vector: Vector) -> Vector:
    """-vector. x - c y and x + (-c) y round alike."""
    if vector.kind == "product":
        return Vector(vector.tape, "product", -vector.number, vector.left)
    return Vector(vector.tape, "product", np.float32(-1), vector)


@dataclass(frozen=True)
class Trace:
    """One step: the operations in the order they were done, the noise, and the state after it."""

    tape: list[Vector]
    noise: Vector
    state: list[Vector]

    def rows(self) -> list[int]:
        """Rows of Z that the step asks for."""
        return [vector.number for vector in self.tape if vector.kind == "row"]


def trace(strategy: Strategy, t: int, num_arrays: int) -> Trace | None:
    """Step t from a state of so many arrays; None for a strategy that does what `Vector` cannot follow."""
    tape: list[Vector] = []
    rows: dict[int, Vector] = {}

    def row(r: int) -> Any:
        if r not in rows:
            rows[r] = Vector(tape, "row", r)
        return rows[r]

    state: Any = tuple(Vector(tape, "array", i) for i in range(num_arrays))
    try:
        noise, after = strategy.step(t, state, row)
    except (TypeError, AttributeError):
        return None
    vectors = [_vector(tape, vector) for vector in (noise, *after)]
    if None in vectors or len({id(vector) for vector in vectors[1:]}) < len(vectors) - 1:
        return None
    return Trace(tape, vectors[0], vectors[1:])  # type: ignore[arg-type]


@dataclass(frozen=True)
class Compiled:
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
    if stored or keep:
        return _Compiler(traced, num_state, stored, free, keep, allowance).run()
    # Most steps differ from the one before in the numbers of their rows alone.
    shape, rows = (_shape(traced), num_state, free, allowance), traced.rows()
    kept = _COMPILED.get(shape)
    if kept is None:
        made = _Compiler(traced, num_state, {}, free, (), allowance).run()
        normal = np.flatnonzero(made.program.ops["kind"] == Kind.GAUSS)
        kept = made, normal, [rows.index(int(row)) for row in made.program.ops["row"][normal]]
        if len(_COMPILED) >= _MOST_COMPILED:
            _COMPILED.clear()
        _COMPILED[shape] = kept
    made, normal, order = kept
    ops = made.program.ops.copy()
    ops["row"][normal] = [rows[i] for i in order]
    return replace(made, program=replace(made.program, ops=ops))


_COMPILED: dict[Any, tuple[Compiled, NDArray[np.intp], list[int]]] = {}
_MOST_COMPILED = 64


def _shape(traced: Trace) -> tuple[Any, ...]:
    """What the program depends on, but for the numbers of rows."""
    at = {id(vector): i for i, vector in enumerate(traced.tape)}
    results = [at[id(vector)] for vector in (traced.noise, *traced.state)]
    return (*results, *(
        (x.kind, x.number if x.kind == "array" else None if x.kind == "row" or x.number is None else x.number.tobytes(),
         at.get(id(x.left)), at.get(id(x.right)))
        for x in traced.tape
    ))  # fmt: skip


class _Compiler:
    """Puts operations out in the order of the tape; a product, or a row used once, goes into the sum that uses it."""

    def __init__(
        self, traced: Trace, num_state: int, stored: dict[int, int], free: Iterable[int], keep: Collection[int],
        allowance: int,
    ) -> None:  # fmt: skip
        self._traced, self._stored, self._allowance = traced, stored, allowance
        self._free = list(free)
        self._num_arrays = num_state + len(stored) + len(self._free)
        self._uses = _count_uses(traced)
        self._place: dict[int, int] = {}  # id of a vector -> operand that holds it
        self._ops: list[list[Any]] = []
        self._terms: list[list[tuple[int, np.float32]]] = []
        self._tiles = 0
        self._free_tiles: list[int] = []
        in_state = {id(vector) for vector in traced.state}
        self._wanted = {id(v) for v in traced.tape if v.kind == "row" and v.number in keep and id(v) not in in_state}
        self._state = in_state
        taken = {v.number for v in traced.state if v.kind == "row"}  # an array of the state may be written later
        self._rows = {r: array for r, array in stored.items() if r in keep and r not in taken}
        self._reads: dict[int, int] = {}  # array that the step gives up -> times it is still to be read
        for vector in traced.tape:
            array = self._array_of(vector)
            if array is not None:
                self._place[id(vector)] = ~array
                if id(vector) not in in_state and (vector.kind == "array" or vector.number not in self._rows):
                    self._reads[array] = self._uses.get(id(vector), 0)
        asked = set(traced.rows())
        self._free += [array for r, array in stored.items() if r not in self._rows and r not in asked]

    def _array_of(self, vector: Vector) -> int | None:
        if vector.kind == "array":
            return int(vector.number)
        return self._stored.get(vector.number) if vector.kind == "row" else None

    def run(self) -> Compiled:
        for vector in self._traced.tape:
            if self._uses.get(id(vector)) and id(vector) not in self._place and not self._is_part(vector):
                self._put(vector)
        state = [~self._place[id(vector)] for vector in self._traced.state]
        ops = np.zeros(len(self._ops), OP)
        terms: list[tuple[int, np.float32]] = []
        for i, (kind, dst, a, b, c, row) in enumerate(self._ops):
            count = len(self._terms[i])
            ops[i] = (kind, dst, a, b, c, count, len(terms) if kind == Kind.LINEAR else row)
            terms += self._terms[i]
        result = self._place[id(self._traced.noise)]
        return Compiled(
            Program(ops, np.array(terms, TERM), max(self._tiles, 1), result), state, self._rows, self._num_arrays
        )

    # -- vectors into operands ---------------------------------------------------------------------------------------

    def _is_part(self, vector: Vector) -> bool:
        """Whether it goes into the one operation that uses it, and needs no place of its own."""
        if self._uses[id(vector)] > 1 or self._is_kept(vector) or vector is self._traced.noise:
            return False
        return vector.kind in ("product", "row")

    def _is_kept(self, vector: Vector) -> bool:
        return id(vector) in self._state or id(vector) in self._wanted

    def _put(self, vector: Vector) -> int:
        """Emit what makes the vector; returns where it is."""
        if id(vector) in self._place:
            return self._place[id(vector)]
        if vector.kind == "sum":
            self._put_sum(vector)
        elif vector.kind == "row":
            self._emit(Kind.GAUSS, vector, row=vector.number)
        elif vector.kind == "product" and self._is_bare_row(vector.left):
            self._emit(Kind.GAUSS, vector, c=vector.number, row=vector.left.number)
        elif vector.kind == "product":
            self._emit(Kind.LINEAR, vector, terms=[(vector.left, vector.number)])
        elif vector.kind == "quotient":
            self._emit(Kind.DIVIDE, vector, a=vector.left, c=vector.number)
        else:
            self._emit(Kind.LINEAR, vector)
        return self._place[id(vector)]

    def _is_bare_row(self, vector: Vector) -> bool:
        return vector.kind == "row" and id(vector) not in self._place and self._is_part(vector)

    def _put_sum(self, vector: Vector) -> None:
        base, part = vector.left, vector.right
        if self._is_open(base) and not self._is_open(part):
            base, part = part, base
        c = np.float32(1)
        if part.kind == "product" and self._is_open(part):
            part, c = part.left, part.number
        if self._is_bare_row(part):
            self._emit(Kind.GAUSS, vector, a=base, c=c, row=part.number)
        else:
            self._emit(Kind.LINEAR, vector, a=base, terms=[(part, c)])

    def _is_open(self, vector: Vector) -> bool:
        return id(vector) not in self._place and self._is_part(vector)

    def _emit(
        self, kind: int, vector: Vector, *, a: Vector | None = None, c: Any = 1.0, row: int = 0,
        terms: Sequence[tuple[Vector, Any]] = (),
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
        self._place[id(vector)] = dst

    def _join(self, kind: int, base: int, a: Vector | None, places: list[Any], terms: Any) -> bool:
        """Let the last operation do this one too, if its result goes nowhere else: it stays in a register."""
        if kind != Kind.LINEAR or not self._ops or self._ops[-1][0] != Kind.LINEAR:
            return False
        last, done = self._ops[-1], self._terms[-1]
        dst = last[1]
        room = 0 < len(done) <= _MAX_TERMS - len(places)  # zeros are not joined: 0 + x is not x where x is -0
        room = room and all(place != dst for place, _ in places)
        if a is not None and base == dst >= 0 and self._uses[id(a)] == 0 and room:
            done += places
            return True
        if a is None or not places or places[0][1] != 1:
            return False
        # a + (b + a c), in either order of the outer sum
        other, inner = (base, places[0][0]) if places[0][0] == dst else (places[0][0], base)
        vector = terms[0][0] if places[0][0] == dst else a
        fits = len(done) == 1 and last[2] != NONE and inner == dst >= 0 and done[0][0] == other != dst
        if fits and self._uses[id(vector)] == 0:
            last[0], last[2], last[3], last[4] = Kind.LEAK, other, last[2], done[0][1]
            self._terms[-1] = []
            return True
        return False

    # -- memory ------------------------------------------------------------------------------------------------------

    def _release(self, vector: Vector) -> None:
        """One use less; a tile or an array that nobody will read again may be written."""
        self._uses[id(vector)] -= 1
        place = self._place[id(vector)]
        if place >= 0:
            if self._uses[id(vector)] == 0:
                self._free_tiles.append(place)
        elif ~place in self._reads:
            self._reads[~place] -= 1

    def _destination(self, vector: Vector) -> int:
        if self._is_kept(vector):
            array = self._take_array(new=id(vector) in self._state)
            if array is not None:
                if id(vector) in self._wanted:
                    self._rows[vector.number] = array
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


def _count_uses(traced: Trace) -> dict[int, int]:
    """How often each vector is read on the way to the results; results count once more."""
    uses: dict[int, int] = {}
    for vector in (traced.noise, *traced.state):
        uses[id(vector)] = uses.get(id(vector), 0) + 1
    for vector in reversed(traced.tape):
        if id(vector) in uses:
            for operand in (vector.left, vector.right):
                if operand is not None:
                    uses[id(operand)] = uses.get(id(operand), 0) + 1
    return uses
