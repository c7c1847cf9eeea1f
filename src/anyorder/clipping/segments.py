"""Activation checkpoints inside a model, `torch.utils.checkpoint`: run as plain parts of it while it is mapped.

A checkpoint drops what its segment saved, and runs the segment again in backward. Here backward comes after vmap has
ended, and what a segment holds are tensors of that vmap. So while a model is mapped, its segments run once, and what
they save is kept. Little is lost: the inputs of all layers and the gradients of their outputs are held until the norms
are known, whatever was run again. `chunk_size` bounds memory instead: each chunk's forward pass runs again in backward.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor

__all__ = ["plain_segments"]

_lock = threading.Lock()
_inside = threading.local()  # .passes: how many of this thread's passes are in a model
_undo: list[Callable[[], None]] = []
_passes = 0


@contextmanager
def plain_segments() -> Iterator[None]:
    """Run checkpointed segments, of either variant, as if they were not; in this thread alone.

    However `checkpoint` was imported, it looks its two variants up in its own module, and these are replaced here. A
    release of torch in which they are elsewhere runs its own, which no model survives under vmap: the reentrant
    variant has no batching rule, and the other needs hooks on saved tensors, which are disabled there.
    """
    global _passes
    with _lock:
        _passes += 1
        if _passes == 1:
            for owner, name, plain in _REPLACED:
                _replace(owner, name, plain)
    _inside.passes = getattr(_inside, "passes", 0) + 1
    try:
        yield
    finally:
        _inside.passes -= 1
        with _lock:
            _passes -= 1
            while not _passes and _undo:
                _undo.pop()()


def _replace(owner: Any, name: str, plain: Callable[..., Any]) -> None:
    original = getattr(owner, name, None)
    if original is None:
        return
    own = name in vars(owner)
    before = vars(owner).get(name)

    def either(*args: Any, **kwargs: Any) -> Any:
        return (plain if getattr(_inside, "passes", 0) else original)(*args, **kwargs)

    setattr(owner, name, either)
    _undo.append(lambda: setattr(owner, name, before) if own else delattr(owner, name))


def _reentrant(function: Callable[..., Any], preserve_rng_state: bool, *args: Any) -> Any:
    return function(*args)


def _other_variant(
    function: Any, preserve_rng_state: Any, context_fn: Callable[[], Any], *_: Any, **kwargs: Any
) -> Iterator[None]:
    """What `checkpoint` begins before it runs the segment, and ends after it."""
    with context_fn()[0]:
        yield


def _requires_grad(tensor: Tensor, requires_grad: bool = True) -> Tensor:
    """Models ask for gradients of a segment's input so that it gives some to its parameters; vmap would refuse it.

    It changes nothing there: a forward that reads `requires_grad` of the same tensor sees False.
    """
    functorch = torch._C._functorch
    asked_by_torch = functorch.get_inplace_requires_grad_allowed()
    if requires_grad and functorch.is_functorch_wrapped_tensor(tensor) and not asked_by_torch:
        return tensor
    return torch._C.TensorBase.requires_grad_(tensor, requires_grad)


_REPLACED: tuple[tuple[Any, str, Callable[..., Any]], ...] = (
    (torch.utils.checkpoint.CheckpointFunction, "apply", _reentrant),
    (torch.utils.checkpoint, "_checkpoint_without_reentrant_generator", _other_variant),
    (Tensor, "requires_grad_", _requires_grad),
)
