"""Do simulated clients predict how well FedAvg does on the true ones? §3.4.2 of Scott, 2026, scaled down to CIFAR-10.

    UNALIKE_DATA=... python examples/mdm_sweep.py

The true clients follow Table A.1's high-2, as in Figure 3.6 (150 clients × 100 samples). MDM is fitted on their label
histograms by sums alone; the server then simulates clients from its own pictures (MDM, fully IID, and the oracle:
conditionally IID), and FedAvg is trained on each kind with every setting of epochs and learning rate. Scaled: pictures
of 8×8 pixels, a small perceptron, 60 rounds of 10 clients. Accuracy is on the 10,000 test pictures, averaged over the
last 10 rounds.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

from unalike import (
    MDM,
    Clients,
    FedAvg,
    LocalSGD,
    Model,
    State,
    data,
    histogram_clients,
    known_mixture,
    simulate,
    train,
)

CLIENTS, ROUNDS, LAST = 150, 60, 10
EPOCHS, RATES = (1, 4), (0.02, 0.1, 0.3)


def pictures() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Training and test pictures as 8×8 colour features, standardised, and their labels."""
    everything = data.load("cifar-10", partition="iid", clients=1, test="source", unseen=0.0).train
    assert everything.y is not None
    small = torch.nn.functional.avg_pool2d(everything.x.float() / 255, 4).flatten(1)
    count = int(everything.size[0])
    mean, deviation = small[:count].mean(0), small[:count].std(0)
    small = (small - mean) / deviation
    return small[:count], everything.y[:count], small[count:], everything.y[count:]


def accuracy(clients: Clients, method: FedAvg, test_x: Tensor, test_y: Tensor) -> float:
    scores: list[float] = []

    def watch(number: int, state: State) -> None:
        if number > ROUNDS - LAST:
            scores.append(float((method.model(state.theta, test_x).argmax(1) == test_y).float().mean()))

    train(method, simulate(clients, seed=0, block=10, threads=1), ROUNDS, after_round=watch)
    return sum(scores) / len(scores)


def main() -> dict[str, float]:
    x, y, test_x, test_y = pictures()
    labels = y.numpy()

    def clients_of(parts: list[np.ndarray]) -> Clients:
        rows = torch.from_numpy(np.concatenate(parts))
        return Clients.from_sizes(x[rows], y[rows], torch.tensor([len(part) for part in parts]))

    rng = np.random.default_rng(0)
    true = data.mdm_partition(labels, CLIENTS, rng, known_mixture("high-2"))
    counts = np.stack([np.bincount(labels[part], minlength=10) for part in true])
    fitted = MDM(10, 100, components=2, cohort=CLIENTS).fit(simulate(histogram_clients(counts))).mixture
    kinds = {
        "true": clients_of(true),
        "MDM": clients_of(data.mdm_partition(labels, CLIENTS, rng, fitted)),
        "fully IID": clients_of(data.iid_partition(labels, CLIENTS, rng, fitted)),
        "conditionally IID": clients_of(data.conditional_partition(labels, counts, rng)),
    }
    model = Model(nn.Sequential(nn.Linear(192, 64), nn.ReLU(), nn.Linear(64, 10)))
    gaps: dict[str, list[float]] = {kind: [] for kind in kinds if kind != "true"}
    print("epochs  rate  " + "  ".join(kinds))
    for epochs in EPOCHS:
        for rate in RATES:
            method = FedAvg(model, cohort=10, local=LocalSGD(epochs=epochs, batch=20, lr=rate))
            scores = {kind: accuracy(clients, method, test_x, test_y) for kind, clients in kinds.items()}
            for kind, values in gaps.items():
                values.append(abs(scores[kind] - scores["true"]))
            row = "  ".join(f"{score:{len(kind)}.3f}" for kind, score in scores.items())
            print(f"{epochs:6}  {rate:4}  {row}", flush=True)
    means = {kind: sum(values) / len(values) for kind, values in gaps.items()}
    for kind, value in means.items():
        print(f"mean absolute difference from the true clients, {kind}: {value:.4f}")
    return means


if __name__ == "__main__":
    main()
