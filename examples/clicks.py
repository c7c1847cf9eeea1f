"""A click model on a CSV of one's own: a table of users, a table of items, private for a click or for a user.

    python examples/clicks.py                                               # made-up clicks
    python examples/clicks.py --csv LOG.csv --user visitor --item article --label clicked --unit user --lazy

The score of a click is u . v + the last entries of u and v, rows of two tables. Ids are hashed into a public number of
rows (--rows): a table with a row for each id that occurs would tell which ids occur. Two ids may share a row.

    (no option)          dense noise on the whole of both tables in every step
    --lazy               the same noise, but a row gets it when it is next read
    --selection counts   noise on rows alone that are chosen privately, by noisy counts

With --unit user an example of the plan is a user with all clicks, at most --most of them: their mean loss is clipped as
one, and the certificate's "example" is a user. How many users there are, or clicks with --unit click, is public.
"""

import argparse
import csv
import time
import zlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import anyorder as ao

# -- data ------------------------------------------------------------------------------------------------------------


def read(path, user, item, label):
    """(users, items, labels): lists of strings, and (m,) float32 of zeros and ones."""
    if not Path(path).is_file():
        raise SystemExit(f"there is no file {path}")
    with Path(path).open(newline="", encoding="utf-8") as file:
        rows = csv.DictReader(file)
        missing = {user, item, label} - set(rows.fieldnames or ())
        if missing:
            raise SystemExit(f"{path} must have the columns {user}, {item} and {label}: see --user, --item and --label")
        found = [(row[user], row[item], (row[label] or "").strip().lower()) for row in rows]
    if not found:
        raise SystemExit(f"{path} must have a row or more below the names of its columns, and has none")
    meaning = {"1": 1.0, "1.0": 1.0, "true": 1.0, "yes": 1.0, "0": 0.0, "0.0": 0.0, "false": 0.0, "no": 0.0}
    if any(value not in meaning for _, _, value in found):
        raise SystemExit(f"the column {label} must have 0 or 1, true or false, yes or no alone")
    users, items, labels = zip(*found, strict=True)
    return users, items, np.array([meaning[value] for value in labels], np.float32)


def made_up(seed, users=600, items=60, clicks=20):
    """Half of the items are liked by most."""
    rng = np.random.default_rng(seed)
    user, item = np.repeat(np.arange(users), clicks), rng.integers(items, size=users * clicks)
    liked = rng.random(len(user)) < np.where(item % 2, 0.8, 0.2)
    return [f"user {i}" for i in user], [f"item {i}" for i in item], liked.astype(np.float32)


def hashed(ids, rows):
    """(m,) rows 0 .. rows - 1, by a public function of the id."""
    return np.array([zlib.crc32(name.encode()) % rows for name in ids], np.int64)


def by_user(columns, users, most, rng):
    """Each column as (users, most): at most so many clicks of each, at random; and a column that is 1 where one is."""
    names, number = np.unique(users, return_inverse=True)
    mixed = rng.permutation(len(number))
    mixed = mixed[np.argsort(number[mixed], kind="stable")]
    counts = np.bincount(number)
    rank = np.arange(len(mixed)) - np.repeat(np.cumsum(counts) - counts, counts)
    kept = rank < most
    result = [np.zeros((len(names), most), column.dtype) for column in (*columns, np.empty(0, np.float32))]
    for whole, column in zip(result, (*columns, np.ones(len(users), np.float32)), strict=True):
        whole[number[mixed[kept]], rank[kept]] = column[mixed[kept]]
    return result


def tensors(data, chosen):
    """(units, most) each: rows of users, rows of items (`rows` where there is no click), labels, and 1 where one is."""
    users, items, labels = data
    columns = hashed(users, chosen.rows), hashed(items, chosen.rows), labels
    if chosen.unit == "user":
        user, item, label, there = by_user(columns, users, chosen.most, np.random.default_rng(chosen.seed))
    else:
        user, item, label, there = (column[:, None] for column in (*columns, np.ones_like(labels)))
    user, item = (np.where(there > 0, rows, chosen.rows) for rows in (user, item))
    return [torch.as_tensor(column) for column in (user, item, label, there)]


# -- the model -------------------------------------------------------------------------------------------------------


class Clicks(nn.Module):
    """(B, most) users and items -> (B, most) logits. Row `rows` of both tables stands for no click."""

    def __init__(self, rows, width, sparse):
        super().__init__()
        self.users = nn.Embedding(rows + 1, width + 1, padding_idx=rows, sparse=sparse)
        self.items = nn.Embedding(rows + 1, width + 1, padding_idx=rows, sparse=sparse)
        for table in (self.users, self.items):
            nn.init.normal_(table.weight, std=0.1)
            table.weight.data[rows] = 0

    def forward(self, user, item):
        u, v = self.users(user), self.items(item)
        return (u[..., :-1] * v[..., :-1]).sum(-1) + u[..., -1] + v[..., -1]


def loss(logits, label, there):
    """(B,): the mean over a unit's clicks."""
    each = F.binary_cross_entropy_with_logits(logits, label, reduction="none")
    return (each * there).sum(-1) / there.sum(-1).clamp(min=1)


# -- the program -----------------------------------------------------------------------------------------------------


def options(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--csv", help="a file with a line of column names; default: made up")
    parser.add_argument("--test", help="a public file of the same columns, whose loss is printed")
    parser.add_argument("--user", default="user", help="column of the user's id")
    parser.add_argument("--item", default="item", help="column of the item's id")
    parser.add_argument("--label", default="label", help="column of 0 or 1")
    parser.add_argument("--rows", type=int, default=10_000, help="of each table; public")
    parser.add_argument("--width", type=int, default=8)
    parser.add_argument("--unit", choices=["click", "user"], default="user", help="what is covered")
    parser.add_argument("--most", type=int, default=20, help="clicks of a user, at most")
    parser.add_argument("--epsilon", type=float, default=8.0)
    parser.add_argument("--delta", type=float, default=1e-5)
    parser.add_argument("--mechanism", help="default: auto, or blt if lazy, or independent to select")
    parser.add_argument("--lazy", action="store_true", help="noise when a row is next read")
    parser.add_argument("--selection", choices=["counts"], help="noise on rows that are chosen privately")
    parser.add_argument("--threshold", type=float, default=3.0, help="of noisy counts, in deviations of their noise")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=100, help="units in a step")
    parser.add_argument("--lr", type=float, default=5.0)
    parser.add_argument("--clip-norm", type=float, default=0.3)
    parser.add_argument("--model", default="clicks.pt")
    parser.add_argument("--certificate", default="clicks.privacy.json")
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args(arguments)
    if chosen.lazy and chosen.selection:
        parser.error("--lazy and --selection exclude each other")
    return chosen


def make_plan(chosen, units):
    selection = ao.sparse.Counts(chosen.threshold) if chosen.selection else None
    default = "independent" if chosen.selection else "blt" if chosen.lazy else "auto"  # not all noise can come late
    plan = ao.plan(
        dataset_size=units, batch_size=min(chosen.batch_size, units), epochs=chosen.epochs, epsilon=chosen.epsilon,
        delta=chosen.delta, clip_norm=chosen.clip_norm, order="fixed",
        mechanism=ao.mechanism(chosen.mechanism or default, selection=selection),
    )  # fmt: skip
    if not chosen.selection:
        return plan
    threshold = chosen.threshold * plan.selection_std  # the noise on counts does not depend on it
    return replace(plan, selection=replace(plan.selection, threshold=threshold))


def train(chosen, model, data, plan):
    """The private loop; returns the engine."""
    sampler = ao.FixedOrderSampler(data, seed=chosen.seed)
    loader = DataLoader(data, batch_size=plan.batch_size, sampler=sampler)
    engine = ao.PrivacyEngine(plan)
    optimizer = torch.optim.SGD(model.parameters(), lr=chosen.lr)
    try:
        private, optimizer, loader = engine.make_private(model, optimizer, loader)
    except ao.errors.PlanError as error:
        raise SystemExit(f"these options do not go together (see --mechanism, --lazy): {error}") from None
    start = time.perf_counter()
    for epoch in range(chosen.epochs):
        for user, item, label, there in loader:
            optimizer.zero_grad()
            loss(private(user, item), label, there).mean().backward()
            optimizer.step()
        print(f"epoch {epoch + 1} of {chosen.epochs}, step {engine.step}, {time.perf_counter() - start:.1f} s")
    if chosen.lazy:
        engine.flush()  # before the tables are shown, every row gets the noise that it lacks
    return engine


@torch.no_grad()
def report(model, test):
    """Loss and accuracy of public clicks, beside those of a constant guess."""
    user, item, label = (column[test[3] > 0] for column in test[:3])
    logits = model(user, item)
    share = label.mean().clamp(1e-6, 1 - 1e-6)
    constant = F.binary_cross_entropy(share.expand_as(label), label)
    right = ((logits > 0) == (label > 0)).float().mean()
    print(
        f"public clicks: loss {F.binary_cross_entropy_with_logits(logits, label):.3f} (a constant: {constant:.3f}), "
        f"{100 * right:.1f} % right"
    )


def main(arguments=None):
    chosen = options(arguments)
    torch.manual_seed(chosen.seed)
    columns = chosen.user, chosen.item, chosen.label
    clicks = made_up(0) if chosen.csv is None else read(chosen.csv, *columns)
    data = TensorDataset(*tensors(clicks, chosen))
    plan = make_plan(chosen, len(data))
    print(plan)
    print(f"an example of the plan is a {chosen.unit}: {len(data)} of them")
    model = Clicks(chosen.rows, chosen.width, sparse=chosen.lazy or chosen.selection is not None)
    engine = train(chosen, model, data, plan)
    model.eval()
    test = read(chosen.test, *columns) if chosen.test else made_up(1) if chosen.csv is None else None
    if test is not None:
        report(model, tensors(test, chosen))
    torch.save(model.state_dict(), chosen.model)
    engine.certificate().save(chosen.certificate)
    print(f"epsilon {plan.epsilon:.3g} for each {chosen.unit}; wrote {chosen.model} and {chosen.certificate}")
    print(f"what the certificate calls an example is a {chosen.unit}")


if __name__ == "__main__":
    main()
