"""Whose code a run folder may have loaded: that of a trusted file, and a method of an installed package."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import unalike as ua
from unalike.core import outside
from unalike.deploy.session import recipe_for_workers
from unalike.runs.folder import write_json
from unalike.runs.recipe.recipe import CODE, check_code, to_recipe

METHOD = "import unalike as ua\nfrom .names import NAME\n\n\nclass Mine(ua.FedAvg):\n    name = NAME\n"
PATH = "packaged_method.inner:Mine"


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder on Python's path with a package, as a new process sees it."""
    package = tmp_path / "site" / "packaged_method"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "names.py").write_text("NAME = 'mine'\n")
    (package / "inner.py").write_text(METHOD)
    monkeypatch.syspath_prepend(tmp_path / "site")
    for name in ("_loaded", "_trusted", "_stand_ins"):
        monkeypatch.setattr(outside, name, type(getattr(outside, name))())
    importlib.invalidate_caches()
    yield package
    for name in [name for name in sys.modules if name.startswith("packaged_method")]:
        del sys.modules[name]


def begun(folder: Path, file: Path, where: str) -> Path:
    """A run folder that says with which code it began."""
    folder.mkdir()
    write_json(folder / CODE, {where: outside.code_digest(file)})
    return folder


def test_a_trusted_file_of_a_package_is_imported_by_its_name(site: Path, tmp_path: Path) -> None:
    folder = begun(tmp_path / "run", site / "inner.py", "packaged_method.inner")
    with pytest.raises(outside.CannotLoad, match="--trust-code"):  # on the path, but not installed
        check_code(folder, {"method": PATH})
    assert "packaged_method" not in sys.modules, "nothing ran while it was looked for"
    outside.trust(site / "inner.py")
    check_code(folder, {"method": PATH})
    assert outside.load(PATH).name == "mine"  # type: ignore[attr-defined]


def test_an_installed_method_needs_no_trust_and_an_installed_model_does(
    site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("site.getsitepackages", lambda: [str(site.parent)])
    check_code(tmp_path, {"method": PATH})
    check_code(tmp_path, {"method": "unalike.methods.fedavg:FedAvg"})
    for values in (
        {"method": "fedavg", "model": PATH},
        {"method": PATH, "model": {"name": PATH}},
        {"method": "os:system"},
        {"method": "packaged_method./tmp/evil:Mine"},
        {"method": "fedavg", "compare": [{"method": "os:system"}]},
    ):
        with pytest.raises(outside.CannotLoad, match="--trust-code"):
            check_code(tmp_path, values)


def test_workers_load_the_trusted_file_and_not_the_one_that_a_folder_names(site: Path, tmp_path: Path) -> None:
    mine, named = tmp_path / "mine.py", "/nowhere/evil.py"
    mine.write_text("class Mine: ...\n")
    folder = begun(tmp_path / "run", mine, named)
    outside.trust(mine)
    recipe = to_recipe({"method": f"{named}:Mine", "model": {"name": f"{named}:net"}}, "a test")
    check_code(folder, recipe.model_dump())
    sent = recipe_for_workers(recipe)
    assert sent["method"] == f"{mine}:Mine" and sent["model"]["name"] == f"{mine}:net"


def test_python_resumes_a_run_with_code_of_its_own_by_trust_code(site: Path, tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("import unalike as ua\n\n\nclass Mine(ua.FedAvg):\n    pass\n")
    settings: dict[str, Any] = {"clients": 4, "rounds": 1, "model": "logistic"}
    first = ua.run(f"{file}:Mine", out=tmp_path / "run", **settings)
    (tmp_path / "run" / "result.json").unlink()  # as if it had been stopped in its last moment
    outside._loaded.clear()
    with pytest.raises(outside.CannotLoad, match="--trust-code"):
        ua.resume(tmp_path / "run")
    for trusted in (file, [str(file)]):
        resumed = ua.resume(tmp_path / "run", trust_code=trusted)
        assert isinstance(resumed, ua.Result) and resumed.accuracy == first.accuracy
    with pytest.raises(outside.CannotLoad, match="there is no file"):
        ua.resume(tmp_path / "run", trust_code=tmp_path / "other.py")
