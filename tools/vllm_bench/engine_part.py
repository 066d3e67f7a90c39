"""One started engine on a random model: publishing, generating, sleeping."""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable, Iterator, Sequence

import torch
from harness import Record, wait, wall_seconds
from model_sizes import SHAPES
from tiny_models import byte_tokenizer

from qarl.policy.policy import Policy
from qarl.rollout.engine import SamplingParams
from qarl.rollout.vllm.engine import VLLMEngine
from qarl.types import Prompt
from qarl.weight_sync.sender import WeightSender
from vllm_bench.case import Case, engine_config, environment, with_vllm
from vllm_bench.models import as_new_version, policy_of, quant_of, random_masters, stepped

Draw = Callable[[list[list[int]], int, int], Sequence[int]]
CANARY = 64  # tokens of each of two sequences
PARTS = ("receive", "load", "check", "score")  # of a publish, in the sampler


def engine_records(case: Case, shape: str, options: argparse.Namespace) -> Iterator[Record]:
    """Everything about one start, a record at a time. The engine is closed when the iteration ends, however it does."""
    session = Session(case, shape, options)
    try:
        with environment(case):
            started = session.start()
        yield started
        yield session.publish("publish_full", "full", (0,))
        if "delta" in options.modes:  # first, so that afterwards the sender holds what patches are against
            yield session.publish("publish_unchanged", "delta", (0,))
        for mode in options.modes:
            yield session.publish(f"publish_step_{mode}", mode, (1, 0))
        for batch in options.batch:
            yield session.generate(batch)
        if case.device.type == "cuda":
            yield session.sleep(1)
            yield session.sleep(2)
    finally:
        session.close()


class Session:
    """The policy before a simulated optimizer step and, where `options.modes` publish it, after; and the engine that is
    fed with them."""

    def __init__(self, case: Case, shape: str, options: argparse.Namespace) -> None:
        self.options, self.device = options, case.device
        self.model = SHAPES[shape].config()
        self.quant = quant_of(case.scheme, SHAPES[shape].group_size, kv_cache_dtype=options.kv_cache_dtype)
        self.context = options.prompt_tokens + options.new_tokens
        masters = random_masters(options.seed, case.device)
        self.version = 0
        self.policies = [self._policy(masters)]
        if options.modes:
            self.policies.append(self._policy(stepped(masters, options.lr, options.seed, case.device)))
        self.random = torch.Generator().manual_seed(options.seed)
        self.canary = random_tokens(2, min(CANARY, self.context - 1), self.model.vocab_size, self.random)
        # It starts in mode delta, which costs a copy of what vLLM's layout hides; modes can be changed afterwards.
        config = engine_config(case, self.quant, options, "delta" if "delta" in options.modes else "full")
        self.notes: list[str] = []
        sampler, tokenizer, say = self.policies[0].sampler, byte_tokenizer(chat_template=False), self.notes.append
        weights = WeightSender(sampler.layout, tokenizer, sampler, self.canary, say)
        self.engine = VLLMEngine(config, sampler.layout, tokenizer, weights, case.place, say)

    def _policy(self, masters: Callable) -> Policy:
        return policy_of(self.model, self.quant, masters, self.version, self.device, self.context)

    def _record(self, what: str, seconds: list[float] | None = None, **values: object) -> Record:
        labels = {"what": what, "kv_cache_dtype": self.quant.kv_cache_dtype}
        timed = {} if seconds is None else {"seconds": statistics.median(seconds), "all_seconds": seconds}
        return labels | timed | values

    # --- what is measured --------------------------------------------------------------------------------------

    def start(self) -> Record:
        """Export, start of vLLM, first load and canary."""
        snapshot = self.policies[0].current
        seconds = wall_seconds(lambda: self.engine.publish(snapshot), self.device)
        return self._record(
            "start",
            [seconds],
            phases=self.engine.phases,
            prepare_s=self.engine.metrics["time/sampler_prepare_s"],
            tensors=len(snapshot.tensors),
            notes=self.notes,
            gib=sum(t.nbytes for t in snapshot.tensors.values()) / 2**30,
            proved_frac=self.engine.metrics["publish/proved_frac"],
            **self._canary(),
        )

    def publish(self, what: str, mode: str, order: tuple[int, ...]) -> Record:
        """A publish of each of `options.reps` new versions, of the policies in `order` in turn, after one warm-up."""
        self.engine.config = with_vllm(self.engine.config, publish=mode)
        seconds, parts = [], []
        for turn in range(self.options.reps + 1):
            seconds.append(self._publish(order[turn % len(order)]))
            parts.append({part: self.engine.metrics[f"time/publish_{part}_s"] for part in PARTS})
        medians = {f"{part}_s": statistics.median(p[part] for p in parts[1:]) for part in PARTS}
        return self._record(
            what,
            seconds[1:],
            mode=mode,
            sent_frac=self.engine.metrics["publish/sent_frac"],
            sent_mib=self.engine.metrics["publish/sent_mib"],
            **medians,
            **self._canary(),
        )

    def generate(self, batch: int) -> Record:
        """See `generate_record`."""
        return self._record("generate") | generate_record(
            self._draw, batch, self.model.vocab_size, self.random, self.options
        )

    def _draw(self, prompts: list[list[int]], new_tokens: int, seed: int) -> list[int]:
        """Lengths of a response to each prompt."""
        sampling = SamplingParams(n=1, seed=seed, max_response_length=new_tokens)
        rollouts = self.engine.generate([Prompt(i, ids, "") for i, ids in enumerate(prompts)], sampling, self.version)
        return [len(rollout.token_ids) for rollout in rollouts]

    def sleep(self, level: int) -> Record:
        """Seconds to sleep and to be up to date again, and GiB of the GPU that are free meanwhile.

        Both levels wake (`wake_s`) and get a whole version.
        """
        self.engine.config = with_vllm(self.engine.config, sleep_level=level, publish="full")
        asleep, awake, wakes, freed = [], [], [], []
        for _ in range(self.options.generations + 1):
            wait(self.device)
            before = torch.cuda.mem_get_info(self.device)[0]
            asleep.append(wall_seconds(self.engine.sleep, self.device))
            freed.append((torch.cuda.mem_get_info(self.device)[0] - before) / 2**30)
            awake.append(self._publish(0))
            wakes.append(self.engine.metrics["time/sampler_wake_s"])
        return self._record(
            f"sleep_{level}",
            asleep[1:],
            freed_gib=statistics.median(freed[1:]),
            wake_s=statistics.median(wakes[1:]),
            wake_and_publish_s=statistics.median(awake[1:]),
            sent_frac=self.engine.metrics["publish/sent_frac"],
            first_seconds=asleep[0],
            **self._canary(),
        )

    def close(self) -> None:
        self.engine.close()
        self.policies.clear()
        del self.engine
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def _publish(self, index: int) -> float:
        """Seconds of publishing a policy's tensors as a new version."""
        self.version += 1
        policy = self.policies[index]
        snapshot = as_new_version(policy, self.version)
        self.engine.weights.scorer = policy.sampler
        return wall_seconds(lambda: self.engine.publish(snapshot), self.device)

    def _canary(self) -> Record:
        return {f"canary_{kind}": self.engine.metrics[f"publish/canary_abs_{kind}"] for kind in ("mean", "max")}


def random_tokens(rows: int, length: int, vocabulary: int, random: torch.Generator) -> list[list[int]]:
    """Token ids; the first three of a vocabulary are special."""
    return torch.randint(3, vocabulary, (rows, length), generator=random).tolist()


def generate_record(
    draw: Draw, batch: int, vocabulary: int, random: torch.Generator, options: argparse.Namespace
) -> Record:
    """Tokens per second, seconds to all first tokens, and of each later one.

    draw: of prompts, new tokens of each response and a seed, gives the lengths of the responses. Prompts are new each
    time, so that none is in the prefix cache.
    """
    new = options.new_tokens

    def seconds_of(new_tokens: int, turn: int) -> float:
        prompts = random_tokens(batch, options.prompt_tokens, vocabulary, random)
        begin = time.perf_counter()
        lengths = draw(prompts, new_tokens, options.seed + turn)
        seconds = time.perf_counter() - begin
        assert list(lengths) == batch * [new_tokens], "nothing ends a response early"
        return seconds

    turns = range(options.generations + 1)
    first = [seconds_of(1, turn) for turn in turns]
    seconds = [seconds_of(new, turn) for turn in turns]
    until_first, middle = (statistics.median(times[1:]) for times in (first, seconds))
    return {
        "seconds": middle,
        "all_seconds": seconds[1:],
        "batch": batch,
        "prompt_tokens": options.prompt_tokens,
        "new_tokens": new,
        "tokens_per_s": batch * new / middle,
        "first_token_s": until_first,
        "later_token_s": (middle - until_first) / max(new - 1, 1),
    }
