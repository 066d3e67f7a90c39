"""qarl's linear kernels for vLLM against the learner's operands, on layers as vLLM's schemes make them.

vLLM takes ten seconds to import, so only the process that runs a test of this file does it.
"""

from __future__ import annotations

import importlib.util

import pytest
import torch
from qarl_formats.registry import make_scheme
from qarl_formats.weight import LowBitWeight, quantize_weight
from torch import Tensor, nn

from qarl import __version__

pytestmark = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")
K = 192
QKV = [96, 32, 32]  # q, k and v, fused by vLLM; each whole words of zero points
BLOCKS = [256, 128, 72]  # of fp8_block: whole blocks of rows but in the last
SINGLE = [72]
SCHEMES = [
    ("w4a16", 32, True),
    ("w4a16", 64, False),
    ("w4a16", -1, True),
    ("w4a16", -1, False),
    ("w4a8", 64, True),
    ("w4a8", -1, True),
    ("w8a8", None, True),
    ("fp8", None, True),
    ("fp8_block", None, True),
    ("nvfp4a16", None, True),
]


def _config(in_features: int, group: int, symmetric: bool = True, **changes):
    from vllm.model_executor.kernels.linear import MPLinearLayerConfig
    from vllm.scalar_type import scalar_types

    if "weight_type" in changes:
        changes["weight_type"] = getattr(scalar_types, changes["weight_type"])
    known = {"has_g_idx": False} if "has_g_idx" in MPLinearLayerConfig.__dataclass_fields__ else {}  # vLLM 0.24
    arguments = {
        "full_weight_shape": (in_features, 8),
        "partition_weight_shape": (in_features, 8),
        "weight_type": scalar_types.uint4b8 if symmetric else scalar_types.uint4,
        "act_type": torch.bfloat16,
        "group_size": group,
        "zero_points": not symmetric,
    }
    return MPLinearLayerConfig(**(arguments | known | changes))


def _weights(
    name: str, group: int | None, symmetric: bool, widths: list[int], seed: int = 0, k: int = K
) -> list[LowBitWeight]:
    generator = torch.Generator().manual_seed(seed)
    scheme = make_scheme(name, group, symmetric)
    masters = [torch.randn(n, k, generator=generator) * 0.05 for n in widths]
    shared = scheme.shared(masters)
    return [quantize_weight(master, scheme, "w", shared=shared) for master in masters]


def _fused(weights: list[LowBitWeight]) -> dict[str, Tensor]:
    """The loaded parameters of a fused layer: rows under one another; float32 scales for bytes, as vLLM holds them."""
    found = {s: torch.cat([w.tensors[s] for w in weights]) for s in weights[0].tensors if s != "weight_shape"}
    return found if "weight_packed" in found else found | {"weight_scale": found["weight_scale"].float()}


def _loaded(weights: list[LowBitWeight]) -> nn.Module:
    """A layer between vLLM's load and `process_weights_after_loading`."""
    from qarl.rollout.vllm.own_kernels.linear_kernels import hold

    layer = nn.Module()
    layer.output_partition_sizes = [w.shape[0] for w in weights]
    for suffix, tensor in _fused(weights).items():
        # vLLM's scheme hands the kernel of rows a transposed view
        hold(layer, suffix, tensor.t() if weights[0].scheme.name == "fp8" and suffix == "weight" else tensor)
    return layer


def _fusable(name: str, widths: list[int]) -> list[int]:
    return BLOCKS if name == "fp8_block" and len(widths) > 1 else widths


def _kernel(name: str, group: int | None, symmetric: bool, k: int = K):
    from qarl.rollout.vllm.own_kernels import linear_kernels, linear_methods

    if name == "nvfp4a16":
        return linear_methods.NVFP4A16Kernel()
    kernel = next(k for k in vars(linear_kernels).values() if getattr(k, "name", None) == name)
    if issubclass(kernel, linear_kernels.MPLinearKernel):
        config = _config(k, group, symmetric)
        assert kernel.can_implement(config) == (True, None)
        return kernel(config, "weight_packed", "weight_scale", None if symmetric else "weight_zero_point")
    return kernel.__new__(kernel)  # no configuration is read after vLLM's choice


def _learners(weights: list[LowBitWeight], x: Tensor, bias: Tensor | None, kernels: bool = False) -> Tensor:
    widths = [w.shape[0] for w in weights]
    biases = [None] * len(widths) if bias is None else bias.split(widths)
    operands = [weight.prepare(x.dtype, kernels) for weight in weights]
    return torch.cat([operand.matmul(x, b) for operand, b in zip(operands, biases, strict=True)], -1)


def _x(m: int, k: int = K) -> Tensor:
    return torch.randn(m, k, generator=torch.Generator().manual_seed(m)).bfloat16()


@pytest.mark.parametrize("widths", [QKV, SINGLE], ids=["fused", "single"])
@pytest.mark.parametrize(("name", "group", "symmetric"), SCHEMES)
def test_outputs_have_the_bits_of_the_learners_operands(name, group, symmetric, widths) -> None:
    widths = _fusable(name, widths)
    weights = _weights(name, group, symmetric, widths)
    layer, kernel = _loaded(weights), _kernel(name, group, symmetric)
    kernel.process_weights_after_loading(layer)
    bias = torch.linspace(-1, 1, sum(widths)).bfloat16()
    for m in (1, 7, 64):
        for b in (None, bias):
            assert torch.equal(kernel.apply_weights(layer, _x(m), b), _learners(weights, _x(m), b))


@pytest.mark.parametrize(("name", "group", "symmetric"), SCHEMES)
def test_published_gives_back_what_was_loaded(name, group, symmetric) -> None:
    weights = _weights(name, group, symmetric, _fusable(name, QKV))
    layer, kernel = _loaded(weights), _kernel(name, group, symmetric)
    kernel.process_weights_after_loading(layer)
    found, loaded = kernel.published(layer), _fused(weights)
    assert found.keys() == loaded.keys()
    for suffix in loaded:
        assert found[suffix].dtype == loaded[suffix].dtype
        assert torch.equal(found[suffix].view(torch.uint8), loaded[suffix].view(torch.uint8)), suffix


@pytest.mark.parametrize(("name", "group", "symmetric"), SCHEMES)
def test_a_reload_into_the_first_tensors_serves_the_new_weights(name, group, symmetric) -> None:
    kernel = _kernel(name, group, symmetric)
    qkv = _fusable(name, QKV)
    first, new = _loaded(_weights(name, group, symmetric, qkv)), _weights(name, group, symmetric, qkv, seed=1)
    kernel.process_weights_after_loading(first)
    again = _loaded(new)
    kernel.process_weights_after_loading(again)
    made = dict(again.named_parameters())
    assert made.keys() == dict(first.named_parameters()).keys()
    for key, parameter in first.named_parameters():  # what vLLM's layerwise reload does
        assert (parameter.shape, parameter.dtype) == (made[key].shape, made[key].dtype)
        parameter.data.copy_(made[key])
    assert torch.equal(kernel.apply_weights(first, _x(7)), _learners(new, _x(7), None))


TILED = [("w4a16", 32, False), ("w4a16", -1, True), ("w4a8", 64, True)]
SMALL_QKV, SMALL_K = [24, 8, 8], 64  # in Triton's interpreter


@pytest.mark.parametrize(("name", "group", "symmetric"), TILED)
def test_the_gpus_form_of_a_fused_weight_has_the_bits_of_the_learners_parts(name, group, symmetric) -> None:
    weights = _weights(name, group, symmetric, SMALL_QKV, k=SMALL_K)
    layer, kernel = _loaded(weights), _kernel(name, group, symmetric, SMALL_K)
    kernel.process_weights_after_loading(layer, kernels=True)
    bias, x = torch.linspace(-1, 1, sum(SMALL_QKV)).bfloat16(), _x(3, SMALL_K)
    assert torch.equal(kernel.multiply(layer, x, bias), _learners(weights, x, bias, kernels=True))


@pytest.mark.parametrize(("name", "group", "symmetric"), TILED)
def test_the_gpus_form_gives_back_what_was_loaded_and_holds_no_copy_of_it(name, group, symmetric) -> None:
    weights = _weights(name, group, symmetric, SMALL_QKV, k=SMALL_K)
    layer, kernel = _loaded(weights), _kernel(name, group, symmetric, SMALL_K)
    kernel.process_weights_after_loading(layer, kernels=True)
    assert not hasattr(layer, "weight_packed")
    loaded = _fused(weights)
    assert all(torch.equal(tensor, loaded[suffix]) for suffix, tensor in kernel.published(layer).items())


@pytest.mark.parametrize(("name", "group", "symmetric"), SCHEMES)
def test_a_change_of_what_the_product_reads_shows_in_what_is_published(name, group, symmetric) -> None:
    weights = _weights(name, group, symmetric, _fusable(name, QKV))
    kernel = _kernel(name, group, symmetric)
    kernel.process_weights_after_loading(_loaded(weights))
    for operand in kernel.names:
        layer = _loaded(weights)
        kernel.process_weights_after_loading(layer)
        changed = getattr(layer, operand).data.clone()
        changed.view(torch.uint8).view(-1)[-1] ^= 1 << 5  # the last byte: of a float its exponent
        getattr(layer, operand).data = changed
        try:
            found, loaded = kernel.published(layer), _fused(weights)
        except ValueError as error:
            assert "is not what its codes and scales make" in str(error)
        else:
            assert any(not torch.equal(found[s].view(torch.uint8), loaded[s].view(torch.uint8)) for s in loaded)


def test_many_rows_of_a_tiled_weight_are_multiplied_by_its_values(monkeypatch) -> None:
    from qarl_kernels import tuning, w4a16

    weights, x = _weights("w4a16", 64, False, SMALL_QKV, k=SMALL_K), _x(20, SMALL_K)
    layer, kernel = _loaded(weights), _kernel("w4a16", 64, False, SMALL_K)
    kernel.process_weights_after_loading(layer, kernels=True)
    fused = kernel.multiply(layer, x, None)
    lookup, way = tuning.lookup, tuning.Tile("dequantized", 64, 64, 64)
    monkeypatch.setattr(w4a16, "lookup", lambda table, *a, **b: way if table == "w4a16" else lookup(table, *a, **b))
    more = torch.cat([x, x[:1]])  # of as many rows a plan would know the way already
    assert torch.equal(kernel.multiply(layer, more, None)[:-1], fused)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"group_size": 16}, "groups of 32, 64, 128"),
        ({"weight_type": "uint8b128"}, "packed int4"),
        ({"full_weight_shape": (2 * K, 8)}, "tensor_parallel_size 1"),
        ({"partition_weight_shape": (100, 8), "full_weight_shape": (100, 8)}, "whole words"),
        ({"act_type": torch.float64}, "16-bit activations"),
    ],
)
def test_int4_kernels_say_what_they_do_not_do(changes, reason) -> None:
    from qarl.rollout.vllm.own_kernels.linear_kernels import W4A16Kernel

    works, why = W4A16Kernel.can_implement(_config(K, 64, **changes))
    assert not works and reason in why


def test_int8_kernel_refuses_static_activation_scales() -> None:
    from vllm.model_executor.kernels.linear import Int8ScaledMMLinearLayerConfig

    from qarl.rollout.vllm.own_kernels.linear_kernels import W8A8Kernel

    config = Int8ScaledMMLinearLayerConfig(is_static_input_scheme=True, is_channelwise=True, input_symmetric=True)
    works, why = W8A8Kernel.can_implement(config)
    assert not works and "a scale a row" in why


def test_plugin_is_inert_without_its_switch_and_idempotent_with_it(monkeypatch) -> None:
    from vllm import envs
    from vllm.model_executor.kernels import linear
    from vllm.model_executor.layers import quantization
    from vllm.platforms import PlatformEnum

    from qarl.rollout.vllm import plugin
    from qarl.rollout.vllm.own_kernels.linear_kernels import FP8BlockKernel, FP8Kernel, W4A16Kernel, W8A8Kernel

    tables = ("_POSSIBLE_KERNELS", "_POSSIBLE_INT8_KERNELS", "_POSSIBLE_FP8_KERNELS", "_POSSIBLE_FP8_BLOCK_KERNELS")
    for table in tables:
        monkeypatch.setattr(linear, table, {p: list(kernels) for p, kernels in getattr(linear, table).items()})
    monkeypatch.setattr(quantization, "_CUSTOMIZED_METHOD_TO_QUANT_CONFIG", {})
    monkeypatch.setattr(quantization, "QUANTIZATION_METHODS", list(quantization.QUANTIZATION_METHODS))
    monkeypatch.setattr(envs, "environment_variables", dict(envs.environment_variables))
    envs.environment_variables.pop(plugin.SWITCH, None)  # of another test
    compiled_for_vllm = envs.compile_factors()
    monkeypatch.delenv(plugin.SWITCH, raising=False)
    plugin.register()
    assert W4A16Kernel not in linear._POSSIBLE_KERNELS[PlatformEnum.CUDA]
    assert envs.compile_factors() == compiled_for_vllm
    monkeypatch.setenv(plugin.SWITCH, "qarl")
    plugin.register()
    plugin.register()
    for platform in (PlatformEnum.CUDA, PlatformEnum.CPU):
        assert linear._POSSIBLE_KERNELS[platform][0] is W4A16Kernel
        assert linear._POSSIBLE_INT8_KERNELS[platform][0] is W8A8Kernel
        assert linear._POSSIBLE_FP8_KERNELS[platform].count(FP8Kernel) == 1
        assert linear._POSSIBLE_FP8_BLOCK_KERNELS[platform][0] is FP8BlockKernel
        assert linear._POSSIBLE_FP8_BLOCK_KERNELS[platform].count(FP8BlockKernel) == 1
    assert envs.compile_factors() == compiled_for_vllm | {plugin.SWITCH: f"qarl {__version__}"}
