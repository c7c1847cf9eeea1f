"""Plots of plans by matplotlib, without a display: what `plan.plot()` and `comparison.plot()` return."""

import io
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from anyorder import checks

if TYPE_CHECKING:
    from anyorder.plan.plan import Plan

_COLOURS = ("#0b5fa5", "#d1495b", "#2e8b57", "#8a5fbf", "#c77800", "#3a9ea5", "#7a5230", "#6c757d")
FIRST_COLOUR = _COLOURS[0]
_STYLES = ("-", "--", "-.", ":")


def new_axes(title: str) -> tuple[Any, Any]:
    """A figure, and axes in the style of all plots here. Raises MissingDependencyError."""
    module = checks.optional("matplotlib.figure", extra="train", purpose="drawing a plot")
    figure = module.Figure(figsize=(7.2, 4.8), layout="constrained")
    figure._repr_png_ = partial(_png, figure)  # a notebook shows it, whether or not it has loaded pyplot
    axes = figure.add_subplot()
    axes.set_title(title, fontsize=11, loc="left")
    axes.set_prop_cycle(color=_COLOURS)
    axes.grid(alpha=0.3, linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def style_of(i: int) -> str:
    """Of line number i: where colours begin again, another one."""
    return _STYLES[i // len(_COLOURS) % len(_STYLES)]


def noise_lines(plans: Mapping[str, "Plan"], title: str) -> Any:
    """The noise in every iterate, a line for each named plan; see `Plan.noise_profile`.

    Where one of them is too long for that, the noise in the prefix sums of gradients is drawn of all, and named so.
    """
    figure, axes = new_axes(title)
    sums = not all(plan.reaches_iterates for plan in plans.values())
    for i, (name, plan) in enumerate(plans.items()):
        profile = plan.noise_profile(sums=sums)
        steps = np.arange(1, len(profile) + 1)
        axes.plot(steps, profile, style_of(i), linewidth=1.4, label=name)
    axes.set_xlabel("step")
    unit = "clip norms" if sums else "clip norms, for learning rate 1 and batch size 1"
    axes.set_ylabel(f"noise in the {'sum of gradients' if sums else 'iterate'}: std of one coordinate\n({unit})")
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    if len(plans) > 3:
        figure.legend(loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    else:
        axes.legend(frameon=False)
    return figure


def bars(names: Sequence[str], values: Sequence[float], label: str, title: str) -> Any:
    """A bar for each name, the first on top, with its value."""
    figure, axes = new_axes(title)
    drawn = axes.barh(range(len(names)), values, color=_COLOURS[0])
    axes.bar_label(drawn, [f"{value:.4g}" for value in values], padding=3, fontsize=9)
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.set_xlabel(label)
    axes.margins(x=0.12)
    return figure


def _png(figure: Any) -> bytes:
    made = io.BytesIO()
    figure.savefig(made, dpi=100, format="png")
    return made.getvalue()
