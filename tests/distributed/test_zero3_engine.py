"""The peer of tools/bench_step.py on two ranks: the log-probs, gradients and AdamW of one process."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from model_sizes import SHAPES
from ranks import run_ranks

from qarl.policy.skeleton import skeleton

pytest.importorskip("deepspeed")

SHAPE = replace(SHAPES["tiny"], tied=False)
CPU = torch.device("cpu")
TOKENS = 48
RELEASED = {  # no weight outlives the module that reads it, as in models of billions of parameters
    "stage3_max_live_parameters": 0,
    "stage3_max_reuse_distance": 0,
    "stage3_param_persistence_threshold": 0,
    "stage3_prefetch_bucket_size": 0,
}


def steps(group: Any, changes: list[dict[str, int]]) -> list[dict[str, Any]]:
    return [step(group, some) for some in changes]


def step(group: Any, changes: dict[str, int]) -> dict[str, Any]:
    """A micro-batch and an update of the engine, beside a plain model with the same weights."""
    from deepspeed.utils import safe_get_full_fp32_param
    from step_bench import sharded_part
    from step_bench.learner_part import token_logprobs
    from torch.func import functional_call
    from transformers import AutoModelForCausalLM

    from qarl.training.zero_setup import start_deepspeed

    twin = AutoModelForCausalLM.from_config(SHAPE.config(), dtype=torch.bfloat16)
    deepspeed = start_deepspeed(CPU, 30)
    ids = sharded_part.random_tokens(SHAPE, TOKENS, group.rank)
    settings = sharded_part.zero3_settings(SHAPE, len(ids), group.count)
    settings["zero_optimization"] |= changes
    with sharded_part.zero3_engine(deepspeed, SHAPE, settings, "logits") as engine:
        named = dict(engine.module.named_parameters())
        masters = {
            name: safe_get_full_fp32_param(parameter).clone().requires_grad_() for name, parameter in named.items()
        }
        rounded = {name: master.detach().bfloat16().requires_grad_() for name, master in masters.items()}

        expected = token_logprobs(lambda **given: functional_call(twin, rounded, (), given), ids, False)
        expected.mean().backward()
        optimizer = torch.optim.AdamW(
            list(masters.values()), sharded_part.OPTIM.lr, weight_decay=sharded_part.OPTIM.weight_decay
        )
        for name, master in masters.items():
            gradient = rounded[name].grad
            assert gradient is not None
            master.grad = torch.stack(group.gather_tensors(gradient.float().flatten())).mean(0).view_as(master)
        norm = torch.stack([master.grad.norm() for master in masters.values()]).norm().item()
        before = {name: master.detach().clone() for name, master in masters.items()}
        optimizer.step()

        engine.set_gradient_accumulation_boundary(True)
        logp = token_logprobs(engine, ids, False)
        engine.backward(logp.mean())
        engine.step()
        theirs = torch.cat([(safe_get_full_fp32_param(named[n]) - before[n]).flatten() for n in named])
        ours = torch.cat([(masters[n].detach() - before[n]).flatten() for n in named])

        def micro() -> None:
            engine.set_gradient_accumulation_boundary(False)
            engine.backward(token_logprobs(engine, ids, False).mean())

        micro()  # which notes the order of modules
        received = sharded_part.received_bytes(deepspeed, micro, group.count)
        return {
            "logp": (logp - expected).abs().max().item(),
            "norm": [float(engine.get_global_grad_norm()), norm],
            "moved_by": [theirs.norm().item(), ours.norm().item()],
            "cosine": torch.cosine_similarity(theirs, ours, dim=0).item(),
            "received": received,
        }


def test_the_engine_has_the_log_probs_gradients_and_adamw_of_one_process() -> None:
    sizes = [parameter.numel() for parameter in skeleton(SHAPE.config()).parameters()]
    products = sum(size for size in sizes if size > SHAPE.hidden)  # matrices are cut, norms are not
    for kept, released in run_ranks(2, f"{__file__}:steps", {"changes": [{}, RELEASED]}):
        for found in (kept, released):
            assert found["logp"] < 5e-3
            assert found["norm"][0] == pytest.approx(found["norm"][1], rel=1e-2)
            assert found["cosine"] > 0.99
            assert found["moved_by"][0] == pytest.approx(found["moved_by"][1], rel=1e-2)
            assert found["received"]["gradients"] == sum(sizes)  # of 2 bytes, a half from the other rank
        assert kept["received"]["weights"] == products
        # once in the forward and once in the backward, layers also where they are computed again
        assert 2 * sum(sizes) < released["received"]["weights"] < 3 * sum(sizes)
