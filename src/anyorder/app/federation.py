"""A simulated federation, from the name of a data set to a folder that says what was done."""

import time
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from math import ceil
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from anyorder import checks
from anyorder.app import data as datasets
from anyorder.app import folder, session
from anyorder.app import job as models
from anyorder.app import report as report_file
from anyorder.app.charts import plot_accuracy, plot_noise
from anyorder.app.job import Observer, helpers
from anyorder.app.planning import make_plan, mechanism_words, noise_lines
from anyorder.app.text import load_function
from anyorder.errors import ArgumentError
from anyorder.federated import CheckIn, Diurnal, LocalTraining, Server, assist, simulate
from anyorder.federated.cohorts import Availability, UniformAvailability, cohort_size
from anyorder.federated.simulation import Simulation
from anyorder.formatting import counted, rounded_up
from anyorder.participation import MinSeparation
from anyorder.plan.plan import Plan
from anyorder.release.weights import digests
from anyorder.sampling.samplers import permutation_of
from anyorder.training.optimizers import FTRL

# ----------------------------------------------------------------------------------------------------
# What a simulated federation is asked to do, with defaults that suit each data set.


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
        dataset, data_dir, model, users, user_key, classes_per_user: see `anyorder.app.federation.federation`.
        epsilon, noise_multiplier, delta: the budget of one user; exactly one of the first two. The multiplier is the
            std of the noise in one round over the clip norm.
        rounds: of the plan.
        report_goal: users whose messages a round adds; the constant that sums are divided by.
        clip_norm: L2 bound on one user's message: its change of the whole model.
        mechanism: see `anyorder.app.planning.mechanism_words`.
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
    delta: float | None = None
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
        named = {} if ":" in dataset else {"delta": 1e-5}
        return cls(dataset=dataset, **{**named, **_DEFAULTS.get(dataset, {}), **chosen})

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


# ----------------------------------------------------------------------------------------------------
# Users of a simulation: a data set by name split among them, or by a column that says whose a row is.


Examples = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Federation:
    """Who has what.

    Attributes:
        users: {id: (x, y)}, the private examples of each user.
        test: (x, y) of nobody among the users; public.
        make_model: a fresh model, its weights from torch's generator.
    """

    users: Mapping[int | str, Examples] = field(repr=False)
    test: Examples = field(repr=False)
    make_model: Callable[[], nn.Module] = field(repr=False)


def federation(
    dataset: str,
    *,
    data_dir: str | Path | None = None,
    model: str = "mlp",
    users: int = 100,
    user_key: str | None = None,
    classes_per_user: int = 2,
    seed: int = 0,
) -> Federation:
    """A data set among users.

    Args:
        dataset, data_dir: a name of `anyorder.app.data.load`, whose training part is split; or `module:function`,
            which returns (users, test, make_model): a mapping {id: (x, y)} of tensors with the examples first, one
            pair (x, y) for tests, and a function without arguments that makes the model, whose outputs are one score
            for each class, last dimension: loss and accuracy are those of classes, y of -100 left out.
        model: see `anyorder.app.job.build`; of a data set by name.
        users: how many a data set by name is split among, by `split_by_class`.
        user_key: instead, a column of the data set in which the user of each row stands.
        classes_per_user, seed: of the split.
    Raises: ArgumentError for another data set, or one that cannot be split so.
    """
    if ":" in dataset:
        if user_key is not None:
            raise ArgumentError(f"user_key is a column of a data set by name, and {dataset!r} returns users of its own")
        return _own(dataset)
    data = datasets.load(dataset, data_dir)
    x, y = _tensors(data.train)
    if user_key is None:
        parts: dict[int | str, NDArray[np.int64]] = dict(
            enumerate(split_by_class(y.numpy(), users, classes_per_user, seed))
        )
    else:
        parts = by_key(datasets.column(dataset, user_key, data_dir))
    shared = {user: (x[torch.from_numpy(places)], y[torch.from_numpy(places)]) for user, places in parts.items()}
    return Federation(shared, _tensors(data.test), lambda: models.build(model, data.input_shape, data.num_classes))


def split_by_class(
    classes: NDArray[np.int64], num_users: int, classes_per_user: int = 2, seed: int = 0
) -> list[NDArray[np.int64]]:
    """Places of the examples of each user, who has few classes: what federated data is like, and hard to learn from.

    Sorted by class (within a class shuffled), the examples are cut into num_users * classes_per_user runs as equal as
    can be, and each user is dealt `classes_per_user` of them [McMahan et al. 2017, section 3]; a run at the edge of a
    class has two. With 0, each user has a random part of all examples, as equal as can be.

    Args:
        classes: (num_examples,) integers.
        num_users: at most num_examples / classes_per_user, so that nobody is left with less than that.
        seed: of the shuffle and the deal; a pure function of it.
    """
    classes = np.asarray(classes)
    each = checks.integer("classes_per_user", classes_per_user, low=0)
    runs = max(1, each)
    users = checks.integer("users", num_users, low=1)
    if users * runs > len(classes):
        raise ArgumentError(
            f"users must be at most {len(classes) // runs}, so that each of them has {runs} of the {len(classes)} "
            f"training examples, got {users}"
        )
    order = permutation_of(len(classes), seed)
    if each:
        order = order[np.argsort(classes[order], kind="stable")]
    pieces = np.array_split(order, users * runs)
    deal = permutation_of(users * runs, seed, row=1).reshape(users, runs)
    return [np.concatenate([pieces[i] for i in hand]) for hand in deal]


def by_key(keys: Iterable[Hashable]) -> dict[int | str, NDArray[np.int64]]:
    """{user: places of the rows that carry its key}, in the order in which users first come.

    Integers stay integers if all keys are; otherwise keys are texts.
    """
    found: dict[Hashable, list[int]] = {}
    for place, key in enumerate(keys):
        found.setdefault(checks.name_of_unit(key) if isinstance(key, str) else key, []).append(place)
    if not found:
        raise ArgumentError("keys must name the user of at least one row, got none")
    whole = all(isinstance(key, (int, np.integer)) and not isinstance(key, bool) for key in found)
    named: dict[int | str, NDArray[np.int64]] = {}
    for key, places in found.items():
        named[int(key) if whole else str(key)] = np.array(places)  # type: ignore[call-overload]
    if len(named) != len(found):
        raise ArgumentError("keys must be of one type: two of them read the same as text, and would be one user")
    return named


def class_loss(output: Tensor, target: Tensor) -> Tensor:
    """Mean cross entropy of scores (.., classes) against classes (..); what is no class of these, as -100, is left out.

    Of one user's own rows: what is left out changes the mean of nobody else. A user without any adds zero.
    """
    known = (target >= 0) & (target < output.shape[-1])
    return F.cross_entropy(output.reshape(-1, output.shape[-1]), target.where(known, -100).reshape(-1))


def accuracy(model: nn.Module, test: Examples, batch_size: int = 1000) -> float:
    """The fraction of the test targets, those of -100 left out, of which the model's best score is that of the target.

    The model's mode is as before afterwards.
    """
    training, right, counted = model.training, 0, 0
    device = next(model.parameters()).device
    model.eval()
    with torch.no_grad():
        for start in range(0, len(test[0]), batch_size):
            x, y = test[0][start : start + batch_size], test[1][start : start + batch_size]
            best = model(x.to(device)).argmax(-1).cpu()
            right += int((best == y).sum())
            counted += int((y != -100).sum())
    model.train(training)
    return right / max(1, counted)


def _tensors(data: Any) -> Examples:
    if isinstance(data, TensorDataset):
        x, y = data.tensors
        return x, y
    x, y = next(iter(DataLoader(data, batch_size=len(data))))
    return x, y


def _own(name: str) -> Federation:
    found = load_function(name, "dataset")()
    if not isinstance(found, tuple) or len(found) != 3 or not isinstance(found[0], Mapping) or not callable(found[2]):
        raise ArgumentError(
            f"dataset {name!r} must return (users, test, make_model): a mapping {{id: (x, y)}}, a pair (x, y) and a "
            f"function that makes the model, got {type(found).__name__}"
        )
    users, test, make_model = found
    for pair in (test, *users.values()):
        if not (
            isinstance(pair, tuple) and len(pair) == 2
            and all(isinstance(part, Tensor) for part in pair) and len(pair[0]) == len(pair[1])
        ):  # fmt: skip
            raise ArgumentError(
                f"dataset {name!r} must hold pairs (x, y) of tensors with as many examples in each, and one of them is "
                "none"
            )
    if not users:
        raise ArgumentError(f"dataset {name!r} must hold at least one user, got none")
    return Federation(users, test, make_model)


# ----------------------------------------------------------------------------------------------------
# A simulated federation, from a data set's name to a folder that says what was done.


_TESTS = 10  # of the model in the course of a run


@dataclass(frozen=True)
class FederatedResult:
    """A simulated federation, done or under way.

    Attributes:
        path: its folder.
        plan: what was run.
        separation: why the plan has the separation that it has, in a sentence.
        accuracy: (rounds done, fraction of the test set that is right), about every tenth of the rounds.
        outcome: what came of it; None until it ends.
        seconds: of this session.
    """

    path: Path
    settings: FederatedSettings
    plan: Plan
    separation: str
    accuracy: list[tuple[int, float]] = field(repr=False)
    outcome: Simulation | None
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        """JSON values: what metrics.json holds."""
        made = self.outcome
        realised = None if made is None or made.realised is None else {
            "max_participations": made.realised[0], "min_separation": made.realised[1],
            "epsilon": made.realised_epsilon,
        }  # fmt: skip
        return {
            "settings": self.settings.to_dict(),
            "claims": self.plan.claims(),
            "order": self.plan.participation.describe(),
            "mechanism": self.plan.strategy.describe(),
            "separation": self.separation,
            "test_accuracy": [list(point) for point in self.accuracy],
            "realised": realised,
            "rounds": 0 if made is None else made.rounds,
            "seconds": ceil(self.seconds),
            "finished": made is not None,
        }


def federate(
    settings: FederatedSettings,
    output: str | Path | None = None,
    *,
    observer: Observer | None = None,
    processes: int = 1,
    key: bytes | None = None,
    budget: str | Path | None = None,
) -> FederatedResult:
    """Simulate a federation, and write the folder of the run.

    The folder holds model.pt, metrics.json (test accuracy by round, claims, settings), plan.json, run.privacy.json (the
    certificate, with what was realised), report.html, accuracy.png and noise.png, which may be shown; and the
    folder secret (checkpoint.pt with its journal, run.evidence.json), which is as secret as the data and in its
    .gitignore.

    Args:
        settings: see `FederatedSettings.of`.
        output: the folder, new, empty, or of a run that was killed before its first checkpoint; None for
            runs/<dataset>-<time>.
        observer: hears of progress; its epochs are tests of the model.
        processes: that make clients' changes; the result is the same for any number.
        key: 32 bytes for reproducible tests; a run whose key is known has no privacy.
        budget: file of an `anyorder.Budget`, in which the plan is entered before the first round.
    Raises: ArgumentError, PlanError for settings that do not fit; BudgetError for a plan that the budget refuses;
        TrainingError if the run fails.
    """
    checks.optional("matplotlib.figure", extra="train", purpose="drawing a run")  # now, not after the training
    checks.integer("processes", processes, low=1)
    parts = _Parts(settings)
    plan, separation = _plan(settings, len(parts.federation.users))
    begun = FederatedResult(Path(), settings, plan, separation, [], None, 0.0)
    with session.begin(output, settings.dataset, plan, begun.to_dict(), budget) as path:
        return _run(parts, replace(begun, path=path), observer or Observer(), processes, key)


def resume_federation(path: str | Path, *, observer: Observer | None = None, processes: int = 1) -> FederatedResult:
    """Go on with the run in a folder, from its last round to its end, bit for bit as if never interrupted.

    Raises: CheckpointError if the folder holds no run, or one whose checkpoint cannot be resumed without harm.
        ArgumentError if the run is going on.
    """
    checks.integer("processes", processes, low=1)
    path = Path(path)

    def read(found: dict[str, Any]) -> tuple[FederatedSettings, str, list[tuple[int, float]]]:
        tested = [(int(done), float(right)) for done, right in found["test_accuracy"]]
        return FederatedSettings(**found["settings"]), str(found["separation"]), tested

    with session.go_on(path, "federation", read) as ((settings, separation, tested), plan):
        begun = FederatedResult(path, settings, plan, separation, tested, None, 0.0)
        return _run(_Parts(settings), begun, observer or Observer(), processes, None)


class _Parts:
    """What every process makes of the settings: the same users, model and training."""

    def __init__(self, settings: FederatedSettings) -> None:
        self.settings = settings
        names = ("data_dir", "model", "users", "user_key", "classes_per_user")
        given = {name: getattr(settings, name) for name in names if getattr(settings, name) is not None}
        self.federation: Federation = federation(settings.dataset, seed=settings.seed, **given)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(settings.seed)
            self.model: nn.Module = self.federation.make_model()
        self.training = LocalTraining(
            class_loss, lr=settings.client_lr, batch_size=settings.client_batch, epochs=settings.local_epochs,
            max_examples=settings.max_examples,
        )  # fmt: skip

    def optimizer(self) -> torch.optim.Optimizer:
        """The server's."""
        settings = self.settings
        parameters = [p for p in self.model.parameters() if p.requires_grad]
        match settings.server_optimizer:
            case "sgd":
                return torch.optim.SGD(parameters, lr=settings.server_lr, momentum=settings.momentum)
            case "ftrl":
                return FTRL(parameters, lr=settings.server_lr, momentum=settings.momentum)
            case _:
                return torch.optim.Adam(parameters, lr=settings.server_lr, betas=(settings.momentum, 0.99))


def _plan(settings: FederatedSettings, num_users: int) -> tuple[Plan, str]:
    """The plan, and why its separation is what it is."""
    goal, rounds = settings.report_goal, settings.rounds
    if goal > num_users:
        raise ArgumentError(
            f"report_goal must be at most the number of users, {num_users}, got {goal}: no round could be full; set "
            "--report-goal"
        )
    asked = cohort_size(goal, settings.over_selection)
    b = settings.min_separation
    if b is not None:
        why = f"b = {b} as asked for"
    else:
        model = settings.who_is_there()
        b = model.separation(rounds, num_users, asked, goal)
        why = (
            f"b = {b}: what the timers on devices keep" if settings.availability == "check-in" else
            f"b = {b}: the most at which {asked} of {num_users} users are likely to be there and eligible in each round"
        )  # fmt: skip
    rule = MinSeparation(rounds, b, settings.max_participations)
    plan = make_plan(
        **settings.noise, order=rule, batch_size=goal, dataset_size=num_users, unit="user",
        epsilon=settings.epsilon, noise_multiplier=settings.noise_multiplier, delta=settings.delta,
        momentum=settings.momentum, clip_norm=settings.clip_norm,
    )  # fmt: skip
    return plan, why


def _run(
    parts: _Parts, begun: FederatedResult, observer: Observer, processes: int, key: bytes | None
) -> FederatedResult:
    """All rounds that are left."""
    path, plan, settings, began = begun.path, begun.plan, begun.settings, time.perf_counter()
    every = max(1, plan.n // _TESTS)
    server = Server(
        plan, parts.model, parts.optimizer(), report_goal=settings.report_goal, checkpoint=path / folder.CHECKPOINT,
        key=key,
    )  # fmt: skip
    tested = [point for point in begun.accuracy if point[0] <= server.step]

    def so_far(outcome: Simulation | None = None) -> FederatedResult:
        return FederatedResult(path, settings, plan, begun.separation, tested, outcome, time.perf_counter() - began)

    def on_round(done: int, model: nn.Module) -> None:
        observer.stepped(done)
        if (done % every == 0 or done == plan.n) and done not in dict(tested):
            tested.append((done, accuracy(model, parts.federation.test)))
            folder.write_metrics(path, so_far().to_dict())
            observer.epoch_ended(done, tested[-1][1])

    try:
        session.enter(path, plan, server.save, server.certificate)
        observer.started(plan, path, server.step)
        if server.step:  # killed between a round and its test: the model is that of the round
            on_round(server.step, server.model)
        with helpers(processes, _assist, settings):
            made = simulate(
                server, parts.federation.users, parts.training, availability=settings.who_is_there(),
                over_selection=settings.over_selection, drop_out=settings.drop_out, seed=settings.seed,
                on_round=on_round,
            )  # fmt: skip
        result = so_far(made)
        _write(server, result)
    finally:
        server.close()
    return result


def _assist(settings: FederatedSettings) -> None:
    """What a process beside the first does."""
    parts = _Parts(settings)
    assist(parts.model, parts.federation.users, parts.training)


def _write(server: Server, result: FederatedResult) -> None:
    path, plan = result.path, result.plan
    state = {name: value.cpu() for name, value in server.model.state_dict().items()}
    folder.replace(path / folder.MODEL, lambda beside: torch.save(state, beside))
    server.evidence().save(path / folder.EVIDENCE)
    shown = server.evidence().naming(server.certificate(), digests(state))
    shown.save(path / folder.CERTIFICATE)
    promise = f"epsilon {rounded_up(plan.epsilon, 3)} for one user, delta {rounded_up(plan.delta, 6)}"
    rounds, right = zip(*result.accuracy, strict=True)
    title = f"{result.settings.dataset}, {promise}"
    plot_accuracy(right, path / folder.ACCURACY_PLOT, title, at=rounds, label="round")
    noise_title = f"{result.settings.dataset}: noise over {counted(plan.n, 'round')}, {promise}"
    plot_noise(noise_lines(plan), path / folder.NOISE_PLOT, noise_title)
    folder.write_metrics(path, result.to_dict())
    report_file.write(path)
