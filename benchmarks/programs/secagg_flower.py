"""One sum by Flower's SecAgg+, all in this process: its workflow at the server, its mod at each client, no transport.

``python secagg_flower.py CLIENTS LENGTH LOST``, in an environment that has flwr, prints a line of JSON. As many clients
as are lost do not send their masked vectors, as in ``benchmarks.secure_sum``.
"""

from __future__ import annotations

import copy
import json
import sys
import time
from typing import Any

import numpy as np
from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.client.mod import secaggplus_mod
from flwr.common import Code, FitIns, FitRes, Status, ndarrays_to_parameters, parameters_to_ndarrays
from flwr.common.secure_aggregation.secaggplus_constants import RECORD_KEY_CONFIGS, Key, Stage
from flwr.common.typing import Parameters
from flwr.compat.common import recorddict_compat
from flwr.server import LegacyContext
from flwr.server.strategy import FedAvg
from flwr.server.workflow import SecAggPlusWorkflow
from flwr.server.workflow.constant import MAIN_CONFIGS_RECORD, MAIN_PARAMS_RECORD
from flwr.supercore.task_identity import TaskIdentity

CLIP = 8.0


class Proxy:
    """A client, as the workflow names it."""

    def __init__(self, number: int) -> None:
        self.node_id, self.cid = number, str(number)


class Strategy(FedAvg):
    """Asks everybody, and keeps the mean."""

    mean: Any = None

    def __init__(self, count: int) -> None:
        super().__init__()
        self.proxies = [Proxy(number) for number in range(1, count + 1)]

    def configure_fit(self, server_round: int, parameters: Parameters, client_manager: Any) -> Any:
        return [(proxy, FitIns(parameters, {})) for proxy in self.proxies]

    def aggregate_fit(self, server_round: int, results: Any, failures: Any) -> Any:
        self.mean = parameters_to_ndarrays(results[0][1].parameters)[0]
        return None, {}


class Grid:
    """Brings messages to the clients, here, and counts what they say in bytes."""

    def __init__(self, vectors: Any, lost: int) -> None:
        self.vectors, self.lost, self.up, self.down = vectors, lost, 0, 0
        self.contexts = {number: _context() for number in range(1, len(vectors) + 1)}

    def send_and_receive(self, messages: Any, *, timeout: float | None = None) -> list[Message]:
        answers = []
        for message in messages:
            number = message.metadata.dst_node_id
            message.content = copy.deepcopy(message.content)  # a client takes out what it has read
            stage = message.content.config_records[RECORD_KEY_CONFIGS][Key.STAGE]
            self.down += _size(message.content)
            if stage == Stage.COLLECT_MASKED_VECTORS and number <= self.lost:
                continue
            answer = secaggplus_mod(message, self.contexts[number], self.fit)
            self.up += _size(answer.content)
            answers.append(answer)
        return answers

    def fit(self, message: Message, context: Context) -> Message:
        vector = self.vectors[message.metadata.dst_node_id - 1]
        result = FitRes(Status(Code.OK, ""), ndarrays_to_parameters([vector]), 1, {})
        return Message(recorddict_compat.fitres_to_recorddict(result, False), reply_to=message)


def _context() -> Context:
    return Context(run_id=1, node_id=0, node_config={}, state=RecordDict(), run_config={})


def _size(content: RecordDict) -> int:
    """Bytes of what a message says; a number counts eight."""
    configs = sum(_bytes(list(record.values())) for record in content.config_records.values())
    return configs + sum(record.count_bytes() for record in content.array_records.values())


def _bytes(value: Any) -> int:
    if isinstance(value, list | tuple):
        return sum(map(_bytes, value))
    return len(value) if isinstance(value, bytes | str) else 8


def run(clients: int, length: int, lost: int) -> dict[str, float]:
    random = np.random.default_rng(0)
    vectors = [random.normal(size=length).astype(np.float32) for _ in range(clients)]
    shares: Any = min(clients, 129)
    workflow = SecAggPlusWorkflow(shares if shares < clients else 1.0, 0.51, max_weight=1.0, clipping_range=CLIP)
    strategy, grid, context = Strategy(clients), Grid(vectors, lost), _context()
    first = ndarrays_to_parameters([np.zeros(length, dtype=np.float32)])
    context.state.array_records[MAIN_PARAMS_RECORD] = recorddict_compat.parameters_to_arrayrecord(first, True)
    context.state.config_records[MAIN_CONFIGS_RECORD] = ConfigRecord({"current_round": 1})
    legacy = LegacyContext(context=context, strategy=strategy)
    TaskIdentity.task_id = TaskIdentity.run_id = TaskIdentity.node_id = 1  # as if a server app were running
    begin, cpu = time.perf_counter(), time.process_time()
    workflow(grid, legacy)  # type: ignore[arg-type]
    found = {"seconds": time.perf_counter() - begin, "cpu": time.process_time() - cpu}
    error = float(np.abs(strategy.mean - np.mean(vectors[lost:], axis=0)).max())
    if error > 1e-3:
        raise AssertionError(f"the mean is off by {error}")
    return {**found, "megabytes_up": grid.up / 1e6, "megabytes_down": grid.down / 1e6, "error": error}


if __name__ == "__main__":
    print(json.dumps(run(*map(int, sys.argv[1:4]))))
