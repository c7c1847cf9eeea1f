"""Messages: what one user sends in a round, as one vector; whatever is no message is the zero vector."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor

from anyorder import _check
from anyorder._closed import final
from anyorder.clipping.units import ClippedSum
from anyorder.errors import ArgumentError

__all__ = ["Layout", "Message", "clip_message"]

Message = Mapping[str, Any]
"""{parameter name: tensor or array}, a user's change: its own parameters less those that it was sent."""


@final
@dataclass(frozen=True)
class Layout:
    """The parameters that messages are about, one behind the other in one vector.

    Attributes:
        shapes: of each parameter, in the model's order.
    """

    shapes: Mapping[str, tuple[int, ...]]

    @classmethod
    def of(cls, parameters: Mapping[str, Tensor]) -> "Layout":
        """That of named parameters, which must be real floats: integers and counters are no part of a message."""
        for name, p in parameters.items():
            if not p.is_floating_point():
                raise ArgumentError(f"parameter {name} must be of floats, got {p.dtype}; leave it out of the optimizer")
        return cls({name: tuple(p.shape) for name, p in parameters.items()})

    @property
    def size(self) -> int:
        """Elements of the vector."""
        return sum(prod(shape) for shape in self.shapes.values())

    def flat(self, message: Any) -> Tensor:
        """(size,) float32, float64 where some part is: the message as a vector; zeros if it is not whole.

        Whole: exactly the names of the layout, each a real tensor or array of its shape, all elements finite. Nothing
        tells which it was: an error, a count or a log of bad messages would be a release, and one client's veto.
        """
        problem = self.problem(message)
        if problem is not None:
            return torch.zeros(self.size)
        parts = [torch.as_tensor(message[name]).detach().reshape(-1) for name in self.shapes]
        dtype = torch.float64 if any(part.dtype == torch.float64 for part in parts) else torch.float32
        vector = torch.cat([part.to("cpu", dtype) for part in parts])
        return vector if vector.isfinite().all() else torch.zeros(self.size)

    def problem(self, message: Any) -> str | None:
        """What is wrong with a message, or None: for a client with data of its own, never for a server."""
        if not isinstance(message, Mapping):
            return f"a message is a dict of {{name: tensor}}, got {type(message).__name__}"
        if message.keys() != self.shapes.keys():
            return f"its names must be those of the {len(self.shapes)} shared parameters, got {len(message)} others"
        for name, shape in self.shapes.items():
            value = message[name]
            if not isinstance(value, (Tensor, np.ndarray)):
                return f"{name} must be a tensor or an array, got {type(value).__name__}"
            if isinstance(value, Tensor) and (value.layout != torch.strided or value.device.type == "meta"):
                return f"{name} must be dense, with memory"
            floats = value.is_floating_point() if isinstance(value, Tensor) else value.dtype.kind == "f"
            if not floats:
                return f"{name} must be of floats, got {value.dtype}"
            if tuple(value.shape) != shape:
                return f"{name} must have shape {shape}, got {tuple(value.shape)}"
        return None

    def named(self, vector: Tensor) -> dict[str, Tensor]:
        """Views of a vector (size,), or of rows (.., size), by name and in their shapes."""
        sizes = [prod(shape) for shape in self.shapes.values()]
        pieces = torch.split(vector, sizes, -1)
        return {
            name: piece.view(*vector.shape[:-1], *shape)
            for (name, shape), piece in zip(self.shapes.items(), pieces, strict=True)
        }


def clip_message(update: Message, clip_norm: float) -> dict[str, Tensor]:
    """A user's change as it leaves the device: cut to L2 norm clip_norm, over all parameters together.

        update * min(1, clip_norm / ||update||),    and zeros where a number in it is NaN or infinite

    Integers and counters are left out: they never leave a client. A change of norm zero stays zero.

    Args:
        update: {parameter name: the client's change}; not written.
        clip_norm: `plan.clip_norm`, or the norm in force that the server told.
    Guarantee: the norm of the result is at most clip_norm in exact arithmetic; factors are rounded down.
    Returns: {name: tensor} of the floats in update, each in its own type, at least float32.
    Raises: ArgumentError for what is no dict of tensors or arrays.
    """
    clip_norm = _check.positive("clip_norm", clip_norm)
    if not isinstance(update, Mapping):
        raise ArgumentError(f"update must be a dict of {{parameter name: tensor}}, got {type(update).__name__}")
    tensors = {}
    for name, value in update.items():
        if not isinstance(value, (Tensor, np.ndarray)):
            raise ArgumentError(f"update[{name!r}] must be a tensor or an array, got {type(value).__name__}")
        tensor = torch.as_tensor(value).detach()
        if tensor.is_floating_point():
            tensors[name] = tensor
    if not tensors:
        return {}
    total = ClippedSum(tensors, clip_norm=clip_norm, scale=1.0)
    total.add(
        {name: tensor[None] for name, tensor in tensors.items()}, torch.zeros(1, dtype=torch.int64), complete=True
    )
    return total.finish()
