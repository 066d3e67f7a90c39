"""The peer of the sharded learner: a Hugging Face model under DeepSpeed's own ZeRO-3 engine."""

import argparse
import math
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from harness import Record
from model_sizes import Shape
from step_bench.hf_part import token_logprobs
from step_bench.sharded_part import Bench, one_rank, random_tokens
from transformers import AutoModelForCausalLM
from transformers.integrations import HfDeepSpeedConfig

from qarl.config.optim import OptimConfig
from qarl.training.zero_setup import local_rank, start_deepspeed

# Hugging Face's recipe of stage 3, of which their Trainer fills in `auto`.
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
        yield from _records(bench)


def _records(bench: Bench) -> Iterator[Record]:
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
