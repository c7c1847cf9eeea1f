"""The word task of the benchmark: its text, its model, and that servers and loops by hand train alike."""

import os

import pytest
import torch
from torch import nn

pytest.importorskip("pyarrow")

import pyarrow as pa
import pyarrow.parquet as parquet
from benchmarks.federations.next_word import WordLSTM, accuracy, read_brown, word_loss
from benchmarks.federations.words import Size, plan_of, trained

TINY = Size(vocabulary=20, embedding=4, hidden=5, passage=3, report_goal=4)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Twenty documents of nine sentences, over forty words."""
    made = torch.Generator().manual_seed(0)
    place = tmp_path_factory.mktemp("brown")
    sentences = [
        [
            " ".join(f"W{int(w)}" for w in (40 * torch.rand(6, generator=made) ** 2)) + " , `` ."
            for _ in range(9)
        ]
        for _ in range(20)
    ]  # fmt: skip
    table = pa.table({"document": [f"d{i}" for i in range(20)], "sentences": sentences})
    parquet.write_table(table, place / "train.parquet")
    return place


@pytest.fixture(scope="module")
def brown(folder):
    return read_brown(folder, vocabulary=20, passage=3)


def test_text(brown):
    assert brown.words == 24
    assert len(brown.users) == 18 * 3
    assert len(brown.test[0]) == 2 * 9
    for x, y in (*brown.users.values(), brown.test):
        assert x.shape == y.shape
        assert torch.equal(x[:, 1:7], y[:, :6])
        assert (x[:, 0] == 22).all()  # the beginning
        assert (y[:, 6] == 23).all()  # the end, after six words: punctuation is dropped
        assert not y[:, 7:].any()
        assert y[:, :6].min() >= 1
        assert y[:, :6].max() <= 21
    counts = torch.cat([y[:, :6].flatten() for _, y in brown.users.values()]).bincount()
    assert counts[21] > 0
    assert counts[1] == counts[1:21].max()


def test_the_full_model_is_that_of_the_paper():
    """[Kairouz et al. 2021] Table 2(c), weights by layer."""
    model = WordLSTM(10_004)
    sizes = {name: sum(p.numel() for p in layer.parameters()) for name, layer in model.named_children()}
    assert sizes["embedding"] == 960_384
    assert sizes["input"] + sizes["state"] == 2_055_560
    assert sizes["dense"] == 64_416
    assert sizes["output"] == 970_388


def test_the_cell_is_that_of_torch():
    model = WordLSTM(30, embedding=6, hidden=7)
    lstm = nn.LSTM(6, 7, batch_first=True)
    with torch.no_grad():
        lstm.weight_ih_l0.copy_(model.input.weight)
        lstm.weight_hh_l0.copy_(model.state.weight)
        lstm.bias_ih_l0.copy_(model.input.bias)
        lstm.bias_hh_l0.zero_()
    x = torch.randint(30, (3, 20), generator=torch.Generator().manual_seed(1))
    expected = model.output(model.dense(lstm(model.embedding(x))[0]))
    torch.testing.assert_close(model(x), expected)
    assert torch.equal(WordLSTM(30, embedding=6, hidden=7).output.weight, model.output.weight)


def test_accuracy_leaves_out_filling_unknown_and_the_end():
    class Fixed(nn.Module):
        words = 24

        def forward(self, x):
            """Most of all the unknown word; of the others word 3."""
            logits = torch.zeros(*x.shape, 24)
            logits[..., 21], logits[..., 3] = 2.0, 1.0
            return logits

    y = torch.tensor([[3, 5, 21, 3, 23, 0, 0]])
    assert accuracy(Fixed(), (y, y)) == 2 / 3


def test_filling_is_no_part_of_the_loss(brown):
    x, y = brown.test
    model = WordLSTM(24, embedding=4, hidden=5)
    torch.testing.assert_close(word_loss(model(x), y), word_loss(model(x[:, :7]), y[:, :7]))


def test_plans():
    one, three = plan_of("tree", 8.0, 1, 54, TINY), plan_of("independent", 8.0, 3, 54, TINY)
    assert (one.n, one.participation.max_participations) == (13, 1)
    assert (three.n, three.participation.min_separation, three.participation.max_participations) == (39, 13, 3)
    for plan in (one, three):
        assert plan.epsilon == pytest.approx(8.0, rel=1e-5)
        assert plan.epsilon <= 8
        assert plan.unit == "user"
        assert plan.batch_size == 4


def test_a_server_almost_without_noise_trains_as_the_loop_without(brown):
    """Three passes, so that the same cohorts come in both, and the sums are clipped alike."""
    plain = trained(brown, TINY, "none", None, 3, 3.0, 0)
    assert trained(brown, TINY, "tree", 1e6, 3, 3.0, 0) == pytest.approx(plain, abs=0.02)
    noisy = [trained(brown, TINY, "independent", 8.0, 1, 3.0, seed) for seed in (0, 1)]
    assert noisy[0] != noisy[1]


def test_the_search_for_a_rate_keeps_what_it_ran(folder, monkeypatch, tmp_path):
    from benchmarks.federations import words

    monkeypatch.setattr(words, "RESULTS", tmp_path / "words.jsonl")
    monkeypatch.setitem(words.RATES, ("none", None, 3), (1.0, 3.0))
    runs = words.Runs(TINY, os.fspath(folder))
    rate = runs.best_rate(("none", None, 3))
    seen = words.read_results()
    assert [line["lr"] for line in seen] == [1.0, 3.0]
    assert max(seen, key=lambda line: line["accuracy"])["lr"] == rate
    assert runs.best_rate(("none", None, 3)) == rate
    assert words.read_results() == seen
