"""A front end carries a trial out, faulty perhaps, and all that is known of the trial is held against what it gave."""

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from math import sqrt
from typing import Any, assert_never

import numpy as np
from scipy.special import ndtr

from anyorder.audit.bounds import p_value
from anyorder.audit.canaries import as_released, sampled_scores, scores
from anyorder.audit.faults.core import FAULTS
from anyorder.audit.faults.front_end import Fault, FrontEnd, Reached, SumFault
from anyorder.audit.faults.sums import Summing
from anyorder.audit.faults.trial import BinsTrial, FaultTrial, Released, SampledTrial
from anyorder.audit.laws import LEAST, NoiseLaw, echo, noise_law, order_law
from anyorder.errors import AnyorderError, ArgumentError, MissingDependencyError, TrainingError
from anyorder.strategy import Strategy

__all__ = ["SIGNIFICANCE", "Case", "Verdict", "attack", "audit_front_end", "cases", "echoes", "noise"]

SIGNIFICANCE = 1e-6
"""A run is refuted below it."""

Part = Callable[[FaultTrial, Released], NoiseLaw]
Secret = Callable[[FrontEnd, int, Fault | None], tuple[NoiseLaw, str | None]]

_BINS = "balls in bins"


def attack(trial: FaultTrial, released: Released) -> NoiseLaw:
    """Test whether included canaries stand out by more than the claimed mu: needs the rows and the draws, no sums.

    "attack" estimates the noise from the scores; "attack, planned noise" takes the plan's, and sees smaller excesses.
    """
    plan, included = trial.plan, trial.included
    if not np.isfinite(released.rows).all():
        return NoiseLaw({"finite": 0.0})
    own = trial.own[: trial.canaries.count]
    found = scores(released.rows, as_released(plan.strategy), own, trial.canaries)
    gap = found[included].mean() - found[~included].mean()
    excess = (gap / plan.noise_std - _mu(trial)) / sqrt(1 / included.sum() + 1 / (~included).sum())
    return NoiseLaw({
        "attack": p_value(found, included, plan.curve, method="gaussian"),
        "attack, planned noise": max(float(ndtr(-excess)), LEAST),
    })  # fmt: skip


def noise(trial: FaultTrial, released: Released) -> NoiseLaw:
    """Test whether what was added to the sums is the planned noise; see `noise_law`."""
    return noise_law(released.rows, released.totals, trial.plan.strategy, trial.plan.noise_std)


def echoes(trial: FaultTrial, released: Released) -> NoiseLaw:
    """Test whether canaries are anywhere but in their own steps; see `echo`."""
    return echo(
        released.rows,
        trial.canaries,
        trial.included,
        trial.own[: trial.canaries.count],
        trial.plan.strategy,
        trial.plan.noise_std,
        totals=released.totals,
    )


PARTS: tuple[Part, ...] = (attack, noise, echoes)
"""What an audit is made of."""


def _mu(trial: FaultTrial) -> float:
    mu = trial.plan.mu
    assert mu is not None  # of a plan without secret sampling
    return mu


@dataclass(frozen=True)
class Verdict:
    """The result of an audit of a front end.

    Attributes:
        front_end, fault: their names; None for an honest run.
        law: the p-values of all tests.
        seconds: of run and tests.
        reached: how often the fault was run; 0 for an honest run.
        refused: the error by which the package stopped the run, else None.
    """

    front_end: str
    fault: str | None
    law: NoiseLaw
    seconds: float
    reached: int = 0
    refused: str | None = None

    @property
    def p_value(self) -> float:
        """The p-value of all tests together; 0 where the package refused to go on, which counts as found."""
        return 0.0 if self.refused is not None else self.law.p_value

    @property
    def refuted(self) -> bool:
        """True if the run is not what the plan claims, at 1e-6."""
        return self.p_value < SIGNIFICANCE

    @property
    def strongest(self) -> str:
        """The test that says so most clearly."""
        found = self.law.p_values
        return "refused" if self.refused is not None else min(found, key=lambda name: found[name])

    def __str__(self) -> str:
        told = f"{self.front_end}, {self.fault or 'honest'}: p = {self.p_value:.3g} ({self.strongest})"
        return f"{told}, {self.seconds:.2f} s"


def audit_front_end(
    front_end: FrontEnd,
    fault: Fault | SumFault | None = None,
    *,
    seed: int = 0,
    strategy: Callable[[int], Strategy] | None = None,
    parts: tuple[Part, ...] = PARTS,
    **sizes: int,
) -> Verdict:
    """Have a front end carry a trial out, with a fault planted or without, and test what it released.

    Args:
        front_end: who runs.
        fault: what is planted; None for an honest run.
        seed: of the trial.
        strategy: n -> C; None for the front end's first.
        parts: tests; all of them unless a test of the audit itself leaves some out.
        sizes: of the trial: n, size, count, others.
    Returns: Verdict.
    Raises: TrainingError if the fault was never reached, and so nothing was tested; ArgumentError if the front end
        has no `summing`, `sampled` or `bins` that the fault needs.
    """
    reached = Reached()
    start = time.perf_counter()
    with _planted(front_end, fault, reached):
        if isinstance(fault, Fault) and fault.sampled:
            law, refused = _poisson(front_end, seed, fault)
        elif isinstance(fault, Fault) and fault.bins:
            law, refused = _bins(front_end, seed, fault)
        else:
            looser = fault.looser if isinstance(fault, Fault) else None
            trial = FaultTrial(seed, strategy or front_end.strategies[0], looser=looser, **sizes)
            rows, refused = _rows(lambda: front_end.run(trial), fault)
            law = NoiseLaw({})
            if refused is None:
                released = trial.released(rows)
                law = _joined([part(trial, released) for part in parts])
    if fault is not None and not reached.count:
        raise TrainingError(
            f"the fault {fault.name!r} was not reached by {front_end.name}: it goes another way, and nothing was "
            "tested. Plant the fault where it goes, or excuse it in words"
        )
    name = None if fault is None else fault.name
    return Verdict(front_end.name, name, law, time.perf_counter() - start, reached.count, refused)


def _joined(laws: list[NoiseLaw]) -> NoiseLaw:
    found = NoiseLaw({})
    for law in laws:
        found = found | law
    return found


def _planted(front_end: FrontEnd, fault: Fault | SumFault | None, reached: Reached) -> AbstractContextManager[Any]:
    match fault:
        case None:
            return nullcontext()
        case Fault():
            return fault.plant(reached)
        case SumFault():
            if front_end.summing is None:
                raise ArgumentError(
                    f"{front_end.name} must have summing= to be given the fault {fault.name!r}, or an excuse for it"
                )
            return front_end.summing(_counted(fault.make(), reached))
        case _:
            assert_never(fault)


def _counted(total: Summing, reached: Reached) -> Summing:
    def counted(vectors: Any, units: Any, clip_norm: float) -> Any:
        reached()
        return total(vectors, units, clip_norm)

    return counted


def _rows(run: Callable[[], Iterable[Any]], fault: Fault | SumFault | None) -> tuple[list[Any], str | None]:
    """What a front end released; or, under a fault, the error by which the package stopped it."""
    try:
        return list(run()), None
    except AnyorderError as problem:
        if fault is None or isinstance(problem, MissingDependencyError):
            raise
        return [], type(problem).__name__


def _sampled(front_end: FrontEnd, trial: SampledTrial, fault: Fault | None) -> tuple[NoiseLaw, str | None]:
    """Under secret sampling: the best test of each canary, and the two errors of a threshold on it."""
    run, plan = front_end.sampled, trial.plan
    if run is None:
        raise ArgumentError(f"{front_end.name} must have sampled= to be audited under secret sampling, or an excuse")
    rows, refused = _rows(lambda: run(trial), fault)
    if refused is not None:
        return NoiseLaw({}), refused
    if len(rows) != plan.n:
        raise TrainingError(f"the front end released {len(rows)} rows, and the plan has {plan.n} steps")
    found = sampled_scores(
        [np.asarray(row, dtype=np.float64).reshape(-1) * plan.batch_size for row in rows],
        trial.canaries,
        sampling_probability=trial.sampling_probability,
        clip_norm=plan.clip_norm,
        noise_std=plan.noise_std,
    )
    return NoiseLaw(
        {"attack on secret draws": p_value(found, trial.included, plan.curve, method="clopper_pearson")}
    ), None


def _bins(front_end: FrontEnd, seed: int, fault: Fault | None) -> tuple[NoiseLaw, str | None]:
    """Under balls in bins: the law of the batches of two runs, and that of the noise of the first."""
    run = front_end.bins
    if run is None:
        raise ArgumentError(f"{front_end.name} must have bins= to be audited under balls in bins")
    there, laws = [], []
    for trial in (BinsTrial(seed), BinsTrial(seed, 1)):
        rows, refused = _rows(lambda trial=trial: run(trial), fault)  # type: ignore[misc]
        if refused is not None:
            return NoiseLaw({}), refused
        present, released = trial.present(rows)
        there.append(present)
        laws.append(noise_law(released.rows, released.totals, trial.plan.strategy, trial.plan.noise_std))
    return order_law(there[0], trial.plan.participation, there[1]) | laws[0], None


@dataclass(frozen=True)
class Case:
    """One test of a front end: an honest run that must not be refuted, or a fault that must.

    Attributes:
        front_end, fault, strategy: as for `audit_front_end`.
        excuse: why it is not run, else None.
        order: of an honest run without a strategy: "secret sampling" or "balls in bins".
    """

    front_end: FrontEnd
    fault: Fault | SumFault | None = None
    strategy: Callable[[int], Strategy] | None = None
    excuse: str | None = None
    order: str = "secret sampling"

    @property
    def name(self) -> str:
        """The name of the case, in a few words."""
        if self.fault is not None:
            return f"{self.front_end.name}: {self.fault.name}"
        kind = self.order if self.strategy is None else self.strategy.__name__.replace("_", " ")
        return f"{self.front_end.name}: honest, {kind}"

    def check(self, seed: int = 0) -> Verdict:
        """Run it.

        Raises: AssertionError if an honest run is refuted, or a fault is not found.
        """
        if self.fault is None and self.strategy is None:
            verdict = _honest_secret(self.front_end, seed, _bins if self.order == _BINS else _poisson)
        else:
            verdict = audit_front_end(self.front_end, self.fault, seed=seed, strategy=self.strategy)
        if self.fault is None and verdict.refuted:
            raise AssertionError(f"the audit refutes an honest run: {verdict}; {dict(verdict.law.p_values)}")
        if self.fault is not None and not verdict.refuted:
            raise AssertionError(f"the audit does not find the fault: {verdict}; {dict(verdict.law.p_values)}")
        return verdict


def _poisson(front_end: FrontEnd, seed: int, fault: Fault | None) -> tuple[NoiseLaw, str | None]:
    return _sampled(front_end, SampledTrial(seed), fault)


def _honest_secret(front_end: FrontEnd, seed: int, audited: Secret) -> Verdict:
    start = time.perf_counter()
    law, _ = audited(front_end, seed, None)
    return Verdict(front_end.name, None, law, time.perf_counter() - start)


def cases(front_end: FrontEnd) -> Iterator[Case]:
    """All tests of a front end: honest ones first, then one for each fault."""
    for strategy in front_end.strategies:
        yield Case(front_end, strategy=strategy)
    if front_end.sampled is not None:
        yield Case(front_end)
    if front_end.bins is not None:
        yield Case(front_end, order=_BINS)
    for fault in (*FAULTS, *front_end.faults):
        excuse = front_end.excuses.get(fault.name)
        if excuse is None and isinstance(fault, Fault) and fault.bins and front_end.bins is None:
            excuse = "it takes no plan of balls in bins"
        yield Case(front_end, fault, excuse=excuse)
