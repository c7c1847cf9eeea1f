"""What a described plan would cost to check, before any part of it is made: for files of strangers.

Up to some thousand steps every pair of a mechanism and an order is quick, but for dense matrices, which `check_work`
counts; beyond, those are that have a closed form.
"""

import math
from typing import Any, assert_never

from anyorder.accounting.amplification.secret_order import AmplifiedOrder, SecretOrder
from anyorder.errors import ArgumentError, LimitError
from anyorder.formats import MAX_NUMBERS, MAX_OPERATIONS, MAX_STEPS, REMEDY, bounded, check_work, is_bounded
from anyorder.participation.registry import ORDERS
from anyorder.patterns import Listed, Pattern, PerEpoch, Rule, Separated
from anyorder.strategy.registry import KINDS, Structure

_SMALL_STEPS = 3 << 10
_MAX_LISTED = 1 << 12
_MAX_BUFFERS = 64
_MOST_BINS = 12  # of the deterministic bound; and
_MOST_DIAGONAL = 128  # of a loss distribution
_LEAST_SAMPLED_SIGMA = 0.4  # below, privacy loss distributions take minutes, and epsilon is in the tens


def check_plan(data: Any) -> None:
    """Refuse a described plan whose claims a stranger's file may not have recomputed, before any part of it is made.

    What is malformed passes here; the code that makes its parts refuses it.
    """
    if not is_bounded():
        return
    part, chosen, work = (_part(data, name) for name in ("participation", "strategy", "workload"))
    n = _number(work.get("n"), MAX_STEPS)
    for described in (part, chosen, work):
        for name in ("n", "k", "b", "p", "steps_per_epoch"):
            if _number(described.get(name), 0) > MAX_STEPS:
                raise LimitError(f"the plan has {name} above {MAX_STEPS}, the most that is read{REMEDY}")
        _check_lists(described)
    structure, rule = _structure(chosen), _rule(part)
    if work.get("kind") == "custom":
        check_work("a dense matrix", numbers=n**2)
    if structure in (Structure.DENSE, Structure.LOW_RANK):
        check_work("a dense matrix", numbers=_number(chosen.get("n"), 0) ** 2)
    pattern = None if rule is None else rule.pattern
    inner = _unscaled(chosen)
    if _structure(inner) in (Structure.BANDED, Structure.TOEPLITZ_BANDED) and _is_separated(pattern):
        bands = max(_number(inner.get("p"), 1), _longest(inner))
        check_work("a banded mechanism with this separation", operations=n * bands * _rounds(pattern, n))
    if isinstance(rule, SecretOrder):
        if _mu_of_step(data) > 1 / _LEAST_SAMPLED_SIGMA:
            raise LimitError(f"secret sampling with so little noise takes more time than a file is given{REMEDY}")
        _check_secret(data, rule, structure, n)
    if n > _SMALL_STEPS and structure is not None and not _has_closed_form(structure, pattern, chosen, n):
        raise LimitError(
            f"the claims of this mechanism, for this order and {n} steps, take more time than a file is given{REMEDY}"
        )


def is_large(data: dict[str, Any]) -> bool:
    """Whether a described plan takes more than a file of a stranger is given, and is read with `large=True` alone."""
    try:
        with bounded(True):
            check_plan(data)
    except LimitError:
        return True
    return False


def _check_secret(data: dict[str, Any], rule: SecretOrder, structure: Structure | None, n: int) -> None:
    """Refuse what an amplified claim would take, by its method and its number of bins."""
    how = _part(data, "method").get("kind")
    if how == "monte_carlo":
        raise LimitError(f"a claim by samples takes more time to replay than a file is given{REMEDY}")
    bins = rule.claim_bins(alike=structure is Structure.IDENTITY) if isinstance(rule, AmplifiedOrder) else 1
    if bins > (_MOST_BINS if how == "bound" else _MOST_DIAGONAL):
        raise LimitError(f"the amplified claim of {bins} bins takes more time than a file is given{REMEDY}")
    if rule.reads_columns and structure is not Structure.IDENTITY:
        rows = 2 * n if structure is Structure.TREE else n
        check_work("the columns of this mechanism, for a secret order", numbers=rows * n, operations=rows * n * 16)


def _mu_of_step(data: dict[str, Any]) -> float:
    """Of a release with the sigma that is described, and of the selection of rows beside it, if any."""
    chosen = _part(data, "selection")
    sigmas = [_real(data.get("sigma"))]
    if chosen.get("sigma") is not None:
        sigmas.append(_real(chosen["sigma"]) / math.sqrt(max(1, _number(chosen.get("rows"), 1))))
    return math.hypot(*(1 / sigma if sigma > 0 else 0.0 for sigma in sigmas))


def _structure(described: dict[str, Any]) -> Structure | None:
    """Of a described strategy; None for what is none of ours."""
    return next((kind.structure for kind in KINDS if kind.name == described.get("kind")), None)


def _unscaled(described: dict[str, Any]) -> dict[str, Any]:
    """What a described strategy is without its scales, which cost nothing beside it."""
    while _structure(described) is Structure.RESCALED:
        described = _part(described, "strategy")
    return described


def _rule(described: dict[str, Any]) -> Rule | None:
    """A described participation that a few numbers describe; None for one that lists its units, or is none of ours."""
    for rule in ORDERS:
        if rule.kind == described.get("kind") and issubclass(rule, Rule):
            try:
                return rule.read({name: value for name, value in described.items() if name != "kind"})
            except (ArgumentError, TypeError):
                return None
    return None


def _check_lists(described: dict[str, Any]) -> None:
    """Refuse lists that are longer than any plan needs: buffers of a BLT, restarts of a tree, entries of all else."""
    structure = _structure(described)
    most = _MAX_LISTED
    if structure is Structure.BUFFERED:
        most = _MAX_BUFFERS
    elif structure is Structure.TREE:
        most = 4 * _MAX_BUFFERS
    for value in described.values():
        if isinstance(value, dict):
            _check_lists(value)
        elif isinstance(value, list):
            inner = max((len(row) for row in value if isinstance(row, list)), default=0)
            if len(value) > most or inner > _MAX_BUFFERS:
                raise LimitError(f"a part of the plan lists more numbers than are read{REMEDY}")


def _has_closed_form(structure: Structure, pattern: Pattern | None, chosen: dict[str, Any], n: int) -> bool:
    """Whether the sensitivity takes about n operations and numbers.

    Args:
        pattern: None where units are listed one by one.
    """
    if structure is Structure.IDENTITY or structure is Structure.RESTARTED or _is_single(pattern):
        return True
    if _longest(chosen) * _rounds(pattern, n) > MAX_NUMBERS:
        return False
    match structure:
        case Structure.TREE:
            return _tree_is_quick(pattern, chosen, n)
        case Structure.TOEPLITZ | Structure.BUFFERED | Structure.TOEPLITZ_BANDED:
            return _toeplitz_is_quick(structure, pattern, n)
        case Structure.BANDED | Structure.DENSE | Structure.LOW_RANK | Structure.RESCALED:
            return False
        case _:
            assert_never(structure)


def _tree_is_quick(pattern: Pattern | None, chosen: dict[str, Any], n: int) -> bool:
    match pattern:
        case Separated(b=b):
            return not chosen.get("restarts") and min(b, 2 * n // b) * (n // b) ** 2 <= MAX_OPERATIONS
        case Listed() | PerEpoch():
            return True
        case None:
            return False
        case _:
            assert_never(pattern)


def _toeplitz_is_quick(structure: Structure, pattern: Pattern | None, n: int) -> bool:
    match pattern:
        case Separated():
            return structure is not Structure.TOEPLITZ_BANDED
        case Listed():
            return True
        case PerEpoch(k=k):
            return k <= 64 and k * n <= MAX_NUMBERS
        case None:
            return False
        case _:
            assert_never(pattern)


def _is_separated(pattern: Pattern | None) -> bool:
    return isinstance(pattern, Separated) and not pattern.is_single


def _is_single(pattern: Pattern | None) -> bool:
    return isinstance(pattern, Separated) and pattern.is_single


def _rounds(pattern: Pattern | None, n: int) -> int:
    """How often a unit takes part at most."""
    return n if pattern is None else pattern.max_participations


def _longest(described: dict[str, Any]) -> int:
    return max((len(value) for value in described.values() if isinstance(value, list)), default=1)


def _part(data: Any, name: str) -> dict[str, Any]:
    found = data.get(name) if isinstance(data, dict) else None
    return found if isinstance(found, dict) else {}


def _real(value: Any) -> float:
    return float(value) if type(value) in (int, float) and abs(value) < 1e300 else math.inf


def _number(value: Any, otherwise: int) -> int:
    return value if type(value) is int else otherwise
