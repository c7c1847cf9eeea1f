"""Each example is collated alone, joined with the others, and padded to the least public shape that holds it."""

import collections
import dataclasses
import warnings
import weakref
from multiprocessing.reduction import ForkingPickler
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, default_collate
from torch.utils.data._utils import collate as torch_collate

from anyorder.clipping.coupling import LossWatch
from anyorder.errors import ArgumentError, LoaderError, ModelError
from anyorder.sampling.batch_classes import named_parts
from anyorder.sampling.loader import PrivateLoader
from anyorder.sampling.shapes import CollatedAlone, Joining, PublicShapes, RowShapes, Stacked

LENGTHS = [3, 8, 5, 9, 40]
TEXTS = [torch.arange(1, n + 1) for n in LENGTHS]


def batches(data, collate, shapes=None, size=5, **options):
    return list(PrivateLoader(DataLoader(data, size, collate_fn=collate), seed=0, shapes=shapes, **options))


def pad(rows):
    return pad_sequence(rows, batch_first=True)


def test_an_example_has_the_least_length_that_holds_it():
    shapes = PublicShapes.of((8, 16))
    batch, numbers, _ = CollatedAlone(pad, shapes)(TEXTS)
    assert numbers.tolist() == [0, 0, 0, 1, 1]
    assert batch.shape == (5, 16)
    for row, text in zip(batch, TEXTS, strict=True):
        assert row.tolist() == [*text.tolist(), *[0] * 16][:16]
    left = PublicShapes.of((8, 16), 7, "left")
    batch, *_ = CollatedAlone(pad, left)(TEXTS)
    assert batch[0].tolist() == [7] * 13 + [1, 2, 3]
    assert batch[4].tolist() == list(range(1, 17))


@pytest.mark.parametrize(
    ("pad_to", "sizes"),
    [
        (64, (0, ((16,), (32,), (64,)))),
        (100, (0, ((16,), (32,), (64,), (100,)))),
        (10, (0, ((10,),))),
        ([5, 7], (0, ((5,), (7,)))),
        (((8, 8), (8, 16)), (2, ((8, 8), (8, 16)))),
    ],
)
def test_lists_of_lengths(pad_to, sizes):
    assert PublicShapes.of(pad_to).fields == {None: sizes}


@pytest.mark.parametrize(
    "pad_to",
    [0, -3, True, (), (8, 8), (16, 8), (8.0,), ((8, 8), (4, 16)), ((8, 8), 16), "long", {"a": (8,), "b": (8, 9)}],
)
def test_lists_that_are_none(pad_to):
    with pytest.raises(ArgumentError, match="pad_to"):
        PublicShapes.of(pad_to)


def test_values_and_fields():
    @dataclasses.dataclass
    class Tokenizer:
        padding_side: str = "left"
        pad_token_id: int = 9
        pad_token_type_id: int = 2

    class Collator:
        tokenizer = Tokenizer()

        def __call__(self, rows):
            (x,) = rows
            tokens = dict.fromkeys(("input_ids", "labels", "token_type_ids"), x[None])
            return {**tokens, "attention_mask": x[None] > 0, "scores": x[None].float(), "label": torch.rand(1, 3)}

    shapes = PublicShapes.of((4, 8), collate_fn=Collator())
    batch, numbers, _ = CollatedAlone(Collator(), shapes)(TEXTS[:2])
    assert numbers.tolist() == [0, 1]
    filled = {name: values[0][0].item() for name, values in batch.items() if name != "label"}
    assert filled == {"input_ids": 9, "labels": -100, "token_type_ids": 2, "attention_mask": False, "scores": 0.0}
    assert batch["label"].shape == (2, 3)
    some = PublicShapes.of({"input_ids": (4, 8), "labels": (4, 8)}, {"labels": -1}, "right")
    with pytest.raises(LoaderError, match="differ in shape"):
        CollatedAlone(Collator(), some)(TEXTS[:2])
    batch, *_ = CollatedAlone(Collator(), some)(TEXTS[1:2])
    assert batch["labels"][0].tolist() == list(range(1, 9))
    batch, *_ = CollatedAlone(Collator(), some)(TEXTS[:1])
    assert batch["labels"][0].tolist() == [1, 2, 3, -1, -1, -1, -1, -1]
    assert batch["attention_mask"].shape == (1, 3)


Pair = collections.namedtuple("Pair", "x y")


class Box:
    def __init__(self, x):
        self.x, self.kind = x, "text"


@dataclasses.dataclass
class Fields:
    x: Tensor
    names: list[str]


CONTAINERS: dict[str, Any] = {
    "tensor": (pad, lambda b: b),
    "dict": (lambda r: {"x": pad(r), "n": [len(t) for t in r]}, lambda b: b["x"]),
    "nested": (lambda r: {"a": {"x": pad(r)}, "b": (pad(r), "once")}, lambda b: b["a"]["x"]),
    "list": (lambda r: [pad(r), torch.tensor([len(t) for t in r])], lambda b: b[0]),
    "named": (lambda r: Pair(pad(r), [None for _ in r]), lambda b: b.x),
    "object": (lambda r: Box(pad(r)), lambda b: b.x),
    "dataclass": (lambda r: Fields(pad(r), ["a" for _ in r]), lambda b: b.x),
    "mapping": (lambda r: collections.UserDict(x=pad(r)), lambda b: b["x"]),
    "numpy": (lambda r: (pad(r).numpy(), np.array(["u" for _ in r])), lambda b: torch.from_numpy(b[0])),
}


@pytest.mark.parametrize("name", CONTAINERS)
def test_batches_of_any_container(name):
    collate, x_of = CONTAINERS[name]
    equal = [text[:3] for text in TEXTS]
    (batch,) = batches(equal, collate)
    whole = collate(equal)
    assert type(batch) is type(whole)
    assert torch.equal(x_of(batch), x_of(whole))
    (batch,) = batches(TEXTS, collate, PublicShapes.of((64,)))
    assert torch.equal(x_of(batch)[:, :40], pad(TEXTS))
    if name in ("dict", "dataclass", "named"):
        values = next(
            v
            for v in (batch.values() if name == "dict" else vars(batch).values() if name == "dataclass" else batch)
            if isinstance(v, list)
        )
        assert len(values) == 5


class Marked(dict):
    """With an attribute beside the fields."""

    def __init__(self, x, **beside):
        super().__init__(x=x)
        vars(self).update(beside)


class Equal:
    __slots__ = ("x",)

    def __init__(self, x):
        self.x = x

    def __eq__(self, other):
        return True

    def __hash__(self):
        return 0


class Cycle:
    def __init__(self, x):
        self.x, self.me = x, self


REFUSED: dict[str, Any] = {
    "different lengths": (pad, "differ in shape"),
    "a number": (lambda r: {"x": torch.zeros(len(r), 2), "longest": max(map(len, r))}, "Python number"),
    "needs two": (lambda r: torch.stack([r[0][:2], r[1][:2]]), "fails there"),
    "drops": (lambda r: torch.stack([*[x[:2] for x in r if len(x) > 5], *[torch.zeros(2)] * 0]), "fails there"),
    "drops rows": (lambda r: torch.zeros(sum(len(x) > 5 for x in r), 2), "with one row"),
    "repeats": (lambda r: torch.zeros(2 * len(r), 2), "with one row"),
    "packs": (lambda r: torch.cat(r), "with one row"),
    "detection": (lambda r: tuple(zip(*[(x[:2], x[:1]) for x in r], strict=True)), "got another number of rows"),
    "of the batch": (lambda r: (torch.zeros(len(r), 2), torch.tensor(3.0)), "with one row.*got a number without a row"),
    "other fields": (lambda r: {str(len(r[0])): torch.zeros(1)}, "other fields"),
    "other types": (lambda r: torch.zeros(1, 2) if len(r[0]) > 5 else [torch.zeros(1, 2)], "other types"),
    "other dtypes": (lambda r: torch.zeros(1, 2).to(torch.int64 if len(r[0]) > 5 else torch.float32), "another dtype"),
    "a number beside": (lambda r: Marked(x=torch.zeros(len(r), 2), scale=float(r[0].sum())), "Python number"),
    "a tensor beside": (lambda r: Marked(x=torch.zeros(len(r), 2), mean=r[0].float()), "with one row"),
    "an object that is equal to all": (lambda r: (torch.zeros(1, 2), Equal(r[0])), "with one row"),
    "a key that is equal to all": (lambda r: {Equal(r[0]): torch.zeros(1, 2)}, "other fields"),
    "kept elsewhere": (lambda r: (torch.zeros(1, 2), {len(r)}), "gives a set, and those of single"),
    "itself": (lambda r: Cycle(torch.zeros(1, 2)), "holds itself"),
    "other settings": (lambda r: (torch.zeros(1, 2), "long" if len(r[0]) > 5 else "short"), "another setting"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name):
    collate, words = REFUSED[name]
    with pytest.raises(LoaderError, match=words):
        batches(TEXTS, collate)


def test_a_list_with_a_number_for_each_example_is_joined():
    ((x, lengths),) = batches(TEXTS[:2], lambda rows: (torch.stack([row[:2] for row in rows]), list(map(len, rows))))
    assert lengths == list(map(len, TEXTS[:2]))


def test_a_default_collate_that_pads_is_called_on_each_example_alone(monkeypatch):
    """By torch's own table, into which everybody may put functions: one long text moved a sum by 3.8 clip norms."""
    assert PrivateLoader(DataLoader(TEXTS, 3), seed=0).collates_by_row
    pad = lambda rows, collate_fn_map=None: pad_sequence(rows, batch_first=True)  # noqa: E731
    monkeypatch.setitem(torch_collate.default_collate_fn_map, Tensor, pad)
    loader = PrivateLoader(DataLoader(TEXTS, 3), seed=0)
    assert type(loader._loader.collate_fn) is CollatedAlone
    with pytest.raises(LoaderError, match="differ in shape"):
        list(loader)


def test_what_stacks_is_called_on_the_batch():
    calls = []

    class Kept(PrivateLoader):
        pass

    data = [torch.zeros(3) for _ in range(6)]
    assert type(Kept(DataLoader(data, 3), seed=0)._loader.collate_fn) is Stacked
    assert (
        type(
            Kept(
                DataLoader(data, 3, collate_fn=lambda r: calls.append(len(r)) or torch.stack(r)), seed=0
            )._loader.collate_fn
        )
        is CollatedAlone
    )
    batches(data, lambda r: calls.append(len(r)) or torch.stack(r))
    assert calls == [1] * 6


class Stream(IterableDataset):
    def __init__(self, lengths, units):
        self.lengths, self.units = lengths, units

    def __iter__(self):
        for n in self.lengths:
            yield torch.ones(len(self.units), n), torch.tensor(self.units)


@pytest.mark.parametrize("tensor", [
    torch.randn(6, 3), torch.arange(6), torch.randn(3, 6).T, torch.randn(6, 3) > 0,
    torch.randn(6, 3, requires_grad=True), torch.randn(6, 2, 4, 4).to(memory_format=torch.channels_last),
    torch.randn(6, 2, dtype=torch.complex64),
])  # fmt: skip
def test_rows_that_are_taken_at_once_are_those_that_torch_stacks(tensor):
    data = TensorDataset(tensor, torch.arange(6))
    for indices in ([4, 0, 2], [3], [-1, 1, 1]):
        plain, ours = default_collate([data[i] for i in indices]), Stacked(default_collate, data)(indices)
        for one, other in zip(plain, ours, strict=True):
            assert (type(one), one.dtype, one.shape, one.stride()) == (
                type(other),
                other.dtype,
                other.shape,
                other.stride(),
            )
            assert torch.equal(one, other)
            assert one.requires_grad == other.requires_grad
    for plain, ours in zip(DataLoader(data, 4), batches(data, None, size=4), strict=True):
        assert all(map(torch.equal, plain, ours))
    data.tensors = (tensor.clone() * 2, data.tensors[1])  # as after every epoch in place, say
    assert torch.equal(Stacked(default_collate, data)([1, 2])[0], default_collate([data[1], data[2]])[0])


def exchanged_for_equal_ids(data):
    """Tensors that may stand where others stood."""
    made = [t.roll(3, 0).numpy() for t in data.tensors]
    data.tensors = ()
    data.tensors = tuple(map(torch.from_numpy, made))


@pytest.mark.parametrize("change", [
    lambda data: setattr(data, "tensors", tuple(t.roll(3, 0) for t in data.tensors)),
    lambda data: data.tensors[0].copy_(data.tensors[0].roll(3, 0)),
    lambda data: setattr(data.tensors[0], "data", data.tensors[0].roll(3, 0)),
    exchanged_for_equal_ids,
])  # fmt: skip
def test_rows_may_not_be_others_within_an_epoch(change):
    data = TensorDataset(torch.arange(12.0).reshape(6, 2), torch.arange(6))
    loader = PrivateLoader(DataLoader(data, 3), seed=0)
    change(data)  # before it, and between epochs
    rows = iter(loader)
    next(rows)
    change(data)
    with pytest.raises(LoaderError, match="within an epoch"):
        next(rows)
    assert len(list(loader)) == 2


class Zero(int):
    """A number that reads as another one, where it is an index."""

    def __index__(self):
        return 0

    __int__ = __index__


def test_rows_are_read_by_the_numbers_that_name_units():
    class Batches:
        def __iter__(self):
            yield from ([Zero(0), Zero(1)], [Zero(2), 3])

        def __len__(self):
            return 2

    taken = []
    loader = PrivateLoader(
        DataLoader(TensorDataset(torch.arange(4)), batch_sampler=Batches()), seed=0,
        on_batch=lambda units, position: taken.append(list(units)),
    )  # fmt: skip
    assert [x.tolist() for (x,) in loader] == taken == [[0, 1], [2, 3]]


class OneAtATime(Tensor):
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        assert func is not Tensor.__getitem__ or isinstance(args[1], int)
        return super().__torch_function__(func, types, args, kwargs or {})


def test_rows_of_a_class_of_ones_own_are_taken_one_at_a_time():
    data = TensorDataset(torch.arange(12.0).reshape(6, 2).as_subclass(OneAtATime))
    assert torch.equal(batches(data, None, size=6)[0][0], torch.arange(12.0).reshape(6, 2))


def test_batches_of_streams_have_one_shape_or_are_padded_on():
    loader = PrivateLoader(DataLoader(Stream([4, 4, 5], [1, 2]), batch_size=None), unit=1, seed=0)
    handed = iter(loader)
    next(handed)
    next(handed)
    with pytest.raises(LoaderError, match="must all have one shape"):
        next(handed)
    assert len(list(PrivateLoader(DataLoader(Stream([4, 5], [1, 1]), batch_size=None), unit=1, seed=0))) == 2
    loader = PrivateLoader(
        DataLoader(Stream([4, 5], [1, 2]), batch_size=None), unit=1, seed=0, shapes=PublicShapes.of((4, 8))
    )
    assert [x.shape[1] for x, _ in loader] == [8, 8]
    lists = PrivateLoader([(torch.ones(2, 4), [1, 2]), (torch.ones(2, 5), [1, 2])], unit=1, seed=0)
    with pytest.raises(LoaderError, match="must all have one shape"):
        list(lists)


def test_a_data_set_that_joins_its_examples_promises_one_shape():
    class Joined:
        def __len__(self):
            return 6

        def __getitem__(self, i):
            return torch.ones(4 + i // 3)

        def __getitems__(self, indices):
            return (pad([self[i] for i in indices]), torch.tensor(indices))

    with pytest.raises(LoaderError, match="must all have one shape"):
        batches(Joined(), lambda b: b, size=3)
    assert [x.shape[1] for x, _ in batches(Joined(), lambda b: b, PublicShapes.of((8,)), size=3)] == [8, 8]


def test_arguments_are_matched_by_shape_or_not_at_all():
    batch, numbers, _ = CollatedAlone(
        lambda r: (pad(r), torch.zeros(len(r), 6)), shapes := PublicShapes.of({0: (8, 64)})
    )(TEXTS[:3])
    rows = RowShapes.of(batch, numbers, shapes)
    x, _ = batch
    assert rows.cut_of(x) == rows.cut_of(x.clone()) == rows.cut_of(x != 0) == ((1, (8, 64)),)
    assert rows.cut_of(x[:, :-1]) == rows.cut_of(x[:, 1:].int()) == ((1, (7, 63)),)
    assert rows.cut_of(torch.zeros(3)) == ()
    assert rows.cut_of(x.float()) is None  # numbers may be anything
    assert rows.cut_of(x[:, :32]) is None
    assert rows.cut_of(torch.nn.functional.one_hot(x)) is None


def test_an_example_has_the_shape_that_holds_its_largest_field():
    joining = Joining(PublicShapes.of({"a": (4, 8), "b": (4, 8)}), 2)
    joining.join([{"a": torch.ones(1, i), "b": torch.ones(1, j)} for i, j in ((6, 2), (2, 3))])
    assert joining.numbers.tolist() == [1, 0]


@pytest.mark.parametrize(("pad_value", "warned"), [(None, True), ({1: -100}, False), ({1: 0}, False), (0, False)])
def test_labels_of_a_tuple_that_are_filled_with_a_class_are_warned_of(pad_value, warned):
    """Collated alone they are not padded, so what the user's function pads them with is not seen."""
    shapes = PublicShapes.of((4, 8), pad_value)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        shapes.warn_of_zeros((torch.zeros(2, 8, dtype=torch.long), torch.zeros(2, 8, dtype=torch.long)))
        shapes.warn_of_zeros((torch.zeros(2, 8, dtype=torch.long), torch.zeros(2, dtype=torch.long)))
        shapes.warn_of_zeros((torch.zeros(2, 8, dtype=torch.long), torch.zeros(2, 8)))
    assert [str(one.message)[:13] for one in told] == ["whole numbers"] * warned


class Graphs:
    """A batch whose attributes stand in a store, as those of PyG's do."""

    def __init__(self, x, y):
        vars(self)["store"] = {"x": x, "y": y}

    def __getattr__(self, name):
        if name not in vars(self).get("store", ()):
            raise AttributeError(name)
        return vars(self)["store"][name]

    def __setattr__(self, name, value):
        vars(self)["store"][name] = value


def test_a_batch_that_puts_attributes_elsewhere_has_the_rows_of_all():
    """Set as an attribute, the joined rows went into the store's store, and the batch was the first example alone."""

    def joined(rows):
        return Graphs(torch.stack([x for x, _ in rows]), torch.stack([y for _, y in rows]))

    rows = [(torch.full((3,), float(i)), torch.tensor(i)) for i in range(6)]
    batch = CollatedAlone(joined, None)(rows).whole()
    assert batch.y.tolist() == list(range(6))
    assert batch.x[:, 0].tolist() == list(range(6))


def mixed(x):
    """Rows of several are joined; of one, it is as it was."""
    return x + x.roll(1, 0) - x


def mixing(batch):
    """What a class of a batch might do with its rows."""
    batch.__dict__["x"] = mixed(batch.__dict__["x"])
    return batch


@dataclasses.dataclass
class Negatives:
    x: Tensor
    y: Tensor
    negatives: Any = None

    def __post_init__(self):
        self.negatives = self.x.roll(1, 0)


@dataclasses.dataclass(slots=True, frozen=True)
class Slots:
    x: Tensor
    y: Tensor

    def __post_init__(self):
        object.__setattr__(self, "x", mixed(self.x))


class Copied:
    def __init__(self, x, y):
        self.x, self.y = x, y

    def __copy__(self):
        return mixing(object.__new__(Copied))

    def __getstate__(self):
        return vars(mixing(self))

    def __setattr__(self, name, value):
        vars(self)[name] = mixed(value)

    def __getattribute__(self, name):
        return (
            mixed(object.__getattribute__(self, "__dict__")[name]) if name in "xy" else super().__getattribute__(name)
        )


class Listed(list):
    def __init__(self, *values):
        super().__init__(map(mixed, values))

    def __iter__(self):
        return map(mixed, super().__iter__())

    x, y = property(lambda self: list.__getitem__(self, 0)), property(lambda self: list.__getitem__(self, 1))


class Placed(Pair):
    def __new__(cls, x, y):
        return super().__new__(cls, mixed(x), mixed(y))


class Updated(collections.UserDict):
    def __init__(self, x, y):
        super().__init__(x=x, y=y)

    def update(self, *fields, **named):
        super().update({name: mixed(value) for name, value in dict(*fields, **named).items()})

    def values(self):
        return [mixed(value) for value in super().values()]

    x, y = property(lambda self: vars(self)["data"]["x"]), property(lambda self: vars(self)["data"]["y"])


class Ordered(collections.OrderedDict):
    def __init__(self, x, y):
        super().__init__(x=x, y=y)

    def __setitem__(self, name, value):
        super().__setitem__(name, mixed(value))

    x, y = property(lambda self: dict.get(self, "x")), property(lambda self: dict.get(self, "y"))


ROWS = [(torch.arange(3.0) + 10 * i, torch.tensor(i)) for i in range(4)]


def stacked(rows):
    return torch.stack([x for x, _ in rows]), torch.stack([y for _, y in rows])


@pytest.mark.parametrize("kind", [Negatives, Slots, Copied, Listed, Placed, Updated, Ordered])
def test_no_code_of_a_class_runs_on_the_rows_of_several(kind, monkeypatch):
    """In-batch negatives of a `__post_init__` moved the sums of neighbours by 2.9 clip norms."""
    monkeypatch.setattr(Tensor, "pin_memory", Tensor.clone)
    collated = CollatedAlone(lambda rows: kind(*stacked(rows)), None)(ROWS)
    sent = ForkingPickler.loads(ForkingPickler.dumps(collated)).whole()
    shown = LossWatch().batch(collated.whole(), len(ROWS))
    x, y = stacked(ROWS)
    values = []
    for batch in (collated.whole(), collated.pin_memory().whole(), sent, shown):
        assert type(batch) is kind
        parts = dict(named_parts(batch.data if kind is Updated else batch))
        values = list(parts.values())
        assert torch.equal(values[0], x)
        assert torch.equal(values[1], y)
    if kind is Negatives:
        assert torch.equal(collated.whole().negatives, x)
    assert {type(part) for part in values} == {type(shown.x)} != {Tensor}


class Stacks(Tensor):
    """Which mixes what it stacks."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        made = super().__torch_function__(function, types, args, kwargs or {})
        return mixed(made) if function in (torch.stack, torch.cat) else made


@pytest.mark.parametrize("kind", [Placed, Updated, Ordered, lambda x, y: (x.as_subclass(Stacks), y)])
def test_default_collate_of_classes_of_ones_own_is_called_on_each_example(kind):
    """It updates a copy of the first mapping with the stacked rows: that of a class moved a sum by 4.4 clip norms."""
    (batch,) = PrivateLoader(DataLoader([kind(x[None], y[None]) for x, y in ROWS], 4), seed=0)
    parts = [part for _, part in named_parts(batch.data if kind is Updated else batch)]
    assert [type(part) for part in parts] == [Tensor, Tensor]
    assert all(torch.equal(own[:, 0], other) for own, other in zip(parts, stacked(ROWS), strict=True))


def test_a_type_of_one_example_does_not_change_that_of_others():
    """Torch makes all of them the wider, or what the first is."""
    for rows in ([1, 2.5], [torch.zeros(2), torch.zeros(2, dtype=torch.float64)], [{"y": 1}, {"y": 1.0}]):
        with pytest.raises(LoaderError, match="another dtype"):
            list(PrivateLoader(DataLoader(rows, 2), seed=0))


class Parent:
    """Whose part knows it weakly, as the stores of PyG's batches do."""

    def __init__(self, x):
        self.store = Part(x, weakref.ref(self))


class Part:
    def __init__(self, x, parent):
        self.x, self.parent = x, parent


def test_a_part_knows_the_whole_of_all_rows():
    batch = CollatedAlone(lambda rows: Parent(rows[0][0][None]), None)(ROWS).whole()
    assert batch.store.parent() is batch
    assert torch.equal(batch.store.x, stacked(ROWS)[0])


def test_what_stands_in_two_places_is_joined_once():
    def collate(rows):
        batch = Marked(stacked(rows)[0])
        batch.x = batch["x"]
        return batch

    batch = CollatedAlone(collate, None)(ROWS).whole()
    assert batch.x is batch["x"]
    shown = LossWatch().batch(batch, len(ROWS))
    assert shown.x is shown["x"]


def test_a_value_of_one_row_is_not_one_row_of_each():
    """A tensor that was as long as the batch by chance moved a sum by 6.7 clip norms."""
    loader = PrivateLoader(
        DataLoader([torch.zeros(4)] * 4, 4, collate_fn=lambda rows: [{"box": x} for x in rows]), seed=0
    )
    watch, handed = LossWatch(), []
    loader.show = lambda batch, rows, own: handed.append(own) or watch.batch(batch, rows, own)
    (batch,) = loader
    assert len(batch) == 4
    with pytest.raises(ModelError, match="not one row for each example"):
        watch.outputs(torch.zeros(4, requires_grad=True) + 0, [2 * batch[0]["box"]])
