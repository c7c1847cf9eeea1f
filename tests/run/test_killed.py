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
