"""A personal model: what a newcomer sent and received for it, what it predicts, and its files."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from unalike.core.client import Clients
from unalike.core.schema import Schema
from unalike.networks.adapters_peft import write_peft
from unalike.newcomers.graphs import scale_inputs, write_graph
from unalike.privacy import Ledger
from unalike.runs.errors import UserError
from unalike.runs.finished import FinishedRun


@dataclass(frozen=True)
class Distance:
    """How far a newcomer is from the nearest training client, compared with the distances between training clients.

    The further away it is, the less is known about how good its model is (P2 Theorem 1).
    """

    nearest: float
    usual: float  # half of the training clients have another one within this distance
    largest: float  # all of them have

    @property
    def is_unusual(self) -> bool:
        """Is it further away than any training client is from the next?"""
        return self.nearest > self.largest

    @property
    def text(self) -> str:
        here = f"the nearest training client is at a distance of {self.nearest:.3g} by what was sent"
        among = f"half of them have another within {self.usual:.3g}, and all within {self.largest:.3g}"
        if not self.is_unusual:
            return f"{here}; {among}"
        return (
            f"{here}; {among}: these data are unlike those of training, so the model may be worse than its run's scores"
        )


@dataclass(frozen=True)
class PersonalModel:
    """The model of one client: what it sent and received for it, and what that costs in privacy."""

    run: FinishedRun
    name: str
    samples: int
    theta: Tensor
    sent: dict[str, int]  # bytes up, by array; nothing that stays at the client
    received: dict[str, int]  # bytes down, by array
    descriptor: Tensor | None
    ledger: Ledger
    epsilon: float
    delta: float
    notes: list[str] = field(default_factory=list)
    rows: list[str] = field(default_factory=list)  # the rows about which something was sent, as the ledger names them
    distance: Distance | None = None  # from the training clients, if the method can tell

    def __repr__(self) -> str:
        spent = f"ε = {self.epsilon:.3g}" if self.sent else "nothing was sent"
        return f"PersonalModel of {self.name}: {self.samples:,} rows, {self.theta.numel():,} parameters, {spent}"

    @property
    def about(self) -> dict[str, str]:
        """The metadata of the model's file: whose model it is, what it reads and what its answers are called."""
        run, schema = self.run, self.run.schema
        about = {
            "run": run.path.resolve().name,
            "method": run.recipe.method,
            "round": str(run.round),
            "client": self.name,
            "input": self.onnx_input,
            "schema": schema.to_json(),
        }
        if run.method.model.digest is not None:
            about["frozen"] = run.method.model.digest  # of the network that the tensors adapt
        if schema.columns is not None:
            about["columns"] = json.dumps(list(schema.columns), ensure_ascii=False)
        if schema.classes is not None:
            about["classes"] = json.dumps(schema.class_labels, ensure_ascii=False)
        return about

    def save(self, file: Path) -> None:
        """The model's named tensors, and ``input.shift`` and ``input.scale``: the model reads (x − shift) · scale."""
        model, schema = self.run.method.model, self.run.schema
        tensors = {name: value.contiguous().clone() for name, value in model.tensors(self.theta).items()}
        if schema.shift is not None and schema.scale is not None:
            tensors |= {"input.shift": schema.shift.clone(), "input.scale": schema.scale.clone()}
        if schema.target_center is not None and schema.target_deviation is not None:
            units = torch.tensor([schema.target_center, schema.target_deviation])
            tensors |= {"target.center": units[0].clone(), "target.deviation": units[1].clone()}
        file.parent.mkdir(parents=True, exist_ok=True)
        save_file(tensors, file, self.about)

    def save_peft(self, folder: Path) -> None:
        """The adapter alone, in the files of PEFT."""
        write_peft(self.run.method.model, self.theta, folder)

    @property
    def onnx_input(self) -> str:
        """What ``save_onnx``'s graph reads: rows of the type and shape that the run's own data has, not yet scaled."""
        schema = self.run.schema
        return f"{schema.stored} [rows, {', '.join(map(str, schema.shape))}]"

    def save_onnx(self, file: Path) -> None:
        """The same model as an ONNX graph from rows (``onnx_input``) to scores."""
        schema, module = self.run.schema, self.run.method.model.module(self.theta).eval()
        write_graph(
            file,
            lambda x: schema.in_units(module(scale_inputs(x, schema))),
            {"x": torch.zeros(2, *schema.shape, dtype=schema.dtype)},
            "scores",
            rows=["x"],
            about=self.about,
            text=f"The model of client {self.name}, by {self.run.recipe.method} (Unalike). x: {self.onnx_input}, "
            "not scaled; scores: one for each class, or the predicted number. Columns, classes and schema: see the "
            "metadata.",
        )

    def answers(self, clients: Clients) -> Tensor:
        """[rows, outputs] the model's output for each row of the only client, in the order of the rows.

        A score for each class, or a number.
        """
        x, model = clients.inputs(0), self.run.method.model
        try:
            outputs = torch.cat([model(self.theta, x[i : i + 1024]) for i in range(0, len(x), 1024)]).detach()
        except IndexError as error:
            if self.run.schema.kind != "tokens":
                raise
            raise unknown_token(clients) from error
        return self.run.schema.in_units(outputs.reshape(len(outputs), -1))

    def predict(self, clients: Clients) -> list[str]:
        """For each row of the only client the name of the predicted class, or the predicted number."""
        return words_for(self.answers(clients), self.run.schema)


def words_for(answers: Tensor, schema: Schema) -> list[str]:
    """Predictions in words: the class with the largest score, or the number."""
    if schema.classes is None:
        return [f"{value:.9g}" for value in answers[:, 0].tolist()]
    return [schema.class_labels[place] for place in answers.argmax(1).tolist()]


def unknown_token(newcomer: Clients) -> UserError:
    return UserError(
        f"the rows hold tokens from {int(newcomer.x.min())} to {int(newcomer.x.max())}, and the run's network does not "
        "know all of them; number the tokens as in training"
    )
