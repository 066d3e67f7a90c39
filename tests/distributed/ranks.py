"""Real ranks for tests: a function of a test's file in several processes that are one `Group`.

    def says(group, word):                       # at the top of the test's file, which the ranks import
        return group.gather([group.rank, word])

    run_ranks(3, f"{__file__}:says", {"word": "hi"}) == [[[0, "hi"], [1, "hi"], [2, "hi"]]] * 3

They are `forks.Fork`s, which run this file.
"""

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from forks import Fork
from process_tree import abort


def run_ranks(
    count: int, function: str, arguments: Mapping[str, Any] | None = None, limit_s: float = 200, timeout_s: float = 30
) -> list[Any]:
    """Call `function(group, **arguments)` in `count` processes; returns the results in rank order.

    function: "path of a file:name". arguments, results: JSON values. limit_s: All are killed afterwards. timeout_s: Of
    the group's collectives. If an exit code is not 0, fails with the ranks' output.
    """
    with tempfile.TemporaryDirectory(prefix="ranks-") as name:
        folder = Path(name)
        codes = wait_ranks(start_ranks(count, function, arguments, folder, timeout_s), limit_s)
        if any(code != 0 for code in codes):
            printed = "\n".join(f"--- rank {r}\n{output(folder, r)}" for r in range(count))
            raise AssertionError(f"exit codes {codes} of {function}\n{printed}")
        return [json.loads((folder / f"result-{rank}").read_text()) for rank in range(count)]


def start_ranks(
    count: int, function: str, arguments: Mapping[str, Any] | None, folder: Path, timeout_s: float = 30
) -> list[Fork]:
    """Like `run_ranks`, without waiting. folder: Empty directory for inputs, outputs and results (`result-0`, ...)."""
    shared = {**os.environ, "WORLD_SIZE": str(count), "QARL_RANKS": str(folder)}
    argv = [function, json.dumps(dict(arguments or {})), str(timeout_s)]
    return [
        Fork(
            "fork_server",
            out := folder / f"output-{rank}",
            out,
            {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            program=__file__,
            argv=argv,
        )
        for rank in range(count)
    ]


def wait_ranks(ranks: list[Fork], limit_s: float = 60) -> list[int | None]:
    """Return the exit codes; None for a rank that had to be killed, after it printed its stacks."""
    end = time.monotonic() + limit_s
    for rank in ranks:
        with suppress(subprocess.TimeoutExpired):
            rank.wait(max(0.0, end - time.monotonic()))
    codes = [rank.poll() for rank in ranks]
    abort([rank.pid for rank, code in zip(ranks, codes, strict=True) if code is None])
    return codes


def output(folder: Path, rank: int) -> str:
    """Return what a rank printed."""
    return (folder / f"output-{rank}").read_text(errors="replace")


def main(function: str, arguments: str, timeout_s: str) -> None:
    """Run one rank."""
    import torch

    from qarl.distributed.group import Group
    from qarl.distributed.rank_info import rank_info
    from qarl.distributed.rendezvous import Rendezvous

    path, _, name = function.rpartition(":")
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    own = rank_info()
    assert own is not None
    with Group(Rendezvous(own), torch.device("cpu"), float(timeout_s)) as group:
        result = getattr(module, name)(group, **json.loads(arguments))
        Path(os.environ["QARL_RANKS"], f"result-{group.rank}").write_text(json.dumps(result))


if __name__ == "__main__":
    main(*sys.argv[1:])
