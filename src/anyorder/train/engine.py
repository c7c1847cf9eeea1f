"""The engine: turns an ordinary training loop into one run of the planned mechanism."""

import functools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from anyorder import _check
from anyorder.certificate import Certificate, Evidence
from anyorder.clipping import make_clipping
from anyorder.clipping.base import Receive
from anyorder.clipping.clip_rules import Cut, Rule
from anyorder.clipping.coupling import LossWatch
from anyorder.clipping.units import accumulator_dtype
from anyorder.clipping.validate import refuse_unfit
from anyorder.errors import (
    ArgumentError,
    CheckpointError,
    PlanError,
    StepsExhaustedError,
    TrainingError,
)
from anyorder.ledger import Ledger, Units
from anyorder.noise import NoiseSource
from anyorder.plan import Plan
from anyorder.release.clip_norm import ClipNorm
from anyorder.release.files import RunFiles
from anyorder.release.noise import SharedNoise
from anyorder.release.schedules import Fixed
from anyorder.sampling import PrivateLoader, Unit, poisson_loader
from anyorder.sampling.handed import HandedBatch
from anyorder.train.distributed import Group, distinct_units, forward_together
from anyorder.train.fsdp import WholeModel, check_sharding, load_whole, local, whole
from anyorder.train.generators import random_state, set_random_state
from anyorder.train.module import PrivateModule
from anyorder.train.order import BY_LEDGER, check_absence, check_order, check_unit, warn_of_scattered_units
from anyorder.train.scaler import ask_for_scale, refuse_scale
from anyorder.train.shards import Shards

__all__ = ["PrivacyEngine"]


@dataclass(frozen=True)
class _Waiting:
    """What waits for optimizer.step(): never released, and replaced as a whole, so that an interrupt leaves no half."""

    units: Units | list[Any]
    sums: dict[str, Tensor]
    batches: int = 0

    def with_units(self, units: Units | list[Any]) -> Units | list[Any]:
        """These units and further ones."""
        return [*self.units, *units] if len(self.units) else units


class PrivacyEngine:
    """Runs one plan: clips each unit, adds the planned noise at every step, and refuses what the plan does not cover.

    At `optimizer.step()` number t the parameters' `.grad` becomes

        ( sum over units of clip(gradient of the unit) + noise_std * (K Z)[t] ) / plan.batch_size

    and the optimizer does the rest. Nothing un-noised is ever in `.grad`. With `plan.grid` the sum and the noise are
    exact integers, in grid steps; floating point begins after they are added.

    Guarantee: the sequence of gradients, hence every iterate, is (plan.epsilon, plan.delta)-DP for one unit under the
    plan's neighbouring relation, provided that an example's loss depends on no other example of the batch (use
    reductions `mean` or `sum` over examples; not a contrastive loss, nor a mean over unmasked tokens of the batch).
    Printed training losses are releases too, and are not covered.

    Under an initialised `torch.distributed` process group all ranks train one model: the sums are over all of them,
    the noise is added once. Every rank makes the same calls, on its own part of the data.

    Args:
        plan: what to run.
        checkpoint: file for `save`; where it exists, `make_private` resumes from it. Its folder must exist. From
            `make_private` on, a journal beside it records every step before its release, and keeps other runs away.
        key: 32 bytes for reproducible tests. In use, leave it out: the key then comes from the operating system, and
            a run whose key is known has no privacy.
    """

    def __init__(self, plan: Plan, *, checkpoint: str | Path | None = None, key: bytes | None = None) -> None:
        if not isinstance(plan, Plan):
            raise ArgumentError(f"plan must be an anyorder Plan (see anyorder.plan), got {type(plan).__name__}")
        self.plan = plan
        self.extra: dict[str, Any] = {}
        self._path = None if checkpoint is None else Path(checkpoint)
        self._given_key = None if key is None else NoiseSource(key).key
        self._clip = ClipNorm(plan, Fixed())
        self._written: dict[nn.Parameter, tuple[Tensor, int]] = {}
        self._ready = False
        self._closed = False

    # -- set-up ------------------------------------------------------------------------------------------------------

    def make_private(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        loader: Any,
        *,
        unit: Unit = None,
        loss_reduction: str = "mean",
        accumulate: int = 1,
        chunk_size: int | None = None,
        rule: Rule | None = None,
        non_finite: str = "zero",
    ) -> tuple[PrivateModule, torch.optim.Optimizer, PrivateLoader]:
        """Bind model, optimizer and loader to this engine, and resume if the checkpoint file exists.

        Args:
            model: any module that treats the examples of a batch separately; its first dimension is the batch.
            optimizer: any torch optimizer over parameters of `model`; the same object comes back.
            loader: a DataLoader. Its order must be one that the plan covers. With `unit`, any iterable of batches.
            unit: None for examples: the plan's unit must be "example". For user-level privacy the key of each example's
                unit: a field name of dict batches, a position in tuple batches, or a function from the batch to a
                sequence of keys; the plan's unit says whom it names.
            loss_reduction: how the loss joins examples: "mean" or "sum".
            accumulate: batches (micro-batches) that make up one optimizer step.
            chunk_size: examples whose gradients are in memory at once; None chooses.
            rule: how a unit's gradient is cut to the clip norm: `Flat()` if None, `PerGroup(..)`, `Automatic(..)`,
                `Adaptive(..)`.
            non_finite: "zero": a unit whose gradient is NaN or infinite adds exactly zero, and nothing tells of it.
                "refuse": backward raises NonFiniteError, which says how many there are. That is a release that no
                noise covers: for debugging on public data.
        Returns: the private model, the optimizer, and a loader that hands out the same batches.
        """
        if self._ready:
            raise TrainingError("make_private was already called: one engine runs one plan once")
        _check.choice("loss_reduction", loss_reduction, {"mean", "sum"})
        self._accumulate = _check.integer("accumulate", accumulate, low=1)
        group = self._group = Group()
        place = "make_private"
        claims = group.together(place, lambda: self._bind(model, optimizer, unit, loss_reduction, rule))
        if claims.count(claims[0]) < len(claims):
            raise PlanError("the ranks were given different plans or models; all must run one program")
        self._files = RunFiles(self._path, group)
        state = self._files.load(place, self.plan, self._given_key)
        if state is not None:
            self._clip.check(state["clip_norm"])
        fresh = self._given_key or NoiseSource.random().key
        self._key = group.from_first(fresh) if state is None else state["key"]
        # A key is bound to its plan: under another plan the same 32 bytes give unrelated noise.
        own = NoiseSource(self._key).derive(self.plan.digest.encode())
        self._source = self._files.begin(place, own, self.plan, state)
        try:
            group.together(place, lambda: self._set_up(loader, unit, chunk_size, rule, non_finite))
            group.copy_from_first(t for t in (*model.parameters(), *model.buffers()) if local(t) is t)
            if state is not None:
                self._restore(state)
        except BaseException:
            self._files.close()
            raise
        self._hook_optimizer()
        self._ready = True
        self.model = PrivateModule(model, self._forward, self._discard, self._whole)
        return self.model, optimizer, self.loader

    def _bind(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, unit: Unit, loss_reduction: str, rule: Rule | None
    ) -> str:
        """Check model and optimizer; returns what must be the same on all ranks."""
        check_unit(self.plan, unit)
        cut = Cut.of(rule)
        self._clip = ClipNorm(self.plan, cut.schedule)
        # Stands for the further coordinate among the parameters; it is never trained.
        self._count = nn.Parameter(torch.zeros((), dtype=torch.float64), requires_grad=False)
        self._counts = dict.fromkeys(cut.counted, self._count)
        refuse_unfit(model)
        check_sharding(model, self._group)
        self._model, self._optimizer, self._loss_reduction = model, optimizer, loss_reduction
        self._parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._check_optimizer()
        return f"{self.plan.digest} {rule} {[(name, tuple(p.shape)) for name, p in self._parameters.items()]}"

    def _set_up(self, loader: Any, unit: Unit, chunk_size: int | None, rule: Rule | None, non_finite: str) -> None:
        self.loader = self._private_loader(loader, unit, self._source.own)
        self.ledger = Ledger(self.plan.participation)
        self._shards = Shards({**self._parameters, **self._counts}, self._group)
        plan = self.plan
        self._stream = SharedNoise(plan.strategy, self._source, plan.noise_std, self._shards, plan.grid)
        self._whole = WholeModel(self._model)
        self._clipping = make_clipping(self._whole.module, chunk_size, plan.grid, rule, non_finite)
        self._watch = LossWatch()
        self._next_coins = 0
        self._discard()

    def _private_loader(self, loader: Any, unit: Unit, source: NoiseSource) -> PrivateLoader:
        participation = self.plan.participation
        if participation.secret:
            if unit is not None or self._accumulate != 1:
                raise PlanError("Poisson sampling draws examples: it takes neither unit= nor accumulate=")
            coins = self._files.coins(source.derive(b"sampling"))
            loader = poisson_loader(loader, participation, coins, rank=self._group.rank, ranks=self._group.size)
            self.order = "Poisson sampling by anyorder"
        else:
            check_absence(self.plan, loader)
            self.order = BY_LEDGER if unit is not None else check_order(self.plan, loader, self._accumulate)
            if unit is not None:
                warn_of_scattered_units(self.plan, loader)
        return PrivateLoader(loader, unit=unit, seed=source.derive(b"order").key)

    def _check_optimizer(self) -> None:
        if not isinstance(self._optimizer, torch.optim.Optimizer):
            raise ArgumentError(f"optimizer must be a torch.optim.Optimizer, got {type(self._optimizer).__name__}")
        if isinstance(self._optimizer, torch.optim.LBFGS):
            raise ArgumentError("LBFGS takes several gradients of a batch in a step, and the plan covers one: use SGD")
        known = {id(p) for p in self._parameters.values()}
        held = [p for group in self._optimizer.param_groups for p in group["params"]]
        strange = sum(id(p) not in known and p.requires_grad for p in held)
        if strange or not held:
            raise ArgumentError(
                f"optimizer must hold parameters of the model that require gradients, and no others; {strange} of its "
                f"{len(held)} parameters are not among the model's {len(known)} trainable ones. Make it of this very "
                "model's parameters: after anyorder.clipping.convert, torch.compile or an adapter"
            )

    def _hook_optimizer(self) -> None:
        ask_for_scale(self._optimizer)
        self._optimizer.register_step_pre_hook(self._before_step)
        zero_grad = self._optimizer.zero_grad

        @functools.wraps(zero_grad)
        def discard_and_zero(set_to_none: bool = True) -> None:
            self._discard()
            zero_grad(set_to_none)

        self._optimizer.zero_grad = discard_and_zero  # type: ignore[method-assign]

    # -- one step ----------------------------------------------------------------------------------------------------

    def _discard(self) -> None:
        """Forget the clipped sums of a step that has not been taken: they were never released."""
        self._waiting = _Waiting([], {})

    def _forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        step = self.ledger.step
        tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        found: list[HandedBatch] = []
        told = self._group.together(f"the forward pass of step {step}", lambda: self._find_batch(tensors, found))
        batch, units = found[0], distinct_units(told)
        allowed = self.ledger.check(step, self._waiting.with_units(units))
        if not self._waiting.batches:
            units = allowed  # which the ledger knows again when the step is made
        _, groups = np.unique(np.asarray(batch.units), return_inverse=True)
        self._whole.gather()

        def forward(receive: Receive) -> Any:
            return self._clipping.forward(
                args,
                kwargs,
                groups=torch.from_numpy(groups.reshape(-1).astype(np.int64)),
                clip_norm=self._clip.current,
                scale=float(len(batch.units)) if self._loss_reduction == "mean" else 1.0,
                receive=receive,
            )

        receive = functools.partial(self._receive, batch, step, units)
        return self._watch.outputs(forward_together(self._group, step, forward, receive))

    def _find_batch(self, tensors: list[Tensor], found: list[HandedBatch]) -> Units:
        """Add the batch that the model is called on to `found`; its units."""
        if [p.requires_grad for p in self._parameters.values()].count(False):
            raise TrainingError("a parameter was frozen after make_private; freeze before it, so that noise fits")
        batch = self.loader.batch_of(tensors)
        self._check_batch(batch)
        found.append(batch)
        return batch.units

    def _check_batch(self, batch: HandedBatch) -> None:
        waiting = self._waiting
        if batch.used:
            raise TrainingError(
                "this batch was already used by a backward pass: each unit is clipped once a step. For a loss of "
                "several passes over a batch, give make_private one module whose forward calls the network for each"
            )
        if self.plan.participation.secret and batch.position < self._next_coins:
            raise TrainingError(
                "a batch of these coins, or of later ones, was used already: Poisson sampling is accounted for coins "
                "that are tossed anew in each step. Use the batches in their order, each once, and do not move the "
                "loader back"
            )
        if waiting.batches == self._accumulate:
            raise TrainingError(
                f"{waiting.batches} batch(es) wait for optimizer.step() already, and accumulate={self._accumulate}; "
                "call optimizer.step() or zero_grad(), or pass accumulate= to make_private"
            )
        if waiting.batches and set(waiting.units).intersection(batch.units):
            raise TrainingError(
                "a unit is in two micro-batches of one step, and would be clipped twice; put the examples of a unit "
                "into one micro-batch"
            )

    def _receive(self, batch: HandedBatch, step: int, units: Units | list[Any], sums: dict[str, Tensor]) -> None:
        if step != self.ledger.step:
            raise TrainingError(f"backward of a batch of step {step} after optimizer.step(): its step has passed")
        self._check_batch(batch)
        self._watch.came_back()
        before = self._waiting
        joined = {name: before.sums[name] + value if name in before.sums else value for name, value in sums.items()}
        self._mark_used(batch)
        self._waiting = _Waiting(before.with_units(units), joined, before.batches + 1)

    def skip(self) -> None:
        """Leave out the batch that was handed out last; then call `optimizer.step()` as always.

            for x, y in loader:
                optimizer.zero_grad()
                try:
                    criterion(model(x), y).backward()
                except torch.OutOfMemoryError:
                    engine.skip()
                optimizer.step()

        The batch adds zero: its step releases noise alone, or the other micro-batches. So the steps stay those of the
        loader, and an epoch of it an epoch of the plan. All ranks call it together.

        Privacy: whether a batch is left out must not depend on the data in it, as a rule that a text is too long would:
        one unit would then decide whether the others of its batch count.

        Raises: TrainingError if no batch waits, several do (`loader.use(batch)` says which), or the last was used.
        """
        self._group.together(f"engine.skip() at step {self.ledger.step}", self._skip)

    def _skip(self) -> None:
        batch = self.loader.newest()
        self._check_batch(batch)
        before = self._waiting
        sums = before.sums or self._zeros()
        self._mark_used(batch)
        self._waiting = _Waiting(before.units, sums, before.batches + 1)

    def _mark_used(self, batch: HandedBatch) -> None:
        self.loader.mark_used(batch)
        self._next_coins = batch.position + 1

    def _zeros(self) -> dict[str, Tensor]:
        """The clipped sums of nobody."""
        dtypes = {accumulator_dtype(p) for p in self._parameters.values()}
        floating = torch.float64 if torch.float64 in dtypes else torch.float32
        dtype = floating if self.plan.grid is None else torch.int64
        held = {**self._parameters, **self._counts}
        return {name: torch.zeros(p.shape, dtype=dtype, device=local(p).device) for name, p in held.items()}

    def _before_step(
        self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Run the closure if there is one, and put the private gradients in place."""
        refuse_scale(optimizer, kwargs)
        closure = kwargs.get("closure") or (args[1] if len(args) > 1 else None)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._make_gradients()
        return args[:1], {**kwargs, "closure": None if closure is None else lambda: loss}

    def _make_gradients(self) -> None:
        """Put the private gradients in place. Until the noise is drawn, nothing has changed."""
        self._files.check_process()
        step = self.ledger.step
        place = f"optimizer.step() of step {step}"
        self._group.together(place, lambda: self._check_step(step))
        own = self._clip.planned(self._shards.sum_of_own(self._waiting.sums))
        self._files.commit(place, step, own)
        private = self._stream.add_to(own, self._clip.divisor)
        self.ledger.record(step, self._waiting.units)
        self._discard()
        self._whole.drop()
        for p, gradient in self._shards.gradients(private):
            if p is self._count:
                self._clip.record(step, float(gradient), self._group)
                continue
            p.grad = gradient
            self._written[p] = (p.grad, p.grad._version)

    def _check_step(self, step: int) -> None:
        if self._closed:
            raise TrainingError("this engine was closed: another process may have resumed its run")
        if step >= self.plan.n:
            raise StepsExhaustedError(f"all {self.plan.n} planned steps are used; a longer run needs its own plan")
        if not self._waiting.batches:
            raise TrainingError(
                "optimizer.step() without a backward pass through the private model since the last step; to leave a "
                "batch out, call engine.skip() first"
            )
        self._check_optimizer()
        self._check_gradients()
        self._stream.check(step)
        self._clip.check_step(step)
        self.ledger.check(step, self._waiting.units)

    def _check_gradients(self) -> None:
        """Refuse gradients that did not come through the private model: they would be lost, or not be private."""
        for name, p in self._parameters.items():
            own, version = self._written.get(p, (None, 0))
            if p.grad is None or (p.grad is own and own._version == version) or not local(p.grad).any():
                continue
            raise TrainingError(
                f"parameter {name} has a gradient that did not come through the private model, from a penalty on "
                "weights or another loss perhaps; use the optimizer's weight_decay, and zero_grad() before each step"
            )

    # -- progress, checkpoints, certificate --------------------------------------------------------------------------

    @property
    def step(self) -> int:
        """Number of steps taken."""
        return self.ledger.step

    @property
    def clip_norm(self) -> float:
        """The norm at which units are cut now. With `Adaptive` it moves, by what was released: it is public."""
        return self._clip.current

    @property
    def epoch(self) -> int:
        """Number of epochs begun and finished; for `range(engine.epoch, epochs)` after a resume. 0 for a stream."""
        batches = self.loader.batches_per_epoch
        return 0 if batches is None else self.loader.position // batches

    def certificate(self) -> Certificate:
        """The claim of this run, for everybody: `save` it, and check it with `anyorder verify`. It names nobody."""
        return self.evidence().certificate

    def evidence(self) -> Evidence:
        """Who took part in which step: what backs the certificate. As secret as the data."""
        key = self._source.derive(b"record").key
        return Evidence(self.plan, self.ledger, self._source.fingerprint(), key)

    def save(self, extra: dict[str, Any] | None = None) -> None:
        """Write the checkpoint: one file, replaced atomically. All ranks call it, and the first one writes.

        The file holds the noise key: whoever has it can remove the noise. Steps after the last save are repeated when
        the run is resumed, and must come out bit for bit as they were: save often.

        Args:
            extra: tensors and plain values of the user's own, found in `engine.extra` after a resume.
        """
        place = "engine.save()"
        self._files.check_process()
        self._group.together(place, self._check_save)
        state = {
            "plan": json.dumps(self.plan.to_dict()),
            "key": self._key,
            "model": whole(self._model.state_dict()),
            "optimizer": whole(self._optimizer.state_dict()),
            "stream": self._stream.state_dict(),
            "clip_norm": self._clip.state_dict(),
            "clipping": self._group.to_first(self._clipping.state_dict()),
            "loader": self.loader.state_dict(),
            "ledger": self.ledger.to_bytes(),
            "random": self._group.to_first(random_state()),
            "extra": extra or {},
        }
        self._files.save(place, state)

    def _check_save(self) -> None:
        if self._path is None:
            raise CheckpointError("this engine has no file: give checkpoint= to PrivacyEngine")
        if self._closed:
            raise CheckpointError("this engine was closed: another process may have resumed its run")
        if self._waiting.batches:
            raise CheckpointError("save between steps: a batch waits for optimizer.step()")

    def close(self) -> None:
        """Let another process resume this run. The end of the process does the same."""
        if self._ready:
            self._files.check_process()
            self._files.close()
        self._closed = True

    def _restore(self, state: dict[str, Any]) -> None:
        if "model" not in state:
            raise CheckpointError(
                f"{self._path} is the checkpoint of another front end, and no model is in it; choose another file"
            )
        ledger = Ledger.from_bytes(self.plan.participation, state["ledger"])
        load_whole(self._model, self._optimizer, state["model"], state["optimizer"])
        self._stream.load_state_dict({**state["stream"], "state": [t.numpy() for t in state["stream"]["state"]]})
        self._clip.load_state_dict(state.get("clip_norm"))
        self._clipping.load_state_dict(state["clipping"][self._group.rank % len(state["clipping"])])
        self.loader.load_state_dict(state["loader"])
        self._next_coins = self.loader.position
        self.ledger = ledger
        self.extra = state["extra"]
        set_random_state(state["random"][self._group.rank % len(state["random"])])
