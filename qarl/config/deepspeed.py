"""Validation of a DeepSpeed JSON, given inside the configuration or as a separate file."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from qarl.inputs.json import read_json_object
from qarl.inputs.section import Fault

# Keys that qarl sets itself, and the qarl key to use instead.
DECIDED = {
    "optimizer": "set optim.name",
    "scheduler": "set optim.schedule",
    "fp16": "set model.dtype",
    "bf16": "set model.dtype",
    "amp": "set model.dtype",
    "data_types": "set model.dtype",
    "torch_autocast": "set model.dtype",
    "communication_data_type": "gradients are added in float32; leave it out",
    "prescale_gradients": "gradients are added in float32; leave it out",
    "gradient_predivide_factor": "gradients are added in float32; leave it out",
    "gradient_clipping": "set optim.max_grad_norm",
    "gradient_accumulation_steps": "set train.minibatch_size",
    "train_batch_size": "set train.minibatch_size",
    "train_micro_batch_size_per_gpu": "set train.micro_batch_tokens",
    "activation_checkpointing": "set train.recompute",
    "checkpoint": "see the section checkpoint",
    "tensorboard": "see the section logging",
    "wandb": "see the section logging",
    "csv_monitor": "see the section logging",
}
DECIDED_ZERO = {
    "stage": "set distributed.zero_stage",
    "offload_optimizer": "use distributed.engine: rows with optim.offload",
    "offload_param": "use distributed.engine: rows with optim.offload",
    "cpu_offload": "use distributed.engine: rows with optim.offload",
    "overlap_comm": "gradient buckets are always reduced as soon as they are complete; leave it out",
    "contiguous_gradients": "gradients are always contiguous; leave it out",
}
# Keys that have an effect although DeepSpeed's module never runs a forward.
READ = ("comms_logger", "dump_state", "zero_optimization")
READ_COMMS = {"enabled": bool, "verbose": bool, "debug": bool, "prof_all": bool, "prof_ops": list}
READ_ZERO = {
    "allgather_bucket_size": int,
    "reduce_bucket_size": int,
    "reduce_scatter": bool,
    "round_robin_gradients": bool,
    "sub_group_size": int,
    "use_multi_rank_bucket_allreduce": bool,
}


def deepspeed_keys(config: dict[str, Any] | str) -> dict[str, Any]:
    """Read `distributed.config`, a mapping or the path of a JSON file. Raises NoSuchFile or Unreadable."""
    return read_json_object(Path(config).expanduser()) if isinstance(config, str) else config


def key_faults(keys: Mapping[str, Any]) -> Iterator[Fault]:
    """Faults of keys that qarl sets itself or that would have no effect."""
    yield from _faults(keys, (), DECIDED, READ)
    if "dump_state" in keys and (fault := _value_fault(keys["dump_state"], bool)):
        yield Fault(("dump_state",), keys["dump_state"], fault)
    yield from _section_faults(keys, "zero_optimization", DECIDED_ZERO, READ_ZERO)
    yield from _section_faults(keys, "comms_logger", {}, READ_COMMS)


def _section_faults(
    keys: Mapping[str, Any], name: str, decided: Mapping[str, str], read: Mapping[str, type]
) -> Iterator[Fault]:
    section = keys.get(name, {})
    if not isinstance(section, dict):
        yield Fault((name,), section, "must be a mapping")
        return
    yield from _faults(section, (name,), decided, tuple(read))
    for key, kind in read.items():
        if key in section and (fault := _value_fault(section[key], kind)):
            yield Fault((name, key), section[key], fault)


def _value_fault(value: Any, kind: type) -> str | None:
    if kind is bool:
        return None if isinstance(value, bool) else "must be true or false"
    if kind is list:
        texts = isinstance(value, list) and all(isinstance(one, str) for one in value)
        return None if texts else "must be a list of names"
    whole = not isinstance(value, bool) and isinstance(value, (int, float)) and value == value // 1
    return None if whole and 0 < value < 2**63 else "must be a whole number above 0"


def _faults(
    keys: Mapping[str, Any], place: tuple[str, ...], decided: Mapping[str, str], read: tuple[str, ...]
) -> Iterator[Fault]:
    for key, value in keys.items():
        if key in decided:
            yield Fault((*place, key), value, f"is decided elsewhere; {decided[key]}")
        elif key not in read:
            yield Fault((*place, key), value, f"has no effect here; leave it out. Supported keys: {', '.join(read)}")
