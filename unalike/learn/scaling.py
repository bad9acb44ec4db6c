"""The scaling of inputs as a release like any other: mean and deviation of the training clients' rows, from sums."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from unalike.core.client import Client
from unalike.core.federation import Federation
from unalike.core.release import Sum
from unalike.core.schema import Kind, Schema
from unalike.core.task import Sent, send, task

_CONSTANT = 1e-7  # a feature that varies less than this, beside its mean, is only shifted


@dataclass(frozen=True)
class Scaling:
    """Two sums in double precision: first the mean, then the squares around it, which keeps them accurate."""

    kind: Kind

    def _summed(self, client: Client, values: Tensor) -> Tensor:
        """Over the client's rows, and over the pixels of an image: one number for each feature or channel."""
        total = client.sum(values)
        return total.sum(dim=(1, 2), keepdim=True) if self.kind == "image" else total

    @task
    def totals(self, client: Client) -> Sent:
        return send(total=self._summed(client, client.x.to(torch.float64)), rows=client.n.to(torch.float64))

    @task
    def squares(self, client: Client, mean: Tensor) -> Sent:
        square = self._summed(client, (client.x.to(torch.float64) - mean).square())
        return send(square=square, rows=client.n.to(torch.float64))


def scale_inputs(federation: Federation) -> Schema:
    """Ask all clients for the mean and the deviation of their inputs, and have everybody use them from now on.

    Per feature, or per channel of images. The sums are in the transcript and the ledger. They have no noise, so a run
    that states an ε takes public constants in their place.
    """
    schema = federation.roster.schema
    scaling = Scaling(schema.kind)
    everyone = federation.everyone()
    first = everyone.ask(scaling.totals, into=[Sum("total"), Sum("rows")])
    pixels = schema.shape[1] * schema.shape[2] if schema.kind == "image" else 1
    mean = first["total"] / (first["rows"] * pixels)
    second = everyone.ask(scaling.squares, mean=mean, into=[Sum("square"), Sum("rows")])  # others may answer now
    deviation = (second["square"] / (second["rows"] * pixels)).clamp(min=0).sqrt()
    constant = deviation <= _CONSTANT * mean.abs().clamp(min=1.0)
    scale = torch.where(constant, 1.0, 1.0 / torch.where(constant, 1.0, deviation))
    scaled = replace(schema, shift=mean.to(torch.float32), scale=scale.to(torch.float32))
    federation.use(scaled)
    return scaled
