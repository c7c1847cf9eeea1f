"""Which models can be trained with a per-unit guarantee; what to change in one that cannot, and a copy so changed."""

import copy
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.nn.parameter import UninitializedParameter

from anyorder.clipping import torch_private as private
from anyorder.errors import ArgumentError, ModelError, ModelWarning

_TRAINABLE = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@dataclass(frozen=True)
class Finding:
    """Something in a model that keeps it from being trained with a per-unit guarantee.

    Attributes:
        name: of the module or parameter, as in `named_modules` and `named_parameters`; "" for the model itself.
        problem: what it is, and what it does that no clipping can bound.
        cure: what to change.
    """

    name: str
    problem: str
    cure: str

    def __str__(self) -> str:
        return f"{self.name or 'the model itself'} {self.problem}; {self.cure}"


def check_model(module: nn.Module) -> list[Finding]:
    """List what must be changed in a model before `make_private`. For most models the list is empty.

        for finding in ao.check_model(model):
            print(finding)

    It looks at the model and does not run it: what forward does is seen in the first step. `clipping.convert` makes a
    copy in which what has a replacement is replaced. It does not look at the loader either: `make_private` and the first
    batch refuse layouts in which a row is not one example (docs/models.md#layouts). A frozen parameter may have any dtype.

    Args:
        module: the model, before or after it is moved to a device.
    Returns: a list of `Finding`, empty where there is nothing to change.
    Raises: ArgumentError for what is not a module.

    Example:
        >>> print(*check_model(nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8))))
        1 (BatchNorm2d) normalises each example by the others of the batch; replace it with torch.nn.GroupNorm(2, 8), which looks at one example alone
    """  # noqa: E501
    if not isinstance(module, nn.Module):
        raise ArgumentError(f"model must be a torch.nn.Module, got {type(module).__name__}")
    return [*_of_layers(module), *_of_parameters(module)]


def refuse_unfit(module: nn.Module) -> None:
    """Raise ModelError with all findings at once."""
    findings = check_model(module)
    if findings:
        raise ModelError("the model cannot be trained with a per-unit guarantee:\n- " + "\n- ".join(map(str, findings)))


_NARROW = (
    "the scale and shift alone, as GroupNorm would take away most of what fewer than 8 values say; standardise the "
    "model's inputs with public constants"
)


def _groups(part: private.BatchNorm) -> int:
    """Groups of the GroupNorm in its place: at most 32, of 4 channels or more; 1d: one, or 0 for no GroupNorm."""
    channels = part.num_features
    if isinstance(part, nn.BatchNorm1d):
        return int(channels >= 8)
    return next(groups for groups in range(max(1, min(32, channels // 4)), 0, -1) if channels % groups == 0)


def _of_layers(module: nn.Module) -> Iterator[Finding]:
    for name, part in module.named_modules():
        if found := _of_layer(part):
            yield Finding(name, f"({type(part).__name__}) {found[0]}", found[1])


def _of_layer(part: nn.Module) -> tuple[str, str] | None:
    """(problem, cure) of one module without its children."""
    if isinstance(part, private.BatchNorm):
        problem = "normalises each example by the others of the batch"
        if not _groups(part):
            return problem, f"keep {_NARROW}"
        sizes = f"{_groups(part)}, {part.num_features}" if part.num_features else "num_groups, num_channels"
        return problem, f"replace it with torch.nn.GroupNorm({sizes}), which looks at one example alone"
    if isinstance(part, private.InstanceNorm) and part.track_running_stats:
        return "keeps statistics of the data that are not private", "set track_running_stats=False"
    if isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.max_norm is not None:
        return "rescales the rows that a batch reads, in place, where no noise is", "set max_norm=None"
    if isinstance(part, DataParallel):
        return "splits a batch over devices behind the engine's back", "give its .module; for several devices, torchrun"
    if isinstance(part, DistributedDataParallel):
        return "averages gradients before they are clipped", "give its .module; the engine adds up over the ranks"
    if isinstance(part, torch.jit.ScriptModule):
        return "is compiled by torch.jit, and cannot be run on one example alone", "give the module it was made from"
    return None


def _of_parameters(module: nn.Module) -> Iterator[Finding]:
    parameters = dict(module.named_parameters())
    for name, p in parameters.items():
        if isinstance(p, UninitializedParameter):
            yield Finding(name, "(parameter) has no shape yet", "run the model once on an example (lazy modules)")
        elif p.is_meta:
            yield Finding(name, "(parameter) is on the meta device, without values", "load weights, or use to_empty")
        elif p.requires_grad and p.dtype not in _TRAINABLE:
            yield Finding(name, f"(parameter) is {p.dtype}, and trained ones must be real floats", "freeze or split it")
    if not any(p.requires_grad for p in parameters.values()):
        yield Finding("", f"has no trainable parameter among its {len(parameters)}", "set requires_grad=True on some")


# -- what may be kept: functions of released weights alone -----------------------------------------------------------


def iterate_before_passes(outer: nn.Module, model: nn.Module) -> None:
    """Let each spectral norm of a model iterate before a pass of `outer`, on the weights alone, and not in the pass.

    Its vectors are then functions of weights that were released, and no pass writes them. The same numbers as torch's.
    """
    pairs: list[tuple[Any, Any]] = [
        (held, held[0])
        for held in model.modules()
        if isinstance(held, private.ParametrizationList) and type(held[0]) is private.SpectralNorm and held[0].training
    ]
    norms = [(held, norm) for held, norm in pairs if hasattr(norm, "_u") and hasattr(held, "original")]

    @torch.no_grad()
    def iterate(module: nn.Module, args: Any) -> None:
        for held, norm in norms if module.training else ():
            norm.training = False  # torch's does not iterate in evaluation
            norm._power_method(norm._reshape_weight_to_matrix(held.original), norm.n_power_iterations)

    if norms:
        outer.register_forward_pre_hook(iterate)


# -- a copy in which it is replaced ----------------------------------------------------------------------------------

_BATCH_NORMS = frozenset({nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm})


def convert(model: nn.Module) -> nn.Module:
    """A copy of a model, with what `check_model` finds replaced where a replacement is known.

        BatchNorm of C channels          GroupNorm, at most 32 groups of at least 4 channels (1d: one group)
        BatchNorm1d of fewer than 8      the scale and shift alone, for (N, C) and (N, C, L), with a warning
        InstanceNorm with statistics     the same without: each example by its own, in evaluation too
        Embedding with max_norm          the same with max_norm=None

    Scales, shifts and eps are kept, with their dtype, device, requires_grad and training mode, and so is what layers
    share; running statistics are dropped. The function that the model computes is another: a trained model must be
    trained on. What has no replacement stays as it is (layers derived from BatchNorm): ask `check_model` of the copy.

    The copy has parameters of its own. Convert before the optimizer is made, or it goes on with those of the original.

    Raises: ArgumentError for what is not a module; ModelError for lazy layers that have not seen an example.

    Example:
        >>> convert(nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)))[1].num_groups
        2
    """
    if not isinstance(model, nn.Module):
        raise ArgumentError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    lazy = next((name for name, p in model.named_parameters() if isinstance(p, UninitializedParameter)), None)
    if lazy is not None:
        raise ModelError(f"parameter {lazy} has no shape yet, so that it cannot be copied; run the model once first")
    whole = nn.Sequential(copy.deepcopy(model))  # so that the model itself may be replaced
    replaced = {part: _replacement(part) for part in whole.modules() if type(part) in _BATCH_NORMS}
    narrow = [name[2:] or "the model" for name, part in whole.named_modules() if part in replaced and not _groups(part)]
    if narrow:
        warnings.warn(f"{', '.join(narrow)} (BatchNorm1d): the copy keeps {_NARROW}", ModelWarning, stacklevel=2)
    for parent in list(whole.modules()):
        for name, part in list(parent.named_children()):
            if part in replaced:  # a layer in two places stays one
                setattr(parent, name, replaced[part])
    for part in whole.modules():
        if isinstance(part, private.InstanceNorm) and part.track_running_stats:
            part.track_running_stats = False
            part.running_mean = part.running_var = part.num_batches_tracked = None
        elif isinstance(part, nn.Embedding | nn.EmbeddingBag):
            part.max_norm = None
    return whole[0]


class ScaleAndShift(nn.Module):
    """What a BatchNorm learns, without its statistics: None where it learns nothing."""

    weight: nn.Parameter | None
    bias: nn.Parameter | None

    def forward(self, x: Tensor) -> Tensor:
        x = x.movedim(1, -1) * (1 if self.weight is None else self.weight)
        return (x + (0 if self.bias is None else self.bias)).movedim(-1, 1)


def _replacement(part: Any) -> nn.Module:
    groups = _groups(part)
    result: Any = nn.GroupNorm(groups, part.num_features, part.eps, affine=False) if groups else ScaleAndShift()
    result.affine, result.weight, result.bias = part.affine, part.weight, part.bias
    return result.train(part.training)  # type: ignore[no-any-return]


# -- why a model does not run on one example -------------------------------------------------------------------------

FAILURES = (RuntimeError, IndexError, ValueError)
"""What torch raises for a model that it cannot run on one example, or map: a function without a batching rule, a value
that is asked for, a shape. Whatever else is raised is a fault, of the model or of this package: nothing to work around.
"""

_FOREIGN = (Path(torch.__file__).parent, Path(__file__).parent)

_PACKED = (
    "a packed sequence joins the examples: give the layer the padded tensor, and take the last state as "
    "out.gather(1, (lengths - 1)[:, None, None].expand(-1, 1, out.shape[2])), with the lengths as a tensor. "
    "The backward half of a bidirectional layer would begin in the padding: run a layer of its own on the examples "
    "reversed by their lengths"
)
_SHARED = (
    "forward writes an example's values into a tensor that all examples share: make it by x.new_zeros(..), or put "
    "results together with torch.cat, torch.stack, torch.where"
)
_VALUES = (
    "write forward, and hooks on its modules, without .item(), .tolist() and branches on the values of tensors: "
    "torch.where(condition, a, b) for an if, a product with the mask for x[mask]"
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
    cure = cure or next((cure for words, cure in _BY_TEXT.items() if words in text), _ELSE)
    own = [frame for frame in frames if not any(folder in Path(frame.filename).parents for folder in _FOREIGN)]
    place = f"\nIt stops at {own[-1].filename}, line {own[-1].lineno}: {own[-1].line}" if own else ""
    # Of a packed sequence torch's own words tell the lengths; others ask that somebody files an issue with torch.
    words = "" if cure is _PACKED or "file an issue" in text else f": {text}"
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
