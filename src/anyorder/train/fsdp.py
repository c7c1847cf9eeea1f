"""Models sharded by FSDP2 (`torch.distributed.fsdp.fully_shard`): their rows, and the whole model for a step."""

import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils import _pytree as pytree

from anyorder.errors import ModelError
from anyorder.train.distributed import Group

__all__ = ["WholeModel", "check_sharding", "is_sharded", "load_whole", "local", "rows_of", "shard_of", "whole"]


def is_sharded(tensor: Any) -> bool:
    """Whether a tensor is one rank's part of a distributed one."""
    # Importing this module takes a second; before someone else did, there are no such tensors.
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def check_sharding(model: nn.Module, group: Group) -> None:
    """Raise ModelError unless the model is plain, or its parameters are sharded by rows over all ranks."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    wrappers: tuple[type, ...] = (DistributedDataParallel,)
    if fsdp is not None:
        wrappers += (fsdp.FullyShardedDataParallel,)
    for part in model.modules():
        if isinstance(part, wrappers):
            raise ModelError(
                f"{type(part).__name__} adds up gradients before they are clipped; pass the model itself to "
                "make_private, which adds up the clipped ones of all ranks, or shard it with "
                "torch.distributed.fsdp.fully_shard"
            )
        if _is_fsdp(part) and part._get_fsdp_state()._mp_policy.param_dtype is not None:  # type: ignore[operator]
            raise ModelError(
                "fully_shard with a mixed-precision policy: private training makes its own forward pass and would not "
                "follow it; leave mp_policy out and use torch.autocast"
            )
    parameters: dict[str, Any] = dict(model.named_parameters())
    for name, p in parameters.items():
        if is_sharded(p):
            mesh, part = p.device_mesh, p.to_local()
            by_rows = len(p.placements) == 1 and p.placements[0].is_shard(0) and len(part) == _length(p, group)
            if not by_rows or mesh.size() != group.size or mesh.device_type != part.device.type:
                raise ModelError(
                    f"parameter {name} is placed as {tuple(p.placements)} on {part.device.type}, over a mesh of "
                    f"{mesh.device_type} of shape {mesh.shape}; anyorder covers fully_shard over one mesh of all "
                    f"{group.size} ranks, by rows: no tensor parallelism, replicated groups, other dimension or offload"
                )


def rows_of(p: Tensor, rank: int, ranks: int) -> tuple[int, int]:
    """The rows first, .., last - 1 of a sharded parameter that a rank has: those of torch.chunk."""
    most = -(-len(p) // ranks)
    return min(rank * most, len(p)), min((rank + 1) * most, len(p))


def _length(p: Tensor, group: Group) -> int:
    low, high = rows_of(p, group.rank, group.size)
    return high - low


def shard_of(p: Any, local: Tensor) -> Tensor:
    """The distributed tensor like p, of which `local` holds this rank's rows."""
    local = local.view(p.detach().to_local().shape)
    like: Tensor = type(p.data).from_local(
        local, p.device_mesh, p.placements, run_check=False, shape=p.shape, stride=p.stride()
    )
    return like


def whole(tree: Any) -> Any:
    """The tree with whole tensors in the place of distributed ones. All ranks must call it."""
    return pytree.tree_map(lambda leaf: leaf.full_tensor() if is_sharded(leaf) else leaf, tree)


def local(tensor: Tensor) -> Tensor:
    """What this rank has of a tensor; a plain tensor is itself."""
    part: Tensor = tensor.to_local() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]
    return part


def load_whole(
    model: nn.Module, optimizer: torch.optim.Optimizer, of_model: dict[str, Any], of_optimizer: dict[str, Any]
) -> None:
    """Load states of whole tensors into a model and an optimizer that may be sharded."""
    own = model.state_dict()
    model.load_state_dict({name: _shard_like(own.get(name), value) for name, value in of_model.items()})
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    ids = [i for group in of_optimizer["param_groups"] for i in group["params"]]
    states = dict(of_optimizer["state"])
    for i, p in zip(ids, parameters, strict=False):  # the optimizer itself refuses another number of parameters
        if i in states:
            states[i] = {name: _shard_like(p, value) for name, value in states[i].items()}
    optimizer.load_state_dict({**of_optimizer, "state": states})


def _shard_like(p: Any, value: Any) -> Any:
    """This rank's part of a whole tensor that belongs to p; anything else as it is."""
    if not is_sharded(p) or not isinstance(value, Tensor) or value.shape != p.shape:
        return value
    low, high = rows_of(p, dist.get_rank(), dist.get_world_size())
    return shard_of(p, value[low:high].to(p.device))


class WholeModel:
    """A model that can be called on one example alone, whatever its parameters are sharded over.

    A plain model is that already. For a model sharded by FSDP2 this is a copy of its modules without FSDP's hooks,
    which shares buffers and settings with them; `gather` gives it whole parameters, and `drop` takes them away.

    Memory: between `gather` and the end of the step's backward pass, the whole parameters on every rank.

    Attributes:
        module: what to call, after `gather`.
    """

    def __init__(self, model: nn.Module) -> None:
        self._copies: dict[nn.Module, nn.Module] = {}
        self._parameters: dict[nn.Parameter, nn.Parameter] = {}
        self.module = self._copy(model) if any(is_sharded(p) for p in model.parameters()) else model

    def _copy(self, part: nn.Module) -> nn.Module:
        if part not in self._copies:
            # fully_shard puts a class of its own and FSDPModule in front of the module's class.
            own = type(part).__mro__[2] if _is_fsdp(part) else type(part)
            copy: Any = nn.Module.__new__(own)
            self._copies[part] = copy
            nn.Module.__init__(copy)
            self._share(part, copy)
            for name in ("_forward_pre_hooks", "_forward_hooks"):
                hooks = getattr(part, name)
                setattr(copy, name, type(hooks)((i, hook) for i, hook in hooks.items() if not _is_of_torch(hook)))
            copy._modules = {name: m if m is None else self._copy(m) for name, m in part._modules.items()}
            copy._parameters = {name: p if p is None else self._stand_in(p) for name, p in part._parameters.items()}
            if isinstance(copy, nn.RNNBase):  # holds its parameters a second time
                copy._flat_weights = [getattr(copy, name) for name in copy._flat_weights_names]
        return self._copies[part]

    def _stand_in(self, p: nn.Parameter) -> nn.Parameter:
        if not is_sharded(p):
            return p
        if p not in self._parameters:
            self._parameters[p] = nn.Parameter(_no_memory(p.shape, p), requires_grad=p.requires_grad)
        return self._parameters[p]

    @staticmethod
    def _share(part: nn.Module, copy: nn.Module) -> None:
        """Let the copy see the part's buffers and settings as they are now."""
        vars(copy).update({name: value for name, value in vars(part).items() if name not in _OWN})

    def gather(self) -> nn.Module:
        """The module, with the whole parameters as they are now. All ranks must call it."""
        for part, copy in self._copies.items():
            self._share(part, copy)
        for p, stand_in in self._parameters.items():
            stand_in.data = p.detach().full_tensor()  # type: ignore[attr-defined]
        return self.module

    def drop(self) -> None:
        """Let go of the whole parameters, and of those that FSDP holds after an evaluation: a step changes them."""
        for p, stand_in in self._parameters.items():
            stand_in.data = _no_memory(p.shape, p)
        for part in self._copies:
            if _is_fsdp(part):
                part.reshard()  # type: ignore[operator]


_OWN = ("_modules", "_parameters", "_flat_weights", "_forward_pre_hooks", "_forward_hooks")


def _is_fsdp(part: nn.Module) -> bool:
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")  # without it no module is sharded
    return fsdp is not None and isinstance(part, fsdp.FSDPModule)


def _no_memory(shape: torch.Size, like: Tensor) -> Tensor:
    """A tensor of a shape, all of whose numbers are one number in memory."""
    return torch.empty((), dtype=like.dtype, device=like.device).expand(shape)


def _is_of_torch(hook: Any) -> bool:
    return getattr(getattr(hook, "func", hook), "__module__", "").startswith("torch.distributed.")
