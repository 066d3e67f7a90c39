"""Quantized checkpoints of a tiny model, written without qarl, and their dequantized values.

compressed-tensors and fine-grained FP8 are written and dequantized by their libraries. AWQ, GPTQ and MXFP4 are written
here element by element, as their own packers do, from codes that are drawn at random.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam
from safetensors.torch import load_file, save_file
from torch import Tensor

Stored = dict[str, Tensor]
# Of one layer, from its name, its weight and those of the layers with the same input: tensors by suffix, values.
Writer = Callable[[str, Tensor, list[Tensor]], tuple[Stored, Tensor]]
TOGETHER = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


def save_quantized(source: Path, out: Path, writer: Writer, config: dict[str, Any]) -> dict[str, Tensor]:
    """Write a copy of a model whose Linear layers, except lm_head, are stored by `writer`.

    Returns the values of every parameter, float32.
    """
    shutil.copytree(source, out)
    tensors, values = {}, {}
    loaded = load_file(source / "model.safetensors")
    for name, tensor in loaded.items():
        module, _, leaf = name.rpartition(".")
        values[name] = tensor.float()
        if leaf != "weight" or not module.endswith("_proj"):
            tensors[name] = tensor
            continue
        block, _, projection = module.rpartition(".")
        names = next((group for group in TOGETHER if projection in group), (projection,))
        partners = [loaded[f"{block}.{one}.weight"].float() for one in names]
        stored, values[name] = writer(module, tensor.float(), partners)
        tensors |= {f"{module}.{suffix}": part.contiguous() for suffix, part in stored.items()}
    save_file(tensors, out / "model.safetensors")
    described = json.loads((out / "config.json").read_text())
    (out / "config.json").write_text(json.dumps(described | {"quantization_config": config}))
    return values


# --- compressed-tensors ---

ACTIVATIONS = {"num_bits": 8, "symmetric": True, "strategy": "token", "dynamic": True}
LAYOUTS: dict[str, tuple[str, dict[str, Any], dict[str, Any] | None]] = {
    "w4a16": ("pack-quantized", {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}, None),
    "asymmetric": (
        "pack-quantized",
        {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": False},
        None,
    ),
    "w4a8": ("pack-quantized", {"num_bits": 4, "type": "int", "strategy": "channel"}, ACTIVATIONS | {"type": "int"}),
    "w8a8": ("int-quantized", {"num_bits": 8, "type": "int", "strategy": "channel"}, ACTIVATIONS | {"type": "int"}),
    "fp8": (
        "float-quantized",
        {"num_bits": 8, "type": "float", "strategy": "channel"},
        ACTIVATIONS | {"type": "float"},
    ),
    "fp8_block": (
        "float-quantized",
        {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [128, 128]},
        ACTIVATIONS | {"type": "float", "strategy": "group", "group_size": 128},
    ),
    "nvfp4a16": (
        "nvfp4-pack-quantized",
        {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16},
        None,
    ),
}


def compressed(layout: str, actorder: bool = False) -> tuple[Writer, dict]:
    """Return a writer that uses compressed-tensors itself, and its `quantization_config`."""
    form, weights, activations = LAYOUTS[layout]
    weights = {"symmetric": True, **weights, "actorder": "group" if actorder else None}
    own = torch.float8_e4m3fn if layout == "nvfp4a16" else torch.bfloat16
    library = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**weights, scale_dtype=own))
    compressor = BaseCompressor.get_value_from_registry(form)

    def write(module: str, weight: Tensor, partners: list[Tensor]) -> tuple[Stored, Tensor]:
        state: Stored = {"weight": weight}
        if layout == "nvfp4a16":
            ends = torch.stack([torch.stack(one.aminmax()) for one in partners])
            state["weight_global_scale"] = generate_gparam(ends[:, 0].amin(), ends[:, 1].amax())
        low, high = _ranges(weight, weights)
        state["weight_scale"], state["weight_zero_point"] = calculate_qparams(
            low, high, library.weights, state.get("weight_global_scale")
        )
        if layout == "nvfp4a16":  # its compressor stores the scales as e4m3 itself
            del state["weight_zero_point"]
        else:
            state["weight_scale"] = state["weight_scale"].to(own)
        if actorder:
            order = torch.randperm(weight.shape[1], generator=torch.Generator().manual_seed(len(module)))
            state["weight_g_idx"] = (torch.arange(weight.shape[1]) // 32)[order].int()
        with torch.compiler.set_stance("force_eager"):
            stored = compressor.compress(state, library)
            if weights["strategy"] == "block":  # the library infers another size of blocks for layers this small
                scale = stored["weight_scale"].float().repeat_interleave(128, 0).repeat_interleave(128, 1)
                return stored, stored["weight"].float() * scale
            if layout == "nvfp4a16":
                codes = unpack_fp4_from_uint8(stored["weight_packed"], *weight.shape, torch.float32)
                step = stored["weight_scale"].float() / stored["weight_global_scale"]
                return stored, codes * step.repeat_interleave(16, 1)
            return stored, compressor.decompress(dict(stored), library)["weight"].float()

    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations, "format": form}
    config = {
        "quant_method": "compressed-tensors",
        "format": form,
        "ignore": ["lm_head"],
        "config_groups": {"g": group},
    }
    return write, config


def _ranges(weight: Tensor, weights: dict[str, Any]) -> tuple[Tensor, Tensor]:
    if weights["strategy"] == "block":
        rows = [[block for block in row.split(128, 1)] for row in weight.split(128)]
        return tuple(
            torch.stack([torch.stack([end(b) for b in row]) for row in rows]) for end in (torch.amin, torch.amax)
        )
    groups = weight.unflatten(1, (-1, weights.get("group_size") or weight.shape[1]))
    return groups.amin(-1), groups.amax(-1)


# --- fine-grained FP8 ---


def fine_grained() -> tuple[Writer, dict]:
    """Return a writer that uses transformers itself; layers must consist of whole blocks of 128 x 128."""
    from transformers import FineGrainedFP8Config
    from transformers.integrations.finegrained_fp8 import Fp8Quantize

    config = FineGrainedFP8Config()
    quantizer = SimpleNamespace(quantization_config=config)

    def write(module: str, weight: Tensor, partners: list[Tensor]) -> tuple[Stored, Tensor]:
        stored = Fp8Quantize(quantizer).convert({f"{module}.weight": weight})
        named = {name.rpartition(".")[2]: tensor for name, tensor in stored.items()}
        assert set(named) == {"weight", "weight_scale_inv"}
        scale = named["weight_scale_inv"].repeat_interleave(128, 0).repeat_interleave(128, 1)
        return named, named["weight"].float() * scale

    return write, config.to_dict()


# --- int4 of AWQ and GPTQ ---


def _draw(module: str, shape: tuple[int, ...], below: int) -> Tensor:
    generator = torch.Generator().manual_seed(sum(map(ord, module)) + len(shape) + below)
    return torch.randint(0, below, shape, generator=generator)


def _int4(module: str, weight: Tensor, size: int, symmetric: bool, bits: int = 4) -> tuple[Tensor, Tensor, Tensor]:
    """Return codes [N, K], zeros and scales [N, groups] (float16); every group has the lowest and the highest code."""
    (n, k), top = weight.shape, 2**bits - 1
    codes = _draw(module, (n, k), top + 1)
    codes[:, ::size], codes[:, 1::size] = 0, top
    zeros = _draw(module, (n, k // size), top + 1).clamp(min=1)
    if symmetric:
        zeros = torch.full_like(zeros, 2 ** (bits - 1))
    return codes, zeros, (_draw(module, (n, k // size), 97) + 3).half() / (400 * 2**bits)


def _dequantized(codes: Tensor, zeros: Tensor, scales: Tensor, groups: Tensor) -> Tensor:
    values = torch.empty(codes.shape)
    for column, group in enumerate(groups.tolist()):
        values[:, column] = (codes[:, column] - zeros[:, group]).float() * scales[:, group].float()
    return values


def _words(numbers: Tensor, bits: int, order: list[int] | None = None) -> Tensor:
    """[rows, columns] -> int32 [rows, columns * bits / 32]: nibble i of a word is column order[i] of its columns."""
    per = 32 // bits
    words = torch.zeros(numbers.shape[0], numbers.shape[1] // per, dtype=torch.int64)
    for i in range(per):
        words |= numbers[:, (order[i] if order else i) :: per].long() << (bits * i)
    return torch.where(words >= 2**31, words - 2**32, words).int()


def awq(size: int = 32) -> tuple[Writer, dict]:
    """Write the GEMM layout of AutoAWQ (`WQLinear_GEMM.from_linear`)."""
    order = [0, 2, 4, 6, 1, 3, 5, 7]

    def write(module: str, weight: Tensor, partners: list[Tensor]) -> tuple[Stored, Tensor]:
        codes, zeros, scales = _int4(module, weight, size, False)
        stored = {"qweight": _words(codes.t(), 4, order), "qzeros": _words(zeros.t(), 4, order), "scales": scales.t()}
        return stored, _dequantized(codes, zeros, scales, torch.arange(weight.shape[1]) // size)

    config = {"quant_method": "awq", "bits": 4, "group_size": size, "zero_point": True, "version": "gemm"}
    return write, config | {"modules_to_not_convert": None}


def gptq(
    size: int = 32, symmetric: bool = True, v2: bool = False, desc_act: bool = False, bits: int = 4
) -> tuple[Writer, dict]:
    """Write the layout of AutoGPTQ and GPTQModel (`QuantLinear.pack`)."""

    def write(module: str, weight: Tensor, partners: list[Tensor]) -> tuple[Stored, Tensor]:
        codes, zeros, scales = _int4(module, weight, size, symmetric, bits)
        groups = torch.arange(weight.shape[1]) // size
        if desc_act:
            groups = groups[torch.randperm(len(groups), generator=torch.Generator().manual_seed(3))]
        stored = {
            "qweight": _words(codes, bits).t(),
            "qzeros": _words(zeros.t() - (0 if v2 else 1), bits),
            "scales": scales.t(),
            "g_idx": groups.int(),
        }
        return stored, _dequantized(codes, zeros, scales, groups)

    config = {"quant_method": "gptq", "bits": bits, "group_size": size, "sym": symmetric, "desc_act": desc_act}
    return write, config | {"checkpoint_format": "gptq_v2" if v2 else "gptq"}


# --- MXFP4 ---


def mxfp4() -> tuple[Writer, dict]:
    """Blocks of 32 of OCP Microscaling: the sign, two bits of exponent and one of mantissa of E2M1; E8M0 scales."""

    def write(module: str, weight: Tensor, partners: list[Tensor]) -> tuple[Stored, Tensor]:
        n, k = weight.shape
        codes, exponents = _draw(module, (n, k), 16), _draw(module, (n, k // 32), 6) + 118
        values = torch.empty(n, k)
        for code in range(16):
            exponent, mantissa = (code >> 1) & 3, code & 1
            size = mantissa / 2 if exponent == 0 else (1 + mantissa / 2) * 2.0 ** (exponent - 1)
            values[codes == code] = -size if code & 8 else size
        values *= (2.0 ** (exponents.double() - 127)).float().repeat_interleave(32, 1)
        blocks = (codes[:, 0::2] | (codes[:, 1::2] << 4)).to(torch.uint8).view(n, k // 32, 16)
        return {"weight_blocks": blocks, "weight_scales": exponents.to(torch.uint8)}, values

    return write, {"quant_method": "mxfp4", "modules_to_not_convert": []}


FORMATS: dict[str, tuple[Callable[..., tuple[Writer, dict]], dict[str, Any]]] = {
    **{f"compressed-tensors {layout}": (compressed, {"layout": layout}) for layout in LAYOUTS},
    "compressed-tensors activation order": (compressed, {"layout": "w4a16", "actorder": True}),
    "compressed-tensors activation order, asymmetric": (compressed, {"layout": "asymmetric", "actorder": True}),
    "fine-grained fp8": (fine_grained, {}),
    "awq": (awq, {}),
    "gptq": (gptq, {}),
    "gptq v2, asymmetric": (gptq, {"v2": True, "symmetric": False}),
    "gptq activation order": (gptq, {"desc_act": True}),
    "gptq of 8 bits": (gptq, {"bits": 8, "size": 64}),
    "mxfp4": (mxfp4, {}),
}
# The `quant` section in which a run stores what the file stores; the others have none.
SAME: dict[str, dict[str, Any]] = {
    "compressed-tensors w4a16": {"scheme": "w4a16", "group_size": 32},
    "compressed-tensors asymmetric": {"scheme": "w4a16", "group_size": 32, "symmetric": False},
    "compressed-tensors w4a8": {"scheme": "w4a8", "group_size": -1},
    "compressed-tensors w8a8": {"scheme": "w8a8"},
    "compressed-tensors fp8": {"scheme": "fp8"},
    "compressed-tensors fp8_block": {"scheme": "fp8_block"},
    "compressed-tensors nvfp4a16": {"scheme": "nvfp4a16"},
    "fine-grained fp8": {"scheme": "fp8_block", "scale_dtype": "float32"},
    "awq": {"scheme": "w4a16", "group_size": 32, "symmetric": False, "scale_dtype": "float16"},
    "gptq": {"scheme": "w4a16", "group_size": 32, "scale_dtype": "float16"},
    "gptq v2, asymmetric": {"scheme": "w4a16", "group_size": 32, "symmetric": False, "scale_dtype": "float16"},
}


def save_format(source: Path, out: Path, name: str) -> dict[str, Tensor]:
    """Write a checkpoint in one of `FORMATS`. Return the values of every parameter."""
    make, options = FORMATS[name]
    return save_quantized(source, out, *make(**options))
