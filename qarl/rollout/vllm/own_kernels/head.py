"""Logits in float32 from the learner's product inside vLLM's model, on the CPU.

vLLM rounds logits to the model's dtype, which moves a log-prob by up to 2^-9 of the largest logit. `compute_logits`
runs outside of the compiled and captured code, so the product can be replaced in a loaded model.
"""

from __future__ import annotations

import torch
from qarl_kernels import logprob
from torch import Tensor, nn
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod, VocabParallelEmbedding

ROWS = 256  # compared at a time


class Float32Head(UnquantizedEmbeddingMethod):
    """The output layer, or the tied embedding, with `qarl_kernels.logprob.logits_of`.

    It holds the weight in float32, which `refresh` updates after every load.
    """

    def __init__(self, layer: VocabParallelEmbedding) -> None:
        self._layer = layer
        self.weight_float32 = self._weight().float()

    def refresh(self) -> None:
        """Copy the layer's current weight."""
        self.weight_float32.copy_(self._weight())

    def is_current(self) -> bool:
        """Whether the product reads the layer's current weight."""
        blocks = zip(self.weight_float32.split(ROWS), self._weight().split(ROWS), strict=True)
        return all(torch.equal(wide, rows.float()) for wide, rows in blocks)

    def process_weights_after_loading(self, layer: VocabParallelEmbedding) -> None:
        """Do nothing: vLLM calls this during a load, and not for tied layers."""

    def apply(self, layer: VocabParallelEmbedding, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """x: (..., H) of the model's dtype. Returns (..., V) float32, without vLLM's padding of the vocabulary."""
        assert bias is None, "output layers with a bias are not among the learner's models"
        logits = logprob.logits_of(x.reshape(-1, x.shape[-1]), self.weight_float32)
        return logits.view(*x.shape[:-1], logits.shape[-1])

    def _weight(self) -> Tensor:
        # Without vLLM's padding of the vocabulary: the CPU's bits may depend on the shape.
        return self._layer.weight.data[: self._layer.org_vocab_size]


def use_float32_head(model: nn.Module) -> Float32Head:
    """Make a loaded model's `compute_logits` return float32. Returns its new head; call `refresh` after every load.

    model: A causal language model of vLLM, whole in this process.
    """
    head = model.lm_head
    assert isinstance(head, VocabParallelEmbedding), f"{type(model).__name__} has no output layer in this process"
    assert head.weight.ndim == 2 and head.weight.is_floating_point(), "the output layer is quantized"
    head.quant_method = Float32Head(head)
    return head.quant_method
