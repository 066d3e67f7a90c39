"""`rollout.numerics: fast`: runs vLLM's own model, and loads published tensors into its layers."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import wraps
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from qarl.errors import UserError
from qarl.rollout.vllm.numerics import Numerics
from qarl.rollout.vllm.own_kernels.head import Float32Head, use_float32_head
from qarl.rollout.vllm.own_kernels.limits import (
    import_model_class,
    keep_int8_scales_alive,
    known_limits,
    request_amx,
)
from qarl.rollout.vllm.own_kernels.loaded_model import LoadedModel
from qarl.rollout.vllm.own_kernels.loading import Loader, stored
from qarl.rollout.vllm.own_kernels.tensor_parallel import Shard, all_agree, rendezvous, shard_fingerprints
from qarl.rollout.vllm.recording import Experts, RoutingBuffer
from qarl.rollout.vllm.sandbox import without_listening_sockets
from qarl.rollout.vllm.settings import SamplerSettings
from qarl.weight_sync.fingerprints import METADATA, Fingerprint, PublishError, fingerprints, verify


class OwnKernels(Numerics):
    """See `Numerics`."""

    def __init__(self, settings: SamplerSettings) -> None:
        self._settings = settings
        self._shard = Shard(settings.shard, settings.shards)
        self._head: Float32Head | None = None

    @contextmanager
    def starting(self) -> Iterator[None]:
        settings = self._settings
        keep_int8_scales_alive()
        request_amx()
        import_model_class(settings.checkpoint)
        backend = "nccl" if settings.on_gpu else "gloo"
        groups = without_listening_sockets(backend)
        if settings.rendezvous is not None:
            groups = rendezvous(settings.rendezvous, backend, settings.shard, settings.shards)
        with groups, routers_recorded() if settings.routing else nullcontext():
            yield

    def started(self, worker: Any, expected: Mapping[str, Fingerprint]) -> None:
        settings, self._model = self._settings, worker.model_runner.get_model()
        if not settings.on_gpu:  # a reload does not update vLLM's packed copy of a tied output layer
            self._head = use_float32_head(self._model)
        self._parts = dict(expected)
        if self._shard.count > 1:
            self._parts |= self._parts_of_checkpoint(expected, worker.device)
        self._held = LoadedModel(self._model, self._parts)
        self.proved_frac = self._held.proved_frac
        self._loader = Loader(worker, self._held, expected, settings.checkpoint, settings.staging, self._shard)

    def _parts_of_checkpoint(self, expected: Mapping[str, Fingerprint], device: Any) -> dict[str, Fingerprint]:
        """Return fingerprints of this process's part of each tensor. Raises PublishError if the checkpoint differs."""
        checkpoint = self._settings.checkpoint
        whole = {name: fingerprint for name, fingerprint in expected.items() if not name.endswith(METADATA)}
        verify(0, whole, fingerprints(stored(checkpoint, set(whole), device)), "the checkpoint")
        return shard_fingerprints(stored(checkpoint, set(whole), device), self._shard)

    def base(self, name: str, expected: Mapping[str, Fingerprint]) -> Tensor:
        return self._loader.base(name, expected)

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        self._loader.load(tensors)
        if self._head is not None:
            self._head.refresh()
        if self._shard.count > 1:
            self._parts |= shard_fingerprints(tensors.items(), self._shard)

    def check(self, version: int, expected: Mapping[str, Fingerprint]) -> None:
        self._held.check(version, self._parts if self._shard.count > 1 else expected)
        if self._head is not None and not self._head.is_current():
            raise PublishError(
                f"publish of version {version}: the float32 copy of vLLM's output layer differs from its weight"
            )

    def all_agree(self, ok: bool) -> bool:
        return all_agree(ok) if self._shard.count > 1 else ok

    def experts(self) -> tuple[Experts, int]:
        modules = self._model.modules()
        return routers_of(self._model), next(m.moe_config.num_experts for m in modules if hasattr(m, "moe_config"))

    def notes(self) -> list[str]:
        import vllm

        config = json.loads((self._settings.checkpoint / "config.json").read_text())
        # `require_vllm` has rejected experts that vLLM has no kernels for.
        _, note = known_limits(config.get("quantization_config"), vllm.__version__, experts=False)
        return [f"vLLM {vllm.__version__}: {note}"] if note else []

    def before_sleep(self) -> None:
        self._loader.kernel_tensors.save()

    def after_sleep(self) -> None:
        self._loader.kernel_tensors.restore()


def routers_of(model: nn.Module) -> Experts:
    """Return a reader of the experts that a model's routers chose in the last forward, in layer order."""
    runners: list[Any] = [module for module in model.modules() if hasattr(module, "routed_experts")]
    buffers: list[Any] = [getattr(runner.router, "capture_fn", None) for runner in runners]
    if not buffers or not all(isinstance(buffer, RoutingBuffer) for buffer in buffers):
        raise ValueError("vLLM created its routers without qarl's buffers")
    if any(runner.routed_experts.quant_method.is_monolithic for runner in runners):
        raise UserError("model.routing: vLLM's kernel for these experts reports no routing; set rollout.numerics=exact")
    return lambda rows: torch.stack([buffer.rows(rows) for buffer in buffers], 1).sort(-1).values


@contextmanager
def routers_recorded() -> Iterator[None]:
    """Context manager: vLLM's routers write their choices to buffers. Must be entered before vLLM creates the model."""
    from vllm.config import get_current_vllm_config
    from vllm.model_executor.layers.fused_moe.router.base_router import BaseRouter

    make = BaseRouter.__init__

    @wraps(make)
    def making(self: BaseRouter, *arguments: Any, **options: Any) -> None:
        make(self, *arguments, **options)
        self.set_capture_fn(
            RoutingBuffer(get_current_vllm_config().scheduler_config.max_num_batched_tokens, self.top_k)
        )

    with patch.object(BaseRouter, "__init__", making):
        yield
