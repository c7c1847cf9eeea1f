"""A variational autoencoder on digits; its loss is a sum over the batch."""

from pathlib import Path

from benchmarks.corpus import _made_up

REPOSITORY, COMMIT = "https://github.com/yunjey/pytorch-tutorial", "0500d3df5a2a8080ccfccbc00aca0eacc21818db"
SCRIPT = "tutorials/03-advanced/variational_autoencoder/main.py"
ARGS: list[str] = []
NEEDS = ("torchvision==0.28.0",)
HERE = [("num_epochs = 15", "num_epochs = 2")]
EDITS = [
    ("import torch.nn.functional", "...\nimport anyorder as ao"),
    (
        "optimizer = torch.optim.Adam",
        """
        ...
        plan = ao.plan(loader=data_loader, epochs=num_epochs, epsilon=8, delta=1e-5, optimizer=optimizer)
        engine = ao.PrivacyEngine(plan)
        model, optimizer, data_loader = engine.make_private(model, optimizer, data_loader, loss_reduction="sum")
        """,
    ),
    ("out = model.decode(z)", "out = model.module.decode(z).view(-1, 1, 28, 28)"),
]
OPACUS = [
    ("import torch.nn.functional", "...\nimport opacus"),
    (
        "optimizer = torch.optim.Adam",
        """
        ...
        model, optimizer, data_loader = opacus.PrivacyEngine().make_private(
            module=model, optimizer=optimizer, data_loader=data_loader, noise_multiplier=1.0, max_grad_norm=1.0,
            loss_reduction="sum")
        """,
    ),
    ("out = model.decode(z)", "out = model._module.decode(z).view(-1, 1, 28, 28)"),
]
MODEL = "untouched"
RESULT, WHY = "runs", ""


def stand_in(folder: Path) -> None:
    _made_up.mnist(folder / "../../data")
