"""What only a GPU can show of the kernels: bits that do not depend on the batch, on every tile of the tables."""

import pytest
import torch
from products import MAKE, Int4, Weights, random, relative_error
from qarl_kernels import gemm, library, quantize, tuning, w4a16
from shipped_tables import entries

pytestmark = pytest.mark.usefixtures("full_float32_products")

CUDA = torch.device("cuda")
BF16 = torch.bfloat16
FAMILIES = tuning.FAMILIES
# (N, K): SmolLM2's, whose K are not multiples of 128; a tuned one; a vocabulary; the longest K of Llama-3-70B
SHAPES = [(576, 1536), (1536, 576), (6144, 4096), (1024, 28_672)]
ROWS = [1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 33, 64, 65, 100, 128, 129, 255, 256, 257, 500, 1000, 1024, 1025, 4096, 5000]
MOST = 8192


def linear(family: str, n: int, k: int, group: int = 64) -> Weights:
    more = {"w4a16": {"group": group, "asymmetric": True}, "w4a8": {"group": group}}.get(family, {})
    return MAKE[family](n, k, BF16, CUDA, 1, **more)


@pytest.mark.parametrize(
    ("family", "n", "k"), [*((family, *shape) for family in FAMILIES for shape in SHAPES), ("nvfp4a16", 1000, 1008)]
)
def test_a_row_has_the_same_bits_in_every_batch_and_place(family: str, n: int, k: int) -> None:
    layer = linear(family, n, k)
    x = random(MOST, k, seed=7, device=CUDA, dtype=BF16)
    whole = layer.product(x, 0)
    assert relative_error(whole[::37], layer.exact(x[::37], 0)) < 5e-3
    for rows in ROWS:
        for start in (0, 1, 37, MOST - rows):
            part = layer.product(x[start : start + rows], 0)
            assert torch.equal(part, whole[start : start + rows]), f"{rows} rows from {start}"
    shuffled = torch.randperm(MOST, generator=torch.Generator().manual_seed(1)).to(CUDA)
    assert torch.equal(layer.product(x[shuffled], 0), whole[shuffled])


@pytest.mark.parametrize("family", FAMILIES)
def test_every_tile_of_the_tables_gives_the_same_bits(family: str) -> None:
    """Many times over, because a product that reads a buffer too late goes wrong only now and then."""
    n, k = 1152, 4096
    layer = linear(family, n, k, group=128)
    x = random(700, k, seed=7, device=CUDA, dtype=BF16)
    whole = layer.product(x, 0)
    tables = [path.stem for path in tuning.TABLES.glob("*.json")]
    tiles = {
        tile
        for device in tables
        for f, _, entry in entries(device, grouped=False)
        if f == family
        for _, tile in entry.tiles
    }
    tiles |= {tuning.default_tile(family, m) for m in (1, 16, 64, 256, 4096)}
    assert len(tiles) >= 5
    for tile in tiles:
        for _ in range(20):
            if tile.way == "library":
                found = torch.full_like(whole, torch.nan)
                library.multiply(x, random(n, k, seed=2, device=CUDA, dtype=BF16), found)  # the weight of `linear`
            else:
                found = layer.product(x, 0, tile=tile)
            assert torch.equal(found, whole), str(tile)


def test_w4a16_is_dense_on_the_dequantized_weight() -> None:
    for group in (32, 64, 128):
        weight = Int4.random(1000, 2048, group, device=CUDA)
        form = weight.packed(), weight.scale, None, weight.tiled(), weight.meta(BF16)
        x = random(5000, 2048, seed=3, device=CUDA, dtype=BF16)
        for rows in (1, 16, 64, 300, 5000):
            assert torch.equal(w4a16.w4a16(x[:rows], *form), gemm.dense(x[:rows], weight.values(BF16)))


@pytest.mark.parametrize(("n", "k"), [(6144, 4096), (4096, 12_288)])
def test_fp8_has_the_bits_of_the_library_with_fast_accumulation(n: int, k: int) -> None:
    """So a learner on these kernels agrees with samplers that multiply FP8 the usual way."""
    codes = random(n, k, seed=2, device=CUDA).to(torch.float8_e4m3fn)
    scale = torch.rand(n, 1, device=CUDA) * 0.01
    for m in (16, 64, 512, 4096):
        qx, s = quantize.activation_codes(random(m, k, seed=m, device=CUDA, dtype=BF16), "fp8")
        ours = gemm.scaled(qx, s, codes, scale, None, BF16)
        theirs = torch._scaled_mm(qx, codes.t(), scale_a=s, scale_b=scale.t(), out_dtype=BF16, use_fast_accum=True)
        assert torch.equal(ours, theirs), m


def test_offsets_beyond_two_to_the_31(free_gib: float) -> None:
    if free_gib < 20:
        pytest.skip(f"needs 20 GiB of GPU memory, {free_gib:.0f} are free")
    m, n, k = 16_384, 151_936, 128
    x, w = random(m, k, seed=1, device=CUDA, dtype=BF16), random(n, k, seed=2, device=CUDA, dtype=BF16)
    y = gemm.dense(x, w)
    assert torch.equal(y[-3:], gemm.dense(x[-3:].clone(), w))


@pytest.fixture
def free_gib() -> float:
    return torch.cuda.mem_get_info()[0] / 2**30


@pytest.mark.parametrize("kind", ["forward_kl", "reverse_kl", "jsd"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_divergence_from_a_teacher(kind, dtype):
    """Beside autograd in float64 on the same 16-bit operands; ragged chunks, another width of the teacher."""
    from qarl_kernels.divergence import Divergence, token_divergence

    generator = torch.Generator("cuda").manual_seed(0)
    rows, width, other, vocabulary = 300, 128, 64, 1000
    hidden = torch.randn(rows, width, device="cuda", generator=generator).mul(0.3).to(dtype).requires_grad_()
    weight = torch.randn(vocabulary, width, device="cuda", generator=generator).mul(0.3).to(dtype)
    states = torch.randn(rows, other, device="cuda", generator=generator).mul(0.3).to(dtype)
    head = torch.randn(vocabulary, other, device="cuda", generator=generator).mul(0.3).to(dtype)
    master = weight.float().requires_grad_()
    value, agrees = token_divergence(hidden, master, weight, states, head, Divergence(kind), 128)
    scale = torch.linspace(0.0, 1.0, rows, device="cuda")
    (value * scale).sum().backward()

    h, w = hidden.detach().double().requires_grad_(), weight.double().requires_grad_()
    log_q, log_p = (h @ w.t()).log_softmax(-1), (states.double() @ head.double().t()).log_softmax(-1)
    q, p = log_q.exp(), log_p.exp()
    m = ((p + q) / 2).log()
    forward, reverse = (p * (log_p - log_q)).sum(-1), (q * (log_q - log_p)).sum(-1)
    jsd = ((p * (log_p - m)).sum(-1) + (q * (log_q - m)).sum(-1)) / 2
    expected = {"forward_kl": forward, "reverse_kl": reverse, "jsd": jsd}[kind]
    (expected * scale.double()).sum().backward()
    torch.testing.assert_close(value.double(), expected, rtol=1e-4, atol=1e-5)
    assert torch.equal(agrees, log_q.argmax(-1) == log_p.argmax(-1))
    for found, wanted in ((hidden.grad, h.grad), (master.grad, w.grad)):
        assert (
            found.double() - wanted
        ).norm() < 0.01 * wanted.norm()  # operands of the products are rounded to 16 bits
