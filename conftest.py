"""The code blocks of README and docs are tests; each page runs in a folder of its own."""

import os
import tempfile
from pathlib import Path
from typing import Any

from sybil import Sybil
from sybil.parsers.markdown import PythonCodeBlockParser, SkipParser


def _setup(namespace: dict[str, Any]) -> None:
    namespace["_before"], namespace["_folder"] = Path.cwd(), tempfile.TemporaryDirectory()
    os.chdir(namespace["_folder"].name)


def _teardown(namespace: dict[str, Any]) -> None:
    os.chdir(namespace["_before"])
    namespace["_folder"].cleanup()


pytest_collect_file = Sybil(
    parsers=[PythonCodeBlockParser(), SkipParser()],
    patterns=["README.md", "docs/*.md"],
    setup=_setup,
    teardown=_teardown,
).pytest()
