"""`python -m anyorder.app.planner_page.child`: answers the questions on stdin, a line each; see `worker`."""

import json
import os
import sys
import threading
import traceback
from collections.abc import Iterator
from queue import Queue
from typing import IO, Any

from anyorder.app.planner_page.answers import Piece, pieces

__all__ = ["main"]


def main() -> None:
    """Until stdin ends. A line "stop" ends the answer in hand after its next piece."""
    out = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    sys.stdout = sys.stderr  # whatever else prints
    lines: Queue[str | None] = Queue()
    threading.Thread(target=_read, args=(lines,), daemon=True).start()
    while (line := lines.get()) is not None:
        if line != "stop":  # one that came after the answer's end
            _answer(line, lines, out)


def _read(lines: "Queue[str | None]") -> None:
    for line in sys.stdin:
        lines.put(line.strip())
    lines.put(None)
    if threading.main_thread().is_alive():
        os._exit(0)  # the page is gone: nobody waits for what is being computed


def _answer(line: str, lines: "Queue[str | None]", out: IO[str]) -> None:
    question = json.loads(line)
    for piece in _guarded(question["kind"], question["asked"]):
        last = piece["kind"] in ("end", "error")
        if not last and not lines.empty():
            piece = {"kind": "end"}
            last = True
        out.write(json.dumps(piece, allow_nan=False) + "\n")
        out.flush()
        if last:
            return


def _guarded(kind: str, asked: Any) -> Iterator[Piece]:
    """The pieces; a fault of ours is told on the page, and in full on the terminal."""
    try:
        yield from pieces(kind, asked)
    except Exception as problem:
        traceback.print_exc()
        text = f"the computation failed ({type(problem).__name__}); the terminal says more"
        yield {"kind": "error", "message": text, "field": None}


if __name__ == "__main__":
    main()
