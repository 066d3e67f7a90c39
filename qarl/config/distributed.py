"""The `distributed` section: optimizer engine, sharding and timeouts of a run on several GPUs."""

from collections.abc import Iterator
from typing import Any, Literal

from pydantic import JsonValue

from qarl.config.deepspeed import key_faults
from qarl.inputs.limits import SECONDS
from qarl.inputs.section import Fault, Field, Section, path_faults


class DistributedConfig(Section):
    """Settings for several ranks, as started by `qarl train --nproc`, torchrun or the deepspeed launcher."""

    engine: Literal["rows", "deepspeed"] = Field(
        "rows",
        description="Engine that shards master weights, gradients and optimizer state. rows: qarl's own, shards every "
        "matrix by rows and keeps all codes on every rank; deepspeed: DeepSpeed ZeRO.",
    )
    zero_stage: Literal[0, 1, 2, 3] | None = Field(
        None,
        description="With engine deepspeed: ZeRO stage. 0: no sharding; 1: optimizer state; 2: also gradients; 3: also "
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
