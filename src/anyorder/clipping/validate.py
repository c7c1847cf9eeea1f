"""Which models can be trained with a per-unit guarantee."""

from collections.abc import Iterator

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.parameter import UninitializedParameter

from anyorder.errors import ArgumentError, ModelError

__all__ = ["check_model"]

_TRAINABLE = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def check_model(module: nn.Module) -> None:
    """Refuse a model that mixes examples or keeps statistics of them, naming all problems at once.

    A frozen parameter may have any dtype: it is neither trained nor noised.

    Raises: ModelError naming the module or parameter of each problem, and what to do.
    """
    if not isinstance(module, nn.Module):
        raise ArgumentError(f"model must be a torch.nn.Module, got {type(module).__name__}")
    problems = [*_layer_problems(module), *_parameter_problems(module)]
    if problems:
        raise ModelError("the model cannot be trained with a per-unit guarantee:\n- " + "\n- ".join(problems))


def _layer_problems(module: nn.Module) -> Iterator[str]:
    for name, part in module.named_modules():
        label = f"{name or 'the model itself'} ({type(part).__name__})"
        if isinstance(part, _BatchNorm):
            channels = part.num_features
            yield (
                f"{label} normalises each example by the others of the batch; replace it with "
                f"torch.nn.GroupNorm(num_groups, {channels or 'num_channels'}), which looks at one example alone"
            )
        elif isinstance(part, _InstanceNorm) and part.track_running_stats:
            yield f"{label} keeps statistics of the data that are not private; set track_running_stats=False"
        elif isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.max_norm is not None:
            yield f"{label} rescales the rows that a batch reads, in place, where no noise is; set max_norm=None"


def _parameter_problems(module: nn.Module) -> Iterator[str]:
    parameters = dict(module.named_parameters())
    for name, p in parameters.items():
        if isinstance(p, UninitializedParameter):
            yield f"parameter {name} has no shape yet; run the model once on an example (lazy modules)"
        elif p.requires_grad and p.dtype not in _TRAINABLE:
            yield f"parameter {name} is {p.dtype}; trainable parameters must be real floating-point: freeze or split it"
    if not any(p.requires_grad for p in parameters.values()):
        yield f"none of its {len(parameters)} parameters is trainable; at least one must have requires_grad=True"
