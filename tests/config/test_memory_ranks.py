"""Memory of one of several ranks, against counts written out by hand."""

import math
from dataclasses import replace

import pytest
from estimates import TINY, config

from qarl.config.architecture import Architecture
from qarl.config.mixture import Mixture
from qarl.config.quant import scheme_of
from qarl.distributed.rows import plan_of
from qarl.memory import estimate as memory
from qarl.memory.ranks import row_share, zero_elements
from qarl.memory.sizes import decide_sizes
from qarl.utils.expert_names import EXPERT_NAMES

LAYER = 64 * 64 + 2 * 32 * 64 + 64 * 64 + 3 * 128 * 64
OTHERS = 2 * 2 * 64 + 64 + 100 * 64
PARAMETERS = 2 * LAYER + OTHERS
QWEN3_8B = Architecture("qwen3", 4096, 12288, 36, 32, 8, 128, 151936, 40960, tied_embeddings=False)


def sizes(ranks, device="cuda", **sections) -> dict[str, int]:
    items = memory.estimate(config(**sections), TINY, device, ranks=ranks)
    return {item.name.split(" (")[0]: item.bytes for item in items}


@pytest.mark.parametrize("ranks", [2, 3, 7])
def test_experts_are_cut_as_one_tensor(ranks):
    of = Mixture(5, 2, 48, frozenset({1}), True, EXPERT_NAMES["qwen3_moe"])
    mixture = replace(TINY, family="qwen3_moe", mixture=of)
    scheme, inner = scheme_of(config().quant), {f"{name}.weight" for name, _, _ in mixture.linears()}
    plan = plan_of(dict(mixture.tensors()), lambda name: scheme if name in inner else None, ranks)
    assert [len(block) for block in plan.blocks if len(block) > 1] == [10, 5]
    held = [[math.prod(plan.shapes[n][1:]) * len(plan.cut(n)[rank]) for n in plan.shapes] for rank in range(ranks)]
    share = row_share(config(), mixture, ranks)
    assert share.parameters == sum(held[0]) == max(map(sum, held)) and sum(map(sum, held)) == mixture.parameters
    assert share.matrices == sum(size for name, size in zip(plan.shapes, held[0], strict=True) if name in inner)


def test_rows_share_masters_gradients_and_state_unless_offloaded():
    share = row_share(config(), TINY, 2).parameters
    found = sizes(2)
    assert found["master weights"] == found["gradients"] == 4 * share
    assert found["optimizer state"] == 8 * share
    # The output layer and two layers, and half of them from the other rank.
    assert found["gradients in transfer between ranks"] == (6400 + 2 * LAYER) * 4 * 3 // 2
    assert "gradients in transfer between ranks" not in sizes(1)
    for name in ("codes and scales", "next version, in addition to the current one"):
        assert found[name] == sizes(1)[name]
    moments, everything = (sizes(2, optim={"offload": what}) for what in ("moments", "all"))
    assert moments["master weights"] == 4 * row_share(config(), TINY, 2).parameters
    assert "master weights" not in everything and everything["gradients"] == moments["gradients"]


@pytest.mark.parametrize(
    ("stage", "masters", "gradients", "state"), [(0, 1, 1, 1), (1, 1, 1, 2), (2, 1, 2, 2), (3, 2, 2, 2)]
)
def test_what_each_zero_stage_shards(stage, masters, gradients, state):
    found = [share.parameters for share in zero_elements(TINY, stage, 2)]
    assert found == [PARAMETERS // masters, PARAMETERS // gradients, PARAMETERS // state]
    items = sizes(2, distributed={"engine": "deepspeed", "zero_stage": stage})
    assert items["master weights"] == 4 * found[0] and items["optimizer state"] == 8 * found[2]
    assert ("second copy of this rank's masters" in items) == (stage > 0)
    if stage == 3:
        assert items == sizes(2, distributed={"engine": "deepspeed"})  # the default


def test_ranks_free_memory_for_less_recomputation():
    null = {"micro_batch_tokens": None, "recompute": None, "logprob_chunk": None}
    own = config(quant={"group_size": 128}, train=null, rollout={"max_response_length": 1024})
    alone, shared = (decide_sizes(own, "cuda", QWEN3_8B, 141 * 2**30, ranks).train for ranks in (1, 8))
    modes = ["elementwise", "mlp", "products", "layer"]
    assert alone.recompute == "layer" and modes.index(shared.recompute) < 3
