"""What a stranger can hand to Unalike, as functions of bytes: each reads them, or refuses them with a clear error.

A clear error is one of the kinds that a target names. Anything else that is raised is a fault, and so is a file that is
opened for writing, or one beyond the folder that is read.
"""

from __future__ import annotations

import json
import os
import platform
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import safetensors.torch
import torch

import unalike as ua
from tests.deploy.test_node import model_size, settled
from unalike.core import wire
from unalike.core.release import Partial
from unalike.core.request import ReleaseName, Reply, Request
from unalike.core.roster import Roster
from unalike.core.schema import Schema
from unalike.data import DataError
from unalike.data.schema_file import read_schema
from unalike.data.source import Names
from unalike.deploy import keys, plain
from unalike.deploy.node.host import KINDS, NodeHost
from unalike.deploy.node.ledger import SiteLedger
from unalike.newcomers.file import read_newcomer
from unalike.newcomers.ledger import ABOUT_LEDGER, read_ledger
from unalike.privacy import Gaussian, Ledger
from unalike.runs import checkpoint, data_ledger
from unalike.runs.errors import UserError
from unalike.runs.finished import FinishedRun
from unalike.runs.folder import JOURNAL
from unalike.runs.recipe.recipe import plan_of, read_toml
from unalike.runs.result import Result
from unalike.runtime.network import frames
from unalike.runtime.shard import journal

CLEAR = (UserError, DataError, wire.WireError)


@dataclass(frozen=True)
class Target:
    """``read`` takes bytes; ``seeds`` are some that it accepts; ``clear``: the errors that it may raise."""

    read: Callable[[bytes], object]
    seeds: Callable[[], list[bytes]]
    clear: tuple[type[Exception], ...] = CLEAR

    def __call__(self, data: bytes) -> bool:
        """Were the bytes accepted? Any error that is not a clear one goes through."""
        with guarded(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                self.read(data)
            except self.clear as error:
                assert len(str(error)) > 3, "the error says nothing"
                return False
        return True


# Files

_inside = False
_LIBRARIES = tuple(
    str(Path(one).resolve())
    for one in (
        np.__file__.partition("numpy")[0],
        sys.prefix,
        sys.base_prefix,
        Path(ua.__file__).parents[1],
        "/usr",
        "/proc",
        "/sys",
        "/dev",
        "/etc",
    )
)


@cache
def place() -> Path:
    """A folder of this process."""
    made = Path(tempfile.mkdtemp(prefix="unalike-fuzz-"))
    platform.processor()  # which asks uname once, whoever wants to know
    sys.addaudithook(_look)
    return made


def _look(event: str, arguments: tuple[Any, ...]) -> None:
    """No file is written while bytes are read, and none is read that lies elsewhere; nothing is started."""
    if not _inside:
        return
    if event in ("os.system", "subprocess.Popen", "os.exec", "socket.connect", "pickle.find_class"):
        raise AssertionError(f"{event} {arguments}")
    if event != "open" or not isinstance(arguments[0], str | bytes | os.PathLike):
        return
    path, flags = os.path.realpath(os.fsdecode(arguments[0])), arguments[2] or 0
    own = path.startswith(str(place().resolve())) or path == os.devnull
    if not own and (flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT) or not path.startswith(_LIBRARIES)):
        raise AssertionError(f"{path} was opened, which is outside of the folder")


@contextmanager
def guarded() -> Iterator[None]:
    global _inside
    place()
    _inside = True
    try:
        yield
    finally:
        _inside = False


def file(name: str, read: Callable[[Path], object]) -> Callable[[bytes], object]:
    """What reads a file of this name."""

    def from_bytes(data: bytes) -> object:
        path = place() / name
        path.write_bytes(data)
        return read(path)

    return from_bytes


@cache
def run() -> Path:
    """A small run on a table."""
    random = np.random.default_rng(0)
    rows = pd.DataFrame({"shop": np.repeat(["a", "b", "c", "d"], 8), "price": random.normal(size=32).round(2)})
    rows["kind"] = np.tile(["x", "y"], 16)
    rows["sold"] = np.tile(["no", "yes", "no", "no"], 8)
    rows.to_csv(table := place() / "rows.csv", index=False)
    ua.run("fedrep", str(table), client_column="shop", label_column="sold", rounds=1, cohort=1.0, out=place() / "run")
    return place() / "run"


@cache
def opened() -> FinishedRun:
    return FinishedRun.open(run())


@cache
def pictured() -> FinishedRun:
    """A run on pictures of 8x8."""
    ua.run("fedavg", "digits", clients=4, rounds=1, cohort=1.0, out=place() / "pictured")
    return FinishedRun.open(place() / "pictured")


def of_folder() -> list[tuple[str, bytes]]:
    """The files of a run's folder that are read when it is opened."""
    names = sorted(path for path in run().rglob("*") if path.suffix in (".json", ".toml", ".safetensors", ".jsonl"))
    return [(str(path.relative_to(run())), _original(path)) for path in names]


@cache
def _original(path: Path) -> bytes:
    return path.read_bytes()


def read_folder(data: bytes) -> None:
    """The first byte says which file of a run's folder the others take the place of."""
    files = of_folder()
    name, whole = files[data[0] % len(files)] if data else files[0]
    try:
        (run() / name).write_bytes(data[1:])
        FinishedRun.open(run())
        Result.load(run())
    finally:
        (run() / name).write_bytes(whole)


def read_checkpoint(data: bytes) -> None:
    folder = place() / "checkpoint"
    folder.mkdir(exist_ok=True)
    (folder / checkpoint.CHECKPOINT).write_bytes(data)
    found = checkpoint.load(folder)
    assert found is not None
    Ledger.from_state(found.about.ledger)


def read_reply(path: Path) -> None:
    """What a shard remembers of an ask; damaged: nothing."""
    if journal._read_reply(path) is None:
        raise UserError("nothing is remembered")


def own_site() -> Path:
    """A folder with a key, by which a ledger's lines are signed."""
    folder = place() / "site"
    if not folder.exists():
        keys.init_node(folder, "seed")
    return folder


def read_site(path: Path) -> object:
    folder = own_site()
    path.rename(folder / "ledger.jsonl")
    return SiteLedger(folder)


@cache
def host() -> NodeHost:
    """A site that has settled for a run."""
    folder = place() / "host" / "a"
    return settled(folder.parent)


def call_site(data: bytes) -> None:
    """The first byte says which call of a site it is; whatever comes, a site answers, and tells nothing of itself."""
    calls = ("load", "settle", "answer", "use", "forget", "commit", "rollback", "plans")
    before = host().__dict__.copy()
    answer = host().call(calls[data[0] % len(calls)] if data else "", data[1:])
    vars(host()).update(before)
    assert answer[:1] in b"+-?A!DM" and b"Traceback" not in answer and str(place()).encode() not in answer, answer[:200]
    if answer[:1] != b"+":
        raise UserError(answer.decode(errors="replace") + " refused")


def join_frames(data: bytes) -> None:
    joiner = frames.Joiner(1 << 16)
    for begin in range(0, len(data), 64):
        joiner.add(data[begin : begin + 64])


# Seeds


def request() -> bytes:
    one = Request(
        run="run", serial=3, task="FedAvg.fit", ids=torch.arange(3), wanted=(ReleaseName("mean", ("update",)),),
        shared={"theta": torch.ones(4)}, each={"v": torch.ones(3, 2)}, key=7,
        part="train", labels=True, purpose="train",
    )  # fmt: skip
    return one.encode()


def reply() -> bytes:
    arrays = [{"v": torch.ones(2, 3)}, {}]
    one = Reply(torch.tensor([0, 2]), arrays, {1: "no"}, {1: Partial(torch.ones(3).double(), 2.0, 2)}, "run", 3)
    return one.encode()


def ledger() -> Ledger:
    made = Ledger()
    made.record(Gaussian(2.0).event(), unit="point", newcomers=("a",))
    return made


def site() -> list[bytes]:
    folder = own_site()
    kept = SiteLedger(folder)
    kept.refuse("run", "methods", "no")
    kept.refuse("run", "noise", "none")
    return [(folder / "ledger.jsonl").read_bytes()]


def of_data() -> list[bytes]:
    entry = {"run": "1", "began": "2026-01-01", "method": "fedavg", "delta": 1e-5}
    spent = Ledger()
    spent.record(Gaussian(2.0).event(), unit="client")
    whole = {"about": data_ledger.ABOUT, "total_epsilon": 4.0, "runs": [{**entry, "ledger": spent.state()}]}
    return [json.dumps(whole).encode()]


def journals() -> list[bytes]:
    return [json.dumps({"ledger": ledger().state(), "serial": 4}).encode()]


def remembered() -> list[bytes]:
    return [journal.pack([reply(), safetensors.torch.save({"w": torch.ones(2)})])]


def facts() -> list[bytes]:
    clients = ua.Clients.from_sizes(torch.zeros(0, 2), None, torch.zeros(3, dtype=torch.int64))
    return [plain.encode(replace(clients, size=torch.tensor([3, 4, 5]), names=Names(np.array(["a", "b", "c"]))))]


def calls() -> list[bytes]:
    shared = {"theta": torch.zeros(model_size(host())), "rate": torch.tensor(0.1)}
    wanted = tuple(map(ReleaseName.of, host().journal.shard.program.task("FedAvg.fit").releases()))
    asked = replace(Request.decode(request()), wanted=wanted, shared=shared, each={})
    schema = host().journal.shard.roster.schema.to_json().encode()
    return [b"\x02" + asked.encode(), b"\x03" + schema, b'\x04["run", ""]', b'\x05["run", 1]', b'\x06["run", 0]']


def arrays() -> list[bytes]:
    np.savez(path := place() / "seed.npz", x=np.zeros((3, 1, 8, 8), np.float32), y=np.array([0, 1, 2]))
    return [path.read_bytes()]


def parquet() -> list[bytes]:
    pd.DataFrame({"price": [1.0, 2.0], "kind": ["x", "y"]}).to_parquet(path := place() / "seed.parquet")
    return [path.read_bytes()]


def pictures() -> list[bytes]:
    from PIL import Image

    Image.init()  # its plugins are files, too, and are read before anything of a stranger's
    made = []
    for ending in ("png", "gif", "bmp", "jpg", "tiff"):
        Image.fromarray(np.arange(64, dtype=np.uint8).reshape(8, 8)).save(path := place() / f"seed.{ending}")
        made.append(path.read_bytes())
    return made


def read_picture(data: bytes) -> object:
    folder = place() / "pictures" / "newcomer" / "3"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "one.png").write_bytes(data)
    return read_newcomer(pictured(), folder.parents[1])


def schemas() -> list[bytes]:
    return [opened().schema.to_json().encode(), pictured().schema.to_json().encode()]


def recipes() -> list[bytes]:
    return [(run() / "recipe.toml").read_bytes(), *(path.read_bytes() for path in list(Path("recipes").glob("*.toml")))]


def newcomer(name: str, of: Callable[[], FinishedRun]) -> Callable[[bytes], object]:
    return file(name, lambda path: read_newcomer(of(), path))


def tables() -> list[bytes]:
    return [b"price,kind,sold\n1.5,x,no\n2,y,yes\n", b'kind,price\n"x",-1e3\n']


TARGETS: dict[str, Target] = {
    "wire": Target(wire.decode, lambda: [request(), reply()]),
    "request": Target(Request.decode, lambda: [request()]),
    "reply": Target(Reply.decode, lambda: [reply()]),
    "frames": Target(join_frames, lambda: [b"".join(frames.split(1, 2, reply()))], (frames.TooLong,)),
    "plain": Target(lambda data: plain.decode(data, KINDS), facts),
    "site": Target(call_site, calls),
    "roster": Target(Roster.decode, lambda: [opened().roster.encode()], (ValueError,)),
    "schema": Target(lambda data: Schema.from_json(data.decode()), schemas, (ValueError,)),
    "schema-file": Target(file("schema.json", read_schema), schemas),
    "recipe": Target(file("recipe.toml", lambda path: plan_of(read_toml(path), str(path))), recipes),
    "folder": Target(read_folder, lambda: [bytes([at]) + whole for at, (_, whole) in enumerate(of_folder())]),
    "checkpoint": Target(read_checkpoint, lambda: [(run() / checkpoint.CHECKPOINT).read_bytes()]),
    "journal": Target(file(JOURNAL, lambda path: checkpoint.recall_charges(path.parent)), journals),
    "shard-journal": Target(file("1.reply", read_reply), remembered),
    "ledger": Target(
        file("newcomer.json", read_ledger),
        lambda: [json.dumps({"about": ABOUT_LEDGER, "delta": 1e-5, **ledger().state()}).encode()],
    ),
    "data-ledger": Target(file("rows.runs.ledger.json", data_ledger.read), of_data),
    "site-ledger": Target(file("line", read_site), site),
    "csv": Target(newcomer("one.csv", opened), tables),
    "parquet": Target(newcomer("one.parquet", opened), parquet),
    "npz": Target(newcomer("one.npz", pictured), arrays),
    "pictures": Target(read_picture, pictures),
}
