"""The plan: workload, participation, strategy, clip norm and noise joined into one frozen, printable, saved claim."""

import hashlib
import warnings
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from math import inf, nextafter
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from anyorder import checks, patterns, workload
from anyorder.accounting import gdp_epsilon
from anyorder.accounting import selection as selections
from anyorder.accounting.amplification import methods
from anyorder.accounting.amplification.claims import check_method_fits, check_relation, default_method
from anyorder.accounting.amplification.methods import Method, MonteCarlo, check_method
from anyorder.accounting.amplification.mixture import check_fits
from anyorder.accounting.amplification.monte_carlo import REPLAY
from anyorder.accounting.amplification.secret_order import AmplifiedOrder, SecretOrder
from anyorder.accounting.curves import Curve, plan_curve
from anyorder.accounting.gaussian import NEIGHBOURS
from anyorder.accounting.risk import Reach, point_reach, reach
from anyorder.accounting.selection import Counts, Selection, Top, check_selection, refuse_selection, step_mu
from anyorder.checks import final
from anyorder.errors import ArgumentError, CertificateError, PlanError
from anyorder.formats import bounded, brief, canonical, check_names, html_table, load_json, quoted, save_json
from anyorder.formatting import counted, rounded_up
from anyorder.noise.discrete import check_combination, check_grid
from anyorder.participation import KnownOrder
from anyorder.participation.known_order import without_names
from anyorder.patterns import Participation, check_order
from anyorder.plan import pictures
from anyorder.plan.cost import check_plan
from anyorder.plan.options import default_delta
from anyorder.strategy import Independent, Strategy
from anyorder.strategy.base import Combination
from anyorder.strategy.registry import check_kind as check_strategy
from anyorder.strategy.registry import from_dict as strategy_from_dict
from anyorder.strategy.registry import (
    has_variances,
    known_sensitivity,
    rounding,
    row_variances,
    sensitivity,
    unit_sensitivities,
)
from anyorder.strategy.sensitivity import Bound
from anyorder.workload import Workload, prefix_sum

CANDIDATE = "one candidate of a search: the search's certificate tells what was spent"
"""What is said wherever such a plan is shown."""
FORMAT = "anyorder-plan/2"
_NEIGHBOUR_TEXTS = {
    "zero-out": "its gradients replaced by zero",
    "replace-one": "replaced by any other in the same steps",
    "add-or-remove": "with or without it",
}
_CLAIMS = ("sensitivity", "sensitivity_exact", "noise_std", "mu", "epsilon")


@final
@dataclass(frozen=True, kw_only=True)
class Plan:
    """A plan: what is released, with how much noise, in which order, and the (epsilon, delta) that follows.

    Each of n steps releases `sum of clipped unit gradients + noise_std * (K Z)[t]`, then divides by `batch_size`.

        noise_std = sigma * clip_norm * sens(C, participation) * (1 + rounding)
        mu = f / sigma,  f = 1 (zero-out, add-or-remove) or 2 (replace-one)        Gaussian DP, exact

    `rounding` covers that coefficients are rounded to float32 when noise is made; see `anyorder.strategy.sensitivity`.

    Where steps are drawn in secret, noise_std = sigma * clip_norm * (1 + rounding), epsilon comes from the
    amplified claim, and mu does not exist; `known_epsilon` is what is left if the batches became known. See
    `anyorder.accounting.amplification`.

    Attributes:
        sigma: noise against the whole sensitivity, unitless. `noise_multiplier` is against the clip norm alone.
        batch_size: the public constant that sums are divided by.
        unit: what is protected, in a word: "example", or whom `make_private(unit=..)` names: "user", ..
        neighbours: "zero-out" (one unit's gradients replaced by zero), "replace-one", or "add-or-remove" (only
            where the absence of a unit moves no other: PoissonSampling, BallsInBins, RandomAllocation,
            MinSeparationSampling, MinSeparation, KnownOrder).
        dataset_size: number of units where it is known and public.
        grid: None for noise in floating point; a power of two for exact integers ("secure"): each unit's clipped
            gradient is truncated, and the noise of a step rounded, to multiples of grid. That is post-processing of
            the real-valued mechanism on truncated gradients, so all claims stay. For strategies that are a
            `Combination` (Independent, Tree, BandedInverse, ..), and neighbours that leave batches their size.
        on_device: what is trusted to the users' own devices, of "clipping" (who carries the plan out sees sums alone)
            and "record" (it learns no ids: devices count and time their own messages, for SingleEpoch and
            MinSeparation). The claim then holds if the devices keep to it. Empty for nothing.
        selection: which rows of sparse tables get noise, chosen at each step by `Counts`, `Top` or `Uniform`, as a part
            of the claim: mu, `curve` and epsilon are those of both, sigma, `sensitivity` and `noise_std` of the release
            alone. None: every row gets noise. See `anyorder.accounting.selection`.
        method: how epsilon is found where an order by secret draws leaves a choice, see `amplification.methods`;
            None in a plan that leaves none, and for the order's own where one is made.
        candidate_of: of a plan that a search for settings hands to its runs, the search's `key_fingerprint`: what one
            of them shows was chosen among others, so that its epsilon is no price. None for every other plan.
        digest: sha256 of everything that the plan fixes; noise keys are bound to it. It follows from the others.
    """

    participation: Participation
    strategy: Strategy
    workload: Workload
    clip_norm: float
    sigma: float
    delta: float
    batch_size: int
    unit: str = "example"
    neighbours: str = "zero-out"
    dataset_size: int | None = None
    grid: float | None = None
    on_device: tuple[str, ...] = ()
    selection: Selection | None = None
    method: Method | None = None
    candidate_of: str | None = None
    digest: str = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_order(self.participation)
        check_strategy(self.strategy)
        workload.check_kind(self.workload)
        for name, check in (("clip_norm", checks.positive), ("sigma", checks.positive), ("delta", checks.probability)):
            object.__setattr__(self, name, check(name, getattr(self, name)))  # a float, whatever number it was
        checks.integer("batch_size", self.batch_size, low=1)
        checks.choice("neighbours", self.neighbours, NEIGHBOURS)
        checks.word("unit", self.unit)
        if self.candidate_of is not None:
            checks.fingerprint("candidate_of", self.candidate_of)
        if self.dataset_size is not None:
            checks.integer("dataset_size", self.dataset_size, low=1)
        lengths = {"participation": self.participation.n, "strategy": self.strategy.n, "workload": self.workload.n}
        if len(set(lengths.values())) != 1:
            raise PlanError(f"participation, strategy and workload must have the same number of steps, got {lengths}")
        check_neighbours(self.neighbours, self.participation, self.strategy)
        object.__setattr__(self, "on_device", check_on_device(self.on_device, self.participation))
        if self.selection is not None:
            check_selection(self.selection, with_sigma=True)
        check_selected(self.selection, self.strategy, self.grid is not None, self.on_device)
        check_secret(self.participation, self.grid is not None, self.selection)
        object.__setattr__(
            self, "method", checked_method(self.method, self.participation, self.strategy, self.neighbours)
        )
        if self.grid is not None:
            check_exact(self.neighbours, self.strategy)
        # What a run rests on follows now, its noise and its name: a plan that is made can be run.
        noise_std = self.noise_std
        if self.grid is not None:
            check_grid(self.grid, self.clip_norm, noise_std)
        object.__setattr__(self, "digest", _digest(self.to_dict()))

    @property
    def n(self) -> int:
        """Number of steps."""
        return self.participation.n

    @property
    def amplified(self) -> bool:
        """True if the epsilon rests on secret draws of who takes part."""
        return self.participation.secret

    @cached_property
    def sensitivity(self) -> Bound:
        """sens(C, participation) for clip norm 1; 1 where draws are secret, whose claim is no sensitivity."""
        secret = self.participation.secret  # accounted by the step, not by the sensitivity of the whole
        return Bound(1.0, True) if secret else sensitivity(self.strategy, self.participation)

    @cached_property
    def rounding(self) -> float:
        """By how much, relatively, float32 coefficients may raise the sensitivity; 0 for independent noise."""
        return rounding(self.strategy, self.participation)

    @cached_property
    def noise_std(self) -> float:
        """Standard deviation of each entry of the noise std * Z, in gradient units; rounded up."""
        return nextafter(self.sigma * self.clip_norm * self.sensitivity.value * (1 + self.rounding), inf)

    @property
    def noise_multiplier(self) -> float:
        """noise_std / clip_norm, as DP-SGD means it, and Kairouz et al. 2021 at each node of a tree."""
        return self.noise_std / self.clip_norm

    @property
    def selection_std(self) -> float | None:
        """Standard deviation of the noise on a step's counts, in counts; rounded up. None but for `Counts`."""
        chosen = self.selection
        if type(chosen) is not Counts or chosen.sigma is None:
            return None
        visits = 1.0 if self.participation.secret else sensitivity(Independent(self.n), self.participation).value
        return nextafter(chosen.sigma * chosen.count_norm * visits, inf)

    @property
    def selection_scale(self) -> float | None:
        """Scale of the Gumbel noise on a step's scores, rounded up. None but for `Top`."""
        chosen = self.selection
        if type(chosen) is not Top or chosen.sigma is None:
            return None
        return nextafter(chosen.sigma * chosen.score_norm, inf)

    @cached_property
    def curve(self) -> Curve:
        """epsilon(delta) and delta(epsilon) of the whole plan; `anyorder.compose` joins it with those of others."""
        return plan_curve(
            self.sigma, self.strategy, self.participation, self.neighbours, self.unit, self.selection, self.method
        )

    @property
    def mu(self) -> float | None:
        """Gaussian DP parameter, where the plan's curve has one; see `curve`."""
        return self.curve.mu

    @cached_property
    def epsilon(self) -> float:
        """The smallest epsilon that holds at `delta`, rounded up."""
        return self.curve.epsilon(self.delta)

    @cached_property
    def reach(self) -> Reach:
        """The success of the strongest attacker, as the card shows it; `curve` has its methods for any rate and prior.

        Of a claim by samples, which have one point, what follows from that point, or from known batches.
        """
        if type(self.method) is MonteCarlo:
            return point_reach(self.epsilon, self.delta, self.known_mu)
        return reach(self.curve)

    @cached_property
    def known_epsilon(self) -> float | None:
        """The epsilon if all batches became known, at `delta`, rounded up; None where no draws are secret."""
        return None if self.known_mu is None else gdp_epsilon(self.known_mu, self.delta)

    @cached_property
    def known_mu(self) -> float | None:
        """Gaussian DP if all batches became known, rounded up; None where no draws are secret.

        mu = f sens(C, pattern) / sigma, of any steps that the draws may give. It applies to those who do not know the
        batches too, who see less.
        """
        if not self.participation.secret:
            return None
        sens = known_sensitivity(self.strategy, self.participation).value
        released = NEIGHBOURS[self.neighbours] * sens / self.sigma
        if self.selection is not None:
            visits = known_sensitivity(Independent(self.n), self.participation).value
            released = float(np.hypot(released, step_mu(self.selection, self.neighbours, self.selection_std) * visits))
        return nextafter(released * (1 + 2.0**-50), inf)

    def unit_mus(self, order: KnownOrder | None = None) -> NDArray[np.float64]:
        """(units,) mu of each unit's own steps, in the order of `participation.units`; the plan's is the largest.

        How many steps a unit has is public in a known order; who it is, is not: keep the two apart.

        Args:
            order: who is in which step, within the plan's rule; needed where that does not name its units. Under
                secret sampling mu is then against those who know the steps: no amplification is left.
        Raises: PlanError for participations that do not name their units.
        """
        order = self.participation if order is None and type(self.participation) is KnownOrder else order
        if order is None:
            raise PlanError("unit_mus() needs a plan for a KnownOrder; in other orders every unit has the plan's mu")
        own = unit_sensitivities(self.strategy, order) * (1 + self.rounding)
        released = np.asarray(NEIGHBOURS[self.neighbours] * self.clip_norm / self.noise_std * own)
        if self.selection is None:
            return released
        visits = unit_sensitivities(Independent(self.n), order)
        return np.asarray(np.hypot(released, step_mu(self.selection, self.neighbours, self.selection_std) * visits))

    @property
    def reaches_iterates(self) -> bool:
        """True if the noise in the weights during training can be computed: up to 4096 steps always, beyond for some
        structures.
        """
        return has_variances(self.strategy, self.workload)

    def noise_profile(self, *, sums: bool = False) -> NDArray[np.float64]:
        """(n,) std of the noise of one coordinate of each iterate, in clip norms, for learning rate 1 and batch size 1.

            std[t] = noise_multiplier * || (A K)[t] ||

        Args:
            sums: of each prefix sum of gradients instead, as if A were the prefix sum: no momentum, no schedule.
        Raises: PlanError where the noise of the weights during training cannot be computed, see `reaches_iterates`.
        """
        variances = row_variances(self.strategy, prefix_sum(self.n) if sums else self.workload)
        return np.asarray(self.noise_multiplier * np.sqrt(variances))

    def noise_error(self, *, sums: bool = False) -> float:
        """The root mean square of `noise_profile` over steps."""
        return float(np.sqrt(np.square(self.noise_profile(sums=sums)).mean()))

    def to_dict(self) -> dict[str, Any]:
        """Return what the plan fixes, as JSON values; what follows from it is in `claims`.

        "on_device", "selection", "method" and "candidate_of" are there where something is trusted to devices, where
        rows are selected, where the claim has a method, and in runs of a search: without them a plan has the digest
        that it always had.
        """
        fixed = {
            "participation": self.participation.to_dict(),
            "strategy": self.strategy.to_dict(),
            "workload": self.workload.to_dict(),
            "clip_norm": self.clip_norm,
            "sigma": self.sigma,
            "delta": self.delta,
            "batch_size": self.batch_size,
            "unit": self.unit,
            "neighbours": self.neighbours,
            "dataset_size": self.dataset_size,
            "grid": self.grid,
        }
        devices = {"on_device": list(self.on_device)} if self.on_device else {}
        selected = {} if self.selection is None else {"selection": selections.to_dict(self.selection)}
        method = {} if self.method is None else {"method": methods.to_dict(self.method)}
        searched = {} if self.candidate_of is None else {"candidate_of": self.candidate_of}
        return fixed | devices | selected | method | searched

    def claims(self) -> dict[str, Any]:
        """Return what follows from the plan; a verifier recomputes it."""
        values = (self.sensitivity.value, self.sensitivity.exact, self.noise_std, self.mu, self.epsilon)
        noises = {"selection_std": self.selection_std, "selection_scale": self.selection_scale}
        claimed: dict[str, Any] = {name: value for name, value in noises.items() if value is not None}
        if self.participation.secret and self.participation.draw_probability is None:
            claimed["known_epsilon"] = self.known_epsilon
        return {**dict(zip(_CLAIMS, values, strict=True)), **claimed}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> "Plan":
        """The plan that `to_dict` described. Raises CertificateError where the data is malformed.

        What it makes must be described by the same data again: no unknown field, no number as text.
        """
        names = {f.name for f in fields(cls) if f.init}
        if isinstance(data, dict):
            names -= {"on_device", "selection", "method", "candidate_of"} - data.keys()
        check_names("plan", data, names)
        try:
            parts = {
                "participation": patterns.from_dict(data["participation"]),
                "strategy": strategy_from_dict(data["strategy"]),
                "workload": workload.from_dict(data["workload"]),
            }
            if "selection" in data:
                parts["selection"] = selections.from_dict(data["selection"])
            if "method" in data:
                parts["method"] = methods.from_dict(data["method"])
            plan = cls(**{**data, **parts})
            same = plan.digest == _digest(data)
        except CertificateError:
            raise
        except Exception as problem:  # whatever the parts trip over, no plan of this package was saved like that
            raise CertificateError(f"the plan in the file is malformed: {brief(problem)}") from problem
        if not same:
            raise CertificateError(
                "the plan in the file is malformed: some of it is not in the form that plans are saved"
            )
        return plan

    def public(self) -> "Plan":
        """The plan as it may be shown: the units of a known order are numbers. Other plans name nobody: themselves."""
        shown, names = without_names(self.participation)
        return self if names is None else replace(self, participation=shown)

    def save(self, path: str | Path) -> None:
        """Write `public()` and its claims as JSON, for everybody to see."""
        shown = self.public()
        save_json(path, {"format": FORMAT, "plan": shown.to_dict(), "claims": shown.claims()})

    @classmethod
    def load(cls, path: str | Path, *, large: bool = False) -> "Plan":
        """Read a plan; every claim is recomputed.

        A known order is returned with numbers for units; to train, put yours back: `replace(plan, participation=..)`.

        Args:
            large: read files of one's own that are beyond the bounds on files of strangers.
        Raises: CertificateError if a claim does not follow; within 2 seconds and 200 MB, unless `large`.
        """
        return plan_of(load_json(path, FORMAT, large=large), large=large)

    def facts(self) -> list[tuple[str, str]]:
        """(name, text): what the plan promises, for whom, and at what price. `print(plan)` shows them."""
        sens = self.sensitivity
        norm, divisor = f"L2 norm {self.clip_norm:g}", self.batch_size
        rows = [
            ("privacy", promised(self.epsilon, self.delta, self.mu)),
            ("attacks", attack_text(self.reach)),
            *self._delta(),
            *self._searched(),
            ("protects", f"one {self.unit} ({_NEIGHBOUR_TEXTS[self.neighbours]})"),
            ("order", self.participation.describe()),
            *self._secrecy(),
            ("mechanism", self.strategy.describe()),
            ("clipping", f"each {self.unit}'s gradient to {norm}; sums divided by {divisor}"),
        ]
        if not self.participation.secret:
            kind = "exact" if sens.exact else "upper bound"
            rows.append(("sensitivity", f"{sens.value:.5g} clip norms ({kind})"))
        if type(self.participation) is KnownOrder:
            mus = self.unit_mus()
            spread = f"mu from {rounded_up(mus.min())} to {rounded_up(mus.max())}, median {rounded_up(np.median(mus))}"
            rows.append(("its own steps", f"{spread}, over {counted(len(mus), 'unit')} of privacy"))
        if self.selection is not None:
            noise = self.selection_std or self.selection_scale
            rows.append(("selection", selections.card_text(self.selection, self.neighbours, noise)))
        if self.on_device:
            rows.append(("trusts", trusted_text(self.on_device)))
        if self.grid is not None:
            rows.append(("arithmetic", f"exact integers, in steps of {self.grid:.5g}: nothing leaks by rounding"))
        sums = not self.reaches_iterates
        place = "sums of gradients" if sums else "weights during training"
        whole = "" if self.selection is None else ", of a row that is released at every step"
        return [
            *rows,
            ("noise", f"std {self.noise_multiplier:.5g} clip norms per step (the noise multiplier)"),
            (
                "error",
                f"{self.noise_error(sums=sums):.5g} clip norms in the {place}, root mean square over steps{whole}",
            ),
            ("memory", self._memory()),
        ]

    def _delta(self) -> list[tuple[str, str]]:
        """Whether delta is what is advised, or would by itself let a unit drawn at random be published: (0, 1 / n)."""
        n = number_of_units(self.participation, self.dataset_size)
        if n is not None and n >= 1 and self.delta == default_delta(n):
            return [("delta", f"a tenth of 1 / {n}, rounded down to one digit")]
        if n is None or self.delta * n < 1:
            return []
        return [("beware", f"delta is 1 / {n} or more: publishing one {self.unit} of {n}, by lot, is within it")]

    def _searched(self) -> list[tuple[str, str]]:
        """That the epsilon above is of one run, which was or may be chosen among others."""
        if self.candidate_of is None:
            return []
        return [("search", f"{CANDIDATE}; the epsilon here is of this run by itself (search {self.candidate_of})")]

    def _secrecy(self) -> list[tuple[str, str]]:
        """What the claim owes to secret draws, and what is left of it without them."""
        known = self.known_epsilon
        if known is None:
            return [("amplification", "none claimed, none needed")]
        name = "draws" if self.participation.draw_probability is None else "Poisson sampling"
        found = "" if self.method is None else f", {methods.describe(self.method)}"
        told = f"by secret {name}{found}"
        if known <= self.epsilon:
            told = "none: the claim is that of known batches; ao.order(.., method='monte_carlo') may find less"
        return [
            ("amplification", told),
            ("if known", f"epsilon <= {rounded_up(known)} for whoever learns the batches"),
            ("needs", "any unit at any step, and batches that stay secret"),
        ]

    def _memory(self) -> str:
        if self.grid is None:
            return f"{counted(self.strategy.state_rows, 'vector')} of the size of the model"
        return "12 bytes a parameter for each step whose noise a step combines, up to 64 steps"

    def plot(self) -> Any:
        """The noise in the model after each step, as a figure of matplotlib; a notebook shows it.

        Cost: that of `noise_profile`. Raises: MissingDependencyError without matplotlib.
        """
        return pictures.noise_lines({self.strategy.describe(): self}, f"epsilon {rounded_up(self.epsilon)}")

    def _repr_html_(self) -> str:
        return html_table(self.facts())

    def __str__(self) -> str:
        return "\n".join(f"{name:>14}  {text}" for name, text in self.facts())


def number_of_units(order: Participation, dataset_size: int | None) -> int | None:
    """How many privacy units there are, where that is known; of a known order not the size, which is of examples."""
    return len(order.units) if type(order) is KnownOrder else dataset_size


def promised(epsilon: float, delta: float, mu: float | None) -> str:
    """The promise in a line: mu first where it is exactly that of a Gaussian, from which all the rest follows."""
    told = f"epsilon <= {rounded_up(epsilon)} at delta = {rounded_up(delta, 6)}"
    return told if mu is None else f"mu = {rounded_up(mu, 5)} (Gaussian DP): {told}"


def attack_text(found: Reach) -> str:
    """What a promise means, in a line."""
    return f"an attacker who accuses 1 % wrongly finds at most {rounded_up(100 * found.found, 3)} %"


def _digest(data: dict[str, Any]) -> str:
    return hashlib.sha256(canonical(data).encode()).hexdigest()


# -- plans in files --------------------------------------------------------------------------------------------------


def plan_of(data: dict[str, Any], *, large: bool) -> Plan:
    """The plan of a plan file. Raises CertificateError."""
    check_names("the file", data, {"format", "plan", "claims"})
    return checked_plan(data["plan"], data["claims"], large=large)


def checked_plan(data: Any, claims: Any, *, large: bool) -> Plan:
    """The plan that a file describes, with its claims recomputed. Raises CertificateError."""
    with bounded(not large), np.errstate(all="ignore"), warnings.catch_warnings():
        check_plan(data)
        warnings.simplefilter("ignore")  # of numbers that are absurd, and will be refused
        plan = Plan.from_dict(data)
        check_claims(plan, claims)
    return plan


def check_claims(plan: Plan, claims: dict[str, Any]) -> None:
    """Recompute the claims of a file. Raises CertificateError naming the first that does not follow."""
    try:
        true = plan.claims()
    except CertificateError:
        raise
    except Exception as problem:  # a plan whose parts are well formed, and that nobody could run
        raise CertificateError(f"the claims cannot be recomputed: {brief(problem)}") from problem
    check_names("claims", claims, set(true))
    known = true.get("known_epsilon")
    replayed = type(plan.method) is MonteCarlo and known is not None and true["epsilon"] < known
    for name, value in true.items():
        claimed = claims[name]
        near = _REPLAYED if name == "epsilon" and replayed else _NEAR  # known batches say it without samples, exactly
        same = claimed is value if value is None or isinstance(value, bool) else close(claimed, value, near)
        if not same:
            raise CertificateError(
                f"the file claims {name} = {quoted(claimed)}; recomputed from its plan it is {value!r}"
            )


_NEAR = 1e-9  # other versions of numerical libraries may differ in the last digits, not in the ninth
_REPLAYED = REPLAY  # nor samples in the sixth, by which their number is raised


def close(claimed: Any, value: float, near: float = _NEAR) -> bool:
    """Whether a file's number is the recomputed one."""
    return type(claimed) in (int, float) and abs(claimed - value) <= near * abs(value)


# ----------------------------------------------------------------------------------------------------
# Which parts of a plan fit together: neighbours, secret draws, exact integers, selections of rows.


def check_neighbours(neighbours: str, order: Participation, chosen: Strategy) -> None:
    """The order and its mechanism are accounted for these neighbours."""
    check_order(order)
    if order.secret:
        check_fits(chosen, order)
    order.check_neighbours(neighbours)


def checked_method(method: Any, order: Participation, chosen: Strategy, neighbours: str) -> Method | None:
    """The method of a plan's claim: as given, or the order's own; None where there is but one way to account for it."""
    if isinstance(order, AmplifiedOrder):
        found = default_method(chosen, order) if method is None else check_method(method)
        check_method_fits(found, chosen, order)
        check_relation(neighbours, order, found)
        return found
    if method is not None:
        raise PlanError(
            f"method is how the claim of balls in bins, random allocation, truncated Poisson sampling or "
            f"sampling with separation is found, and must be None for {order.describe()}, got {method!r}"
        )
    return None


def check_secret(order: Participation, secure: bool, selection: Selection | None) -> None:
    """What orders by secret draws do not go with, beside those that are accounted with selections."""
    if not isinstance(order, SecretOrder) or order.takes_selection:
        return
    if secure:
        raise PlanError(
            f"exact integers (grid, secure) are not made where draws are secret, got {order.describe()}: plan without "
            "secure, or for another order"
        )
    refuse_selection(selection, order.describe())


def check_exact(neighbours: str, chosen: Strategy) -> None:
    """On a grid, a unit must change nothing but its own integers, and noise must be computable to any precision."""
    check_combination(chosen)
    if neighbours == "add-or-remove":
        raise PlanError(
            "exact integers (grid, secure) need neighbours 'zero-out' or 'replace-one', got 'add-or-remove' (which "
            "secret sampling implies): a batch with one unit less has another shape, in which the floating-point "
            "gradients of the other units may differ in their last bits, and so their integers too"
        )


def check_selected(selection: Selection | None, chosen: Strategy, secure: bool, on_device: tuple[str, ...]) -> None:
    """Noise must be made for the chosen rows alone, in floating point, from sums that are made here."""
    if selection is None:
        return
    if not isinstance(chosen, Combination) or chosen.state_rows:
        raise PlanError(
            "a selection needs a strategy that makes the noise of the chosen rows alone and keeps nothing between "
            f"steps: Independent, BandedInverse or Tree(.., regenerate=True), got {chosen!r}; or train the whole table "
            "lazily, without a selection"
        )
    if secure:
        raise PlanError("exact integers (grid, secure) are not made for a selection of rows: plan without one of them")
    if on_device:
        raise PlanError(f"a selection needs the units' own rows, and on_device={on_device!r} leaves them on devices")


# ----------------------------------------------------------------------------------------------------
# What a plan trusts to the clients' own devices, instead of the program that carries it out.


_TEXTS = {
    "clipping": "each device to clip its own message, of which the server sees sums alone",
    "record": "each device to count and time its own messages: the server learns no ids, and no file shows who took "
    "part; someone with two devices is two",
}


def check_on_device(given: Any, order: Participation) -> tuple[str, ...]:
    """What is trusted to devices, in the order in which it is written down.

    A device knows its own past: how often it took part, and how long ago it last did. So it can keep `SingleEpoch` and
    `MinSeparation`, which are about these two alone, whatever the rounds are called. Where an epoch ends, or which
    rounds are a multiple of b after its first, is a matter of the server's counting; the units of a `KnownOrder` have
    names there; and the draws of `PoissonSampling` must be made by who keeps them secret.

    Raises: ArgumentError for words that are none; PlanError for an order that no counter and timer can keep.
    """
    if not isinstance(given, (tuple, list)) or not all(isinstance(word, str) for word in given):
        raise ArgumentError(f"on_device must be a tuple of words, such as ('clipping',), got {given!r}")
    words = tuple(given)
    if len(set(words)) != len(words) or not set(words) <= _TEXTS.keys():
        raise ArgumentError(f"on_device must have each of {', '.join(map(repr, _TEXTS))} once at most, got {words!r}")
    if "record" in words and not order.device_can_keep:
        raise PlanError(
            f"on_device=('record',) needs SingleEpoch or MinSeparation, got {type(order).__name__}: a device has a "
            "counter and a timer, which tell how often it took part and how long ago, and nothing of epochs, planned "
            f"names or draws. Plan with order=MinSeparation({order.n}, b=.., k=..), or let the server keep the "
            "record"
        )
    return tuple(word for word in _TEXTS if word in words)


def trusted_text(on_device: tuple[str, ...]) -> str:
    """The words in a sentence, for people."""
    return "; and ".join(_TEXTS[word] for word in on_device)
