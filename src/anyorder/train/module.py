"""The model as the training loop sees it: private where gradients flow, ordinary elsewhere."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from anyorder.clipping.stand_in import stand_in
from anyorder.train.fsdp import WholeModel

__all__ = ["PrivateModule"]


class PrivateModule(nn.Module):
    """A model whose backward pass yields clipped sums to its engine and never writes `.grad`.

    In training mode with gradients on, `forward` runs under the engine. In evaluation mode, or under
    `torch.no_grad()`, it is the model's own forward, cut off from its parameters, so that no unclipped gradient of
    them can arise. `state_dict` and `load_state_dict` are those of the model.

    Attributes:
        module: the user's model; the same object, with the same parameters.
    """

    def __init__(
        self, module: nn.Module, private_forward: Callable[..., Any], discard: Callable[[], None], whole: WholeModel
    ) -> None:
        super().__init__()
        self.module = module
        self.training = module.training
        self._private_forward = private_forward
        self._discard = discard
        self._whole = whole
        self.register_load_state_dict_pre_hook(_into_the_module)  # type: ignore[no-untyped-call]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's outputs, one row for each example."""
        if not torch.is_grad_enabled():
            return self.module(*args, **kwargs)
        if not self.training:
            whole = self._whole.gather()
            with stand_in(whole, {name: p.detach() for name, p in whole.named_parameters()}):
                return whole(*args, **kwargs)
        return self._private_forward(args, kwargs)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients of the step that has not been taken."""
        self._discard()
        self.module.zero_grad(set_to_none)

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """The model's own state."""
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load the model's own state."""
        return self.module.load_state_dict(state_dict, strict, assign)

    def __getattr__(self, name: str) -> Tensor | nn.Module | Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)


def _into_the_module(private: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """Let the state of a module that holds a private one be loaded, as it was saved: under the model's own names."""
    del private
    for name in [name for name in state_dict if name.startswith(prefix)]:
        state_dict[f"{prefix}module.{name.removeprefix(prefix)}"] = state_dict.pop(name)
