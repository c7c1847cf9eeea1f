"""Convex sets for parameters, and the minimisers of regularised linear functions over them in closed form."""

from dataclasses import dataclass
from typing import Any, assert_never, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray

from anyorder import checks
from anyorder.checks import final, frozen
from anyorder.errors import ArgumentError

__all__ = ["Ball", "Box", "Everything", "Set", "Simplex"]

Floats = NDArray[np.float64]


class _Convex:
    """What all sets share."""

    def argmin(self: Any, linear: ArrayLike, quadratic: float, l1: float = 0.0) -> Floats:
        """The argmin over theta in the set of  <linear, theta> + quadratic/2 ||theta||^2 + l1 ||theta||_1.

        In closed form, with soft(g) = sign(g) max(|g| - l1, 0) coordinate by coordinate:

            Everything   -soft(linear) / quadratic
            Ball         the same, scaled to the radius where it is longer
            Box          the same, each coordinate brought into [low, high]
            Simplex      the projection of -linear / quadratic, by one sort [Duchi et al. 2008]; l1 is a constant there

        Proofs. Everything and Box: a sum of convex functions of one coordinate each, minimised on an interval; the
        minimiser on the interval is that on the line, brought into it. Ball: write theta = rho u, ||u|| = 1. Then
        <g, u> + l1 ||u||_1 >= - sum over i of max(|g_i| - l1, 0) |u_i| >= -||soft(g)|| by Cauchy and Schwarz, with
        equality at u = -soft(g) / ||soft(g)||, for every rho the same u; and rho minimises
        quadratic/2 rho^2 - ||soft(g)|| rho on [0, radius]. Simplex: ||theta||_1 is the radius, and the rest is a square
        completed.

        Where quadratic is 0 and several points are minimal, the one of least norm: the limit for quadratic -> 0.

        Args:
            linear: any shape; finite.
            quadratic: at least 0; above 0 where the set is not bounded.
            l1: at least 0.
        Returns: float64, in the shape of linear.
        Raises: ArgumentError.
        Cost: O(d); Simplex O(d log d).
        """
        g = np.asarray(linear, dtype=np.float64)
        if not np.isfinite(g).all():
            raise ArgumentError("linear must be finite, and some of its entries are not")
        quadratic, l1 = checks.real("quadratic", quadratic, low=0.0), checks.real("l1", l1, low=0.0)
        self.check(g.shape, quadratic)
        return _argmin(self, g, quadratic, l1)

    def check(self: Any, shape: tuple[int, ...], quadratic: float) -> None:
        """Raise ArgumentError where parameters of this shape have no minimiser here, or are none of the set's."""
        _check_set(self, shape, quadratic)

    def words(self: Any) -> str:
        """In words, the same for equal sets."""
        return _words(self)


@final
@dataclass(frozen=True)
class Everything(_Convex):
    """No constraint. `argmin` needs a quadratic part."""


@final
@dataclass(frozen=True)
class Ball(_Convex):
    """||theta||_2 <= radius, over all coordinates together.

    Args:
        radius: above 0.
    """

    radius: float

    def __post_init__(self) -> None:
        object.__setattr__(self, "radius", checks.positive("radius", self.radius))


@final
@dataclass(frozen=True, eq=False)
class Box(_Convex):
    """low <= theta <= high, coordinate by coordinate.

    Args:
        low, high: numbers, or arrays that broadcast to the shape of theta; finite, low <= high.
    """

    low: Any
    high: Any

    def __post_init__(self) -> None:
        low, high = _bound("low", self.low), _bound("high", self.high)
        try:
            ordered = bool((low <= high).all())
        except ValueError as problem:
            raise ArgumentError(f"low and high must broadcast, got shapes {low.shape} and {high.shape}") from problem
        if not ordered:
            raise ArgumentError("low must not be above high, and is in some coordinate")
        object.__setattr__(self, "low", low)
        object.__setattr__(self, "high", high)

    def __eq__(self, other: object) -> bool:
        return type(other) is Box and np.array_equal(self.low, other.low) and np.array_equal(self.high, other.high)

    def __hash__(self) -> int:
        return hash((self.low.tobytes(), self.high.tobytes()))


@final
@dataclass(frozen=True)
class Simplex(_Convex):
    """theta >= 0 with sum radius, over all coordinates together.

    Args:
        radius: above 0.
    """

    radius: float = 1.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "radius", checks.positive("radius", self.radius))


Set = Everything | Ball | Box | Simplex
"""All constraint sets there are; each has `argmin(linear, quadratic, l1)`."""


def constraint_of(given: Set | None) -> Set:
    """The set, Everything() for None. Raises: ArgumentError for what is none of this file."""
    found = Everything() if given is None else given
    if type(found) not in get_args(Set):
        raise ArgumentError(
            f"constraint must be Everything(), Ball(..), Box(..) or Simplex(..), got {type(given).__name__}"
        )
    return found


def _bound(name: str, value: Any) -> Floats:
    given = np.asarray(value)
    if given.dtype.kind not in "iuf" or not np.isfinite(given).all():
        raise ArgumentError(f"{name} must be finite numbers, got {given.dtype} of shape {given.shape}")
    return frozen(given.astype(np.float64))


def _words(kind: Set) -> str:
    match kind:
        case Everything() | Ball() | Simplex():
            return repr(kind)
        case Box():
            return f"Box(low={kind.low.tolist()}, high={kind.high.tolist()})"
        case _:
            assert_never(kind)


def _check_set(kind: Set, shape: tuple[int, ...], quadratic: float) -> None:
    match kind:
        case Everything():
            if quadratic <= 0:
                raise ArgumentError(
                    f"quadratic must be above 0 without a bounded set, where a linear function has no minimum, got "
                    f"{quadratic!r}: regularise, or give a Ball, a Box or a Simplex"
                )
        case Box():
            try:
                fits = np.broadcast_shapes(kind.low.shape, kind.high.shape, shape) == shape
            except ValueError:
                fits = False
            if not fits:
                raise ArgumentError(
                    f"low and high must broadcast to the shape {shape} of theta, got {kind.low.shape} and "
                    f"{kind.high.shape}"
                )
        case Simplex():
            if 0 in shape:
                raise ArgumentError(f"a simplex needs a coordinate, got shape {shape}")
        case Ball():
            pass
        case _:
            assert_never(kind)


def _argmin(kind: Set, g: Floats, quadratic: float, l1: float) -> Floats:
    with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
        match kind:
            case Everything():
                return _soft(g, l1) / -quadratic
            case Box():
                soft = _soft(g, l1)
                return np.clip(np.where(soft == 0.0, 0.0, soft / -quadratic), kind.low, kind.high)
            case Ball():
                return _in_ball(_soft(g, l1), quadratic, kind.radius)
            case Simplex():
                return _on_simplex(g, quadratic, kind.radius)
            case _:
                assert_never(kind)


def _soft(g: Floats, l1: float) -> Floats:
    """sign(g) max(|g| - l1, 0)."""
    return g if l1 == 0.0 else g - np.clip(g, -l1, l1)


def _in_ball(soft: Floats, quadratic: float, radius: float) -> Floats:
    top = float(np.abs(soft).max(initial=0.0))
    if top == 0.0:
        return np.zeros_like(soft)
    direction = soft / top
    norm = float(np.linalg.norm(direction))
    return soft / -quadratic if top * norm < radius * quadratic else direction * (-radius / norm)


def _on_simplex(g: Floats, quadratic: float, radius: float) -> Floats:
    below = g.min() - g.reshape(-1)  # at most 0, and 0 at the least of g: adding a constant to all changes nothing
    if quadratic == 0.0:
        least = below == 0.0
        return np.reshape(least * (radius / least.sum()), g.shape)
    # What lies a radius below the top is zero in the projection, however far below it lies.
    points = np.maximum(below / quadratic, -2.0 * radius)
    falling = np.sort(points)[::-1]
    excess = (np.cumsum(falling) - radius) / np.arange(1, len(falling) + 1)
    last = np.flatnonzero(falling > excess)[-1]
    return np.reshape(np.maximum(points - excess[last], 0.0), g.shape)
