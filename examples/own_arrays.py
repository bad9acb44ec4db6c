"""Train on your own arrays: inputs, labels, and the client of every row."""

import numpy as np

from unalike import FedAvg, LocalSGD, Model, data, simulate, train

random = np.random.default_rng(0)
x = random.normal(size=(600, 5)).astype("float32")
shop = random.integers(0, 12, size=600)  # which client each row belongs to
y = (x[:, 0] + 0.5 * shop / 12 > 0).astype("int64")

population = data.from_arrays(x, y, shop, test=0.25, unseen=0.0, seed=0)
model = Model.named("mlp", population)
federation = simulate(population, seed=0)
state = train(FedAvg(model, cohort=6, local=LocalSGD(epochs=2, batch=16, lr=0.3)), federation, rounds=30)
print(
    f"loss {federation.metrics['loss']:.3f} after {federation.round} rounds, {federation.traffic.total_up:,} bytes up"
)
