"""Clients with two classes each: personal models beat one model for all."""

from unalike import LocalSGD, Model, data, simulate, train
from unalike.learn.evaluation import evaluate
from unalike.methods.fedavg import FedAvg
from unalike.methods.local import Local
from unalike.networks.architectures import build

digits = data.load("digits", partition="pathological", clients=60, unseen=0.2, seed=0)
model = Model(build("mlp", digits.input_shape, 10))
sgd, longer = LocalSGD(epochs=2, batch=10, lr=0.05), LocalSGD(epochs=10, batch=10, lr=0.05)
results = {}
for name, method in {
    "FedAvg": FedAvg(model, cohort=10, local=sgd),
    "Local": Local(model, local=sgd),
    "FedAvg + fine-tuning": FedAvg(model, cohort=10, local=sgd, finetune=longer),
}.items():
    federation = simulate(digits, seed=0)  # the seen clients of the population
    state = train(method, federation, rounds=20)
    everybody = federation.runtime.roster
    results[name] = [
        evaluate(model, lambda cohort: method.personalize(state, cohort), federation, everybody.select(who)).mean  # noqa: B023  (called at once)
        for who in (digits.seen, digits.unseen)
    ]
    print(f"{name:22} seen {results[name][0]:.3f}   unseen {results[name][1]:.3f}")
