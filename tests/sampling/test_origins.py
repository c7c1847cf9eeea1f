"""An example has one name under torch's wrappers, and one that is listed twice is seen before a run."""

import numpy as np
import pytest
import torch
from torch.utils.data import (
    ConcatDataset,
    DataLoader,
    Dataset,
    Sampler,
    StackDataset,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    random_split,
)

from anyorder.errors import LoaderError
from anyorder.participation import FixedOrder, PoissonSampling
from anyorder.sampling.read_loader import Origins, find_participation
from anyorder.sampling.secret import secret_loader
from sampling.loaders import SOURCE, private

BASE, OTHER = TensorDataset(torch.arange(10)), TensorDataset(torch.arange(100, 105))


class Doubled(Subset):
    """A wrapper of one's own whose length is not that of its indices."""

    def __len__(self):
        return 2 * len(self.indices)


class Named(Subset):
    """A subset with something added to it."""


def test_names_are_indices_of_the_data_set_beneath():
    """The name tells the example's value, in wrappers within wrappers: 100 to 104 follow as names 10 to 14."""
    inner = Subset(BASE, torch.tensor([7, 3, -1, 0]))
    nested = ConcatDataset([Subset(inner, [2, 0]), OTHER, Subset(ConcatDataset([OTHER, BASE]), range(4, 7)), BASE])
    values = np.array([int(nested[i][0]) for i in range(len(nested))])
    expected = np.where(values < 100, values, values - 90)
    assert Origins(nested).names(np.arange(len(nested))).tolist() == expected.tolist()
    assert Origins(nested).names(np.array([12])).tolist() == [expected[12]]
    assert Origins(BASE).names(np.array([4, 2])).tolist() == [4, 2]
    assert Origins(Doubled(BASE, [1, 2])).names(np.array([3])).tolist() == [3]


REPEATED = {
    "subset": Subset(BASE, [0, 1, 2, 3, 1]),
    "subset of one's own": Named(BASE, [0, 1, 2, 3, 1]),
    "second name": Subset(BASE, [0, 9, 2, 3, -1]),
    "subset of a subset": Subset(Subset(BASE, [4, 5, 4]), [0, 2]),
    "overlapping parts": ConcatDataset([Subset(BASE, range(6)), Subset(BASE, range(5, 10))]),
    "the same twice": ConcatDataset([BASE, OTHER, BASE]),
    "stack": StackDataset(Subset(BASE, [0, 0, 1]), Subset(OTHER, [0, 1, 2])),
    "stack with a plain part": StackDataset(Subset(BASE, [0, 0, 1, 2, 3]), OTHER),
    "stack by name": StackDataset(a=Subset(BASE, [0, 1, 2]), b=Subset(BASE, [1, 2, 0])),
}
DISTINCT = {
    "split": random_split(BASE, [6, 4])[0],
    "two data sets": ConcatDataset([BASE, OTHER]),
    "parts": ConcatDataset(random_split(BASE, [6, 4])),
    "stack": StackDataset(Subset(BASE, [3, 4, 5]), Subset(OTHER, [2, 1, 0])),
    "plain stack": StackDataset(OTHER, OTHER),
}


@pytest.mark.parametrize("name", REPEATED)
def test_an_example_that_is_listed_twice_is_refused_at_planning(name):
    for options in ({"shuffle": True}, {}):
        with pytest.raises(LoaderError, match=r"more than\s+once.*order="):
            find_participation(DataLoader(REPEATED[name], batch_size=2, **options), 2)
    with pytest.raises(LoaderError, match=r"more than\s+once"):
        secret_loader(DataLoader(REPEATED[name], batch_size=2), PoissonSampling(6, 0.3), SOURCE)


@pytest.mark.parametrize("name", DISTINCT)
def test_wrappers_without_repetitions_are_planned(name):
    loader = DataLoader(DISTINCT[name], batch_size=2)
    steps = len(loader)
    assert find_participation(loader, 2).participation == FixedOrder(2 * steps, 2, steps)


def test_repetitions_outside_of_the_sampler_do_no_harm():
    loader = DataLoader(REPEATED["subset"], batch_size=2, sampler=SubsetRandomSampler([0, 4, 3]))
    assert find_participation(loader, 1).dataset_size == 3


@pytest.mark.parametrize("workers", [0, 1])
def test_the_loader_tells_the_names(workers):
    loader = DataLoader(REPEATED["overlapping parts"], batch_size=4, num_workers=workers)
    mine, calls = private(loader)
    batches = list(mine)
    assert [units for units, _ in calls] == [batch[0].tolist() for batch in batches]
    assert [units for units, _ in calls] == [[0, 1, 2, 3], [4, 5, 5, 6], [7, 8, 9]]


def test_a_list_of_indices_that_is_exchanged_is_looked_up_anew():
    """As curricula do it between epochs."""
    subset = Subset(BASE, list(range(10)))
    mine, calls = private(DataLoader(subset, batch_size=10))
    list(mine)
    subset.indices = list(range(9, -1, -1))
    list(mine)
    assert [units for units, _ in calls] == [list(range(10)), list(range(9, -1, -1))]


@pytest.mark.parametrize(("workers", "persistent"), [(0, False), (1, False), (1, True)])
def test_names_are_of_what_the_workers_read(workers, persistent):
    """Persistent ones read what was listed when they began; under other names a row came again, and nobody saw it."""
    subset = Subset(BASE, [0, 1, 2, 3])
    loader = DataLoader(subset, batch_size=2, num_workers=workers, persistent_workers=persistent)
    mine, calls = private(loader)
    for listed in ([0, 1, 2, 3], [6, 7, 8, 9]):
        subset.indices[:] = listed
        read = [int(x) for (batch,) in mine for x in batch]
        assert [unit for units, _ in calls[-2:] for unit in units] == read
    assert read == ([0, 1, 2, 3] if persistent else [6, 7, 8, 9])


@pytest.mark.parametrize("rule", [PoissonSampling(4, 0.5), None])
def test_a_list_that_is_looked_at_once_is_the_one_that_is_read(rule):
    """Secret draws name each example once, and so do the places of a stack: a later list could name one in all."""
    subset = Subset(BASE, [0, 1, 2, 3])
    data = StackDataset(subset) if rule is None else ConcatDataset([subset])
    loader = DataLoader(data, batch_size=2)
    made = private(loader)[0] if rule is None else secret_loader(loader, rule, SOURCE)
    subset.indices[:] = [7, 7, 7, 7]
    read = [int(x) for batch in made for x in torch.as_tensor(batch[0][0] if rule is None else batch[0])]
    assert read
    assert set(read) <= {0, 1, 2, 3}


def test_poisson_draws_from_the_loaders_own_subset():
    held_in = [3, 9, 4, 7, 1]
    rule = PoissonSampling(400, 0.3)
    for loader in (
        DataLoader(BASE, batch_size=2, sampler=SubsetRandomSampler(held_in)),
        DataLoader(Subset(BASE, held_in), batch_size=2, shuffle=True),
        DataLoader(BASE, batch_size=2, sampler=SubsetRandomSampler(torch.tensor(held_in))),
    ):
        mine, calls = private(secret_loader(loader, rule, SOURCE))
        values = []
        for _ in range(100):
            values += [value for (x,) in mine for value in x.tolist()]
        assert sorted(set(values)) == sorted(held_in)
        assert values == [unit for units, _ in calls for unit in units]
        for unit in held_in:  # 400 coins each, to five standard errors
            assert abs(values.count(unit) - 120) < 5 * (400 * 0.3 * 0.7) ** 0.5


def test_poisson_needs_to_know_the_examples_of_the_sampler():
    class Own(Dataset):
        def __len__(self):
            return 10

        def __getitem__(self, i):
            assert i in (4, 5)  # the batch of none is cut from an example of the sampler's too
            return torch.tensor(i)

    class Unknown(Sampler):
        def __iter__(self):
            return iter([4, 5])

        def __len__(self):
            return 2

    with pytest.raises(LoaderError, match="not known here.*SubsetRandomSampler"):
        secret_loader(DataLoader(Own(), batch_size=2, sampler=Unknown()), PoissonSampling(40, 0.1), SOURCE)
    listed = DataLoader(Own(), batch_size=2, sampler=[4, 5])  # which says its examples
    assert sum(len(x) for x in secret_loader(listed, PoissonSampling(40, 0.1), SOURCE)) > 0
    loader = DataLoader(Own(), batch_size=2, sampler=SubsetRandomSampler([5, 4]))
    assert sum(len(x) for x in secret_loader(loader, PoissonSampling(40, 0.1), SOURCE)) > 0
