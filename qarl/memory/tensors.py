"""Sizes in bytes of the tensors that a run stores: weights, their operands, optimizer state, keys and values."""

from qarl_formats.scheme import Scheme, is_ignored

from qarl.config import Config
from qarl.config.architecture import Architecture
from qarl.config.quant import scheme_of
from qarl.memory.activations import DTYPE_BYTES, Device, uses_kernels


def float32_bytes(parameters: int) -> int:
    """Return the bytes of master weights, or of their gradients."""
    return 4 * parameters


def optimizer_bytes(name: str, matrix_parameters: int, other_parameters: int) -> int:
    """Return the bytes of optimizer state: AdamW has two FP32 moments per parameter, Muon one per matrix element."""
    return (4 if name == "muon" else 8) * matrix_parameters + 8 * other_parameters


def saved_bytes(config: Config, architecture: Architecture) -> int:
    """Return the bytes of master weights and optimizer state, in memory or in a checkpoint without its headers."""
    other = architecture.parameters - architecture.matrix_parameters
    return float32_bytes(architecture.parameters) + optimizer_bytes(
        config.optim.name, architecture.matrix_parameters, other
    )


def quantized_weight_bytes(scheme: Scheme, out_features: int, in_features: int, exported: bool = False) -> int:
    """Return the bytes of codes, scales and zero points of one weight as stored (compressed-tensors layout).

    exported: Whether to count the weight's shape too, which is not on the GPU.
    """
    stored = scheme.tensor_specs(out_features, in_features)
    return sum(spec.nbytes for suffix, spec in stored.items() if exported or suffix != "weight_shape")


def version_bytes(config: Config, architecture: Architecture, exported: bool = False) -> int:
    """Return the bytes of one version: quantized linears, all else in the compute dtype. Tied weights count once.

    exported: Count the tensors that `qarl export` writes, otherwise those that are published.
    """
    scheme, width, total = scheme_of(config.quant), DTYPE_BYTES[config.model.dtype], 0
    for name, n, k in architecture.linears():
        quantized = scheme.quantized and not is_ignored(name, config.quant.ignore)
        total += quantized_weight_bytes(scheme, n, k, exported) - width * n * k if quantized else 0
    return total + width * architecture.parameters


def operand_bytes(
    scheme: Scheme, out_features: int, in_features: int, quantized: bool, device: Device, width: int, kernels: bool
) -> int:
    """Return the bytes of the GEMM operands of one weight, in addition to the published tensors.

    The CPU multiplies in float32, so it keeps a float32 copy of every weight. A GPU multiplies unquantized weights as
    published. Triton kernels read published codes directly, except int4 codes: these need a tiled copy in blocks of
    16 x 128 with 4 bytes per group and row. Without kernels (`quant.kernels: reference`) the GPU keeps dequantized
    weights in the compute dtype, or codes in float32 if activations are quantized. width: Bytes per value of the
    compute dtype.
    """
    weights = out_features * in_features
    if device == "cpu":
        return 4 * weights
    if kernels:
        return scheme.kernel_bytes(out_features, in_features) if quantized else 0
    if quantized and scheme.activation is not None:
        return 4 * weights
    return width * weights if quantized else 0


def kv_cache_bytes(tokens: int, layers: int, kv_heads: int, head_dim: int, width: int) -> int:
    """Return the bytes of keys and values of `tokens` tokens in all layers. width: See `kv_cache_width`."""
    return 2 * tokens * layers * kv_heads * head_dim * width


def kv_cache_width(config: Config, device: Device) -> int:
    """Return the bytes per value in the sampler's KV cache. Layers in plain torch store e4m3 values in model.dtype."""
    own = config.rollout.engine == "native" or config.rollout.numerics == "exact"
    plain = own and not uses_kernels(config, device)
    return DTYPE_BYTES[config.model.dtype] if plain or config.quant.kv_cache_dtype == "auto" else 1
