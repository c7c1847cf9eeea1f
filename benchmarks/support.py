"""Which orders go with which mechanisms, amplification and front ends: each cell is tried.

python -m benchmarks.support            # prints the tables
python -m benchmarks.support --write    # into docs/models.md
"""

import argparse
import contextlib
import io
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import anyorder as ao
from anyorder.accounting.amplification.claims import Amplified
from anyorder.accounting.amplification.methods import Deterministic, MonteCarlo, Pld
from anyorder.accounting.curves import Gaussian, Sampled
from anyorder.errors import PlanError

PAGE = Path(__file__).parents[1] / "docs" / "models.md"
BEGIN, END = "<!-- tables: python -m benchmarks.support --write -->", "<!-- end of tables -->"
ORDERS = (
    "one pass", "fixed", "shuffled", "min separation", "known", "poisson", "cyclic-poisson", "truncated-poisson",
    "balls-in-bins", "random-allocation", "min-separation-sampling",
)  # fmt: skip
"""Words of `ao.plan`; a rule of its own where it has no word for it."""
RULES = {
    "one pass": ao.participation.SingleEpoch(16),
    "min separation": ao.participation.MinSeparation(16, 8, 2),
    "known": ao.participation.KnownOrder([list(range(8 * t, 8 * t + 8)) for _ in range(2) for t in range(8)]),
}
MECHANISMS = (
    "independent", "tree", "blt, 1 buffer", "restarted blt, 1 buffer", "banded toeplitz, 4 bands", "banded, 4 bands",
    "banded inverse, 4 bands", "banded low rank, 4 bands, 2 rank", "dense",
)  # fmt: skip
EXAMPLES, BATCH, EPOCHS = 64, 8, 2


def plan(order: str, **given: Any) -> ao.Plan:
    """Two passes of eight steps in this order."""
    given = {"noise_multiplier": 1.0, "delta": 1e-5, "mechanism": "independent", "batch_size": BATCH, **given}
    if order in RULES:
        return ao.plan(order=RULES[order], **given)
    cyclic = order in ("cyclic-poisson", "truncated-poisson", "min-separation-sampling")
    asked = ao.order(order, cycle=4 if cyclic else None)
    return ao.plan(order=asked, dataset_size=EXAMPLES, epochs=EPOCHS, **given)


def claim(found: ao.Plan) -> str:
    """How the claim of a plan is found, in a word."""
    match found.curve, found.method:
        case Gaussian(), None:
            return "exact"
        case Sampled(), None:
            return "pld"
        case Amplified(), Pld():
            return "pld"
        case Amplified(), Deterministic():
            same = type(found.participation) is ao.participation.MinSeparationSampling
            return "known" if same else "bound"
        case Amplified(), MonteCarlo():
            return "samples"
        case curve, method:
            raise AssertionError(f"no word for {curve!r}, {method!r}")


def tried(attempt: Callable[[], str], refusals: list[str], cell: str) -> str:
    """What came of it; "-" where it is refused, for a reason that is kept."""
    try:
        return attempt()
    except PlanError as refusal:
        refusals.append(f"{cell}: {refusal}")
        return "-"


# -- front ends: each takes a plan, does all its steps or some, and is refused or not -------------------------------


def _loader(order: str, batch: int) -> Any:
    size = 2 * EXAMPLES if order == "one pass" else EXAMPLES
    data: Any = TensorDataset(torch.randn(size, 3), torch.arange(size) % 2, torch.arange(size))
    return DataLoader(data, batch_size=batch, shuffle=order == "shuffled")


def _steps(order: str, found: ao.Plan, count: int = 3, *, accumulate: int = 1, **options: Any) -> str:
    model: Any = nn.Linear(3, 2)
    engine = ao.PrivacyEngine(found)
    parts = torch.optim.SGD(model.parameters(), lr=0.1), _loader(order, BATCH // accumulate)
    model, optimizer, loader = engine.make_private(model, *parts, accumulate=accumulate, **options)
    taken = 0
    for i, (x, y, _) in enumerate(loader):
        nn.functional.cross_entropy(model(x), y).backward()
        if (i + 1) % accumulate == 0:
            optimizer.step()
            optimizer.zero_grad()
            taken += 1
        if taken == count:
            break
    return "yes"


def _loop(order: str) -> str:
    return _steps(order, plan(order))


def _accumulated(order: str) -> str:
    found = plan(order)
    filled = {"micro_batch": BATCH} if found.participation.secret else {}
    return _steps(order, found, accumulate=2, **filled)


def _by_unit(order: str) -> str:
    return _steps(order, plan(order, unit="user"), unit=2)


def _release(order: str) -> str:
    release = ao.Release(plan(order), 3)
    for t in range(3):
        units = release.sample(EXAMPLES) if release.plan.participation.secret else np.arange(8 * t, 8 * t + 8)
        release.step(units, ao.bounded_sum(np.ones((len(units), 3)), units, 1.0))
    return "yes"


def _server(order: str) -> str:
    model = nn.Linear(3, 1)
    ao.federated.Server(plan(order, unit="user"), model, torch.optim.SGD(model.parameters(), lr=1.0))
    return "yes"


def _learner(order: str) -> str:
    learner = ao.online.Learner(plan(order), (3, 1), loss="hinge", regularization=1.0)
    units = learner.release.sample(EXAMPLES) if learner.plan.participation.secret else np.arange(BATCH)
    learner.step(units, np.ones((len(units), 3)), np.ones(len(units)))
    return "yes"


def _hugging_face(order: str) -> str:
    from transformers import BertConfig, BertForSequenceClassification, TrainingArguments  # slow to load

    from anyorder.training.trainers.huggingface import PrivateTrainer

    config = BertConfig(
        vocab_size=9, hidden_size=4, num_hidden_layers=1, num_attention_heads=1, intermediate_size=4,
        max_position_embeddings=3,
    )  # fmt: skip
    examples = len(_loader(order, BATCH).dataset)
    data: Any = [{"input_ids": torch.arange(3), "labels": i % 2} for i in range(examples)]
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder, per_device_train_batch_size=BATCH, use_cpu=True, report_to=[], save_strategy="no", max_steps=3,
            disable_tqdm=True, train_sampling_strategy="random" if order == "shuffled" else "sequential",
        )  # fmt: skip
        model = BertForSequenceClassification(config)
        trainer = PrivateTrainer(model, arguments, train_dataset=data, plan=plan(order))
        with contextlib.redirect_stdout(io.StringIO()):
            trainer.train()
    return "yes"


def _lightning(order: str) -> str:
    import lightning  # slow to load

    from anyorder.training.trainers.lightning import PrivacyCallback

    class Classifier(lightning.LightningModule):
        """A linear one."""

        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(3, 2)

        def training_step(self, batch: Any, index: int) -> Any:
            return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    privacy = PrivacyCallback(plan(order), network="net")
    module, loader = privacy.make_private(Classifier(), _loader(order, BATCH))
    trainer = lightning.Trainer(
        max_steps=3, callbacks=[privacy], accelerator="cpu", logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(module, loader)
    return "yes"


FRONT_ENDS = {
    "a loop of your own": _loop,
    "micro-batches": _accumulated,
    "units by key": _by_unit,
    "Hugging Face": _hugging_face,
    "Lightning": _lightning,
    "`ao.Release`": _release,
    "a server": _server,
    "`ao.online.Learner`": _learner,
}
FEATURES: dict[str, dict[str, Any]] = {
    "zero-out": {"neighbours": "zero-out"},
    "add-or-remove": {"neighbours": "add-or-remove"},
    "replace-one": {"neighbours": "replace-one"},
    "exact integers": {"mechanism": ao.mechanism("independent", secure=True)},
}


def _feature(order: str, given: dict[str, Any]) -> str:
    """Whether the plan has what was asked for; "covered" where its claim is of other neighbours by the same number."""
    found = plan(order, **given)
    if found.neighbours != given.get("neighbours", found.neighbours):
        return "covered"
    assert "mechanism" not in given or found.grid is not None
    return "yes"


def tables() -> Iterator[tuple[str, dict[str, Callable[[str], str]]]]:
    """(name, column -> what fills it for an order) of each."""
    mechanisms = {one: partial(lambda order, one: claim(plan(order, mechanism=one)), one=one) for one in MECHANISMS}
    features = {one: partial(_feature, given=given) for one, given in FEATURES.items()}
    yield "Mechanisms", mechanisms
    yield "Neighbours and arithmetic", features
    yield "Front ends", dict(FRONT_ENDS)


def text(refusals: list[str]) -> str:
    """The tables in Markdown, one row for orders of the same cells; the reasons of refusals are added to the list."""
    parts = []
    for name, columns in tables():
        lines = [f"### {name}", "", f"| order | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
        rows: dict[tuple[str, ...], list[str]] = {}
        for order in ORDERS:
            cells = (tried(partial(fill, order), refusals, f"{order} x {column}") for column, fill in columns.items())
            rows.setdefault(tuple(cells), []).append(order)
        lines += [f"| {' | '.join([', '.join(orders), *cells])} |" for cells, orders in rows.items()]
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--why", action="store_true", help="print the reason of each refusal")
    parser.add_argument("--write", action="store_true", help="into docs/models.md")
    asked, refusals = parser.parse_args(), list[str]()
    found = text(refusals)
    if asked.write:
        before, rest = PAGE.read_text().split(BEGIN)
        PAGE.write_text(f"{before}{BEGIN}\n\n{found}\n\n{END}{rest.split(END)[1]}")
    print("\n".join([found, *(["", *refusals] if asked.why else [])]))


if __name__ == "__main__":
    main()
