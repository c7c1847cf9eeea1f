"""How the norms of a unit's gradient become the factors by which it is multiplied."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import fsum, isclose, sqrt
from typing import ClassVar

import torch
from torch import Tensor

from anyorder import _check
from anyorder._closed import final
from anyorder.errors import ArgumentError

__all__ = ["Adaptive", "Automatic", "ClipRule", "Flat", "PerGroup", "apply"]


class ClipRule(ABC):
    """Factors such that no unit's vector, all parameters and `coordinates` together, is longer than clip_norm."""

    @abstractmethod
    def factors(self, squares: Mapping[str, Tensor], clip_norm: float) -> dict[str, Tensor]:
        """{parameter: (U,)} factors.

        Args:
            squares: {parameter: (U,)} float64, the squared norms of the units' gradients, finite.
            clip_norm: L2 bound on what a unit may add, above 0.
        Raises: ArgumentError if the rule does not fit the parameters.
        """

    def coordinates(self, squares: Mapping[str, Tensor], clip_norm: float) -> dict[str, Tensor]:
        """{name: (U,)} float64, what units add to sums of the rule's own, beside those of the parameters: none."""
        del squares, clip_norm
        return {}

    @abstractmethod
    def describe(self) -> str:
        """For the plan's card."""


@final
@dataclass(frozen=True)
class Flat(ClipRule):
    """min(1, clip_norm / ||g||) [Abadi et al. 2016, Algorithm 1]."""

    def factors(self, squares: Mapping[str, Tensor], clip_norm: float) -> dict[str, Tensor]:
        return dict.fromkeys(squares, _clip(_total(squares), clip_norm))

    def describe(self) -> str:
        return "flat: the gradient as a whole is cut to the clip norm"


@final
@dataclass(frozen=True)
class PerGroup(ClipRule):
    """min(1, c_l / ||g_l||) for each group l of parameters, with sum_l c_l^2 = clip_norm^2 [McMahan et al. 2018, 3.2].

    Attributes:
        groups: for each group, the names of its parameters, or of modules that hold them; empty: each parameter is
            a group of its own.
        shares: c_l / clip_norm for each group, their squares adding up to 1; empty: equal ones.
    """

    groups: tuple[tuple[str, ...], ...] = ()
    shares: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if not self.shares:
            return
        if len(self.shares) != len(self.groups):
            raise ArgumentError(f"shares must be one for each of the {len(self.groups)} groups, got {len(self.shares)}")
        total = fsum(_check.positive("shares", share) ** 2 for share in self.shares)
        if not isclose(total, 1.0, rel_tol=1e-12):
            raise ArgumentError(
                f"the squares of shares must add up to 1, so that the norms do to clip_norm; got {total}"
            )

    def factors(self, squares: Mapping[str, Tensor], clip_norm: float) -> dict[str, Tensor]:
        groups = self._members(squares)
        # Rounded down: the squares of the norms may add up to no more than clip_norm squared.
        shares = [share * (1 - 1e-12) for share in self.shares or [len(groups) ** -0.5] * len(groups)]
        result: dict[str, Tensor] = {}
        for names, share in zip(groups, shares, strict=True):
            factor = _clip(_total({name: squares[name] for name in names}), clip_norm * share)
            result |= dict.fromkeys(names, factor)
        return {name: result[name] for name in squares}

    def _members(self, squares: Mapping[str, Tensor]) -> Sequence[Sequence[str]]:
        if not self.groups:
            return [[name] for name in squares]
        members = [
            [name for name in squares if any(name == own or name.startswith(f"{own}.") for own in group)]
            for group in self.groups
        ]
        held = [name for names in members for name in names]
        if sorted(held) != sorted(squares) or not all(members):
            missing, twice = sorted(set(squares) - set(held)), sorted({n for n in held if held.count(n) > 1})
            raise ArgumentError(
                "every trainable parameter must be in exactly one group, and no group empty; "
                f"in none: {', '.join(missing) or '-'}; in several: {', '.join(twice) or '-'}; "
                f"empty: {sum(not names for names in members)}"
            )
        return members

    def describe(self) -> str:
        number = len(self.groups) or "one group for each parameter:"
        return f"per group: {number} parts, each cut to its share of the clip norm"


@final
@dataclass(frozen=True)
class Automatic(ClipRule):
    """clip_norm / (||g|| + gamma): every unit is normalised, none is longer than clip_norm [Bu et al. 2023, eq. 4].

    The length of a unit's vector is clip_norm ||g|| / (||g|| + gamma) < clip_norm, so that clip_norm only scales the
    learning rate and need not be tuned.

    Attributes:
        gamma: stability constant, above 0, in the units of the gradient.
    """

    gamma: float = 0.01

    def __post_init__(self) -> None:
        _check.positive("gamma", self.gamma)

    def factors(self, squares: Mapping[str, Tensor], clip_norm: float) -> dict[str, Tensor]:
        return dict.fromkeys(squares, clip_norm / (_total(squares).sqrt() + self.gamma))

    def describe(self) -> str:
        return f"automatic: the gradient times clip norm / (its norm + {self.gamma:g})"


@final
@dataclass(frozen=True)
class Adaptive(ClipRule):
    """The clip norm follows a quantile of the units' norms, at no privacy beyond the plan's [Andrew et al. 2021].

    In period k units are cut to c_k. With a = share and C the plan's clip norm, c_0 = C, unit u adds the vector of
    d + 1 numbers

        v_u = ( sqrt(1 - a^2) C g_u / max(||g_u||, c_k),  a C s_u ),    s_u = 1 if ||g_u|| > c_k else 0

    to the sum of a step, which gets the plan's noise in all d + 1 coordinates and is divided by the batch size. What
    is released, times c_k / (C sqrt(1 - a^2)), is the gradient. The last coordinates of the K steps of a period, with
    the sum S, tell which part of the units was above c_k, and at the period's end

        above = S / (a C K),    c_{k+1} = c_k exp( learning_rate (min(max(above, 0), 1) - (1 - quantile)) )

    c_k stays between 2^-20 and 2^20 of C.

    Guarantee: the plan's own. ||v_u||^2 <= (1 - a^2) C^2 + a^2 C^2 = C^2 whatever c_k is, and c_k is a function of
    releases of earlier steps alone. So step t adds an adaptively chosen function of the data, of norm at most C for
    each unit, to which the Gaussian matrix mechanism gives the same mu as to functions fixed beforehand [Denisov et
    al. 2022, Theorem 2.1]; what is done with the releases is post-processing. The c_k are public, as gradients are.
    A unit whose gradient is zero adds nothing, as `zero-out` neighbours have it; the paper counts units below c_k,
    less a half each, and there it would add to the count.

    To count costs noise: what the gradients have of it grows by 1 / sqrt(1 - a^2).

    Periods end where the strategy's noise restarts, `Strategy.restart_period`: within a block noise is made to cancel
    that of earlier steps, and once scaled by another c_k it would not. Batches of fewer units than the plan's batch
    size make the part above look smaller.

    Here `clip_norm` is c_k, and vectors are c_k / C times those above; the engine does the rest.

    Attributes:
        quantile: part of the units whose norm is to be at most the clip norm.
        learning_rate: of the logarithm of the norm, at most 10; the paper takes 0.2, at every step.
        share: a, part of the norm C that the count has.
        every: steps in a period, a multiple of the strategy's restart period; None for that period itself: an epoch
            of restarted buffers, one step of independent noise.
    """

    quantile: float = 0.5
    learning_rate: float = 1.0
    share: float = 0.1
    every: int | None = None

    COUNT: ClassVar[str] = ".above"
    """Name of the sum of the last coordinate. No parameter's name begins with a dot."""

    def __post_init__(self) -> None:
        _check.probability("quantile", self.quantile)
        _check.positive("learning_rate", _check.real("learning_rate", self.learning_rate, low=0.0, high=10.0))
        _check.probability("share", self.share)
        if self.every is not None:
            _check.integer("every", self.every, low=1)

    @property
    def gradient_share(self) -> float:
        """sqrt(1 - a^2), part of the norm C that the gradient has."""
        return sqrt(1 - self.share**2)

    def factors(self, squares: Mapping[str, Tensor], clip_norm: float) -> dict[str, Tensor]:
        return dict.fromkeys(squares, self.gradient_share * _clip(_total(squares), clip_norm))

    def coordinates(self, squares: Mapping[str, Tensor], clip_norm: float) -> dict[str, Tensor]:
        above = (_total(squares).sqrt() > clip_norm).double()
        return {self.COUNT: self.share * clip_norm * above}

    def describe(self) -> str:
        return f"adaptive: the clip norm follows the {self.quantile:g} quantile of the gradients' norms"


_OWN = (Flat, PerGroup, Automatic, Adaptive)  # whose bound is proven; checking it would cost every step


def apply(
    rule: ClipRule, squares: Mapping[str, Tensor], clip_norm: float
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The rule's factors and coordinates.

    A rule from elsewhere is given one unit at a time: factors that depend on other units' norms would let one unit move
    what all others add. A unit that it leaves longer than clip_norm is cut to it, and one whose factors are not numbers
    adds zero: silently, since an error would tell of that unit.

    Raises: ArgumentError if those of a rule from elsewhere are of other names or shapes.
    """
    if type(rule) in _OWN:
        return rule.factors(squares, clip_norm), rule.coordinates(squares, clip_norm)
    shape = next(iter(squares.values())).shape
    each = [{name: square[i : i + 1] for name, square in squares.items()} for i in range(shape[0])] or [dict(squares)]
    factors, further = (_joined([make(unit, clip_norm) for unit in each]) for make in (rule.factors, rule.coordinates))
    if set(factors) != set(squares) or set(further) & set(squares):
        raise ArgumentError(f"{rule!r} must give a factor for each parameter, and coordinates of other names")
    if any(values.shape != shape for values in (*factors.values(), *further.values())):
        raise ArgumentError(f"{rule!r} must give one number for each of the {shape[0]} units")
    parts = [factors[name].double().square() * square for name, square in squares.items()]
    total = torch.stack([*parts, *(values.double().square() for values in further.values())]).sum(0)
    kept = torch.where(total > clip_norm**2, clip_norm / total.sqrt(), 1.0)

    def within(values: Tensor) -> Tensor:
        return torch.where(total.isfinite(), values * kept, 0.0)

    return {name: within(v) for name, v in factors.items()}, {name: within(v) for name, v in further.items()}


def _joined(units: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    if any(unit.keys() != units[0].keys() for unit in units):
        raise ArgumentError("a clip rule must give factors and coordinates of the same names for all units")
    return {name: torch.cat([unit[name] for unit in units]) for name in units[0]}


def _total(squares: Mapping[str, Tensor]) -> Tensor:
    return torch.stack(list(squares.values())).sum(0)


def _clip(squares: Tensor, clip_norm: float) -> Tensor:
    # A zero norm gives clip_norm / 0 = inf, and so the factor of an unclipped unit.
    return (clip_norm / squares.sqrt()).clamp(max=1.0)
