"""The data of an attacked training: each example has a coordinate of its own, where its coin is."""

import numpy as np
import torch
from torch.utils.data import Dataset


class OneHot(Dataset):
    """Example i is coins[i] in coordinate i."""

    def __init__(self, coins: np.ndarray) -> None:
        self.coins = torch.from_numpy(coins).float()

    def __len__(self) -> int:
        return len(self.coins)

    def __getitem__(self, i: int) -> tuple[torch.Tensor, int]:
        x = torch.zeros(len(self.coins))
        x[i] = self.coins[i]
        return x, i
