"""Plans are the same to the last digit on every processor; `python -m benchmarks.digests` compares all of them."""

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest
from benchmarks import digests

GOLDEN = Path(__file__).with_name("plans.json")
# The dense optimum made short, of graded columns too; bands of columns; bands of epochs; buffers; the dense maximum.
CHEAP = [
    "fixed 60 cosine",
    "separated 40",
    "banded, 12 bands, shuffled 240",
    "blt, 2 buffers, shuffled 240",
    "fixed 60, max",
]


@pytest.mark.parametrize("words", ["Haswell, 2 threads", "SkylakeX, 1 thread", "Nehalem, the library of C too"])
def test_plans_are_those_of_another_processor(words):
    path = os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])
    try:
        taken, found = digests.under({**digests.KERNELS[words], "PYTHONPATH": path}, CHEAP)
    except subprocess.CalledProcessError as done:
        if done.returncode == -signal.SIGILL:  # a library took a kernel that this processor cannot run
            pytest.skip("the processor lacks instructions of the other")
        raise AssertionError(done.stderr) from None
    if taken != [words.split(",")[0]]:
        pytest.skip(f"the library took {taken}")
    golden = json.loads(GOLDEN.read_text(encoding="utf-8"))
    assert {name: one[:2] for name, one in found.items()} == {name: golden[name] for name in CHEAP}
