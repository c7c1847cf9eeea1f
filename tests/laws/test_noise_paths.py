"""Laws of paths: each gives the bits of `Strategy.step`, noise and state, for every strategy and all of its steps."""

import ast
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
N, SIZE, START, STD = 7, 603, 2**36 - 5, np.float32(1.7)
EDGES = [0, 1, 5, 17, 300, SIZE]


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

every_strategy = pytest.mark.parametrize("name", STRATEGIES)


@pytest.fixture(params=PATHS)
def make(request):
    return PATHS[request.param][1]


def _bits(vectors):
    return [vector.tobytes() for vector in vectors]


@every_strategy
def test_noise_and_state_of_all_steps(name, make):
    """With the memory of the state alone and with some for rows of Z. States are laid out as the strategy says."""
    strategy, source = STRATEGIES[name](N), NoiseSource(KEY)
    for most in (None, strategy.state_rows + 2):
        place = make(strategy, source, START, SIZE, most)
        for t in range(N):
            made, state = steps(strategy, source, SIZE, START, STD, t + 1)
            assert place.next().tobytes() == made[t].tobytes()
            assert _bits(place.save()) == _bits(state)
            assert place.state.t == t + 1


@every_strategy
def test_parts_of_the_coordinates(name, make):
    """Each part by itself, from any coordinate on, and saved and loaded between all steps."""
    strategy, source = STRATEGIES[name](N), NoiseSource(KEY, 12)
    made, _ = steps(strategy, source, SIZE, START, STD)
    states = [make(strategy, source, START + a, b - a, 0).save() for a, b in itertools.pairwise(EDGES)]
    for t in range(N):
        whole = []
        for i, (a, b) in enumerate(itertools.pairwise(EDGES)):
            place = make(strategy, source, START + a, b - a)
            place.load(t, states[i])
            whole.append(place.next())
            states[i] = [array.copy() for array in place.save()]
        assert np.concatenate(whole).tobytes() == made[t].tobytes()


@every_strategy
def test_rows_of_several_keys(name, make):
    strategy, source = STRATEGIES[name](N), NoiseSource(KEY).renewed(2, b"1" * 16).renewed(5, b"2" * 16)
    made, state = steps(strategy, source, SIZE, START, STD)
    place = make(strategy, source, START, SIZE)
    for expected in made:
        assert place.next().tobytes() == expected.tobytes()
    assert _bits(place.save()) == _bits(state)


@every_strategy
def test_a_state_goes_from_one_path_to_any_other(name, make):
    """To the one of the test and back, at every step; the others are tested likewise."""
    strategy, source = STRATEGIES[name](N), NoiseSource(KEY)
    made, _ = steps(strategy, source, SIZE, START, STD)
    others = itertools.cycle([_compiled("reference"), _compiled("best"), make])
    place = make(strategy, source, START, SIZE)
    for t, expected in enumerate(made):
        assert place.next().tobytes() == expected.tobytes()
        new = next(others)(strategy, source, START, SIZE)
        new.load(t + 1, place.save())
        place = new


def test_every_path_is_in_the_laws():
    """Whatever has to do with programs is a path, and has its laws above, or makes them."""
    root, found = Path(anyorder.__file__).parent, set()
    for file in root.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module and _is_of_programs(node):
                found.add(file.stem)
    assert found == {module for module, _ in PATHS.values()} | MAKERS


def _is_of_programs(node):
    module = "anyorder.noise.program"
    return node.module == module or any(f"{node.module}.{alias.name}" == module for alias in node.names)
