"""CPU seconds of each round of Flower's simulation, with every process that it starts. Prints them as JSON.

    python federated_flower.py ROUNDS [channels_last]

In its favour: plain averaging without privacy, no evaluation, one actor that keeps data and model between messages,
one thread.
"""

import json
import os
import sys
from itertools import pairwise
from pathlib import Path

os.environ |= {"PYTHONPATH": str(Path(__file__).parent), "OMP_NUM_THREADS": "1"}
os.environ |= {"RAY_DISABLE_METRICS": "1", "RAY_USAGE_STATS_ENABLED": "0", "FLWR_TELEMETRY_ENABLED": "0"}

import logging

from federated_flower_client import client
from federated_task import COHORT, USERS, cpu_seconds_of_tree, network
from flwr.app import ArrayRecord, ConfigRecord, Context
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation

server = ServerApp()
times: list[float] = []


@server.main()
def main(grid: Grid, context: Context) -> None:
    strategy = FedAvg(
        fraction_train=COHORT / USERS, fraction_evaluate=0.0, min_train_nodes=COHORT, min_available_nodes=USERS
    )
    strategy.start(
        grid,
        ArrayRecord(network().state_dict()),
        num_rounds=int(sys.argv[1]),
        train_config=ConfigRecord({"channels-last": int(len(sys.argv) > 2)}),
        evaluate_fn=lambda number, arrays: times.append(cpu_seconds_of_tree()),
    )


if __name__ == "__main__":
    logging.disable(logging.WARNING)
    resources = {"client_resources": {"num_cpus": 1, "num_gpus": 0}, "init_args": {"num_cpus": 1}}
    run_simulation(server, client, USERS, backend_config=resources)
    print(json.dumps([after - before for before, after in pairwise(times)]))
