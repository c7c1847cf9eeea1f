"""A search and the budget of its data set: charged whole, once, before its first run, and never for another search."""

from types import SimpleNamespace

import pytest

import anyorder as ao
from anyorder.errors import BudgetError, TrainingError
from budget.searches import InThisProcess
from budget.test_search import never, quick, search


@pytest.fixture(autouse=True)
def _no_processes(monkeypatch):
    monkeypatch.setattr("anyorder.budget.search.Trials", InThisProcess)


class Left:
    """As much of a budget as a search asks of it."""

    id = "0" * 32

    def __init__(self, refuse=False):
        self.spent, self.refuse = [], refuse

    def spend(self, claim, name="", run=None):
        if self.refuse:
            raise BudgetError("more than is left")
        if run not in [one for one, _ in self.spent]:
            self.spent.append((run, claim))

    def entries(self):
        return [SimpleNamespace(spend=SimpleNamespace(run=run)) for run, _ in self.spent]


def test_the_whole_search_is_charged_once_and_before_its_first_run(tmp_path):
    left = Left()

    def made(settings, plan, folder):
        assert len(left.spent) == 1
        return quick(settings, plan, folder)

    with pytest.raises(TrainingError):
        search(lambda s, p, f: 1 / 0, folder=tmp_path, budget=left)
    found = search(made, folder=tmp_path, budget=left)
    search(never, folder=tmp_path, budget=left)
    [(_, claim)] = left.spent
    assert claim == found.certificate.claim
    assert claim.epsilon == found.certificate.epsilon
    with pytest.raises(BudgetError):
        search(never, budget=Left(refuse=True))


def test_a_budget_file_is_charged_with_the_whole_search(tmp_path):
    left = ao.Budget(tmp_path / "data.budget", epsilon=20.0, delta=1e-6)
    found = search(quick, folder=tmp_path / "search", budget=left)
    assert left.remaining().spent == pytest.approx(found.certificate.epsilon, rel=1e-3)
    search(never, folder=tmp_path / "search", budget=left)
    left.spend(found.certificate)  # the same search
    assert left.remaining().spent == pytest.approx(found.certificate.epsilon, rel=1e-3)
    with pytest.raises(BudgetError, match="must not run"):
        search(never, budget=left, epsilon=30.0)


def test_a_key_makes_one_search_and_the_budget_refuses_another(tmp_path):
    """Of two searches with one key the draws are the same: one entry must not stand for both."""
    left = ao.Budget(tmp_path / "data.budget", epsilon=50.0, delta=1e-6)
    search(quick, budget=left)
    for folder in (None, tmp_path / "other"):
        with pytest.raises(BudgetError, match="have the same draws"):
            search(never, budget=left, folder=folder)
    search(quick, folder=tmp_path / "ended")  # charged to nothing, and then with what has an entry of another
    with pytest.raises(BudgetError, match="have the same draws"):
        search(never, budget=left, folder=tmp_path / "ended")
    with pytest.raises(TrainingError):
        search(lambda s, p, f: 1 / 0, folder=tmp_path / "begun")
    with pytest.raises(BudgetError, match="have the same draws"):
        search(never, budget=left, folder=tmp_path / "begun")
    assert len(left.entries()) == 1
    for _ in range(2):
        search(quick, budget=left, key=None)
    assert len(left.entries()) == 3


def test_a_search_that_has_ended_is_charged_when_it_is_asked_for_with_a_budget(tmp_path):
    left = ao.Budget(tmp_path / "data.budget", epsilon=20.0, delta=1e-6)
    found = search(quick, folder=tmp_path / "search")
    assert left.entries() == []
    for _ in range(2):
        assert search(never, folder=tmp_path / "search", budget=left) == found
        assert len(left.entries()) == 1
    assert left.remaining().spent == pytest.approx(found.certificate.epsilon, rel=1e-3)
    small = ao.Budget(tmp_path / "small.budget", epsilon=1.0, delta=1e-6)
    for _ in range(2):
        with pytest.raises(BudgetError, match="must not run"):
            search(never, folder=tmp_path / "search", budget=small)
    assert small.entries() == []


def test_a_search_killed_while_it_is_charged_is_charged_when_it_goes_on(tmp_path, monkeypatch):
    left = ao.Budget(tmp_path / "data.budget", epsilon=20.0, delta=1e-6)
    with monkeypatch.context() as patch:
        patch.setattr(ao.Budget, "spend", lambda *a, **k: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            search(never, folder=tmp_path / "search", budget=left)
    search(quick, folder=tmp_path / "search", budget=left)
    assert len(left.entries()) == 1
