"""FedDP-KMeans: private federated clustering, its baselines and its study."""
