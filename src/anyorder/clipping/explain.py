"""Why a model does not run on one example alone, and what to change in it."""

import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from anyorder.errors import ModelError

__all__ = ["FAILURES", "own_error", "unmapped"]

FAILURES = (RuntimeError, IndexError, ValueError)
"""What torch raises for a model that it cannot run on one example, or map: a function without a batching rule, a value
that is asked for, a shape. Whatever else is raised is a fault, of the model or of this package: nothing to work around.
"""

_FOREIGN = (Path(torch.__file__).parent, Path(__file__).parent)

_PACKED = (
    "a packed sequence joins the examples: give the layer the padded tensor, and take the last state as "
    "out.gather(1, (lengths - 1)[:, None, None].expand(-1, 1, out.shape[2])), with the lengths as a tensor"
)
_SHARED = (
    "forward writes an example's values into a tensor that all examples share: make it by x.new_zeros(..), or put "
    "results together with torch.cat, torch.stack, torch.where"
)
_VALUES = (
    "write forward without .item(), .tolist() and branches on the values of tensors: torch.where(condition, a, b) for "
    "an if, a product with the mask for x[mask]"
)
_FUNCTION = (
    "an autograd.Function must say how it is mapped: give it forward without ctx, setup_context(ctx, inputs, output) "
    "and generate_vmap_rule = True, or write it in plain torch"
)
_HOOKS = "leave out hooks on saved tensors, which would run parts of the model elsewhere: chunk_size= bounds memory"
_ELSE = "replace a function that torch.func does not know by others, or write it in plain torch"

_BY_CALL = {"pack_padded_sequence": _PACKED, "pack_sequence": _PACKED}
_BY_TEXT = {
    "setup_context": _FUNCTION, "saved tensors": _HOOKS, "inplace": _SHARED, "broadcast shape": _SHARED,
    "item": _VALUES, "control flow": _VALUES, "dynamic": _VALUES, "numpy": _VALUES,
}  # fmt: skip


def unmapped(module: nn.Module, error: Exception) -> str:
    """Where a module cannot be mapped over examples, and the change that lets it be."""
    frames = traceback.extract_tb(error.__traceback__)
    calls, text = {frame.name for frame in frames}, str(error)
    cure = next((cure for name, cure in _BY_CALL.items() if name in calls), None)
    if cure is None:
        cure = next((cure for words, cure in _BY_TEXT.items() if words in text), _ELSE)
    own = [frame for frame in frames if not any(folder in Path(frame.filename).parents for folder in _FOREIGN)]
    place = f"\nIt stops at {own[-1].filename}, line {own[-1].lineno}: {own[-1].line}" if own else ""
    # Of a packed sequence torch's own words tell the lengths.
    words = "" if cure is _PACKED else f": {text}"
    return (
        f"torch.func.vmap cannot run this model ({type(module).__name__}) on each example alone{words}{place}\n"
        f"What to change: {cure}"
    )


def own_error(error: Exception, module: nn.Module, tensors: tuple[Tensor, ...], whole: Callable[[], Any]) -> Exception:
    """What to raise where a module fails on one example alone, also without vmap; its own error, if that says it all.

    Args:
        error: the module's own.
        tensors: what it was given.
        whole: runs it on the whole batch.
    """
    dtypes = {p.dtype for p in module.parameters() if p.is_floating_point()}
    strange = {t.dtype for t in tensors} - dtypes
    if isinstance(error, RuntimeError) and "dtype" in str(error) and strange and dtypes:
        given, own = (", ".join(sorted(str(d).removeprefix("torch.") for d in group)) for group in (strange, dtypes))
        return ModelError(
            f"the batch holds {given} and the model's parameters are {own}, which forward does not join: {error}. "
            "Convert the batch, model(x.to(next(model.parameters()).dtype)), or the model, before make_private"
        )
    try:
        with torch.no_grad():
            whole()
    except Exception:  # it does not run at all
        return error
    return ModelError(
        f"the model runs on the batch, and not on one example of it alone: {error}\nIs the batch size written into "
        "forward? Take it from what it is given: x.view(x.shape[0], ..), x.flatten(1), x.new_zeros(len(x), ..)"
    )
