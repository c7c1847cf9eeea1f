"""A convolutional classifier of sentences."""

from benchmarks.corpus import _one_batch

REPOSITORY, COMMIT = "https://github.com/graykode/nlp-tutorial", "d05e31ec81d56d70c1db89b99ab07e948f7ebc11"
SCRIPT = "2-1.TextCNN/TextCNN.py"
ARGS: list[str] = []
HERE = [("for epoch in range(5000)", "for epoch in range(40):")]
EVALUATION = [("predict = model(test_batch)", "model.eval()\n...")]
EDITS = _one_batch.ours("inputs, targets", 40) + EVALUATION
OPACUS = _one_batch.with_opacus("inputs, targets", 40)
MODEL = "untouched"
RESULT, WHY = "runs", ""
