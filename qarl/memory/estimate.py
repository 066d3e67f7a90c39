"""How much memory a run needs: plain functions of numbers, in bytes, and the sum for a configuration.

An estimate of what is alive at the same time, not a measurement: allocator slack and short-lived temporaries smaller
than the ones named here are left out.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from qarl_formats.scheme import Scheme, is_ignored

from qarl.config import Config
from qarl.config.architecture import Architecture
from qarl.config.deepspeed import deepspeed_keys
from qarl.config.quant import scheme_of
from qarl.memory.activations import DTYPE_BYTES, Device, activations, fused_pass, logit_bytes, uses_kernels
from qarl.memory.gathers import codes_in_flight
from qarl.memory.ranks import Phase, Share, row_share, rows_in_flight, zero_elements, zero_lines
from qarl.utils.machine import machine_bytes
from qarl.utils.packed_linears import fused_groups

Owner = Literal["process", "learner", "optimizer", "sampler"]
# Python, torch and transformers imported, measured as resident memory: 0.33 GiB, and as much again for the tokenizer,
# the data and the reward workers. A GPU holds a CUDA context of about the same size.
PROCESS_BYTES = 600 * 2**20
# vLLM 0.32 on a CPU, started on a model of a few MB: resident memory of its process, and what it adds to the learner's.
VLLM_BYTES = {"separate": 1600 * 2**20, "inline": 1250 * 2**20}
# Two buckets of what passes through a GPU in a step where the host keeps it (`optim.offload`).
OFFLOAD_BYTES = 2 * 2**28
MUON_BYTES = 2**30  # `qarl.training.muon.BATCH_BYTES`, which imports torch
DRAWN_ROWS = 128  # `qarl.rollout.native.steps.LOGIT_ROWS`, which imports torch


def master_bytes(parameters: int) -> int:
    """FP32 master weights."""
    return 4 * parameters


def gradient_bytes(parameters: int) -> int:
    """FP32 gradients of the masters."""
    return 4 * parameters


def optimizer_bytes(name: str, matrix_parameters: int, other_parameters: int) -> int:
    """Optimizer state: AdamW holds two FP32 moments a parameter; muon one on matrices, AdamW's two on the rest."""
    return (4 if name == "muon" else 8) * matrix_parameters + 8 * other_parameters


def saved_bytes(config: Config, architecture: Architecture) -> int:
    """A training checkpoint on the disk: masters and optimizer state, without its kilobytes of headers."""
    other = architecture.parameters - architecture.matrix_parameters
    return master_bytes(architecture.parameters) + optimizer_bytes(
        config.optim.name, architecture.matrix_parameters, other
    )


def quantized_weight_bytes(scheme: Scheme, out_features: int, in_features: int) -> int:
    """Codes, scales and zero points of one weight as stored (compressed-tensors layout)."""
    stored = scheme.tensor_specs(out_features, in_features)
    return sum(spec.nbytes for suffix, spec in stored.items() if suffix != "weight_shape")  # which is on no GPU


def operand_bytes(
    scheme: Scheme, out_features: int, in_features: int, quantized: bool, device: Device, width: int, kernels: bool
) -> int:
    """What the products keep of one weight beside the published tensors.

    width: bytes of the compute dtype. The CPU multiplies in float32, so it keeps a float32 copy of every weight. A GPU
    multiplies an unquantized weight as it is published. Its kernels read published codes too, int4 ones in a tiled
    copy of 16 x 128 blocks with 4 bytes per group and row; without them (`quant.kernels: reference`) it keeps
    dequantized weights in the compute dtype, and codes for quantized activations in float32.
    """
    weights = out_features * in_features
    if device == "cpu":
        return 4 * weights
    if kernels:
        return scheme.kernel_bytes(out_features, in_features) if quantized else 0
    if quantized and scheme.activation is not None:
        return 4 * weights
    return width * weights if quantized else 0


def kv_cache_bytes(tokens: int, layers: int, kv_heads: int, head_dim: int, width: int) -> int:
    """Keys and values of `tokens` tokens in every layer. width: bytes of a value, see `kv_cache_width`."""
    return 2 * tokens * layers * kv_heads * head_dim * width


def kv_cache_width(config: Config, device: Device) -> int:
    """Bytes of a value in the sampler's KV cache. The policy's own layers in plain torch keep e4m3 in model.dtype."""
    own = config.rollout.engine == "native" or config.rollout.numerics == "exact"
    plain = own and not uses_kernels(config, device)
    return DTYPE_BYTES[config.model.dtype] if plain or config.quant.kv_cache_dtype == "auto" else 1


@dataclass(frozen=True)
class Item:
    """A line of the estimate.

    Attributes:
        name: As `qarl check` prints it.
        bytes: Its size.
        phase: When it is held: always, or only in rollouts, in forwards and backwards (update), in optimizer steps or
            in publishes.
        owner: Whose memory it is.
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
    """The memory of a training run on `device`, line by line; `peak_bytes` adds them up.

    tokens: of the largest micro-batch; None: what the configuration allows, which is one response at least. ranks: of
    the run; the memory is that of one of them, the first, which has no less than another. memory: of the GPU in bytes,
    where it is known.
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
            # the sampler's operand is not the learner's: the learner holds its own in its compute dtype
            learner_operands += (4 if device == "cpu" else learner_width) * n * k
    operands = learner_operands + sampler_operands
    head = operand_bytes(scheme, a.vocab_size, a.hidden_size, False, device, width, kernels)
    unquantized = width * (a.parameters - quantized_elements)
    rest = (learner_width * (a.parameters - linear_elements) + head) if own_dtype else 0  # of the learner alone
    version = stored + unquantized
    reference = version + sampler_operands + head
    if quant.learner != "aligned":
        codes = stored if quant.learner == "fake_quant" else 0
        reference = codes + learner_operands + (rest or width * (a.parameters - linear_elements) + head)
    # Weights with one input are concatenated before operands are made of them, and are in memory twice meanwhile.
    stacks = [sum(published[name] for name in group) for group in fused_groups(published)] if kernels else []
    following = version + max(operands + head + rest, *stacks, 0)
    between = version + (sampler_operands + head if quant.learner == "aligned" else 0)
    several = config.minibatch_size < config.responses_per_step or config.train.epochs > 1
    kv_cache = kv_cache_bytes(
        config.kv_cache_tokens, a.num_layers, a.num_kv_heads, a.head_dim, kv_cache_width(config, device)
    )
    micro_batch = max(config.train.micro_batch_tokens, config.max_sequence_length)
    return [
        Item("process", PROCESS_BYTES, "always", "process"),
        *state_items(config, a, device, ranks),
        Item(f"codes and scales ({scheme.name})", stored, "always"),
        Item(f"unquantized parameters ({config.model.dtype})", unquantized, "always"),
        Item("GEMM operands (tiled or dequantized weights)", operands + head, "always"),
        *sampler_items(config, kv_cache, version, sampler_operands + head, device, memory),
        *([decode_item(config, a.vocab_size)] if kernels and config.rollout.engine == "native" else []),
        *(Item(name, size, "update") for name, size in activations(config, a, device, tokens or micro_batch)),
        *([Item("version in training, beside the sampler's", between, "always")] if several else []),
        Item("next version, beside the one in use", following, "publish"),
        *learner_items(config, a.parameters, rest, sampler_operands + (head if own_dtype else 0), reference, device),
    ]


def state_items(config: Config, architecture: Architecture, device: Device, ranks: int) -> list[Item]:
    """Masters, gradients and optimizer state of one rank, and what of them is on its way."""
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
            # Gone when operands are made, and counted beside them: an allocator may keep these blocks.
            codes = codes_in_flight(config, architecture, ranks)
            more = [
                Item("gradients of layers on their way between ranks", flying, "update"),
                Item("messages of codes between ranks", codes, "publish"),
            ]
    if config.optim.name == "muon" and device == "cuda":
        # Of each at most a stack in bf16, two more like it, and two products of its shorter side.
        batch = min(MUON_BYTES, 10 * architecture.matrix_parameters)
        more.append(Item("matrices that Muon orthogonalizes at once", batch, "optimizer", "optimizer"))
    return [
        masters_item(config, architecture, device, masters),
        Item("gradients (float32)", gradient_bytes(gradients.parameters), "always"),
        optimizer_item(config, device, optimizer),
        *more,
    ]


def masters_item(config: Config, architecture: Architecture, device: Device, share: Share) -> Item:
    """The masters, or the largest, which comes to a GPU to be quantized where the host keeps them."""
    if config.optim.offload == "all" and device == "cuda":
        linears = (n * k for _, n, k in architecture.linears())
        largest = max(architecture.vocab_size * architecture.hidden_size, *linears)
        own = min(largest, share.parameters)
        return Item("largest master on its way, the rest on the host", master_bytes(own), "publish")
    return Item("master weights (float32)", master_bytes(share.parameters), "always")


def optimizer_item(config: Config, device: Device, share: Share) -> Item:
    """The optimizer's state, or what passes through a GPU of a state that the host keeps."""
    name = config.optim.name
    whole = optimizer_bytes(name, share.matrices, share.others)
    if config.optim.offload and device == "cuda":
        passing, rows = OFFLOAD_BYTES, 2 if config.optim.offload == "all" else 1
        if name == "muon":  # two batches, whose matrices take 6 bytes an element and more while they are orthogonalized
            passing = max(passing, 2 * rows * 4 * (MUON_BYTES // 6))
        line = f"optimizer state ({name}) on its way, the rest on the host"
        return Item(line, min(passing, rows * whole), "optimizer", "optimizer")
    return Item(f"optimizer state ({name})", whole, "always", "optimizer")


def learner_items(
    config: Config, parameters: int, rest: int, shadow: int, reference: int, device: Device
) -> list[Item]:
    """What only some runs' learners hold.

    rest: bytes of the parameters beside the linears, for a learner in a dtype of its own. shadow: of the sampler's
    operands of a version that is not published yet. reference: of what a learner's forward stands on. An aligned
    learner is its own shadow, and its gradients are one, or two where the objective clips.
    """
    every, aligned, objective = config.diagnostics, config.quant.learner == "aligned", config.objective
    measured = every.shadow_every or every.deployed_every or every.gradients_every
    shadowed = measured or objective.ratio_kind == "shadow"
    items = []
    if rest:
        items.append(Item(f"learner's own parameters ({config.learner_dtype})", rest, "always"))
    if objective.kl_coef > 0:
        items.append(Item("reference policy", reference, "always"))
    if shadowed and not aligned:
        items.append(Item("shadow: the sampler's operands of the version in training", shadow, "update"))
    held = (0 if aligned else 3) + (objective.band is not None) * (1 if aligned else 2)
    if every.gradients_every and held and device == "cpu":  # a GPU's are held by the host
        items.append(Item("gradients of the decomposition (float32)", held * gradient_bytes(parameters), "update"))
    return items


def sampler_items(
    config: Config, kv_cache: int, published: int, operands: int, device: Device, memory: int | None
) -> list[Item]:
    """What sampling adds to the learner's memory on `device`.

    The native engine has a KV cache, on the learner's weights; on a GPU it is freed while the learner learns. vLLM has
    weights of its own. On a GPU it takes its share of the memory at once, however little fills it, unless
    `rollout.kv_cache_tokens` says how many tokens it holds. A GPU of its own is not the learner's; of several, each has
    a part. Asleep it holds nothing there, so it counts beside a publish, except for tensors staged for layers that it
    repacks.

    Args:
        config: Configuration of the run.
        kv_cache: Bytes of the KV cache.
        published: Bytes of a version's tensors.
        operands: Bytes that qarl's own products keep beside them.
        device: Where the learner computes.
        memory: Of the GPU, in bytes; None: unknown.
    """
    rollout, vllm = config.rollout, config.rollout.vllm
    cache = f"KV cache ({config.kv_cache_tokens:,} tokens)"
    if rollout.engine == "native":
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
            held = held if memory is None else int(vllm.memory_frac * memory)
            share = (
                f"vLLM weights and KV cache ({'filled; takes ' * (memory is None)}{vllm.memory_frac:.0%} of the GPU)"
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
        Item("tensors on their way to vLLM", on_the_way, "publish", "sampler"),
    ]


def decode_item(config: Config, vocabulary: int) -> Item:
    """Logits of the native engine's decodes on a GPU: those of a CUDA graph, and of a step that is not captured yet.

    Where tokens are ranked no graph has them, and a few rows are drawn at a time.
    """
    ranked = config.rollout.top_p < 1 or config.rollout.top_k > 0
    rows = min(config.sequences, DRAWN_ROWS) if ranked else config.sequences
    return Item(f"logits of decodes ({rows} rows)", logit_bytes(config) * rows * vocabulary, "rollout", "sampler")


def certain_bytes(config: Config, architecture: Architecture, device: Device, ranks: int = 1) -> int:
    """What a run holds in this machine's own memory at the same time, whatever else it does: a lower bound.

    On a CPU masters, their gradients and the optimizer's state; for a GPU the masters, which are read here first, or
    once they are there the state that is offloaded. ranks: all on this machine; in rows they hold no more than one.
    """
    copies = ranks if config.distributed.engine == "deepspeed" else 1
    masters = copies * master_bytes(architecture.parameters)
    if device == "cuda":
        return max(masters, _offloaded(config, architecture))
    return copies * gradient_bytes(architecture.parameters) + saved_bytes(config, architecture)


def _offloaded(config: Config, architecture: Architecture) -> int:
    """What the host keeps of the optimizer of a GPU, and of its masters."""
    on_gpu = master_bytes(architecture.parameters) if config.optim.offload == "moments" else 0
    return saved_bytes(config, architecture) - on_gpu if config.optim.offload else 0


def too_large(config: Config, architecture: Architecture, device: Device, ranks: int = 1) -> str | None:
    """One line where a run cannot fit this machine's memory, whatever is freed; None where it may.

    ranks: all of them on this machine. What a GPU has, only its driver could say: it is not counted.
    """
    certain, there = certain_bytes(config, architecture, device, ranks), machine_bytes()
    if certain <= there:
        return None
    if device == "cpu":
        what = "masters, gradients and optimizer state alone"
    elif config.optim.offload:
        kept = "masters and moments" if config.optim.offload == "all" else "moments"
        what = f"the {kept} that optim.offload keeps here alone"
    else:
        each = f"of each of {ranks} ranks " if ranks > 1 and config.distributed.engine == "deepspeed" else ""
        what = f"masters {each}alone, which are read before they go to the GPU,"
    return (
        f"model.path: '{config.model.path}': {what} take {certain / 2**30:,.1f} GiB, and this machine gives "
        f"{there / 2**30:,.1f} GiB of memory and swap; use a smaller model or a larger machine"
    )


def expected_device(config: Config) -> Device:
    """Where the run will compute, without torch: what the driver shows, since only torch could say what it will use."""
    if config.model.device == "auto":
        return "cuda" if Path("/proc/driver/nvidia/version").exists() else "cpu"
    return config.model.device


def peak_bytes(items: list[Item]) -> int:
    """What is always held, and the largest of the phases, which do not happen at the same time."""
    return max(phase_bytes(items, phase) for phase in get_args(Phase))


def forward_peak(
    config: Config, architecture: Architecture, device: Device, tokens: int, gradients: bool
) -> int | None:
    """What a learner alone holds in a forward without gradient; None of one in plain torch, which nothing counts.

    gradients: whether those of an earlier backward are there.
    """
    fused = fused_pass(config, architecture, device, tokens)
    if fused is None:
        return None
    own = [item for item in estimate(config, architecture, device, tokens) if item.owner == "learner"]
    there = sum(item.bytes for item in own if item.phase == "always")
    return there + fused.forward_peak - (0 if gradients else gradient_bytes(architecture.parameters))


def update_bytes(config: Config, architecture: Architecture, device: Device, ranks: int = 1) -> int:
    """What an optimizer step and the making of the next version take beside what is always held, on a rank's device;
    all but the optimizer's state of the first one."""
    items = [item for item in estimate(config, architecture, device, ranks=ranks) if item.phase == "publish"]
    moving = [
        item for item in state_items(config, architecture, device, ranks) if item.phase in ("update", "optimizer")
    ]
    return sum(item.bytes for item in [*items, *moving] if item.owner != "sampler")


def phase_bytes(items: list[Item], phase: Phase) -> int:
    """What is held in a phase, with what is always held."""
    return sum(item.bytes for item in items if item.phase in ("always", phase))
