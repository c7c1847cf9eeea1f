"""`anyorder tune`, and `anyorder verify` of what it leaves: what is printed, and with which exit code."""

import json
import os
import re
import sys

import pytest

pytest.importorskip("typer")
pytest.importorskip("rich")

from typer.testing import CliRunner

import processes
from anyorder.app.cli import app
from budget.searches import Copied

MODULE = """
import os
import subprocess

import anyorder as ao
from anyorder.budget import Trial

print("imported")


def trial(settings, plan, folder):
    print("a line of a run", flush=True)
    subprocess.run(["echo", "a line of what a run starts"], check=True)
    os.write(2, b"a line on stderr")
    if os.path.exists("broken"):
        raise RuntimeError("of one person")
    if os.path.exists("leaves"):
        raise SystemExit(7)
    if os.path.exists("stopped"):
        raise KeyboardInterrupt
    with open("made", "a") as file:
        print(1, file=file)
    return Trial(settings["rate"], ao.Certificate(plan, plan.n, os.urandom(16).hex(), "0" * 64, "0" * 64))
"""
SPACE = {"space": {"rate": [1, 2, 3], "batch_size": [4]}, "plan": {"dataset_size": 12, "epochs": 1}}
TUNE = ["tune", "--function", "mine:trial", "--space", "space.json", "--epsilon", "8", "--delta", "1e-5",
        "--public-score", "--runs", "3"]  # fmt: skip


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(MODULE)
    (tmp_path / "space.json").write_text(json.dumps(SPACE))
    return tmp_path


QUICK = """
from anyorder.__main__ import main
from anyorder.budget import trials
from budget.searches import Forked

trials.subprocess = type("subprocess", (), {"Popen": Forked, "PIPE": None})
main()
"""


def process(*arguments):
    """In a process of its own, whose runs are copies of it."""
    return processes.run("-c", QUICK, *arguments)


@pytest.fixture
def copied(place, monkeypatch):
    """Commands in this process, whose runs are copies of one that has imported torch alone."""
    monkeypatch.syspath_prepend(place)
    monkeypatch.setattr("anyorder.budget.trials.subprocess.Popen", Copied)
    yield
    sys.modules.pop("mine", None)


def invoke(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_a_search_from_the_shell_shows_the_best_and_nothing_of_the_others(place):
    done = process(*TUNE, "--output", "found")
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert "a line" not in done.stdout
    assert "result" not in done.stdout  # the function kept none
    assert "epsilon <= 8 at delta = 1e-05, of the whole search" in done.stdout
    assert "a secret number of runs, geometric, 3 on average" in done.stdout
    shown = [".gitignore", ".lock", ".search.json", "best", "report.html", "search.privacy.json"]
    assert sorted(os.listdir("found")) == shown
    made = (place / "made").read_text()
    again = process(*TUNE, "--output", "found", "--json")
    assert again.stdout.splitlines()[0] == "imported"
    told = json.loads(again.stdout.splitlines()[-1])
    assert told["trials"] is None
    assert told["best"]["settings"]["rate"] in (1, 2, 3)
    assert told["claims"]["epsilon"] <= 8
    assert told["claims"]["best_epsilon"] < 8
    assert (place / "made").read_text() == made

    shown = invoke("verify", "found/search.privacy.json")
    assert shown.exit_code == 0, shown.output
    assert "verified: this search claims epsilon <= 8 at delta = 1e-05" in shown.stdout
    assert "ok  epsilon of the whole search, recomputed" in shown.stdout
    assert "--  not checked: that the number of runs was drawn from the law" in shown.stdout
    as_json = json.loads(invoke("verify", "found/search.privacy.json", "--json").stdout)
    assert as_json["ok"]
    assert as_json["claims"] == told["claims"]

    text = (place / "found/search.privacy.json").read_text()
    (place / "found/search.privacy.json").write_text(text.replace('"mean": 3.0', '"mean": 2.0'))
    bad = invoke("verify", "found/search.privacy.json")
    assert bad.exit_code == 1
    assert "NOT verified" in bad.stderr
    assert not json.loads(invoke("verify", "found/search.privacy.json", "--json").stdout)["ok"]


@pytest.mark.parametrize("count", [3, 500])
@pytest.mark.usefixtures("copied")
def test_the_result_of_the_best_run_is_shown_or_where_it_is(place, count):
    (place / "mine.py").write_text(MODULE.replace('"0" * 64))', f'"0" * 64), [0.5] * {count})'))
    done = invoke(*TUNE, "--output", "found")
    assert done.exit_code == 0, done.output
    line = next(line for line in done.stdout.splitlines() if line.startswith("result:"))
    short = count == 3
    assert line == ("result: [0.5, 0.5, 0.5]" if short else "result: 2500 characters of JSON, which the same command "
                    "prints with --json")  # fmt: skip
    told = json.loads(invoke(*TUNE, "--output", "found", "--json").stdout.splitlines()[-1])
    assert told["best"]["result"] == [0.5] * count


def test_a_grid_from_the_shell_shows_all(place):
    done = process(*TUNE[:-2], "--law", "fixed", "--output", "found", "--json")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    assert [run["settings"]["rate"] for run in told["trials"]] == [1, 2, 3]
    assert [run["folder"].rsplit("/", 2)[1:] for run in told["trials"]] == [["runs", "1"], ["runs", "2"], ["runs", "3"]]
    assert "a line of a run" in done.stderr  # all may be shown
    assert told["best"]["score"] == 3
    shown = invoke("verify", "found/search.privacy.json")
    assert shown.exit_code == 0
    assert "ok  that no two runs have the same noise key" in shown.stdout


@pytest.mark.slow
@pytest.mark.parametrize(("file", "code"), [("broken", 1), ("leaves", 1), ("stopped", 1)])
def test_a_search_that_fails_says_nothing_of_its_runs(file, code, place):
    (place / file).touch()
    done = process(*TUNE, "--output", "found")
    assert done.returncode == code
    assert "a line" not in done.stdout + done.stderr
    assert "of one person" not in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert (place / "found/.printed.txt").stat().st_mode & 0o077 == 0
    if file == "broken":  # what was mended goes on
        (place / file).unlink()
        assert process(*TUNE, "--output", "found").returncode == 0


@pytest.mark.usefixtures("copied")
def test_a_search_from_the_shell_is_entered_in_a_budget(place):
    import anyorder as ao

    left = ao.Budget(place / "people.budget", 20.0, 1e-5)
    grid = [*TUNE[:-2], "--law", "fixed", "--budget", "people.budget", "--output"]
    for _ in range(2):  # it goes on, or is shown again
        done = invoke(*grid, "found")
        assert done.exit_code == 0, done.output
        [held] = left.entries()
        assert held.spend.what == "search"
    left.limit(10.0, 1e-5)
    done = invoke(*grid, "other")
    assert done.exit_code == 1
    assert "must not run" in done.stderr
    assert invoke(*TUNE, "--output", "third", "--budget", "none").exit_code == 1


@pytest.mark.usefixtures("copied")
def test_a_private_score_from_the_shell():
    asked = [word for word in TUNE if word != "--public-score"]
    done = invoke(*asked, "--output", "found", "--sensitivity", "0.5", "--share", "0.2", "--json")
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["search"]["score"]["sensitivity"] == 0.5
    assert told["search"]["score"]["std"] > 0.5
    shown = invoke("verify", "found/search.privacy.json")
    assert "--  not checked: that scores have the sensitivity that is stated" in shown.stdout


@pytest.mark.parametrize(
    ("content", "options", "phrase"),
    [
        ("[]", [], "--space must be a file of JSON"),
        ('{"rate": [1]}', [], "must hold an object with 'space'"),
        (json.dumps(SPACE), ["--law", "cauchy"], "law must be one of"),
        (json.dumps(SPACE), ["--sensitivity", "1"], "--public-score, .* or --sensitivity, .* got both"),
        (json.dumps(SPACE), ["--function", "mine:other"], "has no function 'other'"),
        (json.dumps(SPACE), ["--runs", "0"], "mean must be"),
        (json.dumps({**SPACE, "plan": {"dataset_size": 2, "epochs": 1}}), [], "make no plan, so nothing was run"),
    ],
)
def test_wrong_commands_are_refused_in_one_line(content, options, phrase, place, monkeypatch):
    (place / "space.json").write_text(content)
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    monkeypatch.setattr(sys, "path", [str(place), *sys.path])
    done = invoke(*TUNE, "--output", "found", *options)
    assert done.exit_code == 2, done.output
    assert re.search(phrase, done.stderr)
    assert len(done.stderr.splitlines()) == 1
    assert not (place / "found/.search.json").exists()
