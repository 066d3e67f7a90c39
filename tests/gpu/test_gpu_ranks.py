"""Ranks on two GPUs: a collective of NCCL's that waits in vain ends after `distributed.timeout_s`, and names who."""

import time
from pathlib import Path

import pytest
import torch
from test_ranks_launch import Run, errors

GPUS = torch.cuda.device_count()
pytestmark = pytest.mark.skipif(GPUS < 2, reason=f"needs two CUDA devices; torch sees {GPUS}")

FAULTS = {  # exit code, rank, what is said of it
    "late 1": (75, 1, "did not reach a collective; the others waited 4 s"),
    "stop 1": (75, 1, "gave no sign of life for"),
    "tensors 1": (137, 1, "was ended by SIGKILL"),
    "user 1": (2, 1, "is broken"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_one_rank_ends_both_and_is_named(tmp_path: Path, fault: str) -> None:
    run = Run(tmp_path, fault, device="cuda", count=2, forked=False)
    run.begun()
    began = time.monotonic()
    code, said = run.end()
    expected, rank, line = FAULTS[fault]
    assert (code, run.fault and run.fault["rank"]) == (expected, rank), said
    assert line in run.fault["line"] and line in errors(said)[0]
    assert time.monotonic() - began < 45


def test_ranks_on_gpus_end_well(tmp_path: Path) -> None:
    run = Run(tmp_path, "end", device="cuda", count=2, forked=False)
    assert run.end()[0] == 0
    assert run.fault is None
