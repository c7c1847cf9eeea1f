"""Laws of executors: each gives the bits of `Strategy.step`, noise and state, for every strategy and all of its steps.

Triton decides when it is imported whether its kernels are interpreted, so its laws run in a process of their own, with
TRITON_INTERPRET=1; on a GPU they were never run.
"""

import ast
import itertools
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import anyorder
from anyorder.errors import ArgumentError
from anyorder.noise import NoiseSource, native, torch_backend
from anyorder.noise.host import HostNoise
from anyorder.noise.torch_backend import DeviceNoise
from laws.cases import STRATEGIES
from noise.steps import steps

KEY = bytes(range(32))
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
N, SIZE, START, STD = 4 if INTERPRETED else 7, 603, 2**36 - 5, np.float32(1.7)
EDGES = [0, 17, SIZE] if INTERPRETED else [0, 1, 5, 17, 300, SIZE]  # the interpreter takes its time


def _host(kernel):
    def make(strategy, source, start, size, most):
        try:
            native.kernel(kernel)
        except ArgumentError as error:
            pytest.skip(str(error))
        source = _with_kernel(source, kernel)
        assert (source.kernel is None) == (kernel == "reference")
        return HostNoise(strategy, source, STD, size, start, most)

    return make


def _device(run):
    def make(strategy, source, start, size, most):
        made = DeviceNoise(strategy, source, STD, size, start, most, "cpu")
        assert torch_backend._executor is run
        return made

    return make


def _with_kernel(source, kernel):
    result = NoiseSource(source.key, source.rounds, kernel=kernel)
    result._later = source._later
    return result


def _torch(program, out):
    return torch_backend.run


def _triton(program, out):
    from anyorder.noise import execute_triton

    return execute_triton.run


EXECUTORS = {
    "numpy": ("host", _host("reference"), None),
    **{path: ("native", _host(path), None) for path in native.PATHS},
    "torch": ("torch_backend", _device(_torch), _torch),
    "triton": ("execute_triton", _device(_triton), _triton),
}

# What has to do with programs and runs none: they make them, hand them to executors, or plant faults in them.
MAKERS = {"core", "host", "noise_state", "stream", "torch_backend"}  # core: of planted faults

every_strategy = pytest.mark.parametrize("name", STRATEGIES)


@pytest.fixture(params=EXECUTORS)
def make(request, monkeypatch):
    if request.param == "triton":
        pytest.importorskip("triton", reason="the package triton is not installed; torch for CUDA brings it")
        if not INTERPRETED:
            pytest.skip("runs in the process of test_laws_of_triton")
    _, make, choose = EXECUTORS[request.param]
    if choose is not None:
        monkeypatch.setattr(torch_backend, "_executor", choose)
    return make


def _bits(vectors):
    return [vector.tobytes() for vector in vectors]


@every_strategy
def test_noise_and_state_of_all_steps(name, make):
    """With the memory of the state alone and with some for rows of Z. States are laid out as the strategy says."""
    strategy, source = STRATEGIES[name](N), NoiseSource(KEY)
    for most in (strategy.state_rows, strategy.state_rows + 2):
        place = make(strategy, source, START, SIZE, most)
        for t in range(N):
            made, state = steps(strategy, source, SIZE, START, STD, t + 1)
            assert place.next().tobytes() == made[t].tobytes()
            assert _bits(place.state()) == _bits(state)
            assert place.held.t == t + 1


@every_strategy
def test_parts_of_the_coordinates(name, make):
    """Each part by itself, from any coordinate on, and saved and loaded between all steps."""
    strategy, source = STRATEGIES[name](N), NoiseSource(KEY, 12)
    made, _ = steps(strategy, source, SIZE, START, STD)
    states = [make(strategy, source, START + a, b - a, 0).state() for a, b in itertools.pairwise(EDGES)]
    for t in range(N):
        whole = []
        for i, (a, b) in enumerate(itertools.pairwise(EDGES)):
            place = make(strategy, source, START + a, b - a, strategy.state_rows)
            place.load(t, states[i])
            whole.append(place.next())
            states[i] = [array.copy() for array in place.state()]
        assert np.concatenate(whole).tobytes() == made[t].tobytes()


@every_strategy
def test_rows_of_several_keys(name, make):
    strategy, source = STRATEGIES[name](N), NoiseSource(KEY).renewed(2, b"1" * 16).renewed(5, b"2" * 16)
    made, state = steps(strategy, source, SIZE, START, STD)
    place = make(strategy, source, START, SIZE, strategy.state_rows)
    for expected in made:
        assert place.next().tobytes() == expected.tobytes()
    assert _bits(place.state()) == _bits(state)


@every_strategy
def test_a_state_goes_from_one_executor_to_any_other(name, make):
    """To the one of the test and back, at every step; the others are tested likewise."""
    strategy, source = STRATEGIES[name](N), NoiseSource(KEY)
    made, _ = steps(strategy, source, SIZE, START, STD)
    others = itertools.cycle([_host("reference"), _host("best"), make])
    place = make(strategy, source, START, SIZE, strategy.state_rows)
    for t, expected in enumerate(made):
        assert place.next().tobytes() == expected.tobytes()
        new = next(others)(strategy, source, START, SIZE, strategy.state_rows)
        new.load(t + 1, place.state())
        place = new


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.skipif(INTERPRETED, reason="this is the process that it starts")
def test_laws_of_triton():
    pytest.importorskip("triton", reason="the package triton is not installed; torch for CUDA brings it")
    command = [sys.executable, "-m", "pytest", __file__, "-k", "triton", "-n", "0", "-p", "no:cacheprovider"]
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    assert int(re.search(r"(\d+) passed", done.stdout)[1]) >= 4 * len(STRATEGIES)


def test_every_executor_is_in_the_laws():
    """Whatever has to do with programs is an executor, and has its laws above, or makes them."""
    root, found = Path(anyorder.__file__).parent, set()
    for file in root.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module and _is_of_programs(node):
                found.add(file.stem)
    assert found == {module for module, *_ in EXECUTORS.values()} | MAKERS


def _is_of_programs(node):
    modules = {"anyorder.noise.program", "anyorder.noise.host"}
    return node.module in modules or any(f"{node.module}.{alias.name}" in modules for alias in node.names)
