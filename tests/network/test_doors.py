"""Who gets in at a hub, and who does not: wrong certificates, plain HTTP, other methods, frames too long."""

from __future__ import annotations

import asyncio
import http.client
import json
import shutil
import socket
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import grpc
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding
from typer.testing import CliRunner

from tests.network.sites import Network, free_port, rows
from unalike.commands.main import app
from unalike.deploy import keys
from unalike.runtime.network import frames
from unalike.runtime.network.dial import Dial
from unalike.runtime.network.reach import Nodes, ask_hub
from unalike.runtime.workers import Unreachable

ENDS = (grpc.StatusCode.UNAVAILABLE,)  # what a failed TLS handshake looks like to who dials


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Network]:
    made = Network(tmp_path_factory.mktemp("doors"))
    for number, name in enumerate("ab"):
        made.add_site(name, rows(number))
    made.start_all()
    made.until(made.status)
    yield made
    made.close()


def hello(instance: str = "x") -> bytes:
    return next(frames.split(0, 0, json.dumps({"instance": instance, "version": "v"}).encode()))


class Caller:
    """Dials with some key and certificate, and holds a stream."""

    def __init__(self, network: Network, pair: keys.Pair | None, method: str = frames.METHOD) -> None:
        authority = (network.hub / "authority.crt").read_bytes()
        secret = grpc.ssl_channel_credentials(authority, *((pair.key, pair.certificate) if pair else ()))
        named = (("grpc.ssl_target_name_override", frames.HUB), ("grpc.max_send_message_length", -1))
        self.channel = grpc.secure_channel(f"127.0.0.1:{network.port}", secret, named)
        self.say: list[bytes] = []
        self.answers = self.channel.stream_stream(method)(self._said())

    def _said(self) -> Iterator[bytes]:
        end = time.monotonic() + 30
        while time.monotonic() < end and self.channel is not None:
            while self.say:
                yield self.say.pop(0)
            time.sleep(0.02)

    def __enter__(self) -> Caller:
        return self

    def __exit__(self, *_: object) -> None:
        channel, self.channel = self.channel, None
        channel.close()

    def refused(self) -> tuple[grpc.StatusCode, str]:
        self.say.append(hello())
        with pytest.raises(grpc.RpcError) as told:
            while True:
                next(self.answers)
        return told.value.code(), told.value.details()


def pair_of(network: Network, name: str) -> keys.Pair:
    return keys.bundle_of(network.folder / name)[1]


def signed_by_itself(name: str) -> keys.Pair:
    key, now = ec.generate_private_key(ec.SECP256R1()), datetime.now(UTC)
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
    made = x509.CertificateBuilder(subject, subject, key.public_key(), 1, now, now + timedelta(days=1))
    return keys.Pair(keys._private(key), made.sign(key, hashes.SHA256()).public_bytes(Encoding.PEM))


def readmitted(network: Network, tmp_path: Path, days: float) -> keys.Pair:
    """A pair of a site "late", which is admitted for so many days."""
    site = tmp_path / "late"
    keys.init_node(site, "late")
    _, _, bundle = keys.admit(network.hub, site / keys.REQUEST, days)
    keys.join(site, bundle)
    return keys.bundle_of(site)[1]


def test_a_site_gets_in(network: Network) -> None:
    with Caller(network, pair_of(network, "a")) as caller:
        caller.say.append(hello())
        assert frames.head(next(caller.answers))[2] == frames.PING
        assert "a" in network.status()["nodes"]
    network.until(lambda: "a" not in network.status()["nodes"])


def test_wrong_certificates(network: Network, tmp_path: Path) -> None:
    with Caller(network, None) as caller:
        assert caller.refused()[0] in ENDS
    with Caller(network, signed_by_itself("a")) as caller:
        assert caller.refused()[0] in ENDS
    expired = readmitted(network, tmp_path, 1 / 86400)
    time.sleep(1.5)
    with Caller(network, expired) as caller:
        assert caller.refused()[0] in ENDS
    own = keys.Pair((network.hub / "hub.key").read_bytes(), (network.hub / "hub.crt").read_bytes())
    with Caller(network, own) as caller:  # the server's own is for serving
        assert caller.refused()[0] in (*ENDS, grpc.StatusCode.PERMISSION_DENIED)
    mixed = keys.Pair(pair_of(network, "b").key, pair_of(network, "a").certificate)
    with Caller(network, mixed) as caller, pytest.raises(grpc.RpcError):
        caller.say.append(hello())
        next(caller.answers)
    assert network.status()["nodes"] == {}


def test_the_same_authority_is_not_enough(network: Network, tmp_path: Path) -> None:
    pair, file = readmitted(network, tmp_path, 1), network.hub / keys.ADMITTED
    file.write_text("".join(line for line in file.read_text().splitlines(True) if not line.startswith("late ")))
    with Caller(network, pair) as caller:
        assert caller.refused() == (grpc.StatusCode.PERMISSION_DENIED, "this key is not admitted here")


def test_a_renewed_certificate_needs_no_other_site_to_change(network: Network) -> None:
    site = network.folder / "a"
    _, key, bundle = keys.admit(network.hub, site / keys.REQUEST, days=30)
    keys.join(site, bundle)
    assert sorted(keys.admitted(network.hub).values()).count("a") == 1 and key in keys.admitted(network.hub)
    for name in "ab":
        with Caller(network, pair_of(network, name)) as caller:
            caller.say.append(hello())
            next(caller.answers)
        network.until(lambda: network.status()["nodes"] == {})


def test_revoking_ends_the_open_stream(network: Network) -> None:
    file = network.hub / keys.ADMITTED
    before = file.read_text()
    with Caller(network, pair_of(network, "b")) as caller:
        caller.say.append(hello())
        next(caller.answers)
        file.write_text("".join(line for line in before.splitlines(True) if not line.startswith("b ")))
        with pytest.raises(grpc.RpcError) as told:
            while True:
                next(caller.answers)
        assert (told.value.code(), told.value.details()) == (
            grpc.StatusCode.PERMISSION_DENIED,
            "this key is not admitted any more",
        )
    file.write_text(before)


def test_two_processes_with_one_key(network: Network) -> None:
    with Caller(network, pair_of(network, "a")) as first, Caller(network, pair_of(network, "a")) as second:
        first.say.append(hello("one"))
        next(first.answers)
        code, why = second.refused()
        assert code == grpc.StatusCode.ALREADY_EXISTS and "connected already" in why
        assert network.status()["nodes"].keys() == {"a"}
    network.until(lambda: network.status()["nodes"] == {})


def test_plain_http_and_other_methods(network: Network) -> None:
    line = http.client.HTTPConnection("127.0.0.1", network.port, timeout=5)
    with pytest.raises((OSError, http.client.HTTPException)):
        line.request("GET", "/")
        line.getresponse()
    line.close()
    for method in ("/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo", "/unalike.Network/Other"):
        with Caller(network, pair_of(network, "a"), method) as caller:
            assert caller.refused()[0] == grpc.StatusCode.UNIMPLEMENTED
    insecure = grpc.insecure_channel(f"127.0.0.1:{network.port}")
    with pytest.raises(grpc.RpcError):
        next(insecure.stream_stream(frames.METHOD)(iter([hello()])))
    insecure.close()


def test_frames_that_are_too_long_or_none(network: Network) -> None:
    for wrong in (bytes(frames.LONGEST + 1), b"", b"short"):
        with Caller(network, pair_of(network, "a")) as caller:
            caller.say += [hello(), wrong]
            with pytest.raises(grpc.RpcError) as told:
                while True:
                    next(caller.answers)
            assert told.value.code() in (
                grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.CANCELLED,
            )  # fmt: skip
        network.until(lambda: network.status()["nodes"] == {})
    with Caller(network, pair_of(network, "a")) as caller:
        caller.say.append(frames.HEAD.pack(0, 0, frames.LAST) + b"no greeting")
        assert caller.refused()[0] == grpc.StatusCode.INVALID_ARGUMENT


def check(site: Path, *flags: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["node", "check", str(site), *flags], env={"COLUMNS": "400"})
    assert done.exception is None or isinstance(done.exception, SystemExit), done.output
    return done.exit_code, done.output


def test_what_would_keep_a_site_away_is_found_before(network: Network, tmp_path: Path) -> None:
    assert check(network.folder / "a")[0] == 0
    site = tmp_path / "a"

    def anew() -> None:
        shutil.rmtree(site, ignore_errors=True)
        shutil.copytree(network.folder / "a", site)

    def bundle(**changed: str) -> None:
        file = site / keys.BUNDLE
        file.write_text(json.dumps({**json.loads(file.read_text()), **changed}))

    other = tmp_path / "other"
    keys.init_network(other, "tests", "127.0.0.1:1")
    expired = keys.admit(other, network.folder / "a" / keys.REQUEST, days=-5 / 1440)[2]
    certificate = json.loads(expired.read_text())["certificate"]
    own = keys.admit(other, network.folder / "a" / keys.REQUEST)[2]
    wrong: list[tuple[int, Callable[[], object], str]] = [
        (10, lambda: (site / "node.toml").unlink(), "expected a line such as"),
        (10, lambda: (site / "rows.csv").unlink(), "there is no file or folder"),
        (11, lambda: (site / keys.KEY).unlink(), "no key of a site"),
        (11, lambda: (site / keys.KEY).chmod(0o644), "others may read"),
        (12, lambda: (site / keys.BUNDLE).unlink(), "no bundle of a hub"),
        (12, lambda: bundle(certificate=json.loads((network.folder / "b" / keys.BUNDLE).read_text())["certificate"]),
         "is for another key"),
        (13, lambda: (site / "policy.toml").unlink(), "nothing is allowed"),
        (13, lambda: (site / "policy.toml").write_text("round = 3"), "round"),
        (14, lambda: (site / "ledger.jsonl").write_text("{}\n"), "changed or is damaged"),
        (15, lambda: (site / "policy.toml").write_text("megabytes = 1000000000"), "are free"),
        (16, lambda: bundle(certificate=certificate), "the certificate ended"),
        (17, lambda: bundle(address="nowhere.invalid:1"), "nobody knows the name"),
        (18, lambda: bundle(address=f"127.0.0.1:{free_port()}"), "does not answer on port"),
        (19, lambda: bundle(authority=json.loads(own.read_text())["authority"]), "the hub's certificate is refused"),
        (19, lambda: bundle(certificate=json.loads(own.read_text())["certificate"]), "certificate"),
    ]  # fmt: skip
    for code, spoil, told in wrong:
        anew()
        spoil()
        found, output = check(site)
        assert found == code and told in output, (code, told, output)
    recipe = tmp_path / "recipe.toml"
    recipe.write_text('method = "fedavg"\nrounds = 21\n')
    found, output = check(network.folder / "a", "--recipe", str(recipe))
    assert found == 22 and "rule rounds" in output
    recipe.write_text('method = "fedavg"\nrounds = 2\n[data.options]\nfeatures = "a,weight"\n')
    found, output = check(network.folder / "a", "--recipe", str(recipe))
    assert found == 21 and "weight" in output  # the column that the site lacks is named
    file = network.hub / keys.ADMITTED
    before = file.read_text()
    file.write_text("".join(line for line in before.splitlines(True) if not line.startswith("a ")))
    found, output = check(network.folder / "a")
    file.write_text(before)
    assert found == 20 and "not admitted" in output


def test_a_certificate_that_is_not_valid_yet(network: Network, monkeypatch: pytest.MonkeyPatch) -> None:
    class Behind(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> datetime:  # a clock that is an hour behind
            return datetime.now(tz) - timedelta(hours=1)

    monkeypatch.setattr("unalike.deploy.node.check.datetime", Behind)
    found, output = check(network.folder / "b")
    assert found == 16 and "set the clock" in output


def test_the_socket_of_runs(network: Network) -> None:
    path = network.hub / frames.SOCKET
    assert path.stat().st_mode & 0o777 == 0o600 and network.hub.stat().st_mode & 0o777 == 0o700
    with pytest.raises(Unreachable, match="the node z is not connected"):
        ask_hub(network.hub, do="reach", node="z")
    with pytest.raises(Unreachable, match="asks for the status, or to reach"):
        ask_hub(network.hub, do="stop")
    for wrong in (b"\xff\xff\xff\xff", b"\x05\x00\x00\x00hello", b"\x02\x00\x00\x00[]"):
        with socket.socket(socket.AF_UNIX) as line:
            line.settimeout(5)
            line.connect(str(path))
            line.sendall(wrong)
            assert line.recv(100) == b""
    assert network.status()["nodes"] == {}


def test_a_message_that_is_too_long_for_a_site(network: Network) -> None:
    network.start_site("b")
    nodes = Nodes(network.hub, ["b"])
    try:
        (network.folder / "b" / "policy.toml").read_text()
        answer: Any = nodes.begin(0, "load", bytes((100 << 20) + 1)).result(60)
        assert answer.startswith(b"-a message of 104,8") and answer.endswith(b"at most 104,857,600 are taken")
        assert nodes.begin(0, "version").result(60).startswith(b"+")  # and the line goes on
        for junk in (b"", b"no name", b"\x00" * 9):
            assert nodes.begin(0, "answer", junk).result(60)[:1] in (b"-", b"!", b"?")
    finally:
        nodes.close()
        network.kill("b")


def test_a_node_whose_work_cannot_go_on_dials_again(network: Network) -> None:
    """Where it cannot even answer, its run sees that it is lost; the process lives."""
    said: list[str] = []
    facts, pair = keys.bundle_of(network.folder / "a")

    def host(what: str, *data: bytes) -> Any:
        return None if what == "break" else b"+" + b"".join(data)  # which cannot be sent

    async def live() -> None:
        dial = Dial(lambda: host, "v", 1 << 20, said.append)
        address, authority = facts["address"], facts["authority"].encode()
        keeping = asyncio.create_task(dial.keep(address, pair.key, pair.certificate, authority))
        nodes = Nodes(network.hub, ["a"])
        try:
            await asyncio.to_thread(network.until, lambda: network.status()["nodes"]["a"])
            with pytest.raises(Unreachable, match="node a was lost"):
                await asyncio.to_thread(nodes.begin(0, "break").result, 60)

            def answers() -> bool:
                return nodes.begin(0, "say", b"here").result(60) == b"+here"

            await asyncio.to_thread(network.until, answers)
        finally:
            nodes.close()
            keeping.cancel()
        with pytest.raises(asyncio.CancelledError):
            await keeping

    asyncio.run(live())
    assert any("INTERNAL: TypeError" in line for line in said) and said.count("connected") == 2
    network.until(lambda: network.status()["nodes"] == {})


def test_files_of_a_network_are_its_owners_alone(network: Network) -> None:
    private = [network.hub / "authority.key", network.hub / "hub.key", network.folder / "a" / keys.KEY]
    assert all(file.stat().st_mode & 0o777 == 0o600 for file in private)


def test_keys_are_not_overwritten_and_bundles_are_of_one_key(network: Network, tmp_path: Path) -> None:
    from unalike.runs.errors import UserError

    with pytest.raises(UserError, match="not overwritten"):
        keys.init_network(network.hub, "tests", "127.0.0.1:1")
    with pytest.raises(UserError, match="not overwritten"):
        keys.init_node(network.folder / "a", "a")
    keys.init_node(tmp_path / "c", "c")
    with pytest.raises(UserError, match="is for another key"):
        keys.join(tmp_path / "c", network.folder / "a" / keys.BUNDLE)
    for wrong in ("A", "", "../x", "a b", "a" * 41):
        with pytest.raises(UserError, match="lower-case"):
            keys.init_node(tmp_path / "d", wrong)
    (tmp_path / "request.pem").write_text("nonsense")
    with pytest.raises(UserError, match="no request of a site"):
        keys.admit(network.hub, tmp_path / "request.pem")
    shutil.copy(network.folder / "b" / keys.REQUEST, tmp_path / "b.pem")
    before = keys.admitted(network.hub)
    keys.admit(network.hub, tmp_path / "b.pem")
    assert keys.admitted(network.hub) == before
