"""Real models against the loop over examples, and the page that lists them."""

import functools

import pytest
import torch
from benchmarks.models import page
from benchmarks.models.case import EXAMPLES, Case, Outcome, outcome
from benchmarks.models.page import LIBRARIES, entry, of_library
from torch import nn

pytestmark = pytest.mark.filterwarnings("ignore")  # of the libraries, about small configurations

ROWS = page.PAGE.read_text().split(page.BEGIN)[1].split(page.END)[0].splitlines()
LISTED = [(result, name) for row in ROWS if row[:2] == "| " and "runs in" not in row
          for result, names in [row.strip("| ").split(" | ")] for name in names.split("; ")]  # fmt: skip
cases = functools.cache(of_library)  # when they are asked for: libraries are heavy to import
found = functools.cache(outcome)


@pytest.mark.parametrize("library", LIBRARIES)
def test_each_model_is_right_or_refused_with_the_change(library):
    for case in cases(library):
        result = found(case)
        right = case.refused in result.refusal if case.refused else result.right
        assert right, (case.name, case.given, result)
        assert entry(case, result) in LISTED, (case.name, case.given)


def test_the_page_lists_no_other_models():
    missing = [library for library in LIBRARIES if not cases(library)]
    if missing:
        pytest.skip(f"not installed: {', '.join(missing)}")
    assert len(LISTED) == sum(len(cases(library)) for library in LIBRARIES)


def linear(library="patterns", **options):
    return Case(library, "linear", lambda: (nn.Linear(4, 2), {"input": torch.randn(EXAMPLES, 4)}), **options)


@pytest.mark.parametrize(
    ("case", "result", "cell"),
    [
        (linear(), Outcome(0.0, 1, ""), "one pass"),
        (linear(), Outcome(0.0, 2, ""), "every gradient"),
        (linear(), Outcome(0.1, 1, ""), "**wrong**"),
        (linear(), Outcome(None, 0, "no"), "**refused**"),
        (linear(refused="GroupNorm"), Outcome(None, 0, "take GroupNorm"), "refused: `GroupNorm`"),
        (linear(refused="GroupNorm"), Outcome(0.0, 1, ""), "**wrong: not refused as said**"),
    ],
)
def test_what_is_wrong_is_shown_as_wrong(case, result, cell):
    assert entry(case, result) == (cell, "linear")


def test_a_wrong_sum_is_seen(monkeypatch):
    """An engine that forgets to cut."""
    from anyorder.clipping.per_example import GhostClipping

    forward = GhostClipping.forward
    assert outcome(linear()).right
    monkeypatch.setattr(GhostClipping, "forward", lambda self, *args, clip_norm, **options: forward(
        self, *args, clip_norm=10 * clip_norm, **options))  # fmt: skip
    assert not outcome(linear()).right
