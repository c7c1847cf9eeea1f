"""Every front end as a loop that the isolation harness can run: made-up rows in, what may be shown out."""

import contextlib
import json
import sys
import time
import types
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, TensorDataset

import anyorder as ao
from anyorder.accounting.selection import Uniform
from anyorder.audit.faults import patched
from anyorder.audit.isolation import Neighbour
from anyorder.clipping import Adaptive
from anyorder.clipping.norms import PerGroup
from anyorder.online import LeastSquares, LinearRegression, LogisticRegression
from anyorder.online.learner import Learner
from anyorder.online.losses import Logistic
from anyorder.participation import MinSeparation

N, B, EPOCHS, WIDTH, CLASSES, UNIT = 16, 8, 2, 5, 3, 3
RNG = torch.Generator().manual_seed(0)
ROWS = [(torch.randn(WIDTH, generator=RNG), torch.tensor(i % CLASSES)) for i in range(N)]
TEXTS = [(torch.randint(1, 9, (3 + i % 4,), generator=RNG), torch.tensor(i % CLASSES)) for i in range(N)]
VALUES = ("other values", "zeros", "huge values", "NaN", "infinities")
# Of loops whose way with values is that of another: what is in range, what is not, no number, and a label.
FEW = {"rows": (UNIT,), "kinds": ("another unit's row", "huge values", "NaN", "another label")}
EVERYTHING = ("another label", "negative label", "label beyond the others", "ignored label")


def planned(**changes):
    settings = {"dataset_size": N, "batch_size": B, "epochs": EPOCHS, "epsilon": 8, "delta": 1e-3, "mechanism": "tree"}
    return ao.plan(**{name: value for name, value in {**settings, **changes}.items() if value is not None})


@dataclass(frozen=True)
class Isolated:
    """A front end and what it is run on.

    Attributes:
        train, rows, options: of `isolation.check`.
    """

    train: Callable[..., Any]
    rows: Any
    options: dict[str, Any] = field(default_factory=lambda: {"rows": (UNIT,)})


# -- the engine --------------------------------------------------------------------------------------------------------


def mlp():
    return nn.Sequential(nn.Linear(WIDTH, 6), nn.Tanh(), nn.Linear(6, CLASSES))


@contextlib.contextmanager
def stopped():
    """Within it no time passes: it is shown in whole seconds, and a slow machine has more of them."""
    with patched(time, "perf_counter", lambda: 0.0), patched(time, "time", lambda: 1e9):
        yield


def engine(model=mlp, loss=F.cross_entropy, *, collate=None, plan=None, **options):
    """The loop of the README, with parts of it replaced."""
    plan = plan or planned()

    def train(rows, folder):
        net = model()
        made = torch.optim.SGD(net.parameters(), lr=0.5)
        run = ao.PrivacyEngine(plan)
        loader = DataLoader(rows, batch_size=B // options.get("accumulate", 1), shuffle=True, collate_fn=collate)
        private, made, loader = run.make_private(net, made, loader, **options)
        for _ in range(EPOCHS):
            for i, batch in enumerate(loader):
                *inputs, y = batch
                loss(private(*inputs), y).backward()
                if (i + 1) % options.get("accumulate", 1) == 0:
                    made.step()
                    made.zero_grad()
        run.certificate().save(folder / "run.privacy.json")
        return net

    return train


def by_own_rate(rows, folder):
    """Each example is drawn at the rate of its own label: another label moves its own draws alone."""
    rates = torch.tensor([0.6 + 0.1 * max(0, min(int(y), CLASSES - 1)) for _, y in rows])
    loader = DataLoader(rows, batch_size=B, sampler=ao.sampling.PoissonRates(rates, most=0.8))
    plan = ao.plan(loader=loader, order="poisson", epochs=EPOCHS, noise_multiplier=2, delta=1e-3)
    net, run = mlp(), ao.PrivacyEngine(plan)
    private, made, loader = run.make_private(net, torch.optim.SGD(net.parameters(), lr=0.5), loader)
    for _ in range(EPOCHS):
        for x, y in loader:
            F.cross_entropy(private(x), y).backward()
            made.step()
            made.zero_grad()
    run.certificate().save(folder / "run.privacy.json")
    return net


def in_passes(models, loss, after=None, **options):
    """A loop whose loss calls one network several times, or several networks; `after` each step, a step of others."""

    def train(rows, folder):
        nets = [model() for model in models]
        made, run = torch.optim.SGD([p for net in nets for p in net.parameters()], lr=0.5), ao.PrivacyEngine(planned())
        loader = DataLoader(rows, batch_size=B, shuffle=True)
        private, made, loader = run.make_private(nets, made, loader, **options)
        further = after() if after is not None else None
        for _ in range(EPOCHS):
            for x, y in loader:
                loss(*private, x, y).backward()
                made.step()
                made.zero_grad()
                if further is not None:
                    further(*private)
        run.certificate().save(folder / "run.privacy.json")
        return nn.ModuleList(nets)

    return train


def triplets(net, x, y):
    return F.triplet_margin_loss(net(x), net(x * 0.5), net(-x)) + F.cross_entropy(net(x), y)


def codes(encoder, decoder, x, y):
    return F.mse_loss(decoder(encoder(x)), x) + F.cross_entropy(encoder(x), y)


def real_and_fake(judge, x, y):
    return F.softplus(-judge(x)).mean() + F.softplus(judge(torch.ones(len(x), WIDTH))).mean()


def generator():
    """Steps of a generator through the released discriminator."""
    maker = nn.Linear(2, WIDTH)
    own = torch.optim.SGD(maker.parameters(), lr=0.5)

    def step(judge):
        own.zero_grad()
        F.softplus(-judge(maker(torch.ones(4, 2)))).mean().backward()
        own.step()

    return step


def measured(rule):
    """A loop whose loss is released, and goes to a schedule."""

    def train(rows, folder):
        run, net = ao.PrivacyEngine(planned(mechanism="independent")), mlp()
        made, loader = torch.optim.SGD(net.parameters(), lr=0.5), DataLoader(rows, batch_size=B, shuffle=True)
        private, made, loader = run.make_private(net, made, loader, rule=rule, released=RELEASED)
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(made, patience=0)
        for _ in range(EPOCHS):
            for x, y in loader:
                losses = F.cross_entropy(private(x), y, reduction="none")
                run.measure(loss=losses)
                losses.mean().backward()
                made.step()
                made.zero_grad()
            schedule.step(run.metrics.mean("loss", len(loader)))
        return [net, run.metrics.values("loss"), run.clip_norm]

    return train


RELEASED = ao.Metrics({"loss": 4.0}, share=0.3)
LENGTHS = (8, 32, 160)


def padded(batch):
    texts, labels = zip(*batch, strict=True)
    return pad_sequence(texts, batch_first=True), torch.stack(labels)


class LastState(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.layer, self.out = nn.Embedding(9, 4), nn.LSTM(4, 6, batch_first=True), nn.Linear(6, CLASSES)

    def forward(self, x):
        return self.out(self.layer(self.embed(x))[0][:, -1])


class MeanOfLength(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.out = nn.Embedding(9, 6), nn.Linear(6, CLASSES)

    def forward(self, x):
        return self.out((self.embed(x) * (x > 0)[..., None]).mean(1) * 10)


class Words(nn.Module):
    def __init__(self, dropout=0.0):
        super().__init__()
        self.embed, self.out, self.dropout = nn.Embedding(9, 6), nn.Linear(6, CLASSES), nn.Dropout(dropout)

    def forward(self, x):
        return self.out((self.dropout(self.embed(x)) * (x > 0)[..., None]).sum(1))


def warm(outputs, y):
    return F.cross_entropy(outputs * 30, y)


class Rejects:
    """A crop that is drawn again until it fits."""

    def __init__(self, rows):
        self.rows = rows

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        x, y = self.rows[i]
        for _ in range(20):
            keep = torch.rand(WIDTH) > 0.4
            if (x * keep).sum() > 0:
                break
        return x * keep, y


def cropped(rows, folder):
    return engine()(Rejects(rows), folder)


def by_users(rows, folder):
    """Users of several examples; `rows` has the user of each."""
    net = mlp()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
    plan = planned(dataset_size=N // 2, batch_size=4, epochs=None, unit="user", order=MinSeparation(4, b=1, k=2))
    users = sorted({user for _, _, user in rows})
    batches = [users[i : i + 4] for _ in range(EPOCHS) for i in range(0, N // 2, 4)]
    made = [[row for row in rows if row[2] in batch] for batch in batches]
    loader = [{"x": torch.stack([x for x, _, _ in b]), "y": torch.stack([y for _, y, _ in b]),
               "user": [user for *_, user in b]} for b in made]  # fmt: skip
    private, optimizer, loader = ao.PrivacyEngine(plan).make_private(net, optimizer, loader, unit="user")
    for batch in loader:
        optimizer.zero_grad()
        F.cross_entropy(private(batch["x"]), batch["y"], reduction="sum").backward()
        optimizer.step()
    return net


OF_USERS = [(x, y, f"u{i // 2:02}") for i, (x, y) in enumerate(ROWS)]
FEWER = [row for i, row in enumerate(OF_USERS) if i != 7]
MORE = [*OF_USERS, (OF_USERS[6][0] * -5, OF_USERS[6][1], "u03"), (OF_USERS[6][0] * 3, OF_USERS[6][1], "u03")]


def table(selection=None):
    """A table whose rows get noise when they are read, or of which some are chosen in each step."""
    plan = planned(mechanism="independent" if selection else "tree", neighbours="zero-out")

    def train(rows, folder):
        net = nn.Sequential(nn.EmbeddingBag(20, 4, mode="sum", sparse=True), nn.Linear(4, CLASSES))
        made = torch.optim.SGD(net.parameters(), lr=0.5)
        chosen = planned(mechanism=ao.mechanism("independent", selection=selection)) if selection else plan
        run = ao.PrivacyEngine(chosen)
        private, made, loader = run.make_private(net, made, DataLoader(rows, batch_size=B, shuffle=True))
        for _ in range(EPOCHS):
            for ids, y in loader:
                made.zero_grad()
                F.cross_entropy(private(ids), y).backward()
                made.step()
        run.flush()
        return net

    return train


IDS = [(torch.randint(0, 20, (3,), generator=RNG), torch.tensor(i % CLASSES)) for i in range(N)]
OTHER_IDS = [Neighbour("other ids", [(19 - ids if i == UNIT else ids, y) for i, (ids, y) in enumerate(IDS)])]

ODD = [(torch.rand(4), TEXTS[UNIT][1]), (torch.ones(4, 2, dtype=torch.int64), TEXTS[UNIT][1]), (TEXTS[UNIT][0],), None]

TRAINING = {
    "engine": Isolated(engine(), ROWS),
    "engine, independent noise": Isolated(engine(plan=planned(mechanism="independent")), ROWS, FEW),
    "engine, groups": Isolated(engine(rule=PerGroup([["0.weight", "0.bias"], ["2.weight", "2.bias"]])), ROWS, FEW),
    "engine, a released loss": Isolated(measured(None), ROWS, FEW),
    "engine, a released loss under a norm that moves": Isolated(measured(Adaptive(share=0.3)), ROWS),
    "engine, exact integers": Isolated(engine(plan=planned(mechanism=ao.mechanism("tree", secure=True))), ROWS),
    "engine, micro-batches": Isolated(engine(accumulate=2), ROWS, FEW),
    "engine, secret batches": Isolated(engine(plan=planned(order="balls-in-bins", epsilon=None, noise_multiplier=2,
        mechanism="independent")), ROWS, FEW),
    "engine, rates by label": Isolated(by_own_rate, ROWS, FEW),
    "engine, dropout": Isolated(engine(lambda: nn.Sequential(nn.Dropout(0.3), *mlp())), ROWS, FEW),
    "engine, users": Isolated(by_users, OF_USERS,
        {"rows": (6, 7), "unit": "u03", "kinds": (*VALUES, "another label")}),
    "engine, users of more and fewer rows": Isolated(by_users, OF_USERS,
        {"rows": (6, 7), "unit": "u03", "others": [Neighbour("fewer", FEWER), Neighbour("more", MORE)]}),
    "engine, the last state of an LSTM": Isolated(engine(LastState, warm, collate=padded, pad_to=LENGTHS), TEXTS),
    "several passes": Isolated(in_passes([mlp], triplets), ROWS),
    "several passes, in chunks": Isolated(in_passes([mlp], triplets, chunk_size=3), ROWS, FEW),
    "several passes, dropout": Isolated(
        in_passes([lambda: nn.Sequential(nn.Dropout(0.3), *mlp())], triplets), ROWS, FEW),
    "two networks": Isolated(in_passes([mlp, lambda: nn.Linear(CLASSES, WIDTH)], codes), ROWS, FEW),
    "a generator": Isolated(in_passes([lambda: nn.Linear(WIDTH, 1)], real_and_fake, generator), ROWS, FEW),
    "lazy table": Isolated(table(), IDS, {"rows": (UNIT,), "others": OTHER_IDS}),
    "selected table": Isolated(table(Uniform(6)), IDS, {"rows": (UNIT,), "others": OTHER_IDS}),
    "engine, a mean over length": Isolated(engine(MeanOfLength, warm, collate=padded, pad_to=LENGTHS), TEXTS),
    "dropout over a padded length": Isolated(engine(lambda: Words(0.5), collate=padded, pad_to=LENGTHS), TEXTS),
    "examples that do not fit": Isolated(
        engine(Words, collate=padded, pad_to=LENGTHS, like=(torch.zeros(8, dtype=torch.int64), torch.tensor(0))), TEXTS,
        {"rows": (UNIT,), "others": [Neighbour(f"odd {i}", [odd if j == UNIT else row for j, row in enumerate(TEXTS)])
                                     for i, odd in enumerate(ODD)]}),
    "a crop that is drawn again": Isolated(cropped, ROWS, FEW),
    "labels out of range": Isolated(engine(), ROWS, {"rows": (UNIT,), "kinds": EVERYTHING}),
}  # fmt: skip

# -- trainers ----------------------------------------------------------------------------------------------------------


def hugging_face(rows, folder, pad_to=None, released=None, like=None):
    import transformers

    from anyorder.training.trainers.huggingface import PrivateTrainer

    transformers.utils.logging.disable_progress_bar()
    config = transformers.BertConfig(
        vocab_size=9, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8,
        max_position_embeddings=200, num_labels=CLASSES,
    )  # fmt: skip
    arguments = transformers.TrainingArguments(
        str(folder), per_device_train_batch_size=B, num_train_epochs=EPOCHS, optim="sgd", learning_rate=0.1,
        lr_scheduler_type="constant", report_to=[], use_cpu=True, disable_tqdm=True, logging_steps=1,
        save_strategy="no",
    )  # fmt: skip
    data = [{"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": y} for ids, y in rows]
    trainer = PrivateTrainer(
        transformers.BertForSequenceClassification(config), arguments, train_dataset=data, plan=planned(),
        data_collator=words_and_masks, pad_to=pad_to, like=like, released=released,
    )  # fmt: skip
    with stopped():
        done = trainer.train()
        trainer.save_state()
    return [trainer.model, done.metrics]


def hugging_face_measured(rows, folder):
    return hugging_face(rows, folder, pad_to=LENGTHS, released=RELEASED)


def hugging_face_odd_texts(rows, folder):
    ids = torch.zeros(8, dtype=torch.int64)
    like = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": torch.tensor(0)}
    return hugging_face(rows, folder, pad_to=LENGTHS, like=like)


def words_and_masks(batch):
    texts = {name: [row[name] for row in batch] for name in batch[0]}
    labels = torch.stack(texts.pop("labels"))
    return {name: pad_sequence(rows, batch_first=True) for name, rows in texts.items()} | {"labels": labels}


def lightning(rows, folder, released=None):
    import lightning as pl

    from anyorder.training.trainers.lightning import PrivacyCallback

    class Module(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = mlp()

        def training_step(self, batch, index):
            losses = F.cross_entropy(self.net(batch[0]), batch[1], reduction="none")
            if released is not None:
                privacy.engine.measure(loss=losses)
            return losses.mean()

        def configure_optimizers(self):
            optimizer = torch.optim.SGD(self.parameters(), lr=0.5)
            if released is None:
                return optimizer
            plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "loss"}}

    module, loader = Module(), DataLoader(rows, batch_size=B, shuffle=True)
    privacy = PrivacyCallback(planned(), network="net", released=released)
    module, loader = privacy.make_private(module, loader)
    trainer = pl.Trainer(
        max_epochs=EPOCHS, callbacks=[privacy], logger=False, enable_progress_bar=False,
        enable_model_summary=False, accelerator="cpu", default_root_dir=folder, enable_checkpointing=False,
    )  # fmt: skip
    trainer.fit(module, loader)
    return [module, {name: float(value) for name, value in trainer.callback_metrics.items()}]


def lightning_measured(rows, folder):
    return lightning(rows, folder, RELEASED)


SECRET_OF_TRAINER = ("*_privacy.checkpoint*",)
FIXED = [(ids[:3], y) for ids, y in TEXTS]
TRAINERS = {
    "Hugging Face": Isolated(hugging_face, FIXED,
        {"rows": (UNIT,), "secret": SECRET_OF_TRAINER, "kinds": ("other values", "another label")}),
    "Hugging Face, a released loss": Isolated(hugging_face_measured, TEXTS, {"rows": (UNIT,),
        "secret": SECRET_OF_TRAINER, "kinds": ("other values", "another label", "label beyond the others")}),
    "Hugging Face, texts that do not fit": Isolated(hugging_face_odd_texts, TEXTS, {"rows": (UNIT,),
        "secret": SECRET_OF_TRAINER, "others": [Neighbour(f"odd {i}", [odd if j == UNIT else row for j, row in
            enumerate(TEXTS)]) for i, odd in enumerate(ODD[:2])]}),
    "Lightning": Isolated(lightning, ROWS, FEW),
    "Lightning, a released loss": Isolated(lightning_measured, ROWS, FEW),
}  # fmt: skip

# -- the command line --------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def module_of(name, **functions):
    """Within it a module of functions can be imported by name, as one in the current folder."""
    module = sys.modules[name] = types.ModuleType(name)
    vars(module).update(functions)
    try:
        yield
    finally:
        del sys.modules[name]


# Of model.pt what is in it counts: in its bytes is the name that it was written under, which is random.
SECRET = (
    "*model.pt",
    "*/secret/*",
    "secret/*",
    "*.journal",
    "*evidence*",
    "*.lock",
    "*.csv",
)


def command(*arguments):
    """The command line, whose exit code counts."""
    from typer.testing import CliRunner

    from anyorder.app.cli import app

    done = CliRunner().invoke(app, [str(argument) for argument in arguments])
    return {"code": done.exit_code, "stdout": done.stdout, "stderr": done.stderr}


@contextlib.contextmanager
def coarse_pictures():
    """Within it pictures have a fifth of their dots; what differs in one differs still."""
    from anyorder.app import charts

    def saved(figure, path):
        figure.savefig(path, dpi=30, format="png")

    with patched(charts, "save_figure", saved):
        yield


def train_command(rows, folder):
    x, y = (torch.stack(part) for part in zip(*rows, strict=True))
    test = TensorDataset(*(torch.stack(part) for part in zip(*ROWS, strict=True)))
    data = TensorDataset(x, y)
    with module_of("isolated_data", load=lambda: (data, test)), stopped(), coarse_pictures():
        shown = command(
            "train", "--dataset", "isolated_data:load", "--classes", CLASSES, "--model", "linear", "--epsilon", 8,
            "--mechanism", "tree", "--batch-size", B, "--epochs", EPOCHS, "--delta", 1e-3, "--output", folder / "run",
        )  # fmt: skip
    return shown, torch.load(folder / "run" / "model.pt")


BOUNDS = {"features": {"age": [0, 100], "job": ["clerk", "nurse"]}, "target": ["no", "yes"]}
LINES = [f"{(7 * i) % 101},{('clerk', 'nurse')[i % 2]},{('no', 'yes')[i % 3 % 2]}" for i in range(N)]
STRANGE = [
    "nan,clerk,no",
    "",
    "40,clerk,perhaps",
    '4,"a,b',
    "40,clerk",
    "9" * 5000 + ",clerk,no",
]


def fit_command(lines, folder):
    (folder / "rows.csv").write_text("\n".join(["age,job,income", *lines]) + "\n")
    (folder / "bounds.json").write_text(json.dumps(BOUNDS))
    rows, bounds = folder / "rows.csv", folder / "bounds.json"
    with stopped():
        return command(
            "fit", "--csv", rows, "--target", "income", "--bounds", bounds, "--batch-size", B, "--epochs", EPOCHS,
            "--epsilon", 8, "--mechanism", "tree", "--output", folder / "run",
        )  # fmt: skip


APP = {
    "anyorder train": Isolated(train_command, ROWS,
        {"rows": (UNIT,), "secret": SECRET, "kinds": ("NaN", "huge values", "label beyond the others")}),
    "anyorder fit": Isolated(fit_command, LINES, {"rows": (UNIT,), "secret": SECRET, "others": [
        Neighbour(line, [line if i == UNIT else other for i, other in enumerate(LINES)]) for line in STRANGE]}),
}  # fmt: skip

# -- federations -------------------------------------------------------------------------------------------------------

ROUNDS = [["a", "b", "c"], ["d", "e", "f"], ["a", "b", "c"], ["d", "e", "f"]]
PEOPLE = sorted({user for users in ROUNDS for user in users})
CHANGES = [torch.randn(WIDTH, generator=RNG) for _ in PEOPLE]


def federated(rows, folder):
    from anyorder.federated import Server

    plan = planned(dataset_size=6, batch_size=3, epochs=None, unit="user", order=MinSeparation(4, b=2, k=2))
    net = nn.Linear(WIDTH, 1, bias=False)
    server = Server(plan, net, torch.optim.SGD(net.parameters(), lr=0.5))
    for users in ROUNDS:
        server.round({user: {"weight": rows[PEOPLE.index(user)][None]} for user in users})
    return net


EXAMPLES = [(torch.randn(2, 3, generator=RNG), torch.randn(2, generator=RNG)) for _ in PEOPLE]
X, Y = EXAMPLES[1]
ON_A_DEVICE = {
    "other values": (1 - 3 * X, Y), "huge values": (1e30 * X, Y), "NaN": (X / 0 * 0, Y),
    "more examples": (X.repeat(9, 1), Y.repeat(9)), "no examples": (X[:0], Y[:0]), "other columns": (X[:, :2], Y),
    "training fails": (X, Y.repeat(4)[:5]),
}  # fmt: skip


def flower(masked=False):
    def train(rows, folder):
        from flower.isolated_clients import federation

        places = {"secure": True, "on_device": ("clipping",)} if masked else {}
        plan = planned(
            dataset_size=6, batch_size=3, epochs=None, unit="user", order=MinSeparation(4, b=2, k=2),
            mechanism=ao.mechanism("independent", **places),
        )  # fmt: skip
        return federation(plan, PEOPLE)(rows, folder)

    return train


def nvflare(rows, folder):
    from nvflare_jobs.isolated_clients import federation

    plan = planned(dataset_size=6, batch_size=3, epochs=None, unit="owner", order=MinSeparation(4, b=2, k=2))
    return federation(plan, PEOPLE)(rows, folder)


def on_devices(*names):
    return {"rows": (1,), "unit": "b", "others": [
        Neighbour(name, [ON_A_DEVICE[name] if i == 1 else other for i, other in enumerate(EXAMPLES)])
        for name in names]}  # fmt: skip


FEDERATED = {
    "server": Isolated(federated, CHANGES, {"rows": (1,), "unit": "b"}),
    "Flower client": Isolated(flower(), EXAMPLES, on_devices(*ON_A_DEVICE)),
    "Flower client, sums under masks": Isolated(
        flower(masked=True), EXAMPLES, on_devices("NaN", "more examples", "no examples", "training fails")
    ),
    "NVFlare client": Isolated(nvflare, EXAMPLES, on_devices(*ON_A_DEVICE)),
}

# -- linear models -----------------------------------------------------------------------------------------------------


def learner(rows, folder):
    made = Learner(planned(), (WIDTH, 1), loss=Logistic(), regularization=2.0)
    for _ in range(EPOCHS):
        for start in range(0, N, B):
            batch = rows[start : start + B]
            made.step(range(start, start + B), np.stack([x for x, _ in batch]), np.array([y for _, y in batch]))
    return made.theta


def least_squares(rows, folder):
    made = LeastSquares(planned(), WIDTH, bounds=2.0, target_bounds=(-1.0, 3.0))
    for _ in range(EPOCHS):
        for start in range(0, N, B):
            batch = rows[start : start + B]
            made.step(range(start, start + B), np.stack([x for x, _ in batch]), np.array([y for _, y in batch]))
    return list(made.sums)


def estimator(kind, **options):
    def train(rows, folder):
        X, y = np.stack([x for x, _ in rows]), np.array([y for _, y in rows])
        made = kind(epsilon=8.0, delta=1e-3, bounds=3.0, batch_size=B, epochs=EPOCHS, **options).fit(X, y)
        return [made.coef_, made.intercept_, made.n_iter_, made.certificate_]

    return train


ARRAYS = [(x.numpy(), int(y)) for x, y in ROWS]
ONLINE_KINDS = ("another unit's row", *VALUES, *EVERYTHING)
ONLINE = {
    "learner": Isolated(learner, [(x, y % 2 * 2 - 1) for x, y in ARRAYS]),
    "least squares": Isolated(least_squares, ARRAYS),
    "logistic regression": Isolated(estimator(LogisticRegression, classes=[0, 1, 2][:2]),
        [(x, y % 2) for x, y in ARRAYS], {"rows": (UNIT,), "kinds": ONLINE_KINDS}),
    "linear regression": Isolated(estimator(LinearRegression, target_bounds=(-1.0, 3.0)), ARRAYS,
        {"rows": (UNIT,), "kinds": ONLINE_KINDS}),
}  # fmt: skip

# -- sums of one's own -------------------------------------------------------------------------------------------------


def release(grid=None):
    plan = planned(mechanism=ao.mechanism("tree", secure=True)) if grid else planned()

    def train(rows, folder):
        made, found = ao.Release(plan, WIDTH, checkpoint=folder / "secret"), []
        for step in range(plan.n):
            units = [(step * B + i) % N for i in range(B)]
            vectors = np.stack([rows[i][0] for i in units])
            options = {"grid": plan.grid} if grid else {}
            found.append(made.step(units, ao.bounded_sum(vectors, units, plan.clip_norm, **options)))
        made.save()
        made.certificate().save(folder / "run.privacy.json")
        made.close()
        return found

    return train


RELEASE = {
    "release": Isolated(release(), ARRAYS, {"rows": (UNIT,), "secret": ("secret*", ".secret*")}),
    "release, exact integers": Isolated(
        release(grid=True), ARRAYS, {"rows": (UNIT,), "secret": ("secret*", ".secret*")}
    ),
}

ISOLATED = {
    "release": RELEASE, "training": TRAINING | TRAINERS, "sparse": {"lazy table": TRAINING["lazy table"]},
    "federated": FEDERATED, "online": ONLINE, "app": APP,
}  # fmt: skip
"""Room of the package -> its front ends."""
