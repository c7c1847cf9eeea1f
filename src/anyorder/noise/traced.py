"""A strategy's step, followed once with symbols.

`Strategy.step` stays the only statement of what a step is. Here it runs on `Vector`s, which record the sums,
differences, products and quotients by numbers instead of doing them; `compiled` makes a program of the record.
"""

from typing import Any, NamedTuple

import numpy as np

from anyorder.errors import ArgumentError
from anyorder.strategy import Strategy

__all__ = ["Entry", "Trace", "trace"]


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


class Vector:
    """What stands for a float32 vector while a step is followed."""

    __slots__ = ("at", "tape")
    __array_ufunc__ = None  # NumPy's numbers and arrays leave the operation to us
    size = 1  # for a strategy that makes a fresh state; its zeros come back to us as an array of one

    def __init__(
        self, tape: list[Fields], kind: str, number: Any = None, left: int | None = None, right: int | None = None
    ) -> None:
        self.tape, self.at = tape, len(tape)
        tape.append((kind, number, left, right))

    def copy(self) -> "Vector":
        """Nothing is ever written, so the vector itself."""
        return self

    def __add__(self, other: Any) -> Any:
        other = _vector(self.tape, other)
        return NotImplemented if other is None else Vector(self.tape, "sum", None, self.at, other.at)

    __radd__ = __add__

    def __sub__(self, other: Any) -> Any:
        other = _vector(self.tape, other)
        return NotImplemented if other is None else Vector(self.tape, "difference", None, self.at, other.at)

    def __rsub__(self, other: Any) -> Any:
        other = _vector(self.tape, other)
        return NotImplemented if other is None else Vector(self.tape, "difference", None, other.at, self.at)

    def __neg__(self) -> "Vector":
        return Vector(self.tape, "product", _MINUS_ONE, self.at)

    def __mul__(self, other: Any) -> Any:
        return self._times("product", other)

    __rmul__ = __mul__

    def __truediv__(self, other: Any) -> Any:
        return self._times("quotient", other)

    def _times(self, kind: str, other: Any) -> Any:
        if type(other) not in _NUMBERS:
            return NotImplemented
        number = np.float32(other).tobytes()
        return self if number == _ONE else Vector(self.tape, kind, number, self.at)

    def __array_function__(self, function: Any, types: Any, args: Any, kwargs: Any) -> Any:
        return Vector(self.tape, "zeros") if function is np.zeros_like else NotImplemented


_NUMBERS = {np.float32, float, int, bool, np.bool_}  # with another factor NumPy would go on in float64
_ONE, _MINUS_ONE = np.float32(1).tobytes(), np.float32(-1).tobytes()


def _vector(tape: list[Fields], value: Any) -> Vector | None:
    if type(value) is Vector:
        return value
    fresh = isinstance(value, np.ndarray) and value.dtype == np.float32 and value.shape == (1,) and not value.any()
    return Vector(tape, "zeros") if fresh else None


def trace(strategy: Strategy, t: int, num_arrays: int) -> Trace:
    """Step t from a state of so many arrays.

    Raises: ArgumentError for a step that does what `Vector` cannot follow: no executor could make its noise.
    """
    tape: list[Fields] = []
    rows: dict[int, Vector] = {}

    def row(r: int) -> Any:
        if r not in rows:
            rows[r] = Vector(tape, "row", len(rows))
        return rows[r]

    state: Any = tuple(Vector(tape, "array", i) for i in range(num_arrays))
    try:
        noise, after = strategy.step(t, state, row)
        made = [_vector(tape, vector) for vector in (noise, *after)]
    except (TypeError, AttributeError) as error:
        raise _refusal(strategy, t, str(error)) from error
    places = [vector.at for vector in made if vector is not None]
    if len(places) < len(made):
        raise _refusal(strategy, t, "it returns what is no vector")
    state = []
    for at in places[1:]:  # each in an array of its own
        state.append(at if at not in state else Vector(tape, "product", _ONE, at).at)
    return Trace(tuple(tape), places[0], tuple(state), tuple(rows))


def _refusal(strategy: Strategy, t: int, reason: str) -> ArgumentError:
    return ArgumentError(
        f"step {t} of {type(strategy).__name__} cannot be made a program ({reason}): a step may use, on rows and "
        "state, copy, sums, differences, products and quotients by float32 or Python numbers, and numpy.zeros_like"
    )
