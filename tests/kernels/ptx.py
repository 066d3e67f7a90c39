"""A few PTX instructions in Python, so that inline assembly can be tried without a GPU."""

import functools
import operator
import re

import torch

MASK = 0xFFFFFFFF


def run(text: str, inputs: dict[int, int]) -> dict[str, int]:
    """Registers after a block of inline assembly. inputs: 32-bit operands by number."""
    registers = {f"${number}": value & MASK for number, value in inputs.items()}

    def value(name: str) -> int:
        return registers[name] if name in registers else int(name, 0)

    for statement in re.sub(r"[{}\n]", " ", text).split(";"):
        opcode, _, operands = statement.strip().partition(" ")
        if not opcode or opcode == ".reg":
            continue
        target, *names = (name.strip() for name in operands.split(","))
        registers[target] = _do(opcode, [value(name) for name in names]) & MASK
    return registers


def _do(opcode: str, given: list[int]) -> int:
    match opcode:
        case "mov.b32":
            return given[0]
        case "shl.b32":
            return given[0] << given[1]
        case "shr.b32" | "shr.u32":
            return given[0] >> given[1]
        case "and.b32":
            return given[0] & given[1]
        case "lop3.b32":
            a, b, c, table = given
            sides = [(~a, a), (~b, b), (~c, c)]  # bit 4 i + 2 j + k of the table: where the bits of a, b, c are i, j, k
            terms = [sides[0][i >> 2] & sides[1][i >> 1 & 1] & sides[2][i & 1] for i in range(8) if table >> i & 1]
            return functools.reduce(operator.or_, terms, 0)
        case "prmt.b32":
            source = given[0] | given[1] << 32
            return sum((source >> 8 * (given[2] >> 4 * i & 7) & 0xFF) << 8 * i for i in range(4))
    dtype = {"fma.rn.bf16x2": torch.bfloat16, "fma.rn.f16x2": torch.float16}[opcode]
    a, b, c = (floats(word, dtype).double() for word in given)
    low, high = (a * b + c).to(dtype).view(torch.int16).tolist()  # float64 holds these products and sums exactly
    return (high & 0xFFFF) << 16 | (low & 0xFFFF)


def floats(word: int, dtype: torch.dtype) -> torch.Tensor:
    """The two 16-bit floats of a word, the low half first."""
    return torch.tensor([word & MASK], dtype=torch.uint32).view(torch.int16).view(dtype)
