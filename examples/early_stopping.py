"""Choose an encoder, and when to stop, on validation rows of the training clients (Amosy et al., 2022, App. C).

Newcomers take no part in either choice: they are scored once, with the networks that were chosen.
"""

from dataclasses import replace

import unalike as ua

clients = ua.data.load("digits", partition="pathological", clients=30, validation=0.15, unseen=0.2, seed=0)
validated = replace(clients, test=clients.validation)
model = ua.Model.named("mlp", clients)
problem = ua.Problem(model, clients.input_shape, clients.classes, len(clients.seen))

found = []  # (score, encoder, round, method, state)
for encoder in ("deepset", "set-transformer"):
    method = ua.ODPFL(problem, encoder=encoder, cohort=0.3, local=ua.LocalSGD(steps=20, lr=0.05, momentum=0.9))
    federation, state = ua.simulate(clients, seed=0), method.start(0)
    while federation.round < 30:
        state = ua.train(method, federation, 5, state)
        score = ua.evaluate(method, state, validated).seen.mean
        found.append((score, encoder, federation.round, method, state))
        print(f"{encoder:16} round {federation.round:3}  {score:.3f} on validation rows")

best = max(found, key=lambda one: one[0])
result = ua.evaluate(best[3], best[4], clients)
print(f"{best[1]} after round {best[2]}:\n{result}")
