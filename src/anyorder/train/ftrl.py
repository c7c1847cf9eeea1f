"""Follow the regularised leader, as a torch optimizer on private gradients."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from anyorder import checks
from anyorder.errors import ArgumentError, ModelError

__all__ = ["FTRL"]


class FTRL(torch.optim.Optimizer):
    """DP-FTRL, with momentum.

        s_t = s_{t-1} + g_t,    v_t = momentum v_{t-1} + s_t
        theta_{t+1} = argmin_theta <v_t, theta> + 1/(2 lr) ||theta - theta_0||^2 = theta_0 - lr v_t
                                                                    [Kairouz et al. 2021, Algorithm 1]

    `.grad` is the private gradient g_t of the step. Its noise is the increment b_t - b_{t-1} of the noise b_t in the
    prefix sum, so s_t is the noisy prefix sum itself.

    With a constant `lr` the iterates are those of `torch.optim.SGD(lr, momentum)` on the same gradients [Theorem B.1,
    and by sum_{u<=t} m_u = v_t for the momentum m_u of SGD], and 1/lr is the paper's lambda. They differ under a
    learning-rate schedule: `lr` multiplies the whole sum, past gradients too, so a decay to 0 brings the parameters
    back to theta_0, while SGD's decay lets them come to rest.

    theta_0 is what a parameter holds at its first step with a gradient. Later changes by other hands are overwritten.

    Args:
        params: parameters or parameter groups; a group may have its own `lr` and `momentum`.
        lr: 1/lambda, not negative.
        momentum: in [0, 1).

    Memory: two copies of the parameters, three with momentum; float32 for parameters of lower precision.
    """

    def __init__(self, params: ParamsT, lr: float, momentum: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters; see `torch.optim.Optimizer.add_param_group`."""
        options = self.defaults | param_group
        checks.real("lr", options["lr"], low=0.0)
        if checks.real("momentum", options["momentum"], low=0.0) >= 1:
            raise ArgumentError(f"momentum must be below 1, got {options['momentum']!r}")
        super().add_param_group(param_group)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step; parameters without a gradient are left alone. Returns what `closure` returns."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self._update(p, p.grad, lr=group["lr"], momentum=group["momentum"])
        return loss

    def _update(self, p: Tensor, gradient: Tensor, *, lr: float, momentum: float) -> None:
        if gradient.is_sparse:
            raise ModelError("FTRL needs dense gradients, got a sparse one; use sparse=False")
        state = self.state[p]
        dtype = torch.promote_types(p.dtype, torch.float32)
        if not state:
            state["initial"] = p.detach().to(dtype, copy=True)
            state["sum"] = torch.zeros_like(state["initial"])
        state["sum"] += gradient
        velocity = state["sum"]
        if momentum:
            velocity = state["velocity"] = momentum * state.get("velocity", 0.0) + state["sum"]
        p.copy_(torch.sub(state["initial"], velocity, alpha=lr))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` gave; every later step is bit-equal."""
        super().load_state_dict(state_dict)
        # The base class casts to the parameters' dtype, which would round the float32 sums of bfloat16 parameters.
        ids = [i for group in state_dict["param_groups"] for i in group["params"]]
        parameters = [p for group in self.param_groups for p in group["params"]]
        for i, p in zip(ids, parameters, strict=True):
            for name, value in state_dict["state"].get(i, {}).items():
                self.state[p][name] = value.to(p.device, copy=True)
