"""What a model keeps of one batch for the next, wherever it keeps it: a list, a closure, a global.

A batch that depends on an earlier one lets a unit move the sums of steps in which it takes no part. Tensors of a pass
are those of `torch.func` (their data are all examples', and can be read inside alone), so that what is left of them
when the next pass begins was kept by the model.
"""

import gc
import sys
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from anyorder.errors import ModelError

__all__ = ["MADE", "Witness", "is_of_batch", "note", "one_pass"]

MADE: "list[weakref.ref[Tensor]]" = []
"""What functions made in this pass, or the last one. Written to in place: a call of Python's own for each function
would cost time, and be compiled where the model is."""


def is_of_batch(tensor: Tensor) -> bool:
    """Whether a tensor has numbers, or copies, for each example: a transform of `torch.func` wraps others too."""
    functorch = torch._C._functorch
    while functorch.is_functorch_wrapped_tensor(tensor):
        if functorch.is_batchedtensor(tensor):
            return True
        tensor = functorch.get_unwrapped(tensor)
    return False


def note(*made: Tensor) -> None:
    """Remember tensors that no function of torch made."""
    MADE.extend(map(weakref.ref, made))


class Witness(TorchFunctionMode):
    """Notes what every function makes."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for made in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(made, Tensor):
                MADE.append(weakref.ref(made))
        return result


@contextmanager
def one_pass() -> Iterator[None]:
    """One run of a model on a batch, or on some of its examples.

    Raises: ModelError if anything of an earlier one is still there.
    """
    if _left():
        gc.collect()  # what only a cycle holds, nobody can read
    MADE[:] = [made for made in _left() if _is_held(made())]
    if MADE:
        raise ModelError(
            "the model keeps tensors of an earlier batch, in a list, a closure or a global perhaps: a later batch "
            "would depend on those examples. Return them from forward, and keep nothing of a batch in training"
        )
    # What compiled parts would be compiled to is not used, and the compiler keeps tensors.
    eager = torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()
    try:
        with eager:
            yield
    except BaseException:
        MADE.clear()  # the error's own frames hold them
        raise


def _is_held(tensor: Any) -> bool:
    """Whether Python holds it: torch's own graphs may, where an operation in place has made a cycle of them."""
    return any(not isinstance(holder, FrameType) for holder in gc.get_referrers(tensor))


def _left() -> "list[weakref.ref[Tensor]]":
    return [made for made in MADE if (tensor := made()) is not None and is_of_batch(tensor)]
