"""A GPT-2 tuned by single judgements by TRL."""

from pathlib import Path

from benchmarks.corpus import _texts, _trl

REPOSITORY, COMMIT = _trl.REPOSITORY, _trl.COMMIT
SCRIPT = "trl/scripts/kto.py"
ARGS = _trl.ARGS
EDITS = _trl.ours("KTOTrainer")
OPACUS = _trl.OPACUS
MODEL = "untouched"
RESULT = "refused"
WHY = "Right: the loss takes a mean over prompts with completions of other examples. With `apo_zero_unpaired` it runs."


def stand_in(folder: Path) -> None:
    _texts.gpt2(folder / "gpt2")
    _texts.rows(folder / "pairs/train.jsonl", 64, _texts.judgements)
