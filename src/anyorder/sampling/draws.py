"""Random draws of data and model: the generators that they come from are set from the run's key, place by place.

A step's sum is a sum over units u of v_u(data of u, R_u), each of norm at most clip_norm, where R_u is what was drawn
for u: a crop, a mask of tokens, a mask of dropout. The claim needs that R_u does not depend on other units' data. One
generator for all would break it: how many numbers one unit draws moves all draws after it, in this step and in all
later ones, and where its seed is public, everybody can tell. Here every draw has an address:

    an example       (run key, batch, index)          fetched under generators that are set for it alone
    a collation      (run key, batch, call)           of each example, where it is called on each alone
    a forward pass   (run key, step, micro-batch)     with what backward draws

and generators are set to `Seeds.at(address)` there, whatever was drawn before: torch's, NumPy's and Python's own, and
those that data set and collation keep (`held_generators`); but where the code of a data set is known to draw nothing
(`may_draw`, `reads_only`), so that no generator's state can matter.

Proof. An example's draws are a function of its address and of its own data, so R_u is the same for D and for D' where
they differ in another unit, in this step and in every other: replacing one unit moves v_u alone. So it is with the
collation of each example alone. A forward pass, or the collation of a whole batch, draws for all rows at once. How
many numbers it takes follows from shapes: where these stay, so does every R_u, whoever knows the key. With `pad_to=`
the shapes that a model sees stay too, where it draws on a CPU (`shapes.ByShape`). Where one unit changes them after all
(rows of one length at a time on another device, more rows of one user, secret batches), the R_u of others are other
numbers of the same law, drawn under a secret key and independent of D. The law of (R_u) of the others is then that of
D' too: for each value of it the claim holds with these draws fixed, hence for their mixture (joint convexity of
hockey-stick divergences). No later step can tell: its generators are set again. After each batch and each pass the
process's generators are put back as the user had them, so that nothing private has moved them, and what is drawn
between the steps is the user's own, from the user's own seed.

"Of the same law" needs that nobody can try all seeds: under one of 32 bits, which is what torch's own `manual_seed`
takes on a CPU, 2^32 sums for D and as many for D' are a finite list, and the step lies near one of them. So whole
states are set: 256 bits of the key's own stream lead to all 19 968 of torch's, NumPy's and Python's generators, and 64
to a GPU's, which has no more. On Intel's CPUs torch draws a mask of dropout under 31 bits of these, whatever the state:
that is why a CPU's masks keep their places where they can.

Not seen: generators that no attribute, closure or global name of data set and collation leads to (a local variable of
a stream's own `__iter__`, an object of a C extension), one that is made after a process's first batch, in that batch,
what of a library reads a generator's state and leaves it as it was in a data set that fetches several at once (the
user's own code that does is found by the names that it reads), and what the training loop draws between batch and step.
"""

import ctypes
import dis
import gc
import logging
import random
import sys
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sized
from contextlib import AbstractContextManager, contextmanager, suppress
from contextvars import ContextVar
from functools import _lru_cache_wrapper, lru_cache, partial
from hashlib import blake2b, shake_128
from itertools import islice, repeat
from types import BuiltinMethodType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any, cast

import numpy as np
import torch
from torch import nn
from torch.quasirandom import SobolEngine
from torch.utils import _pytree as pytree
from torch.utils import data
from torch.utils.data import DataLoader, Dataset, IterableDataset, IterDataPipe, Subset, TensorDataset, get_worker_info

from anyorder.checks import final, is_of
from anyorder.errors import LoaderError
from anyorder.sampling.shapes import CollateAny, default_collate_stacks

Generator = (
    torch.Generator | random.Random | np.random.RandomState | np.random.Generator | np.random.SeedSequence | SobolEngine
)
"""What numbers, or the seeds of others, are drawn from; each kind is saved and set in its own way."""

_PYTHON: Any = cast(Any, random.seed).__self__
_NUMPY = cast(np.random.RandomState, cast(Any, np.random.rand).__self__)
_BYTES = 32  # of a seed


@final
class Seeds:
    """Seeds of 256 bits: a pure function of a key and an address, and unrelated to each other without the key.

    The key has 32 bytes, derived from the run's for this purpose: it is handed to worker processes.
    """

    def __init__(self, key: bytes) -> None:
        self._key = key

    def at(self, *address: Any) -> int:
        """The seed of an address: words, integers, tuples of them."""
        digest = blake2b(repr(address).encode(), digest_size=_BYTES, key=self._key).digest()
        return int.from_bytes(digest, "little")


@contextmanager
def alone(seed: int, held: Iterable[Generator] = (), *, numpy: bool = True) -> Iterator[None]:
    """What is drawn inside comes from `seed`, of `Seeds.at`; afterwards all generators are as they were.

    They are those of the process, without NumPy's and Python's where torch alone is known to be drawn from, and `held`.
    Cost: 30 microseconds, or 11 without NumPy's and Python's; 60 more where the user drew from NumPy's before.
    """
    generators = [*process_generators(numpy), *held]
    put_back = [_saved(generator) for generator in generators]
    try:
        reseed(generators, seed)
        yield
    finally:
        for restore in put_back:
            restore()


def process_generators(numpy: bool = True) -> list[Generator]:
    """Those that a process draws from where none is named: torch's of each device in use, Python's and NumPy's."""
    found: list[Generator] = [torch.default_generator]
    if numpy:
        found += [_PYTHON, _NUMPY]
    for device in (torch.cuda, torch.xpu):
        if device.is_initialized():
            found += device.default_generators
    return found


def reseed(generators: Iterable[Generator], seed: int) -> None:
    """Set generators to a seed, each to another one near it. Cost: 5 to 10 microseconds each."""
    for number, generator in enumerate(generators, seed):
        if isinstance(generator, torch.Generator):
            if generator.device.type == "cpu":
                generator.set_state(_state_of(number))
            else:
                generator.manual_seed(number % 2**64)  # all that it takes
        elif isinstance(generator, random.Random):
            generator.seed(number)
        elif isinstance(generator, np.random.SeedSequence):
            _count_children(generator, number % 2**31)
        elif isinstance(generator, SobolEngine):  # points are those of its sequence, moved by a random one
            moved = np.random.default_rng(number).integers(2**generator.MAXBIT, size=generator.dimension)
            generator.quasi, generator.num_generated = torch.from_numpy(moved), 1
        elif isinstance(generator, np.random.RandomState):
            _reseed_legacy(generator, number)
            if generator is _NUMPY:
                _of_numpy.seeded = _of_numpy.words()
        else:
            bits: Any = generator.bit_generator
            bits.__setstate__(type(bits)(number).__getstate__())  # with the seed that children are spawned from


_FRESH = torch.Generator().manual_seed(0).get_state().numpy().view(np.uint64)
"""The seed, two words of places, the 624 words of the generator in 8 bytes each, and no number that is left."""


def _state_of(seed: int) -> torch.Tensor:
    """The state of a generator on the CPU that nothing was drawn from: of `manual_seed`, of more than its 32 bits."""
    state = _FRESH.copy()
    stream = shake_128(seed.to_bytes(_BYTES + 1, "little")).digest(624 * 4)
    state[3:627] = np.frombuffer(stream, np.uint32)
    state[0] = seed % 2**64  # what torch.initial_seed() says
    return torch.from_numpy(state.view(np.uint8))


def _reseed_legacy(generator: np.random.RandomState, seed: int) -> None:
    try:
        generator.seed(np.frombuffer(seed.to_bytes(_BYTES + 4, "little"), np.uint32))
    except TypeError:  # it can seed no other kind of bits than its first
        state = generator.get_state(legacy=False)
        fresh = getattr(np.random, state["bit_generator"])(seed).state
        generator.set_state({**fresh, "has_gauss": 0, "gauss": 0.0})


def _count_children(sequence: np.random.SeedSequence, spawned: int) -> None:
    cast(Any, sequence).__init__(**cast(Any, sequence).state | {"n_children_spawned": spawned})


def _saved(generator: Generator) -> Callable[[], object]:
    """What puts a generator back as it is now."""
    if generator is _PYTHON and _PYTHON_WORDS is not None:
        return partial(_put_python_back, _PYTHON_WORDS.raw, generator.gauss_next)
    if generator is _NUMPY:
        return _of_numpy.saved()
    match generator:
        case torch.Generator():
            return partial(generator.set_state, generator.get_state())
        case random.Random():
            return partial(generator.setstate, generator.getstate())
        case np.random.RandomState():
            return partial(generator.set_state, generator.get_state(legacy=False))
        case np.random.Generator():
            bits: Any = generator.bit_generator
            return partial(bits.__setstate__, bits.__getstate__())
        case np.random.SeedSequence():
            return partial(_count_children, generator, generator.n_children_spawned)
        case SobolEngine():
            return partial(vars(generator).update, dict(vars(generator)))


# The states of the process's own generators are taken and put back, and looked at, several times a batch. By their own
# methods that is 20 to 30 microseconds each; their memory is copied in a tenth of one.

_TWISTER = 625 * 4  # bytes of a Mersenne Twister: 624 words and a place


def _python_words() -> Any:
    """The memory of Python's generator; None where a fresh one shows that it is laid out in another way."""
    parent: Any = random.Random.__mro__[1]
    if sys.implementation.name != "cpython" or parent.__basicsize__ < object.__basicsize__ + _TWISTER:
        return None
    kind = ctypes.c_char * _TWISTER
    trial = random.Random(1)
    for _ in range(3):
        trial.random()
        *words, place = trial.getstate()[1]
        found = np.frombuffer(kind.from_address(id(trial) + object.__basicsize__).raw, np.uint32).tolist()
        if found != [place, *words]:
            return None
    return kind.from_address(id(_PYTHON) + object.__basicsize__)


_PYTHON_WORDS = _python_words()


def _put_python_back(words: bytes, gauss: Any) -> None:
    _PYTHON_WORDS.raw = words
    _PYTHON.gauss_next = gauss


class _OfNumpy:
    """NumPy's own generator. Besides its words it may keep one normal number, of the two that it makes at a time.

    Seeding leaves none, and one is made of further words: while the words are those of a seeding, or of a saved state
    that had none, there is none.
    """

    def __init__(self) -> None:
        self.seeded = b""  # the words that the last seeding made
        self._kept: tuple[bytes, Any] = b"", None  # words, and the whole state, which has no number besides
        self._bits: Any = None
        self._memory: Any = None

    def words(self) -> bytes:
        """The words now; empty where they are not known to be of a Mersenne Twister."""
        bits = getattr(_NUMPY, "_bit_generator", None)
        if bits is not self._bits:
            self._bits, self._kept, self._memory = bits, (b"", None), None
            if type(bits) is np.random.MT19937:
                memory = (ctypes.c_char * _TWISTER).from_address(bits.ctypes.state_address)
                state: Any = bits.state["state"]
                if np.frombuffer(memory.raw, np.uint32).tolist() == [*state["key"].tolist(), state["pos"]]:
                    self._memory = memory
        return b"" if self._memory is None else self._memory.raw

    def saved(self) -> Callable[[], object]:
        """What puts it back as it is now."""
        words = self.words()
        if not words or words != self._kept[0]:
            state: Any = _NUMPY.get_state(legacy=False)
            if not words or state["has_gauss"]:
                return partial(_NUMPY.set_state, state)
            self._kept = words, state
        return partial(self._put_back, *self._kept)

    def _put_back(self, words: bytes, state: Any) -> None:
        if words and self.words() == self.seeded:  # nothing was drawn
            with self._bits.lock:
                self._memory.raw = words
        else:
            _NUMPY.set_state(state)


_of_numpy = _OfNumpy()


# ----------------------------------------------------------------------------------------------------
# Generators that data sets and collations keep.


_MOST = 2048  # objects that are looked at, nearest first
_WIDE = 64  # parts of a container that are looked at: lists of transforms are short, lists of examples long
_ALIKE = 4  # of a longer one, but for generators: what its parts share, each of them leads to
_PACKAGES = frozenset({"anyorder", "builtins", "collections", "datasets", "numpy", "torch", "transformers", "typing"})
_LEAVES = (
    str, bytes, bytearray, int, float, complex, type(None), type, ModuleType, torch.Tensor, torch.dtype, torch.device,
    np.ndarray, np.generic, random.SystemRandom, logging.Logger,
)  # fmt: skip


def held_generators(*owners: Any) -> list[Generator]:
    """The generators that these objects lead to, besides those of the process.

    By attributes, slots, containers, closures, partial applications, bound methods, caches, context variables,
    iterators, and the global names that functions read, with what they read of modules and classes of these names:
    those of the objects' classes too, but not of large packages, whose objects keep generators in attributes.
    Nearest first, and no further than some thousand objects. Cost: some 50 microseconds for a data set of one's own.
    """
    own = {id(generator) for generator in process_generators()}
    found = [(one, kind) for one, kind in _reached(owners, own) if kind is not None]
    return [one if kind is Generator else np.random.Generator(one) for one, kind in found]


def _all_generators(owner: Any) -> list[Generator]:
    return [*process_generators(), *held_generators(owner)]


def _reached(owners: Iterable[Any], seen: set[int]) -> Iterator[tuple[Any, Any]]:
    """(an object, its `_kind`) that these lead to, nearest first, until `seen`, which has their ids, has too many."""
    waiting = deque(owners)
    while waiting and len(seen) < _MOST:
        one = waiting.popleft()
        of: Any = type(one)
        kind = _kind(of)
        if kind is _LEAVES or id(one) in seen:
            continue
        seen.add(id(one))
        yield one, kind
        if kind is None:
            waiting += _parts(one)


@lru_cache(maxsize=1024)
def _kind(kind: type) -> Any:
    """Whether objects of a type lead nowhere, are generators, or what one of NumPy's is made of; else None."""
    others = (_LEAVES, Generator, np.random.BitGenerator)
    return next((other for other in others if issubclass(kind, other)), None)


_OF_STATES = frozenset({
    "bit_generator", "deepcopy", "fork_rng", "get_rng_state", "get_rng_state_all", "get_state", "getstate",
    "initial_seed", "seed_seq", "spawn",
})  # fmt: skip


def reads_states(*owners: Any) -> bool:
    """Whether code that these objects lead to may read a generator's state and leave it as it was: by its names.

    What it gets is then that of others fetched under one state, and is another where they are fetched alone.
    """
    seen = set[int]()
    for one, _ in _reached(owners, seen):
        own = isinstance(one, FunctionType) and not is_of_library(one.__module__)
        if own and not _OF_STATES.isdisjoint(_global_names(one.__code__)):
            return True
    return len(seen) >= _MOST


def _parts(one: Any) -> Iterable[Any]:
    """What an object leads to."""
    kind: Any = type(one)
    if kind in (dict, OrderedDict, defaultdict):
        return _first(one.values())
    if kind in (list, tuple, set, frozenset, deque):
        return _first(one)
    if kind is FunctionType:
        return () if is_of_library(one.__module__) else _of_function(one)
    if kind in (MethodType, classmethod, staticmethod):
        owner: Any = getattr(one, "__self__", None)
        of_class = [part for k in _classes(owner)[0] for part in vars(k).values()] if isinstance(owner, type) else []
        return owner, one.__func__, *of_class
    if kind is BuiltinMethodType:
        return (one.__self__,)
    if kind is partial:
        return one.func, *one.args, *one.keywords.values()
    if kind is property:
        return (one.fget,)
    own, slots, is_inside = _classes(kind)
    if is_inside and not is_of_library(getattr(one, "__module__", "")):
        kept = one.get(None) if kind is ContextVar else getattr(one, "__wrapped__", None)
        return kept, *_first(gc.get_referents(one))
    if hasattr(kind, "create_rng") and getattr(one, "generator", ...) is None is not getattr(one, "seed", None):
        one.create_rng()  # a collator of Hugging Face would make its generator in its first call, under its own seed
    of_classes = [part for k in own for part in vars(k).values()]
    of_slots = [getattr(one, name) for name in slots if hasattr(one, name)]
    return *getattr(one, "__dict__", {}).values(), *of_slots, *of_classes


@lru_cache(maxsize=1024)
def _classes(kind: type) -> tuple[list[type], list[str], bool]:
    """Those whose members an object of a class leads to, the names of its slots, and whether C keeps its parts."""
    is_inside = kind in (ContextVar, _lru_cache_wrapper)
    is_inside |= kind.__module__ in ("builtins", "itertools") and hasattr(kind, "__next__")
    own = [k for k in kind.__mro__ if not is_of_library(k.__module__)]
    slots = [vars(k).get("__slots__", ()) for k in kind.__mro__]
    return own, [name for each in slots for name in ((each,) if isinstance(each, str) else each)], is_inside


def _first(parts: Collection[Any]) -> list[Any]:
    """The parts of a container that are looked at; of many examples few, lest they hide the transforms behind them."""
    found = list(islice(parts, _WIDE))
    if len(parts) > _WIDE:
        drawn = [part for part in found[_ALIKE:] if isinstance(part, Generator)]
        found = found[:_ALIKE] + [part for part in drawn if not isinstance(part, np.random.SeedSequence)]
    return found


def is_of_library(module: Any) -> bool:
    """Whether the module of this name is of a large package, whose code keeps what it keeps in attributes."""
    return str(module).partition(".")[0] in _PACKAGES


def _of_function(function: FunctionType) -> list[Any]:
    """What a function closes over, its defaults, and the values of the global names that it reads."""
    found = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    for cell in function.__closure__ or ():
        with suppress(ValueError):  # nothing is in it yet
            found.append(cell.cell_contents)
    namespace, names = function.__globals__, _global_names(function.__code__)
    found += [namespace[name] for name in names if name in namespace]
    imported = [sys.modules[name] for name in names if name in sys.modules]  # perhaps by the function itself
    if not (found or imported):
        return found
    return [*found, *_read_of([*found, *imported], names)]


def _read_of(owners: Iterable[Any], names: tuple[str, ...]) -> Iterator[Any]:
    """What the modules and classes among these have under the names, and what modules and classes there have."""
    waiting, seen = deque(owners), set[int]()
    while waiting:
        one = waiting.popleft()
        if not isinstance(one, (ModuleType, type)) or id(one) in seen:
            continue
        seen.add(id(one))
        own = [one] if isinstance(one, ModuleType) else [kind for kind in one.__mro__ if kind.__module__ != "builtins"]
        if is_of_library(one.__name__ if isinstance(one, ModuleType) else one.__module__):
            continue
        parts = [vars(each)[name] for each in own for name in names if name in vars(each)]
        yield from parts
        waiting += parts


@lru_cache(maxsize=1024)
def _global_names(code: CodeType) -> tuple[str, ...]:
    inner = [name for part in code.co_consts if isinstance(part, CodeType) for name in _global_names(part)]
    return (*code.co_names, *inner)


# ----------------------------------------------------------------------------------------------------
# Loaders: data sets and collations that run under generators of their own, in whatever process.


@final
class BatchIndices(list[int]):
    """The indices of a batch, with the batch's position, which so comes to the process that fetches it."""

    def __init__(self, indices: Iterable[int], position: int) -> None:
        super().__init__(indices)
        self.position = position

    def __reduce__(self) -> Any:
        return BatchIndices, (list(self), self.position)


@final
class FetchPlace:
    """What a process fetches: data set and collation of one loader share it, and so the second knows the batch.

    Attributes:
        start: the batch that the next iteration begins with, which the loader tells.
        batch: the address of the batch that was fetched last; another object for each fetch.
        generators: all that data set and collation may draw from, where the loader looked for them just now.
        is_still: whether the loader found just now, in this process, that the batch which comes next draws nothing.
    """

    def __init__(self) -> None:
        self.start = 0
        self.batch: tuple[Any, ...] = ()
        self.generators: list[Generator] = []
        self.is_still = False


def seeded_parts(loader: DataLoader[Any], seeds: Seeds, place: FetchPlace) -> dict[str, Any]:
    """The arguments of a DataLoader that let its data set and collation draw by address; none where neither draws."""
    dataset, collate = loader.dataset, loader.collate_fn
    if not (may_draw(dataset) or collation_may_draw(collate)):
        return {}
    if isinstance(dataset, IterableDataset):
        given: Any = SeededStream(dataset, seeds, place, loader.batch_size or 1)
        given = SeededPipe(given) if isinstance(dataset, IterDataPipe) else given
    else:
        given = SeededDataset(dataset, seeds, place)
    return {
        "dataset": given,
        "collate_fn": SeededCollation(collate, seeds, place) if collation_may_draw(collate) else collate,
        "worker_init_fn": SeededWorker(loader.worker_init_fn),
    }


def user_dataset(dataset: Any) -> Any:
    """The user's data set, of one that is given to a DataLoader here."""
    if isinstance(dataset, SeededPipe):
        dataset = dataset.stream
    return dataset.dataset if isinstance(dataset, (SeededDataset, SeededStream)) else dataset


def may_draw(dataset: Any) -> bool:
    """Whether reading a data set may draw numbers: False for exact classes whose code is known not to."""
    kind = type(dataset)
    if kind is Subset:
        return may_draw(dataset.dataset)
    if kind in (data.ConcatDataset, data.StackDataset):
        parts = dataset.datasets
        return any(map(may_draw, parts.values() if isinstance(parts, dict) else parts))
    if is_of(dataset, "datasets.arrow_dataset", "Dataset"):
        return bool(dataset.format["type"] == "custom")
    return kind not in (TensorDataset, list, tuple, range, np.ndarray, torch.Tensor)


# Reading a data set of one's own draws nothing where its code is of indices, arithmetic and a few methods, and all that
# it reads are tensors, arrays and numbers, whose own code is torch's and NumPy's. Asked at each batch: attributes and
# methods may be others by then.

_OPERATIONS = frozenset({
    "RESUME", "NOP", "POP_TOP", "COPY", "SWAP", "CACHE", "PUSH_NULL", "PRECALL", "CALL", "LOAD_FAST", "STORE_FAST",
    "LOAD_CONST", "LOAD_ATTR", "LOAD_METHOD", "LOAD_GLOBAL", "BINARY_OP", "BINARY_SUBSCR", "BINARY_SLICE",
    "BUILD_SLICE", "BUILD_TUPLE", "BUILD_LIST", "BUILD_MAP", "BUILD_CONST_KEY_MAP", "RETURN_VALUE", "RETURN_CONST",
    "IS_OP", "COMPARE_OP", "JUMP_FORWARD", "POP_JUMP_FORWARD_IF_FALSE", "POP_JUMP_FORWARD_IF_TRUE",
    "POP_JUMP_FORWARD_IF_NONE", "POP_JUMP_FORWARD_IF_NOT_NONE", "POP_JUMP_IF_FALSE", "POP_JUMP_IF_TRUE",
    "POP_JUMP_IF_NONE", "POP_JUMP_IF_NOT_NONE",
})  # fmt: skip
_METHODS = frozenset({
    "astype", "bool", "clone", "contiguous", "copy", "double", "flatten", "float", "half", "int", "item", "long", "mT",
    "numpy", "permute", "reshape", "shape", "squeeze", "T", "tolist", "transpose", "unsqueeze", "view",
})  # fmt: skip
_NUMBERS = (int, float, bool, str, bytes, type(None), torch.Tensor, np.ndarray)
_NOTHING: dict[str, Any] = {}


def reads_only(dataset: Any) -> bool:
    """Whether the code by which a data set of one's own gives examples is known to draw nothing."""
    kind: Any = type(dataset)
    if kind is Subset and type(dataset.indices) in (list, tuple, range):
        return reads_only(dataset.dataset)
    own = getattr(dataset, "__dict__", _NOTHING)
    if kind.__getattribute__ is not object.__getattribute__ or hasattr(kind, "__getattr__"):
        return False  # what wraps another may give methods of that one, `__getitems__` too
    for name in ("__getitem__", "__getitems__"):
        function: Any = next((vars(k)[name] for k in kind.__mro__ if name in vars(k)), None)
        if function is None and name == "__getitems__":
            return name not in own
        if name in own or type(function) is not FunctionType or "len" in function.__globals__:
            return False
        names = _attributes(function.__code__)
        if names is None or not all(vars(k).keys().isdisjoint(names) for k in kind.__mro__):
            return False
        for value in map(own.get, names, repeat(_NOTHING)):
            if type(value) not in _NUMBERS or (type(value) is np.ndarray and value.dtype.hasobject):
                return False
            if type(value) is torch.Tensor and vars(value):  # perhaps another `float` than torch's
                return False
    return True


@lru_cache(maxsize=1024)
def _attributes(code: CodeType) -> tuple[str, ...] | None:
    """The attributes of its object that a method (self, index) reads; None where it may do more than that."""
    found, own, before = [], (*code.co_varnames, "")[0], ""
    for step in dis.get_instructions(code):
        name, value = step.opname, step.argval
        if before == "self":
            if name != "LOAD_ATTR" or step.is_jump_target:
                return None
            found.append(value)
        elif name in ("LOAD_ATTR", "LOAD_METHOD") and value not in _METHODS:
            return None
        if name not in _OPERATIONS or (name, value) == ("STORE_FAST", own):
            return None
        if name == "LOAD_GLOBAL" and value != "len":
            return None
        before = "self" if name == "LOAD_FAST" and value == own else name
    return tuple(found) if code.co_argcount == 2 and not code.co_kwonlyargcount else None


def hands_on(collate: Any) -> bool:
    """Whether a collation is a function that returns what it is given."""
    return type(collate) is FunctionType and _returns_argument(collate.__code__)


@lru_cache(maxsize=1024)
def _returns_argument(code: CodeType) -> bool:
    return [step.opname for step in dis.get_instructions(code)] == ["RESUME", "LOAD_FAST", "RETURN_VALUE"]


def fetches_many(dataset: Any) -> bool:
    """Whether code of the user's gives the examples of a batch at once: perhaps not as a list, of which each is one."""
    if type(dataset) is Subset:
        return fetches_many(dataset.dataset)
    own = type(dataset) is not data.StackDataset and not is_of(dataset, "datasets.arrow_dataset", "Dataset")
    return own and hasattr(dataset, "__getitems__")


def collation_may_draw(collate: Any) -> bool:
    """Whether a collation may draw numbers."""
    collate = collate.collate if isinstance(collate, CollateAny) else collate
    if collate in (data.default_collate, data.default_convert):
        return collate is data.default_collate and not default_collate_stacks()
    return not is_of(collate, "transformers.data.data_collator", "DataCollatorWithPadding")


@final
class SeededDataset(Dataset[Any]):
    """A map-style data set, each example of which is fetched under the generators of (batch, index).

    A data set that fetches several at once (`__getitems__`, or a list of indices where the loader collates nothing) is
    asked for all of a batch, unless its code reads states of generators. If it draws on the way, it is asked again, and
    from then on, for one at a time: an example that draws is so always fetched alone, and one that does not is the same
    either way.
    """

    def __init__(self, dataset: Any, seeds: Seeds, place: FetchPlace) -> None:
        self.dataset, self._seeds, self._place = dataset, seeds, place
        self._draws = may_draw(dataset)
        self._one_by_one = self._draws and reads_states(dataset)
        self._looked = False  # whether a batch was fetched, by which generators are made that are made when needed

    def __getitems__(self, indices: BatchIndices) -> Any:
        """The examples of a batch that the loader collates: a list, or what the data set makes of several indices."""
        dataset = self.dataset
        fetch = getattr(dataset, "__getitems__", None)
        if fetch is None:
            return list(self._each(indices, dataset.__getitem__))
        found = self._at_once(indices, fetch)
        return found if found is not None else _joined(self._each(indices, lambda index: fetch([index])))

    def __getitem__(self, indices: BatchIndices) -> Any:
        """A batch that the data set makes of a list of indices."""
        found = self._at_once(indices, self.dataset.__getitem__)
        return found if found is not None else _joined(self._each(indices, lambda index: self.dataset[[index]]))

    def _at_once(self, indices: BatchIndices, fetch: Callable[[list[int]], Any]) -> Any:
        """All examples of a batch; None where what fetches them draws."""
        self._place.batch = (indices.position,)
        if not self._draws or self._place.is_still or reads_only(self.dataset):
            return fetch(list(indices))
        if self._one_by_one:
            return None
        generators = (self._looked and self._place.generators) or _all_generators(self.dataset)
        before = list(map(_state, generators))
        found = fetch(list(indices))
        after = generators if self._looked else _all_generators(self.dataset)
        self._looked, self._one_by_one = True, before != list(map(_state, after))
        return None if self._one_by_one else found

    def _each(self, indices: BatchIndices, fetch: Callable[[Any], Any]) -> Iterator[Any]:
        """Each example alone."""
        self._place.batch = (indices.position,)
        draws = self._draws and not reads_only(self.dataset)
        generators = _all_generators(self.dataset) if draws else []
        for index in indices:
            if draws:
                reseed(generators, seed := self._seeds.at("example", indices.position, index))
            example = fetch(index)
            if draws and not self._looked and len(found := _all_generators(self.dataset)) > len(generators):
                reseed(generators := found, seed)  # it has made one, such as a cache's, and is fetched again under it
                example = fetch(index)
            yield example
        if draws and not self._looked:
            self._looked = True
            reseed(generators, self._seeds.at("looked", indices.position))  # nothing saved those that were made

    def __len__(self) -> int:
        return len(self.dataset)


def _state(generator: Generator) -> Any:
    """The state of a generator, to be compared."""
    if generator is _NUMPY and (words := _of_numpy.words()) and words == _of_numpy.seeded:
        return words
    if generator is _PYTHON and _PYTHON_WORDS is not None:
        return _PYTHON_WORDS.raw, generator.gauss_next
    match generator:
        case torch.Generator():
            return generator.get_state().numpy().tobytes()
        case random.Random():
            return generator.getstate()
        case np.random.RandomState():
            kind, *parts = generator.get_state()
            return kind, *(np.asarray(part).tobytes() for part in parts)
        case np.random.Generator():
            return repr(cast(Any, generator.bit_generator).__getstate__())
        case np.random.SeedSequence() | SobolEngine():
            return repr(generator), getattr(generator, "num_generated", None)


def _joined(batches: Iterable[Any]) -> Any:
    """One batch of batches of one example each: their tensors one behind the other, in the same containers."""
    parts = list(batches)
    first = parts[0]
    if isinstance(first, torch.Tensor):
        return torch.cat(parts)
    if isinstance(first, np.ndarray):
        return np.concatenate(parts)
    if isinstance(first, Mapping):
        return {name: _joined(part[name] for part in parts) for name in first}
    if isinstance(first, list) and len(first) == 1:
        return [value for part in parts for value in part]  # of the one example; fields otherwise
    if isinstance(first, (list, tuple)):
        made = [_joined(column) for column in zip(*parts, strict=True)]
        return type(first)(*made) if hasattr(first, "_fields") else type(first)(made)
    raise LoaderError(
        f"the data set draws random numbers while it makes a batch of a list of indices, and {type(first).__name__}s "
        "of one example each cannot be joined; let it give tensors, arrays, or dicts and tuples of them, or give the "
        "loader a batch_size, so that it is asked for one example at a time"
    )


@final
class SeededStream(IterableDataset[Any]):
    """The user's stream, each example made under generators of its own number, in each process that reads it.

    What a stream draws for one example belongs to the `next` that gives it; what it draws ahead, for a buffer that it
    shuffles, belongs to the one before. A batch has `rows` examples.
    """

    def __init__(self, dataset: Any, seeds: Seeds, place: FetchPlace, rows: int) -> None:
        self.dataset, self._seeds, self._place, self._rows = dataset, seeds, place, rows
        self._begun = 0  # iterations of this process

    def __iter__(self) -> Iterator[Any]:
        worker, place, distributed = get_worker_info(), self._place, torch.distributed
        rank = distributed.get_rank() if distributed.is_available() and distributed.is_initialized() else 0
        origin: tuple[Any, ...] = (rank,) if worker is None else (rank, worker.id, place.start, self._begun)
        number = place.start * self._rows if worker is None else 0
        self._begun += 1
        reseed(_all_generators(self.dataset), self._seeds.at("stream", origin, number, "begun"))
        examples = iter(self.dataset)
        while True:
            reseed(_all_generators(self.dataset), self._seeds.at("stream", origin, number))
            try:
                example = next(examples)
            except StopIteration:
                return
            place.batch = "stream", origin, number
            yield example
            number += 1

    def __len__(self) -> int:
        return len(cast(Sized, self.dataset))


@final
class SeededPipe(IterDataPipe[Any]):
    """The same of a data pipe, which a DataLoader finds inside."""

    def __init__(self, stream: SeededStream) -> None:
        self.stream = stream

    def __iter__(self) -> Iterator[Any]:
        yield from self.stream

    def __len__(self) -> int:
        return len(self.stream)


@final
class SeededCollation:
    """A collation that runs under generators of its batch, and of its own place among the calls for that batch.

    Where it is called for each example alone, in their order, each has so draws of its own.
    """

    def __init__(self, collate: Callable[[Any], Any], seeds: Seeds, place: FetchPlace) -> None:
        self._collate, self._seeds, self._place = collate, seeds, place
        self._batch: tuple[Any, ...] | None = None
        self._calls = 0
        self._generators: list[Generator] = []

    def __call__(self, examples: Any) -> Any:
        if hands_on(self._collate):
            return self._collate(examples)
        batch = self._place.batch
        if self._batch is not batch:
            self._batch, self._calls = batch, 0
            self._generators = _all_generators(self._collate)
        reseed(self._generators, self._seeds.at("collation", batch, self._calls))
        self._calls += 1
        return self._collate(examples)

    def __getstate__(self) -> dict[str, Any]:
        """Without what belongs to this process, for another."""
        return {**vars(self), "_batch": None, "_generators": []}


@final
class SeededWorker:
    """What a worker process begins with: the user's own function, which finds the user's data set."""

    def __init__(self, start: Callable[[int], object] | None) -> None:
        self._start = start

    def __call__(self, worker: int) -> None:
        info = get_worker_info()
        if info is not None:
            object.__setattr__(info, "dataset", user_dataset(info.dataset))  # it is frozen
        if self._start is not None:
            self._start(worker)


# ----------------------------------------------------------------------------------------------------
# Models: forward and backward passes under generators of their own.


_STILL = frozenset(
    f"torch.nn.modules.{file}"
    for file in (
        "activation", "batchnorm", "channelshuffle", "container", "conv", "flatten", "fold", "instancenorm", "linear",
        "normalization", "padding", "pixelshuffle", "pooling", "sparse", "upsampling",
    )
)  # fmt: skip
"""Files of torch whose layers draw nothing, but for those below."""
_MOVING = nn.RReLU, nn.MultiheadAttention, nn.FractionalMaxPool2d, nn.FractionalMaxPool3d
_HOOKS = "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"


@final
class ModelDraws:
    """What a model draws: each pass under generators of (rank, step, micro-batch, pass), the user's put back after it.

    A forward pass is a block. A backward pass begins where the first gradient of an output comes to the model, and
    ends where the engine says so; one that an error broke off ends with the next. Which modules the user's model has
    is taken when this is made.
    """

    def __init__(self, model: nn.Module, seeds: Seeds, rank: int) -> None:
        modules = list(filter(_module_may_draw, model.modules()))
        self._seeds, self._rank = seeds, rank
        self._of_torch = all(type(m).__module__.startswith("torch.nn.modules.") and not _is_changed(m) for m in modules)
        self._held = () if self._of_torch else tuple(held_generators(*modules))
        self._backward: AbstractContextManager[None] | None = None

    @staticmethod
    def of(model: nn.Module, seeds: Seeds, rank: int) -> "ModelDraws | None":
        """None for a model of layers that are known to draw nothing."""
        return ModelDraws(model, seeds, rank) if any(map(_module_may_draw, model.modules())) else None

    def forward(self, step: int, part: int, number: int = 0) -> AbstractContextManager[None]:
        """The block of forward pass `number` over micro-batch `part` of a step."""
        self.end()
        return self._alone("forward", step, part, *([number] if number else []))

    def follow(self, outputs: Any, step: int, part: int) -> None:
        """Let a backward pass from these outputs draw from generators of its own."""

        def begin(gradients: Any) -> None:
            del gradients
            if self._backward is None:
                self._backward = self._alone("backward", step, part)
                self._backward.__enter__()

        for leaf in pytree.tree_leaves(outputs):
            if isinstance(leaf, torch.Tensor) and leaf.grad_fn is not None:
                leaf.grad_fn.register_prehook(begin)

    def drawn_in(self, run: Callable[[], object]) -> bool:
        """Whether the model draws in a run of it that is only tried."""
        with self._alone("trial"):
            generators = [*process_generators(), *self._held]
            before = [_state(generator) for generator in generators]
            run()
            return before != [_state(generator) for generator in generators]

    def end(self) -> None:
        """The backward pass is over, if there is one."""
        backward, self._backward = self._backward, None
        if backward is not None:
            backward.__exit__(None, None, None)

    def _alone(self, *address: Any) -> AbstractContextManager[None]:
        return alone(self._seeds.at(self._rank, *address), self._held, numpy=not self._of_torch)


def _module_may_draw(module: nn.Module) -> bool:
    return type(module).__module__ not in _STILL or isinstance(module, _MOVING) or _is_changed(module)


def _is_changed(module: nn.Module) -> bool:
    """Whether other code than the class's runs in its passes."""
    return "forward" in vars(module) or any(vars(module).get(name) for name in _HOOKS)
