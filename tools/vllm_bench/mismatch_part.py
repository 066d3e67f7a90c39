"""How far vLLM's log-probs are from the learner's, in each regime of the learner, on responses of a real model."""

from __future__ import annotations

import argparse
import copy
import time
from collections.abc import Iterator
from typing import Any

import torch
from qarl_kernels.logprob import Truncation
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from qarl.config import ModelConfig, RolloutConfig
from qarl.config.data import DataConfig
from qarl.config.quant import scheme_of
from qarl.data import build_prompts
from qarl.diagnostics.mismatch import mismatch_metrics
from qarl.objectives.segments import Segments
from qarl.policy.load import load_model, load_tokenizer
from qarl.policy.load_config import stop_token_ids
from qarl.policy.policy import Policy
from qarl.rollout.engine import SamplingParams
from qarl.rollout.native.engine import NativeEngine
from qarl.rollout.vllm.engine import VLLMEngine
from qarl.types import Prompt, Rollout
from qarl.weight_sync.canary import canary_of
from qarl.weight_sync.sender import WeightSender
from vllm_bench.case import Case, Record, engine_config
from vllm_bench.models import DTYPE, quant_of

PROMPT_TOKENS = 384  # longer prompts are left out
RESPONSES = 16  # scored in one forward
NUMBERS = {"abs_mean": "delta_abs_mean", "abs_max": "delta_abs_max", "k3": "k3", "ppl_ratio": "ppl_ratio"}


def load(options: argparse.Namespace) -> Mismatch:
    """The model, its tokenizer and the prompts."""
    source = ModelConfig(path=options.model)
    tokenizer = load_tokenizer(source)
    model = load_model(source)
    context = min(PROMPT_TOKENS + options.response_tokens, model.config.max_position_embeddings)
    prompts, _ = build_prompts(data_of(options), tokenizer, context, options.response_tokens)
    return Mismatch(options, model, tokenizer, prompts, context)


def data_of(options: argparse.Namespace) -> DataConfig:
    """Questions of a file in the chat template, or sums with two examples before each."""
    common = {"max_prompt_length": PROMPT_TOKENS, "max_rows": options.prompt_count}
    if options.prompts is not None:
        source = str(options.prompts.resolve())
        return DataConfig.model_validate(common | {"source": source, "columns": {"prompt": "question"}})
    template = "2 + 2 = 4\n5 - 1 = 4\n{prompt} ="
    return DataConfig.model_validate(
        common | {"source": "task:arithmetic", "chat_template": False, "prompt_template": template}
    )


class Mismatch:
    """One model, whose masters every scheme and regime starts from."""

    def __init__(
        self,
        options: argparse.Namespace,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        prompts: list[Prompt],
        context: int,
    ) -> None:
        self.options, self.model, self.tokenizer = options, model, tokenizer
        self.prompts, self.context = prompts, context
        self.sampling = SamplingParams(
            n=options.samples,
            seed=options.seed,
            max_response_length=options.response_tokens,
            stop_token_ids=stop_token_ids(model.generation_config, tokenizer),
        )

    def records(self, case: Case, own_engine: bool = False) -> Iterator[Record]:
        """Responses of one started vLLM, or with `own_engine` of qarl's, under each regime of the learner."""
        policy = self._policy(case, "aligned")
        sampler = "qarl engine" if own_engine else "vllm" if case.kernels == "vllm" else f"vllm {case.kernels}"
        rollouts, facts = self._from_native(policy) if own_engine else self._from_vllm(case, policy)
        for learner in ("aligned", "fake_quant", "full_precision"):
            if learner == "fake_quant" and case.scheme == "bf16":
                continue  # has nothing to quantize
            if learner != "aligned":
                policy = self._policy(case, learner)
            found = self.differences(policy, rollouts)
            yield {
                "part": "mismatch",
                **case.labels(),
                "what": "mismatch",
                "sampler": sampler,
                "learner": learner,
                "kv_cache_dtype": policy.quant.kv_cache_dtype,
                **found,
                **facts,
            }

    def _policy(self, case: Case, learner: str) -> Policy:
        quant = quant_of(case.scheme, self.options.group_size, learner, self.options.kv_cache_dtype)
        model = copy.deepcopy(self.model)
        return Policy(model, scheme_of(quant), quant, DTYPE, case.device, self.context)

    def _from_vllm(self, case: Case, policy: Policy) -> tuple[list[Rollout], Record]:
        config = engine_config(
            case,
            policy.quant,
            self.options,
            prompt_tokens=self.context - self.options.response_tokens,
            new_tokens=self.options.response_tokens,
            max_seqs=self._responses(),
            publish="full",
        )
        canary = canary_of([prompt.token_ids for prompt in self.prompts], self.context)
        notes: list[str] = []
        layout = policy.sampler.layout
        weights = WeightSender(layout, self.tokenizer, policy.sampler, canary, notes.append)
        engine = VLLMEngine(config, layout, self.tokenizer, weights, case.place, notes.append)
        try:
            begin = time.perf_counter()
            engine.publish(policy.current)
            facts = {"start_s": time.perf_counter() - begin, "notes": notes} | {
                name: engine.metrics[f"publish/{metric}"]
                for name, metric in (
                    ("proved_frac", "proved_frac"),
                    ("canary_mean", "canary_abs_mean"),
                    ("canary_max", "canary_abs_max"),
                )
            }
            return engine.generate(self.prompts, self.sampling, policy.version), facts
        finally:
            engine.close()

    def _from_native(self, policy: Policy) -> tuple[list[Rollout], Record]:
        tokens = 8192 if policy.device.type == "cuda" else 512
        rollout = RolloutConfig(max_num_seqs=self._responses(), max_batched_tokens=tokens)
        engine = NativeEngine(policy.sampler, self.tokenizer, rollout)
        engine.publish(policy.current)
        try:
            return engine.generate(self.prompts, self.sampling, policy.version), {}
        finally:
            engine.close()

    def _responses(self) -> int:
        return len(self.prompts) * self.sampling.n

    @torch.no_grad()
    def differences(self, policy: Policy, rollouts: list[Rollout]) -> dict[str, Any]:
        """Mismatch of the learner's log-probs against the sampler's, over all tokens of all responses."""
        prompts = {prompt.id: prompt.token_ids for prompt in self.prompts}
        learner = []
        for first in range(0, len(rollouts), RESPONSES):
            some = rollouts[first : first + RESPONSES]
            logp, _ = policy.logprobs(
                [prompts[r.prompt_id] for r in some], [r.token_ids for r in some], Truncation(), 128
            )
            learner.append(logp.cpu())
        sampler = torch.tensor([value for rollout in rollouts for value in rollout.logprobs])
        segments = Segments.from_lengths([len(rollout.token_ids) for rollout in rollouts])
        found = mismatch_metrics(torch.cat(learner), sampler, segments)
        numbers = {name: found[f"mismatch/{metric}"] for name, metric in NUMBERS.items()}
        return {"responses": len(rollouts), "tokens": sampler.numel()} | numbers
