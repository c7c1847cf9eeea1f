"""A small model of the next word, which trains in seconds: something to audit where there is no model yet."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from anyorder import checks
from anyorder.errors import ArgumentError
from anyorder.plan.options import SGD
from anyorder.plan.plan import Plan
from anyorder.plan.planner import plan as make_plan
from anyorder.sampling import EpochShuffleSampler
from anyorder.training.engine import PrivacyEngine

Ints = NDArray[np.int64]


class NextWord(nn.Module):
    """Log-bilinear in the last two words: Pr(w | .., u, v) = softmax(first E[v] + second E[u] + bias)[w].

    Number V of the V + 1 rows of E stands before the first word.
    """

    def __init__(self, vocabulary: int, dimension: int) -> None:
        super().__init__()
        self.words = nn.Embedding(vocabulary + 1, dimension)
        self.output = nn.Linear(2 * dimension, vocabulary)
        nn.init.normal_(self.words.weight, std=0.3)
        nn.init.normal_(self.output.weight, std=0.02)
        nn.init.zeros_(self.output.bias)

    def forward(self, x: Tensor) -> Tensor:
        """(B, L + 1) rows [V, first word, second, ..] -> (B, L - 1, V) logits of the second word and those after it."""
        embedded = self.words(x)
        result: Tensor = self.output(torch.cat([embedded[:, 1:-1], embedded[:, :-2]], -1))
        return result


@dataclass(frozen=True)
class Trained:
    """A model with its probabilities.

    Attributes:
        model: the network.
        plan: the claim that it was trained under; None for none.
    """

    model: NextWord
    plan: Plan | None
    _tables: tuple[NDArray[np.float64], ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_tables", _tables(self.model))

    def log_prob(self, contexts: Ints, words: Ints) -> NDArray[np.float64]:
        """As `audit.LogProb`: (m, j) contexts, of which the last two words count, and (m,) next words."""
        first, second, norm = self._tables
        last = contexts[:, -1]
        before = contexts[:, -2] if contexts.shape[1] > 1 else np.full(len(contexts), len(norm) - 1)
        return np.asarray(first[last, words] + second[before, words] - norm[last, before])


def train_words(
    corpus: Sequence[Ints],
    vocabulary: int,
    *,
    epsilon: float | None = None,
    noise_multiplier: float | None = None,
    delta: float = 1e-5,
    epochs: int = 5,
    batch_size: int = 500,
    lr: float = 1.0,
    momentum: float = 0.9,
    clip_norm: float = 1.0,
    dimension: int = 32,
    seed: int = 0,
    key: bytes | None = None,
    stepped: Callable[[int, int], object] | None = None,
) -> Trained:
    """Train `NextWord` by SGD on a corpus whose sequences are the examples, shuffled again in each epoch.

    The loss of an example is the sum over its words but the first. An empty sequence has loss and gradient zero: it is
    an example that is zeroed out.

    Args:
        corpus: sequences of integers below `vocabulary`.
        epsilon: train privately with a planned mechanism; or
        noise_multiplier: the same, with this much noise. None of both: neither noise nor clipping.
        batch_size: at most the number of sequences.
        seed: of the first weights and of the order.
        key: 32 bytes for reproducible tests, as in `PrivacyEngine`.
        stepped: called with the step and the number of steps, after each.
    Cost: 2 * 10^4 examples a second on one core with 1000 words, half of it privately.
    """
    if not len(corpus):
        raise ArgumentError("corpus must have a sequence, got none")
    epochs = checks.integer("epochs", epochs, low=1)
    batch_size = min(checks.integer("batch_size", batch_size, low=1), len(corpus))
    plan = None
    if epsilon is not None or noise_multiplier is not None:
        plan = make_plan(
            dataset_size=len(corpus), batch_size=batch_size, epochs=epochs, delta=delta, epsilon=epsilon,
            noise_multiplier=noise_multiplier, optimizer=SGD(momentum=momentum), clip_norm=clip_norm,
        )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = NextWord(vocabulary, dimension)
    data = TensorDataset(_rows(corpus, vocabulary))
    sampler = EpochShuffleSampler(len(corpus), seed)
    loader: Any = DataLoader(data, batch_size, sampler=sampler)
    optimizer = torch.optim.SGD(model.parameters(), lr, momentum=momentum)
    called: nn.Module = model
    if plan is not None:
        engine = PrivacyEngine(plan, key=key)
        called, optimizer, loader = engine.make_private(model, optimizer, loader)
    total, step = epochs * -(-len(corpus) // batch_size), 0
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for (x,) in loader:
            optimizer.zero_grad()
            _loss(called(x), x, vocabulary).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            step += 1
            if stepped is not None:
                stepped(step, total)
    return Trained(model, plan)


def _loss(logits: Tensor, x: Tensor, vocabulary: int) -> Tensor:
    """The mean over the examples of a sum over their words; rows of nothing but padding count as examples."""
    words = x[:, 2:]
    told = words < vocabulary
    each = F.cross_entropy(logits.flatten(0, 1), words.clamp(max=vocabulary - 1).flatten(), reduction="none")
    return (each.view(words.shape) * told).sum(1).mean()


def _rows(corpus: Sequence[Ints], vocabulary: int) -> Tensor:
    """(m, L + 1) int64: number V, the words, and as many V as the longest needs; L >= 2."""
    longest = max(2, *map(len, corpus)) if len(corpus) else 2
    rows = np.full((len(corpus), longest + 1), vocabulary)
    for row, words in zip(rows, corpus, strict=True):
        row[1 : 1 + len(words)] = words
    return torch.from_numpy(rows)


def _tables(model: NextWord) -> tuple[NDArray[np.float64], ...]:
    """(V + 1, V) logits of a word by the last and by the one before, and (V + 1, V + 1) logs of the sums of both."""
    with torch.no_grad():
        words, output = model.words.weight.double(), model.output.weight.double()
        dimension = words.shape[1]
        first = words @ output[:, :dimension].T + model.output.bias.double()
        second = words @ output[:, dimension:].T
        # The sum over w of e^(first + second) is a product of matrices; the largest of each row is taken off before it.
        first -= first.max(1, keepdim=True).values
        second -= second.max(1, keepdim=True).values
        norm = torch.log(first.exp() @ second.exp().T)
    return first.numpy(), second.numpy(), norm.numpy()
