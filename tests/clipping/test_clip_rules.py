"""Rules of clipping: no unit is longer than the clip norm, and each rule does what its equation says."""

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from anyorder.clipping import Adaptive, Automatic, Flat, PerGroup
from anyorder.clipping import per_example as engine
from anyorder.clipping.norms import ClipRule, Cut
from anyorder.clipping.per_example import FunctionalClipping, GhostClipping
from anyorder.errors import ArgumentError
from anyorder.release.schedules import FixedNorm
from clipping.brute import assert_close, norm, per_example, run
from laws.cases import CLIP_RULES as RULES

ENGINES = {
    "ghost": lambda module, rule, size=None: GhostClipping(module, size, rule),
    "functional": lambda module, rule, size=None: FunctionalClipping(module, size, rule=rule),
}


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))


def clipped(gradient, rule, clip_norm):
    """One unit's gradient by the rule's equation, in float64."""
    if isinstance(rule, Automatic):
        return {n: g.double() * clip_norm / (norm(gradient) + rule.gamma) for n, g in gradient.items()}
    if isinstance(rule, Adaptive):
        factor = math.sqrt(1 - rule.share**2) * clip_norm / max(norm(gradient), clip_norm)
        above = rule.share * clip_norm * (norm(gradient) > clip_norm)
        return {n: g.double() * factor for n, g in gradient.items()} | {
            ".above": torch.tensor(above, dtype=torch.float64)
        }
    if isinstance(rule, Flat):
        groups, shares = [list(gradient)], [1.0]
    else:
        names = rule.groups or tuple((n,) for n in gradient)
        groups = [[n for n in gradient if any(n == own or n.startswith(own + ".") for own in group)] for group in names]
        shares = rule.shares or [1 / math.sqrt(len(groups))] * len(groups)
    result = {}
    for group, share in zip(groups, shares, strict=True):
        part = {n: gradient[n].double() for n in group}
        result |= {n: g * min(1.0, share * clip_norm / norm(part)) for n, g in part.items()}
    return {n: result[n] for n in gradient}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("clip_norm", [0.03, 1.0])
@pytest.mark.parametrize("name", RULES)
def test_rule_is_its_equation(name, clip_norm, engine):
    module, rule = network().double(), RULES[name]
    x, y = torch.randn(6, 4, dtype=torch.float64), torch.randint(0, 3, (6,))
    units = [clipped(g, rule, clip_norm) for g in per_example(module, x, y, F.cross_entropy)]
    expected = {n: sum(u[n] for u in units) for n in units[0]}
    _, sums = run(ENGINES[engine](module, rule), x, y, F.cross_entropy, clip_norm=clip_norm)
    assert_close(sums, expected, 1e-10)
    assert max(norm(u) for u in units) <= clip_norm * (1 + 1e-12)


@settings(deadline=None, max_examples=60)
@given(
    seed=st.integers(0, 2**32),
    name=st.sampled_from(list(RULES)),
    engine=st.sampled_from(list(ENGINES)),
    log_clip=st.floats(-6, 3),
    scale=st.floats(0.1, 100),
)
def test_no_unit_is_over_the_clip_norm(seed, name, engine, log_clip, scale):
    module = network()
    torch.manual_seed(seed)
    x, y = torch.randn(1, 4) * 10, torch.randint(0, 3, (1,))
    clipping = ENGINES[engine](module, RULES[name])
    _, sums = run(clipping, x, y, F.cross_entropy, clip_norm=10**log_clip, scale=scale)
    assert norm(sums) <= 10**log_clip


def linear(values):
    """<w, x>: the gradient of an example is x."""
    return nn.Linear(values.shape[1], 1, bias=False).to(values.dtype), values


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("share", [1e-6, 0.1, 0.7, 1 - 1e-9])
def test_rounding_carries_no_unit_over_the_clip_norm_with_its_count(share, dtype, engine):
    for seed in range(6):
        v = torch.randn(1, 500, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        for length in (1 - 1e-7, 1.0, 1 + 1e-7, 3.7, 1e30):
            module, x = linear((v / v.norm() * length * 0.3).to(dtype))
            for scale in (1.0, 7.0):
                clipping = ENGINES[engine](module, Adaptive(share=share))
                _, sums = run(clipping, x, None, lambda out, _: out.sum(), clip_norm=0.3, scale=scale)
                assert norm(sums) <= 0.3
                full = length > 1 or dtype == torch.float32  # at the border float32's slack makes it cut
                assert norm(sums) >= 0.3 * (1 - 1e-5) * (1 if full else math.sqrt(1 - share**2))


@pytest.mark.parametrize("engine", ENGINES)
def test_removing_a_unit_moves_the_sums_by_its_own_vector(engine):
    """With its count at most clip_norm, and exactly that where the unit is cut."""
    lengths = torch.tensor([1e-30, 0.3, 0.5 - 1e-9, 0.5 + 1e-9, 0.7, 1e20, 0.0], dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)
    directions = F.normalize(torch.randn(7, 40, generator=generator, dtype=torch.float64), dim=1)
    module, x = linear(lengths[:, None] * directions)

    def sums(kept):
        return run(ENGINES[engine](module, Adaptive()), x[kept], None, lambda o, _: o.sum(), scale=1.0, clip_norm=0.5)[
            1
        ]

    for u, length in enumerate(lengths.tolist()):
        moved = norm({n: v - sums([i for i in range(7) if i != u])[n] for n, v in sums(list(range(7))).items()})
        assert moved <= 0.5 * (1 + 1e-13)
        assert moved == pytest.approx(0.5 * (1 if length > 0.5 else math.sqrt(0.99) * length / 0.5), rel=1e-9)


@pytest.mark.parametrize("size", [None, 1, 3])
@pytest.mark.parametrize("engine", ENGINES)
def test_count_is_of_units_in_any_chunks(engine, size):
    """Units, not examples, are counted: what matters is the norm of the sum of a unit's examples."""
    lengths = torch.tensor([0.6, -0.6, 0.9, 0.9, 1.5, 0.0, 0.4, 0.5])
    units = torch.tensor([0, 0, 1, 1, 2, 3, 4, 5])  # of norms 0, 1.8, 1.5, 0, 0.4, 0.5
    module, x = linear(lengths[:, None] * torch.tensor([[0.6, 0.8]]))
    mixed = torch.tensor([2, 5, 0, 7, 1, 3, 6, 4])
    clipping = ENGINES[engine](module, Adaptive(share=0.25), size)
    _, sums = run(clipping, x[mixed], None, lambda out, _: out.sum(), groups=units[mixed], scale=1.0, clip_norm=1.0)
    assert sums[".above"].item() == pytest.approx(0.25 * 2, rel=1e-6)
    expected = math.sqrt(1 - 0.25**2) * 2.9 * torch.tensor([[0.6, 0.8]])
    torch.testing.assert_close(sums["weight"], expected, rtol=1e-5, atol=1e-6)


class Unused(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))

    def forward(self, x):
        return x * 2


@pytest.mark.parametrize("engine", ENGINES)
def test_units_without_a_gradient_add_nothing(engine):
    _, sums = run(ENGINES[engine](Unused(), Adaptive(share=0.5)), torch.ones(3, 2), None, lambda out, _: out.sum())
    assert torch.equal(sums["weight"], torch.zeros(2))
    assert sums[".above"].item() == 0.0
    module, x = linear(torch.zeros(0, 2))
    _, sums = run(ENGINES[engine](module, Adaptive(share=0.5)), x, None, lambda out, _: out.sum(), scale=1.0)
    assert sums[".above"].item() == 0.0


@pytest.mark.filterwarnings("ignore:.*in two passes:anyorder.errors.ClippingWarning")
@pytest.mark.parametrize("name", RULES)
def test_rules_hold_for_models_that_one_pass_cannot_run(name, monkeypatch):
    module, rule = network().double(), RULES[name]
    x, y = torch.randn(6, 4, dtype=torch.float64), torch.randint(0, 3, (6,))
    _, expected = run(GhostClipping(module, rule=rule), x, y, F.cross_entropy, clip_norm=0.1)

    def fail(self, tensors, *options):
        raise engine.Unmapped("no")

    monkeypatch.setattr(engine.Pass, "outputs", fail)
    assert_close(run(GhostClipping(module, rule=rule), x, y, F.cross_entropy, clip_norm=0.1)[1], expected, 1e-10)


@pytest.mark.parametrize(
    ("groups", "message"),
    [((("0",),), r"in none: 2\.bias, 2\.weight"), ((("0",), ("0.weight", "2")), r"in several: 0\.weight"),
     ((("0", "2"), ("3",)), "empty: 1")],
)  # fmt: skip
def test_groups_hold_every_parameter_once(groups, message):
    x, y = torch.randn(2, 4), torch.tensor([1, 0])
    with pytest.raises(ArgumentError, match=message):
        run(GhostClipping(network(), rule=PerGroup(groups)), x, y, F.cross_entropy)


def test_arguments():
    with pytest.raises(ArgumentError, match="add up to 1"):
        PerGroup((("0",), ("2",)), (0.6, 0.9))
    with pytest.raises(ArgumentError, match="one for each of the 1 groups"):
        PerGroup((("0",),), (0.6, 0.8))
    with pytest.raises(ArgumentError, match="gamma"):
        Automatic(0.0)


@pytest.mark.parametrize(
    "options",
    [{"quantile": 0.0}, {"quantile": 1.0}, {"learning_rate": 0.0}, {"learning_rate": 11.0}, {"share": 0.0},
     {"share": 1.0}, {"every": 0}, {"every": 1.5}],
)  # fmt: skip
def test_arguments_of_adaptive(options):
    with pytest.raises(ArgumentError, match=next(iter(options))):
        Adaptive(**options)


@pytest.mark.parametrize("name", RULES)
def test_descriptions(name):
    assert RULES[name].describe()


class Given(ClipRule):
    """Factors by a function."""

    def __init__(self, factors):
        self.given = factors

    def factors(self, squares, clip_norm):
        assert len(next(iter(squares.values())))
        return self.given(squares, clip_norm)

    def describe(self):
        return "given"


class WithMore(Given):
    """A coordinate of its own."""

    def coordinates(self, squares, clip_norm):
        return {"more": torch.full_like(next(iter(squares.values())), 0.1 * clip_norm)}


def constant(value):
    return lambda squares, clip_norm: dict.fromkeys(squares, torch.full_like(next(iter(squares.values())), value))


def each_whole(squares, clip_norm):
    """Each parameter, not all together."""
    return {name: (clip_norm / square.sqrt()).clamp(max=1.0) for name, square in squares.items()}


def halved(squares, clip_norm):
    return {name: 0.5 * factor for name, factor in Flat().factors(squares, clip_norm).items()}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    ("rule", "match"),
    [
        (Given(lambda s, c: Flat().factors(s, c) | {"more": torch.ones(1)}), "and for nothing else"),
        (Given(lambda s, c: {}), "a factor for each parameter"),
        (Given(lambda s, c: dict.fromkeys(s, torch.zeros(2))), "one number for each"),
    ],
)
def test_rules_from_elsewhere_that_fit_no_parameters_are_refused(rule, match, engine):
    with pytest.raises(ArgumentError, match=match):
        run(ENGINES[engine](network(), rule), torch.randn(6, 4), torch.zeros(6).long(), F.cross_entropy, clip_norm=0.01)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    "rule",
    [
        Given(constant(1e6)),
        Given(constant(-1e6)),
        Given(constant(math.inf)),
        Given(constant(math.nan)),
        Given(each_whole),
    ],
)
def test_rules_from_elsewhere_are_held_to_the_bound_without_a_word(rule, engine):
    x, y = torch.randn(1, 4), torch.zeros(1).long()
    _, sums = run(ENGINES[engine](network(), rule), x, y, F.cross_entropy, clip_norm=0.01)
    length = math.sqrt(sum(float(value.double().square().sum()) for value in sums.values()))
    assert length <= 0.01 * (1 + 1e-6)


class Remembering(ClipRule):
    """Divides by the largest norm of all units that it was given."""

    def __init__(self):
        self.largest = [0.0]

    def factors(self, squares, clip_norm):
        self.largest.append(max(self.largest[-1], float(sum(squares.values()).sqrt())))
        return {name: torch.full_like(square, clip_norm / self.largest[-1]) for name, square in squares.items()}

    def describe(self):
        return "remembering"


def test_a_rule_from_elsewhere_remembers_no_unit_before():
    """A hundred units of norm 1 behind one of norm 10^6: without the copies it moved the sum by 100 clip norms."""
    cut = Cut.of(Remembering())
    for first in (1.0, 1e6):  # and no step before
        norms = torch.tensor([first] + [1.0] * 100, dtype=torch.float64)
        factors, _ = cut.apply({"w": norms**2}, 0.5)
        assert torch.equal(factors["w"] * norms, torch.full_like(norms, 0.5))


def test_a_rule_from_elsewhere_that_cannot_be_copied_is_refused_before_anything_runs():
    with pytest.raises(ArgumentError, match="cannot be copied"):
        Cut.of(Given(i for i in range(3)))


@pytest.mark.parametrize("engine", ENGINES)
def test_a_rule_from_elsewhere_with_coordinates_is_refused_before_anything_runs(engine):
    with pytest.raises(ArgumentError, match="coordinates of its own: only Adaptive"):
        ENGINES[engine](network(), WithMore(halved))
    with pytest.raises(ArgumentError, match="rule must be None or a rule"):
        ENGINES[engine](network(), "flat")


def test_what_a_rule_asks_for_is_factors_and_a_schedule():
    assert Cut.of(None) == Cut.of(Flat()) == Cut(Flat(), FixedNorm())
    assert Cut.of(Automatic(0.3)) == Cut(Automatic(0.3), FixedNorm())
    assert Cut.of(Adaptive(0.3)) == Cut(Flat(), Adaptive(0.3))
    assert not Cut.of(PerGroup()).counted
    assert Cut.of(Adaptive()).counted == (Adaptive.COUNT,)


@pytest.mark.parametrize("factors", [Flat(), PerGroup(), Automatic(), Given(constant(1e6))], ids=lambda f: f.describe())
def test_a_moving_norm_bounds_every_rule_of_factors_with_its_count(factors):
    squares = {
        "a": torch.tensor([0.0, 1e-4, 0.5, 4.0, 1e12]).double(),
        "b": torch.tensor([0.0, 1.0, 0.4, 1.0, 1.0]).double(),
    }
    made, count = Cut(factors, Adaptive(share=0.6)).apply(squares, 1.0)
    lengths = sum(made[name].square() * square for name, square in squares.items()) + count[".above"].square()
    assert lengths.max() <= 1 + 1e-12
    assert count[".above"].tolist() == [0.0, 0.6, 0.0, 0.6, 0.6]


def by_the_largest(squares, clip_norm):
    """What one unit keeps depends on the norms of the others, if the rule is shown them."""
    return dict.fromkeys(
        squares,
        (clip_norm / sum(squares.values()).sqrt().max()).clamp(max=1.0).expand(next(iter(squares.values())).shape),
    )


@pytest.mark.parametrize("engine", ENGINES)
def test_a_rule_from_elsewhere_sees_one_unit_at_a_time(engine):
    x, y = torch.randn(4, 4), torch.zeros(4).long()
    x[0] *= 1000
    sums = [
        run(ENGINES[engine](network(), rule), x, y, F.cross_entropy, clip_norm=0.01)[1]
        for rule in (Given(by_the_largest), Flat())
    ]
    for name, value in sums[0].items():
        torch.testing.assert_close(value, sums[1][name])


@pytest.mark.parametrize("engine", ENGINES)
def test_a_rule_from_elsewhere_that_keeps_the_bound(engine):
    x, y = torch.randn(6, 4), torch.zeros(6).long()
    _, sums = run(ENGINES[engine](network(), Given(halved)), x, y, F.cross_entropy, clip_norm=0.01)
    _, flat = run(ENGINES[engine](network(), Flat()), x, y, F.cross_entropy, clip_norm=0.01)
    for name, value in flat.items():
        torch.testing.assert_close(sums[name], value / 2)


@pytest.mark.parametrize("engine", ENGINES)
def test_rounding_carries_no_unit_over_the_norm(engine):
    """In float32 about half of the units that are cut would come out longer, by a few 1e-8, but for the slack."""
    module = network()
    clipping = ENGINES[engine](module, Flat())
    lengths = []
    for x in 3 * torch.randn(40, 1, 4):
        _, sums = run(clipping, x, torch.zeros(1).long(), F.cross_entropy, clip_norm=0.01)
        lengths.append(norm({name: value.double() for name, value in sums.items()}))
    assert max(lengths) <= 0.01
    assert max(lengths) >= 0.01 * (1 - 1e-6)


@pytest.mark.parametrize("clip_norm", [1.0, 0.3, 7.7])
def test_shares_of_any_number_of_groups_are_rounded_down(clip_norm):
    """In exact arithmetic the norms of the groups, all of them cut, are together within the clip norm."""
    generator = torch.Generator().manual_seed(0)
    for count in range(1, 80):
        squares = {str(i): 10 + torch.rand(4, generator=generator, dtype=torch.float64) * 1e4 for i in range(count)}
        given = torch.rand(count, generator=generator, dtype=torch.float64)
        shares = (given / given.norm()).tolist()
        for rule in (PerGroup(), PerGroup(tuple((name,) for name in squares), tuple(shares))):
            factors = rule.factors(squares, clip_norm)
            for i in range(4):
                parts = [Fraction(factors[n][i].item()) ** 2 * Fraction(squares[n][i].item()) for n in squares]
                assert sum(parts) <= Fraction(clip_norm) ** 2


@pytest.mark.parametrize("longer", [0.5, 1.0, 1 + 1e-9, 1.01, 1.4, 2.0])
def test_what_a_rule_from_elsewhere_leaves_a_little_too_long_is_cut(longer):
    squares = {"a": torch.tensor([9.0, 1e4], dtype=torch.float64), "b": torch.tensor([16.0, 1.0], dtype=torch.float64)}
    rule = Given(lambda s, c: {name: longer * factor for name, factor in Automatic(1e-9).factors(s, c).items()})
    factors, _ = Cut.of(rule).apply(squares, 0.3)
    lengths = sum(factors[name].square() * square for name, square in squares.items()).sqrt()
    assert lengths.tolist() == pytest.approx([0.3 * min(longer, 1.0)] * 2, rel=1e-8)
    assert max(lengths.tolist()) <= 0.3 * (1 + 1e-15)


def test_a_unit_at_the_clip_norm_is_not_above_it():
    _, count = Cut.of(Adaptive()).apply({"a": torch.tensor([0.25, 0.2500001], dtype=torch.float64)}, 0.5)
    assert (count[Adaptive.COUNT] > 0).tolist() == [False, True]
