"""Mistakes that other systems made, each planted here or in the audit of the server, and each found."""

import math

import numpy as np
import pytest
import torch

import anyorder.federated.server as rounds
from anyorder.audit.faults import patched
from anyorder.audit.faults.core import FAULTS
from anyorder.clipping import Adaptive
from anyorder.clipping.bounded import ClippedSum
from anyorder.clipping.norms import Cut
from anyorder.errors import AnyorderError, ParticipationError
from anyorder.federated import Layout, Server, clip_message
from anyorder.federated.server import Round
from anyorder.release.schedules import MovingNorm
from audit.front_ends import federated, federated_adaptive
from federated.servers import GOAL, Net, independent, make, message, messages, run, same

# -- by the audit: planted, and found, in tests/audit/test_faults.py ---------------------------------------------------

BY_AUDIT = {
    "weights by count": federated,
    "divided by who came": federated,
    "half the noise": federated,
    "noise of a step used again": federated,
    "separation off by one": federated,
    "one participation too many": federated,
    "zero update divides by zero": federated,
    "NaN passes min(1, C / norm)": federated,
    "second message of a user added": federated,
    "late message added to the next round": federated,
    "clip norm of the next step": federated_adaptive,
}


@pytest.mark.parametrize("name", BY_AUDIT)
def test_the_audit_of_the_server_plants_it(name):
    front_end = BY_AUDIT[name]
    assert name in {fault.name for fault in (*FAULTS, *front_end.faults)}
    assert name not in front_end.excuses


# -- here: what must hold, and a fault under which it does not ---------------------------------------------------------

NAN = {"one.bias": torch.full((4,), math.nan)}


def no_round_is_skipped_for_what_a_client_sent():
    server, other = make(), make()
    server.round({1: message(server, 1), 2: {**message(server, 2), **NAN}})
    other.round({1: message(other, 1), 2: {}})
    assert same(server, other)
    assert server.step == 1


def who_sent_nonsense_took_part():
    server = make()
    server.round({1: message(server, 1), 2: {**message(server, 2), **NAN}})
    assert not server.eligible([1, 2]).any()


def counters_and_buffers_are_not_noised():
    server = run(make())
    fresh = dict(Net().named_buffers())
    for name, value in server.model.named_buffers():
        assert torch.equal(value, fresh[name]), name


def counters_never_leave_a_client():
    change = {name: value - value for name, value in Net().state_dict().items()}
    assert "norm.num_batches_tracked" not in clip_message(change, 1.0)


def the_divisor_is_the_planned_one():
    quiet, one = make(independent()), make(independent())
    rows = []
    for server, sent in ((quiet, {}), (one, {1: message(one, 1, 9.0)})):
        server.release.on_release(lambda t, private: rows.append(private.double()))
        server.round(sent)
    assert float((rows[1] - rows[0]).norm()) == pytest.approx(1 / GOAL, rel=1e-5)


def weights_are_equal():
    """Whoever sends more, or says that it is of more examples: no longer than the norm."""
    servers = [make(independent()) for _ in range(2)]
    for server, size in zip(servers, (1.0, 910.0), strict=True):
        server.round({1: message(server, 1, size)})
    assert torch.allclose(servers[0].model.one.weight, servers[1].model.one.weight, atol=1e-6)


def a_zero_message_is_zeros():
    server, other = make(), make()
    server.round({1: message(server, 1, 0.0)})
    other.round({1: {}})
    assert same(server, other)


def a_second_message_is_refused():
    server, other = make(), make()
    other.round({1: message(other, 1)})
    with server.open() as opened:
        opened.add(1, message(server, 1))
        with pytest.raises(ParticipationError):
            opened.add(1, message(server, 2))
    assert same(server, other)


def the_order_of_arrival_leaves_no_bit():
    servers = [make(), make()]
    for t in range(4):
        sent = messages(servers[0], t)
        servers[0].round(sent)
        servers[1].round(dict(reversed(sent.items())))
    assert same(*servers)


def _raises(self, message):
    vector = self._vector(message)
    if vector is None:
        raise ValueError("the message of this client is not finite")
    return vector


def _leaves_out(self, user, message, real=Round.add):
    if self._layout.problem(message) is None:
        real(self, user, message)


def _noises_all(self, mean, real=Server._move):
    real(self, mean)
    for buffer in self.model.buffers():
        buffer += torch.ones_like(buffer)


def _divides_by_answers(self, users, total, *cut, real=Server._finish):
    real(self, users, total * (GOAL / max(len(users), 1)), *cut)


def _does_not_clip(self, squares, clip_norm, real=Cut.apply):
    factors, counts = real(self, squares, clip_norm)
    return {name: torch.ones_like(factor) for name, factor in factors.items()}, counts


def _to_the_norm_always(self, squares, clip_norm):
    norm = torch.stack(list(squares.values())).sum(0).sqrt()
    return dict.fromkeys(squares, clip_norm / norm), {}


def _lets_all_in(self, users, count=None):
    return set()


def _adds_floats(*arguments, **named):
    return ClippedSum(*arguments, **{**named, "any_order": False})


PLANTED = {
    no_round_is_skipped_for_what_a_client_sent: (Layout, "flat", _raises),
    who_sent_nonsense_took_part: (Round, "add", _leaves_out),
    counters_and_buffers_are_not_noised: (Server, "_move", _noises_all),
    the_divisor_is_the_planned_one: (Server, "_finish", _divides_by_answers),
    weights_are_equal: (Cut, "apply", _does_not_clip),
    a_zero_message_is_zeros: (Cut, "apply", _to_the_norm_always),
    a_second_message_is_refused: (Round, "_known", _lets_all_in),
    the_order_of_arrival_leaves_no_bit: (rounds, "ClippedSum", _adds_floats),
}


@pytest.mark.parametrize("holds", PLANTED, ids=lambda holds: holds.__name__)
def test_it_holds_and_would_not_under_the_fault(holds):
    holds()
    with (
        patched(*PLANTED[holds]),
        pytest.raises((AssertionError, pytest.fail.Exception, ValueError, AnyorderError)),
    ):
        holds()


def test_counters_never_leave_a_client():
    counters_never_leave_a_client()


def test_noise_of_the_new_clip_norm():
    """The norm that a round ends with is the next one's: neither its sums nor its noise are scaled by it."""

    def noise_of(server):
        rows = []
        server.release.on_release(lambda t, private: rows.append(private[: server.layout.size].double().numpy()))
        norms = []
        for _ in range(server.plan.n):
            norms.append(server.clip_norm)
            server.round({})
        return np.array(rows), np.array(norms)

    rule = Adaptive(quantile=0.9, learning_rate=3.0)

    def scaled():
        given = independent(64)
        rows, norms = noise_of(make(given, rule=rule))
        assert norms.max() / norms.min() > 100  # it moved
        expected = given.noise_std * norms / (GOAL * given.clip_norm * rule.gradient_share)
        return float(np.square(rows / expected[:, None]).mean())

    assert scaled() == pytest.approx(1.0, abs=0.15)
    real = MovingNorm.divisor.fget

    def next_one(self):
        return real(self) * 2.25

    with patched(MovingNorm, "divisor", property(next_one)):
        assert scaled() < 0.5
