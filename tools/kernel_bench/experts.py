"""Benchmark of one layer's experts, from routed tokens to the weighted sum: qarl's kernels and those of vLLM and torch.

Timed are, for every implementation: sorting of the tokens, both products, the activation function, quantization of
activations (if the scheme has it) and the weighted sum. Repacking of weights is not timed.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import torch
from kernel_bench.measure import Call, Row, Stopwatch, build_all, measured, picked_rows
from kernel_bench.products import quantized
from model_sizes import SHAPES, Shape
from qarl_formats.scheme import Codes
from qarl_formats.weight import LowBitWeight
from torch import Tensor

ROUTINGS = ("balanced", "skewed")
SCHEMES = ("bf16", "w4a16", "w8a8", "fp8", "fp8_block", "w4a8", "nvfp4a16")
CHECKED = 16  # number of tokens whose output is compared with float32
# Relative Frobenius error: two products with 8-bit activations have 3e-2, a wrong scale or expert about 1.
TOLERANCE = 8e-2


@dataclass(frozen=True)
class Routing:
    """The experts of each token, (T, k) int32 in ascending order, and their weights, (T, k) float32."""

    experts: Tensor
    weights: Tensor


def make_routing(kind: str, tokens: int, sizes: Shape, device: torch.device) -> Routing:
    """Return a random routing. kind: `balanced` (experts are equally likely) or `skewed` (n-th expert: ~ 1 / n)."""
    generator = torch.Generator(device).manual_seed(tokens)
    chances = torch.ones(sizes.experts, device=device)
    if kind == "skewed":
        chances /= torch.arange(1, sizes.experts + 1, device=device)
    sampled = torch.multinomial(chances.expand(tokens, -1), sizes.per_token, generator=generator)
    weights = torch.rand(tokens, sizes.per_token, generator=generator, device=device) + 0.1
    return Routing(sampled.sort(dim=-1).values.int(), weights / weights.sum(-1, keepdim=True))


Bind = Callable[[Tensor, Routing], Call]


class Experts:
    """Weights of a layer's E experts in one scheme, hidden size H: gate_up (E * 2 I, H), down (E * H, I)."""

    def __init__(self, scheme: str, sizes: Shape, group_size: int, device: torch.device) -> None:
        self.scheme, self.sizes, self.kernels = scheme, sizes, device.type == "cuda"
        generator = torch.Generator(device).manual_seed(0)
        e, h, i = sizes.experts, sizes.hidden, sizes.inner
        self.gate_up, self.down = (
            quantized(scheme, torch.randn(shape, generator=generator, device=device) * 0.02, group_size, self.kernels)
            for shape in ((e * 2 * i, h), (e * h, i))
        )

    def stored(self, suffix: str) -> list[Tensor]:
        """Return one stored tensor of gate_up and of down in vLLM's layout, (E, rows, columns)."""
        tensors = (weight.tensors[suffix] for weight in (self.gate_up, self.down))
        return [tensor.view(self.sizes.experts, -1, *tensor.shape[1:]) for tensor in tensors]

    def expected(self, x: Tensor, routing: Routing, tokens: Tensor) -> Tensor:
        """Return float32 outputs (number of `tokens`, H) without quantization of activations. tokens: Indices in x."""
        values = (weight.dequantize(torch.bfloat16, kernels=self.kernels) for weight in (self.gate_up, self.down))
        gate_up, down = (value.view(self.sizes.experts, -1, value.shape[1]) for value in values)
        found = torch.zeros(len(tokens), self.sizes.hidden, device=x.device)
        for place, token in enumerate(tokens.tolist()):
            for expert, weight in zip(routing.experts[token].tolist(), routing.weights[token], strict=True):
                gate, up = (gate_up[expert].float() @ x[token].float()).chunk(2)
                found[place] += weight * (down[expert].float() @ (torch.nn.functional.silu(gate) * up))
        return found


def qarl(experts: Experts) -> Bind:
    """Return qarl's implementation, as its fused layer runs it."""
    from qarl_kernels import quantize
    from qarl_kernels.moe.combine import combine
    from qarl_kernels.moe.dispatch import groups_of
    from qarl_kernels.swiglu import swiglu

    gate_up, down = (weight.prepare(torch.bfloat16, kernels=True) for weight in (experts.gate_up, experts.down))
    kind = gate_up.scheme.input_codes

    def multiply(weight: LowBitWeight, x: Tensor, codes: Any, groups: Any, gathered: bool) -> Tensor:
        read = x if codes is None else Codes(*codes, torch.bfloat16)
        return weight.matmul(read, None, groups, gathered)

    def bind(x: Tensor, routing: Routing) -> Call:
        def run() -> Tensor:
            groups = groups_of(routing.experts, experts.sizes.experts, kernels=True)
            both = multiply(gate_up, x, None if kind is None else quantize.activation_codes(x, kind), groups, True)
            gated = swiglu(both, kind, want_product=kind is None)
            codes = None if gated.codes is None else (gated.codes, gated.scale)
            outputs = multiply(down, gated.product if codes is None else x, codes, groups, False)
            return combine(outputs, routing.weights, groups)

        return run

    return bind


def vllm_triton(experts: Experts) -> Bind:
    """Return vLLM's Triton kernel: bf16, FP8 and INT8 (scales per weight row and token), FP8 with scales per block."""
    from vllm.model_executor.layers.fused_moe import config
    from vllm.model_executor.layers.fused_moe.fused_moe import fused_experts

    if experts.scheme not in ("bf16", "fp8", "fp8_block", "w8a8"):
        raise RuntimeError(f"vLLM's Triton kernel has no {experts.scheme}")
    weights, quant = experts.stored("weight"), None
    scales = [] if experts.scheme == "bf16" else [scale.float() for scale in experts.stored("weight_scale")]
    if experts.scheme == "fp8":
        quant = config.fp8_w8a8_moe_quant_config(*scales, per_act_token_quant=True, per_out_ch_quant=True)
    elif experts.scheme == "fp8_block":
        quant = config.fp8_w8a8_moe_quant_config(*scales, block_shape=[128, 128])
    elif experts.scheme == "w8a8":
        quant = config.int8_w8a8_moe_quant_config(*scales, None, None, per_act_token_quant=True)

    def bind(x: Tensor, routing: Routing) -> Call:
        return lambda: fused_experts(x, *weights, routing.weights, routing.experts, quant_config=quant)

    return bind


def vllm_marlin(experts: Experts) -> Bind:
    """Return Marlin, with weights repacked as in vLLM's compressed-tensors method."""
    if experts.scheme != "w4a16":
        raise RuntimeError("Marlin is only measured for w4a16")
    from vllm import _custom_ops as ops
    from vllm.model_executor.layers.fused_moe.experts.marlin_moe import fused_marlin_moe
    from vllm.model_executor.layers.quantization.utils.marlin_utils import marlin_moe_permute_scales
    from vllm.scalar_type import scalar_types

    sizes, parts = experts.sizes, []
    for k, *both in zip(
        (sizes.hidden, sizes.inner), experts.stored("weight_packed"), experts.stored("weight_scale"), strict=True
    ):
        packed, scale = (tensor.transpose(1, 2).contiguous() for tensor in both)
        none = torch.empty(sizes.experts, 0, dtype=torch.int32, device=packed.device)
        n = packed.shape[2]
        parts.append(ops.gptq_marlin_moe_repack(packed, none, k, n, 4))
        parts.append(marlin_moe_permute_scales(scale, k, n, k // scale.shape[1]))
    w1, s1, w2, s2 = parts

    def bind(x: Tensor, routing: Routing) -> Call:
        return lambda: fused_marlin_moe(
            x, w1, w2, None, None, s1, s2, routing.weights, routing.experts, scalar_types.uint4b8.id
        )

    return bind


def torch_grouped(experts: Experts) -> Bind:
    """Return torch's grouped product in bf16, as transformers uses it for experts."""
    if experts.scheme != "bf16" or not hasattr(torch, "_grouped_mm"):
        raise RuntimeError("torch._grouped_mm supports only bf16, or this torch does not have it")
    gate_up, down = (weight.transpose(1, 2) for weight in experts.stored("weight"))

    def bind(x: Tensor, routing: Routing) -> Call:
        def run() -> Tensor:
            flat = routing.experts.flatten()
            order = torch.argsort(flat)
            counts = torch.histc(flat.float(), experts.sizes.experts, 0, experts.sizes.experts - 1)
            ends = counts.cumsum(0).int()
            tokens = order // experts.sizes.per_token
            gate, up = torch._grouped_mm(x[tokens], gate_up, offs=ends).chunk(2, -1)
            outputs = torch._grouped_mm(torch.nn.functional.silu(gate) * up, down, offs=ends)
            weighted = outputs * routing.weights.flatten()[order, None].to(outputs.dtype)
            back = torch.empty_like(weighted).index_copy_(0, order, weighted)
            return back.view(*routing.weights.shape, -1).sum(1)

        return run

    return bind


PEERS = {"vllm_triton": vllm_triton, "vllm_marlin": vllm_marlin, "torch_grouped": torch_grouped}


def expert_rows(
    stopwatch: Stopwatch, reps: int, group_size: int, model: str, scheme: str, many: Sequence[int]
) -> Iterator[Row]:
    """Yield one row per kernel, routing and number of tokens; `skipped` is the reason why a kernel did not run."""
    sizes, device = SHAPES[model], stopwatch.device
    base: Row = {"section": f"experts {scheme}", "model": model}
    experts = Experts(scheme, sizes, group_size, device)
    bound, skipped = build_all({who: partial(build, experts) for who, build in {"qarl": qarl, **PEERS}.items()})
    yield from (base | {"who": who, "skipped": why} for who, why in skipped.items())
    states = torch.randn(max(many), sizes.hidden, device=device, dtype=torch.bfloat16)
    for tokens, kind in product(many, ROUTINGS):
        routing, x = make_routing(kind, tokens, sizes, device), states[:tokens]
        picked = picked_rows(tokens, device, CHECKED)
        expected, shape = experts.expected(x, routing, picked), (tokens, sizes.hidden)
        for who, bind in bound.items():
            flops = 6 * tokens * sizes.per_token * sizes.hidden * sizes.inner
            row = measured(partial(bind, x, routing), stopwatch, reps, flops, expected, picked, shape, TOLERANCE)
            yield base | {"who": who, "routing": kind, "m": tokens} | row
