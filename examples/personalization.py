"""Clients with two classes each: personal models beat one model for all."""

import unalike as ua

digits = ua.data.load("digits", partition="pathological", clients=60, unseen=0.2, seed=0)
model = ua.Model.named("mlp", digits)
sgd, longer = ua.LocalSGD(epochs=2, batch=10, lr=0.05), ua.LocalSGD(epochs=10, batch=10, lr=0.05)
results = {}
for name, method in {
    "FedAvg": ua.FedAvg(model, cohort=10, local=sgd),
    "Local": ua.Local(model, local=sgd),
    "FedAvg + fine-tuning": ua.FedAvg(model, cohort=10, local=sgd, finetune=longer),
}.items():
    federation = ua.simulate(digits, seed=0)  # the seen clients of the population
    state = ua.train(method, federation, rounds=20)
    results[name] = ua.evaluate(method, state, digits, federation=federation)
    print(f"{name}\n{results[name]}\n")
