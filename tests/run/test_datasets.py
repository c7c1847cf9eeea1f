"""Data sets and models come by name, or from functions of one's own."""

import sys

import numpy as np
import pytest
import torch

from anyorder.app import data as datasets
from anyorder.app import job as models
from anyorder.errors import ArgumentError, ModelError


@pytest.fixture
def module(tmp_path, monkeypatch):
    """Writes a module into the current folder, and forgets it afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))

    def write(name, text):
        (tmp_path / f"{name}.py").write_text(text)
        monkeypatch.delitem(sys.modules, name, raising=False)

    return write


def test_digits_are_split_once_and_for_all():
    first, again = datasets.load("digits"), datasets.load("digits")
    assert (len(first.train), len(first.test)) == (1437, 360)
    assert (first.input_shape, first.num_classes) == ((1, 8, 8), 10)
    for part in ("train", "test"):
        x, y = getattr(first, part).tensors
        assert torch.equal(x, getattr(again, part).tensors[0])
        assert (x.dtype, y.dtype) == (torch.float32, torch.int64)
        assert x.min() == 0
        assert x.max() == 1
        assert set(y.tolist()) == set(range(10))


@pytest.mark.parametrize("shape", [(6, 5), (6, 5, 3)], ids=["grey", "colour"])
def test_images_are_read_from_a_parquet_folder(shape, tmp_path, monkeypatch):
    hub = pytest.importorskip("datasets")
    monkeypatch.setattr(hub.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    folder = tmp_path / "data"
    folder.mkdir()
    pixels = np.random.default_rng(0).integers(0, 256, (7, *shape), dtype=np.uint8)
    features = hub.Features({"image": hub.Image(), "label": hub.ClassLabel(names=["a", "b", "c"])})
    for split, rows in (("train", slice(0, 5)), ("test", slice(5, 7))):
        labels = [0, 1, 2, 1, 0, 2, 1][rows]
        part = hub.Dataset.from_dict({"image": list(pixels[rows]), "label": labels}, features=features)
        part.to_parquet(folder / f"{split}-00000-of-00001.parquet")
    data = datasets.load("mnist", folder)
    x, y = data.train.tensors
    expected = pixels[:5, None] if len(shape) == 2 else pixels[:5].transpose(0, 3, 1, 2)
    assert torch.equal((x * 255).round().to(torch.uint8), torch.from_numpy(expected))
    assert y.tolist() == [0, 1, 2, 1, 0]
    assert data.test.tensors[1].tolist() == [2, 1]
    assert (data.input_shape, data.num_classes) == (tuple(expected.shape[1:]), 10)  # as MNIST has, whatever labels say
    assert datasets.load("mnist", folder, classes=3).num_classes == 3


def test_a_folder_without_data_is_named(tmp_path):
    with pytest.raises(ArgumentError, match="data_dir must be a folder"):
        datasets.load("mnist", tmp_path / "absent")
    with pytest.raises(ArgumentError, match="cannot be loaded from"):
        datasets.load("mnist", tmp_path)


def test_data_sets_of_ones_own(module):
    module(
        "owndata",
        "import torch\n"
        "from torch.utils.data import Dataset, TensorDataset\n"
        "class Pairs(Dataset):\n"
        "    def __len__(self): return 4\n"
        "    def __getitem__(self, i): return torch.zeros(2, 3), i % 2\n"
        "class Named(Pairs):\n"
        "    classes = list('abcdef')\n"
        "def pairs(): return Pairs(), Pairs()\n"
        "def named(): return Named(), Named()\n"
        "class Counted(Pairs):\n"
        "    def __init__(self): self.classes = ['folders', 'that', 'are', 'there']\n"
        "def counted(): return Counted(), Counted()\n"
        "def tensors(): return [TensorDataset(torch.zeros(3, 2), torch.tensor([0, 4, 1]))] * 2\n"
        "def wrong(): return Pairs()\n"
        "def bare(): return [torch.zeros(3), torch.zeros(3)]\n",
    )
    assert datasets.load("owndata:pairs").num_classes is None
    assert datasets.load("owndata:pairs", classes=2).num_classes == 2
    assert datasets.load("owndata:named").num_classes == 6
    assert datasets.load("owndata:counted").num_classes is None
    tensors = datasets.load("owndata:tensors", classes=5)
    assert (tensors.num_classes, tensors.input_shape) == (5, (2,))
    with pytest.raises(ArgumentError, match=r"must return \(train, test\)"):
        datasets.load("owndata:wrong")
    with pytest.raises(ArgumentError, match="pairs"):
        datasets.load("owndata:bare")
    with pytest.raises(ArgumentError, match="no function 'absent'"):
        datasets.load("owndata:absent")


def test_unknown_names_are_refused(module):
    with pytest.raises(ArgumentError, match="dataset must be one of cifar10, digits"):
        datasets.load("imagenet")
    with pytest.raises(ArgumentError, match="cannot be found"):
        datasets.load("no_such_module:load")
    with pytest.raises(ArgumentError, match="model must be one of"):
        models.build("resnet", (1, 8, 8), 10)
    module("needs_more", "import a_package_that_is_missing\n")
    with pytest.raises(ModuleNotFoundError, match="a_package_that_is_missing"):  # its own trouble stays visible
        datasets.load("needs_more:load")


@pytest.mark.parametrize(
    ("name", "shape", "parameters"),
    [("linear", (1, 8, 8), 650), ("mlp", (1, 8, 8), 2410), ("cnn", (1, 28, 28), 26010), ("cnn", (3, 32, 32), 37274)],
)
def test_models_fit_their_input(name, shape, parameters):
    model = models.build(name, shape, 10)
    assert sum(p.numel() for p in model.parameters()) == parameters
    assert model(torch.zeros(2, *shape)).shape == (2, 10)


def test_cnn_refuses_what_is_no_image():
    for shape in [(64,), (1, 8, 8)]:
        with pytest.raises(ModelError, match="20 pixels"):
            models.build("cnn", shape, 10)


def test_models_of_ones_own(module):
    module(
        "ownmodel",
        "from torch import nn\n"
        "def fitted(input_shape, num_classes): return nn.Linear(input_shape[0], num_classes)\n"
        "def plain(): return nn.Linear(3, 2)\n"
        "def wrong(): return 'no model'\n",
    )
    assert models.build("ownmodel:fitted", (5,), 7).weight.shape == (7, 5)
    assert models.build("ownmodel:plain", (5,), 7).weight.shape == (2, 3)
    assert models.build("ownmodel:plain", (5,), None).weight.shape == (2, 3)
    for name in ("ownmodel:fitted", "linear"):
        with pytest.raises(ArgumentError, match="--classes"):
            models.build(name, (5,), None)
    with pytest.raises(ArgumentError, match=r"torch\.nn\.Module"):
        models.build("ownmodel:wrong", (5,), 7)
