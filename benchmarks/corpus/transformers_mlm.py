"""A BERT that guesses masked words, line by line: the collator draws the masks."""

from pathlib import Path

from benchmarks.corpus import _texts, _transformers

REPOSITORY, COMMIT = _transformers.REPOSITORY, _transformers.COMMIT
SCRIPT = "examples/pytorch/language-modeling/run_mlm_no_trainer.py"
ARGS = [
    *_transformers.ARGS,
    "--model_name_or_path",
    "bert",
    "--max_seq_length",
    "32",
    "--line_by_line",
    "true",
]
HERE = [
    *_transformers.HERE,
    _transformers.TPU,
    ("from_tf=bool(", ""),
    ("low_cpu_mem_usage=args.low_cpu_mem_usage", ""),
]
EDITS = _transformers.ours(pad_to="(16, 32)")
OPACUS = _transformers.OPACUS
MODEL = "untouched"
RESULT, WHY = "runs", ""


def stand_in(folder: Path) -> None:
    _texts.bert(folder / "bert")
    for name, count in (("train.json", 64), ("test.json", 16)):
        _texts.rows(folder / name, count, lambda chance, i: {"text": _texts.text(chance)})
