"""Settings that do not work on several ranks."""

import importlib.util
from collections.abc import Iterator

from qarl.config.config import Config
from qarl.inputs.section import Fault


def several_ranks_faults(config: Config, count: int, gpus: int | None = None) -> Iterator[Fault]:
    """Settings that do not work on `count` ranks.

    Args:
        config: The configuration.
        count: Number of ranks.
        gpus: Number of GPUs on this machine if all ranks run on it; None if unknown or there are none.
    """
    with_ranks = f"with {count} ranks"
    vllm = config.rollout.vllm
    sampling = vllm.samplers(count)
    if config.rollout.engine == "vllm" and vllm.data_parallel is not None and vllm.data_parallel > len(sampling):
        needed = f"{vllm.tensor_parallel} ranks" if vllm.spans else "one rank"
        text = (
            f"each replica needs {needed}, but there are only {count}; start more (qarl train --nproc), or leave null"
        )
        yield config.fault("rollout.vllm.data_parallel", text)
    if count == 1:
        return
    if gpus is not None and count > gpus:
        text = f"{count} ranks, but {_visible(gpus)}; start at most one rank per GPU"
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
        if gpus is not None and vllm.spans and (last := sampling[-1] + vllm.tensor_parallel - 1) >= gpus:
            text = f"vLLM of rank {sampling[-1]} would use GPUs {sampling[-1]} to {last}, but {_visible(gpus)}"
            text += f"; start a multiple of {vllm.tensor_parallel} ranks"
            yield config.fault("rollout.vllm.tensor_parallel", text)
        if gpus is not None and vllm.device is not None:
            last = vllm.device + len(sampling) * vllm.tensor_parallel - 1
            if vllm.device < count:
                yield config.fault("rollout.vllm.device", _of_learner(count))
            elif last >= gpus:
                text = f"the replicas would use GPUs {vllm.device} to {last}, but {_visible(gpus)}"
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
        yield Fault(("rollout", "async", "device"), first, _of_learner(count))
    elif first + count > gpus:
        text = f"each rank has a sampler, on GPUs {first} to {first + count - 1}, but {_visible(gpus)}"
        yield Fault(("rollout", "async"), f"with {count} ranks", f"{text}; start fewer ranks")


def _visible(gpus: int) -> str:
    return f"this machine has {gpus} visible GPUs (0 to {gpus - 1})" if gpus > 1 else "this machine has one visible GPU"


def _of_learner(count: int) -> str:
    return f"is a learner's GPU: {count} ranks use GPUs 0 to {count - 1}; must be {count} or more, or null"


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
