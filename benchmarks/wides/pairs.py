"""Pairs of words of a text, each with negatives, as tensors: examples of word2vec."""

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from anyorder.app.text import read_text

__all__ = ["Corpus", "read_pairs"]

WINDOW, NEGATIVES = 4, 8
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Corpus:
    """Examples: centre, context, negatives.

    Attributes:
        vocabulary: V; words are 0, .., V - 1, the frequent ones first. Taken as public.
        train, test: (.., 10) int64; test pairs are of other sentences.
    """

    vocabulary: int
    train: Tensor = field(repr=False)
    test: Tensor = field(repr=False)


def read_pairs(folder: str | Path, *, vocabulary: int, train: int, test: int, leave_out: int = 100) -> Corpus:
    """So many pairs of words at most 4 apart in a sentence, in either order, drawn from all such pairs of a text.

    Negatives are drawn by the words' counts to the power 3/4, once for each pair [Mikolov et al. 2013].
    """
    text = read_text(folder, vocabulary=vocabulary, leave_out=leave_out, length=10**6)
    random = np.random.default_rng(0)
    counts = np.bincount(np.concatenate(text.train), minlength=text.vocabulary)
    shares = counts**0.75 / (counts**0.75).sum()

    def drawn(sequences: list[Ints], wanted: int) -> Tensor:
        pairs = _pairs(sequences)
        chosen = pairs[random.choice(len(pairs), min(wanted, len(pairs)), replace=False)]
        negatives = random.choice(text.vocabulary, (len(chosen), NEGATIVES), p=shares)
        return torch.from_numpy(np.concatenate([chosen, negatives], 1))

    return Corpus(text.vocabulary, drawn(text.train, train), drawn(text.test, test))


def _pairs(sequences: list[Ints]) -> Ints:
    """(N, 2), all."""
    words = np.concatenate(sequences)
    sentence = np.repeat(np.arange(len(sequences)), [len(sequence) for sequence in sequences])
    found = []
    for apart in range(1, WINDOW + 1):
        inside = sentence[apart:] == sentence[:-apart]
        one, other = words[:-apart][inside], words[apart:][inside]
        found += [np.stack([one, other], 1), np.stack([other, one], 1)]
    return np.concatenate(found)
