"""No optimisation is read from, or left in, the user's cache."""

import pytest


@pytest.fixture(autouse=True)
def _no_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANYORDER_CACHE", "off")
