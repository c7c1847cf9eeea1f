"""Which order to ask for: plans for several orders at one budget, side by side."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from anyorder import checks
from anyorder.errors import ArgumentError, MissingDependencyError, PlanError
from anyorder.formats import html_table
from anyorder.formatting import counted, rounded_up
from anyorder.participation.registry import WORDS, words_with
from anyorder.patterns import Needs
from anyorder.plan import pictures
from anyorder.plan.options import OrderOptions
from anyorder.plan.plan import Plan
from anyorder.strategy.registry import in_words

ANY = tuple(word for word, (row, _) in WORDS.items() if row.is_compared)
"""What "any" stands for, in the order in which they are planned. Others are asked for by their names."""


@dataclass(frozen=True)
class OrderRow:
    """One order in a comparison.

    Attributes:
        order: its word.
        plan: for it, at the common budget.
    """

    order: str
    plan: Plan

    @cached_property
    def error(self) -> float:
        """Noise of one coordinate of the weights during training, root mean square over steps, in clip norms:
        `Plan.noise_error`.
        """
        return self.plan.noise_error(sums=not self.plan.reaches_iterates)

    @property
    def known_epsilon(self) -> float | None:
        """The epsilon if the batches became known; None where they may be."""
        return self.plan.known_epsilon

    @property
    def needs(self) -> Needs:
        """Return what the order needs."""
        return self.plan.participation.needs

    def to_dict(self) -> dict[str, Any]:
        """JSON values."""
        return {
            "order": self.order, "mechanism": self.plan.strategy.describe(), "error": self.error,
            "epsilon": self.plan.epsilon, "known_epsilon": self.known_epsilon, "vectors": self.plan.strategy.state_rows,
            "noise_multiplier": self.plan.noise_multiplier, "needs": self.needs._asdict(),
        }  # fmt: skip


@dataclass(frozen=True, repr=False)
class OrderComparison:
    """Plans for several orders at one (epsilon, delta) and expected batch size, the least error first.

    Attributes:
        rows: of the orders that were planned.
        refused: (order, reason) of those of "any" that do not fit what was asked.
    """

    rows: tuple[OrderRow, ...]
    refused: tuple[tuple[str, str], ...] = ()

    @property
    def best(self) -> Plan:
        """The plan of least error."""
        return self.rows[0].plan

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of the columns of `texts`."""
        return ("order", "mechanism", "error", "vectors", "if known", "data", "batches")

    @property
    def texts(self) -> list[tuple[str, ...]]:
        """The rows in words; "if known" is the epsilon if the batches became known, where they must stay secret."""
        return [
            (
                row.order, in_words(row.plan.strategy), f"{row.error:.5g}", str(row.plan.strategy.state_rows),
                "" if row.known_epsilon is None else rounded_up(row.known_epsilon, 3), row.needs.access,
                ("secret, " if row.needs.secrecy else "") + row.needs.batches,
            )
            for row in self.rows
        ]  # fmt: skip

    @property
    def title(self) -> str:
        """Return what all rows share."""
        plan = self.best
        steps = f"{counted(plan.n, 'step')} of {plan.batch_size} on average"
        return f"epsilon {rounded_up(plan.epsilon)} at delta {rounded_up(plan.delta, 6)}, {steps}"

    def to_dict(self) -> dict[str, Any]:
        """JSON values."""
        return {"orders": [row.to_dict() for row in self.rows], "refused": dict(self.refused)}

    def __str__(self) -> str:
        table = [self.columns, *self.texts]
        widths = [max(len(row[i]) for row in table) for i in range(len(self.columns))]
        lines = [
            "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in table
        ]
        return "\n".join([self.title, *lines, *(f"{order}: not planned: {why}" for order, why in self.refused)])

    __repr__ = __str__

    def plot(self) -> Any:
        """The error of each order's plan, the least on top, as a figure of matplotlib; a notebook shows it.

        Raises: MissingDependencyError without matplotlib.
        """
        names = [f"{row.order}\n{in_words(row.plan.strategy)}" for row in self.rows]
        return pictures.bars(names, [row.error for row in self.rows], "noise in the model (clip norms)", self.title)

    def _repr_html_(self) -> str:
        refused = [("not planned", f"{order}: {why}") for order, why in self.refused]
        return html_table([("at", self.title), *refused]) + html_table(self.texts, self.columns)


def compared(
    plan: Callable[..., Plan],
    order: Any,
    arguments: dict[str, Any],
    progress: Callable[[str], None] | None = None,
) -> OrderComparison:
    """`anyorder.compare`, whose docstring says it all, by the planner's function for one order."""
    rows, refused = [], []
    every = _all_of(order)
    for one in _listed(order) if every is None else every:
        word = str(one.order)
        if progress is not None:
            progress(word)
        try:
            rows.append(OrderRow(word, plan(order=one, **arguments)))
        except (PlanError, MissingDependencyError) as problem:
            if every is None:
                raise
            refused.append((word, str(problem)))
    if not rows:
        told = "; ".join(f"{word}: {why}" for word, why in refused)
        raise PlanError(f"no order can be planned with what was asked: {told}")
    return OrderComparison(tuple(sorted(rows, key=lambda row: row.error)), tuple(refused))


_FOR = {name: words_with(name) for name in ("cycle", "max_batch_size", "method")}
"""Option -> the orders that have it."""


def with_options(word: str, **options: Any) -> OrderOptions:
    """The order with those of the options that it has."""
    return OrderOptions(word, **{name: value for name, value in options.items() if word in _FOR.get(name, (word,))})


def _all_of(order: Any) -> list[OrderOptions] | None:
    """What "any" stands for, with options or without; None where orders are listed."""
    if isinstance(order, OrderOptions) and order.order == "any":
        options = {name: value for name, value in vars(order).items() if name != "order"}
        return [with_options(word, **options) for word in ANY]
    return [OrderOptions(word) for word in ANY] if order == "any" else None


def _listed(order: Any) -> list[OrderOptions]:
    listed = [order] if isinstance(order, (str, OrderOptions)) else list(order)
    if not listed:
        raise ArgumentError("order must be 'any', or a list of at least one order in words, got an empty list")
    found = []
    for one in listed:
        asked = one if isinstance(one, OrderOptions) else OrderOptions(one)
        word = asked.order.replace("_", "-") if isinstance(asked.order, str) else asked.order
        if word == "any":
            raise ArgumentError(f"order must be 'any' alone, which is all of them, or a list without it, got {order!r}")
        checks.choice("order", word, set(WORDS))  # type: ignore[arg-type]
        found.append(replace(asked, order=word))
    return list(dict.fromkeys(found))
