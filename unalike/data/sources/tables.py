"""Table sources: census persons by district or state, and county election results."""

from __future__ import annotations

import numpy as np
from numpy.random import Generator, default_rng

from unalike.core.lazy import pd
from unalike.data.files.archive import open_npz, reading
from unalike.data.source import Array, DataError, Names, Source
from unalike.data.sources.folder import File, locate

ACS_FILE = File(
    "acs-pums/acs_pums_2024_1yr_person16plus_49states.npz",
    "e5a53e6318fa1dadb91a71d2c0779797d17e2bfa227d9d572c770e9c6b0f44b8",
)
ELECTIONS_FILE = File(
    "elections/county_pres_2000_2024.csv.gz", "687ef07035821241e3e68c84f56a5bfb41dec447d598c22ddc93b253a081ff14"
)
YEARS = (2000, 2004, 2008, 2012, 2016, 2020)

_TASKS = ("income", "income-bins", "race", "clusters")
# Class of worker (COW) by which T1 D.7.1 makes its clustering problems.
WORKERS = {"nonprofit": 2, "federal": 5, "self-employed": 6}
_SERVER_SAME, _SERVER_OTHER = 20, 1000
_RACES = [
    "White", "Black", "American Indian", "Alaska Native", "Tribes specified", "Asian", "Pacific Islander", "Other",
    "Two or more",
]  # fmt: skip
# First codes of the Census occupation groups, from managers to military.
_OCCUPATIONS = np.array(
    [10, 500, 800, 1005, 1305, 1600, 2001, 2100, 2205, 2600, 3000, 3601, 3700, 4000, 4200, 4330, 4700, 5000, 6005, 6200,
     6800, 7000, 7700, 9005, 9800, 9920]
)  # fmt: skip


def acs(seed: int, task: str = "income", by: str = "puma", worker: str = "nonprofit") -> Source:
    """US Census persons (ACS PUMS), a client for each district (``by="puma"``) or state (``by="state"``).

    Tasks: ``income`` (above $50,000 or not; persons over 16 who work and earn more than $100, as in folktables'
    ACSIncome), ``income-bins`` (41 bins of $5,000, losses in the first; T1 A.3.2), ``race`` (9 classes; T1 A.3.2; race
    and Hispanic origin are then no features), and ``clusters`` (no labels: 0/1 features of the workers of one class,
    ``worker`` = nonprofit, federal or self-employed, and 20 + 1000 points for the server; T1 D.7.1, which has the
    class of worker among the features too).
    """
    if task not in _TASKS:
        raise DataError(f"acs: task must be one of {', '.join(_TASKS)}, got {task!r}")
    if by not in ("puma", "state"):
        raise DataError(f"acs: by must be 'puma' or 'state', got {by!r}")
    if worker not in WORKERS:
        raise DataError(f"acs: worker must be one of {', '.join(WORKERS)}, got {worker!r}")
    how = "Make it from the Census Bureau's person files (census.gov, ACS PUMS): one integer array for each column."
    path = locate(ACS_FILE, "acs", how)
    with open_npz(path, ACS_FILE.sha256) as archive:
        data = {key: archive[key] for key in archive.files}
    if task in ("income", "clusters"):
        keep = (data["AGEP"] > 16) & (data["PINCP"] > 100) & (data["WKHP"] > 0)
        data = {key: column[keep] for key, column in data.items()}
    if task == "clusters":
        return _acs_clusters(data, by, WORKERS[worker], default_rng([seed, 7001]))
    client, names = _places(data, by)
    if task == "race":
        y, class_names = data["RAC1P"].astype(np.int64) - 1, _RACES
    elif task == "income":
        y, class_names = (data["PINCP"] > 50_000).astype(np.int64), ["up to $50,000", "above $50,000"]
    else:
        y = np.clip(data["PINCP"] // 5_000, 0, 40).astype(np.int64)
        class_names = [f"${5 * i},000" for i in range(40)] + ["$200,000 and more"]
    return Source(
        name=f"acs:{task}",
        kind="features",
        x=_compact(data, with_race=task != "race"),
        y=y,
        classes=len(class_names),
        class_names=class_names,
        client=client,
        client_names=names,
        columns=_columns(with_race=task != "race"),
    )


def _places(data: dict[str, Array], by: str) -> tuple[Array, Names]:
    state = data["STATE"].astype(np.int64)
    code = state if by == "state" else state * 100_000 + data["PUMA"]
    unique, client = np.unique(code, return_inverse=True)
    text = [f"{v:02d}" if by == "state" else f"{v // 100_000:02d}-{v % 100_000:05d}" for v in unique]
    return client.astype(np.int64), Names(np.array(text))


def _one_hot(column: Array, values: Array) -> Array:
    """0/1 columns, one for each of ``values``; a missing value has none."""
    equal: Array = column[:, None] == values[None]
    return equal.astype(np.uint8)


def _compact(data: dict[str, Array], with_race: bool) -> Array:
    """Age, hours, schooling as numbers and the rest as 0/1 columns; all fit into a byte."""
    group = np.searchsorted(_OCCUPATIONS, data["OCCP"], side="right")  # 0: no occupation
    numbers = np.stack([data["AGEP"], data["WKHP"], data["SCHL"]], axis=1).astype(np.uint8)
    columns = [
        numbers,
        _one_hot(data["COW"], np.arange(1, 10)),
        _one_hot(data["MAR"], np.arange(1, 6)),
        (data["SEX"] == 2).astype(np.uint8)[:, None],
        _one_hot(data["CIT"], np.arange(1, 6)),
        _one_hot(group, np.arange(1, len(_OCCUPATIONS) + 1)),
    ]
    if with_race:
        columns += [_one_hot(data["RAC1P"], np.arange(1, 10)), (data["HISP"] > 1).astype(np.uint8)[:, None]]
    return np.concatenate(columns, axis=1)


def _columns(with_race: bool) -> dict[str, list[str] | None]:
    """The columns of ``_compact``, by name."""
    codes = {"worker": range(1, 10), "marital": range(1, 6), "sex": None, "citizenship": range(1, 6)}
    named: dict[str, list[str] | None] = {"age": None, "hours": None, "schooling": None}
    named |= {name: None if of is None else [str(code) for code in of] for name, of in codes.items()}
    named["occupation"] = [str(first) for first in _OCCUPATIONS]
    return named | ({"race": list(_RACES), "hispanic": None} if with_race else {})


def _acs_clusters(data: dict[str, Array], by: str, worker: int, rng: Generator) -> Source:
    categories = {key: np.unique(data[key]) for key in ("COW", "SCHL", "MAR", "OCCP", "SEX", "RAC1P", "CIT")}
    same = np.flatnonzero(data["COW"] == worker)
    given = rng.choice(same, _SERVER_SAME, replace=False)
    other = rng.choice(np.flatnonzero(data["COW"] != worker), _SERVER_OTHER, replace=False)
    clients_rows = np.setdiff1d(same, given)  # the server's own points are nobody else's

    def binary(rows: Array) -> Array:
        return np.concatenate([_one_hot(data[key][rows], values) for key, values in categories.items()], axis=1)

    client, names = _places({key: data[key][clients_rows] for key in ("STATE", "PUMA")}, by)
    server = binary(np.concatenate([given, other])).astype(np.float32)
    return Source(
        name="acs:clusters",
        kind="features",
        x=binary(clients_rows),
        client=client,
        client_names=names,
        normalize="none",
        shared={"server": server},
        whole=True,
    )


def elections(test_year: int | None = None) -> Source:
    """US counties, the winner of six presidential elections each (1: Republican), in the order of years (P3 §4).

    A row's label is the Republican share of the votes for the two parties: the tendency behind the winner. Only
    counties with all of 2000 … 2020. ``test_year`` makes that election the test row of every county.
    """
    if test_year is not None and test_year not in YEARS:
        raise DataError(f"elections: test_year must be one of {', '.join(map(str, YEARS))}, got {test_year!r}")
    how = (
        "Make it from the county returns of the MIT Election Data and Science Lab (doi.org/10.7910/DVN/VOQCHQ), with "
        "columns year, state_abb, county_name, county_fips, votes_dem, votes_rep, votes_all."
    )
    path = locate(ELECTIONS_FILE, "elections", how)
    with reading(path, ELECTIONS_FILE.sha256):
        frame = pd.read_csv(path)
        frame = frame[frame["year"].isin(YEARS)].drop_duplicates(["year", "county_fips"])
        frame = frame[frame.groupby("county_fips")["year"].transform("size") == len(YEARS)]
        frame = frame.sort_values(["county_fips", "year"])
        won = (frame["votes_rep"] > frame["votes_dem"]).to_numpy(dtype=np.float32)
        share = (frame["votes_rep"] / (frame["votes_rep"] + frame["votes_dem"])).to_numpy(dtype=np.float32)
        first = frame.drop_duplicates("county_fips")
        names = (first["county_name"] + ", " + first["state_abb"]).to_numpy(dtype=str)
        year = frame["year"].to_numpy(dtype=np.int64)
    return Source(
        name="elections",
        kind="features",
        x=won[:, None],
        y=share,
        client=np.repeat(np.arange(len(first)), len(YEARS)),
        client_names=Names(names),
        is_test=None if test_year is None else year == test_year,
        normalize="none",
        shared={"years": np.array(YEARS)},
        whole=True,
    )
