"""How a sampler's process begins, also before there is a policy: it imports vLLM while the learner loads the model."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from qarl.config import Config
from qarl.errors import UserError
from qarl.rollout.vllm.launch import sampler_gpu, sampler_threads
from qarl.rollout.vllm.process import BegunProcess, ended_with
from qarl.weight_sync.connection import SamplerFault
from qarl.weight_sync.transport import Transport, open_transport

LOG = "sampler.log"  # in the directory of a run, or of a rank's
MEMORY_HINT = " (rollout.vllm.memory_frac, rollout.kv_cache_tokens and model.max_length decide what it takes)"


class SamplerError(UserError):
    """vLLM cannot go on, however often it is started."""


def not_started(fault: SamplerFault, log: Path) -> SamplerError:
    """That of a first start."""
    hint = MEMORY_HINT if "memory" in str(fault).lower() or "KV cache" in str(fault) else ""
    return SamplerError(f"rollout.vllm: vLLM did not start: {fault}{hint}{see(log)}")


def see(log: Path) -> str:
    """Where to read on: the log, if anything was printed; one that is empty may go with a start that is refused."""
    return f"; see {log}" if log.exists() and log.stat().st_size else ""


@dataclass(frozen=True)
class BegunSampler:
    """A process of a run's vLLM. transport: for later publications. log: what it prints."""

    begun: BegunProcess
    transport: Transport
    log: Path

    def look(self) -> None:
        """Raise SamplerError where it has ended, which before its start is by itself."""
        if (code := self.begun.process.poll()) is not None:
            raise not_started(ended_with(code), self.log)

    def close(self) -> None:
        """End it, if it was not taken over."""
        self.begun.close()
        self.transport.close()


def early_sampler(config: Config, device: torch.device, place: Path) -> BegunSampler | None:
    """`begin_sampler`; None where `config` has no vLLM that is one process, or it cannot begin yet."""
    rollout = config.rollout
    if rollout.engine != "vllm" or rollout.vllm.process == "inline" or rollout.vllm.tensor_parallel > 1:
        return None
    try:
        return begin_sampler(config, device, place)
    except (OSError, UserError):  # which the start will tell, if it comes again
        return None


def begin_sampler(config: Config, device: torch.device, place: Path) -> BegunSampler:
    """Begin the process of the vLLM that `config` asks for.

    Raises OSError, and UserError where its log cannot be written.
    device: the learner's. place: see `VLLMEngine`. Its threads are those that torch has now.
    """
    rollout, threads = config.rollout, sampler_threads(device)
    transport = open_transport(device, sampler_gpu(config))
    try:
        begun = BegunProcess(rollout.linear_products, rollout.numerics, threads, transport.plan, place / LOG)
    except BaseException:
        transport.close()
        raise
    return BegunSampler(begun, transport, place / LOG)
