"""Policies of tiny models beside the Hugging Face models that they must agree with."""

from __future__ import annotations

import copy
from pathlib import Path

import torch
from qarl_formats.registry import make_scheme
from qarl_formats.weight import LowBitWeight
from qarl_kernels.logprob import Truncation
from torch import Tensor, nn
from transformers import PreTrainedModel

from qarl.config import ModelConfig, QuantConfig
from qarl.policy.linear import QuantLinear
from qarl.policy.load import load_model
from qarl.policy.policy import Policy
from qarl.policy.view import Role, View

CPU = torch.device("cpu")


def make_policy(
    model: Path | PreTrainedModel,
    scheme: str = "bf16",
    dtype=torch.float32,
    group_size: int | None = None,
    device: torch.device = CPU,
    **quant,
) -> Policy:
    """A policy of the model in a directory, or of a copy of `model`."""
    loaded = load_model(ModelConfig(path=str(model))) if isinstance(model, Path) else copy.deepcopy(model)
    config = QuantConfig(scheme=scheme, group_size=group_size, **quant)
    made = make_scheme(scheme, config.group_size, config.symmetric, config.grid, config.scale_dtype)
    return Policy(loaded, made, config, dtype, device)


def standalone(linear: nn.Linear, dequantize_input: bool = False) -> QuantLinear:
    """A QuantLinear of its own, whose role has no view yet."""
    return QuantLinear(linear, "linear", Role(), dequantize_input)


def view_of(linear: QuantLinear, operand: LowBitWeight, dtype: torch.dtype) -> View:
    """A view for `linear` alone, its bias rounded to `dtype`."""
    return View({"linear": operand}, {"linear.bias": linear.bias.detach().to(dtype)}, torch.empty(0))


def load(directory: Path) -> PreTrainedModel:
    return load_model(ModelConfig(path=str(directory)))


def tokens(count: int, seed: int) -> list[int]:
    return torch.randint(3, 259, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def batch() -> tuple[list[list[int]], list[list[int]]]:
    """Prompts and responses: shared prompts, one-token responses, page (64) boundaries; the padding token (2) too."""
    short, page, long = tokens(5, 1), tokens(64, 2), tokens(70, 3)
    prompts = [short, short, page, page, page, long, [7]]
    responses = [tokens(9, 4), tokens(1, 5), tokens(80, 6), tokens(3, 7), tokens(1, 8), tokens(60, 9), [2, 11, 2]]
    return prompts, responses


def logprobs(policy: Policy, prompts=None, responses=None, truncation=Truncation(), chunk: int = 7) -> Tensor:  # noqa: B008
    if prompts is None:
        prompts, responses = batch()
    return policy.logprobs(prompts, responses, truncation, chunk)[0]


def hf_logprobs(model: PreTrainedModel, prompts=None, responses=None) -> Tensor:
    """The same from Hugging Face's own forward, a sequence at a time."""
    if prompts is None:
        prompts, responses = batch()
    found = []
    for prompt, response in zip(prompts, responses, strict=True):
        logits = model(input_ids=torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
        found.append(logits.log_softmax(-1).gather(-1, torch.tensor(response)[:, None])[:, 0])
    return torch.cat(found)


def weights_of_loss(count: int) -> Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(42))


def gradients(policy: Policy, **kwargs) -> dict[str, Tensor]:
    """Gradients of a fixed weighted sum of log-probs, by name."""
    policy.model.zero_grad()
    logp = logprobs(policy, **kwargs)
    (logp * weights_of_loss(len(logp))).sum().backward()
    return {name: p.grad.clone() for name, p in policy.named_parameters()}


def hf_gradients(model: PreTrainedModel, **kwargs) -> dict[str, Tensor]:
    model.zero_grad()
    logp = hf_logprobs(model, **kwargs)
    (logp * weights_of_loss(len(logp))).sum().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters()}


def put_dequantized(model: PreTrainedModel, policy: Policy, dtype=torch.float32) -> PreTrainedModel:
    """`model` with every quantized weight replaced by what the policy's codes stand for."""
    with torch.no_grad():
        for name, weight in policy.current.weights.items():
            model.get_submodule(name).weight.copy_(weight.dequantize(dtype))
    return model


def assert_gradients_close(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float) -> None:
    """Each gradient within `tolerance` of the expected one, relative to its norm."""
    assert found.keys() == expected.keys()
    for name, gradient in found.items():
        error = float((gradient - expected[name]).norm() / expected[name].norm())
        assert error < tolerance, f"{name}: relative error {error:.2e}"
