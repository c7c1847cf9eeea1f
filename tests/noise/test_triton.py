"""The Triton kernel: its bits under Triton's interpreter, and the operations of the code compiled for a GPU.

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
from anyorder.noise.host import Targets
from anyorder.noise.program import NONE, OP, TERM, Operation, Program
from anyorder.noise.torch_backend import DeviceNoise
from laws.cases import STRATEGIES
from noise.steps import steps

pytest.importorskip("triton", reason="the package triton is not installed; torch for CUDA brings it")

from anyorder.noise import execute_triton

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


def _gradient(size, dtype=torch.float32):
    return torch.from_numpy(RANDOM.standard_normal(size, np.float32)).to(dtype)


def _cut(total):
    """To bfloat16 as Triton's interpreter does it: without rounding. The compiled code rounds to nearest."""
    return (total.view(torch.int32) & -(1 << 16)).view(torch.float32).to(torch.bfloat16)


def _row(source, row, start, out):
    execute_triton.run(Program.of_row(row), source, [], start, [out], 1.0, 1.0)


@interpreted
@pytest.mark.parametrize("rounds", [8, 12, 20])
@pytest.mark.parametrize(
    ("row", "start"), [(0, 0), (7, 5), (2**32, 2**36 - 21), (2**63 - 1, 2**40 + 3), (1, 2**62 - 40)]
)
def test_rows_are_those_of_the_reference(rounds, row, start):
    source, out = NoiseSource(KEY, rounds), torch.full((40,), -0.0)
    _row(source, row, start, out)
    assert out.numpy().tobytes() == source.normal(row, start, start + 40).tobytes()


@interpreted
def test_rare_radii(monkeypatch):
    """Programs of 4096 blocks, one in three with a rare radius: both ways through the branch."""
    monkeypatch.setattr(execute_triton, "_BLOCKS", 4096)
    size = 16 * 4096 * 4
    blocks = SOURCE._blocks(3, np.arange(4096 * 4, dtype=np.uint64))
    rare = (blocks[:8] < 2**16).any(axis=0).reshape(4, 4096).any(axis=1)
    assert rare.any()
    assert not rare.all()
    out = torch.zeros(size)
    _row(SOURCE, 3, 0, out)
    assert np.array_equal(out.numpy(), SOURCE.normal(3, 0, size))


@interpreted
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("start", "size"), [(0, 4096), (2**40 + 3, 2100), (31, 1)])
def test_types(dtype, start, size):
    gradient = _gradient(size, dtype)
    wide, out, exact = gradient.float(), gradient.clone(), gradient.clone()
    for run, result in ((execute_triton.run, out), (torch_backend.run, exact), (torch_backend.run, wide)):
        run(Program.of_row(2**63 - 1), SOURCE, [], start, [result], 2.3, SCALE)
    assert torch.equal(out, _cut(wide) if dtype == torch.bfloat16 else exact)


@interpreted
@pytest.mark.parametrize(
    "name", ["dense", "banded", "blt", "low rank", "restarted", "tree online completed", "tree full"]
)
def test_steps_over_several_tensors(name, monkeypatch):
    """Of lengths that end within blocks, more than a program of Triton's has; rows of two keys. `laws` has them all."""
    monkeypatch.setattr(torch_backend, "_executor", lambda program, out: execute_triton.run)
    strategy, start, size = STRATEGIES[name](5), 2**36 - 5, 2500
    source = SOURCE.renewed(2, b"1" * 16)
    exact, last = steps(strategy, source, size, start, 1.7)
    noise = DeviceNoise(strategy, source, np.float32(1.7), size, start, strategy.state_rows, "cpu")
    for expected in exact:
        tensors = [_gradient(k) for k in (1001, 2, 0, 1497)]
        before = torch.cat(tensors)
        noise.add(Targets(tensors, size), SCALE)
        assert torch.equal(torch.cat(tensors), (before + torch.from_numpy(expected)) * np.float32(SCALE))
    assert [vector.tobytes() for vector in noise.state()] == [vector.tobytes() for vector in last]


def _made(ops, terms, num_tiles, result):
    return Program(np.array(ops, OP), np.array(terms, TERM), num_tiles, result)


def _every_operation():
    """All operations, every tile, in-place writes that are read again, and a result of all."""
    most, c = execute_triton.MOST_TILES, (0.3, -0.7, 1.7, 0.6)
    ops = [
        (Operation.GAUSS, 0, NONE, NONE, c[0], 0, 3),
        (Operation.LINEAR, 1, ~1, NONE, 1, 2, 0),
        (Operation.LEAK, ~0, ~0, 1, c[1], 0, 0),
        (Operation.LEAK, ~1, ~1, ~0, c[0], 0, 0),
        (Operation.DIVIDE, 0, 1, NONE, c[2], 0, 0),
        (Operation.GAUSS, 1, 0, NONE, c[3], 0, 2**40),
        (Operation.LINEAR, 2, NONE, NONE, 1, 0, 0),
        (Operation.LINEAR, 3, ~1, NONE, 1, 0, 0),
        *((Operation.LINEAR, k, k - 1, NONE, 1, 1, 2 + k) for k in range(4, most)),
        (Operation.LINEAR, ~2, most - 1, NONE, 1, most, 6),
    ]
    terms = [(0, c[1]), (~0, c[3]), *((k % 4, 0.25 * k) for k in range(4)), *((k, 0.5 - k) for k in range(most))]
    return _made(ops, terms, most, ~2)


@interpreted
def test_every_operation_and_tile():
    size, program = 2100, _every_operation()
    arrays, exact = ([_gradient(size) for _ in range(3)], [])
    exact = [array.clone() for array in arrays]
    out, right = torch.zeros(size), torch.zeros(size)
    execute_triton.run(program, SOURCE, arrays, 5, [out], 1.5, 1.0)
    torch_backend.run(program, SOURCE, exact, 5, [right], 1.5, 1.0)
    assert torch.equal(out, right)
    assert all(map(torch.equal, arrays, exact))
    assert out.any()


def test_other_types_and_more_tiles_are_refused():
    with pytest.raises(ArgumentError, match="float32, bfloat16 or float16"):
        _row(SOURCE, 0, 0, torch.zeros(4, dtype=torch.float64))
    with pytest.raises(ArgumentError, match="at most 8 tiles, got 9"):
        execute_triton.run(_made([], [], 9, 0), SOURCE, [], 0, [torch.zeros(4)], 1.0, 1.0)


def test_nothing_is_launched_for_no_elements():
    _row(SOURCE, 0, 0, torch.zeros(0))


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

    def compiled_steps(start, row, out):
        kernels.clear()
        programs = [Program.of_row(row), _every_operation()]
        programs[1].ops["row"][0] = row
        for program in programs:
            arrays = [torch.zeros(len(out)) for _ in range(3)]
            execute_triton.run(program, SOURCE, arrays, start, [out], 1.5, SCALE)
        return list(kernels)

    return compiled_steps


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
        _row(SOURCE, row, start, out)
        assert out.cpu().numpy().tobytes() == SOURCE.normal(row, start, start + 2**24).tobytes()
