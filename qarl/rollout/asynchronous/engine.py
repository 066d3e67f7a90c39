"""Asynchronous rollouts as the training loop uses them.

A thread owns the connection to the sampler's process, and another one scores complete groups, so sampling and rewards
go on while the learner learns. Before step s the sampler gets prompts for the steps up to s + `steps_ahead`. A group is
learned from at most `steps_ahead` steps after that. The sampler's weights are then at most `publish_every` - 1 versions
old, so no token is older than `max_staleness` versions. No response is dropped for being long, unless
`rollout.async.oversample` is above 1.
"""

from __future__ import annotations

import math
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from qarl.config import Config
from qarl.data import PromptStream
from qarl.distributed.ranks import Ranks, share_of
from qarl.distributed.together import together
from qarl.errors import UserError
from qarl.policy.kept import KeptVersions
from qarl.policy.policy import Policy
from qarl.rewards import RewardPool, RewardResult
from qarl.rewards.batch import Share
from qarl.rewards.shared import judge
from qarl.rollout.asynchronous.connection import SamplerConnection
from qarl.rollout.asynchronous.group_queue import LOOK_S, GroupQueue
from qarl.rollout.asynchronous.groups import (
    Added,
    PendingGroup,
    Published,
    Wave,
    load_groups,
    merged_logs,
    save_groups,
)
from qarl.rollout.asynchronous.process import AsyncProcess, AsyncSettings
from qarl.rollout.engine import (
    Progress,
    SamplingParams,
    first_samples,
    ignore_progress,
    longest_of,
    require_version,
    round_seed,
)
from qarl.rollout.native.engine import NativeEngine
from qarl.rollout.shared import gather_rollouts
from qarl.types import Prompt, Rollout
from qarl.utils.averages import mean
from qarl.weight_sync.canary import canary_of
from qarl.weight_sync.snapshot import Snapshot


class AsyncEngine:
    """The sampler's process, the groups in flight, and an engine beside the learner for evaluations.

    See `RolloutEngine` for `publish`, `generate`, `sleep`, `wake` and `close`. Of several ranks each has a sampler,
    which gets its share of the prompts of each step. Every rank lists the groups of all ranks in the same order, so
    that all take the same ones. `take`, `finish` and `state` are collectives.

    Args:
        process: See `launch`; it is the engine's from now on.
        ranks: Of the run.
        stream: Gives the prompts of all steps.
        rewards: Scores responses, from a thread of the engine.
        sampling: Of step 0; each step has its own seed.
        place: Directory of the log.
        say: Called with one line for the user.

    Attributes:
        version: Version that was published last.
        metrics: Of the last publish and the last `take`.
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
        place: Path,
        say: Callable[[str], None],
        process: AsyncProcess,
        ranks: Ranks,
    ) -> None:
        settings = config.rollout.asynchronous
        assert settings is not None, "the run samples asynchronously"
        self.config, self.settings, self.policy, self.sampling = config, settings, policy, sampling
        self.version: int | None = None
        self._ranks = ranks
        self._stream, self._rewards = stream, rewards
        self._prompts = {prompt.id: prompt for prompt in prompts}
        self._local = NativeEngine(policy.sampler, tokenizer, config.rollout)
        self._longest = longest_of(prompts, sampling, policy.max_length)
        self._canary = canary_of([prompt.token_ids for prompt in prompts], policy.max_length)
        dynamic = config.rollout.dynamic_sampling
        self._per_step = math.ceil(config.train.prompts_per_step * (dynamic.oversample if dynamic else 1.0))
        self._queue = GroupQueue()
        self._connection = SamplerConnection(config, policy, tokenizer, process, self._queue, self._canary, place, say)
        self.metrics = self._connection.metrics

        self._submitted: Counter[int] = Counter()  # submissions per step
        self._number = 0
        policy.kept = KeptVersions(policy, on_host=settings.kept_versions == "host")
        self._published: list[int] = []  # newest versions, in order
        # Of a step, which takes groups several times with dynamic sampling.
        self._took: list[Rollout] = []
        self._ready = self._cancelled = 0
        self._began = self._mark = 0.0, 0.0, 0.0, 0.0  # time, seconds of generation, tokens, waited; mark: last take
        self._waited_s = 0.0

    # --- the contract of an engine -----------------------------------------------------------------------------

    def publish(self, snapshot: Snapshot) -> None:
        """Send a snapshot to the sampler if `publish_every` versions have passed. Waits only for the previous publish.

        The sampler's answer is checked when it comes; the next call of this engine raises what it shows.
        """
        self.policy.sampler.install(snapshot)
        self.version = None
        self._connection.wait_for_answers()
        self.policy.kept.add(snapshot, self.policy.weights if self.settings.proximal == "sampled" else None)
        if snapshot.version not in self._published:
            self._published = [*self._published, snapshot.version][-2 * (self.settings.max_staleness + 2) :]
        if self._sends(snapshot.version):
            scores = [self.policy.sampler.score([tokens]).tolist() for tokens in self._canary]
            with self._queue.changed:
                self._connection.publish(Published(snapshot.version, scores), snapshot)
        if not self._connection.started:
            self._start()
        self.version = snapshot.version

    def _sends(self, version: int) -> bool:
        """Whether a new version goes to the sampler."""
        last = self._queue.log.last_version  # of a resumed run, too
        if last not in self._published:
            return True
        return self._published.index(version) - self._published.index(last) >= self.settings.publish_every

    def generate(
        self,
        prompts: Sequence[Prompt],
        sampling: SamplingParams,
        version: int,
        progress: Progress = ignore_progress,
        first: Sequence[int] | None = None,
    ) -> list[Rollout]:
        """Generate beside the learner, for evaluations: the sampler's process goes on with the next steps."""
        require_version(self.version, version)
        if self._local.version != version:
            self._local.publish(self.policy.current)
        return self._local.generate(prompts, sampling, version, progress, first)

    def sleep(self) -> None:
        self._local.sleep()

    def wake(self) -> None:
        """Do nothing: the sampler never sleeps."""

    def close(self) -> None:
        self._queue.close()
        self._connection.process.close()
        self._local.close()
        self.version = None

    # --- what the training loop adds ---------------------------------------------------------------------------

    def fill(self, step: int) -> None:
        """Give the sampler the prompts that its staleness allows before training step `step`, counted from 0."""
        with self._queue.changed:
            waiting = self._queue.places()
            limit = (self.settings.steps_ahead + 1) * self._per_step
            while waiting < limit and (target := step + waiting // self._per_step) < self.config.train.steps:
                count = min(self._per_step, limit - waiting)
                self._submit(count, target, step)
                waiting += count

    def take(self, count: int, step: int, tick: Callable[[], None]) -> tuple[list[Prompt], list[Rollout], RewardResult]:
        """Return the next groups with their scores; waits until they are complete.

        Args:
            count: Number of groups.
            step: Training step, from 0.
            tick: Called while waiting. If it raises, the groups stay.
        """
        with self._queue.changed:
            missing = count - self._queue.places()
            if missing > 0:  # a further round of dynamic sampling
                self._submit(missing, step, step)
        begin = time.monotonic()
        groups, ready = self._agree(count, step, tick)
        with self._queue.changed:
            self._queue.taken |= {group.number for group in groups}
        self._waited_s += time.monotonic() - begin
        rollouts, scores = self._gather(groups)
        self._measure(rollouts, ready)
        together(self._ranks, lambda: judge(scores, self.config.reward.max_failed_frac))
        return [group.prompt for group in groups], rollouts, scores

    def _agree(self, count: int, step: int, tick: Callable[[], None]) -> tuple[list[PendingGroup], int]:
        """Wait until the groups of a step are complete on their ranks.

        Returns:
            The groups, and how many were complete before the wait.
        """
        ranks, ready = self._ranks, None
        fixed = self.settings.order == "prompts" and self.settings.oversample == 1

        def look() -> None:
            tick()
            ranks.poll()

        while True:
            with self._queue.changed:
                waiting, own = self._queue.waiting(), self._scored()
            scored = {number: bool(done) for view in ranks.gather(own) for number, done in view}
            with self._queue.changed:  # without those that another rank has cancelled
                gone = {group.number for group in waiting} - scored.keys()
                self._queue.remove(gone)
            chosen = self._next([group for group in waiting if group.number in scored], scored, count, step)
            ready = sum(scored.values()) if ready is None else ready
            if all(scored[group.number] for group in chosen):
                return chosen, ready
            mine = [group for group in chosen if group.rank == ranks.rank]
            until = time.monotonic() + LOOK_S if ranks.count > 1 else math.inf

            def settled(own: Any = own, mine: Any = mine, until: float = until) -> bool:
                if fixed:
                    return all(group.scores is not None for group in mine)
                return self._scored() != own or time.monotonic() > until

            together(ranks, partial(self._queue.wait, settled, look), self.config.rollout.restarts_s)

    def _scored(self) -> list[list[int]]:
        """Return [number, 1 if it is complete and scored, else 0] of each waiting group of this rank."""
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
        order = sorted(range(len(groups)), key=gathered.__getitem__)  # where each group is in what was gathered
        return (
            [rollout for i in order for rollout in rollouts[i * n : (i + 1) * n]],
            RewardResult.joined([results[i] for i in order]),
        )

    def _next(
        self, waiting: list[PendingGroup], scored: Mapping[int, bool], count: int, step: int
    ) -> list[PendingGroup]:
        """Choose the groups of a step, in the order of their prompts, whether they are complete or not.

        With order `finished` those come first that may not wait longer, then complete ones.

        Args:
            waiting: Groups that no step has taken, of all ranks.
            scored: Whether each of them, by its number, is complete and scored.
            count: Number of groups.
            step: Training step, from 0.
        """
        if self.settings.order == "finished":
            oldest = step - self.settings.steps_ahead
            waiting.sort(key=lambda group: (group.submitted > oldest, not scored[group.number]))  # a stable sort
        return sorted(waiting[:count], key=lambda group: group.number)

    def finish(self) -> None:
        """Forget the groups of the step that was learned from, and the weights that no waiting response needs."""
        self._took, self._began, self._cancelled = [], self._mark, 0
        with self._queue.changed:
            self._queue.learned()
        self.policy.kept.keep(self._needed_by_all())

    def _needed(self) -> set[int]:
        """Versions that a waiting response was sampled with, or has to be."""
        with self._queue.changed:
            needed = self._queue.log.versions | {self.policy.version}
            needed |= self._connection.versions()
            if self.settings.proximal == "sampled":
                needed |= {version for group in self._queue.groups for version in group.versions}
            return needed

    def _needed_by_all(self) -> set[int]:
        """`_needed` of all ranks: each of them learns from the responses of all."""
        return {version for own in self._ranks.gather(sorted(self._needed())) for version in own}

    # --- checkpoints -------------------------------------------------------------------------------------------

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return this rank's tensors and the JSON, of all ranks, that `load` continues from.

        With `in_flight: wait` unfinished responses are sampled again from the same weights. Otherwise what they have so
        far is saved.
        """
        saves_partials = self.settings.in_flight != "wait" and self._connection.started
        partials = self._connection.partials() if saves_partials else []
        with self._queue.changed:
            own = [group for group in self._queue.groups if group.rank == self._ranks.rank]
            by_number = {group.number: group for group in own}
            for number, sample, *found in partials:
                if (group := by_number.get(number)) is not None and sample not in group.rollouts:
                    group.partial[sample] = tuple(found)
            tensors, rows = save_groups(own)
            log: list[Any] = []
            for entry in self._queue.log.entries:
                if isinstance(entry, Published):
                    log.append(["publish", entry.version])
                else:
                    log.append(["add", [group.number for group in entry.groups]])
        ranks, needed = self._ranks, self._needed_by_all() - {self.policy.version}
        whole = {name: torch.cat(ranks.gather_tensors(tensors.pop(name))) for name in ("tokens", "logprobs")}
        if ranks.first:
            tensors |= whole
            for version in sorted(needed):
                kept = self.policy.kept.snapshot(version).tensors
                tensors |= {f"{version}/{name}": tensor for name, tensor in kept.items()}
        state = {
            "groups": [row for every in ranks.gather(rows) for row in every],
            "log": merged_logs(ranks.gather(log)),
            "number": self._number,
            "submitted": [[step, count] for step, count in sorted(self._submitted.items())],
            "published": self._published,
            "n": self.sampling.n,
        }
        return tensors, state

    def load(
        self, tensors: Mapping[str, Tensor], state: dict[str, Any], snapshot_of: Callable[[int], Snapshot]
    ) -> None:
        """Continue from `state`, before the first publish. Any number of ranks may have saved it.

        snapshot_of: Builds a kept version from its tensors.

        Raises:
            UserError: The state is not whole, or a prompt of it is not in the data any more.
        """

        def prompt_of(number: int) -> Prompt:
            if number not in self._prompts:
                raise UserError(f"rollout.async: prompt {number} of a saved response is not in the data; restore it")
            return self._prompts[number]

        groups = load_groups(tensors, state["groups"], prompt_of, self.sampling.n)
        groups.sort(key=lambda group: group.number)
        for group in groups:
            group.rank %= self._ranks.count
            if group.rank != self._ranks.rank:
                group.rollouts, group.partial = {}, {}
        own = [group for group in groups if group.rank == self._ranks.rank]
        by_number = {group.number: group for group in own}
        stored = {name.split("/")[0] for name in tensors if "/" in name and not name.startswith("routing/")}
        for version in sorted(map(int, stored)):
            self.policy.kept.add(snapshot_of(version))
        with self._queue.changed:
            self._queue.groups = deque(groups)
            self._number = state["number"]
            self._submitted = Counter(dict(map(tuple, state["submitted"])))
            self._published = list(state["published"])
            self._queue.to_score.extend(group for group in own if group.complete)
            for operation, what in state["log"]:
                if operation == "add":
                    self._queue.log.append(Added([by_number[number] for number in what if number in by_number]))
                else:
                    self._queue.log.append(Published(what, []))
            self._connection.repeat()

    # --- the learner's side ------------------------------------------------------------------------------------

    def _start(self) -> None:
        """Let the sampler build its model, and start both threads."""
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
        self._began = self._mark = time.monotonic(), 0.0, 0.0, 0.0
        self._queue.run("rewards", self._score)

    def _submit(self, count: int, step: int, now: int) -> None:
        """Give the sampler the next prompts of the data, with the random numbers of `step`, before step `now`.

        count: Groups that will be learned from.
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
        numbered = enumerate(zip(prompts, first_samples(prompts, n), strict=True), self._number)
        for rank in range(ranks.count):
            wave = Wave(self._number, needed[rank]) if started[rank] > needed[rank] else None
            groups = [
                PendingGroup(number, step, now, prompt, seed, first, n, rank, wave=wave)
                for number, (prompt, first) in islice(numbered, started[rank])
            ]
            self._number += started[rank]
            self._queue.groups += groups
            if rank == ranks.rank:
                self._connection.add(Added(groups))

    def _groups_for(self, count: int) -> int:
        """Groups that are started so that `count` of them are learned from."""
        return math.ceil(count * self.settings.oversample)

    def _measure(self, rollouts: Sequence[Rollout], ready: int) -> None:
        """Fill `metrics` for the step so far. ready: groups that were complete before this take."""
        self._ready = self._ready if self._took else ready
        self._took += rollouts
        age = {version: len(self._published) - 1 - i for i, version in enumerate(self._published)}
        ages = [age[version] for r in self._took for version in r.versions or [r.version] * len(r.token_ids)]
        then, sampler_s, tokens, waited_s = self._began
        with self._queue.changed:
            self._mark = time.monotonic(), self._connection.sampler_s, self._connection.tokens, self._waited_s
        passed = self._mark[0] - then
        worked = self._mark[1] - sampler_s
        self.metrics |= {
            "async/staleness_mean": mean(ages),
            "async/staleness_max": float(max(ages)),
            "async/continued_frac": mean([float(r.versions is not None) for r in self._took]),
            "async/queue_groups": float(self._ready),
            "async/sampler_idle_frac": min(max(1 - worked / passed, 0.0), 1.0),
            "async/learner_idle_frac": min((self._waited_s - waited_s) / passed, 1.0),
            "async/restarts": float(self._connection.restarts),
        }
        if self.settings.oversample > 1:
            with self._queue.changed:
                own, self._queue.cancelled = self._queue.cancelled, 0
            self._cancelled += sum(self._ranks.gather(own))
            groups = len(self._took) // self.sampling.n
            self.metrics["async/cancelled_frac"] = self._cancelled / (self._cancelled + groups)
        rate = (self._mark[2] - tokens) / worked if worked > 0 else 0.0
        self.metrics["throughput/rollout_tokens_per_s"] = rate

    def _score(self) -> None:
        """Score complete groups, those of one step together, until the engine closes."""
        while True:
            with self._queue.changed:
                while not self._queue.to_score and not self._queue.closing:
                    self._queue.changed.wait()
                if self._queue.closing:
                    return
                step = self._queue.to_score[0].step
                groups = [group for group in self._queue.to_score if group.step == step]
                self._queue.to_score = deque(group for group in self._queue.to_score if group.step != step)
            n, prompts = self.sampling.n, [group.prompt for group in groups for _ in range(self.sampling.n)]
            rollouts = [rollout for group in groups for rollout in group.ordered]
            columns = {name: [prompt.columns[name] for prompt in prompts] for name in prompts[0].columns}
            texts, ids = [rollout.text for rollout in rollouts], [rollout.token_ids for rollout in rollouts]
            share = Share(0, self._per_step * n)
            scores = self._rewards.score(texts, [prompt.text for prompt in prompts], columns, ids, share)
            with self._queue.changed:
                for place, group in enumerate(groups):
                    group.scores = scores.part(slice(place * n, (place + 1) * n), first=place == 0)
                self._queue.changed.notify_all()
