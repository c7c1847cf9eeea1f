"""The planner: finds the order, the mechanism and the noise, and joins them into a `Plan`."""

import re
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from math import frexp, inf, nextafter
from typing import Any

from numpy.typing import ArrayLike

from anyorder import accounting, checks
from anyorder.accounting.amplification.bound import calibrate_amplified, method_named
from anyorder.accounting.amplification.methods import Method
from anyorder.accounting.amplification.mixture import reach
from anyorder.accounting.amplification.secret_order import AmplifiedOrder, SampledOrder
from anyorder.accounting.gaussian import NEIGHBOURS
from anyorder.accounting.selection import Selection, check_selection, for_epsilon, for_sigma, plan_curve, shared
from anyorder.errors import ArgumentError, PlanError
from anyorder.participation import KnownOrder
from anyorder.participation.registry import WORDS, order_in_words, order_word, words_with
from anyorder.patterns import Participation, moves_others
from anyorder.plan.compare import OrderComparison, compared
from anyorder.plan.compatibility import (
    check_exact,
    check_neighbours,
    check_on_device,
    check_secret,
    check_selected,
    checked_method,
)
from anyorder.plan.mechanism import Limits, strategy_of, vectors, with_best_cycle
from anyorder.plan.plan import Plan
from anyorder.sensitivity import sensitivity
from anyorder.sensitivity.rounding import rounding
from anyorder.strategy import Strategy
from anyorder.workload import Workload, from_optimizer
from anyorder.workload import check_kind as check_workload


def plan(
    *,
    delta: float,
    epsilon: float | None = None,
    noise_multiplier: float | None = None,
    sigma: float | None = None,
    dataset_size: int | None = None,
    batch_size: int | None = None,
    epochs: int | None = None,
    loader: Iterable[Any] | None = None,
    accumulate: int = 1,
    order: str | Sequence[str] | None = None,
    cycle: int | None = None,
    max_batch_size: int | None = None,
    participation: Participation | None = None,
    drop_last: bool = False,
    mechanism: str | Strategy = "auto",
    estimator: str | None = None,
    restart_every: int | None = None,
    completion: str | None = None,
    objective: str = "mean",
    memory: int | str | None = None,
    model_size: int | None = None,
    max_cost: float | None = None,
    momentum: float = 0.0,
    learning_rates: ArrayLike | None = None,
    workload: Workload | None = None,
    optimizer: Any = None,
    scheduler: Any = None,
    clip_norm: float = 1.0,
    unit: str | int | Callable[[Any], Any] = "example",
    neighbours: str = "zero-out",
    secure: bool = False,
    on_device: tuple[str, ...] = (),
    selection: Selection | None = None,
    method: str | Method | None = None,
) -> Plan:
    """Join an order, a mechanism and a budget into a `Plan`.

    The number of steps and the order come from one of: `loader` and `epochs`; `dataset_size`, `batch_size` and
    `epochs` with `order` in words; or `participation` and `batch_size`.

    Args:
        delta: target delta.
        epsilon: target epsilon; the noise is the least that keeps (epsilon, delta). Or
        noise_multiplier: noise_std / clip_norm, as DP-SGD means it, and epsilon follows. Or
        sigma: noise_std / (clip_norm * sens), that is 1 / mu (2 / mu for replace-one). Exactly one of the three.
        dataset_size: number of examples, public.
        batch_size: examples in a step; the constant that sums are divided by. With a loader it follows, in rows; with a
            loader and a unit it may be given, in units of a step, which are fewer than its rows: any public number.
        epochs: passes over the data.
        loader: a torch DataLoader; its order is read off its sampler. With a unit other than "example" the data set is
            read once, and the plan is for the `KnownOrder` of its units.
        accumulate: batches of the loader that make a step, as in `make_private`.
        order: None for "shuffled" (anew in each epoch; it covers "sequential" and "fixed" too), "sequential" or "fixed"
            (the same order in each epoch: less noise). Or secret sampling by this package's own sampler, whose batches
            have batch_size units on average: "poisson" (with independent noise: DP-SGD), "cyclic-poisson",
            "truncated-poisson", "balls-in-bins", "random-allocation", "min-separation-sampling"; see
            `anyorder.participation`. Or several words, or "any" for all that fit: each is planned, and the plan of
            least error is returned, and the table of all is printed; `anyorder.compare_orders` returns it.
        cycle: of cyclic and truncated Poisson sampling and of sampling with separation: groups, or least distance of
            two steps of a unit; the mechanism's number of bands, if it says one. For mechanism "auto" and an epsilon
            the best cycle of the first two is found.
        max_batch_size: of truncated Poisson sampling, the physical batch; batch_size + 3 sqrt(batch_size) by default.
        participation: the order as a rule; the ledger holds the run to it, whatever the loader.
        drop_last: whether an incomplete last batch is dropped.
        mechanism: "auto" (least error for this workload and order; with a selection independent noise, since the others
            win by what later steps take back, which rows that are seldom released never get),
            "tree" (DP-FTRL), "independent" (DP-SGD's noise),
            a kind ("blt": the best of it) or a kind at its size ("dense", "banded, 64 bands", "blt, 2 buffers"; see
            `fit_named`), "poisson" (independent noise and order "poisson"), or a `Strategy`.
        estimator, restart_every, completion: of the tree, see `fit_tree`; with mechanism "tree" alone.
        objective: what is made small: the "mean", "max" or "last" error over the iterates.
        memory: what the mechanism may keep between steps: vectors of the model's size, or bytes in words ("2 GB") with
            model_size. It bounds the choice of "auto" and of a kind; any other mechanism that keeps more is refused.
        model_size: number of parameters that are trained; noise takes 4 bytes for each in a vector.
        max_cost: rows of noise made and vectors read in a step, on average; it bounds as memory does. By
            itself 32, in choices alone.
        momentum, learning_rates: the optimizer's, for the workload whose error is minimised; see `Workload`. Or
        workload: A itself, for as many steps as the order has. Or
        optimizer: a `torch.optim.SGD` (any torch optimizer of that class), whose settings are read, with
        scheduler: its learning-rate scheduler that steps with it, if any; see `workload.from_optimizer`.
        clip_norm: L2 bound on one unit's gradient in one step.
        unit: what is protected, in a word: see `Plan`. With a loader, the place of each example's unit in a batch, as
            in `make_private`: a field of a dict, a position in a tuple, a callable. A field's name is the plan's word;
            the others are called "user".
        neighbours: see `Plan`.
        secure: exact integer arithmetic in place of floating-point noise, against attacks on its low bits: a `grid`
            of 2^-20 clip norms, rounded down to a power of two. "auto" then chooses among the mechanisms that allow
            it. For another grid, `dataclasses.replace(plan, grid=...)`.
        on_device: what is trusted to the users' own devices, of "clipping" and "record"; see `Plan`.
        selection: of rows of sparse tables that get noise, `Counts`, `Top` or `Uniform`; see `Plan`. One without a
            sigma gets its share of the budget; sigma and noise_multiplier are of the release alone, epsilon of both.
        method: of an amplified claim, "auto", "pld", "bound" or "monte_carlo", as of
            `anyorder.accounting.amplified_epsilon`, or a `Method`; None for the order's own; see `Plan`.
    Raises: ArgumentError for arguments that break their rule or do not go together; PlanError for parts that do not
        fit, and where no mechanism keeps to the memory.
    Cost: that of the fit, seconds for 1000 steps; fits are kept on disk.
    """
    arguments = dict(locals())
    if order == "any" or not (order is None or isinstance(order, str)):
        compared_orders = compare_orders(**arguments, progress=lambda word: print(f"planning {word}", file=sys.stderr))
        print(compared_orders)  # what a list of orders is asked for
        return compared_orders.best
    budget = _budget(epsilon, noise_multiplier, sigma)  # before a fit that may take long
    checks.choice("neighbours", neighbours, NEIGHBOURS)
    delta = checks.probability("delta", delta)
    if order is None:
        by_words = loader is None and participation is None
        order = "poisson" if mechanism == "poisson" and by_words else "shuffled"
    order = order_word(order)
    if loader is not None or participation is not None:
        _refuse_sizes(cycle, max_batch_size)
    if loader is not None:
        _refuse_words("loader", order, drop_last)
        if participation is not None:
            raise ArgumentError("participation must not be given together with loader, whose order is read")
        rule, batch_size, dataset_size = _read_loader(loader, epochs, batch_size, dataset_size, unit, accumulate)
        if neighbours == "add-or-remove" and type(rule) is KnownOrder:
            raise moves_others("an order that was read off a loader")
    else:
        if checks.integer("accumulate", accumulate, low=1) != 1:
            raise ArgumentError("accumulate must come with a loader, whose batches it joins; batch_size is of a step")
        if participation is not None:
            _refuse_words("participation", order, drop_last)
            if epochs is not None:
                raise ArgumentError(
                    f"epochs must not be given together with participation, which says all steps, got epochs={epochs!r}"
                )
        rule = (
            participation
            if participation is not None
            else _participation(
                order, dataset_size, batch_size, epochs, drop_last, _cycle_of(mechanism, cycle, order), max_batch_size
            )
        )
    if not isinstance(unit, str):
        if loader is None:
            raise ArgumentError(f"unit must be a word such as 'user' where no loader is given, got {unit!r}")
        unit = "user"
    if batch_size is None:
        raise ArgumentError("batch_size must be given: it is the constant that gradient sums are divided by")
    on_device = check_on_device(on_device, rule)  # before a fit that may take long
    work = _workload(rule.n, workload, optimizer, scheduler, momentum, learning_rates)
    if (
        participation is None
        and loader is None
        and cycle is None
        and mechanism == "auto"
        and WORDS[order][1].cycle_is_chosen
    ):
        rule = with_best_cycle(rule, work, epsilon, delta, objective, max_cost)
    check_selection(selection)  # before a fit that may take long
    tree = {"estimator": estimator, "restart_every": restart_every, "completion": completion}
    limits = Limits(
        vectors(memory, model_size, secure), None if max_cost is None else checks.real("max_cost", max_cost, low=1.0)
    )
    if selection is not None:
        limits = limits._replace(state=None)  # noise that keeps anything is refused, whatever memory there is
    chosen = strategy_of(
        mechanism, work, rule, secure, selection is not None, objective, limits,
        {k: v for k, v in tree.items() if v is not None}, {"epsilon": epsilon, "delta": delta},
    )  # fmt: skip
    if rule.secret and not rule.absence_moves_others and neighbours == "zero-out":
        neighbours = "add-or-remove"  # what the sampler's accounting is about
    if secure:
        check_exact(neighbours, chosen)  # before a calibration that may take long
    check_selected(selection, chosen, secure, on_device)
    check_secret(rule, secure, selection)
    check_neighbours(neighbours, rule, chosen)
    if method is not None and not isinstance(rule, AmplifiedOrder):
        found = checked_method(method, rule, chosen, neighbours)  # which refuses it
    else:
        named = None if method is None else method_named(method, chosen, rule)
        found = checked_method(named, rule, chosen, neighbours)
    noise, selection = _noise(chosen, rule, neighbours, delta, selection, found, **budget)
    return Plan(
        participation=rule, strategy=chosen, workload=work, clip_norm=clip_norm, delta=delta, sigma=noise,
        batch_size=batch_size, unit=unit, neighbours=neighbours, dataset_size=dataset_size,
        grid=_default_grid(clip_norm) if secure else None, on_device=on_device, selection=selection,
        method=found,
    )  # fmt: skip


def compare_orders(
    order: str | Sequence[str] = "any", *, progress: Callable[[str], None] | None = None, **arguments: Any
) -> OrderComparison:
    """Plan several orders at one (epsilon, delta) and one expected batch size, and rank them by the error of iterates.

    Each order has the mechanism that is best for it, fitted to its own claim: the amplified one where batches are drawn
    by secret coins. What an order needs of whoever trains is beside it; an order whose needs are not met has no claim.

        print(ao.compare_orders(dataset_size=60000, batch_size=500, epochs=5, epsilon=2, delta=1e-5))

    Args:
        order: words as of `plan`, or "any" for all that can be planned with what is given.
        progress: called with each order's word before it is planned.
        arguments: of `plan`: delta, epsilon, dataset_size, batch_size and epochs, and others that are not about an
            order. `cycle`, `max_batch_size` and `method` go to the orders that have them; without a cycle the best
            is found.
    Returns: the plans, the least error first; of "any", also the orders that do not fit, with the reason.
    Raises: ArgumentError; PlanError where no order can be planned, or one that was named; MissingDependencyError where
        one that was named needs a library.
    Cost: that of each plan, up to a minute for an order of 2000 steps; fits are kept on disk.
    """
    return compared(plan, order, arguments, progress)


def with_budget(
    base: Plan, *, epsilon: float | None = None, noise_multiplier: float | None = None, sigma: float | None = None
) -> Plan:
    """The plan with as much noise as another budget asks for; exactly one, see `plan`. A selection keeps its share."""
    budget = _budget(epsilon, noise_multiplier, sigma)
    kept = shared(base.selection, base.sigma, _visits(base.participation))
    noise, selection = _noise(
        base.strategy, base.participation, base.neighbours, base.delta, kept, base.method, **budget
    )
    return replace(base, sigma=noise, selection=selection)


def _budget(epsilon: float | None, noise_multiplier: float | None, sigma: float | None) -> dict[str, float | None]:
    """By name: one number above 0, the others None."""
    budget = {"epsilon": epsilon, "noise_multiplier": noise_multiplier, "sigma": sigma}
    if sum(value is not None for value in budget.values()) != 1:
        raise ArgumentError(f"exactly one of epsilon, noise_multiplier and sigma must be given, got {budget}")
    return {name: None if value is None else checks.positive(name, value) for name, value in budget.items()}


# -- the order -------------------------------------------------------------------------------------------------------


def _refuse_words(given: str, order: str, drop_last: bool) -> None:
    if order != "shuffled" or drop_last:
        raise ArgumentError(
            f"order and drop_last must not be given together with {given}, which says them, got order={order!r}, "
            f"drop_last={drop_last!r}; order is a word for a plan by dataset_size, batch_size and epochs, and secret "
            "sampling (order='poisson') is planned so"
        )


def _refuse_sizes(cycle: int | None, most: int | None) -> None:
    if cycle is not None or most is not None:
        raise ArgumentError(
            f"cycle and max_batch_size must come with an order in words, got cycle={cycle!r}, max_batch_size={most!r}"
        )


def _read_loader(
    loader: Iterable[Any], epochs: int | None, batch_size: int | None, dataset_size: int | None, unit: Any, joined: int
) -> tuple[Participation, int, int | None]:
    if epochs is None:
        raise ArgumentError("epochs must be given together with loader")
    from anyorder.sampling import find_participation  # the only one here that needs torch

    of_examples = isinstance(unit, str) and unit == "example"
    found = find_participation(loader, epochs, unit=None if of_examples else unit, accumulate=joined)
    rows, given = found.batch_size * joined, batch_size
    if given is not None:
        given = checks.integer("batch_size", given, low=1)
    if of_examples and given not in (None, rows):
        raise ArgumentError(
            f"batch_size must be left out beside loader=, or be the {rows} examples that its batches of "
            f"{found.batch_size} make in a step with accumulate={joined}, got {given}: for larger or smaller steps, "
            "make the loader with another batch_size, or give another accumulate="
        )
    if dataset_size not in (None, found.dataset_size):
        raise ArgumentError(
            f"dataset_size must be left out beside loader=, whose order has {found.dataset_size} examples, got "
            f"{dataset_size!r}: make the loader of the data set that is meant"
        )
    return found.participation, rows if given is None else given, found.dataset_size


def _participation(
    order: str, dataset_size: int | None, batch_size: int | None, epochs: int | None, drop_last: bool,
    cycle: int | None, most: int | None,
) -> Participation:  # fmt: skip
    if dataset_size is None or batch_size is None or epochs is None:
        missing = {"dataset_size": dataset_size, "batch_size": batch_size, "epochs": epochs}
        raise ArgumentError(f"dataset_size, batch_size and epochs must be given where order is a word, got {missing}")
    size = checks.integer("dataset_size", dataset_size, low=1)
    batch = checks.integer("batch_size", batch_size, low=1, high=size)
    epochs = checks.integer("epochs", epochs, low=1)
    return order_in_words(order, size, batch, epochs, drop_last, cycle, most)


def _cycle_of(mechanism: str | Strategy, cycle: int | None, order: str) -> int | None:
    """The number of bands, where no cycle is given and the order has one."""
    if cycle is not None or order not in words_with("cycle"):
        return cycle
    if isinstance(mechanism, Strategy):
        return reach(mechanism)
    found = re.search(r"([0-9]+) bands?", mechanism) if isinstance(mechanism, str) else None
    if found is not None:
        return int(found[1])
    if mechanism == "auto" and WORDS[order][1].cycle_is_chosen:
        return 1  # found by the claim, later
    return 1 if mechanism in ("independent", "poisson") else None


# -- the workload ----------------------------------------------------------------------------------------------------


def _workload(
    n: int, given: Workload | None, optimizer: Any, scheduler: Any, momentum: float, learning_rates: ArrayLike | None
) -> Workload:
    words = momentum != 0 or learning_rates is not None
    if sum((given is not None, optimizer is not None, words)) > 1:
        raise ArgumentError(
            "workload, optimizer, and momentum with learning_rates say the same thing: give one of them, got "
            + " and ".join(name for name, is_given in (
                ("workload", given is not None), ("optimizer", optimizer is not None),
                ("momentum or learning_rates", words),
            ) if is_given)
        )  # fmt: skip
    if scheduler is not None and optimizer is None:
        raise ArgumentError("scheduler must come with its optimizer; rates in numbers are learning_rates")
    if optimizer is not None:
        return from_optimizer(optimizer, scheduler, n)
    if given is None:
        return Workload(n, momentum=momentum, learning_rates=learning_rates)
    check_workload(given)
    if given.n != n:
        raise PlanError(f"workload must have as many steps as the order, {n}, got {given.n}")
    return given


# -- the noise -------------------------------------------------------------------------------------------------------


def _visits(rule: Participation) -> int:
    """The most steps of a unit that its claim counts: secret sampling is accounted by the step."""
    return 1 if rule.secret else rule.max_participations


def _noise(
    chosen: Strategy, rule: Participation, neighbours: str, delta: float, selection: Selection | None,
    method: Method | None, *,
    epsilon: float | None, noise_multiplier: float | None, sigma: float | None,
) -> tuple[float, Selection | None]:  # fmt: skip
    """(the least sigma that keeps (epsilon, delta), or that of the multiplier; the selection with its own)."""
    visits = _visits(rule)
    if epsilon is None:
        if sigma is None:
            assert noise_multiplier is not None
            sens = 1.0 if rule.secret else sensitivity(chosen, rule).value
            sigma = noise_multiplier / (sens * (1 + rounding(chosen, rule)))
        return sigma, for_sigma(sigma, selection, visits)
    match rule:
        case SampledOrder():
            total = rule.least_noise(chosen, epsilon, delta)
        case AmplifiedOrder():
            total = calibrate_amplified(chosen, rule, epsilon, delta, method, neighbours)
        case _ if not rule.secret:
            total = nextafter(NEIGHBOURS[neighbours] * accounting.calibrate_gaussian(epsilon, delta), inf)
        case _:
            raise PlanError(f"plans are not accounted for {rule.describe()}")

    def cost(sigma: float, beside: Selection) -> float:
        return plan_curve(sigma, chosen, rule, neighbours, "unit", beside).epsilon(delta)

    return for_epsilon(epsilon, total, selection, visits, cost)


def _default_grid(clip_norm: float) -> float:
    """The power of two at or below 2^-20 clip norms."""
    return float(2.0 ** (frexp(checks.positive("clip_norm", clip_norm))[1] - 21))
