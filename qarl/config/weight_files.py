"""Check names, shapes and types of a model's tensors against its configuration, from file headers only.

transformers initializes missing tensors at random and ignores extra ones, so a policy loaded from such files would
differ at every start. Therefore nothing is loaded before its names and shapes match the configuration.
"""

import os
import re
from collections.abc import Mapping
from pathlib import Path

from qarl_formats.checkpoints import CheckpointFormat, checkpoint_format
from qarl_formats.checkpoints.base import FLOATS, Stored

from qarl.config.architecture import Architecture
from qarl.config.gguf_header import read_gguf_header
from qarl.config.model import PREFIX, ModelConfig, package_gguf
from qarl.errors import UserError
from qarl.inputs.json import json_kind, read_json_object
from qarl.inputs.paths import path_errors, user_path
from qarl.inputs.tensors import INDEX, SINGLE, StoredTensor, require_index, stored_tensors
from qarl.utils.text import first_few

CONFIG = "config.json"
ANOTHER = "give another checkpoint"
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"

_FLOATS = (*FLOATS, "float64")
# Buffers in old checkpoints. transformers ignores them and computes its own.
_IGNORED = re.compile(r"(^|\.)(rotary_emb\.inv_freq|position_ids)$")
_PICKLED = re.compile(r"(pytorch_model|consolidated|model).*\.(bin|pt|pth)")
# Parts of names, Hugging Face's and GGUF's (gguf.tensor_mapping).
_GGUF_WHOLE = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
_GGUF_LAYER = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def require_weights(
    directory: Path, architecture: Architecture, stored: CheckpointFormat | None = None
) -> dict[str, StoredTensor]:
    """Check that the tensors of a model directory match its configuration, and return them.

    A tied output layer may be missing or stored. If it is stored, `qarl.policy.load` compares its values with the
    embedding.

    Args:
        directory: The model's directory.
        architecture: Architecture in its config.json.
        stored: Format of a quantized checkpoint (`stored_format`); None: it is not quantized.

    Raises:
        UserError: Tensors are missing, extra, or of another shape or type. The message names them.
    """
    if (directory / "adapter_config.json").exists():
        raise UserError(f"{directory}: holds an adapter (adapter_config.json); merge it into its base model first")
    if not has_weights(directory):
        raise UserError(_no_weights(directory))
    found = stored_tensors(directory)
    wanted = _plain(architecture) if stored is None else _quantized(architecture, stored, found, directory)
    if architecture.tied_embeddings and HEAD in found:
        wanted[HEAD] = wanted[EMBEDDING]
    held = {name: (tensor.shape, tensor.dtype) for name, tensor in found.items()}
    if fault := _difference(wanted, held, CONFIG):
        raise UserError(f"{directory}: its weights are not those of its config.json: {fault}")
    return found


def stored_format(directory: Path) -> CheckpointFormat | None:
    """Return the format of a quantized checkpoint; None if the model or its config.json is missing or unquantized.

    Raises:
        UserError: config.json is damaged, or its `quantization_config` cannot be read.
    """
    file = directory / CONFIG
    with path_errors(str(directory)):
        if not file.is_file():
            return None
    quantization = read_json_object(file, nonfinite=True).get("quantization_config")
    if quantization is None:
        return None
    if not isinstance(quantization, dict):
        found = json_kind(quantization)
        raise UserError(f"{file}: quantization_config is {found}, expected an object; restore the file")
    try:
        return checkpoint_format(quantization)
    except ValueError as error:
        raise UserError(f"{file}: quantization_config: {error}; {ANOTHER}") from error


def require_gguf(path: Path, architecture: Architecture) -> None:
    """Like `require_weights`, for a GGUF file. Does not check types, because the file's reader does."""
    try:
        header = read_gguf_header(path)
    except ValueError as error:
        raise UserError(f"{path}: {error}") from None
    wanted = {gguf_name(name): wish for name, wish in _plain(architecture).items()}
    held = {name: (shape, "float32") for name, shape in header.tensors.items()}
    if fault := _difference(wanted, held, "its header"):
        raise UserError(f"{path}: its weights are not those of its header: {fault}")


def check_weights(model: ModelConfig, architecture: Architecture) -> None:
    """Like `require_weights`, for a local model to train from.

    A model without weights on this machine passes, since loading it reports that.

    Raises:
        UserError: The tensors do not match, or are quantized in a way that cannot be read.
    """
    if model.path.startswith(PREFIX):
        require_gguf(package_gguf(model), architecture)
        return
    directory = user_path(model.path, "model.path")
    with path_errors(f"model.path: '{model.path}'"):
        if not directory.is_dir():
            return
        if model.gguf_file is not None:
            require_gguf(directory / model.gguf_file, architecture)
            return
        description = read_json_object(directory / CONFIG, nonfinite=True)
        stored = stored_format(directory)
        own_code = model.trust_remote_code and "AutoModelForCausalLM" in (description.get("auto_map") or {})
        require_index(directory)
        if not own_code and (has_weights(directory) or _pickled(directory)):
            require_weights(directory, architecture, stored)


def has_weights(directory: Path) -> bool:
    """Whether the directory has a safetensors file or an index of such files."""
    return os.path.lexists(directory / SINGLE) or os.path.lexists(directory / INDEX)


def gguf_name(name: str) -> str:
    """Return the GGUF name of a parameter, given its Hugging Face name."""
    module, _, kind = name.rpartition(".")
    if module in _GGUF_WHOLE:
        return f"{_GGUF_WHOLE[module]}.{kind}"
    _, _, layer, inner = module.split(".", 3)
    return f"blk.{layer}.{_GGUF_LAYER[inner]}.{kind}"


def _plain(architecture: Architecture) -> dict[str, Stored]:
    return {name: Stored(shape, _FLOATS) for name, shape in architecture.tensors()}


def _quantized(
    architecture: Architecture, stored: CheckpointFormat, found: Mapping[str, StoredTensor], directory: Path
) -> dict[str, Stored]:
    """Replace quantized weights by the tensors that the format stores them in."""
    wanted = _plain(architecture)
    linears = [linear for linear in architecture.linears() if stored.quantizes(linear.name, found)]
    if not linears:
        raise UserError(
            f"{directory / CONFIG}: quantization_config: {stored.method}, but no Linear layer has such tensors (none "
            f"has a {stored.mark}); remove the entry, or restore the model's own files"
        )
    for module, n, k in linears:
        del wanted[f"{module}.weight"]
        try:
            specs = stored.specs(module, (n, k), found)
        except ValueError as error:
            fault = str(error).removeprefix(f"{module}: ")
            raise UserError(f"{directory / CONFIG}: quantization_config: {module}: {fault}; {ANOTHER}") from error
        wanted |= {f"{module}.{suffix}": spec for suffix, spec in specs.items()}
    return wanted


def _difference(
    wanted: Mapping[str, Stored], held: Mapping[str, tuple[tuple[int, ...], str]], source: str
) -> str | None:
    """Describe missing and extra tensors and other shapes or types in one line; None if all match."""
    missing = [name for name in wanted if name not in held]
    extra = [name for name in held if name not in wanted and not _IGNORED.search(name)]
    both = [name for name in wanted if name in held]
    shapes = [name for name in both if held[name][0] != wanted[name].shape]
    types = [name for name in both if held[name][1] not in wanted[name].dtypes]
    faults = []
    if missing:
        faults.append(f"{len(missing):,} missing ({first_few(missing)})")
    if extra:
        faults.append(f"{len(extra):,} that it does not have ({first_few(extra)})")
    if shapes:
        name = shapes[0]
        faults.append(
            f"{len(shapes):,} of another shape ({name} is {list(held[name][0])}, but {list(wanted[name].shape)} "
            f"according to {source})"
        )
    if types:
        name = types[0]
        faults.append(
            f"{len(types):,} of another type ({name} is {held[name][1]}, must be {' or '.join(wanted[name].dtypes)})"
        )
    if not faults:
        return None
    fix = "restore the model's own files"
    if any(f"model.{name}" in wanted for name in extra):
        fix = "save the causal LM (AutoModelForCausalLM), not its base model alone"
    return f"{'; '.join(faults)}; {fix}"


def _pickled(directory: Path) -> list[str]:
    return [path.name for path in sorted(directory.glob("*")) if _PICKLED.fullmatch(path.name)]


def _no_weights(directory: Path) -> str:
    pickled = _pickled(directory)
    if not pickled:
        return f"{directory}: holds no weights ({SINGLE}, or {INDEX} and its files); restore them"
    code = (
        "from transformers import AutoModelForCausalLM as M, AutoTokenizer as T; "
        f"[A.from_pretrained('{directory}').save_pretrained('{directory}-safetensors') for A in (M, T)]"
    )
    return f'{directory}: {pickled[0]} is a pickle, which qarl does not read; convert it with: python -c "{code}"'
