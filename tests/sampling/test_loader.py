"""The participation read off a loader is the one its batches have; the private loader gives the same batches."""

import collections
import time
from itertools import islice

import numpy as np
import pytest
import torch
from torch.utils import data
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from anyorder.errors import LoaderError, ParticipationError
from anyorder.ledger import Ledger, replay
from anyorder.noise import NoiseSource
from anyorder.participation import EpochShuffle, FixedOrder, PoissonSampling, SingleEpoch
from anyorder.sampling.loader import PrivateLoader, extract_units, find_participation, poisson_loader
from anyorder.sampling.samplers import EpochShuffleSampler, FixedOrderSampler, PoissonBatchSampler

SOURCE = NoiseSource(bytes(32))
N = 23
DATA = TensorDataset(torch.arange(N), torch.arange(N) * 2.0)


class Backwards(data.Sampler):
    def __iter__(self):
        return iter(range(N - 1, -1, -1))

    def __len__(self):
        return N


class BackwardsToldEpoch(Backwards):
    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        return iter([(i + self.epoch) % N for i in range(N)])


class Pairs(data.Sampler):
    def __iter__(self):
        return iter([[0, 1], [2, 3]])

    def __len__(self):
        return 2


class OwnLoader(DataLoader):
    def __iter__(self):
        return reversed(list(super().__iter__()))


class SubclassedRandom(data.RandomSampler):
    pass


class Stream(IterableDataset):
    def __iter__(self):
        for i in range(10):
            yield {"user": i % 5, "name": f"u{i % 5}", "x": float(i)}


class Slow(Dataset):
    """Items that tell their own index, slower for some workers; and fetched by the batch."""

    def __len__(self):
        return 40

    def __getitem__(self, i):
        time.sleep(0.01 * (i % 7 == 0))
        return {"index": i, "worker": data.get_worker_info().id}


class Bulk(Dataset):
    def __len__(self):
        return N

    def __getitem__(self, indices):
        return torch.as_tensor(indices) + 100

    def __getitems__(self, indices):
        return [torch.as_tensor(i + 100) for i in indices]


class Failing(Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, i):
        if i == 5:
            raise RuntimeError("example 5 is broken")
        return i


def nothing(units, position):
    return None


def private(loader, unit=None, seed=0):
    """The private loader and the list to which it adds (units, position)."""
    calls = []
    return PrivateLoader(loader, unit=unit, on_batch=lambda u, p: calls.append((list(u), p)), seed=seed), calls


def distributed(rank, shuffle, drop_last=True, size=N):
    dataset = TensorDataset(torch.arange(size))
    sampler = data.DistributedSampler(dataset, 3, rank, shuffle=shuffle, seed=5, drop_last=drop_last)
    return DataLoader(dataset, batch_size=2, sampler=sampler)


KNOWN = {
    "sequential": (lambda: DataLoader(DATA, batch_size=4), FixedOrder(18, 3, 6), "sequential"),
    "drop last": (lambda: DataLoader(DATA, batch_size=4, drop_last=True), FixedOrder(15, 3, 5), "sequential"),
    "shuffle": (lambda: DataLoader(DATA, batch_size=5, shuffle=True), EpochShuffle(3, 5), "shuffled anew"),
    "some": (
        lambda: DataLoader(DATA, batch_size=5, sampler=data.RandomSampler(DATA, num_samples=12)),
        EpochShuffle(3, 3), "shuffled anew",
    ),
    "fixed": (lambda: DataLoader(DATA, batch_size=4, sampler=FixedOrderSampler(DATA)), FixedOrder(18, 3, 6), "once"),
    "keyed": (
        lambda: DataLoader(DATA, batch_size=4, sampler=EpochShuffleSampler(DATA, 3)),
        EpochShuffle(3, 6), "shuffled anew",
    ),
    "subset": (
        lambda: DataLoader(DATA, batch_size=2, sampler=data.SubsetRandomSampler([3, 9, 4, 20, 1])),
        EpochShuffle(3, 3), "a subset of 5",
    ),
    "batch sampler": (
        lambda: DataLoader(DATA, batch_sampler=data.BatchSampler(data.SequentialSampler(DATA), 6, False)),
        FixedOrder(12, 3, 4), "sequential",
    ),
    "bulk": (
        lambda: DataLoader(Bulk(), batch_size=None, sampler=data.BatchSampler(data.RandomSampler(Bulk()), 6, True)),
        EpochShuffle(3, 3), "shuffled anew",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", KNOWN)
def test_found_participation_is_the_one_the_batches_have(name):
    make, expected, phrase = KNOWN[name]
    loader = make()
    found = find_participation(loader, 3)
    assert found.participation == expected
    assert phrase in found.order
    single = find_participation(loader, 1)
    assert single.participation == SingleEpoch(expected.n // 3)
    mine, calls = private(loader)
    for _ in range(3):
        for _ in mine:
            pass
    assert [position for _, position in calls] == list(range(expected.n))
    assert max(len(units) for units, _ in calls) == found.batch_size
    assert len({u for units, _ in calls for u in units}) <= found.dataset_size
    replay(found.participation, [units for units, _ in calls])
    per_epoch = found.steps_per_epoch
    replay(single.participation, [units for units, _ in calls[per_epoch : 2 * per_epoch]])
    if isinstance(expected, EpochShuffle):  # the claim is not looser than the truth
        with pytest.raises(ParticipationError):
            replay(FixedOrder(expected.n, 3, expected.steps_per_epoch), [units for units, _ in calls])


@pytest.mark.parametrize("shuffle", [False, True])
def test_distributed_steps_are_those_of_all_ranks_together(shuffle):
    found = find_participation(distributed(0, shuffle), 2)
    assert found.participation == (EpochShuffle(2, 4) if shuffle else FixedOrder(8, 2, 4))
    assert (found.batch_size, found.dataset_size, found.steps_per_epoch) == (6, N, 4)
    runs = [private(distributed(rank, shuffle)) for rank in range(3)]
    for mine, _ in runs:
        for _ in range(2):
            list(mine)
    steps = [[unit for _, calls in runs for unit in calls[t][0]] for t in range(8)]
    replay(found.participation, steps)
    assert all(len(set(units)) == len(units) for units in steps)
    assert (sorted(steps[0]) != sorted(steps[4])) == shuffle  # the epoch was told to the sampler


def test_distributed_padding_is_refused_and_an_even_deal_is_not():
    with pytest.raises(LoaderError, match="repeats 1 example"):
        find_participation(distributed(0, True, drop_last=False), 2)
    assert find_participation(distributed(0, True, drop_last=False, size=24), 2).participation == EpochShuffle(2, 4)


def test_undistributed_sampler_on_several_ranks_is_refused(monkeypatch):
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 4)
    with pytest.raises(LoaderError, match="each of the 4 ranks would hand out the whole data set"):
        find_participation(DataLoader(DATA, shuffle=True), 1)
    with pytest.raises(LoaderError, match="deals the examples out to 3 ranks, and 4 take part"):
        find_participation(distributed(0, True), 2)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 3)
    assert find_participation(distributed(0, True), 2).participation == EpochShuffle(2, 4)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 1)
    assert find_participation(DataLoader(DATA, batch_size=N), 2).participation == FixedOrder(2, 2, 1)


def test_poisson_is_found_only_from_its_own_sampler():
    sampler = PoissonBatchSampler(N, 0.25, 7, SOURCE)
    found = find_participation(DataLoader(DATA, batch_sampler=sampler), 2)
    assert found.participation == PoissonSampling(14, 0.25)
    assert (found.batch_size, found.dataset_size, found.steps_per_epoch) == (6, N, 7)


REFUSED = {
    "replacement": (lambda: DataLoader(DATA, sampler=data.RandomSampler(DATA, replacement=True)), "replacement=True"),
    "more": (lambda: DataLoader(DATA, sampler=data.RandomSampler(DATA, num_samples=N + 1)), f"num_samples={N + 1}"),
    "weighted": (lambda: DataLoader(DATA, sampler=data.WeightedRandomSampler([1.0] * N, 4)), "weight the loss"),
    "own sampler": (lambda: DataLoader(DATA, sampler=Backwards()), "Backwards is not known.*participation="),
    "subclass": (lambda: DataLoader(DATA, sampler=SubclassedRandom(DATA)), "SubclassedRandom is not known"),
    "own batches": (
        lambda: DataLoader(DATA, batch_sampler=Pairs()),
        "batch sampler Pairs is not known.*participation=",
    ),
    "stream": (lambda: DataLoader(Stream()), "IterableDataset.*unit=.*participation="),
    "list": (lambda: [torch.zeros(3)], "torch DataLoader.*got list"),
    "no batches": (lambda: DataLoader(DATA, batch_size=None), "batch_size=None"),
    "own iteration": (lambda: OwnLoader(DATA), "OwnLoader overrides"),
    "any order": (lambda: DataLoader(DATA, num_workers=1, in_order=False), "in_order=True"),
    "twice": (lambda: DataLoader(DATA, sampler=data.SubsetRandomSampler([1, 2, 1])), "distinct"),
    "negative": (lambda: DataLoader(DATA, sampler=data.SubsetRandomSampler([1, -2])), "negative"),
    "no batch": (lambda: DataLoader(DATA, batch_size=N + 1, drop_last=True), "must have a batch"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_known_is_refused_with_advice(name):
    make, message = REFUSED[name]
    with pytest.raises(LoaderError, match=message):
        find_participation(make(), 2)


def test_participation_of_units_is_not_read_off_a_sampler():
    with pytest.raises(LoaderError, match="participation="):
        find_participation(DataLoader(DATA), 2, unit=0)


@pytest.mark.parametrize(
    "name", [name for name in REFUSED if name in ("list", "no batches", "own iteration", "any order")]
)
def test_loaders_that_cannot_be_followed(name):
    with pytest.raises(LoaderError, match=REFUSED[name][1]):
        PrivateLoader(REFUSED[name][0](), on_batch=nothing, seed=0)


# -- the private loader ----------------------------------------------------------------------------------------------


def test_batches_reach_the_user_unchanged_right_after_their_units():
    loader = DataLoader(DATA, batch_size=4, drop_last=True)
    order = []
    mine = PrivateLoader(loader, on_batch=lambda u, p: order.append(("units", u.tolist(), p)), seed=0)
    for batch in mine:
        order.append(("batch", batch))  # noqa: PERF401 - the loader writes to the same list
    assert len(order) == 2 * len(loader) == 2 * len(mine)
    for p, expected in enumerate(loader):
        (_, units, position), (_, batch) = order[2 * p : 2 * p + 2]
        assert (units, position) == (expected[0].tolist(), p)
        assert type(batch) is type(expected)
        assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(batch, expected, strict=True))
    assert mine.dataset is DATA
    assert mine.sampler is loader.sampler
    assert mine.batch_size == 4


def test_own_batches_of_any_type_pass():
    class Mine(collections.UserDict):
        pass

    loader = DataLoader(DATA, batch_size=3, collate_fn=lambda rows: Mine(rows=rows))
    mine, calls = private(loader)
    assert all(type(batch) is Mine for batch in mine)
    assert calls[-1] == ([21, 22], 7)


@pytest.mark.parametrize("persistent", [False, True])
def test_units_are_those_of_the_batch_with_workers(persistent):
    loader = DataLoader(
        Slow(), batch_size=3, shuffle=True, num_workers=2, prefetch_factor=3, persistent_workers=persistent
    )
    mine, calls = private(loader)
    seen = []
    for batch in islice(mine, 5):  # left early, with batches under way
        seen.append(batch["index"].tolist())
        assert calls[-1] == (seen[-1], len(seen) - 1)
        mine.mark_used()
    assert mine.position == 5
    assert len(mine) == 14 - 5
    workers = set()
    for batch in mine:  # continued behind the last batch that was used
        seen.append(batch["index"].tolist())
        workers |= set(batch["worker"].tolist())
        assert calls[-1] == (seen[-1], len(seen) - 1)
    assert workers == {0, 1}
    assert sorted(i for rows in seen for i in rows) == list(range(40))


def test_bulk_fetching_keeps_its_units():
    for loader in (
        DataLoader(Bulk(), batch_size=5, shuffle=True),
        DataLoader(Bulk(), batch_size=None, sampler=data.BatchSampler(data.RandomSampler(Bulk()), 5, False)),
    ):
        mine, calls = private(loader)
        for batch in mine:
            assert (batch - 100).tolist() == calls[-1][0]
        assert len(calls) == 5


def test_spawned_workers():
    loader = DataLoader(DATA, batch_size=8, num_workers=1, multiprocessing_context="spawn")
    mine, calls = private(loader)
    assert [batch[0].tolist() for batch in mine] == [units for units, _ in calls]


@pytest.mark.parametrize("workers", [0, 1])
def test_the_users_exceptions_pass_and_the_place_is_kept(workers):
    mine, calls = private(DataLoader(Failing(), batch_size=2, num_workers=workers))
    with pytest.raises(RuntimeError, match="example 5 is broken"):
        list(mine)
    assert calls == [([0, 1], 0), ([2, 3], 1)]
    mine.seek(3)
    assert [batch.tolist() for batch in mine] == [[6, 7]]
    assert calls[-1] == ([6, 7], 3)


def test_settings_are_kept():
    generator = torch.Generator()
    loader = DataLoader(
        DATA, batch_size=4, num_workers=1, worker_init_fn=print, timeout=9, prefetch_factor=5, persistent_workers=True,
        generator=generator, multiprocessing_context="spawn", drop_last=True,
    )  # fmt: skip
    inner = PrivateLoader(loader, on_batch=nothing, seed=0)._loader
    for name in ("dataset", "num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn",
                 "multiprocessing_context", "prefetch_factor", "persistent_workers"):  # fmt: skip
        assert getattr(inner, name) is getattr(loader, name), name
    assert len(inner) == 5


def test_refusal_of_the_ledger_withholds_the_batch():
    ledger = Ledger(SingleEpoch(100))
    mine = PrivateLoader(DataLoader(DATA, batch_size=5), on_batch=lambda u, p: ledger.record(ledger.step, u), seed=0)
    assert len(list(mine)) == 5
    given = []
    with pytest.raises(ParticipationError):
        given.extend(mine)
    assert not given
    assert ledger.step == 5


SEEKABLE = [name for name in KNOWN if name != "fixed"] + ["told", "poisson", "rank"]


def make_seekable(name):
    if name == "told":
        return DataLoader(DATA, batch_size=4, sampler=BackwardsToldEpoch())
    if name == "poisson":
        return poisson_loader(DataLoader(DATA, batch_size=4), PoissonSampling(6, 0.3), SOURCE)
    return distributed(1, True) if name == "rank" else KNOWN[name][0]()


@pytest.mark.parametrize("name", SEEKABLE)
def test_seek_gives_the_batches_that_the_run_would_have_given(name):
    mine, calls = private(make_seekable(name), seed=7)
    for _ in range(3):
        list(mine)
    steps = len(mine)
    for position in (0, 1, steps - 1, steps, steps + 1, 3 * steps - 1):
        again, heard = private(make_seekable(name), seed=7)
        again.seek(position)
        assert again.position == position
        assert len(again) == steps - position % steps
        while again.position < 3 * steps:
            list(again)
        assert heard == calls[position:]
        assert len(again) == steps


def test_seek_loads_nothing_that_it_skips():
    class Counting(Dataset):
        loaded = 0

        def __len__(self):
            return 100

        def __getitem__(self, i):
            Counting.loaded += 1
            return i

    mine, _ = private(DataLoader(Counting(), batch_size=10, shuffle=True))
    mine.seek(27)
    assert len(list(mine)) == 3
    assert Counting.loaded == 30


def test_shuffled_order_depends_on_the_seed_alone():
    def order(seed):
        torch.manual_seed(len(str(seed)))
        mine, calls = private(DataLoader(DATA, batch_size=5, shuffle=True), seed=seed)
        list(mine), list(mine)
        return calls

    assert order(b"a") == order(b"a") != order(b"b")
    assert order(1)[0][0] != order(1)[5][0]


def test_an_iteration_that_was_left_is_continued_behind_the_last_used_batch():
    mine, calls = private(DataLoader(DATA, batch_size=4, shuffle=True))
    next(iter(mine))  # a look at the data costs nothing
    assert mine.position == 0
    assert len(mine) == 6
    for count, _ in enumerate(mine):
        if count < 3:
            mine.mark_used()
        if count == 4:
            break
    assert mine.position == 3
    rest = list(mine)
    assert len(rest) == 3
    assert mine.position == 6
    assert [position for _, position in calls] == [0, *range(5), 3, 4, 5]
    assert calls[0] == calls[1]
    assert sorted(i for units, _ in [*calls[1:4], *calls[6:]] for i in units) == list(range(N))


def test_torch_generator_is_left_alone():
    mine, _ = private(DataLoader(DATA, batch_size=4, shuffle=True))
    stream, _ = private(DataLoader(Stream(), batch_size=4), unit=lambda batch: range(len(batch)))
    before = torch.get_rng_state()
    list(mine), list(stream)
    assert torch.equal(before, torch.get_rng_state())


def test_orders_that_cannot_be_called_up_again():
    for loader in (DataLoader(DATA, sampler=Backwards()), DataLoader(DATA, batch_sampler=Pairs())):
        mine, calls = private(loader)
        mine.seek(0)
        assert len(list(mine)) == len(calls) == len(loader)
        with pytest.raises(LoaderError, match=r"cannot be called up again.*set_epoch"):
            mine.seek(1)
    replaced, calls = private(DataLoader(DATA, batch_size=2, sampler=data.RandomSampler(DATA, replacement=True)))
    assert [batch[0].tolist() for batch in replaced] == [units for units, _ in calls]


def test_negative_index_is_refused():
    class Last(Pairs):
        def __iter__(self):
            return iter([[0, -1]])

    mine, calls = private(DataLoader(DATA, batch_sampler=Last()))
    with pytest.raises(LoaderError, match="index -1"):
        list(mine)
    assert not calls


def test_state_restores_place_and_order():
    mine, calls = private(DataLoader(DATA, batch_size=4, sampler=FixedOrderSampler(DATA)))
    iterator = iter(mine)
    for _ in range(4):
        next(iterator)
    mine.mark_used()
    state = mine.state_dict()
    list(iterator), list(mine)
    again, heard = private(DataLoader(DATA, batch_size=4, sampler=FixedOrderSampler(DATA)))
    again.load_state_dict(state)
    list(again), list(again)
    assert heard == calls[4:]


@pytest.mark.parametrize(
    ("loader", "name"),
    [
        (DataLoader(DATA, batch_size=5, shuffle=True), "steps_per_epoch"),
        (DataLoader(DATA, batch_size=4), "order"),
        (DataLoader(TensorDataset(torch.arange(N + 1)), batch_size=4, shuffle=True), "dataset_size"),
        (DataLoader(Stream(), batch_size=4), "order"),
    ],
)
def test_state_of_another_loader_is_refused(loader, name):
    state = private(DataLoader(DATA, batch_size=4, shuffle=True))[0].state_dict()
    mine, _ = private(loader, unit="user" if isinstance(loader.dataset, Stream) else None)
    with pytest.raises(LoaderError, match=f"not the one of the checkpoint: {name} was"):
        mine.load_state_dict(state)
    assert mine.position == 0


# -- units by key ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("unit", ["user", "name", lambda batch: [int(u) + 10 for u in batch["user"]]])
def test_streams_have_units_by_key(unit):
    mine, calls = private(DataLoader(Stream(), batch_size=4), unit=unit)
    assert len(list(mine)) == 3
    expected = [[0, 1, 2, 3], [4, 0, 1, 2], [3, 4]]
    kind = {"user": int, "name": lambda u: f"u{u}"}.get(unit, lambda u: u + 10)
    assert calls == [([kind(u) for u in row], p) for p, row in enumerate(expected)]
    list(mine)
    assert calls[-1][1] == 5


def test_streams_need_keys_and_their_own_positioning():
    with pytest.raises(LoaderError, match=r"no indices.*unit="):
        PrivateLoader(DataLoader(Stream()), on_batch=nothing, seed=0)
    mine, calls = private(DataLoader(Stream(), batch_size=4), unit="user")
    mine.seek(0)
    with pytest.raises(LoaderError, match="only its source can"):
        mine.seek(2)
    mine.load_state_dict({"position": 2})
    list(mine)
    assert calls[0][1] == 2
    with pytest.raises(TypeError):
        len(mine)


def test_keys_of_a_map_style_data_set():
    users = TensorDataset(torch.arange(6), torch.tensor([7, 7, 8, 8, 9, 9]))
    mine, calls = private(DataLoader(users, batch_size=3), unit=1)
    list(mine)
    assert calls == [([7, 7, 8], 0), ([8, 9, 9], 1)]


@pytest.mark.parametrize(
    ("batch", "unit", "expected"),
    [
        ((torch.zeros(2, 3), torch.tensor([3, 1], dtype=torch.int16)), 1, [3, 1]),
        ([torch.zeros(2, 3), ["b", "a"]], -1, None),
        ([torch.zeros(2, 3), ["b", "a"]], 1, ["b", "a"]),
        ({"u": np.array([1, 1])}, "u", [1, 1]),
        ({"u": np.array(["x", "y"], object)}, "u", ["x", "y"]),
        ({"u": ("x", "y")}, "u", ["x", "y"]),
        ({"u": torch.tensor([])}, "u", []),
        ({"u": torch.tensor([1.0])}, "u", None),
        ({"u": torch.tensor([[1]])}, "u", None),
        ({"u": torch.tensor(1)}, "u", None),
        ({"u": "xy"}, "u", None),
        ({"u": [1, "x"]}, "u", None),
        ({"u": 3}, "u", None),
        ({"u": [1]}, "v", None),
        ((torch.zeros(2),), "u", None),
        (torch.tensor([5, 6]), 0, None),
        ((torch.zeros(2),), lambda batch: None, None),
    ],
)
def test_extraction_of_units(batch, unit, expected):
    if expected is None:
        with pytest.raises(LoaderError, match="unit="):
            extract_units(batch, unit)
    else:
        assert list(extract_units(batch, unit)) == expected


# -- Poisson sampling ------------------------------------------------------------------------------------------------


def test_poisson_loader_draws_its_sampler_batches_and_empty_ones():
    rule = PoissonSampling(200, 0.05)
    images = TensorDataset(torch.zeros(N, 3, 4), torch.arange(N))
    loader = poisson_loader(DataLoader(images, batch_size=4, shuffle=True), rule, SOURCE)
    mine, calls = private(loader)
    sizes = set()
    for _ in range(10):  # epochs of 1/q steps
        for x, index in mine:
            sizes.add(len(x))
            assert index.tolist() == calls[-1][0]
            assert x.shape == (len(index), 3, 4)
            assert index.dtype == torch.int64
    assert 0 in sizes
    assert [units for units, _ in calls] == list(PoissonBatchSampler(N, 0.05, 200, SOURCE))
    assert find_participation(loader, 10).participation == rule
    assert len(poisson_loader(DataLoader(images), PoissonSampling(199, 0.05), SOURCE)) == 199


Point = collections.namedtuple("Point", "x name")


@pytest.mark.parametrize(
    "items",
    [
        [{"x": torch.zeros(2), "n": "a", "m": {"k": 1}}] * 3,
        [Point(torch.zeros(2), "a")] * 3,
        [(torch.zeros(2), ["a", "b"], 1.5)] * 3,
        [np.zeros(2)] * 3,
    ],
)
def test_empty_batches_keep_the_structure(items):
    loader = poisson_loader(DataLoader(items, batch_size=2), PoissonSampling(40, 0.2), SOURCE)
    full = empty = None
    for batch in loader:
        flat, structure = torch.utils._pytree.tree_flatten(batch)
        tensors = [leaf for leaf in flat if isinstance(leaf, torch.Tensor)]
        if len(tensors[0]):
            full = [t.shape[1:] for t in tensors], [t.dtype for t in tensors], type(batch)
        else:
            assert not [leaf for leaf in flat if isinstance(leaf, str)], structure
            assert all(len(t) == 0 for t in tensors)
            empty = [t.shape[1:] for t in tensors], [t.dtype for t in tensors], type(batch)
    assert full == empty is not None


@pytest.mark.parametrize("loader", [DataLoader(Stream()), DataLoader(Bulk(), batch_size=None), [1]])
def test_poisson_needs_examples_by_index(loader):
    with pytest.raises(LoaderError):
        poisson_loader(loader, PoissonSampling(2, 0.5), SOURCE)


def test_batches_that_cannot_be_empty_are_refused():
    loader = poisson_loader(DataLoader(DATA, collate_fn=lambda rows: "text"), PoissonSampling(9, 1e-9), SOURCE)
    with pytest.raises(LoaderError, match="no examples cannot be made from str"):
        list(loader)
