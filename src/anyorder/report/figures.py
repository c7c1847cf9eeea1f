"""Charts as SVG text, the same bytes for the same numbers: they take their colours from the page they stand in."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from anyorder.report.markup import Html, join, tag

__all__ = ["Axis", "Line", "is_band", "key", "lanes", "line_chart"]

Floats = NDArray[np.float64]

_WIDTH, _HEIGHT = 480, 290
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 14, 12, 40
_POINTS = 200  # of a line that are drawn
_TICKS = 90  # of a lane that are told apart


@dataclass(frozen=True)
class Line:
    """A line of a chart.

    Attributes:
        x, y: (m,) its points; y above 0 on an axis with logarithms.
        colour: 0 to 4, of the page's.
        marked: whether points are marked, and not joined where there is one alone.
    """

    x: Sequence[float] | Floats
    y: Sequence[float] | Floats
    colour: int = 0
    marked: bool = False


@dataclass(frozen=True)
class Axis:
    """An axis: its label, ends, whether it goes by logarithms (base 10), and whether ticks are whole numbers."""

    label: str
    low: float
    high: float
    log: bool = False
    whole: bool = False

    def at(self, values: ArrayLike) -> Floats:
        """(m,) places from 0 to 1."""
        low, high, found = self.low, self.high, np.asarray(values, np.float64)
        if self.log:
            low, high, found = math.log10(low), math.log10(high), np.log10(found)
        return np.asarray((found - low) / (high - low))

    def ticks(self) -> list[float]:
        """Round numbers between the ends, at most seven."""
        if self.log:
            first, last = math.ceil(math.log10(self.low) - 1e-9), math.floor(math.log10(self.high) + 1e-9)
            return [10.0**power for power in range(first, last + 1, max(1, -(-(last - first) // 5)))]
        width = (self.high - self.low) / 5
        unit = 10.0 ** math.floor(math.log10(width))
        step = next(unit * times for times in (1, 2, 5, 10) if unit * times >= width)
        if self.whole:
            step = max(1.0, step)
        first, last = math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9)
        return [step * i for i in range(first, last + 1)]


def line_chart(lines: Sequence[Line], x: Axis, y: Axis, description: str) -> Html:
    """Lines over a grid.

    Args:
        description: what a reader hears who does not see it.
    """
    columns, rows = _places(x, y)
    drawn = [_line(line, columns, rows) for line in lines]
    return _frame(x, y, description, *drawn)


def lanes(rows: Sequence[tuple[str, Sequence[int]]], n: int, borders: Sequence[int], description: str) -> Html:
    """A lane for each unit with the steps it is in, of n steps.

    Args:
        rows: (name, steps); so many that they run together are drawn as a band.
        borders: steps at which epochs begin.
    """
    x = Axis("step", 1, max(2, n), whole=True)
    high, gap = 62 + 34 * len(rows), 34
    parts: list[Html] = []
    for step in borders if len(borders) <= 40 else ():
        at = _number(_LEFT + (_WIDTH - _LEFT - _RIGHT) * float(x.at(step + 1)))
        parts.append(tag("path", d=f"M{at} {_TOP}V{high - _BOTTOM}", class_="grid"))
    for i, (name, steps) in enumerate(rows):
        middle = _TOP + gap * i + 17
        parts.append(tag("text", name, x=_LEFT - 8, y=middle + 4, text_anchor="end"))
        parts.append(tag("path", d=f"M{_LEFT} {middle}H{_WIDTH - _RIGHT}", class_="grid"))
        if is_band(steps, n):
            width = _WIDTH - _LEFT - _RIGHT
            parts.append(tag("rect", x=_LEFT, y=middle - 9, width=width, height=18, class_="band"))
            continue
        places = _LEFT + (_WIDTH - _LEFT - _RIGHT) * x.at(np.asarray(steps) + 1)
        bars = [
            tag("rect", x=_number(float(at) - 1.5), y=middle - 9, width=3, height=18, rx=1, class_="f0")
            for at in places
        ]
        parts.extend(bars)
    for value in x.ticks():
        at = _number(_LEFT + (_WIDTH - _LEFT - _RIGHT) * float(x.at(value)))
        parts.append(tag("text", _told(value), x=at, y=high - 22, text_anchor="middle"))
    parts.append(tag("text", x.label, x=_number((_LEFT + _WIDTH - _RIGHT) / 2), y=high - 5, text_anchor="middle"))
    return tag("svg", *parts, viewBox=f"0 0 {_WIDTH} {high}", role="img", aria_label=description)


def is_band(steps: Sequence[int], n: int) -> bool:
    """Whether a lane's steps are all there are, or so many that they run together."""
    return len(steps) > _TICKS or len(steps) == n


def key(colour: int) -> Html:
    """The line's colour and dashes, for a legend."""
    stroke = tag("path", d="M0 6H30", class_=f"line c{colour}")
    return tag("svg", stroke, viewBox="0 0 30 12", class_="key", aria_hidden="true")


Place = Callable[[ArrayLike], Floats]


def _places(x: Axis, y: Axis) -> tuple[Place, Place]:
    def column(values: ArrayLike) -> Floats:
        return _LEFT + (_WIDTH - _LEFT - _RIGHT) * x.at(values)

    def row(values: ArrayLike) -> Floats:
        return _HEIGHT - _BOTTOM - (_HEIGHT - _TOP - _BOTTOM) * y.at(values)

    return column, row


def _line(line: Line, columns: Place, rows: Place) -> Html:
    x, y = np.asarray(line.x, np.float64), np.asarray(line.y, np.float64)
    if len(x) > _POINTS:
        kept = np.unique(np.linspace(0, len(x) - 1, _POINTS).round().astype(np.int64))
        x, y = x[kept], y[kept]
    points = [f"{_number(a)} {_number(b)}" for a, b in zip(columns(x), rows(y), strict=True)]
    path = tag("path", d="M" + "L".join(points), class_=f"line c{line.colour}") if len(points) > 1 else Html()
    if not line.marked:
        return path
    marks = [tag("circle", cx=p.split()[0], cy=p.split()[1], r=4, class_=f"mark f{line.colour}") for p in points]
    return join(path, *marks)


def _frame(x: Axis, y: Axis, description: str, *drawn: Html) -> Html:
    columns, rows = _places(x, y)
    right, bottom, parts = _WIDTH - _RIGHT, _HEIGHT - _BOTTOM, []
    for value in y.ticks():
        at = _number(float(rows(value)))
        parts.append(tag("path", d=f"M{_LEFT} {at}H{right}", class_="grid"))
        parts.append(tag("text", _told(value), x=_LEFT - 6, y=at, dy=4, text_anchor="end"))
    for value in x.ticks():
        at = _number(float(columns(value)))
        parts.append(tag("path", d=f"M{at} {bottom}v4", class_="axis"))
        parts.append(tag("text", _told(value), x=at, y=bottom + 17, text_anchor="middle"))
    parts.append(tag("path", d=f"M{_LEFT} {bottom}H{right}", class_="axis"))
    parts.append(tag("text", x.label, x=_number((_LEFT + right) / 2), y=_HEIGHT - 5, text_anchor="middle"))
    middle = _number((_TOP + bottom) / 2)
    turned = f"rotate(-90 11 {middle})"
    parts.append(tag("text", y.label, x=11, y=middle, text_anchor="middle", transform=turned))
    return tag("svg", *parts, *drawn, viewBox=f"0 0 {_WIDTH} {_HEIGHT}", role="img", aria_label=description)


def _number(value: float) -> str:
    """A place in tenths of a pixel."""
    return f"{value + 0.0:.1f}".removesuffix(".0")


def _told(value: float) -> str:
    """A tick in words."""
    return f"{value:.6g}" if value == 0 or 1e-3 <= abs(value) < 1e6 else f"{value:.0e}".replace("e-0", "e-")
