"""Every example runs as it stands."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

NEEDS = {
    "adapters.py": ("transformers", "accelerate", "datasets", "peft"),
    "sft.py": ("transformers", "accelerate", "datasets", "peft", "trl"),
}
EXAMPLES = sorted((Path(__file__).parents[1] / "examples").glob("*.py"))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_example_runs(path, tmp_path):
    needs = NEEDS.get(path.name, ())
    for package in needs:
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    if not needs:  # those packages warn of their own future
        environment["PYTHONWARNINGS"] = "error"
    done = subprocess.run(
        [sys.executable, path], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False, timeout=240
    )
    assert done.returncode == 0, done.stderr
    assert "epsilon" in done.stdout or "DP" in done.stdout
