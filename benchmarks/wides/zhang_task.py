"""The task of [Zhang, Mironov, Hejazinia 2021], section 6: words of Brown in one table, by negative sampling.

The loss of a sample (target t, context c, negatives n_1 .. n_8) over the rows e of one table of 1000 x 100 is

    -log s(e_t . e_c) - sum_i log s(-e_t . e_{n_i}),        a table of zeros has 9 ln 2 = 6.238.

What the paper leaves open, and what is taken here:

- *Words*: the 1000 most frequent but for the first 100, which stand for stop words. *Pairs*: each word with the four
  before it and the four after it in its sentence, among words of the vocabulary, two different words. *Negatives*:
  eight different words, uniform among those that are neither target nor context, drawn once for each sample ("each
  sample contains .. 8 negative words"). So the ten rows of a sample differ, and norms are exact in closed form.
- *Split*: sentences in random order, so that no sentence is in two parts.
- *First table*: N(0, 1), what torch gives: the paper's S1 = 15 and S0 = 0.1 are the sizes of gradients there (the
  option "small" is word2vec's own, uniform on +-0.5 / 100, where gradients are hundreds of times smaller).
- *Batches*: private runs draw them by Poisson sampling with probability b / n and divide by b; the run without privacy
  goes through the samples in an order shuffled anew in each epoch.
- *Adam on coordinates that are not selected*: "dense" treats them as having gradient 0, as a plain optimizer does with
  a masked gradient; "lazy" leaves them, and their moments, as they are (line 15 of Algorithm 3).
- *Canaries*: a phrase of three words in a sentence of its own, n_c times: six samples each time. The number of
  samples stays 200 000: with n_c = 15 canaries are 45 % of them.
- *Probability*: Pr(w | v) is the softmax of e_v . e_w over all words, Pr(w | u, v) that of the mean of e_u and e_v.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.special import logsumexp

from anyorder.app.text import read_text
from anyorder.audit import Memorised, Secrets
from anyorder.noise import NoiseSource
from benchmarks.wides.zhang_select import Exponential, Floats, Ints, Selector, Setting, SparseVector, Uniform

ZERO_TABLE = 9 * float(np.log(2))


# -- samples ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Samples:
    """(m, 10) words each: target, context, negatives; and the phrases that were planted in the training part."""

    train: Ints = field(repr=False)
    test: Ints = field(repr=False)
    secrets: Secrets | None = None


def read_samples(folder: str | Path, setting: Setting, seed: int, repeats: int = 0) -> Samples:
    """Cut the corpus in three parts; the second, for tuning, is left aside."""
    text = read_text(folder, vocabulary=setting.vocabulary, length=10**6)
    sentences = [*text.train, *text.test]
    rng = np.random.default_rng((seed, 1))
    own = _pairs([sentences[i] for i in rng.permutation(len(sentences))], setting.window)
    secrets, planted = None, np.empty((0, 2), np.int64)
    if repeats:
        secrets = Secrets(setting.canaries, 3, vocabulary=setting.vocabulary, seed=seed)
        planted = _pairs(list(secrets.phrases) * repeats, setting.window)[: setting.train]
    kept = setting.train - len(planted)
    cuts = (0, kept, setting.train + setting.validation, setting.train + setting.validation + setting.test)
    if len(own) < cuts[-1]:
        raise SystemExit(f"the corpus has {len(own)} pairs, {cuts[-1]} are needed")
    train = np.concatenate([own[:kept], planted])
    train, test = (_with_negatives(part, setting, rng) for part in (train, own[cuts[2] : cuts[3]]))
    return Samples(train, test, secrets)


def _pairs(sentences: list[Ints], window: int) -> Ints:
    """(m, 2) pairs (word, neighbour), both ways, sentence by sentence, in random order of none: as they stand."""
    words = np.concatenate(sentences)
    number = np.repeat(np.arange(len(sentences)), [len(sentence) for sentence in sentences])
    found, place = [], []
    for gap in range(1, window + 1):
        at = np.flatnonzero((number[gap:] == number[:-gap]) & (words[gap:] != words[:-gap]))
        found += [np.stack([words[at], words[at + gap]], 1), np.stack([words[at + gap], words[at]], 1)]
        place += [at, at + gap]
    return np.concatenate(found)[np.argsort(np.concatenate(place), kind="stable")]


def _with_negatives(pairs: Ints, setting: Setting, rng: np.random.Generator) -> Ints:
    """(m, 2 + negatives), all of a row different: rows with a word twice draw all their negatives again."""
    result = np.empty((len(pairs), 2 + setting.negatives), np.int64)
    result[:, :2] = pairs
    wrong = np.arange(len(pairs))
    while len(wrong):
        result[wrong, 2:] = rng.integers(setting.vocabulary, size=(len(wrong), setting.negatives))
        ordered = np.sort(result[wrong], axis=1)
        wrong = wrong[(ordered[:, 1:] == ordered[:, :-1]).any(1)]
    return result


class Loss:
    """The mean loss over samples, from how often each pair of words is in them: a few milliseconds for any number."""

    def __init__(self, samples: Ints, vocabulary: int) -> None:
        def counted(left: Ints, right: Ints) -> Floats:
            counts = np.bincount(left * vocabulary + right, minlength=vocabulary**2)
            return (counts / len(samples)).astype(np.float32)

        self._near = counted(samples[:, 0], samples[:, 1])
        self._far = counted(np.repeat(samples[:, 0], samples.shape[1] - 2), samples[:, 2:].reshape(-1))

    def __call__(self, table: Floats) -> float:
        scores = torch.from_numpy(table @ table.T).reshape(-1)
        plus = torch.nn.functional.softplus(scores)  # -log s(-x) = softplus(x), -log s(x) = softplus(x) - x
        return float((plus - scores).dot(torch.from_numpy(self._near)) + plus.dot(torch.from_numpy(self._far)))


# -- gradients -------------------------------------------------------------------------------------------------------


def row_gradients(table: Floats, ids: Ints) -> tuple[Floats, Floats, Floats]:
    """Of each sample the gradient on its ten rows, its norm, and its loss: (m, 10, width), (m,), (m,).

    With a_j = s(e_t . e_j) - [j is the context]: on the target sum_j a_j e_j, on row j a_j e_t. The rows differ.
    """
    rows = table[ids]
    target, others = rows[:, :1], rows[:, 1:]
    logits = np.matmul(others, target.transpose(0, 2, 1))[:, :, 0]
    share = 1 / (1 + np.exp(-logits))
    losses = np.logaddexp(0, logits).sum(1) - logits[:, 0]
    share[:, 0] -= 1
    gradients = np.empty_like(rows)
    np.matmul(share[:, None, :], others, out=gradients[:, :1])
    np.multiply(share[:, :, None], target, out=gradients[:, 1:])
    own = np.einsum("md,md->m", gradients[:, 0], gradients[:, 0])
    norms = np.sqrt(own + (share**2).sum(1) * np.einsum("md,md->m", target[:, 0], target[:, 0]))
    return gradients, norms, losses


# -- one training ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Way:
    """How a table is trained.

    Attributes:
        selector: "em", "svt", "uniform"; "all" is DP-SGD, and "none" is without privacy.
        sigma: noise over the sensitivity min(S1 / b, S2), or S1 / b for "all".
        adam: "dense" or "lazy".
        start: "normal" or "small".
    """

    selector: str
    sigma: float = 0.0
    adam: str = "dense"
    start: str = "normal"


@dataclass(frozen=True)
class Trained:
    """The table; its curve, rows (epoch, loss of the batches since the last row, of the training part, of the test
    part); and the share of chosen coordinates that the batch's gradient is not zero on, beside the share of all.
    """

    table: Floats = field(repr=False)
    curve: list[tuple[float, ...]] = field(repr=False)
    touched: tuple[float, float] | None


def train(
    samples: Samples, setting: Setting, way: Way, seed: int, steps: int | None = None, points: int = 100
) -> Trained:
    """Train one table for all epochs, or so many steps."""
    steps = setting.steps if steps is None else steps
    size = setting.vocabulary * setting.width
    key = np.random.default_rng((seed, 2)).bytes(32)  # the data are public, and the numbers come again
    source = NoiseSource(key)
    noise = source.derive(b"noise")
    table = first_table(setting, way.start, seed)
    select = _selector(way.selector, setting, source.derive(b"select"))
    optimizer = Adam(table, setting.lr)
    gradient = np.zeros_like(table)
    flat, shared = gradient.reshape(-1), torch.from_numpy(gradient)
    bound = setting.clip / setting.batch
    std = way.sigma * (bound if select is None else min(bound, setting.second_clip))
    losses = Loss(samples.train, setting.vocabulary), Loss(samples.test, setting.vocabulary)
    curve: list[tuple[float, ...]] = [(0.0, losses[0](table), losses[0](table), losses[1](table))]
    hits, touched, looked, normals = 0.0, 0.0, 0, np.empty((0, 0), np.float32)
    every, recent, seen = max(1, steps // points), 0.0, 0
    for t, ids in enumerate(batches(samples.train, setting, way.selector != "none", seed, steps)):
        if len(ids):
            rows, norms, loss = row_gradients(table, ids)
            clip = np.inf if way.selector == "none" else setting.clip
            rows *= (np.minimum(1, clip / np.maximum(norms, 1e-30)) / setting.batch)[:, None, None]
            places = torch.from_numpy(ids.reshape(-1))
            shared.index_add_(0, places, torch.from_numpy(rows.reshape(-1, setting.width)))
            recent, seen = recent + float(loss.sum()), seen + len(loss)
        if select is None:
            if std:
                shared.view(-1).add_(torch.from_numpy(noise.normal(t, 0, size)), alpha=std)
            optimizer.dense(gradient)
            gradient.fill(0)
        else:
            chosen = select(flat, t)
            values = flat[chosen]
            if t % 16 == 0:
                looked += 1
                hits += np.count_nonzero(values) / setting.chosen
                touched += len(np.unique(ids)) / setting.vocabulary
            values *= min(1, setting.second_clip / max(float(np.linalg.norm(values)), 1e-30))
            if t % 64 == 0:
                normals = noise.normal(t, 0, 64 * setting.chosen).reshape(64, -1)
            values += np.float32(std) * normals[t % 64, : len(chosen)]
            if len(ids):
                shared.index_fill_(0, places, 0.0)
            if way.adam == "lazy":
                optimizer.lazy(chosen, values)
            else:
                flat[chosen] = values
                optimizer.dense(gradient)
                flat[chosen] = 0
        if (t + 1) % every == 0:
            epoch = (t + 1) * setting.batch / setting.train
            curve.append((round(epoch, 4), recent / max(seen, 1), losses[0](table), losses[1](table)))
            recent, seen = 0.0, 0
    share = None if select is None else (hits / looked, touched / looked)
    return Trained(table, curve, share)


def first_table(setting: Setting, start: str, seed: int) -> Floats:
    rng, shape = np.random.default_rng((seed, 3)), (setting.vocabulary, setting.width)
    match start:
        case "normal":
            return rng.standard_normal(shape, np.float32)
        case "small":
            return ((rng.random(shape, np.float32) - 0.5) / setting.width).astype(np.float32)
        case _:
            raise SystemExit(f"start must be normal or small, got {start!r}")


def _selector(name: str, setting: Setting, source: NoiseSource) -> Selector | None:
    match name:
        case "none" | "all":
            return None
        case "em":
            return Exponential(setting, source)
        case "svt":
            return SparseVector(setting, source)
        case "uniform":
            return Uniform(setting, source)
        case _:
            raise SystemExit(f"selector must be none, all, em, svt or uniform, got {name!r}")


def batches(samples: Ints, setting: Setting, poisson: bool, seed: int, steps: int) -> Iterator[Ints]:
    """(m, 10) words of each step: m is random under Poisson sampling, and may be 0."""
    rng, n, b = np.random.default_rng((seed, 4)), len(samples), setting.batch
    if poisson:
        for m in rng.binomial(n, b / n, size=steps).tolist():
            drawn = rng.integers(n, size=m)
            while len(set(drawn.tolist())) < m:  # a sample twice: all again, so that all sets are as probable
                drawn = rng.integers(n, size=m)
            yield samples[drawn]
        return
    done = 0
    while done < steps:
        order = rng.permutation(n)
        for start in range(0, min(n // b, steps - done) * b, b):
            yield samples[order[start : start + b]]
        done += n // b


class Adam:
    """beta 0.9 and 0.999, eps 1e-8, in place."""

    def __init__(self, table: Floats, lr: float) -> None:
        self._table = torch.from_numpy(table)
        self._m, self._v = torch.zeros_like(self._table), torch.zeros_like(self._table)
        self._lr, self._step = lr, torch.tensor(0.0)
        self._flat = table.reshape(-1), self._m.numpy().reshape(-1), self._v.numpy().reshape(-1)

    def dense(self, gradient: Floats) -> None:
        """All coordinates, those of gradient zero too."""
        self._step += 1
        torch._fused_adam_(
            [self._table], [torch.from_numpy(gradient)], [self._m], [self._v], [], [self._step], lr=self._lr,
            beta1=0.9, beta2=0.999, weight_decay=0.0, eps=1e-8, amsgrad=False, maximize=False,
        )  # fmt: skip

    def lazy(self, places: Ints, values: Floats) -> None:
        """These coordinates alone, as torch's `SparseAdam`: moments of the others stay, the step counts for all."""
        self._step += 1
        t = float(self._step)
        table, m, v = self._flat
        first = m[places] * np.float32(0.9) + values * np.float32(0.1)
        second = v[places] * np.float32(0.999) + values**2 * np.float32(0.001)
        m[places], v[places] = first, second
        rate = self._lr * np.sqrt(1 - 0.999**t) / (1 - 0.9**t)
        table[places] -= np.float32(rate) * first / (np.sqrt(second) + np.float32(1e-8))


# -- canaries --------------------------------------------------------------------------------------------------------


def log_prob(table: Floats) -> Callable[[Ints, Ints], NDArray[np.float64]]:
    """As `audit.LogProb`, of the softmax of scores with a word, or with the mean of two."""
    scores = table.astype(np.float64) @ table.astype(np.float64).T
    top = scores.max(1, keepdims=True)
    one = (top + np.log(np.exp(scores - top).sum(1, keepdims=True)))[:, 0]
    half = np.exp((scores - top) / 2)
    product = half @ half.T
    far = np.argwhere(product < 1e-200)  # pairs of words whose own scores are so large that all others underflow
    two = np.log(np.maximum(product, 1e-200)) + (top + top.T) / 2
    for i, j in far:
        two[i, j] = logsumexp((scores[i] + scores[j]) / 2)

    def found(contexts: Ints, words: Ints) -> NDArray[np.float64]:
        last = contexts[:, -1]
        if contexts.shape[1] == 1:
            return np.asarray(scores[last, words] - one[last])
        before = contexts[:, -2]
        return np.asarray((scores[last, words] + scores[before, words]) / 2 - two[last, before])

    return found


def planted_ranks(table: Floats, secrets: Secrets) -> Memorised:
    """Ranks among 10 000 random phrases."""
    return Memorised(secrets.ranks(log_prob(table), 10_000), secrets.size(10_000))


def chance(table: Floats, setting: Setting, seed: int) -> Memorised:
    """The same of phrases that were never planted."""
    others: Any = Secrets(setting.canaries, 3, vocabulary=setting.vocabulary, seed=1_000_000 + seed)
    return planted_ranks(table, others)
