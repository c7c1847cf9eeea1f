"""The exported page: its grid, its numbers, its size; and the parts of the page in a wheel."""

import json
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from typer.testing import CliRunner

import anyorder as ao
from anyorder.accounting.poisson import poisson_epsilon
from anyorder.app.cli import app
from anyorder.app.planner_page.export import Grid, _choices, _key, _number, _start, _work, answers_of, export
from anyorder.errors import ArgumentError
from planner_page.guesses import PATCHED, guessed
from plans import flat_plan

ROOT = Path(__file__).parents[2]
SMALL = Grid(
    dataset_size=120, batch_sizes=(20, 60), epoch_counts=(2,), epsilons=(1.0, 4.0), deltas=(1e-5,),
    orders=("shuffled", "fixed"), memories=(1, None), ratios=(0.05,),
)  # fmt: skip


@pytest.fixture(scope="module")
def data():
    return json.loads(json.dumps(answers_of(SMALL)))


def test_every_number_of_the_grid_is_a_plans(data):
    for key, fit in data["known"].items():
        order, batch, epochs, memory = key.split("|")
        for epsilon in (1, 4):
            budget = data["sigmas"][f"{epsilon}|0.00001"]
            asked = {"dataset_size": 120, "batch_size": int(batch), "epochs": int(epochs), "order": order}
            plan = flat_plan(epsilon=epsilon, delta=1e-5, memory=int(memory) if memory else None, **asked)
            name, error, last, _, vectors, _, noise = fit["rows"][0]
            assert (fit["steps"], fit["order"]) == (plan.n, plan.participation.describe())
            assert error * budget["sigma"] == pytest.approx(plan.noise_error(), rel=1e-9)
            assert last * budget["sigma"] == pytest.approx(plan.noise_profile()[-1], rel=1e-9)
            assert noise * budget["sigma"] == pytest.approx(plan.noise_multiplier, rel=1e-9)
            assert (vectors, budget["epsilon"]) == (plan.strategy.state_rows, pytest.approx(plan.epsilon, rel=1e-9))
    assert len(data["known"]) == 2 * 2 * 2


WIDE = Grid(
    dataset_size=240, batch_sizes=(20,), epoch_counts=(2,), epsilons=(2.0, 4.0), deltas=(1e-5, 1e-7),
    orders=("fixed", "poisson"), memories=(1,), ratios=(0.02, 0.05), momentum=0.9,
)  # fmt: skip


def test_momentum_delta_and_secret_sampling_of_the_grid_are_in_every_answer(monkeypatch):
    for name in PATCHED:
        monkeypatch.setattr(name, guessed)
    work = {(part, "|".join(map(_key, name))): compute for part, name, compute in _work(WIDE)}

    def held(part, *name):
        return json.loads(json.dumps(work[part, "|".join(name)]()))

    epsilon, delta = 4.0, 1e-7
    asked = {"dataset_size": 240, "batch_size": 20, "epochs": 2, "delta": delta, "momentum": 0.9}
    plan = flat_plan(epsilon=epsilon, order="fixed", memory=1, **asked)
    fit, budget = held("known", "fixed|20|2|1"), held("sigmas", "4|1e-7")
    assert fit["rows"][0][1] * budget["sigma"] == pytest.approx(plan.noise_error(), rel=1e-9)
    assert budget["epsilon"] == pytest.approx(plan.epsilon, rel=1e-9)
    assert min(row[1] for row in fit["rows"]) >= fit["bound"]

    printed = held("claims", "fixed|20|2|1|4|1e-7")
    plain = [row[0] for row in fit["rows"]].index("independent")
    assert printed.keys() == {"0", str(plain)}
    for row, claim in printed.items():
        noise = fit["rows"][int(row)][6] * budget["sigma"]
        assert claim == pytest.approx(poisson_epsilon(noise, 20 / 240, 24, delta), rel=1e-9)

    coins = flat_plan(epsilon=epsilon, order="poisson", **asked)
    found = held("sampled", "20|2|4|1e-7")
    (own,) = found["plan"]["rows"]
    assert own["best"]
    assert found["plan"]["secret"]
    assert (found["row"]["best"], found["row"]["reference"]) == (False, True)
    for row in (own, found["row"]):
        assert row["error"] == pytest.approx(coins.noise_error(), rel=1e-9)
        assert row["epsilon"] == pytest.approx(coins.epsilon, rel=1e-9)
        assert row["known_epsilon"] == pytest.approx(coins.known_epsilon, rel=1e-9)

    white = flat_plan(epsilon=epsilon, order="fixed", memory=1, mechanism="independent", **asked)
    cell = held("sweeps", "independent|noise|fixed|1|1e-7|4")["20|2"]
    assert cell["error"] == pytest.approx(white.noise_error(), rel=1e-9)
    for ratio in (0.02, 0.05):
        cell = held("sweeps", f"independent|epsilon|fixed|1|1e-7|{ratio}")["20|2"]
        plan = flat_plan(noise_multiplier=20 * ratio, order="fixed", mechanism="independent", **asked)
        assert cell["epsilon"] == pytest.approx(plan.epsilon, rel=1e-9)
        cell = held("sweeps", f"auto|epsilon|poisson||1e-7|{ratio}")["20|2"]
        assert cell["epsilon"] == pytest.approx(poisson_epsilon(20 * ratio, 20 / 240, 24, delta), rel=1e-9)


def test_a_page_starts_at_settings_that_it_holds():
    start, choices = _start(WIDE), _choices(WIDE)
    assert all(start[name] in choices[name] for name in choices)


def test_a_sheet_is_a_sweep(data):
    sheet = data["sweeps"]["tree|noise|fixed||0.00001|4"]
    plan = ao.plan(dataset_size=120, batch_size=60, epochs=2, order="fixed", epsilon=4.0, delta=1e-5, mechanism="tree")
    assert sheet["60|2"]["error"] == pytest.approx(plan.noise_error(), rel=1e-9)
    assert set(data["sweeps"]["blt|epsilon|shuffled|1|0.00001|0.05"]) == {"20|2", "60|2"}


def test_the_page_states_its_grid_and_what_it_refuses(data):
    assert "batch sizes 20, 60; epochs 2; epsilons 1, 4" in data["stated"]
    assert data["choices"]["memory"] == [1, None]
    long = Grid(
        dataset_size=10**5, batch_sizes=(10,), epoch_counts=(1,), epsilons=(1.0,), orders=("fixed",), memories=(None,)
    )
    assert "at most" in answers_of(long)["known"]["fixed|10|1|"]["refused"]["message"]
    with pytest.raises(ArgumentError, match="orders must be one of"):
        Grid(orders=("balls-in-bins",))
    with pytest.raises(ArgumentError, match="batch_sizes must be an integer from 1 to 60000"):
        Grid(batch_sizes=(70000,))
    with pytest.raises(ArgumentError, match="epsilons must be a tuple"):
        Grid(epsilons=())


def test_a_page_that_would_be_too_large_is_not_written(tmp_path, monkeypatch):
    monkeypatch.setattr("anyorder.app.planner_page.export.MAX_BYTES", 40_000)
    with pytest.raises(ArgumentError, match="at most 40000 bytes"):
        export(tmp_path / "page.html", SMALL)
    assert not list(tmp_path.iterdir())


def test_the_command_writes_it_and_says_what_is_wrong(tmp_path):
    place = tmp_path / "page.html"
    words = "--dataset-size 240 --batch-sizes 20,60 --epoch-counts 1 --epsilons 1,4 --orders fixed --memories 1,any"
    done = CliRunner().invoke(app, ["planner", "--export", str(place), *words.split()])
    assert done.exit_code == 0, done.output
    text = place.read_text()
    assert place.stat().st_size < 2_000_000
    assert not re.findall(r"https?://(?!www\.w3\.org/2000/svg)", text)
    assert "connect-src" not in text  # so that default-src 'none' is what holds
    assert CliRunner().invoke(app, ["planner", "--orders", "fixed"]).exit_code == 2
    assert CliRunner().invoke(app, ["planner", "--export", str(place), "--epsilons", "a"]).exit_code == 2


@pytest.mark.parametrize(
    ("value", "text"),
    [(1.0, "1"), (0.5, "0.5"), (1e-5, "0.00001"), (1.5e-6, "0.0000015"), (1e-7, "1e-7"), (2.5e-10, "2.5e-10"),
     (60000, "60000"), (1e22, "1e+22"), (0.1, "0.1")],
)  # fmt: skip
def test_keys_are_written_as_the_page_writes_them(value, text):
    assert _number(value) == text


def test_a_wheel_holds_the_parts_of_the_page(tmp_path):
    copy = tmp_path / "project"
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        copy.mkdir(exist_ok=True)
        (copy / name).write_bytes((ROOT / name).read_bytes())
    parts = sorted((ROOT / "src/anyorder/app/planner_page").rglob("*.*"))
    for path in [ROOT / "src/anyorder/__init__.py", *(p for p in parts if p.suffix in (".py", ".js", ".css", ".html"))]:
        target = copy / path.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(path.read_bytes())
    build = "import sys; from setuptools import build_meta; build_meta.build_wheel(sys.argv[1])"
    subprocess.run(
        [sys.executable, "-W", "ignore", "-c", build, tmp_path], cwd=copy, check=True, capture_output=True, timeout=240
    )
    (wheel,) = tmp_path.glob("*.whl")
    held = {name.rpartition("/")[2] for name in zipfile.ZipFile(wheel).namelist() if "/planner_page/static/" in name}
    assert held == {path.name for path in parts if path.parent.name == "static"}
    assert {"page.html", "page.css", "main.js"} <= held
