"""Canaries in a run: added inside the release core, scored from what comes out."""

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from anyorder import checks
from anyorder.accounting.curves import Gaussian
from anyorder.accounting.gaussian import NEIGHBOURS
from anyorder.audit.canaries import (
    Canaries,
    Patterns,
    SampledScorer,
    Scorer,
    as_released,
    drawn,
    random_steps,
    visible,
    worst_steps,
)
from anyorder.audit.result import Audited
from anyorder.audit.secret_steps import SecretScorer, drawn_steps
from anyorder.errors import ArgumentError, ParticipationError, TrainingError
from anyorder.noise import NoiseSource
from anyorder.plan.plan import Plan

if TYPE_CHECKING:
    from torch import Tensor

    from anyorder.release.release import Release

__all__ = ["PlantedCanaries", "plant"]

Floats = NDArray[np.float64]


def plant(
    release: Any,
    canaries: Canaries,
    steps: Any = None,
    *,
    key: bytes | None = None,
    totals: bool | int = False,
    informed: bool = False,
    known: bool = False,
) -> "PlantedCanaries":
    """Add canaries to the sums of a run by secret draws, and score them from what the run releases.

    At each of its steps an included canary adds clip_norm g_c to the un-noised total, inside the release core, as a
    unit of its own that was clipped. Everything behind that point is the run's own: journal, noise, division,
    optimizer. The neighbours of the plan say what a draw decides: with or without the canary; under "replace-one",
    g_c or -g_c.

    The claim of the run's own units stays what it was. The vectors are public, draws and vectors do not depend on the
    units; so for every outcome of the draws the release is the planned mechanism on sums in which each unit has the
    part that it had, but for a constant: for neighbours the same one. What the canaries cost is accuracy. So the
    release may be shown, with draws and all that follows from both.

    An informed result is no such thing. Its scores are what was released less what the units added, so anyone who has
    the scores, or exact numbers that follow from them, and what was released, or a model that it trained, has the sums
    without noise: no epsilon covers that. The result is then as secret as the data, and `to_dict` refuses to write it.
    If neither the release nor anything made of it is left, the result is a function of noise, draws and claim
    alone, the same whatever the data are (but for the rounding of floats, far below the noise that nobody knows any
    more), and tells nothing of the units: so `anyorder.app.audit_training` trains a copy and discards it.

    Under secret sampling a canary draws its steps by the law of the plan's rule, with draws of its own, and its score
    is the log likelihood ratio of `anyorder.audit.secret_steps`: the best test for who does not know the steps. Steps
    are not given then. With `known`, `result(known=True)` is what those would see to whom all batches became known.

    Args:
        release: an `anyorder.Release` or an engine after `make_private`; before its first step, in one process, and
            without a checkpoint: canaries would have to return after a resume with the draws that they had.
        canaries: of `release.whole_size` coordinates: the release's, and those of its tables behind them; for an engine
            all trainable parameters, one behind the other.
        steps: of each canary, or of all, as `scores` takes them; each must be allowed by the plan's participation.
            "random" draws them among all that are; None takes those of which a release shows most.
        key: 32 bytes for the draws of reproducible tests; None for draws from the operating system.
        totals: keep sums without noise and what was released, n times size numbers: for small runs; a number of
            coordinates to keep them of so many, drawn as who is in: for large ones.
        informed: the attacker knows what the units of the data add, as the claim allows, and takes it away before the
            scores. They then have the law of the noise alone, and show all of mu; else the data's gradients hide some,
            may agree with the draws by chance, and may answer noise that was released before: the verdict is then by
            "f_dp", which holds whatever the data are and refutes little.
        known: under secret sampling: score also as one who knows in which steps a canary is, or would be.
    Returns: a `PlantedCanaries`, to be asked for its `result()` when the run is over.
    Raises: ArgumentError, ParticipationError, TrainingError; the release is then as it was.
    """
    core: Release = getattr(release, "release", release)
    return PlantedCanaries(core, canaries, steps, key, totals, informed, known)


class PlantedCanaries:
    """Canaries that are in a run; made by `plant`.

    Attributes:
        canaries: the directions.
        steps: (count,) tuples of steps; None under secret sampling.
        drawn: under secret sampling, (count,) tuples of the steps that were drawn for each canary, none perhaps: where
            it is, or would be had its draw put it in. Who scores what was released must not know them. Else None.
        included: (count,) bool, the draws: who scores what was released must not know them.
        kept_at: the coordinates that `totals` and `released` are of, ascending.
    """

    def __init__(
        self,
        release: "Release",
        canaries: Canaries,
        steps: Any,
        key: bytes | None,
        totals: bool | int,
        informed: bool = False,
        known: bool = False,
    ) -> None:
        from anyorder.release.release import Release

        if not isinstance(release, Release):
            raise ArgumentError(f"release must be an anyorder Release or an engine, got {type(release).__name__}")
        if not isinstance(canaries, Canaries):
            raise ArgumentError(f"canaries must be anyorder.audit.Canaries, got {type(canaries).__name__}")
        if canaries.size != release.whole_size:
            raise ArgumentError(f"canaries must have the release's size={release.whole_size}, got {canaries.size}")
        plan = release.plan
        self.plan, self.canaries = plan, canaries
        source = NoiseSource.random() if key is None else NoiseSource(key)
        self.included = canaries.draw(source.key)
        self._known: _KnownTotals | None = None
        self._scorer: Scorer | SampledScorer | SecretScorer
        self._mus: Floats | None
        self._there: Patterns | NDArray[np.bool_]
        self.steps: list[tuple[int, ...]] | None
        self.drawn: list[tuple[int, ...]] | None
        if plan.participation.secret:
            if steps is not None:
                raise ArgumentError("steps must be None under secret sampling: draws choose the steps of a canary")
            drawn_by = source.derive(b"steps of canaries")
            self._there = drawn_steps(plan.participation, canaries.count, drawn_by)
            self.steps, self.drawn = None, [tuple(np.flatnonzero(there).tolist()) for there in self._there.T]
            self._mus, self._scorer = None, _secret_scorer(plan, canaries)
            self._known = _KnownTotals(plan, canaries, self.drawn) if known else None
        else:
            if known:
                raise ArgumentError("known must be False where no draws are secret: the steps are known as it is")
            given = steps
            if steps is None:
                given = worst_steps(plan.strategy, plan.participation)
            elif isinstance(steps, str):
                checks.choice("steps", steps, {"random"})
                given = random_steps(plan.participation, canaries.count, source.derive(b"steps of canaries"))
            patterns = _allowed(Patterns(given, canaries.count, plan.n), plan)
            self._there = patterns
            self.steps, self.drawn = [patterns.steps[i] for i in patterns.of], None
            self._scorer = Scorer(as_released(plan.strategy), self.steps, canaries)
            self._mus = _mus_of(plan, patterns)
        self._informed, self._others = informed, np.zeros(1)
        self._keep = totals is not False
        self.kept_at = np.arange(canaries.size)
        if not isinstance(totals, bool):
            number = checks.integer("totals", totals, low=1, high=canaries.size)
            self.kept_at = drawn(source.derive(b"coordinates that are kept"), canaries.size, number)
        self._totals: list[Floats] = []
        self._released: list[Floats] = []
        self._divisor, self._scored = 1.0, 0
        release.admit(self._add)
        self._release = release
        release.on_release(self._observe)

    def weights(self, t: int) -> Floats:
        """(count,) how often each canary is added at step t: 0 or 1; -1 for one left out of "replace-one". Secret."""
        there = self._there[t] if isinstance(self._there, np.ndarray) else self._there.at(t)[self._there.of]
        if self.plan.neighbours == "replace-one":
            return np.asarray(np.where(self.included, 1.0, -1.0) * there)
        return np.asarray(np.where(self.included, 1.0, 0.0) * there)

    def _add(self, step: int, pieces: "list[Tensor]", divisor: float) -> "list[Tensor]":
        """A total in pieces and its step's canaries; the pieces stay as they are, should the step be broken off."""
        import torch

        grid = self.plan.grid
        if self._informed:
            self._others = _joined(pieces, grid)
        weights = self.weights(step)
        made = [*pieces]
        if weights.any():
            scale = self.plan.clip_norm / (1.0 if grid is None else grid)
            vector = torch.from_numpy(self.canaries.combined(weights, scale, whole=grid is not None))
            parts = torch.split(vector, [piece.numel() for piece in pieces])
            made = [
                piece + part.view(piece.shape).to(device=piece.device, dtype=piece.dtype)
                for piece, part in zip(pieces, parts, strict=True)
            ]
        self._divisor = divisor
        if self._keep:
            self._totals[step:] = [_joined(made, grid)[self.kept_at]]
        return made

    def _observe(self, step: int, private: Any) -> None:
        """Score what was released, times what it was divided by."""
        flat = private.detach().cpu().double().numpy() if hasattr(private, "detach") else private
        row = np.asarray(flat, np.float64).reshape(-1) * self._divisor
        if step != self._scored:
            return  # one before could not be scored, and `result` says so
        seen = row - self._others if self._informed else row
        self._scorer.add(seen)
        if self._known is not None:
            self._known.scorer.add(seen)
        if self._keep:
            self._released.append(row[self.kept_at])
        self._scored += 1

    @property
    def totals(self) -> Floats:
        """(steps, size) sums and canaries at `kept_at`, without noise, in units of the gradient: secret."""
        return self._kept(self._totals)

    @property
    def released(self) -> Floats:
        """(steps, size) what was released times its divisor, at `kept_at`: `totals` plus noise of `plan.noise_std`."""
        return self._kept(self._released)

    def _kept(self, rows: list[Floats]) -> Floats:
        if not self._keep:
            raise ArgumentError("totals were not kept: call plant(.., totals=True)")
        return np.stack(rows) if rows else np.zeros((0, len(self.kept_at)))

    def result(self, *, known: bool = False) -> Audited:
        """Return what the scores say, of the steps that were released so far.

        Args:
            known: where canaries were planted with `known`: scores that know the steps, of canaries that have any,
                held against what the plan promises should its batches become known; not against its claim.
        Raises: TrainingError before there are any; ArgumentError for `known` where it was not asked for.
        """
        if known and self._known is None:
            raise ArgumentError("known=True must be said to plant(.., known=True), before the run")
        if not self._release.steps_taken:
            raise TrainingError("nothing was released yet: ask for the result after the run")
        if self._scored < self._release.steps_taken:
            raise TrainingError(
                f"what step {self._scored} released could not be scored, and scores without it have another law: begin "
                "the audit again"
            )
        plan, independent = self.plan, self.canaries.orthogonal and self._informed
        if known and self._known is not None:
            return self._known.result(self.included, plan, informed=self._informed, independent=independent)
        return Audited(
            scores=self._scorer.scores(),
            included=self.included,
            noise_std=None if self._mus is None else plan.noise_std,
            mus=self._mus,
            curve=plan.curve,
            informed=self._informed,
            delta=plan.delta,
            epsilon=plan.epsilon,
            independent=independent,
        )

    def __repr__(self) -> str:
        return f"PlantedCanaries({self.canaries!r}, steps_taken={self._release.steps_taken})"


class _KnownTotals:
    """The scores of one who knows the steps of canaries that secret draws chose, and what such a one is promised."""

    def __init__(self, plan: Plan, canaries: Canaries, steps: list[tuple[int, ...]]) -> None:
        self.present = np.array([bool(own) for own in steps])
        given = [own or (0,) for own in steps]  # of those that are nowhere the score is not used
        self.scorer = Scorer(as_released(plan.strategy), given, canaries)
        self.mus = _mus_of(plan, self.scorer.patterns)

    def result(self, included: NDArray[np.bool_], plan: Plan, *, informed: bool, independent: bool) -> Audited:
        if not self.present.any():
            raise ArgumentError("canaries must be more for known=True: no draw put one of these into any step")
        curve = known_curve(plan)
        return Audited(
            scores=self.scorer.scores()[self.present],
            included=included[self.present],
            noise_std=plan.noise_std,
            mus=self.mus[self.present],
            curve=curve,
            informed=informed,
            delta=plan.delta,
            epsilon=curve.epsilon(plan.delta),
            independent=independent,
        )


def known_curve(plan: Plan) -> Gaussian:
    """What a plan under secret sampling promises should its batches become known: the Gaussian of the worst steps."""
    assert plan.known_mu is not None
    return Gaussian(plan.known_mu, neighbours=plan.neighbours, unit=plan.unit)


def _secret_scorer(plan: Plan, canaries: Canaries) -> SampledScorer | SecretScorer:
    probability = plan.participation.draw_probability
    if probability is not None:  # and independent noise: nothing but a sum is kept
        return SampledScorer(canaries, probability, plan.clip_norm, plan.noise_std)
    return SecretScorer(
        as_released(plan.strategy), plan.participation, canaries, plan.clip_norm, plan.noise_std,
        signed=plan.neighbours == "replace-one",
    )  # fmt: skip


def _mus_of(plan: Plan, patterns: Patterns) -> Floats:
    """(count,) the mu of the steps of each canary."""
    seen = visible(plan.strategy, patterns.steps, patterns.distinct)[patterns.of]
    return np.asarray(NEIGHBOURS[plan.neighbours] * plan.clip_norm / plan.noise_std * seen)


def _joined(pieces: "list[Tensor]", grid: float | None) -> Floats:
    """A total in pieces as one vector, in units of the gradient."""
    total = np.concatenate([piece.detach().cpu().double().numpy().reshape(-1) for piece in pieces])
    return total if grid is None else total * grid


def _allowed(patterns: Patterns, plan: Plan) -> Patterns:
    """The patterns, if the plan's rule lets a unit take each of them."""
    family = plan.participation.pattern
    wrong = sum(not family.allows(steps) for steps in patterns.steps)
    if wrong:
        raise ParticipationError(
            f"{wrong} of {len(patterns.steps)} sets of steps of canaries are not allowed: the plan covers "
            f"{plan.participation.describe()}, and its claim is about no others; take steps=None or steps='random'"
        )
    return patterns
