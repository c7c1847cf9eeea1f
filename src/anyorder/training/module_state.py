"""What a model keeps from one call to the next, wherever it does: in attributes, buffers, closures, classes, globals.

A number that a model keeps of a batch, its longest length perhaps, lets the units of that batch reach all later ones.
So two copies of the model are run on made-up data of other values and other shapes, and what they keep is compared.
What moves alike, a counter of calls, is public. Once, at the first batch; never at a step.
"""

import functools
import hashlib
import inspect
import types
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from anyorder.sampling.draws import is_of_library

State = dict[str, Any]
"""{where: what is kept there}, plain numbers, texts, and digests of tensors."""

_PLAIN = (type(None), bool, int, float, complex, str, bytes)
_OF_TORCH = {"_parameters", "_modules", "_non_persistent_buffers_set", "_is_full_backward_hook"}
_DEEPEST, _MOST, _LARGEST = 8, 20_000, 1 << 22


def state_of(module: nn.Module) -> State:
    """Everything that can be reached from a model and may move: not its parameters, which releases move."""
    found: State = {}
    seen: dict[int, Any] = {}  # by id, and held: what is made on the way must not leave its id to the next
    for name, part in module.named_modules():
        for attribute, value in vars(part).items():
            if attribute not in _OF_TORCH:
                _add(found, seen, f"{name}.{attribute}".strip("."), value, _DEEPEST)
        for cls in type(part).__mro__:
            if not is_of_library(cls.__module__):
                for attribute, value in vars(cls).items():
                    _add(found, seen, f"{cls.__name__}.{attribute}", value, _DEEPEST)
    return found


def _add(found: State, seen: dict[int, Any], place: str, value: Any, depth: int) -> None:
    """Put down what is at a place, and whatever can be reached from there."""
    if isinstance(value, _PLAIN):
        found[place] = value
        return
    if id(value) in seen or not depth or len(found) > _MOST:
        return
    seen[id(value)] = value
    if isinstance(value, Tensor):
        if not isinstance(value, nn.Parameter):
            found[place] = _of_tensor(value)
        return
    if isinstance(value, Mapping | list | tuple | set | frozenset):
        found[f"{place} (length)"] = len(value)
    for name, part in _parts(value):
        _add(found, seen, f"{place}{name}", part, depth - 1)


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    """What a value holds."""
    match value:
        case nn.Module() | type() | types.ModuleType():
            return
        case Mapping():
            yield from ((f"[{name!r}]", part) for name, part in list(value.items()))
        case list() | tuple():
            yield from ((f"[{i}]", part) for i, part in enumerate(value))
        case set() | frozenset():
            yield "", sorted(map(repr, value))
        case functools.partial():
            yield from (("(function)", value.func), ("(arguments)", (value.args, value.keywords)))
        case types.MethodType():
            yield from (("(object)", value.__self__), ("(function)", value.__func__))
        case types.FunctionType():
            if not is_of_library(value.__module__ or ""):
                yield from _of_function(value)
        case _:
            if not is_of_library(type(value).__module__):
                yield from ((f".{name}", part) for name, part in list(getattr(value, "__dict__", {}).items()))


def _of_function(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    """Its closure, defaults, attributes, and the globals that its code names."""
    names = inspect.getclosurevars(function)
    yield from ((f" ({name})", part) for name, part in {**names.globals, **names.nonlocals}.items())
    yield " (defaults)", (function.__defaults__, function.__kwdefaults__)
    yield from ((f".{name}", part) for name, part in vars(function).items())


def _of_tensor(tensor: Tensor) -> Any:
    """A number as itself, so that counters can be told from others; else a digest."""
    if tensor.device.type == "meta" or tensor.layout != torch.strided:
        return f"{tensor.dtype} {tuple(tensor.shape)}"
    if tensor.numel() == 1:
        return tensor.item()
    if tensor.numel() > _LARGEST:  # a table of the user's own perhaps; it is told by whether it was written
        return f"{tensor.dtype} {tuple(tensor.shape)} version {tensor._version}"
    bits = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return f"{tensor.dtype} {tuple(tensor.shape)} {hashlib.blake2b(bits, digest_size=16).hexdigest()}"


def moved_apart(one: tuple[State, State], other: tuple[State, State]) -> list[str]:
    """Where two copies that were called equally often keep other things.

    Args:
        one, other: what each kept before and after its calls.
    Returns: the places, each of a value that was moved otherwise in one than in the other.
    """
    places = one[0].keys() | one[1].keys() | other[0].keys() | other[1].keys()
    return sorted(place for place in places if _change(one, place) != _change(other, place))


def _change(states: tuple[State, State], place: str) -> Any:
    """How a value moved: numbers by how much, all else to what."""
    before, after = (state.get(place, "nothing") for state in states)
    if before == after or (before != before and after != after):
        return "not at all"
    if isinstance(before, int | float) and isinstance(after, int | float):
        return after - before
    return after
