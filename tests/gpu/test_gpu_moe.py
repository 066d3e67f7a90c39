"""What only a GPU can show of a mixture's kernels: bits that depend on no batch and on no tile; graphs."""

import pytest
import torch
from mixtures import chosen, parts
from products import random
from qarl_formats.registry import make_scheme, scheme_names
from qarl_formats.weight import LowBitWeight, concatenate, quantize_weight
from qarl_kernels import gemm, tuning
from qarl_kernels.moe import dispatch, routing

CUDA = torch.device("cuda")
BF16 = torch.bfloat16
# E, k, N, K: features of Qwen3-30B-A3B with a quarter of its experts, all of its experts, Mixtral's features cut
SHAPES = [(32, 8, 1536, 2048), (32, 8, 2048, 768), (128, 8, 256, 512), (8, 2, 4096, 1792)]
TOKENS = [1, 17, 200, 6000]


@pytest.mark.parametrize(("experts", "slots", "n", "k"), SHAPES)
def test_a_row_has_the_bits_of_its_experts_own_product(experts: int, slots: int, n: int, k: int) -> None:
    weight = random(experts * n, k, seed=1, device=CUDA, dtype=BF16)
    for tokens in TOKENS:
        groups = dispatch.groups_of(chosen(tokens, slots, experts).to(CUDA), experts, kernels=True)
        x = random(tokens, k, seed=2, device=CUDA, dtype=BF16)
        result = gemm.dense(x, weight, groups=groups, gathered=True)
        in_order = x[groups.order.long() // slots]
        assert torch.equal(gemm.dense(in_order, weight, groups=groups, gathered=False), result)
        for tile in [tile for _, tile in tuning.GROUPED_DENSE] if tokens == 200 else []:
            assert torch.equal(gemm.dense(x, weight, groups=groups, gathered=True, tile=tile), result), tile
        for expert, rows, its in parts(groups):
            own = weight[expert * n : (expert + 1) * n]
            assert torch.equal(result[rows], gemm.dense(x[its], own)), (tokens, expert)


@pytest.mark.parametrize(("n", "k", "gathered"), [(1536, 2048, True), (2048, 768, False)])
@pytest.mark.parametrize("name", scheme_names())
def test_rows_of_every_scheme_have_those_bits_on_the_tiles_for_few_rows_and_for_many(
    name: str, n: int, k: int, gathered: bool
) -> None:
    scheme, experts, slots = make_scheme(name), 16, 4
    masters = random(experts, n, k, seed=1, device=CUDA)
    weights = [LowBitWeight.of_values(values) for values in masters.bfloat16()]
    if scheme.quantized:
        shared = scheme.shared(masters)
        weights = [quantize_weight(master, scheme, "w", True, shared) for master in masters]
    together, alone = concatenate(weights).prepare(BF16, True), [weight.prepare(BF16, True) for weight in weights]
    for tokens in [*TOKENS, 60]:
        groups = dispatch.groups_of(chosen(tokens, slots, experts).to(CUDA), experts, kernels=True)
        x = random(tokens if gathered else groups.rows, k, seed=2, device=CUDA, dtype=BF16)
        result = together.matmul(x, None, groups, gathered)
        for expert, rows, its in parts(groups):
            if rows.start < rows.stop:
                own = x[its] if gathered else x[rows]
                assert torch.equal(result[rows], alone[expert].matmul(own)), (tokens, expert)


@pytest.mark.parametrize(("experts", "slots", "hidden"), [(128, 8, 2048), (8, 2, 4096), (64, 8, 2048)])
def test_a_token_is_routed_with_the_same_bits_in_every_batch(experts: int, slots: int, hidden: int) -> None:
    x = random(3 * routing.FEW_TOKENS, hidden, seed=1, device=CUDA, dtype=BF16)  # on the tile for many
    weight = random(experts, hidden, seed=2, device=CUDA, dtype=BF16) * 0.02
    whole = routing.route(x, weight, slots, True, kernels=True)
    torch.testing.assert_close(whole.logits, x.float() @ weight.float().t(), rtol=1e-4, atol=1e-4)
    for rows in (slice(0, 1), slice(5, 6), slice(100, 133), slice(1000, 1000 + routing.FEW_TOKENS)):
        part = routing.route(x[rows], weight, slots, True, kernels=True)
        replayed = routing.route(x[rows], weight, slots, True, part.experts.flip(1).contiguous(), kernels=True)
        for name in ("logits", "experts", "weights"):
            assert torch.equal(getattr(part, name), getattr(whole, name)[rows]), name
            assert torch.equal(getattr(replayed, name), getattr(part, name)), name
