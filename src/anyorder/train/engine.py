"""The engine: turns an ordinary training loop into one run of the planned mechanism."""

import functools
import json
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from anyorder import _check
from anyorder.certificate import Certificate
from anyorder.clipping import FunctionalClipping, check_model
from anyorder.errors import (
    ArgumentError,
    CheckpointError,
    LoaderError,
    NonFiniteError,
    PlanError,
    StepsExhaustedError,
    TrainingError,
)
from anyorder.ledger import Ledger, Units
from anyorder.noise import NoiseSource, NoiseStream
from anyorder.participation import EpochShuffle, FixedOrder, Participation, PoissonSampling, SingleEpoch, covers
from anyorder.plan import Plan
from anyorder.sampling import Found, PrivateLoader, Unit, find_participation, poisson_loader
from anyorder.train.checkpoint import Journal, load, random_state, save_atomic, set_random_state
from anyorder.train.module import PrivateModule

__all__ = ["PrivacyEngine"]

_BY_LEDGER = "not read off the loader; the ledger enforces the plan's"


@dataclass
class _Batch:
    """One batch handed out by the loader: its units, and whether a backward pass has used it."""

    units: Units
    used: bool = False


class PrivacyEngine:
    """Runs one plan: clips each unit, adds the planned noise at every step, and refuses what the plan does not cover.

    At `optimizer.step()` number t the parameters' `.grad` becomes

        ( sum over units of clip(gradient of the unit) + noise_std * (K Z)[t] ) / plan.batch_size

    and the optimizer does the rest. Nothing un-noised is ever in `.grad`.

    Guarantee: the sequence of gradients, hence every iterate, is (plan.epsilon, plan.delta)-DP for one unit under the
    plan's neighbouring relation, provided that an example's loss depends on no other example of the batch (use
    reductions `mean` or `sum` over examples; not a contrastive loss, nor a mean over unmasked tokens of the batch).
    Printed training losses are releases too, and are not covered.

    Args:
        plan: what to run.
        checkpoint: file for `save`; where it exists, `make_private` resumes from it.
        key: 32 bytes for reproducible tests. In use, leave it out: the key then comes from the operating system, and
            a run whose key is known has no privacy.
    """

    def __init__(self, plan: Plan, *, checkpoint: str | Path | None = None, key: bytes | None = None) -> None:
        if not isinstance(plan, Plan):
            raise ArgumentError(f"plan must be an anyorder Plan (see anyorder.plan), got {type(plan).__name__}")
        self.plan = plan
        self.extra: dict[str, Any] = {}
        self._path = None if checkpoint is None else Path(checkpoint)
        self._key = NoiseSource.random().key if key is None else NoiseSource(key).key
        self._journal: Journal | None = None
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
    ) -> tuple[PrivateModule, torch.optim.Optimizer, PrivateLoader]:
        """Bind model, optimizer and loader to this engine, and resume if the checkpoint file exists.

        Args:
            model: any module that treats the examples of a batch separately; its first dimension is the batch.
            optimizer: any torch optimizer over parameters of `model`; the same object comes back.
            loader: a DataLoader. Its order must be one that the plan covers.
            unit: None for examples. For user-level privacy the key of each example's unit: a field name of dict
                batches, a position in tuple batches, or a function from the batch to a sequence of keys.
            loss_reduction: how the loss joins examples: "mean" or "sum".
            accumulate: batches (micro-batches) that make up one optimizer step.
            chunk_size: examples whose gradients are in memory at once; None chooses.
        Returns: the private model, the optimizer, and a loader that hands out the same batches.
        """
        if self._ready:
            raise TrainingError("make_private was already called: one engine runs one plan once")
        _check.choice("loss_reduction", loss_reduction, {"mean", "sum"})
        self._accumulate = _check.integer("accumulate", accumulate, low=1)
        check_model(model)
        self._model, self._optimizer, self._loss_reduction = model, optimizer, loss_reduction
        self._parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._check_optimizer()
        state = None if self._path is None or not self._path.exists() else self._load()
        key = self._key if state is None else state["key"]
        # A key is bound to its plan: under another plan the same 32 bytes give unrelated noise.
        source = NoiseSource(key).derive(self.plan.digest.encode())
        self.loader = self._private_loader(loader, unit, source)
        self.ledger = Ledger(self.plan.participation)
        size = sum(p.numel() for p in self._parameters.values())
        self._stream = NoiseStream(self.plan.strategy, source, self.plan.noise_std, size)
        self._clipping = FunctionalClipping(model, chunk_size)
        self._key, self._source = key, source
        self._batch: _Batch | None = None
        self._discard()
        if state is not None:
            self._restore(state)
        self._hook_optimizer()
        self._ready = True
        self.model = PrivateModule(model, self._forward, self._discard)
        return self.model, optimizer, self.loader

    def _private_loader(self, loader: Any, unit: Unit, source: NoiseSource) -> PrivateLoader:
        participation = self.plan.participation
        if isinstance(participation, PoissonSampling):
            if unit is not None or self._accumulate != 1:
                raise PlanError("Poisson sampling draws examples: it takes neither unit= nor accumulate=")
            loader = poisson_loader(loader, participation, source.derive(b"sampling"))
            self.order = "Poisson sampling by anyorder"
        else:
            self.order = self._check_order(loader) if unit is None else _BY_LEDGER
        return PrivateLoader(loader, unit=unit, on_batch=self._begin, seed=source.derive(b"order").key)

    def _check_order(self, loader: Any) -> str:
        """Refuse a loader whose order is known and not the plan's; what is unknown is left to the ledger."""
        try:
            found = find_participation(loader, 1)
        except LoaderError:
            return _BY_LEDGER
        steps = -(-found.steps_per_epoch // self._accumulate)
        actual = _over_epochs(find_participation(loader, -(-self.plan.n // steps)), steps)
        if not covers(self.plan.participation, actual):
            raise LoaderError(
                f"the plan is for {self.plan.participation.describe()}, but this loader gives {actual.describe()} "
                f"({found.order}); make the plan with ao.plan(loader=..., epochs=...) or change the loader"
            )
        if found.batch_size * self._accumulate != self.plan.batch_size:
            raise LoaderError(
                f"the plan divides by batch_size={self.plan.batch_size}, but the loader's batches of "
                f"{found.batch_size} times accumulate={self._accumulate} make {found.batch_size * self._accumulate}"
            )
        return found.order

    def _check_optimizer(self) -> None:
        known = {id(p) for p in self._parameters.values()}
        held = [p for group in self._optimizer.param_groups for p in group["params"]]
        strange = sum(id(p) not in known and p.requires_grad for p in held)
        if strange or not held:
            raise ArgumentError(
                f"optimizer must hold parameters of the model that require gradients, and no others; {strange} of its "
                f"{len(held)} parameters are not among the model's {len(known)} trainable ones"
            )

    def _hook_optimizer(self) -> None:
        self._optimizer.register_step_pre_hook(self._before_step)
        zero_grad = self._optimizer.zero_grad

        @functools.wraps(zero_grad)
        def discard_and_zero(set_to_none: bool = True) -> None:
            self._discard()
            zero_grad(set_to_none)

        self._optimizer.zero_grad = discard_and_zero  # type: ignore[method-assign]

    # -- one step ----------------------------------------------------------------------------------------------------

    def _begin(self, units: Units, position: int) -> None:
        del position
        self._batch = _Batch(units)

    def _discard(self) -> None:
        """Forget the clipped sums of a step that has not been taken: they were never released."""
        self._units: list[Any] = []
        self._sums: dict[str, Tensor] = {}
        self._batches = 0

    def _forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        batch = self._batch
        if batch is None:
            raise TrainingError(
                "the model was called in training mode before the private loader gave a batch; iterate over the loader "
                "that make_private returned, or use model.eval() or torch.no_grad() for other inputs"
            )
        if [p.requires_grad for p in self._parameters.values()].count(False):
            raise TrainingError("a parameter was frozen after make_private; freeze before it, so that noise fits")
        self._check_batch(batch)
        step = self.ledger.step
        self.ledger.check(step, [*self._units, *batch.units])
        _, groups = np.unique(np.asarray(batch.units), return_inverse=True)
        return self._clipping.forward(
            args,
            kwargs,
            groups=torch.from_numpy(groups.reshape(-1).astype(np.int64)),
            clip_norm=self.plan.clip_norm,
            scale=float(len(batch.units)) if self._loss_reduction == "mean" else 1.0,
            receive=functools.partial(self._receive, batch, step),
        )

    def _check_batch(self, batch: _Batch) -> None:
        if batch.used:
            raise TrainingError("this batch was already used by a backward pass: each unit is clipped once a step")
        if self._batches == self._accumulate:
            raise TrainingError(
                f"{self._batches} batch(es) wait for optimizer.step() already, and accumulate={self._accumulate}; call "
                "optimizer.step() or zero_grad(), or pass accumulate= to make_private"
            )
        again = set(self._units).intersection(batch.units)
        if again:
            raise TrainingError(
                f"{len(again)} unit(s) are in two micro-batches of one step, for example {next(iter(again))!r}: each "
                "would be clipped twice; put the examples of a unit into one micro-batch"
            )

    def _receive(self, batch: _Batch, step: int, sums: dict[str, Tensor]) -> None:
        if step != self.ledger.step:
            raise TrainingError(f"backward of a batch of step {step} after optimizer.step(): its step has passed")
        self._check_batch(batch)
        batch.used = True
        self.loader.mark_used()
        self._batches += 1
        self._units.extend(batch.units)
        for name, value in sums.items():
            self._sums[name] = self._sums[name] + value if name in self._sums else value

    def _before_step(self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Put the private gradients in place. Until the noise is drawn, nothing has changed."""
        if len(args) > 1 or kwargs.get("closure") is not None:
            raise TrainingError("optimizers that call a closure (LBFGS) take several gradients a step: not covered")
        if self._closed:
            raise TrainingError("this engine was closed: another process may have resumed its run")
        step = self.ledger.step
        if step >= self.plan.n:
            raise StepsExhaustedError(f"all {self.plan.n} planned steps are used; a longer run needs its own plan")
        if not self._batches:
            raise TrainingError(
                "optimizer.step() without a backward pass through the private model since the last step"
            )
        self._check_optimizer()
        self._check_gradients()
        self.ledger.check(step, self._units)
        flat = torch.cat([self._sums[name].reshape(-1) for name in self._parameters])
        if not torch.isfinite(flat).all():
            raise NonFiniteError("the clipped sum is not finite; nothing was released")
        if self._journal is not None:
            self._journal.commit(step, self._sum_digest(flat))
        noise = torch.from_numpy(self._stream.next()).to(flat.device)
        self.ledger.record(step, self._units)
        self._discard()
        private = (flat + noise) / self.plan.batch_size
        for p, part in zip(self._parameters.values(), _split(private, self._parameters), strict=True):
            p.grad = part.to(p.dtype)
            self._written[p] = (p.grad, p.grad._version)

    def _check_gradients(self) -> None:
        """Refuse gradients that did not come through the private model: they would be lost, or not be private."""
        for name, p in self._parameters.items():
            own, version = self._written.get(p, (None, 0))
            if p.grad is None or (p.grad is own and own._version == version) or not p.grad.any():
                continue
            raise TrainingError(
                f"parameter {name} has a gradient that did not come through the private model, from a penalty on "
                "weights or another loss perhaps; use the optimizer's weight_decay, and zero_grad() before each step"
            )

    def _sum_digest(self, flat: Tensor) -> bytes:
        """Tells two sums apart; keyed, so that it says nothing without the checkpoint."""
        return blake2b(flat.cpu().numpy().tobytes(), digest_size=16, key=self._key, person=b"anyorder sum").digest()

    # -- progress, checkpoints, certificate --------------------------------------------------------------------------

    @property
    def step(self) -> int:
        """Number of steps taken."""
        return self.ledger.step

    @property
    def epoch(self) -> int:
        """Number of epochs begun and finished; for `range(engine.epoch, epochs)` after a resume. 0 for a stream."""
        batches = self.loader.batches_per_epoch
        return 0 if batches is None else self.loader.position // batches

    def certificate(self) -> Certificate:
        """The claim and the record of this run, for `save` and `anyorder verify`."""
        return Certificate.of(self.plan, self.ledger, self._source.fingerprint())

    def save(self, extra: dict[str, Any] | None = None) -> None:
        """Write the checkpoint: one file, replaced atomically.

        The file holds the noise key: whoever has it can remove the noise. From the first save on, a journal beside
        the file records every step before its release, so that noise is never used on other data after a crash.

        Args:
            extra: tensors and plain values of the user's own, found in `engine.extra` after a resume.
        """
        if self._path is None:
            raise CheckpointError("this engine has no file: give checkpoint= to PrivacyEngine")
        if self._batches:
            raise CheckpointError("save between steps: a batch waits for optimizer.step()")
        if self._journal is None:
            self._journal = Journal.create(self._path.parent, self._source.fingerprint())
        save_atomic(self._path, {
            "plan": json.dumps(self.plan.to_dict()),
            "key": self._key,
            "model": self._model.state_dict(),
            "optimizer": self._optimizer.state_dict(),
            "stream": self._stream.state_dict(),
            "loader": self.loader.state_dict(),
            "ledger": self.ledger.to_bytes(),
            "random": random_state(),
            "extra": extra or {},
        })  # fmt: skip

    def close(self) -> None:
        """Let another process resume this run. The end of the process does the same."""
        self._closed = True
        if self._journal is not None:
            self._journal.close()

    def _load(self) -> dict[str, Any]:
        assert self._path is not None
        state = load(self._path)
        saved = Plan.from_dict(json.loads(state["plan"]))
        if saved.digest != self.plan.digest:
            changed = [k for k, v in self.plan.to_dict().items() if saved.to_dict()[k] != v]
            raise CheckpointError(
                f"{self._path} belongs to another plan (different: {', '.join(changed)}); resume with that plan, or "
                "choose another checkpoint file"
            )
        return state

    def _restore(self, state: dict[str, Any]) -> None:
        assert self._path is not None
        ledger = Ledger.from_bytes(self.plan.participation, state["ledger"])
        self._journal = Journal.open(self._path.parent, self._source.fingerprint())
        self._model.load_state_dict(state["model"])
        self._optimizer.load_state_dict(state["optimizer"])
        self._stream.load_state_dict({**state["stream"], "state": [t.numpy() for t in state["stream"]["state"]]})
        self.loader.load_state_dict(state["loader"])
        self.ledger = ledger
        self.extra = state["extra"]
        set_random_state(state["random"])


def _over_epochs(found: Found, steps: int) -> Participation:
    """The participation of a loader whose batches are joined so that an epoch has `steps` steps."""
    match found.participation:
        case EpochShuffle(k=k):
            return EpochShuffle(k, steps)
        case FixedOrder(k=k):
            return FixedOrder(k * steps, k, steps)
        case SingleEpoch():
            return SingleEpoch(steps)
        case other:
            return other


def _split(flat: Tensor, parameters: dict[str, nn.Parameter]) -> Iterator[Tensor]:
    start = 0
    for p in parameters.values():
        yield flat[start : start + p.numel()].view(p.shape)
        start += p.numel()
