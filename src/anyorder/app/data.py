"""Data by name: images and tables as tensors, text as sequences of words, and functions named on a command line."""

import importlib
import io
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset, TensorDataset

from anyorder import checks
from anyorder.errors import ArgumentError

# ----------------------------------------------------------------------------------------------------
# Names of the form module:function, given on the command line.


def load_function(name: str, what: str) -> Callable[..., Any]:
    """The function that `module:function` names; the module is also looked for in the current folder.

    Args:
        name: for example "mydata:load".
        what: the argument's name, for messages.
    Raises: ArgumentError if there is no such module or function. An error inside the module is left as it is.
    """
    module_name, _, function_name = name.partition(":")
    if module_name.endswith(".py") or not all(part.isidentifier() for part in module_name.split(".")):
        likely = Path(module_name.removesuffix(".py")).as_posix().lstrip("./").replace("/", ".")
        raise ArgumentError(
            f"{what} must name a module, got {name!r}: write it as a module, {likely}:{function_name}, without ./ "
            "and .py"
        )
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as problem:
        if problem.name is None or not module_name.startswith(problem.name):
            raise  # a module that this one needs is missing
        raise ArgumentError(f"{what} names module {module_name!r}, which cannot be found from {here}") from problem
    function = getattr(module, function_name, None)
    if not callable(function):
        raise ArgumentError(f"{what} names {name!r}, but module {module_name!r} has no function {function_name!r}")
    return function  # type: ignore[no-any-return]


# ----------------------------------------------------------------------------------------------------
# Data sets by name, decoded once into tensors.


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


# ----------------------------------------------------------------------------------------------------
# Text as sequences of the words of a small vocabulary, for models that are audited.


Ints = NDArray[np.int64]

_COLUMNS = ("sentences", "sentence", "text")


@dataclass(frozen=True)
class Text:
    """A corpus. Which words its vocabulary has is taken as public, as are the numbers of sequences.

    Attributes:
        vocabulary: number of words V; sequences hold 0, .., V - 1.
        train: sequences of two words or more.
        test: others, which no model is trained on; perhaps none.
        words: the V words; empty where they are not known.
    """

    vocabulary: int
    train: list[Ints] = field(repr=False)
    test: list[Ints] = field(repr=False)
    words: tuple[str, ...] = field(repr=False, default=())


def read_text(name: str | Path, *, vocabulary: int = 1000, leave_out: int = 100, length: int = 8) -> Text:
    """A text from disk, or what `module:function` returns.

    Words are those of letters alone, in lower case. The vocabulary are the most frequent but for the very first, which
    stand in for stop words: [Zhang et al. 2021] keep 1000 without rare and stop words. All other words are dropped.
    Every tenth sentence is for testing. Sentences are cut into sequences, each of which is one example.

    Args:
        name: a text file or Parquet file, or a folder of them; a line of a text file is a sentence, and so is a string
            in the Parquet column "sentences", "sentence" or "text", or in a list there. Or `module:function`, which
            returns (sequences of integers below V, V).
        vocabulary: V, at most so many words.
        leave_out: how many of the most frequent words are dropped.
        length: words of a sequence at most.
    Raises: ArgumentError; MissingDependencyError for a Parquet file without pyarrow.
    """
    if not Path(name).exists() and ":" in str(name):
        return _text_own(str(name))
    vocabulary = checks.integer("vocabulary", vocabulary, low=2)
    leave_out = checks.integer("leave_out", leave_out, low=0)
    length = checks.integer("length", length, low=2)
    sentences = [[word for word in text.lower().split() if word.isalpha()] for text in _sentences(Path(name))]
    counts = Counter(word for sentence in sentences for word in sentence)
    words = tuple(word for word, _ in counts.most_common(leave_out + vocabulary)[leave_out:])
    if len(words) < 2:
        raise ArgumentError(
            f"text must have 2 words or more beyond the {leave_out} most frequent, which are dropped; {name} has "
            f"{len(counts)} in all: a word is letters alone between spaces, in upper or lower case"
        )
    ids = {word: i for i, word in enumerate(words)}
    kept = [np.array([ids[word] for word in sentence if word in ids], np.int64) for sentence in sentences]
    test = _cut(kept[::10], length)
    train = _cut((sequence for i, sequence in enumerate(kept) if i % 10), length)
    if not train:
        raise ArgumentError(f"text must have sentences with two words of its vocabulary, {name} has none")
    return Text(len(words), train, test, words)


def _cut(sequences: Iterable[Ints], length: int) -> list[Ints]:
    """Pieces of at most `length` words; one with a single word has nothing to predict."""
    pieces = (sequence[i : i + length] for sequence in sequences for i in range(0, len(sequence), length))
    return [piece for piece in pieces if len(piece) > 1]


def _sentences(path: Path) -> Iterator[str]:
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    files = [file for file in files if file.suffix in (".txt", ".parquet") or file == path]
    if not files or not path.exists():
        raise ArgumentError(f"text must be a .txt or .parquet file, a folder of them, or module:function, got {path}")
    for file in files:
        yield from _rows(file) if file.suffix == ".parquet" else _lines(file)


def _lines(file: Path) -> Iterator[str]:
    try:
        yield from file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as problem:
        raise ArgumentError(f"text {file} cannot be read as UTF-8: {problem}") from problem


def _rows(file: Path) -> Iterator[str]:
    parquet = checks.optional("pyarrow.parquet", extra="train", purpose="reading a Parquet file")
    try:
        names = parquet.read_schema(file).names
        found = [name for name in _COLUMNS if name in names]
        table = parquet.read_table(file, columns=found[:1])
    except (OSError, ValueError) as problem:  # pyarrow's own errors derive from these
        raise ArgumentError(f"text {file} cannot be read: {problem}") from problem
    if not found:
        raise ArgumentError(f"{file} must have a column {', '.join(_COLUMNS)}, got {', '.join(names)}")
    values: list[Any] = table.column(0).to_pylist()
    for value in values:
        for sentence in value if isinstance(value, list) else [value]:
            if not isinstance(sentence, str):
                raise ArgumentError(f"column {found[0]} of {file} must hold text or lists of texts")
            yield sentence


def _text_own(name: str) -> Text:
    found = load_function(name, "text")()
    if not isinstance(found, tuple) or len(found) != 2:
        raise ArgumentError(
            f"text {name!r} must return (sequences of integers, size of the vocabulary), got {type(found).__name__}"
        )
    sequences, vocabulary = found
    vocabulary = checks.integer("the size of the vocabulary", vocabulary, low=2)
    return Text(vocabulary, [np.asarray(sequence, np.int64) for sequence in sequences], [])
