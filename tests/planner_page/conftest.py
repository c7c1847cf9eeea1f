"""A served page for a file's tests, and the browser, where there is one."""

import contextlib
import re
import subprocess
import sys
from collections.abc import Iterator

import pytest

from browser import chromium


@contextlib.contextmanager
def served(*program: str) -> Iterator[str]:
    """The address that `python program` prints; it serves there until the end."""
    process = subprocess.Popen([sys.executable, *program], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        found = re.search(r"http://127\.0\.0\.1:\d+/", process.stdout.readline())
        assert found is not None
        yield found.group()
    finally:
        process.terminate()
        process.communicate(timeout=30)


@pytest.fixture(scope="session")
def address() -> Iterator[str]:
    """Of `anyorder planner`, on a free port."""
    with served("-m", "anyorder", "planner", "--port", "0") as where:
        yield where


HURRIED = """
from anyorder.app.planner_page import server

server.BODY_SECONDS = server.HEADER_SECONDS = 0.5
server.serve(0, lambda address: print(address, flush=True))
"""


@pytest.fixture(scope="session")
def hurried() -> Iterator[str]:
    """Of a page that waits for nobody longer than half a second."""
    with served("-c", HURRIED) as where:
        yield where


@pytest.fixture(scope="module")  # no longer: while one is open, no other module of this process can open its own
def browser():
    with chromium() as opened:
        yield opened


@pytest.fixture
def page(browser):
    """A page of 1280 pixels in a context of its own. At the end nothing may have been complained about."""
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    found = context.new_page()
    problems, asked = [], []
    found.on("console", lambda message: problems.append(message.text) if message.type in ("error", "warning") else None)
    found.on("pageerror", lambda problem: problems.append(str(problem)))
    found.on("request", lambda request: asked.append(request.url))
    found.asked = asked
    yield found
    context.close()
    assert not problems
