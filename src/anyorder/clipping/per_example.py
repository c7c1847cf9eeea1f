"""Per-unit clipping: every example's gradient, or only its norm, and the sum of the units' clipped gradients.

`GhostClipping` takes one forward and one backward pass, without a gradient for each example where that is dear.
`FunctionalClipping` makes every gradient, in chunks, again on backward: for models that the first cannot run, and for
sums on a grid, whose units are rounded one by one.
"""

import warnings
from abc import ABC, abstractmethod
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from math import isfinite
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.autograd.graph import disable_saved_tensors_hooks, get_gradient_edge
from torch.func import vjp, vmap

from anyorder import checks
from anyorder.clipping import native
from anyorder.clipping import torch_private as private
from anyorder.clipping.bounded import NON_FINITE, ClippedSum, check_finite
from anyorder.clipping.kept_tensors import (
    Made,
    Witness,
    check_nothing_kept,
    check_nothing_of_loop,
    one_pass,
    written_since,
)
from anyorder.clipping.layer_rules import (
    Books,
    ParameterView,
    Reading,
    Tracer,
    for_each_example,
    layers_with_rules,
    load,
    other_use,
)
from anyorder.clipping.mapping import ExampleCall, Tensors, mappable
from anyorder.clipping.norms import (
    LARGE,
    NO_TABLES,
    Cut,
    DirectUse,
    EmbeddingUse,
    Flat,
    Rule,
    Settled,
    SparseTables,
    Table,
    UnitMap,
    Use,
    Weights,
    accumulator_dtype,
    accumulator_dtypes,
    full_precision,
    round_down,
    settle,
    settle_lookups,
    sparse_rows,
    sums_of,
)
from anyorder.clipping.program import (
    TAPE_TRIES,
    Arguments,
    PassProgram,
    Programs,
    Recorder,
    Replay,
    Tape,
    TapeRecorder,
    key_of,
)
from anyorder.clipping.recurrent import recurrent_layers
from anyorder.clipping.validate import FAILURES
from anyorder.errors import AnyorderError, ArgumentError, ClippingWarning, ModelError, TrainingError

# -- what an engine is -----------------------------------------------------------------------------------------------

Receive = Callable[[dict[str, Tensor]], None]
"""Takes the sum over units of their clipped gradients, by parameter name, and of their schedule's own coordinates."""


class PerUnitClipping(ABC):
    """Makes the one number a Gaussian mechanism needs true: no unit adds more than clip_norm to the sum.

        sum over units u of  clip(scale * sum_{i in u} grad l_i),   clip(v) = v min(1, clip_norm / ||v||)
                                                                    [Kairouz et al. 2021, Algorithm 1, line 4]

    The norm is over all trainable parameters together, and over the whole unit: the gradients of a unit's examples
    are added before they are clipped. A unit whose norm is NaN or infinite adds the zero vector, which is in the ball;
    nothing tells of it, and it moves no other unit's part.

    Guarantee: removing a unit's examples changes the sum by at most clip_norm, replacing them by at most
    2 clip_norm, for fixed parameters -- if the loss is a sum over examples of terms, each of that example's output
    and target alone, times a constant (`nn.CrossEntropyLoss()` is; a contrastive loss, and a mean over the unmasked
    tokens of the batch, are not). The criterion belongs to the caller; the training engine follows it in every batch
    (`coupling.LossWatch`).
    """

    @abstractmethod
    def forward(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        groups: Tensor,
        clip_norm: float,
        scale: float,
        receive: Receive,
        passes: "Passes | None" = None,
    ) -> Any:
        """The module's outputs; their backward calls `receive` once with the sum of clipped gradients.

        Args:
            args, kwargs: what the module is called with; every tensor in them has leading dimension B. A setting
                (None, bool, int, float, str) stands directly as an argument, not inside a container.
            groups: (B,) int64, equal for examples of one unit.
            clip_norm: L2 bound on a unit's gradient, above 0.
            scale: what the gradients are multiplied by before they are clipped: B for a loss that is a mean.
            receive: called during backward with {parameter name: sum}, one entry for each trainable parameter, in
                float32 (float64 where the parameter is), and for what the schedule counts; `p.grad` is never
                written.
            passes: shared by all passes over one batch, whose gradients are added for each unit before it is clipped;
                `receive` of one of them is called. None: this pass is clipped by itself.
        Returns: the outputs, tensors with leading dimension B, attached to autograd. With gradients disabled they
            are detached, and `receive` is never called.

        Raises:
            ArgumentError: groups, clip_norm or scale break their rule.
            ModelError: the inputs do not share B, or the module cannot be run on one example alone.
            NonFiniteError: in backward, under non_finite="refuse", a unit's gradient is NaN or infinite; `receive` is
                not called.
            TrainingError: in backward, a second time on the same outputs, or with create_graph=True, or after a
                parameter, an input or an output was changed in place; for a further pass that runs in another way.
        """

    def draws_nothing(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether `forward` and backward of these arguments, asked for next, are known to draw no random numbers.

        Where that turns out otherwise, forward raises MayDraw, and nothing was done.
        """
        del args, kwargs
        return False

    def state_dict(self) -> dict[str, Any]:
        """What was found out on the way and decides in which order sums are added: for a run that goes on as it was."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with what another such engine found out."""
        del state


class Passes:
    """The passes of a model over one batch, whose gradients are added for each unit before it is clipped.

        sum over units u of  clip(scale * sum over passes p, sum_{i in u} grad l_pi)

    To clip each pass by itself would let a unit add as many times clip_norm as there are passes. All passes end, on the
    way back, at one leaf of the graph, `root`: autograd comes there once, when every pass that the loss is made of has
    been back, and a hook there makes the sum. Where there is one pass, it makes the sum at its own end.

    Attributes:
        chained: whether the next pass is given what an earlier one made, and gradients go back through both.
        count: the passes that were made forward.
        several: whether there is more than one, so that a pass waits for others.
        sums: of the public shapes of the batch that are done, where its rows have several; see `ByShape`.
    """

    def __init__(self) -> None:
        self.count, self.several, self.chained = 0, False, False
        self.sums: list[dict[str, Tensor]] = []
        self._way: Any = None
        self._by_shape: bool | None = None
        self._root: Tensor | None = None
        self._hook: Any = None
        self._back: list[Any] = []
        self._finish: Callable[[list[Any]], None] | None = None
        self._parts: defaultdict[int, Passes] = defaultdict(Passes)
        self._done = False

    def part(self, number: int) -> "Passes":
        """Those over the rows of one public shape, of which each unit has one."""
        return self._parts[number]

    def root(self, device: torch.device) -> Tensor:
        """The leaf at which each pass ends."""
        if self._root is None:
            self._root = torch.zeros((), device=device, requires_grad=True)
        return self._root

    def made(self, *way: Any) -> None:
        """One more pass was made forward, in this way; all passes of a batch are made in one."""
        if self.count and way != self._way:
            raise TrainingError(
                "the passes over this batch run in different ways (at once, in chunks, or with a gradient for each "
                "example), so that what they add to a unit cannot be joined before it is clipped; pass chunk_size= to "
                "make_private, or give it one module whose forward makes all passes"
            )
        self._way, self.count = way, self.count + 1
        self.several = self.count > 1
        if self.count == 2 and self._root is not None:
            self._hook = self._root.register_hook(self._all_back)  # type: ignore[no-untyped-call]

    def by_shape(self, by_shape: bool) -> None:
        """Whether this pass would run the rows of each public shape by themselves, whatever shapes the batch has.

        All passes of a batch alike: else the lengths of its rows would decide whether they can be joined.
        """
        if self._by_shape not in (None, by_shape):
            raise TrainingError(
                "with pad_to=, one pass over this batch runs the rows of each length by themselves, and another does "
                "not: it is given no padded tensor, or the model does not run at each length there. Give make_private "
                "one module whose forward makes all passes"
            )
        self._by_shape = by_shape

    def back(self, finish: Callable[[list[Any]], None], of_pass: Any) -> None:
        """A pass has been back; `finish` makes the sum of all."""
        if self._done:
            raise TrainingError(
                "backward ran a second time in one step, through another pass over the same batch: each unit is "
                "clipped once a step, over all passes together. Add the losses and call backward once"
            )
        self._finish = finish
        self._back.append(of_pass)

    def _all_back(self, gradient: Tensor | None) -> None:
        del gradient
        back, self._back, self._done = self._back, [], True
        self._hook.remove()  # it would hold this, and this holds the leaf
        self._root = None
        if self._finish is not None and back:
            self._finish(back)


def _cannot_go_back(error: RuntimeError) -> TrainingError:
    if private.tells_of_a_write(error):
        return written_since()
    return TrainingError(f"backward through the private model cannot run: {error}")


def _whole_batch() -> ModelError:
    return ModelError(
        "a network is given what another made, so that gradients go back through both, and the batch does not go "
        "through it at once: leave chunk_size out, or give make_private one module whose forward calls both"
    )


def _check_groups(groups: Tensor, size: int) -> None:
    if groups.dtype != torch.int64 or groups.shape != (size,):
        raise ArgumentError(
            f"groups must be int64 of shape ({size},), one unit for each example of the batch, got {groups.dtype} of "
            f"shape {tuple(groups.shape)}; the model must be called on the whole batch"
        )


@dataclass(frozen=True)
class TorchState:
    """The state of torch that a forward pass depends on: random numbers and autocast, on the CPU and on `devices`."""

    devices: tuple[torch.device, ...]
    random: tuple[Tensor, ...]
    autocast: tuple[tuple[str, bool, torch.dtype], ...]

    @classmethod
    def now(cls, device: torch.device) -> "TorchState":
        devices = (device,) if device.type == "cuda" else ()
        random = (torch.get_rng_state(), *map(torch.cuda.get_rng_state, devices))
        types = ("cpu",) if device.type == "cpu" else ("cpu", device.type)
        autocast = [(t, torch.is_autocast_enabled(t), torch.get_autocast_dtype(t)) for t in types]
        return cls(devices, random, tuple(autocast))

    def rewind(self) -> None:
        """Put the global generators back, so that another attempt draws the same numbers."""
        torch.set_rng_state(self.random[0])
        for device, state in zip(self.devices, self.random[1:], strict=True):
            torch.cuda.set_rng_state(state, device)

    @contextmanager
    def autocast_again(self) -> Iterator[None]:
        """Autocast as it was, without its cache, which would keep every chunk's casts of the weights."""
        with ExitStack() as stack:
            for device_type, enabled, dtype in self.autocast:
                if enabled or torch.is_autocast_enabled(device_type):
                    stack.enter_context(torch.autocast(device_type, dtype, enabled, cache_enabled=False))
            yield

    @contextmanager
    def random_again(self) -> Iterator[None]:
        """The same random numbers again; the global generators are left as they were."""
        with torch.random.fork_rng([d.index for d in self.devices]):
            torch.set_rng_state(self.random[0])
            for device, state in zip(self.devices, self.random[1:], strict=True):
                torch.cuda.set_rng_state(state, device)
            yield

    def going_on(self) -> "TorchState":
        """The same settings, with the random numbers from where they are now."""
        return replace(self, random=TorchState.now(self.devices[0] if self.devices else torch.device("cpu")).random)


_NO_STATE = TorchState((), (), ())


# -- one pass --------------------------------------------------------------------------------------------------------

_SLACK = 4 * torch.finfo(torch.float32).eps  # 2^-21, of which `norms` shows what it is for
_NO_HOOKS = "they would run or move parts of the model outside of vmap"


class TooLarge(Exception):
    """The per-example gradients of all examples would not fit; those of `size` examples do."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.size = size


class MayDraw(Exception):
    """The code of the model has to run after all, and may draw."""


class Unmapped(ModelError):
    """The module runs on one example alone, but not under vmap."""


@dataclass(frozen=True)
class Sums:
    """What a pass found.

    Attributes:
        sums: {parameter: sum over units of clipped gradients}, and those of the schedule's own.
        bad: how many units have a gradient whose norm is NaN or infinite; they add exactly zero.
        units: how many units there are.
    """

    sums: dict[str, Tensor]
    bad: int
    units: int

    def __add__(self, other: "Sums") -> "Sums":
        sums = {name: _added(value, other.sums[name]) for name, value in self.sums.items()}
        return Sums(sums, self.bad + other.bad, self.units + other.units)


def _added(to: Tensor, other: Tensor) -> Tensor:
    return (to + other).coalesce() if to.is_sparse else to.add_(other)


class Pass:
    """One forward and one backward pass; backward calls `receive` once, at its end.

    Args:
        module: the module.
        call: how it is called on one example, or on all of them.
        parameters: the trainable parameters, cut off from autograd.
        groups: (b,) int64 on the CPU, equal for examples of one unit.
        settings: of torch, where the call began.
        cut, clip_norm, scale: see `GhostClipping`, `PerUnitClipping`.
        receive: takes the `Sums`.
        tables: the parameters that are read by lookups alone.
        recorder: writes the forward pass down, or None.
        passes: of the same batch, with which this one is clipped together; None: it is clipped by itself.
    """

    def __init__(
        self,
        module: nn.Module,
        call: ExampleCall | Replay,
        parameters: dict[str, Tensor],
        groups: Tensor,
        settings: TorchState,
        cut: Cut,
        clip_norm: float,
        scale: float,
        receive: Callable[[Sums], None],
        tables: SparseTables = NO_TABLES,
        recorder: Recorder | None = None,
        passes: Passes | None = None,
    ) -> None:
        self._passes = passes
        self._module, self._call, self.parameters, self._settings = module, call, parameters, settings
        self._recorder = recorder
        self._cut, self._clip_norm, self._scale, self._receive = cut, clip_norm, scale, receive
        self._tables = tables
        self.tape: TapeRecorder | None = None  # writes down what a program does
        self._device = call.tensors[0].device
        self._units = UnitMap.of(groups, self._device)
        self._dtypes = accumulator_dtypes(parameters)
        self._by_library = AtOnce.of(parameters, cut, tables) if AtOnce.fits(self._units) else None
        self._expected: Counter[str] = Counter()
        self._uses: defaultdict[str, list[tuple[ParameterView, Use]]] = defaultdict(list)
        self._settled: dict[str, tuple[ParameterView, Settled]] = {}
        self._versions: list[tuple[str, Use, list[int]]] = []  # of uses whose norm is taken before their sum is made

    # -- forward -----------------------------------------------------------------------------------------------------

    def outputs(
        self, tensors: Tensors, direct_bytes: int | None = None, root: Tensor | None = None
    ) -> tuple[Tensors, Tensors, Tensor]:
        """The module's output tensors on the given examples: those that are differentiable, and the others.

        The third is a scalar on which all outputs depend.

        Args:
            root: where the graph of all passes begins; None: this one begins by itself.
        Raises: TooLarge if autograd would make more than direct_bytes of per-example gradients.
        """
        size = len(tensors[0])
        root = torch.zeros((), device=self._device, requires_grad=True) if root is None else root
        if isinstance(self._call, Replay):
            return self._replayed(self._call, root, direct_bytes)
        call, recorder = self._call, self._recorder
        # Nothing here may hold the anchor: the graph behind it holds this object, and would live on.
        anchor, *copies = _Root.apply(root, self, size, tuple(self.parameters), *self.parameters.values())  # type: ignore[no-untyped-call]
        tracer = Tracer(self._books(anchor), call.made, recorder)
        if recorder is not None:
            load()  # imports are no part of a pass
            named = dict(self._module.named_parameters())
            constants = {name: named[name] for name in named.keys() - self.parameters.keys()} | call.buffers
            recorder.begin(tensors, dict(zip(self.parameters, copies, strict=True)), constants)

        def example(token: Tensor, *tensors: Tensor) -> tuple[Tensors, Tensors]:
            copies = dict(zip(self.parameters, tensors, strict=False))
            tracer.start(copies, token)
            return call(copies, tensors[len(copies) :], within=tracer)

        modules = list(self._module.modules())
        versions = [p._version for p in self.parameters.values()]
        token = torch.empty(size, device=self._device)
        with (
            self._understood(call, tensors),
            self._settings.autocast_again(),
            disable_saved_tensors_hooks(_NO_HOOKS),
            recurrent_layers(modules, tracer) as layers,
            layers_with_rules(self._module, tracer, call.made),
            mappable(modules, self._device, traced=layers),
            one_pass(call.made),
            nullcontext() if recorder is None else recorder.watching(),
        ):
            differentiable, others = for_each_example(example, token, *copies, *tensors)
        tracer.forget()
        _check_leaves(differentiable, {root, *self._module.parameters()})  # whose gradients the engine looks at
        written = [n for (n, p), v in zip(self.parameters.items(), versions, strict=True) if p._version != v]
        if written:
            raise ModelError(
                f"forward writes the parameters {', '.join(written)} in place: what it wrote is not private, and is in "
                "them now. Load a saved state, and keep such updates out of forward"
            )
        check_nothing_kept(self._module)
        self._refuse(tracer.direct)
        self._check_fits(tracer.direct, size, direct_bytes)
        return differentiable, others, anchor

    def _check_fits(self, direct: Iterable[str], size: int, direct_bytes: int | None) -> None:
        each = sum([self.parameters[n].numel() * self._dtypes[n].itemsize for n in direct])
        if direct_bytes is not None and each * size > direct_bytes and size > 1:
            raise TooLarge(max(1, min(size - 1, direct_bytes // each)))

    def _books(self, anchor: Tensor) -> Books:
        note = None if self.tape is None else self.tape.read
        return Books(self.parameters, self._dtypes, anchor, self._expected, self._enter, self._tables.by_name, note)

    def _replayed(self, call: Replay, root: Tensor, direct_bytes: int | None) -> tuple[Tensors, Tensors, Tensor]:
        """The same by a program. Where that fails, running the model as ever tells why."""
        names = call.program.copies
        self._check_fits(names, call.size, direct_bytes)
        taken = [self.parameters[name] for name in names]
        if self.tape is not None:
            self.tape.begin(root)
        anchor, *copies = _Root.apply(root, self, call.size, names, *taken)  # type: ignore[no-untyped-call]
        try:
            with disable_saved_tensors_hooks(_NO_HOOKS):
                return *call.program.run(self._books(anchor), call.tensors, tuple(copies)), anchor
        except (AnyorderError, torch.OutOfMemoryError):
            raise
        except FAILURES as error:
            raise Unmapped(f"the program does not run: {error}") from error

    @contextmanager
    def _understood(self, call: ExampleCall, tensors: Tensors) -> Iterator[None]:
        """Say which errors come of running the module on one example alone, and which are its own."""
        try:
            yield
        except (AnyorderError, torch.OutOfMemoryError):
            check_nothing_of_loop(self._module)
            raise
        except FAILURES as error:
            with torch.random.fork_rng([self._device.index] if self._device.type == "cuda" else []):
                reason = call.explain(error, self.parameters, tensors, self._reading)
            raise Unmapped(reason) from error

    def _reading(self, parameters: dict[str, Tensor]) -> AbstractContextManager[Any]:
        """What a model whose tables stand elsewhere runs in, without vmap."""
        tables = self._tables.by_name
        return Reading({id(parameters[name]): table for name, table in tables.items()}) if tables else nullcontext()

    def _refuse(self, names: Iterable[str]) -> None:
        """Refuse tables that are used in another way than lookups."""
        for name in self._tables.by_name.keys() & set(names) if self._tables.by_name else ():
            raise ModelError(other_use(name, "a function that has no rule for it"))

    # -- backward ----------------------------------------------------------------------------------------------------

    def expect(self, uses: Counter[str]) -> None:
        """How many uses of each parameter backward comes to."""
        self._expected = uses

    def _enter(self, part: ParameterView, use: Use) -> None:
        """A use that backward has come to. An only one is settled now, while its tensors are in the cache."""
        if self.tape is not None:
            self.tape.use(part, use)
            with self.tape.paused():
                self._keep(part, use)
        else:
            self._keep(part, use)

    def _keep(self, part: ParameterView, use: Use) -> None:
        together = self._passes is not None and self._passes.several
        if together or self._expected[part.name] > 1 or isinstance(use, DirectUse):
            self._uses[part.name].append((part, use))
            return
        versions = use.versions()
        if self._by_library is not None and self._rows_of(part.name, use) is not None:  # at the end
            self._versions.append((part.name, use, versions))
            self._uses[part.name].append((part, use))
            return
        with full_precision(self._device):
            settled = self._settle_uses(part.name, [use])
        self._settled[part.name] = part, settled
        if settled.kept is None:
            self._versions.append((part.name, use, versions))
            self._uses[part.name].append((part, use))

    @torch.no_grad()
    def finish(self, direct: Mapping[str, Tensor]) -> None:
        """Settle the rest, clip, and add up.

        Args:
            direct: the per-example gradients (b, *shape) that came by autograd, by parameter.
        """
        if self.tape is not None:
            tape, self.tape = self.tape, None
            rows = self._rows(direct)
            with tape.paused():
                tape.end(direct, () if rows is None else list(rows.values()), self._expected)
                return self.finish(direct)
        if self._passes is not None and self._passes.several:
            return self._passes.back(Pass._finish_all, (self, direct))
        self._finish(direct)
        return None

    @staticmethod
    def _finish_all(back: "list[tuple[Pass, Mapping[str, Tensor]]]") -> None:
        """The same of all passes over the batch: what enters and leaves a parameter in any of them is a use of it."""
        (first, own), *others = back
        direct = dict(own)
        for other, further in others:
            for name, uses in other._uses.items():
                first._uses[name] += uses
            for name, gradients in further.items():
                direct[name] = direct[name] + gradients if name in direct else gradients
            other._uses = defaultdict(list)
        first._finish(direct)

    @torch.no_grad()
    def _finish(self, direct: Mapping[str, Tensor]) -> None:
        if self._tables.by_name:
            self._refuse(direct)
        self._check_versions()
        rows = None if self._by_library is None else self._rows(direct)
        sums = None
        if rows is not None and self._by_library is not None:  # None where the numbers ask for float64, as below
            sums = self._by_library.sums(rows.values(), self._scale, self._clip_norm, self._units)
        if sums is not None:
            self._uses, self._settled, self._versions = defaultdict(list), {}, []
            self._receive(sums)
            return
        with full_precision(self._device):
            settled = {}
            for name in self.parameters:
                one = self._settle(name, direct.get(name))
                if one is not None:
                    settled[name] = one
            self._uses, self._settled, self._versions = defaultdict(list), {}, []
            self._receive(self._clipped(settled))

    def _check_versions(self) -> None:
        """Refuse a sum of other numbers than the norms are of: it would be longer than clip_norm."""
        written = [name for name, use, versions in self._versions if use.versions() != versions]
        if written:
            raise TrainingError(
                f"backward wrote, in place, into what the norms of {', '.join(written)} were taken of: a gradient or "
                "an activation, in an autograd.Function or a hook of the model; have it return a new tensor (g * 2, "
                "not g.mul_(2))"
            )

    def _rows(self, direct: Mapping[str, Tensor]) -> "Rows | None":
        """The one use of each parameter, None where it has no gradient; None where one has others."""
        found: Rows = {}
        for name in self.parameters:
            entered = self._uses.get(name, ())
            if name in self._settled or any(part.chain for part, _ in entered):  # which would have to be added
                return None
            uses = [use for _, use in entered]
            uses += [DirectUse(direct[name], self._dtypes[name])] if name in direct else []
            found[name] = self._rows_of(name, uses[0]) if len(uses) == 1 else None
            if found[name] is None and uses:
                return None
        return found

    def _rows_of(self, name: str, use: Use) -> tuple[Tensor | None, Tensor] | None:
        """Of a table its lookups."""
        if name not in self._tables.by_name:
            return use.rows()
        return use.lookups() if isinstance(use, EmbeddingUse) else None

    def _settle(self, name: str, direct: Tensor | None) -> Settled | None:
        parameter, uses = self.parameters[name], self._uses[name]
        if name in self._settled:
            part, settled = self._settled[name]
            if direct is None:
                return _in_place(part, settled, parameter) if part.chain else settled
            if settled.kept is not None:
                kept = _in_shape(part, settled.kept, parameter)
                return Settled.keep(kept + self._units.sum(direct.to(kept.dtype)))
        if direct is not None:
            uses.append((ParameterView(name), DirectUse(direct, self._dtypes[name])))
        if name in self._tables.by_name:
            return self._settle_uses(name, [use for _, use in uses]) if uses else None
        return _settle_parts(uses, parameter, self._units) if uses else None

    def _settle_uses(self, name: str, uses: list[Use]) -> Settled:
        """Settle all uses of a parameter, which none of them is of a view of."""
        if name not in self._tables.by_name:
            return settle(uses, self._units)
        lookups = [use for use in uses if isinstance(use, EmbeddingUse)]
        if len(lookups) < len(uses):
            raise ModelError(other_use(name, "a layer with a rule of its own"))
        return settle_lookups(lookups, self._units)

    def nobody(self) -> None:
        """Give `receive` the sums of no unit at all."""
        self._receive(self._clipped({}))

    def _clipped(self, settled: dict[str, Settled]) -> Sums:
        if settled:
            each = [s.squares.to(self._device) for s in settled.values()]
            rows = (torch.stack(each) if len(each) > 1 else each[0]) * self._scale**2  # (.., U)
        else:  # no parameter has a gradient: all are zero
            rows = torch.zeros(len(self.parameters), self._units.count, dtype=torch.float64, device=self._device)
        bad = None
        if not isfinite(float(rows.sum())):
            bad = ~rows.view(-1, self._units.count).sum(0).isfinite()
            rows = rows.masked_fill(bad, 0.0)
        # Just under clip_norm, so that the rounding of weights and of the norms cannot carry a unit over.
        slack = _SLACK if torch.float32 in self._dtypes.values() else 1e-12
        clip_norm = self._clip_norm * (1 - slack)
        squares = dict(zip(settled or self.parameters, rows if rows.dim() > 1 else [rows], strict=True))
        factors, further = self._cut.apply(squares, clip_norm)
        weights: dict[tuple[int, torch.dtype], Weights] = {}
        sums = {}
        for name, parameter in self.parameters.items():
            dtype = self._dtypes[name]
            if name not in settled and name in self._tables.by_name:
                sums[name] = self._tables.nothing(name, dtype, self._device)
                continue
            if name not in settled:
                sums[name] = parameter.new_zeros(parameter.shape, dtype=dtype)
                continue
            key = id(factors[name]), dtype
            if key not in weights:
                weights[key] = self._weights(self._scale * factors[name], dtype, bad)
            sums[name] = settled[name].total(weights[key])
        if further:
            sums |= sums_of(further, self._dtypes)
        if self._tables.by_name:
            sums |= self._tables.counts(settled, self._units.count, self._device)
        return Sums(sums, 0 if bad is None else int(bad.sum()), self._units.count)

    def _weights(self, factors: Tensor, dtype: torch.dtype, bad: Tensor | None) -> Weights:
        by_unit = round_down(factors, dtype)
        alone, index = self._units.classes is None, self._units.index
        by_example = by_unit if alone else by_unit[index]
        return Weights(by_unit, by_example, None if bad is None else (bad, bad if alone else bad[index]))


Rows = dict[str, tuple[Tensor | None, Tensor] | None]
"""Of each parameter the a and g of its one use, see `Use.rows`, of a table ids and g; None where it has no gradient."""


_DTYPE = attrgetter("dtype")


class AtOnce:
    """Norms, weights and sums by the compiled library, into one vector of which the dense sums are views: by
    the flat rule, in float32 on the CPU, where each row is a unit.

    What a unit adds to a table, where it reads no row twice, is what came back to its reads: its norm is theirs.
    """

    def __init__(self, parameters: Mapping[str, Tensor], tables: SparseTables) -> None:
        self._tables, self._names = tables, list(parameters)
        shapes = [(name, p.shape, p.numel()) for name, p in parameters.items() if name not in tables.by_name]
        # Of each dense parameter its place among the parts of the vector, and what a part is viewed as.
        self._dense = {name: (i, shape if len(shape) != 1 else None) for i, (name, shape, _) in enumerate(shapes)}
        self._sizes = [size for *_, size in shapes]
        self._total = sum(self._sizes)

    @classmethod
    def of(cls, parameters: Mapping[str, Tensor], cut: Cut, tables: SparseTables) -> "AtOnce | None":
        """None where the library does not make them."""
        made = cut.is_flat and tables.count_norm is None and native.available()
        return cls(parameters, tables) if made and torch.float64 not in set(map(_DTYPE, parameters.values())) else None

    @staticmethod
    def fits(units: UnitMap) -> bool:
        """Whether it makes the sums of such a batch, if the uses are of rows."""
        return units.classes is None and units.count > 0 and units.index.device.type == "cpu"

    def sums(self, rows: Iterable[Any], scale: float, clip_norm: float, units: UnitMap) -> Sums | None:
        """The sums, of each parameter's `Rows`. None where the numbers ask for float64."""
        parts = native.empty(self._total).split_with_sizes(self._sizes)
        sums: dict[str, Tensor] = {}
        layers: list[tuple[Tensor | None, Tensor, Tensor | None]] = []
        read: list[tuple[str, Tensor, native.Ranked]] = []
        for name, pair in zip(self._names, rows, strict=True):
            if name in self._dense:
                place, shape = self._dense[name]
                own = sums[name] = parts[place] if shape is None else parts[place].view(shape)
                if pair is None:
                    own.zero_()
                else:
                    layers.append((*pair, own))
            elif pair is None:
                sums[name] = self._tables.nothing(name, torch.float32, units.index.device)
            else:
                ids, g = pair
                table = self._tables.by_name[name]
                ranked = native.ranked(ids.reshape(-1).long().numpy(), table.num_rows, ids.shape[1])
                if ranked.twice:
                    return None
                g = g.contiguous()
                read.append((name, g, ranked))
                layers.append((None, g.view(len(g), -1), None))
        # Just under clip_norm, as in `Pass._clipped`: the library sums squares in float64, and rounds weights down.
        bad, weights = native.clip(layers, scale, clip_norm * (1 - _SLACK), LARGE) if layers else (0, torch.empty(0))
        for name, g, ranked in read if bad >= 0 else ():
            summed = native.add_rows(g, weights, ranked.place, len(ranked.distinct))
            if summed is None:
                return None
            size = self._tables.by_name[name].num_rows, g.shape[2]
            sums[name] = sparse_rows(torch.from_numpy(ranked.distinct), summed, size)
        return Sums(sums, bad, units.count) if bad >= 0 else None


def _settle_parts(uses: list[tuple[ParameterView, Use]], parameter: Tensor, units: UnitMap) -> Settled:
    """Settle the uses of a parameter, of which some may be of views of it."""
    if len(uses) == 1:
        part, use = uses[0]
        settled = settle([use], units)
        return _in_place(part, settled, parameter) if part.chain else settled
    views: dict[tuple[str, str], tuple[ParameterView, list[Use]]] = {}
    for part, use in uses:
        views.setdefault(part.key, (part, []))[1].append(use)
    if not _disjoint([part for part, _ in views.values()], parameter):
        whole = [DirectUse(_in_shape(part, use.gradients(slice(None)), parameter), use.dtype) for part, use in uses]
        return settle(whole, units)
    each = [_in_place(part, settle(own, units), parameter) for part, own in views.values()]
    if len(each) == 1:
        return each[0]

    def total(weights: Weights) -> Tensor:
        return torch.stack([one.total(weights) for one in each]).sum(0)

    return Settled(torch.stack([one.squares for one in each]).sum(0), total)


def _disjoint(parts: list[ParameterView], parameter: Tensor) -> bool:
    """Whether no two views share an element: then their squared norms add up."""
    if len(parts) == 1:
        return True
    elements = torch.arange(parameter.numel()).view(parameter.shape)
    return int(torch.cat([part.of(elements).flatten() for part in parts]).bincount().max()) <= 1


def _in_place(part: ParameterView, settled: Settled, parameter: Tensor) -> Settled:
    """A view's sums in the parameter's shape, zero elsewhere."""
    if not part.chain:
        return settled

    def total(weights: Weights) -> Tensor:
        return _in_shape(part, settled.total(weights)[None], parameter)[0]

    return Settled(settled.squares, total)


def _in_shape(part: ParameterView, values: Tensor, parameter: Tensor) -> Tensor:
    """(n, *view) in the parameter's shape, (n, *shape), zero elsewhere."""
    if not part.chain:
        return values
    result = values.new_zeros(len(values), *parameter.shape)
    for row, value in zip(result, values, strict=True):
        part.of(row).copy_(value)
    return result


def _check_leaves(outputs: Tensors, known: set[Tensor]) -> None:
    """Refuse a model that reads a tensor which needs gradients and is no parameter of it: it would get its own.

    Raises: ModelError.
    """
    seen, nodes = set[Any](), [t.grad_fn for t in outputs]
    while nodes:
        node: Any = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if leaf is not None and leaf not in known:
            raise ModelError(
                "the model reads a tensor that requires gradients and is none of its parameters, from a list, a global "
                "or a closure perhaps: it would get the gradients of single examples, without noise. Register it "
                "(nn.Parameter as an attribute, nn.ParameterList), or let it need no gradient"
            )
        nodes += [one for one, _ in node.next_functions]


class _Root(torch.autograd.Function):
    """A copy of each parameter for each example; its backward is the last of all."""

    @staticmethod
    def forward(ctx: Any, root: Tensor, owner: Pass, size: int, names: tuple[str, ...], *parameters: Tensor) -> Tensors:
        ctx.owner, ctx.names = owner, names
        ctx.set_materialize_grads(False)
        return root.clone(), *[p.expand(size, *p.shape) for p in parameters]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, anchor: Tensor, *grads: Tensor | None) -> Any:
        ctx.owner.finish({name: g for name, g in zip(ctx.names, grads, strict=True) if g is not None})
        return (None,) * (4 + len(grads))


# -- the engine in one pass ------------------------------------------------------------------------------------------

DIRECT_BYTES = 2**28


class GhostClipping(PerUnitClipping):
    """Per-unit clipping for any module that torch.func can map over examples, at about the price of a plain step.

    Outputs are those of the module on each example alone (`torch.func.vmap`), so that no example can depend on
    another. What enters and leaves each linear map, convolution, table and recurrent layer in that one forward and
    backward pass gives the norm of each unit's gradient ("ghost norms") and then, weighted by the clip factors, the
    sum [Li et al. 2022; Bu et al. 2023, book-keeping]; `norms` has the formulas and how their rounding is bounded.
    A parameter that is used in any other way has its per-example gradients made by autograd. A model with a function
    that cannot be mapped so runs with functions in the form of `Mapped`, or else by `FunctionalClipping`. What
    two batches of a kind did is done by a list of operations from the third on; see `program`.

    Cost: a plain step, plus the norms. Memory: what autograd holds, and the gradients of all layers' outputs.

    Args:
        module: the model. Frozen parameters (requires_grad=False) cost nothing; tied ones have one gradient.
        chunk_size: examples that go through the model at a time; a unit's examples are never split. Below the batch
            size every chunk's forward is run twice, with the same random numbers. None takes the whole batch, or
            as many as keep the gradients made by autograd under 256 MiB, or half when a GPU's memory runs out.
        rule: how norms become factors.
        non_finite, tables, count_norm: see `make_clipping`.
    """

    def __init__(
        self,
        module: nn.Module,
        chunk_size: int | None = None,
        rule: Rule | None = None,
        non_finite: str = "zero",
        *,
        tables: Mapping[str, Table] | None = None,
        count_norm: float | None = None,
    ) -> None:
        self._module = module
        self._fixed = chunk_size is not None
        self._chunk_size = None if chunk_size is None else checks.integer("chunk_size", chunk_size, low=1)
        self._rule, self._cut = rule, Cut.of(rule)
        self._non_finite = checks.choice("non_finite", non_finite, NON_FINITE)
        self._tables = SparseTables.of(module, tables or {}, count_norm)
        self._unmapped = self._mapped = False
        self._made: Made = []
        self.programs = Programs(module)
        self._found: tuple[Any, Arguments, Any, PassProgram | None] | None = None  # of the next batch
        self._last_numbers: tuple[float, float] | None = None  # clip norm and scale that were checked

    def forward(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        groups: Tensor,
        clip_norm: float,
        scale: float,
        receive: Receive,
        passes: Passes | None = None,
    ) -> Any:
        """The module's outputs on each example alone; see `PerUnitClipping.forward`."""
        passes = Passes() if passes is None else passes
        found, self._found = self._found, None
        is_still = found is not None and found[0] is args  # `draws_nothing` looked at these very arguments
        _, arguments, key, program = found if is_still else self._look(args, kwargs, passes.chained)  # type: ignore[misc]
        nothing = not arguments.size or not torch.is_grad_enabled()
        if program is not None and program.tape is not None:
            _check_groups(groups, arguments.size)
            if self._last_numbers != (clip_norm, scale):
                clip_norm, scale = checks.positive("clip_norm", clip_norm), checks.positive("scale", scale)
                self._last_numbers = clip_norm, scale
            replay = Replay(program, arguments)
            job = self._job(program.tape.parameters, replay, groups, clip_norm, scale, receive, passes)
            if (taped := job.taped(program.tape)) is not None:
                return taped
            if is_still:
                raise MayDraw
        parameters = {name: p.detach() for name, p in self._module.named_parameters() if p.requires_grad}
        if not parameters:
            raise ModelError("the model has no trainable parameters; at least one must have requires_grad=True")
        tables = self._tables.by_name
        if not tables.keys() <= parameters.keys():
            frozen = ", ".join(sorted(tables.keys() - parameters.keys()))
            raise ModelError(f"{frozen} was made a table and has been frozen since; set requires_grad=True again")
        _check_groups(groups, arguments.size)
        clip_norm = checks.positive("clip_norm", clip_norm)
        if arguments.size:
            scale = checks.positive("scale", scale)
        if (nothing or self._unmapped) and not tables:  # nothing to clip, or not by this engine
            options = {"groups": groups, "clip_norm": clip_norm, "scale": scale, "receive": receive, "passes": passes}
            return self._other(args, kwargs, **options)
        recorder = self.programs.recorder(key) if program is None else None
        start = TorchState.now(arguments.tensors[0].device)
        call: ExampleCall | Replay
        if program is None:
            call = ExampleCall(self._module, arguments, self._made, mapped=self._mapped)
        else:
            call = Replay(program, arguments)
        job = self._job(parameters, call, groups, clip_norm, scale, receive, passes)
        job.settings, job.recorder = start, recorder
        while True:
            try:
                outputs = job.outputs(self._chunk_size, None if self._fixed else DIRECT_BYTES)
                if recorder is not None:
                    self.programs.add(key, recorder)
                return outputs
            except Unmapped as error:
                cause = error.__cause__ or error
                start.rewind()
                job.recorder = recorder = None
                if isinstance(job.call, Replay):
                    self.programs.drop()
                    job.call = ExampleCall(self._module, arguments, self._made)
                    continue
                if not job.call.mapped:
                    job.call.mapped = self._mapped = True
                    continue
                if tables:
                    raise ModelError(
                        f"{error}\nRow-sparse sums need a model that runs in one pass; with sparse=False its tables "
                        "are trained like any other parameter"
                    ) from cause
                self._unmapped, self._mapped = True, False
                options = {"groups": groups, "clip_norm": clip_norm, "scale": scale, "receive": receive}
                outputs = self._other(args, kwargs, **options, passes=passes)
                warnings.warn(
                    f"{type(self._module).__name__} is clipped in two passes, which takes up to twice as long, since "
                    f"the one-pass engine cannot run it ({type(cause).__name__}: {str(cause).partition(chr(10))[0]})",
                    ClippingWarning,
                    stacklevel=2,
                )
                return outputs
            except (TooLarge, torch.OutOfMemoryError) as error:
                if self._fixed or self._chunk_size == 1:
                    raise
                start.rewind()
                job.recorder = recorder = None
                if isinstance(job.call, Replay):
                    job.call = ExampleCall(self._module, arguments, self._made)
                half = max(1, (self._chunk_size or arguments.size) // 2)
                self._chunk_size = error.size if isinstance(error, TooLarge) else half

    def _look(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], chained: bool = False
    ) -> tuple[Any, Arguments, Any, PassProgram | None]:
        """(args, the same split, the key of such batches, their program)."""
        arguments, key, program = Arguments(args, kwargs, chained), None, None
        by_program = not chained and not self._mapped and not self._unmapped and self._chunk_size is None
        if arguments.size and by_program and torch.is_grad_enabled():
            key = key_of(arguments)
            program = self.programs.find(key, arguments.size)
        return args, arguments, key, program

    def draws_nothing(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        found = self._look(args, kwargs)
        program = found[3]
        still = program is not None and program.tape is not None and not program.tape.draws
        self._found = found if still else None
        return still

    def _job(
        self, parameters: dict[str, Tensor], call: ExampleCall | Replay, groups: Tensor, clip_norm: float, scale: float,
        receive: Receive, passes: Passes,
    ) -> "_GhostJob":  # fmt: skip
        options = self._cut, self._tables, self._non_finite == "refuse", clip_norm, scale, receive, passes
        return _GhostJob(self._module, call, parameters, groups.cpu(), *options)

    def state_dict(self) -> dict[str, Any]:
        """The chunk size, whether the other engine runs the model, and how; all are found in the first batches."""
        return {"chunk_size": self._chunk_size, "unmapped": self._unmapped, "mapped": self._mapped}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with another engine's, save for a chunk size that was given to this one."""
        self._chunk_size = self._chunk_size if self._fixed else state["chunk_size"]
        self._unmapped, self._mapped = state["unmapped"], state["mapped"]

    def _other(self, args: tuple[Any, ...], kwargs: dict[str, Any], **options: Any) -> Any:
        """By the engine that makes every gradient: some functions can be mapped there alone."""
        other = FunctionalClipping(self._module, self._chunk_size, rule=self._rule, non_finite=self._non_finite)
        other.mapped, other.made = self._mapped, self._made
        outputs = other.forward(args, kwargs, **options)
        self._mapped = other.mapped
        return outputs


@dataclass
class _GhostJob:
    """One batch, from its forward pass to its backward pass."""

    module: nn.Module
    call: ExampleCall | Replay
    parameters: dict[str, Tensor]
    groups: Tensor
    cut: Cut
    tables: SparseTables
    refuse: bool
    clip_norm: float
    scale: float
    receive: Receive
    passes: Passes
    settings: TorchState = _NO_STATE
    recorder: Recorder | None = None
    done: bool = False

    def taped(self, tape: Tape) -> Any:
        """The module's outputs by a tape; None where that fails, for ids that are in no table perhaps."""
        assert isinstance(self.call, Replay)
        root, others = self.passes.root(torch.device("cpu")), []  # type: ignore[var-annotated]
        start = TorchState.now(root.device) if tape.draws else _NO_STATE
        try:
            given = *self.call.tensors, *tape.parameters.values()
            outputs = _apply_taped(root, self, tape, given, others)
        except (AnyorderError, torch.OutOfMemoryError):
            raise
        except FAILURES:
            if tape.draws:
                start.rewind()
            return None
        self.passes.made("at once", root.device)
        return tape.output.filled(outputs, tuple(others))

    def finish_tape(self, tape: Tape, tensors: list[Any], gradients: Tensors) -> None:
        """The backward pass of a tape: the sums."""
        tape.backward(tensors, gradients)
        units, found = UnitMap.of(self.groups, gradients[0].device), None
        if tape.rows is not None and not self.passes.several and AtOnce.fits(units):
            tape.library = tape.library or AtOnce.of(self.parameters, self.cut, self.tables)
            if tape.library is not None:
                rows = [p and (None if p[0] is None else tensors[p[0]], tensors[p[1]]) for p in tape.rows]
                found = tape.library.sums(rows, self.scale, self.clip_norm, units)
        if found is not None:
            return self._finish(found)
        whole = self._pass(self.groups, self._finish, passes=self.passes)
        whole.expect(tape.expected)
        for part, use in tape.uses(tensors):
            whole._enter(part, use)
        whole.finish(tape.direct(tensors))
        return None

    def _taping(self, program: PassProgram, direct_bytes: int | None) -> Any:
        """The outputs by a program, of which a tape is written down meanwhile."""
        program.tries += 1
        named = dict(self.module.named_parameters())
        trained = {name: named[name] for name in self.parameters}
        tape = TapeRecorder(program, self.call.tensors, trained, self.parameters)
        whole = self._pass(self.groups, self._finish, passes=self.passes)
        whole.tape = tape
        with tape:
            differentiable, others, anchor = whole.outputs(self.call.tensors, direct_bytes)
        tape.end_forward(differentiable, others)
        held = (*self.parameters.values(), *self.call.tensors)
        root = self.passes.root(held[0].device)
        self.passes.made("at once", root.device)
        return self.call.assemble(_Nested.apply(root, self, tape, (anchor, *differentiable), held), others)  # type: ignore[no-untyped-call]

    def outputs(self, chunk_size: int | None, direct_bytes: int | None) -> Any:
        """The module's outputs, attached to autograd."""
        if not self.call.size:
            return self._of_nobody()
        chunks = None if chunk_size is None else _chunks_of(self.groups, chunk_size)
        held = (*self.parameters.values(), *self.call.tensors)
        if chunks is None and isinstance(self.call, Replay):
            program = self.call.program
            untried = program.tape is None and program.tries < TAPE_TRIES
            if untried and held[0].device.type == "cpu" and torch.is_grad_enabled():
                return self._taping(program, direct_bytes)
        if chunks is None:
            whole = self._pass(self.groups, self._finish, self.recorder, self.passes)
            root = self.passes.root(held[0].device)
            differentiable, others, anchor = whole.outputs(self.call.tensors, direct_bytes, root)
            if self.recorder is not None and isinstance(self.call, ExampleCall):
                self.recorder.end(differentiable, others, self.call.output)
            if not torch.is_grad_enabled():
                return self.call.assemble(differentiable, others)
            self.passes.made("at once", root.device)
            return self.call.assemble(_Whole.apply(anchor, self, len(held), *held, *differentiable), others)  # type: ignore[no-untyped-call]
        if self.passes.chained:
            raise _whole_batch()
        pieces = []
        for chunk in chunks:
            differentiable, others, _ = self._pass(self.groups[chunk]).outputs(_take(self.call.tensors, chunk))
            pieces.append((tuple(t.detach() for t in differentiable), others))
        joined, rest = (
            tuple(_put_together(chunks, parts) for parts in zip(*group, strict=True))
            for group in zip(*pieces, strict=True)
        )
        if not torch.is_grad_enabled():
            return self.call.assemble(joined, rest)
        root = self.passes.root(held[0].device)
        self.passes.made("in chunks", chunk_size, root.device)
        return self.call.assemble(_Chunked.apply(root, self, chunks, len(held), *held, *joined), rest)  # type: ignore[no-untyped-call]

    def _of_nobody(self) -> Any:
        """The outputs of no example, of the shapes that those of an example of zeros have."""
        zeros = tuple(t.new_zeros(1, *t.shape[1:]) for t in self.call.tensors)
        with self.settings.random_again(), torch.no_grad():
            differentiable, others, _ = self._pass(self.groups).outputs(zeros)
        empty, rest = (tuple(t[:0] for t in group) for group in (differentiable, others))
        if not torch.is_grad_enabled():
            return self.call.assemble(empty, rest)
        root = self.passes.root(zeros[0].device)
        self.passes.made("of nobody", root.device)
        return self.call.assemble(_Chunked.apply(root, self, [], 0, *empty), rest)  # type: ignore[no-untyped-call]

    def backward_in_chunks(self, chunks: list[Tensor], grads: Tensors) -> None:
        """Every chunk's forward pass again, and its backward pass."""
        if self.passes.several:
            self.passes.back(_GhostJob._all_in_chunks, (self, chunks, grads))
        else:
            self._all_in_chunks([(self, chunks, grads)])

    @staticmethod
    def _all_in_chunks(back: "list[tuple[_GhostJob, list[Tensor], Tensors]]") -> None:
        """The same of all passes over the batch, whose chunks are the same: chunk by chunk, clipped together."""
        job, chunks, _ = back[0]
        if not chunks:
            job._pass(job.groups, job._finish).nobody()
            return
        found: list[Sums] = []
        for chunk in chunks:
            waiting: list[Any] = []
            for one, _, grads in back:
                waiting += one._chunk_back(chunk, grads, found.append, alone=len(back) == 1)
            if waiting:
                Pass._finish_all(waiting)
            if len(found) > 1:
                found = [found[0] + found[1]]
        job._finish(found[0])

    def _chunk_back(self, chunk: Tensor, grads: Tensors, receive: Any, *, alone: bool) -> list[Any]:
        """Forward and backward pass of a chunk; what it is to be finished with, where it is not alone."""
        passes = None if alone else Passes()
        if passes is not None:
            passes.several = True  # none of them finishes by itself
        with self.settings.random_again(), self.settings.autocast_again(), torch.enable_grad():
            one = self._pass(self.groups[chunk], receive, passes=passes)
            outputs, _, anchor = one.outputs(_take(self.call.tensors, chunk))
            # The anchor is there for outputs that depend on no parameter: the pass must finish.
            pairs = [(t, g) for t, g in zip(outputs, _take(grads, chunk), strict=True) if t.requires_grad]
            pairs.append((anchor, torch.zeros_like(anchor)))
            torch.autograd.backward([t for t, _ in pairs], [g for _, g in pairs])
            self.settings = self.settings.going_on()
        return [] if passes is None else passes._back

    def start(self, ctx: Any) -> None:
        """Refuse a second backward pass, one that is to be differentiated, and one after a change in place."""
        if torch.is_grad_enabled():
            raise TrainingError("create_graph=True asks for the gradient of a clipped gradient: it is not covered")
        if self.done:
            raise TrainingError(
                "backward ran a second time on the same outputs of the private model: each unit is clipped once. Add "
                "the losses and call backward once"
            )
        self.done = True
        try:
            ctx.saved_tensors  # noqa: B018  parameters and inputs
        except RuntimeError as error:
            raise _cannot_go_back(error) from error

    def _pass(
        self, groups: Tensor, receive: Any = None, recorder: Recorder | None = None, passes: Passes | None = None
    ) -> Pass:
        options = self.cut, self.clip_norm, self.scale, receive, self.tables, recorder, passes
        return Pass(self.module, self.call, self.parameters, groups, self.settings, *options)

    def _finish(self, found: Sums) -> None:
        if self.refuse:
            check_finite(found.bad, found.units)
        self.receive(found.sums)


def _chunks_of(groups: Tensor, size: int) -> list[Tensor] | None:
    """Indices of the examples of each chunk: whole units, `size` examples where units allow. None: one chunk."""
    if size >= len(groups):
        return None
    ranked, order = torch.sort(groups, stable=True)
    ends = torch.unique_consecutive(ranked, return_counts=True)[1].cumsum(0).tolist()
    chunks, start = [], 0
    for end, following in zip(ends, [*ends[1:], None], strict=True):
        if following is None or following - start > size:
            chunks.append(order[start:end])
            start = end
    return chunks


def _take(tensors: Tensors, chunk: Tensor) -> Tensors:
    return tuple(t[chunk.to(t.device)] for t in tensors)


def _put_together(chunks: list[Tensor], parts: tuple[Tensor, ...]) -> Tensor:
    whole = torch.cat(parts)
    return torch.empty_like(whole).index_copy_(0, torch.cat(chunks).to(whole.device), whole)


class _Whole(torch.autograd.Function):
    """The outputs of a pass; its backward is where that of the model begins."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, job: _GhostJob, count: int, *tensors: Tensor) -> Tensors:
        ctx.job, ctx.count = job, count
        ctx.save_for_backward(*tensors[:count])
        return tuple([t.view_as(t) for t in tensors[count:]])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        ctx.job.start(ctx)
        # A gradient for the anchor, and be it zero: the parameters' part of backward runs even if nothing uses them.
        return grads[0].new_zeros(()), *(None,) * (2 + ctx.count), *grads


class _Nested(torch.autograd.Function):
    """The outputs of a pass that is written down: its backward pass runs inside this node's own."""

    @staticmethod
    def forward(ctx: Any, root: Tensor, job: _GhostJob, tape: TapeRecorder, inner: Tensors, held: Tensors) -> Tensors:
        ctx.job, ctx.tape = job, tape
        ctx.edges = [get_gradient_edge(t) if t.requires_grad else None for t in inner]  # outputs are large
        ctx.save_for_backward(*held)
        return tuple([t.detach().view_as(t) for t in inner[1:]])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        ctx.job.start(ctx)
        edges, ctx.edges = ctx.edges, None
        given = tuple([g.clone(memory_format=torch.contiguous_format) for g in grads])
        ctx.tape.begin_backward(given)
        given = torch.zeros((), device=grads[0].device), *given  # of the anchor: the pass must finish
        pairs = [(edge, g) for edge, g in zip(edges, given, strict=True) if edge is not None]
        with torch.enable_grad(), ctx.tape:
            torch.autograd.backward([edge for edge, _ in pairs], [g for _, g in pairs])
        return (None,) * 5


class _Taped(torch.autograd.Function):
    """The outputs of a tape."""

    @staticmethod
    def forward(ctx: Any, root: Tensor, job: _GhostJob, tape: Tape, given: Tensors, others: list[Tensor]) -> Tensors:
        if private.hooks_on_saved() is not None:
            raise RuntimeError(_NO_HOOKS)
        outputs, further, tensors = tape.forward(given)
        others += further
        ctx.job, ctx.tape, ctx.tensors, ctx.versions = job, tape, tensors, tape.versions(tensors)
        ctx.gate = None  # what gradients go through, see `coupling`
        ctx.save_for_backward(*given)
        return tuple(map(Tensor.view_as, outputs, outputs))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        grads = grads if ctx.gate is None else ctx.gate(grads) or grads
        ctx.job.start(ctx)
        tensors, ctx.tensors = ctx.tensors, None
        if ctx.tape.versions(tensors) != ctx.versions:
            raise written_since()
        ctx.job.finish_tape(ctx.tape, tensors, grads)
        return (None,) * 5


_apply_taped: Any = super(torch.autograd.Function, _Taped).apply
"""`_Taped.apply`, without its question whether a transform of torch.func is active: then there is no program."""


class _Chunked(torch.autograd.Function):
    """The outputs of a job in chunks, whose backward runs the model again."""

    @staticmethod
    def forward(ctx: Any, root: Tensor, job: _GhostJob, chunks: Any, count: int, *tensors: Tensor) -> Tensors:
        ctx.job, ctx.chunks, ctx.count = job, chunks, len(tensors)
        ctx.save_for_backward(*tensors[:count])
        return tuple([t.view_as(t) for t in tensors[count:]])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        ctx.job.start(ctx)
        ctx.job.backward_in_chunks(ctx.chunks, grads)
        return (None,) * (4 + ctx.count)


# -- the engine that makes every gradient ----------------------------------------------------------------------------

CHUNK_BYTES = 2**28


class FunctionalClipping(PerUnitClipping):
    """Per-unit clipping for any module that torch.func can map over examples.

    Outputs are those of the module on each example alone (`torch.func.vmap`; each draws its own dropout mask), so
    that no example can depend on another. On backward every chunk's forward is run again with the same random
    numbers, and its per-example gradients are added up by unit, clipped, and dropped.

    Memory: inputs and outputs, and for one chunk its activations and chunk_size * d gradients (d trainable
    parameters), and the sums of one unit. Cost: two forward passes and one backward pass with a gradient for each
    example. LSTM, GRU and RNN run without their fused kernels. On the CPU, convolutional models with pooling run
    faster after `module.to(memory_format=torch.channels_last)`.

    Args:
        module: the model. Frozen parameters (requires_grad=False) cost nothing; tied ones have one gradient.
        chunk_size: examples per chunk; None takes as many as keep chunk_size * d numbers under 256 MiB, at least 1.
            The sums do not depend on it, save for rounding; dropout masks do.
        grid: None, or the grid on which units are rounded; the sums are then int64, see `ClippedSum`.
        rule: how norms become factors; on a grid `Flat`.
        non_finite: see `make_clipping`.

    Attributes:
        mapped: whether the module runs with functions in the form of `Mapped`: it is found in the first batch.
        made: what its last pass made; see `kept_tensors.one_pass`.

    Raises: ArgumentError for another rule on a grid.
    """

    def __init__(
        self,
        module: nn.Module,
        chunk_size: int | None = None,
        grid: float | None = None,
        rule: Rule | None = None,
        non_finite: str = "zero",
    ) -> None:
        if grid is not None and rule not in (None, Flat()):
            raise ArgumentError(f"rule must be Flat() in secure mode, whose units are clipped as a whole, got {rule}")
        self._module = module
        self._grid, self._cut = grid, Cut.of(rule)
        self.mapped, self.made = False, Made()
        self._refuse = checks.choice("non_finite", non_finite, NON_FINITE) == "refuse"
        self._chunk_size = None if chunk_size is None else checks.integer("chunk_size", chunk_size, low=1)

    def forward(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        groups: Tensor,
        clip_norm: float,
        scale: float,
        receive: Receive,
        passes: Passes | None = None,
    ) -> Any:
        """The module's outputs on each example alone; see `PerUnitClipping.forward`."""
        parameters = {name: p.detach() for name, p in self._module.named_parameters() if p.requires_grad}
        if not parameters:
            raise ModelError("the model has no trainable parameters; at least one must have requires_grad=True")
        passes = Passes() if passes is None else passes
        call = ExampleCall(self._module, Arguments(args, kwargs, passes.chained), self.made, mapped=self.mapped)
        if passes.chained and call.size:
            raise _whole_batch()
        _check_groups(groups, call.size)
        job = _FunctionalJob(
            module=self._module,
            call=call,
            names=tuple(parameters),
            batch=_SortedBatch.sort(
                groups, self._chunk_size or _default_chunk_size(parameters), call.tensors[0].device
            ),
            clip_norm=checks.positive("clip_norm", clip_norm),
            grid=self._grid,
            cut=self._cut,
            refuse=self._refuse,
            scale=checks.positive("scale", scale) if call.size else 1.0,
            receive=receive,
            passes=passes,
            settings=TorchState.now(call.tensors[0].device),
        )
        tensors = (*parameters.values(), *call.tensors)
        if not torch.is_grad_enabled():
            outputs = job.outputs(tensors)
            self.mapped = call.mapped
            return call.assemble(*outputs)
        # The sums go to `receive`, not along the graph: a scalar that requires a gradient keeps the outputs in it.
        root = job.passes.root(call.tensors[0].device)
        outputs = _FunctionalOutputs.apply(root, job, *tensors)  # type: ignore[no-untyped-call]
        job.passes.made("by example", job.batch.chunk_size, root.device)
        self.mapped = call.mapped
        return call.assemble(outputs[: job.differentiable], outputs[job.differentiable :])


def _default_chunk_size(parameters: dict[str, Tensor]) -> int:
    size = sum(p.numel() * accumulator_dtype(p).itemsize for p in parameters.values())
    return max(1, CHUNK_BYTES // size)


@dataclass(frozen=True)
class _SortedBatch:
    """The examples in the order of their units, cut into chunks.

    Attributes:
        order: (B,) indices of the examples, unit by unit, on their device; None if they come so.
        units: (B,) on the CPU, the rank of the unit of each sorted example: 0, .., U - 1 in order.
        chunk_size: examples per chunk.
    """

    order: Tensor | None
    units: Tensor
    chunk_size: int

    @classmethod
    def sort(cls, groups: Tensor, chunk_size: int, device: torch.device) -> "_SortedBatch":
        groups = groups.detach().cpu()
        ranked, order = torch.sort(groups, stable=True)
        units = torch.unique_consecutive(ranked, return_inverse=True)[1]
        return cls(None if torch.equal(ranked, groups) else order.to(device), units, chunk_size)

    def chunks(self) -> Iterator[slice]:
        """Slices of the sorted examples."""
        return (slice(i, i + self.chunk_size) for i in range(0, len(self.units), self.chunk_size))

    def take(self, tensors: Tensors, chunk: slice) -> Tensors:
        """The examples of a chunk."""
        return tuple(t[chunk] if self.order is None else t[self.order[chunk]] for t in tensors)

    def unsort(self, tensor: Tensor) -> Tensor:
        """Sorted examples in the order in which they came."""
        return tensor if self.order is None else torch.empty_like(tensor).index_copy_(0, self.order, tensor)

    def units_of(self, chunk: slice) -> tuple[Tensor, bool]:
        """The chunk's units from 0 on, and whether its last unit has no examples in later chunks."""
        units = self.units[chunk]
        complete = chunk.stop >= len(self.units) or bool(self.units[chunk.stop] != units[-1])
        return units - units[0], complete


@dataclass(kw_only=True)
class _FunctionalJob:
    """One batch, from its forward pass to its backward pass. It holds no tensor of the batch but the units."""

    module: nn.Module
    call: ExampleCall
    names: tuple[str, ...]
    batch: _SortedBatch
    clip_norm: float
    grid: float | None
    cut: Cut
    refuse: bool
    scale: float
    receive: Receive
    passes: Passes
    settings: TorchState
    differentiable: int = 0
    done: bool = False

    def outputs(self, tensors: Tensors) -> tuple[Tensors, Tensors]:
        """The module's output tensors on the batch, the differentiable ones and the others, cut off from autograd."""
        parameters, inputs = self._split(tensors)

        # The same trace as in `backward`, so that both take the same kernels, and so the same random numbers.
        def example(parameters: dict[str, Tensor], tensors: Tensors) -> tuple[Tensors, Tensors]:
            outputs, _, others = vjp(lambda p: self.call(p, tensors, Witness(self.call.made)), parameters, has_aux=True)  # type: ignore[misc]
            return outputs, others

        if not self.call.size:  # nothing to map: the shapes are those of an example of zeros
            with self.settings.random_again():
                zeros = tuple(t.new_zeros(1, *t.shape[1:]) for t in inputs)
                pieces = [self._map(example, parameters, zeros)]
            outputs, others = (tuple(t[:0] for t in group) for group in pieces[0])
        else:
            pieces = [self._map(example, parameters, self.batch.take(inputs, c)) for c in self.batch.chunks()]
            outputs, others = (
                tuple(self.batch.unsort(torch.cat(parts)) for parts in zip(*group, strict=True))
                for group in zip(*pieces, strict=True)
            )
        self.differentiable = len(outputs)
        return outputs, others

    def backward(self, tensors: Tensors, cotangents: Tensors) -> None:
        """Give `receive` the sum over units of the clipped gradients of <outputs, cotangents>."""
        if self.done:
            raise TrainingError(
                "backward ran a second time on the same outputs of the private model: each unit is clipped once. Add "
                "the losses and call backward once"
            )
        self.done = True
        if self.passes.several:
            self.passes.back(_FunctionalJob._finish_all, (self, tensors, cotangents))
        else:
            self._finish_all([(self, tensors, cotangents)])

    @staticmethod
    def _finish_all(back: "list[tuple[_FunctionalJob, Tensors, Tensors]]") -> None:
        """The sum of all passes over the batch: chunk by chunk, an example's gradients of all of them added."""
        job, (parameters, _) = back[0][0], back[0][0]._split(back[0][1])
        total = ClippedSum(parameters, clip_norm=job.clip_norm, scale=job.scale, grid=job.grid, cut=job.cut)
        for chunk in job.batch.chunks():
            gradients, *others = [one._gradients(chunk, tensors, cotangents) for one, tensors, cotangents in back]
            for further in others:
                gradients = {name: value + further[name] for name, value in gradients.items()}
            units, complete = job.batch.units_of(chunk)
            total.add(gradients, units, complete=complete)
        if job.refuse:
            check_finite(total.bad, total.units)
        job.receive(total.finish())

    def _gradients(self, chunk: slice, tensors: Tensors, cotangents: Tensors) -> dict[str, Tensor]:
        """Those of every example of a chunk, with the random numbers that its forward pass drew."""

        def example(parameters: dict[str, Tensor], tensors: Tensors, cotangents: Tensors) -> dict[str, Tensor]:
            _, pull_back, _ = vjp(lambda p: self.call(p, tensors, Witness(self.call.made)), parameters, has_aux=True)  # type: ignore[misc]
            gradients: dict[str, Tensor] = pull_back(cotangents)[0]
            return gradients

        parameters, inputs = self._split(tensors)
        with self.settings.random_again():
            taken = self.batch.take(inputs, chunk), self.batch.take(cotangents, chunk)
            gradients: dict[str, Tensor] = self._map(example, parameters, *taken)
            self.settings = self.settings.going_on()
        return gradients

    def _split(self, tensors: Tensors) -> tuple[dict[str, Tensor], Tensors]:
        count = len(self.names)
        return dict(zip(self.names, tensors[:count], strict=True)), tensors[count:]

    def _map(self, function: Callable[..., Any], parameters: dict[str, Tensor], *batched: Tensors) -> Any:
        """function(parameters, example) for every example of a chunk."""
        mapped = vmap(function, in_dims=(None, *(0 for _ in batched)), randomness="different")
        with self.settings.autocast_again():
            try:
                with one_pass(self.call.made), mappable(list(self.module.modules()), batched[0][0].device):
                    result = mapped(parameters, *batched)
                check_nothing_kept(self.module)
                return result
            except (AnyorderError, torch.OutOfMemoryError):
                check_nothing_of_loop(self.module)
                raise
            except FAILURES as error:
                if not self.call.mapped:
                    self.call.mapped = True
                    self.settings.rewind()
                    return self._map(function, parameters, *batched)
                with self.settings.random_again():
                    reason = self.call.explain(error, parameters, batched[0])
                raise ModelError(reason) from error


class _FunctionalOutputs(torch.autograd.Function):
    """The outputs of a job, whose backward clips."""

    @staticmethod
    def forward(ctx: Any, root: Tensor, job: _FunctionalJob, *tensors: Tensor) -> Tensors:
        outputs, others = job.outputs(tensors)
        ctx.job = job
        ctx.save_for_backward(*tensors)
        ctx.mark_non_differentiable(*others)
        return *outputs, *others

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[None, ...]:
        job: _FunctionalJob = ctx.job
        if torch.is_grad_enabled():
            raise TrainingError("create_graph=True asks for the gradient of a clipped gradient: it is not covered")
        try:
            tensors = ctx.saved_tensors  # checks that none was changed in place
        except RuntimeError as error:
            raise _cannot_go_back(error) from error
        job.backward(tensors, cotangents[: job.differentiable])
        return (None,) * (2 + len(tensors))


def make_clipping(
    module: nn.Module,
    chunk_size: int | None = None,
    grid: float | None = None,
    rule: Rule | None = None,
    non_finite: str = "zero",
    *,
    tables: Mapping[str, Table] | None = None,
    count_norm: float | None = None,
) -> PerUnitClipping:
    """The engine for a model: one pass over the batch; on a grid, whose units are rounded one by one, two.

    Args:
        module, chunk_size, rule: see `GhostClipping`.
        grid: None, or the grid of exact integer sums; see `FunctionalClipping`.
        non_finite: "zero": a unit whose gradient is NaN or infinite adds exactly zero, and nothing tells of it;
            "refuse": an error with the number of such units, which is a release that no noise covers.
        tables: {parameter: how its rows are read}, for parameters of which a model reads rows and nothing else; see
            `Table`. The parameter itself may have no rows. Its sum is a coalesced sparse tensor of the rows that were
            read, (V, D) with one sparse dimension and ids ascending, and nothing of size V is made. Rows of padding
            are not read. Which rows there are is as secret as the data.
        count_norm: makes one sum more for each table, under `count_of(name)`: a coalesced sparse tensor (V,), float64,
            the sum over units of min(1, count_norm / sqrt(m_u)) on the rows that the unit reads, m_u in number over all
            tables. What a unit adds to all of them together has norm at most count_norm.
    Raises: ArgumentError for a rule other than `Flat` on a grid, and for tables that do not fit the module; ModelError
        for tables on a grid. In a forward pass, ModelError for a table that is used otherwise than by lookups
        (`F.embedding`, `F.embedding_bag` of (B, L) ids), and for a model that cannot be run in one pass.
    """
    native.warn_if_missing(sum(p.numel() for p in module.parameters()))
    if grid is None:
        return GhostClipping(module, chunk_size, rule, non_finite, tables=tables, count_norm=count_norm)
    if tables or count_norm is not None:
        raise ModelError(
            "sums on a grid are of whole parameters, and those of sparse tables are of rows: train them with "
            "sparse=False, or without ao.mechanism(secure=True)"
        )
    return FunctionalClipping(module, chunk_size, grid, rule, non_finite)
