"""Every private name of torch that the package uses, once: a release of torch that lacks one is told from here.

What the guarantee rests on is required: without it importing this file raises MissingDependencyError. What only saves
time is None where a release lacks it, and what takes its place does the same. Nobody else writes `torch._C`.
"""

import dataclasses
import functools
import gc
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from itertools import repeat
from operator import attrgetter
from types import MappingProxyType, ModuleType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch._functorch import apis as _vmap_apis
from torch._functorch import eager_transforms as _eager
from torch._functorch import pyfunctorch
from torch._functorch import vmap as _vmap
from torch.autograd import graph as _autograd_graph
from torch.nn.modules import batchnorm, instancenorm
from torch.nn.utils import parametrizations
from torch.nn.utils.parametrize import ParametrizationList as ParametrizationList
from torch.utils import _python_dispatch, _pytree, checkpoint

from anyorder.errors import MissingDependencyError


def check_names(owner: object, names: tuple[str, ...], package: ModuleType) -> None:
    """Raise MissingDependencyError unless the owner has all the names: another release may do the same otherwise."""
    missing = [name for name in names if not hasattr(owner, name)]
    if missing:
        label = getattr(owner, "__name__", type(owner).__name__)
        raise MissingDependencyError(
            f"{label} of {package.__name__} {getattr(package, '__version__', '')} has no {', '.join(missing)}, on "
            "which private training rests; install a release that anyorder was tested with"
        )


# -- torch.func: what is an example's own, and what is kept of a batch -----------------------------------------------

_functorch: Any = torch._C._functorch
_apis_of_vmap: Any = _vmap_apis
_graph: Any = _autograd_graph
_autograd: Any = torch.autograd
FUNCTORCH = (
    "_add_batch_dim", "_remove_batch_dim", "_unwrap_batched", "get_inplace_requires_grad_allowed", "get_unwrapped",
    "is_batchedtensor", "is_functorch_wrapped_tensor", "maybe_current_level",
)  # fmt: skip
check_names(_functorch, FUNCTORCH, torch)
check_names(_vmap, ("_add_batch_dim", "_remove_batch_dim"), torch)
check_names(_eager, ("_wrap_for_grad", "_unwrap_for_grad"), torch)
check_names(_eager, ("_wrap_functional_tensor", "_unwrap_functional_tensor"), torch)
check_names(_graph, ("_engine_run_backward",), torch)
check_names(torch._C, ("_current_graph_task_id", "_is_torch_function_enabled"), torch)

add_batch_dim: Callable[[Tensor, int, int], Tensor] = _functorch._add_batch_dim
remove_batch_dim: Callable[[Tensor, int, int, int], Tensor] = _functorch._remove_batch_dim
unwrap_batched: Callable[[Tensor, int], tuple[Tensor, int | None]] = _functorch._unwrap_batched
get_unwrapped: Callable[[Tensor], Tensor] = _functorch.get_unwrapped
is_wrapped: Callable[[Tensor], bool] = _functorch.is_functorch_wrapped_tensor
is_batched: Callable[[Tensor], bool] = _functorch.is_batchedtensor
inplace_requires_grad_allowed: Callable[[], bool] = _functorch.get_inplace_requires_grad_allowed
current_level: Callable[[], int | None] = _functorch.maybe_current_level
backward_pass: Callable[[], int] = torch._C._current_graph_task_id
"""Which one runs in this thread, or below zero."""

enter_vmap: Callable[[int, str], int] | None = getattr(_functorch, "_vmap_increment_nesting", None)
leave_vmap: Callable[[], int] | None = getattr(_functorch, "_vmap_decrement_nesting", None)
interpreter: Callable[[], Any] | None = getattr(pyfunctorch, "retrieve_current_functorch_interpreter", None)
check_names(pyfunctorch, ("temporarily_clear_interpreter_stack",), torch)
outside_transforms: Callable[[], AbstractContextManager[Any]] = pyfunctorch.temporarily_clear_interpreter_stack


def unwrapped(tensor: Tensor) -> Tensor:
    """The tensor of all examples behind one that transforms wrap."""
    while is_wrapped(tensor):
        tensor = get_unwrapped(tensor)
    return tensor


def is_of_batch(tensor: Tensor) -> bool:
    """Whether a tensor has numbers, or copies, for each example: a transform of `torch.func` wraps others too."""
    while is_wrapped(tensor):
        if is_batched(tensor):
            return True
        tensor = get_unwrapped(tensor)
    return False


_VERSION = attrgetter("_version")


def version(tensor: Tensor) -> int:
    """How often the tensor was written; torch does not count under inference_mode."""
    return 0 if tensor.is_inference() else tensor._version


def versions(tensors: Iterable[Tensor]) -> list[int]:
    """The `version` of each."""
    try:
        return list(map(_VERSION, tensors))
    except RuntimeError:  # of a tensor that inference_mode made
        return list(map(version, tensors))


def tells_of_a_write(error: RuntimeError) -> bool:
    """Whether torch says that a tensor was written between its two passes."""
    return any(map(str(error).__contains__, ("modified by an inplace operation", "has been modified inplace")))


check_names(torch._ops, ("OpOverload", "OpOverloadPacket"), torch)


@functools.cache
def written_by(function: Any) -> frozenset[tuple[int, str]]:
    """The places and names of the arguments that an operator of torch.ops says it writes; none of other functions."""
    operators: Any = torch._ops
    if isinstance(function, operators.OpOverloadPacket):
        return frozenset().union(*(written_by(getattr(function, name)) for name in function.overloads()))
    if not isinstance(function, operators.OpOverload):
        return frozenset()
    written = [(i, one) for i, one in enumerate(function._schema.arguments) if one.is_write]
    return frozenset((sys.maxsize if one.kwarg_only else i, one.name) for i, one in written)


# -- functions and modes ---------------------------------------------------------------------------------------------

check_names(
    torch._C, ("DisableTorchFunction", "DisableTorchFunctionSubclass", "TensorBase", "_EnableTorchFunction"), torch
)
WithoutModes: Any = torch._C.DisableTorchFunction
WithoutSubclasses: Any = torch._C.DisableTorchFunctionSubclass
WithSubclasses: Any = torch._C._EnableTorchFunction
asks_subclasses: Callable[[], bool] = torch._C._is_torch_function_enabled
"""Inside of `WithoutSubclasses`: they are asked again."""
requires_grad_: Callable[[Tensor, bool], Tensor] = torch._C.TensorBase.requires_grad_
# in a release that does not tell how many there are: as if there were one
_function_modes: Callable[[], int] = getattr(torch._C, "_len_torch_function_stack", lambda: 1)
dispatch_modes: Callable[[], int] = getattr(torch._C, "_len_torch_dispatch_stack", lambda: 1)
DispatchMode: Any = _python_dispatch.TorchDispatchMode
check_names(torch.overrides, ("_get_current_function_mode_stack",), torch)
check_names(torch, ("_GLOBAL_DEVICE_CONTEXT",), torch)
check_names(torch._C, ("_push_on_torch_function_stack", "_pop_torch_function_stack", "_get_function_stack_at"), torch)
_push_mode: Any = torch._C._push_on_torch_function_stack
_pop_mode: Any = torch._C._pop_torch_function_stack
_mode_at: Any = torch._C._get_function_stack_at
_stack_of_modes: Any = torch.overrides._get_current_function_mode_stack
_below: list[Any] = []


def place_below(mode: Any, wanted: bool) -> bool:
    """Put a function mode of this thread below all but a default device, or take it away; whether it was there.

    What `torch.set_default_device` put there stays the lowest, as torch wants it; above stays what `with torch.device`
    put there, for at its end torch takes the last one away, whatever it is. `function_modes` does not count this one.
    """
    count = _function_modes()
    if count < 2 and (not count or _mode_at(0) is mode):  # as it mostly is
        if wanted and not count:
            _below[:] = [mode]
            _push_mode(mode)
        elif count and not wanted:
            _pop_mode()
        return count == 1
    found = [_pop_mode() for _ in range(count)]  # the last one first
    others = [one for one in found if one is not mode]
    if wanted:
        _below[:] = [mode]
        default = getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None)
        others.insert(len(others) - (bool(others) and others[-1] is default), mode)
    for one in reversed(others):
        _push_mode(one)
    return mode in found


def function_modes() -> int:
    """How many function modes there are, of others."""
    count = _function_modes()
    return count if not count or not _below else sum(one not in _below for one in _stack_of_modes())


def guard_compiler() -> None:
    """From here on code that `torch.compile` made runs without the mode that `place_below` put there. Done once."""
    frames: Any = sys.modules.get("torch._dynamo.eval_frame")
    if frames is None or hasattr(frames._maybe_set_eval_frame, "guarded"):
        return
    enter, here = frames._maybe_set_eval_frame, threading.local()

    def guarded(callback: Any) -> Any:
        frame, left = sys._getframe(1), vars(here).setdefault("left", [])
        if callable(callback) and _below and place_below(_below[0], False):
            left.append(frame)
        elif left and left[-1] is frame:  # which ends where it began
            left.pop()
            place_below(_below[0], True)
        return enter(callback)

    guarded.guarded = True  # type: ignore[attr-defined]
    frames._maybe_set_eval_frame = guarded


@contextmanager
def aside(mode: Any) -> Iterator[bool]:
    """Without a mode that `place_below` put there, till the end of the block; whether it was there."""
    was_there = place_below(mode, False)
    try:
        yield was_there
    finally:
        if was_there:
            place_below(mode, True)


unsafe_view: Callable[[Tensor, tuple[int, ...]], Tensor] = torch.ops.aten._unsafe_view
"""As `view`, of a tensor that nobody else has: nothing after it could write a view in place."""


def memory(tensor: Tensor) -> int:
    """Equal for tensors that share their memory, as long as one of them lives."""
    return int(tensor.untyped_storage()._cdata)


OF_A_BATCH, WRITTEN, VIEWED = "of_a_batch", "written_by_a_batch", "viewed_by_a_batch"
"""Said of memory: it was made of a batch; it stood outside and has numbers of one; it stands outside, and a batch chose
views of it (`counts[label]`)."""


def share_memory(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors show one memory."""
    try:
        return memory(one) == memory(other)
    except (NotImplementedError, RuntimeError):  # a sparse one has none of its own, nor one that a transform wraps
        return False


def mark_memory(tensor: Tensor, what: str = OF_A_BATCH) -> None:
    """Say something of a tensor's memory, as long as it lives and whoever shows it.

    What stands outside was not made of a batch, whatever shows it.
    """
    try:
        storage = tensor.untyped_storage()
        if what is not OF_A_BATCH or not hasattr(storage, VIEWED):
            setattr(storage, what, True)
    except (NotImplementedError, RuntimeError):  # a sparse tensor has no memory of its own
        return


def is_marked(*tensors: Any, what: tuple[str, ...] = (OF_A_BATCH, WRITTEN)) -> bool:
    """Whether `mark_memory` was told one of these of the memory of a tensor: by default, that numbers of a batch stand
    there. What is no tensor is passed over.
    """
    for one in tensors:
        try:
            if isinstance(one, Tensor):
                own = one if one.layout is torch.strided else _values_of(one)
                if any(map(hasattr, repeat(own.untyped_storage()), what)):
                    return True
        except (NotImplementedError, RuntimeError):
            continue
    return False


def _values_of(tensor: Tensor) -> Tensor:
    """Of a sparse tensor, which has no memory of its own."""
    return tensor._values() if tensor.layout is torch.sparse_coo else tensor.values()


class _Here(threading.local):
    in_pass = False


here = _Here()
"""Of this thread. `in_pass`: whether a private model runs on a batch; see `kept_tensors.one_pass`."""

OF_A_BATCH_KINDS: set[Any] = set()
"""The classes of tensors and numbers of a batch, as the training loop has them."""


check_names(torch._C, ("_storage_Use_Count",), torch)


def shows_too(tensor: Tensor) -> None:
    """Say that a tensor shows its memory, where that matters: `showing` need not search for it."""
    if is_marked(tensor, what=(VIEWED,)):
        storage: Any = tensor.untyped_storage()
        storage.shown_by = [*(r for r in getattr(storage, "shown_by", ()) if r() is not None), weakref.ref(tensor)]


def is_of_torch(tensor: Tensor) -> bool:
    """Whether torch made its memory: that of an array of NumPy may be shown by any number of storages."""
    return tensor.layout is not torch.strided or bool(tensor.untyped_storage().resizable())


def uses_of_memory(tensor: Tensor) -> int:
    """How many tensors show the memory of this one, itself among them; what autograd has saved may count too."""
    storage = tensor.untyped_storage()  # which is a use too, while it lives: in torch 2.8 only then
    return int(torch._C._storage_Use_Count(storage._cdata)) - 1


def showing(tensor: Tensor, kinds: Sequence[type]) -> list[Tensor]:
    """The tensors of Python that show the memory of this one, itself among them: those of these classes, and bases."""
    found = dict[int, Tensor]()

    def look(one: Tensor | None) -> None:
        if one is not None and share_memory(one, tensor):
            found[id(one)] = one

    look(tensor)
    look(tensor._base)
    storage: Any = tensor.untyped_storage()
    for reference in getattr(storage, "shown_by", ()):
        look(reference())
    if len(found) != uses_of_memory(tensor):  # a search is dear: some milliseconds, and more of many tensors
        for one in gc.get_objects():
            if type(one) in kinds:
                look(one)
                look(one._base)
        storage.shown_by = list(map(weakref.ref, found.values()))
    return list(found.values())


check_names(torch._C._autograd, ("_top_saved_tensors_default_hooks",), torch)
hooks_on_saved = functools.partial(torch._C._autograd._top_saved_tensors_default_hooks, True)


def changes_saved_tensors() -> bool:
    """Whether hooks get what autograd saves for the backward pass, others than those of `save_on_cpu`.

    Those of `checkpoint` run a function again, in the backward pass, where no subclass is asked.
    """
    hooks = hooks_on_saved()
    return hooks is not None and any(getattr(h, "__module__", "") != _graph.__name__ for h in hooks)


# -- references ------------------------------------------------------------------------------------------------------

check_names(Tensor, ("_fix_weakref", "_version"), torch)


def held_by_python(tensor: Any) -> None:
    """Where torch holds the only reference to a tensor, it is Python's from here on."""
    tensor._fix_weakref()


def use_count(tensor: Any) -> int | None:
    """How often torch's graphs and Python hold the tensor's memory; None in releases that do not tell."""
    return tensor._use_count() if hasattr(tensor, "_use_count") else None


pytree = _pytree
check_names(_pytree, ("SUPPORTED_NODES", "register_pytree_node"), torch)


def flattened(tree: Any) -> tuple[list[Any], Any]:
    """What `pytree.tree_flatten` gives; dataclasses and read-only mappings are made known to it, and looked into."""
    leaves, spec = pytree.tree_flatten(tree)
    while kinds := {type(leaf): leaf for leaf in leaves if _is_opaque(leaf)}:
        for kind, leaf in kinds.items():
            if kind is MappingProxyType:
                pytree.register_pytree_node(kind, lambda x: ([*x.values()], [*x]), _read_only)
            else:
                names = [each.name for each in dataclasses.fields(leaf)]
                flat = functools.partial(_fields, names)
                pytree.register_pytree_node(kind, flat, functools.partial(_dataclass, kind))
        leaves, spec = pytree.tree_flatten(tree)
    return leaves, spec


def _is_opaque(leaf: Any) -> bool:
    known = type(leaf) in pytree.SUPPORTED_NODES or isinstance(leaf, type)
    return not known and (dataclasses.is_dataclass(leaf) or type(leaf) is MappingProxyType)


def _fields(names: list[str], value: Any) -> tuple[list[Any], list[str]]:
    return [getattr(value, name) for name in names], names


def _dataclass(kind: type, values: Iterable[Any], names: Any) -> Any:
    """One of these values, frozen or not, as it was made: no `__init__` runs again."""
    made: Any = object.__new__(kind)
    for name, value in zip(names, values, strict=True):
        object.__setattr__(made, name, value)
    return made


def _read_only(values: Iterable[Any], names: Any) -> MappingProxyType[Any, Any]:
    return MappingProxyType(dict(zip(names, values, strict=True)))


# -- modules ---------------------------------------------------------------------------------------------------------

BatchNorm = batchnorm._BatchNorm
InstanceNorm = instancenorm._InstanceNorm
check_names(parametrizations, ("_SpectralNorm",), torch)
SpectralNorm: Any = parametrizations._SpectralNorm
check_names(SpectralNorm, ("_power_method", "_reshape_weight_to_matrix"), torch)
check_names(nn.Module(), ("_parameters", "_buffers", "_modules"), torch)
check_names(nn.RNN(1, 1, device="meta"), ("_all_weights", "_flat_weights", "_flat_weights_names"), torch)

HOOKS_OF_ALL_MODULES: list[Mapping[Any, Any]] = [
    value
    for name, value in vars(nn.modules.module).items()
    if name.startswith("_global_") and isinstance(value, Mapping)
]
_OTHER = "_checkpoint_without_reentrant_generator"
CHECKPOINT_VARIANTS: tuple[tuple[Any, str], ...] = (
    (checkpoint.CheckpointFunction, "apply"),
    (checkpoint, _OTHER + "_impl" if hasattr(checkpoint, _OTHER + "_impl") else _OTHER),  # the first since torch 2.14
)
"""What `torch.utils.checkpoint.checkpoint` looks up and calls: the reentrant variant, and the other."""


Function = TypeVar("Function", bound=Callable[..., Any])


def never_compiled(function: Function) -> Function:
    """Have `torch.compile` run a function, and all that it calls, as they are written; no import of the compiler.

    What `torch.compiler.disable` says, which imports it. A release without these names compiles what it can, or fails.
    """
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    frames: Any = torch._C._dynamo.eval_frame
    if hasattr(frames, "_FrameExecStrategy"):
        skip = frames._FrameAction.SKIP
        frames.set_code_exec_strategy(function.__code__, frames._FrameExecStrategy(skip, skip))
    return function


COMPILER = "torch._dynamo.config"
"""Where the compiler's settings are, once it is loaded."""


def compiler_leaves(kind: type[Tensor]) -> bool:
    """Have `torch.compile`, where it is loaded, run what it meets tensors of this kind in as it is written.

    Returns: whether that is new.
    """
    config: Any = sys.modules.get(COMPILER)
    if config is None or kind in config.nontraceable_tensor_subclasses:
        return False
    config.nontraceable_tensor_subclasses.add(kind)
    return True


def guard_transforms(refuse: Callable[[Any], None], follow: Callable[..., Any]) -> None:
    """From here on `refuse` is asked of each tensor that vmap, grad or jvp of torch.func takes in or gives. Done once.

    Before that, `follow(run, in_dims, out_dims, args, kwargs)` makes what a function under vmap gives. Torch has no
    hook there. All other tensors go on as before, for 0.1 microseconds each.
    """
    if not hasattr(getattr(_apis_of_vmap, "vmap_impl", refuse), "guarded"):
        _guard_vmap(follow)
    for module, name in (
        (_vmap, "_add_batch_dim"),
        (_vmap, "_remove_batch_dim"),
        (_eager, "_unwrap_for_grad"),
        (_eager, "_wrap_functional_tensor"),
        (_eager, "_unwrap_functional_tensor"),
        (_eager, "_wrap_for_grad"),
        (torch.autograd.forward_ad, "make_dual"),
    ):
        wrap = getattr(module, name)
        if not hasattr(wrap, "guarded"):
            setattr(module, name, _asked_before(wrap, refuse))


def guard_backward(run_elsewhere: Callable[[Callable[[], Any], Any], Any]) -> None:
    """From here on `run_elsewhere(run, gradients)` runs each backward pass that begins where subclasses are asked."""
    run = _graph._engine_run_backward
    if hasattr(run, "guarded"):
        return

    @functools.wraps(run)
    def guarded(outputs: Any, gradients: Any, *args: Any, **kwargs: Any) -> Any:
        if not asks_subclasses():
            return run(outputs, gradients, *args, **kwargs)
        return run_elsewhere(functools.partial(run, outputs, gradients, *args, **kwargs), gradients)

    guarded.guarded = True  # type: ignore[attr-defined]
    _graph._engine_run_backward = _autograd._engine_run_backward = guarded


def guard_makers(run: Callable[[str, Callable[[], Any], Any], Any]) -> None:
    """From here on `run(name, make, (args, kwargs))` runs what makes tensors of others past everybody.

    Of `torch.distributed` these are the methods of all process groups, whatever name a loop has of what calls them.
    """
    places: list[tuple[Any, str, Iterable[str]]] = [(torch, "", _SPARSE), (torch.nested, "nested.", _NESTED)]
    if torch.distributed.is_available():
        talk: Any = torch.distributed.distributed_c10d
        methods = [name for name in dir(talk.ProcessGroup) if name.startswith(_TALKS)]
        places += [(talk.ProcessGroup, TALK, methods), (talk, TALK, ["_object_to_tensor"])]
        check_names(talk, ("_object_to_tensor",), torch)
    for owner, prefix, names in places:
        for name in names:
            make = getattr(owner, name, None)
            if make is not None and not hasattr(make, "guarded"):
                setattr(owner, name, _run_by(make, functools.partial(run, prefix + name)))


TALK = "distributed."
_TALKS = ("all", "_allgather", "broadcast", "gather", "recv", "reduce", "_reduce", "scatter", "send")


def guard_variable(kind: type[Tensor]) -> None:
    """From here on `Variable(x)` of older loops is of this kind too if x is: `x.detach()`, which torch tells of."""
    make = torch.autograd.Variable.__new__
    if hasattr(make, "guarded"):
        return

    def guarded(cls: Any, data: Any = None, requires_grad: bool = False, *args: Any, **kwargs: Any) -> Any:
        if type(data) is not kind:
            return make(cls, data, requires_grad, *args, **kwargs)
        return data.detach().requires_grad_() if requires_grad else data.detach()

    guarded.guarded = True  # type: ignore[attr-defined]
    torch.autograd.Variable.__new__ = guarded  # type: ignore[method-assign]


def guard_data(give: Callable[[Callable[..., None], Tensor, Any], None]) -> None:
    """From here on `give(put, tensor, value)` does `tensor.data = value`: torch asks no value of what it is.

    `tensor.real = value` and `tensor.imag = value` write as `copy_` does, of which torch tells.
    """
    if "data" not in vars(Tensor):
        kept: Any = torch._C.TensorBase
        Tensor.data = property(kept.data.__get__, functools.partial(give, kept.data.__set__))  # type: ignore[assignment]
        for part in (kept.real, kept.imag):
            setattr(Tensor, part.__name__, property(part.__get__, functools.partial(_write, part.__get__)))


def _write(part: Callable[[Tensor], Tensor], tensor: Tensor, value: Any) -> None:
    part(tensor).copy_(value)


_SPARSE = tuple(f"sparse_{kind}_tensor" for kind in ("coo", "csr", "csc", "bsr", "bsc", "compressed"))
_NESTED = ("nested_tensor", "as_nested_tensor", "nested_tensor_from_jagged", "masked_select")


def _run_by(make: Callable[..., Any], run: Callable[[Callable[[], Any], Any], Any]) -> Callable[..., Any]:
    @functools.wraps(make)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        return run(functools.partial(make, *args, **kwargs), (args, kwargs))

    guarded.guarded = True  # type: ignore[attr-defined]
    return guarded


def _asked_before(wrap: Callable[..., Any], refuse: Callable[[Any], None]) -> Callable[..., Any]:
    @functools.wraps(wrap)
    def guarded(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        refuse(tensor)
        return wrap(tensor, *args, **kwargs)

    guarded.guarded = True  # type: ignore[attr-defined]
    return guarded


def _guard_vmap(follow: Callable[..., Any]) -> None:
    """Where a release has no `vmap_impl`, each tensor that it is given is asked about, and nothing is followed."""
    wrap = getattr(_apis_of_vmap, "vmap_impl", None)
    if wrap is None:
        return

    def guarded(func: Any, in_dims: Any, out_dims: Any, randomness: Any, chunk: Any, *args: Any, **kwargs: Any) -> Any:
        run = functools.partial(wrap, func, in_dims, out_dims, randomness, chunk)
        return follow(run, in_dims, out_dims, args, kwargs)

    guarded.guarded = True  # type: ignore[attr-defined]
    _apis_of_vmap.vmap_impl = guarded
