"""The workload of a torch optimizer and its scheduler. Torch is imported when it is asked for."""

import copy
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from anyorder import checks
from anyorder.errors import ArgumentError
from anyorder.workload.base import Workload, iterates
from anyorder.workload.given import GivenWorkload

__all__ = ["from_optimizer"]


def from_optimizer(optimizer: Any, scheduler: Any, n: int) -> Workload:
    """The workload of n steps of a `torch.optim.SGD`, `Adam` or `AdamW`, with a scheduler (or None) that steps with it.

    The schedule is read by running copies of both on a dummy parameter; yours are not touched. Rates are divided by
    the largest one where there is no weight decay. A scheduler that also cycles the momentum, or dampening, gives a
    `Custom` workload, O(n^2).

    Adam is not linear in the gradients. Its workload is that of second moments that stand still, which noise makes much
    the same at all steps, without weight decay:

        p_t = p_{t-1} + rate_t m_t / (1 - beta^(t+1)),    m_t = beta m_{t-1} + g_t

    Raises: ArgumentError for other optimizers (plan with `prefix_sum`: what they do with private gradients is
        post-processing), schedulers that look at the loss, parameter groups that differ in more than their rate, and a
        beta of Adam that changes.
    """
    import torch

    n = checks.integer("n", n, low=1)
    adam = type(optimizer) in (torch.optim.Adam, torch.optim.AdamW)
    if not adam and type(optimizer) is not torch.optim.SGD:
        raise ArgumentError(
            f"optimizer must be torch.optim.SGD, Adam or AdamW, got {type(optimizer).__name__}; for any other, leave "
            "optimizer= out when you plan, or give ao.SGD(momentum=..) where it averages gradients: what it does with "
            "private gradients is post-processing"
        )
    if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
        raise ArgumentError("scheduler must not depend on the loss, got ReduceLROnPlateau; use a schedule of the step")
    if scheduler is not None and getattr(scheduler, "optimizer", None) is not optimizer:
        raise ArgumentError("scheduler must belong to the optimizer, got one that was made for another")
    history = _simulate(optimizer, scheduler, n)
    rates, betas, decays = (np.array([[group[i] for group in step] for step in history]) for i in range(3))
    shapes = rates / np.maximum(rates.max(axis=0), np.finfo(float).tiny)
    same = np.ptp(betas, axis=1).max() == 0 and np.ptp(decays) == 0
    if adam:
        return _of_adam(n, shapes, betas)
    first = optimizer.param_groups[0]
    nesterov, dampening = bool(first["nesterov"]), float(first["dampening"])
    same = same and np.allclose(shapes, shapes[:, :1]) and (not decays.any() or np.ptp(rates, axis=1).max() == 0)
    if not same or any((g["nesterov"], g["dampening"]) != (nesterov, dampening) for g in optimizer.param_groups):
        raise ArgumentError(
            "parameter groups must have the same momentum and weight decay, and rates that differ by a constant factor "
            "(with weight decay: equal rates); plan the groups apart, or with custom(matrix)"
        )
    decay, beta = float(decays[0, 0]), betas[:, 0]
    rate = rates[:, 0] if decay else shapes[:, 0]
    if np.ptp(beta) == 0 and dampening == 0:
        return Workload(n, momentum=beta[0], learning_rates=rate, weight_decay=decay, nesterov=nesterov)
    return GivenWorkload(iterates(np.eye(n), rate, beta, (decay, 0.0), nesterov, dampening))


def _of_adam(n: int, shapes: NDArray[np.float64], betas: NDArray[np.float64]) -> Workload:
    """From rates (n, groups) as shares of the largest one, and the first betas (n, groups)."""
    if np.ptp(betas) > 0 or not np.allclose(shapes, shapes[:, :1]):
        raise ArgumentError(
            "parameter groups of Adam must have the same first beta in all steps, and rates that differ by a constant "
            "factor; with a scheduler that cycles beta, such as OneCycleLR, give cycle_momentum=False"
        )
    beta = float(betas[0, 0])
    rates = shapes[:, 0] / (1 - beta ** np.arange(1, n + 1))
    return Workload(n, momentum=beta, learning_rates=rates / rates.max())


def _simulate(optimizer: Any, scheduler: Any, n: int) -> list[list[tuple[float, float, float]]]:
    """(rate, momentum or first beta, weight decay) of every group at every step, from copies."""
    import torch

    groups = []
    for group in optimizer.param_groups:
        options = {key: copy.deepcopy(value) for key, value in group.items() if key != "params"}
        groups.append({**options, "params": [torch.nn.Parameter(torch.zeros(()))]})
    dummy = torch.optim.SGD(groups, lr=1.0)
    memo: dict[int, Any] = {id(optimizer): dummy}
    advance: Callable[[], None] = (lambda: None) if scheduler is None else copy.deepcopy(scheduler, memo).step
    history = []
    for _ in range(n):
        groups = dummy.param_groups
        history.append([(float(g["lr"]), _beta(g), float(g["weight_decay"])) for g in groups])
        with warnings.catch_warnings():  # a scheduler looks for its mark on the optimizer's step, which the copy lacks
            warnings.simplefilter("ignore", UserWarning)
            advance()
    return history


def _beta(group: dict[str, Any]) -> float:
    return float(group["betas"][0] if "betas" in group else group["momentum"])
