"""Hugging Face: `transformers.Trainer` with private gradients."""

import copy
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import MISSING, fields
from math import ceil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from anyorder import checks
from anyorder.clipping.norms import Rule
from anyorder.clipping.torch_private import check_names
from anyorder.errors import ArgumentError, CheckpointError, LoaderError, ModelError
from anyorder.plan.plan import Plan
from anyorder.release.journal import Journal
from anyorder.sampling import UnitOrderSampler
from anyorder.sampling.batch_classes import fields_of
from anyorder.sampling.loader import PrivateLoader
from anyorder.sampling.shapes import PadTo
from anyorder.training.engine import PrivacyEngine, PrivateModule, check_unit, random_state, set_random_state
from anyorder.training.metrics import Metrics
from anyorder.training.optimizers import Public
from anyorder.training.trainers.preferences import (
    Pairs,
    all_rows,
    fills,
    has_loss,
    has_pairs,
    losses_of,
    quiet,
    trl_kind,
)

__all__ = ["PrivateTrainer", "PrivateTrainerMixin", "example_losses"]

TRAINER = (
    "_get_collator_with_removed_columns", "_get_train_sampler", "_init_training_state", "_load_rng_state",
    "_prepare_inputs", "_remove_unused_columns", "_save_checkpoint", "_save_rng_state",
)  # fmt: skip
"""What PrivateTrainer calls or replaces of transformers.Trainer; a save that is not called would lose the ledger."""

_transformers = checks.optional("transformers", extra="huggingface", purpose="PrivateTrainer")
check_names(_transformers.Trainer, TRAINER, _transformers)

_SHOWN = ("learning_rate", "epoch", "step", "train_runtime")
"""What is logged and returned of a training: functions of settings and of the number of steps, and whole seconds.

Not the loss, the norm of gradients, counts of operations and tokens, and rates by the second: the data are in them.
"""

_STATE = (
    "epoch", "global_step", "max_steps", "logging_steps", "eval_steps", "save_steps", "train_batch_size",
    "num_train_epochs", "log_history", "best_metric", "best_global_step", "best_model_checkpoint",
    "is_local_process_zero", "is_world_process_zero", "is_hyper_param_search", "trial_name", "trial_params",
    "stateful_callbacks",
)  # fmt: skip
"""What of a TrainerState may stay: settings, counts of steps, what was logged, the best of metrics that are public."""

_IGNORE = -100  # label of tokens that do not count, as transformers has it
_DECODER = ("decoder_input_ids", "decoder_inputs_embeds")
_PADS = (
    "DataCollatorWithPadding",
    "DataCollatorForTokenClassification",
)  # outputs of other models are as long as texts
_NO_LONGEST = 10**9  # of a tokenizer that states none
_BY_METRIC = ("reduce_lr_on_plateau", "greedy")
_OF_EVALUATION = (
    "metrics of an evaluation go exactly into logs, files, schedules and choices: evaluate on data that need no "
    "protection, not on rows of those who are in train_dataset, and say so with public_evaluation=True; or leave out "
    "what goes by them"
)
_LIBRARIES = ("transformers", "trl")  # whose losses are replaced by `example_losses`
_CHECKPOINT = "_privacy.checkpoint"  # an underscore: the hub is not sent such files


def example_losses(outputs: Any, labels: Tensor, label_smoothing: float = 0.0) -> Tensor:
    """Cross-entropy of each example alone, (B,): the mean over its own tokens where the model is a language model.

    A mean over all tokens of the batch would divide one example's loss by the length of the others, which no clipping
    of gradients can bound; so the loss that a model computes of its `labels` is not used.

    Args:
        outputs: of the model; its `logits` are (B, classes), (B, tokens, vocabulary), or (B,) and (B, 1) for a number.
        labels: (B,) classes or numbers, or (B, tokens). With as many tokens as labels, token i of a causal model is
            read against label i + 1 by the Trainer, which shifts both before it calls this.
        label_smoothing: the share of each label that goes to all classes alike, in [0, 1].
    Raises: ModelError where no loss is known for such outputs and labels.
    """
    logits = outputs["logits"] if isinstance(outputs, dict) else outputs[0]
    if label_smoothing and (labels.is_floating_point() or logits.shape == labels.shape):
        raise ModelError(
            "label_smoothing_factor is for labels that are classes; leave it 0, or override example_losses"
        )
    if labels.is_floating_point() or logits.shape == labels.shape:
        errors = F.mse_loss(logits.reshape(labels.shape), labels.to(logits.dtype), reduction="none")
        return errors.reshape(len(labels), -1).mean(1)
    if logits.dim() == 2:
        return F.cross_entropy(logits, labels.reshape(-1), reduction="none", label_smoothing=label_smoothing)
    if logits.dim() != 3 or labels.shape != logits.shape[:2]:
        raise ModelError(
            f"no loss is known for logits {tuple(logits.shape)} and labels {tuple(labels.shape)}; override "
            "example_losses(outputs, labels) of the trainer with one that returns a loss for each example"
        )
    losses = F.cross_entropy(
        logits.transpose(1, 2), labels, reduction="none", ignore_index=_IGNORE, label_smoothing=label_smoothing
    )
    counted = (labels != _IGNORE).sum(1).clamp(min=1)
    return losses.sum(1) / counted


class _WholeEpochs:
    """The private loader, with the length of an epoch also where a resumed run has only a part of it before it."""

    def __init__(self, loader: PrivateLoader) -> None:
        self._loader = loader
        self.dataset = loader.dataset

    def __iter__(self) -> Iterator[Any]:
        return iter(self._loader)

    def __len__(self) -> int:
        return self._loader.batches_per_epoch or len(self._loader)


class _KeptKeys:
    """A collator that is not shown the key of each example's unit, and whose batches have the keys in a list."""

    def __init__(self, collate: Any, column: str) -> None:
        self._collate, self._column = collate, column

    def __call__(self, examples: list[Any]) -> Any:
        if not all(isinstance(example, dict) and self._column in example for example in examples):
            raise LoaderError(
                f"unit={self._column!r} must name a column of train_dataset, a field of each example; the first has "
                f"{list(examples[0]) if isinstance(examples[0], dict) else type(examples[0]).__name__}. What prepares "
                "the data must keep the column"
            )
        keys = [example[self._column] for example in examples]
        batch = self._collate([{k: v for k, v in example.items() if k != self._column} for example in examples])
        batch[self._column] = [key.item() if hasattr(key, "item") else key for key in keys]
        return batch


class _LastFilter(_transformers.TrainerCallback):  # type: ignore[misc, name-defined]
    """Leaves out of a log what a trainer between the private one and transformers' own put into it: TRL's metrics."""

    def __init__(self, shown: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
        self._shown = shown

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any], **kwargs: Any) -> None:
        for name in logs.keys() - self._shown(logs).keys():
            del logs[name]
            state.log_history[-1].pop(name)


class PrivateTrainerMixin:
    """Makes a Trainer private: `class MyTrainer(PrivateTrainerMixin, Seq2SeqTrainer)`; see `PrivateTrainer`."""

    def __init__(
        self,
        *args: Any,
        plan: Plan,
        unit: str | None = None,
        batch_sampler: UnitOrderSampler | None = None,
        key: bytes | None = None,
        chunk_size: int | None = None,
        micro_batch: int | None = None,
        rule: Rule | None = None,
        pad_to: PadTo = None,
        pad_value: float | Mapping[Any, float] | None = None,
        pad_side: str | None = None,
        like: Any = None,
        public_evaluation: bool = False,
        released: Metrics | None = None,
        **kwargs: Any,
    ) -> None:
        self.plan = plan
        self.engine: PrivacyEngine | None = None
        self._private: PrivateModule | None = None
        if not (unit is None or isinstance(unit, str)):
            raise ArgumentError(f"unit must be the name of a column of train_dataset, got {unit!r}")
        check_unit(plan, unit)
        if batch_sampler is not None and unit is None:
            raise ArgumentError("batch_sampler keeps units together: give unit=, the name of their column, too")
        self._unit, self._batch_sampler = unit, batch_sampler
        self._engine_key = key
        self._evaluates, self._evaluating = public_evaluation, False
        self._options: dict[str, Any] = {"chunk_size": chunk_size, "micro_batch": micro_batch, "rule": rule}
        self._released, self._logged = released, 0
        self._padding: dict[str, Any] = {
            "pad_to": pad_to, "pad_value": pad_value, "pad_side": pad_side, "like": like
        }  # fmt: skip
        given = inspect.signature(super().__init__).bind_partial(*args, **kwargs).arguments.get("args")
        if getattr(given, "push_to_hub", False):  # before a repository is made
            raise ArgumentError(
                "push_to_hub must be off: it uploads output_dir, where the noise key is kept; upload the finished "
                "model with model.push_to_hub(..)"
            )
        with quiet() if trl_kind(self) else nullcontext():
            super().__init__(*args, **kwargs)
        self._check_arguments(self.args)  # type: ignore[attr-defined]
        self._check_choices()
        trainer: Any = self
        kind = trl_kind(self)
        self._has_pairs = has_pairs(kind)
        self._losses = None if self._has_own_loss() else losses_of(self, kind)
        self._check_experts()
        trainer.callback_handler.callbacks.insert(0, _LastFilter(self._shown))
        self.args.ignore_data_skip = True  # type: ignore[attr-defined]  # the private loader finds its place itself

    def _check_arguments(self, args: Any) -> None:
        if args.n_gpu > 1:
            raise ArgumentError(f"one process must have one device, got {args.n_gpu}: start it with torchrun")
        if args.include_num_input_tokens_seen != "no":
            raise ArgumentError("include_num_input_tokens_seen must be 'no': counts of tokens are releases too")
        if args.train_sampling_strategy == "group_by_length":
            raise ArgumentError("train_sampling_strategy 'group_by_length' makes the order depend on the data")
        if getattr(args, "packing", False) or getattr(args, "padding_free", False):
            raise ArgumentError("packing and padding_free join examples in a row, so that no gradient is of one alone")
        self._check_batch_size(args)

    def _prepare_dataset(self, dataset: Any, *args: Any, **kwargs: Any) -> Any:
        """TRL's, with one example for each row of train_dataset."""
        prepare = functools.partial(super()._prepare_dataset, dataset, *args, **kwargs)  # type: ignore[misc]
        names = [each for each in (*args, *kwargs.values()) if isinstance(each, str)]
        return all_rows(dataset, prepare) if "train" in names else prepare()

    def _check_experts(self) -> None:
        """Refuse the loss that balances experts, which counts the tokens of the whole batch."""
        config: Any = getattr(self.model, "config", None)  # type: ignore[attr-defined]
        text = config.get_text_config() if hasattr(config, "get_text_config") else config
        if getattr(text, "output_router_logits", False) or getattr(self, "aux_loss_enabled", False):
            raise ArgumentError(
                "the auxiliary loss of a mixture of experts must be off: it balances experts over the tokens of the "
                "whole batch, so that one example moves the gradients of others. Set output_router_logits=False in "
                "the model's config, and router_aux_loss_coef=0.0 in arguments of TRL"
            )

    def _check_choices(self) -> None:
        """Refuse what goes by measured numbers, unless they are said to be public."""
        trainer: Any = self
        args = trainer.args
        goes_by = {
            "eval_strategy": str(getattr(args.eval_strategy, "value", args.eval_strategy)) != "no",
            "load_best_model_at_end": args.load_best_model_at_end,
            "metric_for_best_model": args.metric_for_best_model is not None,
            "save_strategy 'best'": str(getattr(args.save_strategy, "value", args.save_strategy)) == "best",
            "lr_scheduler_type": str(getattr(args.lr_scheduler_type, "value", "")) in _BY_METRIC,
            "EarlyStoppingCallback": any(
                isinstance(each, _transformers.EarlyStoppingCallback) for each in trainer.callback_handler.callbacks
            ),
        }
        found = [name for name, is_set in goes_by.items() if is_set]
        if found and not self._evaluates:
            raise ArgumentError(f"{_OF_EVALUATION}; got {', '.join(found)}")

    def _check_batch_size(self, args: Any) -> None:
        sampler, given = self._batch_sampler, args.per_device_train_batch_size
        if sampler is not None and sampler.batch_size != given:
            raise ArgumentError(
                f"per_device_train_batch_size must be that of batch_sampler, {sampler.batch_size}, got {given}"
            )
        whole = given * args.gradient_accumulation_steps * args.world_size
        if self._unit is None and whole != self.plan.batch_size:
            raise ArgumentError(
                "per_device_train_batch_size times gradient_accumulation_steps times processes must be the plan's "
                f"batch_size={self.plan.batch_size}, got {whole}"
            )

    def get_train_dataloader(self) -> Any:
        """The loader of the private engine; model and optimizer are bound to the plan with it."""
        if self.engine is not None:
            raise ArgumentError("train() was already called: a plan is for one run; make a new trainer to resume")
        trainer: Any = self
        args = trainer.args
        loader = self._plain_loader(args, trainer.train_dataset)
        trainer.create_optimizer()
        path = Path(args.output_dir) / _CHECKPOINT
        if Journal.has_steps(path) and not self._resumes:
            raise CheckpointError(
                f"{path} is of an earlier run, which took steps; call train(resume_from_checkpoint=True), or choose "
                "another output_dir"
            )
        path.parent.mkdir(parents=True, exist_ok=True)
        own: Any = None
        if path.exists() and not self._resumes:  # begun by a program that was refused before its first step
            own = copy.deepcopy((trainer.model.state_dict(), trainer.optimizer.state_dict()))
        self.engine = PrivacyEngine(self.plan, checkpoint=path, key=self._engine_key)
        overridden = type(self).compute_loss is not PrivateTrainerMixin.compute_loss or self._has_own_loss()
        self._reduction = "mean" if overridden else "sum"
        self.engine.make_private(
            trainer.model, trainer.optimizer, loader, unit=self._unit, loss_reduction=self._reduction,
            accumulate=args.gradient_accumulation_steps, released=self._released, **self._options, **self._lengths(),
        )  # fmt: skip
        if own is not None and self.engine.step == 0:  # nothing was released: weights and settings are today's
            trainer.model.load_state_dict(own[0])
            trainer.optimizer.load_state_dict(own[1])
            self.engine.save()
        if self._unit is not None:
            self.engine.loader.show = self._without_keys(self.engine.loader.show)
        self._logged = self.engine.step
        self._random = random_state()  # of the checkpoint, where there is one; the Trainer draws before its first step
        self._private = self.engine.model
        self._private.training = True  # the Trainer sets modes on its own model; eval() ones come from from_pretrained
        return _WholeEpochs(self.engine.loader)

    def _without_keys(self, show: Callable[..., Any]) -> Callable[..., Any]:
        """Batches without the keys of units, which the engine has read: of a batch that has more than tensors nothing
        is proved.
        """
        key = self._unit
        return lambda batch, *more: show({name: x for name, x in fields_of(batch).items() if name != key}, *more)

    def _lengths(self) -> dict[str, Any]:
        """The public lengths of examples; where the collator only pads, up to the longest that its tokenizer states."""
        collator: Any = self.data_collator  # type: ignore[attr-defined]
        config: Any = getattr(self.model, "config", None)  # type: ignore[attr-defined]
        longest = getattr(getattr(collator, "tokenizer", None), "model_max_length", _NO_LONGEST)
        longest = min(longest, getattr(config, "max_position_embeddings", None) or longest)
        if self._padding["pad_to"] is None and type(collator).__name__ in _PADS and longest < _NO_LONGEST:
            return {**self._padding, "pad_to": longest}
        if self._padding["pad_to"] is not None and self._padding["pad_value"] is None and self._has_pairs:
            return {**self._padding, "pad_value": fills(getattr(collator, "pad_token_id", 0))}
        return self._padding

    def _plain_loader(self, args: Any, dataset: Any) -> DataLoader[Any]:
        """The Trainer's own, with the keys of units in its batches."""
        trainer: Any = self
        collate: Any = Pairs(trainer.data_collator) if self._has_pairs else trainer.data_collator
        if self._unit is not None:
            collate = _KeptKeys(trainer._get_collator_with_removed_columns(collate, description="training"), self._unit)
        elif hasattr(dataset, "column_names"):
            dataset = trainer._remove_unused_columns(dataset, description="training")
        else:
            collate = trainer._get_collator_with_removed_columns(collate, description="training")
        sampler = self._batch_sampler
        if sampler is None:
            return DataLoader(
                dataset, args.per_device_train_batch_size, sampler=trainer._get_train_sampler(dataset),
                collate_fn=collate, drop_last=args.dataloader_drop_last, num_workers=args.dataloader_num_workers,
            )  # fmt: skip
        if len(sampler.indices) != len(dataset):
            raise ArgumentError(
                f"batch_sampler must be made of the keys of train_dataset, {len(dataset)}, got "
                f"{len(sampler.indices)}; where the trainer prepares the data and drops examples, drop them before"
            )
        return DataLoader(dataset, batch_sampler=sampler, collate_fn=collate, num_workers=args.dataloader_num_workers)

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Train. To resume, use the last checkpoint of this run: the plan's noise goes on from there."""
        self._resumes = bool(resume_from_checkpoint)
        self._check_choices()  # callbacks may have come since
        if resume_from_checkpoint is True and self._ended_before_a_save():
            resume_from_checkpoint = None  # from the start, and the engine holds each step to what was released
        found = super().train(resume_from_checkpoint, *args, **kwargs)  # type: ignore[misc]
        means = {f"train_{name}": value for name, value in self._means(since=0).items()}
        return found._replace(metrics=self._shown(found.metrics | means))

    def _ended_before_a_save(self) -> bool:
        """Whether output_dir has the privacy checkpoint that a run begins with, and none of the Trainer's."""
        folder = self.args.output_dir  # type: ignore[attr-defined]
        last = _transformers.trainer_utils.get_last_checkpoint
        return (Path(folder) / _CHECKPOINT).exists() and last(folder) is None

    def _init_training_state(self, *args: Any, **kwargs: Any) -> Any:
        found = super()._init_training_state(*args, **kwargs)  # type: ignore[misc]
        engine, trainer = self._bound(), self
        if trainer.state.global_step != engine.step:  # type: ignore[attr-defined]
            raise CheckpointError(
                f"the trainer would go on at step {trainer.state.global_step}, "  # type: ignore[attr-defined]
                f"the privacy checkpoint is of step {engine.step}: resume from the last checkpoint that was saved"
            )
        return found

    def compute_loss(
        self, model: nn.Module, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Return, in training, the sum of `example_losses` of the private model, or the user's loss; else as before.

        A `compute_loss` of one's own gets the private model and no count of tokens, and gives the mean over examples.
        """
        if not (model.training and torch.is_grad_enabled()):
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)  # type: ignore[misc]
        if self._has_own_loss():
            return super().compute_loss(self._private, inputs, return_outputs, None)  # type: ignore[misc]
        if self._losses is not None:
            return self._reduced(self._losses(self, self._private, inputs), None, None, return_outputs)
        if "labels" not in inputs:
            raise ModelError("the batch must have labels, so that each example's loss can be computed on its own")
        assert self._private is not None
        labels = inputs["labels"]
        given = {name: value for name, value in inputs.items() if name != "labels"}
        outputs = self._private(**given, **self._decoder_inputs(given, labels))
        return self._reduced(self.example_losses(outputs, labels), outputs, labels, return_outputs)

    def _reduced(self, losses: Tensor, outputs: Any, labels: Any, return_outputs: bool) -> Any:
        """The loss of a batch, whose metrics are released where the plan says so."""
        if self._released is not None:
            self._bound().measure(**self.example_metrics(outputs, labels, losses))
        loss = losses.sum() if self._reduction == "sum" else losses.mean()
        return (loss, outputs) if return_outputs else loss

    def _has_own_loss(self) -> bool:
        """Whether compute_loss_func is given, or a user's trainer that this one is made private of has compute_loss."""
        mro = type(self).__mro__
        behind = mro[mro.index(PrivateTrainerMixin) + 1 :]
        own = [one for one in behind if has_loss(one) and one.__module__.split(".")[0] not in _LIBRARIES]
        return bool(own) or self.compute_loss_func is not None  # type: ignore[attr-defined]

    def _decoder_inputs(self, given: dict[str, Any], labels: Tensor) -> dict[str, Any]:
        """What a sequence-to-sequence model makes of labels that it is given, and it is given none: labels, shifted."""
        model: Any = self.model  # type: ignore[attr-defined]
        of_tokens = labels.dim() == 2 and not labels.is_floating_point()
        if not (model.config.is_encoder_decoder and of_tokens) or given.keys() & set(_DECODER):
            return {}
        shift = getattr(model, "prepare_decoder_input_ids_from_labels", None)
        if shift is None:
            raise ModelError(
                f"{type(model).__name__} makes its decoder's inputs of the labels, which it is not given here; let the "
                "data collator return decoder_input_ids too: the labels, shifted to the right"
            )
        return {"decoder_input_ids": shift(labels=labels)}

    def example_losses(self, outputs: Any, labels: Tensor) -> Tensor:
        """(B,) the loss of each example by itself. Override it for other losses."""
        logits, smoothing = outputs["logits"], self.args.label_smoothing_factor  # type: ignore[attr-defined]
        if getattr(self.model.config, "problem_type", None) == "multi_label_classification":  # type: ignore[attr-defined]
            if smoothing:
                raise ModelError("label_smoothing_factor is for labels that are classes; leave it 0")
            losses = F.binary_cross_entropy_with_logits(logits, labels.to(logits.dtype), reduction="none")
            return losses.mean(1)
        if self._is_causal() and logits.dim() == 3:
            logits = logits[:, -labels.shape[1] :]  # prompt tuning puts tokens of its own in front
            outputs, labels = {"logits": logits[:, :-1]}, labels[:, 1:]
        return example_losses(outputs, labels, smoothing)

    def example_metrics(self, outputs: Any, labels: Tensor, losses: Tensor) -> dict[str, Tensor]:
        """{name: (B,) values} of the metrics that `released=` names; the loss. Override it for further ones."""
        del outputs, labels
        return {"loss": losses}

    def _means(self, since: int) -> dict[str, Public]:
        """The released metrics, each a mean over the steps after this one; none where there is no step."""
        if self._released is None or self._bound().step == since:
            return {}
        metrics = self._bound().metrics
        return {name: metrics.mean(name, metrics.steps - since) for name in self._released.bounds}

    def get_batch_samples(self, epoch_iterator: Iterator[Any], num_batches: int, *args: Any) -> Any:
        """The micro-batches of a step; where the loader ends within it, empty ones follow, so that it is made."""
        samples, _ = super().get_batch_samples(epoch_iterator, num_batches, *args)  # type: ignore[misc]
        missing = num_batches - len(samples) if samples else 0
        return [*samples, *({} for _ in range(missing))], None  # no count of the batch's tokens, which would couple

    def training_step(self, model: nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Tensor:
        """A step whose loss is not passed on: what is printed would be a release that the plan does not cover."""
        if not inputs:
            return torch.zeros((), device=self.args.device)  # type: ignore[attr-defined]
        self._bound().loader.use(inputs)  # the Trainer fetches all micro-batches of a step before it copies them
        # The Trainer divides the loss of a micro-batch by their number, which would let gradients slip below the clip
        # norm; the plan's batch size is the only divisor.
        self.current_gradient_accumulation_steps = 1
        del model
        loss: Tensor = super().training_step(self._private, inputs, *args, **kwargs)  # type: ignore[misc]
        return torch.zeros_like(loss)

    def _prepare_inputs(self, inputs: Any) -> Any:
        if self._unit is not None and isinstance(inputs, Mapping):
            inputs = {name: value for name, value in inputs.items() if name != self._unit}  # not for the model
        return super()._prepare_inputs(inputs)  # type: ignore[misc]

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """The Trainer's log, of what `_SHOWN` has, what is `ao.Public`, and metrics of a public evaluation.

        Where the Trainer logs its exact loss, released metrics take its place: means over the steps since the last log.
        """
        if "loss" in logs and not self._evaluating:
            logs = logs | self._means(self._logged)
            self._logged = self._bound().step
        super().log(self._shown(logs), *args, **kwargs)  # type: ignore[misc]

    def _shown(self, found: dict[str, Any]) -> dict[str, Any]:
        if self._evaluating:
            return found
        kept = {name: value for name, value in found.items() if name in _SHOWN or isinstance(value, Public)}
        return {name: ceil(value) if name == "train_runtime" else value for name, value in kept.items()}

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """The Trainer's, of data that need no protection: `public_evaluation=True` says so. Its metrics are public."""
        if not self._evaluates:
            raise ArgumentError(_OF_EVALUATION)
        self._evaluating = True
        try:
            found: dict[str, float] = super().evaluate(*args, **kwargs)  # type: ignore[misc]
        finally:
            self._evaluating = False
        return {name: Public(value) if isinstance(value, float) else value for name, value in found.items()}

    def floating_point_ops(self, inputs: Any) -> int:
        """0: the number of operations follows from the lengths of texts, and would stand in files that are shown."""
        del inputs
        return 0

    def save_state(self) -> None:
        """The Trainer's, of what may be shown."""
        self._clear_state()
        super().save_state()  # type: ignore[misc]

    def _clear_state(self) -> None:
        """Set what is not known to be public to what it was before the training."""
        state: Any = self.state  # type: ignore[attr-defined]
        for each in fields(state):
            if each.name not in _STATE:
                setattr(state, each.name, None if each.default is MISSING else each.default)

    def push_to_hub(self, *args: Any, **kwargs: Any) -> Any:
        """Refused: output_dir holds the noise key."""
        raise ArgumentError("push_to_hub uploads output_dir, where the noise key is kept; use model.push_to_hub(..)")

    def _save_rng_state(self, *args: Any, **kwargs: Any) -> None:
        """Nothing: how many numbers were drawn depends on the data. The privacy checkpoint has it, and is secret."""

    def _load_rng_state(self, *args: Any, **kwargs: Any) -> None:
        set_random_state(self._random)

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        self._clear_state()
        super()._save_checkpoint(*args, **kwargs)  # type: ignore[misc]
        self._bound().save()

    def _is_causal(self) -> bool:
        name = type(self.model).__name__  # type: ignore[attr-defined]
        return "CausalLM" in name or "LMHead" in name

    def _bound(self) -> PrivacyEngine:
        assert self.engine is not None
        return self.engine


class PrivateTrainer(PrivateTrainerMixin, _transformers.Trainer):  # type: ignore[misc, name-defined]
    """`transformers.Trainer` whose gradients are those of a `PrivacyEngine`.

        trainer = PrivateTrainer(model, training_arguments, train_dataset=data, plan=plan)
        trainer.train()
        trainer.engine.certificate().save("run.privacy.json")

    Each example's loss is computed on its own (`example_losses`, with `label_smoothing_factor`), or by a
    `compute_loss` or `compute_loss_func` of yours, which gives the mean over examples and is refused where it couples
    them. In the place of TRL's `compute_loss` stands the same loss of each example alone: of SFTTrainer, DPOTrainer,
    RewardTrainer, ORPOTrainer and KTOTrainer (`apo_zero_unpaired`), a pair being one example; other trainers of TRL
    need a `compute_loss` of yours, whose batch has a pair as a row of fields chosen_* and rejected_*. Gradients are
    clipped to the plan's clip norm and get the plan's noise; `max_grad_norm` does nothing more. Losses of training,
    norms of gradients, counts of operations and rates by the second are in no log, file or result: they would be
    releases. Evaluation is the Trainer's, and for data that need no protection: `public_evaluation=True` says that
    they are such. Without it `evaluate()`, `eval_strategy`, `load_best_model_at_end`, `metric_for_best_model`,
    EarlyStoppingCallback and schedules by a metric are refused. What code of your own logs is left out, unless it is
    `ao.Public`.

    With `save_strategy`, the privacy state is saved in `output_dir` next to each checkpoint, and
    `train(resume_from_checkpoint=True)` in a new trainer goes on from the last of them. Where there is none yet it goes
    on from the start, and repeats exactly what was released. A run that was refused before its first step needs no
    more than `train()`.

    A step is `gradient_accumulation_steps` micro-batches of `per_device_train_batch_size` examples. Where memory is
    short: `chunk_size` bounds gradients, micro-batches bound activations too; the sums are the same.

    For users rather than examples, `unit` names the column of train_dataset that says whose an example is. The column
    never reaches collator or model. All examples of a user in a step are clipped together, and must be in one
    micro-batch of it:

        by_user = ao.sampling.UnitOrderSampler(data["user_id"], batch_size=16, seed=1)
        keys = DataLoader(data.select_columns("user_id"), batch_sampler=by_user)
        plan = ao.plan(loader=keys, unit="user_id", epochs=2, epsilon=8, delta=1e-5)
        trainer = PrivateTrainer(.., train_dataset=data, plan=plan, unit="user_id", batch_sampler=by_user)

    Args:
        plan: what to run; its n covers all steps. Without `unit`, its batch_size must be the examples of a step by the
            training arguments.
        unit: None, or the name of the column that has the key of each example's unit: integers or strings.
        batch_sampler: with `unit`, the order of training; None: the Trainer's own (shuffled, or
            `train_sampling_strategy="sequential"`), which the ledger holds to the plan.
        key: see `PrivacyEngine`; leave it out.
        public_evaluation: whether what is evaluated is public, and what goes by its metrics is allowed.
        released: metrics that are released with each gradient, `ao.Metrics({"loss": 4.0})`: they are logged in the
            place of the exact loss, and are in what `train()` returns as `train_loss`; callbacks may stop by them. For
            others than the loss override `example_metrics`. `engine.metrics` has their noise.
        chunk_size, micro_batch, rule: see `PrivacyEngine.make_private`.
        pad_to, pad_value, pad_side, like: see there; the collator is called on each example alone. Without pad_to,
            texts that DataCollatorWithPadding or DataCollatorForTokenClassification pads have the lengths 16, 32, .. up
            to the longest that the tokenizer states; with other collators all of a batch must have one length.
        args, kwargs: of `transformers.Trainer`.
    Raises: ArgumentError for several devices in one process, another batch size, or a loss that joins examples (that
        balances experts, for example); PlanError where the plan protects
        users and no `unit` is given, or the other way round.
    """
