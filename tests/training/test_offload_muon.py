"""`optim.offload` with Muon: momentum and masters on the host give the same bits as on the device.

Without a GPU, the slots are on the CPU; `tests/distributed/test_row_updates.py` has Muon over rows.
"""

import json

import pytest
import torch
from pairwise import pairwise
from safetensors.torch import load, save
from test_optim_muon import DEVICE, OPTIONS, matrices, set_gradients
from torch.nn import Parameter

from qarl.config import OptimConfig
from qarl.training import optim
from qarl.training.muon import BatchedMuon
from qarl.training.offload_muon import OffloadedMuon
from qarl.training.optim import build_optimizer, round_masters


@pytest.mark.parametrize(
    ("masters", "change", "rounded"),
    pairwise([False, True], [{}, {"nesterov": False}, {"adjust_lr_fn": "original"}], [torch.float32, torch.bfloat16]),
    ids=str,
)
def test_masters_and_momenta_have_the_bits_of_those_on_the_device(masters, change, rounded) -> None:
    theirs, ours = matrices(0), matrices(0)
    round_masters([*theirs, *ours], rounded)
    reference = BatchedMuon(theirs, **OPTIONS | change)
    optimizer = OffloadedMuon([{"params": ours}], masters=masters, rounded=rounded, **OPTIONS | change)
    for step in range(4):
        for members, one in ((theirs, reference), (ours, optimizer)):
            set_gradients(members, step, skip=step)
            for group in one.param_groups:
                group["lr"] = 0.02 / (step + 1)
            one.step()
        round_masters(theirs, rounded)
        round_masters([] if masters else ours, rounded)
    optimizer.settle()
    assert not masters or all(p.isnan().all() and p.untyped_storage().nbytes() == 4 for p in ours)
    for mine, their, start in zip(ours, theirs, matrices(0), strict=True):
        assert torch.equal(optimizer.values[mine].to(DEVICE) if masters else mine, their)
        assert not torch.equal(their, start)
        assert torch.equal(
            optimizer.state[mine]["momentum_buffer"].cpu(), reference.state[their]["momentum_buffer"].cpu()
        )


def named(members: list[Parameter]) -> list[tuple[str, Parameter]]:
    """Return named parameters. The last one is not a hidden matrix, so AdamW updates it."""
    names = [f"model.layers.{place}.weight" for place in range(len(members) - 1)] + ["lm_head.weight"]
    return list(zip(names, members, strict=True))


@pytest.mark.parametrize("way", ["moments to moments", "all to all", "moments to device", "device to all"])
def test_a_saved_state_goes_on_bit_for_bit_wherever_it_was_kept(way, monkeypatch) -> None:
    monkeypatch.setattr(optim, "_require_device", lambda parameters: None)  # a CPU does as well
    source, _, target = way.split()
    kept = {name: False if name == "device" else name for name in (source, target)}
    settings = {name: OptimConfig(name="muon", lr=1e-2, momentum=0.9, offload=kept[name]) for name in kept}
    members = matrices(0)
    optimizer = build_optimizer(named(members), settings[source])
    for step in range(2):
        set_gradients(members, step, skip=1)
        optimizer.step()
    tensors, meta = optimizer.state_tensors()
    tensors = load(save({name: value.cpu().contiguous() for name, value in tensors.items()}))
    assert f"{named(members)[0][0]}/momentum_buffer" in tensors and "lm_head.weight/exp_avg_sq" in tensors
    copies = [Parameter(optimizer.masters()[name].detach().to(DEVICE, copy=True)) for name, _ in named(members)]
    restored = build_optimizer(named(copies), settings[target])
    restored.load_state(json.loads(json.dumps(meta)), lambda name, shape: tensors[name].view(shape))
    for these, one in ((members, optimizer), (copies, restored)):
        set_gradients(these, 2)
        one.step()
        one.settle()
    for name, _ in named(members):
        assert torch.equal(optimizer.masters()[name].to(DEVICE), restored.masters()[name].to(DEVICE)), name
    mine, theirs = restored.state_tensors()[0], optimizer.state_tensors()[0]
    assert mine.keys() == theirs.keys() and all(torch.equal(mine[k].cpu(), theirs[k].cpu()) for k in mine)
