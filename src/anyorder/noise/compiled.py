"""The program of a step that was followed: operations are joined, and memory is used again, where nothing is lost."""

from collections.abc import Collection, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from anyorder.noise.program import NONE, OP, TERM, Kind, Program
from anyorder.noise.traced import Entry, Trace

__all__ = ["Compiled", "compile_step"]

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
        normal = np.flatnonzero(made.program.ops["kind"] == Kind.GAUSS)
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
            ops[i] = (kind, dst, a, b, c, count, len(terms) if kind == Kind.LINEAR else row)
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
            self._emit(Kind.GAUSS, vector, row=self._row[vector])
        elif entry.kind == "product" and self._is_bare_row(_known(entry.left)):
            self._emit(Kind.GAUSS, vector, c=_factor(entry), row=self._row[_known(entry.left)])
        elif entry.kind == "product":
            self._emit(Kind.LINEAR, vector, terms=[(_known(entry.left), _factor(entry))])
        elif entry.kind == "quotient":
            self._emit(Kind.DIVIDE, vector, a=entry.left, c=_factor(entry))
        else:
            self._emit(Kind.LINEAR, vector)
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
            self._emit(Kind.GAUSS, vector, a=base, c=c, row=self._row[part])
        else:
            self._emit(Kind.LINEAR, vector, a=base, terms=[(part, c)])

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
        if kind != Kind.LINEAR or not self._ops or self._ops[-1][0] != Kind.LINEAR:
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
            last[0], last[2], last[3], last[4] = Kind.LEAK, other, last[2], done[0][1]
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
