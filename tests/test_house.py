"""The house does not grow: trips through the files, and what the source weighs, are at most what they were."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
COMMAND = [sys.executable, "-W", "ignore", "-m", "benchmarks.house"]


@pytest.mark.slow
def test_no_figure_is_worse_than_the_one_that_is_kept():
    """Where one has to grow, benchmarks/house.json says so; `python -m benchmarks.house --lower` keeps what fell."""
    done = subprocess.run([*COMMAND, "--check"], cwd=ROOT, env=_env(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_ratchet_only_falls():
    code = """
from benchmarks.house import Figure, complaints, lowered
found = [Figure("files", 4, 2, ""), Figure("lines", 730, None, "", 250), Figure("comments", 4.6, None, "", 0.5, True)]
assert lowered(found, {}) == {"files": 4, "lines": 750, "comments": 4.5}
kept = {"files": 3, "lines": 1000, "comments": 5.0}
assert lowered(found, kept) == {"files": 3, "lines": 750, "comments": 5.0}
assert [line.partition(":")[0] for line in complaints(found, kept)] == ["files", "comments"]
assert complaints(found, {"files": 4, "lines": 730, "comments": 4.6}) == []
assert len(complaints(found, {"files": 4, "lines": 730, "switches": 1})) == 2
"""
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=_env(), check=True)


def test_trips_are_counted_by_hand(tmp_path):
    """b is entered from a twice, once of it by another function: four functions, three switches, two files."""
    (tmp_path / "a.py").write_text("import b\ndef go():\n    b.one()\n    own()\n    b.two()\ndef own(): pass\n")
    (tmp_path / "b.py").write_text("def one(): two()\ndef two(): pass\n")
    code = f"""
import sys; sys.path.insert(0, {str(tmp_path)!r})
from pathlib import Path
import a
from benchmarks.house import travelled
assert travelled(a.go, Path({str(tmp_path)!r})) == (2, 4, 3)
"""
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=_env(), check=True)


def test_what_is_kept_says_where_it_began():
    kept = json.loads((ROOT / "benchmarks/house.json").read_text())
    assert kept["before"].keys() == kept["most"].keys()


def _env():
    return {**os.environ, "OMP_NUM_THREADS": "1"}
