"""A dry run: what a model does is tried once, on two made-up rows, before it meets data.

Everything that is found here depends on the model's code and weights and on made-up data alone: of the first batch
nothing is used but the types and shapes of its tensors. It is run on copies that share the model's parameters.

- A model that keeps something of what it is given is refused (`module_state`).
- A model that does other things on one example than on a batch is warned of: examples are run one by one here.
- So is one with no finite gradient, or none at all, and parameters that no output depends on are named.
"""

import copy
import sys
import warnings
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from anyorder.clipping.coupling import unwatched
from anyorder.clipping.torch_private import flattened
from anyorder.errors import ModelError, ModelWarning
from anyorder.sampling.draws import alone, process_generators, reseed
from anyorder.training.module_state import moved_apart, state_of

_CLOSE = 1e-2  # of the largest output; less may be rounding, of sums in another order
_ROUNDING = 1e-6  # of the same sums once more: what differs by more is random, be its share of an output small
_SHOWN = 5  # names in a message
Inputs = tuple[tuple[Any, ...], dict[str, Any]]


def try_model(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Try a model on made-up data of the types and shapes that it is called with.

    Args:
        model: in training mode; it is not changed.
        args, kwargs: of its first call. Their values are not read.
    Returns: whether it could be tried.
    Raises: ModelError for a model that keeps what it is given, where what it returns later depends on that.
    Warns: ModelWarning.
    Cost: a copy of the model without its parameters, some forward passes and one backward pass of two rows, of texts
        cut to a few tokens where the model takes them.
    """
    eager = torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()
    with alone(0), warnings.catch_warnings(), eager:
        warnings.simplefilter("ignore")  # the first batch tells of them
        try:
            args, kwargs = unwatched(args), unwatched(kwargs)  # of which the loop, and no trial, is to read the sizes
            try:
                kept, found = _tried(model, *_shortened(args, kwargs))
            except Exception:  # not every model takes other lengths
                kept, found = _tried(model, args, kwargs)
        except Exception:
            return False  # it cannot be copied, or takes no made-up data: the first batch tells what there is to tell
    if kept:
        places, matters = kept
        what = f"the model keeps something of what it is given, in {_listed(places)}"
        if matters:
            raise ModelError(
                f"{what}, and what it returns later depends on that: so a unit would reach the gradients of later "
                "batches, through a length perhaps. Keep nothing in forward: make it a fixed number, or an input"
            )
        found = [f"{what}. No later output was seen to depend on it; whatever you print or decide by it is not private"]
    for text in found:
        warnings.warn(text, ModelWarning, stacklevel=6)
    return True


Kept = tuple[list[str], bool] | None


def _tried(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Kept, list[str]]:
    """What it keeps, and else what a user should know of it."""
    kept = _kept(model, args, kwargs)
    return kept, [] if kept else _problems(model, args, kwargs)


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


# -- made-up data ----------------------------------------------------------------------------------------------------

_SHORT = 8  # tokens: a model of sequences does with a few what it does with many, in less of the first step's time


def _shortened(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Inputs:
    """The inputs with the first tokens of texts alone, and of what goes with them: for their shapes."""
    tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    lengths = {t.shape[1] for t in tensors if t.dim() == 2 and not t.is_floating_point() and t.shape[1] > _SHORT}

    def short(leaf: Any) -> Any:
        is_text = isinstance(leaf, Tensor) and leaf.dim() > 1 and leaf.shape[1] in lengths
        return leaf[:, :_SHORT] if is_text else leaf

    return pytree.tree_map(short, (args, kwargs))  # type: ignore[no-any-return]


def _made_up(
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    rows: int = 2,
    seed: int = 0,
    scale: float = 1.0,
    longer: bool = False,
) -> Inputs:
    """Inputs of these types and shapes, of so many rows. Integers are ones: ids, labels and masks may be 1.

    Args:
        scale: of real numbers.
        longer: the second dimension is longer than twice as long, of all tensors that share its length.
    """
    generator = torch.Generator().manual_seed(seed)
    tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    lengths = {t.shape[1] for t in tensors if t.dim() > 1}
    length = min(lengths, default=0)

    def made(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        shape = [rows, *(2 * n + 1 if longer and n == length else n for n in leaf.shape[1:])]
        if leaf.is_floating_point():
            return (scale * torch.randn(shape, generator=generator)).to(leaf.device, leaf.dtype)
        return torch.ones(shape, device=leaf.device, dtype=leaf.dtype)

    return pytree.tree_map(made, (args, kwargs))  # type: ignore[no-any-return]


def _twin(model: nn.Module) -> nn.Module:
    """A copy that shares the parameters."""
    return copy.deepcopy(model, {id(p): p for p in model.parameters()})


def _run(model: nn.Module, inputs: Inputs) -> list[Tensor]:
    """The outputs that can be trained on, with the same random numbers in each run."""
    reseed(process_generators(), 0)
    args, kwargs = inputs
    leaves, _ = flattened(model(*args, **kwargs))
    return [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.is_floating_point()]


# -- what is kept ----------------------------------------------------------------------------------------------------


@torch.no_grad()
def _kept(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Kept:
    """Where the model keeps what differs between two copies, called equally often, and whether outputs follow it.

    What the copies share, a class perhaps or a global, moves by the calls of both: so the larger data come second.
    """
    probe = _made_up(args, kwargs)
    other = _made_up(args, kwargs, rows=3, seed=1, scale=3.0)
    try:
        return _moved(model, probe, [other, _made_up(args, kwargs, longer=True)])
    except Exception:  # not every model takes other lengths
        return _moved(model, probe, [other])


def _moved(model: nn.Module, probe: Inputs, others: Sequence[Inputs]) -> Kept:
    one, other = _twin(model), _twin(model)
    before = state_of(one)
    for _ in others:
        _run(one, probe)
    first, seen = (before, state_of(one)), _run(one, probe)
    before = state_of(other)
    for inputs in others:
        _run(other, inputs)
    places = moved_apart(first, (before, state_of(other)))
    return (places, not all(map(_close, seen, _run(other, probe)))) if places else None


# -- what it would learn ---------------------------------------------------------------------------------------------


def _problems(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[str]:
    """What a user should know before the run, in words."""
    inputs = _made_up(args, kwargs)
    found: list[str] = []
    if not _same_alone(_twin(model), inputs):
        found.append(
            "the model gives other outputs for one row alone than for the same row in a batch, on made-up data: it is "
            "trained on rows alone here, and would learn something else than in a batch. Batch statistics do that: "
            "normalise each example by itself (nn.GroupNorm, nn.LayerNorm)"
        )
        return found  # what follows from that would only be told again
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    gradients = _gradients(_twin(model), inputs, list(parameters.values()))
    reached = {name: g for name, g in zip(parameters, gradients, strict=True) if g is not None}
    values = [g._values() if g.is_sparse else g for g in reached.values()]
    if values and not any(bool(g.isfinite().any()) for g in values):
        found.append("no gradient is finite on made-up data: every unit would add zero, and the model learn nothing")
    elif not any(bool(g.any()) for g in values):
        found.append("every gradient is zero on made-up data: the model would learn nothing but noise")
    elif len(reached) < len(parameters):
        found.append(
            f"no output depends on {_listed([name for name in parameters if name not in reached])}: they get noise and "
            "nothing else. Freeze them (requires_grad_(False)), or leave them out of the optimizer"
        )
    return found


@torch.no_grad()
def _same_alone(model: nn.Module, inputs: Inputs) -> bool:
    """Whether each row gives what it gives in a batch of two; True where that cannot be told from random numbers."""
    for part in model.modules():
        if "dropout" in type(part).__name__.lower():
            part.eval()
    together = _run(model, inputs)
    if not all(t.dim() and len(t) == 2 for t in together):
        return True
    for i in range(2):
        row = pytree.tree_map(lambda leaf, i=i: leaf[i : i + 1] if isinstance(leaf, Tensor) else leaf, inputs)
        if not all(_close(t[i : i + 1], alone) for t, alone in zip(together, _run(model, row), strict=True)):
            break
    else:
        return True  # as always: no further run
    torch.rand(1)  # other random numbers than those of the run of both
    again, _ = flattened(model(*inputs[0], **inputs[1]))
    again = [leaf for leaf in again if isinstance(leaf, Tensor) and leaf.is_floating_point()]
    return not all(_close(t, other, _ROUNDING) for t, other in zip(together, again, strict=True))


def _close(x: Tensor, y: Tensor, share: float = _CLOSE) -> bool:
    if x.shape != y.shape:
        return False
    x, y = x.double(), y.double()
    size = max(float(x.abs().nan_to_num().max()) if x.numel() else 0.0, 1e-12)
    return bool((((x - y).abs() <= share * size) | (x.isnan() & y.isnan()) | (x == y)).all())


def _gradients(model: nn.Module, inputs: Inputs, parameters: list[Any]) -> Sequence[Tensor | None]:
    """Of a sum of all outputs with random weights, on the rows alone, as they are trained."""
    with torch.enable_grad():
        total: Any = 0.0
        for i in range(2):
            row = pytree.tree_map(lambda leaf, i=i: leaf[i : i + 1] if isinstance(leaf, Tensor) else leaf, inputs)
            outputs = [t for t in _run(model, row) if t.requires_grad]
            total = total + sum((t * torch.randn_like(t)).sum() for t in outputs)
        if not isinstance(total, Tensor):
            return [None] * len(parameters)
        return torch.autograd.grad(total, parameters, allow_unused=True)
