"""What an optimizer and its scheduler get besides private gradients: nothing, or what its owner says is public.

The pair: one run, and the same with one unit replaced. The private gradients are given, equal in both (their noise is
the run's own, and no news); what the loop hands on beside them must then not be told from the weights.
"""

import warnings

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader, TensorDataset

import anyorder as ao
import processes
from anyorder.errors import OptimizerWarning, TrainingError

KEY = bytes(32)
N, B = 12, 4


def private(optimizer_of, *, replaced=False):
    torch.manual_seed(0)
    x, y = torch.randn(N, 3, generator=torch.Generator().manual_seed(1)), torch.arange(N) % 2
    if replaced:
        x[0] = 100.0
    network = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    plan = ao.plan(dataset_size=N, batch_size=B, epochs=2, epsilon=8, delta=1e-3, order="fixed")
    engine = ao.PrivacyEngine(plan, key=KEY)
    loader = DataLoader(TensorDataset(x, y), batch_size=B)
    return engine, *engine.make_private(network, optimizer_of(network.parameters()), loader)


def weights(model):
    return torch.cat([p.detach().reshape(-1) for p in model.module.parameters()])


class Polyak(torch.optim.Optimizer):
    """Steps of length loss / |g|^2: the loss is in the weights."""

    def __init__(self, params, read=float):
        super().__init__(params, {})
        self.read = read

    def step(self, closure=None, loss=None):
        with torch.enable_grad():
            value = loss if closure is None else closure()
        for p in (p for group in self.param_groups for p in group["params"]):
            p.data.sub_(p.grad / p.grad.norm(), alpha=self.read(value) if value is not None else 0.1)
        return value


class Careless(torch.optim.Optimizer):
    """Calls its closure, as torch's do, and hands on what comes; `check` looks at its own state before."""

    def __init__(self, params, check=lambda optimizer: None):
        super().__init__(params, {})
        self.check, self.got = check, []

    def step(self, closure=None):
        self.check(self)
        loss = closure()
        self.got.append(loss)
        torch.rand(1)
        for p in self.param_groups[0]["params"]:
            p.data.sub_(p.grad, alpha=0.1)
        return loss


def one_step(optimizer_of, give, replaced=False):
    engine, model, optimizer, loader = private(optimizer_of, replaced=replaced)
    engine.on_release(lambda step, vector: None)
    batch = next(iter(loader))
    before = weights(model)

    def closure():
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(batch[0]), batch[1])
        loss.backward()
        return loss

    try:
        return give(optimizer, closure), before, engine, model
    except TrainingError as problem:
        return str(problem), before, engine, model


def by_keyword(optimizer, closure):
    loss = closure()
    return optimizer.step(loss=loss.detach())


def by_number(optimizer, closure):
    loss = closure().item()
    return optimizer.step(lambda: loss)


@pytest.mark.parametrize(
    ("give", "reads"),
    [
        (lambda optimizer, closure: optimizer.step(closure), float),
        (lambda optimizer, closure: optimizer.step(closure=closure), lambda loss: loss.detach().item()),
        (lambda optimizer, closure: optimizer.step(closure), lambda loss: (loss * 2) if loss > 0 else 0.0),
        (lambda optimizer, closure: optimizer.step(closure), torch.as_tensor),
        (by_number, float),
        (by_keyword, float),
    ],
)
def test_no_optimizer_takes_the_loss(give, reads):
    """A Polyak step wrote the exact private loss into the weights, whatever the noise."""
    told = set()
    for replaced in (False, True):
        said, before, engine, model = one_step(lambda params: Polyak(params, reads), give, replaced)
        assert isinstance(said, str)
        assert ("reads the loss" in said) or ("given loss" in said) or "made-up" in said
        assert engine.step == 0  # refused before anything is released
        assert torch.equal(weights(model), before)
        told.add(said)
    assert len(told) == 1


@pytest.mark.parametrize("optimizer_of", [
    lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9), lambda params: torch.optim.Adam(params, lr=0.1),
    Careless, lambda params: ao.FTRL(params, lr=0.1, momentum=0.5),
])  # fmt: skip
@pytest.mark.filterwarnings("ignore::anyorder.errors.OptimizerWarning")
def test_optimizers_that_go_by_gradients_step_with_a_closure(optimizer_of):
    """And their state is none of the trial's: the weights are those of a loop without closure."""
    found = []
    for give in (lambda o, c: o.step(c), lambda o, c: (c(), o.step(lambda: None))[1]):
        said, before, engine, model = one_step(optimizer_of, give)
        assert said is None
        assert engine.step == 1
        assert not torch.equal(weights(model), before)
        found.append(weights(model))
    assert torch.equal(*found)


def test_an_optimizer_that_cannot_be_tried_gets_no_loss():
    """The second line: where the trial says nothing, the closure returns None."""

    def check(optimizer):
        if optimizer.param_groups[0]["params"][0].numel() == 1:
            raise RuntimeError("not on made-up parameters")

    made = []
    _, before, _, model = one_step(
        lambda params: made.append(Careless(params, check)) or made[0], lambda o, c: o.step(c)
    )
    assert made[0].got == [None]
    assert not torch.equal(weights(model), before)


class OfAParent(torch.optim.SGD):
    """Its step is its parent's, which torch hooks as well; after `fails` it works."""

    fails = 0

    def step(self, closure=None):
        loss = super().step(closure)
        if self.fails:
            self.fails -= 1
            raise RuntimeError("after the step")
        return loss


@pytest.mark.parametrize("give", [lambda o, c: o.step(c), lambda o, c: (c(), o.step())[1]])
def test_a_step_that_calls_its_parents_is_one_step(give):
    """It was refused in the midst, its gradients released and its parameters where they had been."""
    torch.optim.SGD([nn.Parameter(torch.zeros(1))])  # from here on torch hooks the parent's step
    found = []
    for kind in (torch.optim.SGD, OfAParent):
        said, before, engine, model = one_step(lambda params, kind=kind: kind(params, lr=0.1), give)
        assert said is None
        assert engine.step == 1
        assert not torch.equal(weights(model), before)
        found.append(weights(model))
    assert torch.equal(*found)


def test_a_step_that_fails_after_its_parents_leaves_the_next_its_own():
    engine, model, optimizer, loader = private(lambda params: OfAParent(params, lr=0.1))
    optimizer.fails = 1
    for t, (x, y) in zip(range(2), loader, strict=False):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        before = weights(model)
        if t == 0:
            with pytest.raises(RuntimeError, match="after the step"):
                optimizer.step()
            with pytest.raises(TrainingError, match="without a backward pass"):
                optimizer.step()
        else:
            optimizer.step()
        assert engine.step == t + 1
        assert not torch.equal(weights(model), before)


def test_public_numbers_are_handed_on():
    said, before, engine, model = one_step(Polyak, lambda o, c: (c(), o.step(loss=ao.Public(0.25)))[1])
    assert said == 0.25
    assert engine.step == 1
    assert not torch.equal(weights(model), before)


# -- schedulers ------------------------------------------------------------------------------------------------------


def sgd(params):
    return torch.optim.SGD(params, lr=0.1)


@pytest.mark.parametrize("closure", [None, lambda: None])
def test_numbers_that_a_step_is_given_by_place_are_refused(closure):
    """Before the step, as those that are given by name."""
    said, before, engine, model = one_step(lambda params: Careless(params, bool), lambda o, c: refused(o, closure))
    assert "2 arguments" in said
    assert engine.step == 0
    assert torch.equal(weights(model), before)


def refused(optimizer, closure):
    with pytest.raises(TrainingError) as error:
        optimizer.step(closure, 0.25)
    return str(error.value)


@pytest.mark.parametrize("before", [True, False])
def test_a_plateau_of_the_training_loss_is_refused(before):
    """The rate was a function of the exact losses: one unit decided it."""
    schedulers = []

    def made(params):
        optimizer = sgd(params)
        if before:
            schedulers.append(ReduceLROnPlateau(optimizer, patience=0))
        return optimizer

    _, model, optimizer, loader = private(made)
    scheduler = schedulers[0] if before else ReduceLROnPlateau(optimizer, patience=0)
    x, y = next(iter(loader))
    loss = nn.functional.cross_entropy(model(x), y)
    for value in (loss, loss.item(), 1, ao.Public(1.0) + 1):
        with pytest.raises(TrainingError, match=r"ao\.Public"):
            scheduler.step(value)
    assert (scheduler.last_epoch, optimizer.param_groups[0]["lr"]) == (0, 0.1)


def test_a_plateau_of_public_numbers_works():
    _, _, optimizer, _ = private(sgd)
    scheduler = ReduceLROnPlateau(optimizer, patience=0)
    for value in (1.0, torch.tensor(2.0)):
        scheduler.step(ao.Public(value))
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.01)


def test_a_plateau_of_another_optimizer_is_as_it_was():
    private(sgd)
    optimizer = sgd([nn.Parameter(torch.zeros(1))])
    scheduler = ReduceLROnPlateau(optimizer, patience=0)
    scheduler.step(1.0)
    scheduler.step(2.0)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.01)


def test_a_plateau_of_a_wrapped_optimizer_is_refused():
    """As accelerate wraps it."""

    class Wrapper(torch.optim.Optimizer):
        def __init__(self, optimizer):
            self.optimizer = optimizer
            self.param_groups = optimizer.param_groups

    _, _, optimizer, _ = private(sgd)
    with pytest.raises(TrainingError, match=r"ao\.Public"):
        ReduceLROnPlateau(Wrapper(optimizer)).step(1.0)


PLAIN = """
import inspect
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

def plain():
    '''Training without privacy, with what a private run wraps for the whole process.'''
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(12, 3), torch.arange(12) % 2)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=10.0)
    for x, y in DataLoader(data, 4, shuffle=True):
        losses = []
        def closure():
            optimizer.zero_grad()
            losses.append(nn.functional.cross_entropy(model(x), y))
            losses[-1].backward()
            return losses[-1]
        assert optimizer.step(closure) is losses[-1]
        plateau.step(metrics=losses[-1])
    x = torch.randn(5, 3)
    square = torch.func.vmap(torch.func.grad(lambda row: (row**3).sum()))(x)
    _, tangent = torch.func.jvp(torch.sin, (x,), (x,))
    compiled = torch.compile(torch.func.vmap(torch.sin), backend="eager", fullgraph=True)(x)
    signature = str(inspect.signature(torch.autograd.forward_ad.make_dual))
    found = [*model.state_dict().values(), square, tangent, compiled, torch.get_rng_state()]
    return [one.tolist() for one in found], optimizer.param_groups[0]["lr"], signature

before = plain()
import anyorder as ao
model = nn.Linear(3, 2)
plan = ao.plan(dataset_size=12, batch_size=4, epochs=1, epsilon=8, delta=1e-3, mechanism="independent")
data = TensorDataset(torch.randn(12, 3), torch.arange(12) % 2)
private, optimizer, loader = ao.PrivacyEngine(plan).make_private(
    model, torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(data, 4))
for x, y in loader:
    optimizer.zero_grad()
    nn.functional.cross_entropy(private(x), y).backward()
    assert plain() == before
    optimizer.step()
assert plain() == before
assert before[1] < 0.1
"""


def test_plain_training_beside_a_private_run_is_as_without():
    """Optimizers, schedulers and torch.func of the same process, between the private run's steps and after it."""
    done = processes.run("-W", "ignore", "-c", PLAIN)
    assert done.returncode == 0, done.stderr


# -- parameters that the optimizer does not hold ----------------------------------------------------------------------


def test_parameters_of_a_second_optimizer_are_named():
    """They stood still without a word: half the network was never trained."""
    network = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    plan = ao.plan(dataset_size=N, batch_size=B, epochs=2, epsilon=8, delta=1e-3, order="fixed")
    loader = DataLoader(TensorDataset(torch.zeros(N, 3), torch.zeros(N)), batch_size=B)
    with pytest.warns(OptimizerWarning, match=r"does not hold 0\.bias, 0\.weight: .* frozen") as told:
        ao.PrivacyEngine(plan, key=KEY).make_private(network, sgd(network[2].parameters()), loader)
    assert told[0].filename == __file__


def test_who_froze_parameters_is_not_told_of_them():
    network = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    network[0].requires_grad_(False)
    plan = ao.plan(dataset_size=N, batch_size=B, epochs=2, epsilon=8, delta=1e-3, order="fixed")
    loader = DataLoader(TensorDataset(torch.zeros(N, 3), torch.zeros(N)), batch_size=B)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ao.PrivacyEngine(plan, key=KEY).make_private(network, sgd(network[2].parameters()), loader)
