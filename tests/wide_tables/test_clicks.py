"""The example on clicks: reading, hashing, users with many clicks, and what it writes."""

import csv
import importlib.util
from pathlib import Path

import numpy as np
import pytest
import torch

from anyorder.plan.certificate import Certificate

FILE = Path(__file__).parents[2] / "examples" / "clicks.py"


@pytest.fixture(scope="module")
def clicks():
    spec = importlib.util.spec_from_file_location("clicks", FILE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def log(tmp_path, clicks):
    """150 visitors with one to nine clicks, in a file with a column of no use."""
    rng = np.random.default_rng(0)
    path = tmp_path / "log.csv"
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["when", "visitor", "article", "clicked"])
        for i in range(150):
            for _ in range(1 + i % 9):
                item = rng.integers(20)
                writer.writerow(
                    [0, f"v{i}", f"a {item},", "yes" if rng.random() < (0.9 if item % 2 else 0.1) else "No"]
                )
    return path


def test_reading(clicks, log, tmp_path):
    users, items, labels = clicks.read(log, "visitor", "article", "clicked")
    assert len(users) == len(items) == len(labels) == sum(1 + i % 9 for i in range(150))
    assert users[0] == "v0"
    assert items[0].endswith(",")
    assert set(labels.tolist()) == {0.0, 1.0}
    with pytest.raises(SystemExit, match="columns user, article"):
        clicks.read(log, "user", "article", "clicked")
    with pytest.raises(SystemExit, match="0 or 1"):
        clicks.read(log, "visitor", "article", "article")


def test_what_cannot_be_read_or_does_not_go_together_is_a_line(clicks, log, tmp_path):
    with pytest.raises(SystemExit, match="there is no file"):
        clicks.read(tmp_path / "none.csv", "visitor", "article", "clicked")
    (tmp_path / "empty.csv").write_text("visitor,article,clicked\n", encoding="utf-8")
    with pytest.raises(SystemExit, match="a row or more"):
        clicks.read(tmp_path / "empty.csv", "visitor", "article", "clicked")
    (tmp_path / "short.csv").write_text("visitor,article,clicked\na,b\n", encoding="utf-8")
    with pytest.raises(SystemExit, match="0 or 1"):
        clicks.read(tmp_path / "short.csv", "visitor", "article", "clicked")
    with pytest.raises(SystemExit, match="do not go together.*--mechanism"):
        clicks.main(
            f"--csv {log} --user visitor --item article --label clicked --rows 50 --epochs 1 --lazy "
            f"--mechanism dense --model {tmp_path}/m.pt --certificate {tmp_path}/c.json".split()
        )


def test_rows_are_a_public_function_of_the_id(clicks):
    rows = clicks.hashed([f"user {i}" for i in range(20_000)], 100)
    assert rows.min() == 0
    assert rows.max() == 99
    assert np.bincount(rows).std() < 3 * np.sqrt(200)
    assert clicks.hashed(["user 7"], 100)[0] == rows[7]


def test_users_have_at_most_so_many_clicks(clicks):
    rng = np.random.default_rng(0)
    users = rng.integers(30, size=300).astype(str)
    number, there = clicks.by_user((np.arange(1, 301),), users, 8, rng)
    assert number.shape == there.shape == (30, 8)
    for name, kept, where in zip(np.unique(users), number, there, strict=True):
        mine = kept[where > 0] - 1
        assert len(set(mine.tolist())) == len(mine) == min(8, (users == name).sum())
        assert (users[mine] == name).all()
        assert not kept[where == 0].any()


def test_no_click_is_no_row(clicks):
    torch.manual_seed(0)
    model = clicks.Clicks(10, 3, sparse=False)
    user, item = torch.tensor([[2, 10], [4, 4]]), torch.tensor([[7, 10], [0, 1]])
    u, v = model.users.weight[2], model.items.weight[7]
    logits = model(user, item)
    torch.testing.assert_close(logits[0, 0], u[:3] @ v[:3] + u[3] + v[3])
    label, there = torch.tensor([[1.0, 0.0], [0.0, 1.0]]), torch.tensor([[1.0, 0.0], [1.0, 1.0]])
    found = clicks.loss(logits, label, there)
    torch.testing.assert_close(found[0], -torch.nn.functional.logsigmoid(logits[0, 0]))
    found.sum().backward()
    assert not model.users.weight.grad[10].any()


@pytest.mark.parametrize(
    ("unit", "way"), [("click", "--mechanism tree"), ("user", "--lazy"), ("click", "--selection counts --threshold 1")]
)
def test_the_program(clicks, log, tmp_path, capsys, unit, way):
    step = 30 if unit == "user" else 75
    clicks.main(
        f"--csv {log} --user visitor --item article --label clicked --test {log} --unit {unit} --rows 500 --epochs 12 "
        f"--batch-size {step} "
        f"--epsilon 1e6 --lr 20 --model {tmp_path}/m.pt --certificate {tmp_path}/c.json {way}".split()
    )
    said = capsys.readouterr().out
    size = {"click": sum(1 + i % 9 for i in range(150)), "user": 150}[unit]
    assert f"an example of the plan is a {unit}: {size} of them" in said
    assert f"what the certificate calls an example is a {unit}" in said
    right = float(said.split(" % right")[0].split(", ")[-1])
    assert right > 80
    assert torch.load(tmp_path / "m.pt")["users.weight"].shape == (501, 9)
    assert Certificate.load(tmp_path / "c.json").plan.dataset_size == size
