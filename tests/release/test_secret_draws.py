"""Secret sampling by a release: its own coins, and no batches that somebody chose."""

import numpy as np
import pytest
import torch

import anyorder as ao
from anyorder._draws import Draws
from anyorder.errors import ArgumentError, CheckpointError, PlanError, TrainingError
from anyorder.noise import NoiseSource
from anyorder.participation import (
    BallsInBins,
    CyclicPoisson,
    MinSeparationSampling,
    PoissonSampling,
    RandomAllocation,
    TruncatedPoisson,
)
from anyorder.release.release import SecretDraws
from release.runs import KEY, SIZE, copied, planned, state, total


def poisson():
    """Its noise is not searched for: the draws hang on the plan's digest, and so on the last digit of that."""
    return ao.plan(dataset_size=40, batch_size=10, epochs=2, noise_multiplier=1.5, delta=1e-5, order="poisson")


def test_an_amplified_claim_holds_for_no_batch_that_somebody_chose(tmp_path):
    plan, path = poisson(), tmp_path / "run.ckpt"
    release = ao.Release(plan, SIZE, key=KEY, checkpoint=path)
    with pytest.raises(TrainingError, match="secret draws"):
        release.step([1, 2], total(0))
    drawn = release.sample(40)
    changed = release.sample(40)
    changed[-1] = 40
    with pytest.raises(TrainingError, match="those that sample"):
        release.step(changed, total(0))
    assert np.array_equal(drawn, release.sample(40))
    before = state(release)
    for other in (drawn[1:], [*drawn, 99], [], [str(i) for i in drawn]):
        with pytest.raises(TrainingError, match="those that sample"):
            release.step(other, total(0))
        assert state(release) == before
    release.step(drawn[::-1], total(0))
    with pytest.raises(TrainingError, match="secret draws"):
        release.step(drawn, total(1))  # of the step before
    with pytest.raises(ArgumentError, match="num_units must be 40"):
        release.sample(39)
    release.save()
    following = release.sample(40)
    release.close()
    again = ao.Release(plan, SIZE, checkpoint=path)
    with pytest.raises(ArgumentError, match="num_units must be 40"):
        again.sample(41)
    assert np.array_equal(again.sample(40), following)
    with pytest.raises(PlanError, match="give step"):
        ao.Release(planned(), SIZE).sample(40)


def test_a_lost_step_of_coins_is_not_replayed_for_another_population(tmp_path):
    """Saved before the first coins, no checkpoint knows of how many: the journal does."""
    plan, path = poisson(), tmp_path / "run.ckpt"
    release = ao.Release(plan, SIZE, key=KEY, checkpoint=path)
    release.save()
    largest = int(release.sample(40).max())
    assert largest < 39
    released = release.step(release.sample(40), total(0))
    release.close()
    again = ao.Release(plan, SIZE, checkpoint=path)
    same = again.sample(largest + 1)  # the same units, drawn from fewer
    with pytest.raises(CheckpointError, match="never the same noise"):
        again.step(same, total(0))
    again.close()
    again = ao.Release(plan, SIZE, checkpoint=path)
    assert np.array_equal(again.step(again.sample(40), total(0)), released)


def test_the_coins_are_those_of_the_engine():
    plan = poisson()
    release, engine = ao.Release(plan, 3, key=KEY), ao.PrivacyEngine(plan, key=KEY)
    model = torch.nn.Linear(3, 1, bias=False)
    dataset = torch.utils.data.TensorDataset(torch.arange(40.0)[:, None].repeat(1, 3))
    loader = torch.utils.data.DataLoader(dataset, batch_size=10)
    _, _, loader = engine.make_private(model, torch.optim.SGD(model.parameters(), 0.1), loader)
    for (batch,), t in zip(loader, range(4), strict=False):
        drawn = release.sample(40)
        assert batch[:, 0].tolist() == drawn.tolist()
        release.step(drawn, total(t, (3,)))


def test_a_copied_journal_leads_to_fresh_coins(tmp_path):
    """Whoever goes on with the other copy tosses the run's own: the same coins in both would be no longer secret."""
    path, plan = tmp_path / "run.ckpt", poisson()
    with ao.Release(plan, SIZE, key=KEY, checkpoint=path) as release:
        release.step(release.sample(40), total(0))
        release.save()
    copied(tmp_path / ".run.ckpt.journal")
    with pytest.warns(ao.errors.CheckpointWarning, match="fresh key"):
        again = ao.Release(plan, SIZE, checkpoint=path)
    other = ao.Release(plan, SIZE, key=KEY)
    other.step(other.sample(40), total(0))
    for t in range(1, plan.n):
        drawn, tossed = again.sample(40), other.sample(40)
        assert not np.array_equal(drawn, tossed)
        again.step(drawn, total(t))
        other.step(tossed, total(t))


RULES = [
    CyclicPoisson(12, 3, 0.4),
    TruncatedPoisson(12, 0.4, batch_size=9, dataset_size=40, cycle=2),
    BallsInBins(3, 4),
    RandomAllocation(3, 4),
    MinSeparationSampling(12, 3, 0.4),
]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: type(rule).__name__)
def test_coins_of_every_secret_order(rule):
    """They are those of the pure draws, also where a process goes on that did not see the steps before."""
    source = NoiseSource(KEY)
    coins, draws = SecretDraws(rule, source), Draws(rule, 40, source)
    for t in range(12):
        drawn = coins.draw(t, 40)
        assert np.array_equal(drawn, draws.step(t))
        coins.check(t, drawn)
        with pytest.raises(TrainingError, match="those that sample"):
            coins.check(t, np.append(drawn, 40))
        with pytest.raises(TrainingError, match="secret draws"):
            coins.check(t + 1, drawn)
        again = SecretDraws(rule, source)
        again.load_state_dict(coins.state_dict())
        assert np.array_equal(again.draw(t, 40), drawn)
        assert again.population == coins.population
        with pytest.raises(ArgumentError, match="num_units must be"):
            again.draw(t, 39)


def told(check, *asked):
    with pytest.raises(TrainingError) as problem:
        check(*asked)
    return str(problem.value)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: type(rule).__name__)
def test_refusals_say_nothing_of_what_was_drawn(rule):
    """They go into logs, which are less secret than coins."""
    found = set()
    for key in (KEY, bytes(32), b"k" * 32):
        coins = SecretDraws(rule, NoiseSource(key))
        drawn = coins.draw(2, 40)
        wrong = [drawn[1:], np.append(drawn, 40), np.zeros(0, np.int64), [str(unit) for unit in drawn], drawn + 1]
        found.add((told(coins.check, 3, drawn), *(told(coins.check, 2, units) for units in wrong)))
        assert coins.state_dict() == {"size": 40}
    assert len(found) == 1


def test_what_was_refused_leaves_the_coins_as_they_were():
    for rule in (PoissonSampling(12, 0.4), RULES[1]):
        coins = SecretDraws(rule, NoiseSource(KEY))
        for size in (0, -1, 2.5):
            with pytest.raises(ArgumentError, match="num_units"):
                coins.draw(0, size)
            assert coins.state_dict() == {"size": None}
            assert coins.population == b"population 0,"
        drawn = coins.draw(0, 40)
        with pytest.raises(ArgumentError, match="num_units must be"):
            coins.draw(1, 41)
        with pytest.raises(ArgumentError, match="t must"):
            coins.draw(-1, 40)
        coins.check(0, drawn)
        assert coins.population == b"population 40,"
