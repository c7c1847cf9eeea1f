"""The plan joins the parts, calibrates to the safe side, and its files show any alteration."""

import dataclasses
import json
import math

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import anyorder as ao
from anyorder.app.planning import make_plan
from anyorder.errors import ArgumentError, CertificateError, PlanError
from anyorder.formatting import rounded_up
from anyorder.participation import EpochShuffle, FixedOrder, KnownOrder, MinSeparation, PoissonSampling, SingleEpoch
from anyorder.plan.plan import promised
from anyorder.plan.planner import plan_at_sigma
from anyorder.sampling import UnitOrderSampler
from anyorder.strategy import Independent, Tree
from plans import flat_plan


def small(**changes):
    settings = {"dataset_size": 100, "batch_size": 10, "epochs": 3, "epsilon": 4.0, "delta": 1e-5, "mechanism": "tree"}
    return flat_plan(**{**settings, **changes})


@pytest.mark.parametrize("order", ["shuffled", "sequential", "fixed"])
@pytest.mark.parametrize("mechanism", ["tree", "independent"])
@pytest.mark.parametrize("neighbours", ["zero-out", "replace-one"])
def test_calibration_lands_at_or_under_the_target(order, mechanism, neighbours):
    plan = small(order=order, mechanism=mechanism, neighbours=neighbours)
    assert 4.0 * (1 - 1e-6) <= plan.epsilon <= 4.0
    factor = {"zero-out": 1, "replace-one": 2}[neighbours]
    mu = factor * plan.clip_norm * plan.sensitivity.value / plan.noise_std
    assert plan.mu == pytest.approx(mu * (1 + plan.rounding), rel=1e-12)
    assert 0 <= plan.rounding < 1e-6
    assert ao.accounting.gdp_delta(mu, 4.0) <= 1e-5


def test_order_in_words_is_the_participation_of_that_order():
    assert small().participation == EpochShuffle(3, 10)
    assert small(order="sequential").participation == small(order="fixed").participation == FixedOrder(30, 3, 10)
    assert small(epochs=1).participation == SingleEpoch(10)
    assert small(dataset_size=101).participation == EpochShuffle(3, 11)
    assert small(dataset_size=101, drop_last=True).participation == EpochShuffle(3, 10)
    order = KnownOrder([[0], [1], [0]])
    assert ao.plan(order=order, batch_size=1, epsilon=1, delta=1e-5, mechanism="tree").participation == order


def test_exact_integers_are_for_neighbours_that_leave_batches_their_size():
    """A batch with one unit less has another shape, in which floats of the others may be rounded otherwise."""
    for order in (MinSeparation(6, 2), KnownOrder([[0], [1], [0], [2], [1], [0]]), PoissonSampling(6, 0.5)):
        parts = {"participation": order, "strategy": Independent(6), "workload": ao.workload.prefix_sum(6)}
        settings = {"clip_norm": 1.0, "sigma": 1.0, "delta": 1e-5, "batch_size": 2, "neighbours": "add-or-remove"}
        assert ao.Plan(**parts, **settings).grid is None
        with pytest.raises(PlanError, match="exact integers .* got 'add-or-remove'"):
            ao.Plan(**parts, **settings, grid=2.0**-20)


def test_the_truth_about_a_shuffled_loader():
    """3 epochs, sigma = 1, delta = 1e-5: mu = sqrt(3), epsilon 8.39, whatever a Poisson accountant says."""
    plan = small(mechanism="independent", epsilon=None, noise_multiplier=1.0)
    assert plan.noise_std == pytest.approx(1.0, rel=1e-12)
    assert plan.epsilon == pytest.approx(8.39, abs=0.005)


@pytest.mark.parametrize("order", ["shuffled", "fixed", "poisson"])
def test_noise_multiplier_is_that_of_dp_sgd_and_sigma_is_against_the_whole_sensitivity(order):
    settings = {"order": order, "mechanism": "independent" if order == "poisson" else "tree", "clip_norm": 4.0}
    by_multiplier = small(**settings, epsilon=None, noise_multiplier=2.5)
    assert by_multiplier.noise_std == pytest.approx(10.0, rel=1e-12)
    assert by_multiplier.noise_multiplier == pytest.approx(2.5, rel=1e-12)
    sens = by_multiplier.sensitivity.value * (1 + by_multiplier.rounding)
    assert by_multiplier.sigma == pytest.approx(2.5 / sens, rel=1e-12)
    by_sigma = small(**settings, epsilon=None, sigma=2.5)
    assert by_sigma.noise_std == pytest.approx(10.0 * sens, rel=1e-12)
    assert by_sigma.mu == (None if order == "poisson" else 1 / 2.5)
    assert dataclasses.replace(by_multiplier, sigma=2.5) == by_sigma
    with pytest.raises(TypeError, match="noise_multiplier"):  # it follows from sigma: not stored
        dataclasses.replace(by_sigma, noise_multiplier=2.5)


def test_the_command_line_means_the_same_by_the_noise_multiplier():
    sizes = {"dataset_size": 100, "batch_size": 10, "epochs": 3, "delta": 1e-5}
    for name in ("independent", "tree"):
        by_words = make_plan(mechanism=name, noise_multiplier=1.0, **sizes)
        assert by_words == small(mechanism=name, epsilon=None, noise_multiplier=1.0)


def test_poisson_plan_is_amplified_and_only_that():
    plan = small(order="poisson", mechanism="independent")
    assert plan.participation == PoissonSampling(30, 0.1)
    assert plan.amplified
    assert plan.mu is None
    assert plan.noise_std == pytest.approx(plan.sigma)
    assert 3.9 < plan.epsilon <= 4.0
    with pytest.raises(PlanError, match="amplified"):
        small(order="poisson", mechanism="tree")
    with pytest.raises(PlanError, match="add-or-remove"):
        small(order="poisson", mechanism="independent", neighbours="replace-one")


def test_add_or_remove_is_refused_where_absence_moves_others():
    with pytest.raises(PlanError, match="zero-out"):
        small(neighbours="add-or-remove")
    plan = ao.plan(
        order=MinSeparation(20, 5, 2),
        batch_size=4,
        epsilon=1,
        delta=1e-5,
        mechanism="tree",
        neighbours="add-or-remove",
    )
    assert plan.epsilon <= 1


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"epsilon": 0}, "epsilon"),
        ({"epsilon": math.nan}, "epsilon"),
        ({"delta": 0}, "delta"),
        ({"delta": 1.5}, "delta"),
        ({"epsilon": None}, "exactly one of epsilon and noise_multiplier"),
        ({"noise_multiplier": 1.0}, "exactly one of epsilon and noise_multiplier"),
        ({"epsilon": None, "noise_multiplier": 0.0}, "noise_multiplier must be above 0"),
        ({"epsilon": None, "sigma": math.inf}, "sigma must be a finite number"),
        ({"batch_size": 0}, "batch_size"),
        ({"batch_size": 101}, "batch_size"),
        ({"epochs": None}, "epochs"),
        ({"order": "random"}, "order"),
        ({"mechanism": "magic"}, "mechanism"),
        ({"clip_norm": 0}, "clip_norm"),
        ({"momentum": 1.0}, "momentum"),
        ({"neighbours": "cousins"}, "neighbours"),
        ({"unit": ""}, "unit"),
    ],
)
def test_bad_arguments_are_named(changes, name):
    with pytest.raises(ArgumentError, match=name):
        small(**changes)


@pytest.mark.parametrize("order", ["poisson", "fixed", SingleEpoch(10), ao.order("shuffled", drop_last=True)])
def test_words_on_an_order_that_is_read_or_given_are_refused(order):
    loader = DataLoader(TensorDataset(torch.zeros(100, 1)), batch_size=10, shuffle=True)
    with pytest.raises(ArgumentError, match="together with loader" if order != "poisson" else "goes with loader="):
        ao.plan(loader=loader, epochs=2, epsilon=1, delta=1e-5, mechanism="tree", order=order)
    with pytest.raises(ArgumentError, match="epochs must not be given together with an order"):
        ao.plan(order=SingleEpoch(10), batch_size=10, epochs=1, epsilon=1, delta=1e-5, mechanism="tree")


def test_parts_of_different_length_do_not_join():
    with pytest.raises(PlanError, match="same number of steps"):
        small(mechanism=Independent(7))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"momentum": 0.9, "learning_rates": [1.0] * 20 + [0.5] * 10},
        {"order": "poisson", "mechanism": "independent"},
        {"mechanism": Tree(30, "online", restarts=(10, 20), completion=True)},
    ],
)
def test_save_and_load_give_an_equal_plan(tmp_path, changes):
    plan = small(**changes)
    plan.save(tmp_path / "plan.json")
    again = ao.Plan.load(tmp_path / "plan.json")
    assert again == plan
    assert again.digest == plan.digest
    assert str(again) == str(plan)
    assert rounded_up(plan.epsilon) in str(plan)


def numbers(data, path=()):
    """Every path to a number inside JSON data."""
    if isinstance(data, bool) or data is None or isinstance(data, str):
        return
    if isinstance(data, (int, float)):
        yield path
    else:
        items = data.items() if isinstance(data, dict) else enumerate(data)
        for key, value in items:
            yield from numbers(value, (*path, key))


def altered(data, path):
    copy = json.loads(json.dumps(data))
    place = copy
    for key in path[:-1]:
        place = place[key]
    value = place[path[-1]]
    place[path[-1]] = value * 1.01 if isinstance(value, float) and value else value + 1
    return copy


def test_every_altered_number_is_caught(tmp_path):
    """Law 10, the plan's part: by the file's hash, and for claims also without it."""
    from anyorder.formats import save_json
    from anyorder.plan.plan import FORMAT

    plan = small(mechanism=Tree(30, "online", restarts=(10, 20), completion=True))
    plan.save(tmp_path / "plan.json")
    data = json.loads((tmp_path / "plan.json").read_text())
    paths = list(numbers(data))
    assert len(paths) > 12
    for path in paths:
        (tmp_path / "altered.json").write_text(json.dumps(altered(data, path)))
        with pytest.raises(CertificateError):
            ao.Plan.load(tmp_path / "altered.json")
    for name in ("sensitivity", "noise_std", "mu", "epsilon"):
        body = altered({"format": FORMAT, "plan": plan.to_dict(), "claims": plan.claims()}, ("claims", name))
        save_json(tmp_path / "resealed.json", body)
        with pytest.raises(CertificateError, match=name):
            ao.Plan.load(tmp_path / "resealed.json")


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"format": "anyorder-plan/2"}', '{"format": NaN}'])
def test_damaged_files_are_refused(tmp_path, text):
    (tmp_path / "plan.json").write_text(text)
    with pytest.raises(CertificateError):
        ao.Plan.load(tmp_path / "plan.json")


@pytest.mark.parametrize("order", [SingleEpoch(6), FixedOrder(6, 2, 3), EpochShuffle(2, 3)], ids=repr)
def test_a_loader_whose_batches_shift_has_no_add_or_remove_neighbours(order):
    with pytest.raises(PlanError, match="'add-or-remove' do not fit"):
        plan_at_sigma(1, order=order, batch_size=1, delta=1e-6, mechanism="tree", neighbours="add-or-remove")


def test_an_order_of_units_that_a_loader_gives_has_no_add_or_remove_neighbours():
    """Without one user the sampler would fill batches otherwise, and move the steps of others."""
    users = torch.arange(12) // 3
    loader = DataLoader(TensorDataset(torch.zeros(12, 2), users), batch_sampler=UnitOrderSampler(users.tolist(), 4, 0))
    with pytest.raises(PlanError, match="'add-or-remove' do not fit"):
        plan_at_sigma(1, loader=loader, unit=1, epochs=2, delta=1e-6, mechanism="tree", neighbours="add-or-remove")


def test_all_numbers_of_a_promise_are_rounded_up():
    told = promised(1.00001, 1.0000001e-5, 0.1234501)
    assert told == "mu = 0.12346 (Gaussian DP): epsilon <= 1.001 at delta = 1.00001e-05"
