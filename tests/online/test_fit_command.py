"""`anyorder fit`: a model of a CSV file, from which nothing can be told of a row but through the noise."""

import json
import shutil
import signal
import time

import numpy as np
import pytest

pytest.importorskip("typer")
pytest.importorskip("rich")

from typer.testing import CliRunner

import processes
from anyorder.app.cli import app
from anyorder.app.fit import Bounds, CsvTable, FitSettings, _Work, fit, load_model, resume_fit
from anyorder.app.job import Observer
from anyorder.errors import ArgumentError, CheckpointError
from anyorder.plan.certificate import verify

KEY = bytes(range(32))
BOUNDS = {"features": {"age": [0, 100], "job": ["clerk", "nurse, ill"]}, "target": ["no", "yes"]}
HEADER = "id,age,job,income"
ROWS = [f'u{i % 40},{(7 * i) % 101},{"clerk" if i % 3 else chr(34) + "nurse, ill" + chr(34)},{("no", "yes")[i % 2]}'
        for i in range(200)]  # fmt: skip
HOSTILE = {
    "blank": "", "spaces": "   ", "missing cell": "u7,40,clerk", "empty cell": "u7,,clerk,no",
    "too long": "u7,4,clerk,no,1,2",
    "text": "u7,forty,clerk,no", "nan": "u7,nan,clerk,no", "inf": "u7,inf,clerk,no", "overflow": "u7,1e400,clerk,no",
    "open quote": 'u7,"40,clerk,no', "quote inside": 'u7,4"0,clerk,no"', "broken quotes": 'u7,"40" x,clerk,no',
    "no class": "u7,40,clerk,perhaps", "empty target": "u7,40,clerk,", "nul": "u7,4\0,clerk,no",
    "no text": b"\xff\xfe,\xc3,clerk,no", "carriage": 'u7,"4\r0",clerk,no', "very long": "u7," + "1" * 3_000_000,
    "long number": "u7," + "9" * 4000 + ",clerk,no", "separator": "u7;40;clerk;no", "header again": HEADER,
    "infinite -": "u7,-Infinity,clerk,no", "wide quote": '"' + "," * 200_000 + '",40,clerk,no',
}  # fmt: skip


@pytest.fixture(autouse=True)
def _no_cache(monkeypatch):
    monkeypatch.setenv("ANYORDER_CACHE", "off")


def encoded(line):
    return line if isinstance(line, bytes) else line.encode()


def write(path, rows=ROWS, header=HEADER, end=b"\n"):
    path.write_bytes(end.join([encoded(header), *map(encoded, rows)]) + end)
    return path


def settings(path, **changes):
    given = {"csv": str(path), "target": "income", "bounds": BOUNDS, "batch_size": 16, "mechanism": "tree", **changes}
    return FitSettings(**given)


def invoke(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def table(path, **changes):
    return CsvTable(path, Bounds.of(BOUNDS), "income", **changes)


def everything(made):
    parts = list(made.batches(64, made.count()))
    return np.concatenate([part.X for part in parts]), np.concatenate([part.y for part in parts])


# -- reading ---------------------------------------------------------------------------------------------------------


def test_cells_become_numbers_by_the_public_bounds_alone(tmp_path):
    """Numbers are cut and mapped to [-1, 1]; a category that is not named is none; quotes may hold commas, and
    spaces around a word are no part of it."""
    lines = ["a,25,clerk,no", 'b,1000,"nurse, ill",yes', "c,-5,cook,no", 'd," 50 "," clerk ","yes "']
    X, y = everything(table(write(tmp_path / "t.csv", lines)))
    assert X.tolist() == [[-0.5, 1, 0], [1, 0, 1], [-1, 0, 0], [0, 1, 0]]
    assert y.tolist() == [0, 1, 0, 1]
    assert Bounds.of(BOUNDS).names == ["age", "job=clerk", "job=nurse, ill"]
    assert np.linalg.norm(X, axis=1).max() <= Bounds.of(BOUNDS).row_norm


@pytest.mark.parametrize("ends", [b"\n", b"\r\n"])
@pytest.mark.parametrize("mark", ["", "\ufeff"])
def test_ends_of_lines_and_a_byte_order_mark_change_nothing(tmp_path, ends, mark):
    plain = everything(table(write(tmp_path / "plain.csv")))
    other = write(tmp_path / "other.csv", header=mark + HEADER, end=ends)
    assert all(np.array_equal(a, b) for a, b in zip(plain, everything(table(other)), strict=True))
    other.write_bytes(other.read_bytes().removesuffix(ends))
    assert table(other).count() == len(ROWS)


def test_names_in_the_header_may_have_spaces_and_quotes_around_them(tmp_path):
    plain = everything(table(write(tmp_path / "plain.csv")))
    spaced = everything(table(write(tmp_path / "spaced.csv", header='id, age ,"job", income')))
    assert all(np.array_equal(a, b) for a, b in zip(plain, spaced, strict=True))


def test_whose_a_row_is_stands_in_its_cell_without_spaces(tmp_path):
    """Under a byte order mark too. A row of nobody takes no part; one that is spoiled is still its user's."""
    lines = ["u1,1,clerk,no", " u1 ,1,clerk,no", ",1,clerk,no", "  ,1,clerk,no", '"u,2",1,clerk,no', "u3,x,clerk,no"]
    made = table(write(tmp_path / "t.csv", lines, header="\ufeff" + HEADER), user_key="id")
    (rows,) = made.batches(64, made.count())
    assert rows.users == ["u1", "u1", None, None, "u,2", "u3"]
    assert np.isnan(rows.X).all(axis=1).tolist() == [False, False, True, True, False, True]


@pytest.mark.parametrize("name", HOSTILE)
def test_a_spoiled_row_is_nan_and_touches_no_other(tmp_path, name):
    """Also where a reader of whole files would take the rest of the file into an open quote."""
    lines: list = list(ROWS)
    lines[77] = HOSTILE[name]
    X, y = everything(table(write(tmp_path / "t.csv", lines)))
    good, labels = everything(table(write(tmp_path / "good.csv")))
    others = np.arange(len(ROWS)) != 77
    assert np.isnan(X[77]).all()
    assert y[77] == 0
    assert np.array_equal(X[others], good[others])
    assert np.array_equal(y[others], labels[others])


def test_targets_are_cut_to_their_bounds_and_none_spoils_its_row(tmp_path):
    words = ["5", "-3", "99", " 7 ", "nan", "inf", "-Infinity", "1e400", "", "x"]
    path = write(tmp_path / "t.csv", [f"1,{word}" for word in words], header="a,y")
    X, y = everything(CsvTable(path, Bounds.of({"features": {"a": [0, 2]}, "target": [1, 8]}), "y"))
    assert y[:4].tolist() == [5, 1, 8, 7]
    assert X[:4, 0].tolist() == [0] * 4
    assert np.isnan(X[4:]).all()
    assert np.isfinite(y).all()


def test_memory_is_bounded_by_a_block_for_a_line_without_end(tmp_path):
    import tracemalloc

    path = write(tmp_path / "t.csv", [*ROWS[:3], "9" * 30_000_000, *ROWS[3:6]])
    tracemalloc.start()
    X, _ = everything(table(path))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(X) == 7
    assert np.isnan(X).all(axis=1).tolist() == [False] * 3 + [True] + [False] * 3
    assert peak < 8e6


@pytest.mark.parametrize("length", [10, 2**20 + 1, 3 * 2**20])
def test_the_last_line_is_a_row_however_long_and_without_end(tmp_path, length):
    path = write(tmp_path / "t.csv", ROWS[:3])
    path.write_bytes(path.read_bytes() + b"1" * length)
    X, _ = everything(table(path))
    assert np.isnan(X).all(axis=1).tolist() == [False] * 3 + [True]


def test_a_batch_is_the_next_rows_of_the_file_wherever_blocks_end(tmp_path, monkeypatch):
    path = write(tmp_path / "t.csv")
    whole = everything(table(path))
    for block in (1, 7, 100):
        monkeypatch.setattr("anyorder.app.fit._BLOCK", block)
        parts = list(table(path).batches(48, 150))
        assert [(part.first, len(part.y)) for part in parts] == [(0, 48), (48, 48), (96, 48), (144, 6)]
        assert np.array_equal(np.concatenate([part.X for part in parts]), whole[0][:150])
        assert table(path).count() == 200


@pytest.mark.parametrize(
    ("header", "words"),
    [
        ("", "must begin with a line"), ("id,age,job", "no column 'income'"), ("age,age,job,income", "2 columns 'age'"),
        (HEADER.encode("utf-16"), "UTF-8"), ("id;age;job;income", "no column 'age'"), ('"id,age', "must begin"),
    ],
)  # fmt: skip
def test_a_header_that_does_not_fit_is_an_error(tmp_path, header, words):
    with pytest.raises(ArgumentError, match=words):
        table(write(tmp_path / "t.csv", header=header))


@pytest.mark.parametrize(
    "data",
    [
        [], {}, {"features": {}, "target": [0, 1]}, {"features": {"a": [1, 0]}, "target": [0, 1]},
        {"features": {"a": [0, 0]}, "target": [0, 1]}, {"features": {"a": [0, True]}, "target": [0, 1]},
        {"features": {"a": ["x", "x "]}, "target": [0, 1]}, {"features": {"a": [0, 1]}, "target": ["one"]},
        {"features": {"a": [0, 1, 2]}, "target": [0, 1]}, {"features": {"a": [-1e308, 1e308]}, "target": [0, 1]},
        {"features": {"a": [0, 1]}, "target": [0, 1], "more": 1}, {"features": {"a": None}, "target": [0, 1]},
    ],
)  # fmt: skip
def test_bounds_of_another_form_are_refused(tmp_path, data):
    path = tmp_path / "b.json"
    path.write_text(json.dumps(data))
    with pytest.raises(ArgumentError, match="bounds"):
        Bounds.load(path)


@pytest.mark.parametrize(
    "text", ["[" * 100_000, "{", '{"features": {"a": [0, 1], "a": [0, 1]}, "target": [0, 1]}', "\xff"]
)
def test_a_bounds_file_that_is_none_is_refused(tmp_path, text):
    path = tmp_path / "b.json"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(ArgumentError, match="b.json"):
        Bounds.load(path)


# -- what may be shown -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["blank", "open quote", "overflow", "no text", "very long", "no class"])
def test_a_spoiled_row_counts_as_the_zero_vector(tmp_path, name):
    """With the same noise the model is the same to the last bit as with a row that adds nothing."""
    lines: list = list(ROWS)
    made = []
    for row in ("u7,,,", HOSTILE[name]):
        lines[77] = row
        work = tmp_path / str(len(made))
        fit(settings(write(tmp_path / "t.csv", lines)), work, key=KEY)
        made.append((work / "model.json").read_bytes())
    assert made[0] == made[1]


def test_a_row_moves_the_first_sum_by_no_more_than_the_clip_norm(tmp_path):
    """And by something: the row does take part. One step of the whole table: lambda theta is minus the noisy sum."""
    made = []
    for row in ("u7,100,clerk,yes", ""):
        lines = [*ROWS[:77], row, *ROWS[78:]]
        work = tmp_path / str(len(made))
        job = settings(write(tmp_path / "t.csv", lines), batch_size=100, mechanism="independent", regularization=3.0)
        found = fit(job, work, key=KEY)
        made.append(np.append(found.model.coefficients, found.model.intercept))
    # Two steps; the average of theta_1 = 0 and theta_2 is shown.
    moved = 2 * 3.0 * np.linalg.norm(made[0] - made[1])
    assert 0.1 < moved <= found.plan.clip_norm * (1 + 1e-9)
    assert found.plan.clip_norm == pytest.approx(np.sqrt(3))  # two columns and the intercept, slopes of at most 1


def test_neighbours_differ_in_nothing_that_is_shown_but_the_released_numbers(tmp_path):
    """Output, errors, exit code, files and their sizes, of the command itself."""
    bounds = tmp_path / "b.json"
    bounds.write_text(json.dumps(BOUNDS))
    work, seen = tmp_path / "run", []
    for name in (None, "open quote"):
        lines: list = list(ROWS)
        if name is not None:
            lines[77] = HOSTILE[name]
        write(tmp_path / "t.csv", lines)
        words = ["--csv", "t.csv", "--target", "income", "--bounds", "b.json", "--batch-size", "16", "--output", "run"]
        command = ["-W", "error", "-m", "anyorder", "fit", *words, "--mechanism", "tree"]
        done = processes.run(*command, cwd=tmp_path)
        sizes = {path.name: path.stat().st_size for path in work.rglob("*.*") if path.name != "model.json"}
        shown = [(work / name).read_text() for name in ("plan.json", "metrics.json", ".gitignore")]
        seen.append((done.returncode, done.stdout, done.stderr, sizes, shown))
        shutil.rmtree(work)
    assert seen[0][0] == 0, seen[0][2]
    assert seen[1] == seen[0]


def test_a_user_is_one_unit_and_comes_no_more_often_than_allowed(tmp_path):
    path = write(tmp_path / "t.csv")
    made = fit(settings(path, user_key="id"), tmp_path / "run", key=KEY)
    assert made.plan.unit == "user"
    assert made.plan.dataset_size is None  # rows are known, users are not
    assert made.plan.participation.max_participations == 1
    found = verify(tmp_path / "run" / "run.privacy.json", evidence=tmp_path / "run" / "secret" / "run.evidence.json")
    assert len(found.evidence.receipt("u7").steps) == 1
    with pytest.raises(ArgumentError, match="max_participations"):
        fit(settings(path, max_participations=2), tmp_path / "other")


def test_a_name_that_is_typed_in_two_ways_is_one_user(tmp_path):
    """Counted as two, the second one was refused by the ledger in the midst of the run, which stopped there."""
    lines = [f"u{i},{i % 101},clerk,no" for i in range(64)]
    lines[2], lines[50], lines[60] = (f"{name},40,clerk,yes" for name in ("Jose\u0301", "Jos\u00e9", " Jos\u00e9 "))
    fit(settings(write(tmp_path / "t.csv", lines), user_key="id"), tmp_path / "run", key=KEY)
    found = verify(tmp_path / "run" / "run.privacy.json", evidence=tmp_path / "run" / "secret" / "run.evidence.json")
    assert found.evidence.receipt("Jos\u00e9").steps == (0,)


def visits(path):
    """Ten users in each of eight batches of 20, with two rows in each; every user comes in four of the batches."""
    rng = np.random.default_rng(3)
    lines = []
    for t in range(8):
        for user in range(t % 2, 20, 2):
            lines += [f"u{user},{rng.integers(0, 101)},clerk,{('no', 'yes')[rng.integers(2)]}" for _ in range(2)]
    return write(path, lines)


def test_a_user_takes_part_in_as_many_steps_as_allowed_and_in_the_first_ones(tmp_path):
    path = visits(tmp_path / "t.csv")
    job = settings(path, user_key="id", batch_size=20, max_participations=3)
    made = fit(job, tmp_path / "run", key=KEY)
    found = verify(tmp_path / "run" / "run.privacy.json", evidence=tmp_path / "run" / "secret" / "run.evidence.json")
    assert made.plan.participation.max_participations == 3
    assert [found.evidence.receipt(user).steps for user in ("u6", "u7")] == [(0, 2, 4), (1, 3, 5)]
    # and what they would add later adds nothing
    lines = path.read_text().splitlines()
    write(path, [line if i < 120 else "u99,x,," for i, line in enumerate(lines[1:])])
    fit(job, tmp_path / "other", key=KEY)
    assert (tmp_path / "run" / "model.json").read_bytes() == (tmp_path / "other" / "model.json").read_bytes()
    for most in (0, 9):
        with pytest.raises(ArgumentError, match="max_participations"):
            fit(settings(path, user_key="id", batch_size=20, max_participations=most), tmp_path / "none")
    with pytest.raises(ArgumentError, match="epochs must be 1 with user_key"):
        fit(settings(path, user_key="id", epochs=2), tmp_path / "none")


@pytest.mark.parametrize(
    ("learner", "target", "slope", "steep"),
    [
        ("logistic", ["a", "b"], 1.0, 0), ("svc", ["a", "b"], 1.0, 0), ("softmax", ["a", "b", "c"], 2**0.5, 0),
        ("poisson", [0, 9], 9.0, 1), ("poisson", [0, 0.5], 1.0, 1), ("linear", [0, 9], 2.0, 1),
    ],
)  # fmt: skip
@pytest.mark.parametrize("epsilon", [0.2, 100.0])
def test_plan_and_regularization_are_those_of_the_public_settings(tmp_path, learner, target, slope, steep, epsilon):
    """Whatever stands in the table but for its number of lines."""
    path = write(tmp_path / "t.csv", ["", "x,y,z"] * 35, header="a,b,y")
    bounds = {"features": {"a": [0, 6], "b": ["u", "v"]}, "target": target}
    job = settings(
        path, target="y", bounds=bounds, learner=learner, epsilon=epsilon, delta=1e-7, mechanism="independent"
    )
    made = fit(job, tmp_path / "run")
    plan, row = made.plan, 3**0.5  # two columns, whatever their number of categories, and the intercept
    assert plan.clip_norm == pytest.approx(slope * row)
    assert (plan.delta, plan.batch_size, plan.n) == (1e-7, 16, 5)
    assert 0.99 * epsilon < plan.epsilon <= epsilon
    noise = plan.noise_std * 3**0.5  # of independent noise in sums of 1 to 5 steps, root mean square
    assert made.regularization == pytest.approx(max(16 * steep / 2 * row**2, row * noise / (2 - steep)))
    names = {
        "logistic": "Logistic",
        "svc": "Hinge",
        "softmax": "Softmax",
        "poisson": "PoissonLoss",
        "linear": "Squared",
    }
    assert type(_Work(job).loss).__name__ == names[learner]


def test_rows_of_a_user_together_move_a_sum_by_no_more_than_the_clip_norm(tmp_path):
    made = []
    for job in ("clerk", None):
        lines = [f"u{i},50,clerk,no" for i in range(10)] + ["v,100,clerk,yes" if job else "v,,,"] * 30
        where = tmp_path / str(len(made))
        one = settings(write(tmp_path / "t.csv", lines + lines[:10]), user_key="id", batch_size=40, regularization=3.0)
        found = fit(one, where, key=KEY)
        made.append(np.append(found.model.coefficients, found.model.intercept))
    moved = 2 * 3.0 * np.linalg.norm(made[0] - made[1])
    assert 0.9 * found.plan.clip_norm < moved <= found.plan.clip_norm * (1 + 1e-9)


# -- the command -----------------------------------------------------------------------------------------------------


def people(path, n=4000):
    rng = np.random.default_rng(0)
    age, nurse = rng.uniform(0, 100, n), rng.random(n) < 0.5
    score = (age - 50) / 12 + 2 * nurse - 1
    yes = rng.random(n) < 1 / (1 + np.exp(-2 * score))
    words = zip(age, nurse, yes, strict=True)
    job = {True: '"nurse, ill"', False: "clerk"}
    return write(path, [f"u{i},{a:.2f},{job[bool(b)]},{('no', 'yes')[int(c)]}" for i, (a, b, c) in enumerate(words)])


def test_it_learns_and_its_certificate_holds(tmp_path):
    bounds = tmp_path / "b.json"
    bounds.write_text(json.dumps(BOUNDS))
    path, work = people(tmp_path / "people.csv"), tmp_path / "run"
    words = ["--csv", path, "--target", "income", "--bounds", bounds, "--epsilon", 4, "--test-csv", path]
    done = invoke("fit", *words, "--output", work, "--json")
    assert done.exit_code == 0, done.output
    shown = json.loads(done.stdout[done.stdout.index("{") :].splitlines()[0])
    assert shown["test_score"] > 0.8
    assert shown["claims"]["epsilon"] <= 4
    assert shown["finished"]
    ignored = (work / ".gitignore").read_text()
    assert "secret/" in ignored.splitlines()
    evidence = work / "secret" / "run.evidence.json"
    assert invoke("verify", work / "run.privacy.json", "--evidence", evidence).exit_code == 0
    assert invoke("verify", work / "run.privacy.json", "--model", work / "model.json").exit_code == 0
    assert invoke("verify", work / "run.privacy.json", "--model", bounds).exit_code == 1
    model = load_model(work)
    assert model.score(path) == shown["test_score"]
    assert set(model.predict(path)) == {"no", "yes"}
    model_file = json.loads((work / "model.json").read_text())
    assert list(model_file["coefficients"]) == ["age", "job=clerk", "job=nurse, ill"]


def test_of_the_test_table_all_is_told(tmp_path):
    """It is of nobody in need of protection: how many rows the score is of, and how many could not be read."""
    (tmp_path / "b.json").write_text(json.dumps(BOUNDS))
    people(tmp_path / "people.csv")
    write(tmp_path / "others.csv", [*ROWS[:50], HOSTILE["text"], HOSTILE["no class"], HOSTILE["open quote"]])
    words = ["--csv", tmp_path / "people.csv", "--target", "income", "--bounds", tmp_path / "b.json"]
    words += ["--mechanism", "tree", "--test-csv"]
    done = invoke("fit", *words, tmp_path / "others.csv", "--output", tmp_path / "run")
    assert done.exit_code == 0, done.output
    assert "right of 50 rows; 3 of 53 could not be read" in " ".join(done.stdout.split())
    found = json.loads((tmp_path / "run" / "metrics.json").read_text())
    assert (found["test_rows"], found["test_unreadable"]) == (50, 3)
    done = invoke("fit", *words, write(tmp_path / "good.csv"), "--output", tmp_path / "other")
    assert "right of 200 rows" in done.stdout
    assert "could not be read" not in done.stdout


@pytest.mark.parametrize("rows", [[], [line.replace("no", "0").replace("yes", "1") for line in ROWS]])
def test_a_test_table_without_a_row_that_fits_is_refused_before_anything_is_spent(tmp_path, rows):
    (tmp_path / "b.json").write_text(json.dumps(BOUNDS))
    words = ["--csv", write(tmp_path / "t.csv"), "--target", "income", "--bounds", tmp_path / "b.json"]
    others = write(tmp_path / "others.csv", rows)
    done = invoke("fit", *words, "--test-csv", others, "--output", tmp_path / "run")
    assert done.exit_code == 2
    assert f"test_csv: no row of {others} fits the bounds" in done.stderr
    assert "'income' one of 'no', 'yes'" in done.stderr
    assert not (tmp_path / "run").exists()
    # A row that fits may come late: the table is read up to there.
    fit(settings(tmp_path / "t.csv", test_csv=str(write(others, [*rows, *[""] * 5000, ROWS[0]]))), tmp_path / "run")
    write(others, rows)  # altered before the run goes on: then it is told at the end
    found = resume_fit(tmp_path / "run")
    assert (found.score, found.test_rows, found.test_unreadable) == (None, 0, len(rows))


def test_a_test_table_whose_targets_are_one_number_has_no_score(tmp_path):
    path = write(tmp_path / "t.csv", [f"{i},{i % 9}" for i in range(64)], header="x,y")
    (tmp_path / "b.json").write_text(json.dumps({"features": {"x": [0, 64]}, "target": [0, 9]}))
    others = write(tmp_path / "others.csv", ["1,5", "2,5"], header="x,y")
    words = ["--csv", path, "--target", "y", "--bounds", tmp_path / "b.json", "--test-csv", others]
    done = invoke("fit", *words, "--output", tmp_path / "run", "--mechanism", "tree")
    assert done.exit_code == 0, done.output
    assert "no R^2, as all targets are one number, of 2 rows" in " ".join(done.stdout.replace("│", " ").split())


def test_numbers_are_predicted_in_their_own_units(tmp_path):
    rng = np.random.default_rng(1)
    x = rng.uniform(0, 100, 3000)
    y = 1000 + 5 * x + rng.normal(0, 10, 3000)
    path = write(tmp_path / "t.csv", [f"{a:.3f},{b:.3f}" for a, b in zip(x, y, strict=True)], header="age,pay")
    bounds = {"features": {"age": [0, 100]}, "target": [900, 1600]}
    made = fit(
        settings(path, target="pay", bounds=bounds, epsilon=8.0, batch_size=64, test_csv=str(path)), tmp_path / "run"
    )
    assert made.score is not None
    assert made.score > 0.7
    assert load_model(tmp_path / "run").predict(path)[0] == pytest.approx(y[0], abs=120)


@pytest.mark.parametrize(
    ("learner", "target", "fits"),
    [
        ("logistic", ["a", "b"], True), ("svc", ["a", "b"], True), ("softmax", ["a", "b", "c"], True),
        ("poisson", [0, 9], True), ("linear", [0, 9], True), ("svc", ["a", "b", "c"], False),
        ("linear", ["a", "b"], False),
        ("poisson", [-1, 9], False), ("logistic", [0, 1], False), ("forest", ["a", "b"], False),
    ],
)  # fmt: skip
def test_learners_and_targets_that_fit(tmp_path, learner, target, fits):
    values = target if isinstance(target[0], str) else ["1", "3"]
    rows = [f"{i % 7},{values[i % len(values)]}" for i in range(64)]
    path = write(tmp_path / "t.csv", rows, header="x,y")
    job = settings(path, target="y", bounds={"features": {"x": [0, 6]}, "target": target}, learner=learner)
    if not fits:
        with pytest.raises(ArgumentError, match="learner"):
            fit(job, tmp_path / "run")
        return
    made = fit(job, tmp_path / "run")
    assert made.model is not None
    assert np.isfinite(made.model.coefficients).all()
    assert len(load_model(tmp_path / "run").predict(path)) == 64


@pytest.mark.parametrize(
    "words",
    [
        [], ["--csv", "none.csv"], ["--csv", "none.csv", "--target", "income", "--bounds", "b.json"],
        ["--csv", "t.csv", "--target", "income", "--bounds", "none.json"],
        ["--csv", "t.csv", "--target", "id", "--bounds", "b.json", "--rows", "1000"],
        ["--csv", "t.csv", "--target", "age", "--bounds", "b.json"],
        ["--csv", "t.csv", "--target", "income", "--bounds", "b.json", "--user-key", "who"],
        ["--csv", "t.csv", "--target", "income", "--bounds", "b.json", "--batch-size", "0"],
        ["--csv", "t.csv", "--target", "income", "--bounds", "b.json", "--mechanism", "poisson"],
    ],
)  # fmt: skip
def test_bad_usage_is_one_line_and_leaves_no_folder(tmp_path, monkeypatch, words):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "t.csv")
    (tmp_path / "b.json").write_text(json.dumps(BOUNDS))
    done = invoke("fit", *words, "--output", "run")
    assert done.exit_code == 2
    assert len(done.stderr.splitlines()) == 1
    assert not (tmp_path / "run" / "model.json").exists()


# -- resumption ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("users", [False, True])
def test_a_killed_run_goes_on_to_the_same_model(tmp_path, users):
    """Of users too, of whom each has to be counted anew from the start."""
    if users:
        job = settings(visits(tmp_path / "visits.csv"), user_key="id", batch_size=20, max_participations=2)
    else:
        job = settings(people(tmp_path / "people.csv"), epochs=3, batch_size=64)
    fit(job, tmp_path / "whole", key=KEY)

    class Stop(Exception):
        pass

    from anyorder.app.job import Observer

    class Breaks(Observer):
        def stepped(self, step):
            if step == (3 if users else 101):
                raise Stop

    with pytest.raises(Stop):
        fit(job, tmp_path / "run", key=KEY, observer=Breaks())

    class Begins(Observer):
        def started(self, plan, path, done):
            assert done == (3 if users else 90)  # saved ten times in the course of a run

    resume_fit(tmp_path / "run", observer=Begins())
    for name in ("model.json", "metrics.json", "plan.json"):
        assert (tmp_path / "run" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes(), name
    assert verify(tmp_path / "run" / "run.privacy.json").certificate


def test_a_process_that_is_killed_is_resumed_by_the_command(tmp_path):
    people(tmp_path / "people.csv")
    (tmp_path / "b.json").write_text(json.dumps(BOUNDS))
    command = ["-m", "anyorder", "fit"]
    words = ["--csv", "people.csv", "--target", "income", "--bounds", "b.json", "--batch-size", "16", "--output", "run"]
    began = processes.start(*command, *words, "--mechanism", "tree", cwd=tmp_path)
    journal = tmp_path / "run" / "secret" / ".checkpoint.pt.journal"
    limit = time.monotonic() + 60
    while not (journal.exists() and journal.stat().st_size > 1000) and time.monotonic() < limit:
        time.sleep(0.01)
    began.kill()
    assert began.wait().returncode == -signal.SIGKILL
    assert not (tmp_path / "run" / "model.json").exists()
    done = processes.run(*command, "--resume", "run", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["finished"]
    assert (tmp_path / "run" / "model.json").exists()


def test_a_fit_that_is_going_on_is_not_resumed_beside_it(tmp_path):
    class Second(Observer):
        def stepped(self, step):
            with pytest.raises(ArgumentError, match="a run is going on"):
                resume_fit(tmp_path / "run")

    fit(settings(write(tmp_path / "t.csv"), batch_size=100), tmp_path / "run", observer=Second())


def test_a_fit_whose_checkpoint_was_lost_is_not_begun_anew(tmp_path):
    """Its noise may have been shown on other data."""
    fit(settings(write(tmp_path / "t.csv")), tmp_path / "run")
    (tmp_path / "run" / "secret" / "checkpoint.pt").unlink()
    with pytest.raises(CheckpointError, match="and the run took steps"):
        resume_fit(tmp_path / "run")


def test_a_user_whose_name_is_typed_in_two_ways_is_one(tmp_path):
    """In one step, as the plan has it; and no error tells that there is such a user."""
    rows = [("Zo\u00eb" if i < 50 else "Zoe\u0308" if i == 150 else f"u{i}") + row[row.index(",") :]
            for i, row in enumerate(ROWS)]  # fmt: skip
    write(tmp_path / "t.csv", rows)
    names = {name for rows in table(tmp_path / "t.csv", user_key="id").batches(50, 200) for name in rows.users}
    assert {name for name in names if name.startswith("Z")} == {"Zo\u00eb"}
    assert fit(settings(tmp_path / "t.csv", user_key="id"), tmp_path / "run").model is not None


class _StopsAt(Observer):
    def __init__(self, step, then=lambda: None):
        self.step, self.then = step, then

    def stepped(self, step):
        if step == self.step:
            self.then()
            raise KeyboardInterrupt


def _swapped(rows):
    return [*rows[100:], *rows[:100]]


@pytest.mark.parametrize(
    ("altered", "changed"), [(_swapped, 80), (lambda rows: [rows[64], *rows[1:64], rows[0], *rows[65:]], 2)]
)
def test_a_fit_is_not_resumed_over_lines_in_other_places(tmp_path, altered, changed):
    """Five of thirteen steps were taken; people of the second half would come once more, and others never."""
    write(tmp_path / "t.csv")
    with pytest.raises(KeyboardInterrupt):
        fit(settings(tmp_path / "t.csv"), tmp_path / "run", observer=_StopsAt(5))
    write(tmp_path / "t.csv", altered(ROWS))
    taken = []
    with pytest.raises(CheckpointError, match="a line that was read is another one now") as caught:
        resume_fit(tmp_path / "run", observer=_Counts(taken))
    assert not taken
    assert caught.value.changed == (changed, 80)
    assert str(changed) not in str(caught.value).replace(str(tmp_path), "")
    write(tmp_path / "t.csv")
    assert resume_fit(tmp_path / "run").model is not None


class _Counts(Observer):
    def __init__(self, taken):
        self.stepped = taken.append


def test_a_line_is_the_same_in_every_epoch(tmp_path):
    write(tmp_path / "t.csv")
    meanwhile = _StopsAt(13, then=lambda: write(tmp_path / "t.csv", _swapped(ROWS)))
    with pytest.raises(KeyboardInterrupt):
        fit(settings(tmp_path / "t.csv", epochs=2), tmp_path / "run", observer=meanwhile)
    with pytest.raises(CheckpointError, match="a line that was read is another one now"):
        resume_fit(tmp_path / "run")


def test_what_is_no_folder_of_a_fit_is_refused(tmp_path):
    (tmp_path / "metrics.json").write_text('{"settings": {}}')
    with pytest.raises(CheckpointError, match="no settings of a fit"):
        resume_fit(tmp_path)
