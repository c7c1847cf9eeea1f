"""Lightning: a callback that makes a LightningModule's training private."""

import warnings
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from anyorder import checks
from anyorder.errors import ArgumentError, CheckpointError, OptimizerWarning, TrainingError
from anyorder.plan.plan import Plan
from anyorder.sampling.loader import PrivateLoader
from anyorder.sampling.read_loader import Unit
from anyorder.training.engine import PrivacyEngine, check_unit
from anyorder.training.metrics import Metrics
from anyorder.training.optimizers import Public

__all__ = ["PrivacyCallback"]

_lightning = checks.optional("lightning", extra="lightning", purpose="PrivacyCallback")


class PrivacyCallback(_lightning.pytorch.Callback):  # type: ignore[misc, name-defined]
    """Runs a plan inside `lightning.Trainer.fit`, with automatic optimization.

        privacy = PrivacyCallback(plan, network="net")
        module, loader = privacy.make_private(module, loader)
        Trainer(max_epochs=epochs, callbacks=[privacy]).fit(module, loader)
        privacy.engine.certificate().save("run.privacy.json")

    `training_step` stays as it is, with two duties: it calls `self.net` for the outputs, and its loss is a sum or a
    mean over examples of a loss of each example alone. What `self.log` is given goes exactly into files, the choice of
    checkpoints, stops and schedules: what is neither an `ao.Public` number nor named in `public_metrics` is left out,
    with one warning. `gradient_clip_val` does nothing more than the plan's clip norm.

    Args:
        plan: what to run.
        network: attribute of the LightningModule that holds all trainable parameters as one module.
        checkpoint: file of the privacy state, written with every checkpoint of Lightning. `make_private` resumes from
            it if it exists; then give `fit` the `ckpt_path` that was saved with it.
        unit: None for examples; for users, where a batch keeps the key of each example's user: see
            `PrivacyEngine.make_private`, which also says what `loss_reduction`, `chunk_size` and `rule` are.
        accumulate: micro-batches in a step: the same number as the Trainer's `accumulate_grad_batches`.
        key: see `PrivacyEngine`; leave it out.
        released: metrics that are released with each gradient, `ao.Metrics({"loss": 4.0})`: `training_step` calls
            `privacy.engine.measure(loss=losses)` with one value for each example, and each epoch's mean of what was
            released is logged under these names. Callbacks and schedulers may monitor them.
        public_metrics: names that are logged, and that callbacks and schedulers may monitor: of data that need no
            protection, as validation rows of people who are not in the training data, or of settings.

    Attributes:
        engine: the engine, once `make_private` was called.
    """

    def __init__(
        self,
        plan: Plan,
        *,
        network: str,
        unit: Unit = None,
        accumulate: int = 1,
        checkpoint: str | Path | None = None,
        loss_reduction: str = "mean",
        key: bytes | None = None,
        public_metrics: Collection[str] = (),
        released: Metrics | None = None,
        **options: Any,
    ) -> None:
        self.engine = PrivacyEngine(plan, checkpoint=checkpoint, key=key)
        check_unit(plan, unit)
        self._network, self._saves, self._accumulate = network, checkpoint is not None, accumulate
        if isinstance(public_metrics, str):
            raise ArgumentError(f"public_metrics must be a list of names, got the string {public_metrics!r}")
        self._public, self._left_out = frozenset(public_metrics), set[str]()
        self._released, self._logged = released, 0
        self._options = {
            "unit": unit, "accumulate": accumulate, "loss_reduction": loss_reduction, "released": released, **options,
        }  # fmt: skip

    def make_private(self, module: Any, loader: Any) -> tuple[Any, PrivateLoader]:
        """Bind the module's network and optimizer and the loader to the plan, before `fit`.

        Returns: the module, whose `configure_optimizers` now gives the bound optimizer, and the loader for `fit`.
        Raises: ArgumentError if there is no such network, several optimizers, or manual optimization.
        """
        net = getattr(module, self._network, None)
        if not isinstance(net, nn.Module):
            raise ArgumentError(f"network must name a module of {type(module).__name__}, got {self._network!r}")
        if not module.automatic_optimization:
            raise ArgumentError(
                "manual optimization needs no callback: use PrivacyEngine.make_private in your loop, on the network, "
                "its optimizer and the loader"
            )
        inside = {id(p) for p in net.parameters()}  # a layer may have a second name outside
        outside = {name for name, p in module.named_parameters() if p.requires_grad and id(p) not in inside}
        if outside:
            raise ArgumentError(
                f"network {self._network!r} must hold all trainable parameters, but {', '.join(sorted(outside))} "
                "are outside: their gradients would not be private; move them into it or freeze them. In a GAN take "
                "manual optimization, and PrivacyEngine.make_private on the discriminator alone"
            )
        net.train()  # fit keeps the modes that it finds, and in evaluation no gradient is made
        configured = module.configure_optimizers()
        net, _, private_loader = self.engine.make_private(net, _optimizer(configured), loader, **self._options)
        self._logged = self.engine.step
        setattr(module, self._network, net)
        module.configure_optimizers = lambda: configured
        module.log = self._logging(module.log)
        step = module.lr_scheduler_step
        module.lr_scheduler_step = lambda scheduler, metric: step(scheduler, self._of_schedule(metric))
        return module, private_loader

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Refuse a search for the learning rate before it begins: it goes by exact losses."""
        del pl_module
        finder = _lightning.pytorch.callbacks.LearningRateFinder
        if stage == "fit" and any(isinstance(one, finder) for one in trainer.callbacks):
            raise ArgumentError(
                "LearningRateFinder trains on the data and sets the rate by losses without noise: choose it on data "
                "that need no protection, or search with ao.tune, which pays for it"
            )

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Refuse a run that does not begin where the privacy state is, or goes by metrics that may not be public."""
        del pl_module
        if not self.engine.is_private:
            raise TrainingError("call make_private(module, loader) before fit, and give fit what it returns")
        if trainer.world_size != 1:
            raise ArgumentError(f"fit must run in one process, got {trainer.world_size}: use PrivacyEngine for several")
        if trainer.accumulate_grad_batches != self._accumulate:
            raise ArgumentError(
                f"accumulate_grad_batches must be the callback's accumulate={self._accumulate}, got "
                f"{trainer.accumulate_grad_batches}: give both the same number, and plan for batches of that many"
            )
        if trainer.global_step != self.engine.step:
            raise CheckpointError(
                f"Lightning would go on at step {trainer.global_step}, the privacy state is at step "
                f"{self.engine.step}: give fit the ckpt_path that was saved last"
            )
        plateaus = [(each.scheduler, each.monitor) for each in trainer.lr_scheduler_configs if each.reduce_on_plateau]
        for one, monitor in [*plateaus, *((one, getattr(one, "monitor", None)) for one in trainer.callbacks)]:
            if isinstance(monitor, str) and not self._is_public(monitor) and monitor not in self._names:
                raise ArgumentError(
                    f"{type(one).__name__} goes by {monitor!r}, and nobody said that it is public: a metric of the "
                    "training data, or of other data of the same people, would decide without noise. If it is measured "
                    f"on data that need no protection: PrivacyCallback(.., public_metrics=[{monitor!r}])"
                )

    @property
    def _names(self) -> Collection[str]:
        """Of the released metrics. What the module itself logs under them is left out, but for `ao.Public` numbers."""
        return () if self._released is None else self._released.bounds.keys()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any, **kwargs: Any) -> None:
        """Log what was released of the metrics of a step, for its epoch's mean."""
        del trainer, args, kwargs
        if self.engine.step > self._logged:
            self._logged = self.engine.step
            for name in self._names:
                value = self.engine.metrics.mean(name, steps=1)
                pl_module.log(name, value, on_step=False, on_epoch=True, batch_size=1)

    def _is_public(self, name: str) -> bool:
        """Whether a name is one of `public_metrics`, as Lightning writes it for steps, epochs and loaders."""
        whole = name.partition("/dataloader_idx_")[0]
        return not self._public.isdisjoint({name, whole, whole.removesuffix("_epoch"), whole.removesuffix("_step")})

    def _logging(self, log: Callable[..., None]) -> Callable[..., None]:
        """The module's `log`, of public numbers alone."""

        def public_alone(name: str, value: Any, *args: Any, **kwargs: Any) -> None:
            if isinstance(value, Public) or self._is_public(name):
                return log(name, value, *args, **kwargs)
            if name not in self._left_out:
                self._left_out.add(name)
                warnings.warn(
                    f"{name!r} is not logged: nobody said that it is public. If it tells nothing of the training data "
                    f"or of their people: PrivacyCallback(.., public_metrics=[{name!r}]), or log ao.Public(value)",
                    OptimizerWarning,
                    stacklevel=3,
                )
            return None

        return public_alone

    def _of_schedule(self, metric: Any) -> Any:
        """What a schedule goes by: `on_train_start` saw that its name is public."""
        return None if metric is None else Public(metric)

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Tensor) -> None:
        """Undo that Lightning divides by the number of micro-batches: the plan's batch size is the only divisor."""
        del trainer, pl_module
        if self._accumulate > 1:
            with torch.enable_grad():
                loss.mul_(self._accumulate)

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        """Bring lazy tables up to date, which may not be read before; see `PrivacyEngine.flush`."""
        del trainer, pl_module
        self.engine.flush()

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """As before a validation: checkpoints of the epoch's end come after it."""
        del trainer, pl_module
        self.engine.flush()

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Save the privacy state next to Lightning's."""
        del trainer, pl_module, checkpoint
        if self._saves:
            self.engine.save()


def _optimizer(configured: Any) -> Optimizer:
    """The one optimizer among what `configure_optimizers` may return."""
    found = configured
    if isinstance(found, dict):
        found = found.get("optimizer")
    while isinstance(found, list | tuple) and found and (len(found) == 1 or isinstance(found[0], list | tuple)):
        found = found[0]
    if not isinstance(found, Optimizer):
        raise ArgumentError(f"configure_optimizers must give one optimizer, got {configured!r}")
    return found
