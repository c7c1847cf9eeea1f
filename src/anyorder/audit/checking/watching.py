"""Who really comes when: a training that is watched, and what its samplers and its accountant say of it.

Nothing is drawn, reordered or kept back: the hooks copy the indices that torch's loaders hand out anyway, and count the
steps of optimizers. What is kept is a few numbers for each example.
"""

import copy
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from anyorder import _check
from anyorder._words import counted
from anyorder.audit.checking.arrivals import Arrivals, Run, read_arrivals
from anyorder.audit.checking.finding import Finding, judge, printed
from anyorder.audit.checking.planned import Planned, base_of, judge_planned, planned
from anyorder.audit.checking.seen import KEPT, Epoch, Group, Seen
from anyorder.audit.checking.streams import is_of
from anyorder.audit.checking.visits import AtMost, Coins, Draws, Unknown, Visits

__all__ = ["Watch", "Watched", "watch"]

Indices = NDArray[np.int64]

OTHERS = (
    "another optimizer, or another engine, stepped after batches of this data had come: if it changed a model by them, "
    "no noise of the plan covers that"
)


@dataclass(frozen=True)
class Watched:
    """A finding, what was seen, and what the script itself asked its accountant for.

    Attributes:
        data: the class of the data set.
        finding: claimed and true.
        seen: who came when.
        printed: (delta, epsilon) of each `get_epsilon` of the script.
    """

    data: str
    finding: Finding
    seen: Seen
    printed: tuple[tuple[float, float], ...] = ()

    def __str__(self) -> str:
        return "\n".join(f"{name:>9}  {text}" for name, text in self.facts())

    def facts(self) -> list[tuple[str, str]]:
        """(name, text), for a card."""
        order, *others = self.finding.facts()
        told = [("printed", f"epsilon = {e:.4g} at delta {d:g}, by the script") for d, e in self.printed[-1:]]
        return [("data", self.data), order, ("seen", self.seen.describe()), *told, *others]

    def to_dict(self) -> dict[str, Any]:
        """JSON values."""
        return {
            "data": self.data, **self.finding.to_dict(), "seen": self.seen.to_dict(),
            "printed": [list(pair) for pair in self.printed],
        }  # fmt: skip


class Watch:
    """What `watch` has seen so far."""

    def __init__(self, unit: Any = None) -> None:
        self.unit = unit
        self.failure = ""  # of a hook: then nothing finite is said
        self._groups: dict[int, Group] = {}
        self._epochs: WeakKeyDictionary[Any, Epoch] = WeakKeyDictionary()
        self._starting: list[Epoch] = []
        self._engines: dict[int, Any] = {}
        self._private: WeakKeyDictionary[Any, bool] = WeakKeyDictionary()
        self._printed: dict[int, list[tuple[float, float]]] = {}
        self._planned: list[Planned] = []  # by engines of this package
        self._own: WeakKeyDictionary[Any, bool] = WeakKeyDictionary()  # their optimizers

    def findings(
        self, *, delta: float | None = None, noise_multiplier: float | None = None, accountant: str = "prv"
    ) -> list[Watched]:
        """One for each data set that was trained on.

        Args:
            delta: None for the one that the script asked its accountant for, or 1e-5.
            noise_multiplier: where no engine of Opacus says it; 1 if none does.
            accountant: "prv" or "rdp", where there is no engine.
        """
        groups = [g for g in self._groups.values() if g.steps or (self.failure and g.batches)]
        if self.failure and not groups:
            groups = list(self._groups.values()) or [Group(None)]
        return [self._judge(g, delta, noise_multiplier, accountant) for g in groups]

    # -- called by the hooks ----------------------------------------------------------------------------------------

    def begin(self, loader: Any) -> Epoch:
        """A pass over a loader."""
        group, naming = self._group(loader)
        if loader not in group.known:
            group.known[loader] = None
            try:
                kept = copy.copy(loader)  # its samplers and data set, not its workers
                object.__setattr__(kept, "_iterator", None)
                group.known[loader] = kept
            except Exception as problem:  # a class of the script's own may refuse; it is told, and the script goes on
                group.doubt = group.doubt or _told(problem)
        batcher = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
        try:
            length = len(batcher) if group.is_named else None
        except Exception:  # a sampler of the script's own may raise anything: its epochs have no length
            length = None
        epoch = Epoch(group, length, naming, group.known[loader])
        self._starting.append(epoch)
        return epoch

    def begun(self, iterator: Any, epoch: Epoch | None) -> None:
        """The iterator of that pass is made."""
        if epoch is None:
            return
        self._starting.remove(epoch)
        if iterator is not None:
            self._epochs[iterator] = epoch

    def drawn(self, iterator: Any, index: Any) -> None:
        """The sampler gave the indices of a batch."""
        epoch = self._starting[-1] if self._starting else self._epochs.get(iterator)
        if epoch is not None:
            epoch.waiting.append(copy.copy(index))

    def handed(self, iterator: Any, data: Any) -> None:
        """The batch reached the loop; without gradients it is not trained on."""
        import torch

        epoch = self._epochs.get(iterator)
        if epoch is None:
            return
        is_trained = torch.is_grad_enabled()
        if is_trained and not epoch.is_trained:
            epoch.group.train(epoch)
        epoch.is_trained |= is_trained
        names = epoch.hand_out(data, self.unit)
        epoch.group.deliver(names, data, is_trained)

    def ended(self, iterator: Any) -> None:
        """The loop was told that the pass is over."""
        epoch = self._epochs.get(iterator)
        if epoch is not None and epoch.is_trained:
            epoch.group.is_exhausted = True

    def stepped(self, optimizer: Any, *_: Any) -> None:
        """An optimizer has changed a model."""
        groups = list(self._groups.values())
        if optimizer not in self._own:
            for group in groups:
                group.is_mixed |= group.batches > 0
        if self._private and optimizer not in self._private:
            return
        new = [group.has_new(optimizer) for group in groups]
        is_unexplained = not any(group.batches for group in groups)
        for group, is_new in zip(groups, new, strict=True):
            group.step(optimizer, any(new) and not is_new, is_unexplained)

    def careful(self, hook: Callable[..., Any], *args: Any) -> Any:
        """What a hook gives, or None where it fails.

        What is watched belongs to the script: samplers, keys, data sets and optimizers of its own may raise anything
        when they are asked, and a training must not end for being watched. So no failure of a hook goes on to the
        script. It is not lost either: from then on nothing finite is said of the run, and the finding has the words.
        """
        try:
            return hook(*args)
        except Exception as problem:
            self.failure = self.failure or _told(problem)
            return None

    def made_private(self, engine: Any, result: Any) -> None:
        """Opacus has made a training private."""
        self._engines[id(engine)] = engine
        for part in result if isinstance(result, tuple) else ():
            if hasattr(part, "original_optimizer") and hasattr(part, "noise_multiplier"):
                self._private[part.original_optimizer] = True

    def planned(self, engine: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """An engine of this package has made a training private."""
        bound, optimizer = planned(engine, args, kwargs)
        self._planned.append(bound)
        self._own[optimizer] = True

    def asked(self, engine: Any, delta: float, epsilon: float) -> None:
        """The script asked for its epsilon."""
        self._printed.setdefault(id(engine), []).append((float(delta), float(epsilon)))

    # -- the judgement ----------------------------------------------------------------------------------------------

    def _group(self, loader: Any) -> tuple[Group, Callable[[Indices], Indices] | None]:
        """All that is of the same data, and who the indices of this loader are."""
        from torch.utils.data import IterableDataset

        from anyorder.sampling.origins import Origins

        base = base_of(loader.dataset)
        group = self._groups.setdefault(id(base), Group(base))
        if isinstance(base, IterableDataset):
            return group, None
        try:
            origins = Origins(loader.dataset)
        except Exception:  # a data set of the script's own may raise anything: nobody is named then
            return group, None
        dataset = loader.dataset

        def naming(indices: Indices) -> Indices:
            if indices.min(initial=0) < 0:  # from the end, as lists and tensors count
                indices = np.where(indices < 0, indices + len(dataset), indices)
            return origins.names(indices)

        return group, naming

    def _judge(self, group: Group, delta: float | None, noise: float | None, accountant: str) -> Watched:
        seen = group.seen()
        bound = [one for one in self._planned if one.dataset is group.dataset]
        if bound:
            delta = None if delta is None else _check.probability("delta", delta)
            doubt = self.failure or (OTHERS if group.is_mixed or self._engines else "")
            finding = judge_planned(bound, seen, delta, doubt)
            shown = replace(seen, is_secret=any(one.plan.participation.secret for one in bound))
            return Watched(type(group.dataset).__name__, finding, shown)
        engines = [engine for engine in self._engines.values() if engine.accountant.history]
        own = engines if len(engines) == 1 else [e for e in engines if _same_data(e, group.dataset)]
        asked = tuple(pair for engine in own for pair in self._printed.get(id(engine), ()))
        if delta is None:
            delta = asked[-1][0] if asked else 1e-5
        delta = _check.probability("delta", delta)
        joined = max(1, round(seen.batches / max(1, seen.steps)))
        found = _combined(self._read(group, seen, joined), seen)
        if self.failure:
            found = _doubted(found, self.failure)
        history = [entry for engine in own or engines for entry in engine.accountant.history]
        loudest = None
        if own:
            found = _accounted(found, sum(int(steps) for _, _, steps in history), seen.steps)
            claims = [float(engine.accountant.get_epsilon(delta)) for engine in own]
            claimed, q, by = max(claims), float(history[-1][1]), "the script's own accountant"
            if len(own) > 1:
                by = f"the largest claim of {len(own)} accountants of the script, each of its own training alone"
        elif engines and noise is None:
            by = "give noise_multiplier: the script's accountants are of other data"
            claimed = q = math.nan
            found = _doubted(found, "several engines of Opacus, and none of them is known to be of this data")
        else:
            by = f"{accountant} accountant"
            q = min(1.0, joined / found.batches) if found.batches else math.nan
        if history and (own or noise is None):
            sigma, loudest = (float(of(s for s, _, _ in history)) for of in (min, max))
        else:
            sigma = _check.positive("noise_multiplier", 1.0 if noise is None else noise)
            claimed = math.nan if math.isnan(q) else printed(accountant, sigma, q, seen.steps, delta)
        finding = judge(found, claimed, sigma, delta, q=None if math.isnan(q) else q, accountant=by, loudest=loudest)
        seen = replace(seen, is_secret=isinstance(found.visits, (Coins, Draws)))
        return Watched(type(group.dataset).__name__, finding, seen, asked)

    def _read(self, group: Group, seen: Seen, joined: int) -> Arrivals:
        """What the samplers say, of a run of as many steps."""
        try:
            found = self._said(group, seen, joined)
        except Exception as problem:  # samplers and data sets of the script's own may raise anything when asked
            found = Arrivals("that of a loader that cannot be read", Unknown(), _told(problem))
        return replace(found, steps=seen.steps, epochs=seen.epochs)

    def _said(self, group: Group, seen: Seen, joined: int) -> Arrivals:
        read = []
        for loader in group.loaders:
            split = is_of(loader.batch_sampler, "opacus.utils.batch_memory_manager", "BatchSplittingSampler")
            accumulate = 1 if split else joined  # such a loader's parts are of one step
            one = read_arrivals(loader, Run(None, seen.steps, accumulate))
            # steps that straddle epochs are fewer, and so are those of epochs whose last batches are dropped
            is_split = one.batches is not None and seen.steps == seen.epochs * -(-one.batches // accumulate)
            one = read_arrivals(loader, Run(None, seen.steps, accumulate, is_split=is_split))
            if isinstance(one.visits, AtMost) and (one.epochs or 0) < seen.epochs:  # epochs that were broken off
                one = read_arrivals(loader, Run(seen.epochs, None, accumulate, is_split=is_split))
            read.append(one)
        if not read:
            return Arrivals("that of a loader that cannot be read", Unknown(), "the loader cannot be copied")
        if len({(one.order, one.batches) for one in read}) == 1:
            found = read[0]
        else:
            words = "; then ".join(dict.fromkeys(one.order for one in read))
            found = Arrivals(words, Unknown(), "several loaders of other orders", batches=read[0].batches)
        if self.unit is not None and not isinstance(found.visits, Unknown):
            found = replace(found, visits=Unknown(), because="units are named by batches")
        return found


def _combined(said: Arrivals, seen: Seen) -> Arrivals:
    """What the samplers say, and where they say nothing, or less than was seen, what was seen."""
    if seen.doubt:
        return _doubted(said, seen.doubt)
    if not seen.is_named:
        if seen.reused and not isinstance(said.visits, Unknown):
            return _doubted(said, KEPT)  # how often each of them was used is not known by its units
        return said
    if seen.weight == 0:
        return _doubted(said, "nobody was seen in any step")
    watched: Visits = AtMost(seen.weight)
    because = (
        f"in the order that was seen, squared counts of a unit in its steps sum up to {seen.weight:g} at most: mu = "
        f"sqrt({seen.weight:g}) / sigma. It holds for this run, if the order does not depend on the data; nothing "
        "promises it for another one"
    )
    if seen.reused:
        because += "; a step for which no batch was fetched is taken to be of the batch of the step before"
    because += "; no data set or collate function of the script's own may give an example under two indices"
    match said.visits:
        case Coins() | Draws():
            if seen.is_redrawn:
                words = "the same batches came again, so that no coins were tossed anew (a seed that is set again?)"
            elif seen.reused:
                words = "batches were used in several steps, so that not each step had coins of its own"
            else:
                return said
            return replace(said, visits=watched, because=f"{words}; {because}", participation=None)
        case AtMost() if seen.reused:
            return replace(said, visits=watched, because=because, participation=None)
        case AtMost(weight=weight) if weight >= seen.weight:
            words = said.order
            visits = said.visits
            if seen.is_repeated and "anew" in words:
                words = (
                    f"one shuffle, the same in each epoch, as was seen (a sampler that is not told the epoch?): {words}"
                )
                if visits.shuffles is not None:
                    visits = replace(visits, shuffles=replace(visits.shuffles, epochs=min(1, visits.shuffles.epochs)))
            return replace(said, order=words, visits=visits)
        case AtMost():
            return replace(
                said,
                visits=watched,
                because=f"a unit came more often than its sampler says; {because}",
                participation=None,
            )
        case Unknown():
            return replace(said, visits=watched, because=because)


def _accounted(found: Arrivals, accounted: int, steps: int) -> Arrivals:
    """Unknown where the accountants have other steps than were seen."""
    if accounted == steps:
        return found
    return _doubted(
        found,
        f"the script's accountant has {counted(accounted, 'step')} and {steps} were seen: who was in others is unknown",
    )


def _doubted(found: Arrivals, because: str) -> Arrivals:
    return replace(found, visits=Unknown(), because=because, participation=None)


def _told(problem: Exception) -> str:
    """Without its text, which may have data in it."""
    return f"who was there could not be told: watching met {type(problem).__name__} in the script's own classes"


def _same_data(engine: Any, dataset: Any) -> bool:
    return base_of(engine.dataset) is dataset


@contextmanager
def watch(*, unit: Any = None) -> Iterator[Watch]:
    """Watch every torch loader and optimizer that is used inside the block.

        with ao.audit.watch() as seen:
            train()
        for one in seen.findings(delta=1e-5):
            print(one)

    Of each batch it is noted whose it was, when it was handed to the loop; batches under `torch.no_grad` are not
    trained on. They are in the optimizer's next step. Loops that fetch a batch before they step with the one before are
    seen one step off. Opacus's `make_private` and `get_epsilon` are noted where opacus is imported before the block;
    `PrivacyEngine.make_private` of this package too (import anyorder.train), whose plan then makes the claim.

    Args:
        unit: where a batch keeps the ids of its units; None for examples, by their index.
    Cost: some 100 microseconds for a batch of 64, 1 ms for one of 1024, and 24 bytes for each example.
    """
    from torch.optim.optimizer import register_optimizer_step_post_hook
    from torch.utils.data import DataLoader
    from torch.utils.data.dataloader import _BaseDataLoaderIter

    seen = Watch(unit)

    def begin(original: Callable[..., Any], loader: Any) -> Any:
        epoch = seen.careful(seen.begin, loader)
        iterator = None
        try:
            iterator = original(loader)
        finally:
            seen.careful(seen.begun, iterator, epoch)
        return iterator

    def draw(original: Callable[..., Any], iterator: Any) -> Any:
        index = original(iterator)
        seen.careful(seen.drawn, iterator, index)
        return index

    def hand(original: Callable[..., Any], iterator: Any) -> Any:
        try:
            data = original(iterator)
        except StopIteration:
            seen.careful(seen.ended, iterator)
            raise
        seen.careful(seen.handed, iterator, data)
        return data

    def make(original: Callable[..., Any], engine: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(engine, *args, **kwargs)
        seen.careful(seen.made_private, engine, result)
        return result

    def bind(original: Callable[..., Any], engine: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(engine, *args, **kwargs)
        seen.careful(seen.planned, engine, args, kwargs)
        return result

    def ask(original: Callable[..., Any], engine: Any, delta: float, *args: Any, **kwargs: Any) -> Any:
        epsilon = original(engine, delta, *args, **kwargs)
        seen.careful(seen.asked, engine, delta, epsilon)
        return epsilon

    hooks: list[tuple[Any, str, Callable[..., Any]]] = [
        (DataLoader, "__iter__", begin), (_BaseDataLoaderIter, "_next_index", draw),
        (_BaseDataLoaderIter, "__next__", hand),
    ]  # fmt: skip
    if (own := sys.modules.get("anyorder.train.engine")) is not None:
        hooks.append((own.PrivacyEngine, "make_private", bind))
    if (opacus := sys.modules.get("opacus.privacy_engine")) is not None:
        hooks += [(opacus.PrivacyEngine, "make_private", make), (opacus.PrivacyEngine, "get_epsilon", ask)]
    with ExitStack() as stack:
        for owner, name, hook in hooks:
            stack.enter_context(_replaced(owner, name, hook))
        handle = register_optimizer_step_post_hook(lambda *args: seen.careful(seen.stepped, *args))
        stack.callback(handle.remove)
        yield seen


@contextmanager
def _replaced(owner: Any, name: str, hook: Callable[..., Any]) -> Iterator[None]:
    """A method that calls the hook with the original first."""
    original = owner.__dict__[name]

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return hook(original, self, *args, **kwargs)

    method.__name__, method.__doc__ = name, original.__doc__
    setattr(owner, name, method)
    try:
        yield
    finally:
        setattr(owner, name, original)
