"""The main job: one private training run, from the name of a data set to a folder that says what was done."""

import gc
import inspect
import multiprocessing
import os
import socket
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from itertools import chain, repeat
from math import ceil, inf, prod
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from anyorder import checks, workload
from anyorder.accounting.amplification.secret_order import SecretOrder
from anyorder.app import data as datasets
from anyorder.app import folder, session
from anyorder.app import report as report_file
from anyorder.app.charts import plot_accuracy, plot_noise
from anyorder.app.data import Data
from anyorder.app.features import STAGES, Features, Whitened, joined, patched, scattered, whitened
from anyorder.app.planning import make_plan, mechanism_words, noise_lines
from anyorder.app.text import load_function
from anyorder.clipping.validate import refuse_unfit
from anyorder.errors import AnyorderError, ArgumentError, CheckpointError, ModelError, ModelWarning, TrainingError
from anyorder.formatting import counted, rounded_up
from anyorder.participation.registry import WORDS, order_word
from anyorder.plan.plan import Plan
from anyorder.sampling import EpochShuffleSampler
from anyorder.sampling.row_digests import InStages
from anyorder.sampling.samplers import FixedOrderSampler
from anyorder.training.engine import PrivacyEngine
from anyorder.training.optimizers import FTRL
from anyorder.workload import Course

# ----------------------------------------------------------------------------------------------------
# What the main job is asked to do, with defaults that suit each data set.


OF_FEATURES = ("scattering", "patches")  # the models on features that are a fixed function of each image

_DEFAULTS: dict[str, dict[str, Any]] = {  # for other models than that of _IMAGES
    "digits": {"model": "mlp", "batch_size": 128, "epochs": 20, "lr": 0.2, "order": "fixed"},
    "mnist": {"model": "cnn", "batch_size": 250, "epochs": 5, "lr": 0.2},
    "fashion_mnist": {"model": "cnn", "batch_size": 250, "epochs": 5, "lr": 0.2},
    "cifar10": {"model": "cnn", "batch_size": 500, "epochs": 10, "lr": 0.2},
}
_IMAGES = {"mnist": 6000, "fashion_mnist": 6000, "cifar10": 5000}  # tenths of the examples: ten steps an epoch
_DELTA = 1e-5  # of the data sets by name, as the accuracy pages state it
_FEATURES: dict[str, Any] = {"epochs": 60, "clip_norm": 0.02, "order": "fixed", "schedule": "linear"}
# at epsilon 1, and the power of epsilon, up to 4, that it grows with: the less noise, the further a run may go
_LR = {"scattering": (500.0, 1.5), "patches": (250.0, 1.0)}
_LR_WITHOUT_COLOUR = {("mnist", "patches"): (500.0, 1.0), ("fashion_mnist", "patches"): (500.0, 1.0)}


@dataclass(frozen=True, kw_only=True)
class Settings:
    """One training run; `Settings.of` fills in what suits the data set.

    Attributes:
        dataset, data_dir, classes: see `anyorder.app.data.load`.
        model: see `anyorder.app.job.build`.
        epsilon, noise_multiplier, delta: the budget; exactly one of the first two. The multiplier is the std of the
            noise over the clip norm, as DP-SGD means it.
        batch_size, epochs, lr, momentum: of SGD on sums of clipped gradients divided by batch_size.
        clip_norm: L2 bound on one example's gradient.
        mechanism, estimator, restart_every, completion: see `anyorder.app.planning.mechanism_words`.
        order: "shuffled" (again in each epoch), "fixed" (shuffled once, then kept: least noise over several epochs),
            "sequential" (as stored, in each epoch), "poisson" (secret random sampling), or another order by secret
            draws: "balls-in-bins", "random-allocation", "cyclic-poisson", "truncated-poisson",
            "min-separation-sampling"; see `anyorder.plan`.
        secure: exact integers in place of floating-point noise; see `anyorder.plan`.
        optimizer: "sgd" or "ftrl".
        schedule: of the learning rate: "constant", or "linear", which falls to 0 after the last step; of SGD alone.
        seed: of the initialisation and of the fixed order; never of the noise.
        device: "cpu", "cuda", ..
        checkpoint_every: steps from one checkpoint to the next; None for each epoch's end only.
    """

    dataset: str
    data_dir: str | None = None
    classes: int | None = None
    model: str = "mlp"
    epsilon: float | None = None
    noise_multiplier: float | None = None
    delta: float | None = None
    batch_size: int = 100
    epochs: int = 5
    lr: float = 0.1
    momentum: float = 0.9
    clip_norm: float = 1.0
    mechanism: str = "auto"
    estimator: str = "full"
    restart_every: int | None = None
    completion: str = "auto"
    order: str = "shuffled"
    secure: bool = False
    optimizer: str = "sgd"
    schedule: str = "constant"
    seed: int = 0
    device: str = "cpu"
    checkpoint_every: int | None = None

    @classmethod
    def of(cls, dataset: str = "digits", **given: Any) -> "Settings":
        """Settings for a data set: what is given and not None, else the data set's defaults."""
        chosen = {name: value for name, value in given.items() if value is not None}
        if "poisson" in (chosen.get("order"), chosen.get("mechanism")):
            chosen = {"order": "poisson", "mechanism": "poisson", **chosen}
        named = {} if ":" in dataset else {"delta": _DELTA}
        return cls(dataset=dataset, **{**named, **_defaults(dataset, chosen), **chosen})

    def __post_init__(self) -> None:
        checks.integer("batch_size", self.batch_size, low=1)
        checks.integer("epochs", self.epochs, low=1)
        if self.classes is not None:
            checks.integer("classes", self.classes, low=1)
        checks.integer("seed", self.seed, low=0, high=2**63 - 1)
        checks.positive("lr", self.lr)
        object.__setattr__(self, "order", order_word(self.order))
        checks.choice("optimizer", self.optimizer, {"sgd", "ftrl"})
        checks.choice("schedule", self.schedule, {"constant", "linear"})
        if self.optimizer == "ftrl" and (self.schedule == "linear" or self.model in OF_FEATURES):
            raise ArgumentError(
                "optimizer 'ftrl' multiplies all past gradients by its rate, and so needs a constant one; schedule "
                "'linear' and models 'scattering' and 'patches' are for 'sgd'"
            )
        if self.model in OF_FEATURES and self.epochs < 3:
            raise ArgumentError(
                f"epochs must be at least 3 for model {self.model!r}, whose first two are for the mean and the spread "
                f"of features, got {self.epochs}"
            )
        if self.checkpoint_every is not None:
            checks.integer("checkpoint_every", self.checkpoint_every, low=1)
        if (self.order == "poisson") != (self.mechanism == "poisson"):
            raise ArgumentError(
                "order 'poisson' and mechanism 'poisson' are one thing, amplified DP-SGD; got "
                f"order {self.order!r} with mechanism {self.mechanism!r}"
            )
        try:
            torch.empty(0, device=self.device)
        except (RuntimeError, AssertionError) as problem:  # torch says so when it was built without a device
            raise ArgumentError(f"device {self.device!r} cannot be used: {str(problem).splitlines()[0]}") from problem

    @property
    def noise(self) -> dict[str, Any]:
        """The mechanism in words."""
        return mechanism_words(self.mechanism, self.estimator, self.restart_every, self.completion)

    def to_dict(self) -> dict[str, Any]:
        """JSON values; `Settings(**values)` makes equal settings."""
        return asdict(self)


def _defaults(dataset: str, chosen: dict[str, Any]) -> dict[str, Any]:
    """What suits a data set and its model, given the rest."""
    model = chosen.get("model", "patches" if dataset in _IMAGES else None)
    if model not in _LR:
        return _DEFAULTS.get(dataset, {})
    own = {"batch_size": _IMAGES[dataset]} if dataset in _IMAGES else {}
    budget = chosen.get("epsilon", 4.0)
    known = isinstance(budget, int | float) and 0 < budget < inf  # a bad one is refused later
    first, power = _LR_WITHOUT_COLOUR.get((dataset, model), _LR[model])
    return {**_FEATURES, **own, "model": model, "lr": round(first * min(budget if known else 4.0, 4.0) ** power, 1)}


# ----------------------------------------------------------------------------------------------------
# Models by name.


Shape = tuple[int, ...]


def linear(input_shape: Shape, num_classes: int) -> nn.Module:
    """Softmax regression on the flattened input."""
    return nn.Sequential(nn.Flatten(), nn.Linear(prod(input_shape), num_classes))


def mlp(input_shape: Shape, num_classes: int) -> nn.Module:
    """One hidden layer of 32 units with tanh, which bounds activations and so suits clipped gradients."""
    return nn.Sequential(nn.Flatten(), nn.Linear(prod(input_shape), 32), nn.Tanh(), nn.Linear(32, num_classes))


def cnn(input_shape: Shape, num_classes: int) -> nn.Module:
    """The network for MNIST of [Kairouz et al. 2021, Table 2(a)]; 26 010 parameters at 28 x 28 and 10 classes.

    The table names two convolutions (16 of 8 x 8, 32 of 4 x 4, strides 2) and a layer of 32 units. Padding 3, pooling
    2 x 2 with stride 1 after each convolution, and tanh are those of the prior work that it refers to
    [Papernot et al. 2020, Making the Shoe Fit].
    """
    if len(input_shape) != 3 or min(input_shape[1:]) < 20:
        raise ModelError(
            f"model 'cnn' takes images of shape (channels, height, width), 20 pixels or more a side, got "
            f"{input_shape}; use 'mlp' or 'linear', or module:function with a model of your own"
        )
    channels, height, width = input_shape
    rows, columns = (_side(side) for side in (height, width))
    network = nn.Sequential(
        nn.Conv2d(channels, 16, 8, stride=2, padding=3), nn.Tanh(), nn.MaxPool2d(2, stride=1),
        nn.Conv2d(16, 32, 4, stride=2), nn.Tanh(), nn.MaxPool2d(2, stride=1),
        nn.Flatten(), nn.Linear(32 * rows * columns, 32), nn.Tanh(), nn.Linear(32, num_classes),
    )  # fmt: skip
    # On a CPU a private step takes half the time in this layout; torch's types leave the argument out.
    network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return network


def _side(pixels: int) -> int:
    first = (pixels + 2 * 3 - 8) // 2 + 1 - 1
    return (first - 4) // 2 + 1 - 1


MODELS: dict[str, Callable[[Shape, int], nn.Module]] = {
    "cnn": cnn,
    "linear": linear,
    "mlp": mlp,
    "patches": whitened,
    "scattering": whitened,
}


def build(name: str, input_shape: Shape, num_classes: int | None) -> nn.Module:
    """The model of that name, or what `module:function` returns.

    A function of one's own is called with (input_shape, num_classes) if it takes arguments, else without.
    Raises: ArgumentError where the number of classes is asked for, and was not stated.
    """

    def classes() -> int:
        if num_classes is None:
            raise ArgumentError(
                "classes must be stated for a data set of one's own (--classes, or classes=): labels are private, and "
                "the shape of the model is not, so that they are never counted"
            )
        return num_classes

    if ":" not in name:
        if name not in MODELS:
            raise ArgumentError(f"model must be one of {', '.join(MODELS)} or module:function, got {name!r}")
        return MODELS[name](input_shape, classes())
    function = load_function(name, "model")
    model = function(input_shape, classes()) if inspect.signature(function).parameters else function()
    if not isinstance(model, nn.Module):
        raise ArgumentError(f"model {name!r} must return a torch.nn.Module, got {type(model).__name__}")
    return model


# ----------------------------------------------------------------------------------------------------
# What changes from step to step of the main job: the learning rate, and of a `Whitened` model what it learns.


def rates(settings: Settings, dataset_size: int) -> NDArray[np.float64] | None:
    """(n,) learning rates over the first, for the plan; None where they are constant."""
    if settings.schedule == "constant":
        return None
    n = settings.epochs * -(-dataset_size // settings.batch_size)
    return 1 - np.arange(n) / n


def course_of(settings: Settings, dataset_size: int) -> Course | None:
    """The stages of a model on features, which are planned and run; None for other models, which have one.

    A mean and a spread of one epoch each, of which the last value is used, and then the classes. See `Staging`.
    """
    if settings.model not in OF_FEATURES:
        return None
    epoch = -(-dataset_size // settings.batch_size)
    left = settings.epochs - (len(STAGES) - 1)
    factors = rates(settings, dataset_size)
    of_a_mean = settings.batch_size / (dataset_size * min(1.0, settings.clip_norm))
    means = [workload.Stage(steps=epoch, rate=of_a_mean, own_parameters=True, only_last=True) for _ in STAGES[:-1]]
    classes = workload.Stage(
        steps=left * epoch, momentum=settings.momentum, rate=settings.lr, own_parameters=True,
        schedule=None if factors is None else tuple(factors[-left * epoch :].tolist()),
    )  # fmt: skip
    return workload.stages([*means, classes])


def plan_of(settings: Settings, dataset_size: int) -> Plan:
    """The plan of a run. Raises: ArgumentError, PlanError for settings that do not fit."""
    course = course_of(settings, dataset_size)
    linear = {"momentum": settings.momentum, "learning_rates": rates(settings, dataset_size)}
    return make_plan(
        **settings.noise, order=settings.order, epsilon=settings.epsilon, noise_multiplier=settings.noise_multiplier,
        delta=settings.delta, dataset_size=dataset_size, batch_size=settings.batch_size, epochs=settings.epochs,
        clip_norm=settings.clip_norm, secure=settings.secure, **(linear if course is None else {"optimizer": course}),
    )  # fmt: skip


class Staging:
    """Sets what a step needs before it, and puts to use what a stage has learned after its last step.

    Attributes:
        data: the data set, as the steps take it: an object of its own where stages change it.

    All of it is a function of the number of the step and of what was released: a resumed run goes on with the same.

    In the stages before the last, the optimizer adds up the gradients of one parameter over the epoch,

        sum over steps of gradient B / (N min(1, clip_norm)),    gradient = sum over the step of clip(-z) / B,

    which is the mean of -z over the N examples, |z| = 1; the others stand still.
    """

    def __init__(self, settings: Settings, plan: Plan, model: nn.Module, data: Data) -> None:
        self._settings, self._n = settings, plan.n
        self._module = model if isinstance(model, Whitened) else None
        self.data = data if self._module is None else _copy(data)
        assert plan.dataset_size is not None
        self._course = course_of(settings, plan.dataset_size)

    @property
    def is_in_stages(self) -> bool:
        """Whether the model is trained in stages, each of other parameters."""
        return self._module is not None

    def stage(self, step: int) -> int:
        """The stage that a step belongs to, as a place in STAGES."""
        return len(STAGES) - 1 if self._course is None or step >= self._n else self._course.stage_of(step)

    def before(self, step: int, optimizer: torch.optim.Optimizer) -> None:
        """Called before the forward pass of a step."""
        if self._module is None or self._course is None:
            if self._settings.schedule == "linear":
                _set(optimizer.param_groups[0], lr=self._settings.lr * (1 - step / self._n))
            return
        stage = self.stage(step)
        self._module.stage = STAGES[stage]
        for i, group in enumerate(optimizer.param_groups):
            _set(group, **(self._course.settings(step) if i == stage else {"lr": 0.0, "momentum": 0.0}))

    def after(self, steps: int) -> None:
        """Called when so many steps are done."""
        if self._module is not None and self.stage(steps) > self.stage(steps - 1):
            self._module.finish(STAGES[self.stage(steps - 1)])
            self.go_on(steps)

    def go_on(self, steps: int) -> None:
        """Called when so many steps are done, here or before a resume: the data as the next stage takes them."""
        if self._module is not None and self.stage(steps) == len(STAGES) - 1:
            for part in (self.data.train, self.data.test):
                assert isinstance(part, _FeaturesInStages)
                part.x = self._module.prepared(part).x


class _FeaturesInStages(Features, InStages):
    """Features that may be replaced by what was made of each."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        super().__init__(x, y)
        self.rows = TensorDataset(x, y)


def _copy(data: Data) -> Data:
    """Features of its own, which may be replaced."""
    train, test = data.train, data.test
    if not (isinstance(train, Features) and isinstance(test, Features)):
        raise ModelError(
            "models 'scattering' and 'patches' take the features that anyorder.app.features makes of images"
        )
    return replace(data, train=_FeaturesInStages(train.x, train.y), test=_FeaturesInStages(test.x, test.y))


def _set(group: dict[str, Any], **values: float) -> None:
    group.update(values)


# ----------------------------------------------------------------------------------------------------
# The parts of a run by its settings: model, loader, optimizer, loss.


def settings_of(found: dict[str, Any], path: Path) -> Settings:
    """The settings in the metrics of the run in a folder. Raises CheckpointError if there are none."""
    try:
        return Settings(**found["settings"])
    except (KeyError, TypeError, ValueError) as problem:
        raise CheckpointError(f"{path / folder.METRICS} holds no settings of a run: {problem}") from problem


def make_data(settings: Settings, data: Data | None = None) -> Data:
    """The data set, loaded where it is not given, in the form that the model takes."""
    data = data or datasets.load(settings.dataset, settings.data_dir, settings.classes)
    if settings.model not in OF_FEATURES:
        return data
    gc.collect()  # a run before this one holds its features, which may be gigabytes, in a cycle that torch makes
    if isinstance(data.train, Features):
        return data
    return patched(data) if settings.model == "patches" else scattered(data)


def make_model(settings: Settings, data: Data) -> nn.Module:
    """The model, weights drawn by the seed; torch's generator stays as it was. Raises ModelError, ArgumentError."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.seed)
        model = build(settings.model, data.input_shape, data.num_classes).to(settings.device)
    refuse_unfit(model)
    return model


def make_loader(settings: Settings, data: Data) -> DataLoader[Any]:
    """The training data in the settings' order."""
    samplers = {"fixed": FixedOrderSampler, "shuffled": EpochShuffleSampler, "sequential": None}
    if settings.order not in samplers and not issubclass(WORDS[settings.order][1], SecretOrder):
        raise ArgumentError(f"order {settings.order!r} has no sampler here: give ao.plan and make_private a loader")
    kind = samplers.get(settings.order)
    sampler = None if kind is None else kind(len(data.train), settings.seed)  # type: ignore[arg-type]
    return batches(data.train, settings.batch_size, sampler)


def batches(part: Any, size: int, sampler: Any = None) -> DataLoader[Any]:
    """A loader of (inputs, classes)."""
    return DataLoader(part, size, sampler=sampler, collate_fn=joined if isinstance(part, Features) else None)


def make_optimizer(settings: Settings, model: nn.Module) -> torch.optim.Optimizer:
    """The settings' optimizer over all trainable parameters."""
    if isinstance(model, Whitened):
        learned = dict(zip(STAGES, (model.centre, model.spread, model.classify), strict=True))
        groups = [{"params": list(layer.parameters())} for layer in learned.values()]
        return torch.optim.SGD(groups, lr=settings.lr, momentum=settings.momentum)
    parameters = [p for p in model.parameters() if p.requires_grad]
    if settings.optimizer == "ftrl":
        return FTRL(parameters, lr=settings.lr, momentum=settings.momentum)
    return torch.optim.SGD(parameters, lr=settings.lr, momentum=settings.momentum)


def loss(model: nn.Module, batch: tuple[Tensor, Tensor], device: torch.device) -> Tensor:
    """Mean cross entropy of a batch of (inputs, classes), on a device; the mean of what a `Whitened` model measures.

    A label that is no class of the model's adds zero: no error names it, and the mean is over all rows all the same.
    """
    x, y = batch
    outputs = model(x.to(device))
    if getattr(model, "stage", STAGES[-1]) != STAGES[-1]:
        return outputs.mean()  # type: ignore[no-any-return]
    y = y.to(device)
    known = (y >= 0) & (y < outputs.shape[-1])
    return F.cross_entropy(outputs, y.where(known, 0), reduction="none").where(known, 0.0).mean()


# ----------------------------------------------------------------------------------------------------
# Processes on this machine that help the first one, joined in a torch.distributed group on the loopback.


_PATIENCE = timedelta(minutes=30)


@contextmanager
def helpers(processes: int, work: Callable[..., object], *arguments: Any) -> Iterator[None]:
    """A group of so many processes, of which this is the first; each of the others calls `work(*arguments)` in it.

    With one process nothing is started. At the end they are given a while to leave, and are then stopped.

    Args:
        work: a function of a module, and arguments that can be pickled.
    """
    if processes == 1:
        yield
        return
    spawn = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as room, _on_loopback():
        store = str(Path(room) / "store")
        others = [
            spawn.Process(target=_begin, args=(store, rank, processes, work, arguments), daemon=True)
            for rank in range(1, processes)
        ]
        for one in others:
            one.start()
        try:
            _join(store, 0, processes, others)
            yield
            for one in others:
                one.join(30)
        finally:
            for one in others:
                one.terminate()
                one.join()
            if dist.is_initialized():
                dist.destroy_process_group()


def _begin(store: str, rank: int, processes: int, work: Callable[..., object], arguments: tuple[Any, ...]) -> None:
    """A helper's life. Errors of the package are told to the first process, which says them; it may be gone itself."""
    torch.set_num_threads(1)
    try:
        _join(store, rank, processes, [])
        work(*arguments)
    except (AnyorderError, KeyboardInterrupt):
        sys.stderr.flush()
        os._exit(1)
    sys.stderr.flush()
    os._exit(0)  # gloo's threads may abort the interpreter's own end (pytorch/pytorch, issue 190489)


def _join(path: str, rank: int, processes: int, others: Sequence[BaseProcess]) -> None:
    """Meet the others; the first process notices one that ends before it came."""
    store = dist.FileStore(path, processes)  # type: ignore[attr-defined]
    store.set(f"came {rank}", "")
    while others and not store.check([f"came {one}" for one in range(processes)]):
        if not all(one.is_alive() for one in others):
            raise TrainingError("a helping process ended before the simulation began; what it printed says why")
        time.sleep(0.02)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=processes, timeout=_PATIENCE)


@contextmanager
def _on_loopback() -> Iterator[None]:
    """Gloo speaks without encryption or passwords: on the loopback alone, unless somebody chose another interface."""
    name, before = "GLOO_SOCKET_IFNAME", os.environ.get("GLOO_SOCKET_IFNAME")
    loop = next((each for _, each in socket.if_nameindex() if each.startswith("lo")), None)
    if before is None and loop is not None:
        os.environ[name] = loop
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(name, None)


# ----------------------------------------------------------------------------------------------------
# The main job: one private training run, from a data set's name to a folder that says what was done.


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
        with_starts: epsilon with what was released before the run was started over; None where it was not.
        seconds: of training and testing, all sessions of the run together. Shown in whole seconds: how long a step
            takes depends on what is in it.
    """

    path: Path
    settings: Settings
    plan: Plan
    accuracy: list[float] = field(repr=False)
    steps: int
    seconds: float
    with_starts: float | None = None

    @property
    def epsilon(self) -> float:
        """Of the certificate, at the plan's delta."""
        return self.plan.epsilon if self.with_starts is None else self.with_starts

    def to_dict(self) -> dict[str, Any]:
        """JSON values: what metrics.json holds."""
        return {
            "settings": self.settings.to_dict(),
            "claims": self.plan.claims(),
            **({} if self.with_starts is None else {"epsilon_with_earlier_starts": self.with_starts}),
            "order": self.plan.participation.describe(),
            "mechanism": self.plan.strategy.describe(),
            "test_accuracy": self.accuracy,
            "steps": self.steps,
            "seconds": ceil(self.seconds),
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
    run.privacy.json (the certificate), report.html, accuracy.png and noise.png, which may be shown; and the
    folder secret (checkpoint.pt with its journal, run.evidence.json), which is as secret as the data. No loss or
    accuracy on training data is computed or written: that would be a release of its own.

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
    data = make_data(settings, data)
    plan = plan_of(settings, len(data.train))  # type: ignore[arg-type]
    model = make_model(settings, data)  # before the folder: what can be refused is refused before anything is written
    metrics = Result(Path(), settings, plan, [], 0, 0.0).to_dict()
    with session.begin(output, settings.dataset, plan, metrics, budget) as path:
        return _Session(settings, data, plan, model, path, key).finish(observer, tensorboard)


def resume(
    path: str | Path,
    *,
    observer: Observer | None = None,
    tensorboard: str | Path | None = None,
    start_over: bool = False,
) -> Result:
    """Go on with the run in a folder, from its last checkpoint to its end, bit for bit as if never interrupted.

    A run that was killed before its first checkpoint took no step, and begins again with its settings.

    Args:
        start_over: begin again with another noise key where the run took steps, for a checkpoint that is lost, damaged
            or cannot be replayed: see `anyorder.Release`. Certificate and budget count what was released before.
    Raises: CheckpointError if the folder holds no run, or one whose checkpoint cannot be resumed without harm.
        ArgumentError if the run is going on.
    """
    path = Path(path)
    read = lambda found: Settings(**found["settings"])  # noqa: E731
    with session.go_on(path, "run", read, start_over=start_over) as (settings, plan):
        data = make_data(settings)
        model = make_model(settings, data)
        made = _Session(settings, data, plan, model, path, None, start_over)
        return made.finish(observer or Observer(), tensorboard)


class _Session:
    """One session of a run: everything that lives in memory."""

    def __init__(
        self,
        settings: Settings,
        data: Data,
        plan: Plan,
        model: nn.Module,
        path: Path,
        key: bytes | None,
        start_over: bool = False,
    ) -> None:
        self.settings, self.plan, self.path = settings, plan, path
        self.device = torch.device(settings.device)
        self.model: nn.Module = model
        self.course = Staging(settings, plan, model, data)
        self.data = self.course.data
        self.engine = PrivacyEngine(plan, checkpoint=path / folder.CHECKPOINT, key=key, start_over=start_over)
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
                    now = float(int(time.time()))  # whole seconds, as all times that are shown
                    writer.add_scalar("test accuracy", self.accuracy[-1], self.engine.step, walltime=now)
        if writer is not None:
            writer.close()
        return self._write_results()

    def _prepare(self) -> None:
        """Build the parts, and resume if there is a checkpoint; nothing is left to do before the next step."""
        torch.manual_seed(self.settings.seed)
        optimizer = make_optimizer(self.settings, self.model)
        loader = make_loader(self.settings, self.data)
        self.model, self.optimizer, batches = self.engine.make_private(self.model, optimizer, loader)
        self._batches = chain.from_iterable(repeat(batches))  # each pass over the loader is its next epoch
        self.accuracy = list(self.engine.extra.get("accuracy", []))
        self.seconds = self.engine.extra.get("seconds", 0.0)
        self.course.go_on(self.engine.step)
        self._began = time.perf_counter()
        session.enter(self.path, self.plan, self._save, self.engine.certificate)

    def _epoch(self, observer: Observer) -> None:
        """The rest of an epoch, its test, and a checkpoint."""
        end = (len(self.accuracy) + 1) * self.plan.n // self.settings.epochs
        self.model.train()
        with warnings.catch_warnings():
            if self.course.is_in_stages:
                warnings.filterwarnings("ignore", "no output depends on", ModelWarning)  # those of later stages
            while self.engine.step < end:  # not entered if the session before ended between the last step and the test
                self._step(next(self._batches))
                observer.stepped(self.engine.step)
        self.accuracy.append(self._test())
        self._save()
        folder.write_metrics(self.path, self._result().to_dict())

    def _step(self, batch: tuple[Tensor, Tensor]) -> None:
        self.course.before(self.engine.step, self.optimizer)
        self.optimizer.zero_grad()
        loss(self.model, batch, self.device).backward()  # type: ignore[no-untyped-call]
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
            for x, y in batches(self.data.test, _TEST_BATCH):
                right += int((self.model(x.to(self.device)).argmax(1).cpu() == y).sum())
        return right / len(self.data.test)  # type: ignore[arg-type]

    def _save(self) -> None:
        self.engine.save({"accuracy": self.accuracy, "seconds": self._elapsed()})

    def _elapsed(self) -> float:
        return self.seconds + time.perf_counter() - self._began

    def _result(self) -> Result:
        whole = self.engine.epsilon() if self.engine.training.release.earlier else None
        return Result(self.path, self.settings, self.plan, self.accuracy, self.engine.step, self._elapsed(), whole)

    def _write_results(self) -> Result:
        result, settings, plan = self._result(), self.settings, self.plan
        state = {name: value.cpu() for name, value in self.model.state_dict().items()}
        folder.replace(self.path / folder.MODEL, lambda beside: torch.save(state, beside))
        self.engine.evidence().save(self.path / folder.EVIDENCE)
        self.engine.certificate().save(self.path / folder.CERTIFICATE)
        promise = f"epsilon {rounded_up(self.engine.epsilon(), 3)}, delta {rounded_up(plan.delta, 6)}"
        plot_accuracy(self.accuracy, self.path / folder.ACCURACY_PLOT, f"{settings.dataset}, {promise}")
        title = f"{settings.dataset}: noise over {counted(plan.n, 'step')}, {promise}"
        plot_noise(noise_lines(plan), self.path / folder.NOISE_PLOT, title)
        folder.write_metrics(self.path, result.to_dict())
        report_file.write(self.path)
        return result


def _tensorboard(path: str | Path | None) -> Any:
    if path is None:
        return None
    checks.optional("tensorboard", extra="tensorboard", purpose="writing event files")
    writer = checks.optional("torch.utils.tensorboard", extra="tensorboard", purpose="writing event files")
    return writer.SummaryWriter(str(path))
