"""Run directories like those of training, without training: a tiny model's master weights, changed per checkpoint."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from plain_settings import plain_config
from safetensors import safe_open
from torch import Tensor
from whole_pieces import whole_pieces

from qarl.config.quant import scheme_of
from qarl.exporting.job import export_target
from qarl.inference.target import Target, resolve_target
from qarl.policy.device import DTYPES
from qarl.policy.load import load_model
from qarl.policy.policy import Policy
from qarl.storage.checkpoint import CheckpointStore
from qarl.types import ExportResult
from qarl.weight_sync.snapshot import Snapshot

SCHEMES: dict[str, dict[str, Any]] = {
    "w4a16-g32": {"scheme": "w4a16", "group_size": 32},
    "w4a16-g64": {"scheme": "w4a16", "group_size": 64},
    "asymmetric": {"scheme": "w4a16", "group_size": 32, "symmetric": False},
    "symmetric7": {"scheme": "w4a16", "group_size": 32, "grid": "symmetric7"},
    "channel": {"scheme": "w4a16", "group_size": -1},
    "w8a8": {"scheme": "w8a8"},
    "fp8": {"scheme": "fp8"},
    "w4a8": {"scheme": "w4a8", "group_size": 32},
    "fp8_block": {"scheme": "fp8_block"},
    "nvfp4a16": {"scheme": "nvfp4a16"},
}


@dataclass
class TinyRun:
    """path: Run directory. snapshots: The run's published weights per step."""

    path: Path
    snapshots: dict[int, Snapshot]

    def export(self, out: Path, target: Target | None = None, **options: Any) -> ExportResult:
        target = target or resolve_target(str(self.path))
        dtype = DTYPES[target.model.dtype]
        # Tiny layers have fewer rows than a block of fp8_block, so vLLM cannot fuse them.
        return export_target(target, out, **{"dtype": dtype, "max_shard_bytes": 10**9, "for_vllm": False} | options)


def save_run(path: Path, model: Path, steps: tuple[int, ...] = (2, 4), noise: float = 0.01, **quant: Any) -> TinyRun:
    """noise: Standard deviation of the change of every master weight per step. quant: The `quant` section."""
    config = plain_config(
        model={"path": str(model)},
        quant=quant or SCHEMES["w4a16-g32"],
        rollout={"n": 4, "max_response_length": 8},
        data={"max_prompt_length": 64},
        train={"steps": 6, "prompts_per_step": 4, "run_dir": str(path)},
    )
    policy = Policy(
        load_model(config.model), scheme_of(config.quant), config.quant, DTYPES[config.model.dtype], torch.device("cpu")
    )
    store = CheckpointStore(path / "checkpoints", 0)
    (path / "config.yaml").write_text(config.to_yaml())
    generator = torch.Generator().manual_seed(7)
    snapshots = {}
    for step in steps:
        masters = dict(policy.named_parameters())
        with torch.no_grad():
            for parameter in masters.values():
                parameter.add_(torch.randn(parameter.shape, generator=generator) * noise)
        snapshots[step] = policy.refresh(version=step)
        state = {"version": step, "snapshot_sha256": snapshots[step].manifest().digest()}
        store.save(step, whole_pieces({"masters": masters, "optimizer": {}}), state)
    records = [
        {"step": step, "reward/mean": step / 10, "mismatch/delta_abs_mean": 0.0, "mismatch/delta_abs_max": 0.0}
        for step in range(1, steps[-1] + 1)
    ]
    (path / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    (path / "environment.json").write_text("{}")
    return TinyRun(path, snapshots)


def stored_tensors(directory: Path) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for path in sorted(directory.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            found |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
    return found


def entries(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def same_bytes(a: Tensor, b: Tensor) -> bool:
    raw = [t.contiguous().reshape(-1).view(torch.uint8) for t in (a, b)]
    return (a.dtype, a.shape) == (b.dtype, b.shape) and torch.equal(*raw)
