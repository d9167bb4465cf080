"""FedAvg by pfl, set to be fast: no evaluation behind the first round, no metrics, one network, tensors in memory.

pfl averages parameters and leaves the statistics of batch norm as the last client had them.
"""

from __future__ import annotations

import time
from pathlib import Path

import torch
from pfl.aggregate.simulate import SimulatedBackend
from pfl.aggregate.weighting import WeightByDatapoints
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.dataset import Dataset
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.sampling import get_user_sampler
from pfl.hyperparam import NNTrainHyperParams
from pfl.metrics import Metrics
from pfl.model.pytorch import PyTorchModel

from benchmarks.peers import Ran
from benchmarks.work import Work


class Clock(TrainingProcessCallback):
    """Takes the time behind each round."""

    def __init__(self) -> None:
        self.before = time.perf_counter()
        self.seconds: list[float] = []

    def after_central_iteration(self, aggregate_metrics, model, *, central_iteration):
        now = time.perf_counter()
        self.seconds.append(now - self.before)
        self.before = now
        return False, Metrics()


def train(path: Path) -> Ran:
    work = Work.load(path)
    network, knobs = work.new_network(), work.knobs
    # Called in the first round alone, for which pfl always evaluates.
    network.metrics = lambda *_: {}
    # Made once, since a dataset keeps its batches.
    clients = [Dataset((x, y), user_id=str(i)) for i, (x, y) in enumerate(work.clients())]
    sampler = get_user_sampler("minimize_reuse", range(len(clients)))
    data = FederatedDataset(clients.__getitem__, sampler)
    clock = Clock()
    FederatedAveraging().run(
        NNAlgorithmParams(
            central_num_iterations=knobs.rounds,
            evaluation_frequency=knobs.rounds,
            train_cohort_size=len(clients),
            val_cohort_size=0,
        ),
        SimulatedBackend(data, data, [WeightByDatapoints()]),
        PyTorchModel(network, torch.optim.SGD, torch.optim.SGD(network.parameters(), lr=1.0)),
        NNTrainHyperParams(
            local_num_epochs=knobs.epochs, local_learning_rate=knobs.lr, local_batch_size=knobs.batch_size
        ),
        callbacks=[clock],
        send_metrics_to_platform=False,
    )
    if torch.distributed.is_initialized():  # a process that ends first would abort the other
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()
    return Ran(clock.seconds, network.state_dict())
