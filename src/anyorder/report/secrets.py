"""What a person sees of the Secret Sharer: where a model ranks canaries, beside chance."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from anyorder import checks
from anyorder.audit import Memorised
from anyorder.errors import ArgumentError

__all__ = ["exposure_phrase", "plot_ranks"]

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
