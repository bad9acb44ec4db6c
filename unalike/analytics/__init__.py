"""Federated analytics: private clustering, models of how clients differ, per-client estimates."""
