"""Every front end is killed at calls on its files, from its first start on: the quick form of `benchmarks.kills`."""

import json
import os
import shutil
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

pytest.importorskip("sklearn")

import anyorder as ao
from anyorder.app import session
from federated.test_kills import killed_at

ROOT = Path(__file__).parents[2]
JOBS = (  # train has the same folder as fit, and a life of it takes a second
    "release", "release-ledger-on-disk", "release-with-budget", "engine", "server", "lazy-table", "budget", "fit",
)  # fmt: skip


@pytest.mark.skipif(sys.platform != "linux" or shutil.which("cc") is None, reason="needs LD_PRELOAD and a C compiler")
def test_what_is_killed_and_started_again_releases_each_step_once():
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.kills", "--quick", "--json", *(f"--only={job}" for job in JOBS)],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT / "src")}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    found = defaultdict(dict)
    for line in done.stdout.splitlines():
        row = json.loads(line)
        job, _, what = row["name"].partition(": ")
        found[job][what] = row["ours"]
    assert found.keys() == set(JOBS)
    for job, counts in found.items():
        assert counts["calls on files"] > 30
        assert counts["of them killed"] >= 2
        assert counts["releases of one step, at most"] == (job != "budget")
        assert counts["faults"] == 0


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
