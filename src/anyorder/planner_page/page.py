"""The one document of the page: its parts put into each other, so that nothing is loaded from anywhere."""

import base64
import hashlib
import json
import re
from importlib.metadata import version
from importlib.resources import files
from typing import Any

__all__ = ["CHOICES", "document", "policy"]

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
    "order": ["shuffled", "single", "fixed", "poisson", "balls-in-bins", "random-allocation", "cyclic-poisson",
              "truncated-poisson"],
    "ratio": [1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5],
}  # fmt: skip
"""The stops of the sliders of the served page, whose number boxes take any value between; and the orders."""

START = {
    "dataset_size": 60000, "batch_size": 600, "epochs": 5, "epsilon": 2, "delta": 1e-5, "memory": None, "momentum": 0,
    "order": "shuffled", "mechanism": "blt", "ratio": 0.005,
}  # fmt: skip


def document(grid: dict[str, Any] | None) -> str:
    """The page. With a grid of answers (of `export`) it asks nobody; without, the server that it came from."""
    folder = files("anyorder.planner_page") / "static"
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
