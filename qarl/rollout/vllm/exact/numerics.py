"""`rollout.numerics: exact`: vLLM around the policy's own forward and sampler."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from qarl_kernels.logprob import Truncation
from torch import Tensor
from vllm.model_executor.models.registry import ModelRegistry

from qarl.rollout.vllm.exact.model import ExactModel
from qarl.rollout.vllm.exact.rehearsal import rehearse
from qarl.rollout.vllm.exact.sampling import PolicySampler
from qarl.rollout.vllm.numerics import Numerics
from qarl.rollout.vllm.recording import Experts
from qarl.rollout.vllm.sandbox import no_way_in
from qarl.rollout.vllm.settings import EXACT_MODEL, SamplerSettings
from qarl.weight_sync.fingerprints import Fingerprint
from qarl.weight_sync.shards import METADATA


class ExactNumerics(Numerics):
    """See `Numerics`."""

    forward: ExactModel

    def __init__(self, settings: SamplerSettings) -> None:
        self._settings = settings

    @contextmanager
    def starting(self) -> Iterator[None]:
        if EXACT_MODEL not in ModelRegistry.get_supported_archs():
            ModelRegistry.register_model(EXACT_MODEL, ExactModel)
        with no_way_in("nccl" if self._settings.on_gpu else "gloo"):
            yield

    def loaded(self, worker: Any) -> None:
        take_over(worker.model_runner)
        rehearse(worker.model_runner)

    def started(self, worker: Any, expected: Mapping[str, Fingerprint]) -> None:
        self.forward = worker.model_runner.get_model()
        total = sum(print_.nbytes for print_ in expected.values())
        proved = sum(print_.nbytes for name, print_ in expected.items() if not name.endswith(METADATA))
        self.proved_frac = proved / total
        if self._settings.arguments.get("load_format") != "dummy":
            self.check(0, expected)

    def base(self, name: str, expected: Mapping[str, Fingerprint]) -> Tensor:
        return self.forward.weights.base(name)

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        self.forward.weights.load(tensors)

    def check(self, version: int, expected: Mapping[str, Fingerprint]) -> None:
        self.forward.weights.check(version, expected)

    def shape(self, truncation: Truncation) -> None:
        self.forward.truncation = truncation

    def experts(self) -> tuple[Experts, int]:
        assert self.forward.routing is not None, "a mixture was asked for its routing"
        return self.forward.routing.rows, self.forward.experts


def take_over(model_runner: Any) -> None:
    """Let vLLM's model runner sample with `PolicySampler`, also when it measures memory.

    There vLLM would sample by top-k and top-p, with a kernel that takes seconds to compile and is not used here.
    """
    model: ExactModel = model_runner.get_model()
    sampler = PolicySampler(model)

    @torch.inference_mode()
    def dummy_sampler_run(hidden_states: Tensor) -> Tensor:
        logits = model.compute_logits(torch.rand_like(hidden_states))
        noise = {row: torch.Generator(logits.device).manual_seed(row) for row in range(len(logits))}
        return sampler.draw(logits, noise).sampled_token_ids

    model_runner.sampler, model_runner._dummy_sampler_run = sampler, dummy_sampler_run
