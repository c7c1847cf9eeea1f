"""A network that doubles the size of images, trained on files of images."""

from pathlib import Path

from benchmarks.corpus import _made_up

REPOSITORY, COMMIT = "https://github.com/pytorch/examples", "77f55b912142e11fcfdf5b530231fb9c52f181e8"
SCRIPT = "super_resolution/main.py"
ARGS = ["--upscale_factor", "4", "--batchSize", "4", "--threads", "0"]
NEEDS = ("torchvision==0.28.0", "six")
EDITS = [
    ("import argparse", "import anyorder as ao\n..."),
    (
        "optimizer = optim.Adam",
        """
        ...
        plan = ao.plan(loader=training_data_loader, epochs=opt.nEpochs, epsilon=8, delta=1e-5, optimizer=optimizer)
        engine = ao.PrivacyEngine(plan)
        model, optimizer, training_data_loader = engine.make_private(model, optimizer, training_data_loader)
        """,
    ),
    ("torch.save(model,", "torch.save(engine.model.module, model_out_path)"),
]
OPACUS = [
    ("import argparse", "import opacus\n..."),
    (
        "optimizer = optim.Adam",
        """
        ...
        model, optimizer, training_data_loader = opacus.PrivacyEngine(accountant="rdp").make_private(
            module=model, optimizer=optimizer, data_loader=training_data_loader, noise_multiplier=1.0,
            max_grad_norm=1.0)
        """,
    ),
    ("torch.save(model,", "torch.save(model.state_dict(), model_out_path)"),
]
MODEL = "untouched"
RESULT, WHY = "runs", "the network itself is saved, since a private model does not outlive its run"


def stand_in(folder: Path) -> None:
    for part, count in (("train", 16), ("test", 2)):
        _made_up.images(folder / "dataset/BSDS300/images" / part, count, 128)
