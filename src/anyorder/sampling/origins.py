"""Where examples come from: torch's wrappers of data sets seen through, so that an example has one name."""

from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import ConcatDataset, StackDataset, Subset

from anyorder.errors import LoaderError

__all__ = ["Indices", "Origins"]

Indices = NDArray[np.int64]


class Origins:
    """Names of the examples of a data set: their indices in the data sets that `Subset` and `ConcatDataset` wrap.

    An example of a data set that is no wrapper has its index. Under wrappers the same example has the same name however
    often it is listed; where several data sets lie beneath, the names of the second follow those of the first.

    Not seen: what a data set or a collate_fn of one's own does with an index, and equal examples in two data sets.

    Raises: LoaderError for a `StackDataset` that joins one example to several others.
    """

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
        self._first: dict[int, int] = {}  # of each data set beneath, by its id: the name of its example 0
        self._size = 0
        self._find_bases(dataset)

    def names(self, indices: Indices) -> Indices:
        """(m,) int64: the names of the examples of these indices."""
        return self._names(self._dataset, indices)

    def check_distinct(self, indices: Indices) -> None:
        """Raise LoaderError if two of these indices are the same example."""
        if not _is_wrapper(self._dataset):
            return
        names = self.names(indices)
        if len(np.unique(names)) < len(names):
            raise LoaderError(
                "the data set lists an example more than once (a Subset with repeated indices, or a ConcatDataset of "
                "parts that overlap), so that it would take part more than once an epoch; list each once, or pass "
                "order= to ao.plan, which the ledger then enforces step by step"
            )

    def _find_bases(self, dataset: Any) -> None:
        if _is_subset(dataset):
            self._find_bases(dataset.dataset)
        elif isinstance(dataset, ConcatDataset):
            for part in dataset.datasets:
                self._find_bases(part)
        elif id(dataset) not in self._first:
            if isinstance(dataset, StackDataset):
                _check_stack(dataset)
            self._first[id(dataset)] = self._size
            self._size += len(dataset) if hasattr(dataset, "__len__") else 1 << 40

    def _names(self, dataset: Any, indices: Indices) -> Indices:
        if _is_subset(dataset):
            return self._names(dataset.dataset, _picked(dataset.indices, indices, dataset.dataset))
        if isinstance(dataset, ConcatDataset):
            ends = np.asarray(dataset.cumulative_sizes, np.int64)
            part_of = np.searchsorted(ends, indices, side="right")
            names = np.empty_like(indices)
            for part in np.unique(part_of).tolist():
                chosen = part_of == part
                start = ends[part - 1] if part else 0
                names[chosen] = self._names(dataset.datasets[part], indices[chosen] - start)
            return names
        return indices + self._first[id(dataset)]


def _is_subset(dataset: Any) -> bool:
    return isinstance(dataset, Subset) and len(dataset) == len(dataset.indices)


def _is_wrapper(dataset: Any) -> bool:
    return _is_subset(dataset) or isinstance(dataset, ConcatDataset)


def _picked(listed: Any, indices: Indices, inner: Any) -> Indices:
    """`listed[indices]`, looked up now: the list may be another one in the next epoch."""
    if 8 * len(indices) > len(listed):
        picked = np.asarray(listed, np.int64)[indices]
    else:
        picked = np.array([int(listed[i]) for i in indices.tolist()], np.int64)
    return np.where(picked < 0, picked + len(inner), picked) if picked.min(initial=0) < 0 else picked


def _check_stack(dataset: StackDataset[Any]) -> None:
    """Refuse a stack in which an example of one of its parts stands in several places."""
    parts = list(dataset.datasets.values() if isinstance(dataset.datasets, dict) else dataset.datasets)
    if not any(map(_is_wrapper, parts)):
        return
    joined = Origins(ConcatDataset(parts))
    names = joined.names(np.arange(sum(map(len, parts)))).reshape(len(parts), -1)
    places = np.broadcast_to(np.arange(names.shape[1]), names.shape)
    pairs = np.unique(np.stack([names.ravel(), places.ravel()]), axis=1)
    if len(np.unique(pairs[0])) < pairs.shape[1]:
        raise LoaderError(
            "the StackDataset joins one example of a part to several of another, so that it would take part more than "
            "once an epoch; use each once, or name the units with unit= in make_private and pass order= to "
            "ao.plan"
        )
