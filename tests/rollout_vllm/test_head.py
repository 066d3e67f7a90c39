"""The float32 output layer inside vLLM shows whether it multiplies with the weight that vLLM holds."""

from types import SimpleNamespace

import pytest
import torch
from needs_vllm import needs_vllm

pytestmark = needs_vllm


@pytest.fixture
def layer() -> SimpleNamespace:
    """An output layer of 300 tokens, which vLLM has padded to 320."""
    return SimpleNamespace(weight=torch.nn.Parameter(torch.randn(320, 8).bfloat16()), org_vocab_size=300)


def test_a_head_is_fresh_after_a_refresh_and_not_with_another_or_a_corrupted_weight(layer) -> None:
    from qarl.rollout.vllm.own_kernels.head import Float32Head

    head = Float32Head(layer)
    assert head.is_current()
    layer.weight.data[299, 7] += 1
    assert not head.is_current()
    head.refresh()
    assert head.is_current()
    head.weight_float32.view(torch.int32)[17, 3] ^= 1
    assert not head.is_current()
