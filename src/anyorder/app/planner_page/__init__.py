"""The planner as a page: mechanisms side by side at a budget, and whole sweeps, with the command that makes the plan.

`answer` gives the numbers, by the functions of `ao.plan`; `anyorder planner` shows them on this machine alone, or
writes a page that needs no server.
"""

from anyorder.app.planner_page.answers import PlanQuestion, answer

__all__ = ["PlanQuestion", "answer"]
