"""`optim.offload`: moments on the host give the same bits as on the device. Without a GPU, buckets are on the CPU."""

import pytest
import torch
from tiny_runs import live, parts
from torch.nn import Parameter

from qarl.config import OptimConfig
from qarl.errors import UserError
from qarl.training import optim
from qarl.training.offload import OffloadedAdamW
from qarl.training.optim import build_optimizer

SHAPES = [(11, 60), (8, 6), (8,), (64, 64), (1,), (700,), (0, 4)]
OPTIONS = {"lr": 1e-2, "betas": (0.8, 0.95), "eps": 1e-8}
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
needs_gpu = pytest.mark.skipif(DEVICE.type != "cuda", reason="needs a GPU, whose state the host keeps")


def parameters(seed: int = 0) -> list[Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return [Parameter(torch.randn(shape, generator=generator).to(DEVICE)) for shape in SHAPES]


def groups(members: list[Parameter]) -> list[dict]:
    return [
        {"params": [p for p in members if p.ndim == 2], "weight_decay": 0.1, "initial_lr": 1e-2},
        {"params": [p for p in members if p.ndim != 2], "weight_decay": 0.0, "initial_lr": 1e-2},
    ]


def set_gradients(members: list[Parameter], seed: int, skip: int | None = None) -> None:
    for place, (parameter, gradient) in enumerate(zip(members, parameters(100 + seed), strict=True)):
        parameter.grad = None if place == skip else gradient.detach()


@pytest.mark.parametrize("masters", [False, True])
@pytest.mark.parametrize("bucket", [12 * 64, 8 * 256, 8 * 1000, 2**28])
def test_parameters_and_moments_have_the_bits_of_torch_s_fused_adamw(bucket, masters) -> None:
    theirs, ours = parameters(), parameters()
    reference = torch.optim.AdamW(groups(theirs), fused=True, **OPTIONS)
    optimizer = OffloadedAdamW(groups(ours), bucket_bytes=bucket, masters=masters, fused=True, **OPTIONS)
    for step in range(4):
        for members, one in ((theirs, reference), (ours, optimizer)):
            set_gradients(members, step, skip=step)
            for group in one.param_groups:
                group["lr"] = 1e-2 / (step + 1)
            one.step()
    optimizer.settle()
    assert not masters or all(p.isnan().all() and p.untyped_storage().nbytes() == 4 for p in ours)
    for mine, their in zip(ours, theirs, strict=True):
        assert torch.equal(optimizer.values[mine].to(DEVICE) if masters else mine, their)
        assert optimizer.state[mine].keys() == reference.state[their].keys()
        for name, value in reference.state[their].items():
            assert torch.equal(optimizer.state[mine][name].cpu(), value.cpu()), name


@pytest.mark.parametrize(("learner", "name"), [("aligned", "adamw"), ("full_precision", "muon")])
def test_a_learner_without_masters_on_its_device_learns_and_goes_on_with_the_same_bits(
    tiny_model, monkeypatch, learner, name
) -> None:
    monkeypatch.setattr(optim, "_require_device", lambda parameters: None)  # a CPU does as well
    found, saved = [], None
    for where in (False, "all", "all from a checkpoint"):
        sections = {"quant": {"group_size": 32, "learner": learner}, "train": {"minibatch_size": 16}}
        run = parts(tiny_model("qwen3"), **sections, optim={"name": name, "lr": 1e-3, "offload": where and "all"})
        if where == "all from a checkpoint":
            run.learner.updates.load(*saved, 1)
        else:
            run.learn(live(run))
            pieces, meta = run.learner.updates.pieces()
            kept = {(piece.group, piece.name): piece.values.clone() for piece in pieces}
            saved = (lambda group, name, start, stop, kept=kept: kept[group, name][start:stop]), meta
        run.learn(live(run, seed=2))
        pieces, _ = run.learner.updates.pieces()
        found.append((run.policy.current.manifest().digest(), {(p.group, p.name): p.values.clone() for p in pieces}))
        assert all(master.isnan().all() for _, master in run.policy.named_parameters()) == bool(where)
    first, tensors = found[0]
    for digest, others in found[1:]:
        assert digest == first and others.keys() == tensors.keys()
        assert all(torch.equal(tensors[name], other) for name, other in others.items())


def test_there_is_nothing_to_offload_from_on_a_cpu() -> None:
    named = [("w", Parameter(torch.zeros(2, 2)))]
    with pytest.raises(UserError, match=r"optim\.offload: the model is on the CPU"):
        build_optimizer(named, OptimConfig(offload="moments"))


@needs_gpu
def test_large_tensors_stream_through_many_buckets_while_others_compute() -> None:
    """Steps that follow each other at once, so that the way out of one meets the way in of the next."""
    theirs, ours = ([Parameter(torch.randn(3000, 1001, device=DEVICE)) for _ in range(4)] for _ in range(2))
    for mine, their in zip(ours, theirs, strict=True):
        mine.data.copy_(their.data)
    reference = torch.optim.AdamW(theirs, fused=True, **OPTIONS)
    optimizer = OffloadedAdamW([{"params": ours}], bucket_bytes=2**22, fused=True, **OPTIONS)
    for _ in range(5):
        for mine, their in zip(ours, theirs, strict=True):
            their.grad = torch.randn_like(their)
            mine.grad = their.grad.clone()
        reference.step()
        optimizer.step()
    assert all(torch.equal(mine, their) for mine, their in zip(ours, theirs, strict=True))
