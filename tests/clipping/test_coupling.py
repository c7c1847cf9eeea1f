"""Losses that couple examples are refused in the first batch; others are left as they are, bit for bit."""

import copy
import gc
import io
import warnings
import weakref
from contextlib import contextmanager

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import anyorder as ao
from anyorder.clipping import ExampleLoss
from anyorder.clipping.coupling import LossWatch
from anyorder.clipping.kept_tensors import is_of_loop
from anyorder.errors import ModelError
from anyorder.plan.planner import plan_at_sigma

B, C = 6, 6
X = torch.randn(B, C, generator=torch.Generator().manual_seed(0))
Y = torch.tensor([0, 1, 2, 0, 5, 1])
MASK = torch.tensor([True, True, False, True, False, True])
WEIGHT = torch.tensor([1.0, 100, 1, 1, 1, 1])
HEAD = nn.Linear(C, 3).requires_grad_(False)


def gradient(loss, watch=None, x=X):
    """The loss, and its gradient with respect to the outputs of a model."""
    leaf = x.clone().requires_grad_()
    outputs = leaf * 1
    if watch is None:
        value = loss(outputs)
        value.backward()
        return value.item(), leaf.grad
    with handed_out(watch):
        value = loss(watch.outputs(outputs))
        value.backward()
    return value.item(), leaf.grad


@contextmanager
def handed_out(watch):
    """X, Y and MASK are a batch of a loader: what is computed of them is of the batch, and all else is constant."""
    here = globals()
    own = {name: here[name] for name in ("X", "Y", "MASK")}
    here.update(watch.batch(own, B))
    try:
        yield
    finally:
        here.update(own)


def info_nce(out):
    towers = F.normalize(out, dim=1)
    return F.cross_entropy(towers @ towers.roll(1, 1).T / 0.1, torch.arange(B))


def sim_clr(out, compare):
    """The loss of two views of each example, the second made of the first here."""
    scores = compare(F.normalize(torch.cat([out, out.square()]), dim=1)).masked_fill(
        torch.eye(2 * B, dtype=torch.bool), -9
    )
    return F.cross_entropy(scores, torch.arange(2 * B).roll(B))


def in_place(out):
    total = torch.zeros(())
    total += (out - out.mean(0)).square().sum()
    return total


COUPLED = {
    "contrastive": info_nce,
    "triplet": lambda out: F.triplet_margin_loss(out, out.roll(1, 0), out.roll(2, 0)),
    "differences": lambda out: (out - out.roll(1, 0)).abs().mean(),
    "distances": lambda out: torch.cdist(out, out).sum(),
    "batch statistics": lambda out: F.cross_entropy((out - out.mean(0)) / out.std(0), Y),
    "batch norm": lambda out: F.cross_entropy(nn.BatchNorm1d(C, affine=False)(out), Y),
    "softmax over examples": lambda out: F.cross_entropy(out.softmax(0), Y),
    "sorted": lambda out: (out[:, 0].sort().values * torch.arange(B)).sum(),
    "part of the whole": lambda out: out.square().sum() / out.detach().abs().sum(),
    "in place": in_place,
    "power of a mean": lambda out: 2 ** out.mean(),
    "probabilities": lambda out: F.binary_cross_entropy(out.clamp(0.01, 0.99) * out.max().clamp(0, 1), X.sigmoid()),
    "class weights": lambda out: F.cross_entropy(out, Y, WEIGHT),
    "class weights of a module": lambda out: nn.CrossEntropyLoss(weight=WEIGHT)(out, Y),
    "class weights, old words": lambda out: F.cross_entropy(out, Y, WEIGHT, size_average=True),
    "class weights of log-probabilities": lambda out: nn.NLLLoss(WEIGHT)(out.log_softmax(1), Y),
    "class weights of pixels": lambda out: F.nll_loss(out.view(B, 3, 2), Y[:, None].expand(B, 2) % 3, WEIGHT[:3]),
    "weights": lambda out: F.mse_loss(out, X, weight=X.abs()),
    "masked mean": lambda out: (F.cross_entropy(out, Y, reduction="none") * MASK).sum() / MASK.sum(),
    "masked mean, in place": lambda out: (F.cross_entropy(out, Y, reduction="none") * MASK).sum().div_(MASK.sum()),
    "masked examples": lambda out: F.cross_entropy(out[MASK], Y[MASK]),
    "masked numbers": lambda out: out[X > 0].square().mean(),
    "targets without the last dimension": lambda out: F.mse_loss(out[:, :1], X[:, 0]),
    "targets without the last dimension, by hand": lambda out: (X[:, 0] - out[:, :1]).square().mean(),
    "weights of examples on a column": lambda out: (X[:, 0].abs() * out[:, :1].square()).mean(),
    "losses on a column of weights": lambda out: (F.cross_entropy(out, Y, reduction="none") * X[:, :1].abs()).mean(),
    "compiled": torch.compile(info_nce, backend="eager"),
    "selected numbers": lambda out: torch.masked_select(out, X > 0).square().mean(),
}  # fmt: skip


@pytest.mark.parametrize("unused", [0, 1])
def test_one_label_for_each_example_and_an_index_of_ones_own(unused):
    """The mean is over all labels: how many of the others count moves nobody's gradient."""
    value, slope = gradient(lambda out: F.cross_entropy(out, Y, ignore_index=unused), LossWatch())
    whole = gradient(lambda out: F.cross_entropy(out, Y, ignore_index=unused, reduction="sum") / B)
    assert value == pytest.approx(whole[0], rel=1e-6)
    torch.testing.assert_close(slope, whole[1])


@pytest.mark.parametrize(
    ("kept", "loss"),
    [
        ("mapped", lambda z: F.cross_entropy(z, torch.cat([Y, Y]))),
        ("proved", lambda z: (z * z[:, :1]).square().mean()),
        ("proved", lambda z: (z @ torch.ones(C, 2)).square().mean()),
    ],
)
def test_views_below_each_other_that_never_meet_are_taken_row_by_row(kept, loss):
    watch = LossWatch()
    value, slope = gradient(lambda out: loss(torch.cat([out, out.square()])), watch)
    whole = gradient(lambda out: loss(torch.cat([out, out.square()])))
    assert (watch.kept, value) == (kept, pytest.approx(whole[0], rel=1e-6))
    torch.testing.assert_close(slope, whole[1])


@pytest.mark.parametrize(
    "compare",
    [
        lambda z: z @ z.T,
        lambda z: F.cosine_similarity(z[:, None], z[None], dim=2),
        lambda z: -(z[:, None] - z[None]).square().sum(2),
        lambda z: -torch.cdist(z, z),
    ],
)
def test_two_stacked_views_do_not_meet(compare):
    """Of each example alone the loss would have no negatives."""
    with pytest.raises(ModelError, match="moves the gradients of others"):
        gradient(lambda out: sim_clr(out, compare), LossWatch())


@pytest.mark.parametrize("name", COUPLED)
def test_coupled_losses_are_refused(name):
    with pytest.raises(ModelError, match=r"moves? .*gradients of others|so do the gradients of others"):
        gradient(COUPLED[name], LossWatch())


def of_two_batches(loss):
    watch = LossWatch()
    first, second = (watch.outputs(x.clone().requires_grad_() * 1) for x in (X, X[:4]))
    loss(first, second).backward()
    return watch


@pytest.mark.parametrize("example", [0, B // 2, B - 1])
def test_any_example_may_be_the_one_that_moves_the_others(example):
    """One way only: what is changed must be that example, since its own gradient depends on no other."""
    with pytest.raises(ModelError, match="couples examples"):
        gradient(lambda out: (out * out[example].detach()).sum(), LossWatch())


def test_one_loss_of_two_batches_is_watched_as_a_whole():
    """Warnings are errors here: it is neither refused nor left unseen."""
    watch = of_two_batches(lambda a, b: F.cross_entropy(a, Y) + F.cross_entropy(b, Y[:4]))
    assert watch.kept == "promised"


@pytest.mark.parametrize(
    "loss",
    [
        lambda a, b: (a[:4] * b).sum(),
        lambda a, b: F.cross_entropy(a, Y) * F.cross_entropy(b, Y[:4]),
        lambda a, b: F.cross_entropy(b, Y[:4]) + (a - a.mean(0)).square().sum(),
        lambda a, b: F.cross_entropy(a, Y) + (b - b.mean(0)).square().sum(),
    ],
)
def test_couplings_within_and_across_two_batches_are_refused(loss):
    with pytest.raises(ModelError, match="gradients of others"):
        of_two_batches(loss)


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
@pytest.mark.parametrize("name", ["contrastive", "triplet", "differences"])
def test_what_decides_is_the_code_of_the_loss(name, scale):
    """Not the data: of equal outputs, or of huge ones whose losses are flat, no gradient need move."""
    with pytest.raises(ModelError):
        gradient(COUPLED[name], LossWatch(), torch.ones(B, C) * scale)


def accumulated(out):
    total = torch.zeros(())
    total += F.cross_entropy(out, Y)
    total = total + 0.1 * out.square().mean()
    return total


def written(out):
    out = out * 1
    out[:, 0] = 0.0
    return F.cross_entropy(out.mul_(2), Y)


def focal(out):
    each = F.cross_entropy(out, Y, reduction="none")
    return ((1 - torch.exp(-each)) ** 2 * each).mean()


def ctc(out):
    steps = torch.stack([out, out.flip(1), out]).log_softmax(2)
    return F.ctc_loss(steps, torch.ones(B, 2, dtype=torch.long), torch.full((B,), 3), 1 + Y % 2)


ALONE = {
    "cross entropy": lambda out: F.cross_entropy(out, Y),
    "module": lambda out: nn.CrossEntropyLoss(label_smoothing=0.1)(out, Y),
    "sum": lambda out: F.cross_entropy(out, Y, WEIGHT, reduction="sum"),
    "weights of each": lambda out: F.cross_entropy(out, Y, WEIGHT, reduction="none").mean(),
    "probabilities": lambda out: F.cross_entropy(out, X.softmax(1), WEIGHT),
    "squares": lambda out: F.mse_loss(out, X.flip(1)),
    "absolute": lambda out: nn.L1Loss()(out, X.flip(1)),
    "yes or no": lambda out: F.binary_cross_entropy(out.sigmoid(), X.sigmoid()),
    "in (0, 1)": lambda out: F.binary_cross_entropy(0.5 + 0 * out + 0.1 * out.clamp(-1, 1), X.sigmoid()),
    "logits": lambda out: F.binary_cross_entropy_with_logits(out, X.sigmoid(), pos_weight=WEIGHT, weight=X.abs()),
    "tokens": lambda out: F.cross_entropy(out.view(2 * B, 3), Y.repeat_interleave(2) % 3),
    "places": lambda out: F.cross_entropy(out.view(B, 3, 2), Y[:, None].expand(B, 2) % 3),
    "focal": focal,
    "ctc": ctc,
    "divergence": lambda out: F.kl_div(out.log_softmax(1), X.softmax(1), reduction="batchmean"),
    "gaussian": lambda out: F.gaussian_nll_loss(out, X, X.abs() + 1),
    "margin": lambda out: nn.MultiMarginLoss()(out, Y),
    "pair": lambda out: F.cosine_embedding_loss(out, X, Y.sign() * 2 - 1),
    "own counts": lambda out: (out.square() * (X > 0)).sum(1).div((X > 0).sum(1).clamp(min=1)).mean(),
    "masked sum": lambda out: out[X > 0].square().sum() / B,
    "head": lambda out: F.cross_entropy(HEAD(out), Y % 3) / 2,
    "dropout": lambda out: F.cross_entropy(F.dropout(out, 0.5), Y),
    "picked": lambda out: -out.log_softmax(1).gather(1, Y[:, None]).mean(),
    "parts": lambda out: torch.cat([p.square().sum(1) for p in out.split(2, 1)]).sum() / B,
    "transposed": lambda out: out.T.square().mean(1).sum(),
    "accumulated": accumulated,
    "written": written,
}  # fmt: skip


BY_LABELS = {"cross entropy", "module", "tokens", "places", "focal", "head", "dropout", "parts"}


@pytest.mark.parametrize("name", ALONE)
def test_losses_of_each_example_alone_are_left_as_they_are(name):
    """Bit for bit, save for what is added in another order."""
    watch = LossWatch()
    for _ in range(2):  # by the rules, and by what they found before
        torch.manual_seed(3)
        expected = gradient(ALONE[name])
        torch.manual_seed(3)
        state = torch.get_rng_state()
        value, made = gradient(ALONE[name], watch)
        if name in BY_LABELS:
            assert value == pytest.approx(expected[0], rel=1e-6)
            torch.testing.assert_close(made, expected[1])
        else:
            assert value == expected[0]
            assert torch.equal(made, expected[1])
        assert name == "dropout" or torch.equal(state, torch.get_rng_state())
    assert watch.kept == "proved"


def test_examples_alone():
    watch = LossWatch()
    loss = ExampleLoss(nn.CrossEntropyLoss())
    expected = gradient(lambda out: loss(out, Y))
    value, made = gradient(lambda out: loss(out, Y) / 2 + loss(out, Y) / 2, watch)
    assert value == expected[0]
    torch.testing.assert_close(made, expected[1])
    assert watch.kept == "proved"
    with pytest.raises(ModelError, match="gradients of others"):
        gradient(lambda out: loss(out - out.mean(0), Y), watch)


@pytest.mark.parametrize("options", [{}, {"ignore_index": 1}])
def test_padding_of_one_example_moves_no_other(options):
    """Also in later batches: the mean is over all labels, whether they count or not."""
    labels = Y[:, None].expand(B, 2) % 3
    shape = (B, 3, 2)

    def loss(labels):
        return lambda out: F.cross_entropy(out.view(shape), labels, **options)

    watch = LossWatch()
    padding = options.get("ignore_index", -100)
    whole = labels.masked_fill(labels == padding, 0)
    for _ in range(3):
        value, full = gradient(loss(whole), watch)
        assert torch.equal(full, gradient(loss(whole))[1])
        assert value == pytest.approx(gradient(loss(whole))[0], rel=1e-6)
        padded = whole.clone()
        padded[2] = padding
        made = gradient(loss(padded), watch)[1]
        assert not made[2].any()
        made[2] = full[2]
        assert torch.equal(made, full)
        assert not torch.allclose(gradient(loss(padded))[1][0], full[0])


def test_a_label_that_does_not_count_moves_nobody_where_each_example_has_one():
    watch = LossWatch()
    full = gradient(lambda out: F.cross_entropy(out, Y), watch)[1]
    made = gradient(lambda out: F.cross_entropy(out, Y.where(MASK, -100)), watch)[1]
    assert torch.equal(made[MASK], full[MASK])
    assert not made[~MASK].any()


def test_several_outputs():
    leaf = X.clone().requires_grad_()

    def outputs(watch):
        return watch.outputs({"a": leaf * 1, "b": (leaf.sum(1), Y, None)})

    watch = LossWatch()
    out = outputs(watch)
    assert is_of_loop(out["b"][1])
    assert torch.equal(out["b"][1], Y)
    (F.cross_entropy(out["a"], Y) + out["b"][0].mean()).backward()
    assert watch.kept == "promised"
    out = outputs(LossWatch())
    with pytest.raises(ModelError, match="couples examples"):
        (out["a"] * out["b"][0]).mean().backward()


def test_the_rest_of_the_loop_sees_the_numbers_that_are_there():
    """Sums kept by the loop get what was computed, once; nothing of a batch stays after it."""
    watch, correct, losses = LossWatch(), torch.zeros(()), []
    leaf = X.clone().requires_grad_()
    out = watch.outputs(leaf * 1)
    hits = (out.argmax(1) == Y).sum()
    correct += hits
    kept = torch.zeros(B)
    kept[:] = out.detach()[:, 0]
    loss = F.cross_entropy(out, Y)
    losses.append(loss.detach())
    seen = weakref.ref(out)
    loss.backward()
    assert correct == (X.argmax(1) == Y).sum()
    assert torch.equal(kept, X[:, 0])
    assert float(losses[0] + 1) > 1
    assert out.detach().numpy().tolist() == X.tolist()
    del out, loss, hits, losses
    gc.collect()
    assert seen() is None


def test_what_loops_print_and_keep_of_losses_and_outputs():
    watch = LossWatch()
    out = watch.outputs((X * 1).requires_grad_() * 1)
    loss = F.cross_entropy(out, Y)
    assert f"{loss:.3f}" == f"{loss.item():.3f}"
    assert f"{out}" == str(out) == repr(out)
    assert repr(out).startswith("tensor(")
    file = io.BytesIO()
    torch.save(loss.detach(), file)
    file.seek(0)
    assert torch.load(file) == loss
    loss.backward()
    assert copy.deepcopy(loss.detach()) == loss


def test_a_loss_of_several_numbers_is_told_what_to_do():
    out = LossWatch().outputs((X * 1).requires_grad_() * 1)
    with pytest.raises(ModelError, match=r"loss.mean\(\).backward\(\)"):
        F.cross_entropy(out, Y, reduction="none").backward()


def test_a_vector_s_backward():
    leaf = X.clone().requires_grad_()
    LossWatch().outputs(leaf * 1).square().sum(1).backward(torch.ones(B))
    assert torch.allclose(leaf.grad, 2 * X)
    with pytest.raises(ModelError):
        (LossWatch().outputs(leaf * 1) @ X.T).square().softmax(0).sum(1).backward(torch.arange(B) * 1.0)


def test_one_example_shows_nothing_and_the_next_batch_is_watched():
    watch = LossWatch()
    gradient(lambda out: (out - out.mean(0)).square().sum(), watch, X[:1])
    with pytest.raises(ModelError):
        gradient(lambda out: (out - out.mean(0)).square().sum(), watch)


def test_a_loss_that_no_rule_knows_and_vmap_cannot_run_is_refused():
    for x in (X, X.abs(), torch.zeros_like(X)):  # whatever its numbers are
        with pytest.raises(ModelError, match="cannot be run row by row, since vmap cannot run it"):
            gradient(lambda out: out[out.nonzero(as_tuple=True)].square().sum(), LossWatch(), x)


class OwnBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, out):
        ctx.save_for_backward(out)
        return out.square().sum()

    @staticmethod
    def backward(ctx, gradient):
        (out,) = ctx.saved_tensors
        return gradient * out / out.norm()


def by_hand(out):
    own = out.detach().requires_grad_()
    info_nce(own).backward()
    out.backward(own.grad)


def standardised(out):
    return ((out - out.mean(0)) / out.std(0)).square().mean(1).sum()


def scripted(out):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return torch.jit.script(standardised)(out)


def through_the_graph(out):
    """A hook on a node of autograd. What it does is not used: rows' own gradients are."""
    loss = out.square().sum()
    loss.grad_fn.register_prehook(lambda gradients: (gradients[0] * out.detach().abs().max(),))
    loss.backward()


@pytest.mark.parametrize(
    "backward",
    [
        lambda out: OwnBackward.apply(out).backward(),
        lambda out: (out.sum() + OwnBackward.apply(out)).backward(),
        lambda out: torch.autograd.backward([out.sum(), out.mean()]),
        lambda out: torch.autograd.backward(info_nce(out)),
        lambda out: scripted(out).backward(),
        lambda out: (scripted(out) + out.sum()).backward(),
        lambda out: torch.stack([*out]).cumsum(0).square().sum().backward(),
        by_hand,
    ],
)
def test_gradients_that_come_by_a_way_that_is_not_followed_are_refused(backward):
    """Each of these couples examples, or may."""
    loader = DataLoader(TensorDataset(X.repeat(4, 1), Y.repeat(4)), batch_size=B)
    plan = plan_at_sigma(1, dataset_size=4 * B, batch_size=B, epochs=1, delta=1e-5, mechanism="independent")
    model = nn.Linear(C, C)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = ao.PrivacyEngine(plan)
    model, optimizer, loader = engine.make_private(model, optimizer, loader)
    x, y = next(iter(loader))
    with pytest.raises(ModelError, match="couples examples|one example may move"):
        backward(model(x))
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    assert engine.step == 1


def test_a_hook_in_the_graph_changes_nothing():
    watch = LossWatch()
    leaf = X.clone().requires_grad_()
    through_the_graph(watch.outputs(leaf * 1))
    assert torch.allclose(leaf.grad, 2 * X / B)  # of the mean over rows, which the loss is said to be
    assert watch.kept == "mapped"


def normalised_by_a_hook(out):
    out.register_hook(lambda gradient: gradient / gradient.norm())
    return out.square().sum()


def behind_a_huge_target(out):
    target = X.clone()
    target[2] = 1e9
    return (out - target).square().sum() + torch.cdist(out, out).sum()


def behind_a_target_that_is_no_number(out):
    target = X.clone()
    target[2] = float("inf")
    return (out - target).square().sum() + torch.cdist(out, out).sum()


@pytest.mark.parametrize("loss", [normalised_by_a_hook, behind_a_huge_target, behind_a_target_that_is_no_number])
def test_neither_hooks_nor_one_examples_target_hide_a_coupling(loss):
    with pytest.raises(ModelError, match="couples"):
        gradient(loss, LossWatch())


def test_the_engine_refuses_before_anything_is_released():
    """One label moved the sum of a step by 22 clip norms."""
    loader = DataLoader(TensorDataset(X.repeat(4, 1), Y.repeat(4)), batch_size=B)
    plan = ao.plan(dataset_size=4 * B, batch_size=B, epochs=1, epsilon=8, delta=1e-5)
    for loss, right in [(nn.CrossEntropyLoss(weight=WEIGHT), False), (nn.CrossEntropyLoss(), True)]:
        model = nn.Linear(C, C)
        before = model.weight.detach().clone()
        engine = ao.PrivacyEngine(plan)
        private, optimizer, batches = engine.make_private(model, torch.optim.SGD(model.parameters(), lr=0.1), loader)
        for x, y in batches:
            if not right:
                with pytest.raises(ModelError, match=r"cross_entropy with weight="):
                    loss(private(x), y).backward()
                break
            optimizer.zero_grad()
            loss(private(x), y).backward()
            optimizer.step()
        assert engine.step == (4 if right else 0)
        assert torch.equal(model.weight, before) != right
