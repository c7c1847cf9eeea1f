"""An LSTM language model: batches of (time, batch), the state of one batch carried into the next, no loader."""

from pathlib import Path

from benchmarks.corpus import _made_up

REPOSITORY, COMMIT = "https://github.com/pytorch/examples", "77f55b912142e11fcfdf5b530231fb9c52f181e8"
SCRIPT = "word_language_model/main.py"
ARGS = ["--epochs", "2", "--data", "text", "--emsize", "32", "--nhid", "32", "--bptt", "20", "--batch_size", "8",
        "--use-optimizer", "--lr", "0.001"]  # fmt: skip
NET = "word_language_model/model.py"
PIECES = """
pieces = [get_batch(train_data, i) for i in range(0, len(train_data) - args.bptt, args.bptt)]
pieces = torch.utils.data.TensorDataset(*(torch.cat([piece[i] for piece in pieces]) for i in (0, 1)))
loader = torch.utils.data.DataLoader(pieces, batch_size=args.batch_size)
"""
OURS = """
plan = ao.plan(loader=loader, epochs=args.epochs, epsilon=8, delta=1e-5, optimizer=optimizer)
engine = ao.PrivacyEngine(plan)
model, optimizer, loader = engine.make_private(model, optimizer, loader)
...
"""
ROWS = [
    ("return data, target", "return data.t(), target.view_as(data).t()"),
    ("data, targets = get_batch(train_data, i)", ""),
    ("loss = criterion(output, targets)", "loss = criterion(output.flatten(0, -2), targets.flatten())"),
    ("criterion(output, targets).item()", "total_loss += criterion(output.flatten(0, -2), targets.flatten()).item()"),
]
CARRIED = [
    (
        "for batch, i in enumerate(range(0, train_data",
        "for batch, (data, targets) in enumerate(loader):\n    hidden = model.init_hidden(len(data))",
    ),
    (NET, "emb = self.drop(self.encoder(input))", "emb = self.drop(self.encoder(input.t()))"),
    (
        NET,
        "output, hidden = self.rnn(emb, hidden)",
        """
        output, hidden = self.rnn(emb, tuple(state.transpose(0, 1).contiguous() for state in hidden))
        hidden = tuple(state.transpose(0, 1) for state in hidden)
        """,
    ),
    (NET, "decoded = decoded.view(-1", "decoded = decoded.transpose(0, 1)"),
    (NET, "F.log_softmax(decoded, dim=1)", "return F.log_softmax(decoded, dim=2), hidden"),
    (NET, "return (weight.new_zeros(self", "return (weight.new_zeros(bsz, self.nlayers, self.nhid),"),
    (NET, "        weight.new_zeros(self.nlayers, bsz, self.nhid))", "weight.new_zeros(bsz, self.nlayers, self.nhid))"),
]
EDITS = [
    ("import argparse", "import anyorder as ao\n..."),
    ("best_val_loss = None", PIECES + OURS),
    *ROWS,
    *CARRIED,
    ("torch.save(model, f)", "torch.save(engine.model.module, f)"),
]
OPACUS = [
    ("import argparse", "import opacus\n..."),
    ("model = RNNModel(args.model", "...\nmodel = opacus.validators.ModuleValidator.fix(model)"),
    (
        "best_val_loss = None",
        PIECES
        + """
model, optimizer, loader = opacus.PrivacyEngine(accountant="rdp").make_private(
    module=model, optimizer=optimizer, data_loader=loader, noise_multiplier=1.0, max_grad_norm=1.0)
model.init_hidden = model._module.init_hidden
...
""",
    ),
    *ROWS,
    *CARRIED,
    ("torch.save(model, f)", "torch.save(model._module, f)"),
]
MODEL = "changed: the batch comes first in what it is given and returns, state included"
RESULT, WHY = (
    "runs",
    "a state carried into the next batch would join texts: each piece begins at zero",
)


def stand_in(folder: Path) -> None:
    (folder / "text").mkdir()
    for part, count in (("train", 1500), ("valid", 300), ("test", 300)):
        (folder / "text" / f"{part}.txt").write_text(" ".join(_made_up.words(count, part)))
