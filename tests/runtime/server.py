"""A server that may not open the clients' data: run as a process of its own, because an audit hook stays for ever.

python -m tests.runtime.server DATA NAME ...
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import numpy as np
import torch

from tests.runtime import problems
from tests.runtime.pipe import Pipe, Remote
from unalike import Federation


class Opened(Exception):
    """The server opened the clients' data."""


def main(data: str, *names: str) -> None:
    own = os.path.realpath(data)

    def watch(event: str, arguments: tuple[object, ...]) -> None:
        path = arguments[0] if event == "open" else None
        if isinstance(path, str | bytes | os.PathLike) and os.path.realpath(os.fsdecode(path)) == own:
            raise Opened(own)

    sys.addaudithook(watch)
    torch.set_num_threads(1)
    try:
        np.load(data)
        raise SystemExit("the hook sees nothing, so it proves nothing")
    except Opened:
        pass
    remote = Remote()
    for name in names:
        runtime = Pipe([remote], "tests.runtime.problems:method_of", name, Path(data))
        federation = Federation(runtime, 3, runtime.roster.select(range(problems.SEEN)))
        found = problems.outcome(problems.method_of(name), federation)
        print(name, f"{float(found['loss of each'].nanmean()):.4f}", sep="\t")
    remote.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
