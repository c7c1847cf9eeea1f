"""Observers of a release see what was released, and change nothing."""

import numpy as np
import pytest
import torch

import anyorder as ao
from anyorder.errors import ArgumentError
from release.runs import KEY, SIZE, expected, planned, total, units


@pytest.mark.parametrize("kind", ["array", "tensor"])
def test_observers_see_copies_of_what_is_released(kind):
    plan = planned()
    release, seen = ao.Release(plan, SIZE, key=KEY), []
    convert = torch.from_numpy if kind == "tensor" else np.asarray

    def spoil(t, private):
        if kind == "tensor":
            private.zero_()
        else:
            with pytest.raises(ValueError, match="read-only"):
                private[0] = 0

    release.on_release(spoil)
    end = release.on_release(lambda t, private: seen.append((t, np.asarray(private).copy())))
    made = [np.asarray(release.step(units(t), convert(total(t)))) for t in range(4)]
    end()
    release.step(units(4), convert(total(4)))
    assert [t for t, _ in seen] == [0, 1, 2, 3]
    for private, (_, copy), row in zip(made, seen, expected(plan), strict=False):
        assert np.array_equal(private, row)
        assert np.array_equal(copy, row)
    with pytest.raises(ArgumentError, match="callback"):
        release.on_release(None)


def test_an_observer_that_raises_neither_loses_nor_doubles_a_step(tmp_path):
    plan = planned()
    release, seen = ao.Release(plan, SIZE, key=KEY, checkpoint=tmp_path / "run.ckpt"), []
    rows = expected(plan)

    def bad(t, private):
        raise ZeroDivisionError(f"at {t}")

    end = release.on_release(bad)
    release.on_release(lambda t, private: seen.append(t))
    for t in range(3):
        with pytest.raises(ZeroDivisionError, match=f"at {t}"):
            release.step(units(t), total(t))
        assert release.steps_taken == t + 1
        assert release.unreturned[0] == t
        assert np.array_equal(release.unreturned[1], rows[t])
    end_other = release.on_release(bad)
    with pytest.raises(ExceptionGroup, match="2 observers of step 3") as caught:
        release.step(units(3), total(3))
    assert len(caught.value.exceptions) == 2
    end()
    end_other()
    assert np.array_equal(release.step(units(4), total(4)), rows[4])
    assert release.unreturned is None
    assert seen == [0, 1, 2, 3, 4]
    release.save()
    release.close()
    assert ao.Release(plan, SIZE, checkpoint=tmp_path / "run.ckpt").steps_taken == 5
