"""Which unit an index of a data set is, and how its squared counts sum up; nothing of a run is moved by asking."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from anyorder.errors import LoaderError

__all__ = ["names_of", "numbers", "size_of", "undisturbed", "weights_of"]

Indices = NDArray[np.int64]


def names_of(loader: Any, unit: Any, indices: Indices | None) -> Indices | str | None:
    """The number of the unit of each of these indices; None where all differ; or why they cannot be told."""
    from torch.utils.data import ConcatDataset, Subset

    from anyorder.sampling.origins import Origins

    total = size_of(loader.dataset)
    if total is None:
        return "the data set has no length, so that its examples cannot be told apart"
    if indices is not None and len(indices):
        indices = np.where(indices < 0, indices + total, indices)
    if unit is not None:
        names = numbers(_units(loader, np.arange(total) if indices is None else indices, unit))
        return names if names.max(initial=0) + 1 < len(names) else None
    try:
        origins = Origins(loader.dataset)
    except LoaderError as problem:
        return str(problem)
    if indices is None:
        if not isinstance(loader.dataset, (Subset, ConcatDataset)):
            return None
        indices = np.arange(total)
    names = numbers(origins.names(indices))
    return names if names.max(initial=0) + 1 < len(names) else None


def numbers(names: NDArray[Any]) -> Indices:
    """0, 1, .. in the place of names."""
    return np.unique(names, return_inverse=True)[1].ravel().astype(np.int64)


def _units(loader: Any, indices: Indices, unit: Any) -> NDArray[Any]:
    """The id of the unit of each of these examples, read from the data set as the loader would collate them."""
    from anyorder.sampling.loader import extract_units

    chunk = loader.batch_size or 256
    found = []
    with undisturbed(loader):
        for start in range(0, len(indices), chunk):
            wanted = indices[start : start + chunk].tolist()
            fetch = getattr(loader.dataset, "__getitems__", None)
            rows = fetch(wanted) if fetch else [loader.dataset[i] for i in wanted]
            ids = np.asarray(extract_units(loader.collate_fn(rows), unit))
            if len(ids) != len(wanted):
                raise LoaderError(
                    f"unit= must give one id for each of the {len(wanted)} examples of a batch, got {len(ids)}"
                )
            found.append(ids)
    return np.concatenate(found)


@contextmanager
def undisturbed(loader: Any = None) -> Iterator[None]:
    """Puts the states of Python's, NumPy's, torch's and the loader's own generators back at the end."""
    import torch

    own = [
        g for part in (loader, getattr(loader, "sampler", None)) if (g := getattr(part, "generator", None)) is not None
    ]
    states = [g.get_state() for g in own]
    python, numpy, cpu = random.getstate(), np.random.get_state(), torch.get_rng_state()  # noqa: NPY002
    gpus = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)  # noqa: NPY002
        torch.set_rng_state(cpu)
        if gpus:
            torch.cuda.set_rng_state_all(gpus)
        for generator, state in zip(own, states, strict=True):
            generator.set_state(state)


def weights_of(names: Indices, step_of: Indices) -> NDArray[np.float64]:
    """(names,) for each name, a number from 0 on, the sum over steps of its squared count; (1,) of 0 for none."""
    if not len(names):
        return np.zeros(1)
    span = int(step_of.max()) + 1
    pairs, counts = np.unique(names * span + step_of, return_counts=True)
    return np.bincount(pairs // span, counts.astype(np.float64) ** 2).astype(np.float64)


def size_of(dataset: Any) -> int | None:
    return len(dataset) if hasattr(dataset, "__len__") else None
