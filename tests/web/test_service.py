"""The service: what it gives, what it refuses and how it says so, what it keeps, and how it ends."""

from __future__ import annotations

import http.client
import json
import os
import re
import shutil
import signal
import socket
import ssl
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnxruntime
import pytest
import torch
from safetensors.numpy import load

from tests.web.conftest import serving
from unalike.newcomers.service import Key, export_page, listen, read_keys
from unalike.runs.errors import UserError
from unalike.runs.finished import FinishedRun

Made = Callable[[str], tuple[Path, Path]]


class Answer(NamedTuple):
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


def ask(
    address: str, path: str, body: Any = None, kind: str | None = None, headers: Mapping[str, str] | None = None
) -> Answer:
    where = address.removeprefix("http://").rstrip("/")
    line = http.client.HTTPConnection(where, timeout=20)
    try:
        line.request(kind or ("GET" if body is None else "POST"), path, body, dict(headers or {}))
        came = line.getresponse()
        return Answer(came.status, {key.lower(): value for key, value in came.getheaders()}, came.read())
    finally:
        line.close()


@pytest.fixture(scope="module")
def address(made: Made) -> Iterator[str]:
    with serving(*(made(name)[1] for name in ("clinics", "home", "same"))) as at:
        yield at


def descriptor(bundle: Path) -> np.ndarray[Any, np.dtype[np.float32]]:
    length = json.loads((bundle / "card.json").read_bytes())["length"]
    return np.linspace(-0.5, 0.5, length).astype("<f4")


POST = "/v1/runs/clinics/personalize"


def test_a_descriptor_becomes_the_model_that_the_method_makes(address: str, made: Made) -> None:
    run, bundle = made("clinics")
    v, finished = descriptor(bundle), FinishedRun.open(run)
    expected = finished.method.models(finished.state, torch.from_numpy(v)[None])[0]  # type: ignore[attr-defined]
    came = ask(address, POST, v.tobytes())
    assert came.status == 200 and came.headers["cache-control"] == "no-store"
    tensors = load(came.body)
    assert list(tensors) == ["theta"]
    np.testing.assert_allclose(tensors["theta"], expected.numpy(), atol=1e-5)
    as_json = ask(address, POST, v.tobytes(), headers={"Accept": "application/json"}).json
    np.testing.assert_array_equal(np.float32(as_json["theta"]), tensors["theta"])
    assert as_json["unlike"] in (True, False) and set(as_json) == {"theta", "unlike"}  # yes or no, and no distance


def test_far_away_is_told_as_yes_and_near_as_no(address: str, made: Made) -> None:
    usual = json.loads((made("clinics")[1] / "card.json").read_bytes())["usual"]
    centre = np.float32(usual["centre"])
    for v, expected in ((centre, False), (centre + 1e3, True)):
        told = ask(address, POST, v.astype("<f4").tobytes(), headers={"Accept": "application/json"}).json
        assert told["unlike"] is expected
    card = ask(address, "/v1/runs/clinics/card.json").json
    assert "usual" not in card and "usual" not in ask(address, "/v1/runs").json[0]


@pytest.mark.parametrize(
    ("change", "status", "expected"),
    [
        (lambda b: b[:-4], 400, "expected a body of {n} bytes ({l} little-endian float32), got {less}"),
        (lambda b: b"", 400, "expected a body of {n} bytes ({l} little-endian float32), got 0"),
        (lambda b: b + b"\0", 413, "expected a body of {n} bytes ({l} little-endian float32), got more"),
        (lambda b: b * 100_000, 413, "got more"),
        (lambda b: b[:-4] + struct.pack("<f", float("nan")), 422, "expected {l} finite numbers, got NaN or infinity"),
        (lambda b: struct.pack("<f", float("-inf")) + b[4:], 422, "expected {l} finite numbers, got NaN or infinity"),
        (lambda b: struct.pack("<f", 3e38) * (len(b) // 4), 422, "expected a descriptor that describe.onnx made"),
    ],
)
def test_what_is_no_descriptor_is_refused(
    address: str, made: Made, change: Callable[[bytes], bytes], status: int, expected: str
) -> None:
    right = descriptor(made("clinics")[1]).tobytes()
    came = ask(address, POST, change(right))
    words = expected.format(n=len(right), l=len(right) // 4, less=len(right) - 4)
    assert came.status == status and words in came.json["error"] and set(came.json) == {"error"}


def test_a_body_without_an_end_is_refused_once_it_is_too_long(address: str) -> None:
    def endless() -> Iterator[bytes]:
        while True:
            yield b"\0" * 4096

    where = address.removeprefix("http://").rstrip("/")
    line = http.client.HTTPConnection(where, timeout=20)
    line.putrequest("POST", POST)
    line.putheader("Transfer-Encoding", "chunked")
    line.endheaders()
    for _, piece in zip(range(20), endless(), strict=False):
        try:
            line.send(b"%x\r\n" % len(piece) + piece + b"\r\n")
        except OSError:
            break  # it listens no more
    assert line.getresponse().status == 413
    line.close()


def test_what_is_not_there_is_said(address: str) -> None:
    for path, words in (
        ("/v1/runs/nobody/card.json", "there is no run 'nobody'; there are clinics, home, same"),
        ("/v1/runs/clinics/make.onnx", "clinics gives out card.json, schema.json, describe.onnx, model.onnx"),
        ("/v1/runs/clinics/checkpoint.safetensors", "checkpoint.safetensors is not among them"),
        ("/v1/runs/..%2Fclinics/card.json", ""),
        ("/page/..%2Fservice.py", ""),
        ("/page/service.py", "there is nothing here"),
        ("/elsewhere", "there is nothing at /elsewhere for GET"),
    ):
        came = ask(address, path)
        assert came.status == 404 and words in came.json["error"], path
    for name, words in (("home", "a newcomer makes its model by itself"), ("same", "everybody gets model.onnx")):
        came = ask(address, f"/v1/runs/{name}/personalize", b"\0" * 4)
        assert came.status == 404 and words in came.json["error"]
    assert ask(address, POST, kind="GET").status == 404  # no file of a bundle is called so
    assert ask(address, "/v1/runs", b"rows").status == 405
    assert ask(address, "/v1/runs/home/make.onnx").status == 200  # a newcomer makes its model of it


def test_files_are_those_of_the_bundle_and_have_etags(address: str, made: Made) -> None:
    for file in ("describe.onnx", "model.onnx", "schema.json"):
        came = ask(address, f"/v1/runs/clinics/{file}")
        assert came.body == (made("clinics")[1] / file).read_bytes() and came.headers["cache-control"] == "no-cache"
        again = ask(address, f"/v1/runs/clinics/{file}", headers={"If-None-Match": came.headers["etag"]})
        assert again.status == 304 and again.body == b"" and again.headers["etag"] == came.headers["etag"]
        assert ask(address, f"/v1/runs/clinics/{file}", headers={"If-None-Match": '"old"'}).status == 200


def test_every_answer_forbids_a_browser_all_but_this_service(address: str) -> None:
    for path in ("/", "/docs", "/page/app.js", "/offline.js", "/v1/runs", "/nowhere", "/healthz"):
        headers = ask(address, path).headers
        policy = headers["content-security-policy"]
        assert policy.startswith("default-src 'none'; script-src 'self';") and "unsafe" not in policy
        assert headers["x-content-type-options"] == "nosniff" and headers["referrer-policy"] == "no-referrer"
        assert "server" not in headers and "access-control-allow-origin" not in headers
    page = ask(address, "/").body.decode()
    inside = re.search(r'Content-Security-Policy" content="([^"]*)"', page)
    assert inside is not None and ask(address, "/").headers["content-security-policy"].startswith(inside[1])
    assert not re.search(r"(src|href)=\"(https?:)?//", page)


def test_it_is_described_and_counted(address: str) -> None:
    api = ask(address, "/openapi.json").json
    assert set(api["paths"]) >= {"/healthz", "/metrics", "/v1/runs", "/v1/runs/{name}/personalize"}
    taking = [path for path, kinds in api["paths"].items() if "post" in kinds]
    assert taking == ["/v1/runs/{name}/personalize"]  # nothing else takes anything
    assert b"little-endian float32" in ask(address, "/docs").body
    assert ask(address, "/healthz").json == {"status": "ok", "bundles": ["clinics", "home", "same"]}
    ask(address, POST, b"")
    told = ask(address, "/metrics").body.decode()
    assert f'unalike_requests_total{{path="{POST.replace("clinics", "{name}")}",status="400"}}' in told
    assert "clinics" not in told and "127.0.0.1" not in told


def test_keys_are_needed_where_there_are_some_and_each_has_its_own_limit(made: Made, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text(
        "# who may ask\nward 0123456789abcdef 2\nlab fedcba9876543210  # no limit of its own\n"
    )
    bundle, keys = made("clinics")[1], read_keys(tmp_path / "keys", 600)
    assert keys == {"0123456789abcdef": Key("ward", 2), "fedcba9876543210": Key("lab", 600)}
    v = descriptor(bundle).tobytes()
    with serving(bundle, keys=keys) as at:
        for wrong in ({}, {"Authorization": "Bearer 0123456789abcdeF"}, {"Authorization": "Bearer \xe4"}):
            came = ask(at, POST, v, headers=wrong)
            assert came.status == 401 and "Authorization: Bearer KEY" in came.json["error"]
            assert came.headers["www-authenticate"] == "Bearer"
        ward, lab = ({"Authorization": f"Bearer {key}"} for key in keys)
        assert [ask(at, POST, v, headers=ward).status for _ in range(3)] == [200, 200, 429]
        late = ask(at, POST, v, headers=ward)
        assert "at most 2 requests a minute; try again in" in late.json["error"]
        assert 1 <= int(late.headers["retry-after"]) <= 30
        assert ask(at, POST, v, headers=lab).status == 200
        assert ask(at, "/v1/runs/clinics/describe.onnx").status == 200  # files are for all
    with serving(bundle, limit=1) as at:
        assert [ask(at, POST, v).status for _ in range(2)] == [200, 429]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "holds no key"),
        ("ward short", "line 1: expected NAME KEY"),
        ("ward", "line 1: expected NAME KEY"),
        ("ward 0123456789abcdef many", "line 1: expected NAME KEY"),
        ("ward 0123456789abcdef 0.5", "at least 1"),
        ("a 0123456789abcdef\nb 0123456789abcdef", "line 2: the name or the key is there already"),
    ],
)
def test_keys_that_cannot_be_meant_are_refused(text: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text(text)
    with pytest.raises(UserError, match=words):
        read_keys(tmp_path / "keys", 600)
    with pytest.raises(UserError, match="cannot be read"):
        read_keys(tmp_path / "none", 600)


def test_with_offline_make_is_given_out(made: Made) -> None:
    with serving(made("clinics")[1], offline=True) as at:
        assert ask(at, "/v1/runs").json[0]["offline"] is True
        graph = ask(at, "/v1/runs/clinics/make.onnx").body
    v = descriptor(made("clinics")[1])
    theta = onnxruntime.InferenceSession(graph, providers=["CPUExecutionProvider"]).run(None, {"v": v})[0]
    assert np.isfinite(theta).all()


def changed(bundle: Path, rounds: int) -> None:
    """The same bundle with another card, as `unalike bundle` writes it: the card comes last."""
    card = json.loads((bundle / "card.json").read_bytes()) | {"rounds": rounds}
    (bundle / "card.json").write_text(json.dumps(card))


def test_a_bundle_that_is_written_anew_is_taken_up_and_a_damaged_one_is_not(
    made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("unalike.newcomers.service.CHECKED_EVERY", 0.0)
    bundle = tmp_path / "clinics"
    shutil.copytree(made("clinics")[1], bundle)
    v = descriptor(bundle).tobytes()
    with serving(bundle) as at:
        assert ask(at, "/v1/runs").json[0]["rounds"] == 2
        changed(bundle, 77)
        assert ask(at, "/v1/runs").json[0]["rounds"] == 77
        whole = (bundle / "model.onnx").read_bytes()
        (bundle / "model.onnx").write_bytes(whole[:-1])  # it is being written
        changed(bundle, 78)
        assert ask(at, "/v1/runs").json[0]["rounds"] == 77 and ask(at, POST, v).status == 200
        assert ask(at, "/v1/runs/clinics/model.onnx").body == whole
        (bundle / "model.onnx").write_bytes(whole)
        assert ask(at, "/v1/runs").json[0]["rounds"] == 78
        shutil.rmtree(bundle)
        assert ask(at, POST, v).status == 200


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda b: (b / "card.json").unlink(), "FileNotFoundError"),
        (lambda b: (b / "card.json").write_text("[]"), "expected a bundle that `unalike bundle` wrote"),
        (lambda b: (b / "card.json").write_text("{"), "write it again"),
        (lambda b: (b / "make.onnx").write_bytes(b"no graph"), "make.onnx is not the file that the card was written"),
        (lambda b: edit(b, format=2), "it has format 2, and this version reads 1"),
        (lambda b: edit(b, name="../up"), "its name '../up' has more than letters"),
        (lambda b: edit(b, files={"/etc/passwd": {}}), "'/etc/passwd', which no bundle has"),
    ],
)
def test_a_folder_that_is_no_bundle_is_refused(
    made: Made, tmp_path: Path, damage: Callable[[Path], object], words: str
) -> None:
    bundle = tmp_path / "clinics"
    shutil.copytree(made("clinics")[1], bundle)
    damage(bundle)
    with pytest.raises(UserError, match=re.escape(words)), serving(bundle):
        pass


def edit(bundle: Path, **values: Any) -> None:
    card = json.loads((bundle / "card.json").read_bytes()) | values
    (bundle / "card.json").write_text(json.dumps(card))


def test_two_bundles_of_one_name_are_refused(made: Made, tmp_path: Path) -> None:
    shutil.copytree(made("clinics")[1], tmp_path / "other")
    with pytest.raises(UserError, match="are both called 'clinics'"), serving(made("clinics")[1], tmp_path / "other"):
        pass


def test_the_page_as_a_folder_has_the_same_files(made: Made, tmp_path: Path, address: str) -> None:
    bundles = [made(name)[1] for name in ("clinics", "home", "same")]
    export_page(bundles, tmp_path)
    files = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()}
    for file in files - {"v1/runs.json"}:
        if file not in ("v1/runs/clinics/make.onnx", "v1/runs/clinics/card.json"):  # given out here: it works offline
            at = "/" if file == "index.html" else f"/{file}"
            assert ask(address, at).body == (tmp_path / file).read_bytes(), file
    cards = json.loads((tmp_path / "v1/runs.json").read_bytes())
    assert all(card["offline"] or card["made_at"] is None for card in cards) and "usual" not in str(cards)
    assert {"index.html", "offline.js", "page/app.js", "v1/runs/clinics/make.onnx"} <= files


@contextmanager
def as_command(*words: object) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """`unalike serve` as a process, and its address."""
    command = [sys.executable, "-m", "unalike", "serve", *map(str, words), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            found = re.search(r"https?://[\d.:]+", line)
            assert found, line + (process.stderr.read() if process.stderr else "")
            yield process, found[0]
        finally:
            process.kill()


def test_the_command_ends_by_sigterm_and_finishes_what_runs(made: Made) -> None:
    v = descriptor(made("clinics")[1]).tobytes()
    with as_command(made("clinics")[1]) as (process, at):
        host, port = at.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=20) as line:
            line.sendall(f"POST {POST} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(v)}\r\n\r\n".encode() + v[:-1])
            while "personalize" not in ask(at, "/openapi.json").body.decode():
                pass
            process.send_signal(signal.SIGTERM)
            time.sleep(0.5)  # it has been told
            with pytest.raises(ConnectionError), socket.create_connection((host, int(port)), timeout=5):
                pass  # nobody new is let in
            line.sendall(v[-1:])
            assert line.recv(4096).startswith(b"HTTP/1.1 200 ")
        output, errors = process.communicate(timeout=20)
    assert (output, errors) == ("", "")  # nothing is logged of what came
    assert process.returncode in (0, -signal.SIGTERM, 128 + signal.SIGTERM)


def test_the_process_has_no_torch_and_keeps_no_body(made: Made, tmp_path: Path) -> None:
    bundle = tmp_path / "clinics"
    shutil.copytree(made("clinics")[1], bundle)
    before = {path: path.read_bytes() for path in bundle.iterdir()}
    secret = np.float32([1234.5678] * (len(descriptor(bundle)))).astype("<f4").tobytes()
    with as_command(bundle) as (process, at):
        for body in (secret, secret[:-4], secret * 2):
            ask(at, POST, body)
        libraries = Path(f"/proc/{process.pid}/maps").read_text()
        files = [os.readlink(link) for link in Path(f"/proc/{process.pid}/fd").iterdir() if link.exists()]
        told = ask(at, "/metrics").body
        process.terminate()
        output, errors = process.communicate(timeout=20)
    assert "libtorch" not in libraries and "onnxruntime" in libraries
    assert not [file for file in files if file.startswith(str(tmp_path))]
    assert (output, errors) == ("", "") and b"1234" not in told
    assert {path: path.read_bytes() for path in bundle.iterdir()} == before


def test_it_speaks_tls(made: Made, tmp_path: Path) -> None:
    cert, key = certificate(tmp_path)
    with as_command(made("clinics")[1], "--tls-cert", cert, "--tls-key", key) as (_, at):
        assert at.startswith("https://")
        line = http.client.HTTPSConnection(
            at.removeprefix("https://"), context=ssl.create_default_context(cafile=str(cert)), timeout=20
        )
        line.request("GET", "/healthz")
        assert json.loads(line.getresponse().read())["status"] == "ok"
        line.close()


def certificate(folder: Path) -> tuple[Path, Path]:
    import datetime
    import ipaddress

    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    secret, name = ec.generate_private_key(ec.SECP256R1()), x509.Name([])
    start = datetime.datetime(2020, 1, 1)
    made = (
        x509.CertificateBuilder(name, name, secret.public_key(), x509.random_serial_number())
        .not_valid_before(start)
        .not_valid_after(start + datetime.timedelta(days=36500))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), critical=True)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(secret, hashes.SHA256())
    )
    cert, key = folder / "cert.pem", folder / "key.pem"
    cert.write_bytes(made.public_bytes(serialization.Encoding.PEM))
    plain = serialization.NoEncryption()
    key.write_bytes(
        secret.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.TraditionalOpenSSL, plain)
    )
    return cert, key


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("nowhere",), "nowhere: expected a bundle that `unalike bundle` wrote"),
        (("BUNDLE", "--tls-cert", "cert.pem"), "give --tls-cert and --tls-key together"),
        (("BUNDLE", "--keys", "none.txt"), "--keys none.txt cannot be read"),
        (("BUNDLE", "--host", "203.0.113.1"), "cannot listen at 203.0.113.1"),
        (("BUNDLE", "--tls-cert", "none.pem", "--tls-key", "none.pem"), "--tls-cert none.pem"),
    ],
)
def test_the_command_says_what_is_wrong(made: Made, words: tuple[str, ...], expected: str) -> None:
    named = [str(made("clinics")[1]) if word == "BUNDLE" else word for word in words]
    done = subprocess.run(
        [sys.executable, "-m", "unalike", "serve", *named], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 1 and expected in " ".join(done.stderr.split()), done.stderr


def test_no_answer_waits_until_its_head_is_acknowledged() -> None:
    with listen("127.0.0.1", 0) as service, socket.create_connection(service.getsockname()):
        accepted, _ = service.accept()
        with accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
