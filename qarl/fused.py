"""Layers that an engine multiplies as one weight: q, k and v of an attention block, gate and up of an MLP.

Of a mixture of experts: gate and up of all experts of a layer, and down of all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from qarl_formats.scheme import Scheme

from qarl.experts import EXPERT_NAMES, experts_of

if TYPE_CHECKING:
    from torch import Tensor

# The projections of one input, in the order of their outputs.
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
    """Modules that are fused with one another, by full name; those that stand alone are left out."""
    groups: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for name in names:
        block, _, projection = name.rpartition(".")
        experts = experts_of(block)
        known = _GROUPS if experts is None else _OF_EXPERTS
        if projection in known:
            groups.setdefault((experts or block, known[projection]), []).append(name)
    return list(groups.values())


def shared_scales(modules: Iterable[str], scheme: Scheme, master: Callable[[str], Tensor]) -> dict[str, Tensor]:
    """Of each weight, by parameter name, what it is quantized with in common with those it is fused with.

    modules: the quantized ones. master: the float32 master of a parameter; asked for where the scheme shares anything.
    """
    found: dict[str, Tensor] = {}
    for group in fused_groups(modules):
        names = [f"{module}.weight" for module in group]
        shared = scheme.shared(master(name).detach() for name in names)
        if shared is not None:
            found |= dict.fromkeys(names, shared)
    return found
