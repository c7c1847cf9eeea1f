"""A whole sweep: what batch size and epochs do to the noise at an epsilon, or to epsilon at a noise.

Noise is measured against the batch, as the model sees it: the noise multiplier that independent noise would need for
the same error in the iterates, over the batch size,

    ratio = error / (batch_size * error of independent noise with noise multiplier 1)

For DP-SGD's independent noise that is noise_multiplier / batch_size. Runs of one ratio and one number of steps, at one
learning rate, have the same noise in their iterates.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

from anyorder.errors import AnyorderError
from anyorder.optimize.candidates import kind_in
from anyorder.plan.plan import Plan
from anyorder.plan.planner import plan, plan_at_sigma, with_budget
from anyorder.planner_page.answers import Piece, unit_rows
from anyorder.planner_page.settings import Settings, Sweep
from anyorder.run.planning import poisson_claim
from anyorder.strategy.registry import in_words

__all__ = ["cells"]


class _Cell(NamedTuple):
    plan: Plan  # at sigma 1, in a known order
    error: float
    white: float  # error of independent noise with noise multiplier 1


def cells(asked: Sweep) -> Iterator[Piece]:
    """A "cell" for every batch size and number of epochs, the shortest runs first.

    A cell has "batch_size", "epochs", "steps", and either "refused", or "name" of the mechanism, "error" of the
    iterates, "ratio", "noise_multiplier" and "epsilon".

    Cost: known orders: milliseconds for independent noise; others take a fit for each cell at first, a second or more,
        kept on disk. Poisson: seconds for each cell of "noise", 0.2 s for each of "epsilon".
    """
    places = [(batch, epochs) for batch in asked.batch_sizes for epochs in asked.epoch_counts]
    for batch, epochs in sorted(places, key=lambda place: place[1] / place[0]):
        cell = {"kind": "cell", "batch_size": batch, "epochs": epochs}
        try:
            settings = replace(asked.base, batch_size=batch, epochs=epochs)
            yield {**cell, "steps": settings.steps, **_values(settings, asked)}
        except AnyorderError as problem:
            yield {**cell, "refused": str(problem)}


def _values(settings: Settings, asked: Sweep) -> dict[str, Any]:
    if settings.order == "poisson":
        return _sampled(settings, asked)
    unit = _unit(
        settings.dataset_size, settings.batch_size, settings.epochs, settings.order, settings.memory,
        settings.momentum, asked.mechanism,
    )  # fmt: skip
    base = replace(unit.plan, delta=settings.delta)
    if asked.measure == "noise":
        found = with_budget(base, epsilon=settings.epsilon)
    else:
        found = with_budget(base, sigma=asked.ratio * settings.batch_size * unit.white / unit.error)
    error = found.sigma * unit.error
    return {
        "name": in_words(found.strategy), "error": error, "ratio": error / (settings.batch_size * unit.white),
        "noise_multiplier": found.sigma * unit.plan.noise_multiplier, "epsilon": found.epsilon,
    }  # fmt: skip


@lru_cache(maxsize=1024)
def _unit(
    dataset_size: int, batch_size: int, epochs: int, order: str, memory: int | None, momentum: float, mechanism: str
) -> _Cell:
    settings = Settings(
        dataset_size=dataset_size, batch_size=batch_size, epochs=epochs, order=order, memory=memory, momentum=momentum,
        epsilon=1.0, delta=1e-5,  # neither moves a fit
    )  # fmt: skip
    if mechanism in ("auto", "blt"):  # as `ao.plan` chooses, from fits that the table shares
        found = [one.plan for one in unit_rows(settings) if mechanism in ("auto", kind_in(one.name))]
    else:
        found = []
    at_one = found[0] if found else plan_at_sigma(1.0, mechanism=mechanism, **settings.arguments())
    white = plan(noise_multiplier=1.0, mechanism="independent", **settings.arguments())
    return _Cell(at_one, at_one.noise_error(), white.noise_error() / white.noise_multiplier)


def _sampled(settings: Settings, asked: Sweep) -> dict[str, Any]:
    if asked.measure == "noise":
        found = _poisson(settings)
        noise, epsilon, white = found.noise_multiplier, found.epsilon, found.noise_error() / found.noise_multiplier
    else:
        noise = asked.ratio * settings.batch_size
        epsilon = poisson_claim(noise, settings.batch_size, settings.dataset_size, settings.steps, settings.delta)
        one = plan(noise_multiplier=1.0, mechanism="independent", **{**settings.arguments(), "order": "fixed"})
        white = one.noise_error() / one.noise_multiplier
    return {
        "name": "independent", "error": noise * white, "ratio": noise / settings.batch_size, "noise_multiplier": noise,
        "epsilon": epsilon,
    }  # fmt: skip


@lru_cache(maxsize=1024)
def _poisson(settings: Settings) -> Plan:
    return plan(epsilon=settings.epsilon, **settings.arguments())
