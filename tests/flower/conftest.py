"""A grid in this process has answered when it is asked: that the time is up is waited for by a clock that is moved."""

from types import SimpleNamespace

import pytest


@pytest.fixture(autouse=True)
def moved_clock(monkeypatch):
    now = [0.0]

    def sleep(seconds):
        now[0] += seconds

    clock = SimpleNamespace(monotonic=lambda: now[0], sleep=sleep)
    monkeypatch.setattr("anyorder.federated.flower.server.time", clock)
