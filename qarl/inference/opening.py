"""Open a target as a policy that generates, with codes and scales read from the checkpoint."""

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import torch
from qarl_formats.weight import LowBitWeight
from qarl_kernels.divergence import Divergence
from qarl_kernels.logprob import Truncation
from torch import Tensor
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedTokenizerBase

from qarl.config import Config, RolloutConfig
from qarl.config.quant import OF_TRAINING, scheme_of
from qarl.errors import UserError
from qarl.inference.export_record import ExportRecord
from qarl.inference.masters import Masters, digest_of, open_masters
from qarl.inference.target import Target, resolve_target
from qarl.policy.device import DTYPES, pick_device
from qarl.policy.load import load_tokenizer, model_weights
from qarl.policy.load_config import (
    context_length,
    load_generation_config,
    load_model_config,
    plain_config,
    stop_token_ids,
)
from qarl.policy.policy import Policy
from qarl.policy.skeleton import skeleton
from qarl.policy.stored_weights import StoredWeights
from qarl.policy.teacher import Teacher
from qarl.rollout.engine import SamplingParams
from qarl.rollout.native.engine import NativeEngine
from qarl.terminal.run_console import RunConsole
from qarl.weight_sync.snapshot import Snapshot, build_snapshot


@dataclass
class Opened:
    """A policy ready to generate. The engine holds `policy.current`."""

    target: Target
    policy: Policy
    tokenizer: PreTrainedTokenizerBase
    engine: NativeEngine
    generation: GenerationConfig

    def sampling(
        self,
        n: int,
        max_response_length: int,
        truncation: Truncation,
        seed: int = 0,
        stop: tuple[str, ...] = (),
        extra_stop_ids: tuple[int, ...] = (),
        ignore_eos: bool = False,
    ) -> SamplingParams:
        """Return sampling parameters that also stop at the model's end-of-sequence tokens, unless `ignore_eos`."""
        own = frozenset() if ignore_eos else stop_token_ids(self.generation, self.tokenizer)
        return SamplingParams(n, seed, max_response_length, truncation, stop, own | set(extra_stop_ids))

    def close(self) -> None:
        self.engine.close()


def context_of(target: Target) -> int:
    """Return the context length in tokens, limited by a run's `model.max_length`. Reads no weights.

    Raises UserError if the model's configuration does not state it.
    """
    return context_length(target.model, target.name, None if target.run is None else target.run.model.max_length)


def open_policy(
    target: Target,
    *,
    device: str = "auto",
    rollout: RolloutConfig | None = None,
    masters: Masters | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    max_length: int | None = None,
) -> Opened:
    """Build the policy of a run's checkpoint, an exported checkpoint or a model, without masters.

    Args:
        target: What to open. The codes of a run in its own scheme are compared with the digest that the run recorded.
        device: auto, cpu or cuda.
        rollout: Engine sizes (max_num_seqs, max_batched_tokens, kv_cache_tokens).
        masters: Masters of the target, if they are already open.
        tokenizer: Tokenizer of the target, if it is already loaded.
        max_length: Maximum tokens of prompt and response. None: the context.

    Raises:
        UserError: Something cannot be read or does not fit.
    """
    tokenizer = load_tokenizer(target.model) if tokenizer is None else tokenizer
    policy, generation = open_frozen(target, device, max_length, masters, tokenizer)
    engine = NativeEngine(policy.sampler, tokenizer, rollout or RolloutConfig())
    engine.publish(policy.current)
    return Opened(target, policy, tokenizer, engine, generation)


def open_frozen(
    target: Target,
    device: str = "auto",
    max_length: int | None = None,
    masters: Masters | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> tuple[Policy, GenerationConfig]:
    """Build a policy without masters, engine or gradients. For arguments and errors see `open_policy`.

    Returns:
        The policy, and the generation config of its model.
    """
    where = pick_device(device)
    if target.kind == "export":
        config = plain_config(load_model_config(target.model))
        dtype = _stored_dtype(target, config)
        snapshot = build_snapshot(0, _stored_forms(target, config, where))
        generation = load_generation_config(target.model)
    else:
        masters = masters or open_masters(target, tokenizer)
        config, generation = masters.config, masters.generation
        dtype = DTYPES[target.run.model.dtype if target.run else target.model.dtype]
        snapshot = snapshot_of(target, masters, dtype, where)
    limit = max_length or (target.run.model.max_length if target.run else None)
    policy = Policy(skeleton(config), scheme_of(target.quant), target.quant, dtype, where, limit, snapshot)
    return policy, generation


def open_teacher(config: Config, device: torch.device, context: int, console: RunConsole) -> Teacher | None:
    """Open the teacher of `objective.teacher` without master weights; None if there is none.

    Args:
        config: Configuration of the run.
        device: Device of the learner.
        context: Longest sequence of prompt and response in tokens.
        console: Shows progress.

    Raises:
        UserError: The teacher cannot be read.
    """
    section = config.objective.teacher
    if section is None:
        return None
    try:
        with console.phase("teacher"):
            target = resolve_target(section.path)
            if target.kind == "model":
                target = replace(target, model=target.model.model_copy(update={"dtype": section.dtype}))
            policy, _ = open_frozen(target, device.type, min(context, context_of(target)))
    except UserError as error:
        raise UserError(f"objective.teacher.path: {error}") from error
    assert section.loss is not None, "resolved"
    divergence = Divergence(section.loss, section.beta, section.temperature, section.top_k)
    return Teacher(policy, divergence, policy.current.manifest().digest())


def snapshot_of(target: Target, masters: Masters, dtype: torch.dtype, device: torch.device | str = "cpu") -> Snapshot:
    """Quantize masters to a snapshot. In a run's own scheme its codes must be those of the run (else UserError)."""
    snapshot = build_snapshot(masters.version or 0, masters.forms(target.quant, dtype, device))
    if same_codes_expected(target):
        require_codes(target, masters, snapshot.manifest().digest())
    return snapshot


def same_codes_expected(target: Target) -> bool:
    """Whether opening `target` gives the tensors that its run published: it uses the run's own scheme and layout."""
    if target.run is None or target.quant.init != "rtn":
        return False
    others = OF_TRAINING | {"kernels", "kv_cache_dtype"}  # they do not change codes
    return target.quant.model_dump(exclude=others) == target.run.quant.model_dump(exclude=others)


def require_codes(target: Target, masters: Masters, digest: str) -> None:
    """Raise UserError unless `digest`, of the new tensors, is the one that the run recorded."""
    if digest != masters.digest:
        raise UserError(
            f"{target.checkpoint}: its masters quantize to other codes than they did in the run; use the "
            "package versions in the run's environment.json"
        )


def _stored_dtype(target: Target, config: PreTrainedConfig) -> torch.dtype:
    dtype = config.dtype or torch.bfloat16
    if not isinstance(dtype, torch.dtype) or dtype not in DTYPES.values():
        raise UserError(f"{target.name}: config.json: dtype {dtype} is not supported; export it again")
    return dtype


def _stored_forms(
    target: Target, config: PreTrainedConfig, device: torch.device
) -> Iterator[tuple[str, LowBitWeight | Tensor]]:
    """Yield (name, parameter) of a quantized checkpoint, as stored in its files."""
    weights, dtype = _verified(target), _stored_dtype(target, config)
    for name, parameter in skeleton(config).named_parameters():
        stored = weights.stored(name)
        if isinstance(stored, Tensor):
            if name.removesuffix(".weight") in weights.quantized:
                raise UserError(
                    f"{weights.file(name)}: {name}: no scheme supports its groups (activation order); pass --scheme to "
                    "quantize its dequantized values"
                )
            yield name, stored.to(device, dtype)
            continue
        if stored.shape != tuple(parameter.shape):
            raise UserError(f"{target.name}: {name} is {list(stored.shape)}, config.json {list(parameter.shape)}")
        moved = {
            suffix: tensor if suffix == "weight_shape" else tensor.to(device)
            for suffix, tensor in stored.tensors.items()
        }
        yield name, replace(stored, tensors=moved)


def _verified(target: Target) -> StoredWeights:
    """Open the tensors of a quantized checkpoint.

    Raises:
        UserError: Tensors are missing, damaged or not finite, or differ from config.json or, if
            `target.verify_digests`, from qarl_export.json.
    """
    weights = model_weights(target.model, target.quant)
    assert weights is not None, "a quantized checkpoint is not a GGUF file"
    if target.digests is not None:
        target.digests.check_names(weights.files)
    weights.held = _verified_tensors(weights, target.digests)
    for name, tensor in weights.held.items():
        values = tensor.float() if tensor.dtype == torch.float8_e4m3fn else tensor
        if values.is_floating_point() and not values.isfinite().all():
            raise UserError(
                f"{weights.files[name].file}: {name} holds values that are NaN or infinite; restore it, or export it "
                "again"
            )
    return weights


def _verified_tensors(weights: StoredWeights, record: ExportRecord | None) -> dict[str, Tensor]:
    """Read all tensors, and compare each with `record` in a thread while the next ones are read.

    Hashing takes about as long as reading, and releases the GIL. Raises UserError for a tensor that differs.
    """
    tensors: dict[str, Tensor] = {}
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        digests = {}
        for name in weights.files:
            tensors[name] = weights.tensor(name)
            if record is not None:
                digests[name] = pool.submit(digest_of, tensors[name])
        for name, digest in digests.items():
            assert record is not None
            record.check_tensor(weights.files[name].file, name, digest.result())
    return tensors
