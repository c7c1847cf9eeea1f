"""Jobs are killed at calls on their files, from their first start on: two of `benchmarks.kills`, in its quick form."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("sklearn")

import anyorder as ao
from anyorder.app import session
from federated.test_kills import killed_at

pytestmark = pytest.mark.usefixtures("stopped_by_load")
ROOT = Path(__file__).parents[2]
# Each of the others is killed in tests of its own: in training, release, federated, wide_tables, budget, online.
JOBS = ("release",)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux" or shutil.which("cc") is None, reason="needs LD_PRELOAD and a C compiler")
def test_what_is_killed_and_started_again_releases_each_step_once():
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.kills", "--quick", "--json", *(f"--only={job}" for job in JOBS)],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT / "src")}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    found = {row["name"]: row["ours"] for row in map(json.loads, done.stdout.splitlines())}
    for job in JOBS:
        assert found[f"{job}: calls on files"] > 30
        assert found[f"{job}: of them killed"] >= 2
        assert found[f"{job}: releases of one step under one key, at most"] == 1
        assert found[f"{job}: faults"] == 0


def test_a_folder_whose_beginning_was_killed_is_begun_by_the_same_command(tmp_path):
    """Nothing was drawn yet: what was left of its files, by a kill before any call on them, is in nobody's way."""
    plan = ao.plan(dataset_size=6, batch_size=2, epochs=1, epsilon=8, delta=1e-5, mechanism="independent")
    ao.Budget(tmp_path / "people.budget", 100.0, 1e-4)

    def begin(place):
        with session.begin(place, "people", plan, {"settings": {}}, tmp_path / "people.budget"):
            pass

    killed = []
    while not killed or killed[-1]:
        place = tmp_path / str(len(killed))
        killed.append(killed_at(len(killed), lambda place=place: begin(place)))
        begin(place)
    assert len(killed) > 12


def test_a_folder_whose_checkpoint_is_lost_is_started_over_and_counts_both(tmp_path):
    """By the command: other noise, an entry of its own, and a certificate, a result and a report of both."""
    from typer.testing import CliRunner

    from anyorder.app import cli, job

    budget = ao.Budget(tmp_path / "people.budget", 100.0, 1e-5)
    settings = job.Settings.of("digits", epsilon=4.0, epochs=1, batch_size=400, mechanism="independent", model="linear")
    run = job.train(settings, tmp_path / "run", budget=budget.path)
    first = ao.Certificate.load(run.path / "run.privacy.json")
    (run.path / "secret" / "checkpoint.pt").unlink()
    with pytest.raises(ao.errors.CheckpointError, match="--start-over"):
        job.resume(run.path)
    done = CliRunner().invoke(cli.app, ["train", "--resume", str(run.path), "--start-over"])
    assert done.exit_code == 0, done.output
    again = ao.verify(run.path / "run.privacy.json", evidence=run.path / "secret" / "run.evidence.json").certificate
    assert again.earlier == ((first.key_fingerprint, first.steps),)
    assert again.epsilon == pytest.approx(ao.compose(run.plan, run.plan).epsilon(1e-5), rel=1e-9)
    assert {held.spend.run for held in budget.entries()} == {first.key_fingerprint, again.key_fingerprint}
    shown = ao.formatting.rounded_up(again.epsilon)
    assert f"epsilon <= {shown}" in done.output
    assert f"epsilon ≤ {shown}" in (run.path / "report.html").read_text(encoding="utf-8")
    assert CliRunner().invoke(cli.app, ["train", "--start-over"]).exit_code == 2
