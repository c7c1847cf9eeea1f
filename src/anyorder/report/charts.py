"""The pictures of a report, each with what it shows in words: functions of a plan, or of test results, alone."""

import math
from collections.abc import Sequence
from itertools import pairwise

from anyorder.accounting.amplification.claims import Amplified
from anyorder.accounting.curves import Gaussian, Sampled
from anyorder.formatting import counted, rounded_up
from anyorder.patterns import Listed, PerEpoch, Separated
from anyorder.plan.plan import Plan
from anyorder.report.beside import Profile, draws_noise, noise_beside
from anyorder.report.figures import Axis, Line, is_band, key, lanes, line_chart
from anyorder.report.markup import Html, join, tag

__all__ = ["accuracy_figure", "curve_figure", "figures", "noise_figure", "order_figure"]

_LANES = ("unit A", "unit B", "unit C")
_GOLDEN = (math.sqrt(5) - 1) / 2  # its multiples, without whole parts, lie evenly and in no order
_SMALLEST, _LARGEST = -10, -1  # powers of ten: deltas that are drawn


def noise_figure(plan: Plan) -> Html:
    """The noise of each step's prefix sum, beside other mechanisms at the same budget."""
    title = tag("h3", "Noise of every step, beside other mechanisms")
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
    caption += ". DP-SGD's line holds for secret sampling alone; its noise is found within a percent." * sampled
    caption += "." * (not sampled)
    if not plan.workload.is_prefix_sum:
        caption += " This run is fitted to its own optimizer, whose iterates the card's error is of, not to bare sums."
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
        caption += "; which ones a real unit is in is drawn by secret coins, and stands nowhere"
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
        f"point is what the certificate states: epsilon {rounded_up(plan.epsilon)} at delta {plan.delta:g}.{more}"
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
        f"{told}, by the run's own metrics file, which the certificate does not cover. The test set is public, or of "
        f"people who are not protected here; nothing is measured on training data."
    )
    described = f"Test accuracy by {label}: from {percent[0]:.1f} to {percent[-1]:.1f} percent; it fell {_times(falls)}"
    return tag("figure", tag("h3", f"Test accuracy by {label}"), line_chart([line], x, y, described),
               tag("figcaption", caption))  # fmt: skip


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


def figures(*parts: Html) -> Html:
    """Figures side by side where there is room."""
    return tag("div", join(*parts), class_="charts")
