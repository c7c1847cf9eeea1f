"""`anyorder verify --fresh`: a claim by samples is held against samples that nobody chose."""

import json

import pytest

pytest.importorskip("typer")
pytest.importorskip("rich")

from typer.testing import CliRunner

import anyorder as ao
from anyorder.accounting.amplification.monte_carlo import MonteCarlo, SampledInterval
from anyorder.app.cli import app, verification


def plan_file(tmp_path, method):
    plan = ao.plan(
        dataset_size=40, batch_size=10, epochs=2, delta=1e-3, order=ao.order("balls-in-bins", method=method),
        mechanism="independent", noise_multiplier=2.0,
    )  # fmt: skip
    plan.save(tmp_path / "plan.json")
    return plan, tmp_path / "plan.json"


def test_a_claim_by_samples_stands_up_to_others_and_one_below_them_does_not(tmp_path, monkeypatch):
    plan, path = plan_file(tmp_path, MonteCarlo(2000))
    held = CliRunner().invoke(app, ["verify", str(path), "--fresh", "--large"])
    assert held.exit_code == 0, held.output
    assert "fresh samples, which nobody chose" in held.stdout

    def above(curve, delta, salt):
        assert (curve, delta) == (plan.curve, plan.delta)
        return SampledInterval(plan.epsilon * 1.001, plan.epsilon * 1.2)

    monkeypatch.setattr(verification, "fresh_interval", above)
    refuted = CliRunner().invoke(app, ["verify", str(path), "--fresh", "--large"])
    assert refuted.exit_code == 1
    assert "chosen, or unlucky" in refuted.stderr


def test_nobody_can_foresee_the_fresh_samples(tmp_path, monkeypatch):
    _, path = plan_file(tmp_path, MonteCarlo(2000))
    salts = []
    monkeypatch.setattr(
        verification, "fresh_interval", lambda curve, delta, salt: salts.append(salt) or SampledInterval(0.1, 9.0)
    )
    for _ in range(4):
        assert CliRunner().invoke(app, ["verify", str(path), "--fresh", "--large"]).exit_code == 0
    assert len(set(salts)) == 4
    assert max(salts) > 2**48  # but for a chance of 2^-56


def test_what_luck_in_the_choice_of_samples_may_do_is_said_until_fresh_ones_are_drawn(tmp_path):
    _, path = plan_file(tmp_path, MonteCarlo(2000))
    told = {}
    for fresh in ([], ["--fresh"]):
        shown = CliRunner().invoke(app, ["verify", str(path), "--large", "--json", *fresh])
        told[bool(fresh)] = [text for text in json.loads(shown.stdout)["not_checked"] if "--fresh" in text]
    assert len(told[False]) == 1
    assert "more than 256 tries" in told[False][0]
    assert told[True] == []


def test_a_claim_without_chance_has_no_fresh_samples(tmp_path):
    _, path = plan_file(tmp_path, None)
    assert CliRunner().invoke(app, ["verify", str(path)]).exit_code == 0
    held = CliRunner().invoke(app, ["verify", str(path), "--fresh", "--large"])
    assert held.exit_code == 0  # it holds all the same
    assert "nothing to draw afresh" in held.stdout
    assert "fresh samples" not in held.stdout
