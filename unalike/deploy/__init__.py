"""Runs and analyses on the workers of a cluster: what a worker puts together, and what the driver knows of it."""
