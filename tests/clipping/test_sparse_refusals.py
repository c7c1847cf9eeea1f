"""What a table is not there for; what is refused has released nothing. And sizes at which a whole table would show."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from anyorder.clipping import layer_rules, register_layer_rule
from anyorder.clipping.norms import count_of
from anyorder.clipping.per_example import make_clipping
from anyorder.errors import ArgumentError, ModelError, NonFiniteError
from clipping.brute import assert_close, run
from clipping.test_sparse_sums import B, Bow, D, Held, V, Weighted, bags, batch, dense, loss, plain, tables_of


class Uses(nn.Module):
    """A table, and a function of it."""

    def __init__(self, use):
        super().__init__()
        torch.manual_seed(0)
        self.table, self.use = nn.Embedding(V, D, sparse=True, dtype=torch.float64), use
        self.out = nn.Linear(D, 2, dtype=torch.float64)

    def forward(self, x):
        return self.use(self, x)


def read(self, x):
    return self.out(self.table(x).mean(1))


OTHER_USES = {
    "linear": lambda self, x: F.linear(self.table(x).mean(1), self.table.weight),
    "matmul": lambda self, x: self.table(x).mean(1) @ self.table.weight.t(),
    "view": lambda self, x: read(self, x) + self.table.weight[:1].sum(),
    "arithmetic": lambda self, x: read(self, x) * (1 + self.table.weight.square().sum()),
    "a detached copy": lambda self, x: read(self, x) + self.table.weight.detach().sum(),
    "in a list": lambda self, x: read(self, x) + torch.cat([self.table.weight, self.table.weight]).sum(),
    "indexing": lambda self, x: self.out(self.table.weight[x].mean(1)),
    "max_norm": lambda self, x: self.out(F.embedding(x, self.table.weight, max_norm=1.0).mean(1)),
    "scale_grad_by_freq": lambda self, x: self.out(F.embedding(x, self.table.weight, scale_grad_by_freq=True).mean(1)),
    "offsets": lambda self, x: self.out(F.embedding_bag(x[0], self.table.weight, x.new_zeros(1))),
    "max": lambda self, x: self.out(F.embedding_bag(x, self.table.weight, mode="max")),
    "weights of another type": lambda self, x: self.out(
        F.embedding_bag(x, self.table.weight, mode="sum", per_sample_weights=x.float())
    ),
    "a transform": lambda self, x: self.out(
        torch.func.vmap(lambda i, w: F.embedding(i, w), (0, None))(x, self.table.weight).mean(1)
    ),
}


@pytest.mark.parametrize("stand_in", [True, False])
@pytest.mark.parametrize("name", OTHER_USES)
def test_another_use_than_lookups_is_refused(name, stand_in):
    module, (x, _) = Uses(OTHER_USES[name]), batch()
    tables = {"table.weight": Held(module.table.weight)}
    if stand_in:
        tables = tables_of(module, "table.weight")
    received = []
    with pytest.raises(ModelError, match="table"):
        outputs = make_clipping(module, tables=tables).forward(
            (x,), {}, groups=torch.arange(B), clip_norm=1.0, scale=1.0, receive=received.append
        )
        outputs.sum().backward()
    assert not received


def test_a_use_that_is_not_seen_shows_by_its_gradient():
    def hidden(self, x):
        with torch._C.DisableTorchFunction():
            size = self.table.weight.square().sum()
        return read(self, x) * (1 + size)

    module, (x, y) = Uses(hidden), batch()
    tables = {"table.weight": Held(module.table.weight)}
    with pytest.raises(ModelError, match="in a function that has no rule"):
        run(make_clipping(module, tables=tables), x, y, loss)


def test_what_a_table_looks_like_may_be_asked():
    def asked(self, x):
        weight = self.table.weight
        assert (weight.shape, weight.size(0), len(weight), weight.numel(), weight.dim()) == ((V, D), V, V, V * D, 2)
        assert (weight.dtype, weight.device.type) == (torch.float64, "cpu")
        return read(self, x) / weight.shape[1] ** 0.5

    module, (x, y) = Uses(asked), batch()
    run(make_clipping(module, tables=tables_of(module, "table.weight")), x, y, loss)


def test_a_layer_with_a_rule_of_its_own_cannot_hold_a_table(monkeypatch):
    monkeypatch.setattr(layer_rules, "_RULES", {})

    @register_layer_rule(Bow)
    def rule(layer, activations, backprops):
        raise AssertionError

    module, (x, y) = nn.Sequential(Bow()), batch()
    with pytest.raises(ModelError, match="uses the table 0.table.weight"):
        run(make_clipping(module, tables={"0.table.weight": Held(module[0].table.weight)}), x, y, loss)


@pytest.mark.parametrize("make", [plain, Bow, lambda: bags("sum", None)])
def test_an_id_that_is_no_row_is_refused_and_not_told(make):
    module, (x, y) = make(), batch()
    name = next(n for n, p in module.named_parameters() if p.shape == (V, D))
    clipping = make_clipping(module, tables=tables_of(module, name))
    for bad in (-977, 977):
        x[3, 1] = bad
        with pytest.raises(ModelError, match="from 0 to 10") as error:
            run(clipping, x, y, loss)
        assert "977" not in str(error.value)


@pytest.mark.parametrize("bad", [-1, V])
@pytest.mark.parametrize("make", [plain, Bow, lambda: bags("sum", None)])
def test_the_first_ids_that_are_no_rows_are_refused(make, bad):
    module, (x, y) = make(), batch()
    name = next(n for n, p in module.named_parameters() if p.shape == (V, D))
    clipping = make_clipping(module, tables=tables_of(module, name))
    x[3, 1] = bad
    with pytest.raises(ModelError, match="from 0 to 10"):
        run(clipping, x, y, loss)


def test_a_model_that_cannot_be_mapped_is_refused():
    def branches(self, x):
        return read(self, x) if float(self.table(x).sum()) > 0 else read(self, x) * 2

    module, (x, y) = Uses(branches), batch()
    clipping = make_clipping(module, tables=tables_of(module, "table.weight"))
    for _ in range(2):  # nothing is remembered that would let the second through
        with pytest.raises(ModelError, match=r"What to change: write forward, and hooks on its modules, without .item"):
            run(clipping, x, y, loss)


def test_a_models_own_error_is_told_as_such():
    module, (x, y) = Uses(lambda self, x: self.out(self.table(x))[:, :, None] @ torch.ones(7, 5)), batch()
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        run(make_clipping(module, tables=tables_of(module, "table.weight")), x, y, loss)


def test_a_grid_has_no_tables():
    module = Bow()
    with pytest.raises(ModelError, match="sums on a grid"):
        make_clipping(module, grid=2.0**-10, tables={"table.weight": Held(module.table.weight)})


@pytest.mark.parametrize(
    ("name", "weight", "words"),
    [
        ("tables.weight", torch.zeros(V, D), "trainable parameters of the model"),
        ("table.weight", torch.zeros(V + 1, D), "must have the same shape, or no rows"),
        ("table.weight", torch.zeros(V, D + 1), "must have the same shape"),
        ("out.bias", torch.zeros(2, 1), "must have the same shape"),
        ("table.weight", torch.zeros(V, D, dtype=torch.float32), "is torch.float32, and its parameter torch.float64"),
    ],
)
def test_tables_that_do_not_fit_are_refused(name, weight, words):
    with pytest.raises(ArgumentError, match=words):
        make_clipping(Bow(), tables={name: Held(weight)})


def test_a_table_that_is_frozen_is_refused():
    module = Bow()
    module.table.requires_grad_(False)
    with pytest.raises(ArgumentError, match="trainable parameters of the model"):
        make_clipping(module, tables={"table.weight": Held(module.table.weight)})


@pytest.mark.parametrize("make", [plain, Bow])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.bool])
def test_ids_of_other_types_are_refused(make, dtype):
    """Bytes and truth values would choose rows as a mask does."""
    module, (x, y) = make(), batch()
    name = next(n for n, p in module.named_parameters() if p.shape == (V, D))
    with pytest.raises(ModelError, match="ids of rows must be torch.int64 or torch.int32"):
        run(make_clipping(module, tables=tables_of(module, name)), x.to(dtype), y, loss)


def test_a_table_that_was_frozen_since_is_refused():
    module, (x, y) = Bow(), batch()
    clipping = make_clipping(module, tables=tables_of(module, "table.weight"))
    module.table.requires_grad_(False)
    with pytest.raises(ModelError, match="has been frozen since"):
        run(clipping, x, y, loss)


def test_bags_of_nothing_have_no_rows():
    module, (x, y) = bags("mean", None), batch()
    clipping = make_clipping(module, tables=tables_of(module, "0.weight"), count_norm=1.0)
    outputs, sums = run(clipping, x[:, :0], y, loss)
    torch.testing.assert_close(outputs, module[2].bias.expand(B, 2))
    assert [sums[key]._nnz() for key in ("0.weight", count_of("0.weight"))] == [0, 0]


def test_non_finite_gradients_are_refused_where_that_is_asked_for():
    module, (x, y) = Bow(), batch()
    clipping = make_clipping(module, non_finite="refuse", tables=tables_of(module, "table.weight"))
    with pytest.raises(NonFiniteError, match="7 of 7"):
        run(clipping, x, y, lambda outputs, y: loss(outputs, y) * float("nan"))


# -- passes that clip nothing ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [plain, Bow])
@pytest.mark.parametrize("chunk_size", [None, 2])
def test_a_batch_of_nobody_has_empty_sums(make, chunk_size):
    module, (x, _) = make(), batch()
    name = next(n for n, p in module.named_parameters() if p.shape == (V, D))
    clipping, received = make_clipping(module, chunk_size, tables=tables_of(module, name), count_norm=1.0), []
    empty = torch.zeros(0, dtype=torch.int64)
    outputs = clipping.forward((x[:0],), {}, groups=empty, clip_norm=1.0, scale=0.0, receive=received.append)
    assert outputs.shape == (0, 2)
    outputs.sum().backward()
    (sums,) = received
    assert [sums[key]._nnz() for key in (name, count_of(name))] == [0, 0]
    assert all(not value.to_dense().any() for value in sums.values())
    assert sums[name].shape == (V, D)


@pytest.mark.parametrize("chunk_size", [None, 2])
def test_without_gradients_it_reads_and_gives_nothing(chunk_size):
    module, (x, _) = Bow(), batch()
    expected = module(x)
    clipping = make_clipping(module, chunk_size, tables=tables_of(module, "table.weight"))
    with torch.no_grad():
        outputs = clipping.forward((x,), {}, groups=torch.arange(B), clip_norm=1.0, scale=1.0, receive=pytest.fail)
    torch.testing.assert_close(outputs, expected.detach())
    assert not outputs.requires_grad


@pytest.mark.parametrize("make", [Bow, lambda dtype: Weighted().to(dtype)], ids=["lookups", "bag"])
def test_autocast_changes_the_outputs_and_not_the_bound(make):
    module, (x, y) = make(dtype=torch.float32), batch()
    name = next(n for n, p in module.named_parameters() if p.shape == (V, D))
    tables = tables_of(module, name)
    _, exact = run(make_clipping(module, tables=tables), x, y, loss, clip_norm=1e-3)
    with torch.autocast("cpu", torch.bfloat16):
        _, sums = run(make_clipping(module, tables=tables), x, y, lambda o, y: loss(o.float(), y), clip_norm=1e-3)
    assert all(value.dtype == torch.float32 for value in sums.values())
    assert_close(dense(sums), dense(exact), 0.05)


# -- size ------------------------------------------------------------------------------------------------------------


class Rows:
    """A table of 10^9 rows, each a function of its number."""

    num_rows, width, dtype, device = 10**9, 16, torch.float32, torch.device("cpu")

    def read(self, ids):
        return ((ids[..., None] % 1009 + torch.arange(self.width)) / 100).sin()


class Large(TorchDispatchMode):
    """Refuses to make a large tensor."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for t in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(t, torch.Tensor) and t.layout == torch.strided and t.device.type != "meta":
                assert t.untyped_storage().nbytes() < 2**20, func
        return result


@pytest.mark.parametrize("make", [nn.Embedding, nn.EmbeddingBag])
@pytest.mark.parametrize("in_a_row", [True, False])
@pytest.mark.parametrize("chunk_size", [None, 5])
def test_nothing_of_the_tables_size_is_made(make, in_a_row, chunk_size):
    torch.manual_seed(0)
    table = make(1, 16, sparse=True)
    table.weight.data = table.weight.data[:0]
    rest = nn.Flatten(), nn.Linear(16 * (4 if make is nn.Embedding else 1), 2)
    module = nn.Sequential(table, *rest) if in_a_row else nn.ModuleDict({"0": table, "1": nn.Sequential(*rest)})
    if not in_a_row:
        module.forward = lambda x: module["1"](module["0"](x))
    x, y = torch.randint(0, 10**9, (B, 4), generator=torch.Generator().manual_seed(0)), torch.zeros(B)
    x[1, 2] = x[4, 0] = 10**9 - 1
    clipping = make_clipping(module, chunk_size, tables={"0.weight": Rows()}, count_norm=1.0)
    with Large():
        _, sums = run(clipping, x, y, loss, clip_norm=0.1)
    assert sums["0.weight"].shape == (10**9, 16)
    assert sums["0.weight"].indices()[0].tolist() == x.unique().tolist()
    assert sums[count_of("0.weight")].values()[-1] == pytest.approx(1.0)
