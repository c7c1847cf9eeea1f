"""A page that needs no server: the answers on a stated grid of settings, made by the same functions, in one file."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from anyorder import checks
from anyorder.app.planner_page.answers import (
    KNOWN,
    MECHANISMS,
    SAMPLED,
    Piece,
    PlanQuestion,
    Sweep,
    answer,
    attacks_on,
    bound_of,
    cells,
    field_of,
    sampled_claim,
    unit_rows,
)
from anyorder.app.planner_page.server import document
from anyorder.errors import AnyorderError, ArgumentError
from anyorder.plan.options import default_delta
from anyorder.plan.planner import plan

__all__ = ["MAX_BYTES", "Grid", "export"]

MAX_BYTES = 2_000_000
"""Of an exported page."""


@dataclass(frozen=True, kw_only=True)
class Grid:
    """The settings that an exported page answers: all combinations. Its sliders have these stops alone.

    Attributes:
        deltas: none for a tenth of one over the data set's size, rounded down to one digit.
        orders: of "shuffled", "fixed", "sequential" and "poisson".
        memories: vectors that a mechanism may keep, None for any number.
        ratios: noise to batch, of the sweeps of epsilon.
    """

    dataset_size: int = 60000
    batch_sizes: tuple[int, ...] = (250, 500, 1000, 2000, 4000)
    epoch_counts: tuple[int, ...] = (1, 2, 5, 10, 20)
    epsilons: tuple[float, ...] = (0.5, 1.0, 2.0, 4.0, 8.0)
    deltas: tuple[float, ...] = ()
    orders: tuple[str, ...] = ("shuffled", "fixed", "poisson")
    memories: tuple[int | None, ...] = (0, 4, None)
    ratios: tuple[float, ...] = (1e-3, 2e-3, 5e-3, 0.01, 0.02)
    momentum: float = 0.0

    def __post_init__(self) -> None:
        if self.deltas == ():
            size = checks.integer("dataset_size", self.dataset_size, low=1)
            object.__setattr__(self, "deltas", (default_delta(size),))
        for name in ("batch_sizes", "epoch_counts", "epsilons", "deltas", "orders", "memories", "ratios"):
            values = getattr(self, name)
            if not isinstance(values, tuple) or not values:
                raise ArgumentError(f"{name} must be a tuple of at least one value, got {values!r}")
        for order in self.orders:
            checks.choice("orders", order, (*KNOWN, "poisson"))
        for name, check in (("epsilons", checks.positive), ("deltas", checks.probability), ("ratios", checks.positive)):
            object.__setattr__(self, name, tuple(check(name, value) for value in getattr(self, name)))
        for batch in self.batch_sizes:
            for epochs in self.epoch_counts:
                checks.integer("batch_sizes", batch, low=1, high=self.dataset_size)
                checks.integer("epoch_counts", epochs, low=1)

    @property
    def known(self) -> tuple[str, ...]:
        """The orders without secret draws."""
        return tuple(order for order in self.orders if order in KNOWN)

    def stated(self) -> str:
        """The grid in words, as the page says it."""
        lists = (
            ("batch sizes", self.batch_sizes), ("epochs", self.epoch_counts), ("epsilons", self.epsilons),
            ("deltas", self.deltas), ("orders", self.orders), ("memories", self.memories),
            ("noise to batch", self.ratios),
        )  # fmt: skip
        told = "; ".join(f"{name} {', '.join(_word(value) for value in values)}" for name, values in lists)
        return f"Computed by anyorder beforehand, for {self.dataset_size} examples, momentum {self.momentum:g}: {told}."


def _word(value: Any) -> str:
    return "any" if value is None else value if isinstance(value, str) else f"{value:g}"


def export(path: str | Path, grid: Grid, progress: Callable[[int, int], None] = lambda done, whole: None) -> int:
    """Write the page, which loads nothing and asks nobody; returns its size in bytes.

    Args:
        progress: called with the pieces of work that are done, and with all of them.
    Raises: ArgumentError for a grid whose page would be above `MAX_BYTES`; nothing is written then.
    Cost: the fits of each batch size, number of epochs, order and memory, seconds each, kept on disk; with "poisson"
        also some seconds for each batch size, number of epochs and epsilon.
    """
    text = document(answers_of(grid, progress)).encode()
    if len(text) > MAX_BYTES:
        raise ArgumentError(
            f"the grid must make a page of at most {MAX_BYTES} bytes, got {len(text)}: give fewer values"
        )
    Path(path).write_bytes(text)
    return len(text)


def answers_of(grid: Grid, progress: Callable[[int, int], None] = lambda done, whole: None) -> dict[str, Any]:
    """All that the page holds, as JSON values by the names that its scripts know."""
    found: dict[str, Any] = {name: {} for name in ("known", "sigmas", "sampled", "claims", "sweeps")}
    work = list(_work(grid))
    for done, (part, name, compute) in enumerate(work):
        progress(done, len(work))
        key, piece = "|".join(map(_key, name)), compute()
        if part == "sweeps":
            found[part].setdefault(key, {}).update(piece)
        else:
            found[part][key] = piece
    progress(len(work), len(work))
    return {**found, "choices": _choices(grid), "start": _start(grid), "stated": grid.stated()}


def _key(value: Any) -> str:
    """As the page's scripts write it."""
    if value is None or isinstance(value, str):
        return value or ""
    return _number(value)


def _number(value: float) -> str:
    """A number as JavaScript's String() has it."""
    if value == int(value) and abs(value) < 1e21:
        return str(int(value))
    text = repr(float(value))
    if "e" not in text:
        return text
    digits, power = text.split("e")
    exponent = int(power)
    if -7 < exponent < 0:  # which Python writes with an exponent from 1e-5 on, JavaScript from 1e-7
        whole = digits.replace(".", "").rstrip("0")
        return f"0.{'0' * (-exponent - 1)}{whole}"
    return f"{digits.removesuffix('.0')}e{'+' if exponent > 0 else '-'}{abs(exponent)}"


_Work = tuple[str, tuple[Any, ...], Callable[[], Any]]


def _work(grid: Grid) -> Iterator[_Work]:
    """(part, key, what computes it) for all that the page holds; all of one place together, as its fits are large."""
    places = list(product(grid.batch_sizes, grid.epoch_counts))
    budgets = list(product(grid.epsilons, grid.deltas))
    for budget in budgets if grid.known else ():
        yield "sigmas", budget, partial(_sigma, grid, *budget)
    for place, order, memory in product(places, grid.known, grid.memories):
        yield "known", (order, *place, memory), partial(_fits, grid, order, *place, memory)
        for budget in budgets:
            key = (order, *place, memory, *budget)
            yield "claims", key, partial(_claims, grid, *key)
        for mechanism in MECHANISMS:
            yield from _of_sheets(grid, place, mechanism, order, memory)
    for place in places if "poisson" in grid.orders else ():
        for budget in budgets:
            yield "sampled", (*place, *budget), partial(_poisson, grid, *place, *budget)
        yield from _of_sheets(grid, place, MECHANISMS[0], "poisson", None)


def _of_sheets(grid: Grid, place: tuple[int, int], mechanism: str, order: str, memory: int | None) -> Iterator[_Work]:
    """This place in each sheet that it is in."""
    for delta, (measure, values) in product(grid.deltas, (("noise", grid.epsilons), ("epsilon", grid.ratios))):
        for value in values:
            sheet = (mechanism, measure, order, memory, delta, value)
            yield "sweeps", sheet, partial(_cell, grid, place, *sheet)


def _settings(grid: Grid, **others: Any) -> PlanQuestion:
    first = {"epsilon": grid.epsilons[0], "delta": grid.deltas[0]}
    return PlanQuestion(**{**first, "dataset_size": grid.dataset_size, "momentum": grid.momentum, **others})


def _refused(problem: AnyorderError) -> Piece:
    return {"refused": {"message": str(problem), "field": field_of(str(problem))}}


def _fits(grid: Grid, order: str, batch: int, epochs: int, memory: int | None) -> Piece:
    """Every mechanism at sigma 1."""
    try:
        units = unit_rows(_settings(grid, order=order, batch_size=batch, epochs=epochs, memory=memory))
    except AnyorderError as problem:
        return _refused(problem)
    rule = units[0].plan.participation
    rows = [
        [unit.name, unit.error, unit.last, unit.ratio, unit.plan.strategy.state_rows, unit.cost,
         unit.plan.noise_multiplier]
        for unit in units
    ]  # fmt: skip
    return {
        "steps": rule.n,
        "order": rule.describe(),
        "needs": str(rule.needs),
        "bound": bound_of(units),
        "rows": rows,
    }


def _sigma(grid: Grid, epsilon: float, delta: float) -> Piece:
    """Of all known orders: Gaussian DP with mu = 1 / sigma, whatever the order."""
    whole = _settings(grid, order="fixed", batch_size=grid.dataset_size, epochs=1, epsilon=epsilon, delta=delta)
    found = plan(epsilon=epsilon, mechanism="independent", **whole.arguments())
    return {"sigma": found.sigma, "epsilon": found.epsilon, "attacks": attacks_on(found)}


def _poisson(grid: Grid, batch: int, epochs: int, epsilon: float, delta: float) -> Piece:
    """The answer for secret Poisson sampling, and its row in the tables of known orders."""
    try:
        asked = _settings(grid, order="poisson", batch_size=batch, epochs=epochs, epsilon=epsilon, delta=delta)
        (found,) = list(answer(asked))
        return {"plan": found, "row": {**found["rows"][0], "name": SAMPLED, "best": False, "reference": True}}
    except AnyorderError as problem:
        return _refused(problem)


def _claims(
    grid: Grid, order: str, batch: int, epochs: int, memory: int | None, epsilon: float, delta: float
) -> dict[int, float]:
    """Row -> what a Poisson accountant would print, for the best mechanism and for independent noise."""
    try:
        units = unit_rows(_settings(grid, order=order, batch_size=batch, epochs=epochs, memory=memory))
        sigma = _sigma(grid, epsilon, delta)["sigma"]
        plain = [i for i, unit in enumerate(units) if unit.name == "independent"]
        return {
            i: sampled_claim(sigma * units[i].plan.noise_multiplier, batch, grid.dataset_size, units[i].plan.n, delta)
            for i in {0, *plain}
        }
    except AnyorderError:
        return {}  # refused, which "known" says, or without the accountant


def _cell(
    grid: Grid, place: tuple[int, int], mechanism: str, measure: str, order: str, memory: int | None, delta: float,
    value: float,
) -> dict[str, Piece]:  # fmt: skip
    """One place of a sweep, by "batch|epochs"."""
    budget = {"epsilon": value} if measure == "noise" else {}
    base = _settings(grid, order=order, batch_size=grid.dataset_size, epochs=1, memory=memory, delta=delta, **budget)
    batch, epochs = place
    asked = Sweep(
        base=base, batch_sizes=(batch,), epoch_counts=(epochs,), mechanism=mechanism, measure=measure,
        ratio=value if measure == "epsilon" else grid.ratios[0],
    )  # fmt: skip
    names = ("steps", "name", "error", "ratio", "noise_multiplier", "epsilon", "refused")
    (cell,) = cells(asked)
    return {f"{batch}|{epochs}": {name: cell[name] for name in names if name in cell}}


def _choices(grid: Grid) -> dict[str, Any]:
    return {
        "dataset_size": [grid.dataset_size], "batch_size": sorted(grid.batch_sizes),
        "epochs": sorted(grid.epoch_counts),
        "epsilon": sorted(grid.epsilons), "delta": sorted(grid.deltas, reverse=True), "order": list(grid.orders),
        "memory": sorted(m for m in grid.memories if m is not None) + ([None] if None in grid.memories else []),
        "momentum": [grid.momentum], "ratio": sorted(grid.ratios),
    }  # fmt: skip


def _start(grid: Grid) -> dict[str, Any]:
    """The middle of the grid."""
    choices = _choices(grid)
    middle = {name: choices[name][len(choices[name]) // 2] for name in ("batch_size", "epochs", "epsilon", "ratio")}
    first = {name: choices[name][0] for name in ("dataset_size", "delta", "order", "momentum")}
    return {**middle, **first, "memory": choices["memory"][-1], "mechanism": Sweep.mechanism}
