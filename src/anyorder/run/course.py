"""What changes from step to step of the main job: the learning rate, and of a `Whitened` model what it learns."""

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from anyorder.errors import ModelError
from anyorder.plan.plan import Plan
from anyorder.run.datasets import Data
from anyorder.run.features import STAGES, Features, Whitened
from anyorder.run.settings import Settings

__all__ = ["Course", "rates"]


def rates(settings: Settings, dataset_size: int) -> NDArray[np.float64] | None:
    """(n,) learning rates over the first, for the plan; None where they are constant."""
    if settings.schedule == "constant":
        return None
    n = settings.epochs * -(-dataset_size // settings.batch_size)
    return 1 - np.arange(n) / n


class Course:
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
        size = plan.dataset_size
        assert size is not None
        self._of_a_mean = plan.batch_size / (size * min(1.0, plan.clip_norm))

    def stage(self, step: int) -> int:
        """The stage that a step belongs to, as a place in STAGES."""
        return min(step * self._settings.epochs // self._n, len(STAGES) - 1)

    def before(self, step: int, optimizer: torch.optim.Optimizer) -> None:
        """Called before the forward pass of a step."""
        rate = self._settings.lr * (1 - step / self._n if self._settings.schedule == "linear" else 1.0)
        if self._module is None:
            if self._settings.schedule == "linear":
                _set(optimizer.param_groups[0], lr=rate)
            return
        stage = self.stage(step)
        self._module.stage = STAGES[stage]
        for i, group in enumerate(optimizer.param_groups):
            if i == len(STAGES) - 1 == stage:
                _set(group, lr=rate, momentum=self._settings.momentum)
            else:
                _set(group, lr=self._of_a_mean if i == stage else 0.0, momentum=0.0)

    def after(self, steps: int) -> None:
        """Called when so many steps are done."""
        if self._module is not None and self.stage(steps) > self.stage(steps - 1):
            self._module.finish(STAGES[self.stage(steps - 1)])
            self.go_on(steps)

    def go_on(self, steps: int) -> None:
        """Called when so many steps are done, here or before a resume: the data as the next stage takes them."""
        if self._module is not None and self.stage(steps) == len(STAGES) - 1:
            for part in (self.data.train, self.data.test):
                assert isinstance(part, Features)
                part.x = self._module.prepared(part).x


def _copy(data: Data) -> Data:
    """Features of its own, which may be replaced."""
    train, test = data.train, data.test
    if not (isinstance(train, Features) and isinstance(test, Features)):
        raise ModelError(
            "models 'scattering' and 'patches' take the features that anyorder.run.features makes of images"
        )
    return replace(data, train=Features(train.x, train.y), test=Features(test.x, test.y))


def _set(group: dict[str, Any], **values: float) -> None:
    group.update(values)
