"""How many units read each row: a bounded vector for each unit, of its own ids alone."""

from fractions import Fraction

import pytest
import torch

from anyorder.clipping import Adaptive
from anyorder.clipping.norms import count_of
from anyorder.clipping.per_example import make_clipping
from anyorder.errors import ArgumentError
from clipping.brute import run
from clipping.test_sparse_sums import GROUPS, MODELS, B, Bow, TwoTables, batch, dense, loss, tables_of
from laws.cases import over


def counts_by_hand(reads, groups, count_norm, padding=None):
    """{table: (V,)} of {table: (num_rows, (B, T) ids)}."""
    result = {name: torch.zeros(rows, dtype=torch.float64) for name, (rows, _) in reads.items()}
    for unit in groups.unique().tolist():
        own = {name: set(ids[groups == unit].flatten().tolist()) - {padding} for name, (_, ids) in reads.items()}
        number = sum(map(len, own.values()))
        for name, rows in own.items():
            for row in rows:
                result[name][row] += min(1.0, count_norm / number**0.5)
    return result


@over("chunk_size", [None, 2])
@over("count_norm", [0.3, 1.5, 10.0])
@over("groups", GROUPS.values())
@pytest.mark.parametrize("name", ["padding", "tied", "two tables", "plain, padding", "bag, mean, 4", "two bags, sum"])
def test_each_row_is_counted_once_for_each_unit_that_reads_it(name, groups, count_norm, chunk_size):
    make, names = MODELS[name]
    module, (x, y) = make(), batch()
    padding = {"padding": 4, "plain, padding": 9, "bag, mean, 4": 4, "two bags, sum": 8}.get(name)
    tables = tables_of(module, *names)
    reads = {names[0]: (tables[names[0]].num_rows, x)}
    if name == "two tables":
        reads["other.weight"] = (5, x[:, :2] % 5)
    _, sums = run(make_clipping(module, chunk_size, tables=tables, count_norm=count_norm), x, y, loss, groups=groups)
    expected = counts_by_hand(reads, groups, count_norm, padding)
    for own in names:
        found = sums[count_of(own)]
        assert (found.layout, found.is_coalesced(), found.dtype) == (torch.sparse_coo, True, torch.float64)
        torch.testing.assert_close(found.to_dense(), expected[own], rtol=1e-11, atol=0)
        assert (found.values() > 0).all()
        assert set(sums[own].indices()[0].tolist()) == set(found.indices()[0].tolist())


@pytest.mark.parametrize("count_norm", [1.0, 0.3, 0.7, 1e-9, 3.0, 2**0.5])
def test_a_unit_is_within_the_norm_in_exact_arithmetic(count_norm):
    """Over both tables together, whatever the number of rows is."""
    module = TwoTables()
    clipping = make_clipping(module, tables=tables_of(module, "table.weight", "other.weight"), count_norm=count_norm)
    for size in range(1, 12):
        x, y = batch(size)
        _, sums = run(clipping, x, y, loss, groups=torch.zeros(size, dtype=torch.int64))
        values = [sums[count_of(name)].values() for name in ("table.weight", "other.weight")]
        square = sum(Fraction(v) ** 2 for v in torch.cat(values).tolist())
        assert square <= Fraction(count_norm) ** 2
        assert square >= Fraction(count_norm * (1 - 1e-11)) ** 2 or float(torch.cat(values).min()) == 1.0


def test_what_a_unit_adds_to_the_counts_is_of_its_own_ids_alone():
    """Not of its gradient, and not of other units: so that removing it removes just that."""
    module, (x, y) = Bow(), batch()
    clipping = make_clipping(module, tables=tables_of(module, "table.weight"), count_norm=1.0)
    name, others = count_of("table.weight"), torch.arange(B) != 2
    whole = run(clipping, x, y, loss)[1][name].to_dense()
    without = run(clipping, x[others], y[others], loss)[1][name].to_dense()
    alone = run(clipping, x[2:3], y[2:3], loss)[1][name].to_dense()
    torch.testing.assert_close(whole - without, alone, rtol=0, atol=1e-14)


def test_a_unit_whose_gradient_is_not_finite_is_counted_and_adds_nothing_else():
    """Its counts are bounded whatever its gradient is; to leave them out would tell of the gradient, if less loudly."""
    module, (x, y) = Bow(), batch()
    tables = tables_of(module, "table.weight")
    clipping = make_clipping(module, tables=tables, count_norm=1.0)
    _, before = run(clipping, x, y, loss, scale=1.0)
    others = torch.arange(B) != 2
    _, without = run(clipping, x[others], y[others], loss, scale=(B - 1) / B)

    def broken(outputs, y):
        factor = torch.ones(B, 1, dtype=torch.float64)
        factor[2] = float("nan")
        return loss(outputs * factor, y)

    _, sums = run(clipping, x, y, broken, scale=1.0)
    assert torch.equal(sums[count_of("table.weight")].to_dense(), before[count_of("table.weight")].to_dense())
    for name in ("table.weight", "out.weight", "out.bias"):
        torch.testing.assert_close(dense(sums)[name], dense(without)[name], rtol=1e-12, atol=1e-15)


def test_counts_stand_beside_those_of_an_adaptive_norm():
    module, (x, y) = Bow(), batch()
    clipping = make_clipping(module, rule=Adaptive(), tables=tables_of(module, "table.weight"), count_norm=1.0)
    _, sums = run(clipping, x, y, loss)
    assert list(sums) == ["table.weight", "out.weight", "out.bias", Adaptive.COUNT, count_of("table.weight")]


def test_a_norm_of_counts_needs_tables():
    with pytest.raises(ArgumentError, match="there are no tables"):
        make_clipping(Bow(), count_norm=1.0)
    with pytest.raises(ArgumentError, match="count_norm"):
        module = Bow()
        make_clipping(module, tables=tables_of(module, "table.weight"), count_norm=0.0)
