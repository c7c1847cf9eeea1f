"""Cards say what a plan promises; plots are pictures of the numbers."""

import io
import re
from dataclasses import replace
from html import unescape

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import anyorder as ao
from anyorder.accounting import Gaussian
from anyorder.accounting.selection import Counts
from anyorder.app import charts as plots
from anyorder.app.cards import MEANS, card, comparison_table, facts_panel
from anyorder.app.charts import (
    Axis,
    Line,
    accuracy_figure,
    curve_figure,
    lanes,
    line_chart,
    noise_beside,
    noise_figure,
    order_figure,
    plot_accuracy,
    plot_noise,
    plot_report_goals,
)
from anyorder.app.report import html_report
from anyorder.errors import ArgumentError, PlanError
from anyorder.formatting import rounded_up
from anyorder.strategy import Independent, SquareRoot, Tree
from plans import flat_plan
from report.pages import claims

CLAIMS = claims()

console = pytest.importorskip("rich.console")


def small(**changes):
    settings = {"dataset_size": 100, "batch_size": 10, "epochs": 3, "epsilon": 4.0, "delta": 1e-5, "mechanism": "tree"}
    return flat_plan(**{**settings, **changes})


def printed(renderable, width=100):
    out = io.StringIO()
    console.Console(file=out, width=width).print(renderable)
    return out.getvalue()


def test_the_card_says_what_is_promised():
    text = printed(card(small(clip_norm=2.0)))
    for phrase in (
        "epsilon <= 4 at delta = 1e-05", "one example (its gradients replaced by zero)", "shuffled again in each",
        "none claimed", "binary tree, full estimator", "L2 norm 2; sums divided by 10", "(exact)", "mu = ",
    ):  # fmt: skip
        assert phrase in text, phrase


def test_the_card_warns_of_a_delta_that_a_release_of_one_unit_would_keep():
    assert "beware" not in dict(small(delta=0.0099).facts())
    plan = small(delta=0.01)
    assert dict(plan.facts())["beware"].startswith("delta is 1 / 100 or more: publishing one example of 100")
    assert "beware" in MEANS
    assert MEANS["beware"] in html_report(plan)
    assert "beware" not in dict(replace(plan, dataset_size=None).facts())  # nobody knows how many there are


@pytest.mark.parametrize(("delta", "warned"), [(0.09, False), (0.1, True)])
def test_a_large_delta_is_one_of_the_number_of_users_and_not_of_their_examples(delta, warned):
    owners = TensorDataset(torch.arange(100) % 10, torch.zeros(100, 1))
    plan = ao.plan(loader=DataLoader(owners, batch_size=10), epochs=1, unit=0, epsilon=4, delta=delta)
    found = dict(plan.facts()).get("beware")
    assert (found is not None) is warned
    assert found is None or found.startswith("delta is 1 / 10 or more: publishing one user of 10,")


def test_no_share_of_examples_is_held_against_a_run_of_users():
    owners = TensorDataset(torch.arange(100) % 10, torch.zeros(100, 1))
    settings = {"loader": DataLoader(owners, batch_size=10), "epochs": 1, "epsilon": 4, "delta": 1e-5}
    drawn = "DP-SGD, secret Poisson sampling"  # with which probability a user is in a batch, a loader does not say
    assert drawn in [profile.name for profile in noise_beside(ao.plan(**settings))]
    assert drawn not in [profile.name for profile in noise_beside(ao.plan(**settings, unit=0))]


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
    sizes = {"dataset_size": 10 * n, "epochs": 1, "mechanism": SquareRoot(n), "delta": 1e-6}
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


# -- pictures of a page -----------------------------------------------------------------------------------------------


def paths(drawn):
    """Colour -> (m, 2) places of a chart's line, in pixels."""
    found = re.findall(r'<path d="M([^"]*)" class="line c(\d)"', drawn.split("</svg>", 1)[0])
    return {int(colour): np.array([point.split() for point in points.split("L")], float) for points, colour in found}


def described(drawn):
    return unescape(re.search(r'aria-label="([^"]*)"', drawn).group(1))


@pytest.mark.parametrize("name", ["shuffled", "bins", "poisson", "replace"])
def test_every_mechanism_has_its_own_line_and_its_key_beside_its_name(name):
    plan = CLAIMS[name].plan
    profiles, drawn = noise_beside(plan), noise_figure(plan)
    most = max(float(profile.std.max()) for profile in profiles)
    lines = paths(drawn)
    assert list(lines) == list(range(len(profiles)))
    for profile, line in zip(profiles, lines.values(), strict=True):
        np.testing.assert_allclose(line[:, 1], 250 - 238 * profile.std / (1.05 * most), atol=0.051)
    rows = re.findall(r'class="line c(\d)"></path></svg></td><td>([^<]*)</td><td class="num">([^<]*)<', drawn)
    assert rows == [(str(i), p.name, f"{np.sqrt(np.mean(p.std**2)):.4g}") for i, p in enumerate(profiles)]
    sampled = any(profile.name.startswith("DP-SGD") for profile in profiles)
    assert sampled == (name in ("shuffled", "bins"))  # not beside itself, and not where units are replaced
    assert ("DP-SGD's line is valid for secret sampling alone" in unescape(drawn)) == sampled


def test_a_plan_that_selects_rows_is_beside_no_mechanism_that_does_not():
    assert [profile.name for profile in noise_beside(small(selection=Counts(5.0)))] == ["this run"]


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_a_picture_of_bare_sums_says_that_the_run_is_fitted_to_another_sum(momentum):
    assert ("own optimizer, and not for this sum" in noise_figure(small(momentum=momentum))) == (momentum > 0)


@pytest.mark.parametrize("name", ["fixed", "poisson", "bins", "replace"])
def test_the_curve_is_that_of_the_claim_and_the_point_is_the_claim(name):
    plan = CLAIMS[name].plan
    drawn = curve_figure(plan)
    known = name == "bins"  # whose claim is at one delta: the line is of independent noise in two known steps
    line = Gaussian(2**0.5 / 1.5, neighbours="zero-out", unit="example") if known else plan.curve
    for power in (-10, -7, -4, -1):
        epsilon = line.epsilon(10.0**power)
        (told,) = re.findall(rf"([\d.]+) at 1e{power:03d}", described(drawn))
        assert epsilon * (1 - 1e-9) <= float(told) <= 1.011 * epsilon + 1e-9
    assert ("The line is what is left if the batches became known; the point is the promise" in drawn) == known
    assert f"what the certificate states: epsilon {rounded_up(plan.epsilon)} at delta 1e-0" in drawn
    top = 1.08 * max(line.epsilon(1e-10), plan.epsilon)
    (across, down) = re.search(r'<circle cx="([\d.]+)" cy="([\d.]+)"', drawn).groups()
    assert float(across) == pytest.approx(52 + 414 * (np.log10(plan.delta) + 10) / 9, abs=0.06)
    assert float(down) == pytest.approx(250 - 238 * plan.epsilon / top, abs=0.06)


@pytest.mark.parametrize("name", ["shuffled", "users", "poisson", "bins", "one step"])
def test_made_up_units_are_told_from_real_ones(name):
    plan = CLAIMS[name].plan
    drawn = order_figure(plan)
    assert f"Three {plan.unit}s that are made up, in steps that the order allows" in drawn
    assert ("is drawn in secret, and stands nowhere" in drawn) == plan.participation.secret
    assert ("Bands: any step there" in drawn) == ('class="band"' in drawn) == (name in ("poisson", "one step"))


def test_marks_lie_at_their_steps_and_long_lines_reach_their_end():
    drawn = lanes([("unit A", [0, 4])], 5, [], "two steps of five")
    assert re.findall(r'<rect x="([\d.]+)"', drawn) == ["50.5", "464.5"]
    (line,) = paths(line_chart([Line(range(1, 1001), np.arange(1000.0))], Axis("x", 1, 1000), Axis("y", 0, 999), "")
                    ).values()  # fmt: skip
    assert line[0].tolist() == [52, 250]
    assert line[-1].tolist() == [466, 12]


def test_the_accuracy_that_is_told_is_the_last_and_not_the_best():
    drawn = accuracy_figure([(1, 0.5), (2, 0.9), (3, 0.7)], "epoch")
    assert "70.00 % of the test examples are right at the end" in drawn
    assert described(drawn) == "Test accuracy by epoch: from 50.0 to 70.0 percent; it fell once"


# -- plots ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def shown(monkeypatch):
    """What would be written: (label, x, y) of every line, and the axes."""
    found = []

    def keep(figure, path):
        (axes,) = figure.axes
        found.append(([(line.get_label(), line.get_xdata(), line.get_ydata()) for line in axes.lines], axes))

    monkeypatch.setattr(plots, "save_figure", keep)
    return found


def test_a_plot_of_noise_has_the_noise_of_each_plan_by_its_name(shown):
    plans = {"tree": small(), "independent": small(mechanism="independent", momentum=0.9)}
    plot_noise(plans, "noise.png", "noise")
    ((lines, axes),) = shown
    assert [name for name, _, _ in lines] == list(plans)
    for (_, steps, noise), plan in zip(lines, plans.values(), strict=True):
        np.testing.assert_array_equal(steps, np.arange(1, 31))
        np.testing.assert_allclose(noise, plan.noise_profile())
    assert axes.get_ylabel().startswith("noise in the iterate")


def test_where_one_plan_is_too_long_all_are_drawn_by_their_sums(shown):
    n = 20_000
    long = small(
        dataset_size=10 * n, epochs=1, delta=1e-6, mechanism=SquareRoot(n), learning_rates=np.linspace(1, 0.5, n)
    )
    plans = {"long": long, "short": small(momentum=0.9)}
    plot_noise(plans, "noise.png", "noise")
    ((lines, axes),) = shown
    for (_, _, noise), plan in zip(lines, plans.values(), strict=True):
        np.testing.assert_allclose(noise, plan.noise_profile(sums=True))
    assert axes.get_ylabel().startswith("noise in the sum of gradients")


def test_a_plot_of_accuracy_has_percents_at_their_rounds(shown):
    plot_accuracy([0.25, 0.75, 0.5], "a.png", "accuracy", at=[2, 4, 9], label="round")
    (([(_, rounds, percent)], axes),) = shown
    assert (list(rounds), list(percent), axes.get_xlabel()) == ([2, 4, 9], [25, 75, 50], "round")
    assert [text.get_text() for text in axes.texts] == ["50.0 %"]


def test_a_plot_of_report_goals_has_every_finite_epsilon(shown):
    plot_report_goals({"a": [(10, 8.0), (100, 0.5), (1000, 0.0)], "b": [(10, float("inf"))]}, "g.png", "goals")
    (([(_, goals, epsilons), (_, none, _)], axes),) = shown
    assert (list(goals), list(epsilons), list(none)) == ([10, 100], [8.0, 0.5], [])
    assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")
