"""The corpus: files as people have them. Python and the page must read each to the same numbers, or both refuse it.

Some are written out because of what they hold, and the others are made from a seed: a right table, in which cells,
columns and the way it is written are changed as people change them.
"""

from __future__ import annotations

import csv
import io
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

COLUMNS = ["clinic", "patient", "10", "9", "ward", "since", "smokes", "sick"]
RIGHT = [
    ["a", "007", "51.25", "3", "east", "2019-02-11", "True", "yes"],
    ["a", "008", "", "0", "west, upper", "2020-06-30", "False", "no"],
    ["b", "009", "38.5", "4", "south", "2015-12-01", "True", "no"],
    ["b", "010", "63.125", "1", "east", "2021-01-05", "False", "yes"],
    ["b", "011", "44", "2", "south", "2018-08-08", "False", ""],
]
ODD = {  # cells, with | between them
    "10": "| |NA|nan|NULL|n/a|?|-9|-9.0|1e3|1E-3|+5|-.5|5.|.|1e|0x10|1_000|1,5|1 000| 7 |\t7|inf|-inf|Infinity|1e39|"
    "-1e39|1e400|1e-46|12-3|--5|five|0.1|0.30000000000000004|16777217|9007199254740993|18446744073709551616|"
    "123456789.123456789|11111111111111111111111111111111|000000000000000000001|3.4028235e38|3.4028236e38|-0|-0.0|١٢|1½|true|None|"
    "<NA>|#N/A",
    "9": "|3.0|03|3;|2019-01-01|14:30|7:05:30|25:00|24:00|3 |1e2|yes|null|-nan|-9|-9.00",
    "ward": "|East|EAST| east|east |north|west|0|nan|NA|?|south\xa0|west, upper ",
    "since": "|2019-02-30|2019-13-01|2019-2-1|19-02-01|2019-02-28 14:30|2019-02-28T23:59:59.25Z|2019-02-28 24:00|"
    "2020-02-29|2019-02-29|0001-01-01|1600-01-01|1677-01-01|2262-04-12|9999-12-31|6200|6200.5|2019-02-28 14:30:61|"
    "2019-02-28 14:3|2019/02/28|14:30| 2019-02-28|2019-02-28Z",
    "smokes": "|true|TRUE|tRue|false|1|0|yes|T|True |NA|0.5|maybe",
    "sick": "|yes |Yes|no|maybe|1|0|NA|nan|?| no|1.0",
    "clinic": "| a|b |1|01|1.0|constructor|__proto__|NA|1e3|12345678901234567890|?",
    "patient": '|7|7.0|007|1e3|NA|x, y|a"b|=1+1|1.50|12345678901234567890| 9|?',
}


@dataclass(frozen=True)
class Table:
    """A file, and what is said about how it is laid out."""

    name: str
    content: bytes
    how: dict[str, Any] = field(default_factory=dict)


def written(
    rows: list[list[str]],
    header: list[str] | None = None,
    *,
    delimiter: str = ",",
    end: str = "\n",
    quote: bool = False,
) -> str:
    text = io.StringIO()
    style = csv.QUOTE_ALL if quote else csv.QUOTE_MINIMAL
    writer = csv.writer(text, delimiter=delimiter, lineterminator=end, quoting=style)
    writer.writerows([COLUMNS if header is None else header, *rows])
    return text.getvalue()


def by_hand() -> Iterator[Table]:
    plain = written(RIGHT)

    def table(name: str, text: str | bytes, **how: Any) -> Table:
        return Table(f"{name}.csv", text if isinstance(text, bytes) else text.encode(), how)

    yield table("right", plain)
    yield table("windows", plain.replace("\n", "\r\n"))
    yield table("old-mac", plain.replace("\n", "\r"))
    yield table("with-a-mark", b"\xef\xbb\xbf" + plain.encode())
    yield table("utf-16", plain.encode("utf-16"))
    yield table("latin-1", plain.replace("east", "\xf6st").encode("latin-1"))
    yield table("no-last-end", plain.rstrip("\n"))
    yield table("empty-lines", plain.replace("\n", "\n\n"))
    yield table("lines-of-spaces", plain + "   \n")
    yield table("lines-of-commas", plain + "," * (len(COLUMNS) - 1) + "\n")
    yield table("quoted", written(RIGHT, quote=True))
    yield table("quote-inside", written([[*RIGHT[0][:1], 'a "b" c', *RIGHT[0][2:]], *RIGHT[1:]]))
    yield table("lines-inside", written([[*RIGHT[0][:1], "two\nlines", *RIGHT[0][2:]], *RIGHT[1:]]))
    yield table("open-quote", plain + 'b,"012,1,1,east,2019-01-01,True,yes\n')
    yield table("stray-quote", plain.replace("007", '0"07'))
    yield table("text-after-quote", plain.replace("007", '"007"x'))
    yield table("spaces-in-header", plain.replace("ward", " ward "))
    yield table("semicolons", written(RIGHT, delimiter=";"))
    yield table("semicolons-said", written(RIGHT, delimiter=";"), delimiter=";")
    yield table("commas-decimal", written(RIGHT, delimiter=";").replace("51.25", "51,25"), delimiter=";", decimal=",")
    yield table("points-where-commas-are-said", written(RIGHT, delimiter=";"), delimiter=";", decimal=",")
    yield Table("tabs.tsv", written(RIGHT, delimiter="\t").encode())
    yield Table("tabs-in-csv.csv", written(RIGHT, delimiter="\t").encode())
    yield table("long-row", plain + "b,012,1,1,east,2019-01-01,True,yes,more\n")
    yield table("long-first-row", written([[*RIGHT[0], "more"], *RIGHT[1:]]))
    yield table("all-rows-long", written([[*row, "more"] for row in RIGHT]))
    yield table("trailing-commas", written([[*row, ""] for row in RIGHT]))
    yield table("short-row", plain + "b,012,1,1\n")
    yield table("empty", b"")
    yield table("header-alone", written([]))
    yield table("header-twice", written([COLUMNS, *RIGHT]))
    yield table("same-name-twice", written(RIGHT, ["clinic", "patient", "9", "9", "ward", "since", "smokes", "sick"]))
    yield table("no-name", written(RIGHT, ["", *COLUMNS[1:]]))
    yield table("saved-index", written([[str(i), *row] for i, row in enumerate(RIGHT)], ["Unnamed: 0", *COLUMNS]))
    yield table("others", written([[*row, "x"] for row in RIGHT], [*COLUMNS, "remark"]))
    yield table("turned-around", written([row[::-1] for row in RIGHT], COLUMNS[::-1]))
    yield table("case-of-names", written(RIGHT, [title.upper() for title in COLUMNS]))
    for i, title in enumerate(COLUMNS):
        cut = [row[:i] + row[i + 1 :] for row in RIGHT]
        yield table(f"without-{title}", written(cut, COLUMNS[:i] + COLUMNS[i + 1 :]))
        yield table(f"nothing-in-{title}", written([[*row[:i], "", *row[i + 1 :]] for row in RIGHT]))
    for missing in ("error", "drop", "mean", "client"):
        yield table(f"gaps-{missing}", plain, missing=missing)
    yield table("every-row-lacks", written([[*row[:2], "", *row[3:]] for row in RIGHT]), missing="drop")
    yield table("codes", plain.replace("63.125", "-9"), na_values="?,-9")
    yield table("codes-in-words", plain.replace("south", "?"), na_values=["?"])
    yield table("no-labels-said", plain, label_column="")
    yield table("no-clients-said", plain, client_column="")
    yield table("another-label", plain, label_column="smokes")
    yield table("indicator-in-file", written([[*row, "1"] for row in RIGHT], [*COLUMNS, "10 is missing"]))
    yield table("nul", plain.encode().replace(b"007", b"0\x007"))


def by_seed(count: int, seed: int = 0) -> Iterator[Table]:
    draw = random.Random(seed)
    for number in range(count):
        rows = [list(draw.choice(RIGHT)) for _ in range(draw.randint(1, 6))]
        for _ in range(draw.choice([1, 1, 1, 2, 3])):
            title = draw.choice(list(ODD))
            word = draw.choice(ODD[title].split("|"))
            for row in draw.choice([rows, [draw.choice(rows)], [draw.choice(rows)]]):
                row[COLUMNS.index(title)] = word
        order = draw.sample(range(len(COLUMNS)), len(COLUMNS)) if draw.random() < 0.2 else list(range(len(COLUMNS)))
        delimiter, end = draw.choice(",,,,;\t"), draw.choice(["\n", "\n", "\r\n"])
        how: dict[str, Any] = {} if delimiter == "," else {"delimiter": delimiter}
        how |= draw.choice([{}, {}, {}, {"missing": "drop"}, {"missing": "error"}, {"na_values": "?,-9"}])
        how |= draw.choice([{}] * 5 + [{"decimal": ","}])
        cells = [[row[i] for i in order] for row in rows]
        text = written(cells, [COLUMNS[i] for i in order], delimiter=delimiter, end=end, quote=draw.random() < 0.1)
        yield Table(f"seed-{number}.csv", text.encode(), how)
