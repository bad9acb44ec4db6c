"""Learning: the one training loop of a client, with or without DP-SGD, and what methods share at the server.

That is optimizers, Anderson acceleration, schedules, scaling of inputs and evaluation.
"""
