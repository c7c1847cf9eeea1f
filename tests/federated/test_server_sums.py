"""Sums that others have made: one that no cut messages have is zero."""

import pytest
import torch

from anyorder.federated import server as module
from federated.servers import make, message, plan, same


@pytest.mark.parametrize("value", [1e39, 3e38, 1e308, 1e6, float("inf"), float("nan")])
@pytest.mark.parametrize("record", [(), ("record",)])
def test_a_sum_that_no_cut_messages_have_is_zero(value, record):
    given = plan(on_device=("clipping", *record))
    server, other = make(given), make(given)
    users = None if record else [1, 2]
    with server.open() as opened:
        huge = 1e9 if record and value == 1e6 else value  # nobody says how many there are
        opened.add_sum(users, torch.full((server.layout.size,), huge, dtype=torch.float64))
    with other.open() as opened:
        opened.add_sum(users, torch.zeros(server.layout.size))
    assert same(server, other)
    assert all(p.isfinite().all() for p in server.model.parameters())


def test_sums_that_cut_messages_have_are_added():
    given = plan(on_device=("clipping",))
    server, other = make(given), make(given)
    row = server.layout.flat(message(server, 1))
    with server.open() as opened:
        opened.add_sum([1, 2], 2 * row)
    with other.open() as opened:
        opened.add_rows([1, 2], torch.stack([row, row]))
    assert torch.allclose(server.model.one.weight, other.model.one.weight, atol=1e-6)


@pytest.mark.parametrize("block", [1, 20, 2**19])
def test_messages_that_wait_for_each_other_are_added_once(block, monkeypatch):
    """One by one and all at once make the same model, wherever the blocks end."""
    monkeypatch.setattr(module, "BLOCK", block)
    server, other = make(plan()), make(plan())
    users = [1, 2, 3, 4, 5]
    with server.open() as opened:
        for user in users:
            opened.add(user, message(server, user))
    with other.open() as opened:
        opened.add_rows(users, torch.stack([other.layout.flat(message(other, user)) for user in users]))
    assert torch.allclose(server.model.one.weight, other.model.one.weight, atol=1e-6)
