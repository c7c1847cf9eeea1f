"""What a module keeps beside its parameters and buffers: state in plain attributes, which no client may inherit."""

from collections import deque
from collections.abc import Mapping
from enum import Enum
from functools import partial
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any
from weakref import ReferenceType

import torch
from torch import Tensor, nn

__all__ = ["HIDDEN", "KEEPS", "Snapshot", "same", "snapshot"]

KEEPS = "it keeps state in plain attributes"

HIDDEN = (
    "the model or the loss keeps state in plain attributes, and only for some data, which was not seen when it was "
    "tried: one client's data would come into the changes of others. Keep such state in buffers, which begin anew for "
    "each client"
)

Snapshot = list[Any] | None
"""The objects that a module is made of, and the versions of tensors; None where some cannot be looked into."""

_LEAVES = (
    type(None), bool, int, float, complex, str, bytes, range, slice, type, Enum, FunctionType, BuiltinFunctionType,
    ModuleType, ReferenceType, torch.dtype, torch.device, torch.layout, torch.memory_format,
)  # fmt: skip
_CONTAINERS = (list, tuple, set, frozenset, deque)
_MOST = 50_000  # objects that are looked at


def snapshot(module: Any) -> Snapshot:
    """What tells whether a module, or a loss, changed: everything that its attributes lead to.

    Values of parameters and buffers are left out, as they are set back by those who train; a parameter or buffer that
    is another object counts. Objects are held, so that none can take the place of another one unseen. What functions
    close over, and globals, are not seen.

    Returns: None where something cannot be looked into: it may have changed.
    """
    known: set[int] = set()
    if isinstance(module, nn.Module):
        known = {id(t) for t in [*module.parameters(), *module.buffers()]}
    found: list[Any] = []
    seen: set[int] = set()
    waiting: list[Any] = [module]
    while waiting:
        value = waiting.pop()
        found.append(value)
        if isinstance(value, _LEAVES) or id(value) in known or id(value) in seen:
            continue
        seen.add(id(value))
        parts = _parts(value)
        if parts is None or len(found) + len(waiting) + len(parts) > _MOST:
            return None
        waiting.extend(parts)
    return found


def same(before: Snapshot, after: Snapshot) -> bool:
    """Whether nothing changed between two snapshots; not where one could not be taken."""
    if before is None or after is None or len(before) != len(after):
        return False
    return all(a is b or (type(a) is int and type(b) is int and a == b) for a, b in zip(before, after, strict=True))


def _parts(value: Any) -> list[Any] | None:
    """What an object is made of; None where that cannot be told."""
    if isinstance(value, Tensor):
        return None if value.is_inference() else [value._version]
    if isinstance(value, partial):
        return [value.func, *value.args, *value.keywords.values()]
    if isinstance(value, MethodType):
        return [value.__self__]
    own = getattr(value, "__dict__", None)
    if isinstance(value, Mapping) and type(value).__module__ in {"builtins", "collections"}:
        return [*value.keys(), *value.values()]
    if isinstance(value, _CONTAINERS):
        return [*value, *(own or {}).values()]
    kind: Any = type(value)  # with a way of its own to be copied it may have more than its attributes
    plain = kind.__reduce__ is object.__reduce__ and not isinstance(value, torch.jit.ScriptModule)
    return list(own.values()) if own is not None and plain else None
