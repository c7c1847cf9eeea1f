"""Rows that only fill a batch up: they go through the model, and nothing comes back through them."""

from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

__all__ = ["without_padding"]


def without_padding(outputs: Any, examples: int, padding: int) -> Any:
    """The outputs, whose gradients in the rows behind the examples' are zero, whatever the loss makes of them.

    A row whose output's gradient is zero adds exactly zero to the sum: 0 times a finite number, and a unit whose
    gradient is not finite adds zero anyhow. A schedule of clip norms counts units above the norm, which it is not.
    """
    if not padding:
        return outputs

    def of(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or not leaf.requires_grad:
            return leaf
        return _WithoutPadding.apply(leaf, examples)  # type: ignore[no-untyped-call]

    return pytree.tree_map(of, outputs)


class _WithoutPadding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, output: Tensor, examples: int) -> Tensor:
        ctx.examples = examples
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        gradient = gradient.clone()
        gradient[ctx.examples :] = 0
        return gradient, None
