"""Whether each example was clipped and noise was added, in every step that an optimizer of Opacus takes.

What counts is what the step used, not what a setting says:

- *clipping*: per-example gradients are clipped again here, by the norm that the optimizer has at that moment, and their
  sum must be the one that the optimizer made. With ghost norms there are no such gradients: the factors of the
  examples must be computed once for each sum, one example of each pass is differentiated again, and the sum must be
  the one that the pass left.
- *noise*: the gradient that the model's own optimizer is about to apply, times what Opacus divides it by, must be that
  sum plus numbers that Opacus's generator gave in this step. Their size must agree with the standard deviation that
  was asked for, and no step may have the noise of another one.
- *weights*: they must be those that a step of the optimizer left, that one or an earlier one.

Classes are known by their exact type. What was not observed counts as no noise.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import blake2b
from types import ModuleType
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, ref

import numpy as np
from scipy.special import chdtr

_KNOWN = ("DPOptimizer", "DPPerLayerOptimizer", "DPOptimizerFastGradientClipping")
_CHANCE = 1e-9  # that true noise is called too small
_CLOSE = 1e-4  # relative rounding of float32 in sums, with room
_FAR = 1 << 25  # numbers between the noise of two steps
_COARSE = 2e-2  # of bfloat16 and float16

NOT_PRIVATE = "the optimizer that stepped clips no gradients and adds no noise that could be observed"
_UNCLIPPED = "no clipping of single examples was observed before the step"
_SILENT = "the gradients of the step have no noise that was drawn for it"
_AGAIN = "the same noise was added in two steps"
_TOO_SMALL = "the noise is smaller than the optimizer says"
_HOOKED = "a hook of the model's own optimizer may change its gradients after their noise was added"
_PUT_BACK = (
    "the generator of the noise was set anew between two steps, to a state that cannot be reached from the last one (a "
    "state that the script puts back?): noise of a step may be that of another one"
)
REWRITTEN = "weights were changed between two steps by something else than the optimizer, and no noise covers that"
SEEDED = (
    "the noise comes from a seed that the script sets (torch.manual_seed, or a generator of its own), and whoever "
    "knows the seed can take the noise off: leave the seed to the operating system"
)


@dataclass(frozen=True)
class ObservedStep:
    """What was observed of one optimizer step.

    Attributes:
        noise_multiplier: noise std over clip norm, as used; 0 where clipping or noise was not observed.
        clip_norm: of one example, as used.
        missing: what was not observed; "" where nothing is missing.
        rows: examples that were clipped.
        is_seeded: whether the noise comes from a seed that the script has set.
    """

    noise_multiplier: float = 0.0
    clip_norm: float = 0.0
    missing: str = ""
    rows: int = 0
    is_seeded: bool = False


class StepTally:
    """The steps of one data set, added up."""

    def __init__(self) -> None:
        self.steps = self.private = 0
        self.least, self.most, self.clip_norm = math.inf, 0.0, 0.0
        self.missing, self.is_seeded = "", False

    def add(self, step: ObservedStep) -> None:
        """One more step."""
        self.steps += 1
        self.is_seeded |= step.is_seeded
        if step.missing:
            self.missing = self.missing or step.missing
            return
        self.private += 1
        self.least, self.most = min(self.least, step.noise_multiplier), max(self.most, step.noise_multiplier)
        self.clip_norm = max(self.clip_norm, step.clip_norm)

    def describe(self) -> str:
        """One sentence."""
        if not self.private:
            return f"clipping and noise in none of {self.steps} steps" if self.steps else "no step was seen"
        many = f"all {self.steps}" if self.private == self.steps else f"{self.private} of {self.steps}"
        return (
            f"in {many} steps each example was clipped to norm {self.clip_norm:g} and Gaussian noise was added, with "
            f"{self.least:g} times that as its standard deviation"
        )


class _Clipped(NamedTuple):
    """A sum of clipped gradients that an optimizer made."""

    norm: float
    rows: int
    is_right: bool


class _Drawn(NamedTuple):
    """Noise that Opacus's generator gave, for the sum that it was drawn beside."""

    reference: Any
    noise: Any
    std: float
    is_seeded: bool


class FreshNumbers:
    """Whether noise comes from numbers of its generator that no noise was made of before.

    The generator of the CPU makes blocks of 624 numbers, each from the one before, and never returns to one. So what
    is drawn later stands in a later block, or further on in the same one; the numbers between are drawn again here. The
    generator of a GPU counts its numbers.

    Attributes:
        doubt: why noise may have been drawn of the same numbers; "" where it was not.
    """

    def __init__(self) -> None:
        self.doubt = ""
        self._ends: dict[Any, Any] = {}  # generator: its state after it gave noise

    def restart(self) -> None:
        """All of torch's own generators have a new seed, of the operating system's: noise begins there."""
        import torch

        for own in [own for own in self._ends if isinstance(own, str)]:
            self._ends[own] = torch.get_rng_state() if own == "cpu" else torch.cuda.get_rng_state(own)

    def drawing(self, std: float, reference: Any, generator: Any = None, secure_mode: bool = False) -> None:
        """Opacus is about to draw noise."""
        if secure_mode or std == 0 or self.doubt:
            return
        own, state = self._state(reference, generator)
        end = self._ends.get(own)
        if end is not None and not (_is_later if len(state) > 16 else _counts_on)(end, state):
            self.doubt = self.doubt or _PUT_BACK

    def drawn(self, std: float, reference: Any, generator: Any = None, secure_mode: bool = False) -> None:
        """It has."""
        if not secure_mode and std:
            own, end = self._state(reference, generator)
            self._ends[own] = end

    def _state(self, reference: Any, generator: Any) -> tuple[Any, Any]:
        import torch

        if generator is not None:
            return generator, generator.get_state()
        device = reference.device
        return str(device), torch.get_rng_state() if device.type == "cpu" else torch.cuda.get_rng_state(device)


def _counts_on(end: Any, state: Any) -> bool:
    """A GPU's seed and count: the same seed, and no smaller count."""
    (seed, count), (seed_now, count_now) = (one.numpy().view("uint64").tolist() for one in (end, state))
    return bool(seed == seed_now and count_now >= count)


def _is_later(end: Any, state: Any) -> bool:
    """Whether a state of the CPU's generator comes behind another one, at most `_FAR` numbers later."""
    import torch

    (left, wanted), (left_then, block) = _parts(state), _parts(end)
    if (block == wanted).all():
        return left <= left_then
    first = _given(wanted[:3])
    walker, size, last = torch.Generator(), 1 << 10, np.empty(0, np.int32)
    walker.set_state(end)
    drawn = 0
    while drawn < _FAR:
        numbers = torch.empty(size, dtype=torch.int32).random_(generator=walker).numpy()
        row = np.concatenate([last, numbers])
        at = np.flatnonzero(row[:-2] == first[0])
        if ((row[at + 1] == first[1]) & (row[at + 2] == first[2])).any():
            return True
        drawn, size, last = drawn + size, min(2 * size, 1 << 20), row[-2:]
    return False


def _parts(state: Any) -> tuple[int, Any]:
    """(how many numbers of the block are left, the block) of the CPU's generator, a Mersenne twister."""
    words = state.numpy()
    return int(words[8:12].view(np.int32)[0]), words[24 : 24 + 8 * 624].view(np.uint64).astype(np.uint32)


def _given(words: Any) -> Any:
    """The 31-bit numbers that words of a block are given out as [Matsumoto, Nishimura 1998]."""
    words = words ^ (words >> np.uint32(11))
    words = words ^ ((words << np.uint32(7)) & np.uint32(0x9D2C5680))
    words = words ^ ((words << np.uint32(15)) & np.uint32(0xEFC60000))
    words = words ^ (words >> np.uint32(18))
    return (words & np.uint32(0x7FFFFFFF)).astype(np.int32)


class OpacusSteps:
    """What optimizers of Opacus did since the last step of each.

    Args:
        seed: gives the seed of torch's default generator. The one at the start is the operating system's, or at least
            not of what is watched.
        rows: a `LossRows`, which follows the losses.
    """

    def __init__(self, seed: Callable[[], int], rows: Any) -> None:
        self._seed, self._secret, self.rows = seed, {seed()}, rows
        self._stream = FreshNumbers()
        self._optimizers: WeakKeyDictionary[Any, ref[Any]] = WeakKeyDictionary()
        self._clipped: WeakKeyDictionary[Any, list[_Clipped]] = WeakKeyDictionary()
        self._weighed: list[tuple[set[int], float, Any]] = []  # parameters, clip norm, factors of examples
        self._passed: WeakKeyDictionary[Any, bytes] = WeakKeyDictionary()  # gradients that a pass with factors left
        self._drawn: list[_Drawn] = []
        self._digests: set[bytes] = set()
        self._dimensions, self._squares = 0, 0.0

    def __contains__(self, optimizer: Any) -> bool:
        return optimizer in self._optimizers

    def __bool__(self) -> bool:
        return bool(self._optimizers)

    @property
    def is_quiet(self) -> bool:
        """Whether all noise together is smaller than the optimizers said."""
        return bool(chdtr(self._dimensions, self._squares) < _CHANCE)

    @property
    def doubt(self) -> str:
        """Why what was seen does not establish that steps are private; "" where it does."""
        return self.rows.doubt or self._stream.doubt

    # -- what happened: called by hooks ------------------------------------------------------------------------------

    def built(self, optimizer: Any) -> None:
        """An optimizer of Opacus was made around a plain one."""
        self._optimizers[optimizer.original_optimizer] = ref(optimizer)

    def reseeded(self, seed: int) -> None:
        """torch.seed() took a seed from the operating system."""
        self._secret.add(seed)
        self._stream.restart()

    def seeded(self, seed: int) -> None:
        """torch.manual_seed() was called: whoever reads the script may know the seed."""
        self._secret.discard(int(seed))

    def sums(self, optimizer: Any) -> list[Any]:
        """The sums before more clipped gradients are added to them."""
        return [None if p.summed_grad is None else p.summed_grad.detach().clone() for p in optimizer.params]

    def clipped(self, optimizer: Any, before: list[Any]) -> None:
        """The optimizer has clipped and added: its sums must have grown by what is computed here."""
        self.rows.clipped(optimizer.loss_reduction)
        params = optimizer.params
        samples = [p.grad_sample if isinstance(p.grad_sample, list) else [p.grad_sample] for p in params]
        bounds = getattr(optimizer, "max_grad_norms", None)
        norm = float(optimizer.max_grad_norm)
        if bounds is not None:  # per layer: what one example may move is all of them together
            norm = math.hypot(*map(float, bounds))
        rows = sum(len(part) for part in samples[0])
        error = 0.0
        for p, old, sum_ in zip(params, before, _clipped_sums(samples, norm, bounds), strict=True):
            moved = p.summed_grad.detach().float() - (0 if old is None else old.float())
            error += float((moved.flatten() - sum_).square().sum())
        close = _COARSE if params[0].element_size() < 4 else _CLOSE
        is_right = math.sqrt(error) <= close * norm * math.sqrt(max(1, rows))  # false for NaN too
        self._clipped.setdefault(optimizer, []).append(_Clipped(norm, rows, is_right))

    def weighed(self, module: Any, factors: Any) -> None:
        """Ghost norms: the factors of the examples of one backward pass."""
        self._weighed.append(({id(p) for p in module.trainable_parameters}, float(module.max_grad_norm), factors))

    def differentiated(self, loss: Any) -> tuple[int, float]:
        """Ghost norms: (the example of the largest loss, the length of its gradient), before the pass."""
        import torch

        losses, length = loss.loss_per_sample.flatten(), 0.0
        if not len(losses):
            return 0, length
        example = int(losses.detach().argmax())
        loss.module.disable_hooks()
        try:
            params = [p for p in loss.optimizer.params if p.requires_grad]
            found = torch.autograd.grad(losses[example], params, retain_graph=True, allow_unused=True)
        finally:
            loss.module.enable_hooks()
        return example, math.sqrt(sum(float(g.detach().float().square().sum()) for g in found if g is not None))

    def passed(self, loss: Any, before: tuple[int, float]) -> None:
        """Ghost norms: that pass is over, and has left its sum in the gradients."""
        example, length = before
        _, norm, factors = self._weighed[-1]
        factor = float(factors.flatten()[example]) if len(factors) else 0.0
        if factor * length <= norm * (1 + _COARSE):
            self._passed[loss.optimizer] = fingerprint([p.grad for p in loss.optimizer.params])

    def accumulating(self, optimizer: Any) -> None:
        """Ghost norms: gradients are about to be added to the sums. They must be of one pass with factors."""
        self.rows.clipped(optimizer.loss_reduction)
        own = {id(p) for p in optimizer.params}
        found = [one for one in self._weighed if own <= one[0]]
        self._weighed = [one for one in self._weighed if not own <= one[0]]
        if len(found) == 1:
            [(_, norm, factors)] = found
            passed = self._passed.pop(optimizer, None)
            one = _Clipped(norm, len(factors), passed == fingerprint([p.grad for p in optimizer.params]))
        else:
            one = _Clipped(math.inf, 0, False)
        self._clipped.setdefault(optimizer, []).append(one)

    def drawn(self, noise: Any, std: float, reference: Any, generator: Any = None, secure_mode: bool = False) -> None:
        """Opacus's generator gave noise."""
        self._drawn.append(_Drawn(reference, noise, float(std), self.is_known(generator, secure_mode)))

    def is_known(self, generator: Any, secure_mode: bool) -> bool:
        """Whether somebody who reads the script may know the numbers of a generator, None for torch's own."""
        try:
            return (self._seed() if generator is None else generator.initial_seed()) not in self._secret
        except RuntimeError:  # one of the operating system's has no seed that could be known
            return not secure_mode

    # -- the step ----------------------------------------------------------------------------------------------------

    def step(self, optimizer: Any) -> ObservedStep:
        """A plain optimizer is about to apply its gradients."""
        found = self._optimizers.get(optimizer)
        private = None if found is None else found()
        if private is None:
            return ObservedStep(missing=NOT_PRIVATE)
        clips, drawn = self._clipped.pop(private, []), self._drawn
        self._drawn = []
        if type(private).__name__ not in _KNOWN or not type(private).__module__.startswith("opacus.optimizers."):
            return ObservedStep(missing=f"clipping and noise of {type(private).__name__} cannot be observed")
        if not clips or not all(one.is_right for one in clips):
            return ObservedStep(missing=_UNCLIPPED)
        if optimizer._optimizer_step_pre_hooks:
            return ObservedStep(missing=_HOOKED)
        missing, std = self._noise(optimizer, private, {id(one.reference): one for one in drawn})
        norm = max(one.norm for one in clips)
        if missing or not 0 < norm < math.inf:
            return ObservedStep(missing=missing or _UNCLIPPED)
        rows, is_seeded = sum(one.rows for one in clips), any(one.is_seeded for one in drawn)
        return ObservedStep(std / norm, norm, "", rows, is_seeded)

    def _noise(self, optimizer: Any, private: Any, drawn: dict[int, _Drawn]) -> tuple[str, float]:
        """(what is missing, the least std) of the noise in the gradients that are about to be applied."""
        scale = 1.0
        if private.loss_reduction == "mean":
            scale = private.expected_batch_size * private.accumulated_iterations
        digest, std, dimensions, squares = blake2b(digest_size=16), math.inf, 0, 0.0
        for p in (p for group in optimizer.param_groups for p in group["params"] if p.grad is not None):
            total = getattr(p, "summed_grad", None)
            one = None if total is None else drawn.get(id(total))
            if total is None or one is None or not one.std > 0:
                return _SILENT, 0.0
            noise, total = one.noise.detach().float().flatten(), total.detach().float().flatten()
            length, close = float(noise.norm()), _COARSE if p.element_size() < 4 else _CLOSE
            error = float((p.grad.detach().float().flatten() * scale - total - noise).norm())
            if not error <= close * length + 0.1 * close * float(total.norm()):
                return _SILENT, 0.0
            std, dimensions, squares = min(std, one.std), dimensions + len(noise), squares + (length / one.std) ** 2
            digest.update(noise[:16].cpu().numpy().tobytes())
        self._dimensions, self._squares = self._dimensions + dimensions, self._squares + squares
        if not dimensions or chdtr(dimensions, squares) < _CHANCE:
            return _TOO_SMALL if dimensions else _SILENT, 0.0
        if dimensions > 3 and digest.digest() in self._digests:
            return _AGAIN, 0.0
        self._digests.add(digest.digest())
        return "", std

    # -- the hooks ---------------------------------------------------------------------------------------------------

    def hooks(self, opacus: ModuleType, careful: Callable[..., Any]) -> list[tuple[Any, str, Callable[..., Any]]]:
        """(owner, name, what is called in the place of it, with the original first)."""

        def build(original: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
            original(*args, **kwargs)  # itself first; one of its keywords is called optimizer
            careful(self.built, args[0])

        def clip(original: Callable[..., Any], optimizer: Any) -> Any:
            before = careful(self.sums, optimizer)
            result = original(optimizer)
            careful(self.clipped, optimizer, before)
            return result

        def weigh(original: Callable[..., Any], module: Any) -> Any:
            factors = original(module)
            careful(self.weighed, module, factors)
            return factors

        def accumulate(original: Callable[..., Any], optimizer: Any) -> Any:
            careful(self.accumulating, optimizer)
            return original(optimizer)

        def go_back(original: Callable[..., Any], loss: Any) -> Any:
            with self.rows.aside():
                before = careful(self.differentiated, loss)
            with self.rows.ghost():
                result = original(loss)
            careful(self.passed, loss, before)
            return result

        def draw(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            careful(lambda: self._stream.drawing(*args, **kwargs))
            noise = original(*args, **kwargs)
            careful(lambda: self._stream.drawn(*args, **kwargs))
            careful(lambda: self.drawn(noise, *args, **kwargs))
            return noise

        kinds = opacus.optimizers
        return [
            (kinds.DPOptimizer, "__init__", build),
            (kinds.DPOptimizer, "clip_and_accumulate", clip),
            (kinds.DPPerLayerOptimizer, "clip_and_accumulate", clip),
            (kinds.DPOptimizerFastGradientClipping, "accumulate", accumulate),
            (opacus.grad_sample.GradSampleHooksFastGradientClipping, "get_clipping_coef", weigh),
            (opacus.utils.fast_gradient_clipping_utils.DPTensorFastGradientClipping, "backward", go_back),
            (kinds.optimizer, "_generate_noise", draw),
            (kinds.optimizer_fast_gradient_clipping, "_generate_noise", draw),
        ]


class WeightTally:
    """Whether weights are those that a step of their optimizer left, or what they were before the first."""

    def __init__(self) -> None:
        self._left: WeakKeyDictionary[Any, set[bytes]] = WeakKeyDictionary()
        self.is_rewritten = False

    def stepping(self, optimizer: Any) -> None:
        """The optimizer is about to change them."""
        now, left = fingerprint(_weights(optimizer)), self._left.setdefault(optimizer, set())
        self.is_rewritten |= bool(left) and now not in left
        left.add(now)

    def stepped(self, optimizer: Any) -> None:
        """It has changed them."""
        self._left.setdefault(optimizer, set()).add(fingerprint(_weights(optimizer)))


def _weights(optimizer: Any) -> list[Any]:
    return [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]


def fingerprint(tensors: list[Any]) -> bytes:
    """Sums of the bits of these tensors, which take other values to come out otherwise; None among them is left out."""
    import torch

    kinds, digest = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}, blake2b(digest_size=16)
    for tensor in tensors:
        found = b"none"
        if tensor is not None:
            bits = tensor.detach().contiguous().flatten().view(kinds[tensor.element_size()])
            sums = torch.stack([bits.sum(dtype=torch.int64), bits[::2].sum(dtype=torch.int64)])
            found = sums.cpu().numpy().tobytes()
        digest.update(found)
    return digest.digest()


def _clipped_sums(samples: list[list[Any]], norm: float, bounds: list[float] | None) -> list[Any]:
    """For each parameter the sum of its rows, each row times min(1, norm / its length), in float32.

    Args:
        samples: for each parameter the gradients of each example, in one or several parts.
        norm: for all parameters of an example together.
        bounds: or for each parameter alone.
    """
    sums: list[Any] = [0.0] * len(samples)
    for part in zip(*samples, strict=True):
        rows = [g.detach().float().reshape(len(g), math.prod(g.shape[1:])) for g in part]
        lengths = [r.square().sum(1) for r in rows]
        if bounds is None:
            lengths = [sum(lengths)] * len(rows)
        limits = [norm] * len(rows) if bounds is None else bounds
        for i, (row, length, limit) in enumerate(zip(rows, lengths, limits, strict=True)):
            sums[i] = sums[i] + (limit / length.sqrt()).clamp(max=1.0) @ row
    return sums
