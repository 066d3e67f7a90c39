"""A model's published tensors split over several GPUs: each part decodes to its part of the weight."""

import sys
from pathlib import Path

import pytest
import torch
from pairwise import pairwise
from qarl_formats.weight import LowBitWeight, quantize_weight

from qarl.errors import UserError
from qarl.rollout.vllm.own_kernels.tensor_parallel import Shard, shard_fingerprints, shard_of
from qarl.weight_sync.fingerprints import fingerprints

sys.path.append(str(Path(__file__).parents[1] / "distributed"))
from test_codes import SCHEMES

N, K = 256, 512
MODULES = ["self_attn.k_proj", "mlp.gate_proj", "self_attn.o_proj", "mlp.down_proj"]


@pytest.mark.parametrize(
    ("scheme", "module", "count"), pairwise([name for name in SCHEMES if name != "bf16"], MODULES, [2, 4])
)
def test_a_part_of_the_stored_tensors_is_what_that_part_of_the_weight_stores(scheme, module, count) -> None:
    n = 1024 if scheme == "fp8_block" else N
    whole = quantize_weight(torch.randn(n, K, generator=torch.Generator().manual_seed(0)), SCHEMES[scheme], "w")
    wanted = whole.dequantize(torch.float64)
    parts = []
    for index in range(count):
        shard = Shard(index, count)
        tensors = {s: shard_of(f"model.layers.0.{module}.{s}", t, shard).clone() for s, t in whole.tensors.items()}
        shape = (n, K // count) if module.endswith(("o_proj", "down_proj")) else (n // count, K)
        if "weight_shape" in tensors:
            assert torch.equal(tensors["weight_shape"], whole.tensors["weight_shape"])
            tensors["weight_shape"] = torch.tensor(shape)
        parts.append(LowBitWeight(SCHEMES[scheme], tensors, shape).dequantize(torch.float64))
    assert torch.equal(torch.cat(parts, 1 if module.endswith(("o_proj", "down_proj")) else 0), wanted)


def test_tensors_that_are_not_quantized_are_cut_by_name() -> None:
    tensor = torch.arange(24.0).view(6, 4)
    last = Shard(1, 2)
    assert torch.equal(shard_of("model.layers.0.self_attn.q_proj.bias", tensor[:, 0], last), tensor[3:, 0])
    assert torch.equal(shard_of("model.layers.0.mlp.down_proj.weight", tensor, last), tensor[:, 2:])
    for name in ("model.norm.weight", "model.layers.0.self_attn.q_norm.weight", "model.layers.0.self_attn.o_proj.bias"):
        assert shard_of(name, tensor[:, 0], last).shape == (6,)
    assert shard_of("lm_head.weight", tensor, Shard()) is tensor


@pytest.mark.parametrize(("words", "count", "rows"), [(259, 2, [160, 99]), (128, 2, [64, 64]), (70, 4, [32, 32, 6, 0])])
def test_vocabularies_are_cut_as_vllm_pads_them(words, count, rows) -> None:
    tensor = torch.randn(words, 2)
    parts = [shard_of("model.embed_tokens.weight", tensor, Shard(i, count)) for i in range(count)]
    assert [len(part) for part in parts] == rows and torch.equal(torch.cat(parts), tensor)


def test_a_tensor_that_cannot_be_split_evenly_is_refused() -> None:
    with pytest.raises(UserError, match=r"'a.down_proj.weight' of shape .4, 6. cannot be split evenly into 4 parts"):
        shard_of("a.down_proj.weight", torch.empty(4, 6), Shard(0, 4))


def test_fingerprints_are_of_the_parts() -> None:
    tensors = {"model.layers.0.mlp.down_proj.weight": torch.randn(4, 6), "model.norm.weight": torch.randn(4)}
    shape = {"model.layers.0.mlp.up_proj.weight_shape": torch.tensor([4, 6])}  # the same in every part and version
    found = shard_fingerprints((tensors | shape).items(), Shard(1, 3))
    wanted = {"model.layers.0.mlp.down_proj.weight": tensors["model.layers.0.mlp.down_proj.weight"][:, 2:4].clone()}
    assert found == fingerprints((wanted | {"model.norm.weight": tensors["model.norm.weight"]}).items())
