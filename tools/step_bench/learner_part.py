"""The learner alone, beside a Hugging Face model of its shape, and the optimizer step."""

import argparse
from collections.abc import Callable, Iterator
from typing import Any

import torch
from harness import Record, timed
from model_sizes import Shape, quant_section, random_model
from qarl_kernels.logprob import Truncation
from torch import Tensor

from qarl.batch.batch import build_batch
from qarl.config import Config
from qarl.config.architecture import Architecture
from qarl.config.load import make_config
from qarl.distributed.ranks import SingleProcess
from qarl.memory.estimate import estimate, forward_peak, phase_bytes
from qarl.memory.sizes import decide_sizes
from qarl.policy.experts import take_apart
from qarl.policy.gradients import GradientAccumulator
from qarl.policy.policy import Policy
from qarl.training.flops import BACKWARD, forward_flops
from qarl.training.learner import Learner
from qarl.training.optim import clip_grads, grad_norm
from qarl.training.setup import build_policy, set_determinism
from qarl.training.updates import LocalUpdates
from qarl.types import Prompt, Rollout
from qarl.utils.machine import gpu_bytes


def learner_sections(quant: dict[str, Any], device: str, tokens: int, recompute: str) -> dict[str, Any]:
    """The configuration of a learner alone, on random weights: one optimizer step, in micro-batches of `tokens`."""
    return {
        "model": {"path": "random/model", "device": device},
        "quant": quant,
        "data": {"source": "task:arithmetic"},
        "reward": {"functions": [{"name": "exact"}]},
        "objective": {"name": "grpo"},
        "train": {"steps": 1, "micro_batch_tokens": tokens, "recompute": recompute},
    }


def learner_config(options: argparse.Namespace, shape: Shape, device: torch.device, length: int) -> Config:
    """The configuration of a learner alone, with responses of `length` tokens and the sizes that fit the device."""
    quant = quant_section(options.scheme, shape.group_size)
    data = learner_sections(quant, device.type, options.tokens, options.recompute)
    data["rollout"] = {"max_response_length": length}
    return decide_sizes(make_config(data, "bench_step", options.set), device.type, shape.architecture(), gpu_bytes())


def random_tokens(rows: int, length: int, vocabulary: int, seed: int) -> list[list[int]]:
    """Token ids; rows begin differently, so that no prompt is shared."""
    ids = torch.randint(3, vocabulary, (rows, length), generator=torch.Generator().manual_seed(seed))
    ids[:, 0] = 3 + torch.arange(rows) % (vocabulary - 3)
    return ids.tolist()


def learner_records(options: argparse.Namespace, shape: Shape, device: torch.device) -> Iterator[Record]:
    """A micro-batch of each length: `tokens` // length sequences, of which all tokens but the first are predicted.

    Each has a prompt of one token and a response of `length`, whose last token is not run: `length` run, `length`
    predicted. Gradients add to sums that exist, as in all micro-batches but a step's first. On a GPU the peak has
    beside it what `qarl.memory.estimate` expects.
    """
    config = learner_config(options, shape, device, max(options.length))
    chunk = config.train.logprob_chunk
    policy = make_policy(options, shape, device, config, max(options.length) + 1)
    gradients = GradientAccumulator([parameter for _, parameter in policy.named_parameters()])

    def calls(sequences: list[list[int]], weights: Tensor) -> tuple[Callable[[], object], Callable[[], object]]:
        prompts, responses = [ids[:1] for ids in sequences], [ids[1:] for ids in sequences]

        def forward() -> Tensor:
            return policy.logprobs(prompts, responses, Truncation(), chunk)[0]

        return torch.no_grad()(forward), lambda: gradients.backward((forward() * weights).sum())

    architecture, before = shape.architecture(), False
    for record in throughput(options, shape, device, calls):
        if device.type == "cuda":
            record["estimated_gib"] = estimated_gib(config, architecture, record["what"], record["tokens"], before)
        before = before or record["what"] == "forward_backward"
        yield {"logprob_chunk": chunk} | record


def estimated_gib(config: Config, architecture: Architecture, what: str, tokens: int, gradients: bool) -> float | None:
    """What `qarl.memory.estimate` expects of a learner alone on a GPU; None of a forward that it does not count.

    gradients: whether those of an earlier backward are there.
    """
    if what == "forward":
        peak = forward_peak(config, architecture, "cuda", tokens, gradients)
        return None if peak is None else peak / 2**30
    own = [item for item in estimate(config, architecture, "cuda", tokens) if item.owner == "learner"]
    return phase_bytes(own, "update") / 2**30


Calls = Callable[[list[list[int]], Tensor], tuple[Callable[[], object], Callable[[], object]]]


def throughput(options: argparse.Namespace, shape: Shape, device: torch.device, calls: Calls) -> Iterator[Record]:
    """Tokens/s of a forward without gradient and of a forward and backward, at each length.

    calls: from token ids, a sequence of length + 1 a row, and the weights (T,) of the log-probs in the loss, to both.
    """
    architecture = shape.architecture()
    for length in options.length:
        rows = max(1, options.tokens // length)
        tokens = rows * length
        sequences = random_tokens(rows, length + 1, shape.vocabulary, 0)
        weights = torch.randn(tokens, generator=torch.Generator().manual_seed(0)).to(device) / tokens
        flops = forward_flops(architecture, [ids[:1] for ids in sequences], [ids[1:] for ids in sequences])
        forward, step = calls(sequences, weights)
        for what, call, factor in (("forward", forward, 1), ("forward_backward", step, 1 + BACKWARD)):
            labels: Record = {"length": length, "tokens": tokens, "what": what}
            try:
                measured = timed(call, device, options.warmup, options.iterations)
            except torch.OutOfMemoryError as error:
                yield labels | {"error": str(error).splitlines()[0]}
                continue
            seconds = measured["seconds"]
            yield labels | measured | {"tokens_per_s": tokens / seconds, "tflops": factor * flops / seconds / 1e12}


def hf_records(options: argparse.Namespace, shape: Shape, device: torch.device) -> Iterator[Record]:
    """The learner's tokens as a batch without padding, float32 masters, SDPA, log-probs of all tokens, and a backward.

    Checkpoints its layers unless `recompute` is elementwise. With `hf_head` trl the output layer is TRL's, which
    multiplies it in chunks and keeps no logits, as its GRPOTrainer does from 1.16 on. With `hf_dtype` bfloat16 weights
    and gradients are of that, which experts need: autocast leaves transformers' grouped product in float32.
    """
    model = random_model(shape, device, 0, attn_implementation="sdpa").train()
    model.to(getattr(torch, options.hf_dtype))
    if options.recompute != "elementwise":
        model.gradient_checkpointing_enable({"use_reentrant": False})

    in_chunks = options.hf_head == "trl"
    if in_chunks:
        from trl.trainer.utils import add_fused_lm_head

        add_fused_lm_head(model)

    def calls(sequences: list[list[int]], weights: Tensor) -> tuple[Callable[[], object], Callable[[], object]]:
        ids = torch.tensor(sequences, device=device)

        def forward() -> Tensor:
            with torch.autocast(device.type, torch.bfloat16):
                return token_logprobs(model, ids, in_chunks).flatten()

        return torch.no_grad()(forward), lambda: (forward() * weights).sum().backward()

    for record in throughput(options, shape, device, calls):
        yield {"head": options.hf_head, "dtype": options.hf_dtype} | record


def token_logprobs(model: Callable[..., Any], ids: Tensor, in_chunks: bool) -> Tensor:
    """Log-probs (S, T), float32, of the tokens ids[:, 1:] of (S, T + 1). in_chunks: by the output layer of TRL, that
    `add_fused_lm_head` gave the model."""
    if in_chunks:
        return model(input_ids=ids[:, :-1], shift_labels=ids[:, 1:], fused_lm_head=True).log_probs
    logits = model(input_ids=ids[:, :-1], use_cache=False).logits
    return selected_logprobs(logits.float(), ids[:, 1:])  # accelerate's mixed precision gives float32 as well


def selected_logprobs(logits: Tensor, targets: Tensor) -> Tensor:
    """As TRL's selective_log_softmax has it for float32: log-sum-exp row by row, against the memory of a softmax."""
    selected = logits.gather(-1, targets[..., None])[..., 0]
    return selected - torch.stack([torch.logsumexp(row, dim=-1) for row in logits])


def make_policy(
    options: argparse.Namespace, shape: Shape, device: torch.device, config: Config, max_length: int
) -> Policy:
    set_determinism(config)
    model = random_model(shape, device, 0)
    take_apart(model)
    policy = build_policy(config, model, device, max_length)
    policy.set_recompute(config.train.recompute)
    return policy


def optimizer_records(options: argparse.Namespace, shape: Shape, device: torch.device) -> Iterator[Record]:
    """`Learner.update` as a whole, after a backward over a few tokens, and then each of its parts."""
    length = 16
    config = learner_config(options, shape, device, length)
    policy = make_policy(options, shape, device, config, length + 1)
    masters = [parameter for _, parameter in policy.named_parameters()]
    updates = LocalUpdates(policy, config)
    learner = Learner(policy, updates, config, Truncation(), SingleProcess())
    (ids,) = random_tokens(1, length + 1, shape.vocabulary, 0)
    response = Rollout(0, 0, ids[1:], [0.0] * length, "length", policy.version, 0, "")
    learner.begin(0, build_batch([Prompt(0, ids[:1], "")], [response], [0.0], "grpo", policy.version, device))

    def backward() -> None:
        logp, _ = policy.logprobs([ids[:1]], [ids[1:]], Truncation(), config.train.logprob_chunk)
        learner.updates.backward(logp.mean())

    def gradients() -> None:
        updates.clear()  # or those of the call before would be held beside the new ones
        backward()
        updates.gradients.deliver()

    def clip() -> None:
        clip_grads(masters, grad_norm(masters), config.optim.max_grad_norm)

    def refresh() -> None:
        updates.publish(policy.version + 1)

    labels = {"optimizer": config.optim.name, "parameters": sum(master.numel() for master in masters)}
    parts = {
        "update": (learner.update, backward),
        "clip": (clip, gradients),
        "optimizer": (updates.optimizer.step, gradients),
        "refresh": (refresh, None),
    }
    for what, (call, prepare) in parts.items():
        yield labels | {"what": what} | timed(call, device, options.warmup, options.iterations, prepare)
