"""Adaptive optimizers under correlated noise: test accuracy of each at a rate that was tuned on other data.

    python -m benchmarks.adaptive                 digits, epsilon 1, 4, 8
    python -m benchmarks.adaptive --data mnist    6000 images of MNIST at half size; or cifar10, brown
    python -m benchmarks.adaptive --write         the table of what is on file, into docs/guarantee.md

Every run is the package's own engine, end to end: 20 epochs in one fixed order, 240 steps, clip norm 1, delta 1e-5. The
network has one hidden layer, on pixels, and on CIFAR-10 on what `look` sees in patches; on sentences of the Brown
corpus it is a GPT of one layer, judged by the next letters that it tells. An arm is an optimizer, the noise, and the
optimizer to which the noise was fitted. Its rate (and the floor of its second moments, where it has one) are the best
in a search over powers of two on other data of the same size: images of MNIST reduced to 8 x 8 for the digits of
scikit-learn, Fashion-MNIST for MNIST, other images and other documents for CIFAR-10 and Brown. A run is a line of
benchmarks/results/adaptive.jsonl, and one that is on file is not run again.
"""

import argparse
import json
import math
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import date
from functools import cache
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import anyorder as ao
from anyorder.app import data as sets
from anyorder.app.features import look
from anyorder.errors import OptimizerWarning
from anyorder.plan.plan import Plan
from anyorder.strategy.registry import row_variances
from benchmarks._report import Row, add_options, processor, show

RESULTS = Path(__file__).parent / "results" / "adaptive.jsonl"
PAGE = Path(__file__).parents[1] / "docs" / "guarantee.md"
MARKS = "<!-- adaptive: begin -->", "<!-- adaptive: end -->"
EPSILONS = (1.0, 4.0, 8.0)
SEEDS = 3
EPOCHS, HIDDEN = 20, 64
BATCH = {1437: 128, 6000: 500}  # of so many examples: 12 steps an epoch
TUNED_ON = {
    "digits": "mnist at 8 x 8",
    "mnist": "fashion_mnist",
    "cifar10": "cifar10, other images",
    "brown": "brown, other documents",
}
LONGEST, LETTERS = 32, " etaoinshrdlcumwfgypbvkjxqz,.;'-?"  # of a sentence


# -- optimizers --------------------------------------------------------------------------------------------------------


class Corrected(torch.optim.Optimizer):
    """Adam whose second moments are without the noise's: v_t minus the same average of the known variances.

    `variances[t]` is that of each coordinate of step t's noise. What is left is held above the larger of `floor` and
    sqrt(2 / t) times them, since a mean of t squares of noise is known no better than that.
    """

    def __init__(self, params: Any, lr: float, variances: np.ndarray, floor: float) -> None:
        super().__init__(params, {"lr": lr})
        self.variances, self.floor, self.t, self.noise = variances, floor, 0, 0.0
        self.b1, self.b2 = 0.9, 0.999

    def least(self) -> float:
        return max(self.floor, math.sqrt(2 / self.t))

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.t += 1
        self.noise = self.b2 * self.noise + (1 - self.b2) * self.variances[self.t - 1]
        first, second = 1 - self.b1**self.t, 1 - self.b2**self.t
        noise = self.noise / second
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                m = state.setdefault("m", torch.zeros_like(p)).lerp_(p.grad, 1 - self.b1)
                v = state.setdefault("v", torch.zeros_like(p)).lerp_(p.grad**2, 1 - self.b2)
                p.sub_(group["lr"] * (m / first) / (v / second - noise).clamp_(min=self.least() * noise).sqrt_())


class Scaled(nn.Module):
    """A linear layer of weights `value * scale`: the gradient of `value` is that of the weights times `scale`.

    So the engine clips scaled gradients and adds noise to them: scale, then privatize [Ganesh et al. 2025].
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.value, self.bias = nn.Parameter(linear.weight.detach().clone()), nn.Parameter(linear.bias.detach().clone())
        self.register_buffer("scale", torch.ones_like(linear.weight))
        self.register_buffer("bias_scale", torch.ones_like(linear.bias))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.value * self.scale, self.bias * self.bias_scale)


class ScaledAdam(Corrected):
    """`Corrected` on the weights of `Scaled` layers, whose scales are one over the roots of its second moments.

    They are computed from released gradients alone, and hold the mean square 1, so that the clip norm keeps its size.
    """

    def __init__(self, model: nn.Module, lr: float, variances: np.ndarray, floor: float) -> None:
        super().__init__(model.parameters(), lr, variances, floor)
        layers = [one for one in model.modules() if isinstance(one, Scaled)]
        self.pairs = [(one.value, one.scale) for one in layers] + [(one.bias, one.bias_scale) for one in layers]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.t += 1
        fresh, lr = float(self.variances[self.t - 1]), self.param_groups[0]["lr"]
        first, second = 1 - self.b1**self.t, 1 - self.b2**self.t
        roots, weights = [], []
        for p, scale in self.pairs:
            state, g = self.state[p], p.grad / scale
            m = state.setdefault("m", torch.zeros_like(p)).lerp_(g, 1 - self.b1)
            v = state.setdefault("v", torch.zeros_like(p)).lerp_(g**2, 1 - self.b2)
            noise = state.setdefault("noise", torch.zeros_like(p)).lerp_(fresh / scale**2, 1 - self.b2)
            root = ((v - noise) / second).clamp_(min=self.least() * fresh).sqrt_()
            weights.append(p * scale - lr * (m / first) / root)
            roots.append(root)
        size = math.sqrt(torch.cat([(1 / root**2).flatten() for root in roots]).mean())
        for (p, scale), root, weight in zip(self.pairs, roots, weights, strict=True):
            scale.copy_(1 / (root * size))
            p.copy_(weight / scale)


class Muon(torch.optim.Optimizer):
    """Momentum made orthogonal by five Newton-Schulz steps, as `torch.optim.Muon`; that of biases is normalised."""

    def __init__(self, params: Any, lr: float, momentum: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                m = self.state[p].setdefault("m", torch.zeros_like(p))
                m.mul_(group["momentum"]).add_(p.grad)
                update = _orthogonal(m) if p.ndim == 2 else m / (m.norm() + 1e-12)
                p.sub_(group["lr"] * update)


def _orthogonal(m: Tensor) -> Tensor:
    x = m / (m.norm() + 1e-7)
    x = x.T if m.shape[0] > m.shape[1] else x
    for _ in range(5):
        square = x @ x.T
        x = 3.4445 * x + (-4.775 * square + 2.0315 * square @ square) @ x
    return x.T if m.shape[0] > m.shape[1] else x


# -- arms --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Arm:
    """An optimizer from (model, rate, variances of the noise, floor), what the noise is fitted to, and a first rate."""

    name: str
    fit: Callable[[int], Any]
    make: Callable[[nn.Module, float, np.ndarray, float], torch.optim.Optimizer]
    rate: float
    mechanism: str = "auto"
    floors: tuple[float, ...] = (0.0,)
    scaled: bool = False


def _adam(model: nn.Module, rate: float = 1.0, *_: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=rate)


def _momentum(beta: float) -> Callable[..., torch.optim.Optimizer]:
    return lambda model, rate, *_: torch.optim.SGD(model.parameters(), lr=rate, momentum=beta)


def _corrected(model: nn.Module, rate: float, variances: np.ndarray, floor: float) -> torch.optim.Optimizer:
    return Corrected(model.parameters(), rate, variances, floor)


def _as_adam(n: int) -> torch.optim.Optimizer:
    """What `ao.plan(optimizer=)` reads Adam's averages off."""
    return _adam(nn.Linear(1, 1))


FLOORS = (0.1, 1.0)
ARMS = (
    Arm("SGD with momentum, fitted", lambda n: ao.SGD(momentum=0.9), _momentum(0.9), 0.125),
    Arm("SGD, fitted", lambda n: ao.SGD(), _momentum(0.0), 1.0),
    Arm("SGD, independent", lambda n: ao.SGD(), _momentum(0.0), 1.0, "independent"),
    Arm("Adam, independent", lambda n: ao.SGD(), _adam, 2.0**-6, "independent"),
    Arm("Adam, noise of SGD", lambda n: ao.SGD(), _adam, 2.0**-4),
    Arm("Adam, noise of momentum 0.9", lambda n: ao.SGD(momentum=0.9), _adam, 2.0**-3),
    Arm("Adam, fitted", _as_adam, _adam, 2.0**-3),
    Arm("Adam corrected, independent", lambda n: ao.SGD(), _corrected, 2.0**-8, "independent", FLOORS),
    Arm("Adam corrected, fitted", _as_adam, _corrected, 2.0**-4, floors=FLOORS),
    Arm("scale-then-privatize, fitted", _as_adam, ScaledAdam, 2.0**-5, floors=FLOORS, scaled=True),
    Arm(
        "Muon, noise of momentum 0.9", lambda n: ao.SGD(momentum=0.9), lambda m, r, *_: Muon(m.parameters(), r), 2.0**-5
    ),
)


# -- runs --------------------------------------------------------------------------------------------------------------


_SOURCES = {  # where from, how many, of which side
    "digits": ("digits", 1437, 8),
    "mnist at 8 x 8": ("mnist", 1437, 8),
    "mnist": ("mnist", 6000, 14),
    "fashion_mnist": ("fashion_mnist", 6000, 14),
}


class Writer(nn.Module):
    """A GPT of one layer of width 32."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(1 + len(LETTERS), width), nn.Embedding(LONGEST, width)
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attend, self.mixed = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.out = nn.Linear(width, 1 + len(LETTERS))

    def forward(self, x: Tensor) -> Tensor:
        h = self.words(x) + self.places(torch.arange(x.shape[1]))
        h = h + self.mixed(F.scaled_dot_product_attention(*self.attend(self.before(h)).chunk(3, -1), is_causal=True))
        return self.out(h + self.narrow(F.gelu(self.wide(self.between(h)))))  # type: ignore[no-any-return]


def _sentences(name: str, folder: str | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Letters and next ones, -100 past the end, of 6000 sentences and of 4000 for testing.

    Every fourth document is trained on and every fourth tested on; the two others are those of tuning.
    """
    import pyarrow.parquet as parquet

    (path,) = Path(folder or "", "brown").glob("*.parquet")
    documents = parquet.read_table(path).to_pydict()["sentences"]
    number = {letter: 1 + i for i, letter in enumerate(LETTERS)}

    def rows(fourth: int, most: int) -> tuple[Tensor, Tensor]:
        found = torch.full((most, LONGEST + 1), -100)
        sentences = (sentence for document in documents[fourth::4] for sentence in document)
        for row, sentence in zip(found, sentences, strict=False):
            kept = torch.tensor([number.get(letter, 0) for letter in sentence.lower()[: LONGEST + 1]])
            row[: len(kept)] = kept
        return found[:, :-1].clamp(min=0), found[:, 1:].contiguous()

    first = 0 if name == "brown" else 2
    return *rows(first, 6000), *rows(first + 1, 4000)


def _patches(name: str, folder: str | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """1024 features of 6000 images of CIFAR-10, and of 4000 for testing: other ones of the training part, in tuning."""
    where = None if folder is None else Path(folder) / "cifar10"
    hub = sets._hub("cifar10", where)
    train, test = sets._splits(hub, "cifar10", where)
    order = np.random.default_rng(0).permutation(len(train))
    parts = train.select(order[:6000]), test.select(range(4000))
    if name != "cifar10":
        parts = train.select(order[6000:12000]), train.select(order[12000:16000])
    (x, y), (u, v) = (sets._decode(hub, part).tensors for part in parts)
    x, u = (look(one, patterns=256, grid=2).flatten(1) for one in (x, u))
    return x, y, u, v


@cache
def _data(name: str, folder: str | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Training images and classes, test images and classes; no more are decoded than are used."""
    if name not in _SOURCES:
        return (_sentences if name.startswith("brown") else _patches)(name, folder)
    source, keep, size = _SOURCES[name]
    if source == "digits":
        found = sets.load(source)
        (x, y), (u, v) = found.train.tensors, found.test.tensors  # type: ignore[attr-defined]
        return x, y, u, v
    where = None if folder is None else Path(folder) / source
    hub = sets._hub(source, where)
    train, test = sets._splits(hub, source, where)
    train = train.select(np.random.default_rng(0).permutation(len(train))[:keep])
    (x, y), (u, v) = (sets._decode(hub, part).tensors for part in (train, test.select(range(4000))))
    x, u = (F.adaptive_avg_pool2d(one, size) for one in (x, u))
    return x.contiguous(), y, u.contiguous(), v


@cache
def _plan(arm: Arm, examples: int, epsilon: float) -> tuple[Plan, np.ndarray]:
    """The plan, and the variance of a coordinate of the mean gradient's noise at each step."""
    batch = BATCH[examples]
    n = EPOCHS * math.ceil(examples / batch)
    plan = ao.plan(
        dataset_size=examples, batch_size=batch, epochs=EPOCHS, order="fixed", epsilon=epsilon, delta=1e-5,
        optimizer=arm.fit(n), mechanism=arm.mechanism,
    )  # fmt: skip
    variances = row_variances(plan.strategy, ao.workload.custom(np.eye(n)))
    return plan, variances * (plan.noise_std / batch) ** 2


def accuracy(
    arm: Arm, data: tuple[Tensor, ...], epsilon: float, rate: float, floor: float, seed: int, epochs: int = EPOCHS
) -> float:
    """Test accuracy in percent of one private training."""
    x, y, u, v = data
    plan, variances = _plan(arm, len(x), epsilon)
    torch.manual_seed(seed)
    layers = nn.Linear(x[0].numel(), HIDDEN), nn.Linear(HIDDEN, 10)
    first, last = (Scaled(one) for one in layers) if arm.scaled else layers
    net: nn.Module = nn.Sequential(nn.Flatten(), first, nn.Tanh(), last) if x.is_floating_point() else Writer()
    optimizer = arm.make(net, rate, variances, floor)
    loader: Any = DataLoader(TensorDataset(x, y), BATCH[len(x)], sampler=ao.FixedOrderSampler(len(x), seed))
    engine = ao.PrivacyEngine(plan)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", OptimizerWarning)
        model, optimizer, loader = engine.make_private(net, optimizer, loader)
    for _ in range(epochs):
        for images, classes in loader:
            optimizer.zero_grad()
            if classes.dim() == 1:
                F.cross_entropy(model(images), classes).backward()
            else:
                losses = F.cross_entropy(model(images).transpose(1, 2), classes, reduction="none")
                (losses.sum(1) / LONGEST).mean().backward()
            optimizer.step()
    with torch.no_grad():
        return 100 * float((net(u).argmax(-1) == v)[v >= 0].float().mean())


def _run(arm: Arm, name: str, data: Any, epsilon: float, rate: float, floor: float, seed: int) -> float:
    """One run, or its line on file."""
    wanted = {"data": name, "arm": arm.name, "epsilon": epsilon, "rate": rate, "floor": floor, "seed": seed}
    for line in read():
        if wanted.items() <= line.items():
            return float(line["accuracy"])
    start = time.perf_counter()
    found = round(accuracy(arm, data, epsilon, rate, floor, seed), 2)
    line = {
        **wanted, "accuracy": found, "seconds": round(time.perf_counter() - start, 1),
        "mechanism": _plan(arm, len(data[0]), epsilon)[0].strategy.describe(),
        "date": date.today().isoformat(), "machine": processor(),
    }  # fmt: skip
    with RESULTS.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")
    return found


def read() -> list[dict[str, Any]]:
    """The lines on file."""
    return [json.loads(line) for line in RESULTS.read_text().splitlines()] if RESULTS.exists() else []


def tuned(arm: Arm, name: str, folder: str | None, epsilon: float) -> tuple[float, float]:
    """Rate and floor that are best on the other data: up and down by factors of two while that is better, one seed."""
    other = TUNED_ON[name]

    def score(rate: float, floor: float) -> float:
        return _run(arm, other, _data(other, folder), epsilon, rate, floor, seed=100)

    best = (-1.0, 0.0, 0.0)
    for floor in arm.floors:
        found = [(score(arm.rate, floor), arm.rate)]
        for factor in (2.0, 0.5):
            rate = arm.rate * factor
            while (now := score(rate, floor)) > found[-1][0]:
                found.append((now, rate))
                rate *= factor
            if len(found) > 1:
                break
        best = max(best, (*max(found), floor))
    return best[1], best[2]


def rows(name: str, folder: str | None, epsilons: tuple[float, ...], arms: list[str]) -> Iterator[Row]:
    """Mean accuracy of each arm over the seeds, beside that of SGD with momentum."""
    for epsilon in epsilons:
        means: dict[str, float] = {}
        for arm in (one for one in ARMS if one.name in arms and not (one.scaled and name == "brown")):
            rate, floor = tuned(arm, name, folder, epsilon)
            data = _data(name, folder)
            found = mean(_run(arm, name, data, epsilon, rate, floor, seed) for seed in range(SEEDS))
            means[arm.name] = found
            peer = means.get(ARMS[0].name)
            ratio = None if peer is None else peer / found
            yield Row(f"{name}, epsilon {epsilon:g}: {arm.name}; peer: {ARMS[0].name}", found, peer, ratio, "%")
            if arm.make is _adam:
                noise = noise_left(_plan(arm, len(data[0]), epsilon)[0])
                yield Row(f"{name}, epsilon {epsilon:g}: noise in the weights, {arm.name}", noise, None, None, "norms")


def noise_left(plan: Plan) -> float:
    """In clip norms, root mean square over steps: in the weights of an Adam of rate 1 with constant second moments."""
    n = plan.strategy.n
    averages = ao.workload.from_optimizer(_as_adam(n), None, n)
    largest = 1 / (1 - averages.momentum)  # of the rates, of which the workload has the shares
    return largest * plan.noise_std / plan.clip_norm * math.sqrt(row_variances(plan.strategy, averages).mean())


def quick() -> Iterator[Row]:
    """Two epochs of each arm at epsilon 8 and its first rate, on digits."""
    data = _data("digits", None)
    for arm in ARMS:
        found = accuracy(arm, data, 8.0, arm.rate, arm.floors[0], 0, epochs=2)
        yield Row(f"digits, epsilon 8, 2 epochs: {arm.name}", found, None, None, "%")


def table() -> str:
    """Accuracy of what is on file, and its standard error over seeds: two data sets a table, for narrow screens."""
    names = list(TUNED_ON)
    return "\n\n".join(_table(names[i : i + 2]) for i in range(0, len(names), 2))


def _table(names: list[str]) -> str:
    lines = [line for line in read() if line["data"] in names]
    columns = sorted({(line["data"], line["epsilon"]) for line in lines}, key=lambda one: (names.index(one[0]), one[1]))
    result = ["| optimizer, noise | " + " | ".join(f"{name}, epsilon {e:g}" for name, e in columns) + " |"]
    result.append("|---|" + "---|" * len(columns))
    for arm in ARMS:
        own = [line for line in lines if line["arm"] == arm.name]
        if own:
            cells = [_cell([x["accuracy"] for x in own if (x["data"], x["epsilon"]) == column]) for column in columns]
            result.append(f"| {arm.name} | " + " | ".join(cells) + " |")
    return "\n".join(result)


def _cell(found: list[float]) -> str:
    error = f" ± {stdev(found) / math.sqrt(len(found)):.1f}" if len(found) > 1 else ""
    return f"{mean(found):.1f}{error}" if found else "not run"


def write() -> None:
    """Put the table into the page, between two marks."""
    text = PAGE.read_text(encoding="utf-8")
    begin, end = (text.index(mark) for mark in MARKS)
    PAGE.write_text(f"{text[: begin + len(MARKS[0])]}\n\n{table()}\n\n{text[end:]}", encoding="utf-8")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser)
    parser.add_argument("--data", choices=tuple(TUNED_ON), default="digits")
    parser.add_argument("--data-dir", help="a folder with a folder of each data set; else the hub is asked")
    parser.add_argument("--epsilons", type=float, nargs="+", default=EPSILONS)
    names = [arm.name for arm in ARMS]
    parser.add_argument("--arms", nargs="+", choices=names, default=names, help="these alone")
    parser.add_argument("--write", action="store_true", help="put the table of the runs on file into docs/guarantee.md")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    if chosen.write:
        write()
    else:
        found = rows(chosen.data, chosen.data_dir, tuple(chosen.epsilons), chosen.arms)
        show(quick() if chosen.quick else found, chosen.json)


if __name__ == "__main__":
    main()
