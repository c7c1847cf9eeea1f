"""Which rows of wide tables get noise, chosen at each step: a closed union, `Selection = Counts | Top | Uniform`.

A step selects, and then releases what was selected: noise is added to the chosen rows of the gradient alone, and the
others stay as they are. The two are one claim.

**Why the two compose exactly, in any order of the data (`Counts`).** Let a step t release, one after the other,

    y_t = counts_t + s z_t                 counts_t: (rows,), a sum over units of vectors of norm <= count_norm
    x_t = M_t (g_t + noise_std (K Z)_t)    g_t: a sum over units of M_t times gradients of norm <= clip_norm

with M_t the rows that y_t chooses. To leave out rows of a unit's gradient shortens it, so g_t is a row of the matrix G
of the plan's mechanism. Put the rows of both in the order in which they are released: counts_1, g_1, counts_2, g_2, ..
The whole is a matrix mechanism of 2n rows with a lower triangular C: the identity on the counts, the strategy's C on
the gradients. Of its release of g_t only M_t is shown, a choice that was released before. Each row depends on what was
released before it, which for a lower triangular C and Gaussian noise costs no more than rows that are fixed [Denisov et
al. 2022, Theorem 2.1]. A unit whose steps are pi moves it, in units of its noise, by at most

    mu^2 = (f count_norm ||I pi|| / s)^2 + (f clip_norm sens(C, pi) / noise_std)^2 <= mu_sel^2 + mu_rel^2

    s = sigma_sel count_norm sens(I, participation),   mu_sel = f / sigma_sel,   mu_rel = f / sigma

f = 1 for `zero-out` and `add-or-remove`, 2 for `replace-one`. Under secret sampling, with independent noise, a step is
one Gaussian mechanism of both from one sample: sigma_eff = (sigma_sel^-2 + sigma^-2)^-1/2, amplified as a pair.

`Top` has bounded range instead (see `BoundedRange`), and `Uniform` looks at no data, so it costs nothing.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from functools import cache
from math import exp, inf, log, nextafter, sqrt
from typing import Any, ClassVar, assert_never

from scipy.special import ndtr

from anyorder import checks
from anyorder._numerics import crossing
from anyorder.accounting.bounded_range import bounded_range_mu
from anyorder.accounting.gaussian import NEIGHBOURS
from anyorder.checks import final
from anyorder.errors import ArgumentError, CertificateError, PlanError
from anyorder.formats import check_names, quoted
from anyorder.formatting import counted, rounded_up

_SHARE = 0.1
_MAX_ROWS = 2**40


@final
@dataclass(frozen=True)
class Counts:
    """The rows whose noisy count of units reaches a threshold: an independent choice for each row.

        row r is chosen where   sum over units of counts[r] + s N(0, 1) >= threshold
        s = sigma count_norm sens(I, participation)                 `Plan.selection_std`

    A unit counts min(1, count_norm / sqrt(m)) on each of the m rows that it touches: a vector of norm count_norm at
    most. Its Gaussian noise composes with that of the release exactly; see `anyorder.accounting.selection`.

    Attributes:
        threshold: in counts, which are not units: one that touches 16 rows counts 1/4 on each. Rows that nobody touched
            are chosen with probability Phi(-threshold / s) each: with a million rows and threshold / s = 4, about 32 a
            step. It does not change epsilon. See `anyorder.sparse.threshold_for` and `chances`.
        share: of the plan's mu^2 that the choice may take, strictly between 0 and 1, where sigma is to be found by
            `anyorder.plan`; 0.1 if neither is given. None in a plan, whose sigma is found.
        count_norm: L2 bound on one unit's counts in one step.
        sigma: noise against the whole sensitivity of the counts, unitless: mu_sel = 1 / sigma (2 / sigma for
            replace-one).
    Raises: ArgumentError.

    Example:
        >>> Counts(5.0)
        Counts(threshold=5.0, share=0.1, count_norm=1.0, sigma=None)
    """

    kind: ClassVar[str] = "counts"

    threshold: float
    share: float | None = None
    count_norm: float = 1.0
    sigma: float | None = None

    def __post_init__(self) -> None:
        _set(self, "threshold", checks.real("threshold", self.threshold))
        _set(self, "count_norm", _norm("count_norm", self.count_norm))
        _check_noise(self)

    def describe(self) -> str:
        """Return a phrase for the card."""
        bound = f"a unit's counts to L2 norm {self.count_norm:g}"
        return f"rows of tables with a noisy count of {self.threshold:g} or more ({bound})"


@final
@dataclass(frozen=True)
class Top:
    """The rows of largest scores under Gumbel noise: so many draws of the exponential mechanism without replacement.

        the `rows` largest of   score[r] + s Gumbel(0, 1),         s = sigma score_norm       `Plan.selection_scale`

    A unit moves the score of each row by 0 to score_norm, in one direction: scores are sums over units of numbers in
    [0, score_norm], as its counts are. Only how far a single score moves matters, not how many do. So a draw has range
    e0 = 1 / sigma (2 / sigma for replace-one, where scores may move both ways), see `BoundedRange`, and one unit enters
    `rows` draws in each step in which it takes part.

    Attributes:
        rows: chosen in a step, 1 or more.
        share: of the plan's privacy, as for `Counts`, measured in zero-concentrated DP: draws e0^2 / 8 and
            mu_rel^2 / 2.
        score_norm: the most one unit moves the score of any row in one step.
        sigma: scale of the Gumbel noise over score_norm, unitless.
    Raises: ArgumentError.

    Example:
        >>> round(Top(200, sigma=40.0).e0("replace-one"), 6)
        0.05
    """

    kind: ClassVar[str] = "top"

    rows: int
    share: float | None = None
    score_norm: float = 1.0
    sigma: float | None = None

    def __post_init__(self) -> None:
        _set(self, "rows", checks.integer("rows", self.rows, low=1, high=_MAX_ROWS))
        _set(self, "score_norm", _norm("score_norm", self.score_norm))
        _check_noise(self)

    def e0(self, neighbours: str) -> float:
        """The range of one draw, rounded up. Raises: ArgumentError where sigma is not known yet."""
        return over_sigma(self, neighbours)

    def describe(self) -> str:
        """Return a phrase for the card."""
        rows = counted(self.rows, "row")
        return f"the {rows} of tables with the largest noisy scores (a unit adds 0 to {self.score_norm:g})"


@final
@dataclass(frozen=True)
class Uniform:
    """Rows that are drawn uniformly at each step, without looking at any data: no cost, and little use where few count.

    Attributes:
        rows: chosen in a step, 1 or more.
    Raises: ArgumentError.
    """

    kind: ClassVar[str] = "uniform"

    rows: int
    sigma: None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        _set(self, "rows", checks.integer("rows", self.rows, low=1, high=_MAX_ROWS))

    def describe(self) -> str:
        """Return a phrase for the card."""
        return f"{counted(self.rows, 'row')} of tables, drawn uniformly"


Selection = Counts | Top | Uniform
"""All there are."""


def step_mu(selection: Selection | None, neighbours: str, std: float | None) -> float:
    """The mu of the selection of one step in which a unit takes part; of k steps it is sqrt(k) times that.

    Args:
        std: of the counts' noise, where the selection is `Counts`.
    """
    match selection:
        case None | Uniform():
            return 0.0
        case Counts():
            assert std is not None  # as it is in plans
            return nextafter(NEIGHBOURS[neighbours] * selection.count_norm / std, inf)
        case Top():
            return nextafter(bounded_range_mu(selection.e0(neighbours)) * sqrt(selection.rows), inf)
        case _:
            assert_never(selection)


def check_selection(selection: Any, *, with_sigma: bool = False) -> None:
    """Raise PlanError for what is no selection, and, for one in a plan, ArgumentError where its noise is not known."""
    match selection:
        case Counts() | Top():
            if with_sigma and selection.sigma is None:
                raise ArgumentError(
                    f"selection must have a sigma in a Plan, got {selection!r}: "
                    "ao.plan(mechanism=ao.mechanism(selection=..)) finds it by the share"
                )
        case Uniform():
            pass
        case _:
            raise PlanError(
                "selection must be Counts, Top, Uniform (of anyorder.sparse) or None, such as "
                f"ao.sparse.Counts(threshold=20.0, share=0.1), got {type(selection).__name__}"
            )


def card_text(selection: Selection, neighbours: str, noise: float | None) -> str:
    """What the card says of it.

    Args:
        noise: std of its counts or scale of its Gumbel noise, where it has any.
    """
    match selection:
        case Counts():
            assert noise is not None  # as it is in plans
            chance = f"; a row that nobody touched is chosen with probability {ndtr(-selection.threshold / noise):.3g}"
            mu = rounded_up(over_sigma(selection, neighbours), 5)
            cost = f"; noise of std {noise:.5g} counts, mu = {mu} of the whole{chance}"
        case Top():
            e0 = selection.e0(neighbours)
            cost = f"; Gumbel noise of scale {noise:.5g}, {selection.rows} draws a step of range {e0:.5g}"
        case Uniform():
            cost = ": costs nothing"
        case _:
            assert_never(selection)
    return selection.describe() + cost


def refuse_selection(selection: Selection | None, by: str) -> None:
    """Raise PlanError where a plan selects rows and there is no table to select them from.

    Args:
        selection: a plan's.
        by: what carries the plan out, as in "the federated server".
    """
    if selection is not None:
        raise PlanError(
            f"{by} carries out no plan with a selection of rows, got {selection!r}: it needs a table, an "
            "nn.Embedding(sparse=True) or nn.EmbeddingBag(sparse=True) under make_private; plan without "
            "ao.mechanism(selection=..)"
        )


def _norm(name: str, value: float) -> float:
    """A norm whose share for each of many rows is a number that can be rounded down."""
    return checks.real(name, value, low=1e-30, high=1e30)


def _set(selection: Any, name: str, value: Any) -> None:
    object.__setattr__(selection, name, value)


def _check_noise(selection: Any) -> None:
    """Either sigma, or a share by which it is to be found."""
    sigma, share = selection.sigma, selection.share
    if sigma is not None:
        if share is not None:
            raise ArgumentError(
                f"share and sigma say the same thing: give one of them, got share={share!r}, sigma={sigma!r}"
            )
        _set(selection, "sigma", checks.positive("sigma", sigma))
    else:
        _set(selection, "share", checks.probability("share", _SHARE if share is None else share))


def over_sigma(selection: "Counts | Top", neighbours: str) -> float:
    """That is f / sigma, rounded up."""
    if selection.sigma is None:
        raise ArgumentError(f"selection must have a sigma before it has a cost, got {selection!r}")
    return nextafter(NEIGHBOURS[checks.choice("neighbours", neighbours, NEIGHBOURS)] / selection.sigma, inf)


def read_words(words: str) -> Selection:
    """A selection from the words of a command line: its kind, its threshold or number of rows, and a share if any.

        counts:THRESHOLD[:SHARE]    top:ROWS[:SHARE]    uniform:ROWS

    Raises: ArgumentError.

    Example:
        >>> read_words("counts:5:0.2")
        Counts(threshold=5.0, share=0.2, count_norm=1.0, sigma=None)
    """
    kind, *numbers = words.split(":")
    try:
        match kind, numbers:
            case "counts", [threshold, *share] if len(share) <= 1:
                return Counts(float(threshold), *map(float, share))
            case "top", [rows, *share] if len(share) <= 1:
                return Top(int(rows), *map(float, share))
            case "uniform", [rows]:
                return Uniform(int(rows))
            case _:
                pass
    except ArgumentError:  # of a number that breaks its rule
        raise
    except ValueError:  # of what is no number
        pass
    raise ArgumentError(
        "selection must be counts:THRESHOLD, top:ROWS or uniform:ROWS, the first two with :SHARE of the budget behind "
        f"them if wanted, such as counts:5:0.1, got {words!r}"
    )


# -- files -----------------------------------------------------------------------------------------------------------


def to_dict(selection: Selection) -> dict[str, Any]:
    """JSON values."""
    match selection:
        case Counts():
            return {
                "kind": Counts.kind, "threshold": selection.threshold, "count_norm": selection.count_norm,
                "sigma": selection.sigma,
            }  # fmt: skip
        case Top():
            return {
                "kind": Top.kind, "rows": selection.rows, "score_norm": selection.score_norm, "sigma": selection.sigma,
            }  # fmt: skip
        case Uniform():
            return {"kind": Uniform.kind, "rows": selection.rows}
        case _:
            assert_never(selection)


def from_dict(data: Any) -> Selection:
    """The selection that `to_dict` described. Raises: CertificateError for what it never writes."""
    kind = data.get("kind") if isinstance(data, dict) else None
    found = next((one for one in (Counts, Top, Uniform) if one.kind == kind), None)
    if found is None:
        raise CertificateError(f"a selection must be of kind counts, top or uniform, got {quoted(kind)}")
    check_names("selection", data, {"kind"} | {name.name for name in fields(found) if name.init} - {"share"})
    return found(**{name: value for name, value in data.items() if name != "kind"})


# ----------------------------------------------------------------------------------------------------
# How a budget is split between a selection of rows and the release of what it selected.


_SLACK = 1e-12  # of mu, for the rounding of the parts
_LEAST = 1e-9  # of mu^2, that is left to the release
_TOLERANCE = 1e-6  # of the target epsilon


def for_sigma(sigma: float, selection: Selection | None, visits: int) -> Selection | None:
    """The selection beside a release of this sigma, with a sigma of its own found by its share of the whole.

        mu_sel^2 = share / (1 - share) mu_rel^2,  mu_rel = f / sigma;      for `Top`  mu_sel^2 = draws e0^2 / 4

    Args:
        visits: the most steps that a unit takes part in; 1 under secret sampling.
    """
    match selection:
        case None | Uniform():
            return selection
        case Counts() | Top():
            if selection.share is None:
                return selection
            scale = sqrt((1 - selection.share) / selection.share)
            if type(selection) is Top:
                scale *= sqrt(visits * selection.rows) / 2
            return replace(selection, share=None, sigma=sigma * scale)
        case _:
            assert_never(selection)


def shared(selection: Selection | None, sigma: float, visits: int) -> Selection | None:
    """The selection of a plan with the share that it has, in place of its sigma: to be given another budget."""
    match selection:
        case None | Uniform():
            return selection
        case Counts() | Top():
            assert selection.sigma is not None  # as it is in plans
            ratio = (sigma / selection.sigma) ** 2
            if type(selection) is Top:
                ratio *= visits * selection.rows / 4
            return replace(selection, share=ratio / (1 + ratio), sigma=None)
        case _:
            assert_never(selection)


def for_epsilon(
    epsilon: float,
    total: float,
    selection: Selection | None,
    visits: int,
    cost: Callable[[float, Selection], float],
) -> tuple[float, Selection | None]:
    """(sigma of the release, the selection with its own): the two together keep epsilon, and come within 1e-6 of it.

    Args:
        total: f / mu of a Gaussian, or the noise multiplier of sampled ones, that keeps epsilon.
        cost: sigma of the release and the selection beside it -> epsilon of both.
    Raises: PlanError where a selection whose sigma is given costs the whole budget, or all but a billionth.
    """
    match selection:
        case None | Uniform():
            return total, selection
        case Counts():
            if selection.share is None:
                left = 1 - (total / (selection.sigma or total)) ** 2
                if left < _LEAST:
                    raise _too_dear(selection)
                return total / sqrt(left) * (1 + _SLACK / left), selection
            sigma, own = (total / sqrt(part) * (1 + _SLACK) for part in (1 - selection.share, selection.share))
            return sigma, replace(selection, share=None, sigma=own)
        case Top():
            return _search(epsilon, total, selection, visits, cost)
        case _:
            assert_never(selection)


def _search(
    epsilon: float, total: float, selection: Top, visits: int, cost: Callable[[float, Selection], float]
) -> tuple[float, Selection]:
    """For a selection that is no Gaussian: the least sigma, between that without a selection and 10^5 times it."""
    aim = epsilon * (1 - _TOLERANCE / 2)

    def beside(log_sigma: float) -> tuple[float, Selection]:
        sigma = exp(log_sigma)
        found = for_sigma(sigma, selection, visits)
        assert found is not None
        return sigma, found

    @cache  # the search asks for the ends of its bracket again
    def excess(log_sigma: float) -> float:
        return cost(*beside(log_sigma)) - aim

    low, high = log(total) - 1e-3, log(total) + 0.05
    while excess(high) > 0:
        low, high = high, high + 2 * (high - low)
        if high > log(total) + log(1e5):
            raise _too_dear(selection)
    result = crossing(excess, low, high, absolute=_TOLERANCE / 16, relative=1e-14)
    while excess(result) > aim * _TOLERANCE / 4:
        result += _TOLERANCE / 16
    return beside(result)


def _too_dear(selection: Selection) -> PlanError:
    return PlanError(
        f"the selection alone costs the whole budget, or all but a billionth: {selection!r}; give it a larger sigma, "
        "or a share in place of one"
    )
