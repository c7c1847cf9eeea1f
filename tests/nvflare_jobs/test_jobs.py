"""NVFlare's tasks become rounds of the server, and nothing else of them does."""

import dataclasses
import json
import logging

import pytest
import torch

pytest.importorskip("nvflare")

from nvflare.apis.dxo import DXO, DataKind, from_shareable
from nvflare.apis.event_type import EventType
from nvflare.apis.fl_constant import FLContextKey, ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import ReservedHeaderKey, Shareable, make_reply
from nvflare.app_common.app_constant import AppConstants

import anyorder as ao
from anyorder.errors import ArgumentError, PlanError, TrainingError
from anyorder.federated.nvflare import ClientFilter, PrivateController
from nvflare_jobs.in_process import Job, Site, change_of, network, plan, server, weights

FOUR = [f"site-{i}" for i in (1, 2, 3, 4)]


def run(folder, made, *sites, **options):
    return Job(folder, *(sites or map(Site, FOUR))).run(made, **options)


def reference(rounds, made=None, silent=()):
    """The same rounds without NVFlare; `silent` clients are in them with zeros."""
    own = made or server(plan(len(rounds)))
    for names in rounds:
        arrays = {name: p.detach() for name, p in own.model.named_parameters()}
        # In floats, what training ends with less what it began with is not the change to the last bit.
        messages = {name: change_of(name, arrays) for name in names}
        messages = {n: {p: arrays[p] + v - arrays[p] for p, v in m.items()} for n, m in messages.items()}
        own.round({name: None if name in silent else message for name, message in messages.items()})
    return weights(own.model)


TURNS = [FOUR[:2], FOUR[2:]] * 2


def who(own):
    return [sorted(str(user) for user in users) for users in own.release.ledger.history()]


@pytest.mark.parametrize("kind", [DataKind.WEIGHTS, DataKind.WEIGHT_DIFF])
def test_rounds_of_a_job_are_those_of_the_server(tmp_path, kind):
    own, sites = server(plan()), [Site(name) for name in FOUR]
    for site in sites:
        site.execute = lambda task, site=site: site.trained(task, kind)
    job = run(tmp_path, own, *sites)
    assert job.asked == who(own) == TURNS
    close = {"atol": 0.0, "rtol": 0.0} if kind == DataKind.WEIGHTS else {"atol": 2e-6}
    assert torch.allclose(weights(own.model), reference(TURNS), **close)
    assert own.model[1].num_batches_tracked == 0
    ao.verify(tmp_path / "run.privacy.json")
    shown = torch.load(tmp_path / "model.pt")
    assert set(shown) == {name for name, _ in own.model.named_parameters()}  # and no buffers
    assert torch.equal(torch.cat([value.reshape(-1) for value in shown.values()]), weights(own.model))


def test_what_a_client_is_told(tmp_path):
    job = run(tmp_path, server(plan()))
    assert [task.get_header(AppConstants.CURRENT_ROUND) for _, task in job.sent] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert {task.get_header(AppConstants.NUM_ROUNDS) for _, task in job.sent} == {4}
    assert {task.get_header("anyorder")["clip_norm"] for _, task in job.sent} == {1.0}
    assert {from_shareable(task).data_kind for _, task in job.sent} == {DataKind.WEIGHTS}


def test_where_the_norm_moves_clients_leave_room_above_it(tmp_path):
    own = server(plan(8), rule=ao.clipping.Adaptive(quantile=0.5))
    job = run(tmp_path, own)
    told = [task.get_header("anyorder")["clip_norm"] for _, task in job.sent]
    assert told[0] == 2.0
    assert len(set(told)) > 1


# -- what clients do to the round -------------------------------------------------------------------------------------


class Hostile(Shareable):
    """Raises when it is looked at."""

    def get_header(self, *args):
        raise RuntimeError("loss 0.125 of patient 17")


def raising(task):
    raise ValueError("loss 0.125 of patient 17")


def failed(result):
    result.set_return_code(ReturnCode.EXECUTION_EXCEPTION)
    return result


def with_data(change):
    """An answer of other data than the filter made."""

    def answer(result):
        data = {name: change(torch.as_tensor(value)) for name, value in from_shareable(result).data.items()}
        return DXO(DataKind.WEIGHT_DIFF, data).to_shareable()

    return answer


NO_MESSAGES = {
    "training raises": {"execute": raising},
    "training returns an error": {"execute": lambda task: make_reply(ReturnCode.EXECUTION_EXCEPTION)},
    "training returns metrics": {"execute": lambda task: DXO(DataKind.METRICS, {"loss": 0.125}).to_shareable()},
    "training returns nothing of use": {"execute": lambda task: Shareable()},
    "no answer": {"answer": lambda result: None},
    "an error": {"answer": lambda result: make_reply(ReturnCode.TASK_ABORTED)},
    "an error beside a change": {"answer": failed},
    "not even headers": {"answer": lambda result: Hostile()},
    "nothing in it": {"answer": lambda result: Shareable()},
    "no filter": {"filters": []},
    "all parameters": {"answer": lambda result: DXO(DataKind.WEIGHTS, from_shareable(result).data).to_shareable()},
    "NaN": {"answer": with_data(lambda value: value * float("nan"))},
    "integers": {"answer": with_data(lambda value: value.long())},
    "other shapes": {"answer": with_data(lambda value: value[None])},
}


@pytest.mark.parametrize("fault", NO_MESSAGES.values(), ids=NO_MESSAGES)
def test_what_is_no_message_is_zeros_and_its_client_was_there(fault, tmp_path):
    """Nor does it change who is asked: a client whose data break its training takes nobody's place."""
    own = server(plan())
    job = run(tmp_path, own, Site("site-1"), Site("site-2", **fault), Site("site-3"), Site("site-4"))
    assert job.asked == who(own) == TURNS
    assert torch.equal(weights(own.model), reference(TURNS, silent=("site-2",)))


def test_a_long_message_is_cut_though_the_client_does_not(tmp_path):
    own = server(plan(1))
    run(tmp_path, own, Site("site-1", answer=with_data(lambda value: 1e6 * value)), Site("site-2"))
    without = reference([["site-1", "site-2"]], silent=("site-1",))
    assert 0.999 < float((weights(own.model) - without).norm()) * 2 <= 1.0 + 1e-6


def test_an_answer_that_comes_twice_is_added_once(tmp_path):
    own = server(plan())
    job = Job(tmp_path, *map(Site, FOUR))
    once = job.broadcast_and_wait

    def twice(task, *args, **options):
        received = task.result_received_cb

        def again(client_task, fl_ctx):
            result = client_task.result
            for _ in range(2):
                client_task.result = result
                received(client_task=client_task, fl_ctx=fl_ctx)

        task.result_received_cb = again
        once(task, *args, **options)

    job.broadcast_and_wait = twice
    job.run(own)
    assert torch.equal(weights(own.model), reference(TURNS))


def test_a_round_does_not_end_early_for_clients_who_are_out_of_reach(tmp_path):
    """Else another's answer, which comes late, counts or not by how long one client trains."""
    from nvflare.apis.impl.wf_comm_server import WFCommServer

    name = "get_client_disconnect_time"  # asked by what ends rounds early
    assert name in WFCommServer._get_task_dead_clients.__code__.co_names
    job = run(tmp_path, server(plan(1)))
    assert getattr(job, name)("site-1") is None


# -- who is asked -----------------------------------------------------------------------------------------------------


def test_clients_whom_the_plan_does_not_allow_are_not_asked(tmp_path):
    own = server(plan(6, b=3, k=2))
    job = run(tmp_path, own, *map(Site, FOUR[:3]))
    assert job.asked == [["site-1", "site-2"], ["site-3"], ["site-1", "site-2"], ["site-3"]]
    assert who(own) == [["site-1", "site-2"], ["site-3"], [], ["site-1", "site-2"], ["site-3"], []]


def test_all_whom_a_larger_cohort_asks_are_in_the_round_and_the_divisor_stays(tmp_path):
    own = server(plan(1))
    job = run(tmp_path, own, cohort=3)
    assert job.asked == who(own) == [FOUR[:3]]
    assert torch.equal(weights(own.model), reference([FOUR[:3]], server(plan(1))))


def test_an_aborted_job_releases_nothing_of_the_round_and_goes_on_when_submitted_again(tmp_path):
    def made():
        return server(plan(), checkpoint=tmp_path / "run.checkpoint")

    folder = tmp_path / "job"
    folder.mkdir()
    first = Job(folder, *map(Site, FOUR), abort=3).run(made)
    assert len(first.asked) == 3
    assert not (folder / "run.privacy.json").exists()
    again = run(folder, made)
    assert again.asked == TURNS[2:]
    own = made()
    assert who(own) == TURNS
    assert torch.equal(weights(own.model), reference(TURNS))
    own.close()


def test_what_does_not_fit_is_refused_before_a_round(tmp_path):
    def refused(error, words, made, *sites, **options):
        job = Job(tmp_path, *sites)
        with pytest.raises(error, match=words):
            job.run(made, **options)
        assert job.asked == []

    sites = [Site(name) for name in FOUR]
    other = dataclasses.replace(plan(), neighbours="add-or-remove")
    refused(PlanError, "would ask somebody else", server(other), *sites)
    refused(PlanError, "plan without on_device", server(plan(on_device=("record",))), *sites)
    refused(ArgumentError, "cohort", server(plan()), *sites, cohort=1)
    refused(ArgumentError, "must make an anyorder.federated.Server, got Sequential", network, *sites)
    refused(TrainingError, "has no clients", server(plan()))
    inside = tmp_path / "app_server" / "custom"
    inside.mkdir(parents=True)
    refused(ArgumentError, "outside of the job", server(plan(), checkpoint=inside / "run.checkpoint"), *sites)
    for wrong in ("made_server", 7, None):
        with pytest.raises(ArgumentError, match="module:function"):
            PrivateController(wrong)


def test_the_server_is_found_by_its_name_in_a_configuration(tmp_path):
    from nvflare.job_config.fed_job_config import FedJobConfig

    controller = PrivateController(server="nvflare_jobs.in_process:made_server", cohort=3)
    config = FedJobConfig("job", 1)
    config.set_app_packages(["anyorder"])
    args = config._get_args(controller, str(tmp_path))
    assert json.loads(json.dumps(args)) == {"server": "nvflare_jobs.in_process:made_server", "cohort": 3}
    assert config._get_class_path(controller, str(tmp_path)) == "anyorder.federated.nvflare.PrivateController"
    assert list(tmp_path.iterdir()) == []
    job = Job(tmp_path, *map(Site, FOUR))
    job.run("nvflare_jobs.in_process:made_server", cohort=3)
    assert job.asked == [FOUR[:3]]


# -- what leaves a client ----------------------------------------------------------------------------------------------


def filtered(result, task=None, *, clip_norm=1.0):
    """What the filter sends in the place of a result."""
    if task is None:
        task = DXO(DataKind.WEIGHTS, {"w": torch.zeros(2, 3).numpy(), "b": torch.ones(3).numpy()}).to_shareable()
        task.set_header("anyorder", {"clip_norm": clip_norm})
    context, own = FLContext(), ClientFilter()
    context.set_prop(FLContextKey.TASK_DATA, task, private=True, sticky=False)
    own.handle_event(EventType.BEFORE_TASK_EXECUTION, context)
    context.set_prop(FLContextKey.TASK_DATA, None, private=True, sticky=False)
    assert context.get_all_public_props() == {}  # those travel to the server
    return own.process(result(task) if callable(result) else result, context)


def moved(size, **more):
    data = {"w": torch.zeros(2, 3) + size, "b": torch.ones(3) + size, **more}
    return DXO(DataKind.WEIGHTS, data, {"loss": 0.125}).to_shareable()


def norm(reply):
    parts = [torch.as_tensor(value).double().reshape(-1) for value in from_shareable(reply).data.values()]
    return float(torch.cat(parts).norm())


@pytest.mark.parametrize(("size", "expected"), [(0.0, 0.0), (0.1, 0.3), (5.0, 1.0), (float("nan"), 0.0), (1e30, 1.0)])
def test_one_clipped_change_leaves_the_client(size, expected):
    result = moved(size, steps=torch.tensor([7]))
    result.set_header("note", "a secret")
    reply = filtered(result)
    assert norm(reply) == pytest.approx(expected, rel=1e-5)
    assert norm(reply) <= 1.0
    assert set(reply) == {ReservedHeaderKey.HEADERS, "DXO"}
    assert reply[ReservedHeaderKey.HEADERS] == {ReservedHeaderKey.CONTENT_TYPE: "DXO"}
    assert set(from_shareable(reply).data) == {"w", "b"}
    assert from_shareable(reply).meta == {}


def test_a_training_that_writes_into_what_it_was_sent_is_seen_all_the_same():
    def in_place(task):
        data = from_shareable(task).data
        for value in data.values():
            value += 0.1
        return DXO(DataKind.WEIGHTS, data).to_shareable()

    assert norm(filtered(in_place)) == pytest.approx(0.3, rel=1e-5)


def test_a_training_that_fails_sends_what_one_that_changes_nothing_sends(caplog):
    idle = filtered(moved(0.0))
    wrong = DXO(DataKind.WEIGHTS, {"w": torch.zeros(3, 2), "b": torch.ones(3)}).to_shareable()
    with caplog.at_level(logging.ERROR, logger="anyorder.federated.nvflare"):
        for result in (make_reply(ReturnCode.EXECUTION_EXCEPTION), wrong, Shareable(), Hostile()):
            reply = filtered(result)
            assert repr(reply) == repr(idle)
    assert len(caplog.records) == 4


def test_other_tasks_are_not_answered():
    task = DXO(DataKind.WEIGHTS, {"w": torch.zeros(2).numpy()}).to_shareable()
    with pytest.raises(TrainingError, match="not from anyorder"):
        filtered(DXO(DataKind.METRICS, {"accuracy": 0.5}).to_shareable(), task)
    task.set_header("anyorder", {"clip_norm": float("inf")})
    with pytest.raises(ArgumentError, match="clip_norm"):
        filtered(moved(0.1), task)
