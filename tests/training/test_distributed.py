"""Several processes train one model as one process would; what one of them refuses, all refuse."""

import importlib.util
import shutil
from pathlib import Path

import pytest
import torch
from torch import nn

import processes
from anyorder.errors import CheckpointError
from anyorder.training.distributed import Group, Shards

SCRIPT = Path(__file__).with_name("ranks.py")
spec = importlib.util.spec_from_file_location("ranks", SCRIPT)
ranks = importlib.util.module_from_spec(spec)
spec.loader.exec_module(ranks)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def first(folder):
    """The first launch: its last scenario kills a rank."""
    for _ in range(2):
        for name in ("killed", *ranks.SAVED):
            shutil.rmtree(folder / name, ignore_errors=True)
            (folder / name).mkdir()
        done = processes.run_on_two_ranks("-W", "ignore", SCRIPT, "first", folder)
        # Seen once in some ten launches, unexplained: a segmentation fault of a rank. A second one fails the tests.
        if "Segmentation fault" not in done.stderr:
            break
    assert done.returncode != 0
    return done.stderr


@pytest.fixture(scope="module")
def second(folder, first):
    """One process goes on where two ranks were, then two ranks again."""
    refuse_lost_steps(folder)
    for name, (kind, _) in ranks.SAVED.items():
        run = ranks.start(folder / name / "run.ckpt", kind=kind)
        assert (run[0].step, run[0].extra) == (4, {"by": "rank"})
        ranks.train(*run, until=8, loss=0.0, save_every=4)
        run[0].close()
    done = processes.run_on_two_ranks("-W", "ignore", SCRIPT, "second", folder)
    assert done.returncode == 0, done.stderr
    return [torch.load(folder / f"resumed.{rank}") for rank in (0, 1)]


def refuse_lost_steps(folder):
    copy = folder / "copy"
    shutil.copytree(folder / "killed", copy)
    with pytest.raises(CheckpointError, match="2 step.* were released by 2 rank.* this run has 1"):
        ranks.start(copy / "run.ckpt", scalar=True)


def results(folder, name, first):
    paths = [folder / f"{name}.{rank}" for rank in (0, 1)]
    assert all(path.exists() for path in paths), first
    return [torch.load(path) for path in paths]


@pytest.fixture(scope="module")
def alone():
    """The runs of one process, by whether the model has a scalar, the kind of strategy, and the factor of the loss."""
    runs = {}

    def run(scalar, kind, loss):
        if (scalar, kind, loss) not in runs:
            parts = ranks.start(scalar=scalar, kind=kind)
            runs[scalar, kind, loss] = ranks.outcome(parts, ranks.train(*parts, loss=loss))
        return runs[scalar, kind, loss]

    return run


@pytest.mark.slow
def test_two_ranks_give_the_gradients_of_one_process(folder, first, alone):
    both = results(folder, "whole_runs", first)
    for name in ("plain", "sharded", "accumulated", "adaptive"):
        expected = alone(name == "plain", "adaptive" if name == "adaptive" else "tree", 1.0)
        assert torch.equal(both[0][name]["weights"], both[1][name]["weights"])
        for mine in both:
            steps = len(mine[name]["gradients"])
            torch.testing.assert_close(mine[name]["gradients"], expected["gradients"][:steps], rtol=1e-5, atol=1e-6)
    for mine in both:
        expected = alone(True, "tree", 1.0)
        assert mine["plain"]["ledger"] == expected["ledger"]
        torch.testing.assert_close(mine["plain"]["weights"], expected["weights"], rtol=1e-4, atol=1e-5)


def test_clip_norm_is_one_number_on_all_ranks(folder, first):
    """That of one process, after an epoch with gradients: no rank counts units that another counts too."""
    run = ranks.start(kind="adaptive")
    ranks.train(*run, until=8)
    moved = {mine["adaptive"]["clip_norm"] for mine in results(folder, "whole_runs", first)}
    assert len(moved) == 1
    assert moved.pop() == pytest.approx(run[0].clip_norm, rel=1e-6) != 0.3


@pytest.mark.parametrize(("kind", "fsdp"), ranks.NOISE)
def test_noise_of_the_shards_is_that_of_one_process_bit_for_bit(folder, first, alone, kind, fsdp):
    both = results(folder, "whole_runs", first)
    expected = alone(False, kind, 0.0)
    assert expected["gradients"].std() > 0.05
    for mine in both:
        assert torch.equal(mine[f"noise {kind} {fsdp}"]["gradients"], expected["gradients"])
        assert mine[f"noise {kind} {fsdp}"]["clip_norm"] == expected["clip_norm"]
    owned = [range(*piece) for mine in both for piece in mine[f"ranges {fsdp}"]]
    assert sorted(i for piece in owned for i in piece) == list(range(expected["gradients"].shape[1]))
    sizes = [sum(stop - start for start, stop in mine[f"ranges {fsdp}"]) for mine in both]
    assert max(sizes) < 0.7 * sum(sizes)


@pytest.mark.parametrize("name", [s.__name__ for s in ranks.SCENARIOS if s not in (ranks.whole_runs, ranks.poisson)])
def test_scenario_holds_on_all_ranks(folder, first, name):
    results(folder, name, first)


def test_poisson_batches_are_dealt_out_to_the_ranks(folder, first):
    run = ranks.poisson_run()
    ranks.train(*run, until=4)
    for mine in results(folder, "poisson", first):
        assert mine["ledger"] == run[0].ledger.digest()
        torch.testing.assert_close(mine["weights"], ranks.weights(run[1]), rtol=1e-5, atol=1e-6)


def test_killed_rank_ends_the_run_and_a_resume_gives_the_same_model(folder, first, second):
    uninterrupted = results(folder, "whole_runs", first)
    for mine, whole in zip(second, uninterrupted, strict=True):
        step, end = mine["killed"]
        assert step == 4
        assert torch.equal(end["weights"], whole["plain"]["weights"])
        assert end["ledger"] == whole["plain"]["ledger"]


@pytest.mark.parametrize("name", ranks.SAVED)
def test_noise_goes_on_across_numbers_of_ranks(second, alone, name):
    """Two ranks, then one, then two, plain and sharded: steps 8 on have the noise of the uninterrupted run."""
    expected = alone(False, ranks.SAVED[name][0], 0.0)
    for mine in second:
        step, end = mine[name]
        assert step == 8
        assert torch.equal(end["gradients"], expected["gradients"][8:])
        assert end["ledger"] == expected["ledger"]
        assert end["clip_norm"] == expected["clip_norm"]
        torch.testing.assert_close(end["weights"], expected["weights"], rtol=1e-6, atol=1e-7)


def test_example_runs_sharded_on_two_ranks():
    example = Path(__file__).parents[2] / "examples" / "distributed.py"
    done = processes.run_on_two_ranks("-W", "ignore", example, "--shard")
    assert done.returncode == 0, done.stderr
    assert "2 process(es), 24 steps" in done.stdout


@pytest.mark.parametrize("count", [1, 2, 3, 5, 8])
def test_every_coordinate_has_one_owner(count):
    """Also where there are more ranks than coordinates; joined ranges name the coordinates in the vector's order."""
    parameters = {"a": nn.Parameter(torch.zeros(2, 2)), "b": nn.Parameter(torch.tensor(0.0))}
    values = {"a": torch.arange(4.0).view(2, 2), "b": torch.tensor(4.0)}
    owned, vectors = [], []
    for rank in range(count):
        group = Group()
        group.rank, group.size = rank, count
        group.sum_of_parts = lambda parts, rank=rank: parts[rank]
        shards = Shards(parameters, group)
        owned += [i for piece in shards.ranges for i in range(*piece)]
        vectors += shards.sum_of_own(values)
    assert owned == list(range(5))
    assert torch.equal(torch.cat(vectors), torch.arange(5.0))
