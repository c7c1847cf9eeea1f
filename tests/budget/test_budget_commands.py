"""`anyorder budget`, `--budget`, and exports: what they print, write and refuse, and with which exit code."""

import json

import numpy as np
import pytest

pytest.importorskip("typer")
pytest.importorskip("rich")

from typer.testing import CliRunner

import anyorder as ao
from anyorder.accounting import BoundedRange, Gaussian
from anyorder.app.cli import app
from anyorder.budget import Geometric
from anyorder.budget.claim import SearchClaim
from anyorder.budget.file import export, nist, opendp
from anyorder.errors import ArgumentError, BudgetError
from anyorder.participation import MinSeparation

TRAIN = ["train", "--epsilon", "3", "--mechanism", "tree", "--epochs", "1", "--batch-size", "480"]


@pytest.fixture
def path(tmp_path):
    return tmp_path / "people.budget"


@pytest.fixture
def plan():
    return ao.plan(dataset_size=400, batch_size=40, epochs=1, epsilon=3, delta=1e-5, mechanism="independent")


def invoke(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def made(path, *more):
    outcome = invoke("budget", path, "limit", "--epsilon", 4, "--delta", 1e-5, *more)
    assert outcome.exit_code == 0, outcome.output


def test_a_budget_from_the_shell(path, plan, tmp_path):
    plan.save(tmp_path / "plan.json")
    made(path)
    outcome = invoke("budget", path, "spend", tmp_path / "plan.json", "--name", "first")
    assert outcome.exit_code == 0, outcome.output
    assert outcome.stdout.startswith("epsilon 3 of 4 spent at delta = 1e-05")
    for words in ((), ("show",)):
        shown = invoke("budget", path, *words).stdout
        assert "first" in shown
        assert "epsilon 3 of 4 spent" in shown
    told = json.loads(invoke("budget", path, "--json").stdout)
    assert told["spent"] == ao.Budget(path).remaining().spent
    assert [entry["name"] for entry in told["entries"]] == ["first"]
    before = path.read_bytes()
    outcome = invoke("budget", path, "spend", tmp_path / "plan.json")
    assert (outcome.exit_code, outcome.stdout) == (1, "")
    assert outcome.stderr.startswith("anyorder: refused: with it epsilon 4.4")
    assert path.read_bytes() == before
    assert invoke("budget", path, "limit", "--epsilon", 5, "--delta", 1e-5).exit_code == 0
    assert invoke("budget", path, "spend", tmp_path / "plan.json", "--run", "two").exit_code == 0
    refused_again = invoke("budget", path, "spend", tmp_path / "plan.json", "--run", "two")
    assert (refused_again.exit_code, "under this word" in refused_again.stderr) == (1, True)
    assert len(ao.Budget(path).entries()) == 2


@pytest.mark.parametrize(
    ("words", "phrase"),
    [
        (["show", "--epsilon", "3"], "--epsilon is for limit, not for show"),
        (["spend"], "needs the file of a plan"),
        (["show", "plan.json"], "takes no file"),
        (["limit", "--epsilon", "3"], "needs --epsilon and --delta"),
        (["export", "--format", "xml"], "format must be one of nist, opendp"),
    ],
)
def test_what_is_typed_wrongly_is_said(path, words, phrase):
    made(path)
    outcome = invoke("budget", path, *words)
    assert (outcome.exit_code, outcome.stdout) == (2, "")
    assert phrase in outcome.stderr


def test_a_training_run_is_entered_once_and_refused_before_it_writes(path, tmp_path):
    made(path)
    folder = tmp_path / "run"
    outcome = invoke(*TRAIN, "--output", folder, "--budget", path)
    assert outcome.exit_code == 0, outcome.output
    [held] = ao.Budget(path).entries()
    assert held.spend.plan == ao.Plan.load(folder / "plan.json").digest
    assert held.spend.run == json.loads((folder / "budget.json").read_text())["run"]
    assert invoke("train", "--resume", folder).exit_code == 0
    assert len(ao.Budget(path).entries()) == 1
    outcome = invoke(*TRAIN, "--output", tmp_path / "other", "--budget", path)
    assert outcome.exit_code == 1
    assert "refused" in outcome.stderr
    assert not (tmp_path / "other").exists()
    outcome = invoke("train", "--resume", folder, "--budget", path)
    assert outcome.exit_code == 2
    assert "leave out --budget" in outcome.stderr
    alone = tmp_path / "run.privacy.json"
    alone.write_bytes((folder / "run.privacy.json").read_bytes())
    assert "does not say which entry" in invoke("budget", path, "settle", alone).stderr
    assert invoke("budget", path, "settle", folder / "run.privacy.json").exit_code == 0  # at what was planned
    [held] = ao.Budget(path).entries()
    assert held.settled is not None
    assert invoke("budget", tmp_path / "none", "settle", folder / "run.privacy.json").exit_code == 1


def test_a_run_is_entered_in_its_own_budget_alone(path, tmp_path, plan):
    from anyorder.app import session

    made(path)
    with session.begin(tmp_path / "run", "run", plan, {}, path) as folder:
        release = ao.Release(plan, 2, checkpoint=folder / "checkpoint.pt")
        for _ in range(2):  # each session
            session.enter(folder, plan, release.save, release.certificate)
        assert len(ao.Budget(path).entries()) == 1
        moved = path.with_name("elsewhere")
        path.rename(moved)
        with pytest.raises(BudgetError, match="there is no budget file"):
            session.enter(folder, plan, release.save, release.certificate)
        path.with_name(".people.budget.mark").unlink()
        ao.Budget(path, 4.0, 1e-5)
        with pytest.raises(BudgetError, match="not the budget in which this run was entered"):
            session.enter(folder, plan, release.save, release.certificate)


def test_a_fit_is_entered_once_and_refused_before_it_writes(path, tmp_path):
    made(path)
    (tmp_path / "t.csv").write_text("age,job\n" + "30,yes\n70,no\n" * 20)
    (tmp_path / "bounds.json").write_text(json.dumps({"features": {"age": [0, 100]}, "target": ["no", "yes"]}))
    words = ["fit", "--csv", tmp_path / "t.csv", "--target", "job", "--bounds", tmp_path / "bounds.json"]
    words += ["--epsilon", 3, "--delta", 1e-5, "--batch-size", 10, "--mechanism", "tree", "--budget", path]
    folder = tmp_path / "run"
    outcome = invoke(*words, "--output", folder)
    assert outcome.exit_code == 0, outcome.output
    [held] = ao.Budget(path).entries()
    assert held.spend.plan == ao.Plan.load(folder / "plan.json").digest
    assert held.spend.run == json.loads((folder / "budget.json").read_text())["run"]
    assert invoke("fit", "--resume", folder).exit_code == 0
    assert len(ao.Budget(path).entries()) == 1
    outcome = invoke(*words, "--output", tmp_path / "other")
    assert outcome.exit_code == 1
    assert "refused" in outcome.stderr
    assert not (tmp_path / "other").exists()
    assert "leave out --budget" in invoke("fit", "--resume", folder, "--budget", path).stderr
    assert invoke("budget", path, "settle", folder / "run.privacy.json").exit_code == 0
    outcome = invoke("fit", "--resume", folder)
    assert outcome.exit_code == 1
    assert "its run is over" in outcome.stderr


def test_a_new_budget_says_which_filter_takes_searches(path, tmp_path):
    """In words of the shell, and where it can still be chosen; of one that was chosen there is nothing to say."""
    limit = ["limit", "--epsilon", 4, "--delta", 1e-5]
    said = invoke("budget", path, *limit).stdout
    assert "after a plain (Gaussian) plan, searches are refused" in said
    assert "--filter renyi" in said
    assert "filter" not in invoke("budget", path, *limit).stdout  # not new
    assert "refuses searches" in invoke("budget", tmp_path / "gaussian", *limit, "--filter", "gaussian").stdout
    for number, more in enumerate((["--filter", "renyi"], ["--planned"])):
        assert len(invoke("budget", tmp_path / str(number), *limit, *more).stdout.splitlines()) == 1
    shown = invoke("budget", tmp_path / "json", *limit, "--json").stdout
    assert json.loads(shown)["limit"] == 4


def test_a_refused_search_is_told_what_takes_it_in_the_shell_too(path):
    budget = ao.Budget(path, 8.0, 1e-5)
    budget.spend(Gaussian(0.1))
    with pytest.raises(BudgetError) as refused:
        budget.spend(SearchClaim(Geometric(10), Gaussian(0.3), 1e-5))
    words = str(refused.value)
    assert "no bound of epsilon with it" in words
    assert " inf " not in words
    assert "--filter renyi" in words
    assert "--planned" in words
    assert "must not run" in words


def test_a_run_that_was_made_is_not_told_that_it_must_not_run(path, plan, tmp_path):
    """It is too late: the limit is exceeded, entered or not. Before its first step it is not."""
    for steps in (plan.n, 0):
        ao.Certificate(plan, steps, f"{steps:032x}", "0" * 64, "0" * 64).save(tmp_path / f"{steps}.json")
    assert invoke("budget", path, "limit", "--epsilon", 2, "--delta", 1e-5).exit_code == 0
    outcome = invoke("budget", path, "spend", tmp_path / f"{plan.n}.json")
    assert outcome.exit_code == 1
    assert "this run was already made: the limit is exceeded" in outcome.stderr
    assert "must not run" not in outcome.stderr
    outcome = invoke("budget", path, "spend", tmp_path / "0.json")
    assert "already made" not in outcome.stderr
    assert "must not run" in outcome.stderr
    with pytest.raises(BudgetError, match="already made"):
        ao.Budget(path).check(ao.Certificate(plan, 1, "1" * 32, "0" * 64, "0" * 64))


# -- searches --------------------------------------------------------------------------------------------------------


def test_a_search_costs_what_its_law_says(path):
    claim = SearchClaim(Geometric(10), Gaussian(0.3), 1e-5)
    budget = ao.Budget(path, 8.0, 1e-5)
    left = budget.spend(claim, run="abc")
    assert left.rule == "renyi"
    assert left.spent <= claim.epsilon  # alone: its own
    assert budget.spend(claim, run="abc").entries == 1
    assert left.spent > Gaussian(0.3).epsilon(1e-5)
    left = budget.spend(Gaussian(0.2))
    assert claim.epsilon < left.spent < 8
    gaussian = ao.Budget(path.with_name("gaussian"), 8.0, 1e-5, filter="gaussian")
    with pytest.raises(BudgetError):
        gaussian.spend(claim)
    planned = ao.Budget(path.with_name("planned"), 8.0, 1e-5, adaptive=False)
    assert planned.spend(claim).spent == claim.epsilon
    assert claim.epsilon < planned.spend(Gaussian(0.2)).spent <= left.spent


def test_a_grid_is_the_composition_of_its_runs(path):
    from anyorder.budget import Fixed

    left = ao.Budget(path, 8.0, 1e-5).spend(SearchClaim(Fixed(9), Gaussian(0.3), 1e-5))
    assert left.spent == pytest.approx(Gaussian(0.9).epsilon(1e-5), rel=1e-9)


# -- exports ---------------------------------------------------------------------------------------------------------

REGISTRY = {
    "basic": {
        "name": str, "data_curators": list, "intended_use": str, "data_product_type": str, "data_product_region": str,
        "description": str, "publication_date": str, "data_product_sector": str,
    },
    "dp_variant": {"variant_name": str, "data_domain": str, "unprotected_quantities": str},
    "privacy_loss": {
        "privacy_unit": str, "privacy_unit_details": str, "privacy_parameters": dict, "privacy_parameters_details": str,
    },
    "deployment_model": {
        "model_name": str, "model_name_details": str, "actors": str, "release_type": str, "release_type_details": str,
        "data_source_type": str, "data_source_type_details": str, "access_type": str, "access_type_details": str,
    },
    "accounting": {"post_processing": str, "composition": str},
    "implementation": {"preprocessing_and_hyperparameter_tuning": str, "mechanisms": str, "justification": str},
    "administrative": {"sources": str, "notes": str, "registry_authors": list},
}  # fmt: skip
"""Section -> field -> type, of opendp/deployments-registry-data, schemas/deployments-schema.yaml, July 2026."""
REQUIRED = {"basic": set(REGISTRY["basic"]) - {"data_product_sector"}, "administrative": {"registry_authors"}}
WORDS = {
    "data_product_type": {
        "Summary statistics", "Machine learning model", "Dataset", "Synthetic data", "Interactive API", "SQL queries",
    },
    "variant_name": {"Pure DP", "Approximate DP", "Zero-concentrated DP", "Renyi DP", "Custom"},
    "model_name": {"Local", "Central", "Shuffle", "Federated", "Varies"},
    "release_type": {"One release", "Many releases"},
    "data_source_type": {"Static", "Dynamic"},
    "access_type": {"Interactive", "Non-interactive"},
}  # fmt: skip


@pytest.fixture
def several(path, plan):
    budget = ao.Budget(path, 8.0, 1e-5, filter="renyi")
    budget.spend(plan, "first")
    budget.spend(BoundedRange(0.01, 10), "rows")
    budget.spend(SearchClaim(Geometric(5), Gaussian(0.1), 1e-5))
    return budget


def test_the_registrys_fields_and_no_others(several):
    record = json.loads(export(several, "opendp"))
    assert record == opendp(several)
    assert record.keys() == {"url_slug", "status", "tier", "deployment"}
    assert (record["status"], record["tier"]) == ("Draft", 3)
    assert record["deployment"].keys() == REGISTRY.keys()
    for section, found in record["deployment"].items():
        assert found.keys() <= REGISTRY[section].keys()
        assert REQUIRED.get(section, set()) <= found.keys()
        for name, value in found.items():
            assert type(value) is REGISTRY[section][name], name
            assert name not in WORDS or value in WORDS[name]
    assert record["deployment"]["privacy_loss"]["privacy_parameters"] == {
        "epsilon": several.remaining().spent, "delta": 1e-5,
    }  # fmt: skip
    blank = record["deployment"]["administrative"]["notes"]
    for section, found in record["deployment"].items():
        for name, value in found.items():
            assert (f"{section}.{name}" in blank) or value not in ("", [""]), name


def test_the_guides_questions_are_answered_from_entries(several):
    answers = {one["question"]: one["answer"] for one in nist(several)["answers"]}
    assert len(answers) == len(nist(several)["answers"])
    assert answers["What is epsilon, for all releases together?"] == several.remaining().spent
    layers = {one["layer"] for one in nist(several)["answers"]}
    assert {"privacy parameters", "unit of privacy", "algorithms", "trust model", "data collection"} <= layers
    assert "1 of 3 entries are searches" in answers["Is tuning of settings counted?"]
    assert "one example" in answers["When are two data sets neighbours?"]
    assert answers["Who has access to the data, keys and records of participation?"] == ""


def test_an_empty_budget_exports(path):
    ao.Budget(path, 8.0, 1e-5)
    for form in ("opendp", "nist"):
        assert json.loads(export(ao.Budget(path), form))
    with pytest.raises(ArgumentError, match="format"):
        export(ao.Budget(path), "yaml")


def test_a_run_that_stopped_early_is_settled_with_the_evidence_beside_its_certificate(path, tmp_path):
    plan = ao.plan(order=MinSeparation(8, 2, 4), batch_size=1, epsilon=2, delta=1e-5, mechanism="independent")
    budget = ao.Budget(path, 4.0, 1e-5)
    budget.spend(plan, "a run", run="early")
    release = ao.Release(plan, 1)
    release.step(["a"], np.zeros(1, np.float32))
    release.certificate().save(tmp_path / "run.privacy.json")
    settle = ["budget", path, "settle", tmp_path / "run.privacy.json", "--run", "early"]
    assert "stopped early" in invoke(*settle).stderr
    (tmp_path / "secret").mkdir()
    release.evidence().save(tmp_path / "secret" / "run.evidence.json")
    assert invoke(*settle).exit_code == 0
    assert budget.entries()[0].settled.mu == pytest.approx(plan.mu / 2)  # once, of four times
