"""Every example runs as it stands; one of them in a process from nothing, as users start it."""

import importlib.util
import os
import runpy
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch

import processes

NEEDS = {
    "adapters.py": ("transformers", "accelerate", "datasets", "peft"),
    "sft.py": ("transformers", "accelerate", "datasets", "peft", "trl"),
}
EXAMPLES = sorted((Path(__file__).parents[1] / "examples").glob("*.py"))


@pytest.mark.slow
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_example_runs(path, tmp_path, monkeypatch, capsys):
    if path.name in NEEDS:
        text = run_here(path, tmp_path, monkeypatch, capsys)
    else:
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        if path.name == "users.py":
            line = [sys.executable, "-W", "error", path]
            done = subprocess.run(line, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
        else:
            done = processes.run("-W", "error", path, cwd=tmp_path, env=environment)
        assert done.returncode == 0, done.stderr
        text = done.stdout
    assert "epsilon" in text or "DP" in text


def run_here(path, folder, monkeypatch, capsys):
    """What the example prints, in this process: other tests have loaded what takes it seconds to import."""
    for package in NEEDS[path.name]:
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    monkeypatch.chdir(folder)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(sys, "argv", [str(path)])
    with torch.random.fork_rng(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # those packages warn of their own future
        runpy.run_path(str(path), run_name="__main__")
    return capsys.readouterr().out
