"""The report as a form: a promise is called strong only where it is, and what the owner states is text and no more."""

import json
from dataclasses import replace

import pytest

import anyorder as ao
from anyorder.accounting.risk import Reach, gaussian_tpr
from anyorder.app import html_report
from anyorder.app import report as report_file
from anyorder.app.cli import app
from anyorder.app.form import Form, percent, questions, strength, strength_of
from anyorder.errors import ArgumentError, NoiseWarning
from report import pages
from report.pages import certified, claims, text

CLAIMS = claims()
SUBJECTS = (
    "Privacy parameters", "Unit of privacy", "Algorithms and correctness", "Utility", "Bias", "Access control",
    "Trust models", "Side channels", "Data collection exposure",
)  # fmt: skip


def planned(**changes):
    given = {"dataset_size": 600, "batch_size": 20, "epochs": 2, "epsilon": 2.0, "delta": 1e-6, **changes}
    return ao.plan(mechanism="independent", **given)


def test_a_promise_that_protects_nobody_is_red_however_consistent_its_file_is():
    with pytest.warns(NoiseWarning, match="above one over"):
        page = html_report(planned(epsilon=1000, delta=0.01))
    assert "How strong: WEAK PROMISE (red)" in text(page)
    assert "0.01 times 600 examples is 6" in text(page)
    assert "The file is consistent. Checked:" in text(page)
    assert 'class="banner good"' not in page  # what is consistent is not green either
    good = html_report(planned())
    assert "How strong: STRONG PROMISE (green)" in text(good)
    assert 'class="banner bad"' not in good


@pytest.mark.parametrize(("found", "delta", "units", "level"), [
    (0.1, 1e-9, 9, "green"), (0.1001, 1e-9, 9, "amber"), (0.5, 1e-9, 9, "amber"), (0.5001, 1e-9, 9, "red"),
    (0.02, 0.1 / 600, 600, "green"), (0.02, 0.1001 / 600, 600, "amber"), (0.02, 1 / 49, 49, "red"),
    (0.02, 1e-9, None, "amber"), (0.9, 1e-9, None, "red"), (0.02, 0.01, 10**9, "red"),
])  # fmt: skip
def test_the_worst_of_attack_and_delta_decides(found, delta, units, level):
    assert strength(Reach(0.3, (0.001, found, 0.2)), delta, units, "user").level == level


def test_a_tenth_of_one_over_n_is_small_whatever_floats_make_of_it():
    reach = Reach(0.1, (0.001, 0.02, 0.1))
    assert {strength(reach, 0.1 / n, n, "user").level for n in range(1, 3000)} == {"green"}
    assert {strength(reach, 1 / n, n, "user").level for n in range(1, 3000)} == {"red"}


def test_what_the_number_does_not_count_takes_the_green_away():
    plan = planned(order="poisson", epsilon=1.0, dataset_size=1000)
    assert plan.known_epsilon > plan.epsilon
    found = strength_of(plan, 1000)
    assert found.level == "amber"
    assert found.marks[-1][1] == "Secret draws"
    one = replace(planned(), candidate_of="a" * 32)
    assert strength_of(one, 600).level == "red"
    assert "STRONG" not in html_report(one)


def test_the_owner_may_say_how_many_units_there_are_and_not_otherwise_than_the_file():
    users = CLAIMS["users"]
    assert "How strong: MODERATE PROMISE (amber)" in text(html_report(users))
    assert "STRONG PROMISE" in html_report(users, units=1000)
    assert "WEAK PROMISE" in html_report(users, units=10**6)
    with pytest.raises(ArgumentError, match="units must be 600, as the file says"):
        html_report(planned(), units=60_000)


def test_what_is_left_for_a_person_with_several_examples_is_never_shown_too_small():
    plan = planned(epsilon=8.0, delta=1e-5)
    told = text(html_report(plan))
    assert "2 19.13 84.3 of 100 3 33.09 99.7 of 100 4 49.86 100 of 100" in told
    for k in (2, 3, 4):
        assert float(percent(plan.curve.tpr(0.01, group=k))) / 100 >= plan.curve.tpr(0.01, group=k)
    secret = planned(order="poisson", epsilon=1.0, dataset_size=1000)
    told = text(html_report(secret))
    assert "takes the secret batches as known" in told
    shown = float(told.split("finds at most 2 ")[1].split()[1])
    assert shown >= 100 * secret.curve.tpr(0.01, group=2)
    assert shown == float(percent(gaussian_tpr(2 * secret.known_mu, 0.01)))
    assert "several examples" not in html_report(planned(unit="user"))


def test_the_report_names_the_file_and_the_weights(tmp_path):
    weights = tuple(f"{i:064x}" for i in range(10))
    replace(certified(planned()), weights=weights).save(tmp_path / "run.privacy.json")
    page = report_file.make(tmp_path).text
    assert json.loads((tmp_path / "run.privacy.json").read_text())["sha256"] in page
    assert [one in page for one in weights] == [True] * 8 + [False] * 2
    assert "2 digests more, in the certificate" in text(page)
    assert report_file.make(tmp_path / "run.privacy.json").text.count(weights[0]) == 1


@pytest.mark.parametrize("name", CLAIMS)
def test_every_form_has_its_lines(name):
    page = html_report(CLAIMS[name], owner="Registry", purpose="triage", data_set="visits", prepared="A. Moe, 3 May")
    told = text(page)
    for line in ("Owner Registry", "Purpose triage", "Data set visits", "Prepared by, on A. Moe, 3 May", "Privacy unit",
                 "Data protection officer", "Signature", "made this page", "size: A4"):  # fmt: skip
        assert line in (page if line == "size: A4" else told), line
    blank = pages.page(name)
    assert blank.count('class="fill"') == page.count('class="fill"') + 4
    if name != "empty search":
        assert all(subject in told for subject in SUBJECTS)
        assert "Left to the owner:" in told


def test_no_question_is_answered_with_what_nobody_knows():
    asked = {question: answer for _, question, answer in questions(certified(planned()), 600, "", "", "")}
    assert asked["Is that one person, with everything about them?"].endswith("the owner says:")
    open_ = {question for question, answer in asked.items() if not answer}
    assert open_ == {
        "What else is released from the same data?",
        "Was the choice of settings counted?", "Was the program tested or audited?",
        "How good are the results, and for what?", "For which groups are they worse?",
        "Who can reach the data, the noise key and the record of who took part?",
        "How are the data collected, kept and deleted?",
    }  # fmt: skip
    assert asked["Can rounding of numbers leak?"].startswith("Not covered")


def test_the_command_puts_the_owners_texts_in_and_makes_the_same_bytes(tmp_path):
    testing = pytest.importorskip("typer.testing")
    certified(planned()).save(tmp_path / "run.privacy.json")
    given = ["report", str(tmp_path), "--owner", "<b>Registry</b>", "--purpose", "triage", "--prepared", "A. Moe"]
    assert testing.CliRunner().invoke(app, given).exit_code == 0
    page = (tmp_path / "report.html").read_text()
    assert "Owner <b>Registry</b>" in text(page)
    form = Form(owner="<b>Registry</b>", purpose="triage", prepared="A. Moe")
    assert report_file.make(tmp_path, form=form).text == page
    assert "Registry" not in report_file.make(tmp_path).text
    refused = testing.CliRunner().invoke(app, ["report", str(tmp_path), "--units", "7"])
    assert refused.exit_code == 2
    assert (tmp_path / "report.html").read_text() == page
    with pytest.raises(ArgumentError, match="at most 300"):
        Form(owner="x" * 301)
