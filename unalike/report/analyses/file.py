"""``simulation/analyses.json``: what ``unalike analyse`` found, as plain values that a report is made from.

A run folder may come from somebody else, so every length and every number is bounded when the file is read.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, NamedTuple

from pydantic import AfterValidator, BaseModel, Field, ValidationError

from unalike.runs import folder
from unalike.runs.errors import UserError

MOST_CLIENTS = 1000  # of a map: more dots cannot be told apart, and t-SNE takes long
MOST_POINTS = 200  # of a curve
MOST_LETTERS = 1000  # of a name or a reason
MOST_BYTES = 8_000_000

PAPERS = "Scott 2026: his thesis (PeFLL is its chapter 4); Amosy et al. 2022: Amosy, Eyal and Chechik, ODPFL-HN"
Key = Literal["map", "correlation", "same_classes", "label_mask", "alpha", "rotation", "blur", "shift", "size", "bytes"]


class Analysis(NamedTuple):
    """What the table and the report call an analysis, and where it is in the papers."""

    name: str
    figure: str


ANALYSES: dict[Key, Analysis] = {
    "map": Analysis("map of descriptors", "Amosy et al. 2022, Fig. 7, Scott 2026, Fig. 5.1"),
    "correlation": Analysis("rank correlation", "Scott 2026, Fig. 4.1"),
    "same_classes": Analysis("clients with the same classes", "Scott 2026, Table 4.1"),
    "label_mask": Analysis("absent classes ruled out", "Scott 2026, Table B.4"),
    "alpha": Analysis("other class shares", "Scott 2026, Fig. B.1"),
    "rotation": Analysis("turned images", "Amosy et al. 2022, Fig. 4"),
    "blur": Analysis("blurred images", "Amosy et al. 2022, Fig. 4"),
    "shift": Analysis("label shift", "Amosy et al. 2022, Fig. 3"),
    "size": Analysis("number of samples", "Amosy et al. 2022, Fig. 5"),
    "bytes": Analysis("bytes sent", "Scott 2026, Fig. B.5"),
}

# A chart has to place every number.
Finite = Annotated[float, Field(ge=-1e30, le=1e30, allow_inf_nan=False)]
NotNegative = Annotated[Finite, Field(ge=0)]
Positive = Annotated[Finite, Field(gt=0)]
Probability = Annotated[Finite, Field(gt=0, lt=1)]
Coefficient = Annotated[Finite, Field(ge=-1, le=1)]
Count = Annotated[int, Field(ge=0, le=10**12)]
Words = Annotated[str, Field(max_length=MOST_LETTERS)]
Spot = tuple[Finite, Finite]


class CurvePoint(BaseModel):
    """One place of a curve: the mean score over newcomers, with its standard error (None: of a single newcomer)."""

    at: NotNegative
    mean: Finite
    error: NotNegative | None
    delta: Probability | None = None  # of the newcomers' privacy, where they have any


def _above_zero(points: list[CurvePoint]) -> list[CurvePoint]:
    if any(point.at == 0 for point in points):
        raise ValueError("at = 0, but a logarithmic axis has no 0")
    return points


Curve = Annotated[list[CurvePoint], Field(max_length=MOST_POINTS)]
CurveAboveZero = Annotated[Curve, AfterValidator(_above_zero)]


class AtEpsilon(BaseModel):
    """Scores over a newcomer's number of samples, its descriptor protected by ε (None: no noise)."""

    epsilon: Positive | None
    points: CurveAboveZero

    @property
    def label(self) -> str:
        return "no noise" if self.epsilon is None else f"ε = {self.epsilon:g}"

    @property
    def delta_label(self) -> str:
        """δ, which falls with the number of samples; empty where there is no noise."""
        deltas = [point.delta for point in self.points if point.delta is not None]
        if not deltas:
            return ""
        low, high = f"{min(deltas):.2g}", f"{max(deltas):.2g}"
        return f"δ = {high}" if low == high else f"δ = {high} to {low}"


class Place(BaseModel):
    """Where a client is on the two maps of descriptors."""

    name: Words
    group: Literal["seen", "unseen"]
    main_class: Words | None
    rotation: Finite | None = None  # degrees, where clients turn their images (T1 Fig. 5.1)
    pca: Spot
    t_sne: Spot


class Correlation(BaseModel):
    """Of descriptor distances and label distances, over so many unseen clients; ``untrained``: before training."""

    mean: Coefficient
    low: Coefficient
    high: Coefficient
    clients: Count
    untrained: Coefficient | None = None


class SameClasses(BaseModel):
    """Mean scores of unseen clients, beside those of training clients that have just the same classes.

    ``seen``: of those training clients, where each unseen client's count as one. ``novel``: of unseen clients whose set
    of classes no training client has. ``twins`` of training clients (``figures.twins``), and the clients ``twins_of``.
    """

    unseen: Finite
    seen: Finite
    clients: Count
    novel: Finite | None
    novel_clients: Count
    twins: Finite | None = None
    twins_of: Finite | None = None
    pairs: Count = 0


class LabelMask(BaseModel):
    """Mean scores of seen and unseen clients, when they choose among all classes and among their own alone."""

    seen: Finite
    unseen: Finite
    seen_masked: Finite
    unseen_masked: Finite


class AtBytes(BaseModel):
    """Mean scores when so many gigabytes had been sent, both ways together."""

    gigabytes: NotNegative
    seen: Finite | None
    unseen: Finite | None


class Analyses(BaseModel):
    """``analyses.json``. An analysis that does not apply is empty, and ``left_out`` says why."""

    round: Count
    quick: bool
    map: Annotated[list[Place], Field(max_length=MOST_CLIENTS)] = []
    correlation: Correlation | None = None
    same_classes: SameClasses | None = None
    label_mask: LabelMask | None = None
    alpha: CurveAboveZero = []
    rotation: Curve = []
    blur: Curve = []
    shift: Curve = []
    size: Annotated[list[AtEpsilon], Field(max_length=10)] = []
    bytes: Annotated[list[AtBytes], Field(max_length=MOST_POINTS)] = []
    left_out: dict[Key, Words] = {}


def write_analyses(run: Path, found: Analyses) -> None:
    (run / folder.ANALYSES).parent.mkdir(exist_ok=True)
    folder.write_json(run / folder.ANALYSES, found.model_dump())


def read_analyses(run: Path) -> Analyses | None:
    """What the run folder holds; None if the run was not analysed."""
    file = run / folder.ANALYSES
    try:
        if file.stat().st_size <= MOST_BYTES:
            return Analyses.model_validate_json(file.read_bytes())
        fault = f" has more than {MOST_BYTES:,} bytes, which no analysis needs"
    except FileNotFoundError:
        return None
    except OSError as error:
        fault = f" cannot be read: {error.strerror}"
    except ValidationError as error:
        fault = f": {first_fault(error)}"
    raise UserError(f"{file}{fault}; remove it, then make it anew with: unalike analyse {run}")


def first_fault(error: ValidationError) -> str:
    """The first of what is wrong with values from outside: where, and what."""
    detail = error.errors()[0]
    where = ".".join(map(str, detail["loc"]))
    return f"{where}: {detail['msg']}" if where else detail["msg"]
