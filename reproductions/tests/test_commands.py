"""Papers run again: each command ends with a verdict, and no epsilon is claimed for what is not private."""

import importlib.util
import json
import re
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from benchmarks.federations import joint_task
from PIL import Image
from reproductions import _claims, _page, _show, joint_algorithm1, user_mean
from reproductions.__main__ import PAPERS, chosen_figures, parser

from anyorder.federated import Layout

ROOT = Path(__file__).parents[2]
NAMES = sorted(path.stem for path in (ROOT / "reproductions").glob("[!_]*.py"))


TITLES = {name: module.TITLE for name, module in PAPERS.items()}
KEPT = [row for paper in PAPERS for row in _claims.results(paper)]


def test_there_are_some():
    assert {"joint_algorithm1", "user_mean"} <= set(NAMES)


def test_every_figure_is_kept_and_every_kept_claim_is_of_a_figure():
    assert {(row.claim.paper, row.figure) for row in KEPT} == {
        (paper, figure.name) for paper, module in PAPERS.items() for figure in module.FIGURES
    }


def test_no_claim_stands_twice():
    named = [(row.claim.paper, row.claim.place, row.claim.statement) for row in KEPT]
    assert len(set(named)) == len(named)


def test_every_command_is_one_that_the_command_takes():
    for command in sorted({row.claim.command for row in KEPT}):
        python, flag, module, *words = shlex.split(command)
        assert (python, flag, module) == ("python", "-m", "reproductions")
        options = parser().parse_args(words)
        assert chosen_figures(options.paper, options.figures)


@pytest.mark.parametrize("command", sorted({row.claim.measured for row in KEPT if row.claim.measured}))
def test_every_measurement_is_a_part_of_a_benchmark(command):
    python, flag, module, *words = shlex.split(command)
    assert (python, flag) == ("python", "-m")
    source = Path(importlib.util.find_spec(module).origin).read_text()
    assert words[words.index("--only") + 1] in re.findall(r"\w+", source)


def test_results_are_read_as_they_were_written():
    for paper in PAPERS:
        text = (_claims.RESULTS / f"{paper}.jsonl").read_text()
        assert [_claims.line(row) for row in _claims.results(paper)] == text.splitlines()


def test_pages_are_those_of_the_results():
    for name, text in _page.pages(TITLES).items():
        assert (_page.DOCS / name).read_text() == text, f"{name}: run python -m reproductions --page"


def test_what_fails_has_its_reason_beside_it():
    fails = [row.claim for paper in PAPERS for row in _claims.results(paper) if row.claim.verdict.startswith("fails")]
    assert len(fails) > 30
    for claim in fails:
        assert len(claim.why) > 10, f"{claim.place}: no reason"
        page = (_page.DOCS / f"{claim.paper}.md").read_text()
        usual = _page.usual_power(_claims.results(claim.paper))
        said = [_page.without_usual_power(one, *usual) for one in _page.sentences(claim.why)]
        assert all(one.removesuffix(".").replace("|", "\\|") in page for one in said), claim.place


def test_neighbours_are_told_together():
    told = ["n = 1: a", "n = 2: a", "b: x", "b: y", "c"]
    assert _page.together(told) == ["n = 1; n = 2: a", "b: x; y", "c"]


def test_a_series_is_whole_though_each_claim_has_a_part_of_it():
    theirs, ours = _page.series(_claims.results("huang2023"))["mnist, silo"]
    assert theirs.startswith("4: 94.5, 16: 94.6")
    assert [part.split(":")[0] for part in ours.split(", ")] == ["4", "16", "64", "128", "256", "512"]


def test_pictures_are_small_and_of_the_results():
    drawn = _page.plots(TITLES)
    for name, curves in drawn.items():
        path = _page.DOCS / name
        assert path.stat().st_size < 60_000
        with Image.open(path) as picture:
            assert picture.info["Description"] == _page.mark(curves), f"{name}: run python -m reproductions --page"
    assert {path.name for path in _page.DOCS.glob("*.png")} == set(drawn)


# Of the cheap ones these take most of the time.
DEAR = {"against_n", "fig2c", "fig8_noise", "identities", "figure4", "theorem3"}


@pytest.mark.parametrize("paper", PAPERS)
def test_the_cheap_figures_come_to_the_verdicts_that_are_kept(paper):
    """Small sizes may leave a claim out, and say so of what they scale down; none turns."""
    kept = {(row.claim.place, row.claim.statement): row.claim.verdict for row in _claims.results(paper)}
    for figure in (figure for figure in chosen_figures(paper, []) if figure.name not in DEAR):
        for row in _claims.found(paper, figure, _claims.Run(quick=True)):
            before = kept[row.claim.place, row.claim.statement]
            assert row.claim.verdict.split(",")[0] == before.split(",")[0], row.claim
            assert (row.claim.verdict == "not tried") == (before == "not tried"), row.claim


def test_a_verdict_needs_its_reason():
    good = _claims.Claim(place="Table 1", statement="a", theirs="1", ours="1", verdict="holds")
    for wrong in (
        {"verdict": "maybe"},
        {"verdict": "fails"},
        {"verdict": "not tried", "why": "too long"},
        {"ours": ""},
    ):
        with pytest.raises(ValueError, match=r"Table 1|verdict must"):
            replace(good, **wrong)


def test_writing_a_figure_leaves_the_others(tmp_path, monkeypatch):
    monkeypatch.setattr(_claims, "RESULTS", tmp_path)
    figures = tuple(
        _claims.Figure(
            name,
            lambda run, name=name: [
                _claims.Claim(place=name, statement="s", theirs="t", ours="o", verdict="holds", value=len(run.seeds))
            ],
        )
        for name in ("a", "b")
    )
    for name, seeds in (("b", (0,)), ("a", (0, 1)), ("b", (0, 1, 2))):
        figure = next(f for f in figures if f.name == name)
        _claims.write("p", figures, {name: list(_claims.found("p", figure, _claims.Run(seeds=seeds)))})
    assert [(row.figure, row.claim.value) for row in _claims.results("p")] == [("a", 2), ("b", 3)]


def test_every_verdict_holds():
    findings = list(user_mean.run(quick=True))
    assert [finding.holds for finding in findings].count(True) >= 2
    assert not [finding.name for finding in findings if finding.holds is False]


def test_the_command_prints_a_verdict_or_json(monkeypatch, capsys):
    command = [sys.executable, "-m", "reproductions.joint_algorithm1", "--quick"]
    text = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=120).stdout
    assert text.splitlines()[-1] == "verdict: as expected"
    monkeypatch.setattr(sys, "argv", [*command[2:], "--json"])
    with pytest.raises(SystemExit) as ended:
        _show.main("", joint_algorithm1.run)
    assert not ended.value.code
    lines = capsys.readouterr().out.splitlines()
    assert lines
    assert all({"name", "value", "holds"} <= json.loads(line).keys() for line in lines)


def test_the_printed_noise_is_the_papers():
    """Literal sigma for (1, 1e-4), n = 4, m = 50: sqrt(T log(1/delta)) / (m n) with T = (m n)^2."""
    assert joint_algorithm1.World(4, 50).sigma == pytest.approx(np.sqrt(np.log(1e4)))
    assert joint_algorithm1.World(4, 50).steps == 40_000


def test_the_attack_sees_nothing_without_the_record():
    signs = np.zeros(200)
    found = joint_algorithm1.scores(joint_algorithm1.World(2, 10), signs, private_state=True, seed=3)
    noise = 3.035 * np.sqrt(400)  # of all steps together
    assert abs(found.mean()) < 4 * noise / np.sqrt(200)
    assert found.std() == pytest.approx(noise, rel=0.2)


def test_the_range_is_drawn_where_most_values_are():
    rng = np.random.default_rng(0)
    x = 0.7 + 0.05 * rng.standard_normal(2000)
    low, high = user_mean.private_range(x, 1.0, 0.1, 4.0, rng)
    assert low < 0.7 < high
    assert high - low == pytest.approx(0.4)


def test_one_value_moves_the_range_by_no_more_than_its_probabilities_say():
    """The exponential mechanism's ratio for replaced neighbours, from exact probabilities."""

    class Probabilities:
        def choice(self, count, p):
            self.p = p
            return 0

    def drawn(x):
        told = Probabilities()
        user_mean.private_range(np.array(x), 0.8, 0.25, 2.0, told)
        return told.p

    one, other = drawn([-1.9, -1.9, 0.1, 0.1, 0.1]), drawn([-1.9, -1.9, 0.1, 0.1, 1.9])
    assert abs(np.log(one / other)).max() <= 0.8 + 1e-12


def test_the_mean_in_high_dimension_is_unbiased_up_to_its_noise():
    rng = np.random.default_rng(1)
    rows = np.array([1.0, -2.0, 0.0, 0.5]) + 0.05 * rng.standard_normal((4000, 4))
    found = np.mean([user_mean.mean(rows, 4.0, 1e-4, 0.1, 4.0, rng) for _ in range(20)], axis=0)
    np.testing.assert_allclose(found, rows.mean(0), atol=0.05)


def test_the_condition_is_monotone_and_the_networks_is_out_of_reach():
    assert user_mean.users_needed(30_496, 1.0, 1e-4, 0.1, 2.0) > 250_000
    assert user_mean.beta(10, 4, 1, 1e-4, 0.1, 2.0) == 1.0
    n = user_mean.users_needed(4, 1.0, 1e-4, 0.1, 2.0)
    assert user_mean.beta(n, 4, 1, 1e-4, 0.1, 2.0) <= 0.03 < user_mean.beta(n - 1, 4, 1, 1e-4, 0.1, 2.0)


@pytest.mark.parametrize("n", [4, 16, 64])
def test_owners_of_the_joint_task_have_at_most_eight_classes_and_every_record_is_dealt_once(n):
    generator = torch.Generator().manual_seed(0)
    y, test_y = torch.randint(10, (1000,), generator=generator), torch.randint(10, (700,), generator=generator)
    parts, tests = joint_task.owners(joint_task.Pool(torch.arange(1000), y, torch.arange(700), test_y), n, seed=1)
    assert sorted(i for x, _ in parts.values() for i in x.tolist()) == list(range(1000))
    assert sorted(i for x, _ in tests.values() for i in x.tolist()) == list(range(700))
    for owner, (x, labels) in parts.items():
        assert torch.equal(y[x], labels)
        assert 2 <= len(set(labels.tolist())) <= 8  # those of eight shards by lot
        assert set(tests[owner][1].tolist()) <= set(labels.tolist())
        assert abs(len(x) - 1000 / n) <= 8 + 20 / n


def test_records_of_a_user_lie_side_by_side_and_are_of_one_owner():
    y = torch.arange(100) % 10
    data = joint_task.Pool(torch.arange(100), y, torch.arange(0), y[:0])
    parts = {"a": (torch.arange(7), y[:7]), "b": (torch.arange(7, 20), y[7:20])}
    assert joint_task.users(data, parts, 5).x.tolist() == [0, 1, 2, 3, 4, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16]


def test_the_head_that_is_fitted_fits():
    """On centred features, with the middle put back into the bias: the loss of the owner's images falls."""
    model = joint_task.network(0)
    x, y = torch.randn(40, 1, 28, 28, generator=torch.Generator().manual_seed(2)), torch.arange(40) % 8
    layout = Layout.of({name: model.get_parameter(name) for name in ("fc1.weight", "fc1.bias")})
    moved = layout.named(joint_task.Head()(model, layout, (x, y), 0))
    before = torch.nn.functional.cross_entropy(model(x), y).item()
    with torch.no_grad():
        model.fc1.weight += moved["fc1.weight"]
        model.fc1.bias += moved["fc1.bias"]
        assert torch.nn.functional.cross_entropy(model(x), y).item() < before / 2
