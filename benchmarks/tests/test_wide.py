"""The benchmark of wide tables: its pairs, its ways at one budget, its statistic, its page."""

import math

import numpy as np
import pytest
import torch
from benchmarks.peers.wide_model import Batches, Pairs, losses
from benchmarks.peers.wide_task import batches
from benchmarks.wides import page, sparse
from benchmarks.wides.lazy import apart
from benchmarks.wides.pairs import Corpus, read_pairs

TINY = sparse.Size(vocabulary=30, width=4, train=600, test=100, batch=15, epochs=1)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """Two hundred sentences of eight words."""
    random = np.random.default_rng(0)
    names = [a + b for a in "abcdefgh" for b in "stuvwxyz"]
    path = tmp_path_factory.mktemp("text") / "text.txt"
    lines = [" ".join(names[int(64 * w**2)] for w in random.random(8)) for _ in range(200)]
    path.write_text("\n".join(lines))
    return read_pairs(path, vocabulary=TINY.vocabulary, train=TINY.train, test=TINY.test, leave_out=0)


def test_pairs(tmp_path):
    """Of the words a b c d e f in one sentence, and of others that never meet them."""
    path = tmp_path / "text.txt"
    path.write_text("\n".join(["x y", *(["a b c d e f", "g h"] * 10)]))
    found = read_pairs(path, vocabulary=20, train=10**6, test=10**6, leave_out=0)
    assert found.vocabulary == 10
    assert found.train.shape[1] == 10
    assert 0 <= found.train.min() <= found.train.max() < 10
    together = {(min(pair), max(pair)) for pair in found.train[:, :2].tolist()}
    assert len(together) == 14 + 1  # of six words the pairs at most 4 apart, and g h; x y are for testing
    pairs, counts = np.unique(found.train[:, :2].numpy(), axis=0, return_counts=True)
    assert len(pairs) == 2 * len(together)  # in either order
    assert len(set(counts.tolist())) <= 2


def test_a_table_of_zeros():
    model = Pairs(10, 4, sparse=False)
    with torch.no_grad():
        model.table.weight.zero_()
    ids = torch.arange(20).reshape(2, 10) % 10
    assert losses(model(ids)).tolist() == pytest.approx([sparse.ZERO] * 2)
    assert pytest.approx(9 * math.log(2)) == sparse.ZERO
    assert sparse.test_loss(model.table.weight, ids) == pytest.approx(sparse.ZERO)
    assert sparse.test_loss(torch.full((10, 4), math.nan), ids) == math.inf


def test_the_loss_is_that_of_word2vec():
    model = Pairs(10, 4, sparse=True)
    ids = torch.tensor([[3, 1, 4, 5, 9, 2, 6, 8, 7, 0]])
    centre, context, *negatives = model.table.weight[ids[0]].detach()
    wanted = -torch.log(torch.sigmoid(centre @ context))
    wanted = wanted - sum(torch.log(torch.sigmoid(-centre @ negative)) for negative in negatives)
    assert float(losses(model(ids)).detach()) == pytest.approx(float(wanted), rel=1e-5)


def test_batches_come_as_they_are():
    ids = batches(50, 4, 3)
    found = list(Batches(ids).loader())
    assert [batch.tolist() for batch in found] == ids.tolist()


@pytest.mark.parametrize("name", ["none", "dense", "counts", "lazy-blt"])
def test_every_way_has_the_same_budget_and_trains(corpus, name):
    amount = {"counts": 1.0, "top": 5}.get(sparse.WAYS[name].selection, 0)
    found = sparse.trained(corpus, TINY, name, 1.0, 0, amount)
    if name == "none":
        assert found["epsilon"] is None
    else:
        assert 7.9 < found["epsilon"] <= 8.0
    assert found["loss"] < 2 * sparse.ZERO
    assert found["step_seconds"] > 0


def test_a_run_comes_again_and_seeds_differ(corpus):
    runs = [sparse.trained(corpus, TINY, "lazy-tree", 1.0, seed)["loss"] for seed in (0, 0, 1)]
    assert runs[0] == runs[1] != runs[2]


def test_neighbours_have_rows_of_their_own():
    pairs = torch.tensor([[1, 1, *range(8)]])
    assert sparse._two_tables(pairs, 100).tolist() == [[1, 101, *range(100, 108)]]


def test_only_what_is_missing_is_run(tmp_path, monkeypatch, corpus):
    calls = []

    def run(command, **_):
        calls.append(command)
        return type("Done", (), {"returncode": 0, "stdout": '{"loss": 5.0}', "stderr": ""})

    monkeypatch.setattr(sparse.subprocess, "run", run)
    monkeypatch.setattr(sparse, "read_pairs", lambda *_, **__: Corpus(1, torch.zeros(1), torch.zeros(1)))
    for _ in range(2):
        assert sparse.Runs(TINY, "nowhere", tmp_path, tmp_path / "a" / "wide.jsonl").best("counts")["loss"] == 5.0
    assert len(calls) == 2 * len(sparse.RATES)


def test_the_statistic_tells_means_and_deviations():
    random = np.random.default_rng(0)
    one, same = random.normal(size=(2, 12, 5))
    assert apart(one, same) < 3.5
    assert apart(one, same + np.array([0, 0, 0, 3, 0])) > 3.5
    assert apart(one, same * np.array([1, 1, 1, 1, 5])) > 3.5


def test_the_page_is_written_between_its_marks(tmp_path, monkeypatch):
    path = tmp_path / "wide.md"
    path.write_text("before\n<!-- speed -->\n\nold\n\n<!-- end -->\nbetween\n<!-- sparse -->\n\n<!-- end -->\nafter\n")
    monkeypatch.setattr(page, "put", lambda mark, lines, put=page.put: put(mark, lines, path))
    page.put("speed", ["| two |"])
    lines = [
        {"way": "none", "seed": 0, "lr": lr, "amount": 0, "loss": loss, "step_seconds": 0.01, "bytes": 2**21,
         "epsilon": None}
        for lr, loss in ((1.0, 6.0), (3.0, 5.0))
    ]  # fmt: skip
    page.put("sparse", page.ways(lines, {"none": "no privacy", "other": "not run"}, sparse.ZERO))
    text = path.read_text()
    assert "| two |" in text
    assert "| no privacy | 3 |  | 5.0000 | +1.2383 | 10.0 | 2 |  |" in text
    assert "old" not in text
    assert "not run" not in text
    assert text.index("before") < text.index("two") < text.index("between") < text.index("1.2383") < text.index("after")
    with pytest.raises(SystemExit, match="no place"):
        page.put("lazy", [])
