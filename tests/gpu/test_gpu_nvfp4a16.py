"""What only a GPU can show of nvfp4a16 beside `test_gpu_kernels.py`: float16, exact decoding, codes of masters."""

import pytest
import torch
from nvfp4_products import Nvfp4
from products import random
from qarl_formats import nvfp4 as formats
from qarl_kernels import gemm, nvfp4, nvfp4_weights, nvfp4a16

pytestmark = pytest.mark.usefixtures("full_float32_products")

CUDA = torch.device("cuda")
BF16 = torch.bfloat16
# (N, K): SmolLM2's, one with K of no whole tile, a large one, the longest K of Llama-3-70B
SHAPES = [(576, 1536), (1536, 576), (1000, 1008), (6144, 4096), (1024, 28_672)]


def master(n: int, k: int) -> torch.Tensor:
    """float32 (N, K) whose groups are of many sizes."""
    groups = torch.rand(n, k // 16, generator=torch.Generator().manual_seed(4)).mul_(6).neg_().exp_()
    return random(n, k, seed=3, device="cpu") * groups.repeat_interleave(16, 1)


def test_under_a_global_scale_that_is_a_power_of_two_it_is_dense_on_the_dequantized_weight() -> None:
    weight = Nvfp4.random(1000, 2048, device=CUDA)
    weight.global_scale = torch.tensor([4096.0], device=CUDA)
    wide = nvfp4_weights.dequantize_nvfp4(*weight.stored(), BF16)
    x = random(5000, 2048, seed=3, device=CUDA, dtype=BF16)
    for rows in (1, 16, 64, 300, 5000):
        y = nvfp4a16.nvfp4a16(x[:rows], *weight.stored(), *weight.tiled())
        assert torch.equal(y, gemm.dense(x[:rows], wide))


@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_masters_give_the_codes_and_scales_that_a_cpu_computes(n: int, k: int) -> None:
    weight = master(n, k)
    divisor = formats.global_scale_of([formats.absmax_of(weight)])
    expected = formats.quantize_nvfp4(weight, divisor)
    on_device = weight.to(CUDA)
    assert torch.equal(formats.global_scale_of([formats.absmax_of(on_device)]).cpu(), divisor)
    packed, scale, bad = nvfp4_weights.quantize_nvfp4(on_device, divisor.to(CUDA))
    assert bad.item() == 0 and torch.equal(packed.cpu(), expected[0])
    assert torch.equal(scale.cpu().view(torch.uint8), expected[1].view(torch.uint8))
    plain = formats.quantize_nvfp4(on_device, divisor.to(CUDA))
    assert torch.equal(packed, plain[0]) and torch.equal(scale.view(torch.uint8), plain[1].view(torch.uint8))
    for dtype in (BF16, torch.float16, torch.float32):
        values = nvfp4_weights.dequantize_nvfp4(packed, scale, divisor.to(CUDA), dtype)
        assert torch.equal(values.cpu(), nvfp4.dequantized_nvfp4(*expected, divisor, dtype))
