"""Audits of any program: what it released as arrays, the canaries that it may have used, the draws, and its claim.

Two kinds. *White box*: the rows that were released, step by step, and where each canary was, or could have been
(`from_rows`). *Models only*: one score for each canary, made by whoever attacks in whatever way (`from_scores`). Both
can be files (`from_file`), written by any program in any language that writes NumPy's formats.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any
from zipfile import BadZipFile, ZipFile, is_zipfile

import numpy as np
import scipy
from numpy.typing import ArrayLike, NDArray

from anyorder import checks
from anyorder.accounting.amplification.claims import Amplified
from anyorder.accounting.curves import Composed, Curve, Gaussian, Sampled
from anyorder.accounting.gaussian import NEIGHBOURS
from anyorder.audit.canaries import Canaries, Patterns, as_released, forward
from anyorder.audit.f_dp import Claim
from anyorder.audit.result import Audited, Stated
from anyorder.errors import ArgumentError
from anyorder.strategy import Strategy

__all__ = ["from_file", "from_rows", "from_scores"]

Floats = NDArray[np.float64]


def from_rows(
    released: Iterable[Any],
    *,
    canaries: Canaries | ArrayLike,
    included: ArrayLike,
    claim: Claim,
    noise_std: float,
    clip_norm: float = 1.0,
    delta: float | None = None,
    steps: Any,
    strategy: Strategy | ArrayLike | None = None,
    sampling_probability: float | None = None,
    neighbours: str = "zero-out",
    independent: bool = False,
) -> Audited:
    """The white box: scores of canaries from released rows, whitened by the C that the program says it has.

    Of rows Ghat = G + noise_std C^-1 Z, and of a canary that adds clip_norm g_c at the steps pi that its draw gave it,

        s_c = (C pi)^T (C Ghat) g_c / ||C pi|| ~ N(included clip_norm ||C pi||, noise_std^2)

    and with `sampling_probability` q, where a draw of its own, which nobody knows, decides for each of its steps t
    whether an included canary is in it, a log likelihood ratio, with w_t = <C e_t, C Ghat g_c> / noise_std^2 and
    a_t = ||C e_t||^2 (clip_norm / noise_std)^2,

        s_c = sum_t log(1 - q + q exp(clip_norm w_t - a_t / 2))

    the best test where the columns of C at the steps of one canary do not overlap: C = 1 (Poisson sampling), and banded
    C with the steps of a unit at least as far apart as there are bands (cyclic Poisson sampling).

    Args:
        released: (n, d) array, memory map, or any iterable of n rows of d numbers; each is looked at once, in order.
            What models tell is enough: for SGD with learning rate 1 a row is the model before less the model after.
        canaries: `Canaries`; or (count, d) unit vectors; or (count,) integers: canary c is 1 in that coordinate.
        included: (count,) bools or 0/1, the draws.
        claim: what the program says: (epsilon, delta), or a curve of `anyorder.accounting`.
        noise_std: the standard deviation s, in the units of the rows.
        clip_norm: what an included canary adds to a row, in the units of the rows: of means over B examples that were
            clipped to 1, this is 1 / B, and so is noise_std over the noise multiplier.
        delta: where epsilon is read off the claim; None for that of a pair.
        steps: the steps of each canary, counted from 0, or one list for all; ends may be filled with -1. "all": each is
            in every step, or may be drawn for it. A score over steps where a canary never was sees it in none.
        strategy: C: a `Strategy`; (n, n) numbers; (m,) numbers, the first column of a Toeplitz matrix; None for
            independent noise.
        sampling_probability: q, for a secret sample of the steps; None where steps are what they are.
        neighbours: of the claim, and so what a draw decides: "replace-one" where one that does not come up puts -g_c in
            the place of g_c; "zero-out" and "add-or-remove" where it leaves nothing. A claim for the latter says
            nothing of the former.
        independent: whether scores are independent of each other, as those of orthogonal canaries are if the noise is
            white across coordinates and nobody but canaries adds to the rows, or it was taken away: then the verdict
            may rest on it, and sees far more; see `Audited.method`.
    Returns: `Audited`: bounds, p-value, verdict.
    Raises: ArgumentError.
    Cost: n times count numbers of memory, never n times d.

    Example:
        >>> rows = [[5.0, 0.1], [4.0, -0.2]]
        >>> audited = from_rows(rows, canaries=[0, 1], included=[1, 0], claim=(1.0, 1e-5), noise_std=1.0, steps="all")
        >>> audited.scores.round(3).tolist(), audited.mus.round(3).tolist()
        ([6.364, -0.071], [1.414, 1.414])
    """
    drawn = _drawn(included)
    noise_std, clip_norm = checks.positive("noise_std", noise_std), checks.positive("clip_norm", clip_norm)
    checks.choice("neighbours", neighbours, NEIGHBOURS)
    curve, delta, epsilon = _claimed(claim, delta, neighbours)
    y = _products(released, canaries, len(drawn))
    n = len(y)
    patterns = Patterns(_steps(steps, n), len(drawn), n)
    pi = np.stack([patterns.at(t) if t <= patterns.last else np.zeros(patterns.distinct) for t in range(n)])
    c = _matrix(strategy, n)
    if sampling_probability is not None:
        q = checks.real("sampling_probability", sampling_probability, low=0.0, high=1.0)
        if neighbours == "replace-one":
            raise ArgumentError("neighbours must be 'zero-out' or 'add-or-remove' with a sampling_probability")
        sizes = np.square(c).sum(axis=0) * (clip_norm / noise_std) ** 2
        ratio = clip_norm / noise_std**2 * (c.T @ (c @ y)) - sizes[:, None] / 2
        with np.errstate(divide="ignore"):
            ratios = np.logaddexp(np.log1p(-checks.positive("sampling_probability", q)), np.log(q) + ratio)
        return Audited(
            scores=(ratios * pi[:, patterns.of]).sum(axis=0), included=drawn, noise_std=None, mus=None, curve=curve,
            delta=delta, epsilon=epsilon, independent=bool(independent),
        )  # fmt: skip
    white, seen = c @ y, c @ pi
    norms = np.linalg.norm(seen, axis=0)[patterns.of]
    return Audited(
        scores=(white * seen[:, patterns.of]).sum(axis=0) / norms, included=drawn, noise_std=noise_std,
        mus=NEIGHBOURS[neighbours] * clip_norm / noise_std * norms, curve=curve, delta=delta, epsilon=epsilon,
        independent=bool(independent),
    )  # fmt: skip


def from_scores(
    scores: ArrayLike,
    *,
    included: ArrayLike,
    claim: Claim,
    delta: float | None = None,
    noise_std: float | None = None,
    mus: ArrayLike | None = None,
    independent: bool = False,
) -> Audited:
    """Models only, or any attack: one score for each canary, the higher, the more it looks as if it was included.

    For models the loss at the start less the loss at the end, or minus the loss, of each canary; of many runs with one
    canary each, a score for each run. Nothing is asked of how scores were made, but that no draw had a hand in it.

    Args:
        scores: (count,) finite.
        included: (count,) bools or 0/1, the draws.
        claim: what the program says: (epsilon, delta), or a curve of `anyorder.accounting`.
        delta: where epsilon is read off the claim; None for that of a pair.
        noise_std: the standard deviation of a score under the claim, where it is a Gaussian.
        mus: (count,) the mu of each canary under the claim, where there is one.
        independent: whether scores are independent of each other: one canary in each of many runs, or canaries that
            do not touch each other.
    Returns: `Audited`: bounds, p-value, verdict.
    Raises: ArgumentError.

    Example:
        >>> from_scores([2.0, -1.0, 3.0], included=[1, 0, 1], claim=(1.0, 1e-5)).epsilon
        1.0
    """
    curve, delta, epsilon = _claimed(claim, delta, None)
    return Audited(
        scores=checks.array("scores", checks.plain(scores), ndim=1), included=_drawn(included), noise_std=noise_std,
        mus=None if mus is None else checks.array("mus", checks.plain(mus), ndim=1), curve=curve, delta=delta,
        epsilon=epsilon, independent=bool(independent),
    )  # fmt: skip


_OF_ROWS = {"released", "canaries", "included", "steps", "strategy"}
_NUMBERS = {"noise_std", "clip_norm", "sampling_probability", "neighbours", "independent"}
_OF_SCORES = {"scores", "included", "noise_std", "mus", "independent"}
_CLAIM = {"epsilon", "delta", "mu"}


def from_file(file: str | Path, *, released: str | Path | None = None) -> Audited:
    """`from_rows` or `from_scores` of a file that any program wrote with `numpy.savez`.

    Fields are named as the arguments of these functions. `scores` makes it the second, else it is the first. The claim
    is `epsilon` and `delta`, or `mu` and `delta`; `canaries` are vectors or coordinates. Other fields are refused: a
    name that is not known may be one that was misspelt. Nothing in the file is ever executed.

    Args:
        file: the .npz file.
        released: the rows as an .npy file of their own, which is read as a memory map: rows may be larger than memory.
    Returns: `Audited`.
    Raises: ArgumentError if the file cannot be read or its fields do not fit.
    """
    given = _fields(Path(file))
    if released is not None:
        if "released" in given:
            raise ArgumentError("released must be in the .npz file or a file of its own, not both")
        given["released"] = _memory_map(Path(released))
    known = (_OF_SCORES if "scores" in given else _OF_ROWS | _NUMBERS) | _CLAIM
    if unknown := sorted(given.keys() - known):
        raise ArgumentError(
            f"fields of {Path(file).name} must be of {', '.join(sorted(known))}; got {', '.join(unknown)}"
        )
    needed = {"scores", "included"} if "scores" in given else {"released", "canaries", "included", "noise_std", "steps"}
    if missing := sorted((needed | {"delta"}) - given.keys()):
        raise ArgumentError(f"{Path(file).name} must have the fields {', '.join(missing)}")
    if ("epsilon" in given) == ("mu" in given):
        raise ArgumentError(f"{Path(file).name} must have epsilon or mu, the claim, and not both")
    numbers = {name: given.pop(name).item() for name in [*given] if np.ndim(given[name]) == 0}
    if several := sorted(given.keys() & (_CLAIM | _NUMBERS)):
        raise ArgumentError(f"{', '.join(several)} must be one value each, got more")
    if numbers.get("steps") == "all":
        given["steps"] = numbers.pop("steps")
    if lone := sorted(numbers.keys() - (_CLAIM | _NUMBERS)):
        raise ArgumentError(f"{', '.join(lone)} must be arrays, got one value each")
    delta = numbers.pop("delta")
    relation = numbers.get("neighbours", "zero-out")
    claim: Claim
    claim = (numbers.pop("epsilon"), delta) if "mu" not in numbers else Gaussian(numbers.pop("mu"), neighbours=relation)
    both = {**given, **numbers, "claim": claim, "delta": delta}
    return from_scores(both.pop("scores"), **both) if "scores" in both else from_rows(both.pop("released"), **both)


_UNPACKED = 256 << 20  # bytes that an .npz file may unpack to, or _RATIO times its own size
_RATIO = 8


def _check_size(file: Path) -> None:
    """Refuse a small file that unpacks to a large one, before anything is unpacked."""
    with ZipFile(file) as parts:
        unpacked = sum(part.file_size for part in parts.infolist())  # no part gives more than this says
    most = max(_UNPACKED, _RATIO * file.stat().st_size)
    if unpacked > most:
        raise ArgumentError(
            f"{file.name} unpacks to {unpacked} bytes, more than the {most} that are read: save large arrays with "
            "numpy.savez, without compression, or the rows as an .npy file of their own, which is not read whole"
        )


def _fields(file: Path) -> dict[str, Any]:
    try:
        if is_zipfile(file):
            _check_size(file)
        opened = np.load(file, allow_pickle=False)
        fields = None if isinstance(opened, np.ndarray) else {name: opened[name] for name in opened.files}
    except (OSError, ValueError, BadZipFile, EOFError) as problem:
        raise ArgumentError(f"{file.name} must be an .npz file of plain arrays: {problem}") from problem
    if fields is None:
        raise ArgumentError(f"{file.name} must be an .npz file of named arrays, got one array")
    opened.close()
    return fields


def _memory_map(file: Path) -> Any:
    try:
        return np.load(file, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError) as problem:
        raise ArgumentError(f"released must be an .npy file of plain numbers: {problem}") from problem


def _claimed(claim: Claim, delta: float | None, neighbours: str | None) -> tuple[Curve | Stated, float, float]:
    """The claim, and a point on it; `neighbours` is what draws decide, None where nobody knows."""
    if isinstance(claim, (tuple, list)):
        if len(claim) != 2:
            raise ArgumentError(f"claim must be a curve or a pair (epsilon, delta), got {len(claim)} numbers")
        epsilon, own = checks.real("epsilon", claim[0], low=0.0), checks.probability("delta", claim[1])
        if delta is not None and delta != own:
            raise ArgumentError(f"delta must be that of the claim, {own}, got {delta!r}")
        return Stated(epsilon, own, neighbours or "zero-out"), own, epsilon
    if type(claim) not in (Gaussian, Sampled, Amplified, Composed):
        raise ArgumentError(f"claim must be a curve or a pair (epsilon, delta), got {type(claim).__name__}")
    if neighbours is not None and NEIGHBOURS[claim.neighbours] != NEIGHBOURS[neighbours]:
        raise ArgumentError(
            f"neighbours must be those of the claim, {claim.neighbours!r}, got {neighbours!r}: what draws decide would "
            "be more, or less, than what the claim is about"
        )
    if delta is None:
        raise ArgumentError("delta must be given where the claim is a curve")
    delta = checks.probability("delta", delta)
    return claim, delta, claim.epsilon(delta)


def _drawn(included: ArrayLike) -> NDArray[np.bool_]:
    drawn = np.asarray(checks.plain(included))
    if drawn.ndim != 1 or not drawn.size or drawn.dtype.kind not in "biuf" or not ((drawn == 0) | (drawn == 1)).all():
        raise ArgumentError(
            f"included must be a list of bools, or of 0 and 1, got {drawn.dtype} of shape {drawn.shape}"
        )
    return drawn.astype(np.bool_)


def _products(released: Iterable[Any], canaries: Canaries | ArrayLike, count: int) -> Floats:
    """(n, count) inner products of every row with every canary."""
    dot, size, found = _dot(canaries)
    if found != count:
        raise ArgumentError(f"canaries must be one for each of {count} draws in included, got {found}")
    products = []
    for row in released:
        flat = checks.array("a row of released", np.asarray(checks.plain(row)).reshape(-1), ndim=1)
        if size is not None and len(flat) != size:
            raise ArgumentError(f"rows of released must have the {size} coordinates of the canaries, got {len(flat)}")
        products.append(dot(flat))
    if not products:
        raise ArgumentError("released must have at least one row")
    return np.stack(products)


def _dot(canaries: Canaries | ArrayLike) -> tuple[Any, int | None, int]:
    """A row's inner products with all canaries, the length of rows (None: any that has the coordinates), the count."""
    if isinstance(canaries, Canaries):
        return canaries.dot, canaries.size, canaries.count
    given = np.asarray(checks.plain(canaries))
    if given.ndim == 1 and given.dtype.kind in "iu" and given.size:
        if given.min() < 0 or len(np.unique(given)) < len(given):
            raise ArgumentError("canaries as coordinates must be distinct integers from 0 on")

        def picked(row: Floats) -> Floats:
            if given.max() >= len(row):
                raise ArgumentError(f"canaries must be coordinates of rows of {len(row)}, got one beyond")
            return np.asarray(row[given])

        return picked, None, len(given)
    vectors = checks.array("canaries", given, ndim=2)
    norms = np.linalg.norm(vectors, axis=1)
    if (abs(norms - 1) > 1e-5).any():
        raise ArgumentError(
            f"canaries must have norm 1 (what an included one adds is clip_norm times it), got {norms.min():g} to "
            f"{norms.max():g}"
        )
    return lambda row: vectors @ row, vectors.shape[1], len(vectors)


def _steps(steps: Any, n: int) -> Any:
    """Lists of steps, without what fills their ends."""
    if isinstance(steps, str) and steps == "all":
        return range(n)
    if steps is None or isinstance(steps, str):
        raise ArgumentError(f"steps must be the steps of each canary, one list for all, or 'all', got {steps!r}")
    given = np.asarray(steps) if not isinstance(steps, list) else steps
    if isinstance(given, np.ndarray) and given.ndim == 2 and given.dtype.kind == "i":
        return [row[row >= 0] for row in given]
    return given


def _matrix(strategy: Strategy | ArrayLike | None, n: int) -> Floats:
    """C, dense."""
    if strategy is None:
        return np.eye(n)
    if isinstance(strategy, Strategy):
        if strategy.n != n:
            raise ArgumentError(f"released must have n={strategy.n} rows, one for each step of the strategy, got {n}")
        stream = forward(as_released(strategy))
        return np.stack([row for unit in np.eye(n) for row in stream.push(unit)])
    given = np.asarray(checks.plain(strategy))
    if given.ndim == 1:
        column = checks.array("strategy", given, ndim=1)
        if len(column) > n:
            raise ArgumentError(f"strategy must have at most n={n} coefficients, got {len(column)}")
        return _invertible(np.asarray(scipy.linalg.toeplitz(np.pad(column, (0, n - len(column))), np.zeros(n))))
    matrix = checks.array("strategy", given, ndim=2)
    if matrix.shape[1] != n:
        raise ArgumentError(f"strategy must have a column for each of {n} rows of released, got shape {matrix.shape}")
    return _invertible(matrix)


def _invertible(c: Floats) -> Floats:
    """A C whose rows G + C^-1 z can have been released one after the other."""
    n = c.shape[1]
    if c.shape[0] == n and np.triu(c, 1).any():
        raise ArgumentError(
            "strategy must be lower triangular, the noise of a step being of this step and those before, got numbers "
            "above the diagonal: is it transposed?"
        )
    if (c.shape[0] == n and not np.diag(c).all()) or (c.shape[0] != n and np.linalg.matrix_rank(c) < n):
        raise ArgumentError(
            f"strategy must have an inverse, for rows of released are G + C^-1 z, got zeros on the diagonal or rank "
            f"below {n}; leave it out for independent noise"
        )
    return c
