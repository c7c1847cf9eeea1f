"""Which models can be trained with a per-unit guarantee."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.nn.parameter import UninitializedParameter

from anyorder.errors import ArgumentError, ModelError

__all__ = ["Finding", "check_model", "refuse_unfit"]

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
    """What must be changed in a model before `make_private` takes it; nothing, for most models.

        for finding in ao.check_model(model):
            print(finding)

    It looks at the model and does not run it: what forward does is seen in the first step. `clipping.convert` makes a
    copy in which what has a replacement is replaced. A frozen parameter may have any dtype: it is neither trained nor
    noised.

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


def group_norm_groups(part: _BatchNorm) -> int:
    """Groups of the GroupNorm that takes its place: at most 32, of at least 4 channels; one where x may be (B, C).

    A group of one channel at one place would be normalised to zero.
    """
    channels = part.num_features
    most = 1 if isinstance(part, nn.BatchNorm1d) else max(1, min(32, channels // 4))
    return next(groups for groups in range(most, 0, -1) if channels % groups == 0)


def _of_layers(module: nn.Module) -> Iterator[Finding]:
    for name, part in module.named_modules():
        found = _of_layer(part)
        if found is not None:
            problem, cure = found
            yield Finding(name, f"({type(part).__name__}) {problem}", cure)


def _of_layer(part: nn.Module) -> tuple[str, str] | None:
    """(problem, cure) of one module without its children."""
    if isinstance(part, _BatchNorm):
        sizes = f"{group_norm_groups(part)}, {part.num_features}" if part.num_features else "num_groups, num_channels"
        return (
            "normalises each example by the others of the batch",
            f"replace it with torch.nn.GroupNorm({sizes}), which looks at one example alone",
        )
    if isinstance(part, _InstanceNorm) and part.track_running_stats:
        return "keeps statistics of the data that are not private", "set track_running_stats=False"
    if isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.max_norm is not None:
        return "rescales the rows that a batch reads, in place, where no noise is", "set max_norm=None"
    if isinstance(part, DataParallel):
        return "splits a batch over devices behind the engine's back", "give its .module; for several devices, torchrun"
    if isinstance(part, DistributedDataParallel):
        return (
            "averages gradients before they are clipped",
            "give its .module; the engine adds up over the ranks itself",
        )
    if isinstance(part, torch.jit.ScriptModule):
        return "is compiled by torch.jit, and cannot be run on one example alone", "give the module it was made from"
    return None


def _of_parameters(module: nn.Module) -> Iterator[Finding]:
    parameters = dict(module.named_parameters())
    for name, p in parameters.items():
        if isinstance(p, UninitializedParameter):
            yield Finding(name, "(parameter) has no shape yet", "run the model once on an example (lazy modules)")
        elif p.is_meta:
            yield Finding(
                name, "(parameter) is on the meta device, without values", "load weights, or call model.to_empty(..)"
            )
        elif p.requires_grad and p.dtype not in _TRAINABLE:
            yield Finding(
                name,
                f"(parameter) is {p.dtype}, and trainable parameters must be real floating-point",
                "freeze or split it",
            )
    if not any(p.requires_grad for p in parameters.values()):
        yield Finding(
            "", f"has no trainable parameter among its {len(parameters)}", "set requires_grad=True on at least one"
        )
