"""The server's part of secure aggregation: Flower's SecAgg+, driven from a strategy of the message API.

Flower's own workflow takes strategies of its older interface, loses the round with a client that fails before it has
shared its keys, and logs how many answered. What the clients run (`secaggplus_mod`), the keys, the shares and the masks
are Flower's here too; every client is every other's neighbour.

    client i sends    x_i + mask(b_i) + sum over j < i of mask(s_ij) - sum over j > i of mask(s_ij)      modulo 2^32

The masks of pairs cancel in the sum. Of a client whose vector came, the others tell the shares of its seed b_i; of one
that was lost after sharing, those of the key that gives its s_ij; never both.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from logging import INFO
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.common.secure_aggregation.crypto.shamir import combine_shares
from flwr.common.secure_aggregation.crypto.symmetric_encryption import generate_shared_key
from flwr.common.secure_aggregation.secaggplus_constants import RECORD_KEY_CONFIGS, Key, Stage
from flwr.common.secure_aggregation.secaggplus_utils import pseudo_rand_gen
from flwr.serverapp import Grid
from flwr.serverapp import strategy as flower
from flwr.supercore import log
from flwr.supercore.primitives.asymmetric import bytes_to_private_key, bytes_to_public_key
from numpy.typing import NDArray
from torch import Tensor

from anyorder import checks
from anyorder.errors import ArgumentError, ParticipationError, PlanError, TrainingError
from anyorder.federated.flower.messages import (
    ARRAYS,
    CONFIG,
    MODULUS,
    RECORD,
    Instruction,
    Masking,
    array_of,
    of_reply,
    record_of,
)

if TYPE_CHECKING:
    from anyorder.federated.server import Server


Ask = Callable[[Mapping[int, RecordDict]], Mapping[int, RecordDict]]
"""{node: what to send} -> {node: what it answered}, of those that answered."""


def threshold_of(messages: int) -> int:
    """How many clients it takes to unmask: more than half, so that no server can ask two halves for two secrets."""
    return max(2, messages // 2 + 1)


@dataclass
class MaskedSum:
    """One sum under masks. Whatever a client answers that does not fit counts as no answer.

    Args:
        ask: how clients are reached.
        masking: the numbers of the round.
        size: elements of a message.
        threshold: how many clients it takes to unmask; fewer than that many answers give no sum.
    """

    ask: Ask
    masking: Masking
    size: int
    threshold: int
    _keys: dict[int, list[bytes]] = field(default_factory=dict)

    def of(
        self,
        nodes: Iterable[int],
        instructions: RecordDict,
        admit: Callable[[Mapping[int, RecordDict]], Iterable[int]],
    ) -> tuple[list[int], Tensor] | None:
        """(nodes in the sum, (size,) int64 sum), zeros where what came cannot be a sum; None if too few were left.

        Args:
            nodes: whom to ask.
            instructions: what each of them needs to train; each stage carries the records that are not arrays.
            admit: what all answered at first -> whose vectors may be in the sum. After this nobody can be taken out.
        """
        nodes = list(nodes)
        head = RecordDict(dict(instructions.config_records.items()))
        settings = self.masking.settings(len(nodes), self.threshold)
        first = self._stage(head, Stage.SETUP, dict.fromkeys(nodes, settings))
        keys = {node: _public_keys(answer) for node, answer in first.items()}
        admitted = list(admit({node: first[node] for node, pair in keys.items() if pair is not None}))
        self._keys = {node: pair for node in admitted if (pair := keys[node]) is not None}
        if len(self._keys) < self.threshold:
            return None
        everybody = {str(node): pair for node, pair in self._keys.items()}
        answers = self._stage(head, Stage.SHARE_KEYS, dict.fromkeys(self._keys, everybody))
        forwarded = self._forward(answers)
        if len(forwarded) < self.threshold:
            return None
        answers = self._stage(instructions, Stage.COLLECT_MASKED_VECTORS, forwarded)
        vectors = {node: v for node, answer in answers.items() if (v := self._vector(answer)) is not None}
        secrets = self._secrets(head, list(vectors), [node for node in forwarded if node not in vectors])
        if secrets is None:
            return None
        try:
            total = self._unmasked(vectors, secrets)
        except Exception:  # secrets that somebody made up: whatever the cryptography raises for what is no key
            return None
        whole = self.masking.unshift(total[1:], int(total[0]), len(vectors))
        return list(vectors), torch.zeros(self.size, dtype=torch.int64) if whole is None else whole

    def _stage(self, head: RecordDict, stage: str, told: Mapping[int, Mapping[str, Any]]) -> Mapping[int, RecordDict]:
        contents = {}
        for node, values in told.items():
            records = dict(head.items()) | {RECORD_KEY_CONFIGS: ConfigRecord({**values, Key.STAGE: stage})}
            contents[node] = RecordDict(records)
        return {node: answer for node, answer in self.ask(contents).items() if node in contents}

    def _forward(self, answers: Mapping[int, RecordDict]) -> dict[int, dict[str, Any]]:
        """{node: the shares that the others have for it}, of those who shared theirs with everybody."""
        shared = {}
        for node, answer in answers.items():
            record = record_of(answer, RECORD_KEY_CONFIGS)
            to, what = record.get(Key.DESTINATION_LIST), record.get(Key.CIPHERTEXT_LIST)
            others = sorted(self._keys.keys() - {node})
            if not isinstance(to, list) or not isinstance(what, list) or len(to) != len(what):
                continue
            if all(type(i) is int for i in to) and sorted(to) == others and all(isinstance(c, bytes) for c in what):
                shared[node] = dict(zip(to, what, strict=True))
        return {
            node: {
                Key.SOURCE_LIST: [other for other in shared if other != node],
                Key.CIPHERTEXT_LIST: [shared[other][node] for other in shared if other != node],
            }
            for node in shared
        }

    def _vector(self, answer: RecordDict) -> NDArray[np.int64] | None:
        """(1 + size,): the masked weight and the masked vector."""
        parts = record_of(answer, RECORD_KEY_CONFIGS).get(Key.MASKED_PARAMETERS)
        if not isinstance(parts, list) or len(parts) != 2 or not all(isinstance(part, bytes) for part in parts):
            return None
        weight, vector = (array_of(part) for part in parts)
        if weight is None or vector is None:
            return None
        if weight.shape != (1,) or vector.shape != (self.size,) or weight.dtype.kind != "i" or vector.dtype.kind != "i":
            return None
        return np.concatenate([weight, vector]).astype(np.int64) % MODULUS

    def _secrets(self, head: RecordDict, active: list[int], lost: list[int]) -> dict[int, bytes] | None:
        """{node: seed of its own mask, or its key if it was lost}; None if too few tell their shares."""
        if len(active) < self.threshold:
            return None
        told = {Key.ACTIVE_NODE_ID_LIST: active, Key.DEAD_NODE_ID_LIST: lost}
        shares: dict[int, list[bytes]] = {node: [] for node in active + lost}
        for answer in self._stage(head, Stage.UNMASK, dict.fromkeys(active, told)).values():
            record = record_of(answer, RECORD_KEY_CONFIGS)
            of, what = record.get(Key.NODE_ID_LIST), record.get(Key.SHARE_LIST)
            if not isinstance(of, list) or not isinstance(what, list) or of != active + lost or len(what) != len(of):
                continue
            for node, share in zip(of, what, strict=True):
                if isinstance(share, bytes):
                    shares[node].append(share)
        if any(len(parts) < self.threshold for parts in shares.values()):
            return None
        try:
            return {node: combine_shares(parts) for node, parts in shares.items()}
        except Exception:  # shares that somebody made up
            return None

    def _unmasked(self, vectors: Mapping[int, NDArray[np.int64]], secrets: Mapping[int, bytes]) -> NDArray[np.int64]:
        total = np.zeros(1 + self.size, np.int64)
        for vector in vectors.values():
            total = (total + vector) % MODULUS
        for node, secret in secrets.items():
            if node in vectors:
                total = (total - self._mask(secret)) % MODULUS
                continue
            key = bytes_to_private_key(secret)
            for other in vectors:  # those lost took their masks with them
                mask = self._mask(generate_shared_key(key, bytes_to_public_key(self._keys[other][0])))
                total = (total + mask if node > other else total - mask) % MODULUS
        return total

    def _mask(self, seed: bytes) -> NDArray[np.int64]:
        return np.concatenate(pseudo_rand_gen(seed, MODULUS, [(1,), (self.size,)]))


def _public_keys(answer: RecordDict) -> list[bytes] | None:
    record = record_of(answer, RECORD_KEY_CONFIGS)
    first, second = record.get(Key.PUBLIC_KEY_1), record.get(Key.PUBLIC_KEY_2)
    if not isinstance(first, bytes) or not isinstance(second, bytes):
        return None
    try:
        for key in (first, second):
            bytes_to_public_key(key)
    except Exception:  # none that others could use: their part would fail
        return None
    return [first, second]


# ----------------------------------------------------------------------------------------------------
# The server's part: a strategy that hands rounds of Flower's messages to `anyorder.federated.Server`.


_POLL = 0.2  # seconds between two looks for replies
_ATTEMPTS = 3  # at a sum under masks: one that was not unmasked released nothing


class PrivateStrategy(flower.Strategy):
    """Runs the rounds of a `Server` over Flower, in place of FedAvg inside a wrapper for differential privacy.

        strategy = PrivateStrategy(Server(plan, model, optimizer, checkpoint="run.checkpoint"))
        result = strategy.start(grid)

    Each round it asks clients, adds what their `client_mod` answers to `Server.open()`, each message once and each user
    once, and closes the round when all whom it asked have answered, or the time is up. The mean is over the report
    goal, and all who answered are in it, also beyond the goal. Clients that are lost, answer late, twice, or for a user
    that the plan does not allow now, are left out and the round goes on; a message that is none is zeros. It reads no
    metric, loss, count of examples or word of an error, and returns and logs none; there is no evaluation on clients.
    The clip norm in force and the round are told to the clients with the parameters.

    With a plan that trusts clipping to the devices (`on_device=("clipping",)`), sums are made under Flower's SecAgg+
    masks, of integers on the plan's grid, exactly; see docs/federated.md for what these masks are worth.

    Where the ServerApp, the SuperLink or the machine is killed, start the run again: it goes on with the round after
    the last that was released, from the server's checkpoint. A round that was under way is asked for again.

    Args:
        server: the run; its model, or its checkpoint's, is what is trained.
        cohort: how many clients are asked in a round: the report goal and some more for those that are lost. The
            answers of all count: to end with the first so many would let one client's speed, which its data may decide,
            choose whose message is left out.
        min_nodes: how many clients must be connected before a round begins; the report goal if None. After the
            timeout it begins with those that are.
        timeout: seconds that a round waits for connections, and for answers, in each stage: longer than any client's
            training takes, whatever its data.

    Raises: ArgumentError; PlanError if the sum of a cohort's integers could wrap around modulo 2^32, or if clipping is
        trusted to the devices without a grid.
    Cost: memory of one message at a time, but under masks those of a cohort; there each client tells every other two
        shares, so that cohorts are of tens.
    """

    def __init__(
        self,
        server: "Server",
        *,
        cohort: int | None = None,
        min_nodes: int | None = None,
        timeout: float = 3600.0,
    ) -> None:
        if server.plan.neighbours == "add-or-remove":
            raise PlanError(
                "a strategy needs a plan whose neighbours are 'zero-out' or 'replace-one', got 'add-or-remove': "
                "without one user a cohort of fixed size would ask somebody else"
            )
        goal = server.plan.batch_size
        self._server = server
        self._goal = goal
        self._cohort = goal if cohort is None else checks.integer("cohort", cohort, low=goal)
        self._min_nodes = goal if min_nodes is None else checks.integer("min_nodes", min_nodes, low=1)
        self._timeout = checks.positive("timeout", timeout)
        self._on_device = server.plan.on_device
        self._named = "record" not in self._on_device
        self._masked = "clipping" in self._on_device
        self._waiting: dict[int, int] = {}
        """{node: step} of who was asked and has not answered."""
        self._users: dict[int, str] = {}
        """{node: user} as they said; a wrong one can only keep a client from being asked."""
        self._asked: dict[int, int] = {}
        """{node: step} of the last time that each was asked: those that wait longest come first."""
        if self._masked:
            if server.plan.grid is None:
                raise PlanError('on_device=("clipping",) needs integer messages: plan with ao.mechanism(secure=True)')
            if self._cohort < 2:
                raise PlanError("a sum of one client is its message: plan with a report goal of two or more")
            self._masking().check_size(self._cohort)

    # -- one run -----------------------------------------------------------------------------------------------------

    def start(  # type: ignore[override]
        self,
        grid: Grid,
        initial_arrays: None = None,
        num_rounds: int | None = None,
        timeout: float | None = None,
        train_config: ConfigRecord | None = None,
        evaluate_config: None = None,
        evaluate_fn: Any = None,
    ) -> flower.Result:
        """Take the rounds that are left, of num_rounds or of the whole plan.

        Args:
            grid: Flower's way to the clients.
            initial_arrays: leave it out: the server has the model, new or resumed.
            num_rounds: how many rounds the run has in all, those before a resume too; all that the plan has if None.
            timeout: in place of the strategy's own.
            train_config: what else the app's training is told, of public values.
            evaluate_config: leave it out: clients are not evaluated.
            evaluate_fn: (round, arrays) -> MetricRecord or None, called before the first and after each round. It
                sees what is released; give it public data alone.
        Returns: Flower's result, with the arrays, and what evaluate_fn said.
        Raises: ArgumentError; TrainingError if no client came before the timeout; the round is not lost, start again.
        """
        if initial_arrays is not None or evaluate_config is not None:
            raise ArgumentError(
                "leave initial_arrays and evaluate_config out: the server has the model, new or resumed, and clients "
                "are not evaluated, because what they would answer has no noise"
            )
        server = self._server
        last = (
            server.plan.n if num_rounds is None else checks.integer("num_rounds", num_rounds, low=1, high=server.plan.n)
        )
        if timeout is not None:
            self._timeout = checks.positive("timeout", timeout)
        config = ConfigRecord() if train_config is None else train_config
        result = flower.Result()
        self.summary()
        self._evaluate(evaluate_fn, result)
        while server.step < last:
            log(INFO, "[ROUND %s/%s]", server.step + 1, last)
            messages = self.configure_train(server.step + 1, self._arrays(), config, grid)
            if self._masked:
                self._masked_round(grid, messages)
            else:
                self.aggregate_train(server.step + 1, self._replies(grid, messages))
            self._evaluate(evaluate_fn, result)
        result.arrays = self._arrays()
        return result

    def summary(self) -> None:
        """Log the claim."""
        plan = self._server.plan
        sums = "sums under masks" if self._masked else "single messages"
        log(INFO, "anyorder: epsilon %.4g, delta %.3g, unit %s", plan.epsilon, plan.delta, plan.unit)
        log(INFO, "\t%d rounds, report goal %d, %s, clip norm %g", plan.n, self._goal, sums, plan.clip_norm)

    def _evaluate(self, evaluate_fn: Any, result: flower.Result) -> None:
        if evaluate_fn is None:
            return
        said = evaluate_fn(self._server.step, self._arrays())
        if said is not None:
            result.evaluate_metrics_serverapp[self._server.step] = said

    # -- Flower's interface ------------------------------------------------------------------------------------------

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """The messages of a round, to clients that may be in it; those that were asked longest ago come first."""
        self._check_round(server_round)
        step = self._server.step
        config["server-round"] = server_round
        content = RecordDict({ARRAYS: arrays, CONFIG: config, RECORD: self._instruction().record()})
        nodes = self._chosen(self._connected(grid))
        self._waiting = dict.fromkeys(nodes, step)
        self._asked.update(self._waiting)
        return [Message(content, node, MessageType.TRAIN, group_id=str(server_round)) for node in nodes]

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """One round of the server, of the replies to what `configure_train` gave: the new arrays, and no metrics.

        Raises: TrainingError for another round than the server's next, or where sums are made under masks; what
            `replies` itself raises. Then nothing was released.
        """
        self._check_round(server_round)
        if self._masked:
            raise TrainingError("sums under masks take several messages a round: use start()")
        with self._server.open() as opened:
            for reply in replies:
                self._add(opened, reply)
        self._waiting = {}
        return self._arrays(), None

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Nobody: what clients would answer has no noise."""
        return []

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """None: whatever the replies say has no noise."""
        return None

    # -- one round ---------------------------------------------------------------------------------------------------

    def _add(self, opened: Any, reply: Message) -> None:
        """Add a reply if it may be in this round."""
        head = self._head(reply)
        if head is None:
            return
        node, user = head
        del self._waiting[node]
        if user is not None:
            self._users[node] = user
        with suppress(ParticipationError):  # the plan does not allow this user now, or it came from another device
            opened.add(user, _message(reply))

    def _head(self, reply: Message) -> tuple[int, str | None] | None:
        """(node, user) of a reply of this round; None if it is none, or not from whom was asked."""
        step = self._server.step
        try:
            node = reply.metadata.src_node_id
            if self._waiting.get(node) != step or reply.has_error():
                return None
            belongs, user = of_reply(reply.content, step, named=self._named)
        except Exception:  # whatever a stranger's reply does when it is looked at, it is none, and stops nobody
            return None
        return (node, user) if belongs else None

    def _masked_round(self, grid: Grid, messages: Iterable[Message]) -> None:
        """A round of a sum under masks; of nobody where none of some attempts could be unmasked."""
        contents = {message.metadata.dst_node_id: message.content for message in messages}
        users, total = None, None
        for _ in range(_ATTEMPTS if len(contents) >= 2 else 0):
            said: dict[int, str | None] = {}
            secure = MaskedSum(
                partial(self._ask, grid), self._masking(), self._server.layout.size, threshold_of(len(contents))
            )
            found = secure.of(contents, next(iter(contents.values())), partial(self._admit, said))
            if found is not None:
                nodes, total = found
                users = [said[node] for node in nodes]
                break
        with self._server.open() as opened:
            if total is not None:
                opened.add_sum(users if self._named else None, total)
        self._waiting = {}

    def _admit(self, said: dict[int, str | None], first: Mapping[int, RecordDict]) -> list[int]:
        """Of those that answered, the nodes of users that the plan allows now, one of each; written into said."""
        for node, content in first.items():
            belongs, user = of_reply(content, self._server.step, named=self._named)
            if user is not None:
                self._users[node] = user
            if belongs and (user is None or user not in said.values()):
                said[node] = user
        if self._named and said:
            for node, may in zip(list(said), self._server.eligible(list(said.values())).tolist(), strict=True):
                if not may:
                    del said[node]
        return list(said)

    def _ask(self, grid: Grid, told: Mapping[int, RecordDict]) -> dict[int, RecordDict]:
        """What clients answer, of those that do."""
        group = str(self._server.step + 1)
        messages = [Message(content, node, MessageType.TRAIN, group_id=group) for node, content in told.items()]
        replies = self._replies(grid, messages)
        answers = {}
        for reply in replies:
            with suppress(Exception):  # a reply that cannot be looked at is none
                if reply.has_content():
                    answers[reply.metadata.src_node_id] = reply.content
        return answers

    def _replies(self, grid: Grid, messages: Iterable[Message]) -> Iterator[Message]:
        """Replies as they come, until all are there or the time is up."""
        waiting = {name for name in grid.push_messages(messages) if name is not None}
        end = time.monotonic() + self._timeout
        while waiting and time.monotonic() < end:
            for reply in grid.pull_messages(waiting):
                waiting.discard(reply.metadata.reply_to_message_id)
                yield reply
            if waiting:
                time.sleep(_POLL)

    def _connected(self, grid: Grid) -> list[int]:
        """The clients that are there, once there are enough or the time is up."""
        end = time.monotonic() + self._timeout
        while len(nodes := list(grid.get_node_ids())) < self._min_nodes and time.monotonic() < end:
            time.sleep(_POLL)
        if not nodes:
            raise TrainingError(
                f"no client was connected within {self._timeout:g} seconds; nothing was released: start the "
                "SuperNodes, and start again"
            )
        return nodes

    def _chosen(self, nodes: list[int]) -> list[int]:
        known = [node for node in nodes if node in self._users]
        users = [self._users[node] for node in known]
        allowed = self._server.eligible(users).tolist() if known else []
        barred = {node for node, may in zip(known, allowed, strict=True) if not may}
        free = [node for node in nodes if node not in barred]
        return sorted(free, key=lambda node: (self._asked.get(node, -1), node))[: self._cohort]

    def _instruction(self) -> Instruction:
        server = self._server
        norm, grid = float(server.clip_norm), server.plan.grid if self._masked else None
        follows = server.release.norm_moves  # it counts the messages that are longer
        return Instruction(server.step, norm, 2 * norm if follows else norm, grid, tuple(self._on_device))

    def _masking(self) -> Masking:
        assert self._server.plan.grid is not None
        return Masking(float(self._server.clip_norm), self._server.plan.grid)

    def _arrays(self) -> ArrayRecord:
        """The shared parameters: those of the server's layout, and no buffers."""
        parameters = dict(self._server.model.named_parameters())
        shared = {name: parameters[name].detach() for name in self._server.layout.shapes}
        return ArrayRecord({name: Array(_array(value)) for name, value in shared.items()})

    def _check_round(self, server_round: int) -> None:
        if server_round != self._server.step + 1:
            raise TrainingError(
                f"the server's next round is {self._server.step + 1} in Flower's counting, got {server_round}: start() "
                "goes on where the checkpoint ends"
            )


def _array(value: Tensor) -> Any:
    dtype = torch.float64 if value.dtype == torch.float64 else torch.float32
    return value.to("cpu", dtype).numpy().copy()


def _message(reply: Message) -> dict[str, Any] | None:
    """A reply's change by names; None, which counts as zeros, where there is none that can be read."""
    try:
        return {name: array_of(array.data) for name, array in reply.content.array_records[ARRAYS].items()}
    except Exception:  # as in `_head`; its user was there
        return None
