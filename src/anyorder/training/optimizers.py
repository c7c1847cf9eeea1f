"""Optimizers: FTRL, what a private run asks of an optimizer, and which one the noise was not fitted to."""

import warnings
from collections.abc import Callable
from operator import attrgetter
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.optim.optimizer import ParamsT

from anyorder import checks
from anyorder.errors import ArgumentError, ModelError, OptimizerWarning, TrainingError
from anyorder.plan.plan import Plan
from anyorder.strategy import Independent, SquareRoot, Tree
from anyorder.training.distributed import local
from anyorder.workload import Workload


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


# ----------------------------------------------------------------------------------------------------
# The parameters that are trained: those that the optimizer holds. All others stay as they are.


_IS_TRAINED = attrgetter("requires_grad")
_BOUND: WeakSet[torch.optim.Optimizer] = WeakSet()
"""The optimizers whose steps are those of a release."""


class BoundParameters:
    """The trainable parameters of a model that an optimizer holds; the model's others are left out, and frozen.

    What is left out is in no clipped gradient, gets no noise, and takes no part in the size of the release. It is
    frozen (`requires_grad=False`) so that no gradient of private data can come to it by any way.

    Args:
        model: the user's.
        optimizer: over parameters of the model.

    Attributes:
        named: the parameters that are trained, in the model's order.
    Raises: ArgumentError for what is no optimizer, holds parameters that are not the model's, or is of another run;
        nothing is frozen.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise ArgumentError(f"optimizer must be a torch.optim.Optimizer, got {type(optimizer).__name__}")
        if isinstance(optimizer, torch.optim.LBFGS):
            raise ArgumentError("LBFGS takes several gradients of a batch in a step, and the plan covers one: use SGD")
        if optimizer in _BOUND:
            raise ArgumentError(
                "optimizer belongs to another private run, whose noise comes with each of its steps; make a new "
                "one over the model's parameters (its load_state_dict takes over what the old one has)"
            )
        self._optimizer = optimizer
        trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._check_known({id(p) for p in trainable.values()})
        held = {id(p) for p in self._parameters()}
        self.named = {name: p for name, p in trainable.items() if id(p) in held}
        self._known = {id(p) for p in self.named.values()}
        self._left_out = {name: p for name, p in trainable.items() if id(p) not in held}
        self._others = [p for p in model.parameters() if id(p) not in self._known]  # frozen before, or left out
        self._written: dict[nn.Parameter, tuple[Any, int]] = {}
        for p in self._left_out.values():
            p.requires_grad_(False)

    def bind(self) -> None:
        """The optimizer's steps are those of one release from here on, and of no other."""
        _BOUND.add(self._optimizer)

    def thaw(self) -> None:
        """Undo the freezing, where the model is not bound after all."""
        for p in self._left_out.values():
            p.requires_grad_(True)

    def _parameters(self) -> list[Any]:
        return [p for group in self._optimizer.param_groups for p in group["params"]]

    def _check_known(self, known: set[int]) -> None:
        held = self._parameters()
        own = [p for p in held if id(p) in known]
        strange = 0 if len(own) == len(held) else len([p for p in held if id(p) not in known and p.requires_grad])
        if strange or not own:
            raise ArgumentError(
                f"optimizer must hold parameters of the model that require gradients, and no others; {strange} of its "
                f"{len(held)} parameters are not among the model's {len(known)} trainable ones. Make it of this very "
                "model's parameters: after anyorder.clipping.convert, torch.compile or an adapter"
            )

    def check(self) -> None:
        """Raise TrainingError if a parameter was frozen since, or one that is left out is trained after all."""
        if not all(map(_IS_TRAINED, self.named.values())):
            raise TrainingError("a parameter was frozen after make_private; freeze before it, so that noise fits")
        if any(map(_IS_TRAINED, self._others)):
            raise TrainingError(
                "a parameter that was left out, because the optimizer did not hold it or it was frozen, requires a "
                "gradient now: no noise is planned for it. Give it to the optimizer before make_private, or freeze it"
            )

    def check_optimizer(self) -> None:
        """Refuse a step of the optimizer that would move more than what is released.

        A gradient that was left on a frozen parameter, by an earlier training perhaps, would go in without noise, and
        again in every step; so would those of a group that was added later.
        """
        self.check()
        own = 0
        for group in self._optimizer.param_groups:
            for p in group["params"]:
                if id(p) in self._known:
                    own += 1
                elif p.requires_grad:
                    self._check_known(self._known)
                elif p.grad is not None:
                    raise TrainingError(
                        "the optimizer holds a frozen parameter that has a gradient, which each step would add to it: "
                        "no noise covers it. Set the gradient to None, or leave the parameter out of the optimizer"
                    )
        if not own:
            self._check_known(self._known)

    def check_step(self) -> None:
        """Refuse a step of another optimizer state, and gradients that did not come through the private model.

        They would be lost, or not be private.
        """
        self.check_optimizer()
        for name, p in self.named.items():
            if p.grad is None:
                continue
            own, version = self._written.get(p, (None, 0))
            if (p.grad is own and own._version == version) or not _has_numbers(p.grad):
                continue
            raise TrainingError(
                f"parameter {name} has a gradient that did not come through the private model, from a penalty on "
                "weights or another loss perhaps; use the optimizer's weight_decay, and zero_grad() before each step"
            )
        for name, p in self._left_out.items():
            if p.grad is not None and _has_numbers(p.grad):
                raise TrainingError(
                    f"parameter {name}, which the optimizer does not hold, has a gradient: no noise covers it, and "
                    "another optimizer that steps on it would train on private data in the open. Give all parameters "
                    "that are trained on this data to the one private optimizer, and set this gradient to None"
                )

    def write(self, p: nn.Parameter, gradient: Any) -> None:
        """Put a private gradient in place."""
        p.grad = gradient
        self._written[p] = (p.grad, gradient._version)


def _has_numbers(gradient: Tensor) -> bool:
    """Whether a gradient is not all zeros."""
    if gradient.is_sparse:
        gradient = gradient._values()
    return bool(local(gradient).any())


# ----------------------------------------------------------------------------------------------------
# Gradient scaling for float16: it would cut units at another norm, and finds no gradients to look at.


def ask_for_scale(optimizer: torch.optim.Optimizer) -> None:
    """Let a GradScaler hand its scale to the optimizer, as to those that unscale by themselves, so that it is seen."""
    vars(optimizer)["_step_supports_amp_scaling"] = True


def refuse_scale(optimizer: Any, kwargs: dict[str, Any]) -> None:
    """Raise TrainingError if a GradScaler takes this step."""
    scaled = "grad_scaler" in kwargs
    for name in ("grad_scale", "found_inf"):
        scaled |= vars(optimizer).pop(name, None) is not None
    if scaled:
        raise TrainingError(
            "a GradScaler takes this step: it scales the loss, and units would be cut at clip_norm over that scale. "
            "Leave it out, or make it with enabled=False: with torch.autocast in bfloat16 no scaling is needed"
        )


# ----------------------------------------------------------------------------------------------------
# Optimizers that the noise was not fitted to.


_NAMES = (
    "Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "SparseAdam",
)  # fmt: skip
_ADAPTIVE = tuple(getattr(torch.optim, name) for name in _NAMES if hasattr(torch.optim, name))
"""Those that divide a step by statistics of the gradients, as their subclasses do; others are not warned of."""

_OF_STEPS_ALONE = (Tree, SquareRoot)  # the same for every momentum: nothing is gained by planning with another
_NEAR = 1e-6  # momenta that differ by rounding, as in float32


def warn_of_unfitted(plan: Plan, optimizer: torch.optim.Optimizer, stacklevel: int) -> None:
    """Warn where correlated noise meets an optimizer that it was not fitted to.

    Noise of different steps cancels in the sums of gradients that the plan's workload makes. An optimizer that scales
    each step by the size of its noisy gradients makes other sums, and so does SGD with another momentum: noise that is
    fitted to 0.9 leaves a third more in a model that has none, and more in long runs. Epsilon is the same: this is
    post-processing.
    """
    if type(plan.strategy) is Independent or plan.n == 1:
        return
    told = None
    if isinstance(optimizer, _ADAPTIVE):
        told = _of_adaptive(plan, optimizer)
    elif (
        isinstance(optimizer, (torch.optim.SGD, FTRL))
        and type(plan.workload) is Workload
        and type(plan.strategy) not in _OF_STEPS_ALONE
    ):
        told = _of_momentum(plan, optimizer, plan.workload.momentum)
    if told is not None:
        warnings.warn(told, OptimizerWarning, stacklevel=stacklevel + 1)


def _of_adaptive(plan: Plan, optimizer: torch.optim.Optimizer) -> str:
    return (
        f"{type(optimizer).__name__} divides its steps by statistics of noisy gradients, and the noise of this plan, "
        f"{plan.strategy.describe()}, was fitted to cancel in sums of gradients: the guarantee is the same, but the "
        "model may be worse than with independent noise. Take torch.optim.SGD with momentum, or ao.FTRL, or compare "
        "with mechanism='independent'"
    )


def _of_momentum(plan: Plan, optimizer: torch.optim.Optimizer, fitted: float) -> str | None:
    trained = [group for group in optimizer.param_groups if any(one.requires_grad for one in group["params"])]
    found = sorted({float(group.get("momentum", 0.0)) for group in trained})
    if all(abs(momentum - fitted) < _NEAR for momentum in found):
        return None
    words = " and ".join(f"{momentum:g}" for momentum in found)
    advice = (
        f"Plan with optimizer=ao.SGD(momentum={words})"
        if len(found) == 1
        else f"Give all groups the momentum {fitted:g}"
    )
    return (
        f"the noise of this plan, {plan.strategy.describe()}, was fitted to momentum {fitted:g}, and this optimizer "
        f"has {words}: the guarantee is the same, but more noise is left in the model than need be. {advice}"
    )
