"""Plots, written as PNG without a display."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from anyorder import _check
from anyorder.error import row_variances
from anyorder.errors import ArgumentError
from anyorder.plan import Plan

__all__ = ["noise_profile", "plot_accuracy", "plot_noise"]

_COLOURS = ("#0b5fa5", "#d1495b", "#2e8b57", "#8a5fbf", "#c77800", "#3a9ea5", "#7a5230", "#6c757d")
_STYLES = ("-", "--", "-.", ":")


def noise_profile(plan: Plan) -> NDArray[np.float64]:
    """(n,) std of the noise of one coordinate of each iterate, in clip norms, for learning rate 1 and batch size 1.

    std[t] = noise_std / clip_norm * || (A K)[t] ||
    """
    return np.asarray(plan.noise_std / plan.clip_norm * np.sqrt(row_variances(plan.strategy, plan.workload)))


def plot_noise(plans: Mapping[str, Plan], path: str | Path, title: str) -> None:
    """Draw the noise in every iterate, a line for each named plan; see `noise_profile`."""
    figure, axes = _axes(title)
    for i, (name, plan) in enumerate(plans.items()):
        profile = noise_profile(plan)
        steps = np.arange(1, len(profile) + 1)
        axes.plot(steps, profile, _STYLES[i % 4], color=_COLOURS[i % len(_COLOURS)], linewidth=1.6, label=name)
    axes.set_xlabel("step")
    axes.set_ylabel("noise in the iterate: std of one coordinate\n(clip norms, for learning rate 1 and batch size 1)")
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False)
    _save(figure, path)


def plot_accuracy(accuracy: Sequence[float], path: str | Path, title: str) -> None:
    """Draw the test accuracy (fractions) after each epoch, in percent."""
    figure, axes = _axes(title)
    epochs, percent = np.arange(1, len(accuracy) + 1), 100 * np.asarray(accuracy)
    axes.plot(epochs, percent, "o-", color=_COLOURS[0], markersize=4, linewidth=1.6)
    axes.annotate(
        f"{percent[-1]:.1f} %", (epochs[-1], percent[-1]), xytext=(0, -16), textcoords="offset points", ha="center",
        fontweight="bold", color=_COLOURS[0],
    )  # fmt: skip
    axes.set_xlabel("epoch")
    axes.set_ylabel("test accuracy (%)")
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set_xlim(0.5, len(accuracy) + 0.5 + 0.03 * len(accuracy))
    axes.set_ylim(top=min(102.0, float(percent.max()) + 5))
    _save(figure, path)


def _axes(title: str) -> tuple[Any, Any]:
    module = _check.optional("matplotlib.figure", extra="train", purpose="drawing a plot")
    figure = module.Figure(figsize=(7.2, 4.4), layout="constrained")
    axes = figure.add_subplot()
    axes.set_title(title, fontsize=11, loc="left")
    axes.grid(alpha=0.3, linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _save(figure: Any, path: str | Path) -> None:
    try:
        figure.savefig(path, dpi=150, format="png")
    except OSError as problem:
        raise ArgumentError(f"cannot write the plot {path}: {problem.strerror or problem}") from problem
