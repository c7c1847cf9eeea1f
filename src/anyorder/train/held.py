"""The parameters that are trained: those that the optimizer holds. All others stay as they are."""

from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn

from anyorder.errors import ArgumentError, TrainingError
from anyorder.train.fsdp import local

__all__ = ["Held"]

_BOUND: WeakSet[torch.optim.Optimizer] = WeakSet()
"""The optimizers whose steps are those of a release."""


class Held:
    """The trainable parameters of a model that an optimizer holds; the model's others are left out, and frozen.

    What is left out is in no clipped gradient, gets no noise, and takes no part in the size of the release. It is
    frozen (`requires_grad=False`) so that no gradient of private data can come to it by any way.

    Args:
        model: the user's.
        optimizer: over parameters of the model.

    Attributes:
        named: the parameters that are trained, in the model's order.
    Raises: ArgumentError for what is no optimizer, holds parameters that are not the model's, or is of another run;
        nothing is frozen.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise ArgumentError(f"optimizer must be a torch.optim.Optimizer, got {type(optimizer).__name__}")
        if isinstance(optimizer, torch.optim.LBFGS):
            raise ArgumentError("LBFGS takes several gradients of a batch in a step, and the plan covers one: use SGD")
        if optimizer in _BOUND:
            raise ArgumentError(
                "optimizer belongs to another private run, whose noise comes with each of its steps; make a new "
                "one over the model's parameters (its load_state_dict takes over what the old one has)"
            )
        self._optimizer = optimizer
        trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._check_known({id(p) for p in trainable.values()})
        held = {id(p) for p in self._parameters()}
        self.named = {name: p for name, p in trainable.items() if id(p) in held}
        self._known = {id(p) for p in self.named.values()}
        self._left_out = {name: p for name, p in trainable.items() if id(p) not in held}
        self._others = [p for p in model.parameters() if id(p) not in self._known]  # frozen before, or left out
        self._written: dict[nn.Parameter, tuple[Any, int]] = {}
        for p in self._left_out.values():
            p.requires_grad_(False)

    def bind(self) -> None:
        """The optimizer's steps are those of one release from here on, and of no other."""
        _BOUND.add(self._optimizer)

    def thaw(self) -> None:
        """Undo the freezing, where the model is not bound after all."""
        for p in self._left_out.values():
            p.requires_grad_(True)

    def _parameters(self) -> list[Any]:
        return [p for group in self._optimizer.param_groups for p in group["params"]]

    def _check_known(self, known: set[int]) -> None:
        held = self._parameters()
        own = [p for p in held if id(p) in known]
        strange = 0 if len(own) == len(held) else len([p for p in held if id(p) not in known and p.requires_grad])
        if strange or not own:
            raise ArgumentError(
                f"optimizer must hold parameters of the model that require gradients, and no others; {strange} of its "
                f"{len(held)} parameters are not among the model's {len(known)} trainable ones. Make it of this very "
                "model's parameters: after anyorder.clipping.convert, torch.compile or an adapter"
            )

    def check(self) -> None:
        """Raise TrainingError if a parameter was frozen since, or one that is left out is trained after all."""
        if [p.requires_grad for p in self.named.values()].count(False):
            raise TrainingError("a parameter was frozen after make_private; freeze before it, so that noise fits")
        if [p.requires_grad for p in self._others].count(True):
            raise TrainingError(
                "a parameter that was left out, because the optimizer did not hold it or it was frozen, requires a "
                "gradient now: no noise is planned for it. Give it to the optimizer before make_private, or freeze it"
            )

    def check_optimizer(self) -> None:
        """Refuse a step of the optimizer that would move more than what is released.

        A gradient that was left on a frozen parameter, by an earlier training perhaps, would go in without noise, and
        again in every step; so would those of a group that was added later.
        """
        self.check()
        self._check_known(self._known)
        if any(id(p) not in self._known and p.grad is not None for p in self._parameters()):
            raise TrainingError(
                "the optimizer holds a frozen parameter that has a gradient, which each step would add to it: no noise "
                "covers it. Set the gradient to None, or leave the parameter out of the optimizer"
            )

    def check_step(self) -> None:
        """Refuse a step of another optimizer state, and gradients that did not come through the private model.

        They would be lost, or not be private.
        """
        self.check_optimizer()
        for name, p in self.named.items():
            own, version = self._written.get(p, (None, 0))
            if p.grad is None or (p.grad is own and own._version == version) or not _has_numbers(p.grad):
                continue
            raise TrainingError(
                f"parameter {name} has a gradient that did not come through the private model, from a penalty on "
                "weights or another loss perhaps; use the optimizer's weight_decay, and zero_grad() before each step"
            )
        for name, p in self._left_out.items():
            if p.grad is not None and _has_numbers(p.grad):
                raise TrainingError(
                    f"parameter {name}, which the optimizer does not hold, has a gradient: no noise covers it, and "
                    "another optimizer that steps on it would train on private data in the open. Give all parameters "
                    "that are trained on this data to the one private optimizer, and set this gradient to None"
                )

    def write(self, p: nn.Parameter, gradient: Any) -> None:
        """Put a private gradient in place."""
        p.grad = gradient
        self._written[p] = (p.grad, gradient._version)


def _has_numbers(gradient: Tensor) -> bool:
    """Whether a gradient is not all zeros."""
    if gradient.is_sparse:
        gradient = gradient._values()
    return bool(local(gradient).any())
