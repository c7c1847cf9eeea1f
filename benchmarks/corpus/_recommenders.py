"""Made-up ratings in the files that recommenders read."""

import random
from pathlib import Path


def ratings(users: int, items: int, of_each: int) -> list[tuple[int, int, int]]:
    """Users, items and ratings from 1 to 5, by user; both are counted from one."""
    chance = random.Random(0)
    return [
        (u, i, chance.randint(1, 5)) for u in range(1, users + 1) for i in chance.sample(range(1, items + 1), of_each)
    ]


def movielens(folder: Path) -> None:
    """`ratings.dat` of MovieLens 1M."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = [f"{u}::{i}::{r}::978300760\n" for u, i, r in ratings(60, 40, 20)]
    (folder / "ratings.dat").write_text("".join(lines))


def ncf(folder: Path) -> None:
    """Ratings for training, and one for testing with 99 items that the user did not rate."""
    users, items = 60, 130
    of_user: dict[int, list[int]] = {}
    for u, i, _ in ratings(users, items, 11):
        of_user.setdefault(u - 1, []).append(i - 1)
    train, test = [], []
    for u, rated in of_user.items():
        train += [f"{u}\t{i}\t1\t0\n" for i in rated[1:]]
        others = [i for i in range(items) if i not in rated][:99]
        test.append("\t".join([f"({u},{rated[0]})", *map(str, others)]) + "\n")
    train.append(f"{users - 1}\t{items - 1}\t1\t0\n")
    (folder / "ml-1m.train.rating").write_text("".join(train))
    (folder / "ml-1m.test.negative").write_text("".join(test))


def sequences(folder: Path) -> None:
    """A user and an item in each line, in the order of time."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "made_up.txt").write_text("".join(f"{u} {i}\n" for u, i, _ in ratings(64, 50, 12)))
