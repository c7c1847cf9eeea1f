"""The README's loop under a strict type checker."""

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_mypy_reads_the_loop_of_the_readme():
    """With the package, in `.ci/run`: a run for it alone would read all of torch again."""
    page = (ROOT / "README.md").read_text()
    before, shown = (re.findall(how + r"python\n(.*?)(?:```|-->)", page, re.DOTALL)[0] for how in ("block: ", "```"))
    block = before + shown
    assert "make_private" in block
    read = Path(__file__).with_name("typed_loop.py")
    assert block.replace("import torch\n", "from typing import assert_type\n\nimport torch\n", 1) in read.read_text()
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["mypy"]
    assert settings["strict"]
    assert str(read.relative_to(ROOT)) in settings["files"]
    assert "\nbeside types mypy\n" in (ROOT / ".ci/run").read_text()
