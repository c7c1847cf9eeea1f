"""Informer on windows of a series, its attention to the keys that a random draw finds most telling."""

import random
from datetime import datetime, timedelta
from pathlib import Path

REPOSITORY, COMMIT = "https://github.com/zhouhaoyi/Informer2020", "29f2a739226a509202a092b464163da81fa74960"
SCRIPT, COPIED = "main_informer.py", "."
ARGS = [
    "--model", "informer", "--data", "ETTh1", "--seq_len", "24", "--label_len", "12", "--pred_len", "6",
    "--d_model", "32", "--n_heads", "2", "--d_ff", "64", "--itr", "1", "--train_epochs", "2", "--factor", "2",
]  # fmt: skip
HERE = [
    (
        "data/data_loader.py",
        "border1s = [0, 12*30*24 - self.seq_len",
        "border1s = [0, 160 - self.seq_len, 240 - self.seq_len]",
    ),
    ("data/data_loader.py", "border2s = [12*30*24, 12*30*24+4*30*24", "border2s = [160, 240, 320]"),
    ("utils/metrics.py", "import numpy as np", "...\nnp.Inf = np.inf"),
    ("utils/tools.py", "import numpy as np", "...\nnp.Inf = np.inf"),
]
EDITS = [
    ("exp/exp_informer.py", "import numpy as np", "...\nimport anyorder as ao"),
    (
        "exp/exp_informer.py",
        "train_data, train_loader = self._get_data(",
        "...\nself.model = ao.clipping.convert(self.model)",
    ),
    (
        "exp/exp_informer.py",
        "criterion =  self._select_criterion()",
        """
        ...
        plan = ao.plan(
            loader=train_loader, epochs=self.args.train_epochs, epsilon=8, delta=1e-5, optimizer=model_optim)
        self.model, model_optim, train_loader = ao.PrivacyEngine(plan).make_private(
            self.model, model_optim, train_loader)
        """,
    ),
]
MODEL = "changed: group normalisation"
RESULT = "runs"
WHY = "A window is protected, and windows overlap: no claim for one hour of the series follows."
OPACUS = [
    ("exp/exp_informer.py", "import numpy as np", "...\nimport opacus.validators"),
    (
        "exp/exp_informer.py",
        "train_data, train_loader = self._get_data(",
        "...\nself.model = opacus.validators.ModuleValidator.fix(self.model)",
    ),
    (
        "exp/exp_informer.py",
        "criterion =  self._select_criterion()",
        """
        ...
        self.model, model_optim, train_loader = opacus.PrivacyEngine().make_private(
            module=self.model, optimizer=model_optim, data_loader=train_loader, noise_multiplier=1.0, max_grad_norm=1.0)
        """,
    ),
]


def stand_in(folder: Path) -> None:
    chance, at = random.Random(0), datetime(2016, 7, 1)
    lines = ["date,HUFL,HULL,MUFL,MULL,LUFL,LULL,OT"]
    for hour in range(320):
        lines += [",".join([str(at + timedelta(hours=hour)), *(f"{chance.gauss(0, 1):.3f}" for _ in range(7))])]
    (folder / "data/ETT").mkdir()
    (folder / "data/ETT/ETTh1.csv").write_text("\n".join(lines) + "\n")
