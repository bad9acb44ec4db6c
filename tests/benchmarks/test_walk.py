"""docs/architecture.md says how many files a run passes through; here they are counted."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.long
def test_the_way_to_the_gradient_step_and_back_is_as_short_as_the_docs_say() -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.walk"], capture_output=True, text=True, check=True, cwd=ROOT, env=environment
    )
    found = json.loads(done.stdout)
    assert set(found["to open"]) <= set(found["touched"]) <= set(found["run"])
    assert len(found["to open"]) <= 14 and len(found["touched"]) <= 40
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    told = re.search(r"passes through (\d+) files of the package and touches (\d+)", text)
    assert told is not None
    assert [int(one) for one in told.groups()] == [len(found["to open"]), len(found["touched"])]
    table = re.findall(r"^\| `([a-z_/]+\.py)` \|", text, re.MULTILINE)
    assert set(found["to open"]) == set(table), "the table of the walk names the files to open"
