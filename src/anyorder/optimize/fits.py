"""A strategy from words, such as "blt, 2 buffers": the one reader of the names that people type."""

import re
from typing import Any

from anyorder.errors import ArgumentError, PlanError
from anyorder.optimize.candidates import MAX_COST, choose, sized
from anyorder.optimize.structured import fit
from anyorder.optimize.tree import fit_tree
from anyorder.participation import Participation
from anyorder.strategy import Independent, Strategy
from anyorder.workload import Workload

__all__ = ["fit_named", "kind_of"]

_SIZES = re.compile(r"^([0-9]+) (band|buffer|rank)s?$")
_ARGUMENTS = {"band": "bands", "buffer": "buffers", "rank": "rank"}
_ATTRIBUTES = {"bands": "num_bands", "buffers": "num_buffers", "rank": "rank"}
_FITTED = {
    "banded": "banded",
    "banded inverse": "banded_inverse",
    "banded low rank": "banded_low_rank",
    "banded toeplitz": "toeplitz",
    "blt": "blt",
    "dense": "dense",
    "restarted blt": "restarted_blt",
}  # by the names of `choose`; each fitted at the size in its name


def fit_named(
    words: str,
    workload: Workload,
    participation: Participation,
    *,
    objective: str = "mean",
    max_state: int | None = None,
    max_cost: float | None = MAX_COST,
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
        participation: any but PoissonSampling.
        objective: "mean", "max" or "last" error.
        max_state, max_cost: the budget of `choose`, for words without sizes.
        tree: `estimator`, `restart_every` and `completion` of `fit_tree`, with the words "tree" alone.
    Raises: ArgumentError for words that name nothing here; PlanError for a size that the fit cannot use.
    """
    if words == "tree":
        return fit_tree(workload, participation, objective=objective, **tree)
    if tree:
        raise ArgumentError(f"{', '.join(sorted(tree))} must come with mechanism 'tree' only, got {words!r}")
    if words == "independent":
        return Independent(workload.n)
    kind, *rest = words.split(", ")
    sizes: dict[str, Any] = {_ARGUMENTS[found[2]]: int(found[1]) for word in rest if (found := _SIZES.match(word))}
    if kind in _FITTED and len(sizes) == len(rest) and (sizes or kind == "dense"):
        return _of_size(fit(_FITTED[kind], workload, participation, objective, **sizes), kind, sizes)
    known = choose(workload, participation, max_state, objective, max_cost=max_cost)
    for candidate in known:
        if words in ("auto", candidate.name, kind_of(candidate.name)):
            return candidate.strategy
    kinds = sorted({kind_of(candidate.name) for candidate in known})
    raise ArgumentError(
        f"mechanism must be one of auto, poisson, {', '.join(kinds)}, a name from a comparison, or a kind "
        f"and its size ('dense', 'banded, 64 bands', 'banded low rank, 16 bands, 8 rank'), got {words!r}"
    )


def kind_of(name: str) -> str:
    """The kind in a name such as "blt, 2 buffers"."""
    return name.split(",")[0]


def _of_size(found: Strategy, kind: str, asked: dict[str, int]) -> Strategy:
    """The strategy, if it has the sizes that were asked for. A fit stops where more of them gain nothing."""
    has = {size: int(getattr(found, _ATTRIBUTES[size])) for size in asked}
    if has != asked:
        sizes = ", ".join(sized(count, size.removesuffix("s")) for size, count in has.items())
        raise PlanError(
            f"mechanism must have a size that its fit can use, got {asked}; for this order and optimizer more than "
            f"'{kind}, {sizes}' lowers no error, so ask for that"
        )
    return found
