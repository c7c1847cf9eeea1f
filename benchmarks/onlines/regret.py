"""Measured regret beside the bounds, against n and d; least squares by two sums beside the generic learner.

Streams of single examples, epsilon 2, delta 1e-6, zero-out, lambda of `best_regularization`; the mean of 16 streams,
each with its own noise of the plan's dense matrices. The iterates are those of `Learner`, for all streams at once.
*adversary*: linear losses of norm 1 by one who reads the noise off each model and pulls against it, as long as the sum
of the gradients stays within lambda radius, where the best model is at its best; no constraint, radius 1. *logistic*:
rows on the unit sphere, labels drawn by a model of norm 4, on the ball of radius 4. Regret is the mean over examples
against the best model within the radius, found when all is over. Slopes are those of least squares through
(log n, log mean regret), with their standard errors; beside each is that of the bound, at the same points.

*lambda*: logistic regret at multiples of that lambda. *squares*: rows in the unit ball, y in [-1, 1] of a model of norm
0.8 with noise of 0.1; batches of 16; the mean of (y - <x, theta>)^2 on the stream, less that of the best model of
norm 1, by `LeastSquares`, and by `Learner` with `Squared()`, at the same epsilon, both on the ball of radius 1; 2 keys.

Measurements are kept in benchmarks/results/regret.jsonl, and made where they are not there.
"""

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

import anyorder as ao
from anyorder.online import Ball, Learner, LeastSquares, best_regularization, regret_bound
from anyorder.online.losses import Logistic, Squared
from anyorder.strategy import Independent, SquareRoot
from benchmarks._report import Row

KEPT = Path(__file__).resolve().parents[1] / "results" / "regret.jsonl"
MECHANISMS = ("tree", "blt", "square root", "independent")
NS, DS, STREAMS, KEYS = (256, 512, 1024, 2048, 4096), (4, 8, 16, 32, 64), 16, 2
N, D = 1024, 8
MULTIPLES = (0.03, 0.1, 0.3, 1.0, 3.0)
RADIUS = {"adversary": 1.0, "logistic": 4.0}
SQUARES_D, SQUARES_N = (5, 20, 60), (2048, 8192)
Floats = NDArray[np.float64]


class Setting(NamedTuple):
    """One measurement."""

    stream: str
    mechanism: str
    n: int
    d: int
    key: int
    multiple: float = 1.0


def settings(quick: bool) -> list[Setting]:
    """All that are measured."""
    ns, ds, keys = ((256, 512, 1024), (4, 8, 16), 1) if quick else (NS, DS, KEYS)
    middle = (ns[-1], ds[1]) if quick else (N, D)
    found = [
        Setting(stream, mechanism, n, d, 0)
        for stream in RADIUS
        for mechanism in MECHANISMS
        for n, d in [*((n, middle[1]) for n in ns), *((middle[0], d) for d in ds if d != middle[1] or quick)]
    ]
    found += [
        Setting("logistic", mechanism, *middle, 0, multiple)
        for mechanism in ("tree", "blt")
        for multiple in MULTIPLES
        if multiple != 1.0
    ]
    found += [
        Setting(way, mechanism, n, d, key)
        for way in ("two sums", "generic")
        for mechanism in ("tree", "blt")
        for n, d in ([(1024, 5)] if quick else [(n, d) for n in SQUARES_N for d in SQUARES_D])
        for key in range(keys)
    ]
    return list(dict.fromkeys(found))


@cache
def plan(mechanism: str, n: int, batch_size: int = 1, clip_norm: float = 1.0) -> ao.Plan:
    steps = -(-n // batch_size)
    chosen: Any = SquareRoot(steps) if mechanism == "square root" else mechanism
    return ao.plan(
        dataset_size=n, batch_size=batch_size, epochs=1, epsilon=2.0, delta=1e-6, mechanism=chosen, clip_norm=clip_norm
    )


def measured(one: Setting) -> dict[str, Any]:
    """The setting with its regret and bound."""
    generator = np.random.default_rng([one.key, one.n, one.d])
    match one.stream:
        case "adversary":
            regret, bound = _adversary(one, generator)
        case "logistic":
            regret, bound = _logistic(one, generator)
        case _:
            regret, bound = _squares(one, generator), None
    return {**one._asdict(), "regret": regret, "bound": bound}


def _options(one: Setting) -> tuple[ao.Plan, float, float]:
    """The plan, lambda, and the bound on the mean regret."""
    made, radius = plan(one.mechanism, one.n), RADIUS[one.stream]
    at = one.multiple * best_regularization(one.n, one.d, lipschitz=1.0, radius=radius, plan=made)
    bound = regret_bound(
        one.n, one.d, lipschitz=1.0, radius=radius, plan=made, beta=None, regularization=at,
        diameter=np.inf if one.stream == "adversary" else 2 * radius,
    )  # fmt: skip
    return made, at, bound.value


def _noise(made: ao.Plan, d: int, generator: np.random.Generator) -> Floats:
    """(n, STREAMS, d): the noise in each prefix sum."""
    if type(made.strategy) is Independent:
        return made.noise_std * np.cumsum(generator.normal(size=(made.n, STREAMS, d)), axis=0)
    matrix = np.cumsum(made.strategy.noising_matrix(), axis=0)
    drawn = generator.normal(size=(matrix.shape[1], STREAMS * d))
    return (made.noise_std * (matrix @ drawn)).reshape(made.n, STREAMS, d)


def _adversary(one: Setting, generator: np.random.Generator) -> tuple[float, float]:
    made, at, bound = _options(one)
    noise = _noise(made, one.d, generator)
    total, paid = np.zeros((STREAMS, one.d)), np.zeros(STREAMS)
    for t in range(one.n):
        behind = noise[t - 1] if t else np.zeros_like(total)
        theta = -(total + behind) / at
        g = -behind / np.linalg.norm(behind, axis=1, keepdims=True) if t else np.eye(one.d)[:1].repeat(STREAMS, 0)
        far = np.linalg.norm(total, axis=1, keepdims=True)
        outward = np.maximum(0.0, (g * total).sum(1, keepdims=True)) / np.maximum(far, 1e-9) ** 2
        beyond = np.linalg.norm(total + g, axis=1, keepdims=True) > at * RADIUS["adversary"]
        g = g - np.where(beyond, outward, 0.0) * total  # then only along the sphere
        paid += (g * theta).sum(1)
        total += g
    best = RADIUS["adversary"] * np.linalg.norm(total, axis=1)
    return float((paid + best).mean()) / one.n, bound


def _logistic(one: Setting, generator: np.random.Generator) -> tuple[float, float]:
    made, at, bound = _options(one)
    radius, loss = RADIUS["logistic"], Logistic()
    X = generator.normal(size=(one.n, STREAMS, one.d))
    X /= np.linalg.norm(X, axis=2, keepdims=True)
    true = generator.normal(size=(STREAMS, one.d))
    true *= radius / np.linalg.norm(true, axis=1, keepdims=True)
    y = (generator.random((one.n, STREAMS)) < 1 / (1 + np.exp(-(X * true).sum(2)))).astype(float)
    noise, total = _noise(made, one.d, generator), np.zeros((STREAMS, one.d))
    paid = 0.0
    for t in range(one.n):
        theta = -(total + noise[t - 1] if t else total) / at
        theta *= np.minimum(1.0, radius / np.maximum(np.linalg.norm(theta, axis=1, keepdims=True), 1e-300))
        scores = (X[t] * theta).sum(1, keepdims=True)
        paid += float(loss.value(scores, y[t]).sum())
        total += X[t] * loss.slope(scores, y[t])
    for k in range(STREAMS):
        own, labels = X[:, k], y[:, k]
        best = _best(
            lambda theta, own=own, labels=labels: own.T @ loss.slope(own @ theta, labels), one.d, radius, one.n / 4
        )
        paid -= float(loss.value(own @ best, labels).sum())
    return paid / one.n / STREAMS, bound


def _squares(one: Setting, generator: np.random.Generator) -> float:
    size, key = 16, generator.bytes(32)  # no secrets here
    X = generator.normal(size=(one.n, one.d))
    X *= (generator.random((one.n, 1)) ** 0.5) / np.linalg.norm(X, axis=1, keepdims=True)
    true = generator.normal(size=one.d)
    y = np.clip(X @ true * (0.8 / np.linalg.norm(true)) + 0.1 * generator.normal(size=one.n), -1, 1)
    learner: Any
    if one.stream == "two sums":
        made = plan(one.mechanism, one.n, size)
        learner = LeastSquares(made, one.d, bounds=1.0, target_bounds=(-1.0, 1.0), constraint=Ball(1.0), key=key)
    else:
        made = plan(one.mechanism, one.n, size, 2.0)
        at = best_regularization(one.n, one.d, lipschitz=2.0, radius=1.0, plan=made, diameter=2.0)
        learner = Learner(made, (one.d, 1), loss=Squared(), constraint=Ball(1.0), regularization=at, key=key)
    paid = 0.0
    for start in range(0, one.n, size):
        rows, labels = X[start : start + size], y[start : start + size]
        paid += np.square(rows @ learner.theta[:, 0] - labels).sum()
        learner.step(np.arange(start, start + len(rows)), rows, labels)
    best = _best(lambda theta: X.T @ (X @ theta - y[:, None]), one.d, 1.0, one.n)
    return float(paid - np.square(X @ best[:, 0] - y).sum()) / one.n


def _best(gradient: Any, d: int, radius: float, smooth: float) -> Floats:
    """The best model of the ball, by accelerated projected steps."""
    theta = before = np.zeros((d, 1))
    for step in range(2000):
        ahead = theta + step / (step + 3) * (theta - before)
        before, theta = theta, Ball(radius).argmin(gradient(ahead) - smooth * ahead, smooth)
        if np.linalg.norm(theta - before) < 1e-9:
            break
    return theta


# -- what is said of it ----------------------------------------------------------------------------------------------

_LINES: list[dict[str, Any]] = []


def rows(quick: bool) -> Iterator[Row]:
    """Measure what is not kept; then slopes, ratios, multiples, squares."""
    wanted = settings(quick)
    kept = {} if quick or not KEPT.exists() else {_setting(line): line for line in map(json.loads, KEPT.open())}
    for one in wanted:
        if one not in kept:
            kept[one] = measured(one)
            if not quick:
                with KEPT.open("a") as file:
                    file.write(json.dumps(kept[one]) + "\n")
    _LINES[:] = [kept[one] for one in wanted]
    yield from _slopes()
    for mechanism in ("tree", "blt"):
        for multiple, regret in _by_multiple(mechanism):
            yield Row(f"logistic, {mechanism}, {multiple:g} lambda: regret", regret, None, None, "loss")
    for mechanism, n, d, ours, peer in _pairs():
        yield Row(f"squares, {mechanism}, n = {n}, d = {d}: two sums; generic", ours, peer, peer / ours, "regret")


def _setting(line: dict[str, Any]) -> Setting:
    return Setting(*(line[name] for name in Setting._fields))


def _slopes() -> Iterator[Row]:
    for line in slopes():
        name = f"{line.stream}, {line.mechanism}: slope in {line.axis} (+- {line.error:.2f}); bound's"
        yield Row(name, line.measured, line.of_bound, None, "")
        yield Row(
            f"{line.stream}, {line.mechanism}, over {line.axis}: largest share of the bound", line.share, None, None, ""
        )


class Slope(NamedTuple):
    """Of one stream, mechanism and axis."""

    stream: str
    mechanism: str
    axis: str
    measured: float
    error: float
    of_bound: float
    share: float


def slopes() -> Iterator[Slope]:
    for stream in RADIUS:
        for axis, other in (("n", "d"), ("d", "n")):
            for mechanism in MECHANISMS:
                lines = [x for x in _LINES if (x["stream"], x["mechanism"], x["multiple"]) == (stream, mechanism, 1.0)]
                values = [x[other] for x in lines]
                fixed = max(set(values), key=values.count)
                lines = [x for x in lines if x[other] == fixed]
                at = sorted({x[axis] for x in lines})
                means = [np.mean([x["regret"] for x in lines if x[axis] == value]) for value in at]
                bounds = [np.mean([x["bound"] for x in lines if x[axis] == value]) for value in at]
                slope, error = _fit(at, means)
                shares = np.array(means) / np.array(bounds)
                yield Slope(stream, mechanism, axis, slope, error, _fit(at, bounds)[0], float(shares.max()))


def _fit(at: Any, values: Any) -> tuple[float, float]:
    """Slope of log values against log at, and its standard error."""
    x, y = np.log(at), np.log(values)
    x = x - x.mean()
    slope = float(x @ y / (x @ x))
    rest = y - y.mean() - slope * x
    return slope, float(np.sqrt(rest @ rest / (len(x) - 2) / (x @ x)))


def _by_multiple(mechanism: str) -> Iterator[tuple[float, float]]:
    lines = [x for x in _LINES if (x["stream"], x["mechanism"]) == ("logistic", mechanism)]
    own = [x for x in lines if x["multiple"] != 1.0]
    place = own[0]["n"], own[0]["d"]
    for multiple in MULTIPLES:
        found = [x["regret"] for x in lines if x["multiple"] == multiple and (x["n"], x["d"]) == place]
        yield multiple, float(np.mean(found))


def _pairs() -> Iterator[tuple[str, int, int, float, float]]:
    lines = [x for x in _LINES if x["stream"] in ("two sums", "generic")]
    for place in dict.fromkeys((x["mechanism"], x["n"], x["d"]) for x in lines):
        ours, peer = (
            float(
                np.mean([x["regret"] for x in lines if (x["mechanism"], x["n"], x["d"], x["stream"]) == (*place, way)])
            )
            for way in ("two sums", "generic")
        )
        yield (*place, ours, peer)


def tables() -> Iterator[tuple[str, str, list[str]]]:
    """For docs/compared.md."""
    lines = ["| stream | mechanism | in n | in d | largest share of the bound |", "|---|---|---|---|---|"]
    every = list(slopes())
    for stream, mechanism in dict.fromkeys((x.stream, x.mechanism) for x in every):
        both = [next(x for x in every if (x.stream, x.mechanism, x.axis) == (stream, mechanism, axis)) for axis in "nd"]
        told = " | ".join(f"{x.measured:.2f} ± {x.error:.2f} ({x.of_bound:.2f})" for x in both)
        lines.append(f"| {stream} | {mechanism} | {told} | {max(x.share for x in both):.2f} |")
    yield "compared.md", "slopes", lines
    head = ["| | " + " | ".join(f"{multiple:g}" for multiple in MULTIPLES) + " |", "|---" * (len(MULTIPLES) + 1) + "|"]
    body = [f"| {m} | " + " | ".join(f"{regret:.4f}" for _, regret in _by_multiple(m)) + " |" for m in ("tree", "blt")]
    yield "compared.md", "multiples", head + body
    pairs = list(_pairs())
    longest = max(n for _, n, *_ in pairs)
    lines = ["| mechanism | d | two sums | `Learner` |", "|---|---|---|---|"]
    lines += [f"| {m} | {d} | {ours:.4f} | {peer:.4f} |" for m, n, d, ours, peer in pairs if n == longest]
    yield "compared.md", "squares", lines
