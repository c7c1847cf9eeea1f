"""Next words of the Brown corpus, one passage for each user, and the LSTM of [Kairouz et al. 2021], Table 2(c).

Words have numbers: 0 fills up a sentence, then come the frequent ones, and last the unknown word, the beginning and the
end of a sentence: four more than the vocabulary says, 10 004 in the paper. Which words are frequent is taken as public.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["Brown", "WordLSTM", "accuracy", "read_brown", "word_loss"]

LENGTH = 20  # words of a sentence that are predicted
EXTRA = 4  # filling, unknown, beginning, end
Examples = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Brown:
    """The corpus, cut.

    Attributes:
        words: V + 4, rows of the embedding.
        users: {name of the passage: (x, y)}, each (sentences, 20) int64; y is x one word on.
        test: (x, y) of documents that no passage is from.
    """

    words: int
    users: dict[str, Examples] = field(repr=False)
    test: Examples = field(repr=False)


def read_brown(folder: str | Path, *, vocabulary: int = 1000, passage: int = 10) -> Brown:
    """Every tenth document is for testing; the others are cut into passages of so many sentences, a user each.

    Words are in lower case, and those without a letter or digit are dropped: so the full stop is the end alone.
    """
    import pyarrow.parquet as parquet

    table = parquet.read_table(sorted(Path(folder).glob("*.parquet"))[0]).to_pydict()
    documents = [
        [[word for word in sentence.lower().split() if any(map(str.isalnum, word))] for sentence in sentences]
        for sentences in table["sentences"]
    ]
    documents = [[sentence for sentence in document if sentence] for document in documents]
    train = [document for i, document in enumerate(documents) if i % 10]
    counts = Counter(word for document in train for sentence in document for word in sentence)
    ids = {word: 1 + i for i, (word, _) in enumerate(counts.most_common(vocabulary))}
    users = {
        f"{table['document'][d]}-{start // passage}": _pairs(document[start : start + passage], ids, vocabulary)
        for d, document in enumerate(documents)
        if d % 10
        for start in range(0, len(document), passage)
    }
    held_out = [sentence for document in documents[::10] for sentence in document]
    return Brown(vocabulary + EXTRA, users, _pairs(held_out, ids, vocabulary))


def _pairs(sentences: Sequence[Sequence[str]], ids: dict[str, int], vocabulary: int) -> Examples:
    """(m, 20) words and the words after them: beginning, words, end, filling."""
    unknown, beginning, end = vocabulary + 1, vocabulary + 2, vocabulary + 3
    rows = torch.zeros(len(sentences), LENGTH + 1, dtype=torch.int64)
    for row, sentence in zip(rows, sentences, strict=True):
        line = [beginning, *(ids.get(word, unknown) for word in sentence), end][: LENGTH + 1]
        row[: len(line)] = torch.tensor(line)
    return rows[:, :-1], rows[:, 1:]


class WordLSTM(nn.Module):
    """Embedding, one LSTM, a narrow dense layer, a dense layer over all words: (m, 20) words -> (m, 20, words) logits.

    The cell is written out, so that many users can train at once, by `torch.func`. Embeddings begin with a deviation of
    0.5, ten times what the paper's framework takes: a small model would spend most of a few rounds on growing them.
    """

    def __init__(self, words: int, *, embedding: int = 96, hidden: int = 670, seed: int = 0) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.words = words
            self.embedding = nn.Embedding(words, embedding)
            nn.init.normal_(self.embedding.weight, std=0.5)
            self.input = nn.Linear(embedding, 4 * hidden)
            self.state = nn.Linear(hidden, 4 * hidden, bias=False)
            self.dense = nn.Linear(hidden, embedding)
            self.output = nn.Linear(embedding, words)

    def forward(self, x: Tensor) -> Tensor:
        gates = self.input(self.embedding(x))
        h = c = gates.new_zeros(len(x), self.state.in_features)
        states = []
        for t in range(x.shape[1]):
            i, f, g, o = (gates[:, t] + self.state(h)).chunk(4, -1)
            c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
            h = torch.sigmoid(o) * torch.tanh(c)
            states.append(h)
        logits: Tensor = self.output(self.dense(torch.stack(states, 1)))
        return logits


def word_loss(logits: Tensor, y: Tensor) -> Tensor:
    """The mean cross entropy of all words in a batch, its sentences' ends and unknown words among them."""
    return F.cross_entropy(logits.flatten(0, 1), y.flatten(), ignore_index=0)


@torch.no_grad()
def accuracy(model: WordLSTM, test: Examples, batch: int = 256) -> float:
    """The share of words that are predicted, of those that are neither filling, unknown nor the end.

    A guess is a word too: with 30 % of words unknown, "unknown" would be most guesses of a weak model, and none right.
    """
    right = all_ = 0
    for x, y in zip(test[0].split(batch), test[1].split(batch), strict=True):
        guesses = model(x)[..., 1:-3].argmax(-1) + 1
        counted = (y > 0) & (y < model.words - 3)
        right += int(((guesses == y) & counted).sum())
        all_ += int(counted.sum())
    return right / all_
