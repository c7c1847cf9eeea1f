"""What `anyorder train` shows is a function of settings and releases: not of labels, and not of times.

The pair: one table, and the same with one row's label replaced by one that no class has.
"""

import contextlib
import io
import json
import re

import pytest
import torch
from rich.console import Console
from torch.utils.data import TensorDataset
from typer.testing import CliRunner

from anyorder.app import Settings, federation, train
from anyorder.app import job as models
from anyorder.app.cli import app
from anyorder.app.data import Conforming, Data, load
from anyorder.app.progress import ProgressBar
from anyorder.errors import ArgumentError

KEY = bytes(range(32))
N = 24


def table(label=1, row=(0.5, -0.5, 1.0), *, rows=(5,)):
    """Each of these rows has the input, and the label or one of the labels."""
    x = torch.randn(N, 3, generator=torch.Generator().manual_seed(0))
    y = torch.arange(N) % 3
    x[list(rows)], y[list(rows)] = torch.tensor(row), torch.as_tensor(label)
    test = TensorDataset(torch.randn(6, 3, generator=torch.Generator().manual_seed(1)), torch.arange(6) % 3)
    return Data("own:table", TensorDataset(x, y), test, (3,), 3)


def run(folder, data, **changes):
    settings = Settings(
        dataset="own:table", classes=3, model="mlp", epsilon=8.0, delta=1e-3, batch_size=8, epochs=2, order="fixed",
        mechanism="tree", **changes,
    )  # fmt: skip
    told = io.StringIO()
    observer = ProgressBar(Console(file=told, width=120))
    with contextlib.redirect_stdout(told), contextlib.redirect_stderr(told):
        train(settings, folder, data=data, key=KEY, observer=observer)
    observer.stop()
    return torch.load(folder / "model.pt"), told.getvalue().replace(str(folder), "")


SECRET = {"secret", ".lock"}


@pytest.fixture
def steady(monkeypatch):
    """Seconds are those of the machine."""
    monkeypatch.setattr(models._Session, "_elapsed", lambda self: 1.25)


def test_all_that_is_shown_is_the_same_given_the_same_releases(tmp_path, steady):
    """One row adds zero in both runs, for another reason; files, their names and what the terminal shows are equal."""
    found = []
    for name, data in (("label", table(-1)), ("input", table(1, (float("inf"), 0.0, 1.0)))):
        state, said = run(tmp_path / name, data)
        public = [p for p in (tmp_path / name).iterdir() if p.name not in SECRET and ".journal" not in p.name]
        found.append((re.sub(r"\d+:\d\d:\d\d", "", said), {p.name: p.read_bytes() for p in public}))
        # Torch names the archive in it after the file, whose name is random while it is written.
        model = found[-1][1].pop("model.pt")
        found[-1][1]["model.pt"] = (len(model), {key: p.tolist() for key, p in state.items()})
    assert "test accuracy" in found[0][0]
    assert "loss" not in found[0][0]
    assert found[0][0] == found[1][0]
    assert {"model.pt", "metrics.json", "plan.json", "report.html", "accuracy.png"} <= found[0][1].keys()
    assert found[0][1].keys() == found[1][1].keys()
    for name, content in found[0][1].items():
        assert content == found[1][1][name], name


def test_a_label_that_is_no_class_adds_zero_and_nothing_tells_of_it(tmp_path):
    """It was named in a traceback, or made the model a class larger. What adds zero for sure: a row that is NaN."""
    labels, rows = (-1, 3, 2**40, -(2**62), -100), (5, 6, 7, 8, 9)
    absent, of_absent = run(tmp_path / "absent", table(1, (float("nan"),) * 3, rows=rows))
    _, of_plain = run(tmp_path / "plain", table(rows=rows))
    strange, said = run(tmp_path / "strange", table(labels, rows=rows))
    assert said == of_absent
    accuracy = r"accuracy +\d+\.\d %"  # of a model that five rows of 24 did not move
    assert re.sub(accuracy, "", said) == re.sub(accuracy, "", of_plain)
    assert strange.keys() == absent.keys()
    for name in absent:
        assert torch.equal(strange[name], absent[name])


def test_the_loss_is_what_it_was_for_classes():
    x, y = table().train.tensors
    model = models.build("mlp", (3,), 3)
    ours = models.loss(model, (x, y), torch.device("cpu"))
    torch.testing.assert_close(ours, torch.nn.functional.cross_entropy(model(x), y))


def test_strange_labels_of_a_user_are_left_out():
    scores, target = torch.randn(4, 3, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 7, 2, -1])
    assert torch.equal(federation.class_loss(scores, target), federation.class_loss(scores[::2], target[::2]))


OWN = """
import torch
from torch.utils.data import TensorDataset
def load():
    x = torch.randn(24, 3, generator=torch.Generator().manual_seed(0))
    y = torch.arange(24) % 3
    y[5] = {label}
    return TensorDataset(x, y), TensorDataset(x[:6], torch.arange(6) % 3)
"""


def test_classes_are_stated_and_never_counted(tmp_path, monkeypatch):
    """The number of classes was that of the largest private label."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    shapes, said = [], []
    for label in (1, 9):
        (tmp_path / f"own{label % 100}.py").write_text(OWN.format(label=label))
        command = [
            "train", "--dataset", f"own{label % 100}:load", "--model", "linear", "--epsilon", "8", "--epochs", "1",
            "--batch-size", "8", "--output", f"run{label}", "--json",
        ]  # fmt: skip
        refused = CliRunner().invoke(app, command)
        assert refused.exit_code == 2
        assert "--classes" in refused.stderr
        assert not (tmp_path / f"run{label}").exists()
        done = CliRunner().invoke(app, [*command, "--classes", "3"])
        assert done.exit_code == 0, done.stderr
        shapes.append({name: p.shape for name, p in torch.load(f"run{label}/model.pt").items()})
        said.append(json.loads(done.stdout)["settings"]["classes"])
    assert shapes[0] == shapes[1]
    assert said == [3, 3]


ODD = """
import torch
from torch.utils.data import Dataset, TensorDataset
class Rows(Dataset):
    def __len__(self): return 24
    def __getitem__(self, i):
        return {rows}[i - 5] if 5 <= i < 13 else (torch.randn(3, generator=torch.Generator().manual_seed(i)), i % 3)
def load(): return Rows(), TensorDataset(torch.ones(6, 3), torch.arange(6) % 3)
"""
ROWS = [
    "(torch.zeros(5), 1)", "(torch.zeros(3), 1.7)", "(torch.zeros(3), 2**70)", "(torch.zeros(3), torch.tensor([1, 2]))",
    "(torch.zeros(3), None)", "None", "(torch.zeros(3, dtype=torch.complex64), 1)", "(torch.zeros(3), 'one')",
]  # fmt: skip


def test_a_row_of_another_form_adds_zero_and_stops_nothing(tmp_path, monkeypatch, steady):
    """Its shape, the type of its label, stood in a traceback, and the run stopped."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    found = []
    for i, rows in enumerate((["(torch.zeros(3), -1)"] * 8, ROWS, ["(torch.zeros(3), 1)"] * 8)):
        (tmp_path / f"odd{i}.py").write_text(ODD.format(rows=f"[{', '.join(rows)}]"))
        found.append(run(tmp_path / str(i), load(f"odd{i}:load", classes=3)))
    (zero, told), (state, said), (other, _) = found
    assert said == told
    assert all(torch.equal(state[name], p) for name, p in zero.items())
    assert not torch.equal(zero["1.weight"], other["1.weight"])


def test_rows_of_the_form_are_as_they_were():
    rows = Conforming([(torch.arange(3), 1), (torch.ones(3).double(), torch.tensor(2))], torch.zeros(3))
    assert [(x.tolist(), x.dtype, y) for x, y in (rows[0], rows[1])] == [
        ([0, 1, 2], torch.float32, 1), ([1, 1, 1], torch.float32, 2),
    ]  # fmt: skip


@pytest.mark.parametrize("classes", [0, -1, 2.5])
def test_classes_are_checked(classes):
    with pytest.raises(ArgumentError, match="classes"):
        Settings(dataset="own:table", classes=classes)


def test_times_are_in_whole_seconds(tmp_path, monkeypatch):
    """How long a step takes depends on what is in it; to the millisecond it stood in metrics.json."""
    found = []
    for place, seconds in enumerate((1.003, 1.871)):
        monkeypatch.setattr(models._Session, "_elapsed", lambda self, seconds=seconds: seconds)
        run(tmp_path / str(place), table())
        found.append((tmp_path / str(place) / "metrics.json").read_bytes())
    assert found[0] == found[1]
    assert json.loads(found[0])["seconds"] == 2
