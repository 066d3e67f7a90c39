"""What `test_compile_only.py` compiles: generators that call kernels' wrappers and yield a label after each call.

Tensors live on the meta device: they have types, shapes and strides, and addresses that count as aligned.
"""

from collections.abc import Iterator
from unittest.mock import patch

import torch
from qarl_formats.registry import make_scheme
from qarl_formats.weight import LowBitWeight
from qarl_kernels import (
    digest,
    draw,
    fp8_backward,
    fp8_block,
    fused_norm,
    gather_rows,
    gemm,
    head,
    nvfp4a16,
    quantize,
    rotary,
    rotary_backward,
    rows,
    swiglu,
    tile,
    token_sums,
    tuning,
    w4a8,
    w4a16,
)
from qarl_kernels.flash import backward as flash_backward
from qarl_kernels.flash import forward as flash_forward
from qarl_kernels.flash import layout as flash_layout
from qarl_kernels.flash import paged as flash_paged
from qarl_kernels.groups import Groups, Shared
from qarl_kernels.launch import capability_of
from qarl_kernels.logprob import Truncation
from qarl_kernels.moe import backward as moe_backward
from qarl_kernels.moe import combine as moe_combine
from qarl_kernels.moe import dispatch as moe_dispatch
from qarl_kernels.moe import routing as moe_routing
from qarl_kernels.moe import shared as moe_shared
from shipped_tables import entries
from torch import Tensor

BF16, FP32 = torch.bfloat16, torch.float32
MATRIX = (4096, 12_288)
NOT_FUSED = ("library", "dequantized")


def empty(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def on_hopper() -> bool:
    return capability_of(empty(1)) >= (9, 0)


def weights(name: str) -> Iterator[str]:
    """Quantize a weight in a scheme, rearrange it for its product, dequantize it."""
    plain, _, kind = name.partition(" ")
    scheme = make_scheme(plain, 32 if make_scheme(plain).group_sizes else None, symmetric=not kind)
    stored, _ = scheme.quantize(empty(*MATRIX, dtype=FP32), kernels=True, shared=empty(1, dtype=FP32))
    made = LowBitWeight(scheme, stored, MATRIX)
    for dtype in (torch.float16, BF16) if plain == "nvfp4a16" else (BF16,):
        made.prepare(dtype, True).values(dtype)
        scheme.dequantize(stored, MATRIX, dtype, True)
    yield f"{plain} {MATRIX} {kind}"


def elementwise() -> Iterator[str]:
    """Kernels without products, which have no branch for Hopper, of their largest shapes. No FP8."""
    for name in ("w4a16", "w4a16 asymmetric", "w4a8", "w8a8", "nvfp4a16"):
        yield from weights(name)
    tile.untile_int4(tile.tile_int4(empty(4096, 512, dtype=torch.int32), 4096), 4096, 4096)
    quantize.activation_codes(empty(7, 28_672), "int8")
    yield "int8 activations, untiling"
    digest.digest_sums([empty(4096, 4096), empty(7, dtype=torch.int8)])
    state = empty(256, dtype=torch.int64)
    draw.exponential_(empty(256, 151_936, dtype=FP32), state, state)
    yield "digests, exponential noise"
    for vocabulary in (1000, 151_936):
        logits, row = empty(256, vocabulary, dtype=FP32), empty(256, dtype=FP32)
        draw.draw(logits, row, empty(256, dtype=torch.float64))
        yield f"draw of {vocabulary}"
    h = 8192
    x, weight, inverse = empty(4096, h), empty(h), empty(4096, dtype=FP32)
    fused_norm.add_rms_norm(x, x, weight, 1e-6)
    fused_norm.add_rms_norm(x, None, weight, 1e-6)
    fused_norm.rms_norm_again(x, inverse, weight)
    fused_norm.add_rms_norm_backward(x, x, x, inverse, weight, empty(h, dtype=FP32))
    token_sums.column_sum(x, empty(h, dtype=FP32))
    yield f"norm {h}"
    gate_up = empty(4096, 2 * 12_288)
    product = swiglu.swiglu(gate_up).product
    swiglu.swiglu_backward(product, gate_up)
    token_sums.embedding_grad(empty(4096, 4096), empty(4096, dtype=torch.int64), empty(50_000, 4096, dtype=FP32), -1)
    yield "gate, embedding"
    yield from fused_quantization("int8")
    yield from rotaries()
    yield from moe_routing_and_order()
    yield from moe_combinations()


def elementwise_fp8() -> Iterator[str]:
    """Quantizing and dequantizing e4m3, a scale per row and per block; codes of a backward."""
    for name in ("fp8", "fp8_block"):
        yield from weights(name)
    for kind in ("fp8", "fp8_group"):
        quantize.activation_codes(empty(7, 28_672), kind)
    yield "fp8 activations"
    yield from fused_quantization("fp8_group")
    n, k = 12_288, 2048
    for of_rows in (True, False):
        fp8_backward.quantize(empty(4000, n), None, rows=of_rows)
    fp8_backward.quantize(empty(4000, n), empty(n, dtype=FP32))
    fp8_backward.transpose(empty(n, k, dtype=torch.float8_e4m3fn), empty(n, 1))
    yield f"backward codes {n}x{k}"


def rotaries() -> Iterator[str]:
    head_dim = 128
    qkv, table = empty(4096, 40 * head_dim), empty(4096, head_dim)
    positions, cache = empty(4096, dtype=torch.int64), empty(300, 4, 64, head_dim)
    norm = empty(head_dim)
    rotation = rotary.Rotation(32, 4, head_dim, table, table, positions, norm, norm, 1e-6)
    q, k, _ = rotary.rotary_forward(qkv, rotation)
    total = empty(head_dim, dtype=FP32)
    rotary_backward.rotary_backward(q, k, qkv, rotation, empty(4096, 40 * head_dim), total, total)
    for rows_ in (8, 4096):
        rotary.rotary_into_pages(qkv[:rows_], rotation, cache, cache, positions)
    yield f"rotary {head_dim} and norm"


def fp8_kv_cache() -> Iterator[str]:
    """A rotation that rounds keys and values to e4m3, and attention that reads them from a cache.

    A prefill of several chunks with heads of 128 spills 900 bytes on sm_89, whatever the tile.
    """
    dim = 128
    cache = empty(300, 8, 64, dim, dtype=torch.float8_e4m3fn)
    if not on_hopper():
        qkv, table, positions = empty(4096, 40 * 64), empty(4096, 64), empty(4096, dtype=torch.int64)
        pages = empty(300, 4, 64, 64, dtype=torch.float8_e4m3fn)
        rotation = rotary.Rotation(32, 4, 64, table, table, positions, None, None, 1e-6, kv_fp8=True)
        rotary.rotary_into_pages(qkv, rotation, pages, pages, positions)
        yield "rotary 64 into FP8"
        layout = paged_layout(1000)
        flash_paged.paged_attention(empty(layout.tokens, 16, dim), cache, cache, layout, dim**-0.5)
    table, lengths = empty(8, 128, dtype=torch.int32), empty(8, dtype=torch.int32)
    flash_paged.decode_attention(empty(8, 16, dim), cache, cache, table, lengths, dim**-0.5, None, 8192)
    yield f"attention over FP8 {dim}"


def fused_quantization(activation: rows.Activation) -> Iterator[str]:
    """Quantization inside the norm and the gate."""
    fused_norm.add_rms_norm(empty(4096, 8192), empty(4096, 8192), empty(8192), 1e-6, activation, True)
    swiglu.swiglu(empty(4096, 2 * 28_672), activation)
    yield f"quantizing norm and gate {activation}"


def most_demanding(family: str, grouped: bool) -> list[tuning.Tile]:
    """Of the shipped tables' tiles of each kernel, the one with the most registers per thread and, if it has another
    order of operands, of that the one with the most shared memory. What fails to compile, spills or does not fit is
    one of these; a GPU has run every tile. The narrow way has no branch for Hopper.
    """
    kinds: dict[str, set[tuning.Tile]] = {}
    for device in sorted(path.stem for path in tuning.TABLES.glob("*.json")):
        for named, _, entry in entries(device, grouped):
            for tile_ in (t for _, t in entry.tiles if named == family and t.way in ("wide", "x_first", "w_first")):
                kinds.setdefault("wide" if tile_.way == "wide" else "gemm", set()).add(tile_)
    found = []
    for same in kinds.values():
        registers = max(same, key=lambda t: (t.block_m * t.block_n / t.warps, t.stages, t.block_k, str(t)))
        others = {t for t in same if t.way != registers.way} or same
        memory = max(others, key=lambda t: ((t.block_m + t.block_n) * t.block_k * t.stages, -t.warps, str(t)))
        found += dict.fromkeys((registers, memory))
    return found


def products(*families: str) -> Iterator[str]:
    """A weight's product and that of experts: before Hopper the default tile, on Hopper the most demanding ones.

    The tile with the most shared memory has a ragged shape. On Hopper experts have 16-bit products only, and the tile
    with the most registers.
    """
    for family in families:
        dense = family not in tuning.BACKWARD
        if not on_hopper():
            for rows_ in (64, 8192) if dense else ():  # spread takes the larger one, unless it is not fused
                yield from labelled(family, None, 4096, 4096, tuning.default_tile(family, rows_, before_hopper=True))
            experts = groups_of(8, 2, 16)
            tile_ = tuning.default_tile(family, experts.rows, True, experts=8)
            yield from labelled(family, experts, 28_672, 4096, tile_)
            continue
        for number, tile_ in enumerate(most_demanding(family, False) if dense else ()):
            ragged = 72, 112 if family == "nvfp4a16" else 100  # NVFP4 has groups of 16
            yield from labelled(family, None, *(ragged if number % 2 else (4096, 4096)), tile_)
        for tile_ in most_demanding(family, True)[:1] if not dense or family == "dense" else ():
            yield from labelled(family, groups_of(128, 8, 4096), 1536, 2048, tile_)


def labelled(family: str, given: Groups | None, n: int, k: int, tile_: tuning.Tile) -> Iterator[str]:
    if tile_.way not in NOT_FUSED:
        product(family, given, n, k, given is not None, tile_)
        kind = "experts" if given else f"{family}-{n}"
        yield f"{kind} {family} {n}x{k} {tile_}" + " wgmma" * (on_hopper() and is_wgmma(tile_))


def is_wgmma(tile_: tuning.Tile) -> bool:
    """Whether a tile is meant for Hopper's warpgroup products: 64 rows of the operand that comes first."""
    first = tile_.block_m if tile_.way == "x_first" else tile_.block_n
    return first >= 64 and tile_.warps % 4 == 0


def product(family: str, given: Groups | None, n: int, k: int, gathered: bool, tile_: tuning.Tile | None) -> None:
    """Launch what a scheme launches for a weight (n, k), or for those of all experts. tile_ None: as the tables say."""
    pairs = 4096 if given is None else given.rows
    rows, width, blocks = pairs // given.slots if gathered else pairs, n * (given.experts if given else 1), -(-k // 128)
    x, dy = empty(rows, k), empty(pairs, n)
    tiled, meta = (
        empty(-(-width // 16), blocks, 16, 16, dtype=torch.int32),
        empty(blocks, -(-width // 16) * 16, dtype=FP32),
    )
    byte = torch.int8 if family.startswith("w") else torch.float8_e4m3fn
    qx, scale_x = empty(rows, k, dtype=byte), empty(rows, 1, dtype=FP32)
    how = {"groups": given, "gathered": gathered, "tile": tile_}
    if family == "dense":
        gemm.dense(x, empty(width, k), **how)
    elif family == "input_grad":
        moe_backward.grouped_input_grad(dy, empty(width, k), given, tile=tile_)
    elif family == "weight_grad":
        moe_backward.grouped_weight_grad(dy, x, given, gathered, empty(width, k, dtype=FP32), tile_)
    elif family == "nvfp4a16":
        nvfp4a16.nvfp4a16(x, None, *scales_fp4(width, k), *tiled_fp4(width, k), **how)
    elif family == "w4a16":
        w4a16.w4a16(x, None, empty(width, 1), None, tiled, meta.view(torch.int32), **how)
    elif family == "w4a8":
        w4a8.w4a8(qx, scale_x, tiled, meta, k, n, None, BF16, **how)
    elif family == "fp8_block":
        scales = empty(rows, blocks, dtype=FP32), empty(-(-width // 128), blocks, dtype=FP32)
        fp8_block.fp8_block(qx, scales[0], empty(width, k, dtype=byte), scales[1], None, BF16, **how)
    else:
        gemm.scaled(qx, scale_x, empty(width, k, dtype=byte), empty(width, 1), None, BF16, **how)


def scales_fp4(n: int, k: int) -> tuple[Tensor, Tensor]:
    return empty(n, k // 16).to(torch.float8_e4m3fn), empty(1, dtype=FP32)


def tiled_fp4(n: int, k: int) -> tuple[Tensor, Tensor]:
    blocks, rows = -(-k // 128), -(-n // 16)
    return empty(rows, blocks, 16, 16, dtype=torch.int32), empty(2 * blocks, 16 * rows, dtype=torch.int32)


def int4_in_float16() -> Iterator[str]:
    """The fused int4 kernels with groups of 64 and a bias, in float16: each format in one of the two ways."""
    n, k = 4096, 4096
    tiled, x, bias = empty(n // 16, k // 128, 16, 16, dtype=torch.int32), *empty(2, 4096, k, dtype=torch.float16)
    bias, rows = bias[0], k // 128 * 2
    narrow, wide = tuning.Tile("narrow", 16, 32, warps=2, stages=4), tuning.Tile("wide", 64, 64, stages=3)
    meta = empty(rows, n, dtype=torch.int32)
    w4a16.w4a16(x, None, empty(n, 1, dtype=torch.float16), None, tiled, meta, bias, tile=wide)
    nvfp4a16.nvfp4a16(x, None, *scales_fp4(n, k), *tiled_fp4(n, k), bias, tile=narrow)
    codes, scale_x = empty(4096, k, dtype=torch.int8), empty(4096, 1, dtype=FP32)
    w4a8.w4a8(codes, scale_x, tiled, empty(rows, n, dtype=FP32), k, n, None, BF16, tile=wide)
    yield "int4 in groups of 64"


def dequantized_experts() -> Iterator[str]:
    """The product of 16-bit values of NVFP4's experts, with their scales."""
    given = groups_of(128, 8, 65_536)
    tile_ = tuning.default_tile("dense", given.rows, not on_hopper(), experts=128)
    x, weight = empty(65_536, 2048), empty(128 * 1536, 2048)
    scales = empty(len(x), 1, dtype=FP32), empty(len(weight), dtype=FP32)
    gemm.run(x, weight, *scales, None, empty(given.rows, 1536), tile_, given, True)
    yield f"experts nvfp4a16 dequantized {tile_}" + " wgmma" * on_hopper()


def _attention_operands(dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """q (T, 16, D), and k and v (T, 8, D) as slices of one product's output."""
    qkv = empty(4600, 32 * dim)
    q, k, v = (part.view(4600, -1, dim) for part in qkv.split((16 * dim, 8 * dim, 8 * dim), 1))
    return q, k, v


def attention_forward() -> Iterator[str]:
    """Packed forward, in one chunk and in several, of the smallest and the largest heads; 256 spills before Hopper."""
    layout = flash_layout.packed_layout([(600, [500] * 8)], torch.device("cpu"))
    for dim, window in ((64, None), (256, None) if on_hopper() else (128, 300)):
        q, k, v = (t[: layout.tokens] for t in _attention_operands(dim))
        flash_forward.attention_forward(q, k, v, layout, dim**-0.5, window)
        yield f"attention-{dim} forward window {window}" + " wgmma" * on_hopper()


def attention_backward() -> Iterator[str]:
    layout, dim = flash_layout.packed_layout([(96, [500] * 8)], torch.device("cpu")), 128
    q, k, v = (t[: layout.tokens] for t in _attention_operands(dim))
    out, lse = empty(*q.shape), empty(16, layout.tokens, dtype=FP32)
    flash_backward.attention_backward(out, q, k, v, out, lse, layout, dim**-0.5, 300, empty(*v.shape))
    yield f"backward {dim}"


def paged_layout(last: int) -> flash_layout.PackedLayout:
    """Prefill of two spans, the last one of `last` tokens, and decode of one."""
    pages = [[0], list(range(1, 127)), list(range(127, 260))]
    return flash_paged.paged_layout([0, 5, 6], [5, 1, last], [0, 2000, 0], pages, torch.device("cpu"))[0]


def attention_paged() -> Iterator[str]:
    """Prefill and decode in one launch with a window, and decodes of the largest heads, whose chunks are shared out."""
    layout, dim = paged_layout(2000), 128
    cache = empty(300, 8, 16, dim)
    flash_paged.paged_attention(empty(layout.tokens, 16, dim), cache, cache, layout, dim**-0.5, 300)
    yield f"paged {dim}"
    dim = 256
    cache, table, lengths = empty(300, 8, 64, dim), empty(8, 128, dtype=torch.int32), empty(8, dtype=torch.int32)
    flash_paged.decode_attention(empty(8, 16, dim), cache, cache, table, lengths, dim**-0.5, None, 8192)
    yield f"decode {dim}"


def head_statistics() -> Iterator[str]:
    """Log-probs and entropies from hidden states, with the tile that runs; vocabularies with and without a rest."""
    targets = empty(4096, dtype=torch.int64)
    head.statistics(empty(4096, 2048), empty(151_936, 2048), targets, head.Logits(1.0, -3.0))
    yield "head 151936"
    if not on_hopper():
        head.fused_distribution(empty(64, 2048), empty(151_936, 2048), Truncation(0.7))
        yield "distribution"
        fp16 = {"dtype": torch.float16}
        head.statistics(empty(4096, 100, **fp16), empty(1000, 100, **fp16), targets, head.Logits(1.0, -3.0))
        yield "head float16, pointers"


def head_gradients() -> Iterator[str]:
    """The logits' gradient, with the tiles that run."""
    hopper = on_hopper()
    rows = 4096
    targets, row = empty(rows, dtype=torch.int64), empty(rows, dtype=FP32)
    found = head.Statistics(row, row, row, row)
    parts = targets, row, None, head.Logits(0.7, None), found
    head._logit_gradient(empty(rows, 2048), empty(8192, 2048), empty(rows, 8192), 8192, *parts)
    yield "gradient" + " wgmma" * hopper
    if not hopper:
        x, w = empty(rows, 100, dtype=torch.float16), empty(1000, 100, dtype=torch.float16)
        parts = targets, row, row, head.Logits(1.0, -3.0), found
        head._logit_gradient(x, w, empty(rows, 1000, dtype=FP32), 0, *parts)
        yield "pointers, gradient in float16"


def fp8_backward_products() -> Iterator[str]:
    """The weight's gradient, with every candidate tile."""
    hopper = on_hopper()
    for tile_ in fp8_backward.WEIGHT_TILES if hopper else (fp8_backward.BEFORE_HOPPER,):
        for m, n in ((12_288, 2048), (1000, 1000))[: 2 if tile_.block_n < 256 else 1]:
            a, b = (
                fp8_backward.Codes(
                    torch.empty(rows, 4096, dtype=torch.float8_e4m3fn, device="meta")[:, :4000],
                    empty(rows, 1, dtype=FP32),
                )
                for rows in (m, n)
            )
            with patch.object(fp8_backward, "WEIGHT_TILES", (tile_,)):
                fp8_backward.add_product(a, b, empty(m, n, dtype=FP32))
            yield f"product-{tile_.block_n} of a backward {m}x{n} {tile_}" + " wgmma" * hopper


def moe_routing_and_order() -> Iterator[str]:
    """Routing and its backward, of few tokens and of many, chosen and replayed; sorting by expert."""
    experts, slots, hidden = 128, 8, 2048
    for tokens in (64, 8192):
        x, weight = empty(tokens, hidden), empty(experts, hidden)
        routed = moe_routing.route(x, weight, slots, True, kernels=True)
        moe_dispatch.groups_of(routed.experts, experts, kernels=True)
        moe_routing.route_backward(routed.weights, routed, False, kernels=True)
        yield f"routing {tokens} tokens"
    moe_dispatch.groups_of(empty(4, slots, dtype=torch.int32), experts, kernels=True)
    yield "order of few"


def groups_of(experts: int, slots: int, tokens: int) -> Groups:
    """Who has which rows, without numbers."""
    pairs = empty(tokens * slots, dtype=torch.int32)
    return Groups(experts, slots, pairs, pairs, empty(experts + 1, dtype=torch.int32))


def moe_combinations() -> Iterator[str]:
    """From rows of slots to rows of tokens, and back."""
    experts, slots, hidden = 128, 8, 2048
    groups = groups_of(experts, slots, 4096)
    y, d, weights = empty(4096, hidden), empty(4096 * slots, hidden), empty(4096, slots, dtype=FP32)
    moe_combine.combine_backward(y, d, weights, groups, d)
    gather_rows.rows_in_order(y, groups)
    shared = Shared(y, moe_shared.shared_gate(y, empty(1, hidden), kernels=True))
    moe_combine.combine(d, weights, groups, shared)
    moe_combine.sum_over_slots(d, groups, y)
    yield "combine"
