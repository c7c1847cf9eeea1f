"""The planner as a page: mechanisms side by side at a budget, and whole sweeps, with the command that makes the plan.

`answer`, `sampled` and `cells` give the numbers, by the functions of `ao.plan`; `serve` shows them on this machine
alone, and `export` writes a page that needs no server.
"""

from anyorder.planner_page.answers import answer, sampled
from anyorder.planner_page.exporting import Grid, export
from anyorder.planner_page.server import serve
from anyorder.planner_page.settings import Settings, Sweep
from anyorder.planner_page.sweep import cells

__all__ = ["Grid", "Settings", "Sweep", "answer", "cells", "export", "sampled", "serve"]
