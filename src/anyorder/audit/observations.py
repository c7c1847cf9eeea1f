"""Which unit an index of a data set is, and how its squared counts sum up; nothing of a run is moved by asking."""

import math
import random
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, assert_never
from weakref import ReferenceType, WeakKeyDictionary, ref

import numpy as np
from numpy.typing import NDArray
from scipy.special import bdtr, bdtrc, log_ndtr, logsumexp, ndtr

from anyorder._numerics import bisect
from anyorder.accounting import gdp_delta, gdp_epsilon
from anyorder.accounting.poisson import poisson_epsilon
from anyorder.audit.private_steps import ObservedStep, StepTally
from anyorder.checks import final
from anyorder.errors import AnyorderError, LoaderError
from anyorder.formatting import counted

Indices = NDArray[np.int64]


def names_of(loader: Any, unit: Any, indices: Indices | None) -> Indices | str | None:
    """The number of the unit of each of these indices; None where all differ; or why they cannot be told."""
    from torch.utils.data import ConcatDataset, Subset

    from anyorder.sampling.read_loader import Origins

    total = size_of(loader.dataset)
    if total is None:
        return "the data set has no length, so that its examples cannot be told apart"
    if indices is not None and len(indices):
        indices = np.where(indices < 0, indices + total, indices)
    if unit is not None:
        names = numbers(_units(loader, np.arange(total) if indices is None else indices, unit))
        return names if names.max(initial=0) + 1 < len(names) else None
    try:
        origins = Origins(loader.dataset)
    except LoaderError as problem:
        return str(problem)
    if indices is None:
        if not isinstance(loader.dataset, (Subset, ConcatDataset)):
            return None
        indices = np.arange(total)
    names = numbers(origins.names(indices))
    return names if names.max(initial=0) + 1 < len(names) else None


def numbers(names: NDArray[Any]) -> Indices:
    """0, 1, .. in the place of names."""
    return np.unique(names, return_inverse=True)[1].ravel().astype(np.int64)


def _units(loader: Any, indices: Indices, unit: Any) -> NDArray[Any]:
    """The id of the unit of each of these examples, read from the data set as the loader would collate them."""
    from anyorder.sampling.read_loader import extract_units

    chunk = loader.batch_size or 256
    found = []
    with undisturbed(loader):
        for start in range(0, len(indices), chunk):
            wanted = indices[start : start + chunk].tolist()
            fetch = getattr(loader.dataset, "__getitems__", None)
            rows = fetch(wanted) if fetch else [loader.dataset[i] for i in wanted]
            ids = np.asarray(extract_units(loader.collate_fn(rows), unit))
            if len(ids) != len(wanted):
                raise LoaderError(
                    f"unit= must give one id for each of the {len(wanted)} examples of a batch, got {len(ids)}"
                )
            found.append(ids)
    return np.concatenate(found)


@contextmanager
def undisturbed(loader: Any = None) -> Iterator[None]:
    """Puts the states of Python's, NumPy's, torch's and the loader's own generators back at the end."""
    import torch

    own = [
        g for part in (loader, getattr(loader, "sampler", None)) if (g := getattr(part, "generator", None)) is not None
    ]
    states = [g.get_state() for g in own]
    python, numpy, cpu = random.getstate(), np.random.get_state(), torch.get_rng_state()  # noqa: NPY002
    gpus = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)  # noqa: NPY002
        torch.set_rng_state(cpu)
        if gpus:
            torch.cuda.set_rng_state_all(gpus)
        for generator, state in zip(own, states, strict=True):
            generator.set_state(state)


def weights_of(names: Indices, step_of: Indices) -> NDArray[np.float64]:
    """(names,) for each name, a number from 0 on, the sum over steps of its squared count; (1,) of 0 for none."""
    if not len(names):
        return np.zeros(1)
    span = int(step_of.max()) + 1
    pairs, counts = np.unique(names * span + step_of, return_counts=True)
    return np.bincount(pairs // span, counts.astype(np.float64) ** 2).astype(np.float64)


def size_of(dataset: Any) -> int | None:
    return len(dataset) if hasattr(dataset, "__len__") else None


# ----------------------------------------------------------------------------------------------------
# How often a unit comes into a run, and the epsilon that follows from that alone, for independent Gaussian noise.
#
# Let m_t be how many examples of one unit are in step t, each clipped to norm 1, beneath noise of std sigma. Given the
# order, the run is a Gaussian mechanism of
#
#     mu = sqrt(m_1^2 + m_2^2 + ..) / sigma                                          zero-out neighbours, adaptive
#
# and `weight` below is that sum of squares. A closed set of what may be known of an order:
#
#     AtMost         weight never above a number, in whatever order that does not depend on the data
#     SampledVisits  each example of the unit in each step by a secret draw of its own: Poisson sampling
#     DrawnVisits    m_t of independent Binomials: sampling with replacement; the draws taken as public
#     Unknown        nothing: no epsilon is finite


Floats = NDArray[np.float64]


@final
@dataclass(frozen=True)
class AtMost:
    """The sum over steps of squared counts of a unit is at most `weight`.

    Attributes:
        weight: 0 where nobody comes.
        is_reached: whether some unit surely has it, in steps that are known to all: the epsilon is then exact.
        shuffles: the order is that of shuffles that draw every unit's place anew; None for any other order.
    """

    weight: float
    is_reached: bool = False
    shuffles: "Shuffles | None" = None


@final
@dataclass(frozen=True)
class Shuffles:
    """Each unit is in one uniformly drawn batch of each epoch, or in none; from this a lower bound follows.

    Attributes:
        epochs: whole epochs.
        steps: steps in each.
        chance: that a unit is in an epoch at all: below 1 where a last batch is dropped, or few are drawn.
    """

    epochs: int
    steps: int
    chance: float = 1.0


@final
@dataclass(frozen=True)
class SampledVisits:
    """Poisson sampling.

    Attributes:
        probability, steps: each example is in each step with this probability.
        empty: bound of the probability that the sampler leaves out a step, or fills it otherwise, for it is empty.
        period: after so many steps the same draws may come again, and again; None: all are drawn again.
    """

    probability: float
    steps: int
    empty: float = 0.0
    period: int | None = None


@final
@dataclass(frozen=True)
class DrawnVisits:
    """In each step a unit comes Binomial(size, probability) times, independently of all other steps.

    Attributes:
        period: as of `SampledVisits`.
    """

    size: int
    probability: float
    steps: int
    period: int | None = None


@final
@dataclass(frozen=True)
class Unknown:
    """No bound is known."""


Visits = AtMost | SampledVisits | DrawnVisits | Unknown
"""What is known of how often a unit comes."""


def epsilon_of(visits: Visits, noise_multiplier: float, delta: float) -> float:
    """The smallest epsilon that follows, for independent noise; infinity where none does.

    Neighbours: zero-out, for any data-independent order; add-or-remove for `SampledVisits`.

    Args:
        visits: how often a unit comes.
        noise_multiplier: noise std over clip norm, above 0.
        delta: strictly between 0 and 1.
    Returns: epsilon, rounded up.
    Cost: closed form for `AtMost`; up to some seconds for the two others.
    """
    match visits:
        case AtMost():
            return gdp_epsilon(math.sqrt(visits.weight) / noise_multiplier * (1 + 2**-51), delta)
        case SampledVisits():
            return max(_of_sample(visits, noise_multiplier, delta), _of_the_same(visits, 1, noise_multiplier, delta))
        case DrawnVisits():
            again = _of_the_same(visits, visits.size, noise_multiplier, delta)
            return max(_of_draws(visits, noise_multiplier, delta), again)
        case Unknown():
            return math.inf
        case _:
            assert_never(visits)


def _of_sample(visits: SampledVisits, sigma: float, delta: float) -> float:
    """That of Poisson sampling, at the delta that is left after steps that are not what their draws said.

    A run that is another one with probability `empty` at most, on either side, is (e, d + empty (1 + exp(e)))-DP where
    that other one is (e, d)-DP.
    """
    epsilon = poisson_epsilon(sigma, visits.probability, visits.steps, delta)
    if visits.empty == 0:
        return epsilon
    lost = visits.empty * (1 + math.exp(min(2 * epsilon, 700.0)))
    if lost > delta / 2:
        return math.inf
    found = poisson_epsilon(sigma, visits.probability, visits.steps, delta - lost)
    return found if found <= 2 * epsilon else math.inf


def _of_the_same(visits: SampledVisits | DrawnVisits, size: int, sigma: float, delta: float) -> float:
    """The epsilon where every period has the same draws, shown: each counts as often as there are periods.

    That of draws anew may be larger or smaller: a unit that comes rarely then comes in fewer runs, and more often in
    those. 0 for a single period.
    """
    if visits.period is None or visits.steps <= visits.period:
        return 0.0
    periods = -(-visits.steps // visits.period)
    return _of_draws(DrawnVisits(size, visits.probability, visits.period), sigma / math.sqrt(periods), delta)


def _of_draws(draws: DrawnVisits, sigma: float, delta: float) -> float:
    """The draws do not depend on the unit's data, so they may be shown: delta is the mean over them.

    delta(eps) = sum over w of P(weight = w) gdp_delta(sqrt(w) / sigma, eps)
    """
    chances, lost = _weights(draws, delta / 1000)
    weights = np.flatnonzero(chances > 1e-30)
    lost += float(chances.sum() - chances[weights].sum())
    # The transform's rounding: each frequency is off by 16 units of rounding a step at most, by Parseval so much in l2.
    lost += 16 * 2.0**-52 * (draws.steps + 64) * math.sqrt(len(chances))

    mus = np.sqrt(weights[weights > 0]) / sigma

    def excess(epsilon: float) -> float:
        near = ndtr(mus / 2 - epsilon / mus) - np.exp(epsilon + log_ndtr(-mus / 2 - epsilon / mus))
        rough = float(chances[weights[weights > 0]] @ near) + lost - delta
        if abs(rough) > max(1e-8 * delta, 1e-13):  # its sign is what counts, and it is off by 1e-14 at most
            return rough
        each = [gdp_delta(math.sqrt(w) / sigma * (1 + 2**-51), epsilon) for w in weights.tolist()]
        return float(chances[weights] @ np.array(each)) + lost - delta

    return _least(excess, gdp_epsilon(math.sqrt(weights[-1]) / sigma, delta / 2))


def _weights(draws: DrawnVisits, lost: float) -> tuple[Floats, float]:
    """P(weight = 0), P(weight = 1), .. as far as it matters, and a bound of the probability of what is beyond."""
    q, steps = draws.probability, draws.steps
    most = next(m for m in range(draws.size + 1) if m == draws.size or steps * bdtrc(m, draws.size, q) < lost / 4)
    beyond = steps * float(bdtrc(most, draws.size, q)) if most < draws.size else 0.0
    counts = np.arange(most + 1)
    one = np.zeros(most * most + 1)
    one[counts**2] = np.diff(bdtr(counts, draws.size, q), prepend=0.0)
    length = 64
    while steps * (len(one) - 1) >= length and (tail := _tail(one, steps, length)) > lost / 4:
        length *= 2
    if steps * (len(one) - 1) < length:
        tail = 0.0
    size = max(length, len(one))
    composed = np.fft.irfft(np.fft.rfft(one, size) ** steps, size)  # what is beyond comes round, and is counted in tail
    return np.maximum(composed, 0.0), beyond + tail


def _tail(one: Floats, steps: int, length: int) -> float:
    """Chernoff's bound of the probability that a sum of so many has reached `length`."""
    values = np.flatnonzero(one)
    grid = np.geomspace(1e-4, 50, 200)
    exponents = steps * logsumexp(grid[:, None] * values, b=one[values], axis=1) - grid * length
    return float(np.exp(min(0.0, exponents.min())))


def _least(excess: Callable[[float], float], high: float) -> float:
    """The smallest epsilon where a falling function is not above 0, from above, to 1e-9 of it."""
    while excess(high) > 0:
        high *= 1.5
        if high > 1e6:
            return math.inf
    low = 0.0
    if excess(low) <= 0:
        return low
    return bisect(lambda epsilon: excess(epsilon) <= 0, inside=high, outside=low, relative=1e-9)


def epsilon_at_least(visits: Visits, noise_multiplier: float, delta: float) -> float:
    """A lower bound of the true epsilon, zero-out neighbours: no accountant that is right can print less.

    The order's steps are known: exact. A shuffle anew in each epoch: an attack that looks, in each epoch, whether any
    step is above a threshold c, and counts the epochs. All other examples give 0 (a = 0), or all give the opposite of
    what the unit gives (a = 1: the step where the unit is zeroed out then lacks one of them). With T = steps - 1,

        P(above) = 1 - Phi((c - a - 1) / sigma) Phi(c / sigma)^T    with the unit
        Q(above) = 1 - Phi((c - a) / sigma) Phi(c / sigma)^T        without it

    and epsilon >= ln((P(in at least j epochs) - delta) / Q(in at least j epochs)), and the same the other way round
    [Chua et al. 2024, of one epoch]. 0 where nothing is known.

    Cost: milliseconds for up to 100 epochs.
    """
    if not isinstance(visits, AtMost):
        return 0.0
    if visits.is_reached:
        return gdp_epsilon(math.sqrt(visits.weight) / noise_multiplier, delta) * (1 - 1e-9)
    if visits.shuffles is None or visits.shuffles.epochs == 0:
        return 0.0
    return max(
        _attacked(visits.shuffles, noise_multiplier, delta, others, up) for others in (0, 1) for up in (True, False)
    )


def _attacked(shuffles: Shuffles, sigma: float, delta: float, others: int, up: bool) -> float:
    """ln((P - delta) / Q) of the best threshold and number of epochs."""
    epochs = shuffles.epochs
    c = (np.linspace(-3.0, 12.0, 1501) * sigma + 1)[:, None]
    quiet = (shuffles.steps - 1) * log_ndtr(c / sigma)
    without = -np.expm1(log_ndtr((c - others) / sigma) + quiet)
    with_it = -np.expm1(log_ndtr((c - others - 1) / sigma) + quiet)
    absent = -np.expm1(log_ndtr(c / sigma) + quiet)
    with_it = shuffles.chance * with_it + (1 - shuffles.chance) * absent
    without = shuffles.chance * without + (1 - shuffles.chance) * absent
    j = np.arange(1, epochs + 1)
    often, seldom = (
        (bdtrc(j - 1, epochs, with_it), bdtrc(j - 1, epochs, without)) if up
        else (bdtr(j - 1, epochs, without), bdtr(j - 1, epochs, with_it))
    )  # fmt: skip
    usable = (often > 1.001 * delta) & (seldom > 1e-200)
    if not usable.any():
        return 0.0
    return max(0.0, float(np.log((often[usable] - delta) / seldom[usable]).max()) * (1 - 1e-6))


def fullest(examples: int, size: int) -> int:
    """The largest sum of squares of so many examples of a unit over steps of so many each: all in as few as may be."""
    return examples // size * size**2 + (examples % size) ** 2


# ----------------------------------------------------------------------------------------------------
# What is seen of the batches of one data set: who was in which step, a few numbers for each example.


_ENOUGH = 8  # examples, from which on two passes that begin with the same batches are no chance
KEPT = "the loop trains on batches that it kept: who was in those steps cannot be told"
DROPPED = "batches that were fetched without gradients may have been trained on: who was in those steps cannot be told"


@dataclass(frozen=True)
class Observed:
    """What was seen of the batches of one data set.

    Attributes:
        steps: optimizer steps with a batch of it.
        batches: that were handed out for training.
        epochs: passes that were begun.
        most: the largest number of steps of one unit.
        together: the largest number of examples of one unit in a step.
        separation: the smallest distance between two steps of a unit; None where none came twice.
        weight: the largest sum over steps of squared numbers of examples of one unit.
        is_repeated: whether all whole epochs had the same order.
        is_named: whether it is known who was in every batch.
        reused: uses of a batch in a step after its first one.
        is_redrawn: whether two passes began with the same batches, or two batches in a row were the same.
        doubt: why the counts say nothing of the run; "" where they do.
        is_secret: whether batches were drawn at random that the claim rests on: the counts, which tell of them, are for
            the judgement alone, and neither words nor JSON have them.
    """

    steps: int
    batches: int
    epochs: int
    most: int = field(repr=False)
    together: int = field(repr=False)
    separation: int | None = field(repr=False)
    weight: float = field(repr=False)
    is_repeated: bool
    is_named: bool
    reused: int = 0
    is_redrawn: bool = False
    doubt: str = ""
    is_secret: bool = False

    def to_dict(self) -> dict[str, Any]:
        """JSON values: what may be shown."""
        hidden = ("most", "together", "separation", "weight") if self.is_secret else ()
        return {name: value for name, value in vars(self).items() if name not in hidden}

    def describe(self) -> str:
        """One sentence."""
        came = f"{counted(self.batches, 'batch')} in {counted(self.steps, 'step')}"
        if self.doubt:
            return f"{came}; {self.doubt}"
        if not self.is_named:
            return f"{came}; who was in them could not be told"
        if self.is_secret:
            return f"{came}; who was in them is secret, and so is how often units appeared"
        apart = "" if self.separation is None else f", at least {counted(self.separation, 'step')} apart"
        often = f", up to {self.together} examples in a step" if self.together > 1 else ""
        same = "; the same order in each epoch" if self.is_repeated else ""
        again = f"; {counted(self.reused, 'time')} a batch was used again" if self.reused else ""
        steps, epochs, most = counted(self.steps, "step"), counted(self.epochs, "epoch"), counted(self.most, "step")
        told = f"{steps} in {epochs}; a unit in {most} at most"
        return f"{told}{apart}{often}{same}{again}"


@dataclass(eq=False)
class ObservedBatch:
    """The units of a batch that the loop has, and in how many steps it was."""

    names: Indices
    serial: int
    uses: int = 0


class UnitGroup:
    """All loaders of one data set."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset
        self.loaders: list[Any] = []  # that were trained on, copied
        self.known: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()  # the loaders themselves, and their copies
        self.epochs = self.batches = self.steps = self.reused = self.serial = 0
        self.orders: list[bytes] = []
        self.starts: set[bytes] = set()
        self.is_named, self.is_redrawn, self.doubt = True, False, ""
        self.numbers: dict[Any, int] = {}  # of units that are named by batches, and of indices beyond the data set
        self.pending: WeakKeyDictionary[Any, list[ObservedBatch]] = WeakKeyDictionary()
        self.previous: WeakKeyDictionary[Any, list[ObservedBatch]] = WeakKeyDictionary()
        self.fresh: list[ObservedBatch] = []  # since the last step of any optimizer
        self.last: list[ObservedBatch] = []  # what that step used
        self.alive: dict[int, tuple[ReferenceType[Any], int]] = {}  # tensors of batches, and the serial of theirs
        self.dropped = 0  # batches without gradients since the last step
        self.is_exhausted = False  # a pass has ended since the last batch
        self.is_idle = True  # the last step had none of it
        self.is_mixed = False  # an optimizer of no engine of this package stepped once it had batches
        self.is_beside = False  # and one that no engine has made private, where Opacus has made another one so
        self.private = StepTally()
        self.leads: WeakKeyDictionary[Any, bool] = WeakKeyDictionary()  # whether a loop is one batch ahead
        self.weights, self.counts, self.recent = np.zeros(0), np.zeros(0, np.int64), np.zeros(0, np.int64)
        self.together, self.separation = 0, math.inf
        self.last_names = np.zeros(0, np.int64)
        self._size: int | None = None

    def names(self, index: Any, data: Any, unit: Any, naming: Callable[[Indices], Indices] | None) -> Indices | None:
        """The units of a batch by number, or None where they cannot be told."""
        if unit is not None:
            from anyorder.sampling.read_loader import extract_units

            try:
                ids = np.asarray(extract_units(data, unit)).tolist()
            except AnyorderError:  # a batch for a test, say, that names nobody
                return None
            return np.array([self.numbers.setdefault(i, len(self.numbers)) for i in ids], np.int64)
        try:
            found = np.asarray(index).reshape(-1)
            if naming is None or found.dtype.kind not in "iu":
                return np.zeros(0, np.int64) if isinstance(index, list) and not index else None
            if (found > np.iinfo(np.int64).max).any():
                return None
            return self._numbered(naming(found.astype(np.int64)))
        except (ValueError, TypeError, IndexError):
            return None

    def _numbered(self, names: Indices) -> Indices:
        """Small numbers for names that are none: what lies within a data set's length is one already."""
        if self._size is None:
            self._size = _length(self.dataset)
        size = self._size
        if not len(names) or (names.min() >= 0 and names.max() < size):
            return names
        return np.array(
            [i if 0 <= i < size else size + self.numbers.setdefault(i, len(self.numbers)) for i in names.tolist()],
            np.int64,
        )

    def train(self, epoch: "Epoch") -> None:
        """A pass has its first batch that is trained on; loaders that are only looked at say nothing of the order."""
        self.epochs += 1
        if epoch.loader is not None and not any(epoch.loader is loader for loader in self.loaders):
            self.loaders.append(epoch.loader)

    def deliver(self, names: Indices | None, data: Any, is_trained: bool) -> None:
        """A batch is in the hands of the loop; without gradients it is not trained on."""
        self.serial += 1
        for tensor in _tensors(data):
            self._keep(tensor)
        if not is_trained:
            self.dropped += 1
            return
        self.batches += 1
        self.is_exhausted = False
        if names is None:
            self.is_named, names = False, np.zeros(0, np.int64)
        if len(names) >= _ENOUGH and np.array_equal(names, self.last_names):
            self.is_redrawn = True
        self.last_names = names
        batch = ObservedBatch(names, self.serial)
        self.fresh.append(batch)
        for waiting in self.pending.values():
            waiting.append(batch)

    def _keep(self, tensor: Any) -> None:
        key = id(tensor)

        def gone(dead: ReferenceType[Any]) -> None:
            if key in self.alive and self.alive[key][0] is dead:
                del self.alive[key]

        self.alive[key] = ref(tensor, gone), self.serial

    def has_new(self, optimizer: Any) -> bool:
        """Whether batches came since its last step."""
        return bool(self.pending.get(optimizer, self.fresh))

    def step(self, optimizer: Any, is_other: bool, is_unexplained: bool, found: ObservedStep) -> None:
        """An optimizer has stepped: what came since its last step was in it.

        Args:
            is_other: batches of another data set came since its last step, and none of this one.
            is_unexplained: no batch of any data set was ever handed out for training.
            found: the clipping and the noise of the step.
        """
        steps = self.steps
        self._step(optimizer, is_other, is_unexplained)
        if self.steps > steps:
            self.private.add(found)

    def _step(self, optimizer: Any, is_other: bool, is_unexplained: bool) -> None:
        is_new = optimizer not in self.pending
        used = list(self.fresh) if is_new else self.pending[optimizer]
        if used:
            # A loop that fetches one batch ahead takes two before the first step of a pass, and none before the last.
            self.leads[optimizer] = len(used) == 2 or (len(used) == 1 and self.leads.get(optimizer, False))
        else:
            before = self.last if is_new else self.previous.get(optimizer, [])
            used = self._again(optimizer, before, is_new, is_other, is_unexplained)
        self.pending[optimizer] = []
        if used or not is_new:
            self.previous[optimizer] = used or self.previous.get(optimizer, [])
        if self.fresh:
            self.last, self.fresh = self.fresh, []
        self.dropped, self.is_idle = 0, not used
        if used:
            self._count(used)

    def _again(
        self, optimizer: Any, before: list[ObservedBatch], is_new: bool, is_other: bool, is_unexplained: bool
    ) -> list[ObservedBatch]:
        """The batches of a step for which none was fetched: those of the step before, if they can be no others."""
        if self.dropped and not is_other and (self.batches or self.alive or is_unexplained):
            self.doubt, self.steps = self.doubt or DROPPED, self.steps + 1
            return []
        is_alive = bool(self.alive)
        if not before or (((is_other and not is_new) or self.is_idle) and not is_alive):
            return []
        if self.batches == 1:
            return before
        if self.is_exhausted and not is_other and self.leads.pop(optimizer, False):
            self.steps += 1  # with the batch that was fetched ahead, and counted a step early
            return []
        first = min(batch.serial for batch in before)
        others = any(serial < first for _, serial in self.alive.values())  # earlier batches that the loop still has
        if others or (self.is_exhausted and not is_other) or (len(before) > 1 and not is_new):
            self.doubt = self.doubt or KEPT
        return before

    def _count(self, used: list[ObservedBatch]) -> None:
        for batch in used:
            self.reused += batch.uses > 0
            batch.uses += 1
        t, self.steps = self.steps, self.steps + 1
        units, counts = np.unique(np.concatenate([batch.names for batch in used]), return_counts=True)
        if not len(units):
            return
        self._make_room(int(units[-1]) + 1)
        again = self.counts[units] > 0
        if again.any():
            self.separation = min(self.separation, int((t - self.recent[units[again]]).min()))
        self.weights[units] += counts.astype(np.float64) ** 2
        self.counts[units] += 1
        self.recent[units] = t
        self.together = max(self.together, int(counts.max()))

    def _make_room(self, size: int) -> None:
        if size > len(self.weights):
            more = max(size, 2 * len(self.weights)) - len(self.weights)
            self.weights = np.append(self.weights, np.zeros(more))
            self.counts = np.append(self.counts, np.zeros(more, np.int64))
            self.recent = np.append(self.recent, np.zeros(more, np.int64))

    def seen(self) -> Observed:
        """So far."""
        return Observed(
            steps=self.steps, batches=self.batches, epochs=self.epochs, most=int(self.counts.max(initial=0)),
            together=self.together, separation=None if math.isinf(self.separation) else int(self.separation),
            weight=float(self.weights.max(initial=0.0)),
            is_repeated=len(self.orders) > 1 and len(set(self.orders)) == 1, is_named=self.is_named,
            reused=self.reused, is_redrawn=self.is_redrawn or len(set(self.orders)) < len(self.orders),
            doubt=self.doubt,
        )  # fmt: skip


class Epoch:
    """One pass over a loader: the indices that its sampler gave, and which of them were handed out."""

    def __init__(
        self, group: UnitGroup, is_whole_of: int | None, naming: Callable[[Indices], Indices] | None, loader: Any
    ) -> None:
        self.group, self.length, self.naming, self.loader = group, is_whole_of, naming, loader
        self.is_trained = False
        self.waiting: deque[Any] = deque()
        self.handed, self.examples, self.digest = 0, 0, blake2b(digest_size=16)

    def hand_out(self, data: Any, unit: Any) -> Indices | None:
        """The next batch reaches the loop: whose it is, where that can be told."""
        index = self.waiting.popleft() if self.waiting else None
        self.handed += 1
        names = self.group.names(index, data, unit, self.naming)
        if not self.is_trained:
            return names
        if names is not None:
            self.digest.update(names.tobytes() + b".")
            if self.examples < _ENOUGH <= self.examples + len(names):
                start = self.digest.digest()
                self.group.is_redrawn |= start in self.group.starts
                self.group.starts.add(start)
            self.examples += len(names)
        if self.length is not None and self.handed == self.length:
            self.group.orders.append(self.digest.digest())
        return names


def _tensors(data: Any, depth: int = 3) -> Iterator[Any]:
    """Tensors and arrays of a batch, those deep within it left out."""
    import torch

    if isinstance(data, (torch.Tensor, np.ndarray)):
        yield data
    elif depth and isinstance(data, (list, tuple, dict)):
        for part in data.values() if isinstance(data, dict) else data:
            yield from _tensors(part, depth - 1)


def _length(dataset: Any) -> int:
    """Examples of a data set, 0 where it has no length that can be asked for, and never more than fit into tables."""
    try:
        return min(len(dataset), 1 << 28)
    except Exception:  # of the script's own class, which may do anything: its indices are then all numbered
        return 0
