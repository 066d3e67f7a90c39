"""Changed copies of model directories, in each format that qarl reads."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from qarl.checks.check import check_model
from qarl.config import ModelConfig
from qarl.config.weight_files import check_weights, gguf_name
from qarl.errors import UserError
from qarl.exporting.job import export_target
from qarl.inference.masters import open_masters
from qarl.inference.opening import open_policy
from qarl.inference.target import resolve_target
from qarl.policy.load import load_model

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
INDEX = "model.safetensors.index.json"


class Weights(dict[str, Tensor]):
    """The tensors of a model directory, to be changed and saved elsewhere with its other files."""

    source: Path
    shards: int
    changes: dict[str, Any]
    others: dict[str, bytes]  # the source's other files

    @classmethod
    def of(cls, source: Path) -> Weights:
        weights = cls()
        files = sorted(source.glob("*.safetensors"))
        for file in files:
            weights.update(load_file(file))
        weights.source, weights.shards, weights.changes = source, len(files), {}
        weights.others = {path.name: path.read_bytes() for path in source.iterdir() if path not in files}
        return weights

    def rename(self, new: Callable[[str], str]) -> None:
        for name in list(self):
            self[new(name)] = self.pop(name)

    def configure(self, **changes: Any) -> None:
        self.changes |= changes

    def save(self, directory: Path, shards: int | None = None) -> Path:
        """Save a copy of the source with these tensors, in as many files as the source has."""
        directory.mkdir(parents=True)
        for name, content in self.others.items():
            (directory / name).write_bytes(content)
        config = json.loads((directory / "config.json").read_text())
        (directory / "config.json").write_text(json.dumps(config | self.changes))
        shards = shards or self.shards
        if shards == 1:
            save_file(dict(self), directory / "model.safetensors", {"format": "pt"})
            return directory
        weight_map = {}
        for number in range(shards):
            names = sorted(self)[number::shards]
            file = f"model-{number + 1:05d}-of-{shards:05d}.safetensors"
            save_file({name: self[name] for name in names}, directory / file, {"format": "pt"})
            weight_map |= dict.fromkeys(names, file)
        index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
        (directory / INDEX).write_text(json.dumps(index))
        return directory


def quantized_copy(model: Path, out: Path, quant: dict[str, Any]) -> Path:
    """Return the directory of an export of `model`."""
    export_target(resolve_target(str(model), quant=quant), out, dtype=torch.bfloat16, max_shard_bytes=10**9)
    return out


def gguf_of(weights: Weights, path: Path) -> Path:
    """The weights of a tiny Llama as a GGUF file in float32, with a tokenizer of as many tokens."""
    import gguf

    config = json.loads((weights.source / "config.json").read_text())
    path.parent.mkdir(parents=True)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("tiny")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(10000.0)
    vocabulary = json.loads((weights.source / "tokenizer.json").read_text())["model"]["vocab"]
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([*sorted(vocabulary, key=vocabulary.get)[:-1], "ab"])  # what the merge makes
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    for name, tensor in weights.items():
        known = name.startswith("model.") or name == "lm_head.weight"
        writer.add_tensor(gguf_name(name) if known else name, tensor.float().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def openings(kind: str, directory: Path) -> Iterator[tuple[str, Callable[[], object]]]:
    """Yield each command that reads the weights of a directory, and a function that reads them in that way."""
    config = ModelConfig(path=str(directory))
    if kind == "export":
        # Without the digests, which would refuse each change before its own check does.
        yield "generate", lambda: open_policy(resolve_target(str(directory), verify_digests=False), device="cpu")
        return
    yield "check", lambda: check_weights(config, check_model(config).architecture)
    yield "train", lambda: load_model(config)
    yield "quantize", lambda: open_masters(resolve_target(str(directory), quant={"scheme": "w8a8"}))


def refusals(kind: str, directory: Path) -> Iterator[tuple[str, str]]:
    for command, opening in openings(kind, directory):
        with pytest.raises(UserError) as caught:
            opening()
        message = str(caught.value)
        assert "\n" not in message and len(message) < 1500, (command, message)
        yield command, message
