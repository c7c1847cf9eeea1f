"""An LSTM on twenty streams of a text at once, its states carried from piece to piece."""

import random
from pathlib import Path

from benchmarks.corpus import _texts

REPOSITORY, COMMIT = "https://github.com/yunjey/pytorch-tutorial", "0500d3df5a2a8080ccfccbc00aca0eacc21818db"
SCRIPT = "tutorials/02-intermediate/language_model/main.py"
ARGS: list[str] = []
HERE = [
    ("hidden_size = 1024", "hidden_size = 64"),
    ("num_epochs = 5", "num_epochs = 2"),
    ("num_samples = 1000", "num_samples = 20"),
]
BY_PIECE = [
    ("out, (h, c) = self.lstm(x, h)", "out, (h, c) = self.lstm(x) if self.training else self.lstm(x, h)"),
    ("out = out.reshape(out.size(0)*", ""),
    ("return out, (h, c)", "return out if self.training else (out[0], (h, c))"),
    ("for i in range(0, ids.size(1) - seq_length", "for i, (inputs, targets, _) in enumerate(pieces):"),
    ("inputs = ids[:, i:i+seq_length]", ""),
    ("targets = ids[:, (i+1):", ""),
    ("states = detach(states)", ""),
    ("outputs, states = model(inputs", "outputs = model(inputs, None).transpose(1, 2)"),
    ("loss = criterion(outputs", "loss = criterion(outputs, targets)"),
    ("with open('sample.txt'", "...\n    model.eval()"),
]
"""A piece of 30 words is an example: its state begins with zeros."""
PIECES = """
pieces = torch.utils.data.TensorDataset(*(
    ids[:, k : num_batches * seq_length + k].reshape(-1, seq_length) for k in (0, 1)), torch.arange(20 * num_batches))
"""
EDITS = [
    *BY_PIECE,
    ("import numpy as np", "...\nimport anyorder as ao"),
    (
        "# Truncated backpropagation",
        f"""{PIECES}
pieces = torch.utils.data.DataLoader(pieces, batch_size=batch_size, shuffle=True)
plan = ao.plan(loader=pieces, epochs=num_epochs, epsilon=8, delta=1e-5, optimizer=optimizer)
model, optimizer, pieces = ao.PrivacyEngine(plan).make_private(model, optimizer, pieces)
""",
    ),
    ("output, state = model(input, state)", "output, state = model.module(input, state)"),
]
OPACUS = [
    *BY_PIECE,
    ("import numpy as np", "...\nimport opacus.validators"),
    ("criterion = nn.CrossEntropyLoss()", "...\nmodel = opacus.validators.ModuleValidator.fix(model)"),
    (
        "# Truncated backpropagation",
        f"""{PIECES}
pieces = torch.utils.data.DataLoader(pieces, batch_size=batch_size, shuffle=True)
model, optimizer, pieces = opacus.PrivacyEngine().make_private(
    module=model, optimizer=optimizer, data_loader=pieces, noise_multiplier=1.0, max_grad_norm=1.0)
""",
    ),
]
MODEL = "changed: begins with zeros, and gives a row of words for each row"
RESULT, WHY = "runs", "A piece of 30 words is protected, not its author; the vocabulary is made of the private text."


def stand_in(folder: Path) -> None:
    chance = random.Random(0)
    (folder / "data").mkdir(exist_ok=True)
    (folder / "data/train.txt").write_text("".join(_texts.text(chance, 8, 12) + "\n" for _ in range(400)))
