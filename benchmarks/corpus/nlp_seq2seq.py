"""An encoder and a decoder; the loss adds up examples in a loop over the batch."""

from benchmarks.corpus import _one_batch

REPOSITORY, COMMIT = "https://github.com/graykode/nlp-tutorial", "d05e31ec81d56d70c1db89b99ab07e948f7ebc11"
SCRIPT = "4-1.Seq2Seq/Seq2Seq.py"
ARGS: list[str] = []
HERE = [("end = decoded.index(", "end = len(decoded)"), ("for epoch in range(5000)", "for epoch in range(40):")]
MODEL_EDITS = [
    ("print('test')", "model.eval()\n..."),
    ("enc_input = enc_input.transpose(0, 1)", "enc_hidden = torch.zeros(1, len(enc_input), n_hidden)\n..."),
    ("model = self.fc(outputs)", "model = self.fc(outputs).transpose(0, 1)"),
    ("hidden = torch.zeros(1, batch_size, n_hidden)", "hidden = torch.zeros(batch_size, 1)"),
    ("output = output.transpose(0, 1)", ""),
    ("predict = output.data.max(2", "predict = output.data[0].max(1, keepdim=True)[1]"),
]
EDITS = _one_batch.ours("input_batch, output_batch, target_batch", 40) + MODEL_EDITS
OPACUS = _one_batch.with_opacus("input_batch, output_batch, target_batch", 40) + MODEL_EDITS
MODEL = "changed: the first state is made inside of the model, and the batch comes first in what it returns"
RESULT, WHY = "runs", "states with the batch second are refused"
