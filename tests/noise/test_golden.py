"""Golden digests of streamed noise: the bits of a run never change, whatever is rebuilt underneath.

Each strategy is of numbers that are written here, so that no fit and no machine moves them.
"""

import hashlib
import itertools

import numpy as np
import pytest
import torch

from anyorder.noise import NoiseSource, NoiseStream
from anyorder.noise.discrete import GridStream
from anyorder.strategy import BLT, Banded, BandedInverse, Dense, Independent, ToeplitzBanded, Tree
from anyorder.strategy.rescaled import Rescaled
from anyorder.strategy.restarted_blt import RestartedBLT

KEY, N, SIZE, START, STD = bytes(range(32)), 6, 40_003, 2**36 - 5, 1.7  # two chunks of a thread, odd ends
STRATEGIES = {
    "independent": Independent(N),
    "blt": BLT([0.99, 0.9, -0.25], [0.25, 0.125, 0.0625], N),
    "restarted blt": RestartedBLT([[0.9, 0.5]] * 2, [[0.25, 0.125]] * 2, [0.5] * 2, [1.0, 0.75], N, 3),
    "toeplitz banded": ToeplitzBanded([1.125, 0.5, 0.25, 0.125], N),
    "banded": Banded([[1.0] * N, [0.5] * (N - 1) + [0.0], [0.25] * (N - 2) + [0.0] * 2]),
    "banded inverse": BandedInverse([1.0, -0.625, 0.25], N),
    "rescaled": Rescaled(BLT([0.875], [0.25], N), [0.5, 0.75, 1.0, 1.25, 1.5, 1.75]),
    "dense": Dense(np.tri(N)),
    "tree": Tree(N),
    "tree, online": Tree(N, "online"),
    "tree, full": Tree(N, "full"),
    "tree, regenerated": Tree(N, regenerate=True),
}
GOLDEN = {
    "independent": "bb187f9a22041d6edd76661846fefcb3",
    "blt": "b87aaaf0da52d6fc65b464019e7d4c3a",
    "restarted blt": "d31ddcbf8cb233360e48a4edfbe53924",
    "toeplitz banded": "aef510422fd836676bca5543c074827c",
    "banded": "a505616d28a945a6ec3c5e322c840716",
    "banded inverse": "90c9875b6ecdf24d0eb87ea428b39a98",
    "rescaled": "6576800d1d7b9725d26f4872588905a4",
    "dense": "b8e64c8c2831265283a3630b07bd9691",
    "tree": "4f1f688d3f94198e7f6d4e85fd449883",
    "tree, online": "ea9564585f317b01437213c353a8ae17",
    "tree, full": "08002474e5dc4a5aab8feb29733fab9a",
    "tree, regenerated": "4f1f688d3f94198e7f6d4e85fd449883",
    "float32": "fc5ef388d36316025870b0480f2e9e25",
    "bfloat16": "cff1bdd75d8816e7d78942f506485805",
    "float16": "b16cfeb0739191a30969c1f774ab1287",
    "float64": "6dda83dc7b8dea79ba547b4c943d0565",
    "rows": "bfddd9c5b4213d99985620c2116fa3c8",
    "grid": "d1c94f98e5d89b30d33ae08368a92e2b",
}


def _digest(parts):
    return hashlib.blake2b(b"".join(part.tobytes() for part in parts), digest_size=16).hexdigest()


def _made(strategy, cuts=(0, SIZE), kernel="best", memory=None, rounds=8):
    """All steps and the last state, in these shards."""
    source = NoiseSource(KEY, rounds, kernel=kernel)
    shards = [
        NoiseStream(strategy, source, STD, b - a, start=START + a, memory=memory) for a, b in itertools.pairwise(cuts)
    ]
    noise = [np.concatenate([shard.next() for shard in shards]) for _ in range(N)]
    states = zip(*(shard.state_dict()["state"] for shard in shards), strict=True)
    return noise + [np.concatenate(parts) for parts in states]


@pytest.mark.parametrize("name", STRATEGIES)
def test_streams(name, monkeypatch):
    """Whole, in parts, with memory for rows, by NumPy, in one thread and in three."""
    strategy = STRATEGIES[name]
    made = [_made(strategy), _made(strategy, (0, 7, 20_000, SIZE), memory="4MB"), _made(strategy, kernel="reference")]
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        made.append(_made(strategy))
    finally:
        torch.set_num_threads(before)
    assert {_digest(parts) for parts in made} == {GOLDEN[name]}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64"])
def test_added_to_tensors(dtype):
    """Of every type, with a scale and without, contiguous and not; by the kernel and by NumPy."""
    for kernel in ("best", "reference"):
        stream, parts = NoiseStream(STRATEGIES["blt"], NoiseSource(KEY, 12, kernel=kernel), STD, 3003, start=START), []
        for scale in (1.0, 1 / 24):
            ramp = (torch.arange(6006, dtype=torch.float64) / 1024).to(getattr(torch, dtype))
            tensors = [ramp[:2000].view(40, 50), ramp[2000:4006:2]]
            stream.add_to(tensors, scale)
            parts += [x.contiguous().view(-1).view(torch.uint8).numpy() for x in tensors]
        assert _digest(parts) == GOLDEN[dtype]


def test_rows_of_tables_and_exact_integers():
    stream = NoiseStream(STRATEGIES["tree, regenerated"], NoiseSource(KEY), STD, 1000, start=START)
    assert _digest([stream.rows(t, [3, 97, 0], 10) for t in range(N)]) == GOLDEN["rows"]
    grid = GridStream(STRATEGIES["tree"], NoiseSource(KEY), STD, 2.0**-20, 1000, start=77)
    assert _digest([grid.next() for _ in range(N)]) == GOLDEN["grid"]
