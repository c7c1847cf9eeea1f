"""Plots, written as PNG without a display."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from anyorder import checks
from anyorder.errors import ArgumentError
from anyorder.plan.plan import Plan

__all__ = ["can_draw", "new_axes", "plot_accuracy", "plot_noise", "plot_report_goals", "save_figure"]

_COLOURS = ("#0b5fa5", "#d1495b", "#2e8b57", "#8a5fbf", "#c77800", "#3a9ea5", "#7a5230", "#6c757d")
_STYLES = ("-", "--", "-.", ":")


def plot_noise(plans: Mapping[str, Plan], path: str | Path, title: str) -> None:
    """Draw the noise in every iterate, a line for each named plan; see `Plan.noise_profile`.

    Where one of them is too long for that, the noise in the prefix sums of gradients is drawn of all, and named so.
    """
    figure, axes = new_axes(title)
    sums = not all(plan.reaches_iterates for plan in plans.values())
    for i, (name, plan) in enumerate(plans.items()):
        profile = plan.noise_profile(sums=sums)
        steps = np.arange(1, len(profile) + 1)
        axes.plot(steps, profile, _STYLES[i // len(_COLOURS) % len(_STYLES)], linewidth=1.4, label=name)
    axes.set_xlabel("step")
    unit = "clip norms" if sums else "clip norms, for learning rate 1 and batch size 1"
    axes.set_ylabel(f"noise in the {'sum of gradients' if sums else 'iterate'}: std of one coordinate\n({unit})")
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    if len(plans) > 3:
        figure.legend(loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    else:
        axes.legend(frameon=False)
    save_figure(figure, path)


def plot_accuracy(
    accuracy: Sequence[float], path: str | Path, title: str, *, at: Sequence[int] | None = None, label: str = "epoch"
) -> None:
    """Draw the test accuracy (fractions) after each epoch, or after the rounds `at` of a `label`, in percent."""
    figure, axes = new_axes(title)
    epochs, percent = np.arange(1, len(accuracy) + 1) if at is None else np.asarray(at), 100 * np.asarray(accuracy)
    axes.plot(epochs, percent, "o-", color=_COLOURS[0], markersize=4, linewidth=1.6)
    axes.annotate(
        f"{percent[-1]:.1f} %", (epochs[-1], percent[-1]), xytext=(0, -16), textcoords="offset points", ha="center",
        fontweight="bold", color=_COLOURS[0],
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
        style = "o" + _STYLES[i // len(_COLOURS) % len(_STYLES)]
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


def new_axes(title: str) -> tuple[Any, Any]:
    """A figure, and axes in the style of all plots here. Raises MissingDependencyError."""
    module = checks.optional("matplotlib.figure", extra="train", purpose="drawing a plot")
    figure = module.Figure(figsize=(7.2, 4.8), layout="constrained")
    axes = figure.add_subplot()
    axes.set_title(title, fontsize=11, loc="left")
    axes.set_prop_cycle(color=_COLOURS)
    axes.grid(alpha=0.3, linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def save_figure(figure: Any, path: str | Path) -> None:
    """Write a figure as PNG. Raises ArgumentError where it cannot be written."""
    try:
        figure.savefig(path, dpi=150, format="png")
    except OSError as problem:
        raise ArgumentError(f"cannot write the plot {path}: {problem.strerror or problem}") from problem
