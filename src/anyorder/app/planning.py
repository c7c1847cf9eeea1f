"""Plans from the words of a command line, and the comparison of mechanisms at one budget."""

import contextlib
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from anyorder.accounting.poisson import poisson_epsilon
from anyorder.app.cards import comparison_table
from anyorder.errors import ArgumentError, MissingDependencyError
from anyorder.formatting import rounded_up
from anyorder.optimize import choose
from anyorder.optimize.candidates import kind_in
from anyorder.participation import PoissonSampling
from anyorder.plan.comparison import OrderComparison
from anyorder.plan.options import from_flat
from anyorder.plan.plan import Plan
from anyorder.plan.planner import plan, with_budget
from anyorder.strategy import Independent, Strategy
from anyorder.strategy.base import Combination

__all__ = [
    "Row",
    "best_of_each_kind",
    "compare",
    "comparison",
    "make_plan",
    "mechanism_words",
    "noise_lines",
    "order_needs",
    "order_table",
    "orders_in",
    "poisson_claim",
    "with_budget",
]


_CALIBRATED = 3  # mechanisms of a secret order, whose claims take long


def mechanism_words(
    mechanism: str = "auto", estimator: str = "full", restart_every: int | None = None, completion: str = "auto"
) -> dict[str, Any]:
    """The options of a mechanism that say something, for `make_plan`: those of the tree where they are not the default.

    Args:
        mechanism: "auto" (least error), "poisson" (independent noise and secret sampling: amplified DP-SGD), "tree",
            "independent", a kind or full name from `anyorder.optimize.choose` ("blt", "blt, 2 buffers, rescaled"; a
            kind stands for the best of it), or any kind with its size: "dense", "banded, 64 bands", "blt, 5 buffers",
            "banded low rank, 16 bands, 8 rank".
        estimator: "vanilla", "online" or "full"; tree only.
        restart_every: a fresh tree every so many epochs, 0 for never, None for the best; tree only.
        completion: "on", "off" or "auto"; tree only.
    """
    said: dict[str, Any] = {"mechanism": mechanism}
    if estimator != "full":
        said["estimator"] = estimator
    if restart_every is not None:
        said["restart_every"] = restart_every
    if completion != "auto":
        said["completion"] = completion
    return said


def orders_in(words: str | None) -> str | list[str] | None:
    """The orders of an option: "any", or several between commas; None for one, or none."""
    if words is None or (words != "any" and "," not in words):
        return None
    return words if words == "any" else [word.strip() for word in words.split(",")]


def make_plan(**options: Any) -> Plan:
    """`anyorder.plan` of options side by side: `order`, `cycle`, `momentum`, `mechanism`, `estimator`, `memory`, .."""
    return plan(**from_flat(options))


def poisson_claim(noise_multiplier: float, batch_size: int, dataset_size: int, n: int, delta: float) -> float:
    """The epsilon that an accountant for Poisson sampling gives for n steps at q = batch_size / dataset_size.

    It applies to secret Poisson sampling only. Many programs print it for shuffled and sequential loaders.
    """
    return poisson_epsilon(noise_multiplier, batch_size / dataset_size, n, delta)


def noise_lines(chosen: Plan) -> dict[str, Plan]:
    """The plan by its mechanism's name, and independent noise in the same order and budget, for a plot."""
    name = type(chosen.strategy).__name__
    if isinstance(chosen.strategy, Independent):
        return {"independent noise": chosen}
    independent = with_budget(replace(chosen, strategy=Independent(chosen.n)), epsilon=chosen.epsilon)
    return {f"this plan ({name})": chosen, "independent noise, same epsilon and order": independent}


@dataclass(frozen=True)
class Row:
    """One mechanism in a comparison at one budget.

    Attributes:
        ratio: error over the certified lower bound of all mechanisms without sampling; None with sampling.
    """

    name: str
    plan: Plan
    ratio: float | None

    @cached_property
    def error(self) -> float:
        """Noise of one coordinate, root mean square over the weights during training, in clip norms, for learning rate
        and batch 1.
        """
        return self.plan.noise_error()

    @property
    def last(self) -> float:
        """The same in the last iterate."""
        return float(self.plan.noise_profile()[-1])

    def to_dict(self) -> dict[str, Any]:
        """JSON values."""
        chosen = self.plan
        return {
            "name": self.name, "mechanism": chosen.strategy.describe(), "error": self.error,
            "ratio": self.ratio, "last": self.last, "vectors": chosen.strategy.state_rows, "epsilon": chosen.epsilon,
            "order": chosen.participation.describe(),
        }  # fmt: skip


def compare(chosen: Plan, memory: int | None = None) -> list[Row]:
    """Every mechanism of `anyorder.optimize.choose` that fits a plan, in its order, at its epsilon; least error first.

    With a memory, those that keep at most so many vectors of the model's size.

    Under secret draws the three that are estimated to be best, and independent noise: each is calibrated by its bound.

    A row of DP-SGD with secret Poisson sampling is added, for reference, where its accounting is installed.
    """
    if chosen.participation.draw_probability is not None:
        raise ArgumentError("a comparison needs an order other than 'poisson', which allows independent noise only")
    rows: dict[Strategy, Row] = {}
    combined = chosen.selection is not None  # whose noise is of the chosen rows alone
    secret = chosen.participation.secret  # what is fitted then depends on the claim
    claim: dict[str, Any] = {"epsilon": chosen.epsilon, "delta": chosen.delta} if secret else {}
    for candidate in choose(chosen.workload, chosen.participation, 0 if combined else memory, **claim):
        if combined and not isinstance(candidate.strategy, Combination):
            continue
        if secret and len(rows) >= _CALIBRATED and type(candidate.strategy) is not Independent:
            continue
        method = chosen.method if candidate.strategy == chosen.strategy else None  # what is best for one fits no other
        plan = with_budget(replace(chosen, strategy=candidate.strategy, method=method), epsilon=chosen.epsilon)
        rows.setdefault(candidate.strategy, Row(candidate.name, plan, candidate.ratio))  # sizes may share an optimum
    found = list(rows.values())
    with contextlib.suppress(MissingDependencyError):
        found.append(Row("poisson", _sampled(chosen), None))
    return sorted(found, key=lambda row: row.error)


def comparison(rows: list[Row]) -> Any:
    """The rows as a rich table."""
    columns = dict.fromkeys(("mechanism", "error", "over bound", "last step", "vectors", "epsilon"), "right")
    texts = [
        (
            row.name + ("  (secret sampling only)" if row.plan.participation.draw_probability is not None else ""),
            f"{row.error:.5g}",
            "" if row.ratio is None else f"{row.ratio:.3f}", f"{row.last:.5g}",
            str(row.plan.strategy.state_rows), rounded_up(row.plan.epsilon),
        )
        for row in rows
    ]  # fmt: skip
    title = (
        "error: noise in the weights during training, root mean square over steps, in clip norms\n"
        "over bound: over a certified lower bound of all mechanisms without sampling"
    )
    if any(row.plan.selection is not None for row in rows):
        title += (
            "\nwith a selection: of a row that is chosen at every step; one that is chosen seldom has the least noise "
            "with independent noise, which 'auto' takes"
        )
    return comparison_table(title, {**columns, "mechanism": "left"}, texts)


def order_table(compared: OrderComparison) -> Any:
    """Orders side by side as a rich table."""
    right = {"error", "vectors", "if known"}
    title = (
        f"{compared.title}\nerror: noise in the weights during training, root mean square over steps, in clip norms\n"
        "if known: the epsilon if the batches became known; 'secret' ones must never be"
    )
    columns = {name: "right" if name in right else "left" for name in compared.columns[:5]}
    return comparison_table(title, columns, [row[:5] for row in compared.texts])


def order_needs(compared: OrderComparison) -> list[str]:
    """What each order needs, a line each: too wide for the table on most screens."""
    return [f"{order} needs: {access}; batches: {batches}" for order, *_, access, batches in compared.texts]


def best_of_each_kind(rows: list[Row]) -> dict[str, Plan]:
    """The row of least error of each kind of mechanism, for a plot."""
    best: dict[str, Plan] = {}
    for row in sorted(rows, key=lambda row: row.error):
        best.setdefault(kind_in(row.name), row.plan)
    return best


def _sampled(chosen: Plan) -> Plan:
    """Amplified DP-SGD with as many steps of the same expected size."""
    assert chosen.dataset_size is not None
    order = PoissonSampling(chosen.n, chosen.batch_size / chosen.dataset_size)
    strategy = Independent(chosen.n)
    base = replace(chosen, participation=order, strategy=strategy, neighbours="add-or-remove", method=None)
    return with_budget(base, epsilon=chosen.epsilon)
