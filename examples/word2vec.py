"""Word vectors by negative sampling, private for a pair of words, a sentence or a document.

    python examples/word2vec.py                                             # a made-up corpus
    python examples/word2vec.py --corpus FOLDER --words WORDS.txt --epsilon 8 --unit document --lazy

A corpus is a text file, a Parquet file (column "sentences" or "text"), or a folder of .txt and .parquet files; what is
hidden there, or ends otherwise, is not read. A line is a sentence. A document is a file, a part of it between empty
lines where there is only one, or a row.

Two tables, `inner` for words and `outer` for what stands around them, are trained by `PrivacyEngine`:

    (no option)          dense noise on the whole of both tables in every step
    --lazy               the same noise, but a row gets it when it is next read
    --selection counts   noise on rows alone that are chosen privately, by noisy counts

Vectors are saved in word2vec's text format: `gensim.models.KeyedVectors.load_word2vec_format("vectors.txt")`.

What epsilon covers: one unit of --unit, and the vectors. What it does not: the vocabulary. Which words there are, and
how frequent they are, must be public: give a list that was made elsewhere (--words: a word a line, the most frequent
first, with a count behind it if there is one). Without it the corpus itself is counted, which is a release of its own,
and the program says so. How many units there are is public too.
"""

import argparse
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

import anyorder as ao

# -- text ------------------------------------------------------------------------------------------------------------


def read(corpus):
    """Documents, lists of sentences, lists of words: letters and digits between spaces, in lower case."""
    if corpus is None:
        return made_up()
    path = Path(corpus)
    files = files_in(path) if path.is_dir() else [path]
    documents = []
    for file in files:
        if file.suffix == ".parquet":
            documents += parquet_rows(file)
        elif len(files) > 1:
            documents.append(text_of(file).splitlines())
        else:
            documents += [part.splitlines() for part in text_of(file).split("\n\n")]
    split = ([[word for word in line.lower().split() if word.isalnum()] for line in lines] for lines in documents)
    return [document for document in split if any(document)]


def files_in(folder):
    """The .txt and .parquet files of a folder and of those in it, but for hidden ones."""
    found = [
        file
        for file in folder.rglob("*")
        if file.suffix in (".txt", ".parquet")
        and file.is_file()
        and not any(part.startswith(".") for part in file.relative_to(folder).parts)
    ]
    if not found:
        raise SystemExit(f"{folder} must have .txt or .parquet files, and has none")
    return sorted(found)


def text_of(file):
    try:
        return file.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise SystemExit(f"there is no file {file}") from None
    except UnicodeDecodeError:
        raise SystemExit(
            f"{file} must be text in UTF-8, and is not: convert it, or take it out of the folder"
        ) from None


def parquet_rows(file):
    import pyarrow.parquet as parquet

    table = parquet.read_table(file).to_pydict()
    if "sentences" in table:
        return table["sentences"]
    return [text.splitlines() for text in table["text"]]


def made_up():
    """Sentences of one topic each: words of a topic stand together."""
    rng = np.random.default_rng(0)
    topics = [["sea", "ship", "wave", "sail", "harbour"], ["bread", "flour", "oven", "salt", "butter"]]
    return [[list(rng.choice(topics[rng.integers(2)], 8)) for _ in range(3)] for _ in range(400)]


def vocabulary(documents, size, leave_out, at_least, public=None):
    """(words, their shares of all words), from a public list, or counted: but for the `leave_out` most frequent."""
    if public is not None:
        lines = [line.split() for line in text_of(Path(public)).splitlines() if line.strip()]
        counts = {line[0].lower(): float(line[1]) if len(line) > 1 else 1 / (i + 1) for i, line in enumerate(lines)}
        found, at_least = sorted(counts.items(), key=lambda item: -item[1]), 0  # a list without counts: as 1 / rank
    else:
        found = Counter(word for document in documents for sentence in document for word in sentence).most_common()
    total = sum(count for _, count in found)
    kept = [(word, count) for word, count in found[leave_out : leave_out + size] if count >= at_least]
    if len(kept) < 2:
        raise SystemExit(f"the vocabulary must have two words or more, got {len(kept)}: see --leave-out, --at-least")
    return [word for word, _ in kept], np.array([count / total for _, count in kept])


def encode(documents, words):
    """(words as numbers, the sentence of each, the document of each); words beyond the vocabulary are dropped."""
    numbers = {word: i for i, word in enumerate(words)}
    sentences = [(d, sentence) for d, document in enumerate(documents) for sentence in document]
    ids = [np.array([numbers[word] for word in sentence if word in numbers], np.int64) for _, sentence in sentences]
    lengths = [len(sentence) for sentence in ids]
    sentence = np.repeat(np.arange(len(ids)), lengths)
    return np.concatenate(ids), sentence, np.array([d for d, _ in sentences])[sentence]


# -- examples, as arrays ---------------------------------------------------------------------------------------------


def subsample(shares, threshold, text, rng):
    """Drop frequent words: one of share f stays with probability sqrt(threshold / f) [Mikolov et al. 2013, Eq. 5]."""
    kept = rng.random(len(text[0])) < np.sqrt(threshold / shares)[text[0]]
    return tuple(part[kept] for part in text)


def pairs(words, sentence, window):
    """(m, 1 + 1) rows (context, target), and the place of each target: every pair at most `window` words apart."""
    rows, places = [], []
    for gap in range(1, window + 1):
        at = np.flatnonzero(sentence[gap:] == sentence[:-gap])
        rows += [np.stack([words[at + gap], words[at]], 1), np.stack([words[at], words[at + gap]], 1)]
        places += [at, at + gap]
    return np.concatenate(rows), np.concatenate(places)


def bags(words, sentence, window, nothing):
    """(m, 2 window + 1) rows (context words, or `nothing`, .. , target), and places: CBOW's examples."""
    rows = np.full((len(words), 2 * window + 1), nothing)
    rows[:, -1] = words
    for gap in range(1, window + 1):
        at = np.flatnonzero(sentence[gap:] == sentence[:-gap])
        rows[at, 2 * gap - 2], rows[at + gap, 2 * gap - 1] = words[at + gap], words[at]
    places = np.flatnonzero((rows[:, :-1] != nothing).any(1))
    return rows[places], places


def by_unit(rows, unit, most, nothing, rng):
    """(units, most, width): of each unit at most `most` rows, drawn at random; what is missing is `nothing`."""
    mixed = rng.permutation(len(rows))
    mixed = mixed[np.argsort(unit[mixed], kind="stable")]
    names, first, counts = np.unique(unit[mixed], return_index=True, return_counts=True)
    rank = np.arange(len(mixed)) - np.repeat(first, counts)
    kept = rank < most
    result = np.full((len(names), most, rows.shape[1]), nothing)
    result[np.repeat(np.arange(len(names)), counts)[kept], rank[kept]] = rows[mixed[kept]]
    return result


class Examples(Dataset):
    """Unit i is (most, width + negatives) words. Negatives are drawn when a batch is made: by public shares^0.75."""

    def __init__(self, rows, shares, negatives, seed=0):
        self.rows = torch.as_tensor(rows)
        self.negatives, self.nothing = negatives, len(shares)
        places = (np.arange(max(1 << 20, 64 * len(shares))) + 0.5) / max(1 << 20, 64 * len(shares))
        edges = np.cumsum(shares**0.75) / (shares**0.75).sum()
        self.lots = torch.as_tensor(np.searchsorted(edges[:-1], places))  # a word has as many as its share
        self.generator = torch.Generator().manual_seed(seed)

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return self.__getitems__([index])[0]

    def __getitems__(self, indices):
        """A whole batch at once, for the DataLoader."""
        rows = self.rows[torch.as_tensor(indices)]
        drawn = self.lots[torch.randint(len(self.lots), (*rows.shape[:-1], self.negatives), generator=self.generator)]
        target = rows[..., -1:]
        drawn[(drawn == target) | (target == self.nothing)] = self.nothing  # no word is its own negative
        return torch.cat([rows, drawn], -1)


# -- the model -------------------------------------------------------------------------------------------------------


class WordVectors(nn.Module):
    """(B, most, context + 1 + negatives) words -> (B,) losses, the mean over a unit's examples.

    -log s(h . o_target) - sum over negatives of log s(-h . o_negative), h the mean of the context's rows of `inner`.
    Row V of both tables stands for no word: it is zero, and stays so.
    """

    def __init__(self, size, width, negatives, sparse):
        super().__init__()
        self.inner = nn.Embedding(size + 1, width, padding_idx=size, sparse=sparse)
        self.outer = nn.Embedding(size + 1, width, padding_idx=size, sparse=sparse)
        self.size, self.negatives = size, negatives
        for table in (self.inner, self.outer):
            nn.init.uniform_(table.weight, -0.5 / width**0.5, 0.5 / width**0.5)
            table.weight.data[size] = 0

    def forward(self, x):
        context, words = x[..., : -1 - self.negatives], x[..., -1 - self.negatives :]
        there = (context < self.size).sum(-1, keepdim=True).clamp(min=1)
        middle = self.inner(context).sum(-2) / there
        scores = (self.outer(words) * middle.unsqueeze(-2)).sum(-1)
        signs = torch.ones(words.shape[-1])
        signs[0] = -1
        known = words < self.size
        losses = (F.softplus(signs * scores) * known).sum(-1)
        return losses.sum(-1) / known[..., 0].sum(-1).clamp(min=1)


# -- what comes out --------------------------------------------------------------------------------------------------


def save_vectors(path, words, vectors):
    """word2vec's text format: a line "words width", then a word and its numbers a line."""
    with Path(path).open("w", encoding="utf-8") as file:
        file.write(f"{len(words)} {vectors.shape[1]}\n")
        for word, vector in zip(words, vectors.tolist(), strict=True):
            file.write(f"{word} {' '.join(f'{number:.6g}' for number in vector)}\n")


def nearest(words, vectors, asked, count=5):
    """{word: those of the greatest cosine}."""
    unit = F.normalize(vectors, dim=1)
    numbers = {word: i for i, word in enumerate(words)}
    result = {}
    for word in asked:
        if word in numbers:
            best = (unit @ unit[numbers[word]]).topk(min(count + 1, len(words))).indices.tolist()
            result[word] = [words[i] for i in best if i != numbers[word]][:count]
    return result


@torch.no_grad()
def mean_loss(model, examples, batch_size=1000):
    """(the loss, that of tables of zeros), means over all units: of public text alone."""
    found, zeros = 0.0, 0.0
    for part in torch.arange(len(examples)).split(batch_size):
        x = examples.__getitems__(part)
        known = (x[..., -1 - model.negatives :] < model.size).sum(-1)
        found += model(x).sum().item()
        zeros += np.log(2) * (known.sum(-1) / (known > 0).sum(-1)).sum().item()
    return found / len(examples), zeros / len(examples)


# -- the program -----------------------------------------------------------------------------------------------------


def options(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", help="text or Parquet file, or a folder of them; default: made up")
    parser.add_argument("--test", help="public text, as --corpus: its loss is printed")
    parser.add_argument("--words", help="public list of words, the most frequent first; default: the corpus is counted")
    parser.add_argument("--vocabulary", type=int, default=10_000, help="words, at most")
    parser.add_argument("--leave-out", type=int, default=0, help="so many of the most frequent words: stop words")
    parser.add_argument("--at-least", type=int, default=5, help="drop rarer words, where the corpus is counted")
    parser.add_argument("--subsample", type=float, help="share from which on words are thinned out; default: 0.001")
    parser.add_argument("--model", choices=["cbow", "pair"], default="cbow", help="from all words around, or one")
    parser.add_argument("--window", type=int, default=4)
    parser.add_argument("--negatives", type=int, default=8)
    parser.add_argument("--width", type=int, default=100)
    parser.add_argument("--unit", choices=["pair", "sentence", "document"], default="sentence", help="what is covered")
    parser.add_argument("--most", type=int, default=16, help="examples of a sentence or document, at most")
    parser.add_argument("--epsilon", type=float, default=8.0)
    parser.add_argument("--delta", type=float, default=1e-5)
    parser.add_argument("--mechanism", help="default: auto, or blt if lazy, or independent to select")
    parser.add_argument("--lazy", action="store_true", help="noise when a row is next read")
    parser.add_argument("--selection", choices=["counts"], help="noise on rows that are chosen privately")
    parser.add_argument("--threshold", type=float, default=3.0, help="of noisy counts, in deviations of their noise")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=200, help="units in a step")
    parser.add_argument("--optimizer", choices=["sgd", "adagrad", "adam"], help="default: sgd, or adagrad to select")
    parser.add_argument("--lr", type=float, help="default: 20 for sgd, else 0.05")
    parser.add_argument("--clip-norm", type=float, default=0.5)
    parser.add_argument("--near", nargs="*", default=[], help="words whose neighbours are printed")
    parser.add_argument("--vectors", default="vectors.txt")
    parser.add_argument("--certificate", default="vectors.privacy.json")
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args(arguments)
    if chosen.lazy and chosen.selection:
        parser.error("--lazy and --selection exclude each other")
    if chosen.lazy and chosen.optimizer not in (None, "sgd"):
        parser.error("--lazy needs --optimizer sgd: noise is carried over missed steps by linear updates alone")
    chosen.optimizer = chosen.optimizer or ("adagrad" if chosen.selection else "sgd")
    chosen.lr = chosen.lr or (20.0 if chosen.optimizer == "sgd" else 0.05)
    chosen.subsample = chosen.subsample or (1e-3 if chosen.corpus else 1.0)  # all words made up are frequent
    return chosen


def make_examples(documents, words, shares, chosen):
    """The units of a text."""
    rng, nothing = np.random.default_rng(chosen.seed), len(words)
    text = subsample(shares, chosen.subsample, encode(documents, words), rng)
    if chosen.model == "cbow":
        rows, places = bags(*text[:2], chosen.window, nothing)
    else:
        rows, places = pairs(*text[:2], chosen.window)
    if not len(rows):
        raise SystemExit("no two words of the vocabulary stand together: see --words, --leave-out and --subsample")
    match chosen.unit:
        case "pair":
            rows = rows[:, None, :]
        case "sentence":
            rows = by_unit(rows, text[1][places], chosen.most, nothing, rng)
        case "document":
            rows = by_unit(rows, text[2][places], chosen.most, nothing, rng)
    return Examples(rows, shares, chosen.negatives, chosen.seed)


def make_plan(chosen, units):
    selection = ao.sparse.Counts(chosen.threshold) if chosen.selection else None
    default = "independent" if chosen.selection else "blt" if chosen.lazy else "auto"  # not all noise can come late
    plan = ao.plan(
        dataset_size=units, batch_size=min(chosen.batch_size, units), epochs=chosen.epochs, epsilon=chosen.epsilon,
        delta=chosen.delta, clip_norm=chosen.clip_norm, order="fixed",
        mechanism=ao.mechanism(chosen.mechanism or default, selection=selection),
    )  # fmt: skip
    if not chosen.selection:
        return plan
    threshold = chosen.threshold * plan.selection_std  # the noise on counts does not depend on it
    return replace(plan, selection=replace(plan.selection, threshold=threshold))


def make_optimizer(chosen, model):
    match chosen.optimizer:
        case "sgd":
            return torch.optim.SGD(model.parameters(), lr=chosen.lr)
        case "adagrad":
            torch.sparse.check_sparse_tensor_invariants.disable()  # torch's own Adagrad warns where that is not said
            return torch.optim.Adagrad(model.parameters(), lr=chosen.lr)
        case "adam" if chosen.selection:
            return torch.optim.SparseAdam(model.parameters(), lr=chosen.lr)
        case "adam":
            return torch.optim.Adam(model.parameters(), lr=chosen.lr)


def train(chosen, model, examples, plan):
    """The private loop; returns the engine, of which the certificate comes."""
    sampler = ao.FixedOrderSampler(examples, seed=chosen.seed)
    loader = DataLoader(examples, batch_size=plan.batch_size, sampler=sampler, collate_fn=torch.Tensor.clone)
    engine = ao.PrivacyEngine(plan)
    try:
        private, optimizer, loader = engine.make_private(model, make_optimizer(chosen, model), loader)
    except ao.errors.PlanError as error:
        raise SystemExit(f"these options do not go together (see --mechanism, --lazy): {error}") from None
    start = time.perf_counter()
    for epoch in range(chosen.epochs):
        for x in loader:
            optimizer.zero_grad()
            private(x).mean().backward()
            optimizer.step()
        print(f"epoch {epoch + 1} of {chosen.epochs}, step {engine.step}, {time.perf_counter() - start:.1f} s")
    if chosen.lazy:
        engine.flush()  # before the table is shown, every row gets the noise that it lacks
    return engine


def main(arguments=None):
    chosen = options(arguments)
    torch.manual_seed(chosen.seed)
    documents = read(chosen.corpus)
    words, shares = vocabulary(documents, chosen.vocabulary, chosen.leave_out, chosen.at_least, chosen.words)
    if chosen.words is None:
        print("the vocabulary was counted in the corpus: epsilon does not cover it, unless it is public (see --words)")
    examples = make_examples(documents, words, shares, chosen)
    plan = make_plan(chosen, len(examples))
    print(plan)
    print(f"an example of the plan is a {chosen.unit}: {len(examples)} of them, {len(words)} words")
    sparse = chosen.lazy or chosen.selection is not None
    model = WordVectors(len(words), chosen.width, chosen.negatives, sparse)
    engine = train(chosen, model, examples, plan)
    model.eval()
    if chosen.test:
        found, zeros = mean_loss(model, make_examples(read(chosen.test), words, shares, chosen))
        terms = zeros / np.log(2)  # of which one is for the target
        constant = np.log(terms) - (terms - 1) * np.log(1 - 1 / terms)
        print(f"loss of the public text {found:.3f}; zeros have {zeros:.3f}, the best constant {constant:.3f}")
    vectors = model.inner.weight.detach()[: len(words)]
    save_vectors(chosen.vectors, words, vectors)
    for word, others in nearest(words, vectors, chosen.near or words[:5]).items():
        print(f"  {word}: {', '.join(others)}")
    engine.certificate().save(chosen.certificate)
    print(f"epsilon {plan.epsilon:.3g} for each {chosen.unit}; wrote {chosen.vectors} and {chosen.certificate}")
    print(f"what the certificate calls an example is a {chosen.unit}")


if __name__ == "__main__":
    main()
