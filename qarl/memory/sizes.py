"""What null means for `rollout.max_num_seqs`, `rollout.max_batched_tokens`, `train.micro_batch_tokens`,
`train.recompute` and `train.logprob_chunk`: how much the sampler and the learner do at once, and how much the learner
keeps of it. Imports no torch.

They change speed and memory, and in low bits also results; so they are decided once, stand as numbers in a run's
config.yaml, and a resumed run keeps them, on whatever device. On a CPU they are constants. On a GPU they follow
from its whole memory, not from what is free at the moment, so that the same machine gives the same numbers.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from qarl.config import Config, RolloutConfig
from qarl.config.architecture import Architecture
from qarl.config.by_device import ON_CPU
from qarl.memory.activations import logit_bytes
from qarl.memory.estimate import Device, estimate, kv_cache_bytes, kv_cache_width, phase_bytes

# vLLM's own defaults for a GPU (0.24 to 0.32; it has larger ones for more than 70 GiB). The native engine runs prefills
# beside decodes and not in one batch with them, so it gains nothing from longer ones.
SEQUENCES = 256
BATCHED_TOKENS = {"vllm": 8192, "native": 4096}
FEWEST_SEQUENCES = 64
# Of the GPU's memory, that the native engine's KV cache may take by itself, and that it takes for FEWEST_SEQUENCES.
KV_SHARE, MOST_KV_SHARE = 1 / 4, 1 / 2

# More tokens than the first gain nothing, and fewer than ENOUGH_TOKENS leave parts of a GPU idle.
MICRO_BATCH_TOKENS = (16384, 8192, 4096, 2048, 1024)
ENOUGH_TOKENS = 8192
RECOMPUTE = ("elementwise", "mlp", "products", "layer")  # from the fastest to the smallest
# Of the GPU's memory, that the estimate may reach: it leaves out fragments of freed memory, and kernels' code.
UPDATE_SHARE = 0.8
LOGPROB_ROWS = (4096, 2048, 1024, 512, 256, 128)
LOGITS_SHARE = 1 / 32  # of the GPU's memory, for a chunk of logits and what is made of them


def decide_sizes(
    config: Config,
    device: Device,
    architecture: Architecture | None = None,
    memory: int | None = None,
    ranks: int = 1,
) -> Config:
    """The configuration with a value for each size that it leaves null; what it gives stands.

    device: where the learner computes. architecture, memory: of the model and of the GPU in bytes; without them a GPU
    gets what fits most. ranks: that share the learner's state, each on a GPU of its own.
    """
    longest = config.data.max_prompt_length + max(config.rollout.max_response_length, config.eval_response_length)
    width = kv_cache_width(config, device)
    kv = None if architecture is None else _kv_bytes(architecture, longest, width)
    config = _filled(config, "rollout", sampler_sizes(config.rollout, device, kv, memory).model_dump())
    chunk = ON_CPU["train.logprob_chunk"] if device == "cpu" else _logprob_chunk(config, architecture, memory)
    config = _filled(config, "train", {"logprob_chunk": chunk})
    if device == "cpu" or architecture is None or memory is None:
        recompute = ON_CPU["train.recompute"] if device == "cpu" else RECOMPUTE[-1]
        tokens = ON_CPU["train.micro_batch_tokens"]
        return _filled(config, "train", {"micro_batch_tokens": tokens, "recompute": recompute})
    return _fastest_that_fits(config, architecture, memory, ranks)


def sampler_sizes(
    rollout: RolloutConfig, device: Device, sequence_bytes: int | None = None, memory: int | None = None
) -> RolloutConfig:
    """The rollout section with numbers for its two sizes, which agree: vLLM gives each sequence a token of the budget.

    sequence_bytes: keys and values of the longest sequence. memory: of the GPU, in bytes.
    """
    sequences, tokens = rollout.max_num_seqs, rollout.max_batched_tokens
    if sequences is None:
        sequences = ON_CPU["rollout.max_num_seqs"] if device == "cpu" else _sequences(rollout, sequence_bytes, memory)
        if tokens is not None and rollout.engine == "vllm":
            sequences = min(sequences, tokens)
    if tokens is None:
        tokens = ON_CPU["rollout.max_batched_tokens"] if device == "cpu" else BATCHED_TOKENS[rollout.engine]
        if rollout.engine == "vllm":
            tokens = max(sequences, tokens)
    return rollout.model_copy(update={"max_num_seqs": sequences, "max_batched_tokens": tokens})


def keep_sizes(config: Config, begun: Config | None) -> Config:
    """The configuration with the sizes that a run began with, where it leaves them null. begun: what the run recorded,
    None of a new one."""
    if begun is None:
        return config
    if "numerics" not in config.rollout.model_fields_set:
        rollout = config.rollout.model_copy(update={"numerics": begun.rollout.numerics})
        config = config.model_copy(update={"rollout": rollout})
    for section in ("rollout", "train"):
        config = _filled(config, section, getattr(begun, section).model_dump())
    return config


def decided(given: Config, used: Config, device: Device) -> Iterator[str]:
    """`key: null -> number (device)` for each size that was left to the device."""
    for key in ON_CPU:
        if _value(given, key) is None:
            yield f"{key}: null -> {_value(used, key)} ({device})"


def _value(config: Config, key: str) -> Any:
    section, name = key.split(".")
    return getattr(getattr(config, section), name)


def _filled(config: Config, section: str, values: dict[str, Any]) -> Config:
    """Those of `values` that are sizes of the section and null in it."""
    own = getattr(config, section)
    names = [key.split(".")[1] for key in ON_CPU if key.startswith(f"{section}.")]
    update = {name: values[name] for name in names if name in values and getattr(own, name) is None}
    return config.model_copy(update={section: own.model_copy(update=update)}) if update else config


def _kv_bytes(a: Architecture, tokens: int, width: int) -> int:
    return kv_cache_bytes(tokens, a.num_layers, a.num_kv_heads, a.head_dim, width)


def _sequences(rollout: RolloutConfig, sequence_bytes: int | None, memory: int | None) -> int:
    """Of a GPU. vLLM's KV cache, and one of a given size, hold what they can; the native engine's holds them all."""
    if rollout.engine == "vllm" or rollout.kv_cache_tokens is not None:
        return SEQUENCES
    if sequence_bytes is None or memory is None:
        return FEWEST_SEQUENCES
    count = SEQUENCES
    while count > 1 and count * sequence_bytes > memory * (KV_SHARE if count > FEWEST_SEQUENCES else MOST_KV_SHARE):
        count //= 2
    return count


def _logprob_chunk(config: Config, architecture: Architecture | None, memory: int | None) -> int:
    if architecture is None or memory is None:
        return 512
    row = logit_bytes(config) * architecture.vocab_size
    return next((rows for rows in LOGPROB_ROWS if rows * row <= LOGITS_SHARE * memory), LOGPROB_ROWS[-1])


def _fastest_that_fits(config: Config, architecture: Architecture, memory: int, ranks: int) -> Config:
    """The micro batch of a GPU, and what its backward computes again, as far as the configuration leaves them null.

    As little again as the estimate leaves room for, with as many tokens as fill the GPU or a step has, then as many as
    fit. Where not even the least fits, that. A response that is longer makes a micro-batch by itself.
    """
    for tokens, recompute in _candidates(config):
        found = _filled(config, "train", {"micro_batch_tokens": tokens, "recompute": recompute})
        items = estimate(found, architecture, "cuda", ranks=ranks, memory=memory)
        if max(phase_bytes(items, "update"), phase_bytes(items, "optimizer")) <= UPDATE_SHARE * memory:
            break
    return found


def _candidates(config: Config) -> Iterator[tuple[int, str]]:
    """Micro-batches and what is computed again, the best first, the smallest last. What is given is in all of them."""
    step = config.responses_per_step * config.max_sequence_length
    given = config.train.micro_batch_tokens
    # None whose half has room for a whole step.
    sizes = [given] if given else [n for n in MICRO_BATCH_TOKENS if n // 2 < step or n == MICRO_BATCH_TOKENS[-1]]
    modes = [config.train.recompute] if config.train.recompute else RECOMPUTE
    enough = [n for n in sizes if n >= ENOUGH_TOKENS] or sizes[:1]
    yield from ((tokens, recompute) for recompute in modes for tokens in enough)
    yield from ((tokens, modes[-1]) for tokens in sizes if tokens not in enough)
