"""Tensors of experts, joined to two stacks and separated again."""

import pytest
import torch
from qarl_formats.registry import make_scheme
from qarl_formats.weight import quantize_weight
from torch import Tensor

from qarl.utils.expert_names import expert_stacks
from qarl.weight_sync.expert_tensors import join_experts, part_experts

EXPERTS = "model.layers.1.mlp.experts"
LEAVES = {"w13": ("gate_proj", "up_proj"), "w2": ("down_proj",)}


def published(scheme: str, group: int | None, count: int = 3, apart: bool = False) -> dict[str, Tensor]:
    """A layer as it is published: names in layer order. apart: no tensor lies beside another in memory."""
    made, generator = make_scheme(scheme, group), torch.Generator().manual_seed(0)
    stacks = {stem: torch.randn(count * len(leaves) * 32, 64, generator=generator) for stem, leaves in LEAVES.items()}
    parts = {
        f"{EXPERTS}.{i // len(leaves)}.{leaves[i % len(leaves)]}": form
        for stem, leaves in LEAVES.items()
        for i, form in enumerate(quantize_weight(stacks[stem], made, stem).split([32] * count * len(leaves)))
    }
    names = [f"{EXPERTS}.{i}.{leaf}" for i in range(count) for leaves in LEAVES.values() for leaf in leaves]
    tensors = {
        "model.embed_tokens.weight": torch.randn(8, 64),
        "model.layers.1.mlp.gate.weight": torch.randn(count, 64),
    }
    for name in names:
        for suffix, tensor in parts[name].tensors.items():
            tensors[f"{name}.{suffix}"] = tensor.clone() if apart else tensor
    return tensors | {"model.norm.weight": torch.randn(64)}


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize(("scheme", "group"), [("w4a16", 32), ("w8a8", None), ("nvfp4a16", None)])
def test_experts_are_sent_as_two_stacks_and_separated_again(scheme, group, apart) -> None:
    tensors = published(scheme, group, apart=apart)
    joined = join_experts(tensors)
    suffixes = [name.removeprefix(f"{EXPERTS}.0.gate_proj.") for name in tensors if ".0.gate_proj." in name]
    assert list(joined) == [
        "model.embed_tokens.weight",
        "model.layers.1.mlp.gate.weight",
        *(f"{EXPERTS}.{stem}.{suffix}" for stem in LEAVES for suffix in suffixes),
        "model.norm.weight",
    ]
    again = dict(part_experts(joined.items(), expert_stacks(EXPERTS, 3)))
    assert again.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert again[name].dtype == tensor.dtype, name
        assert torch.equal(again[name].view(torch.uint8), tensor.view(torch.uint8)), name


@pytest.mark.parametrize("other", [None, torch.zeros(16, 64, dtype=torch.int8), torch.zeros(32, 64)])
def test_experts_that_are_not_all_alike_stay_as_they_are(other) -> None:
    tensors = published("w8a8", None)
    name = f"{EXPERTS}.1.up_proj.weight"
    if other is None:
        del tensors[name]
    else:
        tensors[name] = other
    joined = join_experts(tensors)
    apart = [n for n in tensors if n.endswith(("gate_proj.weight", "up_proj.weight"))]
    assert all(joined[n] is tensors[n] for n in apart)
    assert f"{EXPERTS}.w13.weight" not in joined and f"{EXPERTS}.w2.weight" in joined
