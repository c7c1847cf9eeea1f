"""The transform scanned over its inputs against float64: a wrong constant shows here long before it does in samples."""

import functools

import numpy as np
import pytest

from anyorder.noise import normals

TOP = 2**32
RANDOM = np.random.default_rng(0)  # inputs of a scan, no noise


def _unused(columns):
    raise AssertionError(f"extension asked for columns {columns}")


def _transform(radius_words, angle_words, more=None):
    """(cosine parts, sine parts), flat; more (2, N): the two further words of every radius."""
    size = len(radius_words)
    words = np.empty((16, -(-size // 8)), np.uint32)  # eight inputs to a column
    words[:8] = np.resize(radius_words, 8 * words.shape[1]).reshape(-1, 8).T
    words[8:] = np.resize(angle_words, 8 * words.shape[1]).reshape(-1, 8).T

    def further(columns):
        extension = np.full((16, words.shape[1]), 0xDEADBEEF, np.uint32)
        for half in (0, 1):
            extension[half::2] = np.resize(more[half], 8 * words.shape[1]).reshape(-1, 8).T
        return extension[:, columns]

    before = words.copy()
    result = normals.box_muller(words, _unused if more is None else further)
    assert (words == before).all()
    assert result.dtype == np.float32
    return result[:8].T.reshape(-1)[:size], result[8:].T.reshape(-1)[:size]


def _exact_radius(words, more=(0, 0)):
    w = words.astype(np.float64)
    first, second = (np.asarray(half, np.float64) for half in more)
    tail = w / TOP + (first + second / TOP) / 2.0**64
    u = np.where(words < 2**16, np.maximum(tail, 2.0**-96), w / TOP)
    return np.sqrt(-2 * np.where(w < TOP / 2, np.log(u), np.log1p((np.maximum(w, 1) - TOP) / TOP)))


def _exact_angle(words):
    low = (words % 2**30).astype(np.float64)
    return np.pi / 2 * (words // 2**30 + low / 2**30 - (low >= 2**29))


def _near(points, reach):
    return (np.asarray(points, np.int64)[:, None] + np.arange(-reach, reach + 1)).ravel()


@functools.cache
def radii():
    words = np.unique(
        np.concatenate(
            [
                np.arange(2**16, TOP, 4093),
                _near(2 ** np.arange(16, 33), 500),
                _near(TOP * np.sqrt(0.5) / 2 ** np.arange(17), 500),
                np.arange(TOP - 2**15, TOP),
            ]
        )
    )
    return words[(words >= 2**16) & (words < TOP)].astype(np.uint32)


@functools.cache
def angles():
    words = np.concatenate([np.arange(0, TOP, 16_381), _near(np.arange(0, TOP, 2**29), 500) % TOP])
    return np.unique(words).astype(np.uint32)


def test_radius_over_all_magnitudes():
    words = radii()
    radius, zero = _transform(words, np.zeros_like(words))  # angle 0: cosine 1, sine 0
    exact = _exact_radius(words)
    assert not zero.any()
    assert (radius > 0).all()
    assert np.abs(radius - exact).max() < 5e-7
    assert np.abs(radius / exact - 1).max() < 2e-7
    assert radius[-1] == pytest.approx(np.sqrt(2.0**-31), rel=1e-6)  # a 24-bit uniform would give 0


@pytest.mark.parametrize("kind", ["zeros", "ones", "random"])
def test_radius_over_every_word_that_is_extended(kind):
    words = np.arange(2**16, dtype=np.uint32)
    more = {
        "zeros": np.zeros((2, 2**16), np.uint32),
        "ones": np.full((2, 2**16), TOP - 1, np.uint32),
        "random": RANDOM.integers(0, TOP, (2, 2**16), dtype=np.uint32),
    }[kind]
    radius, _ = _transform(words, np.zeros_like(words), more)
    exact = _exact_radius(words, more)
    assert np.abs(radius - exact).max() < 6e-7
    assert np.abs(radius / exact - 1).max() < 2e-7
    assert (np.diff(radius) <= 0).all() or kind == "random"


def test_radius_of_the_smallest_extended_words():
    more = np.array([[0, 0, 0, 1, 2**31, TOP - 1, 0, 0], [0, 1, TOP - 1, 0, 0, 0, 7, 2**20]], np.uint32)
    words = np.zeros(8, np.uint32)
    radius, _ = _transform(words, words, more)
    exact = _exact_radius(words, more)
    assert np.abs(radius - exact).max() < 6e-7
    assert radius[0] == radius[1] == radius.max()  # 0 is taken for 2^-96
    assert radius[0] == pytest.approx(np.sqrt(2 * 96 * np.log(2)), rel=2e-7)


def test_angle_over_all_quadrants():
    one = np.full_like(angles(), round(TOP * np.exp(-0.5)))  # radius 1
    radius = _exact_radius(one)
    cosine, sine = _transform(one, angles())
    angle = _exact_angle(angles())
    assert np.abs(cosine - radius * np.cos(angle)).max() < 1.5e-7
    assert np.abs(sine - radius * np.sin(angle)).max() < 1.5e-7


def test_a_quarter_turn_is_exact():
    one = np.full_like(angles(), 12345678)
    cosine, sine = _transform(one, angles())
    turned_cosine, turned_sine = _transform(one, angles() + np.uint32(2**30))
    assert (turned_cosine == -sine).all()
    assert (turned_sine == cosine).all()


def test_normals_of_random_words_are_within_2e_6():
    """Every word at its own place: radius j with angle 8 + j, and the extension words 2j, 2j + 1."""
    words = RANDOM.integers(0, TOP, (16, 20_000), dtype=np.uint32)
    words[:8, ::7] >>= RANDOM.integers(0, 33, words[:8, ::7].shape, dtype=np.uint32).clip(max=31)
    more = RANDOM.integers(0, TOP, words.shape, dtype=np.uint32)
    made = normals.box_muller(words, lambda columns: more[:, columns])
    radius = _exact_radius(words[:8], (more[0::2], more[1::2]))
    angle = _exact_angle(words[8:])
    exact = np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])
    assert np.abs(made - exact).max() < 2e-6
    assert np.abs(exact).max() > 7  # beyond what 32 bits reach
    asked = []
    normals.box_muller(words, lambda columns: (asked.append(columns), more[:, columns])[1])
    assert set(np.concatenate(asked)) == set(np.flatnonzero((words[:8] < 2**16).any(axis=0)))


def test_golden_bits():
    """The layout is final: these bits never change."""
    words = np.array([[0x9E3779B9 * (i + 1) * (column + 1) % TOP for column in range(2)] for i in range(16)], np.uint32)
    words[0] = 0x00000003, 0xFFFFFFFF
    extension = np.array([0x12345678 * (i + 3) % TOP for i in range(16)], np.uint32)[:, None]
    made = normals.box_muller(words, lambda columns: extension[:, : len(columns)])
    assert [" ".join(f"{bits:08x}" for bits in column) for column in made.view(np.uint32).T] == [
        "c0bfc15f 3fc4fea4 3e2c1da1 3f1d4285 40091e8a bf2df76a be44f6ed be5f7a70 "
        "c01e4ec2 bf385ee4 bf092edb 3f87ae55 3ef1298e 3ef49c3b 3fbdfec9 be8494a6",
        "37804fd4 bf48f32e bf2e8f9f 3e2c68f6 3fd711be bee56172 bf64c184 3da8a31d "
        "377f5ff3 3f70ce1f bef2e8f8 be967070 3f46bc25 3f9f6f25 be713281 bef55018",
    ]
