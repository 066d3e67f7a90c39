"""Joins the many small tensors of a layer's experts into a few large ones for sending and verification.

A mixture has tens of thousands of small tensors, and the overhead per tensor exceeds the time for its bytes. So the
tensors of all experts are concatenated, in vLLM's order (`qarl.utils.expert_names`): `...experts.w13.weight_packed` has
the codes of the first expert's gate, its up, the second expert's gate, .... In checkpoints and exports they are
separate.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from qarl_formats.rows import concatenate_rows
from torch import Tensor

from qarl.utils.expert_names import expert_stacks, experts_of

Members = Mapping[str, tuple[str, ...]]  # joined name -> concatenated modules, in order


def join_experts(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Concatenate the tensors of all experts of a layer, at the position of the first. Other tensors keep their order.

    Views if they are adjacent in memory. Tensors that some experts of a layer lack, or have in another shape or dtype,
    stay as they are.
    """
    suffixes: dict[str, dict[str, None]] = {}  # by the module of a layer's experts
    last: dict[str, int] = {}
    for name in tensors:
        module, _, suffix = name.rpartition(".")
        expert = module.rpartition(".")[0]
        if (experts := experts_of(expert)) is not None:
            suffixes.setdefault(experts, {})[suffix] = None
            last[experts] = max(last.get(experts, 0), int(expert.rpartition(".")[2]))
    joined: dict[str, tuple[str, Tensor]] = {}  # by the name of the first member
    gone: set[str] = set()
    for experts, found in suffixes.items():
        for stack, members in expert_stacks(experts, last[experts] + 1).items():
            for suffix in found:
                names = [f"{member}.{suffix}" for member in members]
                parts = [tensors[name] for name in names if name in tensors]
                if len(parts) == len(names) and len({(tensor.shape, tensor.dtype) for tensor in parts}) == 1:
                    joined[names[0]] = f"{stack}.{suffix}", concatenate_rows(parts)
                    gone |= set(names)
    gone -= joined.keys()
    return dict(joined.get(name, (name, tensor)) for name, tensor in tensors.items() if name not in gone)


def part_experts(tensors: Iterable[tuple[str, Tensor]], members: Members) -> Iterator[tuple[str, Tensor]]:
    """Undo `join_experts`: yield (name, tensor) of each expert, as views.

    members: The modules of every joined name that `tensors` may contain.
    """
    for name, tensor in tensors:
        module, _, suffix = name.rpartition(".")
        if module not in members:
            yield name, tensor
            continue
        modules = members[module]
        parts = tensor.split(len(tensor) // len(modules))
        yield from ((f"{one}.{suffix}", part) for one, part in zip(modules, parts, strict=True))
