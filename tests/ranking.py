"""The order of candidates."""

from collections.abc import Sequence

import pytest

from anyorder.optimize.candidates import Candidate


def assert_ranked(found: Sequence[Candidate]) -> None:
    """Those within 1 % of the least error come first, whatever theirs; the others by error."""
    losses = [one.loss for one in found]
    near = sum(loss <= 1.01 * min(losses) for loss in losses)
    assert max(losses[:near]) <= 1.01 * min(losses)
    assert losses[near:] == pytest.approx(sorted(losses[near:]), rel=2e-6)
