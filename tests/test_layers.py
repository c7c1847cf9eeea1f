"""Each room imports only from the rooms above it, and the pure rooms never import torch."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import anyorder

ROOMS = [
    "errors", "durable", "checks", "_numerics", "formatting", "formats", "_library", "_ids", "patterns",
    "workload", "strategy", "noise", "accounting", "_draws", "participation", "optimize", "ledger",
    "sampling", "plan", "release", "clipping", "audit", "sparse", "training", "federated", "online", "budget",
    "app", "__main__",
]  # fmt: skip
PURE = [*ROOMS[: ROOMS.index("plan") + 1], "audit", "budget"]  # an auditor and a planner
PURE += ["app.cards", "app.charts", "app.report", "app.planning", "app.cli", "app.planner_page"]
PURE.remove("sampling")  # of torch's loaders; a plan asks for it where it is given one
ROOT = Path(anyorder.__file__).parent


def room_of(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def imported_rooms(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f"{path}: relative import"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return {name.split(".")[1] for name in names if name.startswith("anyorder.")}


FILES = sorted(path for path in ROOT.rglob("*.py") if path != ROOT / "__init__.py")


def test_every_room_is_named() -> None:
    assert {room_of(path) for path in FILES} == set(ROOMS)


def test_imports_only_from_rooms_above() -> None:
    below = {}
    for path in FILES:
        own = ROOMS.index(room_of(path))
        below[path] = {name for name in imported_rooms(path) & set(ROOMS) if ROOMS.index(name) > own}
    assert {str(path.relative_to(ROOT)): rooms for path, rooms in below.items() if rooms} == {}


def test_tests_and_package_import_neither_benchmarks_nor_reproductions() -> None:
    """Which have tests of their own beside them: `pytest benchmarks reproductions`."""
    found = set()
    for path in [*ROOT.rglob("*.py"), *Path(__file__).parent.rglob("*.py")]:
        text = path.read_text()
        if not re.search(r"^\s*(?:from|import)\b.*\b(?:benchmarks|reproductions)\b", text, re.MULTILINE):
            continue
        for node in ast.walk(ast.parse(text)):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            found |= {f"{path}: {name}" for name in names if name.split(".")[0] in ("benchmarks", "reproductions")}
    assert found == set()


def test_pure_rooms_do_not_import_torch() -> None:
    code = (
        f"import importlib, sys; [importlib.import_module('anyorder.' + room) for room in {PURE!r}]; "
        "assert 'torch' not in sys.modules, 'torch was imported'; "
        "assert 'anyorder.sampling' not in sys.modules, 'sampling was imported'"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_public_names_exist_and_are_documented() -> None:
    for name in anyorder.__all__:
        assert hasattr(anyorder, name), name
        if callable(getattr(anyorder, name)):
            assert getattr(anyorder, name).__doc__, f"{name} has no docstring"


def test_import_does_not_load_statistics() -> None:
    """scipy.stats, which scipy.signal brings in, took a fifth of the time; scipy.optimize half of the rest."""
    heavy = ("scipy.stats", "scipy.signal", "scipy.optimize", "scipy.interpolate", "torch", "rich", "matplotlib")
    code = f"import anyorder.plan, sys; print([name for name in {heavy!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
