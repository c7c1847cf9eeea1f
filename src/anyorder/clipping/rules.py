"""The functions in which nearly all parameters are used, on the whole batch: what entered and left is written down."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from anyorder.clipping.arithmetic import BLOCK
from anyorder.clipping.tracing import Tracer
from anyorder.clipping.uses import ConvolutionUse, DirectUse, Geometry, LinearUse

__all__ = ["FUNCTION_RULES", "Convolution", "LayerNorm", "LinearMap", "backward_as_forward"]


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


def _reshaped(tensor: Tensor, *shape: int) -> Tensor:
    """As `view`, of a tensor that nobody else has: nothing after it could write a view in place."""
    result: Tensor = torch.ops.aten._unsafe_view(tensor, shape)
    return result


# -- linear maps -----------------------------------------------------------------------------------------------------


class LinearMap(torch.autograd.Function):
    """y = x W^T + b on (B, ..., in); backward enters what it saw."""

    @staticmethod
    def forward(ctx: Any, anchor: Any, tracer: Any, parts: Any, x: Any, w: Any, b: Any) -> Any:
        ctx.tracer, ctx.parts, ctx.shape = tracer, parts, x.shape
        rows = x.reshape(-1, x.shape[-1])
        ctx.save_for_backward(rows, w)
        return _reshaped(F.linear(rows, w, b), *x.shape[:-1], w.shape[0])

    @staticmethod
    @backward_as_forward
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, w = (t.detach() for t in ctx.saved_tensors)
        weight, bias = ctx.parts
        grad = grad.reshape(-1, grad.shape[-1])
        a, g = (t.reshape(ctx.shape[0], -1, t.shape[1]) for t in (x, grad))
        ctx.tracer.enter(weight, lambda dtype: LinearUse(a, g, dtype))
        if bias is not None:
            ctx.tracer.enter(bias, lambda dtype: DirectUse(g.sum(1, dtype=dtype), dtype))
        back = (grad @ w).view(ctx.shape) if ctx.needs_input_grad[3] else None
        return None, None, None, back, None, None


def _linear(tracer: Tracer, func: Any, input: Any, weight: Any, bias: Any = None) -> Any:
    part, bias_part = tracer.part(weight), tracer.part(bias)
    if part is None or weight.dim() != 2 or not isinstance(input, Tensor):
        return NotImplemented
    if bias is not None and bias_part is None:  # frozen, or made from a parameter
        return _linear(tracer, func, input, weight) + bias
    tracer.expect(part, bias_part)
    own = tracer.tensor(part), None if bias_part is None else tracer.tensor(bias_part)

    return tracer.on_batch(lambda x: tracer.anchored(LinearMap, tracer, (part, bias_part), *_cast(x, *own)), input)


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
    def forward(ctx: Any, anchor: Any, tracer: Any, parts: Any, geometry: Geometry, x: Any, w: Any, b: Any) -> Any:
        ctx.tracer, ctx.parts, ctx.geometry, ctx.shape = tracer, parts, geometry, x.shape
        inner = len(geometry.kernel) + 1
        images = x.flatten(0, -inner - 1)
        ctx.save_for_backward(images, w)
        y = torch.convolution(
            images, w, b, geometry.stride, geometry.padding, geometry.dilation, False, [0] * len(geometry.kernel),
            geometry.groups,
        )  # fmt: skip
        return y if images.dim() == x.dim() else _reshaped(y, *x.shape[:-inner], *y.shape[1:])

    @staticmethod
    @backward_as_forward
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, w = (t.detach() for t in ctx.saved_tensors)
        (weight, bias), geometry, batch = ctx.parts, ctx.geometry, ctx.shape[0]
        grad = grad.flatten(0, -len(geometry.kernel) - 2)
        ctx.tracer.enter(weight, lambda dtype: ConvolutionUse(x, grad, geometry, batch, dtype))
        if bias is not None:
            places = [d for d in range(grad.dim() + 1) if d not in (0, 2)]
            each = grad.view(batch, -1, *grad.shape[1:])
            ctx.tracer.enter(bias, lambda dtype: DirectUse(each.sum(places, dtype=dtype), dtype))
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
    tracer.expect(part, bias_part)
    own = tracer.tensor(part), None if bias_part is None else tracer.tensor(bias_part)

    def run(x: Tensor) -> Any:
        return tracer.anchored(Convolution, tracer, (part, bias_part), geometry, *_cast(x, *own))

    return tracer.on_batch(run, input)


def _per_dimension(value: Any, spatial: int) -> tuple[int, ...]:
    values = (value,) if isinstance(value, int) else tuple(value)
    return values * spatial if len(values) == 1 else values


# -- normalised layers -----------------------------------------------------------------------------------------------


class LayerNorm(torch.autograd.Function):
    """y = x^ w + b with x^ = (x - mean) / standard deviation, over the last dimensions, those of w."""

    @staticmethod
    def forward(ctx: Any, anchor: Any, tracer: Any, parts: Any, eps: float, x: Any, w: Any, b: Any) -> Any:
        ctx.tracer, ctx.parts = tracer, parts
        y, mean, rstd = torch.native_layer_norm(x, w.shape, w, b, eps)
        ctx.save_for_backward(x, w, b, mean, rstd)
        return y

    @staticmethod
    @backward_as_forward
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, w, b, mean, rstd = ctx.saved_tensors
        _enter_scaled(ctx.tracer, ctx.parts, w.shape, grad, lambda rows: (x[rows] - mean[rows]).mul_(rstd[rows]))
        back = None
        if ctx.needs_input_grad[4]:
            wanted = [True, False, False]
            back = torch.ops.aten.native_layer_norm_backward(grad, x, w.shape, mean, rstd, w, b, wanted)[0]
        return None, None, None, None, back, None, None


class _RmsNorm(torch.autograd.Function):
    """y = x^ w with x^ = x / root of (the mean square + eps), over the last dimensions, those of w."""

    @staticmethod
    def forward(ctx: Any, anchor: Any, tracer: Any, parts: Any, eps: float | None, x: Any, w: Any) -> Any:
        ctx.tracer, ctx.parts = tracer, parts
        eps = torch.finfo(x.dtype).eps if eps is None else eps
        rstd = x.square().mean(list(range(-w.dim(), 0)), keepdim=True).add_(eps).rsqrt_()
        ctx.save_for_backward(x, w, rstd)
        return (x * rstd).mul_(w)

    @staticmethod
    @backward_as_forward
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, w, rstd = (t.detach() for t in ctx.saved_tensors)
        _enter_scaled(ctx.tracer, ctx.parts, w.shape, grad, lambda rows: x[rows] * rstd[rows])
        back = None
        if ctx.needs_input_grad[4]:
            # dx = (w g - x^ mean(w g x^)) / root,  x^ = x rstd
            scaled = grad * w
            mean = (scaled * x).mean(list(range(-w.dim(), 0)), keepdim=True)
            back = scaled.addcmul_(x, mean * rstd.square(), value=-1).mul_(rstd)
        return None, None, None, None, back, None


def _enter_scaled(tracer: Tracer, parts: Any, shape: Any, grad: Tensor, normalised: Callable[[slice], Tensor]) -> None:
    """Enter y = x^ w + b: the gradient of each example is sum_t g_t x^_t for w, and sum_t g_t for b.

    Args:
        normalised: makes x^ of some examples, so few at a time that they stay in the cache.
    """
    weight, bias = parts
    size = max(1, BLOCK // 16 // max(1, grad[0].numel()))
    pieces = [slice(i, i + size) for i in range(0, len(grad), size)]

    def scales(dtype: torch.dtype) -> DirectUse:
        products = (normalised(rows).to(dtype).mul_(grad[rows]) for rows in pieces)
        return DirectUse(torch.cat([product.view(len(product), -1, *shape).sum(1) for product in products]), dtype)

    tracer.enter(weight, scales)
    if bias is not None:
        each = grad.reshape(len(grad), -1, *shape)
        tracer.enter(bias, lambda dtype: DirectUse(each.sum(1, dtype=dtype), dtype))


def _normalised(tracer: Tracer, input: Any, shape: Any, weight: Any, bias: Any) -> Any:
    """The parameters of a normalised layer, and their parts; None where it is not one of plain parameters."""
    parts = tracer.part(weight), tracer.part(bias)
    plain = isinstance(input, Tensor) and parts[0] is not None and (bias is None) == (parts[1] is None)
    # Torch casts by lists of its own where autocast is on, and where the types differ.
    if not plain or torch.is_autocast_enabled(input.device.type) or tuple(weight.shape) != tuple(shape):
        return None
    own = [None if part is None else tracer.tensor(part) for part in parts]
    if any(t is not None and t.dtype != input.dtype for t in own) or input.dtype in (torch.float16, torch.bfloat16):
        return None
    tracer.expect(*parts)
    return parts, own


def _layer_norm(
    tracer: Tracer, func: Any, input: Any, normalized_shape: Any, weight: Any = None, bias: Any = None,
    eps: float = 1e-5, cudnn_enable: bool = True,
) -> Any:  # fmt: skip
    del cudnn_enable
    found = _normalised(tracer, input, normalized_shape, weight, bias)
    if found is None:
        return NotImplemented
    parts, own = found
    return tracer.on_batch(lambda x: tracer.anchored(LayerNorm, tracer, parts, eps, x, *own), input)


def _rms_norm(
    tracer: Tracer, func: Any, input: Any, normalized_shape: Any, weight: Any = None, eps: float | None = None
) -> Any:
    found = _normalised(tracer, input, normalized_shape, weight, None)
    if found is None:
        return NotImplemented
    parts, (own, _) = found
    return tracer.on_batch(lambda x: tracer.anchored(_RmsNorm, tracer, parts, eps, x, own), input)


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

    def run(*tensors: Tensor | None) -> Any:
        q, k, v, mask = (t if t is None or not lead else t.flatten(0, 1) for t in tensors)
        y = func(q, k, v, mask, dropout_p, is_causal, **kwargs)
        return y.view(-1, *lead, *y.shape[1:]) if lead else y

    return tracer.on_batch(run, query, key, value, attn_mask)


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


FUNCTION_RULES: dict[Any, Callable[..., Any]] = {
    F.linear: _linear,
    torch.matmul: _matmul, Tensor.matmul: _matmul, Tensor.__matmul__: _matmul, torch.mm: _matmul, Tensor.mm: _matmul,
    torch.addmm: _addmm,
    torch.conv1d: _convolution, torch.conv2d: _convolution, torch.conv3d: _convolution,
    F.conv1d: _convolution, F.conv2d: _convolution, F.conv3d: _convolution,
    F.layer_norm: _layer_norm, torch.layer_norm: _layer_norm,
    F.rms_norm: _rms_norm, torch.rms_norm: _rms_norm,
    F.scaled_dot_product_attention: _attention,
    F.multi_head_attention_forward: _multi_head,
}  # fmt: skip
"""What a `Tracer` calls in the place of each function."""
