"""Real ranks: what they gather and agree on, and how the end of one ends the others."""

import json
import math
import os
import signal
import socket
import time
from functools import partial
from pathlib import Path

import pytest
import torch
from ranks import output, run_ranks, start_ranks, wait_ranks

from qarl.distributed.ranks import total
from qarl.distributed.together import together

HERE = __file__
VALUES = [None, [1, "ä\ud800"], {"a": [0.1 + 0.2, math.inf, 1e-310, "x" * 5000]}]


def collectives(group, values, work_s):
    """What three ranks gather and agree on, in one start."""
    gathered = group.gather(values[group.rank])
    ragged = group.gather_tensors(torch.arange(group.rank * 3, dtype=torch.int64).view(group.rank, 3))
    eight = group.gather_tensors(torch.full((2,), group.rank, dtype=torch.bfloat16))
    scalars = group.gather_tensors(torch.tensor(group.rank == 1))
    empty = group.gather_tensors(torch.empty(0, 4))
    group.barrier()
    return {
        "gathered": gathered,
        "ragged": [part.tolist() for part in ragged],
        "bf16": [part.float().tolist() for part in eight],
        "scalars": [part.item() for part in scalars],
        "empty": [list(part.shape) for part in empty],
        "signals": [group.signal(None), group.signal(15 if group.rank else None), group.signal(10 + group.rank)],
        "total": total(group, [0.1 * (group.rank + 1), 1e16 if group.rank == 0 else 1.0]),
        "first": group.first,
        "share": list(group.share(7)),
        "agreed": [
            error_of(group, group.all_agree, fault) for fault in (None, ValueError("x") if group.rank == 1 else None)
        ],
        "polled": [error_of(group, together, group, partial(poll_or_fail, group, turn, work_s)) for turn in range(2)],
    }


def error_of(group, work, *arguments):
    try:
        work(*arguments)
    except Exception as error:
        assert group.agreed is error
        return f"{type(error).__name__}: {error}"


def poll_or_fail(group, turn, work_s):
    if group.rank == 1:
        raise ValueError(f"in turn {turn}")
    end = time.monotonic() + work_s
    while time.monotonic() < end:
        group.poll()
        time.sleep(0.01)


def test_every_rank_gathers_the_values_and_faults_of_all() -> None:
    began = time.monotonic()
    found = run_ranks(3, f"{HERE}:collectives", {"values": VALUES, "work_s": 200})
    assert time.monotonic() - began < 200  # of two times 200: work that fails on one rank ends on ranks that poll
    for rank, of in enumerate(found):
        assert of["gathered"] == VALUES
        assert of["ragged"] == [[], [[0, 1, 2]], [[0, 1, 2], [3, 4, 5]]]
        assert of["bf16"] == [[0, 0], [1, 1], [2, 2]] and of["scalars"] == [False, True, False]
        assert of["empty"] == [[0, 4]] * 3
        assert of["signals"] == [None, 15, 10]
        assert of["total"] == [0.1 + 0.2 + 0.30000000000000004, 1e16 + 1.0 + 1.0]
        assert of["first"] == (rank == 0)
        prefix = "" if rank == 1 else f"OtherRankFailed: rank 1 on {socket.gethostname()}: "
        assert of["agreed"] == [None, f"{prefix}ValueError: x"]
        assert of["polled"] == [f"{prefix}ValueError: in turn {turn}" for turn in range(2)]
    assert [of["share"] for of in found] == [[0, 1, 2], [3, 4], [5, 6]]


def meets(group, sleeps_s, longer_s):
    started = time.monotonic()
    group.barrier()  # no rank sleeps before every clock runs
    together(group, lambda: time.sleep(sleeps_s * group.rank), longer_s)
    return time.monotonic() - started


def test_a_rank_that_does_not_come_is_named_after_the_timeout() -> None:
    with pytest.raises(AssertionError, match=r"others waited 2 s \(distributed.timeout_s\) and 0.2 more"):
        run_ranks(2, f"{HERE}:meets", {"sleeps_s": 1000, "longer_s": 0.2}, timeout_s=2)


def is_left(group, run_dir):
    group._run_dir = Path(run_dir)
    group.barrier()
    if group.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)


def test_a_rank_that_dies_before_all_have_left_is_recorded_in_the_run_directory(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").touch()
    (folder := tmp_path / "ranks").mkdir()
    codes = wait_ranks(start_ranks(2, f"{HERE}:is_left", {"run_dir": str(tmp_path / "run")}, folder, timeout_s=8))
    assert codes == [1, -signal.SIGKILL] and "OtherRankFailed: rank 1 on" in output(folder, 0)
    assert json.loads((tmp_path / "run" / "fault.json").read_text())["rank"] == 1
