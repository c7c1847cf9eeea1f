"""The checker of numbers: the guides as they are, and each kind of fault."""

import subprocess
import sys

import pytest
from benchmarks import again, numbers


def texts():
    return {file: (numbers.ROOT / file).read_text(encoding="utf-8") for file in numbers.FILES}


def test_each_number_of_the_guides_has_its_source():
    assert numbers.faults(texts(), numbers.entries()) == []


@pytest.mark.parametrize(("before", "after", "told"), [
    ("MNIST at epsilon 8, shuffled data: 98.3", "MNIST at epsilon 8, shuffled data: 98.4", "its source is of"),
    ("Python 3.11 or later.", "Python 3.11 or later. Digits at epsilon 8: `auto` 96.3.", "0 sources for 96.3"),
    ("| 4 | 8 % |", "| four | 8 % |", "no such line"),
])  # fmt: skip
def test_a_number_that_was_changed_or_added_is_found(before, after, told):
    changed = texts()
    assert before in changed["README.md"]
    changed["README.md"] = changed["README.md"].replace(before, after)
    assert any(told in fault for fault in numbers.faults(changed, numbers.entries()))


def test_a_source_with_other_numbers_is_stale(tmp_path, monkeypatch):
    monkeypatch.setattr(numbers, "ROOT", tmp_path)
    (tmp_path / "page.md").write_text("| trees | 96.16 ± 0.16 (lr 0.1) |\n")
    (tmp_path / "r.jsonl").write_text("{}\n")
    one = {"file": "a", "fragment": "b", "numbers": ["96.2"]}
    assert list(numbers.stale({**one, "page": "page.md", "row": "trees"})) == []
    assert "96.4 is not in the row" in next(
        numbers.stale({**one, "numbers": ["96.4"], "page": "page.md", "row": "trees"})
    )
    kept = {**one, "results": "r.jsonl", "digest": numbers.digest("r.jsonl")}
    assert list(numbers.stale(kept)) == []
    (tmp_path / "r.jsonl").write_text("{1}\n")
    assert "another file" in next(numbers.stale(kept))
    assert "needs one source" in next(numbers.stale(one))


def test_what_moved_is_told():
    assert again.moved([1.0, "a"], [1.0 + 1e-12, "a"]) is None
    assert again.moved({"x": [1.0]}, {"x": [1.1]}) == "x[0]: 1.0 -> 1.1"
    assert again.moved([1.0], [1.0, 2.0]) == "1 numbers -> 2"
    assert again.moved("a", "b") == "'a' -> 'b'"
    assert again.chosen(list(range(40)), 0.1, 3) == again.chosen(list(range(40)), 0.1, 3)
    assert len(again.chosen(list(range(40)), 0.1, 3)) == 4


def test_the_command_lists_what_it_would_run():
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.again", "--list", "--quick"], cwd=numbers.ROOT, capture_output=True,
        text=True, check=True,
    )  # fmt: skip
    assert "kairouz2021 thm4_1" in done.stdout
