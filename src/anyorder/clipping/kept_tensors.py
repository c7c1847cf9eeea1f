"""What a model keeps of one batch for the next, wherever it keeps it, is refused here: a list, a closure, a global.

Tensors of a pass are those of `torch.func` (their data are all examples', and can be read inside alone), so that what
is left of them when the next pass begins was kept by the model (`one_pass`). How a loss keeps rows apart: `coupling`.
"""

import functools
import gc
import sys
import weakref
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import is_dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence
from torch.overrides import TorchFunctionMode

from anyorder.clipping import torch_private as private
from anyorder.clipping.torch_private import pytree
from anyorder.errors import ModelError, TrainingError

# -- what a model keeps of a batch -----------------------------------------------------------------------------------

Made = list["weakref.ref[Tensor]"]
"""What functions made in a private model's pass, or in its last one; one list for each private model. Written to in
place: a call of Python's own for each function would cost time, and be compiled where the model is."""


def note(made: Made, *tensors: Tensor) -> None:
    """Remember tensors that no function of torch made."""
    made.extend(map(weakref.ref, tensors))


def check_own(types: Any, values: Iterable[Any]) -> None:
    """Refuse what the training loop has of a batch, in a function that a model calls: a global of both, perhaps.

    Also a tensor that numbers of a batch were written into, and that is none of the rows of this pass.
    """
    if not private.OF_A_BATCH_KINDS.isdisjoint(types) or any(map(_was_written, values)):
        raise ModelError(
            "the model reads a tensor of a batch that it was not given, which the training loop put into an attribute "
            "of it or a variable of both: it has numbers of all examples, and would let one move the gradients of "
            "others. Give the model one row for each example, as an argument; public numbers may stand anywhere"
        )


def _was_written(value: Any) -> bool:
    if isinstance(value, slice):
        value = value.start, value.stop, value.step
    if isinstance(value, (tuple, list)):
        return any(map(_was_written, value))
    if not isinstance(value, Tensor) or private.is_of_batch(value):
        return is_of_loop(value)
    while private.is_wrapped(value):  # by a transform within the model
        value = private.get_unwrapped(value)
    return is_of_loop(value) or private.is_marked(value)


class Witness(TorchFunctionMode):
    """Notes what every function makes."""

    def __init__(self, made: Made) -> None:
        super().__init__()
        self._made = made

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        check_own(types, (*args, *kwargs.values()))
        result = func(*args, **kwargs)
        for made in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(made, Tensor):
                self._made.append(weakref.ref(made))
        return result


def written_since() -> TrainingError:
    """What the backward pass reads is not what the forward pass made."""
    return TrainingError(
        "backward through the private model cannot run: a parameter, a tensor that the model was given or gave, or one "
        "of which the loss is made, was written in place since. Make a new tensor: x = x / 2 in place of x /= 2 or "
        "x.div_(2); and write into out.detach().clone(), for out.detach() shares the memory of out"
    )


@contextmanager
def one_pass(made: Made) -> Iterator[None]:
    """One run of a model on a batch, or on some of its examples.

    Args:
        made: what was made in the model's last run; what is made in this one goes there.
    Raises: ModelError if anything of an earlier one is still there.
    """
    if made:
        _refuse_what_is_kept(made)
    # What compiled parts would be compiled to is not used, and the compiler keeps tensors.
    eager = torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()
    before, private.here.in_pass = private.here.in_pass, True
    try:
        with eager, private.WithSubclasses():  # what the loop has of a batch is seen, also on the way back
            yield
    except BaseException:
        made.clear()  # the error's own frames hold them
        raise
    finally:
        private.here.in_pass = before


def _refuse_what_is_kept(made: Made) -> None:
    """What is left of an earlier pass, and held by Python."""
    if _left(made):
        gc.collect()  # what only a cycle holds, nobody can read
    made[:] = [one for one in _left(made) if _holders(one) > 0]
    if made:
        raise ModelError(
            "the model keeps tensors of an earlier batch, in a list, a closure or a global perhaps: a later batch "
            "would depend on those examples. Return them from forward, and keep nothing of a batch in training"
        )


def _left(made: Made) -> Made:
    return [one for one in made if (tensor := one()) is not None and private.is_of_batch(tensor)]


def _holders(made: "weakref.ref[Tensor]") -> int:
    """How often Python holds a tensor: torch's own graphs may too, where an operation in place made a cycle of them.

    By the count of references. To look for the holders (`gc.get_referrers`) hands out what other threads are making.
    """
    return _references(made) - _of_nobody()


def _references(made: "weakref.ref[Tensor]") -> int:
    tensor = made()
    if tensor is None:
        return 0
    private.held_by_python(tensor)
    by_torch = _torch_adds_one() and (private.use_count(tensor) or 0) > 1
    return sys.getrefcount(tensor) - by_torch


@functools.cache
def _torch_adds_one() -> bool:
    """Whether torch, where a graph holds a tensor, has a reference beside those of Python, as from 2.10 on."""
    with torch.inference_mode(False), torch.enable_grad():
        tensor, factor = torch.zeros(()), torch.zeros((), requires_grad=True)
        before = sys.getrefcount(tensor)
        product = factor * tensor
        return sys.getrefcount(tensor) > before and product.requires_grad and private.use_count(tensor) is not None


@functools.cache
def _of_nobody() -> int:
    """The references that `_references` makes while it counts: Python's releases differ in that."""
    held = [torch.zeros(())]
    return _references(weakref.ref(held[0])) - len(held)


SETTING = (type(None), bool, int, float, str)
_PLAIN = frozenset(SETTING)
_CONTAINERS = frozenset({tuple, list, set, dict, OrderedDict})
_DATACLASS = "say once that it is a container, torch.export.register_dataclass(its class), or give its tensors"


def check_argument(argument: Any, of: str = "the model") -> None:
    """A setting stands alone; a container holds tensors. A list of lengths would tell one example of the others."""
    if not isinstance(argument, Tensor) and is_of_loop(argument):
        raise ModelError(
            f"{of} was given a number that was taken out of the batch with item() or tolist(): it is of all examples, "
            "and would let one move the gradients of others. Give a public number, or a tensor with one row for each"
        )
    if isinstance(argument, (Tensor, *SETTING)):
        return
    if isinstance(argument, PackedSequence):
        raise ModelError(
            f"{of} was given a packed sequence, which joins the examples: give it the padded tensor, and the lengths "
            "as a tensor. Recurrent layers run on the padded tensor; the last state is that at the place lengths - 1"
        )
    leaves = pytree.tree_leaves(argument)
    strange = next((leaf for leaf in leaves if leaf is not None and not isinstance(leaf, Tensor)), None)
    if strange is not None:
        raise ModelError(
            f"the arguments of {of} must be tensors (or containers of tensors) that can be split by example, and "
            f"settings None, bool, int, float, str outside containers; got a {type(strange).__name__}"
            f"{'' if strange is argument else f' inside a {type(argument).__name__}'}: "
            f"{_DATACLASS if is_dataclass(strange) else 'make it a tensor with one row for each example'}"
        )


def check_nothing_kept(module: nn.Module, of: str = "the model") -> None:
    """Refuse a module that keeps tensors of this batch: in the next, they would let its units move other units."""
    for name, part in module.named_modules():
        for attribute, value in vars(part).items():
            kind = type(value)
            if kind in _PLAIN or (kind in _CONTAINERS and not value) or attribute == "_modules":
                continue  # most attributes, and the modules, whose turn comes
            _check_not_of_loop(value, name or f"{of} itself", part, attribute)
            if _is_of_batch(value):
                raise ModelError(
                    f"{name or f'{of} itself'} ({type(part).__name__}) keeps a tensor of the batch in its "
                    f"attribute {attribute!r}: a later batch would depend on these examples. Return it from forward, "
                    "or do not store it in training"
                )


def check_nothing_of_loop(module: nn.Module) -> None:
    """Refuse a module that has tensors of the loop, where its forward did not come to an end, or is not run again."""
    for name, part in module.named_modules():
        for attribute, value in vars(part).items():
            _check_not_of_loop(value, name or "the model itself", part, attribute)


def _check_not_of_loop(value: Any, name: str, part: nn.Module, attribute: str) -> None:
    held = value.values() if attribute in ("_buffers", "_parameters") else (value,)
    if any(is_of_loop(one) or private.is_marked(one) for one in held):
        raise ModelError(
            f"the loop put something of a batch into {name} ({type(part).__name__}), as {attribute.removeprefix('_')}: "
            "every example would see what all have in it. Normalise by public numbers, and keep what is measured of "
            "batches out of the private model"
        )


def is_of_loop(value: Any) -> bool:
    """Whether it is a tensor or number of a batch as the training loop has it; see `coupling`."""
    return type(value) in private.OF_A_BATCH_KINDS


def _is_of_batch(value: Any) -> bool:
    """Whether a value is, or holds, a tensor that was mapped."""
    kind = type(value)
    if kind in _PLAIN:
        return False
    if isinstance(value, Tensor):
        return private.is_of_batch(value)
    if kind in _CONTAINERS:
        return any(map(_is_of_batch, value.values() if isinstance(value, dict) else value))
    leaves = pytree.tree_leaves(value)
    return any(isinstance(x, Tensor) and private.is_of_batch(x) for x in leaves)
