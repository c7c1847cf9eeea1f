"""Rules of layers: how each parameter's gradients are made, for each example, from what entered and left its layers.

The module runs under `torch.func.vmap`, so that it sees one example alone, and each trainable parameter reaches it as
a tensor with one copy for each example (an expanded view: no memory). Whatever the module does with such a tensor,
autograd returns the gradient of each copy: that of each example. This is right for every module that can be mapped,
and dear for large parameters. So a few functions, those in which nearly all parameters are used, are run on the whole
batch with the parameter itself, and backward hands out what entered and left them (`RULES`; `recurrent` for
the layers of that name). Layers of one's own get a rule by `register_layer_rule`.
"""

import functools
import inspect
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Protocol, Self, TypeVar, overload

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.func import vmap
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from anyorder.clipping import torch_private as private
from anyorder.clipping.kept_tensors import Made, Witness, check_own, note
from anyorder.clipping.mapping import reparametrized
from anyorder.clipping.norms import BLOCK, ConvolutionUse, DirectUse, EmbeddingUse, Geometry, LinearUse, Table, Use
from anyorder.clipping.rows import product
from anyorder.clipping.torch_private import pytree
from anyorder.errors import ArgumentError, ModelError

# -- the tracer ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ParameterView:
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


@dataclass(frozen=True)
class Books:
    """What the rules of one pass read, and where they tell what entered and left each use of a parameter.

    Attributes:
        parameters: the parameters, cut off from autograd, by name.
        dtypes: float32 or float64, in which the gradients of each are added up.
        anchor: a scalar that requires a gradient; what is computed from a parameter depends on it.
        expected: how many uses of each parameter backward may come to; counted here.
        enter: takes each use that backward comes to.
        tables: the parameters that are read by lookups alone, and how.
        note: reads rows of a table by a function of ids, and writes that down; None where nobody does.
    """

    parameters: dict[str, Tensor]
    dtypes: dict[str, torch.dtype]
    anchor: Tensor
    expected: Counter[str]
    enter: Callable[[ParameterView, Use], None]
    tables: Mapping[str, Table]
    note: Callable[[Callable[[Tensor], Tensor], Tensor], Tensor] | None = None

    def tensor(self, part: ParameterView) -> Tensor:
        """The part of the parameter itself."""
        parameter = self.parameters[part.name]
        return part.of(parameter) if part.chain else parameter

    def source(self, part: ParameterView) -> Tensor | Table:
        """Where the rows of a table come from: the part of the parameter, or what stands behind it."""
        table = self.tables.get(part.name)
        return self.tensor(part) if table is None else table

    def anchored(self, function: Any, *arguments: Any) -> Any:
        """An autograd function whose backward comes before that of the parameters."""
        return function.apply(self.anchor, *arguments)

    def expect(self, *parts: ParameterView | None) -> None:
        """Announce a use."""
        for part in parts:
            if part is not None and torch.is_grad_enabled():
                self.expected[part.name] += 1


class Recording(Protocol):
    """Takes what a pass does; see `program.Recorder`."""

    def rule(self, run: Callable[..., Any], books: Books, tensors: Sequence[Tensor | None]) -> Any:
        """run(books, *tensors), written down."""

    def see(self, function: Any, result: Any) -> None:
        """A function of torch was called."""

    def refuse(self, problem: str) -> None:
        """What was done cannot be written down."""


class Tracer(TorchFunctionMode):
    """Runs what parameters are used in on the whole batch; active while the module runs under vmap.

    Args:
        books: of the pass.
        made: see `kept_tensors.one_pass`.
        recording: None, or who writes the pass down.

    Attributes:
        books, tables: as given.
        direct: names of the parameters whose gradients will come from autograd, (B, *shape) each, as far as is seen.
    """

    def __init__(self, books: Books, made: Made, recording: Recording | None = None) -> None:
        super().__init__()
        self.books, self.tables = books, books.tables
        self._parameters, self._made, self._recording = books.parameters, made, recording
        self._level = -1  # of vmap
        self._parts: dict[int, ParameterView] = {}
        self._alive: list[Tensor] = []  # so that no id is used again
        self.direct: set[str] = set()

    def start(self, copies: dict[str, Tensor], token: Tensor) -> None:
        """The copies of the parameters that the module is given, and any tensor mapped over examples."""
        self._token, self._level = token, _vmap_level()
        self._whole = private.get_unwrapped(token)
        for name, tensor in copies.items():
            self.track(tensor, ParameterView(name))

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        rule, values = RULES.get(func), (*args, *kwargs.values()) if kwargs else args
        check_own(types, values)
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
        if self._recording is not None:
            self._recording.see(func, result)
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
        tensor = private.unwrapped(tensor) if isinstance(tensor, Tensor) else tensor
        return isinstance(tensor, Tensor) and any(
            tensor.untyped_storage().data_ptr() == p.untyped_storage().data_ptr() for p in self._parameters.values()
        )

    # -- parameters --------------------------------------------------------------------------------------------------

    def nested(self) -> bool:
        """Whether the module is inside a transform of its own, whose tensors are not those of the batch."""
        return _vmap_level() != self._level

    def note(self, *tensors: Tensor) -> None:
        """Remember tensors that no function of torch made; see `kept_tensors.one_pass`."""
        note(self._made, *tensors)

    def part(self, tensor: Any) -> ParameterView | None:
        return self._parts.get(id(tensor))

    def track(self, tensor: Tensor, part: ParameterView) -> None:
        self._parts[id(tensor)] = part
        self._alive.append(tensor)

    def forget(self) -> None:
        """Let go of the parameters' copies: the pass is over."""
        self._parts, self._alive = {}, []

    def _follow(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Know the views of a parameter as such; what is not plainly a view of it stays a tensor of copies."""
        part = self._parts[id(args[0])]
        if kwargs or not _is_constant(args[1:]):
            return
        base = self._parameters[part.name]
        for pick, tensor in [(None, result)] if isinstance(result, Tensor) else list(enumerate(result)):
            view = part.then(func, args[1:], pick)
            own = view.of(base)
            if own.untyped_storage().data_ptr() == base.untyped_storage().data_ptr() and own.shape == tensor.shape:
                self.track(tensor, view)

    # -- the whole batch ---------------------------------------------------------------------------------------------

    def on_batch(self, run: Callable[..., Any], *tensors: Tensor | None) -> Any:
        """run(books, *tensors) of the whole batch: each with the examples in front, and what it returns likewise."""
        if private.interpreter is None:
            self.unrecorded("a release of torch without interpreters")
            return _OnBatch.apply(functools.partial(run, self.books), self._token, *tensors)  # type: ignore[no-untyped-call]
        level, unwrap = self._level, private.unwrap_batched
        whole, dims = zip(*[(t, None) if t is None else unwrap(t, level) for t in tensors], strict=True)
        with private.interpreter().lower():
            given = _in_front(len(self._whole), whole, dims)
            recording = self._recording
            result = run(self.books, *given) if recording is None else recording.rule(run, self.books, given)
        wrap = private.add_batch_dim
        return wrap(result, 0, level) if isinstance(result, Tensor) else tuple(wrap(t, 0, level) for t in result)

    def unrecorded(self, problem: str) -> None:
        """What comes now cannot be written down."""
        if self._recording is not None:
            self._recording.refuse(problem)


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
    enter, leave = private.enter_vmap, private.leave_vmap
    if enter is None or leave is None:
        return vmap(function, randomness="different")(*tensors)
    load()
    size = len(tensors[0])
    level = enter(size, "different")
    try:
        results = function(*[private.add_batch_dim(t, 0, level) for t in tensors])
        return tuple([tuple([private.remove_batch_dim(t, level, size, 0) for t in group]) for group in results])
    finally:
        leave()


@functools.cache
def load() -> None:
    """Load what vmap loads on its first use."""
    vmap(torch.neg)(torch.zeros(1))


def _vmap_level() -> int:
    return private.current_level() or 0


def _is_constant(arguments: Any) -> bool:
    if isinstance(arguments, (tuple, list)):
        return all(map(_is_constant, arguments))
    if isinstance(arguments, slice):
        return _is_constant((arguments.start, arguments.stop, arguments.step))
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


# -- functions -------------------------------------------------------------------------------------------------------


def backward_as_forward(function: Callable[..., Any]) -> Callable[..., Any]:
    """Backward in the dtypes of forward, also where autocast is on around it."""

    def run(ctx: Any, grad: Tensor) -> Any:
        if torch.is_autocast_enabled(grad.device.type):
            with torch.autocast(grad.device.type, enabled=False):
                return function(ctx, grad)
        return function(ctx, grad)

    return once_differentiable(run)


def _cast(*tensors: Tensor | None) -> list[Tensor | None]:
    """In autocast's dtype, where that is on; float64 stays."""
    result = []
    for t in tensors:
        if t is not None and t.dtype != torch.float64 and torch.is_autocast_enabled(t.device.type):
            t = t.to(torch.get_autocast_dtype(t.device.type))
        result.append(t)
    return result


# -- linear maps -----------------------------------------------------------------------------------------------------


class LinearMap(torch.autograd.Function):
    """y = x W^T + b on (B, ..., in); backward enters what it saw."""

    @staticmethod
    def forward(ctx: Any, anchor: Any, books: Any, parts: Any, x: Any, w: Any, b: Any) -> Any:
        ctx.books, ctx.parts, ctx.shape = books, parts, x.shape
        rows = x.reshape(-1, x.shape[-1])
        ctx.save_for_backward(rows, w)
        return private.unsafe_view(F.linear(rows, w, b), (*x.shape[:-1], w.shape[0]))

    @staticmethod
    @backward_as_forward
    def backward(ctx: Any, grad: Tensor) -> Any:
        (x, w), (weight, bias), books = ctx.saved_tensors, ctx.parts, ctx.books
        grad = grad.reshape(-1, grad.shape[-1])
        a, g = x.detach().reshape(ctx.shape[0], -1, x.shape[1]), grad.reshape(ctx.shape[0], -1, grad.shape[1])
        books.enter(weight, LinearUse(a, g, books.dtypes[weight.name]))
        if bias is not None:
            dtype = books.dtypes[bias.name]
            books.enter(bias, DirectUse(g.sum(1, dtype=dtype), dtype))
        back = (grad @ w.detach()).view(ctx.shape) if ctx.needs_input_grad[3] else None
        return None, None, None, back, None, None


def _linear(tracer: Tracer, func: Any, input: Any, weight: Any, bias: Any = None) -> Any:
    part, bias_part = tracer.part(weight), tracer.part(bias)
    if part is None or weight.dim() != 2 or not isinstance(input, Tensor):
        return NotImplemented
    if bias is not None and bias_part is None:  # frozen, or made from a parameter
        return _linear(tracer, func, input, weight) + bias

    def linear(books: Books, x: Tensor) -> Any:
        books.expect(part, bias_part)
        own = books.tensor(part), None if bias_part is None else books.tensor(bias_part)
        return books.anchored(LinearMap, books, (part, bias_part), *_cast(x, *own))

    return tracer.on_batch(linear, input)


def _matmul(tracer: Tracer, func: Any, input: Any, other: Any, **kwargs: Any) -> Any:
    part = tracer.part(other)
    if part is None or kwargs or other.dim() != 2 or not isinstance(input, Tensor) or input.dim() < 1:
        return NotImplemented
    turned = other.t()
    tracer.track(turned, part.then(Tensor.t))
    return _linear(tracer, func, input, turned)


def _addmm(tracer: Tracer, func: Any, input: Any, mat1: Any, mat2: Any, **kwargs: Any) -> Any:
    product = NotImplemented if kwargs else _matmul(tracer, func, mat1, mat2)
    return product if product is NotImplemented else product + input


# -- convolutions ----------------------------------------------------------------------------------------------------


class Convolution(torch.autograd.Function):
    """A convolution of the images of all examples."""

    @staticmethod
    def forward(ctx: Any, anchor: Any, books: Any, parts: Any, geometry: Geometry, x: Any, w: Any, b: Any) -> Any:
        ctx.books, ctx.parts, ctx.geometry, ctx.shape = books, parts, geometry, x.shape
        inner = len(geometry.kernel) + 1
        images = x.flatten(0, -inner - 1)
        ctx.save_for_backward(images, w)
        y = torch.convolution(
            images, w, b, geometry.stride, geometry.padding, geometry.dilation, False, [0] * len(geometry.kernel),
            geometry.groups,
        )  # fmt: skip
        return y if images.dim() == x.dim() else private.unsafe_view(y, (*x.shape[:-inner], *y.shape[1:]))

    @staticmethod
    @backward_as_forward
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, w = (t.detach() for t in ctx.saved_tensors)
        (weight, bias), books, geometry, batch = ctx.parts, ctx.books, ctx.geometry, ctx.shape[0]
        grad = grad.flatten(0, -len(geometry.kernel) - 2)
        books.enter(weight, ConvolutionUse(x, grad, geometry, batch, books.dtypes[weight.name]))
        if bias is not None:
            places = [d for d in range(grad.dim() + 1) if d not in (0, 2)]
            dtype = books.dtypes[bias.name]
            books.enter(bias, DirectUse(grad.view(batch, -1, *grad.shape[1:]).sum(places, dtype=dtype), dtype))
        back = None
        if ctx.needs_input_grad[4]:
            back = torch.ops.aten.convolution_backward(
                grad, x, w, None, geometry.stride, geometry.padding, geometry.dilation, False,
                [0] * len(geometry.kernel), geometry.groups, (True, False, False),
            )[0].view(ctx.shape)  # fmt: skip
        return None, None, None, None, back, None, None


def _convolution(
    tracer: Tracer, func: Any, input: Any, weight: Any, bias: Any = None, stride: Any = 1, padding: Any = 0,
    dilation: Any = 1, groups: int = 1,
) -> Any:  # fmt: skip
    part, bias_part = tracer.part(weight), tracer.part(bias)
    spatial = weight.dim() - 2
    if part is None or not isinstance(input, Tensor) or input.dim() not in (spatial + 1, spatial + 2):
        return NotImplemented
    stride, dilation = (_per_dimension(v, spatial) for v in (stride, dilation))
    kernel = tuple(weight.shape[2:])
    if padding == "same":
        total = [d * (k - 1) for d, k in zip(dilation, kernel, strict=True)]
        uneven = [side for whole in reversed(total) for side in (0, whole % 2)]
        input = F.pad(input, uneven) if any(uneven) else input
        padding = [whole // 2 for whole in total]
    geometry = Geometry(kernel, stride, _per_dimension(0 if padding == "valid" else padding, spatial), dilation, groups)
    if bias is not None and bias_part is None:
        added = bias.view(-1, *(1 for _ in kernel))
        return _convolution(tracer, func, input, weight, None, stride, geometry.padding, dilation, groups) + added

    def convolution(books: Books, x: Tensor) -> Any:
        books.expect(part, bias_part)
        own = books.tensor(part), None if bias_part is None else books.tensor(bias_part)
        return books.anchored(Convolution, books, (part, bias_part), geometry, *_cast(x, *own))

    return tracer.on_batch(convolution, input)


def _per_dimension(value: Any, spatial: int) -> tuple[int, ...]:
    values = (value,) if isinstance(value, int) else tuple(value)
    return values * spatial if len(values) == 1 else values


# -- normalised layers -----------------------------------------------------------------------------------------------


class LayerNorm(torch.autograd.Function):
    """y = x^ w + b with x^ = (x - mean) / standard deviation, over the last dimensions, those of w."""

    @staticmethod
    def forward(ctx: Any, anchor: Any, books: Any, parts: Any, eps: float, x: Any, w: Any, b: Any) -> Any:
        ctx.books, ctx.parts = books, parts
        y, mean, rstd = torch.native_layer_norm(x, w.shape, w, b, eps)
        ctx.save_for_backward(x, w, b, mean, rstd)
        return y

    @staticmethod
    @backward_as_forward
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, w, b, mean, rstd = ctx.saved_tensors
        _enter_scaled(ctx.books, ctx.parts, w.shape, grad, lambda rows: (x[rows] - mean[rows]).mul_(rstd[rows]))
        back = None
        if ctx.needs_input_grad[4]:
            wanted = [True, False, False]
            back = torch.ops.aten.native_layer_norm_backward(grad, x, w.shape, mean, rstd, w, b, wanted)[0]
        return None, None, None, None, back, None, None


class _RmsNorm(torch.autograd.Function):
    """y = x^ w with x^ = x / root of (the mean square + eps), over the last dimensions, those of w."""

    @staticmethod
    def forward(ctx: Any, anchor: Any, books: Any, parts: Any, eps: float | None, x: Any, w: Any) -> Any:
        ctx.books, ctx.parts = books, parts
        eps = torch.finfo(x.dtype).eps if eps is None else eps
        rstd = x.square().mean(list(range(-w.dim(), 0)), keepdim=True).add_(eps).rsqrt_()
        ctx.save_for_backward(x, w, rstd)
        return (x * rstd).mul_(w)

    @staticmethod
    @backward_as_forward
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, w, rstd = (t.detach() for t in ctx.saved_tensors)
        _enter_scaled(ctx.books, ctx.parts, w.shape, grad, lambda rows: x[rows] * rstd[rows])
        back = None
        if ctx.needs_input_grad[4]:
            # dx = (w g - x^ mean(w g x^)) / root,  x^ = x rstd
            scaled = grad * w
            mean = (scaled * x).mean(list(range(-w.dim(), 0)), keepdim=True)
            back = scaled.addcmul_(x, mean * rstd.square(), value=-1).mul_(rstd)
        return None, None, None, None, back, None


def _enter_scaled(books: Books, parts: Any, shape: Any, grad: Tensor, normalised: Callable[[slice], Tensor]) -> None:
    """Enter y = x^ w + b: the gradient of each example is sum_t g_t x^_t for w, and sum_t g_t for b.

    Args:
        normalised: makes x^ of some examples, so few at a time that they stay in the cache.
    """
    weight, bias = parts
    size = max(1, BLOCK // 16 // max(1, grad[0].numel()))
    pieces = [slice(i, i + size) for i in range(0, len(grad), size)]

    dtype = books.dtypes[weight.name]
    products = (normalised(rows).to(dtype).mul_(grad[rows]) for rows in pieces)
    scales = torch.cat([product.view(len(product), -1, *shape).sum(1) for product in products])
    books.enter(weight, DirectUse(scales, dtype))
    if bias is not None:
        dtype = books.dtypes[bias.name]
        books.enter(bias, DirectUse(grad.reshape(len(grad), -1, *shape).sum(1, dtype=dtype), dtype))


def _normalised(tracer: Tracer, input: Any, shape: Any, weight: Any, bias: Any) -> Any:
    """The parts of the parameters of a normalised layer; None where it is not one of plain parameters."""
    parts = tracer.part(weight), tracer.part(bias)
    plain = isinstance(input, Tensor) and parts[0] is not None and (bias is None) == (parts[1] is None)
    # Torch casts by lists of its own where autocast is on, and where the types differ.
    if not plain or torch.is_autocast_enabled(input.device.type) or tuple(weight.shape) != tuple(shape):
        return None
    own = [None if part is None else tracer.books.tensor(part) for part in parts]
    if any(t is not None and t.dtype != input.dtype for t in own) or input.dtype in (torch.float16, torch.bfloat16):
        return None
    return parts


def _layer_norm(
    tracer: Tracer, func: Any, input: Any, normalized_shape: Any, weight: Any = None, bias: Any = None,
    eps: float = 1e-5, cudnn_enable: bool = True,
) -> Any:  # fmt: skip
    del cudnn_enable
    parts = _normalised(tracer, input, normalized_shape, weight, bias)
    if parts is None:
        return NotImplemented

    def layer_norm(books: Books, x: Tensor) -> Any:
        books.expect(*parts)
        own = [None if part is None else books.tensor(part) for part in parts]
        return books.anchored(LayerNorm, books, parts, eps, x, *own)

    return tracer.on_batch(layer_norm, input)


def _rms_norm(
    tracer: Tracer, func: Any, input: Any, normalized_shape: Any, weight: Any = None, eps: float | None = None
) -> Any:
    parts = _normalised(tracer, input, normalized_shape, weight, None)
    if parts is None:
        return NotImplemented

    def rms_norm(books: Books, x: Tensor) -> Any:
        books.expect(*parts)
        return books.anchored(_RmsNorm, books, parts, eps, x, books.tensor(parts[0]))

    return tracer.on_batch(rms_norm, input)


# -- attention -------------------------------------------------------------------------------------------------------


def _attention(
    tracer: Tracer, func: Any, query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0,
    is_causal: bool = False, **kwargs: Any,
) -> Any:  # fmt: skip
    """The fused kernels know no vmap, but take any number of leading dimensions folded into one."""
    dims = {t.dim() for t in (query, key, value)}
    lead = query.shape[:-3]
    same = dims in ({3}, {4}) and key.shape[:-3] == lead == value.shape[:-3]
    if not same or (attn_mask is not None and attn_mask.dim() > query.dim()):
        with sdpa_kernel(SDPBackend.MATH) if query.device.type == "cpu" else nullcontext():
            return func(query, key, value, attn_mask, dropout_p, is_causal, **kwargs)
    if attn_mask is not None:
        attn_mask = attn_mask.expand(*lead, *(1 for _ in range(3 - min(3, attn_mask.dim()))), *attn_mask.shape[-3:])

    def attention(books: Books, *tensors: Tensor | None) -> Any:
        del books
        q, k, v, mask = (t if t is None or not lead else t.flatten(0, 1) for t in tensors)
        y = func(q, k, v, mask, dropout_p, is_causal, **kwargs)
        return y.view(-1, *lead, *y.shape[1:]) if lead else y

    return tracer.on_batch(attention, query, key, value, attn_mask)


def _multi_head(tracer: Tracer, func: Any, *args: Any, **kwargs: Any) -> Any:
    """The function itself, such that the functions that it calls come here."""
    return _looked_into(func, tracer)(*args, **kwargs)


def _looked_into(func: Any, tracer: Tracer) -> Callable[..., Any]:
    body = type(func)(func.__code__, {**func.__globals__, "has_torch_function": lambda _: False})
    body.__defaults__, body.__kwdefaults__ = func.__defaults__, func.__kwdefaults__

    def call(*args: Any, **kwargs: Any) -> Any:
        with tracer:
            return body(*args, **kwargs)

    return call


# -- tables ----------------------------------------------------------------------------------------------------------


def rows_of(source: Tensor | Table) -> int:
    """V."""
    return len(source) if isinstance(source, Tensor) else source.num_rows


def _read(source: Tensor | Table, ids: Tensor, note: Callable[..., Tensor] | None = None) -> Tensor:
    """(*ids.shape, D)."""
    if isinstance(source, Tensor):
        return F.embedding(ids, source)
    if note is not None:
        return note(functools.partial(_read, source), ids)
    if ids.dtype not in (torch.int64, torch.int32):
        raise ModelError(f"ids of rows must be torch.int64 or torch.int32, got {ids.dtype}")
    if ids.numel() and not _within(ids, source.num_rows):  # an id is data: the message has none
        raise ModelError(f"ids of rows must be from 0 to {source.num_rows - 1}, and the batch has others")
    return source.read(ids)


def _within(ids: Tensor, size: int) -> bool:
    """Whether all are from 0 to size - 1."""
    if ids.device.type == "cpu" and ids.dtype == torch.int64:  # in one call: what is negative is large without a sign
        return int(ids.detach().numpy().view(np.uint64).max()) < size
    low, high = torch.aminmax(ids)
    return int(low) >= 0 and int(high) < size


class Lookup(torch.autograd.Function):
    """Rows of a table, (B, ..) ids to (B, .., D)."""

    @staticmethod
    def forward(ctx: Any, anchor: Any, books: Any, part: Any, padding: Any, ids: Tensor, source: Any) -> Any:
        ctx.books, ctx.part, ctx.padding, ctx.size = books, part, padding, rows_of(source)
        ctx.save_for_backward(ids)
        return _read(source, ids, books.note)

    @staticmethod
    @backward_as_forward
    def backward(ctx: Any, grad: Tensor) -> Any:
        (ids,) = ctx.saved_tensors
        flat, g = ids.reshape(len(ids), -1), grad.reshape(len(grad), -1, grad.shape[-1])
        _enter_lookup(ctx, flat, g)
        return (None,) * 6


class Bag(torch.autograd.Function):
    """Sums or means of rows of a table, (B, bags, L) ids to (B, bags, D); weights (B, bags, L) or None."""

    @staticmethod
    def forward(
        ctx: Any, anchor: Any, books: Any, part: Any, padding: Any, mode: str, ids: Tensor, weights: Any, source: Any
    ) -> Any:
        ctx.books, ctx.part, ctx.padding, ctx.mode, ctx.size = books, part, padding, mode, rows_of(source)
        weighted = ctx.needs_input_grad[6]
        if isinstance(source, Tensor):
            ctx.save_for_backward(ids, weights, F.embedding(ids, source) if weighted else None)
            return _by_torch(source, ids, mode, padding, weights)
        rows = _read(source, ids, books.note)
        ctx.save_for_backward(ids, weights, rows if weighted else None)
        return _bags(rows, ids, mode, padding, weights)

    @staticmethod
    @backward_as_forward
    def backward(ctx: Any, grad: Tensor) -> Any:
        ids, weights, rows = ctx.saved_tensors
        each = grad.unsqueeze(2).expand(*ids.shape, grad.shape[-1])
        if ctx.mode == "mean":
            each = each / _numbers(ids, ctx.padding)[..., None, None]
        elif weights is not None:
            each = each * weights.unsqueeze(-1)
        flat, g = ids.reshape(len(ids), -1), each.reshape(len(ids), -1, grad.shape[-1])
        _enter_lookup(ctx, flat, g)
        back = None
        if rows is not None:
            back = (rows * grad.unsqueeze(2)).sum(-1)
            back = back if ctx.padding is None else back.masked_fill_(ids == ctx.padding, 0)
        return None, None, None, None, None, None, back, None


def _enter_lookup(ctx: Any, ids: Tensor, g: Tensor) -> None:
    dtype = ctx.books.dtypes[ctx.part.name]
    ctx.books.enter(ctx.part, EmbeddingUse(ids, g, ctx.size, ctx.padding, dtype))


def _by_torch(table: Tensor, ids: Tensor, mode: str, padding: int | None, weights: Tensor | None) -> Tensor:
    """(B, bags, D)."""
    flat, own = ids.flatten(0, 1), None if weights is None else weights.flatten(0, 1)
    y = F.embedding_bag(flat, table, mode=mode, per_sample_weights=own, padding_idx=padding)
    return y.view(*ids.shape[:2], -1)


def _bags(rows: Tensor, ids: Tensor, mode: str, padding: int | None, weights: Tensor | None) -> Tensor:
    """(B, bags, D) of the rows (B, bags, L, D)."""
    if padding is not None:  # not by a factor of 0: the row may hold anything
        rows = rows.masked_fill((ids == padding).unsqueeze(-1), 0)
    if weights is not None:
        rows = rows * weights.unsqueeze(-1)
    total = rows.sum(2)
    return total / _numbers(ids, padding).unsqueeze(-1) if mode == "mean" else total


def _numbers(ids: Tensor, padding: int | None) -> Tensor:
    """(B, bags), how many rows are in each bag; 1 for an empty one, whose mean is zero."""
    if padding is None:
        return torch.full(ids.shape[:2], max(1, ids.shape[2]), device=ids.device)
    return (ids != padding).sum(2).clamp_(min=1)


def _embedding(
    tracer: Tracer, func: Any, input: Any, weight: Any, padding_idx: Any = None, max_norm: Any = None,
    norm_type: float = 2.0, scale_grad_by_freq: bool = False, sparse: bool = False,
) -> Any:  # fmt: skip
    del norm_type, sparse
    part = tracer.part(weight)
    if part is None or weight.dim() != 2 or max_norm is not None or scale_grad_by_freq:
        return NotImplemented
    padding = None if padding_idx is None else padding_idx % rows_of(tracer.books.source(part))

    def embedding(books: Books, ids: Tensor) -> Any:
        books.expect(part)
        return books.anchored(Lookup, books, part, padding, ids, books.source(part))

    return tracer.on_batch(embedding, input)


def _embedding_bag(
    tracer: Tracer, func: Any, input: Any, weight: Any, offsets: Any = None, max_norm: Any = None,
    norm_type: float = 2.0, scale_grad_by_freq: bool = False, mode: str = "mean", sparse: bool = False,
    per_sample_weights: Any = None, include_last_offset: bool = False, padding_idx: Any = None,
) -> Any:  # fmt: skip
    del norm_type, sparse
    part, weights = tracer.part(weight), per_sample_weights
    rectangle = isinstance(input, Tensor) and input.dim() == 2 and offsets is None and not include_last_offset
    if not rectangle or weight.dim() != 2 or max_norm is not None or scale_grad_by_freq:
        return NotImplemented
    if mode not in _MODES or (weights is not None and (mode != "sum" or not _weights_fit(weights, input, weight))):
        return NotImplemented
    if part is None:  # frozen, or made from a parameter; vmap has no rule for bags
        if private.is_wrapped(weight):
            return NotImplemented
        tracer.unrecorded("a frozen table of bags")
        return tracer.on_batch(lambda _, ids, own: _by_torch(weight, ids, mode, padding_idx, own), input, weights)
    padding = None if padding_idx is None else padding_idx % rows_of(tracer.books.source(part))

    def bags(books: Books, ids: Tensor, weights: Tensor | None) -> Any:
        books.expect(part)
        source = books.source(part)
        if ids.dim() == 2:  # (B, L): one bag of each example
            return books.anchored(Bag, books, part, padding, mode, ids.unsqueeze(1), weights, source).squeeze(1)
        return books.anchored(Bag, books, part, padding, mode, ids, weights, source)

    return tracer.on_batch(bags, input, weights)


_MODES = ("sum", "mean")


def _weights_fit(weights: Any, ids: Tensor, table: Tensor) -> bool:
    return isinstance(weights, Tensor) and weights.shape == ids.shape and weights.dtype == table.dtype


class Reading(TorchFunctionMode):
    """Looks rows up in tables, for a module that runs on one example without vmap.

    Args:
        tables: by the id of the parameter that stands for each.
    """

    def __init__(self, tables: Mapping[int, Table]) -> None:
        super().__init__()
        self._tables = tables

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in LOOKUPS:
            given = inspect.signature(func).bind(*args, **kwargs).arguments
            table = self._tables.get(id(given["weight"]))
            if table is not None:
                rows, mode = _read(table, given["input"]), given.get("mode", "mean")
                return rows if func is F.embedding else rows.mean(-2) if mode == "mean" else rows.sum(-2)
        return func(*args, **kwargs)


def _prod(tracer: Tracer, func: Any, *args: Any, **kwargs: Any) -> Any:
    return NotImplemented if "out" in kwargs else product(*args, **kwargs)


RULES: dict[Any, Callable[..., Any]] = {
    F.linear: _linear, torch.prod: _prod, Tensor.prod: _prod,
    torch.matmul: _matmul, Tensor.matmul: _matmul, Tensor.__matmul__: _matmul, torch.mm: _matmul, Tensor.mm: _matmul,
    torch.addmm: _addmm,
    torch.conv1d: _convolution, torch.conv2d: _convolution, torch.conv3d: _convolution,
    F.conv1d: _convolution, F.conv2d: _convolution, F.conv3d: _convolution,
    F.layer_norm: _layer_norm, torch.layer_norm: _layer_norm,
    F.rms_norm: _rms_norm, torch.rms_norm: _rms_norm,
    F.scaled_dot_product_attention: _attention,
    F.multi_head_attention_forward: _multi_head,
    F.embedding: _embedding, F.embedding_bag: _embedding_bag,
}  # fmt: skip
"""What a `Tracer` calls in the place of each function."""


# -- layers of one's own ---------------------------------------------------------------------------------------------

LayerRule = Callable[[Any, list[Tensor], Tensor], Mapping[Tensor, Tensor]]
"""(layer, activations, backprops) -> {parameter: gradients}; see `register_layer_rule`."""
Rule = TypeVar("Rule", bound=LayerRule)

_RULES: dict[type[nn.Module], LayerRule] = {}
_KNOWN = frozenset({
    nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Embedding, nn.EmbeddingBag, nn.LayerNorm, nn.RMSNorm,
    nn.MultiheadAttention, nn.RNN, nn.LSTM, nn.GRU, nn.RNNCell, nn.LSTMCell, nn.GRUCell,
})  # fmt: skip
_CLOSE = {torch.float64: 1e-6, torch.float32: 1e-3}  # of the gradient's norm; else HALF
_HALF = 5e-2


@overload
def register_layer_rule(kind: type[nn.Module], rule: None = None) -> Callable[[Rule], Rule]: ...
@overload
def register_layer_rule(kind: type[nn.Module], rule: Rule) -> Rule: ...
def register_layer_rule(kind: type[nn.Module], rule: Any = None) -> Any:
    """Give a type of layers a rule that makes the gradients of its parameters; as a decorator, or by a call.

        @register_layer_rule(Scale)
        def scale_rule(layer, activations, backprops):
            return {layer.weight: (activations[0] * backprops).flatten(1, -2).sum(1)}

    The rule has the form of Opacus's `register_grad_sampler`. It is given

        layer          the layer, whose parameters are tensors of float32 (float64 where they are)
        activations    what forward was given: its tensors, the positional ones first, each (n, ..)
        backprops      (n, ..), the gradient of the loss with respect to what forward returned, one tensor

    in float32 or float64, and returns {parameter of the layer: its gradients, (n, *shape)}, one entry for each that is
    trained, those of parts of the layer included; row i is of row i of activations and backprops. n is 1, or as many
    rows as the layer sees of one example: the rule runs under `torch.func.vmap`, on each example alone.

    Args:
        kind: the type itself; a subclass needs a rule of its own. A second rule takes the place of the first.
        rule: the function; None for a decorator.
    Returns: the rule, or the decorator.
    Guarantee: what the rule returns for an example is what is clipped to the clip norm and added up: whatever that is,
        the privacy of the plan holds. It is compared with autograd on made-up numbers on the first use of each layer
        with inputs of a shape; a rule that disagrees is refused by ModelError, before anything is released.
    Cost: as autograd, a gradient for each example is made. In secure mode, and for models that are run in two passes,
        autograd makes them and the rule is not used.
    Raises: ArgumentError for what is no type of layers, and for a type that has a rule of this package.
    """
    if not (isinstance(kind, type) and issubclass(kind, nn.Module)):
        raise ArgumentError(f"kind must be a subclass of torch.nn.Module, the type of the layers, got {kind!r}")
    if kind in _KNOWN:
        raise ArgumentError(
            f"kind must be a type that has no rule of anyorder, got {kind.__name__}: how its gradients are bounded is "
            "proven for the rule that it has; for another, register a class of your own"
        )
    if rule is None:
        return functools.partial(register_layer_rule, kind)
    if not callable(rule):
        raise ArgumentError(f"rule must be a function of (layer, activations, backprops), got {type(rule).__name__}")
    _RULES[kind] = rule
    return rule


@contextmanager
def layers_with_rules(module: nn.Module, tracer: Tracer, made: Made) -> Iterator[None]:
    """Have the layers of a module that have a rule tell the tracer of their parameters' gradients by that rule."""
    if not _RULES:
        yield
        return
    names = {id(p): name for name, p in module.named_parameters() if p.requires_grad}
    inside: set[nn.Module] = set()  # parts of layers with a rule, whose gradients that rule gives
    with ExitStack() as stack:
        for name, layer in module.named_modules():
            rule = _RULES.get(type(layer))
            own = {local: ParameterView(names[id(p)]) for local, p in layer.named_parameters() if id(p) in names}
            if rule is None or not own or layer in inside:
                continue
            for part in own.values():
                if part.name in tracer.tables:
                    raise ModelError(other_use(part.name, f"{type(layer).__name__}, which has a rule of its own"))
            inside.update(layer.modules())
            before = vars(layer).get("forward")
            undo = (
                functools.partial(delattr, layer, "forward")
                if before is None
                else functools.partial(setattr, layer, "forward", before)
            )
            ruled = _Ruled(layer, name, rule, own, layer.forward, tracer, made)
            layer.forward = ruled
            stack.callback(undo)
        yield


@dataclass(frozen=True)
class _Ruled:
    """The forward of one layer that has a rule.

    Attributes:
        name: of the layer in the model.
        parts: the trained parameters, by their names in the layer.
        original: its own forward.
    """

    layer: nn.Module
    name: str
    rule: LayerRule
    parts: dict[str, ParameterView]
    original: Callable[..., Any]
    tracer: Tracer
    made: Made

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the layer returns for one example, whose parameters get no gradient but by the rule."""
        tracer = self.tracer
        if tracer.nested() or not torch.is_grad_enabled():
            return self.original(*args, **kwargs)
        leaves, structure = pytree.tree_flatten((args, kwargs))
        slots = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        if not slots:
            raise ModelError(f"{self} was given no tensor, and its rule would have no activations")
        tracer.unrecorded("a rule of the user's own")
        tracer.books.expect(*self.parts.values())
        tracer.direct.update(part.name for part in self.parts.values())
        versions = [private.version(private.unwrapped(leaves[i])) for i in slots]
        with reparametrized(self.layer, {local: tracer.books.tensor(part) for local, part in self.parts.items()}):
            y = self.original(*args, **kwargs)
        if not isinstance(y, Tensor) or not y.is_floating_point():
            raise ModelError(f"{self} must return one floating-point tensor to have a rule, got {type(y).__name__}")
        if versions != [private.version(private.unwrapped(leaves[i])) for i in slots]:
            raise ModelError(f"{self} changes its input in place, which its rule would see; work on a copy")

        def call(tensors: Sequence[Tensor]) -> Any:
            filled = list(leaves)
            for slot, tensor in zip(slots, tensors, strict=True):
                filled[slot] = tensor
            args, kwargs = pytree.tree_unflatten(filled, structure)
            return self.original(*args, **kwargs)

        def run(books: Books, y: Tensor, *activations: Tensor) -> Any:
            self._check_once(call, activations, y)
            return books.anchored(_Told, self, y, *activations)

        with private.WithoutModes():
            result: Tensor = tracer.on_batch(run, y, *(leaves[i] for i in slots))
        tracer.note(result)
        return result

    def __str__(self) -> str:
        return f"{self.name or 'the model itself'} ({type(self.layer).__name__})"

    def tell(self, activations: Sequence[Tensor], backprops: Tensor) -> None:
        """Enter the gradients, by the rule, of all examples; called in backward."""
        for local, values in self._by_rule(activations, backprops).items():
            self._enter(self.parts[local], values)

    def _enter(self, part: ParameterView, values: Tensor) -> None:
        self.tracer.books.enter(part, DirectUse(values, self.tracer.books.dtypes[part.name]))

    def _by_rule(self, activations: Sequence[Tensor], backprops: Tensor) -> dict[str, Tensor]:
        """{parameter: (B, *shape)} of (B, n, ..) activations and backprops: the rule sees one example at a time."""
        own = {local: _wide(self.tracer.books.tensor(part)) for local, part in self.parts.items()}

        def alone(*tensors: Tensor) -> tuple[Tensor, ...]:
            note(self.made, *tensors)
            *entered, back = tensors
            found = self.rule(self.layer, entered, back)
            values = {id(p): v for p, v in found.items()}
            strange = values.keys() - {id(p) for p in self.layer.parameters()}
            if strange:
                raise ModelError(f"the rule of {self} gives gradients of {len(strange)} that are not its parameters")
            return tuple(self._summed(local, p, values.get(id(p))) for local, p in own.items())

        with reparametrized(self.layer, own), Witness(self.made):
            sums = vmap(alone)(*map(_wide, activations), _wide(backprops))
        return dict(zip(own, sums, strict=True))

    def _summed(self, local: str, parameter: Tensor, values: Any) -> Tensor:
        """The gradient of one example, of those of its rows."""
        if not isinstance(values, Tensor) or values.shape[1:] != parameter.shape or not values.dim():
            given = f"shape {tuple(values.shape)}" if isinstance(values, Tensor) else "none"
            raise ModelError(
                f"the rule of {self} must give gradients of shape (n, *{tuple(parameter.shape)}) for its parameter "
                f"{local}, got {given}"
            )
        return values.sum(0)

    # -- the check ---------------------------------------------------------------------------------------------------

    def _check_once(self, call: Callable[[Sequence[Tensor]], Any], activations: Sequence[Tensor], y: Tensor) -> None:
        """Compare rule and autograd on numbers of one's own, where a layer is first used with such inputs.

        Not on those of the batch: that they disagree there, and not elsewhere, would tell of the data.
        """
        shapes = tuple((t.shape[1:], t.dtype) for t in (y, *activations))
        key = self.rule, shapes, self.layer.training, tuple(self.parts)
        checked = _checked.setdefault(self.layer, set())
        if key in checked:
            return
        devices = [y.device.index] if y.device.type == "cuda" else []
        with torch.random.fork_rng(devices), torch.enable_grad():
            finite = any(self._agree(call, activations, y, make) for make in (torch.randn, torch.rand))
        if not finite:
            raise ModelError(
                f"the rule of {self} could not be compared with autograd: on random numbers of the shapes of its "
                "inputs the gradients are not finite"
            )
        checked.add(key)

    def _agree(
        self, call: Callable[[Sequence[Tensor]], Any], like: Sequence[Tensor], y: Tensor, make: Callable[..., Tensor]
    ) -> bool:
        """Whether there was something to compare; raises ModelError where the two differ."""
        generator = torch.Generator().manual_seed(0)
        sizes = [size for p in self.layer.parameters() for size in p.shape]
        activations = [_made_up(t, make, generator, min(sizes, default=2)) for t in like]
        backprops = _made_up(y, make, generator, 0)
        try:
            by_autograd = [self._loop(call, [t[i] for t in activations], backprops[i]) for i in range(EXAMPLES)]
        except (RuntimeError, ValueError, IndexError) as error:
            raise ModelError(
                f"{self} does not run on random numbers of the shapes of its inputs, so that its rule could not be "
                f"compared with autograd: {error}"
            ) from error
        with torch.no_grad():
            by_rule = self._by_rule(activations, backprops)
        right = {local: torch.stack([one[local] for one in by_autograd]).double() for local in self.parts}
        total = torch.stack([values.norm() for values in right.values()]).norm()
        if not bool(total.isfinite()):
            return False
        for local, values in right.items():
            close = _CLOSE.get(self.tracer.books.tensor(self.parts[local]).dtype, _HALF)
            close = max(close, *(_CLOSE.get(t.dtype, _HALF) for t in (y, *like) if t.is_floating_point()))
            off = (by_rule[local].double() - values).norm()
            if not bool(off <= close * values.norm() + 1e-6 * total):
                raise ModelError(
                    f"the rule of {self} does not give the gradient of its parameter {local} that autograd gives, on "
                    f"random numbers: they differ by {float(off / values.norm()):.1g} of its norm. Correct the rule "
                    "(its docstring in register_layer_rule says what it is given), or leave it out"
                )
        return True

    def _loop(
        self, call: Callable[[Sequence[Tensor]], Any], example: Sequence[Tensor], back: Tensor
    ) -> dict[str, Tensor]:
        """The gradients of one example by autograd."""
        own = {local: self.tracer.books.tensor(part).clone().requires_grad_() for local, part in self.parts.items()}
        with reparametrized(self.layer, own):
            y = call(example)
        found = torch.autograd.grad(y, list(own.values()), back, allow_unused=True, materialize_grads=True)
        return dict(zip(own, found, strict=True))


EXAMPLES = 2  # in a comparison: one that adds up over the batch would show
_checked: "weakref.WeakKeyDictionary[nn.Module, set[Any]]" = weakref.WeakKeyDictionary()


def _made_up(like: Tensor, make: Callable[..., Tensor], generator: torch.Generator, below: int) -> Tensor:
    """Some examples of the shape and type of one; whole numbers are below the least size of a parameter, as ids."""
    shape = EXAMPLES, *like.shape[1:]
    if like.is_floating_point() or like.is_complex():
        return make(shape, generator=generator).to(like.device, like.dtype)
    high = 2 if like.dtype == torch.bool else max(1, min(below, 127))
    return torch.randint(0, high, shape, generator=generator).to(like.device, like.dtype)


def _wide(tensor: Tensor) -> Tensor:
    """float16 and bfloat16 as float32."""
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


class _Told(torch.autograd.Function):
    """A layer's output, whose gradient is told to the layer's rule."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, ruled: _Ruled, y: Tensor, *activations: Tensor) -> Tensor:
        ctx.ruled, ctx.count = ruled, len(activations)
        ctx.save_for_backward(*activations)
        return y.view_as(y)

    @staticmethod
    @backward_as_forward
    def backward(ctx: Any, grad: Tensor) -> Any:
        ctx.ruled.tell([t.detach() for t in ctx.saved_tensors], grad)
        return None, None, grad, *(None,) * ctx.count
