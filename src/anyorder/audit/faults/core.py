"""The faults: each was made by somebody, once; each is planted in what all front ends go through."""

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from anyorder._draws import Draws
from anyorder.audit.faults import sums
from anyorder.audit.faults.front_end import Fault, Reached, SumFault, patched
from anyorder.audit.faults.trial import BATCH_SIZE
from anyorder.ledger import Ledger
from anyorder.noise import NoiseSource, program
from anyorder.noise.compiled import CompiledPath
from anyorder.participation import MinSeparation, RandomAllocation
from anyorder.plan.plan import Plan
from anyorder.release.release import Release, SharedNoise
from anyorder.strategy.sensitivity import Bound

__all__ = ["FAULTS"]

_STEP, _LAG = 7, 3  # the step that a fault takes something from, and how much later it comes back
_SHRINKS = 0.7  # the clip norm of a step over that of the step before


# -- the noise ---------------------------------------------------------------------------------------------------------


@contextmanager
def half_the_noise(reached: Reached) -> Iterator[None]:
    """The release gives its noise half the standard deviation that was planned."""
    real = SharedNoise.__init__

    def init(self: Any, strategy: Any, source: Any, std: float, *rest: Any) -> None:
        reached()
        real(self, strategy, source, std / 2, *rest)

    with patched(SharedNoise, "__init__", init):
        yield


@contextmanager
def noise_used_again(reached: Reached) -> Iterator[None]:
    """One step is given the noise of the step before."""

    def change(step: int, noise: Any, before: Any) -> Any:
        if step != _STEP:
            return noise
        reached()
        return before

    with _other_noise(change):
        yield


@contextmanager
def row_used_again(reached: Reached) -> Iterator[None]:
    """One row of Z is that of the step before, as if two steps had one address; what is made of the rows is right."""
    trace, prepare, add_to_vector = program.trace, program.NoiseState.prepare, CompiledPath.add_to_vector

    def traced(*arguments: Any) -> Any:
        found = trace(*arguments)
        if _STEP in found.rows:
            reached()
        return found._replace(rows=tuple(_STEP - 1 if row == _STEP else row for row in found.rows))

    def prepared(self: Any) -> Any:
        made, arrays = prepare(self)
        if self.is_rows and self.t == _STEP:
            reached()
            made.program.ops["row"] = _STEP - 1
        return made, arrays

    def added(self: Any, state: Any, x: Any, scale: float) -> bool:
        if state.t != _STEP:
            return add_to_vector(self, state, x, scale)
        state.t = _STEP - 1
        is_done = add_to_vector(self, state, x, scale)
        state.t = _STEP + is_done
        if is_done:
            reached()
        return is_done

    with (
        patched(program, "trace", traced),
        patched(program.NoiseState, "prepare", prepared),
        patched(CompiledPath, "add_to_vector", added),
    ):
        yield


@contextmanager
def stale_kernel(reached: Reached) -> Iterator[None]:
    """The compiled step is one of a strategy with other coefficients: the key of the cache forgot them."""
    real = program.compile_step

    def compile_step(traced: Any, *rest: Any) -> Any:
        tape = tuple(
            (kind, (np.frombuffer(number, np.float32)[0] / np.float32(2)).tobytes(), *operands)
            if kind == "product"
            else (kind, number, *operands)
            for kind, number, *operands in traced.tape
        )
        if tape != traced.tape:
            reached()
        return real(traced._replace(tape=tape), *rest)

    with patched(program, "compile_step", compile_step):
        yield


@contextmanager
def shared_noise(reached: Reached) -> Iterator[None]:
    """The second half of the coordinates is given the noise of the first, as two shards that begin at one place."""

    def change(step: int, noise: Any, before: Any) -> Any:
        reached()
        half = len(noise) // 2
        return np.concatenate([noise[:half], noise[:half], noise[2 * half :]])

    with _other_noise(change):
        yield


@contextmanager
def missing_noise(reached: Reached) -> Iterator[None]:
    """The last coordinates are given no noise, as a loop that ends too early leaves them."""

    def change(step: int, noise: Any, before: Any) -> Any:
        reached()
        return np.concatenate([noise[:-3], np.zeros_like(noise[-3:])])

    with _other_noise(change):
        yield


@contextmanager
def _other_noise(change: Any) -> Iterator[None]:
    """Within it, what is added to a sum in a step is change(step, noise, noise of the step before): flat arrays."""
    real = SharedNoise.add_to
    before: dict[int, Any] = {}

    def add_to(self: Any, own: list[Any], divisor: float) -> list[Any]:
        step = self._streams[0].t
        unit = 1.0 if self._grid is None else self._grid
        sums = [x.double() * unit for x in own]
        made = real(self, own, divisor)
        noise = torch.cat([(x.double() * divisor - total).reshape(-1) for x, total in zip(made, sums, strict=True)])
        changed = torch.from_numpy(change(step, noise.cpu().numpy(), before.get(id(self))))
        before[id(self)] = noise.cpu().numpy()
        parts = torch.split(changed, [x.numel() for x in made])
        for x, total, part in zip(made, sums, parts, strict=True):
            x.copy_((total + part.view(x.shape).to(x.device)) / divisor)
        return made

    with patched(SharedNoise, "add_to", add_to):
        yield


# -- the claim, and who may come ---------------------------------------------------------------------------------------


@contextmanager
def one_participation(reached: Reached) -> Iterator[None]:
    """The plan accounts for one participation of a unit, where there are three."""

    def sensitivity(strategy: Any, _: Any) -> Bound:
        reached()
        return Bound(float(np.sqrt(strategy.column_norms_squared().max())), True)

    with patched(sys.modules[Plan.__module__], "sensitivity", sensitivity):
        yield


def one_step_closer(rule: MinSeparation) -> MinSeparation:
    """Units come back one step earlier than the noise was planned for."""
    return replace(rule, b=rule.b - 1)


def once_more(rule: MinSeparation) -> MinSeparation:
    """Units come once more than the noise was planned for."""
    return replace(rule, k=rule.max_participations + 1)


def lets_in(looser: Callable[[MinSeparation], MinSeparation]) -> Callable[[Reached], AbstractContextManager[None]]:
    """The ledger guards a looser rule than the plan's."""

    @contextmanager
    def plant(reached: Reached) -> Iterator[None]:
        real = Ledger._refusals

        def refusals(self: Any, t: int, ids: Any) -> Any:
            rule = self.participation
            if not isinstance(rule, MinSeparation):
                return real(self, t, ids)
            if any(wrong.any() for _, wrong in real(self, t, ids)):
                reached()
            return looser(rule).refusals(t, *self._seen.look_up(ids))

        with patched(Ledger, "_refusals", refusals):
            yield

    return plant


@contextmanager
def larger_probability(reached: Reached) -> Iterator[None]:
    """Units are drawn with a larger probability than the claim is for."""
    real = Draws.__init__

    def init(self: Any, rule: Any, size: int, source: Any, rates: Any = None) -> None:
        reached()
        real(self, replace(rule, sampling_probability=min(1.0, 10 * rule.sampling_probability)), size, source, rates)

    with patched(Draws, "__init__", init):
        yield


@contextmanager
def public_bins(reached: Reached) -> Iterator[None]:
    """A unit's bin is its number modulo b: everybody knows it."""

    def step(self: Any, t: int) -> Any:
        reached()
        return np.arange(t % self.rule.b, self.size, self.rule.b)

    with patched(Draws, "step", step):
        yield


@contextmanager
def bins_in_each_epoch(reached: Reached) -> Iterator[None]:
    """Bins are drawn again in each epoch, where the claim is for bins that stay."""
    real = Draws.step

    def step(self: Any, t: int) -> Any:
        reached()
        again = Draws(RandomAllocation(self.rule.k, self.rule.b), self.size, self._source)
        return real(again, t)

    with patched(Draws, "step", step):
        yield


@contextmanager
def draws_of_another_run(reached: Reached) -> Iterator[None]:
    """Each run makes the same draws, as those of a generator whose seed somebody fixed."""
    real = Draws.__init__

    def init(self: Any, rule: Any, size: int, source: Any, rates: Any = None) -> None:
        reached()
        real(self, rule, size, NoiseSource(bytes(32)), rates)

    with patched(Draws, "__init__", init):
        yield


# -- the sums, between the front end and the noise ---------------------------------------------------------------------


@contextmanager
def next_clip_norm(reached: Reached) -> Iterator[None]:
    """The clip norm shrinks, and the noise is scaled with the norm of the next step, not with that of the sum."""
    real, divisor = Release.take, Release.divisor

    def take(self: Any, units: Any, own: Any, place: str = "", tables: Any = ()) -> Any:
        reached()
        return real(self, units, [x / _SHRINKS for x in own], place, [part.scaled(1 / _SHRINKS) for part in tables])

    of_next = property(lambda self: divisor.__get__(self) / _SHRINKS)
    with patched(Release, "take", take), patched(Release, "divisor", of_next):
        yield


@contextmanager
def sum_kept_for_later(reached: Reached) -> Iterator[None]:
    """The sum of one step is added again some steps later, where nobody names its units."""
    kept: dict[int, Any] = {}

    def change(release: Any, own: list[Any]) -> list[Any]:
        step = release.ledger.step
        if step == _STEP:
            kept[id(release)] = [x.clone() for x in own]
        if step != _STEP + _LAG or id(release) not in kept:
            return own
        reached()
        return [x + y for x, y in zip(own, kept[id(release)], strict=True)]

    with _other_sums(change):
        yield


@contextmanager
def momentum_before_noise(reached: Reached) -> Iterator[None]:
    """The sums go through a momentum of 0.9 before the noise is added, which was planned for sums alone."""
    velocity: dict[int, Any] = {}

    def change(release: Any, own: list[Any]) -> list[Any]:
        before = velocity.get(id(release))
        if before is not None:
            reached()
        moved = own if before is None else [(x + 0.9 * y).to(x.dtype) for x, y in zip(own, before, strict=True)]
        velocity[id(release)] = [x.clone() for x in moved]
        return moved

    with _other_sums(change):
        yield


@contextmanager
def _other_sums(change: Any) -> Iterator[None]:
    """Within it, a release takes change(release, pieces) for the pieces of a sum, whole tables among them."""
    real = Release.take

    def take(self: Any, units: Any, own: Any, place: str = "", tables: Any = ()) -> Any:
        pieces = change(self, [*own, *(part.whole() for part in tables)])
        parts = [part.of_whole(x) for part, x in zip(tables, pieces[len(own) :], strict=True)]
        return real(self, units, pieces[: len(own)], place, parts)

    with patched(Release, "take", take):
        yield


FAULTS: tuple[Fault | SumFault, ...] = (
    Fault("half the noise", half_the_noise),
    Fault("noise of a step used again", noise_used_again),
    Fault("row of Z used again", row_used_again),
    Fault("stale kernel", stale_kernel),
    Fault("noise shared by two shards", shared_noise),
    Fault("no noise on the last coordinates", missing_noise),
    Fault("one participation accounted", one_participation),
    Fault("separation off by one", lets_in(one_step_closer), looser=one_step_closer),
    Fault("one participation too many", lets_in(once_more), looser=once_more),
    Fault("larger sampling probability", larger_probability, sampled=True),
    Fault("bins that are public", public_bins, bins=True),
    Fault("a new bin in each epoch", bins_in_each_epoch, bins=True),
    Fault("draws of another run", draws_of_another_run, bins=True),
    Fault("half the noise, balls in bins", half_the_noise, bins=True),
    Fault("clip norm of the next step", next_clip_norm),
    Fault("sum kept for later", sum_kept_for_later),
    Fault("momentum before the noise", momentum_before_noise),
    SumFault("clip after averaging", sums.clipped_after_averaging),
    SumFault("weights by count", sums.weighted_by_count),
    SumFault("clip by rows", sums.clipped_by_rows),
    SumFault("divided by who came", lambda: sums.divided_by_who_came(BATCH_SIZE)),
    SumFault("zero update divides by zero", sums.divided_by_zero),
    SumFault("unit kept for later", sums.kept_for_later),
)
"""What every front end is audited for; a change of this list is a change of what an audit says."""
