"""The core: models, clients, tasks, releases and the federation that asks. It knows no runtime and no method."""
