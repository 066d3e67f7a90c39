"""Policies of tiny models, and the Hugging Face models that they must agree with."""

import copy
from pathlib import Path

import torch
from qarl_formats.registry import make_scheme
from qarl_formats.weight import LowBitWeight
from qarl_kernels.logprob import Truncation
from torch import Tensor, nn
from transformers import PreTrainedModel

from qarl.config import ModelConfig, QuantConfig
from qarl.policy.linear import PackedLinear, Part, WeightSet
from qarl.policy.load import load_model
from qarl.policy.policy import Policy

CPU = torch.device("cpu")


def make_policy(
    model: Path | PreTrainedModel,
    scheme: str = "bf16",
    dtype=torch.float32,
    group_size: int | None = None,
    device: torch.device = CPU,
    **quant,
) -> Policy:
    """Return a policy of the model in a directory, or of a copy of `model`."""
    loaded = load_model(ModelConfig(path=str(model))) if isinstance(model, Path) else copy.deepcopy(model)
    config = QuantConfig(scheme=scheme, group_size=group_size, **quant)
    made = make_scheme(scheme, config.group_size, config.symmetric, config.grid, config.scale_dtype)
    return Policy(loaded, made, config, dtype, device)


class OneLinear:
    """A packed linear of one layer with its weights, called like a module. weight, bias: Its master weights."""

    def __init__(
        self, module: nn.Linear, operand: LowBitWeight, dtype: torch.dtype, dequantize_input: bool = False
    ) -> None:
        self.weight, self.bias = module.weight, module.bias
        masters = (module.weight,), (module.bias,)
        self.linear = PackedLinear(("linear",), (module.out_features,), *masters, None, dequantize_input)
        self.weights = self.with_weight(operand, module.bias.detach().to(dtype))

    def with_weight(self, operand: LowBitWeight, bias: Tensor) -> WeightSet:
        """Return the weights of this linear alone."""
        return WeightSet({self.linear: self.linear.parts([operand], bias)}, {}, torch.empty(0))

    @property
    def operand(self) -> LowBitWeight:
        return self.weights.linears[self.linear][0].weight

    def __call__(self, x: Tensor) -> Tensor:
        return self.linear(x, self.weights)


def parts_of(weights: WeightSet) -> list[Part]:
    """Return the weights of all packed linears, in layer order."""
    return [part for parts in weights.linears.values() for part in parts]


def operand_of(weights: WeightSet, module: str) -> LowBitWeight:
    """Return the weight that a module multiplies by, alone or fused with others."""
    return next(part.weight for part in parts_of(weights) if module in part.names)


def sampled(policy: Policy, **texts) -> Tensor:
    """Return `logprobs` of the sampler's forward, without gradient."""
    with torch.no_grad():
        return logprobs(policy, **texts, weights=policy.sampler.weights)


def load(directory: Path) -> PreTrainedModel:
    return load_model(ModelConfig(path=str(directory)))


def tokens(count: int, seed: int) -> list[int]:
    return torch.randint(3, 259, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def batch() -> tuple[list[list[int]], list[list[int]]]:
    """Return a batch with shared prompts, one-token responses, page (64) boundaries, and padding tokens (2)."""
    short, page, long = tokens(5, 1), tokens(64, 2), tokens(70, 3)
    prompts = [short, short, page, page, page, long, [7]]
    responses = [tokens(9, 4), tokens(1, 5), tokens(80, 6), tokens(3, 7), tokens(1, 8), tokens(60, 9), [2, 11, 2]]
    return prompts, responses


def logprobs(
    policy: Policy,
    prompts=None,
    responses=None,
    truncation=Truncation(),  # noqa: B008
    chunk: int = 7,
    weights: WeightSet | None = None,
) -> Tensor:
    if prompts is None:
        prompts, responses = batch()
    return policy.logprobs(prompts, responses, truncation, chunk, weights=weights)[0]


def hf_logprobs(model: PreTrainedModel, prompts=None, responses=None) -> Tensor:
    """Return the log-probs of Hugging Face's own forward, one sequence at a time."""
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
    """Return the gradients of a fixed weighted sum of log-probs, by name."""
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
    """Replace every quantized weight of `model` by the dequantized codes of the policy."""
    with torch.no_grad():
        for name, weight in policy.current.weights.items():
            model.get_submodule(name).weight.copy_(weight.dequantize(dtype))
    return model


def assert_gradients_close(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float) -> None:
    """Check that each gradient is within `tolerance` of the expected one, relative to its norm."""
    assert found.keys() == expected.keys()
    for name, gradient in found.items():
        error = float((gradient - expected[name]).norm() / expected[name].norm())
        assert error < tolerance, f"{name}: relative error {error:.2e}"
