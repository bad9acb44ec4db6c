"""How fast Motley is, beside other tools on the same work: ``python -m benchmarks``."""
