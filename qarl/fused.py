"""Layers that an engine multiplies as one weight: q, k and v of an attention block, gate and up of an MLP."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from qarl_formats.scheme import Scheme

if TYPE_CHECKING:
    from torch import Tensor

# The projections of one input, in the order of their outputs.
QKV = ("q_proj", "k_proj", "v_proj")
GATE_UP = ("gate_proj", "up_proj")

_GROUPS = {projection: group for group in (QKV, GATE_UP) for projection in group}


def fused_groups(names: Iterable[str]) -> list[list[str]]:
    """Modules that are fused with one another, by full name; those that stand alone are left out."""
    groups: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for name in names:
        block, _, projection = name.rpartition(".")
        if projection in _GROUPS:
            groups.setdefault((block, _GROUPS[projection]), []).append(name)
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
