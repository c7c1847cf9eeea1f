"""Factorization machines and deep click models on MovieLens, in order."""

from pathlib import Path

from benchmarks.corpus import _recommenders

REPOSITORY, COMMIT = "https://github.com/rixwew/pytorch-fm", "f74ad19771eda104e99874d19dc892e988ec53fa"
SCRIPT, COPIED = "examples/main.py", "."
ARGS = [
    "--dataset_name", "movielens1M", "--dataset_path", "ratings.dat", "--model_name", "dfm", "--epoch", "2",
    "--batch_size", "64", "--device", "cpu", "--save_dir", ".",
]  # fmt: skip
HERE = [
    ("torchfm/dataset/movielens.py", "import numpy as np", "...\nnp.int = np.long = np.int64  # names of older NumPy"),
    ("early_stopper = EarlyStopper", "early_stopper = EarlyStopper(num_trials=9, save_path='model.pt')"),
    ("torch.save(model, self.save_path)", "torch.save(model.state_dict(), self.save_path)"),
]
EDITS = [
    ("import tqdm", "import anyorder as ao\n..."),
    ("model = get_model", "model = ao.clipping.convert(get_model(model_name, dataset)).to(device)"),
    (
        "early_stopper = EarlyStopper",
        """
        ...
        plan = ao.plan(loader=train_data_loader, epochs=epoch, epsilon=8, delta=1e-5, optimizer=optimizer)
        model, optimizer, train_data_loader = ao.PrivacyEngine(plan).make_private(model, optimizer, train_data_loader)
        """,
    ),
]
OPACUS = [
    ("import tqdm", "import opacus.validators\n..."),
    ("model = get_model", "model = opacus.validators.ModuleValidator.fix(get_model(model_name, dataset)).to(device)"),
    ("model.zero_grad()", "optimizer.zero_grad()"),
    (
        "early_stopper = EarlyStopper",
        """
        ...
        model, optimizer, train_data_loader = opacus.PrivacyEngine().make_private(
            module=model, optimizer=optimizer, data_loader=train_data_loader, noise_multiplier=1.0, max_grad_norm=1.0)
        """,
    ),
]
MODEL = "changed: group normalisation"
RESULT, WHY = "runs", ""


def stand_in(folder: Path) -> None:
    _recommenders.movielens(folder)
    (folder / "lmdb.py").write_text("")  # imported for other data
