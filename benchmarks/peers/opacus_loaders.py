"""What Opacus prints for three epochs of an ordinary loader. Runs in an environment of its own; prints JSON.

q = 0.05, noise multiplier 1, delta 1e-5, with a sequential and a shuffled DataLoader and poisson_sampling=False.
"""

import json
import warnings

import opacus
import torch
from torch.utils.data import DataLoader, TensorDataset


def printed_epsilon(shuffle: bool, accountant: str) -> dict[str, object]:
    """The epsilon after three epochs, and the warnings on the way."""
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(2000, 10), torch.randint(0, 2, (2000,)))
    model = torch.nn.Linear(10, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        engine = opacus.PrivacyEngine(accountant=accountant)
        model, optimizer, loader = engine.make_private(
            module=model, optimizer=optimizer, data_loader=DataLoader(data, batch_size=100, shuffle=shuffle),
            noise_multiplier=1.0, max_grad_norm=1.0, poisson_sampling=False,
        )  # fmt: skip
        for _ in range(3):
            for x, y in loader:
                optimizer.zero_grad()
                torch.nn.functional.cross_entropy(model(x), y).backward()
                optimizer.step()
        epsilon = engine.get_epsilon(1e-5)
    said = sorted({str(w.message).splitlines()[0] for w in caught if "opacus" in w.filename})
    return {"epsilon": epsilon, "warnings": said}


if __name__ == "__main__":
    found = {
        f"{order} loader, {accountant} accountant": printed_epsilon(order == "shuffled", accountant)
        for order in ("sequential", "shuffled")
        for accountant in ("prv", "rdp")
    }
    print(json.dumps({"version": opacus.__version__, "runs": found}))
