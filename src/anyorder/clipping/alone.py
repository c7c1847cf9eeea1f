"""A module as a function of one example alone, in the form that torch.func maps over a batch."""

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils import _pytree as pytree

from anyorder.clipping.explain import own_error, unmapped
from anyorder.clipping.huggingface import is_cache, no_branches_on_masks
from anyorder.clipping.kept import Made, is_of_batch, note
from anyorder.clipping.mapped import Mapped
from anyorder.clipping.segments import plain_segments
from anyorder.clipping.stand_in import stand_in
from anyorder.errors import AnyorderError, ModelError

__all__ = ["Alone", "Tensors", "check_argument", "check_nothing_kept", "mappable"]

Tensors = tuple[Tensor, ...]
Within = Callable[[dict[str, Tensor]], AbstractContextManager[Any]]

_NOTHING = nullcontext()
_RECURRENT = (nn.RNNBase, nn.RNNCellBase)
_SETTING = (type(None), bool, int, float, str)
_PLAIN = frozenset(_SETTING)
_CONTAINERS = frozenset({tuple, list, set, dict, OrderedDict})


@dataclass(frozen=True)
class _Place:
    """Where an output tensor goes in the module's output structure."""

    differentiable: bool


class Alone:
    """The call `module(*args, **kwargs)` on a batch, as a function of the parameters and of one example.

    The module sees a batch of one. It cannot see another example, since no other is among what it is given.

    Args:
        module: the module. Its buffers are copied: every example sees what they hold now.
        args, kwargs: what the module is called with on the batch; see `PerUnitClipping.forward`.
        made: what the model's last pass made; see `kept`.
        mapped: whether functions are put into the form that `Mapped` gives them.

    Attributes:
        tensors: the tensors among the arguments, each with leading dimension `size`.
        size: B, the number of examples.

    Raises: ModelError if the tensors do not share a leading dimension, or an argument cannot be split by example.
    """

    def __init__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], made: Made, *, mapped: bool = False
    ) -> None:
        for argument in (*args, *kwargs.values()):
            check_argument(argument)
        self._structure: pytree.TreeSpec | None = None
        if kwargs or not all(type(argument) is Tensor for argument in args):
            leaves, self._structure = pytree.tree_flatten((args, kwargs))
        else:  # as most models are called: nothing to flatten
            leaves = list(args)
        self._slots = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        self._settings = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self.tensors: Tensors = tuple(leaves[i] for i in self._slots)
        self.size = _batch_size(self.tensors)
        self.mapped, self.made = mapped, made
        self._module = module
        self._buffers = {name: buffer.detach().clone() for name, buffer in module.named_buffers()}
        self._versions = {name: _version(buffer) for name, buffer in self._buffers.items()}
        self._output: tuple[list[Any], pytree.TreeSpec | None]

    def __call__(
        self, parameters: dict[str, Tensor], example: Tensors, within: AbstractContextManager[Any] | None = None
    ) -> tuple[Tensors, Tensors]:
        """The output tensors of one example, without the batch dimension: the differentiable ones, and the others.

        Args:
            parameters: the parameters to use in the place of the module's, by name.
            example: one slice of every tensor in `tensors`, without the batch dimension.
            within: what to run the module in.
        """
        leaves: list[Any] = list(self._settings)
        for slot, tensor in zip(self._slots, example, strict=True):
            leaves[slot] = tensor.unsqueeze(0)
            note(self.made, leaves[slot])
        args, kwargs = self._called_with(leaves)
        forms = Mapped(example[0]) if self.mapped else nullcontext()
        with stand_in(self._module, self._buffers | parameters), within or nullcontext(), forms:
            output = self._module(*args, **kwargs)
        self._check_buffers()
        places: list[Any] = [output]
        structure = None
        if type(output) is not Tensor:
            places, structure = pytree.tree_flatten(output)
        differentiable: list[Tensor] = []
        others: list[Tensor] = []
        for i, leaf in enumerate(places):
            if is_cache(leaf):  # a model's own, which a loss does not use: as with use_cache=False
                places[i] = None
                continue
            _check_output(leaf)
            if isinstance(leaf, Tensor):
                places[i] = _Place(leaf.is_floating_point() or leaf.is_complex())
                (differentiable if places[i].differentiable else others).append(leaf.squeeze(0) if leaf.dim() else leaf)
        if not differentiable:
            raise ModelError("the model has no floating-point output, so that no loss can train it; return one")
        self._output = places, structure
        return tuple(differentiable), tuple(others)

    def explain(
        self,
        error: Exception,
        parameters: dict[str, Tensor],
        tensors: Tensors,
        within: Within = lambda _: _NOTHING,
    ) -> str:
        """Why the module cannot be mapped; raises what the first example alone raises without vmap, if that fails too.

        The caller keeps the random numbers as they are.

        Args:
            within: what a module with these parameters runs in.
        """
        parameters = {name: p.clone() for name, p in parameters.items()}
        with torch.no_grad():
            try:
                self(parameters, tuple(t[0] for t in tensors), within(parameters))
            except AnyorderError:
                raise
            except Exception as own:
                raise own_error(own, self._module, self.tensors, lambda: self._on_batch(parameters, within)) from own
        return unmapped(self._module, error)

    def _on_batch(self, parameters: dict[str, Tensor], within: Within) -> None:
        """The module on the whole batch, as without a guarantee."""
        leaves = list(self._settings)
        for slot, tensor in zip(self._slots, self.tensors, strict=True):
            leaves[slot] = tensor
        args, kwargs = self._called_with(leaves)
        held = {name: b.clone() for name, b in self._buffers.items()} | parameters
        with stand_in(self._module, held), within(parameters):
            self._module(*args, **kwargs)

    def assemble(self, differentiable: Tensors, others: Tensors) -> Any:
        """The module's output structure of the last call, filled with batched tensors."""
        places, structure = self._output
        sources = {True: iter(differentiable), False: iter(others)}
        leaves = [next(sources[place.differentiable]) if isinstance(place, _Place) else place for place in places]
        return leaves[0] if structure is None else pytree.tree_unflatten(leaves, structure)

    def _called_with(self, leaves: list[Any]) -> Any:
        """Arguments and keyword arguments."""
        return (leaves, {}) if self._structure is None else pytree.tree_unflatten(leaves, self._structure)

    def _check_buffers(self) -> None:
        written = [name for name, buffer in self._buffers.items() if _version(buffer) != self._versions[name]]
        if written:
            raise ModelError(
                f"the module writes its buffers {', '.join(written)} in forward: what it writes would not be private. "
                "Keep such state out of the model, or call .eval() on the part that writes it"
            )


def _version(tensor: Tensor) -> int:
    """How often the tensor was written; torch does not count under inference_mode."""
    return 0 if tensor.is_inference() else tensor._version


def check_argument(argument: Any, of: str = "the model") -> None:
    """A setting stands alone; a container holds tensors. A list of lengths would tell one example of the others."""
    if isinstance(argument, (Tensor, *_SETTING)):
        return
    leaves = pytree.tree_leaves(argument)
    strange = next((leaf for leaf in leaves if leaf is not None and not isinstance(leaf, Tensor)), None)
    if strange is not None:
        raise ModelError(
            f"the arguments of {of} must be tensors (or containers of tensors) that can be split by example, and "
            f"settings None, bool, int, float, str outside containers; got a {type(strange).__name__}"
            f"{'' if strange is argument else f' inside a {type(argument).__name__}'}: make it a tensor with one row "
            "for each example"
        )


def _batch_size(tensors: Tensors) -> int:
    shapes = ", ".join(str(tuple(tensor.shape)) for tensor in tensors) or "none"
    sizes = {tensor.shape[0] if tensor.dim() else None for tensor in tensors}
    size = sizes.pop() if len(sizes) == 1 else None
    if size is None:
        raise ModelError(
            "the tensors given to the model must share their leading dimension, the examples of the batch; got shapes "
            f"{shapes}. Repeat a shared tensor for each example, or make it a buffer of the model"
        )
    if any(tensor.requires_grad for tensor in tensors):
        raise ModelError(
            "the tensors given to the model must not require gradients: what came before the model would get a "
            "gradient that is not private. Put those layers into the model, or detach the tensors"
        )
    return size


def _check_output(leaf: Any) -> None:
    if not isinstance(leaf, (Tensor, *_SETTING)):
        raise ModelError(
            "the model's output must be tensors, or tuples, lists, dicts of tensors; got a "
            f"{type(leaf).__name__}: return its tensors instead"
        )
    if isinstance(leaf, Tensor) and leaf.dim() and leaf.shape[0] != 1:
        raise ModelError(
            "every output of the model must have the examples as its leading dimension; on one example it has shape "
            f"{tuple(leaf.shape)}, not (1, ...): use batch_first=True, move that dimension to the front, or take the "
            "batch size from the input (x.shape[0]) where it is written into forward"
        )


def check_nothing_kept(module: nn.Module, of: str = "the model") -> None:
    """Refuse a module that keeps tensors of this batch: in the next, they would let its units move other units."""
    for name, part in module.named_modules():
        for attribute, value in vars(part).items():
            kind = type(value)
            if kind in _PLAIN or (kind in _CONTAINERS and not value) or attribute == "_modules":
                continue  # most attributes, and the modules, whose turn comes
            if _is_of_batch(value):
                raise ModelError(
                    f"{name or f'{of} itself'} ({type(part).__name__}) keeps a tensor of the batch in its "
                    f"attribute {attribute!r}: a later batch would depend on these examples. Return it from forward, "
                    "or do not store it in training"
                )


def _is_of_batch(value: Any) -> bool:
    """Whether a value is, or holds, a tensor that was mapped."""
    kind = type(value)
    if kind in _PLAIN:
        return False
    if isinstance(value, Tensor):
        return is_of_batch(value)
    if kind in _CONTAINERS:
        return any(map(_is_of_batch, value.values() if isinstance(value, dict) else value))
    leaves = pytree.tree_leaves(value)
    return any(isinstance(x, Tensor) and is_of_batch(x) for x in leaves)


@contextmanager
def mappable(
    modules: Sequence[nn.Module], device: torch.device, traced: Collection[nn.Module] | None = None
) -> Iterator[None]:
    """Torch's settings under which more modules can be mapped; the functions that they compute do not change.

    Args:
        modules, device: the parts of what is to be mapped, and where its inputs are.
        traced: the layers that a tracer runs on the whole batch, as it does attention; None without a tracer.
    """
    backends = torch.backends
    recurrent = [part for part in modules if isinstance(part, _RECURRENT)]
    with plain_segments(), no_branches_on_masks(), ExitStack() as stack:
        for part in recurrent:
            if isinstance(part, nn.RNNBase):
                stack.callback(_own_weights_again, part)
        recurrent = [part for part in recurrent if part not in (traced or ())]
        # Fused kernels have no batching rule: they would fail, or loop over the examples.
        stack.callback(backends.mha.set_fastpath_enabled, backends.mha.get_fastpath_enabled())
        backends.mha.set_fastpath_enabled(False)
        if device.type == "cpu" and traced is None:
            stack.enter_context(sdpa_kernel(SDPBackend.MATH))
        if recurrent:
            stack.callback(setattr, backends.mkldnn, "enabled", backends.mkldnn.enabled)
            stack.callback(setattr, backends.cudnn, "enabled", backends.cudnn.enabled)
            backends.mkldnn.enabled = False  # type: ignore[assignment]
            backends.cudnn.enabled = False
        for part in recurrent:
            stack.callback(part.register_forward_pre_hook(_map_state, with_kwargs=True).remove)
        yield


def _own_weights_again(part: nn.RNNBase) -> None:
    """A recurrent layer keeps a list of its weights, in which those of the last call are left."""
    part._flat_weights = [getattr(part, name, None) for name in part._flat_weights_names]


def _map_state(part: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any], dict[str, Any]]:
    """Give a recurrent layer an initial state that is mapped like its input, as it adds the input to it in place."""
    x = args[0] if args else kwargs["input"]
    state = args[1] if len(args) > 1 else kwargs.get("hx")
    if not isinstance(x, Tensor):
        raise ModelError(
            f"{type(part).__name__} must be given a padded tensor, got a {type(x).__name__}, which joins the examples"
        )
    if state is None:
        state = _zero_state(part, x)
    return (x,), {"hx": pytree.tree_map(lambda s: s + x.new_zeros(s.shape, dtype=s.dtype), state)}


def _zero_state(part: nn.Module, x: Tensor) -> Any:
    if isinstance(part, nn.RNNBase):
        batch = () if x.dim() == 2 else (x.shape[0 if part.batch_first else 1],)
        layers = part.num_layers * (2 if part.bidirectional else 1)
        hidden = x.new_zeros(layers, *batch, part.proj_size or part.hidden_size)
        return (hidden, x.new_zeros(layers, *batch, part.hidden_size)) if isinstance(part, nn.LSTM) else hidden
    assert isinstance(part, nn.RNNCellBase)
    hidden = x.new_zeros(*x.shape[:-1], part.hidden_size)
    return (hidden, hidden) if isinstance(part, nn.LSTMCell) else hidden
