"""A simulated federation, from a data set's name to a folder that says what was done."""

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from anyorder import checks
from anyorder.budget import Budget
from anyorder.errors import ArgumentError, CheckpointError
from anyorder.federated import LocalTraining, Server, simulate
from anyorder.federated.cohorts import cohort_size
from anyorder.federated.simulation import Simulation
from anyorder.formatting import counted, rounded_up
from anyorder.participation import MinSeparation
from anyorder.plan.plan import Plan
from anyorder.report.plots import plot_accuracy, plot_noise
from anyorder.run import folder, report_file
from anyorder.run.budgeted import charge, charge_again
from anyorder.run.federated_data import Federation, accuracy, class_loss, federation
from anyorder.run.federated_settings import FederatedSettings
from anyorder.run.helpers import helpers
from anyorder.run.job import Observer
from anyorder.run.planning import make_plan, noise_lines
from anyorder.training import FTRL

__all__ = ["FederatedResult", "federate", "resume_federation"]

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
            "seconds": round(self.seconds, 3),
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
    checkpoint with what lies beside it and run.evidence.json, which are as secret as the data, and which its .gitignore
    names.

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
    if budget is not None:
        Budget(budget).check(plan)
    with folder.fresh(output, settings.dataset) as path:
        folder.hide_secrets(path)
        charge(path, budget, plan)
        folder.replace(path / folder.PLAN, plan.save)
        begun = FederatedResult(path, settings, plan, separation, [], None, 0.0)
        folder.write_json(path / folder.METRICS, begun.to_dict())
        return _run(parts, begun, observer or Observer(), processes, key)


def resume_federation(path: str | Path, *, observer: Observer | None = None, processes: int = 1) -> FederatedResult:
    """Go on with the run in a folder, from its last round to its end, bit for bit as if never interrupted.

    Raises: CheckpointError if the folder holds no run, or one whose checkpoint cannot be resumed without harm.
        ArgumentError if the run is going on.
    """
    checks.integer("processes", processes, low=1)
    path = Path(path)
    found = folder.read_json(path / folder.METRICS)
    try:
        settings = FederatedSettings(**found["settings"])
        tested = [(int(done), float(right)) for done, right in found["test_accuracy"]]
        separation = str(found["separation"])
    except (KeyError, TypeError, ValueError) as problem:
        raise CheckpointError(f"{path / folder.METRICS} holds no settings of a federation: {problem}") from problem
    with folder.held(path):
        if not (path / folder.CHECKPOINT).exists() and not folder.took_no_step(path):
            raise CheckpointError(f"{path} holds no {folder.CHECKPOINT}, and the run took rounds: start a new one")
        plan = Plan.load(path / folder.PLAN, large=True)
        charge_again(path, plan)
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
            folder.write_json(path / folder.METRICS, so_far().to_dict())
            observer.epoch_ended(done, tested[-1][1])

    try:
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
    from anyorder.federated import assist

    parts = _Parts(settings)
    assist(parts.model, parts.federation.users, parts.training)


def _write(server: Server, result: FederatedResult) -> None:
    path, plan = result.path, result.plan
    state = {name: value.cpu() for name, value in server.model.state_dict().items()}
    folder.replace(path / folder.MODEL, lambda beside: torch.save(state, beside))
    server.evidence().save(path / folder.EVIDENCE)
    folder.replace(path / folder.CERTIFICATE, server.certificate().save)
    promise = f"epsilon {rounded_up(plan.epsilon, 3)} for one user, delta {plan.delta:g}"
    rounds, right = zip(*result.accuracy, strict=True)
    title = f"{result.settings.dataset}, {promise}"
    plot_accuracy(right, path / folder.ACCURACY_PLOT, title, at=rounds, label="round")
    noise_title = f"{result.settings.dataset}: noise over {counted(plan.n, 'round')}, {promise}"
    plot_noise(noise_lines(plan), path / folder.NOISE_PLOT, noise_title)
    folder.write_json(path / folder.METRICS, result.to_dict())
    report_file.write(path)
