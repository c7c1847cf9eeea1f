"""The server: rounds of clipped messages, released by the plan, that move one model."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from anyorder import _check
from anyorder.certificate import Certificate, Evidence
from anyorder.clipping.clip_rules import Cut, Rule
from anyorder.errors import ArgumentError, CheckpointError, PlanError, TrainingError
from anyorder.federated.messages import Layout, Message
from anyorder.federated.pending import Pending, PendingRound
from anyorder.federated.rounds import Round, sum_of_nobody
from anyorder.ledger import Units, as_units
from anyorder.plan import Plan
from anyorder.release import Release
from anyorder.release.ranks import Alone, OneProcess
from anyorder.train.fitted import warn_of_unfitted
from anyorder.train.fsdp import is_sharded
from anyorder.train.held import Held

__all__ = ["Server"]

_SMALLEST, _LARGEST = 2.0**-60, 2.0**60  # clip norms with room around them in float32


class Server:
    """Federated averaging under a plan, one message a user and round [McMahan et al. 2018; Kairouz et al. 2021, 7].

    A user's message is its own change of the parameters, theta_after - theta_before. Round t releases

        m_t = ( sum over users of  message * min(1, clip_norm / ||message||)  +  noise_std * (K Z)[t] ) / report_goal

    and gives the optimizer -m_t for a gradient: SGD with lr 1 adds the mean; `ao.FTRL`, momentum and Adam are
    post-processing as well. The norm is over all shared parameters together; all weights are one; the divisor is the
    planned one, whoever answers.

    Guarantee: the sequence of models is (plan.epsilon, plan.delta)-DP for one user, the plan's `unit`, under its
    neighbours: all messages of one user, replaced by zeros, change what is seen by no more. Nothing that a user sends
    stops a round, skips it or tells: what is no message is the zero vector. A user who comes too early, too often or
    twice is refused before anything is added. No count of answers, loss or metric leaves the server.

    What is shared is what the optimizer holds. The model's other parameters, and all buffers, are never read by a
    release, nor changed: what clients keep (personal layers, counters of a normalisation) stays with them.

    With `checkpoint` every round is on the disk before `round` or `close` return. A server that was killed, at whatever
    point, goes on from there: a round whose messages were all in is made again, on the same sum and with the same
    noise; nothing is lost but a round that was still collecting. The files hold the noise key, and between two
    instants of a round its un-noised sum: keep them as safe as the data. The model is in them whole: so is what you put
    into its parameters that are not shared, or its buffers, of somebody's personal values.

    Args:
        plan: what to run. Its `unit` says who sends: "user", "owner".
        model: any module of floats, on any device.
        optimizer: over the parameters that are shared.
        report_goal: None, or `plan.batch_size`, which it is.
        checkpoint: file; where it exists the run goes on from it, with the same kinds of model and optimizer.
        key: 32 bytes for reproducible tests. In use, leave it out: a run whose key is known has no privacy.
        rule: how messages are cut: a rule of `ao.clipping`; `Flat()` if None. `Adaptive(..)` moves the norm where the
            noise restarts: tell clients `clip_norm` in each round.

    Attributes:
        plan, model: as given. The model is the one that the last round left.
        layout: the shared parameters, in the order of `Round.add_rows`.
        release: carries the plan out; `release.on_release` is for audits and logs.

    Raises: PlanError for another report goal, a plan with secret sampling or an unfit clip norm; ArgumentError for
        parameters that are no floats, or an optimizer of another model or run; CheckpointError.
    Warns: OptimizerWarning where the plan's noise is correlated and the optimizer is Adam, RMSprop or the like, or has
        another momentum than the plan.
    Cost: memory of two vectors in float64 while a round is open.

    Example:
        >>> plan = ao.plan(dataset_size=6, batch_size=2, epochs=1, epsilon=8, delta=1e-6, unit="user")
        >>> model = torch.nn.Linear(2, 1)
        >>> server = ao.federated.Server(plan, model, torch.optim.SGD(model.parameters(), lr=1.0))
        >>> change = {"weight": torch.ones(1, 2), "bias": torch.ones(1)}
        >>> server.round({"ann": change, "bob": change})
        >>> server.step
        1
    """

    def __init__(
        self,
        plan: Plan,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        report_goal: int | None = None,
        checkpoint: str | Path | None = None,
        key: bytes | None = None,
        rule: Rule | None = None,
    ) -> None:
        _check_plan(plan, report_goal)
        if not isinstance(model, nn.Module):
            raise ArgumentError(f"model must be a torch module, got {type(model).__name__}")
        warn_of_unfitted(plan, optimizer, stacklevel=2)
        self.plan, self.model, self._optimizer = plan, model, optimizer
        self._cut = Cut.of(rule)
        self._held = Held(model, optimizer)
        self._round: Round | None = None
        self._made: int | None = None  # the round that is being made; None between rounds
        self._unsaved = self._moving = False
        self._within: dict[str, object] = {}
        try:
            self.layout = _layout_of(self._held.named)
            wide = any(p.dtype == torch.float64 for p in self._held.named.values())
            self._dtype = torch.float64 if wide else torch.float32
            self._check_rule()
            size = self.layout.size + len(self._cut.counted)
            files = {"key": key, "checkpoint": checkpoint, "ledger_on_disk": checkpoint is not None}
            self.release = Release.of_ranks(plan, OneProcess(size), self._cut.schedule, place="Server", **files)
            try:
                self._begin(None if checkpoint is None else Path(checkpoint))
            except BaseException:
                self.release.close()
                raise
        except BaseException:
            self._held.thaw()
            raise
        self._held.bind()
        optimizer.register_step_pre_hook(self._only_here)

    def _check_rule(self) -> None:
        """A rule that does not fit the parameters is refused now, not in a round."""
        self._cut.apply({name: torch.zeros(1, dtype=torch.float64) for name in self.layout.shapes}, self.plan.clip_norm)

    def _begin(self, path: Path | None) -> None:
        """A new run, or the one of the checkpoint; and the round that it was killed in."""
        self._path = path
        self._pending = Pending(path, self.release.derived(b"pending").fingerprint())
        left = self._pending.read()
        state = self.release.resumed
        self.release.resumed = None
        if state is not None:
            self._restore(state)
        elif path is not None:
            self._save()  # from here on the key is on the disk, and with it what a round is made again by
        if left is None:
            return
        if left.step > self.step:
            raise CheckpointError(
                f"round {left.step} is in {path}.pending, and the checkpoint is at round {self.step}: it is older than "
                "the run's last one, and the rounds between would have to be made again; put the last one back"
            )
        if left.step == self.step:
            self._allowed(left.users)
            self._make(left)
        self._pending.remove()

    # -- rounds ------------------------------------------------------------------------------------------------------

    def round(self, messages: Mapping[Any, Message] | Iterable[Message]) -> None:
        """Make the next round of these messages.

        Args:
            messages: {user id: {parameter name: the client's change}}, whoever has answered, perhaps nobody. Where the
                plan leaves the record to the devices: the messages alone, in a list.
        Raises: ParticipationError if the plan does not let one of the users take part now, StepsExhaustedError after
            the last round; nothing changed. CheckpointError as `Round.close`.
        """
        if not isinstance(messages, Iterable):
            raise ArgumentError(f"messages must be a dict {{user: message}}, got {type(messages).__name__}")
        round = self.open()
        try:
            if isinstance(messages, Mapping):
                self.release.check(messages.keys())
                for user, message in messages.items():
                    round.add(user, message)
            else:
                for message in messages:
                    round.add(None, message)
            round.close()
        finally:
            if self._round is round:
                self._round = None  # where the files failed, what is in <checkpoint>.pending stays: a restart makes it

    def open(self) -> Round:
        """The next round, for messages as they come: see `Round`.

        Raises: StepsExhaustedError after the last round; TrainingError while another one is open.
        """
        with self._one_at_a_time():
            if self._round is not None:
                raise TrainingError(f"round {self.step} is open already: close() or discard() it first")
            self._check()
            total = sum_of_nobody(self.layout, self._dtype, self.release, self._cut)
            least = min(torch.finfo(p.dtype).max for p in self._held.named.values())
            end = self._finish, self._ended, self._one_at_a_time
            self._round = opened = Round(self.release, self.layout, total, *end, largest=least * self.plan.batch_size)
            return opened

    def eligible(self, users: Iterable[Any]) -> NDArray[np.bool_]:
        """(m,) bool: whom of the users the plan lets take part in the next round. Choose cohorts among them."""
        if not isinstance(users, Iterable):
            raise ArgumentError(f"users must be a list or an array of ids, got {type(users).__name__}")
        ids = as_units(users)
        if self.step >= self.plan.n:
            return np.zeros(len(ids), np.bool_)
        return self.release.ledger.allowed(self.step, ids)

    @contextmanager
    def _one_at_a_time(self) -> Iterator[None]:
        """Two rounds at one step would be two sums under one noise, or a sum cut at a norm that is not in force."""
        own = object()
        try:  # a dict's setdefault is one act, and leaves nothing behind that an interrupt could keep locked
            if self._within.setdefault("here", own) is not own:
                raise TrainingError(
                    "the server is being used already, by another thread or around this observer: one at a time"
                )
            yield
        finally:
            if self._within.get("here") is own:
                del self._within["here"]

    def _ended(self) -> None:
        self._round = None
        if self._pending.step == self.step and not self.release.may_have_committed:
            self._pending.remove()  # of a round that is given up after its close() had failed

    def _check(self) -> None:
        if self._made is not None and self._made != self.step:
            raise TrainingError(
                f"round {self._made} was broken off after its release: the model lacks it. Make a new server from the "
                "checkpoint, which finishes it"
            )
        if self._unsaved:
            self._save()
        self._held.check_optimizer()
        self.release.check(None)

    def _finish(self, users: Units, total: Tensor, step: int, clip_norm: float) -> None:
        """Release a round's sum, cut at clip_norm, and move the model; the round is on the disk before and after."""
        if (step, clip_norm) != (self.step, self.clip_norm):
            raise TrainingError(
                f"a sum of round {step}, cut at norm {clip_norm:g}, is none of round {self.step}, whose norm is "
                f"{self.clip_norm:g}: discard() it"
            )
        pending = PendingRound(
            self.step, self._allowed(users), total if self.plan.grid is not None else total.to(self._dtype)
        )
        if not self.release.repeats:  # else what its noise was used on is settled, by another one's messages perhaps
            self._pending.write(pending)
        self._make(pending)

    def _allowed(self, users: Units) -> Units:
        """The users, whom the plan lets make this round now, with an optimizer that moves what is released alone."""
        self._held.check_optimizer()
        return self.release.check(users)

    def _make(self, pending: PendingRound) -> None:
        self._made = pending.step
        (private,) = self.release.take(pending.users, [pending.total.clone()], "Server.round")
        self._move(private[: self.layout.size])
        for count in private[self.layout.size :]:
            self.release.clip.record(pending.step, float(count), Alone())
        self._made, self._unsaved = None, self._path is not None
        if self._unsaved:
            self._save()
        self.release.tell(pending.step, lambda: private)

    def _move(self, mean: Tensor) -> None:
        """One step of the optimizer, on minus the mean change."""
        changes = self.layout.named(mean)
        for name, p in self._held.named.items():
            p.grad = changes[name].neg().to(p.device, p.dtype)
        self._moving = True
        try:
            self._optimizer.step()
        finally:
            self._moving = False
        for p in self._held.named.values():
            p.grad = None

    def _only_here(self, *call: Any) -> None:
        if not self._moving:
            raise TrainingError("the optimizer belongs to a server, whose rounds are its steps: call round()")

    # -- what is shown and kept --------------------------------------------------------------------------------------

    @property
    def step(self) -> int:
        """The next round, 0 to n; n when all are made."""
        return self.release.steps_taken

    @property
    def clip_norm(self) -> float:
        """The norm at which messages are cut in the next round: for clients to know. It is public."""
        return self.release.clip_norm

    @property
    def extra(self) -> dict[str, Any]:
        """Plain values, arrays and tensors of your own, to be written into: each checkpoint has them."""
        return self.release.extra

    def certificate(self) -> Certificate:
        """The claim of this run, for everybody: `save` it, and check it with `anyorder verify`. It names nobody."""
        return self.release.certificate()

    def evidence(self) -> Evidence:
        """Who took part in which round: what backs the certificate. As secret as the data."""
        return self.release.evidence()

    def save(self) -> None:
        """Write the checkpoint. Every round does; call it after a change of `extra`, or when a round could not.

        Raises: CheckpointError, TrainingError where a round was broken off; the file of the last save is intact.
        """
        with self._one_at_a_time():
            self._save()

    def _save(self) -> None:
        if self._made is not None and self._made != self.step:
            self._check()
        own = {
            "model": self.model.state_dict(),
            "optimizer": self._optimizer.state_dict(),
            "kind": self._kind(),
        }
        self.release.save_all("Server.save()", {"server": own}, self.extra)
        if self._pending.step is not None and self._pending.step < self.step:
            self._pending.remove()
        self._unsaved = False

    def _kind(self) -> str:
        return f"{type(self._optimizer).__name__} of {dict(self.layout.shapes)}"

    def _restore(self, state: dict[str, Any]) -> None:
        own = state.get("server")
        if own is None:
            raise CheckpointError(f"{self._path} is the checkpoint of another front end; choose another file")
        if own["kind"] != self._kind():
            raise CheckpointError(
                f"{self._path} is of a server with other shared parameters or another kind of optimizer; resume with "
                "those of the run"
            )
        try:
            self.model.load_state_dict(own["model"])
            self._optimizer.load_state_dict(own["optimizer"])
        except (RuntimeError, ValueError) as problem:
            raise CheckpointError(f"{self._path} is of another model or optimizer: {problem}") from problem

    def close(self) -> None:
        """Let another process resume this run. The end of the process does the same."""
        if self._round is not None:
            self._round.discard()
        with self._one_at_a_time():
            self.release.close()


def _check_plan(plan: Plan, report_goal: int | None) -> None:
    if not isinstance(plan, Plan):
        raise ArgumentError(f"plan must be an anyorder Plan (see anyorder.plan), got {type(plan).__name__}")
    if report_goal is not None and _check.integer("report_goal", report_goal, low=1) != plan.batch_size:
        raise PlanError(
            f"report_goal is what sums are divided by, and the plan has batch_size={plan.batch_size} there, got "
            f"{report_goal}; plan with batch_size={report_goal}"
        )
    if plan.participation.secret:
        raise PlanError(
            "the plan is for secret sampling, whose batches are drawn by coins: users come as they can, and one who "
            "was drawn may not answer. Plan for MinSeparation(..) or another order of users"
        )
    if plan.selection is not None:
        raise PlanError(
            "the plan has a selection of rows: it needs a table, and a server's messages have every coordinate. Plan "
            "without selection="
        )
    if not _SMALLEST <= plan.clip_norm <= _LARGEST:
        raise PlanError(f"clip_norm must be from 2^-60 to 2^60 on a server, got {plan.clip_norm}")


def _layout_of(shared: Mapping[str, nn.Parameter]) -> Layout:
    if any(is_sharded(p) for p in shared.values()):
        raise ArgumentError("model must be whole in this process: a server takes no sharded parameters")
    return Layout.of(shared)
