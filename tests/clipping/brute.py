"""Per-unit clipped sums one example at a time, by plain autograd."""

import torch

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}


def per_example(module, x, y, loss):
    """[{name: gradient}] of loss(module(x_i), y_i) on batches of one."""
    parameters = {name: p for name, p in module.named_parameters() if p.requires_grad}
    result = []
    for i in range(len(x)):
        value = loss(module(x[i : i + 1]), y[i : i + 1])
        grads = torch.autograd.grad(value, list(parameters.values()), allow_unused=True, materialize_grads=True)
        result.append(dict(zip(parameters, grads, strict=True)))
    return result


def clipped_sum(gradients, groups, clip_norm):
    """Sum over units of the clipped sum of their examples' gradients, in float64."""
    total = {name: torch.zeros_like(g, dtype=torch.float64) for name, g in gradients[0].items()}
    for unit in groups.unique().tolist():
        rows = [g for g, own in zip(gradients, groups.tolist(), strict=True) if own == unit]
        summed = {name: sum(row[name].double() for row in rows) for name in total}
        factor = 1.0 if norm(summed) == 0 else min(1.0, clip_norm / norm(summed))
        for name in total:
            total[name] += factor * summed[name]
    return total


def norm(sums):
    """L2 norm over all parameters together, in float64."""
    return torch.sqrt(sum(g.double().square().sum() for g in sums.values())).item()


def distance(a, b):
    """L2 norm of a - b."""
    return norm({name: a[name].double() - b[name].double() for name in a})


def assert_close(sums, expected, tolerance, clip_norm=0.01):
    """Relative, but where units of this norm cancel: what is left of them has their rounding."""
    assert list(sums) == list(expected)
    assert distance(sums, expected) <= tolerance * (norm(expected) + 0.1 * clip_norm)


def run(clipping, x, y, criterion, *, groups=None, clip_norm=1.0, scale=None):
    """(outputs, sums) of one forward and backward; scale is that of a mean."""
    received = []
    outputs = clipping.forward(
        (x,),
        {},
        groups=torch.arange(len(x)) if groups is None else groups,
        clip_norm=clip_norm,
        scale=float(len(x)) if scale is None else scale,
        receive=received.append,
    )
    criterion(outputs, y).backward()
    assert len(received) == 1
    return outputs, received[0]
