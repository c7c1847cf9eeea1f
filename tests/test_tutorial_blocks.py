"""The tests of pages see what they are to see: other words, other numbers, and the small sizes."""

import difflib
import re
from pathlib import Path

import pytest

import tutorial_blocks
from anyorder.app.charts import not_refuted
from tutorial_blocks import CONSOLE, MODE, PYTHON, SMALL, compare

DOCS = Path(__file__).parents[1] / "docs"
PAGES = sorted(
    page
    for page in DOCS.rglob("*.md")
    if "```console" in page.read_text() or any(match["shown"] for match in PYTHON.finditer(page.read_text()))
)


def test_small_sizes_take_the_place_of_full_ones(monkeypatch):
    monkeypatch.setattr(tutorial_blocks, "MODE", "small")
    assert tutorial_blocks.small("a = 1\nb = f(2)  # small: 3\n") == "a = 1\nb = 3\n"
    monkeypatch.setattr(tutorial_blocks, "MODE", "full")
    assert tutorial_blocks.small("b = 2  # small: 3\n") == "b = 2  # small: 3\n"


def test_other_words_are_found_at_every_size():
    for full in (False, True):
        assert compare("epsilon 8\n", "delta 8\n", None, full)
        assert compare("epsilon 8\n", "epsilon 8\n", None, full) == ""
        assert compare("right 0.9\n", "wrong 0.9\n", "by chance: 1", full)


def test_other_numbers_are_found_at_full_size():
    assert compare("mu 1.67\n", "mu 1.68\n", None, full=True)
    assert compare("mu 1.67\n", "mu 12\n", None, full=False) == ""
    assert compare("mu 1.67\n", "mu 12\n", "exact", full=False)
    assert compare("mu 1.67\n", "mu 1.67\n", "exact", full=False) == ""
    assert compare("right 0.90\n", "right 0.95\n", "by chance: 0.06", full=True) == ""
    assert compare("right 0.90\n", "right 0.95\n", "by chance: 0.04", full=True)


def test_an_audit_of_a_true_claim_may_have_bounds_above_it_but_is_not_refuted():
    verdicts = [f"  p-value 0.1\n  verdict  {not_refuted(above)}\n" for above in range(5)]
    refuted = verdicts[0].replace(
        not_refuted(0), "REFUTED: of true claims less than one in a million would look like this"
    )
    for full in (False, True):
        for printed in verdicts:
            assert compare(verdicts[0], printed, "by chance: 1, true claim", full) == ""
        assert compare(verdicts[0], verdicts[1], "by chance: 1", full)
        assert compare(verdicts[0], refuted, "by chance: 1, true claim", full)


def test_a_block_of_full_size_is_not_compared_at_small_size():
    assert compare("a tree\n", "a band\n", "full size", full=False) == ""
    assert compare("a tree\n", "a band\n", "full size", full=True)
    assert compare("a 1\na 2\n", "a 1\n", "full size, by chance: 1", full=False) == ""
    assert compare("a 1\n", "a 3\n", "full size, by chance: 1", full=True)
    assert compare("a\n", "a\n", "somehow", full=True)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_output_and_every_command_of_a_page_is_compared(page):
    text = page.read_text()
    shown = [match for match in PYTHON.finditer(text) if match["shown"] is not None]
    assert len(shown) == len(re.findall(r"^```text$", text, re.MULTILINE)), "a ```text fence stands behind no block"
    assert len(list(CONSOLE.finditer(text))) == len(re.findall(r"^```console", text, re.MULTILINE))
    assert set(re.findall(r"^```(\S*)", text, re.MULTILINE)) <= {"", "python", "text", "console", "diff", "json"}
    assert len(SMALL.findall(text)) == text.count("# small:") - text.count("`# small:")
    assert MODE in ("small", "full", "write")


def test_the_difference_of_the_two_scripts_is_the_one_that_is_shown():
    text = (DOCS / "opacus.md").read_text()
    before, after = (
        re.search(rf'^```python title="{name}.py"\n(.*?)^```$', text, re.MULTILINE | re.DOTALL)[1].splitlines()
        for name in ("before", "after")
    )
    lines = list(difflib.unified_diff(before, after, "before.py", "after.py", n=0, lineterm=""))
    shown = re.search(r"^```diff\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)[1].splitlines()
    assert shown == [line for line in lines if not line.startswith("@@")]
