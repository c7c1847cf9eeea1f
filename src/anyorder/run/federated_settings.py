"""What a simulated federation is asked to do, with defaults that suit each data set."""

from dataclasses import asdict, dataclass
from typing import Any

from anyorder import checks
from anyorder.errors import ArgumentError
from anyorder.federated import CheckIn, Diurnal
from anyorder.federated.cohorts import Availability, UniformAvailability
from anyorder.run.planning import mechanism_words

__all__ = ["FederatedSettings"]

_IMAGES: dict[str, Any] = {
    "model": "cnn", "users": 1000, "rounds": 100, "report_goal": 100, "clip_norm": 0.3, "client_lr": 0.2,
    "client_batch": 10, "server_lr": 1.0,
}  # fmt: skip
_DEFAULTS: dict[str, dict[str, Any]] = {
    "digits": {
        "users": 300, "rounds": 100, "report_goal": 30, "clip_norm": 0.1, "client_lr": 0.3, "client_batch": 8,
        "server_lr": 1.5,
    },
    "mnist": _IMAGES,
    "fashion_mnist": _IMAGES,
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class FederatedSettings:
    """One simulated federation; `FederatedSettings.of` fills in what suits the data set.

    Attributes:
        dataset, data_dir, model, users, user_key, classes_per_user: see `anyorder.run.federated_data.federation`.
        epsilon, noise_multiplier, delta: the budget of one user; exactly one of the first two. The multiplier is the
            std of the noise in one round over the clip norm.
        rounds: of the plan.
        report_goal: users whose messages a round adds; the constant that sums are divided by.
        clip_norm: L2 bound on one user's message: its change of the whole model.
        mechanism: see `anyorder.run.planning.mechanism_words`.
        min_separation: rounds between two of a user at least; None for what availability and population can keep.
        max_participations: rounds of a user at most; None for as many as fit.
        availability: "uniform", "diurnal" or "check-in".
        available: uniform: probability that a device is there; diurnal: at its peak, a fifth of that at its lowest.
        timer_hours: check-in: of the timer on a device; it checks in half as long after it, on average.
        round_hours: diurnal and check-in: from one round to the next.
        over_selection, drop_out: see `anyorder.federated.simulate`.
        client_lr, client_batch, local_epochs, max_examples: see `anyorder.federated.LocalTraining`.
        server_optimizer: "sgd", "ftrl" or "adam".
        server_lr, momentum: of the server's optimizer; Adam's first beta.
        seed: of initial weights, the split and all chance of the simulation; never of the noise.

    What has no effect beside the others is None: `of` refuses it where it is given.
    """

    dataset: str
    data_dir: str | None = None
    model: str | None = "mlp"
    users: int | None = 100
    user_key: str | None = None
    classes_per_user: int | None = 2
    epsilon: float | None = None
    noise_multiplier: float | None = None
    delta: float = 1e-5
    rounds: int = 100
    report_goal: int = 20
    clip_norm: float = 0.3
    mechanism: str = "auto"
    min_separation: int | None = None
    max_participations: int | None = None
    availability: str = "uniform"
    available: float | None = 1.0
    timer_hours: float | None = 24.0
    round_hours: float | None = 1.0
    over_selection: float = 1.3
    drop_out: float = 0.1
    client_lr: float = 0.1
    client_batch: int = 16
    local_epochs: int = 1
    max_examples: int = 256
    server_optimizer: str = "sgd"
    server_lr: float = 1.0
    momentum: float = 0.9
    seed: int = 0

    @classmethod
    def of(cls, dataset: str = "digits", **given: Any) -> "FederatedSettings":
        """Settings for a data set: what is given and not None, else the data set's defaults; epsilon 8 by itself."""
        chosen = {name: value for name, value in given.items() if value is not None}
        if "epsilon" not in chosen and "noise_multiplier" not in chosen:
            chosen["epsilon"] = 8.0
        for name, why in _idle(dataset, chosen.get("user_key"), chosen.get("availability", "uniform")).items():
            if name in chosen:
                raise ArgumentError(f"{name} has no effect {why}, got {chosen[name]!r}: leave it out")
        return cls(dataset=dataset, **{**_DEFAULTS.get(dataset, {}), **chosen})

    def __post_init__(self) -> None:
        for name in _idle(self.dataset, self.user_key, self.availability):
            object.__setattr__(self, name, None)
        if self.users is not None:
            checks.integer("users", self.users, low=1)
        checks.integer("rounds", self.rounds, low=1)
        checks.integer("report_goal", self.report_goal, low=1)
        checks.integer("seed", self.seed, low=0, high=2**63 - 1)
        checks.positive("server_lr", self.server_lr)
        checks.choice("availability", self.availability, {"uniform", "diurnal", "check-in"})
        checks.choice("server_optimizer", self.server_optimizer, {"sgd", "ftrl", "adam"})
        self.who_is_there()  # refuses its numbers

    def who_is_there(self) -> Availability:
        """The model of availability."""
        match self.availability:
            case "uniform":
                return UniformAvailability(_number(self.available))
            case "diurnal":
                peak = _number(self.available)
                return Diurnal(peak, peak / 5, round_hours=_number(self.round_hours))
            case _:
                timer = _number(self.timer_hours)
                return CheckIn(timer, timer / 2, _number(self.round_hours))

    @property
    def noise(self) -> dict[str, Any]:
        """The mechanism in words."""
        return mechanism_words(self.mechanism)

    def to_dict(self) -> dict[str, Any]:
        """JSON values; `FederatedSettings(**values)` makes equal settings."""
        return asdict(self)


def _idle(dataset: str, user_key: str | None, availability: str) -> dict[str, str]:
    """{setting: where it has no effect}."""
    found: dict[str, str] = {}
    if ":" in dataset:
        own = f"with dataset {dataset!r}, which brings users and a model of its own"
        found |= dict.fromkeys(("data_dir", "model", "users", "user_key", "classes_per_user"), own)
    elif user_key is not None:
        found |= dict.fromkeys(("users", "classes_per_user"), "with user_key, which says whose a row is")
    if availability != "check-in":
        found["timer_hours"] = f"with availability {availability!r}, only with 'check-in'"
    else:
        found["available"] = "with availability 'check-in', where timers say who is there"
    if availability == "uniform":
        found["round_hours"] = "with availability 'uniform', only with 'diurnal' and 'check-in'"
    return found


def _number(value: float | None) -> float:
    if value is None:
        raise ArgumentError("a number that availability needs must be given, got None")
    return value
