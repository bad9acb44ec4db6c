"""``unalike node check``: what would keep a site from taking part, found before anybody waits for it.

Each check has a number, which is the exit code of the first that fails. gRPC calls an expired certificate and a dead
hub alike (UNAVAILABLE), so the handshake here is an own one.
"""

from __future__ import annotations

import shutil
import socket
import ssl
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

from cryptography import x509

from unalike.data import DataError
from unalike.deploy import keys
from unalike.deploy.node.host import SETTINGS, data_of, local_recipe
from unalike.deploy.node.ledger import FILE as LEDGER
from unalike.deploy.node.ledger import SiteLedger
from unalike.deploy.node.policy import FILE as POLICY
from unalike.deploy.node.policy import Policy, approved, digest_of
from unalike.runs.errors import UserError
from unalike.runs.load import load_data
from unalike.runs.recipe.recipe import Recipe
from unalike.runtime.network.frames import HUB

PATIENCE = 10.0  # seconds for each answer from the network
FREE = 1 << 30  # bytes on the disk, beside what the policy lets a run send
OFF = 120.0  # seconds that two clocks may differ
Greet = Callable[[str, bytes, bytes, bytes], tuple[str, str, float]]


class Problem(Exception):
    """A check failed: what is wrong, and what to do about it."""

    def __init__(self, what: str, fix: str) -> None:
        super().__init__(what)
        self.fix = fix


class Line(NamedTuple):
    """What one check found; ``problem`` is empty where all is well."""

    code: int
    name: str
    problem: str = ""
    fix: str = ""


@dataclass(frozen=True)
class Preflight:
    """A site's folder, and the recipe that it is asked to take part in, if one is known."""

    folder: Path
    greet: Greet
    recipe: Recipe | None = None
    schema: Path | None = None

    def lines(self) -> Iterator[Line]:
        """One line for each check. What depends on a check that failed is left out."""
        failed: set[str] = set()
        for code, name, check, after in (
            (10, "settings", self.settings, ()),
            (11, "key", self.key, ()),
            (12, "bundle", self.bundle, ("key",)),
            (13, "policy", self.policy, ()),
            (14, "ledger", self.ledger, ("key",)),
            (15, "disk", self.disk, ("policy",)),
            (16, "clock", self.clock, ("bundle",)),
            (17, "name of the hub", self.resolve, ("bundle",)),
            (18, "port of the hub", self.port, ("name of the hub",)),
            (19, "TLS", self.handshake, ("port of the hub",)),
            (20, "admission", self.admission, ("TLS",)),
            (21, "data", self.data, ("settings",)),
            (22, "recipe", self.rules, ("policy", "bundle")),
        ):
            if failed & set(after):
                failed.add(name)
                continue
            try:
                check()
            except Problem as problem:
                failed.add(name)
                yield Line(code, name, str(problem), problem.fix)
            except (UserError, DataError, OSError) as error:
                failed.add(name)
                yield Line(code, name, str(error), "see docs/deploy.md")
            else:
                yield Line(code, name)

    def _address(self) -> tuple[str, int]:
        host, _, port = keys.bundle_of(self.folder)[0]["address"].rpartition(":")
        return host, int(port)

    def settings(self) -> None:
        try:
            data_of(self.folder)
        except UserError as error:
            raise Problem(str(error), f"write the path of the site's rows into {self.folder / SETTINGS}") from error

    def key(self) -> None:
        try:
            keys.own_key(self.folder)
        except UserError as error:
            raise Problem(str(error), f"unalike node init {self.folder} --name NAME --data FILE") from error
        for path in (self.folder, self.folder / keys.KEY):
            if path.stat().st_mode & 0o077:
                raise Problem(f"others may read {path}", f"chmod go= {path}; if they did, make a new key")

    def bundle(self) -> None:
        try:
            facts, pair = keys.bundle_of(self.folder)
        except UserError as error:
            raise Problem(str(error), f"unalike node join {self.folder} BUNDLE") from error
        own = keys.fingerprint(keys.own_key(self.folder).public_key())
        if keys.fingerprint_of(pair.certificate) != own:
            raise Problem(f"the certificate of {facts['name']} is for another key", "send the hub the new request.pem")

    def policy(self) -> None:
        if not (self.folder / POLICY).exists():
            raise Problem(f"there is no {self.folder / POLICY}, so nothing is allowed", "write one; see docs/deploy.md")
        Policy.read(self.folder)

    def ledger(self) -> None:
        for _ in SiteLedger(self.folder).lines(signed=True):
            pass
        if (file := self.folder / LEDGER).exists() and file.stat().st_mode & 0o077:
            raise Problem(f"others may read {file}", f"chmod go= {file}")

    def disk(self) -> None:
        free, wanted = shutil.disk_usage(self.folder).free, FREE + (Policy.read(self.folder).megabytes << 20)
        if free < wanted:
            told = f"{free >> 20:,} MB are free, {wanted >> 20:,} MB are wanted"
            raise Problem(told, f"make room where {self.folder} is; old runs may go from its folder runs/")

    def clock(self) -> None:
        certificate = x509.load_pem_x509_certificate(keys.bundle_of(self.folder)[1].certificate)
        now, begin, end = datetime.now(UTC), certificate.not_valid_before_utc, certificate.not_valid_after_utc
        if now < begin:
            raise Problem(f"it is {now:%F %T} here, and the certificate begins at {begin:%F %T}", "set the clock (NTP)")
        if now > end:
            raise Problem(
                f"the certificate ended at {end:%F %T}",
                "ask the hub to admit the same request.pem again and join with the new bundle; or set the clock",
            )

    def resolve(self) -> None:
        host, port = self._address()
        try:
            socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except OSError as error:
            raise Problem(f"nobody knows the name {host}: {error}", "check the name, or DNS of this machine") from error

    def port(self) -> None:
        try:
            socket.create_connection(self._address(), PATIENCE).close()
        except OSError as error:
            host, port = self._address()
            raise Problem(
                f"{host} does not answer on port {port}: {error}",
                "let this machine connect outwards to that port; is the hub running (unalike network hub)?",
            ) from error

    def handshake(self) -> None:
        """TLS with both certificates, up to the first byte that the hub sends."""
        facts, pair = keys.bundle_of(self.folder)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.load_verify_locations(cadata=facts["authority"])
        context.set_alpn_protocols(["h2"])
        with tempfile.NamedTemporaryFile(suffix=".crt") as file:
            file.write(pair.certificate)
            file.flush()
            context.load_cert_chain(file.name, self.folder / keys.KEY)
        try:
            with (
                socket.create_connection(self._address(), PATIENCE) as line,
                context.wrap_socket(line, server_hostname=HUB) as inside,
            ):
                if not inside.recv(1):
                    raise OSError("the hub hung up after the handshake")
        except ssl.SSLCertVerificationError as error:
            raise Problem(
                f"the hub's certificate is refused here: {error.verify_message}",
                "if it has expired: unalike network renew, at the hub. If it is of another authority, something in "
                "between opens TLS (a proxy that inspects it), or the hub is another one: telephone",
            ) from error
        except OSError as error:
            raise Problem(
                f"the hub refuses this site's certificate: {error}",
                "ask the hub to admit request.pem again, and join with the new bundle",
            ) from error

    def admission(self) -> None:
        facts, pair = keys.bundle_of(self.folder)
        code, why, clock = self.greet(facts["address"], pair.key, pair.certificate, facts["authority"].encode())
        if code not in ("OK", "ALREADY_EXISTS"):  # the node itself is connected
            raise Problem(f"the hub says {code}: {why}", "ask the hub whether this site's line is in its file admitted")
        if code == "OK" and abs(away := time.time() - clock) > OFF:
            raise Problem(f"this clock is {away:+.0f} s off the hub's", "set both clocks (NTP)")

    def data(self) -> None:
        found = data_of(self.folder)
        if self.recipe is not None:
            load_data(local_recipe(self.recipe, found, self.schema))
        elif found.is_file():
            found.open("rb").close()

    def rules(self) -> None:
        if self.recipe is None:
            return
        policy, network = Policy.read(self.folder), keys.bundle_of(self.folder)[0]["network"]
        for refusal in policy.refusals(self.recipe, network):
            raise Problem(str(refusal), "unalike node explain lists all that the recipe asks; change it, or the policy")
        text = None if self.schema is None else self.schema.read_text(encoding="utf-8")
        digest = digest_of(self.recipe, text)
        if policy.approve and digest not in (*approved(self.folder), *policy.recipes):
            raise Problem(f"nobody here has approved {digest[:16]}", f"unalike node approve {self.folder} RECIPE")
