"""What the reproductions of Kairouz et al. 2021 train and compute with: autograd, brute force, published code."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from reproductions import _claims, _page, _powers, _runs
from reproductions.__main__ import PAPERS
from reproductions._claims import Run
from reproductions._powers import Power
from reproductions.kairouz import accuracies, goals, images, theorems
from torch.nn import functional

from anyorder.accounting import gdp_epsilon
from anyorder.participation import EpochShuffle, FixedOrder
from references import load


def test_the_sum_of_clipped_gradients_is_autograds():
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((6, 12)).astype(np.float32), rng.integers(0, 10, 6)
    model = images.Network(12, 4, seed=1)
    model.parts()[3][0], y[:3] = 5, 0  # three are predicted well, and not cut
    expected, cut = np.zeros_like(model.theta), 0
    for row, label in zip(x, y, strict=True):
        parts = [torch.tensor(part, requires_grad=True) for part in model.parts()]
        w, b, v, c = parts
        scores = torch.tanh(torch.tensor(row)[None] @ w + b) @ v + c
        functional.cross_entropy(scores, torch.tensor([label])).backward()
        gradient = np.concatenate([part.grad.numpy().ravel() for part in parts])
        cut += np.linalg.norm(gradient) > 1
        expected += gradient / max(1, np.linalg.norm(gradient))
    assert 0 < cut < 6
    np.testing.assert_allclose(model.clipped_sum(x, y), expected, atol=5e-5)


def test_one_row_never_passes_the_clip_norm():
    rng = np.random.default_rng(2)
    model = images.Network(12, 4, seed=1)
    for scale in (1e-3, 1, 1e3):
        for _ in range(20):
            x = (scale * rng.standard_normal((1, 12))).astype(np.float32)
            assert np.linalg.norm(model.clipped_sum(x, np.array([3]))) <= 1


def test_plans_are_those_of_the_paper():
    plan = images.Cell("mnist", "tree", 8.0, 250, 5).plan(60_000)
    assert plan.strategy.restarts == (240, 480, 720, 960)
    assert plan.strategy.completion == (True,) * 4
    assert plan.participation == EpochShuffle(5, 240)
    # each completed epoch has 9 levels over a leaf, the last one that is not completed 8 at most
    assert plan.noise_multiplier == pytest.approx(math.sqrt(4 * 9 + 8) / plan.mu, rel=1e-4)
    assert gdp_epsilon(plan.mu, 1e-5) <= 8
    never = images.Cell("cifar10", "tree", 8.0, 500, 5, restart_every=0).plan(50_000)
    assert never.strategy.restarts == ()
    assert never.participation == FixedOrder(500, 5, 100)


def test_no_accuracy_is_kept_that_was_not_trained():
    kept = list(images.kept())
    assert kept
    keys = [tuple(row[name] for name in ("data", "noise", "epsilon", "batch", "epochs", "momentum", "estimator",
                                         "restart_every", "completion", "lr", "seed")) for row in kept]  # fmt: skip
    assert len(set(keys)) == len(keys)


def test_a_search_goes_uphill(monkeypatch):
    found = {0.05: 80.0, 0.1: 85.0, 0.2: 90.0, 0.5: 88.0}
    monkeypatch.setattr(images, "accuracy", lambda cell, lr, seed: found[lr] + seed)
    for start in (0.1, 0.2):
        best = images.best(images.Cell("mnist", "tree", 8.0, 250, 5), Run(seeds=(0, 1)), start)
        assert (best.lr, best.accuracies) == (0.2, [90.0, 91.0])


def test_a_claim_fails_where_one_epsilon_does(monkeypatch):
    two = replace(power(), seeds=2)
    table = {"a": {2.0: images.Best(1, [80.0, 80.1]), 8.0: images.Best(1, [90.0, 90.1])},
             "b": {2.0: images.Best(1, [81.0, 81.1]), 8.0: images.Best(1, [85.0, 85.1])}}  # fmt: skip
    monkeypatch.setattr(accuracies, "decided", lambda paper, statement, found: (two.verdict(found), two.told(found)))
    claim = accuracies.compared("p", "s", "t", table, "a", "b", lambda d: d, Run())
    assert claim.verdict == "fails, scaled down"
    assert claim.why.startswith("Not at epsilon 2.")
    assert accuracies.compared("p", "s", "t", table, "a", "b", lambda d: d + 2, Run()).verdict == "holds, scaled down"


def test_algorithm_3_by_hand():
    """8 leaves, all steps of one unit: 8 + 4 * 4 + 2 * 16 + 64; and 3 visits, 3 steps between, 9 steps."""
    assert theorems.algorithm3(8, 0, 8) == theorems.brute(8, 0, 8) == 120
    assert theorems.brute(9, 3, 3) == 11


def test_published_squares_of_the_tree():
    for squared, steps, gap, visits in ((88, 24, 2, 8), (11, 9, 3, 3)):
        assert theorems.program(steps, gap, visits) == squared
        assert theorems.algorithm3(steps, gap, visits) >= squared


def test_epsilons_of_sampling_by_the_first_conversion_are_larger():
    rate = 100 / goals.POPULATION
    assert goals.renyi(0.4, rate) == pytest.approx(7.51, abs=0.005)
    assert goals.renyi(0.4, rate, old=True) == pytest.approx(8.53, abs=0.005)


def test_restarted_trees_are_counted_as_published_code_does():
    for entry in load("dpftrl.json")["tfp.compute_rdp_tree_restart"]:
        trees = entry["steps_list"] if isinstance(entry["steps_list"], list) else [entry["steps_list"]]
        mu = math.sqrt(sum(goals.levels(steps) for steps in trees)) / entry["noise_multiplier"]
        assert gdp_epsilon(mu, entry["delta"], "rdp") == pytest.approx(entry["epsilon"], rel=0.01)


def power(task="smaller", least=0.5):
    return Power("p", "a claim", 3, least, "points", task, "smaller")


def test_a_verdict_is_the_same_rule_for_successes_and_misses():
    clear, level, few = [2.0, 2.1, 1.9], [0.9, -1.1, 0.3], [2.0, 2.1]
    known = [0.01, -0.02, 0.0]
    for task, words in (("theirs", ""), ("smaller", ", scaled down")):
        one = power(task)
        assert one.verdict([clear, clear]) == "holds" + words
        assert one.verdict([clear, [-x for x in clear]]) == "fails" + words
        assert one.verdict([clear, known]) == "fails" + words  # known to be less than matters
        for other in (level, few, [-x for x in level], [-x for x in few]):
            assert one.verdict([clear, other]) == "undecided"
    for one in (clear, [-x for x in clear]):
        assert power("other").verdict([one]) == "undecided"
    assert "3 seeds, differences known to within 0.25 points (95 %), 0.5 matter" in power().told([clear])


def test_a_power_that_was_stated_after_the_run_is_marked(tmp_path, monkeypatch):
    """Its digest is in the line; whoever changes it, or states it when runs are on file, has the mark on the page."""
    stored = tmp_path / "p_runs.jsonl"
    monkeypatch.setattr(_claims, "RESULTS", tmp_path)
    monkeypatch.setattr(_runs, "_OLD", {})
    monkeypatch.setattr(_powers, "table", lambda: (power(least=state["least"]),))
    state = {"least": 0.5}

    def claims(run):
        if state.get("reads"):
            _runs.kept(stored)
        yield _claims.Claim(place="a", statement="a claim", theirs="t", ours="o", verdict="holds", seeds=run.seeds)

    def mark(**changed):
        state.update(changed)
        figure = _claims.Figure("f", claims)
        _claims.write("p", (figure,), {"f": list(_claims.found("p", figure, Run(seeds=state.get("seeds", (0,)))))})
        return _page.power_mark(_claims.results("p")[0])

    assert mark() == ""
    _runs.keep(stored, {"run": 1})
    assert mark(reads=True) == ""
    state["least"] = 0.1
    assert _page.power_mark(_claims.results("p")[0]) == "†"
    assert mark(seeds=(1,)) == "†"  # the stored run is older than what is stated now
    assert mark(reads=False) == "†"  # the same seeds: their outcome is known
    assert mark(seeds=(2,)) == ""


def test_what_was_trained_or_measured_has_a_stated_power():
    for paper in PAPERS:
        for row in _claims.results(paper):
            trained = row.claim.stored or (row.claim.measured and row.claim.seeds)
            if trained and row.claim.seeds and row.claim.ours:
                assert row.power, row.claim.statement
                assert len(row.claim.seeds) >= _powers.stated(paper, row.claim.statement).seeds
    beginnings = [(one.paper, one.claim) for one in _powers.table()]
    assert len(set(beginnings)) == len(beginnings)
    kept = [row.claim for paper in PAPERS for row in _claims.results(paper)]
    assert not [one.claim for one in _powers.table()
                if not any(_powers.stated(claim.paper, claim.statement) == one for claim in kept)]  # fmt: skip


def test_fresh_leaves_out_what_other_processes_ran(tmp_path, monkeypatch):
    file = tmp_path / "runs.jsonl"
    _runs.keep(file, {"run": 1})
    monkeypatch.setattr(_runs, "_OLD", {})
    monkeypatch.setattr(_runs, "READ", set())
    assert _runs.kept(file) == [{"run": 1}]
    assert "powers" in file.read_text()
    assert {"runs.jsonl"} == _runs.READ
    monkeypatch.setattr(_runs, "FRESH", True)
    assert _runs.kept(file) == []
    _runs.keep(file, {"run": 2})
    assert _runs.kept(file) == [{"run": 2}]
