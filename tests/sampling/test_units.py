"""Units by key, and Poisson batches: whose examples are in a batch, and in an empty one."""

import collections

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from anyorder.errors import LoaderError
from anyorder.participation import PoissonSampling
from anyorder.sampling.loader import PrivateLoader
from anyorder.sampling.read_loader import extract_units, find_participation
from anyorder.sampling.samplers import PoissonBatchSampler
from anyorder.sampling.secret import secret_loader
from sampling.loaders import DATA, SOURCE, Bulk, N, Stream, nothing, private


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
    loader = secret_loader(DataLoader(images, batch_size=4, shuffle=True), rule, SOURCE)
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
    assert len(secret_loader(DataLoader(images), PoissonSampling(199, 0.05), SOURCE)) == 199


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
    loader = secret_loader(DataLoader(items, batch_size=2), PoissonSampling(40, 0.2), SOURCE)
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
        secret_loader(loader, PoissonSampling(2, 0.5), SOURCE)


def test_batches_that_cannot_be_empty_are_refused():
    loader = secret_loader(DataLoader(DATA, collate_fn=lambda rows: "text"), PoissonSampling(9, 1e-9), SOURCE)
    with pytest.raises(LoaderError, match="no examples cannot be made from str"):
        list(loader)
