"""Activation memory of the learner's forward and backward for a micro-batch, in bytes. Imports no torch.

The counts are derived from the code. With Triton kernels they follow `qarl.policy.layer.Kept` and the temporaries of
the products, norms and output layer. In plain torch they follow what autograd saves for the backward.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from qarl.config import Config
from qarl.config.architecture import Architecture
from qarl.config.quant import scheme_of

Device = Literal["cpu", "cuda"]
DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
WIDTH = 2  # bytes per 16-bit value
# Constants of `qarl_kernels.head`, copied because that module imports torch: buffer sizes in bytes, vocabulary entries
# per chunk, and tile sizes.
HEAD_PARTIAL, HEAD_GRADIENT, HEAD_WIDTH = 2**27, 2**27, 8192
HEAD_TILE, HEAD_PITCH = 256, 128
ATTENTION_PADDING = 131  # maximum rows that `qarl_kernels.flash.backward` adds to its statistics
WORKSPACE_BYTES = 2**25  # cuBLAS workspace on Hopper
# Bytes per logit of a chunk. plain: float32 logits and log-probs. ranked (top-p sorts the logits): logits, mask,
# probabilities, their int64 order, and three sorted float64 arrays (values, cumulative sums, sums before each value).
LOGIT_BYTES = {"plain": 2 * 4, "ranked": 4 + 1 + 4 + 8 + 3 * 8}
# Bytes per value that `Scheme.rounded_input` allocates in addition to its 16-bit input: codes and two float32 copies.
ROUNDED_INPUT = 1 + 2 * 4


def plain_activation_bytes(
    tokens: int, layers: int, hidden: int, intermediate: int, heads: int, kv: int, width: int, checkpointing: bool
) -> int:
    """Bytes that autograd keeps for the backward of one micro-batch in plain torch.

    Per token and layer: each of the two norms keeps its input in float32 and its output before and after the weight
    (4 H + 2 w H); attention keeps q, k, v and its output, the input of o_proj (2 w Q + 2 w KV); the MLP keeps gate,
    silu(gate), up and their product (4 w I). With checkpointing each layer keeps its input (w H), and one layer at a
    time is recomputed.

    Args:
        tokens: Tokens of the micro-batch.
        layers: Number of layers.
        hidden: Hidden size H.
        intermediate: Intermediate size I of the MLP.
        heads: Features of q, num_heads * head_dim (Q).
        kv: Features of k, num_kv_heads * head_dim (KV).
        width: Bytes per value of the compute dtype (w).
        checkpointing: Whether each layer is recomputed in the backward.
    """
    layer = 2 * (4 * hidden + 2 * width * hidden) + 2 * width * (heads + kv) + 4 * width * intermediate
    return tokens * (layers * width * hidden + layer) if checkpointing else tokens * layers * layer


def plain_expert_bytes(architecture: Architecture, tokens: int, width: int) -> int:
    """Bytes that autograd keeps for one layer of experts, in addition to the products inside the experts.

    Counted are the input rows, the float32 outputs, and the router's logits and probabilities. A shared expert adds its
    float32 output and its gate. width: bytes per value of the compute dtype.
    """
    mixture, hidden = architecture.mixture, architecture.hidden_size
    assert mixture is not None, "a layer of experts"
    shared = 4 * hidden + 4 if mixture.shared else 0
    return tokens * (mixture.per_token * (width + 4) * hidden + 8 * mixture.experts + shared)


def uses_kernels(config: Config, device: Device) -> bool:
    """Whether weights are stored for Triton kernels, not for plain torch."""
    return device == "cuda" and config.quant.kernels == "auto" and config.model.dtype != "float32"


def logit_bytes(config: Config) -> int:
    """Bytes per logit of a chunk of logits. With a teacher, up to seven float32 matrices exist at once."""
    own = LOGIT_BYTES["ranked" if config.rollout.top_p < 1 else "plain"]
    return own if config.objective.teacher is None else max(own, 28)


def activations(config: Config, architecture: Architecture, device: Device, tokens: int) -> list[tuple[str, int]]:
    """Return (name, bytes) of a forward and backward of `tokens` tokens, without parameters and their gradients."""
    a, train = architecture, config.train
    name = f"activations ({tokens:,} tokens, recompute {train.recompute})"
    if fused := fused_pass(config, a, device, tokens):
        part, most = max(fused.temporaries().items(), key=lambda item: item[1])
        return [(name, fused.kept_bytes), (f"temporaries (most of them in: {part})", most + WORKSPACE_BYTES)]
    width, checkpointing = DTYPE_BYTES[config.learner_dtype], train.recompute == "layer"
    heads = a.num_heads * a.head_dim, a.num_kv_heads * a.head_dim
    inner = max(a.active_size, a.intermediate_size if a.dense_layers else 0)
    kept = plain_activation_bytes(tokens, a.num_layers, a.hidden_size, inner, *heads, width, checkpointing)
    if a.mixture is not None:
        kept += plain_expert_bytes(a, tokens, width) * (1 if checkpointing else len(a.mixture.layers))
    logits = logit_bytes(config) * train.logprob_chunk * a.vocab_size
    own = 4 * a.vocab_size * a.hidden_size  # before it is accumulated into the gradient
    return [(name, kept), (f"logits ({train.logprob_chunk} rows) and lm_head gradient", logits + own)]


def fused_pass(config: Config, architecture: Architecture, device: Device, tokens: int) -> FusedPass | None:
    """The learner's forward and backward on Triton kernels; None if it runs in plain torch."""
    if not uses_kernels(config, device) or config.learner_dtype == "float32":
        return None
    quant, scheme, objective, train = config.quant, scheme_of(config.quant), config.objective, config.train
    aligned = quant.learner == "aligned"
    shadowed = objective.ratio_kind == "shadow" or config.diagnostics.shadow_every > 0
    return FusedPass(
        architecture,
        tokens,
        config.learner_dtype,
        train.recompute,
        codes=aligned and scheme.input_codes is not None,
        rounded=quant.learner == "fake_quant" and scheme.activation is not None,
        rounded_backward=quant.ste_input == "dequantized",
        dequantized=aligned and scheme.quantized,
        packed=scheme.row_unit == 1,  # otherwise packing depends on the widths; assume the larger memory
        fp8=quant.backward == "fp8",
        logits=logit_bytes(config) * train.logprob_chunk * architecture.vocab_size if config.ranked else 0,
        kv_fp8=quant.kv_cache_dtype == "fp8" and quant.learner != "full_precision",
        second_forward=objective.kl_coef > 0 or (shadowed and not aligned),
    )


@dataclass(frozen=True)
class FusedPass:
    """Memory of a forward and backward on Triton kernels.

    Attributes:
        architecture: The model.
        tokens: Tokens of the micro-batch; all of them are counted as predicted.
        dtype: 16-bit compute dtype.
        recompute: `train.recompute`.
        codes: Whether products read one-byte activation codes.
        rounded: Whether products read 16-bit activations that were quantized and dequantized.
        rounded_backward: Whether weight gradients read quantized and dequantized activations too.
        dequantized: Whether weights are stored as codes, which the backward dequantizes.
        packed: Whether linears with the same input are multiplied as one packed linear.
        fp8: Whether products of the backward are FP8.
        kv_fp8: Whether keys and values are rounded to FP8, which makes a copy of them.
        logits: Bytes of a chunk of logits if tokens are ranked (top-k, top-p), else 0.
        second_forward: Whether a second forward without gradient (shadow or reference) runs while the first one's
            activations are kept.
    """

    architecture: Architecture
    tokens: int
    dtype: str
    recompute: str
    codes: bool = False
    rounded: bool = False
    rounded_backward: bool = False
    dequantized: bool = False
    packed: bool = True
    fp8: bool = False
    kv_fp8: bool = False
    logits: int = 0
    second_forward: bool = False

    @property
    def _hidden(self) -> int:
        """Hidden state, bytes per token."""
        return WIDTH * self.architecture.hidden_size

    @property
    def _out(self) -> int:
        """Attention output and the log-sum-exp per head, bytes per token."""
        a = self.architecture
        return WIDTH * a.num_heads * a.head_dim + 4 * a.num_heads

    @property
    def _qkv(self) -> int:
        """Output of q, k and v, bytes per token."""
        a = self.architecture
        return WIDTH * (a.num_heads + 2 * a.num_kv_heads) * a.head_dim

    @property
    def _inner(self) -> int:
        """Output of gate, or of up, in the MLP or in all experts of a token, bytes per token."""
        return WIDTH * self.architecture.active_size

    @property
    def _expert_outputs(self) -> int:
        """Outputs of the experts before summation, and the shared expert's gate, bytes per token; 0 for an MLP."""
        mixture = self.architecture.mixture
        if mixture is None:
            return 0
        return mixture.per_token * self._hidden + (self._hidden + 4 if mixture.shared else 0)

    @property
    def _routed(self) -> int:
        """Router logits, chosen experts and weights, and row positions in the experts' input, bytes per token."""
        mixture = self.architecture.mixture
        return 0 if mixture is None else 4 * mixture.experts + 4 * 4 * mixture.per_token

    @property
    def layer(self) -> int:
        """All intermediates of one layer, bytes per token.

        These are two residual streams and their norm statistics, q, k and v, the attention output, and gate and up.
        Experts add their outputs and the routing.
        """
        mlp = 2 * self._inner + self._expert_outputs + self._routed
        return 2 * (self._hidden + 4) + self._qkv + self._out + mlp

    @property
    def kept(self) -> int:
        """Intermediates that a layer keeps until its backward, bytes per token. The routing is always kept."""
        return {
            "elementwise": self.layer,
            "mlp": self.layer - 2 * self._inner - self._expert_outputs,
            "products": self._hidden + self._out + self._routed,
            "layer": self._hidden + self._routed,
        }[self.recompute]

    @property
    def kept_bytes(self) -> int:
        """Bytes that all layers keep until the backward."""
        a, plain = self.architecture, self._of_dense_layers()
        if plain is None:
            return self.tokens * a.num_layers * self.kept
        return self.tokens * ((a.num_layers - a.dense_layers) * self.kept + a.dense_layers * plain.kept)

    def _of_dense_layers(self) -> FusedPass | None:
        """This pass for the dense layers of a mixture-of-experts model; None if the model does not mix both kinds."""
        a = self.architecture
        if a.mixture is None or not a.dense_layers:
            return None
        return replace(self, architecture=replace(a, mixture=None))

    @property
    def forward_bytes(self) -> int:
        """Peak bytes of a forward without gradient: intermediates of one layer, and the residual stream before it."""
        plain = self._of_dense_layers()
        own = self.tokens * (self.layer + self._hidden + self._passing())
        return own if plain is None else max(own, plain.forward_bytes)

    def _passing(self) -> int:
        """Peak bytes per token of temporaries in a layer's forward, in addition to its intermediates."""
        a = self.architecture
        widest = a.active_size if a.mixture is None else max(a.mixture.routed_size, a.mixture.shared)
        product = widest if self.codes else WIDTH * widest
        product += ROUNDED_INPUT * widest if self.rounded else 0
        normed = a.hidden_size if self.codes else self._hidden
        return self._hidden + max(product + self._hidden, self._hidden + normed)  # output of down_proj, or of o_proj

    def temporaries(self) -> dict[str, int]:
        """Peak bytes of temporaries per part of a forward and backward, in addition to `kept_bytes`."""
        tokens, state = self.tokens, self.tokens * self._hidden
        current = tokens * (self.layer - self.kept)  # intermediates of the layer being computed that it does not keep
        stream = 0 if self.recompute in ("elementwise", "mlp") else state  # residual stream, if no layer keeps it
        found = {
            "forward of a layer": current + stream + tokens * self._passing(),
            # Output of down_proj, the stream if no layer keeps it, the rows of both, the last norm's input and output.
            "gathered states": state + stream + 4 * state,
            "output layer": 2 * state + self._head(),
            # Output gradient, last norm's input and its gradient; gradient of all tokens in float32 and rounded.
            "gradient of gathered states": 4 * state + tokens * 4 * self.architecture.hidden_size,
            "backward of a layer": 2 * state + current + max(self._backward_stages()),
        }
        if self.second_forward:
            found["forward of shadow or reference"] = 2 * state + self.forward_bytes
        plain = self._of_dense_layers()
        return found if plain is None else {part: max(most, plain.temporaries()[part]) for part, most in found.items()}

    def _head(self) -> int:
        """Peak bytes of the output layer, including the gradient of its input."""
        a, tokens = self.architecture, self.tokens
        half = self.dtype == "float16"  # gradients of the logits and copies of the operands are float32
        if self.logits:
            return self.logits + tokens * self._hidden + (4 * a.vocab_size * a.hidden_size if half else 0)
        tiles = -(-a.vocab_size // HEAD_TILE)
        rows = max(HEAD_PARTIAL // (12 * tiles) // HEAD_PITCH, 1) * HEAD_PITCH
        forward = 12 * tiles * min(rows, -(-tokens // HEAD_PITCH) * HEAD_PITCH)
        size, width = 4 if half else 2, min(HEAD_WIDTH, a.vocab_size)
        rows = min(tokens, HEAD_GRADIENT // HEAD_WIDTH // size)
        copies = 4 * (rows + width) * a.hidden_size if half else 0
        backward = size * rows * width + 4 * rows * a.hidden_size + copies + tokens * self._hidden
        return max(forward, backward)

    def _backward_stages(self) -> list[int]:
        """Bytes of temporaries in each stage of a layer's backward.

        Not counted are the layer's intermediates, and tensors that exist during the whole backward: the output gradient
        and the last norm's input.
        """
        a, tokens, state = self.architecture, self.tokens, self.tokens * self._hidden
        queries, keys = a.num_heads * a.head_dim, a.num_kv_heads * a.head_dim
        if a.mixture is None:
            mlp = self._mlp_stages(a.intermediate_size, a.intermediate_size, self.fp8)
        else:
            routed, shared = a.mixture.routed_size, a.mixture.shared
            mlp = self._mlp_stages(routed, a.mixture.experts * a.mixture.inner, False)  # products of experts are 16-bit
            if shared:  # runs after the experts' gate and up are freed, with the input gradient of all in float32
                before = 2 * state - 2 * tokens * WIDTH * routed
                mlp += [before + stage for stage in self._mlp_stages(shared, shared, self.fp8)]
        gradients = tokens * WIDTH * (queries + queries + 2 * keys)  # of the attention output and of q, k and v
        rotated = 2 * tokens * WIDTH * (queries + keys)  # rotated q and k, and their gradients
        rotated += tokens * WIDTH * keys if self.kv_fp8 else 0
        statistics = 32 * (tokens + ATTENTION_PADDING) * a.num_heads
        outputs = tokens * self._expert_outputs
        freed = 2 * tokens * self._inner + state + outputs  # before attention: gate, up and the MLP's residual stream
        return [
            3 * state,  # recomputation: the gradient, o_proj's output and its norm
            state + outputs,  # experts: gradient of their outputs, in memory together with the outputs it replaces
            *mlp,
            # Attention, with the gradients of the layer, of its norm and of the residual stream before the MLP.
            3 * state + gradients + rotated + statistics - freed,
        ]

    def _mlp_stages(self, inner: int, total_inner: int, fp8: bool) -> list[int]:
        """Bytes of temporaries in the backward of down, and of gate and up.

        Args:
            inner: Intermediate features per token.
            total_inner: Intermediate features of the weights, summed over all experts.
            fp8: Whether the products are FP8.
        """
        tokens, hidden = self.tokens, self.architecture.hidden_size
        state, middle, weights = tokens * self._hidden, tokens * WIDTH * inner, total_inner * hidden
        rounded = tokens * ROUNDED_INPUT * inner if self.rounded_backward else 0
        # FP8 codes: the gradient by rows and by columns, the layer's input by columns, and the weight.
        fp8_down = (2 * tokens + inner) * hidden if fp8 else 0
        fp8_gate_up = (4 * tokens + 2 * hidden) * inner + 2 * tokens * hidden if fp8 else 0
        down, gate_up = self._weight(weights), self._weight(2 * weights)
        if not self.packed:
            gate_up *= 2  # separate tensors first, then their concatenation
        return [
            state + fp8_down + max(2 * middle, middle + max(down, rounded)),
            2 * state + max(fp8_gate_up, gate_up),
        ]

    def _weight(self, elements: int) -> int:
        """Bytes of the dequantized copy of a weight; 0 if weights are not stored as codes."""
        return WIDTH * elements if self.dequantized else 0
