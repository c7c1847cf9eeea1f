"""A training set-up of one's own, audited: honest ones pass, broken ones do not, and nothing secret is shown."""

import json
from dataclasses import replace
from math import inf

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import anyorder as ao
from anyorder.accounting import Gaussian
from anyorder.app import AuditSummary, Setup, audit_training, folder, plot_audit
from anyorder.app.audits import Request, attack, run, setup_of
from anyorder.app.charts import METHODS
from anyorder.audit import Canaries
from anyorder.audit.canaries import worst_steps
from anyorder.audit.laws import noise_law
from anyorder.audit.result import Audited
from anyorder.clipping import Adaptive
from anyorder.errors import AnyorderError, ArgumentError, TrainingError
from anyorder.formatting import rounded_up
from anyorder.plan.certificate import verify
from anyorder.release import release as release_run
from anyorder.strategy import BandedInverse
from anyorder.training.engine import PrivacyEngine
from plans import flat_plan

KEY = bytes(range(32))
COUNT, FEATURES = 60, 150


def cross_entropy(model, batch):
    x, y = batch
    return F.cross_entropy(model(x), y)


def setup(mechanism="tree", unit=None, **changes):
    given = {"order": "shuffled", "epsilon": 8.0, "delta": 1e-5, "mechanism": mechanism, "momentum": 0.9, **changes}
    plan = flat_plan(dataset_size=COUNT, batch_size=15, epochs=3, **given)
    rng = torch.Generator().manual_seed(0)
    data = TensorDataset(torch.randn(COUNT, FEATURES, generator=rng), torch.randint(2, (COUNT,), generator=rng))
    model = nn.Linear(FEATURES, 2)
    loader = DataLoader(data, batch_size=15, shuffle=given["order"] == "shuffled")
    return Setup(plan, model, torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9), loader, cross_entropy, unit)


class Quiet:
    """In place of a bar."""

    def __init__(self):
        self.plans, self.steps = [], []

    def started(self, plan):
        self.plans.append(plan)

    def stepped(self, step):
        self.steps.append(step)


@pytest.fixture
def half_the_noise(monkeypatch):
    real = release_run.SharedNoise
    monkeypatch.setattr(release_run, "SharedNoise", lambda C, source, std, *rest: real(C, source, std / 2, *rest))


@pytest.mark.parametrize(
    "made",
    [
        {}, {"mechanism": "independent", "order": "sequential"}, {"mechanism": "banded, 4 bands"},
        {"neighbours": "replace-one"}, {"secure": True},
    ],
    ids=str,
)  # fmt: skip
def test_an_honest_setup_is_not_refuted(made):
    done = attack(setup(**made), canaries=150, key=KEY)
    summary = AuditSummary.of(done.audited, confidence=0.9999, law=done.law)
    assert not summary.refuted
    assert set(summary.p_values) == {"gaussian", "noise"}
    assert summary.mu_seen[0] < done.audited.curve.mu < summary.mu_seen[1]  # the attack sees all that is claimed
    assert done.certificate.steps == done.certificate.plan.n == 12


def test_the_attacker_knows_the_data_and_scores_have_the_law_of_the_noise():
    found = attack(setup(), canaries=300, key=KEY).audited
    spread = np.concatenate(
        [found.scores[found.included] - found.mus[0] * found.noise_std, found.scores[~found.included]]
    )
    assert 0.8 < np.square(spread / found.noise_std).mean() < 1.25  # +- 3 standard deviations
    hidden = PrivacyEngine(setup().plan, key=KEY)
    made = setup()
    model, optimizer, loader = hidden.make_private(made.model, made.optimizer, made.loader)
    planted = ao.audit.plant(hidden, Canaries(302, 300, 302, seed=0), key=KEY)
    for _ in range(3):
        for batch in loader:
            optimizer.zero_grad()
            cross_entropy(model, batch).backward()
            optimizer.step()
    wide = planted.result()
    assert np.array_equal(wide.included, found.included)
    assert np.abs(wide.scores - found.scores).max() > 0.3 * found.noise_std  # the same noise, and the data's gradients


def test_half_the_noise_is_refuted_by_scores_and_by_the_noise_itself(half_the_noise):
    done = attack(setup(), canaries=300, key=KEY)
    summary = AuditSummary.of(done.audited, law=done.law)
    assert summary.refuted
    assert summary.p_values["gaussian"] < 1e-8
    assert summary.p_values["noise"] < 1e-8
    assert AuditSummary.of(done.audited).refuted  # by the scores alone


def test_secret_sampling_is_audited_by_the_law_of_its_noise(half_the_noise):
    done = attack(setup("poisson", order="poisson", epsilon=None, noise_multiplier=1.0), canaries=100)
    summary = AuditSummary.of(done.audited, law=done.law)
    assert set(summary.p_values) == {"clopper_pearson", "f_dp", "noise"}
    assert "secret sampling" in summary.unfit["gaussian"]
    assert summary.mu_seen is None
    assert summary.refuted
    both = AuditSummary.of(done.audited, law=done.law, known=done.known)
    assert set(both.p_values) == {"clopper_pearson", "f_dp", "known", "noise"}
    assert both.known.mu_seen is not None


def bins_setup():
    given = setup("independent", order="sequential")
    order = ao.participation.BallsInBins(3, 4)
    plan = ao.Plan(
        participation=order, strategy=BandedInverse([1.0, -0.6], 12), workload=ao.workload.momentum(12, 0.9),
        clip_norm=1.0, sigma=0.6, delta=1e-5, batch_size=15,
    )  # fmt: skip
    return replace(given, plan=plan)


def test_balls_in_bins_are_audited_with_the_bins_secret_and_known():
    made = bins_setup()
    done = attack(made, canaries=300, key=KEY)
    summary = AuditSummary.of(done.audited, law=done.law, known=done.known, confidence=0.9999)
    assert not summary.refuted
    assert summary.known.audited.epsilon == pytest.approx(made.plan.known_epsilon, rel=1e-5)
    low, high = summary.known.mu_seen
    assert low < done.known.mus.mean() < high
    assert summary.bounds["clopper_pearson"] < made.plan.epsilon
    assert summary.known.bounds["gaussian"] > summary.bounds["clopper_pearson"]
    written = summary.to_dict()
    assert written["known"]["claimed"]["mu"] == done.known.curve.mu
    assert f"if known  epsilon <= {rounded_up(made.plan.known_epsilon)}" in str(summary)


def test_half_the_noise_of_balls_in_bins_is_refuted_by_who_knows_the_bins(half_the_noise):
    done = attack(bins_setup(), canaries=300, key=KEY)
    assert AuditSummary.of(done.audited, known=done.known).p_values["known"] < 1e-8


def test_a_run_too_large_for_its_sums_to_be_kept_is_told_by_its_scores(monkeypatch):
    monkeypatch.setattr("anyorder.app.audits._MOST_NUMBERS", 12)
    done = attack(setup(), canaries=100)
    assert done.law is None
    assert set(AuditSummary.of(done.audited).p_values) == {"gaussian"}


@pytest.mark.parametrize("mechanism", ["independent", "tree", "banded, 4 bands"])
def test_the_noise_of_a_large_run_is_looked_at_in_some_coordinates(mechanism, monkeypatch):
    """Forty secret coordinates of 302, in every step; and no more is kept than that."""
    monkeypatch.setattr("anyorder.app.audits._MOST_NUMBERS", 12 * 40 + 5)
    shapes = []
    real = noise_law
    monkeypatch.setattr(
        "anyorder.app.audits.noise_law", lambda r, t, *rest: shapes.append((r.shape, t.shape)) or real(r, t, *rest)
    )
    for _ in range(5):
        done = attack(setup(mechanism, order="sequential"), canaries=100)
        summary = AuditSummary.of(done.audited, law=done.law)
        assert set(summary.p_values) == {"gaussian", "noise"}
        assert not summary.refuted
    assert shapes == [((12, 40), (12, 40))] * 5


def test_no_noise_in_steps_without_canaries_is_found_in_a_large_run(monkeypatch):
    monkeypatch.setattr("anyorder.app.audits._MOST_NUMBERS", 12 * 40)
    made = setup("independent", order="sequential")
    watched = worst_steps(made.plan.strategy, made.plan.participation)
    assert len(watched) == 3
    real, taken = release_run.SharedNoise.add_to, []

    def quiet(self, pieces, divisor):
        taken.append(divisor)
        sums = [piece.clone() for piece in pieces]
        noised = real(self, pieces, divisor)
        return noised if len(taken) - 1 in watched else [piece / divisor for piece in sums]

    monkeypatch.setattr(release_run.SharedNoise, "add_to", quiet)
    done = attack(made, canaries=100)
    assert len(taken) == 12
    assert not AuditSummary.of(done.audited).refuted  # the scores see their own steps
    assert AuditSummary.of(done.audited, law=done.law).refuted


def test_canaries_that_share_coordinates_are_not_taken_for_independent():
    done = attack(setup(), canaries=150, coordinates=20, key=KEY)
    assert not done.audited.independent
    assert set(AuditSummary.of(done.audited, law=done.law).p_values) == {"f_dp", "noise"}


def test_a_single_canary_is_audited_as_far_as_it_goes():
    summary = AuditSummary.of(attack(setup(), canaries=1).audited)
    assert set(summary.p_values) == {"f_dp"}
    assert summary.mu_seen is None
    assert "two canaries" in summary.unfit["gaussian"]
    assert not summary.refuted


def test_coins_are_not_the_same_in_the_next_audit():
    one, other = (attack(setup("independent"), canaries=100).audited.included for _ in range(2))
    assert (one != other).any()


def two_sides(neighbours="zero-out"):
    """40 canaries in and 60 out, each score where the claimed law has its centre."""
    included = np.arange(100) < 40
    low, high = (-3.0, 3.0) if neighbours == "replace-one" else (0.0, 6.0)
    curve = Gaussian(6.0, neighbours=neighbours)
    scores = 2 * np.where(included, high, low) + 0.01 * np.sin(np.arange(100))
    return low, high, Audited(
        scores=scores, included=included, noise_std=2.0, mus=np.full(100, 6.0), curve=curve,
        delta=1e-5, epsilon=curve.epsilon(1e-5),
    )  # fmt: skip


def test_a_verdict_is_at_one_in_a_million_for_all_tests_together():
    *_, audited = two_sides()
    for p_values, refuted in (
        ({"f_dp": 0.9e-6}, True),
        ({"f_dp": 1.1e-6}, False),
        ({"f_dp": 0.9, "noise": 0.4e-6}, True),
        ({"f_dp": 0.9, "noise": 0.6e-6}, False),
        ({"f_dp": 0.6e-6, "noise": 0.9}, False),
    ):
        summary = replace(AuditSummary.of(audited, ("one_run",)), p_values=p_values)
        assert summary.p_value == len(p_values) * min(p_values.values())
        assert summary.refuted is summary.to_dict()["refuted"] is refuted


@pytest.mark.parametrize("neighbours", ["zero-out", "replace-one"])
def test_a_picture_has_the_scores_and_the_law_of_each_side(neighbours, monkeypatch):
    figures = []
    monkeypatch.setattr("anyorder.app.charts.save_figure", lambda figure, path: figures.append(figure))
    low, high, audited = two_sides(neighbours)
    plot_audit(audited, "none.png")
    [axes] = figures[0].axes
    found = dict(zip(*axes.get_legend_handles_labels()[::-1], strict=True))
    for label, centre in (("60 canaries that were out", low), ("40 canaries that were in", high)):
        [drawn] = [handle for name, handle in found.items() if label in name]
        corners = drawn.get_xy()
        assert abs(corners[corners[:, 1] > 0, 0] - centre).max() < 1
    for label, centre in (("claimed, out", low), ("claimed, in", high)):
        [line] = [handle for name, handle in found.items() if name.startswith(label)]
        assert abs(line.get_xdata()[np.argmax(line.get_ydata())] - centre) < 0.1


def test_three_participations_accounted_as_one_are_refuted(monkeypatch):
    """The plan's sensitivity is that of one step; each unit is in three. The canaries are where the plan allows."""
    made = setup("independent")
    wrong = made.plan.noise_std / 3**0.5
    monkeypatch.setattr(type(made.plan), "noise_std", property(lambda plan: wrong))
    done = attack(made, canaries=300, key=KEY)
    assert AuditSummary.of(done.audited, law=done.law).refuted


def test_an_audit_leaves_nothing_that_its_noise_has_touched():
    """What it says follows from noise and coins: with a model that the same noise trained it would tell the data."""
    made = setup()
    before = [p.detach().clone() for p in made.model.parameters()]
    audited = audit_training(made, canaries=30)
    assert all(torch.equal(a, b) for a, b in zip(before, made.model.parameters(), strict=True))
    assert all(p.grad is None for p in made.model.parameters())
    assert not made.optimizer.state
    assert made.model.training
    assert audited.informed
    assert audited.run_discarded
    assert audited.to_dict()["refuted"] is False
    assert len(audit_training(made, canaries=30).scores) == 30  # and it can be audited again, or trained


def test_what_cannot_be_copied_cannot_be_audited():
    made = setup()
    made.model.kept = made.model.weight * 2
    with pytest.raises(ArgumentError, match="model and optimizer of a Setup must be such that copy.deepcopy copies"):
        audit_training(made)


def test_audit_training_takes_canaries_and_tells_of_steps():
    steps = []
    made = setup()
    size = sum(p.numel() for p in made.model.parameters())
    audited = audit_training(made, canaries=Canaries(size, 30, 60, seed=5), stepped=steps.append)
    assert steps == list(range(1, 13))
    assert len(audited.scores) == 30
    assert audited.delta == 1e-5


def test_units_accumulation_and_other_options():
    plan = ao.plan(dataset_size=20, batch_size=5, epochs=1, epsilon=4, delta=1e-5, unit="user", mechanism="independent")
    rows = torch.arange(40) // 2
    x = torch.randn(40, FEATURES, generator=torch.Generator().manual_seed(0))
    loader = [(rows[i : i + 5], x[i : i + 5]) for i in range(0, 40, 5)]
    model = nn.Linear(FEATURES, 1)
    made = Setup(
        plan, model, torch.optim.SGD(model.parameters(), lr=0.1), loader,
        lambda model, batch: model(batch[1]).square().mean(), unit=0, options={"accumulate": 2},
    )  # fmt: skip
    with pytest.raises(AnyorderError):  # a unit is in two micro-batches
        attack(made, canaries=50)
    loader[:] = [(rows[i : i + 2], x[i : i + 2]) for i in range(0, 16, 2)]
    model = nn.Linear(FEATURES, 1)
    made = replace(made, model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    seen = []
    counted = replace(made, loss=lambda model, batch: seen.append(batch) or made.loss(model, batch))
    assert attack(counted, canaries=50).certificate.steps == 4
    assert len(seen) == 8


def test_several_networks_and_optimizers():
    def loss(networks, batch):
        first, last = networks
        return F.cross_entropy(last(first(batch[0])), batch[1])

    models = [nn.Linear(FEATURES, 3), nn.Linear(3, 2)]
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1, momentum=0.9) for one in models]
    done = attack(replace(setup(), model=models, optimizer=optimizers, loss=loss), canaries=50, key=KEY)
    assert done.certificate.steps == 12
    assert not done.audited.refuted()


@pytest.mark.parametrize(
    ("wrong", "phrase"),
    [
        ({"plan": 8.0}, "plan of a Setup must be"),
        ({"model": lambda x: x}, "model must be an nn.Module, or several different ones in a list"),
        ({"optimizer": None}, "optimizer must be a torch.optim"),
        ({"loss": 1}, "loss of a Setup must be a function"),
        ({"options": {"unit": 0}}, "unit is given as a field"),
    ],
)
def test_a_setup_that_is_none(wrong, phrase):
    made = setup()
    with pytest.raises(ArgumentError, match=phrase):
        replace(made, **wrong)


def test_a_clip_norm_that_moves():
    """Canaries are as long as the norm that the plan was made for, whatever the norm in force is."""
    made = replace(setup("independent"), options={"rule": Adaptive(0.5)})
    done = attack(made, canaries=150, key=KEY)
    summary = AuditSummary.of(done.audited, confidence=0.9999, law=done.law)
    assert summary.mu_seen[0] < made.plan.mu < summary.mu_seen[1]
    assert not summary.refuted


def test_what_cannot_be_audited_is_said_in_words():
    with pytest.raises(ArgumentError, match="must return a scalar tensor, got one of shape"):
        audit_training(replace(setup(), loss=lambda model, batch: model(batch[0])))
    with pytest.raises(ArgumentError, match="must return a scalar tensor, got float"):
        audit_training(replace(setup(), loss=lambda model, batch: 1.0))
    with pytest.raises(ArgumentError, match=r"coordinates must be at most 302"):
        audit_training(setup(), coordinates=303)
    with pytest.raises(ArgumentError, match=r"must be an anyorder.app.Setup"):
        audit_training(setup)
    made = setup()
    with pytest.raises(ArgumentError, match="part of the canaries"):
        audit_training(made, canaries=Canaries(302, 3, 3, seed=1), coordinates=5)


def test_a_loader_that_ends_before_the_plan():
    plan = ao.plan(dataset_size=6, batch_size=2, epochs=3, epsilon=4, delta=1e-5, unit="user", mechanism="independent")
    model = nn.Linear(FEATURES, 1)
    x = torch.randn(2, FEATURES)
    stream = ((torch.tensor([2 * i, 2 * i + 1]), x.clone()) for i in range(3))
    made = Setup(
        plan, model, torch.optim.SGD(model.parameters(), lr=0.1), stream,
        lambda model, batch: model(batch[1]).square().mean(), unit=0,
    )  # fmt: skip
    with pytest.raises(TrainingError, match="ended after 3 steps, and its plan has 9"):
        audit_training(made)


# -- the job ---------------------------------------------------------------------------------------------------------


MODULE = """
import torch
from torch import nn
import anyorder as ao
from anyorder.app import Setup

def setup():
    plan = ao.plan(dataset_size=40, batch_size=10, epochs=2, epsilon=8, delta=1e-5, mechanism="tree")
    model = nn.Linear(100, 1)
    loader = torch.utils.data.DataLoader(torch.randn(40, 100), batch_size=10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return Setup(plan, model, optimizer, loader, lambda model, x: model(x).square().mean())

def secret():
    made = setup()
    plan = ao.Plan(
        participation=ao.participation.BallsInBins(2, 4), strategy=ao.strategy.BandedInverse([1.0, -0.6], 8),
        workload=ao.workload.prefix_sum(8), clip_norm=1.0, sigma=1.0, delta=1e-5, batch_size=10,
    )
    return Setup(plan, made.model, made.optimizer, made.loader, made.loss)

def nothing():
    return None
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    (tmp_path / "own_audit.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def test_what_an_audit_leaves(own):
    bar = Quiet()
    found = run(Request(target="own_audit:setup", canaries=80, out=own / "out", plot=own / "own.png"), bar)
    assert bar.steps == list(range(1, 9))
    assert bar.plans == [found.plan]
    assert {path.name for path in (own / "out").iterdir()} == {"audit.json", "audit.png", "run.privacy.json"}
    for picture in (own / "own.png", own / "out" / "audit.png"):
        assert picture.read_bytes().startswith(b"\x89PNG")
    text = (own / "out" / "audit.json").read_text()
    data = json.loads(text)
    assert data["format"] == "anyorder-audit/1"
    assert "not for use" in data["note"]
    certificate = verify(own / "out" / "run.privacy.json").certificate
    assert data["plan_digest"] == certificate.plan.digest
    assert data["key_fingerprint"] == certificate.key_fingerprint
    assert data["order"] == found.plan.participation.describe()
    assert data["mechanism"] == found.plan.strategy.describe()
    assert data["claims"] == found.plan.claims()
    elsewhere = replace(found, certificate=replace(found.certificate, plan=replace(found.plan, delta=1e-6)))
    assert elsewhere.to_dict()["plan_digest"] == elsewhere.certificate.plan.digest  # of what is public
    seen = data["audit"]
    assert set(seen) == {
        "attack", "canaries", "claimed", "confidence", "epsilon_at_least", "mu_seen", "no_bound", "p_value", "p_values",
        "refuted",
    }  # fmt: skip
    assert seen["canaries"]["in"] + seen["canaries"]["out"] == 80
    assert set(seen["epsilon_at_least"]) == set(METHODS)
    assert seen["claimed"]["epsilon"] == found.plan.epsilon
    assert set(seen["p_values"]) == {"gaussian", "noise"}
    assert seen["refuted"] is False
    assert "loss" not in text
    assert "included" not in text
    assert not any(isinstance(value, list) and len(value) > 4 for value in seen.values())  # no coins, no scores


def test_delta_method_and_confidence_are_those_asked_for(own):
    asked = Request(target="own_audit:setup", canaries=80, delta=1e-3, methods=("f_dp",), confidence=0.5)
    done = run(asked, Quiet())
    found = done.to_dict()["audit"]
    assert found["claimed"]["delta"] == 1e-3
    assert found["claimed"]["epsilon"] == done.plan.curve.epsilon(1e-3) < 0.9 * done.plan.epsilon
    assert set(found["epsilon_at_least"]) == {"f_dp"}
    assert found["confidence"] == 0.5


def test_a_delta_is_that_of_the_known_batches_too(own):
    """What is promised if batches become known, and what was seen then, stand on one card with the claim."""
    done = run(Request(target="own_audit:secret", canaries=90, delta=1e-2), Quiet())
    summary, found = done.summary, done.to_dict()["audit"]
    assert set(summary.p_values) == {"clopper_pearson", "f_dp", "known", "noise"}
    for seen, written in ((summary, found), (summary.known, found["known"])):
        assert seen.audited.delta == written["claimed"]["delta"] == 1e-2
        assert seen.audited.epsilon == written["claimed"]["epsilon"] == seen.audited.curve.epsilon(1e-2)
    assert summary.known.audited.epsilon < 0.9 * done.plan.known_epsilon


@pytest.mark.parametrize(
    ("wrong", "phrase"),
    [
        ({"canaries": 0}, "canaries must be"),
        ({"coordinates": 0}, "coordinates must be"),
        ({"confidence": 1.0}, "confidence must lie"),
        ({"delta": inf}, "delta must be"),
        ({"methods": ("two_runs",)}, "method must be one of"),
        ({"plot": "absent/x.png"}, "plot must be a file in a folder that exists"),
    ],
)
def test_a_request_that_cannot_be_met_is_refused_before_the_training(wrong, phrase, own):
    if "plot" in wrong:
        wrong = {"plot": own / wrong["plot"]}
    with pytest.raises(ArgumentError, match=phrase):
        Request(target="own_audit:setup", **wrong)


@pytest.mark.parametrize(
    ("target", "phrase"),
    [
        ("own_audit", "must be module:function or the folder"),
        ("own_audit:absent", "has no function 'absent'"),
        ("absent_module:setup", "cannot be found"),
        ("own_audit.py:setup", "write it as a module, own_audit:setup, without ./ and .py"),
        ("./own_audit.py:setup", "write it as a module, own_audit:setup, without ./ and .py"),
        ("folder/own_audit:setup", "write it as a module, folder.own_audit:setup"),
        ("own_audit:nothing", "must return an anyorder.app.Setup, got NoneType"),
        (".", "or the folder of a run"),
    ],
)
def test_targets_that_are_none(target, phrase, own):
    with pytest.raises(ArgumentError, match=phrase):
        setup_of(target)


def test_the_folder_of_a_run_is_repeated_and_stays_as_it_is(tmp_path):
    from anyorder.app import Settings, train

    settings = Settings.of("digits", epsilon=8.0, mechanism="tree", epochs=1, batch_size=240)
    path = train(settings, tmp_path / "run").path

    def files():
        return {p.relative_to(path): p.read_bytes() for p in path.rglob("*") if p.is_file()}

    before = files()
    assert path.joinpath(folder.CHECKPOINT).relative_to(path) in before
    first = setup_of(str(path))
    assert first.plan == ao.Plan.load(path / folder.PLAN)
    weights = torch.cat([p.detach().flatten().clone() for p in first.model.parameters()])
    found = run(Request(target=str(path), canaries=400), Quiet())
    assert files() == before
    assert not found.summary.refuted
    assert found.certificate.plan == first.plan
    own = verify(path / folder.CERTIFICATE).certificate
    assert found.certificate.key_fingerprint != own.key_fingerprint  # noise of its own
    again = torch.cat([p.detach().flatten() for p in setup_of(str(path)).model.parameters()])
    assert torch.equal(weights, again)
    np.testing.assert_allclose(found.summary.audited.mus, own.plan.mu, rtol=1e-3)
