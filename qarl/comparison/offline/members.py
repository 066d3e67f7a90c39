"""Measures the schemes one after another, with one policy in memory at a time."""

import math
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

from qarl.comparison.offline.divergence import Reference, final_states, token_numbers
from qarl.comparison.offline.speed import SpeedTest, engine_speed
from qarl.comparison.offline.targets import REFERENCE
from qarl.comparison.offline.windows import Windows
from qarl.config import RolloutConfig
from qarl.config.quant import scheme_of
from qarl.config.weight_files import stored_format
from qarl.errors import UserError
from qarl.inference.calibrated import calibrated
from qarl.inference.masters import Masters, open_masters
from qarl.inference.opening import Opened, open_policy
from qarl.inference.target import Target
from qarl.policy.device import DTYPES
from qarl.storage.disk import disk_errors
from qarl.storage.shards import stored_bytes
from qarl.weight_sync.snapshot import Snapshot


@dataclass(frozen=True)
class Bench:
    """Settings and data shared by all schemes.

    Attributes:
        targets: What is measured, by member name.
        reference: The unquantized model.
        masters: Its weights.
        windows: Text for divergence and perplexity.
        speed: Sizes of the speed test.
        device: Device of all policies.
        seed: Seed of the speed test.
        reference_file: Caches the reference's states and output layer between starts.
        say: Called with a status line.
        trained: Names of the targets that are trained policies, which have their own weights.
    """

    targets: Mapping[str, Target]
    reference: Target
    masters: Masters
    windows: Windows
    speed: SpeedTest
    device: torch.device
    seed: int
    reference_file: Path
    say: Callable[[str], None]
    trained: Collection[str] = ()

    def open(self, target: Target, masters: Masters | None = None) -> Opened:
        masters = masters or self.masters_of(target)
        return open_policy(target, device=self.device.type, rollout=self.sizes, masters=masters)

    @property
    def sizes(self) -> RolloutConfig:
        """Engine sizes of the speed test."""
        test = self.speed
        return RolloutConfig(max_num_seqs=test.batch, max_batched_tokens=test.batch * test.prompt_tokens)

    def masters_of(self, target: Target) -> Masters:
        """Return the master weights that the target's scheme quantizes."""
        # Master weights from a quantized checkpoint depend on the scheme; see `qarl.policy.stored_weights`.
        own = target.kind == "model" and stored_format(Path(target.model.path)) is not None
        return open_masters(target) if own else self.masters


def measure(bench: Bench, schemes: list[str]) -> Iterator[dict[str, Any]]:
    """Yield a member per scheme, in order: finished, or failed with the reason.

    Raises:
        UserError: bf16 cannot run.
    """
    reference = _reference(bench)
    for scheme in schemes:
        began = time.perf_counter()
        try:
            numbers = _numbers(bench, scheme, reference)
        except (UserError, torch.OutOfMemoryError) as error:
            reason = " ".join(str(error).split())
            bench.say(f"{scheme}: failed: {reason}")
            yield {"name": scheme, "state": "failed", "reason": reason}
            continue
        yield {"name": scheme, "state": "finished", "reason": None, **numbers, "seconds": time.perf_counter() - began}


def _opened(bench: Bench, name: str) -> tuple[Opened, Masters]:
    """Open a member. Return its policy, and the master weights that its codes approximate."""
    target = bench.targets[name]
    if name in bench.trained:
        bench.say(f"{name}: opening")
        opened = open_policy(target, device=bench.device.type, rollout=bench.sizes)
        mine, its = bench.masters.shapes, dict(opened.policy.model.named_parameters())
        if mine.keys() != its.keys() or any(mine[key] != tuple(its[key].shape) for key in mine):
            raise UserError(
                f"{target.name}: its parameters differ in name or shape from those of {bench.reference.name}; give a "
                "policy trained from that model"
            )
        return opened, bench.masters
    bench.masters.check(scheme_of(target.quant), target.quant.ignore, "--group-size")
    bench.say(f"{name}: quantizing" if name != REFERENCE else f"{name}: opening")
    masters = calibrated(target, bench.masters_of(target), bench.device.type, lambda line: bench.say(f"{name}: {line}"))
    return bench.open(target, masters), masters


def _numbers(bench: Bench, scheme: str, reference: Reference) -> dict[str, Any]:
    target = bench.targets[scheme]
    opened, masters = _opened(bench, scheme)
    # AWQ's codes approximate scaled weights. GPTQ's approximate the model's own.
    layers = list(weight_errors(masters if target.quant.init == "awq" else bench.masters, opened.policy.current))
    bench.say(f"{scheme}: {len(bench.windows.ids)} windows of text")
    text = token_numbers(opened.policy, final_states(opened.policy, bench.windows), reference, bench.windows)
    bench.say(f"{scheme}: speed")
    speed = engine_speed(opened, [token for ids in bench.windows.ids for token in ids], bench.speed, bench.seed)
    opened.close()
    size, plain = (
        stored_bytes(bench.masters.specs(quant, opened.policy.dtype)) for quant in (target.quant, bench.reference.quant)
    )
    return {
        "group_size": opened.policy.scheme.group_size,
        **text.summary(),
        "checkpoint_bytes": size,
        "checkpoint_ratio": size / plain,
        **speed,
        "weight_error": layers,
    }


def _reference(bench: Bench) -> Reference:
    """Return the bf16 policy's states before each predicted token, in the compute dtype, and its output layer."""
    windows, target = bench.windows, bench.reference
    dtype = DTYPES[target.run.model.dtype if target.run else target.model.dtype]
    shape = (len(windows.ids), windows.predictions, bench.masters.config.hidden_size)
    try:
        held = load_file(bench.reference_file)
        if tuple(held["states"].shape) == shape and held["states"].dtype == dtype:
            return Reference(held["states"], held["head"])
    except (OSError, SafetensorError, KeyError):
        pass  # missing or incomplete
    bench.say(f"{REFERENCE}: the reference, {shape[0]} windows of text")
    opened = bench.open(target)
    found = Reference(final_states(opened.policy, windows), opened.policy.sampler.weights.head.detach().cpu())
    opened.close()
    data = save(found._asdict())
    temporary = bench.reference_file.with_suffix(".tmp")
    with disk_errors(bench.reference_file, len(data), place="--out"):
        temporary.write_bytes(data)
        temporary.replace(bench.reference_file)
    return found


def weight_errors(masters: Masters, snapshot: Snapshot) -> Iterator[dict[str, Any]]:
    """Yield the error of each Linear layer except the output layer, in model order.

    Compares the master weights, one in memory at a time, with the tensors in `snapshot`, which the forward uses: codes
    times stored scales in float32, or the values of an unquantized layer in the compute dtype.

    Yields:
        Results of `error_of`, with `module`, `layer` (index of the decoder layer; None outside of them) and `kind`
        (`q_proj`, ...).
    """
    for name in masters.shapes:
        module = name.removesuffix(".weight")
        if module not in masters.linears or not name.endswith(".weight"):
            continue
        weight = snapshot.weight(module)
        master = masters.read(name).to(weight.device)
        dequantized = weight.dequantize(torch.float32)
        parts = module.split(".")
        layer = next((int(part) for part in parts if part.isdigit()), None)
        yield {"module": module, "layer": layer, "kind": parts[-1], **error_of(master, dequantized)}


def error_of(weight: Tensor, dequantized: Tensor) -> dict[str, float | None]:
    """Compute the quantization error of a matrix in float64.

    Args:
        weight: W, a master weight.
        dequantized: Q, of the same shape.

    Returns:
        relative: ||W - Q|| / ||W|| (Frobenius norm; None for a zero matrix). sqnr_db: 20 log10(||W|| / ||W - Q||), None
        if equal. max_abs: largest |W - Q|.
    """
    wide = weight.double()
    difference = wide - dequantized.double()
    size, lost = wide.norm().item(), difference.norm().item()
    return {
        "relative": lost / size if size else None,
        "sqnr_db": 20 * math.log10(size / lost) if size and lost else None,
        "max_abs": difference.abs().max().item(),
    }
