"""Expansion matrices: orthonormal columns, made from the seed alone, and honest about their structure."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.func import grad, vmap

from unalike.networks.subspace import Kind, Kronecker, Signs, Subspace, subspace


def matrix(p: Subspace) -> Tensor:
    return vmap(p)(torch.eye(p.columns)).T


@pytest.mark.parametrize("kind", ["kronecker", "signs", "identity"])
@pytest.mark.parametrize(("rows", "columns"), [(900, 100), (6090, 406), (1003, 67)])
def test_columns_are_nearly_orthonormal(kind: Kind, rows: int, columns: int) -> None:
    if kind == "identity":
        rows = columns = min(rows, 1003)  # its matrix is as large as the model
    p = subspace(kind, rows, columns, seed=3)
    m = matrix(p)
    assert m.shape == (rows, p.columns)
    cut = 0 if kind != "kronecker" else p.left.shape[0] * p.right.shape[0] - rows  # type: ignore[attr-defined]
    tolerance = 1e-5 if cut == 0 else 0.15
    torch.testing.assert_close(m.T @ m, torch.eye(p.columns), atol=tolerance, rtol=0)


def test_kronecker_is_the_product_of_its_factors() -> None:
    p = subspace("kronecker", 900, 100, seed=1)
    assert isinstance(p, Kronecker)
    torch.testing.assert_close(matrix(p), torch.kron(p.left, p.right), atol=1e-6, rtol=0)
    assert p.left.numel() + p.right.numel() < 900  # beside 90,000 entries of a dense P


def test_signs_has_one_entry_in_each_row_and_no_favourite_column() -> None:
    p = subspace("signs", 1003, 67, seed=1)
    assert isinstance(p, Signs)
    m = matrix(p)
    assert torch.equal((m != 0).sum(1), torch.ones(1003, dtype=torch.int64))
    assert set((m != 0).sum(0).tolist()) <= {14, 15}
    assert 400 < int((m > 0).sum()) < 600


@pytest.mark.parametrize("kind", ["kronecker", "signs"])
def test_a_seed_is_all_that_is_needed(kind: Kind) -> None:
    assert torch.equal(matrix(subspace(kind, 500, 33, 7)), matrix(subspace(kind, 500, 33, 7)))
    overlap = matrix(subspace(kind, 500, 33, 7)).T @ matrix(subspace(kind, 500, 33, 8))
    assert float(overlap.abs().max()) < 0.9


@pytest.mark.parametrize("kind", ["kronecker", "signs"])
def test_gradient_is_the_transpose(kind: Kind) -> None:
    p = subspace(kind, 500, 33, 0)
    cotangent = torch.randn(500, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(grad(lambda v: p(v) @ cotangent)(torch.zeros(33)), matrix(p).T @ cotangent)


def test_default_dimension_is_the_thesis_or_half() -> None:
    assert subspace("signs", 151_466, None, 0).columns == 10_000
    assert subspace("signs", 6090, None, 0).columns == 3045
    assert subspace("signs", 5, None, 0).columns == 2


def test_impossible_subspaces_are_refused() -> None:
    with pytest.raises(ValueError, match="1 to 10 dimensions, not 11"):
        subspace("signs", 10, 11, 0)
    with pytest.raises(ValueError, match="as many columns as rows, 10, not 3"):
        subspace("identity", 10, 3, 0)
    with pytest.raises(ValueError, match="expected one of kronecker, signs, identity"):
        subspace("dense", 10, 3, 0)  # type: ignore[arg-type]
