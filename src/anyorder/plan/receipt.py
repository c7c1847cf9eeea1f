"""A unit's own receipt: its steps and its own mu, a leaf of a tree whose root stands in the public certificate.

    salt_i, slot_i, pads   keyed streams; slots are distinct, uniform in 0 .. 2^30 - 1
    leaf_i                 sha256(0 | salt_i | unit | steps)
    node                   sha256(1 | its 8 children), of which those without a leaf below are pads
    root                   sha256(2 | top node | what the certificate claims)

Ten levels, whatever the number of units. The key is made from the record, so that no stream is used for two records.
To those without it root and paths are random bytes: neither ids nor steps of others can be tried, and a sibling with
leaves below looks as one without.
"""

import ctypes
import hmac
import os
from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache, cached_property
from hashlib import sha256, shake_128
from itertools import pairwise
from operator import ne
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from anyorder._library import PATHS, TREE_SOURCES, Memory, load
from anyorder.errors import ArgumentError, CertificateError, PlanError
from anyorder.formats import bounded, brief, check_names, check_work, hexadecimal, load_json, quoted, save_json
from anyorder.ledger import Ledger, Units, allows, as_units, plain
from anyorder.participation import TruncatedPoisson
from anyorder.participation.known_order import one_unit
from anyorder.plan.plan import Plan, close

FORMAT = "anyorder-receipt/1"
_LEVELS, _ARITY, _SIZE = 10, 8, 32
_SLOTS = _ARITY**_LEVELS
_PATH = _LEVELS * (_ARITY - 1) * _SIZE
_ROWS = 1 << 13  # nodes that are made at once

_HASH = np.dtype((np.void, _SIZE))

Hashes = NDArray[np.void]
Integers = NDArray[np.int64]


@dataclass(frozen=True)
class Receipt:
    """What a run did with one unit, for that unit: as secret as its part in the data is to itself.

    Attributes:
        unit: its id.
        steps: those in which it took part, rising.
        mu: Gaussian DP parameter of these steps, at most the plan's. Under secret sampling: against those who know the
            steps, where it may be far above what the plan claims against everybody else.
        slot: the leaf's place in the tree.
        salt: 32 bytes that hide the leaf.
        path: the siblings from the leaf up, 10 levels of 7 times 32 bytes.
    """

    unit: int | str
    steps: tuple[int, ...]
    mu: float
    slot: int
    salt: bytes = field(repr=False)
    path: bytes = field(repr=False)

    def save(self, path: str | Path) -> None:
        """Write the receipt as JSON, readable by the owner of the file only."""
        save_json(path, {
            "format": FORMAT, "unit": self.unit, "steps": list(self.steps), "mu": self.mu, "slot": self.slot,
            "salt": self.salt.hex(), "path": self.path.hex(),
        }, secret=True)  # fmt: skip

    @classmethod
    def load(cls, path: str | Path, *, large: bool = False) -> "Receipt":
        """Read a receipt; `anyorder.verify` holds it against its certificate. Raises: CertificateError."""
        data = load_json(path, FORMAT, large=large)
        check_names("receipt", data, {"format", "unit", "steps", "mu", "slot", "salt", "path"})
        unit, steps, mu, slot = data["unit"], data["steps"], data["mu"], data["slot"]
        if type(unit) not in (int, str):
            raise CertificateError(f"unit must be an integer or a text, got {quoted(unit)}")
        if type(steps) is not list or not steps or not all(type(t) is int for t in steps):
            raise CertificateError(f"steps must be a list of one integer or more, got {quoted(steps)}")
        if type(mu) is not float:
            raise CertificateError(f"mu must be a real number, got {quoted(mu)}")
        if type(slot) is not int or not 0 <= slot < _SLOTS:
            raise CertificateError(f"slot must be an integer from 0 to {_SLOTS - 1}, got {quoted(slot)}")
        salt, siblings = (
            bytes.fromhex(hexadecimal(data, name, 2 * size)) for name, size in (("salt", _SIZE), ("path", _PATH))
        )
        return cls(unit, tuple(steps), mu, slot, salt, siblings)

    def check(self, plan: Plan, steps: int, claim: str, root: str, *, large: bool = False) -> None:
        """Raise CertificateError unless this is a leaf below the root, its steps keep to the plan, and mu follows.

        Args:
            plan: the certificate's.
            steps: that were taken.
            claim: what the root is bound to.
            root: 64 hexadecimal digits.
        """
        if self.root(claim) != root:
            raise CertificateError(
                "the receipt does not belong to this certificate: its unit, steps or path were altered, or it is of "
                "another run, or of the same run at another step"
            )
        rising = all(a < b for a, b in zip((-1, *self.steps), self.steps, strict=False))
        if not rising or self.steps[-1] >= steps:
            raise CertificateError(f"the steps of the receipt must rise, from 0 to {steps - 1} at most")
        with bounded(not large):
            if not plan.participation.secret:
                check_work("the rule of a unit's steps", operations=256 * 64 * len(self.steps))
            if not allows(plan.participation, self.steps):
                raise CertificateError(f"the steps of the receipt break the plan: {plan.participation.describe()}")
            try:
                own = _own_mu(plan, self.steps)
            except CertificateError:
                raise
            except Exception as problem:
                raise CertificateError(f"the receipt's mu cannot be recomputed: {brief(problem)}") from problem
        if not close(self.mu, own):
            raise CertificateError(f"the receipt claims mu = {quoted(self.mu)}; its steps and the plan give {own!r}")

    def root(self, claim: str) -> str:
        """The root that this leaf and its path lead to."""
        node, slot = _leaf(self.salt, _id_bytes(self.unit), np.array(self.steps, "<i8").tobytes()), self.slot
        level = (_ARITY - 1) * _SIZE
        for start in range(0, _PATH, level):
            siblings, place = self.path[start : start + level], _SIZE * (slot % _ARITY)
            node = sha256(b"\1" + siblings[:place] + node + siblings[place:]).digest()
            slot //= _ARITY
        return _sealed(node, claim)


def receipt_key(record_key: bytes, record: str) -> bytes:
    """The key of the tree of one record; a record of one step more has another."""
    return hmac.digest(record_key, b"anyorder receipts 1\n" + record.encode(), "sha256")


def receipt_root(ledger: Ledger, key: bytes, claim: str) -> str:
    """64 hexadecimal digits: the root of all units' receipts. Cost: see `ReceiptTree`."""
    return ReceiptTree(ledger, key).root(claim)


def receipts(tree: "ReceiptTree", plan: Plan, units: Iterable[Any]) -> list[Receipt]:
    """The receipts of the units, in their order.

    Raises: ArgumentError if one of them took part in no step; PlanError under truncated Poisson sampling, where who was
        cut off depends on who else was drawn, so that receipts of others tell of a unit.
    """
    if type(plan.participation) is TruncatedPoisson:
        raise PlanError(
            "receipts are not given under truncated Poisson sampling: a batch is truncated by who else was drawn: the "
            "receipts of all others would tell a unit's steps; plan for 'cyclic-poisson' or 'poisson' to give some"
        )
    asked = as_units(units)
    wanted = tree.find(asked)
    mus: dict[tuple[int, ...], float] = {}
    made = []
    for unit, i, path in zip(plain(asked), wanted.tolist(), tree.paths(wanted), strict=True):
        steps = tuple(tree.steps[tree.bounds[i] : tree.bounds[i + 1]].tolist())
        if steps not in mus:
            mus[steps] = _own_mu(plan, steps)
        made.append(Receipt(unit, steps, mus[steps], int(tree.slots[i]), tree.salt(i), path.tobytes()))
    return made


def _own_mu(plan: Plan, steps: tuple[int, ...]) -> float:
    mu = float(plan.unit_mus(one_unit(plan.n, steps))[0])
    return mu if plan.mu is None else min(mu, plan.mu)  # both are bounds


# -- the tree --------------------------------------------------------------------------------------------------------


def _stream(key: bytes, name: str, size: int) -> bytes:
    """Bytes that nobody without the key (of 32 bytes) can tell from random ones; others for another name."""
    return shake_128(key + name.encode()).digest(size)


def _leaf(salt: bytes, unit: bytes, steps: bytes) -> bytes:
    return sha256(b"\0" + salt + unit + steps).digest()


def _sealed(top: bytes, claim: str) -> str:
    return sha256(b"\2" + top + claim.encode()).hexdigest()


def _id_bytes(unit: int | str) -> bytes:
    """A letter for the kind, then an integer in 8 bytes, or the length of a text and the text: no two ids alike."""
    if isinstance(unit, str):
        raw = unit.encode("utf-8", "surrogatepass")
        return b"s" + len(raw).to_bytes(8, "little") + raw
    return b"i" + unit.to_bytes(8, "little", signed=True)


class _Level(NamedTuple):
    """Of a tree, leaves first."""

    number: int
    places: Integers  # of its nodes, rising
    nodes: Hashes
    firsts: Integers  # the number of the first child of each node above, then that of all
    marks: NDArray[np.uint64] | None  # where the library goes on with pads; of levels that are kept


class ReceiptTree:
    """The tree of one record. Unit i, in the order of ids, has steps[bounds[i] : bounds[i + 1]] and a leaf at slots[i].

    Pads are not kept: they are made again for the paths that are asked for. Nor are nodes, before a path is. Without
    the compiled library hashlib makes the same tree.

    Cost: 0.7 us and 180 bytes for each unit, 1.4 us and 330 bytes of one with a name; as much again for the first
        paths, of which 280 bytes are kept; then 1 ms for a path, or 10 us each of many. Without the library 4 us, and
        15 ms.
    """

    def __init__(self, ledger: Ledger, key: bytes) -> None:
        history = list(ledger.history())
        at = np.repeat(np.arange(len(history)), [len(row) for row in history])
        if any(isinstance(row, list) for row in history):
            names = [str(unit) for row in history for unit in row]
            by_unit = np.array(sorted(range(len(names)), key=names.__getitem__), np.int64)
            names = [names[i] for i in by_unit.tolist()]
            self.bounds = _runs(np.cumsum(np.fromiter(map(ne, names, [None, *names]), np.bool_, len(names))))
            self.units: Units = [names[i] for i in self.bounds[:-1].tolist()]
        else:
            ids = np.concatenate([np.empty(0, np.int64), *map(np.asarray, history)])
            by_unit = np.argsort(ids, kind="stable")
            ids = ids[by_unit]
            self.bounds = _runs(ids)
            self.units = ids[self.bounds[:-1]]
        self.steps = at[by_unit].astype("<i8")
        check_work("the tree of all receipts", operations=256 * 2 * _LEVELS * len(self.units))
        self._key, self._salts = key, _stream(key, "salts", _SIZE * len(self.units))
        self.slots = _slots(key, len(self.units))

    def _levels(self, keep: bool = False) -> Iterator[_Level]:
        """Made anew: a root needs one level at a time. Those that are kept have marks."""
        places, nodes = self._leaves()
        for number in range(_LEVELS if len(nodes) else 0):
            above, library = places // _ARITY, _library()
            firsts, marks = _runs(above), None
            if library is not None and keep:
                marks = np.empty((1 + len(firsts) // _ROWS, library.anyorder_marks()), np.uint64)
            yield (level := _Level(number, places, nodes, firsts, marks))
            places, nodes = above[firsts[:-1]], self._above(level)
        yield _Level(_LEVELS, places, nodes, places, None)

    @cached_property
    def _kept(self) -> list[_Level]:
        """All levels, for paths."""
        return list(self._levels(keep=True))

    def root(self, claim: str) -> str:
        """Of the claim that the receipts are bound to."""
        top = deque(self._levels(), maxlen=1)[0].nodes
        return _sealed(top.tobytes() or _stream(self._key, "nobody", _SIZE), claim)

    def salt(self, i: int) -> bytes:
        """Of unit i."""
        return self._salts[_SIZE * i : _SIZE * (i + 1)]

    def find(self, units: Units) -> Integers:
        """The numbers of the units. Raises: ArgumentError, naming none, if one is not there."""
        known, found = self.units, np.empty(0, np.int64)
        if isinstance(units, list) and isinstance(known, list):
            found = np.array([bisect_left(known, unit) for unit in units], np.int64)
        elif not isinstance(units, list) and not isinstance(known, list):
            found = np.searchsorted(known, units)
        there = [i < len(known) and known[i] == unit for i, unit in zip(found.tolist(), units, strict=False)]
        if len(there) < len(units) or not all(there):
            raise ArgumentError(
                "a receipt is for a unit that took part in a step, and this one, or one of these, took part in none: "
                "it is no leaf of the tree, which shows who is in it and cannot show who is not"
            )
        return found

    def paths(self, wanted: Integers) -> Hashes:
        """The (wanted, 10, 7) siblings on the ways from units to the top."""
        paths = np.empty((len(wanted), _LEVELS, _ARITY - 1), _HASH)
        places, others = self.slots[wanted], np.arange(_ARITY - 1)
        for level in self._kept[:_LEVELS] if len(wanted) else ():
            own, places = places[:, None] % _ARITY, places // _ARITY
            rows, back = np.unique(np.searchsorted(self._kept[level.number + 1].places, places), return_inverse=True)
            paths[:, level.number] = self._families(level, rows)[back[:, None], others + (others >= own)]
        return paths

    def _leaves(self) -> tuple[Integers, Hashes]:
        """Their places, rising, and the leaves."""
        places, order = _sorted(self.slots)
        leaves, units, library = np.empty(len(order), _HASH), self.units, _library()
        if library is None:
            steps, ends = self.steps.tobytes(), pairwise((8 * self.bounds).tolist())
            salts = np.frombuffer(self._salts, _HASH).tolist()
            leaves[:] = _digests(
                b"\0" + salt + _id_bytes(unit) + steps[start:end]
                for salt, unit, (start, end) in zip(salts, plain(units), ends, strict=True)
            )[order]
            return places, leaves
        ids: tuple[Any, Any] = (units, None)
        if isinstance(units, list):
            raw = [unit.encode("utf-8", "surrogatepass") for unit in units]
            ids = b"".join(raw), np.fromiter(map(len, raw), np.int64, len(raw))
        ranks = np.empty_like(order)
        ranks[order] = np.arange(len(order))
        library.anyorder_leaves(self._salts, *ids, self.steps, self.bounds, ranks, len(ranks), leaves)
        return places, leaves

    def _above(self, level: _Level) -> Hashes:
        """The nodes of the next level."""
        made = np.empty(len(level.firsts) - 1, _HASH)
        if (library := _library()) is not None:
            library.anyorder_nodes(self._key, level.number, *level[1:4], len(made), made, level.marks)
            return made
        for start in range(0, len(made), _ROWS):
            families = self._table(level, start).view(f"V{_ARITY * _SIZE}").ravel().tolist()
            made[start : start + _ROWS] = _digests(b"\1" + children for children in families)
        return made

    def _families(self, level: _Level, rows: Integers) -> Hashes:
        """The (rows, 8) children of nodes of the next level, whose numbers rise."""
        families, library = np.empty((len(rows), _ARITY), _HASH), _library()
        if library is not None:
            library.anyorder_families(*level[1:4], rows, len(rows), level.marks, families)
            return families
        for start in np.unique(rows // _ROWS * _ROWS).tolist():
            here = slice(*np.searchsorted(rows, (start, start + _ROWS)))
            families[here] = self._table(level, start)[rows[here] - start]
        return families

    def _table(self, level: _Level, start: int) -> Hashes:
        """The (rows, 8) children of nodes of the next level, from number `start` on, _ROWS at most."""
        firsts = level.firsts[start : start + _ROWS + 1]
        part, rows = slice(firsts[0], firsts[-1]), np.arange(len(firsts) - 1)
        full = np.zeros((len(rows), _ARITY), np.bool_)
        full[np.repeat(rows, np.diff(firsts)), level.places[part] % _ARITY] = True
        table = np.empty(full.shape, _HASH)
        table[full] = level.nodes[part]
        pads = _stream(self._key, f"pads {level.number} {start}", _SIZE * (full.size - len(level.places[part])))
        table[~full] = np.frombuffer(pads, _HASH)
        return table


def _digests(texts: Iterable[bytes]) -> Hashes:
    return np.frombuffer(b"".join([sha256(text).digest() for text in texts]), _HASH)


def _sorted(numbers: Integers) -> tuple[Integers, Integers]:
    """Numbers of 31 bits, rising, and where each stood: those that came first first."""
    keys = np.sort(numbers << 32 | np.arange(len(numbers)))  # a fifth of the time that np.argsort takes
    return keys >> 32, keys & 0xFFFFFFFF


def _runs(rising: Integers) -> Integers:
    """Where each number comes first, then how many there are."""
    return np.append(np.flatnonzero(np.append(True, rising[1:] != rising[:-1])[: len(rising)]), len(rising))


def _slots(key: bytes, count: int) -> Integers:
    """(count,) distinct and uniform: those of a stream that came before are passed over."""
    words = np.frombuffer(_stream(key, "slots", 4 * (64 + count + count // 8)), "<u4").astype(np.int64) % _SLOTS
    rising, places = _sorted(words)
    slots: Integers = words[np.sort(places[_runs(rising)[:-1]])[:count]]
    return slots


@cache
def _library() -> ctypes.CDLL | None:
    """None where hashlib is asked for, or is all that there is."""
    asked = os.environ.get("ANYORDER_KERNEL", "best")
    library = None if asked == "reference" else load(Path(__file__).with_name("_tree.so"), TREE_SOURCES)
    if library is not None:
        number, whole = ctypes.c_uint64, ctypes.c_int
        library.anyorder_leaves.argtypes = [*(6 * [Memory]), number, Memory]
        library.anyorder_nodes.argtypes = [Memory, whole, *(3 * [Memory]), number, Memory, Memory]
        library.anyorder_families.argtypes = [*(4 * [Memory]), number, Memory, Memory]
        library.anyorder_marks.restype = number
        library.anyorder_use(PATHS.index(asked) if asked in PATHS else len(PATHS))
    return library
