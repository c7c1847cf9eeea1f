"""Several orders at one budget: the table, the best, what each needs."""

import importlib
import json
import math

import pytest
from typer.testing import CliRunner

import anyorder as ao
from anyorder.app.cli import app
from anyorder.errors import ArgumentError, MissingDependencyError, PlanError
from anyorder.formatting import rounded_up
from anyorder.participation import (
    BallsInBins,
    CyclicPoisson,
    EpochShuffle,
    FixedOrder,
    KnownOrder,
    MinSeparation,
    MinSeparationSampling,
    PoissonSampling,
    RandomAllocation,
    SingleEpoch,
    TruncatedPoisson,
)
from anyorder.plan.comparison import ANY, OrderComparison
from plans import flat_plan

ASKED = {"dataset_size": 160, "batch_size": 40, "epochs": 2, "epsilon": 2.0, "delta": 1e-5}
QUICK = ("fixed", "shuffled", "poisson", "cyclic-poisson")  # of ANY, those whose claims take no seconds


@pytest.fixture(scope="module")
def compared() -> OrderComparison:
    return ao.compare(["shuffled", "fixed", "poisson", "balls_in_bins"], mechanism="independent", **ASKED)


def test_rows_are_plans_at_one_budget_least_error_first(compared: OrderComparison) -> None:
    assert {row.order for row in compared.rows} == {"shuffled", "fixed", "poisson", "balls-in-bins"}
    assert [row.error for row in compared.rows] == sorted(row.error for row in compared.rows)
    for row in compared.rows:
        assert row.error == row.plan.noise_error()
        assert 2.0 * (1 - 1e-2) <= row.plan.epsilon <= 2.0
        assert (row.plan.batch_size, row.plan.n) == (40, 8)
        assert (row.known_epsilon is not None) == row.needs.secrecy == row.plan.participation.secret
        assert row.known_epsilon is None or row.known_epsilon >= row.plan.epsilon
    assert compared.best == compared.rows[0].plan
    by_word = {row.order: row for row in compared.rows}
    assert by_word["poisson"].error < by_word["fixed"].error
    assert by_word["fixed"].plan == ao.plan(order="fixed", mechanism="independent", **ASKED)


def test_the_table_says_all_of_it(compared: OrderComparison) -> None:
    text = str(compared)
    for row in compared.rows:
        [line] = [line for line in text.splitlines() if line.startswith(row.order)]
        assert f"{row.error:.5g}" in line
        assert row.needs.access in line
        assert ("secret" in line) == row.needs.secrecy
        assert row.known_epsilon is None or rounded_up(row.known_epsilon, 3) in line
    assert "epsilon 2 at delta 1e-05, 8 steps of 40" in text
    assert json.loads(json.dumps(compared.to_dict()))["orders"][0]["order"] == compared.rows[0].order


def test_the_table_shows_itself(capsys: pytest.CaptureFixture[str]) -> None:
    once, again = (ao.compare(["shuffled", "fixed"], mechanism="independent", **ASKED) for _ in range(2))
    assert again.best == once.best
    assert capsys.readouterr().out == ""
    assert repr(again) == str(again) == str(once)


def test_any_says_which_orders_do_not_fit() -> None:
    asked = {**ASKED, "dataset_size": 40, "batch_size": 20, "neighbours": "replace-one", "mechanism": "independent"}
    found = ao.compare(**asked)
    left = {row.order for row in found.rows}
    assert {"shuffled", "fixed"} <= left
    assert {word for word, _ in found.refused} == set(ANY) - left
    reasons = dict(found.refused)
    assert "add-or-remove" in reasons["poisson"]
    assert "poisson: not planned: " in str(found)
    with pytest.raises(PlanError, match="add-or-remove"):
        ao.compare(["fixed", "poisson"], **asked)  # which was named


def test_without_the_accountant_the_others_are_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: object) -> float:
        raise MissingDependencyError("no dp-accounting")

    monkeypatch.setattr("anyorder.accounting.poisson.calibrate_poisson", missing)
    monkeypatch.setattr(importlib.import_module("anyorder.plan.comparison"), "ANY", QUICK)
    found = ao.compare(mechanism="independent", **ASKED)
    assert ("poisson", "no dp-accounting") in found.refused
    assert "fixed" in {row.order for row in found.rows}


def test_arguments_of_one_order_go_to_it_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.import_module("anyorder.plan.comparison"), "ANY", QUICK)
    asked = {**ASKED, "mechanism": "independent"}
    found = ao.compare(["fixed", ao.order("cyclic-poisson", cycle=2)], **asked)
    assert {row.plan.participation for row in found.rows} == {FixedOrder(8, 2, 4), CyclicPoisson(8, 2, 0.5)}
    whole = ao.compare(ao.order("any", cycle=2, drop_last=True), **{**asked, "dataset_size": 90})
    assert {row.plan.n for row in whole.rows} == {4}
    assert {row.plan.participation.cycle for row in whole.rows if row.order.startswith("cyclic")} == {2}


def test_the_cycle_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def guessed(epsilon: float, delta: float, q: float, steps: int) -> float:  # in place of one that takes seconds
        return 1 / math.sqrt(math.log1p((ao.accounting.gdp_mu(epsilon, delta) / q) ** 2 / steps))

    monkeypatch.setattr("anyorder.optimize.amplified.rough_poisson", guessed)
    monkeypatch.setattr("anyorder.accounting.poisson.calibrate_poisson", guessed)
    asked = {**ASKED, "dataset_size": 400}
    found = ao.plan(order="cyclic-poisson", **asked)
    assert isinstance(found.participation, CyclicPoisson)
    assert 1 < found.participation.cycle < 10
    given = [flat_plan(order="cyclic-poisson", cycle=cycle, **asked).noise_error() for cycle in (1, 10)]
    assert found.noise_error() < min(given)


@pytest.mark.slow
def test_a_secret_order_is_fitted_to_its_claim() -> None:
    asked = {**ASKED, "dataset_size": 80}
    found = ao.plan(order="balls-in-bins", **asked)
    known = ao.optimize.choose(found.workload, found.participation, epsilon=2.0, delta=1e-5)
    assert found.strategy == known[0].strategy
    named = ao.plan(order="balls-in-bins", mechanism="blt, 1 buffer", **asked)
    assert named.strategy == ao.optimize.fit(
        "blt", named.workload, named.participation, buffers=1, epsilon=2.0, delta=1e-5
    )


def test_what_is_refused() -> None:
    with pytest.raises(ArgumentError, match="at least one order"):
        ao.compare([], **ASKED)
    with pytest.raises(ArgumentError, match="order must be one of"):
        ao.compare(["fixed", "backwards"], **ASKED)
    with pytest.raises(ArgumentError, match="noise_multiplier must not be given to compare: write epsilon="):
        ao.compare(delta=1e-5, noise_multiplier=1.0, dataset_size=400, batch_size=40, epochs=2)
    with pytest.raises(ArgumentError, match="loader must not be given to compare"):
        ao.compare(loader=[], epochs=1, epsilon=1.0, delta=1e-5)
    with pytest.raises(ArgumentError, match="'any' alone"):
        ao.compare(["any", "fixed"], **ASKED)


def test_every_order_says_what_it_needs() -> None:
    public = [SingleEpoch(4), EpochShuffle(2, 2), FixedOrder(4, 2, 2), MinSeparation(4, 2), KnownOrder([[0], [0]])]
    secret = [
        PoissonSampling(4, 0.5), CyclicPoisson(4, 2, 0.5), TruncatedPoisson(4, 0.5, 2, 8), BallsInBins(2, 2),
        RandomAllocation(2, 2), MinSeparationSampling(4, 2, 0.5),
    ]  # fmt: skip
    for order in public + secret:
        assert order.needs.secrecy == order.secret
        assert ("stay secret" in str(order.needs)) == order.secret
    assert "at most 2" in secret[2].needs.batches


def test_the_command_line() -> None:
    sizes = ["--dataset-size", "400", "--batch-size", "40", "--epochs", "2", "--epsilon", "2"]
    shown = CliRunner().invoke(app, ["plan", *sizes, "--order", "fixed,shuffled", "--mechanism", "independent"])
    assert shown.exit_code == 0, shown.output
    for phrase in ("privacy card", "if known", "fixed", "shuffled", "one order"):
        assert phrase in shown.output
    told = CliRunner().invoke(
        app, ["plan", *sizes, "--order", "fixed, shuffled", "--mechanism", "independent", "--json"]
    )
    data = json.loads(told.stdout)
    assert {row["order"] for row in data["orders"]} == {"fixed", "shuffled"}
    assert data["orders"][0]["error"] <= data["orders"][1]["error"]
    wrong = CliRunner().invoke(app, ["plan", *sizes, "--order", "fixed,backwards"])
    assert wrong.exit_code == 2
