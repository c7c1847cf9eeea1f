"""An autoencoder of digits with Lightning's command line and callbacks."""

from benchmarks.corpus import _lightning

REPOSITORY, COMMIT, ARGS = _lightning.REPOSITORY, _lightning.COMMIT, _lightning.ARGS
NEEDS, HERE, OPACUS = _lightning.NEEDS, _lightning.HERE, _lightning.OPACUS
SCRIPT = "examples/pytorch/basics/autoencoder.py"
EDITS = [
    ("import torch.nn.functional as F", _lightning.IMPORTS),
    (
        "nn.Linear(28 * 28, hidden_dim)",
        "self.net = nn.Sequential(\n    nn.Linear(28 * 28, hidden_dim), nn.ReLU(), nn.Linear(hidden_dim, 3),",
    ),
    ("nn.Linear(3, hidden_dim)", "    nn.Linear(3, hidden_dim), nn.ReLU(), nn.Linear(hidden_dim, 28 * 28))"),
    ("z = self.encoder(x)", ""),
    ("return self.decoder(z)", "return self.net(x)"),
    _lightning.ours("net"),
]
MODEL = "changed: both halves in one module"
RESULT, WHY = "runs", ""
stand_in = _lightning.stand_in
