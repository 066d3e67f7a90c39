"""Choose the sizes that the configuration leaves null, and where `auto` keeps earlier versions. Imports no torch.

The sizes are `rollout.max_num_seqs`, `rollout.max_batched_tokens`, `train.micro_batch_tokens`, `train.recompute` and
`train.logprob_chunk`. They change speed and memory, and the low bits of results. Therefore they are decided once and
recorded in the run's config.yaml, and a resumed run keeps them on any device. On a CPU they are constants. On a GPU
they depend on the total memory, not on the free memory, so the same machine always gives the same numbers.
"""

from collections.abc import Iterator
from typing import Any, Literal

from qarl.config import Config, RolloutConfig
from qarl.config.architecture import Architecture
from qarl.config.by_device import ON_CPU
from qarl.memory.activations import Device, logit_bytes
from qarl.memory.estimate import estimate, phase_bytes
from qarl.memory.host import too_large
from qarl.memory.tensors import kv_cache_bytes, kv_cache_width

Place = Literal["device", "host"]
# vLLM's own defaults for a GPU (0.24 to 0.32; its defaults are larger above 70 GiB). The native engine decodes a small
# model's 512 sequences in little more time than 256. It does not batch prefills with decodes, so it gains nothing from
# a larger token budget.
SEQUENCES = {"vllm": 256, "native": 512, "data": 256}
BATCHED_TOKENS = {"vllm": 8192, "native": 4096, "data": 4096}  # with given responses, evaluations sample natively
FEWEST_SEQUENCES = 64
# Fractions of GPU memory for the native engine's KV cache: normally, and at most to reach FEWEST_SEQUENCES.
KV_SHARE, MOST_KV_SHARE = 1 / 4, 1 / 2
# The sampler of asynchronous rollouts has its own GPU, on which only low-bit weights share memory with the cache, and
# samples responses of several steps. 384 sequences took 3.05 s per step and 256 took 3.71 (async_gpu.json).
OWN_GPU_SEQUENCES, OWN_GPU_KV_SHARE = 384, 0.6

# Fewer than ENOUGH_TOKENS leave parts of a GPU idle. More than PLENTY_TOKENS help only if a layer is so small that the
# host takes longer to launch its kernels than the GPU takes to run them: below about LAUNCH_BOUND tokens x parameters.
MICRO_BATCH_TOKENS = (65536, 32768, 16384, 8192, 4096, 2048, 1024)
PLENTY_TOKENS, ENOUGH_TOKENS = 16384, 8192
LAUNCH_BOUND = 2e11
RECOMPUTE = ("elementwise", "mlp", "products", "layer")  # from the fastest to the least memory
# Fraction of GPU memory that the estimate may reach. The estimate leaves out fragmentation and kernel code.
UPDATE_SHARE = 0.8
LOGPROB_ROWS = (4096, 2048, 1024, 512, 256, 128)
LOGITS_SHARE = 1 / 32  # fraction of GPU memory for a chunk of logits and its temporaries


def decide_sizes(
    config: Config,
    device: Device,
    architecture: Architecture | None = None,
    memory: int | None = None,
    ranks: int = 1,
) -> Config:
    """Return the configuration with a value for each size that it leaves null.

    Args:
        config: The configuration; sizes that it sets are kept.
        device: Where the learner computes.
        architecture: The model.
        memory: Memory of the GPU in bytes. Without it or `architecture`, a GPU gets conservative sizes.
        ranks: Number of ranks, which share the learner's state; one GPU per rank.
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
        config = _filled(config, "train", {"micro_batch_tokens": tokens, "recompute": recompute})
        return _keeping(config, _places(config, "device")[0])
    return _fastest_that_fits(config, architecture, memory, ranks)


def sampler_sizes(
    rollout: RolloutConfig, device: Device, sequence_bytes: int | None = None, memory: int | None = None
) -> RolloutConfig:
    """Return the rollout section with its two sizes decided.

    For vLLM the token budget is at least the number of sequences, because each sequence needs one token of it.

    Args:
        rollout: The section; sizes that it sets are kept.
        device: Where the sampler computes.
        sequence_bytes: Bytes of keys and values of the longest sequence, if known.
        memory: Memory of the GPU in bytes, if known.
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


def keep_sizes(config: Config, recorded: Config | None) -> Config:
    """Return the configuration with null sizes replaced by those that the run started with.

    recorded: Configuration recorded by the run; None for a new run.
    """
    if recorded is None:
        return config
    if "numerics" not in config.rollout.model_fields_set:
        rollout = config.rollout.model_copy(update={"numerics": recorded.rollout.numerics})
        config = config.model_copy(update={"rollout": rollout})
    for section in ("rollout", "train"):
        config = _filled(config, section, getattr(recorded, section).model_dump())
    return config


def decided(given: Config, used: Config, device: Device) -> Iterator[str]:
    """Yield `key: null -> number (device)` for each size that the configuration leaves null."""
    for key in ON_CPU:
        if _value(given, key) is None:
            yield f"{key}: null -> {_value(used, key)} ({device})"
    before, after = given.rollout.asynchronous, used.rollout.asynchronous
    if before is not None and after is not None and before.kept_versions == "auto":
        yield f"rollout.async.kept_versions: auto -> {after.kept_versions} ({device})"


def _value(config: Config, key: str) -> Any:
    section, name = key.split(".")
    return getattr(getattr(config, section), name)


def _filled(config: Config, section: str, values: dict[str, Any]) -> Config:
    """Set the sizes of a section that are null to those in `values`."""
    own = getattr(config, section)
    names = [key.split(".")[1] for key in ON_CPU if key.startswith(f"{section}.")]
    update = {name: values[name] for name in names if name in values and getattr(own, name) is None}
    return config.model_copy(update={section: own.model_copy(update=update)}) if update else config


def _kv_bytes(a: Architecture, tokens: int, width: int) -> int:
    return kv_cache_bytes(tokens, a.num_layers, a.num_kv_heads, a.head_dim, width)


def _sequences(rollout: RolloutConfig, sequence_bytes: int | None, memory: int | None) -> int:
    """Return the number of sequences on a GPU.

    vLLM, and a KV cache of configured size, admit as many sequences as fit. Otherwise the native engine allocates a
    cache for all sequences, so their number is reduced until it fits.
    """
    if rollout.kv_cache_tokens is not None:
        return SEQUENCES["vllm"]
    if sequence_bytes is None or memory is None:
        return SEQUENCES["vllm"] if rollout.engine == "vllm" else FEWEST_SEQUENCES
    if rollout.samples_ahead:
        for count in (OWN_GPU_SEQUENCES, 256, 128):
            if count * sequence_bytes <= memory * OWN_GPU_KV_SHARE:
                return count
    count = SEQUENCES[rollout.engine]
    if rollout.engine == "vllm":
        return count
    while count > 1 and count * sequence_bytes > memory * (KV_SHARE if count > FEWEST_SEQUENCES else MOST_KV_SHARE):
        count //= 2
    return count


def _logprob_chunk(config: Config, architecture: Architecture | None, memory: int | None) -> int:
    if architecture is None or memory is None:
        return 512
    row = logit_bytes(config) * architecture.vocab_size
    return next((rows for rows in LOGPROB_ROWS if rows * row <= LOGITS_SHARE * memory), LOGPROB_ROWS[-1])


def _fastest_that_fits(config: Config, architecture: Architecture, memory: int, ranks: int) -> Config:
    """Choose micro-batch size and recompute mode on a GPU, if the configuration leaves them null.

    Takes the least recomputation that fits with enough tokens to fill the GPU or a whole step, then the most tokens
    that fit. If nothing fits, takes the smallest candidate. A response longer than the micro-batch gets its own one.
    Earlier versions of asynchronous rollouts are moved to host memory before more is recomputed, because a copy per
    version and step takes less time than the recomputation.
    """
    places = _places(config, "device", "host")
    if places[-1] == "host" and too_large(_keeping(config, "host"), architecture, "cuda", ranks):
        places = places[:1]
    for tokens, recompute in _candidates(config, architecture):
        for place in places:
            found = _filled(config, "train", {"micro_batch_tokens": tokens, "recompute": recompute})
            found = _keeping(found, place)
            items = estimate(found, architecture, "cuda", ranks=ranks, memory=memory)
            if max(phase_bytes(items, "update"), phase_bytes(items, "optimizer")) <= UPDATE_SHARE * memory:
                return found
    return found


def _places(config: Config, *choices: Place) -> tuple[Place, ...]:
    """Return where earlier versions may be kept: `choices`, unless the configuration decides it."""
    ahead = config.rollout.asynchronous
    return choices if ahead is None or ahead.kept_versions == "auto" else (ahead.kept_versions,)


def _keeping(config: Config, place: Place) -> Config:
    """Set `rollout.async.kept_versions`, if rollouts are asynchronous."""
    ahead = config.rollout.asynchronous
    if ahead is None or ahead.kept_versions == place:
        return config
    update = {"async": ahead.model_copy(update={"kept_versions": place})}
    return config.model_copy(update={"rollout": config.rollout.model_copy(update=update)})


def _candidates(config: Config, architecture: Architecture) -> Iterator[tuple[int, str]]:
    """Yield (micro-batch tokens, recompute mode), best first, smallest last. Values set by the configuration stay."""
    step = config.responses_per_step * config.max_sequence_length
    given = config.train.micro_batch_tokens
    most = max(PLENTY_TOKENS, LAUNCH_BOUND * architecture.num_layers / architecture.multiplied_parameters)
    # Skip a size if half of it is enough for a whole step, or for the GPU.
    useful = [n for n in MICRO_BATCH_TOKENS if n // 2 < min(step, most) or n == MICRO_BATCH_TOKENS[-1]]
    sizes = [given] if given else useful
    modes = [config.train.recompute] if config.train.recompute else RECOMPUTE
    enough = [n for n in sizes if n >= ENOUGH_TOKENS] or sizes[:1]
    yield from ((tokens, recompute) for recompute in modes for tokens in enough)
    yield from ((tokens, modes[-1]) for tokens in sizes if tokens not in enough)
