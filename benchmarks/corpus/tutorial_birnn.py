"""A bidirectional LSTM over the rows of digits."""

from pathlib import Path

from benchmarks.corpus import _made_up

REPOSITORY, COMMIT = "https://github.com/yunjey/pytorch-tutorial", "0500d3df5a2a8080ccfccbc00aca0eacc21818db"
SCRIPT = "tutorials/02-intermediate/bidirectional_recurrent_neural_network/main.py"
ARGS: list[str] = []
NEEDS = ("torchvision==0.28.0",)
EDITS = [
    ("import torchvision.transforms as", "...\nimport anyorder as ao"),
    (
        "optimizer = torch.optim.Adam",
        """
        ...
        plan = ao.plan(loader=train_loader, epochs=num_epochs, epsilon=8, delta=1e-5, optimizer=optimizer)
        model, optimizer, train_loader = ao.PrivacyEngine(plan).make_private(model, optimizer, train_loader)
        """,
    ),
]
OPACUS = [
    ("import torchvision.transforms as", "...\nimport opacus.validators"),
    ("criterion = nn.CrossEntropyLoss()", "...\nmodel = opacus.validators.ModuleValidator.fix(model)"),
    (
        "optimizer = torch.optim.Adam",
        """
        ...
        model, optimizer, train_loader = opacus.PrivacyEngine().make_private(
            module=model, optimizer=optimizer, data_loader=train_loader, noise_multiplier=1.0, max_grad_norm=1.0)
        """,
    ),
]
MODEL = "untouched"
RESULT, WHY = "runs", ""


def stand_in(folder: Path) -> None:
    _made_up.mnist(folder / "../../data")
