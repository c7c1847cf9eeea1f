"""Calls in which a loss is seen to join examples, by the function and by what it is given."""

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from anyorder.errors import ModelError

__all__ = ["CURE", "checked"]

_UNUSED_LABEL = -100  # torch's default for `ignore_index`
_BY_LABELS = (F.cross_entropy, F.nll_loss)
_BY_WEIGHTS = tuple(f for f in (F.mse_loss, F.l1_loss, F.huber_loss) if "weight" in inspect.signature(f).parameters)
_MEANS = (torch.mean, Tensor.mean, torch.nanmean, Tensor.nanmean)
_ELEMENTWISE = {
    "sub", "__rsub__", "sub_", "add", "add_", "mul", "mul_", "div", "div_", "true_divide", "__rdiv__", "pow",
    "__rpow__", "max", "min", "maximum", "minimum", "where", "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss",
    "poisson_nll_loss", "soft_margin_loss", "kl_div",
}  # fmt: skip
_DIVISIONS = (
    torch.div, torch.true_divide, Tensor.div, Tensor.div_, Tensor.true_divide, Tensor.true_divide_,
    Tensor.__truediv__, Tensor.__itruediv__,
)  # fmt: skip
CURE = (
    "take the loss of each example (reduction='none') and the mean over all examples, or give the criterion one "
    "example at a time with anyorder.clipping.ExampleLoss"
)


def checked(func: Any, args: Any, kwargs: Any, *, size: int, masked: bool, watched: type[Tensor]) -> Callable[..., Any]:
    """What to call: the function, or in the place of a mean over labels that may not count, one over all of them.

    Args:
        func, args, kwargs: the call.
        size: examples of the batch.
        masked: whether a mask chose among the outputs that it is given.
        watched: the type of the outputs, and of what was computed from them.
    Raises: ModelError for functions that divide by a number which depends on other examples' targets or masks.
    """
    mean = _is_mean(func, args, kwargs)
    if masked and mean:
        raise ModelError(
            "the loss is a mean over what a mask chose of the outputs: it divides by a number that depends on all "
            "examples, so that one moves the gradients of others; for labels mark the others with ignore_index=; else "
            f"{CURE}"
        )
    if getattr(func, "__name__", "") in _ELEMENTWISE and _joins_examples(args, kwargs, size):
        raise ModelError(
            f"the loss joins each example's output with the numbers of all others: {func.__name__} was given the "
            f"shapes ({size}, 1) and ({size},), which broadcast to ({size}, {size}), so that one "
            "example moves the gradients of others; give both the same shape, for example output.squeeze(1) or "
            "target.unsqueeze(1). Numbers that are not one for each example: give them the shape (1, ..)"
        )
    if func in _DIVISIONS and len(args) == 2 and _divides_total(args[0], args[1], watched):
        raise ModelError(
            "the loss is a sum over the batch divided by a tensor that was not computed from the outputs, such as the "
            "number of unmasked items: that depends on all examples, so that one moves the gradients of others. If "
            f"it is a constant, make it a Python number with float(); else {CURE}"
        )
    if not mean or func not in (*_BY_LABELS, *_BY_WEIGHTS):
        return func  # type: ignore[no-any-return]
    arguments = _arguments(func, args, kwargs)
    if func in _BY_LABELS and arguments["target"].is_floating_point():  # probabilities: the mean is over examples
        return func  # type: ignore[no-any-return]
    if arguments["weight"] is not None:
        raise ModelError(
            f"{func.__name__} with weight= and reduction='mean' divides by the weights of the whole batch, so that one "
            "example's label moves the gradients of others; take reduction='none' and the mean over all examples: "
            f"{func.__name__}(.., weight=weight, reduction='none').mean()"
        )
    if func in _BY_LABELS and (arguments["target"].numel() > size or arguments["ignore_index"] != _UNUSED_LABEL):
        return _over_all_labels(func)
    return func  # type: ignore[no-any-return]


def _is_mean(func: Any, args: Any, kwargs: Any) -> bool:
    if func in _MEANS:
        return True
    try:
        arguments = _arguments(func, args, kwargs)
    except (TypeError, ValueError):  # not a function of Python
        return False
    legacy = arguments.get("size_average"), arguments.get("reduce")
    if legacy != (None, None):
        return False not in legacy
    return arguments.get("reduction") == "mean"


def _arguments(func: Any, args: Any, kwargs: Any) -> dict[str, Any]:
    given = inspect.signature(func).bind(*args, **kwargs)
    given.apply_defaults()
    return given.arguments


def _over_all_labels(func: Any) -> Callable[..., Any]:
    def over_all_labels(*args: Any, **kwargs: Any) -> Any:
        arguments = _arguments(func, args, kwargs) | {"size_average": None, "reduce": None, "reduction": "sum"}
        return func(**arguments) / arguments["target"].numel()

    return over_all_labels


def _joins_examples(args: Any, kwargs: Any, size: int) -> bool:
    """Whether (size, 1) meets (size,): a target without the last dimension of the outputs, most often."""
    shapes = {tuple(t.shape) for t in (*args, *kwargs.values()) if isinstance(t, Tensor)}
    return size > 1 and {(size, 1), (size,)} <= shapes


def _divides_total(total: Any, by: Any, watched: type[Tensor]) -> bool:
    return (
        isinstance(total, watched) and total.dim() == 0
        and isinstance(by, Tensor) and not isinstance(by, watched) and by.numel() == 1
    )  # fmt: skip
