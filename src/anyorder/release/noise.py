"""The noise of a run, added to sums: each rank makes the part over its own coordinates."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from anyorder.errors import TrainingError
from anyorder.noise import NoiseSource, NoiseStream
from anyorder.noise.discrete import GridStream
from anyorder.noise.stream import round_up
from anyorder.release.ranks import Coordinates
from anyorder.strategy import Strategy

__all__ = ["SharedNoise", "TableNoise"]


class SharedNoise:
    """A noise stream over all coordinates, of which each rank makes and keeps the part over its own.

    The ranks' parts are together, bit for bit, the noise of one `NoiseStream` over everything; making them needs no
    communication. A saved state is that one stream's, whatever the number of ranks.

    Args:
        strategy, source, std: as for `NoiseStream`.
        shards: whose coordinates `add_to` covers, and in which order.
        grid: None, or as for `GridStream`, which then takes the place of `NoiseStream`.

    Attributes:
        std: as it is made, rounded up to float32.
    """

    def __init__(
        self, strategy: Strategy, source: NoiseSource, std: float, shards: Coordinates, grid: float | None = None
    ) -> None:
        self._group = shards.group
        self._size = shards.size
        self.std = float(round_up(std))
        self._grid, self._ranges = grid, shards.ranges
        self._streams: list[Any] = [
            NoiseStream(strategy, source, std, j - i, start=i)
            if grid is None
            else GridStream(strategy, source, std, grid, j - i, start=i)
            for i, j in shards.ranges
        ]

    def check(self, step: int) -> None:
        """Refuse to go on where noise was drawn for a step that the ledger does not have, after an interrupt perhaps.

        The noise would be ahead of the gradients: a row of C^-1 Z that is left out is one that no guarantee knows of.
        """
        for stream in self._streams:
            if stream.t != step:
                raise TrainingError(
                    f"the noise of step {step} was drawn, but the step was broken off half way: nothing more may be "
                    "released; resume from the last checkpoint in a new engine"
                )

    def add_to(self, own: list[Tensor], divisor: float) -> list[Tensor]:
        """(own + noise of the next step) / divisor on the rank's own coordinates.

        Args:
            own: the rank's vector in pieces, which are overwritten: float32; on a grid int64, in grid steps.
            divisor: the batch size, perhaps times a change of units.
        Returns: `own`; on a grid as many float64 tensors.
        Raises: StepsExhaustedError after n steps. TrainingError if a step was broken off between the rank's streams.
        """
        if self._grid is not None:
            noise = np.concatenate([np.empty(0, np.int64), *(stream.next() for stream in self._streams)])
            parts = torch.split(torch.from_numpy(noise), [len(x) for x in own])
            # In place: torch refuses a sum of floats here.
            totals = [part.to(x.device).add_(x) for part, x in zip(parts, own, strict=True)]
            return [total.double().mul_(self._grid).div_(divisor) for total in totals]
        if not self._size:  # tables alone: their noise is made with them
            for stream in self._streams:
                stream.skip()
            return own
        if len(self._streams) == 1:
            self._streams[0].add_to(own, 1 / divisor)
            return own
        (vector,) = own
        start = 0
        for stream, (i, j) in zip(self._streams, self._ranges, strict=True):
            stream.add_to([vector[start : start + j - i]], 1 / divisor)
            start += j - i
        return own

    def add_to_rows(self, rows: NDArray[np.int64], values: Tensor, divisor: float) -> Tensor:
        """(values + noise of the next step) / divisor on some rows of a table, bit for bit as `add_to` has it there.

        Args:
            rows: (k,) row numbers.
            values: (k, width), float32 or float64.
        Raises: ArgumentError for a strategy with a state; nothing changes.
        """
        (stream,) = self._streams
        saved = stream.state_dict()
        made = _noised(values, stream.rows(stream.t, rows, values.shape[1]), divisor)
        stream.load_state_dict({**saved, "t": saved["t"] + 1})  # without a state, that is a step
        return made

    def state_dict(self) -> dict[str, Any] | None:
        """The state over all coordinates, on the first rank; None elsewhere. All ranks must call it."""
        told = self._group.to_first([stream.state_dict() for stream in self._streams])
        if told is None:
            return None
        parts = sorted((part for of_rank in told for part in of_rank), key=lambda part: part["start"])
        states = zip(*(part["state"] for part in parts), strict=True)
        state = [np.concatenate(arrays, axis=-1) for arrays in states]
        return {**parts[0], "start": 0, "size": self._size, "state": state}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was taken, on this rank's coordinates.

        Raises: CheckpointError if it is of another stream.
        """
        for stream in self._streams:
            own = stream.state_dict()
            start, size = own["start"], own["size"]
            cut = {"start": start, "size": size} if saved["size"] == self._size and saved["start"] == 0 else {}
            state = [array[..., start : start + size] for array in saved["state"]]
            stream.load_state_dict({**saved, **cut, "state": state})


class TableNoise:
    """The noise of a run in rows of tables, whose coordinates lie behind the dense ones; nothing is kept.

    Args:
        strategy, source, std: as for `NoiseStream`; a strategy without a state.
        start, size: first coordinate of the tables, and how many they have.
    """

    def __init__(self, strategy: Strategy, source: NoiseSource, std: float, start: int, size: int) -> None:
        self._stream = NoiseStream(strategy, source, std, size, start=start)

    def add_to_rows(self, step: int, offset: int, rows: NDArray[np.int64], values: Tensor, divisor: float) -> Tensor:
        """(values + noise of the step) / divisor on some rows of a table, bit for bit as a whole step has it there.

        Args:
            step: the release takes each once; asked for again, it is that noise again.
            offset: place of the table among the coordinates of all tables.
            rows: (k,) row numbers.
            values: (k, width), float32 or float64; they are not written.
        """
        return _noised(values, self._stream.rows(step, rows, values.shape[1], offset=offset), divisor)


def _noised(values: Tensor, noise: NDArray[np.float32], divisor: float) -> Tensor:
    scale = 1 / divisor
    made = values + torch.from_numpy(noise).to(values.device)
    return made.mul_(scale if values.dtype == torch.float64 else float(np.float32(scale)))
