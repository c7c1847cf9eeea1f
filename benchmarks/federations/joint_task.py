"""The task of Huang et al. 2023, section 4: 10 000 images of two data sets at n owners, a network with two heads.

What the paper leaves open is chosen here: pixels are moved and scaled by public constants, the classes of an owner are
those of 8 shards by lot, the second head, FC1, begins at zero, an owner alone shifts images (of mnist) by up to two
pixels.
"""

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import anyorder as ao
from anyorder.app import data as datasets
from anyorder.federated.clients import Examples
from anyorder.federated.server import Layout

RECORDS, CLASSES, PER_OWNER = 10_000, 10, 8
EPSILON, DELTA = 1.0, 1e-4


class TwoHeads(nn.Module):
    """Two convolutions, then two linear heads side by side, whose outputs are averaged."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 16, 5, padding=2)
        self.conv2 = nn.Conv2d(16, 32, 5, padding=2)
        self.fc1 = nn.Linear(1568, CLASSES)
        self.fc2 = nn.Linear(1568, CLASSES)
        nn.init.zeros_(self.fc1.weight)
        nn.init.zeros_(self.fc1.bias)

    def features(self, x: Tensor) -> Tensor:
        """(m, 1568): what the heads read."""
        x = functional.max_pool2d(torch.relu(self.conv1(x)), 2)
        return functional.max_pool2d(torch.relu(self.conv2(x)), 2).flatten(1)

    def forward(self, x: Tensor) -> Tensor:
        """(m, 10)."""
        x = self.features(x)
        return (self.fc1(x) + self.fc2(x)) / 2


class PerUser(nn.Module):
    """The same network on users: (m, k, 1, 28, 28) -> (m, k, 10). The engine clips what comes of each row: a user."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Tensor:
        """(m, k, 10)."""
        return self.net(x.flatten(0, 1)).unflatten(0, x.shape[:2])


def network(seed: int) -> TwoHeads:
    """The public values where all begin."""
    torch.manual_seed(seed)
    return TwoHeads()


# -- data ------------------------------------------------------------------------------------------------------------


class Pool(NamedTuple):
    """The records of all owners, and the test images."""

    x: Tensor
    y: Tensor
    test_x: Tensor
    test_y: Tensor


@functools.cache
def _images(name: str, folder: Path) -> tuple[Examples, Examples]:
    found = datasets.load(name, folder / name)
    train, test = ((((x - 0.2) / 0.3), y) for x, y in (part.tensors for part in (found.train, found.test)))  # type: ignore[attr-defined]
    return train, test


def pool(name: str, folder: Path, seed: int, records: int = RECORDS) -> Pool:
    """A random subset of the training images."""
    (x, y), test = _images(name, folder)
    chosen = torch.randperm(len(y), generator=torch.Generator().manual_seed(seed))[:records]
    return Pool(x[chosen], y[chosen], *test)


def owners(data: Pool, n: int, seed: int) -> tuple[dict[int, Examples], dict[int, Examples]]:
    """The records and the test images of each owner: of the same classes, at most 8, about as many for everyone.

    The records of each class are cut into shards of about m / 8, 8 n in all, which are shuffled and dealt, 8 to each
    owner [as McMahan et al. 2017, section 3, with 2]; its test images are dealt likewise.
    """
    generator = np.random.default_rng([seed, n])
    labels = data.y.numpy()
    share = np.bincount(labels, minlength=CLASSES) * PER_OWNER * n / len(labels)
    shards = np.floor(share).astype(int)
    shards[np.argsort(shards - share)[: PER_OWNER * n - shards.sum()]] += 1  # the largest remainders
    dealt = generator.permutation(np.repeat(np.arange(CLASSES), shards)).reshape(n, PER_OWNER)

    def deal(x: Tensor, y: Tensor) -> dict[int, Examples]:
        parts: list[list[np.ndarray]] = [[] for _ in range(n)]
        for c in range(CLASSES):
            owner_of_shard = np.nonzero(dealt == c)[0]
            mixed = generator.permutation(np.flatnonzero(y.numpy() == c))
            for j, part in zip(owner_of_shard, np.array_split(mixed, len(owner_of_shard)), strict=True):
                parts[j].append(part)
        return {j: (x[np.concatenate(part)], y[np.concatenate(part)]) for j, part in enumerate(parts)}

    return deal(data.x, data.y), deal(data.test_x, data.test_y)


# -- training --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Steps:
    """An owner's training: so many steps of SGD with momentum 0.9 on the parameters of the layout; a `Local`."""

    steps: int
    lr: float
    batch_size: int = 16
    shift: int = 0

    def __call__(self, model: nn.Module, layout: Layout, examples: Examples, seed: int) -> Tensor:
        """How far they move. Learning rates fall to zero as a cosine where there are many steps."""
        for name, p in model.named_parameters():
            p.requires_grad_(name in layout.shapes)
        parameters = [model.get_parameter(name) for name in layout.shapes]
        before = torch.cat([p.detach().reshape(-1) for p in parameters])
        optimizer = torch.optim.SGD(parameters, lr=self.lr, momentum=0.9)
        generator = torch.Generator().manual_seed(seed)
        x, y = examples
        order = torch.cat([torch.randperm(len(y), generator=generator) for _ in range(self._epochs(len(y)))])
        for t, batch in enumerate(order.split(self.batch_size)[: self.steps]):
            optimizer.param_groups[0]["lr"] = self.lr * (1 + np.cos(np.pi * t / self.steps)) / 2
            images = x[batch]
            if self.shift:
                moves = torch.randint(-self.shift, self.shift + 1, (2,), generator=generator).tolist()
                images = torch.roll(images, moves, (2, 3))
            optimizer.zero_grad()
            functional.cross_entropy(model(images), y[batch]).backward()
            optimizer.step()
        return torch.cat([p.detach().reshape(-1) for p in parameters]) - before

    def _epochs(self, count: int) -> int:
        return -(-self.steps * self.batch_size // count)


@dataclass(frozen=True)
class Epochs:
    """As `Steps`, for passes."""

    count: float
    lr: float
    batch_size: int

    def __call__(self, model: nn.Module, layout: Layout, examples: Examples, seed: int) -> Tensor:
        """How far the parameters of the layout move."""
        steps = max(1, round(self.count * len(examples[1]) / self.batch_size))
        return Steps(steps, self.lr, self.batch_size)(model, layout, examples, seed)


@dataclass(frozen=True)
class Head:
    """FC1 fitted on what the other layers, which stand still, make of an owner's images; a `Local`.

    So many steps of full gradients with momentum 0.9, on features less their mean (it goes into the bias) in units of
    their norm, at learning rate m / 16: few records pull little.
    """

    steps: int = 40

    def __call__(self, model: nn.Module, layout: Layout, examples: Examples, seed: int) -> Tensor:
        """How far FC1 moves; nothing is drawn."""
        del seed
        assert isinstance(model, TwoHeads)
        assert set(layout.shapes) == {"fc1.weight", "fc1.bias"}
        x, y = examples
        with torch.no_grad():
            features = model.features(x)
            fixed = model.fc2(features) + model.fc1(features)
            middle = features.mean(0)
            features -= middle
            scale = float(features.square().sum(1).mean())
        weight = torch.zeros_like(model.fc1.weight).requires_grad_(True)
        bias = torch.zeros_like(model.fc1.bias).requires_grad_(True)
        rate = len(y) / 16
        optimizer = torch.optim.SGD(
            [{"params": [weight], "lr": rate / scale}, {"params": [bias], "lr": min(1.0, rate)}], momentum=0.9
        )
        for _ in range(self.steps):
            optimizer.zero_grad()
            functional.cross_entropy((features @ weight.T + bias + fixed) / 2, y).backward()
            optimizer.step()
        with torch.no_grad():
            return torch.cat([weight.reshape(-1), bias - weight @ middle])


@dataclass(frozen=True)
class Private:
    """DP-SGD by the engine on all records, or on users of k records each: a `Train`.

    Poisson sampling, 100 steps, each record (or user) in a step with probability 0.05.
    """

    data: Pool
    seed: int
    lr: float
    per_user: int = 1
    steps: int = 100
    coin: float = 0.05
    clip_norm: float = 1.0

    def plan(self) -> ao.Plan:
        """What is protected is one row of what the engine is given: a record, or all records of a user."""
        rows = len(self.data.y) // self.per_user
        return ao.plan(
            order=ao.participation.PoissonSampling(self.steps, self.coin), batch_size=round(rows * self.coin),
            mechanism="independent", epsilon=EPSILON, delta=DELTA, clip_norm=self.clip_norm, dataset_size=rows,
        )  # fmt: skip

    def __call__(self, model: nn.Module, parameters: list[nn.Parameter]) -> ao.Certificate:
        """Trains the parameters in place."""
        k = self.per_user
        x, y = self.data.x, self.data.y
        if k > 1:  # records of one user lie side by side: `users` has put them so
            model, x, y = PerUser(model), x.unflatten(0, (-1, k)), y.unflatten(0, (-1, k))
        plan = self.plan()
        # A key makes the numbers of this benchmark repeatable. A run whose key is known has no privacy.
        engine = ao.PrivacyEngine(plan, key=bytes([self.seed]) * 32)
        loader = DataLoader(TensorDataset(x, y), batch_size=plan.batch_size, shuffle=True)
        private, optimizer, loader = engine.make_private(model, torch.optim.SGD(parameters, lr=self.lr), loader)
        while engine.step < plan.n:
            for images, labels in loader:
                optimizer.zero_grad()
                scores = private(images)
                losses = functional.cross_entropy(scores.flatten(0, -2), labels.flatten(), reduction="none")
                losses.view(labels.shape).flatten(1).mean(1).mean().backward() if k > 1 else losses.mean().backward()
                optimizer.step()
                if engine.step == plan.n:
                    break
        return engine.certificate()


def users(data: Pool, parts: dict[int, Examples], k: int) -> Pool:
    """The records of every owner's users side by side, k each; fewer than k are left over at an owner, and left out."""
    x = torch.cat([x[: len(y) // k * k] for x, y in parts.values()])
    y = torch.cat([y[: len(y) // k * k] for _, y in parts.values()])
    return data._replace(x=x, y=y)
