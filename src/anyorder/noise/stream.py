"""The noise of a run, step by step: the only owner of the step counter and of the strategy's state."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from anyorder import _check
from anyorder.errors import CheckpointError, StepsExhaustedError
from anyorder.noise.source import NoiseSource
from anyorder.strategy import State, Strategy

__all__ = ["NoiseStream"]


class NoiseStream:
    """std * (K Z)[t] for t = 0, 1, .., n - 1 over the coordinates start, .., start + size - 1.

    Streams over disjoint ranges of coordinates make together, bit for bit, what one stream over all of them makes:
    a rank asks for its own range and talks to nobody.

    Args:
        strategy: gives K and the number of steps n.
        source: gives Z. One source serves one plan.
        std: noise standard deviation in gradient units, 1e-30 to 1e30; rounded up to float32, never down.
        size: number of coordinates.
        start: first coordinate.
    """

    def __init__(self, strategy: Strategy, source: NoiseSource, std: float, size: int, *, start: int = 0) -> None:
        self._strategy = strategy
        self._source = source
        self._std = _round_up(_check.real("std", std, low=1e-30, high=1e30))
        self._size = _check.integer("size", size, low=0)
        self._start = _check.integer("start", start, low=0)
        self._t = 0
        self._state: State = strategy.init(self._size)

    @property
    def t(self) -> int:
        """Steps made so far: the step that `next` makes."""
        return self._t

    def next(self) -> NDArray[np.float32]:
        """The noise of step t, (size,) float32, a fresh array.

        Raises: StepsExhaustedError after n steps; nothing changes.
        """
        n = self._strategy.n
        if self._t >= n:
            raise StepsExhaustedError(
                f"the plan has noise for {n} steps and all are made; a further step would have no guarantee: "
                f"plan more steps before training starts"
            )
        noise, state = self._strategy.step(self._t, self._state, self._row)
        noise *= self._std
        self._state = state
        self._t += 1
        return noise

    def _row(self, row: int) -> NDArray[np.float32]:
        return self._source.normal(row, self._start, self._start + self._size)

    def _identity(self) -> dict[str, Any]:
        """What a saved stream must share with the one it is loaded into."""
        return {
            "kind": type(self._strategy).__name__,
            "n": self._strategy.n,
            "start": self._start,
            "size": self._size,
            "std": float(self._std),
            "source": self._source.fingerprint(),
        }

    def state_dict(self) -> dict[str, Any]:
        """Numbers, words and NumPy arrays that `load_state_dict` resumes from, bit for bit. Never holds the key."""
        return self._identity() | {"t": self._t, "state": [array.copy() for array in self._state]}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was taken.

        Raises: CheckpointError if it is of another stream, or malformed; nothing changes.
        """
        for name, own in self._identity().items():
            if name not in saved or saved[name] != own:
                raise CheckpointError(
                    f"the saved noise stream has {name} = {saved.get(name)!r} and this one {own!r}: "
                    f"its noise would not cancel; resume with the plan, the key and the shard that were saved"
                )
        t, state = saved.get("t"), saved.get("state")
        if type(t) is not int or not 0 <= t <= self._strategy.n:
            raise CheckpointError(f"t of a saved noise stream must be an integer from 0 to n, got {t!r}")
        if not isinstance(state, list | tuple) or not all(self._is_state(array) for array in state):
            raise CheckpointError(f"state of a saved noise stream must be float32 arrays over {self._size} coordinates")
        self._t = t
        self._state = tuple(array.copy() for array in state)

    def _is_state(self, array: Any) -> bool:
        return isinstance(array, np.ndarray) and array.dtype == np.float32 and array.shape[-1:] == (self._size,)


def _round_up(std: float) -> np.float32:
    """The least float32 not below std: the noise is never less than was accounted for."""
    result = np.float32(std)
    return result if float(result) >= std else np.nextafter(result, np.float32(np.inf))
