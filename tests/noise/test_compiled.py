"""The compiled kernel: on every instruction set, from any thread, the bits of the NumPy reference."""

import os
import sys
import warnings

import numpy as np
import pytest

from anyorder.errors import ArgumentError, NoiseWarning
from anyorder.noise import NoiseSource, NoiseStream, compiled, normals
from anyorder.noise.program import NONE, OP, TERM, Operation, Program, execute
from anyorder.strategy import Independent
from laws.cases import over
from noise.test_chacha import KEYSTREAMS

KEY = bytes(range(32))
TOP = 2**32
RANDOM = np.random.default_rng(3)  # inputs of a scan, no noise


def _paths():
    for name in compiled.PATHS:
        try:
            found = compiled.kernel(name)
        except ArgumentError as error:
            reason = str(error)
            if "does not run on this processor" not in reason and os.environ.get("ANYORDER_NEEDS_KERNEL"):
                raise
            yield pytest.param(None, id=name, marks=pytest.mark.skip(reason))
        else:
            assert found is not None, f"the {name} kernel gives other bits than the reference"
            yield pytest.param(found, id=name)


needs_library = pytest.mark.skipif(compiled._library() is None, reason="the kernel was not built here")
every_path = pytest.mark.parametrize("kernel", list(_paths()))


@every_path
@pytest.mark.parametrize("rounds", [8, 12, 20])
def test_rows_and_words_are_those_of_the_reference(kernel, rounds):
    reference = NoiseSource(KEY, rounds, kernel="reference")
    ranges = [(2**36 - 37, 5000), (2**40 + 3, 70_001), (2**62 - 100, 100), (0, 1), (15, 2), (16, 16), (7, 0)]
    ranges += [(int(RANDOM.integers(2**61)), int(RANDOM.integers(3000))) for _ in range(5)]
    for i, (start, size) in enumerate(ranges):
        row = [0, 1, 2**32 - 1, 2**32, 2**63 - 1, int(RANDOM.integers(2**62))][i % 6]
        for make, dtype in ((reference.normal, np.float32), (reference.words, np.uint32)):
            made = np.empty(size, dtype)
            kernel.fill(reference.key_words, rounds, row, start, made, threads=1 + i % 3)
            assert made.tobytes() == make(row, start, start + size).tobytes(), (row, start, size)


@every_path
def test_extension_blocks_of_a_long_row(kernel):
    """2^20 elements have about eight radii that ask for further bits."""
    reference = NoiseSource(KEY, kernel="reference")
    made = np.empty(2**20, np.float32)
    kernel.fill(reference.key_words, 8, 3, 0, made)
    blocks = normals.blocks(reference.key_words, np.arange(2**16, dtype=np.uint64), 3, 8)
    assert (blocks[:8] < 2**16).sum() >= 4
    assert made.tobytes() == reference.normal(3, 0, 2**20).tobytes()


# Programs for arrays ~0 .. ~19 and tiles 0 .. 2. Terms: (operand, factor).
GAUSS, LINEAR, LEAK, DIVIDE = Operation.GAUSS, Operation.LINEAR, Operation.LEAK, Operation.DIVIDE


def _recurrence(m, dst=0, base=0, first=0):
    terms = [(~(first + k), 0.1 - 0.3 * k / m) for k in range(m)]
    return [(LINEAR, dst, base, terms), *((LEAK, x, x, dst, -0.5 - c) for x, c in terms)]


def _swapped(ops, i, j):
    ops = list(ops)
    ops[i], ops[j] = ops[j], ops[i]
    return ops


ROW, OTHER = (GAUSS, 0, None, 1, 7), (GAUSS, 1, 0, -0.5, 2**40)
PROGRAMS = {
    **{f"recurrence of {m}": ([ROW, *_recurrence(m)], 0) for m in (1, 2, 4, 7, 16)},
    "into an array": ([ROW, *_recurrence(3, dst=~5)], ~5),
    "without a base": ([ROW, *_recurrence(3, base=None)], 0),
    "in the middle": ([ROW, *_recurrence(2), (DIVIDE, 0, 0, 1.7), OTHER], 1),
    "two": ([ROW, *_recurrence(2), *_recurrence(3, dst=1, first=2)], 1),
    "another order": ([ROW, *_swapped(_recurrence(3), 1, 2)], 0),
    "one leak missing": ([ROW, *_recurrence(3)[:-1]], 0),
    "the same array twice": (
        [ROW, (LINEAR, 0, 0, [(~0, 0.3), (~0, 0.2)]), (LEAK, ~0, ~0, 0, -0.5), (LEAK, ~0, ~0, 0, -0.25)], 0
    ),
    "of the base": ([ROW, (LINEAR, 0, ~0, [(~0, 0.3)]), (LEAK, ~0, ~0, 0, -0.5)], 0),
    "of the sum": ([ROW, (LINEAR, ~0, 0, [(~0, 0.3)]), (LEAK, ~0, ~0, ~0, -0.5)], ~0),
    "from elsewhere": ([ROW, (LINEAR, 1, 0, [(~0, 0.3)]), (LEAK, ~0, ~0, 0, -0.5)], 1),
    "to elsewhere": ([ROW, (LINEAR, 1, 0, [(~0, 0.3)]), (LEAK, ~1, ~0, 1, -0.5)], 1),
    "not the last": ([ROW, (LINEAR, ~0, 0, [(~1, 0.5)])], 0),
    "its state": ([ROW, *_recurrence(2)], ~1),
    "ring": ([ROW, (LINEAR, ~14, 0, [(~k, 0.1 * k - 0.4) for k in range(15)])], ~14),
    "ring, divided": ([ROW, (LINEAR, 0, 0, [(~1, 0.2), (~0, -0.4)]), (DIVIDE, ~1, 0, 0.3)], ~1),
    "row times a factor": ([(GAUSS, 0, None, 0.3, 7)], 0),
    "row kept": ([(GAUSS, ~0, None, 1, 7)], ~0),
    "two rows, kept": ([ROW, (GAUSS, ~0, 0, 0.3, 8)], ~0),
    "two rows": ([ROW, OTHER], 1),
    "copy": ([ROW, (LINEAR, 1, ~3, [])], 1),
    "zeros": ([ROW, (LINEAR, 1, None, [])], 1),
    "an array": ([], ~2),
}  # fmt: skip


def _interpreted(ops, arrays, row):
    """The operations one after another, each over the whole vector."""
    at = {~i: array.copy() for i, array in enumerate(arrays)}
    for kind, dst, a, *rest in ops:
        if kind == GAUSS:
            z = row(rest[1]) * np.float32(rest[0])
            at[dst] = z if a is None else at[a] + z
        elif kind == LEAK:
            at[dst] = at[a] + (at[rest[0]] + at[a] * np.float32(rest[1]))
        elif kind == DIVIDE:
            at[dst] = at[a] / np.float32(rest[0])
        else:
            parts = [at[x] * np.float32(c) for x, c in rest[0]]
            parts = parts if a is None else [at[a], *parts]
            total = parts[0] if parts else np.zeros_like(arrays[0])
            for part in parts[1:]:
                total = total + part
            at[dst] = total.copy()
    return at


def _compiled(ops, result):
    records, terms = [], []
    for kind, dst, a, *rest in ops:
        a = NONE if a is None else a
        if kind == GAUSS:
            records.append((kind, dst, a, NONE, rest[0], 0, rest[1]))
        elif kind == LEAK:
            records.append((kind, dst, a, rest[0], rest[1], 0, 0))
        elif kind == DIVIDE:
            records.append((kind, dst, a, NONE, rest[0], 0, 0))
        else:
            records.append((kind, dst, a, NONE, 1, len(rest[0]), len(terms)))
            terms += rest[0]
    return Program(np.array(records, OP), np.array(terms, TERM), 3, result)


@every_path
@over("name", PROGRAMS)
def test_programs_give_what_their_operations_give_one_by_one(kernel, name):
    """Whole tiles and parts of them, added at once or not: operations may be joined, the bits stay."""
    ops, result = PROGRAMS[name]
    reference = NoiseSource(KEY, kernel="reference")
    origin, length = 2**36 - 16 * 40, 4864  # the high words of the counters change on the way
    rows = {r: reference.normal(r, origin, origin + length) for r in (7, 8, 2**40)}
    arrays = [RANDOM.standard_normal(length).astype(np.float32) for _ in range(20)]
    expected = _interpreted(ops, arrays, rows.__getitem__)
    plain = [array.copy() for array in arrays]
    made = execute(_compiled(ops, result), rows.__getitem__, plain, lambda: np.zeros(length, np.float32), np.float32)
    assert made.tobytes() == expected[result].tobytes()
    assert [array.tobytes() for array in plain] == [expected[~i].tobytes() for i in range(len(arrays))]
    std = np.float32(1.3)
    for skip, size, scale in ((0, length, 1.0), (0, 4700, 1.0), (5, 4000, 1.0), (0, length, 0.375)):
        own, out = [array.copy() for array in arrays], np.full(size, 0.5, np.float32)
        kernel.run(
            reference.key_words, 8, _compiled(ops, result),
            np.array([(out.ctypes.data, origin + skip, size)], compiled.SEGMENT), np.zeros(1, np.int32),
            arrays=np.array([array.ctypes.data for array in own], np.uint64), origin=origin, std=float(std), add=True,
            scale=scale, threads=1,
        )  # fmt: skip
        noise = expected[result][skip:][:size]
        assert out.tobytes() == ((np.float32(0.5) + noise * std) * np.float32(scale)).tobytes()
        for i, array in enumerate(own):
            assert array[: skip + size].tobytes() == expected[~i][: skip + size].tobytes()


@every_path
@pytest.mark.parametrize(("key", "nonce", "rounds", "keystream"), KEYSTREAMS)
def test_published_keystreams(kernel, key, nonce, rounds, keystream):
    made, row = np.empty(32, np.uint32), int.from_bytes(bytes.fromhex(nonce), "little")
    ops = np.array([(Operation.WORDS, 0, NONE, NONE, 1, 0, row)], OP)  # counters from 0 on
    segments = np.array([(made.ctypes.data, 0, 32)], compiled.SEGMENT)
    kernel.run(
        np.frombuffer(bytes.fromhex(key), "<u4").astype(np.uint32), rounds,
        Program(ops, np.empty(0, TERM), 1, 0), segments, np.array([4], np.int32),
    )  # fmt: skip
    assert made.astype("<u4").tobytes().hex() == keystream


@every_path
def test_transform_scanned_with_a_stride(kernel):
    """Radius and angle words over their whole range, all magnitudes and quadrant edges. `slow` scans every word."""
    radii = np.concatenate([np.arange(0, TOP, 9973), *(_near(2**k) for k in range(33)), _near(TOP * 0.5**0.5)])
    angles = np.concatenate([np.arange(0, TOP, 9973), *(_near(k * 2**29) for k in range(9))])
    _compare(kernel, radii % TOP, angles % TOP)


@pytest.mark.slow
@pytest.mark.skipif(not os.environ.get("ANYORDER_FULL_SCAN"), reason="2^32 words a path; set ANYORDER_FULL_SCAN=1")
@pytest.mark.timeout(0)
@every_path
def test_transform_over_every_word(kernel):
    for low in range(0, TOP, 2**24):
        block = np.arange(low, low + 2**24)
        _compare(kernel, block, block[::-1])


def _near(point):
    return (int(point) + np.arange(-300, 300)) % TOP


def _compare(kernel, radii, angles):
    size = -(-max(len(radii), len(angles)) // 128) * 128
    words = np.empty((16, size // 8), np.uint32)
    words[:8] = np.resize(radii, size).astype(np.uint32).reshape(8, -1)
    words[8:] = np.resize(angles, size).astype(np.uint32).reshape(8, -1)
    further = RANDOM.integers(0, TOP, words.shape, dtype=np.uint32)
    further[:, ::3] >>= np.uint32(27)  # the least uniforms
    further[:, ::5] = 0
    expected = normals.box_muller(words, lambda columns: further[:, columns])
    np.testing.assert_array_equal(kernel.transform(words, further).view(np.uint32), expected.view(np.uint32))


def test_a_library_with_other_bits_is_refused(monkeypatch):
    compiled._checked.cache_clear()
    with monkeypatch.context() as patch:
        patch.setattr(normals, "TWO_LN2_LOW", normals.TWO_LN2_LOW * 1.001)
        assert compiled.kernel() is None
        assert NoiseSource(KEY).kernel is None
        assert "other bits" in compiled._missing()
    compiled._checked.cache_clear()


def test_names_of_kernels(monkeypatch):
    assert compiled.kernel("reference") is None
    with pytest.raises(ArgumentError, match="kernel must be one of"):
        NoiseSource(KEY, kernel="fast")
    monkeypatch.setenv("ANYORDER_KERNEL", "reference")
    assert NoiseSource(KEY).kernel is None
    monkeypatch.setenv("ANYORDER_KERNEL", "sse")
    with pytest.raises(ArgumentError, match="ANYORDER_KERNEL must be one of"):
        NoiseSource(KEY)
    monkeypatch.delenv("ANYORDER_KERNEL")
    monkeypatch.setattr(compiled, "_library", lambda: type("", (), {"anyorder_lanes": staticmethod(lambda: 0)}))
    with pytest.raises(ArgumentError, match="best is 'portable'"):
        compiled.kernel("avx2")


def test_without_the_library_the_same_noise_and_one_warning(monkeypatch):
    expected = NoiseStream(Independent(1), NoiseSource(KEY), 1.0, 1000).next()
    monkeypatch.setattr(compiled, "_library", lambda: None)
    monkeypatch.setattr(compiled, "_file", lambda: compiled.Path("nowhere/_kernel.so"))
    compiled._warn.cache_clear()
    made = NoiseStream(Independent(1), NoiseSource(KEY), 1.0, 1000).next()  # small: no warning
    assert made.tobytes() == expected.tobytes()
    with pytest.warns(NoiseWarning, match=r"no library .*C\+\+ compiler"):
        NoiseStream(Independent(1), NoiseSource(KEY), 1.0, 1 << 20)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        NoiseStream(Independent(1), NoiseSource(KEY), 1.0, 1 << 20)
    with pytest.raises(ArgumentError, match="not there: no library"):
        NoiseSource(KEY, kernel="portable")
    compiled._warn.cache_clear()


def test_whoever_asks_for_the_reference_is_not_warned(monkeypatch):
    monkeypatch.setenv("ANYORDER_KERNEL", "reference")
    compiled._warn.cache_clear()
    NoiseStream(Independent(1), NoiseSource(KEY), 1.0, 1 << 20)


def test_threads_follow_torch(monkeypatch):
    torch = pytest.importorskip("torch")
    assert compiled._threads() == torch.get_num_threads()
    monkeypatch.delitem(sys.modules, "torch")
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    assert compiled._threads() == 5
    monkeypatch.delenv("OMP_NUM_THREADS")
    assert compiled._threads() >= 1
    assert compiled.parallel() is None


@pytest.mark.parametrize("pool", [compiled.parallel, lambda: None], ids=["torch's pool", "threads of our own"])
@every_path
def test_many_threads_give_the_same_bits(kernel, pool, monkeypatch):
    """More threads than cores, and a range that begins and ends within blocks."""
    monkeypatch.setattr(compiled, "parallel", pool)
    reference = NoiseSource(KEY, kernel="reference")
    made = np.empty(300_001, np.float32)
    kernel.fill(reference.key_words, 8, 5, 11, made, threads=7)
    assert made.tobytes() == reference.normal(5, 11, 300_012).tobytes()


@needs_library
def test_a_library_of_other_sources_is_not_taken(monkeypatch):
    library = compiled._library.__wrapped__
    assert library() is not None
    monkeypatch.setattr(compiled, "NOISE_SOURCES", compiled.NOISE_SOURCES[::-1])
    assert library() is None


@needs_library
@pytest.mark.parametrize("fault", [{"add": False}, {"std": 0.0}, {"scale": 1.0}, {"rounds": 12}])
def test_a_kernel_that_reads_its_orders_wrongly_is_not_taken(fault, monkeypatch):
    found, run = compiled.kernel("portable"), compiled.Kernel.run

    def wrong(self, key, rounds, *args, **kwargs):
        kwargs = {**kwargs, **{name: value for name, value in fault.items() if name != "rounds"}}
        run(self, key, fault.get("rounds", rounds), *args, **kwargs)

    assert compiled._steps_agree(found)
    monkeypatch.setattr(compiled.Kernel, "run", wrong)
    assert not compiled._steps_agree(found)
