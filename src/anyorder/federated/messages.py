"""Messages: what one user sends in a round, as one vector; whatever is no message is the zero vector."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

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
        try:
            vector = self._vector(message)
        except Exception:  # whatever a stranger's object does when it is looked at, it is no message, and stops nobody
            vector = None
        return torch.zeros(self.size) if vector is None else vector

    def problem(self, message: Any) -> str | None:
        """What is wrong with a message, or None: for a client with data of its own, never for a server."""
        if not isinstance(message, Mapping):
            return f"a message is a dict of {{name: tensor}}, got {type(message).__name__}"
        missing, extra = [n for n in self.shapes if n not in message], [n for n in message if n not in self.shapes]
        if missing or extra:
            wrong = [f"{what} {_few(names)}" for what, names in (("missing", missing), ("extra", extra)) if names]
            return f"its names must be those of the {len(self.shapes)} shared parameters, got {'; '.join(wrong)}"
        for name, shape in self.shapes.items():
            problem = _problem_of(message[name], shape)
            if problem is not None:
                return f"{name} must {problem}"
        if self._vector(message) is None:
            return "its numbers must be finite"
        return None

    def _vector(self, message: Any) -> Tensor | None:
        if not isinstance(message, Mapping) or len(message) != len(self.shapes):
            return None
        values = [message[name] for name in self.shapes]  # looked up once: what is checked is what is taken
        if any(_problem_of(value, shape) for value, shape in zip(values, self.shapes.values(), strict=True)):
            return None
        parts = [_tensor(value).reshape(-1) for value in values]
        dtype = torch.float64 if any(part.dtype == torch.float64 for part in parts) else torch.float32
        vector = torch.cat([part.to("cpu", dtype) for part in parts])  # a copy, which nobody else writes
        return vector if vector.isfinite().all() else None

    def named(self, vector: Tensor) -> dict[str, Tensor]:
        """Views of a vector (size,), or of rows (.., size), by name and in their shapes."""
        sizes = [prod(shape) for shape in self.shapes.values()]
        pieces = torch.split(vector, sizes, -1)
        return {
            name: piece.view(*vector.shape[:-1], *shape)
            for (name, shape), piece in zip(self.shapes.items(), pieces, strict=True)
        }


def _few(names: list[Any]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(map(str, names[:3])) + more


_TENSORS = (Tensor, nn.Parameter)  # these very classes: one derived from them may answer as it likes


def _problem_of(value: Any, shape: tuple[int, ...]) -> str | None:
    if type(value) not in _TENSORS and type(value) is not np.ndarray:
        return f"be a tensor or an array, got {type(value).__name__}"
    is_tensor = type(value) in _TENSORS
    if is_tensor and (value.layout != torch.strided or value.is_meta or value.is_nested):
        return "be dense, with memory"
    if not (value.is_floating_point() if is_tensor else value.dtype.kind == "f" and value.dtype.itemsize <= 8):
        return f"be of floats, got {value.dtype}"
    return None if tuple(value.shape) == shape else f"have shape {shape}, got {tuple(value.shape)}"


def _tensor(value: Any) -> Tensor:
    if isinstance(value, Tensor):
        return value.detach()
    return torch.from_numpy(np.array(value, dtype=value.dtype.newbyteorder("="), order="C"))


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
        floats = value.is_floating_point() if isinstance(value, Tensor) else value.dtype.kind == "f"
        if floats:
            tensors[name] = _tensor(value)
    if not tensors:
        return {}
    total = ClippedSum(tensors, clip_norm=clip_norm, scale=1.0)
    total.add(
        {name: tensor[None] for name, tensor in tensors.items()}, torch.zeros(1, dtype=torch.int64), complete=True
    )
    return total.finish()
