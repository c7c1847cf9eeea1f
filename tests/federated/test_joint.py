"""Owners who share some parameters: what is personal stays at home, and what is released is the plan's."""

import math

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import anyorder as ao
from anyorder.errors import ArgumentError
from anyorder.federated import joint
from plans import flat_plan

KEY = bytes(range(32))
PERSONAL = ["mine.*"]


class Two(nn.Module):
    """A shared and a personal head, and a counter."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.base = nn.Linear(3, 4)
        self.ours = nn.Linear(4, 2)
        self.mine = nn.Linear(4, 2)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        h = torch.tanh(self.base(x))
        return self.ours(h) + self.mine(h)


def some_owners(count=4, each=6):
    generator = torch.Generator().manual_seed(1)
    return {f"owner {j}": (torch.randn(each, 3, generator=generator), torch.arange(each) % 2) for j in range(count)}


LOCAL = ao.federated.LocalTraining(nn.functional.cross_entropy, lr=0.2, batch_size=2)


def owner_plan(**changes):
    settings = {"participation": ao.participation.MinSeparation(n=3, b=1, k=3), "batch_size": 4, "unit": "owner",
                "epsilon": 8, "delta": 1e-5, "mechanism": "tree", "clip_norm": 0.5} | changes  # fmt: skip
    return flat_plan(**settings)


def server_of(model, plan=None, **options):
    shared = [model.get_parameter(name) for name in joint.split(model, PERSONAL).shared]
    return ao.federated.Server(plan or owner_plan(), model, torch.optim.SGD(shared, lr=1.0), key=KEY, **options)


def released(server):
    found = []
    server.release.on_release(lambda step, private: found.append(private.clone()))
    return found


def trainer(released=None, model_at=None):
    """By the engine, on all records."""
    x, y = (torch.cat(parts) for parts in zip(*some_owners().values(), strict=True))

    def train(model, parameters):
        plan = ao.plan(dataset_size=24, batch_size=6, epochs=1, epsilon=8, delta=1e-5, mechanism="tree", clip_norm=0.5)
        engine = ao.PrivacyEngine(plan, key=KEY)
        loader = DataLoader(TensorDataset(x, y), batch_size=6)
        private, optimizer, loader = engine.make_private(model, torch.optim.SGD(parameters, lr=0.5), loader)
        if released is not None:
            engine.on_release(lambda step, mean: released.append(mean.clone()))
        for a, b in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(private(a), b).backward()
            optimizer.step()
        return engine.certificate()

    return train


# -- names -----------------------------------------------------------------------------------------------------------


def test_names_are_split_by_patterns_in_the_models_order():
    found = ao.federated.split(Two(), ["mine.*", "*.bias"])
    assert found.personal == ("base.bias", "ours.bias", "mine.weight", "mine.bias")
    assert found.shared == ("base.weight", "ours.weight")
    assert ao.federated.split(Two(), []).personal == ()


def test_what_is_frozen_is_shared_with_nobody():
    model = Two()
    model.base.requires_grad_(False)
    model.mine.requires_grad_(False)  # as a server leaves it
    assert ao.federated.split(model, PERSONAL) == (("ours.weight", "ours.bias"), ("mine.weight", "mine.bias"))


@pytest.mark.parametrize("pattern", ["min.*", "Mine.*", "mine", "seen"])
def test_a_pattern_that_fits_nothing_is_an_error(pattern):
    with pytest.raises(ArgumentError, match="fits none of base.weight"):
        ao.federated.split(Two(), ["mine.*", pattern])
    with pytest.raises(ArgumentError, match="list of patterns"):
        ao.federated.split(Two(), "mine.*")


def test_a_tensor_is_not_personal_by_one_of_its_names_alone():
    model = Two()
    model.mine.weight = model.ours.weight
    with pytest.raises(ArgumentError, match=r"ours\.weight and mine\.weight are one tensor"):
        ao.federated.split(model, PERSONAL)
    assert ao.federated.split(model, ["mine.*", "ours.weight"]).personal == ("ours.weight", "mine.bias")


# -- owner level -----------------------------------------------------------------------------------------------------


def test_owners_send_clipped_messages_and_keep_the_rest():
    model = Two()
    before = joint._values(model, ("mine.weight", "mine.bias"))
    server = server_of(model)
    found = ao.federated.owner_level(server, some_owners(), LOCAL.change, LOCAL.change, personal=PERSONAL)
    assert server.step == 3
    assert found.certificate.plan.unit == "owner"
    assert all(torch.equal(found.model.get_parameter(name), value) for name, value in before.items())
    assert len({tuple(own["mine.bias"].tolist()) for own in found.personal.values()}) == 4
    own = found.model_of("owner 2")
    assert torch.equal(own.mine.weight, found.personal["owner 2"]["mine.weight"])
    assert torch.equal(own.base.weight, server.model.base.weight)
    with pytest.raises(ArgumentError, match="one of the 4"):
        found.model_of("owner 9")


def test_the_messages_are_those_of_alternating_training():
    """Half the sum, or a personal part that is not fitted first, would be another release."""
    model, owners = Two(), some_owners(1)
    server = server_of(model)
    seen = released(server)
    found = ao.federated.owner_level(server, owners, LOCAL.change, LOCAL.change, personal=PERSONAL, seed=5)
    again = server_of(Two())
    expected = released(again)
    own = {name: again.model.get_parameter(name).detach().clone() for name in ("mine.weight", "mine.bias")}
    layout = ao.federated.Layout.of(own)
    for t in range(3):
        first, second = joint._seeds(5, t, 0)
        at_home = joint._copy(again.model, own)
        moved = layout.named(LOCAL.change(at_home, layout, owners["owner 0"], first))
        own = {name: value + moved[name] for name, value in own.items()}
        at_home = joint._copy(again.model, own)
        change = LOCAL.change(at_home, again.layout, owners["owner 0"], second)
        again.round({"owner 0": again.layout.named(change)})
    assert all(torch.equal(a, b) for a, b in zip(seen, expected, strict=True))
    last = joint._copy(again.model, own)  # once more, from where the owner is
    moved = layout.named(LOCAL.change(last, layout, owners["owner 0"], joint._seeds(5, 2**32 - 1, 0)[0]))
    for name, value in own.items():
        assert torch.equal(found.personal["owner 0"][name], value + moved[name])


def test_every_training_has_a_seed_of_its_own():
    """Owners, rounds, and the two trainings of a round."""
    seeds = []

    def nothing(model, layout, examples, seed):
        seeds.append(seed)
        return torch.zeros(layout.size)

    ao.federated.owner_level(server_of(Two()), some_owners(), nothing, nothing, personal=PERSONAL)
    assert len(set(seeds)) == len(seeds) == 4 * 3 * 2 + 4


def test_what_is_shared_afterwards_has_the_personal_part_from_before():
    """Even where the server's own has been written to."""
    server, before = server_of(Two()), Two()

    def fit(model, layout, examples, seed):
        with torch.no_grad():
            server.model.mine.weight.fill_(7.0)
        return torch.ones(layout.size)

    found = ao.federated.owner_level(server, some_owners(), LOCAL.change, fit, personal=PERSONAL)
    assert torch.equal(found.model.mine.weight, before.mine.weight)


@pytest.mark.parametrize("poison", [math.nan, 12345.678])
def test_what_is_personal_changes_no_bit_of_the_release(poison):
    """Neither on the owners' side nor on the server's."""

    def run(value):
        server = server_of(Two())
        seen = released(server)

        def fit(model, layout, examples, seed):
            with torch.no_grad():
                for p in server.model.mine.parameters():
                    p.fill_(value)
            return torch.full((layout.size,), value)

        def change(model, layout, examples, seed):
            assert list(layout.shapes) == ["base.weight", "base.bias", "ours.weight", "ours.bias"]
            return torch.linspace(-1, 1, layout.size) * examples[0].sum()  # of the shared part alone

        ao.federated.owner_level(server, some_owners(), change, fit, personal=PERSONAL)
        return torch.stack(seen)

    assert run(0.0).isfinite().all()
    assert torch.equal(run(poison), run(0.0))


def test_the_servers_checkpoint_has_nothing_personal(tmp_path):
    server = server_of(Two(), checkpoint=tmp_path / "server.ckpt")
    found = ao.federated.owner_level(server, some_owners(), LOCAL.change, LOCAL.change, personal=PERSONAL)
    kept = b"".join(path.read_bytes() for path in tmp_path.iterdir())
    assert server.model.base.weight.detach().numpy().tobytes() in kept
    for own in found.personal.values():
        assert not [name for name, value in own.items() if value.numpy().tobytes() in kept]


def test_buffers_of_one_owner_do_not_reach_the_next():
    server = server_of(Two())
    counts = []

    def fit(model, layout, examples, seed):
        counts.append(int(model.seen))
        model.seen += 1
        return torch.zeros(layout.size)

    found = ao.federated.owner_level(server, some_owners(), LOCAL.change, fit, personal=PERSONAL)
    assert set(counts) == {0}
    assert int(found.model.seen) == int(server.model.seen) == 0


def test_a_broken_message_is_a_zero_and_no_round_is_lost():
    server = server_of(Two())

    def change(model, layout, examples, seed):
        return torch.full((layout.size,), math.nan)

    ao.federated.owner_level(server, some_owners(), change, LOCAL.change, personal=PERSONAL)
    silent = server_of(Two())
    for _ in range(3):
        silent.round({})
    assert torch.equal(server.model.base.weight, silent.model.base.weight)


def test_owners_take_part_as_the_plan_allows():
    plan = owner_plan(participation=ao.participation.MinSeparation(n=4, b=2, k=2))
    server = server_of(Two(), plan)
    calls = []

    def change(model, layout, examples, seed):
        calls.append(server.step)
        return torch.zeros(layout.size)

    ao.federated.owner_level(server, some_owners(), change, LOCAL.change, personal=PERSONAL)
    assert calls == [0] * 4 + [2] * 4


def test_a_server_for_others_is_refused():
    with pytest.raises(ArgumentError, match="unit 'owner'"):
        ao.federated.owner_level(
            server_of(Two(), owner_plan(unit="user")), some_owners(), LOCAL.change, LOCAL.change, personal=PERSONAL
        )
    with pytest.raises(ArgumentError, match="2 shared parameters and no others"):
        ao.federated.owner_level(
            server_of(Two()), some_owners(), LOCAL.change, LOCAL.change, personal=["mine.*", "base.*"]
        )


# -- two phases ------------------------------------------------------------------------------------------------------


def test_the_second_phase_moves_nothing_that_is_shared():
    model = Two()
    found = ao.federated.two_phase(model, some_owners(), trainer(), LOCAL.change, personal=PERSONAL)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), Two().parameters(), strict=True))
    assert torch.equal(found.model.mine.weight, model.mine.weight)
    assert not torch.equal(found.model.base.weight, model.base.weight)
    own = found.model_of("owner 1")
    assert torch.equal(own.base.weight, found.model.base.weight)
    assert not torch.equal(own.mine.weight, found.model.mine.weight)
    assert found.certificate.plan.epsilon <= 8


def test_the_first_phase_reads_and_noises_the_shared_part_alone():
    """What the optimizer does not hold is in no gradient, no noise and no size of the release."""
    seen = []
    ao.federated.two_phase(Two(), some_owners(), trainer(seen), LOCAL.change, personal=PERSONAL)
    model = Two()
    shared = joint.split(model, PERSONAL).shared
    assert {len(mean) for mean in seen} == {sum(model.get_parameter(name).numel() for name in shared)}


@pytest.mark.parametrize("poison", [math.nan, 1e30])
def test_the_second_phase_changes_no_bit_of_the_release(poison):
    def fit(model, layout, examples, seed):
        return torch.full((layout.size,), poison)

    clean, poisoned = [], []
    first = ao.federated.two_phase(Two(), some_owners(), trainer(clean), LOCAL.change, personal=PERSONAL)
    second = ao.federated.two_phase(Two(), some_owners(), trainer(poisoned), fit, personal=PERSONAL)
    assert torch.equal(torch.stack(clean), torch.stack(poisoned))
    for name, p in first.model.named_parameters():
        assert torch.equal(p, second.model.get_parameter(name))


def test_training_of_what_is_personal_in_the_first_phase_is_refused():
    def train(model, parameters):
        certificate = trainer()(model, parameters)
        with torch.no_grad():
            model.mine.bias += 1e-3
        return certificate

    with pytest.raises(ArgumentError, match=r"changed mine\.weight|changed mine\.bias"):
        ao.federated.two_phase(Two(), some_owners(), train, LOCAL.change, personal=PERSONAL)
    with pytest.raises(ArgumentError, match="certificate"):
        ao.federated.two_phase(Two(), some_owners(), lambda model, parameters: None, LOCAL.change, personal=PERSONAL)
    with pytest.raises(ArgumentError, match="must be shared"):
        ao.federated.two_phase(Two(), some_owners(), trainer(), LOCAL.change, personal=["*"])


def test_the_first_phase_may_be_a_server_of_users():
    def train(model, parameters):
        plan = owner_plan(unit="user")
        server = ao.federated.Server(plan, model, torch.optim.SGD(parameters, lr=1.0), key=KEY)
        for _ in range(plan.n):
            server.round({j: server.layout.named(torch.ones(server.layout.size)) for j in range(4)})
        return server.certificate()

    found = ao.federated.two_phase(Two(), some_owners(), train, LOCAL.change, personal=PERSONAL)
    assert found.certificate.plan.unit == "user"


# -- to compare with -------------------------------------------------------------------------------------------------


def test_silo_shares_nothing_and_full_dp_everything():
    alone = joint.silo(Two(), some_owners(), LOCAL.change)
    assert alone.certificate is None
    assert set(alone.personal["owner 0"]) == {name for name, _ in Two().named_parameters()}
    assert all(torch.equal(a, b) for a, b in zip(alone.model.parameters(), Two().parameters(), strict=True))
    whole = joint.full_dp(Two(), some_owners(), trainer())
    assert whole.personal["owner 0"] == {}
    assert torch.equal(whole.model_of("owner 0").mine.bias, whole.model.mine.bias)
    assert not torch.equal(whole.model.mine.bias, Two().mine.bias)


def test_fed_avg_weighs_by_examples_and_claims_nothing():
    owners = {"one": (torch.ones(1, 3), torch.tensor([0])), "three": (torch.ones(3, 3), torch.tensor([0, 1, 1]))}

    def change(model, layout, examples, seed):
        return torch.full((layout.size,), float(len(examples[1])))

    found = joint.fed_avg(Two(), owners, change, rounds=2)
    assert found.certificate is None
    moved = found.model.base.weight - Two().base.weight
    torch.testing.assert_close(moved, torch.full_like(moved, 2 * (1 / 4 * 1 + 3 / 4 * 3)))


def test_what_owners_have_is_not_printed():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    made = joint.Joint(model, {"hospital": {"1.weight": torch.full((2, 2), 0.123)}})
    assert "0.123" not in repr(made)
    assert "hospital" not in repr(made)
