"""The report: what it says, that it says it only of what was checked, and that nothing else can get into it."""

import math
import re
import time
from dataclasses import replace

import numpy as np
import pytest

import anyorder as ao
from anyorder.accounting import Gaussian, gdp_epsilon, gdp_mu
from anyorder.accounting.poisson import poisson_epsilon
from anyorder.accounting.risk import point_reach, reach
from anyorder.app import html_report
from anyorder.app.cards import MEANS
from anyorder.app.charts import (
    Axis,
    Html,
    Line,
    _examples,
    document,
    join,
    line_chart,
    noise_beside,
    sampled_noise,
    tag,
)
from anyorder.app.form import Form
from anyorder.app.report import Attacked, Shown, html_refusal
from anyorder.budget.claim import SearchCertificate, SearchClaim
from anyorder.budget.search_privacy import Geometric
from anyorder.errors import PlanError
from anyorder.formatting import rounded_up
from anyorder.participation import BallsInBins, EpochShuffle, FixedOrder, MinSeparation, SingleEpoch
from anyorder.plan.certificate import realised_claim
from anyorder.plan.cost import is_large
from anyorder.plan.plan import Plan
from anyorder.plan.planner import plan_at_sigma, with_budget
from anyorder.strategy import Independent, Tree
from anyorder.strategy.registry import row_variances
from anyorder.workload import prefix_sum
from report import pages as made
from report.pages import certified, claims, read, text

CLAIMS = claims()
HOSTILE = [
    "<script>alert(1)</script>", '"><img src=x onerror=alert(1)>', "</style><script>1</script>", "' onload='x",
    "&lt;script&gt;", "\u202eright to left\u202c", "a\x1b[2Jb", "]]><![CDATA[", "{{7*7}}", "\ud800",
]  # fmt: skip


@pytest.fixture(scope="module")
def pages():
    return {name: made.page(name) for name in CLAIMS}


@pytest.mark.parametrize("name", CLAIMS)
def test_every_page_is_well_formed_and_asks_for_nothing_from_elsewhere(name, pages):
    reader = read(pages[name])
    assert reader.tags.count("h1") == 1
    assert "viewport" in pages[name]
    assert "prefers-color-scheme: dark" in pages[name]
    assert "@media print" in pages[name]
    assert len(pages[name].encode()) < 60_000
    assert not re.search(r"\bnan\b|\binf\b|None", " ".join(reader.words))


@pytest.mark.parametrize("name", CLAIMS)
def test_the_same_claim_has_the_same_bytes(name, pages):
    assert html_report(CLAIMS[name]) == pages[name]


@pytest.mark.parametrize("name", CLAIMS)
def test_the_headline_is_the_claim(name, pages):
    claim = CLAIMS[name]
    delta = (
        claim.claim.delta if hasattr(claim, "claim") else claim.plan.delta if hasattr(claim, "plan") else claim.delta
    )
    assert f"epsilon ≤ {rounded_up(claim.epsilon)} at delta {delta:g}" in text(pages[name])
    assert float(rounded_up(claim.epsilon)) >= claim.epsilon * (1 - 1e-12)


@pytest.mark.parametrize("name", [name for name in CLAIMS if "search" not in name])
def test_the_page_says_who_is_protected_from_whom(name, pages):
    claim, told = CLAIMS[name], text(pages[name])
    plan = getattr(claim, "plan", claim)
    for phrase in ("Who is protected", "What is compared", "Against whom", "Who knows the order", plan.digest,
                   "Not against the party that runs", plan.participation.describe(), "anyorder verify"):  # fmt: skip
        assert phrase in told
    secret = plan.participation.secret and plan.known_epsilon > plan.epsilon
    assert secret == ("Nobody but the sampler" in told)
    assert secret == (f"epsilon {rounded_up(plan.known_epsilon or 0)} is what is left" in told)
    assert ("replaced by any other data" in told) == (plan.neighbours == "replace-one")
    assert ("the same run without one" in told) == (plan.neighbours == "add-or-remove")
    assert ("Each single example" in told) == (plan.unit == "example")


def test_the_page_that_is_signed_names_its_run_and_how_to_find_its_model():
    claim = CLAIMS["fixed"]
    told = text(html_report(replace(claim, weights=("ab" * 32,), seal="cd" * 32)))
    about, decision = told.split("What this report is about", 1)[1], told.index("Decision")
    assert f"with the noise key {claim.key_fingerprint}" in about.split("What it means for an attacker")[0]
    assert told.index("run.privacy.json --model FILE") < decision < told.index("Annex: pictures")
    assert "--model" not in text(html_report(claim))


def test_a_realised_number_stands_beside_the_planned_one():
    plan = ao.plan(order=MinSeparation(40, 5, 4), unit="user", batch_size=8, epsilon=2, delta=1e-6,
                   mechanism="tree")  # fmt: skip

    realised = realised_claim(plan, 2, 10)
    shown = replace(certified(plan), realised=realised)
    told = text(html_report(shown))
    assert f"epsilon {rounded_up(realised.epsilon)} realised: the same promise, computed from how often" in told
    assert "how often units appeared and how far apart, from which the realised number follows" in told  # not checked
    assert "If in doubt, use the planned one" in told
    assert "realised" not in text(html_report(certified(plan)))
    same = replace(certified(plan), realised=realised_claim(plan, 4, 5))
    assert "realised: for how often" not in text(html_report(same))  # it says nothing that the headline does not


@pytest.mark.parametrize("name", ["plan", "users"])
def test_a_notebook_shows_the_card(name):
    shown = CLAIMS[name]._repr_html_()
    for key, told in CLAIMS[name].facts():
        assert f"<th>{key}</th><td>{told.replace('<', '&lt;')}</td>".replace("'", "&#x27;") in shown


def test_every_fact_of_a_card_is_explained():
    names = {name for claim in CLAIMS.values() for name, _ in claim.facts()}
    assert names <= set(MEANS), names - set(MEANS)


# -- text from strangers ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text_", HOSTILE)
def test_no_text_can_be_markup(text_):
    shown = Shown(
        title=text_, training=((text_, text_),), score=((text_, text_),), budget=text_, notes=(text_,), label=text_,
        accuracy=((1, 0.5), (2, 0.7)), audit=Attacked(canaries=5, p_value=0.5),
        form=Form(owner=text_, purpose=text_, data_set=text_, prepared=text_),
    )  # fmt: skip
    for page in (html_report(CLAIMS["fixed"], shown), html_refusal(text_, shown)):
        reader = read(page)  # no script, no attribute that acts, all tags matched
        assert "\x1b" not in page
        assert "\u202e" not in page
        page.encode("utf-8")
        if text_.isprintable():
            assert text_ in "".join(reader.words)  # as it reads


def test_settings_of_a_search_and_names_of_an_order_are_only_text(pages):
    assert "<script>" in text(pages["search"])
    assert "<script" not in pages["search"]
    assert "zoltan" not in pages["known"]  # units are numbers in what is shown


def test_markup_escapes_whatever_is_not_its_own():
    assert tag("p", "<b>", tag("b", '"'), class_='"x"') == '<p class="&quot;x&quot;">&lt;b&gt;<b>&quot;</b></p>'
    assert tag("p", Html("<b></b>") + "<i>") == "<p>&lt;b&gt;&lt;/b&gt;&lt;i&gt;</p>"  # a sum is no markup any more
    assert join("<", tag("i"), between=" ") == "&lt; <i></i>"
    assert tag("path", stroke_width=2, d=None) == '<path stroke-width="2"></path>'
    assert "<title>&lt;x&gt;</title>" in document("<x>")


# -- what did not pass ------------------------------------------------------------------------------------------------


def test_a_refusal_says_so_before_any_number():
    page = html_refusal("the file claims epsilon = 3.25; recomputed from its plan it is 8.5", Shown(title="3 runs"))
    told = " ".join(page[page.index("<body>") :].split())
    words = re.sub(r"<[^>]*>", " ", told)
    assert words.index("NOT VERIFIED") < min(words.index(digit) for digit in "0123456789" if digit in words)
    assert 'class="banner bad"' in page
    assert "≤" not in page
    assert "Checked" not in page


def test_what_was_not_read_to_its_end_is_not_called_wrong():
    words = re.sub(r"<[^>]*>", " ", html_refusal("it takes more time than a file is given", unread=True))
    assert "NOT CHECKED" in words
    assert "NOT VERIFIED" not in words
    assert "damaged" not in words
    assert "anyorder verify --large run.privacy.json" in words


def test_a_claim_that_a_strangers_file_may_not_ask_for_says_how_it_is_read():
    for many, option in ((12, ""), (13, " --large")):
        plan = plan_at_sigma(
            2.0, order=BallsInBins(2, many), batch_size=1, delta=1e-5,
            mechanism=ao.strategy.ToeplitzBanded([1.0, 0.5], 2 * many),
        )  # fmt: skip
        words = re.sub(r"<[^>]*>", " ", html_report(plan))
        assert f"anyorder verify{option} run.privacy.json" in words
        assert f"anyorder report{option} FOLDER" in words
        assert is_large(plan.to_dict()) is bool(option)


# -- numbers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("epsilon", [0.1, 1.0, 3.0, 8.0])
def test_who_does_not_know_the_batches_tells_no_more_than_who_does(epsilon):
    secret, known = point_reach(epsilon, 1e-5), reach(Gaussian(1.0))
    both = point_reach(epsilon, 1e-5, 1.0)
    assert both.advantage == min(secret.advantage, known.advantage)
    assert both.found == min(secret.found, known.found)
    assert point_reach(epsilon, 1e-5, 100.0) == secret


@pytest.mark.parametrize("epsilon", [0.1, 1.0, 3.0, 8.0])
def test_the_best_guess_is_that_of_the_claim(epsilon):
    """Of a Gaussian claim by its two normal laws; of any other by randomised response, which attains it."""
    mu = gdp_mu(epsilon, 1e-5)
    assert gdp_epsilon(mu, 1e-5) == pytest.approx(epsilon, rel=1e-6)
    rng = np.random.default_rng(3)
    absent, present = rng.normal(0, 1, 400_000), rng.normal(mu, 1, 400_000)
    guess = reach(Gaussian(mu))
    right = ((absent < mu / 2).mean() + (present >= mu / 2).mean()) / 2
    assert (1 + guess.advantage) / 2 == pytest.approx(right, abs=0.004)
    assert guess.found == pytest.approx((present > np.quantile(absent, 0.99)).mean(), abs=0.01)
    loose = point_reach(epsilon, 0.0)
    truth = math.exp(epsilon) / (1 + math.exp(epsilon))  # of randomised response
    assert (1 + loose.advantage) / 2 == pytest.approx(truth)
    assert loose.advantage > guess.advantage
    assert 0.01 < guess.found < loose.found <= 1
    assert point_reach(1e4, 0.1).advantage == 1


@pytest.mark.parametrize(("value", "shown"), [(7.99996, "8"), (8.0004, "8.001"), (0.0, "0"), (0.012341, "0.01235"),
                                              (1234.2, "1235"), (math.inf, "inf"), (3.0, "3")])  # fmt: skip
def test_epsilons_are_rounded_up(value, shown):
    assert rounded_up(value) == shown


@pytest.mark.parametrize("neighbours", ["zero-out", "replace-one"])
def test_other_mechanisms_keep_the_same_promise(neighbours):
    plan = ao.plan(dataset_size=1000, batch_size=20, epochs=2, epsilon=3, delta=1e-5, mechanism="blt, 1 buffer",
                   neighbours=neighbours)  # fmt: skip
    own, *others = noise_beside(plan)
    assert own.std == pytest.approx(plan.noise_profile(sums=True))
    strategies = {"independent noise, same order": Independent(100), "binary tree, same order": Tree(100, "full")}
    for profile in others[: len(strategies)]:
        other = with_budget(replace(plan, strategy=strategies[profile.name]), epsilon=plan.epsilon)
        assert profile.std == pytest.approx(other.noise_profile(sums=True), rel=1e-6)
    assert len(others) == (3 if neighbours == "zero-out" else 2)  # DP-SGD's coins are no answer to a replaced unit


def test_of_a_secret_order_the_others_are_as_if_it_were_known():
    plan = CLAIMS["bins"].plan
    own, independent, tree, sampled = noise_beside(plan)
    known = Plan(participation=FixedOrder(24, 2, 12), strategy=Independent(24), workload=prefix_sum(24), clip_norm=1,
                 sigma=1, delta=1e-5, batch_size=10)  # fmt: skip
    assert independent.std == pytest.approx(with_budget(known, epsilon=plan.epsilon).noise_profile(), rel=1e-6)
    assert own.mean < independent.mean
    assert independent.name.endswith("if batches were known")
    assert tree.name.endswith("if batches were known")
    assert sampled.name.startswith("DP-SGD")


@pytest.mark.parametrize(
    ("q", "n", "epsilon", "delta"), [(0.01, 300, 1, 1e-6), (0.1, 20, 6, 1e-5), (0.5, 40, 0.5, 1e-4)]
)
def test_dp_sgd_is_drawn_with_the_noise_that_its_accountant_asks_for(q, n, epsilon, delta):
    pytest.importorskip("dp_accounting")
    sigma = sampled_noise(q, n, epsilon, delta)
    assert poisson_epsilon(sigma, q, n, delta) == pytest.approx(epsilon, rel=0.015)
    assert sampled_noise(q, n, 1e-9, 1e-12) is None


@pytest.mark.parametrize("order", [FixedOrder(24, 2, 12), EpochShuffle(3, 8), MinSeparation(40, 5, 4), SingleEpoch(9),
                                   BallsInBins(2, 12), MinSeparation(7, 1)])  # fmt: skip
def test_made_up_units_keep_to_the_order(order):
    plan = Plan(participation=order, strategy=Independent(order.n), workload=prefix_sum(order.n), clip_norm=1, sigma=2,
                delta=1e-5, batch_size=4)  # fmt: skip
    rows, borders = _examples(plan)
    assert len(rows) == 3
    for _, steps in rows:
        assert order.pattern.allows(steps)
        assert len(steps) >= order.max_participations - 1
    assert all(0 <= step < order.n for step in borders)


def test_lines_lie_where_their_numbers_say():
    x, y = Axis("step", 1, 5), Axis("noise", 0, 10)
    drawn = line_chart([Line([1, 3, 5], [0, 5, 10])], x, y, "a line")
    assert 'd="M52 250L259 131L466 12"' in drawn
    assert [Axis("x", 0, 10).ticks(), Axis("x", 1, 3, whole=True).ticks()] == [[0, 2, 4, 6, 8, 10], [1, 2, 3]]
    assert Axis("delta", 1e-10, 1e-1, log=True).ticks() == pytest.approx([1e-10, 1e-8, 1e-6, 1e-4, 1e-2])
    assert Axis("delta", 1e-4, 1e-2, log=True).at([1e-3]) == pytest.approx([0.5])


@pytest.mark.parametrize("strategy", [Independent(1 << 17), Tree(1 << 17), Tree(1000)])
def test_long_plans_are_drawn_or_not_by_their_length_alone(strategy):
    n = strategy.n
    plan = Plan(participation=SingleEpoch(n), strategy=strategy, workload=prefix_sum(n), clip_norm=1, sigma=1,
                delta=1e-6, batch_size=4, dataset_size=8 * n)  # fmt: skip
    began = time.process_time()
    page = html_report(certified(plan))
    assert time.process_time() - began < 4
    assert ("Not drawn: it takes long" in text(page)) == (n > 1 << 15)
    if n > 1 << 15:
        with pytest.raises(PlanError, match="takes long"):
            noise_beside(plan)
    else:
        multiplier = sampled_noise(4 / (8 * n), n, plan.epsilon, plan.delta)
        assert noise_beside(plan)[-1].std[-1] == pytest.approx(multiplier * math.sqrt(n))
        assert row_variances(strategy, prefix_sum(n)).shape == (n,)


def test_the_page_of_a_search_says_of_what_a_leak_leaves_its_number():
    plan = ao.plan(dataset_size=200, batch_size=20, epochs=1, epsilon=2, delta=1e-5, order="poisson")
    claim = SearchClaim(Geometric(10.0), plan.curve, plan.delta)
    found = SearchCertificate(claim, "d" * 32, replace(certified(plan), realised=None), {"rate": 0.1})
    told = text(html_report(found))
    assert f"epsilon {rounded_up(plan.known_epsilon)} is what is left, at delta 1e-05 of the chosen run alone" in told
    assert "of the chosen run alone" not in text(html_report(certified(plan)))


def test_the_way_to_verify_names_what_the_command_needs(pages):
    assert all("<code>anyorder</code> with its extra <code>cli</code>" in page for page in pages.values())
