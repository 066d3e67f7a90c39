"""Kernels that a decoder layer launches. Small batches are bound by launches, so one kernel more must show here."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from policy_models import make_policy, tokens
from qarl_kernels.launch import recording
from qarl_kernels.logprob import Truncation

PRODUCTS = {"bf16": "gemm_kernel", "w8a8": "gemm_kernel", "w4a16": "narrow_kernel", "w4a8": "w4a8_kernel"}
BACKWARD = {  # beside the products of gradients, which are the framework's
    "_norm_backward_kernel": 2,
    "_again_kernel": 2,  # a norm's values once more
    "_rotary_kernel": 1,  # the rotation once more
    "_backward_kernel": 2,  # of the rotation, and of the activation
    "stats_kernel": 1,
    "query_grad_kernel": 1,
    "key_grad_kernel": 1,
    "_column_sum_kernel": 4,  # of the biases: these models have some
}
DEQUANTIZED = {"w8a8": "dequantize_bytes_kernel", "w4a16": "dequantize_int4_kernel", "w4a8": "dequantize_int4_kernel"}


def forward_of(scheme: str) -> Counter[str]:
    """Kernels of one layer: norms, the rotation, attention and the activation between four products."""
    quantized = ["activation_kernel"] if scheme in ("w8a8", "w4a8") else []  # of attention's output; norms do their own
    rest = ["_norm_kernel"] * 2 + ["_rotary_kernel", "attention_kernel", "_gated_kernel", *quantized]
    return Counter([PRODUCTS[scheme]] * 4 + rest)


@pytest.mark.parametrize("scheme", PRODUCTS)
def test_a_layer_launches_a_kernel_between_two_products(scheme: str, tiny_model: Callable[..., Path], monkeypatch):
    monkeypatch.setattr("qarl.policy.policy.use_kernels", lambda *_: True)
    counted = []
    for layers in (1, 2):
        with recording() as launches:  # nothing runs: numbers are what memory held
            group = 32 if scheme.startswith("w4") else None
            policy = make_policy(tiny_model("qwen3", num_hidden_layers=layers), scheme, torch.bfloat16, group)
            parts = []
            launches.clear()
            policy.sampler.states([tokens(9, 1), tokens(5, 2)])
            parts.append(Counter(one.kernel.__name__ for one in launches))
            logp = policy.logprobs([tokens(3, 1)], [tokens(6, 2)], Truncation(), 128)[0]
            launches.clear()
            logp.sum().backward()
            parts.append(Counter(one.kernel.__name__ for one in launches))
        counted.append(parts)
    (forward, backward), (forward_of_two, backward_of_two) = counted
    assert forward_of_two - forward == forward_of(scheme)
    dequantized = {DEQUANTIZED[scheme]: 4} if scheme in DEQUANTIZED else {}
    assert backward_of_two - backward == Counter(BACKWARD | dequantized)
