"""What a notebook and a prompt show: the state of each object, escaped, and plots where matplotlib is."""

import sys
from html import escape

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import anyorder as ao
from anyorder.audit.loader_check import Watched
from anyorder.errors import MissingDependencyError
from anyorder.formats import html_table
from anyorder.participation import FixedOrder
from report.pages import claims, read

CLAIMS = claims()
HOSTILE = "<script>alert('1')</script>\x1b[2J"


def page(shown):
    """Its reader, which is strict."""
    return read(f"<!DOCTYPE html><html><body>{shown}</body></html><!-- default-src 'none' -->")


def test_a_table_of_rows_is_escaped_whatever_stands_in_it():
    shown = html_table([(HOSTILE, HOSTILE, "x")], head=(HOSTILE, "b", "c"))
    assert "<script" not in shown
    assert "\x1b" not in shown
    reader = page(shown)
    assert (reader.tags.count("th"), reader.tags.count("td"), reader.tags.count("tr")) == (4, 2, 2)


def test_every_object_shows_its_state(tmp_path):
    loader = DataLoader(TensorDataset(torch.zeros(12, 2), torch.zeros(12, dtype=torch.int64)), batch_size=4)
    plan = ao.plan(loader=loader, epochs=1, epsilon=2, delta=1e-4, mechanism="independent")
    engine = ao.PrivacyEngine(plan)
    assert "not bound yet" in repr(engine)
    model = nn.Linear(2, 2)
    private, optimizer, loader = engine.make_private(model, torch.optim.SGD(model.parameters(), 0.1), loader)
    for inputs, labels in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(private(inputs), labels).backward()
        optimizer.step()
        break
    assert "epsilon=2, delta=0.0001, for one example; step 1 of 3" in repr(engine)
    certificate = engine.certificate()
    certificate.save(tmp_path / "run.privacy.json")
    found = ao.verify(tmp_path / "run.privacy.json")
    assert repr(found) == "Verification(certificate of 1 steps: epsilon <= 2 at delta = 0.0001)"
    assert "not checked" in str(found)
    budget = ao.Budget(tmp_path / "<people>.budget", epsilon=3, delta=1e-4)
    budget.spend(plan)
    assert repr(budget).startswith("Budget('")
    assert "epsilon 2 of 3 spent" in repr(budget)
    finding = ao.check(loader, delta=1e-5, noise_multiplier=1.0, epochs=1)
    compared = ao.compare(["fixed", "poisson"], dataset_size=12, batch_size=4, epochs=1, epsilon=2, delta=1e-4)
    shown = [
        (plan, "epsilon &lt;= 2"), (engine, "step 1 of 3"), (certificate, "1 of 3 taken"), (found, "recomputed"),
        (budget, "&lt;people&gt;.budget"), (budget.remaining(), "left"), (finding, escape(finding.words)),
        (compared, "poisson"), (plan.sensitivity, "exact"), (CLAIMS["search"], "&lt;script&gt;"),
    ]  # fmt: skip
    for thing, phrase in shown:
        made = thing._repr_html_()
        assert phrase in made, type(thing)
        page(made)
        assert " object at 0x" not in repr(thing)
    engine.close()
    assert "closed at step 1" in repr(engine)
    assert "_repr_html_" in vars(Watched)


def test_a_budget_that_is_gone_has_a_repr(tmp_path):
    budget = ao.Budget(tmp_path / "people.budget", epsilon=3, delta=1e-4)
    budget.path.unlink()
    assert "epsilon 0 of 3 spent" in repr(budget)  # as it was read last, without a lock


def test_plots_are_pictures_of_the_numbers(monkeypatch):
    pytest.importorskip("matplotlib")
    plan = ao.plan(order=FixedOrder(10, 2, 5), batch_size=4, epsilon=2, delta=1e-5, mechanism="tree")
    figure = plan.plot()
    (line,) = figure.axes[0].lines
    assert line.get_ydata() == pytest.approx(plan.noise_profile(sums=not plan.reaches_iterates))
    assert figure._repr_png_().startswith(b"\x89PNG")
    compared = ao.compare(["fixed", "shuffled"], dataset_size=12, batch_size=4, epochs=2, epsilon=2, delta=1e-4)
    bars = compared.plot().axes[0].patches
    assert [bar.get_width() for bar in bars] == pytest.approx([row.error for row in compared.rows])
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(MissingDependencyError, match=r"drawing a plot needs .*'\.\[train\]'"):
        plan.plot()
