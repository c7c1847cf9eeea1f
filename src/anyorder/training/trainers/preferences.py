"""Losses of TRL's trainers of preferences, for each example alone. Both texts of a pair belong to one example.

TRL stacks the rejected texts of a batch under the chosen ones, B rows under B rows, and makes one pass of all. Here a
pair has one row in fields chosen_* and rejected_*, and each side is a pass of its own: the gradient of a pair is the
sum over both, clipped once. A mean over the tokens of a batch is a mean over the tokens of each example.
"""

import io
import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from threading import RLock, get_ident
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from anyorder.clipping.mapping import no_branches_on_masks
from anyorder.errors import ArgumentError

__all__ = ["Losses", "Pairs", "all_rows", "fills", "has_loss", "has_pairs", "losses_of", "quiet", "trl_kind"]

Losses = Callable[[Any, Any, dict[str, Tensor]], Tensor]
"""(trainer, model, batch) -> (B,) losses, each a function of its own row."""

_CHOSEN, _REJECTED = "chosen_", "rejected_"
_NOT_FOR_THE_MODEL = ("completion_mask", "labels", "label")


class Pairs:
    """A collator of TRL whose 2B rows, chosen texts above rejected ones, become B rows of chosen_* and rejected_*."""

    def __init__(self, collate: Callable[[list[Any]], Any]) -> None:
        self._collate = collate

    def __call__(self, examples: list[Any]) -> dict[str, Tensor]:
        rows, batch = len(examples), {}
        if "margin" in examples[0]:  # one that is not known is none: an error would tell of the example
            examples = [{**each, "margin": each["margin"] or 0.0} for each in examples]
        for name, value in self._collate(examples).items():
            if not isinstance(value, Tensor):
                continue  # the texts themselves, which no loss reads
            if value.dim() and len(value) == 2 * rows:
                batch[_CHOSEN + name], batch[_REJECTED + name] = value[:rows], value[rows:]
            else:
                batch[name] = value
        return batch


class _Preference(NamedTuple):
    """What the losses of DPO are functions of, each of shape (B,).

    Attributes:
        chosen, rejected: log likelihood of the completion, over that of the reference.
        of_chosen, of_rejected: the numbers of tokens of the completions.
        nats: of a token of the chosen completion, on average.
    """

    chosen: Tensor
    rejected: Tensor
    of_chosen: Tensor
    of_rejected: Tensor
    nats: Tensor


def _exo(pair: _Preference, beta: float, share: Tensor) -> Tensor:
    margin = beta * (pair.chosen - pair.rejected)
    right, wrong = F.logsigmoid(margin), F.logsigmoid(-margin)
    return right.exp() * (right - torch.log1p(-share)) + wrong.exp() * (wrong - share.log())


_DPO: dict[str, Callable[[_Preference, float, Tensor], Tensor]] = {
    "sigmoid": lambda pair, beta, share: -F.logsigmoid(beta * (pair.chosen - pair.rejected)),
    "sigmoid_norm": lambda pair, beta, share: -F.logsigmoid(
        beta * (pair.chosen / pair.of_chosen - pair.rejected / pair.of_rejected)
    ),
    "hinge": lambda pair, beta, share: F.relu(1 - beta * (pair.chosen - pair.rejected)),
    "ipo": lambda pair, beta, share: (
        (pair.chosen / pair.of_chosen - pair.rejected / pair.of_rejected - 0.5 / beta).square()
    ),
    "exo_pair": _exo,
    "nca_pair": lambda pair, beta, share: -(
        F.logsigmoid(beta * pair.chosen)
        + 0.5 * F.logsigmoid(-beta * pair.chosen)
        + 0.5 * F.logsigmoid(-beta * pair.rejected)
    ),
    "robust": lambda pair, beta, share: (
        (share * F.logsigmoid(-beta * (pair.chosen - pair.rejected))
         - (1 - share) * F.logsigmoid(beta * (pair.chosen - pair.rejected))) / (1 - 2 * share)
    ),
    "bco_pair": lambda pair, beta, share: -F.logsigmoid(beta * pair.chosen) - F.logsigmoid(-beta * pair.rejected),
    "sppo_hard": lambda pair, beta, share: (
        (pair.chosen - 0.5 / beta).square() + (pair.rejected + 0.5 / beta).square()
    ),
    "apo_zero": lambda pair, beta, share: 1 - torch.sigmoid(beta * pair.chosen) + torch.sigmoid(beta * pair.rejected),
    "apo_down": lambda pair, beta, share: (
        torch.sigmoid(beta * pair.chosen) + 1 - torch.sigmoid(beta * (pair.chosen - pair.rejected))
    ),
    "sft": lambda pair, beta, share: pair.nats,
}  # fmt: skip
"""By loss_type. Not 'aot' and 'aot_unpaired', which sort the pairs of a batch."""


def _given(batch: dict[str, Tensor], side: str) -> dict[str, Tensor]:
    """What the model is given of a side: "chosen_", "rejected_", or "" where an example is one text."""
    fields = {name.removeprefix(side): value for name, value in batch.items() if name.startswith(side)}
    return {name: value for name, value in fields.items() if name not in _NOT_FOR_THE_MODEL}


def _log_likelihoods(model: Any, batch: dict[str, Tensor], side: str) -> Tensor:
    """(B, tokens - 1), of each token after the first, given those before it."""
    given = _given(batch, side)
    logits = model(**given, use_cache=False)["logits"]
    tokens = given["input_ids"]
    logits = logits[:, -tokens.shape[1] :]  # prompt tuning puts tokens of its own in front
    return -F.cross_entropy(logits[:, :-1].transpose(1, 2), tokens[:, 1:], reduction="none")


def _of_completion(model: Any, batch: dict[str, Tensor], side: str) -> Tensor:
    """(B,), the log likelihood of the completion given the prompt."""
    return (_log_likelihoods(model, batch, side) * batch[side + "completion_mask"][:, 1:]).sum(1)


@contextmanager
def _reference(trainer: Any) -> Iterator[Any]:
    """The model that the trainer compares with, which does not learn."""
    with torch.no_grad(), no_branches_on_masks():
        if trainer.ref_model is not None:
            yield trainer.ref_model
        elif "ref" not in trainer.model.peft_config:
            with trainer.model.disable_adapter():
                yield trainer.model
        else:  # TRL's copy of the adapter that it was given
            trained = trainer.model.active_adapter
            trainer.model.set_adapter("ref")
            try:
                yield trainer.model
            finally:
                trainer.model.set_adapter(trained)


def _dpo(trainer: Any, model: Any, batch: dict[str, Tensor]) -> Tensor:
    own = [_of_completion(model, batch, side) for side in (_CHOSEN, _REJECTED)]
    with _reference(trainer) as reference:
        others = [_of_completion(reference, batch, side) for side in (_CHOSEN, _REJECTED)]
    masks = [batch[side + "completion_mask"] for side in (_CHOSEN, _REJECTED)]
    pair = _Preference(
        own[0] - others[0], own[1] - others[1], masks[0].sum(1).clamp(min=1), masks[1].sum(1).clamp(min=1),
        -own[0] / masks[0][:, 1:].sum(1).clamp(min=1),
    )  # fmt: skip
    share = torch.tensor(trainer.label_smoothing)
    terms = (
        weight * _DPO[kind](pair, trainer.beta, share)
        for kind, weight in zip(trainer.loss_types, trainer.loss_weights, strict=True)
    )
    return sum(terms, torch.zeros(()))


def _reward(trainer: Any, model: Any, batch: dict[str, Tensor]) -> Tensor:
    scores = [model(**_given(batch, side), use_cache=False)["logits"].squeeze(-1) for side in (_CHOSEN, _REJECTED)]
    losses = -F.logsigmoid(scores[0] - scores[1] - batch.get("margin", 0))
    centre = trainer.args.center_rewards_coefficient
    return losses if centre is None else losses + centre * (scores[0] + scores[1]).square()


def _orpo(trainer: Any, model: Any, batch: dict[str, Tensor]) -> Tensor:
    own = [_log_likelihoods(model, batch, side) for side in (_CHOSEN, _REJECTED)]
    counted = [batch[side + "labels"][:, 1:] != -100 for side in (_CHOSEN, _REJECTED)]
    means = [(each * of).sum(1) / of.sum(1).clamp(min=1) for each, of in zip(own, counted, strict=True)]
    odds = [mean - torch.log(-torch.expm1(mean)) for mean in means]
    whole = batch["chosen_attention_mask"][:, 1:]
    nats = -(own[0] * whole).sum(1) / whole.sum(1).clamp(min=1)
    beta: float = trainer.beta
    return nats - beta * F.logsigmoid(odds[0] - odds[1])


def _kto(trainer: Any, model: Any, batch: dict[str, Tensor]) -> Tensor:
    own = _of_completion(model, batch, "")
    with _reference(trainer) as reference:
        other = _of_completion(reference, batch, "")
    share = torch.sigmoid(trainer.beta * (own - other))
    return torch.where(batch["label"], trainer.desirable_weight * (1 - share), trainer.undesirable_weight * share)


_LOSSES: dict[str, Losses | None] = {
    "SFTTrainer": None, "DPOTrainer": _dpo, "RewardTrainer": _reward, "ORPOTrainer": _orpo, "KTOTrainer": _kto,
}  # fmt: skip
"""By the trainer; None: by labels, as those of transformers."""


_FILTERS = RLock()  # held while a class of data sets drops no row, in one thread


@contextmanager
def quiet() -> Iterator[None]:
    """Nothing is warned of, logged or printed: TRL does, of single texts and of counts, while it prepares data."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def all_rows(dataset: Any, prepare: Callable[[], Any]) -> Any:
    """What TRL makes of a data set, with all of its rows: without one, all rows behind it are in other batches.

    A text of which nothing can be learnt stays, with a gradient of zero; `pad_to` truncates one that is too long.

    Raises: ArgumentError where the rows are not as many as before.
    """
    kind, thread = type(dataset), get_ident()
    with _FILTERS:
        own = kind.filter
        kind.filter = lambda self, *args, **kwargs: self if get_ident() == thread else own(self, *args, **kwargs)
        try:
            made = prepare()
        finally:
            kind.filter = own
    if len(made) != len(dataset):
        raise ArgumentError(
            "TRL must make one example of each row of train_dataset: one that is dropped or joined to another moves "
            "all behind it. Set packing=False, or prepare the data before"
        )
    return made


def trl_kind(trainer: Any) -> str | None:
    """The name of TRL's class whose loss a trainer has; None where it is none of TRL."""
    return next((one.__name__ for one in type(trainer).__mro__ if has_loss(one) and _package(one) == "trl"), None)


def has_loss(kind: type) -> bool:
    """Whether a class of trainers has a loss of its own: TRL's compute_loss leaves it to _compute_loss."""
    return not vars(kind).keys().isdisjoint(("compute_loss", "_compute_loss"))


def _package(kind: type) -> str:
    return kind.__module__.split(".")[0]


def has_pairs(kind: str | None) -> bool:
    """Whether an example of a trainer of TRL is a pair of texts."""
    return kind in ("DPOTrainer", "RewardTrainer", "ORPOTrainer")


def fills(pad_token: int) -> dict[str, int]:
    """What fields of pairs are padded with, where it is not 0: the collators of TRL have no tokenizer that says it."""
    return {
        side + name: value
        for side in (_CHOSEN, _REJECTED)
        for name, value in (("input_ids", pad_token), ("labels", -100))
    }


def losses_of(trainer: Any, kind: str | None) -> Losses | None:
    """The losses of a trainer of TRL, example by example; None where they follow from labels.

    Raises: ArgumentError where they join examples, or are not known.
    """
    if kind is None:
        return None
    if kind not in _LOSSES:
        raise ArgumentError(
            f"the loss of TRL's {kind} is not known for each example alone; known are those of {', '.join(_LOSSES)}. "
            "Write compute_loss yourself, with a mean over examples of which each is of one row"
        )
    found = [f"{name}: {why}" for name, is_set, why in _refusals(trainer, kind) if is_set]
    if found:
        raise ArgumentError(f"of TRL's {kind}, leave out {'; '.join(found)}")
    return _LOSSES[kind]


def _refusals(trainer: Any, kind: str) -> Iterator[tuple[str, bool, str]]:
    """(setting, whether it is set, why it is refused)."""
    args, not_known = trainer.args, "it is not known for each example alone"
    if kind == "SFTTrainer":
        yield f"loss_type={args.loss_type!r}", args.loss_type == "dft", f"{not_known}; 'nll' is"
    if kind == "DPOTrainer":
        other = [each for each in args.loss_type if each not in _DPO]
        yield (
            f"loss_type={other}",
            bool(other),
            f"{not_known} ('aot' sorts the pairs of a batch); {', '.join(_DPO)} are",
        )
        yield "use_weighting", args.use_weighting, not_known
        yield "ld_alpha", args.ld_alpha is not None, not_known
        yield "f_divergence_type", args.f_divergence_type != "reverse_kl", f"{not_known}; 'reverse_kl' is"
    if kind == "KTOTrainer":
        yield (
            f"loss_type={args.loss_type!r}", args.loss_type != "apo_zero_unpaired",
            "its KL term is a mean over the batch, of prompts with completions of other examples; "
            "'apo_zero_unpaired' has none",
        )  # fmt: skip
    if kind in ("DPOTrainer", "KTOTrainer"):
        yield (
            "precompute_ref_log_probs", args.precompute_ref_log_probs,
            "they are rounded differently with the lengths of other texts, to which a batch is padded, and stay in a "
            "file; they are computed in each step instead",
        )  # fmt: skip
    if kind == "ORPOTrainer":
        yield "an encoder-decoder model", trainer.is_encoder_decoder, not_known
