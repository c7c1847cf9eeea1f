"""Objects of any class, taken apart and put together by what they hold: no code of their classes runs.

A batch is often an object of a class of its own, and such a class may do anything when an object is made, copied,
pickled, updated, read or let go (`__init__`, `__copy__`, `__getstate__`, properties, `__del__`). Run on the rows of
several examples, that could join them. So an object is here what it holds:

    contents      of a subclass of `tuple`, `list`, `dict`: read and written by the built-in class's own functions
    attributes    what stands in its `__dict__`
    slots         what stands in its `__slots__`
"""

import weakref
from collections import OrderedDict, UserDict
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from types import GetSetDescriptorType, MemberDescriptorType, SimpleNamespace
from typing import Any, NamedTuple

PLAIN = (tuple, list, dict)
"""Containers of Python's own, which run nobody's code."""
_BASES = (tuple, list, OrderedDict, dict, SimpleNamespace, object)


class _Layout(NamedTuple):
    """Where the objects of a class hold things.

    Attributes:
        base: the built-in class that makes its objects, and has their contents.
        attributes: the descriptor of their `__dict__`; None without one.
        slots: the names of their slots, and the descriptors.
    """

    base: Any
    attributes: Any
    slots: tuple[tuple[str, Any], ...]


@lru_cache(maxsize=1024)
def _layout(kind: type) -> _Layout | None:
    """None for a class that keeps things where only its own code finds them, or that runs some when they go."""
    if any("__del__" in vars(one) for one in kind.__mro__):
        return None
    base: Any = next(one for one in kind.__mro__ if one in _BASES)
    try:
        base.__new__(kind)  # refused by Python where another built-in class lies between
    except TypeError:
        return None
    members = [(name, found) for one in kind.__mro__ for name, found in vars(one).items()]
    own = (GetSetDescriptorType, MemberDescriptorType)
    attributes = next((found for name, found in members if name == "__dict__" and type(found) in own), None)
    slots = tuple((name, d) for name, d in members if type(d) is MemberDescriptorType and name != "__dict__")
    return _Layout(base, attributes, slots)


class Apart(NamedTuple):
    """What an object holds.

    Attributes:
        contents: by place or key; None for a class without.
        attributes: by name; None without a `__dict__`.
        slots: by their number among those of the class.
    """

    contents: dict[Any, Any] | None
    attributes: dict[str, Any] | None
    slots: dict[int, Any]


def taken_apart(value: Any) -> Apart | None:
    """What it holds; None where that is not known."""
    kind: type = type(value)
    layout = _layout(kind)
    if layout is None:
        return None
    contents: dict[Any, Any] | None = None
    if layout.base in (tuple, list):
        contents = dict(enumerate(layout.base.__iter__(value)))
    elif issubclass(layout.base, dict):
        contents = dict(layout.base.items(value))
    attributes = None if layout.attributes is None else dict(layout.attributes.__get__(value))
    slots = {}
    for i, (_, slot) in enumerate(layout.slots):
        try:
            slots[i] = slot.__get__(value)
        except AttributeError:  # not set
            continue
    return Apart(contents, attributes, slots)


def named_parts(value: Any) -> list[tuple[Any, Any]]:
    """(name, value) of all that it holds; nothing where that is not known."""
    kind: type = type(value)
    apart, layout = taken_apart(value), _layout(kind)
    if apart is None or layout is None:
        return []
    named = [(layout.slots[i][0], part) for i, part in apart.slots.items()]
    return [*(apart.contents or {}).items(), *(apart.attributes or {}).items(), *named]


def fields_of(batch: Any) -> dict[Any, Any]:
    """The fields of a batch, by key or place; of other mappings than dicts as they give them, none of other objects."""
    apart = taken_apart(batch)
    if apart is not None and apart.contents is None and issubclass(type(batch), UserDict):
        apart = taken_apart((apart.attributes or {}).get("data"))
    if apart is not None and apart.contents is not None:
        return apart.contents
    return dict(batch) if issubclass(type(batch), Mapping) else {}


def put_together(
    kind: type, contents: Iterable[Any] | None, more: Callable[[Any], tuple[dict[str, Any] | None, dict[int, Any]]]
) -> Any:
    """An object of this class that holds these things.

    Args:
        contents: values, or (key, value) pairs of a dict.
        more: given the object, which is without attributes yet, its attributes and slots.
    """
    layout = _layout(kind)
    assert layout is not None
    base = layout.base
    made = tuple.__new__(kind, contents or ()) if base is tuple else base.__new__(kind)
    if base is list:
        list.extend(made, contents or ())
    elif issubclass(base, dict):
        for key, value in contents or ():
            base.__setitem__(made, key, value)
    attributes, slots = more(made)
    if attributes is not None:
        layout.attributes.__get__(made).update(attributes)
    for i, value in slots.items():
        layout.slots[i][1].__set__(made, value)
    return made


def remade(value: Any, change: Callable[[Any], Any]) -> Any:
    """An object of the class, of what `change` makes of each thing that this one holds; this one if nothing changed."""
    apart, changed = taken_apart(value), {}
    assert apart is not None

    def once(part: Any) -> Any:
        if id(part) not in changed:
            changed[id(part)] = change(part)
        return changed[id(part)]

    attributes = None if apart.attributes is None else {name: once(part) for name, part in apart.attributes.items()}
    slots = {i: once(part) for i, part in apart.slots.items()}
    contents: Any = None
    if apart.contents is not None:
        contents = [once(part) for part in apart.contents.values()]
        contents = zip(apart.contents, contents, strict=True) if issubclass(type(value), dict) else contents
    if all(id(new) == old for old, new in changed.items()):
        return value
    return put_together(type(value), contents, lambda _: (attributes, slots))


# ----------------------------------------------------------------------------------------------------
# What an object will be made of, as plain containers: on its way from a worker none of its code runs either.


class SentClass:
    """A class, on its way to another process."""

    def __init__(self, kind: type) -> None:
        self.kind = kind

    def __reduce__(self) -> Any:
        layout = _layout(self.kind)
        assert layout is not None
        if any(getattr(self.kind, name) is not getattr(layout.base, name) for name in ("__reduce__", "__reduce_ex__")):
            try:  # a class that is made when it is asked for, as those of PyG's batches, says how: of an empty object
                function, args, *_ = layout.base.__new__(self.kind).__reduce_ex__(4)
            except Exception:  # which has nothing that it would read
                return SentClass, (self.kind,)
            return _made_kind, (function, args)
        return SentClass, (self.kind,)


def _made_kind(function: Callable[..., Any], args: tuple[Any, ...]) -> SentClass:
    return SentClass(type(function(*args)))


class PlannedObject(NamedTuple):
    """What an object of a class is to hold."""

    kind: SentClass
    contents: dict[Any, Any] | None
    attributes: dict[str, Any] | None
    slots: dict[int, Any]


class Above(NamedTuple):
    """A weak reference to the object so many levels above, of which this is a part."""

    levels: int


class RowValues(list[Any]):
    """A list with one value for each row, such as a text or a dict of its boxes."""


def listed_values(tree: Any) -> list[list[Any]]:
    """All `RowValues` of a tree."""
    kind = type(tree)
    if kind is RowValues:
        return [tree]
    parts = tree.values() if kind is dict else tree if kind in (tuple, list, PlannedObject) else ()
    return [found for part in parts for found in listed_values(part)]


def _with_each(container: Any, change: Callable[[Any], Any]) -> Any:
    """One of `PLAIN`, of what `change` makes of each thing in it."""
    kind = type(container)
    if kind is dict:
        return {key: change(part) for key, part in container.items()}
    return kind([change(part) for part in container])


def mapped(tree: Any, change: Callable[[Any], Any]) -> Any:
    """The tree with what `change` makes of each of its leaves."""
    kind = type(tree)
    if kind in PLAIN:
        return _with_each(tree, lambda part: mapped(part, change))
    if kind is PlannedObject:
        return PlannedObject(tree.kind, *(mapped(part, change) for part in tree[1:]))
    return change(tree)


def carried_out(tree: Any, above: tuple[Any, ...] = ()) -> Any:
    """The tree, with the objects that were planned."""
    kind = type(tree)
    if kind in PLAIN:
        return _with_each(tree, lambda part: carried_out(part, above))
    if kind is RowValues:
        return list(tree)
    if kind is Above:
        return weakref.ref(above[-1 - tree.levels])
    if kind is not PlannedObject:
        return tree
    own = tree.kind.kind
    contents: Any = None
    if tree.contents is not None:
        contents = [carried_out(part, (*above, None)) for part in tree.contents.values()]
        contents = zip(tree.contents, contents, strict=True) if issubclass(own, dict) else contents

    def more(made: Any) -> tuple[Any, Any]:
        inside = (*above, made)
        return carried_out(tree.attributes, inside), carried_out(tree.slots, inside)

    return put_together(own, contents, more)
