"""NoiseSource: a pure function of key, row and element, by the layout and no other."""

import hashlib

import numpy as np
import pytest

from anyorder.errors import ArgumentError
from anyorder.noise import NoiseSource, normals
from noise import oracle

KEY = bytes(range(32))
SOURCE = NoiseSource(KEY)
CHUNK = 16 * 4096  # elements that the reference makes at once


@pytest.mark.parametrize("rounds", [8, 12, 20])
def test_elements_are_those_of_the_layout(rounds):
    source = NoiseSource(KEY, rounds)
    for row in (0, 1, 2**32, 2**63 - 1):
        for start in (0, 5, 2**36 - 3, 2**40 + 11):  # 2^36: the counter's second word
            made = source.normal(row, start, start + 40)
            exact = [oracle.normal(KEY, rounds, row, element) for element in range(start, start + 40)]
            np.testing.assert_allclose(made, exact, rtol=0, atol=1e-6)


def test_raw_words_are_those_of_the_layout():
    made = SOURCE.words(9, 2**36 - 20, 2**36 + 20).tolist()
    for i, word in enumerate(made, start=2**36 - 20):
        assert word == oracle.block(KEY, i // 16 + 2**62, 9, 8)[i % 16]


def test_rare_radii_take_their_bits_from_the_extension_block():
    made = SOURCE.normal(3, 0, 2**20)
    blocks = normals.blocks(SOURCE.key_words, np.arange(2**16, dtype=np.uint64), 3, 8)  # the oracle is slow
    positions, hit = np.nonzero(blocks[:8] < 2**16)
    assert len(hit) >= 4
    for j, block in zip(positions, hit, strict=True):
        for element in (16 * int(block) + int(j), 16 * int(block) + int(j) + 8):
            assert made[element] == pytest.approx(oracle.normal(KEY, 8, 3, element), abs=1e-6)


def test_extension_reaches_beyond_6_sigma(monkeypatch):
    """A keystream that is zero in one radius word: what the extension says decides, up to 11.5 sigma."""
    asked = []

    def planted(key, counters, row, rounds):
        words = np.full((16, len(counters)), 2**31, np.uint32)
        words[8:] = 0  # angle 0: the normal is the radius
        if (counters >= 2**63).any():
            asked.append((row, counters.tolist()))
            words[6], words[7] = 2**20, 5
        else:
            words[3, counters == 70_001] = 0
        return words

    monkeypatch.setattr(normals, "blocks", planted)
    made = NoiseSource(KEY, kernel="reference").normal(4, 0, 16 * 80_000)
    assert asked == [(4, [2**63 + 70_001])]
    u = (2**20 + 5 / 2**32) / 2**64
    assert made[16 * 70_001 + 3] == pytest.approx(np.sqrt(-2 * np.log(u)), rel=2e-7)
    assert made[16 * 70_001 + 3] > 7.7
    assert (np.abs(made) > 5).sum() == 1


def test_any_split_gives_the_same_bits():
    total = 2 * CHUNK + 77
    whole = SOURCE.normal(5, 0, total)
    assert whole.dtype == np.float32
    generator = np.random.default_rng(1)
    edges = [0, 1, 15, 16, 17, CHUNK - 1, CHUNK, CHUNK + 1, total]
    cuts = [(int(a), int(b)) for a, b in np.sort(generator.integers(0, total, (40, 2)), axis=1)]
    cuts += [(a, b) for a in edges for b in edges if a <= b]
    generator.shuffle(cuts)
    raw = SOURCE.words(5, 0, total)
    for start, stop in cuts:
        assert SOURCE.normal(5, start, stop).tobytes() == whole[start:stop].tobytes()
        assert SOURCE.words(5, start, stop).tobytes() == raw[start:stop].tobytes()
    assert NoiseSource(KEY).normal(5, 0, total).tobytes() == whole.tobytes()


def test_empty_range():
    for start in (0, 5, 16, 2**40):
        assert SOURCE.normal(0, start, start).shape == (0,)
        assert SOURCE.words(0, start, start).dtype == np.uint32


def test_result_is_a_fresh_array():
    first = SOURCE.normal(0, 0, 100)
    first[:] = 0
    assert SOURCE.normal(0, 0, 100).all()


def test_key_row_rounds_and_label_matter():
    made = [
        SOURCE.normal(0, 0, 64),
        SOURCE.normal(1, 0, 64),
        SOURCE.normal(2**32, 0, 64),
        SOURCE.normal(0, 64, 128),
        NoiseSource(KEY, 12).normal(0, 0, 64),
        NoiseSource(KEY[::-1]).normal(0, 0, 64),
        SOURCE.derive(b"").normal(0, 0, 64),
        SOURCE.derive(b"sampler").normal(0, 0, 64),
        SOURCE.derive(b"sampler").derive(b"sampler").normal(0, 0, 64),
        NoiseSource.random().normal(0, 0, 64),
        NoiseSource.random().normal(0, 0, 64),
    ]
    assert not any((a == b).any() for i, a in enumerate(made) for b in made[:i])
    assert SOURCE.derive(b"sampler").normal(0, 0, 64).tobytes() == made[7].tobytes()
    assert NoiseSource(KEY, 20).derive(b"sampler").rounds == 20


def test_golden_bits():
    """The layout is final: these bits never change, whatever makes them."""
    digests = {
        8: "9937275c0614c60de0ec84a894b1664310dad7e76870412189f7ba8bf95c4f71",
        12: "048981d1b252d7b8e01ef8a976927de0d5c83f5a37be4949921b35ae7575196f",
        20: "27739ce4d196c091737199f02245f8be2409df2a9c28335123a8fdb9d83e5e49",
    }
    for rounds, digest in digests.items():
        made = NoiseSource(KEY, rounds).normal(7, 2**40 + 3, 2**40 + 2**20)
        assert hashlib.sha256(made.astype("<f4").tobytes()).hexdigest() == digest
    words = hashlib.sha256(SOURCE.words(7, 2**40 + 3, 2**40 + 1000).astype("<u4").tobytes()).hexdigest()
    assert words == "db36bc8cdb9eaee1d070b26a96686383c74fe4d741e6846146c8081ca6f947fd"
    assert SOURCE.fingerprint() == "d476409068aa2ce7e69d3843441fc84c"
    assert SOURCE.derive(b"x").key.hex() == "c6f32c034be46643bd358a8416b1b28f1a736dbbcfe8411dd3519f85a9e9f9fe"


def test_renewed_rows_come_of_fresh_keys_and_the_others_stay():
    once = SOURCE.renewed(5, b"1" * 16)
    twice = once.renewed(8, b"2" * 16)
    for made in ("normal", "words"):
        rows = {
            name: [getattr(source, made)(row, 3, 70).tobytes() for row in range(10)]
            for name, source in {
                "own": SOURCE,
                "once": once,
                "twice": twice,
                "other": SOURCE.renewed(5, b"3" * 16),
            }.items()
        }
        assert rows["once"][:5] == rows["twice"][:5] == rows["other"][:5] == rows["own"][:5]
        assert rows["twice"][:8] == rows["once"][:8]
        assert len({*rows["own"], *rows["once"], *rows["twice"], *rows["other"]}) == 10 + 5 + 2 + 5
    assert twice.own.fingerprint() == SOURCE.fingerprint()
    assert len({source.fingerprint() for source in (SOURCE, once, twice, SOURCE.renewed(6, b"1" * 16))}) == 4
    label = twice.derive(b"sampling")
    assert label.words(4, 0, 8).tobytes() == SOURCE.derive(b"sampling").words(4, 0, 8).tobytes()
    assert label.words(8, 0, 8).tobytes() == twice.of(8).derive(b"sampling").words(8, 0, 8).tobytes()
    assert twice.of_all([5, 6, 7]).key == once.of(9).key
    assert twice.of_all([4, 5]) is None
    with pytest.raises(ArgumentError, match="row must be"):
        twice.renewed(7, b"4" * 16)
    with pytest.raises(ArgumentError, match="nonce must be 16 bytes"):
        SOURCE.renewed(0, b"4" * 15)


def test_random_keys_are_of_the_operating_system(monkeypatch):
    monkeypatch.setattr("os.urandom", lambda size: b"u" * size)
    assert NoiseSource.random(12).key == b"u" * 32


def test_fingerprint_and_repr_hide_the_key():
    source = NoiseSource(b"secret key of thirty-two bytes..")
    assert source.fingerprint() == NoiseSource(source.key).fingerprint()
    assert source.fingerprint() != NoiseSource(source.key, 20).fingerprint() != SOURCE.fingerprint()
    for text in (repr(source), str(source), source.fingerprint()):
        assert "secret" not in text
        assert source.key.hex()[:8] not in text
    assert source.derive(b"layout 1, ChaCha8").key.hex()[:32] != source.fingerprint()


@pytest.mark.parametrize("key", [b"", b"k" * 31, b"k" * 33, "k" * 32, bytearray(32), None, 32])
def test_bad_key(key):
    with pytest.raises(ArgumentError, match="key must be 32 bytes") as caught:
        NoiseSource(key)
    assert "kkk" not in str(caught.value)


@pytest.mark.parametrize("rounds", [0, 7, 9, 16, 21, 8.0, True, "8"])
def test_bad_rounds(rounds):
    with pytest.raises(ArgumentError, match="rounds must be"):
        NoiseSource(KEY, rounds)


@pytest.mark.parametrize("method", ["normal", "words"])
@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ((-1, 0, 1), "row"),
        ((2**63, 0, 1), "row"),
        ((0.0, 0, 1), "row"),
        ((0, -1, 1), "start"),
        ((0, 5, 4), "stop"),
        ((0, 0, 2**62 + 1), "stop"),
        ((0, 0, 1.5), "stop"),
    ],
)
def test_bad_range(method, arguments, name):
    with pytest.raises(ArgumentError, match=f"{name} must be an integer"):
        getattr(SOURCE, method)(*arguments)


def test_bad_label():
    with pytest.raises(ArgumentError, match="label must be bytes"):
        SOURCE.derive("sampler")
