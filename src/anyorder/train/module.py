"""The model as the training loop sees it: private where gradients flow, ordinary elsewhere."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from anyorder.clipping.mapping import reparametrized
from anyorder.errors import TrainingError
from anyorder.train.fsdp import WholeModel

__all__ = ["PrivateModule"]


class PrivateModule(nn.Module):
    """A model whose backward pass yields clipped sums to its engine and never writes `.grad`.

    In training mode with gradients on, `forward` runs under the engine. In evaluation mode, or under
    `torch.no_grad()`, it is the model's own forward, cut off from its parameters, so that no unclipped gradient of
    them can arise; a backward pass from there is an error that says so. `state_dict` and `load_state_dict` are those of
    the model. It belongs to one run: to copy, average, save or script, take `module`.

    Attributes:
        module: the user's model; the same object, with the same parameters.
    """

    def __init__(
        self,
        module: nn.Module,
        private_forward: Callable[..., Any],
        discard: Callable[[], None],
        whole: WholeModel,
        check_shown: Callable[[], None],
    ) -> None:
        super().__init__()
        self.module = module
        self.training = module.training
        self._private_forward = private_forward
        self._discard = discard
        self._whole = whole
        self._check_shown = check_shown
        self.register_load_state_dict_pre_hook(_into_the_module)  # type: ignore[no-untyped-call]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's outputs, one row for each example."""
        if not torch.is_grad_enabled():
            self._check_shown()
            return self.module(*args, **kwargs)
        if not self.training:
            self._check_shown()
            whole = self._whole.gather()
            with reparametrized(whole, {name: p.detach() for name, p in whole.named_parameters()}):
                outputs = whole(*args, **kwargs)
            return pytree.tree_map(_of_evaluation, outputs)
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

    def __deepcopy__(self, memo: dict[int, Any]) -> "PrivateModule":
        raise _one_of_a_run("copied", "model.module: AveragedModel(model.module), copy.deepcopy(model.module)")

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise _one_of_a_run("pickled", "model.module, or save model.state_dict()")

    def __prepare_scriptable__(self) -> Any:
        raise _one_of_a_run("scripted", "model.module, after training")

    def _replicate_for_data_parallel(self) -> Any:
        raise _one_of_a_run("replicated by DataParallel", "one process for each device, by torchrun")

    def __getattr__(self, name: str) -> Tensor | nn.Module | Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)


def _one_of_a_run(done: str, cure: str) -> TrainingError:
    return TrainingError(f"the private model is bound to its engine and cannot be {done}; take {cure}")


class _Evaluation(torch.autograd.Function):
    """The outputs of evaluation: a backward pass of them has no way to go."""

    @staticmethod
    def forward(ctx: Any, root: Tensor, output: Tensor) -> Tensor:
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise TrainingError(
            "the loss is of outputs that the private model gave in evaluation mode, which no gradient leaves; call "
            "model.train() before the model is called, or torch.no_grad() or .detach() for outputs that only look"
        )


def _of_evaluation(leaf: Any) -> Any:
    if not isinstance(leaf, Tensor) or leaf.requires_grad or not (leaf.is_floating_point() or leaf.is_complex()):
        return leaf
    return _Evaluation.apply(torch.zeros((), requires_grad=True), leaf)  # type: ignore[no-untyped-call]


def _into_the_module(private: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """Let the state of a module that holds a private one be loaded, as it was saved: under the model's own names."""
    del private
    for name in [name for name in state_dict if name.startswith(prefix)]:
        state_dict[f"{prefix}module.{name.removeprefix(prefix)}"] = state_dict.pop(name)
