"""Users of a simulation: a data set by name split among them, or by a column that says whose a row is."""

from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from anyorder import checks
from anyorder.errors import ArgumentError
from anyorder.run import datasets, models
from anyorder.run.names import load_function
from anyorder.sampling.samplers import permutation_of

__all__ = ["Federation", "accuracy", "by_key", "class_loss", "federation", "split_by_class"]

Examples = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Federation:
    """Who has what.

    Attributes:
        users: {id: (x, y)}, the private examples of each user.
        test: (x, y) of nobody among the users; public.
        make_model: a fresh model, its weights from torch's generator.
    """

    users: Mapping[int | str, Examples] = field(repr=False)
    test: Examples = field(repr=False)
    make_model: Callable[[], nn.Module] = field(repr=False)


def federation(
    dataset: str,
    *,
    data_dir: str | Path | None = None,
    model: str = "mlp",
    users: int = 100,
    user_key: str | None = None,
    classes_per_user: int = 2,
    seed: int = 0,
) -> Federation:
    """A data set among users.

    Args:
        dataset, data_dir: a name of `anyorder.run.datasets.load`, whose training part is split; or `module:function`,
            which returns (users, test, make_model): a mapping {id: (x, y)} of tensors with the examples first, one
            pair (x, y) for tests, and a function without arguments that makes the model, whose outputs are one score
            for each class, last dimension: loss and accuracy are those of classes, y of -100 left out.
        model: see `anyorder.run.models.build`; of a data set by name.
        users: how many a data set by name is split among, by `split_by_class`.
        user_key: instead, a column of the data set in which the user of each row stands.
        classes_per_user, seed: of the split.
    Raises: ArgumentError for another data set, or one that cannot be split so.
    """
    if ":" in dataset:
        if user_key is not None:
            raise ArgumentError(f"user_key is a column of a data set by name, and {dataset!r} returns users of its own")
        return _own(dataset)
    data = datasets.load(dataset, data_dir)
    x, y = _tensors(data.train)
    if user_key is None:
        parts: dict[int | str, NDArray[np.int64]] = dict(
            enumerate(split_by_class(y.numpy(), users, classes_per_user, seed))
        )
    else:
        parts = by_key(datasets.column(dataset, user_key, data_dir))
    shared = {user: (x[torch.from_numpy(places)], y[torch.from_numpy(places)]) for user, places in parts.items()}
    return Federation(shared, _tensors(data.test), lambda: models.build(model, data.input_shape, data.num_classes))


def split_by_class(
    classes: NDArray[np.int64], num_users: int, classes_per_user: int = 2, seed: int = 0
) -> list[NDArray[np.int64]]:
    """Places of the examples of each user, who has few classes: what federated data is like, and hard to learn from.

    Sorted by class (within a class shuffled), the examples are cut into num_users * classes_per_user runs as equal as
    can be, and each user is dealt `classes_per_user` of them [McMahan et al. 2017, section 3]; a run at the edge of a
    class has two. With 0, each user has a random part of all examples, as equal as can be.

    Args:
        classes: (num_examples,) integers.
        num_users: at most num_examples / classes_per_user, so that nobody is left with less than that.
        seed: of the shuffle and the deal; a pure function of it.
    """
    classes = np.asarray(classes)
    each = checks.integer("classes_per_user", classes_per_user, low=0)
    runs = max(1, each)
    users = checks.integer("users", num_users, low=1)
    if users * runs > len(classes):
        raise ArgumentError(
            f"users must be at most {len(classes) // runs}, so that each of them has {runs} of the {len(classes)} "
            f"training examples, got {users}"
        )
    order = permutation_of(len(classes), seed)
    if each:
        order = order[np.argsort(classes[order], kind="stable")]
    pieces = np.array_split(order, users * runs)
    deal = permutation_of(users * runs, seed, row=1).reshape(users, runs)
    return [np.concatenate([pieces[i] for i in hand]) for hand in deal]


def by_key(keys: Iterable[Hashable]) -> dict[int | str, NDArray[np.int64]]:
    """{user: places of the rows that carry its key}, in the order in which users first come.

    Integers stay integers if all keys are; otherwise keys are texts.
    """
    found: dict[Hashable, list[int]] = {}
    for place, key in enumerate(keys):
        found.setdefault(key, []).append(place)
    if not found:
        raise ArgumentError("keys must name the user of at least one row, got none")
    whole = all(isinstance(key, (int, np.integer)) and not isinstance(key, bool) for key in found)
    named: dict[int | str, NDArray[np.int64]] = {}
    for key, places in found.items():
        named[int(key) if whole else str(key)] = np.array(places)  # type: ignore[call-overload]
    if len(named) != len(found):
        raise ArgumentError("keys must be of one type: two of them read the same as text, and would be one user")
    return named


def class_loss(output: Tensor, target: Tensor) -> Tensor:
    """Mean cross entropy of scores (.., classes) against classes (..), those of -100 left out."""
    return F.cross_entropy(output.reshape(-1, output.shape[-1]), target.reshape(-1))


def accuracy(model: nn.Module, test: Examples, batch_size: int = 1000) -> float:
    """The fraction of the test targets, those of -100 left out, of which the model's best score is that of the target.

    The model's mode is as before afterwards.
    """
    training, right, counted = model.training, 0, 0
    device = next(model.parameters()).device
    model.eval()
    with torch.no_grad():
        for start in range(0, len(test[0]), batch_size):
            x, y = test[0][start : start + batch_size], test[1][start : start + batch_size]
            best = model(x.to(device)).argmax(-1).cpu()
            right += int((best == y).sum())
            counted += int((y != -100).sum())
    model.train(training)
    return right / max(1, counted)


def _tensors(data: Any) -> Examples:
    if isinstance(data, TensorDataset):
        x, y = data.tensors
        return x, y
    x, y = next(iter(DataLoader(data, batch_size=len(data))))
    return x, y


def _own(name: str) -> Federation:
    found = load_function(name, "dataset")()
    if not isinstance(found, tuple) or len(found) != 3 or not isinstance(found[0], Mapping) or not callable(found[2]):
        raise ArgumentError(
            f"dataset {name!r} must return (users, test, make_model): a mapping {{id: (x, y)}}, a pair (x, y) and a "
            f"function that makes the model, got {type(found).__name__}"
        )
    users, test, make_model = found
    for pair in (test, *users.values()):
        if not (
            isinstance(pair, tuple) and len(pair) == 2
            and all(isinstance(part, Tensor) for part in pair) and len(pair[0]) == len(pair[1])
        ):  # fmt: skip
            raise ArgumentError(
                f"dataset {name!r} must hold pairs (x, y) of tensors with as many examples in each, and one of them is "
                "none"
            )
    if not users:
        raise ArgumentError(f"dataset {name!r} must hold at least one user, got none")
    return Federation(users, test, make_model)
