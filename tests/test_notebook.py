"""A result in Python: tables, predictions and models that agree with its scores, with a folder and without."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

import unalike as ua
from tests.newcomers.test_file import SHOPS, sales
from unalike.notebook import NotebookWatcher, default_watcher

TABLE = sales(8, 0)
SETTINGS: dict[str, Any] = {**SHOPS, "rounds": 3, "unseen": 2, "model": "mlp"}


@pytest.fixture(scope="module", params=["in memory", "in a folder"])
def result(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ua.Result:
    if request.param == "in memory":
        return ua.run("odpfl", TABLE, hyperparameters={"descriptor": 4, "cohort": 4}, **SETTINGS)
    home = tmp_path_factory.mktemp("shops")
    TABLE.to_csv(home / "shops.csv", index=False)
    ua.run("odpfl", home / "shops.csv", out=home / "run", hyperparameters={"descriptor": 4, "cohort": 4}, **SETTINGS)
    return ua.Result.load(str(home / "run"))


def test_clients_rounds_and_predictions_are_tables_that_agree_with_the_scores(result: ua.Result) -> None:
    seen = result.clients[result.clients["group"] == "seen"]
    assert result.accuracy.seen is not None and len(seen) == 6
    assert seen["score"].mean() == pytest.approx(result.accuracy.seen.mean)
    assert list(result.rounds.index) == [1, 2, 3]
    assert result.rounds["seen"].iloc[-1] == pytest.approx(result.accuracy.seen.mean)
    table = result.predictions
    assert set(table["group"]) == {"seen", "unseen", "unlabeled"}
    right = (table["truth"] == table["prediction"]).groupby([table["client"], table["group"]]).mean()
    for row in result.clients.itertuples():
        assert right[row.client, row.group] == pytest.approx(row.score)
    np.testing.assert_allclose(table[["p_no", "p_yes"]].sum(axis=1), 1)


def test_all_metrics_are_a_table_that_agrees_with_the_scores(result: ua.Result) -> None:
    table = result.metrics
    assert result.accuracy.seen is not None and result.accuracy.unseen is not None
    assert table.loc[("seen", "accuracy"), "mean"] == pytest.approx(result.accuracy.seen.mean)
    assert table.loc[("unseen", "accuracy"), "worst"] == pytest.approx(result.accuracy.unseen.worst)
    assert table.loc[("seen", "AUROC"), "baseline"] == 0.5 and table.loc[("seen", "AUROC"), "clients"] > 0
    assert "accuracy, mean over clients" in repr(result) and "recipe=" not in repr(result)


def test_rows_of_a_table_are_predicted_by_their_index(result: ua.Result) -> None:
    rows = sales(2, 5)
    rows.index = pd.Index([f"row {i}" for i in range(len(rows))])
    shuffled = rows.sample(frac=1, random_state=0)
    trained = result.clients["client"].iloc[0]
    found = result.predict(shuffled.drop(columns=["returned", "shop"]), client=trained)
    assert list(found["id"]) == list(shuffled.index) and set(found["client"]) == {trained}
    again = result.predict(rows.drop(columns="returned"), client=trained).set_index("id").loc[shuffled.index]
    assert list(again["p_yes"]) == pytest.approx(list(found["p_yes"]))
    newcomers = result.predict(shuffled)
    assert list(newcomers["id"]) == list(shuffled.index) and list(newcomers["client"]) == list(shuffled["shop"])


def test_a_newcomer_gets_a_model_that_predicts_and_is_saved(result: ua.Result, tmp_path: Path) -> None:
    rows = sales(1, 5)
    model = result.personalize(rows)
    assert model.name == "s00" and model.sent
    assert repr(model).startswith("PersonalModel of s00: 12 rows, ") and "theta=" not in repr(model)
    assert list(result.predict(rows)["p_yes"]) == pytest.approx(list(result.predict(rows, client=model)["p_yes"]))
    model.save(tmp_path / "s00.safetensors")
    assert (tmp_path / "s00.safetensors").exists()
    with pytest.raises(ua.UserError, match="no training client 's99'"):
        result.predict(rows, client="s99")


def test_a_result_or_its_folder_predicts_and_personalizes_by_a_function(result: ua.Result) -> None:
    rows = sales(1, 5)
    pd.testing.assert_frame_equal(ua.predict(result, rows), result.predict(rows))
    assert ua.personalize(result, rows).name == "s00"
    if result.folder is not None:
        pd.testing.assert_frame_equal(ua.predict(result.folder, rows), result.predict(rows))
        assert ua.personalize(str(result.folder), rows, client="s00").samples == len(rows)


def test_a_notebook_shows_a_result_and_a_plot(result: ua.Result) -> None:
    page = result._repr_html_()
    assert result.accuracy.seen is not None and f"{result.accuracy.seen.mean:.4f}".rstrip("0") in page
    chart = result.plot().to_dict()
    assert {row["line"] for rows in chart["datasets"].values() for row in rows} == {"seen", "unseen", "unlabeled"}


def test_a_model_may_be_a_module() -> None:
    done = ua.run("fedavg", TABLE, **{**SETTINGS, "model": torch.nn.Linear(5, 2)})
    assert done.run.method.model.size == 12
    with pytest.raises(ValueError, match="keeps running statistics"):
        ua.run("fedavg", TABLE, **{**SETTINGS, "model": torch.nn.BatchNorm1d(5)})


def test_a_comparison_gives_results_of_the_same_kind() -> None:
    both = ua.compare("fedavg", "local", data=TABLE, **SETTINGS)
    assert all(isinstance(one, ua.Result) for one in both.results) and len(both["local"].rounds) == 3
    assert "fedavg" in both._repr_html_()


def test_a_notebook_shows_a_comparison_once_and_without_the_signs_of_a_terminal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    both = ua.compare("fedavg", "local", data=TABLE, **SETTINGS)
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    monkeypatch.setenv("FORCE_COLOR", "1")
    page = both._repr_html_()  # Rich would display something of its own, for which IPython is needed
    assert "fedavg" in page and "\x1b" not in page and "\x1b" not in str(both)


def test_progress_is_shown_in_a_notebook_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not isinstance(default_watcher(), NotebookWatcher)
    shown: list[str] = []
    handle = SimpleNamespace(update=lambda content, raw: shown.append(content["text/plain"]))
    python: Any = ModuleType("IPython")
    python.get_ipython = lambda: SimpleNamespace(kernel=object())
    python.display = ModuleType("IPython.display")
    python.display.display = lambda *_, **__: handle
    monkeypatch.setitem(sys.modules, "IPython", python)
    monkeypatch.setitem(sys.modules, "IPython.display", python.display)
    ua.run("fedavg", TABLE, **SETTINGS)
    assert [text.split("  ")[0] for text in shown] == [f"fedavg: round {number} of 3" for number in (1, 2, 3)]
    assert "loss" in shown[-1] and "seen" in shown[-1]
