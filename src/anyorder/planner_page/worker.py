"""Questions in a process of their own, so that the page stays quick, and a question that nobody waits for can be ended.

The process reads a question a line and writes the pieces of its answer a line each, all in JSON. Between two pieces it
stops if it was told to; where a single piece takes longer, the process is ended and the next question starts another.
"""

import asyncio
import json
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Worker"]

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
                sys.executable, "-P", "-m", "anyorder.planner_page.child", stdin=PIPE, stdout=PIPE, limit=_LINE
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
