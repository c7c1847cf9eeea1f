"""The sentences and numbers of a report: every one that a claim needs, on the pages that need it."""

import math
import re
from dataclasses import replace
from html import unescape

import pytest

from anyorder.accounting.amplification.methods import MonteCarlo
from anyorder.accounting.risk import point_reach
from anyorder.app import html_report
from anyorder.app.cards import receipt_facts, search_verdict, verdict, whom
from anyorder.app.charts import _examples
from anyorder.app.form import percent
from anyorder.app.report import Attacked, Shown
from anyorder.budget.claim import SearchCertificate
from anyorder.budget.search_privacy import Fixed
from anyorder.formatting import rounded_up
from anyorder.participation import KnownOrder, PoissonSampling
from anyorder.plan.certificate import Certificate, Verification
from anyorder.plan.plan import Plan
from anyorder.plan.receipt import Receipt
from anyorder.strategy import Independent
from anyorder.workload import prefix_sum
from report.pages import claims, page, text

CLAIMS = claims()


@pytest.fixture(scope="module")
def pages():
    return {name: page(name) for name in CLAIMS}


# -- the headline -----------------------------------------------------------------------------------------------------


def cells(page):
    """(number, what it is of), of the headline."""
    return [
        (unescape(b), unescape(told)) for b, told in re.findall(r'<b>([^<]*)</b><span class="small">([^<]*)<', page)
    ]


@pytest.mark.parametrize("name", CLAIMS)
def test_the_numbers_below_the_promise_are_of_the_same_promise_and_never_smaller(name, pages):
    claim = CLAIMS[name]
    plan = getattr(claim, "plan", claim)
    searched = isinstance(claim, SearchCertificate)
    delta = claim.claim.delta if searched else plan.delta
    reached = point_reach(claim.epsilon, delta) if searched else claim.reach  # of a search, not of a run
    found = cells(pages[name])
    shown, right = float(found[0][0].removesuffix(" %")), 50 * (1 + reached.advantage)
    assert right - 1e-9 <= shown <= right + 0.1
    neighbours = claim.claim.neighbours if searched else plan.neighbours
    assert ("which of two things its data was" in found[0][1]) == (neighbours == "replace-one")
    assert ("whether it was used" in found[0][1]) == (neighbours != "replace-one")
    if not searched:
        shown = float(found[1][0].removesuffix(" of 100"))
        assert 100 * reached.found - 1e-9 <= shown <= 100 * reached.found + 0.1
        assert f"here 1 in {round(1 / delta):,}, is the small chance" in text(pages[name])
        known = [number for number, told in found if told == "what is left if the secret batches became known"]
        secret = plan.known_epsilon is not None and plan.known_epsilon > plan.epsilon
        assert known == ([f"epsilon {rounded_up(plan.known_epsilon)}"] if secret else [])


@pytest.mark.parametrize("share", [0.5, 0.5001, 0.61234, 0.98999, 0.9991, 0.99951, 0.999999, 1.0])
def test_a_share_is_rounded_up_and_near_the_whole_to_more_digits(share):
    shown = float(percent(share))
    assert 100 * share - 1e-9 <= shown < min(100.0001, 100 * share + (0.1 if share < 0.999 else 0.001))


def test_a_delta_that_is_not_small_is_in_the_best_guess():
    """Attained by whoever shows everything with probability delta, and else answers by chance."""
    grown, loose, tight = math.exp(0.5), point_reach(0.5, 0.05), point_reach(6.0, 0.05)
    assert (1 + loose.advantage) / 2 == pytest.approx((grown + 0.05) / (grown + 1))
    assert loose.found == pytest.approx(grown * 0.01 + 0.05)
    assert tight.found == pytest.approx(1 - (1 - 0.05 - 0.01) / math.exp(6.0))


@pytest.mark.parametrize("share", [0.99, 1.01])
def test_an_audit_that_saw_more_than_the_claim_says_so(share):
    epsilon = CLAIMS["fixed"].epsilon
    shown = Shown(audit=Attacked(canaries=9, p_value=0.5, at_least=share * epsilon), training=(("model", "cnn"),))
    told = text(html_report(CLAIMS["fixed"], shown))
    assert ("but it saw more than the claim" in told) == (share > 1)
    assert ("the attack saw nothing that the claim excludes. That is no proof" in told) == (share < 1)
    assert "From the run's own metrics file, which the certificate does not cover. model cnn" in told


def test_what_an_audit_saw_is_held_against_the_claim_at_its_own_delta():
    """A lower bound at a smaller delta may lie above the claim at the plan's, and says nothing against it."""
    epsilon = CLAIMS["fixed"].epsilon
    for claimed, more in ((1.3 * epsilon, False), (1.1 * epsilon, True)):
        found = Attacked(canaries=9, p_value=0.5, at_least=1.2 * epsilon, claimed=claimed, confidence=0.9)
        told = text(html_report(CLAIMS["fixed"], Shown(audit=found)))
        assert ("it saw more than the claim, as up to one true claim of 10 has it: audit again" in told) is more
        assert ("the attack saw nothing that the claim excludes" in told) is not more


def test_every_digest_stands_beside_its_name(pages):
    shown = text(pages["fixed"]).split("Annex: digests", 1)[1]
    for name, digest, what in (("noise key", "0a" * 16, "a fingerprint that leads to no key"),
                               ("record", "1b" * 32, "who took part when, under a key"),
                               ("receipts", "2c" * 32, "what each unit's own receipt leads to")):  # fmt: skip
        assert f"{name} {digest} {what}" in shown


def test_a_plan_whose_units_have_names_has_a_page_without_them():
    order = KnownOrder([["anneke-7", "bob-8"], ["bob-8", "carol-9"], ["anneke-7"]])
    plan = Plan(participation=order, strategy=Independent(3), workload=prefix_sum(3), clip_norm=1, sigma=2, delta=1e-5,
                batch_size=2)  # fmt: skip
    page = html_report(plan)
    assert page == html_report(plan.public())
    assert not [name for name in ("anneke", "bob", "carol") if name in page]
    assert plan.digest not in page  # a digest of names can be tried out
    assert _examples(plan) == _examples(plan.public()) == ([], [])
    assert "At most 2 times, at least 1 step apart. The order lists its units, and is not drawn." in text(page)


# -- sentences --------------------------------------------------------------------------------------------------------


RESTS = {  # a sentence -> the plans whose promise rests on it
    "was clipped as the card says, and depends on no other": lambda plan: True,
    "If two reports have the same key fingerprint, they used the same noise twice": lambda plan: True,
    "Order, settings and the end of the run were not chosen by looking at the private data": lambda plan: True,
    "one identity is one": lambda plan: True,
    "The draws were fair, were made as the order says": lambda plan: plan.participation.secret,
    "their chance is inside delta": lambda plan: type(plan.method) is MonteCarlo,
    "Users' devices are trusted": lambda plan: bool(plan.on_device),
    "An attack on the last digits of the noise is not covered": lambda plan: plan.grid is None,
}
LIMITS = {
    "Not against anybody who has the checkpoint, which holds the noise key, or the evidence": lambda plan: True,
    "Other runs on the same data add to its epsilon": lambda plan: True,
    "that belong together the promise is weaker": lambda plan: True,
    "A person whose data is in several examples is protected less": lambda plan: plan.unit == "example",
    "replaced by nothing": lambda plan: plan.neighbours == "zero-out",
}


@pytest.mark.parametrize("name", [name for name in CLAIMS if name != "empty search"])
def test_every_assumption_and_limit_stands_on_the_pages_that_need_it_and_on_no_other(name, pages):
    claim, told = CLAIMS[name], text(pages[name])
    plan = claim.best.plan if name == "search" else getattr(claim, "plan", claim)
    for sentence, needed in {**RESTS, **LIMITS}.items():
        assert (sentence in told) == needed(plan), sentence


@pytest.mark.parametrize("name", CLAIMS)
def test_what_was_checked_holds_and_what_no_file_shows_does_not(name, pages):
    claim = CLAIMS[name]
    if isinstance(claim, SearchCertificate):
        checked, unseen = search_verdict(claim)
    else:
        made = isinstance(claim, Certificate)
        checked, unseen = verdict(Verification(claim.plan if made else claim, claim if made else None))
    rows = re.findall(r"<tr><td>([^<]*)</td><td>(holds|not checked)", pages[name])
    assert [(unescape(told), how) for told, how in rows] == [
        *((told, "holds") for told in checked), *((told, "not checked") for told in unseen)
    ]  # fmt: skip


def test_a_verdict_names_all_that_no_file_shows():
    seen = {name: verdict(Verification(claim.plan, claim))[1] for name, claim in CLAIMS.items() if name in
            ("fixed", "users", "poisson", "bins", "known")}  # fmt: skip
    for name, unseen in seen.items():
        told = "; ".join(unseen)
        assert "that the noise was added, and that order, units and clipping were" in told
        assert ("nobody but the sampler knows the batches" in told) == (name in ("poisson", "bins"))
        assert ("what the plan trusts" in told) == (name == "users")
        assert ("who took part in which step" in told) == (name != "users")  # devices alone have that record


def test_a_fixed_and_a_random_number_of_runs_are_checked_each_in_its_way():
    found = CLAIMS["search"]
    keys = (found.best.key_fingerprint, "4e" * 16)
    fixed = replace(found, claim=replace(found.claim, law=Fixed(2)), fingerprints=keys)
    for searched, own, other in ((found, "number of runs was drawn", "noise key"), (fixed, "noise key", "was drawn")):
        checked, unseen = search_verdict(searched)
        told = "; ".join([*checked, *unseen])
        assert own in told
        assert other not in told
        assert "that scores were made without private data" in told


def test_a_secret_that_is_worth_little_is_told_as_one():
    plan = Plan(participation=PoissonSampling(4, 0.97), strategy=Independent(4), workload=prefix_sum(4), clip_norm=1,
                sigma=1.5, delta=1e-5, batch_size=97, dataset_size=100, neighbours="add-or-remove")  # fmt: skip
    assert plan.epsilon < plan.known_epsilon < 1.05 * plan.epsilon
    (order,) = [told for question, told in whom(plan) if question == "Who knows the order"]
    assert order[0].startswith("Nobody but the sampler")


@pytest.mark.parametrize("name", ["fixed", "poisson"])
def test_a_receipt_says_against_whom_its_mu_holds(name):
    plan = CLAIMS[name].plan
    own = Receipt("ann", tuple(range(50)), 1.23456789, 0, bytes(32), bytes(32))
    told = dict(receipt_facts(own, plan))
    assert told["steps"].startswith("50: 0, 1, 2, ")
    assert told["steps"].endswith(" 39, ..")
    secret = "1.2346 against those who know these steps; the plan's claim is against all others"
    assert told["its own mu"] == (secret if name == "poisson" else f"1.2346 (the plan's: {rounded_up(plan.mu, 5)})")
