"""Build everything that a run needs before its first step. Checks that are likely to fail come before slow work."""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from pathlib import Path

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from qarl.config import Config
from qarl.config.architecture import Architecture
from qarl.config.config import mixture_faults
from qarl.config.data import DataConfig
from qarl.config.quant import scheme_of
from qarl.data import DropReport, PromptStream, build_prompts
from qarl.data.calibration import calibration_sequences
from qarl.data.conversation import uses_time
from qarl.data.examples import ExampleReport, build_examples
from qarl.diagnostics.backward import require_fp8_backward
from qarl.distributed.exchange import GroupExchange
from qarl.distributed.group import Group
from qarl.distributed.ranks import Ranks, SingleProcess
from qarl.distributed.together import together
from qarl.errors import UserError
from qarl.evaluation.tasks import LoadedTask, TaskRewards
from qarl.inference.masters import verify_base
from qarl.inference.opening import open_teacher
from qarl.policy.device import DTYPES, select_algorithms
from qarl.policy.load import load_model, load_tokenizer
from qarl.policy.load_config import context_length, load_architecture, load_generation_config, stop_token_ids
from qarl.policy.policy import Policy
from qarl.policy.starting_codes import replace_masters
from qarl.rewards import RewardPool
from qarl.rollout.asynchronous.engine import AsyncEngine
from qarl.rollout.engine import RolloutEngine, SamplingParams, truncation_of
from qarl.rollout.vllm.launch import require_vllm
from qarl.storage.saved_state import Inputs, first_start
from qarl.terminal.run_console import RunConsole
from qarl.training.engine_setup import build_engine, build_source, has_sampler, prelaunch, start_async
from qarl.training.held_out import HeldOut
from qarl.training.learner import Learner
from qarl.training.local_engine import LocalEngine
from qarl.training.optim import round_masters
from qarl.training.periodic_evaluation import TrainingEvaluation, load_training_tasks
from qarl.training.quantized_start import compare_start
from qarl.training.row_setup import build_rows
from qarl.training.run_identity import input_digests, require_same_inputs, shared_tensors_digest, tensors_digest
from qarl.training.trackers import require_trackers
from qarl.training.updates import LocalUpdates, Updates
from qarl.training.zero_updates import build_zero
from qarl.types import Prompt
from qarl.utils.machine import keep_freed_memory
from qarl.utils.text import visible

_SINGLE_PROCESS = SingleProcess()


@dataclass
class Run:
    """Everything that the steps of a training run use."""

    policy: Policy
    tokenizer: PreTrainedTokenizerBase
    updates: Updates
    learner: Learner
    engine: RolloutEngine
    stream: PromptStream
    rewards: RewardPool
    sampling: SamplingParams  # for step 0; each step sets its own seed
    evaluation: TrainingEvaluation
    inputs: Inputs
    started: str | None  # local time of the first start if the chat template uses it; see `PolicyState`
    source: AsyncEngine | LocalEngine | None = None  # `engine`, if rollouts are asynchronous, replayed or given

    def close(self) -> None:
        """Close every part, even if another one raises."""
        with ExitStack() as parts:
            for part in (self.evaluation, self.rewards, self.engine):  # in reverse: the engine uses the rewards
                parts.callback(part.close)


def set_determinism(config: Config) -> None:
    """Seed the global generators, set the number of threads, and select deterministic algorithms in torch."""
    seed = config.train.seed
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    if config.train.threads is not None:
        torch.set_num_threads(config.train.threads)
    if config.train.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when CUDA starts
    select_algorithms(config.train.deterministic)


def build_run(
    config: Config, device: torch.device, console: RunConsole, rewards_log: Path, ranks: Ranks = _SINGLE_PROCESS
) -> Run:
    """Build data, rewards, model, policy, engine and optimizer. A collective.

    Args:
        config: Configuration of the run.
        device: Device of the learner.
        console: Shows progress.
        rewards_log: File for the output of the reward functions. Its directory gets the sampler's logs.
        ranks: All ranks of the run. Each rank builds everything, but holds only its rows of the master weights.

    Raises:
        UserError: Inputs cannot be read, differ between ranks, or do not fit the configuration.
    """
    started = first_start(config, ranks)
    data, rewards, task_rewards = together(
        ranks, lambda: _open_data(config, device, console, rewards_log, ranks, started)
    )
    run_dir, prelaunched, async_process = rewards_log.parent, None, None
    try:
        require_same_inputs(ranks, config, data.inputs, data.stream, data.tasks)
        prelaunched = prelaunch(config, device, run_dir, ranks)
        async_process = together(ranks, lambda: start_async(config, device, run_dir, ranks))
        poll = partial(together, ranks, lambda: None if prelaunched is None else prelaunched.raise_if_ended())
        if ranks.count == 1:
            policy, updates, weights = _build_single_process(config, device, console, data, poll)
        else:
            policy, updates, weights = _build_sharded(config, device, console, data, ranks, poll)
        inputs = data.inputs.with_weights(weights)
        poll()
        if line := together(ranks, lambda: compare_start(config, policy.current) if ranks.first else None):
            console.message(line)
        policy.decoder.recompute = config.train.recompute
        tokenizer, prompts = data.tokenizer, data.prompts
        sampling = build_sampling(config, policy, tokenizer)
        warn = console.warn if ranks.first else partial(_warn, ranks.rank)
        source = build_source(
            config, policy, tokenizer, prompts, data.stream, rewards, sampling, run_dir, warn, async_process, ranks
        )
        engine: RolloutEngine = source or together(
            ranks, lambda: build_engine(config, policy, tokenizer, prompts, run_dir, warn, prelaunched, ranks)
        )
        teacher = together(ranks, lambda: open_teacher(config, device, data.context, console))
        if teacher is not None:
            teacher.require_fits(policy)
            inputs = inputs.with_teacher(teacher.sha256)
        learner = Learner(policy, updates, config, sampling.truncation, ranks, teacher)
        if learner.objective.needs.reference or config.diagnostics.reference_every:
            policy.keep_reference()  # the initial model, so before a checkpoint is restored
        held_out = None if data.held_out is None else HeldOut(data.held_out, policy, config, ranks, teacher)
        evaluation = TrainingEvaluation(config, data.tasks, task_rewards, sampling, ranks, held_out)
    except BaseException:
        with suppress(Exception), ExitStack() as parts:  # raise the first error, not one of closing
            for part in (task_rewards, rewards, async_process, prelaunched):
                if part is not None:
                    parts.callback(part.close)
        raise
    return Run(
        policy,
        tokenizer,
        updates,
        learner,
        engine,
        data.stream,
        rewards,
        sampling,
        evaluation,
        inputs,
        started.isoformat() if uses_time(tokenizer) else None,
        source,
    )


@dataclass(frozen=True)
class _Data:
    """Data of a run, read before the model.

    Attributes:
        context: Context length of the policy in tokens.
        held_out: Examples of `evaluation.held_out`, or None.
        inputs: Digests of the inputs, without the weights.
        calibration: Token ids for `quant.init`; empty for rtn.
    """

    tokenizer: PreTrainedTokenizerBase
    context: int
    prompts: list[Prompt]
    stream: PromptStream
    tasks: list[LoadedTask]
    held_out: list[Prompt] | None
    inputs: Inputs
    calibration: list[list[int]]


def _open_data(
    config: Config, device: torch.device, console: RunConsole, rewards_log: Path, ranks: Ranks, started: datetime
) -> tuple[_Data, RewardPool, TaskRewards]:
    """Check the configuration, read the data, and start the reward workers of training and of evaluation."""
    _prepare(config, device, ranks)
    with console.phase("tokenizer and data"):
        tokenizer = load_tokenizer(config.model)
        context = context_length(config.model, f"model.path: '{config.model.path}'", config.model.max_length)
        shape = load_architecture(config.model)
        require_mixture(config, shape)
        if config.rollout.engine == "vllm" and has_sampler(config, ranks):
            require_vllm(config, device, context, shape)
        vocabulary = shape.vocab_size if shape else None
        longest = config.rollout.max_response_length
        report: DropReport | ExampleReport

        def examples(section: DataConfig, key: str) -> tuple[list[Prompt], ExampleReport]:
            stops = stop_token_ids(load_generation_config(config.model), tokenizer)
            return build_examples(section, tokenizer, context, longest, stops, vocabulary, started, key)

        if config.given:
            prompts, report = examples(config.data, "data")
        else:
            prompts, report = build_prompts(
                config.data, tokenizer, context, longest, vocabulary=vocabulary, now=started
            )
        held_out = held_report = None
        if config.evaluation.held_out is not None:
            held_out, held_report = examples(config.evaluation.held_out, "evaluation.held_out")
        tasks = load_training_tasks(config, tokenizer, context, vocabulary, started)
        calibration = []
        if config.quant.init != "rtn":
            calibration = calibration_sequences(config.quant.calibration, tokenizer, context, prompts)
    console.message(report.summary())
    if held_report is not None:
        console.message(f"evaluation.held_out: {held_report.summary()}")
    for task in tasks:
        if task.dropped:
            console.warn(
                f"evaluation task {task.name}: dropped {task.dropped} prompts longer than data.max_prompt_length"
            )
    if len(prompts) < config.train.prompts_per_step:
        raise UserError(
            f"train.prompts_per_step: {config.train.prompts_per_step} is more than the {len(prompts)} "
            "prompts of the data; lower it or give more data"
        )
    inputs = input_digests(config, tokenizer, calibration)
    stream = PromptStream(prompts, config.train.seed, config.data.shuffle, config.data.pass_rate)
    with console.phase("reward workers"), ExitStack() as opened:
        rewards = opened.enter_context(RewardPool(config.reward, prompts[0].columns.keys(), rewards_log))
        task_rewards = TaskRewards(tasks, config.reward, rewards_log, ranks)
        opened.pop_all()
    return _Data(tokenizer, context, prompts, stream, tasks, held_out, inputs, calibration), rewards, task_rewards


def _prepare(config: Config, device: torch.device, ranks: Ranks) -> None:
    """Set up this process, and run the checks that need neither tokenizer nor data."""
    set_determinism(config)
    if config.quant.init != "rtn" and ranks.count > 1:
        raise UserError(
            f"quant.init: {config.quant.init}: needs one process; write the model with `qarl quantize --method "
            f"{config.quant.init}`, and give the result as model.path with quant.init: rtn"
        )
    require_trackers(config.logging)
    require_fp8_backward(config, device)
    config.objective.bind()  # rejects an invalid custom objective before the model is loaded
    if device.type == "cpu":
        keep_freed_memory()
    verify_base(config.model, ranks.rank, ranks.count)


def _build_single_process(
    config: Config, device: torch.device, console: RunConsole, data: _Data, poll: Callable[[], None]
) -> tuple[Policy, Updates, str]:
    """Return the policy, its optimizer engine, and the digest of the base model's weights.

    Args:
        config: Configuration of the run.
        device: Device of the policy.
        console: Shows progress.
        data: Data of the run.
        poll: Called between the slow parts; raises if the sampler's process has failed.
    """
    with console.phase("model"):
        model = load_model(config.model, config.quant)
    poll()
    with console.phase("digest of the weights"):
        weights = tensors_digest(model.named_parameters())
    poll()
    with console.phase("quantize"):
        policy = build_policy(config, model, device, data.context)
    if config.quant.init != "rtn":
        poll()
        with console.phase(config.quant.init):
            replace_masters(policy, config.quant.init, data.calibration)
    return policy, LocalUpdates(policy, config), weights


def _build_sharded(
    config: Config, device: torch.device, console: RunConsole, data: _Data, ranks: Ranks, poll: Callable[[], None]
) -> tuple[Policy, Updates, str]:
    """Like `_build_single_process` on several ranks, each with its rows or its DeepSpeed partition. A collective."""
    assert isinstance(ranks, Group) and ranks.tensors is not None, "several ranks are a group"
    policy: Policy
    updates: Updates
    with console.phase("model"):
        if config.distributed.engine == "deepspeed":
            policy, updates = build_zero(config, device, data.context, ranks)
        else:
            exchange = GroupExchange(ranks.tensors, ranks.rank, ranks.count, device)
            policy, updates = build_rows(config, device, data.context, exchange, ranks)
    poll()
    with console.phase("digest of the weights"):
        shapes = {name: tuple(master.shape) for name, master in policy.named_parameters()}
        weights = shared_tensors_digest(config.model, shapes, ranks, config.quant)
    return policy, updates, weights


def _warn(rank: int, line: str) -> None:
    """Print a warning of a rank other than the first; the console of such a rank is silent."""
    print(f"rank {rank}: {visible(line)}", file=sys.stderr, flush=True)


def build_policy(config: Config, model: PreTrainedModel, device: torch.device, max_length: int | None = None) -> Policy:
    """Build the initial policy of a run.

    Args:
        config: Configuration of the run.
        model: Model with float32 weights, which become the master weights.
        device: Device of the policy.
        max_length: Longest sequence in tokens, if limited.

    Raises:
        UserError: The configuration does not fit the model.
    """
    round_masters(model.parameters(), DTYPES[config.optim.master_dtype])
    return Policy(
        model,
        scheme_of(config.quant),
        config.quant,
        DTYPES[config.model.dtype],
        device,
        max_length,
        learner_dtype=DTYPES[config.learner_dtype],
    )


def require_mixture(config: Config, shape: Architecture | None) -> None:
    """Raise UserError if a setting needs experts that the model does not have.

    shape: Sizes of the model; None if its family is unknown, which passes.
    """
    for fault in () if shape is None or shape.mixture else mixture_faults(config):
        raise UserError(f"{'.'.join(map(str, fault.key))}: {fault.value}: {fault.text}")


def build_sampling(config: Config, policy: Policy, tokenizer: PreTrainedTokenizerBase) -> SamplingParams:
    """Return the sampling parameters of the `rollout` section. The model's end-of-sequence tokens stop a response."""
    rollout = config.rollout
    own = frozenset() if rollout.ignore_eos else stop_token_ids(policy.model.generation_config, tokenizer)
    return SamplingParams(
        n=rollout.n,
        seed=config.train.seed << 32,
        max_response_length=rollout.max_response_length,
        truncation=truncation_of(config),
        stop=tuple(rollout.stop),
        stop_token_ids=own | set(rollout.stop_token_ids),
    )
