"""An autoencoder of digits with Lightning's command line and callbacks."""

from pathlib import Path

from benchmarks.corpus import _made_up

REPOSITORY, COMMIT = "https://github.com/Lightning-AI/pytorch-lightning", "7f0c3436cd3f6ad3753125672024fc415cbcb414"
SCRIPT = "examples/pytorch/basics/autoencoder.py"
ARGS = ["--trainer.max_epochs", "2", "--trainer.accelerator", "cpu", "--trainer.logger", "false"]
NEEDS = (
    "torchvision==0.28.0",
    "jsonargparse==4.53.0",
    "docstring-parser==0.18.0",
    "typeshed-client==2.15.0",
    "importlib-resources==7.1.0",
)
HERE = [
    ("dataset, [55000, 5000]", "dataset, [480, 32], generator=torch.Generator().manual_seed(42)"),
]
EDITS = [
    (
        "import torch.nn.functional as F",
        "...\nimport anyorder as ao\n" + "from anyorder.training.trainers.lightning import PrivacyCallback",
    ),
    (
        "nn.Linear(28 * 28, hidden_dim)",
        "self.net = nn.Sequential(\n    nn.Linear(28 * 28, hidden_dim), nn.ReLU(), nn.Linear(hidden_dim, 3),",
    ),
    ("nn.Linear(3, hidden_dim)", "    nn.Linear(3, hidden_dim), nn.ReLU(), nn.Linear(hidden_dim, 28 * 28))"),
    ("z = self.encoder(x)", ""),
    ("return self.decoder(z)", "return self.net(x)"),
    (
        "cli.trainer.fit(cli.model",
        """
        train = cli.datamodule.train_dataloader()
        plan = ao.plan(
            loader=train, epochs=cli.trainer.max_epochs, epsilon=8, delta=1e-5,
            optimizer=cli.model.configure_optimizers())
        privacy = PrivacyCallback(plan, network="net")
        model, loader = privacy.make_private(cli.model, train)
        cli.datamodule.train_dataloader = lambda: loader
        cli.trainer.callbacks.append(privacy)
        cli.trainer.fit(model, datamodule=cli.datamodule)
        """,
    ),
]
OPACUS = "Lightning makes the optimizer itself, and Opacus has no callback for it."
MODEL = "changed: both halves in one module"
RESULT, WHY = "runs", ""


def stand_in(folder: Path) -> None:
    _made_up.mnist(folder / "../../Datasets")
    _made_up.mnist(folder / "data")
