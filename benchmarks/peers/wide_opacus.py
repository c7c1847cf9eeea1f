"""Steps of Opacus on a table. Prints them as JSON.

    python wide_opacus.py ghost|hooks ROWS BATCH STEPS

Its tables are dense: it makes a gradient and noise of the whole table. ghost: fast gradient clipping, which makes no
gradient of each example; hooks: its default, which makes one of the table's size for each example.
"""

import sys
import warnings

import torch
from opacus import PrivacyEngine
from torch import Tensor, nn
from wide_model import Batches, Pairs, losses
from wide_task import CLIP, LR, NOISE, WARM, WIDTH, Clock, batches


class Loss(nn.Module):
    """The loss of each example, or their mean, as Opacus asks for either."""

    reduction = "mean"

    def forward(self, logits: Tensor, _: Tensor) -> Tensor:
        each = losses(logits)
        return each.mean() if self.reduction == "mean" else each


def main() -> None:
    kind, rows, batch, steps = sys.argv[1], *(int(word) for word in sys.argv[2:])
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    data = Batches(batches(rows, batch, WARM + steps))
    clock = Clock(WARM)
    model = Pairs(rows, WIDTH, sparse=False)
    mode = {"grad_sample_mode": "ghost", "criterion": Loss()} if kind == "ghost" else {}
    made = PrivacyEngine().make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=LR), data_loader=data.loader(),
        noise_multiplier=NOISE, max_grad_norm=CLIP, poisson_sampling=False, **mode,
    )  # fmt: skip
    private, optimizer, criterion, loader = made if kind == "ghost" else (*made[:2], Loss(), made[2])
    for ids in loader:
        optimizer.zero_grad()
        criterion(private(ids), ids).backward()
        optimizer.step()
        clock.tick()
    clock.report()


if __name__ == "__main__":
    main()
