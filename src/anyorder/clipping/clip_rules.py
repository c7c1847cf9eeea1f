"""How the norms of a unit's gradient become the factors by which it is multiplied.

`Flat`, `PerGroup` and `Automatic` are factors under the plan's own norm. `Adaptive`, which users give as a rule too, is
a schedule of norms, whose factors are `Flat`: it stands in `release/schedules.py`, and `Cut` joins the two.
"""

import copy
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import fsum, isclose
from typing import assert_never

import torch
from torch import Tensor

from anyorder import checks
from anyorder.checks import final
from anyorder.errors import ArgumentError
from anyorder.release.schedules import Adaptive, FixedNorm, Schedule

__all__ = ["Automatic", "ClipRule", "Cut", "Flat", "PerGroup", "Rule"]


class ClipRule(ABC):
    """Factors such that no unit's vector, all parameters together, is longer than clip_norm.

    A rule of one's own is a subclass. For each unit it is copied and given that unit alone, so that nothing that it
    keeps in itself goes on to another unit or step; what it leaves longer than clip_norm is clipped. You promise that
    it keeps nothing elsewhere, in a global, a class, a closure or a file, and draws nothing.
    """

    @abstractmethod
    def factors(self, squares: Mapping[str, Tensor], clip_norm: float) -> dict[str, Tensor]:
        """{parameter: (U,)} factors.

        Args:
            squares: {parameter: (U,)} float64, the squared norms of the units' gradients, finite.
            clip_norm: L2 bound on what a unit may add, above 0.
        Raises: ArgumentError if the rule does not fit the parameters.
        """

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
        return "flat: the gradient as a whole is clipped to the clip norm"


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
        total = fsum(checks.positive("shares", share) ** 2 for share in self.shares)
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
        checks.positive("gamma", self.gamma)

    def factors(self, squares: Mapping[str, Tensor], clip_norm: float) -> dict[str, Tensor]:
        return dict.fromkeys(squares, clip_norm / (_total(squares).sqrt() + self.gamma))

    def describe(self) -> str:
        return f"automatic: the gradient times clip norm / (its norm + {self.gamma:g})"


Rule = ClipRule | Adaptive
"""What `make_private(rule=..)` takes: factors under the plan's own norm, or a schedule of norms for `Flat` factors."""


@final
@dataclass(frozen=True)
class Cut:
    """How units are clipped: by which factors, and at which norms.

    Attributes:
        factors: of the gradients. A rule from elsewhere is held to the bound, which those of this file keep by proof.
        schedule: which norm is in force when. It may add a coordinate of its own to each unit's vector.
    """

    factors: ClipRule
    schedule: Schedule

    @classmethod
    def of(cls, rule: Rule | None) -> "Cut":
        """Return what a rule asks for; `Flat()` at the plan's norm if None.

        Raises: ArgumentError for what is no rule, and for a rule from elsewhere with coordinates, which no plan has, or
            that cannot be copied.
        """
        if type(rule) is Adaptive:
            return cls(Flat(), rule)
        if rule is not None and not isinstance(rule, ClipRule):
            raise ArgumentError(
                f"rule must be None or a rule of anyorder.clipping, such as Flat() or Automatic(gamma=0.01), "
                f"got {rule!r}"
            )
        if hasattr(rule, "coordinates"):
            raise ArgumentError(f"{rule!r} has coordinates of its own: only Adaptive() may; give factors alone")
        try:
            copy.deepcopy(rule)
        except Exception as problem:
            raise ArgumentError(
                f"{rule!r} cannot be copied, as it must be for each unit, so that it keeps nothing of others: {problem}"
            ) from problem
        return cls(Flat() if rule is None else rule, FixedNorm())

    @property
    def is_flat(self) -> bool:
        """True if a unit has one factor, min(1, norm / its own), at a norm that does not move."""
        return type(self.factors) is Flat and type(self.schedule) is FixedNorm

    @property
    def counted(self) -> tuple[str, ...]:
        """Names of the schedule's own sums."""
        match self.schedule:
            case FixedNorm():
                return ()
            case Adaptive():
                return (Adaptive.COUNT,)
            case _:
                assert_never(self.schedule)

    def apply(self, squares: Mapping[str, Tensor], clip_norm: float) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Factors {parameter: (U,)}, and what units add to the schedule's own sums, {name: (U,)}, both float64.

        Guarantee: no unit's vector, all of both together, is longer than clip_norm, in exact arithmetic.
        """
        factors = _factors(self.factors, squares, clip_norm)
        match self.schedule:
            case FixedNorm():
                return factors, {}
            case Adaptive() as adaptive:
                shared = {id(factor): adaptive.gradient_share * factor for factor in factors.values()}
                above = (_total(squares).sqrt() > clip_norm).double()
                count = {adaptive.COUNT: adaptive.share * clip_norm * above}
                return {name: shared[id(factor)] for name, factor in factors.items()}, count
            case _:
                assert_never(self.schedule)


def _factors(rule: ClipRule, squares: Mapping[str, Tensor], clip_norm: float) -> dict[str, Tensor]:
    """The rule's factors.

    A rule from elsewhere is given one unit at a time, and each unit a copy of the rule: factors that depend on other
    units' norms, of this step or of earlier ones, would let one unit move what all others add. A unit that it leaves
    longer than clip_norm is cut to it, and one whose factors are not numbers adds zero: silently, since an error would
    tell of that unit.

    Raises: ArgumentError if those of a rule from elsewhere are of other names or shapes.
    """
    match rule:
        case Flat() | PerGroup() | Automatic():  # whose bound is proven; checking it would cost every step
            return rule.factors(squares, clip_norm)
    shape = next(iter(squares.values())).shape
    each = [{name: square[i : i + 1] for name, square in squares.items()} for i in range(shape[0])]
    factors = _joined([copy.deepcopy(rule).factors(unit, clip_norm) for unit in each])
    if set(factors) != set(squares):
        raise ArgumentError(f"{rule!r} must give a factor for each parameter, and for nothing else")
    if any(values.shape != shape for values in factors.values()):
        raise ArgumentError(f"{rule!r} must give one number for each of the {shape[0]} units")
    total = torch.stack([factors[name].double().square() * square for name, square in squares.items()]).sum(0)
    kept = torch.where(total > clip_norm**2, clip_norm / total.sqrt(), 1.0)
    return {name: torch.where(total.isfinite(), values * kept, 0.0) for name, values in factors.items()}


def _joined(units: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    if any(unit.keys() != units[0].keys() for unit in units):
        raise ArgumentError("a clip rule must give factors of the same names for all units")
    return {name: torch.cat([unit[name] for unit in units]) for name in units[0]}


def _total(squares: Mapping[str, Tensor]) -> Tensor:
    first, *more = squares.values()
    return torch.stack([first, *more]).sum(0) if more else first


def _clip(squares: Tensor, clip_norm: float) -> Tensor:
    # A zero norm gives clip_norm / 0 = inf, and so the factor of an unclipped unit.
    return (clip_norm / squares.sqrt()).clamp(max=1.0)
