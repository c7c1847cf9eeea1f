"""Laws of paths: each gives the bits of `Strategy.step`, noise and state, for every strategy and all of its steps."""

import ast
import functools
import itertools
from pathlib import Path

import numpy as np
import pytest
import torch

import anyorder
from anyorder.errors import ArgumentError
from anyorder.noise import NoiseSource, compiled
from anyorder.noise.compiled import CompiledPath
from anyorder.noise.torch_path import TorchPath
from laws.cases import STRATEGIES
from noise.steps import Steps, steps

KEY = bytes(range(32))
N, SIZE, START, STD = 7, 203, 2**36 - 5, np.float32(1.7)
EDGES = [0, 17, SIZE]


def _compiled(kernel):
    def make(strategy, source, start, size, most=None):
        try:
            compiled.kernel(kernel)
        except ArgumentError as error:
            pytest.skip(str(error))
        source = _with_kernel(source, kernel)
        assert (source.kernel is None) == (kernel == "reference")
        return Steps(CompiledPath(source, STD, start, size), strategy, size, most)

    return make


def _with_kernel(source, kernel):
    result = NoiseSource(source.key, source.rounds, kernel=kernel)
    result._later = source._later
    return result


def _torch(device):
    def make(strategy, source, start, size, most=None):
        if device == "cuda" and not torch.cuda.is_available():
            pytest.skip("needs a CUDA device")
        return Steps(TorchPath(source, STD, start, size, device), strategy, size, most)

    return make


PATHS = {
    "numpy": ("compiled", _compiled("reference")),
    **{path: ("compiled", _compiled(path)) for path in compiled.PATHS},
    "torch": ("torch_path", _torch("cpu")),
    "torch, cuda": ("torch_path", _torch("cuda")),
}

# What has to do with programs and runs none: it hands them to paths, or plants faults in them.
MAKERS = {"core", "stream"}  # core: of planted faults


@pytest.fixture(params=PATHS)
def make(request):
    return PATHS[request.param][1]


def _bits(vectors):
    return [vector.tobytes() for vector in vectors]


@functools.cache
def _oracle(name, rounds=8, renewed=False):
    """The strategy and source, and the bits of the noise of each step and of the state after it."""
    strategy, source = STRATEGIES[name](N), NoiseSource(KEY, rounds)
    if renewed:
        source = source.renewed(2, b"1" * 16).renewed(5, b"2" * 16)
    told = [steps(strategy, source, SIZE, START, STD, t + 1) for t in range(N)]
    return strategy, source, [noise[-1].tobytes() for noise, _ in told], [_bits(state) for _, state in told]


def test_noise_and_state_of_all_steps(make):
    """With the memory of the state alone and with some for rows of Z. States are laid out as the strategy says."""
    for name in STRATEGIES:
        strategy, source, noise, states = _oracle(name)
        for most in (None, strategy.state_rows + 2):
            place = make(strategy, source, START, SIZE, most)
            for t in range(N):
                assert place.next().tobytes() == noise[t], (name, t)
                assert _bits(place.save()) == states[t], (name, t)
                assert place.state.t == t + 1


def test_parts_of_the_coordinates(make):
    """Each part by itself, from any coordinate on, and saved and loaded between all steps."""
    for name in STRATEGIES:
        strategy, source, noise, _ = _oracle(name, rounds=12)
        places = [make(strategy, source, START + a, b - a) for a, b in itertools.pairwise(EDGES)]
        for t in range(N):
            assert np.concatenate([place.next() for place in places]).tobytes() == noise[t], (name, t)
            for place in places:
                place.load(t + 1, [array.copy() for array in place.save()])


def test_rows_of_several_keys(make):
    for name in STRATEGIES:
        strategy, source, noise, states = _oracle(name, renewed=True)
        place = make(strategy, source, START, SIZE)
        for t in range(N):
            assert place.next().tobytes() == noise[t], (name, t)
        assert _bits(place.save()) == states[-1], name


def test_a_state_goes_from_one_path_to_any_other(make):
    """To the one of the test and back, at every step; the others are tested likewise."""
    for name in STRATEGIES:
        strategy, source, noise, _ = _oracle(name)
        others = itertools.cycle([_compiled("reference"), _compiled("best"), make])
        place = make(strategy, source, START, SIZE)
        for t in range(N):
            assert place.next().tobytes() == noise[t], (name, t)
            new = next(others)(strategy, source, START, SIZE)
            new.load(t + 1, place.save())
            place = new


def test_every_path_is_in_the_laws():
    """Whatever has to do with programs is a path, and has its laws above, or makes them."""
    root, found = Path(anyorder.__file__).parent, set()
    for file in root.rglob("*.py"):
        text = file.read_text()
        for node in ast.walk(ast.parse(text if "anyorder.noise" in text else "")):
            if isinstance(node, ast.ImportFrom) and node.module and _is_of_programs(node):
                found.add(file.stem)
    assert found == {module for module, _ in PATHS.values()} | MAKERS


def _is_of_programs(node):
    module = "anyorder.noise.program"
    return node.module == module or any(f"{node.module}.{alias.name}" == module for alias in node.names)
