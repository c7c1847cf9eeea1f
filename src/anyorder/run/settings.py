"""What the main job is asked to do, with defaults that suit each data set."""

from dataclasses import asdict, dataclass
from math import inf
from typing import Any

import torch

from anyorder import checks
from anyorder.errors import ArgumentError
from anyorder.participation.registry import order_word
from anyorder.run.planning import mechanism_words

__all__ = ["OF_FEATURES", "Settings"]

OF_FEATURES = ("scattering", "patches")  # the models on features that are a fixed function of each image

_DEFAULTS: dict[str, dict[str, Any]] = {  # for other models than that of _IMAGES
    "digits": {"model": "mlp", "batch_size": 128, "epochs": 20, "lr": 0.2, "order": "fixed"},
    "mnist": {"model": "cnn", "batch_size": 250, "epochs": 5, "lr": 0.2},
    "fashion_mnist": {"model": "cnn", "batch_size": 250, "epochs": 5, "lr": 0.2},
    "cifar10": {"model": "cnn", "batch_size": 500, "epochs": 10, "lr": 0.2},
}
_IMAGES = {"mnist": 6000, "fashion_mnist": 6000, "cifar10": 5000}  # tenths of the examples: ten steps an epoch
_FEATURES: dict[str, Any] = {"epochs": 60, "clip_norm": 0.02, "order": "fixed", "schedule": "linear"}
# at epsilon 1, and the power of epsilon, up to 4, that it grows with: the less noise, the further a run may go
_LR = {"scattering": (500.0, 1.5), "patches": (250.0, 1.0)}
_LR_WITHOUT_COLOUR = {("mnist", "patches"): (500.0, 1.0), ("fashion_mnist", "patches"): (500.0, 1.0)}


@dataclass(frozen=True, kw_only=True)
class Settings:
    """One training run; `Settings.of` fills in what suits the data set.

    Attributes:
        dataset, data_dir: see `anyorder.run.datasets.load`.
        model: see `anyorder.run.models.build`.
        epsilon, noise_multiplier, delta: the budget; exactly one of the first two. The multiplier is the std of the
            noise over the clip norm, as DP-SGD means it.
        batch_size, epochs, lr, momentum: of SGD on sums of clipped gradients divided by batch_size.
        clip_norm: L2 bound on one example's gradient.
        mechanism, estimator, restart_every, completion: see `anyorder.run.planning.mechanism_words`.
        order: "shuffled" (anew in each epoch), "fixed" (shuffled once, then kept: least noise over several epochs),
            "sequential" (as stored, in each epoch), "poisson" (secret random sampling), or another order by secret
            coins: "balls-in-bins", "random-allocation", "cyclic-poisson", "truncated-poisson",
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
    model: str = "mlp"
    epsilon: float | None = None
    noise_multiplier: float | None = None
    delta: float = 1e-5
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
        return cls(dataset=dataset, **{**_defaults(dataset, chosen), **chosen})

    def __post_init__(self) -> None:
        checks.integer("batch_size", self.batch_size, low=1)
        checks.integer("epochs", self.epochs, low=1)
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
