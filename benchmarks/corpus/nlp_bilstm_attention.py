"""An LSTM in both directions with attention, whose view joins states of different examples."""

from benchmarks.corpus import _one_batch

REPOSITORY, COMMIT = "https://github.com/graykode/nlp-tutorial", "d05e31ec81d56d70c1db89b99ab07e948f7ebc11"
SCRIPT = "4-3.Bi-LSTM(Attention)/Bi-LSTM(Attention).py"
ARGS: list[str] = []
HERE = [("for epoch in range(5000)", "for epoch in range(40):")]
EVALUATION = [
    ("return context, soft_attn", "return context, soft_attn_weights"),
    ("ax.matshow(", "ax.matshow(attention.detach().numpy(), cmap='viridis')"),
    ("predict, _ = model(test_batch)", "model.eval()\n..."),
]
EDITS = _one_batch.ours("inputs, targets", 40) + EVALUATION
OPACUS = _one_batch.with_opacus("inputs, targets", 40)
MODEL = "changed: forward returns a tensor, no array of numpy"
RESULT, WHY = (
    "runs",
    "run on each example alone, in which `final_state.view` joins no states of others",
)
