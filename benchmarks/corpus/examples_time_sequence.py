"""Two LSTM cells in a loop over time, in double precision, trained by LBFGS on all sequences at once."""

from pathlib import Path

REPOSITORY, COMMIT = "https://github.com/pytorch/examples", "77f55b912142e11fcfdf5b530231fb9c52f181e8"
SCRIPT = "time_sequence_prediction/train.py"
ARGS = ["--steps", "5"]
HERE = [
    ("torch.load(", "data = torch.load('traindata.pt', weights_only=False)"),
    ("future = 1000", "future = 50"),
    ("plt.savefig", ""),
]
LOOP = """
for input, target in loader:
    optimizer.zero_grad()
    loss = criterion(seq(input), target)
    loss.backward()
    optimizer.step()
"""
EDITS = [
    ("import print_function", "...\nimport anyorder as ao"),
    (
        "optimizer = optim.LBFGS",
        """
        optimizer = optim.Adam(seq.parameters(), lr=0.01)
        data = torch.utils.data.TensorDataset(input, target)
        loader = torch.utils.data.DataLoader(data, batch_size=len(data))
        plan = ao.plan(loader=loader, epochs=opt.steps, epsilon=8, delta=1e-5, optimizer=optimizer)
        seq, optimizer, loader = ao.PrivacyEngine(plan).make_private(seq, optimizer, loader)
        """,
    ),
    ("optimizer.step(closure)", LOOP),
]
OPACUS = [
    ("import print_function", "...\nimport opacus"),
    (
        "optimizer = optim.LBFGS",
        """
        optimizer = optim.Adam(seq.parameters(), lr=0.01)
        data = torch.utils.data.TensorDataset(input, target)
        loader = torch.utils.data.DataLoader(data, batch_size=len(data))
        seq = opacus.validators.ModuleValidator.fix(seq)
        seq, optimizer, loader = opacus.PrivacyEngine(accountant="rdp").make_private(
            module=seq, optimizer=optimizer, data_loader=loader, noise_multiplier=1.0, max_grad_norm=1.0,
            poisson_sampling=False)
        """,
    ),
    ("optimizer.step(closure)", LOOP),
]
MODEL = "untouched"
RESULT, WHY = (
    "runs",
    "Adam takes the place of LBFGS, whose steps ask for many gradients",
)


def stand_in(folder: Path) -> None:
    import torch

    times = torch.arange(60) + torch.randint(-80, 80, (100, 1))
    torch.save(torch.sin(times / 20).double().numpy(), folder / "traindata.pt")
