"""AdamW and Muon: their formulas, the state of a checkpoint, schedule and clipping."""

import json
import math

import pytest
import torch
from safetensors.torch import load, save
from torch.nn import Parameter

from qarl.config import OptimConfig
from qarl.training.optim import build_optimizer, clip_grads, grad_norm, lr_at

SHAPES = {
    "model.embed_tokens.weight": (11, 6),
    "model.layers.0.mlp.up_proj.weight": (8, 6),
    "model.layers.0.mlp.up_proj.bias": (8,),
    "model.layers.0.input_layernorm.weight": (6,),
    "model.layers.1.mlp.down_proj.weight": (6, 8),
    "model.norm.weight": (6,),
    "lm_head.weight": (11, 6),
}
ADAMW = OptimConfig(name="adamw", lr=1e-2, weight_decay=0.1)
MUON = OptimConfig(name="muon", lr=1e-2, adamw_lr=3e-3, weight_decay=0.1)
BOTH = pytest.mark.parametrize("config", [ADAMW, MUON], ids=["adamw", "muon"])


def parameters(seed: int = 0) -> dict[str, Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return {name: Parameter(torch.randn(shape, generator=generator)) for name, shape in SHAPES.items()}


def set_gradients(named: dict[str, Parameter], seed: int, skip: str | None = None) -> None:
    generator = torch.Generator().manual_seed(100 + seed)
    for name, shape in SHAPES.items():
        gradient = torch.randn(shape, generator=generator)
        named[name].grad = None if name == skip else gradient


def trained(config: OptimConfig, steps: int, skip: str | None = None):
    named = parameters()
    optimizer = build_optimizer(named.items(), config)
    for step in range(steps):
        set_gradients(named, step, skip)
        optimizer.step()
    return named, optimizer


def clone(named: dict[str, Parameter]) -> dict[str, Parameter]:
    return {name: Parameter(parameter.detach().clone()) for name, parameter in named.items()}


@BOTH
@pytest.mark.parametrize("skip", [None, "model.layers.1.mlp.down_proj.weight"])
def test_state_tensors_by_name_give_bit_equal_parameters_after_a_further_step(config, skip):
    named, optimizer = trained(config, 3, skip)
    copy = dict(reversed(clone(named).items()))
    restored = build_optimizer(copy.items(), config)
    tensors, meta = optimizer.state_tensors()
    loaded = load(save(tensors))
    restored.load_state(json.loads(json.dumps(meta)), lambda name, shape: loaded[name].view(shape))
    for these, one in ((named, optimizer), (copy, restored)):
        set_gradients(these, 3)
        one.set_lr(0.5)
        one.step()
    assert all(torch.equal(named[name], copy[name]) for name in SHAPES)


@pytest.mark.parametrize(
    ("saved", "lost", "left_out", "message"),
    [
        (MUON, "", "", r"'muon' does not fit optim\.name 'adamw'"),
        (ADAMW, "lm_head.weight/exp_avg", "", r"lm_head\.weight: exp_avg is missing"),
        (ADAMW, "", "lm_head.weight", r"lm_head\.weight/.* the model does not have"),
    ],
    ids=["another optimizer", "incomplete", "an unknown parameter"],
)
def test_a_state_that_does_not_fit_is_refused_by_name(saved, lost, left_out, message):
    tensors, meta = trained(saved, 1)[1].state_tensors()
    meta["tensors"] = [name for name in meta["tensors"] if name != lost]
    members = {name: parameter for name, parameter in parameters().items() if name != left_out}
    with pytest.raises(ValueError, match=message):
        build_optimizer(members.items(), ADAMW).load_state(meta, lambda name, _: tensors[name])


def test_adamw_decays_matrices_and_leaves_vectors():
    named = parameters()
    before = clone(named)
    optimizer = build_optimizer(named.items(), ADAMW)
    for parameter in named.values():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    for name, parameter in named.items():
        expected = before[name] * (1 - 1e-2 * 0.1) if parameter.ndim == 2 else before[name]
        torch.testing.assert_close(parameter, expected, rtol=1e-6, atol=0)  # one float32 multiplication


def test_adamw_matches_its_formula_over_two_steps():
    w = Parameter(torch.tensor([[0.5, -1.0]], dtype=torch.float64))
    config = OptimConfig(lr=0.1, weight_decay=0.01, betas=(0.8, 0.9), eps=1e-3)
    optimizer = build_optimizer([("w", w)], config)
    expected, m, v = [0.5, -1.0], [0.0, 0.0], [0.0, 0.0]
    for t, gradient in enumerate([[1.0, -3.0], [0.5, 2.0]], start=1):
        w.grad = torch.tensor([gradient], dtype=torch.float64)
        optimizer.step()
        for i, g in enumerate(gradient):
            m[i] = 0.8 * m[i] + 0.2 * g
            v[i] = 0.9 * v[i] + 0.1 * g * g
            update = m[i] / (1 - 0.8**t) / (math.sqrt(v[i] / (1 - 0.9**t)) + 1e-3)
            expected[i] = expected[i] * (1 - 0.1 * 0.01) - 0.1 * update
    assert w.tolist()[0] == pytest.approx(expected, rel=1e-12)


@BOTH
def test_set_lr_zero_grad_and_missing_gradients_concern_every_part(config):
    named = parameters()
    before = clone(named)
    frozen = Parameter(torch.ones(2, 2), requires_grad=False)
    optimizer = build_optimizer([("frozen", frozen), *named.items()], config)
    optimizer.step()
    set_gradients(named, 0)
    optimizer.set_lr(0.0)
    optimizer.step()
    assert all(torch.equal(named[name], before[name]) for name in SHAPES) and frozen.equal(torch.ones(2, 2))
    optimizer.zero_grad()
    assert all(parameter.grad is None for parameter in named.values())


def test_muon_updates_have_the_size_of_adamw_s_whatever_the_shape():
    # an orthogonal [N, K] matrix has rms 1 / sqrt(max(N, K)); match_rms_adamw scales it to 0.2. Newton-Schulz leaves
    # the singular values between about 0.7 and 1.2.
    for shape in [(16, 64), (64, 16), (128, 128)]:
        w = Parameter(torch.zeros(shape))
        optimizer = build_optimizer([("layers.0.weight", w)], OptimConfig(name="muon", lr=1.0, weight_decay=0.0))
        w.grad = torch.randn(shape, generator=torch.Generator().manual_seed(0))
        optimizer.step()
        assert 0.2 * 0.7 < w.square().mean().sqrt().item() < 0.2 * 1.2


@pytest.mark.parametrize("shape", [(3,), (70, 33), (5000,), (0,)])
def test_clip_sums_every_tensor_by_itself_and_then_the_norms(shape):
    generator = torch.Generator().manual_seed(1)
    named = [Parameter(torch.zeros(size)) for size in [shape, (7, 9), (1,)]]
    for parameter in named:
        parameter.grad = torch.randn(parameter.shape, generator=generator)
    before = [parameter.grad.clone() for parameter in named]
    norms = [torch.linalg.vector_norm(gradient, dtype=torch.float32) for gradient in before]
    expected = torch.linalg.vector_norm(torch.stack(norms)).item()
    assert clipped(named, 0.5) == expected
    for parameter, gradient in zip(named, before, strict=True):
        assert torch.equal(parameter.grad, gradient * (0.5 / expected))


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("constant", [0.25, 0.5, 0.75, 1.0, 1.0, 1.0, 1.0, 1.0]),
        ("linear", [0.25, 0.5, 0.75, 1.0, 1.0, 0.8, 0.6, 0.4]),
        (
            "cosine",
            [0.25, 0.5, 0.75, 1.0, 1.0, 0.2 + 0.4 * (1 + math.sqrt(0.5)), 0.6, 0.2 + 0.4 * (1 - math.sqrt(0.5))],
        ),
    ],
)
def test_schedule(schedule, expected):
    minimum = 0.0 if schedule == "constant" else 0.2
    config = OptimConfig(schedule=schedule, warmup_steps=4, min_lr_ratio=minimum)
    assert [lr_at(step, 8, config) for step in range(8)] == pytest.approx(expected)
    assert lr_at(99, 8, config) == pytest.approx(1.0 if schedule == "constant" else minimum)


def clipped(parameters: list[Parameter], max_norm: float) -> float:
    """Clip the gradients, and return their norm before."""
    norm = grad_norm(parameters)
    clip_grads(parameters, norm, max_norm)
    return norm


def gradients(*rows: list[float]) -> list[Parameter]:
    out = []
    for row in rows:
        out.append(Parameter(torch.zeros(len(row))))
        out[-1].grad = torch.tensor(row)
    return out


@pytest.mark.parametrize(
    ("max_norm", "expected"),
    [(1.0, [0.6, 0.0, 0.8]), (0.0, [3.0, 0.0, 4.0]), (5.0, [3.0, 0.0, 4.0]), (9.0, [3.0, 0.0, 4.0])],
)
def test_clip_scales_a_joint_norm_beyond_the_maximum_if_there_is_one(max_norm, expected):
    members = [*gradients([3.0, 0.0], [4.0]), Parameter(torch.ones(2))]
    assert clipped(members, max_norm) == 5.0
    assert [value for p in members[:2] for value in p.grad.tolist()] == pytest.approx(expected)
