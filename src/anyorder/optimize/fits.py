"""A strategy from words, such as "blt, 2 buffers": the one reader of the names that people type."""

import re
from collections.abc import Sequence
from typing import Any

from anyorder.errors import ArgumentError, PlanError
from anyorder.optimize.candidates import MAX_COST, choose
from anyorder.optimize.structured import FITS, Fit, fit
from anyorder.optimize.tree import fit_tree
from anyorder.patterns import Participation
from anyorder.strategy import Independent, Strategy
from anyorder.strategy.kinds import ALL_SIZES, in_words, sized
from anyorder.workload import Workload

__all__ = ["fit_named", "kind_in"]

_SIZE = re.compile(r"^([0-9]+) ([a-z]+)$")
_BY_WORDS = {one.kind.words: one for one in FITS}


def fit_named(
    words: str,
    workload: Workload,
    participation: Participation,
    *,
    objective: str = "mean",
    max_state: int | None = None,
    max_cost: float | None = MAX_COST,
    at_most: bool = False,
    epsilon: float | None = None,
    delta: float | None = None,
    **tree: Any,
) -> Strategy:
    """The strategy that the words name, fitted.

    | words | what |
    |---|---|
    | "auto" | the one of least error, `choose(..)[0]` |
    | "independent" | independent noise |
    | "tree" | the best tree, or the one of the tree's options |
    | "blt", "banded toeplitz", .. | the best of its kind among the candidates of `choose` |
    | "blt, 2 buffers, rescaled" | the candidate of that name |
    | "dense", "banded, 64 bands", "banded low rank, 16 bands, 8 rank" | a kind at its sizes, see `fit` |

    Args:
        words: see the table; sizes may be singular or plural.
        workload: A.
        participation: any but PoissonSampling, which has independent noise.
        objective: "mean", "max" or "last" error.
        max_state, max_cost: the budget of `choose`, for words without sizes.
        at_most: take less than the size in the words where more of it lowers no error, and do not refuse.
        epsilon, delta: the claim, for secret orders, see `fit`.
        tree: `estimator`, `restart_every` and `completion` of `fit_tree`, with the words "tree" alone.
    Raises: ArgumentError for words that name nothing here; PlanError for a size that the fit cannot use.
    """
    claim: dict[str, Any] = {"epsilon": epsilon, "delta": delta}
    if words == "tree" and not participation.secret:
        return fit_tree(workload, participation, objective=objective, **tree)
    if tree and words == "tree":
        raise ArgumentError(
            f"{', '.join(sorted(tree))} must not be given for an order that is drawn by secret coins, whose best tree "
            f"is chosen by its claim, got {tree}"
        )
    if tree:
        raise ArgumentError(f"{', '.join(sorted(tree))} must come with mechanism 'tree' only, got {words!r}")
    if words == "independent":
        return Independent(workload.n)
    kind, *rest = words.split(", ")
    sizes = _sizes(kind, rest)
    if sizes is not None:
        found = fit(_BY_WORDS[kind].name, workload, participation, objective, **sizes, **claim)
        return found if at_most else _of_size(found, _BY_WORDS[kind], sizes)
    known = choose(workload, participation, max_state, objective, max_cost=max_cost, **claim)
    for candidate in known:
        if words in ("auto", candidate.name, kind_in(candidate.name)):
            return candidate.strategy
    if words in _BY_WORDS:
        example = ", ".join([words, *(sized(16, size.word) for size in _BY_WORDS[words].sizes)])
        raise ArgumentError(
            f"mechanism {words!r} is not among the candidates for this order and workload, of which {known[0].name!r} "
            f"has least error; with its size, such as {example!r}, it is fitted all the same"
        )
    kinds = sorted({kind_in(candidate.name) for candidate in known} | _BY_WORDS.keys())
    raise ArgumentError(
        f"mechanism must be one of auto, poisson, {', '.join(kinds)}, a name from a comparison, or a kind "
        f"and its size ('dense', 'banded, 64 bands', 'banded low rank, 16 bands, 8 rank'), got {words!r}"
    )


def kind_in(name: str) -> str:
    """The kind in a name such as "blt, 2 buffers"."""
    return name.split(",")[0]


def _sizes(kind: str, words: Sequence[str]) -> dict[str, int] | None:
    """By argument: all that the words say, if it is sizes of that kind; None if it is something else."""
    if kind not in _BY_WORDS or (_BY_WORDS[kind].sizes and not words):
        return None
    arguments = {word: size.argument for size in ALL_SIZES for word in (size.word, size.argument)}
    found = [_SIZE.match(word) for word in words]
    sizes = {arguments[one[2]]: int(one[1]) for one in found if one and one[2] in arguments}
    return sizes if len(sizes) == len(words) else None


def _of_size(found: Strategy, kind: Fit, asked: dict[str, int]) -> Strategy:
    """The strategy, if it has the sizes that were asked for. A fit stops where more of them gain nothing."""
    if any(getattr(found, size.attribute) != asked[size.argument] for size in kind.sizes):
        raise PlanError(
            f"mechanism must have a size that its fit can use, got {asked}; for this order and optimizer more than "
            f"'{in_words(found)}' lowers no error, so ask for that"
        )
    return found
