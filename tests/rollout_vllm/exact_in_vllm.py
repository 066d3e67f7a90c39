"""`python exact_in_vllm.py CASES ANSWER`: starts vLLM with `rollout.numerics: exact` once per case.

CASES (JSON file): arguments of `checked` by name. ANSWER (JSON file): its results by name. Uses a GPU if there is one.
"""

import gc
import json
import os
import sys
import tempfile
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from qarl_kernels.logprob import Truncation
from tiny_runs import settings
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from qarl.config import Config
from qarl.memory.sizes import decide_sizes
from qarl.policy.load import load_model, load_tokenizer
from qarl.policy.policy import Policy
from qarl.rollout.engine import SamplingParams
from qarl.rollout.vllm.host import Host
from qarl.rollout.vllm.launch import sampler_settings
from qarl.rollout.vllm.settings import Request
from qarl.training.setup import build_policy
from qarl.weight_sync.checkpoint import write_snapshot_checkpoint

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
TRUNCATIONS = {
    "none": Truncation(),
    "min_p": Truncation(0.7, min_p=0.3),
    "top_p": Truncation(top_p=0.8),
    "all": Truncation(0.8, top_k=20, top_p=0.9, min_p=0.05),
    "greedy": Truncation(0.0),
    "cold": Truncation(0.001, top_p=0.9),
}
EVENTS: Counter[str] = Counter()


def main(cases: str, answer: str) -> None:
    found: dict[str, Any] = {}
    for name in own_kernels():  # the server that this process was forked from may have imported them
        del sys.modules[name]
    count_events()
    gc.unfreeze = lambda: None  # vLLM collects garbage five times when it ends; keep imports frozen
    for name, arguments in json.loads(Path(cases).read_text()).items():
        found[name] = checked(**arguments)
    found["own kernels"] = own_kernels()
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    found["ends"] = [
        ended(decoders.ByteLevel(), ["stop", "â"], ["a", "a"], "stop"),  # the prompt ends within a character
        ended(decoders.ByteLevel(), ["a"], ["a", "Ġâ", "a"], " "),  # a space and the first byte of a character
        ended(decoders.Sequence(parts), ["a"], ["a", "<0x41>", "<0xAC>", "▁", "▁"], "  "),
    ]
    Path(answer).write_text(json.dumps(found))


def ended(decoder: Any, prompt: list[str], response: list[str], stop: str) -> int:
    """Return after how many words of the response vLLM finds the stop string; 0 if it does not find it."""
    from vllm import SamplingParams
    from vllm.v1.engine.detokenizer import IncrementalDetokenizer

    ids = {word: number for number, word in enumerate(dict.fromkeys(prompt + response))}
    backend = Tokenizer(models.BPE(vocab=ids, merges=[]))
    backend.decoder = decoder
    tokens, params = [ids[word] for word in prompt], SamplingParams(stop=[stop])
    request: Any = SimpleNamespace(sampling_params=params, prompt_token_ids=tokens, prompt_embeds=None, request_id="")
    own = IncrementalDetokenizer.from_new_request(PreTrainedTokenizerFast(tokenizer_object=backend), request)
    return next((end for end, word in enumerate(response, 1) if own.update([ids[word]], False)), 0)


def own_kernels() -> list[str]:
    """Return the imported modules of `rollout.numerics: fast`."""
    return [name for name in sys.modules if name.startswith("qarl.rollout.vllm.own_kernels")]


def count_events() -> None:
    """Count vLLM's preemptions, prompts with a cached prefix, and batches that vLLM itself truncates."""
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.sample.ops import topk_topp_sampler

    preempt, look_up = Scheduler._preempt_request, KVCacheManager.get_computed_blocks
    shape = topk_topp_sampler.apply_top_k_top_p

    def preempting(*args: Any, **options: Any) -> Any:
        EVENTS["preempted"] += 1
        return preempt(*args, **options)

    def looking_up(*args: Any) -> Any:
        result = look_up(*args)
        EVENTS["cached"] += result[1] > 0
        return result

    def shaping(logits: torch.Tensor, *k_and_p: torch.Tensor | None) -> torch.Tensor:
        EVENTS["shaped"] += any(one is not None for one in k_and_p)
        return shape(logits, *k_and_p)

    Scheduler._preempt_request, KVCacheManager.get_computed_blocks = preempting, looking_up
    topk_topp_sampler.apply_top_k_top_p = shaping


def checked(
    model: str, sections: dict[str, Any], lengths: list[int], response: int, shaped: list[str]
) -> dict[str, Any]:
    """Return the results of `different` at two versions of the policy, and on a GPU also after each level of sleep."""
    config = decide_sizes(Config.model_validate(settings(Path(model), **sections)), DEVICE.type)
    policy, tokenizer = build_policy(config, load_model(config.model), DEVICE), load_tokenizer(config.model)
    with tempfile.TemporaryDirectory() as place:
        checkpoint = Path(place, "checkpoint")
        write_snapshot_checkpoint(checkpoint, policy.current, policy.sampler.layout, tokenizer)
        host = Host(sampler_settings(config, policy.sampler.layout, checkpoint), policy.current.fingerprints)
    found: dict[str, Any] = {"proved_frac": host.numerics.proved_frac, "measured": measured(host)}
    found["version 0"] = different(host, policy, lengths, response, shaped)
    fewer = lengths, response, shaped[-1:]
    if DEVICE.type == "cuda":
        host.sleep(1)
        host.wake()
        found["version 0, after a sleep"] = different(host, policy, *fewer)
    publish_something(host, policy)
    found["version 1"] = different(host, policy, *fewer)
    if DEVICE.type == "cuda":
        host.sleep(2)
        host.wake()
        publish_something(host, policy)
        found["version 2, after a deep sleep"] = different(host, policy, *fewer)
    host.close()
    return found


def measured(host: Host) -> dict[str, Any]:
    """Sample five rows as vLLM's memory profiling does. Returns the tokens' shape, and whether vLLM truncated."""
    EVENTS.clear()
    runner = host._worker.model_runner
    width, dtype = runner.model_config.get_hidden_size(), runner.model_config.dtype
    tokens = runner._dummy_sampler_run(torch.zeros(5, width, dtype=dtype, device=DEVICE))
    assert ((tokens >= 0) & (tokens < runner.model_config.get_vocab_size())).all()
    return {"tokens": list(tokens.shape), "shaped": EVENTS["shaped"]}


def publish_something(host: Host, policy: Policy) -> None:
    """Change all parameters at random, and publish them as the next version."""
    generator = torch.Generator().manual_seed(policy.version + 1)
    with torch.no_grad():
        for parameter in policy.model.parameters():
            parameter.add_((torch.randn(parameter.shape, generator=generator) * 0.05).to(DEVICE))
    policy.refresh(policy.version + 1)
    policy.sampler.install(policy.current)
    host.publish(policy.version, policy.current.published.items(), policy.current.fingerprints)


@torch.no_grad()
def different(host: Host, policy: Policy, lengths: list[int], response: int, shaped: list[str]) -> dict[str, Any]:
    """Count the tokens whose log-prob differs from the learner's bits, for scoring and for each name in `shaped`.

    Also counts responses that change if the requests are in another order, and vLLM's events. lengths: Tokens of each
    prompt, which gets two responses. response: Maximum tokens of a response. shaped: Keys of TRUNCATIONS.
    """
    EVENTS.clear()
    generator = torch.Generator().manual_seed(policy.version)
    prompts = [torch.randint(3, 259, (n,), generator=generator).tolist() for n in lengths for _ in range(2)]
    prompts[1::2] = prompts[::2]
    whole = prompts[::2]
    scored = torch.tensor([logprob for one in host.score(whole) for logprob in one])
    wrong = {"scored": off(scored, policy.sampler.score(whole))}
    for name in shaped:
        cut = TRUNCATIONS[name]
        sampling = SamplingParams(1, 0, response, cut)
        requests = [Request(prompt, seed) for seed, prompt in enumerate(prompts)]
        responses = host.generate(requests, sampling, lambda done, tokens: None)
        reported = torch.tensor([logprob for response in responses for logprob in response.logprobs])
        wrong[name] = off(reported, policy.logprobs(prompts, [r.token_ids for r in responses], cut, 64)[0])
        again = host.generate(requests[::-1], sampling, lambda done, tokens: None)[::-1]
        wrong[f"{name}, in another order"] = sum(a != b for a, b in zip(responses, again, strict=True))
    return {"wrong": wrong, "sum": scored.sum().item(), "events": dict(EVENTS)}


def off(found: torch.Tensor, expected: torch.Tensor) -> int:
    assert found.shape == expected.shape and found.isfinite().all()
    return int((found != expected.cpu()).sum())


if __name__ == "__main__":
    main(*sys.argv[1:])
    os._exit(0)  # shutting vLLM down would take a second
