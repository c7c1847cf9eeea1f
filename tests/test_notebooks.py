"""The notebooks of the guides: every cell runs, in its order, and what a cell ends with can be shown."""

import ast
import json
from pathlib import Path

import pytest

from report.pages import read

NOTEBOOKS = sorted((Path(__file__).parents[1] / "docs" / "notebooks").glob("*.ipynb"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_every_cell_runs(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    book = json.loads(path.read_text(encoding="utf-8"))
    assert (book["nbformat"], book["nbformat_minor"]) == (4, 5)
    assert len({cell["id"] for cell in book["cells"]}) == len(book["cells"])
    namespace, shown = {"__name__": "__main__"}, 0
    for cell in book["cells"]:
        if cell["cell_type"] != "code":
            continue
        assert cell["outputs"] == [], "outputs of another run are not kept"
        assert cell["execution_count"] is None
        tree = ast.parse("".join(cell["source"]), path.name)
        last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, path.name, "exec"), namespace)
        if last is None:
            continue
        value = eval(compile(ast.Expression(last.value), path.name, "eval"), namespace)
        if hasattr(value, "_repr_html_"):
            read(f"<!DOCTYPE html><html><body>{value._repr_html_()}</body></html><!-- default-src 'none' -->")
            shown += 1
        elif hasattr(value, "_repr_png_"):
            assert value._repr_png_().startswith(b"\x89PNG")
            shown += 1
        else:
            assert " object at 0x" not in repr(value)
    assert shown >= 4


def test_there_are_notebooks():
    assert len(NOTEBOOKS) == 2
