"""A budget: what is entered, refused, counted by whom, and settled."""

import dataclasses
import functools
import json
import math
from fractions import Fraction

import numpy as np
import pytest

import anyorder as ao
from anyorder.accounting import BoundedRange, Gaussian, Sampled, gdp_mu
from anyorder.accounting.curves import compose
from anyorder.errors import ArgumentError, BudgetError
from anyorder.participation import KnownOrder, MinSeparation
from anyorder.plan.certificate import realised_claim
from plans import flat_plan

EPSILON, DELTA = 8.0, 1e-5


@pytest.fixture
def path(tmp_path):
    return tmp_path / "people.budget"


def make(path, **options):
    return ao.Budget(path, EPSILON, DELTA, **options)


@functools.cache
def plan(epsilon=2.0, **options):
    given = {
        "dataset_size": 400,
        "batch_size": 40,
        "epochs": 1,
        "delta": DELTA,
        "mechanism": "independent",
        "epsilon": epsilon,
    }
    return flat_plan(**(given | options))


def known(order, epsilon=3.0, **options):
    return flat_plan(
        participation=KnownOrder(order), batch_size=2, epsilon=epsilon, delta=DELTA, mechanism="independent", **options
    )


def certificate(of, steps=1, key="0", realised=None):
    """Of a run of a plan, without the run."""
    shown = None if realised is None else realised_claim(of, *realised)
    return ao.Certificate(of.public(), steps, key * 32, "1" * 64, "2" * 64, shown)


# -- composed exactly where Gaussian ---------------------------------------------------------------------------------


def test_squares_of_mu_add(path):
    budget = make(path)
    left = budget.spend(Gaussian(0.6))
    left = budget.spend(Gaussian(0.8))
    assert left.spent == pytest.approx(Gaussian(1.0).epsilon(DELTA), rel=1e-12)
    assert left.spent >= Gaussian(1.0).epsilon(DELTA)
    assert budget.curve().mu == pytest.approx(1.0, rel=1e-15)
    assert left.mu == pytest.approx(math.sqrt(gdp_mu(EPSILON, DELTA) ** 2 - 1), rel=1e-12)
    assert left.entries == 2


def test_the_whole_limit_can_be_spent_and_no_more(path):
    budget = make(path)
    left = budget.spend(plan(EPSILON))
    assert left.spent <= EPSILON
    with pytest.raises(BudgetError, match="refused.*Nothing was entered"):
        budget.spend(plan(0.01))
    assert len(budget.entries()) == 1


@pytest.mark.parametrize("first", [0.3, 3.0, 7.9])
def test_what_is_said_to_be_left_fits(path, first):
    budget = make(path)
    left = budget.spend(plan(first))
    left = budget.spend(plan(left.epsilon))
    assert left.spent <= EPSILON
    assert left.spent == pytest.approx(EPSILON, rel=1e-5)


def test_half_of_what_was_spent_would_be_seen(path):
    """The sum must be that of all entries: an account that forgets one in two lets two plans of 7 in."""
    budget = make(path)
    budget.spend(plan(7.0))
    with pytest.raises(BudgetError, match="with it epsilon 10"):
        budget.spend(plan(7.0))


def test_random_sequences_are_never_below_their_direct_composition(tmp_path):
    rng = np.random.default_rng(0)
    for trial in range(12):
        budget = make(tmp_path / f"{trial}.budget")
        entered = []
        for mu in rng.gamma(1.0, 0.4, size=12):
            try:
                budget.spend(Gaussian(mu))
            except BudgetError:
                assert compose(*entered, Gaussian(mu)).epsilon(DELTA) > EPSILON
            else:
                entered.append(Gaussian(mu))
                spent = budget.remaining().spent
                assert compose(*entered).epsilon(DELTA) <= spent <= EPSILON


def test_many_small_ones_lose_nothing_to_rounding(path):
    budget = make(path)
    for _ in range(100):
        budget.spend(Gaussian(0.1))
    total = budget.curve().mu
    assert Fraction(total) ** 2 >= 100 * Fraction(0.1) ** 2
    assert total == pytest.approx(1.0, rel=1e-15)


# -- amplified and others --------------------------------------------------------------------------------------------


def test_the_first_plan_may_have_the_whole_limit_by_its_own_curve(path):
    budget = make(path)
    left = budget.spend(plan(EPSILON, mechanism="poisson"))
    assert EPSILON * 0.999 < left.spent <= EPSILON
    assert left.rule == "renyi"
    with pytest.raises(BudgetError):
        budget.spend(Gaussian(0.01, neighbours="add-or-remove"))


def test_a_renyi_filter_counts_all_kinds_never_below_their_composition(path):
    parts = [Gaussian(0.4, neighbours="zero-out"), BoundedRange(0.02, 50), Gaussian(0.2)]
    budget = make(path, neighbours="zero-out", filter="renyi")
    for part in parts:
        budget.spend(part)
    left = budget.spend(plan(2.0, mechanism="poisson"))
    whole = compose(*(ao.accounting.Gaussian(part.mu) if part.mu else part for part in parts)).epsilon(DELTA)
    assert whole < left.spent < EPSILON
    assert left.rule == "renyi"
    budget.spend(plan(left.epsilon))
    assert budget.remaining().spent <= EPSILON


def test_plans_chosen_in_advance_are_composed_by_their_losses(path):
    limit = 3.5
    budget = ao.Budget(path, limit, DELTA, neighbours="add-or-remove", adaptive=False)
    sampled = plan(2.0, mechanism="poisson")
    budget.spend(sampled)
    left = budget.spend(Gaussian(0.5, neighbours="add-or-remove"))
    assert left.spent == compose(sampled.curve, Gaussian(0.5, neighbours="add-or-remove")).epsilon(DELTA)
    assert budget.curve() == compose(sampled.curve, Gaussian(0.5, neighbours="add-or-remove"))
    left = budget.spend(Gaussian(left.mu, neighbours="add-or-remove"))
    assert limit * 0.99 < left.spent <= limit


def test_a_gaussian_filter_counts_an_amplified_plan_as_if_it_were_not(path):
    budget = make(path, neighbours="zero-out")
    budget.spend(Gaussian(0.1))
    with pytest.raises(BudgetError, match="Gaussian filter.*filter='renyi'"):
        budget.spend(plan(2.0, mechanism="poisson"))
    left = budget.spend(BoundedRange(0.01, 10))
    assert left.spent >= compose(Gaussian(0.1), BoundedRange(0.01, 10)).epsilon(DELTA)


# -- neighbours and units --------------------------------------------------------------------------------------------


def test_relations_that_follow_from_a_plan(path):
    budget = make(path, neighbours="zero-out")
    replaced = plan(2.0, neighbours="replace-one")
    budget.spend(replaced)
    assert budget.curve().mu == pytest.approx(replaced.mu / 2, rel=1e-12)
    coins = plan(2.0, mechanism="poisson")
    with pytest.raises(BudgetError, match="Gaussian filter"):  # of the relation nothing is said: it follows
        budget.spend(coins)


def test_a_zero_out_plan_counts_twice_for_replacing(path):
    budget = make(path, neighbours="replace-one")
    made = plan(2.0)
    budget.spend(made)
    assert budget.curve().mu == pytest.approx(2 * made.mu, rel=1e-12)


@pytest.mark.parametrize("neighbours", ["zero-out", "replace-one"])
def test_nothing_follows_for_a_unit_that_is_not_there(path, neighbours):
    budget = make(path, neighbours="add-or-remove")
    with pytest.raises(BudgetError, match="nothing follows"):
        budget.spend(plan(2.0, neighbours=neighbours))


def test_secret_coins_say_nothing_of_replacing(path):
    with pytest.raises(BudgetError, match="nothing follows"):
        make(path, neighbours="replace-one").spend(plan(2.0, mechanism="poisson"))


def test_curves_without_a_plan_are_of_one_relation(path):
    with pytest.raises(BudgetError, match="this curve for replace-one"):
        make(path, neighbours="zero-out").spend(Gaussian(0.1, neighbours="replace-one"))


def test_another_unit_is_refused(path):
    budget = make(path)
    budget.spend(plan(1.0))
    with pytest.raises(BudgetError, match="one 'example', and this is for one 'user'"):
        budget.spend(plan(1.0, unit="user"))


# -- unit by unit ----------------------------------------------------------------------------------------------------


def test_units_of_known_orders_have_their_own(path):
    budget = make(path)
    a = known([["ann"], ["bob"], ["ann", "cid"]])
    b = known([["dan"], ["eve"]])
    c = known([["ann"], ["dan"]])
    assert budget.spend(a).spent == pytest.approx(3.0, rel=1e-6)
    assert budget.spend(b).spent == pytest.approx(3.0, rel=1e-6)  # others
    left = budget.spend(c)
    assert left.spent == pytest.approx(compose(a.curve, c.curve).epsilon(DELTA), rel=1e-9)
    left = budget.spend(Gaussian(0.3))  # everybody
    assert left.spent == pytest.approx(compose(a.curve, c.curve, Gaussian(0.3)).epsilon(DELTA), rel=1e-9)
    again = ao.Budget(path).remaining()
    assert again.spent == left.spent


def test_units_sum_by_brute_force(path):
    rng = np.random.default_rng(1)
    budget = make(path)
    own, common = dict.fromkeys("abcdef", 0.0), 0.0
    for _ in range(8):
        if rng.random() < 0.3:
            budget.spend(Gaussian(0.2))
            common += 0.04
            continue
        order = [[str(u) for u in "abcdef" if rng.random() < 0.4] or ["a"] for _ in range(4)]
        made = known(order, 0.8)
        for unit, mu in zip(made.participation.units.tolist(), made.unit_mus(), strict=True):
            own[unit] += mu * mu
        budget.spend(made, named=True)
        worst = Gaussian(math.sqrt(common + max(own.values()))).epsilon(DELTA)
        spent = budget.remaining().spent
        assert worst * (1 - 1e-12) <= spent <= worst * (1 + 1e-9)


def test_the_budget_file_names_nobody_and_the_other_is_the_owners(path):
    make(path).spend(known([["ann"], ["bob"]]))
    secret = path.with_name(".people.budget.units")
    assert secret.stat().st_mode & 0o077 == 0
    for file in path.parent.iterdir():
        assert b"ann" not in file.read_bytes()


def test_without_the_secret_file_everybody_has_the_whole(path):
    budget = make(path)
    a, b = known([["ann"], ["bob"]]), known([["dan"], ["eve"]])
    budget.spend(a)
    budget.spend(b)
    path.with_name(".people.budget.units").unlink()
    assert ao.Budget(path).remaining().spent == pytest.approx(compose(a.curve, b.curve).epsilon(DELTA), rel=1e-9)
    c = known([["fay"], ["gus"]])
    with pytest.raises(BudgetError, match=r"\.units, which keeps what units have, is gone"):
        ao.Budget(path).spend(c)
    assert not path.with_name(".people.budget.units").exists()
    fresh = ao.Budget(path).spend(c, named=False)
    assert fresh.spent == pytest.approx(compose(a.curve, b.curve, c.curve).epsilon(DELTA), rel=1e-9)


@pytest.mark.parametrize("swapped", [False, True])
def test_the_file_of_units_is_bound_to_its_budget(path, swapped):
    """Under another key a unit has another hash, and would be somebody who had nothing yet."""
    secret = path.with_name(".people.budget.units")
    made = known([["ann"], ["bob"]])
    budget = make(path)
    budget.spend(made)
    kept = secret.read_bytes()
    other = ao.Budget(path.with_name("other"), EPSILON, DELTA)
    other.spend(made)
    for one in (budget, ao.Budget(path)):  # kept open, and opened now
        secret.unlink()
        if swapped:
            secret.write_bytes(path.with_name(".other.units").read_bytes())
        with pytest.raises(BudgetError, match="is not the one" if swapped else "is gone"):
            one.check(made)
        with pytest.raises(BudgetError, match="is not the one" if swapped else "is gone"):
            one.spend(made)
        assert one.remaining() == ao.Budget(path).remaining()
        secret.write_bytes(kept)
        assert len(one.entries()) == 1
    assert budget.spend(made).spent == pytest.approx(compose(made.curve, made.curve).epsilon(DELTA), rel=1e-9)
    assert ao.Budget(path).remaining() == budget.remaining()


def test_a_number_and_its_digits_are_one_person(path):
    budget = make(path)
    made = known([[7], [5]])
    budget.spend(made)
    left = budget.spend(known([["7"], ["5"]]))
    assert left.spent == pytest.approx(compose(made.curve, made.curve).epsilon(DELTA), rel=1e-9)


def test_numbers_of_a_public_plan_are_no_names(path, tmp_path):
    """Unit 0 of one public file is another person than unit 0 of the next."""
    known([["ann"], ["bob"]]).save(tmp_path / "a.json")
    known([["bob"], ["ann", "cid"]]).save(tmp_path / "b.json")
    budget = make(path)
    plans = [ao.Plan.load(tmp_path / name) for name in ("a.json", "b.json")]
    for one in plans:
        left = budget.spend(one)
    assert left.spent == pytest.approx(compose(*(one.curve for one in plans)).epsilon(DELTA), rel=1e-9)
    assert not path.with_name(".people.budget.units").exists()


def test_units_that_may_be_absent_are_not_counted_one_by_one(path):
    """Under add-or-remove a refusal for the worst unit would tell that it is there."""
    budget = make(path)
    a, b = (known(order, neighbours="add-or-remove") for order in ([["ann"], ["bob"]], [["dan"], ["eve"]]))
    budget.spend(a)
    assert budget.spend(b).spent == pytest.approx(compose(a.curve, b.curve).epsilon(DELTA), rel=1e-9)


# -- once for a run --------------------------------------------------------------------------------------------------


def test_a_run_is_charged_once(path):
    budget = make(path)
    made = plan(2.0)
    for what, word in ((Gaussian(0.01), "a curve"), (made, "abc")):
        first = budget.spend(what, run=word)
        for again in (budget, ao.Budget(path)):  # a program without a checkpoint is another run at each start
            with pytest.raises(BudgetError, match="spend.release.certificate"):
                again.spend(what, run=word)
        assert budget.remaining() == first
    assert budget.spend(made, run="other").entries == 3
    with pytest.raises(BudgetError, match="another plan"):
        budget.spend(plan(1.0), run="abc")
    assert budget.spend(certificate(made)).entries == 4
    assert budget.spend(certificate(made)).entries == 4


def test_a_word_stands_for_one_run(path):
    """Plans that name other units look alike in public, and so do runs of one plan."""
    budget = make(path)
    made = known([["ann"], ["bob"]])
    first = budget.spend(made, run="abc")
    with pytest.raises(BudgetError, match="under this word"):
        budget.spend(made, run="abc")
    assert budget.remaining() == first
    word = certificate(made, 0, "c")  # of a run that is saved: its key's fingerprint stands for a word
    own = budget.spend(made, run=word)
    assert budget.spend(made, run=word) == own
    with pytest.raises(BudgetError, match="under this word"):  # digits are no certificate, whoever they are of
        budget.spend(made, run=word.key_fingerprint)
    with pytest.raises(ArgumentError, match="of this plan"):
        budget.spend(plan(7.0), run=word)
    for other in (known([["cid"], ["dan"]]), made.public()):
        for asked in (budget.check, budget.spend):
            with pytest.raises(BudgetError, match="units by name"):
                asked(other, run=word)
    with pytest.raises(BudgetError, match="says nothing of its run's noise"):
        budget.spend(certificate(made), run="abc")
    begun = budget.spend(certificate(made, 0, "a"), run="other")
    assert budget.spend(certificate(made, 2, "a"), run="other") == begun
    with pytest.raises(BudgetError, match="is of another run, with other noise"):
        budget.spend(certificate(made, 2, "b"), run="other")
    assert len(budget.entries()) == 3


def test_to_check_enters_nothing(path):
    budget = make(path)
    budget.check(plan(7.0))
    budget.check(known([["ann"], ["bob"]]))
    assert [file.name for file in path.parent.iterdir() if file.name.endswith("units")] == []
    budget.spend(plan(7.0))
    with pytest.raises(BudgetError):
        budget.check(plan(7.0))
    assert len(budget.entries()) == 1


# -- settled ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def many():
    return ao.plan(order=MinSeparation(64, 4, 16), batch_size=10, epsilon=6.0, delta=DELTA, mechanism="independent")


def test_a_run_that_stopped_early_gives_back_what_it_did_not_use(path, many):
    budget = make(path)
    before = budget.spend(many, run="first")
    after = budget.settle(certificate(many, 16, "a", (4, 4)), run="first")
    assert after.spent == pytest.approx(Gaussian(many.mu / 2).epsilon(DELTA), rel=1e-9)
    assert after.spent < before.spent
    assert budget.settle(certificate(many, 16, "a", (4, 4))) == after
    with pytest.raises(BudgetError, match="belongs to another run"):
        budget.settle(certificate(many, 16, "b", (2, 4)), run="first")
    assert ao.Budget(path).remaining().spent == after.spent


def test_two_runs_of_one_plan_settle_one_entry_each(path, many):
    budget = ao.Budget(path, 20.0, DELTA)
    budget.spend(many, run="x")
    budget.spend(many, run="y")
    budget.settle(certificate(many, 16, "a", (4, 4)), run="y")
    assert [held.settled is None for held in budget.entries()] == [True, False]
    left = budget.settle(certificate(many, 4, "b", (1, 64)), run="x")
    assert left.spent == pytest.approx(Gaussian(many.mu * math.sqrt(5 / 16)).epsilon(DELTA), rel=1e-9)
    for run in ("x", "y"):
        with pytest.raises(BudgetError, match="another run"):
            budget.settle(certificate(many, 4, "c", (1, 64)), run=run)
    with pytest.raises(BudgetError, match="another run"):
        budget.settle(certificate(many, 4, "a", (1, 64)), run="x")
    assert budget.settle(certificate(many, 4, "a", (1, 64)), run="y") == left


def test_a_run_is_not_settled_by_its_plan_alone(path, many):
    """The run of another entry, of other units, of a search, or of other data may have the same plan."""
    budget = ao.Budget(path, 20.0, DELTA)
    budget.spend(many)
    before = budget.spend(known([["ann"], ["bob"], ["ann"]]), run="ann")
    shown = certificate(known([["cid"], ["dan"], ["cid"]]), 1, "b", (1, 3))
    for one in (certificate(many, 4, "a", (1, 64)), shown):
        with pytest.raises(BudgetError, match="does not say which entry"):
            budget.settle(one)
    with pytest.raises(BudgetError, match="does not say which entry"):
        budget.settle(certificate(many, 4, "a", (1, 64)), run="unknown")
    with pytest.raises(BudgetError, match="of another plan"):
        budget.settle(certificate(many, 4, "a", (1, 64)), run="ann")
    assert budget.remaining() == before


def test_a_run_that_was_entered_by_its_certificate_is_settled_by_its_noise(path, many):
    budget = make(path)
    budget.spend(certificate(many, 0, "a"))
    left = budget.settle(certificate(many, 4, "a", (1, 64)))
    assert left.spent == pytest.approx(Gaussian(many.mu / 4).epsilon(DELTA), rel=1e-9)


@pytest.mark.parametrize("enter", ["spend", "settle"])
@pytest.mark.parametrize("shown", [(16, 4), None])
def test_a_later_certificate_counts_what_was_used_since(path, many, enter, shown):
    """However it is entered, and also where it does not say how often units came."""
    budget = make(path)
    whole = budget.spend(many, run="x")
    budget.settle(certificate(many, 4, "a", (1, 64)), run="x")
    again = getattr(budget, enter)(certificate(many, 4, "a", (1, 64)))
    assert again.spent < whole.spent
    assert getattr(budget, enter)(certificate(many, 64, "a", shown)).spent == pytest.approx(whole.spent, rel=1e-9)
    assert len(budget.entries()) == 1


def test_a_run_that_went_on_after_it_was_settled_counts_what_it_used_since(path, many):
    budget = make(path)
    budget.spend(many, run="x")
    budget.settle(certificate(many, 4, "a", (1, 64)), run="x")
    budget.spend(plan(5.0))
    with pytest.raises(BudgetError, match="its run is over"):
        budget.spend(many, run="x")
    left = budget.settle(certificate(many, 64, "a", (16, 4)))
    assert left.spent > EPSILON  # it is so, whatever the limit
    with pytest.raises(BudgetError):
        budget.spend(Gaussian(0.01))


def test_what_cannot_be_claimed_is_not_settled(path, many):
    budget = ao.Budget(path, 20.0, DELTA, neighbours="zero-out")
    budget.spend(many, run="x")
    with pytest.raises(BudgetError, match="no realised claim"):
        budget.settle(certificate(many, 16, "a"), run="x")
    with pytest.raises(BudgetError, match="no entry"):
        budget.settle(certificate(plan(1.0), 1, "a", (1, 10)))


def test_a_settlement_above_the_plan_changes_nothing(path, many):
    budget = make(path)
    before = budget.spend(many, run="x")
    forged = dataclasses.replace(realised_claim(many, 16, 4), mu=100.0)
    made = dataclasses.replace(certificate(many, 64, "a"), realised=forged)
    assert budget.settle(made, run="x").spent == before.spent
    forged = dataclasses.replace(realised_claim(many, 16, 4), mu=0.001)  # what the numbers do not give
    made = dataclasses.replace(certificate(many, 64, "a"), realised=forged)
    assert budget.settle(made).spent == before.spent


def test_units_are_settled_each_by_the_less(path):
    budget = make(path)
    made = known([["ann"], ["bob"], ["ann"], ["cid"]])
    budget.spend(made, run="x")
    after = budget.settle(certificate(made, 2, "a", (1, 4)), run="x")
    assert after.spent == pytest.approx(Gaussian(made.mu / math.sqrt(2)).epsilon(DELTA), rel=1e-9)


# -- limits and arguments --------------------------------------------------------------------------------------------


def test_a_limit_below_what_is_spent_stops_everything(path):
    budget = make(path)
    budget.spend(plan(4.0))
    left = budget.limit(2.0, DELTA)
    assert (left.limit, left.mu, left.epsilon) == (2.0, 0.0, 0.0)
    with pytest.raises(BudgetError):
        budget.spend(Gaussian(1e-3))
    assert budget.limit(9.0, DELTA).epsilon > 0
    budget.spend(plan(4.0))


def test_a_file_keeps_what_it_was_made_with(path):
    make(path, neighbours="zero-out", adaptive=False)
    make(path)
    assert ao.Budget(path).remaining().rule == "planned"
    with pytest.raises(BudgetError, match="has the limit epsilon = 8"):
        ao.Budget(path, 9.0, DELTA)
    with pytest.raises(BudgetError, match="fixed for good"):
        ao.Budget(path, adaptive=True)
    with pytest.raises(BudgetError, match="fixed for good"):
        ao.Budget(path, neighbours="replace-one")


@pytest.mark.parametrize(
    "options",
    [
        {"epsilon": 1.0}, {"delta": 0.1}, {"epsilon": 0.0, "delta": 0.1}, {"epsilon": 1.0, "delta": 1.0},
        {"epsilon": 1, "delta": 0.1, "neighbours": "any"}, {"epsilon": 1, "delta": 0.1, "unit": "\n"},
        {"epsilon": 1, "delta": 0.1, "filter": "best"},
        {"epsilon": 1, "delta": 0.1, "filter": "renyi", "adaptive": False},
    ],
)  # fmt: skip
def test_arguments_that_break_their_rule_make_no_file(path, options):
    with pytest.raises(ArgumentError):
        ao.Budget(path, **options)
    assert not path.exists()


def test_a_new_file_needs_a_limit(path):
    with pytest.raises(BudgetError, match="there is no budget file"):
        ao.Budget(path)


@pytest.mark.parametrize("what", [0.5, None, "plan", (Gaussian(1.0),)])
def test_what_has_no_curve_is_refused(path, what):
    with pytest.raises(ArgumentError, match="spend needs"):
        make(path).spend(what)


def test_words_are_checked(path):
    budget = make(path)
    for name in ("two\nlines", "x" * 201, 3):
        with pytest.raises(ArgumentError, match="name"):
            budget.spend(Gaussian(0.1), name)
    for run in ("", " a", "a/b", "a\n", "ä", "x" * 81, 3):
        with pytest.raises(ArgumentError, match="run"):
            budget.spend(Gaussian(0.1), run=run)
    assert json.loads(path.read_text().splitlines()[0])["kind"] == "begin"
    assert len(path.read_text().splitlines()) == 1


def test_sampled_plans_of_zero_out_budgets(path):
    budget = make(path, neighbours="zero-out", filter="renyi")
    made = plan(2.0, mechanism="poisson")
    assert type(made.curve) is Sampled
    assert budget.spend(made).spent == pytest.approx(2.0, rel=1e-3)  # alone: its own curve
    assert 2.0 < budget.spend(Gaussian(1e-6)).spent < 4.0  # by the filter, whose order is for spending it all
