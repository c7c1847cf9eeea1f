"""The sums of a budget: what is asked before an entry is what counts after it, and what is said to be left fits."""

import math
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest

import anyorder as ao
from anyorder.accounting import BoundedRange, Gaussian
from anyorder.accounting.gaussian import rdp_epsilon
from anyorder.budget import Geometric
from anyorder.budget.account import Account, UnitFile, _float_up, _fraction, _squares
from anyorder.budget.filter import Searched, best_order, renyi
from anyorder.budget.log import Begin, Limit, Settle, Spend, write_curve
from anyorder.errors import BudgetError

EPSILON, DELTA = 8.0, 1e-5
ORDER = best_order(EPSILON, DELTA)


def account(folder, rule):
    adaptive = rule != "planned"
    begin = Begin(
        id="0" * 32, epsilon=EPSILON, delta=DELTA, unit=None, neighbours="zero-out", adaptive=adaptive,
        filter=rule if adaptive else None, order=ORDER, time="",
    )  # fmt: skip
    return Account(begin, UnitFile(folder / "people.budget"))


def spend(number, curve, law=None, units=None):
    search = None if law is None else law.to_dict()
    about = {"neighbours": "zero-out"}
    return Spend(
        number=number, name="", what="curve", parts=write_curve(curve), search=search, about=about, units=units, time=""
    )


@pytest.mark.parametrize("rule", ["gaussian", "renyi", "planned"])
def test_what_is_asked_before_an_entry_is_what_counts_after_it(tmp_path, rule):
    rng = np.random.default_rng(3)
    held = account(tmp_path, rule)
    file = UnitFile(tmp_path / "people.budget")
    own, common, kept = dict.fromkeys("abc", 0.0), 0.0, []
    for number in range(1, 15):
        kind, rows, units = number % 3, None, None
        curve = BoundedRange(rng.uniform(0.01, 0.1), 5) if kind == 0 else Gaussian(rng.uniform(0.1, 0.4))
        if kind == 1:
            names = [name for name in "abc" if rng.random() < 0.6] or ["a"]
            key, rows = file.hashed(names, np.full(len(names), curve.mu))
            units = file.write(key, rows).__dict__
        line = spend(number, curve, units=units)
        before = held.totals_with(Account.cost_of(line), rows)
        held.take(line)
        after = held.totals()
        assert (
            after.squared <= before.squared <= after.squared * Fraction(1 + 1e-15)
        )  # units' sums are rounded once more
        assert replace(before, squared=after.squared) == after
        assert after.epsilon(DELTA) == held.remaining().spent
        if kind == 0:
            kept.append(curve)
        elif kind == 1:
            own |= {name: own[name] + curve.mu**2 for name in names}
        else:
            common += curve.mu**2
        squared = common + max(own.values())
        assert float(after.squared) == pytest.approx(squared, rel=1e-12)
        assert len(after.rest) == len(kept)
        assert float(after.rest_renyi) == pytest.approx(sum(renyi(one, ORDER) for one in kept), rel=1e-12)
        if rule == "renyi" and number > 1:
            whole = ORDER * squared / 2 + sum(renyi(one, ORDER) for one in kept)
            assert after.epsilon(DELTA) == pytest.approx(rdp_epsilon(([float(ORDER)], [whole]), DELTA), rel=1e-9)


@pytest.mark.parametrize("rule", ["gaussian", "renyi", "planned"])
def test_what_is_left_fits_and_a_little_more_does_not(tmp_path, rule):
    options = {"adaptive": False} if rule == "planned" else {"filter": rule}
    limit, part = (2.0, 0.35) if rule == "planned" else (EPSILON, 1.0)  # losses of 8 take long to compose
    budget = ao.Budget(tmp_path / "people.budget", limit, DELTA, **options)
    curves = Gaussian(0.4 * part), BoundedRange(0.1 * part, 20), BoundedRange(0.05 * part, 20), Gaussian(0.3 * part)
    for curve in curves:
        left = budget.spend(curve)
    assert left.rule == rule
    budget.check(Gaussian(left.mu))
    with pytest.raises(BudgetError, match="refused"):
        budget.check(Gaussian(left.mu * (1.002 if rule == "planned" else 1 + 1e-8)))
    again = budget.spend(Gaussian(left.mu))
    assert again.spent <= limit
    assert left.mu > 0.3


def test_a_unit_that_has_all_of_it_is_refused_and_others_are_not(tmp_path):
    from anyorder.participation import KnownOrder

    def made(*names):
        order = KnownOrder([[name] for name in names])
        return ao.plan(order=order, batch_size=2, epsilon=6.0, delta=DELTA, mechanism="independent")

    budget = ao.Budget(tmp_path / "people.budget", EPSILON, DELTA)
    budget.spend(made("ann", "bob"))
    with pytest.raises(BudgetError, match="refused"):
        budget.spend(made("cid", "ann"))
    budget.spend(made("cid", "dan"))
    with pytest.raises(BudgetError, match="refused"):
        budget.spend(made("eve", "dan"))


def test_a_search_and_its_run_are_of_one_first_entry_alone(tmp_path):
    held = account(tmp_path, "renyi")
    held.take(spend(1, Gaussian(0.3), Geometric(10)))
    alone = held.totals()
    assert alone.epsilon(DELTA) == Searched(Geometric(10), Gaussian(0.3)).epsilon(DELTA)
    assert held.totals_with(Gaussian(1e-9), None).epsilon(DELTA) > alone.epsilon(DELTA) * 1.05  # by the filter
    assert alone.epsilon(DELTA, extra=held.totals_with(Gaussian(0.1), None).squared) > alone.epsilon(DELTA) * 1.05


def test_a_limit_is_of_epsilon_and_delta(tmp_path):
    budget = ao.Budget(tmp_path / "people.budget", EPSILON, DELTA)
    budget.spend(Gaussian(1.0))
    assert budget.limit(EPSILON, 1e-7).delta == 1e-7
    assert ao.Budget(tmp_path / "people.budget").remaining().spent == Gaussian(1.0).epsilon(1e-7)


def test_lines_out_of_place_are_refused(tmp_path):
    held = account(tmp_path, "gaussian")
    held.take(spend(1, Gaussian(0.1)))
    for line in (spend(1, Gaussian(0.1)), spend(3, Gaussian(0.1)), held.begin):
        with pytest.raises(BudgetError, match=r"not in its place|begins once"):
            held.take(line)
    held.take(Limit(epsilon=1.0, delta=DELTA, time=""))
    held.take(Settle(number=1, key="a" * 32, steps=1, max_participations=1, min_separation=1, mu=0.05, time=""))
    assert float(held.totals().squared) == pytest.approx(0.0025)


def test_roundings_are_upwards_and_what_is_no_number_is_beyond_every_limit():
    rng = np.random.default_rng(0)
    rows = np.zeros(50, [("id", "<u8"), ("mu", "<f8")])
    rows["mu"] = rng.random(50)
    for mu, square in zip(rows["mu"].tolist(), _squares(rows, 2.0).tolist(), strict=True):
        assert _fraction(mu) ** 2 <= _fraction(square)
    for x in rng.random(50).tolist():
        value = _fraction(x) + _fraction(2.0**-80)
        assert _fraction(_float_up(value)) >= value
    assert _float_up(_fraction(math.inf)) == math.inf
