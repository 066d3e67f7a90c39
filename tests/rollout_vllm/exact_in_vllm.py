"""`python exact_in_vllm.py CASES ANSWER`: vLLM with `rollout.numerics: exact`, one start after the other.

CASES (JSON): name -> [model's directory, sections of a configuration]. ANSWER (JSON): name -> what `checked` found.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from qarl_kernels.logprob import Truncation
from tiny_runs import parts

from qarl.policy.load import load_tokenizer
from qarl.policy.policy import Policy
from qarl.rollout.engine import SamplingParams
from qarl.rollout.vllm.host import Host
from qarl.rollout.vllm.launch import drawing_of, sampler_settings
from qarl.rollout.vllm.settings import Request
from qarl.weight_sync.checkpoint import write_snapshot_checkpoint

TRUNCATIONS = {
    "none": Truncation(),
    "temperature": Truncation(0.7),
    "min_p": Truncation(0.7, min_p=0.3),
    "top_k": Truncation(1.3, top_k=20),
    "top_p": Truncation(top_p=0.8),
    "all": Truncation(0.8, top_k=20, top_p=0.9, min_p=0.05),
    "greedy": Truncation(0.0),
}
LENGTHS = (2, 63, 65, 130)  # of prompts: within a page of the KV cache, at its end and beyond
RESPONSE = 40


def main(cases: str, answer: str) -> None:
    found = {}
    count_events()
    for name, (model, sections) in json.loads(Path(cases).read_text()).items():
        shaped = TRUNCATIONS if name == "bf16" else {"all": TRUNCATIONS["all"]}
        found[name] = checked(Path(model), sections, shaped)
    Path(answer).write_text(json.dumps(found))


EVENTS: Counter[str] = Counter()


def count_events() -> None:
    """Count vLLM's preemptions, and the prompts of which it had a part in its cache."""
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.sched.scheduler import Scheduler

    preempt, look_up = Scheduler._preempt_request, KVCacheManager.get_computed_blocks

    def preempting(*args: Any, **options: Any) -> Any:
        EVENTS["preempted"] += 1
        return preempt(*args, **options)

    def looking_up(*args: Any) -> Any:
        result = look_up(*args)
        EVENTS["cached"] += result[1] > 0
        return result

    Scheduler._preempt_request, KVCacheManager.get_computed_blocks = preempting, looking_up


def checked(model: Path, sections: dict[str, Any], shaped: dict[str, Truncation]) -> dict[str, Any]:
    """For the policy and for a later version of it: how many log-probs are not the learner's, and what vLLM did."""
    run = parts(model, **sections)
    policy, tokenizer = run.policy, load_tokenizer(run.config.model)
    with tempfile.TemporaryDirectory() as place:
        checkpoint = Path(place, "checkpoint")
        write_snapshot_checkpoint(checkpoint, policy.current, policy.sampler.layout, tokenizer)
        settings = sampler_settings(run.config, policy.sampler.layout, checkpoint)
        host = Host(settings, policy.current.fingerprints())
    found: dict[str, Any] = {"proved_frac": host.held.proved_frac}
    for version in (0, 1):
        if version:
            learn_something(policy)
            host.publish(version, policy.current.tensors.items(), policy.current.fingerprints())
            shaped = {"all": TRUNCATIONS["all"]}
        EVENTS.clear()
        found[f"version {version}"] = different(host, policy, shaped) | {"events": dict(EVENTS)}
    host.close()
    return found


def learn_something(policy: Policy) -> None:
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in policy.model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.05)
    policy.refresh(policy.version + 1)
    policy.sampler.install(policy.current)


@torch.no_grad()
def different(host: Host, policy: Policy, shaped: dict[str, Truncation]) -> dict[str, Any]:
    """Tokens whose log-prob is not, bit for bit, what the learner gives them; of each kind."""
    generator = torch.Generator().manual_seed(policy.version)
    whole = [torch.randint(3, 259, (n,), generator=generator).tolist() for n in (2, 64, 65, 200)]
    scored = torch.tensor([logprob for one in host.score(whole) for logprob in one])
    wrong = {"scored": off(scored, policy.sampler.score(whole))}
    prompts = [torch.randint(3, 259, (n,), generator=generator).tolist() for n in LENGTHS]
    prompts = [prompt for prompt in prompts for _ in range(2)]  # two responses each
    for name, cut in shaped.items():
        drawing = drawing_of(SamplingParams(1, 0, RESPONSE, cut))
        requests = [Request(prompt, seed) for seed, prompt in enumerate(prompts)]
        responses = host.generate(requests, drawing, lambda done, tokens: None)
        reported = torch.tensor([logprob for response in responses for logprob in response.logprobs])
        wrong[name] = off(reported, policy.logprobs(prompts, [r.token_ids for r in responses], cut, 64)[0])
        again = host.generate(requests[::-1], drawing, lambda done, tokens: None)[::-1]
        wrong[f"{name}, in another order"] = sum(a != b for a, b in zip(responses, again, strict=True))
    return {"wrong": wrong, "sum": scored.sum().item()}


def off(found: torch.Tensor, expected: torch.Tensor) -> int:
    assert found.shape == expected.shape and found.isfinite().all()
    return int((found != expected).sum())


if __name__ == "__main__":
    main(*sys.argv[1:])
    os._exit(0)  # taking all of vLLM down takes a second
