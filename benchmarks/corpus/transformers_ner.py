"""A BERT that tells a class of each word."""

import random
from pathlib import Path

from benchmarks.corpus import _texts, _transformers

REPOSITORY, COMMIT = _transformers.REPOSITORY, _transformers.COMMIT
SCRIPT = "examples/pytorch/token-classification/run_ner_no_trainer.py"
ARGS = [
    *_transformers.ARGS,
    "--model_name_or_path",
    "bert",
]
HERE = [
    *_transformers.HERE,
    ("from_tf=bool(", ""),
    ("pad_to_multiple_of=(8 if accelerator.use_fp16", "tokenizer"),
]
EDITS = _transformers.ours(pad_to="(16, 32)")
OPACUS = _transformers.OPACUS
MODEL = "untouched"
RESULT, WHY = "runs", ""


def stand_in(folder: Path) -> None:
    def row(chance: random.Random, i: int) -> dict[str, object]:
        words = _texts.text(chance).split()
        return {"tokens": words, "ner_tags": chance.choices(["O", "B-PER", "I-PER"], k=len(words))}

    _texts.bert(folder / "bert")
    _texts.metrics(folder)
    for name, count in (("train.json", 64), ("test.json", 16)):
        _texts.rows(folder / name, count, row)
