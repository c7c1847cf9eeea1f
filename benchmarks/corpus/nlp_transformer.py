"""The transformer of 2017, on one sentence."""

from benchmarks.corpus import _one_batch

REPOSITORY, COMMIT = "https://github.com/graykode/nlp-tutorial", "d05e31ec81d56d70c1db89b99ab07e948f7ebc11"
SCRIPT = "5-1.Transformer/Transformer.py"
ARGS: list[str] = []
HERE = [
    ("for epoch in range(20)", "for epoch in range(10):"),
    ("d_model = 512", "d_model = 64"),
    ("d_ff = 2048", "d_ff = 128"),
    ("n_layers = 6", "n_layers = 2"),
]
MODEL_EDITS = [
    ("predict, _, _, _ = model(", "model.eval()\n..."),
    ("return dec_logits.view(-1", "return dec_logits, enc_self_attns, dec_self_attns, dec_enc_attns"),
    ("loss = criterion(outputs,", "loss = criterion(outputs.flatten(0, 1), target_batch.contiguous().view(-1))"),
    ("predict = predict.data.max(1", "predict = predict[0].data.max(1, keepdim=True)[1]"),
]
EDITS = _one_batch.ours("enc_inputs, dec_inputs, target_batch", 10) + MODEL_EDITS
OPACUS = _one_batch.with_opacus("enc_inputs, dec_inputs, target_batch", 10) + MODEL_EDITS
MODEL = "changed: words of different examples are not joined into one dimension"
RESULT, WHY = "runs", "the outputs have one row for a word, not for an example"
