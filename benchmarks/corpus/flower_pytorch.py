"""One client of Flower's first example: a small convolutional network on its own part of CIFAR-10."""

from pathlib import Path

from benchmarks.corpus import _federated

REPOSITORY, COMMIT = _federated.REPOSITORY, _federated.COMMIT
SCRIPT = "examples/quickstart-pytorch/pytorchexample/task.py"
ARGS: list[str] = []
NEEDS = ("torchvision==0.28.0",)
HERE = [
    ("def test(net", 'if __name__ == "__main__":\n    train(Net(), load_data(0, 2, 16)[0], 2, 0.1, "cpu")\n\n\n...'),
]
EDITS = [
    ("import torch.nn as nn", "...\nimport anyorder as ao"),
    (
        "net.train()",
        """
        ...
        plan = ao.plan(loader=trainloader, epochs=epochs, epsilon=8, delta=1e-5, optimizer=optimizer)
        net, optimizer, trainloader = ao.PrivacyEngine(plan).make_private(net, optimizer, trainloader)
        """,
    ),
]
OPACUS = [
    ("import torch.nn as nn", "...\nimport opacus"),
    (
        "net.train()",
        """
        ...
        net, optimizer, trainloader = opacus.PrivacyEngine().make_private(
            module=net, optimizer=optimizer, data_loader=trainloader, noise_multiplier=1.0, max_grad_norm=1.0)
        """,
    ),
]
MODEL = "untouched"
RESULT, WHY = "runs", "One round of one client. Rounds of a client add up: plan for all of them."


def stand_in(folder: Path) -> None:
    _federated.images(folder)
