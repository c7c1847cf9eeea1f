"""What a front end registers, and what a planted fault is."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from anyorder import checks
from anyorder.audit.faults.sums import Summing
from anyorder.audit.faults.trial import BinsTrial, FaultTrial, SampledTrial, banded, banded_inverse, independent, tree
from anyorder.checks import final
from anyorder.errors import ArgumentError
from anyorder.participation import MinSeparation
from anyorder.strategy import Strategy

__all__ = ["Fault", "FrontEnd", "Reached", "SumFault", "patched"]

_MISSING = object()


class Reached:
    """Counts how often what a fault changed was really run: call it there.

    Attributes:
        count: how often.
    """

    def __init__(self) -> None:
        self.count = 0

    def __call__(self) -> None:
        self.count += 1


@contextmanager
def patched(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Within it `owner.name` is the value; afterwards, whatever happened, what it was before.

    Args:
        owner: a module or a class.
        name: an attribute that it has, itself or by inheritance.
        value: in its place.
    Raises: AttributeError for a name that is not there: a patch of nothing would plant nothing.
    """
    getattr(owner, name)
    before = vars(owner).get(name, _MISSING)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if before is _MISSING:
            delattr(owner, name)
        else:
            setattr(owner, name, before)


@final
@dataclass(frozen=True)
class Fault:
    """Something that is done wrong between a sum and its release.

    Attributes:
        name: a few words.
        plant: given a `Reached`, a context manager within which the fault is there; what it changed calls `Reached`.
        looser: for faults in the guard of the plan's rule: given the rule, the one that units really follow.
        sampled: the run is one of Poisson sampling.
        bins: the run is one of balls in bins.
    """

    name: str
    plant: Callable[[Reached], AbstractContextManager[None]]
    looser: Callable[[MinSeparation], MinSeparation] | None = None
    sampled: bool = False
    bins: bool = False


@final
@dataclass(frozen=True)
class SumFault:
    """Something that is done wrong where units are clipped and added up: it goes in by the front end's `summing`.

    Attributes:
        name: a few words.
        make: the wrong sum of a fresh run.
    """

    name: str
    make: Callable[[], Summing]


@final
@dataclass(frozen=True)
class FrontEnd:
    """A way to carry plans out, as an audit with planted faults sees it.

    Attributes:
        name: for people.
        run: carries a trial out, from first to last step: given a `Trial`, the released rows of all steps, arrays or
            tensors of `trial.size` elements. Units bring what `trial.steps` has, raw; clipping is the front end's.
        summing: given a function (vectors, units, clip_norm) -> total, a context manager within which the front end
            makes its sums by that function: the seam by which wrong sums are planted. None: these faults are excused.
        sampled: carries out a trial of Poisson sampling: given a `SampledTrial`, the released rows. None: excused.
        bins: carries out a trial of balls in bins: given a `BinsTrial`, the released rows. None: it takes no such plan.
        faults: its own, in addition to those that all front ends are given.
        excuses: name of a fault that it cannot have -> why, in words.
        strategies: n -> C; the honest run is audited under each of them, the faults under the first.
    Raises: ArgumentError for an excuse of no fault, or without words.
    """

    name: str
    run: Callable[[FaultTrial], Iterable[Any]]
    summing: Callable[[Summing], AbstractContextManager[Any]] | None = None
    sampled: Callable[[SampledTrial], Iterable[Any]] | None = None
    faults: tuple[Fault | SumFault, ...] = ()
    excuses: Mapping[str, str] = field(default_factory=dict)
    strategies: tuple[Callable[[int], Strategy], ...] = (banded, banded_inverse, tree, independent)
    bins: Callable[[BinsTrial], Iterable[Any]] | None = None

    def __post_init__(self) -> None:
        from anyorder.audit.faults.core import FAULTS

        object.__setattr__(self, "excuses", MappingProxyType(dict(self.excuses)))
        names = [fault.name for fault in (*FAULTS, *self.faults)]
        if len(set(names)) < len(names) or not self.strategies:
            raise ArgumentError("faults must have names that differ, also from those that all front ends are given")
        for name, words in self.excuses.items():
            checks.choice("excuses", name, names)
            if not words.strip():
                raise ArgumentError(f"the excuse of {name!r} must say why the front end cannot have it")
