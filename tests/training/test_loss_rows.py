"""One unit's outputs, targets and masks move no other unit's gradient, whatever the loss: by the engine, on neighbours.

The model gives each unit a row of its own table, so that what others' rows of the released gradient hold is theirs
alone; noise is the same in both runs. A loss is proved, mapped, or refused: in both runs alike.
"""

import copy
import dataclasses
import functools
import gc
import io
import itertools
import json
import math
import operator
import types
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset, default_collate

import anyorder as ao
from anyorder.clipping import ExampleLoss, coupling
from anyorder.clipping.rows import TOTAL, ByRow, Coupled, Interpreter, NoRule
from anyorder.errors import ArgumentError, ModelError, ModelWarning, TrainingError
from anyorder.plan.planner import plan_at_sigma

B, C, T = 8, 6, 4
UNIT = 5


class Table(nn.Module):
    """(b,) ids and (b,) scales to (b, T, C) outputs, of which unit i's are row i of the weights."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.rows = nn.Embedding(B, T * C)

    def forward(self, ids, scale):
        return (self.rows(ids) * scale[:, None]).unflatten(1, (T, C))


def data(replaced):
    """ids, scales, (B, T) labels, (B, T, C) numbers, (B, T) masks; those of one unit replaced by others."""
    generator = torch.Generator().manual_seed(1)
    scale = 1 + torch.rand(B, generator=generator)
    labels = torch.randint(0, C, (B, T), generator=generator)
    numbers = torch.randn(B, T, C, generator=generator)
    mask = torch.rand(B, T, generator=generator) > 0.4
    labels[0, 2:] = -100
    if replaced:
        scale[UNIT], labels[UNIT], numbers[UNIT], mask[UNIT] = 40.0, torch.tensor([3, -100, -100, -100]), 90.0, True
    return torch.arange(B), scale, labels, numbers, mask


def with_words(examples):
    """A batch with something in it of which tensors could be made."""
    return [*default_collate(examples), ["words"] * len(examples)]


planned = functools.cache(plan_at_sigma)


def run(loss, replaced, steps=2, reduction="mean", strict=False, keep=True, kind=Table):
    """Others' rows of the released gradients, and how the loss was kept apart; the words of its refusal."""
    coupling.LossWatch.escaped, coupling.LossWatch.aliased = "", 0  # as in a process of its own
    plan = planned(1e-3, dataset_size=B, batch_size=B, epochs=steps, delta=1e-5, clip_norm=1e3, mechanism="independent")
    model = kind()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    engine = ao.PrivacyEngine(plan, key=bytes(32))
    rows = TensorDataset(*data(replaced))
    loader = DataLoader(rows, batch_size=B, collate_fn=with_words if strict else None)
    private, optimizer, loader = engine.make_private(model, optimizer, loader, loss_reduction=reduction)
    seen = []
    for _ in range(steps):
        for ids, scale, labels, numbers, mask, *_ in loader:
            optimizer.zero_grad()
            torch.manual_seed(7)
            try:
                loss(private(ids, scale), labels, numbers, mask).backward()
            except ModelError as error:
                return str(error), "refused"
            optimizer.step()
            if keep or not seen:
                seen.append(model.rows.weight.grad.clone())
    return torch.stack(seen), engine.training.loss_kept


def check(loss, verdict, **options):
    first, kept = run(loss, False, **options)
    second, again = run(loss, True, **options)
    assert kept == again == verdict
    if verdict == "refused":
        assert first == second
        return
    others = torch.arange(B) != UNIT
    assert torch.equal(first[:, others], second[:, others])
    assert first[:, others].abs().sum(1).gt(0.1 * B / 1e3).any()


EYE = torch.eye(C)
ORDER = torch.arange(B).flip(0)
WEIGHT = torch.tensor([1.0, 9, 1, 1, 4, 1])
HEAD = nn.Linear(C, 3).requires_grad_(False)
TEACHER = nn.Sequential(nn.Linear(C, 8), nn.Tanh(), nn.LayerNorm(8), nn.Linear(8, C)).requires_grad_(False)


FROZEN = {
    kind.__name__: kind(C, C // 2, num_layers=2, bidirectional=True, dropout=0.3).requires_grad_(False)
    for kind in (nn.GRU, nn.LSTM, nn.RNN)
}
ALONE = nn.GRU(C, C, batch_first=True).requires_grad_(False)


def recurrent(kind):
    """A frozen recurrent reference, rows second, with and without gradients."""

    def loss(out, y, x, m):
        with torch.no_grad():
            wanted, _ = FROZEN[kind](x.transpose(0, 1))
        given, (*_, last) = FROZEN[kind](out.transpose(0, 1))
        last = last if last.dim() == 3 else last.unsqueeze(0)
        return ((given - wanted).square().mean((0, 2)) + last.square().mean((0, 2))).mean()

    return loss


def begun(out, y, x, m):
    """Row by row, from a state of the same row."""
    return ALONE(out, x[:, 0].unsqueeze(0).contiguous())[0].square().mean()


def begun_by_all(out, y, x, m):
    return ALONE(out, x.mean((0, 1)).expand(1, len(x), C).contiguous())[0].square().mean()


def classes(y):
    return y[:, 0].clamp(min=0)


def teacher(out, y, x, m):
    with torch.no_grad():
        soft = (TEACHER(x) / 2).softmax(-1)
    return F.kl_div((out / 2).log_softmax(-1), soft, reduction="batchmean") * 4


def focal(out, y, x, m):
    each = F.cross_entropy(out[:, 0], classes(y), reduction="none")
    return ((1 - torch.exp(-each)).pow(2) * each).mean()


def dice(out, y, x, m):
    p, t = out.sigmoid().flatten(1), m[:, :, None].expand_as(out).flatten(1).float()
    return (1 - (2 * (p * t).sum(1) + 1) / (p.sum(1) + t.sum(1) + 1)).mean()


def mixed(out, y, x, m):
    tokens = F.cross_entropy(out.reshape(-1, C), y.reshape(-1))
    each = F.smooth_l1_loss(out, x, reduction="none").mean((1, 2))
    return 0.5 * tokens + each.sum() / len(each) + 1e-3 * out.square().mean() + 3.0


def own_tokens(out, y, x, m):
    each = F.cross_entropy(out.transpose(1, 2), y, reduction="none")
    counted = (y != -100).float()
    return ((each * counted).sum(1) / counted.sum(1).clamp(min=1)).mean()


def vae(out, y, x, m):
    mean, log_variance = out[..., :3], out[..., 3:].clamp(-5, 5)
    kl = -0.5 * (1 + log_variance - mean.square() - log_variance.exp()).sum((1, 2))
    return kl.mean() + (mean - x[..., :3]).square().sum() / B


def ctc(out, y, x, m):
    steps = out.transpose(0, 1).log_softmax(2)
    return F.ctc_loss(steps, torch.full((B, 2), 1), torch.full((B,), T), 1 + m[:, 0].long(), zero_infinity=True)


def one_hot(out, y, x, m):
    return (out[:, 0].softmax(1) - F.one_hot(classes(y), C)).square().sum(1).mean()


def scattered(out, y, x, m):
    target = torch.zeros_like(out[:, 0]).scatter_(1, classes(y)[:, None], 1.0)
    return F.binary_cross_entropy_with_logits(out[:, 0], target * 0.9 + 0.05, pos_weight=WEIGHT)


def accumulated(out, y, x, m):
    total = torch.zeros(())
    for t in range(T):
        total += F.mse_loss(out[:, t], x[:, t])
    return total / T


def attention(out, y, x, m):
    weights = (out @ x.transpose(1, 2)).masked_fill(~m[:, None, :], -1e9).softmax(-1)
    return (weights @ x - out).square().mean()


def alone_over_classes(out, y, x, m):
    return ExampleLoss(lambda o, t: F.cross_entropy(o.flatten(0, 1), t.flatten(), ignore_index=-100))(out, y) / 4


PROVED = {
    "parts of the rows": lambda out, y, x, m: sum(part.exp().sum() for part in out.split(3)) / B,
    "cross entropy": lambda out, y, x, m: F.cross_entropy(out[:, 0], classes(y)),
    "smoothed labels": lambda out, y, x, m: F.cross_entropy(out[:, 0], classes(y), label_smoothing=0.1),
    "one label, -100": lambda out, y, x, m: F.cross_entropy(out[:, 1], y[:, 1]),
    "tokens": lambda out, y, x, m: F.cross_entropy(out.transpose(1, 2), y),
    "flat tokens": lambda out, y, x, m: F.cross_entropy(out.view(-1, C), y.view(-1)),
    "flat tokens by number": lambda out, y, x, m: F.cross_entropy(out.reshape(B * T, C), y.reshape(B * T)),
    "shifted tokens": lambda out, y, x, m: F.cross_entropy(
        out[:, :-1].contiguous().view(-1, C), y[:, 1:].contiguous().view(-1), label_smoothing=0.1
    ),
    "own ignored index": lambda out, y, x, m: F.cross_entropy(out[:, 0], classes(y), ignore_index=3),
    "a module": lambda out, y, x, m: nn.NLLLoss(reduction="sum")(out[:, 0].log_softmax(1), classes(y)) / len(y),
    "class weights of each": lambda out, y, x, m: F.cross_entropy(
        out[:, 0], classes(y), WEIGHT, reduction="none"
    ).mean(),
    "probabilities": lambda out, y, x, m: F.cross_entropy(out[:, 0], x[:, 0].softmax(1)),
    "focal": focal,
    "dice of each": dice,
    "squares": lambda out, y, x, m: F.mse_loss(out, x),
    "as older loops have it": lambda out, y, x, m: F.mse_loss(torch.autograd.Variable(out.detach()) * out, x),
    "absolute": lambda out, y, x, m: nn.L1Loss()(out, x),
    "huber": lambda out, y, x, m: F.huber_loss(out, x, delta=0.5),
    "smooth": lambda out, y, x, m: F.smooth_l1_loss(out, x),
    "logits": lambda out, y, x, m: F.binary_cross_entropy_with_logits(
        out, x.sigmoid(), weight=x.abs(), pos_weight=WEIGHT
    ),
    "yes or no": lambda out, y, x, m: F.binary_cross_entropy(out.sigmoid(), m[:, :, None].expand_as(out).float()),
    "poisson": lambda out, y, x, m: F.poisson_nll_loss(out, x.abs()),
    "gaussian": lambda out, y, x, m: F.gaussian_nll_loss(out, x, x.abs() + 1),
    "margin": lambda out, y, x, m: F.multi_margin_loss(out[:, 0], classes(y)),
    "hinge": lambda out, y, x, m: (1 - out[:, 0, 0] * (m[:, 0] * 2.0 - 1)).clamp(min=0).mean(),
    "pinball": lambda out, y, x, m: torch.maximum(0.9 * (x - out), -0.1 * (x - out)).mean(),
    "log cosh": lambda out, y, x, m: torch.cosh((out - x).clamp(-5, 5)).log().mean(),
    "cosine": lambda out, y, x, m: (1 - F.cosine_similarity(out, x, dim=2)).mean(),
    "own triplets": lambda out, y, x, m: F.triplet_margin_loss(out[:, 0], out[:, 1], out[:, 2]),
    "teacher": teacher,
    **{f"frozen {kind}": recurrent(kind) for kind in FROZEN},
    "frozen, begun by each row": begun,
    "mixed": mixed,
    "masked, own counts": lambda out, y, x, m: (
        ((out - x).square().mean(2) * m).sum(1).div(m.sum(1).clamp(min=1)).mean()
    ),
    "masked sum": lambda out, y, x, m: ((out - x).square().mean(2) * m).sum() / (B * T),
    "picked by a mask, a sum": lambda out, y, x, m: out[m].square().sum() / B,
    "own tokens": own_tokens,
    "gathered": lambda out, y, x, m: -out.log_softmax(2).gather(2, y.clamp(min=0)[..., None]).mean(),
    "indexed": lambda out, y, x, m: -out[:, 0].log_softmax(1)[torch.arange(len(y)), classes(y)].mean(),
    "one hot": one_hot,
    "scattered": scattered,
    "a public table": lambda out, y, x, m: (out[:, 0] - EYE[classes(y)]).square().mean(),
    "head": lambda out, y, x, m: F.cross_entropy(HEAD(out[:, 0]), classes(y) % 3),
    "vae": vae,
    "ctc": ctc,
    "accumulated": accumulated,
    "attention": attention,
    "dropout": lambda out, y, x, m: F.mse_loss(F.dropout(out, 0.5), x),
    "products": lambda out, y, x, m: (out.flatten(1) @ torch.eye(T * C)[:, :3]).square().mean(),
    "survival, own": lambda out, y, x, m: (out.exp().cumsum(1).log() - out).clamp(-9, 9).mean(),
    "given alone": alone_over_classes,
    "parts": lambda out, y, x, m: torch.cat([p.square().flatten(1).sum(1) for p in out.split(2, 1)]).sum() / len(y),
    "two views": lambda out, y, x, m: F.mse_loss(torch.cat([out[:, 0], out[:, 1]]), torch.cat([x[:, 0], x[:, 1]])),
    "two views, apart again": lambda out, y, x, m: F.mse_loss((z := torch.cat([out, x]))[:B], z[B:]),
    "a list of one view": lambda out, y, x, m: F.mse_loss(torch.cat([out]), x),
    "four views, apart again": lambda out, y, x, m: F.mse_loss(
        *(torch.cat([torch.cat([out, 2 * out]), torch.cat([x, m[..., None] * x])]).chunk(4)[i] for i in (0, 3))
    ),
    "two of three views": lambda out, y, x, m: F.mse_loss(
        (z := torch.cat([out, 2 * out, x])).split([B, 2 * B])[1], torch.cat([z[:B], z[:B]])
    ),
    "the other view, rolled": lambda out, y, x, m: F.mse_loss((z := torch.cat([out, x])).roll(B, 0), z),
    "views by numbers": lambda out, y, x, m: F.mse_loss(
        (z := torch.cat([out, x]))[torch.arange(B)], z[torch.arange(-B, 0)]
    ),
    "own product": lambda out, y, x, m: out.sigmoid().prod(2, keepdim=True).log().mean(),
    "two views, side by side": lambda out, y, x, m: torch.cat([out, x]).view(2, B, -1).diff(dim=0).square().mean(),
    "two views, real and fake": lambda out, y, x, m: F.binary_cross_entropy_with_logits(
        torch.cat([out[:, 0, 0], out[:, 1, 0]]), torch.arange(2 * B) // B * 1.0
    ),
}
MAPPED = {
    "own spectrum": lambda out, y, x, m: (
        (torch.fft.rfft(out, dim=1).abs() - torch.fft.rfft(x, dim=1).abs()).square().mean()
    ),
    "time first": lambda out, y, x, m: F.cross_entropy(
        out.transpose(0, 1).reshape(-1, C), y.T.reshape(-1).clamp(min=0)
    ),
    "two views, a class for each row": lambda out, y, x, m: F.cross_entropy(
        torch.cat([out[:, 0], out[:, 1]]), torch.arange(2 * B) // B
    ),
    "interpolated": lambda out, y, x, m: F.interpolate(out, size=3, mode="linear").square().mean(),
}


def berhu(out, y, x, m):
    error = (out - x).abs()
    threshold = 0.2 * error.max().detach()
    return torch.where(error <= threshold, error, (error.square() + threshold**2) / (2 * threshold)).mean()


def hard(out, y, x, m):
    each = (out - x).square().mean((1, 2))
    return (each * (each / each.sum()).detach()).sum()


def hooked(out, y, x, m):
    out.register_hook(lambda gradient: gradient / gradient.norm())
    return (out - x).square().mean()


def hooked_inside(out, y, x, m):
    each = (out - x).square().mean((1, 2))
    each.register_hook(lambda gradient: gradient * each.detach() / each.detach().max())
    return each.mean()


def batch_hard(out, y, x, m):
    flat, label = out.flatten(1), classes(y)
    far = (flat[:, None] - flat[None]).square().sum(2)
    same = label[:, None] == label[None]
    return ((far * same).max(1).values - (far + 1e3 * same).min(1).values + 0.3).clamp(min=0).mean()


def info_nce(out, y, x, m):
    a, b = F.normalize(out[:, 0], dim=1), F.normalize(out[:, 1], dim=1)
    return F.cross_entropy(a @ b.T / 0.1, torch.arange(len(out)))


def sim_clr(out, y, x, m):
    z = F.normalize(torch.cat([out[:, 0], out[:, 1]]), dim=1)
    scores = (z @ z.T).masked_fill(torch.eye(2 * B, dtype=torch.bool), -9e9)
    return F.cross_entropy(scores, torch.arange(2 * B).roll(B))


def covariance(out, y, x, m):
    z = out.flatten(1)
    gram = z.T @ z / len(z)
    return (gram - torch.diag(torch.diag(gram))).square().sum()


def balanced(out, y, x, m):
    counts = classes(y).bincount(minlength=C).float()
    return F.cross_entropy(out[:, 0], classes(y), weight=1 / (counts + 1), reduction="none").mean()


def written(out, y, x, m):
    out = out * 1
    out[1:] = out[1:] - out[:-1].detach()
    return (out - x).square().mean()


def normalised(out, y, x, m):
    return (nn.BatchNorm1d(C)(out[:, 0]) - x[:, 0]).square().mean()


def by_tokens(out, y, x, m):
    each = F.cross_entropy(out.transpose(1, 2), y, reduction="none")
    return each.sum() / (y != -100).sum()


def by_share(out, y, x, m):
    share = m.float() / m.sum()
    return ((out - x).square().mean(2) * share).sum()


def kept(memory):
    def loss(out, y, x, m):
        each = (out - x).square().mean((1, 2))
        memory.append(each.detach().mean())
        return each.mean() / memory[0]

    return loss


def put_in(out, y, x, m):
    factor = torch.ones_like(out)
    factor.data = (out / out.abs().max()).detach()
    return ((out - x) * factor).square().mean()


def beside_a_view(out, y, x, m):
    own = out * 1
    view = own.flatten(1)
    own.sub_(own.detach().mean())
    return view.square().mean()


def written_before(out, y, x, m):
    x.copy_(torch.fft.fft(x, dim=0).real)
    return torch.fft.rfft(out - x, dim=1).abs().mean()


def a_number_by_an_alias(out, y, x, m):
    constant = torch.ones(C)
    constant.data.mul_(x.mean().item())
    return ((out - x) * constant).square().mean()


def hooked_on_the_graph(out, y, x, m):
    each = (out - x).square().mean((1, 2))
    largest = each.detach().max()
    each.grad_fn.register_prehook(lambda gradients: (gradients[0] / largest,))
    return each.mean()


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, out):
        return out.square().mean()

    @staticmethod
    def backward(ctx, gradient):
        return gradient.expand(B, T, C).clone()


REFUSED = {
    "zeros, as many as a mask chose": lambda out, y, x, m: (
        (out - x).square().mean() * (((m.nonzero().zero_() + 1).sum() % 7) + 1)
    ),
    "as many columns as the largest label": lambda out, y, x, m: (
        (out - x).square().mean() * F.one_hot(y[:, 0].abs().long()).shape[1]
    ),
    "berhu": berhu,
    "the largest loss": lambda out, y, x, m: (each := (out - x).square().mean((1, 2))).mean() / each.detach().max(),
    "hardness": hard,
    "hook on outputs": hooked,
    "hook inside": hooked_inside,
    "a frozen layer along the rows": lambda out, y, x, m: FROZEN["GRU"](out)[0].square().mean(),
    "a frozen layer begun by all rows": begun_by_all,
    "a frozen layer's weights of all rows": lambda out, y, x, m: (
        torch.gru(
            out, torch.zeros(1, B, C), [w * x.mean() for w in ALONE.parameters()], True, 1, 0.0, False, False, True
        )[0]
        .square()
        .mean()
    ),
    "median": lambda out, y, x, m: ((out - x).abs() - (out - x).abs().median()).abs().mean(),
    "quantile": lambda out, y, x, m: (out - x).flatten(1).abs().mean(1).quantile(0.5),
    "largest few": lambda out, y, x, m: (out - x).square().mean((1, 2)).topk(3).values.mean(),
    "batch-hard triplets": batch_hard,
    "contrastive": info_nce,
    "covariance": covariance,
    "centred targets": lambda out, y, x, m: (out - (x - x.mean(0))).square().mean(),
    "centred by Variable": lambda out, y, x, m: (out - (x - torch.autograd.Variable(x).mean(0))).square().mean(),
    "standardised outputs": lambda out, y, x, m: ((out - x.mean()) / x.std()).square().mean(),
    "focal by positives": lambda out, y, x, m: ((out - x).square().mean(2) * m).sum() / m.sum().clamp(min=1),
    "tokens of the batch": by_tokens,
    "share of the batch": by_share,
    "masked mean": lambda out, y, x, m: (out - x)[m].square().mean(),
    "sorted": lambda out, y, x, m: (out[:, 0, 0].sort().values - x[:, 0, 0].sort().values).square().mean(),
    "cumulated": lambda out, y, x, m: (out - x).cumsum(0).square().mean(),
    "balanced by counts": balanced,
    "class weights under a mean": lambda out, y, x, m: F.cross_entropy(out[:, 0], classes(y), WEIGHT),
    "batch normalisation": normalised,
    "softmax over rows": lambda out, y, x, m: (out.softmax(0) - x).square().mean(),
    "distances": lambda out, y, x, m: torch.cdist(out[:, 0], out[:, 0]).mean(),
    "neighbours": lambda out, y, x, m: (out - x.roll(1, 0)).square().mean(),
    "column": lambda out, y, x, m: (out[:, 0, :1] - x[:, 0, 0]).square().mean(),
    "rank of the loss": lambda out, y, x, m: (out - x).square().mean().clamp(max=1.0),
    "power of a mean": lambda out, y, x, m: (out - x).square().mean().sqrt(),
    "baseline": lambda out, y, x, m: (out.mean((1, 2)) * (x.mean((1, 2)) - x.mean())).mean(),
    "a row for all": lambda out, y, x, m: (out * out[UNIT].detach()).mean(),
    "own function": lambda out, y, x, m: Reversed.apply(out) + out.mean(),
    "written by rows": lambda out, y, x, m: (lambda t: (t.copy_(m.float() / m.sum()), (out * t[..., None]).sum())[1])(
        torch.zeros(B, T)
    ),
    "data put in": put_in,
    "given alone, and reads all": lambda out, y, x, m: ExampleLoss(lambda o: (o - x.mean()).square().mean())(out),
    "mapped by hand": lambda out, y, x, m: torch.func.vmap(lambda o: (o - x.mean()).square().mean())(out).mean(),
    "nonzero": lambda out, y, x, m: out[m.nonzero(as_tuple=True)].square().sum() / B,
    "the largest": lambda out, y, x, m: (out - x).square().mean((1, 2)).max(),
    "reversed": lambda out, y, x, m: (out - x.flip(0)).square().mean(),
    "rolled by one and by two": lambda out, y, x, m: (out.roll(1, 0) - x.roll(2, 0)).square().mean(),
    "in another fixed order": lambda out, y, x, m: (out[ORDER] - x).square().mean(),
    "halves": lambda out, y, x, m: (out.chunk(2)[0] - x.chunk(2)[1]).square().mean(),
    "halves of the outputs": lambda out, y, x, m: (out.split(B // 2)[0] * out.split(B // 2)[1]).mean(),
    "one row on": lambda out, y, x, m: (out[1:] - x[:-1]).square().mean(),
    "picked by others' masks": lambda out, y, x, m: out[m.flip(0)].square().sum(),
    "gathered from the batch": lambda out, y, x, m: out[:, 0].gather(0, y.clamp(min=0)).square().mean(),
    "by the labels of all": lambda out, y, x, m: out[:, 0][:, classes(y)].square().mean(),
    "selected by the labels of all": lambda out, y, x, m: out[:, 0].index_select(1, classes(y)).square().mean(),
    "others' labels": lambda out, y, x, m: F.cross_entropy(out[:, 0], classes(y).flip(0), reduction="sum"),
    "class weights of the batch": lambda out, y, x, m: F.cross_entropy(
        out[:, 0], classes(y), x.sum((0, 1)), reduction="sum"
    ),
    "a layer norm of the batch": lambda out, y, x, m: (F.layer_norm(out, out.shape) * x).mean(),
    "a group norm of the batch": lambda out, y, x, m: (F.group_norm(out[:, 0].T[None], 2)[0].T * x[:, 0]).mean(),
    "a determinant of the batch": lambda out, y, x, m: torch.linalg.det(out.flatten(1)[:, :B]).mean(),
    "singular values of the batch": lambda out, y, x, m: torch.linalg.svdvals(out.flatten(1)).mean(),
    "of rows, and of what has the same shape": lambda out, y, x, m: (
        (square := out.flatten(1)[:, :B]).exp().sum(1) * square.T.exp().sum(1)
    ).mean(),
    "a product of all": lambda out, y, x, m: out.sigmoid().prod().log(),
    "a view, rolled by a row": lambda out, y, x, m: F.mse_loss((z := torch.cat([out, x])).roll(1, 0), z),
    "halves of two views": lambda out, y, x, m: (torch.cat([out, x])[B // 2 : -B // 2] * out).mean(),
    "two views and one": lambda out, y, x, m: (torch.cat([out, x])[::2] * out).mean(),
    "two views, each with all": lambda out, y, x, m: torch.pdist(torch.cat([out, x]).flatten(1)).mean(),
    "products of rows": lambda out, y, x, m: (out.flatten(1) @ out.flatten(1).T).mean(),
    "own and others' targets": lambda out, y, x, m: (out - x).square().mean() + (out - x.roll(1, 0)).square().mean(),
    "one order and another": lambda out, y, x, m: ((out[torch.arange(B)] - x) * (out[ORDER] - x)).mean(),
    "by a Python function": lambda out, y, x, m: (out * torch.zeros(B, T, C).map_(x, lambda a, b: a + b)).mean(),
    "written beside a view": beside_a_view,
    "a number written by an alias": a_number_by_an_alias,
    "written before rows are run": written_before,
}


def one_row_of_an_index(out, y, x, m):
    out = out[:, 0].roll(-UNIT, 0)
    return (out * out.gather(1, torch.zeros(1, C, dtype=torch.long)).detach()).sum()


ROW_BY_ROW = {
    "two views, taken apart across others": lambda out, y, x, m: (
        torch.cat([out, x]).flatten(1)[None].reshape(2, 2, B, -1).prod(0).mean()
    ),
    "both views of all": sim_clr,
    "in place": written,
    "a hook on the graph": hooked_on_the_graph,
    "tokens of some rows": lambda out, y, x, m: F.cross_entropy(out[1:].transpose(1, 2), y[1:]),
    "one row of an index": one_row_of_an_index,
    "vmap over tokens that stand first": lambda out, y, x, m: torch.vmap(torch.std)(out.transpose(0, 1)).mean(),
    "vmap with a sum over the batch": lambda out, y, x, m: torch.vmap(lambda o, t: (o / t).square().mean())(
        out, x.sum().expand(B)
    ).mean(),
    "slices of two rows": lambda out, y, x, m: sum(out.view(-1, C)[i : i + 3].std() for i in range(0, B * T - 3, 3)),
    "by two rows' labels": lambda out, y, x, m: sum(
        out[i, y[i, 0].clamp(min=0) % T, y[i - 1, 0].clamp(min=0)].square() for i in range(B)
    ),
    "by one row's label": lambda out, y, x, m: out[:, 0, classes(y)[UNIT]].square().mean(),
}


SQUARES = "squares"
BY_ONE = {
    "zipped": (SQUARES, lambda out, y, x, m: sum(F.mse_loss(o, t) for o, t in zip(out, x, strict=True)) / len(x)),
    "stacked": (
        SQUARES,
        lambda out, y, x, m: torch.stack([F.mse_loss(o, t) for o, t in zip(out, x, strict=True)]).mean(),
    ),
    "by place": (SQUARES, lambda out, y, x, m: sum((out[i] - x[i]).square().mean() for i in range(-B, 0)) / B),
    "slices and places": (
        SQUARES,
        lambda out, y, x, m: sum((out[i : i + 1].squeeze(0) - x[i : i + 1]).square().mean() for i in range(B)) / B,
    ),
    "pieces of flat tokens": (
        SQUARES,
        lambda out, y, x, m: (
            sum(F.mse_loss(o, t) for o, t in zip(out.view(-1, C).split(T), x.view(-1, C).split(T), strict=True)) / B
        ),
    ),
    "put together again": (
        SQUARES,
        lambda out, y, x, m: (torch.stack([*out]) - torch.cat([t[None] for t in x])).square().mean(),
    ),
    "by vmap": (SQUARES, lambda out, y, x, m: torch.vmap(lambda o, t: (o - t).square().mean())(out, x).mean()),
    "by vmap, of a function": (
        SQUARES,
        lambda out, y, x, m: torch.func.vmap(F.mse_loss, (0, 0), chunk_size=3)(out, x).mean(),
    ),
    "classes": (
        "cross entropy",
        lambda out, y, x, m: sum(F.cross_entropy(o[0], t[0].clamp(min=0)) for o, t in zip(out, y, strict=True)) / B,
    ),
    "tokens of each": (
        "tokens",
        lambda out, y, x, m: sum(F.cross_entropy(o, t) for o, t in zip(out, y, strict=True)) / len(out),
    ),
    "by its label": (
        "cross entropy",
        lambda out, y, x, m: -sum(out[:, 0].log_softmax(1)[i, y[i, 0].clamp(min=0)] for i in range(B)) / B,
    ),
    "what its own mask chose": (
        "picked by a mask, a sum",
        lambda out, y, x, m: sum(o[k].square().sum() for o, k in zip(out, m, strict=True)) / B,
    ),
    "masks' own means": (
        "masked, own counts",
        lambda out, y, x, m: (
            sum((o - t)[k].square().mean().nan_to_num() for o, t, k in zip(out, x, m, strict=True)) / B
        ),
    ),
}


@pytest.mark.parametrize("name", BY_ONE)
def test_a_loss_that_takes_rows_one_by_one_is_that_of_the_batch(name):
    """The same sums, and noise, as of the loss of the whole batch, which other tests compare with single rows."""
    whole, loss = BY_ONE[name]
    check(loss, "proved")
    found, same = run(loss, False)[0], run(PROVED[whole], False)[0]
    torch.testing.assert_close(found, same, rtol=1e-4, atol=1e-5 * float(same.abs().max()))


def put_into_a_row(out, y, x, m):
    out = out * 1
    out[0] = out.sum(0)
    return (out - x).square().mean()


def through_its_memory(out, y, x, m):
    return (out * 1)[0].as_strided((B, T, C), (T * C, C, 1)).square().mean()


ROWS_MEET = {
    "neighbours": lambda out, y, x, m: sum((out[i] - x[i - 1]).square().mean() for i in range(B)),
    "one before": lambda out, y, x, m: sum((out[i] * out[i - 1].detach()).mean() for i in range(B)),
    "another's label": lambda out, y, x, m: sum(F.cross_entropy(out[i, :1], y[i - 1, :1]) for i in range(B)),
    "another's class weights": lambda out, y, x, m: sum(
        F.cross_entropy(out[i, :1], classes(y)[i, None], x[i - 1, 0].exp()) for i in range(B)
    ),
    "the largest of a list": lambda out, y, x, m: torch.stack([o.square().mean() for o in out]).max(),
    "a share of a list": lambda out, y, x, m: torch.stack([o.mean() for o in out]).softmax(0)[UNIT],
    "a list in another order": lambda out, y, x, m: (torch.stack([*out][::-1]) - x).square().mean(),
    "a mean of what masks chose": lambda out, y, x, m: (
        torch.cat([o[k] for o, k in zip(out, m, strict=True)]).pow(2).mean()
    ),
    "a sum for as many as a mask chose": lambda out, y, x, m: (out[0][m[0]].sum(1) + out.sum()).sum(),
    "a sum for as many as bytes chose": lambda out, y, x, m: (out[0][m[0].byte()].sum(1) + out.sum()).sum(),
    "a sum for as many as a mask chose, times a number": lambda out, y, x, m: (
        out[0][m[0]].sum(1) * out[0].mean() + out.sum()
    ).sum(),
    "a mean of what masks of two orders chose": lambda out, y, x, m: torch.cat(
        [out[0][m[0]], x.flip(0)[0][m.flip(0)[0]], out[UNIT][m[UNIT]]]
    ).mean(),
    "a mean of what masks chose, and a constant": lambda out, y, x, m: torch.cat(
        [*(o[k] for o, k in zip(out, m, strict=True)), torch.zeros(1, C)]
    ).mean(),
    "a row and the one behind it": lambda out, y, x, m: sum(
        (out.unbind()[i - 1] * out[i].detach()).mean() for i in range(1, B)
    ),
    "a row and the one behind it, in pieces": lambda out, y, x, m: sum(
        (out.split(1)[i - 1][0] * out[i].detach()).mean() for i in range(1, B)
    ),
    "a sum for as many as a label says": lambda out, y, x, m: (
        torch.tensor_split(out[UNIT], y[UNIT, :1])[0].sum(1) + out.sum()
    ).sum(),
    "as many rows as a label says": lambda out, y, x, m: out.tensor_split(y[UNIT, :1])[0].sum(),
    "pieces of two rows": lambda out, y, x, m: sum(o.std() for o in out.view(-1, C).split(3)),
    "as many draws as a mask chose": lambda out, y, x, m: sum(
        F.dropout(o[k]).sum() for o, k in zip(out, m, strict=True)
    ),
    "the memory around a row": through_its_memory,
    "a sum put into a row": put_into_a_row,
    "vmap that reads all": lambda out, y, x, m: torch.vmap(lambda o, t: (o - t / x.max()).square().mean())(
        out, x
    ).mean(),
    "vmap of others' targets": lambda out, y, x, m: torch.vmap(F.mse_loss)(out, x.flip(0)).mean(),
    "vmap into another dimension": lambda out, y, x, m: (
        torch.vmap(lambda o: o.mean(1), out_dims=1)(out).softmax(1).square().sum()
    ),
    "vmap over tokens": lambda out, y, x, m: torch.vmap(lambda o: o.std(0).sum(), in_dims=1)(out).mean(),
    "vmap, then the largest": lambda out, y, x, m: torch.vmap(F.mse_loss)(out, x).max(),
}


def test_a_sum_over_the_batch_is_no_row_of_an_example_loss():
    check(lambda out, y, x, m: ExampleLoss(lambda o: o.pow(3).sum())(out.sum(0)), "mapped")


@pytest.mark.filterwarnings("ignore:indexing with dtype torch.uint8")
@pytest.mark.parametrize("name", ROWS_MEET)
def test_rows_that_are_taken_one_by_one_and_meet_are_refused(name):
    check(ROWS_MEET[name], "refused")


def test_the_words_of_torch_about_the_batch_are_not_chained():
    """They name numbers and shapes of it: how many the mask of an example chose."""
    with pytest.raises(ModelError, match="RuntimeError in ") as error:
        one_batch(lambda out, y, x, m: (out[0][m[0]].sum(1) + out.sum()).sum())
    assert error.value.__cause__ is error.value.__context__ is None


def test_a_loss_that_is_run_row_by_row_has_no_number_of_a_batch_fetched_ahead():
    """Its units would move the gradients of this batch's, through a number that looks like a constant here."""
    for replaced in (False, True):
        model = Table()
        loader = DataLoader(TensorDataset(*data(replaced)), batch_size=4)
        plan = ao.plan(loader=loader, epochs=1, epsilon=8, delta=1e-5, mechanism="independent")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        private, _, loader = ao.PrivacyEngine(plan, key=bytes(32)).make_private(model, optimizer, loader)
        (ids, scale, *_), (_, _, _, ahead, _) = loader
        spectrum = torch.fft.rfft(private(ids, scale), dim=1).abs()
        with pytest.raises(ModelError, match="made of two batches"):
            (spectrum * ahead.sum()).mean().backward()


def test_a_row_of_one_batch_is_no_row_of_another():
    plan = plan_at_sigma(1.0, dataset_size=B, batch_size=B, epochs=1, delta=1e-5, mechanism="independent")
    model = Table()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loader = DataLoader(TensorDataset(*data(False)), batch_size=B // 2)
    private, _, loader = ao.PrivacyEngine(plan, key=bytes(32)).make_private(model, optimizer, loader, accumulate=2)
    first, second = [private(ids, scale) for ids, scale, *_ in [*loader]]
    with pytest.raises(ModelError, match="divided by, or weighted with"):
        (first[0] * second[0]).mean().backward()


def one_batch(loss):
    plan = plan_at_sigma(1.0, dataset_size=B, batch_size=B, epochs=1, delta=1e-5, mechanism="independent")
    model = Table()
    loader = DataLoader(TensorDataset(*data(False)), batch_size=B)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    private, _, loader = ao.PrivacyEngine(plan, key=bytes(32)).make_private(model, optimizer, loader)
    for ids, scale, *rest in loader:
        loss(private(ids, scale), *rest).backward()


def test_a_frozen_network_that_cannot_be_run_row_by_row_is_to_be_run_before_training(monkeypatch):
    monkeypatch.setattr(coupling, "_RECURRENT", set())
    told, verdict = run(recurrent("GRU"), False)
    assert verdict == "refused"
    assert "in gru" in told
    assert "once before training" in told
    assert "put it into the data set as a column" in told


def test_a_loss_of_several_numbers_does_not_say_how_many_a_mask_chose():
    with pytest.raises(ModelError, match="has several: call") as error:
        one_batch(lambda out, y, x, m: out[m].sum(1))
    assert str(int(data(False)[4].sum())) not in str(error.value)


@pytest.mark.parametrize("alias", [lambda t: t.data, lambda t: torch.from_numpy(t.numpy())], ids=["data", "NumPy"])
def test_a_function_under_vmap_reads_nothing_that_batches_were_written_into(alias):
    running = torch.ones(())
    written = alias(running)

    def loss(out, y, x, m):
        value = torch.vmap(lambda o, t: ((o - t) / running).square().mean())(out, x).mean()
        written.add_(x.mean())
        return value

    for replaced in (False, True):
        written.fill_(1.0)
        assert run(loss, replaced)[1] == "refused"


@pytest.mark.parametrize("name", PROVED)
def test_losses_that_are_proved(name):
    check(PROVED[name], "proved")


@pytest.mark.parametrize("name", MAPPED)
def test_losses_that_are_run_row_by_row(name):
    """What comes back is what the loss itself would give, where that is of single rows."""
    check(MAPPED[name], "mapped")


@pytest.mark.parametrize("name", REFUSED)
def test_losses_that_couple_are_refused(name):
    check(REFUSED[name], "refused")


COUNTS = [
    len, torch.numel, lambda t: t.shape[0], lambda t: t.size(0), lambda t: len(t.tolist()), lambda t: sum(1 for _ in t),
    lambda t: len(t.unbind()), lambda t: len(t.split(1)), lambda t: t.t().contiguous().stride(0), lambda t: t.nbytes,
]  # fmt: skip
CHOSEN = [
    lambda y, m: m.nonzero(), lambda y, m: y[m.any(1)], lambda y, m: m[0].nonzero(),
    lambda y, m: y[m.any(1)] + 1, lambda y, m: y.unique(),
]  # fmt: skip


@pytest.mark.parametrize("count", COUNTS)
def test_that_no_loss_has_the_number_of_what_a_mask_chose_is_the_callers_word(count):
    """A Python number, which nobody follows further: the loss is no longer said to be proved."""
    assert run(lambda out, y, x, m: (out - x).square().mean() * count(y), False)[1] == "proved"
    for chosen in CHOSEN:
        loss = lambda out, y, x, m, chosen=chosen: (out - x).square().mean() / (1 + count(chosen(y, m)))  # noqa: E731
        assert run(loss, False)[1] == "promised"


LOOKS = {
    "a branch": lambda x: 5.0 if x.mean() > 0 else -5.0,
    "a branch by a number": lambda x: 5.0 if x.mean().item() > 0 else -5.0,
    "a branch by all": lambda x: 1.0 + torch.allclose(x, x.clamp(max=3)),
    "a truth": lambda x: 1.0 + (x > 0).all().item(),
    "a float": lambda x: float(x.mean()),
    "a Python function": lambda x: x.clone().apply_(abs) is not None,
    "an array": lambda x: x.numpy().mean().item(),
    "memory": lambda x: float(x.untyped_storage()[0]),
    "a float of a number": lambda x: float(x.mean().item()),
}


@pytest.mark.parametrize("name", LOOKS)
def test_that_no_loss_follows_from_a_look_is_the_callers_word(name):
    """The loop goes on: it may raise, or log. But what a branch chose for the loss is seen by nobody."""
    assert run(lambda out, y, x, m: (out - x).square().mean() * LOOKS[name](x), False)[1] == "promised"
    assert run(lambda out, y, x, m: (out - x).square().mean() * LOOKS[name](torch.ones(2, 3)), False)[1] == "proved"


@pytest.mark.parametrize("losses", [MAPPED, REFUSED, ROW_BY_ROW], ids=["mapped", "refused", "row by row"])
def test_a_loss_that_comes_when_batches_are_replayed_is_judged_as_in_the_first(losses):
    for name in list(losses)[:: 2 if losses is ROW_BY_ROW else 8]:
        found = [run(late(losses[name]), replaced, steps=8) for replaced in (False, True)]
        (kept,) = {kept for _, kept in found}
        assert kept in ("mapped" if losses is MAPPED else "refused", "mapped" if losses is ROW_BY_ROW else ""), name
        if kept == "refused":
            assert found[0] == found[1], name
        else:
            others = torch.arange(B) != UNIT
            assert torch.equal(found[0][0][:, others], found[1][0][:, others]), name


def late(loss):
    """A loss that is another one in the first six batches."""
    calls = itertools.count()
    return lambda out, y, x, m: F.cross_entropy(out[:, 0], classes(y)) if next(calls) < 6 else loss(out, y, x, m)


def test_gradients_that_come_by_ways_of_their_own_are_refused_when_batches_are_replayed():
    """Nothing of the loss is written down: what comes to the outputs is seen there alone."""

    def by_hand(out, y, x, m):
        with torch._C.DisableTorchFunctionSubclass():
            (out * out.mean(0)).sum().backward()

    words, kept = run(late(by_hand), False, steps=8)
    assert kept == "refused"
    assert "by a way that is not followed" in words


@pytest.mark.parametrize("name", ROW_BY_ROW)
def test_a_coupling_that_no_rule_sees_is_run_row_by_row(name):
    first, kept = run(ROW_BY_ROW[name], False)
    second, again = run(ROW_BY_ROW[name], True)
    assert kept == again
    if kept == "refused":
        assert first == second
    else:
        others = torch.arange(B) != UNIT
        assert torch.equal(first[:, others], second[:, others])


@pytest.mark.parametrize(
    "mixed",
    [
        lambda x: 0.7 * x + 0.3 * x[torch.arange(B).roll(1)],
        lambda x: 0.7 * x + 0.3 * x.flip(0),
        lambda x: x - x.mean(),
        lambda x: x / x.max(0).values,
        lambda x: put_in_place(x, slice(0, 4), x[torch.arange(B).roll(1)][:4]),
        lambda x: put_in_place(x, 0, x.sum()),
    ],
)
def test_a_model_that_is_given_rows_of_several_units(mixed):
    """Mixup, and statistics of the batch: of the model's inputs."""

    words = [run_inputs(mixed, replaced) for replaced in (False, True)]
    assert words[0] == words[1]
    assert "give it rows of single examples" in words[0]
    assert "first dimension" not in words[0]  # why it is of several


def put_in_place(x, place, value):
    """As CutMix does."""
    x[place] = value
    return x


def run_inputs(change, replaced):
    plan = plan_at_sigma(1.0, dataset_size=B, batch_size=B, epochs=1, delta=1e-5, mechanism="independent")
    model = Table()
    engine = ao.PrivacyEngine(plan, key=bytes(32))
    loader = DataLoader(TensorDataset(*data(replaced)), batch_size=B)
    private, _, loader = engine.make_private(model, torch.optim.SGD(model.parameters(), lr=0.01), loader)
    ids, scale, *_ = next(iter(loader))
    with pytest.raises(ModelError) as error:
        private(ids, change(scale))
    return str(error.value)


def test_rows_in_another_order_keep_with_their_targets():
    order = torch.arange(B).flip(0)

    def loss(out, y, x, m):
        return F.mse_loss(out[order], x[order]) + F.mse_loss(out.flip(0), x.flip(0)) + F.mse_loss(out[:4], x[:4])

    check(loss, "proved")
    check(lambda out, y, x, m: F.mse_loss(out[order], x), "refused")
    check(lambda out, y, x, m: F.mse_loss(out[:4], x[4:]), "refused")


@pytest.mark.parametrize(
    ("loss", "verdict"),
    [
        (lambda out, x: F.mse_loss(out, x), "promised"),
        (lambda out, x: (out - x).square().mean() / x.abs().max(), "refused"),
        (lambda out, x: (out - x).square().mean() * torch.tensor(2.0), "refused"),
        (lambda out, x: (out - x).square().mean() * nn.Parameter(torch.tensor(2.0), requires_grad=False), "promised"),
        (lambda out, x: ((out - x).square() * x.flatten(0, 1).mean(0)).mean(), "refused"),
    ],
)
def test_what_is_not_followed_must_be_rows_or_numbers(loss, verdict):
    """Targets that the loop made of what no tensor was: of unknown origin."""
    kept = [data(replaced)[3].tolist() for replaced in (False, True)]
    for replaced in (False, True):
        found = run(lambda out, y, x, m, i=replaced: loss(out, torch.tensor(kept[i])), replaced, strict=True)
        assert found[1] == verdict


@pytest.mark.parametrize(
    "make", [lambda: nn.BatchNorm1d(1).running_var, lambda: nn.Parameter(torch.ones(1), requires_grad=False)]
)
def test_a_buffer_of_the_criterion_into_which_batches_are_written(make):
    """The first batch does not read it; the second does."""
    for replaced in (False, True):
        running = make()

        def loss(out, y, x, m, running=running):
            each = (out - x).square().mean((1, 2))
            value = each.mean() / running.clone().sum()
            running.mul_(0.9).add_(each.detach().mean(), alpha=0.1)
            return value

        assert run(loss, replaced)[1] == "refused"


ASIDE = {
    "data": lambda kept, value: kept.data.mul_(0.9).add_(value, alpha=0.1),
    "detached": lambda kept, value: kept.detach().mul_(0.9).add_(value, alpha=0.1),
    "view": lambda kept, value: kept.view(-1).mul_(0.9).add_(value, alpha=0.1),
    "out": lambda kept, value: torch.add(kept.detach() * 0.9, value * 0.1, out=kept),
    "itself": lambda kept, value: kept.mul_(0.9).add_(value, alpha=0.1),
    "item": lambda kept, value: kept.__setitem__(0, value),
}


@pytest.mark.parametrize("after", [False, True], ids=["in the loss", "after backward"])
@pytest.mark.parametrize("parameter", [False, True], ids=["tensor", "parameter"])
@pytest.mark.parametrize("write", ASIDE)
def test_what_is_written_where_nobody_looks_is_refused_in_the_next_batch(write, parameter, after):
    """By an alias, into a parameter: what is computed of it alone is never seen. Between loss and backward, in this one
    where nobody knows which tensors show it.
    """
    plan = plan_at_sigma(1.0, dataset_size=B, batch_size=B, epochs=2, delta=1e-5, mechanism="independent")
    model, kept = Table(), torch.ones(1)
    kept = nn.Parameter(kept, requires_grad=False) if parameter else kept
    engine = ao.PrivacyEngine(plan, key=bytes(32))
    loader = DataLoader(TensorDataset(*data(False)), batch_size=B)
    private, optimizer, loader = engine.make_private(model, torch.optim.SGD(model.parameters(), lr=0.01), loader)
    for step in range(2):
        for ids, scale, _, numbers, _ in loader:
            each = (private(ids, scale) - numbers).square().mean((1, 2))
            loss, value = (each / kept.clone().sum()).mean(), each.detach().mean()
            if step:
                with pytest.raises(ModelError, match="written|earlier batch"):
                    loss.backward()
                return
            if not after:
                ASIDE[write](kept, value)
            if not after and engine.training._watch.escaped:
                with pytest.raises(ModelError, match="were written"):
                    loss.backward()
                return
            loss.backward()
            if after:
                ASIDE[write](kept, value)
            optimizer.step()


def spectrum(out):
    return torch.fft.rfft(out, dim=1).abs().mean()


def written_after(read, write):
    """A loss that reads a constant, into which numbers of all rows are written before the way back."""

    def loss(out, y, x, m):
        constants = [torch.ones(C)]
        value = read(out, x, constants)
        write(constants, out.detach().mean((0, 1)) * 5)
        return value

    return loss


def by_criterion(out, x, constants):
    return ExampleLoss(lambda o, t: (constants[0] * (o - t).square()).mean())(out, x)


READERS = {
    "the loss that is run again": lambda out, x, c: spectrum(out + c[0]),
    "a criterion that is run again": lambda out, x, c: by_criterion(out, x, c) + spectrum(out),
    "vmap that is run again": lambda out, x, c: torch.vmap(lambda o: (o * c[0]).mean())(out).mean() + spectrum(out),
    "what the graph saved": lambda out, x, c: ((out - x).square() * c[0]).mean(),
    "what the graph of a criterion saved": by_criterion,
}
LATER = {
    "in place": lambda c, value: c[0].add_(value),
    "by its data": lambda c, value: c[0].data.add_(value),
    "another one": lambda c, value: c.__setitem__(0, value),
    "by set": lambda c, value: c[0].set_(value),
}


@pytest.mark.parametrize("write", LATER)
@pytest.mark.parametrize("reader", READERS)
def test_what_a_loss_has_read_is_not_what_its_way_back_reads_once_it_is_written(reader, write):
    kept = write == "another one" and reader not in ("a criterion that is run again", "vmap that is run again")
    told, found = [], []
    for replaced in (False, True):
        try:
            rows, verdict = run(written_after(READERS[reader], LATER[write]), replaced, steps=1)
        except TrainingError as error:
            rows, verdict = str(error), "refused"
        told.append(rows)
        found.append(verdict)
    assert found[0] == found[1]
    assert (found[0] != "refused") == kept
    if kept:
        others = torch.arange(B) != UNIT
        assert torch.equal(told[0][:, others], told[1][:, others])
    else:
        assert told[0] == told[1]


def by_distance(distance):
    def loss(out, y, x, m):
        out, x = out.flatten(1), x.flatten(1)
        return F.triplet_margin_with_distance_loss(out, x, x.flip(1), distance_function=distance(out), margin=50.0)

    return loss


def of_the_second_batch(joins):
    """A distance that joins rows from the second batch on."""
    calls = []

    def loss(out, y, x, m):
        calls.append(out)
        return by_distance(lambda _: distance)(out, y, x, m)

    def distance(a, b):
        return (a - b - (a.mean(0) if joins and len(calls) > 1 else 0)).norm(dim=1)

    return loss


def test_a_distance_of_ones_own_sees_rows_and_nothing_else_of_the_batch():
    check(by_distance(lambda out: lambda a, b: 1 - F.cosine_similarity(a, b)), "proved")
    check(by_distance(lambda out: nn.PairwiseDistance()), "proved")
    check(by_distance(lambda out: lambda a, b, mean=out.detach().mean(0): ((a - b) * mean).norm(dim=1)), "refused")
    check(of_the_second_batch(False), "proved")
    check(of_the_second_batch(True), "refused")


def test_a_criterion_that_reads_what_was_written_by_an_alias_is_refused():
    def loss(out, y, x, m):
        constant = torch.ones(C)
        constant.data.add_(out.detach().mean((0, 1)))
        return by_criterion(out, x, [constant])

    check(loss, "refused")


@pytest.mark.parametrize("read", [READERS["the loss that is run again"], READERS["a criterion that is run again"]])
def test_copies_of_outputs_and_statistics_of_the_loop_may_be_written_before_the_way_back(read):
    rows = []
    for replaced in (False, True):
        running = torch.zeros(C)

        def loss(out, y, x, m, running=running):
            value = read(out, x, [torch.ones(C)])
            shown = out.detach().clone()
            shown -= shown.mean(0)
            running.mul_(0.9).add_(out.detach().mean((0, 1)), alpha=0.1)
            return value

        found, kept = run(loss, replaced)
        assert kept == "mapped"
        rows.append(found)
    others = torch.arange(B) != UNIT
    assert torch.equal(rows[0][:, others], rows[1][:, others])


def test_numbers_of_an_earlier_batch_are_refused_where_they_come_back():
    for replaced in (False, True):
        words, verdict = run(kept([]), replaced)
        assert verdict == "refused"
        assert "takes rows" in words or "divided" in words


def test_a_loss_that_is_run_row_by_row_draws_as_many_numbers_as_one_that_is_not():
    """Its second run has generators of its own: what is drawn after it does not tell of it."""
    after = []

    def loss(out, y, x, m):
        value = torch.fft.rfft(F.dropout(out, 0.5), dim=1).abs().mean()
        after.append(torch.get_rng_state())
        return value

    plan = plan_at_sigma(1.0, dataset_size=B, batch_size=B, epochs=1, delta=1e-5, mechanism="independent")
    model = Table()
    engine = ao.PrivacyEngine(plan, key=bytes(32))
    loader = DataLoader(TensorDataset(*data(False)), batch_size=B)
    private, _, loader = engine.make_private(model, torch.optim.SGD(model.parameters(), lr=0.01), loader)
    for ids, scale, *rest in loader:
        loss(private(ids, scale), *rest).backward()
    assert engine.training.loss_kept == "mapped"
    assert torch.equal(after[0], torch.get_rng_state())


def into_out(out, y, x, m):
    largest, places = torch.zeros(T, C), torch.zeros(T, C, dtype=torch.long)
    torch.max(out.detach(), 0, out=(largest, places))
    return (out - largest).pow(2).mean()


def running_mean(out, y, x, m):
    mean, variance = torch.zeros(C), torch.ones(C)
    F.batch_norm(out[:, 0].detach(), mean, variance, training=True, momentum=1.0)
    return (out - mean).pow(2).mean()


def into_memory_of(out, y, x, m):
    written = torch.zeros(B, T, C)
    first = written[0]
    written.copy_(out.detach())
    return (out - first).pow(2).mean()


def of_its_gradient(out, y, x, m):
    (gradient,) = torch.autograd.grad(out.sum() ** 2, out, retain_graph=True)
    return (out * gradient).sum()


NOT_ROW_BY_ROW = {
    "the sigmoid of a sum": lambda out, y, x, m: -F.logsigmoid(out.sum()),
    "one row's label for all": lambda out, y, x, m: F.cross_entropy(out[:, 0], classes(y)[UNIT].expand(B)),
    "one row's label, by margins": lambda out, y, x, m: F.multi_margin_loss(out[:, 0], classes(y)[UNIT].expand(B)),
    "two shifts": lambda out, y, x, m: (out.roll((1, 2), (0, 1)) * out.roll((1, 2), (1, 0))).sum(),
    "a slice and an index": lambda out, y, x, m: (out[:1] * out[torch.tensor([0, 1, 1])].detach()).sum(),
    "a normalisation of one group": lambda out, y, x, m: (
        torch.native_group_norm(out, None, None, 1, B * T, C, 1, 1e-5)[0].pow(3).sum()
    ),
    "numbers as many as a mask says": lambda out, y, x, m: out.sum() / torch.ones_like(x[m[:, 0]]).sum(),
    "results into given tensors": into_out,
    "running means": running_mean,
    "a view made before its memory was written": into_memory_of,
    "a gradient of a sum": of_its_gradient,
    "a copy": lambda out, y, x, m: (out - copy.deepcopy(out.detach()).mean(0)).pow(2).mean(),
    "rows side by side": lambda out, y, x, m: out[torch.arange(B).view(2, -1)].softmax(1).pow(2).sum(),
    "a squeeze of nothing": lambda out, y, x, m: torch.squeeze(out[None], ()).softmax(1).pow(2).sum(),
    "rows of a table for two places": lambda out, y, x, m: (
        F.embedding(torch.zeros(2, B, dtype=torch.long), out[:, 0].t()).softmax(2).pow(2).sum()
    ),
}


def row_into_row(out, y, x, m):
    out = out * 1
    out[0] = out[UNIT]
    return out.square().sum()


def total_into_row(out, y, x, m):
    out = out * 1
    row, total = out[0], out.sum(0)
    row.copy_(total)
    return out.square().sum()


def in_a_view(out, y, x, m):
    out = out * 1
    out[:, 0].mul_(x.std().item())
    return out.square().mean()


def through_a_view(out, y, x, m):
    out = out * 1
    out.view(B // 2, -1).copy_(x.mean().expand(B // 2, 2 * T * C))
    return (out + out.detach()).square().sum()


NOT_ROW_BY_ROW |= {
    "a row into another": row_into_row,
    "a total into a row": total_into_row,
    "a mean through a view": through_a_view,
    "a number over a total": lambda out, y, x, m: torch.div(1.0, out.square().sum()),
    "rows as the classes of one example": lambda out, y, x, m: F.multilabel_margin_loss(out[:, 0, 0], classes(y)),
    "rows and products of rows": lambda out, y, x, m: (
        torch.addmm(out[:, 0], out.flatten(1)[:, :B], out[:, 1]).square().sum()
    ),
    "columns by vmap": lambda out, y, x, m: (out * torch.func.vmap(torch.mean, 3)(out.detach()[..., None])).sum(),
    "a gradient by torch.func": lambda out, y, x, m: (
        out * torch.func.grad(lambda o: o.sum() ** 2)(out.detach())
    ).sum(),
    "a derivative forward": lambda out, y, x, m: (
        out * torch.func.jvp(torch.sum, (out.detach(),), (torch.ones_like(x).as_subclass(torch.Tensor),))[0]
    ).sum(),
}


NOT_ROW_BY_ROW |= {
    "a count that was taken out": lambda out, y, x, m: (out - x).square().sum() / max(m.sum().item(), 1),
    "computed of what was taken out": lambda out, y, x, m: (
        out.square().mean() * (1 + round(2 * x.mean().item(), 3) ** 2)
    ),
    "a constant of what was taken out": lambda out, y, x, m: (out * (torch.ones(C) * x.std().item())).sum(),
    "a list of what was taken out": lambda out, y, x, m: out.square().sum() * sum(x.mean((1, 2)).tolist()),
    "a shape of what was taken out": lambda out, y, x, m: out[:, : m.sum(1).max().item()].square().sum(),
    "a view with what was taken out": in_a_view,
    "filled with what was taken out": lambda out, y, x, m: (out * torch.zeros(C).fill_(x.std().item())).sum(),
}


@pytest.mark.parametrize("name", NOT_ROW_BY_ROW)
def test_rules_do_not_take_these_for_rows(name):
    check(NOT_ROW_BY_ROW[name], "refused")


@pytest.mark.parametrize(
    "loss",
    [
        lambda out, y, x, m: torch.cdist(torch.ones(3, C), out).softmax(0).pow(2).sum(),
        lambda out, y, x, m: torch.cdist(out, out[:, 0].detach()).mean(),
    ],
)
def test_distances_of_other_ranks_are_run_row_by_row(loss):
    check(loss, "mapped")


@pytest.mark.parametrize("kind", [float, int])
def test_what_is_computed_of_a_number_that_was_taken_out_knows_it(kind):
    watch = coupling.LossWatch()
    one = coupling._taken_out(kind(3))
    two = [operator.add, operator.sub, operator.mul, operator.truediv, operator.floordiv, operator.mod, operator.pow]
    two += [operator.and_, operator.or_, operator.xor, operator.lshift, operator.rshift] if kind is int else []
    made = [f(*pair) for f in two for pair in ((one, kind(2)), (kind(2), one), (one, one))]
    made += [f(one) for f in (operator.neg, operator.pos, abs, round, math.floor)] + [sum([one, one])]
    made += [*divmod(one, 2), *divmod(kind(7), one), one.real, one.imag, one.conjugate(), *one.as_integer_ratio()]
    assert all(isinstance(number, coupling._TakenOut) for number in made)
    assert [f"{one:.2f}", str(one), json.dumps([one])] == [f"{kind(3):.2f}", str(kind(3)), json.dumps([kind(3)])]
    assert not watch.was_seen
    for look in (operator.not_, float, int, lambda one: one > 2, lambda one: one == 3, lambda one: max(1, one)):
        watch.was_seen = False
        look(one)
        assert watch.was_seen


def test_a_loss_of_one_example_at_a_time_has_its_gradients_where_it_is_run_row_by_row_too():
    def spectrum(out, y, x, m):
        return torch.fft.rfft(out - x, dim=1).abs().mean()

    both, kept = run(lambda *given: spectrum(*given) + ExampleLoss(nn.MSELoss())(given[0], given[2]), False)
    alone = run(spectrum, False)[0]
    assert kept == "mapped"
    assert (both - alone).abs().flatten(1).sum(1).gt(1e-3).all()


def test_numbers_that_are_taken_out_may_be_logged_and_saved():
    log = []

    def logged(out, y, x, m):
        loss = (out - x).square().mean()
        log.append(0.9 * sum(log) + loss.item() / m.sum().item())
        return loss

    check(logged, "proved")
    with io.BytesIO() as file:
        torch.save(log, file)
        file.seek(0)
        saved = torch.load(file)
    assert saved == log
    assert all(type(number) is float for number in saved)
    assert json.loads(json.dumps(log)) == log
    assert f"{log[0]:.3f}" == f"{saved[0]:.3f}"


@pytest.mark.parametrize("state", [NoRule("diagonal"), TOTAL])
def test_what_is_written_through_a_view_is_no_longer_of_its_rows(state):
    """Where the view was known as little before: what it shows may have been rows' own numbers all the same."""
    with Interpreter() as inside:
        rows, others = torch.ones(B, C), torch.ones(C)
        view = rows.diagonal()
        for tensor, own in ((rows, ByRow((0,), 0, 1)), (view, state), (others, state)):
            inside.put(tensor, own)
        view.copy_(others[: len(view)])
        assert isinstance(inside.state(rows), (NoRule, Coupled))


def test_a_dimension_that_is_squeezed_in_place_is_gone():
    check(lambda out, y, x, m: (out * 1)[None].squeeze_(0).softmax(0).pow(2).sum(), "mapped")


def test_rows_in_a_row_of_indices_stay_rows():
    check(lambda out, y, x, m: out[torch.arange(B)[None]].softmax(3).pow(2).sum(), "proved")
    check(lambda out, y, x, m: out[torch.arange(B)[None]].softmax(1).pow(2).sum(), "refused")


def in_a_list(out, y, x, m):
    ours = [out * 1]
    torch._foreach_mul_(ours, 2.0)
    return ours[0].pow(2).mean()


def into_a_memory(out, y, x, m):
    memory = [torch.zeros(out.shape)]
    torch._foreach_add_(memory, [out])
    return memory[0].pow(2).mean()


def by_keyword(out, y, x, m):
    torch.relu_(input=out * 1)
    return out.mean()


@pytest.mark.parametrize("loss", [in_a_list, into_a_memory, by_keyword])
def test_a_function_that_writes_into_a_list_is_refused_in_words(loss):
    with pytest.raises(ModelError, match="which is not followed; write into one tensor at a time"):
        one_by_one(lambda out, memory: loss(out, None, None, None), [])


def one_by_one(loss, memory, trained=()):
    plan = plan_at_sigma(1e-3, dataset_size=B, batch_size=1, epochs=1, delta=1e-5, clip_norm=1e3)
    model = Table()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loader = DataLoader(TensorDataset(*data(False)), batch_size=1)
    private, optimizer, loader = ao.PrivacyEngine(plan, key=bytes(32)).make_private(model, optimizer, loader)
    for ids, scale, *_ in loader:
        out = private(ids, scale)
        loss(out, memory).backward()
        memory.append(out.detach())
        optimizer.step()


@pytest.mark.parametrize(
    "write",
    [
        lambda x: x.div_(2),
        lambda x: F.relu(x, inplace=True),
        lambda x: x[:, 0].mul_(2),
        lambda x: operator.itruediv(x, 2),
    ],
)
def test_an_output_that_is_written_in_place_is_refused_in_words(write):
    """A copy may be written, as often as the loop likes."""
    told, kept = run(lambda out, y, x, m: write(out).square().mean(), False)
    assert kept == "refused"
    assert "written in place: make a new tensor" in told
    check(lambda out, y, x, m: write(out.clone()).square().mean(), "proved")


def test_a_batch_that_is_written_in_place_before_backward_is_refused_in_words():
    """As by `batch.div_(255)` of what the model was given; torch's own words name a tensor by its shape alone."""
    model = nn.Linear(3, 2)
    plan = ao.plan(dataset_size=8, batch_size=4, epochs=1, epsilon=8, delta=1e-3, mechanism="tree")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(TensorDataset(torch.ones(8, 3)), batch_size=4)
    private, _, loader = ao.PrivacyEngine(plan).make_private(model, optimizer, loader)
    (x,) = next(iter(loader))
    out = private(x)
    x.div_(255)
    with pytest.raises(TrainingError, match=r"was written in place since. Make a new tensor: x = x / 2"):
        out.square().mean().backward()
    assert model.weight.grad is None


def test_numbers_taken_out_of_an_earlier_batch_of_one_are_refused_too():
    memory = []

    def loss(out, _):
        memory.append(out.square().mean().item())
        return out.square().mean() * memory[0]

    with pytest.raises(ModelError, match="taken out"):
        one_by_one(loss, [])


def test_numbers_of_an_earlier_batch_of_one_are_refused_too():
    with pytest.raises(ModelError, match="earlier batch"):
        one_by_one(lambda out, memory: sum((out - other).pow(2).mean() for other in [*memory[-1:], 0.0]), [])
    one_by_one(lambda out, memory: out.std() * out.max() - out.squeeze().mean(), [])


def test_a_parameter_of_the_loss_gets_no_gradient_without_noise():
    temperature = nn.Parameter(torch.ones(()))
    for loss in (lambda out, *_: (out * temperature).pow(2).mean(), lambda out, *_: out.mean() + temperature):
        with pytest.raises(ModelError, match="without noise"):
            one_by_one(loss, [])
        check(loss, "refused")
    assert temperature.grad is None


@pytest.mark.parametrize("name", ["tokens", "accumulated", "given alone", "parts", "own spectrum"])
def test_no_tensor_stays_without_the_collector(name):
    """50 steps, proved or mapped: nothing of a batch is in a cycle, nor what the loop keeps of losses."""
    loss, counts, sums = {**PROVED, **MAPPED}[name], [], []

    def counted(out, y, x, m):
        looked = len(counts) in (10, 49)  # a look at all objects takes longer than the step
        counts.append(sum(isinstance(one, torch.Tensor) for one in gc.get_objects()) if looked else None)
        value = loss(out, y, x, m)
        sums[:] = [value.detach() + (sums[0] if sums else 0)]
        return value

    gc.collect()
    gc.disable()
    try:
        run(counted, False, steps=50, keep=False)
    finally:
        gc.enable()
    assert len(counts) == 50
    assert counts[10] is not None
    assert counts[10] == counts[49]


def test_outputs_go_before_their_gradients_come(monkeypatch):
    """Logits are the largest tensor of many models: held until the step ends, they stand beside two gradients."""
    alive, real = [], torch.autograd.backward

    def counted(*args, **kwargs):
        alive.append(sum(type(one) is torch.Tensor and one.shape == (B, 37) for one in gc.get_objects()))
        return real(*args, **kwargs)

    monkeypatch.setattr(torch.autograd, "backward", counted)
    x, y = torch.randn(8 * B, 4), torch.arange(8 * B) % 37
    loader = DataLoader(TensorDataset(x, y), B)
    plan = ao.plan(loader=loader, epochs=1, epsilon=8, delta=1e-3, mechanism="independent")
    model = nn.Linear(4, 37)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model, optimizer, loader = ao.PrivacyEngine(plan).make_private(model, optimizer, loader)
    for a, b in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(a), b).backward()
        optimizer.step()
    assert alive[-3:] == [0, 0, 0]  # the steps before are written down, by modes that hold what torch saves


@pytest.mark.parametrize("label", [-1, 3, 10**6])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_a_label_that_is_no_class_adds_zero_and_nothing_tells_of_it(label, reduction):
    """An error would tell of that unit, and name its label."""

    def loss(outputs, y):
        found = F.cross_entropy(outputs, y, reduction=reduction)
        return found if reduction == "mean" else found.sum() / len(y)

    torch.manual_seed(0)
    x, y = torch.randn(4, 3), torch.arange(4) % 3
    sums = []
    for labels in (y, torch.cat([y[:3], torch.tensor([label])])):
        model = nn.Linear(3, 3)
        nn.init.zeros_(model.weight)
        nn.init.zeros_(model.bias)
        plan = ao.plan(dataset_size=4, batch_size=4, epochs=1, epsilon=8, delta=1e-5, mechanism="independent")
        engine = ao.PrivacyEngine(plan, key=bytes(32))
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        private, optimizer, loader = engine.make_private(model, optimizer, DataLoader(TensorDataset(x, labels), 4))
        for inputs, targets in loader:
            loss(private(inputs), targets).backward()
            optimizer.step()
        sums.append(torch.cat([p.detach().reshape(-1) for p in model.parameters()]))
    alone = nn.Linear(3, 3)
    nn.init.zeros_(alone.weight)
    nn.init.zeros_(alone.bias)
    F.cross_entropy(alone(x[3:]), y[3:]).backward()
    gradient = torch.cat([p.grad.reshape(-1) for p in alone.parameters()])
    gradient *= min(1.0, plan.clip_norm / float(gradient.norm()))
    torch.testing.assert_close(sums[1] - sums[0], gradient / 4, rtol=1e-4, atol=1e-6)


class Carried(nn.Module):
    """A recurrent model that is given its state, as in truncated backpropagation through time."""

    def __init__(self):
        super().__init__()
        self.of_input, self.of_state, self.head = nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x, h):
        h = torch.tanh(self.of_input(x) + self.of_state(h))
        return self.head(h), h


def private_of(model, rows=8, batch_size=4):
    plan = ao.plan(dataset_size=rows, batch_size=batch_size, epochs=1, epsilon=8, delta=1e-5, mechanism="independent")
    data = TensorDataset(torch.randn(rows, 3), torch.arange(rows) % 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return ao.PrivacyEngine(plan, key=bytes(32)).make_private(model, optimizer, DataLoader(data, batch_size))


def test_what_libraries_do_with_batches_outputs_and_losses_goes_on_working():
    """Metrics that keep them over batches, moves to a device, copies, files, arrays."""
    metrics = pytest.importorskip("torchmetrics").MetricCollection({
        "accuracy": pytest.importorskip("torchmetrics").Accuracy(task="multiclass", num_classes=3),
        "area": pytest.importorskip("torchmetrics").AUROC(task="multiclass", num_classes=3),
    })  # fmt: skip
    send = pytest.importorskip("accelerate").utils.send_to_device
    nested = pytest.importorskip("transformers").trainer_pt_utils
    private, optimizer, loader = private_of(nn.Linear(3, 3))
    kept = []
    for batch in loader:
        x, y = send({"rows": batch}, "cpu")["rows"]
        outputs = private(x)
        loss = F.cross_entropy(outputs, y)
        metrics.update(outputs.softmax(1), y)
        kept.append(nested.nested_detach((outputs, {"labels": y})))
        assert isinstance(y, torch.LongTensor)
        assert nested.nested_numpify(kept[-1])[1]["labels"].tolist() == y.tolist()
        assert torch.equal(copy.deepcopy(outputs.detach()), outputs)
        loss.backward()
        optimizer.step()
    together = nested.nested_concat(*kept)
    assert float(metrics.compute()["accuracy"]) == (together[0].argmax(1) == together[1]["labels"]).double().mean()


@dataclasses.dataclass(frozen=True)
class Found:
    logits: torch.Tensor
    rest: types.MappingProxyType
    name: str = "own"


class Wrapped(nn.Linear):
    def forward(self, x):
        return Found(super().forward(x), types.MappingProxyType({"x": x, "twice": 2 * super().forward(x)}))


def test_outputs_in_dataclasses_and_read_only_mappings_are_followed():
    torch.manual_seed(0)
    private, optimizer, loader = private_of(Wrapped(3, 3))
    torch.manual_seed(0)
    plain, same, batches = private_of(nn.Linear(3, 3))
    with warnings.catch_warnings():
        warnings.simplefilter("error", ModelWarning)
        for (x, y), (given, labels) in zip(loader, batches, strict=True):
            found = private(x)
            assert type(found) is Found
            assert (found.name, [*found.rest]) == ("own", ["x", "twice"])
            F.cross_entropy(found.rest["twice"] - found.logits, y).backward()
            optimizer.step()
            F.cross_entropy(plain(given), labels).backward()
            same.step()
    torch.testing.assert_close(private.module.weight, plain.module.weight)


@pytest.mark.parametrize("name", ["logits", "twice"])
def test_rows_of_outputs_in_dataclasses_must_not_meet(name):
    private, _, loader = private_of(Wrapped(3, 3))
    found = private(next(iter(loader))[0])
    with pytest.raises(ModelError, match="couples examples"):
        (found.logits if name == "logits" else found.rest[name]).softmax(0).square().sum().backward()


def test_a_state_of_an_earlier_batch_is_not_given_to_the_model():
    private, optimizer, loader = private_of(Carried())
    h, taken = torch.zeros(4, 4), 0
    with pytest.raises(ModelError, match="of an earlier batch"):
        for x, y in loader:
            outputs, h = private(x, h)
            F.cross_entropy(outputs, y).backward()
            optimizer.step()
            h = h.detach().clone()
            taken += 1
    assert taken == 1


@pytest.mark.parametrize("evaluating", [False, True])
def test_outputs_that_were_made_without_gradients_do_not_weigh_a_loss(evaluating):
    """They are of the model as it is, on the whole batch; and their total would be taken for a public number."""
    private, _, loader = private_of(nn.Linear(3, 3))
    x, y = next(iter(loader))
    private.train(not evaluating)
    with torch.no_grad():
        weights = private(x).logsumexp(1)
        assert int((private(x).argmax(1) == y).sum()) >= 0  # to look is another matter
    private.train()
    losses = F.cross_entropy(private(x), y, reduction="none")
    with pytest.raises(ModelError, match="without gradients"):
        (losses * (weights / weights.sum())).sum().backward()


class Choosing(Table):
    """The same outputs, with (b, T) codes, (b, T) masks and (b,) experts, from which no gradient comes."""

    def forward(self, ids, scale):
        out = super().forward(ids, scale)
        return out, out.abs().sum(2).long() % C, out[..., 0] > 0.5, {"expert": (4 * scale).long() % C}


def of_codes(out, y, x, m):
    out, codes, _, _ = out
    return F.cross_entropy(out.transpose(1, 2), codes) + (out - F.embedding(codes, EYE)).square().mean()


def of_experts(out, y, x, m):
    out, codes, mask, expert = out
    gates = out[:, 0].softmax(1)
    assert f"{(codes == y).sum().item() / mask.float().mean().item():.2f}"  # what a loop logs
    return (gates.gather(1, expert["expert"][:, None]).squeeze(1) * F.one_hot(expert["expert"], C).sum(1)).mean()


def of_masks(out, y, x, m):
    out, _, mask, _ = out
    mask[:, 0] = False
    each = (out - x).square().mean(2)
    return (torch.where(mask, 2 * each, each).sum(1) / (1 + mask.sum(1))).mean()


def balanced(out, y, x, m):
    """The loss that balances experts: the share of rows that each of them has is of all rows."""
    out, _, _, expert = out
    return C * (F.one_hot(expert["expert"], C).float().mean(0) * out[:, 0].softmax(1).mean(0)).sum()


def counted(out, y, x, m):
    out, codes, _, _ = out
    return (out.square().mean(2) / torch.bincount(codes.flatten(), minlength=C)[codes]).mean()


WITHOUT_GRADIENT = {
    "codes": (of_codes, "proved"),
    "experts": (of_experts, "proved"),
    "masks": (of_masks, "proved"),
    "codes that no rule knows": (
        lambda out, y, x, m: (out[0].mean(2) * torch.fft.fft(out[1]).abs()).square().mean(), "mapped",
    ),
    "shares": (balanced, "refused"),
    "counts": (counted, "refused"),
    "a mean over masks": (lambda out, y, x, m: (out[0].square().mean(2) * out[2]).sum() / out[2].sum(), "refused"),
    "codes of others": (lambda out, y, x, m: F.cross_entropy(out[0][:, 0], out[1][:, 0].roll(1, 0)), "refused"),
}  # fmt: skip


@pytest.mark.parametrize("name", WITHOUT_GRADIENT)
def test_outputs_without_gradients_are_of_their_rows(name):
    loss, verdict = WITHOUT_GRADIENT[name]
    check(loss, verdict, kind=Choosing)


def test_outputs_without_gradients_go_neither_into_the_model_nor_to_a_generator_nor_to_the_next_batch():
    class Coded(nn.Linear):
        def forward(self, x):
            out = super().forward(x)
            return out, out.argmax(-1)

    model = Coded(3, 3)
    model.register_buffer("used", torch.zeros(3))
    private, optimizer, loader = private_of(model)
    (x, y), (following, labels) = loader
    out, codes = private(x)
    usage = torch.bincount(codes, minlength=3) / 4
    with pytest.raises(ModelError, match="written into 'used'"):
        model.used.mul_(0.9).add_(usage)
    F.cross_entropy(out, y).backward()
    with pytest.raises(ModelError, match="written into 'used'"):
        model.used.mul_(0.9).add_(usage)
    optimizer.step()
    with pytest.raises(ModelError, match="a generator's"):
        (private(torch.randn(4, 3, requires_grad=True))[0].mean() * usage[0]).backward()
    with pytest.raises(ModelError, match="earlier batch"):
        (F.cross_entropy(private(following)[0], labels, reduction="none") * usage[labels]).mean().backward()


class Marked(nn.Linear):
    """Classes of its rows, and a public constant that it holds."""

    marks = torch.zeros(1, 3, dtype=torch.long)

    def forward(self, x):
        out = super().forward(x)
        return out, out.argmax(-1), self.marks


def test_outputs_without_gradients_are_in_the_order_of_the_rows_that_the_model_was_given():
    private, _, loader = private_of(Marked(3, 3))
    x, y = next(iter(loader))
    out, classes, _ = private(x.flip(0))
    with pytest.raises(ModelError, match="couples examples"):
        ((classes == y) * out.square().sum(1)).mean().backward()
    F.cross_entropy(out, classes).backward()


def test_what_is_written_into_an_output_without_gradients_is_not_written_into_the_model():
    private, _, loader = private_of(Marked(3, 3))
    x, y = next(iter(loader))
    _, _, marks = private(x)
    marks[0].add_(y[0] + 1)
    assert marks[0].eq(y[0] + 1).all()
    assert not private.module.marks.any()


def test_no_refusal_says_how_many_a_mask_chose():
    private, _, loader = private_of(nn.Linear(3, 3), batch_size=8)
    x, y = next(iter(loader))
    for refused in (
        lambda chosen: private(x, chosen),
        lambda chosen: ExampleLoss(nn.CrossEntropyLoss())(private(x), chosen),
        lambda chosen: coupling.rows_of("correct", chosen, len(x), None),
    ):
        told = set()
        for least in (1, 2):
            with pytest.raises((ModelError, ArgumentError)) as error:
                refused(y[y >= least])
            told.add(str(error.value))
        assert len(told) == 1


@pytest.mark.parametrize(
    "loss",
    [
        lambda out, y: F.mse_loss(out, y).backward(),
        lambda out, y: ((out - y) ** 2).mean().backward(),
        lambda out, y: torch.cat([out, out], 1).backward(),
    ],
)
def test_a_refusal_does_not_tell_how_many_were_drawn_in_secret(loss):
    said = set()
    for key in b"k", b"j":
        plan = ao.plan(dataset_size=64, batch_size=8, epochs=1, order="poisson", noise_multiplier=1.0, delta=1e-5)
        model, loader = nn.Linear(3, 1), DataLoader(TensorDataset(torch.randn(64, 3), torch.randn(64)), batch_size=8)
        engine = ao.PrivacyEngine(plan, key=key * 32)
        model, optimizer, loader = engine.make_private(model, torch.optim.SGD(model.parameters(), lr=0.1), loader)
        x, y = next(iter(loader))
        with pytest.raises(ModelError) as refused:
            loss(model(x), y)
        said.add((len(x), str(refused.value)))
    assert len(said) == 2
    assert len({message for _, message in said}) == 1
    assert "(B, " in next(iter(said))[1]
