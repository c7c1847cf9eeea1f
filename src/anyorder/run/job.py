"""The main job: one private training run, from a data set's name to a folder that says what was done."""

import time
from dataclasses import dataclass, field
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from anyorder import checks
from anyorder.budget import Budget
from anyorder.errors import CheckpointError
from anyorder.formatting import counted, rounded_up
from anyorder.plan.plan import Plan
from anyorder.report.plots import plot_accuracy, plot_noise
from anyorder.run import folder, parts, report_file
from anyorder.run.budgeted import charge, charge_again
from anyorder.run.course import Course, rates
from anyorder.run.datasets import Data
from anyorder.run.planning import make_plan, noise_lines
from anyorder.run.settings import Settings
from anyorder.training import PrivacyEngine

__all__ = ["Observer", "Result", "resume", "train"]

_TEST_BATCH = 1000


class Observer:
    """Hears how a run goes; this one says nothing. Nothing that it hears depends on the data without noise."""

    def planning(self) -> None:
        """The data set is read, and the plan made: minutes where features are made, or batches are secret."""

    def started(self, plan: Plan, path: Path, step: int) -> None:
        """The run begins, or goes on, after `step` steps."""

    def stepped(self, step: int) -> None:
        """`step` steps are done."""

    def epoch_ended(self, epoch: int, accuracy: float) -> None:
        """`epoch` epochs are done, and the model was tested."""


@dataclass(frozen=True)
class Result:
    """A finished run.

    Attributes:
        path: its folder.
        plan: what was run.
        accuracy: on the test set after each epoch, as fractions.
        steps: taken.
        seconds: of training and testing, all sessions of the run together.
    """

    path: Path
    settings: Settings
    plan: Plan
    accuracy: list[float] = field(repr=False)
    steps: int
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        """JSON values: what metrics.json holds."""
        return {
            "settings": self.settings.to_dict(),
            "claims": self.plan.claims(),
            "order": self.plan.participation.describe(),
            "mechanism": self.plan.strategy.describe(),
            "test_accuracy": self.accuracy,
            "steps": self.steps,
            "seconds": round(self.seconds, 3),
            "finished": len(self.accuracy) == self.settings.epochs,
        }


def train(
    settings: Settings,
    output: str | Path | None = None,
    *,
    data: Data | None = None,
    observer: Observer | None = None,
    tensorboard: str | Path | None = None,
    key: bytes | None = None,
    budget: str | Path | None = None,
) -> Result:
    """Train on a data set by name, and write the folder of the run.

    The folder holds model.pt (state dict), metrics.json (test accuracy by epoch, claims, settings), plan.json,
    run.privacy.json (the certificate), report.html, accuracy.png and noise.png, which may be shown; and checkpoint.pt
    and run.evidence.json, which are as secret as the data, and which its .gitignore names. No loss or accuracy on
    training data is computed or written: that would be a release of its own.

    Args:
        settings: see `Settings.of`.
        output: the folder, new, empty, or of a run that was killed before its first checkpoint; None for
            runs/<dataset>-<time>.
        data: the data set, where it is loaded already; for model "scattering", its images or their features.
        observer: hears of progress.
        tensorboard: a folder for event files of the test accuracy.
        key: 32 bytes for reproducible tests; a run whose key is known has no privacy.
        budget: file of an `anyorder.Budget`, in which the plan is entered before the first step.
    Raises: ArgumentError, PlanError for settings that do not fit; BudgetError for a plan that the budget refuses;
        TrainingError if the run fails.
    """
    checks.optional("matplotlib.figure", extra="train", purpose="drawing a run")  # now, not after the training
    observer = observer or Observer()
    observer.planning()
    data = parts.make_data(settings, data)
    plan = make_plan(
        **settings.noise, order=settings.order, epsilon=settings.epsilon, noise_multiplier=settings.noise_multiplier,
        delta=settings.delta, dataset_size=len(data.train), batch_size=settings.batch_size,  # type: ignore[arg-type]
        epochs=settings.epochs, momentum=settings.momentum, clip_norm=settings.clip_norm,
        secure=settings.secure, learning_rates=rates(settings, len(data.train)),  # type: ignore[arg-type]
    )  # fmt: skip
    model = parts.make_model(
        settings, data
    )  # before the folder: what can be refused is refused before anything is written
    if budget is not None:
        Budget(budget).check(plan)
    with folder.fresh(output, settings.dataset) as path:
        folder.hide_secrets(path)
        charge(path, budget, plan)
        folder.replace(path / folder.PLAN, plan.save)
        folder.write_json(path / folder.METRICS, Result(path, settings, plan, [], 0, 0.0).to_dict())
        return _Run(settings, data, plan, model, path, key).finish(observer, tensorboard)


def resume(path: str | Path, *, observer: Observer | None = None, tensorboard: str | Path | None = None) -> Result:
    """Go on with the run in a folder, from its last checkpoint to its end, bit for bit as if never interrupted.

    A run that was killed before its first checkpoint took no step, and begins again with its settings.
    Raises: CheckpointError if the folder holds no run, or one whose checkpoint cannot be resumed without harm.
        ArgumentError if the run is going on.
    """
    path = Path(path)
    found = folder.read_json(path / folder.METRICS)
    settings = parts.settings_of(found, path)
    with folder.held(path):
        began = found.get("steps") != 0 or not folder.took_no_step(path)
        if began and not (path / folder.CHECKPOINT).exists():
            raise CheckpointError(f"{path} holds no {folder.CHECKPOINT}, and the run took steps: start a new one")
        plan = Plan.load(path / folder.PLAN, large=True)
        data = parts.make_data(settings)
        model = parts.make_model(settings, data)
        charge_again(path, plan)
        return _Run(settings, data, plan, model, path, None).finish(observer or Observer(), tensorboard)


class _Run:
    """One session of a run: everything that lives in memory."""

    def __init__(
        self, settings: Settings, data: Data, plan: Plan, model: nn.Module, path: Path, key: bytes | None
    ) -> None:
        self.settings, self.plan, self.path = settings, plan, path
        self.device = torch.device(settings.device)
        self.model: nn.Module = model
        self.course = Course(settings, plan, model, data)
        self.data = self.course.data
        self.engine = PrivacyEngine(plan, checkpoint=path / folder.CHECKPOINT, key=key)
        self.accuracy: list[float] = []
        self.seconds = 0.0

    def finish(self, observer: Observer, tensorboard: str | Path | None) -> Result:
        """Run to the end."""
        writer = _tensorboard(tensorboard)
        with torch.random.fork_rng(devices=[self.device] if self.device.type == "cuda" else []):
            self._prepare()
            observer.started(self.plan, self.path, self.engine.step)
            while len(self.accuracy) < self.settings.epochs:
                self._epoch(observer)
                observer.epoch_ended(len(self.accuracy), self.accuracy[-1])
                if writer is not None:
                    writer.add_scalar("test accuracy", self.accuracy[-1], self.engine.step)
        if writer is not None:
            writer.close()
        return self._write_results()

    def _prepare(self) -> None:
        """Build the parts, and resume if there is a checkpoint; else write the first one, before any step."""
        torch.manual_seed(self.settings.seed)
        optimizer = parts.make_optimizer(self.settings, self.model)
        loader = parts.make_loader(self.settings, self.data)
        self.model, self.optimizer, batches = self.engine.make_private(self.model, optimizer, loader)
        self._batches = chain.from_iterable(repeat(batches))  # each pass over the loader is its next epoch
        self.accuracy = list(self.engine.extra.get("accuracy", []))
        self.seconds = self.engine.extra.get("seconds", 0.0)
        self.course.go_on(self.engine.step)
        self._began = time.perf_counter()
        if self.engine.step == 0:
            self._save()

    def _epoch(self, observer: Observer) -> None:
        """The rest of an epoch, its test, and a checkpoint."""
        end = (len(self.accuracy) + 1) * self.plan.n // self.settings.epochs
        self.model.train()
        while self.engine.step < end:  # not entered if the session before ended between the last step and the test
            self._step(next(self._batches))
            observer.stepped(self.engine.step)
        self.accuracy.append(self._test())
        self._save()
        folder.write_json(self.path / folder.METRICS, self._result().to_dict())

    def _step(self, batch: tuple[Tensor, Tensor]) -> None:
        self.course.before(self.engine.step, self.optimizer)
        self.optimizer.zero_grad()
        parts.loss(self.model, batch, self.device).backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.course.after(self.engine.step)
        every = self.settings.checkpoint_every
        if every is not None and self.engine.step % every == 0:
            self._save()

    def _test(self) -> float:
        """The fraction of the test set that is classified correctly."""
        self.model.eval()
        right = 0
        with torch.no_grad():
            for x, y in parts.batches(self.data.test, _TEST_BATCH):
                right += int((self.model(x.to(self.device)).argmax(1).cpu() == y).sum())
        return right / len(self.data.test)  # type: ignore[arg-type]

    def _save(self) -> None:
        self.engine.save({"accuracy": self.accuracy, "seconds": self._elapsed()})

    def _elapsed(self) -> float:
        return self.seconds + time.perf_counter() - self._began

    def _result(self) -> Result:
        return Result(self.path, self.settings, self.plan, self.accuracy, self.engine.step, self._elapsed())

    def _write_results(self) -> Result:
        result, settings, plan = self._result(), self.settings, self.plan
        state = {name: value.cpu() for name, value in self.model.state_dict().items()}
        folder.replace(self.path / folder.MODEL, lambda beside: torch.save(state, beside))
        self.engine.evidence().save(self.path / folder.EVIDENCE)
        folder.replace(self.path / folder.CERTIFICATE, self.engine.certificate().save)
        promise = f"epsilon {rounded_up(plan.epsilon, 3)}, delta {plan.delta:g}"
        plot_accuracy(self.accuracy, self.path / folder.ACCURACY_PLOT, f"{settings.dataset}, {promise}")
        title = f"{settings.dataset}: noise over {counted(plan.n, 'step')}, {promise}"
        plot_noise(noise_lines(plan), self.path / folder.NOISE_PLOT, title)
        folder.write_json(self.path / folder.METRICS, result.to_dict())
        report_file.write(self.path)
        return result


def _tensorboard(path: str | Path | None) -> Any:
    if path is None:
        return None
    checks.optional("tensorboard", extra="tensorboard", purpose="writing event files")
    writer = checks.optional("torch.utils.tensorboard", extra="tensorboard", purpose="writing event files")
    return writer.SummaryWriter(str(path))
