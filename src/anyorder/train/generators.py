"""The state of the ordinary generators, for a checkpoint."""

import random
from typing import Any

import numpy as np
import torch

__all__ = ["random_state", "set_random_state"]


def random_state() -> dict[str, Any]:
    """The generators that dropout and augmentation draw from, for a checkpoint. The private noise needs no state."""
    kind, keys, *rest = np.random.get_state()  # noqa: NPY002
    version, numbers, gauss = random.getstate()
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        "numpy": [str(kind), np.asarray(keys).astype(np.int64), *rest],
        "python": [version, list(numbers), gauss],
    }


def set_random_state(state: dict[str, Any]) -> None:
    """Put the generators back where `random_state` saw them; of GPUs, those that are there."""
    torch.set_rng_state(state["torch"])
    if torch.cuda.is_available():
        for device, cuda in enumerate(state["cuda"][: torch.cuda.device_count()]):
            torch.cuda.set_rng_state(cuda, device)
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, np.asarray(keys).astype(np.uint32), *rest))  # noqa: NPY002
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
