"""In Chromium: sliders by keyboard, the numbers of the table beside `ao.plan`, both widths, no complaint."""

import contextlib
import functools
import io
import json
import re
import shlex

import pytest
from typer.testing import CliRunner

import anyorder as ao
from anyorder.app.cli import app
from anyorder.app.planner_page import server
from anyorder.app.planner_page.answers import pieces
from anyorder.app.planner_page.export import Grid, export
from anyorder.plan.options import default_delta
from browser import OVERFLOW
from plans import flat_plan

NEAR = 1e-9
SMALL = {"dataset_size": 400, "batch_size": 20, "epochs": 2, "order": "fixed"}
ID = "document.getElementById"


@pytest.fixture
def here(page, monkeypatch, request):
    """The address of a page that begins with a small plan, and whose questions are answered in this process.

    But for what an accountant for Poisson sampling would print, which the tests that look at it answer themselves.
    """
    small = {**SMALL, "delta": default_delta(SMALL["dataset_size"]), "mechanism": "independent"}
    for name, value in getattr(request, "param", small).items():
        monkeypatch.setitem(server.START, name, value)
    address, text = "http://127.0.0.1:1/", server.document(None)

    def answer(route):
        kind = route.request.url.removeprefix(address).removeprefix("ask/")
        if not kind:
            rules = {"Content-Security-Policy": server.policy(text, connect=True)}
            route.fulfill(content_type="text/html; charset=utf-8", headers=rules, body=text)
        else:
            found = pieces(kind, route.request.post_data_json) if kind != "sampled" else [{"kind": "end"}]
            lines = [json.dumps(piece) + "\n" for piece in found]
            route.fulfill(content_type="application/x-ndjson", body="".join(lines))

    page.route(f"{address}**", answer)
    return address


def answered(page):
    page.locator("#status", has_text="Answered").wait_for(timeout=120_000)


LINES = """() => [...document.querySelectorAll("#mechanisms tbody tr")].map((line) => [
  line.dataset.name, [...line.querySelectorAll("td[data-value]")].map((one) => [one.dataset.column, one.dataset.value]),
  line.querySelectorAll("button").length, line.querySelectorAll("td.lie").length,
])"""


def rows(page):
    """Of the table: name -> column -> number, in full precision."""
    return {name: {column: json.loads(value) for column, value in cells} for name, cells, *_ in page.evaluate(LINES)}


def set_box(page, name, value):
    page.fill(f"#in-{name}-box", str(value))
    page.press(f"#in-{name}-box", "Enter")


def fits_the_screen(page):
    return page.evaluate(OVERFLOW) == []


def of_python(page):
    """The plan of the code to copy."""
    names: dict = {}
    with contextlib.redirect_stdout(io.StringIO()):
        exec(page.inner_text("#python"), names)
    return names["plan"]


def of_shell(page):
    words = shlex.split(page.inner_text("#command"))
    assert words[0] == "anyorder"
    done = CliRunner().invoke(app, [*words[1:], "--json"])
    assert done.exit_code == 0, done.output
    return ao.Plan.from_dict(json.loads(done.stdout)["plan"])


def test_the_page_that_is_served_has_the_numbers_of_the_plan(page, address):
    page.goto(address)
    page.select_option("#in-order", "fixed")
    for name, value in (("dataset_size", 240), ("batch_size", 20), ("epochs", 1)):
        set_box(page, name, value)
    answered(page)
    plan = ao.plan(dataset_size=240, batch_size=20, epochs=1, order="fixed", epsilon=2.0)
    best = page.get_attribute("#mechanisms tr.best", "data-name")
    assert rows(page)[best]["error"] == pytest.approx(plan.noise_error(), rel=NEAR)
    assert of_python(page) == plan
    assert {address} == {re.match(r"http://[^/]+/", url).group() for url in page.asked}


def test_a_slider_moved_by_keyboard_gives_the_numbers_of_the_plan(page, here):
    page.goto(here)
    answered(page)
    before = rows(page)
    page.focus("#in-epsilon")
    page.keyboard.press("ArrowRight")
    assert page.get_attribute("#in-epsilon", "aria-valuetext") == "2.5" == page.input_value("#in-epsilon-box")
    page.locator("#python", has_text="epsilon=2.5").wait_for()
    answered(page)
    after = rows(page)
    plan = ao.plan(dataset_size=400, batch_size=20, epochs=2, order="fixed", epsilon=2.5)
    best = page.get_attribute("#mechanisms tr.best", "data-name")
    assert after[best]["error"] == pytest.approx(plan.noise_error(), rel=NEAR)
    assert after[best]["noise_multiplier"] == pytest.approx(plan.noise_multiplier, rel=NEAR)
    assert after[best]["epsilon"] == pytest.approx(plan.epsilon, rel=NEAR)
    assert after[best]["vectors"] == plan.strategy.state_rows
    assert after[best]["error"] < before[best]["error"]
    assert of_python(page) == of_shell(page) == plan

    page.click("#mechanisms tr[data-name=tree] button")
    found = of_python(page)
    assert (
        found
        == of_shell(page)
        == ao.plan(dataset_size=400, batch_size=20, epochs=2, order="fixed", epsilon=2.5, mechanism="tree")
    )
    assert after["tree"]["error"] == pytest.approx(found.noise_error(), rel=NEAR)
    assert {here} == {re.match(r"http://[^/]+/", url).group() for url in page.asked}

    set_box(page, "memory", 1)
    page.locator("#command", has_text="--memory 1").wait_for()
    answered(page)
    assert max(row["vectors"] for row in rows(page).values()) <= 1
    assert of_python(page) == of_shell(page)


def test_a_refusal_is_at_its_input_and_goes_when_it_is_mended(page, here):
    page.goto(here)
    set_box(page, "dataset_size", 100)
    set_box(page, "batch_size", 200)
    page.locator("#field-batch_size .wrong", has_text="batch_size must be an integer from 1 to 100").wait_for()
    set_box(page, "epsilon", "much")
    assert "is not a number" in page.inner_text("#field-epsilon .wrong")
    set_box(page, "batch_size", 50)
    answered(page)
    assert page.locator(".field.refused").count() == 0


def fits_wide_and_narrow(page):
    """Colours move nothing."""
    for width, scheme in ((400, "light"), (1280, "dark")):
        page.emulate_media(color_scheme=scheme)
        page.set_viewport_size({"width": width, "height": 800})
        assert fits_the_screen(page), width


def test_both_views_fit_the_screen(page, here):
    page.goto(here)
    answered(page)
    fits_wide_and_narrow(page)
    page.focus("#tab-plan")
    page.keyboard.press("ArrowRight")
    answered(page)
    fits_wide_and_narrow(page)
    cell = page.locator("#heat .cell[data-value]").first
    cell.focus()
    told = page.inner_text("#readout")
    batch, epochs = int(cell.get_attribute("data-batch")), int(cell.get_attribute("data-epochs"))
    assert f"batch {batch}, {epochs} epochs" in told
    plan = ao.plan(**{**SMALL, "batch_size": batch, "epochs": epochs}, epsilon=2.0, mechanism="independent")
    assert json.loads(cell.get_attribute("data-value")) == pytest.approx(plan.noise_multiplier / batch, rel=NEAR)
    page.keyboard.press("Enter")  # plans it
    page.locator("#command", has_text=f"--batch-size {batch} --epochs {epochs} ").wait_for(timeout=120_000)
    assert page.input_value("#in-batch_size-box") == str(batch)


def test_the_exported_page_needs_nobody(page, tmp_path):
    grid = Grid(
        dataset_size=240, batch_sizes=(20, 60), epoch_counts=(2,), epsilons=(2.0, 4.0), orders=("fixed",),
        memories=(None,), ratios=(0.05,), deltas=(1e-5,),
    )  # fmt: skip
    place = tmp_path / "plans.html"
    assert export(place, grid) < 2_000_000
    page.goto(place.as_uri())
    answered(page)
    page.focus("#in-epsilon")
    page.keyboard.press("ArrowLeft")
    set_box(page, "batch_size", 50)
    assert page.input_value("#in-batch_size-box") == "60"  # snapped to the grid
    answered(page)
    plan = ao.plan(dataset_size=240, batch_size=60, epochs=2, order="fixed", epsilon=2.0, delta=1e-5)
    best = page.get_attribute("#mechanisms tr.best", "data-name")
    found = rows(page)[best]
    assert found["error"] == pytest.approx(plan.noise_error(), rel=NEAR)
    assert found["epsilon"] == pytest.approx(plan.epsilon, rel=NEAR)
    assert of_python(page) == plan
    page.click("#tab-sweep")
    answered(page)
    assert page.locator("#heat .cell[data-value]").count() == 2
    page.select_option("#in-measure", "epsilon")
    answered(page)
    assert page.locator("#heat .cell[data-value]").count() == 2
    assert page.asked == [place.as_uri()]


LONG = "banded low rank, 16 bands, 4 rank, rescaled, of a restarted kind"


@pytest.mark.parametrize("here", [{}], indirect=True, ids=[""])  # the plan that every reader sees first
def test_nothing_covers_a_line_and_no_name_is_cut(page, here):
    """Also a name that is longer than those of today's mechanisms; on a phone the one here is longer than the page."""
    name = LONG

    pieces_of = functools.cache(lambda asked: list(pieces("plan", json.loads(asked))))

    def renamed(route):
        lines = [json.dumps(piece) + "\n" for piece in pieces_of(route.request.post_data)]
        route.fulfill(content_type="application/x-ndjson", body="".join(lines).replace('"tree"', f'"{name}"'))

    page.route("**/ask/plan", renamed)
    page.goto(here)
    for width in (1280, 700, 400):
        name = LONG if width > 400 else LONG[:36]
        page.set_viewport_size({"width": width, "height": 900})
        page.reload()
        answered(page)
        all_is_shown(page, name)


def all_is_shown(page, name):
    for place in ("command", "python"):
        button, code = page.locator(f"[data-copy={place}]").bounding_box(), page.locator(f"#{place}").bounding_box()
        assert button["y"] + button["height"] <= code["y"]
        assert page.evaluate(f"(() => {{ const e = {ID}('{place}'); return e.scrollWidth <= e.clientWidth; }})()")
    assert page.locator("#bars text", has_text=name).count() == 1
    outside = page.evaluate(
        "[...document.querySelectorAll('#bars text')].filter((text) => { const box = text.getBBox(),"
        " whole = text.ownerSVGElement.viewBox.baseVal; return box.x < 0 || box.x + box.width > whole.width; })"
        ".map((text) => text.textContent)"
    )
    assert outside == []


def test_the_chosen_order_is_read_as_a_whole(page, here):
    page.goto(here)
    left = page.evaluate(
        f"(() => {{ const s = {ID}('in-order'), c = document.createElement('canvas').getContext('2d');"
        " c.font = getComputedStyle(s).font; const room = s.clientWidth - 36;"
        " return Object.fromEntries([...s.options].map((o) => [o.text, room - c.measureText(o.text).width])); })()"
    )
    assert len(left) >= 8
    assert {words: room for words, room in left.items() if room < 0} == {}


def test_who_is_no_expert_is_told_what_the_page_is_for(page, here):
    page.goto(here)
    assert page.locator("#about").get_attribute("open") is not None
    told = page.inner_text("#about")
    assert "nobody can find out much about one person's data" in told
    assert "needs no data and sends none" in told


def test_no_epsilon_is_shown_smaller_than_it_is(page, here):
    def answer(route):
        found = next(piece for piece in pieces("plan", route.request.post_data_json) if not piece.get("rough"))
        found.update(epsilon=2.00001, secret=True)
        for row in found.get("rows", []):  # none where sizes do not fit yet
            row.update(epsilon=2.00001, known_epsilon=23.45402, sampled_epsilon=0.123451)
        route.fulfill(content_type="application/x-ndjson", body=json.dumps(found) + '\n{"kind": "end"}\n')

    def sheet(route):
        cell = {"kind": "cell", "steps": 3, "name": "independent", "error": 1.0, "ratio": 0.1, "noise_multiplier": 1.0}
        places = [(batch, epochs) for batch in (16, 32) for epochs in (1, 2)]
        cells = [{**cell, "batch_size": batch, "epochs": epochs, "epsilon": 8.04401} for batch, epochs in places]
        lines = [json.dumps(piece) for piece in [*cells, {"kind": "end"}]]
        route.fulfill(content_type="application/x-ndjson", body="\n".join(lines) + "\n")

    page.route("**/ask/plan", answer)
    page.route("**/ask/sweep", sheet)
    page.goto(here)
    answered(page)
    shown = page.locator("#mechanisms tr.best td[data-column$=epsilon]").all_inner_texts()
    assert shown == ["2.0001", "0.12346", "23.455"]
    assert "2.001" in page.inner_text("#summary")
    assert "23.46" in page.inner_text("#summary")
    page.click("#tab-sweep")
    answered(page)
    page.select_option("#in-measure", "epsilon")
    answered(page)
    assert page.locator("#heat .cell[data-value] text").all_text_contents() == ["8.05"] * 4
    page.locator("#heat .cell[data-value]").first.focus()
    assert "epsilon 8.045," in page.inner_text("#readout")


def test_a_single_epoch_is_one_epoch_in_any_order_and_momentum_is_copied_too(page, here):
    page.goto(here)
    for name, value in (("epochs", 7), ("momentum", 0.9)):
        set_box(page, name, value)
    page.select_option("#in-order", "single")
    page.locator("#python", has_text="epochs=1").wait_for()
    answered(page)
    plan = ao.plan(dataset_size=400, batch_size=20, epochs=1, epsilon=2.0, optimizer=ao.SGD(momentum=0.9))
    assert of_python(page) == of_shell(page) == plan
    best = page.get_attribute("#mechanisms tr.best", "data-name")
    assert rows(page)[best]["error"] == pytest.approx(plan.noise_error(), rel=NEAR)


def test_what_does_not_hold_is_marked_and_an_answer_that_is_waited_for_is_faded(page, here):
    printed = {}

    def sampled(route):
        noises = route.request.post_data_json["noises"]
        printed.update({noise: (0.5, 1.9, 2.0, 50.0)[i % 4] for i, noise in enumerate(sorted(set(noises)))})
        lines = [{"kind": "sampled", "noise_multiplier": noise, "epsilon": printed[noise]} for noise in noises]
        body = "\n".join(json.dumps(piece) for piece in [*lines, {"kind": "end"}])
        route.fulfill(content_type="application/x-ndjson", body=body + "\n")

    page.route("**/ask/sampled", sampled)
    page.goto(here)
    answered(page)
    page.locator("#mechanisms td.lie").first.wait_for()
    told = {name: lies for name, _, _, lies in page.evaluate(LINES)}
    found = rows(page)
    assert told == {name: int(printed[row["noise_multiplier"]] < row["epsilon"]) for name, row in found.items()}
    assert set(told.values()) == {0, 1}

    page.route("**/ask/plan", lambda route: None)  # never answered
    assert "stale" not in page.get_attribute("#panel-plan", "class")
    set_box(page, "epsilon", 3)
    assert "stale" in page.get_attribute("#panel-plan", "class")
    assert page.inner_text("#status").startswith("computing")


def test_every_number_of_an_exported_page_is_at_its_delta_momentum_and_ratio(page, tmp_path):
    grid = Grid(
        dataset_size=240, batch_sizes=(20,), epoch_counts=(2,), epsilons=(2.0, 4.0), deltas=(1e-5, 1e-7),
        orders=("fixed",), memories=(None,), ratios=(0.02, 0.05), momentum=0.9,
    )  # fmt: skip
    place = tmp_path / "plans.html"
    export(place, grid)
    page.goto(place.as_uri())
    answered(page)
    set_box(page, "delta", "1e-7")
    page.locator("#python", has_text="delta=1e-7").wait_for()
    answered(page)
    plan = ao.plan(
        dataset_size=240,
        batch_size=20,
        epochs=2,
        order="fixed",
        epsilon=4.0,
        delta=1e-7,
        optimizer=ao.SGD(momentum=0.9),
    )
    assert of_python(page) == plan
    found = rows(page)
    best = found[page.get_attribute("#mechanisms tr.best", "data-name")]
    assert best["error"] == pytest.approx(plan.noise_error(), rel=NEAR)
    assert best["noise_multiplier"] == pytest.approx(plan.noise_multiplier, rel=NEAR)
    assert best["epsilon"] == pytest.approx(plan.epsilon, rel=NEAR)
    bound = float(page.text_content("#bars .bound-text").rpartition(" ")[2])
    assert bound == pytest.approx(best["error"] / best["ratio"], rel=2e-3)
    buttons = {name: count for name, _, count, _ in page.evaluate(LINES)}
    assert buttons == {name: int(name != "dense" or row is best) for name, row in found.items()}  # solved anew by name
    page.click("#tab-sweep")
    page.select_option("#in-measure", "epsilon")
    page.select_option("#in-mechanism", "independent")
    for ratio in (0.02, 0.05):
        set_box(page, "ratio", ratio)
        page.locator("#sweep-title", has_text=f"noise to batch {ratio}").wait_for()
        answered(page)
        asked = {"dataset_size": 240, "batch_size": 20, "epochs": 2, "delta": 1e-7, "momentum": 0.9}
        plan = flat_plan(noise_multiplier=20 * ratio, order="fixed", mechanism="independent", **asked)
        (cell,) = page.locator("#heat .cell[data-value]").all()
        assert json.loads(cell.get_attribute("data-value")) == pytest.approx(plan.epsilon, rel=NEAR)
