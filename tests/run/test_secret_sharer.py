"""The Secret Sharer as a job: text from disk, a small model of words, and a claim beside what was found."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("typer")
pytest.importorskip("rich")
pytest.importorskip("matplotlib")

from matplotlib.figure import Figure
from typer.testing import CliRunner

import anyorder as ao
from anyorder.app.charts import plot_ranks
from anyorder.app.cli import app
from anyorder.app.secret_sharer import Shared, own_training, perplexity, share
from anyorder.app.text import Text, read_text
from anyorder.app.word_model import NextWord, Trained, train_words
from anyorder.audit import Memorised
from anyorder.errors import ArgumentError

BROWN = Path(__file__).parents[3] / "shared" / "data" / "brown"
KEY = bytes(range(32))


@pytest.fixture(scope="module")
def small():
    """300 sequences over 20 words, each word likely after the one before it."""
    made = np.random.default_rng(0)
    rows = (made.integers(20) + np.arange(made.integers(2, 6)) for _ in range(300))
    train = [(row + (made.random(len(row)) < 0.2)) % 20 for row in rows]
    return Text(20, train[:270], train[270:])


# -- text ------------------------------------------------------------------------------------------------------------


def test_text_files_become_sequences(tmp_path):
    lines = ["The cat sat , the DOG sat on 2 mats", "cat dog", "the", "dog cat sat sat sat cat"] + ["dog cat"] * 8
    (tmp_path / "a.txt").write_text("\n".join(lines[:2]))
    (tmp_path / "b.txt").write_text("\n".join(lines[2:]))
    (tmp_path / "notes.md").write_text("elephant " * 50)
    text = read_text(tmp_path, vocabulary=3, leave_out=0, length=4)
    assert text.words == ("cat", "dog", "sat")
    assert text.vocabulary == 3
    assert [row.tolist() for row in text.train] == [[0, 1], [1, 0, 2, 2], [2, 0], *[[1, 0]] * 7]
    assert [row.tolist() for row in text.test] == [[0, 2, 1, 2], [1, 0]]  # sentences 0 and 10
    assert read_text(tmp_path, vocabulary=2, leave_out=1).words == ("dog", "sat")
    assert [row.tolist() for row in read_text(tmp_path / "a.txt", leave_out=0).train] == [[1, 3]]


def test_parquet_of_sentences_or_lists_of_them(tmp_path):
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    lists = {"name": ["x", "y"], "sentences": [["a b", "b c a"], ["c a"]]}
    parquet.write_table(arrow.table(lists), tmp_path / "t.parquet")
    found = read_text(tmp_path, leave_out=0)
    assert sum(map(len, found.train + found.test)) == 7
    parquet.write_table(arrow.table({"text": ["a b", "b c a"]}), tmp_path / "t.parquet")
    assert len(read_text(tmp_path / "t.parquet", leave_out=0).train) == 1
    for wrong in ({"words": ["a"]}, {"text": [1, 2]}):
        parquet.write_table(arrow.table(wrong), tmp_path / "t.parquet")
        with pytest.raises(ArgumentError, match="column"):
            read_text(tmp_path, leave_out=0)
    (tmp_path / "t.parquet").write_text("no such thing")
    with pytest.raises(ArgumentError, match="cannot be read"):
        read_text(tmp_path)


def test_what_is_no_text_is_refused(tmp_path):
    (tmp_path / "a.txt").write_text("one two\n\nthree")
    (tmp_path / "b.txt").write_bytes(b"\xff\xfe\xff")
    empty = tmp_path / "empty"
    empty.mkdir()
    for attempt, phrase in (
        (lambda: read_text(tmp_path / "a.txt"), "100 most frequent"),
        (lambda: read_text(tmp_path / "a.txt", leave_out=0), "two words"),  # its only sentence of two is for testing
        (lambda: read_text(tmp_path / "b.txt"), "UTF-8"),
        (lambda: read_text(empty), "folder of them"),
        (lambda: read_text(tmp_path / "none"), "folder of them"),
        (lambda: read_text("no_such_module_at_all:f"), "cannot be found"),
    ):
        with pytest.raises(ArgumentError, match=phrase):
            attempt()


# -- the model -------------------------------------------------------------------------------------------------------


def test_probabilities_are_those_of_the_network():
    torch.manual_seed(0)
    model = NextWord(7, 4)
    trained = Trained(model, None)
    made = np.random.default_rng(0)
    rows = made.integers(0, 7, (50, 3))
    x = torch.from_numpy(np.column_stack([np.full(50, 7), rows]))
    with torch.no_grad():
        expected = torch.log_softmax(model(x).double(), -1).numpy()
    for j in (1, 2):
        found = trained.log_prob(rows[:, :j], rows[:, j])
        assert found == pytest.approx(expected[np.arange(50), j - 1, rows[:, j]], abs=1e-5)
    total = sum(np.exp(trained.log_prob(rows[:, :2], np.full(50, w))) for w in range(7))
    assert total == pytest.approx(np.ones(50))


def test_perplexity_is_that_of_words_after_the_first():
    def log_prob(contexts, words):
        return np.log(np.where(contexts.shape[1] == 1, 0.5, 0.125)) * np.ones(len(words))

    rows = [np.array([0, 1, 2]), np.array([1, 2]), np.array([2])]
    assert perplexity(log_prob, rows) == pytest.approx((2 * 2 * 8) ** (1 / 3))
    with pytest.raises(ArgumentError, match="after a first"):
        perplexity(log_prob, [np.array([1])])


def test_training_learns_and_a_seed_repeats_it(small):
    steps = []
    settings = {"epochs": 8, "batch_size": 50, "lr": 1.0, "dimension": 8}
    first = train_words(small.train, 20, **settings, stepped=lambda *now: steps.append(now))
    again = train_words(small.train, 20, **settings)
    assert torch.equal(first.model.output.weight, again.model.output.weight)
    assert steps[-1] == (48, 48)
    assert len(steps) == 48
    assert first.plan is None
    assert perplexity(first.log_prob, small.test) < 8 < perplexity(Trained(NextWord(20, 8), None).log_prob, small.test)


def test_an_empty_sequence_is_an_example_that_gives_nothing(small):
    """The same gradients, whether an example's words are taken away or its loss is."""
    rows = [*small.train[:9], np.empty(0, np.int64)]
    one = train_words(rows, 20, epochs=1, batch_size=10, lr=1.0)
    padded = train_words([*small.train[:9], np.array([3])], 20, epochs=1, batch_size=10, lr=1.0)
    assert torch.equal(one.model.words.weight, padded.model.words.weight)


# -- the job ---------------------------------------------------------------------------------------------------------


def words_of(**settings):
    def train(corpus, vocabulary):
        found = train_words(corpus, vocabulary, batch_size=50, dimension=16, **settings)
        return found.log_prob, found.plan

    return train


def test_memorised_without_privacy_and_less_with_it(small):
    common = {"count": 60, "words": 3, "repeats": 6, "candidates": 500, "seed": 1, "key": KEY}
    open_ = share(small, words_of(epochs=12, lr=0.7), **common)
    private = share(small, words_of(epochs=3, lr=0.7, epsilon=1.0, key=KEY), **common)
    assert np.array_equal(open_.included, private.included)
    assert len(open_.inside.ranks) == open_.included.sum()
    assert open_.inside.exposure.mean() > 6
    assert open_.inside.uniformity.p_value < 1e-10
    assert open_.outside.exposure.mean() < 3
    assert open_.lower_bound() > 1.5
    assert open_.claim is None
    assert open_.p_value() is None
    assert not open_.refuted
    assert private.inside.exposure.mean() < open_.inside.exposure.mean() - 2
    assert private.claim.mu == pytest.approx(6 * private.plan.mu)
    assert private.claim.epsilon(1e-5) > private.plan.epsilon
    assert private.lower_bound("f_dp") < private.claim.epsilon(1e-5)
    assert not private.refuted
    told = open_.to_dict()
    assert json.loads(json.dumps(told)) == told
    assert told["claimed_epsilon"] is None


def test_a_claim_that_is_false_is_refuted(small):
    """A training that says epsilon 0.1 and keeps everything."""

    def train(corpus, vocabulary):
        found = train_words(corpus, vocabulary, batch_size=50, epochs=12, lr=0.7, dimension=32)
        return found.log_prob, ao.plan(dataset_size=len(corpus), batch_size=50, epochs=12, epsilon=0.1, delta=1e-5)

    found = share(small, train, count=200, repeats=1, candidates=200, seed=1, key=KEY)
    assert found.p_value() < 1e-6
    assert found.refuted
    assert found.lower_bound() > 0.1


def test_coins_come_from_the_system_where_no_key_is_given(small):
    def train(corpus, vocabulary):
        return (lambda contexts, words: np.full(len(words), -1.0)), None

    first, second = (share(small, train, count=64, candidates=5, seed=3) for _ in range(2))
    assert not np.array_equal(first.included, second.included)
    fixed, again = (share(small, train, count=64, candidates=5, seed=seed, key=KEY) for seed in (3, 4))
    assert np.array_equal(fixed.included, again.included)  # by the key alone: a seed is no secret


def test_a_claim_is_refuted_at_one_in_a_million(monkeypatch):
    found = Shared(*[None] * 9)
    for p, refuted in ((0.9e-6, True), (1.1e-6, False), (None, False)):
        monkeypatch.setattr(Shared, "p_value", lambda self, p=p: p)
        assert found.refuted is refuted


def test_a_model_that_gives_some_words_no_probability(small):
    def train(corpus, vocabulary):
        return (lambda contexts, words: np.where(words % 2, -np.inf, -1.0)), None

    found = share(small, train, count=40, candidates=50, key=KEY)
    assert np.isfinite(found.scores).all()
    assert found.lower_bound() >= 0


def test_trainings_of_ones_own(small, tmp_path, monkeypatch):
    (tmp_path / "owntraining.py").write_text(
        "import numpy as np\n"
        "def plain(corpus, vocabulary):\n"
        "    return lambda before, word: np.full(len(word), -np.log(vocabulary))\n"
        "def wrong(corpus, vocabulary): return 3\n"
        "def text(): return [[0, 1, 2]] * 10, 5\n"
        "def no_text(): return [[0, 1, 2]]\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    text = read_text("owntraining:text")
    assert (text.vocabulary, len(text.train), text.test) == (5, 10, [])
    found = share(text, own_training("owntraining:plain"), count=30, candidates=20, key=KEY)
    assert found.perplexity is None
    assert found.plan is None
    with pytest.raises(ArgumentError, match="log_prob"):
        share(small, own_training("owntraining:wrong"), count=30, key=KEY)
    with pytest.raises(ArgumentError, match="size of the vocabulary"):
        read_text("owntraining:no_text")
    with pytest.raises(ArgumentError, match="came out alike"):
        share(small, own_training("owntraining:plain"), count=2, key=(2).to_bytes(32, "little"))


def test_brown_has_a_thousand_words():
    if not BROWN.exists():
        pytest.skip("the Brown corpus is not beside the repository, in ../shared/data/brown")
    text = read_text(BROWN)
    assert text.vocabulary == len(text.words) == 1000
    assert 40_000 < len(text.train) < 50_000
    assert all(2 <= len(row) <= 8 for row in text.train + text.test)


# -- the command -----------------------------------------------------------------------------------------------------


def invoke(*arguments):
    return CliRunner().invoke(app, ["audit", "canaries", *map(str, arguments)])


@pytest.fixture
def written(tmp_path, small):
    letters = [chr(97 + i) * 3 for i in range(20)]
    (tmp_path / "text.txt").write_text("\n".join(" ".join(letters[w] for w in row) for row in small.train))
    (tmp_path / "stop.py").write_text(
        "def load(): return [[0, 1]] * 50, 30\ndef train(c, v): return lambda b, w: -1.0 * w\n"
    )
    return tmp_path


def test_the_command_trains_and_tells(written, monkeypatch):
    monkeypatch.chdir(written)
    monkeypatch.syspath_prepend(written)
    outcome = invoke("stop:train", "--text", "stop:load", "--count", 40, "--candidates", 50, "--plot", "ranks.png")
    assert outcome.exit_code == 0, outcome.output
    assert (written / "ranks.png").stat().st_size > 5000
    for phrase in ("in the text", "left out", "exposure", "claimed  nothing", "40 of 40"):
        assert phrase in outcome.output
    outcome = invoke("stop:train", "--text", "stop:load", "--count", 40, "--candidates", 50, "--json")
    told = json.loads(outcome.stdout)
    assert told["canaries"] == 40
    assert told["inside"]["canaries"] + told["outside"]["canaries"] == 40
    assert "ranked" in outcome.stderr


def test_the_command_with_the_model_of_words(written):
    text = ("--text", written / "text.txt", "--vocabulary", 20, "--leave-out", 0, "--count", 40, "--candidates", 100)
    outcome = invoke(*text, "--epochs", 1, "--epsilon", 8, "--repeats", 2, "--json")
    assert outcome.exit_code == 0, outcome.output
    told = json.loads(outcome.stdout)
    assert told["claimed_epsilon"] == pytest.approx(8)
    assert told["claimed_epsilon_of_a_canary"] > 16
    assert told["perplexity"] > 1
    assert set(told["epsilon_lower_bound_of_a_canary"]) == {"one_run", "f_dp"}


def test_what_the_command_refuses(written, monkeypatch):
    monkeypatch.chdir(written)
    monkeypatch.syspath_prepend(written)
    for arguments, phrase in (
        (["--text", "nowhere"], "folder of them"),
        (["stop:train", "--text", "stop:load", "--epsilon", "8", "--lr", "1"], "leave out --epsilon, --lr"),
        (["stop:train", "--text", "stop:load", "--count", "1"], "at least 2"),
        (["stop:train", "--text", "stop:load", "--plot", "no/such/folder.png", "--count", "20"], "cannot write"),
    ):
        outcome = invoke(*arguments)
        assert outcome.exit_code == 2, outcome.output
        assert phrase in outcome.stderr.splitlines()[-1]


def test_errors_of_ones_own_training_are_no_verdict(written, monkeypatch):
    monkeypatch.chdir(written)
    monkeypatch.syspath_prepend(written)
    (written / "wrong.py").write_text(
        "import sys\n"
        "def load(): return [[0, 1]] * 50, 30\n"
        "def raises(c, v): raise KeyError('colour')\n"
        "def leaves(c, v): sys.exit(1)\n"
    )
    for name, phrase in (("raises", "KeyError: 'colour'"), ("leaves", "sys.exit(1): there is no audit")):
        outcome = invoke(f"wrong:{name}", "--text", "wrong:load", "--count", 20)
        assert outcome.exit_code == 2, outcome.output  # 1 says that a claim was refuted
        assert phrase in outcome.stderr.splitlines()[-1]
    assert "Traceback" in invoke("wrong:raises", "--text", "wrong:load", "--count", 20).stderr


def test_a_plot_that_cannot_be_written_is_refused_before_the_training(written, monkeypatch):
    monkeypatch.chdir(written)
    monkeypatch.syspath_prepend(written)
    (written / "late.py").write_text(
        "def load(): return [[0, 1]] * 50, 30\ndef train(c, v): raise AssertionError('trained')\n"
    )
    arguments = ("late:train", "--text", "late:load", "--count", 20, "--plot")
    outcome = invoke(*arguments, "absent/r.png")
    assert outcome.exit_code == 2
    assert "plot must be a file in a folder that exists" in outcome.stderr
    assert "trained" not in outcome.stderr
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    outcome = invoke(*arguments, "r.png")
    assert outcome.exit_code == 2
    assert "matplotlib" in outcome.stderr
    assert "trained" not in outcome.stderr


# -- the picture -----------------------------------------------------------------------------------------------------


def test_panels_of_ranks(tmp_path, monkeypatch):
    figures = []
    save = Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda own, *a, **b: figures.append(own) or save(own, *a, **b))
    found, first = Memorised(np.arange(1, 1001), 1000), Memorised(np.ones(7, int), 1000)
    plot_ranks({"3": {"a": found, "b": found}, "9": {"a": found, "b": first}}, tmp_path / "r.png", "ranks")
    assert (tmp_path / "r.png").read_bytes().startswith(b"\x89PNG")
    axes = figures[0].axes
    assert [one.get_title() for one in axes] == ["a", "b", "", ""]
    assert [one.get_ylabel() for one in axes] == ["3", "", "9", ""]
    assert [bar.get_height() for bar in axes[0].patches] == [100] * 10
    assert [bar.get_height() for bar in axes[3].patches] == [7] + [0] * 9
    for wrong in ({}, {"3": {}}, {"3": {"a": found}, "9": {"b": found}}):
        with pytest.raises(ArgumentError, match="same columns"):
            plot_ranks(wrong, tmp_path / "no.png", "ranks")
