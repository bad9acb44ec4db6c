"""A result in Python and notebooks: its tables, models, predictions and plots, and progress while it is made."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ConfigDict

from unalike.core.lazy import pd
from unalike.newcomers.client_model import client_model
from unalike.newcomers.file import Newcomer, NewcomerFile
from unalike.newcomers.model import PersonalModel
from unalike.newcomers.predict import Predicted, as_frame, predict_client
from unalike.newcomers.serve import serve
from unalike.runs import folder as files
from unalike.runs import predictions
from unalike.runs import result as runs
from unalike.runs.errors import UserError
from unalike.runs.finished import FinishedRun
from unalike.runs.result import GROUPS
from unalike.runs.watcher import Watcher
from unalike.runs.words import stated

if TYPE_CHECKING:
    import altair as alt


class Result(runs.Result):
    """What a run came to. Beside its scores it has tables, models, predictions and a plot of the run's clients.

    >>> result = unalike.run("pefll", data=frame, client_column="shop", label_column="returned")
    >>> result.clients, result.rounds, result.predictions  # tables of pandas
    >>> result.predict(new_rows, client="Berlin")  # by the model of a client that took part in training
    >>> result.predict(new_rows)  # every client of the table is a newcomer, and gets a model of its own
    >>> result.personalize(new_rows).save("berlin.safetensors")
    """

    model_config = ConfigDict(ignored_types=(cached_property,))

    @classmethod
    def of(cls, plain: runs.Result) -> Result:
        return cls.model_construct(**plain.__dict__)

    @cached_property
    def run(self) -> FinishedRun:
        """The run, opened to serve clients."""
        if self.memory is not None:
            finished: FinishedRun = self.memory.run
            return finished
        if self.folder is None:
            raise UserError("nothing of this run was kept: give it a folder, run(..., out=FOLDER)")
        return FinishedRun.open(self.folder)

    @cached_property
    def rounds(self) -> pd.DataFrame:
        """A row for each round: loss, bytes, ε, seconds, and the mean score of each group where it was measured."""
        if self.memory is not None:
            records = self.memory.rounds
        else:
            records = [] if self.folder is None else files.read_rounds(self.folder)
        lines = []
        for record in records:
            scores = {group: (record.get(group) or {}).get("mean") for group in GROUPS}
            plain = {name: value for name, value in record.items() if not isinstance(value, Mapping)}
            lines.append({**plain, **scores})
        return pd.DataFrame(lines).set_index("round") if lines else pd.DataFrame()

    @cached_property
    def clients(self) -> pd.DataFrame:
        """A row for each client and group: numbers of training and test rows, score and loss."""
        if self.memory is not None:
            return pd.DataFrame(self.memory.clients)
        if self.folder is None or not (self.folder / files.SCORES).exists():
            return pd.DataFrame()
        return pd.read_csv(self.folder / files.SCORES, dtype={"client": str})

    @cached_property
    def predictions(self) -> pd.DataFrame:
        """A row for each test and validation row: client, group, label (truth), prediction and probabilities."""
        if self.memory is not None:
            return pd.DataFrame(self.memory.predictions)
        return pd.DataFrame() if self.folder is None else predictions.table(self.folder)

    @cached_property
    def metrics(self) -> pd.DataFrame:
        """A row for each group and metric: mean over clients with its interval, 10th percentile, worst and baseline."""
        if self.memory is not None:
            found = predictions.grouped(self.memory.predictions, self.memory.baseline)
        elif self.folder is not None:
            found = predictions.read(self.folder)
        else:
            raise UserError("nothing of this run was kept: give it a folder, run(..., out=FOLDER)")
        by_group, _ = predictions.metrics(found)
        lines = [
            {"group": group, "metric": name, **asdict(one)}
            for group, all_ in by_group.items()
            for name, one in all_.items()
        ]
        return pd.DataFrame(lines).set_index(["group", "metric"])

    def predict(self, data: Any, *, client: str | PersonalModel | None = None, **options: Any) -> pd.DataFrame:
        """Predict the rows of a table of pandas, or of a file: a line for each, called by its index.

        - ``client``: a client that took part in training, or a model that ``personalize`` gave: its model predicts all
          rows. Without it, every client of the data is a newcomer and gets a model of its own, made with the labels
          that the data have, if any.
        - ``options``: how the data are laid out, where that is not as in training: ``client_column``, ``label_column``,
          ``id_column``, ``missing``; and ``unlabeled=True``, so that labels do not make the models.
        """
        source, unlabeled = self._read(data, options)
        if client is None:
            return as_frame(
                [predict_client(source, name, unlabeled=unlabeled) for name in source.clients], self.run.schema
            )
        model = client_model(self.run, client) if isinstance(client, str) else client
        answered = []
        for name in source.clients:
            newcomer = source.newcomer(name, unlabeled=True)
            answered.append(Predicted(newcomer, model, model.answers(newcomer.clients)))
        return as_frame(answered, self.run.schema).assign(client=model.name)

    def personalize(
        self,
        data: Any,
        *,
        client: str | None = None,
        epsilon: float | None = None,
        delta: float | None = None,
        classes: Sequence[str] | None = None,
        **options: Any,
    ) -> PersonalModel:
        """The model of a newcomer with these rows; of several clients in them ``client`` is the one.

        ``epsilon`` and ``delta`` protect each row; ``classes``: those that the newcomer says it has. ``options`` as of
        ``predict``, which takes the model as ``client`` for more rows; ``save`` and ``save_onnx`` write it.
        """
        source, unlabeled = self._read(data, options)
        newcomer: Newcomer = source.newcomer(source.only(client), unlabeled=unlabeled)
        return serve(
            self.run,
            newcomer.clients,
            newcomer.name,
            epsilon=epsilon,
            delta=delta,
            classes=classes,
            left_out=newcomer.left_out,
            names=newcomer.row_names,
            expect=False,
        )

    def _read(self, data: Any, options: Mapping[str, Any]) -> tuple[NewcomerFile, bool]:
        how = dict(options)
        id_column, unlabeled = how.pop("id_column", None), bool(how.pop("unlabeled", False))
        given = Path(data) if isinstance(data, str | Path) else data
        if not isinstance(given, Path | pd.DataFrame):
            given = given.to_pandas() if hasattr(given, "to_pandas") else pd.DataFrame(given)
        return NewcomerFile.read(self.run, given, how, id_column=id_column), unlabeled

    def plot(self) -> alt.LayerChart:
        """The mean score of each group of clients over the rounds, as a chart of Altair."""
        from unalike.report.figures import Axis, Line, lines

        shown = []
        for number, group in enumerate(GROUPS):
            points = self.rounds[group].dropna() if group in self.rounds else pd.Series(dtype=float)
            if len(points):
                pairs = list(zip(points.index.astype(float), points.astype(float), strict=True))
                shown.append(Line(number, group, pairs, [f"{group}, round {x:g}: {y:.4g}" for x, y in pairs]))
        percent = "~%" if self.metric == "accuracy" else "~g"
        return lines(shown, Axis("round", ",d", whole=True), Axis(self.metric, percent), legend=True)

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        rows = {}
        for group in GROUPS:
            if (one := self.accuracy.of(group)) is not None:
                rows[group] = {"mean": one.mean, "10th percentile": one.p10, "clients": one.scored}
        privacy = stated(self.privacy.epsilon, self.privacy.noise)
        about = pd.DataFrame([{"method": self.label, "data": self.data, "metric": self.metric, "ε": privacy}])
        scores = pd.DataFrame.from_dict(rows, orient="index").round(4)
        return str(about.to_html(index=False)) + str(scores.to_html())


class NotebookWatcher(Watcher):
    """Shows a line about the last round in a notebook's cell."""

    def __init__(self) -> None:
        self._label, self._rounds, self._shown = "", 0, None

    def begin(self, label: str, rounds: int, done: int, metric: str) -> None:
        from IPython.display import display  # type: ignore[import-not-found]  # it is there in a notebook

        self._label, self._rounds = label, rounds
        self._shown = display({"text/plain": f"{label}: {done} of {rounds} rounds"}, raw=True, display_id=True)

    def round(self, record: Mapping[str, Any]) -> None:
        scores = [f"{group} {record[group]['mean']:.3f}" for group in GROUPS if record.get(group)]
        loss = [] if record.get("loss") is None else [f"loss {record['loss']:.3g}"]
        text = f"{self._label}: round {record['round']} of {self._rounds}  {'  '.join([*loss, *scores])}"
        if self._shown is not None:
            self._shown.update({"text/plain": text}, raw=True)

    def note(self, text: str) -> None:
        print(text)


def default_watcher() -> Watcher:
    """One that shows progress where this is a notebook, else a silent one."""
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    return NotebookWatcher() if shell is not None and hasattr(shell, "kernel") else Watcher()
