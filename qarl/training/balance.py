"""Estimate the GPU time of sampling and learning per step, and the split of GPUs that balances them. Imports no torch.

Decoding is bound by memory bandwidth: each decode step reads all weights once and the keys and values of every sequence
in progress. Learning is bound by compute. A GPU is assumed to reach fixed fractions of an H100's peaks. The estimate
ignores publishes, and the time in which only a few long responses are left. Use only the ratio of the two times.

The constants fit two runs (benchmarks/results/async_gpu.json): Qwen3-1.7B's shapes in W4A16, 256 responses with prompts
of 64 tokens, one H100 each. GPU-seconds of sampler and learner, and their ratio:

    mean length    estimated          measured
    350            2.20, 2.22, 1.0    2.61, 2.23, 1.2
    1,400          16.9, 9.06, 1.9    16.2, 8.82, 1.8
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from qarl.config import Config
from qarl.config.architecture import Architecture
from qarl.memory.tensors import kv_cache_bytes, kv_cache_width, version_bytes
from qarl.training.flops import BACKWARD, forward_flops

BANDWIDTH, FLOPS = 3.35e12, 989e12  # H100 SXM: bytes per second, and 16-bit FLOP/s without sparsity
BANDWIDTH_SHARE, FLOPS_SHARE = 0.8, 0.45  # fractions reached by decoding and by the learner
DECODE_STEP_S = 0.005  # launches and host work of a decode step
LENGTH_SHARE = 0.5  # assumed mean length of a response, as a fraction of rollout.max_response_length
# Extra work of the backward per value of `train.recompute`, relative to a forward.
RECOMPUTED = {"elementwise": 0.0, "mlp": 0.4, "products": 0.8, "layer": 1.0}


@dataclass(frozen=True)
class StepTime:
    """GPU-seconds of one training step: of sampling its responses, and of learning from them."""

    sampling: float
    learning: float

    @property
    def ratio(self) -> float:
        """Sampling time relative to learning time."""
        return self.sampling / self.learning

    def samplers(self, gpus: int) -> int:
        """Return how many of `gpus` GPUs, two or more, should sample so that both sides take about as long."""
        return min(max(round(gpus * self.sampling / (self.sampling + self.learning)), 1), gpus - 1)


def split_text(time: StepTime, length: int) -> str:
    """Format an estimate as the line that `qarl check` prints.

    Args:
        time: Estimated time of a step.
        length: Response length in tokens that the estimate assumes.
    """
    gpus = 8  # an example
    samplers = time.samplers(gpus)
    waits, share = ("learner", 1 - 1 / time.ratio) if time.ratio > 1 else ("sampler", 1 - time.ratio)
    return (
        f"time estimate (H100s, responses of {length:,} tokens): sampling takes {time.ratio:.1f} times as long as "
        f"learning; with one GPU each, the {waits} waits for {share:.0%} of a step; of {gpus} GPUs, {samplers} for "
        f"sampling and {gpus - samplers} for learning are balanced (rollout.async runs one sampler per learner)"
    )


def assumed_length(config: Config) -> int:
    """Return the mean response length, in tokens, that estimates assume."""
    return max(1, round(LENGTH_SHARE * config.rollout.max_response_length))


def step_time(config: Config, architecture: Architecture, length: int) -> StepTime:
    """Estimate the time of a step of asynchronous rollouts.

    Args:
        config: Configuration of the run, with all sizes decided.
        architecture: The model.
        length: Length of every response in tokens.
    """
    return StepTime(_sampling_s(config, architecture, length), _learning_s(config, architecture, length))


def _sampling_s(config: Config, a: Architecture, length: int) -> float:
    """Estimate the seconds of decoding, and of one prefill per prompt.

    Groups that are started in excess (`rollout.async.oversample`) are assumed to run to their end.
    """
    ahead = config.rollout.asynchronous
    started = math.ceil(config.train.prompts_per_step * (1.0 if ahead is None else ahead.oversample))
    prompt, responses = config.data.max_prompt_length, started * config.rollout.n
    tokens = responses * length
    # A decode step reads only a few rows of an input embedding that is not also the output layer.
    unread = 0 if a.tied_embeddings else 2 * a.vocab_size * a.hidden_size
    steps = tokens / config.sequences
    weights = (version_bytes(config, a) - unread) * steps
    context = tokens * (prompt + length // 2)
    cache = kv_cache_bytes(context, a.num_layers, a.num_kv_heads, a.head_dim, kv_cache_width(config, "cuda"))
    prefill = 2.0 * a.multiplied_parameters * prompt * started
    compute = (2.0 * a.multiplied_parameters * tokens + prefill) / (FLOPS_SHARE * FLOPS)
    return DECODE_STEP_S * steps + max((weights + cache) / (BANDWIDTH_SHARE * BANDWIDTH), compute)


def _learning_s(config: Config, a: Architecture, length: int) -> float:
    """Estimate the seconds of all forwards and backwards of a step. Responses to a prompt share its forward."""
    train, objective = config.train, config.objective
    prompt = config.data.max_prompt_length
    prompts = [range(i, i + prompt) for i in range(train.prompts_per_step) for _ in range(config.rollout.n)]
    forward = forward_flops(a, prompts, [range(length)] * len(prompts), a.windows or None)
    ahead, old = config.rollout.asynchronous, 0.0
    if ahead is not None and ahead.max_staleness > 0:
        old = ahead.verify_frac
    shadow = objective.ratio_kind == "shadow" and config.quant.learner != "aligned"
    once = old + (objective.kl_coef > 0)
    each = 1 + BACKWARD + RECOMPUTED[train.recompute] + shadow
    return forward * (once + train.epochs * each) / (FLOPS_SHARE * FLOPS)
