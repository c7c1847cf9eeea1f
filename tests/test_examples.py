"""Every example runs as it stands; one of them in a process from nothing, as users start it."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

import processes

NEEDS = {
    "adapters.py": ("transformers", "accelerate", "datasets", "peft"),
    "sft.py": ("transformers", "accelerate", "datasets", "peft", "trl"),
}
EXAMPLES = sorted((Path(__file__).parents[1] / "examples").glob("*.py"))


@pytest.mark.slow
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_example_runs(path, tmp_path):
    needs = NEEDS.get(path.name, ())
    for package in needs:
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    warnings = "default" if needs else "error"  # those packages warn of their own future
    if path.name == "loop.py":
        line = [sys.executable, "-W", warnings, path]
        done = subprocess.run(line, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    else:
        done = processes.run("-W", warnings, path, cwd=tmp_path, env=environment)
    assert done.returncode == 0, done.stderr
    assert "epsilon" in done.stdout or "DP" in done.stdout
