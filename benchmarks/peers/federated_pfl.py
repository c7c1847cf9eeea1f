"""CPU seconds of each round of pfl-research. Prints them as JSON; the first rounds are for warming up.

    python federated_pfl.py gaussian|banded ROUNDS WORKING_FOLDER [channels_last]

In its favour: no evaluation after the first round, no metrics of users, no checkpoints, one thread, and the data are
tensors already, in memory.
"""

import json
import os
import sys
from itertools import pairwise

import torch
from federated_task import BATCH, CLIP, COHORT, LR, NOISE, USERS, cpu_seconds, data, network
from pfl.aggregate.simulate import SimulatedBackend
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.dataset import Dataset
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.sampling import get_user_sampler
from pfl.hyperparam import NNEvalHyperParams, NNTrainHyperParams
from pfl.metrics import Metrics, Weighted
from pfl.model.pytorch import PyTorchModel
from pfl.privacy.ftrl_mechanism import BandedMatrixFactorizationMechanism
from pfl.privacy.gaussian_mechanism import GaussianMechanism
from pfl.privacy.privacy_accountant import PLDPrivacyAccountant
from pfl.privacy.privacy_mechanism import CentrallyAppliedPrivacyMechanism


class Client(torch.nn.Module):
    """The network with the two methods that pfl calls."""

    def __init__(self, channels_last: bool) -> None:
        super().__init__()
        self.network = network(channels_last)

    def loss(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(self.network(x), y)

    def metrics(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, Weighted]:
        return {"examples": Weighted(float(len(x)), len(x))}


class Clock(TrainingProcessCallback):
    """What the processor had done after each round."""

    def __init__(self) -> None:
        self.times = []

    def after_central_iteration(
        self, aggregate_metrics: Metrics, model: PyTorchModel, *, central_iteration: int
    ) -> tuple[bool, Metrics]:
        self.times.append(cpu_seconds())
        return False, Metrics()


def mechanism(kind: str, rounds: int) -> GaussianMechanism:
    if kind == "gaussian":
        return GaussianMechanism(CLIP, NOISE)

    def accountant(compositions: int) -> PLDPrivacyAccountant:
        return PLDPrivacyAccountant(
            num_compositions=compositions, sampling_probability=1.0, mechanism="gaussian",
            epsilon=8.0, delta=1e-6, noise_scale=1.0,
        )  # fmt: skip

    return BandedMatrixFactorizationMechanism(CLIP, max(rounds, 20), 10, accountant)


def main() -> None:
    kind, rounds, folder, channels_last = sys.argv[1], int(sys.argv[2]), sys.argv[3], len(sys.argv) > 4
    os.chdir(folder)
    torch.set_num_threads(1)
    x, y = data(channels_last)
    users = FederatedDataset(
        lambda user: Dataset((x[user], y[user]), user_id=str(user)), get_user_sampler("random", list(range(USERS)))
    )
    client = Client(channels_last)
    model = PyTorchModel(client, torch.optim.SGD, torch.optim.SGD(client.parameters(), lr=1.0))
    clock = Clock()
    FederatedAveraging().run(
        NNAlgorithmParams(
            central_num_iterations=rounds, evaluation_frequency=10**9, train_cohort_size=COHORT, val_cohort_size=0
        ),
        SimulatedBackend(users, users, [CentrallyAppliedPrivacyMechanism(mechanism(kind, rounds))]),
        model,
        NNTrainHyperParams(local_num_epochs=1, local_learning_rate=LR, local_batch_size=BATCH),
        NNEvalHyperParams(local_batch_size=None),
        [clock],
        send_metrics_to_platform=False,
    )
    print(json.dumps([after - before for before, after in pairwise(clock.times)]))


if __name__ == "__main__":
    main()
