"""Engines of runs that learn from stored responses: those of the data, or those that another run recorded.

Evaluations of such a run still sample, with the native engine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from qarl.batch.saved import read_rollouts, rollout_steps
from qarl.config import Config
from qarl.data import PromptStream
from qarl.errors import UserError
from qarl.policy.kept import KeptVersions
from qarl.policy.policy import Policy
from qarl.rewards import RewardPool, RewardResult
from qarl.rewards.shared import score_rollouts
from qarl.rollout.engine import SamplingParams, first_samples
from qarl.rollout.native.engine import NativeEngine
from qarl.rollout.sequence import Sequence as Response
from qarl.rollout.stopping import Stopping
from qarl.types import FinishReason, Prompt, Rollout, mixed_versions
from qarl.weight_sync.snapshot import Snapshot

Taken = tuple[list[Prompt], list[Rollout], RewardResult]  # prompts, their responses, and the scores of a step


class LocalEngine(NativeEngine):
    """Native engine with the interface of `AsyncEngine`. Subclasses return the stored responses of a step."""

    def __init__(self, config: Config, policy: Policy, tokenizer: PreTrainedTokenizerBase) -> None:
        super().__init__(policy.sampler, tokenizer, config.rollout)
        self.policy = policy

    def take(self, count: int, step: int, tick: Callable[[], None]) -> Taken:
        """Return the prompts, responses and scores of a step; see `AsyncEngine.take`.

        Args:
            count: Number of prompts.
            step: Step number, counted from 0.
            tick: Called once; raises if a signal was received.
        """
        raise NotImplementedError

    def fill(self, step: int) -> None:
        """Do nothing: nothing is sampled in advance."""

    def finish(self) -> None:
        """Do nothing: no state is carried from one step to the next."""


class GivenResponses(LocalEngine):
    """Returns the responses of the data (`rollout.engine: data`), with reward 0."""

    def __init__(
        self, config: Config, policy: Policy, tokenizer: PreTrainedTokenizerBase, stream: PromptStream
    ) -> None:
        super().__init__(config, policy, tokenizer)
        self.stream = stream

    def take(self, count: int, step: int, tick: Callable[[], None]) -> Taken:
        prompts = self.stream.next(count)
        tick()
        return prompts, [self._rollout(prompt) for prompt in prompts], RewardResult([0.0] * count, {}, {}, [])

    def _rollout(self, prompt: Prompt) -> Rollout:
        """Return a given response as a rollout. Its log-probs are 0, because no sampler reported any."""
        given = prompt.response
        assert given is not None, "a prompt of given data has a response"
        tokens, version = given.token_ids, self.policy.version
        reason: FinishReason = "stop" if given.complete else "length"
        return Rollout(prompt.id, 0, tokens, [0.0] * len(tokens), reason, version, 0, "", written=given.written)


class ReplayEngine(LocalEngine):
    """Returns the responses that another run recorded (`rollout.replay`).

    Asynchronous rollouts with in-flight weight updates depend on timing. The recorded responses, with the policy
    version of each token, repeat such a run exactly.

    Args:
        config: Configuration of the run; `rollout.replay` is set.
        policy: The learner's policy.
        tokenizer: Tokenizer of the model.
        prompts: All prompts of the data.
        stream: Order of the prompts; must be that of the recorded run.
        rewards: Scores the responses again.
        sampling: Sampling parameters.

    Raises:
        UserError: The recorded run lacks rollouts of a step.
    """

    def __init__(
        self,
        config: Config,
        policy: Policy,
        tokenizer: PreTrainedTokenizerBase,
        prompts: Sequence[Prompt],
        stream: PromptStream,
        rewards: RewardPool,
        sampling: SamplingParams,
    ) -> None:
        assert config.rollout.replay is not None, "rollout.replay must be set"
        self.run = Path(config.rollout.replay).expanduser()
        super().__init__(config, policy, tokenizer)
        self.stream, self.rewards, self.sampling = stream, rewards, sampling
        self._stopping = Stopping(tokenizer, sampling)
        settings = config.rollout.asynchronous
        # If the recorded run did not take prompts in the order of the data, the recorded prompt ids give the order.
        # With data.pass_rate it chose prompts ahead of the learner, without rewards that this run already has by then.
        self._reorders = settings is not None and (
            settings.order == "finished" or settings.oversample > 1 or config.data.pass_rate is not None
        )
        self._prompts = {prompt.id: prompt for prompt in prompts}
        self._newest = settings is not None and settings.proximal == "newest"
        self._keeps = 0 if settings is None or self._newest else settings.max_staleness + 1
        self._published: list[int] = []  # the newest `_keeps` published versions, ascending
        if settings is not None:
            policy.kept = KeptVersions(policy, on_host=settings.kept_versions == "host")
        steps = rollout_steps(self.run)
        if missing := sorted(set(range(1, config.train.steps + 1)) - set(steps)):
            raise UserError(
                f"rollout.replay: {self.run} has no rollouts of step {missing[0]}; record a run with "
                "logging.rollouts_every: 1 and logging.rollout_tensors: true, or lower train.steps"
            )

    def publish(self, snapshot: Snapshot) -> None:
        super().publish(snapshot)
        if self._keeps:
            self._published = [*self._published, snapshot.version][-self._keeps :]
            self.policy.kept.keep(self._published)
            self.policy.kept.add(snapshot, self.policy.weights)

    def state(self) -> dict[str, Tensor]:
        """Return the weights of earlier versions that later steps may need: `VERSION/NAME` -> tensor; see `load`."""
        return self.policy.kept.tensors(set(self._published) - {self.policy.version})

    def load(self, kept: Iterable[Snapshot]) -> None:
        """Restore a saved state, before the first publish. kept: The earlier versions of `state`, ascending."""
        self._published = []
        for snapshot in kept:
            self._published.append(snapshot.version)
            self.policy.kept.add(snapshot)

    def take(self, count: int, step: int, tick: Callable[[], None]) -> Taken:
        """Return the prompts, responses and scores of a step, counted from 0; see `AsyncEngine.take`.

        Raises:
            UserError: The recorded step has other prompts, or tokens of a policy version that this run does not have.
        """
        saved = read_rollouts(self.run, step + 1)
        n = self.sampling.n
        prompts = self._recorded(saved.prompt_ids)[:count] if self._reorders else self.stream.next(count)
        repeated = [prompt for prompt in prompts for _ in range(n)]
        samples = [begin + i for begin in first_samples(prompts, n) for i in range(n)]
        if [prompt.token_ids for prompt in repeated] != saved.prompts:
            raise UserError(
                f"rollout.replay: step {step + 1} of {self.run} has other prompts than this run; use its data, seed, "
                "train.prompts_per_step and rollout.n"
            )
        versions = saved.versions or [[saved.version] * len(tokens) for tokens in saved.responses]
        needed = {version for own in versions for version in own} - {self.policy.version}
        if not self._newest and (unknown := needed - set(self._published)):
            raise UserError(
                f"rollout.replay: step {step + 1} has tokens of policy version {max(unknown)}, and this run is at "
                f"{self.policy.version}; use the configuration of {self.run}, and start with checkpoint.resume: never"
            )
        logprobs = [part.tolist() for part in saved.logp_sampler.split(saved.lengths)]
        rollouts = []
        for i, (prompt, tokens) in enumerate(zip(repeated, saved.responses, strict=True)):
            response = Response(prompt, samples[i], np.empty(0), tokens)
            self._stopping.check(response)
            rollouts.append(
                Rollout(
                    prompt.id,
                    samples[i],
                    tokens,
                    logprobs[i],
                    response.finish_reason or "length",
                    versions[i][-1],
                    self.sampling.seed + step,
                    response.text,
                    None if saved.routing is None else saved.routing[i],
                    versions=mixed_versions(versions[i]),
                )
            )
        tick()
        return prompts, rollouts, score_rollouts(self.rewards, repeated, rollouts)

    def _recorded(self, ids: list[int] | None) -> list[Prompt]:
        """Return the prompts of a recorded step.

        Args:
            ids: `Prompt.id` per response; None if the run did not record them.

        Raises:
            UserError: The prompts were not recorded or are not in the data.
        """
        if ids is None:
            raise UserError(f"rollout.replay: {self.run} did not record the ids of its prompts; record it again")
        if not self._prompts.keys() >= set(ids):
            raise UserError(f"rollout.replay: {self.run} has prompts that are not in this run's data; use its data")
        return [self._prompts[number] for number in ids[:: self.sampling.n]]
