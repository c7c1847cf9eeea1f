"""The table of public scripts: every loader can be made and asked, and the page shows all of them."""

from pathlib import Path

import pytest

pytest.importorskip("opacus", reason="opacus is not installed")

from benchmarks.audits.scripts_data import SCRIPTS

import anyorder as ao

PAGE = (Path(__file__).parents[2] / "docs" / "check_scripts.md").read_text()
_, SECTION = PAGE.split("<!-- table -->")
SUMMARY, TABLE = SECTION.split("<!-- end of table -->")[0].split("| script |")
ROWS = [line for line in TABLE.splitlines()[2:] if line]


def test_there_are_thirty_and_the_page_has_them_all():
    assert len(SCRIPTS) == len(ROWS) >= 30
    assert len({(s.repository, s.path, s.pattern) for s in SCRIPTS}) == len(SCRIPTS)
    for script, row in zip(SCRIPTS, ROWS, strict=True):
        assert row.startswith(
            f"| {script.repository}, {script.path}{'' if script.is_private else ' *'} | {script.pattern}"
        )
    told = {"holds": "valid for {}.", "false": "false for {} ", "not proven": "not proven for {}."}
    for verdict, words in told.items():
        assert words.format(sum(row.endswith(f" {verdict} |") for row in ROWS)) in " ".join(SUMMARY.split())


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda s: f"{s.repository} {s.path} {s.pattern}")
def test_the_loader_is_of_the_scripts_size_and_its_verdict_that_of_the_page(script):
    if script.batches > 10**5:
        pytest.skip("hundred thousands of batches: made by the benchmark alone")
    loader = script.make(script.batches)
    sizes = {} if script.epochs else {"batch_size": 4}
    found = ao.check(
        loader, noise_multiplier=1.0, epochs=script.epochs and 1, steps=script.steps, accumulate=script.accumulate,
        delta=script.delta, accountant="rdp", **sizes,
    )  # fmt: skip
    if script.epochs:
        assert found.sampling_probability == pytest.approx(script.accumulate / script.batches, rel=2e-2)
    row = ROWS[SCRIPTS.index(script)]
    assert (found.batch_size is not None) or found.true == float("inf")
    assert row.endswith(" holds |") == (found.neighbours == "add-or-remove")
    assert ("| none" in row) == (found.true == float("inf"))
