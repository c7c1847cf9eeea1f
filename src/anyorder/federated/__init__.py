"""Users and owners: each sends one message, which is clipped as a whole, and what is released protects the sender.

One set of server objects, on the release core, for simulation and for deployment.
"""

from anyorder.federated.clients import LocalTraining
from anyorder.federated.messages import Layout, clip_message
from anyorder.federated.planning import ReportGoal, at_same_error, epsilon_by_report_goal
from anyorder.federated.rounds import Round
from anyorder.federated.server import Server

__all__ = [
    "Layout", "LocalTraining", "ReportGoal", "Round", "Server", "at_same_error", "clip_message",
    "epsilon_by_report_goal",
]  # fmt: skip
