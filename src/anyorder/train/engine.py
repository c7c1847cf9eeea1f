"""The engine: turns an ordinary training loop into one run of the planned mechanism."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from anyorder import checks
from anyorder.clipping.clip_rules import Rule
from anyorder.errors import ArgumentError, PlanError, TrainingError
from anyorder.ledger import Ledger
from anyorder.noise import NoiseSource
from anyorder.plan.certificate import Certificate, Evidence
from anyorder.plan.plan import Plan
from anyorder.release import Release
from anyorder.sampling import PrivateLoader, Unit
from anyorder.train.fitted import warn_of_unfitted
from anyorder.train.module import PrivateModule
from anyorder.train.training import Options, Training

__all__ = ["PrivacyEngine"]

Optimizer = TypeVar("Optimizer", bound=torch.optim.Optimizer)


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
        if plan.on_device:
            raise PlanError(
                f"the engine sees every example itself, and the plan trusts {' and '.join(plan.on_device)} to devices; "
                "plan without on_device=, or give what devices send to ao.Release or a server"
            )
        self.plan = plan
        self._path = None if checkpoint is None else Path(checkpoint)
        self._given_key = None if key is None else NoiseSource(key).key
        self._training: Training | None = None
        self._closed = False

    def make_private(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        loader: Any,
        *,
        unit: Unit = None,
        loss_reduction: str = "mean",
        accumulate: int = 1,
        micro_batch: int | None = None,
        chunk_size: int | None = None,
        rule: Rule | None = None,
        non_finite: str = "zero",
    ) -> tuple[PrivateModule, Optimizer, PrivateLoader]:
        """Bind model, optimizer and loader to this engine, and resume if the checkpoint file exists.

        Args:
            model: any module that treats the examples of a batch separately; its first dimension is the batch.
            optimizer: any torch optimizer over parameters of `model`; the same object comes back. Trainable parameters
                that it does not hold are left out of clipping, noise and size, and are frozen from here on.
            loader: a DataLoader. Its order must be one that the plan covers. With `unit`, any iterable of batches.
                Where the plan's order is drawn by secret coins, it names the examples, and the batches are drawn here.
            unit: None for examples: the plan's unit must be "example". For user-level privacy the key of each example's
                unit: a field name of dict batches, a position in tuple batches, or a function from the batch to a
                sequence of keys; the plan's unit says whom it names.
            loss_reduction: how the loss joins examples: "mean" or "sum".
            accumulate: batches (micro-batches) that make up one optimizer step. A step of a secret order is cut into as
                many, however many examples were drawn.
            micro_batch: of a secret order, the rows of each of them: where fewer were drawn, it is filled up by rows
                that count for nothing. Where more were than all micro-batches of a step hold, they are larger.
            chunk_size: examples whose gradients are in memory at once; None chooses.
            rule: how a unit's gradient is cut to the clip norm: `Flat()` if None, `PerGroup(..)`, `Automatic(..)`,
                `Adaptive(..)`.
            non_finite: "zero": a unit whose gradient is NaN or infinite adds exactly zero, and nothing tells of it.
                "refuse": backward raises NonFiniteError, which says how many there are. That is a release that no
                noise covers: for debugging on public data.
        Returns: the private model, the optimizer, and a loader that hands out the same batches.
        Warns: OptimizerWarning where the plan's noise is correlated and the optimizer is Adam, RMSprop, Adagrad or the
            like, or has another momentum than the plan: the guarantee is the same, and some of what correlation gains
            is lost.
        """
        if self._training is not None:
            raise TrainingError("make_private was already called: one engine runs one plan once")
        if self._closed:
            raise TrainingError("this engine was closed: make one of its own for a run")
        checks.choice("loss_reduction", loss_reduction, {"mean", "sum"})
        accumulate = checks.integer("accumulate", accumulate, low=1)
        if micro_batch is not None:
            micro_batch = checks.integer("micro_batch", micro_batch, low=1)
        options = Options(unit, loss_reduction, accumulate, chunk_size, rule, non_finite, micro_batch)
        warn_of_unfitted(self.plan, optimizer, stacklevel=2)  # as it is given: a checkpoint may be of another stage
        self._training = Training(self.plan, self._path, self._given_key, model, optimizer, loader, options)
        return self._training.model, optimizer, self._training.loader

    @property
    def is_keyed(self) -> bool:
        """Whether the noise key was given, as in tests: then the run is private only from those who do not know it."""
        return self._given_key is not None

    @property
    def is_private(self) -> bool:
        """Whether `make_private` was called."""
        return self._training is not None

    @property
    def training(self) -> Training:
        """What `make_private` bound."""
        if self._training is None:
            raise TrainingError("this engine is bound to no model yet: call make_private first")
        return self._training

    @property
    def release(self) -> Release:
        """What carries the plan out; it keeps ledger, noise and files."""
        return self.training.release

    @property
    def model(self) -> PrivateModule:
        """The private model."""
        return self.training.model

    @property
    def loader(self) -> PrivateLoader:
        """The private loader."""
        return self.training.loader

    @property
    def order(self) -> str:
        """The loader's order, in words."""
        return self.training.order

    @property
    def ledger(self) -> Ledger:
        """Who took part in which step: as secret as the data."""
        return self.release.ledger

    @property
    def extra(self) -> dict[str, Any]:
        """What `save(extra=..)` was given, after a resume; else empty."""
        return self.release.extra if self.is_private else {}

    def on_release(self, callback: Callable[[int, Any], object]) -> Callable[[], None]:
        """Call `callback(step, private)` after every step, with all private gradients one behind the other.

        See `Release.on_release`. The gradients are in place when it is called; the optimizer has not moved yet.
        """
        return self.release.on_release(callback)

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
        self.training.skip()

    def flush(self) -> None:
        """Bring every row of the tables up to date, so that the model may be evaluated, shown or saved.

        Without a selection of rows, a table (`nn.Embedding(sparse=True)`) is given its noise row by row, when a row is
        next read. Until then rows are stale, and which ones are tells which rows were touched: so `weight` is empty,
        and `model.eval()` and `state_dict()` are refused, until this is called. It does not end the training: the next
        step goes on from here. Where there is no such table, it does nothing.

        Privacy: when it is called must not depend on the data. It is a part of the run, and written to the journal.
        Cost: the noise of a jump for every row, as much as a step of the dense run or somewhat more.
        Raises: TrainingError where a batch waits for `optimizer.step()`.
        """
        self.training.flush()

    @property
    def step(self) -> int:
        """Number of steps taken."""
        return self.release.steps_taken

    @property
    def clip_norm(self) -> float:
        """The norm at which units are cut now. With `Adaptive` it moves, by what was released: it is public."""
        return self.release.clip_norm if self.is_private else self.plan.clip_norm

    @property
    def epoch(self) -> int:
        """Number of epochs begun and finished; for `range(engine.epoch, epochs)` after a resume. 0 for a stream."""
        return self.training.epoch

    def certificate(self) -> Certificate:
        """The claim of this run, for everybody: `save` it, and check it with `anyorder verify`. It names nobody."""
        return self.release.certificate()

    def evidence(self) -> Evidence:
        """Who took part in which step: what backs the certificate. As secret as the data."""
        return self.release.evidence()

    def save(self, extra: dict[str, Any] | None = None) -> None:
        """Write the checkpoint: one file, replaced atomically. All ranks call it, and the first one writes.

        The file holds the noise key: whoever has it can remove the noise. Steps after the last save are repeated when
        the run is resumed, and must come out bit for bit as they were: save often.

        Args:
            extra: tensors and plain values of the user's own, found in `engine.extra` after a resume.
        """
        self.training.save(extra)

    def close(self) -> None:
        """Let another process resume this run. The end of the process does the same."""
        self._closed = True
        if self._training is not None:
            self.release.close()
