"""The planner: finds the order, the mechanism and the noise, and joins them into a `Plan`."""

import contextlib
import re
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from math import ceil, exp, frexp, inf, ldexp, log, nextafter
from typing import Any, Literal, NamedTuple

from anyorder import checks
from anyorder._numerics import bisect, doubled, just_below
from anyorder.accounting.amplification.bound import calibrate_amplified, method_named
from anyorder.accounting.amplification.methods import Method, MonteCarlo
from anyorder.accounting.amplification.mixture import check_fits, reach
from anyorder.accounting.amplification.secret_order import AmplifiedOrder, SampledOrder, SecretOrder
from anyorder.accounting.curves import plan_curve
from anyorder.accounting.gaussian import NEIGHBOURS, calibrate_gaussian, gdp_epsilon
from anyorder.accounting.risk import Risk
from anyorder.accounting.selection import Selection, check_selection, for_epsilon, for_sigma, shared
from anyorder.errors import ArgumentError, NoiseWarning, PlanError
from anyorder.optimize import choose
from anyorder.optimize.amplified import NoAmplifiedFitError, best_cycle
from anyorder.optimize.candidates import MAX_COST, fit_named, rows_touched
from anyorder.participation import KnownOrder
from anyorder.participation.registry import WORDS, OrderWord, order_in_words, words_with
from anyorder.patterns import Participation, check_order, moves_others
from anyorder.plan.comparison import OrderComparison, compared
from anyorder.plan.options import (
    INSTEAD,
    SEVERAL,
    SGD,
    Limits,
    MechanismOptions,
    MechanismWord,
    Neighbours,
    OrderOptions,
    default_delta,
    limits_of,
    mechanism_options,
    order_options,
    says_instead,
)
from anyorder.plan.plan import (
    Plan,
    check_exact,
    check_neighbours,
    check_on_device,
    check_secret,
    check_selected,
    checked_method,
    number_of_units,
)
from anyorder.strategy import Independent, Strategy, Tree
from anyorder.strategy.base import Combination
from anyorder.strategy.registry import known_sensitivity, rounding, sensitivity
from anyorder.workload import Workload, from_optimizer
from anyorder.workload import check_kind as check_workload

_NOISE_BITS = 24


@says_instead(INSTEAD)
def plan(
    *,
    loader: Iterable[Any] | None = None,
    dataset_size: int | None = None,
    batch_size: int | None = None,
    epochs: int | None = None,
    order: OrderWord | Participation | OrderOptions | None = None,
    optimizer: Any = None,
    mechanism: MechanismWord | str | Strategy | MechanismOptions = "auto",
    epsilon: float | None = None,
    delta: float | None = None,
    noise_multiplier: float | None = None,
    risk: tuple[str, float] | tuple[str, float, float] | None = None,
    clip_norm: float = 1.0,
    unit: str | int | Callable[[Any], Any] = "example",
    neighbours: Neighbours = "zero-out",
    limits: Limits | None = None,
) -> Plan:
    """Make a `Plan`: choose the noise that keeps a privacy budget in an order of the data.

    The number of steps and the order come from one of: `loader` and `epochs`; `dataset_size`, `batch_size` and
    `epochs` with `order` in words; or a participation as the `order`, and `batch_size`.

    Args:
        loader: a torch DataLoader; its order is read off its sampler. With a unit other than "example" the data set is
            read once, and the plan is for the `KnownOrder` of its units.
        dataset_size: number of examples, public.
        batch_size: examples in a step; the constant that sums are divided by. With a loader it follows, in rows; a
            multiple of the loader's batch size joins so many of its batches in a step, as `make_private(accumulate=..)`
            does. With a loader and a unit it may also be less, in units of a step, which are fewer than its rows.
        epochs: passes over the data.
        order: with a loader None, or "poisson" where its sampler weights examples (torch's `WeightedRandomSampler` with
            replacement, whose weights are public; `anyorder.sampling.PoissonRates`): the claim is that of the largest
            rate. Else None for "shuffled" (again in each epoch; it covers "sequential" and "fixed" too), "sequential"
            or "fixed" (the same order in each epoch: less noise). Or secret sampling by this package's own sampler,
            whose batches have batch_size units on average: "poisson" (with independent noise: DP-SGD),
            "cyclic-poisson", "truncated-poisson", "balls-in-bins", "random-allocation", "min-separation-sampling"; see
            `anyorder.participation`. Or a `Participation`: the ledger holds the run to it, whatever the loader. Or
            either with its options: `anyorder.order`. Several orders are compared by `anyorder.compare`.
        optimizer: whose error is minimised: a `torch.optim.SGD`, `Adam` or `AdamW`, whose settings are read, see
            `anyorder.workload.from_optimizer`; `(optimizer, scheduler)` with the learning-rate scheduler that steps
            with it; `anyorder.SGD`, its settings in numbers; a `Workload`, for as many steps as the order has; None
            for plain SGD, and for optimizers that are none of these.
        mechanism: "auto" (least error for this workload and order; with a selection independent noise, since the others
            win by what later steps take back, which rows that are seldom released never get),
            "tree" (DP-FTRL), "independent" (DP-SGD's noise),
            a kind ("blt": the best of it) or a kind at its size ("dense", "banded, 64 bands", "blt, 2 buffers"; see
            `fit_named`), "poisson" (independent noise and order "poisson"), or a `Strategy`. Or one of these with its
            options: `anyorder.mechanism`.
        epsilon: target epsilon; the noise is the least that keeps (epsilon, delta). Or
        noise_multiplier: noise_std / clip_norm, as DP-SGD means it, and epsilon follows. Or
        risk: ("advantage", most), an attacker's TPR - FPR, or ("tpr", fpr, most): how many of those who took part it
            may find, as shares, where it wrongly accuses a share fpr of the others; the noise is the least that keeps
            it, and epsilon at delta follows. Exactly one of the three. It takes the whole curve: no samples.
        delta: target delta. Where it is left out and the data set's size is known, a tenth of one over that size,
            rounded down to one digit: 1e-6 for 60 000 examples.
        clip_norm: L2 bound on one unit's gradient in one step.
        unit: what is protected, in a word: see `Plan`. With a loader, the place of each example's unit in a batch, as
            in `make_private`: a field of a dict, a position in a tuple, a callable. A field's name is the plan's word;
            the others are called "user".
        neighbours: see `Plan`.
        limits: what the mechanism may keep and take: `anyorder.Limits`.
    Raises: ArgumentError for arguments that break their rule or do not go together; PlanError for parts that do not
        fit, and where no mechanism keeps to the memory. Warns (NoiseWarning) of a delta above one over the number of
        units: it allows the data of a whole unit to be published.
    Cost: that of the fit, seconds for 1000 steps; fits are kept on disk.
    """
    wanted = None if risk is None else Risk(risk)
    asked_for = {} if wanted is None else {"risk": wanted}
    budget = _budget(epsilon=epsilon, noise_multiplier=noise_multiplier, **asked_for)  # before a fit that may take long
    checks.choice("neighbours", neighbours, NEIGHBOURS)
    if delta is not None:
        delta = checks.probability("delta", delta)
    asked = mechanism_options(mechanism)
    ordered = order_options(order, asked)
    if loader is not None:
        steps = _read_loader(loader, epochs, batch_size, dataset_size, unit, order, neighbours)
    elif isinstance(ordered.order, Participation):
        steps = _given_order(ordered.order, epochs, batch_size, dataset_size)
    else:
        steps = _order_in_words(ordered, asked.mechanism, dataset_size, batch_size, epochs)
    delta = _delta(delta, steps)
    unit = _unit_in_words(unit, loader)
    work = _workload(steps.order.n, optimizer)
    target = {"epsilon": epsilon if wanted is None else gdp_epsilon(wanted.mu, delta) or None, "delta": delta}
    rule, chosen, on_device = _mechanism(asked, ordered, steps, work, limits_of(limits), target)
    if rule.secret and not rule.absence_moves_others and neighbours == "zero-out":
        neighbours = "add-or-remove"  # what the sampler's accounting is about
    _check_together(asked, rule, chosen, neighbours, on_device)
    found = _method(ordered.method, rule, chosen, neighbours)
    noise, selection = _noise(chosen, rule, neighbours, delta, asked.selection, found, **budget)
    return Plan(
        participation=rule, strategy=chosen, workload=work, clip_norm=clip_norm, delta=delta, sigma=noise,
        batch_size=steps.batch_size, unit=unit, neighbours=neighbours, dataset_size=steps.dataset_size,
        grid=_default_grid(clip_norm) if asked.secure else None, on_device=on_device, selection=selection,
        method=found,
    )  # fmt: skip


@says_instead(SEVERAL)
def compare(
    order: OrderOptions | Literal["any"] | Sequence[OrderWord | OrderOptions] = "any",
    *,
    dataset_size: int,
    batch_size: int,
    epochs: int,
    optimizer: Any = None,
    mechanism: MechanismWord | str | Strategy | MechanismOptions = "auto",
    epsilon: float,
    delta: float | None = None,
    clip_norm: float = 1.0,
    unit: str = "example",
    neighbours: Neighbours = "zero-out",
    limits: Limits | None = None,
    progress: Callable[[str], None] | None = None,
) -> OrderComparison:
    """Plan several orders at one (epsilon, delta) and one expected batch size, and rank them by the error of the
    weights during training.

    Each order has the mechanism that is best for it, fitted to its own claim: the amplified one where batches are drawn
    by secret draws. What an order needs is shown with it; an order whose needs are not met has no claim.

        ao.compare(["shuffled", "fixed"], dataset_size=60000, batch_size=500, epochs=5, epsilon=2, delta=1e-5)

    Args:
        order: words as of `plan`, or such words with their options (`anyorder.order`), or "any" for all that can be
            planned with what is given. Without a cycle the best is found.
        dataset_size, batch_size, epochs, optimizer, mechanism, epsilon, delta, clip_norm, unit, neighbours, limits: of
            all plans; see `plan`.
        progress: called with each order's word before it is planned.
    Returns: a table, the least error first, which prints itself; its `best` is the plan of least error. Of "any", also
        the orders that do not fit, with the reason.
    Raises: ArgumentError; PlanError where no order can be planned, or one that was named; MissingDependencyError where
        one that was named needs a library.
    Cost: that of each plan, up to a minute for an order of 2000 steps; fits are kept on disk.
    """
    shared = {
        "dataset_size": dataset_size, "batch_size": batch_size, "epochs": epochs, "optimizer": optimizer,
        "mechanism": mechanism, "epsilon": epsilon, "delta": delta, "clip_norm": clip_norm, "unit": unit,
        "neighbours": neighbours, "limits": limits,
    }  # fmt: skip
    return compared(plan, order, shared, progress)


def plan_at_sigma(sigma: float, **given: Any) -> Plan:
    """The plan of these keywords of `plan` with noise_std = sigma * clip_norm * sens, whatever epsilon that is.

    sigma is 1 / mu (2 / mu for replace-one): noise against the whole sensitivity, by which plans are scaled.
    """
    base = plan(**given, noise_multiplier=1.0)
    sigma = checks.positive("sigma", sigma)
    selection = mechanism_options(given.get("mechanism", "auto")).selection
    return replace(base, sigma=sigma, selection=for_sigma(sigma, selection, _visits(base.participation)))


def with_budget(
    base: Plan, *, epsilon: float | None = None, noise_multiplier: float | None = None, sigma: float | None = None
) -> Plan:
    """The plan with as much noise as another budget asks for; exactly one, see `plan`. A selection keeps its share."""
    budget = _budget(epsilon=epsilon, noise_multiplier=noise_multiplier, sigma=sigma)
    kept = shared(base.selection, base.sigma, _visits(base.participation))
    noise, selection = _noise(
        base.strategy, base.participation, base.neighbours, base.delta, kept, base.method, **budget
    )
    return replace(base, sigma=noise, selection=selection)


def _budget(**given: Any) -> dict[str, Any]:
    """By name: one number above 0, or a risk, the others None."""
    if sum(value is not None for value in given.values()) != 1:
        *names, last = given
        raise ArgumentError(f"exactly one of {', '.join(names)} and {last} must be given, got {given}")
    free = (type(None), Risk)
    checked = {name: value if type(value) in free else checks.positive(name, value) for name, value in given.items()}
    return {"epsilon": None, "noise_multiplier": None, "sigma": None, "risk": None, **checked}


# -- the order -------------------------------------------------------------------------------------------------------


_SIZES = (
    "an order is given for a plan by dataset_size, batch_size and epochs, and secret sampling (order='poisson') is "
    "planned so"
)


class _Steps(NamedTuple):
    """Of a plan: who takes part when, what sums are divided by, and how many units there are, where it is known."""

    order: Participation
    batch_size: int
    dataset_size: int | None


def _read_loader(
    loader: Iterable[Any], epochs: int | None, batch_size: int | None, dataset_size: int | None, unit: Any, order: Any,
    neighbours: str,
) -> _Steps:  # fmt: skip
    from anyorder.sampling.read_loader import find_participation, find_rates  # the only one here that needs torch

    is_drawn = order in ("poisson", OrderOptions("poisson"))
    if not is_drawn and order not in (None, "shuffled", OrderOptions("shuffled")):
        raise ArgumentError(
            f"order must not be given together with loader, which says it, got order={order!r}; {_SIZES}"
        )
    if epochs is None:
        raise ArgumentError("epochs must be given together with loader")
    key = None if isinstance(unit, str) and unit == "example" else unit
    drawn = find_rates(loader, epochs) if is_drawn else None
    if is_drawn and (drawn is None or key is not None):
        raise ArgumentError(
            "order='poisson' goes with loader= where its sampler, torch's WeightedRandomSampler with replacement or "
            f"anyorder.sampling.PoissonRates, says the rates of examples, and for unit='example'; {_SIZES}"
        )
    found = drawn or find_participation(loader, epochs, unit=key)
    rows, size = found.batch_size, found.batch_size
    if drawn is not None and batch_size not in (None, size):
        raise ArgumentError(
            f"batch_size must be that of the loader, {size}, which the rates of its examples make, got {batch_size!r}: "
            "make the loader with the batch size of a step, and bound memory by make_private(accumulate=..)"
        )
    if batch_size is not None:
        size = checks.integer("batch_size", batch_size, low=1)
        if size % rows and (key is None or size > rows):
            raise ArgumentError(
                f"batch_size must be left out with loader=, or be a multiple of the {rows} examples of its batches, "
                f"as many as make a step, got {size}: for other steps, make the loader with another batch_size"
            )
        if size > rows:
            found = find_participation(loader, epochs, unit=key, accumulate=size // rows)
    if dataset_size not in (None, found.dataset_size):
        raise ArgumentError(
            f"dataset_size must be left out with loader=, whose order has {found.dataset_size} examples, got "
            f"{dataset_size!r}: make the loader of the data set that is meant"
        )
    if neighbours == "add-or-remove" and type(found.participation) is KnownOrder:
        raise moves_others("an order that was read off a loader")
    return _Steps(found.participation, size, found.dataset_size)


def _given_order(order: Participation, epochs: int | None, batch_size: int | None, dataset_size: int | None) -> _Steps:
    check_order(order)
    if epochs is not None:
        raise ArgumentError(
            f"epochs must not be given together with an order, which says all steps, got epochs={epochs!r}"
        )
    if batch_size is None:
        raise ArgumentError("batch_size must be given: it is the constant that gradient sums are divided by")
    return _Steps(order, batch_size, dataset_size)


def _order_in_words(
    asked: OrderOptions, mechanism: str | Strategy, dataset_size: int | None, batch_size: int | None, epochs: int | None
) -> _Steps:
    word = asked.order
    assert isinstance(word, str)
    cycle = _cycle_of(mechanism, asked.cycle, word)
    order = _participation(word, dataset_size, batch_size, epochs, asked.drop_last, cycle, asked.max_batch_size)
    assert batch_size is not None  # or refused
    return _Steps(order, batch_size, dataset_size)


def _delta(given: float | None, steps: _Steps) -> float:
    """As given, or by the number of units."""
    units = number_of_units(steps.order, steps.dataset_size)
    if given is None:
        if units is None:
            raise ArgumentError(
                "delta must be given where the number of units is not known, got None: take at most a tenth of one "
                "over it, or pass dataset_size"
            )
        return default_delta(checks.integer("dataset_size", units, low=1))
    if units is not None and given > 1 / units:
        warnings.warn(
            f"delta {given:g} is above one over the {units} units of the data set: a mechanism that publishes a whole "
            f"unit keeps such a promise. Take delta {default_delta(units):g} or less",
            NoiseWarning, stacklevel=4,
        )  # fmt: skip
    return given


def _unit_in_words(unit: str | int | Callable[[Any], Any], loader: Any) -> str:
    if isinstance(unit, str):
        return unit
    if loader is None:
        raise ArgumentError(f"unit must be a word such as 'user' where no loader is given, got {unit!r}")
    return "user"


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


# -- the optimizer and the mechanism ---------------------------------------------------------------------------------


def _workload(n: int, optimizer: Any) -> Workload:
    """A for n steps."""
    if optimizer is None:
        return Workload(n)
    if type(optimizer) is SGD:
        return optimizer.workload(n)
    if isinstance(optimizer, Workload):
        check_workload(optimizer)
        if optimizer.n != n:
            raise PlanError(f"workload must have as many steps as the order, {n}, got {optimizer.n}")
        return optimizer
    if not isinstance(optimizer, tuple):
        return from_optimizer(optimizer, None, n)
    if len(optimizer) != 2:
        raise ArgumentError(f"optimizer must be (optimizer, scheduler) where it is a tuple, got {optimizer!r}")
    return from_optimizer(*optimizer, n)


def _mechanism(
    asked: MechanismOptions, ordered: OrderOptions, steps: _Steps, work: Workload, limits: Limits,
    target: dict[str, Any],
) -> tuple[Participation, Strategy, tuple[str, ...]]:  # fmt: skip
    """The order, with the cycle that suits the claim where it is free; the strategy; what devices are trusted with."""
    rule, selected = steps.order, asked.selection is not None
    on_device = check_on_device(asked.on_device, rule)  # this and the next before a fit that may take long
    if selected:
        check_selection(asked.selection)
    cost = None if limits.max_cost is None else checks.real("max_cost", limits.max_cost, low=1.0)
    state = vectors(limits.memory, limits.model_size, asked.secure)
    by_word = isinstance(ordered.order, str) and WORDS[ordered.order][1].cycle_is_chosen
    if asked.mechanism == "auto" and by_word and ordered.cycle is None:
        rule = with_best_cycle(rule, work, target["epsilon"], target["delta"], asked.objective, cost)
    if selected:
        state = None  # noise that keeps anything is refused, whatever memory there is
    chosen = strategy_of(
        asked.mechanism, work, rule, asked.secure, selected, asked.objective, Allowed(state, cost), asked.tree, target
    )
    return rule, chosen, on_device


def _check_together(
    asked: MechanismOptions, rule: Participation, chosen: Strategy, neighbours: str, on_device: tuple[str, ...]
) -> None:
    """The parts fit; before a calibration that may take long."""
    if asked.secure:
        check_exact(neighbours, chosen)
    check_selected(asked.selection, chosen, asked.secure, on_device)
    check_secret(rule, asked.secure, asked.selection)
    check_neighbours(neighbours, rule, chosen)


def _method(asked: str | Method | None, rule: Participation, chosen: Strategy, neighbours: str) -> Method | None:
    """How the claim is found."""
    if asked is None or not isinstance(rule, AmplifiedOrder):
        return checked_method(asked, rule, chosen, neighbours)  # which refuses one where there is no choice
    return checked_method(method_named(asked, chosen, rule), rule, chosen, neighbours)


# -- the noise -------------------------------------------------------------------------------------------------------


def _visits(rule: Participation) -> int:
    """The most steps of a unit that its claim counts: secret sampling is accounted by the step."""
    return 1 if rule.secret else rule.max_participations


def _noise(
    chosen: Strategy, rule: Participation, neighbours: str, delta: float, selection: Selection | None,
    method: Method | None, *,
    epsilon: float | None, noise_multiplier: float | None, sigma: float | None, risk: Risk | None,
) -> tuple[float, Selection | None]:  # fmt: skip
    """(the least sigma that keeps (epsilon, delta) or the risk, or that of the multiplier; the selection's own)."""
    visits = _visits(rule)
    if risk is not None:
        return _noise_of_risk(chosen, rule, neighbours, selection, method, risk)
    if epsilon is None:
        if sigma is None:
            assert noise_multiplier is not None
            sens = 1.0 if rule.secret else sensitivity(chosen, rule).value
            sigma = noise_multiplier / (sens * (1 + rounding(chosen, rule)))
        return sigma, for_sigma(sigma, selection, visits)
    match rule:
        case SampledOrder():
            total = _rounded_up(rule.least_noise(chosen, epsilon, delta))
        case AmplifiedOrder():
            total = _rounded_up(calibrate_amplified(chosen, rule, epsilon, delta, method, neighbours))
        case _ if not rule.secret:
            total = nextafter(NEIGHBOURS[neighbours] * calibrate_gaussian(epsilon, delta), inf)
        case _:
            raise PlanError(f"plans are not accounted for {rule.describe()}")

    if selection is None:
        return total, None

    def cost(sigma: float, beside: Selection) -> float:
        return plan_curve(sigma, chosen, rule, neighbours, "unit", beside).epsilon(delta)

    return for_epsilon(epsilon, total, selection, visits, cost)


def _rounded_up(noise: float) -> float:
    """To 24 binary digits: what a search finds differs in the tenth digit between processors; more noise is safe."""
    mantissa, exponent = frexp(noise)
    return ldexp(ceil(ldexp(mantissa, _NOISE_BITS)), exponent - _NOISE_BITS)


def _noise_of_risk(
    chosen: Strategy, rule: Participation, neighbours: str, selection: Selection | None, method: Method | None,
    risk: Risk,
) -> tuple[float, Selection | None]:  # fmt: skip
    """The same for a risk."""
    if type(method) is MonteCarlo:
        raise PlanError(
            "risk= needs the whole curve, and samples hold for one delta: leave out method='monte_carlo', or give "
            "epsilon="
        )

    def reached(sigma: float, beside: Selection | None = None) -> float:
        return risk.of(plan_curve(sigma, chosen, rule, neighbours, "unit", beside, method))

    # As much noise as keeps it where the order is known; a secret order needs no more.
    sens = known_sensitivity(chosen, rule).value if rule.secret else 1.0
    known = nextafter(NEIGHBOURS[neighbours] * sens / risk.mu * (1 + 2.0**-50), inf)
    total = known if not rule.secret else _rounded_up(_least_sigma(reached, risk.most, known))
    return for_epsilon(risk.most, total, selection, _visits(rule), reached)


def _least_sigma(reached: Callable[[float], float], most: float, known: float) -> float:
    """The least sigma that keeps `most`, within 1e-6 of it, below `known` which does."""
    found = just_below(lambda x: reached(exp(x)) / most - 1, log(known), -1.0, 1e-6)
    if found is not None:
        return exp(found[0])
    outside, inside = doubled(lambda less: reached(known / less) > most, 1.0, 2.0, most=2.0**40)
    return bisect(lambda sigma: reached(sigma) <= most, inside=known / outside, outside=known / inside, relative=1e-6)


def _default_grid(clip_norm: float) -> float:
    """The power of two at or below 2^-20 clip norms."""
    return float(2.0 ** (frexp(checks.positive("clip_norm", clip_norm))[1] - 21))


# ----------------------------------------------------------------------------------------------------
# The mechanism of a plan: from words or a strategy, within a memory and a cost, fitted to the order and its claim.


class Allowed(NamedTuple):
    """What a mechanism may keep and take; None for what was not asked."""

    state: int | None
    cost: float | None

    @property
    def chosen_cost(self) -> float:
        return MAX_COST if self.cost is None else self.cost


def strategy_of(
    mechanism: str | Strategy, work: Workload, order: Participation, secure: bool, selected: bool, objective: str,
    limits: Allowed, tree: dict[str, Any], claim: dict[str, Any],
) -> Strategy:  # fmt: skip
    if tree and mechanism != "tree":
        raise ArgumentError(f"{', '.join(tree)} must come with mechanism 'tree' only, got {mechanism!r}")
    if isinstance(mechanism, Strategy):
        if objective != "mean":
            raise ArgumentError(f"objective must not be given together with a Strategy, which is fitted: {mechanism!r}")
        return _within(mechanism, limits, selected)
    if type(mechanism) is not str:
        raise ArgumentError(f"mechanism must be a text or a Strategy, got {mechanism!r}")
    checks.choice("objective", objective, {"mean", "max", "last"})
    if order.draw_probability is not None:
        if mechanism not in ("auto", "independent", "poisson"):
            raise PlanError(
                f"secret sampling (order 'poisson') is for mechanism 'poisson' only: mechanism {mechanism!r} has no "
                "amplified accounting; use order 'shuffled', or 'independent'"
            )
        return Independent(order.n)
    if mechanism == "poisson":
        raise PlanError(f"mechanism 'poisson' needs secret sampling (order='poisson'), got {order.describe()}")
    if order.secret and mechanism in ("auto", "independent"):
        return _secret_auto(work, order, limits, objective, claim) if mechanism == "auto" else Independent(order.n)
    if mechanism == "auto" and selected:
        # Errors are those of a row that every step releases. One that few steps release has no later noise that takes
        # back the earlier, and the larger noise of each step.
        return Independent(order.n)
    if mechanism == "auto":
        known = choose(work, order, limits.state, objective, max_cost=limits.chosen_cost)
        return next(one.strategy for one in known if not secure or isinstance(one.strategy, Combination))
    found = _fit_named(mechanism, work, order, objective, limits, tree, claim)
    if type(found) is Tree and (selected or limits.state == 0):
        found = Tree(found.n, found.estimator, found.restarts, found.completion, regenerate=True)
    return _within(found, limits, selected)


def _fit_named(
    mechanism: str, work: Workload, order: Participation, objective: str, limits: Allowed, tree: dict[str, Any],
    claim: dict[str, Any],
) -> Strategy:  # fmt: skip
    """Fitted to the amplified claim where the order has one and the kind such a fit, else to steps without draws."""
    budget: dict[str, Any] = {"max_state": limits.state, "max_cost": limits.chosen_cost, "objective": objective}
    if order.secret and claim["epsilon"] is not None and not tree:
        with contextlib.suppress(NoAmplifiedFitError):
            return fit_named(mechanism, work, order, **budget, **claim)
    return fit_named(mechanism, work, order.without_draws(), **budget, **tree)


def with_best_cycle(
    rule: Participation, work: Workload, epsilon: float | None, delta: float, objective: str,
    max_cost: float | None,
) -> Participation:  # fmt: skip
    """Of cyclic and truncated sampling that were planned without groups, with as many as suit the claim."""
    assert isinstance(rule, SecretOrder)  # of those with `cycle_is_chosen`
    if epsilon is None:
        raise ArgumentError(
            "epsilon must be given with order 'cyclic-poisson' and mechanism 'auto', by which the cycle is chosen; or "
            "take a mechanism with bands, such as 'banded toeplitz, 8 bands', or a cycle"
        )
    cycle = best_cycle(work, rule.rate, epsilon, delta, objective, most=MAX_COST if max_cost is None else max_cost)
    return rule.with_cycle(cycle)


def _secret_auto(
    work: Workload, order: Participation, limits: Allowed, objective: str, claim: dict[str, Any]
) -> Strategy:
    """The mechanism of least error at the amplified claim; without an epsilon, for the order's steps without draws."""
    if claim["epsilon"] is not None:
        return choose(work, order, limits.state, objective, max_cost=limits.chosen_cost, **claim)[0].strategy
    found = choose(work, order.without_draws(), limits.state, objective, max_cost=limits.chosen_cost)
    for one in found:
        try:
            check_fits(one.strategy, order)
        except PlanError:  # accounted for other orders
            continue
        return one.strategy
    return Independent(order.n)


def _within(found: Strategy, limits: Allowed, selected: bool) -> Strategy:
    """The strategy, if it keeps to what was asked of it."""
    if selected and found.state_rows:
        raise _keeps(f"{found.describe()} keeps {found.state_rows} vectors")
    if limits.state is not None and found.state_rows > limits.state:
        raise PlanError(
            f"memory allows the mechanism {limits.state} vectors of the model's size, but {found.describe()} "
            f"keeps {found.state_rows}; give more, or mechanism 'auto'"
        )
    if limits.cost is not None and rows_touched(found) > limits.cost:
        raise PlanError(
            f"max_cost allows {limits.cost:g} rows a step, but {found.describe()} takes {rows_touched(found):.3g}; "
            "give more, or mechanism 'auto'"
        )
    return found


def _keeps(got: str) -> PlanError:
    return PlanError(
        "a selection needs noise that is made for the chosen rows alone, without a state between steps: mechanism "
        f"'independent' (or 'auto'), 'banded inverse' or 'tree', got {got}"
    )


_BYTES = re.compile(r"([0-9]+(?:\.[0-9]+)?) ?([kMGT]i?)?B")
_UNITS = {None: 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12,
          "ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}  # fmt: skip


def vectors(memory: int | str | None, model_size: int | None, secure: bool) -> int | None:
    """Vectors of the model's size that the memory holds."""
    if memory is None:
        if model_size is not None:
            raise ArgumentError("model_size must come with memory in bytes, such as '2 GB', which it turns to vectors")
        return None
    if secure:
        raise ArgumentError("memory must not be given with secure: exact integers keep no vectors; see print(plan)")
    if not isinstance(memory, str):
        if model_size is not None:
            raise ArgumentError(f"model_size must come with memory in bytes, such as '2 GB', got memory={memory!r}")
        return checks.integer("memory", memory, low=0)
    found = _BYTES.fullmatch(memory)
    if found is None:
        raise ArgumentError(f"memory must be a number of vectors, or bytes such as '512 MB' or '2 GiB', got {memory!r}")
    if model_size is None:
        raise ArgumentError(f"model_size must be given with memory in bytes, got memory={memory!r}")
    return int(float(found[1]) * _UNITS[found[2]] / (4 * checks.integer("model_size", model_size, low=1)))
