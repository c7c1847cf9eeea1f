"""The privacy card and tables, for a terminal."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from anyorder import checks
from anyorder.formats import printable
from anyorder.plan.certificate import Certificate
from anyorder.plan.plan import Plan

__all__ = ["card", "comparison_table", "facts_panel"]


def card(claim: Plan | Certificate, title: str = "privacy card") -> Any:
    """A plan, or the certificate of its run, as a rich panel."""
    return facts_panel(title, claim.facts())


def facts_panel(title: str, rows: Iterable[tuple[str, str]], style: str = "cyan") -> Any:
    """(name, text) rows as a rich panel."""
    table = _rich("table").Table.grid(padding=(0, 2))
    table.add_column(justify="right", style="bold")
    table.add_column(overflow="fold")
    plain = _rich("text").Text  # text of a file or of a user is never read as markup
    for name, text in rows:
        table.add_row(plain(printable(name)), plain(printable(text)))
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
        table.add_row(*(plain(printable(cell)) for cell in row))
    return table


def _rich(module: str) -> Any:
    return checks.optional(f"rich.{module}", extra="cli", purpose="printing a privacy card")
