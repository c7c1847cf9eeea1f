"""A run whose files are lost is started over: other noise, and what was released before it counts."""

import functools
import json
import math
import re
from dataclasses import replace

import numpy as np
import pytest

import anyorder as ao
import processes
from anyorder.accounting.amplification.methods import MonteCarlo
from anyorder.errors import ArgumentError, BudgetError, CertificateError, CheckpointError, PlanError
from anyorder.formats import save_json
from anyorder.plan.certificate import PUBLIC_RESTART, Certificate, Evidence, Isolation, _curve_of_start, verify
from anyorder.release.checkpoint import load
from federated.test_kills import killed_at

pytestmark = pytest.mark.usefixtures("stopped_by_load")
DELTA = 1e-5


@functools.cache
def plan(epsilon=2.0, **more):
    asked = {"dataset_size": 12, "batch_size": 2, "epochs": 2, "epsilon": epsilon, "delta": DELTA, **more}
    return ao.plan(**asked)


def take(release, steps):
    return [
        release.step([2 * (t % 6), 2 * (t % 6) + 1], np.full(3, 0.25)) for t in range(release.steps_taken, steps)
    ]  # fmt: skip


def lost(tmp_path, made, steps=3, *, keep=None):
    """A run that took steps, of whose checkpoint there is nothing, or what it was after `keep` steps."""
    path = tmp_path / "run.ckpt"
    with ao.Release(made, 3, checkpoint=path) as release:
        fingerprint = release.certificate().key_fingerprint
        if keep is not None:
            take(release, keep)
            release.save()
        before = path.read_bytes() if keep is not None else None
        released = take(release, steps)
        release.save()
    path.unlink()
    if before is not None:
        path.write_bytes(before)
    return path, fingerprint, released


def edited(path, file, edit):
    """A certificate that says something else, under a fresh checksum."""
    other = json.loads(json.dumps(file))
    edit(other)
    del other["sha256"]
    save_json(path, other)


def exact_mu(made, runs):
    """Of all that is released, by the matrices: each run is so many first steps, all on the same people."""
    c, n = np.linalg.inv(made.strategy.noising_matrix()), made.n
    worst = 0.0
    for unit in range(6):
        pattern = np.array([1.0 if t % 6 == unit else 0.0 for t in range(n)])
        worst = max(worst, sum(float(np.sum((c[:s] @ pattern) ** 2)) for s in runs))
    return math.sqrt(worst) * made.clip_norm / made.noise_std


@pytest.mark.parametrize("keep", [None, 1], ids=["gone", "older"])
@pytest.mark.parametrize("mechanism", ["independent", "dense"])
def test_a_certificate_counts_the_starts_before(tmp_path, keep, mechanism):
    made = plan(mechanism=mechanism)
    path, first, released = lost(tmp_path, made, 3, keep=keep)
    if keep is None:
        with pytest.raises(CheckpointError, match="start_over=True"):
            ao.Release(made, 3, checkpoint=path)
    with ao.Release(made, 3, checkpoint=path, start_over=True) as release:
        assert release.steps_taken == 0
        assert not np.array_equal(take(release, 1)[0], released[0])  # other noise
    with ao.Release(made, 3, checkpoint=path) as release:  # goes on, and still knows of it
        take(release, 1)
        release.save()
    with ao.Release(made, 3, checkpoint=path, start_over=True) as release:  # once more, after one step
        take(release, made.n)
        shown, stated = release.certificate(), release.certificate(public_stop=True)
        release.evidence().save(tmp_path / "evidence.json")
    assert [steps for _, steps in shown.earlier] == [3, 1]
    assert shown.earlier[0][0] == first
    assert shown.realised is None
    true = ao.accounting.Gaussian(exact_mu(made, [3, 1, made.n])).epsilon(DELTA)
    with ao.Release(made, 3) as release:
        take(release, made.n)
        realised = release.certificate().realised.to_dict()
    assert made.epsilon < true <= stated.epsilon < shown.epsilon
    assert shown.epsilon == pytest.approx(ao.compose(made, made, made).epsilon(DELTA), rel=1e-9)
    for one in (shown, stated):
        one.save(tmp_path / "c.json")
        assert Certificate.load(tmp_path / "c.json").epsilon == one.epsilon
        assert f"{one.epsilon:.2f}"[:3] in str(one).splitlines()[0]
        verify(tmp_path / "c.json", evidence=tmp_path / "evidence.json")
        file = json.loads((tmp_path / "c.json").read_text())
        for edit in (
            lambda x: x.pop("earlier"),
            lambda x: x["earlier"].update(epsilon=made.epsilon),
            lambda x: x["earlier"].update(starts=x["earlier"]["starts"][:1]),
            lambda x: x["earlier"]["starts"][0].update(steps=13),
            lambda x: x["earlier"]["starts"][0].update(key_fingerprint=x["run"]["key_fingerprint"]),
            lambda x: x["earlier"]["starts"][0].update(key_fingerprint=x["earlier"]["starts"][1]["key_fingerprint"]),
            lambda x: x.update(realised=realised),
        ):
            edited(tmp_path / "d.json", file, edit)
            with pytest.raises(CertificateError):
                verify(tmp_path / "d.json", evidence=tmp_path / "evidence.json")
            if "earlier" in (tmp_path / "d.json").read_text():  # who has no evidence sees it too
                with pytest.raises(CertificateError):
                    Certificate.load(tmp_path / "d.json")
    assert stated.stated == (PUBLIC_RESTART,)


def test_record_and_receipts_are_bound_to_the_starts(tmp_path):
    with ao.Release(plan(), 3) as release:
        take(release, 12)
        alone = release.evidence()
    for one in (alone, replace(alone, isolation=Isolation(*["by construction"] * 3, "proved"))):
        counted = replace(one, earlier=(("ab" * 16, 3),))
        assert counted.certificate.record_digest != one.certificate.record_digest
        counted.certificate.check(counted.receipt(0))
        with pytest.raises(CertificateError):
            replace(counted.certificate, earlier=()).check(counted.receipt(0))
    file = tmp_path / "c.json"
    alone.certificate.save(file)
    edited(file, json.loads(file.read_text()), lambda x: x.update(stated=[PUBLIC_RESTART]))
    with pytest.raises(CertificateError, match="stated must be"):  # where nothing was started over
        Certificate.load(file)


@pytest.mark.parametrize("mechanism", ["independent", "dense"])
def test_a_start_tells_no_less_than_its_steps_do(mechanism):
    made = plan(mechanism=mechanism, order="fixed")
    for steps in range(1, made.n + 1):
        assert exact_mu(made, [steps]) <= _curve_of_start(made, steps).mu * (1 + 1e-9), steps


@pytest.mark.parametrize(("journal", "apart"), [("there", 1), ("gone", 3)])
def test_a_start_over_that_is_killed_loses_no_count(tmp_path, journal, apart):
    """Killed at every call on its files, and then started over once more. Without its journal a run counts whole."""
    made, killed = plan(), []
    while not killed or killed[-1]:
        folder = tmp_path / str(len(killed))
        folder.mkdir()
        path, first, _ = lost(folder, made, 3, keep=1)
        if journal == "gone":
            (folder / ".run.ckpt.journal").unlink()

        def begin(path=path):
            with ao.Release(made, 3, checkpoint=path, start_over=True) as release:
                take(release, 1)

        killed.append(killed_at(apart * len(killed), begin))
        with ao.Release(made, 3, checkpoint=path, start_over=True) as release:
            before, *others = release.certificate().earlier
        assert before == (first, 3 if journal == "there" else made.n), len(killed)
        assert [steps for _, steps in others] in ([], [1]), len(killed)
    assert apart * len(killed) > 12
    assert others


def test_what_cannot_be_counted_is_refused(tmp_path):
    made = plan()
    with pytest.raises(ArgumentError, match="checkpoint"):
        ao.Release(made, 3, start_over=True)
    path, _, _ = lost(tmp_path, made)
    with pytest.raises(CheckpointError, match="another plan"):
        ao.Release(plan(8.0), 3, checkpoint=path, start_over=True)
    with ao.Release(made, 3, checkpoint=path, start_over=True) as release:
        assert len(release.certificate().earlier) == 1
        release.save()
        key = load(path)["key"]
    with ao.Release(made, 3, checkpoint=path, start_over=True) as release:  # no step since: the same run goes on
        assert len(release.certificate().earlier) == 1
        take(release, 1)
    with pytest.raises(CheckpointError, match="draws a new one"):
        ao.Release(made, 3, checkpoint=path, start_over=True, key=key)
    with ao.Release(made, 3, checkpoint=path) as release:  # the files are aside already: what they tell counts
        assert [steps for _, steps in release.certificate().earlier] == [3, 1]
        take(release, 2)
        release.save()
    path.write_bytes(b"of somebody else")
    with pytest.raises(CheckpointError, match="not moved aside"):
        ao.Release(made, 3, checkpoint=path, start_over=True)
    assert path.read_bytes() == b"of somebody else"
    path.write_bytes(bytes(50))  # what a loss of power leaves
    with ao.Release(made, 3, checkpoint=path, start_over=True) as release:
        assert [steps for _, steps in release.certificate().earlier] == [3, 1, made.n]  # how far it came is not known


def test_a_damaged_journal_counts_a_whole_run(tmp_path):
    made = plan()
    path, first, _ = lost(tmp_path, made)
    journal = tmp_path / ".run.ckpt.journal"
    damaged = bytearray(journal.read_bytes())
    damaged[-100] ^= 1  # within a record, and whole ones follow
    journal.write_bytes(damaged)
    with ao.Release(made, 3, checkpoint=path, start_over=True) as release:
        assert release.certificate().earlier == ((first, made.n),)


def test_starts_of_another_plan_are_refused_whichever_file_is_left(tmp_path):
    path, _, _ = lost(tmp_path, plan(), keep=1)
    (tmp_path / ".run.ckpt.journal").unlink()
    with pytest.raises(CheckpointError, match="another plan"):
        ao.Release(plan(8.0), 3, checkpoint=path, start_over=True)
    with ao.Release(plan(), 3, checkpoint=path, start_over=True):
        pass
    path.unlink(missing_ok=True)
    with pytest.raises(CheckpointError, match="another plan"):  # of what was moved aside
        ao.Release(plan(8.0), 3, checkpoint=path)


@pytest.mark.parametrize("gone", ["folder", "journal", "checkpoint"])
def test_a_start_that_is_not_there_is_missed(tmp_path, gone):
    """Checkpoint and journal were moved without the hidden journals of earlier starts, or one of those was deleted."""
    made = plan()
    path, _, _ = lost(tmp_path, made)
    for _ in range(2):
        with ao.Release(made, 3, checkpoint=path, start_over=True) as release:
            take(release, 1)
            release.save()
    if gone == "folder":
        other = tmp_path / "other"
        other.mkdir()
        for name in ("run.ckpt", ".run.ckpt.journal"):
            (tmp_path / name).rename(other / name)
        path = other / "run.ckpt"
    else:
        (tmp_path / ".run.ckpt.journal.1").unlink()
    if gone == "checkpoint":
        path.unlink()
    with pytest.raises(CheckpointError, match="not all there"):
        ao.Release(made, 3, checkpoint=path, start_over=True)
    if gone == "journal":
        with ao.Release(made, 3, checkpoint=path) as release:  # the run itself goes on, and knows of them
            assert len(release.certificate().earlier) == 2


def test_a_budget_counts_both(tmp_path):
    made = plan()
    budget = ao.Budget(tmp_path / "people.budget", 20.0, DELTA)
    path, _, _ = lost(tmp_path, made)
    with ao.Release(made, 3, checkpoint=path, start_over=True) as release:
        release.save()
        left = budget.spend(release.certificate())  # the start before was not entered
        assert left.spent == pytest.approx(ao.compose(made, made).epsilon(DELTA), rel=1e-9)
        assert budget.spend(release.certificate()) == left
        take(release, 1)
    with ao.Release(made, 3, checkpoint=path, start_over=True) as release:  # entered: it counts once
        left = budget.spend(release.certificate())
    assert left.spent == pytest.approx(ao.compose(made, made, made).epsilon(DELTA), rel=1e-9)
    assert left.entries == 3
    small = ao.Budget(tmp_path / "small.budget", made.epsilon * 1.01, DELTA)
    with ao.Release(made, 3, checkpoint=path) as release, pytest.raises(BudgetError):
        small.spend(release.certificate())


def test_evidence_of_weights(tmp_path):
    """An edited digest of weights fails with the evidence."""
    with ao.Release(plan(), 3) as release:
        take(release, 12)
        evidence = release.evidence()
    evidence.naming(release.certificate(), ("ab" * 32,)).save(tmp_path / "c.json")
    evidence.save(tmp_path / "e.json")
    shown = Certificate.load(tmp_path / "c.json")
    Evidence.load(tmp_path / "e.json", shown)
    file = json.loads((tmp_path / "c.json").read_text())
    for edit in (
        lambda x: x.update(weights=["cd" * 32]),
        lambda x: x.pop("seal"),
        lambda x: x["weights"].append("cd" * 32),
    ):
        edited(tmp_path / "d.json", file, edit)
        with pytest.raises(CertificateError, match="not those that the run's owner named"):
            verify(tmp_path / "d.json", evidence=tmp_path / "e.json")


RANKS = """
import sys, numpy as np, torch, torch.distributed as dist, anyorder as ao
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from anyorder.errors import CheckpointError
dist.init_process_group("gloo")
torch.manual_seed(0)
folder, rank = sys.argv[1], dist.get_rank()
made = ao.plan(dataset_size=12, batch_size=2, epochs=2, epsilon=2, delta=1e-5, mechanism="tree")
data = TensorDataset(torch.arange(36.0).reshape(12, 3), torch.arange(12) % 2)

def begin(**how):
    engine = ao.PrivacyEngine(made, checkpoint=f"{folder}/run.ckpt", **how)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sampler = torch.utils.data.DistributedSampler(data, seed=1)
    model, optimizer, loader = engine.make_private(model, optimizer, DataLoader(data, 1, sampler=sampler))
    return engine, model, optimizer, loader

def take(run, steps):
    engine, model, optimizer, loader = run
    loader.sampler.set_epoch(0) if hasattr(loader.sampler, "set_epoch") else None
    for (x, y), _ in zip(loader, range(steps)):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()

word = sys.argv[2]
if word == "begin":
    run = begin()
    first = run[0].certificate().key_fingerprint
    take(run, 3)
    print(f"[{rank} {first}]")
elif word == "disagree":
    try:
        begin(start_over=rank == 1)
    except CheckpointError as problem:
        print(f"[{rank} refused]")
else:
    run = begin(start_over=True)
    take(run, 2)
    shown = run[0].certificate()
    print(f"[{rank} {shown.earlier} {shown.epsilon:.6f} {shown.key_fingerprint}]")
run[0].close() if word != "disagree" else None
dist.destroy_process_group()
"""


def test_two_ranks(tmp_path):
    """The first rank moves the files; both know what was released before."""

    def said(word):
        done = processes.run_on_two_ranks("-W", "ignore", "-c", RANKS, tmp_path, word)
        assert done.returncode == 0, done.stderr
        first, second = sorted(re.findall(r"\[(\d.*)\]", done.stdout))
        assert (first[0], second[0]) == ("0", "1")
        assert first[1:] == second[1:]
        return first[2:]

    key = said("begin")
    (tmp_path / "run.ckpt").unlink()
    assert said("disagree") == "refused"
    told = said("over")
    assert told.startswith(f"(('{key}', 3),)")
    assert (tmp_path / ".run.ckpt.journal.1").exists()


def test_a_claim_by_samples_is_not_started_over(tmp_path):
    """Its starts have no sum: the run would end without a certificate."""
    made = plan(None, noise_multiplier=2.0, order="balls-in-bins", mechanism="banded, 2 bands", delta=1e-2)
    by_samples, path = replace(made, method=MonteCarlo(1000)), tmp_path / "run.ckpt"
    with ao.Release(by_samples, 3, checkpoint=path) as release:
        release.step(release.sample(12), np.zeros(3))
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    with pytest.raises(PlanError, match="by samples"):
        ao.Release(by_samples, 3, checkpoint=path, start_over=True)
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before
