"""Isolation, over every front end: with one unit replaced, sums of others are the same, and so is what is shown."""

import contextlib

import pytest

from anyorder.audit.faults import patched
from anyorder.audit.isolation import check
from anyorder.federated.server import Round
from audit.front_ends import FRONT_ENDS
from audit.isolated import ISOLATED

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
NAMED = {name: case for room in ISOLATED.values() for name, case in room.items()}
OPTIONAL = {
    "Hugging Face": "transformers", "Lightning": "lightning", "anyorder": "typer", "Flower": "flwr",
    "NVFlare": "nvflare",
}  # fmt: skip


def test_every_room_that_carries_plans_out_is_here():
    assert set(FRONT_ENDS) <= set(ISOLATED)


@pytest.mark.parametrize("name", NAMED)
def test_one_unit_reaches_its_own_vector_and_nothing_else(name, monkeypatch):
    monkeypatch.setenv("ANYORDER_CACHE", "off")
    for beginning, package in OPTIONAL.items():
        if name.startswith(beginning):
            pytest.importorskip(package)
    case = NAMED[name]
    check(case.train, case.rows, **case.options).raise_if_found()


def silent(device, reply, message):
    """A device whose training failed does not answer."""
    device._call_next(message, device._context)
    return reply


def talkative(device, reply, message):
    """A device says how many examples it has, and their loss."""
    with contextlib.suppress(Exception, SystemExit):
        reply.content["metrics"] = device._call_next(message, device._context).content["metrics"]
    return reply


@pytest.mark.parametrize(("answer", "kinds"), [(silent, {"units", "result", "error"}), (talkative, {"result"})])
def test_a_device_that_tells_more_is_found(answer, kinds):
    client = pytest.importorskip("anyorder.federated.flower.client")
    plain, case = client._Device.plain, NAMED["Flower client"]

    def wrong(self, message, instruction):
        return answer(self, plain(self, message, instruction), message)

    with patched(client._Device, "plain", wrong):
        assert check(case.train, case.rows, **case.options).kinds == kinds


def test_a_job_that_leaves_out_a_client_whose_training_fails_is_found():
    pytest.importorskip("nvflare")
    add, case = Round.add, NAMED["NVFlare client"]

    def wrong(self, user, message):
        if message is not None:
            add(self, user, message)

    with patched(Round, "add", wrong):
        assert check(case.train, case.rows, **case.options).kinds == {"file", "units"}
