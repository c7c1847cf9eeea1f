"""A loss in which no example of a batch can see another."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.func import vmap
from torch.utils import _pytree as pytree

from anyorder import checks
from anyorder.clipping.alone import check_argument, check_nothing_kept
from anyorder.clipping.coupling import unwatched
from anyorder.errors import ModelError

__all__ = ["ExampleLoss"]


class ExampleLoss(nn.Module):
    """The mean, or sum, over examples of a criterion that is given one example at a time.

        (1 / b) sum_i criterion(outputs[i : i + 1], targets[i : i + 1])

    The engine's guarantee needs a loss in which an example's term depends on that example alone. Many criteria are not
    of this kind: a cross-entropy with `ignore_index` divides by the number of unmasked tokens of the whole batch, a
    contrastive loss compares examples. Here the criterion is mapped over the batch, and cannot.

    Args:
        criterion: a function or module of batches, (1, ..) tensors and nested dicts and sequences of them, to one
            number. It must be one that `torch.func.vmap` can run: no branches on values. It must keep nothing of a
            batch for the next; a module that does is refused.
        reduction: "mean" or "sum", the same as `loss_reduction` of `make_private`.
    Raises: ModelError where the batches differ in length, where something is neither a tensor nor a setting (a list of
        labels would be seen by every example), or the criterion gives more than one number for an example.

    Where no label of an example counts, `CrossEntropyLoss` is 0 / 0: the loss shows NaN, the gradients are those of
    the others.
    """

    def __init__(self, criterion: Any, reduction: str = "mean") -> None:
        super().__init__()
        self.criterion = criterion
        self.reduction = checks.choice("reduction", reduction, {"mean", "sum"})

    def forward(self, *batches: Any) -> Tensor:
        """The loss of outputs and targets, whose first dimension is the batch."""
        lengths = {len(leaf) if leaf.dim() else 0 for leaf in pytree.tree_leaves(batches) if isinstance(leaf, Tensor)}
        if len(lengths) != 1:
            raise ModelError(f"outputs and targets must be batches of one length, got lengths {sorted(lengths)}")

        batches = unwatched(batches)
        for batch in batches:
            check_argument(batch, of="the criterion")

        def alone(*example: Any) -> Tensor:
            value = self.criterion(*pytree.tree_map_only(Tensor, lambda t: t.unsqueeze(0), example))
            if not isinstance(value, Tensor) or value.numel() != 1:
                shape = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
                raise ModelError(f"criterion must give one number for a batch of one example, got {shape}")
            return value.reshape(())

        dimensions = pytree.tree_map(lambda leaf: 0 if isinstance(leaf, Tensor) else None, batches)
        losses: Tensor = vmap(alone, in_dims=dimensions, randomness="different")(*batches)
        if isinstance(self.criterion, nn.Module):
            check_nothing_kept(self.criterion, of="the criterion")
        return losses.mean() if self.reduction == "mean" else torch.sum(losses)
