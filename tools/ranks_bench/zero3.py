"""The peer of the learner in rows: a Hugging Face model under DeepSpeed's own ZeRO-3 engine."""

from __future__ import annotations

import gc
import math
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from model_sizes import Shape
from step_bench.hf_part import token_logprobs
from step_bench.measure import timed
from step_bench.trl_part import ZERO3
from transformers import AutoModelForCausalLM
from transformers.integrations import HfDeepSpeedConfig

from qarl.config.optim import OptimConfig
from qarl.training.zero_setup import local_rank, start_deepspeed
from ranks_bench.micro_batch import random_tokens
from ranks_bench.parts import WARMUP, Bench, Record

OPTIM = OptimConfig()  # what the learner has


def zero3_records(bench: Bench, tokens: int, head: str, timeout_s: float) -> Iterator[Record]:
    """Micro-batches of `tokens`, forward and backward, and whole updates, as `learn` has them.

    head: "logits" of the whole batch, or "trl", TRL's output layer, which keeps none. An update is norm, clip and
    AdamW; the weights are gathered by the forwards and backwards after it. Bytes are those that one call received, by
    the sizes in DeepSpeed's log of a call that is not timed: it waits for each message.
    """
    with local_rank(bench.device):  # DeepSpeed looks at it in every forward
        yield from _records(bench, tokens, head, timeout_s)
    gc.collect()  # hooks and what they hang on know each other
    if bench.device.type == "cuda":
        torch.cuda.empty_cache()
    dist.barrier(bench.group)


def _records(bench: Bench, tokens: int, head: str, timeout_s: float) -> Iterator[Record]:
    device, count = bench.device, bench.exchange.count
    deepspeed = start_deepspeed(device, timeout_s)
    ids = random_tokens(bench.shape, tokens, bench.exchange.rank).to(device)
    settings = zero3_settings(bench.shape, len(ids), count)
    with zero3_engine(deepspeed, bench.shape, settings, head) as engine:

        def backward(last: bool = False) -> None:
            engine.set_gradient_accumulation_boundary(last)
            engine.backward(token_logprobs(engine, ids, head == "trl").mean())

        def micro_batch() -> None:
            backward()
            engine.step()  # counts it, and nothing else

        def prepare() -> None:
            backward(last=True)
            dist.barrier(bench.group)

        labels = {"part": "zero3", "scheme": "bf16", "head": head, "offload": False, "exchange": "with messages"}
        found = bench.timed(micro_batch)
        rate = {"tokens": tokens, "tokens_per_s": tokens / found["seconds"]}
        received = {"received_bytes_by_kind": received_bytes(deepspeed, micro_batch, count)}
        yield labels | {"what": "micro-batch", "settings": settings} | rate | found | received
        found = timed(engine.step, device, WARMUP, bench.iterations, prepare=prepare)
        prepare()
        received = {"received_bytes_by_kind": received_bytes(deepspeed, engine.step, count)}
        yield labels | {"what": "update"} | found | received


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
    """The engine, for as long as transformers is told of ZeRO-3. A collective.

    Random weights in bf16, made in parts, with masters and moments of torch's fused AdamW in float32; SDPA, layers
    checkpointed.
    """
    said = HfDeepSpeedConfig(settings)  # which transformers asks while it lives
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
        del said


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
