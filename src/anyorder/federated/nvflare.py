"""Federation over a network by NVFlare: a controller for the server's part of a job, and a filter for the clients'.

    job = FedJob("digits", min_clients=2)
    job.set_app_packages(["anyorder"])                                   # it is installed, not sent with the job
    job.to_server(PrivateController(server="training:make_server"))
    job.to_clients(ClientFilter(), tasks=["train"], filter_type=FilterType.TASK_RESULT)

The privacy unit is an NVFlare client, by the name that its certificate has. The noise is the server's. The page
docs/federated.md says what to leave out of a job.
"""

import logging
import math
import pkgutil
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from anyorder import checks
from anyorder.checks import final
from anyorder.errors import ArgumentError, ParticipationError, PlanError, TrainingError

checks.optional("nvflare", extra="nvflare", purpose=__name__)  # before its modules are imported

from nvflare.apis.dxo import DXO, DataKind, from_shareable  # noqa: E402
from nvflare.apis.event_type import EventType  # noqa: E402
from nvflare.apis.filter import Filter  # noqa: E402
from nvflare.apis.fl_constant import FLContextKey, ReturnCode  # noqa: E402
from nvflare.apis.impl.controller import Controller, Task  # noqa: E402
from nvflare.app_common.app_constant import AppConstants  # noqa: E402
from nvflare.security.logging import secure_format_traceback  # noqa: E402

from anyorder.federated.server import Server, clip_message  # noqa: E402

if TYPE_CHECKING:
    from nvflare.apis.fl_context import FLContext
    from nvflare.apis.shareable import Shareable
    from nvflare.apis.signal import Signal

__all__ = ["ClientFilter", "PrivateController"]

_TASK = AppConstants.TASK_TRAIN
_HEADER, _SENT = "anyorder", "anyorder_sent"  # of a task; of the client's context while it is trained on

_log = logging.getLogger(__name__)


@final
class PrivateController(Controller):  # type: ignore[misc]
    """Runs the rounds of a `Server` as an NVFlare workflow, in the place of FedAvg.

    Each round it sends the task "train" to clients that the plan allows, adds what their `ClientFilter` answers to
    `Server.open()`, and closes the round when all have answered, or the time is up. **Every client that is asked takes
    part.** A client that answers with an error, with what is no message, late or not at all counts as zeros, and the
    ledger has it. So neither what a client's data do to its training nor whether it lives changes who is asked next:
    that follows from the round's number, the names of the job's clients and the ledger. A round begins when all of the
    one before have answered, so **epsilon assumes that whether a client can answer in time does not depend on when its
    round begins**. The mean is over the plan's report goal. The controller reads no metric, loss or count of examples,
    and there is no evaluation on clients.

    After the last round `run.privacy.json` and `model.pt` are in the job's run folder, which NVFlare hands to anyone
    who downloads the job. The server's checkpoint, which holds the noise key and who took part, is refused there. A job
    that was aborted is submitted again, and goes on from the checkpoint. A round that was under way is asked for again:
    nothing of it was released.

    Args:
        server: makes the `Server`: a function without arguments, or "module:function", which is what a job's
            configuration can hold. The module lies in the job's custom folder, or is installed.
        cohort: how many clients are asked in a round; the plan's report goal if None, and never fewer.
        timeout: seconds that a round waits for answers: longer than any client's training takes, whatever its data.
    Raises: in the job, before its first round: PlanError for neighbours `add-or-remove`, because without one client a
        cohort of fixed size asks somebody else, and for plans that trust something to the devices; ArgumentError
        where `server` makes no Server, or one whose checkpoint is in the job's folder; TrainingError for a job without
        clients.
    Cost: memory of one message at a time.
    """

    def __init__(
        self, server: str | Callable[[], Server], *, cohort: int | None = None, timeout: float = 3600.0
    ) -> None:
        super().__init__()
        if not callable(server) and not (isinstance(server, str) and ":" in server):
            raise ArgumentError(f'server must be a function without arguments, or "module:function", got {server!r}')
        # By their arguments' names: NVFlare reads them back to write the job's configuration.
        self._server = server
        self._cohort = None if cohort is None else checks.integer("cohort", cohort, low=1)
        self._timeout = checks.positive("timeout", timeout)

    def start_controller(self, fl_ctx: "FLContext") -> None:
        """Nothing to do before the rounds."""

    def stop_controller(self, fl_ctx: "FLContext") -> None:
        """Nothing to do after the rounds."""

    def control_flow(self, abort_signal: "Signal", fl_ctx: "FLContext") -> None:
        """Take the rounds that are left, and write what may be shown."""
        server = self._made()
        # NVFlare would end a round early once all who are still awaited are out of reach a minute: then how long one
        # client trains decides whether another's answer counts.
        self.communicator.get_client_disconnect_time = lambda name: None
        try:
            folder = Path(fl_ctx.get_engine().get_workspace().get_run_dir(fl_ctx.get_job_id()))
            _check_place(server._path, folder)
            # Looked up once: whom NVFlare drops later, it drops for what its process did.
            clients = sorted(client.name for client in fl_ctx.get_engine().get_clients())
            if not clients:
                raise TrainingError("the job has no clients; nothing was released: start them, and submit it again")
            while server.step < server.plan.n and not abort_signal.triggered:
                self._round(server, clients, abort_signal, fl_ctx)
            if server.step == server.plan.n:
                server.certificate().save(folder / "run.privacy.json")
                torch.save(_shared(server), folder / "model.pt")
        finally:
            server.close()

    def process_result_of_unknown_task(self, *answer: Any) -> None:
        """An answer that comes after its round: it is left out."""

    def _made(self) -> Server:
        make = pkgutil.resolve_name(self._server) if isinstance(self._server, str) else self._server
        server = make()
        if type(server) is not Server:
            raise ArgumentError(f"server must make an anyorder.federated.Server, got {type(server).__name__}")
        try:
            if server.plan.neighbours == "add-or-remove":
                raise PlanError(
                    "a controller needs a plan whose neighbours are 'zero-out' or 'replace-one', got 'add-or-remove': "
                    "without one client a cohort of fixed size would ask somebody else"
                )
            if server.plan.on_device:
                raise PlanError(
                    f"the plan trusts {server.plan.on_device} to the devices, and a controller clips and records at "
                    "the server: plan without on_device"
                )
            if self._cohort is not None:
                checks.integer("cohort", self._cohort, low=server.plan.batch_size)
        except BaseException:
            server.close()
            raise
        return server

    def _round(self, server: Server, clients: list[str], abort_signal: "Signal", fl_ctx: "FLContext") -> None:
        asked = self._chosen(server, clients)
        with server.open() as opened:
            if asked:
                received = partial(_received, opened)
                task = Task(_TASK, _task_of(server), timeout=math.ceil(self._timeout), result_received_cb=received)
                self.broadcast_and_wait(task, fl_ctx, asked, min_responses=len(asked), abort_signal=abort_signal)
            if abort_signal.triggered:
                opened.discard()
                return
            for name in asked:
                with suppress(ParticipationError):  # it has answered
                    opened.add(name, None)

    def _chosen(self, server: Server, clients: list[str]) -> list[str]:
        """The next clients in turn, of those that the plan allows now: of public facts alone."""
        cohort = server.plan.batch_size if self._cohort is None else self._cohort
        first = server.step * cohort % len(clients)
        turn = clients[first:] + clients[:first]
        return [name for name, may in zip(turn, server.eligible(turn), strict=True) if may][:cohort]


def _check_place(checkpoint: Path | None, folder: Path) -> None:
    """Refuse a checkpoint among the files of a job: NVFlare hands them out, and each submission has others."""
    if checkpoint is not None and checkpoint.resolve().is_relative_to(folder.resolve()):
        raise ArgumentError(
            f"the checkpoint must lie outside of the job's folder, got {str(checkpoint)!r}: it holds the noise key, "
            "NVFlare hands that folder out with the job, and a job that is submitted again has another one"
        )


def _received(opened: Any, client_task: Any, fl_ctx: "FLContext") -> None:
    """Add an answer, of the client to which NVFlare gave the task."""
    result, client_task.result = client_task.result, None  # else NVFlare keeps it until the round's end
    with suppress(ParticipationError):
        opened.add(client_task.client.name, _message(result))


def _message(result: "Shareable") -> Any:
    """The change in an answer; None, which counts as zeros, where there is none that can be read."""
    try:
        if result.get_return_code() != ReturnCode.OK:
            return None
        dxo = from_shareable(result)
        return dxo.data if dxo.data_kind == DataKind.WEIGHT_DIFF else None
    except Exception:  # whatever a stranger's answer does when it is looked at, it is none, and stops nobody
        return None


def _task_of(server: Server) -> "Shareable":
    """The shared parameters, the round, and the norm at which the client clips."""
    arrays = {name: value.numpy() for name, value in _shared(server).items()}
    task = DXO(DataKind.WEIGHTS, arrays).to_shareable()
    task.set_header(AppConstants.CURRENT_ROUND, server.step)
    task.set_header(AppConstants.NUM_ROUNDS, server.plan.n)
    norm = float(server.clip_norm)
    # Where the norm follows the messages' norms, the server must see which are longer; it clips them itself.
    task.set_header(_HEADER, {"clip_norm": 2 * norm if server.release.norm_moves else norm})
    return task


def _shared(server: Server) -> dict[str, Tensor]:
    """Copies of the parameters that messages are about, as arrays can hold them."""
    parameters = dict(server.model.named_parameters())
    shared = {name: parameters[name].detach() for name in server.layout.shapes}
    wide = (torch.float32, torch.float64)
    return {
        name: value.to("cpu", value.dtype if value.dtype in wide else torch.float32, copy=True)
        for name, value in shared.items()
    }


@final
class ClientFilter(Filter):  # type: ignore[misc]
    """Filter of a client's results of the task "train": one clipped change leaves the client, and nothing else.

        change = what training returned - what the server sent,   or what it returned, where that is a difference
        message = change * min(1, clip_norm / ||change||)

    The training may be an `Executor` or a script of the Client API, which returns all parameters (FULL) or a
    difference (DIFF). Of that the filter reads the floats that the server sent. It drops metrics, counts of examples,
    buffers, headers and meta data. A training that returns an error, or what cannot be read, sends zeros. Where it
    raises, NVFlare answers with an error before any filter is called, and the server counts zeros. Another order of
    filters can undo this one: list it last.

    It answers to tasks of `PrivateController` alone. Epsilon does not rest on it: the server clips as well.

    Raises: TrainingError for the answer to another task, which NVFlare then does not send.
    """

    def handle_event(self, event_type: str, fl_ctx: "FLContext") -> None:
        """Keep what the server sent, which training may write into."""
        if event_type == EventType.BEFORE_TASK_EXECUTION:
            fl_ctx.set_prop(_SENT, None, private=True, sticky=False)
            sent = _sent(fl_ctx.get_prop(FLContextKey.TASK_DATA))
            fl_ctx.set_prop(_SENT, sent, private=True, sticky=False)

    def process(self, shareable: "Shareable", fl_ctx: "FLContext") -> "Shareable":
        """Return the message in place of the result."""
        sent = fl_ctx.get_prop(_SENT)
        if sent is None:
            raise TrainingError(
                "this task is not from anyorder.federated.nvflare.PrivateController, and its answer would get no "
                'noise: give ClientFilter the task "train" alone, and use that controller'
            )
        before, clip_norm = sent
        try:
            change = _change(shareable, before)
        except Exception:
            _log.error("training on this client failed; its message is zero. %s", secure_format_traceback())
            change = {name: torch.zeros_like(value) for name, value in before.items()}
        message = {name: value.numpy() for name, value in clip_message(change, clip_norm).items()}
        return DXO(DataKind.WEIGHT_DIFF, message).to_shareable()


def _sent(task: Any) -> tuple[dict[str, Tensor], float] | None:
    """What a task of `PrivateController` brings; None for another task."""
    told = task.get_header(_HEADER)
    if not isinstance(told, dict):
        return None
    clip_norm = checks.positive("clip_norm", told["clip_norm"])
    return {name: torch.as_tensor(value).clone() for name, value in from_shareable(task).data.items()}, clip_norm


def _change(result: "Shareable", before: dict[str, Tensor]) -> dict[str, Tensor]:
    """What training changed, by the names that the server sent. Raises: where the result does not tell."""
    code = result.get_return_code()
    if code != ReturnCode.OK:
        raise TrainingError(f"the executor answered with {code}")
    dxo = from_shareable(result)
    if dxo.data_kind not in (DataKind.WEIGHTS, DataKind.WEIGHT_DIFF):
        raise TrainingError(f"the executor must return weights or their difference, got {dxo.data_kind}")
    change = {}
    for name, value in before.items():
        after = torch.as_tensor(dxo.data[name]).detach().cpu()
        if after.shape != value.shape or not after.is_floating_point():
            raise TrainingError(f"the executor must return {name!r} in the shape {tuple(value.shape)} and in floats")
        after = after.to(value.dtype)
        change[name] = after if dxo.data_kind == DataKind.WEIGHT_DIFF else after - value
    return change
