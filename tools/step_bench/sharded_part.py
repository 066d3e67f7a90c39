"""A learner whose masters are sharded over ranks, beside a Hugging Face model under DeepSpeed's own ZeRO-3 engine."""

import argparse
import gc
import math
import os
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from harness import Record, timed
from model_sizes import Shape, quant_section
from qarl_kernels.logprob import Truncation
from step_bench.learner_part import learner_sections, token_logprobs
from torch import Tensor
from transformers import AutoModelForCausalLM

from qarl.config.load import make_config
from qarl.config.optim import OptimConfig
from qarl.distributed.exchange import GroupExchange
from qarl.distributed.ranks import SingleProcess
from qarl.distributed.rows import RowPlan
from qarl.policy.skeleton import skeleton
from qarl.training.row_setup import from_rows
from qarl.training.zero_setup import local_rank, start_deepspeed

LENGTH = 1024  # tokens of a sequence


class Bench:
    """One rank of a case: its process group, shape and options."""

    def __init__(self, exchange: GroupExchange, shape: Shape, options: argparse.Namespace) -> None:
        self.exchange, self.shape, self.options, self.device = exchange, shape, options, exchange.device

    def timed(self, call: Callable[[], object], prepare: Callable[[], object] = lambda: None) -> Record:
        """See `harness.timed`. Ranks begin each call together."""

        def together() -> None:
            prepare()
            dist.barrier()

        return timed(call, self.device, self.options.warmup, self.options.iterations, prepare=together)

    def records(
        self,
        micro_batch: Callable[[], object],
        update: Callable[[], object],
        prepare: Callable[[], object],
        moved: Callable[[Callable[[], object]], Record],
    ) -> Iterator[Record]:
        """A record of a micro-batch, and one of an update.

        Args:
            micro_batch: Forward and backward.
            update: What follows the last micro-batch of a step.
            prepare: The last micro-batch of a step.
            moved: From a call, which it makes, to the bytes that come to this rank in it, by kind.
        """
        tokens = self.options.tokens
        found = self.timed(micro_batch)
        rate = {"tokens": tokens, "tokens_per_s": tokens / found["seconds"]}
        yield {"what": "micro-batch"} | rate | found | {"received_bytes_by_kind": moved(micro_batch)}
        found = self.timed(update, prepare)
        prepare()
        dist.barrier()
        yield {"what": "update"} | found | {"received_bytes_by_kind": moved(update)}


@contextmanager
def one_rank(options: argparse.Namespace, shape: Shape, device: torch.device) -> Iterator[Bench]:
    """The process group of a case's ranks. After an exception the process ends at once, with exit code 1: an exit as
    usual would take the group down first, which on a GPU waits for collectives that the other ranks never reach."""
    if device.type == "cuda":
        device = torch.device("cuda", options.rank)
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    try:
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            store=dist.FileStore(str(options.place / "store"), options.nproc),
            rank=options.rank,
            world_size=options.nproc,
            timeout=timedelta(seconds=options.timeout),
            device_id=device if device.type == "cuda" else None,
        )
        yield Bench(GroupExchange(dist.group.WORLD, options.rank, options.nproc, device), shape, options)
        gc.collect()  # parameters and the hooks on their gradients refer to each other
        dist.destroy_process_group()
    except BaseException:
        traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)


def random_tokens(shape: Shape, tokens: int, rank: int) -> Tensor:
    """Token ids (sequences, length + 1), int64: `length` of each are run, and `length` predicted. Each rank's own."""
    length = min(LENGTH, tokens)
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(3, shape.vocabulary, (tokens // length, length + 1), generator=generator)


class Bare(SingleProcess):
    """Ranks that exchange only numbers, over the tensors' own process group."""

    def __init__(self, exchange: GroupExchange) -> None:
        self.rank, self.count, self.exchange = exchange.rank, exchange.count, exchange

    def gather(self, value: Any) -> list[Any]:
        own = torch.tensor(value, dtype=torch.float64, device=self.exchange.device)
        ones = [range(rank, rank + 1) for rank in range(self.count)]
        lengths = self.exchange.gather_rows(torch.tensor([len(own)], device=own.device), ones).tolist()
        ends = [sum(lengths[: rank + 1]) for rank in range(self.count)]
        cut = [range(end - length, end) for end, length in zip(ends, lengths, strict=True)]
        return [part.tolist() for part in self.exchange.gather_rows(own, cut).split(lengths)]


def sharded_records(options: argparse.Namespace, shape: Shape, device: torch.device) -> Iterator[Record]:
    """Micro-batches, forward and backward, and whole updates.

    An update is norm, clip, optimizer, quantization and the gather of all codes. Bytes are what one call received.
    """
    with one_rank(options, shape, device) as bench:
        yield from _records(bench)


def _records(bench: Bench) -> Iterator[Record]:
    shape, device, exchange, options = bench.shape, bench.device, bench.exchange, bench.options

    def random_rows(plan: RowPlan) -> dict[str, Tensor]:
        generator = torch.Generator(device).manual_seed(exchange.rank)
        sizes = {name: (len(plan.cut(name)[exchange.rank]), *size[1:]) for name, size in plan.shapes.items()}
        return {k: torch.randn(size, device=device, generator=generator).mul_(0.02) for k, size in sizes.items()}

    quant = quant_section(options.scheme, shape.group_size)
    sections = learner_sections(quant, device.type, options.tokens, options.recompute)
    config = make_config(sections, "bench_step", options.set)
    policy, updates = from_rows(config, skeleton(shape.config()), random_rows, device, None, exchange, Bare(exchange))
    policy.set_recompute(options.recompute)
    ids = random_tokens(shape, options.tokens, exchange.rank).tolist()
    prompts, responses = [row[:1] for row in ids], [row[1:] for row in ids]

    def backward() -> None:
        logp, _ = policy.logprobs(prompts, responses, Truncation(), 4096)
        updates.backward(logp.mean())

    def update() -> None:
        updates.step(updates.norm())

    def moved(call: Callable[[], object]) -> Record:
        before = exchange.received.copy()
        call()
        return dict(exchange.received - before)

    yield from bench.records(backward, update, backward, moved)
    updates.clear()
    dist.barrier()


# Hugging Face's recommended configuration of ZeRO stage 3. Their Trainer fills in the values `auto`.
ZERO3: Record = {
    "bf16": {"enabled": "auto"},
    "zero_optimization": {
        "stage": 3,
        "overlap_comm": True,
        "contiguous_gradients": True,
        "sub_group_size": 10**9,
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto",
        "stage3_max_live_parameters": 10**9,
        "stage3_max_reuse_distance": 10**9,
        "stage3_gather_16bit_weights_on_model_save": True,
    },
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "steps_per_print": 10**9,
}
OPTIM = OptimConfig()  # the learner's


def zero3_records(options: argparse.Namespace, shape: Shape, device: torch.device) -> Iterator[Record]:
    """Micro-batches, forward and backward, and whole updates, as the part `sharded` has them.

    An update is norm, clip and AdamW; the weights are gathered by the forwards and backwards after it. Bytes are what
    one call received, by the sizes in DeepSpeed's log of a call that is not timed, because the log waits for each
    message.
    """
    with one_rank(options, shape, device) as bench, local_rank(bench.device):  # DeepSpeed reads it in every forward
        yield from _zero3_records(bench)


def _zero3_records(bench: Bench) -> Iterator[Record]:
    device, count, tokens, head = bench.device, bench.exchange.count, bench.options.tokens, bench.options.hf_head
    deepspeed = start_deepspeed(device, bench.options.timeout)
    ids = random_tokens(bench.shape, tokens, bench.exchange.rank).to(device)
    settings = zero3_settings(bench.shape, len(ids), count)
    with zero3_engine(deepspeed, bench.shape, settings, head) as engine:

        def backward(last: bool = False) -> None:
            engine.set_gradient_accumulation_boundary(last)
            engine.backward(token_logprobs(engine, ids, head == "trl").mean())

        def micro_batch() -> None:
            backward()
            engine.step()  # counts it, and nothing else

        def moved(call: Callable[[], object]) -> Record:
            return received_bytes(deepspeed, call, count)

        for record in bench.records(micro_batch, engine.step, lambda: backward(last=True), moved):
            settled = {"settings": settings} if record["what"] == "micro-batch" else {}
            yield {"scheme": "bf16", "head": head} | settled | record


def zero3_settings(shape: Shape, sequences: int, ranks: int) -> Record:
    """Hugging Face's recipe with its `auto` values as their Trainer fills them in. sequences: of a micro-batch."""
    square = shape.hidden**2
    found = {
        "reduce_bucket_size": square,
        "stage3_prefetch_bucket_size": int(0.9 * square),
        "stage3_param_persistence_threshold": 10 * shape.hidden,
    }
    return ZERO3 | {
        "bf16": {"enabled": True},
        "zero_optimization": ZERO3["zero_optimization"] | found,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": OPTIM.max_grad_norm,
        "train_batch_size": sequences * ranks,
        "train_micro_batch_size_per_gpu": sequences,
    }


@contextmanager
def zero3_engine(deepspeed: Any, shape: Shape, settings: Record, head: str) -> Iterator[Any]:
    """The engine, while transformers knows of ZeRO-3. A collective.

    Random weights in bf16, made in parts, with float32 masters and moments of torch's fused AdamW; SDPA; layers are
    checkpointed.
    """
    from transformers.integrations import HfDeepSpeedConfig

    known = HfDeepSpeedConfig(settings)  # transformers asks it while it lives
    model = AutoModelForCausalLM.from_config(shape.config(), dtype=torch.bfloat16, attn_implementation="sdpa")
    model.train().gradient_checkpointing_enable({"use_reentrant": False})
    if head == "trl":
        from trl.trainer.utils import add_fused_lm_head

        add_fused_lm_head(model)
    options: Record = {"lr": OPTIM.lr, "betas": OPTIM.betas, "eps": OPTIM.eps, "weight_decay": OPTIM.weight_decay}
    optimizer = torch.optim.AdamW(model.parameters(), **options, fused=True)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings, dist_init_required=False)
    try:
        yield engine
    finally:
        engine.destroy()
        del known


KINDS = {
    "all_gather_into_tensor": "weights",
    "all_gather": "weights",
    "reduce_scatter_tensor": "gradients",
    "reduce_scatter": "gradients",
}


def received_bytes(deepspeed: Any, call: Callable[[], object], count: int) -> dict[str, int]:
    """What came to one of `count` ranks in a call, as a ring moves it: weights, gradients and "other"."""
    log = deepspeed.comm.comms_logger
    log.reset_data()
    deepspeed.comm.configure(enabled=True, prof_all=True, verbose=False, debug=False)
    try:
        call()
    finally:
        deepspeed.comm.configure(enabled=False)
    part = (count - 1) / count
    # of what is logged: of a gather what this rank gives, of other operations the whole
    share = {"all_gather_into_tensor": count - 1, "all_gather": count - 1, "all_reduce": 2 * part}
    found: Counter[str] = Counter()
    for name, sizes in log.comms_dict.items():
        size = sum(size * times[0] for size, times in sizes.items())
        found[KINDS.get(name, "other")] += math.ceil(size * share.get(name, part))
    log.reset_data()
    return {kind: size for kind, size in found.items() if size}
