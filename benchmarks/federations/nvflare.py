"""The job of `examples/nvflare` in NVFlare's simulator, beside the same rounds without NVFlare.

`python -m benchmarks.federated --only nvflare`, in an environment of its own. Rows: "difference" is the largest between
the two models' parameters, 0 or rounding of float32; "CPU s" is what all processes of the job took.
"""

import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import anyorder as ao
from anyorder.release.checkpoint import load
from benchmarks._peers import NVFLARE, interpreter
from benchmarks._report import Row

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "nvflare"


def rows(quick: bool) -> Iterator[Row]:
    """Run the job, check its certificate, and make its rounds again by hand."""
    del quick
    sys.path.insert(0, str(EXAMPLE))
    import training

    python = interpreter(*NVFLARE, module="nvflare")
    with tempfile.TemporaryDirectory() as folder:
        secret = {"ANYORDER_SECRET_FOLDER": folder, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
        before = _cpu_seconds()
        subprocess.run(
            [python, "job.py", f"{folder}/workspace"], cwd=EXAMPLE, env=os.environ | secret, check=True,
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        took = _cpu_seconds() - before
        results = Path(folder, "workspace", "server", "simulate_job")
        ao.verify(results / "run.privacy.json")
        shown, state = torch.load(results / "model.pt"), load(Path(folder, "run.checkpoint"))
    model = training.network()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    server = ao.federated.Server(training.plan_of_the_run(), model, optimizer, key=state["key"])
    while server.step < server.plan.n:
        first = 1 + training.COHORT * server.step % 4
        server.round(
            {f"site-{i}": _change(training, model, f"site-{i}") for i in range(first, first + training.COHORT)}
        )
    apart = max(float((shown[name] - p.detach()).abs().max()) for name, p in model.named_parameters())
    yield Row("the model of the job, beside that of the same rounds by hand", apart, 0.0, None, "difference")
    yield Row("4 clients, 8 rounds, NVFlare's simulator", took, None, None, "CPU s")


def _change(training: Any, model: nn.Module, client: str) -> dict[str, Tensor]:
    local = training.network()
    local.load_state_dict(model.state_dict())
    training.train(local, client)
    before = dict(model.named_parameters())
    return {name: p.detach() - before[name].detach() for name, p in local.named_parameters()}


def _cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
