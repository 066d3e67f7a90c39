"""Asynchronous rollouts as the training loop uses them.

A thread owns the connection to the sampler's process, and another one scores complete groups, so sampling and rewards
go on while the learner learns. After the publish for step s, the sampler has prompts for the steps up to
s + max_staleness. A group is learned from at most `max_staleness` steps after the sampler got its prompt. So no token
is older than that. No response is dropped for being long, unless `rollout.async.oversample` is above 1.
"""

from __future__ import annotations

import math
import shutil
import socket
import threading
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
from qarl.rollout.asynchronous.groups import (
    Added,
    OrderLog,
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
from qarl.rollout.vllm.launch import LOG, sampler_settings
from qarl.rollout.vllm.process import SamplerError, not_started, see
from qarl.types import Prompt, Rollout
from qarl.utils.averages import mean
from qarl.weight_sync.canary import Bound, canary_of, difference
from qarl.weight_sync.checkpoint import write_snapshot_checkpoint
from qarl.weight_sync.sender import SamplerFault
from qarl.weight_sync.snapshot import Snapshot
from qarl.weight_sync.transport import learner_gpu
from qarl.weight_sync.update import WeightUpdate

CHECKPOINT = "sampler"  # in the run directory, while vLLM loads it
POLL_S = 0.01  # for a message of the sampler's process
LOOK_S = 0.05  # between two looks of the learner that waits
CLOSE_S = 5.0  # for a thread, when the run ends


def sampler_gpu(config: Config, device: torch.device, ranks: Ranks) -> int | None:
    """Return the CUDA index of this rank's sampler; None on the CPU. A collective.

    The samplers of several ranks are on the GPUs after those of all learners of the machine, or from
    `rollout.async.device` on.

    Args:
        config: Of the run.
        device: The learner's.
        ranks: Of the run.

    Raises:
        UserError: There is no GPU for the sampler.
    """
    settings, hosts = config.rollout.asynchronous, ranks.gather(socket.gethostname())
    assert settings is not None, "the run samples asynchronously"
    if device.type == "cpu":
        return None
    here, before = hosts.count(hosts[ranks.rank]), hosts[: ranks.rank].count(hosts[ranks.rank])
    learners = range(here) if here > 1 else range(learner_gpu(device), learner_gpu(device) + 1)
    gpu = (learners.stop if settings.device is None else settings.device) + before
    count = torch.cuda.device_count()
    if gpu >= count or gpu in learners:
        raise UserError(
            f"rollout.async: {here} samplers need a GPU each beside the {here} of the learner, and this machine shows "
            f"{count}; take {2 * here} or more (rollout.async.device is that of the first sampler), or leave "
            "rollout.async out"
        )
    return gpu


def launch(config: Config, device: torch.device, gpu: int | None, place: Path) -> AsyncProcess:
    """Start the sampler's process, which imports what it needs and then waits for `AsyncEngine`.

    Args:
        config: Of the run.
        device: The learner's.
        gpu: See `sampler_gpu`.
        place: Directory of the log.

    Raises:
        UserError: The log cannot be written.
    """
    settings = config.rollout.asynchronous
    assert settings is not None, "the run samples asynchronously"
    numerics = "exact" if config.rollout.exact else "fast"
    vllm = config.rollout.engine == "vllm"
    return AsyncProcess(device, gpu, numerics, place / LOG, settings.timeout_s, vllm)


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
        self.place, self.say, self.tokenizer = place, say, tokenizer
        self.version: int | None = None
        self.metrics: dict[str, float] = {}
        self.restarts = 0
        self._ranks = ranks
        self._stream, self._rewards = stream, rewards
        self._prompts = {prompt.id: prompt for prompt in prompts}
        self._local = NativeEngine(policy.sampler, tokenizer, config.rollout)
        self._longest = longest_of(prompts, sampling, policy.max_length)
        self._canary = canary_of([prompt.token_ids for prompt in prompts], policy.max_length)
        self._bound: Bound | None = None
        dynamic = config.rollout.dynamic_sampling
        self._per_step = math.ceil(config.train.prompts_per_step * (dynamic.oversample if dynamic else 1.0))
        self._process, self._started = process, False

        # Shared with the two threads, and read and written under the condition's lock.
        self._changed = threading.Condition()
        self._groups: deque[PendingGroup] = deque()  # in the order in which they are learned from
        self._taken: set[int] = set()  # numbers of the groups that the current step learns from
        self._log = OrderLog()
        self._orders: deque[tuple[Published | Added, WeightUpdate | None]] = deque()  # still to be sent
        self._unanswered: Published | None = None  # publish that the sampler has not answered
        self._partials: list[Any] | None = []  # None: asked for
        self._asks_partials = False
        self._to_score: deque[PendingGroup] = deque()
        self._to_cancel: list[int] = []  # numbers of groups that the sampler's process still has to drop
        self._cancelled = 0  # groups, since the last take
        self._fault: BaseException | None = None
        self._closing = False
        self._sampler_s = self._tokens = 0.0  # seconds of generation and tokens of finished responses, so far
        self._earlier_s = 0.0  # seconds of generation of processes that failed

        self._submitted: Counter[int] = Counter()  # submissions per step
        self._number = 0
        policy.kept = KeptVersions(policy, on_host=settings.kept_versions == "host")
        self._published: list[int] = []  # newest versions, in order
        self._mark = time.monotonic(), 0.0, 0.0, 0.0  # at the last take: time, seconds of generation, tokens, waited
        self._waited_s = 0.0
        self._threads = [
            threading.Thread(target=self._guarded, args=(work,), name=f"qarl-{name}", daemon=True)
            for name, work in (("sampler", self._serve), ("rewards", self._score))
        ]

    # --- the contract of an engine -----------------------------------------------------------------------------

    def publish(self, snapshot: Snapshot) -> None:
        """Send a snapshot to the sampler. Does not wait for the sampler, unless it still has to take the previous one.

        The sampler's answer is checked when it comes; the next call of this engine raises what it shows.
        """
        self.policy.sampler.install(snapshot)
        self.version = None
        if self._started:
            self._wait(lambda: self._unanswered is None and not self._orders)
        self.policy.kept.add(snapshot, self.policy.weights if self.settings.proximal == "sampled" else None)
        if snapshot.version not in self._published:
            self._published = [*self._published, snapshot.version][-2 * (self.settings.max_staleness + 2) :]
        if self._log.last_version != snapshot.version:  # a resumed run's log has it already
            scores = [self.policy.sampler.score([tokens]).tolist() for tokens in self._canary]
            # Packed in this thread: the other one would wait for whatever the learner starts next.
            update = self._update(snapshot) if self._started else None
            with self._changed:
                self._enqueue(Published(snapshot.version, scores), update)
        if not self._started:
            self._start()
        self.version = snapshot.version

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
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(CLOSE_S)  # a reward function may take longer; its worker is ended next
        self._process.close()
        self._local.close()
        self.version = None

    # --- what the training loop adds ---------------------------------------------------------------------------

    def fill(self, step: int) -> None:
        """Give the sampler the prompts that its staleness allows before training step `step`, counted from 0."""
        with self._changed:
            waiting = self._places()
            limit = (self.settings.max_staleness + 1) * self._per_step
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
        with self._changed:
            missing = count - self._places()
            if missing > 0:  # a further round of dynamic sampling
                self._submit(missing, step, step)
        begin = time.monotonic()
        groups, ready = self._agree(count, step, tick)
        with self._changed:
            self._taken |= {group.number for group in groups}
        self._waited_s += time.monotonic() - begin
        rollouts, scores = self._gather(groups)
        self._measure(rollouts, len(groups), ready)
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
            with self._changed:
                waiting, own = self._waiting(), self._scored()
            scored = {number: bool(done) for view in ranks.gather(own) for number, done in view}
            with self._changed:  # without those that another rank has cancelled
                gone = {group.number for group in waiting} - scored.keys()
                self._groups = deque(group for group in self._groups if group.number not in gone)
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

            together(ranks, partial(self._wait, settled, look), self.config.rollout.restarts_s)

    def _scored(self) -> list[list[int]]:
        """Return [number, 1 if it is complete and scored, else 0] of each waiting group of this rank."""
        rank = self._ranks.rank
        return [[g.number, int(g.scores is not None)] for g in self._waiting() if g.rank == rank]

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

    def _waiting(self) -> list[PendingGroup]:
        """Groups that no step has taken."""
        return [group for group in self._groups if group.number not in self._taken]

    def _places(self) -> int:
        """Number of groups that steps will take of those that wait; the others will be cancelled."""
        sizes = Counter(group.wave for group in self._groups)
        alone = sizes.pop(None, 0)
        return alone + sum(min(wave.needed, size) for wave, size in sizes.items() if wave) - len(self._taken)

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
            oldest = step - self.settings.max_staleness
            waiting.sort(key=lambda group: (group.submitted > oldest, not scored[group.number]))  # a stable sort
        return sorted(waiting[:count], key=lambda group: group.number)

    def finish(self) -> None:
        """Forget the groups of the step that was learned from, and the weights that no waiting response needs."""
        with self._changed:
            for group in self._groups:
                if group.wave is not None and group.number in self._taken:
                    group.wave.needed -= 1
            self._groups = deque(self._waiting())
            self._taken.clear()
        self.policy.kept.keep(self._needed_by_all())

    def _needed(self) -> set[int]:
        """Versions that a waiting response was sampled with, or has to be."""
        with self._changed:
            needed = self._log.versions | {self.policy.version}
            needed |= {entry.version for entry, _ in self._orders if isinstance(entry, Published)}
            if self.settings.proximal == "sampled":
                needed |= {version for group in self._groups for version in group.versions}
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
        if self.settings.in_flight != "wait" and self._started:
            with self._changed:
                self._partials, self._asks_partials = None, True
                while self._partials is None and self._fault is None:  # after a fault, what is here is saved
                    self._changed.wait(LOOK_S)
        with self._changed:
            own = [group for group in self._groups if group.rank == self._ranks.rank]
            by_number = {group.number: group for group in own}
            for number, sample, *found in self._partials or ():
                if (group := by_number.get(number)) is not None and sample not in group.rollouts:
                    group.partial[sample] = tuple(found)
            tensors, rows = save_groups(own)
            log: list[Any] = []
            for entry in self._log.entries:
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
        with self._changed:
            self._groups = deque(groups)
            self._number = state["number"]
            self._submitted = Counter(dict(map(tuple, state["submitted"])))
            self._published = list(state["published"])
            self._to_score.extend(group for group in own if group.complete)
            for operation, what in state["log"]:
                if operation == "add":
                    self._log.append(Added([by_number[number] for number in what if number in by_number]))
                else:
                    self._log.append(Published(what, []))
            self._orders = deque((entry, None) for entry in self._log.repeat(self.settings.in_flight == "wait"))

    # --- the learner's side ------------------------------------------------------------------------------------

    def _start(self) -> None:
        """Send the settings to the process, wait until its model is built, and start the threads."""
        try:
            self._build(self._process)
        except SamplerFault as fault:
            if self.config.rollout.engine == "vllm":
                raise not_started(fault, self.place / LOG) from fault
            raise SamplerError(f"rollout.async: the sampler did not start: {fault}{see(self.place / LOG)}") from fault
        self._started = True
        self._mark = time.monotonic(), 0.0, 0.0, 0.0
        for thread in self._threads:
            thread.start()

    def _build(self, process: AsyncProcess) -> None:
        if self.config.rollout.engine == "vllm":
            self._load_vllm(process)
        on_cpu = self.policy.device.type == "cpu"
        settings = AsyncSettings(
            config=self.config.to_yaml(),
            device="cpu" if on_cpu else "cuda:0",
            max_length=self.policy.max_length,
            longest=self._longest,
            sequences=self._groups_for(len(share_of(0, self._per_step, self._ranks.count)))
            * (self.settings.max_staleness + 1)
            * self.sampling.n,
            sampling=replace(self.sampling, record_routing=self.config.records_routing),
            threads=torch.get_num_threads() if on_cpu else None,
        )
        process.begin_with(settings)
        process.wait_until_ready(self._raise_fault)

    def _load_vllm(self, process: AsyncProcess) -> None:
        """Start vLLM on a checkpoint of the newest version. The publish that it gets first may bring an older one."""
        layout, folder, newest = self.policy.sampler.layout, self.place / CHECKPOINT, self._log.last_version
        assert newest is not None, "a version was published"
        snapshot = self.policy.kept.snapshot(newest)
        shutil.rmtree(folder, ignore_errors=True)  # left by an interrupted start
        begin = time.perf_counter()
        try:
            write_snapshot_checkpoint(folder, snapshot, layout, self.tokenizer)
            process.begin_start(sampler_settings(self.config, layout, folder), snapshot.fingerprints)
            process.wait_until_ready(self._raise_fault)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        if not self._started:
            self.metrics["time/sampler_start_s"] = time.perf_counter() - begin
            self.metrics["publish/proved_frac"] = process.result["proved_frac"]
            for note in process.result["notes"]:
                self.say(note)

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
            self._groups += groups
            if rank == ranks.rank:
                self._enqueue(Added(groups))

    def _groups_for(self, count: int) -> int:
        """Groups that are started so that `count` of them are learned from."""
        return math.ceil(count * self.settings.oversample)

    def _enqueue(self, entry: Published | Added, update: WeightUpdate | None = None) -> None:
        self._log.append(entry)
        self._orders.append((entry, update))
        self._changed.notify_all()

    def _update(self, snapshot: Snapshot) -> WeightUpdate:
        """Pack a snapshot for the process. One update at a time is packed."""
        payload = self._process.transports[0].pack(snapshot.published)
        return WeightUpdate(snapshot.version, [payload], snapshot.fingerprints, self._canary)

    def _wait(self, condition: Callable[[], bool], tick: Callable[[], None] = lambda: None) -> None:
        """Wait until a condition holds. Raises the fault of a thread, and whatever `tick` raises."""
        while True:
            with self._changed:
                self._raise_fault()
                if condition():
                    return
                self._changed.wait(LOOK_S)
            tick()

    def _raise_fault(self) -> None:
        if self._fault is not None:
            raise self._fault

    def _measure(self, rollouts: Sequence[Rollout], groups: int, ready: int) -> None:
        """Fill `metrics` for a step. groups: that it learns from. ready: groups that were complete before."""
        age = {version: len(self._published) - 1 - i for i, version in enumerate(self._published)}
        ages = [age[version] for r in rollouts for version in r.versions or [r.version] * len(r.token_ids)]
        then, sampler_s, tokens, waited_s = self._mark
        with self._changed:
            self._mark = time.monotonic(), self._sampler_s, self._tokens, self._waited_s
        passed = self._mark[0] - then
        worked = self._mark[1] - sampler_s
        self.metrics |= {
            "async/staleness_mean": mean(ages),
            "async/staleness_max": float(max(ages)),
            "async/continued_frac": mean([float(r.versions is not None) for r in rollouts]),
            "async/queue_groups": float(ready),
            "async/sampler_idle_frac": min(max(1 - worked / passed, 0.0), 1.0),
            "async/learner_idle_frac": min((self._waited_s - waited_s) / passed, 1.0),
            "async/restarts": float(self.restarts),
        }
        if self.settings.oversample > 1:
            with self._changed:
                own, self._cancelled = self._cancelled, 0
            cancelled = sum(self._ranks.gather(own))
            self.metrics["async/cancelled_frac"] = cancelled / (cancelled + groups)
        if worked > 0:
            self.metrics["throughput/rollout_tokens_per_s"] = (self._mark[2] - tokens) / worked

    # --- the threads -------------------------------------------------------------------------------------------

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            with self._changed:
                self._fault = self._fault or error
                self._changed.notify_all()

    def _serve(self) -> None:
        """Send orders and take what the sampler's process sends, until the engine closes."""
        while not self._closing:
            try:
                self._send_orders()
                message = self._process.message(POLL_S)
            except SamplerFault as fault:
                self._restart(fault)
                continue
            if message is not None:
                with self._changed:
                    self._receive(*message)
                    self._changed.notify_all()

    def _send_orders(self) -> None:
        while True:
            with self._changed:
                cancelled, self._to_cancel = self._to_cancel, []
            if cancelled:
                self._process.order("cancel", cancelled)
            with self._changed:
                if self._asks_partials:
                    self._asks_partials = False
                    entry: Published | Added | None = None
                elif not self._orders or (self._unanswered and isinstance(self._orders[0][0], Published)):
                    return
                else:
                    entry, update = self._orders.popleft()
                    self._unanswered = entry if isinstance(entry, Published) else self._unanswered
                missing = [g.request() for g in entry.groups if not g.ended] if isinstance(entry, Added) else []
            if entry is None:
                self._process.order("partials", None)
            elif isinstance(entry, Published):
                self._process.order("publish", update or self._update(self.policy.kept.on_device(entry.version)))
            elif missing:
                self._process.order("add", missing)

    def _receive(self, kind: str, body: Any) -> None:
        match kind:
            case "alive":
                self._sampler_s = self._earlier_s + body
            case "partials":
                self._partials = body
            case "published":
                self._check(*body)
            case "finished":
                answers, sampler_s = body
                self._sampler_s = self._earlier_s + sampler_s
                by_number = {group.number: group for group in self._groups}
                for number, sample, *answer in answers:
                    self._tokens += len(answer[0])
                    group = by_number.get(number)
                    if group is None or group.cancelled:  # it ended before the sampler knew
                        continue
                    group.finish(sample, *answer)
                    if group.complete:
                        self._to_score.append(group)
                        self._cancel_rest(group.wave)
                self._log.prune()
            case _:
                raise SamplerError(f"rollout.async: the sampler's process sent {kind[:40]!r}")

    def _cancel_rest(self, wave: Wave | None) -> None:
        """Cancel the unfinished groups of a wave if enough are complete."""
        members = [group for group in self._groups if group.wave is wave]
        if wave is None or sum(group.complete for group in members) < wave.needed:
            return
        for group in members:
            group.cancelled = not group.complete
        gone = [group.number for group in members if group.cancelled]
        self._groups = deque(group for group in self._groups if not group.cancelled)
        self._to_cancel += gone
        self._cancelled += len(gone)

    def _check(self, version: int, paused_s: float, scores: list[list[float]]) -> None:
        """Check the sampler's answer to a publish."""
        published, self._unanswered = self._unanswered, None
        self._process.transports[0].release()
        assert published is not None and published.version == version, "answers come in order"
        self.metrics["publish/pause_s"] = paused_s
        if not published.scores:
            return
        found = difference([x for own in scores for x in own], [x for own in published.scores for x in own])
        self.metrics |= {"publish/canary_abs_mean": found.mean, "publish/canary_abs_max": found.max}
        if self._bound is None:
            exact = self.config.rollout.exact
            self._bound = Bound.of(found, exact)
            if exact and found.max:
                self.say(
                    f"rollout.async: the canary's log-probs differ by {found} between sampler and learner, and should "
                    "be bit-identical; run qarl verify-exact to find out where they differ"
                )
        self._bound.check(version, found)

    def _restart(self, fault: SamplerFault) -> None:
        """Start another process and repeat the orders whose responses are missing.

        Raises SamplerError past the limit.
        """
        self._process.close()
        limit, log = self.settings.max_restarts, self.place / LOG
        if self.restarts == limit:
            raise SamplerError(
                f"rollout.async: the sampler failed: {fault}; restarted {limit} times already "
                f"(rollout.async.max_restarts){see(log)}"
            ) from fault
        self.restarts += 1
        self.say(f"the sampler failed: {fault}; restart {self.restarts} of {limit}{see(log)}")
        process = launch(self.config, self.policy.device, self._process.gpu, self.place)
        try:
            self._build(process)
        except BaseException:
            process.close()
            raise
        with self._changed:
            self._process, self._unanswered, self._to_cancel = process, None, []
            self._earlier_s = self._sampler_s
            self._asks_partials = self._asks_partials or self._partials is None
            self._orders = deque((entry, None) for entry in self._log.repeat(self.settings.in_flight == "wait"))

    def _score(self) -> None:
        """Score complete groups, those of one step together, until the engine closes."""
        while True:
            with self._changed:
                while not self._to_score and not self._closing:
                    self._changed.wait()
                if self._closing:
                    return
                step = self._to_score[0].step
                groups = [group for group in self._to_score if group.step == step]
                self._to_score = deque(group for group in self._to_score if group.step != step)
            n, prompts = self.sampling.n, [group.prompt for group in groups for _ in range(self.sampling.n)]
            rollouts = [rollout for group in groups for rollout in group.ordered]
            columns = {name: [prompt.columns[name] for prompt in prompts] for name in prompts[0].columns}
            texts, ids = [rollout.text for rollout in rollouts], [rollout.token_ids for rollout in rollouts]
            share = Share(0, self._per_step * n)
            scores = self._rewards.score(texts, [prompt.text for prompt in prompts], columns, ids, share)
            with self._changed:
                for place, group in enumerate(groups):
                    group.scores = scores.part(slice(place * n, (place + 1) * n), first=place == 0)
                self._changed.notify_all()
