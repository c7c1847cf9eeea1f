"""The noise in torch operations: the bits of the NumPy reference, for rows and for parts of steps."""

import itertools

import numpy as np
import pytest
import torch

from anyorder.noise import NoiseSource, normals, torch_path
from laws.cases import STRATEGIES
from noise.steps import Steps, steps

KEY = bytes(range(32))
SOURCE = NoiseSource(KEY)
PIECE = 2**16  # elements that the backend makes at once on a CPU
RANDOM = np.random.default_rng(0)  # inputs, no noise


def normal(source, row, start, stop, device=torch.device("cpu")):
    made = [torch_path.normal_piece(source, row, *piece, device) for piece in torch_path.pieces(start, stop, device)]
    return torch.cat([torch.empty(0, device=device), *made])


def test_normals_are_those_of_the_reference():
    for rounds, row in itertools.product((8, 12, 20), (0, 7, 2**32, 2**63 - 1)):
        source = NoiseSource(KEY, rounds)
        for start in (0, 5, 2**36 - 21, 2**40 + 3, 2**62 - 40):  # 2^36: the counter's second word
            made = normal(source, row, start, start + 40)
            assert made.dtype == torch.float32
            assert made.numpy().tobytes() == source.normal(row, start, start + 40).tobytes()


@pytest.mark.parametrize("start", [0, 2**40 + 3])
def test_a_million_normals_with_rare_radii(start):
    counters = np.arange(start // 16, (start + 2**20) // 16, dtype=np.uint64)
    blocks = normals.blocks(SOURCE.key_words, counters, 3, 8)
    assert (blocks[:8] < 2**16).sum() >= 4  # else the extension would not be tested
    assert normal(SOURCE, 3, start, start + 2**20).numpy().tobytes() == SOURCE.normal(3, start, start + 2**20).tobytes()


def test_any_split_gives_the_same_bits():
    total = PIECE + 77
    whole = normal(SOURCE, 5, 0, total)
    edges = [0, 1, 15, 16, 17, PIECE - 1, PIECE, PIECE + 1, total]
    for start, stop in [(a, b) for a in edges for b in edges if a <= b]:
        assert torch.equal(normal(SOURCE, 5, start, stop), whole[start:stop])


def test_transform_of_extreme_words():
    """Radii at every power of two and where u is 1 and sqrt(1/2), angles at the quadrants, extensions of 0 and 1."""
    powers = 2 ** np.arange(33, dtype=np.int64)
    edges = np.concatenate([powers - 1, powers, powers + 1, 0xB504F300 + np.arange(-400, 400, 7)])
    edges = np.unique(np.clip(edges, 0, 2**32 - 1))
    words = RANDOM.choice(edges, (16, 20_000)).astype(np.uint32)
    words[8:] ^= RANDOM.choice(np.array([0, 1, 2**29, 2**30, 2**31], np.uint32), (8, 20_000))
    more = RANDOM.choice(np.array([0, 1, 2**31, 2**32 - 1], np.uint32), words.shape)
    signed = torch.from_numpy(more.view(np.int32))
    made = torch_path._transform(torch.from_numpy(words.view(np.int32)), lambda columns: signed[:, columns])
    exact = normals.box_muller(words, lambda columns: more[:, columns])
    assert made.numpy().tobytes() == exact.tobytes()
    assert np.abs(exact).max() > 11


def test_root_is_correctly_rounded_for_every_significand():
    bits = np.arange(0x3F800000, 0x40800000, dtype=np.int32)  # 1 to 4: the others differ by a power of four
    values = bits.view(np.float32)
    assert np.array_equal(torch_path._root(torch.from_numpy(values)).numpy(), np.sqrt(values))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("scale", [1.0, 1 / 24])
def test_sum_and_product_are_rounded_before_the_type(dtype, scale):
    gradient, noise = (torch.from_numpy(RANDOM.standard_normal(1000, np.float32)) for _ in range(2))
    out = gradient.to(dtype)
    before = out.clone()
    torch_path.add(out, noise, scale)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    assert torch.equal(out, ((before.to(wide) + noise) * torch.tensor(scale, dtype=wide)).to(dtype))


def test_parts_of_a_range_make_up_the_whole():
    """As tensors of one model, or shards of one vector: every piece with its own part of the state."""
    edges, size, start = [0, 1, 5, 5, 997, PIECE + 50], PIECE + 50, 2**36 - 7

    def part(strategy, low, high, most):
        path = torch_path.TorchPath(SOURCE, np.float32(1.5), start + low, high - low, "cpu")
        return Steps(path, strategy, high - low, most)

    for name in ("blt", "tree online", "dense"):
        strategy = STRATEGIES[name](3)
        exact, _ = steps(strategy, SOURCE, size, start)
        whole = part(strategy, 0, size, 9)
        shards = [part(strategy, low, high, 0) for low, high in itertools.pairwise(edges)]
        for noise in exact:
            assert whole.next().tobytes() == noise.tobytes(), name
            assert np.concatenate([shard.next() for shard in shards]).tobytes() == noise.tobytes(), name


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_bits_on_cuda():
    for rounds in (8, 12, 20):
        source = NoiseSource(KEY, rounds)
        made = normal(source, 2**40 + 1, 2**40 + 3, 2**40 + 2**24, torch.device("cuda")).cpu()
        assert made.numpy().tobytes() == source.normal(2**40 + 1, 2**40 + 3, 2**40 + 2**24).tobytes()
