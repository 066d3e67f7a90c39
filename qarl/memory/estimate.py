"""Estimate the memory that a run needs, in bytes, per item and for a whole configuration.

The estimate counts tensors that are alive at the same time. It leaves out allocator slack and short-lived temporaries
smaller than the items listed here.
"""

from dataclasses import dataclass, replace
from typing import Literal, get_args

from qarl_formats.scheme import is_ignored

from qarl.checks.check import check_model
from qarl.config import Config
from qarl.config.architecture import Architecture
from qarl.config.deepspeed import deepspeed_keys
from qarl.config.model import ModelConfig
from qarl.config.quant import scheme_of
from qarl.errors import UserError
from qarl.memory.activations import DTYPE_BYTES, Device, activations, logit_bytes, uses_kernels
from qarl.memory.gathers import codes_in_flight
from qarl.memory.ranks import Phase, Share, row_share, rows_in_flight, zero_elements, zero_lines
from qarl.memory.tensors import (
    float32_bytes,
    kv_cache_bytes,
    kv_cache_width,
    operand_bytes,
    optimizer_bytes,
    quantized_weight_bytes,
)
from qarl.utils.packed_linears import fused_groups

Owner = Literal["process", "learner", "optimizer", "sampler"]
# Resident memory with torch and transformers imported is 0.33 GiB (measured). Tokenizer, data and reward workers take
# about the same again. A CUDA context on the GPU has about this size too.
PROCESS_BYTES = 600 * 2**20
# vLLM 0.32 on a CPU with a model of a few MB (measured): resident memory of its own process, or added to the learner's.
VLLM_BYTES = {"separate": 1600 * 2**20, "inline": 1250 * 2**20}
# Two buckets of offloaded state, which passes through the GPU during an optimizer step (`optim.offload`).
OFFLOAD_BYTES = 2 * 2**28
MUON_BYTES = 2**30  # `qarl.training.muon.BATCH_BYTES`, which imports torch
ELSEWHERE = ("sampler GPU", "host")  # phases of items that are not in the learner's memory
SAMPLED_ROWS = 128  # `qarl.rollout.native.steps.LOGIT_ROWS`, which imports torch


@dataclass(frozen=True)
class Item:
    """One line of the estimate.

    Attributes:
        name: Name in the output of `qarl check`.
        bytes: Size in bytes.
        phase: When it is in memory: always, or only during rollouts, forwards and backwards (update), optimizer steps,
            or publishes. `sampler GPU` and `host`: always, but on a GPU that the learner does not use, or in host
            memory while the learner is on a GPU; no sum includes these.
        owner: The component that allocates it.
    """

    name: str
    bytes: int
    phase: Phase
    owner: Owner = "learner"


def estimate(
    config: Config,
    architecture: Architecture,
    device: Device,
    tokens: int | None = None,
    ranks: int = 1,
    memory: int | None = None,
) -> list[Item]:
    """Estimate the memory of a training run on `device`, line by line; `peak_bytes` gives the total.

    Args:
        config: Configuration of the run, with all sizes decided.
        architecture: The model.
        device: Where the learner computes.
        tokens: Tokens of the largest micro-batch. None: the largest that the configuration allows, at least one
            response.
        ranks: Number of ranks. The estimate is for rank 0, which holds at least as much as any other.
        memory: Memory of the GPU in bytes, if known.

    Returns:
        The items, in the order of the report.
    """
    quant, a = config.quant, architecture
    scheme = scheme_of(quant)
    width, learner_width = DTYPE_BYTES[config.model.dtype], DTYPE_BYTES[config.learner_dtype]
    own_dtype = config.learner_dtype != config.model.dtype
    stored, learner_operands, sampler_operands, quantized_elements, linear_elements = 0, 0, 0, 0, 0
    published: dict[str, int] = {}
    kernels = uses_kernels(config, device)
    for name, n, k in a.linears():
        quantized = scheme.quantized and not is_ignored(name, quant.ignore)
        published[name] = quantized_weight_bytes(scheme, n, k) if quantized else width * n * k
        if quantized:
            stored += published[name]
            quantized_elements += n * k
        linear_elements += n * k
        sampler_operands += operand_bytes(scheme, n, k, quantized, device, width, kernels)
        if quant.learner == "full_precision" or own_dtype or (quant.learner == "fake_quant" and quantized):
            # The learner cannot use the sampler's operand, so it has one in its own compute dtype.
            learner_operands += (4 if device == "cpu" else learner_width) * n * k
    operands = learner_operands + sampler_operands
    head = operand_bytes(scheme, a.vocab_size, a.hidden_size, False, device, width, kernels)
    unquantized = width * (a.parameters - quantized_elements)
    rest = (learner_width * (a.parameters - linear_elements) + head) if own_dtype else 0  # held by the learner only
    version = stored + unquantized
    reference = version + sampler_operands + head
    if quant.learner != "aligned":
        codes = stored if quant.learner == "fake_quant" else 0
        reference = codes + learner_operands + (rest or width * (a.parameters - linear_elements) + head)
    # Packed linears are concatenated before their operands are built; until then their parts exist twice.
    packed = [sum(published[name] for name in group) for group in fused_groups(published)] if kernels else []
    next_version = version + max(operands + head + rest, *packed, 0)
    in_training = version + (sampler_operands + head if quant.learner == "aligned" else 0)
    several = config.minibatch_size < config.responses_per_step or config.train.epochs > 1
    kv_cache = kv_cache_bytes(
        config.kv_cache_tokens, a.num_layers, a.num_kv_heads, a.head_dim, kv_cache_width(config, device)
    )
    samples_here = config.rollout.engine == "native" and not config.rollout.samples_ahead
    micro_batch = max(config.train.micro_batch_tokens, config.max_sequence_length)
    return [
        Item("process", PROCESS_BYTES, "always", "process"),
        *state_items(config, a, device, ranks),
        Item(f"codes and scales ({scheme.name})", stored, "always"),
        Item(f"unquantized parameters ({config.model.dtype})", unquantized, "always"),
        Item("GEMM operands (tiled or dequantized weights)", operands + head, "always"),
        *sampler_items(config, kv_cache, version, sampler_operands + head, device, memory),
        *([decode_item(config, a.vocab_size)] if kernels and samples_here else []),
        *kept_items(config, version, sampler_operands + head, device),
        *teacher_items(config, a, device),
        *(Item(name, size, "update") for name, size in activations(config, a, device, tokens or micro_batch)),
        *([Item("version in training, in addition to the sampler's", in_training, "always")] if several else []),
        Item("next version, in addition to the current one", next_version, "publish"),
        *learner_items(config, a.parameters, rest, sampler_operands + (head if own_dtype else 0), reference, device),
    ]


def teacher_items(config: Config, architecture: Architecture, device: Device) -> list[Item]:
    """Return the teacher's weights, and a chunk of logits of both models.

    A teacher whose shape cannot be read from a config.json, such as a run, counts as large as the student.
    """
    if (teacher := config.objective.teacher) is None:
        return []
    try:
        found = check_model(ModelConfig(path=teacher.path)).architecture or architecture
    except UserError:
        found = architecture
    linears = sum(n * k for _, n, k in found.linears()) + found.vocab_size * found.hidden_size
    operands = 4 * linears if device == "cpu" else 0  # the CPU multiplies in float32
    logits = logit_bytes(config) * (config.train.logprob_chunk or 1) * architecture.vocab_size
    return [
        Item("teacher", DTYPE_BYTES[teacher.dtype] * found.parameters + operands, "always"),
        Item(f"logits of student and teacher ({config.train.logprob_chunk} rows)", logits, "update"),
    ]


def state_items(config: Config, architecture: Architecture, device: Device, ranks: int) -> list[Item]:
    """Return master weights, gradients and optimizer state of one rank, and messages in transfer between ranks."""
    distributed = config.distributed
    more: list[Item] = []
    if ranks > 1 and distributed.engine == "deepspeed":
        stage = 3 if distributed.zero_stage is None else distributed.zero_stage
        masters, gradients, optimizer = zero_elements(architecture, stage, ranks)
        lines = zero_lines(architecture, stage, ranks, deepspeed_keys(distributed.config).get("zero_optimization", {}))
        more = [Item(f"{name} (ZeRO-{stage})", size, phase) for name, size, phase in lines]
    else:
        masters = gradients = optimizer = row_share(config, architecture, ranks)
        if ranks > 1:
            flying = rows_in_flight(architecture, ranks)
            # Freed before operands are built, but counted together with them: the allocator may keep the blocks.
            codes = codes_in_flight(config, architecture, ranks)
            more = [
                Item("gradients in transfer between ranks", flying, "update"),
                Item("code messages in transfer between ranks", codes, "publish"),
            ]
    if config.optim.name == "muon" and device == "cuda":
        # 10 bytes per element at most: the stack in bf16, two copies of it, and two products of its shorter side.
        batch = min(MUON_BYTES, 10 * architecture.matrix_parameters)
        more.append(Item("batch of matrices that Muon orthogonalizes", batch, "optimizer", "optimizer"))
    return [
        masters_item(config, architecture, device, masters),
        Item("gradients (float32)", float32_bytes(gradients.parameters), "always"),
        optimizer_item(config, device, optimizer),
        *more,
    ]


def masters_item(config: Config, architecture: Architecture, device: Device, share: Share) -> Item:
    """Return the master weights; if they are offloaded, the largest one, which is copied to the GPU to be quantized."""
    if config.optim.offload == "all" and device == "cuda":
        linears = (n * k for _, n, k in architecture.linears())
        largest = max(architecture.vocab_size * architecture.hidden_size, *linears)
        own = min(largest, share.parameters)
        return Item("largest master in transfer, the rest on the host", float32_bytes(own), "publish")
    return Item("master weights (float32)", float32_bytes(share.parameters), "always")


def optimizer_item(config: Config, device: Device, share: Share) -> Item:
    """Return the optimizer state; if it is offloaded, the part of it that is on the GPU at once."""
    name = config.optim.name
    whole = optimizer_bytes(name, share.matrices, share.others)
    if config.optim.offload and device == "cuda":
        passing, rows = OFFLOAD_BYTES, 2 if config.optim.offload == "all" else 1
        if name == "muon":  # two batches; a matrix takes at least 6 bytes per element while it is orthogonalized
            passing = max(passing, 2 * rows * 4 * (MUON_BYTES // 6))
        line = f"optimizer state ({name}) in transfer, the rest on the host"
        return Item(line, min(passing, rows * whole), "optimizer", "optimizer")
    return Item(f"optimizer state ({name})", whole, "always", "optimizer")


def learner_items(
    config: Config, parameters: int, rest: int, shadow: int, reference: int, device: Device
) -> list[Item]:
    """Return the items that the learner needs only with certain settings.

    An aligned learner is its own shadow. The gradient decomposition then keeps no gradient, or one if the objective
    clips.

    Args:
        config: Configuration of the run.
        parameters: Number of parameters.
        rest: Bytes of the parameters other than linears, if the learner has its own dtype; else 0.
        shadow: Bytes of the sampler's GEMM operands for a version that is not published yet.
        reference: Bytes of the weights that a forward of the learner reads.
        device: Where the learner computes.
    """
    every, aligned, objective = config.diagnostics, config.quant.learner == "aligned", config.objective
    measured = every.shadow_every or every.deployed_every or every.gradients_every
    shadowed = measured or objective.ratio_kind == "shadow"
    items = []
    if rest:
        items.append(Item(f"learner's own parameters ({config.learner_dtype})", rest, "always"))
    if objective.kl_coef > 0 or every.reference_every:
        items.append(Item("reference policy", reference, "always"))
    if shadowed and not aligned:
        items.append(Item("shadow: the sampler's operands of the version in training", shadow, "update"))
    held = (0 if aligned else 3) + (objective.band is not None) * (1 if aligned else 2)
    if every.gradients_every and held and device == "cpu":  # with a GPU they are kept in host memory
        items.append(Item("gradients of the decomposition (float32)", held * float32_bytes(parameters), "update"))
    return items


def sampler_items(
    config: Config, kv_cache: int, published: int, operands: int, device: Device, memory: int | None
) -> list[Item]:
    """Return the memory that sampling adds on `device`.

    The native engine uses the learner's weights and has a KV cache, which is freed on a GPU while the learner trains.
    With given responses it samples for evaluations only. For asynchronous rollouts see `async_sampler_items`.

    vLLM has its own weights. On a GPU it allocates `memory_frac` of the memory at startup, unless
    `rollout.kv_cache_tokens` sets the size of its cache. With tensor parallelism each GPU has a part. Nothing is
    counted if vLLM has its own GPU. A sleeping vLLM has nothing on the GPU except tensors staged for layers that it
    repacks, so it counts only during a publish.

    Args:
        config: Configuration of the run.
        kv_cache: Bytes of the KV cache.
        published: Bytes of a version's tensors.
        operands: Bytes that qarl's linear kernels keep in addition to them.
        device: Where the learner computes.
        memory: Memory of the GPU in bytes; None if unknown.
    """
    rollout, vllm = config.rollout, config.rollout.vllm
    cache = f"KV cache ({config.kv_cache_tokens:,} tokens)"
    if rollout.samples_ahead:
        items = async_sampler_items(config, kv_cache, published, operands, device, memory)
        return items if device == "cpu" else [replace(item, phase="sampler GPU") for item in items]
    if rollout.engine == "data" and not config.evaluation.tasks:
        return []
    if rollout.engine != "vllm":
        return [Item(cache, kv_cache, "always" if device == "cpu" else "rollout", "sampler")]
    fast, delta = rollout.numerics == "fast", vllm.publish == "delta"  # exact numerics keep no second copy
    if device == "cuda":
        if vllm.device is not None:
            return []
        process = PROCESS_BYTES if vllm.process == "separate" else 0
        phase: Phase = "publish" if vllm.sleep else "always"
        held = (published + kv_cache) // vllm.tensor_parallel
        share = f"vLLM weights and KV cache ({config.kv_cache_tokens:,} tokens)"
        if rollout.kv_cache_tokens is None:
            held = held if memory is None else int(rollout.memory_frac * memory)
            share = (
                f"vLLM weights and KV cache ({'filled; takes ' * (memory is None)}{rollout.memory_frac:.0%} of the GPU)"
            )
        staged = published if fast and (vllm.staging or delta) and scheme_of(config.quant).packed else 0
        return [
            Item("vLLM process", process, "always", "sampler"),
            Item(share, held, phase, "sampler"),
            Item("tensors staged for vLLM", staged, "always", "sampler"),
        ]
    weights = published * (2 if fast and delta else 1) + (0 if fast else operands)
    on_the_way = published if vllm.process == "separate" else 0
    return [
        Item("vLLM process", VLLM_BYTES[vllm.process], "always", "sampler"),
        Item("vLLM weights", weights, "always", "sampler"),
        Item(f"vLLM {cache}", kv_cache, "always", "sampler"),
        Item("tensors in transfer to vLLM", on_the_way, "publish", "sampler"),
    ]


def async_sampler_items(
    config: Config, kv_cache: int, published: int, operands: int, device: Device, memory: int | None
) -> list[Item]:
    """Return the memory of asynchronous rollouts' sampler process, which has its own weights and, if there are GPUs,
    its own GPU. For the arguments see `sampler_items`.
    """
    rollout, cache = config.rollout, f"sampler's KV cache ({config.kv_cache_tokens:,} tokens)"
    process = PROCESS_BYTES
    if rollout.engine == "vllm":
        process = process if device == "cuda" else VLLM_BYTES["separate"]
        operands = operands if rollout.numerics == "exact" else 0
        if device == "cuda" and rollout.kv_cache_tokens is None and memory is not None:
            kv_cache = max(int(rollout.memory_frac * memory) - published - operands, 0)
            cache = f"sampler's KV cache (what the weights leave of {rollout.memory_frac:.0%} of the GPU)"
    return [
        Item("sampler's process", process, "always", "sampler"),
        Item("sampler's weights", published + operands, "always", "sampler"),
        Item(cache, kv_cache, "always", "sampler"),
    ]


def kept_items(config: Config, version: int, operands: int, device: Device) -> list[Item]:
    """Return the weights of earlier versions, which the learner keeps for responses that were sampled with them.

    In host memory they have no GEMM operands, and a forward needs one version on the device.

    Args:
        config: Configuration of the run.
        version: Bytes of one version's tensors.
        operands: Bytes of its GEMM operands, in addition to them.
        device: Where the learner computes.
    """
    ahead = config.rollout.asynchronous
    if ahead is None or ahead.proximal == "newest" or ahead.max_staleness == 0:
        return []
    count = ahead.max_staleness
    if ahead.kept_versions != "host":
        return [Item(f"weights of {count} earlier versions", count * (version + operands), "always")]
    phase: Phase = "always" if device == "cpu" else "host"
    # torch rounds pinned memory, which a GPU needs, up to a power of two.
    each = version if device == "cpu" else 1 << (version - 1).bit_length()
    return [
        Item("copy of an earlier version for logp_old", version + operands, "update"),
        # The newest is stored before the oldest is dropped, hence one more.
        Item(f"weights of {count} earlier versions in host memory", (count + 1) * each, phase),
    ]


def decode_item(config: Config, vocabulary: int) -> Item:
    """Return the logits of the native engine's decode steps on a GPU.

    A CUDA graph holds the logits of all sequences. If tokens are ranked (top-k, top-p), the logits are outside the
    graphs, and at most `SAMPLED_ROWS` rows are sampled at a time.
    """
    rows = min(config.sequences, SAMPLED_ROWS) if config.ranked else config.sequences
    return Item(f"logits of decodes ({rows} rows)", logit_bytes(config) * rows * vocabulary, "rollout", "sampler")


def peak_bytes(items: list[Item]) -> int:
    """Return the peak memory: items that are always in memory, plus the largest phase. Phases do not overlap."""
    return max(phase_bytes(items, phase) for phase in get_args(Phase) if phase not in ELSEWHERE)


def update_bytes(config: Config, architecture: Architecture, device: Device, ranks: int) -> int:
    """Return the bytes on a rank's device that only an optimizer step and the next version need.

    The optimizer state, which the first step allocates, is not included.
    """
    items = [item for item in estimate(config, architecture, device, ranks=ranks) if item.phase == "publish"]
    moving = [
        item for item in state_items(config, architecture, device, ranks) if item.phase in ("update", "optimizer")
    ]
    return sum(item.bytes for item in [*items, *moving] if item.owner != "sampler")


def phase_bytes(items: list[Item], phase: Phase) -> int:
    """Return the bytes in memory during a phase, including items that are always in memory."""
    return sum(item.bytes for item in items if item.phase in ("always", phase))
