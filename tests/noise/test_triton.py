"""The Triton kernels: their bits under Triton's interpreter, and the operations of the code compiled for a GPU.

Triton decides when it is imported whether its kernels are interpreted, so the tests of the bits run in a process of
their own, with TRITON_INTERPRET=1.
"""

import os
import re
import subprocess
import sys

import numpy as np
import pytest
import torch

from anyorder.errors import ArgumentError
from anyorder.noise import NoiseSource, torch_backend

pytest.importorskip("triton", reason="the package triton is not installed; torch for CUDA brings it")

from anyorder.noise import triton_kernel

KEY = bytes(range(32))
SOURCE = NoiseSource(KEY)
RANDOM = np.random.default_rng(0)  # inputs, no noise
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
interpreted = pytest.mark.skipif(not INTERPRETED, reason="runs in the process of test_under_the_interpreter")
compiled = pytest.mark.skipif(INTERPRETED, reason="nothing is compiled under TRITON_INTERPRET=1")
on_cuda = pytest.mark.skipif(INTERPRETED or not torch.cuda.is_available(), reason="needs a CUDA device")
SCALE = 1 / 24


@compiled
def test_under_the_interpreter():
    command = [sys.executable, "-m", "pytest", __file__, "-p", "no:cacheprovider", "--no-header"]
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    assert int(re.search(r"(\d+) passed", done.stdout)[1]) >= 20


def _gradient(size, dtype=torch.float32, device="cpu"):
    return torch.from_numpy(RANDOM.standard_normal(size, np.float32)).to(device, dtype)


def _cut(total):
    """To bfloat16 as Triton's interpreter does it: without rounding. The compiled code rounds to nearest."""
    return (total.view(torch.int32) & -(1 << 16)).view(torch.float32).to(torch.bfloat16)


@interpreted
@pytest.mark.parametrize("rounds", [8, 12, 20])
@pytest.mark.parametrize(
    ("row", "start"), [(0, 0), (7, 5), (2**32, 2**36 - 21), (2**63 - 1, 2**40 + 3), (1, 2**62 - 40)]
)
def test_rows_are_those_of_the_reference(rounds, row, start):
    source, out = NoiseSource(KEY, rounds), torch.full((40,), -0.0)
    triton_kernel.combination(source, [row], [1.0], 1.0, start, out)
    assert out.numpy().tobytes() == source.normal(row, start, start + 40).tobytes()


@interpreted
def test_rare_radii(monkeypatch):
    """Programs of 4096 blocks, one in three with a rare radius: both ways through the branch."""
    monkeypatch.setattr(triton_kernel, "_BLOCKS", 4096)
    size = 16 * 4096 * 4
    blocks = SOURCE._blocks(3, np.arange(4096 * 4, dtype=np.uint64))
    rare = (blocks[:8] < 2**16).any(axis=0).reshape(4, 4096).any(axis=1)
    assert rare.any()
    assert not rare.all()
    out = torch.zeros(size)
    triton_kernel.combination(SOURCE, [3], [1.0], 1.0, 0, out)
    assert np.array_equal(out.numpy(), SOURCE.normal(3, 0, size))


@interpreted
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("start", "size"), [(0, 4096), (2**40 + 3, 2100), (31, 1)])
def test_combinations(dtype, start, size):
    gradient = _gradient(size, dtype)
    wide, out, exact = gradient.float(), gradient.clone(), gradient.clone()
    for kernels, result in ((triton_kernel, out), (torch_backend, exact), (torch_backend, wide)):
        kernels.combination(SOURCE, [2**63 - 1, 5, 2**32], [1.0, -0.3, 0.7], 2.3, start, result, SCALE)
    assert torch.equal(out, _cut(wide) if dtype == torch.bfloat16 else exact)


@interpreted
@pytest.mark.parametrize("num_buffers", [1, 4])
def test_blt(num_buffers):
    scales, losses = [0.1, 0.2, 0.3, -0.05][:num_buffers], [1e-9, 0.01, 0.1, 1.9][:num_buffers]
    _same_steps("blt", torch.zeros(num_buffers, 2500), lambda t: (scales, losses))


@interpreted
@pytest.mark.parametrize("num_bands", [1, 2, 4])
def test_banded(num_bands):
    bands = [0.5, -0.3, 0.2][: num_bands - 1]
    _same_steps("banded", torch.zeros(num_bands - 1, 2500), lambda t: (bands[:t], 1.3))


def _same_steps(name, state, arguments, device="cpu"):
    """Steps in three parts that meet within blocks, against the whole in torch."""
    exact, state = state.clone(), state.to(device)
    for t in range(6):
        gradient = _gradient(2500)
        out = gradient.to(device)
        for low, high in ((0, 1001), (1001, 1003), (1003, 2500)):
            rest = (state[:, low:high], 1.7, 2**36 - 5 + low, out[low:high], SCALE)
            getattr(triton_kernel, name)(SOURCE, t, *arguments(t), *rest)
        getattr(torch_backend, name)(SOURCE, t, *arguments(t), exact, 1.7, 2**36 - 5, gradient, SCALE)
        assert torch.equal(out.cpu(), gradient)
        assert torch.equal(state.cpu(), exact)
        assert out.any()


def test_other_types_are_refused():
    out = torch.zeros(4, dtype=torch.float64)
    with pytest.raises(ArgumentError, match="float32, bfloat16 or float16"):
        triton_kernel.combination(SOURCE, [0], [1.0], 1.0, 0, out)
    with pytest.raises(ArgumentError, match="the state must be"):
        triton_kernel.blt(SOURCE, 0, [0.1], [0.1], torch.zeros(1, 5), 1.0, 0, out.float())


def test_nothing_is_launched_for_no_elements():
    triton_kernel.blt(SOURCE, 0, [0.1], [0.1], torch.zeros(1, 0), 1.0, 0, torch.zeros(0))


class _H100:
    """In place of the driver of a GPU: enough to compile for one."""

    def get_current_target(self):
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0


@pytest.fixture
def compile_steps(monkeypatch, tmp_path):
    """Does the steps without a launch; returns the compiled kernels."""
    import triton
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    kernels, run = [], JITFunction.run

    def warmup(self, *arguments, grid, warmup, **options):
        kernels.append(run(self, *arguments, grid=grid, warmup=True, **options))

    monkeypatch.setattr(JITFunction, "run", warmup)
    monkeypatch.setattr(triton.knobs.cache, "dir", str(tmp_path))
    monkeypatch.setattr(driver, "_active", _H100())

    def steps(start, row, out):
        kernels.clear()
        triton_kernel.combination(SOURCE, [row, 3], [1.0, 0.5], 1.5, start, out, SCALE)
        triton_kernel.blt(SOURCE, row, [0.1, 0.2], [0.1, 0.2], torch.zeros(2, len(out)), 1.5, start, out, SCALE)
        triton_kernel.banded(SOURCE, row, [0.1], 1.3, torch.zeros(1, len(out)), 1.5, start, out, SCALE)
        return list(kernels)

    return steps


ROUNDED = {"add.rn", "sub.rn", "mul.rn", "div.rn", "sqrt.rn", "cvt.rn", "cvt.rn.bf16", "div.rn.ftz", "sqrt.rn.ftz"}
EXACT = {"max", "selp", "neg", "mov", "cvt", "ld.param", "ld.shared", "st.shared"}  # cvt without rn widens


@compiled
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compiled_code_rounds_every_operation_by_itself(compile_steps, dtype):
    for kernel in compile_steps(2**40 + 3, 2**40, torch.zeros(100, dtype=dtype)):
        signature = kernel.src.signature
        assert (signature["start"], signature["size"], signature["std"]) == ("i64", "i64", "fp32")
        found = set(re.findall(r"\b([a-z][a-z0-9.]*)\.f32\b", kernel.asm["ptx"]))
        assert {"add.rn", "mul.rn"} <= found <= ROUNDED | EXACT
        assert any(operation.startswith("sqrt.rn") for operation in found)
        assert dtype == torch.float32 or "cvt.rn.bf16.f32" in kernel.asm["ptx"]


@compiled
def test_other_rows_and_starts_need_no_further_compilation(compile_steps):
    hashes = [kernel.hash for kernel in compile_steps(1601, 0, torch.zeros(100))]
    for start, row in ((2**40 + 5, 1), (77, 16), (3, 2**50)):
        assert [kernel.hash for kernel in compile_steps(start, row, torch.zeros(100))] == hashes


@on_cuda
def test_bits_on_cuda():
    for row, start in ((0, 0), (7, 5), (2**32, 2**36 - 21), (2**63 - 1, 2**40 + 3)):
        out = torch.full((2**24,), -0.0, device="cuda")
        triton_kernel.combination(SOURCE, [row], [1.0], 1.0, start, out)
        assert out.cpu().numpy().tobytes() == SOURCE.normal(row, start, start + 2**24).tobytes()
    _same_steps("blt", torch.zeros(2, 2500), lambda t: ([0.1, 0.2], [1e-9, 1.9]), "cuda")
    _same_steps("banded", torch.zeros(2, 2500), lambda t: ([0.1, 0.2][:t], 1.3), "cuda")
