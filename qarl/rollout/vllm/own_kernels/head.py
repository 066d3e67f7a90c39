"""Float32 logits in vLLM's model on the CPU, computed by the learner's product.

vLLM rounds logits to the model's dtype, which changes a log-prob by up to 2^-9 of the largest logit. `compute_logits`
runs outside of compiled and captured code, so the product can be replaced in a loaded model.
"""

from __future__ import annotations

from typing import Any

import torch
from qarl_kernels import logprob
from torch import Tensor, nn
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod, VocabParallelEmbedding

ROWS = 256  # rows compared at a time


class Float32Head(UnquantizedEmbeddingMethod):
    """Output layer (or tied embedding) that computes logits with `qarl_kernels.logprob.logits_of`.

    Stores a float32 copy of the weight. Call `refresh` after every load.
    """

    def __init__(self, layer: VocabParallelEmbedding) -> None:
        self._layer = layer
        self.weight_float32 = self._weight().float()

    def refresh(self) -> None:
        """Update the float32 copy from the layer's weight."""
        self.weight_float32.copy_(self._weight())

    def is_current(self) -> bool:
        """Return whether the float32 copy equals the layer's weight."""
        blocks = zip(self.weight_float32.split(ROWS), self._weight().split(ROWS), strict=True)
        return all(torch.equal(wide, rows.float()) for wide, rows in blocks)

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Do nothing. vLLM calls this during a load, but not for tied layers, hence `refresh`."""

    def apply(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """x: (..., H) of the model's dtype. Returns (..., V) float32, without vLLM's padding of the vocabulary."""
        assert bias is None, "output layers with a bias are not among the learner's models"
        logits = logprob.logits_of(x.reshape(-1, x.shape[-1]), self.weight_float32)
        return logits.view(*x.shape[:-1], logits.shape[-1])

    def _weight(self) -> Tensor:
        # Without vLLM's padding of the vocabulary, because bits of the CPU's product may depend on the shape.
        weight: Any = self._layer.weight
        return weight.data[: self._layer.org_vocab_size]


def use_float32_head(model: nn.Module) -> Float32Head:
    """Make a loaded model's `compute_logits` return float32. Returns the new head.

    model: a causal language model of vLLM that is not split over processes.
    """
    head = model.lm_head
    assert isinstance(head, VocabParallelEmbedding), f"{type(model).__name__} has no output layer in this process"
    weight: Any = head.weight
    assert weight.ndim == 2 and weight.is_floating_point(), "the output layer is quantized"
    wide = head.quant_method = Float32Head(head)
    return wide
