"""The cases of public scripts: each module is well formed, its anchors are short, and edits do what they say."""

import re

import pytest
from benchmarks.scripts import BEGIN, PAGE, case, edited, edits, error_of, names, outcome, page

MOST = 60
"""Letters of an anchor: enough to find a line, too few to be a text of others."""


@pytest.mark.parametrize("name", names())
def test_a_case_is_well_formed(name):
    found = case(name)
    assert found.__doc__
    assert found.REPOSITORY.startswith("https://github.com/")
    assert re.fullmatch("[0-9a-f]{40}", found.COMMIT)
    assert found.SCRIPT.endswith(".py")
    assert found.MODEL == "untouched" or found.MODEL.startswith("changed: ")
    assert found.RESULT == "runs" or (found.RESULT == "refused" and found.WHY)
    assert all(isinstance(word, str) for word in found.ARGS)
    ways = ("ours",) if isinstance(found.OPACUS, str) else ("ours", "opacus")
    for way in ways:
        anchors = [edit[-2] for edit in edits(found, way)]
        assert anchors
        assert all(0 < len(anchor) <= MOST and "\n" not in anchor for anchor in anchors)


def test_a_line_is_replaced_or_followed_at_its_indentation():
    script = "def f():\n    x = 1\n    return x\n"
    assert edited(script, "x = 1", "...\nx += 1\n") == "def f():\n    x = 1\n    x += 1\n    return x\n"
    assert edited(script, "return", "if x:\n    return 2") == "def f():\n    x = 1\n    if x:\n        return 2\n"
    assert edited(script, "x = 1", "") == "def f():\n    return x\n"
    for anchor in ("y = 1", "x"):
        with pytest.raises(ValueError, match="must be in one line"):
            edited(script, anchor, "")


def test_a_run_without_a_private_step_does_not_count():
    """Else a script whose private lines are never reached would be told as private."""
    assert outcome({"steps": 8, "private_steps": 8}) == "runs"
    assert outcome({"steps": 8}) == outcome({"steps": 8, "private_steps": 0}) == "made no private step"
    assert outcome({"private_steps": 3, "error": "TrainingError: .."}) == "refused"


def test_the_table_has_ratios_and_counts():
    name = names()[0]
    sizes = {"steps": 4, "peak_mib": 100.0}
    rows = [
        {"script": name, "way": "plain", "step_seconds": 1.0, **sizes},
        {
            "script": name,
            "way": "ours",
            "step_seconds": 1.5,
            **sizes,
            "private_steps": 4,
            "isolation": {"loss": "proved"},
        },
        {"script": name, "way": "opacus", "error": "ValueError: no"},
    ]
    told, _, _, _, line = page(rows).splitlines()
    assert told.startswith("1 scripts: 1 run privately")
    assert "| proved | 1.5 | 1 | ValueError: no | - | - |" in line


def test_an_error_is_found_in_front_of_a_progress_bar():
    told = "ValueError: first\n\nanyorder.errors.ModelError: no rows\n  0%|          | 0/8 [00:00<?, ?it/s]\n"
    assert error_of(told) == "anyorder.errors.ModelError: no rows"
    assert error_of("killed\n") == "killed"
    assert error_of("") == "no message"


def test_the_readme_counts_as_the_page_does():
    told = PAGE.read_text().split(BEGIN)[1].split("|")[0]
    scripts, runs, untouched = re.match(r"\s*(\d+) scripts: (\d+) run privately, (\d+) of them", told).groups()
    readme = " ".join((PAGE.parents[1] / "README.md").read_text().split())
    assert f"[{scripts} public training scripts]" in readme
    assert f"{runs} run with it, {untouched} of them with the model untouched" in readme
