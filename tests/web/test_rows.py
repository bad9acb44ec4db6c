"""The page reads every file as Python reads it: the same numbers, to the bit, or both refuse it."""

from __future__ import annotations

import base64
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from tests.web.tables import Table, by_hand, by_seed
from unalike.data import DataError
from unalike.newcomers.file import NewcomerFile
from unalike.runs.errors import UserError
from unalike.runs.finished import FinishedRun

if TYPE_CHECKING:
    from playwright.sync_api import Page

Made = Callable[[str], tuple[Path, Path]]

IN_PAGE = """async ([name, tables]) => {
  const { asInputs, decoded, readTable, rowNames, withColumns } = await import("/page/rows.js");
  const get = async (file) => (await fetch(`v1/runs/${name}/${file}`)).json();
  const card = await get("card.json"), schema = withColumns(await get("schema.json"), card), found = [];
  for (const [file, content, how] of tables) {
    try {
      const bytes = Uint8Array.from(atob(content), (c) => c.charCodeAt(0)), said = { ...card.read, ...how };
      const clients = [];
      for (const [client, lines] of readTable(decoded(bytes.buffer, file), file, schema, said).clients) {
        const { x, y, lines: kept } = asInputs(lines, file, schema, said);
        const bits = [...new Uint8Array(Float32Array.from(x.data).buffer)].map((b) => String.fromCharCode(b)).join("");
        const ids = kept.map((line) => line.id), names = await rowNames(kept);
        clients.push({ client, dims: x.dims, x: btoa(bits), ids, y: [...y.data], names });
      }
      found.push(clients);
    } catch (error) { found.push(`${error.constructor.name}: ${error.message}`); }
  }
  return found;
}"""


def in_page(page: Page, bundle: str, tables: list[Table]) -> list[Any]:
    sent = [[one.name, base64.b64encode(one.content).decode(), one.how] for one in tables]
    found: list[Any] = page.evaluate(IN_PAGE, [bundle, sent])
    return found


def in_python(run: FinishedRun, table: Table, folder: Path) -> Any:
    path = folder / table.name
    path.write_bytes(table.content)
    try:
        file = NewcomerFile.read(run, path, table.how)
        return {name: file.newcomer(name) for name in file.clients}
    except (UserError, DataError, ValueError) as error:
        return f"{type(error).__name__}: {error}"


def differences(came: Any, expected: Any) -> list[str]:
    """What the page (``came``) and Python say that is not the same."""
    if isinstance(came, str) or isinstance(expected, str):
        said = [f"page: {came if isinstance(came, str) else 'reads it'}"]
        said.append(f"Python: {expected if isinstance(expected, str) else 'reads it'}")
        return [] if isinstance(came, str) and came.startswith("Wrong") and isinstance(expected, str) else said
    names = {one["client"]: one for one in came}
    if set(names) != set(expected):
        return [f"clients {sorted(names)} and {sorted(expected)}"]
    found = []
    for name, newcomer in expected.items():
        one, clients = names[name], newcomer.clients
        x = clients.rows(0)[0].numpy()
        mine = np.frombuffer(base64.b64decode(one["x"]), dtype="<f4").reshape(one["dims"])
        if mine.shape != x.shape or (mine + 0.0).tobytes() != (x.astype("<f4") + 0.0).tobytes():  # −0 is 0
            found.append(f"x {mine.tolist()} and {x.tolist()}")
        if one["ids"] != newcomer.ids:
            found.append(f"ids {one['ids']} and {newcomer.ids}")
        if one["names"] != newcomer.row_names:
            found.append(f"names of rows {one['names']} and {newcomer.row_names}")
        y, mine = clients.rows(0)[1], np.float64(one["y"])
        labels = np.full(len(x), -1.0)  # where there is none
        if y is not None and bool(clients.labeled.any()):
            known = np.ones(len(x), dtype=bool) if clients.known is None else clients.known.numpy()
            labels[known] = y.numpy()[known]
        if mine.tolist() != labels.tolist():
            found.append(f"labels {mine} and {labels}")
    return found


@pytest.mark.parametrize("corpus", ["by hand", "by seed"])
def test_the_page_reads_what_python_reads(corpus: str, page: Page, made: Made, tmp_path: Path) -> None:
    run = FinishedRun.open(made("clinics")[0])
    tables = list(by_hand()) if corpus == "by hand" else list(by_seed(600))
    came = in_page(page, "clinics", tables)
    expected = [in_python(run, table, tmp_path) for table in tables]
    wrong = [
        f"{table.name} {table.how}: {'; '.join(found)}\n{table.content[:600]!r}"
        for table, mine, right in zip(tables, came, expected, strict=True)
        if (found := differences(mine, right))
    ]
    assert not wrong, f"{len(wrong)} of {len(tables)}\n" + "\n".join(wrong[:60])
    read = sum(not isinstance(one, str) for one in expected)
    assert min(read, len(tables) - read) >= len(tables) / 5  # the corpus has enough of both


PICTURES_IN_PAGE = """async ([files, shapes]) => {
  const { pictureLine, pixels } = await import("/page/rows.js"), found = [];
  for (const [[name, content], shape] of files.map((file, i) => [file, shapes[i]])) {
    try {
      const file = new File([Uint8Array.from(atob(content), (c) => c.charCodeAt(0))], name);
      found.push([...pictureLine(await pixels(file), name, { shape }, 255).x]);
    } catch (error) { found.push(`${error.constructor.name}: ${error.message}`); }
  }
  return found;
}"""


def test_pictures_are_the_bytes_that_pillow_gives(page: Page, tmp_path: Path) -> None:
    from PIL import Image

    rng = np.random.default_rng(0)
    files, shapes = list[Path](), list[tuple[int, int, int]]()

    def add(image: Image.Image, name: str, *sizes: tuple[int, int], **options: Any) -> None:
        image.save(tmp_path / name, **options)
        for size in sizes:
            files.append(tmp_path / name)
            shapes.append((1 if image.mode in ("1", "L") else 3, *size))

    colours = Image.fromarray(rng.integers(0, 256, (23, 31, 3), dtype=np.uint8))
    smooth = Image.fromarray(np.uint8(np.add.outer(np.arange(40), np.arange(30)) * 3))
    add(colours, "colours.png", (23, 31), (8, 8), (32, 32), (1, 1), (46, 20))
    add(colours, "colours.bmp", (8, 8), (50, 60))
    add(colours.quantize(16), "palette.png", (8, 8), (23, 31))
    add(colours, "colours.webp", (8, 8), lossless=True)
    add(smooth, "grey.png", (40, 30), (28, 28), (8, 8), (64, 64))
    add(smooth.convert("1"), "bits.png", (40, 30), (8, 8))
    turned = Image.Exif()
    turned[0x0112] = 6  # a quarter turn, as a telephone writes it
    add(colours, "turned.png", (31, 23), (8, 8), exif=turned)
    from unalike.data.files.pictures import read_pictures

    sent = [[file.name, base64.b64encode(file.read_bytes()).decode()] for file in files]
    came = page.evaluate(PICTURES_IN_PAGE, [sent, shapes])
    for file, shape, mine in zip(files, shapes, came, strict=True):
        right = read_pictures([file], shape[1:])[0]
        assert right.shape == shape, file
        np.testing.assert_array_equal(np.array(mine).reshape(shape), right, err_msg=f"{file.name} {shape}")


def test_what_is_no_opaque_picture_is_refused(page: Page, tmp_path: Path) -> None:
    from PIL import Image

    Image.new("RGBA", (4, 4), (10, 20, 30, 128)).save(tmp_path / "glass.png")
    sent = [
        [name, base64.b64encode(content).decode()]
        for name, content in (("glass.png", (tmp_path / "glass.png").read_bytes()), ("words.png", b"no picture"))
    ]
    said = page.evaluate(PICTURES_IN_PAGE, [sent, [(3, 4, 4)] * 2])
    assert said[0] == "Wrong: glass.png is partly transparent; save it without transparency"
    assert said[1] == "Wrong: words.png is no picture that this browser can read"
