"""Law 11: what the package has and the laws do not know fails here.

Members are found by going through the package: all classes that derive from a base, all members of a closed union.
Nothing here is a list that a new member could be forgotten in.
"""

import importlib
import inspect
import itertools
import sys
from pathlib import Path
from typing import get_args

import numpy as np

import anyorder
from anyorder.accounting.curves import Curve
from anyorder.clipping.norms import ClipRule
from anyorder.participation.registry import ORDERS
from anyorder.patterns import Participation, Pattern
from anyorder.release.schedules import FixedNorm, Schedule
from anyorder.strategy import Strategy, Tree
from anyorder.strategy.registry import KINDS, Structure
from anyorder.strategy.toeplitz import Toeplitz
from laws.cases import CLIP_RULES, PARTICIPATIONS, SAMPLED, STRATEGIES
from laws.test_curves import CURVES

# No member of a set is defined elsewhere: these rooms stand above all others, or hold the set.
HOLD_SETS = (
    "patterns", "workload", "participation", "strategy", "optimize", "accounting", "noise",
    "release", "clipping",
)  # fmt: skip
N = 9
ROOT = Path(anyorder.__file__).parent


FILES = sorted(file for room in HOLD_SETS for file in [*ROOT.glob(f"{room}.py"), *ROOT.glob(f"{room}/**/*.py")])
for file in FILES:
    name = ".".join(["anyorder", *file.relative_to(ROOT).with_suffix("").parts])
    importlib.import_module(name.removesuffix(".__init__"))


def members(base):
    """All classes of the package under one that are not abstract, wherever they stand."""
    below = [cls for cls in base.__subclasses__() if cls.__module__.startswith("anyorder.")]
    for cls in below:
        yield from members(cls)
    if not inspect.isabstract(base):
        assert not below, f"{base.__name__} has subclasses and can be made: a class is abstract or final"
        yield base


def types_of(cases):
    return {type(make(N)) for make in cases.values()}


def test_every_strategy_is_in_the_laws():
    assert set(members(Strategy)) == types_of(STRATEGIES) == {kind.cls for kind in KINDS}


def test_every_structure_has_a_strategy_in_the_laws():
    assert {kind.structure for kind in KINDS} == set(Structure)


def test_every_toeplitz_kind_has_hard_cases_in_the_laws():
    """Entries of both signs, and c_1 > c_0: what bounds for monotone matrices say of them is wrong."""
    for kind in KINDS:
        made = [make(N) for make in kind.examples.values()]
        if not isinstance(made[0], Toeplitz) or not kind.sizes:  # without sizes it has no parameters to be odd in
            continue
        columns = [strategy.toeplitz_coefficients() for strategy in made]
        assert any((c < 0).any() and c[1] > c[0] for c in columns), kind.words
        assert any(c[0] != 1 or (np.diff(abs(c)) > 0).any() for c in columns), kind.words


def test_every_way_of_a_tree_is_in_the_laws():
    """Estimator, whether blocks are completed, whether rows are made again: each takes steps of its own."""
    trees = [tree for tree in (make(N) for make in STRATEGIES.values()) if type(tree) is Tree]
    found = {(tree.estimator, any(tree.completion), tree.regenerate) for tree in trees}
    ways = set(itertools.product(("vanilla", "online", "full"), (False, True), (False, True)))
    assert ways - found == {("vanilla", False, True), ("vanilla", True, True)}  # which keeps nothing in any case
    assert Tree(N, "vanilla").state_rows == 0


def test_every_participation_is_in_the_laws():
    assert set(members(Participation)) == types_of(PARTICIPATIONS | SAMPLED) == set(ORDERS)


def test_every_family_of_patterns_is_in_the_laws():
    assert {type(make(N).pattern) for make in PARTICIPATIONS.values()} == set(get_args(Pattern))


def test_every_rule_of_clipping_is_in_the_laws():
    """And every schedule of norms but `FixedNorm`, under which all the others are."""
    assert {type(rule) for rule in CLIP_RULES.values()} == {*members(ClipRule), *get_args(Schedule)} - {FixedNorm}


def test_every_curve_is_in_the_laws():
    """Whatever class of the accounting says both epsilon(delta) and delta(epsilon)."""
    found = {
        value
        for name, module in list(sys.modules.items())
        if name.startswith("anyorder.accounting")
        for value in vars(module).values()
        if inspect.isclass(value)
        and not value.__subclasses__()
        and callable(getattr(value, "epsilon", None))
        and callable(getattr(value, "delta", None))
    }
    assert found == set(get_args(Curve)) == {type(curve) for curve in CURVES.values()}
