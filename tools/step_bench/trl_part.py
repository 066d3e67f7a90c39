"""The peer of the step: TRL's GRPOTrainer with vLLM in its process, on the same model directory and prompts.

Written against TRL 1.16. Its optimizer step accumulates over all responses of a training step, as qarl's does. On
several GPUs it runs as its users run it: a process a GPU, started by torchrun, with DeepSpeed's ZeRO-3 and a vLLM in
each process that draws that process's share of the responses.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from model_sizes import Shape

from qarl.training.metrics import spread
from step_bench.measure import Record
from step_bench.shapes import model_directory

TOOLS = Path(__file__).parents[1]

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


def engine_of(options: argparse.Namespace, device: torch.device) -> str:
    """What draws TRL's responses: "vllm", or "transformers", its own generate."""
    return options.trl_engine or ("vllm" if device.type == "cuda" else "transformers")


def grpo_arguments(options: argparse.Namespace, place: Path, engine: str, on_gpu: bool) -> dict[str, Any]:
    """Of `trl.GRPOConfig`. A training step generates once, for all its prompts, and steps the optimizer once.

    The batch is that of all ranks: each accumulates over its part of it.
    """
    responses, at_once = options.prompts * options.responses, options.device_batch * options.nproc
    assert responses % at_once == 0, "bench_step.parse refuses it"
    several = options.nproc > 1
    arguments: dict[str, Any] = {
        "output_dir": str(place),
        "max_steps": options.steps,
        "per_device_train_batch_size": options.device_batch,
        "gradient_accumulation_steps": responses // at_once,
        "num_generations": options.responses,
        "max_completion_length": options.new_tokens,
        # each response has exactly as many tokens
        "generation_kwargs": {"ignore_eos": True} if engine == "vllm" else {"min_new_tokens": options.new_tokens},
        "temperature": 1.0,
        "beta": 0.0,
        "shuffle_dataset": False,
        "learning_rate": options.lr,
        "lr_scheduler_type": "constant",
        "optim": "adamw_torch_fused",
        "bf16": on_gpu,
        "gradient_checkpointing": options.recompute != "elementwise",
        # ZeRO-3 has the weights in bfloat16 and masters of its own
        "model_init_kwargs": {"attn_implementation": "sdpa", "dtype": "bfloat16" if several and on_gpu else "float32"},
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "seed": options.seed,
    }
    if several:
        arguments["deepspeed"] = ZERO3
    if engine == "vllm":
        arguments |= {
            "use_vllm": True,
            "vllm_mode": "colocate",
            "vllm_tensor_parallel_size": 1,
            "vllm_gpu_memory_utilization": options.memory_frac,
            "vllm_max_model_length": options.prompt_tokens + options.new_tokens,
            "vllm_enable_sleep_mode": options.trl_sleep,
        }
    return arguments


def trl_records(options: argparse.Namespace, shape: Shape, device: torch.device) -> Iterator[Record]:
    """A record for each training step, and one with medians over those after the first."""
    from step_bench.trl_rank import train

    model = model_directory(options.model_dir, options.shape, shape, device, options.seed, options.tokenizer)
    engine = engine_of(options, device)
    place = options.place / options.part
    place.mkdir()
    task = {
        "model": str(model),
        "grpo": grpo_arguments(options, place / "run", engine, device.type == "cuda"),
        "prompts": options.prompts * options.steps,
        "seed": options.seed,
        "new_tokens": options.new_tokens,
        "gpu_memory": options.gpu_memory,
    }
    results = [train(task, device)] if options.nproc == 1 else on_ranks(task, options.nproc, place)
    drawn = sum(result["responses"] for result in results)
    assert drawn == options.prompts * options.responses * options.steps, f"{drawn} responses were drawn"
    yield from records_of(results, engine, options.new_tokens)


def on_ranks(task: Record, count: int, place: Path) -> list[Record]:
    """What `train` returns on each of `count` ranks, started by torchrun, in their order. place: an empty directory."""
    (place / "task.json").write_text(json.dumps(task))
    paths = [str(TOOLS), *filter(None, [os.environ.get("PYTHONPATH")])]
    own = {"ACCELERATE_USE_DEEPSPEED": "true", "PYTHONPATH": os.pathsep.join(paths)}  # as `accelerate launch` says it
    # all are on this machine, and each vLLM on one GPU
    local = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo", "VLLM_HOST_IP": "127.0.0.1"}
    local |= {"OMP_NUM_THREADS": "1", "VLLM_ALLREDUCE_USE_SYMM_MEM": "0"}
    run = ["-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1", "--nproc-per-node", str(count)]
    done = subprocess.run(
        [sys.executable, *run, "-m", "step_bench.trl_rank", str(place)],
        env={**local, **os.environ, **own},
        check=False,
    )
    if done.returncode:
        sys.exit(f"a rank of TRL's failed (torchrun: {done.returncode}); what it printed stands above")
    return [json.loads((place / f"rank-{rank}.json").read_text()) for rank in range(count)]


def records_of(results: Sequence[Record], engine: str, new_tokens: int) -> Iterator[Record]:
    """results: of `train`, by rank. `rollout_s` holds `publish_s`, `generate_s` and the log-probs at the snapshot.

    Of several ranks times are the first one's, each with NAME_min, NAME_mean and NAME_max, and memory is the most.
    """
    steps = []
    for number, each in enumerate(zip(*(result["steps"] for result in results), strict=True), 1):
        for times in each:
            times["learner_s"] = times["step_s"] - times["rollout_s"]
        steps.append(dict(each[0]) if len(each) == 1 else each[0] | spread(each))
        yield {"what": "one_step", "step": number, "engine": engine, **steps[-1]}
    timed = steps[1:] or steps
    medians = {name: statistics.median(times[name] for times in timed) for name in timed[0]}
    common = {
        "steps": len(steps),
        "new_tokens": new_tokens,
        "total_s": max(result["total_s"] for result in results),
        "peak_gib": max(result["peak_gib"] for result in results),
        "zero_stage": results[0]["zero_stage"],
    }
    yield {"what": "step", "engine": engine, "seconds": medians["step_s"], **common, **medians}
