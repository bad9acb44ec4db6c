"""Train, serve a page, and use it in a real Chromium, with a picture of each step.

    python examples/serve_a_page.py FOLDER

Sixty made-up clinics train together. Their laboratories measure creatinine by instruments that are set up differently,
so one rule for all clinics errs, and what a clinic's rows are like tells which rule it needs. Then a clinic that nobody
has met opens the page. A second bundle is of digits, turned differently at each client; there nothing leaves the page.

It needs the extras serve and browser, and a Chromium (Debian: apt-get install chromium), or CHROMIUM=/path/to/one.
"""

from __future__ import annotations

import io
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pandas as pd
from PIL import Image
from playwright.sync_api import Browser, Locator, Page, sync_playwright

import unalike as ua


def patients(clinic: int, count: int) -> pd.DataFrame:
    """One clinic's rows."""
    rng = np.random.default_rng(clinic)
    setting, risk = rng.normal(0, 0.35), rng.normal(size=count)
    return pd.DataFrame(
        {
            "patient": [f"{clinic:02}-{i:03}" for i in range(count)],
            "age": (58 + 5 * risk + 9 * rng.normal(size=count)).round().astype(int),
            "sex": rng.choice(["m", "f"], count),
            "blood pressure": (132 + 5 * risk + 14 * rng.normal(size=count)).round().astype(int),
            "creatinine": (1.1 + setting + 0.16 * risk + 0.04 * rng.normal(size=count)).round(2),
            "admitted": [f"2025-{1 + i % 12:02}-{1 + i % 28:02}" for i in range(count)],
            "kidney disease": np.where(risk + 0.3 * rng.normal(size=count) > 0.3, "yes", "no"),
        }
    )


def train(folder: Path) -> list[Path]:
    """Two runs and their bundles."""
    clinics = pd.concat([patients(i, 60).assign(clinic=f"c{i:02}") for i in range(60)])
    clinics.to_csv(folder / "clinics.csv", index=False)
    columns = {"label_column": "kidney disease", "client_column": "clinic", "id_column": "patient"}
    ua.run(
        *("odpfl", folder / "clinics.csv"),
        **{**columns, "model": "logistic", "rounds": 300, "unseen": 12, "out": folder / "kidneys"},
        hyperparameters={"encoder": "sphere"},  # on a sphere, one row moves a descriptor by a known length at most
    )
    ua.run(
        *("flowdup", "digits"),
        **{"partition": "rotation", "clients": 40, "model": "mlp", "rounds": 100, "out": folder / "digits"},
    )
    for name in ("kidneys", "digits"):
        subprocess.run(["unalike", "bundle", folder / name, "--out", folder / f"{name}.bundle"], check=True)
    return [folder / "kidneys.bundle", folder / "digits.bundle"]


@contextmanager
def serving(bundles: list[Path]) -> Iterator[str]:
    """`unalike serve` on a free port of this machine; its address."""
    with subprocess.Popen(["unalike", "serve", *bundles, "--port", "0"], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            found = re.search(r"http://\S+", process.stdout.readline())
            assert found, "the service did not start"
            yield found[0].rstrip(";")
        finally:
            process.terminate()


def open_page(browser: Browser, address: str, run: str, width: int = 820, dark: bool = False) -> Page:
    page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme="dark" if dark else "light")
    page.goto(address)
    page.get_by_text("rounds with").wait_for()
    page.locator("#run").select_option(run)
    return page


def picture(what: Page | Locator, file: Path) -> None:
    """A picture with a palette, so that it is small."""
    page = what if isinstance(what, Page) else what.page
    page.wait_for_timeout(400)  # what is new fades in
    shot = page.screenshot(full_page=True) if what is page else what.screenshot()
    Image.open(io.BytesIO(shot)).convert("RGB").quantize(48).save(file, optimize=True)


def use_table(page: Page, table: Path) -> Iterator[str]:
    """The three steps with a table; there is noise on what is sent."""
    page.locator("#file").set_input_files(table)
    page.locator("#get").wait_for()
    yield "#step-data"
    page.locator("#protect").check()
    page.get_by_text("(ε, δ) = (1,").wait_for()
    yield "#step-leaves"
    page.locator("#get").click()
    page.locator("#predictions td").first.wait_for()
    yield "#step-model"


def draw(page: Page, strokes: list[list[tuple[int, int]]]) -> None:
    box = page.locator("#canvas").bounding_box()
    assert box is not None
    for first, *rest in strokes:
        page.mouse.move(box["x"] + first[0], box["y"] + first[1])
        page.mouse.down()
        for x, y in rest:
            page.mouse.move(box["x"] + x, box["y"] + y, steps=8)
        page.mouse.up()


SEVEN = [[(60, 50), (160, 50), (100, 185)]]
ONE = [[(85, 75), (118, 45), (118, 185)]]
FOUR = [[(125, 40), (65, 130), (165, 130)], [(130, 90), (130, 190)]]


def use_drawings(page: Page) -> None:
    """Three drawn digits; their model is made in the page."""
    for count, strokes in enumerate((SEVEN, ONE, FOUR), 1):
        page.locator("#canvas").scroll_into_view_if_needed()
        draw(page, strokes)
        if count < 3:
            page.locator("#add").click()
            page.get_by_text(f"{count} row").first.wait_for()


def main(pictures: Path) -> None:
    chromium = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        sys.exit("this needs a browser: apt-get install chromium, or CHROMIUM=/path/to/one")
    pictures.mkdir(parents=True, exist_ok=True)
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # where unalike is
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        bundles = train(folder)
        table = patients(99, 80)  # nobody has met this clinic
        table.loc[20:, "kidney disease"] = ""  # and it has few labels, which only check what comes
        table.to_csv(folder / "my-clinic.csv", index=False)
        with serving(bundles) as address, sync_playwright() as playing:
            browser = playing.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
            page, sent = open_page(browser, address, "kidneys"), list[int]()
            page.on(
                "request", lambda asked: sent.extend([len(asked.post_data_buffer or b"")] * (asked.method == "POST"))
            )
            picture(page, pictures / "serve-0-begin.png")
            for number, step in enumerate(use_table(page, folder / "my-clinic.csv"), 1):
                picture(page.locator(step), pictures / f"serve-{number}-{step.removeprefix('#step-')}.png")
            print(f"bytes that left the page: {sent}. {page.locator('#found').text_content()}")
            page = open_page(browser, address, "digits")
            use_drawings(page)
            picture(page.locator("#step-data"), pictures / "serve-4-drawing.png")
            for name, width, dark in (("phone", 360, False), ("dark", 820, True)):
                page = open_page(browser, address, "kidneys", width, dark)
                for step in use_table(page, folder / "my-clinic.csv"):
                    if step == "#step-leaves":
                        picture(page.locator(step), pictures / f"serve-5-{name}.png")
            browser.close()
    print("pictures:", *sorted(path.name for path in pictures.glob("serve-*.png")))


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "pictures"))
