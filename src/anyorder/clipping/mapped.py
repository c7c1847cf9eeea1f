"""Functions that a module under vmap cannot be given as they stand, in a form that can be mapped over examples."""

from typing import Any

import torch
from torch import Tensor
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

__all__ = ["Mapped"]

_NEW = {torch.empty: 0.0, torch.zeros: 0.0, torch.ones: 1.0}
_DRAWN = {torch.rand, torch.randn, torch.randint}


class Mapped(TorchFunctionMode):
    """Runs a module on one example alone, for modules that vmap alone does not run.

        torch.empty, zeros, ones, full    a tensor of each example's own: values of the example may be written into it
        torch.rand(1), of one number      one number for all examples, so that forward may branch on it (whole layers
        and of at most one dimension      that are left out at random), as it does where it sees a whole batch
        group_norm                        of a copy: vmap has none for some channels of a tensor

    What is drawn so is drawn outside of vmap, and nothing of an example can be in it.

    Args:
        like: any tensor of the example.
    """

    def __init__(self, like: Tensor) -> None:
        super().__init__()
        self._like = like

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in _NEW and not kwargs.keys() - {"size", "dtype", "device"}:
            size = args or (kwargs.pop("size"),)
            return self._new(size, _NEW[func], **kwargs)
        if func is torch.full and len(args) == 2 and not kwargs.keys() - {"dtype", "device"}:
            size, value = args
            if not isinstance(value, Tensor):
                return self._new(size, value, **{"dtype": torch.tensor(value).dtype, **kwargs})
        if func in _DRAWN:
            with temporarily_clear_interpreter_stack():
                number = func(*args, **kwargs)
            if number.numel() == 1 and number.dim() <= 1:
                return number
        if func is F.group_norm:
            args = (args[0].clone(memory_format=torch.contiguous_format), *args[1:])
        return func(*args, **kwargs)

    def _new(self, size: Any, value: Any, *, dtype: Any = None, device: Any = None) -> Tensor:
        size = size[0] if len(size) == 1 and not isinstance(size[0], int) else size
        device = torch.get_default_device() if device is None else device
        return self._like.new_full(tuple(size), value, dtype=dtype or torch.get_default_dtype(), device=device)
