"""The tensors of a layer's experts as few large ones: how they travel to a sampler and are proved there.

A mixture has tens of thousands of small tensors; to name, send, look for and compare each takes longer than their
bytes do. So those of all experts go under one another, in the order in which vLLM holds them (`qarl.experts`):
`...experts.w13.weight_packed` has the codes of the first one's gate, its up, the second one's gate, ....
Checkpoints and exports have each by itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from qarl_formats.rows import concatenate_rows
from torch import Tensor

from qarl.experts import expert_stacks, experts_of

Members = Mapping[str, tuple[str, ...]]  # of a stack's name the modules that lie in it, in order


def join_experts(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Published tensors in their order, those of experts under one another, where the first of them was.

    Memory is shared where they lie so already. Tensors that not all experts of a layer have, or not all in one shape
    and dtype, stay as they are.
    """
    suffixes: dict[str, dict[str, None]] = {}  # by what holds the experts of a layer
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
        for stack, members in stacks_of(experts, last[experts] + 1).items():
            for suffix in found:
                names = [f"{member}.{suffix}" for member in members]
                its = [tensors[name] for name in names if name in tensors]
                if len(its) == len(names) and len({(tensor.shape, tensor.dtype) for tensor in its}) == 1:
                    joined[names[0]] = f"{stack}.{suffix}", concatenate_rows(its)
                    gone |= set(names)
    gone -= joined.keys()
    return dict(joined.get(name, (name, tensor)) for name, tensor in tensors.items() if name not in gone)


def part_experts(tensors: Iterable[tuple[str, Tensor]], members: Members) -> Iterator[tuple[str, Tensor]]:
    """The opposite: (name, tensor) of each expert by itself, as views. members: of the stacks that may come."""
    for name, tensor in tensors:
        module, _, suffix = name.rpartition(".")
        if module not in members:
            yield name, tensor
            continue
        its = members[module]
        parts = tensor.split(len(tensor) // len(its))
        yield from ((f"{member}.{suffix}", part) for member, part in zip(its, parts, strict=True))


def stacks_of(experts: str, count: int) -> dict[str, tuple[str, ...]]:
    """The stacks of a layer by name, each with its members. experts: what holds all experts
    (`model.layers.0.mlp.experts`), so many."""
    return {f"{experts}.{stem}": members for stem, members in expert_stacks(experts, count).items()}
