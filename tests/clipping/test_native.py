"""Per-example gradients of a convolution by the compiled library, against each example alone in float64."""

import os
from fractions import Fraction
from math import ldexp

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from anyorder.clipping import Automatic, PerGroup, native
from anyorder.clipping.norms import ConvolutionUse, Geometry, UnitMap, Weights, settle
from anyorder.clipping.per_example import GhostClipping
from anyorder.errors import ClippingWarning
from anyorder.training.trained_tables import _InPlace as InPlace
from laws.cases import over

pytestmark = pytest.mark.skipif(
    native._library() is None or os.environ.get("ANYORDER_KERNEL") == "reference",
    reason="the library is not built, or is switched off",
)

CASES = {  # geometry, channels in and out, size
    "one channel, stride, padding": (Geometry((8, 8), (2, 2), (3, 3), (1, 1), 1), 1, 16, (28, 28)),
    "stride": (Geometry((4, 4), (2, 2), (0, 0), (1, 1), 1), 16, 32, (13, 13)),
    "rows read twice": (Geometry((3, 2), (1, 3), (0, 0), (1, 1), 1), 3, 8, (9, 10)),
    "odd channels": (Geometry((3, 5), (1, 1), (1, 2), (1, 1), 1), 5, 37, (6, 7)),
    "few channels": (Geometry((2, 1), (3, 2), (1, 0), (1, 1), 1), 2, 3, (7, 5)),
    "dilated in height": (Geometry((3, 3), (1, 2), (2, 1), (2, 1), 1), 7, 20, (8, 9)),
    "one position": (Geometry((4, 3), (1, 1), (0, 0), (1, 1), 1), 6, 48, (4, 3)),
    "as many channels as rows": (Geometry((2, 3), (1, 1), (0, 0), (1, 1), 1), 16, 16, (16, 5)),
    "one pixel": (Geometry((1, 1), (1, 1), (0, 0), (1, 1), 1), 9, 17, (5, 5)),
}


def inside(t):
    """A view of a larger tensor, NaN around it."""
    return F.pad(t, (1, 2, 1, 1, 2, 1), value=torch.nan)[:, 2:-1, 1:-1, 1:-2]


LAYOUTS = {
    "contiguous": lambda t: t.contiguous(),
    "channels last": lambda t: t.contiguous(memory_format=torch.channels_last),
    "transposed": lambda t: t.mT.contiguous().mT,
    "part of a larger one": inside,
    "part of a larger one, channels last": lambda t: inside(t.permute(0, 2, 3, 1)).permute(0, 3, 1, 2),
    "expanded": lambda t: t[:1].expand_as(t),
}


def problem(case, layout="contiguous", batch=7, dtype=torch.float32):
    """Inputs, output gradients, and (B, *shape) float64 each example's gradient by autograd."""
    geometry, channels, out, size = CASES[case]
    torch.manual_seed(0)
    x, w = torch.randn(batch, channels, *size).to(dtype), torch.randn(out, channels, *geometry.kernel)
    settings = geometry.stride, geometry.padding, geometry.dilation, False, [0, 0], 1
    g = torch.randn_like(torch.convolution(x.float(), w, None, *settings)).to(dtype)
    x, g = LAYOUTS[layout](x), LAYOUTS[layout](g)

    def alone(i):
        forward = lambda w: torch.convolution(x[i : i + 1].double(), w, None, *settings)  # noqa: E731
        return torch.func.vjp(forward, w.double())[1](g[i : i + 1].double())[0]

    return geometry, x, g, torch.stack([alone(i) for i in range(batch)])


def convolution(geometry, x, g, path=None):
    made, squares = native.convolution(
        x, g, geometry.kernel, geometry.stride, geometry.padding, geometry.dilation[0], path
    )
    return made.permute(0, 4, 3, 1, 2), squares


def check_squares(squares, rows, *others):
    """Never less than the exact ones, and hardly more."""
    assert rows.dtype == torch.float32  # whose numbers are multiples of 2^-149
    for row, *found in zip(rows.flatten(1).tolist(), *(one.tolist() for one in (squares, *others)), strict=True):
        exact = Fraction(sum(int(ldexp(value, 149)) ** 2 for value in row), 2**298)
        for square in found:
            assert exact <= Fraction(square) <= exact * (1 + Fraction(1, 10**10))


@over("layout", LAYOUTS)
@pytest.mark.parametrize("case", CASES)
def test_gradients_and_norms(case, layout):
    """On each path that this processor has instructions for."""
    geometry, x, g, expected = problem(case, layout)
    for path in range(native._library().anyorder_lanes() + 1):
        made, squares = convolution(geometry, x, g, path)
        assert (made - expected).norm() <= 1e-6 * expected.norm(), native.PATHS[path]
        # The norms are those of what was made, whatever its rounding.
        check_squares(squares, made, native.squares(made.flatten(1), path))


def test_inputs_that_torch_negates_when_it_reads_them():
    geometry, x, g, expected = problem("stride")
    lazily = [torch.complex(torch.zeros_like(t), -t).conj().imag for t in (x, g)]
    assert all(t.is_neg() for t in lazily)
    for pair in ((lazily[0], g), (x, lazily[1])):
        made, squares = convolution(geometry, *pair)
        assert (made - expected).norm() <= 1e-6 * expected.norm()
        check_squares(squares, made)


def test_any_number_of_threads_gives_the_same():
    geometry, x, g, _ = problem("odd channels", batch=19)
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.append(convolution(geometry, x, g))
    finally:
        torch.set_num_threads(before)
    for made, squares in found[1:]:
        assert torch.equal(made, found[0][0])
        assert torch.equal(squares, found[0][1])


def test_threads_without_openmp(monkeypatch):
    geometry, x, g, _ = problem("stride", batch=19)
    expected, before = convolution(geometry, x, g), torch.get_num_threads()
    monkeypatch.setattr(native, "parallel", lambda: None)
    try:
        torch.set_num_threads(2)
        made, squares = convolution(geometry, x, g)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(made, expected[0])
    assert torch.equal(squares, expected[1])


@pytest.mark.parametrize("value", [torch.nan, torch.inf, 3e38])
def test_an_example_that_overflows_is_seen_and_no_other(value):
    geometry, x, g, _ = problem("one channel, stride, padding")
    x[3, 0, 5, 5], g[5, 2, 1, 1] = value, value
    _, squares = convolution(geometry, x * 100, g * 100)
    assert (~squares.isfinite()).nonzero().flatten().tolist() == [3, 5]


def test_large_and_small_numbers_keep_their_norms():
    geometry, x, g, _ = problem("stride")
    for scale in (1e-30, 1e30):
        made, squares = convolution(geometry, x * scale, g)
        check_squares(squares, made)
        assert (squares > 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", CASES)
def test_norms_and_sum_of_a_use(case, dtype, monkeypatch):
    geometry, x, g, gradients = problem(case, dtype=dtype)
    use = ConvolutionUse(x, g, geometry, len(x), torch.float32)
    assert use.compiled
    monkeypatch.setattr("anyorder.clipping.norms._keeping_is_cheaper", lambda uses, units: True)
    found = settle([use], UnitMap.of(torch.arange(len(x)), x.device))
    assert found.kept is not None
    assert (found.kept - gradients).norm() <= 1e-6 * gradients.norm()
    norms = gradients.flatten(1).norm(dim=1)
    assert found.squares.sqrt().numpy() == pytest.approx(norms.numpy(), rel=1e-5)
    weights = torch.rand(len(x))
    expected = (weights.double().view(-1, 1, 1, 1, 1) * gradients).sum(0)
    total = found.total(Weights(weights, weights))
    assert total.shape == expected.shape
    assert (total - expected).norm() <= 1e-5 * expected.norm()


def test_what_it_does_not_cover_goes_another_way():
    geometry, x, g, _ = problem("stride")

    def compiled(geometry=geometry, x=x, g=g, batch=7, dtype=torch.float32):
        return ConvolutionUse(x, g, geometry, batch, dtype).compiled

    assert compiled()
    assert not compiled(dtype=torch.float64)
    assert not compiled(batch=1)  # seven images of one example
    assert not compiled(Geometry((4, 4), (2, 2), (0, 0), (1, 2), 1))
    assert not compiled(Geometry((4, 4), (2, 2), (0, 0), (1, 1), 2))
    assert not compiled(Geometry((4,), (2,), (0,), (1,), 1), torch.randn(7, 16, 13), torch.randn(7, 32, 5))


def test_a_library_that_gives_other_numbers_is_not_taken(monkeypatch):
    right = native.convolution

    def wrong(*args):
        made, squares = right(*args)
        return made, squares * (1 - 1e-12)

    assert native._agrees(0)
    monkeypatch.setattr(native, "convolution", wrong)
    assert not native._agrees(0)


@pytest.mark.parametrize("shape", [(0, 3), (5, 0), (3, 1), (300, 7), (2000, 40), (3, 70_001)])
def test_squares(shape):
    torch.manual_seed(1)
    rows = torch.randn(shape[0], shape[1] + 2)[:, 1:-1]  # with a stride of its own
    before = torch.get_num_threads()
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            found = native.squares(rows)
            assert found.shape == (shape[0],)
            assert found.numpy() == pytest.approx(rows.double().square().sum(1).numpy(), rel=1e-10)
    finally:
        torch.set_num_threads(before)
    check_squares(found[:2], rows[:2])


def test_a_missing_library_is_told_once_and_where_versions_are_printed(monkeypatch, tmp_path):
    monkeypatch.delenv("ANYORDER_KERNEL", raising=False)
    monkeypatch.setattr(native, "_file", lambda: tmp_path / "nowhere.so")
    for cached in (native._library, native._path, native._warn):
        cached.cache_clear()
    try:
        assert native.describe() == f"torch (no library {tmp_path / 'nowhere.so'})"
        native.warn_if_missing(1000)  # too few parameters to matter
        with pytest.warns(ClippingWarning, match="C\\+\\+ compiler"):
            native.warn_if_missing(2**20)
        native.warn_if_missing(2**20)
        monkeypatch.setenv("ANYORDER_KERNEL", "reference")
        assert native.describe() == "torch (ANYORDER_KERNEL=reference)"
    finally:
        for cached in (native._library, native._path, native._warn):
            cached.cache_clear()


# -- small layers at once --------------------------------------------------------------------------------------------

BATCH, SCALE, CLIP = 9, 3.0, 1.7


def layers(sizes):
    """Linear maps (inputs, outputs), and one vector of 5 numbers."""
    torch.manual_seed(0)
    pairs = [(torch.randn(BATCH, n), torch.randn(BATCH, m)) for n, m in sizes]
    return [*pairs, (None, torch.randn(BATCH, 5))]


def one_by_one(given):
    """(B,) float64 the factors, and the sums, by each example's gradient."""
    each = [g.double() if a is None else torch.einsum("bm,bn->bmn", g.double(), a.double()) for a, g in given]
    norms = sum(x.flatten(1).square().sum(1) for x in each).sqrt() * SCALE
    factors = torch.where(norms.isfinite(), SCALE * (CLIP / norms).clamp(max=1), 0.0)
    kept = [x.masked_fill(~norms.isfinite().view(-1, *(1 for _ in x.shape[1:])), 0) for x in each]
    return factors, [torch.einsum("b,b...->...", factors, x) for x in kept]


def at_once(given, path, **changed):
    sums = [torch.full((g.shape[1],) if a is None else (g.shape[1], a.shape[1]), torch.nan) for a, g in given]
    options = {"scale": SCALE, "clip_norm": CLIP, "large": 2.0**30, "path": path} | changed
    bad, weights = native.clip([(a, g, out) for (a, g), out in zip(given, sums, strict=True)], **options)
    return bad, weights, sums


@pytest.mark.parametrize("path", range(3))
@pytest.mark.parametrize("sizes", [[(64, 6), (6, 3)], [(1, 1)], [(33, 4), (17, 9), (131, 5)]])
def test_clipped_sums_of_small_layers(path, sizes):
    if path > native._library().anyorder_lanes():
        pytest.skip("this processor lacks the instructions")
    given = layers(sizes)
    given[0][0][2], given[-1][1][2] = 0.0, 0.0  # hardly longer than nothing
    factors, expected = one_by_one(given)
    bad, weights, sums = at_once(given, path)
    assert bad == 0
    assert bool((weights.double() <= factors).all())
    assert torch.allclose(weights.double(), factors, rtol=2e-7)
    for made, right in zip(sums, expected, strict=True):
        assert torch.allclose(made.double(), right, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("number", [torch.nan, torch.inf, -torch.inf])
def test_an_example_that_is_not_finite_adds_nothing_and_moves_no_other(number):
    given = layers([(20, 6), (6, 3)])
    absent = [(None if a is None else a.clone(), g.clone()) for a, g in given]
    given[1][0][4, 2] = number
    for _, g in absent:
        g[4] = 0
    bad, weights, sums = at_once(given, None)
    without = at_once(absent, None)[2]
    assert (bad, float(weights[4])) == (1, 0.0)
    assert all(torch.equal(x, y) for x, y in zip(sums, without, strict=True))


def test_what_float32_cannot_add_up_is_left_to_others():
    given = layers([(20, 6)])
    given[0][0][3, 1] = 2.0**31
    assert at_once(given, None)[0] == -1
    given[0][1][5, 0] = torch.nan  # and another is left out
    assert at_once(given, None)[0] == -1
    given[0][1][5, 0] = 0.0
    assert at_once(given, None, large=2.0**32)[0] == 0


@pytest.mark.parametrize("output", [0, 5])
def test_a_sum_that_is_no_number_is_left_to_others(output):
    """An example of no norm, whose gradient times the scale is infinite, and times its activations NaN."""
    given = layers([(20, 6)])[:1]
    given[0][0][3], given[0][1][3, output] = 0.0, 3e38
    assert at_once(given, None)[0] == -1


@pytest.mark.parametrize("path", range(3))
def test_rows_that_stand_apart_in_memory(path):
    if path > native._library().anyorder_lanes():
        pytest.skip("this processor lacks the instructions")
    given = layers([(33, 6), (131, 5)])
    wide = [tuple(x if x is None else torch.cat([x, 9 + x], 1)[:, : x.shape[1]] for x in pair) for pair in given]
    bad, weights, sums = at_once(wide, path)
    same = at_once(given, path)
    assert bad == same[0] == 0
    assert torch.equal(weights, same[1])
    assert all(torch.equal(x, y) for x, y in zip(sums, same[2], strict=True))


def test_at_once_and_one_by_one_agree(monkeypatch):
    """The sums of a model by one call, and by the norms and sums of each parameter."""
    model = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.ReLU(), torch.nn.LayerNorm(5), torch.nn.Linear(5, 3))
    x, found = torch.randn(8, 6), []
    for there in (True, False):
        monkeypatch.setattr(native, "available", lambda there=there: there)
        options = {"groups": torch.arange(8), "clip_norm": 0.5, "scale": 8.0, "receive": found.append}
        GhostClipping(model).forward((x,), {}, **options).square().mean().backward()
    vector = next(iter(found[0].values()))._base
    assert all(value._base is vector for value in found[0].values())  # of which the release makes its noise at once
    assert vector.shape == (sum(p.numel() for p in model.parameters()),)
    assert next(iter(found[1].values()))._base is not vector
    for name, value in found[0].items():
        assert torch.allclose(value, found[1][name], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    ("units", "rule", "dtype"),
    [
        ([0, 0, 1, 2, 2, 2, 3, 4], None, torch.float32),
        (range(8), Automatic(0.3), torch.float32),
        (range(8), PerGroup(), torch.float32),
        (range(8), None, torch.float64),
    ],
)
def test_what_is_not_of_one_example_each_under_the_flat_rule_goes_another_way(units, rule, dtype, monkeypatch):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Tanh(), torch.nn.Linear(5, 3)).to(dtype)
    x, found = torch.randn(8, 6, dtype=dtype), []
    for there in (True, False):
        monkeypatch.setattr(native, "available", lambda there=there: there)
        options = {"groups": torch.tensor(units), "clip_norm": 1e-3, "scale": 8.0, "receive": found.append}
        GhostClipping(model, rule=rule).forward((x,), {}, **options).square().mean().backward()
    for name, value in found[0].items():
        assert value.dtype == found[1][name].dtype
        assert torch.allclose(value, found[1][name], rtol=1e-5, atol=1e-9)


def test_no_rounding_carries_an_example_over_the_norm():
    model, norms = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Tanh(), torch.nn.Linear(5, 3)), []
    for seed in range(200):
        torch.manual_seed(seed)
        found, options = [], {"groups": torch.zeros(1, dtype=torch.long), "clip_norm": 0.7, "scale": 1.0}
        outputs = GhostClipping(model).forward((torch.randn(1, 6),), {}, receive=found.append, **options)
        (outputs.square().mean() * 1e3).backward()
        norms.append(float(torch.cat([x.double().flatten() for x in found[0].values()]).norm()))
    assert 0.7 * (1 - 1e-6) < min(norms) <= max(norms) <= 0.7


def test_units_of_one_example_each_are_known_by_the_tensor_that_says_so():
    alone = UnitMap.alone(4)
    assert alone.tolist() == [0, 1, 2, 3]
    for groups in (alone, torch.tensor([7, 3, 9, 1])):
        assert UnitMap.of(groups, alone.device).classes is None
    assert UnitMap.of(torch.tensor([0, 1, 1, 3]), alone.device).count == 3


@pytest.mark.parametrize("none", [-1, 0])
@pytest.mark.parametrize("size", [1, 3, 50, 5000, 10**6, 2**32])
def test_rows_are_ranked_as_numpy_ranks_them(size, none, monkeypatch):
    random = np.random.default_rng(size)
    for n, each in ((0, 1), (1, 1), (12, 4), (400, 4), (999, 3)):
        ids = random.integers(0, size, n)
        found = native.ranked(ids, size, each, none)
        monkeypatch.setattr(native, "available", lambda: False)
        expected = native.ranked(ids, size, each, none)
        monkeypatch.undo()
        units = [[i for i in unit if i != none] for unit in ids.reshape(-1, each).tolist()]
        assert found.twice == expected.twice == any(len(set(unit)) < len(unit) for unit in units)
        assert found.distinct.tolist() == expected.distinct.tolist() == sorted({i for unit in units for i in unit})
        assert found.place.tolist() == expected.place.tolist()
        assert [found.distinct[at] for at in found.place if at >= 0] == [i for i in ids if i != none]
    for ids in ([0, size], [-1, 0]):
        with pytest.raises(ValueError, match="than the table has"):
            native.ranked(np.array(ids), size)


class Rows(torch.nn.Module):
    """The mean of 3 rows of a table, and a layer; rows may be read twice, and one example may have no number."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = torch.nn.Embedding(20, 4, sparse=True), torch.nn.Linear(4, 2)

    def forward(self, ids, factor):
        return self.head(self.table(ids).mean(1) * factor)


@pytest.mark.parametrize("ids", [[[0, 1, 2], [2, 3, 4], [0, 5, 6]], [[0, 1, 2], [3, 3, 4], [0, 5, 6]]])
@pytest.mark.parametrize("factor", [1.0, float("nan")])
def test_a_table_is_summed_with_the_layers_as_by_itself(ids, factor, monkeypatch):
    """A unit without a norm adds exactly zero; one that reads a row twice sends the batch the other way."""
    torch.manual_seed(0)
    model, found = Rows(), []
    factors = torch.tensor([[1.0], [2.0], [factor]])
    for there in (True, False):
        monkeypatch.setattr(native, "available", lambda there=there: there)
        clipping = GhostClipping(model, tables={"table.weight": InPlace(model.table.weight)})
        for _ in range(5):  # the model, twice; the program; its tape
            options = {"groups": torch.arange(3), "clip_norm": 0.1, "scale": 3.0, "receive": found.append}
            clipping.forward((torch.tensor(ids), factors), {}, **options).square().mean().backward()
    expected = {name: value.to_dense() for name, value in found[-1].items()}
    assert all(value.isfinite().all() and value.any() for value in expected.values())
    for sums in found:
        assert sums["table.weight"].is_coalesced()
        assert sums["table.weight"].indices()[0].tolist() == sorted({i for row in ids for i in row})
        for name, value in sums.items():
            assert torch.allclose(value.to_dense(), expected[name], rtol=1e-5, atol=1e-9)


def test_no_rounding_carries_a_table_over_the_norm():
    norms = []
    for seed in range(100):
        torch.manual_seed(seed)
        model, found = Rows(), []
        clipping = GhostClipping(model, tables={"table.weight": InPlace(model.table.weight)})
        options = {"groups": torch.zeros(1, dtype=torch.long), "clip_norm": 0.7, "scale": 1.0}
        arguments = (torch.tensor([[1, 5, 7]]), torch.randn(1, 1))
        (clipping.forward(arguments, {}, receive=found.append, **options).square().mean() * 1e3).backward()
        norms.append(float(torch.cat([x.to_dense().double().flatten() for x in found[0].values()]).norm()))
    assert 0.7 * (1 - 1e-6) < min(norms) <= max(norms) <= 0.7


@pytest.mark.parametrize("default", [torch.float64, torch.float16])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_what_a_script_makes_torchs_defaults_is_no_memory_of_the_library(default, device):
    """Numbers of float32 went into memory of another size: a step moved by 10^5 clip norms, or broke the heap."""
    torch.manual_seed(0)
    model, x = torch.nn.Sequential(torch.nn.Conv2d(1, 2, 3), torch.nn.Flatten(), torch.nn.Linear(8, 3)), None
    for module, shape in ((model, (1, 4, 4)), (torch.nn.Linear(5, 3), (5,)), (Rows(), None)):
        x = (torch.randn(4, *shape),) if shape else (torch.arange(12).view(4, 3), torch.ones(4, 1))
        tables = {"table.weight": InPlace(module.table.weight)} if shape is None else {}
        clipping, found = GhostClipping(module, tables=tables), []
        groups, one = torch.arange(4), torch.ones(())
        for changed in (False, False, False, False, True):
            try:
                if changed:
                    torch.set_default_dtype(default)
                    torch.set_default_device(device)
                outputs = clipping.forward(x, {}, groups=groups, clip_norm=0.1, scale=4.0, receive=found.append)
                outputs.square().sum().backward(one)
            finally:
                torch.set_default_dtype(torch.float32)
                torch.set_default_device(None)
        for name, value in found[-1].items():
            assert value.dtype == torch.float32
            assert torch.allclose(value.to_dense(), found[-2][name].to_dense(), rtol=1e-5, atol=1e-7)
