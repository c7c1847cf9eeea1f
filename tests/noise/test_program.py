"""Steps made into programs: one program serves all steps of a shape, and only those."""

import numpy as np
import pytest

from anyorder.noise import NoiseSource, NoiseStream, program
from anyorder.strategy import BLT
from noise.made_up import MadeUp
from noise.steps import steps

KEY = bytes(range(32))


def _order(t, row):
    """Rows in either order; the first is used last."""
    first, second = (row(t), row(t + 1)) if t < 2 else (row(t + 1), row(t))
    return (second + second * np.float32(0.5)) + first


def _links(t, row):
    first, second = row(t), row(t + 1)
    return ((first if t % 2 else second) + second * np.float32(0.5)) + first


def _zeros(t, row):
    return (row(t) + row(t + 1)) * np.float32(-0.0 if t % 2 else 0.0)


class _Steps(MadeUp):
    def __init__(self, noise):
        super().__init__(4)
        self.noise = noise

    def step(self, t, state, row):
        return self.noise(t, row), state


@pytest.mark.parametrize(
    ("strategy", "shapes"),
    [(_Steps(_order), 1), (_Steps(_links), 2), (_Steps(_zeros), 2), (BLT([0.9, 0.4], [0.2, 0.1], 4), 1)],
    ids=["order", "links", "zeros", "blt"],
)
def test_a_program_is_made_once_for_all_steps_of_a_shape(strategy, shapes, monkeypatch):
    made = []
    run = program._Compiler.run
    monkeypatch.setattr(program, "_COMPILED", {})
    monkeypatch.setattr(program._Compiler, "run", lambda self: made.append(self) or run(self))
    stream = NoiseStream(strategy, NoiseSource(KEY), 1.5, 40)
    for expected in steps(strategy, NoiseSource(KEY), 40)[0]:
        assert stream.next().tobytes() == expected.tobytes()
    assert len(made) == shapes


def test_programs_that_are_kept_are_few(monkeypatch):
    monkeypatch.setattr(program, "_COMPILED", {})
    monkeypatch.setattr(program, "_MOST_COMPILED", 3)
    for m in range(1, 9):
        NoiseStream(BLT(np.full(m, 0.5), np.full(m, 0.1), 2), NoiseSource(KEY), 1.0, 20).next()
        assert len(program._COMPILED) <= 3
