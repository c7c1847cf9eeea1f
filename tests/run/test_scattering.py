"""Scattering features are those of Kymatio; the model on them learns mean, spread and classes under one plan."""

import gc
import json
from dataclasses import replace
from math import pi

import pytest
import torch
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from anyorder.app import Settings, job, train
from anyorder.app.data import Data
from anyorder.app.features import Features, Whitened, _mirrored, scatter, scattered
from anyorder.app.job import rates
from anyorder.errors import ArgumentError, CheckpointError, ModelError
from anyorder.plan.certificate import verify
from run.stopping import StopAt, assert_goes_on

KEY = bytes(range(32))
TEXTURES = """
import torch
from torch.utils.data import TensorDataset


def load():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(400, 1, 8, 8, generator=generator)
    y = torch.arange(400) % 2
    x = torch.where(y[:, None, None, None] == 1, x + x.roll(1, -1), x + x.roll(1, -2))
    return TensorDataset(x[:300], y[:300]), TensorDataset(x[300:], y[300:])
"""


@pytest.fixture(scope="module")
def textures():
    """Images of two textures, 300 to train on."""
    space = {}
    exec(TEXTURES, space)
    train_part, test_part = space["load"]()
    return Data("textures", train_part, test_part, (1, 8, 8), 2)


def small(dataset="textures", **changes):
    return Settings.of(dataset, **{"model": "scattering", "epsilon": 8.0, "batch_size": 60, "epochs": 6, **changes})


# -- features --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("scales", "shape"), [(1, (8, 12)), (2, (28, 28)), (3, (32, 24))])
def test_coefficients_are_those_of_kymatio(scales, shape):
    pytest.importorskip("kymatio", reason="kymatio is not installed")
    from kymatio.scattering2d.frontend.torch_frontend import ScatteringTorch2D  # kymatio.torch wants an older SciPy

    x = torch.rand(3, 2, *shape, generator=torch.Generator().manual_seed(1))
    ours, theirs = scatter(x, scales=scales), ScatteringTorch2D(J=scales, shape=shape)(x)
    assert ours.shape == theirs.shape
    filters = torch.ones(ours.shape[2])  # how many act one after the other; Kymatio divides each by 3.1415, not by pi
    filters[1:], filters[1 + 8 * scales :] = 2, 3
    torch.testing.assert_close(ours * (pi / 3.1415) ** filters[:, None, None], theirs, rtol=2e-5, atol=1e-6)


def test_an_images_features_are_of_that_image_alone():
    x = torch.rand(40, 1, 16, 16, generator=torch.Generator().manual_seed(2))
    together = scatter(x)
    assert together.shape == (40, 1, 81, 4, 4)
    torch.testing.assert_close(scatter(x[17:18]), together[17:18])
    assert scatter(x[:0]).shape == (0, 1, 81, 4, 4)


@pytest.mark.parametrize("bad", [torch.rand(8, 8), torch.rand(1, 1, 8, 10), torch.ones(1, 1, 8, 8, dtype=torch.int64)])
def test_what_is_no_stack_of_images_is_refused(bad):
    with pytest.raises(ArgumentError, match="images must be float of shape"):
        scatter(bad)


def test_mirrored_features_are_nearly_those_of_the_mirror_image():
    x = F.avg_pool2d(torch.rand(5, 1, 40, 40, generator=torch.Generator().manual_seed(3)), 9, 1)
    own, other = scatter(x), scatter(x.flip(-1))
    for order in (slice(1, 17), slice(17, 81)):
        apart = (_mirrored(own) - other)[:, :, order].norm() / other[:, :, order].norm()
        assert apart < 0.6 * (own - other)[:, :, order].norm() / other[:, :, order].norm()
        assert apart < 0.4


def test_features_of_a_data_set():
    x = torch.rand(6, 3, 8, 8, generator=torch.Generator().manual_seed(4))
    part = TensorDataset(x, torch.arange(6) % 2)
    found = scattered(Data("own", part, part, (3, 8, 8), 2))
    assert found.input_shape == (3, 81, 2, 2)
    assert found.train.x.dtype == torch.float16
    torch.testing.assert_close(found.train.x, _mirrored(found.train.x))  # where there is colour
    grey = scattered(Data("own", *[TensorDataset(x[:, :1], torch.arange(6) % 2)] * 2, (1, 8, 8), 2))
    assert torch.equal(grey.train.x, torch.log1p(1000 * scatter(x[:, :1]).clamp(min=0)).half())
    with pytest.raises(ModelError, match="sides divided by 4"):
        scattered(Data("own", part, part, (8,), 2))


# -- the model -------------------------------------------------------------------------------------------------------


def test_mean_and_spread_are_those_of_the_features(textures, tmp_path):
    """With hardly any noise; a wrong clip norm, sign or number of steps would show."""
    data = scattered(textures)
    settings = small(epsilon=None, noise_multiplier=1e-7, clip_norm=0.25, batch_size=70)  # 300 is no multiple of it
    state = torch.load(train(settings, tmp_path / "run", data=data, key=KEY).path / "model.pt", weights_only=True)
    z = F.normalize(data.train.x.float().flatten(1))
    torch.testing.assert_close(state["mean"], z.mean(0), rtol=1e-3, atol=1e-6)
    c = F.normalize(z - state["mean"]).view(300, 81, 4)
    spread = F.normalize((c @ c.mT).flatten(1)).mean(0).view(81, 81)
    torch.testing.assert_close(state["spread.weight"].view(81, 81), spread, rtol=1e-3, atol=1e-6)
    mixing = state["mixing"].double()
    values = torch.linalg.eigvalsh(spread.double()).clamp(min=0)
    ridged = spread.double() + 0.3 * values.mean() * torch.eye(81)
    expected = 1.3 * values.mean() * torch.eye(81, dtype=torch.float64)
    torch.testing.assert_close(mixing @ ridged @ mixing, expected, rtol=2e-3, atol=2e-6)
    assert data.train.x.dim() == 5  # the caller's features are as they were


def test_what_is_averaged_has_norm_one():
    model = Whitened((1, 81, 2, 2), 2)
    x = torch.rand(7, 1, 81, 2, 2, generator=torch.Generator().manual_seed(5))
    for stage, layer in (("mean", model.centre), ("spread", model.spread)):
        model.stage = stage
        for i in range(7):
            (found,) = torch.autograd.grad(model(x[i : i + 1]).sum(), layer.weight)
            assert float(found.norm()) == pytest.approx(1, abs=1e-5)
    assert model.eval()(x).shape == (7, 2)


def test_features_take_up_all_of_a_classes_gradient():
    """An image's gradient has the norm of what is wrong in its probabilities: a bias's would come on top."""
    model = Whitened((1, 81, 2, 2), 2)
    x = torch.rand(1, 1, 81, 2, 2, generator=torch.Generator().manual_seed(6))
    own = [p for name, p in model.named_parameters() if name.startswith("classify")]
    found = torch.autograd.grad(F.cross_entropy(model(x), torch.tensor([1])), own)
    assert float(torch.cat([g.flatten() for g in found]).norm()) == pytest.approx(0.5**0.5, abs=1e-5)


def test_every_stage_has_the_noise_of_the_plan(textures, tmp_path):
    """Two keys' means differ by the noise of an epoch: half of it would show."""
    settings = small(epsilon=None, noise_multiplier=2.0, mechanism="independent", epochs=3)
    data, means, spreads = scattered(textures), [], []
    for name in ("a", "b"):
        result = train(settings, tmp_path / name, data=data, key=name.encode() * 32)
        state = torch.load(result.path / "model.pt", weights_only=True)
        means.append(state["centre.weight"])
        spreads.append(state["spread.weight"])
    expected = (2 * 5) ** 0.5 * 2.0 / 300  # two keys, five steps, noise_multiplier, over the examples
    assert float((means[0] - means[1]).std()) == pytest.approx(expected, rel=0.15)
    apart = (spreads[0] - spreads[1]).view(81, 81)  # by what is measured too, as the means differ; that is symmetric
    assert float((apart - apart.T).std()) / 2**0.5 == pytest.approx(expected, rel=0.15)


@pytest.mark.parametrize("order", ["fixed", "balls-in-bins"])
def test_the_certificate_is_of_all_three_stages(order, textures, tmp_path):
    own = {"epsilon": None, "noise_multiplier": 1.0, "mechanism": "independent"}
    budget = {} if order == "fixed" else own
    result = train(small(order=order, **budget), tmp_path / "run", data=textures)
    found = verify(result.path / "run.privacy.json", evidence=result.path / "secret" / "run.evidence.json")
    assert found.certificate.steps == result.plan.n == 30
    if order == "fixed":
        assert result.plan.epsilon <= 8
        rows = [list(units) for units in found.evidence.ledger.history()]
        for epoch in range(6):
            assert sorted(i for step in rows[5 * epoch : 5 * epoch + 5] for i in step) == list(range(300))
        assert result.accuracy[:2] == [result.accuracy[0]] * 2  # nothing is known of classes yet
        assert result.accuracy[-1] > 0.6


def test_a_run_that_is_stopped_in_its_second_stage_goes_on_bit_for_bit(tmp_path, monkeypatch):
    """In the first and in the third: test_patches.py, by the same stages."""
    (tmp_path / "textures_of_a_test.py").write_text(TEXTURES)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    settings = small("textures_of_a_test:load", checkpoint_every=1, epochs=3, classes=2)
    assert_goes_on(settings, tmp_path, 7)


def test_a_resume_in_a_late_stage_over_moved_images_is_refused(textures, tmp_path, monkeypatch):
    settings = small(checkpoint_every=1, epochs=4)
    with pytest.raises(KeyboardInterrupt):
        train(settings, tmp_path / "run", data=textures, observer=StopAt(16))
    x, y = (part.roll(1, 0) for part in textures.train.tensors)
    given = [replace(textures, train=TensorDataset(x, y)), textures]
    monkeypatch.setattr(job.datasets, "load", lambda *_: given.pop(0))
    with pytest.raises(CheckpointError, match="rows of the data set are not those") as caught:
        job.resume(tmp_path / "run")
    assert caught.value.changed == (300, 300)
    assert len(job.resume(tmp_path / "run").accuracy) == 4


def test_a_second_run_does_not_hold_the_features_of_the_first(textures, tmp_path):
    features = scattered(textures)
    before = {id(one) for one in gc.get_objects() if isinstance(one, Features)}
    gc.disable()  # which is what it comes to where few objects are made, as by runs on features
    try:
        train(small(epochs=3), tmp_path / "first", data=features)
        held = {id(one) for one in gc.get_objects() if isinstance(one, Features)} - before
        assert held  # torch's optimizers are in cycles that reach them
        train(small(epochs=3), tmp_path / "second", data=features)
        assert len({id(one) for one in gc.get_objects() if isinstance(one, Features)} - before) <= len(held)
    finally:
        gc.enable()


# -- settings --------------------------------------------------------------------------------------------------------


def test_the_settings_of_image_data_sets_do_not_depend_on_what_is_installed():
    chosen = Settings.of("mnist", epsilon=4.0, model="scattering")
    assert (chosen.model, chosen.batch_size, chosen.epochs, chosen.order) == ("scattering", 6000, 60, "fixed")
    assert (chosen.clip_norm, chosen.schedule, chosen.lr) == (0.02, "linear", 4000.0)
    assert Settings.of("fashion_mnist", epsilon=1.0, model="scattering").lr == 500.0
    assert Settings.of("cifar10", epsilon=3.0, model="scattering").lr == 2598.1
    assert Settings.of("cifar10", epsilon=100.0).lr == Settings.of("cifar10", epsilon=8.0).lr
    assert Settings(**json.loads(json.dumps(chosen.to_dict()))) == chosen
    other = Settings.of("mnist", epsilon=4.0, model="cnn")
    assert (other.batch_size, other.epochs, other.lr, other.order) == (250, 5, 0.2, "shuffled")
    assert (other.schedule, other.clip_norm) == ("constant", 1.0)


def test_a_linear_schedule_is_the_plans_workload(textures, tmp_path):
    found = rates(small(), 300)
    assert found.tolist() == [1 - t / 30 for t in range(30)]
    assert rates(small(schedule="constant"), 300) is None
    result = train(small(model="linear", lr=0.1, schedule="linear", epochs=2), tmp_path / "run", data=textures)
    assert result.plan.workload.learning_rates.tolist() == [1 - t / 10 for t in range(10)]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"epochs": 2}, "epochs must be at least 3"),
        ({"optimizer": "ftrl"}, "needs a constant one"),
        ({"model": "linear", "optimizer": "ftrl", "schedule": "linear"}, "needs a constant one"),
        ({"schedule": "cosine"}, "schedule"),
    ],
)
def test_settings_that_do_not_fit_are_refused(changes, message):
    with pytest.raises(ArgumentError, match=message):
        small(**changes)
