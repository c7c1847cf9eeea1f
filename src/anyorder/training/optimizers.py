"""Optimizers: FTRL, what an optimizer and its scheduler may be given, and which one the noise was not fitted to."""

import copy
import functools
import warnings
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Collection
from types import FrameType
from typing import Any, NoReturn
from weakref import WeakSet

import numpy as np
import torch
from torch import Tensor
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.optim.optimizer import ParamsT

from anyorder import checks
from anyorder.checks import final
from anyorder.errors import ArgumentError, ModelError, OptimizerWarning, TrainingError
from anyorder.plan.plan import Plan
from anyorder.strategy import Independent, SquareRoot, Tree
from anyorder.workload import Course, Workload


class FTRL(torch.optim.Optimizer):
    """The optimizer DP-FTRL, with momentum.

        s_t = s_{t-1} + g_t,    v_t = momentum v_{t-1} + s_t
        theta_{t+1} = argmin_theta <v_t, theta> + 1/(2 lr) ||theta - theta_0||^2 = theta_0 - lr v_t
                                                                    [Kairouz et al. 2021, Algorithm 1]

    `.grad` is the private gradient g_t of the step. Its noise is the increment b_t - b_{t-1} of the noise b_t in the
    prefix sum, so s_t is the noisy prefix sum itself.

    With a constant `lr` the weights are those of `torch.optim.SGD(lr, momentum)` on the same gradients [Theorem B.1,
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
# What an optimizer and its scheduler may be given besides private gradients: public numbers.


@final
class Public(float):
    """Marks a number as public: its owner says that it reveals nothing of the data that the plan protects.

        scheduler.step(ao.Public(loss_on_public_data))      # torch.optim.lr_scheduler.ReduceLROnPlateau

    Measured on data that need no protection, by weights that were released, it is as private as these are. Measured on
    the training data, or on other data of the same people, it is a release that no plan covers. What is computed from
    it is an ordinary float again, which has to be said to be public by itself.
    """

    __slots__ = ()


_TRIED: WeakSet[torch.optim.Optimizer] = WeakSet()
"""Optimizers that were seen to let the loss of a closure alone."""


def returns_nothing() -> None:
    """The closure that an optimizer gets: the loss of a batch is no released number."""


def check_arguments(
    optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any], closure: Any
) -> None:
    """Refuse what a step is given beside a closure, and an optimizer that reads what its closure returns.

    A Polyak step is as long as the loss says, and would write it into the weights, to the last bit. Depends on code
    and made-up numbers alone, and nothing has run yet.

    Raises: TrainingError.
    """
    strange = [name for name, value in kwargs.items() if name != "closure" and not isinstance(value, Public)]
    if strange or len(args) > 1:
        words = ", ".join(strange) or f"{len(args)} arguments"
        raise TrainingError(
            f"optimizer.step() was given {words}: besides private gradients an optimizer takes public numbers alone, "
            "and a loss is none. Leave it out; of a number that is public say so with ao.Public(..)"
        )
    if closure is None or optimizer in _TRIED:
        return
    try:
        _try_step(optimizer)
    except _LossIsReadError:
        raise TrainingError(
            f"{type(optimizer).__name__} reads the loss that its closure returns, which no noise covers, and would "
            "write it into the weights: take an optimizer that goes by gradients alone, as SGD and Adam do"
        ) from None
    except Exception:  # it cannot be copied, or wants more than there is; its closure returns None
        pass
    _TRIED.add(optimizer)


def steps_already(optimizer: torch.optim.Optimizer, step: FrameType | None) -> bool:
    """Whether a step is of another step of this optimizer: of one whose own calls its parent's, which torch hooks too.

    Asked of the stack, which an error in the midst of a step leaves in order.

    Args:
        step: the frame that calls hooks before a step.
    """
    code, frame = step and step.f_code, step and step.f_back
    while frame is not None:
        if frame.f_code is code and frame.f_locals.get("self") is optimizer:
            return True
        frame = frame.f_back
    return False


class _LossIsReadError(Exception):
    """A trial step looked at the loss."""


def _tell(*args: Any, **kwargs: Any) -> NoReturn:
    raise _LossIsReadError


class _MadeUpLoss:
    """What the closure of a trial step returns: it may be handed on, and all else tells."""

    __hash__ = None  # type: ignore[assignment]


_READS = (
    "getattr", "torch_function", "array", "float", "int", "index", "bool", "len", "iter", "getitem", "call", "format",
    "repr", "str", "abs", "neg", "pos", "eq", "ne", "lt", "le", "gt", "ge", "add", "radd", "sub", "rsub", "mul", "rmul",
    "truediv", "rtruediv", "floordiv", "rfloordiv", "mod", "rmod", "pow", "rpow", "round", "deepcopy", "copy",
)  # fmt: skip
for _name in _READS:
    setattr(_MadeUpLoss, f"__{_name}__", _tell)


def _try_step(optimizer: torch.optim.Optimizer) -> None:
    """One step of a copy, over made-up parameters of one number each, without state and hooks."""
    trial = object.__new__(type(optimizer))
    memo: dict[int, Any] = {id(optimizer): trial, id(optimizer.state): defaultdict(dict)}
    for group in optimizer.param_groups:
        for p in group["params"]:
            made_up = torch.nn.Parameter(torch.ones((1,) * p.dim(), dtype=p.dtype, device=p.device))
            made_up.grad = torch.ones_like(made_up)
            memo[id(p)] = made_up
    shared = {"zero_grad", "step"}  # of this very optimizer: wrapped by the engine, or by a scheduler
    hooks = {name for name in vars(optimizer) if name.startswith("_optimizer_")}
    own = {name: value for name, value in vars(optimizer).items() if name not in shared | hooks}
    vars(trial).update(copy.deepcopy(own, memo), **{name: OrderedDict() for name in hooks})
    step = type(optimizer).step
    if getattr(step, "hooked", False):
        step = step.__wrapped__  # type: ignore[attr-defined]  # without what others hook on all optimizers
    with torch.random.fork_rng(devices=[]):
        step(trial, closure=_MadeUpLoss)  # type: ignore[arg-type]


def guard_schedulers(private: Collection[torch.optim.Optimizer]) -> None:
    """From here on `ReduceLROnPlateau` of a private optimizer takes `Public` numbers alone.

    Torch has no hook there; its method is wrapped once, and does as before for every other optimizer.

    Args:
        private: the optimizers of private runs, as they come and go.
    """
    step: Any = ReduceLROnPlateau.step
    if hasattr(step, "of_private"):
        return

    @functools.wraps(step)
    def guarded(self: ReduceLROnPlateau, metrics: Any, *args: Any, **kwargs: Any) -> None:
        chain: list[Any] = [self.optimizer]
        while hasattr(chain[-1], "optimizer"):  # of accelerate, which wraps it
            chain.append(chain[-1].optimizer)
        if not isinstance(metrics, Public) and any(one in private for one in chain):
            raise TrainingError(
                "ReduceLROnPlateau sets the learning rate by a number, and this one may tell of the training data, "
                "without noise: a loss of training, or of other data of the same people. If it was measured on data "
                "that need no protection, say so: scheduler.step(ao.Public(value)); or take a schedule that is fixed"
            )
        step(self, metrics, *args, **kwargs)

    guarded.of_private = True  # type: ignore[attr-defined]
    ReduceLROnPlateau.step = guarded  # type: ignore[method-assign]


# ----------------------------------------------------------------------------------------------------
# Optimizers that the noise was not fitted to, and parameters that one does not hold.


def warn_of_frozen(names: Collection[str], stacklevel: int) -> None:
    """Warn of parameters that stand still from here on, though nobody froze them."""
    if not names:
        return
    shown = ", ".join(sorted(names)[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
    warnings.warn(
        f"the optimizer does not hold {shown}: no gradient comes to them, and they are frozen from here on, also for "
        "any other optimizer. Give all that is to be trained to this one, in parameter groups, or say that they stand "
        "still: requires_grad_(False) before make_private",
        OptimizerWarning,
        stacklevel=stacklevel + 1,
    )


_NAMES = (
    "Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "SparseAdam",
)  # fmt: skip
_ADAPTIVE = tuple(getattr(torch.optim, name) for name in _NAMES if hasattr(torch.optim, name))
"""Those that divide a step by statistics of the gradients, as their subclasses do; others are not warned of."""

_OF_STEPS_ALONE = (Tree, SquareRoot)  # the same for every momentum: nothing is gained by planning with another
_NEAR = 1e-6  # momenta that differ by rounding, as in float32


def warn_of_unfitted(plan: Plan, optimizer: torch.optim.Optimizer, stacklevel: int) -> None:
    """Warn where correlated noise meets an optimizer that it was not fitted to.

    Noise of different steps cancels in the sums of gradients that the plan's workload makes. SGD with another momentum
    makes other sums: noise that is fitted to 0.9 leaves a third more in a model that has none, and more in long runs.
    So does Adam with another beta. Epsilon is the same: this is post-processing.
    """
    told = None
    if isinstance(optimizer, _ADAPTIVE) and type(plan.strategy) is not Independent and plan.n > 1:
        told = _of_adaptive(plan, optimizer)
    elif _is_fitted(plan, optimizer) and type(plan.workload) is Workload:  # a course sets its own before each step
        told = _of_momentum(plan, optimizer, plan.workload.momentum)
    if told is not None:
        warnings.warn(told, OptimizerWarning, stacklevel=stacklevel + 1)


def _is_fitted(plan: Plan, optimizer: torch.optim.Optimizer) -> bool:
    """Whether the noise was fitted to settings that this optimizer can have."""
    known = isinstance(optimizer, (torch.optim.SGD, FTRL)) and type(plan.workload) in (Workload, Course)
    return known and plan.n > 1 and type(plan.strategy) not in (Independent, *_OF_STEPS_ALONE)


class StepSettings:
    """Compares the settings of each step with those that the noise was fitted to, and warns once where they differ.

    A scheduler, or a loop that sets groups before each step, makes another workload than the optimizer had when it was
    bound. Rates are compared where the plan has a schedule, up to a factor of the group's own, that of its first step
    here, and within a factor of two: less than that changes little. A plan without one says nothing of rates that fall:
    noise of successive steps still cancels. Groups that stand still, at rate 0, make no sums, and are left out.
    """

    def __init__(self, plan: Plan, optimizer: torch.optim.Optimizer) -> None:
        self._plan, self._optimizer = plan, optimizer
        self._factors: dict[int, float] = {}
        rates = plan.workload.learning_rates
        self._has_rates = type(plan.workload) is Course or bool(rates.min() < rates.max())

    @classmethod
    def of(cls, plan: Plan, optimizer: torch.optim.Optimizer) -> "StepSettings | None":
        """None where no settings are better than others, or where they were told of already."""
        if not _is_fitted(plan, optimizer):
            return None
        if type(plan.workload) is Workload and _of_momentum(plan, optimizer, plan.workload.momentum) is not None:
            return None
        return cls(plan, optimizer)

    def differ(self, step: int) -> bool:
        """Whether a step has other settings than the plan: then this warns, and need not be asked again."""
        work = self._plan.workload
        if type(work) is Course:
            planned = work.settings(step)
            momentum, rate = planned["momentum"], planned["lr"]
        else:
            momentum, rate = work.momentum, float(work.learning_rates[step])
        for i, group in enumerate(self._optimizer.param_groups):
            found = float(group["lr"])
            if not found or not rate:
                continue
            own = float(group.get("momentum", 0.0))
            factor = found / rate / self._factors.setdefault(i, found / rate) if self._has_rates else 1.0
            if abs(own - momentum) < _NEAR and 0.5 <= factor <= 2.0:
                continue
            warnings.warn(
                f"the noise of this plan, {self._plan.strategy.describe()}, was fitted to momentum {momentum:g} and a "
                f"schedule in step {step}, and the optimizer has momentum {own:g} there and {factor:.3g} times the "
                "planned rate, against its first step: the guarantee is the same, but the error on the card is not "
                "that of this run. Plan with optimizer=(optimizer, scheduler), or with ao.workload.stages([..])",
                OptimizerWarning,
                stacklevel=2,
            )
            return True
        return False


def _of_adaptive(plan: Plan, optimizer: torch.optim.Optimizer) -> str | None:
    """Adam averages gradients as momentum does: noise that is fitted to that average goes with it, by measurement."""
    name = type(optimizer).__name__
    fitted = f"the noise of this plan, {plan.strategy.describe()}, was fitted"
    if not isinstance(optimizer, (torch.optim.Adam, torch.optim.AdamW)):
        return (
            f"{name} divides its steps by statistics of noisy gradients, and {fitted} to cancel in sums of gradients: "
            "the guarantee is the same, but which noise is better was measured for Adam and AdamW alone. Take one of "
            "these, or torch.optim.SGD, or compare with mechanism='independent' on public data, each at its best rate"
        )
    work = plan.workload
    if type(work) is not Workload or type(plan.strategy) in _OF_STEPS_ALONE:
        return None
    found = sorted({float(group["betas"][0]) for group in optimizer.param_groups})
    # With a beta the division by 1 - beta^t makes rates that fall, so that a plan of constant ones is another's.
    if all(abs(beta - work.momentum) < _NEAR for beta in found) and (not work.momentum or np.ptp(work.learning_rates)):
        return None
    betas = " and ".join(f"{beta:g}" for beta in found)
    return (
        f"{fitted} to SGD with momentum {work.momentum:g}, and {name} takes averages of gradients by beta {betas}: the "
        "guarantee is the same, but more noise is left in the model than need be. Plan with optimizer=, the "
        "torch.optim.Adam or AdamW itself, or one of the same betas"
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
