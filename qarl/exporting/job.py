"""Export a target to a directory."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from qarl_formats.compressed import quantization_config
from qarl_formats.scheme import is_ignored

from qarl.config.quant import GROUPED, scheme_of
from qarl.errors import UserError
from qarl.exporting.card import model_card
from qarl.exporting.readers import fault_of_experts
from qarl.exporting.writer import export_checkpoint
from qarl.inference.calibrated import calibrated
from qarl.inference.masters import Masters, open_masters
from qarl.inference.target import Target
from qarl.storage.loading import CheckpointDamaged
from qarl.storage.names import checkpoint_steps
from qarl.storage.shards import bf16_bytes, stored_bytes
from qarl.types import ExportResult
from qarl.utils.expert_names import is_router, of_experts
from qarl.utils.packed_linears import fusion_fault


def export_target(
    target: Target,
    out: Path,
    *,
    dtype: torch.dtype,
    max_shard_bytes: int,
    unpacked: bool = False,
    for_vllm: bool = True,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> ExportResult:
    """Export a run's checkpoint, or a model quantized without training (`quant.init`), in the scheme of `target`.

    Args:
        target: The run's checkpoint or the model.
        out, dtype, max_shard_bytes, unpacked, progress: See `export_checkpoint`.
        for_vllm: Reject what vLLM cannot load. If False, only transformers and qarl need to read the result.

    Raises:
        UserError: An option does not fit, or the checkpoint is damaged. The error then lists the other checkpoints.
    """
    scheme = scheme_of(target.quant)
    if unpacked and not scheme.unpackable:
        raise UserError(f"--unpacked: is for symmetric {GROUPED}, not {scheme.name}; leave it out")
    if unpacked and for_vllm and scheme.activation is None:
        raise UserError(f"--unpacked: vLLM loads {scheme.name} packed only; leave it out, or pass --no-vllm")
    masters = _open(target)
    if target.run is None:
        _check_options(target, masters)
    if for_vllm:
        _check_fusion(target, masters)
    masters = calibrated(target, masters)
    specs = masters.specs(target.quant, dtype, unpacked)
    stored = quantization_config(scheme, target.quant.ignore, unpacked) if scheme.quantized else None
    fault = None if stored is None else fault_of_experts(stored, sorted(masters.linears))
    card = model_card(
        target,
        scheme,
        str(dtype).removeprefix("torch."),
        None if stored is None else stored["format"],
        stored_bytes(specs),
        bf16_bytes(masters.shapes),
        fault,
    )
    written = export_checkpoint(
        target,
        masters,
        out,
        dtype=dtype,
        max_shard_bytes=max_shard_bytes,
        card=card,
        unpacked=unpacked,
        progress=progress,
    )
    return replace(written, fault=fault)


def _open(target: Target) -> Masters:
    try:
        return open_masters(target)
    except CheckpointDamaged as error:
        assert target.run_dir is not None  # only a run has checkpoints
        others = [str(step) for step in checkpoint_steps(target.run_dir / "checkpoints") if step != target.step]
        fix = f"export another one with --step ({', '.join(others)})" if others else "restore it from a copy"
        raise UserError(f"{error}; {fix}") from error


def _check_options(target: Target, masters: Masters) -> None:
    """Raise UserError if the scheme on the command line cannot store a layer, or an ignored layer does not exist.

    The `quant` section of a run was checked when the run started.
    """
    masters.check(scheme_of(target.quant), target.quant.ignore, place="--group-size")
    routers = [name.removesuffix(".weight") for name in masters.shapes if is_router(name)]  # never quantized
    for entry in target.quant.ignore:
        if entry != "lm_head" and not any(is_ignored(module, [entry]) for module in (*masters.linears, *routers)):
            raise UserError(
                f"--ignore: {entry!r} matches no Linear layer of {target.name}; give a name such as "
                f"{min(masters.linears)}, or re:<regex>"
            )


def _check_fusion(target: Target, masters: Masters) -> None:
    """Raise UserError if the export would quantize a part of a layer that vLLM fuses."""
    modules = [name.removesuffix(".weight") for name in masters.shapes]
    rows = {module: masters.shapes[f"{module}.weight"][0] for module in modules if module in masters.linears}
    fault = fusion_fault(scheme_of(target.quant), target.quant.ignore, rows)
    if fault is not None:
        key, reason = fault
        option = f"--{key}" if target.run is None else f"quant.{key} of the run"
        fix = {"ignore": "ignore both or neither", "scheme": "use another scheme"}[key]
        fix = f"{fix}, or" if target.run is None else "export its masters with --dtype bf16, or"
        readers = "qarl" if any(map(of_experts, masters.linears)) else "transformers and qarl"
        raise UserError(f"{option}: {reason}; {fix} pass --no-vllm; {readers} can read the result")
