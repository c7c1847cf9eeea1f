"""Convex losses of linear models: their values, and their slopes in the scores."""

from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf, sqrt
from typing import Any, Literal, assert_never, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray

from anyorder import checks
from anyorder.checks import final
from anyorder.errors import ArgumentError

Floats = NDArray[np.float64]

_STEEPEST = 100.0
"""Score at which the slope of Poisson's loss is taken for all above: e^100, which every clip norm cuts all the same."""


class _OfScores:
    """What all losses of scores share: scores = X theta, theta (d, outputs), one row of them an example."""

    def value(self: Any, scores: ArrayLike, y: ArrayLike) -> Floats:
        """(m,) the loss of each example; NaN for a label that is none.

        Not private: it is computed from the examples, and no noise covers it.

        Args:
            scores: (m, outputs).
            y: (m,) labels, numbers.
        Raises: ArgumentError for other shapes or types.
        """
        s, labels = _checked(self, scores, y)
        with np.errstate(all="ignore"):
            return _value(self, s, labels)

    def slope(self: Any, scores: ArrayLike, y: ArrayLike) -> Floats:
        """(m, outputs): d loss / d scores of each example, of norm at most `lipschitz`; NaN for a label that is none.

        The gradient in theta is x (outer) slope. Where the loss has a kink, one of its subgradients.

        Args, Raises: as `value`.
        """
        s, labels = _checked(self, scores, y)
        with np.errstate(all="ignore"):
            return _slope(self, s, labels)


@final
@dataclass(frozen=True)
class Logistic(_OfScores):
    """ln(1 + e^s) - y s, for y in {0, 1}.

    Attributes:
        outputs: 1.
        lipschitz: 1, the bound on the slope e^s / (1 + e^s) - y.
    """

    outputs: int = field(default=1, init=False)
    lipschitz: float = field(default=1.0, init=False)


@final
@dataclass(frozen=True)
class Softmax(_OfScores):
    """ln(sum over classes k of e^(s_k)) - s_y, for y in 0, .., classes - 1.

    Args:
        classes: at least 2; a column of theta for each.

    Attributes:
        outputs: classes.
        lipschitz: sqrt 2: the slope is p - e_y for a distribution p, and ||p - e_y||^2 <= (1 - p_y)^2 + (1 - p_y)^2.
    """

    classes: int
    lipschitz: float = field(default=sqrt(2.0), init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "classes", checks.integer("classes", self.classes, low=2))

    @property
    def outputs(self) -> int:
        """Columns of theta."""
        return self.classes


@final
@dataclass(frozen=True)
class Hinge(_OfScores):
    """max(0, 1 - z s) with z = 2 y - 1, for y in {0, 1}. Its slope is -z where z s < 1, else 0.

    Attributes:
        outputs: 1.
        lipschitz: 1.
    """

    outputs: int = field(default=1, init=False)
    lipschitz: float = field(default=1.0, init=False)


@final
@dataclass(frozen=True)
class Squared(_OfScores):
    """(s - y)^2 / 2, for any finite y.

    Attributes:
        outputs: 1.
        lipschitz: inf: the slope s - y has no bound.
    """

    outputs: int = field(default=1, init=False)
    lipschitz: float = field(default=inf, init=False)


@final
@dataclass(frozen=True)
class PoissonLoss(_OfScores):
    """e^s - y s, for y >= 0: minus the log-likelihood of a count y of mean e^s, but for a constant.

    The slope e^s - y is taken at s = 100 for all scores above: a step that went too far gets a gradient that leads
    back, and no overflow.

    Attributes:
        outputs: 1.
        lipschitz: inf.
    """

    outputs: int = field(default=1, init=False)
    lipschitz: float = field(default=inf, init=False)


@final
@dataclass(frozen=True)
class CustomLoss:
    """A convex loss of your own, by its gradient; each row of it is one example's.

    Two promises are **yours**, and the guarantee rests on the first: row i of the gradient is a function of theta and
    of row i of X and y alone, whatever the other rows are (no statistic of the batch); and the loss is convex in theta,
    without which the guarantee holds and the bounds on regret do not. What the function raises goes up to the caller of
    `Learner.step`, with nothing changed; it may tell of the data, and no noise covers it.

    Args:
        gradient: (theta, X, y) -> (m, d) rows, or (m, d, outputs) where there are several outputs. Given theta
            (d, outputs), which it must not write, X as it came, y an array. A row that is not finite counts as zero.
        value: None, or (theta, X, y) -> (m,) losses, for your own use.
        outputs: columns of theta.

    Attributes:
        lipschitz: inf.
    """

    gradient: Callable[[Floats, Any, NDArray[Any]], Any]
    value: Callable[[Floats, Any, NDArray[Any]], Any] | None = None
    outputs: int = 1
    lipschitz: float = field(default=inf, init=False)

    def __post_init__(self) -> None:
        if not callable(self.gradient):
            raise ArgumentError(f"gradient must be a function of (theta, X, y), got {type(self.gradient).__name__}")
        if self.value is not None and not callable(self.value):
            raise ArgumentError(f"value must be a function of (theta, X, y) or None, got {type(self.value).__name__}")
        object.__setattr__(self, "outputs", checks.integer("outputs", self.outputs, low=1))


Linear = Logistic | Softmax | Hinge | Squared | PoissonLoss
"""Losses of scores."""

Loss = Linear | CustomLoss
"""All losses there are."""

LossWord = Literal["hinge", "logistic", "poisson", "softmax", "squared"]
"""Words for those of scores: for a loss of one's own there is `CustomLoss`."""


def loss_of(given: Loss | LossWord, outputs: int) -> Loss:
    """The loss that a word names, for so many outputs; a loss itself. Raises: ArgumentError for anything else."""
    if type(given) in get_args(Loss):
        return given  # type: ignore[return-value]
    word = given if isinstance(given, str) else f"a {type(given).__name__}"
    match checks.choice("loss", word, get_args(LossWord)):
        case "hinge":
            return Hinge()
        case "logistic":
            return Logistic()
        case "poisson":
            return PoissonLoss()
        case "squared":
            return Squared()
        case _:
            return Softmax(outputs)


def labels_of(y: Any, count: int) -> NDArray[Any]:
    """(count,) numbers. Raises: ArgumentError for other shapes or types."""
    labels = np.asarray(y)
    if labels.dtype.kind not in "biuf" or labels.shape != (count,):
        raise ArgumentError(
            f"y must be {count} numbers, one for each row of X, got {labels.dtype} of shape {labels.shape}; map "
            "classes that have names to 0, 1, .. by a public list of them"
        )
    return labels


def _checked(loss: Linear, scores: ArrayLike, y: ArrayLike) -> tuple[Floats, Floats]:
    s = np.asarray(scores)
    if s.dtype.kind not in "biuf" or s.ndim != 2 or s.shape[1] != loss.outputs:
        raise ArgumentError(f"scores must be numbers of shape (m, {loss.outputs}), got {s.dtype} of shape {s.shape}")
    with np.errstate(all="ignore"):  # of floats that are wider, and of NaN that signals
        return s.astype(np.float64, copy=False), labels_of(y, len(s)).astype(np.float64, copy=False)


def _value(loss: Linear, s: Floats, y: Floats) -> Floats:
    known = _known(loss, y)
    one = s[:, 0]
    match loss:
        case Logistic():
            values = np.logaddexp(0.0, one) - y * one
        case Softmax():
            top = s.max(axis=1)
            own = s[np.arange(len(s)), np.where(known, y, 0.0).astype(np.int64)]
            values = np.log(np.exp(s - top[:, None]).sum(axis=1)) + (top - own)
        case Hinge():
            values = np.maximum(0.0, 1.0 - (2.0 * y - 1.0) * one)
        case Squared():
            values = np.square(one - y) / 2
        case PoissonLoss():
            values = np.exp(one) - y * one
        case _:
            assert_never(loss)
    return np.where(known, values, np.nan)


def _slope(loss: Linear, s: Floats, y: Floats) -> Floats:
    known = _known(loss, y)
    match loss:
        case Logistic():
            # 1 / (1 + e^-s): where e^-s overflows it is 0, as it should be.
            slopes = 1.0 / (1.0 + np.exp(-s)) - y[:, None]
        case Softmax():
            slopes = np.exp(s - s.max(axis=1, keepdims=True))
            slopes /= slopes.sum(axis=1, keepdims=True)
            slopes[np.arange(len(s)), np.where(known, y, 0.0).astype(np.int64)] -= 1.0
        case Hinge():
            sign = 2.0 * y[:, None] - 1.0
            margin = sign * s
            slopes = np.where(margin < 1.0, -sign, np.where(np.isnan(margin), np.nan, 0.0))
        case Squared():
            slopes = s - y[:, None]
        case PoissonLoss():
            slopes = np.exp(np.minimum(s, _STEEPEST)) - y[:, None]
        case _:
            assert_never(loss)
    return slopes if known.all() else np.where(known[:, None], slopes, np.nan)


def _known(loss: Linear, y: Floats) -> NDArray[np.bool_]:
    """(m,) which labels are ones of the loss."""
    match loss:
        case Logistic() | Hinge():
            return np.asarray((y == 0.0) | (y == 1.0))
        case Softmax():
            return np.asarray((y >= 0.0) & (y < loss.classes) & (y == np.floor(y)))
        case Squared():
            return np.isfinite(y)
        case PoissonLoss():
            return np.asarray((y >= 0.0) & (y < inf))
        case _:
            assert_never(loss)
