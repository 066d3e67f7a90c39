"""Tensors that a kernel cannot read are errors that name them, before anything is launched."""

from collections.abc import Callable

import mixtures
import pytest
import torch
from kernel_harness import NEEDS_TRITON
from nvfp4_products import Nvfp4
from qarl_kernels import (
    dequantize,
    fp8_backward,
    fused_norm,
    gemm,
    nvfp4a16,
    quantize,
    rotary,
    swiglu,
    tile,
    token_sums,
)
from qarl_kernels.flash.forward import attention_forward
from qarl_kernels.flash.layout import packed_layout
from qarl_kernels.flash.paged import paged_attention, paged_layout
from qarl_kernels.groups import Shared
from qarl_kernels.moe import backward, combine, routing, shared
from qarl_kernels.nvfp4_weights import dequantize_nvfp4, quantize_nvfp4
from qarl_kernels.rotary_backward import rotary_backward
from qarl_kernels.rows import MAX_ROW, row_tile

pytestmark = NEEDS_TRITON

CPU = torch.device("cpu")
BF16, FP16, FP32, INT32, E4M3 = torch.bfloat16, torch.float16, torch.float32, torch.int32, torch.float8_e4m3fn


def zeros(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.zeros(*shape, dtype=FP32).to(dtype)


X, ROW = zeros(3, 96), zeros(96)
PACKED, WORDS = zeros(2, 4, dtype=INT32), zeros(2, 1)
FP4 = Nvfp4.random(2, 32, device=CPU)
GROUPS, ALL = mixtures.grouped(4, 2, 3, CPU), mixtures.all_to(1, 4, 3, CPU)  # 8 rows of 4 tokens; 4 rows of 4
DY, TOKENS, EXPERTS, INTO = zeros(8, 16), zeros(4, 32), zeros(48, 32), zeros(48, 32, dtype=FP32)
D, SLOTS, GATE = zeros(4, 8), zeros(4, 1, dtype=FP32), zeros(4, dtype=FP32)
ROTATION = rotary.Rotation(4, 2, 64, zeros(50, 64), zeros(50, 64), torch.zeros(3, dtype=torch.int64), None, None, 1e-6)
QKV, DQ, DK, SLOT = zeros(3, 512), zeros(3, 4, 64), zeros(3, 2, 64), torch.arange(3)
CACHE = zeros(2, 2, 16, 64)
Q, K = zeros(3, 3, 64), zeros(3, 1, 64)
PACK, OTHER = packed_layout([(3, [])], CPU), packed_layout([(4, [])], CPU)
ONE, PAGES = paged_layout([0], [1], [0], [[0]], CPU)[0], zeros(3, 1, 16, 64)
TALL = zeros(64, 2, dtype=FP32)
CODES = fp8_backward.Codes(zeros(64, 37, dtype=E4M3), zeros(64, 1, dtype=FP32))
FAR = torch.empty(0, dtype=BF16).as_strided((0, 1, 16, 64), (64, 64, 2**27, 1))


def attend(q: torch.Tensor, k: torch.Tensor, layout):
    return attention_forward(q, k, k, layout, 1.0)


def paged(k: torch.Tensor, v: torch.Tensor, rows: int = 1):
    return paged_attention(zeros(rows, 2, 64), k, v, ONE, 1.0)


CASES: list[tuple[Callable[[], object], str]] = [
    (lambda: fused_norm.add_rms_norm(X.float(), X, ROW, 1e-5), "^x must be a 16-bit matrix with contiguous rows, not"),
    (lambda: fused_norm.add_rms_norm(X, X[:, :95], ROW, 1e-5), "^residual must be a 16-bit matrix of 96 columns"),
    (lambda: gemm.dense(X, zeros(8, 96, dtype=FP16)), "needs bf16 or fp16 operands of one dtype"),
    (lambda: gemm.scaled(X.to(E4M3), GATE, zeros(8, 96), WORDS, None, BF16), "needs float8_e4m3fn codes, not"),
    (lambda: row_tile(MAX_ROW + 1), "^rows of 32769 values do not fit"),
    (lambda: token_sums.column_sum(X, zeros(95, dtype=FP32)), "^into must be a contiguous float32 vector of 96"),
    (lambda: swiglu.swiglu_backward(X, X), "^grad must be a 16-bit matrix of 48 columns"),
    (lambda: swiglu.swiglu(X[:, :95]), "^gate_up must have an even number of columns, not 95"),
    (lambda: rotary.rotary_forward(QKV, ROTATION._replace(heads=3)), "^qkv must be a 16-bit matrix of 448 columns"),
    (
        lambda: rotary_backward(DQ, DK.transpose(0, 1).contiguous().transpose(0, 1), QKV, ROTATION, QKV, None, None),
        "^dk must have contiguous heads",
    ),
    (lambda: rotary.rotary_into_pages(QKV, ROTATION, CACHE, CACHE.half(), SLOT), "does not take 2 heads of 64"),
    (lambda: tile.tile_int4(PACKED, 64), r"^packed must be contiguous int32 \[2, 8\], not torch.int32 \[2, 4\]; pass"),
    (lambda: tile.untile_int4(PACKED, 2, 32), r"^tiled must be contiguous int32 \[1, 1, 16, 16\]"),
    (lambda: tile.meta_w4a16(WORDS, None, 2, 32, 32, FP16), r"^scale must be contiguous float16 \[2, 1\], not"),
    (lambda: dequantize.dequantize_int4(PACKED, WORDS, PACKED, 32, BF16), r"^zero_point must be .* int32 \[1, 1\]"),
    (lambda: dequantize.dequantize_bytes(zeros(2, 4, dtype=E4M3), WORDS, BF16, True), r"^scale must be .* \[1, 1\]"),
    (lambda: dequantize_nvfp4(FP4.packed[:, 1:], FP4.scale, FP4.global_scale, BF16), r"^weight_packed .* \[2, 16\]"),
    (lambda: quantize_nvfp4(zeros(2, 24, dtype=FP32), FP4.global_scale), "^weight must be a float32 matrix"),
    (lambda: quantize_nvfp4(TALL.t(), FP4.global_scale), "^weight must be a float32 matrix with contiguous rows"),
    (lambda: nvfp4a16.tile_nvfp4(FP4.packed, FP4.scale.float()), "^weight_scale must be contiguous float8_e4m3fn"),
    (lambda: quantize.quantize_bytes(TALL.t(), BF16, torch.int8), "^weight must be a float32 matrix with contiguous"),
    (lambda: quantize.quantize_bytes(zeros(1, 32769, dtype=FP32), BF16, E4M3), "one scale covers at most 32768"),
    (lambda: quantize.activation_codes(zeros(2, 3, 16), "int8"), "^x must be a bfloat16 or float16 or float32 matrix"),
    (lambda: fp8_backward.transpose(zeros(64, 48, dtype=E4M3), zeros(1, 1)), "takes one per row"),
    (lambda: fp8_backward.transpose(zeros(64, 48), zeros(64, 1)), "only e4m3 has one"),
    (
        lambda: fp8_backward.add_product(CODES, fp8_backward.columns_of(zeros(37, 48)), zeros(48, 64)),
        "takes a float32 matrix of that",
    ),
    (lambda: combine.combine(D[:3], SLOTS, ALL), "d must have 4 rows for these groups, not 3"),
    (lambda: combine.combine_backward(D, D, SLOTS, ALL, D[:3]), "into must have 4 rows"),
    (lambda: combine.shared_backward(D, Shared(D, GATE.double()), D), r"gate must be contiguous float32 \[4\]"),
    (lambda: shared.shared_gate(D, D[:2]), r"the gate's weight must be \[1, 8\]"),
    (lambda: backward.grouped_input_grad(DY[:4], EXPERTS, GROUPS), "x has 4 rows, but these groups need 8"),
    (lambda: backward.grouped_weight_grad(DY, TOKENS, GROUPS, True, INTO[1:]), r"contiguous float32 \[48, 32\]"),
    (lambda: routing.route(zeros(3, 8), zeros(4, 8), 5, True), "at most 512 experts, not 5 of 4"),
    (lambda: routing.route(zeros(3, 8), zeros(4, 8), 2, True, zeros(3, 3, dtype=INT32)), r"chosen must be .* \[3, 2\]"),
    (lambda: attend(Q, K, OTHER), "q has 3 rows, k 3 and the layout 4"),
    (lambda: attend(Q, K.repeat(1, 2, 1), PACK), "do not fit together"),
    (lambda: paged(PAGES, PAGES, rows=2), "q has 2 rows and the layout 1"),
    (lambda: paged(PAGES.to(E4M3), PAGES), r"or k and v of e4m3; they have torch.bfloat16, torch.float8_e4m3fn"),
    (lambda: paged(FAR, FAR), "tokens of a page are 134217728 values apart; 16 of them"),
]


@pytest.mark.parametrize(("call", "message"), CASES, ids=range(len(CASES)))
def test_wrong_tensors_are_named(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()
