"""What the columns of a table are: whose a row is, its label, and features of numbers, dates or text."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from unalike.core.lazy import pd
from unalike.core.notes import FLAG
from unalike.data.files.frames import Piece, Pieces
from unalike.data.files.layout import MISSING, ColumnReport, Layout
from unalike.data.source import Array, DataError

DROP = "data.options.drop"
MOST_VALUES = 50  # of a text column
_LOOKS_LIKE_LABELS = {"label", "labels", "target", "targets", "class"}
_LOOKS_LIKE_ID = re.compile(r"(^|[^a-z])(id|nr|no|index|uuid)$", re.IGNORECASE)
_NUMBER = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?")
_COMMA = re.compile(r"[+-]?[0-9]+,[0-9]+")
_DATE = re.compile(r"\d{4}-\d\d-\d\d([ T]\d\d:\d\d(:\d\d(\.\d+)?)?Z?)?")
_TIME = re.compile(r"\d\d?:\d\d(:\d\d(\.\d+)?)?")
_LARGEST = float(np.finfo(np.float32).max)
_DAY_ZERO = np.datetime64("2000-01-01")  # of dates as numbers: days since then


@dataclass(frozen=True)
class Roles:
    """Which column is what; None: there is no such column."""

    client: str | None
    label: str | None
    id: str | None
    epsilon: str | None
    weight: str | None
    features: list[str]
    dropped: list[str]
    ignored: list[str]

    @classmethod
    def of(cls, piece: Piece, layout: Layout) -> Roles:
        """The roles of these columns, refused where one is missing or cannot be meant."""
        name, known, titles = piece.name, layout.known, [str(title) for title in piece.frame.columns]
        required = known is None or layout.known_from == "the schema"

        def find(option: str, default: str = "", must: bool = required) -> str | None:
            wanted = getattr(layout, option)
            if not wanted:
                return default if wanted is None and default in titles else None
            if must:
                _check_there([wanted], option, titles, name)
            return wanted if wanted in titles else None

        client, label = find("client_column", "client"), find("label_column", "y")
        id_, epsilon = find("id_column", must=layout.id_required), find("epsilon_column")
        weight = find("weight_column")
        others = [title for title in titles if title not in (client, label, id_, epsilon, weight)]
        if known is None:
            for option in ("features", "drop", "categorical"):
                _check_there(getattr(layout, option) or (), option, titles, name)
            wanted = others if layout.features is None else layout.features
            features, ignored = [title for title in others if title in wanted and title not in layout.drop], []
            if label is None and layout.label_column is None:
                _check_labels(features, name)
        else:
            indicators = {f"{title}{MISSING}" for title in known}
            features = [title for title in known if title not in indicators]
            ignored = [title for title in others if title not in known and title not in layout.drop]
            _check_known(others, ignored, features, layout, name)
        if not features:
            raise DataError(
                f"{name}: there is no feature column beside {', '.join(titles)}, so there is nothing to learn from; "
                f"add one, or say which column is the client, client_column{FLAG}, and which the label, "
                f"label_column{FLAG} ('' if none is)",
                "data.options.client_column",
                "data.options.label_column",
            )
        dropped = [title for title in others if title not in features and title not in ignored]
        return cls(client, label, id_, epsilon, weight, features, dropped, ignored)


def _check_there(wanted: Sequence[str], option: str, titles: Sequence[str], name: str) -> None:
    lacking = [column for column in wanted if column not in titles]
    if lacking:
        listed = ", ".join(titles[:40]) + (", …" if len(titles) > 40 else "")
        raise DataError(f"{name}: there is no column {lacking[0]!r} ({option}); the columns are {listed}")


def _check_known(
    others: Sequence[str], ignored: Sequence[str], known: Sequence[str], layout: Layout, name: str
) -> None:
    lacking = [column for column in known if column not in others]
    if lacking or (ignored and layout.known_from == "the schema"):  # a newcomer's others are ignored, with a note
        found = [f"{column!r} is missing" for column in lacking] + [f"{column!r} was not there" for column in ignored]
        raise DataError(
            f"{name}: its feature columns must be those of {layout.known_from}, {', '.join(known)}; "
            f"{', '.join(found)}: rename, add or remove {'it' if len(found) == 1 else 'them'} (the order does not "
            "matter)"
        )


def _check_labels(features: Sequence[str], name: str) -> None:
    for column in features:
        if column.lower() in _LOOKS_LIKE_LABELS:
            raise DataError(
                f"{name}: the column {column!r} looks like labels; say label_column={column!r}, or label_column='' "
                f"if it is a feature and there are no labels{FLAG}",
                "data.options.label_column",
            )


def read_number(word: str, layout: Layout) -> float:
    """What a word says as a number: dates are days since the year 2000, times of day are hours; NaN if it is none."""
    plain = word.replace(",", ".") if layout.decimal == "," else word
    if _NUMBER.fullmatch(plain):
        return float(plain)  # whole numbers beyond 64 bits too, which pandas leaves as text
    try:
        if _DATE.fullmatch(word):
            return (pd.Timestamp(word).tz_localize(None) - _DAY_ZERO) / pd.Timedelta(days=1)
        if _TIME.fullmatch(word):
            return pd.Timedelta(word if word.count(":") == 2 else f"{word}:00") / pd.Timedelta(hours=1)
    except ValueError:
        pass  # such as the 31st of June
    return math.nan


@dataclass(frozen=True)
class Cells:
    """What some rows hold in one column."""

    numbers: Array  # [rows] float64; NaN where a value is missing or is no number
    words: pd.Series | None  # trimmed; None: the column came as numbers
    absent: Array  # [rows] bool: where a value is missing

    @classmethod
    def of(cls, column: pd.Series, layout: Layout, text: Collection[str]) -> Cells:
        """``text``: the columns that are read as words whatever they hold."""
        absent: Array = column.isna().to_numpy()
        words: pd.Series | None = None
        if pd.api.types.is_datetime64_any_dtype(column):
            numbers = (column.dt.tz_localize(None) - _DAY_ZERO).dt.total_seconds().to_numpy(np.float64) / 86_400
        elif pd.api.types.is_timedelta64_dtype(column):
            numbers = column.dt.total_seconds().to_numpy(np.float64) / 3_600
        elif pd.api.types.is_numeric_dtype(column):  # truth values are numbers, too
            numbers = column.to_numpy(np.float64, na_value=np.nan)
            absent = absent | np.isin(numbers, [read_number(word, layout) for word in layout.na_values])
            if column.name in text:
                words = pd.Series([f"{one:.0f}" if one.is_integer() else str(one) for one in numbers.tolist()])
        else:
            words = column.astype(str).str.strip()
        if words is not None:
            absent = absent | words.isin(["", *layout.na_values]).to_numpy()
            read = {word: read_number(word, layout) for word in words[~absent].unique()}
            numbers = words.map(read).to_numpy(np.float64)
        return cls(np.where(absent, np.nan, numbers), words, absent)


@dataclass
class Column:
    """What all rows say about a feature column."""

    name: str
    values: Sequence[str] | None = None  # a text's; None: numbers
    rows: int = 0
    missing: int = 0
    first_missing: str = ""  # where it is
    first_word: str = ""  # that is no number: where it is, and what it says
    first_large: str = ""  # a number that float32 cannot hold
    wrong: int = 0  # words that are no numbers
    dates: int = 0
    low: float = math.inf
    high: float = -math.inf
    from_numbers: bool = False  # pandas has read numbers in some piece, so that their words are lost
    words: dict[str, None] = field(default_factory=dict)  # all of them in their order, until there are too many
    distinct: set[float] | None = field(default_factory=set)  # None: not the numbers of a row of ids

    def read(self, piece: Piece, cells: Cells) -> None:
        """Add the rows of a piece."""
        numbers, words, absent = cells.numbers, cells.words, cells.absent
        self.first_missing = self.first_missing or _at(piece, absent)
        self.rows, self.missing = self.rows + len(absent), self.missing + int(absent.sum())
        wrong = np.isnan(numbers) & ~absent
        if words is None:
            self.from_numbers = True
        else:
            different = words[~absent].unique()
            if len(self.words) <= MOST_VALUES:
                self.words |= dict.fromkeys(different)
            self.dates += sum(bool(_DATE.fullmatch(word) or _TIME.fullmatch(word)) for word in different)
            if wrong.any() and not self.wrong:
                self.first_word = f"{_at(piece, wrong)} holds {words.iloc[int(np.argmax(wrong))]!r}"
            self.wrong += int(wrong.sum())
        self.first_large = self.first_large or _at(piece, np.abs(numbers) > _LARGEST)
        found = numbers[~np.isnan(numbers)]
        if len(found):
            self.low, self.high = min(self.low, float(found.min())), max(self.high, float(found.max()))
        if self.distinct is not None and self.rows <= 100_000:
            together = self.distinct | set(found.tolist())
            counts = len(together) == len(self.distinct) + len(found) and bool((found == np.rint(found)).all())
            self.distinct = together if counts else None

    def decide(self, layout: Layout) -> Column:
        """The column as numbers, or as text with its values; refused where it can be neither."""
        known, name = layout.known, self.name
        if self.missing == self.rows and known is None:
            raise DataError(f"the column {name!r} is empty; remove it, or leave it out (drop{FLAG})", DROP)
        if self.missing and layout.missing == "error":
            raise DataError(
                f"the column {name!r} lacks {self.missing} of {self.rows} values, the first in {self.first_missing}; "
                "fill them in, or say missing='drop' (leave such rows out), 'mean' (the mean by which inputs are "
                f"scaled) or 'client' (the mean of the client's own training rows){FLAG}",
                "data.options.missing",
            )
        text = name in layout.categorical if known is None else known[name] is not None
        if not text and not self.wrong and self.first_large:
            raise DataError(
                f"the column {name!r} holds a number that is infinite or too large for float32, the first in "
                f"{self.first_large}"
            )
        if known is not None:
            if not text and self.wrong:
                raise DataError(f"the column {name!r} should hold numbers, but {self.first_word}")
            return replace(self, values=known[name])
        if not text and not self.wrong:
            return self
        with_comma = [word for word in self.words if _COMMA.fullmatch(word)]
        if not text and with_comma and all(_NUMBER.fullmatch(word.replace(",", ".", 1)) for word in self.words):
            raise DataError(
                f"the column {name!r} holds numbers with a comma, such as {with_comma[0]!r}; say decimal=','{FLAG} if "
                "it is the decimal sign, else take it out",
                "data.options.decimal",
            )
        if not text and self.wrong < 0.5 * self.rows:
            raise DataError(
                f"the column {name!r} should hold numbers, but {self.first_word}; if that stands for a missing value, "
                f"say na_values='?'{FLAG}, and if its values are names, say categorical{FLAG}",
                "data.options.na_values",
                "data.options.categorical",
            )
        if len(self.words) > MOST_VALUES:
            raise DataError(
                f"the column {name!r} holds text with more than {MOST_VALUES} different values, e.g. "
                f"{next(iter(self.words))!r}; at most {MOST_VALUES} become features of their own: leave it out "
                f"(drop{FLAG}), say that it names the rows (id_column{FLAG}), or turn it into numbers",
                DROP,
                "data.options.id_column",
            )
        return replace(self, values=sorted(self.words))

    @property
    def looks_like_id(self) -> bool:
        """Whole numbers, all different, in a column that is called an id or counts upwards."""
        if self.values is not None or self.distinct is None or self.dates or self.rows - self.missing < 10:
            return False
        counted = self.high - self.low + 1 == len(self.distinct) == self.rows
        return counted or bool(_LOOKS_LIKE_ID.search(self.name))

    @property
    def report(self) -> ColumnReport:
        if self.values is not None:
            few = ", ".join(self.values[:6]) + (", …" if len(self.values) > 6 else "")
            return ColumnReport(self.name, "feature", f"text with {len(self.values)} values: {few}", self.missing)
        what = "dates and times, as days since 2000 or hours," if self.dates else "numbers"
        said = f"{what} from {self.low:g} to {self.high:g}" if self.rows > self.missing else "nothing"
        return ColumnReport(self.name, "feature", said, self.missing)


def _at(piece: Piece, where: Array) -> str:
    """The first of these rows, as people count them; empty if there is none."""
    if not where.any():
        return ""
    row = f"data row {piece.first + int(np.argmax(where)) + 1}"
    return f"{row} of {piece.name}" if piece.one_of_many else row


def survey(pieces: Pieces, layout: Layout, name: str) -> tuple[Roles, list[Column], set[str]]:
    """The roles of the columns, the features with what they hold, and which columns have to be read as text."""
    text = layout.text
    while True:
        roles: Roles | None = None
        columns: list[Column] = []
        labels: set[bool] = set()  # are they numbers?
        for piece in pieces(text):
            if roles is None:
                roles = Roles.of(piece, layout)
                columns = [Column(title) for title in roles.features]
            for column in columns:
                column.read(piece, Cells.of(piece.frame[column.name], layout, text))
            if roles.label is not None and roles.label in piece.frame:
                label = piece.frame[roles.label].dropna()
                labels |= {pd.api.types.is_numeric_dtype(label)} if len(label) else set()
        if roles is None or not columns or columns[0].rows == 0:
            raise DataError(f"{name}: the table has no rows")
        try:
            decided = [column.decide(layout) for column in columns]
        except DataError as error:
            raise DataError(f"{name}: {error.note.template}", *error.note.keys) from error
        mixed = {column.name for column in decided if column.values is not None and column.from_numbers}
        if roles.label is not None and len(labels) > 1:
            mixed.add(roles.label)
        if mixed <= text:
            return roles, decided, text
        text = text | mixed
