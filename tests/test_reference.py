"""The reference is complete: a public name without a docstring, or that no page shows, fails here.

Public is what `__all__` of `anyorder` and of its rooms names; of the files inside a room, of those that a page shows.
That the built pages have each is tested where the site is built, in tests/site.
"""

import importlib.util
import inspect
import pkgutil
import re
from pathlib import Path

import anyorder

ROOT = Path(__file__).parents[1]
PAGES = ROOT / "docs" / "api"
INTERNAL = {
    "durable",
    "checks",
    "formats",
    "formatting",
    "roots",
}  # these have no names for users

# Each is a front end of another package, which may be missing where this is not run by .ci/run.
NEEDS = {"anyorder.federated.flower": "flwr", "anyorder.federated.nvflare": "nvflare"}
SHOWN = [
    name for page in sorted(PAGES.glob("*.md")) for name in re.findall(r"^::: (\S+)$", page.read_text(), re.M)
    if name not in NEEDS or importlib.util.find_spec(NEEDS[name])
]  # fmt: skip
ROOMS = [
    f"anyorder.{m.name}" for m in pkgutil.iter_modules(anyorder.__path__) if m.name[0] != "_" and m.name not in INTERNAL
]


def public():
    """(module, name) of all public names."""
    for place in dict.fromkeys([*ROOMS, *SHOWN]):
        name, _, last = place.rpartition(".")
        if place in ROOMS or not hasattr(importlib.import_module(name), last):  # else one object, not a module
            yield from ((place, name) for name in getattr(importlib.import_module(place), "__all__", ()))


PUBLIC = list(public())
OF_THE_PACKAGE = [
    (value.__module__, name)
    for name in anyorder.__all__
    if inspect.isclass(value := getattr(anyorder, name)) or inspect.isfunction(value)
]


def test_every_room_has_a_page_and_every_page_is_in_the_contents():
    offering = {room for room in ROOMS if hasattr(importlib.import_module(room), "__all__")}
    assert offering <= set(SHOWN)  # others are reached by names of the package, which is tested below
    contents = (ROOT / "mkdocs.yml").read_text()
    pages = {str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md")}
    assert not {page for page in pages if not re.search(rf"[ :]{re.escape(page)}$", contents, re.MULTILINE)}


def test_every_public_name_has_a_docstring():
    lacking = {}
    for module, name in [*PUBLIC, *OF_THE_PACKAGE]:
        value = getattr(importlib.import_module(module), name)
        if inspect.isclass(value) or inspect.isfunction(value):  # of others the built page shows those with a docstring
            lacking[f"{module}.{name}"] = _without_docstring(name, value)
    assert {name: what for name, what in lacking.items() if what} == {}


def _without_docstring(name, value):
    """What lacks one: the thing itself (that which dataclasses make is none), and its methods."""
    text = inspect.getdoc(value) or ""
    lacking = [] if text and not text.startswith(f"{name}(") else [name]
    if not inspect.isclass(value):
        return lacking
    methods = {
        key: method
        for key, method in inspect.getmembers(value)
        if not key.startswith("_") and (callable(method) or isinstance(method, property))
    }
    return lacking + [key for key, method in methods.items() if _is_ours(value, key) and not inspect.getdoc(method)]


def _is_ours(kind, attribute):
    owner = next(base for base in kind.__mro__ if attribute in vars(base))
    return owner.__module__.startswith("anyorder")


def test_every_name_of_the_package_is_in_the_table():
    table = (PAGES / "index.md").read_text()
    assert not [name for name in anyorder.__all__ if f"`ao.{name}`" not in table]
