"""A recurrent network whose first state, with the batch second, is an argument of the model."""

from benchmarks.corpus import _one_batch

REPOSITORY, COMMIT = "https://github.com/graykode/nlp-tutorial", "d05e31ec81d56d70c1db89b99ab07e948f7ebc11"
SCRIPT = "3-1.TextRNN/TextRNN.py"
ARGS: list[str] = []
HERE = [("for epoch in range(5000)", "for epoch in range(40):")]
MODEL_EDITS = [
    (
        "predict = model(hidden, input_batch)",
        "model.eval()\npredict = model(torch.zeros(len(input_batch), 1), input_batch).data.max(1, keepdim=True)[1]",
    ),
    ("X = X.transpose(0, 1)", "hidden = torch.zeros(1, len(X), n_hidden)\n..."),
    ("output = model(hidden, input_batch)", "output = model(torch.zeros(len(input_batch), 1), input_batch)"),
]
EDITS = _one_batch.ours("input_batch, target_batch", 40) + MODEL_EDITS
OPACUS = _one_batch.with_opacus("input_batch, target_batch", 40) + MODEL_EDITS
MODEL = "changed: the first state is made inside of the model, of the size of its batch"
RESULT, WHY = "runs", "an argument whose examples are in the second dimension is refused"
