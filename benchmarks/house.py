"""How far a reader goes: files that a trip enters, and what the source weighs, beside Opacus in the same run.

python -m benchmarks.house              # the table
python -m benchmarks.house --quick      # ours alone
python -m benchmarks.house --lower      # the figures that fell become the most that tests allow
python -m benchmarks.house --check      # what the tests ask: no figure is above the one that is kept

Trips are run by the public interface, under a profile that sees each Python call; a trip was made once before, with
other sizes, so that what is imported and compiled at first is not counted. A switch is a call in another file than
the call before it. Figures of the source are read from its syntax tree. All are kept in house.json: `before` is where
they stood, `most` what is allowed now; `--lower` never raises one. Where a figure has to grow, edit the file and say
why in the commit.
"""

import argparse
import ast
import gc
import inspect
import io
import json
import os
import sys
import tempfile
import tokenize
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from importlib.util import find_spec
from math import ceil, floor
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

from benchmarks._report import Row, add_options

KEPT = Path(__file__).with_suffix(".json")


class Figure(NamedTuple):
    """One number of a house; the peer's is None where it has nothing of the kind."""

    name: str
    ours: float
    peer: float | None
    unit: str
    grain: float = 1
    """What is kept is a multiple of this, on the side that leaves room."""
    more_is_better: bool = False


# -- trips ------------------------------------------------------------------------------------------------------------


class Trip(NamedTuple):
    """What one call entered of a package: files, functions, and calls in another file than the call before."""

    files: int
    functions: int
    switches: int


def travelled(work: Callable[[], object], root: Path) -> Trip:
    """The trip of one call through the files under a folder."""
    inside, functions, switches, last = f"{root}{os.sep}", set(), 0, ""

    def each(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal switches, last
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(inside) and code.co_name != "<module>":
            functions.add(code)
            switches += bool(last) and code.co_filename != last
            last = code.co_filename

    sys.setprofile(each)
    try:
        work()
    finally:
        sys.setprofile(None)
    return Trip(len({code.co_filename for code in functions}), len(functions), switches)


def root_of(package: str) -> Path:
    """The folder of a package, without an import of it."""
    spec = find_spec(package)
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent


def our_trips(folder: Path) -> dict[str, Trip]:
    """The trips of this package; what they write goes to the folder."""
    import torch
    from torch import nn

    import anyorder as ao

    root, trips = root_of("anyorder"), {}
    as_order = "order" if "participation" not in inspect.signature(ao.plan).parameters else "participation"

    def planned(size: int, **more: Any) -> Any:
        return ao.plan(loader=_loader(size), epochs=2, epsilon=8, delta=1e-5, **more)

    def private(size: int, plan: Any) -> tuple[Any, ...]:
        model = nn.Linear(4, 2)
        engine = ao.PrivacyEngine(plan)
        return engine, *engine.make_private(model, torch.optim.SGD(model.parameters(), 0.1), _loader(size))

    def twice(name: str, work: Callable[[int], object]) -> None:
        work(72)
        trips[name] = travelled(lambda: work(64), root)

    twice("ao.plan(loader=)", planned)
    plans = {size: planned(size, mechanism="independent") for size in (64, 72)}
    twice("make_private", lambda size: private(size, plans[size]))

    engine, *parts = private(64, plans[64])
    trips["batch"] = travelled(_batch(*parts), root)
    engine.certificate().save(folder / "certificate.json")
    trips["verify"] = travelled(partial(ao.verify, folder / "certificate.json"), root)

    del engine, parts  # and what asks of tensors in a loop, as long as a run lives
    gc.collect()
    order = {as_order: ao.participation.MinSeparation(4, 2, 2)}
    given = {"batch_size": 2, "epsilon": 8.0, "delta": 1e-5, "mechanism": "independent", "unit": "user"}
    plan: Any = ao.plan(**order, **given)  # type: ignore[arg-type]
    model = nn.Linear(3, 1)
    server = ao.federated.Server(plan, model, torch.optim.SGD(model.parameters(), 1.0))
    message = {name: 0.1 * torch.ones_like(value) for name, value in model.named_parameters()}
    server.round({0: message, 1: message})
    trips["federated round"] = travelled(lambda: server.round({2: message, 3: message}), root)

    release = ao.Release(plan, 3)
    release.step([0, 1], ao.bounded_sum(torch.ones(2, 3), [0, 1], 1.0))
    total = ao.bounded_sum(torch.ones(2, 3), [2, 3], 1.0)
    trips["Release.step"] = travelled(lambda: release.step([2, 3], total), root)
    return trips


def opacus_trips() -> dict[str, Trip]:
    """What Opacus has of them: the same loop, with its hooks."""
    import torch
    from opacus import PrivacyEngine
    from torch import nn

    root = root_of("opacus")

    def private(size: int) -> Any:
        model = nn.Linear(4, 2)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        return PrivacyEngine().make_private(
            module=model, optimizer=optimizer, data_loader=_loader(size), noise_multiplier=1.0, max_grad_norm=1.0
        )

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        parts = private(72)
        made = travelled(lambda: private(64), root)
        return {"make_private": made, "batch": travelled(_batch(*parts), root)}


def _loader(size: int) -> Any:
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    data: Any = TensorDataset(torch.randn(size, 4), torch.arange(size) % 2)
    return DataLoader(data, batch_size=8, shuffle=True)


def _batch(model: Any, optimizer: Any, loader: Any) -> Callable[[], None]:
    """One batch of a loop that is under way: the loader, forward, backward and step."""
    from torch.nn.functional import cross_entropy

    batches = iter(loader)

    def batch() -> None:
        x, y = next(batches)
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        optimizer.step()

    for _ in range(4):
        batch()
    return batch


# -- the source -------------------------------------------------------------------------------------------------------


class Source:
    """The syntax trees of a package's files."""

    def __init__(self, package: str) -> None:
        self.package, self.root = package, root_of(package)
        paths = (path for path in sorted(self.root.rglob("*.py")) if "tests" not in path.relative_to(self.root).parts)
        self.texts = {path: path.read_text() for path in paths}
        self.trees = {path: ast.parse(text) for path, text in self.texts.items()}

    def lines(self) -> int:
        """Of Python, C++ and what pages are made of."""
        others = [path for kind in ("cpp", "h", "js", "css", "html") for path in self.root.rglob(f"*.{kind}")]
        return sum(len(text.splitlines()) for text in [*self.texts.values(), *(path.read_text() for path in others)])

    def public_names(self) -> int:
        """In `__all__` of the package, of its modules and of the packages in it; by what they import where none has."""
        names: set[tuple[Path, str]] = set()
        for path, tree in self.trees.items():
            inside = path.relative_to(self.root).parts
            is_place = path.name == "__init__.py" or len(inside) == 1
            if not is_place or any(part[0] == "_" and part != "__init__.py" for part in inside):
                continue
            stated = [
                element.value
                for node in tree.body
                if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__"
                for element in getattr(node.value, "elts", [])
            ]
            if not stated and path.name == "__init__.py" and self.package != "anyorder":
                imports = [node for node in tree.body if isinstance(node, ast.ImportFrom)]
                stated = [alias.asname or alias.name for node in imports for alias in node.names]
            names |= {(path, name) for name in stated}
        return len(names)

    def repeated_classes(self) -> list[str]:
        """Class names that two files define."""
        files = defaultdict(set)
        for path, tree in self.trees.items():
            for node in tree.body:
                if isinstance(node, ast.ClassDef):
                    files[node.name].add(path)
        return sorted(name for name, where in files.items() if len(where) > 1)

    def naming(self, *words: str) -> list[Path]:
        """Files whose code (not its documentation) names something, by a name or a string that is just that."""

        def names(tree: ast.Module) -> Iterator[str]:
            for node in ast.walk(tree):
                match node:
                    case ast.Name():
                        yield node.id
                    case ast.Attribute():
                        yield node.attr
                    case ast.alias() | ast.ClassDef():
                        yield node.name
                    case ast.Constant(value=str(text)):
                        yield text

        return [path for path, tree in self.trees.items() if set(names(tree)) & set(words)]

    def imports_inside_functions(self) -> int:
        """Import statements that run when a function is called."""
        return sum(
            isinstance(node, ast.Import | ast.ImportFrom)
            for tree in self.trees.values()
            for function in _outermost_functions(tree)
            for node in ast.walk(function)
        )

    def imports_by_string(self) -> int:
        """Calls that import what a string names, and strings that name a module of the package."""
        found = 0
        for tree in self.trees.values():
            for node in ast.walk(tree):
                if isinstance(node, ast.Call):
                    called = getattr(node.func, "id", getattr(node.func, "attr", ""))
                    found += called in ("import_module", "__import__")
                elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                    found += self._is_module(node.value)
        return found

    def _is_module(self, text: str) -> bool:
        parts = text.split(".")
        if len(parts) < 2 or parts[0] != self.package or not all(part.isidentifier() for part in parts):
            return False
        place = self.root.joinpath(*parts[1:])
        return place.with_suffix(".py").exists() or (place / "__init__.py").exists()

    def comment_share(self) -> float:
        """Comments for each hundred lines that hold code; docstrings are neither."""
        comments = code = 0
        for path, text in self.texts.items():
            documented = {
                line
                for node in ast.walk(self.trees[path])
                if isinstance(node, ast.Expr)
                and isinstance(node.value, ast.Constant)
                and isinstance(node.value.value, str)
                for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
            }
            lines = set()
            for token in tokenize.generate_tokens(io.StringIO(text).readline):
                if token.type == tokenize.COMMENT:
                    comments += 1
                elif token.type in (tokenize.NAME, tokenize.NUMBER, tokenize.STRING, tokenize.OP):
                    lines |= set(range(token.start[0], token.end[0] + 1))
            code += len(lines - documented)
        return round(100 * comments / code, 2)


def _outermost_functions(tree: ast.Module) -> Iterator[ast.AST]:
    waiting: list[ast.AST] = [tree]
    while waiting:
        for node in ast.iter_child_nodes(waiting.pop()):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield node
            else:
                waiting.append(node)


# -- the table --------------------------------------------------------------------------------------------------------


def figures(quick: bool) -> Iterator[Figure]:
    """Of the table in the order in which it is read; quick: without the peer."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ["ANYORDER_CACHE"] = folder
        ours = our_trips(Path(folder))
    theirs = {} if quick else opacus_trips()
    for name, unit in (
        ("batch", "a batch through nn.Linear, steady"),
        ("make_private", "make_private"),
        ("ao.plan(loader=)", "ao.plan(loader=)"),
        ("verify", "verify"),
        ("federated round", "a federated round of two messages"),
        ("Release.step", "Release.step of three numbers"),
    ):
        trip, peer = ours[name], theirs.get(name)
        yield Figure(f"{name}: files", trip.files, peer and peer.files, f"files that {unit} enters")
        if name == "batch":
            yield Figure(f"{name}: functions", trip.functions, peer and peer.functions, f"functions of {unit}", 5)
            yield Figure(f"{name}: switches", trip.switches, peer and peer.switches, f"switches of file in {unit}", 5)

    import anyorder as ao

    source, peer_source = Source("anyorder"), None if quick else Source("opacus")

    def both(name: str, count: Callable[[Source], float], unit: str, *rest: Any) -> Figure:
        return Figure(name, count(source), None if peer_source is None else count(peer_source), unit, *rest)

    order = source.naming("RandomAllocation", "random-allocation", "random_allocation")
    strategy = source.naming("BLT", "blt")
    yield Figure("order: files", len(order), None, "files that name RandomAllocation: to edit for one more order")
    yield Figure("strategy: files", len(strategy), None, "files that name BLT: to edit for one more strategy")
    yield Figure("ao.plan: keywords", len(inspect.signature(ao.plan).parameters), None, "keywords of ao.plan")
    yield both("public names", Source.public_names, "public names in all")
    yield both("class names twice", lambda one: len(one.repeated_classes()), "class names that two files define")
    yield both("imports in functions", Source.imports_inside_functions, "imports inside functions")
    yield both("imports by string", Source.imports_by_string, "imports by string")
    yield both("lines", Source.lines, "source lines that ship", 250)
    yield both("comments", Source.comment_share, "comments for 100 lines of code; more is better", 0.25, True)


def rounded(figure: Figure) -> float:
    """A multiple of the figure's grain that it still keeps to."""
    toward = floor if figure.more_is_better else ceil
    return toward(figure.ours / figure.grain) * figure.grain


def is_worse(figure: Figure, kept: float) -> bool:
    """Whether a figure is on the wrong side of the one that is kept."""
    return figure.ours < kept if figure.more_is_better else figure.ours > kept


def lowered(found: list[Figure], most: dict[str, float]) -> dict[str, float]:
    """What is allowed from now on: no figure is given more room than it had."""
    best = {}
    for figure in found:
        new, old = rounded(figure), most.get(figure.name)
        best[figure.name] = new if old is None else (max if figure.more_is_better else min)(new, old)
    return best


def complaints(found: list[Figure], most: dict[str, float]) -> list[str]:
    """A line for each figure that is worse than what is kept, or is not kept at all."""
    told = [
        f"{figure.name}: {figure.ours:g} {figure.unit}, allowed {most[figure.name]:g}"
        for figure in found
        if figure.name in most and is_worse(figure, most[figure.name])
    ]
    names = Counter([*most, *(figure.name for figure in found)])
    return told + [f"{name}: kept and not measured, or measured and not kept" for name in names if names[name] == 1]


def main() -> int:
    """Print, check or lower."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add_options(parser)
    parser.add_argument("--lower", action="store_true", help="keep the figures that fell")
    parser.add_argument("--check", action="store_true", help="fail where a figure is worse than the one that is kept")
    chosen = parser.parse_args()
    found = list(figures(chosen.quick or chosen.check or chosen.lower))
    kept = json.loads(KEPT.read_text()) if KEPT.exists() else {}
    if chosen.check:
        told = complaints(found, kept["most"])
        print("\n".join(told))
        return bool(told)
    if chosen.lower:
        kept.setdefault("before", {figure.name: figure.ours for figure in found})
        kept["most"] = lowered(found, kept.get("most", {}))
        KEPT.write_text(json.dumps(kept, indent=1) + "\n")
    if not chosen.json:
        print(f"{'':<20}{'before':>8}{'most':>8}{'ours':>8}{'Opacus':>8}")
    for figure in found:
        if chosen.json:
            ratio = None if figure.peer is None or not figure.ours else figure.peer / figure.ours
            print(json.dumps(asdict(Row(figure.name, figure.ours, figure.peer, ratio, figure.unit))))
        else:
            of_old = [kept.get(key, {}).get(figure.name) for key in ("before", "most")]
            cells = ["-" if value is None else f"{value:g}" for value in (*of_old, figure.ours, figure.peer)]
            print(f"{figure.name:<20}{''.join(f'{cell:>8}' for cell in cells)}  {figure.unit}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
