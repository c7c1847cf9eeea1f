"""Several networks and optimizers under one plan: one clip over all, one release a step, generator steps are free."""

import copy

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import anyorder as ao
from anyorder.errors import ArgumentError, ModelError, TrainingError
from training.test_passes import EPOCHS, B, N, assert_same, bound, by_loop, net

SGD, FTRL = torch.optim.SGD, ao.FTRL


def autoencoder(encoder, decoder, x, *_):
    return F.mse_loss(decoder(encoder(x)), x)


def variational(encoder, decoder, x, noise, _):
    mean, width = encoder(x).chunk(2, dim=1)
    return F.mse_loss(decoder(mean + noise[:, :1] * width.exp()), x) + mean.square().mean()


def thrice(encoder, decoder, x, other, _):
    """Codes that are made of codes, by three passes."""
    code = encoder(x)
    return F.mse_loss(decoder(code), other) + F.softplus(decoder(encoder(decoder(code)))).mean()


def actor_critic(actor, critic, state, _, gain):
    value = critic(state)[:, 0]
    chosen = actor(state).log_softmax(-1)[:, 0]
    return F.mse_loss(value, gain[:, 0]) - (chosen * (gain[:, 0] - value).detach()).mean()


SIZES = {autoencoder: (2, 4), variational: (2, 4), thrice: (4, 4), actor_critic: (3, 1)}


def two(loss):
    torch.manual_seed(4)
    first, second = SIZES[loss]
    inner = {variational: 1, actor_critic: 4}.get(loss, first)
    return net(4, first), net(inner, second), [torch.randn(N, 4) for _ in range(3)]


def train(loss, models, optimizers, loader):
    for _ in range(EPOCHS):
        for batch in loader:
            for optimizer in optimizers:
                optimizer.zero_grad()
            loss(*models, *batch).backward()
            for optimizer in optimizers:
                optimizer.step()


@pytest.mark.parametrize("loss", SIZES)
def test_two_networks_are_clipped_as_one(loss):
    one, other, tensors = two(loss)
    expected = by_loop(copy.deepcopy(nn.ModuleList([one, other])), lambda both, *rows: loss(*both, *rows), tensors)
    optimizers = [SGD(one.parameters(), 0.5), SGD(other.parameters(), 0.5)]
    models, made, loader = bound([one, other], *tensors, optimizer=optimizers)
    assert type(models) is list
    assert made is optimizers
    train(loss, models, optimizers, loader)
    assert_same(nn.ModuleList([one, other]), expected)


def test_one_optimizer_and_a_container_of_modules():
    one, other, tensors = two(autoencoder)
    both = nn.ModuleDict({"encoder": one, "decoder": other})
    expected = by_loop(copy.deepcopy(both), lambda m, *rows: autoencoder(m["encoder"], m["decoder"], *rows), tensors)
    models, optimizer, loader = bound(both, *tensors)
    assert list(models) == ["encoder", "decoder"]
    train(autoencoder, models.values(), [optimizer], loader)
    assert_same(both, expected)


def test_a_resume_goes_on_with_all_optimizers(tmp_path):
    def begin(path):
        one, other, tensors = two(autoencoder)
        rows = DataLoader(TensorDataset(*tensors), batch_size=B)
        plan = ao.plan(loader=rows, epochs=EPOCHS, epsilon=8, delta=1e-2)
        engine = ao.PrivacyEngine(plan, checkpoint=path, key=bytes(32))
        optimizers = [FTRL(one.parameters(), 0.1), SGD(other.parameters(), 0.1)]
        return engine, *engine.make_private([one, other], optimizers, rows)

    def epoch(models, optimizers, loader):
        for batch in loader:
            for optimizer in optimizers:
                optimizer.zero_grad()
            autoencoder(*models, *batch).backward()
            for optimizer in optimizers:
                optimizer.step()

    engine, *run = begin(tmp_path / "whole")
    for _ in range(2):
        epoch(*run)
    whole = [p.detach().clone() for model in run[0] for p in model.parameters()]
    engine.close()
    engine, *run = begin(tmp_path / "halves")
    epoch(*run)
    engine.save()
    engine.close()
    engine, *run = begin(tmp_path / "halves")
    epoch(*run)
    assert engine.step == 4
    assert all(map(torch.equal, whole, [p for model in run[0] for p in model.parameters()]))


def test_each_optimizer_steps_once_on_a_release():
    one, other, tensors = two(actor_critic)
    first, second = SGD(one.parameters(), 0.5), SGD(other.parameters(), 0.5)
    models, _, loader = bound([one, other], *tensors, optimizer=[first, second])
    for batch in loader:
        actor_critic(*models, *batch).backward()
        second.step()
        before = copy.deepcopy(other.state_dict())
        with pytest.raises(TrainingError, match="without a backward pass"):
            second.step()
        first.step()
        with pytest.raises(TrainingError, match="without a backward pass"):
            first.step()
        assert all(torch.equal(v, before[k]) for k, v in other.state_dict().items())
        break


def test_a_release_that_an_optimizer_left_out_is_not_owed_after_the_next_one():
    one, other, tensors = two(actor_critic)
    first, second = SGD(one.parameters(), 0.5), SGD(other.parameters(), 0.5)
    models, _, loader = bound([one, other], *tensors, optimizer=[first, second])
    batches = iter(loader)
    actor_critic(*models, *next(batches)).backward()
    first.step()
    before = [p.grad.clone() for p in other.parameters()]
    actor_critic(*models, *next(batches)).backward()
    second.step()  # of the new sums, which wait, and not of the release before
    assert not any(map(torch.equal, before, [p.grad for p in other.parameters()]))
    with pytest.raises(TrainingError, match="without a backward pass"):
        second.step()
    first.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
    with pytest.raises((ArgumentError, TrainingError)):
        first.step()


@pytest.mark.parametrize("order", [1, -1])
def test_no_optimizer_of_another_run_is_taken(order):
    one, other, tensors = two(actor_critic)
    bound(one, *tensors, optimizer=(used := SGD(one.parameters(), 0.5)))
    with pytest.raises(ArgumentError, match="another private run"):
        bound([one, other], *tensors, optimizer=[used, SGD(other.parameters(), 0.5)][::order])
    bfgs = torch.optim.LBFGS(one.parameters())
    with pytest.raises(ArgumentError, match="LBFGS"):
        bound([one, other], *tensors, optimizer=[bfgs, SGD(other.parameters(), 0.5)][::order])


@pytest.mark.parametrize("order", [1, -1])
def test_each_of_several_optimizers_belongs_to_its_run(order):
    one, other, tensors = two(actor_critic)
    optimizers = [SGD(one.parameters(), 0.5), SGD(other.parameters(), 0.5)][::order]
    bound([one, other], *tensors, optimizer=optimizers)
    for network, optimizer in ((one, optimizers[::order][0]), (other, optimizers[::order][1])):
        with pytest.raises(ArgumentError, match="another private run"):
            bound(network, *tensors, optimizer=optimizer)


class Uncopied(nn.Linear):
    def __deepcopy__(self, memo):
        raise RuntimeError("one of its kind")


@pytest.mark.parametrize("order", [1, -1])
def test_what_is_shown_of_a_model_is_shown_of_all_networks(order):
    """Of one that cannot be tried it is not known that it keeps nothing, whichever of them comes first."""
    networks = [nn.Linear(4, 1), Uncopied(4, 1)][::order]
    plan = ao.plan(dataset_size=N, batch_size=B, epochs=1, epsilon=8, delta=1e-2)
    engine = ao.PrivacyEngine(plan)
    optimizer = SGD([p for one in networks for p in one.parameters()], 0.5)
    models, _, loader = engine.make_private(networks, optimizer, DataLoader(TensorDataset(torch.randn(N, 4)), B))
    for (x,) in loader:
        sum(model(x).mean() for model in models).backward()
        optimizer.step()
    assert engine.training.isolation.model == "promised"


def test_a_network_that_is_given_twice_is_refused():
    one, _, tensors = two(actor_critic)
    with pytest.raises(ArgumentError, match="several different ones"):
        bound([one, one], *tensors, optimizer=SGD(one.parameters(), 0.5))


class Flipped(torch.autograd.Function):
    """Rows stay where they are, and their gradients do not."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient.flip(0)


def test_what_is_between_networks_must_keep_rows_apart():
    one, other, tensors = two(autoencoder)
    models, _, loader = bound([one, other], *tensors, optimizer=SGD([*one.parameters(), *other.parameters()], 0.5))
    gain = torch.ones(2, requires_grad=True)
    for x, *_ in loader:
        encoder, decoder = models
        for bad in (
            lambda z: z - z.mean(0),
            lambda z: z.flip(0),
            lambda z: torch.fft.fft2(z).real,
            lambda z: z.T @ z,
            Flipped.apply,
        ):
            with pytest.raises(ModelError):  # the decoder does not run
                decoder(bad(encoder(x)))
        with pytest.raises(ModelError, match="what came before the model would get a gradient"):
            decoder(encoder(x) * gain)
        break


def test_what_is_between_networks_is_not_run_again_row_by_row():
    """Nor may it be reached past what is followed: a hook on its node may give one example's gradient to another."""
    one, other, tensors = two(thrice)
    optimizer = SGD([*one.parameters(), *other.parameters()], 0.5)
    (encoder, decoder), _, loader = bound([one, other], *tensors, optimizer=optimizer)
    for x, *_ in loader:
        code = encoder(x)
        with pytest.raises(ModelError, match="what another made of that"):
            torch.linalg.vecdot(torch.fft.rfft(code).abs(), torch.fft.rfft(decoder(code)).abs()).mean().backward()
        twice = 2 * encoder(x)
        twice.grad_fn.register_hook(lambda gradients, _: tuple(g if g is None else g.flip(0) for g in gradients))
        with pytest.raises(ModelError, match="by a way that is not followed"):
            F.mse_loss(decoder(twice), x).backward()
        break


def test_what_a_network_made_of_an_earlier_batch_is_not_given_to_another():
    one, other, tensors = two(autoencoder)
    optimizer = SGD([*one.parameters(), *other.parameters()], 0.5)
    (encoder, decoder), _, loader = bound([one, other], *tensors, optimizer=optimizer)
    kept = []
    for x, *_ in loader:
        if kept:
            with pytest.raises(ModelError, match="must not require gradients"):
                decoder(kept[0])
            break
        kept.append(encoder(x))
        F.mse_loss(decoder(kept[0]), x).backward()
        optimizer.step()


def test_networks_in_a_row_do_not_go_with_public_lengths():
    plan = ao.plan(dataset_size=N, batch_size=B, epochs=1, epsilon=8, delta=1e-2)
    texts = [torch.randint(1, 7, (2 + i % 5,)) for i in range(N)]
    networks = [nn.Embedding(7, 6), nn.Linear(6, 2)]
    optimizer = SGD([p for one in networks for p in one.parameters()], 0.5)
    rows = DataLoader(texts, batch_size=B, collate_fn=lambda rows: (torch.stack(rows),))
    (encoder, decoder), _, loader = ao.PrivacyEngine(plan).make_private(networks, optimizer, rows, pad_to=(4, 8))
    for (ids,) in loader:
        with pytest.raises(TrainingError, match="pad_to"):
            decoder(encoder(ids))
        break


@pytest.mark.parametrize("models", [[], [nn.Linear(1, 1), 3], "model", nn.ModuleList([])])
def test_what_is_no_list_of_networks(models):
    with pytest.raises(ArgumentError, match="model must be"):
        bound(models, torch.randn(N, 1), optimizer=SGD([nn.Parameter(torch.zeros(1))], 0.1))


# -- generators --------------------------------------------------------------------------------------------------------


def adversaries():
    torch.manual_seed(5)
    return net(4, 1), net(3, 4), torch.randn(N, 4)


def of_discriminator(network, real, fake):
    return F.softplus(-network(real)).mean() + F.softplus(network(fake)).mean()


def test_a_generator_trains_through_the_released_discriminator():
    judge, maker, data = adversaries()
    fakes = []
    expected, other_maker = copy.deepcopy(judge), copy.deepcopy(maker)
    private, optimizer, loader = bound(judge, data)
    own = SGD(maker.parameters(), 0.5)
    releases = []
    for _ in range(EPOCHS):
        for (x,) in loader:
            noise = torch.randn(len(x), 3)
            fakes.append(noise)
            optimizer.zero_grad()
            of_discriminator(private, x, maker(noise).detach()).backward()
            optimizer.step()
            releases.append([p.grad.clone() for p in judge.parameters()])
            own.zero_grad()
            F.softplus(-private(maker(noise))).mean().backward()
            own.step()
            assert all(map(torch.equal, releases[-1], [p.grad for p in judge.parameters()]))
    # the same by hand
    optimizer, own = SGD(expected.parameters(), 0.5), SGD(other_maker.parameters(), 0.5)
    for step, noise in enumerate(fakes):
        x, fake = data[step * B % N :][:B], other_maker(noise).detach()
        total = [torch.zeros_like(p) for p in expected.parameters()]
        for i in range(B):
            value = of_discriminator(expected, x[i : i + 1], fake[i : i + 1])
            gradients = torch.autograd.grad(value, list(expected.parameters()))
            size = float(torch.sqrt(sum(g.square().sum() for g in gradients)))
            total = [t + g * min(1.0, 0.5 / size) for t, g in zip(total, gradients, strict=True)]
        for p, t in zip(expected.parameters(), total, strict=True):
            p.grad = t / B
        optimizer.step()
        own.zero_grad()
        F.softplus(-expected(other_maker(noise))).mean().backward()
        own.step()
    assert_same(judge, expected)
    assert_same(maker, other_maker)


@pytest.mark.parametrize("rows", [B, B + 3], ids=["as many rows", "other rows"])
def test_a_generator_in_the_list_is_said_to_stay_outside(rows):
    judge, maker, data = adversaries()
    optimizer = SGD([*judge.parameters(), *maker.parameters()], 0.5)
    (private, made), _, loader = bound([judge, maker], data, optimizer=optimizer)
    for (x,) in loader:
        with pytest.raises((TrainingError, ArgumentError), match="it stays outside: give make_private the discrim"):
            for _ in range(2):  # the discriminator's step, and the generator's
                of_discriminator(private, x, made(torch.randn(rows, 3)).detach()).backward()
        break


def test_a_generator_step_that_touches_the_data_is_refused():
    judge, maker, data = adversaries()
    private, optimizer, loader = bound(judge, data)

    def matching(x):
        with torch.no_grad():
            real = private(x)
        return F.mse_loss(private(maker(torch.randn(len(x), 3))), real)

    def nearest(x):
        return private(maker(torch.randn(len(x), 3)) - x).mean()

    def outside(x):
        return private(maker(torch.randn(len(x), 3))).mean() + maker(torch.ones(1, 3)).sum() * x.mean()

    for (x,) in loader:
        with pytest.raises(ModelError, match="generator"):  # one that was not detached
            of_discriminator(private, x, maker(torch.randn(len(x), 3))).backward()
        for used in (False, True):
            for bad in (matching, nearest, outside):
                with pytest.raises(ModelError, match=r"generator's|must not require gradients|earlier batch"):
                    bad(x).backward()
                assert all(p.grad is None for p in maker.parameters())
                with pytest.raises(ModelError, match=r"generator's|must not require gradients|earlier batch"):
                    torch.autograd.grad(bad(x), list(maker.parameters()))
            if not used:
                of_discriminator(private, x, maker(torch.randn(len(x), 3)).detach()).backward()
                optimizer.step()
        break


class Conditional(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = net(5, 1)

    def forward(self, x, label):
        return self.net(torch.cat([x, label], 1))


def test_a_generator_is_not_trained_on_the_labels_of_a_batch():
    """What it made is of no batch, and another argument is."""
    private, _, loader = bound(Conditional(), torch.randn(N, 4), torch.randn(N, 1))
    maker = net(3, 4)
    for x, label in loader:
        made = maker(torch.randn(len(x), 3))
        for given, named in (((made, label), {}), ((made,), {"label": label})):
            with pytest.raises(ModelError, match="must not require gradients"):
                private(*given, **named)
        break


class Keeping(nn.Module):
    """A discriminator that keeps its features where it is not trained."""

    def __init__(self):
        super().__init__()
        self.first, self.last, self.kept = nn.Linear(4, 5), nn.Linear(5, 1), None

    def forward(self, x):
        features = self.first(x).tanh()
        if not self.training:
            self.kept = features
        return self.last(features)


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, fake, x):
        ctx.x = x
        return fake.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.x[:, :1], None


def kept_by_a_hook(private, fake, x, looks):
    kept = []
    private.module.first.register_forward_hook(lambda module, given, output: kept.append(output))
    looks(private, x)
    private(fake)
    return F.mse_loss(kept[1].mean(0), kept[0].mean(0))


def kept_and_public(private, fake, x, looks):
    """The features of the generated rows alone: no number of a batch, but a way that nobody follows."""
    kept = []
    private.module.first.register_forward_hook(lambda module, given, output: kept.append(output))
    return private(fake).mean() + kept[0].mean()


def kept_as_weight(private, fake, x, looks):
    kept = []
    handle = private.module.first.register_forward_hook(lambda module, given, output: kept.append(output))
    looks(private, x)
    handle.remove()
    return private(fake).mean() * kept[0].mean()


def kept_as_attribute(private, fake, x, looks):
    private.eval()(x)
    real = private.module.kept
    private(fake)
    return F.mse_loss(private.module.kept, real)


def by_a_part(private, fake, x, looks):
    return F.mse_loss(private.module.first(fake).mean(0), private.module.first(x).mean(0).detach())


def of_the_batch_alone(private, fake, x, looks):
    return F.mse_loss(fake, x)


def hook(private, fake, x, looks):
    fake.register_hook(lambda gradient: gradient * x[0, 0])
    return private(fake).mean()


def hook_by_a_number(private, fake, x, looks):
    fake.register_hook(lambda gradient: gradient * round(float(x.detach().sum()), 3))
    return private(fake).mean()


def hook_by_an_item(private, fake, x, looks):
    total = x.sum()
    fake.register_hook(lambda gradient: gradient * float(str(total.item())))
    return private(fake).mean()


def hook_by_a_branch(private, fake, x, looks):
    total = x.sum()
    fake.register_hook(lambda gradient: gradient * (2.0 if total > 0 else 1.0))
    return private(fake).mean()


def own_function(private, fake, x, looks):
    return Scaled.apply(private(fake), x).mean()


def own_function_before(private, fake, x, looks):
    return private(Scaled.apply(fake, x)).mean()


def alias_of_a_constant(private, fake, x, looks):
    constant = torch.ones(())
    loss = (private(fake) * constant).mean()
    constant.data.copy_(x.mean())
    return loss


def alias_of_what_made_it(private, fake, x, looks):
    constant = torch.ones(())
    made = fake * constant
    constant.data.copy_(x.mean())
    return private(made).mean()


def memory_of_a_constant(private, fake, x, looks):
    constant = torch.ones(())
    loss = (private(fake) * constant).mean()
    constant.data = x.mean()
    return loss


def memory_of_what_made_it(private, fake, x, looks):
    constant = torch.ones(B, 1)
    made = fake * constant
    constant.data = x[:, :1]
    return private(made).mean()


def memory_of_an_output(private, fake, x, looks):
    outputs = private(fake)
    loss = (outputs * outputs).mean()
    outputs.data = x[:, : outputs.shape[1]]
    return loss


def array_of_a_constant(private, fake, x, looks):
    array = np.ones((), np.float32)
    constant = torch.as_tensor(array)
    loss = (private(fake) * constant).mean()
    torch.from_numpy(array).copy_(x.mean())
    return loss


def data_of_an_output(private, fake, x, looks):
    outputs = private(fake)
    loss = (outputs * outputs).mean()
    outputs.data.copy_(x[:, : outputs.shape[1]])
    return loss


def without(private, x):
    with torch.no_grad():
        private(x)


def evaluated(private, x):
    private.eval()(x)
    private.train()


def backward(loss, inputs, x):
    loss.backward()


def grad(loss, inputs, x):
    torch.autograd.grad(loss, inputs)


def of_the_batch(loss, inputs, x):
    loss.backward(gradient=x.mean())


def several(loss, inputs, x):
    torch.autograd.backward([loss], [x.mean()])


def grad_of_the_batch(loss, inputs, x):
    torch.autograd.grad(loss, inputs, grad_outputs=x.mean())


def score(private, fake, x, looks):
    return private(fake).mean()


WAYS = [
    *((f, g, without) for f in (kept_as_weight, hook, hook_by_a_number, own_function) for g in (backward, grad)),
    (kept_by_a_hook, backward, without),
    (hook_by_an_item, backward, without),
    (hook_by_a_branch, grad, without),
    *((f, backward, evaluated) for f in (kept_by_a_hook, kept_as_weight)),
    *((f, backward, without) for f in (by_a_part, of_the_batch_alone)),
    *(
        (f, g, without)
        for f in (
            alias_of_a_constant,
            alias_of_what_made_it,
            memory_of_a_constant,
            memory_of_what_made_it,
            memory_of_an_output,
            array_of_a_constant,
            data_of_an_output,
        )
        for g in (backward, grad)
    ),
    *((f, backward, without) for f in (kept_as_attribute, kept_and_public, own_function_before)),
    *((score, g, without) for g in (of_the_batch, several, grad_of_the_batch)),
]


@pytest.mark.parametrize(("way", "back", "looks"), WAYS)
@pytest.mark.parametrize("used", [False, True], ids=["", "after the private step"])
def test_private_numbers_do_not_train_a_generator(way, back, looks, used):
    torch.manual_seed(5)
    maker = net(3, 4)
    private, optimizer, loader = bound(Keeping(), torch.randn(N, 4))
    for (x,) in loader:
        if used:
            of_discriminator(private, x, maker(torch.randn(B, 3)).detach()).backward()
            optimizer.step()
        with pytest.raises(ModelError, match=r"generator|without noise|sees the gradients of all"):
            back(way(private, maker(torch.ones(B, 3)), x, looks), list(maker.parameters()), x)
        assert all(p.grad is None for p in maker.parameters())
        break


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam])
@pytest.mark.parametrize("foreach", [False, True])
def test_no_optimizer_takes_gradients_of_the_batch_to_another_network(kind, foreach):
    """Gradients may be looked at, and are known as the batch's where they are put in place by hand."""
    maker = net(3, 4)
    _, _, loader = bound(net(4, 1), torch.randn(N, 4))
    (x,) = next(iter(loader))
    before, other = copy.deepcopy(maker.state_dict()), kind(maker.parameters(), 0.1, foreach=foreach)
    gradients = torch.autograd.grad(F.mse_loss(maker(torch.ones(B, 3)), x), list(maker.parameters()))
    for p, gradient in zip(maker.parameters(), gradients, strict=True):
        p.grad = gradient
    with pytest.raises(ModelError, match=r"without noise|list of tensors"):
        other.step()
    assert all(torch.equal(v, before[k]) for k, v in maker.state_dict().items())


def test_a_generator_step_by_all_ways_that_are_followed():
    """In place in the model, a second loss, an accumulated sum, autograd.grad, twice: the gradients of torch."""
    torch.manual_seed(5)
    judge, maker = nn.Sequential(nn.ReLU(inplace=True), net(4, 1)), net(3, 4)
    expected, noise = nn.Sequential(nn.ReLU(), copy.deepcopy(judge[1])), torch.randn(7, 3)

    def loss(network, fake):
        total = torch.zeros(())
        total += F.softplus(-network(fake)).mean() + fake.square().mean()
        return total + torch.stack([network(2 * fake).sum(), network(fake[:3]).mean()]).sum()

    def gradients(network):
        return torch.autograd.grad(loss(network, maker(noise)), list(maker.parameters()))

    private, _, loader = bound(judge, torch.randn(N, 4))
    next(iter(loader))
    for own, other in zip(gradients(private), gradients(expected), strict=True):
        torch.testing.assert_close(own, other)
    total = loss(private, maker(noise))
    total.backward(retain_graph=True)
    total.backward()
    for p, other in zip(maker.parameters(), gradients(expected), strict=True):
        torch.testing.assert_close(p.grad, 2 * other)
    assert all(p.grad is None for p in judge.parameters())


def test_a_critics_weights_may_be_clipped_after_each_step():
    """As in WGAN: a public bound on released weights, and the next pass reads them."""
    torch.manual_seed(5)
    critic, maker, data = net(4, 1), net(3, 4), torch.randn(N, 4)
    private, optimizer, loader = bound(critic, data)
    for (x,) in loader:
        (private(maker(torch.randn(len(x), 3)).detach()).mean() - private(x).mean()).backward()
        optimizer.step()
        optimizer.zero_grad()
        for p in private.parameters():
            p.data.clamp_(-0.01, 0.01)
    with torch.no_grad():
        torch.testing.assert_close(private(data), critic(data))
    assert all(p.abs().max() <= 0.01 for p in critic.parameters())


@pytest.mark.parametrize("cast", [Tensor.type_as, Tensor.to], ids=["type_as", "to"])
def test_a_generator_may_have_the_dtype_of_a_batch(cast):
    """`noise.type_as(images)` takes no number of a batch; the numbers of one, cast in the same way, stay refused."""
    torch.manual_seed(5)
    judge, maker = net(4, 1), net(3, 4)
    expected, noise = copy.deepcopy(judge), torch.randn(7, 3)
    private, _, loader = bound(judge, torch.randn(N, 4))
    (x,) = next(iter(loader))
    ones = torch.ones(7, 1, dtype=torch.float64)
    F.mse_loss(private(maker(cast(noise.double(), x))), cast(ones, x)).backward()
    own = [p.grad for p in maker.parameters()]
    other = torch.autograd.grad(F.mse_loss(expected(maker(noise)), ones.float()), list(maker.parameters()))
    for a, b in zip(own, other, strict=True):
        torch.testing.assert_close(a, b)
    for target in (cast(x, ones), cast(x[:, :1], x)):
        with pytest.raises(ModelError, match=r"generator|without noise"):
            F.mse_loss(private(maker(torch.ones(B, 3))), target[:, :1]).backward()


class Penalised(nn.Module):
    """The losses of WGAN-GP, example by example, in one forward."""

    def __init__(self):
        super().__init__()
        self.judge = net(4, 1)

    def forward(self, real, fake, share):
        mixed = share * real + (1 - share) * fake
        slope = torch.func.grad(lambda x: self.judge(x).sum())(mixed)
        return self.judge(fake) - self.judge(real) + 10 * (slope.norm(dim=1, keepdim=True) - 1).square()


def test_a_gradient_penalty_inside_of_forward():
    torch.manual_seed(6)
    model, tensors = Penalised(), [torch.randn(N, 4), torch.randn(N, 4), torch.rand(N, 1)]
    expected = by_loop(copy.deepcopy(model), lambda m, *rows: m(*rows).mean(), tensors)
    private, optimizer, loader = bound(model, *tensors)
    train(lambda m, *rows: m(*rows).mean(), [private], [optimizer], loader)
    assert_same(model, expected)


def test_a_gradient_penalty_outside_of_forward_says_what_to_do():
    judge, maker, data = adversaries()
    private, _, loader = bound(judge, data)
    for (x,) in loader:
        mixed = (0.5 * x + 0.5 * maker(torch.randn(len(x), 3)).detach()).requires_grad_()
        with pytest.raises(ModelError, match=r"torch\.func\.grad inside of forward"):
            torch.autograd.grad(private(mixed).sum(), mixed, create_graph=True)
        with pytest.raises(TrainingError, match="Add the losses"):
            private(x).mean().backward()
            private(maker(torch.randn(len(x), 3)).detach()).mean().backward()
        break


def test_what_an_evaluation_gave_of_an_earlier_batch_does_not_come_into_a_loss():
    """A memory bank, as of negatives: units of earlier batches would move the gradients of later ones."""
    model, bank = net(), []
    private, optimizer, loader = bound(model, torch.randn(N, 4))
    for (x,) in loader:
        if bank:
            with pytest.raises(ModelError, match="earlier batch"):
                F.mse_loss(private(x), bank[0]).backward()
            break
        private(x).mean().backward()
        optimizer.step()
        with torch.no_grad():
            bank.append(private(x))


def test_tensors_made_of_words_are_no_generators():
    """What is made of a batch that is not followed is taken for the batch, and may not need gradients."""
    judge, maker, _ = adversaries()
    plan = ao.plan(dataset_size=N, batch_size=B, epochs=1, epsilon=8, delta=1e-2)
    loader = DataLoader([{"x": torch.zeros(1), "word": "word"}] * N, batch_size=B)
    private, _, loader = ao.PrivacyEngine(plan).make_private(judge, SGD(judge.parameters(), 0.5), loader)
    for batch in loader:
        embedded = maker(torch.tensor([[float(len(word))] * 3 for word in batch["word"]]))
        with pytest.raises(ModelError, match="must not require gradients"):
            private(embedded)
        break
