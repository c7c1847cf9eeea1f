"""Watches a module that is mapped over examples: where its parameters meet the batch, and with what gradients.

The module runs under `torch.func.vmap`, so that it sees one example alone, and each trainable parameter reaches it as
a tensor with one copy for each example (an expanded view: no memory). Whatever the module does with such a tensor,
autograd returns the gradient of each copy: that of each example. This is right for every module that can be mapped,
and dear for large parameters. So a few functions, those in which nearly all parameters are used, are run on the whole
batch with the parameter itself, and backward hands out what entered and left them.
"""

import functools
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Protocol, Self

import torch
from torch import Tensor
from torch.func import vmap
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from anyorder.clipping.base import Table
from anyorder.clipping.kept import Made, note
from anyorder.clipping.uses import Use
from anyorder.errors import ModelError

_interpreter: Any = None  # where a release of torch is without it, `_OnBatch` does the same in more time
with suppress(ImportError):
    from torch._functorch.pyfunctorch import retrieve_current_functorch_interpreter as _interpreter

_functorch: Any = torch._C._functorch
_nesting = getattr(_functorch, "_vmap_increment_nesting", None), getattr(_functorch, "_vmap_decrement_nesting", None)

__all__ = ["LOOKUPS", "Book", "Part", "Tracer", "for_each_example", "other_use"]


@dataclass(frozen=True)
class Part:
    """A parameter, or the view of one that a chain of functions makes.

    Attributes:
        name: the parameter's.
        chain: (function, arguments, which of its results) of what is applied to it, in order.
    """

    name: str
    chain: tuple[tuple[Any, Any, Any], ...] = ()

    @property
    def key(self) -> tuple[str, str]:
        """Equal for equal views."""
        return self.name, repr(self.chain)

    def then(self, function: Any, arguments: Any = (), pick: int | None = None) -> Self:
        """The view of this view; a matrix turned twice is itself."""
        if function in _TURNS:
            function = Tensor.t
            if self.chain and self.chain[-1][0] is function:
                return replace(self, chain=self.chain[:-1])
        return replace(self, chain=(*self.chain, (function, arguments, pick)))

    def of(self, parameter: Tensor) -> Tensor:
        """The view of a tensor with the parameter's shape."""
        for function, arguments, pick in self.chain:
            parameter = function(parameter, *arguments)
            parameter = parameter if pick is None else parameter[pick]
        return parameter


class Book(Protocol):
    """Where uses are written down."""

    def expect(self, part: Part) -> None:
        """A use that backward may report."""

    def enter(self, part: Part, use: Use) -> None:
        """A use that backward reports."""


class Tracer(TorchFunctionMode):
    """Runs what parameters are used in on the whole batch; active while the module runs under vmap.

    Args:
        rules: {function: what is called in its place, with the tracer, the function and its arguments}; what returns
            NotImplemented leaves the function as it is.
        parameters: the parameters, cut off from autograd, by name.
        dtypes: float32 or float64, in which the gradients of each are added up.
        anchor: a scalar that requires a gradient; what is computed from a parameter depends on it.
        book: told of every use.
        made: see `kept`.
        tables: the parameters that are read by lookups alone, and how; see `table_rules`.

    Attributes:
        tables: as given.
        direct: names of the parameters whose gradients will come from autograd, (B, *shape) each, as far as is seen.
    """

    def __init__(
        self,
        rules: Mapping[Any, Callable[..., Any]],
        parameters: dict[str, Tensor],
        dtypes: dict[str, torch.dtype],
        anchor: Tensor,
        book: Book,
        made: Made,
        tables: Mapping[str, Table],
    ) -> None:
        super().__init__()
        self._rules, self.tables = rules, tables
        self._parameters, self._dtypes, self._anchor, self._book = parameters, dtypes, anchor, book
        self._made = made
        self._parts: dict[int, Part] = {}
        self._alive: list[Tensor] = []  # so that no id is used again
        self.direct: set[str] = set()

    def start(self, copies: dict[str, Tensor], token: Tensor) -> None:
        """The copies of the parameters that the module is given, and any tensor mapped over examples."""
        self._token, self._level = token, _level()
        self._whole = torch._C._functorch.get_unwrapped(token)
        for name, tensor in copies.items():
            self.track(tensor, Part(name))

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        rule, values = self._rules.get(func), (*args, *kwargs.values()) if kwargs else args
        table = self._table_among(values) if self.tables else None
        if table is not None and func in _OF_SHAPE:
            return func(self._shape_of(table), *args[1:], **kwargs)
        if rule is not None and (table is None or func in LOOKUPS) and not self.nested():
            result = rule(self, func, *args, **kwargs)
            if result is not NotImplemented:
                for made in result if isinstance(result, (tuple, list)) else (result,):
                    if isinstance(made, Tensor):
                        self._made.append(weakref.ref(made))
                return result
        name = getattr(func, "__name__", "")
        if table is not None and func not in _OF_KIND:
            raise ModelError(other_use(table, name))
        writes = name.endswith("_") and (name == "__setitem__" or not name.endswith("__"))
        if writes and args and self._is_parameter(args[0]):
            raise ModelError(
                f"forward writes a parameter in place ({name}): it would not be private. Keep updates out of forward"
            )
        result = func(*args, **kwargs)
        for made in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(made, Tensor):
                self._made.append(weakref.ref(made))
        used = [part for arg in values if (part := self._parts.get(id(arg))) is not None]
        if not used:
            return result
        if func in _VIEWS and args and self.part(args[0]) is not None:
            self._follow(func, args, kwargs, result)
        elif isinstance(result, Tensor):
            self.direct.update(part.name for part in used)
        return result

    def _table_among(self, arguments: Any) -> str | None:
        """The name of a table that a function is given."""
        for argument in arguments:
            if isinstance(argument, (tuple, list)):
                found = self._table_among(argument)
                if found is not None:
                    return found
            elif (part := self._parts.get(id(argument))) is not None and part.name in self.tables:
                return part.name
        return None

    def _shape_of(self, table: str) -> Tensor:
        """A tensor without numbers, of the table's shape, which its parameter may not have."""
        own = self.tables[table]
        return torch.empty(own.num_rows, own.width, dtype=own.dtype, device="meta")

    def _is_parameter(self, tensor: Any) -> bool:
        """Whether a tensor lies in the memory of a parameter."""
        while isinstance(tensor, Tensor) and torch._C._functorch.is_functorch_wrapped_tensor(tensor):
            tensor = torch._C._functorch.get_unwrapped(tensor)
        return isinstance(tensor, Tensor) and any(
            tensor.untyped_storage().data_ptr() == p.untyped_storage().data_ptr() for p in self._parameters.values()
        )

    # -- parameters --------------------------------------------------------------------------------------------------

    def nested(self) -> bool:
        """Whether the module is inside a transform of its own, whose tensors are not those of the batch."""
        return _level() != self._level

    def note(self, *tensors: Tensor) -> None:
        """Remember tensors that no function of torch made; see `kept`."""
        note(self._made, *tensors)

    def part(self, tensor: Any) -> Part | None:
        return self._parts.get(id(tensor))

    def track(self, tensor: Tensor, part: Part) -> None:
        self._parts[id(tensor)] = part
        self._alive.append(tensor)

    def forget(self) -> None:
        """Let go of the parameters' copies: the pass is over."""
        self._parts, self._alive = {}, []

    def _follow(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Know the views of a parameter as such; what is not plainly a view of it stays a tensor of copies."""
        part = self._parts[id(args[0])]
        if kwargs or not _plain(args[1:]):
            return
        base = self._parameters[part.name]
        for pick, tensor in [(None, result)] if isinstance(result, Tensor) else list(enumerate(result)):
            view = part.then(func, args[1:], pick)
            own = view.of(base)
            if own.untyped_storage().data_ptr() == base.untyped_storage().data_ptr() and own.shape == tensor.shape:
                self.track(tensor, view)

    def tensor(self, part: Part) -> Tensor:
        """The part of the parameter itself."""
        return part.of(self._parameters[part.name])

    def source(self, part: Part) -> Tensor | Table:
        """Where the rows of a table come from: the part of the parameter, or what stands behind it."""
        table = self.tables.get(part.name)
        return self.tensor(part) if table is None else table

    def enter(self, part: Part, make: Callable[[torch.dtype], Use]) -> None:
        """Write a use down."""
        self._book.enter(part, make(self._dtypes[part.name]))

    # -- the whole batch ---------------------------------------------------------------------------------------------

    def on_batch(self, run: Callable[..., Any], *tensors: Tensor | None) -> Any:
        """run(*tensors) of the whole batch: each with the examples in front, and what it returns likewise."""
        if _interpreter is None:
            return _OnBatch.apply(run, self._token, *tensors)  # type: ignore[no-untyped-call]
        level, unwrap = self._level, torch._C._functorch._unwrap_batched
        whole, dims = zip(*((t, None) if t is None else unwrap(t, level) for t in tensors), strict=True)
        with _interpreter().lower():
            result = run(*_in_front(len(self._whole), whole, dims))
        wrap = torch._C._functorch._add_batch_dim
        return wrap(result, 0, level) if isinstance(result, Tensor) else tuple(wrap(t, 0, level) for t in result)

    def anchored(self, function: Any, *arguments: Any) -> Any:
        """An autograd function whose backward comes before that of the parameters."""
        return function.apply(self._anchor, *arguments)

    def expect(self, *parts: Part | None) -> None:
        """Announce a use."""
        for part in parts:
            if part is not None and torch.is_grad_enabled():
                self._book.expect(part)


class _OnBatch(torch.autograd.Function):
    """Steps out of vmap: torch.func calls `vmap` with the tensors of the whole batch."""

    @staticmethod
    def forward(run: Any, token: Any, *tensors: Any) -> Any:
        raise AssertionError("the token is always mapped")

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Nothing: it exists under vmap alone."""

    @staticmethod
    def vmap(info: Any, in_dims: Any, run: Any, token: Any, *tensors: Any) -> Any:
        result = run(*_in_front(info.batch_size, tensors, in_dims[2:]))
        return result, 0 if isinstance(result, Tensor) else (0,) * len(result)


def _in_front(size: int, tensors: Any, dims: Any) -> list[Tensor | None]:
    """The tensors with the examples as their first dimension."""
    return [
        t.movedim(dim, 0) if dim else t if t is None or dim == 0 else t.expand(size, *t.shape)
        for t, dim in zip(tensors, dims, strict=True)
    ]


def for_each_example(function: Callable[..., Any], *tensors: Tensor) -> Any:
    """function(*tensors) under vmap, of (B, ...) tensors; it returns tuples of tensors.

    What `torch.vmap` does, without its look for structures in arguments and results, a third of its time in small
    models.
    """
    enter, leave = _nesting
    if enter is None or leave is None:
        return vmap(function, randomness="different")(*tensors)
    _load()
    size = len(tensors[0])
    level = enter(size, "different")
    try:
        results = function(*(_functorch._add_batch_dim(t, 0, level) for t in tensors))
        return tuple(tuple(_functorch._remove_batch_dim(t, level, size, 0) for t in group) for group in results)
    finally:
        leave()


@functools.cache
def _load() -> None:
    """What vmap loads on its first use."""
    vmap(torch.neg)(torch.zeros(1))


def _level() -> int:
    return int(torch._C._functorch.maybe_current_level() or 0)


def _plain(arguments: Any) -> bool:
    if isinstance(arguments, (tuple, list)):
        return all(map(_plain, arguments))
    if isinstance(arguments, slice):
        return _plain((arguments.start, arguments.stop, arguments.step))
    return arguments is None or arguments is Ellipsis or isinstance(arguments, int)


def other_use(name: str, function: str) -> str:
    """Why a model with a table is refused."""
    return (
        f"forward uses the table {name} in {function}. A sparse table is there for lookups alone: torch.nn.Embedding, "
        "and torch.nn.EmbeddingBag of ids (B, L), mode sum or mean, without offsets, max_norm and scale_grad_by_freq. "
        "Whatever else it is used for has a gradient of the table's whole size: give that a parameter of its own, or "
        "set sparse=False"
    )


LOOKUPS = (F.embedding, F.embedding_bag)
_OF_SHAPE = {Tensor.shape.__get__, Tensor.ndim.__get__, Tensor.size, Tensor.dim, Tensor.numel, Tensor.__len__}  # type: ignore[attr-defined]
_OF_KIND = {
    Tensor.dtype.__get__, Tensor.device.__get__, Tensor.is_cuda.__get__, Tensor.layout.__get__,  # type: ignore[attr-defined]
    Tensor.requires_grad.__get__, Tensor.is_floating_point, Tensor.element_size,  # type: ignore[attr-defined]
}  # fmt: skip
_TURNS = (torch.t, Tensor.t, Tensor.T.__get__)  # type: ignore[attr-defined]
_VIEWS = {
    torch.chunk, Tensor.chunk, torch.split, Tensor.split, torch.unbind, Tensor.unbind, Tensor.__getitem__,
    torch.t, Tensor.t, Tensor.T.__get__, Tensor.mT.__get__, torch.transpose, Tensor.transpose,  # type: ignore[attr-defined]
    torch.narrow, Tensor.narrow, torch.squeeze, Tensor.squeeze, torch.unsqueeze, Tensor.unsqueeze,
    torch.select, Tensor.select, torch.permute, Tensor.permute, Tensor.view,
}  # fmt: skip
