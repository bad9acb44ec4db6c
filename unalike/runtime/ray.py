"""Workers on a Ray cluster: each is an actor of Ray, which starts it again where it dies.

What all clients of a request share is put into Ray's object store once, and every worker reads it once.

Ray runs any code that whoever reaches its ports sends, and listens on every interface: see docs/scale.md on how to keep
a cluster to itself. Only this module imports ray.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # before ray is imported: no usage is reported
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # its own warning asks for this

os.environ.setdefault("RAY_worker_niceness", "0")  # else workers wait for whatever else the machine has to do

import ray
from ray.exceptions import ActorDiedError, RayError

from unalike.runtime.shard.host import Host
from unalike.runtime.workers import Unreachable, WorkerError, Workers

INLINE = 1 << 16  # bytes: what is smaller travels with the call, which Ray does up to 100 kB


class Cluster:
    """The engine of a Ray cluster; see ``start_workers`` for the arguments."""

    def __init__(self, count: int | None, address: str | None, sites: Sequence[str], options: dict[str, Any]) -> None:
        cores = os.cpu_count() or 1
        own = {} if address else {"num_cpus": max(count or cores, 1)}
        try:
            ray.init(
                address=address or "local",
                include_dashboard=None if address else False,
                namespace="unalike",
                log_to_driver=False,
                logging_level="error",
                **own,
            )
        except Exception as error:  # Ray raises plain ones, too, where it does not come up in time
            raise WorkerError(f"no Ray cluster can be used ({address or 'on this machine'}): {error}") from error
        self._make = ray.remote(Host).options(
            **{"num_cpus": 1, "max_restarts": -1, "max_task_retries": 0, **options}  # what is asked again, we ask
        )
        self.count = count or max(1, int(ray.cluster_resources().get("CPU", 1)))
        self._sites = tuple(sites)
        self._actors = [self._make.remote(self._sites) for _ in range(self.count)]
        self._given_up: set[int] = set()  # by Ray, which starts these no more

    def name(self, number: int) -> str:
        return f"worker {number}"

    def begin(self, number: int, what: str, *data: Any) -> Future[bytes]:
        if number in self._given_up:
            self._given_up.discard(number)
            self._actors[number] = self._make.remote(self._sites)
        answer: Future[bytes] = Future()

        def told(done: Future[bytes]) -> None:
            try:
                answer.set_result(done.result())
            except RayError as error:
                if isinstance(error, ActorDiedError):
                    self._given_up.add(number)
                answer.set_exception(Unreachable(f"{type(error).__name__}: {error}"))
            except Exception as error:  # whoever waits for the answer has to know
                answer.set_exception(error)

        self._actors[number].call.remote(what, *data).future().add_done_callback(told)
        return answer

    def share(self, data: bytes) -> Any:
        return ray.put(data) if len(data) > INLINE else data

    def end(self, number: int) -> None:
        """Ray starts it again."""
        ray.kill(self._actors[number], no_restart=False)

    def close(self) -> None:
        for actor in self._actors:
            with contextlib.suppress(RayError):
                ray.kill(actor)
        ray.shutdown()


def start_workers(
    count: int | None = None, address: str | None = None, sites: Sequence[str] = (), **options: Any
) -> Workers:
    """Workers on a cluster.

    - ``count``: how many; None: one for each processor of the cluster.
    - ``address``: of a cluster that runs already, as ``ray start`` prints it; None starts one on this machine, for as
      long as the workers are not closed.
    - ``sites``: what a worker may load, as ``module:Class``.
    - ``options``: of each worker, for Ray, e.g. ``{"resources": {"hospital": 1}}``.
    """
    if count is not None and count < 1:
        raise ValueError(f"workers={count}; expected at least 1")
    workers = Workers(Cluster(count, address, sites, options))
    try:
        workers.check()
    except (TimeoutError, Unreachable) as error:
        workers.close()
        raise WorkerError(f"a worker did not start: {error}. The machine may have too much else to do") from error
    except BaseException:
        workers.close()
        raise
    return workers
