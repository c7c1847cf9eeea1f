"""What claims rest on is closed and does not change: no subclass, no kind of one's own, no attribute set anew."""

import dataclasses
import importlib
import pkgutil
from types import MethodType
from typing import get_args

import numpy as np
import pytest

import anyorder as ao
from anyorder import participation
from anyorder.accounting.selection import Counts, Top, Uniform
from anyorder.budget.claim import Range, ScoreNoise, SearchCertificate, SearchClaim, Space
from anyorder.budget.search import Prepared, PrivateScore, Search, Trial
from anyorder.budget.search_privacy import Law
from anyorder.clipping import Adaptive, Automatic, Flat, PerGroup
from anyorder.clipping.norms import Cut
from anyorder.errors import ArgumentError, PlanError
from anyorder.online.losses import Loss
from anyorder.online.sets import Set
from anyorder.participation import KnownOrder, MinSeparation, PoissonSampling, SingleEpoch
from anyorder.participation.registry import ORDERS
from anyorder.patterns import Participation, Pattern, Separated
from anyorder.plan.planner import plan_at_sigma
from anyorder.release.schedules import FixedNorm
from anyorder.strategy import BLT, Dense, Independent, Strategy, Tree
from anyorder.strategy.registry import KINDS, Structure, sensitivity, unit_sensitivities
from anyorder.strategy.rescaled import Rescaled
from anyorder.strategy.sensitivity import Bound
from anyorder.training.metrics import Metrics
from anyorder.workload import GivenWorkload, Workload
from laws.cases import PARTICIPATIONS, STRATEGIES

N = 8
FINAL = [
    *(kind.cls for kind in KINDS),
    *ORDERS,
    *get_args(Pattern),
    *get_args(Loss),
    *get_args(Set),
    *get_args(Law),
    PrivateScore,
    Trial,
    Search,
    ScoreNoise,
    SearchClaim,
    SearchCertificate,
    Range,
    Space,
    Prepared,
    GivenWorkload,
    Flat,
    PerGroup,
    Automatic,
    Adaptive,
    Metrics,
    FixedNorm,
    Cut,
    ao.Plan,
    Bound,
    Counts,
    Top,
    Uniform,
]
OBJECTS = {
    **{name: make(N) for name, make in STRATEGIES.items()},
    **{name: make(N) for name, make in PARTICIPATIONS.items()},
    "poisson": PoissonSampling(N, 0.5),
    "workload": ao.workload.momentum(N, 0.9, np.linspace(1, 0.5, N)),
    "custom": ao.workload.custom(np.tri(N)),
    "weighted": ao.workload.weighted(ao.workload.momentum(N, 0.5), np.eye(N)[-1]),
}


class Rare(Participation):
    """Says that units come once, and lets them come always."""

    n, kind, pattern, needs = N, "single_epoch", Separated(N, N, 1), None

    def covers(self, actual):
        return True

    @classmethod
    def read(cls, data):
        return cls()

    def to_dict(self):
        return {"kind": "single_epoch", "n": N}

    def describe(self):
        return "once"


class Quiet(Strategy):
    """Says that C is I, and makes a tenth of the noise."""

    n, state_rows = N, 0

    def matrix(self):
        return np.eye(N)

    noising_matrix = matrix

    def init(self, size):
        return ()

    def step(self, t, state, row):
        return np.float32(0.1) * row(t), ()

    def to_dict(self):
        return {"kind": "independent", "n": N}


def planned(**changes):
    settings = {
        "participation": SingleEpoch(N), "strategy": BLT([0.9], [0.2], N), "workload": Workload(N), "clip_norm": 1.0,
        "sigma": 1.0, "delta": 1e-5, "batch_size": 1,
    }  # fmt: skip
    return ao.Plan(**{**settings, **changes})


def test_no_subclass_of_what_claims_are_proven_for():
    for kind in FINAL:
        with pytest.raises(TypeError, match=f"{kind.__name__} must not be subclassed, got Own"):
            type("Own", (kind,), {})


@pytest.mark.parametrize("order", [Rare(), "single_epoch", None])
def test_a_participation_of_ones_own_is_refused(order):
    for attempt in (
        lambda: planned(participation=order),
        lambda: sensitivity(Tree(N), order),
        lambda: sensitivity(Independent(N), order),
        lambda: participation.covers(SingleEpoch(N), order),
        lambda: participation.covers(order, SingleEpoch(N)),
    ):
        with pytest.raises(PlanError, match="the order must be one of"):
            attempt()


@pytest.mark.parametrize(
    "chosen", [Quiet(), Rescaled(Quiet(), np.ones(N)), Rescaled(Rescaled(Quiet(), [1] * N), [1] * N)]
)
def test_a_strategy_of_ones_own_is_refused(chosen):
    for attempt in (
        lambda: planned(strategy=chosen),
        lambda: sensitivity(chosen, SingleEpoch(N)),
        lambda: unit_sensitivities(chosen, KnownOrder([[t] for t in range(N)])),
        lambda: plan_at_sigma(1.0, order=SingleEpoch(N), batch_size=1, mechanism=chosen, delta=1e-5),
    ):
        with pytest.raises(PlanError, match="strategy must be one of .* got Quiet"):
            attempt()


def test_a_kind_that_is_registered_as_another_is_refused_all_the_same():
    """`isinstance` can be talked into anything."""
    Independent.register(Quiet)
    SingleEpoch.register(Rare)
    assert isinstance(Quiet(), Independent)
    test_a_strategy_of_ones_own_is_refused(Quiet())
    test_a_participation_of_ones_own_is_refused(Rare())


@pytest.mark.parametrize("mechanism", ["auto", "tree", "independent"])
def test_no_plan_for_an_order_of_ones_own(mechanism):
    with pytest.raises(PlanError, match="the order must be one of"):
        plan_at_sigma(1.0, order=Rare(), batch_size=1, mechanism=mechanism, delta=1e-5)


def test_a_workload_of_ones_own_is_refused():
    own = type("Own", (Workload,), {})(N)
    with pytest.raises(PlanError, match="workload must be"):
        planned(workload=own)


def leaves(base):
    """All classes of this package under one that have none below them."""
    below = [cls for cls in base.__subclasses__() if cls.__module__.startswith("anyorder.")]
    return {base} if not below else set().union(*map(leaves, below))


def test_every_strategy_has_one_row_with_examples():
    for module in pkgutil.iter_modules(ao.strategy.__path__, "anyorder.strategy."):
        importlib.import_module(module.name)  # also one that nothing imports yet
    assert leaves(Strategy) == {kind.cls for kind in KINDS}
    for field in ("cls", "name", "words"):
        assert len({getattr(kind, field) for kind in KINDS}) == len(KINDS)
    assert {kind.structure for kind in KINDS} == set(Structure)
    for kind in KINDS:
        assert kind.examples
        for make in kind.examples.values():
            assert type(make(N)) is kind.cls
            assert make(N).to_dict()["kind"] == kind.name
            assert all(isinstance(getattr(make(N), size.attribute), int) for size in kind.sizes)


def parts(value, seen):
    """All that can be reached from an object by its attributes."""
    if id(value) in seen or isinstance(value, (int, float, str, type(None))):
        return
    seen[id(value)] = value
    yield value
    inside = value if isinstance(value, tuple) else vars(value).values() if hasattr(value, "__dict__") else ()
    for part in inside:
        yield from parts(part, seen)


def test_nothing_can_be_written():
    for whole in OBJECTS.values():
        check_nothing_can_be_written(whole)


def check_nothing_can_be_written(whole):
    before = whole.to_dict()
    for value in parts(whole, {}):
        assert not isinstance(value, (list, dict, set, bytearray)), value
        if isinstance(value, np.ndarray):
            with pytest.raises(ValueError, match="read-only"):
                value[...] = 0
            with pytest.raises(ValueError, match="WRITEABLE"):
                value.flags.writeable = True
        elif not isinstance(value, tuple):
            for attribute, held in list(vars(value).items()):
                with pytest.raises((AttributeError, dataclasses.FrozenInstanceError)):
                    setattr(value, attribute, held)
                with pytest.raises((AttributeError, dataclasses.FrozenInstanceError)):
                    delattr(value, attribute)
            for method in [name for name in dir(type(value)) if not name.startswith("__")]:
                with pytest.raises((AttributeError, dataclasses.FrozenInstanceError)):
                    setattr(value, method, MethodType(lambda self: 0, value))
    assert whole.to_dict() == before


def test_a_plan_keeps_its_claim_whatever_is_tried_on_its_strategy():
    chosen = BLT([0.9], [0.2], N)
    plan = planned(strategy=chosen, participation=MinSeparation(N, 2, 3))
    for change in (
        lambda: setattr(chosen, "scales", np.array([5.0])),
        lambda: setattr(chosen, "toeplitz_coefficients", lambda m=None: np.ones(N)),
        lambda: setattr(chosen, "step", lambda t, state, row: (0 * row(t), state)),
        lambda: chosen.__init__([0.9], [5.0], N),
        lambda: setattr(plan, "strategy", Independent(N)),
    ):
        with pytest.raises(AttributeError):
            change()
    assert plan.sensitivity == sensitivity(BLT([0.9], [0.2], N), MinSeparation(N, 2, 3))


@pytest.mark.parametrize("given", [np.full(2, 0.5), np.full((3, 2), 0.5)[0]])
def test_what_was_given_is_copied(given):
    blt = BLT(given, given, N)
    steps = np.array([3, 1])
    order = KnownOrder([steps])
    matrix = np.eye(2)
    dense = Dense(matrix)
    given[:], steps[:], matrix[:] = 0, 0, 0
    assert blt.decays.tolist() == blt.scales.tolist() == [0.5, 0.5]
    assert order.units.tolist() == [1, 3]
    assert dense.matrix().tolist() == [[1, 0], [0, 1]]


def test_numbers_of_a_plan_are_floats_whatever_was_given():
    given = np.array(1.0)
    plan = planned(clip_norm=given)
    given[...] = 100.0
    assert plan.clip_norm == 1.0
    assert type(plan.clip_norm) is type(planned(sigma=np.float32(1)).sigma) is float
    assert type(SingleEpoch(np.int64(3)).n) is int


def test_known_orders_take_whole_numbers_of_64_bits_or_text():
    assert KnownOrder([np.array([2, 1]), [], 7, [np.int32(1)]]).units.tolist() == [1, 2, 7]
    assert KnownOrder([["b", "a"], "c"]).units.tolist() == ["a", "b", "c"]
    for order in ([[True]], [[1.0]], [[1, "a"]], [["a"], [1]], [[2**63]], [[None]], [[], []]):
        with pytest.raises(ArgumentError):
            KnownOrder(order)


def test_a_plan_that_is_none_by_exact_type_is_carried_out_nowhere():
    """A class in front of it takes the guard of subclasses away, and could answer for the noise what it likes."""

    class Open:
        def __init_subclass__(cls, **_):
            pass

    plan = ao.plan(dataset_size=4, batch_size=2, epochs=1, epsilon=1, delta=1e-5)
    Quiet = type("Quiet", (Open, ao.Plan), {"noise_std": property(lambda self: 1e-9)})
    quiet = Quiet(**{field.name: getattr(plan, field.name) for field in dataclasses.fields(plan) if field.init})
    for carry_out in (lambda: ao.Release(quiet, 3), lambda: ao.PrivacyEngine(quiet)):
        with pytest.raises(ArgumentError, match="must be an anyorder Plan"):
            carry_out()
