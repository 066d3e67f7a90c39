"""`train.profile`: run one step under torch.profiler and write a trace and a summary table."""

from __future__ import annotations

import gzip
import json
import math
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from qarl.batch.batch import Batch, Part
from qarl.batch.observer import Observer, Phase
from qarl.config.architecture import Architecture
from qarl.objectives.common import TokenLogProbs
from qarl.rewards import RewardResult
from qarl.storage.disk import write_together
from qarl.storage.names import step_name
from qarl.training.flops import BACKWARD, forward_flops
from qarl.training.profile_page import PREFIX, is_range, page
from qarl.training.setup import Run
from qarl.types import Prompt, Rollout

# Per parameter, float32: AdamW reads and writes the parameter and both moments and reads the gradient (7 accesses);
# the gradient norm reads the gradient and quantization reads the parameter (2 accesses).
ADAMW_BYTES = 4 * (7 + 2)
COMPRESSION = 3  # gzip level; higher levels save little more


class StepProfiler(Observer):
    """Traces one step; writes profile/step_NNNNNN.json.gz (chrome://tracing, Perfetto) and a .md summary.

    The trace has every operation of the learner and of publishing. Rollout and reward only have their duration, because
    a rollout alone would produce millions of events. The GPU is synchronized at the end of each phase and part, so work
    is attributed to the phase that launched it. With several ranks, only the share of this rank is traced.

    Args:
        folder: Directory of both files.
        step: Step number, counted from 1.
        run: The run.
        architecture: Sizes of the model; None omits FLOP/s.
    """

    def __init__(self, folder: Path, step: int, run: Run, architecture: Architecture | None) -> None:
        self._folder, self._step, self._run, self._architecture = folder, step, run, architecture
        self._profile: profile | None = None
        self._part: tuple[str, Any] | None = None
        self._rounds = 0  # rounds of micro-batches left in the minibatch
        self._live = False  # whether an optimizer step follows these rounds
        self._updates = 0
        self._groups = 0  # groups sampled by dynamic sampling, including dropped ones
        self._phases: list[tuple[str, float, float]] = []  # name, start and end on time.perf_counter
        self._flops: defaultdict[str, float] = defaultdict(float)

    @contextmanager
    def phase(self, name: Phase, responses: int | None) -> Iterator[None]:
        if name == "learner":
            self._start()
        start = time.perf_counter()
        try:
            with record_function(PREFIX + name):
                yield
                self._leave()
                self._wait()
        except BaseException:
            self._stop()
            raise
        self._phases.append((name, start, time.perf_counter()))
        if name == "publish":
            self._write()

    def sampled(self, metrics: dict[str, float]) -> None:
        self._groups = int(metrics["sampling/groups"])

    def scored(self, prompts: list[Prompt], rollouts: list[Rollout], scores: RewardResult) -> None:
        if self._groups > len(prompts):
            return  # only the time of dropped groups is known, not their FLOPs: FLOP/s would be too low
        n, learner = len(rollouts) // len(prompts), self._run.learner
        samplers = learner.config.rollout.samplers(learner.ranks.count)
        sampled = [i * n + sample for i in learner.ranks.share(len(prompts), samplers) for sample in range(n)]
        prompt_ids = [prompts[i // n].token_ids for i in sampled]
        self._count("rollout", prompt_ids, [rollouts[i].token_ids for i in sampled])

    # --- parts of the learner's phase ----------------------------------------------------------------------------

    def begin(self, batch: Batch) -> None:
        self._enter("snapshot")

    def minibatch(self, minibatch: Part) -> None:
        learner = self._run.learner
        if self._part is not None and self._part[0] == "snapshot":
            batch = minibatch.batch
            done = batch.part([i for i in range(len(batch)) if batch.logp_old.known(batch.part([i]))])
            for round_ in learner.rounds(done):
                if (part := round_.part) is not None:
                    self._count("snapshot", part.prompts, part.responses)
        idle, live = learner.split(minibatch)
        self._rounds = len(learner.rounds(idle)) + len(learner.rounds(live))
        self._live = len(live) > 0
        self._enter("forward")

    def forward(self, part: Part, logps: TokenLogProbs) -> None:
        self._count("forward", part.prompts, part.responses)
        if logps.logp.requires_grad:
            self._count("backward", part.prompts, part.responses, BACKWARD)
        self._enter("backward")

    def progress(self, responses: int) -> None:
        if not responses or not self._rounds:  # constants of a minibatch, or another phase
            return
        self._rounds -= 1
        if self._rounds:
            self._enter("forward")
        elif self._live:
            self._enter("optimizer")
        else:
            self._leave()

    def update(self, grad_norm: float) -> None:
        self._updates += math.isfinite(grad_norm)
        self._leave()

    def learned(self, batch: Batch, metrics: dict[str, float]) -> None:
        self._leave()

    def _enter(self, name: str) -> None:
        self._leave()
        entered = record_function(PREFIX + name)
        entered.__enter__()
        self._part = name, entered

    def _leave(self) -> None:
        if self._part is not None:
            self._wait()
            self._part[1].__exit__(None, None, None)
            self._part = None

    def _count(self, name: str, prompts: Sequence[list[int]], responses: Sequence[list[int]], factor: int = 1) -> None:
        if self._architecture is not None:
            windows = [layer.window for layer in self._run.policy.decoder.layers]
            self._flops[name] += factor * forward_flops(self._architecture, prompts, responses, windows)

    # --- the profiler ----------------------------------------------------------------------------------------------

    def _start(self) -> None:
        on_gpu = self._run.policy.device.type == "cuda"
        self._profile = profile(activities=[ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * on_gpu)
        self._profile.start()

    def _stop(self) -> profile | None:
        stopped, self._profile = self._profile, None
        if stopped is not None:
            stopped.stop()
        return stopped

    def _wait(self) -> None:
        if self._run.policy.device.type == "cuda":
            torch.cuda.synchronize(self._run.policy.device)

    def _write(self) -> None:
        stopped = self._stop()
        assert stopped is not None, "the learner phase runs before publishing"
        with tempfile.TemporaryDirectory() as directory:
            file = Path(directory) / "trace.json"
            stopped.export_chrome_trace(str(file))
            trace = json.loads(file.read_bytes())
        trace["traceEvents"] += self._before(trace["traceEvents"])
        name = f"step_{step_name(self._step)}"
        seconds: defaultdict[str, float] = defaultdict(float)
        for phase, start, end in self._phases:  # dynamic sampling has several phases of one name
            seconds[phase] += end - start
        text = page(trace["traceEvents"], self._step, self._device(), seconds, self._flops, self._bytes())
        files = {
            self._folder / f"{name}.json.gz": gzip.compress(json.dumps(trace).encode(), COMPRESSION),
            self._folder / f"{name}.md": text.encode(),
        }
        write_together(files, "train.run_dir")

    def _before(self, events: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the rollout and reward phases, which ran before the trace began, as events for it."""
        learner = next(event for event in events if is_range(event, "learner"))
        learner_start = next(start for name, start, _ in self._phases if name == "learner")
        same = {key: learner[key] for key in ("ph", "cat", "pid", "tid")}
        return [
            same
            | {
                "name": PREFIX + name,
                "ts": learner["ts"] + 1e6 * (start - learner_start),
                "dur": 1e6 * (end - start),
            }
            for name, start, end in self._phases
            if name in ("rollout", "reward")
        ]

    def _device(self) -> str:
        device = self._run.policy.device
        return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"

    def _bytes(self) -> dict[str, float]:
        """Return the bytes that a part must move at least, for the parts where they are known."""
        known: dict[str, float] = {}
        if self._run.updates.kind == "adamw" and self._run.learner.ranks.count == 1:
            parameters = sum(master.numel() for _, master in self._run.policy.named_parameters())
            known["optimizer"] = ADAMW_BYTES * self._updates * parameters
        if (sent := self._run.engine.metrics.get("publish/sent_mib")) is not None:
            known["publish"] = sent * 2**20
        return known
