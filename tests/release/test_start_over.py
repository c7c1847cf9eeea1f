"""A run whose files are lost is started over: other noise, and what was released before it counts."""

import json
import math

import numpy as np
import pytest

import anyorder as ao
from anyorder.errors import ArgumentError, BudgetError, CertificateError, CheckpointError
from anyorder.plan.certificate import PUBLIC_RESTART, Certificate, Evidence, verify
from anyorder.release.checkpoint import load
from federated.test_kills import killed_at

DELTA = 1e-5


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


def exact_mu(made, starts):
    """Of all that is released, by the matrices: each earlier start is its first steps, all on the same people."""
    c, n = np.linalg.inv(made.strategy.noising_matrix()), made.n
    worst = 0.0
    for unit in range(6):
        pattern = np.array([1.0 if t % 6 == unit else 0.0 for t in range(n)])
        worst = max(worst, sum(float(np.sum((c[:s] @ pattern) ** 2)) for s in [*starts, n]))
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
    true = ao.accounting.Gaussian(exact_mu(made, [3, 1])).epsilon(DELTA)
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
        ):
            other = json.loads(json.dumps(file))
            edit(other)
            (tmp_path / "d.json").write_text(json.dumps(other))
            with pytest.raises(CertificateError):
                verify(tmp_path / "d.json", evidence=tmp_path / "evidence.json")
    assert stated.stated == (PUBLIC_RESTART,)


def test_a_start_over_that_is_killed_loses_no_count(tmp_path):
    """Killed at every call on its files, and then started over once more."""
    made, killed = plan(), []
    while not killed or killed[-1]:
        folder = tmp_path / str(len(killed))
        folder.mkdir()
        path, first, _ = lost(folder, made, 3, keep=1)

        def begin(path=path):
            with ao.Release(made, 3, checkpoint=path, start_over=True) as release:
                take(release, 1)

        killed.append(killed_at(len(killed), begin))
        with ao.Release(made, 3, checkpoint=path, start_over=True) as release:
            before, *others = release.certificate().earlier
        assert before == (first, 3), len(killed)
        assert [steps for _, steps in others] in ([], [1]), len(killed)
    assert len(killed) > 12
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
    path.write_bytes(b"damaged")
    with ao.Release(made, 3, checkpoint=path, start_over=True) as release:
        assert [steps for _, steps in release.certificate().earlier] == [3, 1, made.n]  # how far it came is not known


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
        other = json.loads(json.dumps(file))
        edit(other)
        (tmp_path / "d.json").write_text(json.dumps(other))
        with pytest.raises(CertificateError, match="weights"):
            verify(tmp_path / "d.json", evidence=tmp_path / "e.json")
