"""The task of `wide_task.py` in torch: model, loss, loader."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Pairs(nn.Module):
    """(B, 10) rows -> (B, 9) logits: the centre by its context and by each negative."""

    def __init__(self, rows: int, width: int, *, sparse: bool, seed: int = 0) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.table = nn.Embedding(rows, width, sparse=sparse)
            nn.init.normal_(self.table.weight, std=0.1)

    def forward(self, ids: Tensor) -> Tensor:
        read = self.table(ids)
        return (read[:, 1:] @ read[:, 0, :, None])[..., 0]


def losses(logits: Tensor) -> Tensor:
    """(B,): of each example."""
    return F.softplus(torch.cat([-logits[:, :1], logits[:, 1:]], 1)).sum(1)


class Batches(torch.utils.data.Dataset[Tensor]):
    """As many batches as asked for, each ready when the loader asks for it."""

    def __init__(self, ids: Any) -> None:
        self.batch = ids.shape[1]
        self.ids = torch.from_numpy(ids).flatten(0, 1)

    def __len__(self) -> int:
        return len(self.ids)

    def __getitems__(self, indices: list[int]) -> Tensor:
        """One batch: the loader asks for whole ones, in their order."""
        return self.ids[indices[0] : indices[-1] + 1]

    def __getitem__(self, index: int) -> Tensor:
        return self.ids[index]

    def loader(self) -> torch.utils.data.DataLoader[Tensor]:
        """In order."""
        return torch.utils.data.DataLoader(self, self.batch, collate_fn=_as_it_is)

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self.ids.split(self.batch))


def _as_it_is(batch: Tensor) -> Tensor:
    return batch
