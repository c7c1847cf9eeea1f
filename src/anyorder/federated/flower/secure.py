"""The server's part of secure aggregation: Flower's SecAgg+, driven from a strategy of the message API.

Flower's own workflow takes strategies of its older interface, loses the round with a client that fails before it has
shared its keys, and logs how many answered. What the clients run (`secaggplus_mod`), the keys, the shares and the masks
are Flower's here too; every client is every other's neighbour.

    client i sends    x_i + mask(b_i) + sum over j < i of mask(s_ij) - sum over j > i of mask(s_ij)      modulo 2^32

The masks of pairs cancel in the sum. Of a client whose vector came, the others tell the shares of its seed b_i; of one
that was lost after sharing, those of the key that gives its s_ij; never both.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from flwr.app import ConfigRecord, RecordDict
from flwr.common.secure_aggregation.crypto.shamir import combine_shares
from flwr.common.secure_aggregation.crypto.symmetric_encryption import generate_shared_key
from flwr.common.secure_aggregation.secaggplus_constants import RECORD_KEY_CONFIGS, Key, Stage
from flwr.common.secure_aggregation.secaggplus_utils import pseudo_rand_gen
from flwr.supercore.primitives.asymmetric import bytes_to_private_key, bytes_to_public_key
from numpy.typing import NDArray
from torch import Tensor

from anyorder.federated.flower.instruction import array_of, record_of
from anyorder.federated.flower.masking import MODULUS, Masking

__all__ = ["MaskedSum", "threshold_of"]

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
