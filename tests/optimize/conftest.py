"""No optimisation is read from, or left in, the user's cache."""

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def _no_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANYORDER_CACHE", "off")


@pytest.fixture
def fitted_once(_no_cache: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """For tests that ask for several budgets of one problem."""
    monkeypatch.setenv("ANYORDER_CACHE", str(tmp_path))
