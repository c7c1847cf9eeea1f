"""A small Marian model that translates."""

from pathlib import Path

from benchmarks.corpus import _texts, _transformers

REPOSITORY, COMMIT = _transformers.REPOSITORY, _transformers.COMMIT
SCRIPT = "examples/pytorch/translation/run_translation_no_trainer.py"
ARGS = [
    *_transformers.ARGS,
    "--model_name_or_path",
    "marian",
    "--source_lang",
    "en",
    "--target_lang",
    "de",
    "--max_length",
    "16",
    "--val_max_target_length",
    "16",
    "--num_beams",
    "1",
    "--pad_to_max_length",
    "true",
    "--max_source_length",
    "24",
    "--max_target_length",
    "16",
]
HERE = [
    *_transformers.HERE,
    ("from_tf=bool(", ""),
    ("pad_to_multiple_of=8 if accelerator.use_fp16", ""),
]
EDITS = _transformers.ours()
OPACUS = _transformers.OPACUS
MODEL = "untouched"
RESULT, WHY = "runs", ""


def stand_in(folder: Path) -> None:
    _texts.marian(folder / "marian")
    _texts.metrics(folder)
    for name, count in (("train.json", 64), ("test.json", 16)):
        _texts.rows(
            folder / name,
            count,
            lambda chance, i: {"translation": {"en": _texts.text(chance), "de": _texts.text(chance)}},
        )
