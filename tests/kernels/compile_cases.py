"""What `test_compile_only.py` compiles: generators that call kernels' wrappers and yield a label after each call.

Tensors live on the meta device: they have types, shapes and strides, and addresses that count as aligned.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TypeVar
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


def empty(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


Shape = TypeVar("Shape")


def for_this_gpu(shapes: Sequence[Shape]) -> Sequence[Shape]:
    """Shapes of kernels without products: the first for Hopper, the last before it."""
    return shapes[:1] if on_hopper() else shapes[-1:]


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
    swiglu.swiglu_backward(product, gate_up, True, gate_up)
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
    yield from fused_quantization("fp8", "fp8_group")
    n, k = 12_288, 2048
    for of_rows, of_columns in ((True, True), (True, False), (False, True)):
        fp8_backward.quantize(empty(4000, n), None, rows=of_rows, columns=of_columns)
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
    """Rotations that round keys and values to e4m3, and attention that reads them from a cache.

    A prefill of several chunks with heads of 128 spills 900 bytes on sm_89, whatever the tile.
    """
    for head_dim, normed in for_this_gpu(((64, False), (128, True))):
        qkv, table = empty(4096, 40 * head_dim), empty(4096, head_dim)
        positions = empty(4096, dtype=torch.int64)
        cache = empty(300, 4, 64, head_dim, dtype=torch.float8_e4m3fn)
        norm = empty(head_dim) if normed else None
        rotation = rotary.Rotation(32, 4, head_dim, table, table, positions, norm, norm, 1e-6, kv_fp8=True)
        rotary.rotary_forward(qkv, rotation)
        for rows_ in (8, 4096):
            rotary.rotary_into_pages(qkv[:rows_], rotation, cache, cache, positions)
        yield f"rotary {head_dim} into FP8"
    pages = [[0], list(range(1, 127)), list(range(127, 260))]
    last = 2000 if on_hopper() else 1000
    layout, _ = flash_paged.paged_layout([0, 5, 6], [5, 1, last], [0, 2000, 0], pages, torch.device("cpu"))
    for dim in (128, 96, 256) if on_hopper() else (128,):
        cache = empty(300, 8, 64, dim, dtype=torch.float8_e4m3fn)
        if dim != 96:  # whose features are not in pairs
            flash_paged.paged_attention(empty(layout.tokens, 16, dim), cache, cache, layout, dim**-0.5)
        table, lengths = empty(8, 128, dtype=torch.int32), empty(8, dtype=torch.int32)
        flash_paged.decode_attention(empty(8, 16, dim), cache, cache, table, lengths, dim**-0.5, None, 8192)
        yield f"attention over FP8 {dim}"


def fused_quantization(*activations: rows.Activation) -> Iterator[str]:
    """Quantization inside the norm and the gate."""
    for activation in activations:
        h = 16_384
        fused_norm.add_rms_norm(empty(4096, h), empty(4096, h), empty(h), 1e-6, activation, True)
        yield f"quantizing norm {activation} {h}"
        i = 32_768
        swiglu.swiglu(empty(4096, 2 * i), activation)
        yield f"quantizing gate {activation} {i}"


def most_demanding(tiles: Iterable[tuning.Tile]) -> list[tuning.Tile]:
    """Of each kind of tile, the one with the most registers per thread and the one with the most shared memory.

    What fails to compile, spills or does not fit is one of these; a GPU has run every tile of the tables.
    """
    kinds: dict[tuple[object, ...], list[tuning.Tile]] = {}
    for tile_ in tiles:
        if tile_.way not in ("library", "dequantized"):
            kinds.setdefault((tile_.way, tile_.persistent, tile_.halves, tile_.tma, tile_.split), []).append(tile_)
    found: dict[tuning.Tile, None] = {}
    for same in kinds.values():
        found[max(same, key=lambda t: (t.block_m * t.block_n / t.warps, t.stages, t.block_k))] = None
        found[max(same, key=lambda t: ((t.block_m + t.block_n) * t.block_k * t.stages, t.block_m, -t.warps))] = None
    return list(found)


def products(*families: str) -> Iterator[str]:
    for family in families:
        yield from products_of(family)


def products_of(family: str) -> Iterator[str]:
    """The default tiles, and on Hopper the most demanding ones of the shipped tables and two on a ragged shape."""
    hopper = on_hopper()
    devices = sorted(path.stem for path in tuning.TABLES.glob("*.json")) * hopper
    shipped = [entry.tiles for d in devices for named, _, entry in entries(d, grouped=False) if named == family]
    tiles = dict.fromkeys(most_demanding(tile_ for held in shipped for _, tile_ in held if tile_ is not None))
    rows = (8, 16, 64, 256, 1024, 8192)
    tiles |= {tuning.default_tile(family, m, before_hopper=not hopper): None for m in rows}
    ragged = sorted(tiles, key=lambda t: -t.stages)[: 2 * hopper]
    for n, k in ((4096, 4096), (72, 112 if family == "nvfp4a16" else 100)):  # NVFP4 has groups of 16
        for tile_ in tiles if k == 4096 else ragged:
            if tile_.way in ("library", "dequantized"):
                continue
            product(family, None, n, k, False, tile_)
            yield f"{family} {n}x{k} {tile_}" + " wgmma" * (hopper and is_wgmma(tile_))


def is_wgmma(tile_: tuning.Tile) -> bool:
    """Whether a tile is meant for Hopper's warpgroup products: 64 rows of the operand that comes first."""
    first = tile_.block_m if tile_.way == "x_first" else tile_.block_n
    return tile_.way != "narrow" and first >= 64 and tile_.warps % 4 == 0


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


def groups_and_dtypes() -> Iterator[str]:
    """The fused int4 kernels with every group size, one of them in float16."""
    n, k = 4096, 4096
    for group, dtype in ((32, BF16), (64, torch.float16)):
        tiled = empty(n // 16, k // 128, 16, 16, dtype=torch.int32)
        rows = k // 128 * (128 // group)
        for way in (tuning.Tile("narrow", 16, 32, warps=2, stages=4), tuning.Tile("wide", 64, 64, stages=3)):
            x = empty(4096, k, dtype=dtype)
            meta, bias = empty(rows, n, dtype=torch.int32), empty(n, dtype=dtype)
            w4a16.w4a16(x, None, empty(n, 1, dtype=dtype), None, tiled, meta, bias, tile=way)
            yield f"w4a16 group {group} {way.way} {dtype}"
        x, scale_x = empty(4096, k, dtype=torch.int8), empty(4096, 1, dtype=FP32)
        tile_ = tuning.Tile("wide", 64, 64, stages=3)
        w4a8.w4a8(x, scale_x, tiled, empty(rows, n, dtype=FP32), k, n, None, BF16, tile=tile_)
        yield f"w4a8 group {group}"


def fp4() -> Iterator[str]:
    yield from products_of("nvfp4a16")
    for tile_ in (tuning.Tile("narrow", 16, 32, warps=2, stages=4), tuning.Tile("wide", 64, 64, stages=3)):
        x, bias = empty(4096, 4096, dtype=torch.float16), empty(4096, dtype=torch.float16)
        nvfp4a16.nvfp4a16(x, None, *scales_fp4(4096, 4096), *tiled_fp4(4096, 4096), bias, tile=tile_)
        yield f"nvfp4a16 float16 {tile_.way}"


def _attention_operands(dim: int, dtype: torch.dtype = BF16) -> tuple[Tensor, Tensor, Tensor]:
    """q (T, 16, D), and k and v (T, 8, D) as slices of one product's output."""
    qkv = empty(4600, 32 * dim, dtype=dtype)
    q, k, v = (part.view(4600, -1, dim) for part in qkv.split((16 * dim, 8 * dim, 8 * dim), 1))
    return q, k, v


def _attention_heads() -> list[tuple[int, torch.dtype, int | None]]:
    """Head sizes with dtype and window. A window adds to a kernel, so that one without compiles where one with it does.

    On Hopper all, one in float16; before it those of most models: 256 spills there.
    """
    if not on_hopper():
        return [(64, BF16, None), (128, BF16, 300)]
    return [(64, BF16, None), (96, torch.float16, None), (128, BF16, None), (128, BF16, 300), (256, BF16, None)]


def attention_forward() -> Iterator[str]:
    """Packed forward, in one chunk and in several."""
    layout = flash_layout.packed_layout([(600, [500] * 8)], torch.device("cpu"))
    for dim, dtype, window in _attention_heads():
        q, k, v = (t[: layout.tokens] for t in _attention_operands(dim, dtype))
        flash_forward.attention_forward(q, k, v, layout, dim**-0.5, window)
        # Before Hopper each head size has tiles of its own, so `spread` takes one launch of each.
        kind = "attention" if on_hopper() else f"attention-{dim}"
        yield f"{kind} forward {dim} {dtype} window {window}" + " wgmma" * on_hopper()


def attention_backward() -> Iterator[str]:
    """Heads of 256 with a window would spill 120 bytes with Triton 3.9, none with 3.6."""
    layout = flash_layout.packed_layout([(96, [500] * 8)], torch.device("cpu"))
    for dim, dtype, window in _attention_heads():
        q, k, v = (t[: layout.tokens] for t in _attention_operands(dim, dtype))
        out, lse = empty(*q.shape, dtype=dtype), empty(16, layout.tokens, dtype=FP32)
        flash_backward.attention_backward(out, q, k, v, out, lse, layout, dim**-0.5, window)
        yield f"attention backward {dim} {dtype} window {window}"


def attention_decode() -> Iterator[str]:
    """Decodes whose chunks are shared out, and of so many sequences that they are not; heads of every model known."""
    for dim, heads, kv_heads, sequences, window in (
        (64, 9, 3, 8, None),
        *[(128, 16, 8, 8, None), (128, 16, 8, 512, None)] * on_hopper(),
        (128, 32, 8, 512, 300),
        (256, 16, 8, 8, None),
    ):
        cache, lengths = empty(300, kv_heads, 64, dim), empty(sequences, dtype=torch.int32)
        table = empty(sequences, 128, dtype=torch.int32)
        q = empty(sequences, heads, dim)
        flash_paged.decode_attention(q, cache, cache, table, lengths, dim**-0.5, window, 8192)
        yield f"decode {dim} {heads} {sequences} window {window}"


def attention_paged() -> Iterator[str]:
    """Prefill of two spans and decode of one, pages of either order of axes."""
    pages = [[0], list(range(1, 127)), list(range(127, 260))]
    layouts = [
        flash_paged.paged_layout([0, 5, 5 + n], [5, n, 2000], [0, 2000, 0], pages, torch.device("cpu"))[0]
        for n in (1, 2)
    ]
    for dim, _, window in _attention_heads():
        if dim == 96:
            continue
        axis, shape = (1, (32, 8)) if dim == 64 else (2, (8, 16))
        cache, layout = empty(300, *shape, dim), layouts[dim > 128]
        flash_paged.paged_attention(empty(layout.tokens, 16, dim), cache, cache, layout, dim**-0.5, window, axis)
        yield f"attention paged {dim} axis {axis} window {window}"


def head_statistics() -> Iterator[str]:
    """Log-probs and entropies from hidden states, with the tile that runs; vocabularies with and without a rest."""
    targets = empty(4096, dtype=torch.int64)
    head.statistics(empty(4096, 2048), empty(151_936, 2048), targets, head.Logits(1.0, -3.0))
    yield "head 151936"
    for vocabulary, truncation in ((128_000, Truncation(min_p=0.05)), (151_936, Truncation(0.7))):
        head.fused_distribution(empty(64, 2048), empty(vocabulary, 2048), truncation)
        yield f"distribution {vocabulary} {truncation}"
    fp16 = {"dtype": torch.float16}
    head.statistics(empty(4096, 100, **fp16), empty(1000, 100, **fp16), targets, head.Logits(1.0, -3.0))
    yield "head float16, pointers"


def head_gradients() -> Iterator[str]:
    """The logits' gradient, with the tiles that run."""
    hopper = on_hopper()
    rows = 4096
    targets, row = empty(rows, dtype=torch.int64), empty(rows, dtype=FP32)
    found = head.Statistics(row, row, row, row)
    arriving = ((row, None, None), (row, row, None), (row, row, -3.0))
    for grad, grad_entropy, log_min_p in arriving:
        parts = targets, grad, grad_entropy, head.Logits(0.7, log_min_p), found
        head._logit_gradient(empty(rows, 2048), empty(8192, 2048), empty(rows, 8192), 8192, *parts)
        yield f"gradient {grad is not None} {grad_entropy is not None} {log_min_p}" + " wgmma" * hopper
    x, w = empty(rows, 100, dtype=torch.float16), empty(1000, 100, dtype=torch.float16)
    parts = targets, row, row, head.Logits(1.0, -3.0), found
    head._logit_gradient(x, w, empty(rows, 1000, dtype=FP32), 0, *parts)
    yield "gradient float16, pointers"


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
                fp8_backward._add_product(a, b, empty(m, n, dtype=FP32))
            yield f"backward product {m}x{n} {tile_}" + " wgmma" * hopper


# Experts, slots, features, features of an expert: of Mixtral, of one with many small experts, of Qwen3-30B-A3B.
MIXTURES = ((8, 2, 4096, 14_336), (512, 16, 1000, 500), (128, 8, 2048, 768))


def moe_routing_and_order() -> Iterator[str]:
    """Routing and its backward, of few tokens and of many, chosen and replayed; sorting by expert."""
    for experts, slots, hidden, _ in MIXTURES[-1:]:
        whole = experts == 128  # the others differ in how wide a tile is
        for tokens in (64, 8192) if whole else (64,):
            x, weight = empty(tokens, hidden), empty(experts, hidden)
            routed = moe_routing.route(x, weight, slots, True, kernels=True)
            if whole and tokens == 64:
                moe_routing.route(x, weight, slots, False, empty(tokens, slots, dtype=torch.int64), kernels=True)
                moe_routing.route_backward(routed.weights, routed, True, kernels=True)
            moe_dispatch.groups_of(routed.experts, experts, kernels=True)
            moe_routing.route_backward(routed.weights, routed, False, kernels=True)
            yield f"routing {experts} experts, {tokens} tokens"
        moe_dispatch.groups_of(empty(4, slots, dtype=torch.int32), experts, kernels=True)
        yield f"order of few, {experts} experts"


def groups_of(experts: int, slots: int, tokens: int) -> Groups:
    """Who has which rows, without numbers."""
    pairs = empty(tokens * slots, dtype=torch.int32)
    return Groups(experts, slots, pairs, pairs, empty(experts + 1, dtype=torch.int32))


def moe_combinations() -> Iterator[str]:
    """From rows of slots to rows of tokens, and back."""
    for experts, slots, hidden, _ in MIXTURES[-1:]:
        groups = groups_of(experts, slots, 4096)
        y, d, weights = empty(4096, hidden), empty(4096 * slots, hidden), empty(4096, slots, dtype=FP32)
        moe_combine.combine(d, weights, groups)
        moe_combine.combine_backward(y, d, weights, groups, d)
        gather_rows.rows_in_order(y, groups)
        shared = Shared(y, moe_shared.shared_gate(y, empty(1, hidden), kernels=True))
        moe_combine.combine(d, weights, groups, shared)
        moe_combine.shared_backward(y, shared, y)
        for added in (None, y):
            moe_combine.sum_over_slots(d, groups, added)
        yield f"combine {experts}x{hidden}"


# E, k, N, K and whether x is gathered: Qwen3-30B-A3B and Mixtral
EXPERTS = ((128, 8, 1536, 2048, True), (128, 8, 2048, 768, False), (8, 2, 28_672, 4096, True))


def _label(family: str, experts: int, n: int, k: int, tile_: tuning.Tile) -> str:
    return f"experts {family} {experts}x{n}x{k} {tile_}" + " wgmma" * (on_hopper() and is_wgmma(tile_))


class _Tiles:
    """Compiles each tile of a family once, with any number of stages: fewer stages take less shared memory.

    Whether rows are gathered and the number of experts change where a program begins, not what its loop holds, so no
    tile is compiled for two shapes. A tile that is used for both kinds of rows is compiled with gathered ones.
    """

    def __init__(self) -> None:
        self.done: set[tuple[str, tuning.Tile]] = set()

    def product(
        self, family: str, shape: tuple[int, int, int, int, bool], tokens: int, tile_: tuning.Tile
    ) -> Iterator[str]:
        key = family, replace(tile_, stages=1)
        if tile_.way != "dequantized" and key not in self.done:
            self.done.add(key)
            experts, slots, n, k, gathered = shape
            product(family, groups_of(experts, slots, tokens), n, k, gathered, tile_)
            yield _label(family, experts, n, k, tile_)

    def defaults(self, family: str) -> Iterator[str]:
        """Tiles that no table has chosen, from many rows per expert to few."""
        for shape in for_this_gpu(EXPERTS):
            experts, slots = shape[:2]
            for tokens in (65_536, 4096, 256, 16):
                tile_ = tuning.default_tile(family, tokens * slots, not on_hopper(), experts=experts)
                yield from self.product(family, shape, tokens, tile_)

    def tabled(self, family: str) -> Iterator[str]:
        """On Hopper: the most demanding tiles of the shipped tables."""
        if not on_hopper():
            return
        for gathered, shape in ((True, EXPERTS[0]), (False, EXPERTS[1])):
            shipped = [
                tile_
                for device in sorted(path.stem for path in tuning.TABLES.glob("*.json"))
                for named, tuned, entry in entries(device, grouped=True)
                if named == family and tuned.gathered == gathered
                for _, tile_ in entry.tiles
                if tile_ is not None
            ]
            for tile_ in most_demanding(shipped):
                yield from self.product(family, shape, 4096, tile_)


def all_tiles(*families: str) -> Iterator[str]:
    tiles = _Tiles()
    for family in families:
        yield from tiles.tabled(family)  # before the defaults: it has the most stages
        yield from tiles.defaults(family)


def grouped_dense() -> Iterator[str]:
    """16-bit products of few rows per expert and of many, and their backward; widths that no vector divides."""
    yield from all_tiles("dense", "input_grad", "weight_grad")
    if on_hopper():
        experts, slots, hidden, width = MIXTURES[1]
        for gathered, n, k in ((True, 2 * width, hidden), (False, hidden, width)):
            for family, each in (("dense", 4), ("input_grad", 1000), ("weight_grad", 1000)):
                given = groups_of(experts, slots, each * experts // slots)
                tile_ = tuning.default_tile(family, given.rows, False, experts=experts)
                product(family, given, n, k, gathered, tile_)
                yield _label(family, experts, n, k, tile_)


def grouped_int4() -> Iterator[str]:
    yield from all_tiles("w4a16", "nvfp4a16")
    experts, slots, n, k, _ = EXPERTS[0]
    given = groups_of(experts, slots, 65_536)
    tile_ = tuning.default_tile("dense", given.rows, not on_hopper(), experts=experts)
    x, weight = empty(65_536, k), empty(experts * n, k)
    scales = empty(len(x), 1, dtype=FP32), empty(len(weight), dtype=FP32)
    gemm.run(x, weight, *scales, None, empty(given.rows, n), tile_, given, True)
    yield f"experts nvfp4a16 dequantized {tile_}" + " wgmma" * on_hopper()
