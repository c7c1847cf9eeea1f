"""Papers run again: each command ends with a verdict, and no epsilon is claimed for what is not private."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from benchmarks.federations import joint_task
from reproductions import joint_algorithm1, user_mean

from anyorder.federated import Layout

ROOT = Path(__file__).parents[1]
NAMES = sorted(path.stem for path in (ROOT / "reproductions").glob("[!_]*.py"))


def test_there_are_some():
    assert {"joint_algorithm1", "user_mean"} <= set(NAMES)


@pytest.mark.parametrize("name", ["joint_algorithm1", "user_mean"])
def test_every_verdict_holds(name, capsys):
    run = {"joint_algorithm1": joint_algorithm1.run, "user_mean": user_mean.run}[name]
    findings = list(run(quick=True))
    assert [finding.holds for finding in findings].count(True) >= 2
    assert not [finding.name for finding in findings if finding.holds is False]


def test_the_command_prints_a_verdict_or_json():
    command = [sys.executable, "-m", "reproductions.joint_algorithm1", "--quick"]
    text = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=120).stdout
    assert text.splitlines()[-1] == "verdict: as expected"
    lines = subprocess.run(
        [*command, "--json"], cwd=ROOT, capture_output=True, text=True, check=True, timeout=120
    ).stdout
    assert all({"name", "value", "holds"} <= json.loads(line).keys() for line in lines.splitlines())


def test_the_printed_noise_is_the_papers():
    """Literal sigma for (1, 1e-4), n = 4, m = 50: sqrt(T log(1/delta)) / (m n) with T = (m n)^2."""
    assert joint_algorithm1.World(4, 50).sigma == pytest.approx(np.sqrt(np.log(1e4)))
    assert joint_algorithm1.World(4, 50).steps == 40_000


def test_the_attack_sees_nothing_without_the_record():
    signs = np.zeros(200)
    found = joint_algorithm1.scores(joint_algorithm1.World(2, 10), signs, private_state=True, seed=3)
    noise = 3.035 * np.sqrt(400)  # of all steps together
    assert abs(found.mean()) < 4 * noise / np.sqrt(200)
    assert found.std() == pytest.approx(noise, rel=0.2)


def test_the_range_is_drawn_where_most_values_are():
    rng = np.random.default_rng(0)
    x = 0.7 + 0.05 * rng.standard_normal(2000)
    low, high = user_mean.private_range(x, 1.0, 0.1, 4.0, rng)
    assert low < 0.7 < high
    assert high - low == pytest.approx(0.4)


def test_one_value_moves_the_range_by_no_more_than_its_probabilities_say():
    """The exponential mechanism's ratio for replaced neighbours, from exact probabilities."""

    class Probabilities:
        def choice(self, count, p):
            self.p = p
            return 0

    def drawn(x):
        told = Probabilities()
        user_mean.private_range(np.array(x), 0.8, 0.25, 2.0, told)
        return told.p

    one, other = drawn([-1.9, -1.9, 0.1, 0.1, 0.1]), drawn([-1.9, -1.9, 0.1, 0.1, 1.9])
    assert abs(np.log(one / other)).max() <= 0.8 + 1e-12


def test_the_mean_in_high_dimension_is_unbiased_up_to_its_noise():
    rng = np.random.default_rng(1)
    rows = np.array([1.0, -2.0, 0.0, 0.5]) + 0.05 * rng.standard_normal((4000, 4))
    found = np.mean([user_mean.mean(rows, 4.0, 1e-4, 0.1, 4.0, rng) for _ in range(20)], axis=0)
    np.testing.assert_allclose(found, rows.mean(0), atol=0.05)


def test_the_condition_is_monotone_and_the_networks_is_out_of_reach():
    assert user_mean.users_needed(30_496, 1.0, 1e-4, 0.1, 2.0) > 250_000
    assert user_mean.beta(10, 4, 1, 1e-4, 0.1, 2.0) == 1.0
    n = user_mean.users_needed(4, 1.0, 1e-4, 0.1, 2.0)
    assert user_mean.beta(n, 4, 1, 1e-4, 0.1, 2.0) <= 0.03 < user_mean.beta(n - 1, 4, 1, 1e-4, 0.1, 2.0)


@pytest.mark.parametrize("n", [4, 16, 64])
def test_owners_of_the_joint_task_have_at_most_eight_classes_and_every_record_is_dealt_once(n):
    generator = torch.Generator().manual_seed(0)
    y, test_y = torch.randint(10, (1000,), generator=generator), torch.randint(10, (700,), generator=generator)
    parts, tests = joint_task.owners(joint_task.Pool(torch.arange(1000), y, torch.arange(700), test_y), n, seed=1)
    assert sorted(i for x, _ in parts.values() for i in x.tolist()) == list(range(1000))
    assert sorted(i for x, _ in tests.values() for i in x.tolist()) == list(range(700))
    for owner, (x, labels) in parts.items():
        assert torch.equal(y[x], labels)
        assert 2 <= len(set(labels.tolist())) <= 8  # those of eight shards by lot
        assert set(tests[owner][1].tolist()) <= set(labels.tolist())
        assert abs(len(x) - 1000 / n) <= 8 + 20 / n


def test_records_of_a_user_lie_side_by_side_and_are_of_one_owner():
    y = torch.arange(100) % 10
    data = joint_task.Pool(torch.arange(100), y, torch.arange(0), y[:0])
    parts = {"a": (torch.arange(7), y[:7]), "b": (torch.arange(7, 20), y[7:20])}
    assert joint_task.users(data, parts, 5).x.tolist() == [0, 1, 2, 3, 4, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16]


def test_the_head_that_is_fitted_fits():
    """On centred features, with the middle put back into the bias: the loss of the owner's images falls."""
    model = joint_task.network(0)
    x, y = torch.randn(40, 1, 28, 28, generator=torch.Generator().manual_seed(2)), torch.arange(40) % 8
    layout = Layout.of({name: model.get_parameter(name) for name in ("fc1.weight", "fc1.bias")})
    moved = layout.named(joint_task.Head()(model, layout, (x, y), 0))
    before = torch.nn.functional.cross_entropy(model(x), y).item()
    with torch.no_grad():
        model.fc1.weight += moved["fc1.weight"]
        model.fc1.bias += moved["fc1.bias"]
        assert torch.nn.functional.cross_entropy(model(x), y).item() < before / 2
