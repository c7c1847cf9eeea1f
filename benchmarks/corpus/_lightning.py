"""What Lightning's examples with its command line have in common."""

from pathlib import Path

from benchmarks.corpus import _made_up

REPOSITORY, COMMIT = "https://github.com/Lightning-AI/pytorch-lightning", "7f0c3436cd3f6ad3753125672024fc415cbcb414"
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
IMPORTS = "...\nimport anyorder as ao\nfrom anyorder.training.trainers.lightning import PrivacyCallback"
OPACUS = "Lightning makes the optimizer itself, and Opacus has no callback for it."


def ours(network: str) -> tuple[str, str]:
    """The edit of the line that fits the model."""
    return (
        "cli.trainer.fit(cli.model",
        f"""
        train = cli.datamodule.train_dataloader()
        plan = ao.plan(
            loader=train, epochs=cli.trainer.max_epochs, epsilon=8, delta=1e-5,
            optimizer=cli.model.configure_optimizers())
        privacy = PrivacyCallback(plan, network="{network}")
        model, loader = privacy.make_private(cli.model, train)
        cli.datamodule.train_dataloader = lambda: loader
        cli.trainer.callbacks.append(privacy)
        cli.trainer.fit(model, datamodule=cli.datamodule)
        """,
    )


def stand_in(folder: Path) -> None:
    _made_up.mnist(folder / "../../Datasets")
    _made_up.mnist(folder / "data")
