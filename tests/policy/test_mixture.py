"""A mixture of experts in plain torch: against Hugging Face's own, bits in any batch, replay, losses of the routers."""

from pathlib import Path

import pytest
import torch
from policy_models import batch, gradients, hf_gradients, hf_logprobs, logprobs, make_policy
from qarl_formats.bits import same_bits
from qarl_formats.rows import adjacent
from qarl_formats.weight import quantize_weight
from qarl_kernels.logprob import Truncation
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from qarl.policy.routes import Balance, Routes, recording
from qarl.training.routing import RoutingTotals
from qarl.utils.expert_names import EXPERT_NAMES

FAMILIES = tuple(EXPERT_NAMES)
FP32_GRADIENT = 1e-5


def hugging_face(directory: Path, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(directory, dtype=dtype, attn_implementation="eager").eval()


def by_expert(model: PreTrainedModel, found: dict[str, Tensor]) -> dict[str, Tensor]:
    """Gradients of transformers' tensors under the names that a checkpoint has."""
    names, parted = EXPERT_NAMES[model.config.model_type], {}
    for name, gradient in found.items():
        if ".experts." not in name:
            parted[name.replace(".mlp.gate.", f".{names.router()}.")] = gradient
            continue
        layer = name.split(".mlp.")[0]
        for index, of_expert in enumerate(gradient):
            both = of_expert.chunk(2) if "gate_up" in name else (of_expert,)
            leaves = (names.gate, names.up) if "gate_up" in name else (names.down,)
            for leaf, part in zip(leaves, both, strict=True):
                parted[f"{layer}.{names.expert(index, leaf)}.weight"] = part
    return parted


@pytest.mark.parametrize("family", FAMILIES)
def test_float32_policy_is_the_hugging_face_model(tiny_model, family: str) -> None:
    directory = tiny_model(family, **({"sliding_window": 20} if family == "mixtral" else {}))
    policy, model = make_policy(directory), hugging_face(directory)
    torch.testing.assert_close(logprobs(policy), hf_logprobs(model), rtol=0, atol=1e-4)
    wanted, found = by_expert(model, hf_gradients(model)), gradients(policy)
    assert wanted.keys() == found.keys()
    for name, gradient in wanted.items():
        scale = gradient.abs().max()
        assert (found[name] - gradient).abs().max() <= 10 * FP32_GRADIENT * max(scale, 1e-3), name


@pytest.mark.parametrize(("family", "scheme"), [*zip(FAMILIES, ["bf16", "w4a16", "w8a8", "nvfp4a16"], strict=True)])
def test_a_row_has_its_bits_in_every_batch(tiny_model, family: str, scheme: str) -> None:
    policy = make_policy(tiny_model(family), scheme, torch.bfloat16, 32 if scheme == "w4a16" else None)
    prompts, responses = batch()
    together = logprobs(policy)
    alone = torch.cat([logprobs(policy, [p], [r]) for p, r in zip(prompts, responses, strict=True)])
    assert torch.equal(together, alone)


def test_replay_of_the_own_choice_changes_no_bit_and_of_another_does(tiny_model) -> None:
    policy = make_policy(tiny_model("qwen3_moe"), "w4a16", torch.bfloat16, 32)
    prompts, responses = [[5, 6, 7]], [[9, 10, 11, 12]]
    routes = recording()
    plain = policy.logprobs(prompts, responses, Truncation(), 8, routes=routes)[0]
    own = routes.recorded()
    assert own.shape == (6, 1, 2)  # the last token predicts nothing, and the first layer has an MLP
    replayed = policy.logprobs(prompts, responses, Truncation(), 8, routes=Routes(replay=own.flip(-1)))[0]
    assert torch.equal(plain, replayed)
    other = Routes(replay=(own + 1) % 4, own={})
    elsewhere = policy.logprobs(prompts, responses, Truncation(), 8, routes=other)[0]
    assert not torch.equal(plain, elsewhere)
    assert torch.equal(other.recorded(), own)  # what it would have chosen itself
    skipped = (own + 1) % 4
    skipped[:, :, 0] = -1
    assert torch.equal(plain, policy.logprobs(prompts, responses, Truncation(), 8, routes=Routes(replay=skipped))[0])


@pytest.mark.parametrize(
    ("family", "recompute"), [*((family, "elementwise") for family in FAMILIES), (FAMILIES[-1], "layer")]
)
def test_the_load_balancing_loss_has_the_gradient_of_transformers(tiny_model, family: str, recompute: str) -> None:
    """Of every parameter: the loss reaches the layers before a router too. One of six layers of qwen3_moe has none."""
    directory = tiny_model(family, num_hidden_layers=6)
    policy, model = make_policy(directory), hugging_face(directory)
    policy.decoder.recompute = recompute
    prompts, responses = [[5, 6, 7]], [[9, 10, 11, 12, 13, 14, 15, 16]]
    found = model(torch.tensor([prompts[0] + responses[0][:-1]]), output_router_logits=True)
    (0.5 * found.aux_loss).backward()
    expected = by_expert(model, {n: p.grad for n, p in model.named_parameters() if p.grad is not None})
    routes = Routes(balance=Balance(0.5, 0.0, slice(10), len(policy.experts)), loads={})
    logp = policy.logprobs(prompts, responses, Truncation(), 8, routes=routes)[0]
    (0.0 * logp).sum().backward()
    for name, parameter in policy.named_parameters():
        wanted = expected.get(name)
        if wanted is None or not wanted.any():
            assert parameter.grad is None or not parameter.grad.any(), name
        else:
            assert (parameter.grad - wanted).norm() < 1e-4 * wanted.norm(), name
    totals = RoutingTotals()
    totals.add_loads(routes.measured(), 10)
    assert totals.metrics()["router/aux_loss"] == pytest.approx(float(found.aux_loss.detach()), rel=1e-5)


CODES = {"nvfp4a16": ["weight_packed"], "w4a16": ["weight_packed"], "fp8": ["weight"]}


@pytest.mark.parametrize(
    ("scheme", "group", "quant"),
    [("nvfp4a16", None, {}), ("w4a16", 32, {"symmetric": False}), ("fp8", None, {})],
    ids=["global scale", "zero points", "row scales"],
)
def test_the_experts_of_a_layer_lie_under_one_another_and_keep_their_values(tiny_model, scheme, group, quant) -> None:
    policy = make_policy(tiny_model("mixtral"), scheme, torch.bfloat16, group, **quant)
    for stack in policy.decoder.linears:
        whole, parts = policy.current.groups.get(stack.names), [policy.current.weights[name] for name in stack.names]
        assert (whole is None) == (len(parts) == 1)
        for suffix in CODES[scheme]:
            codes = [part.tensors[suffix] for part in parts]
            assert adjacent(codes) and (whole is None or whole.tensors[suffix].data_ptr() == codes[0].data_ptr())
        for part, master in zip(parts, stack.masters, strict=True):
            alone = quantize_weight(master.detach(), part.scheme, "w", shared=part.tensors.get("weight_global_scale"))
            assert all(same_bits(tensor, alone.tensors[suffix]) for suffix, tensor in part.tensors.items())


@torch.no_grad()
def test_bf16_is_off_by_rounding_alone(tiny_model) -> None:
    directory = tiny_model("qwen2_moe")
    expected = hf_logprobs(hugging_face(directory, torch.bfloat16)).float()
    difference = (logprobs(make_policy(directory, dtype=torch.bfloat16)) - expected).abs()
    assert difference.mean() < 0.02 and difference.max() < 0.15  # seen: 0.010 and 0.031
