"""Many ranges of many rows, in one call: the bits of `normal`, range by range."""

import numpy as np
import pytest

from anyorder._library import PATHS
from anyorder.errors import ArgumentError
from anyorder.noise import NoiseSource
from anyorder.noise.compiled import kernel

KEY = bytes(range(32))
KERNELS = ["reference", *(PATHS[: PATHS.index(kernel().name) + 1] if kernel() else ())]


def one_by_one(source, rows, starts, width):
    return np.array([source.normal(r, s, s + width) for r, s in zip(rows, starts, strict=True)]).reshape(-1, width)


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("width", [1, 7, 16, 33, 100, 5000])
def test_bits_are_those_of_each_range(name, width):
    source = NoiseSource(KEY, kernel=name)
    rng = np.random.default_rng(width)
    k = 3 if width > 1000 else 150  # more than a chunk, and ranges that end in the middle of a tile
    rows = np.concatenate([rng.integers(0, 2**63, k), [0, 2**63 - 1, 2**32, 2**32 - 1]])
    starts = np.concatenate([rng.integers(0, 10**6, k), [0, 2**62 - width, 15, 2**36 + 1]])
    made = source.normal_at(rows, starts, width)
    assert made.dtype == np.float32
    assert made.tobytes() == one_by_one(NoiseSource(KEY), rows, starts, width).tobytes()


@pytest.mark.parametrize("name", KERNELS)
def test_rare_radii_have_the_bits_of_their_own_row(name):
    """Blocks whose radius needs further bits: those come from a block of the same row."""
    source, width = NoiseSource(KEY, 20, kernel=name), 4096
    rows, starts = np.arange(256) * 2**33 + 5, np.arange(256) * 16
    made = source.normal_at(rows, starts, width)
    pairs = made.reshape(-1, 2, 8)
    assert (np.hypot(pairs[:, 0], pairs[:, 1]) > 4.7097).sum() > 3  # u < 2^-16: further bits were asked for
    assert made.tobytes() == one_by_one(NoiseSource(KEY, 20), rows, starts, width).tobytes()


@pytest.mark.parametrize("name", KERNELS)
def test_renewed_rows_come_from_their_own_key(name):
    source = NoiseSource(KEY, kernel=name).renewed(10, b"n" * 16).renewed(20, b"m" * 16)
    rows, starts = np.array([25, 3, 12, 19, 20, 9, 10]), np.arange(7) * 11
    assert source.normal_at(rows, starts, 21).tobytes() == one_by_one(source, rows, starts, 21).tobytes()


def test_nothing_is_an_empty_array():
    source = NoiseSource(KEY)
    assert source.normal_at([], [], 5).shape == (0, 5)
    assert source.normal_at([1, 2], [3, 4], 0).shape == (2, 0)


@pytest.mark.parametrize(
    ("rows", "starts", "width", "message"),
    [
        ([-1], [0], 1, "rows must lie in"),
        ([2**63], [0], 1, "rows must lie in"),
        ([0], [2**62], 1, "starts must lie in"),
        ([0], [-5], 1, "starts must lie in"),
        ([0], [0, 1], 1, "equally many"),
        ([0.5], [0], 1, "integers"),
        ([[0]], [0], 1, "integers"),
        ([0], [0], -1, "width"),
    ],
)
def test_arguments_out_of_their_rules(rows, starts, width, message):
    with pytest.raises(ArgumentError, match=message):
        NoiseSource(KEY).normal_at(rows, starts, width)
