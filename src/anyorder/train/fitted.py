"""Optimizers that the noise was not fitted to."""

import warnings

import torch

from anyorder.errors import OptimizerWarning
from anyorder.plan import Plan
from anyorder.strategy import Independent

__all__ = ["warn_of_adaptive"]

_NAMES = (
    "Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "SparseAdam",
)  # fmt: skip
_ADAPTIVE = tuple(getattr(torch.optim, name) for name in _NAMES if hasattr(torch.optim, name))
"""Those that divide a step by statistics of the gradients, as their subclasses do; others are not warned of."""


def warn_of_adaptive(plan: Plan, optimizer: torch.optim.Optimizer, stacklevel: int) -> None:
    """Warn where correlated noise meets an optimizer that is not linear in the gradients.

    Noise of different steps cancels in the sums of gradients that the plan's workload makes. An optimizer that scales
    each step by the size of its noisy gradients makes other sums. Epsilon is the same: this is post-processing.
    """
    if type(plan.strategy) is Independent or plan.n == 1 or not isinstance(optimizer, _ADAPTIVE):
        return
    name = type(optimizer).__name__
    warnings.warn(
        f"{name} divides its steps by statistics of noisy gradients, and the noise of this plan, "
        f"{plan.strategy.describe()}, was fitted to cancel in sums of gradients: the guarantee is the same, but the "
        "model may be worse than with independent noise. Take torch.optim.SGD with momentum, or ao.FTRL, or compare "
        "with mechanism='independent'",
        OptimizerWarning,
        stacklevel=stacklevel + 1,
    )
