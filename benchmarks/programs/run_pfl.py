"""pfl-research's FedAvg on its own simulator; its evaluation of users is left out."""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.nn.functional as F
from common import Pace, network, read
from pfl.aggregate.simulate import SimulatedBackend
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.dataset import Dataset
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.sampling import get_user_sampler
from pfl.hyperparam import NNTrainHyperParams
from pfl.metrics import Metrics
from pfl.model.pytorch import PyTorchModel
from torch import Tensor, nn


class Module(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def loss(self, x: Tensor, y: Tensor, eval: bool = False) -> Tensor:
        return F.cross_entropy(self.inner(x), y)

    def metrics(self, x: Tensor, y: Tensor, eval: bool = True) -> dict[str, Any]:
        return {}


class AfterRound(TrainingProcessCallback):
    def __init__(self) -> None:
        self.pace = Pace()

    def after_central_iteration(self, *_: Any, **__: Any) -> tuple[bool, Metrics]:
        return not self.pace.round_done(), Metrics()


class WithoutEvaluation(FederatedAveraging):
    """The first round would evaluate every user before and after training; no other program here does."""

    def get_next_central_contexts(self, model: Any, iteration: int, *arguments: Any) -> Any:
        return super().get_next_central_contexts(model, iteration + 1, *arguments)


def main(folder: str) -> None:
    work = read(folder)
    sampler = get_user_sampler("random", list(range(work.clients)))
    data = FederatedDataset(lambda user: Dataset(list(work.client(user)), user_id=user), sampler)
    module = Module(network(work))
    model = PyTorchModel(
        module, local_optimizer_create=torch.optim.SGD, central_optimizer=torch.optim.SGD(module.parameters(), lr=1.0)
    )
    many = 1_000_000
    WithoutEvaluation().run(
        NNAlgorithmParams(
            central_num_iterations=many, evaluation_frequency=many, train_cohort_size=work.cohort, val_cohort_size=None
        ),
        SimulatedBackend(training_data=data, val_data=None),
        model,
        NNTrainHyperParams(local_batch_size=work.batch, local_num_epochs=1, local_learning_rate=work.lr),
        callbacks=[AfterRound()],
        send_metrics_to_platform=False,
    )


if __name__ == "__main__":
    main(sys.argv[1])
