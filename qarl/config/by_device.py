"""Sizes that depend on the device: null in a configuration, resolved to a number by `qarl.memory.sizes` in a run."""

from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    ByDevice = Any  # an int for type checkers: code that reads a size gets a configuration with resolved sizes
    Recompute = Any  # a string, likewise
else:
    ByDevice = int | None
    Recompute = Literal["elementwise", "mlp", "products", "layer"] | None

# Configuration keys, and the value that null resolves to on a CPU.
ON_CPU: dict[str, Any] = {
    "rollout.max_num_seqs": 64,
    "rollout.max_batched_tokens": 512,
    "train.micro_batch_tokens": 4096,
    "train.logprob_chunk": 128,
    "train.recompute": "elementwise",
}
