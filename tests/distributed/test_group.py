"""Real ranks: what they gather, agree on, and how one's end is the others'."""

from __future__ import annotations

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

from qarl.distributed.ranks import SingleProcess, total
from qarl.distributed.together import together

HERE = __file__
VALUES = [None, [1, "ä\ud800"], {"a": [0.1 + 0.2, math.inf, 1e-310, "x" * 5000]}]


def says(group, values):
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
    }


def test_every_rank_has_what_all_say() -> None:
    found = run_ranks(3, f"{HERE}:says", {"values": VALUES})
    for rank, of in enumerate(found):
        assert of["gathered"] == VALUES
        assert of["ragged"] == [[], [[0, 1, 2]], [[0, 1, 2], [3, 4, 5]]]
        assert of["bf16"] == [[0, 0], [1, 1], [2, 2]] and of["scalars"] == [False, True, False]
        assert of["empty"] == [[0, 4]] * 3
        assert of["signals"] == [None, 15, 10]
        assert of["total"] == [0.1 + 0.2 + 0.30000000000000004, 1e16 + 1.0 + 1.0]
        assert of["first"] == (rank == 0)
    assert [of["share"] for of in found] == [[0, 1, 2], [3, 4], [5, 6]]


def agrees(group):
    told = []
    for fault in (None, ValueError("of rank 1") if group.rank == 1 else None):
        try:
            group.all_agree(fault)
            told.append("goes on")
        except Exception as error:
            told.append(f"{type(error).__name__}: {error}")
    return told


def test_ranks_go_on_together_or_not_at_all() -> None:
    other = ["goes on", f"OtherRankFailed: rank 1 on {socket.gethostname()}: ValueError: of rank 1"]
    assert run_ranks(3, f"{HERE}:agrees") == [other, ["goes on", "ValueError: of rank 1"], other]


def test_alone_every_collective_is_over_at_once() -> None:
    with SingleProcess() as ranks:
        assert ranks.gather({"a": 1}) == [{"a": 1}] and ranks.signal(2) == 2 and ranks.first
        ranks.all_agree()
        with pytest.raises(KeyError):
            ranks.all_agree(KeyError("x"))
    with pytest.raises(OSError, match="x"), SingleProcess():
        raise OSError("x")


def meets(group, sleeps_s, longer_s):
    started = time.monotonic()
    group.barrier()  # no rank sleeps before every clock runs
    together(group, lambda: time.sleep(sleeps_s * group.rank), longer_s)
    return time.monotonic() - started


def test_ranks_wait_longer_where_one_may_need_more_time() -> None:
    assert min(run_ranks(2, f"{HERE}:meets", {"sleeps_s": 5, "longer_s": 60}, timeout_s=4)) >= 5


def test_ranks_do_not_wait_for_ever() -> None:
    with pytest.raises(AssertionError, match=r"others waited 3 s \(distributed.timeout_s\) and 1 more"):
        run_ranks(2, f"{HERE}:meets", {"sleeps_s": 1000, "longer_s": 1}, timeout_s=3)


def looks(group, work_s):
    def work(turn):
        if group.rank == 1:
            raise ValueError(f"in turn {turn}")
        end = time.monotonic() + work_s
        while time.monotonic() < end:
            group.poll()
            time.sleep(0.01)

    told = []
    for turn in range(2):
        try:
            together(group, partial(work, turn))
        except Exception as error:
            assert group.agreed is error
            told.append(f"{type(error).__name__}: {error}")
    return told


def test_work_that_failed_on_one_rank_ends_where_others_look() -> None:
    began = time.monotonic()
    own = [f"ValueError: in turn {turn}" for turn in range(2)]
    other = [f"OtherRankFailed: rank 1 on {socket.gethostname()}: {line}" for line in own]
    assert run_ranks(3, f"{HERE}:looks", {"work_s": 200}) == [other, own, other]
    assert time.monotonic() - began < 200  # of two times 200


def is_left(group, run_dir):
    group._run_dir = Path(run_dir)
    group.barrier()
    if group.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)


def test_a_rank_that_goes_before_all_have_left_is_in_the_run_directory(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").touch()
    (folder := tmp_path / "ranks").mkdir()
    codes = wait_ranks(start_ranks(2, f"{HERE}:is_left", {"run_dir": str(tmp_path / "run")}, folder))
    assert codes == [1, -signal.SIGKILL] and "OtherRankFailed: rank 1 on" in output(folder, 0)
    assert json.loads((tmp_path / "run" / "fault.json").read_text())["rank"] == 1
