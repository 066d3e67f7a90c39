"""Train a little, export the codes for serving, and see that the exported files answer as the run does, bit for bit.

To run it:

    python examples/export_and_generate.py      # on SmolLM2-135M
    python examples/export_and_generate.py --model tiny
"""

from __future__ import annotations

from typing import Any

from example_model import arguments

import qarl


def main() -> None:
    given = arguments(__doc__, steps=2)
    config: dict[str, Any] = {
        "model": {"path": given.model},
        "quant": {"scheme": "w8a8"},
        "rollout": {"n": 4, "max_response_length": 8},
        "data": {"source": "task:arithmetic", "chat_template": False, "max_prompt_length": 64},
        "reward": {"functions": [{"name": "exact"}]},
        "train": {"steps": given.steps, "prompts_per_step": 4, "run_dir": given.out / "run"},
    }
    run = qarl.train(config).run_dir
    served = qarl.export(
        run, given.out / "served"
    )  # verify=True: also in transformers, and in vLLM where it is installed
    print(f"{served.path}: {served.tensor_bytes:,} bytes of tensors, {served.bf16_bytes:,} in bf16")
    print(f"the codes that the run published: {served.same_as_run}, sha256 {served.digest[:16]}")

    prompts = ["2 + 2 =", "The capital of France is"]
    of_run = qarl.generate(run, prompts, max_new_tokens=12)
    of_files = qarl.generate(served.path, prompts, max_new_tokens=12, chat=False)
    for ours, theirs in zip(of_run, of_files, strict=True):
        same = ours.token_ids == theirs.token_ids and ours.logprobs == theirs.logprobs
        print(f"{ours.prompt!r} -> {ours.text!r}; same tokens and log-probs from the files: {same}")


if __name__ == "__main__":
    main()
