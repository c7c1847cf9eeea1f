"""A federation in one place: the server of a deployment, and clients that are computed."""

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from anyorder import checks
from anyorder.errors import ArgumentError, PlanError, TrainingError
from anyorder.federated.clients import LocalTraining
from anyorder.federated.cohorts import Availability, UniformAvailability, choose_cohort, cohort_size
from anyorder.federated.server import Layout, Server
from anyorder.ledger import distinct
from anyorder.noise import NoiseSource

# ----------------------------------------------------------------------------------------------------
# Several processes of one simulation: the first has the server, the others make clients' changes for it.


Examples = tuple[Tensor, Tensor]
Users = Mapping[Any, Examples] | Sequence[Examples]

Block = tuple[list[int], list[int]]
"""Places of users, and the seeds of their local training."""


def assist(model: nn.Module, users: Users, training: LocalTraining) -> None:
    """Make clients' changes for the `simulate` of the first rank, until that ends; for all ranks but the first.

    Args:
        model: of the same kind as the server's; its parameters and buffers are overwritten by the server's.
        users, training: the same as on the first rank.
    Raises: TrainingError if another process fails or ends; ArgumentError on the first rank, or without a group.
    """
    if not dist.is_initialized() or dist.get_rank() == 0:
        raise ArgumentError(
            "assist() is for the ranks after the first of a torch.distributed group; simulate() is on it"
        )
    examples = by_place(users)
    names: list[str] = _heard(None)
    parameters = dict(model.named_parameters())
    layout = Layout.of({name: parameters[name] for name in names})
    dtype = _dtype(model, layout)
    with torch.no_grad():
        for tensor in _state(model):
            _share(tensor)
    while (blocks := _heard(None)) is not None:
        with torch.no_grad():
            for name in names:
                _share(parameters[name])
        problem: Exception | None = None
        sent: list[tuple[Any, Tensor]] = []  # a tensor lives until it is sent
        for block in blocks[dist.get_rank() :: dist.get_world_size()]:
            rows = torch.zeros(len(block[0]), layout.size, dtype=dtype)
            if problem is None:
                try:
                    rows = training.changes(model, layout, [examples[i] for i in block[0]], block[1])
                except Exception as caught:
                    problem = caught
            rows = rows.to("cpu", dtype).contiguous()
            sent.append((_talk(dist.isend, rows, 0), rows))
        for work, _ in sent:
            _talk(work.wait)
        _agree(problem)


class Team:
    """The first rank's side: it makes its share of the changes, and gathers the others' in a fixed order.

    Without a process group, or alone in one, it makes them all. The blocks are the same for any number of processes,
    and so are the bits.
    """

    def __init__(self, model: nn.Module, layout: Layout, users: Users, training: LocalTraining) -> None:
        self._model, self._layout, self._training = model, layout, training
        self._examples = by_place(users)
        self._dtype = _dtype(model, layout)
        self._ranks = dist.get_world_size() if dist.is_initialized() else 1
        self._listening = self._ranks > 1  # the others, between two rounds
        if self._ranks > 1:
            if dist.get_rank() != 0:
                raise ArgumentError(
                    f"the server is on the first rank, this is rank {dist.get_rank()}: call assist() on it"
                )
            _heard(list(layout.shapes))
            for tensor in _state(model):
                _share(tensor.detach())

    def make(self, blocks: list[Block], add: Callable[[list[int], Tensor], object]) -> None:
        """Hand the changes (m, size) of each block to `add`, in order. What fails on any rank fails here."""
        if self._ranks > 1:
            self._listening = False  # until the round is over: what fails in it ends the others as well
            _heard(blocks)
            parameters = dict(self._model.named_parameters())
            for name in self._layout.shapes:
                _share(parameters[name].detach())
        problem: Exception | None = None
        for i, (places, seeds) in enumerate(blocks):
            other = i % self._ranks
            if other:
                rows = torch.empty(len(places), self._layout.size, dtype=self._dtype)
                _talk(dist.recv, rows, other)
            if problem is None:
                try:
                    if not other:
                        rows = self._training.changes(
                            self._model, self._layout, [self._examples[place] for place in places], seeds
                        )
                    add(places, rows)
                except Exception as caught:  # told to all, and raised, once the others have sent theirs
                    problem = caught
        if self._ranks > 1:
            _agree(problem)
            self._listening = True
        elif problem is not None:
            raise problem

    def end(self) -> None:
        """Let the others go, if they are there."""
        if self._listening:
            _heard(None)


def by_place(users: Users) -> list[Examples]:
    """The users' examples in the order in which they were given."""
    return list(users.values()) if isinstance(users, Mapping) else list(users)


def _dtype(model: nn.Module, layout: Layout) -> torch.dtype:
    """That of changes on their way: float64 where some shared parameter has it."""
    own = dict(model.named_parameters())
    return torch.float64 if any(own[name].dtype == torch.float64 for name in layout.shapes) else torch.float32


def _state(model: nn.Module) -> list[Tensor]:
    return [*model.parameters(), *model.buffers()]


def _heard(words: Any) -> Any:
    """What the first rank says."""
    box = [words]
    _talk(dist.broadcast_object_list, box, 0)
    return box[0]


def _share(tensor: Tensor) -> None:
    """The first rank's values, on all ranks; gloo speaks of tensors on the CPU."""
    there = tensor.detach().cpu().contiguous()
    _talk(dist.broadcast, there, 0)
    if dist.get_rank() != 0:
        tensor.copy_(there)


def _agree(problem: Exception | None) -> None:
    """Raise on all ranks if something failed on one of them."""
    texts: list[str | None] = [None] * dist.get_world_size()
    _talk(dist.all_gather_object, texts, None if problem is None else f"{type(problem).__name__}: {problem}")
    if problem is not None:
        raise problem
    for rank, text in enumerate(texts):
        if text is not None:
            raise TrainingError(f"rank {rank}: {text}")


def _talk(call: Callable[..., Any], *arguments: Any) -> Any:
    try:
        return call(*arguments)
    except RuntimeError as problem:  # gloo's, when a process is gone
        first = str(problem).strip().splitlines()[:1]
        raise TrainingError(
            f"another process of this simulation ended ({first[0] if first else type(problem).__name__}); "
            "start it again: it goes on from the server's checkpoint"
        ) from problem


_BLOCK = 16  # clients whose changes are made together: what a process takes at a time


@dataclass(frozen=True)
class Simulation:
    """What came of a simulation; nothing in it tells of a user's data.

    Attributes:
        rounds: that were made, in all sessions of the run.
        planned: (max_participations, min_separation) of the plan.
        realised: the same as it came; None where the claim does not follow from it, nobody came, or rounds are left.
        planned_epsilon: at the plan's delta, for one user.
        realised_epsilon: of what came, where neither that nor the end of the run was chosen by what had been released.
        delta: the plan's.
    """

    rounds: int
    planned: tuple[int, int]
    realised: tuple[int, int] | None
    planned_epsilon: float
    realised_epsilon: float | None
    delta: float


def simulate(
    server: Server,
    users: Users,
    training: LocalTraining,
    *,
    availability: Availability | None = None,
    over_selection: float = 1.3,
    drop_out: float = 0.0,
    seed: int = 0,
    on_round: Callable[[int, nn.Module], object] | None = None,
    progress: bool = False,
) -> Simulation:
    """Make the rounds of a plan that are left, with the server of a deployment and clients that are computed here.

    In every round those are asked who are there (`availability`) and whom the plan allows (`server.eligible`), as many
    as `report_goal * over_selection`; the first `report_goal` who answer train on their examples from the server's
    model, and their changes go to `server.open()`, which clips, adds, records and releases. Too few are no reason to
    wait: the round is made with those who are there, and its sum is divided by the report goal all the same.

    A server with a checkpoint that is there goes on at its next round. The same users, seed and key give the same
    model, bit for bit, for any number of processes and wherever a run was killed: who is there, who is asked and how a
    client shuffles are pure functions of the seed and the round, and clients are made in the same blocks.

    With a `torch.distributed` group (gloo) of several ranks, the first calls `simulate`, and all others `assist` with
    the same users and training. Each process computes on one thread of torch.

    Args:
        server: new, or resumed; its plan's report goal, noise and separation are in force.
        users: {user id: (x, y)}, or a sequence of (x, y), whose ids are 0, 1, ..; first dimension: the examples. A
            sequence must have the same order where a run goes on: that is not checked.
        training: what a client does.
        availability: who is there; None for `Uniform()`, everybody.
        over_selection: devices asked for each one wanted, at least 1.
        drop_out: probability that a device that was asked dies before it answers.
        seed: of all chance here; never of the noise.
        on_round: called as (rounds done, the released model) after each round; what it sees is post-processing.
        progress: whether a bar of the rounds is drawn; it shows their number alone.
    Privacy: the choice of cohorts is public and gives no amplification: the plan's claim applies to any choice. Sizes
        of cohorts depend on availability and record, never on data.
    Warns: UserWarning where users * max_participations is below rounds * report goal: some rounds must be short.
    Raises: PlanError for a plan whose neighbours are add-or-remove: a cohort of a fixed size takes somebody else in
        for one who is missing; for one whose record is on devices. ArgumentError; TrainingError if another process
        fails. What a client's training raises, with the round discarded and nothing recorded. That it
        does is a function of the data: where they are private, a release that epsilon does not count.
    Cost: that of the clients' training, on as many processes as there are; a block of changes in memory.
    """
    if server.plan.neighbours == "add-or-remove":
        raise PlanError(
            "a simulation needs a plan whose neighbours are 'zero-out' or 'replace-one', got 'add-or-remove': its "
            "cohorts have a fixed size, so that without one user another one would be asked"
        )
    if "record" in server.plan.on_device:
        raise PlanError(
            "a simulation is held to its plan by the server's record, and this plan leaves the record to devices: plan "
            "without ao.mechanism(on_device=('record',)), which claims the same"
        )
    if not len(users):
        raise ArgumentError("users must hold at least one user, got none")
    there = UniformAvailability() if availability is None else availability
    if not callable(getattr(there, "present", None)):
        raise ArgumentError(
            f"availability must be a model of who is there, such as Uniform(0.3), got {type(there).__name__}"
        )
    source = public_source(seed)
    goal = server.plan.batch_size
    most = server.plan.participation.max_participations
    if len(users) * most < server.plan.n * goal:
        warnings.warn(
            f"rounds will be short of users: {len(users)} users in at most {most} rounds each are "
            f"{len(users) * most} messages, and {server.plan.n} rounds of {goal} want {server.plan.n * goal}; sums are "
            "divided by the report goal all the same",
            UserWarning, stacklevel=2,
        )  # fmt: skip
    cohort_size(goal, over_selection)  # refused before anybody is told of a round
    ids = list(users) if isinstance(users, Mapping) else list(range(len(users)))
    if len(distinct(ids)) < len(ids):
        raise ArgumentError(
            "users must have names that do not read alike, but for white space around them or the way an accent is "
            "typed: two of them would be one unit"
        )
    team = Team(server.model, server.layout, users, training)
    with _one_thread(), _bar(progress, server.plan.n, server.step) as advance:
        try:
            while server.step < server.plan.n:
                round = server.step
                present = there.present(source.derive(b"availability"), round, len(ids))
                candidates = _checked(present, len(ids)) & np.asarray(server.eligible(ids))
                cohort = choose_cohort(
                    source.derive(b"cohort"), round, candidates, goal, over_selection=over_selection, drop_out=drop_out
                )
                _make(server, team, ids, _blocks(source, round, cohort.added, len(ids)))
                advance(server.step)
                if on_round is not None:
                    on_round(server.step, server.model)
        finally:
            team.end()
    return outcome(server)


def _make(server: Server, team: Team, ids: list[Any], blocks: list[Block]) -> None:
    """One round of the server."""
    with server.open() as sums:
        team.make(blocks, lambda places, rows: sums.add_rows([ids[place] for place in places], rows))


def outcome(server: Server) -> Simulation:
    """What a server has done so far."""
    # A simulation that returns made all planned rounds. One that was stopped (an error or an interrupt in `on_round`,
    # which sees the model) may have been by what was released: nothing is stated of it, and nothing realised claimed.
    plan, realised = server.plan, server.certificate().realised
    rule = plan.participation
    return Simulation(
        rounds=server.step,
        planned=(rule.max_participations, rule.min_separation),
        realised=None if realised is None else (realised.max_participations, realised.min_separation),
        planned_epsilon=plan.epsilon,
        realised_epsilon=None if realised is None else realised.epsilon,
        delta=plan.delta,
    )


def public_source(seed: int) -> NoiseSource:
    """Where the chance of a simulation comes from: its key is a hash of the seed, no secret, and never of noise."""
    seed = checks.integer("seed", seed, low=0)
    return NoiseSource(blake2b(b"%d" % seed, digest_size=32, person=b"anyorder simula.").digest())


def _blocks(source: NoiseSource, round: int, places: Any, num_users: int) -> list[Block]:
    """The cohort in blocks of about `_BLOCK`, which do not depend on who computes them, with each client's seed."""
    if not len(places):
        return []
    words = source.derive(b"client").words(round, 0, 2 * num_users).view(np.uint64) >> np.uint64(1)  # fits int64
    parts = np.array_split(places, -(-len(places) // _BLOCK))
    return [(part.tolist(), words[part].tolist()) for part in parts]


def _checked(present: Any, num_users: int) -> Any:
    present = np.asarray(present)
    if present.dtype != np.bool_ or present.shape != (num_users,):
        raise ArgumentError(
            f"availability.present must return ({num_users},) bool, got {present.dtype} of shape {present.shape}"
        )
    return present


@contextmanager
def _one_thread() -> Iterator[None]:
    """Sums of several threads have other bits than those of one; and processes share the cores."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@contextmanager
def _bar(shown: bool, total: int, done: int) -> Iterator[Callable[[int], object]]:
    """A bar of rounds: their number is public, and nothing else is shown."""
    if not shown:
        yield lambda step: None
        return
    rich = checks.optional("rich.progress", extra="cli", purpose="a progress bar")
    columns = (rich.BarColumn(), rich.MofNCompleteColumn(), rich.TextColumn("rounds"), rich.TimeRemainingColumn())
    with rich.Progress(*columns) as bar:
        task = bar.add_task("", total=total, completed=done)
        yield lambda step: bar.update(task, completed=step)
