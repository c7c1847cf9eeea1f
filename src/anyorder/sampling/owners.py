"""Who owns which example: a data set read once."""

from typing import Any

import numpy as np
from torch import no_grad
from torch.utils.data import DataLoader

from anyorder.errors import LoaderError
from anyorder.ledger import Units
from anyorder.sampling.loader import Unit, extract_units, rebuild
from anyorder.sampling.origins import Indices

__all__ = ["read_owners"]

_AT_ONCE = 256


def read_owners(loader: DataLoader[Any], members: Indices, unit: Unit, at_once: int = _AT_ONCE) -> Units:
    """The id of each member's unit, in their order.

    Args:
        loader: whose data set, collation and workers are used.
        members: indices, each read once.
        unit: where a batch keeps the ids.
        at_once: examples in a batch.
    """
    chunks = [members[i : i + at_once].tolist() for i in range(0, len(members), at_once)]
    with no_grad():  # nothing is trained on what is read here, and who watches a training is told so
        found = [
            _of_all(extract_units(batch, unit), len(chunk))
            for chunk, batch in zip(chunks, rebuild(loader, chunks), strict=True)
        ]
    if any(isinstance(units, list) for units in found):
        return [unit for units in found for unit in units]
    return np.concatenate(found)


def _of_all(units: Units, examples: int) -> Units:
    if len(units) != examples:
        raise LoaderError(f"unit= must give one id for each of the {examples} examples of a batch, got {len(units)}")
    return units
