"""Plans, curves, files and budgets of orders that are drawn in secret."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest

import anyorder as ao
from anyorder._draws import Draws
from anyorder.accounting import Gaussian, Sampled, amplified_epsilon
from anyorder.accounting.amplification.bound import calibrate_amplified
from anyorder.accounting.amplification.claims import Amplified
from anyorder.accounting.amplification.methods import Deterministic, MonteCarlo, Pld
from anyorder.accounting.amplification.mixture import absolute_columns, bins_gram, check_fits
from anyorder.accounting.curves import compose
from anyorder.budget import Geometric, search_epsilon
from anyorder.budget.claim import curve_from_dict, curve_to_dict
from anyorder.errors import ArgumentError, BudgetError, CertificateError, PlanError
from anyorder.formats import bounded, canonical
from anyorder.noise import NoiseSource
from anyorder.participation import (
    BallsInBins,
    CyclicPoisson,
    FixedOrder,
    MinSeparationSampling,
    PoissonSampling,
    RandomAllocation,
    TruncatedPoisson,
)
from anyorder.plan.plan import Plan, check_claims
from anyorder.plan.planner import with_budget
from anyorder.strategy import BLT, Independent, ToeplitzBanded, Tree
from anyorder.strategy.registry import rounding
from anyorder.strategy.restarted_blt import RestartedBLT
from anyorder.workload import Workload
from plans import flat_plan

BANDS = ToeplitzBanded([1.0, 0.5, 0.25], 24)
BUFFERS = BLT([0.9, 0.4], [0.2, 0.1], 24)
RESTARTED = RestartedBLT([[0.9]] * 2, [[0.2]] * 2, [0.5] * 2, [1.0] * 2, 8, 4)
THREE_EPOCHS = RestartedBLT([[0.9]] * 3, [[0.2]] * 3, [0.5] * 3, [1.0] * 3, 24, 8)
ORDERS = {
    "cyclic": (CyclicPoisson(24, 8, 0.1), BANDS),
    "truncated": (TruncatedPoisson(24, 0.1, 5, 40, 8), BANDS),
    "bins": (BallsInBins(3, 8), BUFFERS),
    "allocation": (RandomAllocation(2, 4), RESTARTED),
    "separation": (MinSeparationSampling(24, 4, 0.2), BANDS),
}
each = pytest.mark.parametrize("name", ORDERS)


def made(name, **changes):
    order, chosen = ORDERS[name]
    own = {
        "participation": order, "strategy": chosen, "workload": Workload(order.n), "clip_norm": 1.0, "sigma": 1.5,
        "delta": 1e-5, "batch_size": 4,
        "neighbours": "zero-out" if order.absence_moves_others else "add-or-remove",
    }  # fmt: skip
    return Plan(**{**own, **changes})


@each
def test_a_plan_comes_back_from_its_file_with_what_is_left_if_batches_are_known(name, tmp_path):
    plan = made(name)
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan
    assert plan.mu is None
    assert plan.epsilon <= plan.known_epsilon
    assert "known_epsilon" in plan.claims()
    assert "if known" in dict(plan.facts())
    assert "sensitivity" not in dict(plan.facts())


@each
@pytest.mark.parametrize("claim", ["epsilon", "known_epsilon", "noise_std"])
def test_a_forged_claim_is_found(name, claim, tmp_path):
    plan = made(name)
    claims = {**plan.claims(), claim: plan.claims()[claim] * 0.99}
    with pytest.raises(CertificateError, match=claim):
        check_claims(plan, claims)


@each
def test_known_epsilon_is_that_of_the_order_without_coins(name):
    plan = made(name)
    order = plan.participation
    pattern = {
        "cyclic": lambda: FixedOrder(24, 3, 8), "truncated": lambda: FixedOrder(24, 3, 8),
        "bins": lambda: FixedOrder(24, 3, 8), "allocation": lambda: ao.participation.EpochShuffle(2, 4),
        "separation": lambda: ao.participation.MinSeparation(24, 4),
    }[name]()  # fmt: skip
    mu = ao.sensitivity(plan.strategy, pattern).value / plan.sigma
    assert order.secret
    assert plan.known_epsilon == pytest.approx(Gaussian(mu).epsilon(1e-5), rel=1e-9)


@each
def test_noise_is_against_the_clip_norm_and_covers_float32(name):
    plan = made(name, clip_norm=2.0)
    assert plan.noise_std == pytest.approx(3.0 * (1 + rounding(plan.strategy, plan.participation)), rel=1e-12)
    assert plan.noise_std >= 3.0


@each
def test_no_secret_order_gets_the_claim_of_one_gaussian_step(name):
    """With one step's mu, 1 / sigma, a claim would say nothing of the others, nor of C."""
    plan = made(name)
    assert type(plan.curve) is (Sampled if name == "cyclic" else Amplified)
    loud = replace(plan, strategy=type(BANDS)([1.0, 0.9, 0.9], 24)) if plan.strategy is BANDS else None
    if loud is not None:
        assert loud.epsilon > plan.epsilon


def test_cyclic_sampling_is_so_many_sampled_gaussians_of_the_largest_column():
    plan = made("cyclic")
    norm = math.sqrt(1 + 0.25 + 0.0625)
    found = plan.curve
    assert (found.n, found.sampling_probability) == (3, 0.1)
    assert found.sigma == pytest.approx(1.5 / norm, rel=1e-12)
    assert found.sigma <= 1.5 / norm
    assert made("cyclic", strategy=Independent(24)).epsilon < plan.epsilon


@pytest.mark.parametrize(
    ("order", "chosen", "told"),
    [
        (PoissonSampling(24, 0.1), BANDS, "independent noise only"),
        (CyclicPoisson(24, 2, 0.1), BANDS, "cycle=2 steps"),
        (TruncatedPoisson(24, 0.1, 5, 40, 2), BANDS, "cycle=2 steps"),
        (CyclicPoisson(24, 8, 0.1), BUFFERS, "take cycle=24"),
        (RandomAllocation(3, 8), BANDS, "restarts with each epoch"),
        (RandomAllocation(4, 2), RESTARTED, "restarts with each epoch"),
        (MinSeparationSampling(24, 2, 0.2), BANDS, "b=2 steps"),
        (MinSeparationSampling(24, 4, 0.2), Tree(24), "b=4 steps"),
        (BallsInBins(3, 4), BANDS, "same number of steps"),
    ],
)
def test_what_an_order_is_not_accounted_with_is_refused(order, chosen, told):
    with pytest.raises(PlanError, match=told):
        check_fits(chosen, order)


def test_what_does_not_go_with_coins_is_refused():
    with pytest.raises(PlanError, match="exact integers"):
        made("bins", strategy=Independent(24), neighbours="zero-out", grid=2.0**-20)
    with pytest.raises(PlanError, match="no plan with a selection"):
        made("bins", strategy=Independent(24), selection=ao.sparse.Uniform(3))
    with pytest.raises(PlanError, match="zero-out neighbours"):
        made("truncated", neighbours="add-or-remove")
    for neighbours in ("add-or-remove", "replace-one"):
        with pytest.raises(PlanError, match="zero-out neighbours only .*of other groups"):
            made("cyclic", neighbours=neighbours)
    with pytest.raises(PlanError, match="of other groups"):
        amplified_epsilon(BANDS, CyclicPoisson(24, 8, 0.1), 1.5, 1e-5, neighbours="add-or-remove")
    with pytest.raises(PlanError, match="must be None"):
        made("cyclic", method=Pld())
    with pytest.raises(PlanError, match="columns do not overlap"):
        made("bins", method=Pld())
    with pytest.raises(PlanError, match="one delta only"):
        made("bins", method=MonteCarlo(), neighbours="replace-one")
    with pytest.raises(PlanError, match="SingleEpoch or MinSeparation"):
        made("bins", on_device=("record",))


def test_a_full_tree_is_taken_in_its_causal_form():
    """C^T C is the same, every row looks at its own past alone, and its products are those of the plain tree."""
    tree, plain = Tree(16, "full"), Tree(16)
    causal = absolute_columns(tree, np.arange(16))
    assert np.allclose(np.triu(causal, 1), 0)
    assert np.allclose(causal.T @ causal, tree.matrix().T @ tree.matrix())
    order = BallsInBins(4, 4)
    assert np.allclose(bins_gram(tree, order), bins_gram(plain, order))


@pytest.mark.parametrize("chosen", [BUFFERS, BANDS, THREE_EPOCHS, Tree(24, "full")], ids=repr)
def test_rounding_under_coins_covers_the_matrix_that_is_used(chosen):
    """|| C~ C^-1 || of the float32 K, as an operator, is within the rounding."""
    found = rounding(chosen, BallsInBins(3, 8))
    used = np.linalg.inv(chosen.noising_matrix().astype(np.float32).astype(np.float64))
    T = used @ np.linalg.inv(chosen.matrix())
    assert 0 < found < 1e-4 or np.allclose(T, np.eye(24), atol=1e-12)
    assert np.linalg.norm(T, 2) <= 1 + found + 1e-6  # K itself is rounded here, its parameters there


def test_replace_one_is_two_steps_and_never_above_known_batches():
    one = made("bins", neighbours="zero-out")
    two = made("bins", neighbours="replace-one")
    assert one.epsilon < two.epsilon <= two.known_epsilon
    curve = two.curve
    for epsilon in (0.5, 2.0):
        half = one.curve.delta(epsilon / 2)
        assert curve.delta(epsilon) <= half * (1 + math.exp(epsilon / 2)) * (1 + 1e-9)


SMALLER = {  # of few bins, whose claims a search takes a moment for
    "bins": (BallsInBins(2, 3), BLT([0.9, 0.4], [0.2, 0.1], 6)),
    "allocation": (RandomAllocation(2, 2), RestartedBLT([[0.9]] * 2, [[0.2]] * 2, [0.5] * 2, [1.0] * 2, 4, 2)),
}


@each
def test_plans_by_epsilon_keep_it(name):
    order, chosen = {**ORDERS, **SMALLER}[name]
    plan = ao.plan(order=order, mechanism=chosen, epsilon=2.0, delta=1e-5, batch_size=4)
    assert 2.0 * (1 - 1e-4) <= plan.epsilon <= 2.0
    if name == "allocation":  # whose claims take longest
        return
    less = with_budget(plan, epsilon=1.0)
    assert less.epsilon <= 1.0
    assert less.sigma > plan.sigma
    assert less.method == plan.method


@pytest.mark.parametrize(
    ("word", "mechanism", "rule"),
    [
        ("cyclic_poisson", "banded toeplitz, 3 bands", CyclicPoisson(20, 3, 0.3)),
        ("truncated-poisson", "independent", TruncatedPoisson(20, 0.1, 17, 80)),
        ("balls_in_bins", "blt", BallsInBins(2, 10)),
        ("random-allocation", "independent", RandomAllocation(2, 10)),
        ("min-separation-sampling", "banded toeplitz, 3 bands", MinSeparationSampling(20, 3, 0.125)),
    ],
)
def test_orders_in_words(word, mechanism, rule):
    plan = ao.plan(
        dataset_size=80, batch_size=8, epochs=2, order=word, mechanism=mechanism, noise_multiplier=1.0, delta=1e-5
    )
    assert plan.participation.to_dict() == pytest.approx(rule.to_dict())
    assert plan.noise_multiplier == pytest.approx(1.0, rel=1e-6)


def test_words_that_do_not_go_together_are_refused():
    words = {"dataset_size": 80, "batch_size": 8, "epochs": 2, "noise_multiplier": 1.0, "delta": 1e-5}
    with pytest.raises(ArgumentError, match="epsilon must be given with order 'cyclic-poisson'"):
        ao.plan(**words, order="cyclic-poisson")
    with pytest.raises(ArgumentError, match="cycle must come with order"):
        flat_plan(**words, order="balls-in-bins", cycle=3)
    with pytest.raises(ArgumentError, match="max_batch_size must come with"):
        flat_plan(**words, order="poisson", max_batch_size=3)
    with pytest.raises(ArgumentError, match="cycle must be an integer from 1 to 10"):
        flat_plan(**words, order="cyclic-poisson", cycle=11)


def test_one_call_for_the_epsilon_of_any_order():
    for order, chosen in {**ORDERS, **SMALLER}.values():
        found = amplified_epsilon(chosen, order, 1.5, 1e-5)
        assert found.confidence == 1.0
        assert found.method in ("pld", "bound")
        assert found.value > 0
    assert amplified_epsilon(Independent(24), PoissonSampling(24, 0.1), 1.5, 1e-5).method == "pld"
    with pytest.raises(ArgumentError, match="must be drawn in secret"):
        amplified_epsilon(BANDS, FixedOrder(24, 3, 8), 1.5, 1e-5)
    with pytest.raises(ArgumentError, match="must come with method 'monte_carlo'"):
        amplified_epsilon(BUFFERS, BallsInBins(3, 8), 1.5, 1e-5, samples=10**4)


# -- by samples ------------------------------------------------------------------------------------------------------

FEW = MonteCarlo(1000)


def test_a_claim_by_samples_is_replayed_and_its_number_cannot_be_forged(tmp_path):
    plan = made("bins", method=FEW)
    plan.save(tmp_path / "plan.json")
    with pytest.raises(CertificateError, match="samples takes more time .*--large"):
        ao.verify(tmp_path / "plan.json")
    assert ao.verify(tmp_path / "plan.json", large=True).plan == plan
    found = amplified_epsilon(BUFFERS, BallsInBins(3, 8), 1.5, 1e-5, FEW)
    assert found.confidence == 1 - 1e-7
    assert found.value == plan.epsilon
    for factor in (0.999, 1.001):
        with pytest.raises(CertificateError, match="epsilon"):
            check_claims(plan, {**plan.claims(), "epsilon": plan.epsilon * factor})


def test_noise_by_samples_keeps_epsilon():
    order, chosen = SMALLER["bins"]
    sigma = calibrate_amplified(chosen, order, 3.0, 1e-5, FEW)
    assert 2.85 < amplified_epsilon(chosen, order, sigma, 1e-5, FEW).value <= 3.0


def test_claims_by_samples_do_not_add_up(tmp_path):
    curve = made("bins", method=FEW).curve
    assert compose(curve) == compose(curve, Gaussian(0.0, neighbours="add-or-remove")) == curve
    with pytest.raises(ArgumentError, match="by samples, which hold for one delta"):
        compose(curve, Gaussian(0.5, neighbours="add-or-remove"))
    budget = ao.Budget(tmp_path / "budget.jsonl", epsilon=8.0, delta=1e-4, unit="example")
    with pytest.raises(BudgetError, match="method='bound'"):
        budget.spend(made("bins", method=FEW), name="one")


# -- beside others ---------------------------------------------------------------------------------------------------


def test_groups_close_up_behind_a_missing_unit_so_that_cyclic_claims_are_for_zero_out():
    rule, source = CyclicPoisson(4, 4, 1.0), NoiseSource(bytes(32)).derive(b"coins")
    all_units, without = Draws(rule, 8, source), Draws(rule, 7, source)
    assert [list(all_units.step(t)) for t in range(4)] == [[0, 4], [1, 5], [2, 6], [3, 7]]
    # unit 1 is missing: 2, .. 7 are 1, .. 6 now, and each of them moves to the group before its own
    assert [[u + (u > 0) for u in without.step(t)] for t in range(4)] == [[0, 5], [2, 6], [3, 7], [4]]
    words = {"dataset_size": 80, "batch_size": 8, "epochs": 2, "noise_multiplier": 1.0, "delta": 1e-5}
    for unit in ("example", "user"):
        plan = ao.plan(**words, order="cyclic-poisson", mechanism="banded toeplitz, 3 bands", unit=unit)
        assert plan.neighbours == plan.curve.neighbours == "zero-out"
        assert "gradients replaced by zero" in str(plan)
        with pytest.raises(PlanError, match="of other groups"):
            flat_plan(**words, order="cyclic-poisson", mechanism="independent", cycle=3, neighbours="add-or-remove")
    assert ao.plan(**words, order="poisson").neighbours == "add-or-remove"
    assert ao.plan(**words, order="balls-in-bins", mechanism="independent").neighbours == "add-or-remove"


def test_sampled_sums_have_one_curve_for_zero_out_and_add_or_remove():
    zero, add = Sampled(1.0, 0.1, 10, neighbours="zero-out"), Sampled(1.0, 0.1, 10)
    assert add.neighbours == "add-or-remove"
    assert zero.epsilon(1e-5) == add.epsilon(1e-5)
    assert curve_from_dict(json.loads(canonical(curve_to_dict(zero)))) == zero
    assert "neighbours" not in curve_to_dict(add)
    assert curve_from_dict(curve_to_dict(add)) == add
    with pytest.raises(ArgumentError, match="neighbours"):
        Sampled(1.0, 0.1, 10, neighbours="replace-one")
    with pytest.raises(ArgumentError, match="agree in neighbours"):
        compose(zero, add)


def test_a_budget_for_replace_one_counts_two_steps_of_a_unit(tmp_path):
    """Under the label of another relation the same plan would have the curve of one step."""
    plan = made("bins", neighbours="replace-one")
    budget = ao.Budget(tmp_path / "budget.jsonl", epsilon=30.0, delta=1e-5, unit="example", neighbours="replace-one")
    assert budget.spend(plan, name="one").spent == plan.epsilon
    assert budget.curve() == plan.curve
    assert ao.Budget(tmp_path / "budget.jsonl").remaining().spent == plan.epsilon
    with pytest.raises(BudgetError, match="add-or-remove, from which nothing follows"):
        budget.spend(made("bins"), name="two")
    other = ao.Budget(tmp_path / "other.jsonl", epsilon=30.0, delta=1e-5, unit="example", neighbours="zero-out")
    assert other.spend(plan, name="one").spent == made("bins", neighbours="zero-out").epsilon
    assert other.spend(made("cyclic"), name="two").spent > made("cyclic").epsilon


def test_budgets_count_amplified_plans(tmp_path):
    budget = ao.Budget(tmp_path / "budget.jsonl", epsilon=20.0, delta=1e-4, unit="example")
    budget.spend(made("bins"), name="bins")
    budget.spend(made("allocation"), name="allocation")
    alone = made("bins").curve.epsilon(1e-4)
    assert ao.Budget(tmp_path / "budget.jsonl").remaining().spent > alone
    with pytest.raises(BudgetError, match="add-or-remove neighbours, and this plan for zero-out"):
        budget.spend(made("truncated"), name="truncated")
    other = ao.Budget(tmp_path / "other.jsonl", epsilon=20.0, delta=1e-4, unit="example", neighbours="zero-out")
    assert other.spend(made("bins"), name="bins").spent >= alone
    assert other.spend(made("truncated"), name="truncated").spent > alone


@pytest.mark.parametrize("name", ["bins", "allocation", "truncated", "one epoch"])
def test_amplified_curves_compose_by_their_loss_distributions(name):
    curve = Amplified(Independent(8), BallsInBins(1, 8), 1.0, Pld()) if name == "one epoch" else made(name).curve
    others = (Sampled(1.5, 0.2, 5, neighbours=curve.neighbours), curve)
    for other in others if name == "one epoch" else others[name == "truncated" :][:1]:
        both = compose(curve, other)
        found = both.epsilon(2e-5)
        known = compose(*(Gaussian(one.known_mu if one is curve else 5**0.5 / 1.5) for one in (curve, other)))
        assert max(curve.epsilon(2e-5), other.epsilon(2e-5)) * (1 - 1e-3) < found
        assert found < curve.epsilon(1e-5) + other.epsilon(1e-5)
        assert found < 0.97 * known.epsilon(2e-5)  # and not as if batches were known
        assert both.delta(found) <= 2e-5 * (1 + 1e-6)


def test_bins_of_one_unit_beside_others_are_those_alone():
    """One bin hides nothing: the Gaussian of all its steps, to the width of a grid."""
    alone = Amplified(Independent(3), BallsInBins(3, 1), 2.0)
    both = compose(alone, Sampled(1.0, 1.0, 1, neighbours="zero-out"))
    assert both.epsilon(1e-5) == pytest.approx(Gaussian((3 / 4 + 1) ** 0.5).epsilon(1e-5), rel=1e-3)


@each
def test_amplified_curves_come_back_from_certificates_of_searches(name):
    curve = made(name).curve
    data = json.loads(canonical(curve_to_dict(curve)))
    with bounded(True):
        assert curve_from_dict(data) == curve
    with pytest.raises(CertificateError):
        curve_from_dict({**data, "sigma": 3.0, "trust": "me"})


def test_what_a_strangers_search_may_not_ask_for_is_refused():
    many = curve_to_dict(Amplified(Independent(400), BallsInBins(2, 200), 1.5))
    for data in (many, curve_to_dict(made("bins", method=FEW).curve)):
        with bounded(True), pytest.raises(CertificateError, match="--large"):
            curve_from_dict(data)
    assert curve_from_dict(many).participation.b == 200
    with pytest.raises(ArgumentError, match="found by samples"):
        search_epsilon(Geometric(5), made("bins", method=FEW).curve, 1e-5)


def test_methods_in_files():
    for method in (Pld(), Deterministic(), MonteCarlo(5000, 1e-8, 3)):
        data = json.loads(canonical(ao.accounting.amplification.methods.to_dict(method)))
        assert ao.accounting.amplification.methods.from_dict(data) == method
    for data in ({"kind": "trust me"}, {"kind": "pld", "samples": 3}, {"kind": "monte_carlo"}, None):
        with pytest.raises(CertificateError):
            ao.accounting.amplification.methods.from_dict(data)


def test_a_strangers_file_of_many_bins_is_refused_before_it_is_computed(tmp_path):
    order = BallsInBins(2, 200)
    plan = Plan(
        participation=order, strategy=BLT([0.9], [0.2], 400), workload=Workload(400), clip_norm=1.0, sigma=1.5,
        delta=1e-5, batch_size=4,
    )  # fmt: skip
    from anyorder.plan.cost import check_plan

    epochs = made("allocation", participation=RandomAllocation(3, 8), strategy=THREE_EPOCHS, workload=Workload(24))
    with bounded(True), pytest.raises(CertificateError, match="200 bins"):
        check_plan(plan.to_dict())
    with bounded(True), pytest.raises(CertificateError, match="more time than a file is given"):
        check_plan(epochs.to_dict())  # which each may have means of their own: 24 bins in all


def test_the_digests_of_older_plans_are_what_they_were():
    plan = ao.plan(dataset_size=60, batch_size=6, epochs=2, order="poisson", noise_multiplier=1.0, delta=1e-5)
    assert "method" not in plan.to_dict()
    assert set(plan.claims()) == {"sensitivity", "sensitivity_exact", "noise_std", "mu", "epsilon"}


def test_no_receipts_where_batches_are_cut():
    plan = ao.plan(
        order=ao.order("truncated-poisson", cycle=1, max_batch_size=4), dataset_size=20, batch_size=4, epochs=1,
        noise_multiplier=2.0, delta=1e-5, mechanism="independent",
    )  # fmt: skip
    release = ao.Release(plan, 2)
    units = release.sample(20)
    release.step(units, np.zeros(2))
    with pytest.raises(PlanError, match="receipts are not given under truncated"):
        release.evidence().receipts([])
