"""Other people's kernels on the same operands: vLLM 0.24 (Marlin, Machete, CUTLASS) and torch.

Every maker returns a call or raises; what is raised becomes the reason in the report. Repacking happens here,
outside the timed call.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from kernel_bench.measure import Absent, reason
from kernel_bench.problems import Activations, Call, Maker, Weight
from kernel_bench.shapes import BLOCK
from torch import Tensor


def _vllm() -> Any:
    try:
        from vllm import _custom_ops
    except ImportError as error:
        raise Absent(f"vllm is not importable ({reason(error)})") from error
    if not hasattr(torch.ops._C, "cutlass_scaled_mm"):
        raise Absent("this vllm has no CUDA kernels")
    return _custom_ops


def _marlin(weight: Weight, activations: Activations, eight_bit: bool) -> Maker:
    """Marlin: 16-bit or int8 activations, as `MarlinLinearKernel` prepares and `apply_gptq_marlin_linear` calls it."""
    ops = _vllm()
    from vllm.model_executor.layers.quantization.utils import marlin_utils as utils
    from vllm.scalar_type import scalar_types

    n, k, group = weight.n, weight.k, weight.group or -1
    device = weight.values.device
    none = utils.marlin_make_empty_g_idx(device)
    qweight = weight.tensors["weight_packed"].t().contiguous()
    qweight = ops.gptq_marlin_repack(qweight, perm=none, size_k=k, size_n=n, num_bits=4, is_a_8bit=eight_bit)
    scales = weight.tensors["weight_scale"].t().contiguous()
    scales = utils.marlin_permute_scales(scales, size_k=k, size_n=n, group_size=group, is_a_8bit=eight_bit)
    s_x = None
    if eight_bit:
        assert activations.scale is not None, "Marlin with int8 activations needs their scales"
        s_x = activations.scale
        if group != -1:
            scales, factor = utils.marlin_act_int8_process_scales(scales)
            s_x = s_x * factor
    workspace = utils.marlin_make_workspace_new(device)
    source = activations.codes if eight_bit else activations.x

    sizes = {"size_n": n, "size_k": k, "is_k_full": True, "is_zp_float": False}
    how = {"use_atomic_add": False, "use_fp32_reduce": True}

    def make(m: int) -> Call:
        x, a_scales = source[:m], None if s_x is None else s_x[:m]
        operands = (x, None, qweight, None, scales, a_scales, None, none, none, none, workspace, scalar_types.uint4b8)
        return lambda: ops.marlin_gemm(*operands, size_m=m, **sizes, **how)

    return make


def _machete(weight: Weight, activations: Activations) -> Maker:
    """Machete, as `MacheteLinearKernel` prepares and calls it."""
    ops = _vllm()
    from vllm.scalar_type import scalar_types

    dtype, group = activations.x.dtype, weight.group or -1
    packed = weight.tensors["weight_packed"].t()  # (K / 8, N), column-major
    qweight = ops.machete_prepack_B(packed, a_type=dtype, b_type=scalar_types.uint4b8, group_scales_type=dtype)
    scales = weight.tensors["weight_scale"].t().contiguous()
    b = {"b_q": qweight, "b_type": scalar_types.uint4b8, "b_group_scales": scales, "b_group_size": group}
    return lambda m: lambda: ops.machete_mm(a=activations.x[:m], b_group_zeros=None, **b)


def _cutlass(weight: Weight, activations: Activations) -> Maker:
    """vLLM's CUTLASS products of int8 or e4m3 codes with a scale per row and per output, or per block."""
    ops = _vllm()
    codes, scale, b = activations.codes, activations.scale, weight.tensors["weight"].t()
    assert codes is not None and scale is not None, "CUTLASS needs quantized activations"
    s_w = weight.tensors["weight_scale"].float()
    if weight.scheme == "fp8_block":
        s_w = s_w.t()

    def make(m: int) -> Call:
        a, s_x = codes[:m], scale[:m]
        if weight.scheme == "fp8_block":
            s_x = s_x.t().contiguous().t()  # column-major, as vLLM's quantization leaves it
        return lambda: ops.cutlass_scaled_mm(a, b, scale_a=s_x, scale_b=s_w, out_dtype=torch.bfloat16)

    return make


def vllm_quantizers() -> dict[str, Callable[[Tensor], tuple[Tensor, Tensor]]]:
    """vLLM's dynamic activation quantization: by scheme, x (M, K) -> codes, scale."""
    ops = _vllm()
    from vllm.model_executor.layers.quantization.utils.fp8_utils import per_token_group_quant_fp8

    return {
        "w8a8": lambda x: ops.scaled_int8_quant(x)[:2],
        "fp8": lambda x: ops.scaled_fp8_quant(x, use_per_token_if_dynamic=True),
        "fp8_block": lambda x: per_token_group_quant_fp8(x, BLOCK, column_major_scales=True, use_ue8m0=False),
    }


def _scaled_mm(weight: Weight, activations: Activations) -> Maker:
    """torch._scaled_mm with a scale per row and per output; fast accumulation, as CUTLASS and qarl have it."""
    codes, scale, b = activations.codes, activations.scale, weight.tensors["weight"].t()
    assert codes is not None and scale is not None, "_scaled_mm needs quantized activations"
    s_w = weight.tensors["weight_scale"].float().t().contiguous()
    how = {"scale_b": s_w, "out_dtype": torch.bfloat16, "use_fast_accum": True}
    return lambda m: lambda: torch._scaled_mm(codes[:m], b, scale_a=scale[:m], **how)


def cublas(weight: Weight, activations: Activations) -> Maker:
    """torch.mm in bf16: what the layer costs when it is not quantized."""
    b = weight.values.to(torch.bfloat16).t()
    return lambda m: lambda: torch.mm(activations.x[:m], b)


def peer_builders(weight: Weight, activations: Activations) -> dict[str, Callable[[], Maker]]:
    """What builds each peer for this problem, cuBLAS aside."""
    if weight.scheme == "w4a16":
        marlin, machete = partial(_marlin, weight, activations, False), partial(_machete, weight, activations)
        return {"marlin": marlin, "machete": machete}
    if weight.scheme == "w4a8":
        return {"marlin_int8": partial(_marlin, weight, activations, True)}
    if weight.scheme == "dense":
        return {}
    scaled_mm = {"scaled_mm": partial(_scaled_mm, weight, activations)} if weight.scheme == "fp8" else {}
    return {"cutlass": partial(_cutlass, weight, activations), **scaled_mm}
