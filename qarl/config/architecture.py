"""The shape of a model from its config.json or GGUF header: layers, sizes and parameter counts, without torch."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from qarl.config.gguf_header import GGUFArray, read_gguf_header
from qarl.config.mixture import Mixture, read_mixture
from qarl.config.model_fields import check_implemented, check_refused, layer_windows, vllm_fault
from qarl.config.model_schema import DEFAULT_KV_HEADS, FAMILIES, ConfigJson, GGUFModel, valid
from qarl.inputs.files import Unreadable
from qarl.inputs.json import read_json

KERNEL_HEADS = range(8, 257, 8)  # head sizes of `qarl_kernels.flash`; repeated here because it imports torch


def unserved_heads(head_dim: int) -> str | None:
    """Why the Triton attention kernels do not support this head size, and the fix; None if they do."""
    if head_dim in KERNEL_HEADS:
        return None
    return (
        f"has heads of {head_dim} features, but the GPU attention kernels support 8 to {KERNEL_HEADS[-1]} in steps "
        f"of {KERNEL_HEADS.step}; set quant.kernels: reference (plain torch, slow), or model.device: cpu"
    )


MAX_LINEARS = 2**17
"""Maximum number of Linear layers in a model. `qarl check` and the estimates list them at about 20 us per layer, so the
limit costs 3 seconds. For scale: a mixture of 61 layers with 384 experts has 70,518."""


class UnknownFamily(ValueError):
    """The model's layers are not known to this module. transformers may still run it."""


class LinearShape(NamedTuple):
    """A Linear layer: its Hugging Face module name and its weight [out_features, in_features]."""

    name: str
    out_features: int
    in_features: int


@dataclass(frozen=True)
class Architecture:
    """A decoder of the Llama layout: unfused projections, and a gated MLP or a mixture of such experts.

    All sizes are numbers of elements.
    """

    family: str
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    context_length: int | None
    tied_embeddings: bool
    attention_bias: bool = False  # biases of q, k, v and o; Qwen2 always has those of q, k and v
    mlp_bias: bool = False
    mixture: Mixture | None = None
    windows: tuple[int | None, ...] = ()  # attention window per layer in tokens, None: unlimited; empty: all unlimited
    vllm_fault: str = ""  # why vLLM's model would compute different results; empty if it does not

    def tensors(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield (Hugging Face name, shape) of every parameter. Tied weights occur once."""
        yield "model.embed_tokens.weight", (self.vocab_size, self.hidden_size)
        biased = {name for name, _ in self._biases()}
        for name, n, k in self.linears():
            yield f"{name}.weight", (n, k)
            if name.split(".", 3)[3] in biased:
                yield f"{name}.bias", (n,)
        for layer in range(self.num_layers):
            for norm, size in self._norms():
                yield f"model.layers.{layer}.{norm}.weight", (size,)
            if self.mixture is not None and layer in self.mixture.layers:
                for gate, rows in self.mixture.gates:
                    yield f"model.layers.{layer}.{gate}.weight", (rows, self.hidden_size)
        yield "model.norm.weight", (self.hidden_size,)
        if not self.tied_embeddings:
            yield "lm_head.weight", (self.vocab_size, self.hidden_size)

    def _norms(self) -> list[tuple[str, int]]:
        """(name, size) of the norms in one layer."""
        norms = [("input_layernorm", self.hidden_size), ("post_attention_layernorm", self.hidden_size)]
        if self.family in ("qwen3", "qwen3_moe"):
            norms += [("self_attn.q_norm", self.head_dim), ("self_attn.k_norm", self.head_dim)]
        if self.family == "olmoe":  # normalizes over all heads together
            heads, kv = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
            norms += [("self_attn.q_norm", heads), ("self_attn.k_norm", kv)]
        return norms

    def _biases(self) -> list[tuple[str, int]]:
        """(name, size) of the biases in one layer."""
        hidden, inner = self.hidden_size, self.intermediate_size
        heads, kv = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        biases = []
        if self.attention_bias or self.family in ("qwen2", "qwen2_moe"):
            biases += [("self_attn.q_proj", heads), ("self_attn.k_proj", kv), ("self_attn.v_proj", kv)]
        if self.attention_bias:
            biases += [("self_attn.o_proj", hidden)]
        if self.mlp_bias:
            biases += [("mlp.gate_proj", inner), ("mlp.up_proj", inner), ("mlp.down_proj", hidden)]
        return biases

    @property
    def linear_count(self) -> int:
        """`len(self.linears())` without building the list."""
        dense, mixture = self.num_layers * 4 + self.dense_layers * 3, self.mixture
        return dense if mixture is None else dense + len(mixture.layers) * 3 * (mixture.experts + (mixture.shared > 0))

    def linears(self) -> list[LinearShape]:
        """Every Linear except the output layer, in forward order."""
        return [
            LinearShape(f"model.layers.{layer}.{name}", n, k)
            for layer in range(self.num_layers)
            for name, n, k in self._attention_linears() + self._mlp_linears(layer)
        ]

    def _mlp_linears(self, layer: int) -> list[tuple[str, int, int]]:
        hidden, inner, mixture = self.hidden_size, self.intermediate_size, self.mixture
        if mixture is None or layer not in mixture.layers:
            return [
                ("mlp.gate_proj", inner, hidden),
                ("mlp.up_proj", inner, hidden),
                ("mlp.down_proj", hidden, inner),
            ]
        names, inner = mixture.names, mixture.inner
        routed = [
            (names.expert(expert, linear), *shape)
            for expert in range(mixture.experts)
            for linear, shape in (
                (names.gate, (inner, hidden)),
                (names.up, (inner, hidden)),
                (names.down, (hidden, inner)),
            )
        ]
        shapes = (mixture.shared, hidden), (hidden, mixture.shared)
        shared = [(name, *shape) for stack, shape in zip(names.shared_stacks(), shapes, strict=False) for name in stack]
        return routed + shared

    def _attention_linears(self) -> list[tuple[str, int, int]]:
        hidden = self.hidden_size
        heads, kv = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        return [
            ("self_attn.q_proj", heads, hidden),
            ("self_attn.k_proj", kv, hidden),
            ("self_attn.v_proj", kv, hidden),
            ("self_attn.o_proj", hidden, heads),
        ]

    @property
    def active_size(self) -> int:
        """Intermediate MLP features per token, summed over the token's experts in a mixture."""
        return self.intermediate_size if self.mixture is None else self.mixture.active_size

    @property
    def dense_layers(self) -> int:
        """Number of layers with a dense MLP."""
        return self.num_layers - (0 if self.mixture is None else len(self.mixture.layers))

    @property
    def embedding_parameters(self) -> int:
        """Parameters of the embedding, plus those of the output layer if it is not tied."""
        return self.vocab_size * self.hidden_size * (1 if self.tied_embeddings else 2)

    @property
    def vector_parameters(self) -> int:
        """Parameters of norms, biases and routers, which are never quantized and never updated by Muon."""
        layer = sum(size for _, size in self._norms() + self._biases())
        return self.num_layers * layer + self.hidden_size + self.router_parameters

    @property
    def router_parameters(self) -> int:
        """Parameters of the routers and of the gates of shared experts."""
        mixture = self.mixture
        return 0 if mixture is None else len(mixture.layers) * sum(rows for _, rows in mixture.gates) * self.hidden_size

    @property
    def matrix_parameters(self) -> int:
        """Parameters of all Linear layers except the output layer: Muon updates them, schemes quantize them."""
        return sum(n * k for _, n, k in self.linears())

    @property
    def multiplied_parameters(self) -> int:
        """Linear parameters that one token is multiplied with, counting only the experts that it is routed to."""
        mixture = self.mixture
        if mixture is None:
            return self.matrix_parameters
        left_out = (mixture.experts - mixture.per_token) * 3 * mixture.inner * self.hidden_size
        return self.matrix_parameters + self.router_parameters - len(mixture.layers) * left_out

    @property
    def parameters(self) -> int:
        """Number of parameters. Tied weights count once."""
        return self.embedding_parameters + self.vector_parameters + self.matrix_parameters


def read_config_json(path: Path) -> Architecture:
    """Read the architecture from a Hugging Face config.json.

    Raises:
        ValueError: The file is not JSON, or a key is missing or invalid. One line, without the path.
        UnknownFamily: The model's family is not supported.
    """
    try:
        config = read_json(path, nonfinite=True)  # Python's json module writes NaN and Infinity
    except Unreadable as error:
        reason = error.reason
        damaged = reason.removeprefix("not valid JSON ")
        raise ValueError(f"is not JSON {damaged}" if damaged != reason else f"cannot be used: {reason}") from None
    if not isinstance(config, dict):
        raise ValueError("is not a JSON object")
    family = _family(config, "model_type")
    check_refused(family, config)
    found = valid(ConfigJson, {"num_key_value_heads": DEFAULT_KV_HEADS[family]} | config)
    check_implemented(family, config)
    windows = layer_windows(family, config)
    architecture = Architecture(
        **_sizes(found),
        family=family,
        # The defaults of transformers.
        head_dim=found.head_dim or (128 if family == "qwen3" else found.hidden_size // found.num_attention_heads),
        tied_embeddings=found.tie_word_embeddings,
        attention_bias=found.attention_bias and family in ("llama", "qwen3", "qwen3_moe", "olmoe"),
        mlp_bias=found.mlp_bias and family == "llama",
        mixture=read_mixture(family, found),
        windows=windows,
        vllm_fault=vllm_fault(family, config, windows),
    )
    if (count := architecture.linear_count) > MAX_LINEARS:
        text = f"its layers and experts make {count:,} Linear layers; the limit is {MAX_LINEARS:,}"
        raise ValueError(f"is not valid: {text}: lower num_hidden_layers or the number of experts")
    return architecture


def read_gguf(path: Path) -> Architecture:
    """Read the architecture from a GGUF header. Raises ValueError and UnknownFamily like `read_config_json`."""
    header = read_gguf_header(path)
    family = _family(header.metadata, "general.architecture")
    values = {
        key.removeprefix(f"{family}."): value for key, value in header.metadata.items() if key.startswith(f"{family}.")
    }
    tokens = header.metadata.get("tokenizer.ggml.tokens")
    values.setdefault("vocab_size", tokens.length if isinstance(tokens, GGUFArray) else tokens)
    found = valid(GGUFModel, values)
    return Architecture(
        **_sizes(found),
        family=family,
        head_dim=found.head_dim or found.hidden_size // found.num_attention_heads,
        tied_embeddings="output.weight" not in header.tensors,
    )


def _sizes(found: ConfigJson | GGUFModel) -> dict[str, Any]:
    """Return the fields of `Architecture` that both kinds of file have."""
    return {
        "hidden_size": found.hidden_size,
        "intermediate_size": found.intermediate_size,
        "num_layers": found.num_hidden_layers,
        "num_heads": found.num_attention_heads,
        "num_kv_heads": found.num_key_value_heads or found.num_attention_heads,
        "vocab_size": found.vocab_size,
        "context_length": found.max_position_embeddings,
    }


def _family(config: Mapping[str, Any], key: str) -> str:
    name = config.get(key)
    if not isinstance(name, str):
        raise ValueError(f"has {key} = {str(name)[:60]!r}; must be one of {', '.join(FAMILIES)}")
    if name not in FAMILIES:
        raise UnknownFamily(f"has the unknown model family {name[:60]}; known families: {', '.join(FAMILIES)}")
    return name
