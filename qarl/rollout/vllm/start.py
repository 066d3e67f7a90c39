"""How vLLM starts: what is imported and put into it before, and what it must be afterwards.

Importing this module does not import vLLM; its functions do.
"""

from __future__ import annotations

import json
from contextlib import suppress
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from qarl.errors import UserError
from qarl.rollout.vllm.alone import no_way_in
from qarl.rollout.vllm.arguments import engine_arguments
from qarl.rollout.vllm.meeting import meeting_in
from qarl.rollout.vllm.phases import Phases
from qarl.rollout.vllm.recording import tapped
from qarl.rollout.vllm.settings import SamplerSettings

if TYPE_CHECKING:
    from vllm import LLM


def import_ahead(exact: bool) -> None:
    """Import what a start will import, in an environment that is prepared. exact: for `rollout.numerics: exact`.

    What cannot be imported is left to the start, which says so.
    """
    names = ["vllm.entrypoints.llm", "vllm.v1.engine.core", "qarl.rollout.vllm.linear_methods"]
    names += ["qarl.rollout.vllm.exact.start"] if exact else []
    with suppress(Exception):
        from vllm.platforms import current_platform

        names.append(f"vllm.v1.worker.{'cpu' if current_platform.is_cpu() else 'gpu'}_worker")
    for name in names:
        with suppress(Exception):
            import_module(name)


def start_vllm(settings: SamplerSettings, phases: Phases) -> LLM:
    """vLLM with the model in `settings.checkpoint`. phases: get the parts of it. Raises whatever vLLM raises."""
    from vllm import LLM

    from qarl.rollout.vllm.onednn import keep_scales
    from qarl.rollout.vllm.plugin import register
    from qarl.rollout.vllm.sampling import batch_seeded_noise

    keep_scales()
    batch_seeded_noise()
    register()  # vLLM does it itself where qarl is installed, but not where it is only on the path
    backend = "gloo" if settings.cuda is None else "nccl"
    groups = no_way_in(backend)
    if settings.meeting is not None:
        groups = meeting_in(settings.meeting, backend, settings.shard, settings.shards)
    arguments = engine_arguments(settings)
    if settings.numerics == "fast":
        _import_model(settings.checkpoint)
    phases.end("imports")
    routers = tapped(settings.routing and settings.numerics == "fast")
    with groups, routers, phases.of_worker(partial(_loaded, settings)):
        return LLM(str(settings.checkpoint), **arguments)


def _import_model(checkpoint: Path) -> None:
    """Import vLLM's class of the checkpoint's model here, where it will run: vLLM would ask another process about it,
    which imports all of vLLM for that."""
    from vllm.model_executor.models.registry import ModelRegistry

    for name in json.loads((checkpoint / "config.json").read_text())["architectures"]:
        if (known := ModelRegistry.models.get(name)) is not None and hasattr(known, "module_name"):
            ModelRegistry.register_model(name, known.load_model_cls())


def _loaded(settings: SamplerSettings, worker: Any) -> None:
    """vLLM's worker holds the weights, and has run nothing."""
    if settings.numerics == "exact":
        from qarl.rollout.vllm.exact.rehearsal import rehearse
        from qarl.rollout.vllm.exact.start import take_over

        take_over(worker.model_runner)
        rehearse(worker.model_runner)


def require_served(model: nn.Module) -> None:
    """Raise UserError where vLLM multiplies a layer with kernels of its own."""
    if names := unserved(model):
        raise UserError(
            f"rollout.linear_kernels: qarl has no kernel for '{names[0]}' in vLLM; set rollout.linear_kernels=vllm"
        )


def unserved(model: nn.Module) -> list[str]:
    """Names of the model's linear layers and experts that vLLM multiplies with kernels of its own."""
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
    from vllm.model_executor.layers.linear import LinearBase

    from qarl.rollout.vllm.expert_kernels import experts_method
    from qarl.rollout.vllm.linear_kernels import kernel_of

    return [
        name
        for name, module in model.named_modules()
        if (isinstance(module, LinearBase) and kernel_of(module) is None)
        or (isinstance(module, RoutedExperts) and experts_method(module) is None)
    ]
