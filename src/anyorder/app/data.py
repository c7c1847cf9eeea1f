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
_CLASSES = 10  # of each of them, as those who made them say; never counted in a copy of the data


@dataclass(frozen=True)
class Data:
    """Two data sets of (input, class) pairs.

    Attributes:
        input_shape: of one input of the test set, without the batch.
        num_classes: what was stated, never found in labels, which are private: the shape of the model is public. None
            where nobody stated it. A label that is not among them adds zero to a step, and nothing tells of it.
    """

    name: str
    train: Dataset[Any]
    test: Dataset[Any]
    input_shape: tuple[int, ...]
    num_classes: int | None


def load(name: str, data_dir: str | Path | None = None, classes: int | None = None) -> Data:
    """The data set of that name.

    Args:
        name: "digits" (scikit-learn's, 1797 images of 8 x 8, split 80/20 once and for all), "mnist", "fashion_mnist",
            "cifar10", or `module:function`, which returns (train, test), two data sets of (input tensor, class).
        data_dir: a folder in the layout of the Hugging Face hub (parquet files per split) that holds the data set;
            without it, the hub is asked for it by name.
        classes: the number of classes, 0 to classes - 1; None for what the data set is known to have, or its class
            says in code: `classes = ["cat", "dog"]`.
    """
    if classes is not None:
        classes = checks.integer("classes", classes, low=1)
    if ":" in name:
        return _own(name, classes)
    if name not in DATASETS:
        raise ArgumentError(f"dataset must be one of {', '.join(DATASETS)} or module:function, got {name!r}")
    classes = _CLASSES if classes is None else classes
    return _digits(classes) if name == "digits" else _images(name, data_dir, classes)


def _digits(classes: int) -> Data:
    source = checks.optional("sklearn.datasets", extra="train", purpose="the digits data set")
    images, labels = source.load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(labels))
    x = torch.from_numpy(images[order] / 16).float().reshape(-1, 1, 8, 8)
    y = torch.from_numpy(labels[order]).long()
    cut = len(y) * 4 // 5
    train, test = TensorDataset(x[:cut], y[:cut]), TensorDataset(x[cut:], y[cut:])
    return Data("digits", train, test, (1, 8, 8), classes)


def column(name: str, key: str, data_dir: str | Path | None = None) -> list[Any]:
    """A column of the training part, row by row: whose each example is, for instance.

    Raises: ArgumentError for a data set that has no such column, or is not kept in columns.
    """
    if name not in DATASETS or name == "digits":
        raise ArgumentError(f"dataset {name!r} has no columns but its images and classes: split it among users")
    rows = _splits(_hub(name, data_dir), name, data_dir)[0]
    if key not in rows.column_names:
        raise ArgumentError(f"column must be one of {', '.join(rows.column_names)} in dataset {name!r}, got {key!r}")
    return list(rows[key])


def _images(name: str, data_dir: str | Path | None, classes: int) -> Data:
    hub = _hub(name, data_dir)
    train, test = (_decode(hub, split) for split in _splits(hub, name, data_dir))
    return Data(name, train, test, tuple(test.tensors[0].shape[1:]), classes)


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


class Conforming(Dataset[tuple[Tensor, int]]):
    """The rows of a data set in the one form that a public example has; a row of another form is zeros of no class.

    What one row holds (its shape, its types, a label that is no integer) then stops nothing, and nothing tells of it:
    such a row adds zero to its step. An error that the data set itself raises is left as it is.

    Args:
        rows: (input tensor, class) pairs.
        example: an input of the form: its shape, and the type that inputs are brought to.
    """

    def __init__(self, rows: Any, example: Tensor) -> None:
        self._rows, self._example = rows, example

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        row = self._rows[i]
        x, y = row if isinstance(row, tuple | list) and len(row) == 2 else (None, None)
        label, form = class_of(y), self._example
        if label is None or not isinstance(x, Tensor) or x.shape != form.shape or x.is_complex():
            return torch.zeros_like(form), -1
        return x.to(form.dtype), label


def class_of(label: Any) -> int | None:
    """A label as an integer of 64 bits; None for what is no integer."""
    if isinstance(label, Tensor | np.ndarray) and label.ndim == 0:
        label = label.item()
    whole = isinstance(label, int | np.integer) and -(2**63) <= label < 2**63
    return int(label) if whole else None


def _own(name: str, classes: int | None) -> Data:
    found = load_function(name, "dataset")()
    if not isinstance(found, Sequence) or len(found) != 2 or not all(hasattr(part, "__len__") for part in found):
        raise ArgumentError(
            f"dataset {name!r} must return (train, test), two data sets with a length, got {type(found).__name__}"
        )
    train, test = found
    try:
        x, y = test[0]  # which is nobody's: its accuracy is shown
        shape = tuple(x.shape)
    except (TypeError, ValueError, AttributeError, IndexError, KeyError) as problem:
        raise ArgumentError(f"dataset {name!r} must hold (input tensor, class) pairs: {problem}") from problem
    if not isinstance(x, Tensor) or class_of(y) is None:
        raise ArgumentError(
            f"dataset {name!r} must hold (input tensor, class) pairs, where a class is an integer; the first of the "
            f"test set is a pair of {type(x).__name__} and {type(y).__name__}"
        )
    stated = getattr(type(train), "classes", None)  # of an object they may be counted: the folders that there are, say
    if classes is None and isinstance(stated, Sequence):
        classes = len(stated)
    return Data(name, Conforming(train, x), test, shape, classes)


def _first_line(problem: Exception) -> str:
    return str(problem).strip().splitlines()[0] if str(problem).strip() else type(problem).__name__
