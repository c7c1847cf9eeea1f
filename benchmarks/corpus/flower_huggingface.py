"""One client of Flower's example with a BERT."""

from pathlib import Path

from benchmarks.corpus import _federated, _texts

REPOSITORY, COMMIT = _federated.REPOSITORY, _federated.COMMIT
SCRIPT = "examples/quickstart-huggingface/huggingface_example/task.py"
ARGS: list[str] = []
HERE = [
    (
        "def test_fn(net",
        'if __name__ == "__main__":\n    train_fn(get_model("bert"), load_data(0, 2, "bert")[0], 2, "cpu")\n\n\n...',
    ),
]
EDITS = [
    ("from typing import Any", "...\nimport anyorder as ao"),
    (
        "net.train()",
        """
        ...
        plan = ao.plan(loader=trainloader, epochs=epochs, epsilon=8, delta=1e-5, optimizer=optimizer)
        net, optimizer, trainloader = ao.PrivacyEngine(plan).make_private(
            net, optimizer, trainloader, pad_to=(16, 32))
        """,
    ),
    ("loss.backward()", "loss.mean().backward()"),
]
OPACUS = [
    ("from typing import Any", "...\nimport opacus"),
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
    _texts.bert(folder / "bert")
    _texts.metrics(folder)
    _federated.texts(folder)
