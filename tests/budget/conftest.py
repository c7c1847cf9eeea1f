"""What every search computes of its claim, once for the tests of a process that ask for the same."""

from functools import lru_cache

import pytest

from anyorder.budget import search, search_privacy

_epsilons = lru_cache(maxsize=None)(search_privacy.search_epsilon)
_prepared = {}


def _epsilon(law, curve, delta, *more):
    try:
        return _epsilons(law, curve, delta, *more)
    except TypeError:  # a curve that has no hash
        return search_privacy.search_epsilon(law, curve, delta, *more)


def _prepare(*asked, prepare=search.prepare):
    """By the text of its arguments, but for those of objects that show their place alone."""
    name = repr(asked)
    if " at 0x" in name:
        return prepare(*asked)
    if name not in _prepared:
        _prepared[name] = prepare(*asked)
    return _prepared[name]


@pytest.fixture(autouse=True)
def _computed_once(monkeypatch):
    monkeypatch.setattr("anyorder.budget.claim.search_epsilon", _epsilon)
    monkeypatch.setattr("anyorder.budget.search.prepare", _prepare)
