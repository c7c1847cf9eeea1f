"""The page on this machine alone: one document, and three questions that it may ask.

It listens on 127.0.0.1. A request must name that host (a name that another site points here is refused) and, where it
asks something, be JSON from this page: no other site can send that. It reads no file but its own, and writes none.
"""

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from anyorder import checks
from anyorder.planner_page.page import document, policy
from anyorder.planner_page.questions import KINDS
from anyorder.planner_page.worker import Worker

if TYPE_CHECKING:
    from starlette.applications import Starlette

__all__ = ["MAX_BODY", "application", "refusal", "serve"]

MAX_BODY = 16 << 10
"""Bytes of a question."""
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


def serve(port: int = 0, started: Callable[[str], None] = print) -> None:
    """Serve the page on 127.0.0.1 until it is stopped (Ctrl-C).

    Args:
        port: 0 for any that is free.
        started: called with the page's address once it can be opened.
    Raises: MissingDependencyError without the extra `planner`; OSError where the port is taken.
    """
    checks.integer("port", port, low=0, high=65535)
    checks.optional("starlette", extra="planner", purpose="the planner's page")
    uvicorn = checks.optional("uvicorn", extra="planner", purpose="the planner's page")
    with socket.create_server(("127.0.0.1", port)) as listening:
        own = listening.getsockname()[1]
        config = uvicorn.Config(
            application(own), log_level="warning", access_log=False, server_header=False, lifespan="on",
            timeout_graceful_shutdown=2, limit_concurrency=32, ws="none",
        )  # fmt: skip
        started(f"http://127.0.0.1:{own}/")
        uvicorn.Server(config).run(sockets=[listening])
