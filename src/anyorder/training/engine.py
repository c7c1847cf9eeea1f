"""The engine: turns an ordinary training loop into one run of the planned mechanism.

A step is a chain of stages, in three methods of `Training` (`_forward`, `_receive`, `_make_gradients`):

    units        the batch that the model is called on, and whose rows it has: the ledger lets them in, or nothing runs
    bound        the forward pass clips: backward gives the sum over units of gradients of norm at most `clip_norm`
    join         micro-batches of a step are added up; all ranks' sums; the parts of tables beside the dense one
    record       with a checkpoint, the journal has a digest of units and sums, before anything noised exists
    noise        the release adds it, and divides by the plan's batch size
    hand back    the private gradients are in `.grad`, and the optimizer takes its step

Record and noise are those of `ao.Release.take`. What a run does not use is None here, and not entered: a
group of ranks, shards, a sharded model, tables, the count of a clip norm that moves, released metrics.
"""

import functools
import itertools
import random
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from operator import attrgetter, is_, itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, assert_never, cast
from weakref import WeakSet, ref

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.data import DistributedSampler, IterableDataset

from anyorder import checks
from anyorder.clipping.coupling import ASKED, LossWatch, flat, own_memory, released, unwatched
from anyorder.clipping.kept_tensors import check_nothing_of_loop, is_of_loop
from anyorder.clipping.mapping import reparametrized
from anyorder.clipping.norms import Cut, Rule, UnitMap, accumulator_dtype
from anyorder.clipping.per_example import MayDraw, Passes, make_clipping
from anyorder.clipping.torch_private import OF_A_BATCH_KINDS, aside, is_marked, never_compiled, place_below
from anyorder.clipping.validate import iterate_before_passes, refuse_unfit
from anyorder.errors import (
    AnyorderError,
    ArgumentError,
    CheckpointError,
    CheckpointWarning,
    LoaderError,
    ModelError,
    PlanError,
    TrainingError,
)
from anyorder.formats import html_table
from anyorder.formatting import rounded_up
from anyorder.ledger import Ledger, Units, numbered
from anyorder.noise import NoiseSource
from anyorder.participation import KnownOrder, covers
from anyorder.patterns import Listed, PerEpoch, Separated
from anyorder.plan.certificate import (
    CONSTRUCTED,
    EITHER,
    MAPPED,
    PROMISED,
    PROVED,
    UNKNOWN,
    Certificate,
    Evidence,
    Isolation,
    sizes_are_public,
)
from anyorder.plan.plan import Plan
from anyorder.release.ranks import OneProcess
from anyorder.release.release import Release
from anyorder.release.schedules import Adaptive
from anyorder.release.weights import digests
from anyorder.sampling.draws import ModelDraws, Seeds
from anyorder.sampling.loader import Batch, PrivateLoader
from anyorder.sampling.read_loader import Unit, check_loader, find_participation, is_plain, planned_order, read_order
from anyorder.sampling.row_digests import check_same_rows
from anyorder.sampling.secret import secret_loader
from anyorder.sampling.shapes import ByShape, PadTo, PublicShapes
from anyorder.training.distributed import (
    Group,
    Shards,
    WholeModel,
    check_sharding,
    distinct_units,
    forward_together,
    is_sharded,
    load_whole,
    local,
    whole,
)
from anyorder.training.dry_run import try_model
from anyorder.training.metrics import Measuring, Metrics, ReleasedMetrics, check_metrics
from anyorder.training.module_state import state_of
from anyorder.training.optimizers import (
    StepSettings,
    check_arguments,
    guard_schedulers,
    returns_nothing,
    steps_already,
    warn_of_frozen,
    warn_of_unfitted,
)
from anyorder.training.trained_tables import TrainedTables, tables_in

P = ParamSpec("P")
T = TypeVar("T")
Model = TypeVar("Model", bound=nn.Module | Sequence[nn.Module])
Optimizer = TypeVar("Optimizer", bound=torch.optim.Optimizer | Sequence[torch.optim.Optimizer])
Loader = TypeVar("Loader")


# ----------------------------------------------------------------------------------------------------
# A step.


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
    shapes: PublicShapes | None = None
    released: Metrics | None = None
    like: Any = None


@dataclass(frozen=True)
class _Waiting:
    """What waits for optimizer.step(), which adds noise in its place. Replaced as a whole: no interrupt leaves half."""

    units: Units | list[Any]
    sums: dict[str, Tensor]
    batches: int = 0
    iteration: int = 0  # of the loader, of the first of them


_NOTHING = _Waiting([], {})

_PERHAPS_A_GENERATOR = (
    "If this network is a generator, which makes rows of random numbers and sees no data, it stays outside: give "
    "make_private the discriminator alone, and train the generator with an optimizer of its own"
)


class Training:
    """Model, optimizer and loader of a run, with everything set, and the release that they are bound to.

    Args: as of `PrivacyEngine` and its `make_private`.

    Attributes:
        release: carries the plan out.
        model, loader: what the training loop gets.
        order: the loader's, in words.
        left_out: names of parameters that are frozen because the optimizer does not hold them.
        released: the metrics that are released with each gradient, or None.
    """

    def __init__(
        self,
        plan: Plan,
        files: dict[str, Any],
        given: nn.Module | Sequence[nn.Module],
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        loader: Any,
        options: Options,
    ) -> None:
        self.plan, self._options = plan, options
        self._stateless = True
        self._secret = plan.participation.secret
        self._networks = networks_of(given)
        model: nn.Module = given if isinstance(given, nn.Module) and self._networks is None else Networks(given)
        self._model, self._optimizers = model, optimizers_of(optimizer)
        self._owed: set[torch.optim.Optimizer] = set()  # the gradients of the last release, and have not stepped
        self._waiting = _NOTHING
        self._group = Group() if dist.is_available() and dist.is_initialized() else None
        cut = self._on_each(lambda: self._check(options))
        self._bound = self._on_each(lambda: BoundParameters(model, *self._optimizers))
        self._settings = [own for own in (StepSettings.of(plan, one) for one in self._optimizers) if own is not None]
        self.left_out = self._bound.left_out.keys()
        self.released = options.released
        try:
            self._on_each(self._check_model)
            self._tables = self._on_each(self._find_tables)
            if self._group is not None:
                self._check_ranks(self._group, files["checkpoint"])
            tables = {} if self._tables is None else self._tables.named
            self._dense = {name: p for name, p in self._bound.named.items() if name not in tables}
            self._measuring: Measuring | None = None
            # Stands for their coordinates. Before the count: they are read at the norm that this moves.
            self._metrics: nn.Parameter | None = None
            self._gradient_share = 1.0  # part of the norm in force that gradients have
            if options.released is not None:
                self._gradient_share = options.released.gradient_share
                self._measuring = Measuring(options.released, plan, norm_moves=type(cut.schedule) is Adaptive)
                self._metrics = self._dense[Metrics.SUMS] = self._measuring.parameter
            # Stands for the schedule's coordinate among the parameters; it is never trained.
            self._count: nn.Parameter | None = None
            if cut.counted:
                self._count = nn.Parameter(torch.zeros((), dtype=torch.float64), requires_grad=False)
                self._dense |= dict.fromkeys(cut.counted, self._count)
            self._whole: WholeModel | None = None
            self._shards: Shards | None = None
            if self._group is not None:
                sharded = any(is_sharded(p) for p in model.parameters())
                self._whole = WholeModel(model) if sharded else None
                self._shards = Shards(self._dense, self._group) if sharded or self._group.size > 1 else None
            coordinates = self._shards or OneProcess(sum(p.numel() for p in self._dense.values()))
            self.release = Release.of_ranks(plan, coordinates, cut.schedule, place="make_private", **files)
            data_before = {p: p.data for p in tables.values()}
            try:
                if self._tables is not None:
                    self._tables.attach(self.release)
                self._on_each(lambda: self._set_up(loader))
                if self._group is not None:
                    self._group.copy_from_first(t for t in (*model.parameters(), *model.buffers()) if not is_sharded(t))
                    self._check_rows(self._group)
                self._restore()
            except BaseException:
                self.release.close()
                for p, data in data_before.items():
                    p.data = data  # a resume has put stand-ins there
                raise
        except BaseException:
            self._bound.thaw()
            raise
        self._bound.bind()
        for one in self._optimizers:
            self._hook_optimizer(one)
        self.model: Any = like_networks(given, self._networks, self._private)

    def _private(self, network: nn.Module, name: str | None) -> "PrivateModule":
        """What the training loop gets in the place of a network: of the model, or of one among several."""
        check_shown = self._tables.check_shown if self._tables is not None and self._tables.are_lazy else None
        forward = self._forward if name is None else functools.partial(self._forward, name=name)
        made = PrivateModule(network, forward, self._discard, self._whole, check_shown, self._watch)
        iterate_before_passes(made, network)
        return made

    # -- one step: units, bound --------------------------------------------------------------------------------------

    def _forward(self, args: tuple[Any, ...], kwargs: dict[str, Any], name: str | None = None) -> Any:
        """The outputs of the model, or of one of several networks; their backward pass gives the sum of the units'
        clipped gradients to `_receive`.
        """
        if self._untried and name in self._untried:
            tried = self._model if self._networks is None else self._networks[str(name)]
            self._stateless = try_model(tried, args, kwargs) and self._stateless
            self._untried.discard(name)
        ledger, waiting = self.release.ledger, self._waiting
        step = ledger.step
        # units: whose rows the model is called on
        given = flat((args, kwargs))
        try:
            args, kwargs = self._watch.by_row(args, kwargs)
        except NotImplementedError as problem:  # of torch: a sparse tensor has no memory of its own
            raise ModelError(
                "the model was given a sparse tensor that the training loop made: its rows cannot be followed. Let "
                "collate_fn give it, x.to_sparse(), or give the model the dense one"
            ) from problem
        args = args if name is None else (name, *args)
        tensors: Sequence[Tensor] = args
        if kwargs or set(map(type, args)) != {Tensor}:  # else as most models are called
            tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        chained = any(map(_IS_TRAINED, tensors))
        if chained:
            self._watch.check_chain(given)
        batch, units = (
            self._batch_of(tensors, given) if self._group is None else self._batch_of_ranks(tensors, given, step)
        )
        if waiting.batches:
            ledger.check(step, [*waiting.units, *units] if len(waiting.units) else units)
        else:
            units = ledger.check(step, units)  # which the ledger knows again when the step is made
        if chained and batch.shapes is not None:
            raise TrainingError(
                "with pad_to=, rows of one length are run together, and a network cannot be given what another made of "
                "all: give make_private one module whose forward calls both"
            )
        try:
            outputs = self._clipped(batch, units, args, kwargs, chained)
        except Exception as problem:
            if batch.shapes is not None:  # what torch says of a place behind the longest length names a text's own
                batch.shapes.check_numbers(tensors, problem)
            raise
        if batch.padding:
            outputs = without_rows(outputs, slice(len(batch.units), None))
        if batch.empty is not None:
            outputs = without_rows(outputs, torch.from_numpy(batch.empty))
        outputs = self._watch.outputs(outputs, given)
        if self._measuring is not None:
            self._measuring.begin(batch, outputs, given)
        return outputs

    def _clipped(self, batch: Batch, units: Any, args: Any, kwargs: Any, chained: bool) -> Any:
        """Outputs of all rows, by which a sum of vectors of norm at most clip_norm comes back, one for each unit."""
        step, micro = self.release.ledger.step, self._waiting.batches
        # As most batches come, every row is a unit: the ledger gives each id once, and they are as many as the rows.
        alone = self._group is None and not micro and len(units) == len(batch.units)
        groups = UnitMap.alone(batch.rows) if alone else torch.from_numpy(_with_padding(batch))
        if self._whole is not None:
            self._whole.gather()
        clip: Callable[..., Any] = self._clipping.forward
        if batch.shapes is not None and self._by_shape is not None:
            clip = functools.partial(self._by_shape, shapes=batch.shapes)
        passes = self._passes_of(batch, step)
        passes.chained = chained
        norm = self.release.clip_norm * self._gradient_share
        # The loss's own divisor is undone, in which rows that fill the batch up count.
        scale = float(batch.rows) if self._options.loss_reduction == "mean" else 1.0
        forward = functools.partial(clip, args, kwargs, passes=passes, groups=groups, clip_norm=norm, scale=scale)
        receive = functools.partial(self._receive, batch, step, units)
        draws = self._draws
        if draws is not None and self._group is None and batch.shapes is None and not chained:
            draws.end()
            draws = None if self._clipping.draws_nothing(args, kwargs) else draws
        try:
            still = draws is None and self._group is None
            outputs = forward(receive=receive) if still else self._run(forward, receive, draws, step, passes.count)
        except MayDraw:  # what its first batches did not
            draws = self._draws
            outputs = self._run(forward, receive, draws, step, passes.count)
        if draws is not None:
            draws.follow(outputs, step, micro)
        return outputs

    def _passes_of(self, batch: Batch, step: int) -> Passes:
        """The passes over this batch in this step, which are clipped together."""
        begun = batch.passes
        passes = Passes() if begun is None or begun[0] != step else begun[1]
        batch.passes = step, passes
        if passes.count and self._group is not None and self._group.size > 1:
            raise TrainingError(
                "the model was called a second time on a batch, and several processes train it: several passes of a "
                "step are for one process, so far. Give make_private one module whose forward makes all passes"
            )
        return passes

    def _run(self, forward: Callable[..., Any], receive: Any, draws: ModelDraws | None, step: int, number: int) -> Any:
        """The forward pass, of all ranks together, under generators of its own if it may draw."""
        with nullcontext() if draws is None else draws.forward(step, self._waiting.batches, number):
            if self._group is None:
                return forward(receive=receive)
            return forward_together(self._group, step, lambda receive: forward(receive=receive), receive)

    def _batch_of(self, tensors: Sequence[Tensor], given: Any) -> tuple[Batch, Units | list[Any]]:
        """The batch that the model is called on, and its units."""
        self._bound.check()
        known, straight = self._watch.batch_of(given)
        if not straight and known is not None and numbered(known.units).max() + 1 < len(known.units):
            raise TrainingError(
                "the model was given the batch's rows in another order than the loader's, or in one that is not known, "
                "and some units have several rows: rows are matched to units by their place. Give the model the rows "
                "as the loader gave them, and change their order in the data set"
            )
        try:
            batch = self.loader.identity.find(tensors, known)
        except AnyorderError as error:
            if self._networks is None or known is not None:
                raise
            raise type(error)(f"{error}. {_PERHAPS_A_GENERATOR}") from None
        self._check_batch(batch)
        return batch, batch.units

    def _batch_of_ranks(self, tensors: Sequence[Tensor], given: Any, step: int) -> tuple[Batch, Units | list[Any]]:
        """This rank's batch, and the units of all."""
        assert self._group is not None
        found: list[Batch] = []

        def find() -> Units | list[Any]:
            batch, units = self._batch_of(tensors, given)
            found.append(batch)
            return units

        told = self._group.together(f"the forward pass of step {step}", find)
        return found[0], distinct_units(told)

    def _check_batch(self, batch: Batch) -> None:
        waiting, late = self._waiting, ""
        if waiting.batches and waiting.iteration != batch.iteration:
            late = (
                ". Batches of the last epoch still wait for a step: its last group, if shorter, needs one as well, "
                f"if (i + 1) % {self._options.accumulate} == 0 or i + 1 == len(loader): optimizer.step()"
            )
        if batch.used:
            raise TrainingError(
                "this batch was already used by a backward pass: each unit is clipped once a step, over all passes "
                "together. For a loss of several passes over a batch, add their losses and call backward once"
            )
        if self._secret:
            self._check_draws(batch)
        if waiting.batches == self._options.accumulate:
            raise TrainingError(
                f"{waiting.batches} batch(es) wait for optimizer.step() already, and "
                f"accumulate={self._options.accumulate}; call optimizer.step() or zero_grad(), or pass accumulate= to "
                f"make_private{late}"
            )
        if waiting.batches and set(waiting.units).intersection(batch.units):
            raise TrainingError(
                "a unit is in two micro-batches of one step, and would be clipped twice"
                + (late or "; put the examples of a unit into one micro-batch")
            )

    # -- one step: join ----------------------------------------------------------------------------------------------

    def _receive(self, batch: Batch, step: int, units: Units | list[Any], sums: dict[str, Tensor]) -> None:
        """Take the clipped sum of a batch, at the end of its backward pass."""
        if self._draws is not None:
            self._draws.end()
        if step != self.release.ledger.step:
            raise TrainingError(f"backward of a batch of step {step} after optimizer.step(): its step has passed")
        self._check_batch(batch)
        before = self._waiting
        if self._measuring is not None:
            sums = self._measuring.joined(batch, sums, self.release.clip_norm / self.plan.clip_norm)
        if before.sums:
            sums = {name: before.sums[name] + value if name in before.sums else value for name, value in sums.items()}
            units = [*before.units, *units] if len(before.units) else units
        self.loader.mark_used(batch)  # before it waits: an interrupt between loses the sum, and no sum comes twice
        batch.passes = None
        self._next_draws = batch.position + 1
        self._waiting = _Waiting(units, sums, before.batches + 1, before.iteration or batch.iteration)

    def _discard(self) -> None:
        """Forget the clipped sums of a step that has not been taken: they were never released."""
        self._waiting = _NOTHING
        if self._draws is not None:
            self._draws.end()  # of a backward pass that failed

    # -- one step: record, noise, hand back --------------------------------------------------------------------------

    def _before_step(
        self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Run the closure if there is one, and put the private gradients in place."""
        if not self._waiting.batches and steps_already(optimizer, sys._getframe(1)):
            return args, kwargs  # the gradients are those of the step that this one is a part of
        refuse_scale(optimizer, kwargs)
        closure = kwargs.get("closure") or (args[1] if len(args) > 1 else None)
        if len(args) > 1 or kwargs:
            check_arguments(optimizer, args[1:], kwargs, closure)
        if optimizer in self._owed and not self._waiting.batches and closure is None:
            self._bound.check_step()  # the gradients are of the release that another optimizer's step made
            self._owed.discard(optimizer)
            return args, kwargs
        if closure is not None:
            with torch.enable_grad():
                closure()  # once; the optimizer never gets the loss
        with aside(ASKED):
            self._make_gradients()
        if len(self._optimizers) > 1:
            self._owed = {one for one in self._optimizers if one is not optimizer}
        return args[:1], {**kwargs, "closure": None if closure is None else returns_nothing}

    def _make_gradients(self) -> None:
        """Put the private gradients in place. Up to the journal's entry, all can be done again with other sums; from
        there on only these sums may take this noise.
        """
        release, waiting = self.release, self._waiting
        step = release.ledger.step
        place = f"optimizer.step() of step {step}"
        if self._group is None:
            self._check_step()
        else:
            self._group.together(place, self._check_step)
        # join: the pieces of the dense sum, and the parts of tables
        own = pieces_of(waiting.sums, self._dense) if self._shards is None else self._shards.sum_of_own(waiting.sums)
        parts = () if self._tables is None else self._tables.parts(waiting.sums)
        # record, noise
        private = release.take(waiting.units, own, place, tables=parts)
        # hand back
        self._waiting = _NOTHING
        if self._whole is not None:
            self._whole.drop()
        pieces: Sequence[Tensor] = private
        if self._shards is not None:
            gradients = list(self._shards.gradients(private))
        else:
            if len(private) < len(self._dense):  # one vector, of which each gradient counts its own versions
                own_views = list(map(waiting.sums.__getitem__, self._dense))
                if own_views[0]._base is private[0]:  # as `pieces_of` took it: the sums, in whose place noise was added
                    pieces = own_views
                else:
                    pieces = private[0].split_with_sizes(list(map(Tensor.numel, self._dense.values())))
            gradients = list(zip(self._dense.values(), pieces, strict=True))
        for p, gradient in gradients:
            if self._shards is None:
                gradient = gradient.data
                gradient = gradient if gradient.shape == p.shape else gradient.view(p.shape)
                gradient = gradient if gradient.dtype == p.dtype else gradient.to(p.dtype)
            if p is self._count:
                release.record_count(step, float(gradient) / self._gradient_share)
            elif p is self._metrics:
                self.measuring.record(step, (gradient * (release.divisor / self.plan.batch_size)).tolist())
            else:
                self._bound.write(p, gradient)
        if self._tables is not None:
            self._tables.write(release.of_tables)
        release.tell(step, lambda: torch.cat([p.reshape(-1) for p in private]) if private else torch.zeros(0))

    def _check_step(self) -> None:
        waiting = self._waiting
        self.release.check(waiting.units if waiting.batches else None)
        if not waiting.batches:
            raise TrainingError(
                "optimizer.step() without a backward pass through the private model since the last step: call "
                "model(..) itself, no part of it (model.encoder(..)) and not the module that make_private was given, "
                "and loss.backward() before each step; to leave a batch out, call engine.skip() first"
            )
        self._bound.check_step()
        if self._settings:
            step = self.release.ledger.step
            self._settings = [one for one in self._settings if not one.differ(step)]
        if self._tables is not None:
            self._tables.check_step()
        if self._measuring is not None:
            self._measuring.check_step(self.release.ledger.step)

    @property
    def clip_norm(self) -> float:
        """The norm at which gradients are clipped now."""
        return self.release.clip_norm * self._gradient_share

    @property
    def measuring(self) -> Measuring:
        """The metrics of this run."""
        if self._measuring is None:
            raise TrainingError(
                "this run releases no metrics: give make_private released=ao.Metrics({'loss': 4.0}), say"
            )
        return self._measuring

    # -- batches of secret orders, and those left out ----------------------------------------------------------------

    def _check_draws(self, batch: Batch) -> None:
        """The batches of a secret order serve its steps one by one, though those of balls in bins come again.

        Of Poisson sampling too, whose draws are independent: a loop that passes over empty batches, say, would take
        each step's given that somebody is in it.
        """
        if batch.position < self._next_draws:
            raise TrainingError(
                "a batch of these draws, or of later ones, was used already: the claim is for the batches that secret "
                "draws gave to each step. Use the batches in their order, each once, and do not move the loader back"
            )
        accumulate, step = self._options.accumulate, self.release.ledger.step
        if batch.position // accumulate != step:
            raise TrainingError(
                f"batch {batch.position} of the loader was drawn for step {batch.position // accumulate}, and this is "
                f"step {step}: the claim is for the batches that secret draws gave to each step. Take a step with "
                f"optimizer.step() after each {accumulate} batch(es), empty ones too; to leave one out, call "
                "engine.skip() before it; after steps without batches, loader.seek(..)"
            )

    def skip(self) -> None:
        """Leave out the last batch of the loader; see `PrivacyEngine.skip`."""
        self._on_each(self._skip, f"engine.skip() at step {self.release.ledger.step}")

    def _skip(self) -> None:
        batch = self.loader.identity.newest()
        self._check_batch(batch)
        before = self._waiting
        sums = before.sums or self._zeros()
        self.loader.mark_used(batch)
        self._next_draws = batch.position + 1
        self._waiting = _Waiting(before.units, sums, before.batches + 1, before.iteration or batch.iteration)

    def _zeros(self) -> dict[str, Tensor]:
        """The clipped sums of nobody."""
        dtypes = {accumulator_dtype(p) for p in self._bound.named.values()}
        floating = torch.float64 if torch.float64 in dtypes else torch.float32
        dtype = floating if self.plan.grid is None else torch.int64
        dense = {name: torch.zeros(p.shape, dtype=dtype, device=p.device) for name, p in self._dense.items()}
        return dense if self._tables is None else {**dense, **self._tables.nothing()}

    # -- how a run begins --------------------------------------------------------------------------------------------

    def _on_each(self, make: Callable[[], T], place: str = "make_private") -> T:
        """What is made on this rank; where it fails on one, it fails on all."""
        if self._group is None:
            return make()
        made: list[T] = []
        self._group.together(place, lambda: made.append(make()))
        return made[0]

    def _check(self, options: Options) -> Cut:
        check_unit(self.plan, options.unit)
        if options.micro_batch is not None and not self.plan.participation.secret:
            raise ArgumentError(
                "micro_batch is for orders by secret draws, whose steps differ in size; here the loader "
                "has batches of its own, and accumulate= says how many make a step"
            )
        if options.released is not None:
            check_released(options.released, self.plan, self._group is not None)
        return Cut.of(options.rule)

    def _check_model(self) -> None:
        refuse_unfit(self._model)
        if self._group is not None:
            check_sharding(self._model, self._group)
        if self._group is not None and (self._networks is not None or len(self._optimizers) > 1):
            raise ArgumentError(
                "several networks or optimizers are trained by one process, so far: give make_private one module and "
                "one optimizer over its parameters"
            )

    def weights(self) -> tuple[str, ...]:
        """Digests of the trained parameters as they are; none where this process does not hold them whole."""
        if self._whole is not None or (self._tables is not None and self._tables.are_lazy):
            return ()
        return digests([parameter for parameter in self._model.parameters() if parameter.requires_grad])

    def _find_tables(self) -> TrainedTables | None:
        found = tables_in(self._model, self._bound.named)
        if found and self._options.released is not None:
            raise ArgumentError(
                "released= is for models without tables of rows, so far: take nn.Embedding(.., sparse=False), or leave "
                "it out"
            )
        if found:
            ranks = 1 if self._group is None else self._group.size
            if len(self._optimizers) > 1:
                raise ArgumentError(
                    "tables of rows (sparse=True) are trained by one optimizer, got several: give one all parameters, "
                    "in groups, or take sparse=False"
                )
            return TrainedTables(self._model, self._bound, self._optimizers[0], self.plan, found, ranks)
        if self.plan.selection is not None:
            raise PlanError(
                "the plan has a selection of rows, and the model no table: give the optimizer the weight of an "
                "nn.Embedding(.., sparse=True) or nn.EmbeddingBag(.., sparse=True), or plan without "
                "ao.mechanism(selection=..)"
            )
        return None

    def _check_ranks(self, group: Group, checkpoint: Path | None) -> None:
        shapes = [(name, tuple(p.shape)) for name, p in self._bound.named.items()]
        options = self._options
        how = options.loss_reduction, options.accumulate, options.micro_batch, options.rule, options.non_finite
        told = {"plans": self.plan.digest, "models": shapes, "checkpoints": checkpoint is not None, "options": how}
        claims = group.together("make_private", lambda: {name: repr(value) for name, value in told.items()})
        differ = [name for name in told if any(claim[name] != claims[0][name] for claim in claims)]
        if differ:
            raise PlanError(
                f"the ranks were given different {' and '.join(differ)}; all must run one program, with the same "
                "loss_reduction, accumulate, micro_batch, rule and non_finite"
            )

    def _check_rows(self, group: Group) -> None:
        """Where units are indices, an index must be one example on all ranks."""
        told = group.together("make_private", lambda: None if self.loader.rows is None else self.loader.rows.sample())
        check_same_rows([rows for rows in told if rows is not None])

    def _set_up(self, loader: Any) -> None:
        options, tables = self._options, self._tables
        self.loader = self._private_loader(loader, options.unit)
        self._clipping = make_clipping(
            self._model if self._whole is None else self._whole.module,
            options.chunk_size, self.plan.grid, options.rule, options.non_finite,
            tables=None if tables is None else tables.readers, count_norm=None if tables is None else tables.count_norm,
        )  # fmt: skip
        self._draws = ModelDraws.of(
            self._model, Seeds(self.release.derived(b"draws").key), 0 if self._group is None else self._group.rank
        )
        self._by_shape: ByShape | None = None
        if options.shapes is not None:
            state = functools.partial(state_of, self._model)
            draws = None if self._draws is None else self._draws.drawn_in
            self._by_shape = ByShape(self._clipping, state, draws)
        self._watch = LossWatch(options.loss_reduction, self._model.parameters(), self._model)
        self.loader.show, self.loader.shown = self._watch.batch, unwatched
        self.loader.asks, self.loader.run = functools.partial(place_below, ASKED), ref(self._watch)
        self._stateless = self._group is None and tables is None  # as far as is known
        self._untried: set[str | None] = set()  # shards and tables have no rows to try
        if self._stateless:
            self._untried |= {None} if self._networks is None else set(self._networks)
        self._isolated_before: Isolation | None = None  # in the steps before a resume
        self._next_draws = 0
        self._discard()

    def _private_loader(self, loader: Any, unit: Unit) -> PrivateLoader:
        participation = self.plan.participation
        if participation.secret:
            rank, ranks = (0, 1) if self._group is None else (self._group.rank, self._group.size)
            loader = secret_loader(
                loader, participation, self.release.draw_source(), unit=unit, accumulate=self._options.accumulate,
                micro_batch=self._options.micro_batch, rank=rank, ranks=ranks,
            )  # fmt: skip
            is_poisson = participation.draw_probability is not None
            self.order = f"{'Poisson sampling' if is_poisson else participation.describe()} by anyorder"
        else:
            check_absence(self.plan, loader)
            self.order = BY_LEDGER if unit is not None else check_order(self.plan, loader, self._options.accumulate)
            if unit is not None:
                warn_of_scattered_units(self.plan, loader)
        seed, options = self.release.derived(b"order").key, self._options
        return PrivateLoader(loader, unit=unit, seed=seed, shapes=options.shapes, like=options.like)

    def _hook_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        ask_for_scale(optimizer)
        optimizer.register_step_pre_hook(self._before_step)
        zero_grad = optimizer.zero_grad
        is_torchs = getattr(zero_grad, "__func__", None) is torch.optim.Optimizer.zero_grad

        @functools.wraps(zero_grad)
        def discard_and_zero(set_to_none: bool = True) -> None:
            self._discard()
            with aside(ASKED) if is_torchs else nullcontext():
                zero_grad(set_to_none)

        optimizer.zero_grad = discard_and_zero  # type: ignore[method-assign]

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
        if self._tables is not None and self._tables.are_lazy:
            self._tables.check_step()
            self.release.flush()

    @property
    def loss_kept(self) -> str | None:
        """How rows of the loss are kept apart: "proved", "mapped" or "promised" in a batch or more; None before any."""
        return self._watch.kept

    @property
    def isolation(self) -> Isolation:
        """How units are kept apart in the steps so far, for the certificate.

        Raises: ModelError where the loop put something of a batch into the model, perhaps after the last step.
        """
        check_nothing_of_loop(self._model)
        found = self._isolation()
        return replace(found, loss=EITHER) if found.loss == CONSTRUCTED else found

    def _isolation(self) -> Isolation:
        """The same, with a loss "by construction" where none was seen yet."""
        follows = self._group is None and sizes_are_public(self.plan)  # from what neighbours, and ranks, have alike
        own = Isolation(
            dataset=CONSTRUCTED if self.loader.reads_by_row else PROMISED,
            collation=CONSTRUCTED if self.loader.collates_by_row else PROMISED,
            model=CONSTRUCTED if self._stateless and not self._watch.escaped else PROMISED,
            loss=(self._watch.kept or CONSTRUCTED) if follows or self._watch.kept == PROMISED else EITHER,
        )
        return own if self._isolated_before is None else own.and_before(self._isolated_before)

    def save(self, extra: dict[str, Any] | None) -> None:
        """Write the checkpoint; see `PrivacyEngine.save`."""
        place = "engine.save()"
        if any(isinstance(leaf, Tensor) and is_of_loop(leaf) for leaf in pytree.tree_leaves(extra)):
            raise TrainingError(
                "extra= has a tensor of a batch, which a resumed run would take for a public one; keep float(t), by "
                "which you say that no later loss follows from it"
            )
        self._on_each(self._check_save, place)
        model = self._model.state_dict() if self._tables is None else self._tables.model_state()
        several = [one.state_dict() for one in self._optimizers]
        optimizer: Any = several[0] if len(several) == 1 else several
        clipping, state = self._clipping.state_dict(), random_state()
        front_end = {
            "model": model if self._group is None else whole(model),
            "optimizer": optimizer if self._group is None else whole(optimizer),
            "clipping": [clipping] if self._group is None else self._group.to_first(clipping),
            "loader": self.loader.state_dict(),
            "random": [state] if self._group is None else self._group.to_first(state),
            "isolation": self._isolation().to_dict(),
        }
        if self._measuring is not None:
            front_end["metrics"] = self._measuring.state_dict()
        self.release.save_all(place, front_end, extra)

    def _check_save(self) -> None:
        check_nothing_of_loop(self._model)
        self.release.check_save()
        if self._waiting.batches:
            raise CheckpointError("save between steps: a batch waits for optimizer.step()")

    def _restore(self) -> None:
        state, self.release.resumed = self.release.resumed, None
        if state is None:
            if self.release.needs_save:
                rows = self.loader.rows
                if rows is not None:  # the first rank writes them; all compare them
                    self._on_each(lambda: rows.note() if self._group is None or self._group.is_first else None)
                self.save(None)  # before any noise is used: a restart finds the key
            return
        if "model" not in state:
            raise CheckpointError("the checkpoint is of another front end, and no model is in it; choose another file")
        self._on_each(lambda: self.loader.load_state_dict(state["loader"]))
        if self._tables is None:
            self._load(state["model"], state["optimizer"])
        else:
            self._tables.load(state["model"], lambda of_model: self._load(of_model, state["optimizer"]))
        check_metrics(self._measuring, state.get("metrics"))
        if self._measuring is not None:
            self._measuring.load_state_dict(state["metrics"])
        rank = 0 if self._group is None else self._group.rank
        self._clipping.load_state_dict(state["clipping"][rank % len(state["clipping"])])
        self._next_draws = self.loader.position
        if self.release.steps_taken:
            kept = state.get("isolation")  # which checkpoints of earlier versions lack
            self._isolated_before = UNKNOWN if kept is None else Isolation(**kept)
            if self._isolated_before.loss in (PROVED, MAPPED):
                self._watch.kept = self._isolated_before.loss
        set_random_state(state["random"][rank % len(state["random"])])

    def _load(self, of_model: dict[str, Any], of_optimizer: Any) -> None:
        if self._group is None:
            self._model.load_state_dict(of_model)
            several = [of_optimizer] if len(self._optimizers) == 1 else of_optimizer
            for one, state in zip(self._optimizers, several, strict=True):
                one.load_state_dict(state)
        else:
            load_whole(self._model, self._optimizers[0], of_model, of_optimizer)


def check_released(released: Any, plan: Plan, in_group: bool) -> None:
    """Raise ArgumentError or PlanError where metrics cannot be released with the gradients."""
    if type(released) is not Metrics:
        raise ArgumentError(f"released must be ao.Metrics, such as ao.Metrics({{'loss': 4.0}}), got {released!r}")
    if plan.grid is not None:
        raise PlanError(
            "released= adds coordinates of floats, and the sums of secure mode are exact integers: plan without "
            "ao.mechanism(secure=True), or leave it out"
        )
    if plan.selection is not None:
        raise PlanError(
            "released= is for models without tables of rows, so far: plan without ao.mechanism(selection=..)"
        )
    if in_group:
        raise ArgumentError("released= is for one process, so far: measure on public data, or train in one process")


_SMALL = 1 << 18  # numbers that are copied sooner than called for one by one


def pieces_of(sums: Mapping[str, Tensor], names: Mapping[str, Any]) -> list[Tensor]:
    """The sums, flat and one behind the other, of one dtype, the widest of them; they may be the sums themselves.

    One piece: the vector itself where they are views of it, one behind the other, that fill it, so that the noise is
    added into the sums; or a copy where they are small.
    """
    tensors = list(map(sums.__getitem__, names))
    whole, place = tensors[0]._base if tensors else None, 0
    for x in tensors:
        if whole is None or x._base is not whole or x.storage_offset() != place or not x.is_contiguous():
            whole = None
            break
        place += x.numel()
    if whole is not None and whole.dim() == 1 and whole.is_contiguous() and whole.numel() == place:
        return [whole]
    pieces = [x.reshape(-1) for x in tensors]
    dtypes = set(map(attrgetter("dtype"), pieces))
    if len(dtypes) <= 1:
        small = len(pieces) > 1 and sum(map(len, pieces)) <= _SMALL and len({x.device for x in pieces}) == 1
        return [torch.cat(pieces)] if small else pieces
    widest = functools.reduce(torch.promote_types, dtypes)
    return [x.to(widest) for x in pieces]


def _with_padding(batch: Batch) -> NDArray[np.int64]:
    """A number for each row, equal for rows of one unit; each row of the padding is a unit of its own."""
    groups = numbered(batch.units)
    return np.append(groups, len(groups) + np.arange(batch.padding)) if batch.padding else groups


# ----------------------------------------------------------------------------------------------------
# Rows that only fill a batch up: they go through the model, and nothing comes back through them.


def without_rows(outputs: Any, rows: slice | Tensor) -> Any:
    """The outputs, whose gradients in these rows are zero, whatever the loss makes of them.

    A row whose output's gradient is zero adds exactly zero to the sum: 0 times a finite number, and a unit whose
    gradient is not finite adds zero anyhow. A schedule of clip norms counts units above the norm, which it is not.
    """

    def of(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or not leaf.requires_grad:
            return leaf
        return _WithoutRows.apply(leaf, rows)  # type: ignore[no-untyped-call]

    return pytree.tree_map(of, outputs)


class _WithoutRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, output: Tensor, rows: slice | Tensor) -> Tensor:
        ctx.rows = rows
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        gradient = gradient.clone()
        gradient[ctx.rows] = 0
        return gradient, None


# ----------------------------------------------------------------------------------------------------
# The model as the training loop sees it.


class PrivateModule(nn.Module):
    """A model whose backward pass yields clipped sums to its engine and never writes `.grad`.

    In training mode with gradients on, `forward` runs under the engine. In evaluation mode, or under
    `torch.no_grad()`, it is the model's own forward, cut off from its parameters, so that no unclipped gradient of
    them can arise; a backward pass from there is an error that says so. So it is on tensors that require gradients and
    are of no batch, as a generator's are: a gradient goes to what came before the model, and to no parameter of it.
    `state_dict` and `load_state_dict` are those of the model. It belongs to one run: to copy, average, save or script,
    take `module`.

    Attributes:
        module: the user's model; the same object, with the same parameters.
    """

    def __init__(
        self,
        module: nn.Module,
        private_forward: Callable[..., Any],
        discard: Callable[[], None],
        whole: WholeModel | None,
        check_shown: Callable[[], None] | None,
        watch: LossWatch,
    ) -> None:
        super().__init__()
        self._watch = watch
        self.module = module
        self.training = module.training
        self._private_forward = private_forward
        self._discard = discard
        self._whole = whole
        self._check_shown = check_shown
        self.register_load_state_dict_pre_hook(_into_the_module)  # type: ignore[no-untyped-call]

    @never_compiled  # by who compiles what `make_private` returned: the ledger and the engine are no part of a graph
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's outputs, one row for each example."""
        is_released = torch.is_grad_enabled() and self._watch.is_released((args, kwargs))
        if self.training and torch.is_grad_enabled() and not is_released:
            with aside(ASKED) as was_asked:
                self._watch.was_seen |= not was_asked  # what torch does with devices may take it away
                return self._private_forward(args, kwargs)
        given = args, kwargs
        args, kwargs = self._watch.shown(given)
        if self._check_shown is not None:
            self._check_shown()
        if not torch.is_grad_enabled():
            return self._watch.looked(own_memory(lambda: self.module(*args, **kwargs)), given)
        whole = self.module if self._whole is None else self._whole.gather()
        with reparametrized(whole, {name: p.detach() for name, p in whole.named_parameters()}):
            if is_released:  # of weights that were released and a generator's numbers: post-processing
                return released(whole, given, _of_evaluation)
            outputs = own_memory(lambda: whole(*args, **kwargs))
        return self._watch.looked(pytree.tree_map(_of_evaluation, outputs), given)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients of the step that has not been taken."""
        self._discard()
        self.module.zero_grad(set_to_none)

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """The model's own state."""
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load the model's own state."""
        return self.module.load_state_dict(state_dict, strict, assign)

    def __deepcopy__(self, memo: dict[int, Any]) -> "PrivateModule":
        raise _one_of_a_run("copied", "model.module: AveragedModel(model.module), copy.deepcopy(model.module)")

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise _one_of_a_run("pickled", "model.module, or save model.state_dict()")

    def __prepare_scriptable__(self) -> Any:
        raise _one_of_a_run("scripted", "model.module, after training")

    def _replicate_for_data_parallel(self) -> Any:
        raise _one_of_a_run("replicated by DataParallel", "one process for each device, by torchrun")

    def __getattr__(self, name: str) -> Tensor | nn.Module | Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)


def _one_of_a_run(done: str, cure: str) -> TrainingError:
    return TrainingError(f"the private model is bound to its engine and cannot be {done}; take {cure}")


class _Evaluation(torch.autograd.Function):
    """The outputs of evaluation: a backward pass of them has no way to go."""

    @staticmethod
    def forward(ctx: Any, root: Tensor, output: Tensor) -> Tensor:
        ctx.of_evaluation = True
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise TrainingError(
            "the loss is of outputs that the private model gave in evaluation mode, which no gradient leaves; call "
            "model.train() before the model is called, or torch.no_grad() or .detach() for outputs that only look"
        )


def _of_evaluation(leaf: Any) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    leaf = unwatched(leaf)
    if leaf.requires_grad or not (leaf.is_floating_point() or leaf.is_complex()):
        return leaf
    return _Evaluation.apply(torch.zeros((), requires_grad=True), leaf)  # type: ignore[no-untyped-call]


def _into_the_module(private: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """Let the state of a module that holds a private one be loaded, as it was saved: under the model's own names."""
    del private
    for name in [name for name in state_dict if name.startswith(prefix)]:
        state_dict[f"{prefix}module.{name.removeprefix(prefix)}"] = state_dict.pop(name)


# ----------------------------------------------------------------------------------------------------
# The parameters that are trained: those that the optimizer holds. All others stay as they are.


_IS_TRAINED, _STATE = attrgetter("requires_grad"), attrgetter("state")
_MODULES, _PARAMETERS, _BUFFERS = attrgetter("_modules"), attrgetter("_parameters"), attrgetter("_buffers")
_BOUND: WeakSet[torch.optim.Optimizer] = WeakSet()
"""The optimizers whose steps are those of a release."""


class Networks(nn.Module):
    """Several networks under one plan, of which one is called at a time, by its name.

    Args:
        networks: a list, tuple or `nn.ModuleList`, whose names are "0", "1", ..; or an `nn.ModuleDict`.
    """

    def __init__(self, networks: Any) -> None:
        super().__init__()
        self.networks = nn.ModuleDict(networks_of(networks))

    def forward(self, network: str, *args: Any, **kwargs: Any) -> Any:
        """What one network makes of a batch."""
        return self.networks[network](*args, **kwargs)


def networks_of(given: Any) -> dict[str, nn.Module] | None:
    """Several networks by name; None where one is given."""
    if isinstance(given, (nn.ModuleDict, nn.ModuleList)) and type(given).forward is nn.Module.forward:
        found = {str(name): one for name, one in given.named_children()}
    elif isinstance(given, (list, tuple)):
        found = {str(i): one for i, one in enumerate(given)}
    elif isinstance(given, nn.Module):
        return None
    else:
        found = {}
    differ = len(set(map(id, found.values()))) == len(found) > 0
    if not differ or not all(isinstance(one, nn.Module) for one in found.values()):
        raise ArgumentError(
            "model must be an nn.Module, or several different ones in a list, nn.ModuleList or nn.ModuleDict, got "
            f"{type(given).__name__}"
        )
    return found


def like_networks(
    given: Any, networks: dict[str, nn.Module] | None, private: Callable[[nn.Module, str | None], "PrivateModule"]
) -> Any:
    """Private networks in the container in which they were given."""
    if networks is None:
        return private(given, None)
    made = {name: private(one, name) for name, one in networks.items()}
    if isinstance(given, nn.ModuleDict):
        return nn.ModuleDict(made)
    return nn.ModuleList(made.values()) if isinstance(given, nn.ModuleList) else type(given)(made.values())


def optimizers_of(given: Any) -> list[torch.optim.Optimizer]:
    """The optimizers of a run, which step on one release."""
    found = list(given) if isinstance(given, (list, tuple)) and given else [given]
    for one in found:
        if not hasattr(one, "_optimizer_step_pre_hooks"):  # accelerate's is a torch Optimizer by its class alone
            raise ArgumentError(
                f"optimizer must be a torch.optim.Optimizer with hooks of its own, got {type(one).__name__}: give "
                "make_private the optimizer that is wrapped; with accelerate, prepare what make_private returns"
            )
    return found


class BoundParameters:
    """The trainable parameters of a model that an optimizer holds; the model's others are left out, and frozen.

    What is left out is in no clipped gradient, gets no noise, and takes no part in the size of the release. It is
    frozen (`requires_grad=False`) so that no gradient of private data can come to it by any way.

    Args:
        model: the user's.
        optimizers: over parameters of the model.

    Attributes:
        named: the parameters that are trained, in the model's order.
        left_out: those that were trainable, and that the optimizer does not hold.
    Raises: ArgumentError for what is no optimizer, holds parameters that are not the model's, or is of another run;
        nothing is frozen.
    """

    def __init__(self, model: nn.Module, *optimizers: torch.optim.Optimizer) -> None:
        strange = next((one for one in optimizers if not isinstance(one, torch.optim.Optimizer)), None)
        if strange is not None:
            raise ArgumentError(f"optimizer must be a torch.optim.Optimizer, got {type(strange).__name__}")
        if any(isinstance(one, torch.optim.LBFGS) for one in optimizers):
            raise ArgumentError("LBFGS takes several gradients of a batch in a step, and the plan covers one: use SGD")
        if any(one in _BOUND for one in optimizers):
            raise ArgumentError(
                "optimizer belongs to another private run, whose noise comes with each of its steps; make model, "
                "optimizer and loader again (load_state_dict keeps their state); in a notebook, run its cells above"
            )
        self._optimizers = optimizers
        trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._check_known({id(p) for p in trainable.values()})
        held = {id(p) for p in self._parameters()}
        self.named = {name: p for name, p in trainable.items() if id(p) in held}
        self._known = {id(p) for p in self.named.values()}
        self.left_out = {name: p for name, p in trainable.items() if id(p) not in held}
        self._others = [p for p in model.parameters() if id(p) not in self._known]  # frozen before, or left out
        self._model = model
        self._names = self._named_now()
        self._look()
        self._written: dict[int, tuple[Any, int]] = {}  # by the parameters' ids
        for p in self.left_out.values():
            p.requires_grad_(False)

    def _named_now(self) -> dict[str, Any]:
        return dict(self._model.named_parameters(remove_duplicate=False))

    def _look(self) -> None:
        """What `check` compares: the modules, and where they have which parameters."""
        self._parts = list(self._model.modules())
        self._children, self._counts = self._children_now()
        places = [(part, name) for part in self._parts for name in part._parameters]
        whole = [(part, name) for part, name in places if not is_sharded(part._parameters[name])]  # else FSDP's
        self._owners, self._own = [part for part, _ in whole], [name for _, name in whole]
        self._held = [part._parameters[name] for part, name in whole]

    def _children_now(self) -> tuple[list[Any], list[int]]:
        parts = list(map(_MODULES, self._parts))
        counts = list(map(len, itertools.chain(parts, map(_PARAMETERS, self._parts))))
        return list(itertools.chain.from_iterable(map(dict.values, parts))), counts

    def bind(self) -> None:
        """The optimizers' steps are those of one release from here on, and of no other."""
        for one in self._optimizers:
            _BOUND.add(one)
        guard_schedulers(_BOUND)

    def thaw(self) -> None:
        """Undo the freezing, where the model is not bound after all."""
        for p in self.left_out.values():
            p.requires_grad_(True)

    def _parameters(self) -> list[Any]:
        groups = itertools.chain.from_iterable(map(attrgetter("param_groups"), self._optimizers))
        return list(itertools.chain.from_iterable(map(itemgetter("params"), groups)))

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
        """Raise TrainingError if a parameter was frozen since, or one that is left out is trained after all, or another
        stands in its place: that would not be trained, and may have numbers of a batch.
        """
        children, counts = self._children_now()
        if counts != self._counts or not all(map(is_, children, self._children)):
            now = self._named_now()
            if now.keys() != self._names.keys() or not all(map(is_, now.values(), map(self._names.get, now))):
                raise TrainingError(
                    "a parameter, or a module with parameters, was exchanged, added, taken away or moved to another "
                    "name after make_private (model.head = nn.Linear(..), model[0] = torch.compile(model[0])): the "
                    "optimizer does not have it, or the plan does not know it. Change the model before make_private"
                )
            self._look()
        same = all(map(is_, map(dict.get, map(_PARAMETERS, self._owners), self._own), self._held))
        if not (same and OF_A_BATCH_KINDS.isdisjoint(map(type, self._held))):
            raise TrainingError(
                "a parameter of the model was replaced after make_private (module.bias = nn.Parameter(..), "
                "load_state_dict(.., assign=True), swap_tensors): the optimizer does not have the new one, and numbers "
                "of a batch in it would be told without noise. Load without assign=True, and make a new head, from "
                "public numbers, before make_private"
            )
        states = itertools.chain.from_iterable(map(dict.values, map(_STATE, self._optimizers)))
        tensors = itertools.chain(self._held, *map(dict.values, map(_BUFFERS, self._parts)), *map(dict.values, states))
        if is_marked(*tensors):
            raise TrainingError(
                "a parameter, a buffer or the optimizer's state was given memory with numbers of a batch (p.data = "
                "x.mean(0), vector_to_parameters): they would be told without noise. Give it public numbers"
            )
        settings = list(itertools.chain.from_iterable(map(_settings, self._optimizers)))
        if is_marked(*settings) or not OF_A_BATCH_KINDS.isdisjoint(map(type, settings)):
            raise TrainingError(
                "a setting of the optimizer (lr, weight_decay) is a tensor or number of a batch, of which its steps "
                "would tell without noise; take public numbers"
            )
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
        held = self._parameters()
        if held and self._known.issuperset(map(id, held)):  # as it mostly is
            return
        self._check_known(self._known)
        if any(p.grad is not None for p in held if id(p) not in self._known):
            raise TrainingError(
                "the optimizer holds a frozen parameter that has a gradient, which each step would add to it: "
                "no noise covers it. Set the gradient to None, or leave the parameter out of the optimizer"
            )

    def check_step(self) -> None:
        """Refuse a step of another optimizer state, and gradients that did not come through the private model.

        They would be lost, or not be private.
        """
        self.check_optimizer()
        for name, p in self.named.items():
            if p.grad is None:
                continue
            own, version = self._written.get(id(p), (None, 0))
            if (p.grad is own and own._version == version) or not _has_numbers(p.grad):
                continue
            raise TrainingError(
                f"parameter {name} has a gradient that did not come through the private model, from a penalty on "
                "weights, another loss or a part of the model that was called alone (model.encoder(..)) perhaps; use "
                "the optimizer's weight_decay, call model(..) as a whole, and zero_grad() before each step"
            )
        for name, p in self.left_out.items():
            if p.grad is not None and _has_numbers(p.grad):
                raise TrainingError(
                    f"parameter {name}, which the optimizer does not hold, has a gradient: no noise covers it, and "
                    "another optimizer that steps on it would train on private data in the open. Give all parameters "
                    "that are trained on this data to the one private optimizer, and set this gradient to None"
                )

    def write(self, p: nn.Parameter, gradient: Any) -> None:
        """Put a private gradient in place."""
        p.grad = gradient
        self._written[id(p)] = p.grad, gradient._version


def _settings(optimizer: torch.optim.Optimizer) -> list[Any]:
    """All that stands in an optimizer's groups beside the parameters, those in a tuple or a list too."""
    found: list[Any] = []
    for group in optimizer.param_groups:
        for name, value in group.items():
            if name != "params":
                found += value if type(value) in (tuple, list) else (value,)
    return found


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
            "a GradScaler takes this step: it scales the loss, and units would be clipped at clip_norm over that "
            "scale. "
            "Leave it out, or make it with enabled=False: with torch.autocast in bfloat16 no scaling is needed"
        )


# ----------------------------------------------------------------------------------------------------
# Whether the order of a loader, and what it clips, are the plan's.


BY_LEDGER = "not read off the loader; the ledger enforces the plan's"


def check_order(plan: Plan, loader: Any, accumulate: int) -> str:
    """The order in words; an order that is not known is left to the ledger.

    Args:
        accumulate: batches that make up one step.
    Raises: LoaderError if the order is known and not the plan's, or examples are dealt out to ranks with repetitions.
    """
    check_loader(loader)
    stated = not plan.participation.absence_moves_others  # a rule of arrivals, or an order that lists its units
    try:
        order = read_order(loader, 0)
    except LoaderError:
        if isinstance(loader.sampler, DistributedSampler):
            raise  # it repeats examples, and so would fail at the end of the first epoch
        return BY_LEDGER
    try:
        planned_order(loader, 1)
    except LoaderError:
        if not stated:
            raise  # an example that is listed twice would stop the run in its first epoch
        return BY_LEDGER
    if order.ranks > 1 and not (dist.is_available() and dist.is_initialized()):
        raise LoaderError(
            f"the DistributedSampler deals the examples out to {order.ranks} ranks, and this process trains alone; "
            "call torch.distributed.init_process_group before make_private"
        )
    epochs = -(-plan.n // -(-order.steps // accumulate))
    found = find_participation(loader, epochs, accumulate=accumulate)
    if not covers(plan.participation, found.participation):
        joined = (
            f"; {accumulate} batches make a step here: plan with batch_size={found.batch_size * accumulate}"
            if accumulate > 1
            else ""
        )
        raise LoaderError(
            f"the plan is for {plan.participation.describe()}, but this loader gives {found.participation.describe()} "
            f"({found.order}); make the plan with ao.plan(loader=..., epochs=...) or change the loader{joined}"
        )
    if found.batch_size * accumulate != plan.batch_size:
        raise LoaderError(
            f"the plan divides by batch_size={plan.batch_size}, but the loader's batches of "
            f"{found.batch_size} times accumulate={accumulate} make {found.batch_size * accumulate}"
        )
    return found.order


def check_absence(plan: Plan, loader: Any) -> None:
    """Raise PlanError where the plan's neighbours differ by the absence of a unit, which would move others."""
    if plan.neighbours != "add-or-remove" or not is_plain(loader):
        return
    if isinstance(loader.dataset, IterableDataset):
        if loader.batch_size is None:
            return  # the stream makes the batches itself
        phrase = f"every {loader.batch_size} examples of a stream"
    else:
        try:
            phrase = read_order(loader, 0).phrase
        except LoaderError:
            return  # a batch sampler of one's own, whose batches may stay
    raise PlanError(
        "the plan's neighbours are 'add-or-remove', which needs batches that stay where a unit is absent. This loader "
        f"fills batches by number ({phrase}), and would put others into the place of one that is not there: plan for "
        "'zero-out' (its gradients replaced by zero) or 'replace-one', or give batches as they arrive"
    )


def check_unit(plan: Plan, unit: Unit) -> None:
    """Raise PlanError unless the plan protects what is clipped: examples, or the units that a key names."""
    if unit is None and plan.unit != "example":
        raise PlanError(
            f"the plan protects one {plan.unit}, but without unit= each example is clipped on its own; pass unit= with "
            f"the place of each example's {plan.unit} in a batch (a field of a dict, a position in a tuple, a "
            "callable), or plan for unit='example'"
        )
    if unit is not None and plan.unit == "example":
        raise PlanError(
            "unit= names units by a key, but the plan protects one example; say whom the key names in the plan: "
            "ao.plan(.., unit='user')"
        )


def warn_of_scattered_units(plan: Plan, loader: Any) -> None:
    """Warn where the examples of a unit come in any steps of an epoch, and the plan wants its steps apart."""
    rule = plan.participation
    match rule.pattern:
        case Separated(b=1):
            return
        case Listed() | Separated() | PerEpoch():
            pass
        case _:
            assert_never(rule.pattern)
    if not is_plain(loader):
        return
    try:
        order = read_order(loader, 0)
    except LoaderError:
        return
    planned = type(rule) is KnownOrder and order.known_beforehand
    if order.kind == "shuffled" and not planned:
        warnings.warn(
            f"this loader shuffles examples, so that those of one {plan.unit} come in any steps, while the plan covers "
            f"{rule.describe()}: the ledger refuses the first step that does not fit. Keep the examples of each "
            f"{plan.unit} together, or plan for ao.participation.MinSeparation(n, b=1, k=..)",
            stacklevel=2,
        )


# ----------------------------------------------------------------------------------------------------
# The state of the ordinary generators, for a checkpoint.


def random_state() -> dict[str, Any]:
    """The generators that dropout and augmentation draw from, for a checkpoint. The private noise needs no state."""
    kind, keys, *rest = np.random.get_state()  # noqa: NPY002
    version, numbers, gauss = random.getstate()
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        "numpy": [str(kind), np.asarray(keys).astype(np.int64), *rest],
        "python": [version, list(numbers), gauss],
    }


def set_random_state(state: dict[str, Any]) -> None:
    """Put the generators back where `random_state` saw them; of GPUs, those that are there."""
    torch.set_rng_state(state["torch"])
    if torch.cuda.is_available():
        for device, cuda in enumerate(state["cuda"][: torch.cuda.device_count()]):
            torch.cuda.set_rng_state(cuda, device)
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, np.asarray(keys).astype(np.uint32), *rest))  # noqa: NPY002
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))


# ----------------------------------------------------------------------------------------------------
# The face.


_OF_OPACUS = {
    "module": "the model is the first argument, make_private(model, optimizer, loader)",
    "data_loader": "the loader is the third argument, make_private(model, optimizer, loader)",
    "max_grad_norm": "the clip norm is the plan's, ao.plan(.., clip_norm=..)",
    "noise_multiplier": "the noise is the plan's, ao.plan(.., noise_multiplier=..) or ao.plan(.., epsilon=..)",
    "target_epsilon": "epsilon is the plan's, ao.plan(.., epsilon=..)",
    "target_delta": "delta is the plan's, ao.plan(.., delta=..)",
    "epochs": "epochs are the plan's, ao.plan(.., epochs=..)",
    "poisson_sampling": "the order is the plan's, which ao.plan(loader=..) reads off the loader, or order= names",
    "clipping": "rule= says how a unit's gradient is clipped: Flat(), PerGroup(..), Automatic(..), Adaptive(..)",
    "grad_sample_mode": "there is one way to the gradients of units; leave it out",
    "accountant": "the claim is the plan's, and exact for its order; leave it out",
    "secure_mode": "exact integers are the plan's, ao.plan(.., mechanism=ao.mechanism(secure=True))",
}
"""Keywords of Opacus's engine, and where that stands here."""

_METHODS_OF_OPACUS = {
    "get_epsilon": "the claim is of the whole run; write engine.epsilon(), or engine.epsilon(delta)",
    "make_private_with_epsilon": "write ao.plan(.., epsilon=..), and make_private(model, optimizer, loader)",
    "accountant": "the claim is engine.plan's, and engine.ledger has who took part",
    "is_compatible": "write ao.check_model(model)",
    "validate": "write ao.check_model(model)",
    "get_compatible_module": "write ao.clipping.convert(model)",
    "save_checkpoint": "write ao.PrivacyEngine(plan, checkpoint=path), and engine.save()",
    "load_checkpoint": "write ao.PrivacyEngine(plan, checkpoint=path); make_private then goes on from there",
}


def _hinted(function: Callable[P, T]) -> Callable[P, T]:
    """A function of the engine that says what to write instead where it is called as Opacus's is."""

    @functools.wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> T:
        for name in kwargs:
            if name in _OF_OPACUS:
                raise ArgumentError(f"PrivacyEngine has no {name}= here: {_OF_OPACUS[name]}")
        if function.__name__ == "__init__" and len(args) == 1 and "plan" not in kwargs:
            raise ArgumentError(
                "PrivacyEngine needs the plan that it runs: plan = ao.plan(loader=loader, epochs=.., epsilon=.., "
                "delta=..), engine = ao.PrivacyEngine(plan), then engine.make_private(model, optimizer, loader)"
            )
        return function(*args, **kwargs)

    return called


class PrivacyEngine:
    """Runs one plan: clips each unit, adds the planned noise at every step, and refuses what the plan does not cover.

    At `optimizer.step()` number t the parameters' `.grad` becomes

        ( sum over units of clip(gradient of the unit) + noise_std * (K Z)[t] ) / plan.batch_size

    and the optimizer does the rest. Nothing un-noised is ever in `.grad`. With `plan.grid` the sum and the noise are
    exact integers, in grid steps; floating point begins after they are added.

    Guarantee: the sequence of gradients, hence every iterate, is (plan.epsilon, plan.delta)-DP for one unit under the
    plan's neighbouring relation, provided that an example's loss depends on no other example of the batch (use
    reductions `mean` or `sum` over examples; not a contrastive loss, nor a mean over unmasked tokens of the batch).
    Printed training losses are releases too, and are not covered; what `make_private(released=..)` has released of
    them is.

    Under an initialised `torch.distributed` process group all ranks train one model: the sums are over all of them,
    the noise is added once. Every rank makes the same calls, on its own part of the data.

    Args:
        plan: what to run.
        checkpoint: file for `save`; where it exists, `make_private` resumes from it. Its folder must exist. From
            `make_private` on, a journal next to it records every step before its release, and keeps other runs away.
        key: 32 bytes for reproducible tests. In use, leave it out: the key then comes from the operating system, and
            a run whose key is known has no privacy.
        start_over: begin again, with a new key, where the run of this checkpoint took steps and cannot go on: see
            `anyorder.Release`. The certificate counts what was released before.
    """

    @_hinted
    def __init__(
        self,
        plan: Plan,
        *,
        checkpoint: str | Path | None = None,
        key: bytes | None = None,
        start_over: bool = False,
    ) -> None:
        if type(plan) is not Plan:
            raise ArgumentError(f"plan must be an anyorder Plan (see anyorder.plan), got {type(plan).__name__}")
        if plan.on_device:
            raise PlanError(
                f"the engine sees every example itself, and the plan trusts {' and '.join(plan.on_device)} to devices; "
                "plan without ao.mechanism(on_device=..), or give what devices send to ao.Release or a server"
            )
        self.plan = plan
        self._path = None if checkpoint is None else Path(checkpoint)
        self._start_over = start_over
        self._given_key = None if key is None else NoiseSource(key).key
        self._training: Training | None = None
        self._closed = self._extra_is_read = False

    @_hinted
    def make_private(
        self,
        model: Model,
        optimizer: Optimizer,
        loader: Loader,
        *,
        unit: Unit = None,
        loss_reduction: str = "mean",
        accumulate: int = 1,
        micro_batch: int | None = None,
        chunk_size: int | None = None,
        rule: Rule | None = None,
        non_finite: str = "zero",
        pad_to: PadTo = None,
        pad_value: float | Mapping[Any, float] | None = None,
        pad_side: str | None = None,
        like: Any = None,
        released: Metrics | None = None,
    ) -> tuple[Model, Optimizer, Loader]:
        """Bind model, optimizer and loader to this engine, and resume if the checkpoint file exists.

        Args:
            model: any module that treats the examples of a batch separately; its first dimension is the batch.
                Several networks may be given in a list, an `nn.ModuleList` or an `nn.ModuleDict`, and are returned
                in the same: a unit's gradient is of all of them together and is clipped once, and one noisy gradient
                is released a step. They may be given one another's outputs.
            optimizer: any torch optimizer over parameters of `model`; the same object is returned. Trainable parameters
                that it does not hold are left out of clipping, noise and size, and are frozen from here on. Several in
                a list step on one release, which the first of them to step makes.
            loader: a DataLoader. Its order must be one that the plan covers. With `unit`, any iterable of batches.
                Where the plan's order is made by secret draws, it names the examples, and the batches are drawn here.
            unit: None for examples: the plan's unit must be "example". For user-level privacy the key of each example's
                unit: a field name of dict batches, a position in tuple batches, or a function from the batch to a
                sequence of keys; the plan's unit says whom it names.
            loss_reduction: how the loss joins examples: "mean" or "sum".
            accumulate: batches (micro-batches) that make up one optimizer step. A step of a secret order is divided
                into as many, however many examples were drawn.
            micro_batch: of a secret order, the rows of each of them: where fewer were drawn, it is filled up by rows
                that count for nothing. Where more were than all micro-batches of a step hold, they are larger.
            chunk_size: examples whose gradients are in memory at once; None chooses.
            rule: how a unit's gradient is clipped to the clip norm: `Flat()` if None, `PerGroup(..)`, `Automatic(..)`,
                `Adaptive(..)`.
            non_finite: "zero": a unit whose gradient is NaN or infinite adds exactly zero, and nothing tells of it.
                "refuse": backward raises NonFiniteError, which says how many there are. That is a release that no
                noise covers: for debugging on public data.
            pad_to: the public lengths of examples that differ in length, such as (32, 64, 128). `collate_fn` is called
                on each example alone, and dimension 1 of its tensors (not of float labels) is padded to the least of
                these that holds it, and of all examples of its unit in the batch: by its own data alone. A longer one
                loses its end. Batches have the longest of all, and the model runs on the examples of one length at a
                time, truncated to it. An integer stands for 16, 32, .. up to itself. Lists of sizes, ((32, 32), (64,
                64)), are of the last dimensions, as of images; a dict by field has the lengths of each, and leaves
                others as they are. None: the examples of a batch must have one shape.
            pad_value: what integers are filled up with, or a dict by field. Else the id of the collator's tokenizer or
                0, 0 for masks and floats, -100 for labels.
            pad_side: "right" or "left"; else that of the collator's tokenizer, or right.
            like: a made-up example, as the data set gives them, such as (torch.zeros(8), 0): it states publicly which
                fields, types and sizes examples have. One that cannot be joined to it (of another dtype, with more
                dimensions, of a size that `pad_to` does not pad, or that `collate_fn` fails on) is replaced by it, and
                adds exactly zero; nothing tells of it. None: it is refused, which shows that there is one. For units
                that are examples, from a loader that collates them. Cost: some 20 microseconds for each example.
            released: metrics of training, such as the loss, that are released with each gradient: `ao.Metrics`. Then
                `measure` is called in each batch, and `metrics` has what came out.
        Returns: the private model, the optimizer, and a loader that gives the same batches. For type checkers they
            have the types of what was given, so that a loop stays as it was; in truth they are a `PrivateModule` and a
            `PrivateLoader`, which `engine.model` and `engine.loader` are for type checkers too.
        Warns: OptimizerWarning where parameters are frozen because the optimizer does not hold them; and where the
            plan's noise is correlated and the optimizer has another momentum, or beta of Adam, than the plan, or is
            RMSprop, Adagrad or the like: the guarantee is the same, and some of what correlation gains may be lost.
        """
        if self._training is not None:
            raise TrainingError("make_private was already called: one engine runs one plan once")
        if self._closed:
            raise TrainingError("this engine was closed: make one of its own for a run")
        checks.choice("loss_reduction", loss_reduction, {"mean", "sum"})
        accumulate = checks.integer("accumulate", accumulate, low=1)
        if micro_batch is not None:
            micro_batch = checks.integer("micro_batch", micro_batch, low=1)
        shapes = None
        if any(given is not None for given in (pad_to, pad_value, pad_side)):
            shapes = PublicShapes.of(pad_to, pad_value, pad_side, getattr(loader, "collate_fn", None))
        if like is not None and (unit is not None or getattr(loader, "batch_sampler", None) is None):
            raise ArgumentError("like is for units that are examples, from a DataLoader that makes batches of them")
        options = Options(
            unit, loss_reduction, accumulate, chunk_size, rule, non_finite, micro_batch, shapes, released, like
        )
        for one in optimizers_of(optimizer):
            warn_of_unfitted(self.plan, one, stacklevel=3)  # as it is given: a checkpoint may be of another stage
        files = {"checkpoint": self._path, "key": self._given_key, "start_over": self._start_over}
        self._training = Training(self.plan, files, model, optimizer, loader, options)
        warn_of_frozen(self._training.left_out, stacklevel=3)
        return cast(Any, self._training.model), optimizer, cast(Any, self._training.loader)

    def epsilon(self, delta: float | None = None) -> float:
        """The epsilon of the whole run at `delta` (None: the plan's), rounded up. It holds from the first step on.

        `certificate().realised` has what the steps so far come to, which is less while some are left.
        """
        at = self.plan.delta if delta is None else checks.probability("delta", delta)
        if self.is_private and self.training.release.earlier:  # with what was released before it was started over
            return self.training.release.evidence().certificate.curve.epsilon(at)
        return self.plan.epsilon if delta is None else self.plan.curve.epsilon(at)

    @property
    def is_keyed(self) -> bool:
        """True if the noise key was given, as in tests: then the run is private only from those who do not know it."""
        return self._given_key is not None

    @property
    def is_private(self) -> bool:
        """True if `make_private` was called."""
        return self._training is not None

    @property
    def training(self) -> Training:
        """The training that `make_private` bound."""
        if self._training is None:
            raise TrainingError("this engine is bound to no model yet: call make_private first")
        return self._training

    @property
    def release(self) -> Release:
        """The release that carries the plan out; it keeps ledger, noise and files."""
        return self.training.release

    @property
    def model(self) -> PrivateModule:
        """The private model; where several networks were given, the private ones in the container of these."""
        return self.training.model  # type: ignore[no-any-return]

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
        """The record of who took part in which step. It is as secret as the data."""
        return self.release.ledger

    @property
    def extra(self) -> dict[str, Any]:
        """The `extra` that was given to `save`, after a resume; else empty."""
        self._extra_is_read = True
        return self.release.extra if self.is_private else {}

    def on_release(self, callback: Callable[[int, Any], object]) -> Callable[[], None]:
        """Call `callback(step, private)` after every step, with all private gradients one behind the other.

        See `Release.on_release`. The gradients are in place when it is called; the optimizer has not moved yet.
        """
        return self.release.on_release(callback)

    def measure(self, **values: Tensor) -> None:
        """Give the metrics of the batch that the model was called on last, one value for each row: see `ao.Metrics`.

            losses = criterion(model(x), y)         # reduction="none"
            engine.measure(loss=losses)
            losses.mean().backward()

        Called between `model(x)` and the backward pass, in each batch. Each value must be a function of its own row, by
        the rules that the loss goes through; a row that fills a batch up counts for nothing.

        Raises: TrainingError where the run releases no metrics, or at another time; ArgumentError for other names or
            shapes; ModelError for values that are not known to be of their rows alone.
        """
        self.training.measuring.measure(values)

    @property
    def metrics(self) -> ReleasedMetrics:
        """The released values of the metrics that `released=` names. They are public, for schedules, plots, stops."""
        return self.training.measuring.released

    def skip(self) -> None:
        """Leave out the last batch of the loader; then call `optimizer.step()` as always.

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
        """The norm at which gradients are clipped now. With `Adaptive` it moves, by what was released: it is public.

        With `released=` it is the part of the plan's that metrics leave.
        """
        return self.training.clip_norm if self.is_private else self.plan.clip_norm

    @property
    def epoch(self) -> int:
        """Number of epochs begun and finished; for `range(engine.epoch, epochs)` after a resume. 0 for a stream."""
        return self.training.epoch

    def certificate(self, *, public_stop: bool = False) -> Certificate:
        """The claim of this run, for everybody: `save` it, and check it with `anyorder verify`. It names nobody.

        It says how units were kept apart in data set, collation, model and loss (`certificate.isolation`), and which
        weights it is of: those that the model's trained parameters have now (`certificate.weights`; not of a model of
        which each process holds a part, nor with lazy tables). `anyorder verify --model FILE` finds them in a file.
        `public_stop` is for runs that ended early: see `Release.certificate`.
        """
        evidence = self.evidence()
        return evidence.naming(evidence.shown(public_stop=public_stop), self.training.weights())

    def evidence(self) -> Evidence:
        """Return the record that backs the certificate: who took part in which step. It is as secret as the data."""
        return self.release.evidence().with_isolation(self.training.isolation)

    def save(self, extra: dict[str, Any] | None = None) -> None:
        """Write the checkpoint: one file, replaced atomically. All ranks call it, and the first one writes.

        The file holds the noise key: anyone who has it can remove the noise. Steps after the last save are repeated
        when the run is resumed, and must come out bit for bit as they were: save often.

        Args:
            extra: tensors and plain values of the user's own, found in `engine.extra` after a resume.
        Warns: CheckpointWarning where the run was resumed and nothing has read `engine.extra`: this file has no more
            of it than `extra` says.
        """
        if not self._extra_is_read and (unread := list(self.release.extra) if self.is_private else []):
            self._extra_is_read = True
            warnings.warn(
                f"the checkpoint had extra={unread}, and nothing read it after the resume, so that a scheduler, say, "
                "began at its start: load engine.extra after make_private, or look at it if it is not needed any more",
                CheckpointWarning,
                stacklevel=2,
            )
        self.training.save(extra)

    def __repr__(self) -> str:
        plan = self.plan
        claim = f"epsilon={rounded_up(plan.epsilon)}, delta={rounded_up(plan.delta, 6)}, for one {plan.unit}"
        return f"PrivacyEngine({claim}; {self._state()})"

    def _repr_html_(self) -> str:
        return html_table([("engine", self._state()), *self.plan.facts()])

    def _state(self) -> str:
        """What the run has come to, in words."""
        plan = self.plan
        if self._training is None:
            state = "closed" if self._closed else "not bound yet: call make_private(model, optimizer, loader)"
        else:
            state = f"{'closed at ' if self._closed else ''}step {self.step} of {plan.n}"
            if self._training.released is not None:
                state += f"; {self._training.released.describe()}"
        return f"{state}{'; its key was given, as in tests' if self.is_keyed else ''}"

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            hint = f": {_METHODS_OF_OPACUS[name]}" if name in _METHODS_OF_OPACUS else ""
            raise AttributeError(f"PrivacyEngine has no {name!r}{hint}", name=name, obj=self)

    def close(self) -> None:
        """Let another process resume this run. The end of the process does the same."""
        self._closed = True
        if self._training is not None:
            self.release.close()
