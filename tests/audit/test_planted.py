"""Canaries in a run: the planned sum and the canary, for every order; refused, with nothing changed, elsewhere."""

import json
from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

import anyorder as ao
from anyorder.accounting import Gaussian, Sampled
from anyorder.app import AuditSummary
from anyorder.audit import Canaries, plant, scores
from anyorder.audit.canaries import as_released, random_steps, sampled_scores, visible, worst_steps
from anyorder.audit.result import Audited
from anyorder.errors import ArgumentError, ParticipationError, TrainingError
from anyorder.ledger import Ledger
from anyorder.noise import NoiseSource
from anyorder.participation import FixedOrder, KnownOrder, MinSeparation, PoissonSampling
from anyorder.release.release import SharedNoise
from anyorder.strategy import Independent, ToeplitzBanded, Tree
from anyorder.strategy.restarted_blt import RestartedBLT
from laws.cases import PARTICIPATIONS, SAMPLED, STRATEGIES
from plans import flat_plan
from training.test_engine import EPOCHS, STEPS, backward, data, gradients, planned, private

KEY = bytes(range(32))
COINS = bytes(range(1, 33))
N, SIZE = 8, 60
CANARIES = Canaries(SIZE, 12, 48, 5)


def claim(participation=None, mechanism="tree", **changes):
    participation = FixedOrder(N, k=2, b=4) if participation is None else participation
    settings = {"participation": participation, "batch_size": 4, "epsilon": 4, "delta": 1e-5, "mechanism": mechanism}
    return flat_plan(**{**settings, **changes})


def total(t, dtype=np.float64):
    return np.random.default_rng(t).normal(size=SIZE).astype(dtype)


def everybody(plan):
    """Units 0 and 1 of each step, as the rule has them; for a known order those that it lists."""
    if type(plan.participation) is KnownOrder:
        by_step = [[] for _ in range(plan.n)]
        for t, i in zip(plan.participation.steps, plan.participation.indices, strict=True):
            by_step[t].append(int(plan.participation.units[i]))
        return by_step
    return [[2 * t, 2 * t + 1] for t in range(plan.n)]  # each once


def run(plan, canaries=CANARIES, steps=None, *, dtype=np.float64, totals=True, **how):
    release = ao.Release(plan, canaries.size, key=KEY)
    planted = plant(release, canaries, steps, key=COINS, totals=totals, **how)
    rows = []
    for units, t in zip(everybody(plan), range(plan.n), strict=True):
        sums = total(t, dtype) if units else np.zeros(SIZE, dtype)
        rows.append(release.step(units, sums))
    return planted, rows


def bare(plan, dtype=np.float64):
    release = ao.Release(plan, SIZE, key=KEY)
    return [
        release.step(units, total(t, dtype) if units else np.zeros(SIZE, dtype))
        for units, t in zip(everybody(plan), range(plan.n), strict=True)
    ]


# -- what is added ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PARTICIPATIONS)
def test_the_release_is_the_planned_one_and_the_canaries(name):
    plan = claim(PARTICIPATIONS[name](N))
    planted, rows = run(plan)
    steps = worst_steps(plan.strategy, plan.participation)
    assert planted.steps == [steps] * 12
    for t, (row, plain) in enumerate(zip(rows, bare(plan), strict=True)):
        added = plan.clip_norm * CANARIES.sum(planted.included) * (t in steps)
        np.testing.assert_allclose(row - plain, added / plan.batch_size, atol=1e-12)
    result = planted.result()
    strategy = as_released(plan.strategy)
    expected = plan.batch_size * scores(rows, strategy, steps, CANARIES)
    np.testing.assert_allclose(result.scores, expected, rtol=1e-9)
    assert (result.included == planted.included).all()
    assert 0 < planted.included.sum() < 12
    assert result.noise_std == plan.noise_std
    assert (result.curve, result.delta, result.epsilon) == (plan.curve, plan.delta, plan.epsilon)
    # the plan's rounding and a bound that is not exact lie above
    assert (result.mus <= plan.mu).all()
    assert plan.mu / result.mus.max() < (1.0001 if plan.sensitivity.exact else 2)


@pytest.mark.parametrize("name", STRATEGIES)
def test_scores_under_noise_alone_are_standard(name):
    """Of a run of nobody: score over noise std is N(0, 1), plus mu where the canary was included."""
    canaries = Canaries(600, 600, 600, 1)
    plan = claim(mechanism=STRATEGIES[name](N))
    release = ao.Release(plan, 600, key=KEY)
    planted = plant(release, canaries, key=COINS)
    for _ in range(N):
        release.step([], np.zeros(600))
    result = planted.result()
    inside, outside = (result.scores[result.included == side] / result.noise_std for side in (True, False))
    seen = visible(as_released(plan.strategy), [planted.steps[0]])[0] * plan.clip_norm / plan.noise_std
    assert seen <= result.mus[0] * (1 + 1e-9)
    for part, mean in ((inside, seen), (outside, 0)):
        assert abs(part.mean() - mean) < 5 / np.sqrt(len(part))
        assert abs(part.std() - 1) < 5 / np.sqrt(2 * len(part))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_totals_and_released_rows_are_kept_where_asked_for(dtype):
    plan = claim(clip_norm=3.0)
    steps = random_steps(plan.participation, 12, NoiseSource(KEY))
    planted, rows = run(plan, steps=steps, dtype=dtype)
    assert planted.steps == steps
    there = np.array([[t in own for t in range(N)] for own in steps])
    tolerance = {"rtol": 1e-6 if dtype == np.float32 else 1e-12, "atol": 1e-5 if dtype == np.float32 else 1e-12}
    for t in range(N):
        expected = total(t, dtype) + 3 * CANARIES.combined(there[:, t] & planted.included)
        np.testing.assert_allclose(planted.totals[t], expected, **tolerance)
        np.testing.assert_allclose(planted.released[t], rows[t] * plan.batch_size, **tolerance)
    planted, _ = run(plan, totals=False)
    for name in ("totals", "released"):
        with pytest.raises(ArgumentError, match=r"totals=True"):
            getattr(planted, name)


def test_random_steps_are_allowed_and_not_the_worst_alone():
    plan = claim()
    planted, _ = run(plan, steps="random")
    assert all(plan.participation.pattern.allows(own) for own in planted.steps)
    assert len(set(planted.steps)) > 1 == len(set(run(plan)[0].steps))
    with pytest.raises(ArgumentError, match="steps must be one of 'random'"):
        run(plan, steps="worst")


def test_totals_of_some_coordinates_are_kept_which_nobody_knows_beforehand():
    plan = claim()
    full, _ = run(plan)
    some, _ = run(plan, totals=7)
    at = some.kept_at
    assert len(set(at.tolist())) == 7
    np.testing.assert_array_equal(some.totals, full.totals[:, at])
    np.testing.assert_array_equal(some.released, full.released[:, at])
    assert full.kept_at.tolist() == [*range(SIZE)]
    drawn = {tuple(plant(ao.Release(plan, SIZE), CANARIES, totals=7).kept_at) for _ in range(3)}
    assert len(drawn) == 3  # from the operating system
    for wrong in (0, SIZE + 1, 2.5):
        with pytest.raises(ArgumentError, match="totals must be"):
            plant(ao.Release(plan, SIZE), CANARIES, totals=wrong)


def test_replace_one_is_a_canary_or_its_opposite():
    plan = claim(neighbours="replace-one")
    planted, rows = run(plan)
    signs = np.where(planted.included, 1, -1)
    for t, (row, plain) in enumerate(zip(rows, bare(plan), strict=True)):
        added = plan.clip_norm * CANARIES.combined(signs) * (t in planted.steps[0])
        np.testing.assert_allclose(row - plain, added / plan.batch_size, atol=1e-12)
    np.testing.assert_allclose(planted.result().mus, plan.mu, rtol=1e-4)


def test_on_a_grid_canaries_are_cut_to_it_and_never_longer_than_the_clip_norm():
    plan = replace(claim(mechanism=Tree(N, "full"), clip_norm=0.3), grid=2.0**-6)
    for canaries in (CANARIES, Canaries(SIZE, 12, 48, 5, orthogonal=False)):
        release = ao.Release(plan, SIZE, key=KEY)
        planted = plant(release, canaries, key=COINS, totals=True, informed=True)
        for t in range(N):
            release.step([2 * t], np.arange(SIZE, dtype=np.int64))
        steps = planted.steps[0]
        cut = np.trunc(plan.clip_norm / plan.grid * canaries.vectors())
        assert (np.linalg.norm(cut, axis=1) * plan.grid <= plan.clip_norm).all()
        for t in range(N):
            expected = np.arange(SIZE) + (planted.included @ cut) * (t in steps)
            np.testing.assert_array_equal(planted.totals[t] / plan.grid, expected)
        assert planted.result().scores.shape == (12,)
        assert planted.result().independent == canaries.orthogonal


def test_under_poisson_sampling_canaries_toss_coins_of_their_own():
    plan = ao.plan(order=PoissonSampling(200, 0.25), batch_size=4, noise_multiplier=2, delta=1e-5)
    canaries = Canaries(40, 40, 40, 1)
    release = ao.Release(plan, 40, key=KEY)
    planted = plant(release, canaries, key=COINS, totals=True)
    assert planted.steps is None
    for _ in range(plan.n):
        units = release.sample(10)
        release.step(units, np.zeros(40))
    there = planted.totals @ canaries.vectors().T / plan.clip_norm
    np.testing.assert_allclose(there[:, ~planted.included], 0, atol=1e-12)
    rates = there[:, planted.included].mean(axis=0)
    assert abs(rates - 0.25).max() < 5 * np.sqrt(0.25 * 0.75 / 200)
    assert abs(np.corrcoef(there[:, planted.included].T) - np.eye(planted.included.sum())).max() < 0.45
    result = planted.result()
    assert result.noise_std is None
    assert result.mus is None
    expected = sampled_scores(
        planted.released, canaries, sampling_probability=0.25, clip_norm=plan.clip_norm, noise_std=plan.noise_std
    )
    np.testing.assert_allclose(result.scores, expected)
    assert result.scores[result.included].mean() > result.scores[~result.included].mean()
    with pytest.raises(ArgumentError, match="steps must be None"):
        plant(ao.Release(plan, 40), canaries, [0])


@pytest.mark.parametrize("neighbours", ["zero-out", "replace-one"])
def test_an_informed_attacker_sees_noise_and_canaries_alone(neighbours):
    """Whatever the units of the data add, the scores are those of a run of nobody."""
    plan = claim(clip_norm=2.0, neighbours=neighbours)
    planted, _ = run(plan, informed=True)
    release = ao.Release(plan, SIZE, key=KEY)
    nobody = plant(release, CANARIES, key=COINS)
    for _ in range(N):
        release.step([], np.zeros(SIZE))
    np.testing.assert_allclose(planted.result().scores, nobody.result().scores, rtol=1e-9)
    hidden, _ = run(plan)
    assert abs(hidden.result().scores - nobody.result().scores).max() > 0.1


def test_an_informed_result_is_not_shown_beside_its_run():
    """With the release it tells what the units added: whoever has both tells every unit, whatever epsilon is."""
    planted, rows = run(claim(mechanism="independent"), informed=True)
    result = planted.result()
    assert result.informed
    there = np.array([canaries_of(planted, t) for t in planted.steps[0]]).sum(0)
    seen = sum(CANARIES.dot(rows[t] * 4) for t in planted.steps[0])
    added = seen - there - (result.scores * np.sqrt(2) - there)  # by the data, without noise
    np.testing.assert_allclose(added, sum(CANARIES.dot(total(t)) for t in planted.steps[0]), atol=1e-9)
    for shown in (result.to_dict, AuditSummary.of(result).to_dict):
        with pytest.raises(ArgumentError, match="tells what the units added to anyone who has its release"):
            shown()
    assert result.to_dict(secrets=True)["informed"] is True
    alone = replace(result, run_discarded=True)
    assert alone.to_dict()["informed"] is True
    assert AuditSummary.of(alone).to_dict()["refuted"] is False
    planted, _ = run(claim())
    assert planted.result().to_dict()["informed"] is False


def canaries_of(planted, t):
    """(count,) what canaries add at step t in their own directions."""
    return planted.plan.clip_norm * planted.weights(t)


def test_coins_come_from_the_system_where_no_key_is_given():
    plan = claim()
    canaries = Canaries(SIZE, 60, SIZE, 1)
    coins = [plant(ao.Release(plan, SIZE, key=KEY), canaries).included for _ in range(3)]
    assert all(10 < (a != b).sum() < 50 for a, b in ((coins[0], coins[1]), (coins[1], coins[2])))
    assert "True" not in repr(plant(ao.Release(plan, SIZE), canaries))


# -- the engine ------------------------------------------------------------------------------------------------------


def trained(plan=None, plant_in=True, loader=None, **options):
    engine, model, optimizer, loader = private(plan, loader=loader, **options)
    count = sum(p.numel() for p in model.parameters()) + bool(options.get("rule"))
    canaries = Canaries(engine.release.size, 5, count, 1)
    assert engine.release.size == count
    planted = plant(engine, canaries, key=COINS, totals=True) if plant_in else None
    rows, norms = [], []
    while engine.step < engine.plan.n:
        for batch in loader:
            optimizer.zero_grad()
            norms.append(engine.clip_norm)
            backward(model, batch)
            try:
                optimizer.step()
            except KeyboardInterrupt:  # of a test's
                optimizer.step()
            rows.append(gradients(model).clone())
            for p in model.parameters():
                p.grad.zero_()
            if engine.step == engine.plan.n:
                break
    return planted, torch.stack(rows).double().numpy(), np.array(norms), engine


def test_the_engine_releases_the_planned_sum_and_the_canaries():
    plan = planned(mechanism="independent")
    zero = {"optimizer": lambda p: torch.optim.SGD(p, lr=0.0)}  # gradients do not follow from what was released
    planted, rows, _, engine = trained(plan, **zero)
    _, plain, _, _ = trained(plan, plant_in=False, **zero)
    steps = planted.steps[0]
    assert engine.plan.participation.pattern.allows(steps)
    added = plan.clip_norm * planted.canaries.sum(planted.included) / plan.batch_size
    for t in range(plan.n):
        np.testing.assert_allclose(rows[t] - plain[t], added * (t in steps), atol=1e-5)
        np.testing.assert_allclose(planted.released[t], rows[t] * plan.batch_size, atol=1e-4)
    expected = scores(rows * plan.batch_size, plan.strategy, steps, planted.canaries)
    np.testing.assert_allclose(planted.result().scores, expected, rtol=1e-4, atol=1e-4)


def test_an_adaptive_clip_norm_changes_no_score():
    """Canaries join after sums are brought to the planned norm, and scores are in the planned units."""
    plan = planned(mechanism=Independent(EPOCHS * STEPS), clip_norm=0.5)
    planted, rows, norms, engine = trained(plan, rule=ao.clipping.Adaptive(share=0.3, learning_rate=2.0))
    assert norms[-1] != norms[0]
    noise = planted.released - planted.totals
    assert abs(noise.std() / plan.noise_std - 1) < 5 / np.sqrt(2 * noise.size)
    share = np.sqrt(1 - 0.3**2)
    for t in range(plan.n):
        gradient = rows[t] * plan.batch_size * plan.clip_norm * share / norms[t]
        np.testing.assert_allclose(planted.released[t][:-1], gradient, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(planted.result().mus, plan.mu, rtol=1e-4)


def test_restarted_epochs_and_a_known_order_in_the_engine():
    n = EPOCHS * STEPS
    blt = RestartedBLT([[0.9]] * EPOCHS, [[0.3]] * EPOCHS, [0.5] * EPOCHS, [1.0] * EPOCHS, n, STEPS)
    planted, *_ = trained(planned(mechanism=blt))
    assert planted.result().scores.shape == (5,)
    order = KnownOrder([[4 * t + i for i in range(4)] for t in range(STEPS)] * 2)
    plan = planned(participation=order, dataset_size=None, epochs=None, mechanism=Tree(2 * STEPS, "full"))
    loader = DataLoader(data(), batch_size=4)
    planted, *_ = trained(plan, loader=loader)
    assert planted.steps[0] in order.pattern.enumerate()


def test_poisson_sampling_in_the_engine():
    plan = (
        ao.plan(dataset_size=24, batch_size=4, epochs=2, sampling="poisson", epsilon=8, delta=1e-5) if False else None
    )
    rule = PoissonSampling(12, 4 / 24)
    plan = ao.plan(order=rule, batch_size=4, noise_multiplier=1, delta=1e-5)
    planted, *_ = trained(plan)
    assert planted.result().mus is None


# -- what is refused -------------------------------------------------------------------------------------------------


def state(release):
    return release._guest, release.ledger.to_bytes(), release._noise.state_dict()["t"], [*release._observers]


@pytest.mark.parametrize("name", PARTICIPATIONS)
def test_steps_that_the_rule_forbids_are_refused(name):
    plan = claim(PARTICIPATIONS[name](N))
    allowed = {p for own in plan.participation.patterns() for p in subsets(own)}
    forbidden = [p for p in subsets(range(N)) if p not in allowed]
    if not forbidden:
        assert name == "any steps"
        return
    release = ao.Release(plan, SIZE, key=KEY)
    before = state(release)
    for steps in forbidden:
        with pytest.raises(ParticipationError, match="12 sets|1 of 1 sets of steps of canaries are not allowed"):
            plant(release, CANARIES, steps)
    mixed = [max(allowed)] * 11 + [forbidden[0]]
    with pytest.raises(ParticipationError, match="1 of 2 sets"):
        plant(release, CANARIES, mixed)
    assert state(release) == before
    plant(release, CANARIES, [max(allowed)] * 12)


def subsets(steps):
    steps = [*steps]
    return [
        tuple(s for i, s in enumerate(steps) if mask >> i & 1) for mask in range(1, 2 ** len(steps))
    ]  # fmt: skip


def test_what_cannot_be_planted_changes_nothing(tmp_path):
    plan = claim()
    release = ao.Release(plan, SIZE, key=KEY)
    before = state(release)
    for wrong, message in (
        (lambda: plant(None, CANARIES), "release must be"),
        (lambda: plant(plan, CANARIES), "release must be"),
        (lambda: plant(release, np.eye(SIZE)), "canaries must be"),
        (lambda: plant(release, Canaries(SIZE + 1, 2, 3, 0)), "size=60, got 61"),
        (lambda: plant(release, CANARIES, [N]), "steps in participations"),
        (lambda: plant(release, CANARIES, [0, 0]), "distinct"),
        (lambda: plant(release, CANARIES, key=b"x"), "key must be"),
    ):
        with pytest.raises(ArgumentError, match=message):
            wrong()
        assert state(release) == before
    planted = plant(release, CANARIES)
    with pytest.raises(TrainingError, match="a second time"):
        plant(release, CANARIES)
    with pytest.raises(TrainingError, match="nothing was released yet"):
        planted.result()
    assert len(release._observers) == 1
    begun = ao.Release(plan, SIZE)
    begun.step([], np.zeros(SIZE))
    with pytest.raises(TrainingError, match="after its first step"):
        plant(begun, CANARIES)
    with (
        ao.Release(plan, SIZE, checkpoint=tmp_path / "run") as saved,
        pytest.raises(TrainingError, match="with a checkpoint"),
    ):
        plant(saved, CANARIES)
    closed = ao.Release(plan, SIZE)
    closed.close()
    with pytest.raises(TrainingError, match="closed"):
        plant(closed, CANARIES)
    with pytest.raises(TrainingError, match="bound to no model"):
        plant(ao.PrivacyEngine(plan), CANARIES)
    several = ao.Release(plan, SIZE)
    several._ranks = type("Two", (), {"size": 2})()
    with pytest.raises(TrainingError, match="among several ranks"):
        plant(several, CANARIES)
    assert all(r._guest is None and not r._observers for r in (begun, saved, closed, several))


def test_rows_of_a_table_are_refused_in_an_audited_run():
    plan = claim(mechanism=Tree(N))
    release = ao.Release(plan, SIZE, key=KEY)
    planted = plant(release, CANARIES, key=COINS)
    before = state(release)
    with pytest.raises(TrainingError, match="not step_rows"):
        release.step_rows([0], [0, 2], np.zeros((2, 6)))
    assert state(release) == before
    release.step([0], np.zeros(SIZE))
    assert planted.result().scores.shape == (12,)


def test_a_refused_step_leaves_the_canaries_as_they_were():
    plan = claim(FixedOrder(N, k=1, b=N))
    rows = []
    for disturb in (False, True):
        release = ao.Release(plan, SIZE, key=KEY)
        planted = plant(release, CANARIES, key=COINS, totals=True)
        for t in range(N):
            if disturb:
                with pytest.raises(ArgumentError):
                    release.step([t], np.full(SIZE, np.nan))
                with pytest.raises(ArgumentError, match="nobody"):
                    release.step([], np.ones(SIZE))
                if t:
                    with pytest.raises(ParticipationError):
                        release.step([t - 1], total(t))
            release.step([t], total(t))
        rows.append((planted.totals, planted.released, planted.result().scores))
    for a, b in zip(*rows, strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_step_that_is_broken_off_adds_no_canary_twice(monkeypatch):
    """The engine's waiting sums stay its own until the step is taken: the same call goes on."""
    plan = planned(mechanism="independent")
    planted, rows, _, _ = trained(plan)
    broken = []

    real = SharedNoise.add_to

    def add_to(self, *args):
        if not broken:
            broken.append(args)
            raise KeyboardInterrupt
        return real(self, *args)

    monkeypatch.setattr("anyorder.release.release.SharedNoise.add_to", add_to)
    again, same, _, _ = trained(plan)
    assert broken
    np.testing.assert_array_equal(rows, same)
    np.testing.assert_array_equal(planted.totals, again.totals)


def test_a_step_that_cannot_be_scored_spoils_the_result_not_the_run():
    release = ao.Release(claim(), SIZE, key=KEY)
    planted = plant(release, CANARIES, key=COINS)
    planted._scorer.add, add = lambda row: 1 / 0, planted._scorer.add
    with pytest.raises(ZeroDivisionError):
        release.step([0], total(0))
    planted._scorer.add = add
    release.step([1], total(1))
    assert release.steps_taken == 2
    with pytest.raises(TrainingError, match="step 0 released could not be scored"):
        planted.result()


def test_a_last_step_that_cannot_be_scored_spoils_the_result_too():
    release = ao.Release(claim(), SIZE, key=KEY)
    planted = plant(release, CANARIES, key=COINS)
    for t in range(N - 1):
        release.step([t], total(t))
    planted.result()
    planted._scorer.add = lambda row: 1 / 0
    with pytest.raises(ZeroDivisionError):
        release.step([N - 1], total(N - 1))
    assert release.steps_taken == N
    with pytest.raises(TrainingError, match=f"step {N - 1} released could not be scored"):
        planted.result()


def test_without_canaries_a_release_is_what_it_was():
    """The hook is one look at an attribute: same bits, nothing imported."""
    plan = claim()
    one, other = bare(plan), bare(plan)
    assert ao.Release(plan, SIZE)._guest is None
    for a, b in zip(one, other, strict=True):
        np.testing.assert_array_equal(a, b)


# -- patterns --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [5, 6, 8])
@pytest.mark.parametrize("order", PARTICIPATIONS)
def test_the_worst_steps_are_the_worst_of_all_that_are_allowed(order, n):
    rule = PARTICIPATIONS[order](n)
    allowed = list({p for own in rule.patterns() for p in subsets(own)})
    pi = np.zeros((len(allowed), n))
    for i, own in enumerate(allowed):
        pi[i, list(own)] = 1
    for name, make in STRATEGIES.items():
        strategy = make(n)
        steps = worst_steps(strategy, rule)
        assert steps in allowed
        assert rule.pattern.allows(steps)
        norms = np.linalg.norm(pi @ strategy.matrix().T, axis=1)
        found = np.linalg.norm(strategy.matrix()[:, list(steps)].sum(axis=1))
        np.testing.assert_allclose(found, norms.max(), rtol=1e-9, err_msg=name)


@pytest.mark.parametrize("b", [1, 2, 3])
@pytest.mark.parametrize(
    "column",
    [
        (1.0, -0.5, -0.5, -0.6),
        (1.0, -0.5, 0.2),
        (0.5, 1.0),
        (1.0, 0.0, 1.0),
        (1.0, 0.1, 0.0, 0.9),
        (1.0,) * 3 + (-1.0,) * 6,
    ],
)
def test_the_worst_steps_of_a_column_that_rises_or_goes_below_zero(column, b):
    """All sets of up to three steps, gone through by hand: close and early ones are not the worst here."""
    n = 9
    strategy, rule = ToeplitzBanded(column, n), MinSeparation(n, b, 3)
    C = strategy.matrix()
    allowed = [s for k in (1, 2, 3) for s in combinations(range(n), k) if all(np.diff(s) >= b)]
    most = max(np.linalg.norm(C[:, list(s)].sum(axis=1)) for s in allowed)
    steps = worst_steps(strategy, rule)
    assert steps in allowed
    assert np.linalg.norm(C[:, list(steps)].sum(axis=1)) == pytest.approx(most, rel=1e-9)


@pytest.mark.parametrize("order", PARTICIPATIONS)
def test_steps_are_allowed_where_patterns_are_many(order):
    n = 60
    rule = PARTICIPATIONS[order](n)
    for name in ("tree full", "square root", "banded inverse rising", "blt", "restarted", "low rank"):
        strategy = STRATEGIES[name](n)
        steps = worst_steps(strategy, rule)
        assert rule.pattern.allows(steps)
        most = np.linalg.norm(strategy.matrix()[:, list(steps)].sum(axis=1))
        for other in random_steps(rule, 50, NoiseSource(KEY)):
            assert np.linalg.norm(strategy.matrix()[:, list(other)].sum(axis=1)) <= most * (1 + 1e-9)
        assert most <= ao.sensitivity(strategy, rule).value * (1 + 1e-9)


@pytest.mark.parametrize("order", PARTICIPATIONS)
@pytest.mark.parametrize("n", [5, 8, 60])
def test_random_steps_pass_a_ledger(order, n):
    rule = PARTICIPATIONS[order](n)
    drawn = random_steps(rule, 40, NoiseSource(KEY))
    assert drawn == random_steps(rule, 40, NoiseSource(KEY))
    assert all(tuple(sorted(set(steps))) == steps and rule.pattern.allows(steps) for steps in drawn)
    if type(rule) is not KnownOrder:
        ledger = Ledger(rule)
        for t in range(n):
            ledger.record(t, [c for c, steps in enumerate(drawn) if t in steps])
    assert len(set(drawn)) > 1 or len([*zip(range(2), rule.patterns(), strict=False)]) == 1 or order == "any steps"


def test_random_steps_are_spread_evenly():
    drawn = random_steps(PARTICIPATIONS["three steps"](6), 8000, NoiseSource(KEY))
    counts = np.array([drawn.count(steps) for steps in set(drawn)])
    assert len(counts) == 20
    assert abs(counts - 400).max() < 5 * 20


@pytest.mark.parametrize("name", SAMPLED)
def test_steps_under_secret_sampling_are_of_what_coins_can_give(name):
    rule = SAMPLED[name](6)
    assert rule.pattern.allows(worst_steps(Tree(6), rule))
    drawn = random_steps(rule, 20, NoiseSource(KEY))
    assert all(rule.pattern.allows(steps) for steps in drawn)
    with pytest.raises(ArgumentError, match="known must be False"):
        plant(ao.Release(claim(), SIZE), CANARIES, known=True)


def test_patterns_refuse_what_does_not_fit():
    with pytest.raises(ArgumentError, match="source must be"):
        random_steps(FixedOrder(4, 2, 2), 3, KEY)
    with pytest.raises(ArgumentError, match="count must be"):
        random_steps(FixedOrder(4, 2, 2), 0, NoiseSource(KEY))


# -- the result ------------------------------------------------------------------------------------------------------


def audited(mu, claimed=None, independent=True, count=1000):
    claimed = mu if claimed is None else claimed
    rng = np.random.default_rng(0)
    included = rng.random(count) < 0.5
    curve = Gaussian(claimed)
    return Audited(
        scores=rng.normal(size=count) + mu * included, included=included, noise_std=1.0, mus=np.full(count, claimed),
        curve=curve, delta=1e-5, epsilon=curve.epsilon(1e-5), independent=independent,
    )  # fmt: skip


def test_a_claim_is_refuted_where_it_is_false():
    mu = 1.666  # epsilon 8
    honest, half = audited(mu), audited(2 * mu, mu)
    assert not honest.refuted()
    assert half.refuted()
    assert half.p_value() < 1e-50 < 1e-3 < half.p_value("f_dp")
    assert half.lower_bound() > half.epsilon > honest.lower_bound() > 0
    low, high = honest.mu_estimate()
    assert low < mu < high
    careful = audited(2 * mu, mu, independent=False)
    assert (careful.method, half.method) == ("f_dp", "gaussian")
    assert careful.p_value() == half.p_value("f_dp")


@pytest.mark.parametrize("tail", [None, "heavy", "one", "many"])
def test_what_the_data_add_makes_no_verdict_of_a_true_claim(tail):
    """A tight claim: p-values at their level without data; data in the canaries' directions make them larger."""
    rng = np.random.default_rng(4)
    found = []
    for _ in range(400):
        others = {
            None: np.zeros(60),
            "heavy": 0.3 * rng.standard_t(2, size=60),
            "one": np.r_[50.0, np.zeros(59)],
            "many": 3.0 * rng.choice([-1, 0, 1], size=60),
        }[tail]
        included = rng.random(60) < 0.5
        result = replace(
            audited(1.666, count=60), scores=others + 1.666 * included + rng.normal(size=60), included=included
        )
        found.append(result.p_value())
    for level in (0.02, 0.05, 0.2):
        assert np.mean(np.array(found) <= level) <= level + 4 * np.sqrt(level / 400)
    if tail is None:
        assert np.mean(np.array(found) <= 0.2) > 0.1


def test_data_that_agree_with_the_coins_by_chance_refute_no_true_claim():
    """Gradients that point along half of four canaries: every eighth draw of the coins is theirs, or their opposite."""
    rule = ao.participation.SingleEpoch(1)
    plan = ao.plan(order=rule, batch_size=10_000, epsilon=1.0, delta=1e-6, mechanism="independent")
    canaries, matched = Canaries(4, 4, 4, 0), 0
    everyone = canaries.vectors()[:2].sum(0) / np.sqrt(2)
    for seed in range(40):
        release = ao.Release(plan, size=4, key=KEY)
        planted = plant(release, canaries, key=bytes([seed]) * 32)
        release.step(range(10_000), 10_000 * plan.clip_norm * everyone)
        result = planted.result()
        matched += result.included.tolist() == [True, True, False, False]
        assert not result.refuted()
        assert result.method == "f_dp"
    assert matched


@pytest.mark.parametrize("count", [1, 2, 30])
@pytest.mark.parametrize("side", [False, True])
def test_coins_that_are_all_alike_refute_nothing(count, side):
    result = replace(audited(1.0, count=count), included=np.full(count, side))
    assert result.method == "gaussian"
    assert result.p_value() == 1.0
    assert not result.refuted()
    told = result.to_dict()
    assert (told["p_value"], told["refuted"], told["mu_low"], told["mu_high"]) == (1.0, False, None, None)
    two = replace(audited(1.0, count=2), included=np.array([True, False]))
    assert two.p_value() == 1.0  # and two say nothing of their spread
    assert two.to_dict()["mu_low"] is None


def test_what_is_written_of_an_audit_tells_no_coin():
    result = audited(1.0, count=50)
    told = result.to_dict()
    assert json.loads(json.dumps(told)) == told
    assert not {"scores", "included", "mus"} & set(told)
    assert told["refuted"] is False
    assert "array" not in repr(result)
    secret = result.to_dict(secrets=True)
    assert secret["included"] == result.included.tolist()
    assert secret["scores"] == result.scores.tolist()
    sampled = replace(result, curve=Sampled(1.0, 0.1, 10), mus=None, noise_std=None)
    assert sampled.method == "clopper_pearson"


@pytest.mark.parametrize(
    "change",
    [
        {"scores": np.zeros((2, 3))}, {"scores": [np.nan] * 50}, {"included": [1] * 50}, {"included": [True]},
        {"delta": 0}, {"epsilon": -1}, {"noise_std": 0}, {"mus": [1.0]},
    ],
)  # fmt: skip
def test_results_that_do_not_fit_together_are_refused(change):
    with pytest.raises(ArgumentError):
        replace(audited(1.0, count=50), **change)
