"""Plans that select rows and release them: one claim, in plans, cards, files, receipts and certificates."""

import math
from dataclasses import replace

import numpy as np
import pytest

import anyorder as ao
from anyorder.accounting import BoundedRange, Gaussian, Sampled, gdp_epsilon
from anyorder.accounting.bounded_range import bounded_range_mu
from anyorder.accounting.gaussian import compose_mus
from anyorder.accounting.selection import Counts, Top, Uniform, refuse_selection
from anyorder.errors import ArgumentError, CertificateError, PlanError
from anyorder.participation import KnownOrder, MinSeparation, SingleEpoch
from anyorder.plan.certificate import realised_claim
from anyorder.plan.planner import plan_at_sigma, with_budget
from anyorder.strategy import BLT, BandedInverse, Independent, Tree
from plans import flat_plan

WORDS = {"dataset_size": 1000, "batch_size": 50, "epochs": 4, "delta": 1e-5}
COUNTS = [Counts(5.0), Counts(5.0, share=0.3, count_norm=2.0), Counts(5.0, sigma=4.0)]
SELECTIONS = [*COUNTS, Top(20), Top(20, share=0.4, score_norm=0.5), Top(20, sigma=100.0), Uniform(5)]
SETTINGS = [{}, {"neighbours": "replace-one", "mechanism": "tree"}]


def of_counts(plan):
    """The mu of one step's counts, from the noise that is really added."""
    return (2 if plan.neighbours == "replace-one" else 1) * plan.selection.count_norm / plan.selection_std


@pytest.mark.parametrize(("selection", "setting"), [*((one, SETTINGS[0]) for one in SELECTIONS[1:7:3]),
                         (COUNTS[-1], SETTINGS[1]), (Top(20), SETTINGS[1])])  # fmt: skip
def test_the_whole_lands_at_epsilon(selection, setting):
    plan = flat_plan(epsilon=2.0, selection=selection, **WORDS, **setting)
    assert 2.0 * (1 - 1.1e-6) <= plan.epsilon <= 2.0
    assert ao.Plan.from_dict(plan.to_dict()) == plan
    if setting:
        again = with_budget(plan, epsilon=1.0)
        assert 1.0 * (1 - 1.1e-6) <= again.epsilon <= 1.0
        assert with_budget(again, sigma=plan.sigma).epsilon == pytest.approx(2.0, rel=2e-6)


@pytest.mark.parametrize("selection", [Counts(5.0), Top(20)], ids=repr)
def test_the_whole_lands_at_epsilon_under_secret_sampling(selection):
    plan = flat_plan(epsilon=2.0, order="poisson", selection=selection, **WORDS)
    assert 2.0 * (1 - 1.1e-6) <= plan.epsilon <= 2.0


@pytest.mark.parametrize("neighbours", ["zero-out", "replace-one", "add-or-remove"])
@pytest.mark.parametrize("selection", COUNTS, ids=repr)
def test_counts_and_release_are_one_gaussian(selection, neighbours):
    """By what a unit moves, and the noise that is added: half of either noise would be a larger mu."""
    order = MinSeparation(40, 5, 3)
    plan = ao.plan(
        order=order, batch_size=5, epsilon=2.0, delta=1e-5, mechanism=ao.mechanism(BandedInverse([0.5, 0.2], 40),
        selection=selection), neighbours=neighbours, clip_norm=0.7,
    )  # fmt: skip
    f = 2 if neighbours == "replace-one" else 1
    release = f * 0.7 * plan.sensitivity.value / plan.noise_std
    choice = math.sqrt(3) * of_counts(plan)
    assert release == pytest.approx(f / plan.sigma, rel=1e-6)
    assert choice == pytest.approx(f / plan.selection.sigma, rel=1e-12)
    assert plan.mu == pytest.approx(math.hypot(f / plan.sigma, f / plan.selection.sigma), rel=1e-12)
    assert plan.curve == Gaussian(plan.mu, neighbours=neighbours)
    assert plan.mu >= math.hypot(release, choice) * (1 - 1e-9)
    if selection.share is not None:
        assert choice**2 == pytest.approx(selection.share * plan.mu**2, rel=1e-9)
    else:
        assert plan.selection == selection
    assert plan.selection.share is None


@pytest.mark.parametrize("neighbours", ["zero-out", "replace-one"])
def test_draws_are_those_of_all_of_a_units_steps(neighbours):
    f = 2 if neighbours == "replace-one" else 1
    plan = plan_at_sigma(2.0, order=MinSeparation(40, 5, 3), batch_size=5, delta=1e-5, neighbours=neighbours,
                   mechanism=ao.mechanism("independent", selection=Top(20, share=0.3, score_norm=0.5)))  # fmt: skip
    release, draws = plan.curve.parts
    e0 = f / plan.selection.sigma
    assert release == Gaussian(f / 2.0, neighbours=neighbours)
    assert draws == BoundedRange(draws.e0, 3 * 20, neighbours=neighbours)
    assert e0 <= draws.e0 <= e0 * (1 + 1e-15)
    assert plan.selection_scale == pytest.approx(plan.selection.sigma * 0.5, rel=1e-15)
    choice = draws.draws * e0**2 / 4  # twice its zero-concentrated DP, as mu^2 is
    assert choice == pytest.approx(0.3 * (choice + release.mu**2), rel=1e-9)
    coins = flat_plan(sigma=2.0, order="poisson", selection=Top(20, share=0.3), **WORDS)
    e0 = 1 / coins.selection.sigma
    assert coins.curve == Sampled(2.0, 0.05, 80, e0=coins.curve.e0, draws=20)
    assert e0 <= coins.curve.e0 <= e0 * (1 + 1e-15)
    assert 20 * e0**2 / 4 == pytest.approx(0.3 / 0.7 / 2.0**2, rel=1e-9)  # of a step, as coins are


@pytest.mark.parametrize("selection", COUNTS, ids=repr)
def test_under_secret_sampling_both_are_amplified_as_one(selection):
    plan = flat_plan(sigma=2.0, order="poisson", selection=selection, **WORDS)
    assert plan.selection_std == pytest.approx(plan.selection.sigma * plan.selection.count_norm, rel=1e-12)
    joint = 1 / math.hypot(1 / plan.sigma, 1 / plan.selection.sigma)
    assert type(plan.curve) is Sampled
    assert joint * (1 - 1e-12) <= plan.curve.sigma <= joint * (1 + 1e-15)
    assert (plan.mu, plan.curve.n, plan.curve.sampling_probability) == (None, 80, 0.05)


def test_other_budgets_are_of_the_release():
    plan = flat_plan(sigma=2.0, selection=Counts(1.0, share=0.2), **WORDS)
    assert plan.sigma == 2.0
    assert plan.mu == pytest.approx(0.5 / math.sqrt(0.8), rel=1e-12)
    plan = flat_plan(noise_multiplier=3.0, selection=Counts(1.0, sigma=5.0), mechanism="independent", **WORDS)
    assert plan.noise_multiplier == pytest.approx(3.0, rel=1e-12)
    assert plan.mu == pytest.approx(math.hypot(2 / 3, 1 / 5), rel=1e-12)
    with pytest.raises(PlanError, match="the selection alone costs the whole budget"):
        flat_plan(epsilon=2.0, selection=Counts(1.0, sigma=1.0), **WORDS)
    free = flat_plan(epsilon=2.0, selection=Uniform(7), **WORDS)
    assert free.curve == replace(free, selection=None).curve


def test_a_part_with_all_of_the_budget_but_a_little():
    for share in (1e-9, 1 - 1e-9):
        plan = flat_plan(epsilon=2.0, selection=Counts(1.0, share=share), **WORDS)
        assert 2.0 * (1 - 1e-6) <= plan.epsilon <= 2.0


def test_each_units_own_steps_cost_both():
    order = KnownOrder([["a", "b"], ["b"], ["c"], ["b", "c"]])
    plan = ao.plan(
        order=order, batch_size=1, epsilon=1.0, delta=1e-6, mechanism=ao.mechanism("independent",
        selection=Counts(3.0, count_norm=2.0)),
    )  # fmt: skip
    step = math.hypot(plan.clip_norm / plan.noise_std, of_counts(plan))
    assert plan.unit_mus() == pytest.approx(step * np.sqrt([1, 3, 2]), rel=1e-12)
    assert plan.unit_mus().max() == pytest.approx(plan.mu, rel=1e-12)
    coins = flat_plan(sigma=1.0, order="poisson", selection=Counts(3.0), **WORDS)
    known = KnownOrder([["a"]] * 2 + [["b"]] * 78)
    step = math.hypot(coins.clip_norm / coins.noise_std, of_counts(coins))
    assert coins.unit_mus(known) == pytest.approx(step * np.sqrt([2, 78]), rel=1e-12)


@pytest.mark.parametrize("neighbours", ["zero-out", "replace-one"])
@pytest.mark.parametrize(
    "selection", [Counts(3.0, count_norm=2.0, sigma=4.0), Top(7, sigma=30.0), Uniform(5)], ids=repr
)
def test_a_step_of_a_unit_costs_its_choice_and_its_release(selection, neighbours):
    f = 2 if neighbours == "replace-one" else 1
    order = KnownOrder([["a", "b"], ["b"], ["c"], ["b", "c"]])
    plan = plan_at_sigma(
        1.5, order=order, batch_size=1, delta=1e-6, mechanism=ao.mechanism("independent", selection=selection),
        neighbours=neighbours,
    )  # fmt: skip
    match selection:
        case Counts():
            choice = of_counts(plan)
        case Top():
            choice = bounded_range_mu(f / 30.0) * math.sqrt(7)
        case Uniform():
            choice = 0.0
    step = math.hypot(f * plan.clip_norm / plan.noise_std, choice)
    assert plan.unit_mus() == pytest.approx(step * np.sqrt([1, 3, 2]), rel=1e-12)


def test_the_realised_epsilon_counts_both():
    order = MinSeparation(40, 2, 9)
    plan = ao.plan(
        order=order, batch_size=5, epsilon=2.0, delta=1e-5, mechanism=ao.mechanism("independent",
        selection=Counts(1.0)),
    )  # fmt: skip
    for k in (1, 4, 9):
        found = realised_claim(plan, k, 3)
        step = math.hypot(plan.clip_norm / plan.noise_std, of_counts(plan))
        assert found.mu == pytest.approx(step * math.sqrt(k), rel=1e-12)
        assert found.mu >= step * math.sqrt(k) * (1 - 1e-15)
        assert found.epsilon == pytest.approx(gdp_epsilon(found.mu, 1e-5), rel=1e-9)
    assert realised_claim(plan, 9, 2).mu == plan.mu


def test_a_plan_without_a_selection_is_what_it_was():
    plan = ao.plan(epsilon=2.0, **WORDS)
    assert plan.selection is None
    assert plan.selection_std is None
    assert "selection" not in plan.to_dict()
    assert set(plan.claims()) == {"sensitivity", "sensitivity_exact", "noise_std", "mu", "epsilon"}


def test_the_mechanism_makes_noise_of_chosen_rows():
    for words in ({}, {"mechanism": "tree"}, {"mechanism": "banded inverse"}, {"memory": 3}):
        chosen = flat_plan(epsilon=2.0, selection=Counts(1.0), **WORDS, **words).strategy
        assert chosen.state_rows == 0
    plan = flat_plan(epsilon=2.0, selection=Counts(1.0), **WORDS)
    for other in (BLT([0.9], [0.2], 80), Tree(80, "full"), Tree(80, "online")):
        with pytest.raises(
            PlanError, match="a selection needs a strategy that makes the noise of the chosen rows alone"
        ):
            replace(plan, strategy=other)
        with pytest.raises(PlanError, match="keeps"):
            flat_plan(epsilon=2.0, selection=Counts(1.0), mechanism=other, **WORDS)
    assert replace(plan, strategy=Tree(80, "full", regenerate=True)).mu == plan.mu


@pytest.mark.parametrize("selection", [Counts(1.0), Top(20), Uniform(5)], ids=repr)
def test_auto_is_independent_with_a_selection(selection):
    """Others have less error in a row that every step releases, and more noise in one that few steps release."""
    plan = flat_plan(epsilon=2.0, selection=selection, **WORDS)
    assert plan.strategy == Independent(80)
    other = flat_plan(epsilon=2.0, selection=selection, mechanism="banded inverse", **WORDS)
    assert other.noise_error() < plan.noise_error()
    assert other.noise_multiplier > plan.noise_multiplier
    assert "of a row that is released at every step" in str(plan)
    assert ao.plan(epsilon=2.0, **WORDS).strategy != Independent(80)


@pytest.mark.parametrize("words", ["blt", "blt, 2 buffers", "banded, 4 bands"])
def test_mechanisms_in_words_that_keep_a_state_are_refused(words):
    with pytest.raises(PlanError, match="without a state between steps: mechanism 'independent'"):
        flat_plan(epsilon=2.0, selection=Counts(1.0), mechanism=words, memory=9, **WORDS)


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda: Counts(math.nan), ArgumentError, "threshold must"),
        (lambda: Counts(1.0, share=1.0), ArgumentError, "share must"),
        (lambda: Counts(1.0, share=0.1, sigma=1.0), ArgumentError, "share and sigma say the same"),
        (lambda: Counts(1.0, count_norm=0.0), ArgumentError, "count_norm must"),
        (lambda: Counts(1.0, sigma=-1.0), ArgumentError, "sigma must"),
        (lambda: Top(0), ArgumentError, "rows must"),
        (lambda: Top(2.5), ArgumentError, "rows must"),
        (lambda: Top(2, score_norm=math.inf), ArgumentError, "score_norm must"),
        (lambda: Uniform(0), ArgumentError, "rows must"),
        (lambda: Top(2).e0("zero-out"), ArgumentError, "before it has a cost"),
        (lambda: Top(2, sigma=1.0).e0("near"), ArgumentError, "neighbours must"),
        (lambda: flat_plan(epsilon=1.0, selection="counts", **WORDS), PlanError, "selection must be Counts"),
        (lambda: flat_plan(epsilon=1.0, selection=Counts(1.0), secure=True, **WORDS), PlanError, "exact integers"),
        (
            lambda: flat_plan(epsilon=1.0, selection=Counts(1.0), on_device=("clipping",), **WORDS),
            PlanError,
            "on_device",
        ),
        (lambda: refuse_selection(Counts(1.0), "the server"), PlanError, "the server carries out no plan with a sel"),
    ],
)
def test_what_is_refused(call, error, text):
    with pytest.raises(error, match=text):
        call()


def test_a_tenth_is_the_choices_share_unless_said():
    assert Counts(5.0).share == Top(5).share == 0.1
    assert Counts(5.0, sigma=2.0).share is None


def test_a_plan_needs_the_selections_noise():
    plan = flat_plan(epsilon=2.0, selection=Counts(1.0), **WORDS)
    with pytest.raises(ArgumentError, match="selection must have a sigma in a Plan"):
        replace(plan, selection=Counts(1.0))
    with pytest.raises(PlanError, match="selection must be Counts"):
        replace(plan, selection={"kind": "counts"})
    refuse_selection(None, "the server")


@pytest.mark.parametrize("kind", [Counts, Top, Uniform])
def test_the_union_is_closed(kind):
    with pytest.raises(TypeError, match="must not be subclassed"):
        type("Own", (kind,), {})


@pytest.mark.parametrize("selection", SELECTIONS, ids=repr)
def test_files_hold_the_selection_and_its_noise(tmp_path, selection):
    plan = flat_plan(epsilon=2.0, selection=selection, **WORDS)
    plan.save(tmp_path / "plan.json")
    found = ao.Plan.load(tmp_path / "plan.json")
    assert found == plan
    assert found.digest == plan.digest != replace(plan, selection=None).digest
    assert "selection" in dict(plan.facts())


def altered(plan, **changes):
    data = plan.to_dict()
    data["selection"] = {**data["selection"], **changes}
    return data


@pytest.mark.parametrize(
    "changes",
    [{"kind": "all"}, {"kind": ["counts"]}, {"share": 0.1}, {"sigma": "4"}, {"sigma": None}, {"sigma": -1.0},
     {"threshold": 10**400}, {"count_norm": 0}, {"count_norm": 1}, {"rows": 3}],
)  # fmt: skip
def test_malformed_selections_are_refused(changes):
    plan = flat_plan(epsilon=2.0, selection=Counts(1.0), **WORDS)
    with pytest.raises(CertificateError):
        ao.Plan.from_dict(altered(plan, **changes))
    for whole in (None, [], "counts", {}):
        with pytest.raises(CertificateError):
            ao.Plan.from_dict({**plan.to_dict(), "selection": whole})


@pytest.mark.parametrize("selection", [Counts(1.0), Top(20)], ids=repr)
def test_claims_that_do_not_follow_from_the_selection_are_refused(tmp_path, selection):
    from anyorder.formats import save_json

    plan = flat_plan(epsilon=2.0, selection=selection, **WORDS)
    [noise] = plan.claims().keys() - {"sensitivity", "sensitivity_exact", "noise_std", "mu", "epsilon"}
    lies = [
        (altered(plan, sigma=plan.selection.sigma / 2), plan.claims()),
        (altered(plan, **{"count_norm" if noise == "selection_std" else "score_norm": 2.0}), plan.claims()),
        (plan.to_dict(), {**plan.claims(), noise: plan.claims()[noise] * 2}),
        (plan.to_dict(), {**plan.claims(), "epsilon": 1.9}),
        (plan.to_dict(), {name: value for name, value in plan.claims().items() if name != noise}),
        (replace(plan, selection=None).to_dict(), plan.claims()),
        (plan.to_dict(), replace(plan, selection=None).claims()),
    ]
    for described, claims in lies:
        save_json(tmp_path / "lie.json", {"format": "anyorder-plan/2", "plan": described, "claims": claims})
        with pytest.raises(CertificateError, match="the file claims|claims must have"):
            ao.verify(tmp_path / "lie.json")


def test_plans_with_selections_compose():
    one, two = (flat_plan(sigma=s, selection=Counts(1.0, sigma=3.0), **WORDS) for s in (1.0, 2.0))
    assert ao.compose(one.curve, two.curve).mu == pytest.approx(compose_mus(1.0, 0.5, 1 / 3, 1 / 3), rel=1e-12)


def test_one_pass_needs_no_more_than_one_step():
    plan = plan_at_sigma(
        1.0, order=SingleEpoch(9), batch_size=3, delta=1e-5, mechanism=ao.mechanism(Independent(9),
        selection=Counts(1.0, sigma=2.0)),
    )  # fmt: skip
    assert plan.selection_std == pytest.approx(2.0, rel=1e-15)
