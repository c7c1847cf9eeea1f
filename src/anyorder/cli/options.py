"""Options that commands share."""

from pathlib import Path
from typing import Annotated

import typer

from anyorder.participation.registry import WORDS

__all__ = [
    "COMPLETION", "ESTIMATOR", "MECHANISM", "ORDER", "SELECTION", "Batch", "BudgetFile", "Clip", "Completion", "Delta",
    "Epochs", "Epsilon", "Estimator", "Json", "MechanismName", "Memory", "Momentum", "Noise", "Order", "RestartEvery",
    "Size",
]  # fmt: skip

Json = Annotated[bool, typer.Option("--json", help="One JSON object on stdout, for machines.")]
Epsilon = Annotated[float | None, typer.Option(help="Target epsilon. This or --noise-multiplier.")]
Delta = Annotated[float, typer.Option(help="Target delta.")]
Noise = Annotated[
    float | None,
    typer.Option(help="Noise std over clip norm in one step, as DP-SGD users mean it (for the tree: at each node)."),
]
BudgetFile = Annotated[
    Path | None, typer.Option("--budget", help="Budget of the data set (anyorder budget): entered, or refused, first.")
]
Size = Annotated[int, typer.Option(help="Number of training examples.")]
Batch = Annotated[int, typer.Option(help="Examples in a step; sums of gradients are divided by it.")]
Epochs = Annotated[int, typer.Option(help="Passes over the data.")]
ORDER = (
    "Order of the data: "
    + ", ".join(f"[bold]{word}[/bold] ({row.meaning})" for word, (row, _) in WORDS.items() if row.meaning)
    + "; or secret random sampling, by this package's sampler: "
    + ", ".join(f"[bold]{word}[/bold]" for word, (row, _) in WORDS.items() if not row.meaning)
    + "."
)
MECHANISM = (
    "Noise: [bold]auto[/bold] (least error), [bold]tree[/bold] (DP-FTRL), [bold]independent[/bold] (DP-SGD without "
    "amplification), [bold]poisson[/bold] (DP-SGD with amplification), a name from plan --compare, or a kind and its "
    "size: dense, 'banded, 64 bands', 'blt, 5 buffers'."
)
ESTIMATOR = "Tree: [bold]full[/bold], [bold]online[/bold] or [bold]vanilla[/bold] estimates of prefix sums."
RESTART = "Tree: a fresh tree every so many epochs; 0 for never. Default: what gives least error."
SELECTION = (
    "Rows of sparse tables that get noise, chosen privately at each step: [bold]counts:THRESHOLD[/bold], "
    "[bold]top:ROWS[/bold] or [bold]uniform:ROWS[/bold]; the first two with [bold]:SHARE[/bold] of the budget behind."
)
COMPLETION = "Tree: complete each tree before a restart: [bold]auto[/bold], [bold]on[/bold] or [bold]off[/bold]."
Order = Annotated[str | None, typer.Option(help=ORDER + " Default: shuffled; with mechanism poisson, poisson.")]
MechanismName = Annotated[str, typer.Option(help=MECHANISM)]
Estimator = Annotated[str, typer.Option(help=ESTIMATOR)]
RestartEvery = Annotated[int | None, typer.Option(help=RESTART)]
Completion = Annotated[str, typer.Option(help=COMPLETION)]
Momentum = Annotated[float, typer.Option(help="Of SGD; the mechanism is fitted to it.")]
Memory = Annotated[
    int | None, typer.Option(help="Vectors of the model's size that the mechanism may keep. Default: any number.")
]
Clip = Annotated[float, typer.Option(help="L2 bound on one example's gradient.")]
