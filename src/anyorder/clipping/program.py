"""The forward pass of a model as a flat list of operations on the whole batch: written down twice, then replayed.

Under `torch.func.vmap` a model is seen by nobody but torch, and what torch makes of it is a list of operations on
tensors of all examples, in which no row can reach another: each is what a batching rule of torch made of a function of
one example. `Recorder` writes that list down, below vmap and below autograd, while the model runs as ever; each rule of
a layer (`layer_rules`) is one entry. In later batches `PassProgram` runs the entries, with autograd, in place of the
model: the same operations with the same numbers in the same order, and so the same bits.

That is right as long as the model would make the same list again. It may depend on:

- the shapes, strides, types and devices of the inputs (but for the number of examples, which no model sees under vmap),
  the arguments that are no tensors, and torch's settings: the `key_of` a batch, under which its program is kept;
- what the code of the model can reach: modules, their attributes, hooks, modes, parameters and buffers, their classes,
  and the names that its functions read. `Snapshot` holds all of it, and every batch asks whether it is as it was;
- anything else: numbers drawn by Python or NumPy, clocks, values of tensors, files. `_Guard` looks at every call that
  Python makes during a capture. What is not known to depend on its arguments alone ends the recording.

A program is used from the third batch of its kind on, if the first two gave the same list, and written down then as a
tape, which the fourth and all others play. Where something is in doubt,
the model runs as without programs. Which way a batch goes depends on code and shapes, never on values of the data.
"""

import dis
import functools
import random
import sys
import sysconfig
import types
import weakref
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, fields, replace
from itertools import chain
from operator import attrgetter, is_, methodcaller
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from anyorder.clipping import torch_private as private
from anyorder.clipping.kept_tensors import check_argument
from anyorder.clipping.torch_private import pytree
from anyorder.errors import ModelError

if TYPE_CHECKING:
    from anyorder.clipping.layer_rules import Books

Tensors = tuple[Tensor, ...]


class NotRecorded(Exception):
    """The model may make another list of operations in a batch of the same kind."""


# -- what a model is called with, and returns --------------------------------------------------------------------------

_HERE = object()  # in the place of a tensor


class Arguments:
    """What a module is called with, split into the tensors, which are of the batch, and the rest.

    Args:
        args, kwargs: what the module is called with on the batch; see `PerUnitClipping.forward`.
        chained: whether tensors may require gradients, which then go back through them.

    Attributes:
        tensors: the tensors among the arguments, each with leading dimension `size`.
        size: B, the number of examples.
        words: equal for calls that differ in their tensors alone.

    Raises: ModelError if the tensors do not share a leading dimension, or an argument cannot be split by example.
    """

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any], chained: bool = False) -> None:
        self._structure: pytree.TreeSpec | None = None
        self.words: Any = None
        self.tensors: Tensors = args
        if kwargs or set(map(type, args)) != {Tensor}:  # else as most models are called: nothing to flatten
            for argument in (*args, *kwargs.values()):
                check_argument(argument)
            leaves, self._structure = pytree.tree_flatten((args, kwargs))
            self.tensors = tuple([leaf for leaf in leaves if isinstance(leaf, Tensor)])
            self._settings = [_HERE if isinstance(leaf, Tensor) else leaf for leaf in leaves]
            self.words = self._structure, tuple([(type(setting), setting) for setting in self._settings])
        first = self.tensors[0] if len(self.tensors) == 1 else None
        alone = first is not None and first.dim() and not first.requires_grad
        self.size = first.shape[0] if first is not None and alone else _batch_size(self.tensors, chained)
        if chained and not self.size:
            self.tensors = tuple([t.detach() for t in self.tensors])

    def filled(self, tensors: Sequence[Tensor]) -> Any:
        """Arguments and keyword arguments, with other tensors in the place of those of the batch."""
        if self._structure is None:
            return tensors, {}
        rest = iter(tensors)
        leaves = [next(rest) if setting is _HERE else setting for setting in self._settings]
        return pytree.tree_unflatten(leaves, self._structure)


def _batch_size(tensors: Tensors, chained: bool) -> int:
    sizes = [tensor.shape[0] if tensor.dim() else None for tensor in tensors]
    size = sizes[0] if sizes else None
    other = next((i for i, own in enumerate(sizes) if own is None or own != size), None)
    if size is None or other is not None:  # sizes are not said: how many a mask chose is not public
        told = "no tensor" if other is None else f"another, or none, in tensor {other + 1} of {len(sizes)}"
        raise ModelError(
            "the tensors given to the model must share their leading dimension, the examples of the batch; got "
            f"{told}. Repeat a shared tensor for each example, or make it a buffer of the model; leave out the first "
            "state of a recurrent layer, which is zeros, or transpose it in forward: its layers come first, also under "
            "batch_first=True"
        )
    if not chained and any(tensor.requires_grad for tensor in tensors):
        raise ModelError(
            "the tensors given to the model must not require gradients: what came before the model would get a "
            "gradient that is not private. Put those layers into the model, or detach the tensors"
        )
    return size


@dataclass(frozen=True)
class Place:
    """Where an output tensor goes in the module's output structure."""

    differentiable: bool


@dataclass(frozen=True)
class ModuleOutput:
    """What a module returned: its leaves, a `Place` for each tensor, and how they are put together (None: one leaf)."""

    leaves: list[Any]
    spec: pytree.TreeSpec | None

    def filled(self, differentiable: Tensors, others: Tensors) -> Any:
        """The structure with tensors in it."""
        if self.spec is None:
            return differentiable[0]
        sources = {True: iter(differentiable), False: iter(others)}
        leaves = [next(sources[leaf.differentiable]) if isinstance(leaf, Place) else leaf for leaf in self.leaves]
        return pytree.tree_unflatten(leaves, self.spec)


# -- the list --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Slot:
    """A tensor of the program, by its number."""

    number: int


@dataclass(frozen=True)
class _Times:
    """So many times the number of examples."""

    factor: int


@dataclass(frozen=True)
class _Operation:
    """One operation.

    Attributes:
        function: an overload of an ATen operator, or what a rule of a layer runs: (books, *tensors).
        args, kwargs: with a `_Slot` in the place of each tensor.
        made: the numbers of its results.
        identity: equal for equal operations of two recordings.
        rule: whether it is a rule.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    made: tuple[int, ...]
    identity: Any
    rule: bool


def _slots(values: Any) -> Iterator[int]:
    for value in values:
        if isinstance(value, _Slot):
            yield value.number
        elif isinstance(value, (list, tuple)):
            yield from _slots(value)


def _said(value: Any, number: Callable[[Tensor], int]) -> Any:
    """An argument as a program has it; `number` is that of a tensor."""
    if isinstance(value, Tensor):
        return _Slot(number(value))
    if isinstance(value, (list, tuple)):
        return tuple(_said(one, number) for one in value)
    if type(value) not in _VALUES:
        raise NotRecorded(f"an argument of type {type(value).__name__}")
    return value


def _joined(one: Any, two: Any, size: int | None, other: int | None) -> Any:
    """Arguments of one operation in batches of two sizes: a number that moves with the size is so many times it."""
    if type(one) is not type(two):
        raise NotRecorded("arguments of two types")
    if isinstance(one, tuple) and len(one) == len(two):
        return tuple([_joined(a, b, size, other) for a, b in zip(one, two, strict=True)])
    if one == two:
        return one
    if type(one) is int and size and other and size != other and not one % size and one // size * other == two:
        return _Times(one // size)
    raise NotRecorded("two arguments")


def _at_size(value: Any, size: int) -> Any:
    if isinstance(value, tuple):
        return tuple([_at_size(one, size) for one in value])
    return value.factor * size if isinstance(value, _Times) else value


class PassProgram:
    """A recorded pass.

    Attributes:
        size: of the batches that it is for; None for any, as `sized` makes it for each.
        copies: names of the parameters of which it takes a copy for each example: their gradients come by autograd.
        output: the structure of what the module returned.
    """

    def __init__(
        self, size: int | None, nodes: list[_Operation], inputs: int, copies: dict[str, int],
        constants: dict[int, Tensor], buffers: set[int], outputs: tuple[tuple[int, ...], tuple[int, ...]],
        output: ModuleOutput, autocast: tuple[str, bool, torch.dtype],
    ) -> None:  # fmt: skip
        self.size = size
        self._of_size: dict[int, PassProgram] = {}
        used = {number for node in nodes for number in _slots((*node.args, *node.kwargs.values()))}
        used.update(*outputs)
        if any(True for node in nodes for _ in _slots(node.kwargs.values())):
            raise NotRecorded("a tensor among keyword arguments")
        # Autograd itself takes a cut copy of results that it saves, which nobody uses.
        self._nodes = [n for n in nodes if n.function is not _DETACH or not used.isdisjoint(n.made)]
        self._constants = {number: t for number, t in constants.items() if number in used}
        self._inputs, self._buffers, self._outputs, self._autocast = inputs, buffers, outputs, autocast
        self._copies = {name: number for name, number in copies.items() if number in used}
        self.copies = tuple(self._copies)
        self.output = output
        self._numbers = 1 + max([*used, inputs, *(n for node in nodes for n in node.made)])
        self._play: Callable[..., None] | None = None
        self.tape: Tape | None = None  # of batches of this size
        self.tries = 0  # to write it down

    def joined(self, other: "PassProgram") -> "PassProgram | None":
        """The program of both, if two recordings gave the same list; of batches of any size, if theirs differ.

        The model itself sees no size of a batch under vmap: where one is among the arguments, a batching rule of torch
        put it there, times what it folds into the dimension of the examples.
        """
        mine = self._outputs, self._copies, self._autocast, self._constants.keys(), len(self._nodes)
        theirs = other._outputs, other._copies, other._autocast, other._constants.keys(), len(other._nodes)
        if mine != theirs or any(t is not other._constants[number] for number, t in self._constants.items()):
            return None
        nodes = []
        for one, two in zip(self._nodes, other._nodes, strict=True):
            if (one.identity, one.made, one.kwargs.keys()) != (two.identity, two.made, two.kwargs.keys()):
                return None
            try:
                args = _joined(one.args, two.args, self.size, other.size)
                values = _joined(tuple(one.kwargs.values()), tuple(two.kwargs.values()), self.size, other.size)
            except NotRecorded:
                return None
            nodes.append(replace(one, args=args, kwargs=dict(zip(one.kwargs, values, strict=True))))
        return self._with(self.size if self.size == other.size else None, nodes)

    def sized(self, size: int) -> "PassProgram | None":
        """The program for batches of a size."""
        if self.size is not None:
            return self if self.size == size else None
        made = self._of_size.get(size)
        if made is None:
            nodes = []
            for node in self._nodes:
                values = _at_size(tuple(node.kwargs.values()), size)
                kwargs = dict(zip(node.kwargs, values, strict=True))
                nodes.append(replace(node, args=_at_size(node.args, size), kwargs=kwargs))
            while len(self._of_size) >= _SIZES:
                del self._of_size[next(iter(self._of_size))]
            made = self._of_size[size] = self._with(size, nodes)
        return made

    def _with(self, size: int | None, nodes: list[_Operation]) -> "PassProgram":
        rest = self._inputs, self._copies, self._constants, self._buffers, self._outputs, self.output, self._autocast
        return PassProgram(size, nodes, *rest)

    def run(self, books: "Books", inputs: Tensors, copies: Tensors) -> tuple[Tensors, Tensors]:
        """The model's outputs on a batch: the differentiable ones, and the others."""
        tensors: list[Any] = [None] * self._numbers
        tensors[: self._inputs] = inputs
        for number, constant in self._constants.items():
            # As under vmap: a buffer that is written between forward and backward is what it was.
            tensors[number] = constant.clone() if number in self._buffers else constant
        for number, copy in zip(self._copies.values(), copies, strict=True):
            tensors[number] = copy
        kind, mixed, dtype = self._autocast

        def enter(rule: Callable[..., Any], given: list[Any]) -> Any:
            with torch.autocast(kind, dtype, cache_enabled=False) if mixed else nullcontext():
                return rule(books, *given)

        if self._play is None:
            self._play = _emitted(self._nodes, {n for group in self._outputs for n in group})
        _played(self._play, tensors, kind, enter)
        first, second = self._outputs
        return tuple([tensors[i] for i in first]), tuple([tensors[i] for i in second])


def _emitted(nodes: Sequence[_Operation], kept: set[int]) -> Callable[..., None]:
    """The nodes as one function of their tensors, a line for each: `t[10] = f3(t[2], t[0], t[9])`.

    After each what nobody needs any more is let go, but for what is kept.
    """
    last: dict[int, int] = {}
    for place, node in enumerate(nodes):
        for number in (*_slots((*node.args, *node.kwargs.values())), *node.made):
            last[number] = place
    names: dict[str, Any] = {"put": _put}

    def said(value: Any) -> str:
        if isinstance(value, _Slot):
            return f"t[{value.number}]"
        if isinstance(value, (list, tuple)) and any(True for _ in _slots(value)):
            return f"[{', '.join(map(said, value))}]"
        names[name := f"c{len(names)}"] = value
        return name

    lines = ["def play(t, enter):", " pass"]
    for place, node in enumerate(nodes):
        numbers = {*_slots(node.args), *node.made} - kept
        ended = [f"t[{n}] = " for n in sorted(numbers) if last[n] == place]
        names[name := f"f{len(names)}"] = _DIRECT.get(node.function, node.function)
        if node.rule:
            lines.append(f" put(t, {node.made}, enter({name}, [{', '.join(map(said, node.args))}]))")
        else:
            given = [*map(said, node.args), *(f"{key}={said(value)}" for key, value in node.kwargs.items())]
            function: Any = node.function
            returns = [str(one.type) for one in getattr(function._schema, "returns", ())]  # none: of no operation
            comma = ", " if returns and returns != ["Tensor"] else ""
            left = "".join(f"t[{n}]{comma}" for n in node.made) + " = " * bool(node.made)
            lines.append(f" {left}{name}({', '.join(given)})")
        lines += [f" {''.join(ended)}None"] if ended else []
    exec(compile("\n".join(lines), "<program>", "exec"), names)
    play: Callable[..., None] = names["play"]
    return play


def _put(tensors: list[Any], made: tuple[int, ...], result: Any) -> None:
    for number, one in zip(made, (result,) if isinstance(result, Tensor) else result, strict=True):
        tensors[number] = one


def _played(play: Callable[..., None], tensors: list[Any], device: str, enter: Any = None) -> None:
    """Run operations, which are those below autocast, with its casts, and rules by `enter`."""
    if torch.is_autocast_enabled(device):
        with torch.autocast(device, enabled=False):
            play(tensors, enter)
    else:
        play(tensors, enter)


class Replay:
    """A program as the call of a batch.

    Attributes:
        tensors, size: the inputs, and how many examples they have.
    """

    mapped = False

    def __init__(self, program: PassProgram, arguments: Arguments) -> None:
        self.program, self.tensors, self.size = program, arguments.tensors, arguments.size

    def assemble(self, differentiable: Tensors, others: Tensors) -> Any:
        """The module's output structure, filled."""
        return self.program.output.filled(differentiable, others)


# -- forward and backward --------------------------------------------------------------------------------------------

TAPE_BYTES = 2**26  # of all that a pass makes, up to which it is taped: all is held meanwhile, more gains little
TAPE_TRIES = 3  # a batch whose loss is never taken leaves no tape


class Tape:
    """A pass of a program, forward and backward, as operations of ATen: no module, rule or node of autograd is entered.

    It is written down while a program runs, in which no code of the model does; so it is the same for every batch of
    this size. Gradients of outputs are made contiguous before they come in, whatever the loss made them.

    Attributes:
        output: the structure of what the module returns.
        parameters: those that are trained, by name, in the order in which it is given them.
        expected: how many uses of each backward comes to.
        draws: whether it asks the generators of torch.
        rows: where each use of a parameter is one of rows (see `Use.rows`): for each parameter the numbers of a and g,
            or None where it has no gradient; else None.
        library: what makes the sums of `rows` at once; see `per_example.AtOnce`.
    """

    def __init__(self, recorder: "TapeRecorder", expected: Mapping[str, int]) -> None:
        first = {*recorder.outputs[0], *recorder.outputs[1]}
        rows = {number for pair in recorder.rows or () for number in pair or () if number is not None}
        last = {*recorder.direct.values(), *_slots(v for _, _, values in recorder.uses for v in values.values())}
        kept = _needed(recorder.nodes, first | rows | last)
        # What rows do not need is left for a batch whose uses are asked for, unless it would find others' numbers then.
        writes = any(node.function._schema.is_mutable for _, node in kept)  # type: ignore[attr-defined]
        at_once = {place for place, _ in (kept if writes or not rows else _needed(recorder.nodes, first | rows))}
        forward = [node for place, node in kept if place < recorder.split and place in at_once]
        backward = [node for place, node in kept if place >= recorder.split and place in at_once]
        rest = [node for place, node in kept if place not in at_once]
        read = [
            {n for node in part for n in _slots((*node.args, *node.kwargs.values()))}
            for part in (forward, backward, rest)
        ]
        if recorder.anchor in read[0] | read[1] | read[2]:
            raise NotRecorded("the anchor of autograd")
        self._outputs, self._gradients, self._constants = recorder.outputs, recorder.gradients, recorder.constants
        after = rows | last | read[2]
        before = self._constants.keys() | {number for node in forward for number in node.made}
        self._kept = sorted((read[1] | after) & before)  # outputs and what shares their memory among them
        self._blank: list[Any] = [None] * recorder.count
        self._forward = _emitted(forward, first | read[1] | after)
        self._backward, self._rest = _emitted(backward, after), _emitted(rest, last)
        self._dropped = sorted(first - read[1] - after)
        self._uses, self._direct = recorder.uses, recorder.direct
        self.parameters, self.rows, self.expected = recorder.parameters, recorder.rows, Counter(expected)
        tags = {tag for _, node in kept for tag in node.function.tags}  # type: ignore[attr-defined]
        self.draws = torch.Tag.nondeterministic_seeded in tags
        self.output: ModuleOutput = recorder.program.output
        self._device = recorder.program._autocast[0]
        self.library: Any = None

    def forward(self, given: Sequence[Tensor]) -> tuple[Tensors, Tensors, list[Any]]:
        """The outputs, differentiable ones and others, and what `backward` needs, of inputs and parameters."""
        tensors = self._blank.copy()
        tensors[: len(given)] = given
        for number, constant in self._constants.items():
            tensors[number] = constant
        _played(self._forward, tensors, self._device)
        first, second = self._outputs
        made = tuple(map(tensors.__getitem__, first)), tuple(map(tensors.__getitem__, second))
        for number in self._dropped:
            tensors[number] = None
        return *made, tensors

    def versions(self, tensors: list[Any]) -> list[int]:
        """How often each tensor was written that `backward` reads, but for inputs and parameters."""
        return private.versions(list(map(tensors.__getitem__, self._kept)))

    def backward(self, tensors: list[Any], gradients: Sequence[Tensor]) -> None:
        """The rest of the operations, of the gradients of the differentiable outputs."""
        for number, gradient in zip(self._gradients, gradients, strict=True):
            tensors[number] = gradient.contiguous().resolve_neg()
        _played(self._backward, tensors, self._device)

    def uses(self, tensors: list[Any]) -> Iterator[tuple[Any, Any]]:
        """The uses of parameters that backward came to, in its order; once, before `direct`."""
        _played(self._rest, tensors, self._device)
        for part, kind, values in self._uses:
            yield part, kind(**{k: tensors[v.number] if isinstance(v, _Slot) else v for k, v in values.items()})

    def direct(self, tensors: list[Any]) -> dict[str, Tensor]:
        """The gradients that came by autograd."""
        return {name: tensors[number] for name, number in self._direct.items()}


_aten = torch.ops.aten
_DIRECT: dict[Any, Callable[..., Any]] = {
    _aten.t.default: torch.t, _aten.view.default: Tensor.view, _aten._unsafe_view.default: Tensor.view,
    _aten.unsqueeze.default: torch.unsqueeze, _aten.permute.default: torch.permute,
    _aten.transpose.int: torch.transpose, _aten.addmm.default: torch.addmm, _aten.mm.default: torch.mm,
    _aten.bmm.default: torch.bmm, _aten.relu.default: torch.relu, _aten.tanh.default: torch.tanh,
    _aten.mul.Tensor: torch.mul, _aten.add.Tensor: torch.add, _aten.sum.dim_IntList: torch.sum,
    _aten.convolution.default: torch.convolution,
}  # fmt: skip
"""The functions of torch that are these operations, given the same arguments, and are called faster."""


def _needed(nodes: Sequence[_Operation], needed: set[int]) -> list[tuple[int, _Operation]]:
    """The operations, with their places, that these tensors come of, and all that write."""
    kept = []
    for place, node in reversed(list(enumerate(nodes))):
        if node.function._schema.is_mutable or not needed.isdisjoint(node.made):  # type: ignore[attr-defined]
            kept.append((place, node))
            needed |= {*_slots((*node.args, *node.kwargs.values()))}
    return kept[::-1]


_READS_ONLY: dict[str, Any] = {"tags": (), "_schema": types.SimpleNamespace(is_mutable=False)}
"""What an operation of ATen that draws nothing and writes no tensor of a pass tells of itself."""


class TapeRecorder(private.DispatchMode):  # type: ignore[misc]
    """Writes down what a program does, while it is active around its run and around its backward pass.

    Tensors are known as objects, or by the memory that they show: autograd puts other objects around what it saved. All
    of them are held meanwhile, so that no memory is used again.

    Args:
        program: what runs.
        inputs: of the batch.
        parameters, cut_off: those that are trained, and as the pass reads them.

    Attributes:
        problem: why there is no tape, if there is none.
    """

    def __init__(
        self, program: "PassProgram", inputs: Tensors, parameters: Mapping[str, Tensor], cut_off: Mapping[str, Tensor]
    ) -> None:
        super().__init__()
        self.program, self.parameters = program, dict(parameters)
        self.problem: str | None = None
        self.nodes: list[_Operation] = []
        self.uses: list[tuple[Any, type, dict[str, Any]]] = []
        self.direct: dict[str, int] = {}
        self.rows: list[tuple[int | None, int] | None] | None = None
        self.outputs: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())
        self.gradients: tuple[int, ...] = ()
        self.split = self._bytes = 0
        self._numbers: dict[int, int] = {}
        self._places: dict[Any, int] = {}
        self._held: list[Tensor] = []  # by number
        self._objects: list[Tensor] = []  # other objects for the same, so that no id is used again
        self._paused = False
        for tensor in (*inputs, *cut_off.values()):
            self._add(tensor)
        self.constants = {self._add(t): t for t in program._constants.values()}
        self.anchor = -1
        self._outside = {private.memory(t) for t in self._held}
        if len(self._places) < len(self._held):
            self.problem = "two names for one memory"

    @property
    def count(self) -> int:
        """How many tensors there are."""
        return len(self._held)

    def _add(self, tensor: Tensor) -> int:
        number = self._numbers[id(tensor)] = self._places[_shown(tensor)] = len(self._held)
        self._held.append(tensor)
        return number

    def number(self, tensor: Tensor) -> int:
        """The number of a tensor that is known."""
        found = self._numbers.get(id(tensor))
        found = self._places.get(_shown(tensor)) if found is None else found
        if found is None:
            raise NotRecorded("a tensor that no operation made")
        return found

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._paused or self.problem is not None:
            return func(*args, **kwargs)
        try:
            template, keywords = _said(args, self.number), {k: _said(v, self.number) for k, v in kwargs.items()}
            self._check(func, args, kwargs)
        except NotRecorded as error:
            self.stop(str(error))
            return func(*args, **kwargs)
        result = func(*args, **kwargs)
        try:
            made = [result] if isinstance(result, Tensor) else [] if result is None else list(result)
            before = len(self._held)
            numbers = tuple(map(self._made, made))
        except NotRecorded as error:
            self.stop(str(error))
            return result
        if func._schema.is_mutable or len(self._held) > before or not numbers:  # else other objects for what is known
            self.nodes.append(_Operation(func, template, keywords, numbers, None, False))
        return result

    def read(self, function: Callable[[Tensor], Tensor], ids: Tensor) -> Tensor:
        """Rows of a table that stands elsewhere: one operation, whatever is done to have them."""
        look = functools.partial(function)
        vars(look).update(_READS_ONLY)
        with self.paused():
            rows = look(ids)
        if self.problem is None:
            try:
                self.nodes.append(_Operation(look, _said((ids,), self.number), {}, (self._made(rows),), None, False))
            except NotRecorded as error:
                self.stop(str(error))
        return rows

    def _check(self, func: Any, args: Any, kwargs: dict[str, Any]) -> None:
        tags = func.tags
        if func.namespace != "aten" or not _REFUSED_TAGS.isdisjoint(tags) or torch.Tag.inplace_view in tags:
            raise NotRecorded(f"{func} may depend on values")
        if any(isinstance(value, Tensor) for value in kwargs.values()):
            raise NotRecorded(f"{func} is given tensors by name")
        if func._schema.is_mutable:
            for argument, value in zip(func._schema.arguments, args, strict=False):
                written = argument.alias_info is not None and argument.alias_info.is_write
                if written and (not isinstance(value, Tensor) or private.memory(value) in self._outside):
                    raise NotRecorded(f"{func} writes what was there before the pass")

    def _made(self, tensor: Any) -> int:
        """The number of a result; one that nobody reads where there is none."""
        if tensor is None:
            self._held.append(self._held[0])
            return len(self._held) - 1
        if type(tensor) is not Tensor or tensor.layout is not torch.strided:
            raise NotRecorded("a result that is no ordinary tensor")
        known = self._numbers.get(id(tensor))
        known = self._places.get(_shown(tensor)) if known is None else known
        if known is not None:
            self._numbers[id(tensor)] = known
            self._objects.append(tensor)
            return known
        self._bytes += tensor.nbytes
        if self._bytes > TAPE_BYTES:
            raise NotRecorded("a pass that makes much")
        return self._add(tensor)

    def stop(self, problem: str) -> None:
        """There will be no tape, here or, where there is a problem, of a later batch; and nothing is held."""
        self.problem = problem
        self.program.tries = TAPE_TRIES if problem else self.program.tries
        self._numbers, self._places, self._held, self._objects, self.nodes, self.uses = {}, {}, [], [], [], []
        self.constants = {}

    @contextmanager
    def paused(self) -> Iterator[None]:
        """What runs inside is not of the pass."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    # -- what the pass tells -----------------------------------------------------------------------------------------

    def begin(self, anchor: Tensor) -> None:
        """What autograd begins with, of which no number is ever read."""
        self.anchor = self._add(anchor)

    def end_forward(self, differentiable: Tensors, others: Tensors) -> None:
        """The outputs."""
        if self.problem is None:
            self.outputs = tuple(map(self.number, differentiable)), tuple(map(self.number, others))
            self.split = len(self.nodes)

    def begin_backward(self, gradients: Tensors) -> None:
        """The gradients that came to the outputs."""
        if self.problem is None:
            if any(_shown(g) in self._places for g in gradients):
                self.stop("a gradient that is a tensor of the pass")
            else:
                self.gradients = tuple(map(self._add, gradients))

    def use(self, part: Any, use: Any) -> None:
        """Backward came to a use of a parameter."""
        if self.problem is None:
            try:
                values = {f.name: self._said_of(getattr(use, f.name)) for f in fields(use) if f.init}
            except NotRecorded as error:
                self.stop(str(error))
            else:
                self.uses.append((part, type(use), values))

    def _said_of(self, value: Any) -> Any:
        return _Slot(self.number(value)) if isinstance(value, Tensor) else value

    def end(self, direct: Mapping[str, Tensor], rows: Sequence[Any], expected: Mapping[str, int]) -> None:
        """All is there: the program has its tape.

        Args:
            direct: the gradients that came by autograd.
            rows: for each parameter (a, g) of its one use, None where it has no gradient; empty if some have others.
            expected: how many uses of each parameter were announced.
        """
        try:
            if self.problem is None and self.gradients:
                self.direct = {name: self.number(gradient) for name, gradient in direct.items()}
                if rows:
                    self.rows = [None if x is None else tuple(map(self._row, x)) for x in rows]
                self.program.tape = Tape(self, expected)
        except NotRecorded as error:
            self.stop(str(error))
        self.stop(self.problem or "")

    def _row(self, tensor: Tensor | None) -> Any:
        return None if tensor is None else self.number(tensor)


def _shown(tensor: Tensor) -> Any:
    """The numbers that a tensor shows."""
    return private.memory(tensor), tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype


# -- recording -------------------------------------------------------------------------------------------------------

_DETACH = torch.ops.aten.detach.default
_VALUES = (int, float, bool, str, complex, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)
_REFUSED_TAGS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
_ABOUT = {
    "size", "dim", "ndimension", "nelement", "numel", "__len__", "stride", "is_contiguous", "is_floating_point",
    "is_complex", "element_size", "storage_offset", "is_signed", "get_device", "type", "is_same_size", "result_type",
    "shape", "ndim", "dtype", "device", "layout", "requires_grad", "is_cuda", "is_sparse", "is_quantized", "is_leaf",
    "is_nested", "is_meta", "is_mkldnn", "is_mps", "is_xpu", "itemsize", "nbytes", "can_cast", "promote_types",
    "broadcast_shapes", "is_tensor", "is_conj", "is_neg", "is_inference", "names", "has_names",
}  # fmt: skip
"""Functions of torch that tell of shapes and types, never of values."""


class Recorder(private.DispatchMode):  # type: ignore[misc]
    """Writes down what runs on the whole batch, while it is active around a pass under vmap.

    Args:
        snapshot: of the model; what its functions read goes there.

    Attributes:
        problem: why there is no program, if there is none.
        program: what was written down, at the end.
    """

    def __init__(self, snapshot: "Snapshot") -> None:
        super().__init__()
        self._snapshot = snapshot
        # By id, and only weakly: a pass needs no more memory while it is written down. An id that is used again is told
        # by the reference, which is then to another tensor, or to none.
        self._numbers: dict[int, tuple[int, weakref.ref[Tensor]]] = {}
        self._count = 0
        self._nodes: list[_Operation] = []
        self._outside: set[int] = set()  # memory that the program must not write
        self._paused = False
        self.problem: str | None = None
        self.program: PassProgram | None = None

    def begin(self, inputs: Tensors, copies: Mapping[str, Tensor], constants: Mapping[str, Tensor]) -> None:
        """What the pass begins with: the batch, the parameters' copies, and what stands for frozen ones and buffers."""
        self._inputs, self._size = len(inputs), len(inputs[0])
        for tensor in inputs:
            self._number(tensor)
        self._copies = {name: self._number(tensor) for name, tensor in copies.items()}
        owned = self._snapshot.named
        self._constants = {self._number(tensor): owned[name] for name, tensor in constants.items()}
        self._buffers = set(self._constants) - {n for n, t in self._constants.items() if isinstance(t, nn.Parameter)}
        for tensor in self._snapshot.tensors:
            if self._known(tensor) is None and not tensor.requires_grad:
                self._constants[self._number(tensor)] = tensor
        before = *inputs, *copies.values(), *constants.values(), *self._constants.values()
        self._outside = {private.memory(t) for t in before}
        device = inputs[0].device.type
        self._autocast = device, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)

    def refuse(self, problem: str) -> None:
        """The pass goes on; there will be no program."""
        self.problem = self.problem or problem

    def _number(self, tensor: Tensor) -> int:
        number, self._count = self._count, self._count + 1
        self._numbers[id(tensor)] = number, weakref.ref(tensor)
        return number

    def _known(self, tensor: Tensor) -> int | None:
        number, reference = self._numbers.get(id(tensor), (None, None))
        return number if reference is not None and reference() is tensor else None

    def _known_number(self, tensor: Tensor) -> int:
        number = self._known(tensor)
        if number is None:
            raise NotRecorded("a tensor that no operation of the pass made")
        return number

    # -- what runs ---------------------------------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if not self._paused and self.problem is None:
            try:
                self._write(func, args, kwargs, result)
            except NotRecorded as error:
                self.refuse(str(error))
        return result

    def _write(self, func: Any, args: Any, kwargs: dict[str, Any], result: Any) -> None:
        if func.namespace != "aten" or not _REFUSED_TAGS.isdisjoint(func.tags):
            raise NotRecorded(f"{func} may depend on values")
        if not torch.is_grad_enabled():  # by the model, or in an autograd.Function of its own
            raise NotRecorded("gradients were disabled")
        known = self._known_number
        template, keywords = _said(args, known), {k: _said(v, known) for k, v in kwargs.items()}
        if func._schema.is_mutable:
            for argument, value in zip(func._schema.arguments, args, strict=False):
                written = argument.alias_info is not None and argument.alias_info.is_write
                if written and (not isinstance(value, Tensor) or private.memory(value) in self._outside):
                    raise NotRecorded(f"{func} writes what was there before the pass")
            if any(isinstance(v, Tensor) for v in kwargs.values()):
                raise NotRecorded(f"{func} writes into its arguments by name")
        made = [result] if isinstance(result, Tensor) else [] if result is None else list(result)
        self._nodes.append(_Operation(func, template, keywords, self._results(made), func, False))

    def rule(self, run: Callable[..., Any], books: "Books", tensors: Sequence[Tensor | None]) -> Any:
        """run(books, *tensors), which is one operation."""
        self._paused = True
        try:
            result = run(books, *tensors)
        finally:
            self._paused = False
        if self.problem is None:
            device, *now = self._autocast
            if now != [torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)]:
                self.refuse("autocast was changed by the model")
            elif not torch.is_grad_enabled():
                self.refuse("gradients were disabled")
            else:
                self._write_rule(run, tensors, result)
        return result

    def _write_rule(self, run: Any, tensors: Sequence[Tensor | None], result: Any) -> None:
        try:
            template = _said(tuple(tensors), self._known_number)
            cells = [cell.cell_contents for cell in run.__closure__ or ()]
            made = self._results([result] if isinstance(result, Tensor) else list(result))
        except NotRecorded as error:
            self.refuse(str(error))
            return
        self._nodes.append(_Operation(run, template, {}, made, (run.__code__, cells), True))

    def _results(self, tensors: list[Any]) -> tuple[int, ...]:
        numbers = []
        for tensor in tensors:
            if type(tensor) is not Tensor or tensor.layout is not torch.strided:
                raise NotRecorded("a result that is no ordinary tensor")
            # What is written in place is the tensor that it was.
            known = self._known(tensor)
            numbers.append(self._number(tensor) if known is None else known)
        return tuple(numbers)

    def see(self, function: Any, result: Any) -> None:
        """A function of torch that the model called: one that tells of values ends the recording."""
        if self.problem is None and not _has_tensor(result):
            name = getattr(function, "__name__", "")
            if name == "__get__":
                name = getattr(getattr(function, "__self__", None), "__name__", "")
            if name not in _ABOUT:
                self.refuse(f"{name} tells of values, or changes what is not a tensor")

    # -- the end -----------------------------------------------------------------------------------------------------

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Around the model's run."""
        guard = _Guard(self._snapshot, self)
        with self, guard:
            yield

    def end(self, differentiable: Tensors, others: Tensors, output: ModuleOutput) -> None:
        """What was written down becomes a program, if it can; the recorder holds no tensor of the pass after it."""
        try:
            if self.problem is None and not self._snapshot.holds():
                self.refuse("forward changed what it may read")
            if self.problem is None:
                outputs = tuple(map(self._known_number, differentiable)), tuple(map(self._known_number, others))
                self.program = PassProgram(
                    self._size, self._nodes, self._inputs, self._copies, self._constants, self._buffers, outputs,
                    output, self._autocast,
                )  # fmt: skip
        except NotRecorded as error:
            self.refuse(repr(error))
        finally:
            self._numbers, self._nodes, self._constants = {}, [], {}


def _has_tensor(value: Any) -> bool:
    if isinstance(value, (tuple, list)):
        return any(map(_has_tensor, value))
    return isinstance(value, Tensor)


# -- what a model can reach ------------------------------------------------------------------------------------------

_PLAIN = frozenset({
    type(None), bool, int, float, complex, str, bytes, range, slice, type(...), torch.dtype, torch.device, torch.layout,
    torch.memory_format, torch.Size, types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType,
    types.MemberDescriptorType, types.GetSetDescriptorType, property, staticmethod, classmethod,
    types.MethodWrapperType, types.ClassMethodDescriptorType,
})  # fmt: skip
_TENSORS = (Tensor, nn.Parameter, nn.Buffer) if hasattr(nn, "Buffer") else (Tensor, nn.Parameter)
_MOST = 50_000  # values in a snapshot
_TRUSTED = ("torch", "math", "typing", "collections", "functools", "itertools", "operator", "contextlib", "abc", "enum",
            "dataclasses", "numbers", "copy", "anyorder", "builtins", "types", "warnings", "inspect")  # fmt: skip
"""Packages whose functions depend on their arguments, and whose own state no forward changes."""


def _trusted(name: Any) -> bool:
    return isinstance(name, str) and name.partition(".")[0] in _TRUSTED


_FACTS = attrgetter("requires_grad", "dtype", "shape", "device")
_HELD_VALUES: Callable[[Any], Any] = methodcaller("values")


class Snapshot:
    """All that the code of a model can read by name, as it was; `holds` says whether it still is.

    Objects are compared by identity, and what can be changed in place is looked into. Numbers of a tensor are not
    looked at: programs read the tensors themselves.

    Attributes:
        named: the module's parameters and buffers by name.
        tensors: all that were found.

    Raises: NotRecorded for what cannot be looked into, and for modules with hooks of forward or backward.
    """

    def __init__(self, module: nn.Module) -> None:
        self.named: dict[str, Tensor] = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        self._seen: dict[int, Any] = {}
        self._held: list[Mapping[Any, Any]] = []  # each with as many keys, one behind the other, and values
        self._sizes, self._keys, self._values = list[int](), list[Any](), list[Any]()
        self._lists: list[tuple[Any, tuple[Any, ...]]] = []
        self._names: dict[tuple[int, str], tuple[Mapping[str, Any], str, Any]] = {}
        self._cells: list[tuple[Any, Any]] = []
        self._sets: list[tuple[Any, frozenset[Any]]] = []
        self.tensors: list[Tensor] = []
        self._own, self._outside = set(map(id, self.named.values())), list[Tensor]()  # those that the engine looks at
        self._facts: list[Any] = []
        self._strides: list[Any] = []
        self._empty: list[Any] = []
        self._objects: list[Any] = []
        self._types: list[type] = []
        for part in module.modules():
            if any(vars(part).get(name) for name in _HOOKS):
                raise NotRecorded("a module with hooks")
        self.add(module)

    def holds(self) -> bool:
        """Whether all is as it was."""
        if any(self._empty) or not all(map(is_, map(type, self._objects), self._types)):
            return False
        if list(map(len, self._held)) != self._sizes or list(chain.from_iterable(self._held)) != self._keys:
            return False
        if not all(map(is_, chain.from_iterable(map(_HELD_VALUES, self._held)), self._values)):
            return False
        for items, values in self._lists:
            if len(items) != len(values) or not all(map(is_, items, values)):
                return False
        for names, name, value in self._names.values():
            if names.get(name, self) is not value:
                return False
        for cell, value in self._cells:
            if cell.cell_contents is not value:
                return False
        for held, elements in self._sets:
            if held != elements:
                return False
        if list(map(_FACTS, self.tensors)) != self._facts or private.is_marked(*self._outside):
            return False
        return list(map(Tensor.stride, self.tensors)) == self._strides

    def name(self, names: Mapping[str, Any], name: str) -> None:
        """A name that a function reads."""
        if (id(names), name) not in self._names:
            value = names[name]
            self._names[id(names), name] = names, name, value
            self.add(value)

    def add(self, value: Any) -> None:
        """A value, and what can be reached from it."""
        kind = type(value)
        if kind in _PLAIN or id(value) in self._seen:
            return
        self._seen[id(value)] = value
        if len(self._seen) > _MOST:
            raise NotRecorded("a model that reaches too much")
        if kind in _TENSORS and not private.is_wrapped(value) and value.layout is torch.strided:
            self.tensors.append(value)
            self._outside += () if id(value) in self._own else (value,)
            self._facts.append(_FACTS(value))
            self._strides.append(value.stride())
        elif isinstance(value, Tensor):
            raise NotRecorded(f"a tensor of type {kind.__name__}")
        elif kind in (dict, OrderedDict, types.MappingProxyType):
            self._mapping(value)
        elif kind is list or kind is tuple:
            if kind is list:
                self._lists.append((value, tuple(value)))
            for one in value:
                self.add(one)
        elif kind in (set, frozenset):
            if not all(type(one) in _PLAIN for one in value):
                raise NotRecorded("a set of objects")
            if value:
                self._sets.append((value, frozenset(value)))
            else:
                self._empty.append(value)
        elif isinstance(value, type):
            self._class(value)
        elif kind is weakref.ReferenceType and isinstance(value(), Tensor):
            self.add(value())
        elif kind is types.ModuleType:
            pass  # what is read of it is seen by name
        else:
            self._object(value, kind)

    def _mapping(self, held: Mapping[Any, Any]) -> None:
        if not held and not isinstance(held, types.MappingProxyType):
            self._empty.append(held)
            return
        self._hold(held)
        for key, value in held.items():
            self.add(key)
            self.add(value)

    def _hold(self, held: Mapping[Any, Any]) -> None:
        self._held.append(held)
        self._sizes.append(len(held))
        self._keys += held
        self._values += held.values()

    def _class(self, value: type) -> None:
        """A class of the user's own: its functions and constants."""
        for one in value.__mro__[:-1]:
            if one in self._seen.values() and one is not value:
                continue
            self._seen[id(one)] = one
            held = vars(one)
            self._hold(held)
            if not _trusted(one.__module__):
                for name, member in held.items():
                    if not name.startswith("_abc"):
                        self.add(member)

    def _object(self, value: Any, kind: type) -> None:
        if kind is types.FunctionType:
            self.add(vars(value))
            for cell in value.__closure__ or ():
                try:
                    content = cell.cell_contents
                except ValueError:
                    raise NotRecorded("an empty cell") from None
                self._cells.append((cell, content))
                self.add(content)
            for one in (*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()):
                self.add(one)
        elif kind is types.MethodType:
            self.add(value.__self__)
            self.add(value.__func__)
        elif kind is functools.partial:
            for one in (value.func, value.args, value.keywords):
                self.add(one)
        elif hasattr(value, "__dict__") and not hasattr(kind, "__slots__"):
            if not isinstance(value, nn.Module) and (isinstance(value, (dict, list, set)) or _native(kind)):
                raise NotRecorded(f"an object of type {kind.__name__}")
            self._objects.append(value)
            self._types.append(kind)
            self._mapping(vars(value))
            self.add(kind)
        else:
            raise NotRecorded(f"an object of type {kind.__name__}")


def _native(kind: type) -> bool:
    """Whether objects of a class may hold what `vars` does not show."""
    return any(
        "__new__" in vars(one) and isinstance(vars(one)["__new__"], types.BuiltinFunctionType)
        for one in kind.__mro__[:-1]
    )


_HOOKS = tuple(name for name in vars(nn.Module()) if "hook" in name and "state_dict" not in name)

# -- what a model calls ----------------------------------------------------------------------------------------------

_STANDARD = sysconfig.get_paths()["stdlib"]
_BUILTINS = {
    "len", "isinstance", "issubclass", "getattr", "hasattr", "min", "max", "sum", "abs", "round", "sorted", "any",
    "all", "callable", "divmod", "pow", "iter", "next", "setattr", "__build_class__",
}  # fmt: skip
_OWNERS = (Tensor, str, tuple, list, dict, set, int, float, torch.Size, types.MappingProxyType)


class _Guard:
    """Looks at every call that Python makes during a capture.

    Functions that are neither torch's nor this package's have the names that they read put into the snapshot. A
    built-in function that they call must be known to depend on its arguments alone.
    """

    def __init__(self, snapshot: Snapshot, recorder: Recorder) -> None:
        self._snapshot, self._recorder = snapshot, recorder
        self._codes: dict[Any, bool] = {}

    def __enter__(self) -> None:
        self._drawn = _drawn_so_far()
        sys.setprofile(self._called)

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)
        if _drawn_so_far() != self._drawn:
            self._recorder.refuse("numbers were drawn outside of torch")

    def _called(self, frame: types.FrameType, event: str, argument: Any) -> None:
        recorder = self._recorder
        if recorder.problem is not None or recorder._paused:
            return
        try:
            if event == "call":
                self._function(frame)
            elif event == "c_call":
                self._builtin(frame, argument)
        except NotRecorded as error:
            recorder.refuse(str(error))
        except Exception as error:  # an object that does not tell of itself
            recorder.refuse(repr(error))

    def _is_own(self, frame: types.FrameType) -> bool:
        """Whether what runs is the user's, or a library's that is not known here."""
        own = self._codes.get(frame.f_code)
        if own is None:
            known = _trusted(frame.f_globals.get("__name__")) or _is_standard(frame.f_code)
            own = self._codes[frame.f_code] = not known
        return own

    def _function(self, frame: types.FrameType) -> None:
        code = frame.f_code
        if code in self._codes:
            return
        if not self._is_own(frame):
            caller, name = frame.f_back, frame.f_globals.get("__name__")
            if not _trusted(name) and caller is not None and self._is_own(caller):
                del self._codes[code]
                raise NotRecorded(f"{code.co_qualname} of {name}")
            return
        if code.co_freevars and not _is_nested(code, frame.f_back):
            for name in code.co_freevars:
                if name != "__class__":
                    raise NotRecorded(f"{code.co_qualname} reads {name} of the function around it")
        for name in _global_names(code):
            if name in frame.f_globals:
                self._snapshot.name(frame.f_globals, name)
                self._of_module(frame.f_globals[name], code)

    def _of_module(self, value: Any, code: types.CodeType) -> None:
        """Names that are read of a module."""
        if isinstance(value, types.ModuleType) and not _trusted(value.__name__):
            for name in code.co_names:
                if name in vars(value) and (id(vars(value)), name) not in self._snapshot._names:
                    self._snapshot.name(vars(value), name)
                    self._of_module(vars(value)[name], code)

    def _builtin(self, frame: types.FrameType, function: Any) -> None:
        owner = getattr(function, "__self__", None)
        if isinstance(owner, torch.Generator):
            raise NotRecorded("a generator was asked")
        if not self._is_own(frame):
            return
        module, name = getattr(function, "__module__", None) or "", getattr(function, "__name__", "")
        if owner is not None and not isinstance(owner, (types.ModuleType, type)):
            if isinstance(owner, _OWNERS) or module.startswith("torch"):
                return
            raise NotRecorded(f"{name} of a {type(owner).__name__}")
        if module == "builtins" and name not in _BUILTINS and not isinstance(owner, type):
            raise NotRecorded(f"the function {name}")
        if not module or module in ("builtins", "math", "_operator", "_functools", "itertools"):
            return
        if module.startswith("torch") and not name.startswith(("set", "_set", "get_rng", "seed", "manual", "initial")):
            return
        raise NotRecorded(f"the function {module}.{name}")


@functools.lru_cache(1024)
def _global_names(code: types.CodeType) -> frozenset[str]:
    """The global names that a function reads: an attribute of the same name is another thing."""
    return frozenset(i.argval for i in dis.get_instructions(code) if i.opname in ("LOAD_GLOBAL", "LOAD_NAME"))


def _is_standard(code: types.CodeType) -> bool:
    name = code.co_filename
    return name.startswith("<frozen") or (name.startswith(_STANDARD) and "site-packages" not in name)


def _drawn_so_far() -> Any:
    """The state of the generators of Python and NumPy that anybody can draw from."""
    state: Any = np.random.get_state()  # noqa: NPY002
    return random.getstate(), state[1].tobytes(), state[2:]


def _is_nested(code: types.CodeType, frame: types.FrameType | None) -> bool:
    """Whether a function was written in one that runs now: a comprehension, say."""
    while frame is not None:
        if code in frame.f_code.co_consts:
            return True
        frame = frame.f_back
    return False


# -- the programs of a model -----------------------------------------------------------------------------------------

_KINDS_OF_BATCHES = 8
_SIZES = 64  # of batches, for which a program of any size is kept ready
_CHANGES = 32  # of what a model reads, each after as few replayed batches, after which it is left alone
_TRIES = 3  # to record a kind of batches: a finalizer may run in between
_REFUSALS = 6


def key_of(arguments: Arguments) -> Any:
    """What a program depends on besides its model; None where there is to be none."""
    tensors = arguments.tensors
    facts = []
    for t in tensors:
        if type(t) is not Tensor or t.layout is not torch.strided or private.is_wrapped(t) or t.is_complex():
            return None
        facts.append((t.shape[1:], t.stride(), t.dtype, t.device))
    if len(tensors) > 1 and (len({id(t) for t in tensors}) < len(tensors) or len({f[3] for f in facts}) > 1):
        return None
    if private.function_modes() or private.dispatch_modes() or private.current_level() is not None:
        return None
    if torch.compiler.is_compiling() or any(private.HOOKS_OF_ALL_MODULES):
        return None
    device = tensors[0].device.type
    autocast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    return (
        *facts, arguments.words, autocast, torch.get_default_dtype(), torch.are_deterministic_algorithms_enabled(),
        torch.is_inference_mode_enabled(),
    )  # fmt: skip


class Programs:
    """The programs of one model, by the kinds of its batches.

    Args:
        module: the model.

    Attributes:
        refused: why the last recording gave no program.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._snapshot: Snapshot | None = None
        self._once: dict[Any, PassProgram] = {}
        self._twice: dict[Any, PassProgram] = {}
        self._without: Counter[Any] = Counter()
        self._changes = self._replayed = self._refusals = 0  # replayed: since the last change
        self._off = False
        self.refused: str | None = None

    def __len__(self) -> int:
        return len(self._twice)

    def find(self, key: Any, size: int) -> PassProgram | None:
        """The program of batches of a kind and size, if nothing changed."""
        if key is None or self._off:
            return None
        if self._snapshot is not None and not self._snapshot.holds():
            self._forget()
            self._changes = self._changes + 1 if self._replayed <= _CHANGES else 1  # rare ones are no reason
            self._off, self._replayed = self._changes > _CHANGES, 0
        program = self._twice.get(key)
        self._replayed += program is not None
        return None if program is None else program.sized(size)

    def recorder(self, key: Any) -> Recorder | None:
        """One for a batch of a kind that has no program, where there may be one; after `find`."""
        if key is None or self._off or self._without[key] >= _TRIES or sys.getprofile() is not None:
            return None
        if len(self._once.keys() | self._twice.keys() | {key}) > _KINDS_OF_BATCHES:
            return None
        if self._snapshot is None:
            try:
                self._snapshot = Snapshot(self._module)
            except NotRecorded as error:
                self._refuse(str(error))
                return None
        return Recorder(self._snapshot)

    def add(self, key: Any, recorder: Recorder) -> None:
        """What a recorder found."""
        program = recorder.program
        if program is None:
            self._without[key] += 1
            self._refuse(recorder.problem or "")
            return
        before = self._twice.get(key) or self._once.pop(key, None)
        joined = None if before is None else before.joined(program)
        if before is None:
            self._once[key] = program
        elif joined is not None:
            self._twice[key] = joined
        else:
            self._without[key] += 1
            self._refuse("two batches of a kind gave two lists")

    def drop(self) -> None:
        """Do without from here on."""
        self._forget()
        self._off = True

    def _refuse(self, problem: str) -> None:
        self.refused = problem
        self._refusals += 1
        if not self._twice:
            self._snapshot, self._once = None, {}
        if self._refusals >= _REFUSALS and not self._twice:
            self.drop()

    def _forget(self) -> None:
        self._snapshot, self._once, self._twice, self._without = None, {}, {}, Counter()
