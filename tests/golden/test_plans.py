"""Plans are the same to the last digit on every processor; `python -m benchmarks.digests` compares all of them."""

import json

import pytest
from benchmarks.digests import GOLDEN, KERNELS, under

# One of each way to fit: the dense optimum made short, the same where columns are graded, bands of columns, epochs that
# start anew, and a secret order.
CHEAP = ("fixed 60", "fixed 60 cosine", "separated 40", "shuffled 240 cosine", "fixed 60, max")


@pytest.mark.parametrize("words", ["Haswell, 2 threads", "SkylakeX, 1 thread", "Nehalem, NumPy without vectors"])
def test_plans_are_those_of_another_processor(words):
    taken, found = under(KERNELS[words], list(CHEAP))
    if taken != [words.split(",")[0]]:
        pytest.skip(f"the library took {taken}")
    golden = json.loads(GOLDEN.read_text(encoding="utf-8"))
    assert {name: one[:2] for name, one in found.items()} == {name: golden[name] for name in CHEAP}
