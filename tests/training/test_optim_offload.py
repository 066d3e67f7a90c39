"""`optim.offload`: moments on the host give the bits of moments on the device. Without a GPU, its buckets on a CPU."""

import itertools
import json

import pytest
import torch
from safetensors.torch import load, save
from tiny_runs import live, parts
from torch.nn import Parameter

from qarl.config import OptimConfig
from qarl.errors import UserError
from qarl.training import host_state, optim
from qarl.training.offload import OffloadedAdamW
from qarl.training.optim import Optimizer, build_optimizer, round_masters

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


def test_buckets_hold_every_element_once_in_order() -> None:
    members = parameters()
    optimizer = OffloadedAdamW(groups(members), bucket_bytes=8 * 256, fused=True, **OPTIONS)
    set_gradients(members, 0)
    for parameter in members:
        optimizer._state(parameter)
    buckets = list(optimizer._buckets(members))
    for parameter in members:
        start = parameter.untyped_storage().data_ptr()
        cut = [p for bucket in buckets for p in bucket if p.parameter.untyped_storage().data_ptr() == start]
        assert sum(piece.parameter.numel() for piece in cut) == parameter.numel()
        if cut:
            assert torch.equal(torch.cat([piece.parameter for piece in cut]), parameter.detach().view(-1))
    for bucket in buckets:
        assert bucket[-1].end <= 256 and all(piece.start % 64 == 0 for piece in bucket)
        assert all(one.end <= other.start for one, other in itertools.pairwise(bucket))


def test_the_host_s_tensors_do_not_overlap_and_fill_their_arenas(monkeypatch) -> None:
    monkeypatch.setattr(host_state, "ARENA_BYTES", 4 * 1024)
    shapes = [torch.Size(shape) for shape in ((3, 5), (1100,), (200,), (900,), (0,), (64, 4))]
    tensors = list(host_state.host_tensors(shapes, False))
    assert [tensor.shape for tensor in tensors] == shapes
    for value, tensor in enumerate(tensors):
        tensor.fill_(value)
    assert all((tensor == value).all() for value, tensor in enumerate(tensors))
    arenas = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    assert max(arenas.values()) <= 4 * 2048  # the power of two that holds the largest, 1100


def test_masters_on_the_host_are_rounded_as_those_on_the_device() -> None:
    found = []
    for masters in (False, True):
        members = parameters()
        round_masters(members, torch.bfloat16)
        options = OPTIONS | {"masters": masters, "rounded": torch.bfloat16}
        part = OffloadedAdamW(groups(members), bucket_bytes=12 * 256, fused=True, **options)
        names = [str(place) for place in range(len(members))]
        optimizer = Optimizer("adamw", {"adamw": (part, names)}, torch.bfloat16)
        for step in range(3):
            set_gradients(members, step)
            optimizer.step()
        optimizer.settle()
        found.append([optimizer.masters()[name].cpu() for name in names])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))
    assert any(not torch.equal(one, start.detach().cpu()) for one, start in zip(found[0], parameters(), strict=True))


@pytest.mark.parametrize("learner", ["aligned", "full_precision"])
def test_a_learner_without_masters_on_its_device_learns_and_goes_on_with_the_same_bits(
    tiny_model, monkeypatch, learner
) -> None:
    monkeypatch.setattr(optim, "_require_device", lambda parameters: None)  # a CPU does as well
    found, saved = [], None
    for where in (False, "all", "all from a checkpoint"):
        sections = {"quant": {"group_size": 32, "learner": learner}, "train": {"minibatch_size": 16}}
        run = parts(tiny_model("qwen3"), **sections, optim={"lr": 1e-3, "offload": where and "all"})
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


def wrapped(members: list[Parameter], part: torch.optim.Optimizer) -> Optimizer:
    order = [p for group in part.param_groups for p in group["params"]]
    places = {id(parameter): place for place, parameter in enumerate(members)}
    return Optimizer("adamw", {"adamw": (part, [f"p{places[id(parameter)]}" for parameter in order])})


@pytest.mark.parametrize("way", ["offloaded to offloaded", "offloaded to device", "device to offloaded"])
def test_a_saved_state_goes_on_bit_for_bit_wherever_it_was_kept(way) -> None:
    def made(where: str, members: list[Parameter]) -> Optimizer:
        offloaded = where == "offloaded"
        part = OffloadedAdamW(groups(members), bucket_bytes=8 * 256, fused=True, **OPTIONS) if offloaded else None
        return wrapped(members, part or torch.optim.AdamW(groups(members), fused=True, **OPTIONS))

    source, _, target = way.split()
    members = parameters()
    optimizer = made(source, members)
    for step in range(2):
        set_gradients(members, step, skip=1)
        optimizer.step()
    copies = [Parameter(parameter.detach().clone()) for parameter in members]
    tensors, meta = optimizer.state_tensors()
    restored = made(target, copies)
    restored.load_state_tensors(load(save({k: v.cpu() for k, v in tensors.items()})), json.loads(json.dumps(meta)))
    for these, one in ((members, optimizer), (copies, restored)):
        set_gradients(these, 2)
        one.step()
    assert all(torch.equal(one, other) for one, other in zip(members, copies, strict=True))
    mine, theirs = restored.state_tensors()[0], optimizer.state_tensors()[0]
    assert mine.keys() == theirs.keys() and all(torch.equal(mine[k].cpu(), theirs[k].cpu()) for k in mine)


def test_there_is_nothing_to_offload_from_on_a_cpu() -> None:
    named = [("w", Parameter(torch.zeros(2, 2)))]
    with pytest.raises(UserError, match=r"optim\.offload: the model is on the CPU"):
        build_optimizer(named, OptimConfig(offload="moments"))


@needs_gpu
def test_the_moments_are_in_pinned_memory_of_the_host() -> None:
    members = parameters()
    named = [(f"model.layers.{i}.weight", parameter) for i, parameter in enumerate(members)]
    optimizer = build_optimizer(named, OptimConfig(offload="moments"))
    set_gradients(members, 0)
    optimizer.step()
    tensors, _ = optimizer.state_tensors()
    moments = [tensor for name, tensor in tensors.items() if not name.endswith("/step")]
    assert len(moments) == 2 * len(SHAPES)
    assert all(tensor.device.type == "cpu" and tensor.is_pinned() for tensor in moments if tensor.numel())


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
