"""Workers of loaders that a test leaves are waited for a moment, and not five seconds each."""

import pytest
from torch.utils.data import _utils


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch):
    monkeypatch.setattr(_utils, "MP_STATUS_CHECK_INTERVAL", 0.2)
