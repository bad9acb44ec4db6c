"""``python -m benchmarks.audits``: attack every private method and analysis, with its own noise and with half of it.

Prints the table of docs/privacy.md and keeps every answer in a JSON as soon as it is there, so that a run that was
stopped goes on. Half of the noise must be found out in every row; this ends with an error if it is not.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import time
from pathlib import Path
from typing import Any

import torch
from typer.testing import CliRunner

from unalike.commands.main import app
from unalike.privacy import accountant, losses

RESULTS = Path(__file__).resolve().parent / "results" / "audits.json"
HALF = "--cut-noise 0.5"
_DATA = "--data digits --partition iid --clients 60 --model logistic"
_CLIENTS = f"{_DATA} --rounds 10 --cohort 0.2 --noise-multiplier 1 --clip 0.5 --delta 1e-3 --unit client"
_WIDE = _CLIENTS.replace("logistic", "mlp")
_POINTS = f"{_DATA} --rounds 5 --cohort 54 --noise-multiplier 1 --clip 1 --delta 1e-4 --unit point --batch 5"
_BY_CLIENT = {
    **dict.fromkeys(("fedtta", "fedsplit", "fedem", "pfedme", "perfedavg", "adaped", "quped", "fml"), _CLIENTS),
    **dict.fromkeys(("ld-fedavg", "fedrep", "knnper", "learned-prior"), _WIDE),
    **dict.fromkeys(("pefll", "odpfl"), f"{_WIDE} --set descriptor=64"),  # a canary needs a number of its own
}
_BY_POINT = ("fedsplit", "robust-hdp", "rdpcfl", "mr-mtl", "pfedme")
_KMEANS = "--epsilon 2 --delta 1e-4"
NOBODY = " --trust nobody"

AUDITS: dict[str, str] = {  # what `unalike privacy audit` is given
    "FedAvg, clients, Poisson cohorts": f"fedavg {_CLIENTS}",
    "FedAvg, clients, nobody trusted": f"fedavg {_CLIENTS}{NOBODY}",
    "FedAvg, clients, everyone in every round": "fedavg "
    + _CLIENTS.replace("--cohort 0.2", "--cohort 54").replace("--noise-multiplier 1", "--noise-multiplier 4"),
    **{f"{name}, clients": f"{name} {flags}" for name, flags in _BY_CLIENT.items()},
    "FLowDUP, clients": f"flowdup {_WIDE}",
    "FedAvg, points, ghost norms": f"fedavg {_POINTS}",
    "FedAvg, points, a CNN": f"fedavg {_POINTS.replace('logistic', 'small-cnn')}",
    "FedAvg, points, ResNet18 (gradients one by one)": f"fedavg {_POINTS.replace('logistic', 'resnet18')}",
    **{f"{name}, points": f"{name} {_POINTS}" for name in _BY_POINT},
    "fedrep, points": f"fedrep {_POINTS.replace('logistic', 'mlp')}",
    "Gaussian estimates, clients": "gaussian --epsilon 2 --delta 1e-4",
    "Bernoulli estimates, clients": "bernoulli --epsilon 1",
    "MDM, clients": "mdm --epsilon 4 --delta 1e-4",
    "MDM, clients, nobody trusted": f"mdm --epsilon 4 --delta 1e-4{NOBODY}",
    **{
        f"k-means, {unit}s{', a Lloyd step' * steps}{', nobody trusted' * bool(trust)}": (
            f"kmeans {_KMEANS} --unit {unit}{' --rounds 1' * steps}{trust}"
        )
        for unit in ("point", "client")
        for steps in (0, 1)
        for trust in ("", NOBODY)
    },
}


def attack(command: str) -> dict[str, Any]:
    """The answer of one audit, and the processor's seconds that it took."""
    for remembered in (accountant.epsilon, losses._repeated_pld, losses._single_pld):
        remembered.cache_clear()  # as if it were the first of its process
    begin = time.process_time()
    told = CliRunner().invoke(app, ["privacy", "audit", *shlex.split(command), "--json"])
    if told.exception is not None and not isinstance(told.exception, SystemExit):
        raise told.exception
    if not told.stdout.startswith("{"):
        raise SystemExit(f"{command}: {told.output}")
    answer = json.loads(told.stdout)
    proof = answer["proof"]
    return {
        "command": f"unalike privacy audit {command}",
        "seconds": time.process_time() - begin,
        **{name: answer[name] for name in ("promised", "holds", "canaries", "rounds", "of_rounds")},
        **{"proven": max(proof["epsilon"], proof["assumed"]), "noise": proof["noise"]},
    }


def table(found: dict[str, list[dict[str, Any]]]) -> str:
    lines = [
        "| attacked | ledger's ε | proven | noise at most | proven, half of the noise | noise at most | CPU seconds |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for label, (honest, half) in found.items():
        shorter = "" if honest["of_rounds"] is None else f" ({honest['rounds']} of {honest['of_rounds']} rounds)"
        if half["rounds"] != honest["rounds"]:  # how many there is time for is measured
            shorter += f", with half of the noise {half['rounds']} rounds of ε {half['promised']:.2f}"
        numbers = [f"{honest['promised']:.2f}"]
        numbers += [text for one in (honest, half) for text in (f"{one['proven']:.2f}", f"{one['noise']:.0%}")]
        lines.append(f"| {label}{shorter} | {' | '.join(numbers)} | {honest['seconds']:.0f} + {half['seconds']:.0f} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.audits", description=__doc__)
    parser.add_argument("--only", nargs="*", default=[""], help="parts of the rows' names")
    parser.add_argument("--again", action="store_true", help="also those that the file has")
    parser.add_argument("--out", type=Path, default=RESULTS)
    asked = parser.parse_args()
    torch.set_num_threads(min(2, torch.get_num_threads()))
    found = json.loads(asked.out.read_text()) if asked.out.exists() else {}
    for label, command in AUDITS.items():
        if not any(part in label for part in asked.only) or (label in found and not asked.again):
            continue
        found[label] = [attack(command), attack(f"{command} {HALF}")]
        print(table({label: found[label]}).splitlines()[-1], flush=True)
        found = {name: found[name] for name in AUDITS if name in found}
        asked.out.write_text(json.dumps(found, indent=1) + "\n")
    print(table(found))
    missed = [label for label, (_, half) in found.items() if half["holds"]]
    if missed:
        sys.exit(f"half of the noise was not found out: {', '.join(missed)}")


if __name__ == "__main__":
    main()
