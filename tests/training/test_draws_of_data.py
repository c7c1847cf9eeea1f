"""What one unit draws moves nothing of others: not in its own step, not in later ones, not in the user's generators.

Two runs of one key, whose data differ in unit 5 alone, which draws more numbers in the second. Weights stand still, so
that the sums of later steps can be compared: they are equal to the bit, and the unit's own step moves by at most what
the relation allows.
"""

import hashlib
import logging
import random
import sys
from contextvars import ContextVar
from functools import cache, lru_cache, partial
from itertools import chain, count
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.quasirandom import SobolEngine
from torch.utils.data import DataLoader, Dataset, IterableDataset, IterDataPipe, TensorDataset, get_worker_info

import anyorder as ao
from anyorder.sampling.draws import (
    _PYTHON_WORDS,
    BatchIndices,
    FetchPlace,
    ModelDraws,
    SeededCollation,
    SeededDataset,
    Seeds,
    _of_numpy,
    _state,
    alone,
    hands_on,
    held_generators,
    may_draw,
    process_generators,
    reads_only,
    reseed,
)
from loops import train_to

N, B, OTHER, CLIP = 24, 8, 5, 0.1
KEY = bytes(range(32))
GLOBAL = random.Random(3)
AUGMENTATIONS = sys.modules["augmentations_of_a_test"] = ModuleType("augmentations_of_a_test")
AUGMENTATIONS.generator = np.random.default_rng(1)


def by_torch(owner, high):
    return int(torch.randint(high, ()))


def by_numpy(owner, high):
    return np.random.randint(high)  # noqa: NPY002


def by_python(owner, high):
    return random.randrange(high)


def by_normals(owner, high):
    """Python's and NumPy's generators keep the second normal of a pair."""
    return int(abs(random.gauss(0, 1) + np.random.randn()) * 10) % high  # noqa: NPY002


def by_global_name(owner, high):
    return GLOBAL.randrange(high)


def by_own_torch(owner, high):
    return int(torch.randint(high, (), generator=owner.own))


def by_own_numpy(owner, high):
    return int(owner.own.integers(high))


def by_own(owner, high):
    return owner.own.randint(0, high) if isinstance(owner.own, np.random.RandomState) else owner.own.randrange(high)


def by_held(owner, high):
    return owner.own["transforms"][0](high)


def by_module(owner, high):
    return int(AUGMENTATIONS.generator.integers(high))


def by_import(owner, high):
    from augmentations_of_a_test import generator

    return int(generator.integers(high))


class Settings:
    generator = np.random.default_rng(1)
    function = staticmethod(lambda high: Settings.inner.generator.randrange(high))

    class inner:
        generator = random.Random(1)

    @classmethod
    def draw(cls):
        return cls.inner.generator.random()


SPAWNS = np.random.PCG64(1).__getstate__().__class__ is tuple  # NumPy 1 has no state with the seed of children
CACHED = cache(lambda: random.Random(1)), lru_cache(lambda: torch.Generator().manual_seed(1))


def by_cache(owner, high):
    return (CACHED[0]().randrange(high) + int(torch.randint(high, (), generator=CACHED[1]()))) % high


CONTEXT = ContextVar("generator")
CONTEXT.set(random.Random(1))


def by_context(owner, high):
    return CONTEXT.get().randrange(high)


def by_next(owner, high):
    return int(next(owner.own) * high)


def by_spawned(owner, high):
    return int((owner.own.spawn(1)[0] if SPAWNS else owner.own).integers(high))


def by_sequence(owner, high):
    return int(owner.own.spawn(1)[0].generate_state(1)[0]) % high


def by_sobol(owner, high):
    return int(owner.own.draw()[0, 1] * high)


def by_made(owner, high):
    if not hasattr(owner, "made"):
        owner.made = random.Random(1)
    return owner.made.randrange(high)


def endless():
    own = random.Random(1)
    while True:
        yield own.random()


def by_class(owner, high):
    return int(Settings.generator.integers(high))


def by_function_of_class(owner, high):
    return Settings.function(high)


def by_bound(owner, high):
    return int(owner.own() * high)


def by_bits(owner, high):
    return owner.own.random_raw() % high


PROCESS = by_torch, by_numpy, by_python, by_normals
HELD = {
    "torch": (by_own_torch, lambda: torch.Generator().manual_seed(1)),
    "numpy": (by_own_numpy, lambda: np.random.default_rng(1)),
    "legacy": (by_own, lambda: np.random.RandomState(1)),
    "python": (by_own, lambda: random.Random(1)),
    "deep": (by_held, lambda: {"transforms": [partial(random.Random.randrange, random.Random(1))]}),
    "global": (by_global_name, lambda: None),
    "bound method": (by_bound, lambda: random.Random(1).random),
    "bits": (by_bits, lambda: np.random.PCG64(1)),
    "module": (by_module, lambda: None),
    "import": (by_import, lambda: None),
    "class": (by_class, lambda: None),
    "function of a class": (by_function_of_class, lambda: None),
    "method of a class": (by_bound, lambda: Settings.draw),
    "cache": (by_cache, lambda: None),
    "context": (by_context, lambda: None),
    "map": (by_next, lambda: map(lambda _, own=random.Random(1): own.random(), count())),
    "chain": (by_next, lambda: chain(endless())),
    "local variable": (by_next, endless),
    "spawned": (by_spawned, lambda: np.random.default_rng(1)),
    "seed sequence": (by_sequence, lambda: np.random.SeedSequence(1)),
    "Sobol": (by_sobol, lambda: SobolEngine(2, scramble=True, seed=1)),
}


def rows(rejects, size=N):
    """(size, 12) rows to crop; in one that rejects, only the last crop is accepted."""
    x = torch.rand(size, 12, generator=torch.Generator().manual_seed(1))
    if rejects:
        x[OTHER] = -9
        x[OTHER, 8:] = 1
    return x


class Crops(Dataset):
    """Crops at random places, drawn again until one is accepted."""

    def __init__(self, rejects, draw=by_torch, own=None):
        self.x, self.draw, self.own = rows(rejects), draw, own

    def __len__(self):
        return N

    def __getitem__(self, i):
        while True:
            start = self.draw(self, 9)
            crop = self.x[i, start : start + 4]
            if crop.min() >= 0:
                return crop, i % 2


class FetchedAtOnce(Crops):
    def __getitems__(self, indices):
        return [self[i] for i in indices]


class Listed(Crops):
    """Makes a batch of a list of indices."""

    def __getitem__(self, indices):
        found = [super(Listed, self).__getitem__(i) for i in indices]
        return torch.stack([x for x, _ in found]), torch.tensor([y for _, y in found])


class ListedAsList(Listed):
    """The same in a list of fields, which was taken for a list of examples."""

    def __getitem__(self, indices):
        return list(super().__getitem__(indices))


class CropStream(IterableDataset):
    def __init__(self, rejects, draw=by_torch):
        self.crops = Crops(rejects, draw)

    def __iter__(self):
        worker = get_worker_info()
        for i in range(N):
            if worker is None or i // B % worker.num_workers == worker.id:
                crop, label = self.crops[i]
                yield {"x": crop, "y": label, "user": i}


class CropPipe(IterDataPipe):
    def __init__(self, rejects):
        self.stream = CropStream(rejects)

    def __iter__(self):
        yield from self.stream


def small():
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(0.5), nn.Linear(8, 2))


class Run:
    """One epoch with weights that stand still.

    Attributes:
        batches: what the loader gave.
        released: what each step released; the noise is that of the key.
    """

    def __init__(self, loader, *, key=KEY, unit=None, model=small, epochs=1, order=None, **options):
        self.batches, self.released, self.states = [], [], []
        torch.manual_seed(0)
        model = model()
        plan = ao.plan(
            batch_size=B, noise_multiplier=1.0, delta=1e-5, clip_norm=CLIP, unit="example" if unit is None else "user",
            mechanism="independent" if order is None or order.secret else "tree",
            **({"dataset_size": N, "epochs": epochs} if order is None else {"order": order}),
        )  # fmt: skip
        engine = ao.PrivacyEngine(plan, key=key)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        private, optimizer, loader = engine.make_private(model, optimizer, loader, unit=unit, **options)
        engine.on_release(lambda step, gradient: self.released.append(gradient.clone()))
        random.seed(7), np.random.seed(7), torch.manual_seed(7)  # noqa: NPY002
        np.random.randn(), random.gauss(0, 1)  # noqa: NPY002
        self.states.append(states())
        for _ in range(epochs):
            for batch in loader:
                x, y = (batch["x"], batch["y"]) if isinstance(batch, dict) else batch
                optimizer.zero_grad()
                nn.functional.cross_entropy(private(x), y).backward()
                optimizer.step()
                self.batches.append(x.clone())
                self.states.append(states())
        engine.close()
        workers = getattr(loader._loader, "_iterator", None)  # persistent ones alone
        if workers is not None:  # that the collector of cycles finds are waited for, five seconds each
            workers._shutdown_workers()


def states():
    kind, words, *rest = np.random.get_state()  # noqa: NPY002
    return torch.get_rng_state().numpy().tobytes().hex(), random.getstate(), (kind, words.tobytes(), *rest)


def assert_others_stand(first, second):
    """Steps in which unit 5 is not are the same, and so are the user's generators after every batch."""
    for t in (1, 2, 4, 5):
        assert torch.equal(first.released[t], second.released[t])
    assert first.states == second.states
    assert all(state == first.states[0] for state in first.states)


def assert_isolated(first, second):
    """Only unit 5 of batch 0 may differ between two runs of neighbours."""
    assert len(first.released) == len(second.released)
    for t, (a, b) in enumerate(zip(first.released, second.released, strict=True)):
        if t % (N // B):
            assert torch.equal(a, b), f"step {t}, in which the unit is not, has moved"
        else:
            assert B * (a - b).norm() <= 2 * CLIP * (1 + 1e-5), f"step {t} has moved by more than one unit can"
    others = [i for i in range(B) if i != OTHER]
    for t, (a, b) in enumerate(zip(first.batches, second.batches, strict=True)):
        assert torch.equal(a[others], b[others]), f"examples of others have moved in batch {t}"
    assert first.states == second.states
    assert all(state == first.states[0] for state in first.states), "the user's generators have moved"


def loader_of(data, workers=0, persistent=False, **settings):
    return DataLoader(data, batch_size=B, num_workers=workers, persistent_workers=persistent, **settings)


@pytest.mark.parametrize("draw", PROCESS)
def test_a_crop_that_rejects(draw):
    assert_isolated(*(Run(loader_of(Crops(rejects, draw)), epochs=2) for rejects in (False, True)))


def test_a_crop_that_rejects_in_workers():
    """Draws are those of the main process, in however many workers, that stay for all epochs."""
    here = Run(loader_of(Crops(False, by_normals)), epochs=2)
    runs = [Run(loader_of(Crops(r, by_normals), 2, persistent=True), epochs=2) for r in (False, True)]
    assert_isolated(*runs)
    assert all(torch.equal(a, b) for a, b in zip(here.released, runs[0].released, strict=True))


@pytest.mark.parametrize(
    "kind", ["torch", "deep", "global", "import", "function of a class", "cache", "local variable"]
)
def test_generators_that_a_data_set_keeps(kind):
    draw, make = HELD[kind]
    assert_isolated(*(Run(loader_of(Crops(r, draw, make())), epochs=2) for r in (False, True)))


def test_generators_that_a_data_set_keeps_in_workers():
    """All kinds at once: where one is not set for each example, what is drawn by all is another number."""
    runs = [Run(loader_of(Crops(r, by_each, owners()), 2), epochs=2) for r in (False, True)]
    assert_isolated(*runs)
    here = [Run(loader_of(Crops(r, by_each, owners())), epochs=2) for r in (False, True)]
    assert_isolated(*here)
    assert all(torch.equal(a, b) for a, b in zip(here[0].released, runs[0].released, strict=True))


@pytest.mark.parametrize("kind", [Crops, FetchedAtOnce])
def test_a_generator_that_an_example_makes(kind):
    """It is found behind that example, which is fetched again, and what it drew does not stay in it."""
    runs = []
    for rejects in (False, True):
        data = kind(rejects, by_made)
        made = SeededDataset(data, Seeds(KEY), FetchPlace()).__getitems__(BatchIndices(range(OTHER, OTHER + B), 0))
        runs.append((torch.stack([x for x, _ in made[1:]]), data.made.getstate()))
    assert torch.equal(runs[0][0], runs[1][0])
    assert runs[0][1] == runs[1][1]


@pytest.mark.skipif(not SPAWNS, reason="NumPy 1")
@pytest.mark.parametrize("make", [lambda: np.random.default_rng(1).spawn(1)[0], lambda: SobolEngine(2, scramble=True)])
def test_what_was_spawned_or_drawn_is_put_back(make):
    own = make()
    spawn, draw = getattr(own, "spawn", None), lambda: float(own.random() if spawn else own.draw()[0, 0])
    sequence = own.bit_generator.seed_seq if spawn else own
    draw(), spawn and spawn(2)
    before = repr(getattr(sequence, "__dict__", sequence)), _state(own)
    first = []
    for _ in range(2):
        with alone(7, [own, sequence]):
            first.append((draw(), spawn and spawn(1)[0].random(), spawn and sequence.spawn(1)[0].generate_state(1)[0]))
        assert (repr(getattr(sequence, "__dict__", sequence)), _state(own)) == before
    assert first[0] == first[1]
    assert len({x for x in first[0] if x is not None}) == (3 if spawn else 1)


def owners():
    return [SimpleNamespace(own=make()) for _, make in HELD.values()]


def by_each(owner, high):
    return sum(draw(one, high) for one, (draw, _) in zip(owner.own, HELD.values(), strict=True)) % high


class SeldomDrawn(Crops):
    """Examples of the second batch draw, and unit 5 of the first where it rejects: which is seen is of the data."""

    def __getitem__(self, i):
        if B <= i < 2 * B or (i == OTHER and self.x[i].min() < 0):
            return super().__getitem__(i)
        return self.x[i, 8:], i % 2


class SeldomDrawnAtOnce(SeldomDrawn, FetchedAtOnce):
    pass


@pytest.mark.parametrize("kind", [SeldomDrawn, SeldomDrawnAtOnce])
@pytest.mark.parametrize("draw", [by_torch, by_own])
def test_a_data_set_of_which_few_examples_draw(draw, kind):
    """Until the first draws all of a batch are fetched under one state, which none sees that draws."""
    assert_isolated(*(Run(loader_of(kind(r, draw, random.Random(1))), epochs=2) for r in (False, True)))


def test_a_kept_generator_is_afterwards_as_it_was():
    own = random.Random(1)
    before = own.getstate()
    Run(loader_of(Crops(True, by_own, own)))
    assert own.getstate() == before


@pytest.mark.parametrize("kind", [FetchedAtOnce, Listed, ListedAsList])
def test_data_sets_that_fetch_several_at_once(kind):
    def loader(rejects):
        data = kind(rejects)
        if kind is FetchedAtOnce:
            return loader_of(data)
        sampler = torch.utils.data.BatchSampler(range(N), B, drop_last=False)
        return DataLoader(data, batch_size=None, sampler=sampler)

    assert_isolated(*(Run(loader(rejects), epochs=2) for rejects in (False, True)))


@pytest.mark.parametrize(("kind", "workers"), [(CropPipe, 0), (CropStream, 2)])
def test_streams(kind, workers):
    order = ao.participation.MinSeparation(6, b=3, k=2)
    found = [
        Run(loader_of(kind(r), workers), unit="user", epochs=2, order=order) for r in (False, True)
    ]  # fmt: skip
    assert_isolated(*found)
    assert not torch.equal(found[0].batches[0], found[0].batches[N // B])


def test_batches_of_ones_own():
    """Of any iterable: what it draws for one batch decides nothing of the next."""

    class Batches:
        def __init__(self, rejects):
            self.crops = Crops(rejects)

        def __iter__(self):
            for first in range(0, N, B):
                x = torch.stack([self.crops[i][0] for i in range(first, first + B)])
                yield {"x": x, "y": torch.arange(B) % 2, "user": torch.arange(first, first + B)}

    order = ao.participation.MinSeparation(6, b=3, k=2)
    first, second = (Run(Batches(r), unit="user", epochs=2, order=order) for r in (False, True))
    assert_others_stand(first, second)


def test_hugging_face_data_with_a_random_transform():
    datasets = pytest.importorskip("datasets")

    def loader(rejects):
        crops = Crops(rejects)

        def cropped(batch):
            found = [crops[i] for i in batch["i"]]
            return {"x": [x for x, _ in found], "y": torch.tensor([y for _, y in found])}

        return loader_of(datasets.Dataset.from_dict({"i": list(range(N))}).with_transform(cropped))

    assert_isolated(*(Run(loader(rejects), epochs=2) for rejects in (False, True)))


class NamedCrops(Crops):
    def __getitem__(self, i):
        x, y = super().__getitem__(i)
        return torch.cat([x, torch.tensor([float(i)])]), y


class Named(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = small()

    def forward(self, x):
        return self.net(x[:, :4])


@pytest.mark.parametrize("rows_of_batch", [None, 16])
def test_a_crop_that_rejects_in_secret_batches(rows_of_batch):
    order = ao.participation.PoissonSampling(6, 1 / 3)
    first, second = (
        Run(loader_of(NamedCrops(r)), model=Named, order=order, epochs=2, micro_batch=rows_of_batch)
        for r in (False, True)
    )
    moved = 0
    for t, (a, b) in enumerate(zip(first.batches, second.batches, strict=True)):
        other = a[:, 4] != OTHER
        assert torch.equal(a[other], b[other])
        if other.all():
            assert torch.equal(first.released[t], second.released[t])
        moved += not torch.equal(a, b)
    assert 0 < moved < len(first.batches)
    assert first.states == second.states


def noisy(examples):
    """Drops some of each example, the more numbers the more there are."""
    x = torch.stack([x for x, _ in examples])
    for row in x:
        torch.rand(int(row.abs().sum() * 10))
    return nn.functional.dropout(x), torch.tensor([y for _, y in examples])


def test_draws_of_a_collation():
    def data(rejects):
        x = rows(False)[:, :4].clone()
        x[OTHER] *= 1 + 9 * rejects
        return TensorDataset(x, torch.arange(N) % 2)

    assert_isolated(*(Run(loader_of(data(r), collate_fn=noisy), epochs=2) for r in (False, True)))


def test_a_collation_of_each_example_alone_draws_for_each():
    place, drawn = FetchPlace(), []
    collate = SeededCollation(lambda many: [random.random() for _ in range(many)], Seeds(KEY), place)
    for position, many in ((3, 1), (3, 7), (4, 1)):
        place.batch = (position,)
        collate(many)
        drawn.append([collate(1)[0], collate(1)[0]])
    assert drawn[0] == drawn[1]
    assert len({*drawn[0], *drawn[2]}) == 4


class Texts(nn.Module):
    """Dropout over as many places as the longest text of the batch has."""

    def __init__(self):
        super().__init__()
        self.net = nn.Linear(4, 2)

    def forward(self, x):
        return self.net(nn.functional.dropout(x).mean(1))


class Straight(torch.autograd.Function):
    """Passes the gradient on with noise of its own, for as many places as there are."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x):
        return x.clone()

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.places = inputs[0].shape[0]

    @staticmethod
    def backward(ctx, gradient):
        np.random.rand(ctx.places), [random.random() for _ in range(ctx.places)]  # noqa: NPY002
        return gradient * (1 + np.random.rand() + random.random())  # noqa: NPY002


class Backwards(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.net = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x):
        return self.net(Straight.apply(self.first(x)).mean(1))


class OwnGenerator(nn.Module):
    """Drops each text as a whole, by a generator that it keeps, drawn from once for each place."""

    def __init__(self):
        super().__init__()
        self.net, self.own = nn.Linear(4, 2), random.Random(1)

    def forward(self, x):
        return self.net(x.mean(1) * [self.own.random() for _ in range(x.shape[1])][-1])


def padded(examples):
    x = nn.utils.rnn.pad_sequence([x for x, _ in examples], batch_first=True)
    return x, torch.tensor([y for _, y in examples])


@pytest.mark.parametrize("model", [Texts, Backwards, OwnGenerator])
def test_draws_of_a_model_end_with_their_step(model):
    """Also what backward draws, and what comes from a generator of the model's own."""

    def data(rejects):
        lengths = [3 + i % 2 for i in range(N)]
        lengths[OTHER] = 40 if rejects else 3
        x = torch.rand(N, 40, 4, generator=torch.Generator().manual_seed(1))
        return [(x[i, :length], i % 2) for i, length in enumerate(lengths)]

    first, second = (
        Run(loader_of(data(r), collate_fn=padded), model=model, epochs=2, pad_to=(4, 40)) for r in (False, True)
    )
    assert_others_stand(first, second)


# -- masked language modelling ---------------------------------------------------------------------------------------


def tokenizer():
    transformers = pytest.importorskip("transformers")
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    words = {word: i for i, word in enumerate(["[PAD]", "[MASK]", "[UNK]", *map(str, range(20))])}
    own = Tokenizer(WordLevel(words, unk_token="[UNK]"))
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=own, pad_token="[PAD]", mask_token="[MASK]", unk_token="[UNK]"
    )


class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.net = nn.Embedding(23, 4), nn.Linear(4, 2)

    def forward(self, ids):
        return self.net(self.table(ids).mean(1))


@pytest.mark.parametrize(("seed", "workers"), [(None, 0), (0, 2)])
def test_masks_of_tokens(seed, workers):
    """The stock collator draws a mask for each place of the padded batch; with a seed, from a generator of its own."""
    transformers = pytest.importorskip("transformers")
    words = tokenizer()

    def loader(rejects):
        lengths = [6] * N
        lengths[OTHER] = 40 if rejects else 6
        ids = torch.randint(3, 23, (N, 40), generator=torch.Generator().manual_seed(1))
        data = [{"input_ids": ids[i, :length].tolist()} for i, length in enumerate(lengths)]
        stock = transformers.DataCollatorForLanguageModeling(words, mlm_probability=0.4, seed=seed)
        return loader_of(data, workers, collate_fn=partial(tokens, stock))

    first, second = (Run(loader(r), model=Words, epochs=2, pad_to=(8, 40)) for r in (False, True))
    assert_isolated(first, second)
    assert not torch.equal(first.batches[1], first.batches[4])


def tokens(stock, examples):
    return {"x": (ids := stock(examples)["input_ids"]), "y": torch.arange(len(ids)) % 2}


# -- whose the draws are ---------------------------------------------------------------------------------------------


def test_draws_are_the_keys_whatever_the_users_seed_is():
    plain = Run(loader_of(Crops(False, by_normals)))
    original = torch.manual_seed
    try:
        torch.manual_seed = lambda seed: original(seed + 100 * (seed == 7))  # what follows make_private
        again = Run(loader_of(Crops(False, by_normals)))
    finally:
        torch.manual_seed = original
    assert all(torch.equal(a, b) for a, b in zip(plain.released, again.released, strict=True))
    other = Run(loader_of(Crops(False, by_normals)), key=bytes(32))
    assert not any(torch.equal(a, b) for a, b in zip(plain.batches, other.batches, strict=True))


def test_masks_of_two_keys_differ():
    data = TensorDataset(torch.ones(N, 4), torch.arange(N) % 2)

    def masks(key):
        found = []
        model = nn.Sequential(nn.Dropout(0.5), nn.Linear(4, 2))
        model[0].register_forward_hook(lambda module, args, output: found.append(torch.get_rng_state().tolist()))
        Run(loader_of(data), key=key, model=lambda: model)
        return found

    a, b, c = masks(KEY), masks(KEY), masks(bytes(32))
    a, b, c = (one[-(N // B) :] for one in (a, b, c))  # before them the model was tried
    assert a == b != c
    assert all(len({str(state) for state in one}) == len(one) for one in (a, c))


def test_micro_batches_and_ranks_have_masks_of_their_own():
    seeds, found = Seeds(KEY), []
    for rank, step, part in ((0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1)):
        with ModelDraws(nn.Dropout(), seeds, rank).forward(step, part):
            found.append(torch.rand(4).tolist())
    assert len(set(map(str, found))) == len(found)
    assert ModelDraws.of(nn.Sequential(nn.Linear(2, 2), nn.ReLU()), seeds, 0) is None
    hooked = nn.Linear(2, 2)
    hooked.register_forward_hook(lambda *_: None)
    for model in (nn.RReLU(), hooked, nn.LSTM(2, 2, 2, dropout=0.5), Texts()):
        assert ModelDraws.of(model, seeds, 0) is not None


def test_a_run_goes_on_with_the_same_draws(tmp_path):
    """Crops and masks of a run that is resumed are those of one that was not, whatever was drawn in between."""

    def train(path, until):
        torch.manual_seed(0)
        model = small()
        plan = ao.plan(dataset_size=N, batch_size=B, epochs=2, noise_multiplier=1.0, delta=1e-5, mechanism="tree")
        engine = ao.PrivacyEngine(plan, checkpoint=path, key=KEY)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loader = loader_of(Crops(True, by_normals), shuffle=True)
        private, optimizer, loader = engine.make_private(model, optimizer, loader)
        train_to(until, engine, private, optimizer, loader)
        engine.save()
        engine.close()
        return torch.cat([p.detach().reshape(-1) for p in model.parameters()])

    whole = train(tmp_path / "whole", 6)
    for until in (2, 6):
        random.random(), np.random.rand(), torch.rand(until)  # noqa: NPY002
        part = train(tmp_path / "parts", until)
    assert torch.equal(whole, part)


def test_draws_under_a_key_of_the_systems_entropy_go_on_too(tmp_path):
    def first_batch():
        plan = ao.plan(dataset_size=N, batch_size=B, epochs=1, noise_multiplier=1.0, delta=1e-5)
        model = small()
        engine = ao.PrivacyEngine(plan, checkpoint=tmp_path / "run")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loader = engine.make_private(model, optimizer, loader_of(Crops(False)))[2]
        batch = next(iter(loader))[0]
        engine.close()
        return batch

    assert torch.equal(first_batch(), first_batch())


def test_the_users_generators_are_put_back_after_an_error():
    before = states()
    with pytest.raises(ValueError, match="own"), alone(1):
        torch.rand(3), np.random.randn(), random.gauss(0, 1)  # noqa: NPY002
        raise ValueError("own")
    assert states() == before
    random.gauss(0, 1), np.random.randn()  # noqa: NPY002
    before = states()  # with the second of a pair of normals
    with alone(1):
        first = torch.rand(3), np.random.randn(), random.gauss(0, 1)  # noqa: NPY002
    assert states() == before
    with alone(1):
        assert str(first) == str((torch.rand(3), np.random.randn(), random.gauss(0, 1)))  # noqa: NPY002


def test_each_draw_of_the_process_is_seen_and_taken_back():
    """By the memory of generators, of which a copy costs a hundredth of what their own methods take."""
    draws = (
        torch.rand, random.random, lambda _: random.gauss(0, 1), np.random.rand, np.random.randn, np.random.seed,
    )  # fmt: skip
    for pairs in range(3):
        for draw in draws:
            np.random.randn(pairs), random.gauss(0, 1) if pairs else None  # noqa: NPY002
            users, generators = states(), process_generators()
            with alone(pairs):
                with alone(7):
                    pass
                before = list(map(_state, generators))
                assert before == list(map(_state, generators))
                draw() if draw is random.random else draw(1)
                assert before != list(map(_state, generators))
            assert states() == users
    assert _of_numpy.words()  # they are read where they are known to be
    assert _PYTHON_WORDS is not None or sys.implementation.name != "cpython"


def test_a_backward_pass_that_fails_is_ended_by_the_next(monkeypatch):
    plan = ao.plan(dataset_size=N, batch_size=B, epochs=1, noise_multiplier=1.0, delta=1e-5)
    model = Backwards()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = TensorDataset(torch.rand(N, 3, 4), torch.arange(N) % 2)
    engine = ao.PrivacyEngine(plan, key=KEY)
    private, optimizer, loader = engine.make_private(model, optimizer, loader_of(data))
    x, y = next(iter(loader))
    before = states()
    monkeypatch.setattr(random, "random", lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        nn.functional.cross_entropy(private(x), y).backward()
    assert states() != before
    optimizer.zero_grad()
    assert states() == before


def test_seeds_are_functions_of_key_and_address():
    seeds = Seeds(KEY)
    assert seeds.at("example", 1, 2) == Seeds(KEY).at("example", 1, 2)
    different = {seeds.at("example", i, j) for i in range(20) for j in range(20)}
    assert len(different) == 400
    assert len({seed >> 192 for seed in different}) == 400  # of 256 bits
    assert Seeds(bytes(32)).at("example", 1, 2) not in different


KINDS_OF_GENERATORS = {
    "torch": lambda: (own := torch.Generator(), lambda: torch.rand(4, generator=own).tolist()),
    "Python": lambda: (own := random.Random(), lambda: own.random()),
    "legacy NumPy": lambda: (own := np.random.RandomState(), lambda: own.rand(4).tolist()),
    "NumPy": lambda: (own := np.random.default_rng(), lambda: own.random()),
}


@pytest.mark.parametrize("kind", KINDS_OF_GENERATORS)
def test_every_bit_of_a_seed_counts(kind):
    """Of 32 bits all masks of a step could be tried, and that they have the same law for a neighbour is no help."""
    generator, draw = KINDS_OF_GENERATORS[kind]()
    found = []
    for seed in (5, 5, 5 + 2**32, 5 + 2**64, 5 + 2**200, 2**256 - 1):
        reseed([generator], seed)
        found.append(str(draw()))
    assert found[0] == found[1]
    assert len(set(found)) == 5


@pytest.mark.parametrize("kind", KINDS_OF_GENERATORS)
def test_generators_of_one_place_draw_other_numbers(kind):
    (one, draw), (other, again) = (KINDS_OF_GENERATORS[kind]() for _ in range(2))
    reseed([one, other], 5)
    assert draw() != again()


def test_torchs_generator_is_set_as_a_whole():
    """Its words are those of the stream, and what comes is the Mersenne twister's of these."""
    own = torch.Generator()
    torch.randn(3, generator=own)  # leaves half a pair
    reseed([own], seed := 2**255 + 3)
    words = np.frombuffer(hashlib.shake_128(seed.to_bytes(33, "little")).digest(2496), np.uint32)
    twister = np.random.MT19937()
    twister.state = {"bit_generator": "MT19937", "state": {"key": words, "pos": 624}}
    assert own.initial_seed() == 3
    found = torch.empty(2000, dtype=torch.int32).random_(generator=own).numpy()
    np.testing.assert_array_equal(found, twister.random_raw(2000) % 2**31)


def test_data_that_does_not_draw_is_read_as_it_was():
    data = TensorDataset(torch.rand(N, 4), torch.arange(N) % 2)
    for known in (data, torch.utils.data.Subset(data, [1, 2]), torch.utils.data.ConcatDataset([data, data]), [1, 2]):
        assert not may_draw(known)
    for other in (Crops(False), torch.utils.data.Subset(Crops(False), [1]), CropStream(False)):
        assert may_draw(other)


def test_examples_do_not_hide_the_generators_of_transforms():
    class Record:
        def __init__(self, transform=None):
            self.transform, self.boxes = transform, [Record.Box() for _ in range(9)]

        class Box:
            pass

    def crop():
        crop = partial(lambda own, x: own.random(), np.random.default_rng(1))
        crops.append(crop.args[0])
        return crop

    crops = []
    deep = {"records": [Record() for _ in range(1000)], "transform": partial(lambda t, x: t, [[crop()], [[crop()]]])}
    assert [id(one) for one in held_generators(deep)] == [id(one) for one in crops]
    shared = crop()
    assert [id(one) for one in held_generators([Record(shared) for _ in range(1000)])] == [id(shared.args[0])]
    assert len(held_generators([np.random.default_rng(i) for i in range(60)])) == 60


def test_a_logger_hides_no_generator():
    """Of a Trainer's collation the walk went on to all loggers of the process, to its end."""
    own = np.random.default_rng(1)
    deep = own
    for _ in range(60):
        deep = [deep]
    assert [id(one) for one in held_generators({"log": logging.getLogger("of.a.test"), "transform": deep})] == [id(own)]


def test_generators_are_found():
    own, global_ = np.random.default_rng(1), GLOBAL

    class Slots:
        __slots__ = ("inner",)

    class Transform:
        shared = torch.Generator()

        def __call__(self, x):
            return x + own.normal()

    transform = Transform()
    transform.list = [Slots()]
    transform.list[0].inner = {"a": random.Random(2)}
    found = held_generators(transform)
    assert {id(one) for one in found} == {id(own), id(Transform.shared), id(transform.list[0].inner["a"])}
    assert held_generators(partial(by_global_name, None)) == [global_]
    assert held_generators([random.SystemRandom()]) == held_generators(torch.rand(3), "text", nn) == []


class OfTheUser(nn.Module):
    """What it does is not known by its name."""

    def __init__(self, p):
        super().__init__()
        self.line, self.drop = nn.Linear(3, 2), nn.Dropout(p) if p else nn.Identity()

    def forward(self, x):
        return self.drop(self.line(x))


def trained(model, between=lambda engine: None):
    """The released gradients of six steps, and how often generators were set for a forward pass."""
    loader = DataLoader(TensorDataset(torch.linspace(-1, 1, 144).view(48, 3)), batch_size=B)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plan = ao.plan(loader=loader, epochs=1, epsilon=8, delta=1e-5, mechanism="independent")
    engine = ao.PrivacyEngine(plan, key=KEY)
    private, optimizer, loader = engine.make_private(model, optimizer, loader)
    draws, seen, count = engine.training._draws, [], []
    assert draws is not None
    forward = draws.forward
    draws.forward = lambda *where: count.append(where) or forward(*where)
    for (x,) in loader:
        between(engine)
        optimizer.zero_grad()
        private(x).square().sum().backward()
        optimizer.step()
        seen.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    return torch.stack(seen), len(count)


@pytest.mark.parametrize("p", [0.0, 0.5])
def test_generators_are_left_alone_where_a_tape_draws_nothing(p):
    torch.manual_seed(0)
    model = OfTheUser(p)
    other = OfTheUser(p)
    other.load_state_dict(model.state_dict())
    made, often = trained(model)
    again, always = trained(other, lambda engine: engine.training._clipping.programs.drop())
    assert (often, always) == (6 if p else 3, 6)
    assert torch.allclose(made, again, rtol=1e-6, atol=1e-8)


def test_where_a_tape_fails_the_model_runs_under_generators_of_its_own(monkeypatch):
    torch.manual_seed(0)
    model, other = OfTheUser(0.0), OfTheUser(0.0)
    other.load_state_dict(model.state_dict())
    before = trained(model)[0]

    def broken(tape, given):
        raise RuntimeError("it does not run")

    monkeypatch.setattr("anyorder.clipping.program.Tape.forward", broken)
    made, often = trained(other)
    assert often == 6
    assert torch.allclose(made, before, rtol=1e-6, atol=1e-8)


class PutsBack(Dataset):
    """Draws and puts the generator back; one example draws once more, and does not."""

    def __init__(self, marked):
        self.marked, self.drawn = marked, {}

    def __len__(self):
        return 12

    def __getitem__(self, index):
        with torch.random.fork_rng(devices=[]):
            self.drawn[index] = torch.rand(1).item()
        if index == self.marked:
            torch.rand(1)
        return torch.ones(2), torch.zeros(())


class PutsBackAtOnce(PutsBack):
    def __getitems__(self, indices):
        return [self[index] for index in indices]


@pytest.mark.parametrize("kind", [PutsBack, PutsBackAtOnce])
def test_who_draws_does_not_move_those_that_put_generators_back(kind):
    drawn = []
    for marked in (None, 0, 5):
        data = kind(marked)
        plan = ao.plan(dataset_size=12, batch_size=4, epochs=1, epsilon=2.0, delta=1e-5)
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        engine = ao.PrivacyEngine(plan, key=bytes(32))
        model, optimizer, loader = engine.make_private(model, optimizer, DataLoader(data, batch_size=4))
        for x, y in loader:
            ((model(x)[:, 0] - y) ** 2).mean().backward()
            optimizer.step()
        drawn.append(data.drawn)
    assert drawn[0] == drawn[1] == drawn[2]
    assert len(set(drawn[0].values())) == 12


class Reads(Dataset):
    """Of code that is known to draw nothing, as long as what it reads are tensors."""

    def __init__(self, x=None):
        self.x, self.y = torch.rand(12, 2) if x is None else x, np.zeros(12, np.float32)

    def __len__(self):
        return 12

    def __getitem__(self, index):
        x = self.x[index % len(self.x)] if index is not None else self.y
        return x.float() + 1, self.y[index].item()


class Rolls:
    """In the place of a tensor; for one index it draws more than for others."""

    def __init__(self, marked):
        self.marked = marked

    def __len__(self):
        return 12

    def __getitem__(self, index):
        torch.rand(5) if index == self.marked else None
        return torch.rand(2)


def reads(item=None, x=None, **own):
    """A data set with another `__getitem__`, attribute or member of its class."""
    data = type("Reads", (Reads,), ({} if item is None else {"__getitem__": item}) | own)(x)
    data.list, data.rng = [Rolls(None)], np.random.default_rng(0)
    return data


def test_data_that_is_only_read_is_known():
    assert reads_only(Reads())
    assert reads_only(torch.utils.data.Subset(Reads(), [1, 2]))
    assert hands_on(lambda batch: batch)
    assert not hands_on(lambda batch: batch[0])
    assert not hands_on(Rolls(None).__getitem__)
    changed = torch.rand(12, 2)
    changed.float = lambda: torch.rand(12, 2)
    drawing = {
        "its attribute": reads(x=Rolls(None)),
        "its attribute, under Subset": torch.utils.data.Subset(reads(x=Rolls(None)), [1, 2]),
        "an array of objects": reads(x=np.full(12, None)),
        "a subclass of tensors": reads(x=nn.Parameter(torch.rand(12, 2))),
        "a list": reads(lambda self, i: self.list[0][i]),
        "its generator": reads(lambda self, i: self.rng.random()),
        "a method that draws": reads(lambda self, i: self.x[i].random_()),
        "itself or another": reads(lambda self, i: (self.x[i] if i else self).random_, random_=None),
        "a default": reads(lambda self, i, rolls=Rolls(None): rolls[i]),
        "a global": reads(lambda self, i: torch.rand(2)),
        "a closure": (lambda rolls: reads(lambda self, i: rolls[i]))(Rolls(None)),
        "another name for itself": reads(lambda self, i: [own.rng.random() for own in [self]]),
        "a helper": reads(lambda self, i: self.helper(i), helper=lambda self, i: torch.rand(2)),
        "a property": reads(lambda self, i: self.own, own=property(lambda self: torch.rand(2))),
        "what is not there": reads(lambda self, i: self.lost, __getattr__=lambda self, name: torch.rand(2)),
        "any attribute": reads(__getattribute__=object.__getattribute__.__get__),
        "at once": reads(__getitems__=lambda self, indices: [torch.rand(2) for _ in indices]),
        "a function of torch": reads(torch.rand),
        "methods of what it wraps": reads(__getattr__=lambda self, name: getattr(self.list[0], name)),
        "a static method": reads(staticmethod(lambda i, rand=torch.rand: rand(2))),
        "a tensor with a method of its own": reads(x=changed),
    }
    assert [name for name, data in drawing.items() if reads_only(data)] == []
    replaced = Reads()
    replaced.__getitem__ = lambda index: torch.rand(2)
    assert not reads_only(replaced)


def test_data_that_draws_from_some_batch_on_is_fetched_under_generators_of_its_own():
    found = []
    for marked in (None, 5):
        data = Reads()
        plan = ao.plan(dataset_size=12, batch_size=4, epochs=1, epsilon=2.0, delta=1e-5)
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        engine = ao.PrivacyEngine(plan, key=bytes(32))
        *_, loader = engine.make_private(model, optimizer, DataLoader(data, batch_size=4))
        rows, before = [], states()
        for x, _ in loader:
            rows += x.tolist()
            data.x = Rolls(marked)  # from the second batch on
            assert states() == before
        found.append(rows[4:5] + rows[6:])  # without example 5
    assert found[0] == found[1]
    assert len(set(map(str, found[0]))) == 7
