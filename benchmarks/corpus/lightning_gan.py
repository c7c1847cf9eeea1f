"""A GAN with two optimizers in one module of Lightning, which steps them itself."""

from pathlib import Path

from benchmarks.corpus import _lightning, _made_up

REPOSITORY, COMMIT = _lightning.REPOSITORY, _lightning.COMMIT
SCRIPT = "examples/pytorch/domain_templates/generative_adversarial_net.py"
ARGS: list[str] = []
NEEDS = ("torchvision==0.28.0",)
HERE = [
    ("dm = MNISTDataModule()", "dm = MNISTDataModule(val_split=32, num_workers=0, batch_size=32)"),
    ('trainer = Trainer(accelerator="gpu"', 'trainer = Trainer(accelerator="cpu", max_epochs=2, logger=False)'),
]
EDITS = [
    ("import math", "...\nimport anyorder as ao"),
    (
        "trainer.fit(model, dm)",
        """
        dm.prepare_data()
        dm.setup("fit")
        of_generator, of_discriminator = model.configure_optimizers()
        train = dm.train_dataloader()
        plan = ao.plan(loader=train, epochs=trainer.max_epochs, epsilon=8, delta=1e-5, optimizer=of_discriminator)
        model.discriminator, of_discriminator, loader = ao.PrivacyEngine(plan).make_private(
            model.discriminator, of_discriminator, train)
        model.configure_optimizers = lambda: (of_generator, of_discriminator)
        dm.train_dataloader = lambda: loader
        ...
        """,
    ),
]
OPACUS = "Lightning makes the optimizers itself, and Opacus has no callback for it."
MODEL = "untouched"
RESULT, WHY = "runs", ""


def stand_in(folder: Path) -> None:
    _made_up.mnist(folder / "data")
