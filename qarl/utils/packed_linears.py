"""Packed linears, which are multiplied as one weight: q, k and v of an attention block, gate and up of an MLP.

In a mixture of experts, gate and up of all experts of a layer are one, and down of all experts is another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING

from qarl_formats.scheme import Scheme, is_ignored

from qarl.utils.expert_names import EXPERT_NAMES, experts_of

if TYPE_CHECKING:
    from torch import Tensor

# Linears with the same input, in the order of their outputs.
QKV = ("q_proj", "k_proj", "v_proj")
GATE_UP = ("gate_proj", "up_proj")

_GROUPS = {projection: group for group in (QKV, GATE_UP) for projection in group}
_OF_EXPERTS = {
    projection: group
    for names in EXPERT_NAMES.values()
    for group in ((names.gate, names.up), (names.down,))
    for projection in group
}


def fused_groups(names: Iterable[str]) -> list[list[str]]:
    """Return the groups of modules that are fused, by full name; modules without a partner are left out."""
    groups: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for name in names:
        block, _, projection = name.rpartition(".")
        experts = experts_of(block)
        known = _GROUPS if experts is None else _OF_EXPERTS
        if projection in known:
            groups.setdefault((experts or block, known[projection]), []).append(name)
    return list(groups.values())


def fusion_fault(scheme: Scheme, ignore: list[str], rows: Mapping[str, int]) -> tuple[str, str] | None:
    """Find fused layers that vLLM cannot load.

    vLLM multiplies q, k and v as one weight, and also gate and up. Either all parts of such a weight are quantized or
    none, and no block of rows that shares a scale may span two parts.

    Args:
        scheme: Quantization scheme.
        ignore: Modules that are not quantized.
        rows: Output features of each Linear, by module name.

    Returns:
        The `quant` key that causes the error (`ignore` or `scheme`) and the reason, or None.
    """
    if not scheme.quantized:
        return None
    for names in fused_groups(rows):
        ignored = [name for name in names if is_ignored(name, ignore)]
        if 0 < len(ignored) < len(names):
            other = next(name for name in names if name not in ignored)
            return "ignore", f"vLLM fuses {ignored[0]}, which is ignored, with {other}, which is not"
        cut = next((name for name in names[:-1] if rows[name] % scheme.row_block), None)
        if cut is not None and not ignored:
            blocks = f"its {rows[cut]} rows are not a multiple of the block of {scheme.row_block} rows"
            return "scheme", f"vLLM fuses {cut} with {names[-1]}, and {blocks}"
    return None


def shared_scales(modules: Iterable[str], scheme: Scheme, master: Callable[[str], Tensor]) -> dict[str, Tensor]:
    """Return the values that fused weights share when they are quantized, by parameter name.

    Args:
        modules: Quantized modules.
        scheme: Quantization scheme.
        master: Returns the float32 master weight of a parameter; called only if the scheme shares values.
    """
    found: dict[str, Tensor] = {}
    for group in fused_groups(modules):
        names = [f"{module}.weight" for module in group]
        shared = scheme.shared(master(name).detach() for name in names)
        if shared is not None:
            found |= dict.fromkeys(names, shared)
    return found
