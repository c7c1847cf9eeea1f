"""Random faults, a few of those that `python -m benchmarks.federated --only faults` makes."""

import pytest
from benchmarks.federations.faults import histories

from anyorder.audit.faults import patched
from anyorder.federated import Layout
from anyorder.federated.server import Pending


def test_random_faults_do_no_harm():
    counts = histories(40, seed=1)
    assert counts.total >= 40
    assert counts.faults["server killed"] > 0
    assert (counts.lost, counts.failed, counts.differ, counts.over, counts.too_low) == (0, 0, 0, 0, 0)


@pytest.mark.parametrize("seed", [1])
def test_they_find_a_server_without_its_defences(seed):
    with patched(Layout, "flat", lambda self, message: self._vector(message) + 0), pytest.raises(RuntimeError):
        histories(40, seed)
    with patched(Pending, "write", lambda self, pending: None), pytest.raises(RuntimeError):
        histories(200, seed)
