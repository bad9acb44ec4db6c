"""The page in a real Chromium: its words are those of the command line, and what leaves is what it said."""

from __future__ import annotations

import csv
import functools
import http.server
import json
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import onnxruntime
import pandas as pd
import pytest
from typer.testing import CliRunner

from tests.web.conftest import browsing, serving
from unalike.commands.main import app
from unalike.newcomers.file import NewcomerFile
from unalike.newcomers.ledger import read_ledger
from unalike.newcomers.service import ENGINE, Key, export_page, service
from unalike.runs.errors import UserError
from unalike.runs.finished import FinishedRun

if TYPE_CHECKING:
    from playwright.sync_api import BrowserContext, Page, Request

Made = Callable[[str], tuple[Path, Path]]


class Visit:
    """One visitor: what the browser asked for, and what it complained of."""

    def __init__(self, context: BrowserContext, address: str) -> None:
        self.page: Page = context.new_page()
        self.asked: list[Request] = []
        self.console: list[str] = []
        self.page.on("request", lambda request: self.asked.append(request))
        self.page.on("console", lambda message: self.console.append(message.text))
        self.page.on("pageerror", lambda error: self.console.append(str(error)))
        self.page.goto(address)
        self.page.locator("#offline").wait_for(state="visible")  # the browser has kept what it needs without a network

    @property
    def sent(self) -> list[bytes]:
        return [one.post_data_buffer or b"" for one in self.asked if one.method != "GET"]

    def give(self, *files: Path) -> None:
        self.page.locator("#file").set_input_files(files)
        self.page.locator("#get").wait_for()

    def get(self) -> None:
        self.page.locator("#get").click()
        self.page.locator("#predictions td").first.wait_for()

    def saved(self, button: str, folder: Path) -> Path:
        with self.page.expect_download() as coming:
            self.page.locator(button).click()
        file = folder / coming.value.suggested_filename
        coming.value.save_as(file)
        return file

    def numbers(self) -> np.ndarray[Any, np.dtype[np.float32]]:
        """The numbers that step 2 shows as text."""
        return np.float32([float(word) for word in (self.page.locator("#numbers").text_content() or "").split(",")])


@contextmanager
def visiting(*bundles: Path, offline: bool = False, **options: Any) -> Iterator[Visit]:
    with serving(*bundles, offline=offline) as address, browsing(**options) as context:
        yield Visit(context, address)


@pytest.fixture
def clinic(made: Made, tmp_path: Path) -> Path:
    """The rows of one clinic."""
    table = pd.read_csv(made("clinics")[0].parent / "clinics.csv", dtype=str, keep_default_na=False)
    table[table["clinic"] == "c03"].to_csv(tmp_path / "mine.csv", index=False)
    return tmp_path / "mine.csv"


@pytest.fixture
def drawings(tmp_path: Path) -> tuple[list[Path], Path]:
    """Digits as pictures, and the same as an array of the run's pixels."""
    from PIL import Image
    from sklearn.datasets import load_digits

    x = load_digits().images[:12].reshape(12, 1, 8, 8)
    np.savez(tmp_path / "mine.npz", x=x)
    files = [tmp_path / f"{i:02}.png" for i in range(len(x))]
    for file, pixels in zip(files, x, strict=True):
        Image.fromarray(np.uint8(np.round(pixels[0] * (255 / 16)))).save(file)
    return files, tmp_path / "mine.npz"


def run_unalike(*words: object) -> str:
    done = CliRunner().invoke(app, [*map(str, words)])
    assert done.exit_code == 0, done.output
    return done.stdout


def by_command(run: Path, data: Path, out: Path) -> list[dict[str, str]]:
    """What `unalike predict` says about the rows."""
    run_unalike("predict", run, "--data", data, "--out", out)
    with out.open() as file:
        return list(csv.DictReader(file))


def assert_same_words(mine: Path, right: list[dict[str, str]], ids: bool = True) -> None:
    with mine.open() as file:
        found = list(csv.DictReader(file))
    assert len(found) == len(right) > 0
    for one, other in zip(found, right, strict=True):
        assert one["prediction"] == other["prediction"] and (not ids or one["id"] == other["id"])
        chances = [key for key in other if key.startswith("p_")]
        assert len(chances) > 1
        for key in chances:
            assert float(one[key]) == pytest.approx(float(other[key]), abs=1e-4)


@pytest.mark.parametrize("offline", [False, True])
@pytest.mark.parametrize("name", ["clinics", "labels", "same"])
def test_the_words_are_those_of_predict_and_only_the_shown_bytes_leave(
    name: str, offline: bool, made: Made, clinic: Path, tmp_path: Path
) -> None:
    run, bundle = made(name)
    expected = by_command(run, clinic, tmp_path / "predicted.csv")
    length = json.loads((bundle / "card.json").read_bytes()).get("length")
    with visiting(bundle, offline=offline) as visit:
        loaded = len(visit.asked)
        if offline:
            visit.page.context.set_offline(True)
            visit.page.reload()
            visit.page.get_by_text("rounds with").wait_for()
            visit.page.wait_for_load_state("networkidle")
            loaded = len(visit.asked)
        visit.give(clinic)
        assert len(visit.asked) == loaded  # nothing before the button
        shown = None if name == "same" else visit.numbers()
        visit.get()
        assert_same_words(visit.saved("#save-predictions", tmp_path), expected)
        if offline or name == "same":
            assert len(visit.asked) == loaded and visit.sent == []
            assert visit.page.locator("#leaves-title").text_content() == "Nothing leaves this page"
        else:
            assert [len(body) for body in visit.sent] == [4 * length] and len(visit.asked) == loaded + 1
            assert f"Send {4 * length} bytes" in (visit.page.locator("#get").text_content() or "")
            np.testing.assert_allclose(np.frombuffer(visit.sent[0], "<f4"), shown, rtol=1e-5)
            assert visit.page.locator("#promise").text_content() == (
                f"Your rows stay in this page. {length} numbers leave it, once you have seen them."
            )
        assert visit.console == []


@pytest.mark.parametrize("name", ["digits", "home"])
def test_pictures_get_the_words_of_predict(
    name: str, made: Made, drawings: tuple[list[Path], Path], tmp_path: Path
) -> None:
    """Where the newcomer makes its model (home), nothing leaves."""
    run, bundle = made(name)
    pictures, array = drawings
    with visiting(bundle) as visit:
        loaded = len(visit.asked)
        visit.give(*pictures)
        visit.get()
        predicted = visit.saved("#save-predictions", tmp_path)
        assert [len(body) for body in visit.sent] == ([] if name == "home" else [4 * len(visit.numbers())])
        assert len(visit.asked) == loaded + len(visit.sent) and visit.console == []
    assert_same_words(predicted, by_command(run, array, tmp_path / "predicted.csv"), ids=False)


def test_the_saved_model_is_the_one_that_predicted(made: Made, clinic: Path, tmp_path: Path) -> None:
    run, bundle = made("clinics")
    with visiting(bundle) as visit:
        visit.give(clinic)
        visit.get()
        model, words = visit.saved("#save-model", tmp_path), visit.saved("#save-predictions", tmp_path)
    newcomer = NewcomerFile.read(FinishedRun.open(run), clinic, {}).newcomer("c03")
    x = newcomer.clients.rows(0)[0].numpy()
    scores = onnxruntime.InferenceSession(str(model), providers=["CPUExecutionProvider"]).run(None, {"x": x})[0]
    names = FinishedRun.open(run).schema.class_labels
    assert [names[top] for top in scores.argmax(1)] == list(pd.read_csv(words)["prediction"])
    assert model.read_bytes() != (bundle / "model.onnx").read_bytes()  # that one has the common model


def test_what_is_spent_is_remembered_told_and_read_by_the_command_line(
    made: Made, clinic: Path, tmp_path: Path
) -> None:
    with visiting(made("clinics")[1]) as visit:
        page = visit.page
        visit.give(clinic)
        exact = visit.numbers()
        page.locator("#protect").check()
        page.get_by_text("(ε, δ) = (1,").wait_for()
        shown = visit.numbers()
        assert len(shown) == len(exact) and not np.allclose(shown, exact, atol=1e-6)
        page.locator("#get").click()
        page.locator("#predictions td").first.wait_for()
        np.testing.assert_allclose(np.frombuffer(visit.sent[0], "<f4"), shown, rtol=1e-5)
        page.reload()  # it is in the browser, not in the page
        page.get_by_text("rounds with").wait_for()
        visit.give(clinic)
        page.locator("#protect").check()
        page.locator("#epsilon").fill("4")  # ε = 2
        page.get_by_text("(ε, δ) = (2,").wait_for()
        told = float((page.locator("#cost").text_content() or "").rpartition("ε = ")[2].rstrip("."))
        visit.get()
        file = visit.saved("#save-ledger", tmp_path)
        page.locator("#protect").uncheck()
        page.get_by_text("ε = ∞").wait_for()  # what comes next would be exact
        assert visit.console == []
    ledger, delta = read_ledger(file)
    rows = NewcomerFile.read(FinishedRun.open(made("clinics")[0]), clinic, {}).newcomer("c03").row_names
    spent = [ledger.epsilon(delta, newcomer=row) for row in rows]
    assert spent == pytest.approx([told] * len(rows), rel=6e-3) and 2 < told < 3.5
    again = run_unalike(
        *("personalize", made("clinics")[0], "--data", clinic, "--epsilon", 1, "--ledger", file, "--json"),
        *("--out", tmp_path / "mine.safetensors"),
    )
    assert json.loads(again)["epsilon"] > told


def test_a_page_in_a_folder_needs_no_service(made: Made, clinic: Path, tmp_path: Path) -> None:
    run, bundle = made("clinics")
    export_page([bundle], tmp_path / "page")

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *words: Any) -> None: ...

    files = functools.partial(Quiet, directory=str(tmp_path / "page"))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), files) as server, browsing() as context:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            visit = Visit(context, f"http://127.0.0.1:{server.server_port}/")
            visit.give(clinic)
            visit.get()
            words = visit.saved("#save-predictions", tmp_path)
            assert visit.sent == [] and visit.console == []
        finally:
            server.shutdown()
            thread.join()
    assert_same_words(words, by_command(run, clinic, tmp_path / "predicted.csv"))


def test_the_browser_lets_nothing_go_elsewhere(page: Page) -> None:
    """Whatever a script in the page tried: a policy forbids every other place, also this machine's other ports."""
    with http.server.HTTPServer(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler) as other:
        other.timeout = 0.5
        came = list[Any]()
        other.finish_request = lambda *where: came.append(where)  # type: ignore[method-assign]
        tried = page.evaluate(
            """async (url) => {
              const fetched = await fetch(url).then(() => "went", () => "refused");
              const shown = await new Promise((done) => {
                const image = new Image();
                [image.onload, image.onerror] = [() => done("went"), () => done("refused")];
                image.src = url;
              });
              const told = navigator.sendBeacon(url, "x");
              return [fetched, shown, told];
            }""",
            f"http://127.0.0.1:{other.server_port}/",
        )
        other.handle_request()
    assert tried[:2] == ["refused", "refused"] and came == []


def test_a_wrong_file_is_explained_and_leaves_nothing_to_send(made: Made, clinic: Path, tmp_path: Path) -> None:
    (tmp_path / "wrong.csv").write_text("10,9\n1,2\n")
    with visiting(made("clinics")[1]) as visit:
        page = visit.page
        visit.give(clinic)
        page.locator("#file").set_input_files(tmp_path / "wrong.csv")
        page.get_by_text("missing: ward, since, smokes").wait_for()
        assert page.locator("#problem").get_attribute("role") == "alert"
        assert not page.locator("#get").is_visible() and not page.locator("#step-model").is_visible()
        visit.give(clinic)  # the same file again
        assert not page.locator("#problem").is_visible()
        visit.get()
        assert len(visit.sent) == 1 and visit.console == []


def test_a_file_can_be_dropped(made: Made, clinic: Path) -> None:
    with visiting(made("clinics")[1]) as visit:
        program = """(text) => {
          const given = new DataTransfer();
          given.items.add(new File([text], "mine.csv"));
          return given;
        }"""
        given = visit.page.evaluate_handle(program, clinic.read_text())
        visit.page.dispatch_event("#drop", "drop", {"dataTransfer": given})
        visit.page.get_by_text("mine.csv: 20 rows understood").wait_for()
        assert visit.page.locator("#get").is_enabled() and visit.console == []


def test_a_service_that_refuses_or_is_gone_is_said(made: Made, clinic: Path) -> None:
    with serving(made("clinics")[1], limit=1) as address, browsing() as context:
        visit = Visit(context, address)
        visit.give(clinic)
        visit.get()
        visit.page.locator("#get").click()
        visit.page.get_by_text("The service refused: expected at most 1 requests a minute").wait_for()
        visit.page.context.set_offline(True)
        visit.page.locator("#get").click()
        visit.page.get_by_text("The service cannot be reached").wait_for()


def test_a_key_is_asked_for_where_one_is_needed(made: Made, clinic: Path) -> None:
    keys = {"0123456789abcdef": Key("ward", 10)}
    with serving(made("clinics")[1], keys=keys) as address, browsing() as context:
        visit = Visit(context, address)
        visit.give(clinic)
        visit.page.locator("#get").click()
        visit.page.get_by_text("This service asks for a key").wait_for()
        visit.page.locator("#key").fill("0123456789abcdef")
        visit.get()
        assert "0123456789abcdef" not in visit.page.url and len(visit.sent) == 2


# What the page needs of onnxruntime-web, by the page's own interpreter: the package itself has 14 MB.
STAND_IN = """
import { read, run } from "../onnx.js";
export const env = { wasm: {} };
export class Tensor { constructor(kind, data, dims) { Object.assign(this, { kind, data, dims }); } }
const codes = { float32: 1, uint8: 2, int64: 7, float64: 11 };
const kinds = { float32: Float32Array, uint8: Uint8Array, int64: BigInt64Array, float64: Float64Array };
export const InferenceSession = { async create(bytes) {
  const code = await (await fetch(env.wasm.wasmPaths.wasm)).arrayBuffer();
  await WebAssembly.instantiate(code);
  const graph = read(bytes.buffer);
  return { async run(feeds) {
    const wanted = graph.inputs.filter((name) => !(name in graph.constants)).sort();
    if (Object.keys(feeds).sort().join() !== wanted.join()) throw new Error(`wanted ${wanted}`);
    const given = Object.entries(feeds).map(([name, { kind, data, dims }]) => {
      if (!(data instanceof kinds[kind])) throw new Error(kind);
      return [name, { dims, type: codes[kind], data: kind === "float32" ? data : Float64Array.from(data, Number) }];
    });
    return run(graph, Object.fromEntries(given));
  } };
} };
"""


@pytest.mark.parametrize("name", ["labels", "digits"])
def test_pages_compute_by_the_engine_that_the_service_gives_out(
    name: str, made: Made, clinic: Path, drawings: tuple[list[Path], Path], tmp_path: Path
) -> None:
    """By the folder dist of onnxruntime-web that UNALIKE_ORT names, else by a stand-in with its interface."""
    engine = Path(os.environ.get("UNALIKE_ORT", tmp_path))
    if engine == tmp_path:
        (engine / ENGINE[0]).write_text(STAND_IN)
        (engine / ENGINE[1]).write_bytes(b"\0asm\1\0\0\0")
    run, bundle = made(name)
    files, data = ([clinic], clinic) if name == "labels" else drawings
    with serving(bundle, engine=engine) as address, browsing() as context:
        visit = Visit(context, address)
        visit.give(*files)
        visit.get()
        words = visit.saved("#save-predictions", tmp_path)
        assert {one.url.rpartition("/")[2] for one in visit.asked if "/ort/" in one.url} == set(ENGINE)
        assert visit.console == [] and len(visit.sent) == 1
    assert_same_words(words, by_command(run, data, tmp_path / "predicted.csv"), ids=name == "labels")


def test_a_folder_without_the_engine_is_refused(made: Made, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"has no ort.wasm.bundle.min.mjs; expected the folder dist"):
        service([made("clinics")[1]], engine=tmp_path)


def test_rows_that_lack_a_value_are_refused_where_an_epsilon_counts_them(
    made: Made, clinic: Path, tmp_path: Path
) -> None:
    with visiting(made("clinics")[1]) as visit:
        visit.give(clinic)
        visit.page.locator("#reading summary").click()
        visit.page.locator("#missing").select_option("drop")
        visit.page.get_by_text("left out for lack of a value: 1 of the rows").wait_for()
        visit.page.locator("#protect").check()
        visit.page.get_by_text("ε is promised for a number of rows that does not depend on what they hold").wait_for()
        assert visit.page.locator("#get").is_disabled()  # what it would send has no noise
        visit.page.locator("#missing").select_option("")
        visit.page.get_by_text("lacks a value; fill it in").wait_for()
        assert not visit.page.locator("#get").is_visible() and visit.sent == []


def test_a_digit_can_be_drawn_by_mouse_and_by_keys(made: Made) -> None:
    with visiting(made("digits")[1]) as visit:
        page = visit.page
        box = page.locator("#canvas").bounding_box()
        assert box is not None
        page.mouse.move(box["x"] + 110, box["y"] + 40)
        page.mouse.down()
        page.mouse.move(box["x"] + 110, box["y"] + 180, steps=6)
        page.mouse.up()
        page.locator("#add").click()
        page.get_by_text("1 row understood").wait_for()
        first = visit.numbers()
        page.locator("#canvas").focus()
        for _ in range(6):
            page.keyboard.press("Shift+ArrowRight")
        page.locator("#add").press("Enter")
        page.get_by_text("2 rows understood").wait_for()
        assert not np.allclose(first, visit.numbers(), atol=1e-6)
        visit.get()
        assert page.locator("#predictions td b").count() == 2 and visit.console == []


def steps(visit: Visit, file: Path) -> Iterator[str]:
    """The page at each step of its use."""
    yield "empty"
    visit.give(file)
    yield "read"
    visit.page.locator("#protect").check()
    visit.page.get_by_text("(ε, δ) = (1,").wait_for()
    for details in visit.page.locator("summary").all():
        details.click()
    yield "all open"
    visit.get()
    yield "model"
    visit.page.locator("#file").set_input_files({"name": "no.csv", "mimeType": "text/csv", "buffer": b"a,b\n1\n"})
    visit.page.locator("#problem").wait_for()
    yield "problem"


@pytest.mark.parametrize("colours", ["light", "dark"])
def test_it_is_accessible_and_fits_a_telephone(colours: str, made: Made, clinic: Path) -> None:
    from axe_playwright_python.sync_playwright import Axe

    bundles = [made("clinics")[1], made("digits")[1]]
    screen = {"viewport": {"width": 360, "height": 740}, "color_scheme": colours, "reduced_motion": "reduce"}
    with visiting(*bundles, **screen) as visit:
        for step in steps(visit, clinic):
            found = Axe().run(visit.page)
            assert found.violations_count == 0, f"{step}: {found.generate_report()}"
            wide = visit.page.evaluate("document.documentElement.scrollWidth")
            assert wide <= 360, f"{step}: {wide} pixels wide"
            small = visit.page.evaluate(
                """[...document.querySelectorAll("button, .button, select, summary")].filter((one) =>
                   one.checkVisibility() && one.getBoundingClientRect().height < 32).map((one) => one.outerHTML)"""
            )
            assert small == [], step
        visit.page.locator("#run").select_option("digits")
        visit.page.locator("#drawing").wait_for()
        assert Axe().run(visit.page).violations_count == 0
        assert visit.console == []


def test_it_can_be_used_by_keys_alone(made: Made, clinic: Path) -> None:
    with visiting(made("clinics")[1]) as visit:
        page = visit.page

        def tab_to(place: str) -> None:
            for _ in range(25):
                page.keyboard.press("Tab")
                if page.evaluate("document.activeElement.id") == place:
                    outline = page.evaluate(
                        "[getComputedStyle(document.activeElement).outlineStyle, "
                        "getComputedStyle(document.querySelector('.button')).outlineStyle]"
                    )
                    assert "solid" in outline  # where one is, can be seen
                    return
            raise AssertionError(f"Tab never comes to {place}")

        tab_to("file")
        with page.expect_file_chooser() as chooser:
            page.keyboard.press("Space")
        chooser.value.set_files(clinic)
        page.locator("#get").wait_for()
        tab_to("protect")
        page.keyboard.press("Space")
        page.get_by_text("(ε, δ) = (1,").wait_for()
        tab_to("epsilon")
        page.keyboard.press("ArrowRight")
        page.get_by_text("(ε, δ) = (1.19,").wait_for()
        assert page.locator("#epsilon").evaluate("one => one.ariaValueText") == "ε = 1.19"
        tab_to("get")
        page.keyboard.press("Enter")
        page.locator("#predictions td").first.wait_for()
        assert page.evaluate("document.activeElement.id") == "h-model"  # a screen reader goes on there
        with page.expect_download():
            tab_to("save-predictions")
            page.keyboard.press("Enter")
        assert len(visit.sent) == 1 and visit.console == []
