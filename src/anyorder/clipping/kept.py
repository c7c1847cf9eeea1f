"""What a model keeps of one batch for the next, wherever it keeps it: a list, a closure, a global.

A batch that depends on an earlier one lets a unit move the sums of steps in which it takes no part. Tensors of a pass
are those of `torch.func` (their data are all examples', and can be read inside alone), so that what is left of them
when the next pass begins was kept by the model.
"""

import functools
import gc
import sys
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from anyorder.errors import ModelError

__all__ = ["Made", "Witness", "is_of_batch", "note", "one_pass"]

Made = list["weakref.ref[Tensor]"]
"""What functions made in a private model's pass, or in its last one; one list for each private model. Written to in
place: a call of Python's own for each function would cost time, and be compiled where the model is."""


def is_of_batch(tensor: Tensor) -> bool:
    """Whether a tensor has numbers, or copies, for each example: a transform of `torch.func` wraps others too."""
    functorch = torch._C._functorch
    while functorch.is_functorch_wrapped_tensor(tensor):
        if functorch.is_batchedtensor(tensor):
            return True
        tensor = functorch.get_unwrapped(tensor)
    return False


def note(made: Made, *tensors: Tensor) -> None:
    """Remember tensors that no function of torch made."""
    made.extend(map(weakref.ref, tensors))


class Witness(TorchFunctionMode):
    """Notes what every function makes."""

    def __init__(self, made: Made) -> None:
        super().__init__()
        self._made = made

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for made in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(made, Tensor):
                self._made.append(weakref.ref(made))
        return result


@contextmanager
def one_pass(made: Made) -> Iterator[None]:
    """One run of a model on a batch, or on some of its examples.

    Args:
        made: what was made in the model's last run; what is made in this one goes there.
    Raises: ModelError if anything of an earlier one is still there.
    """
    if _left(made):
        gc.collect()  # what only a cycle holds, nobody can read
    made[:] = [one for one in _left(made) if _holders(one) > 0]
    if made:
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
        made.clear()  # the error's own frames hold them
        raise


def _left(made: Made) -> Made:
    return [one for one in made if (tensor := one()) is not None and is_of_batch(tensor)]


def _holders(made: "weakref.ref[Tensor]") -> int:
    """How often Python holds a tensor: torch's own graphs may too, where an operation in place made a cycle of them.

    By the count of references. To look for the holders (`gc.get_referrers`) hands out what other threads are making.
    """
    return _references(made) - _of_nobody()


def _references(made: "weakref.ref[Tensor]") -> int:
    tensor: Any = made()
    if tensor is None:
        return 0
    tensor._fix_weakref()  # where torch holds the only reference, it is Python's from here on, and not counted
    by_torch = _torch_adds_one() and tensor._use_count() > 1
    return sys.getrefcount(tensor) - by_torch


@functools.cache
def _torch_adds_one() -> bool:
    """Whether torch, where a graph holds a tensor, has a reference beside those of Python, as from 2.10 on."""
    with torch.inference_mode(False), torch.enable_grad():
        tensor, factor = torch.zeros(()), torch.zeros((), requires_grad=True)
        before = sys.getrefcount(tensor)
        product = factor * tensor
        return sys.getrefcount(tensor) > before and product.requires_grad and hasattr(tensor, "_use_count")


@functools.cache
def _of_nobody() -> int:
    """The references that `_references` makes while it counts: Python's releases differ in that."""
    held = [torch.zeros(())]
    return _references(weakref.ref(held[0])) - len(held)
