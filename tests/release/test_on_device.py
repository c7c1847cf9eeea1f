"""What is trusted to devices: the plan says it, the core learns no ids, and files show it."""

import dataclasses
import json

import numpy as np
import pytest

import anyorder as ao
from anyorder.app.cards import verdict
from anyorder.errors import ArgumentError, CertificateError, CheckpointError, PlanError, StepsExhaustedError
from anyorder.participation import EpochShuffle, FixedOrder, KnownOrder, MinSeparation, PoissonSampling, SingleEpoch
from release.runs import KEY, SIZE, planned, state, total

RULE = MinSeparation(8, b=3, k=2)
RECORD = {"participation": RULE, "unit": "user", "on_device": ("record",)}


def test_a_plan_that_trusts_nothing_is_as_it_always_was():
    plan = planned(participation=RULE)
    assert "on_device" not in plan.to_dict()
    assert plan.digest == dataclasses.replace(plan, on_device=()).digest
    assert plan.digest == "4357cceb269dc35e80a90da3fe40f7ba8596fbe51b7edd75383e5f7a75fb04bf"
    assert "trusts" not in dict(plan.facts())
    with pytest.raises(CertificateError):  # not in the form that plans are saved
        ao.Plan.from_dict({**plan.to_dict(), "on_device": []})


@pytest.mark.parametrize("words", [("clipping",), ("record",), ("record", "clipping")])
def test_plan_card_and_file_say_what_is_trusted(words, tmp_path):
    plan = planned(**{**RECORD, "on_device": words})
    assert plan.on_device == tuple(sorted(words))
    assert plan.digest != planned(participation=RULE, unit="user").digest
    plan.save(tmp_path / "plan.json")
    assert ao.Plan.load(tmp_path / "plan.json") == plan
    card = dict(plan.facts())["trusts"]
    assert ("clip its own message" in card) == ("clipping" in words)
    assert ("the server learns no ids" in card) == ("record" in words)
    assert card in " ".join(verdict(ao.verify(tmp_path / "plan.json"))[1])
    data = json.loads((tmp_path / "plan.json").read_text())["plan"]
    for wrong in (["record", "record"], ["noise"], "record", None, [1], {"record": 1}):
        with pytest.raises(CertificateError):
            ao.Plan.from_dict({**data, "on_device": wrong})


@pytest.mark.parametrize("wrong", ["record", ("records",), ("record", "record"), None, 3, (None,), {"record"}])
def test_other_words_are_refused(wrong):
    with pytest.raises(ArgumentError, match="on_device"):
        planned(ao.mechanism("tree", on_device=wrong), participation=RECORD["participation"], unit="user")


@pytest.mark.parametrize("rule", [
    FixedOrder(8, 2, 4), EpochShuffle(2, 4), KnownOrder([[1]] * 8), PoissonSampling(8, 0.5)
])  # fmt: skip
def test_the_record_is_on_devices_only_where_a_counter_and_a_timer_can_keep_it(rule):
    with pytest.raises(PlanError, match="counter and a timer"):
        planned("auto", participation=rule, on_device=("record",))
    assert planned("auto", participation=rule, on_device=("clipping",)).on_device == ("clipping",)
    assert planned(participation=SingleEpoch(8), on_device=("record",)).on_device == ("record",)


def test_the_core_learns_no_ids_and_takes_nobody_for_no_zero():
    plan = planned(**RECORD)
    named, unnamed = planned(participation=RULE, unit="user"), ao.Release(plan, SIZE, key=KEY)
    before = state(unnamed)
    for ids in ([1], ["ada"], np.array([3])):
        with pytest.raises(ArgumentError, match="None or empty"):
            unnamed.step(ids, total(0))
        with pytest.raises(ArgumentError, match="None or empty"):
            unnamed.check(ids)
    assert state(unnamed) == before
    with pytest.raises(ArgumentError, match="must be zero"):
        ao.Release(named, SIZE, key=KEY).step([], total(0))
    with pytest.raises(ArgumentError, match="got None"):
        ao.Release(named, SIZE, key=KEY).step(None, total(0))
    for t in range(plan.n):
        made = unnamed.step(None if t % 2 else [], total(t))
        assert not np.allclose(made * plan.batch_size, total(t), atol=plan.noise_std / 100)
    with pytest.raises(StepsExhaustedError):
        unnamed.step(None, total(0))
    assert [len(ids) for ids in unnamed.ledger.history()] == [0] * plan.n


def test_a_resumed_release_repeats_a_lost_step_of_nobody(tmp_path):
    plan, path = planned(**RECORD), tmp_path / "run.pt"
    with ao.Release(plan, SIZE, key=KEY, checkpoint=path) as release:
        release.save()
        first = release.step(None, total(0))
    with ao.Release(plan, SIZE, checkpoint=path) as again:
        with pytest.raises(CheckpointError, match="other data"):
            again.step(None, total(1))
        assert np.array_equal(again.step(None, total(0)), first)
        again.save()
    with pytest.raises(CheckpointError, match=r"different: on_device"):
        ao.Release(planned(participation=RULE, unit="user"), SIZE, checkpoint=path)


def test_certificate_and_evidence_name_nobody(tmp_path):
    release = ao.Release(planned(**RECORD), SIZE, key=KEY)
    for t in range(4):
        release.step(None, total(t))
    release.certificate().save(tmp_path / "c.json")
    release.evidence().save(tmp_path / "e.json")
    checked, unseen = verdict(ao.verify(tmp_path / "c.json", evidence=tmp_path / "e.json"))
    assert "names nobody" in " ".join(checked)
    assert "kept to the order" not in " ".join(checked)
    assert "each device to count and time" in " ".join(unseen)
    with pytest.raises(ArgumentError, match="no receipts"):
        release.evidence().receipt(1)


def test_evidence_that_names_somebody_is_refused(tmp_path):
    """Even where all else agrees: who writes it says that the core learnt no ids."""
    release = ao.Release(planned(**RECORD), SIZE, key=KEY)
    evidence = release.evidence()
    evidence.ledger.record(0, [7])
    evidence.certificate.save(tmp_path / "c.json")
    evidence.save(tmp_path / "e.json")
    with pytest.raises(CertificateError, match="names units"):
        ao.verify(tmp_path / "c.json", evidence=tmp_path / "e.json")


def test_the_engine_sees_all_and_trusts_no_devices():
    for words in (("clipping",), ("record",)):
        with pytest.raises(PlanError, match="the engine sees every example"):
            ao.PrivacyEngine(planned(**{**RECORD, "on_device": words}))
