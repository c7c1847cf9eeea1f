"""Data sets by name, decoded once into tensors."""

import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, TensorDataset

from anyorder import checks
from anyorder.app.text import load_function
from anyorder.errors import ArgumentError

DATASETS = ("cifar10", "digits", "fashion_mnist", "mnist")


@dataclass(frozen=True)
class Data:
    """Two data sets of (input, class) pairs.

    Attributes:
        input_shape: of one input, without the batch.
        num_classes: taken as public, as is the number of training examples.
    """

    name: str
    train: Dataset[Any]
    test: Dataset[Any]
    input_shape: tuple[int, ...]
    num_classes: int


def load(name: str, data_dir: str | Path | None = None) -> Data:
    """The data set of that name.

    Args:
        name: "digits" (scikit-learn's, 1797 images of 8 x 8, split 80/20 once and for all), "mnist", "fashion_mnist",
            "cifar10", or `module:function`, which returns (train, test), two data sets of (input tensor, class).
        data_dir: a folder in the layout of the Hugging Face hub (parquet files per split) that holds the data set;
            without it, the hub is asked for it by name.
    """
    if ":" in name:
        return _own(name)
    if name not in DATASETS:
        raise ArgumentError(f"dataset must be one of {', '.join(DATASETS)} or module:function, got {name!r}")
    return _digits() if name == "digits" else _images(name, data_dir)


def _digits() -> Data:
    source = checks.optional("sklearn.datasets", extra="train", purpose="the digits data set")
    images, labels = source.load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(labels))
    x = torch.from_numpy(images[order] / 16).float().reshape(-1, 1, 8, 8)
    y = torch.from_numpy(labels[order]).long()
    cut = len(y) * 4 // 5
    train, test = TensorDataset(x[:cut], y[:cut]), TensorDataset(x[cut:], y[cut:])
    return Data("digits", train, test, (1, 8, 8), 10)


def column(name: str, key: str, data_dir: str | Path | None = None) -> list[Any]:
    """A column of the training part, row by row: whose each example is, for instance.

    Raises: ArgumentError for a data set that has no such column, or is not kept in columns.
    """
    if name not in DATASETS or name == "digits":
        raise ArgumentError(f"dataset {name!r} has no columns beside its images and classes: split it among users")
    rows = _splits(_hub(name, data_dir), name, data_dir)[0]
    if key not in rows.column_names:
        raise ArgumentError(f"column must be one of {', '.join(rows.column_names)} in dataset {name!r}, got {key!r}")
    return list(rows[key])


def _images(name: str, data_dir: str | Path | None) -> Data:
    hub = _hub(name, data_dir)
    train, test = (_decode(hub, split) for split in _splits(hub, name, data_dir))
    x, y = train.tensors
    return Data(name, train, test, tuple(x.shape[1:]), int(y.max()) + 1)


def _hub(name: str, data_dir: str | Path | None) -> Any:
    hub = checks.optional("datasets", extra="train", purpose=f"the {name} data set")
    if data_dir is not None and not Path(data_dir).is_dir():
        raise ArgumentError(f"data_dir must be a folder that holds {name} as parquet files, got {str(data_dir)!r}")
    hub.disable_progress_bars()
    return hub


def _splits(hub: Any, name: str, data_dir: str | Path | None) -> tuple[Any, Any]:
    """Training and test part."""
    source = name if data_dir is None else str(data_dir)
    try:
        splits = hub.load_dataset(source)
        return splits["train"], splits["test"]
    except (OSError, ValueError, KeyError, StopIteration) as problem:  # the hub's own errors derive from OSError
        hint = "" if data_dir else "; give --data-dir (data_dir=) if it lies in a folder"
        text = f"dataset {name!r} cannot be loaded from {source!r}: {_first_line(problem)}{hint}"
        raise ArgumentError(text) from problem


def _decode(hub: Any, split: Any) -> TensorDataset:
    """Pixels in [0, 1] as (n, channels, height, width) float32, and classes."""
    pillow = checks.optional("PIL.Image", extra="train", purpose="decoding images")
    image = next(k for k in split.column_names if k in ("image", "img"))
    label = next(k for k in split.column_names if k in ("label", "labels"))
    # Undecoded and then opened here: several times faster than the data set's own decoding.
    files = split.cast_column(image, hub.Image(decode=False))[image]
    pictures = (np.asarray(pillow.open(io.BytesIO(file["bytes"]) if file["bytes"] else file["path"])) for file in files)
    pixels = torch.from_numpy(np.stack(list(pictures)))
    x = pixels.unsqueeze(1) if pixels.ndim == 3 else pixels.permute(0, 3, 1, 2)
    return TensorDataset(x.float().div_(255).contiguous(), torch.tensor(split[label][:]))


def _own(name: str) -> Data:
    found = load_function(name, "dataset")()
    if not isinstance(found, Sequence) or len(found) != 2 or not all(hasattr(part, "__len__") for part in found):
        raise ArgumentError(
            f"dataset {name!r} must return (train, test), two data sets with a length, got {type(found).__name__}"
        )
    train, test = found
    try:
        x, _ = train[0]
        shape = tuple(x.shape)
    except (TypeError, ValueError, AttributeError, IndexError, KeyError) as problem:
        raise ArgumentError(f"dataset {name!r} must hold (input tensor, class) pairs: {problem}") from problem
    return Data(name, train, test, shape, _num_classes(train, test))


def _num_classes(*parts: Any) -> int:
    """From `classes`, as torchvision's data sets have it, else one more than the largest class."""
    if hasattr(parts[0], "classes"):
        return len(parts[0].classes)
    return 1 + max(_largest(part) for part in parts)


def _largest(part: Any) -> int:
    if isinstance(part, TensorDataset):
        labels: Tensor = part.tensors[1]
        return int(labels.max())
    return max(int(part[i][1]) for i in range(len(part)))


def _first_line(problem: Exception) -> str:
    return str(problem).strip().splitlines()[0] if str(problem).strip() else type(problem).__name__
