"""A job of NVFlare's clients as a loop for the isolation harness: their data in, what may be shown out.

Shown are the model, the files that are handed out, and who was asked. What travels to the server is the server's alone.
"""

from functools import partial

import torch
from nvflare.apis.dxo import DXO, DataKind, from_shareable
from torch import nn

from anyorder.audit.faults import patched
from anyorder.federated import Server, nvflare
from nvflare_jobs.in_process import Job, Site


def trained(examples, task):
    """An executor that trains on this client's examples, and returns much besides: (x, y), or fails on them."""
    x, y = examples
    before = from_shareable(task).data
    with torch.random.fork_rng():  # a client has generators of its own
        local = nn.Linear(x.shape[1], 1)
    local.load_state_dict({name: torch.as_tensor(value) for name, value in before.items()})
    loss = ((local(x)[:, 0] - y) ** 2).mean()
    loss.backward()
    after = {name: p.detach() - p.grad for name, p in local.named_parameters()}
    return DXO(DataKind.WEIGHTS, after, {"NUM_STEPS_CURRENT_ROUND": len(y), "loss": float(loss)}).to_shareable()


def federation(plan, users):
    """The loop: rows are the examples (x, y) of each of `users`, in their order."""

    def train(rows, folder):
        net = nn.Linear(3, 1)
        server = Server(plan, net, torch.optim.SGD(net.parameters(), lr=0.5))
        sites = [Site(user, partial(trained, examples)) for user, examples in zip(users, rows, strict=True)]
        with patched(nvflare._log, "disabled", True):
            job = Job(folder, *sites).run(server)
        return [net, torch.load(job.folder / "model.pt"), job.asked]

    return train
