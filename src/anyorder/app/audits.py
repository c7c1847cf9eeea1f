"""Audits of a training of one's own: from the name of a set-up to a verdict, and a folder that shows it."""

import copy
import functools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import ceil
from pathlib import Path
from pickle import PicklingError
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.data import Dataset, default_collate

from anyorder import checks
from anyorder.app import data as datasets
from anyorder.app import folder
from anyorder.app import job as parts
from anyorder.app import report as audit_files
from anyorder.app.charts import METHODS, AuditSummary, audit_panel, can_draw, plot_audit
from anyorder.app.job import OF_FEATURES
from anyorder.app.progress import StepsBar
from anyorder.app.text import load_function
from anyorder.audit import Canaries, plant
from anyorder.audit.bounds import Method
from anyorder.audit.laws import NoiseLaw, noise_law, testable
from anyorder.audit.planted import known_curve
from anyorder.audit.result import Audited
from anyorder.errors import ArgumentError, CertificateError, CheckpointError, TrainingError
from anyorder.plan.certificate import Certificate
from anyorder.plan.plan import Plan
from anyorder.sampling.read_loader import Unit
from anyorder.training.engine import PrivacyEngine, networks_of, optimizers_of

# ----------------------------------------------------------------------------------------------------
# A training set-up of one's own, audited: canaries in its gradients, all its planned steps, and what they show.


_OWN = ("model", "optimizer", "loader", "unit")
_MOST_NUMBERS = 1 << 22  # of un-noised totals, and of what is released, that are kept for the law of the noise: of all
# coordinates, or in every step of as many as that allows, drawn from the operating system


@dataclass(frozen=True)
class Setup:
    """A private training that is ready to begin, as an audit takes it: what `PrivacyEngine` is given, and the loss.

    Attributes:
        plan: the claim that is attacked.
        model, optimizer, loader: as `PrivacyEngine.make_private` takes them, several in a list too. The audit trains
            copies of model and optimizer, and discards them.
        loss: `loss(model, batch)` -> a scalar tensor with a gradient: the mean over the examples of one batch of the
            loader. It calls the model that it is given, which is the private one, or the list.
        unit: whose privacy, as in `make_private`.
        options: further keywords of `make_private`: accumulate, rule, loss_reduction, ..
    Raises: ArgumentError.

    Example:
        >>> def setup():
        ...     plan = ao.plan(dataset_size=8, batch_size=4, epochs=2, epsilon=8, delta=1e-5)
        ...     model = torch.nn.Linear(5, 1)
        ...     optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        ...     loader = torch.utils.data.DataLoader(torch.randn(8, 5), batch_size=4)
        ...     return Setup(plan, model, optimizer, loader, loss=lambda model, x: model(x).square().mean())
    """

    plan: Plan
    model: nn.Module | Sequence[nn.Module]
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer]
    loader: Any
    loss: Callable[[Any, Any], Tensor]
    unit: Unit = None
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not isinstance(self.plan, Plan):
            raise ArgumentError(f"plan of a Setup must be an anyorder.Plan, got {type(self.plan).__name__}")
        networks_of(self.model)
        optimizers_of(self.optimizer)
        if not callable(self.loss):
            raise ArgumentError(f"loss of a Setup must be a function of (model, batch), got {type(self.loss).__name__}")
        doubled = [name for name in _OWN if name in self.options]
        if doubled:
            raise ArgumentError(f"options of a Setup go to make_private; {', '.join(doubled)} is given as a field")


@dataclass(frozen=True)
class Attack:
    """What is left of a training that was attacked; of its model nothing.

    Attributes:
        audited: scores and draws, beside the claim.
        law: of the noise that was added, with the sums known, in all coordinates or in some that nobody knew
            beforehand; None for trees of more than 4096 steps, a single coordinate, and more than two million steps.
        certificate: of the run. Its claim is about the data's units, and holds for them with canaries too.
        known: under secret sampling, what an attacker sees to whom all batches became known, beside what is promised
            then; None in other orders, or where no canary was in any step.
    """

    audited: Audited
    law: NoiseLaw | None
    certificate: Certificate
    known: Audited | None = None


def audit_training(
    setup: Setup,
    *,
    canaries: int | Canaries = 1000,
    coordinates: int | None = None,
    stepped: Callable[[int], object] | None = None,
) -> Audited:
    """Train a set-up through all planned steps with gradient canaries in it, and say what they show of its claim.

    Each canary is a gradient at the clip norm, in the most telling steps that the plan allows a unit, and takes part by
    a secret fair draw. The attacker sees every private gradient, and knows everything but the draws and the noise, the
    data's gradients too. So it tests what the claim rests on from the clipped sum on: noise, strategy, order,
    accounting. It does not test that the data's units are clipped: see `anyorder.audit.faults` for a front end. Under
    secret sampling the steps of canaries are drawn, and unknown to the attacker: see `anyorder.audit.plant`.

    Args:
        setup: trained by the call, in this process alone, as a copy of its model and optimizer, which is discarded: the
            attacker knows the data's gradients, and what is said of such an audit would tell them to anyone who had a
            model that was trained by the same noise. What its loss or hooks keep of the copy is as secret as the data.
        canaries: how many; or which.
        coordinates: of the gradient that they live on, chosen by the canaries' seed; None for all.
        stepped: called with the number of steps taken after each.
    Returns: `Audited`; `report.plot_audit(audited, "audit.png")` draws it. Its verdict is that of the scores alone;
        `auditing.attack`, and so `anyorder audit run`, also tests the noise of every step, which finds more.
    Cost: the training, a copy of model and optimizer, and for each step O(coordinates + canaries).
    Raises: ArgumentError, and what the training raises.

    Example:
        audited = audit_training(setup())
        print(audited.lower_bound("f_dp"), audited.epsilon, audited.refuted())
    """
    return attack(setup, canaries=canaries, coordinates=coordinates, stepped=stepped).audited


def attack(
    setup: Setup,
    *,
    canaries: int | Canaries = 1000,
    coordinates: int | None = None,
    stepped: Callable[[int], object] | None = None,
    key: bytes | None = None,
) -> Attack:
    """As `audit_training`; with the law of the noise, and the certificate of the run.

    Args:
        key: 32 bytes for noise and draws of reproducible tests.
    """
    if not isinstance(setup, Setup):
        raise ArgumentError(f"setup must be an anyorder.app.Setup, got {type(setup).__name__}")
    engine = PrivacyEngine(setup.plan, key=key)
    try:
        model, optimizer, loader = engine.make_private(*_copied(setup), setup.loader, unit=setup.unit, **setup.options)
        size, plan = engine.release.size, setup.plan
        some = min(size, _MOST_NUMBERS // plan.n) if testable(plan.strategy) else 0
        totals = some if some > 1 else False
        chosen, secret = _canaries(canaries, coordinates, size), plan.participation.secret
        planted = plant(engine, chosen, key=key, totals=totals, informed=True, known=secret)
        _train(setup, model, optimizer, loader, stepped)
        law = None
        if totals:
            law = noise_law(planted.released, planted.totals, plan.strategy, plan.noise_std)
        known = None
        if planted.drawn is not None and any(planted.drawn):
            known = replace(planted.result(known=True), run_discarded=True)
        return Attack(replace(planted.result(), run_discarded=True), law, engine.certificate(), known)
    finally:
        engine.close()


def _copied(setup: Setup) -> tuple[Any, Any]:
    """Model and optimizer, which are discarded: nothing that is left may hold the noise of an informed audit."""
    try:
        return copy.deepcopy((setup.model, setup.optimizer))
    except (RuntimeError, TypeError, NotImplementedError, PicklingError) as problem:
        raise ArgumentError(
            "model and optimizer of a Setup must be such that copy.deepcopy copies them, for the audit trains a copy "
            f"and discards it: {problem}"
        ) from problem


def _canaries(canaries: int | Canaries, coordinates: int | None, size: int) -> Canaries:
    if isinstance(canaries, Canaries):
        if coordinates is not None:
            raise ArgumentError("coordinates are part of the canaries that were given: leave one of them out")
        return canaries
    count = checks.integer("canaries", canaries, low=1)
    if coordinates is not None and checks.integer("coordinates", coordinates, low=1) > size:
        raise ArgumentError(f"coordinates must be at most {size}, the trainable parameters, got {coordinates}")
    return Canaries(size, count, size if coordinates is None else coordinates, seed=0)


def _train(
    setup: Setup, model: Any, optimizer: Any, loader: Iterable[Any], stepped: Callable[[int], object] | None
) -> None:
    """All planned steps."""
    batches, n, optimizers = _passes(loader), setup.plan.n, optimizers_of(optimizer)
    (model if isinstance(model, nn.Module) else nn.ModuleList(model)).train()
    for step in range(n):
        for one in optimizers:
            one.zero_grad()
        for _ in range(setup.options.get("accumulate", 1)):
            for batch in batches:
                _scalar(setup.loss(model, batch)).backward()  # type: ignore[no-untyped-call]
                break
            else:
                raise TrainingError(
                    f"the loader of the set-up ended after {step} steps, and its plan has {n}: an audit is of the "
                    "whole run; give a loader that can be gone through again, or a stream that is long enough"
                )
        for one in optimizers:
            one.step()
        if stepped is not None:
            stepped(step + 1)


def _passes(loader: Iterable[Any]) -> Iterator[Any]:
    """The batches of one pass after the other; it ends with a pass that has none."""
    found = True
    while found:
        found = False
        for batch in loader:
            found = True
            yield batch


def _scalar(loss: Any) -> Tensor:
    if not isinstance(loss, Tensor) or loss.ndim:
        got = f"one of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise ArgumentError(f"loss of a Setup must return a scalar tensor, got {got}")
    return loss


def setup_of(target: str) -> Setup:
    """The set-up that a target names.

    Args:
        target: `module:function`, which returns a Setup (the current folder is importable); or the folder of a run of
            `anyorder train`, finished or not: the same settings and plan, from the same first weights, in the same
            order, with noise of its own.
    Raises: ArgumentError.
    """
    path = Path(target)
    if path.is_dir():
        return _of_folder(path)
    if ":" not in target:
        raise ArgumentError(f"target must be module:function or the folder of a run of anyorder train, got {target!r}")
    made = load_function(target, "target")()
    if not isinstance(made, Setup):
        raise ArgumentError(f"target {target!r} must return an anyorder.app.Setup, got {type(made).__name__}")
    return made


def _of_folder(path: Path) -> Setup:
    try:
        settings = parts.settings_of(folder.read_json(path / folder.METRICS), path)
        plan = Plan.load(path / folder.PLAN, large=True)
    except (CertificateError, CheckpointError) as problem:
        raise ArgumentError(f"target must be module:function or the folder of a run: {problem}") from problem
    if settings.model in OF_FEATURES or settings.schedule != "constant":
        raise ArgumentError(
            f"target {str(path)!r} is a run whose steps are not all alike (model {settings.model!r}, schedule "
            f"{settings.schedule!r}), which a Setup cannot say; train the same data with --model cnn (or another but "
            "scattering or patches) and --schedule constant, and audit the folder of that run"
        )
    data = datasets.load(settings.dataset, settings.data_dir, settings.classes)
    model = parts.make_model(settings, data)
    loss = functools.partial(parts.loss, device=torch.device(settings.device))
    return Setup(plan, model, parts.make_optimizer(settings, model), parts.make_loader(settings, data), loss)


# ----------------------------------------------------------------------------------------------------
# Canaries that are examples: in the data by secret draws, found by the losses of the model that was trained on it.


def with_canaries(dataset: Any, examples: Sequence[Any], included: ArrayLike) -> Dataset[Any]:
    """The data set, and behind it a place for each canary: the example where its draw says so, else one that adds zero.

    What adds zero is the example with NaN in all its floating-point tensors: its gradient is not finite, so the engine
    takes zero for it (`non_finite="zero"`), and nothing else changes. That is what neighbours are to a plan: a unit
    with its gradients, or with zero in their place, whatever the order.

    Plan for `len(dataset) + len(examples)` examples. Mislabelled or random examples are remembered most.

    Args:
        dataset: a data set with a length.
        examples: canaries, as the data set's own examples, with a floating-point tensor in each.
        included: (len(examples),) bools by fair, secret, independent draws: `anyorder.audit.Canaries.draw`, say.
    Raises: ArgumentError.
    """
    return _WithCanaries(dataset, examples, _checked(examples, included))


class _WithCanaries(Dataset[Any]):
    def __init__(self, dataset: Any, examples: Sequence[Any], included: NDArray[np.bool_]) -> None:
        self._dataset, self._own = dataset, len(dataset)
        self._examples = [example if one else _zero(example) for example, one in zip(examples, included, strict=True)]

    def __len__(self) -> int:
        return self._own + len(self._examples)

    def __getitem__(self, i: int) -> Any:
        return self._dataset[i] if i < self._own else self._examples[i - self._own]


def _zero(example: Any) -> Any:
    return pytree.tree_map_only(Tensor, _nan, example)


def _nan(value: Tensor) -> Tensor:
    return torch.full_like(value, torch.nan) if value.is_floating_point() else value


def _checked(examples: Sequence[Any], given: ArrayLike) -> NDArray[np.bool_]:
    included = np.asarray(given)
    if included.dtype != np.bool_ or included.shape != (len(examples),):
        raise ArgumentError(
            f"included must be one bool for each of {len(examples)} canaries, got {included.dtype} of shape "
            f"{included.shape}"
        )
    for example in examples:
        if not any(isinstance(x, Tensor) and x.is_floating_point() for x in pytree.tree_leaves(example)):
            raise ArgumentError(
                "examples must hold a floating-point tensor each: NaN in it is what leaves a canary out; plant "
                "gradient canaries instead (audit_training), or phrases (anyorder audit canaries)"
            )
    return included


def audit_inputs(
    plan: Plan,
    model: nn.Module,
    examples: Sequence[Any],
    included: ArrayLike,
    loss: Callable[[nn.Module, Any], Tensor],
    *,
    start: nn.Module | None = None,
) -> Audited:
    """What the model that was trained on `with_canaries(..)` tells of its canaries. The attacker sees nothing else.

        score = -loss(canary), or with `start` loss before - loss after

    Assumes that the draws were fair and independent, and used for nothing else. Canaries disturb each other, so bounds
    and p-value are those for one run of any mechanism ("one_run", "f_dp"). Such an attack sees a fraction of what a
    gradient canary shows; unlike that, it goes through the front end's clipping.

    Args:
        plan: what was run, for zero-out neighbours or add-or-remove ones.
        model: after the training.
        examples, included: as `with_canaries` was given them.
        loss: of (model, a batch of one), as in `Setup`.
        start: the model before the training.
    Raises: ArgumentError.
    """
    if plan.neighbours == "replace-one":
        raise ArgumentError("plan must be for zero-out or add-or-remove neighbours: a canary is left out, not replaced")
    included = _checked(examples, included)
    scores = -_losses(model, examples, loss)
    if start is not None:
        scores += _losses(start, examples, loss)
    return Audited(
        scores=scores, included=included, noise_std=None, mus=None, curve=plan.curve, delta=plan.delta,
        epsilon=plan.epsilon,
    )  # fmt: skip


def _losses(model: nn.Module, examples: Sequence[Any], loss: Callable[[nn.Module, Any], Tensor]) -> NDArray[np.float64]:
    """(count,) losses in evaluation mode; one that is not finite counts as 1e300."""
    trains = model.training
    model.eval()
    try:
        with torch.no_grad():
            found = [float(loss(model, default_collate([copy.copy(example)]))) for example in examples]
    finally:
        model.train(trains)
    return np.nan_to_num(np.asarray(found, np.float64), nan=1e300, posinf=1e300, neginf=-1e300)


# ----------------------------------------------------------------------------------------------------
# `anyorder audit run`: from the name of a set-up to a verdict, and a folder that shows it.


@dataclass(frozen=True, kw_only=True)
class Request:
    """What is asked for; checked before anything is trained.

    Attributes:
        target: see `anyorder.app.audits.setup_of`.
        canaries, coordinates: see `anyorder.app.audit_training`.
        confidence, methods: of the bounds, see `anyorder.app.AuditSummary`.
        delta: of claim and bounds; None for the plan's.
        plot: a PNG to be written.
        out: a new folder to be written.
    """

    target: str
    canaries: int = 1000
    coordinates: int | None = None
    confidence: float = 0.95
    delta: float | None = None
    methods: Sequence[Method] = tuple(METHODS)
    plot: Path | None = None
    out: Path | None = None

    def __post_init__(self) -> None:
        checks.integer("canaries", self.canaries, low=1)
        if self.coordinates is not None:
            checks.integer("coordinates", self.coordinates, low=1)
        checks.probability("confidence", self.confidence)
        for method in self.methods:
            checks.choice("method", method, METHODS)
        if self.delta is not None:
            checks.probability("delta", self.delta)
        if self.plot is not None:
            can_draw(self.plot)
        if self.out is not None:
            checks.optional("matplotlib.figure", extra="train", purpose="drawing an audit")


@dataclass(frozen=True)
class AuditOutcome:
    """A training that was audited.

    Attributes:
        target: what was asked for.
        plan: its claim.
        summary: what the attack saw.
        certificate: of the run.
        seconds: of training and scoring.
    """

    target: str
    plan: Plan
    summary: AuditSummary
    certificate: Certificate
    seconds: float

    def panel(self) -> Any:
        """A rich panel."""
        return audit_panel(self.summary, self.plan)

    def to_dict(self) -> dict[str, Any]:
        """JSON values: what audit.json holds beside format and note. No draws, no scores."""
        return {
            "target": self.target,
            "plan_digest": self.certificate.plan.digest,
            "key_fingerprint": self.certificate.key_fingerprint,
            "steps": self.certificate.steps,
            "claims": self.plan.claims(),
            "order": self.plan.participation.describe(),
            "mechanism": self.plan.strategy.describe(),
            "audit": self.summary.to_dict(),
            "seconds": ceil(self.seconds),
        }


def run(asked: Request, bar: StepsBar) -> AuditOutcome:
    """Train the set-up with canaries in it, and write what was asked for. Raises ArgumentError, TrainingError, .."""
    if asked.out is not None:
        audit_files.fresh(asked.out)
    setup = setup_of(asked.target)
    bar.started(setup.plan)
    began = time.perf_counter()
    done = attack(setup, canaries=asked.canaries, coordinates=asked.coordinates, stepped=bar.stepped)
    seconds = time.perf_counter() - began
    audited, known, certificate = done.audited, done.known, done.certificate
    if asked.delta is not None:
        audited = replace(audited, delta=asked.delta, epsilon=setup.plan.curve.epsilon(asked.delta))
        if known is not None:
            known = replace(known, delta=asked.delta, epsilon=known_curve(setup.plan).epsilon(asked.delta))
    summary = AuditSummary.of(audited, asked.methods, asked.confidence, done.law, known)
    verdict = AuditOutcome(asked.target, setup.plan, summary, certificate, seconds)
    if asked.plot is not None:
        plot_audit(audited, asked.plot)
    if asked.out is not None:
        certificate.save(asked.out / folder.CERTIFICATE)
        plot_audit(audited, asked.out / audit_files.PICTURE)
        audit_files.save(asked.out / audit_files.AUDIT, verdict.to_dict())
    return verdict
