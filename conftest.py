"""The code blocks of README and docs are tests; each page runs in a folder of its own.

Tests run one thread to a process (`pytest -n` brings the processes), and with a cache of fits of their own. What is
compiled of sources and tests is kept, whatever the shell says: else each process that a test starts, and each run,
compiles all of it again.
"""

import gc
import os
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before NumPy and torch are imported
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

import pytest
import torch
from sybil import Sybil
from sybil.parsers.markdown import SkipParser

from tutorial_blocks import finish, parse


def _flushed(descriptor: int) -> None:
    """In the place of fsync: what tests write need not outlive the machine, and a kill does not take it."""
    os.fstat(descriptor)


os.fsync = os.fdatasync = _flushed  # type: ignore[assignment]


def _forgotten(call: Any, **given: Any) -> None:
    """A seed for a device that is not there: torch keeps it with the whole stack in words, at each `manual_seed`."""


for _device in (torch.cuda, torch.xpu):
    if not _device.is_available():
        _device.random._lazy_call = _forgotten  # type: ignore[attr-defined]
sys.dont_write_bytecode = False
gc.disable()  # till tests are collected: passes over what is imported and never goes are a quarter of that time
_cache = tempfile.TemporaryDirectory()
os.environ["ANYORDER_CACHE"] = _cache.name


def _setup(namespace: dict[str, Any]) -> None:
    namespace["_before"], namespace["_folder"] = Path.cwd(), tempfile.TemporaryDirectory()
    os.chdir(namespace["_folder"].name)


def _teardown(namespace: dict[str, Any]) -> None:
    os.chdir(namespace["_before"])
    namespace["_folder"].cleanup()
    finish(namespace)


_pages = Sybil(
    parsers=[parse, SkipParser()],
    patterns=["README.md", "docs/*.md"],
    setup=_setup,
    teardown=_teardown,
)
pytest_collect_file = _pages.pytest()


@pytest.fixture
def stopped_by_load(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests that kill a child before each of its calls. A loaded machine may stop the child between the clock and
    the write of a record, which it then writes once more; killed before that, it leaves a journal that is in doubt.
    """
    monkeypatch.setattr("anyorder.release.journal._SAME_TIME", 10**9)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With several processes a file stays in one: a page's blocks build on each other."""
    from xdist.scheduler import LoadFileScheduling

    config.option.loadscopereorder = False  # see `pytest_collection_modifyitems`
    return LoadFileScheduling(config, log)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Of several processes none is left alone with a long file: slow ones are begun first, those of few tests last."""
    if hasattr(config, "workerinput"):
        tests = Counter(item.path for item in items)
        slow = {item.path for item in items if item.get_closest_marker("slow")}
        items.sort(key=lambda item: (item.path not in slow, -tests[item.path]))


def pytest_collection_finish() -> None:
    """What was imported and collected lives to the end: no search for cycles need go through it.

    Clipping searches whenever a model kept a tensor, and so do tests; a pass over twenty thousand tests takes a second.
    """
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Nor through what the files before have imported and kept. What other tests wrote of a batch is forgotten."""
    if (coupling := sys.modules.get("anyorder.clipping.coupling")) is not None:
        coupling.LossWatch.escaped, coupling.LossWatch.aliased = "", 0
    if nextitem is not None and nextitem.path != item.path:
        gc.collect()
        gc.freeze()
