"""A neural language model of 2003, with bare parameters beside its layers."""

from benchmarks.corpus import _one_batch

REPOSITORY, COMMIT = "https://github.com/graykode/nlp-tutorial", "d05e31ec81d56d70c1db89b99ab07e948f7ebc11"
SCRIPT = "1-1.NNLM/NNLM.py"
ARGS: list[str] = []
HERE = [("for epoch in range(5000)", "for epoch in range(40):")]
EVALUATION = [("predict = model(input_batch)", "model.eval()\n...")]
EDITS = _one_batch.ours("input_batch, target_batch", 40) + EVALUATION
OPACUS = _one_batch.with_opacus("input_batch, target_batch", 40)
MODEL = "untouched"
RESULT, WHY = "runs", ""
