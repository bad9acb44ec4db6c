"""Training at a client (one inner loop), optimizers at the server, schedules, evaluation and architectures."""
