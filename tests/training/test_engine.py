"""The engine: the released gradient is the planned mechanism, and nothing else gets through."""

import copy
import math

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import anyorder as ao
from anyorder.clipping import Automatic, PerGroup
from anyorder.errors import ArgumentError, TrainingError
from anyorder.noise import NoiseSource, NoiseStream
from anyorder.participation import EpochShuffle, FixedOrder, MinSeparation
from anyorder.strategy import Independent, Tree
from plans import flat_plan

KEY = bytes(range(32))
N, B, EPOCHS = 24, 4, 3
STEPS = N // B


def data(n=N, features=3):
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(n, features, generator=generator), torch.arange(n) % 2)


def network(dropout=0.0):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Dropout(dropout), nn.Linear(4, 2))


def planned(**changes):
    settings = {"dataset_size": N, "batch_size": B, "epochs": EPOCHS, "epsilon": 8, "delta": 1e-5, "mechanism": "tree"}
    return flat_plan(**{**settings, **changes})


def private(plan=None, *, dropout=0.0, optimizer=None, loader=None, checkpoint=None, **options):
    engine = ao.PrivacyEngine(plan or planned(), key=KEY, checkpoint=checkpoint)
    model = network(dropout)
    optimizer = (optimizer or (lambda p: torch.optim.SGD(p, lr=0.5)))(model.parameters())
    if loader is None:
        loader = DataLoader(data(), batch_size=B, shuffle=True)
    return engine, *engine.make_private(model, optimizer, loader, **options)


def backward(model, batch):
    nn.functional.cross_entropy(model(batch[0]), batch[1]).backward()


def gradients(model):
    return torch.cat([p.grad.reshape(-1) for p in model.parameters()])


def weights(model):
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def train(engine, model, optimizer, loader, epochs=EPOCHS):
    for _ in range(epochs):
        for batch in loader:
            optimizer.zero_grad()
            backward(model, batch)
            optimizer.step()


def clipped_sum(model, batch, clip_norm, groups=None):
    """Brute force: one example at a time."""
    per_unit = {}
    for i, (x, y) in enumerate(zip(*batch[:2], strict=True)):
        loss = nn.functional.cross_entropy(model(x[None]), y[None])
        flat = torch.cat([g.reshape(-1) for g in torch.autograd.grad(loss, list(model.parameters()))])
        unit = i if groups is None else groups[i]
        per_unit[unit] = per_unit.get(unit, 0) + flat
    return sum(g * min(1.0, clip_norm / g.norm().item()) for g in per_unit.values())


@pytest.mark.parametrize(
    ("mechanism", "reduction"),
    [(Independent(18), "sum"), (Tree(18, "online", restarts=(6, 12), completion=True), "mean")],
)
def test_released_gradient_is_clipped_sum_plus_planned_noise(mechanism, reduction):
    """Every step equals (brute-force clipped sum + std K Z) / batch_size. Half the noise would fail here."""
    plan = planned(mechanism=mechanism, clip_norm=0.3)
    engine, model, optimizer, loader = private(plan, loss_reduction=reduction)
    source = NoiseSource(KEY).derive(plan.digest.encode())
    noise = plan.noise_std * (mechanism.noising_matrix() @ rows(source, mechanism.num_rows, weights(model).numel()))
    t = 0
    for _ in range(EPOCHS):
        for batch in loader:
            expected = clipped_sum(copy.deepcopy(model.module), batch, plan.clip_norm)
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(batch[0]), batch[1], reduction=reduction).backward()
            assert all(p.grad is None for p in model.parameters())
            optimizer.step()
            expected = (expected + torch.from_numpy(noise[t]).float()) / plan.batch_size
            torch.testing.assert_close(gradients(model), expected, rtol=1e-4, atol=1e-5 * plan.noise_std)
            t += 1
    assert t == plan.n == engine.step


def rows(source, count, size):
    return np.stack([source.normal(r, 0, size) for r in range(count)]).astype(np.float64)


def test_noise_in_the_gradient_has_the_claimed_size():
    """A model with zero gradients shows the bare noise: its scale is the certificate's, to 5 standard errors."""
    plan = planned(mechanism=Independent(18), clip_norm=2.0)
    engine = ao.PrivacyEngine(plan)
    model = nn.Linear(3000, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    loader = DataLoader(TensorDataset(torch.zeros(N, 3000)), batch_size=B, shuffle=True)
    model, optimizer, loader = engine.make_private(model, optimizer, loader)
    (batch,) = next(iter(loader))
    (model(batch) * 0).sum().backward()
    optimizer.step()
    noise = gradients(model) * plan.batch_size
    error = 1 / math.sqrt(2 * noise.numel())
    assert noise.std().item() == pytest.approx(plan.noise_std, rel=5 * error)
    true_mu = plan.clip_norm * plan.sensitivity.value / noise.std().item()
    assert ao.accounting.gdp_epsilon(true_mu, plan.delta) == pytest.approx(plan.epsilon, rel=8 * error)


def test_units_by_key_are_summed_before_clipping():
    users = torch.tensor([0, 0, 1, 2] * (N // B)) + 3 * torch.arange(N // B).repeat_interleave(B)
    loader = DataLoader(TensorDataset(*data().tensors, users), batch_size=B)
    plan = ao.plan(
        order=MinSeparation(STEPS, STEPS), batch_size=B, epsilon=8, delta=1e-5, mechanism="tree", clip_norm=0.2,
        unit="user",
    )  # fmt: skip
    engine, model, optimizer, loader = private(plan, loader=loader, unit=2)
    noise = NoiseStream(plan.strategy, engine.release._source, plan.noise_std, weights(model).numel())
    for batch in loader:
        expected = clipped_sum(copy.deepcopy(model.module), batch, plan.clip_norm, groups=batch[2].tolist())
        backward(model, batch)
        optimizer.step()
        expected = (expected + torch.from_numpy(noise.next())) / B
        torch.testing.assert_close(gradients(model), expected, rtol=1e-4, atol=1e-6)


def test_micro_batches_give_the_step_of_the_whole_batch():
    whole = private(loader=DataLoader(data(), batch_size=B))
    pieces = private(loader=DataLoader(data(), batch_size=B // 2), accumulate=2)
    train(*whole)
    engine, model, optimizer, loader = pieces
    for _ in range(EPOCHS):
        for i, batch in enumerate(loader):
            backward(model, batch)
            if i % 2:
                optimizer.step()
                optimizer.zero_grad()
    assert engine.step == whole[0].step == 18
    torch.testing.assert_close(weights(model), weights(whole[1]), rtol=1e-4, atol=1e-5)


def test_short_last_batch_is_divided_by_the_planned_size():
    plan = planned(dataset_size=22)
    engine, model, optimizer, loader = private(plan, loader=DataLoader(data(22), batch_size=B))
    noise = NoiseStream(plan.strategy, engine.release._source, plan.noise_std, weights(model).numel())
    for batch in loader:
        expected = clipped_sum(copy.deepcopy(model.module), batch, 1.0)
        backward(model, batch)
        optimizer.step()

        torch.testing.assert_close(
            gradients(model), (expected + torch.from_numpy(noise.next())) / B, rtol=1e-4, atol=1e-5
        )
    assert len(batch[0]) == 2


def test_ftrl_equals_sgd_on_the_same_noise():
    plan = planned(momentum=0.9)
    by_sgd = private(plan, optimizer=lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9))
    by_ftrl = private(plan, optimizer=lambda p: ao.FTRL(p, lr=0.1, momentum=0.9))
    train(*by_sgd)
    train(*by_ftrl)
    torch.testing.assert_close(weights(by_sgd[1]), weights(by_ftrl[1]), rtol=1e-4, atol=1e-4)


@pytest.mark.filterwarnings("ignore::anyorder.errors.OptimizerWarning")  # that it works, not how well
def test_any_torch_optimizer_and_scheduler():
    engine, model, optimizer, loader = private(optimizer=lambda p: torch.optim.Adam(p, lr=0.01))
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 18)
    before = weights(model)
    for _ in range(EPOCHS):
        for batch in loader:
            optimizer.zero_grad()
            backward(model, batch)
            optimizer.step()
            scheduler.step()
    assert engine.step == 18
    assert torch.isfinite(weights(model)).all()
    assert not torch.equal(before, weights(model))


def test_poisson_sampling_trains_and_takes_empty_batches():
    plan = planned(order="poisson", mechanism="independent", batch_size=1, epochs=2)
    engine, model, optimizer, loader = private(plan, loader=DataLoader(data(), batch_size=1))
    sizes = []
    for _ in range(2):
        for batch in loader:
            sizes.append(len(batch[0]))
            optimizer.zero_grad()
            backward(model, batch)  # the mean over no examples is NaN; no gradient comes of it
            optimizer.step()
    assert engine.step == plan.n == len(sizes)
    assert 0 in sizes
    assert max(sizes) > 1


def two_iterations(loader):
    first = iter(loader)
    yield next(first)
    second = iter(loader)
    next(second)
    yield next(first)
    second.close()  # the next iteration goes on behind the last batch used: at the first's next batch
    again = iter(loader)
    yield next(first)
    yield next(again)


def moved_back(loader):
    yield next(iter(loader))
    loader.seek(0)
    yield next(iter(loader))


@pytest.mark.parametrize("batches", [moved_back, two_iterations])
def test_coins_of_poisson_sampling_serve_one_step(batches):
    """Three steps on one batch are one Gaussian mechanism of a larger norm: epsilon 3.8 where 2 was planned."""
    plan = planned(order="poisson", mechanism="independent", batch_size=6)
    engine, model, optimizer, loader = private(plan, loader=DataLoader(data(), batch_size=6))
    with pytest.raises(TrainingError, match="draws"):
        for batch in batches(loader):
            backward(model, batch)
            optimizer.step()
    history = [tuple(units.tolist()) for units in engine.ledger.history()]
    assert len(set(history)) == len(history) == (1 if batches is moved_back else 3)


def test_evaluation_takes_any_input_and_leaves_no_gradient():
    engine, model, optimizer, loader = private()
    model.eval()
    loss = model(torch.randn(9, 3, requires_grad=True)).sum()
    loss.backward()
    assert all(p.grad is None for p in model.parameters())
    model.train()
    with torch.no_grad():
        assert model(torch.randn(9, 3)).shape == (9, 2)
    assert engine.step == 0


def test_model_is_wrapped_without_changing_its_names():
    _, model, _, _ = private()
    assert set(model.state_dict()) == {"0.weight", "0.bias", "3.weight", "3.bias"}
    model.load_state_dict(network().state_dict())
    assert model.module[0].in_features == 3


def test_a_closure_is_run_once_before_the_step():
    def run(with_closure):
        engine, model, optimizer, loader = private()
        losses, calls = [], []
        for batch in loader:

            def closure(batch=batch):
                calls.append(1)
                optimizer.zero_grad()
                loss = nn.functional.cross_entropy(model(batch[0]), batch[1])
                loss.backward()
                losses.append(loss)
                return loss

            if with_closure:
                assert optimizer.step(closure) is None  # the loss of a batch is not handed on
            else:
                closure()
                optimizer.step()
        assert engine.step == len(calls) == STEPS
        return weights(model), torch.stack(losses)

    ours, plain = run(True), run(False)
    assert torch.equal(ours[0], plain[0])
    assert torch.equal(ours[1], plain[1])


@pytest.mark.parametrize("rule", [PerGroup(), PerGroup((("0",), ("3",)), (0.6, 0.8)), Automatic(0.1)])
def test_a_clip_rule_reaches_the_sum(rule):
    plan = planned(clip_norm=0.3)
    engine, model, optimizer, loader = private(plan, rule=rule)
    before = copy.deepcopy(model.module)
    batch = next(iter(loader))
    backward(model, batch)
    sums = torch.cat([engine.training._waiting.sums[name].reshape(-1) for name, _ in before.named_parameters()])
    expected = torch.zeros_like(sums)
    for x, y in zip(*batch, strict=True):
        loss = nn.functional.cross_entropy(before(x[None]), y[None])
        found = torch.autograd.grad(loss, list(before.parameters()))
        gradients = {name: g for (name, _), g in zip(before.named_parameters(), found, strict=True)}
        factors = rule.factors({name: g.double().square().sum()[None] for name, g in gradients.items()}, 0.3)
        own = torch.cat([g.reshape(-1) * factors[name].float() for name, g in gradients.items()])
        assert own.norm() <= 0.3 * (1 + 1e-6)
        expected += own
    torch.testing.assert_close(sums, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("mechanism", ["tree", Independent(EPOCHS * STEPS)])
def test_a_step_that_is_interrupted_after_its_noise_was_drawn_is_the_last(mechanism, monkeypatch):
    engine, model, optimizer, loader = private(planned(mechanism=mechanism))
    batches = iter(loader)
    backward(model, next(batches))

    def interrupt(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(engine.ledger, "record", interrupt)
        with pytest.raises(KeyboardInterrupt):
            optimizer.step()
    before = weights(model)
    with pytest.raises(TrainingError, match="broken off"):
        optimizer.step()
    assert torch.equal(before, weights(model))


def test_exact_integers_are_cut_as_a_whole():
    with pytest.raises(ArgumentError, match="Flat"):
        private(planned(secure=True), rule=Automatic())


def test_frozen_parameters_stay():
    engine = ao.PrivacyEngine(planned(), key=KEY)
    model = network()
    model[0].requires_grad_(False)
    frozen = model[0].weight.clone()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5)
    model, optimizer, loader = engine.make_private(model, optimizer, DataLoader(data(), batch_size=B, shuffle=True))
    train(engine, model, optimizer, loader, epochs=1)
    assert torch.equal(model.module[0].weight, frozen)


def test_same_key_under_another_plan_gives_other_noise():
    noise = []
    for clip_norm in (1.0, 1.0 + 1e-9):
        plan = planned(mechanism=Independent(18), clip_norm=clip_norm)
        engine, model, optimizer, loader = private(plan, loader=DataLoader(data(), batch_size=B))
        x, _ = next(iter(loader))
        (model(x) * 0).sum().backward()
        optimizer.step()
        noise.append(gradients(model))
    assert abs(np.corrcoef(noise[0], noise[1])[0, 1]) < 0.9


def test_evidence_holds_no_key_of_the_noise():
    engine, *_ = private()
    source = engine.release._source
    keys = {KEY, source.key, source.derive(b"order").key, source.derive(b"sampling").key}
    assert engine.evidence().record_key not in keys


def test_shuffled_plan_covers_a_sequential_loader_and_says_what_it_found():
    engine, *_ = private(loader=DataLoader(data(), batch_size=B))
    assert "sequential" in engine.order
    engine, *_ = private()
    assert "shuffled" in engine.order


def test_fixed_order_sampler_runs_under_a_fixed_order_plan():
    dataset = data()
    loader = DataLoader(dataset, batch_size=B, sampler=ao.FixedOrderSampler(dataset, seed=3))
    plan = ao.plan(loader=loader, epochs=EPOCHS, epsilon=8, delta=1e-5, mechanism="tree")
    assert plan.participation == FixedOrder(18, 3, 6)
    engine, model, optimizer, loader = private(plan, loader=loader)
    train(engine, model, optimizer, loader)
    history = [sorted(units) for units in engine.ledger.history()]
    assert history[:6] == history[6:12] == history[12:]
    assert history[:6] != sorted(history[:6])


def test_shuffled_loader_takes_each_example_once_an_epoch():
    engine, model, optimizer, loader = private()
    assert engine.plan.participation == EpochShuffle(3, 6)
    train(engine, model, optimizer, loader)
    history = list(engine.ledger.history())
    epochs = [sorted(int(u) for units in history[e * 6 : e * 6 + 6] for u in units) for e in range(3)]
    assert epochs == [list(range(N))] * 3
    assert [sorted(u) for u in history[:6]] != [sorted(u) for u in history[6:12]]


@pytest.mark.parametrize("where", ["input", "loss", "all"])
@pytest.mark.parametrize(("bad", "secure"), [(math.nan, False), (math.inf, True)])
def test_a_unit_that_is_not_finite_adds_zero_and_nothing_tells_of_it(bad, where, secure, capfd, caplog):
    """The run of another, in which the unit's gradient is zero, bit for bit: `zero-out` neighbours of each other."""
    runs = []
    for present in (True, False):
        engine, model, optimizer, loader = private(planned(secure=secure))
        for t, (x, y) in enumerate(loader):
            weight = torch.ones(len(x))
            if t == 1:
                rows = slice(None) if where == "all" else 1
                if not present:
                    weight[rows] = 0.0
                elif where == "loss":
                    weight[rows] = bad
                else:
                    x[rows] = bad
            optimizer.zero_grad()
            (nn.functional.cross_entropy(model(x), y, reduction="none") * weight).mean().backward()
            optimizer.step()
        runs.append((weights(model), engine.step, [list(units) for units in engine.ledger.history()]))
    assert torch.equal(runs[0][0], runs[1][0])
    assert runs[0][1:] == runs[1][1:]
    assert capfd.readouterr() == ("", "")
    assert not caplog.records


def test_words_for_non_finite_units():
    with pytest.raises(ArgumentError, match="non_finite must be one of 'refuse', 'zero', got 'skip'"):
        private(non_finite="skip")


# -- habits of Opacus --------------------------------------------------------------------------------------------------


def test_the_engine_says_its_claim_and_its_state():
    engine, model, optimizer, loader = private()
    assert engine.epsilon() == engine.plan.epsilon
    assert engine.epsilon(1e-7) == engine.plan.curve.epsilon(1e-7) > engine.epsilon()
    with pytest.raises(ArgumentError, match="delta"):
        engine.epsilon(1.0)
    assert repr(ao.PrivacyEngine(engine.plan)).endswith("not bound yet: call make_private(model, optimizer, loader))")
    assert repr(engine) == f"PrivacyEngine(epsilon=8, delta=1e-05, for one example; step 0 of 18; {KEYED})"
    backward(model, next(iter(loader)))
    optimizer.step()
    engine.close()
    assert "closed at step 1 of 18" in repr(engine)


KEYED = "its key was given, as in tests"


def test_an_engine_without_a_plan_says_what_to_write():
    for call in (ao.PrivacyEngine, lambda: ao.PrivacyEngine(key=KEY)):
        with pytest.raises(ArgumentError, match=r"plan = ao\.plan\(loader=loader"):
            call()
    with pytest.raises(ArgumentError, match=r"exact integers are the plan's, .*ao\.mechanism\(secure=True\)"):
        ao.PrivacyEngine(secure_mode=True)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"module": 0, "optimizer": 0, "data_loader": 0}, r"make_private\(model, optimizer, loader\)"),
        ({"max_grad_norm": 1.0}, r"ao\.plan\(\.\., clip_norm=\.\.\)"),
        ({"noise_multiplier": 1.0}, r"ao\.plan\(\.\., noise_multiplier=\.\.\)"),
        ({"poisson_sampling": False}, "order is the plan's"),
    ],
)
def test_keywords_of_opacus_say_where_they_stand_here(given, said):
    engine = ao.PrivacyEngine(planned())
    with pytest.raises(ArgumentError, match=said):
        engine.make_private(**given)
    assert not engine.is_private


def test_methods_of_opacus_say_what_to_write():
    engine = ao.PrivacyEngine(planned())
    with pytest.raises(AttributeError, match=r"engine\.epsilon\(\)"):
        engine.get_epsilon(1e-5)
    with pytest.raises(AttributeError, match=r"no 'nothing'$"):
        engine.nothing  # noqa: B018
    assert not hasattr(engine, "get_epsilon")
