"""What `ao.plan` takes: mechanisms in words, workloads and optimizers, memory, joined batches; what it refuses."""

import inspect
import math
from dataclasses import replace
from typing import get_args

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import anyorder as ao
from anyorder.accounting.gaussian import NEIGHBOURS
from anyorder.errors import ArgumentError, LoaderError, NoiseWarning, PlanError
from anyorder.noise import NoiseSource
from anyorder.optimize import choose, fit
from anyorder.optimize.candidates import rows_touched
from anyorder.participation import BallsInBins, EpochShuffle, FixedOrder, PoissonSampling, SingleEpoch
from anyorder.participation.registry import WORDS, OrderWord
from anyorder.plan import options
from anyorder.plan.planner import plan_at_sigma, with_budget
from anyorder.sampling.samplers import PoissonBatchSampler
from anyorder.strategy import BLT, Dense, Independent, Tree
from anyorder.strategy.base import Combination
from anyorder.strategy.tree import fit_tree
from anyorder.workload import GivenWorkload, Workload, cosine, custom, prefix_sum, weighted
from plans import flat_plan


def small(**changes):
    settings = {"dataset_size": 100, "batch_size": 10, "epochs": 3, "sigma": 2.0, "delta": 1e-5, "order": "fixed"}
    return flat_plan(**{**settings, **changes})


ORDER = FixedOrder(30, 3, 10)


@pytest.mark.parametrize(
    ("words", "kind", "sizes"),
    [
        ("dense", "dense", {}),
        ("banded, 4 bands", "banded", {"bands": 4}),
        ("blt, 1 buffers", "blt", {"buffers": 1}),
        ("banded inverse, 3 bands", "banded_inverse", {"bands": 3}),
    ],
)
def test_a_plan_takes_the_words_of_the_shell(words, kind, sizes):
    chosen = small(mechanism=words, momentum=0.9)
    assert chosen.strategy == fit(kind, Workload(30, momentum=0.9), ORDER, **sizes)
    by_hand = small(mechanism=chosen.strategy, momentum=0.9)
    assert by_hand == chosen


def test_a_kind_is_the_best_of_it_and_the_tree_takes_its_options():
    best = next(one for one in choose(prefix_sum(30), ORDER) if one.name.startswith("blt"))
    assert small(mechanism="blt").strategy == best.strategy
    tree = small(mechanism="tree", estimator="online", restart_every=1, completion="on").strategy
    assert tree == Tree(30, "online", restarts=(10, 20), completion=True)
    assert small(mechanism="tree", restart_every=0).strategy == fit_tree(prefix_sum(30), ORDER, restart_every=0)


def test_poisson_by_name_by_order_and_by_rule():
    by_name = plan_at_sigma(2.0, dataset_size=100, batch_size=10, epochs=3, delta=1e-5, mechanism="poisson")
    assert by_name == small(order="poisson") == small(order="poisson", mechanism="poisson")
    rule = PoissonSampling(30, 0.1)
    by_rule = plan_at_sigma(2.0, order=rule, batch_size=10, delta=1e-5, mechanism="poisson")
    assert by_rule.curve == by_name.curve
    with pytest.raises(PlanError, match="'poisson' needs secret sampling"):
        small(mechanism="poisson")
    for mechanism in ("blt, 2 buffers", "tree", "dense"):
        with pytest.raises(PlanError, match="no amplified accounting"):
            small(order="poisson", mechanism=mechanism)


@pytest.mark.parametrize("objective", ["max", "last"])
def test_the_objective_is_what_is_made_small(objective):
    mean, other = small(mechanism="dense"), small(mechanism="dense", objective=objective)
    assert other.strategy == fit("dense", prefix_sum(30), ORDER, objective)

    def error(plan):
        profile = plan.noise_profile()
        return {"max": profile.max(), "last": profile[-1]}[objective]

    assert error(other) < error(mean) * 0.999
    assert mean.noise_error() < other.noise_error()
    auto = small(objective=objective)
    assert auto.strategy == choose(prefix_sum(30), ORDER, None, objective)[0].strategy


def test_a_workload_of_ones_own():
    A = custom(np.tri(30) * np.linspace(1, 2, 30))
    assert small(workload=A, mechanism="dense").workload == A
    assert type(small(workload=A, mechanism="dense").strategy) is Dense
    work = Workload(30, momentum=0.9, learning_rates=cosine(30), weight_decay=0.01)
    work = weighted(work, np.eye(30)[-1])  # of the last iterate
    chosen = small(workload=work, mechanism="blt, 1 buffer")
    assert chosen.workload == work
    assert chosen.strategy == fit("blt", work, ORDER, buffers=1)


def sgd(**options):
    return torch.optim.SGD([torch.nn.Parameter(torch.zeros(3))], **{"lr": 0.1, **options})


def test_the_workload_is_read_off_the_optimizer():
    by_words = small(mechanism="blt, 1 buffer", momentum=0.9)
    assert small(mechanism="blt, 1 buffer", optimizer=sgd(momentum=0.9)) == by_words
    nesterov = small(mechanism="independent", optimizer=sgd(momentum=0.9, nesterov=True, weight_decay=0.1))
    assert nesterov.workload == Workload(30, momentum=0.9, nesterov=True, weight_decay=0.1, learning_rates=[0.1] * 30)
    optimizer = sgd()
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 30)
    with_schedule = small(mechanism="independent", optimizer=(optimizer, scheduler))
    np.testing.assert_allclose(with_schedule.workload.learning_rates, cosine(30), atol=1e-12)
    assert optimizer.param_groups[0]["lr"] == 0.1
    dampened = small(mechanism="independent", optimizer=sgd(momentum=0.9, dampening=0.5))
    assert type(dampened.workload) is GivenWorkload
    with pytest.raises(ArgumentError, match=r"torch.optim.SGD.*got RMSprop"):
        small(optimizer=torch.optim.RMSprop([torch.nn.Parameter(torch.zeros(3))]))


def test_memory_in_vectors_and_rows_in_a_step_bound_the_choice():
    sizes = {"dataset_size": 360, "batch_size": 30, "epochs": 3, "sigma": 2.0, "delta": 1e-5}
    free = choose(prefix_sum(36), EpochShuffle(3, 12))
    found = [flat_plan(**sizes, memory=memory, max_cost=5).strategy for memory in (0, 3)]
    for memory, strategy in zip((0, 3), found, strict=True):
        assert strategy == next(one for one in free if one.state_rows <= memory and one.cost <= 5).strategy
    assert [one.state_rows for one in found] == [0, 2]  # three vectors gain less than 1 %
    assert flat_plan(**sizes).strategy == free[0].strategy
    assert flat_plan(**sizes, memory=0, max_cost=1).strategy == Independent(36)
    kind = next(one for one in free if one.name.startswith("banded inverse") and one.cost <= 5)
    assert flat_plan(**sizes, mechanism="banded inverse", max_cost=5).strategy == kind.strategy
    kind = next(one for one in free if one.name.startswith("blt") and one.state_rows <= 1)
    assert flat_plan(**sizes, mechanism="blt", memory=1).strategy == kind.strategy


@pytest.mark.parametrize(
    ("text", "vectors"),
    [("8 MB", 2), ("7.9 MB", 1), ("12000kB", 3), ("4 MiB", 1), ("3999999 B", 0), ("0.1 GiB", 26)],
)
def test_memory_in_bytes_is_float32_vectors_of_the_model(text, vectors):
    def buffers(m):
        return BLT(np.linspace(0.1, 0.9, m), np.full(m, 0.1 / m), 30) if m else Independent(30)

    assert small(mechanism=buffers(vectors), memory=text, model_size=1_000_000).strategy.state_rows == vectors
    with pytest.raises(PlanError, match=f"memory allows the mechanism {vectors} vectors.*keeps {vectors + 1};"):
        small(mechanism=buffers(vectors + 1), memory=text, model_size=1_000_000)


def test_mechanisms_beyond_the_budget_are_refused():
    with pytest.raises(PlanError, match=r"memory allows the mechanism 0 vectors.*keeps 1"):
        small(mechanism="blt, 1 buffer", memory=0)
    with pytest.raises(PlanError, match=r"max_cost allows 4 rows a step.*takes 15"):
        small(mechanism="dense", max_cost=4)
    long = plan_at_sigma(1.0, dataset_size=100, batch_size=1, epochs=1, delta=1e-5, mechanism="dense").strategy
    assert rows_touched(long) > 32  # which bound choices alone
    assert type(long) is Dense


def loader(n=100, batch=10, **options):
    return DataLoader(TensorDataset(torch.zeros(n, 1)), batch_size=batch, **options)


@pytest.mark.parametrize(("n", "steps"), [(100, 5), (91, 5), (95, 5), (80, 4)])
def test_batches_of_a_loader_that_are_joined_are_a_step(n, steps):
    chosen = plan_at_sigma(
        2.0, loader=loader(n, shuffle=True), epochs=3, batch_size=20, delta=1e-5, mechanism="independent"
    )
    assert chosen.participation == EpochShuffle(3, steps)
    assert (chosen.batch_size, chosen.dataset_size) == (20, n)
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ao.PrivacyEngine(chosen).make_private(model, optimizer, loader(n, shuffle=True), accumulate=2)


def test_a_place_of_the_unit_in_a_batch_is_a_plan_for_users():
    people = TensorDataset(torch.zeros(20, 1), torch.arange(20) // 2)
    for place in (1, lambda batch: batch[1]):
        chosen = plan_at_sigma(2.0, loader=DataLoader(people, batch_size=4), epochs=1, delta=1e-5, unit=place)
        assert (chosen.unit, chosen.curve.unit) == ("user", "user")
        assert chosen.participation.units.tolist() == list(range(10))


def test_a_plan_of_users_off_a_loader_may_divide_by_the_users_of_a_step():
    people = TensorDataset(torch.zeros(20, 1), torch.arange(20) // 2)
    given = {"epochs": 1, "sigma": 2.0, "delta": 1e-5, "unit": 1, "mechanism": "independent"}
    rows = flat_plan(loader=DataLoader(people, batch_size=4), **given)
    users = flat_plan(loader=DataLoader(people, batch_size=4), batch_size=2, **given)
    assert (rows.batch_size, users.batch_size) == (4, 2)
    assert users == replace(rows, batch_size=2)  # the claim is the same, and only the constant differs
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ao.PrivacyEngine(users).make_private(model, optimizer, DataLoader(people, batch_size=4), unit=1)
    with pytest.raises(ArgumentError, match="batch_size must be an integer of at least 1"):
        flat_plan(loader=DataLoader(people, batch_size=4), batch_size=0, **given)


def test_what_a_loader_says_may_be_said_again_and_nothing_else():
    given = {"epochs": 1, "sigma": 2.0, "delta": 1e-5, "mechanism": "independent"}
    assert flat_plan(loader=loader(), batch_size=10, dataset_size=100, **given) == flat_plan(loader=loader(), **given)
    with pytest.raises(ArgumentError, match=r"be a multiple of the 10 examples of its batches, .*, got 15"):
        flat_plan(loader=loader(), batch_size=15, **given)
    with pytest.raises(ArgumentError, match=r"be a multiple of the 10 examples of its batches, .*, got 5"):
        flat_plan(loader=loader(), batch_size=5, **given)
    with pytest.raises(ArgumentError, match="dataset_size must be left out with loader=, whose order has 100"):
        flat_plan(loader=loader(), dataset_size=99, **given)


def test_joined_batches_need_a_loader_without_coins():
    coins = DataLoader(
        TensorDataset(torch.zeros(100, 1)), batch_sampler=PoissonBatchSampler(100, 0.1, 10, NoiseSource.random())
    )
    with pytest.raises(LoaderError, match="accumulate must be 1"):
        plan_at_sigma(2.0, loader=coins, epochs=3, batch_size=20, delta=1e-5)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"workload": prefix_sum(30), "momentum": 0.9}, "optimizer= and momentum say the same thing: give one of them"),
        ({"optimizer": sgd(), "learning_rates": [1.0] * 30}, "optimizer= and learning_rates say the same thing"),
        ({"optimizer": (sgd(),)}, r"\(optimizer, scheduler\) where it is a tuple"),
        ({"optimizer": (prefix_sum(30), None)}, r"torch.optim.SGD.*got Workload"),
        ({"limits": {"memory": 2}}, r"limits must be ao.Limits"),
        ({"order": ["fixed", "shuffled"]}, "several are compared by ao.compare"),
        ({"order": "any"}, "several are compared by ao.compare"),
        ({"order": 3}, "order must be a word"),
        ({"objective": "median"}, "objective must be"),
        ({"objective": "max", "mechanism": Independent(30)}, "objective must not be given together with a Strategy"),
        ({"estimator": "online", "mechanism": "blt"}, "estimator must come with mechanism 'tree' only"),
        ({"restart_every": 1}, "restart_every must come with mechanism 'tree' only"),
        ({"completion": "on", "mechanism": Tree(30)}, "completion must come with mechanism 'tree' only"),
        ({"mechanism": 3}, "mechanism must be a text or a Strategy"),
        ({"mechanism": "blt, two buffers"}, "mechanism must be one of"),
        ({"memory": -1}, "memory must be an integer"),
        ({"memory": 2.5}, "memory must be an integer"),
        ({"memory": "2 gigs", "model_size": 3}, "memory must be a number of vectors, or bytes"),
        ({"memory": "2 GB"}, "model_size must be given"),
        ({"memory": "2 GB", "model_size": 0}, "model_size must be an integer"),
        ({"memory": 2, "model_size": 3}, "model_size must come with memory in bytes"),
        ({"model_size": 3}, "model_size must come with memory"),
        ({"memory": 2, "secure": True}, "memory must not be given with secure"),
        ({"max_cost": 0.5}, "max_cost must be"),
        ({"max_cost": math.inf}, "max_cost must be"),
    ],
)
def test_what_does_not_go_together_is_refused(changes, text):
    with pytest.raises(ArgumentError, match=text):
        small(**changes)


def test_a_workload_of_other_length_is_refused():
    with pytest.raises(PlanError, match="workload must have as many steps as the order, 30, got 31"):
        small(workload=prefix_sum(31))
    with pytest.raises(ArgumentError, match=r"optimizer must be torch.optim.SGD.*got ndarray"):
        small(workload=np.tri(30))


@pytest.mark.parametrize("budget", [{"epsilon": 3.0}, {"noise_multiplier": 1.5}, {"sigma": 0.7}])
@pytest.mark.parametrize("options", [{}, {"neighbours": "replace-one"}, {"order": "poisson", "mechanism": "poisson"}])
def test_another_budget_is_another_plan_of_the_same_parts(budget, options):
    if options.get("order") == "poisson":
        pytest.importorskip("dp_accounting")
    options = {"mechanism": "tree", **options}
    assert with_budget(small(**options), **budget) == small(**options, **{"sigma": None, **budget})
    with pytest.raises(ArgumentError, match="exactly one of"):
        with_budget(small(**options), epsilon=1.0, sigma=1.0)


@pytest.mark.parametrize(("clip_norm", "exponent"), [(1.0, -20), (3.0, -19), (0.75, -21)])
def test_the_grid_is_the_power_of_two_below_a_millionth_of_the_clip_norm(clip_norm, exponent):
    assert small(mechanism="independent", secure=True, clip_norm=clip_norm).grid == 2.0**exponent


def test_secure_choices_are_the_best_of_those_that_are_exact():
    known = choose(prefix_sum(30), ORDER, max_cost=5)
    exact = [one.strategy for one in known if isinstance(one.strategy, Combination)]
    assert exact[0] != known[0].strategy
    assert small(secure=True, max_cost=5).strategy == exact[0]


def test_secure_words_are_exact_or_refused():
    assert small(mechanism="banded inverse, 3 bands", secure=True).grid is not None
    with pytest.raises(PlanError):
        small(mechanism="blt, 1 buffer", secure=True)


KEYWORDS = [
    "loader", "dataset_size", "batch_size", "epochs", "order", "optimizer", "mechanism", "epsilon", "delta",
    "noise_multiplier", "risk", "clip_norm", "unit", "neighbours", "limits",
]  # fmt: skip


def test_a_plan_has_fifteen_keywords_whose_words_are_those_of_the_package():
    assert list(inspect.signature(ao.plan).parameters) == KEYWORDS
    assert get_args(OrderWord) == tuple(WORDS)
    assert set(get_args(options.Neighbours)) == set(NEIGHBOURS)
    for word in get_args(options.MechanismWord):
        small(mechanism=word, order="poisson" if word == "poisson" else "fixed")


def test_other_keywords_say_what_to_write():
    for name, instead in options.INSTEAD.items():
        with pytest.raises(ArgumentError) as refused:
            ao.plan(**{name: 1})
        assert str(refused.value) == f"{name} must not be given to plan: write {instead}"
        assert name not in KEYWORDS
    assert options.FLAT - {"weight_decay", "nesterov"} <= set(options.INSTEAD)
    with pytest.raises(TypeError, match="epsilom"):
        ao.plan(epsilom=1, delta=1e-5)


def test_options_carry_what_they_are_of():
    assert ao.order("fixed", drop_last=True) == ao.order("fixed", drop_last=True) != ao.order("fixed")
    assert ao.SGD(learning_rates=np.ones(3)) == ao.SGD(learning_rates=[1, 1, 1])
    assert hash(ao.mechanism("tree", estimator="full")) == hash(ao.mechanism("tree", estimator="full"))
    with pytest.raises(ArgumentError, match="options of a word, and an order says them itself"):
        ao.order(ORDER, drop_last=True)
    with pytest.raises(ArgumentError, match="learning_rates must"):
        ao.SGD(learning_rates="fast")
    assert small(order="fixed") == small(order=ao.order("fixed"))
    given = {"batch_size": 10, "noise_multiplier": 2.0, "delta": 1e-5}
    by_value = ao.plan(order=ao.order(BallsInBins(3, 10), method="bound"), mechanism="independent", **given)
    by_word = ao.plan(
        order=ao.order("balls-in-bins", method="bound"), mechanism="independent", dataset_size=100, epochs=3, **given
    )
    assert replace(by_word, dataset_size=None) == by_value


def test_nothing_is_printed(capsys):
    small(mechanism="tree")
    ao.compare(["fixed", "shuffled"], dataset_size=40, batch_size=10, epochs=2, epsilon=2, delta=1e-5)
    assert capsys.readouterr() == ("", "")


def test_delta_follows_the_number_of_units_and_one_above_it_is_warned_of():
    """Never above a tenth of 1 / n; of users, where the loader says who they are; refused where nobody knows n."""
    sizes = {"batch_size": 10, "epochs": 1, "noise_multiplier": 1.0, "mechanism": "independent"}
    for n, delta in ((10, 0.01), (30, 0.003), (1797, 5e-5), (60_000, 1e-6)):
        plan = ao.plan(dataset_size=n, **sizes)
        assert plan.delta == delta <= 0.1 / n
        assert "a tenth of 1 /" in dict(plan.facts())["delta"]
        assert "delta" not in dict(replace(plan, delta=delta / 2).facts())
    owners = DataLoader(TensorDataset(torch.arange(100) % 10, torch.zeros(100, 1)), batch_size=10)
    by_user = {"loader": owners, "unit": 0, "epochs": 1, "epsilon": 4.0}
    assert ao.plan(**by_user).delta == 0.01
    with pytest.raises(ArgumentError, match="delta must be given where the number of units is not known"):
        ao.plan(order=SingleEpoch(3), batch_size=2, epsilon=1)
    ao.plan(**by_user, delta=0.1)
    for more in ({**by_user, "delta": 0.11}, {"dataset_size": 50, **sizes, "delta": 0.03}):
        with pytest.warns(NoiseWarning, match="above one over the .* Take delta 0.0"):
            ao.plan(**more)
