"""Certificates say what was claimed and name nobody; evidence says who took part, and must be the certificate's own."""

import base64
import json
import os
import re
import stat
from dataclasses import replace

import numpy as np
import pytest

import anyorder as ao
from anyorder.errors import ArgumentError, CertificateError, ParticipationError
from anyorder.formats import save_json
from anyorder.ledger import replay
from anyorder.participation import FixedOrder, KnownOrder, MinSeparation, PoissonSampling
from anyorder.plan.certificate import FORMAT, Certificate, Evidence
from anyorder.plan.receipt import ReceiptTree
from anyorder.strategy import Tree
from plans import flat_plan

KEY = bytes(range(32))


def made(participation=None, history=((0, 1), (2, 3), (0, 1), (2,)), key=KEY, **changes):
    """The evidence of a run; its certificate is a property of it."""
    participation = participation or FixedOrder(4, k=2, b=2)
    settings = {"participation": participation, "batch_size": 2, "epsilon": 3.0, "delta": 1e-6, "mechanism": "tree"}
    plan = flat_plan(**{**settings, **changes})
    return Evidence(plan, replay(participation, history), "f" * 32, key)


def saved(folder, evidence):
    """(certificate's path, evidence's path)."""
    paths = folder / "run.privacy.json", folder / "run.evidence.json"
    evidence.certificate.save(paths[0])
    evidence.save(paths[1])
    return paths


def rewritten(path, change):
    """The file with a change, and with its hash made anew: only the content can give it away."""
    data = json.loads(path.read_text())
    del data["sha256"]
    change(data)
    save_json(path, data)


# -- the claim -------------------------------------------------------------------------------------------------------


def test_a_certificate_verifies_from_its_file(tmp_path):
    evidence = made()
    path, _ = saved(tmp_path, evidence)
    checked = ao.verify(path)
    assert checked.plan == evidence.plan
    assert checked.certificate == evidence.certificate == Certificate.load(path)
    assert checked.certificate.steps == 4
    assert checked.evidence is None
    assert checked.certificate.epsilon == evidence.plan.epsilon


def test_a_run_that_stopped_early_verifies(tmp_path):
    path, _ = saved(tmp_path, made(history=((0, 1),)))
    assert ao.verify(path).certificate.steps == 1


def test_a_plan_file_verifies(tmp_path):
    made().plan.save(tmp_path / "plan.json")
    assert ao.verify(tmp_path / "plan.json").certificate is None
    with pytest.raises(CertificateError, match="is a plan"):
        ao.verify(tmp_path / "plan.json", evidence=tmp_path / "plan.json")


ANY_HISTORIES = {
    "poisson": (PoissonSampling(4, 0.5), [[7, 8], [], [7], [7]], [[8], [7, 9], [], [8, 9]]),
    "keys": (MinSeparation(4, 2), [["ann"], ["bob"], ["ann", "cy"]], [["dan"], [], ["eve"]]),
    "phones": (FixedOrder(4, 2, 2), [[4915112345678], [2], [4915112345678]], [[1], [4915187654321], []]),
}


@pytest.mark.parametrize("case", ANY_HISTORIES)
def test_the_certificate_tells_nothing_of_the_record(case, tmp_path):
    """Two runs of one plan differ, for those without the key, in two digests and the file's hash only."""
    rule, first, second = ANY_HISTORIES[case]
    changes = {"mechanism": "independent"} if case == "poisson" else {}
    shown = []
    for name, history in (("a", first), ("b", second)):
        (tmp_path / name).mkdir()
        path, _ = saved(tmp_path / name, made(rule, history, **changes))
        data = json.loads(path.read_text())
        assert set(data["run"]) == {"steps", "key_fingerprint", "record_digest", "receipt_root"}
        shown.append(data)
        for unit in {str(unit) for step in history for unit in step}:
            assert not re.search(rf'["\s]{unit}["\s,]', json.dumps(data["run"]))
    for name in ("record_digest", "receipt_root"):
        assert shown[0]["run"].pop(name) != shown[1]["run"].pop(name)
    assert shown[0].pop("sha256") != shown[1].pop("sha256")
    assert shown[0] == shown[1]


def test_the_digest_of_the_record_cannot_be_made_without_the_key():
    assert made(key=KEY).certificate.record_digest != made(key=bytes(32)).certificate.record_digest


def test_a_known_order_is_shown_by_its_structure_alone(tmp_path):
    """Orders that are equal but for the names of their units give one file, whatever order the names sort in."""
    rows = [["ann", "bob"], ["cy", "bob"], ["ann"], []]
    files = []
    for named in (("ann", "bob", "cy"), ("zoe", "ada", "max"), (3, 9, 1)):
        names = dict(zip(("ann", "bob", "cy"), named, strict=True))
        order = KnownOrder([[names[unit] for unit in row] for row in rows])
        evidence = made(order, order_history(order))
        path, other = saved(tmp_path, evidence)
        evidence.plan.save(tmp_path / "plan.json")
        files.append((json.loads(path.read_text())["plan"], (tmp_path / "plan.json").read_text()))
        assert "zoe" not in path.read_text() + files[-1][1]
        back = ao.verify(path, evidence=other)
        assert back.evidence.plan == evidence.plan != back.plan
        assert back.plan.claims() == evidence.plan.claims()
        assert list(map(list, back.evidence.ledger.history())) == list(map(list, evidence.ledger.history()))
    assert files[0] == files[1] == files[2]
    shown = ao.Plan.load(tmp_path / "plan.json")
    assert shown == evidence.plan.public() == shown.public()
    assert replace(shown, participation=order) == evidence.plan


def order_history(order):
    return [order.units[order.indices[order.steps == t]].tolist() for t in range(order.n)]


@pytest.mark.parametrize(
    "change",
    [
        lambda d: d["claims"].update(epsilon=2.9),
        lambda d: d["claims"].update(mu=d["claims"]["mu"] * 0.99),
        lambda d: d["claims"].update(noise_std=d["claims"]["noise_std"] * 2),
        lambda d: d["claims"].update(sensitivity=1.0),
        lambda d: d["claims"].update(sensitivity_exact=1),
        lambda d: d["plan"].update(sigma=d["plan"]["sigma"] / 2),
        lambda d: d["plan"].update(delta=1e-7),
        lambda d: d["plan"].update(clip_norm=2.0),
        lambda d: d["plan"].update(clip_norm="1.0"),
        lambda d: d["plan"].update(colour="red"),
        lambda d: d["plan"]["participation"].update(k=3, n=4, b=1),
        lambda d: d["plan"]["participation"].update(colour="red"),
        lambda d: d["plan"]["strategy"].update(n=5),
        lambda d: d["plan"]["strategy"].update(estimator="magic"),
        lambda d: d["plan"]["strategy"].update(colour="red"),
        lambda d: d["plan"]["workload"].update(nesterov=0),
        lambda d: d["plan"]["workload"].update(colour="red"),
        lambda d: d["run"].update(steps=5),
        lambda d: d["run"].update(steps=-1),
        lambda d: d["run"].update(steps=True),
        lambda d: d["run"].update(steps="4"),
        lambda d: d["run"].update(record_digest="0" * 63),
        lambda d: d["run"].update(key_fingerprint="\x1b[2J" * 8),
        lambda d: d["run"].update(ledger="AAAA"),
        lambda d: d["run"].pop("record_digest"),
        lambda d: d["run"].update(receipt_root="0" * 63),
        lambda d: d["run"].pop("receipt_root"),
        lambda d: d.pop("run"),
        lambda d: d.pop("claims"),
        lambda d: d.update(plan=[]),
        lambda d: d.update(colour="red"),
    ],
)
def test_alterations_are_caught_even_with_a_new_hash(tmp_path, change):
    path, _ = saved(tmp_path, made(mechanism=Tree(4, "online", restarts=(2,), completion=True)))
    ao.verify(path)
    rewritten(path, change)
    with pytest.raises(CertificateError):
        ao.verify(path)


@pytest.mark.parametrize("name", ["epsilon", "mu", "noise_std", "sensitivity"])
def test_claims_hold_to_the_ninth_digit(tmp_path, name):
    """Other libraries may differ in the last digits, not in these."""
    path, _ = saved(tmp_path, made())
    value = made().plan.claims()[name]
    for error, good in ((1e-12, True), (-1e-12, True), (5e-9, False), (-5e-9, False), (1e-4, False), (-1e-4, False)):
        rewritten(path, lambda d, error=error: d["claims"].update({name: value * (1 + error)}))
        if good:
            ao.verify(path)
        else:
            with pytest.raises(CertificateError, match=name):
                ao.verify(path)


def test_every_byte_of_the_file_is_under_the_hash(tmp_path):
    path, _ = saved(tmp_path, made())
    text = path.read_text()
    for i in range(0, len(text), 7):
        if text[i].isdigit():
            path.write_text(text[:i] + str((int(text[i]) + 1) % 10) + text[i + 1 :])
            with pytest.raises(CertificateError):
                ao.verify(path)


# -- the evidence ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", ANY_HISTORIES)
def test_evidence_verifies_with_its_certificate(case, tmp_path):
    rule, history, _ = ANY_HISTORIES[case]
    evidence = made(rule, history, **({"mechanism": "independent"} if case == "poisson" else {}))
    path, other = saved(tmp_path, evidence)
    found = ao.verify(path, evidence=other).evidence
    assert [sorted(step) for step in found.ledger.history()] == [sorted(step) for step in history]
    assert found.certificate == evidence.certificate


def test_evidence_is_for_its_owner_alone(tmp_path):
    previous = os.umask(0)
    try:
        _, path = saved(tmp_path, made())
        _, path = saved(tmp_path, made())  # replaced, too
    finally:
        os.umask(previous)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert sorted(os.listdir(tmp_path)) == ["run.evidence.json", "run.privacy.json"]
    assert KEY.hex() not in repr(made()) + repr(made().certificate)


@pytest.mark.parametrize(
    ("other", "phrase"),
    [
        ({"epsilon": 2.0}, "plan_digest"),
        ({"history": ((0, 1),)}, "steps"),
        ({"key": bytes(32)}, "record_digest"),
        ({"history": ((0, 1), (2, 3), (0, 1), (3,))}, "record_digest"),
    ],
)
def test_evidence_of_another_run_is_refused(other, phrase, tmp_path):
    path, _ = saved(tmp_path, made())
    (tmp_path / "other").mkdir()
    _, wrong = saved(tmp_path / "other", made(**other))
    with pytest.raises(CertificateError, match=phrase):
        ao.verify(path, evidence=wrong)


def forged(evidence):
    return base64.b64encode(evidence.ledger.to_bytes()).decode()


@pytest.mark.parametrize(
    "change",
    [
        lambda d: d.update(ledger=forged(made(history=((0, 1), (2, 3), (0, 1), (3,))))),  # another record, same rule
        lambda d: d.update(record_key="00" * 32),
        lambda d: d.update(record_key="00"),
        lambda d: d.update(ledger=d["ledger"][:-8] + "AAAAAAA="),
        lambda d: d.update(ledger=7),
        lambda d: d.update(steps=4.0),
        lambda d: d.update(names=[]),
        lambda d: d.update(colour="red"),
        lambda d: d.pop("ledger"),
    ],
)
def test_altered_evidence_is_refused_even_with_a_new_hash(change, tmp_path):
    path, other = saved(tmp_path, made())
    rewritten(other, change)
    with pytest.raises(CertificateError):
        ao.verify(path, evidence=other)


@pytest.mark.parametrize("names", [None, [], ["a"], ["a", "a"], ["a", "b", "c"], ["b", "a"], [1, 2], "ab", {"a": 1}])
def test_names_of_a_known_order_are_those_that_it_was_made_of(names, tmp_path):
    order = KnownOrder([["a"], ["b"], ["a"], []])
    path, other = saved(tmp_path, made(order, order_history(order)))
    assert json.loads(other.read_text())["names"] == ["a", "b"]
    rewritten(other, lambda d: d.update(names=names))
    with pytest.raises(CertificateError):
        ao.verify(path, evidence=other)


def test_evidence_of_a_run_that_broke_the_rule_is_refused_and_nobody_named(tmp_path):
    """The record obeys the rule under which it was made; the certificate claims a stricter one."""
    strict = made(FixedOrder(4, k=2, b=2), history=())
    loose = made(MinSeparation(4, 1), history=([77123], [77123], [1], [2]))
    lie = replace(strict, ledger=loose.ledger)  # certificate and evidence of a liar, who has all the keys
    path, other = saved(tmp_path, lie)
    assert ao.verify(path).certificate.steps == 4  # the public file alone cannot tell
    with pytest.raises(CertificateError, match="step 1") as caught:
        ao.verify(path, evidence=other)
    assert "77123" not in str(caught.value)


# -- files -----------------------------------------------------------------------------------------------------------


def test_unknown_formats_and_missing_files(tmp_path):
    with pytest.raises(CertificateError, match="cannot read"):
        ao.verify(tmp_path / "absent.json")
    save_json(tmp_path / "other.json", {"format": "else/1"})
    with pytest.raises(CertificateError, match=FORMAT):
        ao.verify(tmp_path / "other.json")
    for save in (made().certificate.save, made().save):
        with pytest.raises(CertificateError, match="cannot write"):
            save(tmp_path / "no folder" / "c.json")


def test_certificates_that_hold_the_record_are_refused_with_a_sentence(tmp_path):
    path, _ = saved(tmp_path, made())
    rewritten(path, lambda d: d.update(format="anyorder-certificate/1"))
    with pytest.raises(CertificateError, match="old format .* as secret as the data.*engine.certificate"):
        ao.verify(path)


def test_the_tree_of_receipts_is_made_once_for_a_record(tmp_path, monkeypatch):
    trees = []

    def counted(self, ledger, key):
        trees.append(key)
        begin(self, ledger, key)

    begin = ReceiptTree.__init__
    monkeypatch.setattr(ReceiptTree, "__init__", counted)
    evidence = made(history=((0, 1), (2, 3), (0, 1)))
    saved(tmp_path, evidence)
    assert len(trees) == 1
    early = [evidence.receipt(unit) for unit in (0, 3, 1)]
    assert len(trees) == 2
    evidence.ledger.record(evidence.ledger.step, [])
    assert evidence.certificate.steps == evidence.ledger.step
    assert len(trees) == 3
    evidence.certificate.check(evidence.receipt(0))
    with pytest.raises(CertificateError, match="does not belong"):
        evidence.certificate.check(early[0])


def test_a_plan_read_from_a_file_says_why_its_units_are_not_known(tmp_path):
    """Names are left out of a file that may be shown; the refusal said that the loader had another order."""
    plan = ao.plan(order=KnownOrder([["ann", "bob"], ["cid"]]), batch_size=2, epsilon=4, delta=1e-5, unit="user")
    plan.save(tmp_path / "plan.json")
    for made, phrase in ((plan, None), (ao.Plan.load(tmp_path / "plan.json"), "make it anew from the loader")):
        with ao.Release(made, size=1) as release:
            if phrase is None:
                release.step(["ann", "bob"], np.zeros(1, np.float32))
            else:
                with pytest.raises(ParticipationError, match=phrase):
                    release.step(["ann", "bob"], np.zeros(1, np.float32))


# -- withdrawal ------------------------------------------------------------------------------------------------------


def withdrawn(tmp_path):
    """(the files' folder, the evidence) of a run whose certificate was withdrawn."""
    evidence = made()
    evidence.certificate.save(tmp_path / "run.privacy.json")
    note = evidence.withdraw(tmp_path / "run.privacy.json", "a person was in it twice")
    assert note == tmp_path / "run.privacy.withdrawn.json"
    return tmp_path, evidence


def test_a_certificate_that_its_owner_withdrew_is_refused_wherever_the_note_lies(tmp_path):
    folder, evidence = withdrawn(tmp_path)
    with pytest.raises(CertificateError, match="the owner withdrew this certificate on .*a person was in it twice"):
        ao.verify(folder / "run.privacy.json")
    later = replace(evidence, ledger=replay(evidence.plan.participation, [(0, 1)]))  # of the same run, another step
    later.certificate.save(folder / "run.privacy.json")
    with pytest.raises(CertificateError, match="the owner withdrew"):
        ao.verify(folder / "run.privacy.json")
    assert evidence.record_key.hex() not in (folder / "run.privacy.withdrawn.json").read_text()


@pytest.mark.parametrize("forged", ["of another run", "another number", "no note", "an older certificate"])
def test_a_note_that_is_not_the_owners_withdraws_nothing(forged, tmp_path):
    folder, evidence = withdrawn(tmp_path)
    note = folder / "run.privacy.withdrawn.json"
    if forged == "of another run":
        replace(evidence, record_key=bytes(31) + b"\x01").certificate.save(folder / "run.privacy.json")
    elif forged == "another number":
        data = json.loads(note.read_text())
        del data["sha256"]
        save_json(note, {**data, "shown": "0" * 64})
    elif forged == "no note":
        note.write_text("withdrawn")
    else:
        replace(evidence.certificate, withdrawal="").save(folder / "run.privacy.json")
    assert ao.verify(folder / "run.privacy.json").note


def test_only_the_runs_owner_withdraws_and_says_why_in_a_line(tmp_path):
    evidence = made()
    evidence.certificate.save(tmp_path / "run.privacy.json")
    for reason in ("", "a\nb", "x" * 501, None):
        with pytest.raises(ArgumentError, match="reason must be one line"):
            evidence.withdraw(tmp_path / "run.privacy.json", reason)
    with pytest.raises(CertificateError, match="not of this evidence's run"):
        replace(evidence, key_fingerprint="e" * 32).withdraw(tmp_path / "run.privacy.json", "why")
    assert not (tmp_path / "run.privacy.withdrawn.json").exists()
