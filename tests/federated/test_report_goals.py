"""`anyorder report-goals`: the table, the object, the picture, and what it refuses."""

import json

import pytest

pytest.importorskip("typer")
pytest.importorskip("rich")

from typer.testing import CliRunner

from anyorder.app.cli import app
from anyorder.federated import epsilon_by_report_goal
from anyorder.federated.planning import at_same_error

OPTIONS = "--population 342477 --rounds 1600 --noise-ratio 0.00149 --delta 1e-6"
ARGUMENTS = ["report-goals", *OPTIONS.split()]


@pytest.fixture(autouse=True)
def _no_cache(monkeypatch):
    monkeypatch.setenv("ANYORDER_CACHE", "off")


def invoke(*arguments):
    return CliRunner().invoke(app, [*ARGUMENTS, *map(str, arguments)])


def test_json_has_every_point_of_every_mechanism():
    outcome = invoke("--goals", "100,5060", "--compare", "blt, 2 buffers", "--json")
    assert outcome.exit_code == 0, outcome.output
    found = json.loads(outcome.stdout)
    tree = epsilon_by_report_goal(342_477, 1600, 0.00149, [100, 5060], 1e-6)
    blt = at_same_error(tree, "blt, 2 buffers")
    assert [point["epsilon"] for point in found["mechanisms"]["tree"]] == [point.epsilon for point in tree]
    assert [point["epsilon"] for point in found["mechanisms"]["blt, 2 buffers"]] == [point.epsilon for point in blt]
    last = found["mechanisms"]["tree"][-1]
    assert (last["max_participations"], last["min_separation"], last["report_goal"]) == (24, 67, 5060)


@pytest.mark.parametrize(("first", "other"), [("tree", "independent"), ("independent", "tree")])
def test_options_reach_the_points(first, other):
    """Restarts, momentum and conversion, of the first mechanism and of one that is compared with it."""
    words = ["--restart-every", 2, "--momentum", 0.5, "--conversion", "zcdp", "--mechanism", first, "--compare", other]
    outcome = invoke("--goals", "1000,5060", *words, "--json")
    assert outcome.exit_code == 0, outcome.output
    chosen = {"mechanism": first, "restart_every": 2, "momentum": 0.5, "conversion": "zcdp"}
    points = epsilon_by_report_goal(342_477, 1600, 0.00149, [1000, 5060], 1e-6, **chosen)
    lines = {first: points, other: at_same_error(points, other, restart_every=2)}
    expected = {name: [point.to_dict() for point in line] for name, line in lines.items()}
    assert json.loads(outcome.stdout)["mechanisms"] == json.loads(json.dumps(expected))


def test_table_and_plot(tmp_path):
    pytest.importorskip("matplotlib")
    outcome = invoke("--order", "shuffled", "--conversion", "rdp", "--goals", "1000", "--plot", tmp_path / "goals.png")
    assert outcome.exit_code == 0, outcome.output
    assert "32.51" in outcome.stdout  # 32.52 in the paper, by a coarser grid of orders
    assert (tmp_path / "goals.png").read_bytes().startswith(b"\x89PNG")


def test_goals_by_default():
    found = json.loads(invoke("--json").stdout)
    goals = [point["report_goal"] for point in found["mechanisms"]["tree"]]
    assert (goals[0], goals[-1], len(goals)) == (100, 34247, 10)
    few = json.loads(invoke("--population", "8", "--json").stdout)
    assert [point["report_goal"] for point in few["mechanisms"]["tree"]] == [1]


@pytest.mark.parametrize(
    ("arguments", "phrase"),
    [
        (["--goals", "100;1000"], "whole numbers with commas"),
        (["--goals", "400000"], "report_goals must be"),
        (["--goals", "100", "--rounds", "64", "--compare", "leaf"], "mechanism must be"),
        (["--plot", "/nowhere/goals.png"], "cannot write a plot"),
    ],
)
def test_what_is_refused_is_one_line(arguments, phrase):
    outcome = invoke(*arguments)
    assert outcome.exit_code == 2
    assert outcome.stdout == ""
    assert phrase in outcome.stderr
    *progress, _ = outcome.stderr.splitlines()  # a slow machine says how far it is
    assert all("planning each report goal" in line for line in progress)
