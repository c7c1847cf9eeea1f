"""Runs whose pictures nobody looks at draw none."""

import pytest

from anyorder.app import federation, job


@pytest.fixture(autouse=True)
def no_pictures(request, monkeypatch):
    """A run spends a third of its time on two pictures. What a module trains once, for all of its tests, has them; so
    has whatever is compared for what it tells of the data.
    """
    if request.path.name == "test_boundary.py":
        return
    for room in (job, federation):
        monkeypatch.setattr(room, "plot_accuracy", lambda shares, path, *words, **named: path.write_bytes(b""))
        monkeypatch.setattr(room, "plot_noise", lambda lines, path, *words, **named: path.write_bytes(b""))
