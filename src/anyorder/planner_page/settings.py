"""What a page asks: the inputs of a plan in JSON, checked as `ao.plan` checks them, and bounded in cost."""

from dataclasses import dataclass
from typing import Any

from anyorder import checks
from anyorder.errors import ArgumentError
from anyorder.participation.registry import WORDS, order_word
from anyorder.plan.options import SGD, Limits

__all__ = [
    "KNOWN",
    "MAX_SECRET_STEPS",
    "MAX_STEPS",
    "MECHANISMS",
    "ORDERS",
    "Settings",
    "Sweep",
    "field_of",
    "settings_of",
    "sweep_of",
]

MAX_STEPS = 4096
"""Steps of a plan that the page answers; `anyorder plan` has no such limit."""
MAX_SECRET_STEPS = 2048
"""The same for secret orders whose claims are found by mixtures, which take minutes."""
MAX_CELLS = 144

ORDERS = tuple(word for word, (row, _) in WORDS.items() if row.is_on_page)
MECHANISMS = ("auto", "independent", "tree", "blt")
KNOWN = tuple(word for word, (row, _) in WORDS.items() if row.meaning)
"""Orders without secret draws."""
_QUICK = tuple(word for word, (row, _) in WORDS.items() if row.is_quick)
"""Orders without mixtures: of long plans, and of sweeps."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The inputs of a page: options of `ao.plan`.

    Attributes:
        memory: vectors of the model's size that the mechanism may keep; None for any number.
    """

    dataset_size: int
    batch_size: int
    epochs: int
    epsilon: float
    delta: float
    order: str = "shuffled"
    memory: int | None = None
    momentum: float = 0.0

    def __post_init__(self) -> None:
        size = checks.integer("dataset_size", self.dataset_size, low=1, high=10**12)
        checks.integer("batch_size", self.batch_size, low=1, high=size)
        checks.integer("epochs", self.epochs, low=1)
        object.__setattr__(self, "epsilon", checks.positive("epsilon", self.epsilon))
        object.__setattr__(self, "delta", checks.probability("delta", self.delta))
        object.__setattr__(self, "order", order_word(self.order))
        checks.choice("order", self.order, ORDERS)
        if self.memory is not None:
            checks.integer("memory", self.memory, low=0)
        object.__setattr__(self, "momentum", checks.real("momentum", self.momentum, low=0.0))
        most = MAX_STEPS if self.order in _QUICK else MAX_SECRET_STEPS
        if self.steps > most:
            raise ArgumentError(
                f"batch_size must be so large, or epochs so few, that a plan of order {self.order!r} has at most "
                f"{most} steps on this page, got {self.steps}; `anyorder plan` plans longer runs"
            )

    @property
    def steps(self) -> int:
        """Of the whole run: epochs * ceil(dataset_size / batch_size)."""
        return self.epochs * -(-self.dataset_size // self.batch_size)

    @property
    def sampling_probability(self) -> float:
        """Expected batch over data set."""
        return self.batch_size / self.dataset_size

    def arguments(self) -> dict[str, Any]:
        """Of `ao.plan`, without the budget."""
        return {
            "dataset_size": self.dataset_size, "batch_size": self.batch_size, "epochs": self.epochs,
            "delta": self.delta, "order": self.order, "optimizer": SGD(momentum=self.momentum),
            "limits": Limits(memory=self.memory),
        }  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """A sheet of settings: every batch size with every number of epochs.

    Attributes:
        base: the other inputs; its batch_size and epochs stand for nothing.
        batch_sizes, epoch_counts: of the sheet.
        mechanism: of `MECHANISMS`.
        measure: "noise" (noise to batch at the epsilon of base) or "epsilon" (at `ratio`).
        ratio: noise to batch, see `anyorder.planner_page.sweep`.
    """

    base: Settings
    batch_sizes: tuple[int, ...]
    epoch_counts: tuple[int, ...]
    mechanism: str = "blt"
    measure: str = "noise"
    ratio: float = 0.01

    def __post_init__(self) -> None:
        checks.choice("mechanism", self.mechanism, MECHANISMS)
        checks.choice("measure", self.measure, ("noise", "epsilon"))
        object.__setattr__(self, "ratio", checks.positive("ratio", self.ratio))
        for name, values in (("batch_sizes", self.batch_sizes), ("epoch_counts", self.epoch_counts)):
            for value in values:
                checks.integer(name, value, low=1)
        if not 0 < len(self.batch_sizes) * len(self.epoch_counts) <= MAX_CELLS:
            raise ArgumentError(
                f"batch_sizes and epoch_counts must make from 1 to {MAX_CELLS} cells, got "
                f"{len(self.batch_sizes)} x {len(self.epoch_counts)}"
            )
        if self.base.order not in _QUICK:
            raise ArgumentError(
                f"order must be one of {', '.join(_QUICK)} in a sweep, got {self.base.order!r}: the claims of other "
                "secret orders take minutes for each cell; plan them one at a time"
            )


def settings_of(data: Any) -> Settings:
    """The settings in a JSON object. Raises ArgumentError, whose message names the input."""
    return Settings(**_named(data, Settings, {"dataset_size", "batch_size", "epochs", "epsilon", "delta"}))


def sweep_of(data: Any) -> Sweep:
    """The sweep in a JSON object: that of `settings_of` under "base", and the others. Raises ArgumentError."""
    values = _named(data, Sweep, {"base", "batch_sizes", "epoch_counts"})
    base = values["base"]
    if isinstance(base, dict):  # one step an epoch: the cells have their own sizes, which are checked one by one
        base = {**base, "batch_size": base.get("dataset_size"), "epochs": 1}
    values["base"] = settings_of(base)
    for name in ("batch_sizes", "epoch_counts"):
        if not isinstance(values[name], list):
            raise ArgumentError(f"{name} must be a list of whole numbers, got {values[name]!r:.80}")
        values[name] = tuple(values[name])
    return Sweep(**values)


def _named(data: Any, kind: type, needed: set[str]) -> dict[str, Any]:
    known = set(kind.__dataclass_fields__)  # type: ignore[attr-defined]
    if not isinstance(data, dict) or not needed <= data.keys() <= known:
        listed = sorted(data) if isinstance(data, dict) else type(data).__name__
        raise ArgumentError(
            f"a question must be an object with {sorted(needed)}, and others of {sorted(known)}, got {listed!s:.200}"
        )
    return dict(data)


def field_of(message: str) -> str | None:
    """The input that a refusal is about: its first word, where that is the name of one."""
    word = message.replace(":", " ").replace(",", " ").split(" ", 1)[0]
    names = {*Settings.__dataclass_fields__, *Sweep.__dataclass_fields__}
    return {"batch_sizes": "batch_size", "epoch_counts": "epochs"}.get(word, word) if word in names else None
