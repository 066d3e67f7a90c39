"""The connection to a sampler's process: a thread sends orders, receives answers, and restarts a failed process."""

from __future__ import annotations

import socket
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from qarl.config import Config
from qarl.distributed.ranks import Ranks
from qarl.errors import UserError
from qarl.policy.policy import Policy
from qarl.rollout.asynchronous.group_queue import POLL_S, GroupQueue
from qarl.rollout.asynchronous.groups import Added, Published
from qarl.rollout.asynchronous.process import AsyncProcess
from qarl.rollout.vllm.launch import LOG, sampler_settings, temporary_checkpoint
from qarl.rollout.vllm.process import SamplerError, log_hint, next_restart, start_error
from qarl.rollout.vllm.settings import AsyncSettings
from qarl.weight_sync.canary import CanaryCheck
from qarl.weight_sync.checkpoint import write_snapshot_checkpoint
from qarl.weight_sync.sender import SamplerFault
from qarl.weight_sync.snapshot import Snapshot
from qarl.weight_sync.transport import learner_gpu
from qarl.weight_sync.update import WeightUpdate

MESSAGE_S = 0.01  # seconds to wait for a message of the sampler's process before sending new orders


def sampler_gpu(config: Config, device: torch.device, ranks: Ranks) -> int | None:
    """Return the CUDA index of the GPU of this rank's sampler; None on the CPU. A collective.

    Samplers use consecutive GPUs of the machine, starting at `rollout.async.device`, by default after the learners'.

    Args:
        config: The run's configuration.
        device: The learner's device.
        ranks: The ranks of the run.

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
            f"rollout.async: {here} learners and {here} samplers need one GPU each, and this machine has {count}; use "
            f"{2 * here} or more (rollout.async.device: index of the first sampler's GPU), or remove rollout.async"
        )
    return gpu


class SamplerConnection:
    """Sends orders to one sampler and receives its answers.

    Args:
        config: The run's configuration.
        policy: The policy whose versions are published.
        tokenizer: Written to the checkpoint that vLLM starts from.
        process: A process that was just started. The connection restarts it if it fails.
        queue: Receives the responses. Its lock also guards the state of this object.
        canary: Token sequences that learner and sampler score after each publish.
        directory: Directory of the log.
        say: Called with one line for the user.

    Attributes:
        process: The current process.
        started: Whether the first process has built its model.
        restarts: Number of restarts so far.
        sampler_s: Seconds of generation so far.
        tokens: Number of tokens of finished responses so far.
        metrics: Metrics of the start and the last publish, by name.
    """

    def __init__(
        self,
        config: Config,
        policy: Policy,
        tokenizer: PreTrainedTokenizerBase,
        process: AsyncProcess,
        queue: GroupQueue,
        canary: list[list[int]],
        directory: Path,
        say: Callable[[str], None],
    ) -> None:
        assert config.rollout.asynchronous is not None, "the run samples asynchronously"
        self.settings = config.rollout.asynchronous
        self.process, self.started, self.restarts = process, False, 0
        self.sampler_s = self.tokens = 0.0
        self.metrics: dict[str, float] = {}
        self._config, self._policy, self._tokenizer = config, policy, tokenizer
        self._queue, self._canary, self._directory, self._say = queue, canary, directory, say
        self._canary_check = CanaryCheck(config.rollout.exact, say)
        self._serves = False  # whether `process` takes orders; False while a process is being started
        self._orders: deque[tuple[Published | Added, WeightUpdate | None]] = deque()  # not sent yet
        self._unanswered: Published | None = None  # the publish that the sampler has not answered
        self._partials: list[Any] | None = []  # the sampler's last answer to `partials`; None: not answered yet
        self._asks_partials = False  # whether the order `partials` must be sent
        self._earlier_s = 0.0  # seconds of generation in processes that failed
        self._model: AsyncSettings | None = None  # how the sampler builds its model, from `start` on

    # --- called by the learner ---------------------------------------------------------------------------------

    def start(self, model: AsyncSettings) -> None:
        """Wait until the process has built the model, and start the thread. Raises SamplerError if that fails."""
        self._model = model
        try:
            self._build(self.process)
        except SamplerFault as fault:
            log = self._directory / LOG
            if self._config.rollout.engine == "vllm":
                raise start_error(fault, log) from fault
            raise SamplerError(f"rollout.async: the sampler did not start: {fault}{log_hint(log)}") from fault
        self.started = self._serves = True
        self._queue.run("sampler", self._serve)

    def add(self, entry: Added) -> None:
        """Order responses. The caller holds the lock."""
        self._enqueue(entry, None)

    def publish(self, entry: Published, snapshot: Snapshot) -> None:
        """Order a publish. The caller holds the lock. Raises OSError if shared memory is full.

        The transport holds one update at a time. If it is free, the update is packed here, because packing in the
        thread would wait for all work that the learner's GPU gets next. If it is not free (a restarted process must
        get an earlier version first), the thread packs the update before sending it.
        """
        free = self._serves and not self.versions()
        self._enqueue(entry, self._pack(snapshot) if free else None)

    def _enqueue(self, entry: Published | Added, update: WeightUpdate | None) -> None:
        self._queue.log.append(entry)
        self._orders.append((entry, update))
        self._queue.changed.notify_all()

    def repeat(self) -> None:
        """Order all missing responses again. The caller holds the lock."""
        waits = self.settings.in_flight == "wait"
        self._orders = deque((entry, None) for entry in self._queue.log.repeat(waits))

    def wait_for_answers(self) -> None:
        """Wait until the sampler has all orders and has answered the last publish."""
        if self.started:
            self._queue.wait(lambda: self._unanswered is None and not self._orders)

    def _pack(self, snapshot: Snapshot) -> WeightUpdate:
        payload = self.process.transports[0].pack(snapshot.published)
        return WeightUpdate(snapshot.version, [payload], snapshot.fingerprints, self._canary)

    def versions(self) -> set[int]:
        """Return the versions that are not sent or not answered yet. The caller holds the lock."""
        entries = [self._unanswered, *(entry for entry, _ in self._orders)]
        return {entry.version for entry in entries if isinstance(entry, Published)}

    def partials(self) -> list[Any]:
        """Return unfinished responses, see `NativeHost.partials`; an empty list after a fault."""
        with self._queue.changed:
            self._partials, self._asks_partials = None, True
            while self._partials is None and self._queue.fault is None:
                self._queue.changed.wait(POLL_S)
            return self._partials or []

    # --- the model ---------------------------------------------------------------------------------------------

    def _build(self, process: AsyncProcess) -> None:
        assert self._model is not None, "`start` sets `_model`"
        if self._config.rollout.engine == "vllm":
            self._load_vllm(process)
        process.begin_with(self._model)
        process.wait_until_ready(self._queue.raise_fault)

    def _load_vllm(self, process: AsyncProcess) -> None:
        """Start vLLM on a checkpoint of the newest version. Its first publish may bring an older version."""
        layout, newest = self._policy.sampler.layout, self._queue.log.last_version
        assert newest is not None, "a version was published"
        snapshot = self._policy.kept.snapshot(newest)
        begin = time.perf_counter()
        with temporary_checkpoint(self._directory) as checkpoint:
            write_snapshot_checkpoint(checkpoint, snapshot, layout, self._tokenizer)
            process.begin_start(sampler_settings(self._config, layout, checkpoint), snapshot.fingerprints)
            process.wait_until_ready(self._queue.raise_fault)
        if not self.started:
            self.metrics["time/sampler_start_s"] = time.perf_counter() - begin
            self.metrics["publish/proved_frac"] = process.result["proved_frac"]
            for note in process.result["notes"]:
                self._say(note)

    # --- the thread --------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        """Send orders and receive messages until the queue closes."""
        while not self._queue.closing:
            try:
                self._send_orders()
                message = self.process.message(MESSAGE_S)
            except SamplerFault as fault:
                self._restart(fault)
                continue
            if message is not None:
                with self._queue.changed:
                    self._receive(*message)
                    self._queue.changed.notify_all()

    def _send_orders(self) -> None:
        """Send all orders, up to a publish that must wait for the answer to the previous one."""
        while True:
            with self._queue.changed:
                cancelled, self._queue.to_cancel = self._queue.to_cancel, []
            if cancelled:
                self.process.begin("cancel", cancelled)
            with self._queue.changed:
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
                self.process.begin("partials", None)
            elif isinstance(entry, Published):
                self.process.begin("publish", update or self._pack(self._policy.kept.on_device(entry.version)))
            elif missing:
                self.process.begin("add", missing)

    def _receive(self, kind: str, body: Any) -> None:
        match kind:
            case "alive":
                self.sampler_s = self._earlier_s + body
            case "partials":
                self._partials = body
            case "published":
                self._check(*body)
            case "finished":
                answers, sampler_s = body
                self.sampler_s = self._earlier_s + sampler_s
                self.tokens += self._queue.finish(answers)
            case _:
                raise SamplerError(f"rollout.async: the sampler's process sent an unknown message {kind[:40]!r}")

    def _check(self, version: int, pause_s: float, seconds: dict[str, float], scores: list[list[float]]) -> None:
        """Check the sampler's answer to a publish."""
        published, self._unanswered = self._unanswered, None
        self.process.transports[0].release()
        assert published is not None and published.version == version, "answers come in order"
        self.metrics["publish/pause_s"] = pause_s
        self.metrics |= {f"time/publish_{part}_s": value for part, value in seconds.items()}
        if published.scores:
            self.metrics |= self._canary_check.compare(version, scores, published.scores)

    def _restart(self, fault: SamplerFault) -> None:
        """Start another process and repeat the orders whose responses are missing.

        Raises:
            SamplerError: `rollout.async.max_restarts` is reached.
        """
        with self._queue.changed:
            self._serves = False
        self.process.close()
        limit = self.settings.max_restarts
        self.restarts = next_restart(fault, self.restarts, limit, "rollout.async", self._directory / LOG, self._say)
        process = AsyncProcess(self._config, self._policy.device, self.process.gpu, self._directory)
        try:
            self._build(process)
        except BaseException:
            process.close()
            raise
        with self._queue.changed:
            self.process, self._unanswered, self._queue.to_cancel, self._serves = process, None, [], True
            self._earlier_s = self.sampler_s
            self._asks_partials = self._asks_partials or self._partials is None
            self.repeat()
