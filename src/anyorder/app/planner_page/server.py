"""The page on this machine alone, and the process that answers its three questions."""

import asyncio
import base64
import hashlib
import json
import re
import socket
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from importlib.metadata import version
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from anyorder import checks
from anyorder.app.planner_page import child
from anyorder.app.planner_page.answers import KINDS, ORDERS, Sweep
from anyorder.plan.options import default_delta

# ----------------------------------------------------------------------------------------------------
# The one document of the page: its parts put into each other, so that nothing is loaded from anywhere.


SCRIPTS = ("controls.js", "draw.js", "source.js", "main.js")

CHOICES: dict[str, list[Any]] = {
    "dataset_size": [100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 60000, 100000, 200000, 500000, 1000000,
                     2000000, 5000000, 10000000],
    "batch_size": [1, 2, 4, 8, 16, 32, 50, 64, 100, 128, 200, 256, 300, 400, 500, 512, 600, 800, 1000, 1024, 1500, 2000,
                   2048, 3000, 4096, 5000, 8192, 10000, 16384, 20000, 32768, 50000, 65536, 100000],
    "epochs": [1, 2, 3, 4, 5, 6, 8, 10, 12, 15, 20, 25, 30, 40, 50, 75, 100],
    "epsilon": [0.1, 0.2, 0.3, 0.5, 0.7, 1, 1.5, 2, 2.5, 3, 4, 5, 6, 7, 8, 9, 10, 12, 15, 20],
    "delta": [1e-4, 1e-5, 1e-6, 1e-7, 1e-8, 1e-9, 1e-10],
    "memory": [0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64, None],
    "momentum": [0, 0.5, 0.8, 0.9, 0.95, 0.99],
    "order": ["shuffled", "single", *(word for word in ORDERS if word not in ("shuffled", "sequential"))],
    "ratio": [1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5],
}  # fmt: skip
"""The stops of the sliders of the served page, whose number boxes take any value between; and the orders."""

START = {
    "dataset_size": 60000, "batch_size": 600, "epochs": 5, "epsilon": 2, "delta": default_delta(60000), "memory": None,
    "momentum": 0, "order": "shuffled", "mechanism": Sweep.mechanism, "ratio": 0.005,
}  # fmt: skip


def document(grid: dict[str, Any] | None) -> str:
    """The page. With a grid of answers (of `export`) it asks nobody; without, the server that it came from."""
    folder = files("anyorder.app.planner_page") / "static"
    scripts = "\n".join((folder / name).read_text(encoding="utf-8") for name in SCRIPTS)
    if grid is None:
        config = {"choices": CHOICES, "start": START, "grid": None, "version": version("anyorder")}
    else:
        config = {"choices": grid["choices"], "start": grid["start"], "grid": grid}
    text = json.dumps(config, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")  # stays in its element
    parts = {
        "{{style}}": (folder / "page.css").read_text(encoding="utf-8"), "{{config}}": text,
        "{{script}}": f'"use strict";\n(() => {{\n{scripts}\n}})();',
    }  # fmt: skip
    found = (folder / "page.html").read_text(encoding="utf-8")
    found = re.sub(r"{{(?:style|config|script)}}", lambda place: parts[place.group()], found)
    if grid is None:
        return found.replace("{{policy}}", "")
    meta = f'<meta http-equiv="Content-Security-Policy" content="{policy(found, connect=False)}">'
    return found.replace("{{policy}}", meta)


def policy(page: str, *, connect: bool) -> str:
    """What a browser lets the page do: run its own script, and ask where it came from, or nobody."""
    scripts = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)
    styles = re.findall(r"<style>(.*?)</style>", page, re.DOTALL)
    rules = [
        "default-src 'none'", f"script-src {' '.join(map(_digest, scripts))}",
        f"style-src {' '.join(map(_digest, styles))}", "img-src data:", "base-uri 'none'", "form-action 'none'",
    ]  # fmt: skip
    return "; ".join([*rules, "connect-src 'self'", "frame-ancestors 'none'"] if connect else rules)


def _digest(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


# ----------------------------------------------------------------------------------------------------
# Questions in a process of their own, so that the page stays quick, and a question that nobody waits for can be ended.
#
# The process reads a question a line and writes the pieces of its answer a line each, all in JSON. Between two pieces
# it stops if it was told to; where a single piece takes longer, the process is ended and the next question starts
# another.


_PATIENCE = 0.5  # seconds that a question has to stop before its process is ended
_LINE = 1 << 22  # bytes of a piece at most


@dataclass
class _Job:
    question: dict[str, Any]
    pieces: asyncio.Queue[dict[str, Any]] = field(default_factory=asyncio.Queue)
    stop: asyncio.Event = field(default_factory=asyncio.Event)
    superseded: bool = False


class Worker:
    """One process that answers one question at a time: the newest. An older one ends with a piece "superseded".

    Args:
        limit: seconds that a question may take; then its process is ended, and the answer says so.
    """

    def __init__(self, limit: float) -> None:
        self.limit = limit
        self._process: Process | None = None
        self._job: _Job | None = None
        self._task: asyncio.Task[None] | None = None

    async def ask(self, question: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        """The pieces of an answer, as they are found; leaving the iteration ends the work."""
        job = _Job(question)
        if self._job is not None:
            self._job.superseded = True
            self._job.stop.set()
        self._job = job
        self._task = asyncio.create_task(self._after(self._task, job))
        try:
            while True:
                piece = await job.pieces.get()
                yield piece
                if piece["kind"] in ("end", "error", "superseded"):
                    return
        finally:
            job.stop.set()

    async def close(self) -> None:
        """End the process and whoever waits for it."""
        if self._job is not None:
            self._job.stop.set()
        if self._task is not None:
            await self._task
        await self._end()

    async def _after(self, before: asyncio.Task[None] | None, job: _Job) -> None:
        """Run the job when the one before it has left the process."""
        if before is not None:
            await asyncio.wait([before])
        if not job.stop.is_set():
            await self._run(job)
        if job.superseded:
            await job.pieces.put({"kind": "superseded"})

    async def _run(self, job: _Job) -> None:
        stopped = asyncio.create_task(job.stop.wait())
        try:
            async with asyncio.timeout(self.limit):
                process = await self._started()
                assert process.stdin is not None
                process.stdin.write(json.dumps(job.question).encode() + b"\n")
                while True:
                    reading = asyncio.create_task(_piece(process))
                    await asyncio.wait([reading, stopped], return_when=asyncio.FIRST_COMPLETED)
                    if stopped.done():
                        await self._stop(process, reading)
                        return
                    piece = reading.result()
                    await job.pieces.put(piece)
                    if piece["kind"] in ("end", "error"):
                        return
        except TimeoutError:
            await self._end()
            text = f"this takes longer than the {self.limit:g} seconds that the page gives it; ask `anyorder plan`"
            await job.pieces.put({"kind": "error", "message": text, "field": None})
        except (EOFError, OSError, ValueError, RecursionError) as problem:
            # the process died, could not be started, or wrote what is no piece
            await self._end()
            text = (
                f"the process that computes was lost ({type(problem).__name__}); the terminal may say more, ask again"
            )
            await job.pieces.put({"kind": "error", "message": text, "field": None})
        finally:
            stopped.cancel()

    async def _stop(self, process: Process, reading: "asyncio.Task[dict[str, Any]]") -> None:
        """Leave the process ready for another question, or end it."""
        assert process.stdin is not None
        process.stdin.write(b"stop\n")
        try:
            async with asyncio.timeout(_PATIENCE):
                piece = await reading
                while piece["kind"] not in ("end", "error"):
                    piece = await _piece(process)
        except (TimeoutError, EOFError, ConnectionError, ValueError):
            await self._end()

    async def _started(self) -> Process:
        if self._process is None or self._process.returncode is not None:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable, "-P", "-m", child.__name__, stdin=PIPE, stdout=PIPE, limit=_LINE
            )
        return self._process

    async def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            if process.returncode is None:
                process.kill()
            await process.wait()


async def _piece(process: Process) -> dict[str, Any]:
    assert process.stdout is not None
    line = await process.stdout.readline()
    if not line:
        raise EOFError
    found: dict[str, Any] = json.loads(line)
    return found


# ----------------------------------------------------------------------------------------------------
# The page on this machine alone: one document, and three questions that it may ask.
#
# It listens on 127.0.0.1. A request must name that host (a name that another site points here is refused) and, where
# it asks something, be JSON from this page: no other site can send that. It reads no file but its own, and writes
# none.


if TYPE_CHECKING:
    from starlette.applications import Starlette


MAX_BODY = 16 << 10
"""Bytes of a question."""
HEADER_SECONDS = 5.0
"""Seconds in which a connection's next request must have begun and told all its headers: then it is closed."""
BODY_SECONDS = 5.0
"""Seconds in which a question must have come: slower ones would keep the page from others."""
LIMITS = {"plan": 900.0, "sampled": 120.0, "sweep": 900.0}
"""Seconds that a question may take, by its kind."""
_HOSTS = ("127.0.0.1", "localhost")


def refusal(method: str, headers: dict[str, str], port: int) -> tuple[int, str] | None:
    """(status, reason) of a request that is not from this page, by its headers in lower case; None for others."""
    hosts = [f"{name}:{port}" for name in _HOSTS] + (list(_HOSTS) if port == 80 else [])
    if headers.get("host", "") not in hosts:
        return 421, f"this page is at http://{hosts[0]}/ alone: the Host header names another place"
    if headers.get("origin") not in (None, *(f"http://{host}" for host in hosts)):
        return 403, "questions come from this page alone, not from another origin"
    if method == "POST" and headers.get("content-type", "").partition(";")[0].strip() != "application/json":
        return 415, "a question must be application/json"
    return None


def application(port: int) -> "Starlette":
    """The app for a port, with a process for each kind of question, started by the first of its kind."""
    checks.optional("starlette", extra="planner", purpose="the planner's page")
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import PlainTextResponse, Response, StreamingResponse
    from starlette.routing import Route

    workers = {kind: Worker(LIMITS[kind]) for kind in KINDS}
    page = document(None)
    headers = {
        "Content-Security-Policy": policy(page, connect=True), "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer", "Cache-Control": "no-store", "Cross-Origin-Resource-Policy": "same-origin",
        "Cross-Origin-Opener-Policy": "same-origin", "X-Frame-Options": "DENY",
    }  # fmt: skip

    def guarded(handler: Callable[[Any], Any]) -> Callable[[Any], Any]:
        async def checked(request: Request) -> Response:
            wrong = refusal(request.method, {k.lower(): v for k, v in request.headers.items()}, port)
            if wrong is not None:
                return PlainTextResponse(wrong[1] + "\n", wrong[0], headers=headers)
            found: Response = await handler(request)
            return found

        return checked

    async def index(request: Request) -> Response:
        return Response(page, media_type="text/html; charset=utf-8", headers=headers)

    async def ask(request: Request) -> Response:
        kind = request.path_params["kind"]
        body = b""
        try:
            async with asyncio.timeout(BODY_SECONDS):
                async for chunk in request.stream():
                    body += chunk
                    if len(body) > MAX_BODY:
                        return PlainTextResponse(f"a question has at most {MAX_BODY} bytes\n", 413, headers=headers)
        except TimeoutError:
            slow = {**headers, "Connection": "close"}
            return PlainTextResponse(f"a question must come in {BODY_SECONDS:g} seconds\n", 408, headers=slow)
        try:
            asked = json.loads(body)
        except (ValueError, RecursionError):
            return PlainTextResponse("a question must be JSON\n", 400, headers=headers)
        if kind not in workers:
            return PlainTextResponse(f"questions are {', '.join(KINDS)}\n", 404, headers=headers)
        lines = _lines(workers[kind].ask({"kind": kind, "asked": asked}))
        return StreamingResponse(lines, media_type="application/x-ndjson", headers=headers)

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        yield
        await asyncio.gather(*(worker.close() for worker in workers.values()))

    routes = [
        Route("/", guarded(index), methods=["GET"]),
        Route("/ask/{kind}", guarded(ask), methods=["POST"]),
    ]
    return Starlette(routes=routes, lifespan=lifespan)


async def _lines(pieces: AsyncIterator[dict[str, Any]]) -> AsyncIterator[bytes]:
    async for piece in pieces:
        yield json.dumps(piece, allow_nan=False).encode() + b"\n"


def patient(protocol: type[Any], idle: object) -> type[Any]:
    """A protocol of HTTP that closes connections whose headers do not come: each is one of few that there may be.

    Args:
        protocol: of uvicorn, by h11, whose connections wait for nobody's headers to end.
        idle: the state in which h11 waits for headers.
    """

    class Patient(protocol):  # type: ignore[misc]
        _waits: asyncio.TimerHandle | None = None

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self._watch()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            self._watch()

        def on_response_complete(self) -> None:
            super().on_response_complete()
            self._watch()

        def connection_lost(self, exc: Exception | None) -> None:
            self._forget()
            super().connection_lost(exc)

        def _watch(self) -> None:
            if self.conn.their_state is not idle:
                self._forget()
            elif self._waits is None:
                self._waits = self.loop.call_later(HEADER_SECONDS, self.transport.close)

        def _forget(self) -> None:
            if self._waits is not None:
                self._waits.cancel()
                self._waits = None

    return Patient


def serve(port: int = 0, started: Callable[[str], None] = print) -> None:
    """Serve the page on 127.0.0.1 until it is stopped (Ctrl-C).

    Args:
        port: 0 for any that is free.
        started: called with the page's address once it can be opened.
    Raises: MissingDependencyError without the extra `planner`; OSError where the port is taken.
    """
    checks.integer("port", port, low=0, high=65535)
    checks.optional("starlette", extra="planner", purpose="the planner's page")
    uvicorn, h11, by_h11 = (
        checks.optional(name, extra="planner", purpose="the planner's page")
        for name in ("uvicorn", "h11", "uvicorn.protocols.http.h11_impl")
    )
    with socket.create_server(("127.0.0.1", port)) as listening:
        own = listening.getsockname()[1]
        config = uvicorn.Config(
            application(own), log_level="warning", access_log=False, server_header=False, lifespan="on",
            timeout_graceful_shutdown=2, limit_concurrency=32, ws="none", http=patient(by_h11.H11Protocol, h11.IDLE),
        )  # fmt: skip
        started(f"http://127.0.0.1:{own}/")
        uvicorn.Server(config).run(sockets=[listening])
