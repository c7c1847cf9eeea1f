"""Optimizers that the noise was not fitted to."""

import warnings

import torch

from anyorder.errors import OptimizerWarning
from anyorder.plan.plan import Plan
from anyorder.strategy import Independent, SquareRoot, Tree
from anyorder.train.ftrl import FTRL
from anyorder.workload import Workload

__all__ = ["warn_of_unfitted"]

_NAMES = (
    "Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "SparseAdam",
)  # fmt: skip
_ADAPTIVE = tuple(getattr(torch.optim, name) for name in _NAMES if hasattr(torch.optim, name))
"""Those that divide a step by statistics of the gradients, as their subclasses do; others are not warned of."""

_OF_STEPS_ALONE = (Tree, SquareRoot)  # the same for every momentum: nothing is gained by planning with another
_NEAR = 1e-6  # momenta that differ by rounding, as in float32


def warn_of_unfitted(plan: Plan, optimizer: torch.optim.Optimizer, stacklevel: int) -> None:
    """Warn where correlated noise meets an optimizer that it was not fitted to.

    Noise of different steps cancels in the sums of gradients that the plan's workload makes. An optimizer that scales
    each step by the size of its noisy gradients makes other sums, and so does SGD with another momentum: noise that is
    fitted to 0.9 leaves a third more in a model that has none, and more in long runs. Epsilon is the same: this is
    post-processing.
    """
    if type(plan.strategy) is Independent or plan.n == 1:
        return
    told = None
    if isinstance(optimizer, _ADAPTIVE):
        told = _of_adaptive(plan, optimizer)
    elif (
        isinstance(optimizer, (torch.optim.SGD, FTRL))
        and type(plan.workload) is Workload
        and type(plan.strategy) not in _OF_STEPS_ALONE
    ):
        told = _of_momentum(plan, optimizer, plan.workload.momentum)
    if told is not None:
        warnings.warn(told, OptimizerWarning, stacklevel=stacklevel + 1)


def _of_adaptive(plan: Plan, optimizer: torch.optim.Optimizer) -> str:
    return (
        f"{type(optimizer).__name__} divides its steps by statistics of noisy gradients, and the noise of this plan, "
        f"{plan.strategy.describe()}, was fitted to cancel in sums of gradients: the guarantee is the same, but the "
        "model may be worse than with independent noise. Take torch.optim.SGD with momentum, or ao.FTRL, or compare "
        "with mechanism='independent'"
    )


def _of_momentum(plan: Plan, optimizer: torch.optim.Optimizer, fitted: float) -> str | None:
    trained = [group for group in optimizer.param_groups if any(one.requires_grad for one in group["params"])]
    found = sorted({float(group.get("momentum", 0.0)) for group in trained})
    if all(abs(momentum - fitted) < _NEAR for momentum in found):
        return None
    words = " and ".join(f"{momentum:g}" for momentum in found)
    advice = f"Plan with momentum={words}" if len(found) == 1 else f"Give all groups the momentum {fitted:g}"
    return (
        f"the noise of this plan, {plan.strategy.describe()}, was fitted to momentum {fitted:g}, and this optimizer "
        f"has {words}: the guarantee is the same, but more noise is left in the model than need be. {advice}"
    )
