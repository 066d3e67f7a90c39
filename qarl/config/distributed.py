"""The `distributed` section: optimizer engine, sharding and timeouts of a run on several GPUs."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal

from pydantic import JsonValue

from qarl.config.base import Fault, Field, Section, path_faults
from qarl.config.deepspeed import key_faults
from qarl.config.limits import SECONDS

if TYPE_CHECKING:
    from qarl.config.config import Config


class DistributedConfig(Section):
    """Settings for several ranks, as started by `qarl train --nproc`, torchrun or the deepspeed launcher."""

    engine: Literal["rows", "deepspeed"] = Field(
        "rows",
        description="Engine that shards master weights, gradients and optimizer state. rows: qarl's own, shards every "
        "matrix by rows and keeps all codes on every rank; deepspeed: DeepSpeed ZeRO.",
    )
    zero_stage: Literal[0, 1, 2, 3] | None = Field(
        None,
        description="With engine deepspeed: ZeRO stage. 0: no sharding; 1: optimizer state; 2: and gradients; 3: and "
        "master weights. null: 3.",
    )
    timeout_s: float = Field(
        600.0,
        ge=1,
        le=SECONDS,
        description="Timeout in seconds at startup and at each collective, and for a rank without a heartbeat. Must "
        "exceed the largest delay between ranks, e.g. by a slow reward function.",
    )
    config: dict[str, JsonValue] | str = Field(
        {},
        description="With engine deepspeed: further DeepSpeed JSON keys, or the path of a JSON file. Keys set by qarl "
        "itself, or without effect, are errors.",
    )

    def faults(self) -> Iterator[Fault]:
        if self.engine == "rows":
            if self.zero_stage is not None:
                yield self.fault("zero_stage", "is only for DeepSpeed; leave null, or use engine: deepspeed")
            if self.config:
                yield self.fault("config", "is only for DeepSpeed; leave it out, or use engine: deepspeed")
        if isinstance(self.config, str):
            yield from path_faults("config", self.config)
        else:
            yield from (Fault(("config", *fault.key), *fault[1:]) for fault in key_faults(self.config))

    def resolved(self) -> dict[str, Any]:
        return {"zero_stage": 3} if self.engine == "deepspeed" and self.zero_stage is None else {}


def several_ranks_faults(config: Config, count: int, gpus: int | None = None) -> Iterator[Fault]:
    """Settings that do not work on `count` ranks.

    Args:
        config: The configuration.
        count: Number of ranks.
        gpus: Number of GPUs on this machine if all ranks run on it; None if unknown or there are none.
    """
    with_ranks = f"with {count} ranks"
    vllm = config.rollout.vllm
    drawing = vllm.samplers(count)
    if config.rollout.engine == "vllm" and vllm.data_parallel is not None and vllm.data_parallel > len(drawing):
        beside = f"{vllm.tensor_parallel} ranks" if vllm.spans else "one rank"
        text = (
            f"each replica needs {beside}, but there are only {count}; start more (qarl train --nproc), or leave null"
        )
        yield config.fault("rollout.vllm.data_parallel", text)
    if count == 1:
        return
    if gpus is not None and count > gpus:
        text = f"{count} ranks, but this machine shows {gpus} GPUs; start at most one rank per GPU"
        yield config.fault("model.device", text)
    if config.rollout.replay is not None:
        text = "a replay runs on one rank; start one, or leave it out"
        yield Fault(("rollout", "replay"), with_ranks, text)
    if config.rollout.asynchronous is not None:
        yield from _async_faults(config, count, gpus)
    if config.distributed.engine == "deepspeed":
        yield from _deepspeed_faults(config)
    for key in ("gradients_every", "backward_every"):
        if getattr(config.diagnostics, key):
            yield config.fault(f"diagnostics.{key}", f"needs whole gradients on one rank {with_ranks}; must be 0")
    if config.rollout.engine == "vllm":
        if vllm.process == "inline":
            text = f"{with_ranks}, vLLM would use the learner's process groups as its own; use separate"
            yield config.fault("rollout.vllm.process", text)
        if gpus is not None and vllm.spans and (last := drawing[-1] + vllm.tensor_parallel - 1) >= gpus:
            text = f"rank {drawing[-1]}'s vLLM would be on GPUs {drawing[-1]} to {last}, but this machine shows {gpus}"
            text += f", from 0; start a multiple of {vllm.tensor_parallel} ranks"
            yield config.fault("rollout.vllm.tensor_parallel", text)
        if gpus is not None and vllm.device is not None:
            last = vllm.device + len(drawing) * vllm.tensor_parallel - 1
            if vllm.device < count:
                text = f"is a learner's GPU with {count} ranks, one GPU each from 0; must be {count} or more, or null"
                yield config.fault("rollout.vllm.device", text)
            elif last >= gpus:
                text = f"vLLMs would be on GPUs {vllm.device} to {last}, but this machine shows {gpus}, from 0"
                yield config.fault("rollout.vllm.device", text)


def _async_faults(config: Config, count: int, gpus: int | None) -> Iterator[Fault]:
    """GPUs for the samplers of asynchronous rollouts: one per rank, after the learners'."""
    ahead, vllm = config.rollout.asynchronous, config.rollout.vllm
    assert ahead is not None, "the run samples asynchronously"
    if config.rollout.engine == "vllm" and vllm.data_parallel is not None:
        yield config.fault("rollout.vllm.data_parallel", "with rollout.async each rank has a sampler; leave null")
    if gpus is None:
        return
    first = count if ahead.device is None else ahead.device
    if first < count:
        text = f"is a learner's GPU with {count} ranks, one GPU each from 0; must be {count} or more, or null"
        yield Fault(("rollout", "async", "device"), first, text)
    elif first + count > gpus:
        text = f"each rank has a sampler, on GPUs {first} to {first + count - 1}, but this machine shows {gpus}, from 0"
        yield Fault(("rollout", "async"), f"with {count} ranks", f"{text}; start fewer ranks")


def _deepspeed_faults(config: Config) -> Iterator[Fault]:
    rows = "or distributed.engine: rows"
    if importlib.util.find_spec("deepspeed") is None:
        yield config.fault("distributed.engine", f"needs the package deepspeed; pip install 'qarl[deepspeed]', {rows}")
    if config.optim.name != "adamw":
        yield config.fault("optim.name", f"DeepSpeed's Muon is a different algorithm; use adamw, {rows}")
    if config.optim.offload:
        yield config.fault(
            "optim.offload", f"DeepSpeed offloads with another Adam, which rounds differently; use false, {rows}"
        )
