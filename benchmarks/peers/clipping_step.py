"""One model's clipped gradient step by one method, in a process of its own; prints JSON. Needs torch, and the method.

    python clipping_step.py MODEL METHOD REPEATS

METHOD: plain (no clipping), ours, vmap (ours, a gradient for each example), hooks, ghost (Opacus), opake.
"""

import json
import resource
import sys
import time
from collections.abc import Callable

import torch
from step_models import case, losses
from torch import Tensor, nn


def steps(method: str, model: nn.Module, x: Tensor, y: Tensor) -> Callable[[], object]:
    """A function that makes the clipped sum once."""
    if method == "plain":

        def plain() -> None:
            losses(model(x), y).mean().backward()
            model.zero_grad()

        return plain
    if method in ("ours", "vmap"):
        from anyorder.clipping.per_example import FunctionalClipping, GhostClipping

        clipping = (GhostClipping if method == "ours" else FunctionalClipping)(model)
        units, size = torch.arange(len(x)), float(len(x))

        def ours() -> None:
            received: list[object] = []
            out = clipping.forward((x,), {}, groups=units, clip_norm=1.0, scale=size, receive=received.append)
            losses(out, y).mean().backward()

        return ours
    if method == "opake":
        from opake.dpftrl.clipping import clipped_grad

        parameters = {n: p.detach() for n, p in model.named_parameters()}

        def loss(parameters: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
            return losses(torch.func.functional_call(model, parameters, x[None]), y[None]).mean()

        clipped, state = clipped_grad(loss, batch_argnums=(1, 2), clipping_norm=1.0)
        return lambda: clipped(parameters, x, y, state=state)
    from opacus.optimizers import DPOptimizer, DPOptimizerFastGradientClipping

    options = {"noise_multiplier": 0.0, "max_grad_norm": 1.0, "expected_batch_size": len(x)}
    plain_optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    if method == "hooks":
        from opacus.grad_sample import GradSampleModule

        private, optimizer = GradSampleModule(model), DPOptimizer(plain_optimizer, **options)

        def hooks() -> None:
            losses(private(x), y).mean().backward()
            optimizer.clip_and_accumulate()
            optimizer.zero_grad()

        return hooks
    from opacus.grad_sample import GradSampleModuleFastGradientClipping
    from opacus.utils.fast_gradient_clipping_utils import DPTensorFastGradientClipping

    module = GradSampleModuleFastGradientClipping(model, max_grad_norm=1.0, use_ghost_clipping=True)
    ghost_optimizer = DPOptimizerFastGradientClipping(plain_optimizer, **options)

    def ghost() -> None:
        DPTensorFastGradientClipping(module, ghost_optimizer, losses(module(x), y)).backward()
        ghost_optimizer.zero_grad()

    return ghost


def main() -> None:
    """Measure and print."""
    name, method, repeats = sys.argv[1], sys.argv[2], int(sys.argv[3])
    torch.manual_seed(0)
    model, x, y = case(name, opacus=method in ("hooks", "ghost"))
    step = steps(method, model, x, y)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(2):
        step()
    wall, used = [], []
    for _ in range(repeats):
        start = time.perf_counter(), time.process_time()
        step()
        wall.append(time.perf_counter() - start[0])
        used.append(time.process_time() - start[1])
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    middle = len(wall) // 2
    print(json.dumps({"wall": sorted(wall)[middle], "cpu": sorted(used)[middle], "mib": peak / 1024}))


if __name__ == "__main__":
    main()
