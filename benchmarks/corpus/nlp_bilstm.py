"""An LSTM in both directions, over one-hot words."""

from benchmarks.corpus import _one_batch

REPOSITORY, COMMIT = "https://github.com/graykode/nlp-tutorial", "d05e31ec81d56d70c1db89b99ab07e948f7ebc11"
SCRIPT = "3-3.Bi-LSTM/Bi-LSTM.py"
ARGS: list[str] = []
HERE = [("for epoch in range(10000)", "for epoch in range(40):")]
EVALUATION = [("predict = model(input_batch)", "model.eval()\n...")]
EDITS = _one_batch.ours("input_batch, target_batch", 40) + EVALUATION
OPACUS = _one_batch.with_opacus("input_batch, target_batch", 40)
MODEL = "untouched"
RESULT, WHY = "runs", ""
