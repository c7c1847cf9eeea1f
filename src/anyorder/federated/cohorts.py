"""Cohorts: whom a round asks among those who are there and allowed, who answers, and who comes too late."""

from dataclasses import dataclass
from math import ceil, pi, sin
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from anyorder import checks
from anyorder.checks import final
from anyorder.errors import ArgumentError
from anyorder.noise import NoiseSource

# ----------------------------------------------------------------------------------------------------
# Which devices are there in a round: models for simulations, pure functions of a public source and the round.
#
# None of them is trusted: what a user may do is in the plan, and the server's ledger holds everybody to it. No secret
# is drawn on, and no amplification is claimed for the chance in them.


Present = NDArray[np.bool_]

_DAY = 24.0


class Availability(Protocol):
    """What `simulate` asks of a model of who is there; one of your own needs these two methods."""

    def present(self, source: NoiseSource, round: int, num_users: int) -> Present:
        """(num_users,) bool: which devices could take part in this round. The same arguments give the same answer."""
        ...

    def separation(self, num_rounds: int, num_users: int, cohort: int, report_goal: int) -> int:
        """The largest min-separation b under which `cohort` eligible devices may be expected in every round.

        Args:
            cohort: devices that are asked in a round, of which `report_goal` are added.
        """
        ...


def shares(source: NoiseSource, row: int, num_users: int) -> NDArray[np.float64]:
    """(num_users,) independent numbers in [0, 1), multiples of 2^-32; the first ones do not depend on num_users."""
    return np.asarray(source.words(row, 0, num_users) * 2.0**-32)


@final
@dataclass(frozen=True)
class UniformAvailability:
    """Every device is there in every round with the same probability, independently.

    Args:
        probability: in (0, 1].
    """

    probability: float = 1.0

    def __post_init__(self) -> None:
        share = checks.positive("probability", checks.real("probability", self.probability, low=0.0, high=1.0))
        object.__setattr__(self, "probability", share)

    def present(self, source: NoiseSource, round: int, num_users: int) -> Present:
        """Draws, one for each user and round."""
        return shares(source.derive(b"uniform"), round, num_users) < self.probability

    def separation(self, num_rounds: int, num_users: int, cohort: int, report_goal: int) -> int:
        """See `Availability`."""
        return _longest(self.probability, num_rounds, num_users, cohort, report_goal)


@final
@dataclass(frozen=True)
class Diurnal:
    """A daily wave: devices are there at night, and it is night somewhere else in every time zone.

    At hour h of a zone's own day, 0 being the middle of its night, a device is there with probability

        trough + (peak - trough) (1 + cos(2 pi h / 24)) / 2

    Args:
        peak, trough: the largest and the smallest probability, 0 <= trough <= peak <= 1, peak > 0.
        zones: hours that the users' clocks are apart from the server's, each zone equally likely for each user; one
            zone makes the strongest wave.
        round_hours: from one round to the next.
    """

    peak: float = 0.5
    trough: float = 0.1
    zones: tuple[float, ...] = (0.0, 1.0, 2.0, 3.0)
    round_hours: float = 1.0

    def __post_init__(self) -> None:
        peak = checks.positive("peak", checks.real("peak", self.peak, low=0.0, high=1.0))
        object.__setattr__(self, "peak", peak)
        object.__setattr__(self, "trough", checks.real("trough", self.trough, low=0.0, high=peak))
        if not self.zones:
            raise ArgumentError(f"zones must name at least one zone, in hours, got {self.zones!r}")
        object.__setattr__(self, "zones", tuple(checks.real("zones", zone) for zone in self.zones))
        object.__setattr__(self, "round_hours", checks.positive("round_hours", self.round_hours))

    def _probabilities(self, round: int) -> NDArray[np.float64]:
        """One for each zone."""
        hours = round * self.round_hours + np.array(self.zones)
        return self.trough + (self.peak - self.trough) * (1 + np.cos(2 * pi * hours / _DAY)) / 2

    def present(self, source: NoiseSource, round: int, num_users: int) -> Present:
        """Draws at the hour of each user's zone, which stays the same in all rounds."""
        zone = (shares(source.derive(b"zone"), 0, num_users) * len(self.zones)).astype(np.int64)
        return shares(source.derive(b"diurnal"), round, num_users) < self._probabilities(round)[zone]

    def separation(self, num_rounds: int, num_users: int, cohort: int, report_goal: int) -> int:
        """See `Availability`; for the round in which fewest are there."""
        day = range(min(num_rounds, ceil(_DAY / self.round_hours) + 1))
        least = min(float(self._probabilities(t).mean()) for t in day)
        return _longest(least, num_rounds, num_users, cohort, report_goal)


@final
@dataclass(frozen=True)
class CheckIn:
    """Devices that check in when they please, and never within `hours` of their last time: a timer on each of them.

    Check-in j of a device is at hour

        offset + j (hours + spread) + spread u_j,    u_j in [0, 1), offset in [0, hours + spread)

    so that two check-ins lie between `hours` and `hours + 2 spread` apart. A device is there in the first round that
    begins after it checked in. Rounds begin at hours

        t_r = round_hours r + swing (24 / 2 pi) sin(2 pi round_hours r / 24)

    slower by day and faster by night. So how many *rounds* lie between two of a user follows from it, and is known
    afterwards; `separation` is what the timer alone promises, and the certificate's realised values are what came.

    Args:
        hours: of the timer.
        spread: hours by which check-ins are late, on average.
        round_hours: from one round to the next, on average over a day.
        swing: by which share of that rounds are longer or shorter in the course of a day, in [0, 1).
    """

    hours: float = 24.0
    spread: float = 12.0
    round_hours: float = 1.0
    swing: float = 0.5

    def __post_init__(self) -> None:
        object.__setattr__(self, "hours", checks.positive("hours", self.hours))
        object.__setattr__(self, "spread", checks.real("spread", self.spread, low=0.0))
        object.__setattr__(self, "round_hours", checks.positive("round_hours", self.round_hours))
        if checks.real("swing", self.swing, low=0.0) >= 1:
            raise ArgumentError(f"swing must be below 1, or time would run backwards, got {self.swing!r}")

    def time(self, round: int) -> float:
        """The hour at which a round begins; rises with the round."""
        even = self.round_hours * round
        return even + self.swing * _DAY / (2 * pi) * sin(2 * pi * even / _DAY)

    def present(self, source: NoiseSource, round: int, num_users: int) -> Present:
        """Those whose latest check-in came after the round before had begun."""
        period = self.hours + self.spread
        now, before = self.time(round), self.time(round - 1)
        offset = shares(source.derive(b"offset"), 0, num_users) * period
        # The latest check-in by now is one of two: that of the period that now is in, or the one before it.
        latest = np.floor((now - offset) / period).astype(np.int64)
        late = source.derive(b"check-in")
        result = np.zeros(num_users, np.bool_)
        for j in range(int(latest.min()) - 1, int(latest.max()) + 1):
            if j < -1:  # before the first hour, and long before the first round
                continue
            hour = offset + j * period + self.spread * shares(late, j + 1, num_users)
            result |= (before < hour) & (hour <= now)
        return result

    def separation(self, num_rounds: int, num_users: int, cohort: int, report_goal: int) -> int:
        """Return the separation that the timer guarantees, for every device: in round r it checked in after t_{r-1}.

        It is back after t_{r-1} + hours at the earliest. In a day's course the least of these counts.
        """
        begins = np.array([self.time(t) for t in range(-1, num_rounds)])
        # The first round after the timer's end, num_rounds if there is none; a billionth of an hour is rounding.
        back = np.searchsorted(begins[1:], begins[:-1] + self.hours + 1e-9, side="right")
        gaps = (back - np.arange(num_rounds))[back < num_rounds]
        return max(1, int(gaps.min(initial=num_rounds)))


def _longest(share: float, num_rounds: int, num_users: int, cohort: int, report_goal: int) -> int:
    """The largest b at which the eligible users that are there are three standard deviations above a cohort.

    Of num_users, (b - 1) report_goal were in the last b - 1 rounds. At least 1, whoever is there.
    """
    b = np.arange(1, num_rounds + 1)
    eligible = np.maximum(num_users - (b - 1) * report_goal, 0)
    there = share * eligible - 3 * np.sqrt(share * (1 - share) * eligible)
    return max(1, int(np.count_nonzero(there >= cohort)))


Places = NDArray[np.int64]


@dataclass(frozen=True)
class Cohort:
    """Who did what in a round, as places among the users.

    Attributes:
        added: whose messages the server takes: the first `report_goal` who answer; ascending.
        late: who answers after that; turned away, and not recorded.
        dead: who was asked and never answers.
    """

    added: Places
    late: Places
    dead: Places


def cohort_size(report_goal: int, over_selection: float) -> int:
    """Devices that are asked in a round: the report goal times `over_selection`, rounded up."""
    goal = checks.integer("report_goal", report_goal, low=1)
    over = checks.real("over_selection", over_selection, low=1.0)
    return ceil(goal * over - 1e-9)  # 10 * 1.1 is 11 and a rounding error


def choose_cohort(
    source: NoiseSource,
    round: int,
    candidates: NDArray[np.bool_],
    report_goal: int,
    *,
    over_selection: float = 1.3,
    drop_out: float = 0.0,
) -> Cohort:
    """Ask `report_goal * over_selection` of the candidates; the first `report_goal` who answer are added.

    The choice is public: it comes from the source and the round alone, never from data, and no amplification is
    claimed for it. Where fewer candidates are there, or answer, the round is made with them: the sum is divided by the
    report goal all the same, which is a constant of the plan.

    Args:
        source: of the choice; not that of the noise.
        candidates: (num_users,) bool, who is there and eligible.
        report_goal: the plan's batch_size.
        over_selection: at least 1; how many are asked for each one that is wanted.
        drop_out: probability that a device which was asked never answers, in [0, 1).
    Returns: the cohort; added, late and dead are disjoint and all among the candidates.
    """
    candidates = np.asarray(candidates)
    if candidates.dtype != np.bool_ or candidates.ndim != 1:
        raise ArgumentError(f"candidates must be (num_users,) bool, got {candidates.dtype} of shape {candidates.shape}")
    if checks.real("drop_out", drop_out, low=0.0) >= 1:
        raise ArgumentError(f"drop_out must be below 1, or nobody ever answers, got {drop_out!r}")
    places = np.flatnonzero(candidates)
    asked = _in_order(source.derive(b"asked"), round, len(candidates), places)
    asked = asked[: cohort_size(report_goal, over_selection)]
    drawn = source.derive(b"dead").words(round, 0, len(candidates)) * 2.0**-32
    dead = drawn[asked] < drop_out
    answers = _in_order(source.derive(b"answers"), round, len(candidates), asked[~dead])
    return Cohort(np.sort(answers[:report_goal]), np.sort(answers[report_goal:]), np.sort(asked[dead]))


def _in_order(source: NoiseSource, round: int, size: int, places: Places) -> Places:
    """The places in the order of 64-bit words, each place's own, whoever else is there; ties by place."""
    words = source.words(round, 0, 2 * size).view(np.uint64)
    places = np.sort(places)
    return places[np.argsort(words[places], kind="stable")]
