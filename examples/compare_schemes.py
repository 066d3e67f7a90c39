"""Which scheme for this model? Compare them without any training: divergence from bf16, perplexity, size and speed.

To run it:

    python examples/compare_schemes.py      # on SmolLM2-135M
    python examples/compare_schemes.py --model tiny
"""

from __future__ import annotations

from example_model import arguments

import qarl


def main() -> None:
    given = arguments(__doc__, tokens=1024)
    done = qarl.compare_offline(
        given.model, ["bf16", "w4a16", "w8a8", "fp8"], group_size=64, max_tokens=given.tokens, out=given.out / "schemes"
    )
    print(f"\nevery number: {done.path / 'comparison.json'}; the page: {done.path / 'comparison.html'}")
    quantized = {name: member for name, member in done.members.items() if name != "bf16"}
    closest = min(quantized, key=lambda name: quantized[name]["kl"]["mean"])
    smallest = min(quantized, key=lambda name: quantized[name]["checkpoint_bytes"])
    print(f"closest to bf16: {closest}, KL {quantized[closest]['kl']['mean']:.3f} nats")
    print(f"smallest checkpoint: {smallest}, {quantized[smallest]['checkpoint_ratio']:.2f} of bf16's bytes")


if __name__ == "__main__":
    main()
