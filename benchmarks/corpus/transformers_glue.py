"""A BERT that tells classes of texts, in the loop of transformers without its Trainer."""

from pathlib import Path

from benchmarks.corpus import _texts, _transformers

REPOSITORY, COMMIT = _transformers.REPOSITORY, _transformers.COMMIT
SCRIPT = "examples/pytorch/text-classification/run_glue_no_trainer.py"
ARGS = [
    "--train_file", "train.json", "--validation_file", "test.json", "--model_name_or_path", "bert",
    "--num_train_epochs", "2", "--per_device_train_batch_size", "16", "--output_dir", "kept", "--seed", "0",
]  # fmt: skip
HERE = [
    *_transformers.HERE,
    ("from_tf=bool(", ""),
    ("data_collator = DataCollatorWithPadding(", "data_collator = DataCollatorWithPadding(tokenizer)"),
]
EDITS = _transformers.ours(pad_to="(16, 32)")
OPACUS = _transformers.OPACUS
MODEL = "untouched"
RESULT, WHY = "runs", ""


def stand_in(folder: Path) -> None:
    _texts.bert(folder / "bert")
    _texts.metrics(folder)
    for name, count in (("train.json", 64), ("test.json", 16)):
        _texts.rows(folder / name, count, lambda chance, i: {"sentence1": _texts.text(chance), "label": i % 2})
