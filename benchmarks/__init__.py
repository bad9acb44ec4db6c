"""How fast Unalike is, beside other tools on the same work: ``python -m benchmarks``."""
