"""A BERT that makes new layers in each call of forward."""

from benchmarks.corpus import _one_batch

REPOSITORY, COMMIT = "https://github.com/graykode/nlp-tutorial", "d05e31ec81d56d70c1db89b99ab07e948f7ebc11"
SCRIPT = "5-2.BERT/BERT.py"
ARGS: list[str] = []
HERE = [
    ("for epoch in range(100)", "for epoch in range(10):"),
    ("d_model = 768", "d_model = 64"),
    ("d_ff = 768", "d_ff = 128"),
    ("n_layers = 6", "n_layers = 2"),
]
EVALUATION = [("# Predict mask tokens", "model.eval()\n...")]
EDITS = _one_batch.ours("input_ids, segment_ids, masked_tokens, masked_pos, isNext", 10) + EVALUATION
OPACUS = _one_batch.with_opacus("input_ids, segment_ids, masked_tokens, masked_pos, isNext", 10)
MODEL = "untouched"
RESULT, WHY = "runs", ""
