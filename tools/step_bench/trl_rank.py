"""One process of TRL's trainer: alone, or a rank that torchrun started (`-m step_bench.trl_rank PLACE`).

PLACE has `task.json`, what `train` takes with `gpu_memory`, GiB that a rank may have or null, and gets the rank's
result. The GPU is that of LOCAL_RANK.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from process_tree import leaving_at_once

from qarl.training.metrics import peak_memory_gib
from step_bench.measure import Record, cap_memory
from step_bench.shapes import REWARD, questions


class Spent:
    """Seconds in functions of the trainer, since they were last read."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._seconds: dict[str, float] = {}

    def within(self, owner: object, method: str, name: str) -> None:
        """Count what `owner.method` takes, with the device waited for at both ends."""
        real: Callable[..., Any] = getattr(owner, method)

        def counted(*arguments: Any, **named: Any) -> Any:
            begin = self.now()
            result = real(*arguments, **named)
            self._seconds[name] = self._seconds.get(name, 0.0) + self.now() - begin
            return result

        setattr(owner, method, counted)

    def now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()

    def read(self) -> dict[str, float]:
        seconds, self._seconds = self._seconds, {}
        return seconds


def train(task: Record, device: torch.device) -> Record:
    """steps: seconds of each; total_s: with the start; peak_gib; responses: that this process drew; zero_stage: of
    DeepSpeed, or None.

    task: `model`, a directory; `grpo`, arguments of `trl.GRPOConfig`; `prompts`, how many, and their `seed`;
    `new_tokens` that each response must have.
    """
    from datasets import Dataset
    from transformers import AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    spent, lengths = Spent(device), []
    steps: list[dict[str, float]] = []
    reward: dict[str, Any] = {}
    exec(REWARD, reward)  # the reward that qarl's run reads from a file

    def spread(completions: list[str], completion_ids: list[list[int]], **columns: Any) -> list[float]:
        lengths.extend(map(len, completion_ids))
        return reward["spread"](completions, **columns)

    class Clock(TrainerCallback):
        """The first micro-batch of a step generates for all of them, so a step begins before it."""

        def on_step_begin(self, *arguments: Any, **named: Any) -> None:
            self._begin = spent.now()

        def on_step_end(self, *arguments: Any, **named: Any) -> None:
            steps.append({"step_s": spent.now() - self._begin} | spent.read())

    begin = time.perf_counter()
    arguments = GRPOConfig(**task["grpo"])  # with deepspeed it tells transformers to load a part of the model
    trainer = GRPOTrainer(
        model=task["model"],
        reward_funcs=spread,
        args=arguments,
        train_dataset=Dataset.from_dict({"prompt": questions(task["prompts"], task["seed"])}),
        processing_class=AutoTokenizer.from_pretrained(task["model"], padding_side="left"),
        callbacks=[Clock()],
    )
    spent.within(trainer, "_generate_and_score_completions", "rollout_s")  # with the log-probs at the snapshot
    if arguments.use_vllm:
        spent.within(trainer.vllm_generation, "generate", "generate_s")
        spent.within(trainer.vllm_generation, "sync_weights", "publish_s")
    else:
        spent.within(trainer, "_generate_single_turn", "generate_s")
    trainer.train()
    total = time.perf_counter() - begin
    assert lengths and set(lengths) == {task["new_tokens"]}, "nothing ends a response early"
    plugin = trainer.accelerator.state.deepspeed_plugin
    return {
        "steps": steps,
        "total_s": total,
        "peak_gib": peak_memory_gib(device),
        "responses": len(lengths),
        "zero_stage": plugin.zero_stage if plugin else None,
    }


def main() -> None:
    place, rank, local = Path(sys.argv[1]), int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
    task = json.loads((place / "task.json").read_text())
    if torch.cuda.is_available():
        device = torch.device("cuda", local)
        torch.cuda.set_device(device)
        if task["gpu_memory"]:
            cap_memory(task["gpu_memory"], device)
    else:
        device = torch.device("cpu")
        task["grpo"]["accelerator_config"] = {"use_configured_state": True}
        deepspeed_on_cpu()
    with leaving_at_once():
        result = train(task, device)
    (place / f"rank-{rank}.json").write_text(json.dumps(result))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # nothing is left to do, and what vLLM and the process groups do at their end may wait for other ranks


def deepspeed_on_cpu() -> None:
    """Ranks of gloo, which accelerate does not join to DeepSpeed by itself."""
    os.environ |= {"DS_ACCELERATOR": "cpu", "GLOO_SOCKET_IFNAME": "lo"}
    import deepspeed
    import deepspeed.comm
    from accelerate import PartialState
    from accelerate.utils import DistributedType

    # it would compile a way through shared memory, for which not every machine has the tools
    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # type: ignore[attr-defined]
    PartialState(cpu=True).distributed_type = DistributedType.DEEPSPEED
    deepspeed.init_distributed("gloo", verbose=False, dist_init_required=False)


if __name__ == "__main__":
    main()
