"""Features of patches are a fixed function of each image; the model on them learns under the same plan as without."""

import pytest
import torch
from torch.nn import functional as F
from torch.utils.data import Dataset, TensorDataset

from anyorder.app import Settings, features, train
from anyorder.app import features as patches
from anyorder.app.data import Data
from anyorder.app.features import Whitened, look, patched, scattered
from anyorder.errors import ArgumentError, ModelError
from anyorder.plan.certificate import verify
from run.stopping import assert_goes_on

KEY = bytes(range(32))
TEXTURES = """
import torch
from torch.utils.data import TensorDataset


def load():
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(400, 1, 12, 12, generator=generator)
    y = torch.arange(400) % 2
    x = torch.where(y[:, None, None, None] == 1, x + x.roll(1, -1), x + x.roll(1, -2)) / 2
    return TensorDataset(x[:300], y[:300]), TensorDataset(x[300:], y[300:])
"""


@pytest.fixture(autouse=True)
def few_patterns(monkeypatch):
    monkeypatch.setattr(features, "_PATTERNS", 24)


@pytest.fixture(scope="module")
def textures():
    """Images of two textures, 300 to train on."""
    space = {}
    exec(TEXTURES, space)
    train_part, test_part = space["load"]()
    return Data("textures", train_part, test_part, (1, 12, 12), 2)


def small(dataset="textures", **changes):
    return Settings.of(dataset, **{"model": "patches", "epsilon": 8.0, "batch_size": 60, "epochs": 6, **changes})


# -- features --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("channels", "kept"), [(1, 35), (3, 58)])
def test_a_patch_is_compared_with_each_pattern(channels, kept):
    """The formula at the top of the module, for images of one patch."""
    x = torch.rand(5, channels, 6, 6, generator=torch.Generator().manual_seed(1))
    filters, drawn = patches._whitening(channels), patches._patterns(7, kept)
    assert filters.shape == (kept, channels, 6, 6)
    seen = x.flatten(1).double() @ filters.flatten(1).T.double()
    h = seen / (seen.square().sum(1, keepdim=True) + kept * 0.1**2).sqrt()
    expected = (h @ drawn.double() - patches._THRESHOLD).clamp(min=0)
    torch.testing.assert_close(look(x, patterns=7, grid=1)[:, :, 0, 0].double(), expected, rtol=1e-4, atol=1e-5)


def test_whitened_patches_of_such_noise_vary_alike():
    period, generator = 64, torch.Generator().manual_seed(2)
    f = torch.fft.fftfreq(period)
    power = 1 / (f[:, None] ** 2 + f**2 + 1 / 32**2)
    noise = torch.fft.ifft2(torch.fft.fft2(torch.randn(400, period, period, generator=generator)) * power.sqrt()).real
    filters = patches._whitening(1)
    seen = F.conv2d(noise[:, None], filters).transpose(0, 1).flatten(1)
    spread = seen @ seen.T / seen.shape[1]
    apart = spread / (spread.diag()[:, None] * spread.diag()).sqrt() - torch.eye(35)
    assert float(apart.abs().max()) < 0.35  # cosines are nearly the directions in which such noise varies on its own
    share = spread.diag() / spread.diag().max()
    assert float(share.min()) > 0.6  # and less for the finest waves by the ridge alone: 0.041 / (0.041 + 0.02)
    assert float(filters[0].norm()) == pytest.approx(1.02**-0.5, abs=1e-6)  # the longest wave has variance 1
    raw = F.conv2d(noise[:, None], filters / filters.flatten(1).norm(dim=1)[:, None, None, None])
    raw_spread = raw.square().mean((0, 2, 3))
    assert float(raw_spread.min() / raw_spread.max()) < 0.06


def test_an_images_features_are_of_that_image_alone_and_not_of_its_brightness():
    x = torch.rand(40, 3, 16, 16, generator=torch.Generator().manual_seed(3))
    together = look(x, patterns=9)
    assert together.shape == (40, 9, 4, 4)
    torch.testing.assert_close(look(x[17:18], patterns=9), together[17:18])
    torch.testing.assert_close(look(x + 0.3, patterns=9), together, rtol=1e-4, atol=1e-5)
    assert look(x[:0], patterns=9).shape == (0, 9, 4, 4)
    torch.testing.assert_close(look(x, patterns=5), together[:, :5])
    assert float((together > 0).float().mean()) > 0.1


def test_fields_are_where_they_are():
    x = torch.full((1, 1, 24, 24), 0.5)
    x[:, :, 16:, :8] = torch.rand(8, 8, generator=torch.Generator().manual_seed(4))
    seen = look(x, patterns=50)[0].sum(0)
    assert seen[3, 0] == seen.max()
    assert float(seen[:2].abs().max()) == 0.0
    assert float(seen[:, 2:].abs().max()) == 0.0


@pytest.mark.parametrize(
    "bad",
    [torch.rand(8, 8), torch.rand(1, 2, 12, 12), torch.rand(1, 1, 8, 12), torch.ones(1, 1, 12, 12, dtype=torch.int64)],
)
def test_what_is_no_stack_of_images_is_refused(bad):
    with pytest.raises(ArgumentError, match="images must be float of shape"):
        look(bad)


def test_features_of_a_data_set():
    x = torch.rand(6, 3, 12, 12, generator=torch.Generator().manual_seed(5))
    y = torch.arange(6) % 2
    data = Data("own", *[TensorDataset(x, y)] * 2, (3, 12, 12), 2)
    found, without = patched(data), scattered(data)
    assert found.input_shape == (3, 81, 3, 3, 24 * 16)
    assert found.train.x.shape == (6, 1, 3 * 81 * 9 + 24 * 16)
    assert found.train.x.dtype == torch.float16
    assert torch.equal(found.train.x[:, 0, : 3 * 81 * 9], without.train.x.flatten(1))
    seen = (look(x, patterns=24) + look(x.flip(-1), patterns=24)) / 2  # where there is colour
    assert torch.equal(found.train.x[:, 0, 3 * 81 * 9 :], seen.half().flatten(1))
    grey = patched(Data("own", *[TensorDataset(x[:, :1], y)] * 2, (1, 12, 12), 2))
    assert torch.equal(grey.train.x[:, 0, 81 * 9 :], look(x[:, :1], patterns=24).half().flatten(1))
    for shape in ((8,), (2, 12, 12), (1, 8, 12)):
        part = TensorDataset(torch.rand(6, *shape), y)
        with pytest.raises(ModelError, match="images of shape"):
            patched(Data("own", part, part, shape, 2))


def test_patterns_and_filters_are_the_same_in_every_process_and_version():
    """A model that was trained is of these features: golden numbers."""
    at = torch.arange(12.0)
    x = (
        torch.stack([(3 * at[:, None] + 5 * at) % 7, (2 * at[:, None] + at * at) % 5, (at[:, None] * at) % 11])[None]
        / 11
    )
    assert look(x, patterns=3, grid=1).flatten().tolist() == pytest.approx([0.0822837, 0.0810330, 0.1118701], rel=1e-4)
    assert look(x[:, :1], patterns=3, grid=1).flatten().tolist() == pytest.approx([0.0919119, 0.0, 0.0988933], rel=1e-4)


class Rows(Dataset):
    """Images that are read one by one."""

    def __init__(self, x, y):
        self.x, self.y = x, y

    def __len__(self):
        return len(self.y)

    def __getitem__(self, i):
        return self.x[i], int(self.y[i])


@pytest.mark.parametrize("of", [patched, scattered])
def test_each_part_has_the_features_of_its_own_images_in_their_order(of, monkeypatch):
    monkeypatch.setattr(features, "_AT_A_TIME", 3)  # 7 and 4 are no multiples of it
    rng = torch.Generator().manual_seed(6)
    x, y = torch.rand(11, 3, 12, 12, generator=rng), torch.tensor([2, 0, 1, 1, 0, 2, 0, 1, 2, 2, 0])
    found = of(Data("own", Rows(x[:7], y[:7]), TensorDataset(x[7:], y[7:]), (3, 12, 12), 3))
    for part, rows in ((found.train, range(7)), (found.test, range(7, 11))):
        assert len(part) == len(rows)
        assert part.y.tolist() == y[rows].tolist()
        for place, i in enumerate(rows):
            alone = TensorDataset(x[i : i + 1], y[i : i + 1])
            own = of(Data("own", alone, alone, (3, 12, 12), 3)).train.x[0]
            torch.testing.assert_close(part.x[place], own, rtol=2e-3, atol=1e-4)


# -- the model -------------------------------------------------------------------------------------------------------


def test_what_is_averaged_has_norm_one_and_so_has_what_is_classified():
    model = Whitened((1, 81, 2, 2, 40), 3)
    x = torch.rand(7, 1, 81 * 4 + 40, generator=torch.Generator().manual_seed(6))
    for stage, layer in (("mean", model.centre), ("spread", model.spread)):
        model.stage = stage
        for i in range(7):
            (found,) = torch.autograd.grad(model(x[i : i + 1]).sum(), layer.weight)
            assert float(found.norm()) == pytest.approx(1, abs=1e-5)
    model.stage = "classes"
    for i in range(7):
        (found,) = torch.autograd.grad(model(x[i : i + 1])[0, 0], model.classify.weight)
        assert float(found[0].norm()) == pytest.approx(1, abs=1e-5)
        assert float(found[0, : 81 * 4].norm()) == pytest.approx(0.5**0.5, abs=1e-5)  # each kind counts for half


@pytest.mark.parametrize("stage", features.STAGES)
def test_what_an_image_gives_does_not_depend_on_the_others_of_its_batch(stage, monkeypatch):
    monkeypatch.setattr(features, "_AT_A_TIME", 3)
    rng = torch.Generator().manual_seed(8)
    model = Whitened((1, 81, 2, 2, 40), 3)
    for name, value in model.state_dict().items():
        value.copy_(0.02 * torch.randn(value.shape, generator=rng) + (torch.eye(81) if name == "mixing" else 0))
    x = torch.rand(7, 1, 81 * 4 + 40, generator=rng)
    model.stage = stage
    torch.testing.assert_close(model(x), torch.cat([model(one[None]) for one in x]))
    prepared = model.prepared(features.Features(x, torch.arange(7)))
    assert prepared.y.tolist() == list(range(7))
    torch.testing.assert_close(model(prepared.x), model.eval()(x), rtol=2e-3, atol=1e-3)


def test_the_mean_is_that_of_both_kinds(textures, tmp_path):
    """With hardly any noise; a wrong share of one kind would show."""
    data = patched(textures)
    settings = small(epsilon=None, noise_multiplier=1e-7, clip_norm=0.25, batch_size=70)
    state = torch.load(train(settings, tmp_path / "run", data=data, key=KEY).path / "model.pt", weights_only=True)
    size = 81 * 9
    kinds = [F.normalize(part) for part in data.train.x[:, 0].float().split([size, 24 * 16], 1)]
    torch.testing.assert_close(state["mean"], torch.cat(kinds, 1).mean(0) / 2**0.5, rtol=1e-3, atol=1e-6)
    c = F.normalize(kinds[0] / 2**0.5 - state["mean"][:size]).view(300, 81, 9)
    spread = F.normalize((c @ c.mT).flatten(1)).mean(0)
    torch.testing.assert_close(state["spread.weight"][0], spread, rtol=1e-3, atol=1e-6)
    model = Whitened(data.input_shape, 2)
    model.load_state_dict(state)
    f = model.prepared(data.train).x.float()
    others = F.normalize(kinds[1] / 2**0.5 - state["mean"][size:])
    torch.testing.assert_close(f[:, size:], others / 2**0.5, rtol=1e-2, atol=1e-3)
    torch.testing.assert_close(model(data.train.x), model(f), rtol=1e-2, atol=1e-2)


def test_a_certificate_and_an_accuracy(textures, tmp_path):
    result = train(small(), tmp_path / "run", data=textures)
    found = verify(result.path / "run.privacy.json", evidence=result.path / "secret" / "run.evidence.json")
    assert found.certificate.steps == result.plan.n == 30
    assert result.plan.epsilon <= 8
    assert result.accuracy[-1] > 0.6


@pytest.mark.parametrize("step", [3, 12])
def test_a_run_that_is_stopped_in_any_stage_goes_on_bit_for_bit(step, tmp_path, monkeypatch):
    (tmp_path / "patches_of_a_test.py").write_text(TEXTURES)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    settings = small("patches_of_a_test:load", checkpoint_every=1, epochs=3, classes=2)
    assert_goes_on(settings, tmp_path, step)


def test_the_defaults_of_photographs():
    chosen = Settings.of("cifar10", epsilon=3.0)
    assert (chosen.model, chosen.batch_size, chosen.epochs, chosen.order) == ("patches", 5000, 60, "fixed")
    assert (chosen.clip_norm, chosen.schedule, chosen.lr) == (0.02, "linear", 750.0)
    assert [Settings.of("cifar10", epsilon=e).lr for e in (1.0, 4.0, 8.0)] == [250.0, 1000.0, 1000.0]
    assert Settings.of("own:photographs", epsilon=1.0, model="patches").lr == 250.0


@pytest.mark.parametrize("name", ["mnist", "fashion_mnist"])
def test_the_defaults_of_images_without_colour(name):
    chosen = Settings.of(name, epsilon=3.0)
    assert (chosen.model, chosen.batch_size, chosen.epochs, chosen.order) == ("patches", 6000, 60, "fixed")
    assert (chosen.clip_norm, chosen.schedule, chosen.lr) == (0.02, "linear", 1500.0)
    assert [Settings.of(name, epsilon=e).lr for e in (1.0, 4.0, 8.0)] == [500.0, 2000.0, 2000.0]


@pytest.mark.parametrize(("changes", "message"), [({"epochs": 2}, "'patches'"), ({"optimizer": "ftrl"}, "'patches'")])
def test_settings_that_do_not_fit_are_refused(changes, message):
    with pytest.raises(ArgumentError, match=message):
        small(**changes)
