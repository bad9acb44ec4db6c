"""A bundle: what a service or a page needs to make models of a finished run for whoever asks, and nothing else.

- ``describe.onnx``: rows x [n, ...] as they are stored, and labels y [n] where they are read, to a descriptor v [l];
- ``make.onnx``: v to the parameters θ [d] of a model;
- ``model.onnx``: rows x and θ to scores; without θ, those of the model of a client that nothing is known about;
- ``schema.json``: how rows are read; ``card.json``: the model card.

It holds no training client's descriptor and no path of this machine. What it does hold was learned from the training
clients: under which ε, the card says.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from unalike.core.disk import write_whole
from unalike.core.method import Method, OnDemand, ProtectsNewcomers, State
from unalike.core.roster import Roster
from unalike.core.schema import Schema
from unalike.methods import METHODS
from unalike.newcomers.client_model import Asked, server_models
from unalike.newcomers.graphs import can_write_onnx, scale_inputs, write_graph
from unalike.newcomers.ledger import ABOUT_LEDGER, file_word
from unalike.privacy.mechanisms import Laplace
from unalike.runs.errors import UserError
from unalike.runs.finished import FinishedRun
from unalike.runs.folder import RESULT
from unalike.runs.prepare import build
from unalike.runs.recipe.recipe import to_recipe
from unalike.runs.result import Result
from unalike.version import __version__

FORMAT = 1
FILES = ("describe.onnx", "make.onnx", "model.onnx", "schema.json", "card.json")
NOT = "not by a bundle"
_READ = ("client_column", "label_column", "id_column", "delimiter", "decimal", "na_values", "missing")
_FULL = {"digits": 16}  # the largest value of a pixel where it is not 255


def served_by_default(name: str) -> str:
    """How a bundle serves the named method with its defaults, tried on a problem of a few numbers."""
    schema = Schema((4,), target="class", classes=3)
    roster = Roster(torch.arange(8), torch.full((8,), 10), torch.ones(8, dtype=torch.bool), schema)
    method = build(to_recipe({"method": name, "rounds": 0, "model": {"name": "mlp"}}, name), roster)[1]
    return how_served(method, method.start(0), schema)


def how_served(method: Method, state: State, schema: Schema) -> str:
    """Who makes a newcomer's model of what, as ``unalike methods`` says it; or "not by a bundle", and why."""
    if isinstance(method, OnDemand):
        made = {"server": "the server makes it of the newcomer's descriptor", "newcomer": "made by the newcomer itself"}
        why = method.why_not_on_demand
        return f"{NOT}: {why}" if why else f"a model of its own, {made[method.made_at]}"
    try:
        models = server_models(method, state, _strangers(schema))
    except Asked:
        return f"{NOT}: a newcomer trains, or answers with what its rows are like"
    same = bool((models == models[0]).all())
    return "one model for everybody" if same else f"{NOT}: the server lends each newcomer another client's model"


def _strangers(schema: Schema) -> Roster:
    """Clients that no run has met."""
    ids = torch.arange(-17, -1)
    return Roster(ids, torch.ones_like(ids), torch.zeros(len(ids), dtype=torch.bool), schema)


def write_bundle(run: FinishedRun, out: Path, name: str | None = None) -> dict[str, Any]:
    """Write the bundle of a run into a new or empty folder, and give its card."""
    method, schema, state = run.method, run.schema, run.state
    served = how_served(method, state, schema)
    if served.startswith(NOT):
        raise UserError(f"{run.recipe.method} is served {served}. Use: unalike personalize {run.path} --data FILE")
    if schema.kind == "tokens":
        raise UserError("a bundle is for tables and pictures, not for text; use: unalike personalize")
    if not can_write_onnx():
        raise UserError("a bundle holds ONNX graphs, which need onnx and onnxscript: pip install 'unalike[serve]'")
    if out.exists() and any(entry.name not in FILES for entry in out.iterdir()):
        raise UserError(f"--out {out} holds other files; give a new or empty folder")
    out.mkdir(parents=True, exist_ok=True)
    card = _card(run, name or file_word(run.path.resolve().name))
    if (length := write_graphs(method, state, schema, out)) is not None:
        card["length"] = length
    write_whole(out / "schema.json", schema.to_json().encode(), 0o644)
    card["files"] = {}
    for title in FILES[:-1]:
        if (out / title).exists():
            content = (out / title).read_bytes()
            card["files"][title] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    write_whole(out / "card.json", json.dumps(card, indent=2, ensure_ascii=False).encode(), 0o644)  # last: it is whole
    return card


def write_graphs(method: Method, state: State, schema: Schema, out: Path) -> int | None:
    """Write what makes and uses models into a folder, and give the length of a descriptor, where there are any."""
    x, model = torch.zeros(3, *schema.shape, dtype=schema.dtype), method.model
    for title in ("describe.onnx", "make.onnx"):
        (out / title).unlink(missing_ok=True)  # of another bundle that was here
    length = None
    if isinstance(method, OnDemand):
        rows = {"x": x}
        if method.reads_labels:
            rows["y"] = torch.zeros(3, dtype=torch.int64 if schema.classes else torch.float32)

        def describe(*rows: Tensor) -> Tensor:
            return method.descriptor_of(state, *_scaled(schema, *rows))

        v = describe(*rows.values()).detach()
        length, common = v.numel(), method.common_model(state).detach()
        write_graph(out / "describe.onnx", describe, rows, "v", rows=["x", "y"])
        write_graph(out / "make.onnx", lambda v: method.model_of(state, v), {"v": v}, "theta")
    else:
        common = server_models(method, state, _strangers(schema))[0].clone()
    write_graph(
        out / "model.onnx",
        lambda x, theta: schema.in_units(model(theta, scale_inputs(x, schema)).reshape(x.shape[0], -1)),
        {"x": x, "theta": common},
        "scores",
        rows=["x"],
        defaults={"theta": common},
    )
    return length


def _scaled(schema: Schema, x: Tensor, y: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
    if y is not None and schema.target_center is not None and schema.target_deviation is not None:
        y = (y - schema.target_center) / schema.target_deviation
    return scale_inputs(x, schema), y


def _card(run: FinishedRun, name: str) -> dict[str, Any]:
    """The model card, without the files."""
    method = run.method
    result = Result.load(run.path) if (run.path / RESULT).is_file() else None
    on_demand = method if isinstance(method, OnDemand) else None
    about: dict[str, Any] = {
        "format": FORMAT,
        "name": name,
        "unalike": __version__,
        "method": run.recipe.method,
        "what": METHODS[run.recipe.method].summary if run.recipe.method in METHODS else type(method).__name__,
        "data": Path(run.recipe.data.name).name,
        "rounds": run.round,
        "clients": len(run.roster),
        "parameters": method.model.size,
        "made_at": on_demand.made_at if on_demand else None,
        "reads_labels": on_demand is not None and on_demand.reads_labels,
        "describe_rows": on_demand.newcomer_rows if on_demand else None,
        "read": {key: value for key, value in run.file_options.items() if key in _READ},
        "pixels": _FULL.get(run.recipe.data.name.partition(":")[0], 255),
        "about_ledger": ABOUT_LEDGER,
        "trained": " ".join(result.privacy.words()) if result is not None and result.privacy.epsilon else None,
    }
    if method.model.digest is not None:
        about["frozen"] = method.model.digest
    if result is not None and not result.privacy.private:
        about["scores"] = {
            group: found.mean for group in ("seen", "unseen", "unlabeled") if (found := result.accuracy.of(group))
        }
    if isinstance(method, ProtectsNewcomers) and (distance := method.sensitivity(1)) is not None:
        noise = method.protection
        about["noise"] = {
            "kind": "laplace" if isinstance(noise, Laplace) else "gaussian",
            "distance": distance,  # one of n rows moves the descriptor by at most this through n
            "always": noise is not None,
        }
    usual = _usual(run.state) if on_demand is not None and on_demand.made_at == "server" else None
    return about | ({} if usual is None else {"usual": usual})


def _usual(state: State) -> dict[str, Any] | None:
    """A ball around the training clients' descriptors: outside of it, a newcomer is told that it is unlike them."""
    known = state.part("remembered").get("v", torch.zeros(0, 1))
    if len(known) < 2:
        return None
    away = torch.linalg.vector_norm((known - state.shift) * state.scale, dim=1)
    return {"centre": state.shift.tolist(), "scale": float(state.scale), "within": round(1.25 * float(away.max()), 1)}
