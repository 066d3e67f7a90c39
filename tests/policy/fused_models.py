"""Policies on Triton kernels and the same in plain torch: on a GPU if there is one, else in Triton's interpreter."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from policy_models import make_policy, tokens
from qarl_kernels.launch import INTERPRETED
from qarl_kernels.logprob import Truncation
from torch import Tensor

from qarl.policy.pages import Caches
from qarl.policy.policy import Policy
from qarl.policy.routes import NO_ROUTES, Routes
from qarl.policy.run import Recompute
from qarl.utils.expert_names import EXPERT_NAMES
from qarl.weight_sync.codes import quantize_parameters
from qarl.weight_sync.snapshot import Snapshot

NEEDS_TRITON = pytest.mark.skipif(
    not (INTERPRETED or torch.cuda.is_available()), reason="needs a CUDA device, or TRITON_INTERPRET=1"
)
ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
BOTH = (True, False)  # fused layers, and those in plain torch
SCHEMES = [
    ("bf16", None),
    ("w4a16", 32),
    ("w8a8", None),
    *[("fp8", None), ("fp8_block", None), ("w4a8", 32), ("nvfp4a16", None)] * ON_GPU,  # the interpreter takes seconds
]
PROMPTS = [tokens(3, 1)] * 2 + [tokens(5, 2)]
RESPONSES = [tokens(6, 3), tokens(1, 4), tokens(4, 5)]
# bf16 rounds every activation; other sums turn some of them over, and codes of activations with them
TOLERANCE = {"bf16": 0.05, "w4a16": 0.05, "nvfp4a16": 0.05, "w8a8": 0.1}


class Pairs:
    """pairs(fused, scheme, group, family, **quant): a policy of Triton kernels or of plain torch, made once.

    tiny_model: The fixture. On a CPU plain torch quantizes the weights but those of a dense w4a16, because the
    interpreter takes seconds to quantize a weight row by row.
    """

    def __init__(self, tiny_model: Callable[..., Path]) -> None:
        self.tiny_model = tiny_model
        self.made: dict[str, Policy] = {}

    def directory(self, family: str) -> Path:
        layers = 2 if ON_GPU or family == "qwen3_moe" else 1  # of that one the first has an MLP
        small = {}
        if family in EXPERT_NAMES and not ON_GPU:
            small = {"intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1}
        elif family in EXPERT_NAMES:
            small = {"hidden_size": 128, **({"moe_intermediate_size": 128} if family.startswith("qwen") else {})}
        return self.tiny_model(family, num_hidden_layers=layers, **small)

    def __call__(
        self, fused: bool, scheme: str = "bf16", group: int | None = None, family: str = "qwen3", **quant
    ) -> Policy:
        key = repr((fused, scheme, group, family, sorted(quant.items())))
        if key not in self.made:
            kernels = {} if fused else {"kernels": "reference"}
            with pytest.MonkeyPatch.context() as patch:
                if fused:
                    patch.setattr("qarl.policy.policy.use_kernels", lambda *_: True)
                if not ON_GPU and (scheme != "w4a16" or family in EXPERT_NAMES):
                    patch.setattr("qarl.policy.policy.quantize_parameters", _quantized_by_torch)
                policy = make_policy(self.directory(family), scheme, torch.bfloat16, group, DEVICE, **kernels, **quant)
            self.made[key] = policy
        assert self.made[key].weights.fused == fused
        return self.made[key]


def _quantized_by_torch(*arguments) -> Snapshot:
    return quantize_parameters(*arguments[:-1], kernels=False)


def logprobs(policy: Policy, prompts=PROMPTS, responses=RESPONSES, routes: Routes = NO_ROUTES) -> Tensor:
    return policy.logprobs(prompts, responses, Truncation(), 128, routes=routes)[0]


def backward(policy: Policy, recompute: Recompute = "elementwise", routes: Routes = NO_ROUTES) -> Tensor:
    """Add a loss's gradients to those of the master weights. Return the log-probs."""
    policy.decoder.recompute = recompute
    logp = logprobs(policy, routes=routes)
    (logp * torch.linspace(-1, 1, len(logp), device=DEVICE)).sum().backward()
    return logp.detach()


def gradients(
    policy: Policy, recompute: Recompute = "elementwise", routes: Routes = NO_ROUTES
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return log-probs and gradients of a loss per master weight; zeros if it gets none."""
    policy.model.zero_grad()
    logp, named = backward(policy, recompute, routes), policy.named_parameters()
    return logp, {n: torch.zeros_like(p) if p.grad is None else p.grad.clone() for n, p in named}


def caches_of(policy: Policy) -> Caches:
    """Return KV caches with two pages of zeros per layer."""
    config = policy.config
    shape = (2, config.num_key_value_heads, 64, policy.decoder.layers[0].head_dim)
    dtype = policy.sampler.cache_dtype
    return [
        tuple(torch.zeros(shape, dtype=torch.bfloat16, device=DEVICE).to(dtype) for _ in "kv")
        for _ in range(config.num_hidden_layers)
    ]


def assert_near(found: dict[str, Tensor], expected: dict[str, Tensor], cosine: float) -> None:
    """Check that gradients agree in direction and length, and are zero where no token reaches a weight."""
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        if not gradient.any():
            assert not found[name].any(), f"{name}: no token reaches it"
            continue
        near = torch.nn.functional.cosine_similarity(found[name].flatten(), gradient.flatten(), dim=0)
        assert near > cosine, (name, float(near))
        assert 0.9 < found[name].norm() / gradient.norm() < 1.1, name
