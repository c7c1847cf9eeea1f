"""A training that is watched: who really came, what Opacus printed, and that watching moved nothing."""

import json
import math
import random
import subprocess
import textwrap
import warnings
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, Sampler, Subset, TensorDataset

import anyorder as ao
from anyorder.accounting import gdp_epsilon
from anyorder.audit.arrivals import Arrivals
from anyorder.audit.loader_check import _combined, watch
from anyorder.audit.observations import AtMost, Observed
from anyorder.errors import ArgumentError
from audit import checked

opacus = pytest.importorskip("opacus", reason="opacus is not installed")

N, DELTA = 80, 1e-5
TEST = TensorDataset(torch.randn(20, 4), torch.arange(20) % 2)


class Data(TensorDataset):
    """Random when it is read, as augmented images are."""

    def __init__(self):
        generator = torch.Generator().manual_seed(0)
        super().__init__(torch.randn(N, 4, generator=generator), torch.arange(N) % 2, torch.arange(N) // 2)

    def __getitem__(self, i):
        x, y, owner = super().__getitem__(i)
        return x + 1e-3 * torch.rand(4) + 1e-3 * random.random() + 1e-3 * np.random.rand(), y, owner  # noqa: NPY002


class Repeated(Sampler):
    """Each index three times in a row."""

    def __iter__(self):
        return iter(torch.randperm(N).repeat_interleave(3)[:N].tolist())

    def __len__(self):
        return N


def train(loader, *, epochs=3, accumulate=1, private=None, memory=None, use_original=False, most=None):
    """Returns the weights, and the engine."""
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine, original = None, loader
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of Opacus, on its random numbers and hooks
        if private is not None:
            engine = opacus.PrivacyEngine()
            model, optimizer, loader = engine.make_private(
                module=model, optimizer=optimizer, data_loader=loader, noise_multiplier=1.0, max_grad_norm=1.0,
                poisson_sampling=private,
            )  # fmt: skip
        if memory is not None:
            from opacus.utils.batch_memory_manager import wrap_data_loader

            loader = wrap_data_loader(data_loader=loader, max_batch_size=memory, optimizer=optimizer)
        for _ in range(epochs):
            for i, (x, y, *_) in enumerate(original if use_original else loader):
                F.cross_entropy(model(x), y).backward()
                if (i + 1) % accumulate == 0:
                    optimizer.step()
                    optimizer.zero_grad()
                if i + 1 == most:
                    break
            with torch.no_grad():
                for x, _ in DataLoader(TEST, 5):
                    model(x)
        if engine is not None:
            engine.get_epsilon(DELTA)
    return [p.detach().clone() for p in model.parameters()], engine


def seen_of(loader, unit=None, noise_multiplier=1.0, **options):
    torch.manual_seed(1)
    with watch(unit=unit) as seen:
        train(loader, **options)
    found = seen.findings(noise_multiplier=noise_multiplier, accountant="rdp")
    assert len(found) == 1  # the test data is not trained on
    return found[0]


def true_of(weight):
    return pytest.approx(gdp_epsilon(math.sqrt(weight), DELTA), rel=1e-9)


def test_a_shuffled_training():
    found = seen_of(DataLoader(Data(), 10, shuffle=True))
    assert found.finding.order == "shuffled again in each epoch"
    assert (found.seen.steps, found.seen.epochs, found.seen.most, found.seen.together) == (24, 3, 3, 1)
    assert found.finding.true == true_of(3)
    assert found.finding.sampling_probability == 1 / 8
    assert not found.seen.is_repeated
    assert "a unit in 3 steps at most" in str(found)


def test_accumulated_batches_are_seen_as_one_step():
    found = seen_of(DataLoader(Data(), 10, shuffle=True), accumulate=4)
    assert found.seen.steps == 6
    assert found.finding.sampling_probability == 1 / 2
    assert found.finding.true == true_of(3)


def test_a_class_that_is_not_known_is_judged_by_what_it_did():
    found = seen_of(DataLoader(Data(), 10, sampler=Repeated()), epochs=1)
    assert found.seen.together == 3
    assert found.seen.weight == 9
    assert found.finding.true == true_of(9)
    assert "nothing promises it for another one" in found.finding.because
    assert found.finding.verdict == "not proven"


def test_a_distributed_sampler_that_is_not_told_the_epoch():
    found = seen_of(DataLoader(Data(), 10, sampler=DistributedSampler(range(N), 1, 0)))
    assert found.seen.is_repeated
    assert found.seen.separation == 8
    assert "one shuffle, the same in each epoch" in found.finding.order


def test_two_epochs_in_one_order_are_told():
    assert seen_of(DataLoader(Data(), 10, sampler=DistributedSampler(range(N), 1, 0)), epochs=2).seen.is_repeated
    assert not seen_of(DataLoader(Data(), 10, shuffle=True), epochs=2).seen.is_repeated
    assert not seen_of(DataLoader(Data(), 10), epochs=1).seen.is_repeated


def test_what_was_seen_counts_where_a_sampler_says_less():
    said = Arrivals("one order", AtMost(2.0), "so it is")
    seen = Observed(
        steps=8, batches=8, epochs=2, most=3, together=1, separation=1, weight=3.0, is_repeated=False, is_named=True
    )
    found = _combined(said, seen)
    assert found.visits == AtMost(3.0)
    assert found.participation is None
    assert _combined(said, replace(seen, weight=2.0)).visits == AtMost(2.0)


def test_epochs_that_are_broken_off_count():
    found = seen_of(DataLoader(Data(), 10, shuffle=True), epochs=12, most=2)
    assert found.seen.steps == 24
    assert found.finding.true == true_of(12)


def test_a_new_loader_in_each_epoch_is_the_same_data():
    data = Data()
    torch.manual_seed(1)
    with watch() as seen:
        model = nn.Linear(4, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for part in (range(40), range(40, N), range(40)):
            for x, y, _ in DataLoader(Subset(data, part), 10, shuffle=True):
                F.cross_entropy(model(x), y).backward()
                optimizer.step()
    [found] = seen.findings(accountant="rdp")
    assert (found.seen.most, found.seen.steps) == (2, 12)
    assert found.finding.true >= gdp_epsilon(math.sqrt(2), DELTA)


def test_two_optimizers_see_every_batch_twice():
    torch.manual_seed(1)
    with watch() as seen:
        model = nn.Linear(4, 2)
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for _ in range(2)]
        for x, y, _ in DataLoader(Data(), 10):
            F.cross_entropy(model(x), y).backward()
            for optimizer in optimizers:
                optimizer.step()
    [found] = seen.findings(accountant="rdp", noise_multiplier=1.0)
    assert (found.seen.weight, found.seen.steps) == (2, 16)
    assert found.finding.true == true_of(2)


def test_units_that_batches_name():
    found = seen_of(DataLoader(Data(), 10), unit=2)
    assert found.seen.together == 2
    assert found.finding.true == true_of(3 * 4)


class Lines(IterableDataset):
    def __iter__(self):
        return iter([Data()[i] for i in range(N)])


def test_a_stream_is_known_by_its_units_alone():
    assert seen_of(DataLoader(Lines(), 10), epochs=1).finding.true == math.inf
    assert seen_of(DataLoader(Lines(), 10), epochs=1, unit=2).finding.true == true_of(4)


def test_workers_that_fetch_ahead_do_not_count_what_nobody_took():
    found = seen_of(DataLoader(Data(), 10, num_workers=2), epochs=1, most=2)
    assert (found.seen.steps, found.seen.batches, found.seen.weight) == (2, 2, 1)


# -- Opacus ----------------------------------------------------------------------------------------------------------


def test_opacus_with_its_own_sampling_holds():
    found = seen_of(DataLoader(Data(), 10, shuffle=True), private=True)
    assert "Poisson sampling with probability 0.125" in found.finding.order
    assert found.finding.holds
    assert found.finding.neighbours == "add-or-remove"
    assert found.printed == ((DELTA, found.finding.claimed),)


@pytest.mark.parametrize(("private", "holds"), [(True, True), (False, False)])
def test_opacus_in_parts_of_a_batch(private, holds):
    found = seen_of(DataLoader(Data(), 20, shuffle=True), private=private, memory=5)
    assert found.finding.holds == holds
    assert found.finding.steps == 12
    assert found.finding.sampling_probability == 1 / 4


def test_opacus_without_its_sampling_does_not():
    found = seen_of(DataLoader(Data(), 10, shuffle=True), private=False)
    assert found.finding.accountant == "the script's own accountant"
    assert found.finding.true == true_of(3)
    assert found.finding.verdict == "false"


def test_opacus_with_the_loader_that_it_replaced_does_not():
    found = seen_of(DataLoader(Data(), 10, shuffle=True), private=True, use_original=True)
    assert found.finding.order == "shuffled again in each epoch"
    assert not found.finding.holds


def test_one_line_for_what_make_private_gave():
    torch.manual_seed(1)
    _, engine = train(DataLoader(Data(), 10, shuffle=True), private=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = nn.Linear(4, 2)
        fresh = opacus.PrivacyEngine()
        model, optimizer, poisson = fresh.make_private(
            module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            data_loader=DataLoader(Data(), 10, shuffle=True), noise_multiplier=1.0, max_grad_norm=1.0,
        )  # fmt: skip
    after = ao.check(DataLoader(Data(), 10, shuffle=True), engine=engine, delta=DELTA)
    assert (after.steps, after.true) == (24, true_of(3))
    assert after.claimed == engine.get_epsilon(DELTA)
    assert not after.holds
    before = ao.check(poisson, engine=fresh, optimizer=optimizer, epochs=3, delta=DELTA)
    assert before.claimed == pytest.approx(after.claimed)  # of as many steps, before any was made
    assert before.holds
    assert fresh.accountant.history == []
    assert not ao.check(poisson, optimizer=optimizer, epochs=3, delta=DELTA, unit=2).holds


def test_an_empty_batch_that_opacus_fills_is_paid_for():
    """With rand_on_empty a batch of nobody has a gradient: two examples and a probability of a quarter."""
    from opacus.data_loader import DPDataLoader

    tiny = TensorDataset(torch.zeros(2, 1))
    found = ao.check(
        DPDataLoader(tiny, sample_rate=0.5, rand_on_empty=True), noise_multiplier=1.0, epochs=3, delta=DELTA
    )
    assert found.true == math.inf
    large = DPDataLoader(TensorDataset(torch.zeros(2000, 1)), sample_rate=0.05, rand_on_empty=True)
    assert ao.check(large, noise_multiplier=1.0, epochs=3, delta=DELTA).holds


def test_the_rdp_claim_is_what_opacus_prints():
    from opacus.accountants import RDPAccountant

    accountant = RDPAccountant()
    accountant.history = [(1.1, 1 / 8, 24)]
    found = ao.check(DataLoader(Data(), 10), noise_multiplier=1.1, epochs=3, delta=DELTA, accountant="rdp")
    assert found.claimed == pytest.approx(accountant.get_epsilon(DELTA), rel=5e-4)


# -- nothing is moved ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("private", "workers"), [(None, 0), (False, 0), (True, 2)])
def test_the_run_is_the_same_bit_for_bit(private, workers):
    def run(watched):
        torch.manual_seed(3)
        random.seed(3)
        np.random.seed(3)  # noqa: NPY002
        loader = DataLoader(Data(), 10, shuffle=True, num_workers=workers)
        if watched:
            with watch(unit=2) as seen:
                weights, engine = train(loader, epochs=2, private=private)
            assert seen.findings(accountant="rdp")
        else:
            weights, engine = train(loader, epochs=2, private=private)
        states = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()  # noqa: NPY002
        return [w.tolist() for w in weights], states, engine and engine.accountant.history

    assert run(False) == run(True)


def test_the_hooks_are_gone_afterwards():
    from torch.utils.data.dataloader import _BaseDataLoaderIter

    def methods():
        return (
            DataLoader.__iter__, _BaseDataLoaderIter.__next__, _BaseDataLoaderIter._next_index,
            opacus.PrivacyEngine.make_private, opacus.PrivacyEngine.get_epsilon,
        )  # fmt: skip

    before = methods()
    with pytest.raises(KeyError), watch():
        assert methods()[0] is not before[0]
        raise KeyError
    assert methods() == before


def test_a_step_after_the_block_is_not_seen():
    with watch() as seen:
        train(DataLoader(Data(), 10), epochs=1)
    before = seen.findings(accountant="rdp")[0].seen
    model = nn.Linear(4, 2)
    model(torch.zeros(1, 4)).sum().backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    assert seen.findings(accountant="rdp")[0].seen == before


def test_beside_a_private_optimizer_another_one_is_told_of_and_its_steps_are_not_counted():
    model, weight = nn.Linear(4, 2), nn.Parameter(torch.zeros(1))
    optimizer, other = torch.optim.SGD(model.parameters(), lr=0.1), torch.optim.SGD([weight], lr=0.1)
    weight.grad = torch.ones(1)
    with watch() as seen, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of Opacus, on its random numbers and hooks
        engine = opacus.PrivacyEngine(accountant="rdp")
        model, optimizer, loader = engine.make_private(
            module=model, optimizer=optimizer, data_loader=DataLoader(Data(), 10), noise_multiplier=1.0,
            max_grad_norm=1.0, poisson_sampling=False,
        )  # fmt: skip
        for x, y, _ in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            other.step()
        assert engine.accountant.history == [(1.0, 1 / 8, 8)]
        [found] = seen.findings(delta=DELTA)
    assert (found.seen.steps, found.finding.noise_multiplier) == (8, 1.0)
    assert found.finding.true == math.inf
    assert "an optimizer that adds no noise stepped too" in found.finding.because


def test_numbers_are_checked():
    with watch() as seen:
        train(DataLoader(Data(), 10), epochs=1)
    with pytest.raises(ArgumentError, match="noise_multiplier"):
        seen.findings(noise_multiplier=-1.0)
    with pytest.raises(ArgumentError, match="delta"):
        seen.findings(delta=1.0)


# -- the command -----------------------------------------------------------------------------------------------------

SCRIPT = """
    import argparse, random, torch, warnings
    import opacus
    from torch.utils.data import DataLoader, TensorDataset

    parser = argparse.ArgumentParser()
    parser.add_argument("--poisson", action="store_true")
    parser.add_argument("--fail", action="store_true")
    parser.add_argument("--delta", type=float)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(80, 4), torch.arange(80) % 2)
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = opacus.PrivacyEngine()
    model, optimizer, loader = engine.make_private(
        module=model, optimizer=optimizer, data_loader=DataLoader(data, 10, shuffle=True), noise_multiplier=1.0,
        max_grad_norm=1.0, poisson_sampling=options.poisson,
    )
    for epoch in range(3):
        for x, y in loader:
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
        if options.fail:
            raise SystemExit(3)
    print(engine.get_epsilon(options.delta), sum(p.sum().item() for p in model.parameters()), __name__)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("scripts")
    (path / "training.py").write_text(textwrap.dedent(SCRIPT))
    (path / "mine.py").write_text(
        "from torch.utils.data import DataLoader\n"
        "def loader(): return DataLoader(range(80), 10, shuffle=True)\n"
        "def nothing(): pass\n"
    )
    return path


def command(folder, *arguments):
    return checked.run("-W", "ignore", *arguments, cwd=folder)


@pytest.mark.slow
def test_a_script_is_run_as_it_is_and_judged(folder):
    alone = command(folder, "training.py", "--delta", "1e-4")
    done = command(folder, "-m", "anyorder", "check", "--json", "training.py", "--delta", "1e-4")
    assert done.returncode == 1, done.stderr
    assert alone.stdout in done.stderr  # stdout is for the JSON; the very numbers
    outcome = json.loads(done.stdout)
    [found] = outcome["findings"]
    assert outcome["exit_code"] == 0
    assert found["printed"] == [[1e-4, float(alone.stdout.split()[0])]]
    assert found["claimed"] == found["printed"][0][1] < 4 < found["at_least"]
    assert "a seed that the script sets" in found["because"]
    assert (found["order"], found["verdict"], found["delta"]) == ("shuffled again in each epoch", "false", 1e-4)
    assert found["seen"]["most"] == 3


def test_a_script_that_fails_is_told_of_and_judged_as_far_as_it_came(folder):
    done = command(folder, "-m", "anyorder", "check", "training.py", "--fail")
    assert done.returncode == 1
    assert "exit code 3" in done.stderr.splitlines()[-1]
    assert "8 steps in 1 epoch" in done.stdout


def test_a_function_that_returns_a_loader(folder):
    done = command(
        folder, "-m", "anyorder", "check", "--epochs", "3", "--noise-multiplier", "1", "--delta", "1e-5", "--json",
        "mine:loader",
    )  # fmt: skip
    assert done.returncode == 4, done.stderr
    [found] = json.loads(done.stdout)["findings"]
    assert (found["holds"], found["would_hold"], found["verdict"]) == (False, False, "what if")
    assert found["true"] == true_of(3)
    assert found["steps"] == 24


@pytest.mark.parametrize(("held", "code"), [([True, True], 0), ([True, False], 1), ([False, False], 1)])
def test_one_claim_of_several_that_does_not_hold_is_enough(held, code, folder, monkeypatch):
    from typer.testing import CliRunner

    from anyorder.app.cli import app

    def ran(line, **options):
        findings = [
            {
                "outcome": "claim",
                "holds": one,
                "verdict": "holds" if one else "false",
                "facts": [],
                "true": 1.0,
                "delta": 1e-5,
            }
            for one in held
        ]
        with open(line[3], "w") as file:
            json.dump({"findings": findings, "problem": None}, file)
        return subprocess.CompletedProcess(line, 0)

    monkeypatch.chdir(folder)
    monkeypatch.setattr(subprocess, "run", ran)
    done = CliRunner().invoke(app, ["check", "--json", "training.py"])
    assert done.exit_code == code, done.output
    assert [one["holds"] for one in json.loads(done.stdout)["findings"]] == held


def test_what_cannot_be_checked_is_one_line(folder):
    for target, words in (("mine:other", "no function"), ("no.py", "is there")):
        done = command(folder, "-m", "anyorder", "check", target)
        assert done.returncode == 2
        assert done.stdout == ""
        [line] = done.stderr.splitlines()
        assert words in line


@pytest.mark.parametrize("shuffle", [False, True])
def test_what_is_only_looked_at_says_nothing_of_the_order(shuffle):
    """A validation half of a random_split has the base of the training half, and an order of its own."""
    train, held_out = torch.utils.data.random_split(
        TensorDataset(torch.randn(60, 3)), [40, 20], torch.Generator().manual_seed(0)
    )
    loader, others = DataLoader(train, batch_size=10, shuffle=shuffle), DataLoader(held_out, batch_size=10)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with ao.audit.watch() as seen:
        for _ in range(3):
            for (x,) in loader:
                model(x).sum().backward()
                optimizer.step()
            with torch.no_grad():
                for part in (others, loader):
                    for (x,) in part:
                        model(x)
    [found] = seen.findings(delta=1e-5, noise_multiplier=1.0)
    assert found.finding.true == pytest.approx(gdp_epsilon(math.sqrt(3), 1e-5), rel=1e-9)
    assert found.finding.verdict == "false"
    assert found.seen.is_repeated is not shuffle
