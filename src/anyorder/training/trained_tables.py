"""Wide tables of a model: which weights they are, and how a step goes through them, beside the dense parameters."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import Tensor, nn

from anyorder.clipping.norms import accumulator_dtype, count_of
from anyorder.errors import ArgumentError, ModelError, PlanError, TrainingError
from anyorder.plan.plan import Plan
from anyorder.release.attached_tables import LazyRows, coalesced
from anyorder.release.release import Release
from anyorder.sparse.lazy_table import LazyTable, stand_ins_allowed
from anyorder.sparse.select import SelectedTables, warn_of_chances
from anyorder.training.distributed import is_sharded

if TYPE_CHECKING:
    from anyorder.training.engine import BoundParameters

_DENSE = "with sparse=False the weight is trained with noise on the whole of it at every step"
_UNFLUSHED = (
    "the table's rows have not all the noise yet that they are due, and which ones lack it tells which rows were "
    "touched: call engine.flush() first, which brings all of them up to date"
)


class TrainedTables:
    """The trained weights of `nn.Embedding(sparse=True)` and `nn.EmbeddingBag(sparse=True)`, and their part of a step.

    With `plan.selection` they are selected: at every step a few rows are chosen privately, and `.grad` is their
    private mean, a sparse tensor where the optimizer takes one. Without it they are lazy: they have the noise of the
    dense run, which a row is given when it is read next, and their updates are not the optimizer's but made with its
    rate; `.grad` stays None.

    Args:
        model, bound, optimizer, plan, ranks: of the run.
        found: the layers of the weights that are tables, of `tables_in`; at least one.

    Attributes:
        named: the weights that are tables, in the model's order.
    Raises: ArgumentError, ModelError, PlanError for what cannot be trained so, with the reason; nothing is changed.
    """

    def __init__(
        self, model: nn.Module, bound: "BoundParameters", optimizer: torch.optim.Optimizer, plan: Plan,
        found: dict[str, nn.Embedding | nn.EmbeddingBag], ranks: int,
    ) -> None:  # fmt: skip
        self._model, self._bound, self._optimizer, self._plan = model, bound, optimizer, plan
        self.named = {name: bound.named[name] for name in found}
        self._embeddings = found
        self._selected: SelectedTables | None = None
        self._lazy: dict[str, LazyTable] = {}
        self._options: dict[str, Any] = {}  # momentum and nesterov of each lazy table
        _check_setting(plan, ranks, self.named)
        if plan.selection is None:
            self._options = {name: _linear(name, optimizer, p) for name, p in self.named.items()}
        elif type(optimizer) is torch.optim.SparseAdam and len(found) < len(bound.named):
            raise ArgumentError(
                "SparseAdam takes sparse gradients alone, and the model has parameters that are in no table: take "
                "torch.optim.SGD or Adagrad, which take both, or Adam, which moves all rows of a table"
            )
        warn_of_chances(plan)

    def attach(self, release: Release) -> None:
        """Bind the tables to the release, behind its dense coordinates; before its first step."""
        if self._plan.selection is not None:
            self._selected = SelectedTables(release, [(len(p), p.shape[1]) for p in self.named.values()])
            return
        for name, p in self.named.items():
            rate = float(_group_of(self._optimizer, p)["lr"])
            self._lazy[name] = LazyTable(self._embeddings[name], release, lr=rate, **self._options[name])

    def has(self, name: str) -> bool:
        """Whether a parameter is a table."""
        return name in self.named

    @property
    def readers(self) -> dict[str, Any]:
        """How each table is read, for clipping."""
        if self._selected is not None:
            return {name: _InPlace(p) for name, p in self.named.items()}
        return dict(self._lazy)

    @property
    def count_norm(self) -> float | None:
        """Norm of what a unit adds to the counts of rows; None where nothing is counted."""
        return None if self._selected is None else self._selected.count_norm

    def nothing(self) -> dict[str, Tensor]:
        """The sums and counts of nobody."""
        empty = {}
        for name, p in self.named.items():
            rows, width = self._shape(name)
            nobody = torch.zeros(1, 0, dtype=torch.int64, device=p.device)
            values = torch.zeros(0, width, dtype=accumulator_dtype(p), device=p.device)
            empty[name] = coalesced(nobody, values, (rows, width))
            if self.count_norm is not None:
                empty[count_of(name)] = coalesced(nobody, values.new_zeros(0, dtype=torch.float64), (rows,))
        return empty

    def _shape(self, name: str) -> tuple[int, int]:
        table = self._lazy.get(name)
        return (table.num_rows, table.width) if table is not None else tuple(self.named[name].shape)  # type: ignore[return-value]

    # -- a step ------------------------------------------------------------------------------------------------------

    def parts(self, sums: Mapping[str, Tensor]) -> list[Any]:
        """The tables' parts of a step, for `Release.take`."""
        if self._selected is not None:
            own = [sums[name].coalesce() for name in self.named]
            counted = self.named if self.count_norm is not None else ()
            counts = [sums[count_of(name)].coalesce() for name in counted]
            return [self._selected.part(own, counts)]
        parts = []
        for name, table in self._lazy.items():
            total = sums[name].coalesce()
            table.lr = float(_group_of(self._optimizer, self.named[name])["lr"])
            # Clipped sums of distinct rows, which nobody else has: they are neither looked at nor copied.
            parts.append(LazyRows(table, total.indices()[0].cpu().numpy(), total.values()))
        return parts

    def check_step(self) -> None:
        """Refuse a step of the optimizer that the tables cannot follow."""
        for name, p in self.named.items():
            if self._selected is not None:
                continue
            if _linear(name, self._optimizer, p) != self._options[name]:
                raise TrainingError(
                    f"the options of the optimizer for the table {name} were changed after make_private; of these, "
                    "only the rate may move"
                )
            if p.grad is not None:
                raise TrainingError(
                    f"the table {name} has a gradient, from a penalty on weights or another loss perhaps, and gets "
                    "none through the private model: its updates are made with the noise. Set it to None; for a "
                    f"penalty take sparse=False: {_DENSE}"
                )

    def write(self, released: list[Any]) -> None:
        """Put the private gradients in place.

        Args:
            released: `Release.of_tables` after a step.
        """
        if self._selected is None:
            return
        made = self._selected.each(released)
        for p, rows in zip(self.named.values(), made, strict=True):
            gradient = rows.to(p.dtype)
            self._bound.write(p, gradient if _takes_sparse(self._optimizer, p) else gradient.to_dense())

    # -- showing -----------------------------------------------------------------------------------------------------

    @property
    def are_lazy(self) -> bool:
        """Whether there are tables that lack noise between flushes."""
        return bool(self._lazy)

    def check_shown(self) -> None:
        """Raise TrainingError where a table must not be read as it is."""
        if any(not table.flushed for table in self._lazy.values()):
            raise TrainingError(_UNFLUSHED)

    def model_state(self) -> dict[str, Any]:
        """The model's state but for its lazy tables, which the release keeps."""
        own = self._own_names()
        with stand_ins_allowed():
            state = self._model.state_dict()
        return {name: value for name, value in state.items() if name not in own}

    def load(self, state: Mapping[str, Any], load: Callable[[dict[str, Any]], None]) -> None:
        """Load what `model_state` gave, with the lazy tables as they are.

        Args:
            load: loads a whole state into the model.
        """
        own = {name: p.detach() for name, p in self._own_names().items()}
        with stand_ins_allowed():
            load({**state, **own})

    def _own_names(self) -> dict[str, nn.Parameter]:
        """The lazy tables under all the names that they have in the model's state."""
        own = {id(self.named[name]) for name in self._lazy}
        return {name: p for name, p in self._model.named_parameters(remove_duplicate=False) if id(p) in own}


class _InPlace:
    """A table that is read where it is: all of it is up to date after every step."""

    def __init__(self, p: nn.Parameter) -> None:
        self._p = p

    @property
    def num_rows(self) -> int:
        return len(self._p)

    @property
    def width(self) -> int:
        return self._p.shape[1]

    @property
    def dtype(self) -> torch.dtype:
        return self._p.dtype

    @property
    def device(self) -> torch.device:
        return self._p.device

    def read(self, ids: Tensor) -> Tensor:
        return nn.functional.embedding(ids, self._p.detach())


def tables_in(model: nn.Module, named: Mapping[str, nn.Parameter]) -> dict[str, nn.Embedding | nn.EmbeddingBag]:
    """The layer of each trained weight that is a table.

    Raises: ArgumentError for one with an option that needs the rows as they were, ModelError for one that other layers
        use otherwise.
    """
    names = {id(p): name for name, p in named.items()}
    found: dict[str, nn.Embedding | nn.EmbeddingBag] = {}
    for part in model.modules():
        if _is_table(part) and id(part.weight) in names:
            _check_layer(names[id(part.weight)], part)
            found.setdefault(names[id(part.weight)], part)
    tables = {id(named[name]) for name in found}
    for path, part in model.named_modules():
        for p in part._parameters.values():
            if p is None or id(p) not in tables:
                continue
            if not _is_table(part):
                raise ModelError(
                    f"the weight of the table {names[id(p)]} is {path}'s too, which may use all of its rows: a table "
                    f"with sparse=True is read by lookups alone. Take sparse=False for all of them: {_DENSE}"
                )
    return {name: found[name] for name in named if name in found}


def _is_table(part: nn.Module) -> TypeGuard[nn.Embedding | nn.EmbeddingBag]:
    """Whether it reads rows and nothing else: of subclasses that is not known, and they are trained as other layers."""
    return type(part) in (nn.Embedding, nn.EmbeddingBag) and bool(part.sparse)


def _check_layer(name: str, layer: nn.Embedding | nn.EmbeddingBag) -> None:
    for option in ("max_norm", "scale_grad_by_freq"):
        if getattr(layer, option):
            why = "changes rows when they are read" if option == "max_norm" else "scales a unit by what others read"
            raise ArgumentError(f"the table {name} has {option}, which {why}: no noise covers it; leave it out")
    if isinstance(layer, nn.EmbeddingBag) and layer.mode == "max":
        raise ArgumentError(
            f"the table {name} has mode='max', which tables with sparse=True have not: take 'sum' or 'mean'"
        )


def _check_setting(plan: Plan, ranks: int, named: Mapping[str, nn.Parameter]) -> None:
    tables = f"tables ({', '.join(named)}, with sparse=True)"
    if ranks > 1 or any(is_sharded(p) for p in named.values()):
        raise PlanError(f"{tables} are trained by one process, and here are {ranks}; {_DENSE}")
    if plan.grid is not None:
        raise PlanError(
            f"{tables} have no exact integers: plan without ao.mechanism(secure=True), or take sparse=False; {_DENSE}"
        )


def _group_of(optimizer: torch.optim.Optimizer, p: nn.Parameter) -> dict[str, Any]:
    return next(group for group in optimizer.param_groups if any(own is p for own in group["params"]))


def _linear(name: str, optimizer: torch.optim.Optimizer, p: nn.Parameter) -> dict[str, Any]:
    """Momentum and nesterov of a lazy table: its rows are brought over many steps at once, by linear updates alone.

    Raises: ArgumentError for another optimizer or option.
    """
    why = (
        "a row of the table that no step reads is brought over all of them at once, by a formula that holds for linear "
        f"updates alone. Or plan with a selection of rows, which goes with any optimizer, or {_DENSE}"
    )
    if type(optimizer) is not torch.optim.SGD:
        raise ArgumentError(
            f"the table {name} without a selection of rows needs torch.optim.SGD, got {type(optimizer).__name__}: {why}"
        )
    group = _group_of(optimizer, p)
    for option in ("weight_decay", "dampening", "maximize"):
        if group[option]:
            raise ArgumentError(
                f"the table {name} without a selection of rows needs SGD without {option}, got {group[option]!r}; give "
                f"its weight a parameter group of its own for that: {why}"
            )
    return {"momentum": float(group["momentum"]), "nesterov": bool(group["nesterov"])}


def _takes_sparse(optimizer: torch.optim.Optimizer, p: nn.Parameter) -> bool:
    """Whether the optimizer's update of a sparse gradient is its own algorithm, at the cost of the rows."""
    group = _group_of(optimizer, p)
    if type(optimizer) is torch.optim.SparseAdam:
        return True
    if type(optimizer) not in (torch.optim.SGD, torch.optim.Adagrad):
        return False
    return not group["weight_decay"] and not group.get("fused")
