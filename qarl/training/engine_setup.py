"""Build the rollout engine of a run. The sampler's process starts first, so that it imports while the model loads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase

from qarl.config import Config
from qarl.data import PromptStream
from qarl.distributed.ranks import Ranks
from qarl.memory.activations import Device
from qarl.memory.estimate import update_bytes
from qarl.policy.load_config import load_architecture
from qarl.policy.policy import Policy
from qarl.rewards import RewardPool
from qarl.rollout.asynchronous.connection import sampler_gpu
from qarl.rollout.asynchronous.engine import AsyncEngine
from qarl.rollout.asynchronous.process import AsyncProcess
from qarl.rollout.engine import RolloutEngine, SamplingParams
from qarl.rollout.native.engine import NativeEngine
from qarl.rollout.shared import Headroom, NoSampler, ranks_headroom
from qarl.rollout.vllm.engine import VLLMEngine
from qarl.rollout.vllm.launch import prelaunch_sampler
from qarl.rollout.vllm.process import Sampler
from qarl.training.local_engine import GivenResponses, LocalEngine, ReplayEngine
from qarl.types import Prompt
from qarl.weight_sync.canary import canary_of
from qarl.weight_sync.sender import WeightSender


def has_sampler(config: Config, ranks: Ranks) -> bool:
    """Return whether this rank has a sampler."""
    return ranks.rank in config.rollout.samplers(ranks.count)


def prelaunch(config: Config, device: torch.device, run_dir: Path, ranks: Ranks) -> Sampler | None:
    """Start vLLM's process for `build_engine`. Return None if this rank needs none, or if it cannot start yet."""
    if config.rollout.asynchronous is not None or not has_sampler(config, ranks):
        return None
    return prelaunch_sampler(config, device, run_dir)


def start_async(config: Config, device: torch.device, run_dir: Path, ranks: Ranks) -> AsyncProcess | None:
    """Start the sampler's process of asynchronous rollouts. Return None if the run needs none. A collective."""
    if not config.rollout.samples_ahead:
        return None
    return AsyncProcess(config, device, sampler_gpu(config, device, ranks), run_dir)


def build_source(
    config: Config,
    policy: Policy,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Prompt],
    stream: PromptStream,
    rewards: RewardPool,
    sampling: SamplingParams,
    run_dir: Path,
    warn: Callable[[str], None],
    process: AsyncProcess | None,
    ranks: Ranks,
) -> AsyncEngine | LocalEngine | None:
    """Build the engine of a run whose responses are given in the data, replayed, or sampled asynchronously.

    Args:
        config: Configuration of the run.
        policy: The learner's policy.
        tokenizer: Tokenizer of the model.
        prompts: All prompts of the data.
        stream: Order of the prompts.
        rewards: Reward functions, which score replayed and asynchronous responses.
        sampling: Sampling parameters.
        run_dir: The run directory.
        warn: Called with one line per warning.
        process: Result of `start_async`.
        ranks: All ranks of the run.

    Returns:
        The engine; None for other runs, whose engine `build_engine` builds.
    """
    if config.given:
        return GivenResponses(config, policy, tokenizer, stream)
    if config.rollout.replay is not None:
        return ReplayEngine(config, policy, tokenizer, prompts, stream, rewards, sampling)
    if process is not None:
        return AsyncEngine(config, policy, tokenizer, prompts, stream, rewards, sampling, run_dir, warn, process, ranks)
    return None


def build_engine(
    config: Config,
    policy: Policy,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Prompt],
    run_dir: Path,
    warn: Callable[[str], None],
    prelaunched: Sampler | None,
    ranks: Ranks,
) -> RolloutEngine:
    """Build this rank's rollout engine, as `rollout.engine` selects. It cannot sample before its first publish.

    Args:
        config: Configuration of the run.
        policy: The learner's policy.
        tokenizer: Tokenizer of the model.
        prompts: Prompts of the data; the publish canary uses some of them.
        run_dir: Directory of the sampler's logs.
        warn: Called with one line per warning.
        prelaunched: Result of `prelaunch`; the engine takes ownership.
        ranks: All ranks of the run.
    """
    headroom = _headroom(config, policy.device, ranks)
    if not has_sampler(config, ranks):
        return NoSampler(policy.sampler, headroom)
    if config.rollout.engine == "native":
        return NativeEngine(policy.sampler, tokenizer, config.rollout)
    canary = canary_of([prompt.token_ids for prompt in prompts], policy.max_length)
    layout = policy.sampler.layout
    weights = WeightSender(layout, tokenizer, policy.sampler, canary, warn, exact=config.rollout.numerics == "exact")
    shape = load_architecture(config.model)
    device: Device = "cuda" if layout.device.type == "cuda" else "cpu"
    beside = None if shape is None else update_bytes(config, shape, device, ranks.count)
    return VLLMEngine(config, layout, tokenizer, weights, run_dir, warn, prelaunched, ranks.poll, beside, headroom)


def _headroom(config: Config, device: torch.device, ranks: Ranks) -> Headroom | None:
    """Return the collective that checks a GPU's free memory before a sampler of several ranks wakes; else None."""
    if not config.rollout.spans or ranks.count == 1:
        return None
    return ranks_headroom(device, ranks, config.rollout.vllm.tensor_parallel)
