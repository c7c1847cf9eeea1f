"""A reward model of pairs of answers, by TRL."""

from pathlib import Path

from benchmarks.corpus import _texts, _trl

REPOSITORY, COMMIT = _trl.REPOSITORY, _trl.COMMIT
SCRIPT = "trl/scripts/reward.py"
ARGS = _trl.ARGS
EDITS = _trl.ours("RewardTrainer")
OPACUS = _trl.OPACUS
MODEL = "untouched"
RESULT, WHY = "runs", ""


def stand_in(folder: Path) -> None:
    _texts.gpt2(folder / "gpt2")
    _texts.rows(folder / "pairs/train.jsonl", 64, _texts.preferences)
