"""A BERT that chooses one of four ends: four texts are an example."""

import random
from pathlib import Path

from benchmarks.corpus import _texts, _transformers

REPOSITORY, COMMIT = _transformers.REPOSITORY, _transformers.COMMIT
SCRIPT = "examples/pytorch/multiple-choice/run_swag_no_trainer.py"
ARGS = [
    *_transformers.ARGS,
    "--model_name_or_path",
    "bert",
]
HERE = [
    _transformers.HERE[0],
    (
        "import PaddingStrategy, check_min_version",
        "from transformers.utils import PaddingStrategy\ncheck_min_version = send_example_telemetry = lambda *_: None",
    ),
    ("from_tf=bool(", ""),
    ("tokenizer, pad_to_multiple_of=(8 if accel", "tokenizer"),
]
EDITS = _transformers.ours(pad_to="((4, 16), (4, 32))")
OPACUS = _transformers.OPACUS
MODEL = "untouched"
RESULT, WHY = "runs", ""


def stand_in(folder: Path) -> None:
    _texts.bert(folder / "bert")
    _texts.metrics(folder)

    def row(chance: random.Random, i: int) -> dict[str, object]:
        ends = {f"ending{k}": _texts.text(chance) for k in range(4)}
        return {"sent1": _texts.text(chance), "sent2": _texts.text(chance, 1, 3), "label": i % 4, **ends}

    for name, count in (("train.json", 64), ("test.json", 16)):
        _texts.rows(folder / name, count, row)
