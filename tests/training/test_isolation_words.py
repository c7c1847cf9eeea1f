"""How a run kept units apart, in four words: on engine, certificate, card and report, and after a resume."""

import json
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset
from typer.testing import CliRunner

import anyorder as ao
from anyorder.app import html_report
from anyorder.app.cards import verdict
from anyorder.app.cli import app
from anyorder.errors import CertificateError
from anyorder.formats import save_json
from anyorder.participation import MinSeparation, PoissonSampling
from anyorder.plan.certificate import CONSTRUCTED, EITHER, MAPPED, PROMISED, PROVED, UNKNOWN, Isolation
from anyorder.plan.planner import plan_at_sigma
from anyorder.release.release import Release

N, B = 8, 4
KEPT = Isolation(CONSTRUCTED, CONSTRUCTED, CONSTRUCTED, PROVED)


def rows(unit=0.0):
    x = torch.randn(N, 3, generator=torch.Generator().manual_seed(1))
    x[5] += unit
    return x, torch.arange(N) % 2, torch.arange(N)


class Own(Dataset):
    """Reads what it likes."""

    def __init__(self, *tensors):
        self.tensors = tensors

    def __len__(self):
        return N

    def __getitem__(self, index):
        return tuple(t[index] for t in self.tensors)


class AtOnce(Own):
    def __getitems__(self, indices):
        return [self[index] for index in indices]


class Stream(IterableDataset):
    def __init__(self, *tensors, batches=False):
        self.rows, self.batches = list(zip(*tensors, strict=True)), batches

    def __iter__(self):
        if self.batches:
            yield from ([torch.stack(part) for part in zip(*self.rows[i : i + B], strict=True)] for i in (0, 4))
        else:
            yield from self.rows


def collate(examples):
    x, y, ids = zip(*examples, strict=True)
    return pad_sequence(list(x), batch_first=True), torch.stack(y), torch.stack(ids)


class NoCopy(nn.Linear):
    def __deepcopy__(self, memo):
        raise TypeError("one of its kind")


def odd(out, y):
    """With an operation that no rule knows."""
    return (
        F.cross_entropy(out, y, reduction="none") + torch.linalg.matrix_exp(out[:, None] * out[:, :, None]).sum((1, 2))
    ).mean()


def plan_of(loader=None, order=None, neighbours="zero-out"):
    given = {"loader": loader, "epochs": 1} if order is None else {"order": order, "batch_size": B}
    return plan_at_sigma(
        1.0 if order is not None and order.secret else 1e-3, **given, delta=1e-3, mechanism="independent",
        neighbours=neighbours,
        unit="example" if order is None or order.secret else "user",
    )  # fmt: skip


def train(
    loader,
    *,
    order=None,
    neighbours="zero-out",
    model=None,
    loss=F.cross_entropy,
    checkpoint=None,
    steps=None,
    **options,
):
    plan = plan_of(loader, order, neighbours)
    torch.manual_seed(0)
    model = nn.Linear(3, 2) if model is None else model()
    engine = ao.PrivacyEngine(plan, key=bytes(32), checkpoint=checkpoint)
    private, optimizer, loader = engine.make_private(
        model, torch.optim.SGD(model.parameters(), lr=0.01), loader, **options
    )
    go(engine, private, optimizer, loader, loss, steps)
    return engine


def go(engine, private, optimizer, loader, loss, steps=None):
    for x, y, _ in loader:
        if engine.step == (engine.plan.n if steps is None else steps):
            break
        optimizer.zero_grad()
        loss(private(x), y).backward()
        optimizer.step()


def loader_of(dataset, **options):
    return DataLoader(dataset, **{"batch_size": B, **options})


ARRIVALS = {"order": MinSeparation(2, 1, 2), "unit": 2}
CASES = {
    "tensors": (lambda: loader_of(TensorDataset(*rows())), {}, KEPT),
    "part of tensors": (lambda: loader_of(Subset(TensorDataset(*rows()), range(N))), {}, KEPT),
    "another loss": (lambda: loader_of(TensorDataset(*rows())), {"loss": odd}, replace(KEPT, loss=MAPPED)),
    "a data set of one's own": (lambda: loader_of(Own(*rows())), {}, replace(KEPT, dataset=PROMISED)),
    "collation of one's own": (
        lambda: loader_of(TensorDataset(*rows()), collate_fn=collate), {"pad_to": (3,)}, KEPT
    ),
    "examples at once": (lambda: loader_of(AtOnce(*rows())), {}, replace(KEPT, dataset=PROMISED, collation=PROMISED)),
    "a stream": (lambda: loader_of(Stream(*rows())), ARRIVALS, replace(KEPT, dataset=PROMISED)),
    "a stream of batches": (
        lambda: loader_of(Stream(*rows(), batches=True), batch_size=None), ARRIVALS,
        replace(KEPT, dataset=PROMISED, collation=PROMISED),
    ),
    "a list of batches": (
        lambda: list(Stream(*rows(), batches=True)), ARRIVALS, replace(KEPT, dataset=PROMISED, collation=PROMISED)
    ),
    "a model that cannot be copied": (
        lambda: loader_of(TensorDataset(*rows())), {"model": lambda: NoCopy(3, 2)}, replace(KEPT, model=PROMISED)
    ),
    "secret batches": (
        lambda: loader_of(TensorDataset(*rows())), {"order": PoissonSampling(2, 0.5)}, replace(KEPT, loss=EITHER)
    ),
    "someone added": (
        lambda: list(Stream(*rows(), batches=True)), {**ARRIVALS, "neighbours": "add-or-remove"},
        Isolation(PROMISED, PROMISED, CONSTRUCTED, EITHER),
    ),
    "batches of one": (lambda: loader_of(TensorDataset(*rows()), batch_size=1), {}, KEPT),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_each_word_is_what_holds(name, tmp_path):
    make, options, words = CASES[name]
    certificate = train(make(), **options).certificate()
    assert certificate.isolation == words
    certificate.save(tmp_path / "c.json")
    found = ao.verify(tmp_path / "c.json")
    assert found.certificate.isolation == words
    unseen = verdict(found)[1]
    promised = list(words.to_dict().values()).count(PROMISED)
    assert sum(text.startswith("stated by the owner: ") for text in unseen) == promised


def test_before_the_first_step_nothing_is_promised_of_the_model():
    assert train(loader_of(TensorDataset(*rows())), steps=0).certificate().isolation == replace(KEPT, loss=EITHER)


def test_card_verify_and_report_say_it(tmp_path):
    certificate = train(loader_of(AtOnce(*rows()))).certificate()
    card = str(certificate)
    assert "data set  promised: the code of the data set makes each example" in card
    assert "loss  proved: in every batch each operation maps rows to rows" in card
    certificate.save(tmp_path / "c.json")
    told = " ".join(
        CliRunner().invoke(app, ["verify", str(tmp_path / "c.json")], env={"COLUMNS": "300"}).output.split()
    )
    assert "not checked: stated by the owner: of the collation, that each row of a batch is made of one example" in told
    assert "not checked: that examples were kept apart as the card says" in told
    page = html_report(ao.verify(tmp_path / "c.json").certificate)
    assert "how examples are kept apart where the loss is computed" in page
    assert "The owner states, of the data set, that the code of the data set makes each example" in page


@pytest.mark.parametrize(("part", "word"), [
    ("loss", "by construction"), ("loss", "checked"), ("loss", None), ("loss", ["proved"]), ("dataset", "proved"),
    ("collation", "mapped"), ("model", "Promised"), ("model", 1), ("other", "proved"),
])  # fmt: skip
def test_an_altered_word_is_refused(part, word, tmp_path):
    path = tmp_path / "c.json"
    train(loader_of(TensorDataset(*rows()))).certificate().save(path)
    data = json.loads(path.read_text())
    data["isolation"][part] = word
    path.write_text(json.dumps(data))
    with pytest.raises(CertificateError, match="hash|sha256|changed"):
        ao.verify(path)
    data.pop("sha256")
    save_json(path, data)
    with pytest.raises(CertificateError, match="isolation"):
        ao.verify(path)


@pytest.mark.parametrize("isolation", [None, [], {}, {"dataset": "promised"}, "promised"])
def test_the_words_are_all_there_or_none(isolation, tmp_path):
    path = tmp_path / "c.json"
    train(loader_of(TensorDataset(*rows()))).certificate().save(path)
    data = json.loads(path.read_text())
    data.pop("sha256")
    save_json(path, {**data, "isolation": isolation})
    with pytest.raises(CertificateError, match="isolation"):
        ao.verify(path)
    data.pop("isolation")
    save_json(path, data)
    assert ao.verify(path).certificate.isolation is None  # as of earlier versions


@pytest.mark.parametrize("name", ["secret batches", "someone added"])
def test_where_sizes_differ_between_neighbours_the_loss_has_one_word(name, tmp_path):
    make, options, _ = CASES[name]
    certificate = train(make(), **options).certificate()
    for word in (PROVED, MAPPED):
        replace(certificate, isolation=replace(certificate.isolation, loss=word)).save(tmp_path / "c.json")
        with pytest.raises(CertificateError, match="isolation"):
            ao.verify(tmp_path / "c.json")


@pytest.mark.parametrize("loss", [F.cross_entropy, odd])
def test_neighbours_have_the_same_bytes(loss, tmp_path):
    for unit in (0.0, 1e4, float("nan")):
        engine = train(loader_of(TensorDataset(*rows(unit))), loss=loss)
        replace(engine.certificate(), weights=(), seal="").save(tmp_path / str(unit))  # the weights were released
    assert len({path.read_bytes() for path in tmp_path.iterdir()}) == 1


@pytest.mark.parametrize("word", [CONSTRUCTED, None])
def test_evidence_and_receipts_show_that_a_word_was_edited(word, tmp_path):
    """The file's own hash is made again by whoever edits it; a promise becomes a construction, or all words go."""
    engine = train(loader_of(Own(*rows())))
    certificate = engine.certificate()
    files = {"evidence": tmp_path / "e.json", "receipt": tmp_path / "r.json"}
    certificate.save(tmp_path / "c.json")
    engine.evidence().save(files["evidence"])
    engine.evidence().receipt(3).save(files["receipt"])
    found = ao.verify(tmp_path / "c.json", **files)
    assert found.certificate.isolation.dataset == PROMISED
    assert found.evidence.certificate.isolation == found.certificate.isolation
    found.evidence.receipt(3).save(files["receipt"])  # as an owner makes one later, of the files
    ao.verify(tmp_path / "c.json", **files)
    edited = None if word is None else replace(certificate.isolation, dataset=word)
    replace(certificate, isolation=edited).save(tmp_path / "c.json")
    ao.verify(tmp_path / "c.json")  # from the public file alone it cannot be known
    with pytest.raises(CertificateError, match="words on how units were kept apart"):
        ao.verify(tmp_path / "c.json", evidence=files["evidence"])
    with pytest.raises(CertificateError, match="receipt"):
        ao.verify(tmp_path / "c.json", receipt=files["receipt"])
    evidence = json.loads(files["evidence"].read_text())
    evidence.pop("sha256")
    words = {} if edited is None else {"isolation": edited.to_dict()}
    save_json(files["evidence"], {**{k: v for k, v in evidence.items() if k != "isolation"}, **words})
    with pytest.raises(CertificateError, match="another record"):
        ao.verify(tmp_path / "c.json", evidence=files["evidence"])


# -- resumes ----------------------------------------------------------------------------------------------------------


def test_a_resume_goes_on_from_the_weaker_words(tmp_path):
    path = tmp_path / "run.ckpt"
    with_own = train(loader_of(Own(*rows())), loss=odd, checkpoint=path, steps=1)
    with_own.save()
    with_own.close()
    again = train(loader_of(TensorDataset(*rows())), checkpoint=path, steps=1)
    assert again.training.loss_kept == "mapped"  # before a batch of its own
    assert again.certificate().isolation == replace(KEPT, dataset=PROMISED, loss=MAPPED)
    again.close()
    again = train(loader_of(TensorDataset(*rows())), checkpoint=path)
    assert again.step == 2
    assert again.certificate().isolation == replace(KEPT, dataset=PROMISED, loss=MAPPED)


def test_a_checkpoint_of_an_earlier_version_is_promised(tmp_path, monkeypatch):
    path = tmp_path / "run.ckpt"
    save_all = Release.save_all

    def save_less(self, place, front_end, extra):
        save_all(self, place, {name: kept for name, kept in front_end.items() if name != "isolation"}, extra)

    with monkeypatch.context() as patch:
        patch.setattr(Release, "save_all", save_less)
        first = train(loader_of(TensorDataset(*rows())), checkpoint=path, steps=1)
        first.save()
    first.close()
    again = train(loader_of(TensorDataset(*rows())), checkpoint=path)
    assert again.certificate().isolation == UNKNOWN
    again.save()
    again.close()
    assert train(loader_of(TensorDataset(*rows())), checkpoint=path).certificate().isolation == UNKNOWN


def test_a_release_by_hand_says_nothing(tmp_path):
    with ao.Release(plan_of(order=MinSeparation(2, 1, 2)), 3, key=bytes(32)) as release:
        release.step([1], torch.zeros(3))
        release.certificate().save(tmp_path / "c.json")
    assert "isolation" not in json.loads((tmp_path / "c.json").read_text())
    assert "data set" not in dict(ao.verify(tmp_path / "c.json").certificate.facts())
