"""The faults of Flower's wrappers that docs/compared.md tells of are there, and the server here has none of them."""

import numpy as np
import pytest

pytest.importorskip("flwr")

from benchmarks.federations import flower_wrappers as measured

COUNTS = [910] + [10] * 9


@pytest.fixture(autouse=True)
def _task():
    from flwr.supercore.task_identity import TaskIdentity

    TaskIdentity.run_id = TaskIdentity.task_id = TaskIdentity.node_id = 1


def test_weights_by_counts_leave_a_ninth_of_the_noise():
    assert measured._sigma(measured.ours, 0, COUNTS) == pytest.approx(1.0, abs=0.03)
    assert measured._sigma(measured.fixed, 0, COUNTS) == pytest.approx(0.1 / 0.91, abs=0.01)


def test_a_mean_over_who_answered_leaves_a_tenth():
    assert measured._sigma(measured.ours, 9) == pytest.approx(1.0, abs=0.03)
    assert measured._sigma(measured.fixed, 9) == pytest.approx(0.1, abs=0.01)


def test_noise_of_the_new_norm_is_short_by_the_move_of_the_norm():
    sigma, norm = measured._adaptive(3)
    assert sigma == pytest.approx(np.exp(-0.1), abs=0.03)
    assert norm < 0.35


@pytest.mark.parametrize("update", [measured._zeros(), None, {"w": np.full(measured.SIZE, np.nan, np.float32)}])
def test_one_client_loses_their_rounds_and_none_of_ours(update):
    assert measured._lost(measured.fixed, [update]) == 10
    assert measured._lost(measured.ours, [update]) == 0


def test_counters_are_no_part_of_a_message():
    assert measured._counter(measured.fixed) == pytest.approx(1000, rel=1e-3)
    assert measured._counter(measured.ours) == 0


def test_the_server_cuts_what_a_client_did_not():
    assert measured._unclipped(measured.client_side) == pytest.approx(50, rel=1e-3)
    assert measured._unclipped(measured.ours) == pytest.approx(1, rel=1e-2)
