"""A network that restyles images: its loss compares the features that a frozen VGG-16 has of image and result."""

from pathlib import Path

from benchmarks.corpus import _made_up

REPOSITORY, COMMIT = "https://github.com/pytorch/examples", "77f55b912142e11fcfdf5b530231fb9c52f181e8"
SCRIPT, COPIED = "fast_neural_style/neural_style/neural_style.py", "fast_neural_style/neural_style"
ARGS = ["train", "--epochs", "1", "--batch-size", "2", "--image-size", "32", "--dataset", "images", "--style-image",
        "style.png", "--save-model-dir", "saved"]  # fmt: skip
NEEDS = ("torchvision==0.28.0",)
HERE = [("fast_neural_style/neural_style/vgg.py", "models.vgg16(", "vgg_pretrained_features = models.vgg16().features")]
EDITS = [
    ("import argparse", "import anyorder as ao\n..."),
    (
        "for e in range(args.epochs)",
        """
        plan = ao.plan(loader=train_loader, epochs=args.epochs, epsilon=8, delta=1e-5, optimizer=optimizer)
        engine = ao.PrivacyEngine(plan)
        transformer, optimizer, train_loader = engine.make_private(transformer, optimizer, train_loader)
        ...
        """,
    ),
    ("y = utils.normalize_batch(y)", "y = utils.normalize_batch(y.clone())"),
    ("x = utils.normalize_batch(x)", "x = utils.normalize_batch(x.clone())"),
]
OPACUS = [
    ("import argparse", "import opacus\n..."),
    (
        "for e in range(args.epochs)",
        """
        transformer, optimizer, train_loader = opacus.PrivacyEngine(accountant="rdp").make_private(
            module=transformer, optimizer=optimizer, data_loader=train_loader, noise_multiplier=1.0, max_grad_norm=1.0)
        ...
        """,
    ),
]
MODEL = "untouched"
RESULT, WHY = "runs", "the script writes into what the network returned, and into what it was given, so it gets copies"


def stand_in(folder: Path) -> None:
    _made_up.images(folder / "images" / "all", 12, 40)
    _made_up.images(folder, 1, 32, "style")
