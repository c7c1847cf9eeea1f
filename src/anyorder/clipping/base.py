"""What a clipping engine is: a module's outputs, and on backward the sum of the units' clipped gradients."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

__all__ = ["PerUnitClipping", "Receive", "Table", "count_of"]

Receive = Callable[[dict[str, Tensor]], None]
"""Takes the sum over units of their clipped gradients, by parameter name, and of their schedule's own coordinates."""


class Table(Protocol):
    """A parameter of which a model reads rows and nothing else: how they are read."""

    @property
    def num_rows(self) -> int:
        """V, from 1 to 2^40."""

    @property
    def width(self) -> int:
        """D."""

    @property
    def dtype(self) -> torch.dtype:
        """That of the rows."""

    @property
    def device(self) -> torch.device:
        """Where the rows are."""

    def read(self, ids: Tensor) -> Tensor:
        """(*ids.shape, D), the rows as they are now, a tensor of its own; ids are integers from 0 to V - 1.

        It is called once for each lookup of a forward pass, with the ids of all its examples; and again for examples
        whose forward runs again, where it must return the same.
        """


def count_of(name: str) -> str:
    """The name under which the rows of a table are counted; see `make_clipping`."""
    return f"{name} (count)"


class PerUnitClipping(ABC):
    """Makes the one number a Gaussian mechanism needs true: no unit adds more than clip_norm to the sum.

        sum over units u of  clip(scale * sum_{i in u} grad l_i),   clip(v) = v min(1, clip_norm / ||v||)
                                                                    [Kairouz et al. 2021, Algorithm 1, line 4]

    The norm is over all trainable parameters together, and over the whole unit: the gradients of a unit's examples
    are added before they are clipped. A unit whose norm is NaN or infinite adds the zero vector, which is in the ball;
    nothing tells of it, and it moves no other unit's part.

    Guarantee: removing a unit's examples changes the sum by at most clip_norm, replacing them by at most
    2 clip_norm, for fixed parameters -- if the loss is a sum over examples of terms, each of that example's output
    and target alone, times a constant (`nn.CrossEntropyLoss()` is; a contrastive loss, and a mean over the unmasked
    tokens of the batch, are not). The criterion belongs to the caller; the training engine watches it in the first
    batch (`coupling`).
    """

    @abstractmethod
    def forward(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        groups: Tensor,
        clip_norm: float,
        scale: float,
        receive: Receive,
    ) -> Any:
        """The module's outputs; their backward calls `receive` once with the sum of clipped gradients.

        Args:
            args, kwargs: what the module is called with; every tensor in them has leading dimension B. A setting
                (None, bool, int, float, str) stands directly as an argument, not inside a container.
            groups: (B,) int64, equal for examples of one unit.
            clip_norm: L2 bound on a unit's gradient, above 0.
            scale: what the gradients are multiplied by before they are clipped: B for a loss that is a mean.
            receive: called during backward with {parameter name: sum}, one entry for each trainable parameter, in
                float32 (float64 where the parameter is), and for what the schedule counts; `p.grad` is never
                written.
        Returns: the outputs, tensors with leading dimension B, attached to autograd. With gradients disabled they
            are detached, and `receive` is never called.

        Raises:
            ArgumentError: groups, clip_norm or scale break their rule.
            ModelError: the inputs do not share B, or the module cannot be run on one example alone.
            NonFiniteError: in backward, under non_finite="refuse", a unit's gradient is NaN or infinite; `receive` is
                not called.
            TrainingError: in backward, a second time on the same outputs, or with create_graph=True, or after a
                parameter or an input was changed in place.
        """

    def state_dict(self) -> dict[str, Any]:
        """What was found out on the way and decides in which order sums are added: for a run that goes on as it was."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with what another such engine found out."""
        del state
