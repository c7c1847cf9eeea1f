"""The page of what goes with what is what the code does."""

import warnings
from pathlib import Path

import pytest
from benchmarks import compared, support, threats


@pytest.mark.slow
def test_the_page_has_the_tables_that_come_of_trying():
    refusals: list[str] = []
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="this loader shuffles examples")  # units by key: the page says yes
        found = support.text(refusals)
    written = support.PAGE.read_text().split(support.BEGIN)[1].split(support.END)[0]
    assert found.strip() == written.strip()
    rows = [line.strip("| ").split(" | ") for line in found.splitlines()]  # the first cell names all orders of a row
    assert len(refusals) == sum(len(orders.split(", ")) * cells.count("-") for orders, *cells in rows if cells)


def test_an_error_that_is_no_refusal_is_not_taken_for_one():
    with pytest.raises(ZeroDivisionError):
        support.tried(lambda: str(1 // 0), [], "a cell")


def test_the_picture_is_the_one_that_is_drawn():
    assert threats.PAGE.read_text() == "\n".join(threats.picture()) + "\n"
    assert {len(sees) for _, sees, _, _ in threats.PARTIES} == {len(threats.THINGS)}


def test_the_comparison_is_what_is_on_file_and_each_row_is_a_command():
    written = compared.PAGE.read_text().split(compared.BEGIN)[1].split(compared.END)[0]
    found = compared.kept()
    assert compared.page(found).strip() == written.strip()
    assert {str(one["command"]) for one in found} <= {part.command for part in compared.PARTS}
    for part in compared.PARTS:
        name, _, chosen = part.command.split()
        text = (Path(compared.__file__).parent / f"{name}.py").read_text()
        assert f'"{chosen}"' in text, part.command
