"""Distribution of tensors to files, and sizes on the command line."""

import pytest
from qarl_formats.scheme import TensorSpec

from qarl.storage.shards import parse_size, plan_shards, shard_index


def specs(*sizes: int) -> dict[str, dict[str, TensorSpec]]:
    """A parameter of `size` bytes each, its scale among them."""
    return {
        f"p{i}": {f"p{i}.weight": TensorSpec((size - 2,), "int8"), f"p{i}.scale": TensorSpec((1,), "bfloat16")}
        for i, size in enumerate(sizes)
    }


def test_parameters_stay_whole_and_in_order_and_within_the_limit():
    shards = plan_shards(specs(10, 10, 5, 30, 4, 4), 20)
    assert [shard.parameters for shard in shards] == [["p0", "p1"], ["p2"], ["p3"], ["p4", "p5"]]
    assert [shard.file for shard in shards] == [f"model-0000{n}-of-00004.safetensors" for n in (1, 2, 3, 4)]
    assert list(shards[0].specs) == ["p0.weight", "p0.scale", "p1.weight", "p1.scale"]


def test_index_counts_tensor_bytes_and_names_each_file():
    index = shard_index(plan_shards(specs(10, 15), 20))
    assert index["metadata"] == {"total_size": 25}
    assert index["weight_map"]["p1.scale"] == "model-00002-of-00002.safetensors"
    assert len(index["weight_map"]) == 4


@pytest.mark.parametrize(
    "text, size", [("5GB", 5 * 10**9), ("1.5 MB", 1_500_000), ("2GiB", 2**31), ("300kb", 300_000), ("123", 123)]
)
def test_sizes(text, size):
    assert parse_size(text) == size
