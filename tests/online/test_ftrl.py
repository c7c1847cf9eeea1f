"""The learner: the paper's algorithm to the letter, steps that are refused or killed, and what is kept and shown."""

import fcntl
import subprocess
import sys

import numpy as np
import pytest
from scipy import sparse

import anyorder as ao
import processes
from anyorder.errors import (
    ArgumentError,
    CheckpointError,
    ParticipationError,
    PlanError,
    StepsExhaustedError,
    TrainingError,
)
from anyorder.noise import NoiseSource
from anyorder.online import Ball, Box, Learner, Simplex
from anyorder.online.losses import CustomLoss, Hinge, Logistic, PoissonLoss, Softmax, Squared
from anyorder.online.sets import Everything
from anyorder.participation import MinSeparation, PoissonSampling
from anyorder.strategy import BLT, Banded, BandedInverse, Dense, Independent, Tree
from anyorder.workload import prefix_sum
from laws.cases import over

KEY = bytes(range(32))
N, M, D = 13, 5, 4
SETS = [Everything(), Ball(0.5), Box(-0.2, 0.3), Simplex(1.0)]


def planned(strategy=None, clip_norm=0.8, **changes):
    strategy = Tree(N) if strategy is None else strategy
    settings = {
        "participation": MinSeparation(N, b=4, k=4), "strategy": strategy, "workload": prefix_sum(N),
        "clip_norm": clip_norm, "sigma": 0.5, "delta": 1e-5, "batch_size": M,
    }  # fmt: skip
    return ao.Plan(**settings | changes)


def batches(outputs=1, seed=0):
    """For every step units, X, y: units of one row and of two, and one whose numbers cannot be used."""
    generator = np.random.default_rng(seed)
    for t in range(N):
        units = 100 * (t % 4) + np.array([0, 1, 2, 2, 3])
        X = generator.normal(size=(M, D))
        X[4, 1] = np.nan if t % 3 == 0 else X[4, 1]
        yield units, X, generator.integers(0, max(outputs, 2), M)


def made(plan, loss, steps=N, seed=0, **options):
    learner = Learner(plan, (D, loss.outputs), loss=loss, key=KEY, **{"regularization": 2.0} | options)
    played = []
    for units, X, y in list(batches(loss.outputs, seed))[learner.steps_taken : steps]:
        played.append(learner.theta)
        learner.step(units, X, y)
    return learner, played


# -- the paper's algorithm ---------------------------------------------------------------------------------------------


def node_of(first, level):
    """Post-order number of the node over steps first .. first + 2^level - 1."""
    return 2 * first - first.bit_count() + 2 ** (level + 1) - 2


def get_sum(plan, size, gradients, t):
    """GetSum(T, t) [Kairouz et al. 2021, B.1]: the noisy nodes of the binary expansion of t, added up."""
    source = NoiseSource(KEY).derive(plan.digest.encode())
    total, first = np.zeros(size), 0
    for level in reversed(range(t.bit_length())):
        if t >> level & 1:
            z = source.normal(node_of(first, level), 0, size).astype(np.float64)
            total += sum(gradients[first : first + 2**level]) + plan.noise_std * z
            first += 2**level
    return total


def clip(vector, norm):
    return (
        vector * min(norm / np.linalg.norm(vector), 1.0) if np.isfinite(vector).all() and vector.any() else 0 * vector
    )


@over("kind", SETS)
@pytest.mark.parametrize(("l1", "l2"), [(0.0, 0.0), (0.03, 0.0), (0.02, 0.5)])
@over("loss", [Logistic(), Softmax(3), Hinge(), Squared()])
def test_it_is_algorithm_1_of_the_paper(loss, l1, l2, kind):
    plan = planned()
    learner, played = made(plan, loss, constraint=kind, l1=l1, l2=l2)
    size, theta = D * loss.outputs, kind.argmin(np.zeros((D, loss.outputs)), 2.0)
    gradients = []
    for t, (units, X, y) in enumerate(batches(loss.outputs), 1):
        assert np.allclose(played[t - 1], theta, atol=1e-5)
        own = {}
        for unit, x, label in zip(units.tolist(), X, y, strict=True):
            slope = loss.slope((x @ played[t - 1])[None], [label])[0]
            own[unit] = own.get(unit, 0) + np.outer(x, slope).reshape(-1)
        gradients.append(
            sum(
                clip(np.nan_to_num(g) if np.isfinite(g).all() else 0 * np.ones(size), plan.clip_norm)
                for g in own.values()
            )
        )
        s = get_sum(plan, size, gradients, t).reshape(D, -1)
        theta = kind.argmin(s, 2.0 + t * M * l2, t * M * l1)
    assert np.allclose(learner.theta, theta, atol=1e-5)
    assert np.allclose(learner.average, np.mean(played, axis=0), atol=1e-12)


@pytest.mark.parametrize(
    "strategy",
    [
        Tree(N, estimator="full"),
        BLT([0.9, 0.5], [0.2, 0.1], N),
        Banded(np.array([np.ones(N), 0.4 * (np.arange(N) < N - 1)])),
        BandedInverse([1.0, -0.4], N),
        Dense(np.tri(N) * 0.3 + np.eye(N)),
        Independent(N),
    ],
    ids=lambda strategy: type(strategy).__name__,
)
def test_the_sum_has_the_noise_of_its_prefix_under_any_strategy(strategy):
    plan = planned(strategy)
    loss = CustomLoss(lambda theta, X, y: np.where(np.isfinite(X), X, 0.0) * 0)  # nothing but noise
    learner, _ = made(plan, loss)
    z = np.stack([NoiseSource(KEY).derive(plan.digest.encode()).normal(r, 0, D) for r in range(strategy.num_rows)])
    noise = plan.noise_std * np.tri(N) @ strategy.noising_matrix() @ z
    assert np.allclose(learner.theta[:, 0], -noise[-1] / 2.0, rtol=1e-5, atol=1e-6)


def test_without_noise_worth_speaking_of_it_learns():
    generator = np.random.default_rng(2)
    n, m = 40, 50
    X = generator.normal(size=(n * m, D))
    truth = np.array([1.0, -2.0, 0.5, 0.0])
    y = (generator.uniform(size=n * m) < 1 / (1 + np.exp(-3 * X @ truth))).astype(int)
    plan = ao.plan(
        dataset_size=n * m, batch_size=m, epochs=1, epsilon=1000, delta=1e-6, clip_norm=4.0, mechanism="tree"
    )
    learner = Learner(plan, (D, 1), loss=Logistic(), regularization=200.0, constraint=Ball(4.0), key=KEY)
    for t in range(n):
        rows = slice(t * m, (t + 1) * m)
        learner.step(np.arange(n * m)[rows], sparse.csr_array(X[rows]) if t % 2 else X[rows], y[rows])
    for theta in (learner.theta, learner.average):
        assert np.mean((X @ theta[:, 0] > 0) == y) > 0.9


def test_what_is_released_is_all_that_moves_it():
    """The iterates are a function of what observers see."""
    plan = planned()
    learner = Learner(plan, (D, 1), loss=Logistic(), regularization=2.0, constraint=Ball(1.0), l1=0.01, key=KEY)
    released = []
    learner.release.on_release(lambda step, private: released.append(private))
    s = np.zeros((D, 1))
    for t, (units, X, y) in enumerate(batches(), 1):
        learner.step(units, X, y)
        s += M * released[-1].reshape(D, 1)
        assert np.array_equal(learner.theta, Ball(1.0).argmin(s, 2.0, t * M * 0.01))


@pytest.mark.parametrize("loss", [Logistic(), Softmax(3), Hinge(), Squared(), PoissonLoss()], ids=repr)
def test_sparse_and_dense_batches_give_the_same_model(loss):
    plan = planned()
    dense, _ = made(plan, loss)
    learner = Learner(plan, (D, loss.outputs), loss=loss, regularization=2.0, key=KEY)
    for units, X, y in batches(loss.outputs):
        learner.step(units.tolist(), sparse.csr_matrix(X), y)
    assert np.allclose(learner.theta, dense.theta, atol=1e-9)


# -- refusals ----------------------------------------------------------------------------------------------------------


def state(learner):
    return (
        learner.steps_taken, learner.theta.tobytes(), learner.average.tobytes(), learner.release.ledger.to_bytes(),
        learner.release.steps_taken,
    )  # fmt: skip


def test_a_refused_step_changes_nothing_and_makes_no_gradient():
    calls = []

    def gradient(theta, X, y):
        calls.append(len(y))
        if len(calls) == 2:
            raise ZeroDivisionError("the user's own")
        return X * 0.1

    plan = planned()
    learner = Learner(plan, (D, 1), loss=CustomLoss(gradient), regularization=1.0, key=KEY)
    twin = Learner(plan, (D, 1), loss=CustomLoss(lambda theta, X, y: X * 0.1), regularization=1.0, key=KEY)
    X, y = np.ones((2, D)), np.zeros(2)
    learner.step([0, 1], X, y)
    before = state(learner)
    for bad, error in [
        (([1, 2], X, y), ParticipationError),
        ((["a", "b"], X, y), ArgumentError),
        (([2], X, y), ArgumentError),
        (([2, 3], X[:, :2], y), ArgumentError),
        (([2, 3], X, y[:1]), ArgumentError),
        ((None, X, y), ArgumentError),
        (([2, 3], X, ["a", "b"]), ArgumentError),
    ]:
        with pytest.raises(error):
            learner.step(*bad)
        assert state(learner) == before
    assert len(calls) == 1
    with pytest.raises(ZeroDivisionError, match="the user's own"):
        learner.step([2, 3], X, y)
    assert state(learner) == before
    learner.step(iter([2, 3]), X, y)
    twin.step([0, 1], X, y)
    twin.step([2, 3], X, y)
    assert state(learner) == state(twin)


def test_no_step_after_the_last():
    learner, _ = made(planned(), Logistic())
    before = state(learner)
    with pytest.raises(StepsExhaustedError):
        learner.step([999], np.zeros((1, D)), [0])
    assert state(learner) == before


def test_a_step_of_nobody_is_a_step():
    learner = Learner(planned(), (D, 1), loss=Logistic(), regularization=1.0, key=KEY)
    learner.step([], np.zeros((0, D)), [])
    assert learner.steps_taken == 1
    assert learner.theta.any()


def test_values_that_cannot_be_used_raise_nothing_and_warn_of_nothing():
    learner = Learner(planned(), (D, 1), loss=Logistic(), regularization=1.0, key=KEY)
    twin = Learner(planned(), (D, 1), loss=Logistic(), regularization=1.0, key=KEY)
    X = np.array([[np.nan] * D, [1e308] * D, [np.inf, -np.inf, 0, 0], [1.0, 2.0, 3.0, 4.0]])
    learner.step([0, 1, 2, 3], X, [0, 1, 1, 17])
    twin.step([0, 1, 2, 3], np.zeros((4, D)), [0, 0, 0, 0])
    assert np.array_equal(learner.theta, twin.theta)


def test_an_observer_that_raises_comes_after_the_step():
    learner = Learner(planned(), (D, 1), loss=Logistic(), regularization=1.0, key=KEY)
    twin = Learner(planned(), (D, 1), loss=Logistic(), regularization=1.0, key=KEY)

    def problem(step, private):
        raise RuntimeError("an observer's")

    stop = learner.release.on_release(problem)
    X, y = np.ones((1, D)), [1]
    with pytest.raises(RuntimeError, match="an observer's"):
        learner.step([0], X, y)
    stop()
    learner.step([1], X, y)
    twin.step([0], X, y)
    twin.step([1], X, y)
    assert state(learner) == state(twin)


def interrupted(*arguments):
    raise KeyboardInterrupt


@pytest.mark.parametrize(("owner", "name"), [(ao.Release, "tell"), (Learner, "_leader")])
def test_a_step_that_was_broken_off_stops_the_learner(monkeypatch, owner, name):
    learner = Learner(planned(), (D, 1), loss=Logistic(), regularization=1.0, key=KEY)
    with monkeypatch.context() as within:
        within.setattr(owner, name, interrupted)
        with pytest.raises(KeyboardInterrupt):
            learner.step([0], np.ones((1, D)), [1])
    with pytest.raises(TrainingError, match="step 0 was broken off"):
        learner.step([1], np.ones((1, D)), [1])
    assert learner.release.steps_taken == 1
    with pytest.raises(TrainingError, match="the learner is at step 0"):
        learner.release.step([1], np.zeros(D))
    with pytest.raises(TrainingError, match="step 0 was broken off"):
        learner.save()


MAKE = {"plan": planned(), "shape": (D, 1), "loss": Logistic(), "regularization": 1.0}


def test_arguments_are_refused():
    for wrong, error in [
        ({"plan": None}, ArgumentError),
        ({"shape": D}, ArgumentError),
        ({"shape": (D,)}, ArgumentError),
        ({"shape": (0, 1)}, ArgumentError),
        ({"shape": (D, 2)}, ArgumentError),
        ({"loss": Logistic}, ArgumentError),
        ({"loss": "logit"}, ArgumentError),
        ({"constraint": 3.0}, ArgumentError),
        ({"constraint": Box(np.zeros(3), 1.0)}, ArgumentError),
        ({"regularization": 0.0}, ArgumentError),
        ({"regularization": -1.0}, ArgumentError),
        ({"regularization": np.nan}, ArgumentError),
        ({"l1": -1.0}, ArgumentError),
        ({"l2": -1.0}, ArgumentError),
        ({"plan": planned(Independent(N), grid=2.0**-20)}, PlanError),
        ({"plan": planned(clip_norm=2.0**-70)}, PlanError),
        ({"plan": planned(clip_norm=2.0**70)}, PlanError),
        ({"plan": planned(on_device=("record",))}, PlanError),
        ({"plan": planned(Independent(N), selection=ao.sparse.Uniform(3))}, PlanError),
        ({"key": b"short"}, ArgumentError),
    ]:
        with pytest.raises(error):
            Learner(**MAKE | wrong)


def test_no_regularisation_on_a_bounded_set():
    learner, _ = made(planned(), Logistic(), regularization=0.0, constraint=Ball(1.0))
    assert np.linalg.norm(learner.theta) == pytest.approx(1.0)


def test_theta_cannot_be_written():
    learner = Learner(**MAKE)
    with pytest.raises(ValueError, match="read-only"):
        learner.theta[0] = 1.0
    average = learner.average
    average[0] = 5.0
    assert not learner.average.any()


# -- what is kept and shown --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("at", [0, 1, 6, N])
def test_a_resumed_run_has_the_same_bits(tmp_path, at):
    whole, _ = made(planned(), Softmax(3), constraint=Ball(0.7), l1=0.01)
    options = {"constraint": Ball(0.7), "l1": 0.01, "checkpoint": tmp_path / "run"}
    first, _ = made(planned(), Softmax(3), steps=at, **options)
    first.extra["classes"] = ["a", "b", "c"]
    first.save()
    first.close()
    second, _ = made(planned(), Softmax(3), **options)
    assert second.extra == {"classes": ["a", "b", "c"]}
    assert state(second) == state(whole)
    assert second.certificate().realised == whole.certificate().realised


def test_lost_steps_are_repeated_with_the_same_data_or_refused(tmp_path):
    whole, _ = made(planned(), Logistic())
    first, _ = made(planned(), Logistic(), steps=4, checkpoint=tmp_path / "run")
    first.save()
    for units, X, y in list(batches())[4:8]:
        first.step(units, X, y)
    first.close()
    other, _ = made(planned(), Logistic(), steps=4, checkpoint=tmp_path / "run")
    with pytest.raises(CheckpointError):
        other.step([0, 1], np.ones((2, D)), [0, 1])
    other.close()
    second, _ = made(planned(), Logistic(), checkpoint=tmp_path / "run")
    assert state(second) == state(whole)


def test_a_run_that_is_killed_before_its_first_save_keeps_its_noise(tmp_path):
    code = f"""
import os, signal, sys
sys.path.insert(0, {str(__file__.rsplit("/", 2)[0])!r})
from online.test_ftrl import *
learner = Learner(planned(), (D, 1), loss=Logistic(), regularization=2.0, checkpoint={str(tmp_path / "run")!r})
released = []
learner.release.on_release(lambda step, private: print(private.tobytes().hex(), flush=True))
for step, (units, X, y) in enumerate(batches()):
    if step == 3 and {{last}}:
        os.kill(os.getpid(), signal.SIGKILL)
    learner.step(units, X, y)
"""
    lines = []
    for last in (True, False):
        text = code.replace("{last}", str(last))
        done = processes.run("-c", text)
        assert done.returncode == (-9 if last else 0), done.stderr
        lines.append(done.stdout.split())
    assert len(lines[0]) == 3
    assert lines[1][:3] == lines[0]
    assert len(lines[1]) == N


def is_free(checkpoint):
    """Whether another process may go on with the run."""
    with open(checkpoint.with_name(f".{checkpoint.name}.journal"), "rb") as journal:
        try:
            fcntl.flock(journal, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True


def test_a_run_is_held_until_it_is_closed(tmp_path):
    learner, _ = made(planned(), Logistic(), steps=2, checkpoint=tmp_path / "run")
    assert not is_free(tmp_path / "run")
    learner.close()
    assert is_free(tmp_path / "run")
    with pytest.raises(TrainingError, match="closed"):
        learner.step([2], np.ones((1, D)), [1])


@pytest.mark.parametrize(
    "other",
    [
        {"regularization": 3.0}, {"l1": 0.5}, {"l2": 0.5}, {"constraint": Ball(2.0)}, {"loss": Hinge()},
        {"shape": (2 * D, 2), "loss": Softmax(2)}, {"shape": (2 * D, 1)},
    ],
    ids=repr,
)  # fmt: skip
def test_a_checkpoint_of_other_settings_is_refused(tmp_path, other):
    with Learner(**MAKE, checkpoint=tmp_path / "run"):
        pass
    with pytest.raises(CheckpointError) as caught:
        Learner(**MAKE | other, checkpoint=tmp_path / "run")
    assert is_free(tmp_path / "run"), caught.traceback  # which has the learner that was refused alive
    Learner(**MAKE, checkpoint=tmp_path / "run").close()  # nothing was changed


@pytest.mark.parametrize("other", [Ball(1.5), Box(-1.0, 1.0), Simplex(1.0)], ids=repr)
def test_a_checkpoint_of_another_set_is_refused(tmp_path, other):
    """Of the same kind too."""
    options = {"plan": planned(), "shape": (D, 1), "loss": Logistic(), "regularization": 1.0}
    Learner(**options, constraint=Ball(1.0), checkpoint=tmp_path / "run").close()
    with pytest.raises(CheckpointError, match="other settings"):
        Learner(**options, constraint=other, checkpoint=tmp_path / "run")


def test_a_checkpoint_of_another_front_end_is_refused(tmp_path):
    with ao.Release(planned(), D, checkpoint=tmp_path / "run") as release:
        release.step([0], np.zeros(D))
        release.save()
    with pytest.raises(CheckpointError, match="another front end"):
        Learner(**MAKE, checkpoint=tmp_path / "run")


def test_steps_taken_without_the_learner_are_found(tmp_path):
    with Learner(**MAKE, checkpoint=tmp_path / "run") as learner:
        learner.step([0], np.ones((1, D)), [1])
        learner.save()
    with ao.Release(planned(), D, checkpoint=tmp_path / "run") as release:
        release.step([1], np.zeros(D))
        release.save(release.extra)
    with pytest.raises(CheckpointError, match="without the learner"):
        Learner(**MAKE, checkpoint=tmp_path / "run")


def test_certificate_and_evidence(tmp_path):
    learner, _ = made(planned(), Logistic())
    learner.certificate().save(tmp_path / "c.json")
    learner.evidence().save(tmp_path / "e.json")
    found = ao.verify(tmp_path / "c.json", evidence=tmp_path / "e.json")
    assert found.certificate == learner.certificate()
    assert found.certificate.realised.max_participations == 4
    assert found.evidence.receipt(302).steps == (3, 7, 11)


def test_secret_sampling_takes_the_units_that_were_drawn():
    n = 4
    plan = ao.Plan(
        participation=PoissonSampling(n, 0.3), strategy=Independent(n), workload=prefix_sum(n), clip_norm=1.0,
        sigma=1.0, delta=1e-5, batch_size=6, neighbours="add-or-remove",
    )  # fmt: skip
    learner = Learner(plan, (D, 1), loss=Logistic(), regularization=1.0, key=KEY)
    X, y = np.random.default_rng(0).normal(size=(20, D)), np.arange(20) % 2
    with pytest.raises(TrainingError, match="secret draws"):
        learner.step([0, 1], X[:2], y[:2])
    for _ in range(n):
        drawn = learner.release.sample(20)
        with pytest.raises(TrainingError, match="drew for this step"):
            learner.step(drawn[1:], X[drawn[1:]], y[drawn[1:]])
        learner.step(drawn, X[drawn], y[drawn])
    assert learner.steps_taken == n


def test_learners_need_no_scikit_learn():
    code = (
        "import sys; sys.modules['sklearn'] = None; import anyorder as ao; "
        "ao.online.Learner, ao.online.LeastSquares, ao.online.Ball, ao.online.CustomLoss; import anyorder.online.losses"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
