"""Scripts that call the model several times in a step: one clipped gradient a unit is released, or they are refused."""

import collections
import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader, TensorDataset

import anyorder as ao
from anyorder.clipping.coupling import LossWatch
from anyorder.errors import ModelError, TrainingError
from anyorder.plan.planner import plan_at_sigma

N, B, EPOCHS = 12, 6, 2


def bound(model, *tensors, optimizer=None, clip_norm=0.5, **options):
    """(model, optimizer, loader) of a run without noise to speak of, made private."""
    plan = plan_at_sigma(
        1e-9, dataset_size=N, batch_size=B, epochs=EPOCHS, delta=1e-5, clip_norm=clip_norm, mechanism="independent"
    )
    optimizer = torch.optim.SGD(model.parameters(), 0.5) if optimizer is None else optimizer
    engine = ao.PrivacyEngine(plan, key=bytes(32))
    return engine.make_private(model, optimizer, DataLoader(TensorDataset(*tensors), batch_size=B), **options)


def net(inputs=4, outputs=3):
    return nn.Sequential(nn.Linear(inputs, 5), nn.Tanh(), nn.Linear(5, outputs))


def by_loop(model, loss, tensors, clip_norm=0.5):
    """The training of `bound`, one example at a time, by plain autograd."""
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    parameters = list(model.parameters())
    for start in [0, B] * EPOCHS:
        total = [torch.zeros_like(p) for p in parameters]
        for i in range(start, start + B):
            value = loss(model, *(t[i : i + 1] for t in tensors))
            gradients = torch.autograd.grad(value, parameters, allow_unused=True, materialize_grads=True)
            size = torch.sqrt(sum(g.square().sum() for g in gradients))
            total = [
                t + g * min(1.0, clip_norm / max(float(size), 1e-30)) for t, g in zip(total, gradients, strict=True)
            ]
        for p, t in zip(parameters, total, strict=True):
            p.grad = t / B
        optimizer.step()
    return model


def assert_same(model, expected):
    for own, other in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(own, other, atol=2e-5, rtol=2e-5)


def triplet(model, anchor, positive, negative):
    return F.triplet_margin_loss(model(anchor), model(positive), model(negative), margin=2.0)


def siamese(model, pair, _, __):
    distance = (model(pair) - model(pair.roll(1, 1))).square().sum(1)
    return F.relu(2.0 - distance).mean() + distance.mean()


def consistency(model, x, shift, _):
    """Two copies of one example; the first one teaches."""
    return F.mse_loss(model(x + shift), model(x).detach()) + model(x).square().mean()


def masked(model, x, other, _):
    """A view of which a mask of the same rows, and then public places, are set to a number."""
    view = x.clone()
    view[other > 0] = 0.5
    view[:, torch.tensor([0, 2])] = 0.25
    return F.mse_loss(model(view), model(x).detach()) + model(x).square().mean()


def rowwise(model, x, other, _):
    """No rule knows how this joins the passes: it is run again row by row."""
    return torch.linalg.vecdot(torch.fft.rfft(model(x)).abs(), torch.fft.rfft(model(other)).abs()).mean()


@pytest.mark.parametrize("loss", [triplet, siamese, consistency, masked, rowwise])
def test_the_gradient_is_that_of_all_passes_clipped_once(loss):
    torch.manual_seed(1)
    tensors = [torch.randn(N, 4) for _ in range(3)]
    model = net()
    expected = by_loop(copy.deepcopy(model), loss, tensors)
    private, optimizer, loader = bound(model, *tensors)
    for _ in range(EPOCHS):
        for batch in loader:
            optimizer.zero_grad()
            loss(private, *batch).backward()
            optimizer.step()
    assert_same(model, expected)


@pytest.mark.parametrize(
    "write",
    [
        lambda view, x: view.__setitem__(x.roll(1, 0) > 0, 0.0),
        lambda view, x: view.__setitem__(x > 0, torch.arange(float((x > 0).sum()))),  # by how many stand before
        lambda view, x: view.__setitem__(x > 0, x.sum()),
        lambda view, x: view.__setitem__((torch.arange(B), x[:, 0].argsort() % 4), 0.0),
        lambda view, x: view.__setitem__((slice(None), x[0] > 0), 0.0),
    ],
)
def test_a_view_that_is_written_by_other_rows_is_no_second_pass(write):
    private, _, loader = bound(net(), torch.randn(N, 4))
    (x,) = next(iter(loader))
    view = x.clone()
    with pytest.raises(ModelError):
        write(view, x)
        F.mse_loss(private(view), private(x)).backward()


@pytest.mark.parametrize(
    "write",
    [
        lambda view, x: view.__setitem__(x > -1e9, x[2, 0]),
        lambda view, x: view.__setitem__((slice(None), x[2] > 0), 5.0),
        lambda view, x: view.__setitem__((x[2:3] > 0).expand(B, 4), 5.0),
        lambda view, x: view.__setitem__(x.roll(1, 0) > 0, 9.0),
    ],
)
def test_what_other_rows_wrote_is_given_to_no_model(write):
    private, _, loader = bound(net(), torch.randn(N, 4))
    (x,) = next(iter(loader))
    view = x.clone()
    with pytest.raises(ModelError, match="numbers written into rows"):
        write(view, x)
        private(view)


class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(7, 6), nn.Linear(6, 7)

    def forward(self, ids):
        return self.head(self.table(ids).cumsum(1))


def test_preferences_with_a_frozen_reference():
    torch.manual_seed(2)
    model, pairs = Words(), [torch.randint(7, (N, 4)) for _ in range(2)]
    reference = copy.deepcopy(model).requires_grad_(False)

    def of(network, text):
        scores = network(text[:, :-1]).log_softmax(-1)
        return scores.gather(2, text[:, 1:, None]).squeeze(2).sum(1)

    def loss(network, chosen, rejected):
        with torch.no_grad():
            margin = of(reference, chosen) - of(reference, rejected)
        return -F.logsigmoid(of(network, chosen) - of(network, rejected) - margin).mean()

    expected = by_loop(copy.deepcopy(model), loss, pairs)
    private, optimizer, loader = bound(model, *pairs)
    for _ in range(EPOCHS):
        for batch in loader:
            optimizer.zero_grad()
            loss(private, *batch).backward()
            optimizer.step()
    assert_same(model, expected)


def test_each_pass_has_a_mask_of_its_own():
    private, _, loader = bound(nn.Sequential(nn.Dropout(0.5), *net()), torch.randn(N, 4))
    for (x,) in loader:
        assert not torch.equal(private(x), private(x))


OTHERS = {
    "distances to other examples": lambda model, x: F.mse_loss(model(x), model(x[torch.randperm(len(x))])),
    "sums that never meet": lambda model, x: model(x).mean() + model(x.flip(0)).square().mean(),
    "rolled": lambda model, x: model(x).mean() + model(x.roll(1, 0)).square().mean(),
    "one call": lambda model, x: model(x, x.flip(0)).mean(),
    "columns": lambda model, x: model(x[:, :B].T.contiguous()).mean(),
    "a sum over the batch": lambda model, x: model((x.T @ x)[:B, :]).mean(),
}


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = net(B)

    def forward(self, x, other=None):
        return self.net(x if other is None else x - other)


@pytest.mark.parametrize("name", OTHERS)
def test_rows_in_another_order_are_refused(name):
    model = Pair()
    before = copy.deepcopy(model.state_dict())
    private, _, loader = bound(model, torch.randn(N, B))
    for (x,) in loader:
        with pytest.raises(ModelError, match=r"two orders|does not go over the examples"):
            OTHERS[name](private, x).backward()
        break
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_two_batches_of_a_step_are_no_passes_over_one():
    """One backward pass over both: each unit of either batch is clipped by itself."""
    torch.manual_seed(7)
    found, x = [], torch.randn(N, 4)
    for at_once in (False, True):
        torch.manual_seed(8)
        model = net()
        plan = plan_at_sigma(
            1e-9, dataset_size=N, batch_size=N, epochs=1, delta=1e-5, clip_norm=0.5, mechanism="independent"
        )
        loader = DataLoader(TensorDataset(x), batch_size=B)
        engine = ao.PrivacyEngine(plan, key=bytes(32))
        private, optimizer, loader = engine.make_private(
            model, torch.optim.SGD(model.parameters(), 0.5), loader, accumulate=2
        )
        losses = []
        for (batch,) in loader:
            losses.append(private(batch).square().mean())
            if not at_once:
                losses.pop().backward()
        if at_once:
            sum(losses).backward()
        optimizer.step()
        found.append(model)
    assert_same(*found)


class Held(nn.Module):
    """Takes its rows out of whatever holds them."""

    def __init__(self):
        super().__init__()
        self.net = net(B)

    def forward(self, held):
        return self.net(pytree.tree_leaves(held)[0])


Rows = collections.namedtuple("Rows", "x")
HOLDERS = {
    "ordered dict": lambda x: collections.OrderedDict(x=x),
    "default dict": lambda x: collections.defaultdict(list, x=x),
    "deque": lambda x: collections.deque([x]),
    "named tuple": Rows,
    "nested": lambda x: [{"a": Rows(collections.OrderedDict(x=x))}],
}


@pytest.mark.parametrize("holder", HOLDERS)
def test_what_a_container_holds_is_looked_at(holder):
    hold = HOLDERS[holder]
    private, _, loader = bound(Held(), torch.randn(N, B))
    for (x,) in loader:
        with pytest.raises(ModelError, match="takes rows of the batch together"):
            private(hold(x - x.sum(0)))
        private(hold(x))
        with pytest.raises(ModelError, match="two orders"):
            private(hold(x.roll(1, 0)))


UNTOLD = {
    "a number": lambda x: torch.ones(B, B) * x.sum().item(),
    "a named tuple of tensors": lambda x: torch.cat(Rows(x - x.sum(0)), 1),
    "a structure of torch": lambda x: torch.stack((x - x.sum(0)).t().contiguous().aminmax(dim=0), 1).repeat(1, B // 2),
    "no rule": lambda x: torch.fft.fft(x, dim=0).real,
    "a transposed reshape": lambda x: x.t().reshape(B, B),
}


@pytest.mark.parametrize("name", UNTOLD)
def test_what_was_made_of_the_batch_is_not_taken_for_rows(name):
    private, _, loader = bound(net(B), torch.randn(N, B))
    for (x,) in loader:
        private(x)
        with pytest.raises(
            ModelError, match=r"taken out of the batch|rows of the batch together|not known|does not go over"
        ):
            private(UNTOLD[name](x))


NOISE = torch.linspace(-1, 1, B * 4).reshape(B, 4)
BY_ROW = {
    "fft": lambda x: torch.fft.fft(x).real,
    "a noise for each row": lambda x: torch.fft.fft(x + NOISE).real,
    "a noise of the batch's shape": lambda x: torch.fft.fft(x + torch.zeros_like(x).copy_(NOISE)).real,
    "some rows flipped": lambda x: torch.where(NOISE[:, :1] > 0, x, x.flip(1)).quantile(0.5, 1, True) + x,
    "bins": lambda x: torch.bucketize(x, torch.linspace(-1, 1, 5)).float(),
}
JOINED = {
    "fft over rows": lambda x: torch.fft.fft(x, dim=0).real,
    "a transposed reshape": lambda x: x.t().reshape(B, 4),
    "rolled by parts": lambda x: torch.cat([x[1:], x[:1]]),
}


@pytest.mark.parametrize("name", BY_ROW)
def test_what_no_rule_knows_is_given_as_it_is_where_rows_are_alone(name):
    x = torch.randn(B, 4)
    watch = LossWatch()
    (shown,) = watch.batch((x,), B)
    ((found,), _) = watch.by_row((BY_ROW[name](shown),), {})
    torch.testing.assert_close(found, BY_ROW[name](x))


@pytest.mark.parametrize("name", JOINED)
def test_what_no_rule_knows_is_given_of_each_row_alone(name):
    x = torch.randn(B, 4)
    given = []
    for value in (1.0, 1e3):
        x[1] = value
        watch = LossWatch()
        (shown,) = watch.batch((x.clone(),), B)
        given.append(watch.by_row((JOINED[name](shown),), {})[0][0])
    others = torch.arange(B) != 1
    assert type(given[0]) is torch.Tensor
    torch.testing.assert_close(given[0][others], given[1][others], rtol=0, atol=0)
    assert not torch.equal(given[0], given[1])


def test_a_constant_into_which_rows_were_written_since_is_not_read_again():
    """The rows stay as they were made, of what the constant was then."""
    x, constant = torch.randn(B, 4), torch.zeros(4)
    watch = LossWatch()
    (shown,) = watch.batch((x,), B)
    made = torch.fft.fft(shown - constant).real
    constant += shown.mean(0)
    ((found,), _) = watch.by_row((made,), {})
    assert found.data_ptr() == made.data_ptr()
    constants = [torch.zeros(4)]
    (shown,) = (watch := LossWatch()).batch((x,), B)
    made = torch.fft.fft(torch.vmap(lambda row: row - constants[0])(shown)).real
    constants[0] = shown.mean(0)
    with pytest.raises(ModelError, match="reads tensors of the batch that it was not given"):
        watch.by_row((made,), {})


@pytest.mark.parametrize(("make", "kept"), [(JOINED["fft over rows"], "proved"), (lambda x: pad(x), "promised")])
def test_an_example_moves_the_sum_by_its_clip_norm_whatever_made_its_row(make, kept):
    torch.manual_seed(3)
    x, sums = torch.randn(N, 4), []
    for value in (-10.0, 10.0):
        torch.manual_seed(4)
        x[0] = value
        private, optimizer, loader = bound(model := net(), x.clone())
        (rows,) = next(iter(loader))
        (private(make(rows)) - 3).square().mean().backward()
        optimizer.step()
        sums.append(torch.cat([p.grad.flatten() for p in model.parameters()]) * B)
        assert private._watch.kept == kept
    assert (sums[0] - sums[1]).norm() <= 2 * 0.5 * (1 + 1e-5)


def pad(x):
    """As many numbers of each row as are not zero: no shape that vmap knows."""
    return nn.utils.rnn.pad_sequence([row[row != 0] for row in x], batch_first=True)


def test_a_pass_is_known_after_its_batch_was_joined_with_another():
    private, _, loader = users(net(), torch.randn(12, 4), [*range(10), 0, 1], accumulate=2)
    batches = iter(loader)
    first = private(next(batches)[0]).square().mean()
    x, _ = next(batches)
    assert torch.isfinite(first + private(x).square().mean())
    with pytest.raises(ModelError, match="two orders"):
        private(x.flip(0))


def test_an_index_may_be_of_any_tuple():
    private, _, loader = bound(net(B), torch.randn(N, B))
    weights = torch.arange(float(B))
    for (x,) in loader:
        for rows in (Rows(x[:, 0].argsort()), slice(x[:, 0].argmax(), None)):
            with pytest.raises(ModelError, match="couples"):
                (private(x)[rows][:, 0] * weights[: len(x[rows])]).mean().backward()
            private.zero_grad()
        break


def users(model, x, units, **options):
    """(model, optimizer, loader) of a run whose units have several rows."""
    plan = plan_at_sigma(
        1e-9, dataset_size=10, batch_size=3, epochs=2, delta=1e-5, clip_norm=0.5, mechanism="independent", unit="user"
    )
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    loader = DataLoader(TensorDataset(x, torch.tensor(units)), batch_size=3)
    return ao.PrivacyEngine(plan, key=bytes(32)).make_private(model, optimizer, loader, unit=1, **options)


def norm(model, rows):
    return float(torch.cat([p.grad.flatten() for p in model.parameters()]).norm() * rows)


FEEDS = {
    "flipped": lambda x: x.flip(0) + 1,
    "rolled": lambda x: 2 * x.roll(1, 0),
    "one twice": lambda x: x[[0, 0, 1]] + 1,
    "not known": lambda x: torch.cat([x[1:] + 1, x[:1] + 1]),
}


@pytest.mark.parametrize("name", FEEDS)
def test_the_rows_of_users_are_in_their_order(name):
    model = net()
    private, optimizer, loader = users(model, torch.randn(12, 4), [0, 0, 1, *range(2, 11)])
    x, _ = next(iter(loader))
    with pytest.raises(TrainingError, match="another order"):
        private(FEEDS[name](x))
    (private(x) - 100).square().mean().backward()
    optimizer.step()
    assert norm(model, 3) <= 2 * 0.5 + 1e-4


LATER = {
    "a pass": lambda model, x, first: model(x + 1) - first.detach(),
    "a loss of both": lambda model, x, first: model(x + 1) - first,
    "a chain": lambda model, x, first: model(first.repeat(1, 2)[:, :4]),
}


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("name", LATER)
def test_a_pass_over_a_batch_is_clipped_by_its_own_units(name, accumulate):
    """A batch of one user, of which more is made when the next one, of three, was fetched, and called perhaps."""
    torch.manual_seed(5)
    model = net()
    options = {} if accumulate == 1 else {"accumulate": 2}
    private, optimizer, loader = users(model, torch.randn(12, 4), [0, 0, 0, *range(1, 10)], **options)
    batches = iter(loader)
    x, _ = next(batches)
    first = private(x)
    other, _ = next(batches)
    if accumulate == 2:
        private(other)
    with pytest.raises(TrainingError, match="another batch"):
        LATER[name](private, x, first)
    loader.use(x)
    (LATER[name](private, x, first) - 100).square().mean().backward()
    if accumulate == 2:
        (private(other) * 0.0).mean().backward()
    optimizer.step()
    assert norm(model, 3) <= 0.5 * (1 + 1e-4)


def test_two_backward_calls_are_refused():
    private, optimizer, loader = bound(net(), torch.randn(N, 4))
    for (x,) in loader:
        first, second = private(x).mean(), private(x + 1).mean()
        first.backward()
        with pytest.raises(TrainingError, match="backward once"):
            second.backward()
        with pytest.raises(TrainingError, match="backward once"):
            private(x)
        optimizer.step()
        break


def test_texts_of_several_public_lengths():
    torch.manual_seed(3)
    texts = [torch.randint(1, 7, (2 + i % 5,)) for i in range(N)]
    model = Words()
    expected = copy.deepcopy(model)

    def terms(network, ids, first):
        out = network(ids).square().mean(2) * (ids != 0)
        return (out.sum(1) * (2.0 if first else -0.5)).mean()

    plan = plan_at_sigma(
        1e-9, dataset_size=N, batch_size=B, epochs=1, delta=1e-5, clip_norm=0.5, mechanism="independent"
    )
    engine = ao.PrivacyEngine(plan, key=bytes(32))
    loader = DataLoader(texts, batch_size=B, collate_fn=lambda rows: (torch.stack(rows),))
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    private, optimizer, loader = engine.make_private(model, optimizer, loader, pad_to=(4, 8))
    for (ids,) in loader:
        optimizer.zero_grad()
        (terms(private, ids, True) + terms(private, ids.roll(1, 1), False)).backward()
        optimizer.step()
    assert expected is not model
    other = torch.optim.SGD(expected.parameters(), 0.5)
    for start in (0, B):
        total = [torch.zeros_like(p) for p in expected.parameters()]
        batch = [F.pad(t, (0, (4 if len(t) <= 4 else 8) - len(t))) for t in texts[start : start + B]]
        longest = max(map(len, batch))
        for text in batch:
            ids = F.pad(text, (0, longest - len(text)))[None]
            second = ids.roll(1, 1)[:, : len(text)]
            value = terms(expected, text[None], True) + terms(expected, second, False)
            gradients = torch.autograd.grad(value, list(expected.parameters()))
            size = torch.sqrt(sum(g.square().sum() for g in gradients))
            total = [t + g * min(1.0, 0.5 / float(size)) for t, g in zip(total, gradients, strict=True)]
        for p, t in zip(expected.parameters(), total, strict=True):
            p.grad = t / B
        other.step()
    assert_same(model, expected)


class WordsAndNumbers(nn.Module):
    """Ids, whose rows run by their lengths, or one number for each example, whose rows run together."""

    def __init__(self):
        super().__init__()
        self.words, self.linear = Words(), nn.Linear(1, 7)

    def forward(self, x):
        if x.is_floating_point():
            return self.linear(x[:, None])
        return self.words(x).sum(1)


@pytest.mark.filterwarnings("ignore:no output depends on")
@pytest.mark.parametrize("lengths", [[7] * N, [3] * N, [3, 7] * (N // 2)])
@pytest.mark.parametrize("reverse", [False, True])
def test_no_length_decides_whether_passes_can_be_joined(lengths, reverse):
    data = [(torch.randint(1, 7, (n,)), torch.randn(())) for n in lengths]
    plan = plan_at_sigma(
        1e-9, dataset_size=N, batch_size=B, epochs=1, delta=1e-5, clip_norm=0.5, mechanism="independent"
    )
    model = WordsAndNumbers()
    loader = DataLoader(
        data, batch_size=B, collate_fn=lambda rows: [torch.stack(field) for field in zip(*rows, strict=True)]
    )
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    private, _, loader = ao.PrivacyEngine(plan, key=bytes(32)).make_private(model, optimizer, loader, pad_to=(4, 8))
    first, second = next(iter(loader))[:: -1 if reverse else 1]
    private(first)
    with pytest.raises(TrainingError, match="rows of each length by themselves"):
        private(second)
    assert torch.isfinite(private(first + 0)).all()
