"""A module as a function of one example alone, in the form that torch.func maps over a batch.

What torch.func cannot map as it stands is given a form that it can: recurrent layers, attention, activation
checkpoints, masks of transformers, numbers that are drawn to branch on.
"""

import sys
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from anyorder.clipping import torch_private as private
from anyorder.clipping.kept_tensors import SETTING, Made, note
from anyorder.clipping.program import Arguments, ModuleOutput, Place
from anyorder.clipping.torch_private import pytree
from anyorder.clipping.validate import own_error, unmapped
from anyorder.errors import AnyorderError, ModelError

# -- other parameters ------------------------------------------------------------------------------------------------


@contextmanager
def reparametrized(module: nn.Module, tensors: Mapping[str, Tensor]) -> Iterator[None]:
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


# -- functions that vmap cannot be given as they stand ---------------------------------------------------------------

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
            with private.outside_transforms():
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


# -- activation checkpoints ------------------------------------------------------------------------------------------

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


def _other_variant(*args: Any, **kwargs: Any) -> Iterator[None]:
    """What `checkpoint` begins before it runs the segment, and ends after it; `context_fn` has a name since 2.14."""
    context_fn = kwargs["context_fn"] if "context_fn" in kwargs else args[2]
    with context_fn()[0]:
        yield


def _requires_grad(tensor: Tensor, requires_grad: bool = True) -> Tensor:
    """Models ask for gradients of a segment's input so that it gives some to its parameters; vmap would refuse it.

    It changes nothing there: a forward that reads `requires_grad` of the same tensor sees False.
    """
    asked_by_torch = private.inplace_requires_grad_allowed()
    if requires_grad and private.is_wrapped(tensor) and not asked_by_torch:
        return tensor
    return private.requires_grad_(tensor, requires_grad)


_REPLACED: tuple[tuple[Any, str, Callable[..., Any]], ...] = (
    (*private.CHECKPOINT_VARIANTS[0], _reentrant),
    (*private.CHECKPOINT_VARIANTS[1], _other_variant),
    (Tensor, "requires_grad_", _requires_grad),
)


# -- transformers ----------------------------------------------------------------------------------------------------


@contextmanager
def no_branches_on_masks() -> Iterator[None]:
    """Let transformers build its masks without a look at their values, as it does when a model is exported.

    It leaves a mask out where no token is padded: the same result, but a branch that cannot be mapped over examples.
    """
    utils: Any = sys.modules.get("transformers.utils.import_utils")
    if utils is None:
        yield
        return
    before = utils.is_jit_tracing  # which `is_tracing` asks, wherever it was imported to
    utils.is_jit_tracing = _yes
    try:
        yield
    finally:
        utils.is_jit_tracing = before


def is_cache(value: Any) -> bool:
    """Whether a value is a cache of keys and values, for generation: models return one that training does not need."""
    caches: Any = sys.modules.get("transformers.cache_utils")
    return caches is not None and isinstance(value, caches.Cache)


def _yes() -> bool:
    return True


# -- the call --------------------------------------------------------------------------------------------------------

Tensors = tuple[Tensor, ...]
Within = Callable[[dict[str, Tensor]], AbstractContextManager[Any]]

_NOTHING = nullcontext()
_RECURRENT = (nn.RNNBase, nn.RNNCellBase)


class ExampleCall:
    """The call `module(*args, **kwargs)` on a batch, as a function of the parameters and of one example.

    The module sees a batch of one. It cannot see another example, since no other is among what it is given.

    Args:
        module: the module. Its buffers are copied: every example sees what they hold now.
        arguments: what the module is called with.
        made: what the model's last pass made; see `kept_tensors.one_pass`.
        mapped: whether functions are put into the form that `Mapped` gives them.

    Attributes:
        tensors, size: those of the arguments.
        buffers: the copies, by name.
        output: the structure of what the last call returned.
    """

    def __init__(self, module: nn.Module, arguments: Arguments, made: Made, *, mapped: bool = False) -> None:
        self._arguments, self.tensors, self.size = arguments, arguments.tensors, arguments.size
        self.mapped, self.made = mapped, made
        self._module = module
        self.buffers = {name: buffer.detach().clone() for name, buffer in module.named_buffers()}
        self._versions = {name: private.version(buffer) for name, buffer in self.buffers.items()}
        self.output: ModuleOutput

    def __call__(
        self, parameters: dict[str, Tensor], example: Tensors, within: AbstractContextManager[Any] | None = None
    ) -> tuple[Tensors, Tensors]:
        """The output tensors of one example, without the batch dimension: the differentiable ones, and the others.

        Args:
            parameters: the parameters to use in the place of the module's, by name.
            example: one slice of every tensor in `tensors`, without the batch dimension.
            within: what to run the module in.
        """
        tensors = [tensor.unsqueeze(0) for tensor in example]
        note(self.made, *tensors)
        args, kwargs = self._arguments.filled(tensors)
        del tensors
        forms = Mapped(example[0]) if self.mapped else nullcontext()
        with reparametrized(self._module, self.buffers | parameters), within or nullcontext(), forms:
            output = self._module(*args, **kwargs)
        self._check_buffers()
        places: list[Any] = [output]
        structure = None
        if type(output) is not Tensor:
            places, structure = private.flattened(output)
        differentiable: list[Tensor] = []
        others: list[Tensor] = []
        for i, leaf in enumerate(places):
            if is_cache(leaf):  # a model's own, which a loss does not use: as with use_cache=False
                places[i] = None
                continue
            _check_output(leaf)
            if isinstance(leaf, Tensor):
                places[i] = Place(leaf.is_floating_point() or leaf.is_complex())
                (differentiable if places[i].differentiable else others).append(leaf.squeeze(0) if leaf.dim() else leaf)
        if not differentiable:
            raise ModelError("the model has no floating-point output, so that no loss can train it; return one")
        self.output = ModuleOutput(places, structure)
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
        args, kwargs = self._arguments.filled(self.tensors)
        held = {name: b.clone() for name, b in self.buffers.items()} | parameters
        with reparametrized(self._module, held), within(parameters):
            self._module(*args, **kwargs)

    def assemble(self, differentiable: Tensors, others: Tensors) -> Any:
        """The module's output structure of the last call, filled with batched tensors."""
        return self.output.filled(differentiable, others)

    def _check_buffers(self) -> None:
        written = [name for name, buffer in self.buffers.items() if private.version(buffer) != self._versions[name]]
        if written:
            raise ModelError(
                f"the module writes its buffers {', '.join(written)} in forward: what it writes would not be private. "
                "Keep such state out of the model, or call .eval() on the part that writes it; count with a Python "
                "number, not with a buffer"
            )


def _check_output(leaf: Any) -> None:
    if not isinstance(leaf, (Tensor, *SETTING)):
        raise ModelError(
            "the model's output must be tensors, or tuples, lists, dicts of tensors; got a "
            f"{type(leaf).__name__}: return its tensors instead"
        )
    if isinstance(leaf, Tensor) and leaf.dim() and leaf.shape[0] != 1:
        raise ModelError(
            "every output of the model must have the examples as its leading dimension; on one example it has shape "
            f"{tuple(leaf.shape)}, not (1, ...): use batch_first=True, move that dimension to the front, name the "
            "dimension that squeeze() drops (squeeze(1), else it drops the one example too), or take the batch size "
            "from the input (x.shape[0]) where it is written into forward. The last state of a recurrent layer has its "
            "layers first, also under batch_first=True: do not return it, or return state.transpose(0, 1)"
        )


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
    part._flat_weights[:] = [getattr(part, name, None) for name in part._flat_weights_names]


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
