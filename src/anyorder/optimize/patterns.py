"""What the optimisers need to know of a participation, from its pattern family."""

from typing import assert_never

from anyorder.errors import PlanError
from anyorder.patterns import Groups, Listed, Participation, Pattern, PerEpoch, Separated, grouped

__all__ = ["Groups", "check_optimisable", "describes_all", "disjoint", "epoch", "grouped", "shuffled", "stride"]


def disjoint(participation: Participation) -> Groups:
    """Disjoint patterns that cover every step, each inside a pattern that the participation allows.

    Where `describes_all`, as for SingleEpoch, FixedOrder, and a KnownOrder whose units never mix, these are all
    patterns: then a bound over them is the bound over the participation. Elsewhere they are some of them, and a lower
    bound of the error over them still holds.

    Raises: PlanError for PoissonSampling, whose noise is independent.
    """
    check_optimisable(participation)
    return participation.pattern.disjoint()


def check_optimisable(participation: Participation) -> None:
    """Raises PlanError for PoissonSampling, whose noise is independent."""
    if participation.secret:
        raise PlanError(
            f"{type(participation).__name__} is accounted for independent noise only: there is no strategy to optimise"
        )


def describes_all(participation: Participation) -> bool:
    """Whether `disjoint` leaves no pattern out."""
    return not participation.secret and participation.pattern.are_disjoint


def stride(pattern: Pattern) -> int | None:
    """The distance of all steps of every unit; None where distances differ."""
    match pattern:
        case Listed(stride=b):
            return b
        case Separated() | PerEpoch():
            return None
        case _:
            assert_never(pattern)


def epoch(pattern: Pattern) -> int | None:
    """The steps of an epoch, in which every unit comes once; None where there are no epochs."""
    match pattern:
        case Listed(stride=b):
            return b
        case PerEpoch(steps_per_epoch=s):
            return s
        case Separated():
            return None
        case _:
            assert_never(pattern)


def shuffled(pattern: Pattern) -> PerEpoch | None:
    """The pattern if its places within epochs are free; None else."""
    match pattern:
        case PerEpoch():
            return pattern
        case Listed() | Separated():
            return None
        case _:
            assert_never(pattern)
