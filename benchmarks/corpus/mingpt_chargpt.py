"""A GPT over the characters of a text, whose windows overlap by all characters but one."""

from pathlib import Path

from benchmarks.corpus import _made_up
from benchmarks.corpus.mingpt_adder import COMMIT, REPOSITORY  # noqa: F401
from benchmarks.corpus.mingpt_adder import EDITS as TRAINER
from benchmarks.corpus.mingpt_adder import OPACUS as WITH_OPACUS

SCRIPT, COPIED = "projects/chargpt/chargpt.py", "."
ARGS = ["--trainer.max_iters=8", "--trainer.num_workers=0", "--trainer.device=cpu", "--trainer.batch_size=8",
        "--data.block_size=32", "--model.model_type=gpt-nano"]  # fmt: skip
HERE = [("y = model.generate(x, 500", "y = model.generate(x, 5)[0]")]
APART = [
    ("return len(self.data) - self.config.block_size", "return (len(self.data) - 1) // self.config.block_size"),
    ("# grab a chunk of", "idx *= self.config.block_size"),
]
EDITS = [*TRAINER, *APART]
OPACUS = [*WITH_OPACUS, *APART]
MODEL = "untouched"
RESULT, WHY = "runs", "windows that do not overlap: each character was in as many items as a window is long"


def stand_in(folder: Path) -> None:
    (folder / "input.txt").write_text("O God, O God! " + " ".join(_made_up.words(1500, "text")))
