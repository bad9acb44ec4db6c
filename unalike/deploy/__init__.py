"""Runs and analyses on the workers of a cluster: what a worker puts together, and what the driver knows of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from unalike.deploy.session import Session
    from unalike.deploy.sites import Sites
    from unalike.runs.recipe.recipe import Runtime


def open_session(how: Runtime) -> Session | Sites:
    """Where the clients of a command's runs are, if they are not in this process: on workers, or at sites."""
    # here, because both import all analytics, which a run in this process never needs
    from unalike.deploy.session import Session
    from unalike.deploy.sites import Sites

    return Sites(how) if how.name == "network" else Session(how)
