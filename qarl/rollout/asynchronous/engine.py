"""The engine of asynchronous rollouts that the training loop uses.

One thread owns the connection to the sampler's process and another one scores complete groups (a prompt and its
responses), so sampling and rewards continue while the learner learns.

Staleness: before step s the sampler gets prompts for the steps up to s + `steps_ahead`, so a group is learned from at
most `steps_ahead` steps after the sampler got it. The sampler's weights are at most `publish_every` - 1 versions old at
that time. Together no token is older than `max_staleness` versions. No response is dropped for being long, unless
`rollout.async.oversample` is above 1.
"""

from __future__ import annotations

import math
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from qarl.config import Config
from qarl.data import PromptStream
from qarl.distributed.ranks import Ranks, share_of
from qarl.distributed.together import together
from qarl.policy.kept import KeptVersions
from qarl.policy.policy import Policy
from qarl.rewards import RewardPool, RewardResult
from qarl.rewards.batch import Share
from qarl.rewards.shared import judge, score_rollouts
from qarl.rollout.asynchronous.connection import SamplerConnection
from qarl.rollout.asynchronous.group_queue import POLL_S, GroupQueue
from qarl.rollout.asynchronous.groups import Added, PendingGroup, Published, Wave
from qarl.rollout.asynchronous.process import AsyncProcess
from qarl.rollout.asynchronous.saved_groups import (
    gather_saved,
    load_groups,
    load_log,
    sampled_with,
    save_groups,
    save_log,
)
from qarl.rollout.engine import (
    Progress,
    RolloutEngine,
    Samples,
    SamplingParams,
    first_samples,
    longest_of,
    round_seed,
)
from qarl.rollout.native.engine import NativeEngine
from qarl.rollout.shared import gather_rollouts
from qarl.rollout.vllm.settings import AsyncSettings
from qarl.types import Prompt, Rollout
from qarl.utils.averages import mean
from qarl.weight_sync.canary import canary_of
from qarl.weight_sync.snapshot import Snapshot


class _Totals(NamedTuple):
    """Totals since the start of the run, at one time."""

    time: float = 0.0  # by `time.monotonic()`
    sampler_s: float = 0.0  # seconds of generation
    tokens: float = 0.0  # number of tokens of finished responses
    waited_s: float = 0.0  # seconds that the learner waited


class AsyncEngine(RolloutEngine):
    """The sampler's process, the groups in flight, and a native engine in the learner's process for evaluations.

    Each rank has its own sampler, which gets the rank's share of the prompts of each step. Every rank lists the groups
    of all ranks in the same order, so that all ranks take the same groups. `take`, `finish` and `state` are
    collectives.

    Args:
        config: The run's configuration.
        policy: The policy.
        tokenizer: The policy's tokenizer.
        prompts: All prompts of the data.
        stream: Yields the prompts of each step.
        rewards: Scores responses; called from a thread of the engine.
        sampling: Sampling parameters of step 0; each step has its own seed.
        directory: Directory of the sampler's log.
        say: Called with one line for the user.
        process: The sampler's process, just started. The engine closes it.
        ranks: The ranks of the run.

    Attributes:
        metrics: Metrics of the last publish and the last `take`, by name.
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
        directory: Path,
        say: Callable[[str], None],
        process: AsyncProcess,
        ranks: Ranks,
    ) -> None:
        settings = config.rollout.asynchronous
        assert settings is not None, "the run samples asynchronously"
        self.config, self.settings, self.policy, self.sampling = config, settings, policy, sampling
        self._ranks = ranks
        self._stream, self._rewards = stream, rewards
        self._prompts = {prompt.id: prompt for prompt in prompts}
        self._local = NativeEngine(policy.sampler, tokenizer, config.rollout)
        self._longest = longest_of(prompts, sampling, policy.max_length)
        self._canary = canary_of([prompt.token_ids for prompt in prompts], policy.max_length)
        dynamic = config.rollout.dynamic_sampling
        self._per_step = math.ceil(config.train.prompts_per_step * (dynamic.oversample if dynamic else 1.0))
        self._queue = GroupQueue()
        self._connection = SamplerConnection(
            config, policy, tokenizer, process, self._queue, self._canary, directory, say
        )
        self.metrics = self._connection.metrics

        self._submitted: Counter[int] = Counter()  # number of submissions per step
        self._next_number = 0  # number of the next group
        policy.kept = KeptVersions(policy, on_host=settings.kept_versions == "host")
        self._published: list[int] = []  # the newest versions, oldest first
        # State of the current step, which takes groups several times with dynamic sampling:
        self._step_rollouts: list[Rollout] = []
        self._ready_groups = self._cancelled = 0
        self._at_step_start = self._at_last_take = _Totals()
        self._waited_s = 0.0

    # --- RolloutEngine -----------------------------------------------------------------------------------------

    def publish(self, snapshot: Snapshot) -> None:
        """Send a snapshot to the sampler if `publish_every` versions have passed. Waits only for the previous publish.

        The sampler's answer is verified when it arrives. If verification fails, the next call of this engine raises.
        """
        self.policy.sampler.install(snapshot)
        self.version = None
        self._connection.wait_for_answers()
        self.policy.kept.add(snapshot, self.policy.weights if self.settings.proximal == "sampled" else None)
        if snapshot.version not in self._published:
            self._published = [*self._published, snapshot.version][-2 * (self.settings.max_staleness + 2) :]
        if self._sends(snapshot.version):
            scores = self.policy.sampler.score(self._canary).tolist()
            with self._queue.changed:
                self._connection.publish(Published(snapshot.version, scores), snapshot)
        if not self._connection.started:
            self._start()
        self.version = snapshot.version

    def _sends(self, version: int) -> bool:
        """Return whether a new version is sent to the sampler."""
        last = self._queue.log.last_version  # a resumed run restores the log
        if last not in self._published:
            return True
        return self._published.index(version) - self._published.index(last) >= self.settings.publish_every

    def sample(
        self, samples: Sequence[Samples], sampling: SamplingParams, version: int, progress: Progress
    ) -> list[Rollout]:
        """Generate in the learner's process, for evaluations; the sampler's process continues with the next steps."""
        if self._local.version != version:
            self._local.publish(self.policy.current)
        return self._local.sample(samples, sampling, version, progress)

    def sleep(self) -> None:
        self._local.sleep()

    def close(self) -> None:
        self._queue.close()
        self._connection.process.close()
        self._local.close()
        self.version = None

    # --- called by the training loop ---------------------------------------------------------------------------

    def fill(self, step: int) -> None:
        """Send the sampler all prompts that the staleness limit allows before training step `step`, from 0."""
        with self._queue.changed:
            waiting = self._queue.usable()
            limit = (self.settings.steps_ahead + 1) * self._per_step
            while waiting < limit and (target := step + waiting // self._per_step) < self.config.train.steps:
                count = min(self._per_step, limit - waiting)
                self._submit(count, target, step)
                waiting += count

    def take(self, count: int, step: int, tick: Callable[[], None]) -> tuple[list[Prompt], list[Rollout], RewardResult]:
        """Wait until the next groups are complete and scored.

        Args:
            count: Number of groups.
            step: Training step, from 0.
            tick: Called while waiting. If it raises, the groups stay in the queue.

        Returns:
            The prompts, their responses in the order (prompt, sample), and the scores.
        """
        with self._queue.changed:
            missing = count - self._queue.usable()
            if missing > 0:  # a further round of dynamic sampling
                self._submit(missing, step, step)
        begin = time.monotonic()
        groups, ready = self._wait_for_groups(count, step, tick)
        with self._queue.changed:
            self._queue.taken |= {group.number for group in groups}
        self._waited_s += time.monotonic() - begin
        rollouts, scores = self._gather(groups)
        self._measure(rollouts, ready)
        together(self._ranks, lambda: judge(scores, self.config.reward.max_failed_frac))
        return [group.prompt for group in groups], rollouts, scores

    def _wait_for_groups(self, count: int, step: int, tick: Callable[[], None]) -> tuple[list[PendingGroup], int]:
        """Choose the groups of a step, the same on all ranks, and wait until they are complete on their ranks.

        Returns:
            The groups, and the number of groups that were complete before the wait.
        """
        ranks, ready = self._ranks, None
        fixed = self.settings.order == "prompts" and self.settings.oversample == 1

        def poll() -> None:
            tick()
            ranks.poll()

        while True:
            with self._queue.changed:
                waiting, own = self._queue.waiting(), self._scored()
            scored = {number: bool(done) for view in ranks.gather(own) for number, done in view}
            with self._queue.changed:  # groups that another rank has cancelled
                self._queue.remove({group.number for group in waiting} - scored.keys())
            chosen = self._next([group for group in waiting if group.number in scored], scored, count, step)
            ready = sum(scored.values()) if ready is None else ready
            if all(scored[group.number] for group in chosen):
                return chosen, ready
            mine = [group for group in chosen if group.rank == ranks.rank]
            until = time.monotonic() + POLL_S if ranks.count > 1 else math.inf

            def settled(own: Any = own, mine: Any = mine, until: float = until) -> bool:
                if fixed:
                    return all(group.scores is not None for group in mine)
                return self._scored() != own or time.monotonic() > until

            together(ranks, partial(self._queue.wait, settled, poll), self.config.rollout.restarts_s)

    def _scored(self) -> list[list[int]]:
        """Return [number, 1 if complete and scored, else 0] of each waiting group of this rank."""
        rank = self._ranks.rank
        return [[g.number, int(g.scores is not None)] for g in self._queue.waiting() if g.rank == rank]

    def _gather(self, groups: list[PendingGroup]) -> tuple[list[Rollout], RewardResult]:
        """Return the responses and scores of complete groups of all ranks, in the order of `groups`."""
        ranks, n = self._ranks, self.sampling.n
        own = [group for group in groups if group.rank == ranks.rank]
        rollouts = gather_rollouts([rollout for group in own for rollout in group.ordered], ranks)
        scores = [asdict(group.scores) for group in own if group.scores is not None]
        results = [RewardResult(**one) for several in ranks.gather(scores) for one in several]
        gathered = sorted(range(len(groups)), key=lambda i: groups[i].rank)
        order = sorted(range(len(groups)), key=gathered.__getitem__)  # position of each group in `results`
        return (
            [rollout for i in order for rollout in rollouts[i * n : (i + 1) * n]],
            RewardResult.joined([results[i] for i in order]),
        )

    def _next(
        self, waiting: list[PendingGroup], scored: Mapping[int, bool], count: int, step: int
    ) -> list[PendingGroup]:
        """Choose the groups of a step, complete or not: the oldest.

        With `rollout.async.order: finished`, groups that this step must take come first, then complete ones.

        Args:
            waiting: Groups of all ranks that no step has taken.
            scored: Whether each group, by number, is complete and scored.
            count: Number of groups.
            step: Training step, from 0.

        Returns:
            The groups, in the order of their numbers.
        """
        if self.settings.order == "finished":
            oldest = step - self.settings.steps_ahead
            waiting.sort(key=lambda group: (group.submitted > oldest, not scored[group.number]))  # a stable sort
        return sorted(waiting[:count], key=lambda group: group.number)

    def finish(self) -> None:
        """End a step: forget its groups, and the weights that no waiting response needs."""
        self._step_rollouts, self._at_step_start, self._cancelled = [], self._at_last_take, 0
        with self._queue.changed:
            self._queue.learned()
        self.policy.kept.keep(self._needed())

    def _needed(self) -> set[int]:
        """Return the versions that waiting responses of all ranks were or will be sampled with. A collective."""
        with self._queue.changed:
            needed = self._queue.log.versions | {self.policy.version} | self._connection.versions()
            if self.settings.proximal == "sampled":
                needed |= {version for group in self._queue.groups for version in group.versions}
        return {version for own in self._ranks.gather(sorted(needed)) for version in own}

    # --- checkpoints -------------------------------------------------------------------------------------------

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return the state for `load`: this rank's tensors, and JSON with the state of all ranks.

        With `in_flight: wait`, unfinished responses are sampled again with the same weights. Otherwise their tokens so
        far are saved.
        """
        saves_partials = self.settings.in_flight != "wait" and self._connection.started
        partials = self._connection.partials() if saves_partials else []
        with self._queue.changed:
            self._queue.keep_partials(partials)
            own = [group for group in self._queue.groups if group.rank == self._ranks.rank]
            saved, log = save_groups(own), save_log(self._queue.log)
        needed = self._needed() - {self.policy.version}
        tensors, of_all = gather_saved(*saved, log, self._ranks)
        if self._ranks.first:
            tensors |= self.policy.kept.tensors(needed)
        return tensors, {
            **of_all,
            "number": self._next_number,
            "submitted": [[step, count] for step, count in sorted(self._submitted.items())],
            "published": self._published,
            "n": self.sampling.n,
            "sampled_with": sampled_with(self.config),
        }

    def load(self, tensors: Mapping[str, Tensor], state: dict[str, Any], kept: Iterable[Snapshot]) -> None:
        """Continue from a saved state, before the first publish. Any number of ranks may have saved it.

        Args:
            tensors: Tensors of all ranks.
            state: JSON that `state` returned.
            kept: The kept versions, ascending.

        Raises:
            UserError: The state is inconsistent, or one of its prompts is not in the data any more.
        """
        groups = load_groups(tensors, state["groups"], self._prompts, self.sampling.n, self._ranks)
        own = [group for group in groups if group.rank == self._ranks.rank]
        for snapshot in kept:
            self.policy.kept.add(snapshot)
        with self._queue.changed:
            self._queue.groups = deque(groups)
            self._next_number = state["number"]
            self._submitted = Counter(dict(map(tuple, state["submitted"])))
            self._published = list(state["published"])
            self._queue.to_score.extend(group for group in own if group.complete)
            self._queue.log = load_log(state["log"], own)
            self._connection.repeat()

    # --- the learner's side ------------------------------------------------------------------------------------

    def _start(self) -> None:
        """Send the sampler its settings, wait until it has built the model, and start both threads."""
        on_cpu, started = self.policy.device.type == "cpu", len(share_of(0, self._per_step, self._ranks.count))
        self._connection.start(
            AsyncSettings(
                config=self.config.to_yaml(),
                device="cpu" if on_cpu else "cuda:0",
                max_length=self.policy.max_length,
                longest=self._longest,
                sequences=self._groups_for(started) * (self.settings.steps_ahead + 1) * self.sampling.n,
                sampling=replace(self.sampling, record_routing=self.config.records_routing),
                threads=torch.get_num_threads() if on_cpu else None,
            )
        )
        self._at_step_start = self._at_last_take = _Totals(time.monotonic())
        self._queue.run("rewards", self._score)

    def _submit(self, count: int, step: int, now: int) -> None:
        """Send the sampler the next prompts of the data.

        Args:
            count: Number of groups that will be learned from.
            step: Training step that the groups are meant for; it determines their seed.
            now: The current training step.
        """
        serial = self._submitted[step]
        self._submitted[step] += 1
        for old in [one for one in self._submitted if one < step - 2 * self.settings.max_staleness - 2]:
            del self._submitted[old]
        ranks, n = self._ranks, self.sampling.n
        needed = [len(share_of(rank, count, ranks.count)) for rank in range(ranks.count)]
        started = list(map(self._groups_for, needed))
        prompts = self._stream.next(sum(started))
        seed = round_seed(self.sampling.seed + step, serial)
        numbered = enumerate(zip(prompts, first_samples(prompts, n), strict=True), self._next_number)
        for rank in range(ranks.count):
            wave = Wave(self._next_number, needed[rank]) if started[rank] > needed[rank] else None
            groups = [
                PendingGroup(number, step, now, prompt, seed, first, n, rank, wave=wave)
                for number, (prompt, first) in islice(numbered, started[rank])
            ]
            self._next_number += started[rank]
            self._queue.groups += groups
            if rank == ranks.rank:
                self._connection.add(Added(groups))

    def _groups_for(self, count: int) -> int:
        """Return the number of groups to start so that `count` of them are learned from."""
        return math.ceil(count * self.settings.oversample)

    def _measure(self, rollouts: Sequence[Rollout], ready: int) -> None:
        """Update `metrics` for the step so far. ready: number of groups that were complete before this take."""
        self._ready_groups = self._ready_groups if self._step_rollouts else ready
        self._step_rollouts += rollouts
        age = {version: len(self._published) - 1 - i for i, version in enumerate(self._published)}
        ages = [age[version] for r in self._step_rollouts for version in r.token_versions]
        start, connection = self._at_step_start, self._connection
        with self._queue.changed:
            now = _Totals(time.monotonic(), connection.sampler_s, connection.tokens, self._waited_s)
        self._at_last_take = now
        passed, worked = now.time - start.time, now.sampler_s - start.sampler_s
        self.metrics |= {
            "async/staleness_mean": mean(ages),
            "async/staleness_max": float(max(ages)),
            "async/continued_frac": mean([float(r.versions is not None) for r in self._step_rollouts]),
            "async/queue_groups": float(self._ready_groups),
            "async/sampler_idle_frac": min(max(1 - worked / passed, 0.0), 1.0),
            "async/learner_idle_frac": min((now.waited_s - start.waited_s) / passed, 1.0),
            "async/restarts": float(connection.restarts),
        }
        if self.settings.oversample > 1:
            with self._queue.changed:
                own, self._queue.cancelled = self._queue.cancelled, 0
            self._cancelled += sum(self._ranks.gather(own))
            groups = len(self._step_rollouts) // self.sampling.n
            self.metrics["async/cancelled_frac"] = self._cancelled / (self._cancelled + groups)
        rate = (now.tokens - start.tokens) / worked if worked > 0 else 0.0
        self.metrics["throughput/rollout_tokens_per_s"] = rate

    def _score(self) -> None:
        """Score complete groups until the engine closes; groups of the same step are scored together."""
        n = self.sampling.n
        while groups := self._queue.next_to_score():
            prompts = [group.prompt for group in groups for _ in range(n)]
            rollouts = [rollout for group in groups for rollout in group.ordered]
            scores = score_rollouts(self._rewards, prompts, rollouts, Share(0, self._per_step * n))
            with self._queue.changed:
                for i, group in enumerate(groups):
                    group.scores = scores.part(slice(i * n, (i + 1) * n), first=i == 0)
                self._queue.changed.notify_all()
