"""Shapes: each example is collated on its own and padded to a public shape, so that nothing of it shows in others.

What pads to the longest of a batch, centres, mixes or masks over a batch lets one example reach the gradients of all.
So

    collation    `collate_fn` is called once for each example, and these batches of one are joined along dimension 0.
                 What it does over a whole batch, it does per example.
    padding      an example is padded to the least of a public list of shapes that holds it (and the other examples of
                 its unit in the batch), which is a function of its unit's own data alone.
    the loop     gets tensors of one public shape, the largest of the list, whatever the data.
    the model    runs on all rows of one shape at a time, cut to that shape (`ByShape`): a row sees its own padding.

Torch's own `default_collate` stacks, and all shapes are equal where it does not fail: it is called on the batch, where
examples are of torch's and Python's own types. What a class of one's own does (`update` of a dict, say) it does alone.
"""

import dataclasses
import functools
import inspect
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import pairwise
from operator import attrgetter, is_, itemgetter
from types import BuiltinFunctionType, FunctionType
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils import _pytree as pytree
from torch.utils.data import TensorDataset, default_collate, default_convert
from torch.utils.data._utils import collate as torch_collate

from anyorder import checks
from anyorder.errors import AnyorderError, ArgumentError, LoaderError, ModelError, ModelWarning
from anyorder.sampling.batch_classes import (
    PLAIN,
    Above,
    Apart,
    PlannedObject,
    RowValues,
    SentClass,
    carried_out,
    listed_values,
    mapped,
    named_parts,
    taken_apart,
)

Name = str | int | None
"""Of a field: its key in a dict, its place in a tuple; None for a batch that is one tensor."""
Sizes = int | Sequence[int] | Sequence[tuple[int, ...]]
PadTo = Sizes | Mapping[Any, Sizes] | None
Rows = NDArray[np.int64]

_LEAST = 16  # of the powers of two that a longest length stands for
_LABELS = ("label", "labels", "target", "targets")
_NO_LABEL = -100  # torch's default for `ignore_index`
_DEEP = 4  # containers within containers that are searched for tensors
_ROWWISE = (default_convert, Tensor.clone)  # convert, copy: row i is of example i alone
_PAD = (
    "state the public lengths that examples are padded to, make_private(.., pad_to=(64, 128)), or pad all examples to "
    "one length in the data set"
)


def is_rowwise(collate: Any) -> bool:
    """Whether a collation is torch's own: row i of what it makes is of example i alone."""
    return any(collate is known for known in _ROWWISE) or (collate is default_collate and default_collate_stacks())


def default_collate_stacks() -> bool:
    """Whether `default_collate` has torch's own functions alone: who puts others into its table may pad there."""
    own = default_collate.__module__
    return all(function.__module__ == own for function in torch_collate.default_collate_fn_map.values())


# ----------------------------------------------------------------------------------------------------
# Public shapes.


@dataclass(frozen=True)
class PublicShapes:
    """The shapes to which examples are padded, the same for every data set, from small to large.

    Attributes:
        count: how many there are.
        fields: by field (None: by any field), how many of its last dimensions are padded (0: dimension 1 alone), and
            their sizes in each shape.
        values: by field, the number that fills it up.
        value: the number for integers that are neither masks nor labels, where `values` has none.
        left: whether what is filled up stands in front.
        stated: whether the user said what fills fields up.
    """

    count: int
    fields: Mapping[Name, tuple[int, tuple[tuple[int, ...], ...]]]
    values: Mapping[Name, float]
    value: float
    left: bool
    stated: bool

    @classmethod
    def of(
        cls, pad_to: PadTo, pad_value: float | Mapping[Any, float] | None = None, pad_side: str | None = None,
        collate_fn: Any = None,
    ) -> "PublicShapes":  # fmt: skip
        """Those of `make_private`'s arguments; what is None, of a collator's tokenizer. Raises: ArgumentError."""
        if pad_to is None:
            raise ArgumentError("pad_value and pad_side say how examples are padded: give pad_to= too")
        listed = pad_to if isinstance(pad_to, Mapping) else {None: pad_to}
        fields = {name: _sizes(sizes) for name, sizes in listed.items()}
        counts = {len(sizes) for _, sizes in fields.values()}
        if len(counts) != 1:
            raise ArgumentError("pad_to must list as many lengths for each field: those of a place go together")
        tokenizer, collator = _tokenizer_of(collate_fn)
        side = pad_side or getattr(tokenizer, "padding_side", None) or "right"
        checks.choice("pad_side", side, {"left", "right"})
        label = getattr(collator, "label_pad_token_id", _NO_LABEL)
        values: dict[Name, float] = dict.fromkeys(_LABELS, label)
        values["token_type_ids"] = getattr(tokenizer, "pad_token_type_id", None) or 0
        value = getattr(tokenizer, "pad_token_id", None) or 0
        if isinstance(pad_value, Mapping):
            values |= pad_value
        elif pad_value is not None:
            value = checks.real("pad_value", pad_value)
        return cls(counts.pop(), fields, values, value, side == "left", pad_value is not None)

    def dims(self, name: Name, tensor: Tensor) -> list[tuple[int, int]]:
        """(dimension, place among the sizes) of what is padded of a field. By its name, dtype and dimensions alone."""
        if name not in self.fields and None not in self.fields:
            return []
        last, _ = self.fields[name if name in self.fields else None]
        own = tensor.dim()
        if own < 1 + max(last, 1):
            return []
        if name not in self.fields and name in _LABELS and own == 2 and tensor.is_floating_point():
            return []  # numbers of each example, or yes and no for each class
        return [(own - last + i, i) for i in range(last)] if last else [(1, 0)]

    def size(self, name: Name, place: int, number: int) -> int:
        """Of a field's dimension, in the shape of this number."""
        return self.fields[name if name in self.fields else None][1][number][place]

    def fill(self, name: Name, dtype: torch.dtype) -> float:
        """The number that a field is filled up with."""
        if name in self.values and not (name in _LABELS and dtype == torch.bool):
            return self.values[name]
        is_mask = dtype == torch.bool or (isinstance(name, str) and name.endswith("mask"))
        return 0 if is_mask or dtype.is_floating_point or dtype.is_complex else self.value

    def warn_of_zeros(self, batch: Any) -> None:
        """Warn of whole numbers in later places of a tuple, which may be labels: 0 is a class, and would be learnt."""
        named = [(name, t) for name, t in named_tensors(batch) if isinstance(name, int) and name > 0]
        whole = [
            (name, t) for name, t in named if not (t.is_floating_point() or t.is_complex() or t.dtype == torch.bool)
        ]
        filled = [name for name, t in whole if self.dims(name, t) and self.fill(name, t.dtype) == 0]
        if filled and not self.stated:
            warnings.warn(
                f"whole numbers in place {filled[0]} of a batch are filled up with 0 by pad_to=. If they are labels, "
                f"the model learns class 0 from padding: pass pad_value={{{filled[0]}: -100}}; if they are not, "
                f"pad_value={{{filled[0]}: 0}} says so",
                ModelWarning,
                stacklevel=4,
            )


def _sizes(sizes: Any) -> tuple[int, tuple[tuple[int, ...], ...]]:
    """How many last dimensions they are of, and the sizes of each shape."""
    if isinstance(sizes, int) and not isinstance(sizes, bool):
        longest = checks.integer("pad_to", sizes, low=1)
        powers = [2**k for k in range(_LEAST.bit_length() - 1, longest.bit_length()) if 2**k < longest]
        return 0, tuple((size,) for size in [*powers, longest])
    listed = list(sizes) if isinstance(sizes, (list, tuple)) else []
    rows = [tuple(one) if isinstance(one, (list, tuple)) else (one,) for one in listed]
    each = [size for row in rows for size in row]
    sound = bool(each) and all(type(size) is int and size > 0 for size in each) and len(set(map(len, rows))) == 1
    sound &= len(set(map(type, listed))) == 1
    if not sound or any(a == b or any(x > y for x, y in zip(a, b, strict=True)) for a, b in pairwise(rows)):
        raise ArgumentError(
            "pad_to must be the longest length, a list of lengths in ascending order, or of sizes of the last "
            f"dimensions such as ((32, 32), (64, 64)), or a dict of these by field; got {sizes!r}"
        )
    return (0 if isinstance(listed[0], int) else len(rows[0])), tuple(rows)


def _tokenizer_of(collate_fn: Any) -> tuple[Any, Any]:
    """The tokenizer of a collator, and the collator that has it; behind wrappers, or None."""
    inner = [getattr(collate_fn, name, None) for name in ("data_collator", "func", "collate", "_collate")]
    for name in ("tokenizer", "processing_class"):
        found = getattr(collate_fn, name, None)
        if hasattr(found, "padding_side"):
            return found, collate_fn
    return next(
        (pair for one in inner if one is not None and (pair := _tokenizer_of(one))[0] is not None), (None, None)
    )


# ----------------------------------------------------------------------------------------------------
# Collation of each example alone.


class Collated(NamedTuple):
    """A batch, and the number of each row's public shape, as it comes from a worker; None: it was not collated here.

    `empty` says which rows are made up, in the place of examples that do not fit. Objects of a class of one's own are
    only planned until `whole`: a process that hands them on, or pins their memory, runs none of its code.
    """

    batch: Any
    numbers: Rows | None
    empty: NDArray[np.bool_] | None = None

    def whole(self) -> Any:
        """The batch, with its objects."""
        return carried_out(self.batch)

    def single_rows(self) -> list[list[Any]]:
        """The values of lists that have one for each row: what stands in them is of that row, whatever its shape."""
        return listed_values(self.batch)

    def pin_memory(self) -> "Collated":
        """As a DataLoader asks for it."""
        return self._replace(batch=mapped(self.batch, lambda leaf: leaf.pin_memory() if type(leaf) is Tensor else leaf))


class CollatedAlone:
    """A collate function that is given one example at a time, and whose results are joined.

    Args:
        collate_fn: the user's.
        shapes: to which examples are padded; None: all must have one shape.
        like: a public batch of one example that is made up. One that cannot be joined to it, by types, fields or
            sizes, is replaced by it: that depends on the example alone. None: LoaderError.
    """

    def __init__(self, collate_fn: Callable[[Any], Any], shapes: PublicShapes | None, like: Any = None) -> None:
        self._collate, self._shapes, self._like = collate_fn, shapes, like

    def __call__(self, examples: Any) -> Any:
        if not len(examples) and self._like is not None:
            return Collated(_none_of(self._like), None)
        if not len(examples) or not isinstance(examples, (list, Tensor)):
            return Collated(self._collate(examples), None)  # of none, or joined by a data set's own __getitems__
        joining, empty = Joining(self._shapes, len(examples)), None
        each = [examples[i : i + 1] for i in range(len(examples))]
        if self._like is None:
            batch = joining.plan([self._alone(example) for example in each])
        else:
            fitting = [self._fitting(example) for example in each]
            empty = np.array([one is None for one in fitting])
            batch = joining.plan([self._like if one is None else one for one in fitting])
        if self._shapes is None and empty is None and not joining.has_objects:
            return batch
        return Collated(batch, joining.numbers, empty)

    def _fitting(self, example: Any) -> Any:
        """The batch of one example; None where it does not fit."""
        try:
            found = self._alone(example)
            Joining(self._shapes, 2).plan([self._like, found])
        except AnyorderError:
            return None
        return found

    def _alone(self, example: Any) -> Any:
        """The batch of one example. This is where the user's function is called in a run."""
        try:
            return self._collate(example)
        except AnyorderError:
            raise
        except Exception as error:
            raise LoaderError(
                "collate_fn is called on each example alone, so that none can reach the rows of others, and it fails "
                f"there ({type(error).__name__}); let it take a list of one example"
            ) from error


class Stacked:
    """Torch's `default_collate`: on the batch where it runs code of torch's alone, else on each example.

    An example's mapping, named tuple or tensor of a class would see the rows of all. Of `rows` it is given indices.
    """

    def __init__(self, collate: Callable[[Any], Any], rows: TensorDataset | None = None) -> None:
        self._collate, self._alone, self._rows = collate, CollatedAlone(collate, None), rows

    def __call__(self, examples: Any) -> Any:
        if self._rows is not None:
            tensors = self._rows.tensors
            plain = {*map(type, tensors), *map(attrgetter("layout"), tensors)} == {Tensor, torch.strided}
            numbers = np.array(examples)  # of which torch makes a tensor in a quarter of the time
            if numbers.dtype == np.int64 and plain and all(map(Tensor.is_contiguous, tensors)):
                return list(map(itemgetter(torch.from_numpy(numbers)), tensors))
            examples = [self._rows[i] for i in numbers.tolist()]
        return self._collate(examples) if type(examples) is not list or _stack(examples) else self._alone(examples)


def versions_of(dataset: TensorDataset) -> tuple[Sequence[Tensor], list[tuple[int, int]]]:
    """The tensors, and what tells whether they show other memory, or were written."""
    return dataset.tensors, [
        (t.data_ptr(), t._version)
        for t in dataset.tensors
        if type(t) is Tensor and t.layout is torch.strided and not t.is_inference()
    ]


_STACKED = frozenset({float, int, bool, str, bytes, *np.sctypeDict.values()})


def _stack(values: Sequence[Any]) -> bool:
    """Whether torch's own code joins these, which are of one type."""
    kinds = set(map(type, values))
    if len(kinds) != 1:
        return not values
    (kind,) = kinds
    if kind in (Tensor, np.ndarray):
        return len(set(map(attrgetter("dtype"), values))) == 1  # of two, all would be of the wider
    if kind in (tuple, list):
        return all(map(_stack, zip(*values, strict=False)))
    if kind is dict:
        columns = (map(itemgetter(key), values) for key in values[0])
        return len(set(map(frozenset, values))) == 1 and all(_stack(list(column)) for column in columns)
    known = (Tensor, np.ndarray, np.generic, Mapping, Sequence, int, float)  # of others torch says what it takes
    return kind in _STACKED or not issubclass(kind, known)


class CollateAny:
    """Collates like the user's function, and no examples too: the first example of a data set, cut to none."""

    def __init__(self, dataset: Any, first: int, collate_fn: Callable[[Any], Any]) -> None:
        self.collate = collate_fn
        self._dataset, self._first = dataset, first

    def __call__(self, examples: Any) -> Any:
        return self.collate(examples) if len(examples) else _none_of(self.collate([self._dataset[self._first]]))


def inner(collate: Any) -> Any:
    """The user's function, behind what collates no examples too."""
    return collate.collate if isinstance(collate, CollateAny) else collate


def _none_of(batch: Any) -> Any:
    """A batch of one example, cut to none, in the same containers."""
    if isinstance(batch, (torch.Tensor, np.ndarray)):
        return batch[:0]
    if isinstance(batch, Mapping):
        return {key: _none_of(value) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*map(_none_of, batch))
    if isinstance(batch, (list, tuple)):
        # Fields are containers and stay; what is left is the one example's value (a string, say), and goes.
        containers = (torch.Tensor, np.ndarray, Mapping, list, tuple)
        return type(batch)([_none_of(part) for part in batch if isinstance(part, containers)])
    raise LoaderError(
        f"a batch of no examples cannot be made from {type(batch).__name__}; let collate_fn return tensors, or lists, "
        "tuples or dicts of them"
    )


def named_tensors(batch: Any, name: Name = None, depth: int = _DEEP) -> Iterator[tuple[Name, Tensor]]:
    """The tensors of a batch, with the name of their field."""
    kind = type(batch)  # `isinstance` would ask the object for its `__class__`
    if issubclass(kind, Tensor):
        yield name, batch
    elif issubclass(kind, np.ndarray):
        if batch.dtype.kind in "biufc":
            yield name, torch.from_numpy(batch)
    elif depth and (kind is not list or _has_fields(batch)):
        for key, part in named_parts(batch):
            yield from named_tensors(part, key if isinstance(key, str) or name is None else name, depth - 1)


def _has_fields(listed: list[Any]) -> bool:
    """Whether a list holds fields, or else the value of its one example, a text perhaps."""
    return len(listed) != 1 or isinstance(listed[0], (Tensor, np.ndarray))


class Joining:
    """Puts batches one behind the other, padded to the largest of the public shapes.

    Args:
        shapes: None: all must have one shape.
        examples: how many there are, where each batch must be of one example; None: of any number.

    Attributes:
        numbers: (examples,) of each one's shape: the least that holds it; the largest for one that none holds.
        has_objects: whether what was joined has objects of classes that are not Python's own containers, or lists of
            one value for each row that may be such.
    Raises: LoaderError where they cannot be joined. It says nothing of which, or how large.
    """

    def __init__(self, shapes: PublicShapes | None, examples: int | None = None) -> None:
        self._shapes, self.numbers = shapes, None if examples is None else np.zeros(examples, np.int64)
        self.has_objects = False
        self._open: list[list[Any]] = []  # the objects that are being joined, from the outermost

    def join(self, parts: list[Any]) -> Any:
        """The parts, joined."""
        return carried_out(self.plan(parts))

    def plan(self, parts: list[Any], name: Name = None) -> Any:
        """The parts of a field of this name, joined; what is an object of a class of one's own is `PlannedObject`."""
        first, kind = parts[0], type(parts[0])
        if len(set(map(type, parts))) > 1:
            raise LoaderError("collate_fn gives one example other types than another; give all the same")
        if issubclass(kind, Tensor):
            return self._tensors(parts, name)
        if issubclass(kind, np.ndarray):
            if first.dtype.kind not in "biufc":
                return np.concatenate([np.asarray(part) for part in parts])
            return self._tensors([torch.from_numpy(np.asarray(part)) for part in parts], name).numpy()
        if kind is list and not any(map(_has_fields, parts)):
            values = RowValues(value for part in parts for value in part)
            if all(type(value) in _SETTINGS for value in values):  # as texts are
                return list(values)
            self.has_objects = True
            return values
        if kind in _SETTINGS or issubclass(kind, (type, Enum)):
            return _one_setting(parts)
        of = [part() for part in parts] if kind is weakref.ref else parts
        for levels, above in enumerate(reversed(self._open)):
            if all(map(is_, of, above)):
                if kind is weakref.ref:
                    return Above(levels)
                raise LoaderError("collate_fn gives an object that holds itself, which cannot be joined to others")
        if issubclass(kind, (int, float, np.number)):
            fixed = inspect.getattr_static(type(self._open[-1][0]), str(name), None) if self._open else None
            if kind in (int, float) and type(fixed) is kind and all(part == fixed for part in parts):
                return fixed  # as it stands in the class, for all batches
            raise LoaderError(
                "collate_fn gives a Python number, which is of one example or of all: make it a tensor (1,), or, where "
                "it is the same for all, the default of a field"
            )
        apart = [Apart(_by_name(part), None, {}) if kind in PLAIN else taken_apart(part) for part in parts]
        if apart[0] is None:
            raise LoaderError(
                f"collate_fn gives a {kind.__name__}, and those of single examples cannot be joined to one of all: "
                "give tensors with one row for each example, a list of one value, [..], or dicts, tuples, dataclasses "
                "and other objects that hold these, of classes without __del__"
            )
        return self._objects(parts, apart, name)

    def _objects(self, parts: list[Any], apart: list[Any], name: Name) -> Any:
        """Containers, and what else holds things, joined thing by thing."""
        kind = type(parts[0])
        if checks.is_of(parts[0], "transformers.tokenization_utils_base", "BatchEncoding"):
            # What a tokenizer keeps of the texts beside the tensors: a slow one keeps nothing.
            nothing = {"_encodings": None, "_n_sequences": None}
            apart = [one._replace(attributes={**one.attributes, **nothing}) for one in apart]
        self._open.append(parts)
        known: dict[Any, Any] = {}
        own = Apart(*(self._things(list(things), name, known) for things in zip(*apart, strict=True)))
        self._open.pop()
        if kind is dict:
            return own.contents
        if kind in (tuple, list):
            return kind((own.contents or {}).values())
        self.has_objects = True
        return PlannedObject(SentClass(kind), *own)

    def _things(self, things: list[Any], name: Name, known: dict[Any, Any]) -> Any:
        """What stands in one place of each of several objects, joined by name; what is item and attribute, once."""
        if things[0] is None:
            return None
        keys = list(things[0])
        if not all(map(_is_name, keys)) or any(list(one) != keys for one in things):
            raise LoaderError("collate_fn gives one example other fields than another; give all the same")
        joined = {}
        for key in keys:
            parts = [one[key] for one in things]
            at = key, *map(id, parts)
            if at not in known:
                known[at] = self.plan(parts, key if isinstance(key, str) or name is None else name)
            joined[key] = known[at]
        return joined

    def _tensors(self, parts: list[Tensor], name: Name) -> Tensor:
        if any(part.is_nested or part.layout not in (torch.strided, torch.sparse_coo) for part in parts):
            raise LoaderError(
                "collate_fn gives nested or compressed tensors, whose rows cannot be put together: give padded tensors "
                "with a mask, dense ones, or sparse ones in coordinates, x.to_sparse()"
            )
        parts = list(map(_ordinary, parts))
        first = parts[0]
        if self.numbers is not None and not all(part.dim() and part.shape[0] == 1 for part in parts):
            got = "another number of rows" if all(part.dim() for part in parts) else "a number without a row"
            raise LoaderError(
                f"collate_fn, called on one example, must give tensors with one row, of shape (1, ..), got {got}: "
                "stack examples; pad bags with offsets, packed sequences and nodes of graphs to a public number, with "
                "a mask; transpose in forward (docs/models.md#layouts)"
            )
        if len({(part.dtype, part.dim()) for part in parts}) > 1:
            raise LoaderError("collate_fn gives one example tensors of another dtype, or of more dimensions")
        dims = [] if self._shapes is None else self._shapes.dims(name, first)
        padded = {d for d, _ in dims}
        if len({tuple(n for d, n in enumerate(part.shape[1:], 1) if d not in padded) for part in parts}) > 1:
            raise LoaderError(
                f"the examples of a batch differ in shape, and one would show in the rows of others: {_PAD}"
                if self._shapes is None
                else "examples differ in shape where pad_to= does not pad: it pads dimension 1 of a batch. For others "
                "state sizes of the last dimensions, such as pad_to=((1, 256), (1, 512)) for (channels, length)"
            )
        if self._shapes is None or not dims:
            return first if len(parts) == 1 else torch.cat(parts)
        if self.numbers is not None:
            for d, i in dims:
                held = [self._shapes.size(name, i, k) for k in range(self._shapes.count - 1)]
                np.maximum(self.numbers, np.searchsorted(held, [part.shape[d] for part in parts]), out=self.numbers)
        return _padded(parts, name, dims, self._shapes)


def _ordinary(tensor: Tensor) -> Tensor:
    """An example's tensor, without a class of its own: what that does with several would be done with the batch."""
    if type(tensor) is Tensor:
        return tensor
    own = tensor.as_subclass(Tensor) if type(tensor).__torch_dispatch__ is Tensor.__torch_dispatch__ else None
    if type(own) is not Tensor:
        raise LoaderError(
            f"collate_fn gives tensors of the class {type(tensor).__name__}, which stands for other tensors: give the "
            "tensors themselves"
        )
    return own


def _by_name(container: Any) -> dict[Any, Any]:
    return container if type(container) is dict else dict(enumerate(container))


def _is_name(key: Any) -> bool:
    """Whether it is equal to others by Python's own rule alone."""
    kind = type(key)
    return kind in (str, int, bool) or issubclass(kind, Enum) or (kind is tuple and all(map(_is_name, key)))


_SETTINGS = frozenset(
    {type(None), bool, str, bytes, torch.dtype, torch.device, torch.layout, FunctionType, BuiltinFunctionType}
)
"""Types of what cannot be changed, and is equal by Python's and torch's own rule alone."""


def _one_setting(parts: list[Any]) -> Any:
    first = parts[0]
    if any(part is not first and part != first for part in parts):
        raise LoaderError("collate_fn gives another setting for one example than for another; give a list of one, [..]")
    return first


def _padded(parts: list[Tensor], name: Name, dims: list[tuple[int, int]], shapes: PublicShapes) -> Tensor:
    """Tensors one behind the other, each padded to the largest shape in these dimensions."""
    first = parts[0]
    shape = [sum(map(len, parts)), *first.shape[1:]]
    for d, i in dims:
        shape[d] = shapes.size(name, i, shapes.count - 1)
    fill = shapes.fill(name, first.dtype)
    if [d for d, _ in dims] == [1] and shape[0] == len(parts):  # one call, whose last row has the length of all
        rows = [part[0, : shape[1]] for part in parts]
        rows.append(first.new_empty(shape[1:]))
        return pad_sequence(rows, True, fill, "left" if shapes.left else "right")[:-1]
    whole = first.new_full(shape, fill)
    start = 0
    for own in parts:
        place = whole[start : start + len(own)]
        start += len(own)
        for d, _ in dims:
            size = min(shape[d], own.shape[d])
            own = own.narrow(d, 0, size)  # what is longer than the longest loses its end
            place = place.narrow(d, shape[d] - size if shapes.left else 0, size)
        place.copy_(own)
    return whole


# ----------------------------------------------------------------------------------------------------
# The model, on the rows of one shape at a time.

Cut = tuple[tuple[int, tuple[int, ...]], ...]
"""Of a tensor: the dimensions that are cut, and the size of each in every public shape."""


@dataclass(frozen=True)
class RowShapes:
    """The public shapes of a batch's rows.

    Attributes:
        numbers: (rows,) of each row's shape.
        fields: of each tensor of the batch: its shape without the rows, whether it is floating, what is cut of it.
        count, left: as of `PublicShapes`.
    """

    numbers: Rows
    fields: list[tuple[torch.Size, bool, Cut]]
    count: int
    left: bool

    @classmethod
    def of(cls, batch: Any, numbers: Rows, shapes: PublicShapes) -> "RowShapes":
        """Those of a batch that was joined."""
        fields = []
        for name, tensor in named_tensors(batch):
            cut = [
                (d, tuple(shapes.size(name, i, k) for k in range(shapes.count))) for d, i in shapes.dims(name, tensor)
            ]
            fields.append((tensor.shape[1:], tensor.is_floating_point(), tuple(cut)))
        return cls(numbers, fields, shapes.count, shapes.left)

    def of_units(self, units: Rows) -> "RowShapes":
        """With the largest of a unit's rows for all of them: a unit is clipped as a whole, in one run of the model."""
        largest = np.zeros(len(self.numbers), np.int64)
        np.maximum.at(largest, units, self.numbers)
        return dataclasses.replace(self, numbers=largest[units])

    def check_numbers(self, tensors: Sequence[Tensor], problem: Exception) -> None:
        """Of a batch on which the model failed: raise ModelError if a number of an example is no place in it.

        The message is the same whichever number it is: what torch says tells how long a text is.
        """
        if not any(word in str(problem) for word in ("out of bounds", "out of range", "length")):
            return
        longest = max((sizes[-1] for _, _, cut in self.fields for _, sizes in cut), default=0)
        counts = [t for t in tensors if t.dim() == 1 and not (t.is_floating_point() or t.is_complex())]
        if any(len(t) and int(t.max()) > longest for t in counts):
            raise ModelError(
                f"the model failed on a batch with a number above {longest}, the longest length of pad_to=. An example "
                "that is longer loses its end, and its length stays as it was: limit it in forward, "
                "lengths.clamp(max=x.shape[1]), or list a longer length in pad_to="
            ) from None

    def cut_of(self, tensor: Tensor) -> Cut | None:
        """What is cut of a tensor that the model is given; None where it cannot be told.

        It must have the shape of one of the batch's, as copies have, and masks; or lack the first or the last place of
        a padded dimension, as what a language model reads does. Numbers of other shapes may be anything.
        """
        found: set[Cut] = set()
        for shape, is_floating, cut in self.fields:
            if tensor.dim() != len(shape) + 1 or (tensor.is_floating_point() and not is_floating):
                continue
            padded = {d for d, _ in cut}
            less = [full - size for full, size in zip(shape, tensor.shape[1:], strict=True)]
            if all(off == 0 or (off == 1 and d in padded) for d, off in enumerate(less, 1)):
                found.add(tuple((d, tuple(size - less[d - 1] for size in sizes)) for d, sizes in cut))
        if not found and tensor.dim() < 2:
            return ()
        return found.pop() if len(found) == 1 else None


class ByShape:
    """Runs a clipping engine on the rows of one public shape at a time, and adds up their sums of clipped gradients.

    All rows of a unit have one shape, so each unit is clipped once, of gradients that its own data and shape decide.
    Outputs are put together in the shape that the largest gives: what is behind a row's own (or before it, with
    padding in front) is zero, and no gradient comes from there. Where an argument or an output cannot be matched to
    shapes, all rows run at the largest: as exact, and slower.

    A model that counts its calls, or keeps the longest length, would tell how many lengths a batch has: it runs at the
    largest too, once a batch. So does one that draws on a CPU, as dropout does: which numbers a row is given follows
    from its place among the rows of a run, and among those of its shape a neighbour moves it. In the whole batch it
    does not. Another device runs shape by shape: there masks are others for a neighbour, of the same law (`draws`).

    Args:
        clipping: the engine, a `PerUnitClipping`.
        state: () -> what the model keeps, to compare.
        draws: says whether what it is given draws random numbers; None: the model is known not to.
    """

    def __init__(
        self, clipping: Any, state: Callable[[], Any], draws: Callable[[Callable[[], Any]], bool] | None = None
    ) -> None:
        self._clipping, self._forward, self._state, self._draws = clipping, clipping.forward, state, draws
        self._known: dict[Any, list[torch.Size | None] | None] = {}

    def __call__(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], *, shapes: RowShapes, groups: Tensor,
        receive: Callable[[dict[str, Tensor]], None], passes: Any, **options: Any,
    ) -> Any:  # fmt: skip
        """As the engine's `forward`, of a batch whose rows have these shapes."""
        at_largest = functools.partial(self._forward, groups=groups, receive=receive, passes=passes, **options)
        leaves, structure = pytree.tree_flatten((args, kwargs))
        found = [shapes.cut_of(leaf) if isinstance(leaf, Tensor) else () for leaf in leaves]
        cuts = [cut for cut in found if cut is not None]

        def run(number: int, rows: Tensor, of: list[Any] = leaves, **more: Any) -> list[Any]:
            own = [_cut(leaf, rows, cut, number, shapes.left) for leaf, cut in zip(of, cuts, strict=True)]
            given, named = pytree.tree_unflatten(own, structure)
            return list(pytree.tree_flatten(self._forward(given, named, **more, **options)))

        matched = len(cuts) == len(found) and any(cuts)
        whole = self._shapes_of_outputs(run, leaves, cuts, shapes.count) if matched else None
        passes.by_shape(whole is not None)
        used = np.unique(shapes.numbers).tolist()
        if whole is None or used in ([], [shapes.count - 1]):
            return at_largest(args, kwargs)

        def collect(of_shape: dict[str, Tensor]) -> None:
            passes.sums.append(of_shape)
            if len(passes.sums) == len(used):
                receive(functools.reduce(_added, passes.sums))

        places = [torch.from_numpy(np.flatnonzero(shapes.numbers == number)) for number in used]
        runs = [
            run(number, rows, groups=groups[rows], receive=collect, passes=passes.part(number))
            for number, rows in zip(used, places, strict=True)
        ]
        passes.made("by shape", *used)
        outputs = [_placed(shape, places, [own[i] for own, _ in runs], shapes.left) for i, shape in enumerate(whole)]
        return pytree.tree_unflatten(outputs, runs[0][1])

    def _shapes_of_outputs(self, run: Callable[..., Any], leaves: list[Any], cuts: Any, count: int) -> Any:
        """Those of the largest, without rows, by leaf; None where the model does not run at each public shape.

        Found once, on no rows: by the code of the model alone. Whether it draws, on a row of ones.
        """
        key = tuple((leaf.shape[1:], leaf.dtype) if isinstance(leaf, Tensor) else None for leaf in leaves), tuple(cuts)
        if key not in self._known:
            none = torch.zeros(0, dtype=torch.int64)
            before, kept = self._clipping.state_dict(), self._state()
            try:
                with torch.no_grad(), warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    tried = [run(number, none, groups=none, receive=_nowhere)[0] for number in range(count)]
                self._known[key] = _largest(tried)
                if self._draws is not None and self._draws(lambda: self._on_ones(run, leaves, count)):
                    self._known[key] = None
            except Exception:  # of the model, which says the same at the largest, if it fails there
                self._known[key] = None
            self._clipping.load_state_dict(before)
            if self._state() != kept:
                self._known[key] = None
        return self._known[key]

    def _on_ones(self, run: Callable[..., Any], leaves: list[Any], count: int) -> None:
        """Run the model on a made-up row at each public shape, where what it draws would follow a row's place."""
        if not any(isinstance(leaf, Tensor) and leaf.is_cpu for leaf in leaves):
            return
        ones = [leaf.new_ones((1, *leaf.shape[1:])) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        first = torch.zeros(1, dtype=torch.int64)
        for number in range(count):
            run(number, first, ones, groups=first, receive=_nowhere)


def _nowhere(sums: dict[str, Tensor]) -> None:
    del sums


def _added(sums: dict[str, Tensor], others: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: sums[name] + others[name] if name in others else sums[name] for name in {**sums, **others}}


def _largest(tried: list[list[Any]]) -> list[torch.Size | None] | None:
    """The shapes of the last outputs without their rows, if those before fit into them."""
    shapes = [[leaf.shape[1:] if isinstance(leaf, Tensor) else None for leaf in leaves] for leaves in tried]
    return shapes[-1] if all(_fits(own, shapes[-1]) for own in shapes) else None


def _fits(shapes: list[torch.Size | None], whole: list[torch.Size | None]) -> bool:
    if [s and len(s) for s in shapes] != [s and len(s) for s in whole]:
        return False
    return all(
        a <= b for own, full in zip(shapes, whole, strict=True) for a, b in zip(own or (), full or (), strict=True)
    )


def _cut(leaf: Any, rows: Tensor, cut: Cut, number: int, left: bool) -> Any:
    """Some rows of an argument, in the shape of this number."""
    if not isinstance(leaf, Tensor):
        return leaf
    for d, sizes in cut:
        leaf = leaf.narrow(d, leaf.shape[d] - sizes[number] if left else 0, sizes[number])
    return leaf[rows.to(leaf.device)]


def _region(whole: Tensor, shape: torch.Size, left: bool) -> Tensor:
    """Where the outputs of a shape lie in those of the largest."""
    for d, size in enumerate(shape[1:], 1):
        if size != whole.shape[d]:
            whole = whole.narrow(d, whole.shape[d] - size if left else 0, size)
    return whole


def _placed(shape: torch.Size | None, rows: list[Tensor], pieces: list[Any], left: bool) -> Any:
    """One output of all rows, of those of each shape."""
    if shape is None:
        return pieces[0]
    rows = [one.to(pieces[0].device) for one in rows]
    return _Placed.apply((sum(map(len, rows)), *shape), rows, left, *pieces)  # type: ignore[no-untyped-call]


class _Placed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, shape: tuple[int, ...], rows: list[Tensor], left: bool, *pieces: Tensor) -> Tensor:
        ctx.rows, ctx.left, ctx.shapes = rows, left, [piece.shape for piece in pieces]
        whole = pieces[0].new_zeros(shape)
        for own, piece in zip(rows, pieces, strict=True):
            _region(whole, piece.shape, left).index_copy_(0, own, piece)
        return whole

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (gradient,) = gradients
        parts = [
            _region(gradient, shape, ctx.left).index_select(0, own)
            for own, shape in zip(ctx.rows, ctx.shapes, strict=True)
        ]
        return None, None, None, *parts
