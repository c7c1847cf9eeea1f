"""A unit that is an index is one example: after a resume, in the next epoch, in every process."""

import copy
import dataclasses
import os
import random
import subprocess
import sys
import warnings
from collections import deque
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset

import anyorder as ao
from anyorder.errors import CheckpointError, LoaderError
from anyorder.sampling import row_digests
from anyorder.sampling.row_digests import InStages, Noted, check_same_rows, digest_of
from loops import train_to

N, B, EPOCHS = 40, 8, 2
KEY = bytes(range(32))
X, Y = torch.randn(N, 3, generator=torch.Generator().manual_seed(1)), torch.arange(N) % 2


class Photos(Dataset):
    """Augmented at random, by all generators, with an object in each example."""

    def __init__(self, order):
        self.order = order

    def __len__(self):
        return len(self.order)

    def __getitem__(self, i):
        x, y = X[self.order[i]], Y[self.order[i]]
        return x + 0.01 * torch.randn(3) + 0.01 * random.random() + 0.01 * np.random.rand(), y  # noqa: NPY002


class Batched(Photos):
    """Read several at once."""

    def __getitems__(self, indices):
        return [self[i] for i in indices]


KINDS = {
    "tensors": lambda order: TensorDataset(X[order], Y[order]),
    "list": lambda order: list(zip(X[order], Y[order], strict=True)),
    "subset": lambda order: Subset(TensorDataset(X[order], Y[order]), range(N)),
    "augmented": Photos,
    "at once": Batched,
}


def start(dataset, checkpoint=None, *, epochs=EPOCHS, order="fixed", **options):
    size = {} if epochs is None else {"dataset_size": N, "epochs": epochs}
    plan = ao.plan(order=order, batch_size=B, **size, epsilon=4, delta=1e-5, mechanism="tree")
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    loader = DataLoader(dataset, batch_size=B, **options)
    engine = ao.PrivacyEngine(plan, checkpoint=checkpoint, key=KEY)
    return engine, *engine.make_private(model, optimizer, loader)


def train(run, until):
    train_to(until, *run)


def halves(order):
    return np.roll(order, N // 2)


def two(order):
    order = order.copy()
    order[[3, 30]] = order[[30, 3]]
    return order


@pytest.mark.parametrize(("moved", "changed"), [(halves, N), (two, 2)])
@pytest.mark.parametrize("kind", KINDS)
def test_a_resume_over_moved_rows_is_refused_before_a_gradient(tmp_path, kind, moved, changed):
    make, order = KINDS[kind], np.arange(N)
    run = start(make(order), tmp_path / "run")
    train(run, 3)
    run[0].save()
    run[0].close()
    with pytest.raises(CheckpointError, match="rows of the data set are not those") as caught:
        start(make(moved(order)), tmp_path / "run")
    assert caught.value.changed == (changed, N)
    assert not any(character.isdigit() for character in str(caught.value))  # how many is for the owner alone
    again = start(make(order), tmp_path / "run")
    train(again, 2 * N // B)
    assert again[0].step == 2 * N // B


@pytest.mark.parametrize("kind", ["tensors", "augmented"])
def test_workers_read_the_rows_as_the_process_does(tmp_path, kind):
    make, order = KINDS[kind], np.arange(N)
    run = start(make(order), tmp_path / "run", num_workers=2)
    before = run[3].rows.state_dict()
    run[0].close()
    again = start(make(order), tmp_path / "run")
    assert len(before["names"]) == N
    assert again[3].rows.check_resumed(before) is None


@pytest.mark.parametrize("workers", [0, 1])
def test_a_data_set_that_is_shuffled_between_epochs_is_refused(workers):
    examples = list(zip(X, Y, strict=True))
    run = start(examples, num_workers=workers)
    train(run, N // B)
    random.Random(0).shuffle(examples)
    with pytest.raises(LoaderError, match="epoch before"):
        train(run, N // B + 1)
    assert run[0].step == N // B


class Attributed(Photos):
    """With an attribute of its own that stays."""

    rows = TensorDataset(X, Y)


class Changing(Attributed, InStages):
    """The same, of a data set that says what it is made of."""


def test_rows_are_compared_in_the_place_of_examples_only_where_a_class_says_so():
    for kind in (Attributed, Changing):
        dataset = kind(np.arange(N))
        run = start(dataset)
        train(run, N // B)
        dataset.order = halves(dataset.order)
        with nullcontext() if kind is Changing else pytest.raises(LoaderError, match="epoch before"):
            train(run, N // B + 1)


def test_of_a_large_data_set_more_rows_are_kept_with_each_epoch(tmp_path, monkeypatch):
    monkeypatch.setattr(row_digests, "_SECONDS", 0.0)
    monkeypatch.setattr(row_digests, "_CHUNK", 2)
    run = start(KINDS["list"](np.arange(N)), tmp_path / "run")
    few = len(run[3].rows.state_dict()["names"])
    assert 32 <= few < N
    train(run, N // B + 1)
    run[0].save()
    run[0].close()
    more = len(run[3].rows.state_dict()["names"])
    assert few < more <= N
    with pytest.raises(CheckpointError) as caught:
        start(KINDS["list"](halves(np.arange(N))), tmp_path / "run")
    assert caught.value.changed == (more, more)


def test_a_resumed_run_has_what_was_kept_and_goes_on_to_keep_more(tmp_path, monkeypatch):
    monkeypatch.setattr(row_digests, "_SECONDS", 0.0)
    monkeypatch.setattr(row_digests, "_CHUNK", 2)
    kept = []
    for _ in range(2):
        engine, *_, loader = start(KINDS["list"](np.arange(N)), tmp_path / "run")
        kept.append(set(loader.rows.state_dict()["names"].tolist()))
        engine.close()
    assert kept[0] == kept[1]
    run = start(KINDS["list"](np.arange(N)), tmp_path / "run")
    train(run, N // B + 1)
    names = run[3].rows.state_dict()["names"].tolist()
    assert kept[0] < set(names)
    assert len(set(names)) == len(names)
    run[0].save()
    run[0].close()
    start(KINDS["list"](np.arange(N)), tmp_path / "run")


def test_each_rank_is_compared_with_the_first():
    rows = [Noted(np.arange(3), np.array(digests)) for digests in ([1, 2, 3], [1, 2, 3], [1, 2, 4])]
    check_same_rows(rows[:2])
    with pytest.raises(LoaderError, match="another example on another rank"):
        check_same_rows(rows)


class Counted(Photos):
    """What it gives depends on what was asked for before."""

    calls = 0

    def __getitem__(self, i):
        self.calls += 1
        return X[self.order[i]] + self.calls, Y[self.order[i]]


class Unseen(Photos):
    """Draws from the operating system."""

    def __getitem__(self, i):
        return X[self.order[i]] + os.urandom(8)[0], Y[self.order[i]]


@pytest.mark.parametrize("kind", [Counted, Unseen])
def test_a_data_set_of_another_example_at_each_reading_is_named(tmp_path, kind):
    with pytest.warns(UserWarning, match=f"{kind.__name__} is not the same when it is read again"):
        start(kind(np.arange(N)), tmp_path / "run")


def test_reading_the_rows_leaves_the_users_generators_alone(tmp_path):
    states = []
    for checkpoint in (None, tmp_path / "run"):
        torch.manual_seed(0)
        random.seed(0)
        np.random.seed(0)  # noqa: NPY002
        start(Photos(np.arange(N)), checkpoint)
        states.append((torch.rand(1).item(), random.random(), np.random.rand()))  # noqa: NPY002
    assert states[0] == states[1]


def test_a_digest_is_keyed_by_the_run(tmp_path):
    def digests(key):
        plan = ao.plan(dataset_size=N, batch_size=B, epochs=1, epsilon=4, delta=1e-5, mechanism="tree")
        engine, model = ao.PrivacyEngine(plan, checkpoint=tmp_path / key.hex(), key=key), nn.Linear(3, 2)
        loader = DataLoader(TensorDataset(X, Y), batch_size=B)
        engine.make_private(model, torch.optim.SGD(model.parameters(), 0.1), loader)
        state = engine.loader.rows.state_dict()
        return dict(zip(state["names"].tolist(), state["digests"].tolist(), strict=True))

    one, other = digests(KEY), digests(bytes(32))
    assert len(set(one.values())) == N
    assert not set(one.values()) & set(other.values())
    assert [*one] != [*other]  # nor is it known which rows are compared first


@dataclasses.dataclass
class Record:
    text: str
    tags: set
    image: np.ndarray


class Picture:
    mode = "L"

    def __init__(self, *size):
        self.size = size

    def tobytes(self):
        return bytes(6)


PARTS = [
    1, 1.0, True, None, "1", b"1", "", [1], (1,), {1}, {"a": 1}, {"b": 1}, {"a": [1]}, [1, [2]], [[1], 2], [[1, 2]],
    torch.ones(2), torch.ones(2, dtype=torch.float64), torch.ones(1, 2), torch.ones(()), torch.ones(0),
    torch.ones(2, dtype=torch.bfloat16), torch.zeros(2), torch.zeros(2, dtype=torch.int32), torch.eye(2).to_sparse(),
    np.ones(2), np.ones(2, np.float32),
    np.array(["a", {}], object), np.float64(1), Record("a", {"x"}, np.ones(2)), Record("a", {"y"}, np.ones(2)),
    ["a", "bstr c"], ["astr b", "c"], deque([1]), deque([2]), Picture(2, 3), Picture(3, 2),
]  # fmt: skip


def test_what_differs_has_another_digest_and_a_copy_the_same():
    assert len({digest_of(part, KEY) for part in PARTS}) == len(PARTS)
    for part in PARTS:
        assert digest_of(copy.deepcopy(part), KEY) == digest_of(part, KEY) != digest_of(part, bytes(32))
    assert digest_of(torch.arange(6).reshape(2, 3).t(), KEY) == digest_of(torch.tensor([[0, 3], [1, 4], [2, 5]]), KEY)


PRINTED = """
import datetime, decimal, pathlib, types
from anyorder.sampling import row_digests
from anyorder.sampling.row_digests import digest_of
words = {f"word {i}" for i in range(50)}
thing = types.SimpleNamespace(words=words, day=datetime.date(2026, 1, 2), path=pathlib.PurePosixPath("a/b"), by=len)
print(digest_of([thing, decimal.Decimal("1.5"), frozenset(words)], b"key").hex())
"""


def test_a_digest_is_the_same_in_every_process(capsys):
    seed = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"  # another than that of this process
    other = subprocess.run(
        [sys.executable, "-c", PRINTED], env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True, check=True
    )
    exec(PRINTED, {})
    assert capsys.readouterr().out.encode() == other.stdout != b""


def test_rows_that_cannot_be_read_are_the_loops_to_meet(tmp_path):
    class Broken(Photos):
        def __getitem__(self, i):
            if i == N - 1:
                raise OSError("the file is gone")
            return super().__getitem__(i)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run = start(Broken(np.arange(N)), tmp_path / "run")
    train(run, 3)
    with pytest.raises(OSError, match="the file is gone"):
        train(run, N // B)


class People(Dataset):
    """Rows of which some have gone, and one may be somebody else's."""

    def __init__(self, gone=(), other=None):
        self.gone, self.other = gone, other

    def __len__(self):
        return N

    def __getitem__(self, i):
        if i in self.gone:
            return None
        return torch.full((3,), float(i) if i != self.other else 99.0), i % 2


def test_who_withdrew_leaves_a_row_of_nothing_which_nobody_else_takes(tmp_path):
    def session(dataset):
        model = nn.Linear(3, 2)
        engine = ao.PrivacyEngine(plan, checkpoint=tmp_path / "run", key=KEY)
        loader = DataLoader(dataset, batch_size=B, shuffle=True)
        given = model, torch.optim.SGD(model.parameters(), 0.1), loader
        run = engine, *engine.make_private(*given, like=(torch.zeros(3), 0))
        train(run, engine.step + N // B)
        engine.save()
        engine.close()
        return engine.step

    plan = ao.plan(loader=DataLoader(People(), batch_size=B, shuffle=True), epochs=4, epsilon=8, delta=1e-5)
    assert session(People()) == N // B
    assert session(People(gone={3})) == 2 * N // B
    assert session(People(gone={3, 5})) == 3 * N // B
    for other in (People(gone={5}, other=3), People(gone={3}, other=4)):
        with pytest.raises(CheckpointError, match="rows of the data set are not those"):
            session(other)
    assert session(People(gone={5})) == 4 * N // B  # the very person may come back


class Gaps(Photos):
    """Every third row cannot be read, and a sampler of one's own leaves these out."""

    def __getitem__(self, i):
        if not i % 3:
            raise OSError("the file is gone")
        return super().__getitem__(i)


class BetweenGaps(torch.utils.data.Sampler):
    def __init__(self):
        self.listed = [i for i in range(N) if i % 3]

    def __iter__(self):
        return iter(self.listed)

    def __len__(self):
        return len(self.listed)


@pytest.mark.parametrize("workers", [0, 1])
def test_rows_that_cannot_be_read_hide_no_others(tmp_path, workers):
    """One of them was enough for nothing to be compared, silently."""
    settings = {"sampler": BetweenGaps(), "num_workers": workers, "order": ao.participation.MinSeparation(9, 1, 2)}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run = start(Gaps(np.arange(N)), tmp_path / "run", epochs=None, **settings)
        train(run, 2)
    run[0].save()
    run[0].close()
    with pytest.raises(CheckpointError) as caught:
        start(Gaps(np.roll(np.arange(N), 3)), tmp_path / "run", epochs=None, **settings)
    changed, compared = caught.value.changed
    assert changed == compared > (8 if workers else 24)
