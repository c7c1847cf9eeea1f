"""Row-sparse clipped sums: against those of whole tables, and against plain autograd one example at a time."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from anyorder.clipping import Adaptive, Automatic, PerGroup, norms
from anyorder.clipping.norms import EmbeddingUse, UnitMap, Weights, round_down
from anyorder.clipping.per_example import GhostClipping, make_clipping
from clipping.brute import assert_close, clipped_sum, per_example, run
from laws.cases import over

V, D, B = 11, 3, 7


class Held:
    """A table whose rows stand elsewhere than in the model's parameter; counts what is read."""

    def __init__(self, weight):
        self.weight = weight.detach().clone()
        self.num_rows, self.width = weight.shape
        self.dtype, self.device = weight.dtype, weight.device
        self.reads = []

    def read(self, ids):
        self.reads.append(ids.clone())
        return self.weight[ids]


def tables_of(module, *names):
    """The tables of some parameters, which get stand-ins without rows."""
    parameters = dict(module.named_parameters())
    tables = {name: Held(parameters[name]) for name in names}
    for name in names:
        parameters[name].data = parameters[name].data[:0].clone()
    return tables


def dense(sums):
    return {name: value.to_dense() if value.is_sparse else value for name, value in sums.items()}


class Bow(nn.Module):
    """A table, the mean of what was read, a linear map: not in the form of torch's own layers in a row."""

    def __init__(self, padding=None, dtype=torch.float64):
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(V, D, padding_idx=padding, sparse=True, dtype=dtype)
        self.out = nn.Linear(D, 2, dtype=dtype)

    def forward(self, x):
        return self.out(self.table(x).tanh().mean(1))


class Pairs(nn.Module):
    """One table, read at centres and at contexts."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(V, D, sparse=True, dtype=torch.float64)
        self.again = self.table

    def forward(self, x):
        return (self.table(x[:, :1]) * self.again(x[:, 1:])).sum(2)


class TwoTables(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(V, D, sparse=True, dtype=torch.float64)
        self.other = nn.Embedding(5, 2, sparse=True, dtype=torch.float64)
        self.out = nn.Linear(D + 2, 2, dtype=torch.float64)

    def forward(self, x):
        return self.out(torch.cat([self.table(x).sum(1), self.other(x[:, :2] % 5).sum(1)], 1).tanh())


def plain(padding=None):
    torch.manual_seed(0)
    layers = nn.Embedding(V, D, padding_idx=padding, sparse=True), nn.Flatten(), nn.Tanh(), nn.Linear(4 * D, 2)
    return nn.Sequential(*layers).double()


def bags(mode, padding):
    torch.manual_seed(0)
    bag = nn.EmbeddingBag(V, D, mode=mode, padding_idx=padding, sparse=True)
    nn.init.normal_(bag.weight)
    return nn.Sequential(bag, nn.Tanh(), nn.Linear(D, 2)).double()


class Weighted(nn.Module):
    """A bag of which a parameter gives the weights."""

    def __init__(self, padding=None):
        super().__init__()
        torch.manual_seed(0)
        self.bag = nn.EmbeddingBag(V, D, mode="sum", padding_idx=padding, sparse=True, dtype=torch.float64)
        nn.init.normal_(self.bag.weight)  # the row of padding too, which torch makes zero
        self.weights = nn.Embedding(V, 1, dtype=torch.float64)
        self.out = nn.Linear(D, 2, dtype=torch.float64)

    def forward(self, x):
        return self.out(self.bag(x, per_sample_weights=self.weights(x).squeeze(2).exp()))


class Several(nn.Module):
    """Two bags for each example, by the function."""

    def __init__(self, mode="mean"):
        super().__init__()
        torch.manual_seed(0)
        self.bag, self.mode = nn.Parameter(torch.randn(V, D, dtype=torch.float64)), mode
        self.out = nn.Linear(2 * D, 2, dtype=torch.float64)

    def forward(self, x):
        both = F.embedding_bag(x.reshape(2 * len(x), 2), self.bag, mode=self.mode, sparse=True, padding_idx=-3)
        return self.out(both.reshape(len(x), -1).tanh())


MODELS = {
    "lookups": (Bow, ["table.weight"]),
    "padding": (lambda: Bow(4), ["table.weight"]),
    "tied": (Pairs, ["table.weight"]),
    "two tables": (TwoTables, ["table.weight", "other.weight"]),
    "plain": (plain, ["0.weight"]),
    "plain, padding": (lambda: plain(-2), ["0.weight"]),
    **{
        f"bag, {mode}, {padding}": (lambda mode=mode, padding=padding: bags(mode, padding), ["0.weight"])
        for mode in ("sum", "mean")
        for padding in (None, 4)
    },
    "weighted bag": (Weighted, ["bag.weight"]),
    "weighted bag, padding": (lambda: Weighted(4), ["bag.weight"]),
    "two bags, mean": (Several, ["bag"]),
    "two bags, sum": (lambda: Several("sum"), ["bag"]),
}
RULES = [None, Automatic(), PerGroup(), Adaptive()]


def batch(size=B):
    generator = torch.Generator().manual_seed(3)
    return torch.randint(0, V, (size, 4), generator=generator), torch.randint(0, 2, (size,), generator=generator)


def loss(outputs, y):
    return (outputs - y[:, None]).square().mean()


@pytest.fixture(params=MODELS)
def model(request):
    make, names = MODELS[request.param]
    return make, names


GROUPS = {"examples": torch.arange(B), "units": torch.tensor([3, 1, 3, 3, 0, 1, 3])}


@over("chunk_size", [None, 2])
@over("groups", GROUPS.values())
@over("stand_in", [True, False])
def test_sums_are_those_of_autograd_one_example_at_a_time(model, groups, stand_in, chunk_size):
    make, names = model
    module = make()
    x, y = batch()
    expected = clipped_sum([dense(g) for g in per_example(module, x, y, loss)], groups, 0.05)
    whole = copy.deepcopy(module)
    tables = tables_of(module if stand_in else copy.deepcopy(module), *names)
    clipping = make_clipping(module, chunk_size, tables=tables)
    # the mean over B examples of each example's own mean
    outputs, sums = run(clipping, x, y, loss, groups=groups, clip_norm=0.05)
    torch.testing.assert_close(outputs, whole(x))
    for name in names:
        value = sums[name]
        assert (value.layout, value.is_coalesced(), value.sparse_dim()) == (torch.sparse_coo, True, 1)
        assert value.shape == (tables[name].num_rows, tables[name].width)
        ids = value.indices()[0]
        assert (ids[1:] > ids[:-1]).all()
        assert set(ids.tolist()) <= set(torch.cat([r.flatten() for r in tables[name].reads]).tolist())
    assert_close(dense(sums), expected, 1e-10)


@over("rule", RULES)
def test_every_rule_sees_the_norms_that_it_would_see_of_a_whole_table(model, rule):
    make, names = model
    module = make()
    x, y = batch()
    whole = copy.deepcopy(module)
    _, expected = run(GhostClipping(whole, rule=rule), x, y, loss, clip_norm=0.05)
    tables = tables_of(module, *names)
    _, sums = run(make_clipping(module, rule=rule, tables=tables), x, y, loss, clip_norm=0.05)
    assert_close(dense(sums), expected, 1e-10)


def test_a_dense_bag_has_the_gradients_of_autograd():
    x, y = batch()
    for name, (make, _) in MODELS.items():
        if "bag" in name:
            module = make()
            expected = clipped_sum([dense(g) for g in per_example(module, x, y, loss)], GROUPS["units"], 0.05)
            _, sums = run(GhostClipping(module), x, y, loss, groups=GROUPS["units"], clip_norm=0.05)
            assert not any(value.is_sparse for value in sums.values())
            assert_close(sums, expected, 1e-10)


def _use(ids, seed=0):
    torch.manual_seed(seed)
    return EmbeddingUse(ids, torch.randn(*ids.shape, 3), 50, None, torch.float32)


def test_rows_that_no_unit_reads_twice_are_summed_as_others_are():
    """The way without an addition in it gives the bits of the other; a row that a unit reads twice ends it."""
    units = UnitMap.of(torch.arange(8), torch.device("cpu"))
    ids = torch.stack([torch.randperm(20, generator=torch.Generator().manual_seed(i))[:5] for i in range(8)])
    weights = Weights(torch.linspace(0.1, 1, 8), torch.linspace(0.1, 1, 8))
    short = norms._each_once(_use(ids), units)
    # The same uses in two parts go the other way.
    left, right = _use(ids), _use(ids)
    left.ids, left.output_gradients = left.ids[:, :2], left.output_gradients[:, :2]
    right.ids, right.output_gradients = right.ids[:, 2:], right.output_gradients[:, 2:]
    long = norms.settle_lookups([left, right], units)
    assert short is not None
    torch.testing.assert_close(short.squares, long.squares, rtol=1e-12, atol=0)
    ours, theirs = short.total(weights), long.total(weights)
    assert ours.is_coalesced()
    assert torch.equal(ours.indices(), theirs.indices())
    assert torch.equal(ours.values(), theirs.values())
    ids[3, 4] = ids[3, 0]
    assert norms._each_once(_use(ids), units) is None


def test_factors_are_rounded_towards_zero():
    """To the last number of float32 that is not further from 0, as torch finds it; also where there is none above."""
    odd = [0.0, 1.0, 1e300, -1e300, 1e-46, -1e-46, 1e-40, -0.3, 3e38, float("inf")]
    exact = torch.cat([torch.rand(2000, dtype=torch.float64), torch.tensor(odd, dtype=torch.float64)])
    rounded, near = round_down(exact, torch.float32), exact.float()
    assert torch.equal(rounded, torch.where(near.double().abs() > exact.abs(), near.nextafter(torch.zeros(())), near))
    assert bool((rounded.double().abs() <= exact.abs()).all())


class FromTheEnd(Bow):
    """Its row of padding is named from the end, to the function; layers count it from the start."""

    def forward(self, x):
        return self.out(F.embedding(x, self.table.weight, padding_idx=-3, sparse=True).tanh().mean(1))


def test_a_row_of_padding_may_be_named_from_the_end():
    found = []
    for module in (FromTheEnd(), Bow(V - 3)):
        torch.nn.init.ones_(module.table.weight)
        x, y = batch()
        clipping = make_clipping(module, tables={"table.weight": Held(module.table.weight)})
        found.append(dense(run(clipping, x, y, loss)[1]))
    assert V - 3 in x
    assert_close(*found, 1e-12)
