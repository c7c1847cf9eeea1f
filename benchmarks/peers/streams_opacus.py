"""Softmax regression by Opacus's DP-SGD: Poisson sampling, its PRV accountant. Prints JSON.

    python streams_opacus.py DATA.npz DELTA JOBS

JOBS: JSON list of [epsilon, seed, lr, expected batch, epochs, clip norm]. Rows have norm at most 1, their last column
is the intercept's. Fast gradient clipping, which is its quickest for a linear layer; momentum 0.
"""

import json
import sys
import time
import warnings

import numpy as np
import torch
from opacus import PrivacyEngine
from opacus.accountants.utils import get_noise_multiplier
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def main() -> None:
    data, delta, jobs = np.load(sys.argv[1]), float(sys.argv[2]), json.loads(sys.argv[3])
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    x, y, tx, ty = (torch.from_numpy(data[name]) for name in ("x", "y", "tx", "ty"))
    for epsilon, seed, lr, batch, epochs, clip in jobs:
        noise = get_noise_multiplier(
            target_epsilon=epsilon, target_delta=delta, sample_rate=batch / len(x), epochs=epochs, accountant="prv",
            epsilon_tolerance=0.001,
        )  # fmt: skip
        started = time.process_time()
        model = _train(x, y, seed, lr, batch, epochs, clip, noise)
        seconds = time.process_time() - started
        right = float((model(tx).argmax(1) == ty).double().mean())
        print(json.dumps({"accuracy": right, "seconds": seconds, "noise": noise}), flush=True)


def _train(x, y, seed, lr, batch, epochs, clip, noise):  # noqa: ANN001, ANN202
    torch.manual_seed(seed)
    model = nn.Linear(x.shape[1], int(y.max()) + 1, bias=False)
    nn.init.zeros_(model.weight)
    made = PrivacyEngine(accountant="prv").make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=lr), criterion=nn.CrossEntropyLoss(),
        data_loader=DataLoader(_Rows(x, y), batch_size=batch, collate_fn=lambda rows: rows), noise_multiplier=noise,
        max_grad_norm=clip, poisson_sampling=True, grad_sample_mode="ghost",
    )  # fmt: skip
    private, optimizer, criterion, loader = made
    for _ in range(epochs):
        for rows, labels in loader:
            if not len(rows):
                continue
            optimizer.zero_grad()
            criterion(private(rows), labels).backward()
            optimizer.step()
    return model


class _Rows(TensorDataset):
    """Whole batches at once, as reading row by row would be most of its time."""

    def __getitems__(self, indices):  # noqa: ANN001, ANN204
        return tuple(tensor[indices] for tensor in self.tensors)


if __name__ == "__main__":
    main()
