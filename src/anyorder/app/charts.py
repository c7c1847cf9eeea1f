"""Pictures: SVG text for reports, and PNG plots without a display."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from anyorder import checks
from anyorder._numerics import doubled
from anyorder.accounting import gdp_mu
from anyorder.accounting.amplification.claims import Amplified
from anyorder.accounting.curves import BoundedRange, Composed, Gaussian, Sampled
from anyorder.accounting.gaussian import NEIGHBOURS
from anyorder.accounting.risk import point_tpr
from anyorder.app.cards import facts_panel
from anyorder.audit import Memorised
from anyorder.audit.bounds import Method
from anyorder.audit.laws import NoiseLaw
from anyorder.audit.result import REFUTED, Audited, Stated, check_public, t_statistic
from anyorder.checks import final
from anyorder.errors import ArgumentError, CertificateError, PlanError
from anyorder.formats import bounded, printable
from anyorder.formatting import counted, one_of, rounded_down, rounded_up
from anyorder.participation import KnownOrder
from anyorder.patterns import Listed, Participation, PerEpoch, Separated
from anyorder.plan.cost import check_plan
from anyorder.plan.pictures import FIRST_COLOUR, new_axes, noise_lines, style_of
from anyorder.plan.plan import Plan
from anyorder.strategy import Independent, Strategy, Tree
from anyorder.strategy.registry import Structure, kind_of, known_sensitivity, row_variances, sensitivity
from anyorder.workload import prefix_sum

# ----------------------------------------------------------------------------------------------------
# HTML and SVG from Python: every text is escaped where it is put in, so that no text can be markup.


@final
class Html(str):
    """Markup that this module made. Any other text is escaped before it is put beside it."""

    __slots__ = ()


def tag(name: str, *children: str, **attributes: str | float | None) -> Html:
    """<name attributes>children</name>.

    Args:
        name: of the element, a literal of this package.
        children: `Html` as it is; any other text escaped, with what a screen could act on spelt out.
        attributes: "class_" is class, "stroke_width" is stroke-width; None is left out.
    """
    told = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(printable(str(value)))}"'
        for key, value in attributes.items()
        if value is not None
    )
    return Html(f"<{name}{told}>{join(*children)}</{name}>")


def join(*parts: str, between: str = "") -> Html:
    """The parts one after the other, escaped where they are not `Html`."""
    return Html(between.join(part if type(part) is Html else escape(printable(part)) for part in parts))


def document(title: str, *body: str) -> str:
    """A page in one file: no script, and nothing from elsewhere, which its content policy also forbids."""
    head = join(
        Html('<meta charset="utf-8">\n<meta name="viewport" content="width=device-width, initial-scale=1">\n'),
        Html(
            "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">\n"
        ),
        Html('<meta name="color-scheme" content="light dark">\n<meta name="referrer" content="no-referrer">\n'),
        tag("title", title),
        Html(f"\n<style>{_STYLE}</style>\n"),
    )
    page = tag("main", *body)
    return f'<!DOCTYPE html>\n<html lang="en">\n<head>\n{head}</head>\n<body>\n{page}\n</body>\n</html>\n'


_STYLE = """
:root { --paper: #fff; --ink: #1c2430; --soft: #56606e; --rule: #d9dee5; --panel: #f5f7fa; --good: #17693f;
  --good-paper: #e7f5ed; --mid: #754600; --mid-paper: #fff3d6; --bad: #a3161f; --bad-paper: #fdeaea; --accent: #0b5fa5;
  --c0: #0b5fa5; --c1: #c2410c; --c2: #15803d; --c3: #7e3fb2; --c4: #57606a; }
@media (prefers-color-scheme: dark) { :root { --paper: #14181e; --ink: #e6eaf0; --soft: #a0abb8; --rule: #333b46;
  --panel: #1c222b; --good: #7fd6a4; --good-paper: #16301f; --mid: #f0c674; --mid-paper: #33290f;
  --bad: #ff9c9c; --bad-paper: #3b1618; --accent: #79b8f3;
  --c0: #79b8f3; --c1: #f6a56b; --c2: #74d39a; --c3: #c9a2f0; --c4: #a0abb8; } }
* { box-sizing: border-box; }
html { -webkit-text-size-adjust: 100%; text-size-adjust: 100%; }
body { margin: 0; background: var(--paper); color: var(--ink);
  font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", sans-serif; }
main { max-width: 62rem; margin: 0 auto; padding: 1.5rem 1rem 3rem; overflow-wrap: anywhere; }
h1 { font-size: 1.6rem; line-height: 1.2; margin: 0 0 .25rem; } h2 { font-size: 1.2rem; margin: 2.4rem 0 .6rem; }
h3 { font-size: 1rem; margin: 0 0 .3rem; } p { margin: .5rem 0; } .soft { color: var(--soft); }
.small { font-size: .875rem; } .whole { white-space: nowrap; }
.banner { border-left: .3rem solid; border-radius: .3rem; padding: .7rem 1rem; margin: 1rem 0; }
.good { color: var(--good); background: var(--good-paper); } .bad { color: var(--bad); background: var(--bad-paper); }
.mid { color: var(--mid); background: var(--mid-paper); } .note { background: var(--panel); }
.banner p { margin: .15rem 0; } .banner strong { font-size: 1.2rem; } .note strong { font-size: 1rem; }
.banner th { width: 7rem; } td.mark { font-weight: 650; text-align: right; white-space: nowrap; }
.fill { min-height: 1.5rem; border-bottom: 1px solid var(--soft); } .nist td:nth-child(2) { width: 55%; }
.nist th[colspan] { padding-top: .8rem; }
.sign .fill { min-height: 1.9rem; } .sign dl { grid-template-columns: 7rem 1fr; } .sign dt { overflow-wrap: normal; }
.headline { background: var(--panel); border: 1px solid var(--rule); border-radius: .5rem; padding: 1rem 1.2rem; }
.headline .number { font-size: 1.9rem; font-weight: 650; line-height: 1.25; letter-spacing: -.01em; }
.cells { display: grid; grid-template-columns: repeat(auto-fit, minmax(13rem, 1fr)); gap: .8rem; margin-top: .9rem; }
.cell { border-top: 2px solid var(--accent); padding-top: .4rem; } .cell b { font-size: 1.25rem; display: block; }
dl { margin: 0; display: grid; grid-template-columns: minmax(8rem, 13rem) 1fr; }
dt, dd { margin: 0; padding: .45rem 0; border-top: 1px solid var(--rule); }
dt { font-weight: 600; padding-right: 1rem; }
dd p { margin: .1rem 0; }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 26rem), 1fr)); gap: 1.6rem; }
figure { margin: 0; } figure svg { display: block; width: 100%; max-width: 40rem; height: auto; }
figcaption { font-size: .875rem; color: var(--soft); }
svg text { fill: var(--soft); font-size: 12px; } svg .grid { stroke: var(--rule); } svg .axis { stroke: var(--soft); }
svg .line { fill: none; stroke-width: 2; stroke-linejoin: round; }
svg .mark { stroke: var(--paper); stroke-width: 1.5; }
.c0 { stroke: var(--c0); } .c1 { stroke: var(--c1); stroke-dasharray: 7 3; }
.c2 { stroke: var(--c2); stroke-dasharray: 2 3; } .c3 { stroke: var(--c3); stroke-dasharray: 9 3 2 3; }
.c4 { stroke: var(--c4); stroke-dasharray: 4 4; } .f0 { fill: var(--c0); } .f1 { fill: var(--c1); }
.f2 { fill: var(--c2); } .f3 { fill: var(--c3); } .f4 { fill: var(--c4); } .band { fill: var(--c0); opacity: .25; }
table { border-collapse: collapse; width: 100%; font-size: .875rem; margin: .3rem 0; }
th, td { text-align: left; padding: .25rem .6rem .25rem 0; border-top: 1px solid var(--rule); vertical-align: top; }
thead th { border-top: 0; color: var(--soft); font-weight: 600; } .num { text-align: right; white-space: nowrap; }
.key { display: inline-block; width: 1.8rem; height: .7rem; vertical-align: middle; }
ul { margin: .3rem 0; padding-left: 1.2rem; } li { margin: .25rem 0; }
pre, code { font: .85rem/1.5 ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; }
pre { background: var(--panel); border: 1px solid var(--rule); border-radius: .4rem; padding: .6rem .8rem;
  white-space: pre-wrap; }
@media (max-width: 40rem) { dl { grid-template-columns: 1fr; } dd { border-top: 0; padding-top: 0; }
  .banner th { width: 4rem; }
  .headline .number { font-size: 1.5rem; } }
@page { size: A4; margin: 16mm 15mm; }
@media print { :root { --paper: #fff; --ink: #000; --soft: #444; --rule: #bbb; --panel: #fff; --good: #17693f;
  --good-paper: #fff; --mid: #754600; --mid-paper: #fff;
  --bad: #a3161f; --bad-paper: #fff; --accent: #0b5fa5; --c0: #0b5fa5; --c1: #c2410c;
  --c2: #15803d; --c3: #7e3fb2; --c4: #57606a; } body { font-size: 10pt; } main { max-width: none; padding: 0; }
  .banner { border: 1px solid; border-left-width: .3rem; } .charts { grid-template-columns: 1fr 1fr; }
  .cells { grid-template-columns: 1fr 1fr; }
  figure, .banner, .sign, pre, .headline, dt, dd, li, tr { break-inside: avoid; } h2 { break-after: avoid; } }
"""


# ----------------------------------------------------------------------------------------------------
# Charts as SVG text, the same bytes for the same numbers: they take their colours from the page they stand in.


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


# ----------------------------------------------------------------------------------------------------
# The noise of a plan beside that of other mechanisms with the same promise: quick enough for a file of a stranger.
#
# A function of the plan alone. What would take long is left out, by counts and never by a clock.


_MOST_STEPS = 1 << 15
_MOST_DENSE = 1536  # steps of what is made as a matrix
_MOST_STATE = 1 << 26  # steps times the square of the state
_LEAST_SIGMA, _MOST_SIGMA = 0.3, 1e5
_beside_POINTS, _GRID = 1 << 13, 1 << 15  # of one step, and of the sum of all


@dataclass(frozen=True)
class Profile:
    """The noise of one mechanism.

    Attributes:
        name: for people.
        std: (n,) of one coordinate of each prefix sum of gradients, in clip norms.
    """

    name: str
    std: Floats

    @property
    def mean(self) -> float:
        """Root mean square over steps."""
        return float(np.sqrt(np.square(self.std).mean()))


def draws_noise(plan: Plan) -> bool:
    """Whether the noise of each step takes little enough time."""
    kind, n = kind_of(plan.strategy).structure, plan.n
    if kind in (Structure.DENSE, Structure.LOW_RANK, Structure.RESCALED):
        return n <= _MOST_DENSE
    return n <= _MOST_STEPS and n * plan.strategy.state_rows**2 <= _MOST_STATE


def noise_beside(plan: Plan) -> list[Profile]:
    """This plan, independent noise and the binary tree in its order, and DP-SGD with secret Poisson sampling.

    All at the plan's epsilon and delta, unit, neighbours, clip norm, steps and (expected) batch size. In an order by
    secret draws the others are as if its batches were known, so that what the secret gains shows. The last is there
    where the number of units is public, and neighbours are not "replace-one"; see `sampled_noise`.

    Returns: in the order above; this plan alone where it selects rows, as its budget is then for two releases.
    Cost: below half a second for 1000 steps.
    Raises: PlanError where the noise would take long, see `draws_noise`.
    """
    if not draws_noise(plan):
        raise PlanError(f"the noise of {plan.strategy.describe()} takes long for {plan.n} steps, and is not drawn here")
    found = [Profile("this run", plan.noise_profile(sums=True))]
    if plan.selection is not None or plan.epsilon == 0:
        return found
    alike = " if batches were known" if plan.participation.secret else ", same order"
    for name, strategy in (("independent noise", Independent(plan.n)), ("binary tree", Tree(plan.n, "full"))):
        if type(strategy) is type(plan.strategy) and not plan.participation.secret:
            continue
        std = _known_noise(plan, strategy)
        if std is not None:
            found.append(Profile(name + alike, std))
    rows = type(plan.participation) is KnownOrder and plan.unit != "example"  # what a loader counts, not its units
    q = None if plan.dataset_size is None or rows else plan.batch_size / plan.dataset_size
    poisson = plan.participation.draw_probability is not None
    if q is not None and q < 1 and not poisson and plan.neighbours != "replace-one":
        sigma = sampled_noise(q, plan.n, plan.epsilon, plan.delta)
        if sigma is not None:
            found.append(Profile("DP-SGD, secret Poisson sampling", sigma * np.sqrt(np.arange(1, plan.n + 1))))
    return found


def _known_noise(plan: Plan, strategy: Strategy) -> Floats | None:
    """The noise of a mechanism at the plan's promise, in its order with nothing secret; None where it takes long.

    Also of a file of one's own, so that it is the same report whoever makes it.
    """
    order: Participation = plan.participation
    try:
        with bounded(True):
            if not order.secret:
                check_plan({**plan.to_dict(), "strategy": strategy.to_dict()})
            sens = known_sensitivity(strategy, order) if order.secret else sensitivity(strategy, order)
    except CertificateError:
        return None
    multiplier = NEIGHBOURS[plan.neighbours] * sens.value / gdp_mu(plan.epsilon, plan.delta)
    return np.asarray(multiplier * np.sqrt(row_variances(strategy, prefix_sum(plan.n))))


def sampled_noise(q: float, n: int, epsilon: float, delta: float) -> float | None:
    """The noise multiplier that n steps of DP-SGD need with secret Poisson sampling, for a picture and not for a claim.

    The law of the privacy loss of a step on a grid, to the power of n by a Fourier transform [Koskela et al. 2020], in
    both directions of neighbours: within a percent of what `accounting.poisson.poisson_epsilon`, which rounds to the
    safe side, asks for, in a fraction of its time.

    Args:
        q: sampling probability, between 0 and 1.
        n: steps.
        epsilon, delta: the promise.
    Returns: None where noise between 0.3 and 10^5 clip norms does not meet it.
    Cost: about 0.3 s.
    """
    low, high = doubled(
        lambda sigma: _sampled_delta(q, n, sigma, epsilon) <= delta, _LEAST_SIGMA, 1.0, most=_MOST_SIGMA
    )
    if math.isinf(high):
        return None
    if low == _LEAST_SIGMA and _sampled_delta(q, n, low, epsilon) <= delta:
        return None
    while high / low > 1.002:
        middle = math.sqrt(low * high)
        low, high = (low, middle) if _sampled_delta(q, n, middle, epsilon) <= delta else (middle, high)
    return high


def _sampled_delta(q: float, n: int, sigma: float, epsilon: float) -> float:
    """About the delta at which n sampled steps keep epsilon: the larger of the two directions."""
    x = np.linspace(-10 * sigma, 1 + 10 * sigma, _beside_POINTS)
    without = np.exp(-np.square(x / sigma) / 2)
    beside = np.exp(-np.square((x - 1) / sigma) / 2)
    without, beside = without / without.sum(), beside / beside.sum()
    loss = np.log1p(q * np.expm1((2 * x - 1) / (2 * sigma**2)))
    ways = ((loss, (1 - q) * without + q * beside), (-loss, without))
    return max(_composed_delta(losses, chances, n, epsilon) for losses, chances in ways)


def _composed_delta(losses: Floats, chances: Floats, n: int, epsilon: float) -> float:
    mean = float(chances @ losses)
    spread = math.sqrt(max(float(chances @ np.square(losses - mean)), 1e-18))
    span = 12 * math.sqrt(n) * spread + float(np.abs(losses).max())  # on both sides of the mean of the sum
    width = 2 * span / _GRID
    place = (losses - mean) / width
    below = np.floor(place).astype(np.int64)
    part = place - below
    one = np.bincount(below % _GRID, chances * (1 - part), _GRID)
    one += np.bincount((below + 1) % _GRID, chances * part, _GRID)
    total = np.fft.irfft(np.fft.rfft(one) ** n, _GRID)
    sums = n * mean + width * np.fft.fftfreq(_GRID, 1 / _GRID)
    beyond = sums > epsilon
    return float(total[beyond] @ -np.expm1(epsilon - sums[beyond]))


# ----------------------------------------------------------------------------------------------------
# The pictures of a report, each with what it shows in words: functions of a plan, or of test results, alone.


_LANES = ("unit A", "unit B", "unit C")
_GOLDEN = (math.sqrt(5) - 1) / 2  # its multiples, without whole parts, lie evenly and in no order
_SMALLEST, _LARGEST = -10, -1  # powers of ten: deltas that are drawn


def noise_figure(plan: Plan) -> Html:
    """The noise of each step's prefix sum, beside other mechanisms at the same budget."""
    title = tag("h3", "Noise of every step, compared with other mechanisms")
    if not draws_noise(plan):
        return tag(
            "figure", title, tag("figcaption", f"Not drawn: it takes long for {counted(plan.n, 'step')} of this kind.")
        )
    profiles = noise_beside(plan)
    most = max(float(profile.std.max()) for profile in profiles)
    x, y = Axis("step", 1, max(2, plan.n), whole=True), Axis("noise of the sum so far (clip norms)", 0, 1.05 * most)
    lines = [Line(range(1, plan.n + 1), profile.std, colour) for colour, profile in enumerate(profiles)]
    told = "; ".join(f"{profile.name}: {profile.mean:.4g} on average" for profile in profiles)
    caption = (
        "How much noise lies on the sum of all steps so far, which is what a model is made of. Lower is better, and "
        "all lines keep the same promise"
    )
    sampled = any("Poisson" in profile.name for profile in profiles)
    caption += ". DP-SGD's line is valid for secret sampling alone, and its noise is found within a percent." * sampled
    caption += "." * (not sampled)
    if not plan.workload.is_prefix_sum:
        caption += " The card's error is for the weights of this run's own optimizer, and not for this sum."
    picture = line_chart(lines, x, y, f"Noise by step. {told}")
    return tag("figure", title, picture, _table(profiles), tag("figcaption", caption))


def _table(profiles: Sequence[Profile]) -> Html:
    head = tag("tr", tag("th", ""), tag("th", "mechanism"), _right("th", "average"), _right("th", "last step"))
    rows = [
        tag("tr", tag("td", key(i)), tag("td", profile.name), _right("td", f"{profile.mean:.4g}"),
            _right("td", f"{profile.std[-1]:.4g}"))
        for i, profile in enumerate(profiles)
    ]  # fmt: skip
    return tag("table", tag("thead", head), tag("tbody", *rows))


def _right(name: str, text: str) -> Html:
    return tag(name, text, class_="num")


def order_figure(plan: Plan) -> Html:
    """The steps that the order lets a unit be in: a pattern with made-up units, never who was where."""
    title = tag("h3", "What the order allows")
    rows, borders = _examples(plan)
    rule = tag("p", plan.participation.describe(), ".", class_="small")
    if not rows:
        most, apart = plan.participation.max_participations, plan.participation.min_separation
        told = f"At most {_times(most)}" + (f", at least {counted(apart, 'step')} apart." if most > 1 else ".")
        return tag("figure", title, rule, tag("figcaption", told, " The order lists its units, and is not drawn."))
    caption = f"Three {plan.unit}s that are made up, in steps that the order allows"
    if plan.participation.secret:
        caption += "; which ones a real unit is in is drawn in secret, and stands nowhere"
    if any(is_band(steps, plan.n) for _, steps in rows):
        caption += ". Bands: any step there, or very many of them"
    picture = lanes(rows, plan.n, borders, f"{plan.participation.describe()}: three made-up units")
    return tag("figure", title, rule, picture, tag("figcaption", caption, "."))


def _examples(plan: Plan) -> tuple[list[tuple[str, Sequence[int]]], list[int]]:
    """(lane, steps), and the steps at which epochs begin; nothing for orders that list their units."""
    n, pattern = plan.n, plan.participation.pattern
    shares = [(i + 1) * _GOLDEN % 1 for i in range(len(_LANES))]
    match pattern:
        case Listed(stride=None):
            return [], []
        case Listed(stride=stride):
            assert stride is not None
            starts = [int(share * min(stride, n)) for share in shares]
            found = [range(start, n, stride) for start in starts]
            return list(zip(_LANES, found, strict=True)), list(range(0, n, stride)) if stride > 1 else []
        case PerEpoch(k=k, steps_per_epoch=steps):
            chosen = [
                [epoch * steps + int((share + (epoch + 1) * _GOLDEN * (i + 2)) % 1 * steps) for epoch in range(k)]
                for i, share in enumerate(shares)
            ]
            return list(zip(_LANES, chosen, strict=True)), list(range(0, n, steps))
        case Separated():
            most = pattern.max_participations
            spare = n - 1 - (most - 1) * pattern.b  # steps that are left over where they come as often as allowed
            moved = [int(share * (spare + 1)) for share in shares]
            ways = [[start + i * pattern.b for i in range(most)] for start in moved]
            return list(zip(_LANES, ways, strict=True)), []


def curve_figure(plan: Plan) -> Html:
    """Epsilon against delta, where the claim is a whole curve; else that of known batches, and the claim in it."""
    title, curve = tag("h3", "Epsilon for other deltas"), plan.curve
    match curve:
        case Gaussian() | Sampled():
            line, name, more = curve, "this run", ""
        case Amplified():
            line = Gaussian(curve.known_mu, neighbours=curve.neighbours, unit=curve.unit)
            name = "if batches were known"
            more = " The line is what is left if the batches became known; the point is the promise."
        case _:
            told = "Not drawn: the promise joins several parts, and is stated for its own delta."
            return tag("figure", title, tag("figcaption", told))
    deltas = [10.0**power for power in range(_SMALLEST, _LARGEST + 1)]
    points = [(delta, line.epsilon(delta)) for delta in deltas]
    drawn = [(delta, epsilon) for delta, epsilon in points if math.isfinite(epsilon)]
    low, high = min(deltas[0], plan.delta), max(deltas[-1], plan.delta)
    most = max([plan.epsilon, *(epsilon for _, epsilon in drawn)]) or 1.0
    x, y = Axis("delta", low, high, log=True), Axis("epsilon", 0, 1.08 * most)
    lines = [Line([plan.delta], [plan.epsilon], 0, marked=True)]
    if drawn:
        at, epsilons = [delta for delta, _ in drawn], [epsilon for _, epsilon in drawn]
        lines.insert(0, Line(at, epsilons, 1 if type(curve) is Amplified else 0))
    caption = (
        "One run keeps a smaller epsilon where a larger delta may be left out of it, and the other way round. The "
        f"point is what the certificate states: epsilon {rounded_up(plan.epsilon)} at delta "
        f"{rounded_up(plan.delta, 6)}.{more}"
    )
    described = f"Epsilon by delta, {name}; " + ", ".join(
        f"{rounded_up(epsilon, 3)} at {delta:.0e}" for delta, epsilon in drawn[::3]
    )
    return tag("figure", title, line_chart(lines, x, y, described), tag("figcaption", caption))


def accuracy_figure(points: Sequence[tuple[int, float]], label: str) -> Html:
    """The share of a public test set that is right.

    Args:
        points: (epochs or rounds done, fraction).
        label: "epoch" or "round".
    """
    at, percent = [done for done, _ in points], [100 * right for _, right in points]
    spread = max(percent) - min(percent)
    low = max(0.0, min(percent) - 0.15 * spread - 1)
    x = Axis(label, min(at) if len(at) > 1 else 0, max(at) if len(at) > 1 else at[0] + 1, whole=True)
    y = Axis("test accuracy (%)", low, min(100.0, max(percent) + 0.1 * spread + 1))
    line = Line(at, percent, 0, marked=len(at) <= 30)
    falls = sum(b < a for a, b in pairwise(percent))
    told = f"{percent[-1]:.2f} % of the test examples are right at the end"
    caption = (
        f"{told}, by the run's own metrics file, which the certificate does not cover. That the test set is public, or "
        "of people who are not protected here, the owner states."
    )
    described = f"Test accuracy by {label}: from {percent[0]:.1f} to {percent[-1]:.1f} percent; it fell {_times(falls)}"
    return tag("figure", tag("h3", f"Test accuracy by {label}"), line_chart([line], x, y, described),
               tag("figcaption", caption))  # fmt: skip


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


def figures(*parts: Html) -> Html:
    """Figures side by side where there is room."""
    return tag("div", join(*parts), class_="charts")


# ----------------------------------------------------------------------------------------------------
# Plots, written as PNG without a display.


def plot_noise(plans: Mapping[str, Plan], path: str | Path, title: str) -> None:
    """Draw the noise in every iterate, a line for each named plan; see `Plan.noise_profile`.

    Where one of them is too long for that, the noise in the prefix sums of gradients is drawn of all, and named so.
    """
    save_figure(noise_lines(plans, title), path)


def plot_accuracy(
    accuracy: Sequence[float], path: str | Path, title: str, *, at: Sequence[int] | None = None, label: str = "epoch"
) -> None:
    """Draw the test accuracy (fractions) after each epoch, or after the rounds `at` of a `label`, in percent."""
    figure, axes = new_axes(title)
    epochs, percent = np.arange(1, len(accuracy) + 1) if at is None else np.asarray(at), 100 * np.asarray(accuracy)
    axes.plot(epochs, percent, "o-", color=FIRST_COLOUR, markersize=4, linewidth=1.6)
    axes.annotate(
        f"{percent[-1]:.1f} %", (epochs[-1], percent[-1]), xytext=(0, -16), textcoords="offset points", ha="center",
        fontweight="bold", color=FIRST_COLOUR,
    )  # fmt: skip
    axes.set_xlabel(label)
    axes.set_ylabel("test accuracy (%)")
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set_xlim(epochs[0] - 0.5, epochs[-1] + 0.5 + 0.03 * epochs[-1])
    axes.set_ylim(top=min(102.0, float(percent.max()) + 5))
    save_figure(figure, path)


def plot_report_goals(lines: Mapping[str, Sequence[tuple[int, float]]], path: str | Path, title: str) -> None:
    """Draw epsilon against report goal, both in log scale; points are (report goal, epsilon), epsilon 0 is left out."""
    figure, axes = new_axes(title)
    for i, (name, points) in enumerate(lines.items()):
        drawn = [(goal, epsilon) for goal, epsilon in points if 0 < epsilon < float("inf")]
        goals, epsilons = zip(*drawn, strict=True) if drawn else ((), ())
        style = "o" + style_of(i)
        axes.plot(goals, epsilons, style, markersize=4, linewidth=1.6, label=name)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("report goal (users in a round)")
    axes.set_ylabel("epsilon")
    axes.legend(frameon=False)
    save_figure(figure, path)


def can_draw(path: Path) -> None:
    """Look, before the work that is to be drawn, whether there is a folder for the PNG, and matplotlib.

    Raises: ArgumentError, MissingDependencyError.
    """
    if not path.parent.is_dir() or path.is_dir():
        raise ArgumentError(f"cannot write a plot: plot must be a file in a folder that exists, got {str(path)!r}")
    checks.optional("matplotlib.figure", extra="train", purpose="drawing a plot")


def save_figure(figure: Any, path: str | Path) -> None:
    """Write a figure as PNG. Raises ArgumentError where it cannot be written."""
    try:
        figure.savefig(path, dpi=150, format="png")
    except OSError as problem:
        raise ArgumentError(f"cannot write the plot {path}: {problem.strerror or problem}") from problem


# ----------------------------------------------------------------------------------------------------
# What a person sees of the Secret Sharer: where a model ranks canaries, beside chance.


_BAR, _CHANCE = "#0072B2", "#D55E00"  # told apart by all kinds of eyes, and in grey


def exposure_phrase(found: Memorised) -> str:
    """Mean, median and 90 % quantile of the exposure, and the distance from uniform ranks, in words."""
    exposure, test = found.exposure, found.uniformity
    return (
        f"exposure {exposure.mean():.2f} bits (median {np.median(exposure):.2f}, 90 % quantile "
        f"{np.quantile(exposure, 0.9):.2f}); chi-squared / count {test.distance:.3g}, p = {test.p_value:.2g}"
    )


def plot_ranks(panels: Mapping[str, Mapping[str, Memorised]], path: str | Path, title: str) -> None:
    """Draw histograms of ranks in ten bins, as [Zhang et al. 2021, Fig. 2], with the line of chance, as a PNG.

    Args:
        panels: heading of a row -> heading of a column -> ranks; every row with the same columns.
        path: of the PNG.
    Raises: ArgumentError where there is nothing to draw or the file cannot be written; MissingDependencyError.
    """
    columns = list(next(iter(panels.values()), {}))
    if not columns or any(list(row) != columns for row in panels.values()):
        raise ArgumentError("panels must have a row, and every row the same columns, at least one")
    module = checks.optional("matplotlib.figure", extra="train", purpose="drawing a plot")
    size = (max(4.2, 2.4 * len(columns)), 0.9 + 1.7 * len(panels))
    figure = module.Figure(figsize=size, layout="constrained")
    figure.suptitle(title, fontsize=10, x=0.01, ha="left")
    grid = figure.subplots(len(panels), len(columns), squeeze=False, sharex=True)
    for axes, column in zip(grid[0], columns, strict=True):
        axes.set_title(column, fontsize=9)
    for axes_of_row, (row, cells) in zip(grid, panels.items(), strict=True):
        axes_of_row[0].set_ylabel(row, fontsize=9)
        for axes, found in zip(axes_of_row, cells.values(), strict=True):
            _histogram(axes, found)
    figure.supxlabel("rank / phrases: 0 is the phrase that the model favours most; dashed: chance", fontsize=9)
    try:
        figure.savefig(path, dpi=100, format="png")
    except OSError as problem:
        raise ArgumentError(f"cannot write the plot {path}: {problem.strerror or problem}") from problem


def _histogram(axes: Any, found: Memorised) -> None:
    counts = found.uniformity.counts
    axes.bar((np.arange(len(counts)) + 0.5) / len(counts), counts, 0.92 / len(counts), color=_BAR)
    axes.axhline(counts.sum() / len(counts), linestyle="--", color=_CHANCE, linewidth=1.2)
    axes.set_xlim(0, 1)
    axes.tick_params(labelsize=7)
    axes.spines[["top", "right"]].set_visible(False)


# ----------------------------------------------------------------------------------------------------
# What an audit saw: its verdict beside the claim, and the picture of its scores.


METHODS: dict[Method, str] = {
    "one_run": "whatever the mechanism is",
    "f_dp": "of any mechanism whose curve is a Gaussian's",
    "gaussian": "an estimate: if scores are normal",
    "clopper_pearson": "if canaries do not disturb each other",
}
"""Method of a bound -> what it rests on, in words, beside fair draws."""

LAW, KNOWN = "noise", "known"
_TESTS: dict[str, str] = {
    "f_dp": "the scores, whatever the mechanism is",
    "gaussian": "the scores, independent and normal",
    "clopper_pearson": "the scores, independent",
    KNOWN: "of what is promised if batches become known: the scores that know them",
    LAW: "the noise itself, sums known",
}


_OUT, _IN = "#0072B2", "#D55E00"  # blue and vermilion: told apart by all kinds of eyes, and in grey


@dataclass(frozen=True)
class AuditSummary:
    """What an audit saw, in numbers that may be shown; of an informed audit only if its run was discarded.

    The verdict does not use the bounds: at 95 % each lies above a true claim that is tight in up to one run of twenty.
    It is that of one or more p-values, each at most the probability of a result as strong if the claim is true: of the
    scores, by the method that the canaries allow ("gaussian" where they are orthogonal, see `Audited.method`);
    "noise", by the law of the noise of a run whose sums are known, see `anyorder.audit.laws`; and under secret
    sampling "known", of the scores of one who knows the steps, against what the plan promises then: noise that keeps
    the claim keeps that too.

    Attributes:
        audited: of which.
        confidence: of each bound and of the interval, each on its own.
        bounds: method -> lower bound on epsilon at the audit's delta.
        unfit: method -> why it gives no bound here.
        mu_seen: interval of the mu of the scores; None where no score is normal, or they are too few.
        p_values: method of the scores' test, "noise" or "known", -> p-value.
        known: under secret sampling, what is seen by one to whom all batches became known; None where that was not
            asked. The bounds in it may lie above the claim: what is left then is what is promised then.
    """

    audited: Audited
    confidence: float
    bounds: dict[Method, float]
    unfit: dict[Method, str]
    mu_seen: tuple[float, float] | None
    p_values: dict[str, float]
    known: "AuditSummary | None" = None

    @classmethod
    def of(
        cls,
        audited: Audited,
        methods: Sequence[Method] = tuple(METHODS),
        confidence: float = 0.95,
        law: NoiseLaw | None = None,
        known: Audited | None = None,
    ) -> "AuditSummary":
        """Compute bounds by these methods, and the p-values. Raises ArgumentError for an unknown method."""
        for method in methods:
            checks.choice("method", method, METHODS)
        checks.probability("confidence", confidence)
        unfit: dict[Method, str] = {}
        t = t_statistic(audited)
        if isinstance(audited.curve, (BoundedRange, Sampled, Amplified, Composed)):
            unfit["gaussian"] = "under secret sampling no score is normal"
        elif not 1 < audited.included.sum() < len(audited.included) - 1:
            unfit["gaussian"] = "it needs two canaries that are in, and two that are out"
        elif t is None or math.isinf(t):
            unfit["gaussian"] = "scores do not spread, as those of any noise do"
        bounds = {method: audited.lower_bound(method, confidence) for method in methods if method not in unfit}
        tests: tuple[Method, ...] = audited.methods if audited.method not in unfit or t == math.inf else ("f_dp",)
        p_values: dict[str, float] = {test: audited.p_value(test) for test in tests}
        others = None if known is None else cls.of(known, methods, confidence)
        if others is not None:
            p_values[KNOWN] = others.p_value
        if law is not None:
            p_values[LAW] = law.p_value
        seen = None if "gaussian" in unfit else audited.mu_estimate(confidence)
        unfit = {method: reason for method, reason in unfit.items() if method in methods}
        return cls(audited, confidence, bounds, unfit, seen, p_values, others)

    @property
    def above(self) -> tuple[Method, ...]:
        """Methods whose bound lies above the claim, of those that are valid for these scores."""
        audited = self.audited
        holds: dict[Method, bool] = {
            "one_run": True,
            "f_dp": audited.curve.mu is not None or audited.mus is not None,
            "gaussian": audited.independent and audited.mus is not None,
            "clopper_pearson": audited.independent,
        }
        return tuple(method for method, bound in self.bounds.items() if holds[method] and bound > audited.epsilon)

    @property
    def attack(self) -> tuple[float, float, float] | None:
        """(FPR, TPR, TPR that the claim allows) of the attack that accuses the highest scores, up to 5 % of those out.

        What these canaries show, with the chance of so many; `p_value` has none. None for fewer than 20 out.
        """
        audited = self.audited
        into, out = audited.scores[audited.included], np.sort(audited.scores[~audited.included])[::-1]
        accused = len(out) // 20
        if not accused or not len(into):
            return None
        fpr, tpr = float((out > out[accused]).mean()), float((into > out[accused]).mean())
        if fpr == 0:  # scores that are equal
            return None
        curve = audited.curve
        if isinstance(curve, Stated):
            return fpr, tpr, point_tpr(audited.epsilon, audited.delta, fpr)
        return fpr, tpr, curve.tpr(fpr)

    @property
    def p_value(self) -> float:
        """Of all tests together, by Bonferroni."""
        return min(1.0, len(self.p_values) * min(self.p_values.values()))

    @property
    def refuted(self) -> bool:
        """Whether less than one run in a million of those that keep the claim looks like this."""
        return self.p_value < REFUTED

    def to_dict(self) -> dict[str, Any]:
        """JSON values. No draws, no scores.

        Raises: ArgumentError where the audit is informed and its run was not discarded: see `anyorder.audit.plant`.
        """
        check_public(self.audited)
        audited, included = self.audited, int(self.audited.included.sum())
        known = {} if self.known is None else {"known": self.known.to_dict()}
        return {
            "claimed": {"epsilon": audited.epsilon, "delta": audited.delta, "mu": audited.curve.mu},
            "canaries": {"in": included, "out": len(audited.included) - included, "mu": _range(audited.mus)},
            "confidence": self.confidence,
            "epsilon_at_least": dict(self.bounds),
            "no_bound": dict(self.unfit),
            "mu_seen": None if self.mu_seen is None else {"low": self.mu_seen[0], "high": self.mu_seen[1]},
            "attack": None if self.attack is None else dict(zip(("fpr", "tpr", "allowed"), self.attack, strict=True)),
            "p_values": dict(self.p_values),
            "p_value": self.p_value,
            "refuted": self.refuted,
            **known,
        }

    def __str__(self) -> str:
        """The card, as text; nothing of it where that would be as secret as the data."""
        if self.audited.informed and not self.audited.run_discarded:
            return str(self.audited)
        return "\n".join(f"{label:>17}  {text}" for label, text in _rows(self, None))


def not_refuted(above: int, confidence: float = 0.95) -> str:
    """The verdict in words, where so many of the bounds lie above a claim that was not refuted."""
    if not above:
        return "not refuted: this run does not speak against the claim, which is no proof of it"
    lie = "lies" if above == 1 else "lie"
    return (
        f"not refuted at {REFUTED:g}, but {above} of the bounds {lie} above the claim, as they do in up to one true "
        f"claim of {one_of(confidence)}: audit again, with more canaries"
    )


def _range(mus: Floats | None) -> dict[str, float] | None:
    return None if mus is None else {"smallest": float(mus.min()), "largest": float(mus.max())}


def audit_panel(summary: AuditSummary, plan: Plan | None = None) -> Any:
    """A rich panel: the verdict beside what was claimed.

    Args:
        plan: the claim's, for its order and mechanism.
    """
    return facts_panel("audit", _rows(summary, plan), style="red" if summary.refuted else "green")


def _rows(summary: AuditSummary, plan: Plan | None) -> list[tuple[str, str]]:
    audited, percent = summary.audited, f"{100 * summary.confidence:.6g} %"
    mu = "" if audited.curve.mu is None else f"; mu = {rounded_up(audited.curve.mu)}"
    rows = [("claimed", f"epsilon <= {rounded_up(audited.epsilon)} at delta = {rounded_up(audited.delta, 6)}{mu}")]
    if plan is not None:
        rows += [("order", plan.participation.describe()), ("mechanism", plan.strategy.describe())]
    count, included = len(audited.included), int(audited.included.sum())
    rows.append(("canaries", f"{count}: {included} in, {count - included} out, by secret draws"))
    if summary.attack is not None:
        fpr, tpr, most = (100 * share for share in summary.attack)
        told = f"finds {tpr:.3g} % of those in, and wrongly accuses {fpr:.3g} % of those out"
        rows.append(("attack seen", f"{told}; the claim allows {rounded_up(most, 3)} %, give or take chance"))
    if audited.mus is not None:
        rows.append(("mu of their steps", f"{_span(audited.mus)}, by the claim"))
    if summary.mu_seen is not None:
        rows.append(
            ("mu seen", f"{rounded_down(summary.mu_seen[0])} to {rounded_up(summary.mu_seen[1])} (interval, {percent})")
        )
    rows.append(("each bound holds", f"in {percent} of all runs, where what it rests on does"))
    label = "epsilon at least"
    for method, bound in summary.bounds.items():
        rows.append((label, f"{rounded_down(bound)}  {method}: {METHODS[method]}"))
        label = ""
    for method, reason in summary.unfit.items():
        rows.append((label, f"none  {method}: {reason}"))
        label = ""
    if summary.known is not None:
        rows += _known_rows(summary.known, percent)
    label = "p-value of claim"
    for test, p in summary.p_values.items():
        rows.append((label, f"{p:.2g}  {_TESTS[test]}"))
        label = ""
    return [*rows, ("verdict", _verdict(summary))]


def _known_rows(known: AuditSummary, percent: str) -> list[tuple[str, str]]:
    audited = known.audited
    canaries = counted(len(audited.included), "canary")
    rows = [("if known", f"epsilon <= {rounded_up(audited.epsilon)}; {canaries}, their steps known")]
    if known.mu_seen is not None and audited.mus is not None:
        seen = f"{rounded_down(known.mu_seen[0])} to {rounded_up(known.mu_seen[1])} ({percent})"
        rows.append(("", f"mu seen {seen}, of their steps {_span(audited.mus)}"))
    told = ", ".join(f"{rounded_down(bound)} {method}" for method, bound in known.bounds.items())
    return [*rows, ("", f"epsilon at least {told}")]


def _verdict(summary: AuditSummary) -> str:
    if not summary.refuted and summary.audited.alike is not None:
        return f"not refuted, and {summary.audited.alike}"
    if not summary.refuted:
        return not_refuted(len(summary.above), summary.confidence)
    seen = [p for test, p in summary.p_values.items() if test != LAW]
    if len(summary.p_values) * min(seen) < REFUTED:
        return "REFUTED: of true claims less than one in a million would look like this"
    return "REFUTED: what was added is not the noise of the plan"


def plot_audit(audited: Audited, path: str | Path, title: str | None = None) -> None:
    """Draw the scores of canaries that were in and out, with the two laws that the claim allows, as a PNG.

        out: N(0, 1)        in: N(mu, 1), the mean over the canaries' own mu

    in units of the noise that is claimed; under "replace-one" N(-mu/2, 1) and N(mu/2, 1). Histograms that lie further
    apart than the lines, or are narrower, are what too small a claim looks like; wider ones are those of canaries which
    disturb each other, or share their coordinates with gradients that the attacker does not know. Under secret sampling
    scores are log likelihood ratios, which have no such law, and no lines are drawn.
    """
    scores = np.asarray(audited.scores) / (audited.noise_std or 1.0)
    figure, axes = new_axes(title or _title(audited))
    laws = _laws(audited)
    edges = _edges(scores, [] if laws is None else [*laws[0], *laws[1]])
    for i, (word, colour, hatch) in enumerate((("out", _OUT, ""), ("in", _IN, "////"))):
        own = scores[audited.included == bool(i)]
        if len(own):
            axes.hist(
                own, edges, density=True, histtype="stepfilled", facecolor=(colour, 0.22), edgecolor=(colour, 0.8),
                linewidth=0.8, hatch=hatch, label=f"seen: {len(own)} canaries that were {word}",
            )  # fmt: skip
    for i, (word, colour, line) in enumerate((("out", _OUT, "--"), ("in", _IN, "-"))):
        if laws is not None:
            grid = np.linspace(edges[0], edges[-1], 600)
            label = f"claimed, {word}: N({_span(laws[i], 3)}, 1)"
            axes.plot(grid, _density(grid, laws[i]), line, color=colour, linewidth=2, label=label)
    told = "log likelihood ratio" if laws is None else "standard deviations of the claimed noise"
    axes.set_xlabel(f"score of a canary ({told})")
    axes.set_ylabel("density")
    axes.set_xlim(edges[0], edges[-1])
    axes.set_ylim(bottom=0)
    figure.legend(loc="outside lower center", ncols=2, frameon=False, fontsize=9)
    save_figure(figure, path)


def _title(audited: Audited) -> str:
    claim = f"epsilon {rounded_up(audited.epsilon, 3)} at delta {rounded_up(audited.delta, 6)}"
    return f"scores of {len(audited.scores)} canaries beside the claim of {claim}"


def _laws(audited: Audited) -> tuple[Floats, Floats] | None:
    """Centres of the laws that the claim allows, of canaries that were out and in, in standard deviations."""
    if audited.mus is None:
        return None
    if audited.curve.neighbours == "replace-one":  # out is the opposite canary
        return -audited.mus / 2, audited.mus / 2
    return np.zeros(1), audited.mus


def _span(values: Floats, digits: int = 4) -> str:
    low, high = float(values.min()), float(values.max())
    return f"{high:.{digits}g}" if high - low <= 1e-6 * abs(high) else f"{low:.{digits}g} to {high:.{digits}g}"


def _edges(scores: Floats, centres: Sequence[float]) -> Floats:
    """Edges of bins, over all scores and both laws."""
    low, high = min([*scores, *(c - 3.5 for c in centres)]), max([*scores, *(c + 3.5 for c in centres)])
    width = float(np.clip(3.5 * len(scores) ** (-1 / 3), 0.05, 1.0))  # Scott's rule, for a standard deviation of one
    return np.linspace(low, high, min(200, int(np.ceil((high - low) / width))) + 1)


def _density(at: Floats, means: Floats) -> Floats:
    """Of the mixture of unit Gaussians at these means, each distinct one once."""
    centres, counts = np.unique(means, return_counts=True)
    total = np.zeros_like(at)
    for centre, count in zip(centres, counts, strict=True):
        total += count * np.exp(-0.5 * (at - centre) ** 2)
    return np.asarray(total / (len(means) * np.sqrt(2 * np.pi)))
