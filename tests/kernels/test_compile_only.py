"""Every kernel compiles for the GPUs we support: it fits shared memory, nothing spills, products run on tensor cores.

Needs no GPU: see `compiling.py`.
"""

from pathlib import Path

import pytest
from compiling import Compiler

# "module:function" of a generator that calls kernels' wrappers and yields a label after each call, the capabilities
# it is compiled for, and for each one the tensor cores' instruction that every kernel must have (None: no demand).
# Without FP8 the code of sm_80 is what Ada runs, but for registers, of which sm_89 spills up to 76 bytes in the
# forwards of attention, heads of 128 in two chunks; FP8 begins at sm_89.
# Kernels without products have no branch for Hopper: they are compiled for the older GPU, of their largest shape.
# On Hopper: each kernel of products and attention, but not each format of experts, which tests/gpu has.
CASES: list[tuple[str, dict[tuple[int, int], str | None]]] = [
    ("compile_cases:elementwise", {(8, 0): None}),
    ("compile_cases:elementwise_fp8", {(8, 9): None}),
    ("compile_cases:products:dense:input_grad:weight_grad", {(8, 0): "HMMA", (9, 0): None}),
    ("compile_cases:products:dense", {(12, 0): "HMMA"}),
    ("compile_cases:products:nvfp4a16:w4a16", {(8, 0): "HMMA", (9, 0): None}),
    ("compile_cases:products:w8a8:w4a8", {(8, 0): "IMMA", (9, 0): None}),
    ("compile_cases:products:fp8:fp8_block", {(8, 9): "QMMA", (9, 0): "QGMMA"}),
    ("compile_cases:int4_in_float16", {(8, 0): None}),
    ("compile_cases:dequantized_experts", {(8, 0): "HMMA", (9, 0): "HGMMA"}),
    ("compile_cases:head_statistics", {(8, 0): None, (9, 0): None}),
    ("compile_cases:head_gradients", {(8, 0): "HMMA", (9, 0): "HGMMA"}),
    ("compile_cases:fp8_backward_products", {(8, 9): "QMMA", (9, 0): "QGMMA"}),
    ("compile_cases:attention_forward", {(8, 0): "HMMA", (9, 0): "HGMMA"}),
    ("compile_cases:attention_backward", {(8, 0): None, (9, 0): None}),
    ("compile_cases:attention_paged", {(8, 0): None, (9, 0): None}),
    ("compile_cases:fp8_kv_cache", {(8, 9): None, (9, 0): None}),
]

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
    kernels = compiler.compile(case, tmp_path, list(opcodes))
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


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_attention_sums_e4m3_in_the_order_of_16_bits(compiler: Compiler, tmp_path: Path) -> None:
    kernels = compiler.compile("compile_cases:fp8_kv_cache", tmp_path, [(8, 9), (9, 0)])
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
