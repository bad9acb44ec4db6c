"""What models are made of: classifiers by name, and the networks that describe clients and generate models."""
