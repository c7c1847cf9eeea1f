"""Random programs of torch's operations on a batch, and what each value is said to be, held against brute force.

A program is run four times through a `LossWatch`: as it is, with row i of the batch replaced, with row j, with both.
What is said to be constant must not move; what is said to be row by row may move at the places of the replaced row
alone; what is said to be a total must be a sum over rows, and its gradient at the other rows must not move. What is
said may not depend on the numbers of the batch.

    PYTHONPATH=src python tests/random_losses.py FIRST LAST
"""

import random
import sys
import warnings
from collections import Counter

import torch
from torch.nn import functional as F

from anyorder.clipping.coupling import LossWatch, _place, _Watched
from anyorder.clipping.rows import ByRow, Coupled, NoRule, Total

FLOAT = (torch.float64, torch.float32)


def _dims(r, rank, some=True):
    """None, a dimension, or several; some of them negative."""
    if not rank or (some and r.random() < 0.15):
        return None
    chosen = r.sample(range(rank), r.randint(1, rank)) if some and r.random() < 0.3 else [r.randrange(rank)]
    chosen = [d - rank if r.random() < 0.3 else d for d in chosen]
    return chosen if len(chosen) > 1 else chosen[0]


def _dim(r, x):
    return r.randrange(-x.dim(), x.dim()) if x.dim() else 0


def _constant(r, x):
    """A public tensor that broadcasts against x, and may be larger."""
    shape = [n if r.random() < 0.6 else 1 for n in x.shape]
    shape = shape[r.randint(0, len(shape)) :] if r.random() < 0.4 else shape
    if r.random() < 0.2:
        shape = [r.choice([1, 2, 3, *x.shape]), *shape]
    if r.random() < 0.1:
        shape = [r.choice([n, *x.shape]) if n == 1 else n for n in shape]
    numbers = random.Random(r.randrange(1 << 30))
    count = 1
    for n in shape:
        count *= n
    return torch.tensor([numbers.uniform(-2, 2) for _ in range(count)], dtype=torch.float64).reshape(shape)


def _factors(r, count, rank):
    """Some shape of so many numbers."""
    shape = []
    for _ in range(rank - 1):
        n = r.choice([d for d in range(1, count + 1) if count % d == 0] or [1])
        shape.append(n)
        count //= n
    return [*shape, count]


def _new_shape(r, x):
    """A view's: dimensions joined or split, or any that fits."""
    shape = list(x.shape)
    if r.random() < 0.3 or not shape:
        return _factors(r, x.numel(), r.randint(1, 4))
    for _ in range(r.randint(1, 2)):
        at = r.randrange(len(shape))
        if r.random() < 0.5 and at + 1 < len(shape):
            shape[at : at + 2] = [shape[at] * shape[at + 1]]
        else:
            shape[at : at + 1] = _factors(r, shape[at], 2)
    return shape


def _spread(t):
    return t.double() if not t.is_floating_point() else t


_UNARY = [
    torch.neg,
    torch.tanh,
    torch.sigmoid,
    F.relu,
    torch.abs,
    torch.square,
    torch.clone,
    torch.detach,
    F.softplus,
    F.gelu,
    F.leaky_relu,
    F.logsigmoid,
    torch.sign,
    torch.floor,
    torch.isnan,
    torch.zeros_like,
    torch.ones_like,
    torch.Tensor.contiguous,
    torch.Tensor.float,
    torch.Tensor.double,
    torch.Tensor.long,
    torch.Tensor.bool,
    torch.nan_to_num,
    torch.Tensor.t,
    torch.Tensor.flatten,
    torch.atleast_2d,
    torch.atleast_3d,
    torch.positive,
    torch.frac,
    torch.exp,
    torch.sin,
    torch.erf,
    torch.rand_like,
    torch.ravel,
    torch.Tensor.logical_not,
    torch.Tensor.adjoint,
    torch.trace,
    torch.linalg.det,
    torch.linalg.slogdet,
    torch.linalg.inv,
    torch.linalg.eigvalsh,
    torch.linalg.svdvals,
    torch.linalg.matrix_norm,
    torch.linalg.matrix_exp,
    torch.matrix_exp,
    torch.logdet,
    torch.pdist,
    torch.cov,
    torch.corrcoef,
    torch.unique,
    torch.nonzero,
    torch.frexp,
    torch.Tensor.view_as,
    torch.msort,
    torch.fliplr,
    torch.flipud,
    torch.rot90,
    F.instance_norm,
    torch.bincount,
    torch.block_diag,
    torch.cartesian_prod,
    torch.numel,
    torch.bernoulli,
    torch.view_as_complex,
    torch.fft.fft,
    torch.combinations,
    torch.mean,
    torch.Tensor.relu_,
    torch.Tensor.exp_,
    torch.Tensor.zero_,
    torch.Tensor.neg_,
    torch.Tensor.squeeze_,
    torch.Tensor.t_,
    torch.Tensor.sign_,
    torch.Tensor.detach_,
    torch.Tensor.square_,
    torch.fft.rfft,
    torch.triu,
    torch.tril,
    torch.diag,
    torch.diagflat,
    torch.diag_embed,
    torch.unbind,
    torch.Tensor.aminmax,
    torch.histc,
    torch.Tensor.mT.__get__,
    torch.Tensor.T.__get__,
    torch.Tensor.data.__get__,
]
_BINARY = [
    torch.add,
    torch.sub,
    torch.mul,
    torch.div,
    torch.maximum,
    torch.minimum,
    torch.pow,
    torch.gt,
    torch.eq,
    torch.atan2,
    torch.logaddexp,
    torch.rsub,
    torch.fmod,
    torch.remainder,
    torch.hypot,
    torch.dist,
    torch.cdist,
    torch.mm,
    torch.matmul,
    torch.bmm,
    torch.mv,
    torch.dot,
    torch.vdot,
    torch.outer,
    torch.inner,
    torch.kron,
    torch.linalg.solve,
    F.linear,
    torch.cross,
    F.cosine_similarity,
    F.pairwise_distance,
    torch.isclose,
    torch.heaviside,
    torch.xlogy,
    torch.Tensor.add_,
    torch.Tensor.mul_,
    torch.Tensor.sub_,
    torch.Tensor.div_,
    torch.Tensor.copy_,
    torch.true_divide,
    torch.Tensor.expand_as,
    torch.Tensor.view_as,
    torch.copysign,
    torch.floor_divide,
    torch.searchsorted,
    torch.isin,
    torch.allclose,
    torch.bucketize,
    torch.take_along_dim,
    torch.linalg.lstsq,
    torch.cummax,
    torch.masked_select,
]
_REDUCED = [
    torch.sum,
    torch.mean,
    torch.amax,
    torch.amin,
    torch.max,
    torch.min,
    torch.argmax,
    torch.argmin,
    torch.prod,
    torch.logsumexp,
    torch.norm,
    torch.var,
    torch.std,
    torch.linalg.vector_norm,
    torch.any,
    torch.all,
    torch.median,
    torch.nanmedian,
    torch.count_nonzero,
    torch.var_mean,
    torch.std_mean,
    torch.aminmax,
    torch.nansum,
    torch.mode,
    torch.nanmean,
    torch.softmax,
    torch.log_softmax,
    torch.cumsum,
    torch.cumprod,
    torch.logcumsumexp,
    torch.cummax,
    torch.cummin,
    torch.sort,
    torch.argsort,
    torch.flip,
    F.softmin,
    F.normalize,
    F.glu,
    torch.diff,
    torch.unbind,
    torch.squeeze,
    torch.std,
    torch.renorm,
    torch.fft.fft,
    torch.quantile,
    torch.Tensor.squeeze_,
]
_LOSSES = [
    F.mse_loss,
    F.smooth_l1_loss,
    F.huber_loss,
    F.l1_loss,
    F.soft_margin_loss,
    F.kl_div,
    F.poisson_nll_loss,
    F.binary_cross_entropy_with_logits,
    F.multilabel_soft_margin_loss,
    F.hinge_embedding_loss,
    F.cross_entropy,
]


def _in_place(function):
    return function.__name__.endswith("_")


class Maker:
    """Draws a call of a random operation on values of a pool: a name, and a function of the pool."""

    def __init__(self, r, at_rows=False):
        self.r, self.at_rows = r, at_rows

    def pick(self, pool, test=lambda t: True):
        fits = [i for i, t in enumerate(pool) if test(t)]
        if not fits:
            raise ValueError
        return self.r.choice(fits[-4:] if self.r.random() < 0.7 else fits)

    def call(self, pool):
        r = self.r
        i = self.pick(pool)
        if self.at_rows and r.random() < 0.5:
            return self._at_rows(i, torch.empty(pool[i].shape, dtype=pool[i].dtype, device="meta"), pool)
        kind = r.choice(
            [
                "unary",
                "binary",
                "binary",
                "reduced",
                "reduced",
                "view",
                "view",
                "moved",
                "moved",
                "sliced",
                "joined",
                "lookup",
                "lookup",
                "mask",
                "product",
                "layer",
                "loss",
                "write",
                "write",
                "settings",
            ]
        )
        return getattr(self, "_" + kind)(i, torch.empty(pool[i].shape, dtype=pool[i].dtype, device="meta"), pool)

    def _second(self, x, pool):
        """Another operand: of the pool, a constant, or a number."""
        r = self.r
        if r.random() < 0.5:
            j = self.pick(pool)
            return lambda p: p[j]
        if r.random() < 0.7:
            c = _constant(r, x)
            return lambda p: c.to(p[0].dtype) if r.random() < 0 else c
        n = r.choice([2, 0.5, -1.0, 3])
        return lambda p: n

    def _unary(self, i, x, pool):
        f = self.r.choice(_UNARY)
        return f, lambda p: f(p[i])

    def _binary(self, i, x, pool):
        f, second = self.r.choice(_BINARY), self._second(x, pool)
        if self.r.random() < 0.3 and not _in_place(f):
            return f, lambda p: f(second(p), p[i])
        return f, lambda p: f(p[i], second(p))

    def _reduced(self, i, x, pool):
        r = self.r
        f, dims = r.choice(_REDUCED), _dims(r, x.dim())
        keep = {"keepdim": True} if r.random() < 0.3 else {}
        if dims is None:
            return f, lambda p: f(p[i])
        if f in (torch.kthvalue, torch.quantile):
            return f, lambda p: f(p[i], 0.5, dims, **keep)
        if f in (torch.aminmax, torch.var, torch.std, torch.norm, F.normalize):
            return f, lambda p: f(p[i], dim=dims, **keep)
        return f, lambda p: f(p[i], dims, **keep)

    def _view(self, i, x, pool):
        r, shape = self.r, _new_shape(self.r, x)
        f = r.choice([torch.Tensor.view, torch.Tensor.reshape])
        if r.random() < 0.2:
            at = r.randrange(len(shape))
            shape[at] = -1
        return f, lambda p: f(p[i], shape)

    def _moved(self, i, x, pool):
        r, rank = self.r, x.dim()
        a, b = _dim(r, x), _dim(r, x)
        order = r.sample(range(rank), rank)
        n = r.randint(1, 3)
        more = [r.choice([1, 2, *x.shape]) for _ in range(r.randint(0, 2))]
        big = [*more, *(r.choice([s, -1]) if s != 1 else r.choice([1, 2, 3, *x.shape]) for s in x.shape)]
        times = [*(r.choice([1, 2]) for _ in more), *(r.choice([1, 1, 2]) for _ in x.shape)]
        return r.choice(
            [
                ("permute", lambda p: p[i].permute(order)),
                ("transpose", lambda p: p[i].transpose(a, b)),
                ("unsqueeze", lambda p: p[i].unsqueeze(a)),
                ("squeeze", lambda p: p[i].squeeze(a)),
                ("squeeze all", lambda p: p[i].squeeze()),
                ("expand", lambda p: p[i].expand(big)),
                ("repeat", lambda p: p[i].repeat(times)),
                ("roll", lambda p: p[i].roll(n, a)),
                ("roll flat", lambda p: p[i].roll(n)),
                ("flip", lambda p: p[i].flip([a])),
                ("movedim", lambda p: p[i].movedim(a, b)),
                ("interleave", lambda p: p[i].repeat_interleave(n, a)),
                ("unfold", lambda p: p[i].unfold(a, n, 1)),
                ("flatten", lambda p: p[i].flatten(min(a, b), max(a, b))),
                ("diagonal", lambda p: p[i].diagonal(n - 2, a, b)),
                ("rolls", lambda p: p[i].roll((n, 1), (a, b))),
                ("transpose_", lambda p: p[i].transpose_(a, b)),
                ("unsqueeze_", lambda p: p[i].unsqueeze_(a)),
                ("flips", lambda p: p[i].flip([a, b])),
                ("swap", lambda p: p[i].swapaxes(a, b)),
                ("pad", lambda p: F.pad(p[i], (1, n))),
                ("rot90", lambda p: p[i].rot90(n, (a, b))),
                ("as_strided", lambda p: p[i].as_strided(big, [1] * len(big))),
                ("tile", lambda p: p[i].tile(times)),
            ]
        )

    def _sliced(self, i, x, pool):
        r, dim = self.r, _dim(self.r, x)
        size = x.shape[dim] if x.dim() else 1
        a, b = sorted((r.randint(-size, size), r.randint(-size, size + 1)))
        step, at = r.choice([1, 1, 2]), r.randrange(-size, size) if size else 0
        parts = r.randint(1, 3)
        taken = [r.randrange(size or 1) for _ in range(r.randint(1, 4))]
        if r.random() < 0.4:
            taken = r.sample(range(size), size)
        index = torch.tensor(taken)
        lead = (slice(None),) * (dim % x.dim() if x.dim() else 0)
        beside = torch.arange(size)
        return r.choice(
            [
                ("slice", lambda p: p[i][(*lead, slice(a, b, step))]),
                ("select", lambda p: p[i].select(dim, at)),
                ("narrow", lambda p: p[i].narrow(dim, 0, parts)),
                ("split", lambda p: p[i].split(parts, dim)),
                ("chunk", lambda p: p[i].chunk(parts, dim)),
                ("unbind", lambda p: p[i].unbind(dim)),
                ("index", lambda p: p[i][(*lead, index)]),
                ("index_select", lambda p: p[i].index_select(dim, index)),
                ("index two", lambda p: p[i][(*lead, beside, index)]),
                ("take", lambda p: p[i].take(index)),
                ("index column", lambda p: p[i][(*lead, beside[:, None], index)]),
                ("index apart", lambda p: p[i][(index, slice(None), index)]),
                ("index none", lambda p: p[i][(None, *lead, index)]),
                ("index matrix", lambda p: p[i][(*lead, index[None, :], beside[:, None])]),
                ("tensor_split", lambda p: p[i].tensor_split(parts, dim)),
            ]
        )

    def _joined(self, i, x, pool):
        r, dim = self.r, _dim(self.r, x)
        f = r.choice([torch.cat, torch.stack, torch.cat, torch.hstack, torch.vstack])
        others = [self.pick(pool, lambda t: t.shape == x.shape) for _ in range(r.randint(0, 2))]
        constant = torch.ones(x.shape, dtype=torch.float64) if r.random() < 0.3 else None
        if r.random() < 0.3 and x.dim():
            shape = list(x.shape)
            shape[r.randrange(x.dim())] = r.randint(1, 3)
            constant = torch.full(shape, 0.7, dtype=torch.float64)
        first = r.random() < 0.5

        def parts(p):
            made = [p[j] for j in (i, *others)]
            return made if constant is None else [constant, *made] if first else [*made, constant]

        return f, (lambda p: f(parts(p))) if f in (torch.hstack, torch.vstack) else lambda p: f(parts(p), dim)

    def _lookup(self, i, x, pool):
        r, dim = self.r, _dim(self.r, x)
        whole = [j for j, t in enumerate(pool) if t.dtype is torch.int64]
        size = x.shape[dim] if x.dim() else 1
        constant = torch.tensor([r.randrange(size or 1) for _ in range(x.numel() or 1)])
        constant = constant.reshape(x.shape) if r.random() < 0.7 and x.numel() else constant
        by_row = bool(whole) and r.random() < 0.6
        j = r.choice(whole) if whole else 0
        table = _constant(r, torch.empty(3, 3)).expand(3, 3).contiguous()
        k = self.pick(pool)

        def index(p):
            return p[j].clamp(0, max(size - 1, 0)) if by_row else constant

        beside = torch.arange(x.shape[0] if x.dim() else 1)
        return r.choice(
            [
                ("gather", lambda p: p[i].gather(dim, index(p))),
                ("gather table", lambda p: table.gather(0, p[j].clamp(0, 2))),
                ("scatter", lambda p: p[i].scatter(dim, index(p), p[k])),
                ("scatter number", lambda p: p[i].scatter(dim, index(p), 0.5)),
                ("scatter add", lambda p: p[i].scatter_add(dim, index(p), p[k])),
                (
                    "scatter constant",
                    lambda p: torch.zeros(x.shape, dtype=torch.float64).scatter_add(dim, index(p), p[k]),
                ),
                ("index_add", lambda p: p[i].index_add(dim, index(p).flatten()[: p[k].shape[dim]], p[k])),
                ("embedding", lambda p: F.embedding(p[j].clamp(0, 2), table)),
                ("embedding of rows", lambda p: F.embedding(index(p), p[i])),
                ("index of rows", lambda p: p[i][index(p)]),
                ("index table", lambda p: table[p[j].clamp(0, 2)]),
                ("index table two", lambda p: table[p[j].clamp(0, 2), p[j].clamp(0, 2)]),
                ("index table column", lambda p: table[:, p[j].clamp(0, 2)]),
                ("index row and label", lambda p: p[i][beside, index(p)]),
                ("index row and labels", lambda p: p[i][beside[:, None], index(p)]),
                ("index row and labels turned", lambda p: p[i][beside, index(p).t()]),
                ("one_hot", lambda p: F.one_hot(index(p), size)),
                ("index_select", lambda p: p[i].index_select(dim, index(p))),
                ("index_select table", lambda p: table.index_select(0, index(p).flatten().clamp(max=2))),
                ("take_along", lambda p: p[i].take_along_dim(index(p), dim)),
                ("take", lambda p: p[i].take(index(p))),
                ("put", lambda p: p[i].index_put((index(p),), p[k])),
                ("bincount", lambda p: index(p).flatten().bincount()),
                ("scatter reduce", lambda p: p[i].scatter_reduce(dim, index(p), p[k], "amax")),
                ("scatter value reduce", lambda p: p[i].scatter(dim, index(p), p[k], reduce="multiply")),
                ("put add", lambda p: p[i].index_put((index(p),), p[k], accumulate=True)),
            ]
        )

    def _mask(self, i, x, pool):
        r = self.r
        masks = [j for j, t in enumerate(pool) if t.dtype is torch.bool and t.shape == x.shape[: t.dim()]]
        k = self.pick(pool)
        if masks and r.random() < 0.5:
            j = r.choice(masks)
            mask = lambda p: p[j]  # noqa: E731
        elif r.random() < 0.5:
            mask = lambda p: p[i] > 0  # noqa: E731
        else:
            c = _constant(r, x) > 0
            mask = lambda p: c  # noqa: E731
        return r.choice(
            [
                ("where", lambda p: torch.where(mask(p), p[i], p[k])),
                ("where number", lambda p: torch.where(mask(p), p[i], 0.0)),
                ("masked_fill", lambda p: p[i].masked_fill(mask(p), 0.5)),
                ("masked_select", lambda p: p[i].masked_select(mask(p))),
                ("index mask", lambda p: p[i][mask(p)]),
                ("masked_fill tensor", lambda p: p[i].masked_fill(mask(p), p[k].sum())),
                ("masked_scatter", lambda p: p[i].masked_scatter(mask(p), p[k])),
                ("where constant", lambda p: torch.where(mask(p), torch.ones(x.shape, dtype=torch.float64), p[i])),
            ]
        )

    def _at_rows(self, i, x, pool):
        """`x[k] = f(x[k])` with a constant k, and what looks like it."""
        r, size = self.r, x.shape[0]
        k = self.pick(pool, lambda t: t.shape == x.shape and t.dtype == x.dtype) if r.random() < 0.4 else i

        def places():
            if r.random() < 0.5:
                return torch.tensor([r.random() < 0.5 for _ in range(size)], dtype=r.choice([torch.bool, torch.uint8]))
            drawn = [r.randrange(-size, size) for _ in range(r.randint(0, size))]
            return torch.tensor(drawn if r.random() < 0.5 else r.sample(range(size), r.randint(1, size))).long()

        at = places()
        taken = at if r.random() < 0.7 else places()
        dim = _dim(r, x)
        change = r.choice(
            [
                torch.neg,
                lambda t: t.flip(dim),
                lambda t: t + 1,
                lambda t: t.flatten(),
                lambda t: t[:1],
                lambda t: t.roll(1, dim),
                lambda t: t[0],
                torch.clone,
                lambda t: t.transpose(0, -1),
                lambda t: t.softmax(dim) if t.is_floating_point() else t,
            ]
        )
        add = r.random() < 0.2

        def write(p):
            made = p[i].clone()
            value = change(p[k][taken])
            if add:
                return made.index_put((at,), value, accumulate=True)
            made[at] = value
            return made

        return "at rows", write

    def _product(self, i, x, pool):
        r = self.r
        j, k = self.pick(pool), self.pick(pool)
        c = _constant(r, x.t() if x.dim() == 2 else x)
        second = (lambda p: p[j]) if r.random() < 0.6 else (lambda p: c)
        letters = "abcd"
        left = "".join(r.choice(letters) for _ in range(x.dim()))
        other = pool[j]
        right = "".join(r.choice(letters) for _ in range(other.dim()))
        out = "".join(s for s in sorted(set(left + right)) if r.random() < 0.5)
        spec = f"{left},{right}->{out}"
        return r.choice(
            [
                (f"einsum {spec}", lambda p: torch.einsum(spec, p[i], p[j])),
                ("matmul", lambda p: p[i] @ second(p)),
                ("matmul turned", lambda p: second(p) @ p[i]),
                ("addmm", lambda p: torch.addmm(p[k], p[i], second(p))),
                ("baddbmm", lambda p: torch.baddbmm(p[k], p[i], second(p))),
                ("tensordot", lambda p: torch.tensordot(p[i], second(p), 1)),
                ("addmm constant", lambda p: torch.addmm(second(p), p[i], p[k])),
                ("cdist", lambda p: torch.cdist(p[i], second(p))),
                ("addmv", lambda p: torch.addmv(second(p), p[i], p[k])),
                ("matmul self", lambda p: p[i] @ p[i].transpose(-1, -2)),
                ("bmm", lambda p: torch.bmm(p[i], second(p))),
                ("linear", lambda p: F.linear(p[i], second(p))),
                ("bilinear", lambda p: F.bilinear(p[i], p[j], torch.ones(2, 3, 3, dtype=torch.float64))),
                ("addr", lambda p: torch.addr(p[k], p[i], p[j])),
                ("mv", lambda p: torch.mv(p[i], second(p))),
            ]
        )

    def _layer(self, i, x, pool):
        r = self.r
        channels = x.shape[1] if x.dim() > 1 else 1
        weight = _constant(r, torch.empty(2, channels, 1)).expand(2, channels, 1).contiguous()
        square = _constant(r, torch.empty(2, channels, 1, 1)).expand(2, channels, 1, 1).contiguous()

        def statistics():
            return torch.ones(channels, dtype=torch.float64), torch.ones(channels, dtype=torch.float64)

        tail = list(x.shape[r.randint(0, x.dim()) :])
        groups = r.choice([1, channels])
        return (
            r.choice(
                [
                    ("conv1d", lambda p: F.conv1d(p[i], weight)),
                    ("conv2d", lambda p: F.conv2d(p[i], square)),
                    ("batch_norm", lambda p: F.batch_norm(p[i], *statistics())),
                    ("batch_norm training", lambda p: F.batch_norm(p[i], None, None, training=True)),
                    ("layer_norm", lambda p: F.layer_norm(p[i], tail)),
                    ("group_norm", lambda p: F.group_norm(p[i], groups)),
                    ("instance_norm", lambda p: F.instance_norm(p[i])),
                    ("dropout", lambda p: F.dropout(p[i], 0.5)),
                    ("avg_pool1d", lambda p: F.avg_pool1d(p[i], 2)),
                    ("max_pool1d", lambda p: F.max_pool1d(p[i], 2)),
                    ("prelu", lambda p: F.prelu(p[i], torch.full((1,), 0.2, dtype=torch.float64))),
                    ("prelu rows", lambda p: F.prelu(p[i], p[pool_pick])),
                    ("interpolate", lambda p: F.interpolate(p[i], scale_factor=2)),
                    ("attention", lambda p: F.scaled_dot_product_attention(p[i], p[i], p[i])),
                    ("local_response", lambda p: F.local_response_norm(p[i], 2)),
                    ("rms_norm", lambda p: F.rms_norm(p[i], tail)),
                    ("conv weights", lambda p: F.conv1d(torch.ones(2, 3, 4, dtype=torch.float64), p[i])),
                    ("alpha_dropout", lambda p: F.alpha_dropout(p[i], 0.5, training=True)),
                    ("channel_shuffle", lambda p: F.channel_shuffle(p[i], groups)),
                ]
            )
            if (pool_pick := self.pick(pool)) >= 0
            else None
        )

    def _loss(self, i, x, pool):
        r = self.r
        reduction = r.choice(["none", "sum", "mean"])
        second = self._second(x, pool)
        whole = [j for j, t in enumerate(pool) if t.dtype is torch.int64]
        j = r.choice(whole) if whole and r.random() < 0.8 else None
        classes = x.shape[1] if x.dim() > 1 else (x.shape[0] if x.dim() else 1)
        shape = [*x.shape[:1], *x.shape[2:]] if x.dim() > 1 else []
        labels = torch.zeros(shape, dtype=torch.int64)

        def target(p):
            return labels if j is None else p[j].clamp(0, classes - 1)

        weight = torch.linspace(1, 2, classes, dtype=torch.float64) if r.random() < 0.3 else None
        f = r.choice(_LOSSES)
        ignore = r.choice([-100, 0])
        flat = r.random() < 0.3
        return r.choice(
            [
                (f, lambda p: f(p[i], second(p), reduction=reduction)),
                (f, lambda p: f(second(p), p[i], reduction=reduction)),
                (
                    "bce",
                    lambda p: F.binary_cross_entropy(
                        p[i].sigmoid(), _spread(p[i]).detach().sigmoid(), reduction=reduction
                    ),
                ),
                (
                    "bce weight",
                    lambda p: F.binary_cross_entropy(
                        p[i].sigmoid(), second(p).sigmoid(), second(p), reduction=reduction
                    ),
                ),
                (
                    "bce logits",
                    lambda p: F.binary_cross_entropy_with_logits(
                        p[i], p[i].detach(), pos_weight=second(p), reduction=reduction
                    ),
                ),
                ("nll", lambda p: F.nll_loss(p[i], target(p), weight, ignore_index=ignore, reduction=reduction)),
                (
                    "cross_entropy",
                    lambda p: F.cross_entropy(
                        p[i], target(p), weight, ignore_index=ignore, reduction=reduction, label_smoothing=0.1 * flat
                    ),
                ),
                (
                    "cross_entropy flat",
                    lambda p: F.cross_entropy(p[i].flatten(0, -2), target(p).flatten(), reduction=reduction),
                ),
                ("multi_margin", lambda p: F.multi_margin_loss(p[i], target(p), reduction=reduction)),
                ("multilabel_margin", lambda p: F.multilabel_margin_loss(p[i], target(p), reduction=reduction)),
                ("triplet", lambda p: F.triplet_margin_loss(p[i], second(p), p[i] * 2, reduction=reduction)),
                ("cosine", lambda p: F.cosine_embedding_loss(p[i], second(p), torch.ones(()), reduction=reduction)),
                ("gaussian", lambda p: F.gaussian_nll_loss(p[i], second(p), p[i].square() + 1, reduction=reduction)),
                ("margin", lambda p: F.margin_ranking_loss(p[i], second(p), torch.ones(()), reduction=reduction)),
                ("nll own", lambda p: F.nll_loss(p[i].log_softmax(1), target(p), reduction=reduction)),
            ]
        )

    def _write(self, i, x, pool):
        r, dim = self.r, _dim(self.r, x)
        k, second = self.pick(pool), self._second(x, pool)
        size = x.shape[dim] if x.dim() else 1
        at = r.randrange(size) if size else 0
        lead = (slice(None),) * (dim % x.dim() if x.dim() else 0)
        index = torch.tensor([r.randrange(size or 1) for _ in range(2)])
        buffer = torch.zeros(x.shape, dtype=torch.float64)
        some = slice(at, r.randint(at, size + 1))

        def set_item(p, key, value):
            p[i][key] = value
            return p[i]

        def filled(p, key):
            made = torch.zeros(x.shape, dtype=torch.float64)
            made[key] = p[k]
            return made

        def into_buffer(p):
            made = buffer.clone()
            torch.mul(p[i], second(p), out=made)
            return made

        return r.choice(
            [
                ("set select", lambda p: set_item(p, (*lead, at), 0.5)),
                ("set slice", lambda p: set_item(p, (*lead, some), 0.5)),
                ("set to", lambda p: set_item(p, (*lead, at), p[k])),
                ("set all", lambda p: set_item(p, Ellipsis, second(p))),
                ("set mask", lambda p: set_item(p, p[i] > 0, 0.3)),
                ("set index", lambda p: set_item(p, (*lead, index), second(p))),
                ("fill", lambda p: filled(p, (*lead, at))),
                ("fill slice", lambda p: filled(p, (*lead, some))),
                ("out", into_buffer),
                ("clamp_", lambda p: p[i].clamp_(-1, 1)),
                ("fill_", lambda p: p[i].fill_(2.0)),
                ("fill_ tensor", lambda p: p[i].fill_(p[k].sum())),
                ("masked_fill_", lambda p: p[i].masked_fill_(p[i] > 0, 0.1)),
                ("addcmul_", lambda p: p[i].addcmul_(second(p), p[k])),
                ("row add", lambda p: p[i].select(dim, at).add_(second(p))),
                ("slice mul", lambda p: p[i][(*lead, some)].mul_(second(p))),
                ("copy detached", lambda p: p[i].detach().copy_(p[k])),
                ("add to buffer", lambda p: buffer.clone().add_(p[i])),
                ("view write", lambda p: p[i].view(-1)[at:].add_(1.0)),
                ("transposed write", lambda p: p[i].transpose(0, -1).add_(second(p))),
                ("iadd data", lambda p: p[i].data.add_(1.0)),
                ("buffer column", lambda p: buffer.clone().select(dim, at).add_(p[k])),
                ("sort out", lambda p: p[i].sort(dim)[0].add_(1)),
                ("index_fill_", lambda p: p[i].index_fill_(dim, index, 0.2)),
                ("index_copy_", lambda p: p[i].index_copy_(dim, index, p[k])),
                ("cumsum_", lambda p: p[i].cumsum_(dim)),
                ("scatter_", lambda p: p[i].scatter_(dim, index.expand((*x.shape[:-1], 2)), 1.0)),
            ]
        )

    def _settings(self, i, x, pool):
        r, dim = self.r, _dim(self.r, x)
        second, k = self._second(x, pool), self.pick(pool)
        n = r.randint(1, 3)
        return r.choice(
            [
                ("add alpha", lambda p: torch.add(p[i], second(p), alpha=0.5)),
                ("div mode", lambda p: torch.div(p[i], second(p), rounding_mode="floor")),
                ("sub alpha", lambda p: torch.sub(second(p), p[i], alpha=2)),
                ("clamp", lambda p: p[i].clamp(min=second(p))),
                ("topk", lambda p: p[i].topk(n, dim)),
                ("kthvalue", lambda p: p[i].kthvalue(n, dim)),
                ("lerp", lambda p: p[i].lerp(second(p), 0.3)),
                ("lerp tensor", lambda p: torch.lerp(p[i], p[k], second(p))),
                ("addcmul", lambda p: torch.addcmul(second(p), p[i], p[k], value=0.5)),
                ("addcdiv", lambda p: torch.addcdiv(p[k], p[i], second(p))),
                ("norm p", lambda p: p[i].norm(n, dim)),
                ("std correction", lambda p: p[i].std(dim, correction=n - 1)),
                ("to_copy sum", lambda p: p[i].sum(dim, dtype=torch.float32)),
                ("full_like", lambda p: torch.full_like(p[i], 0.5)),
                ("expand sum", lambda p: p[i].sum().expand(x.shape)),
                ("total times", lambda p: p[i].sum() * second(p)),
                ("mean of rest", lambda p: p[i].mean(tuple(range(1, x.dim())))),
                ("sum rows", lambda p: p[i].sum(0)),
                ("total in cat", lambda p: torch.cat([p[i].sum(0, keepdim=True), p[i]])),
                ("double sum", lambda p: p[i].sum() + p[k].mean()),
                ("over count", lambda p: p[i].sum() / (p[k] > 0).sum()),
                ("mul_ total", lambda p: p[i].sum(0).mul_(second(p))),
                ("pow number", lambda p: p[i] ** 2),
                ("number pow", lambda p: 2 ** p[i].tanh()),
                ("new_zeros", lambda p: p[i].new_zeros(x.shape)),
                ("checked", lambda p: p[i].sum().tanh()),
                ("logsumexp", lambda p: p[i].logsumexp(dim)),
                ("count", lambda p: (p[i] > 0).sum(dim)),
                ("triu", lambda p: p[i].triu(n - 2)),
                ("polar", lambda p: torch.polar(p[i], p[k])),
                ("total of int", lambda p: p[i].long().sum()),
                ("outer sum", lambda p: p[i].unsqueeze(0) - p[i].unsqueeze(1)),
                (
                    "chol",
                    lambda p: torch.linalg.cholesky(p[i] @ p[i].mT + 3 * torch.eye(x.shape[-1], dtype=torch.float64)),
                ),
            ]
        )


def batch(r):
    """(B, .., ..) numbers, (B, ..) numbers, labels and a mask; sizes are often alike."""
    rows = r.choice([2, 3, 4])
    size = lambda: r.choice([rows, rows, 1, 2, 3])  # noqa: E731
    shape = [rows, *(size() for _ in range(r.choice([1, 1, 2, 2, 3])))]
    generator = torch.Generator().manual_seed(r.randrange(1 << 30))
    numbers = torch.randn(shape, generator=generator, dtype=torch.float64)
    more = torch.randn(shape[: r.randint(1, len(shape))], generator=generator, dtype=torch.float64)
    labels = torch.randint(0, 3, shape[: r.randint(1, len(shape))], generator=generator)
    mask = torch.rand(shape[: r.randint(1, len(shape))], generator=generator) > 0.5
    return rows, (numbers, more, labels, mask), generator


def replaced(data, row, generator):
    """The batch with other numbers in a row."""
    made = []
    for t in data:
        t = t.clone()
        if t.dtype is torch.int64:
            t[row] = torch.randint(0, 3, t.shape[1:], generator=generator)
        elif t.dtype is torch.bool:
            t[row] = torch.rand(t.shape[1:], generator=generator) > 0.5
        else:
            t[row] = 2 * torch.randn(t.shape[1:], generator=generator, dtype=torch.float64)
        made.append(t)
    return tuple(made)


def _tensors(value):
    if isinstance(value, torch.Tensor):
        return [value]
    return [t for one in value for t in _tensors(one)] if isinstance(value, (tuple, list)) else []


def begin(watch, rows, data):
    """The pool as a loop has it: outputs of the model and the rest of the batch."""
    outputs = data[0].clone().requires_grad_()
    shown = watch.batch(tuple(t.clone() for t in data[1:]), rows)
    return outputs, [watch.outputs(outputs * 1.0, shown), *shown]


def state_of(value):
    if type(value) is not _Watched:
        return "plain"
    tape, number = _place(value)
    return tape.states[number]


def wrong(seed, length=5, at_rows=False):
    """What is said of a value and is not so, of a random program; None where all is well; and what was proved.

    `at_rows`: every second call writes into rows at constant places.
    """
    r = random.Random(seed)
    rows, data, generator = batch(r)
    watch, maker = LossWatch(), Maker(r, at_rows)
    outputs, pool = begin(watch, rows, data)
    names, calls = [], []
    for _ in range(length * 4):
        if len(calls) == length or len(pool) > 24:
            break
        before, versions = len(pool), [t._version for t in pool]
        try:
            name, call = maker.call(pool)
            torch.manual_seed(len(calls))
            made = _tensors(call(pool))
        except Exception:  # no such call
            if [t._version for t in pool] != versions:
                return None, Counter()
            continue
        pool += [t for t in made if t.numel() <= 512][:3]
        names.append(f"{getattr(name, '__name__', name)}->{[tuple(t.shape) for t in pool[before:]]}")
        calls.append(call)
    states = [state_of(t) for t in pool]
    if all(isinstance(s, (Coupled, NoRule)) or s == "plain" for s in states[4:]):
        return None, Counter()
    i, j = r.sample(range(rows), 2)
    one, two = replaced(data, i, generator), replaced(data, j, generator)
    both = tuple(a.clone() for a in one)
    for t, b in zip(both, two, strict=True):
        t[j] = b[j]
    runs = [(outputs, pool, states)]
    for other in (one, two, both):
        again, values = begin(watch, rows, other)
        try:
            for k, call in enumerate(calls):
                torch.manual_seed(k)
                values += [t for t in _tensors(call(values)) if t.numel() <= 512][:3]
        except Exception:
            return None, Counter(raised=1)
        if len(values) != len(pool):
            return None, Counter()
        runs.append((again, values, [state_of(t) for t in values]))
    seen = Counter(type(s).__name__ for s in states[4:])
    for k, state in enumerate(states):
        if not all(run[1][k].numel() for run in runs):  # no memory to tell it by
            continue
        if any(run[2][k] != state for run in runs):
            if any(isinstance(s, (ByRow, Total)) or s is None for s in (run[2][k] for run in runs)):
                return f"seed {seed} value {k} is said to be {[run[2][k] for run in runs]}: {names}", seen
            continue
        problem = _held(state, [run[1][k] for run in runs], [run[0] for run in runs], i, j, rows)
        if problem:
            shapes = [tuple(t.shape) for t in data]
            return f"seed {seed} rows {i}, {j} of {shapes}, value {k} {state}: {problem}: {names}", seen
    return None, seen


def _held(state, values, outputs, i, j, rows):
    """Whether the values of the four runs are what the state says."""
    if isinstance(state, (str, Coupled, NoRule)) or type(state).__name__ == "Picked":
        return None
    plain = [t.detach().as_subclass(torch.Tensor) for t in values]
    if len({t.shape for t in plain}) > 1:
        return "its shape moves"
    if plain[0].is_complex():
        plain = [torch.view_as_real(t.resolve_conj()) for t in plain]
    kept = [t.double() for t in plain]
    if state is None:
        return None if all(_alike(kept[0], t) for t in kept) else "a constant moves"
    if isinstance(state, ByRow):
        places = list(range(rows))
        for step in state.axis[1:]:
            places = _places(places, step)
        if kept[0].shape[state.dim] != len(places) * state.inner:
            return f"it has no {len(places)} times {state.inner} places"
        for other, row in ((1, i), (2, j)):
            theirs = [p * state.inner + q for p, at in enumerate(places) if at != row for q in range(state.inner)]
            index = torch.tensor(theirs, dtype=torch.int64)
            if not _alike(*(t.index_select(state.dim, index) for t in (kept[0], kept[other]))):
                return f"row {row} moves another's"
        return None
    whole = [t for t in kept if not t.isfinite().all() or t.abs().max() > 1e6] if kept[0].numel() else kept
    if whole or plain[0].dtype not in FLOAT:
        return None
    if values[0].requires_grad:
        return _gradients_held(values, outputs, i, j, rows)
    mixed = kept[3] - kept[1] - kept[2] + kept[0]
    scale = max(float(t.abs().max()) for t in kept) + 1
    bound = (1e-6 if plain[0].dtype is torch.float64 else 1e-4) * scale
    return f"no sum over rows, by {float(mixed.abs().max()):.3g}" if mixed.abs().max() > bound else None


def _gradients_held(values, outputs, i, j, rows):
    found = []
    for value, output in zip(values, outputs, strict=True):
        generator = torch.Generator().manual_seed(5)
        _place(value)[0].allowed = True
        with torch._C.DisableTorchFunctionSubclass():
            plain = value.as_subclass(torch.Tensor)
            weights = torch.randn(plain.shape, generator=generator, dtype=plain.dtype)
            (gradient,) = torch.autograd.grad((plain * weights).sum(), output, retain_graph=True, allow_unused=True)
        found.append(torch.zeros_like(output) if gradient is None else gradient)
    for other, row in ((1, i), (2, j)):
        rest = torch.tensor([k for k in range(rows) if k != row])
        tolerance = 1e-4 if values[0].dtype is torch.float32 else 1e-7
        if not _alike(found[0][rest], found[other][rest], tolerance):
            return f"row {row} moves another's gradient"
    return None


def _places(places, step):
    """Which rows stand where after a slice, a flip, a roll or an index."""
    if step[0] == "flip":
        return places[::-1]
    if step[0] == "roll":
        by = step[1] % len(places) if places else 0
        return places[-by:] + places[:-by] if by else places
    if step[0] == "index":
        return [places[k] for k in step[1:]]
    if step[0] == "stack":
        return places * step[1]
    return places[slice(*step)]


def _alike(a, b, tolerance=1e-9):
    if a.shape != b.shape:
        return False
    return torch.allclose(a, b, rtol=1e-5 if tolerance > 1e-6 else 1e-7, atol=tolerance, equal_nan=True)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    total, bad = Counter(), 0
    for seed in range(int(sys.argv[1]), int(sys.argv[2])):
        try:
            found, seen = wrong(seed)
        except Exception as error:
            print("seed", seed, "raises", repr(error)[:300])
            continue
        total += seen
        if found:
            bad += 1
            print(found, flush=True)
    print(dict(total), "wrong:", bad)
