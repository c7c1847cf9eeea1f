"""The private loader gives the same batches, tells their units first, and finds its place again."""

import collections
import copy
import time
from itertools import islice

import pytest
import torch
from torch.utils import data
from torch.utils.data import DataLoader, Dataset, TensorDataset

from anyorder.errors import LoaderError, ParticipationError
from anyorder.ledger import Ledger
from anyorder.participation import PoissonSampling, SingleEpoch
from anyorder.sampling.loader import PrivateLoader
from anyorder.sampling.samplers import FixedOrderSampler
from anyorder.sampling.secret import secret_loader
from sampling.loaders import (
    DATA,
    KNOWN,
    SOURCE,
    Backwards,
    BackwardsToldEpoch,
    Bulk,
    N,
    Pairs,
    Stream,
    distributed,
    nothing,
    private,
)


class Slow(Dataset):
    """Items that tell their own index, slower for some workers; and fetched by the batch."""

    def __len__(self):
        return 40

    def __getitem__(self, i):
        time.sleep(0.01 * (i % 7 == 0))
        return {"index": i, "worker": data.get_worker_info().id}


class Failing(Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, i):
        if i == 5:
            raise RuntimeError("example 5 is broken")
        return i


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
    for setting in ("dataset", "sampler", "batch_sampler", "batch_size", "drop_last", "num_workers", "pin_memory"):
        assert getattr(mine, setting) is getattr(loader, setting)
    assert copy.copy(mine).sampler is loader.sampler
    with pytest.raises(AttributeError, match="no attribute 'multiprocessing_context'"):
        _ = mine.multiprocessing_context
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
        mine.mark_used(mine.identity.newest())
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
    for name in ("dataset", "num_workers", "pin_memory", "timeout", "worker_init_fn",
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
        return secret_loader(DataLoader(DATA, batch_size=4), PoissonSampling(6, 0.3), SOURCE)
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
            mine.mark_used(mine.identity.newest())
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
        batch = next(iterator)
    mine.mark_used(mine.identity.find(batch))
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
