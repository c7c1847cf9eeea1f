"""A step that is broken off while it is recorded leaves nobody less guarded."""

import pytest

from anyorder.errors import ParticipationError
from anyorder.ledger import Ledger
from anyorder.participation import MinSeparation


class Broken(BaseException):
    """As a key that is pressed."""


@pytest.mark.parametrize("units", [[3, 7], ["ann", "bob"]])
def test_who_was_in_a_step_that_was_broken_off_is_refused_in_the_next(units, monkeypatch):
    ledger = Ledger(MinSeparation(10, b=4, k=2))

    def interrupted(*given):
        raise Broken

    monkeypatch.setattr("anyorder.ledger.pack", interrupted)
    with pytest.raises(Broken):
        ledger.record(0, units)
    monkeypatch.undo()
    assert ledger.step == 0
    with pytest.raises(ParticipationError):
        ledger.check(0, units)
