"""A GPT-2 tuned on texts by TRL."""

from pathlib import Path

from benchmarks.corpus import _texts, _trl

REPOSITORY, COMMIT = _trl.REPOSITORY, _trl.COMMIT
SCRIPT = "trl/scripts/sft.py"
ARGS = _trl.ARGS
EDITS = _trl.ours("SFTTrainer")
OPACUS = _trl.OPACUS
MODEL = "untouched"
RESULT, WHY = "runs", ""


def stand_in(folder: Path) -> None:
    _texts.gpt2(folder / "gpt2")
    _texts.rows(folder / "pairs/train.jsonl", 64, lambda chance, i: {"text": _texts.text(chance)})
