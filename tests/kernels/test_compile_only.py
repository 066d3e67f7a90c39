"""Every kernel compiles for the GPUs we support: it fits shared memory, nothing spills, products run on tensor cores.

Needs no GPU: see `compiling.py`. The two kernels below test the harness itself.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl
from compiling import Compiled, Compiler
from qarl_kernels.launch import launch, tma_descriptor

# "module:function" of a generator that calls kernels' wrappers and yields a label after each call, the capabilities
# it is compiled for, and for each one the tensor cores' instruction that every kernel must have (None: no demand).
# Without FP8 the code of sm_80 is what Ada runs, but for registers, of which sm_89 spills up to 76 bytes in the
# forwards of attention, heads of 128 in two chunks; FP8 begins at sm_89.
# Kernels without products have no branch for Hopper: they are compiled for the older GPU, of their largest shape.
CASES: list[tuple[str, dict[tuple[int, int], str | None]]] = [
    ("compile_cases:integer_weights", {(8, 0): None}),
    ("compile_cases:int8_activations", {(8, 0): None}),
    ("compile_cases:fp8_weights", {(8, 9): None}),
    ("compile_cases:fp8_activations", {(8, 9): None}),
    ("compile_cases:digests", {(8, 0): None}),
    ("compile_cases:exponentials", {(8, 0): None}),
    ("compile_cases:draws", {(8, 0): None}),
    ("compile_cases:norms", {(8, 0): None}),
    ("compile_cases:rotaries", {(8, 0): None}),
    ("compile_cases:gates", {(8, 0): None}),
    ("compile_cases:fused_quantization:int8", {(8, 0): None}),
    ("compile_cases:fused_quantization:fp8:fp8_group", {(8, 9): None}),
    ("compile_cases:products:dense", {(8, 0): "HMMA", (9, 0): None, (12, 0): "HMMA"}),
    ("compile_cases:products:w4a16", {(8, 0): "HMMA", (9, 0): None}),
    ("compile_cases:products:w4a8", {(8, 0): "IMMA", (9, 0): None}),
    ("compile_cases:products:w8a8", {(8, 0): "IMMA", (9, 0): None, (12, 0): "IMMA"}),
    ("compile_cases:products:fp8:fp8_block", {(8, 9): "QMMA", (9, 0): "QGMMA"}),
    ("compile_cases:groups_and_dtypes", {(8, 0): None}),  # on Hopper w4a16 and w4a8 have the same kernels
    ("compile_cases:fp4_weights", {(8, 0): None}),
    ("compile_cases:head_statistics", {(8, 0): None, (9, 0): None}),
    ("compile_cases:head_gradients", {(8, 0): "HMMA", (9, 0): "HGMMA"}),
    ("compile_cases:fp8_backward_codes", {(8, 9): None}),
    ("compile_cases:fp8_backward_products", {(8, 9): "QMMA", (9, 0): "QGMMA"}),
    ("compile_cases:attention_forward", {(8, 0): "HMMA", (9, 0): "HGMMA"}),
    ("compile_cases:attention_backward", {(8, 0): None, (9, 0): None}),
    ("compile_cases:attention_paged", {(8, 0): None, (9, 0): None}),
    ("compile_cases:attention_decode", {(8, 0): None, (9, 0): None}),
    ("compile_cases:fp8_kv_cache", {(8, 9): None, (9, 0): None}),
    ("compile_cases:fp4", {(8, 0): "HMMA", (9, 0): None}),
    ("compile_cases:moe_routing_and_order", {(8, 0): None}),
    ("compile_cases:moe_combinations", {(8, 0): None}),
    ("compile_grouped:dense", {(8, 0): "HMMA", (9, 0): None}),
    ("compile_grouped:all_tiles:w8a8", {(8, 0): "IMMA", (9, 0): None}),
    ("compile_grouped:all_tiles:fp8:fp8_block", {(8, 9): "QMMA", (9, 0): "QGMMA"}),
    ("compile_grouped:int4", {(8, 0): "HMMA", (9, 0): None}),
    ("compile_grouped:all_tiles:w4a8", {(8, 0): "IMMA", (9, 0): None}),
]


CAPABILITIES = [(8, 0), (9, 0)]  # of the two kernels below
PRODUCTS, OTHERS = 2, 1  # specialisations per kernel on Hopper, see `spread`
ALIKE = ("attention_paged", "grouped")  # kernels of other cases with other addresses
COPIES = {"_copy_kernel"}  # puts rows in order before a product


@pytest.fixture(scope="module")
def compiler() -> Compiler:
    return Compiler()


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("case", "opcodes"), CASES, ids=[case for case, _ in CASES])
def test_kernels_compile_fit_and_do_not_spill(
    case: str, opcodes: dict[tuple[int, int], str | None], compiler: Compiler, tmp_path: Path
) -> None:
    # Products have tiles of their own per shape; other kernels differ in little but dtypes.
    own = not any(name in case for name in ALIKE)
    most = PRODUCTS if own and (any(opcodes.values()) or "attention" in case) else OTHERS
    kernels = compiler.compile(case, tmp_path, list(opcodes), most=most)
    problems = [problem for kernel in kernels for problem in kernel.problems()]
    for kernel in kernels:
        opcode = opcodes[kernel.capability]
        if opcode is not None and not kernel.error and opcode not in kernel.products:
            problems.append(f"{kernel.name}: no {opcode}")
        multiplies = not kernel.error and kernel.kernel not in COPIES
        if kernel.label.endswith("wgmma") and multiplies and not kernel.count("wgmma.mma_async"):
            problems.append(f"{kernel.name}: no warpgroup product, as meant")
    assert {kernel.capability for kernel in kernels} == set(opcodes), f"{case}: launched nothing for a capability"
    assert not problems, "\n".join(problems)


@triton.jit
def _product(x, w, out, K, stride, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    row, column = tl.program_id(0) * BM, tl.program_id(1) * BN
    acc = tl.zeros([BM, BN], dtype=tl.float32)
    for k in range(0, K, BK):
        acc = tl.dot(x.load([row, k]), w.load([column, k]).T, acc)
    rows, columns = row + tl.arange(0, BM), column + tl.arange(0, BN)
    tl.store(out + rows[:, None] * stride + columns[None, :], acc.to(out.dtype.element_ty))


@triton.jit
def _hungry(x, out, BLOCK: tl.constexpr):
    """Holds BLOCK values in the registers of few threads."""
    offsets = tl.arange(0, BLOCK)
    values = tl.load(x + offsets)
    tl.store(out + offsets, values - tl.max(values))


@triton.jit
def _wrong(x, BLOCK: tl.constexpr):
    tl.store(x + tl.arange(0, BLOCK), tl.zeros([BLOCK, 2], dtype=tl.float32))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_attention_sums_e4m3_in_the_order_of_16_bits(compiler: Compiler, tmp_path: Path) -> None:
    kernels = compiler.compile("compile_cases:fp8_kv_cache", tmp_path, [(8, 9), (9, 0)], most=OTHERS)
    warps = [kernel for kernel in kernels if kernel.count("mma.sync")]
    assert {(kernel.kernel, kernel.capability) for kernel in warps} >= {
        ("decode_kernel", (8, 9)),
        ("decode_kernel", (9, 0)),
        ("attention_kernel", (8, 9)),
    }
    assert all(kernel.adjacent == [2] for kernel in warps), [(kernel.name, kernel.adjacent) for kernel in warps]
    # A decode of pairs widens them in the registers that its products read: 16 kB more would go through shared memory.
    for kernel in warps:
        if kernel.kernel == "decode_kernel" and kernel.constants["D"] == "128":
            assert kernel.count("ldmatrix") and kernel.count("st.shared") < 20, kernel.name
    # Codes are made in pairs: where they are shifted apart and joined again, ptxas loses some.
    writers = [kernel for kernel in kernels if kernel.kernel == "_rotary_kernel"]
    assert writers and all(kernel.count("cvt.rn.satfinite.e4m3x2") for kernel in writers)
    assert not any(kernel.count("shr.u16") for kernel in writers)


def product_launches() -> Iterator[str]:
    x, w = torch.empty(256, 512, dtype=torch.bfloat16), torch.empty(384, 512, dtype=torch.bfloat16)
    blocks = {"BM": 128, "BN": 128, "BK": 64}
    operands = {"x": tma_descriptor(x, (128, 64)), "w": tma_descriptor(w, (128, 64)), "out": torch.empty(256, 384)}
    for stages in (3, 9):  # a stage of x and w takes 32 KiB
        launch(_product, (2, 3), num_stages=stages, **operands, K=512, stride=384, **blocks)
        launch(_product, (4, 3), num_stages=stages, **operands, K=1024, stride=384, **blocks)  # the same kernel
        yield f"{stages} stages"
    launch(_product, (2, 3), **operands, K=500, stride=1, **blocks)
    yield "odd"


def hungry_launches() -> Iterator[str]:
    x = torch.empty(16_384)
    for warps in (16, 1):
        launch(_hungry, (1,), num_warps=warps, x=x, out=torch.empty_like(x), BLOCK=16_384)
        yield f"{warps} warps"
    launch(_wrong, (1,), x=x, BLOCK=16)
    yield "wrong"


@pytest.fixture(scope="module")
def products(
    compiler: Compiler, tmp_path_factory: pytest.TempPathFactory
) -> dict[tuple[str, tuple[int, int]], Compiled]:
    cache = tmp_path_factory.mktemp("products")
    kernels = compiler.compile("test_compile_only:product_launches", cache, CAPABILITIES)
    found = {(kernel.label, kernel.capability): kernel for kernel in kernels}
    assert len(found) == len(kernels) == 6, "launches that differ in numbers alone are one kernel"
    return found


def test_products_run_on_tensor_cores(products) -> None:
    for capability in CAPABILITIES:
        kernel = products["3 stages", capability]
        assert not kernel.error and 0 < kernel.registers <= 255
        assert kernel.products == {"HGMMA" if capability == (9, 0) else "HMMA"}, kernel.name
    tma = "cp.async.bulk.tensor"
    assert products["3 stages", (9, 0)].count(tma) and not products["3 stages", (9, 0)].problems()
    constants = products["odd", (9, 0)].constants
    assert constants == {"stride": "1", "BM": "128", "BN": "128", "BK": "64"}, "as the JIT specialises"
    assert "stride" not in products["3 stages", (9, 0)].constants


def test_too_much_shared_memory_spills_and_errors_are_problems(products, compiler: Compiler, tmp_path: Path) -> None:
    (problem,) = products["9 stages", (9, 0)].problems()
    assert "shared memory, a block has 232448" in problem and "_product sm_90" in problem
    (problem,) = Compiled("a", "k", (9, 0), {}, {}, serialized=True).problems()
    assert problem == "a: k sm_90 {} {}: wgmma instructions are serialised"
    kernels = compiler.compile("test_compile_only:hungry_launches", tmp_path, [(9, 0)])
    wide, narrow, wrong = kernels
    assert wide.problems() == [] and wide.count("ld.global.v4") > 0 and wide.stack == 0
    assert narrow.spill_stores > 0 and narrow.spill_loads > 0 and narrow.stack > 0
    assert "spills" in narrow.problems()[0] and narrow.error == ""
    assert "_wrong sm_90" in wrong.problems()[0] and wrong.error.startswith("CompilationError")
