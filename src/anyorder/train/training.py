"""A training loop bound to a release: model, optimizer and loader, and what waits for a step."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from anyorder.clipping import make_clipping
from anyorder.clipping.clip_rules import Cut, Rule
from anyorder.clipping.coupling import LossWatch
from anyorder.clipping.norms import accumulator_dtype
from anyorder.clipping.per_example import Receive
from anyorder.clipping.validate import refuse_unfit
from anyorder.errors import ArgumentError, CheckpointError, PlanError, TrainingError
from anyorder.ledger import Units, numbered
from anyorder.participation import PoissonSampling
from anyorder.plan.plan import Plan
from anyorder.release import Release
from anyorder.sampling import PrivateLoader, Unit
from anyorder.sampling.handed import HandedBatch
from anyorder.sampling.secret import secret_loader
from anyorder.train.distributed import Group, distinct_units, forward_together
from anyorder.train.filled import without_padding
from anyorder.train.fsdp import WholeModel, check_sharding, load_whole, local, whole
from anyorder.train.generators import random_state, set_random_state
from anyorder.train.held import Held
from anyorder.train.module import PrivateModule
from anyorder.train.order import BY_LEDGER, check_absence, check_order, check_unit, warn_of_scattered_units
from anyorder.train.scaler import ask_for_scale, refuse_scale
from anyorder.train.shards import Shards
from anyorder.train.tables import Tables

__all__ = ["Options", "Training"]

T = TypeVar("T")


@dataclass(frozen=True)
class Options:
    """What `PrivacyEngine.make_private` takes besides model, optimizer and loader, where its meaning stands."""

    unit: Unit
    loss_reduction: str
    accumulate: int
    chunk_size: int | None
    rule: Rule | None
    non_finite: str
    micro_batch: int | None = None


@dataclass(frozen=True)
class _Waiting:
    """What waits for optimizer.step(): never released, and replaced as a whole, so that an interrupt leaves no half."""

    units: Units | list[Any]
    sums: dict[str, Tensor]
    batches: int = 0

    def with_units(self, units: Units | list[Any]) -> Units | list[Any]:
        """These units and further ones."""
        return [*self.units, *units] if len(self.units) else units


class Training:
    """Model, optimizer and loader of a run, with everything set, and the release that they are bound to.

    Args: as of `PrivacyEngine` and its `make_private`.

    Attributes:
        release: carries the plan out.
        model, loader: what the training loop gets.
        order: the loader's, in words.
    """

    def __init__(
        self,
        plan: Plan,
        checkpoint: Path | None,
        key: bytes | None,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        loader: Any,
        options: Options,
    ) -> None:
        self.plan, self._options = plan, options
        self._model, self._optimizer = model, optimizer
        self._group = Group()
        cut = self._on_each(lambda: self._check(options))
        self._held = self._on_each(lambda: Held(model, optimizer))
        try:
            self._on_each(self._check_model)
            self._tables = self._on_each(lambda: Tables(model, self._held, optimizer, plan, self._group))
            self._check_ranks()
            # Stands for the schedule's coordinate among the parameters; it is never trained.
            self._count = nn.Parameter(torch.zeros((), dtype=torch.float64), requires_grad=False)
            self._counts = dict.fromkeys(cut.counted, self._count)
            self._dense = {**self._tables.dense(self._held.named), **self._counts}
            self._shards = Shards(self._dense, self._group)
            self.release = Release.of_ranks(
                plan, self._shards, cut.schedule, key=key, checkpoint=checkpoint, place="make_private"
            )
            given = {p: p.data for p in self._tables.named.values()}
            try:
                self._tables.attach(self.release)
                self._on_each(lambda: self._set_up(loader))
                self._group.copy_from_first(t for t in (*model.parameters(), *model.buffers()) if local(t) is t)
                self._restore()
            except BaseException:
                self.release.close()
                for p, data in given.items():
                    p.data = data  # a resume has put stand-ins there
                raise
        except BaseException:
            self._held.thaw()
            raise
        self._hook_optimizer()
        self.model = PrivateModule(model, self._forward, self._discard, self._whole, self._tables.check_shown)

    def _on_each(self, make: Callable[[], T]) -> T:
        """What is made on this rank; where it fails on one, it fails on all."""
        made: list[T] = []
        self._group.together("make_private", lambda: made.append(make()))
        return made[0]

    def _check(self, options: Options) -> Cut:
        check_unit(self.plan, options.unit)
        if options.micro_batch is not None and not self.plan.participation.secret:
            raise ArgumentError(
                "micro_batch is of orders that are drawn by secret coins, whose steps differ in size; here the loader "
                "has batches of its own, and accumulate= says how many make a step"
            )
        return Cut.of(options.rule)

    def _check_model(self) -> None:
        refuse_unfit(self._model)
        check_sharding(self._model, self._group)

    def _check_ranks(self) -> None:
        shapes = [(name, tuple(p.shape)) for name, p in self._held.named.items()]
        claims = self._group.together("make_private", lambda: f"{self.plan.digest} {self._options.rule} {shapes}")
        if claims.count(claims[0]) < len(claims):
            raise PlanError("the ranks were given different plans or models; all must run one program")

    def _set_up(self, loader: Any) -> None:
        options = self._options
        self.loader = self._private_loader(loader, options.unit)
        self._whole = WholeModel(self._model)
        self._clipping = make_clipping(
            self._whole.module, options.chunk_size, self.plan.grid, options.rule, options.non_finite,
            tables=self._tables.readers, count_norm=self._tables.count_norm,
        )  # fmt: skip
        self._watch = LossWatch()
        self._next_coins = 0
        self._discard()

    def _private_loader(self, loader: Any, unit: Unit) -> PrivateLoader:
        participation = self.plan.participation
        if participation.secret:
            loader = secret_loader(
                loader, participation, self.release.coins(), unit=unit, accumulate=self._options.accumulate,
                micro_batch=self._options.micro_batch, rank=self._group.rank, ranks=self._group.size,
            )  # fmt: skip
            is_poisson = type(participation) is PoissonSampling
            self.order = f"{'Poisson sampling' if is_poisson else participation.describe()} by anyorder"
        else:
            check_absence(self.plan, loader)
            self.order = BY_LEDGER if unit is not None else check_order(self.plan, loader, self._options.accumulate)
            if unit is not None:
                warn_of_scattered_units(self.plan, loader)
        return PrivateLoader(loader, unit=unit, seed=self.release.derived(b"order").key)

    def _hook_optimizer(self) -> None:
        self._held.bind()
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
        step = self.release.ledger.step
        tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        found: list[HandedBatch] = []
        told = self._group.together(f"the forward pass of step {step}", lambda: self._find_batch(tensors, found))
        batch, units = found[0], distinct_units(told)
        allowed = self.release.ledger.check(step, self._waiting.with_units(units))
        if not self._waiting.batches:
            units = allowed  # which the ledger knows again when the step is made
        groups = np.append(numbered(batch.units), len(batch.units) + np.arange(batch.padding))
        self._whole.gather()

        def forward(receive: Receive) -> Any:
            return self._clipping.forward(
                args,
                kwargs,
                groups=torch.from_numpy(groups),
                clip_norm=self.release.clip_norm,
                scale=float(batch.rows) if self._options.loss_reduction == "mean" else 1.0,
                receive=receive,
            )

        receive = functools.partial(self._receive, batch, step, units)
        outputs = without_padding(
            forward_together(self._group, step, forward, receive), len(batch.units), batch.padding
        )
        return self._watch.outputs(outputs)

    def _find_batch(self, tensors: list[Tensor], found: list[HandedBatch]) -> Units:
        """Add the batch that the model is called on to `found`; its units."""
        self._held.check()
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
        if self.plan.participation.secret:
            self._check_coins(batch)
        if waiting.batches == self._options.accumulate:
            raise TrainingError(
                f"{waiting.batches} batch(es) wait for optimizer.step() already, and "
                f"accumulate={self._options.accumulate}; call optimizer.step() or zero_grad(), or pass accumulate= to "
                "make_private"
            )
        if waiting.batches and set(waiting.units).intersection(batch.units):
            raise TrainingError(
                "a unit is in two micro-batches of one step, and would be clipped twice; put the examples of a unit "
                "into one micro-batch"
            )

    def _check_coins(self, batch: HandedBatch) -> None:
        """The batches of a secret order serve its steps one by one, though those of balls in bins come again."""
        if batch.position < self._next_coins:
            raise TrainingError(
                "a batch of these coins, or of later ones, was used already: the claim is for the batches that secret "
                "coins gave to each step. Use the batches in their order, each once, and do not move the loader back"
            )
        accumulate, step = self._options.accumulate, self.release.ledger.step
        is_free = type(self.plan.participation) is PoissonSampling and accumulate == 1  # the coins of any later step
        if not is_free and batch.position // accumulate != step:
            raise TrainingError(
                f"batch {batch.position} of the loader was drawn for step {batch.position // accumulate}, and this is "
                f"step {step}: the claim is for the batches that secret coins gave to each step. Take a step with "
                f"optimizer.step() after each {accumulate} batch(es); to leave one out, call engine.skip(); after "
                "steps without batches, loader.seek(..)"
            )

    def _receive(self, batch: HandedBatch, step: int, units: Units | list[Any], sums: dict[str, Tensor]) -> None:
        if step != self.release.ledger.step:
            raise TrainingError(f"backward of a batch of step {step} after optimizer.step(): its step has passed")
        self._check_batch(batch)
        self._watch.came_back()
        before = self._waiting
        joined = {name: before.sums[name] + value if name in before.sums else value for name, value in sums.items()}
        self._mark_used(batch)
        self._waiting = _Waiting(before.with_units(units), joined, before.batches + 1)

    def skip(self) -> None:
        """Leave out the batch that was handed out last; see `PrivacyEngine.skip`."""
        self._group.together(f"engine.skip() at step {self.release.ledger.step}", self._skip)

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
        dtypes = {accumulator_dtype(p) for p in self._held.named.values()}
        floating = torch.float64 if torch.float64 in dtypes else torch.float32
        dtype = floating if self.plan.grid is None else torch.int64
        dense = {name: torch.zeros(p.shape, dtype=dtype, device=local(p).device) for name, p in self._dense.items()}
        return {**dense, **self._tables.nothing()}

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
        step = self.release.ledger.step
        place = f"optimizer.step() of step {step}"
        self._group.together(place, self._check_step)
        own = self._shards.sum_of_own(self._waiting.sums)
        parts = self._tables.parts(self._waiting.sums)
        private = self.release.take(self._waiting.units, own, place, tables=parts)
        self._discard()
        self._whole.drop()
        for p, gradient in self._shards.gradients(private):
            if p is self._count:
                self.release.clip.record(step, float(gradient), self._group)
            else:
                self._held.write(p, gradient)
        self._tables.write(self.release.of_tables)
        self.release.tell(step, lambda: torch.cat([p.reshape(-1) for p in private]) if private else torch.zeros(0))

    def _check_step(self) -> None:
        self.release.check(self._waiting.units if self._waiting.batches else None)
        if not self._waiting.batches:
            raise TrainingError(
                "optimizer.step() without a backward pass through the private model since the last step; to leave a "
                "batch out, call engine.skip() first"
            )
        self._held.check_step()
        self._tables.check_step()

    # -- checkpoints -------------------------------------------------------------------------------------------------

    @property
    def epoch(self) -> int:
        """Number of epochs begun and finished; for `range(engine.epoch, epochs)` after a resume. 0 for a stream."""
        batches = self.loader.batches_per_epoch
        return 0 if batches is None else self.loader.position // batches

    def flush(self) -> None:
        """Bring all rows of the tables up to date; see `PrivacyEngine.flush`."""
        if self._waiting.batches:
            raise TrainingError("flush between steps: a batch waits for optimizer.step()")
        if self._tables.are_lazy:
            self._tables.check_step()
            self.release.flush()

    def save(self, extra: dict[str, Any] | None) -> None:
        """Write the checkpoint; see `PrivacyEngine.save`."""
        place = "engine.save()"
        self._group.together(place, self._check_save)
        front_end = {
            "model": whole(self._tables.model_state()),
            "optimizer": whole(self._optimizer.state_dict()),
            "clipping": self._group.to_first(self._clipping.state_dict()),
            "loader": self.loader.state_dict(),
            "random": self._group.to_first(random_state()),
        }
        self.release.save_all(place, front_end, extra)

    def _check_save(self) -> None:
        self.release.check_save()
        if self._waiting.batches:
            raise CheckpointError("save between steps: a batch waits for optimizer.step()")

    def _restore(self) -> None:
        state, self.release.resumed = self.release.resumed, None
        if state is None:
            if self.release.needs_save:
                self.save(None)  # before any noise is used: a restart finds the key
            return
        if "model" not in state:
            raise CheckpointError("the checkpoint is of another front end, and no model is in it; choose another file")
        self._tables.load(
            state["model"], lambda of_model: load_whole(self._model, self._optimizer, of_model, state["optimizer"])
        )
        self._clipping.load_state_dict(state["clipping"][self._group.rank % len(state["clipping"])])
        self.loader.load_state_dict(state["loader"])
        self._next_coins = self.loader.position
        set_random_state(state["random"][self._group.rank % len(state["random"])])
