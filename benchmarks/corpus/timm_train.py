"""A small vision transformer in timm's training script, of which a task object calls the model."""

import random
from pathlib import Path

REPOSITORY = "https://github.com/huggingface/pytorch-image-models"
COMMIT = "aa4b5850c1543fa488abf260f18390eda46cf85d"
SCRIPT, COPIED = "train.py", "."
ARGS = [
    "pictures", "--dataset", "folder", "--train-split", "train", "--val-split", "validation", "--model", "test_vit",
    "--img-size", "32", "--num-classes", "2", "--batch-size", "16", "--epochs", "2", "--device", "cpu",
    "--no-prefetcher", "--workers", "1", "--opt", "adamw", "--warmup-epochs", "0",
]  # fmt: skip
NEEDS = ("torchvision==0.28.0",)
EDITS = [
    ("_set_loader_epoch(loader_train, epoch)", "pass"),
    ("import argparse", "...\nimport anyorder as ao"),
    (
        "# optionally resume from a checkpoint",
        """
        plan = ao.plan(loader=loader_train, epochs=args.epochs, epsilon=8, delta=1e-5, optimizer=optimizer)
        engine = ao.PrivacyEngine(plan)
        task.trainable_module, optimizer, loader_train = engine.make_private(model, optimizer, loader_train)
        ...
        """,
    ),
]
OPACUS = [
    ("import argparse", "...\nimport opacus"),
    (
        "# optionally resume from a checkpoint",
        """
        model.train()
        task.trainable_module, optimizer, loader_train = opacus.PrivacyEngine().make_private(
            module=model, optimizer=optimizer, data_loader=loader_train, noise_multiplier=1.0, max_grad_norm=1.0)
        ...
        """,
    ),
]
MODEL = "untouched"
RESULT, WHY = "runs", ""


def stand_in(folder: Path) -> None:
    from PIL import Image

    chance = random.Random(0)
    for part, count in (("train", 48), ("validation", 16)):
        for i in range(count):
            of_class = folder / "pictures" / part / f"class{i % 2}"
            of_class.mkdir(parents=True, exist_ok=True)
            Image.frombytes("RGB", (40, 40), chance.randbytes(4800)).save(of_class / f"{i}.png")
