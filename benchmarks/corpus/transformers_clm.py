"""A GPT-2 on texts that are joined and cut into blocks: a block is an example."""

from pathlib import Path

from benchmarks.corpus import _texts, _transformers

REPOSITORY, COMMIT = _transformers.REPOSITORY, _transformers.COMMIT
SCRIPT = "examples/pytorch/language-modeling/run_clm_no_trainer.py"
ARGS = [
    *_transformers.ARGS,
    "--model_name_or_path",
    "gpt2",
    "--block_size",
    "32",
]
HERE = [
    *_transformers.HERE,
    _transformers.TPU,
    ("from_tf=bool(", ""),
    ("low_cpu_mem_usage=args.low_cpu_mem_usage", ""),
]
EDITS = _transformers.ours()
OPACUS = _transformers.OPACUS
MODEL = "untouched"
RESULT, WHY = "runs", "A block holds several texts: the claim is for a block, not for a text."


def stand_in(folder: Path) -> None:
    _texts.gpt2(folder / "gpt2")
    for name, count in (("train.json", 400), ("test.json", 80)):
        _texts.rows(folder / name, count, lambda chance, i: {"text": _texts.text(chance)})
