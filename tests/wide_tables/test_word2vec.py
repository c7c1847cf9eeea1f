"""The example that trains word vectors: its examples by brute force, its model, and what it writes."""

import importlib.util
import math
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

from anyorder.plan.certificate import Certificate

FILE = Path(__file__).parents[2] / "examples" / "word2vec.py"
TEXT = "the cat sat on the mat\nthe dog sat\n\na cat and a dog\n"


@pytest.fixture(scope="module")
def word2vec():
    spec = importlib.util.spec_from_file_location("word2vec", FILE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_documents(word2vec, tmp_path):
    (tmp_path / "one.txt").write_text(TEXT, encoding="utf-8")
    parts = word2vec.read(tmp_path / "one.txt")
    assert [len(part) for part in parts] == [2, 1]  # between empty lines, in a single file
    assert parts[1] == [["a", "cat", "and", "a", "dog"]]
    (tmp_path / "two.txt").write_text("Another , cat !\n", encoding="utf-8")
    documents = word2vec.read(tmp_path)
    assert len(documents) == 2  # files, where there are several
    assert documents[1] == [["another", "cat"]]
    parquet = pytest.importorskip("pyarrow.parquet")
    import pyarrow

    parquet.write_table(pyarrow.table({"sentences": [["a cat", "the dog"]]}), tmp_path / "three.parquet")
    assert [["a", "cat"], ["the", "dog"]] in word2vec.read(tmp_path)


def test_only_text_of_a_folder_is_read(word2vec, tmp_path):
    with pytest.raises(SystemExit, match=r"\.txt or \.parquet"):
        word2vec.read(tmp_path)
    (tmp_path / ".git").mkdir()
    for name in (".DS_Store", "one.txt~", "one.bak", ".hidden.txt", ".git/two.txt"):
        (tmp_path / name).write_bytes(b"\xff\xfe")
    (tmp_path / "one.txt").write_text("a cat\n", encoding="utf-8")
    assert word2vec.read(tmp_path) == [[["a", "cat"]]]
    (tmp_path / "latin.txt").write_bytes("ein Bär".encode("latin-1"))
    with pytest.raises(SystemExit, match=r"latin\.txt must be text in UTF-8"):
        word2vec.read(tmp_path)
    with pytest.raises(SystemExit, match="there is no file"):
        word2vec.read(tmp_path / "none.txt")


def test_vocabulary(word2vec, tmp_path):
    documents = [[TEXT.split()]]
    words, shares = word2vec.vocabulary(documents, 3, 1, 2)
    assert words == [word for word, _ in Counter(TEXT.split()).most_common(4)[1:]]
    assert shares[0] == pytest.approx(2 / 14)
    public = tmp_path / "words.txt"
    public.write_text("moon 6\ncat 3\ndog 1\n", encoding="utf-8")
    words, shares = word2vec.vocabulary(documents, 10, 1, 5, public)
    assert words == ["cat", "dog"]  # neither what is frequent nor what is rare in the corpus is asked
    assert shares.tolist() == [0.3, 0.1]
    public.write_text("moon\ncat\n", encoding="utf-8")
    assert word2vec.vocabulary(documents, 10, 0, 5, public)[1].tolist() == pytest.approx([2 / 3, 1 / 3])
    ids, sentence, document = word2vec.encode([[["x", "cat"], ["dog"]], [["dog", "cat"]]], ["cat", "dog"])
    assert ids.tolist() == [0, 1, 1, 0]
    assert sentence.tolist() == [0, 1, 2, 2]
    assert document.tolist() == [0, 0, 1, 1]


@pytest.fixture
def text():
    rng = np.random.default_rng(0)
    sentence = np.sort(rng.integers(6, size=40))
    return rng.integers(9, size=40), sentence


@pytest.mark.parametrize("window", [1, 2, 4])
def test_windows_are_those_of_two_loops(word2vec, text, window):
    words, sentence = text
    near = {
        i: [j for j in range(40) if j != i and abs(i - j) <= window and sentence[i] == sentence[j]] for i in range(40)
    }
    rows, places = word2vec.pairs(words, sentence, window)
    mine = Counter((int(place), *map(int, row)) for row, place in zip(rows, places, strict=True))
    assert mine == Counter((i, words[j], words[i]) for i, others in near.items() for j in others)
    rows, places = word2vec.bags(words, sentence, window, 9)
    assert places.tolist() == [i for i, others in near.items() if others]
    for row, i in zip(rows, places, strict=True):
        assert row[-1] == words[i]
        assert sorted(w for w in row[:-1] if w != 9) == sorted(words[j] for j in near[i])


def test_units_have_at_most_so_many_windows_of_their_own(word2vec):
    rng = np.random.default_rng(0)
    unit = rng.integers(5, size=60) * 10
    rows = np.stack([unit, np.arange(60)], 1)
    found = word2vec.by_unit(rows, unit, 8, 99, rng)
    assert found.shape == (5, 8, 2)
    for name, kept in zip(np.unique(unit), found, strict=True):
        there = kept[kept[:, 0] != 99]
        assert len(there) == min(8, (unit == name).sum())
        assert (there[:, 0] == name).all()
        assert len(set(there[:, 1].tolist())) == len(there)
    again = word2vec.by_unit(rows, unit, 8, 99, np.random.default_rng(1))
    assert (again != found).any()  # at random


def test_subsampling_keeps_by_share(word2vec):
    shares = np.array([0.5, 0.1, 0.001])
    words = np.repeat(np.arange(3), 20_000)
    kept, same = word2vec.subsample(shares, 0.01, (words, words), np.random.default_rng(0))
    assert (kept == same).all()
    for i, share in enumerate(shares):
        assert (kept == i).mean() * len(kept) / 20_000 == pytest.approx(min(1, math.sqrt(0.01 / share)), abs=0.02)


def test_negatives_follow_the_shares(word2vec):
    shares = np.array([0.6, 0.3, 0.1])
    examples = word2vec.Examples(np.full((500, 1, 2), 2), shares, 40)
    batch = examples.__getitems__(list(range(500)))
    assert batch.shape == (500, 1, 42)
    drawn = batch[..., 2:]
    assert (drawn != 2).all()  # no word is its own negative
    law = shares**0.75 / (shares**0.75).sum()
    for word, p in ((0, law[0]), (1, law[1]), (3, law[2])):
        assert (drawn == word).float().mean() == pytest.approx(p, abs=0.02)
    nothing = word2vec.Examples(np.full((1, 1, 2), 3), shares, 4)[0]
    assert (nothing == 3).all()


def test_the_model_is_its_formula(word2vec):
    torch.manual_seed(0)
    model = word2vec.WordVectors(5, 4, 2, sparse=False)
    x = torch.tensor([[[0, 5, 1, 2, 3, 4], [5, 5, 5, 5, 5, 5]], [[1, 1, 3, 0, 5, 5], [2, 0, 4, 4, 1, 1]]])
    inner, outer = model.inner.weight, model.outer.weight

    def window(context, target, negatives):
        middle = inner[context].mean(0)
        scores = torch.stack([outer[target] @ middle, *(-outer[n] @ middle for n in negatives)])
        return -torch.nn.functional.logsigmoid(scores).sum()

    expected = [
        window([0, 1], 2, [3, 4]),
        (window([1, 1, 3], 0, []) + window([2, 0, 4], 4, [1, 1])) / 2,
    ]
    torch.testing.assert_close(model(x), torch.stack(expected))
    model(x).sum().backward()
    assert not inner.grad[5].any()
    assert not outer.grad[5].any()


def test_vectors_come_back(word2vec, tmp_path):
    words, vectors = ["cat", "dog", "mat"], torch.tensor([[1.0, 0.1], [0.9, 0.2], [-1.0, 3e-5]])
    word2vec.save_vectors(tmp_path / "v.txt", words, vectors)
    assert _read(tmp_path / "v.txt")[0] == words
    np.testing.assert_allclose(_read(tmp_path / "v.txt")[1], vectors, rtol=1e-5)
    assert word2vec.nearest(words, vectors, ["cat", "unknown"], 1) == {"cat": ["dog"]}


def _read(path):
    """As gensim's `load_word2vec_format` has it: a header, then a word and `width` numbers a line, by single spaces."""
    lines = path.read_text(encoding="utf-8").split("\n")
    count, width = map(int, lines[0].split())
    assert lines[-1] == ""
    rows = [line.rstrip().split(" ") for line in lines[1:-1]]
    assert [len(row) for row in rows] == [1 + width] * count
    return [row[0] for row in rows], np.array([[float(number) for number in row[1:]] for row in rows])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("unit", "way"),
    [("pair", "--lazy"), ("document", "--selection counts")],
)
def test_the_program(word2vec, tmp_path, capsys, unit, way):
    rng = np.random.default_rng(0)
    topics = [["sun", "moon", "star", "sky"], ["tea", "cup", "milk", "cake"]]
    made = [" ".join(rng.choice(topics[i % 2], 6)) for i in range(60)]
    step = 10 if unit == "document" else 120
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    for i in range(30):
        (corpus / f"{i}.txt").write_text("\n".join(made[2 * i : 2 * i + 2]), encoding="utf-8")
    words = tmp_path / "words.txt"
    words.write_text("\n".join(topics[0] + topics[1]), encoding="utf-8")
    word2vec.main(
        f"--corpus {corpus} --words {words} --test {corpus} --unit {unit} --subsample 1 --width 8 --epochs 3 "
        f"--batch-size {step} --epsilon 1e6 --lr 1 --vectors {tmp_path}/v.txt --certificate {tmp_path}/c.json "
        f"--near moon --model pair {way}".split()
    )
    said = capsys.readouterr().out
    size = {"pair": 60 * 30 - 120, "sentence": 60, "document": 30}[unit]
    assert f"an example of the plan is a {unit}: {size} of them, 8 words" in said
    assert "counted" not in said
    assert _read(tmp_path / "v.txt")[1].shape == (8, 8)
    near = next(line for line in said.splitlines() if line.startswith("  moon:")).removeprefix("  moon: ").split(", ")
    if unit == "pair":
        assert set(near[:3]) == {"sun", "star", "sky"}
    certificate = Certificate.load(tmp_path / "c.json")
    assert certificate.plan.dataset_size == size
    assert certificate.plan.batch_size == step
    assert (certificate.plan.selection is not None) == ("--selection" in way)
    if way == "--selection counts":
        assert certificate.plan.selection.threshold == pytest.approx(3 * certificate.plan.selection_std)


def test_what_does_not_go_together(word2vec, capsys):
    for words in ("--lazy --selection counts", "--lazy --optimizer adam"):
        with pytest.raises(SystemExit):
            word2vec.options(words.split())
        assert "--lazy" in capsys.readouterr().err
