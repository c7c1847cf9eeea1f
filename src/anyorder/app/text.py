"""Text as sequences of the words of a small vocabulary, for models that are audited; and functions by name."""

import importlib
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from anyorder import checks
from anyorder.errors import ArgumentError


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
        return _own(str(name))
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


def _own(name: str) -> Text:
    found = load_function(name, "text")()
    if not isinstance(found, tuple) or len(found) != 2:
        raise ArgumentError(
            f"text {name!r} must return (sequences of integers, size of the vocabulary), got {type(found).__name__}"
        )
    sequences, vocabulary = found
    vocabulary = checks.integer("the size of the vocabulary", vocabulary, low=2)
    return Text(vocabulary, [np.asarray(sequence, np.int64) for sequence in sequences], [])
