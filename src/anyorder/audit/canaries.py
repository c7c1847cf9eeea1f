"""Canaries: public directions that an audit adds to sums by secret draws, and looks for in what was released."""

from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from hashlib import blake2b
from itertools import chain, combinations, islice, pairwise
from typing import Any, Protocol, assert_never

import numpy as np
import scipy
from numpy.typing import ArrayLike, NDArray

from anyorder import checks
from anyorder.checks import SetOnce, final, frozen
from anyorder.errors import ArgumentError, PlanError, TrainingError
from anyorder.noise import NoiseSource
from anyorder.patterns import Listed, Participation, Pattern, PerEpoch, Separated
from anyorder.strategy import Strategy
from anyorder.strategy.base import DENSE_STEPS, Combination
from anyorder.strategy.dense import Dense
from anyorder.strategy.registry import Structure, kind_of
from anyorder.strategy.rescaled import Rescaled
from anyorder.strategy.toeplitz import Toeplitz
from anyorder.strategy.tree import Tree

# ----------------------------------------------------------------------------------------------------
# C forward as a stream: what was released, row by row, as rows of C G plus white noise.


Floats = NDArray[np.float64]


class Forward(Protocol):
    """C y for y that come row by row, many columns at once."""

    def push(self, y: Floats) -> list[Floats]:
        """Take row t of y, (m,); the rows of C y that no later row of y enters, each (m,), each once."""


def forward(strategy: Strategy) -> Forward:
    """C forward, by the strategy's own statement of K = C^-1.

    A recurrence (noise = h . x + g z, x <- F x + G z) is solved for z: z = (y - h . x) / g. Combinations of rows give z
    by forward substitution. The rows of a tree are sums over the steps below a node, and end with it.

    Cost: a column of y needs the memory of the strategy's own state (a few numbers; of dense forms n), and a step the
    time of one coordinate of its noise.
    """
    structure = kind_of(strategy).structure
    match structure:
        case Structure.IDENTITY | Structure.TOEPLITZ | Structure.DENSE:
            assert isinstance(strategy, Combination)
            return _Substitution(strategy)
        case (
            Structure.TOEPLITZ_BANDED
            | Structure.BUFFERED
            | Structure.BANDED
            | Structure.LOW_RANK
            | Structure.RESTARTED
        ):  # fmt: skip
            return _Recurrence(strategy)
        case Structure.RESCALED:
            assert type(strategy) is Rescaled
            return _Scaled(strategy)
        case Structure.TREE:
            return _Nodes(strategy)
        case _:
            assert_never(structure)


def as_released(strategy: Strategy) -> Strategy:
    """The square mechanism whose noise has the law of what is released; the strategy itself where that is so already.

    The estimators "vanilla" and "online" of a tree throw away what they know of its nodes: K is not the pseudoinverse
    of C. With K K^T = L L^T what they release is, in law, the mechanism of C = L^-1, and

        || L^-1 pi ||^2 = pi^T (K K^T)^-1 pi <= || C pi ||^2

    is all that anybody can see of a unit in the steps pi. The best score of such a release whitens with L^-1.

    Raises: PlanError for such a tree of more than 4096 steps.
    Cost: O(n^3) where a matrix is made.
    """
    tree = strategy.strategy if type(strategy) is Rescaled else strategy
    if type(tree) is not Tree or tree.estimator == "full":
        return strategy
    if strategy.n > DENSE_STEPS:
        raise PlanError(
            f"the law of {tree.estimator!r} estimates of a tree is a dense matrix over pairs of steps: n must be at "
            f"most {DENSE_STEPS}, got {strategy.n}; score against the tree itself, or plan with "
            "ao.mechanism('tree', estimator='full')"
        )
    return Dense(np.tril(whitener(strategy)))


def whitener(strategy: Strategy) -> Floats:
    """A with A K Z white, (n, n) lower triangular: the inverse L^-1 of the Cholesky factor, K K^T = L L^T.

    For square C with a positive diagonal that is C itself; for a tree, whatever its estimator, it takes what the noise
    of its steps has in common out of them.

    Cost: O(n^2 num_rows).
    Raises: ArgumentError beyond 4096 steps.
    """
    n = strategy.n
    if n > DENSE_STEPS:
        raise ArgumentError(f"the law of noise is tested for at most {DENSE_STEPS} steps, got {n}: audit a short run")
    K = strategy.noising_matrix()
    return np.asarray(scipy.linalg.solve_triangular(np.linalg.cholesky(K @ K.T), np.eye(n), lower=True))


class _Substitution:
    """z_t = (y_t - sum_{s < t} K[t, s] z_s) / K[t, t], with as many rows z kept as a step combines."""

    def __init__(self, strategy: Combination) -> None:
        self._strategy, self._t = strategy, 0
        self._length = len(strategy.terms(strategy.n - 1).rows)
        self._kept = np.zeros((0, 0))

    def push(self, y: Floats) -> list[Floats]:
        if not self._t:
            self._kept = np.zeros((self._length, len(y)))
        terms = self._strategy.terms(self._t)
        weights = np.zeros(self._length)
        weights[terms.rows % self._length] = terms.coefficients
        own = self._t % self._length
        diagonal, weights[own] = weights[own], 0.0
        z = (y - weights @ self._kept) / diagonal
        self._kept[own] = z
        self._t += 1
        return [z]


class _Recurrence:
    """z = (y - h . x) / g, then x <- F x + G z."""

    def __init__(self, strategy: Strategy) -> None:
        self._strategy, self._t = strategy, 0
        self._state = np.zeros((0, 0))

    def push(self, y: Floats) -> list[Floats]:
        F, G, h, g = self._strategy.recurrence(self._t)
        if not self._t:
            self._state = np.zeros((len(G), len(y)))
        z = (y - h @ self._state) / g
        self._state = F @ self._state + np.outer(G, z)
        self._t += 1
        return [z]


class _Scaled:
    """C diag(scales)^-1 y."""

    def __init__(self, strategy: Rescaled) -> None:
        self._inner, self._scales, self._t = forward(strategy.strategy), strategy.scales, 0

    def push(self, y: Floats) -> list[Floats]:
        self._t += 1
        return self._inner.push(y / self._scales[self._t - 1])


class _Nodes:
    """Rows of C that cover runs of steps: a row is open from its first step to its last, about log2 n at a time."""

    def __init__(self, strategy: Strategy) -> None:
        self._strategy, self._t = strategy, 0
        self._open: dict[int, Floats] = {}
        self._now = self._column(0)

    def push(self, y: Floats) -> list[Floats]:
        for row, coefficient in self._now.items():
            self._open[row] = self._open.get(row, 0.0) + coefficient * y
        self._t += 1
        self._now = self._column(self._t)
        return [self._open.pop(row) for row in [*self._open] if row not in self._now]

    def _column(self, t: int) -> dict[int, float]:
        """Row -> entry, of column t of C; none after the last."""
        if t == self._strategy.n:
            return {}
        column = self._strategy.columns(np.array([t]))[:, 0]
        rows = np.flatnonzero(column)
        return dict(zip(rows.tolist(), column[rows].tolist(), strict=True))


Integers = NDArray[np.int64]

_DIRECTION_BLOCK = 1 << 20  # elements of directions that are made, or kept, at a time


@final
class Canaries(SetOnce):
    """`count` unit vectors of `size` coordinates, which live on `dimension` of them: functions of the seed alone.

    Orthogonal ones own dimension // count coordinates each, in turns: canary c has the places c, c + count, ..
    among the coordinates; what is left over belongs to none. Inner products of a row with all of them cost
    O(dimension). Random ones are directions in all `dimension` coordinates, drawn independently; they are made again,
    block by block, whenever they are needed: O(count dimension) for a row. No (count, size) matrix is kept.

    The vectors are public. What is secret is which of them were added: see `draw`.

    Args:
        size: coordinates of a released row.
        count: number of canaries.
        dimension: coordinates that they live on, at most `size`.
        seed: what the vectors, and where nothing else is said the coordinates, follow from: an integer, or bytes.
        orthogonal: True for disjoint coordinates, which needs count <= dimension; False for random directions; None
            for orthogonal ones where that is possible.
        coordinates: (dimension,) distinct coordinates, those of one layer perhaps; None to draw them.
    Raises: ArgumentError.

    Example:
        >>> canaries = Canaries(size=6, count=3, dimension=6, seed=0)
        >>> np.round(canaries.vectors() @ canaries.vectors().T, 12).tolist()
        [[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 1.0]]
    """

    def __init__(
        self,
        size: int,
        count: int,
        dimension: int,
        seed: int | bytes,
        *,
        orthogonal: bool | None = None,
        coordinates: ArrayLike | None = None,
    ) -> None:
        self.size = checks.integer("size", size, low=1, high=1 << 62)
        self.count = checks.integer("count", count, low=1)
        self.dimension = checks.integer("dimension", dimension, low=1, high=self.size)
        self.seed: int | bytes = seed if isinstance(seed, bytes) else checks.integer("seed", seed, low=0)
        if orthogonal is not None and not isinstance(orthogonal, bool):
            raise ArgumentError(f"orthogonal must be True, False or None, got {orthogonal!r}")
        if orthogonal and self.count > self.dimension:
            raise ArgumentError(
                f"orthogonal canaries have coordinates of their own: count must be at most dimension={self.dimension}, "
                f"got {self.count}; take fewer, or orthogonal=False"
            )
        self.orthogonal = self.count <= self.dimension if orthogonal is None else orthogonal
        label = b"bytes " + seed if isinstance(seed, bytes) else b"integer %d" % int(seed)
        self._source = NoiseSource(blake2b(label, digest_size=32, person=b"anyorder canary").digest())
        self._given = None if coordinates is None else frozen(_distinct(coordinates, self.dimension, self.size))

    @cached_property
    def coordinates(self) -> Integers:
        """(dimension,) the coordinates that the canaries live on; drawn ones ascend."""
        if self._given is not None:
            return self._given
        return frozen(drawn(self._source.derive(b"coordinates"), self.size, self.dimension))

    @property
    def width(self) -> int:
        """Coordinates of one canary."""
        return self.dimension // self.count if self.orthogonal else self.dimension

    def draw(self, key: bytes | None = None) -> NDArray[np.bool_]:
        """(count,) independent fair draws, which decide who is included.

        They do not follow from the seed: anyone who scores what was released knows the vectors, and must not know them.

        Args:
            key: 32 bytes for reproducible tests; in use None: the draws then come from the operating system.
        """
        source = NoiseSource.random() if key is None else NoiseSource(key).derive(b"coins of canaries")
        return np.asarray(source.words(0, 0, self.count) & 1 == 1)

    def vector(self, c: int) -> Floats:
        """(size,) canary c."""
        c = checks.integer("c", c, low=0, high=self.count - 1)
        result = np.zeros(self.size)
        result[self._places(c, c + 1)[:, 0]] = self._made(c, c + 1)[:, 0]
        return result

    def vectors(self) -> Floats:
        """(count, size) all of them: for small ones."""
        return np.stack([self.vector(c) for c in range(self.count)])

    def sum(self, which: ArrayLike) -> Floats:
        """(size,) the sum of the canaries that are named.

        Args:
            which: a bool for each canary, or the numbers of some; one that is named twice is in it twice.
        """
        chosen = np.asarray(which)
        if chosen.dtype == np.bool_:
            if chosen.shape != (self.count,):
                raise ArgumentError(f"which must have one bool for each of {self.count} canaries, got {chosen.shape}")
            return self.combined(chosen)
        if chosen.ndim != 1 or (chosen.size and chosen.dtype.kind not in "iu"):
            raise ArgumentError(f"which must be a list of bools or of integers, got {chosen.dtype}, {chosen.shape}")
        if chosen.size and not 0 <= chosen.min() <= chosen.max() < self.count:
            raise ArgumentError(f"which must name canaries 0 to {self.count - 1}, and some are not")
        return self.combined(np.bincount(chosen.astype(np.int64), minlength=self.count))

    def combined(self, weights: ArrayLike, scale: float = 1.0, *, whole: bool = False) -> Floats:
        """(size,) sum over c of weights[c] scale g_c.

        Args:
            weights: (count,) numbers.
            scale: of every canary.
            whole: round every coordinate of scale g_c toward zero to an integer before it is added, which makes no
                vector longer: for sums on a grid.
        """
        w = checks.array("weights", weights, ndim=1)
        if len(w) != self.count:
            raise ArgumentError(f"weights must be {self.count} numbers, one for each canary, got {len(w)}")
        result = np.zeros(self.size)
        for i, j in self._blocks():
            if not w[i:j].any():
                continue
            vectors = self._made(i, j) if scale == 1.0 else scale * self._made(i, j)
            vectors = np.trunc(vectors) if whole else vectors
            if self.orthogonal:
                result[self._places(i, j)] = vectors * w[i:j]
            else:
                result[self.coordinates] += vectors @ w[i:j]
        return result

    def dot(self, row: Any) -> Floats:
        """(count,) inner products of one released row with every canary, in float64.

        Args:
            row: `size` numbers in any shape, NumPy or torch.
        Cost: O(dimension) for orthogonal canaries, O(count dimension) for random ones.
        Raises: ArgumentError if it does not fit or is not finite.
        """
        values = _flat(row)
        if values.shape != (self.size,):
            raise ArgumentError(f"a released row must have size={self.size} numbers, got shape {np.shape(row)}")
        everything = self.dimension == self.size and self._given is None
        own = (values if everything else values[self.coordinates]).astype(np.float64, copy=False)
        if not np.isfinite(own.sum()):  # which NaN and infinities survive
            raise ArgumentError("a released row must be finite, and some of its coordinates are not")
        if self.orthogonal:
            table = own[: self.width * self.count].reshape(self.width, self.count)
            parts = [np.einsum("wc,wc->c", table[:, i:j], self._made(i, j)) for i, j in self._blocks()]
        else:
            parts = [own @ self._made(i, j) for i, j in self._blocks()]
        return np.concatenate(parts)

    def _blocks(self) -> Iterator[tuple[int, int]]:
        """Ranges of canaries that are made together: always the same, so that sums are rounded the same."""
        step = max(1, _DIRECTION_BLOCK // self.width)
        return ((i, min(i + step, self.count)) for i in range(0, self.count, step))

    def _places(self, i: int, j: int) -> Integers:
        """(width, j - i) coordinates of canaries i, .., j - 1."""
        if not self.orthogonal:
            return np.broadcast_to(self.coordinates[:, None], (self.dimension, j - i))
        return np.asarray(self.coordinates[np.arange(self.width)[:, None] * self.count + np.arange(i, j)])

    def _made(self, i: int, j: int) -> Floats:
        """(width, j - i) what canaries i, .., j - 1 have there."""
        if self.count * self.width <= _DIRECTION_BLOCK:
            return self._all[:, i:j]
        return self._make(i, j)

    @cached_property
    def _all(self) -> Floats:
        return self._make(0, self.count)

    def _make(self, i: int, j: int) -> Floats:
        vectors = self._source.normal(0, i * self.width, j * self.width).astype(np.float64).reshape(j - i, self.width)
        norms = np.sqrt(np.square(vectors).sum(axis=1))
        vectors[norms == 0, 0], norms[norms == 0] = 1.0, 1.0  # of width 1, once in 2^30
        vectors /= norms[:, None]
        return np.ascontiguousarray(vectors.T) if self.orthogonal else vectors.T  # a long copy for one product

    def __reduce__(self) -> tuple[Any, ...]:
        return _again, (self.size, self.count, self.dimension, self.seed, self.orthogonal, self._given)

    def __eq__(self, other: object) -> bool:
        return (
            type(other) is Canaries
            and (self.size, self.count, self.dimension, self.orthogonal) == (
                other.size, other.count, other.dimension, other.orthogonal
            )
            and self._source.key == other._source.key
            and np.array_equal(self.coordinates, other.coordinates)
        )  # fmt: skip

    def __hash__(self) -> int:
        return hash((self.size, self.count, self.dimension, self.orthogonal, self._source.key))

    def __repr__(self) -> str:
        kind = "orthogonal" if self.orthogonal else "random"
        return f"Canaries(size={self.size}, count={self.count}, dimension={self.dimension}, seed={self.seed!r}, {kind})"


def _again(
    size: int, count: int, dimension: int, seed: int | bytes, orthogonal: bool, coordinates: Integers | None
) -> Canaries:
    return Canaries(size, count, dimension, seed, orthogonal=orthogonal, coordinates=coordinates)


def _flat(row: Any) -> NDArray[Any]:
    """The numbers of a row, one behind the other, on the host."""
    if hasattr(row, "detach"):  # a torch tensor, of whatever device; this room does not import torch
        row = row.detach().cpu()
        row = (row if row.element_size() > 2 else row.float()).numpy()
    return np.asarray(row).reshape(-1)


def _distinct(coordinates: ArrayLike, dimension: int, size: int) -> Integers:
    given = np.asarray(coordinates)
    if given.ndim != 1 or given.dtype.kind not in "iu" or len(given) != dimension:
        raise ArgumentError(
            f"coordinates must be dimension={dimension} integers, got {given.dtype} of shape {given.shape}"
        )
    if not 0 <= given.min() <= given.max() < size or len(np.unique(given)) < dimension:
        raise ArgumentError(f"coordinates must be distinct and lie in 0 .. {size - 1}, and some do not")
    return given.astype(np.int64)


def drawn(source: NoiseSource, size: int, dimension: int) -> Integers:
    """(dimension,) coordinates below size, ascending, every set of them as likely as any other."""
    if dimension == size:
        return np.arange(size)
    few = min(dimension, size - dimension)  # draws of the smaller part repeat themselves seldom
    found, start = np.empty(0, np.int64), 0
    while len(found) < few:
        words = source.words(0, start, start + 4 * few).view(np.uint64)
        start += 4 * few
        found = np.concatenate([found, (words % np.uint64(size)).astype(np.int64)])
        found = found[np.sort(np.unique(found, return_index=True)[1])]  # each where it came first
    drawn = np.sort(found[:few])
    return drawn if few == dimension else np.delete(np.arange(size), drawn)


# ----------------------------------------------------------------------------------------------------
# Scores of canaries: how much of each is in what was released, whitened by the mechanism that released it.


def scores(
    released: Iterable[Any],
    strategy: Strategy | None,
    participations: Sequence[Any] | NDArray[Any],
    canaries: Canaries,
    *,
    whiten: bool = True,
) -> Floats:
    """Return how strongly each canary shows in the rows that were released, in the units of the rows.

    Of canary g_c with the 0/1 vector pi_c of its steps, and with Ghat the released rows,

        s_c = (C pi_c)^T (C Ghat) g_c / || C pi_c ||

    For rows Ghat = G + s K Z (C K = 1), and canaries that are added with norm `clip`,

        s_c ~ N(included_c clip || C pi_c ||, s^2)   plus what everybody else adds in the direction of g_c:

    the score sees the whole mu_c = clip || C pi_c || / s that the mechanism gives to a unit in these steps; no other
    function of the rows sees more. Orthogonal canaries have independent scores. Of rows divided by a constant, all is
    divided by it.

    The estimators "vanilla" and "online" of a tree release less than C G + s Z (C K is not symmetric): for them the
    noise in the score is above s, and `anyorder.audit.as_released(strategy)` in the place of the strategy gives the
    best score, with noise s again.

    Args:
        released: the n rows, (n, size) or any iterable of n rows of `size` numbers in any shape, NumPy or torch; each
            is looked at once, in order.
        strategy: C; None for independent noise.
        participations: the steps where each canary is, or would be had its draw put it in: one list for each canary, or
            one list for all; or bools over steps, (count, n) or (n,).
        canaries: the directions.
        whiten: False for the plain sum over its steps, sum_t pi_c[t] <row_t, g_c> / sqrt(|pi_c|), which knows nothing
            of C: it sees less, and never more.
    Returns: (count,).
    Raises: ArgumentError if something does not fit together, a row is not finite, or rows are missing.
    Cost: the inner products (`Canaries.dot`) and the memory of the strategy's state for each canary, O(count) numbers
        times a few; never all rows.

    Example:
        >>> canaries = Canaries(size=4, count=2, dimension=4, seed=0)
        >>> rows = np.array([canaries.vector(1), canaries.vector(1)])
        >>> np.round(scores(rows, None, [0, 1], canaries), 6).tolist()
        [0.0, 1.414214]
    """
    scorer = Scorer(strategy, participations, canaries, whiten=whiten)
    for row in released:
        scorer.add(row)
    scorer.check_complete()
    return scorer.scores()


def sampled_scores(
    released: Iterable[Any],
    canaries: Canaries,
    *,
    sampling_probability: float,
    clip_norm: float,
    noise_std: float,
) -> Floats:
    """The log likelihood ratio of each canary under Poisson sampling with independent noise.

    An included canary is in every step by a draw of its own, with probability q; nobody knows when. With
    y_t = <row_t, g_c> / clip_norm and sigma = noise_std / clip_norm

        s_c = sum_t log( 1 - q + q exp( y_t / sigma^2 - 1 / (2 sigma^2) ) )

    which is the best test there is [Neyman and Pearson]; it has no mu.

    Args:
        released: as for `scores`; not divided, or with clip_norm and noise_std divided as well.
        canaries: the directions.
        sampling_probability: q.
        clip_norm: the norm with which canaries were added.
        noise_std: of every coordinate.
    Returns: (count,).
    """
    scorer = SampledScorer(canaries, sampling_probability, clip_norm, noise_std)
    for row in released:
        scorer.add(row)
    return scorer.scores()


def visible(strategy: Strategy, participations: Sequence[Any] | NDArray[Any], count: int = 1) -> Floats:
    """(count,) || C pi_c || for the steps of each canary: its mean score for clip norm 1; mu is this over the noise.

    Args:
        strategy: C.
        participations: as for `scores`.
        count: number of canaries.
    """
    patterns = Patterns(participations, count, strategy.n)
    stream, total = forward(strategy), np.zeros(patterns.distinct)
    for t in range(strategy.n):
        for row in stream.push(patterns.at(t)):
            total += np.square(row)
    return np.asarray(np.sqrt(total)[patterns.of])


class Patterns:
    """The steps of every canary, equal ones once.

    Attributes:
        distinct: number of different patterns.
        of: (count,) the pattern of each canary.
        last: the last step of any.
    """

    def __init__(self, participations: Sequence[Any] | NDArray[Any], count: int, n: int | None) -> None:
        numbers: dict[tuple[int, ...], int] = {}
        given = [_steps(steps, n) for steps in _each(participations, count)]
        for steps in given:
            numbers.setdefault(steps, len(numbers))
        self.steps = tuple(numbers)
        self.of: Integers = np.array([numbers[steps] for steps in given])
        self.distinct = len(numbers)
        self.sizes: Floats = np.array([len(steps) for steps in numbers], np.float64)
        self.last = max(steps[-1] for steps in numbers)
        order = np.concatenate([np.array(steps) for steps in numbers])
        by_step = np.argsort(order, kind="stable")
        who = np.repeat(np.arange(self.distinct), self.sizes.astype(np.int64))[by_step]
        edges = np.searchsorted(order[by_step], np.arange(self.last + 2))
        self._there = [who[i:j] for i, j in pairwise(edges.tolist())]

    def at(self, t: int) -> Floats:
        """(distinct,) 1 for the patterns that have step t."""
        result = np.zeros(self.distinct)
        if t <= self.last:
            result[self._there[t]] = 1.0
        return result


class Scorer:
    """`scores` as rows come: `add` each row in turn, then ask; before the last row, of what was released so far.

    Args: as for `scores`.
    """

    def __init__(
        self,
        strategy: Strategy | None,
        participations: Sequence[Any] | NDArray[Any],
        canaries: Canaries,
        *,
        whiten: bool = True,
    ) -> None:
        if not isinstance(canaries, Canaries):
            raise ArgumentError(f"canaries must be anyorder.audit.Canaries, got {type(canaries).__name__}")
        self._canaries = canaries
        self._n = None if strategy is None else strategy.n
        self.patterns = Patterns(participations, canaries.count, self._n)
        self._stream = None if strategy is None or not whiten else forward(strategy)
        self._sums = np.zeros(canaries.count)
        self._squares = np.zeros(self.patterns.distinct)
        self._t = 0

    def add(self, row: Any) -> None:
        """Take the next released row."""
        if self._t == self._n:
            raise ArgumentError(f"released must have n={self._n} rows, one for each step of the strategy, and has more")
        y, pi = self._canaries.dot(row), self.patterns.at(self._t)
        count = len(y)
        for z in [np.concatenate([y, pi])] if self._stream is None else self._stream.push(np.concatenate([y, pi])):
            self._sums += z[:count] * z[count:][self.patterns.of]
            self._squares += np.square(z[count:])
        self._t += 1

    def check_complete(self) -> None:
        """Raise ArgumentError unless the rows of all steps came."""
        if self._t <= self.patterns.last or (self._n is not None and self._t < self._n):
            needed = self.patterns.last + 1 if self._n is None else self._n
            raise ArgumentError(f"released must have a row for each of {needed} steps, got {self._t}")

    @property
    def norms(self) -> Floats:
        """(count,) || C pi_c || as far as rows came."""
        return np.asarray(np.sqrt(self._squares)[self.patterns.of])

    def scores(self) -> Floats:
        """(count,) scores. Raises: TrainingError if nothing that was released shows one of them yet."""
        norms = self.norms
        if (norms == 0).any():
            raise TrainingError(
                f"nothing shows of {np.count_nonzero(norms == 0)} of {len(norms)} canaries in the steps so far: ask "
                "later"
            )
        return np.asarray(self._sums / norms)


class SampledScorer:
    """`sampled_scores` as rows come."""

    def __init__(self, canaries: Canaries, sampling_probability: float, clip_norm: float, noise_std: float) -> None:
        self._canaries = canaries
        q = checks.real("sampling_probability", sampling_probability, low=0.0, high=1.0)
        self._q = checks.positive("sampling_probability", q)
        self._clip_norm = checks.positive("clip_norm", clip_norm)
        self._sigma = checks.positive("noise_std", noise_std) / self._clip_norm
        self._sums = np.zeros(canaries.count)

    def add(self, row: Any) -> None:
        """Take the next released row."""
        ratio = (self._canaries.dot(row) / self._clip_norm - 0.5) / self._sigma**2
        rest = np.log1p(-self._q) if self._q < 1 else -np.inf
        self._sums += np.logaddexp(rest, np.log(self._q) + ratio)

    def scores(self) -> Floats:
        """(count,) scores so far."""
        return self._sums.copy()


def _each(participations: Sequence[Any] | NDArray[Any], count: int) -> list[Any]:
    """One set of steps for each canary."""
    try:
        first = participations[0]
    except (IndexError, KeyError, TypeError) as problem:
        raise ArgumentError(
            "participations must name at least one step, or one list of steps for each canary"
        ) from problem
    if np.ndim(first) == 0:
        return [participations] * count
    if len(participations) != count:
        raise ArgumentError(
            f"participations must be one list of steps for each of {count} canaries, got {len(participations)}"
        )
    return [*participations]


def _steps(given: ArrayLike, n: int | None) -> tuple[int, ...]:
    """The steps of one canary, ascending."""
    steps = np.asarray(given)
    if steps.dtype == np.bool_ and steps.ndim == 1:
        if n is not None and len(steps) != n:
            raise ArgumentError(f"participations in bools must have one for each of n={n} steps, got {len(steps)}")
        steps = np.flatnonzero(steps)
    if steps.ndim != 1 or not steps.size or steps.dtype.kind not in "iu":
        raise ArgumentError(
            "participations must be lists of one or more steps, integers from 0 on, or bools over steps; a canary that "
            "is nowhere has no score"
        )
    result = tuple(sorted(steps.tolist()))
    if result[0] < 0 or (n is not None and result[-1] >= n):
        raise ArgumentError(f"steps in participations must lie in 0 .. {'n' if n is None else n} - 1, and some do not")
    if len(set(result)) < len(result):
        raise ArgumentError("steps of a canary must be distinct; for 0/1 vectors over all steps give bools")
    return result


# ----------------------------------------------------------------------------------------------------
# Steps for canaries: the worst that a plan's rule allows, or random ones; never steps that it does not allow.


Steps = tuple[int, ...]

_ALL = 1 << 14  # sets of steps that are gone through one by one
_PATTERN_BLOCK = 512  # patterns whose norms are made together
_GRAM = 2048  # steps up to which C^T C is made


def worst_steps(strategy: Strategy, participation: Participation) -> Steps:
    """The allowed steps of which a release shows most: the largest || C pi || that was found.

    The true maximum over all allowed sets of steps where C^T C has no negative entry and the patterns are listed, or
    where they are few, or single steps, or `Separated` under a Toeplitz C whose first column neither rises nor goes
    below zero: then 0, b, 2b, .. Elsewhere the best of regular patterns, improved step by step. Under secret sampling:
    of the steps that the draws can give, as if they were known.

    Args:
        strategy: C.
        participation: the plan's.
    Returns: ascending steps.
    Cost: for listed patterns a stream over each different one; else O(n^2) memory up to n = 2048.
    """
    kind_of(strategy)
    pattern = participation.pattern
    if pattern.max_participations == 1 and type(pattern) is not Listed:
        return (int(np.argmax(strategy.column_norms_squared())),)
    if type(pattern) is Separated and _falls(strategy):
        return tuple(pattern.likely_worst().tolist())
    if strategy.n > _GRAM:
        return _best(strategy, _candidates(pattern))
    C = strategy.matrix()
    return _improved(C.T @ C, pattern)


def random_steps(participation: Participation, count: int, source: NoiseSource) -> list[Steps]:
    """Allowed steps for each of `count` canaries, as many as a unit may take, independent of each other.

    Listed patterns are drawn evenly; in shuffled epochs each step of an epoch is as likely as any other; separated
    steps are drawn evenly among all sets of the largest size. Under secret sampling they are of what the draws can
    give, and not drawn by their law: `plant` does that.

    Args:
        participation: the plan's.
        count: number of canaries.
        source: where the draws come from; `NoiseSource.random()`, or one derived from a key.
    """
    count = checks.integer("count", count, low=1)
    if not isinstance(source, NoiseSource):
        raise ArgumentError(f"source must be an anyorder NoiseSource, got {type(source).__name__}")
    pattern = participation.pattern
    match pattern:
        case Listed():
            chosen = _numbers(source, 0, count, pattern.num_units).tolist()
            listed = [*pattern.enumerate()]
            return [listed[i] for i in chosen]
        case Separated(n=n, b=b):
            k = pattern.max_participations
            free = n - (k - 1) * (b - 1)  # a set of k of these, spread out, is a set of separated steps
            spread = (b - 1) * np.arange(k)
            order = (np.argsort(source.words(c, 0, free), kind="stable")[:k] for c in range(count))
            return [tuple((np.sort(picked) + spread).tolist()) for picked in order]
        case PerEpoch(k=k, steps_per_epoch=s):
            places = np.stack([_numbers(source, e, count, s) + e * s for e in range(k)], axis=1)
            return [tuple(steps) for steps in places.tolist()]
        case _:
            assert_never(pattern)


def _numbers(source: NoiseSource, row: int, count: int, below: int) -> NDArray[np.int64]:
    """(count,) integers from 0 to below - 1."""
    words = source.words(row, 0, 2 * count).view(np.uint64)
    return (words % np.uint64(below)).astype(np.int64)


def _falls(strategy: Strategy) -> bool:
    """Whether C is Toeplitz with c_0 >= c_1 >= .. >= 0: steps that are early and close show most."""
    if not isinstance(strategy, Toeplitz):
        return False
    c = strategy.toeplitz_coefficients()
    return bool((c >= 0).all() and (np.diff(c) <= 0).all())


def _best(strategy: Strategy, patterns: Iterator[Steps]) -> Steps:
    """The pattern of largest || C pi ||, by streams over blocks of patterns."""
    best: Steps = ()
    most = -1.0
    different = iter(dict.fromkeys(patterns))
    while block := [*islice(different, _PATTERN_BLOCK)]:
        norms = visible(strategy, block, len(block))
        if norms.max() > most:
            best, most = block[int(norms.argmax())], float(norms.max())
    return best


def _candidates(pattern: Pattern) -> Iterator[Steps]:
    """All listed patterns; of the others the guess of the worst, and regular ones."""
    match pattern:
        case Listed():
            return pattern.enumerate()
        case Separated(n=n) | PerEpoch(n=n):
            regular = (tuple(part.tolist()) for group in pattern.disjoint() for part in group)
            last = (tuple(range(n - 1 - i, -1, -pattern.spread))[: pattern.max_participations] for i in range(8))
            ends = (tuple(sorted(steps)) for steps in last if steps and pattern.allows(steps))
            return chain([tuple(pattern.likely_worst().tolist())], ends, islice(regular, _PATTERN_BLOCK))
        case _:
            assert_never(pattern)


def _improved(X: Floats, pattern: Pattern) -> Steps:
    """The best of all sets of steps where they are few; else of the candidates, each improved one step at a time."""
    listed = type(pattern) is Listed
    if pattern.count(_ALL) <= _ALL or listed:
        maximal = dict.fromkeys(pattern.enumerate())
        if (X < 0).any() and sum(2 ** min(len(steps), 15) for steps in maximal) <= _ALL:
            subsets = (s for p in maximal for size in range(1, len(p) + 1) for s in combinations(p, size))
            return max(dict.fromkeys(subsets), key=lambda steps: _square(X, steps))
        best = max(maximal, key=lambda steps: _square(X, steps))
        return _climbed(X, pattern, best) if (X < 0).any() else best
    starts = sorted(dict.fromkeys(_candidates(pattern)), key=lambda steps: -_square(X, steps))[:8]
    return max((_climbed(X, pattern, steps) for steps in starts), key=lambda steps: _square(X, steps))


def _square(X: Floats, steps: Steps) -> float:
    return float(X[np.ix_(steps, steps)].sum())


def _climbed(X: Floats, pattern: Pattern, steps: Steps) -> Steps:
    """Moves of one step, or without it, while || C pi ||^2 grows."""
    best, most = steps, _square(X, steps)
    moved = True
    while moved:
        moved = False
        for t in best:
            rest = tuple(s for s in best if s != t)
            gain = np.diag(X) + 2 * X[list(rest)].sum(axis=0)
            gain[~_open(pattern, rest, len(X))] = -np.inf
            s = int(gain.argmax())
            if rest and gain[s] < 0 and _square(X, rest) > most * (1 + 1e-12):
                best, most, moved = rest, _square(X, rest), True
            elif np.isfinite(gain[s]) and _square(X, rest) + gain[s] > most * (1 + 1e-12):
                best = tuple(sorted((*rest, s)))
                most, moved = _square(X, best), True
            if moved:
                break
    return best


def _open(pattern: Pattern, rest: Steps, n: int) -> NDArray[np.bool_]:
    """(n,) which single steps may join these."""
    match pattern:
        case Listed():
            return np.zeros(n, np.bool_)  # the patterns were all gone through
        case Separated(b=b):
            free = np.ones(n, np.bool_)
            for t in rest:
                free[max(0, t - b + 1) : t + b] = False
            return free
        case PerEpoch(steps_per_epoch=s):
            return np.asarray(~np.isin(np.arange(n) // s, [t // s for t in rest]))
        case _:
            assert_never(pattern)
