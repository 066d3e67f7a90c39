"""Products of a linear layer with qarl's kernels, those of vLLM 0.24 (Marlin, Machete, CUTLASS) and torch.

Each kernel has a builder, which repacks the weight outside the timed call. It raises if the kernel is missing or does
not support the problem; the report then shows that error as the reason.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from kernel_bench.measure import Call, Row, Stopwatch, build_all, measured, picked_rows, reason
from model_sizes import Layer
from qarl_formats.registry import grouped_names, make_scheme
from qarl_formats.scheme import Codes
from qarl_formats.weight import LowBitWeight, quantize_weight
from qarl_kernels.quantize import activation_codes
from torch import Tensor

Maker = Callable[[int], Call]  # number of rows -> a product that is ready to run; may raise `ERRORS`


def quantized(scheme: str, master: Tensor, group: int, kernels: bool = False) -> LowBitWeight:
    """Quantize a float32 master weight (N, K). group: Input features that share a scale, if the scheme has groups."""
    if scheme in ("dense", "bf16"):
        return LowBitWeight.of_values(master.bfloat16())
    kind = make_scheme(scheme, group if scheme in grouped_names() else None)
    return quantize_weight(master, kind, scheme, kernels)


@dataclass
class Problem:
    """A layer's weight in one scheme, and activations for it.

    Attributes:
        scheme: One of `SCHEMES`.
        weight: The quantized weight, as the learner multiplies by it.
        x: (M, K) bf16; M is the largest number of rows to measure.
        codes, scale: x quantized, if the scheme quantizes activations.
        values: float32 (N, K), the dequantized weight as the product reads it.
    """

    scheme: str
    weight: LowBitWeight
    x: Tensor
    codes: Tensor | None
    scale: Tensor | None
    values: Tensor

    def expected(self, rows: Tensor) -> Tensor:
        """Return the float32 product of the rows with these indices."""
        return self.weight.rounded_input(self.x[rows].float()) @ self.values.t()


def make_problem(scheme: str, n: int, k: int, m: int, group: int, device: torch.device) -> Problem:
    """Return a problem with random operands. Plain torch quantizes the weight."""
    master = torch.randn(n, k, device=device, generator=torch.Generator(device).manual_seed(n + k)).mul_(0.02)
    x = torch.randn(m, k, device=device, generator=torch.Generator(device).manual_seed(k)).to(torch.bfloat16)
    weight = quantized(scheme, master, group)
    codes, scale = (None, None) if weight.input_codes is None else activation_codes(x, weight.input_codes)
    # If activations are not quantized, the operand is the value rounded to bf16.
    values = weight.dequantize(torch.bfloat16 if codes is None else torch.float32).float()
    return Problem(scheme, weight, x, codes, scale, values)


def qarl(problem: Problem) -> Maker:
    prepared = problem.weight.prepare(torch.bfloat16, kernels=True)
    codes, scale = problem.codes, problem.scale
    if codes is None or scale is None:
        return lambda m: partial(prepared.matmul, problem.x[:m])
    return lambda m: partial(prepared.matmul, Codes(codes[:m], scale[:m], torch.bfloat16))


def _vllm() -> Any:
    try:
        from vllm import _custom_ops
    except ImportError as error:
        raise RuntimeError(f"vllm is not importable ({reason(error)})") from error
    if not hasattr(torch.ops._C, "cutlass_scaled_mm"):
        raise RuntimeError("this vllm has no CUDA kernels")
    return _custom_ops


def _marlin(problem: Problem) -> Maker:
    """Return Marlin (16-bit or int8 activations), as in `MarlinLinearKernel` and `apply_gptq_marlin_linear`."""
    ops = _vllm()
    from vllm.model_executor.layers.quantization.utils import marlin_utils as utils
    from vllm.scalar_type import scalar_types

    (n, k), group, eight_bit = problem.weight.shape, problem.weight.scheme.group_size or -1, problem.codes is not None
    device = problem.x.device
    none = utils.marlin_make_empty_g_idx(device)
    qweight = problem.weight.tensors["weight_packed"].t().contiguous()
    qweight = ops.gptq_marlin_repack(qweight, perm=none, size_k=k, size_n=n, num_bits=4, is_a_8bit=eight_bit)
    scales = problem.weight.tensors["weight_scale"].t().contiguous()
    scales = utils.marlin_permute_scales(scales, size_k=k, size_n=n, group_size=group, is_a_8bit=eight_bit)
    s_x = None
    if eight_bit:
        s_x = problem.scale
        if group != -1:
            scales, factor = utils.marlin_act_int8_process_scales(scales)
            s_x = s_x * factor
    workspace = utils.marlin_make_workspace_new(device)
    source = problem.codes if eight_bit else problem.x

    sizes = {"size_n": n, "size_k": k, "is_k_full": True, "is_zp_float": False}
    how = {"use_atomic_add": False, "use_fp32_reduce": True}

    def make(m: int) -> Call:
        x, a_scales = source[:m], None if s_x is None else s_x[:m]
        operands = (x, None, qweight, None, scales, a_scales, None, none, none, none, workspace, scalar_types.uint4b8)
        return lambda: ops.marlin_gemm(*operands, size_m=m, **sizes, **how)

    return make


def _machete(problem: Problem) -> Maker:
    """Return Machete, as in `MacheteLinearKernel`."""
    ops = _vllm()
    from vllm.scalar_type import scalar_types

    dtype, group = problem.x.dtype, problem.weight.scheme.group_size or -1
    packed = problem.weight.tensors["weight_packed"].t()  # (K / 8, N), column-major
    qweight = ops.machete_prepack_B(packed, a_type=dtype, b_type=scalar_types.uint4b8, group_scales_type=dtype)
    scales = problem.weight.tensors["weight_scale"].t().contiguous()
    b = {"b_q": qweight, "b_type": scalar_types.uint4b8, "b_group_scales": scales, "b_group_size": group}
    return lambda m: lambda: ops.machete_mm(a=problem.x[:m], b_group_zeros=None, **b)


def _cutlass(problem: Problem) -> Maker:
    """Return vLLM's CUTLASS products of int8 or e4m3 codes, with a scale per row and per output, or per block."""
    ops = _vllm()
    codes, scale, b = problem.codes, problem.scale, problem.weight.tensors["weight"].t()
    s_w = problem.weight.tensors["weight_scale"].float()
    if problem.scheme == "fp8_block":
        s_w = s_w.t()

    def make(m: int) -> Call:
        a, s_x = codes[:m], scale[:m]
        if problem.scheme == "fp8_block":
            s_x = s_x.t().contiguous().t()  # column-major, as vLLM's quantization leaves it
        return lambda: ops.cutlass_scaled_mm(a, b, scale_a=s_x, scale_b=s_w, out_dtype=torch.bfloat16)

    return make


def _scaled_mm(problem: Problem) -> Maker:
    """Return torch._scaled_mm with a scale per row and per output, and fast accumulation as in CUTLASS and qarl."""
    codes, scale, b = problem.codes, problem.scale, problem.weight.tensors["weight"].t()
    s_w = problem.weight.tensors["weight_scale"].float().t().contiguous()
    how = {"scale_b": s_w, "out_dtype": torch.bfloat16, "use_fast_accum": True}
    return lambda m: lambda: torch._scaled_mm(codes[:m], b, scale_a=scale[:m], **how)


def _cublas(problem: Problem) -> Maker:
    """Return torch.mm in bf16, the cost of an unquantized layer; activations have the values that the scheme gives."""
    b, x = problem.values.to(torch.bfloat16).t(), problem.weight.rounded_input(problem.x)
    return lambda m: lambda: torch.mm(x[:m], b)


def peers(scheme: str) -> dict[str, Callable[[Problem], Maker]]:
    """Return the builders of the other libraries' kernels for a scheme, by name."""
    found: dict[str, Callable[[Problem], Maker]] = {"cublas_bf16": _cublas}
    if scheme == "w4a16":
        return found | {"marlin": _marlin, "machete": _machete}
    if scheme == "w4a8":
        return found | {"marlin_int8": _marlin}
    if scheme in ("w8a8", "fp8", "fp8_block"):
        found["cutlass"] = _cutlass
    return found | ({"scaled_mm": _scaled_mm} if scheme == "fp8" else {})


def product_rows(
    stopwatch: Stopwatch, reps: int, group: int, layer: Layer, scheme: str, many: Sequence[int]
) -> Iterator[Row]:
    """Yield one report row per kernel and number of rows; `skipped` is the reason why a kernel did not run."""
    base = {"section": scheme, "model": layer.model, "layer": layer.name, "n": layer.n, "k": layer.k}
    problem = make_problem(scheme, layer.n, layer.k, max(many), group, stopwatch.device)
    bound, skipped = build_all({who: partial(build, problem) for who, build in {"qarl": qarl, **peers(scheme)}.items()})
    yield from (base | {"who": who, "skipped": why} for who, why in skipped.items())
    for m in many:
        picked = picked_rows(m, stopwatch.device)
        expected = problem.expected(picked)
        for who, make in bound.items():
            flops, shape = 2 * m * layer.n * layer.k, (m, layer.n)
            row = measured(partial(make, m), stopwatch, reps, flops, expected, picked, shape)
            yield base | {"who": who, "m": m} | row
