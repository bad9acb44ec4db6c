"""Bad input is refused with a sentence that says what to do, and before any client is asked."""

from __future__ import annotations

import json
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from typer.testing import CliRunner

from tests.analytics.test_kmeans import federation, in_order, mixture
from unalike import simulate
from unalike.analytics.kmeans.algorithm import FedDPKMeans
from unalike.analytics.kmeans.budget import BudgetSplit, KMeansPrivacy
from unalike.analytics.kmeans.points import read_points
from unalike.analytics.kmeans.study import cluster
from unalike.commands.main import app
from unalike.core.client import Clients
from unalike.data import DataError


def refused(method: FedDPKMeans, clients: Clients, server: torch.Tensor, message: str) -> None:
    asked = federation(clients)
    with pytest.raises(ValueError, match=message):
        method.fit(asked, server)
    assert asked.transcript.rows() == []
    assert asked.ledger.epsilon(1e-6) == 0.0


def test_more_clusters_than_points() -> None:
    clients, server, _ = mixture(sizes=(3, 4))
    refused(FedDPKMeans(k=8), clients, server, "k=8 clusters of 7 points in all: choose k between 1 and 7")


def test_more_clusters_than_distinct_server_points() -> None:
    clients, server, _ = mixture()
    refused(FedDPKMeans(k=4), clients, server[:3].repeat(10, 1), r"only 3 distinct points \(30 in all\)")
    refused(FedDPKMeans(k=1), clients, server[:1].repeat(30, 1), "all server points are identical")
    refused(FedDPKMeans(k=1), clients, server[:0], "there is not a single server point")


def test_server_data_of_another_dimension() -> None:
    clients, server, _ = mixture()
    refused(
        FedDPKMeans(k=4), clients, server[:, :5], r"server data is \(40, 5\), but the clients' points have 6 features"
    )


def test_server_data_with_nan() -> None:
    clients, server, _ = mixture()
    server[3, 2] = torch.nan
    refused(FedDPKMeans(k=4), clients, server, "server data contains NaN")


@pytest.mark.parametrize("epsilon", [0.0, -1.0, float("nan"), float("inf")])
def test_epsilon_must_be_above_zero(epsilon: float) -> None:
    with pytest.raises(ValueError, match="epsilon must be a finite number above 0, got"):
        KMeansPrivacy(epsilon)


def test_settings_that_make_no_sense() -> None:
    with pytest.raises(ValueError, match="k=0; expected a whole number of at least 1"):
        FedDPKMeans(k=0)
    with pytest.raises(ValueError, match="needs client_points"):
        FedDPKMeans(k=3, privacy=KMeansPrivacy(1.0, unit="client"))
    with pytest.raises(ValueError, match="radius must be a finite number above 0, got -1"):
        FedDPKMeans(k=3, radius=-1.0)
    with pytest.raises(ValueError, match="share 'weights' of the budget"):
        BudgetSplit(0.5, 0.0, 0.3, 0.2)


def test_a_client_with_no_data() -> None:
    clients = Clients.from_sizes(torch.zeros(3, 2), None, torch.tensor([2, 0, 1]))
    with pytest.raises(ValueError, match=r"1 clients have no samples \(1"):
        simulate(clients)


def test_all_points_identical(tmp_path: Path) -> None:
    file = tmp_path / "same.npz"
    np.savez(file, x=np.ones((20, 3), dtype=np.float32), client=np.arange(20) % 4)
    with pytest.raises(DataError, match="all 20 points are identical; there is nothing to cluster"):
        read_points(str(file), server_points=5)


def test_a_constant_feature_stays_what_it_is() -> None:
    """Nothing is divided by a deviation, so it is only a feature that separates nobody; scaling leaves it alone."""
    clients, server, _ = mixture()
    x, q = clients.x.clone(), server.clone()
    x[:, 2] = q[:, 2] = 7.0
    constant = Clients.from_sizes(x, None, clients.size)
    found = FedDPKMeans(k=4, steps=1).fit(federation(constant), q)
    torch.testing.assert_close(found.centers[:, 2], torch.full((4,), 7.0), rtol=1e-4, atol=1e-4)


def write_own(folder: Path) -> tuple[Path, Path]:
    clients, server, _ = mixture(sizes=(300, 200, 250))
    owner = np.repeat(["north", "south", "west"], [300, 200, 250])
    header = "shop," + ",".join(f"f{i}" for i in range(6))
    rows = [f"{o}," + ",".join(f"{v:.6f}" for v in row) for o, row in zip(owner, clients.x.tolist(), strict=True)]
    own, public = folder / "shops.csv", folder / "public.npz"
    own.write_text("\n".join([header, *rows]) + "\n")
    np.savez(public, x=server.numpy())
    return own, public


def test_own_files_with_a_server_file_and_with_points_made_public(tmp_path: Path) -> None:
    own, public = write_own(tmp_path)
    points = read_points(str(own), server=public, client_column="shop")
    assert points.clients.size.tolist() == [300, 200, 250]
    drawn = read_points(str(own), server_points=60, client_column="shop", seed=1)
    assert len(drawn.server) == 60
    assert drawn.total == 690
    everything = torch.cat([drawn.server, drawn.clients.x])
    torch.testing.assert_close(in_order(everything), in_order(points.clients.x), check_dtype=False)
    with pytest.raises(ValueError, match="there is no server data"):
        read_points(str(own), client_column="shop")
    with pytest.raises(ValueError, match="give one of the two"):
        read_points(str(own), server=public, server_points=9, client_column="shop")


def test_scaling_by_the_server_data(tmp_path: Path) -> None:
    own, public = write_own(tmp_path)
    points = read_points(str(own), server=public, client_column="shop")
    points.server[:, 1] = 3.0
    scaled = points.standardize()
    torch.testing.assert_close(
        scaled.server.std(0, correction=0), torch.tensor([1.0, 0, 1, 1, 1, 1]), check_dtype=False
    )
    assert scaled.clients.scale is not None and float(scaled.clients.scale[1]) == 1.0


def command(*words: str) -> str:
    result = CliRunner().invoke(app, ["kmeans", *words])
    assert result.exit_code == 0, result.output
    return result.stdout


def failure(*words: str) -> str:
    result = CliRunner().invoke(app, ["kmeans", *words])
    assert result.exit_code == 1
    return " ".join(result.output.split())


SMALL = ("--data", "gaussian-mixture:clients=20,points=200,dim=10", "--json")


def test_the_command_prints_what_was_found_and_writes_files(tmp_path: Path) -> None:
    page, centers = tmp_path / "page.html", tmp_path / "centers.csv"
    told = json.loads(command(*SMALL, "--epsilon", "2", "--baselines", "--plot", str(page), "--centers", str(centers)))
    assert told["epsilon"] <= 2
    assert told["optimal_cost"] <= told["cost"]
    assert told["seconds"] > 0
    assert {row["method"] for row in told["baselines"]} == {"ServerKMeans++", "ServerLloyds", "SpherePacking", "k-FED"}
    table = pd.read_csv(centers)
    assert list(table) == ["cluster", "size", *(f"x{k}" for k in range(10)), *(f"noise_x{k}" for k in range(10))]
    assert len(table) == 10 and (table.filter(like="noise").to_numpy() > 0).all()
    assert "Centres and server points" in page.read_text()
    assert "choose another name (--plot)" in failure(*SMALL, "--plot", str(tmp_path / "page.jpg"))
    assert "nothing is overwritten" in failure(*SMALL, "--plot", str(page))


def test_the_command_sweeps_budgets(tmp_path: Path) -> None:
    page = tmp_path / "front.html"
    words = ("--k", "10", "--epsilon", "0.2", "--pareto", "--baselines", "--starts", "1", "--plot", str(page))
    told = json.loads(command(*SMALL, *words))
    ours = told["fronts"]["FedDP-KMeans"]
    assert all(a["epsilon"] < b["epsilon"] and a["cost"] > b["cost"] for a, b in pairwise(ours))
    assert all(one["epsilon"] <= 0.2 for one in told["runs"])
    assert told["fronts"]["ServerLloyds"][0]["epsilon"] == 0.0
    assert "Optimal (not private)" in page.read_text()


def test_the_command_without_json_prints_a_table() -> None:
    shown = command(*SMALL[:2], "--epsilon", "2", "--starts", "1", "--k", "auto", "--k-max", "12")
    assert "FedDP-KMeans" in shown and "Optimal" in shown


def test_the_columns_that_are_clustered_and_the_files_are_named(tmp_path: Path) -> None:
    own, public = write_own(tmp_path)
    lines = own.read_text().splitlines()
    own.write_text(
        "\n".join([lines[0] + ",returned", *(f"{row},{'no' if i % 2 else 'yes'}" for i, row in enumerate(lines[1:]))])
    )
    words = ("--data", str(own), "--client-column", "shop", "--k", "3", "--starts", "0")
    centers = tmp_path / "centers.csv"
    shown = command(*words, "--server", str(public), "--label-column", "returned", "--centers", str(centers))
    assert "clustered by: f0, f1, f2, f3, f4, f5\n" in shown and f"centres: {centers}\n" in shown
    assert list(pd.read_csv(centers)) == ["cluster", "size", "f0", "f1", "f2", "f3", "f4", "f5"]
    assert "points in each cluster: " in shown
    assert "f5, returned (2 values)\n" in command(*words, "--server-points", "60")


def test_centres_are_in_the_datas_units_and_each_row_has_its_cluster(tmp_path: Path) -> None:
    """Ages near 20 and 70, incomes a thousand times larger, scaled by the server data for the clustering."""
    random = np.random.default_rng(5)
    group = random.integers(0, 2, 90)
    frame = pd.DataFrame({"shop": [f"s{i % 4}" for i in range(90)], "age": 20.0 + 50 * group + random.normal(0, 1, 90),
                          "income": 9000.0 - 5000 * group + random.normal(0, 90, 90)})  # fmt: skip
    own, public, centers, rows = (tmp_path / f"{name}.csv" for name in ("own", "public", "centers", "rows"))
    frame.to_csv(own, index=False)
    frame.iloc[:20].to_csv(public, index=False)
    words = (
        "--data",
        str(own),
        "--client-column",
        "shop",
        "--k",
        "2",
        "--steps",
        "2",
        "--standardize",
        "--starts",
        "0",
    )
    ranges = ("--range", "age=0:40", "--range", "income=0:1e5")
    shown = command(*words, "--server", str(public), *ranges, "--centers", str(centers), "--assignments", str(rows))
    assert "has age = " in shown and "outside its range, 0 to 40" in shown and shown.count("note:") == 1
    table = [[cell.strip() for cell in line.split("│")[1:-1]] for line in shown.splitlines() if "│" in line]
    printed = {round(float(row[1])) for row in table if len(row) == 3 and row[0] in ("0", "1")}
    assert printed == {20, 70}  # by the columns' names, in their units
    refused = ("--range", "ages=0:40"), "has no column 'ages'; it has age, income"
    assert refused[1] in failure(*words, "--server", str(public), *refused[0])
    found = pd.read_csv(centers).sort_values("age")
    expected = frame.assign(group=group).groupby("group")[["age", "income"]].mean()
    np.testing.assert_allclose(found[["age", "income"]], expected, rtol=2e-3)
    assert found["size"].tolist() == [int((group == 0).sum()), int((group == 1).sum())]
    assigned = pd.read_csv(rows)
    young = int(found["cluster"].iloc[0])
    for shop, part in assigned.groupby("client"):
        ages = frame.loc[frame["shop"] == shop, "age"].to_numpy()
        assert part["row"].tolist() == list(range(len(ages)))
        assert ((part["cluster"] == young).to_numpy() == (ages < 45)).all()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--epsilon", "0"), "epsilon must be a finite number above 0, got 0.0"),
        (("--k", "5000"), "--k 5000 clusters of 4000 points in all"),
        (("--k", "many"), "--k must be a whole number or 'auto'"),
        (("--unit", "person", "--epsilon", "1"), "--unit must be 'point' or 'client'"),
        (("--unit", "client", "--epsilon", "1"), "needs --client-points"),
        (("--epsilon", "1", "--split", "1,2"), "--split must be four or six numbers above 0"),
        (("--pareto",), "give the largest"),
        (("--pareto", "--epsilon", "1", "--centers", "c.csv"), "--pareto makes many clusterings: leave out --centers"),
    ],
)
def test_the_command_says_what_is_wrong(words: tuple[str, ...], message: str) -> None:
    assert message in failure(*SMALL, *words)


def test_gaps_filled_from_other_rows_are_not_protected_row_by_row(tmp_path: Path) -> None:
    (tmp_path / "shops.csv").write_text("client,a,b\n" + "".join(f"{i % 3},{i},{i * i % 7 or ''}\n" for i in range(24)))
    points = read_points(str(tmp_path / "shops.csv"), server_points=8, missing="client")
    for unit, refused in (("point", True), ("client", False)):
        method = FedDPKMeans(k=2, privacy=KMeansPrivacy(50.0, unit=unit), client_points=8)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="one row changes others") if refused else nullcontext():
            cluster(method, points, simulate, starts=0)
