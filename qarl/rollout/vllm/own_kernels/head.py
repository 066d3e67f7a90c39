"""Logits in float32 from the learner's product, inside vLLM.

vLLM rounds logits to the model's dtype, which moves a log-prob by up to 2^-9 of the largest logit. `compute_logits`
runs outside of what vLLM compiles and captures, so the product can be replaced in a model that is loaded.
"""

from __future__ import annotations

import torch
from qarl_kernels import logprob
from torch import Tensor, nn
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod, VocabParallelEmbedding

ROWS = 256  # compared at a time


class Float32Head(UnquantizedEmbeddingMethod):
    """The output layer, or the embedding where the two are tied, with `qarl_kernels.logprob.logits_of`.

    On the CPU it holds the weight in float32, which `refresh` must bring up to date after every load.
    """

    def __init__(self, layer: VocabParallelEmbedding) -> None:
        self._layer = layer
        self.wide: Tensor | None = None
        self.refresh()

    def refresh(self) -> None:
        """Take over the layer's weight as it is now. Nothing to do on a GPU."""
        weight = self._weight(self._layer)
        if weight.device.type != "cpu":
            return
        if self.wide is None:
            self.wide = torch.empty_like(weight, dtype=torch.float32)
        self.wide.copy_(weight)

    def fresh(self) -> bool:
        """Whether what multiplies is the layer's weight as it is now."""
        if self.wide is None:
            return True
        weight = self._weight(self._layer)
        blocks = zip(self.wide.split(ROWS), weight.split(ROWS), strict=True)
        return all(torch.equal(wide, rows.float()) for wide, rows in blocks)

    def process_weights_after_loading(self, layer: VocabParallelEmbedding) -> None:
        """Nothing: vLLM calls it in the middle of a load, and not for a layer whose weight is another's."""

    @property
    def weight(self) -> Tensor:
        """What multiplies, (V, H): the layer's weight, on the CPU in float32."""
        return self._weight(self._layer) if self.wide is None else self.wide

    def apply(self, layer: VocabParallelEmbedding, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """x: (..., H) of the model's dtype. Returns (..., V) float32, without vLLM's padding of the vocabulary."""
        assert bias is None, "output layers with a bias are not among the learner's models"
        logits = logprob.logits_of(x.reshape(-1, x.shape[-1]), self.weight)
        return logits.view(*x.shape[:-1], logits.shape[-1])

    @staticmethod
    def _weight(layer: VocabParallelEmbedding) -> Tensor:
        return layer.weight.data[: layer.org_vocab_size]  # the learner's shape, which the CPU's bits may depend on


def use_float32_head(model: nn.Module) -> Float32Head:
    """Let a loaded model's `compute_logits` return float32; call `refresh` of what it returns after every later load.

    model: a causal language model of vLLM, whole in this process. Returns what multiplies its output layer from now on.
    """
    head = model.lm_head
    assert isinstance(head, VocabParallelEmbedding), f"{type(model).__name__} has no output layer in this process"
    assert head.weight.ndim == 2 and head.weight.is_floating_point(), "the output layer is quantized"
    head.quant_method = Float32Head(head)
    return head.quant_method
