"""The Secret Sharer on a training of one's own: plant, train, rank, and hold the claim against what was found."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from anyorder.accounting.curves import Curve
from anyorder.app.text import Text, load_function
from anyorder.audit import Memorised, Secrets, epsilon_lower_bound, p_value
from anyorder.audit.bounds import Method
from anyorder.audit.result import REFUTED
from anyorder.audit.secrets import LogProb, group_curve
from anyorder.errors import ArgumentError
from anyorder.plan.plan import Plan

Ints = NDArray[np.int64]
Train = Callable[[list[Ints], int], tuple[LogProb, Plan | None]]
"""`train(corpus, vocabulary)` -> the model's log-probabilities (see `audit.LogProb`), and the plan it ran, if any."""

_LEAST = -1e300  # stands for the logarithm of probability zero: a score is finite


class SharerObserver:
    """Hears how an audit goes; this one says nothing."""

    def planted(self, sequences: int, canaries: int) -> None:
        """The corpus has so many sequences, with so many canaries in it."""

    def ranked(self, done: int, count: int) -> None:
        """So many canaries have their rank."""


@dataclass(frozen=True)
class Shared:
    """What a model tells of the canaries in its text.

    Attributes:
        secrets: the canaries.
        repeats: how often each that is in stands in the text.
        inside: ranks of those that were in.
        outside: ranks of those that were left out: chance.
        scores: (count,) -log-perplexity of each canary, in nats, in the order of `secrets`.
        included: (count,) bool, secret.
        plan: the claim for one sequence, if there is one.
        delta: at which epsilons are.
        perplexity: of the text that was held out; None where there is none.
    """

    secrets: Secrets
    repeats: int
    inside: Memorised
    outside: Memorised
    scores: NDArray[np.float64]
    included: NDArray[np.bool_]
    plan: Plan | None
    delta: float
    perplexity: float | None

    @property
    def claim(self) -> Curve | None:
        """The guarantee for one canary, that is for `repeats` sequences; see `audit.group_curve`."""
        return None if self.plan is None else group_curve(self.plan.curve, self.repeats)

    def lower_bound(self, method: Method = "one_run", confidence: float = 0.95) -> float:
        """Of the epsilon for one canary; see `audit.epsilon_lower_bound`. "f_dp" is for Gaussian mechanisms."""
        return epsilon_lower_bound(self.scores, self.included, self.delta, confidence, method)

    @property
    def methods(self) -> tuple[Method, ...]:
        """Those of a lower bound whose assumptions hold: "f_dp" asks for a Gaussian mechanism."""
        return ("one_run",) if self.claim is None or self.claim.mu is None else ("one_run", "f_dp")

    def p_value(self) -> float | None:
        """Of the claim for one canary; see `audit.p_value`, method f_dp."""
        return None if self.claim is None else p_value(self.scores, self.included, self.claim, "f_dp")

    @property
    def refuted(self) -> bool:
        """Whether the claim is refuted, as true claims are in one audit of a million."""
        found = self.p_value()
        return found is not None and found < REFUTED

    def to_dict(self) -> dict[str, Any]:
        """JSON values, none of which is a single canary's."""
        claim = self.claim
        return {
            "canaries": self.secrets.count, "words": self.secrets.words, "vocabulary": self.secrets.vocabulary,
            "repeats": self.repeats, "inside": self.inside.to_dict(), "outside": self.outside.to_dict(),
            "delta": self.delta,
            "claimed_epsilon": None if self.plan is None else self.plan.curve.epsilon(self.delta),
            "claimed_epsilon_of_a_canary": None if claim is None else claim.epsilon(self.delta),
            "epsilon_lower_bound_of_a_canary": {method: self.lower_bound(method) for method in self.methods},
            "p_value": self.p_value(), "refuted": self.refuted, "perplexity": self.perplexity,
        }  # fmt: skip


def share(
    text: Text,
    train: Train,
    *,
    count: int = 2000,
    words: int = 3,
    repeats: int = 9,
    candidates: int = 10_000,
    delta: float = 1e-5,
    seed: int = 0,
    key: bytes | None = None,
    observer: SharerObserver | None = None,
) -> Shared:
    """Plant canaries in a text, half of them by secret draws; train on it; rank all of them.

    Where a canary is left out an empty sequence stands, see `Secrets.insert`: neighbours are by zero-out.

    Args:
        train: `train(corpus, vocabulary)`; see `Train`.
        count, words, repeats, candidates: see `Secrets`.
        delta: of the bound, and of the claim it stands beside.
        seed: of phrases and candidates.
        key: 32 bytes that draws and positions are drawn from, for tests; None takes them from the operating system.
    Cost: the training, and that of `Secrets.ranks`.
    """
    if count < 2:
        raise ArgumentError(f"count must be at least 2, of which about half are left out, got {count}")
    secrets = Secrets(count, words, vocabulary=text.vocabulary, seed=seed)
    size, key = secrets.size(candidates), os.urandom(32) if key is None else key
    observer = observer or SharerObserver()
    included = secrets.draw(key)
    if included.all() or not included.any():
        raise ArgumentError(f"all {count} draws came out alike: begin again, with more canaries")
    planted = secrets.insert(text.train, repeats, included=included, empty=True, key=key)
    observer.planted(len(planted.corpus), int(included.sum()))
    log_prob, plan = train(planted.corpus, text.vocabulary)
    if plan is not None:
        group_curve(plan.curve, repeats)  # refuses before the ranks
    ranks = secrets.ranks(log_prob, candidates, progress=lambda done: observer.ranked(done, count))
    inside, outside = Memorised(ranks[included], size), Memorised(ranks[~included], size)
    scores = np.maximum(-secrets.log_perplexity(log_prob), _LEAST)
    unseen = perplexity(log_prob, text.test) if text.test else None
    return Shared(secrets, repeats, inside, outside, scores, included, plan, delta, unseen)


def perplexity(log_prob: LogProb, sequences: Sequence[Ints]) -> float:
    """Return exp of the mean of -log Pr(word | those before it), over all words but each sequence's first."""
    logs = []
    for j in range(1, max(map(len, sequences), default=0)):
        longer = [sequence[: j + 1] for sequence in sequences if len(sequence) > j]
        rows = np.stack(longer)
        logs.append(np.asarray(log_prob(rows[:, :j], rows[:, j]), np.float64))
    if not logs:
        raise ArgumentError("sequences must have a word after a first one, got none that has")
    return float(np.exp(-np.concatenate(logs).mean()))


def own_training(name: str) -> Train:
    """The function that `module:function` names: train(corpus, vocabulary) -> log_prob, or (log_prob, plan)."""
    function = load_function(name, "training")

    def train(corpus: list[Ints], vocabulary: int) -> tuple[LogProb, Plan | None]:
        found = function(corpus, vocabulary)
        log_prob, plan = found if isinstance(found, tuple) and len(found) == 2 else (found, None)
        if not callable(log_prob) or not (plan is None or isinstance(plan, Plan)):
            raise ArgumentError(
                f"training {name!r} must return log_prob(contexts, next_words), or that and an anyorder Plan, got "
                f"{type(found).__name__}"
            )
        return log_prob, plan

    return train
