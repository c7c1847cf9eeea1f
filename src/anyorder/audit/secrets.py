"""The Secret Sharer: random phrases hidden in a text, and how strongly a model that was trained on it favours them.

[Carlini et al. 2019, The Secret Sharer; Zhang et al. 2021, section 5 (here: Z21)]. A canary is a phrase of words drawn
uniformly from the vocabulary. A model that has not seen it ranks it, among phrases of the same first word, at a place
that is uniform, whatever the model; one that has memorised it ranks it first.

**What a rank is here.** 1 is the phrase that the model favours most. [Z21] counts the phrases that are no better, so
that its ranks grow with favour: theirs is, up to ties and to phrases that it leaves out, `size` + 1 - ours.

**What a claim says of it.** A guarantee for one example (one sequence of the corpus) bounds what is learned of a canary
that stands in the corpus once. One that stands there `repeats` times is a group of so many examples: under mu-GDP it
has `repeats` times mu, see `group_curve`. Or make the canary the unit: `Planted.canary` names each sequence's.
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, assert_never

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import chdtrc

from anyorder import checks
from anyorder.accounting.amplification.claims import Amplified
from anyorder.accounting.curves import BoundedRange, Composed, Curve, Gaussian, Sampled
from anyorder.checks import SetOnce, final, frozen
from anyorder.errors import ArgumentError
from anyorder.noise import NoiseSource

__all__ = ["LogProb", "Memorised", "Planted", "Secrets", "Uniformity", "chi_squared", "exposure", "group_curve"]

Ints = NDArray[np.int64]
LogProb = Callable[[Ints, Ints], ArrayLike]
"""`log_prob(contexts, next_words)`: (m, j) words in order of the text, (m,) that follow; gives (m,) natural logs."""

_MAX_PHRASES = 1 << 22  # of a rank among all: some 200 MiB


@final
@dataclass(frozen=True)
class Planted:
    """A corpus with canaries in it.

    Attributes:
        corpus: the sequences, the corpus's own in their order.
        canary: (len(corpus),) int64: of each sequence, which canary it is or was left out; -1 for the corpus's own. The
            units of a run that protects whole canaries.
        included: (count,) bool: which canaries are in. As secret as draws are.
        repeats: how often each of them is.
    """

    corpus: list[Ints]
    canary: Ints
    included: NDArray[np.bool_]
    repeats: int


@final
class Secrets(SetOnce):
    """Phrases of uniformly random words, a function of the seed.

    Args:
        count: canaries.
        words: in each, 2 or more. The first is given to the model; the others are the secret.
        vocabulary: size V; words are 0, .., V - 1.
        seed: a non-negative integer or bytes. Phrases may be public, draws not: those come from `draw`.

    Attributes:
        phrases: (count, words) int64.
        source: what positions, candidates and ties are drawn from, unless a key is given.

    Example:
        >>> secrets = Secrets(count=2, words=3, vocabulary=10, seed=0)
        >>> ranks = secrets.ranks(lambda before, word: -1.0 * word, candidates=99)
        >>> secrets.phrases.shape, 1 <= ranks.min(), ranks.max() <= 100
        ((2, 3), np.True_, np.True_)
    """

    count: int
    words: int
    vocabulary: int
    phrases: Ints
    source: NoiseSource

    def __init__(self, count: int = 1000, words: int = 3, *, vocabulary: int, seed: int | bytes) -> None:
        self.count = checks.integer("count", count, low=1)
        self.words = checks.integer("words", words, low=2, high=64)
        self.vocabulary = checks.integer("vocabulary", vocabulary, low=2, high=1 << 31)
        text = b"bytes" + seed if isinstance(seed, bytes) else b"int%d" % checks.integer("seed", seed, low=0)
        self.source = NoiseSource(blake2b(text, digest_size=32, person=b"anyorder secrets").digest())
        drawn = _below(self.vocabulary, self.source.derive(b"phrases"), 0, self.count * self.words)
        self.phrases = frozen(drawn.reshape(self.count, self.words))

    def draw(self, key: bytes | None = None) -> NDArray[np.bool_]:
        """Fair independent draws, one for each canary: which are in.

        Args:
            key: 32 bytes, for tests; None takes them from the operating system. Never a function of the seed alone.
        Returns: (count,) bool.
        """
        source = NoiseSource(os.urandom(32) if key is None else key)
        return (source.derive(b"coins of secrets").words(0, 0, self.count) & 1).astype(bool)

    def insert(
        self,
        corpus: Sequence[ArrayLike],
        repeats: int,
        *,
        included: ArrayLike | None = None,
        empty: bool = False,
        key: bytes | None = None,
    ) -> Planted:
        """The corpus with each canary in it `repeats` times, as sequences of their own at uniformly random positions.

        Args:
            corpus: sequences of words. None is changed, and their order is kept.
            repeats: of each canary; [Z21] takes 3, 9 and 15.
            included: (count,) bool; None for all.
            empty: put an empty sequence where a canary that is left out would be. The two corpora of a draw then have
                as many examples in the same order, and one has nothing to give: neighbours by zero-out. Without,
                they are neighbours by add-or-remove.
            key: 32 bytes that positions are drawn from; None takes the seed's.
        Raises: ArgumentError, also for words outside the vocabulary.
        """
        repeats = checks.integer("repeats", repeats, low=1)
        chosen = self._chosen(included)
        own = [_sequence(words, self.vocabulary) for words in corpus]
        placed = np.repeat(np.arange(self.count) if empty else np.flatnonzero(chosen), repeats)
        source = self.source if key is None else NoiseSource(key)
        total = len(own) + len(placed)
        words = source.derive(b"positions").words(0, 0, 2 * total).view(np.uint64)
        canary = np.full(total, -1, np.int64)
        canary[np.argsort(words, kind="stable")[: len(placed)]] = placed  # the slots in random order
        rest, nothing = iter(own), np.empty(0, np.int64)
        text = [next(rest) if c < 0 else self.phrases[c].copy() if chosen[c] else nothing for c in canary]
        return Planted(text, frozen(canary), frozen(chosen), repeats)

    def log_perplexity(self, log_prob: LogProb) -> NDArray[np.float64]:
        """-log Pr(second | first) - log Pr(third | first, second) - .. of each canary, in nats; (count,) float64."""
        return _perplexity(log_prob, self.phrases)

    def ranks(
        self,
        log_prob: LogProb,
        candidates: int | None = 10_000,
        *,
        key: bytes | None = None,
        progress: Callable[[int], object] | None = None,
    ) -> Ints:
        """The place of each canary, 1 the most favoured, among random phrases that begin with the same word.

            rank = 1 + #{candidates of lower perplexity} + #{candidates of the same that come before it}

        A canary stands at a random place among its candidates, which are drawn as it was, uniformly and afresh for
        each. So where the model has not seen it, its rank is exactly uniform on 1, .., candidates + 1 and independent
        of the others', whatever the model, with ties and with models whose rounding depends on the place.

        Args:
            log_prob: the model. It is called with candidates + 1 rows, one call for each secret word of each canary.
            candidates: how many; None for all V^(words - 1) phrases, in random order, the canary among them.
            key: 32 bytes that candidates and places are drawn from; None takes the seed's.
            progress: called with the number of canaries that are done.
        Returns: (count,) int64, from 1 to `size(candidates)`.
        Cost: count * (words - 1) * candidates probabilities.
        """
        size = self.size(candidates)
        source = (self.source if key is None else NoiseSource(key)).derive(b"candidates")
        result = np.empty(self.count, np.int64)
        for c, canary in enumerate(self.phrases):
            phrases = np.empty((size, self.words), np.int64)
            phrases[:, 0] = canary[0]
            if candidates is None:
                place, phrases[:, 1:] = self._every(canary, source, c)
            else:
                drawn = _below(self.vocabulary, source, c, size * (self.words - 1))
                phrases[:, 1:] = drawn.reshape(size, -1)
                place = int(_below(size, source, self.count + c, 1)[0])
                phrases[place] = canary
            perplexity = _perplexity(log_prob, phrases)
            result[c] = 1 + (perplexity < perplexity[place]).sum() + (perplexity[:place] == perplexity[place]).sum()
            if progress is not None:
                progress(c + 1)
        return result

    def size(self, candidates: int | None = 10_000) -> int:
        """Phrases that a rank is among, |R|: the canary and its candidates, or all of its first word."""
        if candidates is not None:
            return 1 + checks.integer("candidates", candidates, low=1, high=_MAX_PHRASES - 1)
        size = int(self.vocabulary ** (self.words - 1))
        if size > _MAX_PHRASES:
            raise ArgumentError(
                f"a rank among all phrases needs at most {_MAX_PHRASES} of them, got {self.vocabulary}^"
                f"{self.words - 1}: give a number of candidates"
            )
        return size

    def _every(self, canary: Ints, source: NoiseSource, c: int) -> tuple[int, Ints]:
        """Where the canary is among all that may follow its first word, and those, in random order."""
        size, length = self.size(None), self.words - 1
        order = np.argsort(source.words(c, 0, 2 * size).view(np.uint64), kind="stable")
        powers = self.vocabulary ** np.arange(length - 1, -1, -1)
        place = int(np.flatnonzero(order == canary[1:] @ powers)[0])
        return place, order[:, None] // powers % self.vocabulary

    def _chosen(self, included: ArrayLike | None) -> NDArray[np.bool_]:
        chosen = np.ones(self.count, bool) if included is None else np.asarray(included)
        if chosen.dtype != np.bool_ or chosen.shape != (self.count,):
            raise ArgumentError(
                f"included must be {self.count} booleans, one for each canary, got {chosen.dtype} of shape "
                f"{chosen.shape}"
            )
        return chosen

    def __repr__(self) -> str:
        return f"Secrets(count={self.count}, words={self.words}, vocabulary={self.vocabulary})"


# -- statistics ------------------------------------------------------------------------------------------------------


def exposure(ranks: ArrayLike, size: int) -> NDArray[np.float64]:
    """log2(size) - log2(rank), in bits [Carlini et al. 2019, Def. 2]: what the model saves who guesses the phrase.

    By chance its mean is 1.44, its median 1.00 and its 90 % quantile 3.32, for a large size; it ends at log2(size).

    Args:
        ranks: (count,) integers, 1 the most favoured.
        size: phrases that a rank is among.
    """
    return np.asarray(np.log2(size) - np.log2(_ranks(ranks, size)))


@dataclass(frozen=True)
class Uniformity:
    """Pearson's test of ranks against chance.

    Attributes:
        statistic: chi-squared, with bins - 1 degrees of freedom.
        distance: statistic / count, the "chi-squared distance" of [Z21, Table 2].
        p_value: of the statistic, under uniform ranks.
        counts: (bins,) int64, ranks in each bin, the most favoured first.
    """

    statistic: float
    distance: float
    p_value: float
    counts: Ints


def chi_squared(ranks: ArrayLike, size: int, bins: int = 10) -> Uniformity:
    """Return how far ranks are from uniform on 1, .., size.

        sum over bins of (counted - expected)^2 / expected

    A bin holds size / bins ranks, one more or less where that is no integer, and is expected to have its exact share.

    Args:
        ranks: (count,) integers from 1 to size; independent for the p-value to hold.
        size: phrases that a rank is among, `bins` or more.
    """
    found, bins = _ranks(ranks, size), checks.integer("bins", bins, low=2, high=size)
    counts = np.bincount((found - 1) * bins // size, minlength=bins)
    edges = -(-np.arange(bins + 1) * size // bins)  # the first rank of each bin, less one
    expected = len(found) * np.diff(edges) / size
    statistic = float((((counts - expected) ** 2) / expected).sum())
    p_value = float(chdtrc(bins - 1, statistic))
    return Uniformity(statistic, statistic / len(found), p_value, frozen(counts.astype(np.int64)))


@dataclass(frozen=True)
class Memorised:
    """The ranks of some canaries, and what they show.

    Attributes:
        ranks: (count,) int64, 1 the most favoured.
        size: phrases that a rank is among.
    """

    ranks: Ints
    size: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "ranks", frozen(_ranks(self.ranks, self.size)))

    @property
    def exposure(self) -> NDArray[np.float64]:
        """(count,) bits."""
        return exposure(self.ranks, self.size)

    @property
    def uniformity(self) -> Uniformity:
        """Against chance, in 10 bins."""
        return chi_squared(self.ranks, self.size)

    def to_dict(self) -> dict[str, Any]:
        """JSON values: a summary, from which no single canary's rank can be told."""
        found, test = self.exposure, self.uniformity
        return {
            "canaries": len(self.ranks), "phrases": self.size,
            "exposure": {
                "mean": float(found.mean()), "median": float(np.median(found)), "high": float(np.quantile(found, 0.9)),
            },
            "chi_squared": test.statistic, "distance": test.distance, "p_value": test.p_value,
            "counts": test.counts.tolist(),
        }  # fmt: skip


def group_curve(curve: Curve, repeats: int) -> Curve:
    """The guarantee for a group of `repeats` units, from that for one: repeats * mu.

    A group moves the sums by at most so many times what one unit may, so it is repeats * mu-GDP [Dong, Roth, Su 2022,
    Theorem 2.14]. For a canary that stands in the corpus so often.

    Returns: for one repeat the curve itself.
    Raises: ArgumentError for several repeats under a curve that is not a Gaussian's (secret sampling).
    """
    repeats = checks.integer("repeats", repeats, low=1)
    if repeats == 1:
        return curve
    match curve:
        case Gaussian():
            return Gaussian(repeats * curve.mu, neighbours=curve.neighbours, unit=f"group of {repeats}")
        case BoundedRange() | Sampled() | Amplified() | Composed():
            raise ArgumentError(
                "the guarantee of a group is known here for mu-GDP, and this curve is not a Gaussian's; plant each "
                "canary once (repeats=1), which the curve itself is for"
            )
        case _:
            assert_never(curve)


# -- parts -----------------------------------------------------------------------------------------------------------


def _perplexity(log_prob: LogProb, phrases: Ints) -> NDArray[np.float64]:
    """-sum of log-probabilities of the words after the first; (m,) float64."""
    total = np.zeros(len(phrases))
    for j in range(1, phrases.shape[1]):
        found = np.asarray(log_prob(phrases[:, :j], phrases[:, j]), dtype=np.float64)
        if found.shape != total.shape:
            raise ArgumentError(
                f"log_prob must return one number for each of {len(total)} contexts, got shape {found.shape}"
            )
        if np.isnan(found).any() or (found == np.inf).any():
            raise ArgumentError("log_prob must return natural logs of probabilities, got NaN or infinity")
        total -= found
    return total


def _below(bound: int, source: NoiseSource, row: int, count: int) -> Ints:
    """Integers from 0 to bound - 1: 64-bit words by their remainder, uniform up to bound / 2^64."""
    words = source.words(row, 0, 2 * count).view(np.uint64)
    return (words % np.uint64(bound)).astype(np.int64)


def _sequence(words: ArrayLike, vocabulary: int) -> Ints:
    """One sequence of the corpus, checked; the message shows no word of it."""
    found = np.asarray(words)
    if found.ndim != 1 or (found.size and found.dtype.kind not in "iu"):
        raise ArgumentError(
            f"a sequence of the corpus must be a list of integers, got {found.dtype} of shape {found.shape}"
        )
    result = found.astype(np.int64)
    if result.size and (result.min() < 0 or result.max() >= vocabulary):
        raise ArgumentError(f"words of the corpus must be integers from 0 to {vocabulary - 1}: the vocabulary's")
    return result


def _ranks(ranks: ArrayLike, size: int) -> Ints:
    size = checks.integer("size", size, low=2)
    found = np.asarray(ranks)
    if found.ndim != 1 or not found.size or found.dtype.kind not in "iu":
        raise ArgumentError(f"ranks must be a non-empty list of integers, got {found.dtype} of shape {found.shape}")
    if found.min() < 1 or found.max() > size:
        raise ArgumentError(f"ranks must be from 1, the most favoured, to {size}, got {found.min()} to {found.max()}")
    return found.astype(np.int64)
