"""What a client of FedDP-KMeans computes from its own points, and how much one point changes it."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from unalike.core.federation import QuorumError
from unalike.core.release import Inputs, Sum
from unalike.core.vocabulary import Client, Federation, Sent, send, task


def clipped_points(client: Client, origin: Tensor, radius: Tensor, moves: Tensor | None) -> Tensor:
    """The client's points relative to ``origin``, each clipped to norm ``radius``; rows of padding become zero.

    With ``moves`` [2, anchors, d] a point first moves along with the nearest of the anchors (see ``diameter.py``).
    """
    points = client.x
    if moves is not None:
        anchors, steps = moves
        middle = anchors.mean(0)
        points = points + steps[nearest_center(points - middle, anchors - middle)]
    points = points - origin
    if points.shape != client.x.shape:
        raise ValueError(f"origin and moves make {tuple(points.shape)} of points of shape {tuple(client.x.shape)}")
    length = torch.linalg.vector_norm(points, dim=1, keepdim=True)
    factor = torch.clamp((1.0 - 1e-6) * radius / length.clamp(min=1e-30), max=1.0)  # rounding stays below the radius
    return client.tame(torch.where(client.mask[:, None], points * factor, 0.0))


def nearest_center(points: Tensor, centers: Tensor) -> Tensor:
    """[points]: which centre is nearest (the first of several)."""
    return torch.argmin(centers.square().sum(1) - 2.0 * points @ centers.T, dim=1)


def triangle_layout(dimension: int) -> tuple[Tensor, Tensor, Tensor]:
    """Rows and columns of the upper triangle, and the factor that keeps the Frobenius norm: √2 off the diagonal."""
    rows, columns = torch.triu_indices(dimension, dimension)
    return rows, columns, torch.where(rows == columns, 1.0, math.sqrt(2.0))


@task
def squared_distances(client: Client, centers: Tensor) -> Sent:
    """The k-means cost of the client's (unclipped) points; for measuring in simulation."""
    middle = centers.mean(0)
    nearest = nearest_center(client.x - middle, centers - middle)
    return send(cost=client.sum((client.x - centers[nearest]).square().sum(1)), points=client.n)


# What one point changes in each query: functions of the ask's inputs, which both sides know

_LEAST, _MOST = 2.0**-60, 2.0**60  # of an input that bounds a point: beyond, rounding moves a sum further than it does


def _public(inputs: Inputs, name: str) -> float:
    if inputs[name].ndim:
        raise ValueError(f"{name} has the shape {tuple(inputs[name].shape)}; expected one number")
    value = float(inputs[name])
    if not _LEAST <= value <= _MOST:
        raise ValueError(f"{name}={value:g}; expected a number from {_LEAST:.0e} to {_MOST:.0e}")
    return value


def gram_change(inputs: Inputs) -> float:
    return _public(inputs, "radius") ** 2 / _public(inputs, "scale")


def weight_change(inputs: Inputs) -> float:
    return 1.0 / _public(inputs, "scale")


def sum_change(inputs: Inputs) -> float:
    return _public(inputs, "radius") / _public(inputs, "scale")


def count_change(inputs: Inputs) -> float:
    return 1.0 / _public(inputs, "count_scale")


def cost(federation: Federation, centers: Tensor) -> float:
    """The k-means cost per client point; measured in simulation and charged to nobody. NaN: a site did not consent."""
    try:
        with federation.aside() as own:
            sums = own.everyone().ask(squared_distances, into=[Sum("cost"), Sum("points")], centers=centers)
    except QuorumError as error:
        if not error.refused:
            raise
        return math.nan
    return float(sums["cost"]) / float(sums["points"])
