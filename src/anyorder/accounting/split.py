"""How a budget is split between a selection of rows and the release of what it selected."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from math import exp, log, sqrt
from typing import assert_never

from anyorder.accounting.selection import Counts, Selection, Top, Uniform
from anyorder.errors import PlanError

__all__ = ["for_epsilon", "for_sigma", "shared"]

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
    from scipy.optimize import brentq  # slow to load

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
    result = brentq(excess, low, high, xtol=_TOLERANCE / 16, rtol=1e-14)
    while excess(result) > aim * _TOLERANCE / 4:
        result += _TOLERANCE / 16
    return beside(result)


def _too_dear(selection: Selection) -> PlanError:
    return PlanError(
        f"the selection alone costs the whole budget, or all but a billionth: {selection!r}; give it a larger sigma, "
        "or a share in place of one"
    )
