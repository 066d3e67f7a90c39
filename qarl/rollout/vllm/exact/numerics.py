"""`rollout.numerics: exact`: makes vLLM use the policy's own forward and sampling."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from qarl_kernels.logprob import Distribution, Truncation
from torch import Tensor
from vllm.model_executor.models.registry import ModelRegistry
from vllm.v1.outputs import LogprobsTensors, SamplerOutput
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.sampler import Sampler

from qarl.rollout.vllm.exact.model import ExactModel
from qarl.rollout.vllm.exact.precompile import precompile
from qarl.rollout.vllm.numerics import Numerics
from qarl.rollout.vllm.recording import Experts
from qarl.rollout.vllm.sandbox import without_listening_sockets
from qarl.rollout.vllm.settings import EXACT_MODEL, SamplerSettings
from qarl.weight_sync.fingerprints import METADATA, Fingerprint


class ExactNumerics(Numerics):
    """See `Numerics`."""

    forward: ExactModel

    def __init__(self, settings: SamplerSettings) -> None:
        self._settings = settings

    @contextmanager
    def starting(self) -> Iterator[None]:
        if EXACT_MODEL not in ModelRegistry.get_supported_archs():
            ModelRegistry.register_model(EXACT_MODEL, ExactModel)
        with without_listening_sockets("nccl" if self._settings.on_gpu else "gloo"):
            yield

    def loaded(self, worker: Any) -> None:
        install_policy_sampler(worker.model_runner)
        precompile(worker.model_runner)

    def started(self, worker: Any, expected: Mapping[str, Fingerprint]) -> None:
        self.forward = worker.model_runner.get_model()
        total = sum(fingerprint.nbytes for fingerprint in expected.values())
        proved = sum(fingerprint.nbytes for name, fingerprint in expected.items() if not name.endswith(METADATA))
        self.proved_frac = proved / total
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
        assert self.forward.routing is not None, "routing is only recorded for a mixture of experts"
        return self.forward.routing.rows, self.forward.experts


def install_policy_sampler(model_runner: Any) -> None:
    """Make vLLM's model runner sample with `PolicySampler`, also while it profiles memory.

    vLLM's own memory profiling samples with top-k and top-p, by a kernel that takes seconds to compile and is not used
    here.
    """
    model: ExactModel = model_runner.get_model()
    sampler = PolicySampler(model)

    @torch.inference_mode()
    def dummy_sampler_run(hidden_states: Tensor) -> Tensor:
        logits = model.compute_logits(torch.rand_like(hidden_states))
        noise = {row: torch.Generator(logits.device).manual_seed(row) for row in range(len(logits))}
        return sampler.draw(logits, noise).sampled_token_ids

    model_runner.sampler, model_runner._dummy_sampler_run = sampler, dummy_sampler_run


class PolicySampler(Sampler):
    """Samples from the logits of `ExactModel.compute_logits`, with one random generator per request.

    These logits already include temperature and truncation, which are the same for all requests of a call. Of vLLM's
    sampling parameters it only reads the seeds and whether sampling is greedy.
    """

    def __init__(self, policy: ExactModel) -> None:
        super().__init__("raw_logprobs")
        self._policy = policy
        self._scored: Distribution | None = None

    def forward(self, logits: Tensor, sampling_metadata: SamplingMetadata, *rest: Any, **options: Any) -> SamplerOutput:
        """logits: (R, V) float32 of `ExactModel.compute_logits`."""
        return self.draw(logits, None if sampling_metadata.all_greedy else sampling_metadata.generators)

    def draw(self, logits: Tensor, generators: dict[int, torch.Generator] | None) -> SamplerOutput:
        """Sample one token per row. generators: generator of each row; None: take the most likely token."""
        sampled_from = self._policy.pop_distribution(logits)
        if generators is None:
            tokens = logits.argmax(-1)
        else:
            tokens, _ = self.topk_topp_sampler(logits, generators, None, None)
        tokens = tokens.long()
        return SamplerOutput(tokens.int()[:, None], _reported(sampled_from, tokens))

    def compute_logprobs(self, logits: Tensor) -> Tensor:  # type: ignore[override] # a static method of vLLM
        """Called to score prompt tokens. vLLM passes the result to `gather_logprobs` next."""
        self._scored = self._policy.pop_untruncated_distribution(logits)
        return self._scored.logits

    def gather_logprobs(  # type: ignore[override] # a static method of vLLM
        self, logprobs: Tensor, num_logprobs: int, token_ids: Tensor
    ) -> LogprobsTensors:
        assert num_logprobs == 0, "qarl asks only for the log-probs of given tokens"
        scored, self._scored = self._scored, None
        assert scored is not None and scored.logits is logprobs
        return _reported(scored, token_ids)


def _reported(sampled_from: Distribution, tokens: Tensor) -> LogprobsTensors:
    """Return the log-probs of tokens (R,) int64 in vLLM's format. Their ranks are 0; nothing reads them."""
    return LogprobsTensors(
        tokens.int()[:, None],
        sampled_from.logprobs(tokens)[:, None],
        torch.zeros(len(tokens), dtype=torch.int64, device=tokens.device),
    )
