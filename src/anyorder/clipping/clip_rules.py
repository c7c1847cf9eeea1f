"""How the norms of a unit's gradient become the factors by which it is multiplied."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import fsum, isclose

import torch
from torch import Tensor

from anyorder import _check
from anyorder.errors import ArgumentError

__all__ = ["Automatic", "ClipRule", "Flat", "PerGroup"]


class ClipRule(ABC):
    """Factors such that no unit's vector, all parameters together, is longer than clip_norm."""

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


@dataclass(frozen=True)
class Flat(ClipRule):
    """min(1, clip_norm / ||g||) [Abadi et al. 2016, Algorithm 1]."""

    def factors(self, squares: Mapping[str, Tensor], clip_norm: float) -> dict[str, Tensor]:
        return dict.fromkeys(squares, _clip(_total(squares), clip_norm))

    def describe(self) -> str:
        return "flat: the gradient as a whole is cut to the clip norm"


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


def _total(squares: Mapping[str, Tensor]) -> Tensor:
    return torch.stack(list(squares.values())).sum(0)


def _clip(squares: Tensor, clip_norm: float) -> Tensor:
    # A zero norm gives clip_norm / 0 = inf, and so the factor of an unclipped unit.
    return (clip_norm / squares.sqrt()).clamp(max=1.0)
