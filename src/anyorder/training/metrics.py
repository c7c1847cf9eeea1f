"""Numbers of training that are released: a few more coordinates of each unit's vector, under the plan's own noise."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor, nn

from anyorder import checks
from anyorder.checks import final
from anyorder.clipping.coupling import rows_of, tape_of
from anyorder.errors import ArgumentError, CheckpointError, TrainingError
from anyorder.ledger import numbered
from anyorder.plan.plan import Plan
from anyorder.sampling.loader import Batch
from anyorder.strategy.registry import row_variances
from anyorder.training.optimizers import Public
from anyorder.workload import Workload

_MOST, _LEAST = 20, 8  # bits of a value


@final
@dataclass(frozen=True)
class Metrics:
    """The training loss, accuracy or the like, released with each step's gradient at no privacy beyond the plan's.

        engine.make_private(model, optimizer, loader, released=ao.Metrics({"loss": 4.0}))
        ..
        losses = criterion(model(x), y)                # reduction="none": one for each example
        engine.measure(loss=losses)
        losses.mean().backward()
        optimizer.step()
        scheduler.step(engine.metrics.mean("loss", steps=100))

    With a = share, C the plan's clip norm and m metrics of bounds M_j, unit u adds the vector of d + m numbers

        v_u = ( sqrt(1 - a^2) C g_u / max(||g_u||, sqrt(1 - a^2) C),  a C s_u / sqrt(m) )        (`Flat()`, say)
        s_uj = mean over the rows of u of  min(max(x_ij, 0), M_j) / M_j,        0 where x_ij is NaN

    to the sum of a step, which gets the plan's noise in all d + m coordinates and is divided by the batch size. The
    last ones, times M_j sqrt(m) / (a C), are sums over the units of the step, divided by the plan's batch size: means,
    where the step has so many units.

    Guarantee: the plan's own. 0 <= s_uj <= 1, so ||v_u||^2 <= (1 - a^2) C^2 + a^2 C^2 = C^2 whatever is measured, also
    where the gradient or a value is not finite. v_u is a function of the rows of u alone: of the gradient as without
    metrics, of values since each is proved to be one of its row, by the rules that the loss goes through, or refused.
    So a step adds a function of norm at most C for each unit, chosen by earlier releases, to which the Gaussian matrix
    mechanism gives the same mu as to gradients [Denisov et al. 2022, Theorem 2.1]. What is read is post-processing:
    public, as the gradients are. A unit may be zeroed out, removed or replaced in all coordinates together.

    Under a clip norm that moves (`Adaptive`, whose norm is c and whose own count has the share b), the vector of norm
    at most sqrt(1 - a^2) c that this rule makes of g_u takes the place of the gradient's part, and the metrics' part is
    a c s_uj / sqrt(m). Both together have norm at most c, which is all that `Adaptive` asks of a unit; c stays public.

    Rounding: a C s_uj / sqrt(m) is a multiple of a power of two, such that sums are exact in float32 for as many units
    as twice the batch size, up to 2^15, with at least 8 bits for a value. Where the norm moves, sums of 2 B units are
    rounded three times on the way to the plan's norm and back, each by 2^-24 of the sum at most. Two neighbours then
    differ by 12 B 2^-24 of one unit's part more, for which that part is lowered by B 2^-20.

    To measure costs norm: gradients are clipped at sqrt(1 - a^2) C, under the noise of C: 0.995 C for a = 0.1. A metric
    of one step has the noise M sqrt(m) sigma' / (a B) for batches of B and noise of sigma' C: `engine.metrics.std`.

    Attributes:
        bounds: for each name the largest value that counts. What is larger counts as this, what is below 0 as 0.
        share: a, part of the norm C that all metrics have together.
    """

    bounds: Mapping[str, float]
    share: float = 0.1

    SUMS: ClassVar[str] = ".metrics"
    """Name of the sum of these coordinates. No parameter's name begins with a dot."""

    def __post_init__(self) -> None:
        checks.probability("share", self.share)
        if (
            not isinstance(self.bounds, Mapping)
            or not self.bounds
            or not all(type(name) is str for name in self.bounds)
        ):
            raise ArgumentError(f"bounds must be a dict such as {{'loss': 4.0, 'accuracy': 1.0}}, got {self.bounds!r}")
        own = {name: float(checks.positive(f"the bound of {name}", bound)) for name, bound in self.bounds.items()}
        object.__setattr__(self, "bounds", own)

    @property
    def gradient_share(self) -> float:
        """sqrt(1 - a^2), part of the norm C that the gradient has."""
        return math.sqrt(1 - self.share**2)

    def describe(self) -> str:
        """Return a sentence for people."""
        return (
            f"{', '.join(self.bounds)}: released with each step, for {self.share:g} of the clip norm; gradients have "
            f"{self.gradient_share:.4g} of it"
        )


class ReleasedMetrics:
    """The metrics that a run has released so far. All of it is public, as the gradients are."""

    def __init__(self, rule: Metrics, plan: Plan, one: float) -> None:
        self._plan, self._bounds = plan, dict(rule.bounds)
        self._released: list[list[float]] = []  # for each step, the coordinates as they came
        self._one = one
        self._stds: dict[tuple[int, int], float] = {}

    @property
    def steps(self) -> int:
        """Number of steps whose metrics were released."""
        return len(self._released)

    def values(self, name: str) -> list[Public]:
        """The metric of each step, with its noise."""
        place, scale = self._place(name)
        return [Public(row[place] * scale) for row in self._released]

    def mean(self, name: str, steps: int | None = None) -> Public:
        """The mean of a metric over the last steps; None: over all so far. Its noise is that of `std`.

        Raises: TrainingError before as many steps were taken.
        """
        start, end = self._window(steps)
        place, scale = self._place(name)
        return Public(math.fsum(row[place] for row in self._released[start:end]) / (end - start) * scale)

    def std(self, name: str, steps: int | None = None) -> float:
        """Standard deviation of the noise in `mean`, which is normal.

            noise_std || sum of the rows of C^-1 of these steps || / (number of steps, batch size), in units of M / a C

        Correlated noise cancels in sums over many steps, and a mean over an epoch may have far less of it than that of
        an independent one; that of one step has more.
        """
        start, end = window = self._window(steps)
        if window not in self._stds:
            counted = np.zeros(self._plan.n)
            counted[start:end] = 1
            workload = Workload(self._plan.n, learning_rates=counted)
            self._stds[window] = math.sqrt(row_variances(self._plan.strategy, workload)[end - 1]) / (end - start)
        _, scale = self._place(name)
        return self._plan.noise_std * self._stds[window] / self._plan.batch_size * scale

    def _place(self, name: str) -> tuple[int, float]:
        """Which coordinate it is, and what takes it to the metric's own units."""
        if name not in self._bounds:
            raise ArgumentError(f"the metrics of this run are {', '.join(self._bounds)}, got {name!r}")
        return list(self._bounds).index(name), self._bounds[name] / self._one

    def _window(self, steps: int | None) -> tuple[int, int]:
        end = self.steps
        count = end if steps is None else checks.integer("steps", steps, low=1)
        if not 0 < count <= end:
            raise TrainingError(
                f"metrics of {end} steps were released so far: a mean over {count or 'them'} is to come"
            )
        return end - count, end

    def __repr__(self) -> str:
        if not self.steps:
            return f"ReleasedMetrics({', '.join(self._bounds)}; no step yet)"
        each = [f"{name}={self.mean(name):.4g} +- {self.std(name):.2g}" for name in self._bounds]
        return f"ReleasedMetrics({', '.join(each)}; mean of {self.steps} steps)"


@dataclass(frozen=True)
class _Multiples:
    """Of what the coordinates are multiples: sums are exact, so that a unit moves them by its own part alone.

    Attributes:
        step: a power of two.
        top: the largest multiple; top step <= a C / sqrt(m).
    """

    step: float
    top: int

    @classmethod
    def of(cls, rule: Metrics, plan: Plan, *, norm_moves: bool = False) -> "_Multiples":
        # Less than the share by what clip norms are lowered by, so that roundings of roots cannot carry a unit over.
        rounding = 2.0**-21 + (min(plan.batch_size * 2.0**-20, 0.5) if norm_moves else 0.0)
        largest = rule.share * plan.clip_norm / math.sqrt(len(rule.bounds)) * (1 - rounding)
        _, exponent = math.frexp(largest)
        bits = min(_MOST, max(_LEAST, 23 - math.ceil(math.log2(plan.batch_size))))
        step = math.ldexp(1.0, exponent - bits)
        return cls(step, int(largest / step))

    @property
    def one(self) -> float:
        """What a unit adds whose value is the bound."""
        return self.top * self.step


class Measuring:
    """The metrics of a run: what is measured of its batches, up to the release of each step.

    Attributes:
        parameter: stands for the coordinates among the parameters; it is never trained.
        released: what has come out.

    Args:
        norm_moves: whether the clip norm follows what was released, under `Adaptive`.
    """

    def __init__(self, rule: Metrics, plan: Plan, *, norm_moves: bool = False) -> None:
        self.rule = rule
        self.parameter = nn.Parameter(torch.zeros(len(rule.bounds), dtype=torch.float64), requires_grad=False)
        self._bounds, self._multiples = dict(rule.bounds), _Multiples.of(rule, plan, norm_moves=norm_moves)
        self.released = ReleasedMetrics(rule, plan, self._multiples.one)
        self._called: tuple[Batch, Callable[[], Any]] | None = None
        self._sums: WeakKeyDictionary[Batch, Tensor] = WeakKeyDictionary()

    def begin(self, batch: Batch, outputs: Any, given: Any) -> None:
        """The model was called on this batch: what is measured now is of it."""
        self._called = batch, tape_of(outputs, given)

    def measure(self, values: Mapping[str, Any]) -> None:
        """Take the values of each row of the batch that the model was called on last."""
        if self._called is None or self._called[0].used:
            raise TrainingError("engine.measure(..) is called after model(x), and before the backward pass of its loss")
        if values.keys() != self._bounds.keys():
            raise ArgumentError(
                f"engine.measure takes the metrics of this run, {', '.join(self._bounds)}, got {', '.join(values)}"
            )
        batch, tape = self._called
        rows = [rows_of(name, values[name], batch.rows, tape())[: len(batch.units)] for name in self._bounds]
        self._sums[batch] = torch.stack([
            self._sum(row, bound, batch) for row, bound in zip(rows, self._bounds.values(), strict=True)
        ])  # fmt: skip

    def _sum(self, rows: Tensor, bound: float, batch: Batch) -> Tensor:
        """The sum over units of the mean of their rows, in float64: multiples, exactly."""
        kept = rows.detach().to("cpu", torch.float64).nan_to_num(nan=0.0).clamp(0.0, bound) / bound
        units = torch.from_numpy(numbered(batch.units))
        counts = torch.bincount(units)
        each = torch.zeros(len(counts), dtype=torch.float64).index_add_(0, units, kept) / counts
        return (each.clamp(max=1.0) * self._multiples.top).round().sum() * self._multiples.step

    def joined(self, batch: Batch, sums: dict[str, Tensor], scale: float) -> dict[str, Tensor]:
        """The clipped sums of a batch, and those of its metrics.

        Args:
            scale: the norm in force over the plan's, in which the multiples are.
        """
        if batch not in self._sums:
            raise TrainingError(
                f"nothing was measured of this batch: this run releases {', '.join(self._bounds)}, so call "
                "engine.measure(..) after model(x), and before the backward pass of its loss"
            )
        dense = next((x for x in sums.values() if x.is_floating_point()), self.parameter)
        return {**sums, Metrics.SUMS: (self._sums.pop(batch) * scale).to(dense.device, dense.dtype)}

    def record(self, step: int, released: list[float]) -> None:
        """Take what was released of a step."""
        self.check_step(step)
        self.released._released.append(released)

    def check_step(self, step: int) -> None:
        """Refuse to go on where a step was broken off between its release and its metrics."""
        if self.released.steps != step:
            raise TrainingError(
                f"the metrics of step {self.released.steps} are missing: the step was broken off after its release; "
                "resume from the last checkpoint in a new engine"
            )

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint."""
        return {"rule": repr(self.rule), "released": [list(row) for row in self.released._released]}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Go on where `state_dict` was taken."""
        self.released._released = [list(row) for row in saved["released"]]


def check_metrics(own: Measuring | None, saved: dict[str, Any] | None) -> None:
    """Raise CheckpointError if the state is of a run that releases other metrics; None: it releases none."""
    rule, other = None if own is None else repr(own.rule), None if saved is None else saved["rule"]
    if rule != other:
        raise CheckpointError(
            f"the checkpoint was written with released={other}, and this run has released={rule}; resume with the "
            "metrics of the run"
        )
