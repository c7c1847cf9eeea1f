"""Certificates: verified from the file alone, and any alteration shows."""

import base64
import json

import pytest

import anyorder as ao
from anyorder._sealed import save_json
from anyorder.certificate import FORMAT, Certificate
from anyorder.errors import CertificateError
from anyorder.ledger import Ledger
from anyorder.participation import FixedOrder, MinSeparation, PoissonSampling
from anyorder.strategy import Tree


def made(participation=None, history=((0, 1), (2, 3), (0, 1), (2,)), **changes):
    participation = participation or FixedOrder(4, k=2, b=2)
    settings = {"participation": participation, "batch_size": 2, "epsilon": 3.0, "delta": 1e-6, "mechanism": "tree"}
    plan = ao.plan(**{**settings, **changes})
    ledger = Ledger(participation)
    for t, units in enumerate(history):
        ledger.record(t, list(units))
    return Certificate.of(plan, ledger, "f" * 32)


def rewritten(path, change):
    """The file with a change, and with its hash made anew: only the content can give it away."""
    data = json.loads(path.read_text())
    del data["sha256"]
    change(data)
    save_json(path, data)


def test_a_certificate_verifies_from_its_file(tmp_path):
    path = tmp_path / "run.privacy.json"
    certificate = made()
    certificate.save(path)
    checked = ao.verify(path)
    assert checked.plan == certificate.plan
    assert checked.certificate.steps == 4
    assert checked.certificate.ledger.digest() == certificate.ledger.digest()


def test_a_run_that_stopped_early_verifies(tmp_path):
    made(history=((0, 1),)).save(tmp_path / "c.json")
    assert ao.verify(tmp_path / "c.json").certificate.steps == 1


def test_a_plan_file_verifies(tmp_path):
    made().plan.save(tmp_path / "plan.json")
    assert ao.verify(tmp_path / "plan.json").certificate is None


def test_poisson_certificate(tmp_path):
    made(PoissonSampling(4, 0.5), mechanism="independent").save(tmp_path / "c.json")
    assert ao.verify(tmp_path / "c.json").plan.amplified


def test_keys_of_people_are_not_shown(tmp_path):
    path = tmp_path / "c.json"
    made(MinSeparation(4, 2), history=(["ann"], ["bob"], ["ann", "cy"])).save(path)
    assert [list(units) for units in ao.verify(path).certificate.ledger.history()] == [[0], [1], [0, 2]]
    raw = base64.b64decode(json.loads(path.read_text())["run"]["ledger"])
    assert b"ann" not in raw + path.read_bytes()


@pytest.mark.parametrize(
    "change",
    [
        lambda d: d["claims"].update(epsilon=2.9),
        lambda d: d["claims"].update(mu=d["claims"]["mu"] * 0.99),
        lambda d: d["claims"].update(noise_std=d["claims"]["noise_std"] * 2),
        lambda d: d["claims"].update(sensitivity=1.0),
        lambda d: d["plan"].update(sigma=d["plan"]["sigma"] / 2),
        lambda d: d["plan"].update(delta=1e-7),
        lambda d: d["plan"].update(clip_norm=2.0),
        lambda d: d["plan"]["participation"].update(k=3, n=4, b=1),
        lambda d: d["plan"]["strategy"].update(n=5),
        lambda d: d["plan"]["strategy"].update(estimator="magic"),
        lambda d: d["run"].update(steps=3),
        lambda d: d["run"].update(ledger_digest="0" * 64),
        lambda d: d["run"].update(ledger=d["run"]["ledger"][:-8] + "AAAAAAA="),
        lambda d: d["run"].pop("ledger"),
        lambda d: d.pop("run"),
        lambda d: d.pop("claims"),
        lambda d: d.update(plan=[]),
    ],
)
def test_alterations_are_caught_even_with_a_new_hash(tmp_path, change):
    path = tmp_path / "c.json"
    made(mechanism=Tree(4, "online", restarts=(2,), completion=True)).save(path)
    ao.verify(path)
    rewritten(path, change)
    with pytest.raises(CertificateError):
        ao.verify(path)


def test_every_byte_of_the_file_is_under_the_hash(tmp_path):
    path = tmp_path / "c.json"
    made().save(path)
    text = path.read_text()
    for i in range(0, len(text), 7):
        if text[i].isdigit():
            path.write_text(text[:i] + str((int(text[i]) + 1) % 10) + text[i + 1 :])
            with pytest.raises(CertificateError):
                ao.verify(path)


def test_a_record_in_which_a_unit_takes_part_too_often_is_refused(tmp_path):
    """The record obeys the rule under which it was made; the file claims a stricter one."""
    path = tmp_path / "c.json"
    loose = made(MinSeparation(4, 1), history=([0], [0], [1], [2]))
    strict = made(FixedOrder(4, k=2, b=2), history=())
    strict.save(path)
    loose_path = tmp_path / "loose.json"
    loose.save(loose_path)
    record = json.loads(loose_path.read_text())["run"]
    rewritten(path, lambda d: d.update(run=record))
    with pytest.raises(CertificateError, match="step 1"):
        ao.verify(path)


def test_unknown_formats_and_missing_files(tmp_path):
    with pytest.raises(CertificateError, match="cannot read"):
        ao.verify(tmp_path / "absent.json")
    save_json(tmp_path / "other.json", {"format": "else/1"})
    with pytest.raises(CertificateError, match=FORMAT):
        ao.verify(tmp_path / "other.json")
    with pytest.raises(CertificateError, match="cannot write"):
        made().save(tmp_path / "no folder" / "c.json")
