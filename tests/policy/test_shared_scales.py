"""Layers that an engine multiplies as one weight are quantized with one global scale, in training and in exports."""

import pytest
import torch
from policy_models import make_policy
from qarl_formats.nvfp4 import absmax_of, global_scale_of

from qarl.inference.masters import open_masters
from qarl.inference.target import resolve_target
from qarl.utils.packed_linears import fused_groups
from qarl.weight_sync.snapshot import build_snapshot

FUSED = (("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), ("mlp.gate_proj", "mlp.up_proj"))
ALONE = ("self_attn.o_proj", "mlp.down_proj")


def test_modules_of_one_block_are_fused_and_others_stand_alone() -> None:
    names = [f"model.layers.{i}.{part}" for i in (0, 1) for group in (*FUSED, ALONE) for part in group]
    assert fused_groups(names) == [[f"model.layers.{i}.{part}" for part in group] for i in (0, 1) for group in FUSED]
    assert fused_groups(["lm_head", "model.layers.0.mlp.up_proj"]) == [["model.layers.0.mlp.up_proj"]]


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_nvfp4_layers_that_are_fused_share_the_global_scale_of_the_largest(tiny_model, family) -> None:
    policy = make_policy(tiny_model(family), "nvfp4a16", torch.bfloat16)
    masters = {name: master.detach() for name, master in policy.named_parameters()}
    for block in ("model.layers.0", "model.layers.1"):
        for group in (*FUSED, *((part,) for part in ALONE)):
            expected = global_scale_of(absmax_of(masters[f"{block}.{part}.weight"]) for part in group)
            for part in group:
                assert torch.equal(policy.current.tensors[f"{block}.{part}.weight_global_scale"], expected)
        scales = [policy.current.tensors[f"{block}.{part}.weight_scale"].float().amax() for part in FUSED[0]]
        assert max(scales) == 448 and min(scales) < 448  # one of them has the largest absmax


def test_an_export_has_the_codes_of_the_policy(tiny_model) -> None:
    target = resolve_target(str(tiny_model()), quant={"scheme": "nvfp4a16"})
    policy = make_policy(tiny_model(), "nvfp4a16", torch.bfloat16)
    exported = build_snapshot(0, open_masters(target).forms(target.quant, torch.bfloat16))
    assert exported.manifest() == policy.current.manifest()
