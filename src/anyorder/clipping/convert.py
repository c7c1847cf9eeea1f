"""A model with every layer that cannot be private replaced, where there is a replacement."""

import copy

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.parameter import UninitializedParameter

from anyorder.clipping.validate import group_norm_groups
from anyorder.errors import ArgumentError, ModelError

__all__ = ["convert"]

_BATCH_NORMS = frozenset({nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm})


def convert(model: nn.Module) -> nn.Module:
    """A copy of a model, with what `check_model` finds replaced where a replacement is known.

        BatchNorm of C channels          GroupNorm, at most 32 groups of at least 4 channels (1d: one group)
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
    model = copy.deepcopy(model)
    if type(model) in _BATCH_NORMS:
        return _group_norm(model)  # type: ignore[arg-type]
    replaced: dict[nn.Module, nn.Module] = {}  # a layer in two places stays one
    for parent in list(model.modules()):
        for name, part in list(parent.named_children()):
            if type(part) in _BATCH_NORMS:
                if part not in replaced:
                    replaced[part] = _group_norm(part)  # type: ignore[arg-type]
                setattr(parent, name, replaced[part])
    for part in model.modules():
        if isinstance(part, _InstanceNorm) and part.track_running_stats:
            part.track_running_stats = False
            part.running_mean = part.running_var = part.num_batches_tracked = None
        elif isinstance(part, nn.Embedding | nn.EmbeddingBag):
            part.max_norm = None
    return model


def _group_norm(part: _BatchNorm) -> nn.GroupNorm:
    result = nn.GroupNorm(group_norm_groups(part), part.num_features, part.eps, affine=False)
    if part.affine:
        result.affine = True
        result.weight, result.bias = part.weight, part.bias
    return result.train(part.training)
