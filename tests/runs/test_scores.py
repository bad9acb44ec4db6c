"""By what a run is scored, what it leaves of each row, and how a round is chosen on validation rows."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from tests.runs.helpers import SMALL
from unalike.api import UserError, compare, resume, run
from unalike.commands.main import app
from unalike.core.client import Clients
from unalike.data import load
from unalike.data.arrays import array_source
from unalike.learn.metrics import best_threshold, temperature
from unalike.runs import checkpoint, predictions
from unalike.runs.finished import FinishedRun
from unalike.runs.folder import read_metrics
from unalike.runs.measure import headline
from unalike.runs.watcher import Watcher

runner = CliRunner()
CLIENTS: dict[str, Any] = {"partition": "iid", "clients": 6, "rounds": 4, "cohort": 3, "eval_every": 1, "threads": 1}


def rare(rows: int = 600) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    random = np.random.default_rng(0)
    x = random.normal(size=(rows, 3)).astype(np.float32)
    y = (x[:, 0] + 0.3 * random.normal(size=rows) > 2).astype(np.int64)
    return x, y, np.arange(rows) % 6


def test_models_are_not_made_for_nothing_where_there_are_no_rows_to_score(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("unalike.runs.measure.evaluate", None)
    result = run("fedavg-finetune", "digits", clients=4, rounds=1, test=0.0, unseen=0, model="logistic")
    assert result.accuracy.seen is None


def test_predictions_of_test_rows_give_the_score_of_the_run(tmp_path: Path) -> None:
    result = run("fedavg", out=tmp_path / "run", **SMALL)
    with (tmp_path / "run" / "simulation" / "predictions.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["group"] == "seen"]
    clients = {row["client"] for row in rows}
    right = [np.mean([row["truth"] == row["prediction"] for row in rows if row["client"] == one]) for one in clients]
    assert result.accuracy.seen is not None and result.accuracy.seen.mean == pytest.approx(np.mean(right))
    for row in rows:
        chances = {name.removeprefix("p_"): float(value) for name, value in row.items() if name.startswith("p_")}
        assert max(chances, key=lambda name: chances[name]) == row["prediction"]
        assert sum(chances.values()) == pytest.approx(1, abs=1e-4)
    found, _ = predictions.metrics(predictions.read(tmp_path / "run"))
    assert found["seen"]["accuracy"].mean == pytest.approx(np.mean(right))
    assert set(found) == {"seen", "unseen", "unlabeled"}


def test_scores_are_those_of_the_saved_models_on_raw_rows_for_seen_unseen_and_unlabeled(tmp_path: Path) -> None:
    """Recomputed in NumPy of what lies in the folder: θ of who trained, θ trained from μ by who comes later, μ itself.

    AdaPeD's newcomers lose most of their accuracy where they are taken for others, or served without what they bring.
    """
    steps, lr = 6, 0.1
    local = {"steps": 2, "batch": None, "lr": lr, "weight_decay": 0.01}
    result = run(
        "adaped", out=tmp_path, **{**SMALL, "rounds": 3}, hyperparameters={"local": local, "newcomer_rounds": 3}
    )
    finished = FinishedRun.open(tmp_path)
    schema, population = finished.schema, finished.prepared.population
    assert schema.shift is not None and schema.scale is not None
    shift, scale = schema.shift.double().numpy(), schema.scale.double().numpy()
    kept = load_file(tmp_path / "clients" / "3.safetensors")
    own = dict(zip(kept["theta.ids"].tolist(), kept["theta.values"].double().numpy(), strict=True))
    mu, psi = finished.state.mu.double().numpy(), float(finished.state.psi)

    def rows(part: Clients, client: int) -> tuple[np.ndarray, np.ndarray]:
        x, y = part.rows(client)
        assert y is not None
        return ((x.double().numpy() - shift) * scale).reshape(len(y), -1), y.numpy()

    def chances(theta: np.ndarray, x: np.ndarray) -> np.ndarray:
        powers = np.exp(x @ theta[:640].reshape(10, 64).T + theta[640:])
        return np.asarray(powers / powers.sum(1, keepdims=True))

    def joined(client: int) -> np.ndarray:
        theta, (x, y) = mu, rows(population.train, client)
        for _ in range(steps):
            q = chances(theta, x)
            away = (q - np.eye(10)[y] + (q - chances(mu, x)) / (2 * psi)) / len(y)
            theta = theta - lr * (np.concatenate([(away.T @ x).ravel(), away.sum(0)]) + 0.01 * theta)
        return theta

    frame = pd.read_csv(tmp_path / "simulation" / "scores.csv")
    assert 0 < len(own) < 9 and frame["group"].tolist() == ["seen"] * 9 + ["unseen"] * 3 + ["unlabeled"] * 3
    for line in frame.itertuples():
        client = int(line.client)
        theta = mu if line.group == "unlabeled" else own[client] if client in own else joined(client)
        x, y = rows(population.test, client)
        assert line.score == pytest.approx((chances(theta, x).argmax(1) == y).mean(), abs=1e-6)
        assert line.loss == pytest.approx(-np.log(chances(theta, x)[np.arange(len(y)), y]).mean(), rel=1e-3)
    means = frame.groupby("group")["score"].mean()
    for group, mean in means.items():
        assert getattr(result.accuracy, str(group)).mean == pytest.approx(mean)
    assert means["unseen"] - means["unlabeled"] > 0.4  # else one could stand for the other


def test_no_cell_of_the_predictions_is_a_formula_and_the_metrics_are_still_those_of_the_run(tmp_path: Path) -> None:
    x, _, client = rare()
    y = (x[:, 0] > 0).astype(int)
    pd.DataFrame(
        {"a": x[:, 0], "b": x[:, 1], "shop": [f"=shop{one}" for one in client], "kind": np.array(["+no", "@yes"])[y]}
    ).to_csv(tmp_path / "shops.csv", index=False)
    own = {"data": str(tmp_path / "shops.csv"), "client_column": "shop", "label_column": "kind"}
    result = run("fedavg", out=tmp_path / "run", rounds=2, threads=1, **own)
    for name in ("predictions.csv", "baseline.csv"):
        with (tmp_path / "run" / "simulation" / name).open() as file:
            cells = {cell for row in csv.reader(file) for cell in row}
        assert "'=shop0" in cells and not any(cell.startswith(("=", "@", "+")) for cell in cells)
    found, _ = predictions.metrics(predictions.read(tmp_path / "run"))
    assert result.accuracy.seen is not None
    assert found["seen"]["accuracy"].mean == pytest.approx(result.accuracy.seen.mean)


def test_all_metrics_are_shown_by_a_command(tmp_path: Path) -> None:
    compare("fedavg", "local", out=tmp_path / "both", **SMALL)
    words = [str(tmp_path / "both" / "local"), "--against", str(tmp_path / "both" / "fedavg")]
    shown = runner.invoke(app, ["metrics", *words])
    assert shown.exit_code == 0 and "AUROC" in shown.stdout and "clients gain against" in shown.stdout
    told = json.loads(runner.invoke(app, ["metrics", *words, "--json"]).stdout)
    assert sum(told["against"]["seen"].values()) == told["metrics"]["seen"]["accuracy"]["clients"]


def test_a_temperature_and_a_threshold_are_chosen_on_validation_rows_alone(tmp_path: Path) -> None:
    run("fedavg", data=rare(), out=tmp_path / "run", validation=0.3, lr=1.0, **CLIENTS)
    plain, nothing = predictions.metrics(predictions.read(tmp_path / "run"))
    better, chosen = predictions.metrics(predictions.read(tmp_path / "run"), calibrate=True)
    assert nothing == {} and set(chosen) == {"temperature", "threshold"} and "validation" not in plain
    rows, _ = predictions.read(tmp_path / "run")["validation"]
    assert chosen["temperature"] == pytest.approx(temperature(rows))
    scaled = replace(rows, outputs=rows.outputs / chosen["temperature"])
    assert chosen["threshold"] == pytest.approx(best_threshold(scaled))
    assert better["seen"]["AUROC"].mean == pytest.approx(plain["seen"]["AUROC"].mean)  # the order stays
    assert better["seen"]["log loss"].mean != plain["seen"]["log loss"].mean
    run("fedavg", out=tmp_path / "none", **SMALL)
    with pytest.raises(UserError, match="for validation rows; train with"):
        predictions.metrics(predictions.read(tmp_path / "none"), calibrate=True)


def test_rare_classes_are_not_scored_by_accuracy_unless_somebody_asks() -> None:
    said: list[str] = []

    class Listening(Watcher):
        def note(self, text: str) -> None:
            said.append(text)

    result = run("fedavg", data=rare(), watcher=Listening(), **CLIENTS)
    assert result.metric == "AUROC" and "so accuracy says little; scored by AUROC" in said[0]
    assert run("fedavg", data=rare(), metric="accuracy", **CLIENTS).metric == "accuracy"
    population = load(array_source(*rare()), partition="natural")
    assert headline(population, None, private=False)[0].name == "AUROC"
    assert headline(population, None, private=True)[0].name == "accuracy"  # nobody looks at labels for this choice
    with pytest.raises(UserError, match="metric = 'rmse': for 2 classes there are accuracy"):
        run("fedavg", data=rare(), metric="rmse", **CLIENTS)


def test_an_error_is_shown_as_a_positive_number() -> None:
    x, _, client = rare()
    result = run("fedavg", data=(x, x[:, 0] * 0.1, client), model="logistic", lr=0.01, **CLIENTS)
    assert result.metric == "negative RMSE" and result.accuracy.seen is not None and result.accuracy.seen.mean < 0
    shown = str(result)
    assert "RMSE, mean over clients" in shown and "negative" not in shown
    assert f"{-result.accuracy.seen.mean:.4g}" in shown


def test_the_best_round_is_chosen_on_validation_rows_and_kept_through_a_resume(tmp_path: Path) -> None:
    wanted: dict[str, Any] = {
        **CLIENTS,
        "data": rare(),
        "rounds": 6,
        "validation": 0.3,
        "metric": "log_loss",
        "lr": 0.5,
    }
    whole = run("fedavg-finetune", out=tmp_path / "whole", select="best", **wanted)
    scores = [record["validation"] for record in read_metrics(tmp_path / "whole" / "metrics.jsonl")]
    assert whole.selected == 1 + int(np.argmax(scores)) and whole.validation == pytest.approx(max(scores), rel=1e-5)
    assert f"the models of round {whole.selected}" in str(whole)
    shorter = {**wanted, "rounds": whole.selected}
    alone = run("fedavg-finetune", out=tmp_path / "alone", **shorter)
    ours, theirs = (checkpoint.load(tmp_path / name) for name in ("whole", "alone"))
    assert ours is not None and theirs is not None
    assert all(torch.equal(ours.state[name], theirs.state[name]) for name in theirs.state)
    assert alone.accuracy.seen == whole.accuracy.seen and alone.selected is None
    (tmp_path / "whole" / "result.json").unlink()
    assert resume(tmp_path / "whole", data=wanted["data"]).selected == whole.selected


def test_a_run_personalizes_in_the_round_that_it_selected(tmp_path: Path) -> None:
    wanted = {**SMALL, "eval_every": 1, "validation": 0.3, "lr": 3.0}
    whole = run("fedavg-finetune", select="best", out=tmp_path / "whole", **wanted)
    assert whole.selected is not None and whole.selected < SMALL["rounds"]
    alone = run("fedavg-finetune", out=tmp_path / "alone", **{**wanted, "rounds": whole.selected})
    opened = FinishedRun.open(tmp_path / "whole")
    assert opened.round == whole.selected and opened.notes == []
    pd.testing.assert_frame_equal(whole.predictions, alone.predictions)
    in_memory = run("fedavg-finetune", select="best", **wanted)
    pd.testing.assert_frame_equal(in_memory.predictions, alone.predictions)


def test_a_choice_needs_validation_rows_and_no_promise_of_privacy() -> None:
    with pytest.raises(UserError, match=r"set some aside with validation = 0\.2"):
        run("fedavg", select="best", **SMALL)
    with pytest.raises(UserError, match="no ε counts that"):
        run("fedavg", select="best", validation=0.2, clip=1.0, noise_multiplier=1.0, **SMALL)
    shown = runner.invoke(app, ["run", "fedavg", "--clients=4", "--rounds=1", "--select=best"])
    assert "(--validation)" in shown.stderr and shown.exit_code == 1


def test_a_method_that_diverges_has_a_row_that_says_so(tmp_path: Path) -> None:
    entries = "".join(
        f'[[compare]]\nlabel = "{label}"\nmethod = "fedavg"\nhyperparameters.local.lr = {lr}\n'
        for label, lr in (("wild", 1e30), ("tame", 0.1))
    )
    (tmp_path / "two.toml").write_text(f"rounds = 2\nmodel.name = 'mlp'\n[data]\nclients = 6\n{entries}")
    both = compare(str(tmp_path / "two.toml"), out=tmp_path / "both")
    gone = both["wild"]
    assert "training diverged in round 1" in gone.diverged and gone.accuracy.seen is None and not both["tame"].diverged
    assert "wild: training diverged" in " ".join(str(both).split())
    assert (tmp_path / "both" / "report.html").exists()
    with pytest.raises(UserError, match="training diverged"):
        compare("fedavg", "local", **{**SMALL, "model": "mlp", "lr": 1e30})


def test_two_clients_both_train_unless_somebody_says_otherwise() -> None:
    x, y, client = rare()
    assert run("fedavg", data=(x, y, client % 2), rounds=1).unseen == 0
    assert run("fedavg", data=(x, y, client % 2), rounds=1, unseen=1).unseen == 1
    assert run("fedavg", data=(x, y, client), rounds=1).unseen == 1
