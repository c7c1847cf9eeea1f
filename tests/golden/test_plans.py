"""Plans are the same to the last digit on every processor; `python -m benchmarks.digests` compares all of them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

GOLDEN = Path(__file__).with_name("plans.json")
# The dense optimum made short, of graded columns too; bands of columns; bands of epochs; buffers; the dense maximum.
CHEAP = [
    "fixed 60 cosine",
    "separated 40",
    "banded, 12 bands, shuffled 240",
    "blt, 2 buffers, shuffled 240",
    "fixed 60, max",
]


@pytest.mark.parametrize(
    ("words", "names"),
    [
        ("Haswell, 2 threads", CHEAP[1:4]),  # large enough for threads to share
        ("SkylakeX, 1 thread", [CHEAP[0], *CHEAP[2:]]),
        ("Nehalem, the library of C too", CHEAP),
    ],
    ids=lambda one: one if isinstance(one, str) else len(one),
)
def test_plans_are_those_of_another_processor(words, names):
    code = f"import json; from benchmarks.digests import *; print(json.dumps(under(KERNELS[{words!r}], {names})))"
    root = Path(__file__).parents[2]
    path = os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")])
    command, env = [sys.executable, "-c", code], os.environ | {"PYTHONPATH": path}
    done = subprocess.run(command, cwd=root, env=env, capture_output=True, check=False)
    if b"SIGILL" in done.stderr:  # in the process below it: a library took a kernel that this processor cannot run
        pytest.skip("the processor lacks instructions of the other")
    assert done.returncode == 0, done.stderr
    taken, found = json.loads(done.stdout)
    if taken != [words.split(",")[0]]:
        pytest.skip(f"the library took {taken}")
    golden = json.loads(GOLDEN.read_text(encoding="utf-8"))
    assert {name: one[:2] for name, one in found.items()} == {name: golden[name] for name in names}
