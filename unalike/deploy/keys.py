"""The keys of a network: an authority and a server key at the hub; at each site a key that never leaves it.

A site makes its key and a request. The hub answers with a bundle: a certificate, the authority's, and where to dial.
Both sides show the fingerprint of a public key (SHA-256), which people compare by telephone. A certificate alone opens
nothing: the hub also wants the key's fingerprint in its file ``admitted``.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from unalike.core.disk import write_whole
from unalike.runs.errors import UserError
from unalike.runtime.network.frames import HUB

NETWORK, ADMITTED = "network.json", "admitted"  # of the hub's folder
BUNDLE, REQUEST, KEY = "bundle.json", "request.pem", "key.pem"  # of a site's folder
_NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,39}")
_YEARS = {"authority": 10, "hub": 2, "node": 2}
_LATE = timedelta(minutes=10)  # that a site's clock may be behind


def fingerprint(key: Any) -> str:
    """SHA-256 of a public key."""
    made = hashes.Hash(hashes.SHA256())
    made.update(key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo))
    return made.finalize().hex()


def fingerprint_of(certificate: bytes) -> str:
    """The fingerprint of the public key in a certificate in PEM; empty where there is none."""
    try:
        return fingerprint(x509.load_pem_x509_certificate(certificate).public_key())
    except ValueError:
        return ""


def spoken(key: str) -> str:
    """A fingerprint in groups, as one reads it out."""
    return " ".join(key[place : place + 8] for place in range(0, len(key), 8))


@dataclass(frozen=True)
class Pair:
    """A private key and its certificate, in PEM."""

    key: bytes
    certificate: bytes


def _name(common: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common)])


def _signed(common: str, kind: str, key: Any, issuer: x509.Name, by: Any, days: float | None) -> bytes:
    """A certificate for a public key, for one use alone: an authority signs, a hub serves, a node dials."""
    now = datetime.now(UTC)
    lasts = timedelta(days=365 * _YEARS[kind] if days is None else days)
    made = (
        x509.CertificateBuilder()
        .subject_name(_name(common))
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _LATE)
        .not_valid_after(now + lasts)
        .add_extension(x509.BasicConstraints(ca=kind == "authority", path_length=None), critical=True)
    )
    if kind == "hub":
        made = made.add_extension(x509.SubjectAlternativeName([x509.DNSName(HUB)]), critical=False)
    if kind != "authority":
        use = ExtendedKeyUsageOID.SERVER_AUTH if kind == "hub" else ExtendedKeyUsageOID.CLIENT_AUTH
        made = made.add_extension(x509.ExtendedKeyUsage([use]), critical=True)
    return made.sign(by, hashes.SHA256()).public_bytes(Encoding.PEM)


def _private(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def own_folder(folder: Path) -> None:
    """A folder that nobody else can look into."""
    folder.mkdir(parents=True, exist_ok=True)
    os.chmod(folder, 0o700)


# At the hub


def init_network(folder: Path, name: str, address: str, listen: str | None = None) -> str:
    """Make a network's authority and its server's key; gives the authority's fingerprint.

    address: where nodes dial, ``host:port``. listen: where the hub listens, if that is another address.
    """
    check_name(name)
    for one in (address, listen or address):
        if not re.fullmatch(r"[^\s/]+:\d{1,5}", one):
            raise UserError(f"address {one!r}: expected host:port, for example hub.example.org:8443")
    if (folder / NETWORK).exists():
        raise UserError(f"{folder} is a network already; its keys are not overwritten")
    own_folder(folder)
    authority = ec.generate_private_key(ec.SECP256R1())
    issuer = _name(f"unalike network {name}")
    own = _signed(f"unalike network {name}", "authority", authority.public_key(), issuer, authority, None)
    write_whole(folder / "authority.key", _private(authority))
    write_whole(folder / "authority.crt", own)
    write_whole(folder / ADMITTED, b"")
    facts = {"name": name, "address": address, "listen": listen or address}
    write_whole(folder / NETWORK, json.dumps(facts, indent=1).encode())
    renew_hub(folder)
    return fingerprint(authority.public_key())


def renew_hub(folder: Path, days: float | None = None) -> None:
    """A new key and certificate for the hub. Sites need nothing new: they know it by the authority."""
    authority, issuer = _authority(folder)
    key = ec.generate_private_key(ec.SECP256R1())
    write_whole(folder / "hub.crt", _signed(HUB, "hub", key.public_key(), issuer, authority, days))
    write_whole(folder / "hub.key", _private(key))


def _authority(folder: Path) -> tuple[Any, x509.Name]:
    network(folder)
    key = load_pem_private_key((folder / "authority.key").read_bytes(), None)
    return key, x509.load_pem_x509_certificate((folder / "authority.crt").read_bytes()).subject


def network(folder: Path) -> dict[str, str]:
    """The name of a network and its addresses."""
    try:
        return {str(key): str(value) for key, value in json.loads((folder / NETWORK).read_bytes()).items()}
    except (OSError, ValueError, AttributeError) as error:
        raise UserError(f"{folder} is no folder of a network; make one: unalike network init {folder}") from error


def admit(folder: Path, request: Path, days: float | None = None) -> tuple[str, str, Path]:
    """Admit the site that made this request: its name, its key's fingerprint, and the bundle for it.

    A site that is admitted again, for a longer time or with a new key, takes the place of its older line.
    """
    authority, issuer = _authority(folder)
    try:
        asked = x509.load_pem_x509_csr(request.read_bytes())
        name = str(asked.subject.get_attributes_for_oid(NameOID.COMMON_NAME)[0].value)
        if not asked.is_signature_valid:
            raise ValueError("its signature is not of its key")
    except (OSError, ValueError, IndexError) as error:
        raise UserError(f"{request} is no request of a site (`unalike node init` makes one): {error}") from error
    check_name(name)
    key: Any = asked.public_key()
    certificate = _signed(name, "node", key, issuer, authority, days)
    bundle = folder / f"{name}.bundle.json"
    facts = {
        "name": name, "network": network(folder)["name"], "address": network(folder)["address"],
        "certificate": certificate.decode(), "authority": (folder / "authority.crt").read_text(),
    }  # fmt: skip
    write_whole(bundle, json.dumps(facts, indent=1).encode())
    others = {one: known for one, known in admitted(folder).items() if known != name and one != fingerprint(key)}
    lines = [f"{known} {one}" for one, known in {**others, fingerprint(key): name}.items()]
    write_whole(folder / ADMITTED, "".join(f"{line}\n" for line in sorted(lines)).encode())
    return name, fingerprint(key), bundle


def admitted(folder: Path) -> dict[str, str]:
    """The names of admitted nodes by their keys' fingerprints. To revoke one, delete its line."""
    lines = (folder / ADMITTED).read_text().splitlines() if (folder / ADMITTED).exists() else []
    parts = [line.split() for line in lines if line.strip() and not line.startswith("#")]
    return {one[1]: one[0] for one in parts if len(one) == 2}


# At a site


def check_name(name: str) -> None:
    if not _NAME.fullmatch(name):
        raise UserError(f"name {name!r}: expected at most 40 lower-case letters, digits and -")


def init_node(folder: Path, name: str) -> str:
    """Make a site's key, which stays there, and its request; gives the fingerprint."""
    check_name(name)
    if (folder / KEY).exists():
        raise UserError(f"{folder} has a key already, and it is not overwritten; move it away to make a new one")
    own_folder(folder)
    key = ec.generate_private_key(ec.SECP256R1())
    asked = x509.CertificateSigningRequestBuilder().subject_name(_name(name)).sign(key, hashes.SHA256())
    write_whole(folder / KEY, _private(key))
    write_whole(folder / REQUEST, asked.public_bytes(Encoding.PEM), mode=0o644)
    return fingerprint(key.public_key())


def own_key(folder: Path) -> Any:
    """A site's private key."""
    try:
        return load_pem_private_key((folder / KEY).read_bytes(), None)
    except (OSError, ValueError) as error:
        raise UserError(f"{folder / KEY} is no key of a site (`unalike node init` makes one): {error}") from error


def sign(key: Any, text: str) -> str:
    return str(key.sign(text.encode(), ec.ECDSA(hashes.SHA256())).hex())


def is_signed(key: Any, text: str, signature: str) -> bool:
    """Is this the signature of a text by the private key's owner?"""
    try:
        key.public_key().verify(bytes.fromhex(signature), text.encode(), ec.ECDSA(hashes.SHA256()))
    except (InvalidSignature, ValueError):
        return False
    return True


def join(folder: Path, bundle: Path) -> dict[str, str]:
    """Take a hub's bundle; refused where it is for another key. Gives its facts, with the authority's fingerprint."""
    facts = _bundle(bundle)
    if fingerprint(own_key(folder).public_key()) != fingerprint_of(facts["certificate"].encode()):
        raise UserError(f"{bundle} is for another key than that of {folder}; send the hub this site's {REQUEST}")
    write_whole(folder / BUNDLE, json.dumps(facts, indent=1).encode())
    return {**facts, "fingerprint": fingerprint_of(facts["authority"].encode())}


def bundle_of(folder: Path) -> tuple[dict[str, str], Pair]:
    """A site's bundle and its key."""
    facts = _bundle(folder / BUNDLE)
    return facts, Pair((folder / KEY).read_bytes(), facts["certificate"].encode())


def _bundle(file: Path) -> dict[str, str]:
    try:
        facts: Mapping[str, Any] = json.loads(file.read_bytes())
        return {name: str(facts[name]) for name in ("name", "network", "address", "certificate", "authority")}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{file} is no bundle of a hub (`unalike network admit` makes one): {error}") from error
