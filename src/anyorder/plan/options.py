"""What a plan is asked for: words, the small frozen values that carry the options of a word, and options said flat."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from functools import wraps
from typing import Any, Literal, ParamSpec, TypeVar

from numpy.typing import ArrayLike

from anyorder import checks
from anyorder.accounting.amplification.methods import Method
from anyorder.accounting.selection import Selection
from anyorder.errors import ArgumentError
from anyorder.participation.registry import OrderWord, order_word
from anyorder.patterns import Participation
from anyorder.strategy import Strategy
from anyorder.workload import Workload

MechanismWord = Literal["auto", "independent", "poisson", "tree", "dense", "banded", "banded inverse", "blt"]
"""Mechanisms without sizes; a size makes other words, such as "blt, 2 buffers", so that the set is open."""
Neighbours = Literal["zero-out", "replace-one", "add-or-remove"]
"""What differs between neighbours; see `Plan`."""
Objective = Literal["mean", "max", "last"]
"""Which error over the weights during training is made small."""


def default_delta(units: int) -> float:
    """The delta that is taken where none is given: a tenth of 1 / units, rounded down to one digit.

    >>> default_delta(60000), default_delta(100)
    (1e-06, 0.001)
    """
    most = 10 * units
    power = len(str(most - 1))
    return float(f"{10**power // most}e-{power}")


def careful_delta(most: float, units: int | None) -> float:
    """`most`, or `default_delta` where the units are so many that it is smaller.

    >>> careful_delta(1e-5, 100), careful_delta(1e-5, 60000), careful_delta(1e-5, None)
    (1e-05, 1e-06, 1e-05)
    """
    return most if not units else min(most, default_delta(units))


@dataclass(frozen=True)
class OrderOptions:
    """What `order` returns."""

    order: str | Participation | None = None
    cycle: int | None = None
    max_batch_size: int | None = None
    drop_last: bool = False
    method: str | Method | None = None


def order(
    order: OrderWord | Literal["any"] | Participation | None = None,
    *,
    cycle: int | None = None,
    max_batch_size: int | None = None,
    drop_last: bool = False,
    method: str | Method | None = None,
) -> OrderOptions:
    """An order with its options, for `order=` of `anyorder.plan` and `anyorder.compare`.

        ao.plan(order=ao.order("truncated-poisson", cycle=4, max_batch_size=130), ...)

    Args:
        order: a word of `anyorder.plan`, or a `Participation`, which has no option but the method; None for the
            order that `anyorder.plan` takes by itself. For `anyorder.compare` also "any": the options go to the orders
            that have them.
        cycle: of cyclic and truncated Poisson sampling and of sampling with separation: groups, or least distance of
            two steps of a unit; the mechanism's number of bands, if it says one. For mechanism "auto" and an epsilon
            the best cycle of the first two is found.
        max_batch_size: of truncated Poisson sampling, the physical batch; batch_size + 3 sqrt(batch_size) by default.
        drop_last: whether an incomplete last batch is dropped.
        method: of an amplified claim, "auto", "pld", "bound" or "monte_carlo", as of
            `anyorder.accounting.amplified_epsilon`, or a `Method`; None for the order's own; see `Plan`.
    Raises: ArgumentError.
    """
    if isinstance(order, Participation):
        if cycle is not None or max_batch_size is not None or drop_last:
            raise ArgumentError(
                "cycle, max_batch_size and drop_last are options of a word, and an order says them itself, got "
                f"cycle={cycle!r}, max_batch_size={max_batch_size!r}, drop_last={drop_last!r} together with {order!r}"
            )
    elif order is not None and not isinstance(order, str):
        raise ArgumentError(f"order must be a word such as 'shuffled', or a Participation, got {order!r}")
    return OrderOptions(order, cycle, max_batch_size, bool(drop_last), method)


@dataclass(frozen=True)
class MechanismOptions:
    """What `mechanism` returns."""

    mechanism: str | Strategy = "auto"
    estimator: str | None = None
    restart_every: int | None = None
    completion: str | None = None
    objective: str = "mean"
    secure: bool = False
    selection: Selection | None = None
    on_device: tuple[str, ...] = ()

    @property
    def tree(self) -> dict[str, Any]:
        """The options of the tree that are given."""
        options = {name: getattr(self, name) for name in ("estimator", "restart_every", "completion")}
        return {name: value for name, value in options.items() if value is not None}


def mechanism(
    mechanism: MechanismWord | str | Strategy = "auto",
    *,
    estimator: Literal["vanilla", "online", "full"] | None = None,
    restart_every: int | None = None,
    completion: Literal["on", "off", "auto"] | None = None,
    objective: Objective = "mean",
    secure: bool = False,
    selection: Selection | None = None,
    on_device: tuple[str, ...] = (),
) -> MechanismOptions:
    """A mechanism with its options, for `mechanism=` of `anyorder.plan` and `anyorder.compare`.

        ao.plan(mechanism=ao.mechanism("tree", estimator="online", restart_every=1), ...)

    Args:
        mechanism: a word of `anyorder.plan`, or a `Strategy`.
        estimator, restart_every, completion: of the tree, see `fit_tree`; with mechanism "tree" alone.
        objective: what is made small: the "mean", "max" or "last" error over the weights during training.
        secure: exact integer arithmetic in place of floating-point noise, against attacks on its low bits: a `grid`
            of 2^-20 clip norms, rounded down to a power of two. "auto" then chooses among the mechanisms that allow
            it. For another grid, `dataclasses.replace(plan, grid=...)`.
        selection: of rows of sparse tables that get noise, `Counts`, `Top` or `Uniform`; see `Plan`. One without a
            sigma gets its share of the budget; the noise multiplier is of the release alone, epsilon of both.
        on_device: what is trusted to the users' own devices, of "clipping" and "record"; see `Plan`.
    """
    return MechanismOptions(
        mechanism, estimator, restart_every, completion, objective, secure, selection, on_device
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class SGD:
    """The settings of SGD, for `optimizer=` of `anyorder.plan` if there is no torch optimizer yet.

        ao.plan(optimizer=ao.SGD(momentum=0.9, learning_rates=ao.workload.cosine(600)), ...)

    Attributes: those of `Workload`, for as many steps as the order has.
    """

    momentum: float = 0.0
    learning_rates: ArrayLike | None = None
    weight_decay: float = 0.0
    nesterov: bool = False

    def __post_init__(self) -> None:
        if self.learning_rates is not None:
            rates = checks.array("learning_rates", self.learning_rates, ndim=1)
            object.__setattr__(self, "learning_rates", tuple(rates.tolist()))  # which is compared, and never changes

    def workload(self, n: int) -> Workload:
        """A for n steps."""
        return Workload(
            n, momentum=self.momentum, learning_rates=self.learning_rates, weight_decay=self.weight_decay,
            nesterov=self.nesterov,
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits on the memory and the time of a mechanism, for `limits=` of `anyorder.plan`.

        ao.plan(limits=ao.Limits(memory="2 GB", model_size=11_000_000), ...)

    Attributes:
        memory: what the mechanism may keep between steps: vectors of the model's size, or bytes in words ("2 GB") with
            model_size. It bounds the choice of "auto" and of a kind; any other mechanism that keeps more is refused.
        model_size: number of parameters that are trained; noise takes 4 bytes for each in a vector.
        max_cost: rows of noise made and vectors read in a step, on average; it bounds as memory does. By
            itself 32, in choices alone.
    """

    memory: int | str | None = None
    model_size: int | None = None
    max_cost: float | None = None


# -- options said flat -------------------------------------------------------------------------------------------------

_FLAT: dict[str, tuple[str, ...]] = {
    "order": tuple(one.name for one in fields(OrderOptions))[1:],
    "mechanism": tuple(one.name for one in fields(MechanismOptions))[1:],
    "optimizer": tuple(one.name for one in fields(SGD)),
    "limits": tuple(one.name for one in fields(Limits)),
}
"""Keyword of `anyorder.plan` -> the options of its value."""
_VALUES: dict[str, Callable[..., Any]] = {"order": order, "mechanism": mechanism, "optimizer": SGD, "limits": Limits}
FLAT = frozenset(name for names in _FLAT.values() for name in names)
_MAKERS = {
    "order": "ao.order(.., ", "mechanism": "ao.mechanism(.., ", "optimizer": "ao.SGD(", "limits": "ao.Limits("
}  # fmt: skip

# -- keywords that are none --------------------------------------------------------------------------------------------

INSTEAD = {name: f"{keyword}={_MAKERS[keyword]}{name}=..)" for keyword, names in _FLAT.items() for name in names} | {
    "participation": "order=, which takes a Participation too",
    "accumulate": "batch_size=, the rows of a step: a multiple of the loader's batch size joins its batches",
    "momentum": "optimizer=ao.SGD(momentum=..), or the torch optimizer itself",
    "learning_rates": "optimizer=ao.SGD(learning_rates=..), or optimizer=(optimizer, scheduler)",
    "workload": "optimizer=, which takes a Workload too",
    "scheduler": "optimizer=(optimizer, scheduler)",
    "sigma": "noise_multiplier=, noise_std / clip_norm; or dataclasses.replace(plan, sigma=..)",
    "strategy": "mechanism=, which takes a Strategy too",
    # as Opacus has them
    "target_epsilon": "epsilon=",
    "target_delta": "delta=",
    "max_grad_norm": "clip_norm=",
    "sample_rate": "dataset_size= and batch_size=, and order='poisson' where batches are sampled in secret",
    "poisson_sampling": "order='poisson'",
    "data_loader": "loader=",
}
"""A keyword that somebody may know from elsewhere, or an option that a value carries -> what to write."""
SEVERAL = {
    **INSTEAD,
    "noise_multiplier": "epsilon=, at which all orders are compared",
    "risk": "epsilon=, at which all orders are compared",
    "loader": "dataset_size= and batch_size=: a loader has one order",
}
"""The same of `anyorder.compare`."""

P = ParamSpec("P")
R = TypeVar("R")


def says_instead(table: Mapping[str, str]) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """The function, which answers a keyword of the table by an ArgumentError that says what to write."""

    def taught(function: Callable[P, R]) -> Callable[P, R]:
        @wraps(function)
        def called(*args: P.args, **given: P.kwargs) -> R:
            for name in given:
                if name in table:
                    raise ArgumentError(f"{name} must not be given to {function.__name__}: write {table[name]}")
            return function(*args, **given)

        return called

    return taught


def from_flat(options: Mapping[str, Any]) -> dict[str, Any]:
    """Keywords of `anyorder.plan`, of options side by side: as command lines, searches and files of settings have them.

        {"order": "cyclic-poisson", "cycle": 2, "momentum": 0.9}
            -> {"order": ao.order("cyclic-poisson", cycle=2), "optimizer": ao.SGD(momentum=0.9)}

    Options that are None are not given. Raises: ArgumentError where a value that carries its options has others beside.
    """
    found = {name: value for name, value in options.items() if name not in FLAT}
    for keyword, names in _FLAT.items():
        given = {name: options[name] for name in names if options.get(name) is not None}
        value = found.get(keyword)
        if not given:
            continue
        plain = keyword in ("order", "mechanism") and isinstance(value, (str, Participation, Strategy))
        if value is not None and not plain:
            raise ArgumentError(f"{keyword}= and {', '.join(given)} say the same thing: give one of them")
        found[keyword] = _VALUES[keyword](value, **given) if plain else _VALUES[keyword](**given)
    return found


def order_options(asked: Any, noise: MechanismOptions) -> OrderOptions:
    """The order of an argument, its word as it is listed: "shuffled" by itself, or what mechanism "poisson" is for."""
    if isinstance(asked, (list, tuple)):
        raise ArgumentError(f"order must be one order, got {asked!r}: several are compared by ao.compare([..], ..)")
    found = asked if isinstance(asked, OrderOptions) else order(asked)
    if isinstance(found.order, Participation):
        return found
    own = "poisson" if noise.mechanism == "poisson" else "shuffled"
    return replace(found, order=own if found.order is None else order_word(found.order))


def mechanism_options(asked: Any) -> MechanismOptions:
    """The mechanism of an argument, with its options."""
    return asked if isinstance(asked, MechanismOptions) else MechanismOptions(asked)


def limits_of(asked: Any) -> Limits:
    """The limits of an argument."""
    if asked is not None and type(asked) is not Limits:
        raise ArgumentError(f"limits must be ao.Limits(memory=.., model_size=.., max_cost=..), got {asked!r}")
    return Limits() if asked is None else asked
