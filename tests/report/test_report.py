"""Cards say what a plan promises; plots are pictures of the numbers."""

import io

import numpy as np
import pytest

import anyorder as ao
from anyorder.errors import ArgumentError, PlanError
from anyorder.report import (
    card,
    comparison_table,
    facts_panel,
    plot_accuracy,
    plot_noise,
)  # fmt: skip
from anyorder.strategy import Independent, SquareRoot, Tree

console = pytest.importorskip("rich.console")


def small(**changes):
    settings = {"dataset_size": 100, "batch_size": 10, "epochs": 3, "epsilon": 4.0, "delta": 1e-5, "mechanism": "tree"}
    return ao.plan(**{**settings, **changes})


def printed(renderable, width=100):
    out = io.StringIO()
    console.Console(file=out, width=width).print(renderable)
    return out.getvalue()


def test_the_card_says_what_is_promised():
    text = printed(card(small(clip_norm=2.0)))
    for phrase in (
        "epsilon <= 4 at delta = 1e-05", "one example (its gradients replaced by zero)", "shuffled anew in each",
        "none claimed", "binary tree, full estimator", "L2 norm 2; sums divided by 10", "(exact)", "mu = ",
    ):  # fmt: skip
        assert phrase in text, phrase


def test_the_card_of_an_amplified_plan_has_no_mu():
    rows = dict(small(order="poisson", mechanism="independent", epsilon=None, noise_multiplier=2.0).facts())
    assert rows["amplification"] == "by secret Poisson sampling"
    assert rows["protects"] == "one example (with or without it)"
    assert "sensitivity" not in rows


def test_noise_is_in_clip_norms():
    plan = small(clip_norm=5.0)
    assert dict(plan.facts())["noise"].startswith(f"std {plan.noise_std / 5:.5g} clip norms")


def test_strategies_in_one_phrase():
    assert Independent(8).describe() == "independent noise at every step"
    assert Tree(8).describe() == "binary tree, vanilla estimator, never restarted"
    restarted = Tree(9, "full", restarts=(3, 6), completion=(True, False))
    assert restarted.describe() == "binary tree, full estimator, 2 restart(s), 1 of them completed"
    assert SquareRoot(8).describe() == repr(SquareRoot(8))


def test_texts_are_never_read_as_markup():
    text = printed(facts_panel("a [title]", [("[name]", "[red]text[/red]")]))
    assert "a [title]" in text
    assert "[red]text[/red]" in text
    table = printed(comparison_table("rows", {"left": "left", "right": "right"}, [("[x]", "1"), ("y", "22")]))
    assert "[x]" in table
    assert "22" in table


def test_the_profile_is_the_noise_of_the_iterates():
    plan = small(momentum=0.5, clip_norm=3.0)
    B = plan.workload.matrix() @ plan.strategy.noising_matrix()
    np.testing.assert_allclose(plan.noise_profile(), plan.noise_std / 3 * np.linalg.norm(B, axis=1), rtol=1e-12)
    work, order = plan.workload, plan.participation
    assert plan.noise_error() == pytest.approx(ao.rmse(plan.strategy, work, order) * plan.sigma)


def test_beyond_matrices_the_sums_of_gradients_stand_in_and_are_named_so(tmp_path):
    n = 20_000
    sizes = {"dataset_size": 10 * n, "epochs": 1, "mechanism": SquareRoot(n)}
    plan = small(**sizes, learning_rates=np.linspace(1, 0.5, n))
    assert not plan.reaches_iterates
    with pytest.raises(PlanError, match="16384"):
        plan.noise_profile()
    sums = plan.noise_profile(sums=True)
    np.testing.assert_allclose(sums, small(**sizes).noise_profile(), rtol=1e-12)
    assert plan.noise_error(sums=True) == pytest.approx(np.sqrt(np.mean(sums**2)))
    assert "in the sums of gradients" in dict(plan.facts())["error"]
    plot_noise({"root": plan}, tmp_path / "noise.png", "noise")


def test_plots_are_pictures(tmp_path):
    plan = small()
    plot_noise({"one": plan, "other": small(mechanism="independent")}, tmp_path / "noise.png", "noise")
    plot_noise(dict.fromkeys("abcdefghijkl", plan), tmp_path / "many.png", "many lines")
    plot_accuracy([0.5], tmp_path / "one.png", "one epoch")
    plot_accuracy([0.2, 0.9, 1.0], tmp_path / "three.png", "three epochs")
    for name in ("noise", "many", "one", "three"):
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ArgumentError, match="cannot write the plot"):
        plot_accuracy([0.5], tmp_path / "absent" / "one.png", "title")
