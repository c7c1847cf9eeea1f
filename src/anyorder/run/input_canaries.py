"""Canaries that are examples: in the data by secret coins, found by the losses of the model that was trained on it."""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.data import Dataset, default_collate

from anyorder.audit.result import Audited
from anyorder.errors import ArgumentError
from anyorder.plan.plan import Plan

__all__ = ["audit_inputs", "with_canaries"]


def with_canaries(dataset: Any, examples: Sequence[Any], coins: ArrayLike) -> Dataset[Any]:
    """The data set, and behind it a place for each canary: the example where its coin says so, else one that adds zero.

    What adds zero is the example with NaN in all its floating-point tensors: its gradient is not finite, so the engine
    takes zero for it (`non_finite="zero"`), and nothing else changes. That is what neighbours are to a plan: a unit
    with its gradients, or with zero in their place, whatever the order.

    Plan for `len(dataset) + len(examples)` examples. Mislabelled or random examples are remembered most.

    Args:
        dataset: a data set with a length.
        examples: canaries, as the data set's own examples, with a floating-point tensor in each.
        coins: (len(examples),) bools, fair, secret and independent: `anyorder.audit.Canaries.coins`, or the system's.
    Raises: ArgumentError.
    """
    return _WithCanaries(dataset, examples, _checked(examples, coins))


class _WithCanaries(Dataset[Any]):
    def __init__(self, dataset: Any, examples: Sequence[Any], coins: NDArray[np.bool_]) -> None:
        self._dataset, self._own = dataset, len(dataset)
        self._examples = [example if coin else _zero(example) for example, coin in zip(examples, coins, strict=True)]

    def __len__(self) -> int:
        return self._own + len(self._examples)

    def __getitem__(self, i: int) -> Any:
        return self._dataset[i] if i < self._own else self._examples[i - self._own]


def _zero(example: Any) -> Any:
    return pytree.tree_map_only(Tensor, _nan, example)


def _nan(value: Tensor) -> Tensor:
    return torch.full_like(value, torch.nan) if value.is_floating_point() else value


def _checked(examples: Sequence[Any], coins: ArrayLike) -> NDArray[np.bool_]:
    included = np.asarray(coins)
    if included.dtype != np.bool_ or included.shape != (len(examples),):
        raise ArgumentError(
            f"coins must be one bool for each of {len(examples)} canaries, got {included.dtype} of shape "
            f"{included.shape}"
        )
    for example in examples:
        if not any(isinstance(x, Tensor) and x.is_floating_point() for x in pytree.tree_leaves(example)):
            raise ArgumentError(
                "examples must hold a floating-point tensor each: NaN in it is what leaves a canary out; plant "
                "gradient canaries instead (audit_training), or phrases (anyorder audit canaries)"
            )
    return included


def audit_inputs(
    plan: Plan,
    model: nn.Module,
    examples: Sequence[Any],
    coins: ArrayLike,
    loss: Callable[[nn.Module, Any], Tensor],
    *,
    start: nn.Module | None = None,
) -> Audited:
    """What the model that was trained on `with_canaries(..)` tells of its canaries. The attacker sees nothing else.

        score = -loss(canary), or with `start` loss before - loss after

    Assumes that the coins were fair and independent, and used for nothing else. Canaries disturb each other, so bounds
    and p-value are those for one run of any mechanism ("one_run", "f_dp"). Such an attack sees a fraction of what a
    gradient canary shows; unlike that, it goes through the front end's clipping.

    Args:
        plan: what was run, for zero-out neighbours or add-or-remove ones.
        model: after the training.
        examples, coins: as `with_canaries` was given them.
        loss: of (model, a batch of one), as in `Setup`.
        start: the model before the training.
    Raises: ArgumentError.
    """
    if plan.neighbours == "replace-one":
        raise ArgumentError("plan must be for zero-out or add-or-remove neighbours: a canary is left out, not replaced")
    included = _checked(examples, coins)
    scores = -_losses(model, examples, loss)
    if start is not None:
        scores += _losses(start, examples, loss)
    return Audited(
        scores=scores, included=included, noise_std=None, mus=None, curve=plan.curve, delta=plan.delta,
        epsilon=plan.epsilon,
    )  # fmt: skip


def _losses(model: nn.Module, examples: Sequence[Any], loss: Callable[[nn.Module, Any], Tensor]) -> NDArray[np.float64]:
    """(count,) losses in evaluation mode; one that is not finite counts as 1e300."""
    trains = model.training
    model.eval()
    try:
        with torch.no_grad():
            found = [float(loss(model, default_collate([copy.copy(example)]))) for example in examples]
    finally:
        model.train(trains)
    return np.nan_to_num(np.asarray(found, np.float64), nan=1e300, posinf=1e300, neginf=-1e300)
