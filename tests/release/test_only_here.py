"""Nothing but the room of releases turns a sum into a release."""

import ast
from pathlib import Path

import anyorder

ROOT = Path(anyorder.__file__).parent
MAKERS = {"NoiseStream", "GridStream"}
ADDERS = {"add_to", "add_to_rows", "SharedNoise", "TableNoise", "table_noise", "lazy_source", "noise_rows", "normal_at"}
ADDERS |= {"carry", "carried"}
# Planted faults put worse noise in the place of what the room adds, for the time of an audit; they release nothing.
PLANTED = {"audit/faults/core.py": {"add_to", "'add_to'"}}
# Tables attach themselves to a release, which hands them its noise and settles their part of a step after its commit.
TABLES = {
    "sparse/lazy_table.py": {"add_to_rows", "table_noise", "lazy_source", "noise_rows", "carry", "carried"},
    "sparse/select.py": {"add_to_rows", "table_noise"},
}
OUTSIDE = [path for path in sorted(ROOT.rglob("*.py")) if path.relative_to(ROOT).parts[0] not in ("release", "noise")]


def uses(source):
    """What a file has to do with noise for sums: the classes that make it, by whatever import, and `add_to`."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom):
            found |= {alias.name for alias in node.names if alias.name in MAKERS}
            found |= {"*" for alias in node.names if alias.name == "*" and "noise" in (node.module or "")}
        elif isinstance(node, ast.Attribute) and node.attr in MAKERS | ADDERS:
            found.add(node.attr)
        elif isinstance(node, ast.Name) and node.id in MAKERS:
            found.add(node.id)
        elif isinstance(node, ast.Constant) and node.value in MAKERS | {"add_to"}:
            found.add(f"{node.value!r}")
    return found


def test_no_other_room_adds_noise_to_sums():
    found = {path.relative_to(ROOT).as_posix(): uses(path.read_text()) for path in OUTSIDE}
    assert {name: names for name, names in found.items() if names} == PLANTED | TABLES


def test_the_walk_sees_each_way():
    for source in (
        "from anyorder.noise import NoiseStream",
        "from anyorder.noise.stream import NoiseStream as Stream",
        "import anyorder.noise as n\nn.GridStream(1)",
        "from anyorder.noise import *",
        "getattr(module, 'NoiseStream')",
        "stream.add_to([total])",
        "release.table_noise(0, 8).add_to_rows(0, 0, rows, values, 1.0)",
        "release.lazy_source(int).normal_at(rows, starts, 8)",
        "source = release.noise_rows()",
        "late_rows.carry(source, jump, memory, rows)",
    ):
        assert uses(source), source


def test_the_room_itself_has_one_such_place():
    users = [path.name for path in (ROOT / "release").glob("*.py") if uses(path.read_text()) & (MAKERS)]
    assert users == ["release.py"]
