"""The settings of [Zhang, Mironov, Hejazinia 2021], and its selectors: which coordinates of a gradient are released."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from anyorder.noise import NoiseSource

Ints = NDArray[np.int64]
Floats = NDArray[np.float32]
Selector = Callable[[Floats, int], Ints]
"""(flat mean gradient, step) -> coordinates that are chosen, each once."""


@dataclass(frozen=True)
class Setting:
    """Table 1 of the paper and its section 6.1; `Setting.tiny` is for a quick look."""

    vocabulary: int = 1000
    width: int = 100
    train: int = 200_000
    validation: int = 100_000
    test: int = 200_000
    window: int = 4
    negatives: int = 8
    batch: int = 20
    epochs: int = 20
    clip: float = 15.0
    second_clip: float = 1.0
    coordinate_clip: float = 0.1
    chosen: int = 100  # 0.001 of 100 000
    lr: float = 1e-3
    exponent: float = 0.284  # epsilon'' of Algorithm 4: epsilon' = 16 over 100 draws
    canaries: int = 1000

    @property
    def steps(self) -> int:
        return self.epochs * self.train // self.batch

    @classmethod
    def tiny(cls) -> "Setting":
        return cls(vocabulary=100, width=10, train=2000, validation=100, test=1000, epochs=1, canaries=20, chosen=10)


class Exponential:
    """Algorithm 4: k draws without replacement, with weight exp(epsilon'' min(|g|, S0) / (2 S0)).

    Drawn by rejection: a uniform coordinate is taken with its weight over the greatest, exp(epsilon'' / 2), and passed
    over if it was taken before. That is the law of the k draws, at a cost that does not grow with the table.
    """

    def __init__(self, setting: Setting, source: NoiseSource) -> None:
        self._k, self._clip, self._scale = setting.chosen, setting.coordinate_clip, setting.exponent / 2
        self._coins, self._place = _Coins(source, 2 * setting.chosen), np.empty(0, np.int64)

    def __call__(self, mean: Floats, step: int) -> Ints:
        if len(self._place) != len(mean):
            self._place = np.empty(len(mean), np.int64)
        coins = self._coins(step)
        while True:
            places = (coins[::2] % np.uint64(len(mean))).astype(np.int64)
            utility = np.minimum(np.abs(mean[places]).astype(np.float64) / self._clip, 1)
            places = places[coins[1::2] * 2.0**-64 < np.exp(self._scale * (utility - 1))]
            found = _first(places, self._place, self._k)
            if len(found) == self._k:
                return found
            coins = self._coins.more(step, coins)


class Uniform:
    """k coordinates, each set of them as probable."""

    def __init__(self, setting: Setting, source: NoiseSource) -> None:
        self._k, self._coins, self._place = setting.chosen, _Coins(source, setting.chosen), np.empty(0, np.int64)

    def __call__(self, mean: Floats, step: int) -> Ints:
        if len(self._place) != len(mean):
            self._place = np.empty(len(mean), np.int64)
        coins = self._coins(step)
        while True:
            found = _first((coins % np.uint64(len(mean))).astype(np.int64), self._place, self._k)
            if len(found) == self._k:
                return found
            coins = self._coins.more(step, coins)


class _Coins:
    """64-bit words of a step, made for many steps at a time; a step that needs more goes on in a row of its own."""

    _STEPS = 64

    def __init__(self, source: NoiseSource, k: int) -> None:
        self._source, self._count = source, 2 * k
        self._block, self._at = np.empty((0, 0), np.uint64), -1

    def __call__(self, step: int) -> NDArray[np.uint64]:
        if step // self._STEPS != self._at:
            self._at = step // self._STEPS
            words = self._source.words(self._at, 0, 2 * self._STEPS * self._count).view(np.uint64)
            self._block = words.reshape(self._STEPS, self._count)
        return self._block[step % self._STEPS]

    def more(self, step: int, coins: NDArray[np.uint64]) -> NDArray[np.uint64]:
        """Those, and as many again."""
        start = len(coins) - self._count
        words = self._source.words((1 << 40) + step, 2 * start, 2 * (start + self._count)).view(np.uint64)
        return np.concatenate([coins, words])


def _first(places: Ints, room: Ints, k: int) -> Ints:
    """The first k different ones; `room` has a place for each coordinate, of any content."""
    order = np.arange(len(places))
    room[places[::-1]] = order[::-1]  # what is written last stays: the first of equals
    return places[room[places] == order][:k]


class SparseVector:
    """Algorithm 1's choice: coordinates in their order, while fewer than c1 = k passed a noisy threshold.

    epsilon' = 16 and delta' = 1.25e-7, as for the exponential mechanism; the threshold alpha is not stated: 10, with
    which the scan ends after some 70 of 1000 words, the most frequent. Lemma 4's own, 112, chooses nothing.
    """

    def __init__(self, setting: Setting, source: NoiseSource, epsilon: float = 16.0, alpha: float = 10.0) -> None:
        sensitivity = setting.coordinate_clip  # of a clipped coordinate: from 0 to S0
        self._scale = sensitivity * np.sqrt(32 * setting.chosen * np.log(2 / 1.25e-7)) / (0.95 * epsilon)
        self._clip, self._k, self._alpha, self._source = setting.coordinate_clip, setting.chosen, alpha, source

    def __call__(self, mean: Floats, step: int) -> Ints:
        thresholds = self._alpha + self._scale * _laplace(self._source.words(step, 0, self._k))
        chosen: list[int] = []
        chunk = 4096
        for start in range(0, len(mean), chunk):
            words = self._source.words(step, self._k + start, self._k + min(start + chunk, len(mean)))
            least = (thresholds[len(chosen) :].min() - self._clip) / (
                2 * self._scale
            )  # noise that none passes with less
            near = np.flatnonzero(words >= (2 - np.exp(-least)) * 2.0**31 - 1) if least > 0 else np.arange(len(words))
            noisy = 2 * self._scale * _laplace(words[near]) + np.minimum(np.abs(mean[start + near]), self._clip)
            for i, value in zip(near.tolist(), noisy.tolist(), strict=True):
                if value >= thresholds[len(chosen)]:
                    chosen.append(start + i)
                    if len(chosen) == self._k:
                        return np.array(chosen)
        return np.array(chosen, np.int64)


def _laplace(words: NDArray[np.uint32]) -> NDArray[np.float64]:
    """Of scale 1. With 32 bits an end beyond 22 is never drawn."""
    uniform = (words.astype(np.float64) + 0.5) * 2.0**-31 - 1
    return np.asarray(np.sign(uniform) * -np.log1p(-np.abs(uniform)))
