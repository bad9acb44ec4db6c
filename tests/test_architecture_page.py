"""docs/architecture.md says where things live: the files that it names are there, and have what one looks for."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
TABLE = TEXT.partition("## Where do I find or add")[2].partition("\n## ")[0]
ROWS = [row for row in TABLE.splitlines() if row.startswith("| ")][2:]
FILE = re.compile(r"`([\w/]+/\w+\.py)`")
# what a person who does not know the package was asked to find
ASKED = (
    *("clustering", "the report's map", "DP-SGD", "recipe's key", "newcomer's ledger", "block plans", "E-step"),
    *("wire format", "one that does not exist yet", "worker's restart"),
)


def find(name: str) -> Path:
    return next(one for one in (ROOT / "unalike" / name, ROOT / name) if one.is_file())


@pytest.mark.parametrize("name", sorted(set(FILE.findall(TEXT))))
def test_a_file_that_the_page_names_is_there(name: str) -> None:
    assert any((folder / name).is_file() for folder in (ROOT / "unalike", ROOT)), name


@pytest.mark.parametrize("row", ROWS, ids=lambda row: str(row).split("|")[1].strip())
def test_a_row_names_files_that_have_what_it_says(row: str) -> None:
    text = "\n".join(find(name).read_text(encoding="utf-8") for name in FILE.findall(row))
    for name in re.findall(r"`([A-Za-z_][\w.]*)`", row):
        if not name.endswith(".py"):
            for part in name.split("."):
                assert re.search(rf"(def|class) {part}\b|^ *{part}\b.*[:=]", text, re.MULTILINE), name


@pytest.mark.parametrize("what", ASKED)
def test_the_page_answers_where_it_lives(what: str) -> None:
    (row,) = [row for row in ROWS if what in row.split("|")[1] or what in row.split("|")[2].partition("`")[0]][:1]
    assert FILE.search(row), row
