"""Rules of clipping: no unit is longer than the clip norm, and each rule does what its equation says."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from anyorder.clipping import Automatic, ClipRule, Flat, GhostClipping, PerGroup
from anyorder.errors import ArgumentError
from clipping.brute import assert_close, norm, per_example, run

RULES = {
    "flat": Flat(),
    "per parameter": PerGroup(),
    "per group": PerGroup((("0",), ("2.weight", "2.bias")), (0.6, 0.8)),
    "equal groups": PerGroup((("0", "2.bias"), ("2.weight",))),
    "automatic": Automatic(),
}


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))


def clipped(gradient, rule, clip_norm):
    """One unit's gradient by the rule's equation, in float64."""
    if isinstance(rule, Automatic):
        return {n: g.double() * clip_norm / (norm(gradient) + rule.gamma) for n, g in gradient.items()}
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


@pytest.mark.parametrize("clip_norm", [0.03, 1.0])
@pytest.mark.parametrize("name", RULES)
def test_rule_is_its_equation(name, clip_norm):
    module, rule = network().double(), RULES[name]
    x, y = torch.randn(6, 4, dtype=torch.float64), torch.randint(0, 3, (6,))
    units = [clipped(g, rule, clip_norm) for g in per_example(module, x, y, F.cross_entropy)]
    expected = {n: sum(u[n] for u in units) for n in units[0]}
    _, sums = run(GhostClipping(module, rule=rule), x, y, F.cross_entropy, clip_norm=clip_norm)
    assert_close(sums, expected, 1e-10)
    assert max(norm(u) for u in units) <= clip_norm * (1 + 1e-12)


@settings(deadline=None, max_examples=60)
@given(
    seed=st.integers(0, 2**32), name=st.sampled_from(list(RULES)), log_clip=st.floats(-6, 3), scale=st.floats(0.1, 100)
)
def test_no_unit_is_over_the_clip_norm(seed, name, log_clip, scale):
    module = network()
    torch.manual_seed(seed)
    x, y = torch.randn(1, 4) * 10, torch.randint(0, 3, (1,))
    _, sums = run(GhostClipping(module, rule=RULES[name]), x, y, F.cross_entropy, clip_norm=10**log_clip, scale=scale)
    assert norm(sums) <= 10**log_clip


class Faulty(ClipRule):
    """Each group is cut to the whole clip norm."""

    def factors(self, squares, clip_norm):
        return {n: (clip_norm / s.sqrt()).clamp(max=1.0) for n, s in squares.items()}

    def describe(self):
        return "faulty"


def test_the_test_of_the_bound_sees_a_fault():
    module, x, y = network(), torch.randn(1, 4) * 10, torch.tensor([1])
    assert norm(run(GhostClipping(module, rule=Faulty()), x, y, F.cross_entropy, clip_norm=1e-3)[1]) > 1.5e-3


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


@pytest.mark.parametrize("name", RULES)
def test_descriptions(name):
    assert RULES[name].describe()
