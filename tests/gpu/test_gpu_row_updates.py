"""Masters in rows on two GPUs over NCCL: the bits of one process, twice the same, and no wait for the device."""

from dataclasses import asdict
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from row_runs import Case, sha, trained, twin

from qarl.distributed.exchange import GroupExchange

# The driver tells how many there are without a context, which forks of this process could not have then.
GPUS = torch.cuda.device_count()
pytestmark = pytest.mark.skipif(GPUS < 2, reason=f"needs two CUDA devices; torch sees {GPUS}")

CASES = {
    "w4a16, tied": ("llama", {}, 3),
    "w4a16, norms of heads": ("qwen3", {}, 3),
    "fp8, biases": ("qwen2", {"quant": {"scheme": "fp8"}}, 2),
    "w8a8, loss scale": ("qwen3", {"quant": {"scheme": "w8a8"}, "optim": {"loss_scale": 64.0}}, 2),
    "nvfp4a16": ("llama", {"quant": {"scheme": "nvfp4a16"}}, 2),
    "all on the host": ("qwen3", {"optim": {"offload": "all"}}, 3),
    "moments on the host": ("qwen3", {"optim": {"offload": "moments"}}, 3),
}


def train(group, cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each case twice."""
    device = torch.device("cuda", group.rank)
    torch.cuda.set_device(device)
    exchange = GroupExchange(dist.new_group(backend="nccl", device_id=device), group.rank, group.count, device)
    found = []
    for case in cases:
        first, _, _ = trained(group, Case(**case), device, exchange)
        again, policy, _ = trained(group, Case(**case), device, exchange)
        handles = all(master.isnan().all() for master in policy.model.parameters())
        found.append({**again, "same": first == again, "handles": handles, "kernels": policy.kernels})
    return found


@pytest.fixture(scope="module")
def cases(tiny_model) -> list[Case]:
    named = [*CASES.values(), ("qwen3", {"optim": {"name": "muon", "lr": 1e-2, "adamw_lr": 1e-3}}, 2)]
    return [Case(str(tiny_model(family)), sections, steps) for family, sections, steps in named]


@pytest.fixture(scope="module")
def found(cases) -> list[list[dict[str, Any]]]:
    """Of each rank, what it found in each case."""
    told = {"cases": [asdict(case) for case in cases]}
    return run_ranks(2, f"{__file__}:train", told, limit_s=330, timeout_s=120)


@pytest.mark.parametrize("name", CASES)
def test_two_gpus_have_the_bits_of_one_and_the_same_ones_twice(found, cases, name) -> None:
    number = list(CASES).index(name)
    ranks = [of[number] for of in found]
    assert all(rank["same"] and rank["handles"] and rank["kernels"] for rank in ranks)
    case = cases[number]
    sections = {**case.sections, "optim": {**case.sections.get("optim", {}), "offload": False}}
    expected, tensors = twin(Case(case.model, sections, case.steps), 2, torch.device("cuda", 0))
    for rank in ranks:
        assert rank["norms"] == expected["norms"] and rank["digests"] == expected["digests"]
        for what, (start, stop, _, digest) in rank["pieces"].items():
            assert digest == sha(tensors[what].reshape(-1)[start:stop]), what


def test_muon_over_rows_gives_the_same_bits_twice_and_learns(found) -> None:
    ranks = [of[len(CASES)] for of in found]
    assert all(rank["same"] and rank["handles"] for rank in ranks)
    assert ranks[0]["digests"] == ranks[1]["digests"] and len(set(ranks[0]["digests"])) == 3
