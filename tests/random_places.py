"""Random views, parts, indices and joints of rows, against what the rules say of which row stands where.

Every number of a tensor is that of the row that it is of (-1: of none), and every operation moves numbers alone. So a
`ByRow` or `OfRow` is right where each place of a row has its number.
"""

import random

import torch

from anyorder.clipping.rows import ByRow, Interpreter, OfRow
from random_losses import _places

STACKS_AND_VIEWS = (0, 0, 0, 0, 0, 1, 2, 3, 3, 3, 4, 4, 5, 5, 6, 7, 8, 9, 10, 11, 11, 12, 13, 13, 13, 13)


def wrong(seed):
    """(shape, state) of a tensor of which what is said is not so, or None; how many had rows of several views."""
    r = random.Random(seed)
    size = r.choice([1, 2, 2, 3, 4, 4, 6])
    rest = [r.choice([1, 2, 2, 3, 4]) for _ in range(r.randint(0, 2))]
    rows = torch.arange(size, dtype=torch.float64).view(size, *[1] * len(rest)).expand(size, *rest).clone()
    inside, pool, stacked = Interpreter(), [rows, rows.clone()], 0
    for tensor in pool:
        inside.put(tensor, ByRow((0,), 0, 1))
    for _ in range(r.randint(2, 9)):
        try:
            with inside:
                made = _moved(r, pool)
        except (RuntimeError, IndexError, ValueError, TypeError):  # of torch, for shapes that do not fit
            continue
        for tensor in made:
            state = inside.state(tensor, None)
            if not _is_so(tensor, state, size):
                return (tuple(tensor.shape), state), stacked
            stacked += isinstance(state, (ByRow, OfRow)) and any(part[0] == "stack" for part in state.axis[1:])
            if tensor.numel() <= 200 and len(pool) < 24:
                pool.append(tensor)
    return None, stacked


def _is_so(tensor, state, size):
    if not isinstance(state, (ByRow, OfRow)):
        return True
    places = list(range(size))
    for step in state.axis[1:]:
        places = _places(places, step)
    if isinstance(state, OfRow):
        return len(places) == state.rows and bool(((tensor == places[state.row]) | (tensor < 0)).all())
    if tensor.dim() <= state.dim or tensor.shape[state.dim] != len(places) * state.inner:
        return False
    parts = enumerate(tensor.unbind(state.dim))
    return all(bool(((part == places[i // state.inner]) | (part < 0)).all()) for i, part in parts)


def _factors(r, count, most, parts):
    """Sizes whose product is the count, the rest of it at any place."""
    sizes = []
    for _ in range(parts):
        sizes.append(r.choice([d for d in range(1, count + 1) if count % d == 0][:most]))
        count //= sizes[-1]
    return [*sizes[: (at := r.randint(0, parts))], count, *sizes[at:]]


def _moved(r, pool):
    """What one operation makes of tensors of the pool."""
    t = r.choice(pool)
    dim = r.randrange(t.dim()) if t.dim() else 0
    size = t.shape[dim] if t.dim() else 0
    match r.choice(STACKS_AND_VIEWS):
        case 0:
            alike = [u for u in pool if u.dim() == t.dim() and u.sum(dim).shape == t.sum(dim).shape]
            parts = [r.choice(alike) for _ in range(r.randint(1, 3))] + [-torch.ones_like(t)] * (r.random() < 0.2)
            nothing = [torch.empty(0, dtype=t.dtype)] * (r.random() < 0.2)
            return [torch.cat([*nothing, *parts], dim)]
        case 1:
            alike = [u for u in pool if u.shape == t.shape]
            return [torch.stack([r.choice(alike) for _ in range(r.randint(1, 3))], r.randint(0, t.dim()))]
        case 2:
            return [t.transpose(dim, r.randrange(t.dim()))]
        case 3 if t.numel():
            return [t.reshape(_factors(r, t.numel(), 100, r.randint(0, 3)))]
        case 4:
            start, end = sorted((r.randint(0, size), r.randint(0, size)))
            return [t[(slice(None),) * dim + (slice(start, end, r.choice([1, 1, 1, 2])),)]]
        case 5 if size:
            ends = sorted({size, *(r.randint(1, size) for _ in range(r.randint(0, 3)))})
            sizes = [b - a for a, b in zip([0, *ends], ends, strict=False)]
            return t.chunk(r.randint(1, 4), dim) if r.random() < 0.5 else t.split(sizes, dim)
        case 6:
            return [t.roll(r.randint(-3, 6), dim)]
        case 7:
            return [t.flip(dim)]
        case 8:
            return [t[[r.randrange(-len(t), len(t)) for _ in range(r.randint(1, 2 * len(t)))]]]
        case 9:
            return [t[torch.arange(start := r.randrange(len(t)), r.randint(start + 1, len(t)))]]
        case 10:
            return [t.select(0, r.randrange(-len(t), len(t)))]
        case 11:
            return [t.unsqueeze(r.randint(0, t.dim())) if r.random() < 0.6 else t.squeeze()]
        case 12:
            return t.unbind(dim)
        case 13 if t.numel():
            u = t.unsqueeze(r.randint(0, t.dim()))
            return [u.reshape(_factors(r, u.numel(), 4, r.randint(2, 4)))]
    return []


if __name__ == "__main__":
    import sys

    found = [(seed, *wrong(seed)) for seed in range(int(sys.argv[1]), int(sys.argv[2]))]
    print([(seed, bad) for seed, bad, _ in found if bad], sum(stacked for *_, stacked in found))
