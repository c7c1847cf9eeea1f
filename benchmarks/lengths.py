"""Texts of several lengths: a step by public lengths beside one padded to the longest of the batch, and of all.

    ANYORDER_TEXTS=FOLDER python -m benchmarks.lengths             medians of 9 steps on batches of 64
    python -m benchmarks.lengths --quick                           3 steps

A step goes from 64 texts to the sum of their clipped gradients: collation, forward and backward pass. "longest of the
batch" is what `pad_sequence` in `collate_fn` does, and is not private: a long text then moves the gradients of others.
FOLDER has the folders `brown` (Parquet, "sentences"; words) and `tiny_shakespeare` (Parquet, "text"; characters of a
speech's lines). Without it lengths are drawn: half below 16, one in twenty up to the longest.

Time is the processor's; the three ways take turns.
"""

import os
import random
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from anyorder.clipping.per_example import make_clipping
from anyorder.sampling.shapes import ByShape, CollatedAlone, PublicShapes, RowShapes
from benchmarks._report import Row, options, show

BATCH, WORDS, WIDTH = 64, 2000, 128
LENGTHS = {"drawn": (16, 32, 64, 128), "Brown by sentence": (16, 32, 64, 128), "tiny_shakespeare by line": (32, 48, 64)}
Text = tuple[Tensor, int]


class Classifier(nn.Module):
    """A transformer of two layers, which reads padding as any token, and the mean of its states."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True)
        self.layers, self.out = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        """(B, 2) logits of (B, tokens) ids."""
        return self.out(self.layers(self.words(x)).mean(1))  # type: ignore[no-any-return]


class Recurrent(nn.Module):
    """An LSTM, and its last state."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.out = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, 2)
        self.lstm = nn.LSTM(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        """(B, 2) logits of (B, tokens) ids."""
        return self.out(self.lstm(self.words(x))[0][:, -1])  # type: ignore[no-any-return]


MODELS = {"transformer 2 x 128": Classifier, "LSTM 128": Recurrent}


def main() -> None:
    """Measure and print."""
    chosen = options(__doc__ or "")
    show(rows(chosen.quick), chosen.json)


def rows(quick: bool) -> Iterator[Row]:
    """For each corpus and model, the time of a step by public lengths, and of the other two over it."""
    for corpus, lengths in corpora().items():
        public = LENGTHS[corpus]
        for model, make in MODELS.items():
            torch.manual_seed(0)
            ours, batch, longest = times(make(), texts(lengths, public[-1]), public, 3 if quick else 9)
            label = f"{corpus}, {model}, batch {BATCH}: {public}; peer: "
            yield Row(f"{label}longest of the batch, not private", ours, batch, batch / ours, "ms")
            yield Row(f"{label}longest of all, {public[-1]}", ours, longest, longest / ours, "ms")


def corpora() -> dict[str, list[int]]:
    """Lengths of texts, in their order."""
    folder = os.environ.get("ANYORDER_TEXTS")
    if folder is None:
        rng = random.Random(0)
        short = [rng.randint(3, 16) if rng.random() < 0.55 else rng.randint(17, 48) for _ in range(4000)]
        return {"drawn": [n if rng.random() < 0.95 else rng.randint(49, 128) for n in short]}
    import pyarrow.parquet as parquet

    def column(name: str, field: str) -> list[Any]:
        return parquet.read_table(sorted((Path(folder) / name).glob("*.parquet"))[0]).to_pydict()[field]  # type: ignore[no-any-return]

    brown = [len(sentence.split()) for document in column("brown", "sentences") for sentence in document]
    lines = [len(line) for speech in column("tiny_shakespeare", "text") for line in speech.splitlines() if line]
    return {"Brown by sentence": brown, "tiny_shakespeare by line": lines}


def texts(lengths: list[int], longest: int) -> list[Text]:
    """Some of the texts, shuffled."""
    rng = random.Random(1)
    some = rng.sample(lengths, 20 * BATCH)
    generator = torch.Generator().manual_seed(0)
    return [(torch.randint(1, WORDS, (min(n, longest),), generator=generator), n % 2) for n in some]


def collate(examples: list[Text]) -> tuple[Tensor, Tensor]:
    """As people write it."""
    return pad_sequence([x for x, _ in examples], batch_first=True), torch.tensor([y for _, y in examples])


def times(model: nn.Module, data: list[Text], public: tuple[int, ...], repeats: int) -> tuple[float, float, float]:
    """Median ms of a step: by public lengths, padded to the longest of the batch, padded to the longest of all."""
    clipping: Any = make_clipping(model)
    by_shape = ByShape(clipping, lambda: None)
    ways: list[Callable[[list[Text]], object]] = [
        lambda examples: _private(by_shape, PublicShapes.of(public), examples),
        lambda examples: _backward(clipping.forward, *collate(examples)),
        lambda examples: _private(by_shape, PublicShapes.of(public[-1:]), examples),
    ]
    found: list[list[float]] = [[], [], []]
    for i in range(repeats + 2):
        examples = data[i * BATCH : (i + 1) * BATCH]
        for way, own in zip(ways, found, strict=True):
            start = time.process_time()
            way(examples)
            own.append(1000 * (time.process_time() - start))
    ours, batch, longest = (statistics.median(own[2:]) for own in found)
    return ours, batch, longest


def _private(by_shape: ByShape, shapes: PublicShapes, examples: list[Text]) -> None:
    batch, numbers = CollatedAlone(collate, shapes)(examples)
    _backward(by_shape, *batch, shapes=RowShapes.of(batch, numbers, shapes))


def _backward(forward: Callable[..., Any], x: Tensor, y: Tensor, **more: Any) -> None:
    outputs = forward(
        (x,), {}, groups=torch.arange(len(x)), clip_norm=1.0, scale=float(len(x)), receive=lambda sums: None, **more
    )
    F.cross_entropy(outputs, y).backward()


if __name__ == "__main__":
    main()
