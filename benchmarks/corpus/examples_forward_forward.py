"""Layers that are each trained alone, by an optimizer of their own, on true and false labels written into the image."""

from pathlib import Path

from benchmarks.corpus import _made_up

REPOSITORY, COMMIT = "https://github.com/pytorch/examples", "77f55b912142e11fcfdf5b530231fb9c52f181e8"
SCRIPT = "mnist_forward_forward/main.py"
ARGS = ["--epochs", "20", "--train_size", "128", "--test_size", "64"]
NEEDS = ("torchvision==0.28.0",)
_LOADER = """
rows = torch.utils.data.TensorDataset(x_pos, x_neg)
loader = DataLoader(rows, batch_size=len(rows))
"""
_LOOP = """
...
    [(a, b)] = loader
"""
PUBLIC = ("x_[range(x.shape[0]), y] = x.max()", "x_[range(x.shape[0]), y] = 2.8215")
PASSES = [
    ("g_pos = self.forward(x_pos).pow", "g_pos = private(a).pow(2).mean(1)"),
    ("g_neg = self.forward(x_neg).pow", "g_neg = private(b).pow(2).mean(1)"),
]
EDITS = [
    ("import argparse", "import anyorder as ao\n..."),
    PUBLIC,
    (
        "for i in range(self.num_epochs)",
        _LOADER
        + """
plan = ao.plan(loader=loader, epochs=self.num_epochs, epsilon=4, delta=1e-5, optimizer=self.opt)
private, self.opt, loader = ao.PrivacyEngine(plan).make_private(self, self.opt, loader)
"""
        + _LOOP,
    ),
    *PASSES,
]
OPACUS = [
    ("import argparse", "import opacus\n..."),
    PUBLIC,
    (
        "for i in range(self.num_epochs)",
        _LOADER
        + """
private, self.opt, loader = opacus.PrivacyEngine(accountant="rdp").make_private(
    module=self, optimizer=self.opt, data_loader=loader, noise_multiplier=1.0, max_grad_norm=1.0)
"""
        + _LOOP,
    ),
    *PASSES,
]
MODEL = "untouched"
RESULT = "runs"
WHY = "one plan for each layer, and they compose; the largest pixel of all images is a public number"


def stand_in(folder: Path) -> None:
    _made_up.mnist(folder / "data", train=128)
