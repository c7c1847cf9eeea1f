"""`anyorder verify --fresh`: a claim by samples is held against samples that nobody chose."""

import pytest

pytest.importorskip("typer")
pytest.importorskip("rich")

from typer.testing import CliRunner

import anyorder as ao
from anyorder.accounting.amplification.methods import MonteCarlo
from anyorder.accounting.amplification.monte_carlo import Interval
from anyorder.cli import app, verification


def plan_file(tmp_path, method):
    plan = ao.plan(
        dataset_size=40, batch_size=10, epochs=2, delta=1e-3, order="balls-in-bins", mechanism="independent",
        noise_multiplier=2.0, method=method,
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
        return Interval(plan.epsilon * 1.001, plan.epsilon * 1.2)

    monkeypatch.setattr(verification, "fresh_interval", above)
    refuted = CliRunner().invoke(app, ["verify", str(path), "--fresh", "--large"])
    assert refuted.exit_code == 1
    assert "chosen, or unlucky" in refuted.stderr


def test_a_claim_without_chance_has_no_fresh_samples(tmp_path):
    _, path = plan_file(tmp_path, None)
    assert CliRunner().invoke(app, ["verify", str(path)]).exit_code == 0
    refused = CliRunner().invoke(app, ["verify", str(path), "--fresh", "--large"])
    assert refused.exit_code == 1
    assert "no chance in it" in refused.stderr
