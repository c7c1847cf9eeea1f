"""The privacy card and tables, for a terminal."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from anyorder import _check
from anyorder.plan import Plan
from anyorder.strategy import Independent, Strategy, Tree

__all__ = ["card", "comparison_table", "describe_strategy", "fact_rows", "facts_panel"]

_NEIGHBOURS = {
    "zero-out": "its gradients replaced by zero",
    "replace-one": "replaced by any other",
    "add-or-remove": "with or without it",
}


def fact_rows(plan: Plan) -> list[tuple[str, str]]:
    """(name, text) rows: what a plan promises, for whom, and at what price."""
    sens = plan.sensitivity
    per_clip = plan.noise_std / plan.clip_norm
    rows = [
        ("privacy", f"epsilon <= {plan.epsilon:.4g} at delta = {plan.delta:g}"),
        ("protects", f"one {plan.unit} ({_NEIGHBOURS[plan.neighbours]})"),
        ("order", plan.participation.describe()),
        ("amplification", "by secret Poisson sampling" if plan.amplified else "none claimed, none needed"),
        ("mechanism", describe_strategy(plan.strategy)),
        ("clipping", f"each {plan.unit}'s gradient to L2 norm {plan.clip_norm:g}; sums divided by {plan.batch_size}"),
    ]
    if plan.mu is not None:
        kind = "exact" if sens.exact else "upper bound"
        rows.append(("sensitivity", f"{sens.value:.5g} clip norms ({kind}); mu = {plan.mu:.5g} (Gaussian DP)"))
    return [
        *rows,
        ("noise", f"std {per_clip:.5g} clip norms on each row of Z (noise multiplier {plan.noise_multiplier:.5g})"),
        ("error", f"{plan.rmse * plan.noise_multiplier:.5g} clip norms in the iterates (root mean square over steps)"),
        ("memory", f"{plan.strategy.state_rows} vectors of the size of the model"),
    ]


def describe_strategy(strategy: Strategy) -> str:
    """One phrase: the kind of strategy and what sets it apart."""
    if isinstance(strategy, Tree):
        completed = f", {sum(strategy.completion)} of them completed" if any(strategy.completion) else ""
        restarts = f"{len(strategy.restarts)} restart(s){completed}" if strategy.restarts else "never restarted"
        return f"binary tree, {strategy.estimator} estimator, {restarts}"
    if isinstance(strategy, Independent):
        return "independent noise at every step"
    return repr(strategy)


def card(plan: Plan, title: str = "privacy card") -> Any:
    """The plan as a rich panel."""
    return facts_panel(title, fact_rows(plan))


def facts_panel(title: str, rows: Iterable[tuple[str, str]], style: str = "cyan") -> Any:
    """(name, text) rows as a rich panel."""
    table = _rich("table").Table.grid(padding=(0, 2))
    table.add_column(justify="right", style="bold")
    table.add_column(overflow="fold")
    plain = _rich("text").Text  # text of a file or of a user is never read as markup
    for name, text in rows:
        table.add_row(plain(name), plain(text))
    return _rich("panel").Panel(table, title=plain(title, style="bold"), border_style=style, expand=False)


def comparison_table(title: str, columns: Mapping[str, str], rows: Iterable[Sequence[str]]) -> Any:
    """A rich table.

    Args:
        columns: heading -> "left" or "right".
        rows: one text for each column.
    """
    table = _rich("table").Table(title=title, title_justify="left")
    for heading, justify in columns.items():
        table.add_column(heading, justify=justify, overflow="fold")
    plain = _rich("text").Text
    for row in rows:
        table.add_row(*(plain(cell) for cell in row))
    return table


def _rich(module: str) -> Any:
    return _check.optional(f"rich.{module}", extra="cli", purpose="printing a privacy card")
