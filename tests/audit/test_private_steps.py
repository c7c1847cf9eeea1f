"""Clipping and noise as a step used them: Opacus's own ways are seen, and what is missing counts as no privacy."""

import json
import math
import shlex
import subprocess
import textwrap
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from anyorder.app.verdict_page import EXIT_CODES, outcome_of, promise_of, save_verdict
from anyorder.audit import private_steps
from anyorder.audit.loader_check import CLAIM, NOTHING, UNSURE, WHAT_IF, watch
from anyorder.audit.private_steps import FreshNumbers
from audit import checked

opacus = pytest.importorskip("opacus", reason="opacus is not installed")
from opacus.accountants import RDPAccountant  # noqa: E402
from opacus.optimizers import DPOptimizer  # noqa: E402
from opacus.utils.batch_memory_manager import BatchMemoryManager  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")
N, DELTA = 80, 1e-5


@pytest.fixture(autouse=True)
def near(monkeypatch):
    """Trainings as small as these draw few numbers."""
    monkeypatch.setattr(private_steps, "_FAR", 1 << 17)


def data(sources=N):
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(10 * torch.randn(sources, 20, generator=generator), torch.arange(sources) % 2)


class Training:
    """Two epochs of a model of 42 weights; what differs is put in its place."""

    def __init__(self, model=None, *, epsilon=None, noise=1.0, generator=None, **options):
        self.plain = nn.Linear(20, 2) if model is None else model
        self.sgd = torch.optim.SGD(self.plain.parameters(), lr=0.1)
        self.engine, self.criterion = opacus.PrivacyEngine(accountant="rdp"), F.cross_entropy
        given = {
            "module": self.plain,
            "optimizer": self.sgd,
            "data_loader": DataLoader(data(), 10, generator=generator),
        }
        given |= {"max_grad_norm": 1.3, **options}
        if epsilon is not None:
            given |= {"target_epsilon": epsilon, "target_delta": DELTA, "epochs": 2}
            made = self.engine.make_private_with_epsilon(**given)
        else:
            made = self.engine.make_private(noise_multiplier=noise, **given)
        self.model, self.optimizer, self.loader = made[0], made[1], made[-1]
        if not options.get("wrap_model", True):
            self.model = self.plain
        if len(made) == 4:
            self.criterion = made[2]

    def run(self, step=None, loader=None, epochs=2):
        for _ in range(epochs):
            for x, y in loader or self.loader:
                self.optimizer.zero_grad()
                self.criterion(self.model(x), y).backward()
                (step or self.optimizer.step)()
        return self


def seen_of(run, **options):
    with watch() as seen:
        run()
    [found] = seen.findings(delta=DELTA, **options)
    return found


def in_parts(training):
    with BatchMemoryManager(data_loader=training.loader, max_physical_batch_size=4, optimizer=training.optimizer) as it:
        training.run(loader=it)


def by_hand(training):
    """Per-example gradients by torch.func, in a module that Opacus does not hook."""
    weights = dict(training.plain.named_parameters())

    def loss(weights, x, y):
        return F.cross_entropy(torch.func.functional_call(training.plain, weights, (x[None],)), y[None])

    for x, y in training.loader:
        training.optimizer.zero_grad()
        rows = torch.func.vmap(torch.func.grad(loss), (None, 0, 0))(weights, x, y)
        for name, p in weights.items():
            p.grad_sample, p.grad = rows[name].detach(), torch.zeros_like(p)
        training.optimizer.step()


WAYS = {
    "make_private": lambda: Training().run(),
    "make_private_with_epsilon": lambda: Training(epsilon=3.0).run(),
    "functorch": lambda: Training(grad_sample_mode="functorch").run(),
    "without a wrapper": lambda: Training(wrap_model=False).run(),
    "ghost norms": lambda: Training(grad_sample_mode="ghost").run(),
    "per layer": lambda: Training(clipping="per_layer", max_grad_norm=[1.0, 0.5]).run(),
    "BatchMemoryManager": lambda: in_parts(Training()),
    "ghost norms in parts": lambda: in_parts(Training(grad_sample_mode="ghost")),
}


@pytest.mark.parametrize("way", WAYS)
def test_the_ways_of_opacus_are_seen_with_the_noise_that_they_used(way):
    found = seen_of(WAYS[way]).finding
    assert found.outcome == CLAIM
    assert found.holds, found
    assert "in all" in found.observed
    if way != "make_private_with_epsilon":
        assert found.noise_multiplier == 1.0
    norm = 1.11803 if way == "per layer" else 1.3
    assert f"clipped to norm {norm:g}" in found.observed


# -- what is missing ---------------------------------------------------------------------------------------------------


def half():
    """Half the noise, from below Opacus."""
    original = torch.normal
    torch.normal = lambda *args, **kwargs: original(*args, **kwargs) / 2
    try:
        Training().run()
    finally:
        torch.normal = original


def unclipped():
    """Opacus's clipping with another bound than it has when it draws the noise."""
    training = Training()
    original = training.optimizer.clip_and_accumulate

    def clip():
        training.optimizer.max_grad_norm = 13.0
        original()
        training.optimizer.max_grad_norm = 1.3

    training.optimizer.clip_and_accumulate = clip
    training.run()


def replaced_clip():
    training = Training()

    def clip():
        for p in training.optimizer.params:
            p.summed_grad = p.grad_sample.sum(0)

    training.optimizer.clip_and_accumulate = clip
    training.run()


def silent_noise():
    training = Training()

    def add_noise():
        for p in training.optimizer.params:
            p.grad = p.summed_grad.clone()

    training.optimizer.add_noise = add_noise
    training.run()


def rewritten():
    """The noise is drawn, and the gradients are put back before the model's optimizer applies them."""
    training = Training()
    training.optimizer.scale_grad = lambda: [p.grad.copy_(p.summed_grad / 10) for p in training.optimizer.params]
    training.run()


def stepped_twice():
    training = Training(poisson_sampling=False)

    def step():
        training.optimizer.step()
        training.plain.zero_grad()
        F.cross_entropy(training.plain(data()[:10][0]), data()[:10][1]).backward()
        training.sgd.step()

    training.run(step)


def own_class():
    class Mine(DPOptimizer):
        def add_noise(self):
            super().add_noise()
            for p in self.params:
                p.grad.copy_(p.summed_grad)

    training = Training()
    old = training.optimizer
    training.optimizer = Mine(training.sgd, noise_multiplier=1.0, max_grad_norm=1.3, expected_batch_size=10)
    training.optimizer.attach_step_hook(old.step_hook)
    training.run()


def the_same_noise():
    generator = torch.Generator()
    training = Training(noise_generator=generator)
    training.run(lambda: (generator.manual_seed(5), training.optimizer.step()))


def ghost_without_its_loss():
    training = Training(grad_sample_mode="ghost")
    training.criterion = F.cross_entropy
    training.run()


def pairs():
    """One gradient for two examples: the model joins them."""
    training = Training(poisson_sampling=False)
    original = training.model.forward
    training.model.forward = lambda x: original(x[::2] - x[1::2])
    training.criterion = lambda outputs, y: F.cross_entropy(outputs, y[::2])
    training.run()


def beside():
    training = Training()
    other = nn.Linear(20, 2)
    sgd = torch.optim.SGD(other.parameters(), lr=0.1)

    def step():
        training.optimizer.step()
        F.cross_entropy(other(data()[:10][0]), data()[:10][1]).backward()
        sgd.step()

    training.run(step)


def seeded():
    torch.manual_seed(torch.initial_seed())
    Training().run()


def own_generator():
    Training(noise_generator=torch.Generator()).run()  # whose seed is the same in every process


def drawn_from_a_known_seed():
    Training(generator=torch.Generator().manual_seed(8_675_309)).run()


def pretrained():
    """Without noise, on the same data, which no loader handed out."""
    training, (x, y) = Training(), data().tensors
    for _ in range(5):
        training.plain.zero_grad()
        F.cross_entropy(F.linear(x, training.plain.weight, training.plain.bias), y).backward()
        training.sgd.step()
    training.run()


def weights_by_hand():
    """The noise that was added is taken off the weights again."""
    training = Training()

    def step():
        training.optimizer.step()
        with torch.no_grad():
            for p in training.optimizer.params:
                p += 0.1 * (p.grad - p.summed_grad / 10)

    training.run(step)


def hooked():
    """The gradients are put back by a hook that runs after all that is watched."""
    training = Training()

    def put_back(*_):
        for p in training.optimizer.params:
            p.grad = p.summed_grad / 10

    training.sgd.register_step_pre_hook(put_back)
    training.run()


def ghost_and_a_plain_loss():
    training = Training(grad_sample_mode="ghost")
    for x, y in training.loader:
        training.optimizer.zero_grad()
        training.criterion(training.model(x), y).backward()
        (0.05 * F.cross_entropy(F.linear(x, training.plain.weight, training.plain.bias), y, reduction="sum")).backward()
        training.optimizer.step()


class Twice(nn.Module):
    """The forward pass reads a weight besides in its layer: ghost norms are the layer's alone."""

    def __init__(self):
        super().__init__()
        self.layer, self.head = nn.Linear(20, 20, bias=False), nn.Linear(20, 2)

    def forward(self, x):
        return self.head(F.linear(self.layer(x), self.layer.weight))


def ghost_and_a_weight_twice():
    Training(Twice(), grad_sample_mode="ghost").run()


FAULTS = {
    half: "smaller than", unclipped: "clipped to norm 13", replaced_clip: "no clipping", silent_noise: "no noise",
    rewritten: "no noise", stepped_twice: "had no privacy", own_class: "Mine cannot be observed",
    the_same_noise: "the same noise", ghost_without_its_loss: "no clipping", pairs: "one gradient for each example",
    beside: "adds no noise stepped too", seeded: "seed that the script sets",
    pretrained: "before any loader", weights_by_hand: "weights were changed", hooked: "a hook of",
    ghost_and_a_plain_loss: "no clipping", ghost_and_a_weight_twice: "no clipping",
    own_generator: "seed that the script sets", drawn_from_a_known_seed: "knows the batches",
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_what_is_missing_makes_the_claim_fail(fault):
    found = seen_of(fault).finding
    assert found.outcome == CLAIM
    assert not found.holds
    assert found.true > 5 * found.claimed
    assert FAULTS[fault] in str(found)


# -- what cannot be established ----------------------------------------------------------------------------------------


def by_loss(criterion, model=None, **options):
    """A training with another loss."""
    training = Training(model, **options)
    training.criterion = criterion
    training.run()


def each_loss(outputs, y):
    return F.cross_entropy(outputs, y, reduction="none")


def contrastive(outputs, y):
    rows = F.normalize(outputs, dim=1)
    return F.cross_entropy(rows @ rows.roll(1, 1).T / 0.1, torch.arange(len(rows)))


def batch_norm(outputs, y):
    return F.cross_entropy(F.batch_norm(outputs, None, None, training=True) if len(outputs) > 1 else outputs, y)


def statistics(outputs, y):
    return F.cross_entropy((outputs - outputs.mean(0)) / (outputs.detach().std(0) + 1), y)


def valid_ones(outputs, y):
    valid = outputs[:, 0] > 0
    return (each_loss(outputs, y) * valid).sum() / valid.sum().clamp(min=1)


def counted_ones(outputs, y):
    return each_loss(outputs, y).mean() / max(1, (outputs[:, 0] > 0).sum().item())


def of_earlier_batches():
    kept = []

    def criterion(outputs, y):
        drawn_to = sum((outputs.mean() * one.mean() for one in kept[-1:]), torch.zeros(()))
        kept.append(outputs.detach())
        return F.cross_entropy(outputs, y) + drawn_to

    by_loss(criterion)


def hooked_outputs(outputs, y):
    outputs = outputs * 1
    outputs.register_hook(lambda gradient: gradient - gradient.mean(0))
    return F.cross_entropy(outputs, y)


class Centred(nn.Module):
    def forward(self, x):
        return x - x.mean(0)


def centred():
    return nn.Sequential(nn.Linear(20, 2), Centred())


class Straight(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 1

    @staticmethod
    def backward(ctx, gradient):
        return gradient - gradient.mean(0)


def scaled_back():
    """The size of each gradient follows how many examples are of a class."""
    training = Training()
    for x, y in training.loader:
        training.optimizer.zero_grad()
        F.cross_entropy(training.model(x), y).backward(1 + y.sum().float())
        training.optimizer.step()


def by_hand_at_last():
    """Gradients that are not of the loss that was followed, after steps that were."""
    training = Training()
    for step, (x, y) in enumerate(training.loader):
        training.optimizer.zero_grad()
        if step < 3:
            F.cross_entropy(training.model(x), y).backward()
        else:
            for p in training.optimizer.params:
                p.grad_sample, p.grad = torch.randn(len(x), *p.shape), torch.zeros_like(p)
        training.optimizer.step()


def put_back():
    """The same numbers for the noise of each step, with others before, so that no step has the noise of another."""
    training, state, drawn = Training(), torch.get_rng_state(), iter(range(1, 1000))

    def step():
        now = torch.get_rng_state()  # for the batches
        torch.set_rng_state(state)
        torch.rand(next(drawn))
        training.optimizer.step()
        torch.set_rng_state(now)

    training.run(step)


MIXING = {
    "contrastive": (lambda: by_loss(contrastive), "rows of the batch together"),
    "batch norm in the loss": (lambda: by_loss(batch_norm), "batch normalisation"),
    "statistics of the batch": (lambda: by_loss(statistics), "sum over the batch"),
    "mean over valid ones": (lambda: by_loss(valid_ones), "sum over the batch"),
    "a count of valid ones": (lambda: by_loss(counted_ones), "a number in the loss differs"),
    "labels that do not count": (lambda: by_loss(nn.CrossEntropyLoss(ignore_index=1)), "labels that count"),
    "weights of classes": (lambda: by_loss(nn.CrossEntropyLoss(torch.tensor([1.0, 9.0]))), "weights of the classes"),
    "a sum for a mean": (lambda: by_loss(nn.CrossEntropyLoss(reduction="sum")), "not a mean over the examples"),
    "a mean for a sum": (lambda: by_loss(F.cross_entropy, loss_reduction="sum"), "not a sum over the examples"),
    "earlier batches": (of_earlier_batches, "an earlier batch"),
    "a hook": (lambda: by_loss(hooked_outputs), "a hook on a tensor"),
    "an own backward": (lambda: by_loss(lambda o, y: F.cross_entropy(Straight.apply(o), y)), "autograd.Function"),
    "a model that mixes": (
        lambda: by_loss(F.cross_entropy, nn.Sequential(nn.Linear(20, 2), Centred())),
        "sum over the batch",
    ),
    "gradients by hand": (lambda: by_hand(Training(grad_sample_mode="no_op")), "no loss.backward"),
    "a gradient of backward's": (scaled_back, "to backward() by hand"),
    "a sum by a number": (lambda: by_loss(lambda o, y: each_loss(o, y).sum() / 101), "not a mean over the examples"),
    "others' labels": (lambda: by_loss(lambda o, y: F.cross_entropy(o, y.flip(0))), "other rows than the scores"),
    "gradients by hand, later": (by_hand_at_last, "no loss.backward"),
    "no known rule": (lambda: by_loss(lambda o, y: F.cross_entropy(o, y) + torch.fft.rfft(o).abs().mean()), "no rule"),
    "generator put back": (put_back, "set anew between two steps"),
}


@pytest.mark.parametrize("name", MIXING)
def test_what_is_not_established_never_holds(name):
    run, words = MIXING[name]
    found = seen_of(run)
    assert found.finding.outcome == UNSURE, found
    assert found.finding.true == math.inf
    assert not found.finding.holds
    assert words in found.finding.because
    told = found.to_dict()
    assert (told["holds"], told["verdict"], told["true"]) == (False, UNSURE, None)
    assert outcome_of([told], 0) == UNSURE
    assert EXIT_CODES[UNSURE] == 5


class Images(nn.Module):
    """Layers of the usual models, on images of 4 x 5."""

    def __init__(self):
        super().__init__()
        self.convolution, self.norm = nn.Conv2d(1, 4, 3, padding=1), nn.GroupNorm(2, 4)
        self.dropout, self.head = nn.Dropout(0.2), nn.Linear(4, 2)

    def forward(self, x):
        x = F.pad(x.view(-1, 1, 4, 5), (0, 1, 0, 0))
        x = F.max_pool2d(F.relu(self.norm(self.convolution(x))), 2)
        return self.head(self.dropout(F.adaptive_avg_pool2d(x, 1).flatten(1)))


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.three, self.norm, self.head = nn.Linear(5, 12), nn.LayerNorm(4), nn.Linear(4, 2)

    def forward(self, x):
        q, k, v = (t.view(len(x), 4, 2, 2).transpose(1, 2) for t in self.three(x.view(-1, 4, 5)).chunk(3, -1))
        x = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(-1, 4, 4)
        return self.head(self.norm(x)[:, 0])


SINGLE = {
    "a sum by hand": (None, lambda o, y: F.cross_entropy(o, y, reduction="sum") / len(o)),
    "a factor of the batch size": (None, lambda o, y: each_loss(o, y).mean() * 10 / 10),
    "log-probabilities": (None, lambda o, y: -o.log_softmax(1).gather(1, y[:, None]).mean()),
    "squares and a penalty": (None, lambda o, y: F.mse_loss(o, F.one_hot(y, 2).float()) + 0.1 * o.square().mean()),
    "images": (Images, F.cross_entropy),
    "attention": (Attention, F.cross_entropy),
}


@pytest.mark.parametrize("name", SINGLE)
def test_losses_of_single_examples_are_known(name):
    model, criterion = SINGLE[name]
    found = seen_of(lambda: by_loss(criterion, model and model())).finding
    assert (found.outcome, found.holds) == (CLAIM, True), found


def test_a_gpu_counts_its_numbers_on():
    """The seed and the count of two steps' noise."""

    def state(seed, count):
        return torch.tensor([seed, count]).view(torch.uint8)

    assert private_steps._counts_on(state(5, 8), state(5, 8))
    assert private_steps._counts_on(state(5, 8), state(5, 12))
    assert not private_steps._counts_on(state(5, 8), state(5, 4))
    assert not private_steps._counts_on(state(5, 8), state(6, 12))


def drawn(stream, count=50, generator=None):
    stream.drawing(1.0, torch.zeros(count), generator)
    torch.normal(0.0, 1.0, (count,), generator=generator)
    stream.drawn(1.0, torch.zeros(count), generator)


@pytest.mark.parametrize("between", [0, 1, 623, 624, 5000])
@pytest.mark.parametrize("own", [False, True])
def test_noise_goes_on_where_other_noise_ended(own, between):
    generator = torch.Generator() if own else torch.default_generator
    stream = FreshNumbers()
    with torch.random.fork_rng(devices=[]):
        for _ in range(3):
            drawn(stream, generator=generator if own else None)
            state = generator.get_state()
            torch.rand(2 * between, generator=generator)  # of a validation, say, after which the state is put back
            generator.set_state(state)
            torch.rand(between, generator=generator)
        assert not stream.doubt


@pytest.mark.parametrize("new_seed", ["", "a seed", "a seed and noise"])
@pytest.mark.parametrize("before", [0, 7, 1000])
def test_numbers_of_earlier_noise_are_told(new_seed, before):
    stream = FreshNumbers()
    with torch.random.fork_rng(devices=[]):
        state = torch.get_rng_state()
        torch.rand(3)
        drawn(stream)
        if new_seed:
            torch.seed()
            stream.restart()
            if "noise" in new_seed:
                drawn(stream)
            assert not stream.doubt
        torch.set_rng_state(state)
        torch.rand(before)
        drawn(stream)
    assert ("set anew" in stream.doubt) == (bool(new_seed) or before < 50), before


def mnist():
    """The loop of pytorch's example."""
    model = nn.Sequential(nn.Linear(20, 8), nn.ReLU(), nn.Dropout(0.25), nn.Linear(8, 2))
    optimizer = torch.optim.Adadelta(model.parameters(), lr=1.0)
    train, test = data(), data(20)
    for _ in range(2):
        model.train()
        for x, y in DataLoader(train, 10, shuffle=True):
            optimizer.zero_grad()
            F.nll_loss(F.log_softmax(model(x), dim=1), y).backward()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            for x, _ in DataLoader(test, 10):
                model(x)


def plain(loader=None, clip=None, noise=0.0, closure=False, optimizer=torch.optim.SGD):
    model = nn.Linear(20, 2)
    optimizer = optimizer(model.parameters(), lr=0.1)
    for x, y in loader or DataLoader(data(), 10, shuffle=True):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        for p in model.parameters():
            p.grad += noise * torch.randn_like(p)
        optimizer.step(lambda loss=loss: loss) if closure else optimizer.step()


def made_and_not_used():
    """make_private, and the optimizer of before is stepped."""
    training = Training(poisson_sampling=False)
    training.model, training.optimizer = training.plain, training.sgd
    training.run()


WITHOUT = {
    "pytorch's mnist": mnist,
    "one pass, plain": plain,
    "batches clipped as a whole": lambda: plain(clip=1.0),
    "batches clipped, and noise by hand": lambda: plain(clip=1.0, noise=1.0),
    "Adam, with a closure": lambda: plain(closure=True, optimizer=torch.optim.Adam),
    "noise multiplier 0": lambda: Training(noise=0.0).run(),
    "an engine that nobody uses": made_and_not_used,
}


@pytest.mark.parametrize("name", WITHOUT)
def test_no_training_without_privacy_has_a_finite_epsilon(name):
    found = seen_of(WITHOUT[name])
    assert found.finding.outcome == NOTHING
    assert found.finding.true == math.inf
    assert not found.finding.holds
    told = found.to_dict()
    assert (told["holds"], told["true"], told["claimed"], told["verdict"]) == (False, None, None, NOTHING)
    assert "no private training was seen: epsilon is infinite" in str(found)
    asked = seen_of(WITHOUT[name], noise_multiplier=2.0)
    assert asked.finding.outcome == WHAT_IF
    assert asked.to_dict()["holds"] is False
    assert "Nothing is claimed" in str(asked)
    assert "the claim" not in str(asked)


def test_the_epsilon_is_read_from_whoever_is_asked():
    def own_accountant():
        model = nn.Linear(20, 2)
        wrapped, sgd = opacus.GradSampleModule(model), torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = DPOptimizer(sgd, noise_multiplier=2.0, max_grad_norm=1.0, expected_batch_size=10)
        accountant = RDPAccountant()
        optimizer.attach_step_hook(accountant.get_optimizer_hook_fn(sample_rate=1 / 8))
        for x, y in opacus.data_loader.DPDataLoader.from_data_loader(DataLoader(data(), 10)):
            optimizer.zero_grad()
            F.cross_entropy(wrapped(x), y).backward()
            optimizer.step()
        asked.append(accountant.get_privacy_spent(delta=DELTA)[0])

    for ask in (
        lambda engine: engine.get_epsilon(DELTA), lambda engine: engine.accountant.get_epsilon(delta=DELTA),
        lambda engine: engine.accountant.get_privacy_spent(delta=DELTA)[0],
    ):  # fmt: skip
        asked = []
        found = seen_of(lambda ask=ask, asked=asked: asked.append(ask(Training().run().engine)))
        assert found.printed == ((DELTA, asked[0]),)
        assert found.finding.claimed == asked[0]
    asked = []
    found = seen_of(own_accountant)
    assert found.printed == ((DELTA, asked[0]),)
    assert (found.finding.outcome, found.finding.noise_multiplier) == (CLAIM, 2.0)
    assert found.finding.holds


def test_an_epsilon_that_is_printed_of_a_plain_training_is_a_claim_that_fails():
    def printed():
        plain()
        accountant = RDPAccountant()
        accountant.history = [(1.0, 1 / 8, 8)]
        accountant.get_epsilon(DELTA)

    found = seen_of(printed).finding
    assert (found.outcome, found.true, found.holds) == (CLAIM, math.inf, False)
    with watch() as seen:  # no loader hands out what is trained on
        training = Training()
        training.run(loader=[tuple(data()[:10])])
        training.engine.get_epsilon(DELTA)
    [one] = seen.findings(delta=DELTA)
    assert (one.finding.outcome, one.finding.holds) == (CLAIM, False)


# -- the command -------------------------------------------------------------------------------------------------------

SCRIPT = """
    import sys, torch
    from torch.utils.data import DataLoader, TensorDataset

    secret = "17.0625"
    data = TensorDataset(torch.full((80, 20), float(secret)), torch.arange(80) % 2)
    loader, model = DataLoader(data, 10, shuffle=True), torch.nn.Linear(20, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    kind = sys.argv[1]
    if kind in ("poisson", "shuffled"):
        import opacus
        engine = opacus.PrivacyEngine(accountant="rdp")
        model, optimizer, loader = engine.make_private(module=model, optimizer=optimizer, data_loader=loader,
            noise_multiplier=1.0, max_grad_norm=1.0, poisson_sampling=kind == "poisson")
    for x, y in loader if kind != "nothing" else ():
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        print("a loss of", secret)
"""


@pytest.mark.parametrize(
    ("arguments", "code", "outcome"),
    [
        (["train.py", "poisson"], 0, "the claim holds"), (["train.py", "nothing"], 3, NOTHING),
        (["--noise-multiplier", "1", "train.py", "plain"], 4, WHAT_IF),
    ],
)  # fmt: skip
def test_the_command_has_an_exit_code_and_a_page_for_each_outcome(arguments, code, outcome, tmp_path):
    (tmp_path / "train.py").write_text(textwrap.dedent(SCRIPT))
    line = ["-W", "ignore", "-m", "anyorder", "check", "--json", "--out", "verdict", *arguments]
    done = checked.run(*line, cwd=tmp_path)
    assert done.returncode == code, done.stderr
    told = json.loads(done.stdout)
    assert told["outcome"] == outcome
    files = {path.name: path.read_text() for path in (tmp_path / "verdict").iterdir()}
    assert set(files) == {"verdict.html", "verdict.json", "verdict.md", "badge.svg"}
    assert json.loads(files["verdict.json"])["findings"] == told["findings"]
    for text in files.values():
        assert "17.06" not in text
        assert str(tmp_path) not in text
    assert outcome in files["verdict.html"]
    assert "http:" not in files["verdict.html"]
    assert ("holds" in files["badge.svg"]) == (code == 0)
    assert ("epsilon &lt;=" in files["verdict.html"]) == (outcome not in (NOTHING,))


@pytest.mark.parametrize(
    ("epsilon", "level", "ink", "banner"),
    [(2, "green", "#17693f", "good"), (8, "amber", "#8a5a00", "mid"), (348, "red", "#a3161f", "bad")],
)
def test_a_claim_that_holds_has_the_colour_of_its_promise(epsilon, level, ink, banner, tmp_path):
    """A run of epsilon 348 was shown in green."""
    finding = {"outcome": CLAIM, "holds": True, "true": float(epsilon), "claimed": float(epsilon), "delta": 1e-5}
    assert promise_of(finding)[0] == level
    assert promise_of(finding | {"holds": False}) is None
    assert promise_of(finding | {"outcome": WHAT_IF}) is None
    save_verdict(tmp_path, "train.py", 0, [finding, finding | {"true": 0.1, "claimed": 0.1}], [[], []])
    assert ink in (tmp_path / "badge.svg").read_text()
    assert f"banner {banner}" in (tmp_path / "verdict.html").read_text()


ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("script", "accept", "code", "outcome"),
    [
        ("private", "", 0, "the claim holds"),
        ("shuffled", "3 4", 1, "the claim does not hold"),
        ("plain", "3", 0, NOTHING),
    ],
)  # fmt: skip
def test_the_action_of_github_on_its_examples(script, accept, code, outcome, tmp_path):
    yaml = pytest.importorskip("yaml")
    action = yaml.safe_load((ROOT / "actions" / "check" / "action.yml").read_text())
    [step] = [one for one in action["runs"]["steps"] if one.get("id") == "check"]
    given = {name: spec.get("default", "") for name, spec in action["inputs"].items()}
    given |= {"script": str(ROOT / "examples" / "check" / f"{script}.py"), "accept": accept, "folder": "out"}
    named = {key: given[value.split(".")[1].strip(" }")] for key, value in step["env"].items()}
    files = {name: str(tmp_path / name) for name in ("GITHUB_OUTPUT", "GITHUB_STEP_SUMMARY")}
    done = subprocess.run(
        ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", step["run"]], cwd=tmp_path, check=False,
        env=checked.environment(tmp_path) | named | files, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == code, done.stderr
    told = dict(line.split("=", 1) for line in (tmp_path / "GITHUB_OUTPUT").read_text().splitlines())
    assert told == {"exit-code": str({"private": 0, "shuffled": 1, "plain": 3}[script]), "outcome": outcome}
    assert f"{script}.py: {outcome}" in (tmp_path / "GITHUB_STEP_SUMMARY").read_text()
    assert ("holds" in (tmp_path / "out" / "badge.svg").read_text()) == (script == "private")


def test_the_hook_of_pre_commit_fails_for_a_script_without_privacy(tmp_path):
    yaml = pytest.importorskip("yaml")
    [hook] = yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text())
    assert not hook["pass_filenames"]  # they would be taken for the script's arguments
    line = [*shlex.split(hook["entry"]), str(ROOT / "examples" / "check" / "plain.py")]
    done = subprocess.run(
        line, cwd=tmp_path, env=checked.environment(tmp_path), capture_output=True, text=True, check=False
    )
    assert done.returncode == 3, done.stderr
    assert done.stderr.splitlines()[-1] == "anyorder: no private training: epsilon is infinite"
