"""The numbers of the page are those of `ao.plan` and of `anyorder plan --compare`, to nine digits."""

import json
from itertools import product

import pytest

import anyorder as ao
from anyorder.accounting.poisson import poisson_epsilon
from anyorder.app.planner_page import PlanQuestion, answer
from anyorder.app.planner_page.answers import MAX_STEPS, Sweep, cells, first, pieces, sampled
from anyorder.app.planning import compare
from anyorder.errors import ArgumentError
from anyorder.optimize import choose, lower_bound
from planner_page.guesses import PATCHED, guessed
from plans import flat_plan

NEAR = 1e-9
SIZES = {"dataset_size": 240, "batch_size": 20, "epochs": 2, "epsilon": 2.0, "delta": 1e-5, "order": "fixed"}


def asked(**others) -> PlanQuestion:
    return PlanQuestion(**{**SIZES, **others})


def told(settings: PlanQuestion) -> list[dict]:
    """The pieces as they arrive: through JSON, in full precision."""
    return [json.loads(json.dumps(piece)) for piece in answer(settings)]


GRID = [
    {"order": order, "epochs": epochs, "memory": memory, "momentum": momentum, "epsilon": epsilon, "delta": delta}
    for (order, epochs), (memory, momentum), (epsilon, delta) in product(
        [("shuffled", 1), ("shuffled", 3), ("fixed", 2)], [(None, 0.0), (1, 0.0), (0, 0.9)],
        [(0.3, 1e-7), (2.0, 1e-5), (9.5, 1e-5)],
    )
]  # fmt: skip


@pytest.mark.parametrize("others", GRID[::5], ids=lambda others: "-".join(map(str, others.values())))
def test_the_best_row_is_the_plan(others):
    settings = asked(**others)
    (found,) = told(settings)
    plan = ao.plan(epsilon=settings.epsilon, **settings.arguments())
    best = [row for row in found["rows"] if row["best"]]
    assert best == found["rows"][:1]
    assert best[0]["mechanism"] == plan.strategy.describe()
    assert best[0]["error"] == pytest.approx(plan.noise_error(), rel=NEAR)
    assert best[0]["last"] == pytest.approx(plan.noise_profile()[-1], rel=NEAR)
    assert best[0]["noise_multiplier"] == pytest.approx(plan.noise_multiplier, rel=NEAR)
    assert best[0]["epsilon"] == found["epsilon"] == pytest.approx(plan.epsilon, rel=NEAR)
    assert found["epsilon"] <= settings.epsilon
    assert (best[0]["vectors"], best[0]["known_epsilon"]) == (plan.strategy.state_rows, plan.known_epsilon)
    assert (found["steps"], found["order"], found["secret"]) == (plan.n, plan.participation.describe(), False)


@pytest.mark.parametrize("others", [{}, {"order": "shuffled", "memory": 2, "momentum": 0.9}], ids=["fixed", "shuffled"])
def test_every_row_is_a_plan_of_its_name_and_a_row_of_the_comparison(others):
    settings = asked(**others)
    (found,) = told(settings)
    assert len(found["rows"]) > 5
    for row in found["rows"]:
        mechanism = "auto" if row["best"] else row["name"]  # as the page writes it
        plan = ao.plan(epsilon=settings.epsilon, mechanism=mechanism, **settings.arguments())
        assert row["exact"] == (row["name"] != "dense" or row["best"])
        if not row["exact"]:
            assert plan.noise_error() < row["error"] < plan.noise_error() * 1.001
            continue
        assert row["error"] == pytest.approx(plan.noise_error(), rel=NEAR)
        assert row["noise_multiplier"] == pytest.approx(plan.noise_multiplier, rel=NEAR)
        assert row["epsilon"] == pytest.approx(plan.epsilon, rel=NEAR)
        assert row["vectors"] == plan.strategy.state_rows
    plan = ao.plan(epsilon=settings.epsilon, **settings.arguments())
    compared = {row.name: row for row in compare(plan, settings.memory) if row.name != "poisson"}
    assert {row["name"] for row in found["rows"]} == set(compared)
    for row in found["rows"]:
        assert row["error"] == pytest.approx(compared[row["name"]].error, rel=NEAR)
        assert row["ratio"] == pytest.approx(compared[row["name"]].ratio, rel=NEAR)
    costs = {one.name: one.cost for one in choose(plan.workload, plan.participation, settings.memory)}
    assert {row["name"]: row["cost"] for row in found["rows"]} == costs
    bound = lower_bound(plan.workload, plan.participation) * plan.sigma
    assert found["lower_bound"] == pytest.approx(bound, rel=2e-3)  # the certificates of two gaps
    assert all(row["error"] >= found["lower_bound"] * (1 - NEAR) for row in found["rows"])


@pytest.fixture
def quick(monkeypatch):
    """The central limit in place of a calibration that takes seconds: both sides of an equality have it."""
    for name in PATCHED:
        monkeypatch.setattr(name, guessed)


@pytest.mark.usefixtures("quick")
def test_a_secret_order_has_the_plan_and_what_is_left_without_the_secret():
    settings = asked(order="poisson")
    (found,) = told(settings)
    plan = ao.plan(epsilon=2.0, **settings.arguments())
    (row,) = found["rows"]
    assert found["secret"]
    assert row["error"] == pytest.approx(plan.noise_error(), rel=NEAR)
    assert row["epsilon"] == pytest.approx(plan.epsilon, rel=NEAR)
    assert row["known_epsilon"] == pytest.approx(plan.known_epsilon, rel=NEAR)
    assert row["known_epsilon"] > row["epsilon"] == row["sampled_epsilon"]


@pytest.mark.usefixtures("quick")
def test_rows_of_amplified_mechanisms_come_one_by_one(monkeypatch):
    monkeypatch.setattr("anyorder.optimize.candidates._of_known_bins", lambda *_: [])
    settings = asked(order="cyclic-poisson")
    found = told(settings)
    assert [piece["kind"] for piece in found][:2] == ["progress", "plan"]
    plan = ao.plan(epsilon=2.0, **settings.arguments())
    rows = found[1]["rows"] + [piece["row"] for piece in found if piece["kind"] == "row"]
    assert [row["best"] for row in rows] == [True] + [False] * (len(rows) - 1)
    assert [row["exact"] for row in rows if row["name"] == "independent" or row["best"]] == [True, True]
    assert rows[0]["error"] == pytest.approx(plan.noise_error(), rel=NEAR)
    assert found[1]["order"] == plan.participation.describe()
    assert found[1]["lower_bound"] is None
    for row in rows:
        assert row["known_epsilon"] >= row["epsilon"]
        assert row["sampled_epsilon"] is None


@pytest.mark.usefixtures("quick")
def test_what_a_poisson_accountant_would_print():
    settings = asked()
    (found,) = told(settings)
    noise = found["rows"][0]["noise_multiplier"]
    claim, row = [json.loads(json.dumps(piece)) for piece in sampled(settings, [noise])]
    assert claim["noise_multiplier"] == noise
    assert claim["epsilon"] == pytest.approx(poisson_epsilon(noise, 20 / 240, 24, 1e-5), rel=NEAR)
    plan = flat_plan(epsilon=2.0, **{**settings.arguments(), "order": "poisson"})
    assert row["row"]["error"] == pytest.approx(plan.noise_error(), rel=NEAR)
    assert row["row"]["reference"]
    assert not row["row"]["best"]


@pytest.mark.parametrize("mechanism", ["auto", "independent", "blt"])
def test_a_sweep_is_a_plan_in_each_cell(mechanism):
    sweep = Sweep(base=asked(order="shuffled"), batch_sizes=(20, 60), epoch_counts=(1, 3), mechanism=mechanism)
    found = list(cells(sweep))
    assert len(found) == 4
    for cell in found:
        settings = asked(order="shuffled", batch_size=cell["batch_size"], epochs=cell["epochs"])
        plan = ao.plan(epsilon=2.0, mechanism=mechanism, **settings.arguments())
        plain = ao.plan(noise_multiplier=1.0, mechanism="independent", **settings.arguments())
        assert cell["steps"] == plan.n
        assert cell["error"] == pytest.approx(plan.noise_error(), rel=NEAR)
        assert cell["noise_multiplier"] == pytest.approx(plan.noise_multiplier, rel=NEAR)
        ratio = plan.noise_error() / plain.noise_error() / cell["batch_size"]
        assert cell["ratio"] == pytest.approx(ratio, rel=NEAR)


@pytest.mark.parametrize("order", ["shuffled", "poisson"])
def test_epsilon_at_a_noise_to_batch_is_that_of_its_noise_multiplier(order):
    sweep = Sweep(
        base=asked(order=order), batch_sizes=(20, 60), epoch_counts=(1, 3), mechanism="independent", measure="epsilon",
        ratio=0.05,
    )  # fmt: skip
    for cell in cells(sweep):
        settings = asked(order=order, batch_size=cell["batch_size"], epochs=cell["epochs"])
        noise = 0.05 * cell["batch_size"]
        plan = ao.plan(noise_multiplier=noise, mechanism="independent", **settings.arguments())
        assert cell["noise_multiplier"] == pytest.approx(noise, rel=NEAR)
        assert cell["epsilon"] == pytest.approx(plan.epsilon, rel=NEAR)
        assert cell["error"] == pytest.approx(plan.noise_error(), rel=NEAR)
        assert cell["ratio"] == pytest.approx(0.05, rel=NEAR)


@pytest.mark.parametrize("mechanism", ["auto", "independent", "tree", "blt"])
@pytest.mark.parametrize("measure", ["noise", "epsilon"])
def test_a_sweep_keeps_every_input_of_its_base(mechanism, measure):
    memory = 4 if mechanism == "tree" else 2
    others = {"delta": 1e-7, "momentum": 0.9, "memory": memory, "epsilon": 3.5}
    given = {"mechanism": mechanism, "measure": measure, "ratio": 0.02}
    batch, epochs = 60, 1
    (cell,) = cells(Sweep(base=asked(**others), batch_sizes=(batch,), epoch_counts=(epochs,), **given))
    settings = asked(batch_size=batch, epochs=epochs, **others)
    budget = {"epsilon": 3.5} if measure == "noise" else {"noise_multiplier": cell["noise_multiplier"]}
    plan = flat_plan(mechanism=mechanism, **budget, **settings.arguments())
    white = ao.plan(noise_multiplier=1.0, mechanism="independent", **settings.arguments())
    assert cell["epsilon"] == pytest.approx(plan.epsilon, rel=1e-6)
    assert cell["noise_multiplier"] == pytest.approx(plan.noise_multiplier, rel=NEAR)
    assert cell["error"] == pytest.approx(plan.noise_error(), rel=NEAR)
    assert cell["ratio"] == pytest.approx(plan.noise_error() / white.noise_error() / batch, rel=NEAR)
    assert measure == "noise" or cell["ratio"] == pytest.approx(0.02, rel=NEAR)


@pytest.mark.usefixtures("quick")
def test_a_sweep_of_secret_sampling_is_a_plan_in_each_cell():
    others = {"delta": 1e-7, "momentum": 0.9, "epsilon": 3.5}
    base = asked(order="poisson", **others)
    for cell in cells(Sweep(base=base, batch_sizes=(20,), epoch_counts=(1, 2), mechanism="independent")):
        settings = asked(order="poisson", batch_size=cell["batch_size"], epochs=cell["epochs"], **others)
        plan = ao.plan(epsilon=settings.epsilon, **settings.arguments())
        assert cell["epsilon"] == pytest.approx(plan.epsilon, rel=NEAR)
        assert cell["noise_multiplier"] == pytest.approx(plan.noise_multiplier, rel=NEAR)
        assert cell["error"] == pytest.approx(plan.noise_error(), rel=NEAR)
        assert cell["ratio"] == pytest.approx(plan.noise_multiplier / cell["batch_size"], rel=NEAR)


@pytest.mark.usefixtures("quick")
def test_what_a_poisson_accountant_would_print_is_at_the_delta_and_momentum_that_were_asked_for():
    settings = asked(delta=1e-7, momentum=0.9)
    claim, row = sampled(settings, [1.5])
    assert claim["epsilon"] == pytest.approx(poisson_epsilon(1.5, 20 / 240, 24, 1e-7), rel=NEAR)
    plan = flat_plan(epsilon=2.0, **{**settings.arguments(), "order": "poisson"})
    assert row["row"]["error"] == pytest.approx(plan.noise_error(), rel=NEAR)
    assert row["row"]["epsilon"] == row["row"]["sampled_epsilon"] == pytest.approx(plan.epsilon, rel=NEAR)
    assert row["row"]["known_epsilon"] == pytest.approx(plan.known_epsilon, rel=NEAR)


def test_steps_are_those_of_a_last_batch_that_is_not_full():
    settings = asked(batch_size=50, epochs=3)
    assert settings.steps == 15 == told(settings)[0]["steps"]


def test_correlated_noise_of_one_ratio_has_the_error_of_independent_noise():
    sweep = {"base": asked(), "batch_sizes": (20,), "epoch_counts": (2,), "measure": "epsilon", "ratio": 0.05}
    (white,), (blt,) = (list(cells(Sweep(mechanism=name, **sweep))) for name in ("independent", "blt"))
    assert blt["error"] == pytest.approx(white["error"], rel=NEAR)
    assert blt["epsilon"] < white["epsilon"]


@pytest.mark.parametrize(
    ("others", "field", "words"),
    [
        ({"batch_size": 500}, "batch_size", "from 1 to 240"),
        ({"batch_size": 2.5}, "batch_size", "integer"),
        ({"dataset_size": "240"}, "dataset_size", "integer"),
        ({"epochs": 0}, "epochs", "at least 1"),
        ({"epsilon": -1}, "epsilon", "above 0"),
        ({"delta": 1.0}, "delta", "between 0 and 1"),
        ({"order": "backwards"}, "order", "must be one of"),
        ({"order": "any"}, "order", "one order in words"),
        ({"memory": -1}, "memory", "at least 0"),
        ({"momentum": 1.5}, "momentum", ""),
        ({"dataset_size": 10**9}, "batch_size", f"at most {MAX_STEPS} steps"),
        ({"unit": "user"}, None, "must be an object with"),
    ],
)  # fmt: skip
def test_a_refusal_is_shown_as_it_is_at_its_input(others, field, words):
    (found,) = pieces("plan", {**SIZES, **others})
    assert (found["kind"], found["field"]) == ("error", field)
    assert words in found["message"]


@pytest.mark.parametrize("name", ["batch_size", "epsilon", "delta", "epochs", "momentum", "memory"])
def test_refusals_are_those_of_the_plan(name):
    wrong = {**SIZES, name: -3}
    with pytest.raises(ArgumentError) as refused:
        flat_plan(**wrong)
    (found,) = pieces("plan", wrong)
    assert found["message"] == str(refused.value)


@pytest.mark.parametrize("question", [None, [], "plan", {}, {"settings": SIZES}, {"settings": SIZES, "noises": [0]}])
@pytest.mark.parametrize("kind", ["plan", "sampled", "sweep", "other"])
def test_no_question_from_outside_breaks_anything(kind, question):
    assert [piece["kind"] for piece in pieces(kind, question)] == ["error"]


def test_the_cost_of_a_question_is_bounded():
    long = {**SIZES, "dataset_size": MAX_STEPS * 10, "batch_size": 5}
    assert next(iter(pieces("plan", long)))["field"] == "batch_size"
    many = {"base": SIZES, "batch_sizes": list(range(1, 200)), "epoch_counts": [1]}
    assert "1 to 144 cells" in next(iter(pieces("sweep", many)))["message"]
    assert "at most 64" in next(iter(pieces("sampled", {"settings": SIZES, "noises": [1.0] * 65})))["message"]
    slow = {"base": {**SIZES, "order": "balls-in-bins"}, "batch_sizes": [20], "epoch_counts": [1]}
    assert next(iter(pieces("sweep", slow)))["field"] == "order"
    (cell, end) = pieces("sweep", {"base": {**SIZES, "dataset_size": 10**6}, "batch_sizes": [1], "epoch_counts": [1]})
    assert "at most" in cell["refused"]
    assert end["kind"] == "end"


@pytest.mark.parametrize("order", ["shuffled", "fixed", "balls-in-bins", "random-allocation"])
def test_a_first_answer_comes_before_any_fit_and_holds(order, monkeypatch):
    monkeypatch.setattr("anyorder.app.planner_page.answers.choose", None)
    (found,) = first(asked(order=order))
    assert found["rough"]
    assert found["secret"] is (order not in ("shuffled", "fixed"))
    plan = flat_plan(**{**SIZES, "order": "shuffled"}, mechanism="independent")
    (row,) = found["rows"]
    assert row["error"] == pytest.approx(plan.noise_error(), rel=NEAR)
    assert found["epsilon"] == pytest.approx(plan.epsilon, rel=NEAR)
    assert found["epsilon"] <= 2
    with_noise = flat_plan(
        **{name: value for name, value in {**SIZES, "order": order}.items() if name != "epsilon"},
        mechanism="independent", noise_multiplier=row["noise_multiplier"],
    )  # fmt: skip
    assert with_noise.known_epsilon is None or with_noise.known_epsilon <= 2 * (1 + NEAR)
    assert list(first(asked(order="poisson"))) == []
