"""Isolation, over every front end: with one unit replaced, sums of others are the same, and so is what is shown."""

import pytest

from anyorder.audit.isolation import check
from audit.front_ends import FRONT_ENDS
from audit.isolated import ISOLATED

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
NAMED = {name: case for room in ISOLATED.values() for name, case in room.items()}
OPTIONAL = {"Hugging Face": "transformers", "Lightning": "lightning", "anyorder": "typer"}


def test_every_room_that_carries_plans_out_is_here():
    assert set(FRONT_ENDS) <= set(ISOLATED)


@pytest.mark.parametrize("name", NAMED)
def test_one_unit_reaches_its_own_vector_and_nothing_else(name, monkeypatch):
    monkeypatch.setenv("ANYORDER_CACHE", "off")
    for beginning, package in OPTIONAL.items():
        if name.startswith(beginning):
            pytest.importorskip(package)
    case = NAMED[name]
    check(case.train, case.rows, **case.options).raise_if_found()
