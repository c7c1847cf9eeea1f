"""Lightning's fit with the callback is the engine in a plain loop, and refuses what it cannot cover."""

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import anyorder as ao
from anyorder.errors import ArgumentError, CheckpointError, PlanError, TrainingError
from anyorder.participation import BallsInBins, MinSeparation

lightning = pytest.importorskip("lightning", reason="lightning is not installed")

from anyorder.training.trainers.lightning import PrivacyCallback  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")  # Lightning's advice on workers, loggers and pytrees

KEY = bytes(32)
EPOCHS, STEPS = 3, 6


class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(8, 4), nn.Tanh(), nn.Linear(4, 3))

    def training_step(self, batch, index):
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.5)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)]


def loader():
    generator = torch.Generator().manual_seed(1)
    data = TensorDataset(torch.randn(60, 8, generator=generator), torch.arange(60) % 3)
    return DataLoader(data, batch_size=10, shuffle=True)


def planned(mechanism="tree"):
    return ao.plan(dataset_size=60, batch_size=10, epochs=EPOCHS, epsilon=8, delta=1e-3, mechanism=mechanism)


def trainer(callback, folder, **options):
    return lightning.Trainer(**{
        "max_epochs": EPOCHS, "callbacks": [callback], "logger": False, "enable_progress_bar": False,
        "enable_model_summary": False, "accelerator": "cpu", "default_root_dir": folder,
        "enable_checkpointing": False, **options,
    })  # fmt: skip


def weights(module):
    return torch.cat([p.detach().reshape(-1) for p in module.parameters()])


def plain_loop():
    module = Module()
    [optimizer], [schedule] = module.configure_optimizers()
    net, _, batches = ao.PrivacyEngine(planned(), key=KEY).make_private(module.net, optimizer, loader())
    for _ in range(EPOCHS):
        for x, y in batches:
            optimizer.zero_grad()
            nn.functional.cross_entropy(net(x), y).backward()
            optimizer.step()
        schedule.step()
    return weights(module)


def test_fit_is_the_plain_loop(tmp_path):
    privacy = PrivacyCallback(planned(), network="net", key=KEY)
    module, batches = privacy.make_private(Module().eval(), loader())
    trainer(privacy, tmp_path, gradient_clip_val=1e-9).fit(module, batches)
    assert privacy.engine.step == EPOCHS * STEPS
    assert torch.equal(weights(module), plain_loop())
    privacy.engine.certificate().save(tmp_path / "run.privacy.json")
    assert ao.verify(tmp_path / "run.privacy.json").certificate.steps == EPOCHS * STEPS


def test_a_run_goes_on_from_its_last_checkpoint(tmp_path):
    def begin(epochs, ckpt_path=None):
        privacy = PrivacyCallback(planned(), network="net", key=KEY, checkpoint=tmp_path / "privacy.checkpoint")
        module, batches = privacy.make_private(Module(), loader())
        run = trainer(privacy, tmp_path, max_epochs=epochs, enable_checkpointing=True)
        run.fit(module, batches, ckpt_path=ckpt_path)
        privacy.engine.close()
        return run, module

    first, _ = begin(1)
    saved = first.checkpoint_callback.best_model_path
    with pytest.raises(CheckpointError, match="ckpt_path"):
        begin(EPOCHS)
    _, module = begin(EPOCHS, saved)
    assert torch.equal(weights(module), plain_loop())


@pytest.mark.parametrize(("batch_size", "accumulate", "reduction"), [(2, 4, "mean"), (4, 2, "sum")])
def test_micro_batches_are_one_large_batch(batch_size, accumulate, reduction, tmp_path):
    """Also where an epoch ends within a step, and with gradients that stay below the clip norm."""
    plan = ao.plan(dataset_size=60, batch_size=8, epochs=2, noise_multiplier=1e-6, delta=1e-3, clip_norm=100.0)

    class Reduced(Module):
        def training_step(self, batch, index):
            return nn.functional.cross_entropy(self.net(batch[0]), batch[1], reduction=reduction)

    def fit(batch_size, accumulate):
        options = {"loss_reduction": reduction, "accumulate": accumulate}
        privacy = PrivacyCallback(plan, network="net", key=KEY, **options)
        loads = DataLoader(loader().dataset, batch_size=batch_size, shuffle=True)
        module, batches = privacy.make_private(Reduced(), loads)
        trainer(privacy, tmp_path, max_epochs=2, accumulate_grad_batches=accumulate).fit(module, batches)
        assert privacy.engine.step == plan.n
        return weights(module)

    torch.testing.assert_close(fit(batch_size, accumulate), fit(8, 1), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_the_examples_of_a_user_are_clipped_together(accumulate, tmp_path):
    users = torch.tensor([7, 7, 7, 3, 3, 9, 9, 9])  # none is in two micro-batches
    data = TensorDataset(10 * torch.randn(8, 8, generator=torch.Generator().manual_seed(2)), torch.arange(8) % 3, users)
    steps = [list(range(8))] if accumulate == 1 else [[3, 0, 1, 4, 2], [5, 6, 7]]
    plan = ao.plan(
        order=MinSeparation(1, 1, 1),
        batch_size=4,
        noise_multiplier=1e-7,
        delta=1e-3,
        clip_norm=0.5,
        unit="user",
    )
    privacy = PrivacyCallback(plan, network="net", key=KEY, unit=2, accumulate=accumulate, loss_reduction="mean")
    module, batches = privacy.make_private(Module(), DataLoader(data, batch_sampler=steps))
    before = weights(module)
    trainer(privacy, tmp_path, max_epochs=1, accumulate_grad_batches=accumulate).fit(module, batches)
    by_hand = torch.zeros(())
    for user in (7, 3, 9):
        net = Module().net
        x, y = data.tensors[0][users == user], data.tensors[1][users == user]
        nn.functional.cross_entropy(net(x), y, reduction="sum").backward()
        gradient = torch.cat([p.grad.reshape(-1) for p in net.parameters()])
        assert gradient.norm() > 0.5
        by_hand = by_hand + 0.5 * gradient / gradient.norm()
    torch.testing.assert_close(before - weights(module), 0.5 * by_hand / 4, atol=1e-5, rtol=1e-4)
    assert [units.tolist() for units in privacy.engine.ledger.history()] == [[3, 7, 9]]


def test_adapters_train_in_an_order_of_users(tmp_path):
    peft = pytest.importorskip("peft", reason="peft is not installed")
    users = torch.arange(60) % 13
    by_user = ao.sampling.UnitOrderSampler(users.tolist(), batch_size=10, seed=1)
    loads = DataLoader(TensorDataset(*loader().dataset.tensors, users), batch_sampler=by_user)
    plan = ao.plan(loader=loads, unit=2, epochs=EPOCHS, epsilon=8, delta=1e-3, mechanism="tree")
    module = Module()
    module.net = peft.get_peft_model(module.net, peft.LoraConfig(r=2, target_modules=["0", "2"]))
    privacy = PrivacyCallback(plan, network="net", key=KEY, unit=2)
    module, batches = privacy.make_private(module, loads)
    before = {name: p.clone() for name, p in module.named_parameters()}
    trainer(privacy, tmp_path).fit(module, batches)
    changed = {name for name, p in module.named_parameters() if not torch.equal(p, before[name])}
    assert changed == {name for name, p in module.named_parameters() if p.requires_grad}
    assert [units.tolist() for units in privacy.engine.ledger.history()] == [
        sorted({int(users[i]) for i in batch}) for _ in range(EPOCHS) for batch in by_user
    ]


class Arrivals(IterableDataset):
    """A stream without a length, of which Lightning fetches one batch ahead."""

    def __iter__(self):
        generator = torch.Generator().manual_seed(1)
        return iter([(torch.randn(8, generator=generator), i % 3, i // 4) for i in range(48)])


def stream(**options):
    plan = ao.plan(order=MinSeparation(6, 1, 6), batch_size=8, epsilon=8, delta=1e-3, mechanism="tree", unit="user")
    seen = []

    class Seeing(Module):
        def training_step(self, batch, index):
            seen.append(batch[2].tolist())
            return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    privacy = PrivacyCallback(plan, network="net", key=KEY, unit=2, **options)
    module, batches = privacy.make_private(Seeing(), DataLoader(Arrivals(), batch_size=8))
    return privacy, module, batches, seen


def test_users_of_a_stream_that_is_fetched_ahead_are_those_of_the_batch(tmp_path):
    privacy, module, batches, seen = stream()
    trainer(privacy, tmp_path, max_epochs=1).fit(module, batches)
    assert [units.tolist() for units in privacy.engine.ledger.history()] == [sorted(set(users)) for users in seen]
    assert len(seen) == 6


def test_copies_of_a_stream_that_is_fetched_ahead_are_refused(tmp_path):
    """As on a device, where the tensors that come to the model are not those of the loader."""
    privacy, module, batches, seen = stream()
    module.transfer_batch_to_device = lambda batch, device, index: [t.clone() for t in batch]
    with pytest.raises(TrainingError, match="__len__"):
        trainer(privacy, tmp_path, max_epochs=1).fit(module, batches)
    assert privacy.engine.step == 0


class Encoded(Module):
    """Layers with names of their own, and one module around them."""

    def __init__(self, whole):
        super().__init__()
        del self.net
        self.whole, self.encoder, self.head = whole, nn.Linear(8, 4), nn.Linear(4, 3)
        self.net = nn.Sequential(self.encoder, nn.Tanh(), self.head)

    def training_step(self, batch, index):
        scores = self.net(batch[0]) if self.whole else self.head(self.encoder(batch[0]).tanh())
        return nn.functional.cross_entropy(scores, batch[1])


@pytest.mark.parametrize("whole", [True, False])
def test_layers_with_a_second_name(tmp_path, whole):
    privacy = PrivacyCallback(planned(), network="net", key=KEY)
    module, batches = privacy.make_private(Encoded(whole), loader())
    if whole:
        trainer(privacy, tmp_path).fit(module, batches)
        assert privacy.engine.step == EPOCHS * STEPS
    else:
        with pytest.raises(TrainingError, match="call model"):
            trainer(privacy, tmp_path).fit(module, batches)
        assert privacy.engine.step == 0


def test_refusals(tmp_path):
    with pytest.raises(ArgumentError, match="network must name"):
        PrivacyCallback(planned(), network="other").make_private(Module(), loader())
    module = Module()
    module.head = nn.Linear(3, 3)
    with pytest.raises(ArgumentError, match=r"head\.bias, head\.weight are outside"):
        PrivacyCallback(planned(), network="net").make_private(module, loader())
    module = Module()
    module.automatic_optimization = False
    with pytest.raises(ArgumentError, match="manual"):
        PrivacyCallback(planned(), network="net").make_private(module, loader())
    unbound = PrivacyCallback(planned(), network="net")
    with pytest.raises(TrainingError, match="before fit"):
        trainer(unbound, tmp_path).fit(Module(), loader())
    privacy = PrivacyCallback(planned(), network="net", key=KEY)
    module, batches = privacy.make_private(Module(), loader())
    with pytest.raises(ArgumentError, match="the callback's accumulate=1, got 2"):
        trainer(privacy, tmp_path, accumulate_grad_batches=2).fit(module, batches)
    assert privacy.engine.step == 0
    with pytest.raises(PlanError, match="protects one example"):
        PrivacyCallback(planned(), network="net", unit=2)


class Wide(Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.EmbeddingBag(50, 4, mode="sum", sparse=True), nn.Linear(4, 3))

    def validation_step(self, batch, index):
        assert len(self.net.module[0].weight) == 50
        self.log("loss", nn.functional.cross_entropy(self.net(batch[0]), batch[1]))


def test_a_lazy_table_is_up_to_date_where_it_is_looked_at(tmp_path):
    """For validations and for checkpoints of an epoch's end; and a run goes on from these."""
    generator = torch.Generator().manual_seed(1)
    data = TensorDataset(torch.randint(0, 50, (60, 3), generator=generator), torch.arange(60) % 3)

    def begin(name, epochs, ckpt_path=None):
        plan = planned("independent")
        privacy = PrivacyCallback(plan, network="net", key=KEY, checkpoint=tmp_path / name)
        module, batches = privacy.make_private(Wide(), DataLoader(data, batch_size=10, shuffle=True))
        options = {"enable_checkpointing": True, "num_sanity_val_steps": 0}
        run = trainer(privacy, tmp_path / f"{name}.folder", max_epochs=epochs, **options)
        run.fit(module, batches, DataLoader(data, batch_size=30), ckpt_path=ckpt_path)
        privacy.engine.close()
        return run, weights(module)

    _, whole = begin("whole", EPOCHS)
    first, _ = begin("parts", 1)
    _, again = begin("parts", EPOCHS, first.checkpoint_callback.best_model_path)
    assert len(whole) == 50 * 4 + 15
    assert torch.equal(whole, again)


class Unwatched(Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.EmbeddingBag(50, 4, mode="sum", sparse=True), nn.Linear(4, 3))


def test_a_fit_without_validations_ends_with_whole_tables(tmp_path):
    data = TensorDataset(torch.arange(180).reshape(60, 3) % 50, torch.arange(60) % 3)
    privacy = PrivacyCallback(planned("independent"), network="net", key=KEY)
    module, batches = privacy.make_private(Unwatched(), DataLoader(data, batch_size=10, shuffle=True))
    trainer(privacy, tmp_path, max_epochs=1).fit(module, batches)
    assert len(module.net.module[0].weight) == 50
    module.net.module.state_dict()


def test_secret_orders_train_in_micro_batches_of_one_size(tmp_path):
    rule = BallsInBins(EPOCHS, 3)
    plan = ao.plan(order=rule, batch_size=8, mechanism="independent", noise_multiplier=1.0, delta=1e-5)
    options = {"accumulate": 2, "micro_batch": 12}
    privacy = PrivacyCallback(plan, network="net", key=KEY, **options)
    module, batches = privacy.make_private(Module(), loader())
    trainer(privacy, tmp_path, accumulate_grad_batches=2).fit(module, batches)
    assert privacy.engine.step == plan.n
    history = [units.tolist() for units in privacy.engine.ledger.history()]
    assert history[:3] == history[3:6]
    assert sorted(unit for units in history[:3] for unit in units) == list(range(len(loader().dataset)))


def test_the_length_of_one_text_moves_no_other(tmp_path):
    def collate(rows):
        return pad_sequence([x for x, _ in rows], batch_first=True), torch.tensor([y for _, y in rows])

    class OthersCount(Module):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(nn.Embedding(9, 8), _MeanOverLength(), self.net)

        def training_step(self, batch, index):
            losses = nn.functional.cross_entropy(self.net(batch[0]), batch[1], reduction="none")
            return (losses * (torch.arange(len(losses)) > 0) * 1000).mean()

    found = []
    for first in (3, 30):
        generator = torch.Generator()
        lengths = [first, 5, 7, 12]
        data = [(torch.randint(1, 9, (n,), generator=generator.manual_seed(i)), i % 3) for i, n in enumerate(lengths)]
        plan = ao.plan(
            dataset_size=4, batch_size=4, epochs=1, noise_multiplier=1e-6, delta=1e-3, mechanism="independent"
        )
        privacy = PrivacyCallback(plan, network="net", key=KEY, pad_to=(8, 16, 32))
        module, batches = privacy.make_private(OthersCount(), DataLoader(data, 4, collate_fn=collate))
        trainer(privacy, tmp_path, max_epochs=1).fit(module, batches)
        found.append(weights(module))
    assert (found[0] - found[1]).norm() < 1e-5


class _MeanOverLength(nn.Module):
    def forward(self, x):
        return x.mean(1)
