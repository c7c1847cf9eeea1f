"""Strategies from words."""

import pytest

from anyorder.errors import ArgumentError, PlanError
from anyorder.optimize import candidates, choose, fit
from anyorder.optimize.candidates import fit_named
from anyorder.participation import FixedOrder, KnownOrder, MinSeparation, SingleEpoch
from anyorder.strategy import BLT, Banded, Dense, Independent, Tree
from anyorder.strategy.registry import KINDS, Kind, rmse
from anyorder.workload import prefix_sum

A, ORDER = prefix_sum(24), FixedOrder(24, k=2, b=12)


@pytest.mark.usefixtures("fitted_once")
def test_a_kind_and_its_sizes() -> None:
    once = SingleEpoch(24)
    assert fit_named("blt, 2 buffers", A, once) == fit("blt", A, once, buffers=2)
    assert fit_named("blt, 1 buffer", A, ORDER) == fit("blt", A, ORDER, buffers=1)
    assert fit_named("banded, 4 bands", A, ORDER) == fit("banded", A, ORDER, bands=4)
    assert fit_named("dense", A, ORDER, objective="last") == fit("dense", A, ORDER, "last")
    assert fit_named("banded low rank, 4 bands, 2 rank", A, ORDER) == fit("banded_low_rank", A, ORDER, bands=4, rank=2)


@pytest.mark.usefixtures("fitted_once")
def test_a_bare_kind_is_the_best_of_it_and_a_full_name_the_candidate() -> None:
    known = choose(A, ORDER)
    assert fit_named("auto", A, ORDER) == known[0].strategy
    assert fit_named("blt", A, ORDER) == next(c.strategy for c in known if c.name.startswith("blt"))
    for candidate in [c for c in known if "," in c.name][:3]:
        assert fit_named(candidate.name, A, ORDER) == candidate.strategy
    assert isinstance(fit_named("auto", A, ORDER, max_state=0, max_cost=1), Independent)


def test_independent_and_trees() -> None:
    assert fit_named("independent", A, ORDER) == Independent(24)
    assert fit_named("tree", A, ORDER) == fit("tree", A, ORDER)
    tree = fit_named("tree", A, ORDER, estimator="online", restart_every=1, completion="on")
    assert tree == Tree(24, "online", (12,), True)


@pytest.mark.parametrize(("words", "kind"), [("banded, 4 bands", Banded), ("blt, 1 buffer", BLT), ("dense", Dense)])
def test_kinds(words: str, kind: type) -> None:
    assert type(fit_named(words, A, ORDER)) is kind


def test_every_row_of_a_strategy_says_how_it_is_fitted_or_that_it_is_not() -> None:
    names = [kind.fit.name for kind in KINDS if kind.fit is not None]
    assert len(set(names)) == len(names)
    said = {name: value for name, value in KINDS[0]._asdict().items() if name != "fit"}
    with pytest.raises(TypeError, match="'fit'"):
        Kind(**said)


@pytest.mark.usefixtures("fitted_once")
def test_what_is_refused() -> None:
    with pytest.raises(ArgumentError, match=r"mechanism must be one of auto, poisson, .*got 'blt, 2 bufers'"):
        fit_named("blt, 2 bufers", A, ORDER)
    long = prefix_sum(6000)  # for which no low rank is tried
    with pytest.raises(ArgumentError, match="with its size, such as 'banded low rank, 16 bands, 16 rank', it is"):
        fit_named("banded low rank", long, SingleEpoch(6000))
    always = MinSeparation(20, b=1, k=20)  # where nothing is better than independent noise
    with pytest.raises(ArgumentError, match="'blt' is not among .*, of which 'independent' has least error"):
        fit_named("blt", prefix_sum(20), always)
    with pytest.raises(ArgumentError, match="needs the sizes"):
        fit_named("banded low rank, 4 bands", A, ORDER)
    with pytest.raises(ArgumentError, match="estimator must come with mechanism 'tree' only, got 'dense'"):
        fit_named("dense", A, ORDER, estimator="full")
    with pytest.raises(PlanError, match="a size that its fit can use"):
        fit_named("blt, 40 buffers", A, ORDER)


def test_a_size_that_a_fit_does_not_know_is_refused_without_a_claim_about_other_kinds() -> None:
    """A unit that comes in two steps next to each other: the banded fit has one band, other kinds a lower error."""
    order = KnownOrder([["a"], ["a", "b"], ["c"], ["d"], ["e"], ["b"], ["c"], ["d"], ["e"], ["f"]])
    workload = prefix_sum(order.n)
    with pytest.raises(PlanError, match="the fit of this kind goes no further than 'banded, 1 band'") as refused:
        fit_named("banded, 2 bands", workload, order)
    assert "error" not in str(refused.value)
    one = rmse(fit_named("banded, 1 band", workload, order), workload, order)
    assert rmse(fit_named("banded toeplitz, 2 bands", workload, order), workload, order) < 0.97 * one


def test_unknown_words_are_refused_before_any_fit(monkeypatch):
    monkeypatch.setattr(candidates, "choose", lambda *given, **options: pytest.fail("fitted"))
    with pytest.raises(ArgumentError):
        fit_named("bands", prefix_sum(4), FixedOrder(4, 2, 2))
