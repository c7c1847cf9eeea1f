"""A unit's receipt shows its own steps and mu, belongs to one certificate, and tells nothing of anybody else."""

import ctypes
import json
import os
import stat
import sys
import tracemalloc
from dataclasses import replace
from hashlib import sha256
from itertools import combinations

import numpy as np
import pytest

import anyorder as ao
from anyorder import formats
from anyorder._library import PATHS
from anyorder.errors import ArgumentError, CertificateError
from anyorder.formats import save_json
from anyorder.ledger import allows, as_units, replay
from anyorder.participation import EpochShuffle, FixedOrder, KnownOrder, MinSeparation, PoissonSampling, SingleEpoch
from anyorder.plan import receipt as trees
from anyorder.plan.certificate import Certificate, Evidence
from anyorder.plan.receipt import Receipt
from plans import flat_plan

KEY = bytes(range(32))
ORDER = [["ann", "bob"], ["cy", "bob"], ["ann"], []]
RUNS = {
    "fixed": (FixedOrder(4, 2, 2), [[0, 1], [2, 3], [0, 1], [2]], {}),
    "known": (KnownOrder(ORDER), ORDER, {}),
    "separated": (MinSeparation(4, 2), [["ann"], ["b\0"], ["ann", "b"], []], {"neighbours": "add-or-remove"}),
    "replaced": (EpochShuffle(2, 2), [[7], [-8], [-8], [7]], {"neighbours": "replace-one"}),
    "sampled": (PoissonSampling(4, 0.5), [[7], [], [7], [7]], {"mechanism": "independent"}),
}


def made(participation=RUNS["fixed"][0], history=RUNS["fixed"][1], key=KEY, **changes):
    settings = {"participation": participation, "batch_size": 2, "sigma": 2.0, "delta": 1e-6, "mechanism": "tree"}
    return Evidence(flat_plan(**{**settings, **changes}), replay(participation, history), "f" * 32, key)


def run_of(name, **changes):
    rule, history, settings = RUNS[name]
    return made(rule, history, **{**settings, **changes})


@pytest.fixture(params=["hashlib", *PATHS])
def way(request, monkeypatch):
    """To make trees; an instruction set that the processor lacks is the best that it has."""
    if request.param == "hashlib":
        monkeypatch.setattr(trees, "_library", lambda: None)
    elif (library := trees._library()) is None:
        pytest.skip("no compiled library")
    else:
        library.anyorder_use(PATHS.index(request.param))
    yield request.param
    if request.param != "hashlib":
        library.anyorder_use(len(PATHS))


def saved(folder, evidence, unit):
    """(certificate's path, receipt's path)."""
    paths = folder / "run.privacy.json", folder / "mine.json"
    evidence.certificate.save(paths[0])
    evidence.receipt(unit).save(paths[1])
    return paths


def rewritten(path, change):
    """The file with a change, and with its hash made anew: only the content can give it away."""
    data = json.loads(path.read_text())
    del data["sha256"]
    change(data)
    save_json(path, data)


# -- what it shows ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", RUNS)
def test_every_units_receipt_verifies(name, tmp_path):
    evidence = run_of(name)
    history = list(map(list, evidence.ledger.history()))
    for unit in {unit for step in history for unit in step}:
        path, own = saved(tmp_path, evidence, unit)
        found = ao.verify(path, receipt=own)
        assert found.receipt == Receipt.load(own) == evidence.receipt(unit)
        assert found.receipt.unit == unit
        assert list(found.receipt.steps) == [t for t, step in enumerate(history) if unit in step]
        assert found.evidence is None


def test_receipts_of_many_are_those_of_each():
    evidence = run_of("fixed")
    assert evidence.receipts([3, 0, 2]) == [evidence.receipt(unit) for unit in (3, 0, 2)]
    assert evidence.receipts([]) == []


@pytest.mark.parametrize("name", RUNS)
def test_mu_is_that_of_the_units_own_steps(name):
    """clip_norm f || C over its steps || / noise_std, by hand: a tree's X has no negative entry."""
    evidence = run_of(name)
    plan, shift = evidence.plan, 2 if name == "replaced" else 1
    C = plan.strategy.matrix()
    for receipt in evidence.receipts([*RUNS[name][1][0]]):
        moved = C[:, list(receipt.steps)].sum(axis=1)
        sens = len(receipt.steps) ** 0.5 if name == "sampled" else float((moved @ moved) ** 0.5)
        expected = shift * plan.clip_norm * sens * (1 + plan.rounding) / plan.noise_std
        assert receipt.mu == pytest.approx(expected, rel=1e-9)
        assert plan.mu is None or receipt.mu <= plan.mu


def test_a_receipt_is_readable_by_its_owner_alone(tmp_path):
    previous = os.umask(0)
    try:
        _, own = saved(tmp_path, made(), 0)
    finally:
        os.umask(previous)
    assert stat.S_IMODE(own.stat().st_mode) == 0o600


def test_who_took_part_in_no_step_has_no_receipt_and_is_not_named():
    for evidence, units in ((made(), [77123]), (made(), ["77123"]), (made(), [0, 77123]), (made(history=[]), [77123])):
        with pytest.raises(ArgumentError, match="took part in none") as caught:
            evidence.receipts(units)
        assert "77123" not in str(caught.value)


# -- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change",
    [
        lambda d: d.update(unit=1),
        lambda d: d.update(unit="0"),
        lambda d: d.update(unit=None),
        lambda d: d.update(steps=[0]),
        lambda d: d.update(steps=[0, 1]),
        lambda d: d.update(steps=[0, 2, 3]),
        lambda d: d.update(steps=[2, 0]),
        lambda d: d.update(steps=[]),
        lambda d: d.update(steps=[0, 2.0]),
        lambda d: d.update(steps=[False, 2]),
        lambda d: d.update(mu=d["mu"] * (1 - 1e-6)),
        lambda d: d.update(mu=1),
        lambda d: d.update(slot=d["slot"] ^ 1),
        lambda d: d.update(slot=d["slot"] ^ 1 << 29),
        lambda d: d.update(slot=d["slot"] + (1 << 30)),
        lambda d: d.update(slot=-1),
        lambda d: d.update(salt=d["salt"][::-1]),
        lambda d: d.update(salt=d["salt"][:-2]),
        lambda d: d.update(path=("1" if d["path"][0] == "0" else "0") + d["path"][1:]),
        lambda d: d.update(path=d["path"][:-1] + ("1" if d["path"][-1] == "0" else "0")),
        lambda d: d.update(path=d["path"][:-448]),
        lambda d: d.update(colour="red"),
        lambda d: d.pop("mu"),
    ],
)
def test_altered_receipts_are_refused_even_with_a_new_hash(change, tmp_path):
    path, own = saved(tmp_path, made(), 0)
    ao.verify(path, receipt=own)
    rewritten(own, change)
    with pytest.raises(CertificateError):
        ao.verify(path, receipt=own)


@pytest.mark.parametrize(
    "other",
    [
        {"key": bytes(32)},
        {"sigma": 1.0},
        {"history": RUNS["fixed"][1][:3]},
        {"history": [[0, 1], [2, 3], [0, 1], [2, 3]]},
    ],
    ids=["key", "plan", "earlier", "others"],
)
def test_a_receipt_of_another_run_is_refused(other, tmp_path):
    path, own = saved(tmp_path, made(), 0)
    made(**other).certificate.save(path)
    with pytest.raises(CertificateError, match="does not belong"):
        ao.verify(path, receipt=own)


def test_the_root_is_bound_to_what_the_certificate_claims():
    """The same root under another plan, number of steps or key: nobody's receipt leads there."""
    evidence = made()
    certificate, receipt = evidence.certificate, evidence.receipt(0)
    certificate.check(receipt)
    changed = {"plan": made(sigma=1.0).plan, "steps": 3, "key_fingerprint": "0" * 32}
    for name, value in changed.items():
        with pytest.raises(CertificateError, match="does not belong"):
            replace(certificate, **{name: value}).check(receipt)


def test_steps_beyond_those_that_were_taken_are_refused():
    """Of a certificate of fewer steps than its own record has: the plan would allow them."""
    evidence = made()
    receipt = evidence.receipt(0)
    assert receipt.steps == (0, 2)
    for taken in (3, 4):
        receipt.check(evidence.plan, taken, "claim", receipt.root("claim"))
    for taken in (0, 1, 2):
        with pytest.raises(CertificateError, match=f"must rise, from 0 to {taken - 1} at most"):
            receipt.check(evidence.plan, taken, "claim", receipt.root("claim"))


def test_steps_that_break_the_plan_are_refused(tmp_path):
    """A record that kept to a looser rule, under a certificate that claims a stricter one: its owner has all keys."""
    loose = made(MinSeparation(4, 1), [[5], [5], [1], [2]])
    path, own = saved(tmp_path, replace(made(), ledger=loose.ledger), 5)
    with pytest.raises(CertificateError, match="break the plan"):
        ao.verify(path, receipt=own)


@pytest.mark.parametrize("taken", [1, 2])
def test_steps_beyond_those_taken_are_refused(taken):
    """Its owner has the key of the tree: a root that leads to steps which the certificate says were never taken."""
    evidence = made()
    receipt = evidence.receipt(0)
    assert receipt.steps == (0, 2)
    root = receipt.root("claim")
    receipt.check(evidence.plan, 3, "claim", root)
    with pytest.raises(CertificateError, match=f"must rise, from 0 to {taken - 1} at most"):
        receipt.check(evidence.plan, taken, "claim", root)


@pytest.mark.parametrize(
    "rule",
    [SingleEpoch(4), FixedOrder(4, 2, 2), EpochShuffle(2, 2), MinSeparation(4, 2), MinSeparation(4, 1, 2)],
    ids=str,
)
def test_steps_are_allowed_if_they_are_within_a_pattern(rule):
    patterns = [set(pattern) for pattern in rule.patterns()]
    for size in range(1, 5):
        for steps in combinations(range(4), size):
            assert allows(rule, steps) == any(pattern.issuperset(steps) for pattern in patterns)
            known = KnownOrder([[u for u, pattern in enumerate(patterns) if t in pattern] for t in range(4)])
            assert allows(known, steps) == allows(rule, steps)


def test_a_plan_has_no_receipts_and_a_certificate_is_none(tmp_path):
    path, own = saved(tmp_path, made(), 0)
    made().plan.save(tmp_path / "plan.json")
    with pytest.raises(CertificateError, match="is a plan"):
        ao.verify(tmp_path / "plan.json", receipt=own)
    with pytest.raises(CertificateError, match="anyorder-receipt/1"):
        ao.verify(path, receipt=path)


def test_the_evidence_must_lead_to_the_same_root(tmp_path):
    evidence = made()
    evidence.certificate.save(tmp_path / "c.json")
    rewritten(tmp_path / "c.json", lambda d: d["run"].update(receipt_root="0" * 64))
    evidence.save(tmp_path / "e.json")
    rewritten(tmp_path / "e.json", lambda d: d.update(receipt_root="0" * 64))
    with pytest.raises(CertificateError, match="another record"):
        ao.verify(tmp_path / "c.json", evidence=tmp_path / "e.json")


def test_evidence_of_more_units_than_a_file_is_given_is_refused(tmp_path, monkeypatch):
    evidence = made()
    evidence.save(tmp_path / "e.json")
    monkeypatch.setattr(formats, "MAX_OPERATIONS", 4 * 5120 - 1)
    with pytest.raises(CertificateError, match=r"tree of all receipts.*--large"):
        Evidence.load(tmp_path / "e.json", evidence.certificate)
    assert Evidence.load(tmp_path / "e.json", evidence.certificate, large=True).certificate == evidence.certificate


# -- what it tells of others -----------------------------------------------------------------------------------------


def test_certificates_and_receipts_have_one_size_whoever_took_part(tmp_path):
    full = [[0, 1], [2, 3], [0, 1], [2]]
    sizes = set()
    for history in (full, [[0], [2, 3], [0], [2]], [[0], [], [0], []], [list(range(500)), [], [0], []]):
        path, own = saved(tmp_path, made(history=history), 0)
        rewritten(own, lambda d: d.update(slot=0))  # a number of one digit or nine
        sizes.add((path.stat().st_size, own.stat().st_size))
    nobody = made(history=[[], [], [], []]).certificate
    nobody.save(tmp_path / "nobody.json")
    assert len(sizes) == 1
    assert (tmp_path / "nobody.json").stat().st_size == sizes.pop()[0]


def test_the_root_changes_with_any_units_steps():
    full = [[0, 1], [2, 3], [0, 1], [2]]
    histories = [full, [[0, 1], [2, 3], [0, 1], [3]], [[0, 1], [2, 3], [0], [2]], [[0, 1], [2, 3], [0, 1], []], []]
    roots = {made(history=history).certificate.receipt_root for history in histories}
    assert len(roots) == len(histories)


def test_units_that_a_text_could_mix_up_have_their_own_leaves():
    """Ids that differ in trailing zero bytes, and an id that ends in what another's steps begin with."""
    steps = (0).to_bytes(8, "little").decode()
    evidence = made(MinSeparation(4, 1), [["a", "a\0"], ["a" + steps], ["a"], []])
    assert [receipt.steps for receipt in evidence.receipts(["a", "a\0", "a" + steps])] == [(0, 2), (0,), (1,)]
    for receipt in evidence.receipts(["a", "a\0", "a" + steps]):
        evidence.certificate.check(receipt)
    with pytest.raises(CertificateError, match="does not belong"):
        evidence.certificate.check(replace(evidence.receipt("a" + steps), unit="a", steps=(0, 1)))


def test_the_root_is_made_of_leaf_nodes_and_claim_each_under_its_own_tag():
    """As the file's head has it: no leaf is a node, no node a root."""
    evidence = made()
    receipt, plan = evidence.receipt(0), evidence.plan.digest
    node = sha256(b"\0" + receipt.salt + b"i" + bytes(8) + bytes(8) + (2).to_bytes(8, "little")).digest()
    for level in range(10):
        place = receipt.slot // 8**level % 8
        children = [receipt.path[32 * i : 32 * (i + 1)] for i in range(7 * level, 7 * level + 7)]
        node = sha256(b"\1" + b"".join([*children[:place], node, *children[place:]])).digest()
    claim = json.dumps({"key": "f" * 32, "plan": plan, "steps": 4}, separators=(",", ":"))
    assert sha256(b"\2" + node + claim.encode()).hexdigest() == evidence.certificate.receipt_root


@pytest.mark.parametrize(("name", "digest"), [("i", "f23e243958aa7a7b"), ("s", "619fe186a21c2ef6")])
@pytest.mark.usefixtures("way")
def test_trees_are_those_of_the_versions_before(name, digest):
    """A certificate that was given out stands for the same receipts: 20 000 units fill several parts of a level."""
    numbers = np.random.default_rng(1).integers(-(1 << 62), 1 << 62, 20_000)
    people = numbers if name == "i" else [f"{i}" for i in range(20_000)]
    evidence = made(MinSeparation(4, 1), [people[:15_000], people[5_000:], people[:3], []], batch_size=20_000)
    parts = [evidence.certificate.receipt_root]
    parts += [f"{r.unit} {r.steps} {r.slot} {r.salt.hex()} {r.path.hex()}" for r in evidence.receipts(people[::1500])]
    assert sha256("".join(parts).encode()).hexdigest()[:16] == digest


FIPS_180_4 = {  # the examples that NIST publishes for it, and the text of no bytes
    b"": "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855",
    b"abc": "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad",
    b"abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq": "248d6a61d20638b8e5c026930c3e6039"
    "a33ce45964ff2167f6ecedd419db06c1",
    b"abcdefghbcdefghicdefghijdefghijkefghijklfghijklmghijklmnhijklmnoijklmnopjklmnopqklmnopqrlmnopqrsmnopqrst"
    b"nopqrstu": "cf5b16a778af8380036ce59e7b0492370b249b11e8f07a51afac45037afee9d1",
    b"a" * 10**6: "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0",
}


def test_sha256_of_the_library_is_that_of_fips_180_4(way):
    if way == "hashlib":
        digests = {text: sha256(text).hexdigest() for text in FIPS_180_4}
    else:
        digests, digest = {}, np.empty(32, np.uint8)
        for text in FIPS_180_4:
            trees._library().anyorder_sha256(text, ctypes.c_uint64(len(text)), trees.Memory.from_param(digest))
            digests[text] = digest.tobytes().hex()
    assert digests == FIPS_180_4


def histories():
    """Of units with few and many steps, ids short and long, as many as fill a part of a level, or end one."""
    random = np.random.default_rng(3)
    yield [[-(1 << 63), (1 << 63) - 1]]
    yield [[""], ["", "\0" * 300, "\ud800", "a\u00e9"], ["\u00e9" * 70]]
    yield [np.flatnonzero(random.random(40) < share) for share in random.random(700) ** 3]
    yield [[f"{i}" * (i % 40) for i in np.flatnonzero(random.random(300) < 0.3)] for _ in range(20)]
    yield [np.arange(8193)]
    yield [np.arange(40_000), np.arange(100)]


def test_trees_of_the_library_are_those_of_hashlib(way, monkeypatch):
    for history in histories():
        ledger = replay(MinSeparation(len(history), 1), history)
        tree = trees.ReceiptTree(ledger, KEY)
        wanted = np.unique(np.linspace(0, len(tree.units) - 1, 50).astype(np.int64))[::-1]
        found = tree.root(""), tree.paths(wanted).tobytes(), tree.paths(wanted[:1]).tobytes()
        with monkeypatch.context() as other:
            other.setattr(trees, "_library", lambda: None)
            tree = trees.ReceiptTree(ledger, KEY)
            assert found == (tree.root(""), tree.paths(wanted).tobytes(), tree.paths(wanted[:1]).tobytes())


def test_any_number_of_threads_makes_the_same_tree(monkeypatch):
    if trees._library() is None:
        pytest.skip("no compiled library")
    tree, roots = trees.ReceiptTree(replay(SingleEpoch(1), [range(300_000)]), KEY), set()
    for number in ("1", "2", "5"):
        monkeypatch.setenv("OMP_NUM_THREADS", number)
        roots.add(tree.root(""))
    assert len(roots) == 1


def test_streams_are_not_used_for_two_records():
    """A unit that has its salt of an early certificate cannot try leaves of a later one with it."""
    early, late = made(history=[[0, 1], [2, 3]]), made(history=[[0, 1], [2, 3], [0, 1]])
    first, second = early.receipts(range(4)), late.receipts(range(4))
    assert not {r.salt for r in first} & {r.salt for r in second}
    assert not {r.slot for r in first} & {r.slot for r in second}
    parts = [r.path[i : i + 32] for r in (first[0], second[0]) for i in range(0, len(r.path), 32)]
    assert len(set(parts)) == len(parts)


def guesses(receipt, unit, steps):
    """Leaves of another unit, as one could try them who has a receipt and knows how leaves are made."""
    body = b"i" + unit.to_bytes(8, "little") + b"".join(t.to_bytes(8, "little") for t in steps)
    parts = [receipt.path[i : i + 32] for i in range(0, len(receipt.path), 32)]
    return {sha256(b"\0" + salt + body).digest() for salt in (receipt.salt, bytes(32), b"", *parts)}


def test_a_path_lets_nobody_try_what_another_unit_did(monkeypatch):
    """In a tree of two leaves under one node, where the other leaf does stand in the path."""
    monkeypatch.setattr(sys.modules["anyorder.plan.receipt"], "_slots", lambda key, count: np.arange(count))
    evidence = made(history=[[0], [1], [0], []])
    mine, other = evidence.receipts([0, 1])
    evidence.certificate.check(mine)
    leaf = sha256(b"\0" + other.salt + b"i" + (1).to_bytes(8, "little") + (1).to_bytes(8, "little")).digest()
    siblings = {mine.path[i : i + 32] for i in range(0, len(mine.path), 32)}
    assert leaf in siblings  # with its salt it is recognised, so the guesses below are of the right form
    for steps in ((), (1,), (3,), (1, 3)):
        assert not guesses(mine, 1, steps) & siblings


def test_a_path_does_not_tell_which_siblings_have_leaves():
    """Of many units every sibling is another 32 bytes, with as many ones as chance gives."""
    evidence = made(SingleEpoch(1), [range(1000)])
    receipts = evidence.receipts(range(50))
    for receipt in receipts:
        evidence.certificate.check(receipt)
    assert {len(r.path) for r in receipts} == {2240}
    lowest = {r.path[i : i + 32] for r in receipts for i in range(0, 4 * 224, 32)}
    assert len(lowest) == 50 * 28  # nobody shares the lower levels: no sibling is a constant
    ones = sum(int.from_bytes(part, "little").bit_count() for part in lowest)
    assert abs(ones / (256 * len(lowest)) - 0.5) < 0.005
    slots = [r.slot for r in receipts]
    assert slots != sorted(slots)
    assert min(slots) < 1 << 28 < 3 << 28 < max(slots)


def test_only_the_key_of_the_record_makes_the_tree():
    one, other = made(key=KEY), made(key=bytes(32))
    assert one.certificate.receipt_root != other.certificate.receipt_root
    assert one.receipt(0).salt != other.receipt(0).salt


def test_certificates_with_receipts_load(tmp_path):
    path, _ = saved(tmp_path, made(), 0)
    assert Certificate.load(path) == made().certificate


def test_a_certificate_takes_few_bytes_for_each_unit():
    """A root needs one level of the tree at a time: 570 bytes a unit were held, of runs on files that are not."""
    evidence = made(MinSeparation(1, 1), [list(range(30_000))])
    tracemalloc.start()
    root = evidence.certificate.receipt_root
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert most < 400 * 30_000
    evidence.certificate.check(evidence.receipt(7))  # of the tree that is kept for receipts
    assert evidence.certificate.receipt_root == root


@pytest.mark.parametrize(("history", "absent"), [([[1], [5]], [3]), ([["a"], ["c"]], ["b"])])
def test_nobody_gets_the_receipt_of_the_next_unit(history, absent):
    tree = trees.ReceiptTree(replay(MinSeparation(4, 2), history), KEY)
    with pytest.raises(ArgumentError, match="took part in none"):
        tree.find(as_units(absent))


def test_steps_of_a_receipt_rise():
    evidence = made()
    forged = replace(evidence.receipt(0), steps=(0, 0))
    with pytest.raises(CertificateError, match="must rise"):
        forged.check(evidence.plan, 4, "x", forged.root("x"))
