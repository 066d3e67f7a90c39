"""Sizes that depend on the device: null in a configuration, and a number in a run (`qarl.memory.sizes` decides)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    ByDevice = Any  # an int: what reads one of them has a configuration whose sizes are decided
    Recompute = Any  # a string, likewise
else:
    ByDevice = int | None
    Recompute = Literal["elementwise", "mlp", "products", "layer"] | None

# Keys of a configuration, and what null means on a CPU.
ON_CPU: dict[str, Any] = {
    "rollout.max_num_seqs": 64,
    "rollout.max_batched_tokens": 512,
    "train.micro_batch_tokens": 4096,
    "train.logprob_chunk": 128,
    "train.recompute": "elementwise",
}
