"""A job without a network: NVFlare's tasks, handed to clients' executors and filters by an engine in this process.

What a client and a communicator do with a task is written down here as NVFlare 2.9 does it (`ClientRunner._do_task`,
`WFCommServer`); `python -m benchmarks.federated --only nvflare` runs its own.
"""

from copy import deepcopy
from types import SimpleNamespace

import torch
from nvflare.apis.client import Client
from nvflare.apis.controller_spec import ClientTask
from nvflare.apis.dxo import DXO, DataKind, MetaKey, from_shareable
from nvflare.apis.event_type import EventType
from nvflare.apis.fl_constant import FLContextKey, ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import make_reply
from nvflare.apis.signal import Signal

import anyorder as ao
from anyorder.federated.nvflare import ClientFilter, PrivateController
from plans import flat_plan


def network():
    """Two shared layers with a normalisation between them, whose buffers stay where they are."""
    torch.manual_seed(0)
    layers = torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 2)
    return torch.nn.Sequential(*layers)


def server(plan, **options):
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    return ao.federated.Server(plan, model, optimizer, key=bytes(32), **options)


def plan(rounds=4, *, goal=2, b=1, k=None, **options):
    from anyorder.participation import MinSeparation

    options = {"delta": 1e-6, "sigma": 2.0, "clip_norm": 1.0, "mechanism": "independent", "unit": "owner"} | options
    return flat_plan(participation=MinSeparation(rounds, b=b, k=k or rounds), batch_size=goal, **options)


def made_server():
    return server(plan(1))


def change_of(name, arrays):
    """A change that only depends on the client: of norm 0.2 times its number."""
    number = int(name.rpartition("-")[2])
    generator = torch.Generator().manual_seed(number)
    change = {name: torch.randn(tuple(value.shape), generator=generator) for name, value in arrays.items()}
    norm = torch.cat([value.reshape(-1) for value in change.values()]).norm()
    return {name: value * (0.2 * number / norm) for name, value in change.items()}


class Site:
    """A client: its executor, its filters, and how it fails.

    Args:
        execute: (task) -> result, or an exception; None for the change of its name, as all parameters.
        answer: (result that would be sent) -> what is, or None for nothing.
    """

    def __init__(self, name, execute=None, *, answer=None, filters=None):
        self.name, self.answer = name, answer
        self.execute = execute or self.trained
        self.filters = [ClientFilter()] if filters is None else filters

    def trained(self, task, kind=DataKind.WEIGHTS):
        before = from_shareable(task).data
        change = {name: value.numpy() for name, value in change_of(self.name, before).items()}
        full = kind == DataKind.WEIGHTS
        after = {name: before[name] + value if full else value for name, value in change.items()}
        after["1.running_mean"] = torch.ones(3).numpy()
        result = DXO(kind, after, {MetaKey.NUM_STEPS_CURRENT_ROUND: 31, MetaKey.INITIAL_METRICS: {"loss": 0.125}})
        reply = result.to_shareable()
        reply.set_header("note", "a secret")
        return reply

    def __call__(self, task):
        context = FLContext()
        context.set_prop(FLContextKey.TASK_DATA, task, private=True, sticky=False)
        for one in self.filters:
            one.handle_event(EventType.BEFORE_TASK_EXECUTION, context)
        try:
            result = self.execute(task)
        except Exception:
            return make_reply(ReturnCode.EXECUTION_EXCEPTION)
        context.set_prop(FLContextKey.TASK_DATA, None, private=True, sticky=False)
        try:
            for one in self.filters:
                result = one.process(result, context)
        except Exception:
            return make_reply(ReturnCode.TASK_RESULT_FILTER_ERROR)
        return result if self.answer is None else self.answer(result)


class Job:
    """Runs a controller with sites; `sent` keeps (client, task) and `asked` who was asked in each round.

    Args:
        abort: the round in which the job is aborted, after its answers.
    """

    def __init__(self, folder, *sites, abort=None):
        self.sites = {site.name: site for site in sites}
        self.folder, self.abort, self.signal = folder, abort, Signal()
        self.asked, self.sent, self.answers = [], [], []

    def run(self, made, **options):
        controller = PrivateController(made if callable(made) or isinstance(made, str) else lambda: made, **options)
        controller.communicator = self
        clients = [Client(name, "") for name in self.sites]
        workspace = SimpleNamespace(get_run_dir=lambda job: str(self.folder))
        engine = SimpleNamespace(get_clients=lambda: clients, get_workspace=lambda: workspace)
        context = SimpleNamespace(get_engine=lambda: engine, get_job_id=lambda: "job")
        controller.start_controller(context)
        controller.control_flow(self.signal, context)
        controller.stop_controller(context)
        return self

    def broadcast_and_wait(self, task, fl_ctx, targets, min_responses, wait_time_after_min_received, abort_signal):
        assert min_responses == len(targets)
        assert task.timeout > 0
        self.asked.append(list(targets))
        for name in targets:
            copy = deepcopy(task.data)
            self.sent.append((name, copy))
            result = self.sites[name](deepcopy(copy))
            self.answers.append(result)
            if result is not None:
                given = ClientTask(Client(name, ""), task)
                given.result = result
                task.result_received_cb(client_task=given, fl_ctx=fl_ctx)
                assert given.result is None
        if self.abort == len(self.asked):
            abort_signal.trigger(True)


def weights(model):
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])
