"""What the learner's forward and backward of a micro-batch hold, in bytes, counted from the code. Imports no torch.

A learner on Triton kernels says itself what it keeps (`qarl.policy.layer.Kept`), and its products, norms and
output layer which temporaries they make. In plain torch autograd keeps what it needs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from qarl.config import Config
from qarl.config.architecture import Architecture
from qarl.config.quant import scheme_of

Device = Literal["cpu", "cuda"]
DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
WIDTH = 2  # bytes of a value in 16 bits
# Of `qarl_kernels.head`, which imports torch: bytes of its buffers, tokens of the vocabulary at
# once, tiles.
HEAD_PARTIAL, HEAD_GRADIENT, HEAD_WIDTH = 2**27, 2**27, 8192
HEAD_TILE, HEAD_PITCH = 256, 128
ATTENTION_PADDING = 131  # rows at most that `qarl_kernels.flash.backward` adds to its statistics
WORKSPACE_BYTES = 2**25  # cuBLAS's on Hopper
# What a chunk of logits takes, in bytes a logit: float32 logits and log-probs; with top-p, which ranks them, logits,
# probabilities, their order (int64), and ranked in float64 themselves, their sums and what stands before each.
LOGIT_BYTES = {"plain": 2 * 4, "ranked": 4 + 1 + 4 + 8 + 3 * 8}
# `Scheme.rounded_input` in bytes a value beside its 16-bit argument: codes, and two float32 copies.
ROUNDED_INPUT = 1 + 2 * 4


def plain_activation_bytes(
    tokens: int, layers: int, hidden: int, intermediate: int, heads: int, kv: int, width: int, checkpointing: bool
) -> int:
    """What autograd keeps for the backward of one micro batch. heads, kv: features of q and of k (heads * head_dim).

    Per token and layer: each of the two norms keeps its input in float32 and its output before and after the weight
    (4 H + 2 w H); attention keeps q, k, v and, as input of o_proj, its output (2 w Q + 2 w KV); the MLP keeps gate,
    silu(gate), up and their product (4 w I). With checkpointing each layer keeps its input (w H), and one layer at a
    time is recomputed.
    """
    layer = 2 * (4 * hidden + 2 * width * hidden) + 2 * width * (heads + kv) + 4 * width * intermediate
    return tokens * (layers * width * hidden + layer) if checkpointing else tokens * layers * layer


def plain_expert_bytes(architecture: Architecture, tokens: int, width: int) -> int:
    """What autograd keeps of one layer's experts beside their products: the rows they read, what they give in float32,
    and the router's logits and probabilities; of the shared expert what it gives in float32, and its gate. width: bytes
    of the compute dtype."""
    mixture, hidden = architecture.mixture, architecture.hidden_size
    assert mixture is not None, "a layer of experts"
    shared = 4 * hidden + 4 if mixture.shared else 0
    return tokens * (mixture.per_token * (width + 4) * hidden + 8 * mixture.experts + shared)


def uses_kernels(config: Config, device: Device) -> bool:
    """Whether a version is published for Triton kernels, on a GPU that has them."""
    return device == "cuda" and config.quant.kernels == "auto" and config.model.dtype != "float32"


def logit_bytes(config: Config) -> int:
    """Of a logit in a chunk of rows whose logits are held."""
    return LOGIT_BYTES["ranked" if config.rollout.top_p < 1 else "plain"]


def activations(config: Config, architecture: Architecture, device: Device, tokens: int) -> list[tuple[str, int]]:
    """What a forward and backward of so many tokens hold, besides parameters and their gradients: names and bytes."""
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
    own = 4 * a.vocab_size * a.hidden_size  # before it is added to the others
    return [(name, kept), (f"logits ({train.logprob_chunk} rows) and lm_head gradient", logits + own)]


def fused_pass(config: Config, architecture: Architecture, device: Device, tokens: int) -> FusedPass | None:
    """The learner's forward and backward, where they run on Triton kernels."""
    if not uses_kernels(config, device) or config.learner_dtype == "float32":
        return None
    quant, scheme, objective, train = config.quant, scheme_of(config.quant), config.objective, config.train
    aligned = quant.learner == "aligned"
    shadowed = objective.ratio_kind == "shadow" or config.diagnostics.shadow_every > 0
    ranked = config.rollout.top_p < 1 or config.rollout.top_k > 0
    return FusedPass(
        architecture,
        tokens,
        config.learner_dtype,
        train.recompute,
        codes=aligned and scheme.input_codes is not None,
        rounded=quant.learner == "fake_quant" and scheme.activation is not None,
        rounded_backward=quant.ste_input == "dequantized",
        dequantized=aligned and scheme.quantized,
        stacked=scheme.row_unit == 1,  # otherwise it depends on the widths
        fp8=quant.backward == "fp8",
        logits=logit_bytes(config) * train.logprob_chunk * architecture.vocab_size if ranked else 0,
        kv_fp8=quant.kv_cache_dtype == "fp8" and quant.learner != "full_precision",
        again=objective.kl_coef > 0 or (shadowed and not aligned),
    )


@dataclass(frozen=True)
class FusedPass:
    """A forward and backward on Triton kernels.

    tokens: of the micro-batch, all of them predicted. dtype: of compute, of 16 bits. recompute: `train.recompute`.
    codes: products read activations of one byte. rounded: in 16 bits, after their quantization and back.
    rounded_backward: so do the gradients of the weights. dequantized: weights are codes, which the backward makes
    values of. stacked: those of one input are one operand. fp8: products of the backward are FP8. kv_fp8: keys and
    values are rounded, which makes values of their own. logits: bytes of a chunk of logits where tokens are ranked,
    else 0. again: a second forward, without gradient, beside what the first keeps.
    """

    architecture: Architecture
    tokens: int
    dtype: str
    recompute: str
    codes: bool = False
    rounded: bool = False
    rounded_backward: bool = False
    dequantized: bool = False
    stacked: bool = True
    fp8: bool = False
    kv_fp8: bool = False
    logits: int = 0
    again: bool = False

    @property
    def _hidden(self) -> int:
        """A token's state."""
        return WIDTH * self.architecture.hidden_size

    @property
    def _out(self) -> int:
        """A token's output of attention, with the log-sum-exp of its heads."""
        a = self.architecture
        return WIDTH * a.num_heads * a.head_dim + 4 * a.num_heads

    @property
    def _qkv(self) -> int:
        a = self.architecture
        return WIDTH * (a.num_heads + 2 * a.num_kv_heads) * a.head_dim

    @property
    def _inner(self) -> int:
        """A token's product in the MLP, or in all of its experts; gate and up are two of these."""
        return WIDTH * self.architecture.active_size

    @property
    def _given(self) -> int:
        """What a token's experts give, before it is added up, and the shared one's gate; of an MLP nothing."""
        mixture = self.architecture.mixture
        if mixture is None:
            return 0
        return mixture.per_token * self._hidden + (self._hidden + 4 if mixture.shared else 0)

    @property
    def _routed(self) -> int:
        """A token's logits, experts with their weights, and places among the rows of all experts."""
        mixture = self.architecture.mixture
        return 0 if mixture is None else 4 * mixture.experts + 4 * 4 * mixture.per_token

    @property
    def layer(self) -> int:
        """A token's intermediates of one layer: two streams and their norms, q, k and v, attention, gate and up; of
        experts also what each gives, and who they are."""
        mlp = 2 * self._inner + self._given + self._routed
        return 2 * (self._hidden + 4) + self._qkv + self._out + mlp

    @property
    def kept(self) -> int:
        """Those that a layer keeps until its backward. Which experts there were is always among them."""
        return {
            "elementwise": self.layer,
            "mlp": self.layer - 2 * self._inner - self._given,
            "products": self._hidden + self._out + self._routed,
            "layer": self._hidden + self._routed,
        }[self.recompute]

    @property
    def kept_bytes(self) -> int:
        """What all layers keep."""
        a, plain = self.architecture, self._of_dense_layers()
        if plain is None:
            return self.tokens * a.num_layers * self.kept
        return self.tokens * ((a.num_layers - a.dense_layers) * self.kept + a.dense_layers * plain.kept)

    def _of_dense_layers(self) -> FusedPass | None:
        """The same of a model of such layers alone as have an MLP beside others of experts; None: there are none."""
        a = self.architecture
        if a.mixture is None or not a.dense_layers:
            return None
        return replace(self, architecture=replace(a, mixture=None))

    @property
    def forward_bytes(self) -> int:
        """A forward without gradient: a layer's intermediates, and the stream before it, which came from another."""
        plain = self._of_dense_layers()
        own = self.tokens * (self.layer + self._hidden + self._passing())
        return own if plain is None else max(own, plain.forward_bytes)

    @property
    def forward_peak(self) -> int:
        """A forward without gradient, with the output layer."""
        return max(self.forward_bytes, self.tokens * self._hidden + self._head()) + WORKSPACE_BYTES

    def _passing(self) -> int:
        """A token's values that pass through a layer's forward beside its intermediates, at their most."""
        a = self.architecture
        widest = a.active_size if a.mixture is None else max(a.mixture.routed_size, a.mixture.shared)
        product = widest if self.codes else WIDTH * widest
        product += ROUNDED_INPUT * widest if self.rounded else 0
        normed = a.hidden_size if self.codes else self._hidden
        return self._hidden + max(product + self._hidden, self._hidden + normed)  # down's output, or that of o

    def temporaries(self) -> dict[str, int]:
        """What is there for a while beside `kept_bytes`, at its most in each part of a forward and backward."""
        tokens, state = self.tokens, self.tokens * self._hidden
        current = tokens * (self.layer - self.kept)  # of the layer that is at work
        stream = 0 if self.recompute in ("elementwise", "mlp") else state
        found = {
            "forward of a layer": current + stream + tokens * self._passing(),
            # Down's output, the stream where no layer keeps it, the rows of both, the last norm's input and output.
            "gathered states": state + stream + 4 * state,
            "output layer": 2 * state + self._head(),
            # What arrived, the last norm's input and its gradient; that of all tokens in float32 and rounded.
            "gradient of gathered states": 4 * state + tokens * 4 * self.architecture.hidden_size,
            "backward of a layer": 2 * state + current + max(self._backward_stages()),
        }
        if self.again:
            found["forward of shadow or reference"] = 2 * state + self.forward_bytes
        plain = self._of_dense_layers()
        return found if plain is None else {part: max(most, plain.temporaries()[part]) for part, most in found.items()}

    def _head(self) -> int:
        """The output layer, with the gradient of its input."""
        a, tokens = self.architecture, self.tokens
        half = self.dtype == "float16"  # whose logits' gradient is float32, and so are copies of the operands
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
        """Beside a layer's intermediates, and what the whole backward holds: the gradient that came and the last norm's
        input."""
        a, tokens, state = self.architecture, self.tokens, self.tokens * self._hidden
        queries, keys = a.num_heads * a.head_dim, a.num_kv_heads * a.head_dim
        if a.mixture is None:
            mlp = self._mlp_stages(a.intermediate_size, a.intermediate_size, self.fp8)
        else:
            routed, shared = a.mixture.routed_size, a.mixture.shared
            mlp = self._mlp_stages(routed, a.mixture.experts * a.mixture.inner, False)  # whose products are of 16 bits
            if shared:  # when their gate and up are gone, and what reaches the input of all is there in float32
                beside = 2 * state - 2 * tokens * WIDTH * routed
                mlp += [beside + stage for stage in self._mlp_stages(shared, shared, self.fp8)]
        out_gradient = tokens * WIDTH * (queries + queries + 2 * keys)  # of attention's output and of q, k and v
        turned = 2 * tokens * WIDTH * (queries + keys)  # q and k, and their gradients
        turned += tokens * WIDTH * keys if self.kv_fp8 else 0
        statistics = 32 * (tokens + ATTENTION_PADDING) * a.num_heads
        given = tokens * self._given
        gone = 2 * tokens * self._inner + state + given  # before attention's: gate and up, and the stream of the MLP
        return [
            3 * state,  # computing again: the gradient, o's output and its norm
            state + given,  # experts: the gradient of what each gives beside that, whose place it takes
            *mlp,
            3 * state + out_gradient + turned + statistics - gone,  # gradients: of the layer, its norm and its middle
        ]

    def _mlp_stages(self, inner: int, of_all: int, fp8: bool) -> list[int]:
        """The backward of down, and of gate and up. inner: features inside that a token goes through. of_all: those of
        all weights. fp8: whether the products are."""
        tokens, hidden = self.tokens, self.architecture.hidden_size
        state, middle, weights = tokens * self._hidden, tokens * WIDTH * inner, of_all * hidden
        rounded = tokens * ROUNDED_INPUT * inner if self.rounded_backward else 0
        # In FP8: codes of the gradient by rows and by columns, of the layer's input by columns, and of the weight.
        fp8_down = (2 * tokens + inner) * hidden if fp8 else 0
        fp8_gate_up = (4 * tokens + 2 * hidden) * inner + 2 * tokens * hidden if fp8 else 0
        down, gate_up = self._weight(weights), self._weight(2 * weights)
        if not self.stacked:
            gate_up *= 2  # one after the other, then together
        return [
            state + fp8_down + max(2 * middle, middle + max(down, rounded)),
            2 * state + max(fp8_gate_up, gate_up),
        ]

    def _weight(self, elements: int) -> int:
        """Values of a weight that is held as codes."""
        return WIDTH * elements if self.dequantized else 0
