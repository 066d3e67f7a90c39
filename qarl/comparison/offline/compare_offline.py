"""`qarl compare --offline`: compares schemes on one model without RL. Finished results are reused."""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from qarl.comparison.offline.members import Bench, measure
from qarl.comparison.offline.offline_page import write_page_and_plots
from qarl.comparison.offline.record import Record, open_out
from qarl.comparison.offline.speed import SpeedTest
from qarl.comparison.offline.summary import member_line, print_results
from qarl.comparison.offline.targets import reference_target, scheme_targets, trained_targets, weights_mark
from qarl.comparison.offline.windows import cut, read_text
from qarl.inference.calibrated import sequences_of
from qarl.inference.masters import open_masters
from qarl.inference.opening import context_of
from qarl.inference.target import Target
from qarl.policy.device import pick_device
from qarl.policy.load import load_tokenizer
from qarl.storage.environment import command_line, describe_environment

SEED = 0  # seed of the tokens that the speed test samples


def compare_offline(
    model: str,
    schemes: list[str],
    *,
    out: Path,
    text: Path | None = None,
    group_size: int | None = None,
    kv_cache_dtype: str | None = None,
    max_tokens: int = 4096,
    window: int = 256,
    speed: SpeedTest | None = None,
    device: str = "auto",
    verify_digests: bool = True,
    methods: Sequence[str] = ("rtn",),
    calibration: Path | None = None,
    calibration_samples: int | None = None,
    trained: Sequence[str] = (),
    say: Callable[[str], None] = print,
) -> int:
    """Compare a model's schemes on weight error, divergence from bf16, perplexity, checkpoint size and speed.

    Writes comparison.json, comparison.html and plots/*.png, and prints a table on stdout.

    Args:
        model, text, group_size, kv_cache_dtype, max_tokens, device, calibration, calibration_samples, trained: See
            `qarl.compare_offline`. The baseline of a quantized checkpoint is its dequantized weights.
        schemes, methods: Names, each once. The bf16 baseline gets a row only if it is among the schemes.
        out: Directory of the results; created, or resumed if the arguments are the same.
        window: Window length in tokens; at most the context.
        speed: Sizes of the speed test; default `SpeedTest()`.
        verify_digests: See `resolve_target`.
        say: Called with one line of progress.

    Returns:
        0, or 1 if a scheme could not be measured; its row gives the reason.

    Raises:
        UserError: A model or the text cannot be read, the text is shorter than one window, or `out` holds something
            else.
    """
    chosen = methods, calibration, calibration_samples
    targets = scheme_targets(model, schemes, group_size, kv_cache_dtype, verify_digests, *chosen)
    policies = trained_targets(trained, targets, verify_digests)
    targets |= policies
    base = reference_target(model, verify_digests)
    cache = next(iter(targets.values())).quant.kv_cache_dtype
    source = read_text(text)
    where = pick_device(device)
    context = context_of(base)
    window = min(window, context - 1)  # `cut` may add a start token
    speed = (speed or SpeedTest()).within(context)
    tokenizer = load_tokenizer(base.model)
    windows = cut(source, tokenizer, window, max_tokens)
    settings: dict[str, Any] = {
        "model": base.name,
        "step": base.step,
        "weights": weights_mark(base),
        "group_size": group_size,
        **({} if cache == "auto" else {"kv_cache_dtype": cache}),
        "text": source.name,
        "text_sha256": source.sha256,
        "max_tokens": max_tokens,
        "window": window,
        "windows": len(windows.ids),
        "predicted_tokens": len(windows.ids) * windows.predictions,
        "batch": speed.batch,
        "prompt_tokens": speed.prompt_tokens,
        "new_tokens": speed.new_tokens,
        "repeats": speed.repeats,
        "seed": SEED,
        **_calibration(targets, tokenizer),
        **({"trained": {name: weights_mark(target) for name, target in policies.items()}} if policies else {}),
        "device": _device_name(where),
        "threads": torch.get_num_threads(),
    }
    open_out(out, settings)
    title = f"Schemes of {base.name}" + (", FP8 KV cache" if cache == "fp8" else "")
    record = Record(out, settings, title, command_line(), describe_environment(SEED))
    members = {name: record.member(name) for name in targets}
    result = record.save(list(members.values()))
    missing = [name for name, member in members.items() if member["state"] == "pending"]
    for name, member in members.items():
        if member["state"] == "finished":
            say(f"{name}: measured before")
    if missing:
        say(f"opening {model}")
        bench = Bench(
            targets, base, open_masters(base), windows, speed, where, SEED, out / "reference.safetensors", say, policies
        )
        for member in measure(bench, missing):
            if member["state"] == "finished":
                record.keep(member)
                say(member_line(member))
            members[member["name"]] = member
            result = record.save(list(members.values()))
    write_page_and_plots(out, result)
    print_results(result["members"])
    say(f"page: {out / 'comparison.html'}")
    return 1 if any(member["state"] == "failed" for member in members.values()) else 0


def _calibration(targets: Mapping[str, Target], tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """Return the settings that determine the codes of gptq and awq. Raises UserError if the text cannot be read."""
    target = next((target for target in targets.values() if target.quant.init != "rtn"), None)
    if target is None:
        return {}
    sequences = sequences_of(target, tokenizer)
    return {
        "calibration": target.quant.calibration.source,
        "calibration_sequences": len(sequences),
        "calibration_tokens": sum(map(len, sequences)),
        "calibration_sha256": hashlib.sha256(json.dumps(sequences).encode()).hexdigest(),
    }


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
