"""Draws docs/images/overview.svg, the picture of the README, from records in benchmarks/results.

python tools/readme_figure.py
"""

from __future__ import annotations

import json
from pathlib import Path

ROOT = Path(__file__).parents[1]
OUT = ROOT / "docs/images/overview.svg"
RESULTS = ROOT / "benchmarks/results"
WIDTH, HEIGHT = 920, 300
INK, MUTED, ACCENT, PALE = "#1f2933", "#6b7785", "#0b7285", "#e3f2f4"
LOOP = (  # boxes of the loop: x, y, first line, second line
    (20, 60, "sampler", "codes + scales, version v"),
    (250, 60, "rewards, advantages", "per group of responses"),
    (250, 170, "learner, forward", "the same codes + kernels"),
    (20, 170, "FP32 master weights", "optimizer, quantize once"),
)
ARROWS = ((210, 85, 250, 85), (345, 110, 345, 170), (250, 195, 210, 195), (115, 170, 115, 110))


def mismatch() -> list[tuple[str, float]]:
    """Mean absolute log-prob difference in nats between sampler and learner, W4A16, by learner."""
    cases = json.loads((RESULTS / "schemes_gpu.json").read_text())["cases"]
    names = (("16-bit learner", "w4a16 full_precision"), ("qarl", "w4a16"))
    return [(label, cases[name]["mismatch_delta_abs_mean"]) for label, name in names]


def step_seconds() -> list[tuple[str, float]]:
    """Seconds of one training step with vLLM as the sampler, beside TRL on the same GPU."""
    for run in json.loads((RESULTS / "step_trl_gpu.json").read_text())["runs"]:
        rows = {row["part"]: row["step_s"] for row in run["records"] if row["what"] == "step"}
        if run["revision"] == "65cb48c":
            return [("TRL, bf16", rows["trl"]), ("qarl, W4A16", rows["step"])]
    raise ValueError("step_trl_gpu.json has no run of 65cb48c")


def text(x: float, y: float, words: str, size: int = 12, color: str = INK, anchor: str = "start") -> str:
    return f'<text x="{x:g}" y="{y:g}" font-size="{size}" fill="{color}" text-anchor="{anchor}">{words}</text>'


def bars(x: float, y: float, title: str, unit: str, values: list[tuple[str, float]]) -> list[str]:
    """Horizontal bars, one row per value."""
    top = max(value for _, value in values)
    drawn = [text(x, y, title, 14)]
    for row, (label, value) in enumerate(values):
        at, width = y + 14 + row * 30, 220 * value / top
        color = ACCENT if label.startswith("qarl") else MUTED
        drawn.append(f'<rect x="{x + 100}" y="{at}" width="{max(width, 2):.1f}" height="20" fill="{color}"/>')
        drawn.append(text(x + 94, at + 14, label, 12, INK, "end"))
        drawn.append(text(x + 108 + max(width, 2), at + 14, f"{value:.3g} {unit}", 12))
    return drawn


def picture() -> str:
    drawn = [text(20, 36, "One step", 14)]
    for x, y, first, second in LOOP:
        drawn.append(f'<rect x="{x}" y="{y}" width="190" height="50" rx="6" fill="{PALE}" stroke="{ACCENT}"/>')
        drawn += [text(x + 95, y + 21, first, 13, INK, "middle"), text(x + 95, y + 39, second, 11, MUTED, "middle")]
    for x1, y1, x2, y2 in ARROWS:
        drawn.append(f'<path d="M{x1} {y1} L{x2} {y2}" stroke="{INK}" marker-end="url(#tip)"/>')
    drawn += [text(230, 75, "text", 11, MUTED, "middle"), text(230, 212, "grads", 11, MUTED, "middle")]
    drawn.append(text(20, 258, "Each publish hands over the quantized tensors themselves;", 12, MUTED))
    drawn.append(text(20, 276, "the sampler verifies them by digest.", 12, MUTED))
    drawn += bars(480, 60, "Log-prob mismatch of sampler and learner, W4A16", "nats", mismatch())
    drawn += bars(480, 180, "One step, Qwen3-1.7B shapes, vLLM samples", "s", step_seconds())
    tip = '<marker id="tip" markerWidth="8" markerHeight="8" refX="7" refY="4" orient="auto">'
    tip += f'<path d="M0 0 L8 4 L0 8 z" fill="{INK}"/></marker>'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif">'
    background = f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>'
    return "\n".join([head, f"<defs>{tip}</defs>", background, *drawn, "</svg>"]) + "\n"


if __name__ == "__main__":
    OUT.write_text(picture())
