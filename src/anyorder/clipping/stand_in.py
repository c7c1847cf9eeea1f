"""Other tensors in the place of a module's own."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from anyorder.errors import ModelError

__all__ = ["stand_in"]


@contextmanager
def stand_in(module: nn.Module, tensors: Mapping[str, Tensor]) -> Iterator[None]:
    """Put tensors in the place of a module's parameters and buffers, and its own back at the end.

    A tensor that is held in several places is replaced in all of them; so is that of a layer that is in the model
    twice, where `torch.func.functional_call` leaves the replacement behind.

    Args:
        module: the module.
        tensors: by the names of `named_parameters` and `named_buffers`.
    Raises: ModelError if another tensor was put in the place of one of them.
    """
    named = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    other = {id(own): tensors[name] for name, own in named.items() if name in tensors}
    places: list[tuple[dict[str, Any], str, Tensor | None]] = [
        (held, name, own)
        for part in module.modules()
        for held in (part._parameters, part._buffers)
        for name, own in held.items()
        if id(own) in other
    ]
    try:
        for held, name, own in places:
            held[name] = other[id(own)]
        yield
        put = {name for held, name, own in places if held.get(name) is not other[id(own)]}
        if put:
            raise ModelError(
                f"forward gives {', '.join(sorted(put))} another tensor: a private model's parameters and buffers are "
                "put back after each example, and would keep their values. Leave them as they are in training; count "
                "with a Python number"
            )
    finally:
        for held, name, own in places:
            held[name] = own
