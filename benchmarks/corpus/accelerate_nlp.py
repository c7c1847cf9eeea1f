"""A BERT that tells paraphrases, with accelerate; the collator pads to the longest text of a batch."""

from pathlib import Path

from benchmarks.corpus import _texts

REPOSITORY, COMMIT = "https://github.com/huggingface/accelerate", "16cb6eb80dd9aa8b4df1a63ef57863e455d53b83"
SCRIPT = "examples/nlp_example.py"
ARGS = ["--cpu"]
HERE = [
    ('config = {"lr": 2e-5, "num_epochs": 3', 'config = {"lr": 2e-5, "num_epochs": 2, "seed": 42, "batch_size": 16}')
]
EDITS = [
    ("import evaluate", "...\nimport anyorder as ao"),
    (
        "# Instantiate scheduler",
        """
        plan = ao.plan(loader=train_dataloader, epochs=num_epochs, epsilon=8, delta=1e-5, optimizer=optimizer)
        model, optimizer, train_dataloader = ao.PrivacyEngine(plan).make_private(
            model, optimizer, train_dataloader, pad_to=(16, 32))
        """,
    ),
    ("loss = outputs.loss", "loss = outputs.loss.mean()"),
]
OPACUS = [
    ("import evaluate", "...\nimport opacus"),
    (
        "# Instantiate scheduler",
        """
        model.train()
        model, optimizer, train_dataloader = opacus.PrivacyEngine().make_private(
            module=model, optimizer=optimizer, data_loader=train_dataloader, noise_multiplier=1.0, max_grad_norm=1.0)
        """,
    ),
]
MODEL = "untouched"
RESULT, WHY = "runs", ""


def stand_in(folder: Path) -> None:
    _texts.bert(folder / "bert-base-cased")
    _texts.metrics(folder)
    _texts.mrpc(folder / "nyu-mll/glue")
