"""A transformer language model on batches of (time, batch), without a loader."""

from benchmarks.corpus.examples_word_lstm import ARGS as OF_LSTM
from benchmarks.corpus.examples_word_lstm import COMMIT, NET, OURS, PIECES, REPOSITORY, ROWS, SCRIPT, stand_in

__all__ = ["COMMIT", "REPOSITORY", "SCRIPT", "stand_in"]

ARGS = [*OF_LSTM, "--model", "Transformer"]
ROWS_FIRST = [
    *ROWS,
    ("for batch, i in enumerate(range(0, train_data", "for batch, (data, targets) in enumerate(loader):"),
    (NET, "if has_mask:", "src = src.t()\n..."),
    (NET, "return F.log_softmax(output, dim=-1)", "return F.log_softmax(output, dim=-1).transpose(0, 1).contiguous()"),
]
EDITS = [
    ("import argparse", "import anyorder as ao\n..."),
    ("best_val_loss = None", PIECES + OURS),
    *ROWS_FIRST,
    ("torch.save(model, f)", "torch.save(engine.model.module, f)"),
]
OPACUS = [
    ("import argparse", "import opacus\n..."),
    ("model = TransformerModel(ntokens", "...\nmodel = opacus.validators.ModuleValidator.fix(model)"),
    (
        "best_val_loss = None",
        PIECES
        + """
model, optimizer, loader = opacus.PrivacyEngine(accountant="rdp").make_private(
    module=model, optimizer=optimizer, data_loader=loader, noise_multiplier=1.0, max_grad_norm=1.0)
...
""",
    ),
    *ROWS_FIRST,
    ("torch.save(model, f)", "torch.save(model._module, f)"),
]
MODEL = "changed: the batch comes first in what it is given and returns"
RESULT, WHY = "runs", ""
